"""``busrep demo``: writers, readers, kills and cuts on real servers, every row compared at the end."""

from __future__ import annotations

import contextlib
import secrets
import signal
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from busrep.cli.demo_run import DemoRun, Slot
from busrep.cli.demo_table import prepared
from busrep.cli.options import json_option
from busrep.cli.output import print_json, print_table
from busrep.cli.servers import check_redis, run
from busrep.errors import ConfigError
from busrep.stores import split_store_url
from busrep.testing.servers import start_redis
from busrep.urls import shown_url


@click.command()
@click.option("--redis", metavar="URL", help="Use this Redis [default: start one, and restart it in the middle].")
@click.option("--store", metavar="URL", help="Use this server or file's folder [default: a file of its own].")
@click.option("--facts", default=50_000, show_default=True, type=click.IntRange(min=1), help="Facts to write.")
@click.option("--writers", default=2, show_default=True, type=click.IntRange(1, 64), help="Writer processes.")
@click.option("--readers", default=2, show_default=True, type=click.IntRange(1, 64), help="Reader processes.")
@json_option()
def demo(as_json: bool, **options: Any) -> None:
    """Show that nothing is lost: writers, readers, and harm done to both.

    Starts writer and reader processes, kills some with -9, cuts links, restarts Redis, rolls transactions back;
    then compares what each reader handled with the table. Without options it brings its own Redis and an SQLite
    file. A given server is left as it was: only the demo's own connections are cut, and what it writes is a schema
    of PostgreSQL, or an SQLite file, of its own, and removed; BUSREP_REDIS and BUSREP_STORE are not looked at. Exit
    status 1 if anything was lost or out of order.
    """
    with contextlib.ExitStack() as stack:
        summary = _prepared(stack, quiet=as_json, **options).run()
    if as_json:
        print_json(summary)
    else:
        rows = [(key.replace("_", " "), value) for key, value in summary.items() if isinstance(value, (int, float))]
        print_table("busrep demo", ("", "count"), [row for row in rows if row[0] != "ok"])
        columns = ("reader", *(name.replace("_", " ") for name in next(iter(summary["by_reader"].values()))))
        print_table("By reader", columns, [(who, *one.values()) for who, one in summary["by_reader"].items()])
        for text in summary["not_reached"]:
            click.echo(f"not reached: {text}")
        click.echo("Nothing was lost." if summary["ok"] else "SOMETHING WAS LOST OR OUT OF ORDER.")
    if not summary["ok"]:
        raise click.exceptions.Exit(1)


def _prepared(
    stack: contextlib.ExitStack, *, redis: str | None, store: str | None, quiet: bool, **counts: int
) -> DemoRun:
    # SIGTERM does as Ctrl-C does: children are ended and files removed on the way out.
    before: Any = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    stack.callback(signal.signal, signal.SIGTERM, before)
    started, name = time.monotonic(), f"demo-{secrets.token_hex(4)}"

    def show(text: str) -> None:
        if not quiet:
            click.echo(f"{time.monotonic() - started:6.1f} s  {text}", err=True)

    # The files of the run are beside a given SQLite file.
    given = store or f"sqlite:///{quote(tempfile.gettempdir())}/demo.db"
    kind, place = split_store_url(given)
    if kind == "memory":
        raise ConfigError("the demo's processes share a table: --store sqlite:///file.db or postgresql://...")
    beside = Path(place).parent if kind == "sqlite" else None
    made = tempfile.TemporaryDirectory(prefix="busrep-demo-", dir=beside, ignore_cleanup_errors=True)
    folder = Path(stack.enter_context(made)).resolve()
    if kind == "sqlite":
        given = f"sqlite:///{quote(str(folder))}/demo.db"
    database = stack.enter_context(prepared(given, name.replace("-", "_")))
    restart = None
    if redis is None:
        server = stack.enter_context(start_redis())
        redis, restart = server.url, server.restart
    run(check_redis(redis))
    show(f"Redis: {shown_url(redis)}, table: {shown_url(database)}")
    return DemoRun(
        name=name, redis=redis, store=database, folder=folder, restart_redis=restart, facts=counts["facts"], show=show,
        writers=[Slot("writer", f"{name}-writer-{n + 1}") for n in range(counts["writers"])],
        # Some save their position with what they did (exactly-once), the others a little later.
        readers=[Slot("reader", f"{name}-reader-{n + 1}", exactly_once=n % 2 == 0) for n in range(counts["readers"])],
    )  # fmt: skip
