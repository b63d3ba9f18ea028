"""A store for threads through which many processes write one batch: see staging.py for how rows become facts.

A task stages its rows in transactions of its own, each of some thousand rows: none is open while the task waits for
what it writes, so that on SQLite, with its one write lock, everybody else gets a turn. None of them is flushed to the
disk by itself: the commit of the batch flushes all that was written before it, and counts the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.spark import staging
from busrep.spark.staging import Done, StagedBatch
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.interface import Claim
from busrep.stores.planned import PlannedStore
from busrep.stores.plans import Control, Plan, Sql, T, complete, in_transaction
from busrep.stores.sqlite.blocking import BlockingSqliteStore
from busrep.stores.sqlite.files import connect, run, translating
from busrep.streams import Registry
from busrep.urls import shown_url

Keyed = tuple[str, bytes]
"""A row to stage: its key, "" where nobody sorts by it, and its payload."""


@attrs.frozen
class StagingPlace:
    """Where a task stages its rows: its query and batch, its partition, and its attempt's own name."""

    query: str
    batch: int
    part: int
    attempt: str


class Stage(Protocol):
    """A task's way into the staging table, on one connection, used by one thread."""

    def add(self, rows: Sequence[Keyed]) -> None:
        """Stage these rows behind those before, in one transaction. Raises Unavailable."""

    def close(self) -> None:
        """Close the connection. What was added stays staged."""


class SqliteStage:
    """A `Stage` in an SQLite file: a staged row is one row."""

    def __init__(self, path: str, place: StagingPlace) -> None:
        self._path, self._place, self._seq = path, place, 0
        self._connection: sqlite3.Connection = connect(path, "rw")
        with translating(path):
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def add(self, rows: Sequence[Keyed]) -> None:
        """See `Stage`."""
        run(in_transaction(self._insert(rows)), self._connection, self._path)
        self._seq += len(rows)

    def _insert(self, rows: Sequence[Keyed]) -> Plan[None]:
        at = self._place
        yield (
            Control.BEGIN,
            Sql(
                "INSERT INTO busrep_staged (query, attempt, seq, batch, part, key, rows) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (at.query, at.attempt, seq, at.batch, at.part, key, payload.decode())
                    for seq, (key, payload) in enumerate(rows, self._seq)
                ],
                many=True,
            ),
            Control.COMMIT,
        )

    def close(self) -> None:
        """See `Stage`."""
        self._connection.close()


class StagingStore(BlockingStore):
    """A `BlockingStore` of SQLite or PostgreSQL that also stages rows. Made by `open_staging_store`."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._planned: PlannedStore = store

    def stage(self, place: StagingPlace) -> Stage:
        """A task's way in; it needs no open store. Raises Unavailable."""
        if isinstance(self._planned, BlockingSqliteStore):
            return SqliteStage(self._planned.path, place)
        from busrep.spark.staging_postgres import PostgresStage

        store: Any = self._planned
        return PostgresStage(store, place)

    def done(self, query: str) -> Done | None:
        """The last batch of a query that became facts. Raises Unavailable."""
        return self._read(staging.done(query))

    def commit(self, claim: Claim, stream: str, batch: StagedBatch) -> Done:
        """Make facts of a staged batch, once: see `staging.commit`. After Unavailable it may have happened: claim the
        name again, which waits for the transaction's end, and look with `done`."""
        store = self._planned
        return self._write(staging.commit(store.dialect, store.dialect.backing(stream), claim, batch))

    def check_backing(self, stream: str) -> None:
        """Raises ConfigError when the stream is kept in a table of the application's that was not declared here."""
        own = self._planned.dialect.backing(stream).own
        if not own and self._read(staging.backing_declared(stream)):
            raise ConfigError(f"stream {stream!r} is kept in a table of the application's: pass the option streams")

    def clear(self, query: str, attempts: Sequence[str] | None) -> None:
        """Forget what these attempts staged; None: all of the query's. Raises Unavailable."""
        self._write(staging.clear(query, attempts))

    def forget(self, query: str) -> None:
        """Forget a query of one batch. Raises Unavailable."""
        self._write(staging.forget(query))

    def clean(self) -> None:
        """Remove what queries left that are gone. Raises Unavailable."""
        self._write(staging.clean(self._planned.dialect))

    def _read(self, plan: Plan[T]) -> T:
        return complete(self._planned.read(plan))

    def _write(self, plan: Plan[T]) -> T:
        return complete(self._planned.write(plan))


def open_staging_store(url: str, streams: Registry, *, settings: Settings | None = None) -> StagingStore:
    """The store of a URL, not connected yet.

    Raises MissingExtra, and ConfigError for one that other processes cannot reach.
    """
    if url.startswith("memory://"):
        raise ConfigError(f"the store {shown_url(url)!r} is in memory, which no other process can write to")
    return StagingStore(open_blocking_store(url, streams, settings=settings).wrapped)
