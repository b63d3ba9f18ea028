"""``busrep tail``: print the lines on a channel as they come."""

from __future__ import annotations

import asyncio
import contextlib

import attrs
import click

import busrep
from busrep.cli.options import DURATION, json_option, name_option, print_json, redis_option, run


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


@click.command()
@redis_option()
@name_option()
@click.option("--stream", "streams", multiple=True, help="Only RDATA and POSITION of this stream; may be repeated.")
@click.option("--writer", "writers", multiple=True, help="Only lines of this writer; may be repeated.")
@click.option("--command", "commands", multiple=True, help="Only this command, like RDATA; may be repeated.")
@click.option("--for", "seconds", type=DURATION, help="Stop after this time [default: Ctrl-C].")
@click.option("--lines", "count", type=click.IntRange(min=1), help="Stop after so many lines.")
@json_option()
def tail(
    redis_url: str,
    name: str,
    streams: tuple[str, ...],
    writers: tuple[str, ...],
    commands: tuple[str, ...],
    seconds: float | None,
    count: int | None,
    as_json: bool,
) -> None:
    """Follow a channel and print its lines.

    "<" marks a line received, ">" one that this command sent.
    """
    wanted = Filter(
        streams=frozenset(streams),
        writers=frozenset(writers),
        commands=frozenset(command.upper() for command in commands),
    )
    run(follow(redis_url, name, wanted, seconds, count, as_json))


async def follow(
    redis_url: str, name: str, wanted: Filter, seconds: float | None, count: int | None, as_json: bool
) -> None:
    """Print lines until the time is over or enough were printed."""
    bus = busrep.connect(redis_url, name=name, streams=[], undeclared=True)
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
    async with bus:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await enough.wait()
    if broken is not None:
        raise broken
