"""``busrep publish``: facts from JSON lines on standard input."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, BinaryIO

import attrs
import click
import orjson

import busrep
from busrep.cli.options import (
    json_option,
    name_option,
    print_json,
    redis_option,
    run,
    store_option,
)
from busrep.errors import ConfigError
from busrep.streams import Stream

Connect = Callable[[Iterable[str]], busrep.Bus]

# Lines taken in one transaction when they come faster than they are written.
BATCH = 500


@attrs.frozen
class InputLine:
    """One line of input: the rows of one fact."""

    number: int
    stream: str
    rows: list[Any]


def parse_line(number: int, text: bytes, stream: str | None) -> InputLine:
    """A row, when ``stream`` is given, or {"stream": ..., "row": ...} or {"stream": ..., "rows": [...]}.

    Raises ConfigError that names the line.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"line {number} is not JSON: {error.msg} (column {error.colno})") from None
    if stream is not None:
        return InputLine(number, stream, [value])
    match value:
        case {"stream": str(name), "row": row, **rest} if not rest:
            return InputLine(number, name, [row])
        case {"stream": str(name), "rows": [*rows], **rest} if rows and not rest:
            return InputLine(number, name, rows)
    raise ConfigError(
        f'line {number} must be {{"stream": NAME, "row": ROW}} or {{"stream": NAME, "rows": [ROW, ...]}}, '
        "or a row alone with --stream NAME"
    )


def blocking_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, each as soon as it is there."""
    try:
        descriptor = file.fileno()
    except OSError:  # not a real file
        yield from file
        return
    # Past Python's buffer: the interpreter could not end while a thread holds that one's lock.
    rest = b""
    while piece := os.read(descriptor, 65_536):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


class StandardInput:
    """The lines of a blocking file, read in a thread; ``batch`` gives what is there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # The thread waits while it is full: input may be longer than memory.
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(4 * BATCH)
        self._there = asyncio.Event()
        self._ended = False
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        numbered = ((n, line) for n, line in enumerate(blocking_lines(self._file), 1) if line.strip())
        for item in chain(numbered, [None]):
            self._lines.put(item)
            try:
                loop.call_soon_threadsafe(self._there.set)
            except RuntimeError:
                return  # the loop is closed, and with it all interest in further lines

    async def batch(self) -> list[tuple[int, bytes]]:
        """At least one line, at most BATCH; an empty list at the end of the input."""
        found: list[tuple[int, bytes]] = []
        while not self._ended and len(found) < BATCH:
            try:
                item = self._lines.get_nowait()
            except queue.Empty:
                if found:
                    break
                self._there.clear()
                if self._lines.empty():  # nothing came since: what comes now sets the event
                    await self._there.wait()
                continue
            if item is None:
                self._ended = True
            else:
                found.append(item)
        return found


@attrs.define
class Published:
    """What was written: counts, and the last ID per stream."""

    facts: int = 0
    rows: int = 0
    last: dict[str, int] = attrs.field(factory=dict)

    async def write(self, bus: busrep.Bus, lines: list[InputLine]) -> None:
        """Consecutive facts of one row and one stream go in one transaction."""
        for (name, single), group in groupby(lines, key=lambda line: (line.stream, len(line.rows) == 1)):
            stream = bus.streams[name]
            if single:
                rows = [line.rows[0] for line in group]
                self._count(name, len(rows), await bus.publish(stream, rows))
                continue
            for line in group:
                async with bus.write(stream) as fact:
                    for row in line.rows:
                        fact.add(row)
                self._count(name, len(line.rows), [fact.id])

    def _count(self, name: str, rows: int, ids: Sequence[int]) -> None:
        self.facts, self.rows = self.facts + len(ids), self.rows + rows
        self.last[name] = ids[-1]


async def copy(source: BinaryIO, connect: Connect, stream: str | None) -> Published:
    """Publish all lines. Raises ConfigError for the first bad one; those before it were published."""
    done, lines = Published(), StandardInput(source)
    names: set[str] = set() if stream is None else {stream}
    batch, bad = parse(await lines.batch(), stream)
    while batch or bad:
        # A writer registers for its streams and no others: readers wait for whoever is registered.
        names |= {line.stream for line in batch}
        if names:
            async with connect(names) as bus:
                while {line.stream for line in batch} <= names:
                    await done.write(bus, batch)
                    if bad is not None:
                        raise ConfigError(f"{bad} (facts published before it: {done.facts})") from None
                    batch, bad = parse(await lines.batch(), stream)
                    if not batch and bad is None:
                        return done
        elif bad is not None:
            raise bad
    return done


def parse(lines: list[tuple[int, bytes]], stream: str | None) -> tuple[list[InputLine], ConfigError | None]:
    """The lines before the first bad one, and its error."""
    parsed: list[InputLine] = []
    for number, text in lines:
        try:
            parsed.append(parse_line(number, text, stream))
        except ConfigError as error:
            return parsed, error
    return parsed, None


@click.command()
@redis_option()
@store_option(required=True)
@name_option()
@click.option("--writer", default="busrep-publish", show_default=True, help="The writer's name; one process each.")
@click.option("--stream", help="Every line is a row of this stream.")
@json_option()
def publish(redis_url: str, store_url: str, name: str, writer: str, stream: str | None, as_json: bool) -> None:
    """Write facts from JSON lines on standard input.

    A line is {"stream": NAME, "row": ROW}, or {"stream": NAME, "rows": [ROW, ...]} for several rows in one fact,
    or with --stream a row alone. The streams must be known to the table ("busrep db init --stream NAME").
    """

    def connect(names: Iterable[str]) -> busrep.Bus:
        streams: list[Stream[Any]] = [Stream(one) for one in sorted(names)]
        return busrep.connect(redis_url, name=name, store=store_url, writer=writer, streams=streams)

    done = run(copy(sys.stdin.buffer, connect, stream))
    summary = {"facts": done.facts, "rows": done.rows, "last": done.last}
    if as_json:
        print_json(summary)
    else:
        ends = ", ".join(f"{one} at {position}" for one, position in done.last.items())
        click.echo(f"published {done.facts} facts, {done.rows} rows{': ' if ends else ''}{ends}")
