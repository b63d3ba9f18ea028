"""``busrep demo``: writers, readers, kills and cuts on real servers, every row compared at the end."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from busrep.cli.demo_run import DemoPlan, DemoRun
from busrep.cli.options import DURATION, json_option, print_json, print_table, run

# What the summary shows, in words.
SUMMARY = {
    "facts": "facts in the table",
    "rows": "rows in the table",
    "rows_handled": "rows handled by all readers",
    "seconds": "seconds",
    "rows_per_second": "rows written and handled everywhere, per second",
    "rollbacks": "transactions rolled back on purpose",
    "kills": "processes killed (-9)",
    "links_cut": "readers' links cut",
    "redis_restarts": "restarts of Redis",
    "reconnects": "reconnects",
    "gaps_found": "gaps found",
    "gaps_filled": "gaps filled",
    "duplicates_dropped": "duplicates dropped",
    "redeliveries": "facts handled again after a kill (at-least-once)",
    "lost": "rows lost",
    "out_of_order": "facts out of order",
    "extra": "facts handled that were rolled back",
    "torn": "facts torn apart",
    "broken_transactions": "application rows without their fact, or the reverse",
}


class DemoScreen:
    """What a person sees during the run: a line per event; on a terminal, two progress bars."""

    def __init__(self, facts: int, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._written = self._progress.add_task("written", total=facts)
        self._handled = self._progress.add_task("handled by every reader", total=facts)

    def __enter__(self) -> DemoScreen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def event(self, text: str) -> None:
        """Print one event with the time."""
        self._progress.console.print(f"{time.monotonic() - self._started:6.1f} s  {text}", highlight=False)

    def progress(self, written: int, handled: int) -> None:
        """Move the bars."""
        self._progress.update(self._written, completed=written)
        self._progress.update(self._handled, completed=handled)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM does as Ctrl-C does: children are ended and files removed on the way out."""

    def end(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command()
@click.option("--redis", "redis_url", metavar="URL", help="Use this Redis [default: start one].")
@click.option("--store", "store_url", metavar="URL", help="Use this table [default: an SQLite file of its own].")
@click.option("--facts", default=50_000, show_default=True, type=click.IntRange(min=1), help="Facts to write.")
@click.option("--writers", default=2, show_default=True, type=click.IntRange(1, 64), help="Writer processes.")
@click.option("--readers", default=2, show_default=True, type=click.IntRange(1, 64), help="Reader processes.")
@click.option(
    "--restart-redis",
    metavar="COMMAND",
    help="Shell command that restarts the Redis of --redis, run in the middle.",
)
@click.option("--keep", is_flag=True, help="Keep the run's facts, tables and records.")
@click.option(
    "--timeout", default="60s", show_default=True, type=DURATION, help="How long readers may take to the end."
)
@json_option()
def demo(as_json: bool, **options: Any) -> None:
    """Show that nothing is lost: writers, readers, and harm done to both.

    Starts writer and reader processes, kills some with -9, cuts links, restarts Redis, rolls transactions back;
    then compares what each reader handled with the table. Without options it brings its own Redis and an SQLite
    file. A given server is left as it was: only the demo's own connections are cut, and what it wrote is
    removed; BUSREP_REDIS and BUSREP_STORE are not looked at. Exit status 1 if anything was lost or out of order.
    """
    if options["restart_redis"] and not options["redis_url"]:
        raise click.UsageError("--restart-redis is for the Redis of --redis; one of its own the demo restarts anyway")
    plan = DemoPlan(
        redis=options["redis_url"],
        store=options["store_url"],
        facts=options["facts"],
        writers=options["writers"],
        readers=options["readers"],
        restart_redis=options["restart_redis"],
        keep=options["keep"],
        timeout=options["timeout"],
    )
    with _ending_in_order(), DemoScreen(plan.facts, quiet=as_json) as screen:
        this = DemoRun(plan, screen.event, screen.progress)
        summary = run(this.run())
        if plan.keep:
            screen.event(f"kept: {this.folder}, and everything named demo-{this.run_id}")
    if as_json:
        print_json(summary)
    else:
        _print(summary)
    if not summary["ok"]:
        raise click.exceptions.Exit(1)


def _print(summary: dict[str, Any]) -> None:
    print_table("busrep demo", ("", "count"), [(text, summary[key]) for key, text in SUMMARY.items()])
    columns = ("reader", "facts", "rows", "handled again", "rows lost", "out of order", "extra", "torn")
    print_table("By reader", columns, [(who, *one.values()) for who, one in summary["by_reader"].items()])
    for text in summary["not_reached"]:
        click.echo(f"not reached: {text}")
    click.echo("Nothing was lost." if summary["ok"] else "SOMETHING WAS LOST OR OUT OF ORDER.")
