"""The memory store: an SQLite database in this process's memory, for tests and facts that may end with the process.

Stores of one name share their contents within the process. Each operation runs to its end in the thread that asks,
under a lock: nothing waits, so it works under an event loop on virtual time. A transaction of facts keeps its rows to
itself until it commits, so that several may be open at a time, as on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import attrs

from busrep.errors import ClaimBlocked, ConfigError
from busrep.settings import Settings
from busrep.stores import claims, schema
from busrep.stores.dialect import generic_backing
from busrep.stores.interface import Claim
from busrep.stores.planned import PlannedStore, PlannedTransaction
from busrep.stores.plans import Control, Plan, T
from busrep.stores.sqlite.dialect import SqliteDialect
from busrep.stores.sqlite.files import in_transaction, run
from busrep.streams import Registry

# Between two looks whether a writer's open transactions have ended: they may end in another thread, seconds.
LOOK = 0.002

NO_CONNECTIONS = "the memory store has no connections: use an SQLite or PostgreSQL store"


def _connect() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


@attrs.define(eq=False)
class World:
    """What stores of one name share, until the last of them is gone. ``open``: how many transactions hold each writer's
    claim."""

    connection: sqlite3.Connection = attrs.field(factory=_connect)
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    open: Counter[str] = attrs.field(factory=Counter)

    @property
    def epoch(self) -> str:
        """The epoch of the log."""
        return str(self.ask("SELECT value FROM busrep_meta WHERE key = 'epoch'")[0][0])

    def ask(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, for tests that look inside, or do what a failover does."""
        with self.lock:
            return self.connection.execute(sql, params).fetchall()

    def __del__(self) -> None:
        self.connection.close()


_WORLDS: dict[str, World] = {}
_MAKING = threading.Lock()


def world_of(name: str) -> World:
    """Return what the stores of this name share, made if need be."""
    with _MAKING:
        if name not in _WORLDS:
            _WORLDS[name] = World()
        return _WORLDS[name]


def forget(name: str) -> None:
    """Make the next store of this name begin empty; those that are there keep their contents."""
    with _MAKING:
        _WORLDS.pop(name, None)


class MemoryStore(PlannedStore):
    """An `AsyncStore` in this process's memory."""

    on_loop = False

    def __init__(self, name: str, streams: Registry, settings: Settings) -> None:
        super().__init__(streams, settings, SqliteDialect(f"memory://{name}"))
        self.dialect.name = "memory"
        # An application has no table here: all streams are in busrep's own.
        self.dialect.backings = {stream.name: generic_backing(stream) for stream in streams if not stream.resettable}
        self.name = name
        self.world = world_of(name)

    async def open(self) -> None:
        await self.read(schema.check(self.dialect))

    async def close(self) -> None:
        """See `AsyncStore`; the contents stay as long as the process."""
        await self.snapshots.leave_all()

    async def init(self, redefine: Collection[str] = ()) -> None:
        await self.write(schema.init(self.dialect, redefine))

    def run(self, plan: Plan[T]) -> T:
        """Run a plan to its end; a transaction that it leaves open is rolled back."""
        with self.world.lock:
            try:
                return run(plan, self.world.connection, self.name)
            finally:
                if in_transaction(self.world.connection):
                    self.world.connection.execute("ROLLBACK")

    async def read(self, plan: Plan[T], wait: float = 0.0) -> T:  # noqa: ARG002 - nothing is waited for
        return self.run(plan)

    async def write(self, plan: Plan[T], wait: float | None = None) -> T:  # noqa: ARG002
        return self.run(plan)

    async def _on(self, connection: Any, plan: Plan[T]) -> NoReturn:  # noqa: ARG002
        plan.close()
        raise ConfigError(NO_CONNECTIONS)

    # -- writers

    async def _pause(self) -> None:
        await asyncio.sleep(LOOK)

    async def _without_transactions(self, writer: str, wait: float, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run what never waits once no transaction holds the writer's claim, as FOR SHARE does in a database."""
        deadline = time.monotonic() + wait
        while True:
            with self.world.lock:
                open_ones = self.world.open[writer]
                if not open_ones:
                    return await work()
            if time.monotonic() >= deadline:
                raise ClaimBlocked(writer, [f"{open_ones} open transaction(s) of this process"])
            await self._pause()

    async def claim(self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None) -> Claim:
        work = partial(super().claim, writer, streams, timeout=timeout, again=again)
        return await self._without_transactions(writer, timeout, work)

    async def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:
        work = partial(super().finish, writer, incarnation, timeout=timeout)
        return await self._without_transactions(writer, timeout, work)

    def transaction(self, claim: Claim, connection: Any = None) -> MemoryTransaction:
        """See `AsyncStore`; there are no connections here."""
        if connection is not None or claim is claims.NO_CLAIM:
            raise ConfigError(NO_CONNECTIONS)
        return MemoryTransaction(self, claim)


class BlockingMemoryStore(MemoryStore):
    """The memory store without an event loop. It shares its contents with all others of its name."""

    async def _pause(self) -> None:
        time.sleep(LOOK)  # noqa: ASYNC251 - no loop is meant to run it


class MemoryTransaction(PlannedTransaction):
    """An `AsyncTransaction`: rows that become visible together."""

    store: MemoryStore

    def __init__(self, store: MemoryStore, claim: Claim) -> None:
        super().__init__(store, claim, None)
        self.open = False

    @property
    def ended(self) -> bool:
        return not self.open

    async def still_open(self) -> bool:
        return self.open

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:  # noqa: ARG002
        with self.store.world.lock:
            self.store.run(claims.check_claim(self.store.dialect, self.claim))
            self.store.world.open[self.claim.writer] += 1
            self.open = True
        return {}

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:  # noqa: ARG002
        """See `AsyncTransaction`; there is no connection here to run it on."""
        raise ConfigError("the memory store runs no SQL: use an SQLite or PostgreSQL store")

    async def commit(self) -> None:
        def plan() -> Plan[None]:
            yield from claims.hold(self.store.dialect, self.claim, Control.BEGIN)
            yield (*self._pending, Control.COMMIT)

        with self.store.world.lock:
            if self._pending:
                self.store.run(plan())
            await self.rollback()

    async def rollback(self) -> bool:
        with self.store.world.lock:
            self._pending = []
            if self.open:
                self.open = False
                self.store.world.open[self.claim.writer] -= 1
        return True
