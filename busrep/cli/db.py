"""``busrep db``: create, describe, prune the tables, and declare them restored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from busrep.cli.options import DURATION, Decorator, fail, json_option, print_json, print_table, run, store_option
from busrep.errors import ConfigError, SchemaError
from busrep.stores import open_store
from busrep.stores.declared import NOT_THERE, declared_in
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry, Stream
from busrep.urls import shown_url


def streams_option() -> Decorator:
    """``--streams MODULE:NAME`` or ``--streams MODULE``, which may be repeated."""
    return click.option(
        "--streams",
        "declared",
        multiple=True,
        metavar="MODULE[:NAME]",
        help="Where the application declares its streams, with row classes and tables. A module alone means all its "
        "streams. May be repeated.",
    )


def declared_streams(places: Sequence[str]) -> list[Stream[Any]]:
    """The streams of all --streams. Raises ConfigError when they are not there."""
    if not places:
        return []
    where = ",".join(places)
    try:
        return declared_in(where)
    except (ConfigError, *NOT_THERE) as error:
        raise ConfigError(f"--streams {where}: {error}") from None


def make_store(url: str, declared: Iterable[Stream[Any]], names: Iterable[str] = ()) -> AsyncStore:
    """A store of these streams, declared ones first."""
    streams = {stream.name: stream for stream in declared}
    for name in names:
        streams.setdefault(name, Stream(name))
    return open_store(url, Registry(streams.values()))


async def open_with_all_streams(url: str, declared: list[Stream[Any]], wanted: str | None = None) -> AsyncStore:
    """An open store that knows every stream its tables list. ConfigError for one whose table it cannot know, and
    when ``wanted`` is none of them."""
    store = make_store(url, declared)
    await store.open()
    try:
        listed = (await store.status())["streams"]
    finally:
        await store.close()
    known = {stream.name for stream in declared}
    for name, details in listed.items():
        if name not in known and details["table"] not in (None, "busrep_facts"):
            raise ConfigError(f"stream {name!r} is kept in the table {details['table']}: pass --streams MODULE:NAME")
    if wanted is not None and wanted not in known | set(listed):
        raise ConfigError(f"no stream {wanted!r} is known here (there are: {', '.join(sorted(listed)) or 'none'})")
    store = make_store(url, declared, listed)
    await store.open()
    return store


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
def init(
    store_url: str,
    names: tuple[str, ...],
    declared: tuple[str, ...],
    only_check: bool,
    redefine: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create or migrate the tables, and what the named streams need.

    Does no harm when run again, or by two at once. With --check, for CI: it looks whether the tables, the row classes
    and the columns of the applications' tables are as these streams need them.
    """
    if only_check and redefine:
        raise click.UsageError("--check changes nothing, --redefine does: one at a time")

    streams = declared_streams(declared)
    if unknown := set(redefine) - {stream.name for stream in streams}:
        raise ConfigError(f"--redefine {', '.join(sorted(unknown))}: declare the stream with --streams")

    async def work() -> dict[str, Any]:
        store = make_store(store_url, streams, names)
        try:
            if not only_check:
                await store.init(redefine)
            await store.open()
            await store.verify()
            return await store.status()
        finally:
            await store.close()

    try:
        found = run(work())
    except (ConfigError, SchemaError) as error:
        if not only_check:
            raise
        fail(str(error), status=1)
    if as_json:
        print_json({key: found[key] for key in ("schema_version", "epoch")} | {"streams": list(found["streams"])})
    else:
        listed = ", ".join(found["streams"]) or "none yet"
        click.echo(f"{shown_url(store_url)}: schema {found['schema_version']}, streams: {listed}")


