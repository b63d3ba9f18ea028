"""The SQLite store for threads: two connections as in store.py, each used by one thread at a time, whichever asks."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from busrep.errors import BusrepError, ClaimBlocked, CommitUnknown, ConfigError, Unavailable
from busrep.settings import Settings
from busrep.stores import claims, facts, schema
from busrep.stores.interface import ENDED_INSIDE, Claim, EffectsTransaction, FactRows
from busrep.stores.planned import PlannedStore
from busrep.stores.plans import Control, Plan, Sql, T
from busrep.stores.sqlite.dialect import SqliteDialect
from busrep.stores.sqlite.files import (
    BUSY,
    Mark,
    callers,
    check_file,
    connect,
    executor,
    file_at,
    in_transaction,
    last_steps,
    require_durable,
    run,
    translating,
)
from busrep.stores.transaction import NO_CLAIM
from busrep.streams import Registry

# A thread that was interrupted when it let its turn go tells nobody: who waits looks again after so many seconds.
LOOK = 0.5


class Holder:
    """What a turn is taken for: one transaction. ``over``: it has ended, whether or not that could be told."""

    over = False


class Turn:
    """A thread's turn to write, in this process. ``holder``: what it holds it for; whoever it is lets it go by name, so
    that an interrupted thread leaves nothing locked that is not written down somewhere."""

    def __init__(self, path: str) -> None:
        self._path = path
        # Entered itself, not its condition: that is done in Python, where an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._holder: Holder | None = None
        self._thread = 0

    def take(self, holder: Holder, wait: float) -> None:
        """Wait for the turn. Raises ConfigError where this thread has it, Unavailable after ``wait`` seconds."""
        self.check_not_nested()
        deadline = time.monotonic() + wait
        with self._lock:
            while self.taken:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unavailable(
                        f"SQLite database {self._path}",
                        f"a fact of this process has been open for more than {wait:g} s",
                    )
                self._changed.wait(min(left, LOOK))
            self._holder, self._thread = holder, threading.get_ident()

    @property
    def taken(self) -> bool:
        """Whether it is somebody's turn."""
        return self._holder is not None and not self._holder.over

    def check_not_nested(self) -> None:
        """Raise ConfigError in a thread whose turn it is."""
        if self.taken and self._thread == threading.get_ident():
            raise ConfigError(
                "SQLite has one write lock, and this thread holds it in an open fact: reserve, write and save before "
                "it or after it, or use PostgreSQL"
            )

    def of(self, holder: Holder) -> bool:
        """Whether it is that one's turn."""
        return self._holder is holder

    def leave(self, holder: Holder) -> None:
        """Let the next one write; nothing if it is not that one's turn (any more)."""
        with self._lock:
            if self._holder is holder:
                self._holder, self._thread = None, 0
                self._changed.notify()


