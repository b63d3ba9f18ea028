"""SQLite's pieces of SQL (3.35 or newer: RETURNING)."""

# ruff: noqa: S608, ARG002 - table and column names are quoted, values are parameters; one interface for both databases
from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any

import orjson

from busrep.stores.backing import Backing, Span, columns_of, field_types, union
from busrep.stores.dialect import MOVES, NO_BOOTSTRAP, no_position_above
from busrep.stores.plans import NoSuchTable, Plan, Sql

# Timestamps are Unix seconds: a number that compares and subtracts without parsing.
NOW = "((julianday('now') - 2440587.5) * 86400.0)"

TABLES = (
    "CREATE TABLE busrep_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE busrep_writers (writer TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, claimed_at REAL, "
    "finished INTEGER) WITHOUT ROWID",
    "CREATE TABLE busrep_positions (stream TEXT, writer TEXT, position INTEGER NOT NULL, floor INTEGER NOT NULL, "
    "registered INTEGER NOT NULL, seen_at REAL NOT NULL, finished INTEGER, PRIMARY KEY (stream, writer)) WITHOUT ROWID",
    "CREATE TABLE busrep_streams (stream TEXT PRIMARY KEY, backing TEXT) WITHOUT ROWID",
    "CREATE TABLE busrep_sequences (stream TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE busrep_facts (stream TEXT, writer TEXT, id INTEGER, idx INTEGER, row TEXT NOT NULL, "
    f"committed_at REAL NOT NULL DEFAULT {NOW}, PRIMARY KEY (stream, writer, id, idx)) WITHOUT ROWID",
    "CREATE TABLE busrep_readers (reader TEXT, stream TEXT, writer TEXT, position INTEGER NOT NULL, "
    "epoch TEXT NOT NULL, saved_at REAL NOT NULL, PRIMARY KEY (reader, stream, writer)) WITHOUT ROWID",
    "CREATE TABLE busrep_dead_letters (id INTEGER PRIMARY KEY, reader TEXT NOT NULL, stream TEXT NOT NULL, "
    "writer TEXT NOT NULL, tokens TEXT NOT NULL, payloads TEXT NOT NULL, error TEXT NOT NULL, dead_at REAL NOT NULL)",
)

TABLES_2 = (
    "CREATE TABLE busrep_bootstraps (reader TEXT, stream TEXT, id TEXT NOT NULL, agreement TEXT NOT NULL, "
    "digest TEXT NOT NULL, state TEXT NOT NULL, parts INTEGER NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL, "
    "parts_total INTEGER NOT NULL, rows_total INTEGER NOT NULL, syncs INTEGER NOT NULL, reason TEXT NOT NULL, "
    "saved_at REAL NOT NULL, PRIMARY KEY (reader, stream)) WITHOUT ROWID",
)

TABLES_3 = (
    "CREATE TABLE busrep_staged (query TEXT, attempt TEXT, seq INTEGER, batch INTEGER NOT NULL, part INTEGER NOT NULL, "
    f"key TEXT NOT NULL, rows TEXT NOT NULL, staged_at REAL NOT NULL DEFAULT {NOW}, "
    "PRIMARY KEY (query, attempt, seq)) WITHOUT ROWID",
    "CREATE TABLE busrep_sinks (query TEXT PRIMARY KEY, checkpoint TEXT NOT NULL, batch INTEGER NOT NULL, "
    "run TEXT NOT NULL, stream TEXT NOT NULL, writer TEXT NOT NULL, incarnation INTEGER NOT NULL, "
    "rows INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, once INTEGER NOT NULL, "
    "done_at REAL NOT NULL) WITHOUT ROWID",
)

TABLES_4 = (
    "ALTER TABLE busrep_streams ADD COLUMN fields TEXT",
    "ALTER TABLE busrep_readers ADD COLUMN stopped TEXT",
)


