"""The mutation score: ``python -m tests.mutation`` applies each bug of `tests/*/mutants.py`, and
runs what should catch it.

Each mutant gets a copy of the tree. There the package must import and carry a fact from a writer to a reader, for a bug
that breaks everything proves nothing; then runs of the simulator look for it, and, if they do not find it, the tests
that the mutant names. Every check must pass on the tree as it is, too. Exit status 1 when a mutant survives, 2 when a
check cannot be relied on.

All of them: ``TMPDIR=/dev/shm python -m tests.mutation --jobs 2 --resume FILE --markdown docs/mutation.md``. FILE keeps
each result with its commit, and a call that was interrupted goes on from there, on the same commit only. An error stays
one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import attrs

from . import anchors
from .anchors import AnchorError
from .mutant import SIMULATOR, Mutant
from .mutants import ALL as MUTANTS

ROOT = Path(__file__).parent.parent
COPIED = ("busrep", "tests", "pyproject.toml", "README.md", "docs")

# What any mutant must still do: a fact reaches its reader while nothing goes wrong.
SMOKE = "asyncio/test_fakeredis.py::test_facts_reach_readers"

# Imports first what any mutant must still import: pytest prints nothing where that fails.
IMPORTED = "import sys, busrep.stores.postgres, pytest; sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = ("-c", IMPORTED, "-x", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--tb=short")

# Deadlines of one mutant's checks, seconds.
SMOKE_SECONDS, TESTS_SECONDS = 60.0, 300.0
SECONDS_A_SEED = 2.0  # twenty times what a seed takes


class CannotTell(Exception):
    """A check did not run as it should, so that its result says nothing."""


@attrs.frozen
class Caught:
    """Which check caught a mutant: a violated invariant and the number of seeds it took, or a failed test."""

    by: str
    what: str
    seeds: int | None = None
    seconds: float = 0.0


@attrs.define
class Result:
    """What became of one mutant. ``missed``: checks that should have caught it and did not."""

    mutant: Mutant
    caught: list[Caught] = attrs.field(factory=list)
    missed: list[str] = attrs.field(factory=list)
    trouble: str | None = None

    @property
    def state(self) -> str:
        """In one word."""
        if self.trouble:
            return "error"
        return "caught" if self.caught else "SURVIVED" if self.missed else "not run"

    def first(self, *, tests: bool) -> Caught | None:
        """The simulator's catch, or the tests'."""
        return next((one for one in self.caught if (one.by != SIMULATOR) == tests), None)

    def as_json(self) -> dict[str, Any]:
        """JSON-able; `from_json` is the inverse."""
        return {
            "name": self.mutant.name,
            "rule": self.mutant.rule,
            "harm": self.mutant.harm,
            "state": self.state,
            "caught": [attrs.asdict(one) for one in self.caught],
            "missed": self.missed,
            "trouble": self.trouble,
        }

    @classmethod
    def from_json(cls, mutant: Mutant, given: dict[str, Any]) -> Result:
        """What `as_json` returned."""
        return cls(mutant, [Caught(**one) for one in given["caught"]], given["missed"], given["trouble"])


@attrs.frozen
class Options:
    """Of one call: how many seeds, which kinds of checks, and whether to run those left once a mutant is caught."""

    seeds: int = 2_000
    simulator: bool = True
    tests: bool = True
    all: bool = False


# -- a mutated copy -------------------------------------------------------------------------------------------


def mutated(mutant: Mutant, package: Path) -> dict[Path, str]:
    """The files of ``package`` that the mutant changes, with their new text. Raises AnchorError if it does not fit."""
    changes: dict[Path, list[tuple[int, int, str]]] = {}
    for edit in mutant.edits:
        place = anchors.find(anchors.index(package), edit.where)
        code = place.path.read_text()[place.start : place.end]
        start, end, new = anchors.replacement(code, edit.old, edit.new)
        changes.setdefault(place.path, []).append((place.start + start, place.start + end, new))
    texts: dict[Path, str] = {}
    for path, found in changes.items():
        text = path.read_text()
        for start, end, new in sorted(found, reverse=True):
            text = text[:start] + new + text[end:]
        texts[path] = text
    return texts


def copy_tree(target: Path, source: Path = ROOT) -> None:
    """Copy what the checks need. Compiled files only of one that `prepare` made: no others surely fit."""
    ignored = shutil.ignore_patterns("__pycache__") if source == ROOT else None
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=ignored)
        else:
            shutil.copy2(source / name, target / name)


def prepare(tree: Path, tests: Iterable[str]) -> None:
    """Make ``tree`` a copy of the source in which what these tests import is compiled: its copies start faster."""
    copy_tree(tree)
    check_import(tree)
    names = [f"tests/{name}" for name in tests]
    ended = run(tree, [*PYTEST, "--collect-only", *names], TESTS_SECONDS)
    if ended.code != 0:
        raise CannotTell(f"the tests cannot be collected: {(ended.output + ended.errors).strip()[-300:]}")


# -- running a check ------------------------------------------------------------------------------------------


@attrs.frozen
class Ended:
    """How a command ended; ``code`` None: it ran out of time, and was killed with its children."""

    code: int | None
    output: str
    errors: str
    seconds: float


def run(tree: Path, arguments: Sequence[str], seconds: float) -> Ended:
    """Run ``python ARGUMENTS`` in a tree, in a process group of its own."""
    began = time.monotonic()
    # Without the plugins of other packages pytest starts in half the time. Compiled files are of this tree alone.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ended(code, output, errors, time.monotonic() - began)


def check_import(tree: Path) -> None:
    """CannotTell unless the copy imports, and it is the copy that is imported."""
    ended = run(tree, ["-c", "import busrep.stores.postgres; print(busrep.__file__)"], SMOKE_SECONDS)
    if ended.code != 0:
        raise CannotTell(f"it does not import: {ended.errors.strip()[-300:]}")
    if not Path(ended.output.strip()).is_relative_to(tree):
        raise CannotTell(f"another package was imported: {ended.output.strip()}")


def run_tests(
    tree: Path, tests: Iterable[str], *, hangs: bool = False, deadline: float = TESTS_SECONDS
) -> Caught | None:
    """Run tests up to the first that fails. Raises CannotTell when they do not run, or end by a timeout alone."""
    names = [f"tests/{name}" for name in tests]
    ended = run(tree, [*PYTEST, "--basetemp", str(tree / "tmp"), *names], deadline)
    if ended.code == 0:
        return None
    if ended.code is not None and not ended.output:
        raise CannotTell(f"it does not import: {ended.errors.strip()[-300:]}")
    timed_out = ended.code is None or re.search(r"Failed: Timeout \(?>", ended.output) is not None
    if timed_out and not hangs:
        raise CannotTell(f"tests ran out of time: {ended.output.strip()[-300:]}")
    if timed_out:
        return Caught("tests", f"{names[-1].removeprefix('tests/')} (never ends)", None, ended.seconds)
    failed = re.search(r"^FAILED tests/(\S.*?)(?: - .*)?$", ended.output, re.MULTILINE)
    if ended.code != 1 or failed is None:
        raise CannotTell(f"pytest ended with {ended.code}: {(ended.output + ended.errors).strip()[-300:]}")
    if failed[1] == SMOKE:
        raise CannotTell("not even an undisturbed fact arrives: too coarse a bug to prove anything")
    return Caught("tests", failed[1], None, ended.seconds)


def run_simulator(tree: Path, seeds: int) -> Caught | None:
    """Simulate up to the first violation. Raises CannotTell when the simulator itself fails."""
    arguments = ["-m", "tests.proof.simulate", "--seeds", str(seeds), "--jobs", "1", "--stop-on-failure", "--json"]
    ended = run(tree, arguments, 30 + SECONDS_A_SEED * seeds)
    if ended.code is None:
        raise CannotTell("the simulator ran out of time")
    if ended.code not in (0, 1):
        raise CannotTell(f"the simulator ended with {ended.code}: {ended.errors.strip()[-300:]}")
    try:
        report = json.loads(ended.output.strip().rpartition("\n")[2])
        violations = report["violations"]
    except (ValueError, KeyError, TypeError):
        raise CannotTell(f"the simulator failed: {(ended.output + ended.errors).strip()[-300:]}") from None
    if not violations:
        return None
    first = min(violations, key=lambda one: one["seed"])
    for one in violations:  # whatever else went wrong for it
        if "NotImplementedError" in one["text"]:
            raise CannotTell(f"the simulator does not know what the mutant asks of it: {one['text'][:300]}")
    return Caught(SIMULATOR, first["invariant"], first["seed"] + 1, ended.seconds)


def try_mutant(mutant: Mutant, options: Options, source: Path = ROOT) -> Result:
    """Apply one mutant to a copy of ``source``, and run its checks."""
    result = Result(mutant)
    with tempfile.TemporaryDirectory(prefix="busrep-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree, source)
        try:
            for name, text in mutated(mutant, source / "busrep").items():
                path = tree / name.relative_to(source)
                path.write_text(text)
                Path(cache_from_source(str(path))).unlink(missing_ok=True)  # it may have the same second and size
            if options.simulator and mutant.simulated:
                caught = run_simulator(tree, options.seeds)
                if caught is not None:
                    run_tests(tree, [SMOKE], deadline=SMOKE_SECONDS)
                note(result, SIMULATOR, caught)
            if options.tests and (options.all or not result.caught):
                # With --all each one by itself: a mutant names only tests that fail.
                for tests in [[one] for one in mutant.tests] if options.all else filter(None, [mutant.tests]):
                    note(result, " ".join(tests), run_tests(tree, [SMOKE, *tests], hangs=mutant.hangs))
        except (CannotTell, AnchorError) as error:
            result.trouble = str(error)
    return result


def note(result: Result, check: str, caught: Caught | None) -> None:
    """Add what a check came to."""
    if caught is None:
        result.missed.append(check)
    else:
        result.caught.append(caught)


def baseline(tests: Sequence[str], seeds: int, source: Path) -> None:
    """Run these tests, or so many seeds, without any mutation. Raises CannotTell if something fails."""
    with tempfile.TemporaryDirectory(prefix="busrep-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree, source)
        caught = run_tests(tree, [SMOKE, *tests], deadline=1_800) if tests else run_simulator(tree, seeds)
    if caught is not None:
        raise CannotTell(f"without any mutation {caught.by} fail: {caught.what} (seed {caught.seeds})")


def needs_spark(test: str) -> bool:
    """Whether a test starts Spark, as most do in these files."""
    return test.startswith(("pipeline/", "cli/test_pipeline"))


def cost(mutant: Mutant) -> tuple[bool, bool, bool]:
    """Greater for a mutant that takes longer: it hangs, needs Spark, or many seeds."""
    return mutant.hangs, any(map(needs_spark, mutant.tests)), mutant.simulated


@attrs.define
class Journal:
    """The results so far, a line of JSON each, behind a line that says of which commit and options they are."""

    path: Path | None
    about: dict[str, Any]
    results: dict[str, dict[str, Any]] = attrs.field(factory=dict)

    def read(self) -> None:
        """Read what is there. Raises CannotTell if it is of another commit or other options."""
        if self.path is None:
            return
        if not self.path.exists():
            self.path.write_text(json.dumps(self.about) + "\n")
        complete, _, _ = self.path.read_text().rpartition("\n")  # the last line may have been cut
        self.path.write_text(complete + "\n")
        about, *results = map(json.loads, complete.splitlines())
        if about != self.about:
            raise CannotTell(f"{self.path} has results of {about}, and this is {self.about}")
        self.results = {one["name"]: one for one in results}

    def write(self, result: dict[str, Any]) -> None:
        """Add one result. One thread calls this."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(result) + "\n")


