"""The SQLite store for threads: each of the two connections is used by one thread at a time, whichever asks."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from busrep.errors import BusrepError, ConfigError, Unavailable
from busrep.settings import Settings
from busrep.stores import claims, facts
from busrep.stores.interface import Appended, Claim, Group
from busrep.stores.plans import Control, Plan, T, only
from busrep.stores.sqlite.base import READ, FileStore, Holder, SqliteTransaction, Turn
from busrep.stores.sqlite.files import Mark, in_transaction, last_steps
from busrep.streams import Registry

# A thread that was interrupted when it let its turn go tells nobody: who waits looks again after so many seconds.
LOOK = 0.5


class ThreadTurn(Turn):
    """A thread's turn to write."""

    asker = "thread"
    owner = staticmethod(threading.get_ident)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # Entered itself, not its condition: that is done in Python, where an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    async def take(self, holder: Holder, wait: float) -> None:
        """See `Turn`; it blocks."""
        self.check_not_nested()
        deadline = time.monotonic() + wait
        with self._lock:
            while self._holder is not None and not self._holder.over:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._late(wait)
                self._changed.wait(min(left, LOOK))
            holder.owner = self.owner()
            self._holder = holder

    def leave(self, holder: Holder) -> None:
        with self._lock:
            if self._holder is holder:
                self._holder = None
                self._changed.notify()


class BlockingSqliteStore(FileStore):
    """An `AsyncStore` that runs in the calling thread: see blocking.py."""

    on_loop = False

    def __init__(self, path: str, streams: Registry, settings: Settings) -> None:
        super().__init__(path, streams, settings, ThreadTurn(path))
        self.transactions, self.joining = SqliteTransaction, JoinedSqliteTransaction
        self._reading = threading.RLock()
        self._closing = Holder()

    async def open(self) -> None:
        if not self._connections:
            await super().open()

    async def close(self) -> None:
        """See `AsyncStore`. An open transaction is waited for, a moment, and then rolled back."""
        with self._reading:
            connections, self._connections = self._connections, []
            if not connections:
                return
            with contextlib.suppress(Unavailable, ConfigError):
                await self.turn.take(self._closing, self.settings.shutdown_timeout)
            for connection in connections:
                connection.close()
            self.turn.leave(self._closing)

    async def init(self, redefine: Collection[str] = ()) -> None:
        self.make_tables(redefine)

    async def in_thread(self, role: int, work: Callable[[], T]) -> T:
        """See `FileStore`; whoever writes has the turn."""
        with self._reading if role == READ else contextlib.nullcontext():
            return work()

    async def write(self, plan: Plan[T], wait: float | None = None) -> T:
        holder = Holder()
        try:
            await self.take_turn(holder, wait)
            return self.write_on(self.writing(), plan, wait)
        except BaseException:
            if self.turn.of(holder):  # interrupted behind BEGIN, say: no other process could write
                with contextlib.suppress(BusrepError):
                    self.writing()
            raise
        finally:
            holder.over = True  # an interrupt may come before `leave` begins
            self.turn.leave(holder)

    async def write_appended(self, claim: Claim, group: Group, given: Sequence[Appended]) -> None:
        """See `PlannedStore`; in this thread, so nothing of it comes later. Whoever settles a doubt of it need not wait
        for a turn to write."""
        try:
            await super().write_appended(claim, group, given)
        finally:
            group.settled = True


class JoinedSqliteTransaction(SqliteTransaction):
    """An `AsyncTransaction` in the one that the caller has begun on a connection of his own.

    He may hold the one write lock already, so IDs can be reserved nowhere else but here, where ROLLBACK takes them
    back: for the lock's sake nobody can have been given a higher one meanwhile. Who gets such an ID again knows by that
    of the ROLLBACK.
    """

    joined = reserves = exclusive = True

    def __init__(self, store: FileStore, claim: Claim, connection: sqlite3.Connection | None) -> None:
        super().__init__(store, claim, connection)
        self._thread = threading.get_ident()
        self._reserved: dict[str, int] = {}

    @property
    def marker(self) -> object:
        """This object, once something may be written."""
        return None if self._mark is None else self

    async def still_open(self) -> bool:
        """See `PlannedTransaction`; the connection may be in the caller's next transaction by now.

        To other threads it looks as if COMMIT had ended the transaction when it begins to write: they ask the database.
        """
        if threading.get_ident() == self._thread and not in_transaction(self.connection):
            return False
        if await self.store.read(self.passed()):
            return False
        try:
            await self.store.write(only(Control.BEGIN, Control.ROLLBACK), 0.0)
        except BusrepError:
            return True  # the write lock is held
        return False

    async def rolled_back(self) -> bool:
        """See `PlannedTransaction`: the sequences went back with it."""
        return not await self.store.read(self.passed())

    def passed(self) -> Plan[bool]:
        """Whether, as others see the sequences, the IDs are given: by the COMMIT of this transaction, or to somebody
        else after its end."""
        for stream, last in self._reserved.items():
            answers = yield self.store.dialect.sequence(stream)
            if answers[0] and answers[0][0][0] >= last:
                return True
        return False

    async def _reserve(self, stream: str, count: int) -> list[int]:
        """IDs that are ours unless the transaction is rolled back. It takes the write lock. Raises Unavailable."""
        try:
            ids = await self._run(facts.reserve(self.store.dialect, stream, count))
        except Unavailable as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY_SNAPSHOT:
                raise
            raise Unavailable(
                error.what, "the transaction has read what another one changed since: begin it with BEGIN IMMEDIATE"
            ) from error
        self._reserved[stream] = ids[-1]
        return ids

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:
        """See `AsyncTransaction`. To reserve takes the write lock, which keeps any successor out."""
        found = {stream: await self._reserve(stream, count) for stream, count in ids.items()}
        await self._run(claims.hold(self.store.dialect, self.claim))
        self._mark = Mark(self.connection, self.store.path)
        return found

    async def commit(self) -> None:
        pending = self._take_pending()
        if not in_transaction(self.connection) or self._mark is None or not self._mark.stands:
            raise ConfigError("the connection's transaction ended inside the fact's block: commit after it")
        self._mark.clear()
        await self._run(last_steps(self.store.dialect, self.claim, pending, again=True))

    async def rollback(self) -> bool:
        """See `AsyncTransaction`; it is the caller's."""
        self._take_pending()
        if self._mark is not None and self._mark.stands and in_transaction(self.connection):
            self._mark.clear()
        return True
