"""The PostgreSQL store (psycopg 3).

Two small pools: one for transactions, which callers hold as long as they like, and one for short questions, so that
a reservation or a heartbeat never waits for a connection that an open fact holds.

Statements go out as the simple protocol's text with the values quoted by the client: BEGIN and the claim's lock are
one round trip, INSERT and COMMIT another. Measured against prepared statements in pipeline mode: 20 % more facts/s,
at half the processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from busrep.errors import BusrepError, CommitUnknown, ConfigError, MissingExtra, SchemaError, Unavailable, WriterFenced
from busrep.settings import Settings
from busrep.storage import Claim, FactRows
from busrep.stores import claims, facts, schema
from busrep.stores.planned import PlannedStore
from busrep.stores.plans import (
    Answers,
    Control,
    Locked,
    NoSuchTable,
    Plan,
    SerializationFailed,
    Signal,
    Sql,
    Step,
    T,
    run_async,
)
from busrep.stores.postgres_dialect import PostgresDialect
from busrep.streams import Registry

try:
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
    from psycopg_pool import AsyncConnectionPool
except ImportError as missing:
    raise MissingExtra("postgres", "the PostgreSQL store") from missing

AnyConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]

# Open facts of one process at a time; more wait for one to end. A server allows 100 connections by default.
TRANSACTIONS = 10
# Questions of one process at a time: the fetches (settings.fetches, 4) and one reservation.
QUESTIONS = 5
# How long to wait for a connection from a pool, seconds.
POOL_WAIT = 30.0
# Deadline of a connect, seconds; libpq's own default is for ever.
CONNECT_TIMEOUT = 10
# A peer that is gone without a word is noticed within some 20 s: an answer to COMMIT is not waited for for ever.
KEEPALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

CONTROLS = {
    Control.BEGIN: "BEGIN",
    Control.SNAPSHOT: "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    Control.COMMIT: "COMMIT",
    Control.ROLLBACK: "ROLLBACK",
}


def translated(error: psycopg.Error) -> Exception:
    """The signal or error of busrep that this driver error is; itself when it is the statement's fault."""
    state = error.sqlstate
    if state == "55P03":
        return Locked(error)
    if state == "40001":
        return SerializationFailed(error)
    if state in ("42P01", "42703"):
        return NoSuchTable(error)
    # 25006: a write on a replica (after a failover that went elsewhere).
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or state == "25006":
        return Unavailable("PostgreSQL", error)
    return error


def final(error: Signal) -> Exception:
    """What a signal that no plan wanted is to the caller."""
    if isinstance(error, NoSuchTable) and "busrep_" in str(error.cause):
        return SchemaError(None, schema.VERSION)
    if isinstance(error, Locked):
        return Unavailable("PostgreSQL", error.cause)
    return error.cause if isinstance(error.cause, Exception) else error


def composed(steps: Sequence[Step]) -> tuple[bytes, list[Any] | None]:
    """All steps as one text, and its parameters."""
    texts: list[str] = []
    params: list[Any] = []
    for step in steps:
        if isinstance(step, Control):
            texts.append(CONTROLS[step])
        else:
            texts.append(step.text.replace("?", "%s"))
            params += step.params
    return "; ".join(texts).encode(), params or None


async def execute_async(connection: psycopg.AsyncConnection[Any], steps: tuple[Step, ...]) -> Answers:
    """Run steps in one round trip."""
    if not steps:
        return []
    cursor: psycopg.AsyncCursor[Any]
    if len(steps) == 1 and isinstance(steps[0], Sql) and not steps[0].params:
        # A reservation: always the same text, which psycopg prepares after five times; a third less time.
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
    else:
        cursor = psycopg.AsyncClientCursor(connection, row_factory=tuple_row)
    answers: Answers = []
    try:
        await cursor.execute(*composed(steps))
        for step in steps:
            if isinstance(step, Sql):
                answers.append(await cursor.fetchall() if cursor.description is not None else [])
            elif step is Control.COMMIT:
                _committed(cursor.statusmessage)
            cursor.nextset()
    except psycopg.Error as error:
        raise translated(error) from error
    return answers


def execute_sync(connection: psycopg.Connection[Any], steps: tuple[Step, ...]) -> Answers:
    """Run steps in one round trip, blocking."""
    if not steps:
        return []
    cursor = psycopg.ClientCursor(connection, row_factory=tuple_row)
    answers: Answers = []
    try:
        cursor.execute(*composed(steps))
        for step in steps:
            if isinstance(step, Sql):
                answers.append(cursor.fetchall() if cursor.description is not None else [])
            elif step is Control.COMMIT:
                _committed(cursor.statusmessage)
            cursor.nextset()
    except psycopg.Error as error:
        raise translated(error) from error
    return answers


def _committed(status: str | None) -> None:
    """COMMIT of a transaction in which a statement failed rolls back, and reports no error."""
    if status != "COMMIT":
        raise psycopg.errors.InFailedSqlTransaction("a statement of this transaction had failed: rolled back")


