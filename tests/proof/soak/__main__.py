"""``python -m tests.proof.soak``: see the package."""

from __future__ import annotations

import argparse
import os
import random
import sys
from typing import Any

from tests.proof.command import run_command
from tests.proof.soak.faults import OVER_TCP
from tests.proof.soak.run import Options, Soak

# What the processes go over: asyncio and Redis, asyncio and a TCP server in front of it, threads and Redis.
OVER = ("redis", "tcp", "sync")
# Violations that the text shows in full; the report in JSON has all.
SHOWN = 20


def text_of(report: dict[str, Any]) -> str:
    """The report for people."""
    names = ("facts", "rows", "redeliveries", "lost", "out_of_order", "extra", "torn")
    lines = [
        f"{'ok' if report['ok'] else 'FAILED'}: seed {report['seed']}, {report['seconds_of_faults']} s of faults, "
        f"{report['seconds']} s in all, {report['redis']}, PostgreSQL {report['postgres']}",
        "",
        f"  {report['facts']} facts, {report['rows']} rows, {report['rows_pruned']} of them pruned; "
        f"{sum(report['processes'].values())} processes, {report['fenced']} of them fenced, "
        f"names won back {report['names_won_back']}",
        f"  gaps found {report['gaps_found']}, filled {report['gaps_filled']}; fetches {report['fetches']}, "
        f"failed {report['fetches_failed']}; reconnects {report['reconnects']}",
        *(
            [f"  cut off by the TCP server: {report['cut_off_by_tcp_server']}"]
            if report["cut_off_by_tcp_server"]
            else []
        ),
        "",
        f"  {report['faults']} faults",
        *(f"  {count:6} {kind}" for kind, count in report["faults_by_kind"].items()),
        "",
        f"  {'reader':16}" + "".join(f"{name:>14}" for name in names),
        *(
            f"  {who:16}" + "".join(f"{numbers[name]:14}" for name in names)
            for who, numbers in report["by_reader"].items()
        ),
    ]
    if not report["ok"]:
        lines += ["", f"  {len(report['violations'])} violations; ledgers, logs and events are in {report['folder']}"]
        lines += [f"  - {violation}" for violation in report["violations"][:SHOWN]]
    return "\n".join(lines)


def main() -> int:
    """Run it; 0 when nothing was lost and nothing else was wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to do harm (default 3)")
    parser.add_argument("--seed", type=int, help="of the order and the dice of the faults (default: any)")
    parser.add_argument("--redis-server", metavar="COMMAND", help="a redis-server or valkey-server to use")
    parser.add_argument("--over", choices=OVER, default="redis", help="or a TCP server, or threads")
    parser.add_argument("--faults", metavar="NAME,...", help=f"only these, of: {', '.join(OVER_TCP)}")
    parser.add_argument("--keep", action="store_true", help="keep ledgers and logs of a run that went well")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--quiet", action="store_true", help="do not tell what happens")
    given = parser.parse_args()
    if given.redis_server:
        os.environ["BUSREP_REDIS_SERVER"] = given.redis_server
    options = Options(
        seconds=given.minutes * 60,
        seed=random.randrange(10**6) if given.seed is None else given.seed,
        kinds=given.faults.split(",") if given.faults else (),
        over=given.over,
        keep=given.keep,
        on_event=lambda text: None if given.quiet else print(text, file=sys.stderr, flush=True),
    )
    return run_command(lambda: Soak(options).run(), text_of, given.json)


if __name__ == "__main__":
    sys.exit(main())
