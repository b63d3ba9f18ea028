"""The PostgreSQL store (psycopg 3).

Three small pools: for transactions, which callers hold as long as they like, for the effects of handlers, and for short
questions, so that a reservation or a heartbeat never waits for a connection that an open fact holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import selectors
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.settings import Settings
from busrep.stores import claims, schema
from busrep.stores.interface import Claim
from busrep.stores.plans import Plan, T, Unanswered
from busrep.stores.postgres.dialect import PostgresDialect
from busrep.stores.postgres.prepared import Prepared
from busrep.stores.postgres.snapshots import PostgresSnapshots
from busrep.stores.postgres.steps import AnyConnection, fetched, on_connection, settled
from busrep.stores.server import ServerStore, ServerTransaction
from busrep.streams import Registry
from busrep.urls import check_url, shown_url

try:
    import psycopg
    from psycopg.abc import PQGen
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
    from psycopg.waiting import wait_async
    from psycopg_pool import AsyncConnectionPool, PoolTimeout
except ImportError as missing:
    raise MissingExtra("postgres", "the PostgreSQL store") from missing

ConnectionPool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]

FORM = "postgresql://user:password@host:port/database?sslmode=..."

# Looks at one socket, once: an epoll would be made and closed for it, with four system calls. Windows has no poll.
POLLER: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)
# Questions of one process at a time beside the fetches (settings.fetches, 4): for IDs, rows that are appended, a beat,
# and one for what is in doubt. Those that are late (`sharing.MOST_LATE`), or many threads, wait for one another.
QUESTIONS = 4
# After so many seconds a connection that nobody needed is closed, but for the last one for questions.
IDLE = 30.0
POOL_WAIT = 30.0  # for a connection from a pool, seconds
# While the server is away psycopg_pool doubles its pauses, up to minutes. So the pool gives up after RECONNECT seconds,
# and a waiting caller asks again every ASK_AGAIN seconds: then it tries at once.
RECONNECT = 2.0
ASK_AGAIN = 3.0
# Seconds for a cancel to reach the server; and for how long who gives a statement up waits for that, and for its end.
CANCEL_TIMEOUT, GRACE = 5.0, 0.5
CONNECT_TIMEOUT = 10  # seconds; libpq's own default is for ever
# Behind a pooler that hands sessions from client to client (PgBouncer with pool_mode=transaction) what psycopg prepared
# is missing, or another client's. In the encoding of a database or a role some rows may have no characters.
OPTIONS: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "client_encoding": "utf8"}
# A peer that is gone without a word is noticed within some 20 s: an answer to COMMIT is not waited for for ever.
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3, "tcp_user_timeout": 20_000}


class StoreConnection(psycopg.AsyncConnection[Any]):
    """One of the store's own. Who gives an answer up is not held up by a server that says nothing."""

    left_alone = False  # what was sent last, when it is late: see `execute_steps`

    async def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return await wait_async(gen, self.pgconn.socket, interval, timeout)
        except asyncio.CancelledError:
            if self.info.transaction_status == TransactionStatus.ACTIVE:
                await self._end_statement(gen)
            raise

    async def _end_statement(self, gen: PQGen[Any]) -> None:
        """Have the server cancel the statement: it may wait for a lock. The connection lasts if it does so at once, and
        not if the request is on its way still: that would cancel what is asked next. A COMMIT that waits for a
        synchronous standby is left alone: cancelled, it would be seen without, and a failover could take it back.
        """
        told = False
        with contextlib.suppress(Exception):  # it did, or says nothing
            try:
                if not self.left_alone:
                    self._telling = asyncio.gather(self.cancel_safe(timeout=CANCEL_TIMEOUT), return_exceptions=True)
                    await asyncio.wait([self._telling], timeout=GRACE)
                    told = self._telling.done() and not any(self._telling.result())
                    await wait_async(gen, self.pgconn.socket, 0.1, GRACE * told)
            finally:
                if not told or self.info.transaction_status == TransactionStatus.ACTIVE:
                    self.pgconn.finish()