def commit() -> str:
    """Of the source. Raises CannotTell if it has been changed since."""
    if subprocess.check_output(["git", "status", "--porcelain", "--", *COPIED], cwd=ROOT, text=True):
        raise CannotTell("results can be kept for a commit only: commit what was changed")
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()


# -- reports --------------------------------------------------------------------------------------------------


def score(results: Sequence[Result]) -> str:
    """One line. The share is cut, not rounded: only when all are caught it says 100 %. An error is no catch."""
    results = [one for one in results if one.state != "not run"]
    caught = sum(one.state == "caught" for one in results)
    simulated = [one for one in results if one.first(tests=False)]
    tenths = 1000 * caught // max(1, len(results))
    share = "100" if results and caught == len(results) else f"{tenths // 10}.{tenths % 10}"
    return f"{caught} of {len(results)} mutants caught: {share} %; {len(simulated)} of them by the simulator"


def columns(result: Result) -> tuple[str, str, str, str, str]:
    """name, rule, state, what the simulator says, the failing test."""
    simulator, tests = result.first(tests=False), result.first(tests=True)
    found = f"{simulator.what} after {simulator.seeds}" if simulator else ""
    return result.mutant.name, result.mutant.rule, result.state, found, tests.what if tests else result.trouble or ""


def as_markdown(results: Sequence[Result], seeds: int) -> str:
    """The page that shows the score bug by bug."""
    lines = [
        "# Mutation score",
        "",
        f"{score(results)}.",
        "",
        "Each line is a known bug of this kind of system, applied to the source by itself, and what caught it: the",
        f"invariant that a run of the simulator violated, after how many seeds (of at most {seeds}), or a test.",
        "Rules are those of [protocol.md](protocol.md); bugs and checks stand in `tests/*/mutants.py`. Written by",
        "`python -m tests.mutation --markdown docs/mutation.md`.",
        "",
        "| bug | rule | what would happen | caught by the simulator | seeds | caught by the test |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        simulator, tests = one.first(tests=False), one.first(tests=True)
        what, seeds_needed = (simulator.what, str(simulator.seeds)) if simulator else ("", "")
        test = f"`{tests.what}`" if tests else "" if one.caught else f"**{one.state}**"
        cells = [one.mutant.name, one.mutant.rule, one.mutant.harm, what, seeds_needed, test]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def run_all(chosen: Sequence[Mutant], options: Options, args: argparse.Namespace) -> list[Result]:
    """Try each mutant, and print what became of it. Raises CannotTell if a check fails without any mutation."""
    journal = Journal(args.resume, {"commit": commit(), **attrs.asdict(options)} if args.resume else {})
    journal.read()
    known = journal.results
    results = {one.name: Result.from_json(one, known[one.name]) for one in chosen if one.name in known}
    left = sorted((one for one in chosen if one.name not in results), key=cost, reverse=True)
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests)) if options.tests else []
    spark = [test for test in tests if needs_spark(test)]
    with tempfile.TemporaryDirectory(prefix="busrep-mutants-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        tree = Path(folder)
        prepare(tree, [SMOKE, *tests])
        checks: list[Callable[[], Result | None]] = []
        if not args.no_baseline:
            parts = [[test for test in tests if test not in spark], spark]
            checks += [partial(baseline, part, 0, tree) for part in parts if part]
            if options.simulator and any(mutant.simulated for mutant in chosen):
                checks.append(partial(baseline, (), options.seeds, tree))
        checks += [partial(try_mutant, mutant, options, tree) for mutant in left]
        try:
            for done in as_completed([pool.submit(check) for check in checks]):
                if (result := done.result()) is not None:
                    results[result.mutant.name] = result
                    journal.write(result.as_json())
                    report(result, options)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[mutant.name] for mutant in chosen]


