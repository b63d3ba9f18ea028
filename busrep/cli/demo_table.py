"""The demo's own look at the database, past busrep: an application's table, a reader's table, and the truth.

The verdict must not rest on the code that it judges, so the facts are read by plain SQL here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from busrep.cli.demo_check import FactContent, Handled
from busrep.cli.demo_rows import ABORTED, BULK, demo_streams, fact_digest
from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.urls import check_url

# Seconds to wait for SQLite's one write lock while several processes write.
BUSY_TIMEOUT = 60.0

POSTGRES = ("postgresql://", "postgres://")
SQLITE = "sqlite:///"


def is_postgres(store: str) -> bool:
    """Whether a store URL is PostgreSQL's; the demo knows it and SQLite: ConfigError for any other."""
    if store.startswith(POSTGRES):
        check_url(store, "--store", "postgresql://user@host/database")  # psycopg would quote it
        return True
    if store.startswith(SQLITE):
        return False
    raise ConfigError("the demo's processes share a table: --store sqlite:///file.db or postgresql://...")


def _sqlite(store: str) -> sqlite3.Connection:
    path = store.removeprefix(SQLITE)
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("postgres", "a PostgreSQL store") from None
    return psycopg


def _sql(store: str, text: str) -> str:
    return text.replace("?", "%s") if is_postgres(store) else text


def business_insert(store: str, run: str) -> str:
    """Inserts (stream, writer, id) into the application's table, in the driver's placeholders."""
    return _sql(store, f"INSERT INTO demo_{run}_orders (stream, writer, id) VALUES (?, ?, ?)")  # noqa: S608