@db.command()
@store_option(required=True)
@streams_option()
@json_option()
def status(store_url: str, declared: tuple[str, ...], as_json: bool) -> None:
    """Show streams, writers, readers and their positions."""

    async def work() -> dict[str, Any]:
        store = make_store(store_url, declared_streams(declared))
        await store.open()
        try:
            return await store.status()
        finally:
            await store.close()

    found = run(work())
    if as_json:
        print_json(found)
        return
    click.echo(
        f"{found['database']}, schema {found['schema_version']}, epoch {found['epoch']}, "
        f"dead letters: {found['dead_letters']}"
    )
    streams = found["streams"].items()
    print_table(
        "Streams",
        ("stream", "rows", "last ID given", "table"),
        [(name, one["rows"], one["sequence"], one["table"]) for name, one in streams],
    )
    print_table(
        "Writers",
        ("stream", "writer", "position", "floor", "incarnation", "last heard", "registered"),
        [
            (
                name,
                writer,
                at["position"],
                at["floor"],
                at["incarnation"],
                ago(at["silent_for"]),
                yes(at["registered"]),
            )
            for name, one in streams
            for writer, at in one["writers"].items()
        ],
    )
    print_table(
        "Readers",
        ("reader", "stream", "writer", "position", "behind by", "saved", "stopped"),
        [
            (reader, name, writer, at["position"], at["lag"], ago(at["saved_ago"]), at["stopped"] or "")
            for reader, streams in found["readers"].items()
            for name, writers in streams.items()
            for writer, at in writers.items()
        ],
    )
    if found["bootstraps"]:
        print_table(
            "Bootstraps",
            ("reader", "stream", "state", "parts", "rows", "saved", "full syncs within the hour", "reason"),
            [
                (reader, name, at["state"], f"{at['parts']}/{at['parts_total']}", at["rows"], ago(at["saved_ago"]),
                 at["syncs"], at["reason"])
                for reader, streams in found["bootstraps"].items()
                for name, at in streams.items()
            ],
        )  # fmt: skip
    if found["sinks"]:
        print_table(
            "Queries of Spark that write",
            ("query", "stream", "writer", "last batch", "rows", "up to", "done"),
            [
                (query, at["stream"], at["writer"], at["batch"], at["rows"], at["last"], ago(at["done_ago"]))
                for query, at in found["sinks"].items()
            ],
        )
    if found["staged"]:
        click.echo(f"tasks of Spark whose rows are staged, and no facts yet: {found['staged']}")


def ago(seconds: float) -> str:
    """A time in the past, for a person."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.1f} s ago"


def yes(value: bool) -> str:
    """For a person."""
    return "yes" if value else "no"


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
        click.confirm(
            f"Fence all writers of {shown_url(store_url)} and make all readers start anew?",
            abort=True,
            err=True,
        )

    async def work() -> str:
        store = await open_with_all_streams(store_url, declared_streams(declared))
        try:
            return await store.restored()
        finally:
            await store.close()

    epoch = run(work())
    if as_json:
        print_json({"epoch": epoch})
    else:
        click.echo(f"new epoch: {epoch}; restart the writers")


@db.command()
@store_option(required=True)
@click.option("--older-than", type=DURATION, help="Delete rows older than this, like 7d.")
@click.option("--keep", type=click.IntRange(min=0), help="Delete all but the last so many IDs of each writer.")
@click.option(
    "--reader-cap",
    type=DURATION,
    help="Readers that saved nothing for longer do not hold rows back [default: ever].",
)
@click.option("--stream", "name", help="Only this stream.")
@streams_option()
@json_option()
def prune(
    store_url: str,
    older_than: float | None,
    keep: int | None,
    reader_cap: float | None,
    name: str | None,
    declared: tuple[str, ...],
    as_json: bool,
) -> None:
    """Delete old rows that no reader needs any more."""
    if older_than is None and keep is None:
        raise click.UsageError("say what to delete: --older-than, --keep or both")

    async def work() -> dict[tuple[str, str], int]:
        store = await open_with_all_streams(store_url, declared_streams(declared), name)
        try:
            return await store.prune(older_than=older_than, keep=keep, reader_cap=reader_cap, stream=name)
        finally:
            await store.close()

    floors = run(work())
    if as_json:
        nested: dict[str, dict[str, int]] = {}
        for (stream, writer), floor in floors.items():
            nested.setdefault(stream, {})[writer] = floor
        print_json({"floors": nested})
    elif floors:
        print_table("Pruned", ("stream", "writer", "up to"), [(*key, floor) for key, floor in sorted(floors.items())])
    else:
        click.echo("nothing to delete")
