"""The SQLite store: one file, WAL mode, several processes; one writer at a time is SQLite's own rule.

Each of the two connections has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import weakref
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from busrep.core.snapshots import Agreement
from busrep.errors import CommitUnknown
from busrep.settings import Settings
from busrep.stores import snapshots
from busrep.stores.dialect import Backing
from busrep.stores.interface import Claim
from busrep.stores.plans import Plan, T
from busrep.stores.sqlite.base import WRITE, FileStore, Holder, SqliteTransaction, Turn
from busrep.stores.sqlite.files import connect, in_transaction, translating
from busrep.streams import Registry


class TaskTurn(Turn):
    """A task's turn to write: tasks queue up on a lock, in order."""

    asker = "task"

    @staticmethod
    def owner() -> object:
        """The task that asks, which is not kept for that: one that nobody else has ends no fact any more."""
        task = asyncio.current_task()
        return None if task is None else weakref.ref(task)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.lock = asyncio.Lock()

    async def take(self, holder: Holder, wait: float) -> None:
        self.check_not_nested()
        try:
            async with asyncio.timeout(wait):
                await self.lock.acquire()
        except TimeoutError as late:
            raise self._late(wait) from late
        self._holder, holder.owner = holder, self.owner()

    def leave(self, holder: Holder) -> None:
        if self._holder is holder:
            self._holder = None
            self.lock.release()


class SqliteStore(FileStore):
    """An `AsyncStore` on an SQLite file."""

    def __init__(self, path: str, streams: Registry, settings: Settings) -> None:
        super().__init__(path, streams, settings, TaskTurn(path))
        self.transactions = TaskTransaction
        self._threads: list[ThreadPoolExecutor] = []
        self.snapshots = SqliteSnapshots(self)

    async def open(self) -> None:
        if not self._threads:
            self._threads = [ThreadPoolExecutor(1, f"busrep-sqlite-{role}") for role in ("write", "read")]
            await super().open()

    async def close(self) -> None:
        """See `AsyncStore`. What runs in the threads is waited for; open transactions are rolled back."""
        await self.snapshots.leave_all()
        threads, self._threads = self._threads, []
        connections, self._connections = self._connections, []
        loop = asyncio.get_running_loop()
        for thread, connection in zip(threads, connections, strict=False):
            await asyncio.shield(loop.run_in_executor(thread, connection.close))
        for thread in threads:
            thread.shutdown()

    async def init(self, redefine: Collection[str] = ()) -> None:
        await asyncio.to_thread(self.make_tables, redefine)

    async def in_thread(self, role: int, work: Callable[[], T]) -> T:
        """See `FileStore`; to the end even when cancelled."""
        if not self._threads:
            self.role(role)  # says that it is not open
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads[role], work))

    async def write(self, plan: Plan[T], wait: float | None = None) -> T:
        holder = Holder()
        await self.take_turn(holder, wait)
        holder.owner = None  # a caller that is cancelled may wait for what goes on in the thread
        try:
            connection = self.writing()  # only now: it may have been closed meanwhile
            work = partial(self.write_on, connection, plan, wait)
            future = asyncio.get_running_loop().run_in_executor(self._threads[WRITE], work)
        except BaseException:
            self.turn.leave(holder)
            raise
        # Not in a finally: a cancelled caller leaves while the thread is still writing.
        future.add_done_callback(partial(self._written, holder))
        return await asyncio.shield(future)

    def _written(self, holder: Holder, future: asyncio.Future[Any]) -> None:
        self.turn.leave(holder)
        if not future.cancelled():
            future.exception()  # looked at, also when the caller was cancelled

    async def reserve(self, stream: str, count: int, held: Claim | None = None) -> list[int]:
        """See `AsyncStore`. ConfigError inside an open fact of the same task."""
        self.turn.check_not_nested()
        return await super().reserve(stream, count, held)

    def check_append(self) -> None:
        self.turn.check_not_nested()


class TaskTransaction(SqliteTransaction):
    """An `AsyncTransaction` whose statements go on when its task is cancelled."""

    _committing: asyncio.Future[Any] | None = None

    async def still_open(self) -> bool:
        return await super().still_open() or (self._callers and in_transaction(self.connection))

    async def _commit(self, last: Plan[None]) -> None:
        self._committing = asyncio.ensure_future(self._run(last))
        try:
            await asyncio.shield(self._committing)
        except asyncio.CancelledError as cancelled:
            self._committing.add_done_callback(self._committed)
            raise CommitUnknown(self, cancelled, cancelled=True) from cancelled

    def _committed(self, done: asyncio.Future[Any]) -> None:
        """A commit whose caller was cancelled has ended; if it failed nobody else rolls back."""
        if done.cancelled() or done.exception() is not None:
            self._ending = asyncio.ensure_future(self._end())
        else:
            self.store.turn.leave(self)

    async def rollback(self) -> bool:
        """See `AsyncTransaction`; a COMMIT that is under way ends by itself."""
        if self._committing is not None and not self._committing.done():
            return True
        return await super().rollback()

    async def _end(self) -> None:
        await asyncio.shield(asyncio.ensure_future(super()._end()))


class SqliteSnapshots(snapshots.PlannedSnapshots):
    """Each part is read in a transaction of its own, on a connection and in a thread of its own, so that neither the
    store's questions nor its writes wait; in WAL mode a reader holds up no writer."""

    store: SqliteStore

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store, f"SQLite database {store.path}")

    async def read(self, plan: Plan[T]) -> T:
        """See `PlannedSnapshots`; aside."""
        with SnapshotThread(self.store.path) as thread:
            found = await thread.run(lambda cursor: self.store.run(cursor.connection, plan))
        self.store.check_open()  # it may have been closed meanwhile
        return found

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`. In pieces of so many rows: the part as a whole is never in memory."""

        def begin(cursor: sqlite3.Cursor) -> None:
            self.store.run(cursor.connection, snapshots.checked(self.dialect, backing, agreement, number))
            if asked := snapshots.spans(agreement, number):
                question = snapshots.part_of(self.dialect, backing, asked)
                cursor.execute(question.text, question.params)

        def piece(cursor: sqlite3.Cursor) -> bytes:
            return snapshots.text_of(self.dialect, backing, cursor.fetchmany(snapshots.PIECE_ROWS))

        with SnapshotThread(self.store.path) as thread:
            await thread.run(begin)
            while text := await thread.run(piece):
                yield text


class SnapshotThread(contextlib.AbstractContextManager["SnapshotThread"]):
    """A thread with a connection of its own.

    The connection is closed there too, after whatever still runs: also when the caller was cancelled meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, "busrep-sqlite-snapshot")
        self._opened = contextlib.ExitStack()
        self._cursor: sqlite3.Cursor | None = None

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