def report(result: Result, options: Options) -> None:
    """Print one line."""
    name, rule, state, simulator, test = columns(result)
    print(f"{state:<8} {rule:<5} {name:<58} {simulator:<40} {test}", flush=True)
    if options.all and result.missed:
        print(f"         not by {', '.join(result.missed)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this mutant, or those of this rule"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument("--seeds", type=int, default=2_000, help="most seeds to simulate per mutant (default 2000)")
    parser.add_argument("--checks", default="simulator,tests", help="simulator, tests, or both (default)")
    parser.add_argument(
        "--all", action="store_true", help="run every check, each by itself, not only up to the first catch"
    )
    parser.add_argument("--no-baseline", action="store_true", help="believe that the checks pass without a mutation")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep results here; leave out those that are there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    args = parser.parse_args(arguments)
    checks = set(args.checks.split(","))
    if not checks <= {SIMULATOR, "tests"} or args.jobs < 1 or args.seeds < 1:
        parser.error("--checks takes simulator, tests or both; --jobs and --seeds at least 1")
    chosen = [one for one in MUTANTS if not args.only or one.name in args.only or one.rule in args.only]
    if missing := set(args.only) - {one.name for one in MUTANTS} - {one.rule for one in MUTANTS}:
        parser.error(f"no mutant, and no rule with one: {', '.join(sorted(missing))}")
    options = Options(args.seeds, SIMULATOR in checks, "tests" in checks, args.all)
    try:
        results = run_all(chosen, options, args)
    except CannotTell as error:
        print(error, file=sys.stderr)
        return 2
    print(score(results))
    if args.json is not None:
        args.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(results, args.seeds))
    states = {result.state for result in results}
    return 2 if "error" in states else 1 if "SURVIVED" in states else 0


if __name__ == "__main__":
    sys.exit(main())
