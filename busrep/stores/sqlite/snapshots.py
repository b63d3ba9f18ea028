"""Snapshots out of an SQLite file.

Each part is read in a transaction of its own, on a connection and in a thread of its own, so that neither the store's
questions nor its writes wait; in WAL mode a reader holds up no writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from busrep.core.snapshots import Agreement
from busrep.stores import snapshots
from busrep.stores.backing import Backing
from busrep.stores.dialect import Dialect
from busrep.stores.plans import Control, Plan, Row
from busrep.stores.sqlite.files import connect, executor, run, translating

T = TypeVar("T")


class SqliteSnapshots:
    """Agreements of one store, and the loading of their parts. ``most``: snapshots at a time, of all this process's
    stores on that file."""

    def __init__(self, path: str, dialect: Dialect, most: int) -> None:
        self.path, self.dialect = path, dialect
        self.where = f"SQLite database {path}"
        self.held = snapshots.HeldSnapshots(f"sqlite {Path(path).absolute()}", self.where, most)

    async def agree(self, backing: Backing, part_rows: int, again: Agreement | None) -> Agreement:
        """See `SnapshotSource`."""

        async def make() -> Agreement:
            with _Thread(self.path) as thread:
                plan = snapshots.agree(self.dialect, backing, part_rows, again, self.where)
                agreement, _ = await thread.run(lambda: thread.plan(snapshots.in_snapshot(plan)))
                return agreement

        return await self.held.agree(make)

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`. In pieces of so many rows: the part as a whole is never in memory."""

        def begin() -> None:
            def check() -> Plan[None]:
                log = yield from snapshots.read_log(self.dialect, backing.stream, Control.SNAPSHOT)
                snapshots.check_part(agreement, number, log)

            thread.plan(check())
            question = self.dialect.part(backing, snapshots.spans(agreement, number))
            if question is not None:
                thread.ask(question.text, question.params)

        def piece() -> bytes:
            return snapshots.text_of(self.dialect, backing, thread.rows(snapshots.PIECE_ROWS))

        with _Thread(self.path) as thread:
            await thread.run(begin)
            while text := await thread.run(piece):
                yield text


class _Thread:
    """A thread with a connection of its own; its methods but `run` are called there.

    The connection is closed there too, after whatever still runs: also when the caller was cancelled meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, "busrep-sqlite-snapshot")
        self._connection: sqlite3.Connection | None = None
        self._cursor: sqlite3.Cursor | None = None

    def __enter__(self) -> _Thread:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._cursor is not None:
            # A question that has not come to its end keeps its connection, and with it the state that it reads, as long
            # as somebody keeps the cursor (an exception's frames do): no checkpoint gets past it, and the WAL grows.
            self._cursor.close()
        if self._connection is not None:
            self._connection.close()

    async def run(self, work: Callable[[], T]) -> T:
        """Do it in the thread. Raises what it raises, the driver's errors as busrep's."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._translating, work))

    def _translating(self, work: Callable[[], T]) -> T:
        with translating(self.path):
            if self._connection is None:
                self._connection = connect(self.path, "rw")
            return work()

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None  # noqa: S101 - made before any work is done
        return self._connection

    def plan(self, plan: Plan[T]) -> T:
        """Run a plan."""
        return run(plan, executor(self._open, self.path), self.path)

    def ask(self, text: str, params: Any) -> None:
        """Begin a question, whose `rows` are taken by and by."""
        self._cursor = self._open.execute(text, params)

    def rows(self, most: int) -> list[Row]:
        """The next rows, at most so many; none: that was all."""
        return [] if self._cursor is None else self._cursor.fetchmany(most)