class QuestionConnection(StoreConnection):
    """One for short questions: no statement of the application's is run on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared = Prepared(self.info.backend_pid)


def alive(connection: AnyConnection) -> bool:
    """Whether nothing tells that the server has ended this idle connection; without asking it anything."""
    if connection.closed:
        return False
    with POLLER() as selector:
        selector.register(connection.fileno(), selectors.EVENT_READ)
        return not selector.select(0)  # nobody speaks to an idle connection but to end it


def _parameters(url: str) -> dict[str, Any]:
    """What libpq reads in a URL. Raises ConfigError, which shows no secret, nor does its context."""
    check_url(url, "the PostgreSQL URL", FORM)
    try:
        return dict(psycopg.conninfo.conninfo_to_dict(url))
    except psycopg.Error as error:
        # Of what libpq says only this is quoted: the rest may quote a password.
        found = re.search(r'invalid URI query parameter: "[a-z_]+"', str(error))
    raise ConfigError(f"the PostgreSQL URL does not work: {found[0] if found else f'libpq takes {FORM}'}")


class PostgresStore(ServerStore):
    """An `AsyncStore` on a PostgreSQL database."""

    serialization_failure = psycopg.errors.SerializationFailure
    unknown_marker = psycopg.errors.InvalidParameterValue
    # The connections of the caller's that this store can work on.
    callers: tuple[type[Any], ...] = (psycopg.Connection, psycopg.AsyncConnection)

    def __init__(self, url: str, streams: Registry, settings: Settings) -> None:
        super().__init__(streams, settings, PostgresDialect(shown_url(url)))
        parts = _parameters(url)
        parts.setdefault("connect_timeout", CONNECT_TIMEOUT)
        parts.setdefault("fallback_application_name", "busrep")
        for name, value in KEEPALIVE.items():
            parts.setdefault(name, value)
        self.url = psycopg.conninfo.make_conninfo("", **parts)
        self.where = f"PostgreSQL at {parts.get('host', 'the default host')}:{parts.get('port', 5432)}"
        # Pools, while it is open: of psycopg_pool's here, of blocking.py's own there.
        self.transactions: Any = None
        self.questions: Any = None
        self.handlers: Any = None
        self._background: set[asyncio.Future[Any]] = set()
        self.snapshots = PostgresSnapshots(self)

    async def open(self) -> None:
        if self.questions is not None:
            return
        # On a connection of its own first: a pool would only say that none came in time, not why.
        await self._alone(schema.check(self.dialect))
        most = self.settings.transactions
        self.transactions = self._pool("transactions", most)
        self.questions = self._pool("questions", self.settings.fetches + QUESTIONS, least=1, kind=QuestionConnection)
        # Of its own: a handler that writes facts as well must not wait for a connection that other handlers hold, who
        # wait for the same.
        self.handlers = self._pool("handlers", most)
        for pool in self._pools:
            await pool.open()

    @property
    def _pools(self) -> set[Any]:
        return {self.transactions, self.questions, self.handlers} - {None}

    def _pool(
        self, name: str, most: int, least: int = 0, kind: type[StoreConnection] = StoreConnection
    ) -> ConnectionPool:
        return AsyncConnectionPool(
            self.url, min_size=least, max_size=most, open=False, name=f"busrep-{name}", reconnect_timeout=RECONNECT,
            max_idle=IDLE, kwargs=OPTIONS, connection_class=kind,
        )  # fmt: skip

    async def _alone(self, plan: Plan[T]) -> T:
        """Run a plan on a connection that is made and closed for it."""
        try:
            connection = await self.connect()
        except BaseException:
            plan.close()
            raise
        async with connection:
            return await on_connection(connection, plan)

    async def connect(self) -> psycopg.AsyncConnection[Any]:
        """A connection of its own, in no pool. Raises Unavailable."""
        try:
            return await StoreConnection.connect(self.url, **OPTIONS)
        except psycopg.Error as error:
            raise Unavailable(self.where, error) from error

    async def close(self) -> None:
        await self.snapshots.leave_all()
        if self._background:
            _, left = await asyncio.wait(self._background, timeout=self.settings.shutdown_timeout)
            for work in left:
                work.cancel()
        for pool in self._pools:
            await pool.close(self.settings.shutdown_timeout)
        self.transactions = self.questions = self.handlers = None

    async def init(self, redefine: Collection[str] = ()) -> None:
        await self._alone(schema.init(self.dialect, redefine))

    async def read(self, plan: Plan[T], wait: float = 0.0) -> T:
        pool = self.questions
        connection = await self._take(pool)
        try:
            await self._prepare(connection)
            # A server behind a proxy may say nothing for ever, on a link that stands. Who asks holds locks meanwhile.
            return await self.run_on(connection, plan, self.settings.fetch_timeout + wait)
        finally:
            self._give_back(pool, connection)

    async def _prepare(self, connection: Any) -> None:
        """Prepare what is due on a connection for questions. Raises Unavailable: no question was sent then."""
        prepared: Prepared = connection.prepared
        if prepared.due:
            try:
                await self.run_on(connection, prepared.prepare(), self.settings.fetch_timeout)
            except Unanswered as error:
                raise Unavailable(self.where, error.reason) from error

    async def _take(self, pool: ConnectionPool | None) -> psycopg.AsyncConnection[Any]:
        """A connection of a pool, which was alive a moment ago: an append on another one would be in doubt. Raises
        Unavailable."""
        if pool is None:
            raise Unavailable(self.where, "the store is not open")
        if self._background and pool.get_stats()["pool_available"] < 2:
            await asyncio.sleep(0)  # one that is on its way back is there then: no other one is dialled, or kept
        clock = asyncio.get_running_loop().time
        deadline = clock() + POOL_WAIT
        while True:
            try:
                connection = await pool.getconn(min(ASK_AGAIN, max(0.1, deadline - clock())))
            except psycopg.Error as error:  # none came in time, or the pool is closed
                if clock() >= deadline or not isinstance(error, PoolTimeout):
                    raise Unavailable(self.where, error) from error
            else:
                if alive(connection):
                    return connection
                await connection.close()
                self._give_back(pool, connection)
                if clock() >= deadline:  # a proxy may take connections for a server that is away
                    raise Unavailable(self.where, f"each new connection was closed, for {POOL_WAIT:g} s")

    def _give_back(self, pool: ConnectionPool | None, connection: psycopg.AsyncConnection[Any]) -> None:
        """Give a connection back to its pool, in a task that no deadline cancels: a pool that is cut meanwhile may have
        promised it to somebody, who then waits for the pool's own deadline, and it is lost to all. Nobody waits for
        the task: a turn of the event loop is a tenth of what a question costs."""

        async def give_back() -> None:
            if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                with contextlib.suppress(psycopg.Error, TimeoutError):  # then the pool finds it broken
                    async with asyncio.timeout(self.settings.fetch_timeout):
                        await connection.rollback()
            if pool is None:
                await connection.close()
            else:
                await pool.putconn(connection)

        self.in_background(asyncio.ensure_future(give_back()))

    async def run_plan(self, connection: AnyConnection, plan: Plan[T], within: float | None = None) -> T:
        return await on_connection(connection, plan, within)

    def renew(self) -> None:
        """Replace the connections of all pools, and ask none of them: one without an answer would keep the others."""
        for pool in self._pools:
            self.in_background(asyncio.ensure_future(pool.drain()))

    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        return await on_connection(self.checked(connection), plan)

    def transaction(self, claim: Claim, connection: Any = None) -> PostgresTransaction:
        return PostgresTransaction(self, claim, self.checked(connection))

    def checked(self, connection: Any) -> Any:
        """The caller's connection, or None; ConfigError when it is none that this store can work on."""
        if connection is not None and not isinstance(connection, self.callers):
            names = " or ".join(f"psycopg.{one.__name__}" for one in self.callers)
            raise ConfigError(f"a {names} is needed, not {type(connection).__name__}")
        if connection is not None and not connection.closed and connection.info.encoding == "ascii":
            raise ConfigError(
                "connection= has client_encoding SQL_ASCII, in which the driver takes text for bytes: connect with "
                "client_encoding='utf8'"
            )
        return connection

    def check_open(self) -> None:
        if self.questions is None:
            raise Unavailable(self.where, "the store is not open")


class PostgresTransaction(ServerTransaction):
    """An `AsyncTransaction` on a connection of the store's pool, or the caller's: a sync one blocks the event loop."""

    store: PostgresStore

    @property
    def _pool(self) -> Any:
        return self.store.handlers if self.claim is claims.NO_CLAIM else self.store.transactions

    async def _take(self) -> AnyConnection:
        return await self.store._take(self._pool)

    async def _put(self, connection: Any) -> None:
        self.store._give_back(self._pool, connection)

    def _idle(self) -> bool:
        status = self.connection.info.transaction_status
        # Of a closed connection it is unknown; that it is closed will show.
        return status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)

    async def _execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        cursor: Any = self.connection.cursor(row_factory=tuple_row)
        await settled(cursor.execute(sql.encode(self.connection.info.encoding), params or None))
        return await fetched(cursor)
