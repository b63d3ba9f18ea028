"""``busrep publish``: facts from JSON lines on standard input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs
import click
import orjson

from busrep.cli.options import json_option, name_option, redis_option, store_option, streams_option
from busrep.cli.output import say
from busrep.cli.servers import ask, declared_streams, make_store, opened
from busrep.errors import ConfigError, RowError
from busrep.shapes import row_of
from busrep.stores.interface import StoredStream
from busrep.streams import Stream

if TYPE_CHECKING:
    from busrep.sync import Bus

FactRows = tuple[str, list[Any]]
"""The stream and the rows of one fact, which is one line of input."""

# Lines taken in one transaction when they come faster than they are written, and bytes read at a time.
BATCH, PIECE = 500, 65_536


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


def parse_line(number: int, text: bytes, stream: str | None, forms: RowForms) -> FactRows:
    """The fact of a line: a row, when ``stream`` is given, or {"stream": NAME, "row": ROW}, or with "rows": [ROW, ...].

    Raises ConfigError that names the line.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"line {number} is not JSON: {error.msg} (column {error.colno})") from None
    name, rows = _fact(number, value) if stream is None else (stream, [value])
    try:
        return name, [forms.row(name, row) for row in rows]
    except (ConfigError, RowError) as error:
        raise ConfigError(f"line {number}: {error}") from None


def _fact(number: int, value: Any) -> FactRows:
    match value:
        case {"stream": str(name), "row": row, **rest} if not rest:
            return name, [row]
        case {"stream": str(name), "rows": [*rows], **rest} if rows and not rest:
            return name, rows
    raise ConfigError(
        f'line {number} must be {{"stream": NAME, "row": ROW}} or {{"stream": NAME, "rows": [ROW, ...]}}, '
        "or a row alone with --stream NAME"
    )


def batches(file: BinaryIO) -> Iterator[list[tuple[int, bytes]]]:
    """The lines that are not blank, with their numbers, as soon as they are there; at most BATCH at a time. Raises what
    reading raises, after all lines before that."""
    number, rest, ended = 0, b"", False
    while not ended:
        piece = file.read1(PIECE)  # type: ignore[attr-defined]
        *lines, rest = (rest + piece).split(b"\n")
        if ended := not piece:
            lines = [rest]
        found = [(n, line) for n, line in enumerate(lines, number + 1) if line.strip()]
        number += len(lines)
        for start in range(0, len(found), BATCH):
            yield found[start : start + BATCH]


@attrs.define
class Published:
    """What was written: counts, and the last ID per stream."""

    facts: int = 0
    rows: int = 0
    last: dict[str, int] = attrs.field(factory=dict)

    def write(self, bus: Bus, facts: Iterable[FactRows]) -> None:
        """Consecutive facts of one row and one stream go in one transaction."""
        for (name, single), group in groupby(facts, key=lambda fact: (fact[0], len(fact[1]) == 1)):
            stream, found = bus.streams[name], [rows for _, rows in group]
            if single:
                ids = list(bus.publish(stream, [row for (row,) in found]))
            else:
                ids = [_write_fact(bus, stream, rows) for rows in found]
            self.facts, self.rows = self.facts + len(ids), self.rows + sum(map(len, found))
            self.last[name] = ids[-1]


def _write_fact(bus: Bus, stream: Stream[Any], rows: Iterable[Any]) -> int:
    with bus.write(stream) as fact:
        for row in rows:
            fact.add(row)
    return fact.id


def read_facts(source: BinaryIO, stream: str | None, forms: RowForms, done: Published) -> Iterator[list[FactRows]]:
    """The facts which may go in one transaction: all lines of them are looked at before any is written.

    Raises ConfigError for the first bad line, and for input that cannot be read; it says how much is ``done``.
    """
    try:
        for batch in batches(source):
            try:
                facts = [parse_line(number, text, stream, forms) for number, text in batch]
            except ConfigError as error:
                first = batch[0][0]
                raise ConfigError(
                    f"{error} (nothing from line {first} on is published; facts published before it: {done.facts})"
                ) from None
            yield facts
    except OSError as error:
        raise ConfigError(
            f"standard input cannot be read to its end: {error.strerror} (facts published: {done.facts})"
        ) from None


@click.command()
@redis_option()
@store_option(required=True)
@name_option()
@click.option("--writer", default="busrep-publish", show_default=True, help="The writer's name; one process each.")
@click.option("--stream", help="Every line is a row of this stream.")
@streams_option()
@json_option()
def publish(store_url: str, stream: str | None, declared: tuple[str, ...], as_json: bool, **role: Any) -> None:
    """Write facts from JSON lines on standard input.

    A line is {"stream": NAME, "row": ROW}, or {"stream": NAME, "rows": [ROW, ...]} for several rows in one fact, or
    with --stream a row alone. A row is an array of its fields, or an object of the values by field name. It is checked
    against the row class that --streams declares, else against the fields that the table knows of the stream. The
    streams must be known to the table ("busrep db init").
    """
    from busrep import sync  # of the commands this one alone needs it

    if sys.stdin is None:
        raise ConfigError("standard input is closed: the lines are read from there")
    streams = {one.name: one for one in declared_streams(declared)}
    forms = RowForms(streams, ask(opened(make_store(store_url)), lambda store: store.stored_streams()))
    redis_url, done, names = role.pop("redis_url"), Published(), set[str]()
    with contextlib.ExitStack() as stack:
        for facts in read_facts(sys.stdin.buffer, stream, forms, done):
            # A writer registers for its streams and no others: readers wait for whoever is registered.
            if more := {name for name, _ in facts} - names:
                stack.close()
                names |= more
                found = [forms.stream(one) for one in sorted(names)]
                bus = stack.enter_context(sync.connect(redis_url, store=store_url, streams=found, **role))
            done.write(bus, facts)
    ends = ", ".join(f"{one} at {position}" for one, position in done.last.items())
    text = f"published {done.facts} facts, {done.rows} rows{': ' if ends else ''}{ends}"
    say(attrs.asdict(done), text, as_json=as_json)
