"""``busrep publish``: facts from JSON lines on standard input."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, BinaryIO

import attrs
import click
import orjson

import busrep
from busrep.cli.db import declared_streams, make_store, streams_option
from busrep.cli.options import json_option, name_option, print_json, redis_option, run, store_option
from busrep.errors import ConfigError, RowError
from busrep.shapes import row_of
from busrep.stores.interface import StoredStream
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


@attrs.frozen
class RowForms:
    """What the rows of each stream are: as --streams declares it, else as the store keeps it."""

    declared: Mapping[str, Stream[Any]]
    stored: Mapping[str, StoredStream]

    def stream(self, name: str) -> Stream[Any]:
        """The stream to write. Raises ConfigError for one whose rows cannot be written rightly."""
        if name in self.declared:
            return self.declared[name]
        table = self.stored[name].table if name in self.stored else None
        if self.declared or table is not None:
            kept = f" (it is kept in the table {table})" if table is not None else ""
            raise ConfigError(f"stream {name!r} is not among those of --streams{kept}: declare it there")
        return Stream(name)

    def row(self, name: str, value: Any) -> Any:
        """The row that a JSON value stands for: an array, or an object of the values by field name. Raises ConfigError
        or RowError for one that could not be written, or that does not fit the row class or the stored fields. Without
        a row class nobody knows what its converters and validators refuse: such fields are stored as "any"."""
        stream = self.stream(name)
        payload = Stream(name).encode(value)
        if stream.row_type is not None:
            row = stream.decode_named(value) if isinstance(value, dict) else stream.decode([payload])[0]
            stream.encode(row)  # a converter may give what has no form in JSON
            return row
        fields = self.stored[name].fields if name in self.stored else None
        if fields is None:
            return value
        try:
            return row_of(fields, value)
        except ValueError as error:
            raise ConfigError(f"stream {name!r}: {error}") from None


def parse_line(number: int, text: bytes, stream: str | None, forms: RowForms) -> InputLine:
    """A row, when ``stream`` is given, or {"stream": ..., "row": ...} or {"stream": ..., "rows": [...]}.

    Raises ConfigError that names the line.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"line {number} is not JSON: {error.msg} (column {error.colno})") from None
    name, rows = _fact(number, value) if stream is None else (stream, [value])
    try:
        return InputLine(number, name, [forms.row(name, row) for row in rows])
    except (ConfigError, RowError) as error:
        raise ConfigError(f"line {number}: {error}") from None


def _fact(number: int, value: Any) -> tuple[str, list[Any]]:
    match value:
        case {"stream": str(name), "row": row, **rest} if not rest:
            return name, [row]
        case {"stream": str(name), "rows": [*rows], **rest} if rows and not rest:
            return name, rows
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
        self._lines: queue.Queue[tuple[int, bytes] | Exception | None] = queue.Queue(4 * BATCH)
        self._there = asyncio.Event()
        self._ended = False
        self._failed: Exception | None = None
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for item in self._items():
            self._lines.put(item)
            try:
                loop.call_soon_threadsafe(self._there.set)
            except RuntimeError:
                return  # the loop is closed, and with it all interest in further lines

    def _items(self) -> Iterator[tuple[int, bytes] | Exception | None]:
        """The lines that are not blank, with their numbers; then None, or what went wrong: nobody waits for ever."""
        try:
            yield from ((n, line) for n, line in enumerate(blocking_lines(self._file), 1) if line.strip())
        except Exception as error:
            yield error
        else:
            yield None

    async def batch(self) -> list[tuple[int, bytes]]:
        """At least one line, at most BATCH; an empty list at the end of the input. Raises what reading it raised, after
        all lines before that."""
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
            if isinstance(item, tuple):
                found.append(item)
            else:
                self._ended, self._failed = True, item
        if self._failed is not None and not found:
            raise self._failed
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


async def copy(source: BinaryIO, connect: Connect, stream: str | None, forms: RowForms) -> Published:
    """Publish all lines. Raises ConfigError for the first bad one; of the lines read with it nothing is committed."""
    done, lines = Published(), StandardInput(source)
    names: set[str] = set() if stream is None else {stream}
    batch = await next_batch(lines, stream, forms, done)
    while batch:
        # A writer registers for its streams and no others: readers wait for whoever is registered.
        names |= {line.stream for line in batch}
        async with connect(names) as bus:
            while {line.stream for line in batch} <= names:
                await done.write(bus, batch)
                batch = await next_batch(lines, stream, forms, done)
                if not batch:
                    return done
    return done


async def next_batch(lines: StandardInput, stream: str | None, forms: RowForms, done: Published) -> list[InputLine]:
    """The next lines, which may go in one transaction: all of them are looked at before any is written."""
    try:
        batch = await lines.batch()
    except OSError as error:
        raise ConfigError(
            f"standard input cannot be read to its end: {error.strerror} (facts published: {done.facts})"
        ) from None
    try:
        return [parse_line(number, text, stream, forms) for number, text in batch]
    except ConfigError as error:
        raise ConfigError(
            f"{error} (nothing from line {batch[0][0]} on is published; facts published before it: {done.facts})"
        ) from None


async def stored_streams(store_url: str) -> dict[str, StoredStream]:
    """What the store keeps of each stream. Raises SchemaError, Unavailable."""
    store = make_store(store_url, [])
    await store.open()
    try:
        return await store.stored_streams()
    finally:
        await store.close()


@click.command()
@redis_option()
@store_option(required=True)
@name_option()
@click.option("--writer", default="busrep-publish", show_default=True, help="The writer's name; one process each.")
@click.option("--stream", help="Every line is a row of this stream.")
@streams_option()
@json_option()
def publish(
    redis_url: str,
    store_url: str,
    name: str,
    writer: str,
    stream: str | None,
    declared: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write facts from JSON lines on standard input.

    A line is {"stream": NAME, "row": ROW}, or {"stream": NAME, "rows": [ROW, ...]} for several rows in one fact, or
    with --stream a row alone. A row is an array of its fields, or an object of the values by field name. It is checked
    against the row class that --streams declares, else against the fields that the table knows of the stream. The
    streams must be known to the table ("busrep db init").
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed: the lines are read from there")
    streams = {one.name: one for one in declared_streams(declared)}

    async def work() -> Published:
        forms = RowForms(streams, await stored_streams(store_url))

        def connect(names: Iterable[str]) -> busrep.Bus:
            found = [forms.stream(one) for one in sorted(names)]
            return busrep.connect(redis_url, name=name, store=store_url, writer=writer, streams=found)

        return await copy(sys.stdin.buffer, connect, stream, forms)

    done = run(work())
    summary = {"facts": done.facts, "rows": done.rows, "last": done.last}
    if as_json:
        print_json(summary)
    else:
        ends = ", ".join(f"{one} at {position}" for one, position in done.last.items())
        click.echo(f"published {done.facts} facts, {done.rows} rows{': ' if ends else ''}{ends}")