async def on_connection(connection: AnyConnection, plan: Plan[T]) -> T:
    """Run a plan on a connection of either kind, and turn the signals that are left into errors."""

    async def execute(steps: tuple[Step, ...]) -> Answers:
        if isinstance(connection, psycopg.AsyncConnection):
            return await execute_async(connection, steps)
        return execute_sync(connection, steps)

    try:
        return await run_async(plan, execute)
    except Signal as signal:
        raise final(signal) from signal.cause


def checked(connection: Any) -> AnyConnection:
    """The caller's connection; ConfigError when it is none of psycopg 3."""
    if not isinstance(connection, psycopg.AsyncConnection | psycopg.Connection):
        raise ConfigError(f"a psycopg.Connection or psycopg.AsyncConnection is needed, not {type(connection).__name__}")
    return connection


class PostgresStore(PlannedStore):
    """An `AsyncStore` on a PostgreSQL database."""

    def __init__(self, url: str, streams: Registry, settings: Settings) -> None:
        super().__init__(streams, settings, PostgresDialect())
        try:
            parts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise ConfigError(f"the PostgreSQL URL does not work: {error}".replace(url, "...")) from error
        parts.setdefault("connect_timeout", CONNECT_TIMEOUT)
        parts.setdefault("fallback_application_name", "busrep")
        for name, value in KEEPALIVE.items():
            parts.setdefault(name, value)
        self.url = psycopg.conninfo.make_conninfo("", **parts)
        self.where = f"PostgreSQL at {parts.get('host', 'the default host')}:{parts.get('port', 5432)}"
        self.transactions: AsyncConnectionPool[psycopg.AsyncConnection[Any]] | None = None
        self.questions: AsyncConnectionPool[psycopg.AsyncConnection[Any]] | None = None
        self._background: set[asyncio.Future[Any]] = set()

    async def open(self) -> None:
        """See `AsyncStore`."""
        if self.questions is not None:
            return
        # On a connection of its own first: a pool would only say that none came in time, not why.
        await self._alone(schema.check(self.dialect))
        self.transactions = self._pool("transactions", TRANSACTIONS)
        self.questions = self._pool("questions", max(QUESTIONS, self.settings.fetches + 1))
        await self.transactions.open()
        await self.questions.open()

    def _pool(self, name: str, most: int) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
        return AsyncConnectionPool(
            self.url, min_size=1, max_size=most, open=False, name=f"busrep-{name}", timeout=POOL_WAIT,
            kwargs={"autocommit": True},
        )  # fmt: skip

    async def _alone(self, plan: Plan[T]) -> T:
        """Run a plan on a connection that is made and closed for it."""
        try:
            connection = await psycopg.AsyncConnection.connect(self.url, autocommit=True)
        except psycopg.Error as error:
            plan.close()
            raise Unavailable(self.where, error) from error
        async with connection:
            return await on_connection(connection, plan)

    async def close(self) -> None:
        """See `AsyncStore`."""
        if self._background:
            await asyncio.wait(self._background)
        for pool in (self.transactions, self.questions):
            if pool is not None:
                await pool.close()
        self.transactions = self.questions = None

    async def init(self) -> None:
        """See `AsyncStore`."""
        await self._alone(schema.init(self.dialect, self.backings.values()))

    def in_background(self, work: asyncio.Future[Any]) -> None:
        """Let it end by itself; close() waits for it."""
        self._background.add(work)
        work.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # looked at: what matters of it was reported elsewhere

    @contextlib.asynccontextmanager
    async def _question(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        if self.questions is None:
            raise Unavailable(self.where, "the store is not open")
        try:
            async with self.questions.connection() as connection:
                yield connection
        except psycopg.Error as error:  # the pool's own: no connection came in time, or it is closed
            problem = translated(error)
            raise (Unavailable(self.where, error) if isinstance(problem, Unavailable) else error) from error

    async def _read(self, plan: Plan[T]) -> T:
        async with self._question() as connection:
            return await self._run(connection, plan)

    async def _write(self, plan: Plan[T], wait: float | None = None) -> T:  # noqa: ARG002 - the plan sets it
        return await self._read(plan)

    async def _run(self, connection: psycopg.AsyncConnection[Any], plan: Plan[T]) -> T:
        try:
            return await on_connection(connection, plan)
        except Unavailable as error:
            if connection.closed:  # the server went away: the idle ones of the pools are dead as well
                self.renew()
            raise Unavailable(self.where, error.reason) from error
        except psycopg.errors.SerializationFailure as error:
            # A replica cancels questions that are in the way of its replay ("conflict with recovery").
            raise Unavailable(self.where, error) from error

    def renew(self) -> None:
        """Replace the dead connections of both pools."""
        for pool in (self.transactions, self.questions):
            if pool is not None:
                self.in_background(asyncio.ensure_future(pool.check()))

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        return await on_connection(checked(connection), plan)

    async def _reserve(self, stream: str, count: int) -> list[int]:
        def plan() -> Plan[list[int]]:
            answers = yield self.dialect.next_ids(stream, count)
            return self.dialect.ids(answers[0], count)

        return await self._write(plan())

    def transaction(self, claim: Claim, connection: Any = None) -> PostgresTransaction:
        """See `AsyncStore`."""
        return PostgresTransaction(self, claim, None if connection is None else checked(connection))

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """See `AsyncStore`."""
        try:
            return await super().outcome(claim, marker, facts_)
        except psycopg.errors.InvalidParameterValue:
            # "in the future": the server crashed before it had written that transaction ID. It is gone.
            return await super().outcome(claim, None, facts_)


class PostgresTransaction:
    """An `AsyncTransaction` on a connection of the store's pool, or the caller's, sync or async.

    A sync connection blocks the event loop while it waits: it is the caller's choice.
    """

    def __init__(self, store: PostgresStore, claim: Claim, connection: AnyConnection | None) -> None:
        self.store, self.claim = store, claim
        self.connection: AnyConnection | None = connection
        self._callers = connection is not None
        self.joined = connection is not None and connection.info.transaction_status not in (
            TransactionStatus.IDLE, TransactionStatus.UNKNOWN,
        )  # fmt: skip
        self.marker: object = None
        self._pending: list[Sql] = []

    async def _run(self, plan: Plan[T]) -> T:
        assert self.connection is not None  # noqa: S101 - set by begin()
        try:
            return await on_connection(self.connection, plan)
        except Unavailable as error:
            if self._callers:
                raise
            if self.connection.closed:
                self.store.renew()
            raise Unavailable(self.store.where, error.reason) from error

    async def begin(self) -> None:
        """See `AsyncTransaction`."""
        if self.connection is None:
            if self.store.transactions is None:
                raise Unavailable(self.store.where, "the store is not open")
            try:
                self.connection = await self.store.transactions.getconn()
            except psycopg.Error as error:
                raise Unavailable(self.store.where, error) from error
        # psycopg itself sends BEGIN on a connection that is not in autocommit mode.
        begin = (Control.BEGIN,) if self.connection.autocommit and not self.joined else ()
        try:
            self.marker = await self._run(self._lock_claim(begin))
        except psycopg.errors.SerializationFailure:
            # The claim was moved (9.4); unless, in the caller's SERIALIZABLE transaction, the failure came from
            # elsewhere: the claim as it is now tells.
            await self.rollback()
            await self.store.check_claim(self.claim)
            raise
        except BaseException:
            await self.rollback()
            raise

    def _lock_claim(self, begin: tuple[Control, ...]) -> Plan[object]:
        answers = yield (*begin, claims.lock_claim(self.store.dialect, self.claim))
        if not answers[0]:
            raise WriterFenced(self.claim.writer, self.claim.incarnation)
        return answers[0][0][0]

    async def insert(self, stream: str, facts_: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`; sent together with the next statement or COMMIT: one round trip less."""
        self._pending += facts.insert(self.store.dialect, self.store.backing(stream), self.claim.writer, facts_)

    async def _flush(self, *last: Control) -> None:
        pending, self._pending = self._pending, []

        def plan() -> Plan[None]:
            yield (*pending, *last)

        if pending or last:
            await self._run(plan())

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`; with the connection's own kind of cursor."""
        await self._flush()
        assert self.connection is not None  # noqa: S101
        if isinstance(self.connection, psycopg.AsyncConnection):
            cursor = self.connection.cursor(row_factory=tuple_row)
            await cursor.execute(sql.encode(), params or None)
            return await cursor.fetchall() if cursor.description is not None else []
        blocking = self.connection.cursor(row_factory=tuple_row)
        blocking.execute(sql.encode(), params or None)
        return blocking.fetchall() if blocking.description is not None else []

    async def commit(self) -> None:
        """See `AsyncTransaction`."""
        if self.joined:
            await self._flush()
            return
        connection = self.connection
        assert connection is not None  # noqa: S101
        committing = asyncio.ensure_future(self._flush(Control.COMMIT))
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError as cancelled:
            # COMMIT goes on; cancelling it now would leave its outcome just as unknown.
            self.store.in_background(asyncio.ensure_future(self._after(committing)))
            raise CommitUnknown(self.marker, cancelled, cancelled=True) from cancelled
        except Exception as error:
            if not connection.closed:
                raise  # the server refused, and said so: nothing was committed
            await self.rollback()
            raise CommitUnknown(self.marker, error) from error
        await self._give_back()

    async def _after(self, committing: asyncio.Future[None]) -> None:
        await asyncio.wait([committing])
        if committing.cancelled() or committing.exception() is not None:
            await self.rollback()
        else:
            await self._give_back()

    async def rollback(self) -> None:
        """See `AsyncTransaction`."""
        self._pending = []
        connection = self.connection
        if self.joined or connection is None:
            return
        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
            with contextlib.suppress(BusrepError, psycopg.Error):
                await self._run(_rollback())
        await self._give_back()

    async def _give_back(self) -> None:
        connection = self.connection
        if not self._callers and isinstance(connection, psycopg.AsyncConnection):
            self.connection = None
            if self.store.transactions is not None:
                await self.store.transactions.putconn(connection)
            else:
                await connection.close()


def _rollback() -> Plan[None]:
    yield Control.ROLLBACK
