"""Facts in SQLAlchemy sessions: published by COMMIT and by nothing else, on real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import busrep
from busrep import Settings, Stream, Table
from busrep.asyncio.writing import Writing
from busrep.errors import ConfigError, Unavailable
from busrep.integrations.sqlalchemy import write
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from busrep.sync import Bus
from tests.sync.test_writing import QUICK, Deployment, Order, Wire, deployment, on_sqlite, orders, payments, wire

__all__ = ["deployment", "on_sqlite", "wire"]

pytestmark = pytest.mark.servers

BEATS = pytest.mark.parametrize("beats", [True, False], ids=["beats", "no beats"])
# No heartbeat in the time of a test. The bus still asks after facts in doubt, every 10 ms at first.
SLOW_LOOK = Settings(heartbeat=60.0, redis_timeout=2.0, shutdown_timeout=2.0)


class Base(DeclarativeBase):
    pass


class Sale(Base):
    __tablename__ = "sales"
    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Part(Base):
    """Its foreign key is looked at only at COMMIT."""

    __tablename__ = "parts"
    number: Mapped[int] = mapped_column(primary_key=True)
    sale: Mapped[int] = mapped_column(ForeignKey("sales.number", deferrable=True, initially="DEFERRED"))


def driver_url(url: str, driver: str = "postgresql+psycopg") -> str:
    return driver + "://" + url.partition("://")[2]


@pytest.fixture
def engine(deployment: Deployment) -> Iterator[Engine]:
    engine = create_engine(driver_url(deployment.store))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def sales(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return [row[0] for row in connection.execute(text("SELECT number FROM sales ORDER BY number"))]


def sell(bus: Bus, session: Session, number: int) -> int:
    with write(bus, session, orders) as fact:
        session.add(Sale(number=number, state="new"))
        fact.add(Order(number, "new"))
    return fact.id


def positions(bus: Bus) -> int:
    return bus.positions()["orders"]["w1"]


def in_doubt(bus: Bus) -> int:
    """How many facts are neither known to be written nor to be empty."""
    return int(bus.statistics()["writer"]["in_doubt"])


@BEATS
def test_commit_publishes_and_rollback_does_not(
    deployment: Deployment, wire: Wire, engine: Engine, beats: bool
) -> None:
    with deployment.bus(beats=beats, settings=SLOW_LOOK) as bus:
        with Session(engine) as session:
            first = sell(bus, session, 1)
            assert positions(bus) < first
            session.commit()
            assert positions(bus) == first
            sell(bus, session, 2)
            session.rollback()
            assert in_doubt(bus) == 0  # complete, and empty
            last = sell(bus, session, 3)
            session.commit()
        assert wire.tokens(last) == [first, last]
        assert wire.chained()
        assert bus.statistics()["writer"]["in_doubt"] == 0
    assert list(deployment.rows()) == [first, last]
    assert sales(engine) == [1, 3]


def test_a_savepoint_that_is_rolled_back_takes_its_facts_along(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        before = sell(bus, session, 1)
        savepoint = session.begin_nested()
        sell(bus, session, 2)
        with session.begin_nested():
            sell(bus, session, 3)  # released, and gone with the one around it
        savepoint.rollback()
        with session.begin_nested():
            kept = sell(bus, session, 4)
        with pytest.raises(KeyError), session.begin_nested(), write(bus, session, orders) as fact:
            fact.add(Order(5, "never"))
            raise KeyError
        after = sell(bus, session, 6)
        assert positions(bus) < before
        session.commit()
        assert positions(bus) == after
        assert wire.tokens(after) == [before, kept, after]
    assert list(deployment.rows()) == [before, kept, after]
    assert sales(engine) == [1, 4, 6]


def test_a_savepoint_that_ends_inside_the_block_is_refused(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    """Rolled back, it takes the lock of the writer's claim along: another process may take the name, begin behind this
    fact's ID, and nobody would ever read its rows."""
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        for end in ("rollback", "commit"):
            savepoint = session.begin_nested()
            with pytest.raises(ConfigError, match="ended inside the block"), write(bus, session, orders) as fact:
                getattr(savepoint, end)()
                fact.add(Order(1, "never"))
            session.rollback()
        with session.begin_nested(), write(bus, session, orders) as fact:
            inner = session.begin_nested()
            session.add(Sale(number=2, state="never"))
            inner.rollback()
            session.begin_nested()  # open at the end of the block: it is within the one that the fact began in
            fact.add(Order(2, "new"))
        session.commit()
        assert wire.tokens(fact.id) == [fact.id]
    assert list(deployment.rows()) == [fact.id]


