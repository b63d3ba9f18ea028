"""The mutation score: ``python -m tests.mutation`` applies each bug of tests/mutants.py and runs what should catch it.

Each mutant gets a copy of the tree. There the package must import and carry a fact from a writer to a reader, for a bug
that breaks everything proves nothing; then runs of the simulator look for it, and, if they do not find it, the tests
that the mutant names. First of all, every check must pass on the tree as it is. Exit status 1 when a mutant survives,
2 when a check cannot be relied on.
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
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from .mutants import MUTANTS, SIMULATOR, Mutant

ROOT = Path(__file__).parent.parent
COPIED = ("busrep", "tests", "pyproject.toml", "README.md", "docs")

# What any mutant must still do: a fact reaches its reader while nothing goes wrong.
SMOKE = "test_fakeredis.py::test_facts_reach_readers"

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
        """JSON-able."""
        return {
            "name": self.mutant.name,
            "rule": self.mutant.rule,
            "harm": self.mutant.harm,
            "state": self.state,
            "caught": [attrs.asdict(one) for one in self.caught],
            "missed": self.missed,
            "trouble": self.trouble,
        }


@attrs.frozen
class Options:
    """Of one call: how many seeds, which kinds of checks, and whether to run those left once a mutant is caught."""

    seeds: int = 2_000
    simulator: bool = True
    tests: bool = True
    all: bool = False


# -- a mutated copy -------------------------------------------------------------------------------------------


def mutated(mutant: Mutant, package: Path) -> dict[Path, str]:
    """The files of ``package`` that the mutant changes, with their new text. Raises ValueError if it does not fit."""
    texts: dict[Path, str] = {}
    for edit in mutant.edits:
        path = package / edit.file
        text = texts.get(path) or path.read_text()
        if (found := text.count(edit.old)) != 1:
            raise ValueError(f"{mutant.name}: found {found} times in {edit.file}: {edit.old!r}")
        texts[path] = text.replace(edit.old, edit.new)
    return texts


def copy_tree(target: Path) -> None:
    """Copy what the checks need, without compiled files: they must never be those of another copy."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, target / name)


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
    environment = {**os.environ, "PYTHONPATH": str(tree)}
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
    ended = run(
        tree,
        ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--basetemp", str(tree / "tmp"), *names],
        deadline,
    )
    if ended.code == 0:
        return None
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
    arguments = ["-m", "busrep.testing.simulate", "--seeds", str(seeds), "--jobs", "1", "--stop-on-failure", "--json"]
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


def try_mutant(mutant: Mutant, options: Options) -> Result:
    """Apply one mutant to a copy of the tree, and run its checks."""
    result = Result(mutant)
    with tempfile.TemporaryDirectory(prefix="busrep-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        try:
            for path, text in mutated(mutant, tree / "busrep").items():
                path.write_text(text)
            check_import(tree)
            if options.simulator and mutant.simulated:
                caught = run_simulator(tree, options.seeds)
                if caught is not None:
                    run_tests(tree, [SMOKE], deadline=SMOKE_SECONDS)
                note(result, SIMULATOR, caught)
            if options.tests and (options.all or not result.caught):
                # With --all each one by itself: a mutant names only tests that fail.
                for tests in [[one] for one in mutant.tests] if options.all else filter(None, [mutant.tests]):
                    note(result, " ".join(tests), run_tests(tree, [SMOKE, *tests], hangs=mutant.hangs))
        except (CannotTell, ValueError) as error:
            result.trouble = str(error)
    return result


def note(result: Result, check: str, caught: Caught | None) -> None:
    """Add what a check came to."""
    if caught is None:
        result.missed.append(check)
    else:
        result.caught.append(caught)


def baseline(mutants: Sequence[Mutant], options: Options) -> str | None:
    """What is wrong with the checks themselves: one that fails without any mutation. None: nothing."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    with tempfile.TemporaryDirectory(prefix="busrep-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        try:
            check_import(tree)
            caught = run_tests(tree, [SMOKE, *(tests if options.tests else ())], deadline=1_800)
            if caught is None and options.simulator and any(mutant.simulated for mutant in mutants):
                caught = run_simulator(tree, options.seeds)
        except CannotTell as error:
            return str(error)
    return None if caught is None else f"without any mutation {caught.by} fails: {caught.what} (seed {caught.seeds})"


# -- reports --------------------------------------------------------------------------------------------------


def score(results: Sequence[Result]) -> str:
    """One line."""
    results = [one for one in results if one.state != "not run"]
    caught = sum(bool(one.caught) for one in results)
    simulated = [one for one in results if one.first(tests=False)]
    return (
        f"{caught} of {len(results)} mutants caught: {100 * caught / max(1, len(results)):.0f} %; "
        f"{len(simulated)} of them by the simulator"
    )


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
        "Rules are those of [protocol.md](protocol.md); bugs and checks stand in `tests/mutants.py`. Written by",
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
    if not args.no_baseline and (trouble := baseline(chosen, options)) is not None:
        print(trouble, file=sys.stderr)
        return 2
    printing = threading.Lock()

    def one(mutant: Mutant) -> Result:
        result = try_mutant(mutant, options)
        name, rule, state, simulator, test = columns(result)
        with printing:
            print(f"{state:<8} {rule:<5} {name:<58} {simulator:<40} {test}", flush=True)
            if options.all and result.missed:
                print(f"         not by {', '.join(result.missed)}", flush=True)
        return result

    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, chosen))
    print(score(results))
    if args.json is not None:
        args.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(results, args.seeds))
    states = {result.state for result in results}
    return 2 if "error" in states else 1 if "SURVIVED" in states else 0


if __name__ == "__main__":
    sys.exit(main())
