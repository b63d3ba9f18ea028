"""Staging rows in PostgreSQL, by COPY."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from busrep.spark.staging_store import Keyed, StagingPlace
from busrep.stores.plans import Signal
from busrep.stores.postgres.blocking import BlockingPostgresStore, close
from busrep.stores.postgres.steps import DRIVER_ERRORS, translated
from busrep.stores.server import final

try:
    import psycopg
except ImportError as missing:
    from busrep.errors import MissingExtra

    raise MissingExtra("postgres", "the PostgreSQL store") from missing

# Rows in one row of the staging table, a line each: a third of the time of a row each, and less to be vacuumed.
LINES = 500
# And bytes in it: what the server takes apart at once.
MOST_BYTES = 2**20

COPY = b"COPY busrep_staged (query, attempt, seq, batch, part, key, rows) FROM STDIN"


class PostgresStage:
    """A `Stage` in PostgreSQL: a staged row holds as many rows as `LINES`, or one where rows have keys."""

    def __init__(self, store: BlockingPostgresStore, place: StagingPlace) -> None:
        self._store, self._place, self._seq = store, place, 0
        self._connection: psycopg.Connection[Any] = store.dial()
        try:
            # Nobody counts on these rows alone: the batch's own COMMIT flushes the log up to it, and so these too.
            self._execute(b"SET synchronous_commit = off")
        except BaseException:
            self.close()
            raise

    def _execute(self, text: bytes) -> None:
        try:
            self._connection.execute(text)
        except DRIVER_ERRORS as error:
            raise _told(self._store, error) from error

    def add(self, rows: Sequence[Keyed]) -> None:
        """See `Stage`."""
        at = self._place
        try:
            with self._connection.cursor().copy(COPY) as copy:
                for key, text in _texts(rows):
                    copy.write_row((at.query, at.attempt, self._seq, at.batch, at.part, key, text))
                    self._seq += 1
        except DRIVER_ERRORS as error:
            raise _told(self._store, error) from error

    def close(self) -> None:
        """See `Stage`."""
        close(self._connection)


def _told(store: BlockingPostgresStore, error: Exception) -> Exception:
    """What a driver's error is to the caller."""
    problem = translated(error)
    return store.located(final(problem) if isinstance(problem, Signal) else problem)


def _texts(rows: Sequence[Keyed]) -> Iterator[tuple[str, str]]:
    if rows and rows[0][0]:
        for key, payload in rows:
            yield key, payload.decode()
        return
    lines: list[bytes] = []
    size = 0
    for _, payload in rows:
        if lines and (len(lines) == LINES or size + len(payload) > MOST_BYTES):
            yield "", b"\n".join(lines).decode()
            lines, size = [], 0
        lines.append(payload)
        size += len(payload)
    if lines:
        yield "", b"\n".join(lines).decode()
