"""Snapshots out of an SQLite file.

Each part is read in a transaction of its own, on a connection and in a thread of its own, so that neither the store's
questions nor its writes wait; in WAL mode a reader holds up no writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from busrep.core.snapshots import Agreement
from busrep.stores import snapshots
from busrep.stores.dialect import Backing
from busrep.stores.plans import Plan
from busrep.stores.sqlite.files import connect, run, translating

if TYPE_CHECKING:
    from busrep.stores.sqlite.store import SqliteStore

T = TypeVar("T")


class SqliteSnapshots(snapshots.PlannedSnapshots):
    """Agreements of one store, and the loading of their parts."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(self._aside, store.dialect, f"SQLite database {store.path}", store.settings.snapshots)
        self.store, self.path = store, store.path

    async def _aside(self, plan: Plan[T]) -> T:
        with _Thread(self.path) as thread:
            found = await thread.run(lambda cursor: self._run(cursor, plan))
        self.store.check_open()  # it may have been closed meanwhile
        return found

    def _run(self, cursor: sqlite3.Cursor, plan: Plan[T]) -> T:
        return run(plan, cursor.connection, self.path)

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`. In pieces of so many rows: the part as a whole is never in memory."""

        def begin(cursor: sqlite3.Cursor) -> None:
            self._run(cursor, self.checked(backing, agreement, number))
            if asked := snapshots.spans(agreement, number):
                question = snapshots.part_of(self.dialect, backing, asked)
                cursor.execute(question.text, question.params)

        def piece(cursor: sqlite3.Cursor) -> bytes:
            return snapshots.text_of(self.dialect, backing, cursor.fetchmany(snapshots.PIECE_ROWS))

        with _Thread(self.path) as thread:
            await thread.run(begin)
            while text := await thread.run(piece):
                yield text


class _Thread:
    """A thread with a connection of its own.

    The connection is closed there too, after whatever still runs: also when the caller was cancelled meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, "busrep-sqlite-snapshot")
        self._opened = contextlib.ExitStack()
        self._cursor: sqlite3.Cursor | None = None

    def __enter__(self) -> _Thread:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._opened.close)
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        """Do it in the thread. Raises what it raises, the driver's errors as busrep's."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._translating, work))

    def _translating(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        with translating(self.path):
            if self._cursor is None:
                connection = self._opened.enter_context(contextlib.closing(connect(self.path, "rw")))
                # A question that has not come to its end keeps its connection, and with it the state that it reads, as
                # long as somebody keeps the cursor (an exception's frames do): no checkpoint gets past it, and the WAL
                # grows. So it is closed as well.
                self._cursor = self._opened.enter_context(contextlib.closing(connection.cursor()))
            return work(self._cursor)