class SqliteDialect:
    """A `Dialect`. Rows need no locks: BEGIN IMMEDIATE is the lock."""

    name: str = "sqlite"
    now: str = NOW
    seconds: str = NOW
    share: str = ""
    exclusive: str = ""
    replica: str = "0"
    marker: str = "1"
    server: str | None = None
    same_server: str = "1 = 1"
    durable: str = "''"  # each connection is: files.py
    largest: str = "max"

    def __init__(self, store: str = "URL") -> None:
        self.store = store

    def ddl(self, version: int) -> Sequence[Sql]:
        """See `Dialect`."""
        return [Sql(text) for text in {1: TABLES, 2: TABLES_2, 3: TABLES_3, 4: TABLES_4}[version]]

    def init_lock(self) -> Sequence[Sql]:
        """See `Dialect`; the write lock is enough."""
        return ()

    def version(self) -> Plan[int | None]:
        """See `Dialect`."""
        try:
            answers = yield Sql("SELECT value FROM busrep_meta WHERE key = 'version'")
        except NoSuchTable:
            return None
        return int(answers[0][0][0]) if answers[0] else None

    def age(self, column: str) -> str:
        """See `Dialect`."""
        return f"({NOW} - {column})"

    def ago(self) -> str:
        """See `Dialect`."""
        return f"({NOW} - ?)"

    def values(self, *columns: tuple[str, str]) -> str:
        """See `Dialect`."""
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
        """See `Dialect`."""
        *schema, name = table.replace('"', "").split(".")
        return Sql("SELECT name FROM pragma_table_xinfo(?, ?)", (name, schema[0] if schema else "main"))

    def create_sequence(self, stream: str) -> Sql:
        """See `Dialect`."""
        return Sql("INSERT INTO busrep_sequences (stream, value) VALUES (?, 0) ON CONFLICT DO NOTHING", (stream,))

    def next_ids(self, stream: str, count: int) -> Sql:
        """See `Dialect`."""
        return Sql("UPDATE busrep_sequences SET value = value + ? WHERE stream = ? RETURNING value", (count, stream))

    def ids(self, answer: Sequence[tuple[Any, ...]], count: int) -> list[int]:
        """See `Dialect`."""
        last = answer[0][0]
        return list(range(last - count + 1, last + 1))

    def sequence(self, stream: str) -> Sql:
        """See `Dialect`."""
        return Sql("SELECT value, 1, 0, 1 FROM busrep_sequences WHERE stream = ?", (stream,))

    def sequence_name(self, stream: str) -> str:
        """See `Dialect`."""
        return stream

    def raise_sequence(self, stream: str, least: int) -> Plan[None]:
        """See `Dialect`."""
        yield Sql("UPDATE busrep_sequences SET value = max(value, ?) WHERE stream = ?", (least, stream))

    def insert(self, backing: Backing, writer: str, rows: Sequence[tuple[int, int, bytes]]) -> Sequence[Sql]:
        """See `Dialect`."""
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

    def insert_staged(
        self, backing: Backing, writer: str, query: str, attempts: Sequence[str], ordered: bool
    ) -> Plan[tuple[int, int, int]]:
        """See `Dialect`. A row of the staging table is one row: SQLite cannot split a text without reading its JSON."""
        source = "FROM busrep_staged WHERE query = ? AND attempt IN (SELECT value FROM json_each(?))"
        params = (query, orjson.dumps(list(attempts)).decode())
        count = (yield Sql(f"SELECT count(*) {source}", params))[0][0][0]
        if not count:
            return 0, 0, 0
        last = (yield self.next_ids(backing.stream, count))[0][0][0]
        order = "key, part, seq" if ordered else "part, seq"
        id = f"{'-' if backing.negative else ''}(? + row_number() OVER (ORDER BY {order}))"
        if backing.own:
            index = [backing.index] if backing.index else []
            names = [backing.id, backing.writer, *index, *backing.columns]
            # Of an array or an object it gives the JSON text, of a boolean a number: as `stored` does.
            picked = [f"json_extract(rows, '$[{at}]')" for at in range(len(backing.columns))]
            values = ", ".join([id, "?", *("0" for _ in index), *picked])
            text = f"INSERT INTO {backing.table} ({', '.join(names)}) SELECT {values}"
            first: tuple[Any, ...] = (last - count, writer)
        else:
            text = f"INSERT INTO busrep_facts (stream, writer, id, idx, row) SELECT ?, ?, {id}, 0, rows"
            first = (backing.stream, writer, last - count)
        yield Sql(f"{text} {source}", (*first, *params))
        return count, last - count + 1, last

    def page(self, backing: Backing, writer: str, after: int, upto: int, limit: int) -> Sql:
        """See `Dialect`."""
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

    def rows(self, backing: Backing, writer: str, ids: Sequence[int]) -> Sql:
        """See `Dialect`."""
        where, params = backing.of_writer(writer)
        return Sql(
            f"SELECT {backing.token}, {', '.join(backing.columns)} FROM {backing.table} WHERE {where} "
            f"AND {backing.token} IN (SELECT value FROM json_each(?)) ORDER BY {backing.by_row}",
            (*params, orjson.dumps(list(ids)).decode()),
        )

    def part(self, backing: Backing, spans: Sequence[Span]) -> Sql | None:
        """See `Dialect`. Each SELECT is in the order of its index, so that SQLite merges them instead of sorting."""
        if not spans:
            return None
        columns = ", ".join(f"{column} AS c{at}" for at, column in enumerate(backing.columns))
        text, params = union(
            backing,
            spans,
            f"{backing.writer} AS writer, {backing.token} AS token, {columns}, {backing.index or 0} AS place",
        )
        named = ", ".join(f"c{at}" for at in range(len(backing.columns)))
        return Sql(f"SELECT writer, token, {named} FROM ({text}) AS p ORDER BY token, place", params)

    def payloads(self, backing: Backing, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """See `Dialect`; columns have no booleans and no containers, the row type tells where they were."""
        if not backing.own:
            return [row[1].encode() for row in rows]
        types = list(field_types(backing.definition).values()) or [Any] * len(backing.columns)
        raw = [orjson.dumps([loaded(value, kind) for value, kind in zip(row[1:], types, strict=True)]) for row in rows]
        return [backing.payload(text) for text in raw]

    def outcome(self, marker: object) -> Sql | None:
        """See `Dialect`; the store knows by itself."""
        return None

    def save(self, reader: str, epoch: str, moved: str, count: int) -> Sql:
        """See `Dialect`."""
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
