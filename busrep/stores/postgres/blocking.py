"""The PostgreSQL store for threads (psycopg 3): blocking connections, in two pools as in store.py.

The pools are busrep's own: psycopg_pool's start threads, which a process that forks, or wants none, cannot have.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from busrep.errors import Unavailable
from busrep.settings import Settings
from busrep.stores import schema
from busrep.stores.plans import Plan, T
from busrep.stores.postgres.prepared import Prepared
from busrep.stores.postgres.steps import on_connection
from busrep.stores.postgres.store import CANCEL_TIMEOUT, OPTIONS, POOL_WAIT, QUESTIONS, PostgresStore, alive
from busrep.streams import Registry

# Not first: steps.py says which extra is missing.
import psycopg  # isort: skip
from psycopg.abc import PQGen  # isort: skip
from psycopg.pq import TransactionStatus  # isort: skip

V = TypeVar("V")


class OwnConnection(psycopg.Connection[Any]):
    """One of the store's own. ``within``: seconds for the answer to a statement, after which it is closed; None, as for
    the application's statements on it: no deadline. ``prepared``: None for one that is not for questions."""

    within: float | None = None
    prepared: Prepared | None = None
    left_alone = False  # see `StoreConnection`

    def wait(self, gen: PQGen[V], interval: float = 0.1, timeout: float | None = None) -> V:
        within = self.within
        try:
            return super().wait(gen, interval, within if timeout is None else timeout)
        except psycopg.OperationalError as error:
            if within is None or self.info.transaction_status != TransactionStatus.ACTIVE:
                raise
            # The server may be well, and wait for a lock: each beat would leave it one more session that does.
            if not self.left_alone:
                with contextlib.suppress(psycopg.Error):
                    self.cancel_safe(timeout=CANCEL_TIMEOUT)
            close(self)
            raise psycopg.OperationalError(f"no answer within {within:g} s") from error


class _Place:
    """Of a connection that is being made."""


class Pool:
    """At most ``most`` connections that ``connect`` makes, one user each; whoever finds none waits for one.

    A connection that is lost instead of put back, for its thread was interrupted, is given up by the garbage
    collector, and counts no more from then on. So does the place of one that was about to be made.
    """

    def __init__(self, connect: Callable[[], OwnConnection], most: int, where: str) -> None:
        self._connect, self._most, self._where = connect, most, where
        # Entered itself, not its condition: that is done in Python, where an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._idle: list[OwnConnection] = []
        self._out: weakref.WeakSet[OwnConnection | _Place] = weakref.WeakSet()
        self._closed = False

    def take(self) -> OwnConnection:
        """A connection that was alive a moment ago. Raises Unavailable, after POOL_WAIT seconds at most."""
        deadline = time.monotonic() + POOL_WAIT
        with self._lock:
            while True:
                if self._closed:
                    raise Unavailable(self._where, "the store is not open")
                while self._idle:
                    connection = self._idle.pop()  # the last used: those that are not needed are left to grow cold
                    if alive(connection):
                        self._out.add(connection)
                        return connection
                    close(connection)
                if len(self._out) < self._most:
                    place = _Place()
                    self._out.add(place)
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise Unavailable(
                        self._where, f"all {self._most} connections are in use, none came back in {POOL_WAIT:g} s"
                    )
        try:
            connection = self._connect()
            self._out.add(connection)
        finally:
            with self._lock:
                self._out.discard(place)
                self._changed.notify()
        return connection

    def put(self, connection: OwnConnection) -> None:
        """Give a connection back; one that is not idle is closed."""
        idle = not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE
        with self._lock:
            self._out.discard(connection)
            keep = idle and not self._closed
            if keep:
                self._idle.append(connection)
            self._changed.notify()
        if not keep:
            close(connection)

    def renew(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            close(connection)

    def open(self) -> None:
        """Give out connections (again)."""
        self._closed = False

    def close(self) -> None:
        """Give out no more connections; those in use are closed when they come back."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.renew()


def close(connection: psycopg.Connection[Any]) -> None:
    """Close a connection that may be dead."""
    with contextlib.suppress(psycopg.Error):
        connection.close()


class BlockingPostgresStore(PostgresStore):
    """An `AsyncStore` that runs in the calling thread: see blocking.py. It connects when first asked something."""

    on_loop = False
    callers = (psycopg.Connection,)

    def __init__(self, url: str, streams: Registry, settings: Settings) -> None:
        super().__init__(url, streams, settings)
        self.transactions = self.handlers = Pool(self.dial, settings.transactions, self.where)
        self.questions = Pool(self._dial_for_questions, settings.fetches + QUESTIONS, self.where)
        self._opened = False

    def dial(self) -> OwnConnection:
        try:
            return OwnConnection.connect(self.url, **OPTIONS)
        except psycopg.Error as error:
            raise Unavailable(self.where, error) from error

    def _dial_for_questions(self) -> OwnConnection:
        connection = self.dial()
        connection.prepared = Prepared(connection.info.backend_pid)
        return connection

    async def open(self) -> None:
        if self._opened:
            return
        for pool in self._pools:
            pool.open()
        try:
            await self.read(schema.check(self.dialect))
        except BaseException:
            await self.close()
            raise
        self._opened = True

    async def close(self) -> None:
        self._opened = False
        for pool in self._pools:
            pool.close()

    async def _alone(self, plan: Plan[T]) -> T:
        connection = self.dial()
        try:
            return await on_connection(connection, plan)
        finally:
            close(connection)

    async def run_plan(self, connection: Any, plan: Plan[T], within: float | None = None) -> T:
        """See `ServerStore`: on the caller's connection without a deadline."""
        if not isinstance(connection, OwnConnection):
            return await super().run_plan(connection, plan)
        try:
            connection.within = within
            return await super().run_plan(connection, plan)
        finally:
            connection.within = None

    async def _take(self, pool: Any) -> Any:
        return pool.take()

    def _give_back(self, pool: Any, connection: Any) -> None:
        pool.put(connection)

    def renew(self) -> None:
        """Close the connections of both pools that are not in use."""
        for pool in self._pools:
            pool.renew()
