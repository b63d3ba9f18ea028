"""``busrep positions`` and ``busrep tail``: listen to any channel that speaks the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import click

import busrep
from busrep.cli.options import DURATION, json_option, name_option, redis_option, store_option, streams_option
from busrep.cli.output import print_json, print_table, say
from busrep.cli.servers import declared_streams, run


@click.command()
@redis_option()
@name_option()
@click.option("--for", "seconds", default="5s", show_default=True, type=DURATION, help="How long to listen.")
@json_option()
def positions(redis_url: str, name: str, seconds: float, as_json: bool) -> None:
    """Follow a channel and print the position of each writer.

    Needs no table and no declared streams: it asks the writers where they are, follows them, and prints {"stream":
    {"writer": position}}. A writer may take a heartbeat (2 s) to answer.
    """

    async def listen() -> tuple[dict[str, dict[str, int]], Any]:
        async with busrep.connect(redis_url, name=name, streams=[], undeclared=True) as bus:
            await asyncio.sleep(seconds)
            return bus.positions(), bus.statistics()["reader"]

    found, reader = run(listen())
    if as_json:
        print_json(found)
        return
    behind = reader["needed_catch_up"]
    print_table(
        f"Positions on {name}",
        ("stream", "writer", "position", "rows were missing"),
        [
            (stream, writer, position, writer in behind.get(stream, ()))
            for stream, writers in sorted(found.items())
            for writer, position in sorted(writers.items())
        ],
    )
    click.echo(f"lines not understood: {reader['parse_errors']}")


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
def tail(as_json: bool, seconds: float | None, count: int | None, handled: Path | None, **options: Any) -> None:
    """Follow a channel and print its lines.

    "<" marks a line received, ">" one that this command sent. With --handled it is a reader as an application has them,
    which loses nothing, and begins at the oldest row: it needs --store, --reader and --stream.
    """
    streams, store, reader = options["streams"], options["store_url"], options["reader"]
    role: dict[str, Any] = {"streams": [], "undeclared": True}
    if handled is not None:
        if not (store and reader and streams):
            raise click.UsageError("--handled needs --store, --reader and --stream")
        known = {stream.name: stream for stream in declared_streams(options["declared"])}
        found = [known.get(one) or busrep.Stream[Any](one) for one in dict.fromkeys(streams)]
        role = {"streams": found, "store": store, "reader": reader}
    elif reader is not None:
        raise click.UsageError("--reader goes with --handled")
    commands = [command.upper() for command in options["commands"]]
    lines = Lines(streams=streams, writers=options["writers"], commands=commands, count=count, as_json=as_json)
    bus = busrep.connect(options["redis_url"], name=options["name"], **role)
    bus.on_line(lines.show)
    run(follow(bus, lines, seconds, handled))
    if lines.broken is not None:
        raise lines.broken


@attrs.define(kw_only=True)
class Lines:
    """Prints lines, until ``count`` are printed, or nobody takes them any more. ``streams``, ``writers``, ``commands``:
    those of which lines are printed; an empty one lets all pass. Lines without a stream pass no stream filter."""

    streams: Collection[str] = ()
    writers: Collection[str] = ()
    commands: Collection[str] = ()
    count: int | None = None
    as_json: bool = False
    printed: int = 0
    broken: OSError | None = None
    enough: asyncio.Event = attrs.field(factory=asyncio.Event)

    def passes(self, line: str) -> bool:
        """Whether to print this line."""
        command, *rest = line.split(" ", 3)
        if self.commands and command not in self.commands:
            return False
        stream, writer = (rest[0], rest[1]) if command in ("RDATA", "POSITION") and len(rest) > 1 else ("", "")
        if command == "NAME" and rest:
            writer = rest[0]
        return (not self.streams or stream in self.streams) and (not self.writers or writer in self.writers)

    def show(self, direction: str, channel: str, line: bytes) -> None:
        """Print a line, if it passes the filter."""
        text = line.decode(errors="backslashreplace")
        if self.enough.is_set() or not self.passes(text):
            return
        try:
            found = {"direction": direction, "channel": channel, "line": text}
            say(found, f"{direction} {text}", as_json=self.as_json)
        except OSError as error:  # `busrep tail | head` has seen enough
            self.broken = error
        self.printed += 1
        if self.printed == self.count or self.broken is not None:
            self.enough.set()


async def follow(bus: busrep.Bus, lines: Lines, seconds: float | None, handled: Path | None) -> None:
    """Print lines until the time is over or enough were printed; note in the file ``handled`` which facts came."""

    async def note(report: busrep.ReaderReport) -> None:
        async for batch in bus.follow(*bus.streams):
            report.add(batch)
        lines.enough.set()

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(bus)
        report = None if handled is None else stack.enter_context(busrep.ReaderReport(handled))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                noting = None if report is None else group.create_task(note(report))
                await lines.enough.wait()
                if noting is not None:
                    noting.cancel()
