"""SQLite's pieces of SQL (3.35 or newer: RETURNING)."""

# ruff: noqa: S608, ARG002 - table and column names are quoted, values are parameters; one interface for both databases
from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from busrep.errors import ConfigError, RowError
from busrep.row_types import Fields, type_named
from busrep.stores.dialect import MOVES, NO_BOOTSTRAP, Backing, Dialect, columns_of, no_position_above
from busrep.stores.plans import NoSuchTable, Plan, Sql

# Timestamps are Unix seconds: a number that compares and subtracts without parsing.
NOW = "((julianday('now') - 2440587.5) * 86400.0)"

# See schema.py.
WORDS = {
    "sqlite": "", "when": "REAL", "now": NOW, "number": "INTEGER", "plain": " WITHOUT ROWID", "hot": " WITHOUT ROWID",
    "unlogged": "", "bytewise": "",
}  # fmt: skip

ADVICE = (
    "SQLite keeps a list or a dict as text, and a bool as a number, and only a field that is annotated as one of them "
    "gets it back: annotate it so, or use PostgreSQL, or busrep's own table"
)

SAMPLES: Sequence[Any] = (True, 1, 0.5, "", [], {})  # of each JSON type


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
            sign, fields = -1 if backing.negative else 1, _fields(backing)
            params = [
                (sign * token, writer, *([at] if backing.index else []), *_stored_row(backing, fields, payload))
                for token, at, payload in rows
            ]
        return [Sql(text, params[0]) if len(params) == 1 else Sql(text, params, many=True)]

    def lock_series(self, writer: str, *, exclusive: bool) -> Sequence[Sql]:
        return ()

    def hold(self, held: Sql) -> Sql:
        return Sql(f"SELECT 1 FROM busrep_writers WHERE {held.text}", held.params)

    def new_ids(self, stream: str, count: int) -> str:
        raise NotImplementedError

    def insert_numbering(self, stream: str, writer: str, payloads: Sequence[bytes]) -> Sql:
        raise NotImplementedError

    def given(self, stream: str) -> Sql:
        return Sql("SELECT value FROM busrep_sequences WHERE stream = ?", (stream,))

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
        kinds = _fields(backing).values()
        raw = [orjson.dumps([loaded(value, kind) for value, kind in zip(row[1:], kinds, strict=True)]) for row in rows]
        return [backing.payload(text) for text in raw]

    def outcome(self, marker: object) -> Sql | None:
        """See `Dialect`; the store knows by itself."""
        return None

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


def _fields(backing: Backing) -> dict[str, Any]:
    """The annotation of each field of an application's table, in the order of its columns; Any where there is none."""
    stream = backing.definition
    hints = {} if stream.row_type is None else typing.get_type_hints(stream.row_type)
    names = [one.name for one in stream.fields or ()] or [column.strip('"') for column in backing.columns]
    return {name: hints.get(name, Any) for name in names}


def check_fields(backing: Backing, fields: Fields) -> None:
    """ConfigError where these fields of an application's table, declared here or kept by the store, admit a value that
    would not come back by the annotations here."""
    for (name, kind), one in zip(_fields(backing).items() if backing.own else (), fields, strict=False):
        admitted = type_named(one.type).read
        if not all(_comes_back(value, kind) for value in SAMPLES if type(value) in admitted):
            raise ConfigError(f"stream {backing.stream!r}, field {name!r}, which may be {one.type}: {ADVICE}")


def _stored_row(backing: Backing, fields: Mapping[str, Any], payload: bytes) -> list[Any]:
    """The columns of a row; RowError for a value that `loaded` would not give back."""
    values = columns_of(backing, payload)
    for (name, kind), value in zip(fields.items(), values, strict=True):
        if not _comes_back(value, kind):
            raise RowError(backing.stream, f"field {name!r}", f"{value!r:.100} would not come back: {ADVICE}", values)
    return list(map(stored, values))


def _comes_back(value: Any, kind: Any) -> bool:
    try:
        back = loaded(stored(value), kind)
    except ValueError:
        return False
    return type(back) is type(value) and back == value


def stored(value: Any) -> Any:
    """A JSON value as SQLite keeps it: containers as JSON text, bools as numbers."""
    if isinstance(value, list | dict):
        return orjson.dumps(value).decode()
    return int(value) if isinstance(value, bool) else value


def loaded(value: Any, kind: Any) -> Any:
    """The JSON value that `stored` was given, by the field's annotation."""
    accepted = _accepted(kind)
    if type(value) is int and bool in accepted and int not in accepted:
        return bool(value)
    if isinstance(value, str) and any(map(_in_text, accepted)) and str not in accepted:
        return orjson.loads(value)
    return value


def _in_text(kind: Any) -> bool:
    """Whether values of this type are JSON arrays or objects, which `stored` makes texts of."""
    return isinstance(kind, type) and issubclass(kind, Sequence | Mapping) and not issubclass(kind, str | bytes)


def _accepted(kind: Any) -> set[Any]:
    """The types that an annotation accepts, unions taken apart."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_accepted, typing.get_args(kind)))
    return {origin or kind}
