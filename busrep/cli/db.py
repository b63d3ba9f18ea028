"""``busrep db``: create, describe, prune the tables, and declare them restored; ``busrep lag``: how far readers are."""

from __future__ import annotations

from typing import Any

import click

from busrep.cli.bootstrap import print_bootstraps
from busrep.cli.options import DURATION, json_option, store_option, streams_option
from busrep.cli.output import fail, flat, of_readers, print_json, print_records, print_table, say
from busrep.cli.servers import ask, declared_streams, make_store, opened, run, with_all_streams
from busrep.errors import ConfigError, SchemaError
from busrep.urls import shown_url

# What a store's status names, and the headings over it.
STREAMS = {"stream": "stream", "rows": "rows", "sequence": "last ID given", "table": "table"}
WRITERS = {name: name for name in ("stream", "writer", "position", "floor", "incarnation")}
WRITERS |= {"heard_ago": "last heard", "registered": "registered"}
READERS = {name: name for name in ("reader", "stream", "writer", "position")}
READERS |= {"lag": "behind by", "saved_ago": "saved", "stopped": "stopped"}
SINKS = {name: name for name in ("query", "stream", "writer")}
SINKS |= {"batch": "last batch", "rows": "rows", "last": "up to", "done_ago": "done"}


@click.group()
def db() -> None:
    """The tables: create, look at, prune, declare restored."""


@db.command()
@store_option(required=True)
@click.option("--stream", "names", multiple=True, help="A stream kept in busrep's own table; may be repeated.")
@streams_option()
@click.option("--check", "only_check", is_flag=True, help="Change nothing; exit status 1 if the streams do not fit.")
@click.option(
    "--redefine",
    multiple=True,
    metavar="STREAM",
    help="Store the fields of this stream's row class as declared, whatever was stored; may be repeated.",
)
@json_option()
def init(store_url: str, names: tuple[str, ...], declared: tuple[str, ...], as_json: bool, **how: Any) -> None:
    """Create or migrate the tables, and what the named streams need.

    Does no harm when run again, or by two at once. With --check, for CI: it looks whether the tables, the row classes
    and the columns of the applications' tables are as these streams need them.
    """
    only_check, redefine = how["only_check"], how["redefine"]
    if only_check and redefine:
        raise click.UsageError("--check changes nothing, --redefine does: one at a time")
    streams = declared_streams(declared)
    if unknown := set(redefine) - {stream.name for stream in streams}:
        raise ConfigError(f"--redefine {', '.join(sorted(unknown))}: declare the stream with --streams")

    async def work() -> dict[str, Any]:
        store = make_store(store_url, streams, names)
        if not only_check:
            await store.init(redefine)
        async with opened(store):
            await store.verify()
            return await store.status()

    try:
        found = run(work())
    except (ConfigError, SchemaError) as error:
        if not only_check:
            raise
        fail(str(error), status=1)
    listed = ", ".join(found["streams"]) or "none yet"
    made = {key: found[key] for key in ("schema_version", "epoch")} | {"streams": list(found["streams"])}
    say(made, f"{shown_url(store_url)}: schema {found['schema_version']}, streams: {listed}", as_json=as_json)


@db.command()
@store_option(required=True)
@streams_option()
@json_option()
def status(store_url: str, declared: tuple[str, ...], as_json: bool) -> None:
    """Show streams, writers, readers and their positions."""
    found = ask(opened(make_store(store_url, declared_streams(declared))), lambda store: store.status())
    if as_json:
        print_json(found)
        return
    click.echo(
        f"{found['database']}, schema {found['schema_version']}, epoch {found['epoch']}, "
        f"dead letters: {found['dead_letters']}"
    )
    print_records("Streams", STREAMS, flat(found["streams"], "stream"))
    writers = flat({name: one["writers"] for name, one in found["streams"].items()}, "stream", "writer")
    print_records("Writers", WRITERS, [one | {"heard_ago": one["silent_for"]} for one in writers])
    print_records("Readers", READERS, flat(found["readers"], "reader", "stream", "writer"))
    if found["bootstraps"]:
        print_bootstraps(flat(found["bootstraps"], "reader", "stream"))
    if found["sinks"]:
        print_records("Queries of Spark that write", SINKS, flat(found["sinks"], "query"))
    if found["staged"]:
        click.echo(f"tasks of Spark whose rows are staged, and no facts yet: {found['staged']}")


@db.command()
@store_option(required=True)
@streams_option()
@click.option("--yes", "sure", is_flag=True, help="Do not ask.")
@json_option()
def restored(store_url: str, declared: tuple[str, ...], sure: bool, as_json: bool) -> None:
    """Say that the database was restored to an older state.

    Gives the fact log a new epoch and fences all writers; readers notice and start anew. Run it with the writers
    stopped, or restart them afterwards.
    """
    if not sure:
        asked = f"Fence all writers of {shown_url(store_url)} and make all readers start anew?"
        click.confirm(asked, abort=True, err=True)
    epoch = ask(with_all_streams(store_url, declared_streams(declared)), lambda store: store.restored())
    say({"epoch": epoch}, f"new epoch: {epoch}; restart the writers", as_json=as_json)


@db.command()
@store_option(required=True)
@click.option("--older-than", type=DURATION, help="Delete rows older than this, like 7d.")
@click.option(
    "--keep", type=click.IntRange(min=0), help="Delete all but the last so many rows of each writer; facts stay whole."
)
@click.option(
    "--reader-cap", type=DURATION, help="Readers that saved nothing for longer do not hold rows back [default: ever]."
)
@click.option("--stream", "name", help="Only this stream.")
@streams_option()
@json_option()
def prune(store_url: str, name: str | None, declared: tuple[str, ...], as_json: bool, **bounds: Any) -> None:
    """Delete old rows that no reader needs any more."""
    if bounds["older_than"] is None and bounds["keep"] is None:
        raise click.UsageError("say what to delete: --older-than, --keep or both")
    opening = with_all_streams(store_url, declared_streams(declared), name)
    floors = ask(opening, lambda store: store.prune(stream=name, **bounds))
    if as_json:
        nested: dict[str, dict[str, int]] = {}
        for (stream, writer), floor in floors.items():
            nested.setdefault(stream, {})[writer] = floor
        print_json({"floors": nested})
    elif floors:
        print_table("Pruned", ("stream", "writer", "up to"), [(*key, floor) for key, floor in sorted(floors.items())])
    else:
        click.echo("nothing to delete")


@click.command()
@store_option(required=True)
@click.option("--reader", "wanted", multiple=True, help="Only this reader; may be repeated.")
@click.option("--max", "limit", type=click.IntRange(min=0), help="Exit with 1 if a reader is behind by more.")
@json_option()
def lag(store_url: str, wanted: tuple[str, ...], limit: int | None, as_json: bool) -> None:
    """Show how far readers are behind.

    The lag of a reader at a writer is the distance between its saved position and what the writer proved.
    Positions are IDs of the stream's sequence, so it is at least the number of facts not handled yet. Where a
    reader has stopped, the reason stands beside the position.
    """

    readers = ask(opened(make_store(store_url)), lambda store: store.status())["readers"]
    found = of_readers(flat(readers, "reader", "stream", "writer"), wanted, "position")
    worst = max((at["lag"] for at in found), default=0)
    if as_json:
        print_json({"worst": worst, "readers": [{name: at[name] for name in READERS} for at in found]})
    else:
        print_records("Lag", READERS, found)
    if limit is not None and worst > limit:
        raise click.exceptions.Exit(1)
