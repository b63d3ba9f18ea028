"""``busrep tail``: print the lines on a channel as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import click

import busrep
from busrep.cli.db import declared_streams, streams_option
from busrep.cli.options import DURATION, json_option, name_option, print_json, redis_option, run, store_option


@attrs.frozen(kw_only=True)
class Filter:
    """Which lines to print; an empty part lets all pass. Lines without a stream pass no stream filter."""

    streams: frozenset[str] = frozenset()
    writers: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset()

    def passes(self, line: str) -> bool:
        """Whether to print this line."""
        command, *rest = line.split(" ", 3)
        if self.commands and command not in self.commands:
            return False
        stream, writer = (rest[0], rest[1]) if command in ("RDATA", "POSITION") and len(rest) > 1 else ("", "")
        if command == "NAME" and rest:
            writer = rest[0]
        return (not self.streams or stream in self.streams) and (not self.writers or writer in self.writers)


@attrs.frozen(kw_only=True)
class Handling:
    """What makes it a reader of facts, which notes in ``path`` what it has handled."""

    path: Path
    store: str = attrs.field(repr=False)
    reader: str
    streams: tuple[busrep.Stream[Any], ...]


@click.command()
@redis_option()
@name_option()
@click.option("--stream", "streams", multiple=True, help="Only RDATA and POSITION of this stream; may be repeated.")
@click.option("--writer", "writers", multiple=True, help="Only lines of this writer; may be repeated.")
@click.option("--command", "commands", multiple=True, help="Only this command, like RDATA; may be repeated.")
@click.option("--for", "seconds", type=DURATION, help="Stop after this time [default: Ctrl-C].")
@click.option("--lines", "count", type=click.IntRange(min=1), help="Stop after so many lines.")
@json_option()
@click.option(
    "--handled",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read the facts of --stream, too, and note them in this file, for 'busrep pipeline audit --handled'.",
)
@click.option("--reader", help="With --handled: under this name its positions are saved, to go on after a restart.")
@store_option(required=False)
@streams_option()
def tail(
    redis_url: str,
    name: str,
    streams: tuple[str, ...],
    writers: tuple[str, ...],
    commands: tuple[str, ...],
    seconds: float | None,
    count: int | None,
    as_json: bool,
    handled: Path | None,
    reader: str | None,
    store_url: str | None,
    declared: tuple[str, ...],
) -> None:
    """Follow a channel and print its lines.

    "<" marks a line received, ">" one that this command sent. With --handled it is a reader as an application has them,
    which loses nothing, and begins at the oldest row: it needs --store, --reader and --stream.
    """
    handling = None
    if handled is not None:
        if not (store_url and reader and streams):
            raise click.UsageError("--handled needs --store, --reader and --stream")
        known = {stream.name: stream for stream in declared_streams(declared)}
        found = tuple(known.get(one) or busrep.Stream[Any](one) for one in dict.fromkeys(streams))
        handling = Handling(path=handled, store=store_url, reader=reader, streams=found)
    elif reader is not None:
        raise click.UsageError("--reader goes with --handled")
    wanted = Filter(
        streams=frozenset(streams),
        writers=frozenset(writers),
        commands=frozenset(command.upper() for command in commands),
    )
    run(follow(redis_url, name, wanted, seconds, count, as_json, handling))


async def follow(
    redis_url: str,
    name: str,
    wanted: Filter,
    seconds: float | None,
    count: int | None,
    as_json: bool,
    handling: Handling | None = None,
) -> None:
    """Print lines until the time is over or enough were printed."""
    if handling is None:
        bus = busrep.connect(redis_url, name=name, streams=[], undeclared=True)
    else:
        bus = busrep.connect(
            redis_url, name=name, streams=handling.streams, store=handling.store, reader=handling.reader
        )
    enough = asyncio.Event()
    printed, broken = 0, None

    def show(direction: str, channel: str, line: bytes) -> None:
        nonlocal printed, broken
        text = line.decode(errors="backslashreplace")
        if enough.is_set() or not wanted.passes(text):
            return
        try:
            if as_json:
                print_json({"direction": direction, "channel": channel, "line": text})
            else:
                click.echo(f"{direction} {text}")
        except OSError as error:  # `busrep tail | head` has seen enough
            broken = error
        printed += 1
        if printed == count or broken is not None:
            enough.set()

    bus.on_line(show)
    async with bus, noted(bus, handling, enough):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await enough.wait()
    if broken is not None:
        raise broken


@contextlib.asynccontextmanager
async def noted(bus: busrep.Bus, handling: Handling | None, enough: asyncio.Event) -> AsyncIterator[None]:
    """Meanwhile note what is handled; ``enough`` is set when that ends. Raises what it ended with."""
    if handling is None:
        yield
        return
    with busrep.ReaderReport(handling.path) as report:

        async def note() -> None:
            try:
                async for batch in bus.follow(*handling.streams):
                    report.add(batch)
            finally:
                enough.set()

        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            noting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await noting