class BlockingSqliteStore(PlannedStore):
    """An `AsyncStore` that runs in the calling thread: see blocking.py."""

    def __init__(self, path: str, streams: Registry, settings: Settings) -> None:
        super().__init__(streams, settings, SqliteDialect(f"sqlite:///{path}"))
        self.path = path
        self.turn = Turn(path)
        self._reading = threading.RLock()
        self._closing = Holder()
        self._connections: list[sqlite3.Connection] = []
        self._file: tuple[int, int] | None = None

    async def open(self) -> None:
        """See `AsyncStore`; a missing file is a missing schema, and is not created."""
        if self._connections:
            return
        if not Path(self.path).exists():  # noqa: ASYNC240 - no loop is meant to run it
            raise schema.missing(self.dialect, self.backings.values())
        self._file = file_at(self.path)
        try:
            for _ in ("write", "read"):
                self._connections.append(connect(self.path, "rw"))
            await self._read(schema.check(self.dialect, self.backings.values()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `AsyncStore`. An open transaction is waited for, a moment, and then rolled back."""
        with self._reading:
            connections, self._connections = self._connections, []
            if not connections:
                return
            with contextlib.suppress(Unavailable, ConfigError):
                self.turn.take(self._closing, self.settings.shutdown_timeout)
            for connection in connections:
                connection.close()
            self.turn.leave(self._closing)

    async def init(self, redefine: Collection[str] = ()) -> None:
        """See `AsyncStore`."""
        connection = connect(self.path, "rwc")
        try:
            run(schema.init(self.dialect, self.backings.values(), redefine), executor(connection, self.path), self.path)
        finally:
            connection.close()

    def _role(self, at: int) -> sqlite3.Connection:
        if not self._connections:
            raise Unavailable(f"SQLite database {self.path}", "the store is not open")
        return self._connections[at]

    def writing(self) -> sqlite3.Connection:
        """The connection that writes, for whose turn it is. Raises Unavailable."""
        connection = self._role(0)
        check_file(self.path, self._file)
        with translating(self.path):
            if connection.in_transaction:  # of a thread that was interrupted in it
                connection.execute("ROLLBACK")
        return connection

    async def _read(self, plan: Plan[T], wait: float = 0.0) -> T:  # noqa: ARG002 - no server
        with self._reading:
            check_file(self.path, self._file)
            return run(plan, executor(self._role(1), self.path), self.path)

    async def _write(self, plan: Plan[T], wait: float | None = None) -> T:
        holder = Holder()
        try:
            try:
                self.turn.take(holder, BUSY if wait is None else wait)
            except Unavailable as late:
                if wait is None:
                    raise
                raise ClaimBlocked("*", [str(late.reason)]) from late
            connection = self.writing()
            if wait is None:
                return run(plan, executor(connection, self.path), self.path)
            with translating(self.path):
                try:
                    connection.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
                    return run(plan, executor(connection, self.path), self.path)
                finally:
                    connection.execute(f"PRAGMA busy_timeout = {int(BUSY * 1000)}")
        finally:
            holder.over = True  # an interrupt may come before `leave` begins
            self.turn.leave(holder)

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        return run(plan, executor(self._checked(connection), self.path), self.path)

    def _checked(self, connection: Any) -> sqlite3.Connection:
        if not isinstance(connection, sqlite3.Connection):
            raise ConfigError(f"a sqlite3.Connection is needed, not {type(connection).__name__}")
        return connection

    async def reserve(self, stream: str, count: int) -> list[int]:
        """See `AsyncStore`. ConfigError inside an open fact of the same thread."""
        self.backing(stream)
        return await self._reserve(stream, count)

    def effects(self) -> EffectsTransaction:
        """See `AsyncStore`. ConfigError inside an open fact of the same thread."""
        self.turn.check_not_nested()
        return BlockingSqliteEffects(self)

    def transaction(self, claim: Claim, connection: Any = None) -> BlockingSqliteTransaction:
        """See `AsyncStore`. ConfigError inside an open fact of the same thread."""
        self.turn.check_not_nested()
        if connection is not None:
            require_durable(self._checked(connection), self.path)
            if in_transaction(connection):
                return JoinedSqliteTransaction(self, claim, connection)
        return BlockingSqliteTransaction(self, claim, connection)

    async def _lock_is_free(self) -> bool:
        """Whether nobody holds the write lock, at this moment."""

        def plan() -> Plan[None]:
            yield (Control.BEGIN, Control.ROLLBACK)

        try:
            await self._write(plan(), 0.0)
        except BusrepError:
            return False
        return True

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """See `AsyncStore`. Only this process can have the transaction open; the transaction itself knows."""
        if isinstance(marker, JoinedSqliteTransaction):
            if marker.may_be_open and not await self._read(marker.passed()) and not await self._lock_is_free():
                return None
        elif isinstance(marker, BlockingSqliteTransaction) and marker.may_be_open:
            return None
        return await super().outcome(claim, marker, facts_)


class BlockingSqliteTransaction(Holder):
    """An `AsyncTransaction` on the store's writing connection, or on the caller's, in the calling thread."""

    joined = False

    def __init__(self, store: BlockingSqliteStore, claim: Claim, connection: sqlite3.Connection | None) -> None:
        self.store, self.claim = store, claim
        self._callers = self._handed_out = connection is not None
        self.connection: sqlite3.Connection | None = connection
        self._pending: list[Sql] = []
        self._mark: Mark | None = None  # on the caller's connection

    @property
    def marker(self) -> object:
        """This object: it knows whether it has ended."""
        return self

    @property
    def may_be_open(self) -> bool:
        """Whether the transaction may still become committed."""
        return self.store.turn.of(self)

    def _run(self, plan: Plan[T]) -> T:
        assert self.connection is not None  # noqa: S101 - set by begin()
        return run(plan, executor(self.connection, self.store.path), self.store.path)

    def hand_out(self) -> Any:
        """See `AsyncTransaction`."""
        self._handed_out = True
        return self.connection

    async def begin(self) -> None:
        """See `AsyncTransaction`. The write lock itself keeps any successor from claiming meanwhile (9.4)."""
        try:
            self.store.turn.take(self, BUSY)
            if self.connection is None:
                self.connection = self.store.writing()
            self._run(self._begin())
            if self._callers:
                self._mark = Mark(self.connection, self.store.path)
        except BaseException:
            self._end()
            raise

    def _begin(self) -> Plan[object]:
        return claims.hold(self.store.dialect, self.claim, Control.BEGIN)

    async def insert(self, stream: str, facts_: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`; sent with the next statement."""
        self._pending += facts.insert(self.store.dialect, self.store.backing(stream), self.claim.writer, facts_)

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`."""
        self._handed_out = True
        pending, self._pending = self._pending, []
        return self._run(callers(sql, params, pending))

    async def commit(self) -> None:
        """See `AsyncTransaction`."""
        pending, self._pending = self._pending, []
        if not in_transaction(self.connection) or (self._mark is not None and not self._mark.stands):
            self._end()
            raise CommitUnknown(self, ConfigError(ENDED_INSIDE))
        try:
            if self._mark is not None:
                self._mark.clear()
            self._run(last_steps(self.store.dialect, self.claim, pending, Control.COMMIT, again=self._handed_out))
        except BusrepError as error:
            if in_transaction(self.connection):
                raise  # nothing was committed; rollback() is due
            self._end()
            raise CommitUnknown(self, error) from error
        self._end()

    async def rollback(self) -> bool:
        """See `AsyncTransaction`."""
        self._pending = []
        if not self.store.turn.of(self):
            return True
        open_still = in_transaction(self.connection)  # of one that is closed it is not known how that came
        self._end()
        return open_still and not (self._handed_out if self._mark is None else self._mark.stands)

    def _end(self) -> None:
        """Roll back what is open, and let the next one write."""

        def plan() -> Plan[None]:
            yield Control.ROLLBACK

        if not self.store.turn.of(self):
            return
        try:
            if self.connection is not None and not self.connection_closed():
                with contextlib.suppress(BusrepError):
                    self._run(plan())
        finally:
            self.store.turn.leave(self)

    def connection_closed(self) -> bool:
        """Whether the connection was closed, and its transaction rolled back with it."""
        try:
            return self.connection is None or not isinstance(self.connection.in_transaction, bool)
        except sqlite3.ProgrammingError:
            return True


class BlockingSqliteEffects(BlockingSqliteTransaction):
    """An `EffectsTransaction`: the same, without a claim, on the store's writing connection."""

    def __init__(self, store: BlockingSqliteStore) -> None:
        super().__init__(store, NO_CLAIM, None)

    def _begin(self) -> Plan[None]:
        yield Control.BEGIN

    @property
    def ended(self) -> bool:
        """See `EffectsTransaction`."""
        return not self.connection_closed() and not in_transaction(self.connection)


class JoinedSqliteTransaction(BlockingSqliteTransaction):
    """An `AsyncTransaction` in the one that the caller has begun on a connection of his own.

    He may hold the one write lock already, so IDs can be reserved nowhere else but here, where ROLLBACK takes them
    back: for the lock's sake nobody can have been given a higher one meanwhile. Who gets such an ID again knows by that
    of the ROLLBACK.
    """

    joined = True
    reserves = True

    def __init__(self, store: BlockingSqliteStore, claim: Claim, connection: sqlite3.Connection) -> None:
        super().__init__(store, claim, connection)
        self._thread = threading.get_ident()
        self._begun = False
        self._reserved: dict[str, int] = {}

    @property
    def marker(self) -> object:
        """This object, once something may be written."""
        return self if self._begun else None

    @property
    def may_be_open(self) -> bool:
        """Whether the connection is in a transaction, this one or one after it; as far as this thread can tell.

        To other threads it looks as if COMMIT had ended the transaction when it begins to write.
        """
        if threading.get_ident() != self._thread:
            return True
        return in_transaction(self.connection)

    def passed(self) -> Plan[bool]:
        """Whether, as others see the sequences, the IDs are given: by the COMMIT of this transaction, or to somebody
        else after its end."""
        for stream, last in self._reserved.items():
            answers = yield self.store.dialect.sequence(stream)
            if answers[0] and answers[0][0][0] >= last:
                return True
        return False

    async def reserve(self, stream: str, count: int) -> list[int]:
        """IDs that are ours unless the transaction is rolled back. It takes the write lock. Raises Unavailable."""
        backing = self.store.backing(stream)
        try:
            ids = self._run(facts.reserve(self.store.dialect, stream, count, [backing]))
        except Unavailable as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) != sqlite3.SQLITE_BUSY_SNAPSHOT:
                raise
            raise Unavailable(
                error.what, "the transaction has read what another one changed since: begin it with BEGIN IMMEDIATE"
            ) from error
        self._reserved[stream] = ids[-1]
        return ids

    async def begin(self) -> None:
        """See `AsyncTransaction`. `reserve` has taken the write lock, which keeps any successor out (9.4)."""
        self._run(claims.hold(self.store.dialect, self.claim))
        assert self.connection is not None  # noqa: S101 - given
        self._mark = Mark(self.connection, self.store.path)
        self._begun = True

    async def commit(self) -> None:
        """See `AsyncTransaction`."""
        pending, self._pending = self._pending, []
        if not self.may_be_open or self._mark is None or not self._mark.stands:
            raise ConfigError("the connection's transaction ended inside the fact's block: commit after it")
        self._mark.clear()
        self._run(last_steps(self.store.dialect, self.claim, pending, again=True))

    async def rollback(self) -> bool:
        """See `AsyncTransaction`; it is the caller's."""
        self._pending = []
        if self._mark is not None and self._mark.stands and in_transaction(self.connection):
            self._mark.clear()
        return True