class HandledTable:
    """Where an exactly-once reader records what it handled; its connection is the application's own."""

    def __init__(self, store: str, run: str) -> None:
        self._store = store
        self._insert = _sql(
            store,
            f"INSERT INTO demo_{run}_handled (reader, life, stream, writer, token, rows_, digest) "  # noqa: S608
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
        )
        self._connection: Any = None
        self._one_at_a_time = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """The connection, in a transaction that is committed unless the block raises."""
        async with self._one_at_a_time:
            if is_postgres(self._store):
                if self._connection is None or self._connection.closed:
                    self._connection = await _psycopg().AsyncConnection.connect(self._store)
                async with self._connection.transaction():
                    yield self._connection
                return
            if self._connection is None:
                self._connection = _sqlite(self._store)
            # In a thread, for it may wait behind a writer's transaction.
            await asyncio.to_thread(self._connection.execute, "BEGIN IMMEDIATE")
            try:
                yield self._connection
                await asyncio.to_thread(self._connection.execute, "COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    async def insert(self, connection: Any, rows: Sequence[Sequence[Any]]) -> None:
        """Within the transaction."""
        if is_postgres(self._store):
            async with connection.cursor() as cursor:
                await cursor.executemany(self._insert, rows)
        else:
            connection.executemany(self._insert, rows)

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            closing = self._connection.close()
            if closing is not None:
                await closing


class DemoTable:
    """The parent's connection, for setting up, for the truth, and for cleaning up. Blocking."""

    def __init__(self, store: str, run: str) -> None:
        self._store, self._run = store, run
        self._streams = [stream.name for stream in demo_streams(run)]
        self._connection = self._connect()

    def _connect(self) -> Any:
        if not is_postgres(self._store):
            return _sqlite(self._store)
        psycopg = _psycopg()
        try:
            return psycopg.connect(self._store, autocommit=True)
        except psycopg.OperationalError as error:
            raise Unavailable("PostgreSQL", str(error).strip().splitlines()[-1]) from None

    def _execute(self, text: str, params: Sequence[Any] = ()) -> Any:
        return self._connection.execute(_sql(self._store, text), params)

    def prepare(self) -> None:
        """Make the application's table and the readers'."""
        number = "BIGINT GENERATED ALWAYS AS IDENTITY" if is_postgres(self._store) else "INTEGER"
        self._execute(
            f"CREATE TABLE demo_{self._run}_orders (stream TEXT, writer TEXT, id BIGINT, "
            "PRIMARY KEY (stream, writer, id))"
        )
        self._execute(
            f"CREATE TABLE demo_{self._run}_handled (n {number} PRIMARY KEY, reader TEXT, life BIGINT, "
            "stream TEXT, writer TEXT, token BIGINT, rows_ BIGINT, digest TEXT)"
        )

    def facts_of(self, writer: str) -> int:
        """How many facts of a writer are committed."""
        marks = ", ".join("?" * len(self._streams))
        text = (
            "SELECT count(*) FROM (SELECT DISTINCT stream, id FROM busrep_facts "  # noqa: S608 - our own names
            f"WHERE stream IN ({marks}) AND writer = ?) AS facts"
        )
        return int(self._execute(text, (*self._streams, writer)).fetchone()[0])

    def truth(self) -> dict[tuple[str, str], dict[int, FactContent]]:
        """All facts of the run. Raises ConfigError when one that was rolled back is among them."""
        found: dict[tuple[str, str], dict[int, FactContent]] = defaultdict(dict)
        text = "SELECT writer, id, row FROM busrep_facts WHERE stream = ? ORDER BY writer, id, idx"
        for stream in self._streams:
            rows = self._execute(text, (stream,)).fetchall()
            for (writer, token), group in groupby(rows, key=lambda row: (row[0], row[1])):
                payloads = [str(row[2]).encode() for row in group]
                found[stream, writer][token] = len(payloads), fact_digest(payloads)
        return dict(found)

    def broken_transactions(self) -> int:
        """Application rows without their fact, facts without their application row, facts that were rolled back."""
        marks = ", ".join("?" * len(self._streams))
        same = "f.stream = o.stream AND f.writer = o.writer AND f.id = o.id"
        facts = f"busrep_facts AS f WHERE f.stream IN ({marks}) AND f.idx = 0"
        orders = f"demo_{self._run}_orders AS o"
        questions: list[tuple[str, list[str]]] = [
            (f"{orders} WHERE NOT EXISTS (SELECT 1 FROM busrep_facts AS f WHERE {same})", []),  # noqa: S608
            (
                f"{facts} AND f.row NOT LIKE ? AND NOT EXISTS (SELECT 1 FROM {orders} WHERE {same})",  # noqa: S608
                [*self._streams, f'%"{BULK}"%'],
            ),
            (f"{facts} AND f.row LIKE ?", [*self._streams, f'%"{ABORTED}"%']),
        ]
        return sum(
            self._execute(f"SELECT count(*) FROM {text}", params).fetchone()[0]  # noqa: S608
            for text, params in questions
        )

    def handled(self, reader: str) -> Iterator[Handled]:
        """What an exactly-once reader recorded, in its order."""
        text = (
            "SELECT life, stream, writer, token, rows_, digest "  # noqa: S608 - the run's name is ours
            f"FROM demo_{self._run}_handled WHERE reader = ? ORDER BY n"
        )
        for life, stream, writer, token, rows, digest in self._execute(text, (reader,)).fetchall():
            yield Handled(life, stream, writer, token, (rows, digest))

    def drop(self, writers: Iterable[str], readers: Iterable[str]) -> None:
        """Remove everything the run left in the store."""
        for table in ("orders", "handled"):
            self._execute(f"DROP TABLE IF EXISTS demo_{self._run}_{table}")
        for stream in self._streams:
            for table in ("facts", "positions", "readers", "dead_letters", "streams"):
                self._execute(f"DELETE FROM busrep_{table} WHERE stream = ?", (stream,))  # noqa: S608
        for writer in writers:
            self._execute("DELETE FROM busrep_writers WHERE writer = ?", (writer,))
        for reader in readers:
            self._execute("DELETE FROM busrep_readers WHERE reader = ?", (reader,))
        self._drop_sequences()

    def _drop_sequences(self) -> None:
        for stream in self._streams:
            if is_postgres(self._store):
                from busrep.stores.postgres.dialect import sequence_name

                self._execute(f'DROP SEQUENCE IF EXISTS "{sequence_name(stream)}"')
            else:
                self._execute("DELETE FROM busrep_sequences WHERE stream = ?", (stream,))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def file_record(path: str) -> Iterator[Handled]:
    """What an at-least-once reader recorded in its file, in its order."""
    with open(path, encoding="ascii") as lines:
        for line in lines:
            life, stream, writer, token, rows, digest = line.split()
            yield Handled(int(life), stream, writer, int(token), (int(rows), digest))


def highest_tokens(truth: Mapping[tuple[str, str], Mapping[int, FactContent]]) -> dict[str, dict[str, int]]:
    """stream -> writer -> its last fact."""
    finals: dict[str, dict[str, int]] = defaultdict(dict)
    for (stream, writer), facts in truth.items():
        finals[stream][writer] = max(facts)
    return dict(finals)
