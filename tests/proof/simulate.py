"""``python -m tests.proof.simulate``: many deployments simulated, each from a seed, and what broke.

A failing seed is played again with a trace, shrunk, and shown. ``--seed N`` plays one, ``--scenario FILE`` what was
written with ``--out``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import orjson

from tests.proof.sim.run import Outcome, Scenario, draw, shrink, simulate
from tests.support.children import end_with_parent

# Seeds that a worker process takes at a time.
CHUNK = 20


@attrs.define
class Total:
    """What all runs came to."""

    runs: int = 0
    facts: int = 0
    handled: int = 0
    gaps: int = 0
    virtual_seconds: float = 0.0
    faults: dict[str, int] = attrs.field(factory=dict)
    failed: list[dict[str, Any]] = attrs.field(factory=list)

    def add(self, seed: int, outcome: Outcome) -> None:
        """One more run."""
        failed = [{"seed": seed, **violation.as_json()} for violation in outcome.violations]
        self.merge(Total(1, outcome.facts, outcome.handled, outcome.gaps, outcome.seconds, outcome.faults, failed))

    def merge(self, other: Total) -> None:
        """The runs of a worker."""
        self.runs += other.runs
        self.facts += other.facts
        self.handled += other.handled
        self.gaps += other.gaps
        self.virtual_seconds += other.virtual_seconds
        for kind, count in other.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        self.failed += other.failed


def run_seeds(seeds: range, stop: bool) -> Total:
    """Simulate these seeds in this process; ``stop``: only up to the first that fails."""
    total = Total()
    for seed in seeds:
        total.add(seed, simulate(seed))
        if stop and total.failed:
            break
    return total


def run_all(first: int, count: int, jobs: int, *, stop: bool) -> Iterator[Total]:
    """Simulate seeds in ``jobs`` processes; yields what each chunk came to, in the order of the seeds."""
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield run_seeds(chunk, stop)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool:
        try:
            yield from pool.map(run_seeds, chunks, [stop] * len(chunks))
        finally:
            pool.shutdown(cancel_futures=True)


def traced(scenario: Scenario) -> tuple[Outcome, list[str]]:
    """Play a scenario and give the lines of its trace."""
    lines: list[str] = []

    def note(at: float, who: str, text: str) -> None:
        lines.append(f"{at:8.4f} {who:<8} {text}")

    return simulate(scenario, note), lines


def show(scenario: Scenario, *, shrinking: bool, out: Path | None) -> int:
    """Play one scenario with its trace; shrink it when it fails. The exit code."""
    outcome, lines = traced(scenario)
    if outcome.violations and shrinking:
        scenario = shrink(scenario, outcome.violations[0].invariant)
        outcome, lines = traced(scenario)
    for role in scenario.roles:
        print(f"# {role.name}: {role.kind} {dict(role.options)}")
    print(f"# settings: {dict(scenario.settings)}")
    print("\n".join(lines))
    for violation in outcome.violations:
        print(f"VIOLATED {violation.invariant}: {violation.text}")
    if outcome.violations and out is not None:
        out.write_bytes(orjson.dumps(scenario.as_json(), option=orjson.OPT_INDENT_2))
        print(f"the scenario is in {out}: --scenario plays it")
    return 1 if outcome.violations else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds to simulate (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per processor)")
    parser.add_argument("--seed", type=int, help="play one seed, with its trace")
    parser.add_argument("--scenario", type=Path, help="play a scenario from a file, with its trace")
    parser.add_argument("--no-shrink", action="store_true", help="show a failing seed as it is")
    parser.add_argument("--out", type=Path, help="write the shrunk scenario of a failing seed here")
    parser.add_argument("--stop-on-failure", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--json", action="store_true", help="one line of JSON, nothing else")
    args = parser.parse_args()
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if args.scenario is not None:
        try:
            scenario = Scenario.from_json(orjson.loads(args.scenario.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{args.scenario} holds no scenario: {error}")
        return show(scenario, shrinking=not args.no_shrink, out=args.out)
    if args.seed is not None:
        return show(draw(args.seed), shrinking=not args.no_shrink, out=args.out)
    return many(args)


def many(args: argparse.Namespace) -> int:
    """Simulate many seeds and report; interrupted, report what has been run."""
    total, began, interrupted = Total(), time.monotonic(), False
    try:
        watch(total, run_all(args.first, args.seeds, args.jobs, stop=args.stop_on_failure), args)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - began
    if args.json:
        result = {"seeds": total.runs, "violations": total.failed, "seconds": seconds, "facts": total.facts}
        result |= {"handled": total.handled, "gaps": total.gaps, "faults": total.faults}
        print(orjson.dumps(result).decode())
        return 130 if interrupted else 1 if total.failed else 0
    rate, virtual = total.runs / seconds, total.virtual_seconds / 3600
    print(
        f"{total.runs} runs in {seconds:.1f} s ({rate:.1f} a second, {args.jobs} processes), {virtual:.1f} h simulated:"
    )
    print(f"{total.facts} facts, {total.handled} rows handled, {total.gaps} gaps found")
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(total.faults.items())))
    failed = list(dict.fromkeys(one["seed"] for one in total.failed))
    print(f"{len(failed)} runs with violations")
    if interrupted:
        return 130
    if failed:
        print(f"\nseed {failed[0]}, shrunk:")
        show(draw(failed[0]), shrinking=not args.no_shrink, out=args.out)
    return 1 if failed else 0


def watch(total: Total, parts: Iterator[Total], args: argparse.Namespace) -> None:
    """Add the parts to the total as they come; say what breaks at once, and now and then how far it is."""
    said = float("-inf")
    for part in parts:
        total.merge(part)
        shown: set[int] = set()
        for one in part.failed if not args.json else ():
            if one["seed"] not in shown:
                shown.add(one["seed"])
                print(f"seed {one['seed']}: {one['invariant']}: {one['text'][:300]}", flush=True)
        if not args.json and time.monotonic() - said > 10:
            said = time.monotonic()
            print(f"{total.runs} runs", flush=True)
        if args.stop_on_failure and total.failed:
            return


if __name__ == "__main__":
    sys.exit(main())
