"""The list of known bugs fits the source, and a few of them are really applied and caught."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import CodeType

import pytest

from . import mutation, names
from .mutant import SIMULATOR, Edit, Mutant
from .mutants import ALL as MUTANTS
from .mutation import ROOT, CannotTell, Caught, Ended, Journal, Options, Result, as_markdown, mutated, score, try_mutant

LEAST = 40

# The bugs that the list must hold in any case, beside one of each rule.
MUST_HAVE = {
    "no-chain-check",
    "replicate-before-subscribe-is-confirmed",
    "batch-keyed-by-stream-alone",
    "connected-mark-per-stream",
    "advance-before-publish",
    "position-from-the-sequence",
    "ceiling-taken-for-proof",
    "two-statement-page",
    "step-over-a-gap-after-retries",
    "advance-mid-batch",
    "no-fencing-check",
    "positions-saved-before-handling",
}

# What goes wrong in the reference system (section 3): R4 is rule 9.6's chain, R6 to R8 share one cause.
UPSTREAM = {"9.6", "R6", "R9"}

TESTS_ALONE = Options(simulator=False)


def named(name: str) -> Mutant:
    return next(one for one in MUTANTS if one.name == name)


def test_there_are_enough_and_names_are_unique() -> None:
    assert len(MUTANTS) >= LEAST
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    assert len({one.edits for one in MUTANTS}) == len(MUTANTS)


def test_every_rule_and_every_named_bug_is_there() -> None:
    rules = {one.rule for one in MUTANTS}
    assert {f"9.{number}" for number in range(1, 16)} - rules == set()
    assert UPSTREAM - rules == set()
    assert {one.name for one in MUTANTS} >= MUST_HAVE


@cache
def as_it_is(path: Path) -> CodeType:
    return compile(path.read_text(), str(path), "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_every_mutant_still_applies_and_compiles(mutant: Mutant) -> None:
    changed = mutated(mutant, ROOT / "busrep")
    assert changed
    for path, text in changed.items():
        assert compile(text, str(path), "exec") != as_it_is(path)
    assert mutant.harm.endswith(".")
    assert mutant.checks


def test_every_test_that_a_mutant_names_exists() -> None:
    assert sorted({test for mutant in MUTANTS for test in mutant.tests if not names.exists(test)}) == []


@pytest.mark.parametrize(
    "name",
    ["no-chain-check", "dropped-rows-are-announced-as-none", "the-own-position-is-the-largest-finished-id"],
)
def test_a_known_bug_is_caught(name: str) -> None:
    result = try_mutant(named(name), TESTS_ALONE)
    assert result.state == "caught", result
    assert result.caught[0].what in named(name).tests or result.caught[0].what.partition("[")[0] in named(name).tests


def harmless(*edits: Edit) -> Mutant:
    return Mutant(name="made-up", rule="9", harm="None.", edits=edits, checks=("core/test_reader.py::test_case[R4]",))


def test_a_mutant_that_no_check_minds_survives() -> None:
    result = try_mutant(
        harmless(Edit("reader.Reader", "  # native writers only", "  # native writers only, mutated")), TESTS_ALONE
    )
    assert (result.state, result.missed) == ("SURVIVED", ["core/test_reader.py::test_case[R4]"])


@pytest.mark.parametrize(
    ("edit", "trouble"),
    [
        (Edit("IdGenerator", "no such text", ""), "found 0 times"),
        (Edit("IdGenerator", "class IdGenerator:", "class Renamed:"), "does not import"),
        (
            Edit("asyncio.writing.Fact.__aenter__", "        await self._writing.room()\n", "        raise OSError\n"),
            "not even an undisturbed fact",
        ),
    ],
    ids=["does not apply", "does not import", "breaks everything"],
)
def test_what_is_no_catch(edit: Edit, trouble: str) -> None:
    result = try_mutant(harmless(edit), TESTS_ALONE)
    assert result.state == "error"
    assert trouble in (result.trouble or "")


def test_the_report_says_which_check_caught_which_bug() -> None:
    first, second, third = MUTANTS[:3]
    results = [
        Result(first, [Caught(SIMULATOR, "no row lost", 17)]),
        Result(second, [Caught("tests", "core/test_ids.py::test_case[G3]")]),
        Result(third, missed=["simulator"]),
    ]
    assert score(results) == "2 of 3 mutants caught: 66.6 %; 1 of them by the simulator"
    page = as_markdown(results, 2_000)
    assert f"| {first.name} | {first.rule} | {first.harm} | no row lost | 17 |  |" in page
    assert f"| {second.name} | {second.rule} | {second.harm} |  |  | `core/test_ids.py::test_case[G3]` |" in page
    assert f"| {third.name} | {third.rule} | {third.harm} |  |  | **SURVIVED** |" in page


def test_a_score_is_exact() -> None:
    caught = [Result(one, [Caught(SIMULATOR, "no row lost", 1)]) for one in MUTANTS[:315]]
    assert score(caught).startswith("315 of 315 mutants caught: 100 %")
    assert score([*caught, Result(MUTANTS[315], trouble="tests ran out of time")]).startswith(
        "315 of 316 mutants caught: 99.6 %"
    )
    half = Result(MUTANTS[315], [Caught("tests", "one")], trouble="another check ran out of time")
    assert score([*caught, half]).startswith("315 of 316 mutants caught: 99.6 %")
    assert score([]).startswith("0 of 0 mutants caught: 0.0 %")


TIMED_OUT = (
    "Failed: Timeout (>120.0s) from pytest-timeout.\nFAILED tests/core/test_reader.py::test_case[R4] - Failed: Timeout"
)


@pytest.mark.parametrize("ended", [Ended(None, "", "", 300.0), Ended(1, TIMED_OUT, "", 121.0)], ids=["all", "one test"])
def test_running_out_of_time_is_no_catch_but_of_what_hangs(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "run", lambda *_: ended)
    with pytest.raises(CannotTell, match="ran out of time"):
        mutation.run_tests(ROOT, ["core/test_reader.py"])
    assert mutation.run_tests(ROOT, ["core/test_reader.py"], hangs=True) is not None


def test_results_are_kept_for_one_commit(tmp_path: Path) -> None:
    caught = Result(MUTANTS[0], [Caught("tests", "core/test_ids.py::test_case[G3]", None, 1.0)])
    failed = Result(MUTANTS[1], trouble="tests ran out of time")
    journal = Journal(tmp_path / "journal", {"commit": "a", "seeds": 9})
    journal.read()
    journal.write(caught.as_json())
    journal.write(failed.as_json())
    with journal.path.open("a") as file:  # type: ignore[union-attr]
        file.write('{"name": "cut sho')
    again = Journal(journal.path, {"commit": "a", "seeds": 9})
    again.read()
    assert [Result.from_json(mutant, again.results[mutant.name]) for mutant in MUTANTS[:2]] == [caught, failed]
    again.write(Result(MUTANTS[2]).as_json())
    again.read()
    assert list(again.results) == [mutant.name for mutant in MUTANTS[:3]]
    for other in ({"commit": "b", "seeds": 9}, {"commit": "a", "seeds": 10}):
        with pytest.raises(CannotTell, match="has results of"):
            Journal(journal.path, other).read()
