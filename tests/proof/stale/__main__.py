"""``python -m tests.proof.stale``: see the package."""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from tests.proof.command import run_command
from tests.proof.stale.faults import FAULTS
from tests.proof.stale.run import Options, Run
from tests.proof.stale.task import WAYS

# Rows of the comparison: what a number is called in the report, and for people.
ROWS = {
    "reads": "reads",
    "hits": "  from the cache",
    "loads": "  from the table",
    "failed": "failed, the table being away",
    "stale": "older than the bound",
    "oldest": "  the oldest, s",
    "behind_at_the_end": "stale at the end, for ever",
}


def text_of(report: dict[str, Any]) -> str:
    """The report for people."""
    ways = report["ways"]
    ages = list(ways[WAYS[0]]["ages"])

    def row(title: str, cells: list[object]) -> str:
        return f"  {title:30}" + "".join(f"{cell:>32}" for cell in cells)

    return "\n".join(
        [
            f"{'ok' if report['ok'] else 'FAILED'}: seed {report['seed']}, {report['seconds_of_faults']} s of faults, "
            f"a bound of {report['bound']:g} s",
            "",
            row("", list(WAYS)),
            *(row(title, [ways[way][name] for way in WAYS]) for name, title in ROWS.items()),
            "",
            row("replaced before the read", ["reads"] * len(WAYS)),
            *(row(f"  {age}", [ways[way]["ages"][age] for way in WAYS]) for age in ages),
            "",
            f"  {sum(report['transactions'].values())} transactions: "
            + ", ".join(f"{count} {kind}" for kind, count in report["transactions"].items()),
            f"  {report['messages_lost']} messages lost, {report['gaps_found']} gaps found, {report['kills']} kills, "
            f"{report['fenced']} fenced, {sum(report['processes'].values())} processes",
            "  caches, as far as reported: " + ", ".join(f"{name} {count}" for name, count in report["caches"].items()),
            f"  {report['faults']} faults: "
            + ", ".join(f"{count} {kind}" for kind, count in report["faults_by_kind"].items()),
            *([""] if report["failed"] else []),
            *(f"  - {why}" for why in report["failed"]),
            *([f"  memory, logs and events are in {report['folder']}"] if report["folder"] else []),
        ]
    )


def main() -> int:
    """Run it; 0 when nothing was stale although it could have been, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.stale", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to do harm, at least (default 3)")
    parser.add_argument("--reads", type=int, default=0, help="and until so many reads were made on each way")
    parser.add_argument("--seed", type=int, help="of the order and the dice of the faults (default: any)")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="seconds; the bound is 1.25 of them (default 2)")
    parser.add_argument("--rate", type=float, default=20_000.0, help="most reads a second of each lane (default 20000)")
    parser.add_argument("--faults", metavar="NAME,...", help=f"only these, of: {', '.join(FAULTS)}")
    parser.add_argument("--broken", action="store_true", help="a cache that ignores its bound: must fail")
    parser.add_argument("--keep", action="store_true", help="keep the logs of a run that went well")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="do not tell what happens")
    given = parser.parse_args()
    options = Options(
        seconds=given.minutes * 60,
        seed=random.randrange(10**6) if given.seed is None else given.seed,
        reads=given.reads,
        heartbeat=given.heartbeat,
        rate=given.rate,
        kinds=given.faults.split(",") if given.faults else (),
        broken=given.broken,
        keep=given.keep,
        on_event=lambda text: None if given.quiet else print(text, file=sys.stderr, flush=True),
    )
    return run_command(lambda: Run(options).run(), text_of, given.json)


if __name__ == "__main__":
    sys.exit(main())
