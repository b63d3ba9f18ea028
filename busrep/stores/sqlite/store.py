"""The SQLite store: one file, WAL mode, several processes; one writer at a time is SQLite's own rule.

Two connections, each with a thread of its own: reads never wait behind an open write transaction. Inside one
process write transactions queue up on a lock, in order; between processes SQLite's busy timeout decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from busrep.core.snapshots import Agreement
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
from busrep.stores.sqlite.snapshots import SqliteSnapshots
from busrep.stores.transaction import NO_CLAIM
from busrep.streams import Registry

IN_TRANSACTION = (
    "the connection is in a transaction already: on SQLite begin with bus.write(), the fact's ID must be reserved "
    "before the one write lock is taken"
)


class SqliteStore(PlannedStore):
    """An `AsyncStore` on an SQLite file."""

    def __init__(self, path: str, streams: Registry, settings: Settings) -> None:
        super().__init__(streams, settings, SqliteDialect(f"sqlite:///{path}"))
        self.path = path
        self.lock = asyncio.Lock()
        self.holder: asyncio.Task[Any] | None = None
        self._threads: list[ThreadPoolExecutor] = []
        self._connections: list[sqlite3.Connection] = []
        self._file: tuple[int, int] | None = None
        self._snapshots = SqliteSnapshots(path, self.dialect, settings.snapshots)

    async def open(self) -> None:
        """See `AsyncStore`; a missing file is a missing schema, and is not created."""
        if self._threads:
            return
        if not Path(self.path).exists():  # noqa: ASYNC240 - one stat, at the start
            raise schema.missing(self.dialect, self.backings.values())
        self._file = file_at(self.path)
        self._threads = [ThreadPoolExecutor(1, f"busrep-sqlite-{role}") for role in ("write", "read")]
        try:
            loop = asyncio.get_running_loop()
            for thread in self._threads:
                self._connections.append(await loop.run_in_executor(thread, connect, self.path, "rw"))
            await self._read(schema.check(self.dialect, self.backings.values()))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `AsyncStore`. What runs in the threads is waited for; open transactions are rolled back."""
        self._snapshots.held.leave_all()
        threads, self._threads = self._threads, []
        connections, self._connections = self._connections, []
        loop = asyncio.get_running_loop()
        for thread, connection in zip(threads, connections, strict=False):
            await asyncio.shield(loop.run_in_executor(thread, connection.close))
        for thread in threads:
            thread.shutdown()

    async def init(self, redefine: Collection[str] = ()) -> None:
        """See `AsyncStore`."""

        def work() -> None:
            connection = connect(self.path, "rwc")
            try:
                run(
                    schema.init(self.dialect, self.backings.values(), redefine),
                    executor(connection, self.path),
                    self.path,
                )
            finally:
                connection.close()

        await asyncio.to_thread(work)

    def _role(self, role: int) -> tuple[ThreadPoolExecutor, sqlite3.Connection]:
        if not self._connections:
            raise Unavailable(f"SQLite database {self.path}", "the store is not open")
        return self._threads[role], self._connections[role]

    async def _read(self, plan: Plan[T], wait: float = 0.0) -> T:  # noqa: ARG002 - no server
        thread, connection = self._role(1)
        check_file(self.path, self._file)
        work = asyncio.get_running_loop().run_in_executor(thread, run, plan, executor(connection, self.path), self.path)
        return await asyncio.shield(work)

    async def acquire(self, wait: float = BUSY) -> None:
        """The process's turn to write. A task that holds it already would wait for itself: ConfigError."""
        self.check_not_nested()
        if self._connections:
            check_file(self.path, self._file)
        try:
            async with asyncio.timeout(wait):
                await self.lock.acquire()
        except TimeoutError as late:
            held = "a fact of this process has been open"
            raise Unavailable(f"SQLite database {self.path}", f"{held} for more than {wait:g} s") from late

    def check_not_nested(self) -> None:
        """Raise ConfigError in a task that holds the write lock in an open fact."""
        if self.holder is not None and self.holder is asyncio.current_task():
            raise ConfigError(
                "SQLite has one write lock, and this task holds it in an open fact: reserve, write and save before "
                "it or after it, or use PostgreSQL"
            )

    async def in_write_thread(self, work: Callable[[], T]) -> T:
        """Run in the writing thread, to the end even when cancelled; the lock must be held."""
        thread, _ = self._role(0)
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread, work))

    async def _write(self, plan: Plan[T], wait: float | None = None) -> T:
        self._role(0)
        try:
            await self.acquire(BUSY if wait is None else wait)
        except Unavailable as late:
            if wait is None:
                raise
            raise ClaimBlocked("*", [late.reason if isinstance(late.reason, str) else "a fact"]) from late

        def work() -> T:
            with translating(self.path):
                try:
                    if wait is not None:
                        connection.execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
                    return run(plan, executor(connection, self.path), self.path)
                finally:
                    if wait is not None:
                        connection.execute(f"PRAGMA busy_timeout = {int(BUSY * 1000)}")

        try:
            thread, connection = self._role(0)  # only now: it may have been closed meanwhile
            future = asyncio.get_running_loop().run_in_executor(thread, work)
        except BaseException:
            self.lock.release()
            raise
        # Not in a finally: a cancelled caller leaves while the thread is still writing.
        future.add_done_callback(self._written)
        return await asyncio.shield(future)

    def _written(self, future: asyncio.Future[Any]) -> None:
        self.lock.release()
        if not future.cancelled():
            future.exception()  # looked at, also when the caller was cancelled

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        if not isinstance(connection, sqlite3.Connection):
            raise ConfigError(f"a sqlite3.Connection is needed, not {type(connection).__name__}")
        return run(plan, executor(connection, self.path), self.path)

    async def reserve(self, stream: str, count: int) -> list[int]:
        """See `AsyncStore`. ConfigError inside an open fact of the same task."""
        self.check_not_nested()
        return await super().reserve(stream, count)

    def effects(self) -> EffectsTransaction:
        """See `AsyncStore`. ConfigError inside an open fact of the same task."""
        self.check_not_nested()
        return SqliteEffects(self)

    def transaction(self, claim: Claim, connection: Any = None) -> SqliteTransaction:
        """See `AsyncStore`. ConfigError inside an open fact of the same task."""
        self.check_not_nested()
        if connection is not None:
            if not isinstance(connection, sqlite3.Connection):
                raise ConfigError(f"a sqlite3.Connection is needed, not {type(connection).__name__}")
            if in_transaction(connection):
                raise ConfigError(IN_TRANSACTION)
            require_durable(connection, self.path)
        return SqliteTransaction(self, claim, connection)

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """See `AsyncStore`. Only this process can have the transaction open; the transaction itself knows."""
        if isinstance(marker, SqliteTransaction) and marker.may_be_open:
            return None
        return await super().outcome(claim, marker, facts_)

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """See `SnapshotSource`."""
        self._check_open()
        agreement = await self._snapshots.agree(self.backing(stream), part_rows, again)
        if not self._threads:  # closed meanwhile
            self._snapshots.held.leave(agreement)
            self._check_open()
        return agreement

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`; one transaction a part, which holds up no checkpoint for longer."""
        self._check_open()
        async with contextlib.aclosing(
            self._snapshots.load(self.backing(agreement.stream), agreement, number)
        ) as pieces:
            async for piece in pieces:
                yield piece

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`."""
        self._snapshots.held.leave(agreement)

    def _check_open(self) -> None:
        self._role(1)
        check_file(self.path, self._file)


class SqliteTransaction:
    """An `AsyncTransaction`: on the store's writing connection, in its thread, or on the caller's, in the caller's
    thread (which is the event loop's)."""

    joined = False

    def __init__(self, store: SqliteStore, claim: Claim, connection: sqlite3.Connection | None) -> None:
        self.store, self.claim = store, claim
        self._callers = self._handed_out = connection is not None
        self.connection: sqlite3.Connection | None = connection
        self._pending: list[Sql] = []
        self._holds = False
        self._mark: Mark | None = None  # on the caller's connection
        self._committing: asyncio.Future[Any] | None = None

    @property
    def marker(self) -> object:
        """This object: it knows whether it has ended."""
        return self

    @property
    def may_be_open(self) -> bool:
        """Whether the transaction may still become committed."""
        if self._holds:
            return True
        return self._callers and in_transaction(self.connection)

    async def _run(self, plan: Plan[T]) -> T:
        connection = self.connection
        assert connection is not None  # noqa: S101 - set by begin()
        execute = executor(connection, self.store.path)
        if self._callers:
            return run(plan, execute, self.store.path)
        return await self.store.in_write_thread(lambda: run(plan, execute, self.store.path))

    def hand_out(self) -> Any:
        """See `AsyncTransaction`."""
        self._handed_out = True
        return self.connection

    async def begin(self) -> None:
        """See `AsyncTransaction`. The write lock itself keeps any successor from claiming meanwhile (9.4)."""
        await self.store.acquire()
        self._holds, self.store.holder = True, asyncio.current_task()
        ours = False
        try:
            if self.connection is None:
                self.connection = self.store._role(0)[1]
            ours = not in_transaction(self.connection)
            await self._run(self._begin())
            if self._callers:
                self._mark = Mark(self.connection, self.store.path)
        except BaseException:
            if ours:  # in the same thread: BEGIN may be under way still, or done, and what came behind it failed
                await self._end(Control.ROLLBACK)
            else:
                self._release()
            raise

    def _begin(self) -> Plan[object]:
        return claims.hold(self.store.dialect, self.claim, Control.BEGIN)

    async def insert(self, stream: str, facts_: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`; sent with the next statement, to save a change of threads."""
        self._pending += facts.insert(self.store.dialect, self.store.backing(stream), self.claim.writer, facts_)

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`."""
        self._handed_out = True
        pending, self._pending = self._pending, []
        return await self._run(callers(sql, params, pending))

    async def commit(self) -> None:
        """See `AsyncTransaction`."""
        pending, self._pending = self._pending, []
        if not in_transaction(self.connection) or (self._mark is not None and not self._mark.stands):
            await self._end(Control.ROLLBACK)
            raise CommitUnknown(self, ConfigError(ENDED_INSIDE))
        if self._mark is not None:
            self._mark.clear()
        last = last_steps(self.store.dialect, self.claim, pending, Control.COMMIT, again=self._handed_out)
        self._committing = asyncio.ensure_future(self._run(last))
        try:
            await asyncio.shield(self._committing)
        except asyncio.CancelledError as cancelled:
            self._committing.add_done_callback(self._committed)
            raise CommitUnknown(self, cancelled, cancelled=True) from cancelled
        except Exception as error:
            if in_transaction(self.connection):
                raise  # nothing was committed; rollback() is due
            self._release()
            raise CommitUnknown(self, error) from error
        self._release()

    def _committed(self, done: asyncio.Future[Any]) -> None:
        """A commit whose caller was cancelled has ended; if it failed nobody else rolls back."""
        if done.cancelled() or done.exception() is not None:
            self._ending = asyncio.ensure_future(self._end(Control.ROLLBACK))
        else:
            self._release()

    async def rollback(self) -> bool:
        """See `AsyncTransaction`."""
        self._pending = []
        if not self._holds or not (self._committing is None or self._committing.done()):
            return True
        open_still = in_transaction(self.connection)
        await self._end(Control.ROLLBACK)
        return open_still and not (self._handed_out if self._mark is None else self._mark.stands)

    async def _end(self, how: Control) -> None:
        def plan() -> Plan[None]:
            yield how

        ending = asyncio.ensure_future(self._run(plan()))
        ending.add_done_callback(lambda _: self._release())
        with contextlib.suppress(BusrepError):
            await asyncio.shield(ending)

    def _release(self) -> None:
        if self._holds:
            self._holds, self.store.holder = False, None
            self.store.lock.release()


class SqliteEffects(SqliteTransaction):
    """An `EffectsTransaction`: the same, without a claim, on the store's writing connection, which no other thread uses
    meanwhile."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store, NO_CLAIM, None)

    def _begin(self) -> Plan[None]:
        yield Control.BEGIN

    @property
    def ended(self) -> bool:
        """See `EffectsTransaction`."""
        return not in_transaction(self.connection)
