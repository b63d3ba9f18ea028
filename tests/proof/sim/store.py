"""The PostgreSQL store on a simulated database: its plans, its transaction and its errors, without its driver."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.stores import schema
from busrep.stores.interface import Claim
from busrep.stores.plans import Answers, Plan, Signal, Step, T, run_async
from busrep.stores.postgres.dialect import PostgresDialect
from busrep.stores.server import ServerStore, ServerTransaction, by_state, final
from busrep.streams import Registry
from tests.proof.sim.path import Path, SimConnection
from tests.proof.sim.tables import SimError, SimSerializationFailure, SimUnknownMarker


def translated(error: SimError) -> Exception:
    """The signal or error of busrep that this is."""
    return by_state(error, error.sqlstate, operational=error.operational)


async def on_connection(connection: SimConnection, plan: Plan[T]) -> T:
    """Run a plan, and turn the signals that are left into errors."""

    async def execute(steps: tuple[Step, ...]) -> Answers:
        if not steps:
            return []
        try:
            return await connection.run(steps)
        except SimError as error:
            raise translated(error) from error

    try:
        return await run_async(plan, execute)
    except Signal as signal:
        raise final(signal) from signal.cause


def checked(connection: Any) -> SimConnection:
    """The caller's connection; ConfigError when it is none to a simulated database."""
    if not isinstance(connection, SimConnection):
        raise ConfigError(f"a SimConnection is needed, not {type(connection).__name__}")
    return connection


class SimStore(ServerStore):
    """An `AsyncStore` on a simulated database, or a replica of one, reached over ``path``."""

    where = "the simulated PostgreSQL"
    serialization_failure = SimSerializationFailure
    unknown_marker = SimUnknownMarker

    def __init__(self, streams: Registry, settings: Settings, path: Path) -> None:
        super().__init__(streams, settings, PostgresDialect())
        self.path = path
        # As many as were needed at a time, for questions and transactions alike; None: not open.
        self._idle: list[SimConnection] | None = None
        self._background: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """See `AsyncStore`."""
        if self._idle is None:
            await self._alone(schema.check(self.dialect))
            self._idle = []

    async def init(self, redefine: Collection[str] = ()) -> None:
        """See `AsyncStore`."""
        await self._alone(schema.init(self.dialect, redefine))

    async def close(self) -> None:
        """See `AsyncStore`."""
        if self._background:
            await asyncio.wait(self._background)
        idle, self._idle = self._idle, None
        for connection in idle or ():
            connection.discard()

    async def _alone(self, plan: Plan[T]) -> T:
        """Run a plan on a connection that is made and closed for it."""
        try:
            connection = await self._connected()
        except BaseException:
            plan.close()
            raise
        try:
            return await on_connection(connection, plan)
        finally:
            connection.discard()

    async def _connected(self) -> SimConnection:
        try:
            return await self.path.connect()
        except SimError as error:
            raise Unavailable(self.where, error) from error

    async def take(self) -> SimConnection:
        """A connection, for as long as it is needed; then `put` it back. Raises Unavailable."""
        if self._idle is None:
            raise Unavailable(self.where, "the store is not open")
        return self._idle.pop() if self._idle else await self._connected()

    def put(self, connection: SimConnection) -> None:
        """Keep a connection for the next one, if it is of use."""
        if connection.closed:
            return
        elsewhere = len(self.path.servers) > 1 and self.path.dice.random() < 0.3  # the next one may get another server
        if self._idle is None or connection.in_transaction or elsewhere:
            connection.discard()
        else:
            self._idle.append(connection)

    async def read(self, plan: Plan[T], wait: float = 0.0) -> T:
        try:
            connection = await self.take()
        except BaseException:
            plan.close()
            raise
        try:
            return await self.run_on(connection, plan)
        finally:
            self.put(connection)

    async def run_plan(self, connection: SimConnection, plan: Plan[T], within: float | None = None) -> T:
        return await on_connection(connection, plan)

    def renew(self) -> None:
        """Throw away the idle connections that broke."""
        if self._idle is not None:
            self._idle = [connection for connection in self._idle if not connection.gone]

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        return await on_connection(checked(connection), plan)

    def transaction(self, claim: Claim, connection: Any = None) -> SimTransaction:
        """See `AsyncStore`."""
        return SimTransaction(self, claim, None if connection is None else checked(connection))


class SimTransaction(ServerTransaction):
    """An `AsyncTransaction` on a connection of the store's, or the caller's."""

    store: SimStore
    connection: SimConnection | None

    async def _take(self) -> SimConnection:
        return await self.store.take()

    async def _put(self, connection: SimConnection) -> None:
        self.store.put(connection)

    @property
    def _held(self) -> SimConnection:
        assert self.connection is not None
        return self.connection

    def _idle(self) -> bool:
        return not self._held.in_transaction

    async def _execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if isinstance(params, Mapping):
            raise ConfigError("the simulated database knows ? alone, no named parameters")
        return await self._held.execute(sql, params)