def test_a_released_savepoint_goes_with_the_transaction(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        with session.begin_nested():
            sell(bus, session, 1)
        session.rollback()
        assert in_doubt(bus) == 0
        last = sell(bus, session, 2)  # the session goes on
        session.commit()
        assert wire.tokens(last) == [last]
    assert sales(engine) == [2]


@BEATS
def test_a_hook_that_fails_after_commit_loses_nothing(
    deployment: Deployment, wire: Wire, engine: Engine, beats: bool
) -> None:
    with deployment.bus(beats=beats, settings=SLOW_LOOK) as bus:
        with Session(engine) as session:

            @event.listens_for(session, "after_commit")
            def fail(_: Session) -> None:
                raise KeyError

            fact = sell(bus, session, 1)
            with pytest.raises(KeyError):
                session.commit()
        assert positions(bus) == fact
        assert wire.tokens(fact) == [fact]
    assert sales(engine) == [1]


def test_facts_written_by_hooks_are_of_the_same_commit(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        ids: list[int] = []

        @event.listens_for(session, "before_commit")
        def add(session: Session) -> None:
            ids.append(sell(bus, session, 2))

        session.add(Sale(number=1, state="new"))
        session.commit()
        assert positions(bus) == ids[0]
        assert wire.tokens(ids[0]) == ids
    assert sales(engine) == [1, 2]


def test_bulk_operations_and_autoflush_in_the_block(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        with write(bus, session, orders) as fact:
            session.execute(insert(Sale), [{"number": number, "state": "new"} for number in range(3_000)])
            session.bulk_save_objects([Sale(number=number, state="new") for number in range(3_000, 4_000)])
            session.add(Sale(number=4_000, state="new"))
            assert session.scalar(select(func.count()).select_from(Sale)) == 4_001  # flushed by the question
            session.execute(update(Sale).values(state="paid"))
            for number in range(100):
                fact.add(Order(number, "paid"))
        session.commit()
        assert wire.tokens(fact.id) == [fact.id]
    assert len(deployment.rows()[fact.id]) == 100
    assert len(sales(engine)) == 4_001


def test_a_session_of_two_databases(deployment: Deployment, wire: Wire, engine: Engine, tmp_path: Any) -> None:
    """Whichever of the two COMMITs fails, the fact is what its own database says."""
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    Base.metadata.create_all(other)
    refuse = False

    @event.listens_for(other, "commit")
    def commit(_: Any) -> None:
        if refuse:
            raise OSError("the other database")

    with deployment.bus(settings=SLOW_LOOK) as bus:
        for number, refuse in ((1, False), (2, True), (3, False)):  # noqa: B007 (read above)
            with Session(binds={Sale: engine, Part: other}) as session:
                session.add(Part(number=number, sale=number))
                session.flush()
                with write(bus, session, orders, bind_arguments={"mapper": Sale}) as fact:
                    session.add(Sale(number=number, state="new"))
                    fact.add(Order(number, "new"))
                with contextlib.suppress(OSError):
                    session.commit()
        assert positions(bus) == fact.id
        committed = sales(engine)
        wire.tokens(fact.id)
        rows = [line for line in wire.lines if line.startswith("RDATA")]
        assert [json.loads(row.split(" ", 4)[4])[0] for row in rows] == committed
        assert committed in ([1, 3], [1, 2, 3])
    other.dispose()


def test_one_transaction_holds_several_facts_of_several_streams(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session, session.begin():
        ids = [sell(bus, session, number) for number in (1, 2, 3)]
        with write(bus, session, orders, payments) as fact:
            fact.add(Order(4, "new"))
            fact.add(Order(4, "paid"), stream=payments)
            with write(bus, session, orders) as inner:  # completed first, though its ID is higher
                inner.add(Order(5, "new"))
        assert positions(bus) < ids[0]
        session.commit()
        assert wire.tokens(inner.id) == [*ids, fact.id, inner.id]
        assert wire.tokens(fact.ids["payments"], "payments") == [fact.ids["payments"]]


def test_the_table_is_asked_once_about_all_facts_of_a_transaction(
    deployment: Deployment, wire: Wire, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    with deployment.bus(beats=False, settings=SLOW_LOOK) as bus, Session(engine) as session:
        outcome = bus.store.wrapped.outcome

        async def counted(claim: Any, marker: object, facts: Any, above: Any = None) -> Any:
            asked.append(len(facts))
            return await outcome(claim, marker, facts, above)

        with Session(engine) as still_open:
            ids = [sell(bus, session, number) for number in range(1, 21)]
            sell(bus, still_open, 21)
            monkeypatch.setattr(bus.store.wrapped, "outcome", counted)
            session.commit()
            assert asked == [20]
            still_open.rollback()
            assert asked == [20, 1]
        assert wire.tokens(ids[-1]) == ids


def test_the_session_is_flushed_before_the_rows_are_inserted(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    """An application's own table may refer to what is not flushed yet."""
    sold = Stream("sold", Order, table=Table("sold", id="id", writer="writer", index="idx"))
    with engine.begin() as connection:
        connection.execute(text(
            "CREATE TABLE sold (id bigint, writer text, idx int, number int REFERENCES sales, status text, "
            "PRIMARY KEY (writer, id, idx))"
        ))  # fmt: skip
    store = open_blocking_store(deployment.store, Registry([sold]))
    store.init()
    store.close()
    with deployment.bus(streams=[sold], settings=SLOW_LOOK) as bus, Session(engine, autoflush=False) as session:
        with write(bus, session, sold) as fact:
            session.add(Sale(number=7, state="new"))
            fact.add(Order(7, "new"))
        session.commit()
        assert wire.tokens(fact.id, "sold") == [fact.id]


def test_a_flush_that_fails_leaves_no_fact(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        first = sell(bus, session, 1)
        session.commit()
        with pytest.raises(IntegrityError), write(bus, session, orders) as fact:
            session.add(Sale(number=1, state="twice"))
            fact.add(Order(1, "twice"))
        session.rollback()
        last = sell(bus, session, 2)
        session.commit()
        assert wire.tokens(last) == [first, last]


def test_a_commit_that_fails_publishes_nothing(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        sell(bus, session, 1)
        session.add(Part(number=1, sale=99))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        assert in_doubt(bus) == 0
        last = sell(bus, session, 2)
        session.commit()
        assert positions(bus) == last
        assert wire.tokens(last) == [last]
    assert sales(engine) == [2]


def test_a_commit_whose_connection_is_gone_publishes_what_the_table_says(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    with deployment.bus() as bus:
        with Session(engine) as session:
            sell(bus, session, 1)
            pid = session.scalar(text("SELECT pg_backend_pid()"))
            with psycopg.connect(deployment.store, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            with pytest.raises(DBAPIError):
                session.commit()
        with Session(engine) as session:
            last = sell(bus, session, 2)
            session.commit()
        assert wire.tokens(last) == [last]


def test_a_commit_whose_answer_is_lost_is_published(
    deployment: Deployment, wire: Wire, engine: Engine, busrep_link: Callable[..., Any]
) -> None:
    link = busrep_link(deployment.store)
    through = create_engine(driver_url(link.url), poolclass=NullPool)
    with deployment.bus() as bus, Session(through) as session:
        committed = sell(bus, session, 1)
        session.flush()
        link.cut_when(b"COMMIT", "to_server")
        with contextlib.suppress(DBAPIError):
            session.commit()
        session.close()
        with Session(engine) as session:
            last = sell(bus, session, 2)
            session.commit()
        published = wire.tokens(last)  # only then the server has decided about the first
        expected = [committed, last] if 1 in sales(engine) else [last]
        assert published == expected
    assert list(deployment.rows()) == expected


@pytest.mark.parametrize("how", ["close", "collect", "collect in the block"])
def test_a_session_that_is_left_without_commit_holds_nothing_up(
    deployment: Deployment, wire: Wire, engine: Engine, how: str
) -> None:
    with deployment.bus() as bus:
        session = Session(engine)
        sell(bus, session, 1)
        if how == "collect in the block":
            block = write(bus, session, orders)
            block.__enter__().add(Order(1, "never"))
            del block
        if how == "close":
            session.close()
        else:
            del session
            gc.collect()
        with Session(engine) as session:
            last = sell(bus, session, 2)
            session.commit()
        assert wire.tokens(last) == [last]
    assert list(deployment.rows()) == [last]


def test_an_exception_in_the_block_leaves_the_session_to_its_owner(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    """Who catches it and commits has the work committed without the fact, as with any statement not run."""
    with deployment.bus(settings=SLOW_LOOK) as bus, Session(engine) as session:
        with pytest.raises(KeyError), write(bus, session, orders) as fact:
            session.add(Sale(number=1, state="new"))
            fact.add(Order(1, "never"))
            raise KeyError
        last = sell(bus, session, 2)
        session.commit()
        assert wire.tokens(last) == [last]
    assert sales(engine) == [1, 2]


def test_sessions_of_many_threads(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    scoped = scoped_session(sessionmaker(engine))
    kept: list[int] = []
    errors: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for number in range(base, base + 10):
                with write(bus, scoped, orders) as fact:
                    fact.add(Order(number, "new"))
                if number % 3:
                    scoped.commit()
                    kept.append(fact.id)
                else:
                    scoped.rollback()
        except BaseException as error:
            errors.append(error)
        finally:
            scoped.remove()

    with deployment.bus(settings=SLOW_LOOK) as bus:
        workers = [threading.Thread(target=work, args=(100 * base,)) for base in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert errors == []
        assert wire.tokens(max(kept)) == sorted(kept)
        assert wire.chained()
    assert list(deployment.rows()) == sorted(kept)


def test_a_session_in_another_transaction_is_published_at_that_ones_commit(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    """As test suites do: Session(bind=connection, join_transaction_mode="create_savepoint")."""
    with deployment.bus() as bus, engine.connect() as connection:
        with connection.begin() as outer:
            with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
                fact = sell(bus, session, 1)
                session.commit()
            assert positions(bus) < fact
            outer.commit()
        assert wire.tokens(fact) == [fact]


def test_who_is_fenced_hears_of_it_and_rolls_back(deployment: Deployment, engine: Engine) -> None:
    with deployment.bus(settings=SLOW_LOOK) as bus, deployment.bus(), Session(engine) as session:
        with pytest.raises(busrep.WriterFenced):
            sell(bus, session, 1)
        session.rollback()
    assert deployment.rows() == {}
    assert sales(engine) == []


def test_what_cannot_be_joined_is_said(deployment: Deployment, engine: Engine) -> None:
    with deployment.bus() as bus:
        with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            with pytest.raises(ConfigError, match="AUTOCOMMIT"), write(bus, session, orders):
                raise AssertionError
        with Session(engine, twophase=True) as session:
            with pytest.raises(ConfigError, match="twophase"):
                write(bus, session, orders)
        with Session(engine) as session:
            with pytest.raises(ConfigError, match="ended inside the block"), write(bus, session, orders) as fact:
                fact.add(Order(1, "never"))
                session.commit()
        asynchronous: Any = AsyncSession(create_async_engine(driver_url(deployment.store)))
        with pytest.raises(ConfigError, match=r"a bus of busrep\.connect"):
            write(bus, asynchronous, orders)
        other: Any = busrep.connect(deployment.redis, name=deployment.name)
        with pytest.raises(ConfigError, match=r"a bus of busrep\.sync\.connect"):
            write(other, session, orders)
        write_one = bus.publish(orders, [Order(2, "new")])
    assert list(deployment.rows()) == write_one


# -- AsyncSession ---------------------------------------------------------------------------------------------


@attrs.define
class Asynchronous:
    """A bus, and sessions."""

    bus: Any
    engine: Any

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine)

    async def sell(self, session: AsyncSession, number: int) -> int:
        async with write(self.bus, session, orders) as fact:
            session.add(Sale(number=number, state="new"))
            fact.add(Order(number, "new"))
        return fact.id

    async def settled(self) -> None:
        """What the session has told is being looked at in the background."""
        for task in list(self.bus.writing._finishing):
            await task


@contextlib.asynccontextmanager
async def asynchronous(deployment: Deployment, settings: Settings = SLOW_LOOK) -> Any:
    engine = create_async_engine(driver_url(deployment.store), poolclass=NullPool)
    async with busrep.connect(
        deployment.redis, name=deployment.name, streams=[orders, payments], store=deployment.store, writer="w1",
        settings=settings,
    ) as bus:  # fmt: skip
        yield Asynchronous(bus, engine)
    await engine.dispose()


def test_an_async_session_commits_and_rolls_back(deployment: Deployment, wire: Wire, engine: Engine) -> None:
    async def main() -> list[int]:
        async with asynchronous(deployment) as at:
            async with at.session() as session:
                first = await at.sell(session, 1)
                await session.commit()
                await at.sell(session, 2)
                await session.rollback()
                before = await at.sell(session, 3)
                savepoint = await session.begin_nested()
                await at.sell(session, 4)
                await savepoint.rollback()
                async with session.begin_nested():
                    kept = await at.sell(session, 5)
                await session.commit()
                await at.settled()
                assert at.bus.statistics()["writer"]["in_doubt"] == 0
            return [first, before, kept]

    kept = asyncio.run(main())
    assert wire.tokens(kept[-1]) == kept
    assert list(deployment.rows()) == kept
    assert sales(engine) == [1, 3, 5]


def test_an_async_session_asks_once_about_all_its_facts(
    deployment: Deployment, wire: Wire, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_writing: Writing) -> None:
        await asyncio.Event().wait()

    # Who asks without being told. Only cancelled, it begins again after a while.
    monkeypatch.setattr(Writing, "keep_settling", never)

    async def main() -> list[int]:
        async with asynchronous(deployment) as at:
            store = at.bus.writing.store
            outcome, asked = store.outcome, []

            async def counted(claim: Any, marker: object, facts: Any, above: Any = None) -> Any:
                asked.append(len(facts))
                return await outcome(claim, marker, facts, above)

            async with at.session() as session:
                ids = [await at.sell(session, number) for number in range(1, 11)]
                monkeypatch.setattr(store, "outcome", counted)
                await session.commit()
                await at.settled()
            assert asked == [10]
            return ids

    ids = asyncio.run(main())
    assert wire.tokens(ids[-1]) == ids


def test_an_async_session_that_is_left_or_fails_holds_nothing_up(
    deployment: Deployment, wire: Wire, engine: Engine
) -> None:
    async def main() -> int:
        async with asynchronous(deployment, QUICK) as at:
            async with at.session() as session:
                await at.sell(session, 1)  # closed without COMMIT
            async with at.session() as session:
                await at.sell(session, 2)
                session.add(Part(number=1, sale=99))
                with pytest.raises(IntegrityError):
                    await session.commit()
            session = at.session()
            task = asyncio.create_task(at.sell(session, 3))
            await task
            waiting = asyncio.create_task(asyncio.Event().wait())

            async def cancelled_in_the_block() -> None:
                async with write(at.bus, session, orders) as fact:
                    fact.add(Order(3, "never"))
                    entered.set()
                    await waiting

            entered = asyncio.Event()
            task = asyncio.create_task(cancelled_in_the_block())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await session.close()
            async with at.session() as session:
                last = await at.sell(session, 4)
                await session.commit()
            return last

    last = asyncio.run(main())
    assert wire.tokens(last) == [last]
    assert sales(engine) == [4]


@pytest.mark.parametrize("committed", [True, False])
def test_an_async_session_that_is_cancelled_while_it_commits(
    deployment: Deployment, wire: Wire, engine: Engine, busrep_link: Callable[..., Any], committed: bool
) -> None:
    """What became of it the table tells; and what comes later is held up no longer than until that is known."""
    link = busrep_link(deployment.store)

    async def main() -> tuple[int, int]:
        async with asynchronous(deployment, QUICK) as at:
            through = create_async_engine(driver_url(link.url), poolclass=NullPool)
            session = AsyncSession(through)
            first = await at.sell(session, 1)
            link.black_hole("from_server" if committed else "to_server")
            task = asyncio.create_task(session.commit())
            while committed and 1 not in await asyncio.to_thread(sales, engine):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            link.cut()
            with contextlib.suppress(asyncio.CancelledError, DBAPIError):
                await task
            with contextlib.suppress(DBAPIError):
                await session.close()
            async with at.session() as session:
                last = await at.sell(session, 2)
                await session.commit()
            await asyncio.to_thread(wire.tokens, last)
            await through.dispose()
            return first, last

    first, last = asyncio.run(main())
    assert wire.tokens(last) == ([first, last] if committed else [last])
    assert sales(engine) == ([1, 2] if committed else [2])


def test_async_sessions_side_by_side(deployment: Deployment, wire: Wire) -> None:
    async def main() -> list[int]:
        async with asynchronous(deployment) as at:
            scoped = async_scoped_session(at.session, asyncio.current_task)

            async def work(number: int) -> int:
                try:
                    async with write(at.bus, scoped, orders) as fact:
                        fact.add(Order(number, "new"))
                    await scoped.commit()
                    return fact.id
                finally:
                    await scoped.remove()

            return await asyncio.gather(*[work(number) for number in range(8)])

    ids = asyncio.run(main())
    assert wire.tokens(max(ids)) == sorted(ids)
    assert wire.chained()


def test_aiosqlite_cannot_be_joined_and_says_so(deployment: Deployment, tmp_path: Any) -> None:
    async def main() -> None:
        async with asynchronous(deployment) as at:
            engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
            async with AsyncSession(engine) as session:
                with pytest.raises(ConfigError, match="psycopg"):
                    await at.__class__(at.bus, engine).sell(session, 1)
            await engine.dispose()

    asyncio.run(main())
    assert deployment.rows() == {}


# -- SQLite ---------------------------------------------------------------------------------------------------


@pytest.fixture
def sqlite_engine(on_sqlite: Deployment) -> Iterator[Engine]:
    engine = create_engine(on_sqlite.store)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@BEATS
def test_sqlite_commits_and_rolls_back_and_has_savepoints(
    on_sqlite: Deployment, sqlite_engine: Engine, beats: bool
) -> None:
    engine = sqlite_engine
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus(beats=beats, settings=SLOW_LOOK) as bus:
        with Session(engine) as session:
            first = sell(bus, session, 1)
            session.commit()
            assert positions(bus) == first
            session.add(Sale(number=2, state="first"))
            session.flush()  # the one write lock is taken before the fact
            never = sell(bus, session, 3)
            session.rollback()
            before = sell(bus, session, 4)
            assert before == never  # the sequence was rolled back with it
            savepoint = session.begin_nested()
            gone = sell(bus, session, 5)
            savepoint.rollback()
            kept = [sell(bus, session, number) for number in (6, 7)]
            assert kept[0] == gone
            session.commit()
            assert positions(bus) == kept[-1]
            sell(bus, session, 8)
        last = bus.publish(orders, [Order(9, "new")])[-1]  # with a connection of busrep's
        assert wire.tokens(last) == [first, before, *kept, last]
        assert wire.chained()
        assert bus.statistics()["writer"]["in_doubt"] == 0
    assert list(on_sqlite.rows()) == [first, before, *kept, last]
    assert sales(engine) == [1, 4, 6, 7]


def test_an_id_that_another_process_got_after_a_rollback_is_nobodys_here(
    on_sqlite: Deployment, sqlite_engine: Engine
) -> None:
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus(settings=SLOW_LOOK) as bus:
        with on_sqlite.bus(writer="w2") as other, Session(sqlite_engine) as session:
            never = sell(bus, session, 1)
            session.rollback()
            (theirs,) = other.publish(orders, [Order(2, "new")])
            assert theirs == never
            last = sell(bus, session, 3)
            session.commit()
            assert wire.tokens(theirs, writer="w2") == [theirs]
            assert wire.tokens(last) == [last]
    assert list(on_sqlite.rows()) == [last]
    assert list(on_sqlite.rows("w2")) == [theirs]


def test_a_rollback_that_nobody_tells_of_is_known_by_its_id(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    """The ID is given again, in the same connection's next transaction, before anyone has looked."""
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus(beats=False, settings=SLOW_LOOK) as bus:
        db = sqlite3.connect(on_sqlite.store.removeprefix("sqlite:///"), isolation_level=None)
        with contextlib.closing(db):
            ids = []
            for end in ("ROLLBACK", "COMMIT", "ROLLBACK", "ROLLBACK", "COMMIT"):
                db.execute("BEGIN")
                with bus.write(orders, connection=db) as fact:
                    fact.add(Order(len(ids), end))
                ids.append(fact.id)
                db.execute(end)
            bus.settle()
        assert ids == [1, 1, 2, 2, 2]
        assert wire.tokens(2) == [1, 2]
        assert wire.chained()
    assert on_sqlite.rows() == {1: [b'[1,"COMMIT"]'], 2: [b'[4,"COMMIT"]']}


def test_a_commit_is_seen_though_the_connection_goes_on(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus() as bus:
        db = sqlite3.connect(on_sqlite.store.removeprefix("sqlite:///"), isolation_level=None)
        with contextlib.closing(db):
            db.execute("BEGIN")
            with bus.write(orders, connection=db) as fact:
                fact.add(Order(1, "new"))
            bus.settle()
            assert positions(bus) < fact.id
            db.execute("COMMIT")
            db.execute("BEGIN IMMEDIATE")
            assert wire.tokens(1) == [1]
            with pytest.raises(ConfigError, match="ended inside"), bus.write(orders, connection=db) as fact:
                fact.add(Order(2, "never"))
                db.execute("ROLLBACK")
    assert list(on_sqlite.rows()) == [1]


def test_a_sqlite_transaction_that_is_left_to_the_garbage_collector_holds_nothing_up(
    on_sqlite: Deployment, sqlite_engine: Engine
) -> None:
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus() as bus:
        session = Session(sqlite_engine)
        block = write(bus, session, orders)
        block.__enter__().add(Order(1, "never"))
        del block, session
        gc.collect()
        with Session(sqlite_engine) as session:
            last = sell(bus, session, 2)
            session.commit()
        assert wire.tokens(last) == [last]
        assert [line for line in wire.lines if line.startswith("RDATA")] == [f'RDATA orders w1 {last} [2,"new"]']
    assert list(on_sqlite.rows()) == [last]


def test_on_sqlite_the_bus_is_open_before_the_lock_is_taken(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    bus = on_sqlite.bus()
    with Session(sqlite_engine) as session:
        session.add(Sale(number=1, state="new"))
        session.flush()
        with pytest.raises(ConfigError, match=r"bus\.open\(\)"):
            sell(bus, session, 2)
        session.rollback()
        sell(bus, session, 3)
        session.commit()
    bus.close()
    assert sales(sqlite_engine) == [3]


def test_a_process_that_dies_after_commit_is_published_by_the_next(
    on_sqlite: Deployment, sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = on_sqlite.bus(settings=SLOW_LOOK)
    with on_sqlite.bus(writer=None, reader="r", settings=QUICK) as reading:
        batches: list[Any] = []
        reading.subscribe(orders)(batches.append)
        dying.open()
        monkeypatch.setattr(dying.writing, "ended", lambda *_: None)
        with Session(sqlite_engine) as session:
            committed = sell(dying, session, 1)
            session.commit()
        with on_sqlite.bus() as after:
            last = after.publish(orders, [Order(2, "new")])[0]
            reading.wait_for(orders, "w1", last)
        assert [token for batch in batches for token in batch.tokens] == [committed, last]
    dying.close()


def test_autocommit_is_refused_on_sqlite_too(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    """What follows the block would else be in a transaction that nobody commits."""
    engine = sqlite_engine.execution_options(isolation_level="AUTOCOMMIT")
    with on_sqlite.bus() as bus, Session(engine) as session:
        with pytest.raises(ConfigError, match="AUTOCOMMIT"):
            sell(bus, session, 1)
        session.execute(text("INSERT INTO sales VALUES (2, 'new')"))
    assert sales(sqlite_engine) == [2]
    assert on_sqlite.rows() == {}


def test_a_fenced_writer_on_sqlite_writes_nothing(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    with on_sqlite.bus(settings=SLOW_LOOK) as bus, on_sqlite.bus(), Session(sqlite_engine) as session:
        with pytest.raises(busrep.WriterFenced):
            sell(bus, session, 1)
        session.rollback()
    assert on_sqlite.rows() == {}


def test_a_snapshot_that_is_too_old_is_said(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    with on_sqlite.bus(settings=SLOW_LOOK) as bus:
        db = sqlite3.connect(on_sqlite.store.removeprefix("sqlite:///"), isolation_level=None)
        with contextlib.closing(db):
            db.execute("BEGIN")
            db.execute("SELECT * FROM sales").fetchall()
            last = bus.publish(orders, [Order(1, "new")])
            with pytest.raises(Unavailable, match="BEGIN IMMEDIATE"), bus.write(orders, connection=db):
                raise AssertionError
            db.execute("ROLLBACK")
            last += bus.publish(orders, [Order(2, "new")])
        assert bus.positions()["orders"]["w1"] == last[-1]
    assert list(on_sqlite.rows()) == last


def test_sqlite_sessions_of_many_threads(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    kept: list[int] = []
    errors: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for number in range(base, base + 8):
                if number % 4 == 0:
                    kept.extend(bus.publish(orders, [Order(number, "new")]))
                    continue
                with Session(sqlite_engine) as session:
                    fact = sell(bus, session, number)
                    if number % 3:
                        session.commit()
                        kept.append(fact)
                    else:
                        session.rollback()
        except BaseException as error:
            errors.append(error)

    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus() as bus:
        workers = [threading.Thread(target=work, args=(100 * base,)) for base in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert errors == []
        assert wire.tokens(max(kept)) == sorted(kept)
        assert wire.chained()
    assert list(on_sqlite.rows()) == sorted(kept)


def savepoints(dice: random.Random, sell: Callable[[], object], nested: Callable[[], Any], depth: int = 0) -> None:
    """Any facts in any savepoints, of which some are rolled back."""
    for _ in range(dice.randrange(4)):
        if depth == 4 or dice.random() < 0.45:
            sell()
            continue
        with contextlib.suppress(KeyError), nested():
            savepoints(dice, sell, nested, depth + 1)
            if dice.random() < 0.4:
                raise KeyError


@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_is_rolled_back_what_is_published_is_what_the_tables_hold(
    request: pytest.FixtureRequest, database: str, seed: int
) -> None:
    on_server = database == "postgresql"
    deployment: Deployment = request.getfixturevalue("deployment" if on_server else "on_sqlite")
    engine: Engine = request.getfixturevalue("engine" if on_server else "sqlite_engine")
    if not on_server:  # what SQLAlchemy's documentation gives for savepoints that begin a transaction

        @event.listens_for(engine, "connect")
        def connect(driver: sqlite3.Connection, _: object) -> None:
            driver.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

        engine.dispose()
    dice, numbers = random.Random(seed), itertools.count()
    with Wire(deployment.redis, deployment.name) as wire, deployment.bus() as bus, Session(engine) as session:
        for _ in range(50):
            savepoints(dice, lambda: sell(bus, session, next(numbers)), session.begin_nested)
            getattr(session, dice.choice(["commit", "commit", "rollback", "close"]))()
        last = sell(bus, session, next(numbers))
        session.commit()
        rows = deployment.rows()
        assert wire.tokens(last) == list(rows)
        assert wire.chained()
    assert sorted(json.loads(payload)[0] for (payload,) in rows.values()) == sales(engine)


def test_the_id_of_a_fact_that_was_rolled_back_can_still_be_read(on_sqlite: Deployment, sqlite_engine: Engine) -> None:
    with on_sqlite.bus(settings=SLOW_LOOK) as bus, Session(sqlite_engine) as session:
        with write(bus, session, orders) as never:
            never.add(Order(1, "never"))
        session.rollback()
        with write(bus, session, orders) as fact:
            fact.add(Order(2, "new"))
        session.commit()
        assert never.id == fact.id
