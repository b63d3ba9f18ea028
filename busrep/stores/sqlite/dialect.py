"""SQLite's pieces of SQL (3.35 or newer: RETURNING)."""

# ruff: noqa: S608, ARG002 - table and column names are quoted, values are parameters; one interface for both databases
from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from busrep.stores.dialect import MOVES, NO_BOOTSTRAP, Backing, Dialect, columns_of, no_position_above
from busrep.stores.plans import NoSuchTable, Plan, Sql

# Timestamps are Unix seconds: a number that compares and subtracts without parsing.
NOW = "((julianday('now') - 2440587.5) * 86400.0)"

# See schema.py.
WORDS = {
    "sqlite": "", "when": "REAL", "now": NOW, "number": "INTEGER", "plain": " WITHOUT ROWID", "hot": " WITHOUT ROWID",
    "unlogged": "", "bytewise": "",
}  # fmt: skip


class SqliteDialect(Dialect):
    """A `Dialect`. Rows need no locks: BEGIN IMMEDIATE is the lock."""

    name: str = "sqlite"
    now: str = NOW
    ago: str = f"({NOW} - ?)"
    seconds: str = NOW
    share: str = ""
    exclusive: str = ""
    replica: str = "0"
    marker: str = "1"
    server: str | None = None
    same_server: str = "1 = 1"
    durable: str = "''"  # each connection is: files.py
    init_lock: Sequence[Sql] = ()  # the write lock is enough
    words: Mapping[str, str] = WORDS
    largest: str = "max"

    def version(self) -> Plan[int | None]:
        try:
            answers = yield Sql("SELECT value FROM busrep_meta WHERE key = 'version'")
        except NoSuchTable:
            return None
        return int(answers[0][0][0]) if answers[0] else None

    def age(self, column: str) -> str:
        return f"({NOW} - {column})"

    def values(self, *columns: tuple[str, str]) -> str:
        picked = ", ".join(f"json_extract(value, '$[{at}]') AS {name}" for at, (name, _) in enumerate(columns))
        return f"(SELECT {picked} FROM json_each(?))"

    def lock_timeout(self, seconds: float) -> Sequence[Sql]:
        """See `Dialect`; a pragma outside the transaction, so it is the store's to set."""
        return ()

    def blockers(self, writer: str) -> Plan[list[str]]:
        """See `Dialect`; SQLite does not tell who holds its lock."""
        yield ()
        return ["another process's write transaction (SQLite does not tell whose)"]

    def columns(self, table: str) -> Sql:
        *schema, name = table.replace('"', "").split(".")
        return Sql("SELECT name FROM pragma_table_xinfo(?, ?)", (name, schema[0] if schema else "main"))

    def create_sequence(self, stream: str) -> Sql:
        return Sql("INSERT INTO busrep_sequences (stream, value) VALUES (?, 0) ON CONFLICT DO NOTHING", (stream,))

    def next_ids(self, stream: str, count: int) -> Sql:
        return Sql("UPDATE busrep_sequences SET value = value + ? WHERE stream = ? RETURNING value", (count, stream))

    def sequence(self, stream: str) -> Sql:
        return Sql("SELECT value, 1, 0, 1 FROM busrep_sequences WHERE stream = ?", (stream,))

    def sequence_name(self, stream: str) -> str:
        return stream

    def raise_sequence(self, stream: str, least: int) -> Plan[None]:
        yield Sql("UPDATE busrep_sequences SET value = max(value, ?) WHERE stream = ?", (least, stream))

    def insert(self, backing: Backing, writer: str, rows: Sequence[tuple[int, int, bytes]]) -> Sequence[Sql]:
        if not backing.own:
            params = [(backing.stream, writer, token, at, payload.decode()) for token, at, payload in rows]
            text = "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES (?, ?, ?, ?, ?)"
        else:
            names = [backing.id, backing.writer, *([backing.index] if backing.index else []), *backing.columns]
            text = f"INSERT INTO {backing.table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            sign = -1 if backing.negative else 1
            params = [
                (sign * token, writer, *([at] if backing.index else []), *map(stored, columns_of(backing, payload)))
                for token, at, payload in rows
            ]
        return [Sql(text, params[0]) if len(params) == 1 else Sql(text, params, many=True)]

    def page(self, backing: Backing, writer: str, after: int, upto: int, limit: int) -> Sql:
        where, params = backing.of_writer(writer)
        span, (low, high) = backing.between(after, upto)
        beyond, _, within = span.partition(" AND ")
        # One upper bound alone, or SQLite does not use the index for it: nine times slower.
        last = (
            f"SELECT {backing.id} FROM {backing.table} WHERE {where} AND {span} "
            f"ORDER BY {backing.by_row} LIMIT 1 OFFSET ?"
        )
        return Sql(
            f"SELECT {backing.token}, {', '.join(backing.columns)} FROM {backing.table} WHERE {where} "
            f"AND {beyond} AND {within.replace('?', f'coalesce(({last}), ?)')} ORDER BY {backing.by_row}",
            (*params, low, *params, low, high, limit, high),
        )

    def picked(self, backing: Backing) -> Sequence[str]:
        return backing.columns

    def payloads(self, backing: Backing, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """See `Dialect`; columns have no booleans and no containers, the row type tells where they were."""
        if not backing.own:
            return [backing.payload(row[1]) for row in rows]
        row_type = backing.definition.row_type
        fields = {} if row_type is None else typing.get_type_hints(row_type)
        types = list(fields.values()) or [Any] * len(backing.columns)
        raw = [orjson.dumps([loaded(value, kind) for value, kind in zip(row[1:], types, strict=True)]) for row in rows]
        return [backing.payload(text) for text in raw]

    def outcome(self, marker: object) -> Sql | None:
        """See `Dialect`; the store knows by itself."""
        return None

    rolled_back = outcome

    def save(self, reader: str, epoch: str, moved: str, count: int) -> Sql:
        values = self.values(*MOVES)
        bound = no_position_above("(SELECT q.value FROM busrep_sequences q WHERE q.stream = v.sequence)")
        match = (
            "r.reader = ? AND r.epoch = ? AND r.stream = v.stream AND r.writer = v.writer AND r.position = v.old "
            f"AND {NO_BOOTSTRAP} AND {bound}"
        )
        return Sql(
            f"UPDATE busrep_readers AS r SET position = v.new, saved_at = {NOW}, stopped = NULL "
            f"FROM {values} AS v WHERE {match} "
            f"AND ? = (SELECT count(*) FROM busrep_readers AS r JOIN {values} AS v ON {match}) "
            "RETURNING stream, writer",
            (moved, reader, epoch, count, moved, reader, epoch),
        )


def stored(value: Any) -> Any:
    """A JSON value as SQLite keeps it: containers as JSON text."""
    return orjson.dumps(value).decode() if isinstance(value, list | dict) else value


def loaded(value: Any, kind: Any) -> Any:
    """The JSON value that `stored` was given, by the field's annotation."""
    accepted = _names(kind)
    if type(value) is int and "bool" in accepted and "int" not in accepted:
        return bool(value)
    if isinstance(value, str) and accepted & {"list", "dict", "tuple"} and "str" not in accepted:
        return orjson.loads(value)
    return value


def _names(kind: Any) -> set[str]:
    """Names of the types an annotation accepts, unions taken apart."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_names, typing.get_args(kind)))
    return {getattr(origin or kind, "__name__", str(kind))}
