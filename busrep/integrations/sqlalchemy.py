"""Facts in the transaction of an SQLAlchemy session: published when it commits, gone when it rolls back.

A fact joins the transaction on the session's own connection, so its rows are under the same COMMIT, and under the same
savepoints, as the session's work. That the transaction has ended the session tells (`after_transaction_end`); how it
ended the table tells, as for every transaction that busrep joins. So nothing here has to know what became of a
savepoint, or of a COMMIT without an answer. A session that tells nothing, for it was left to the garbage collector, is
found out about by the bus itself.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import busrep.asyncio
import busrep.sync
from busrep.errors import ConfigError, MissingExtra
from busrep.streams import Stream

try:
    from sqlalchemy import event
    from sqlalchemy.orm import Session, SessionTransaction, scoped_session
except ImportError as missing:
    raise MissingExtra("sqlalchemy", "facts in SQLAlchemy sessions") from missing

if TYPE_CHECKING:  # it needs greenlet, which a Session does without
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

__all__ = ["write"]

# Where a session keeps its facts until its transaction ends.
_FACTS = "busrep.facts"

RowT = TypeVar("RowT")

AnySync: TypeAlias = "Session | scoped_session[Any]"
AnyAsync: TypeAlias = "AsyncSession | async_scoped_session[Any]"


@overload
def write(
    bus: busrep.sync.Bus, session: AnySync, stream: Stream[RowT], /, *streams: Stream[Any],
    bind_arguments: Mapping[str, Any] | None = None,
) -> AbstractContextManager[busrep.sync.Fact[RowT]]: ...  # fmt: skip
@overload
def write(
    bus: busrep.asyncio.Bus, session: AnyAsync, stream: Stream[RowT], /, *streams: Stream[Any],
    bind_arguments: Mapping[str, Any] | None = None,
) -> AbstractAsyncContextManager[busrep.asyncio.Fact[RowT]]: ...  # fmt: skip
def write(
    bus: busrep.sync.Bus | busrep.asyncio.Bus,
    session: AnySync | AnyAsync,
    *streams: Stream[Any],
    bind_arguments: Mapping[str, Any] | None = None,
) -> AbstractContextManager[busrep.sync.Fact[Any]] | AbstractAsyncContextManager[busrep.asyncio.Fact[Any]]:
    """A fact of ``streams`` in the session's transaction: ``with write(bus, session, orders) as fact``.

    With an `AsyncSession`, and a bus of `busrep.connect`: ``async with``. On leaving the block the session is flushed,
    then the fact's rows are inserted; the session commits, or rolls back, when the application says so, and the fact is
    published at that COMMIT. ``bind_arguments``: as of `Session.connection`, for a session of several databases.

    The session's driver is psycopg (3), on the bus's own database, or for a `Session` also sqlite3. Raises ConfigError
    for another, for a session in AUTOCOMMIT or with two-phase commit, and when the transaction, or the savepoint that
    the block is in, ended inside it; further what ``bus.write`` raises.
    """
    arguments: Any = dict(bind_arguments or {})
    if (asynchronous := _async_session(session)) is not None:
        if not isinstance(bus, busrep.asyncio.Bus):
            raise ConfigError(f"an AsyncSession needs a bus of busrep.connect, not {bus!r}")
        _check_one_phase(asynchronous.sync_session)
        return _write_async(bus, asynchronous, streams, arguments)
    blocking: Any = session.registry() if isinstance(session, scoped_session) else session
    if not isinstance(bus, busrep.sync.Bus):
        raise ConfigError(f"a Session needs a bus of busrep.sync.connect, not {bus!r}")
    _check_one_phase(blocking)
    return _write(bus, blocking, streams, arguments)


@contextmanager
def _write(
    bus: busrep.sync.Bus, session: Session, streams: tuple[Stream[Any], ...], arguments: Any
) -> Iterator[busrep.sync.Fact[Any]]:
    connection = session.connection(bind_arguments=arguments)
    driver: Any = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        if not driver.in_transaction:  # this driver begins with the first INSERT, UPDATE or DELETE
            if driver.isolation_level is None:  # BEGIN would make a transaction that nobody knows of, and commits
                raise _autocommit()
            bus.ensure_open()  # it cannot be opened any more when the one write lock is taken
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        elif bus.state == "new":
            raise ConfigError("on SQLite the bus must be open before the session writes: call bus.open()")
    elif _idle(driver):
        connection.exec_driver_sql("SELECT 1")
    fact, within = _join(bus, session, driver, streams)
    with fact:
        yield fact
        session.flush()
        _check_still_in(within, session)


@asynccontextmanager
async def _write_async(
    bus: busrep.asyncio.Bus, session: AsyncSession, streams: tuple[Stream[Any], ...], arguments: Any
) -> AsyncIterator[busrep.asyncio.Fact[Any]]:
    connection = await session.connection(bind_arguments=arguments)
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if _idle(driver):
        await connection.exec_driver_sql("SELECT 1")
    fact, within = _join(bus, session.sync_session, driver, streams)
    async with fact:
        yield fact
        await session.flush()
        _check_still_in(within, session.sync_session)


def _async_session(session: Any) -> AsyncSession | None:
    """The AsyncSession that this is; whoever has one has imported what it is made of."""
    module: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    if module is None:
        return None
    if isinstance(session, module.async_scoped_session):
        session = session.registry()
    return session if isinstance(session, module.AsyncSession) else None


def _check_one_phase(session: Session) -> None:
    if session.twophase:
        raise ConfigError("a session with twophase=True prepares its transaction: busrep cannot join that")


def _idle(driver: Any) -> bool:
    """Whether no transaction has begun on the driver's connection: psycopg begins one with the first statement."""
    try:
        return bool(driver.info.transaction_status.name == "IDLE")
    except AttributeError:
        raise ConfigError(
            f"{type(driver).__module__}.{type(driver).__qualname__}: busrep joins the transactions of psycopg "
            "(postgresql+psycopg://) in a Session and an AsyncSession, and of sqlite3 in a Session"
        ) from None


def _join(
    bus: Any, session: Session, driver: Any, streams: tuple[Stream[Any], ...]
) -> tuple[Any, SessionTransaction | None]:
    """A fact in the session's transaction, and the savepoint or transaction that the session is in."""
    begun = driver.in_transaction if isinstance(driver, sqlite3.Connection) else not _idle(driver)
    if not begun:  # what has not begun by now never will, and busrep would commit by itself
        raise _autocommit()
    fact = bus.write(*streams, connection=driver)
    session.info.setdefault(_FACTS, []).append(fact)
    return fact, _innermost(session)


def _autocommit() -> ConfigError:
    return ConfigError("the session is in AUTOCOMMIT and has no transaction: use bus.write(...) without it")


def _innermost(session: Session) -> SessionTransaction | None:
    """The savepoint that the session is in, or its transaction."""
    return session.get_nested_transaction() or session.get_transaction()


def _check_still_in(within: SessionTransaction | None, session: Session) -> None:
    """The fact's rows would come without its claim's lock, which a savepoint that is rolled back takes along, and
    perhaps without the work it tells of."""
    now = _innermost(session)
    while now is not None and now is not within:
        now = now.parent
    if now is None:
        raise ConfigError("the session's transaction or savepoint ended inside the block: end it after the block")


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        for fact in session.info.pop(_FACTS, ()):
            fact.ended()
