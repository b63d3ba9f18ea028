"""Where the rows of a stream lie: busrep's own table, or one the application declared on the stream.

Everything here is pieces of SQL text; which database they are for is the dialect's matter. IDs of a negative stream
are positive inside; an application's table may hold them negative, so there ``id < 0`` and order are turned round.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from busrep.errors import RowError
from busrep.stores.plans import Sql
from busrep.streams import Stream

# SELECTs in one UNION ALL; SQLite takes at most 500. More are nested.
MOST_SELECTS = 400

Span = tuple[str, int, int]
"""Rows of one writer: (writer, after, upto)."""


def quoted(name: str) -> str:
    """A name that `Table` has checked, in double quotes, so that reserved words work."""
    return ".".join(f'"{part}"' for part in name.split("."))


@attrs.frozen
class Backing:
    """The table of one stream. ``id`` ... are quoted column names; ``index`` None: one row per fact."""

    stream: str
    table: str
    id: str
    writer: str
    index: str | None
    columns: tuple[str, ...]
    own: bool
    negative: bool
    definition: Stream[Any]

    @property
    def token(self) -> str:
        """Expression of the ID as busrep counts it."""
        return f"-{self.id}" if self.negative else self.id

    @property
    def top(self) -> str:
        """Aggregate: the highest token."""
        return f"-min({self.id})" if self.negative else f"max({self.id})"

    def of_stream(self) -> tuple[str, list[Any]]:
        """Condition and parameters: rows of this stream."""
        return ("1 = 1", []) if self.own else ("stream = ?", [self.stream])

    def of_writer(self, writer: str) -> tuple[str, list[Any]]:
        """Condition and parameters: rows of this stream and writer."""
        condition, params = self.of_stream()
        return f"{condition} AND {self.writer} = ?", [*params, writer]

    def between(self, after: int, upto: int) -> tuple[str, list[Any]]:
        """Condition and parameters: after < token <= upto."""
        if self.negative:
            return f"{self.id} < ? AND {self.id} >= ?", [-after, -upto]
        return f"{self.id} > ? AND {self.id} <= ?", [after, upto]

    @property
    def by_token(self) -> str:
        """ORDER BY the token alone."""
        return f"{self.id} DESC" if self.negative else self.id

    @property
    def by_row(self) -> str:
        """ORDER BY the token, then the row's place in its fact."""
        return f"{self.by_token}, {self.index}" if self.index else self.by_token

    def payload(self, text: str | bytes) -> bytes:
        """The payload of a row as the table gave it: as it is, or, of an application's table, checked anew."""
        if not self.own:
            return text.encode() if isinstance(text, str) else text
        raw = text.encode() if isinstance(text, str) else text
        return self.definition.encode(self.definition.decode([raw])[0])


def field_types(stream: Stream[Any]) -> dict[str, Any]:
    """Resolved annotations of the row type by field name; {} for an untyped stream."""
    if stream.row_type is None:
        return {}
    return typing.get_type_hints(stream.row_type)


def generic_backing(stream: Stream[Any]) -> Backing:
    """Return where a stream's rows are in busrep's own table."""
    return Backing(
        stream=stream.name, table="busrep_facts", id="id", writer="writer", index="idx", columns=("row",),
        own=False, negative=False, definition=stream,
    )  # fmt: skip


def backing_of(stream: Stream[Any]) -> Backing:
    """The table of a stream."""
    table = stream.table
    if table is None:
        return generic_backing(stream)
    return Backing(
        stream=stream.name, table=quoted(table.name), id=quoted(table.id), writer=quoted(table.writer),
        index=quoted(table.index) if table.index else None, columns=tuple(map(quoted, table.columns)),
        own=True, negative=stream.negative, definition=stream,
    )  # fmt: skip


def columns_of(backing: Backing, payload: bytes) -> list[Any]:
    """The column values of one row; RowError when their number does not fit the table."""
    values = orjson.loads(payload)
    if not isinstance(values, list) or len(values) != len(backing.columns):
        raise RowError(backing.stream, "row", f"does not have the {len(backing.columns)} columns of its table", values)
    return values


def union(backing: Backing, rows: Sequence[Span], columns: str) -> tuple[str, list[Any]]:
    """A query of these columns of these rows, and its parameters; one SELECT a writer, each a range of the index."""
    texts, params = [], []
    for writer, after, upto in rows:
        where, of = backing.of_writer(writer)
        span, limits = backing.between(after, upto)
        texts.append(f"SELECT {columns} FROM {backing.table} WHERE {where} AND {span}")
        params += [*of, *limits]
    groups = [" UNION ALL ".join(texts[at : at + MOST_SELECTS]) for at in range(0, len(texts), MOST_SELECTS)]
    if len(groups) > 1:
        groups = [f"SELECT * FROM ({text}) AS g{at}" for at, text in enumerate(groups)]
    return " UNION ALL ".join(groups), params


def highest_row(backing: Backing) -> Sql:
    """The highest token in the stream's table, 0 without rows."""
    if backing.own:
        return Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table}")
    # One look at the index per writer; every writer has a positions row before its first fact.
    return Sql(
        "SELECT coalesce(max(highest), 0) FROM (SELECT (SELECT max(f.id) FROM busrep_facts f WHERE "
        "f.stream = p.stream AND f.writer = p.writer) AS highest FROM busrep_positions p WHERE p.stream = ?) AS h",
        (backing.stream,),
    )
