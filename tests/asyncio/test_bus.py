"""The asyncio runtime on a real Redis: writers, readers, faults of the link, handlers and the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
import redis as sync_redis
import redis.asyncio

import busrep
from busrep import Batch, Bus, Settings, Stream, connect
from busrep.core.application_commands import RemoteServerUp, UserIp, UserSync
from busrep.core.commands import Position
from busrep.errors import (
    ClaimBlocked,
    Closed,
    ConfigError,
    EpochChanged,
    HandlerFailed,
    NotAWriter,
    PositionTooOld,
    ReaderMoved,
    RowError,
    SchemaError,
    Unavailable,
    UnknownStream,
    WaitTimeout,
    WriterFenced,
)
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import RedisServer, start_redis
from tests.shop import QUICK, STREAMS, Order, opened_store, orders, payments, typing

pytestmark = pytest.mark.servers


@attrs.define
class Deployment:
    """Buses of one name on one Redis and one store."""

    redis: str
    name: str
    store: str
    settings: Settings = QUICK

    def bus(self, **options: Any) -> Bus:
        given: dict[str, Any] = {
            "name": self.name,
            "streams": STREAMS,
            "store": self.store,
            "settings": self.settings,
            "start": "earliest",  # "now" is some moment after subscribe(): a row written at once may lie before it
            **options,
        }
        return connect(given.pop("redis", self.redis), **given)

    async def store_of(self) -> Any:
        store = open_store(self.store, Registry(STREAMS))
        await store.init()
        await store.open()
        return store

    async def init(self) -> Deployment:
        await (await self.store_of()).close()
        return self


@pytest.fixture
def deployment(redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, sqlite_url)
    asyncio.run(found.init())
    return found


@pytest.fixture
def on_postgres(redis_url: str, bus_name: str, postgres_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, postgres_url)
    asyncio.run(found.init())
    return found


def run(work: Coroutine[Any, Any, None], timeout: float = 100.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout):
            await work

    asyncio.run(bounded())


async def until(true: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait for something that has no event of its own (a counter in statistics)."""
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.005)


class Gate:
    """Holds up a method of a store until it is opened: before it does its work, or, with `after`, before it answers.

    `when` tells by the arguments which calls are held up; all of them, if it is not given.
    """

    def __init__(
        self, store: Any, method: str, *, after: bool = False, when: Callable[..., bool] = lambda *_: True
    ) -> None:
        self.at, self.go_on = asyncio.Event(), asyncio.Event()
        given = getattr(store, method)

        async def held_up(*args: Any, **kwargs: Any) -> Any:
            found = await given(*args, **kwargs) if after else None
            if when(*args):
                self.at.set()
                await self.go_on.wait()
            return found if after else await given(*args, **kwargs)

        setattr(store, method, held_up)


@attrs.define
class Seen:
    """What a handler was given: (writer, token, number) in order."""

    facts: list[tuple[str, int, int]] = attrs.field(factory=list)

    def __call__(self, batch: Batch[Order]) -> None:
        self.facts += [(batch.writer, token, row.number) for token, row in zip(batch.tokens, batch.rows, strict=True)]

    @property
    def numbers(self) -> list[int]:
        return [number for _, _, number in self.facts]


async def write(bus: Bus, *numbers: int, stream: Stream[Order] = orders) -> int:
    """One fact per number; the last ID."""
    last = 0
    for number in numbers:
        async with bus.write(stream) as fact:
            fact.add(Order(number, "new"))
        last = fact.id
    return last


async def crash(bus: Bus) -> None:
    """As kill -9 does, of a bus in this process: nothing more is published, saved or released."""
    bus.background.closed = bus.tasks.closed = True
    for task in [*bus.background, *bus.tasks]:
        task.cancel()
    await asyncio.gather(*bus.background, *bus.tasks, return_exceptions=True)
    bus.background.clear()
    bus.tasks.clear()
    if bus.writing is not None:
        bus.writing.core.fenced()
    await bus.link.close()


# -- writing and reading --------------------------------------------------------------------------------------


def test_facts_arrive_whole_in_order_and_typed(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer, deployment.bus(writer="w2") as reader:
            batches: list[Batch[Order]] = []
            reader.subscribe(orders)(batches.append)
            async with writer.write(orders) as fact:
                fact.add(Order(1, "new"))
                fact.add(Order(1, "paid"))
            ids = await writer.publish(orders, [Order(n, "bulk") for n in range(2, 502)])
            await reader.wait_for(orders, "w1", ids[-1])
            facts = [one for batch in batches for one in batch.facts()]
            assert facts[0] == (fact.id, [Order(1, "new"), Order(1, "paid")])
            assert facts[1:] == [(id, [Order(n, "bulk")]) for n, id in enumerate(ids, start=2)]
            assert batches[0].stream is orders
            assert batches[0].payloads[0] == b'[1,"new"]'
            assert reader.positions()["orders"]["w1"] == ids[-1]
            # Its own is what was published, as far as Redis has said so: that may come behind the rows.
            await until(lambda: writer.positions()["orders"]["w1"] == ids[-1])
            async with writer.write(orders, count=2) as fact:
                more = fact.add_each([Order(n, "more") for n in (1, 2)])
            await reader.wait_for(orders, "w1", more[-1])
            facts = [one for batch in batches for one in batch.facts()]
            assert facts[-2:] == [(id, [Order(n, "more")]) for n, id in enumerate(more, start=1)]
            async with writer.write(orders, count=2) as fact:
                for at, status in ((0, "new"), (0, "paid"), (1, "new")):
                    fact.add(Order(3 + at, status), at=at)
                more = fact.published_ids()
            await reader.wait_for(orders, "w1", more[-1])
            facts = [one for batch in batches for one in batch.facts()]
            assert facts[-2:] == [(more[0], [Order(3, "new"), Order(3, "paid")]), (more[1], [Order(4, "new")])]
            with pytest.raises(ConfigError, match="count=3"):
                async with writer.write(orders, count=2) as fact:
                    fact.add_each([Order(1, "wrong")] * 3)
            with pytest.raises(ConfigError, match="1 or more"):
                writer.write(orders, count=0)

    run(main())


def test_async_handlers_and_several_of_them(deployment: Deployment) -> None:
    async def main() -> None:
        first, second = Seen(), Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:

            @reader.subscribe(orders, payments)
            async def handle(batch: Batch[Order]) -> None:
                await asyncio.sleep(0)
                first(batch)

            reader.subscribe(orders)(second)
            await reader.wait_for(orders, "w1", await write(writer, 1, 2))
            await reader.wait_for(payments, "w1", await write(writer, 3, stream=payments))
            assert first.numbers == [1, 2, 3]
            assert second.numbers == [1, 2]

    run(main())


def test_a_rolled_back_fact_is_never_seen_and_holds_nothing_up(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            await write(writer, 1)
            with pytest.raises(KeyError):
                async with writer.write(orders) as fact:
                    fact.add(Order(2, "never"))
                    raise KeyError
            with pytest.raises(RowError):
                async with writer.write(orders) as fact:
                    fact.add(Order("three", "never"))  # type: ignore[arg-type]
            last = await write(writer, 4)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 4]
            # An ID without a row moves the position all the same.
            with contextlib.suppress(KeyError):
                async with writer.write(orders) as fact:
                    raise KeyError
            await reader.wait_for(orders, "w1", fact.id)

    run(main())


def test_concurrent_facts_are_published_in_the_order_of_their_ids(on_postgres: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            reader.subscribe(orders)(seen)
            held, entered = asyncio.Event(), asyncio.Event()

            async def slow() -> None:
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "slow"))
                    entered.set()
                    await held.wait()

            task = asyncio.create_task(slow())
            await entered.wait()
            later = await write(writer, 2, 3)
            with pytest.raises(WaitTimeout):
                await reader.wait_for(orders, "w1", later, timeout=0.3)
            assert seen.numbers == []
            held.set()
            await task
            await reader.wait_for(orders, "w1", later)
            assert seen.numbers == [1, 2, 3]

    run(main())


def test_a_cancelled_fact_rolls_back_and_is_completed(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            entered = asyncio.Event()

            async def slow() -> None:
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "cancelled"))
                    entered.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(slow())
            await entered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await reader.wait_for(orders, "w1", await write(writer, 2))
            assert seen.numbers == [2]

    run(main())


def test_one_fact_of_two_streams_is_one_transaction(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders, payments)(seen)
            async with writer.write(orders, payments) as fact:
                fact.add(Order(1, "new"))
                fact.add(Order(2, "due"), stream=payments)
                with pytest.raises(ConfigError, match="bus.write"):
                    fact.add(Order(3, "?"), stream=typing)
            await reader.wait_for(orders, "w1", fact.ids["orders"])
            await reader.wait_for(payments, "w1", fact.ids["payments"])
            assert sorted(seen.numbers) == [1, 2]

    run(main())


def test_business_statements_run_in_the_fact_s_transaction(deployment: Deployment) -> None:
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE business (n INTEGER)")
            connection.commit()
        async with deployment.bus(writer="w1") as writer:
            async with writer.write(orders) as fact:
                await fact.execute("INSERT INTO business VALUES (?)", (1,))
                fact.add(Order(1, "new"))
                assert await fact.execute("SELECT n FROM business") == [(1,)]
            with contextlib.suppress(KeyError):
                async with writer.write(orders) as fact:
                    await fact.execute("INSERT INTO business VALUES (?)", (2,))
                    raise KeyError
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT n FROM business").fetchall() == [(1,)]

    run(main())


@pytest.mark.parametrize("kind", ["own", "psycopg", "psycopg async"])
def test_facts_on_the_caller_s_connection_postgres(on_postgres: Deployment, kind: str) -> None:
    async def main() -> None:
        seen = Seen()
        async with (
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus() as reader,
            contextlib.AsyncExitStack() as stack,
        ):
            reader.subscribe(orders)(seen)
            connection: Any = None
            if kind == "psycopg":
                connection = stack.enter_context(psycopg.connect(on_postgres.store))
            elif kind == "psycopg async":
                connection = await stack.enter_async_context(await psycopg.AsyncConnection.connect(on_postgres.store))
            async with writer.write(orders, connection=connection) as fact:
                fact.add(Order(1, "ours"))
            await reader.wait_for(orders, "w1", fact.id)
            if connection is None:
                return
            # Joined: the caller's own transaction, and its own commit.
            for number, commit in ((2, True), (3, False), (4, True)):
                result = connection.execute("SELECT 1")
                if asyncio.iscoroutine(result):
                    await result
                async with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(number, "joined"))
                ending = connection.commit() if commit else connection.rollback()
                if ending is not None:
                    await ending
                await writer.settle()
                await reader.wait_for(orders, "w1", fact.id)
            assert seen.numbers == [1, 2, 4]

    run(main())


def test_a_joined_transaction_is_seen_to_commit_without_being_told(on_postgres: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            reader.subscribe(orders)(seen)
            async with await psycopg.AsyncConnection.connect(on_postgres.store) as connection:
                async with connection.transaction():
                    async with writer.write(orders, connection=connection) as fact:
                        fact.add(Order(1, "joined"))
                    later = await write(writer, 2)
                    with pytest.raises(WaitTimeout):
                        await reader.wait_for(orders, "w1", later, timeout=0.2)
                    assert seen.numbers == []  # 1 is open: 2 waits for it
                await reader.wait_for(orders, "w1", later)
                assert fact.id < later
            assert seen.numbers == [1, 2]

    run(main())


def test_a_savepoint_rolled_back_inside_the_block_does_not_let_go_of_the_claim(on_postgres: Deployment) -> None:
    """With it goes the lock on the claim, if it is older than the fact: its successor would take the ID for empty."""

    async def main() -> None:
        seen = Seen()
        async with (
            on_postgres.bus(writer="w1") as first,
            on_postgres.bus() as reader,
            contextlib.AsyncExitStack() as stack,
        ):
            reader.subscribe(orders)(seen)
            with psycopg.connect(on_postgres.store) as connection:
                connection.execute("SAVEPOINT before")
                async with first.write(orders, connection=connection) as fact:
                    fact.add(Order(1, "still ours"))
                    connection.execute("ROLLBACK TO before")
                connection.commit()
                await reader.wait_for(orders, "w1", fact.id)
                connection.execute("SAVEPOINT before")
                with pytest.raises(WriterFenced):
                    async with first.write(orders, connection=connection) as fact:
                        fact.add(Order(2, "of the one before"))
                        connection.execute("ROLLBACK TO before")
                        second = await stack.enter_async_context(on_postgres.bus(writer="w1"))
                connection.commit()
            await reader.wait_for(orders, "w1", await write(second, 3))
            assert seen.numbers == [1, 3]
            with psycopg.connect(on_postgres.store) as connection:
                assert connection.execute("SELECT count(*) FROM busrep_facts").fetchone() == (2,)

    run(main())


def test_what_a_savepoint_took_along_a_joined_fact_has_again_at_its_end(on_postgres: Deployment) -> None:
    """The lock on the claim, and a COMMIT that waits for the disk."""

    async def main() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            with psycopg.connect(on_postgres.store) as connection, opened_store(on_postgres.store) as store:
                connection.execute("SET synchronous_commit = off")
                connection.execute("SAVEPOINT before")
                async with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(1, "still ours"))
                    connection.execute("ROLLBACK TO before")
                    assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
                assert connection.execute("SHOW synchronous_commit").fetchone() == ("local",)
                with pytest.raises(ClaimBlocked):
                    store.claim("w1", ["orders"], timeout=0.05)
                connection.commit()
            await writer.settle()

    run(main())


def test_a_transaction_that_ends_inside_the_block_is_told(on_postgres: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            reader.subscribe(orders)(seen)
            with psycopg.connect(on_postgres.store) as connection:
                connection.execute("SELECT 1")
                with pytest.raises(ConfigError, match="after the block"):
                    async with writer.write(orders, connection=connection) as fact:
                        fact.add(Order(1, "in no transaction of ours"))
                        connection.commit()
                connection.commit()
            await reader.wait_for(orders, "w1", await write(writer, 2))
            assert seen.numbers == [2]

    run(main())


def test_a_connection_of_another_database_leaves_the_writer_alone(on_postgres: Deployment) -> None:
    """Also one that has busrep's tables: the claim that is not found there stands here."""

    async def main() -> None:
        seen = Seen()
        other = f"other_{secrets.token_hex(4)}"
        with psycopg.connect(on_postgres.store, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {other} TEMPLATE {connection.info.dbname}")
        elsewhere = psycopg.conninfo.make_conninfo(on_postgres.store, dbname=other)
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            reader.subscribe(orders)(seen)
            with psycopg.connect(elsewhere) as connection:
                for joined in (False, True):
                    if joined:
                        connection.execute("SELECT 1")
                    with pytest.raises(ConfigError, match="another database"):
                        async with writer.write(orders, connection=connection) as fact:
                            fact.add(Order(1, "elsewhere"))
            await reader.wait_for(orders, "w1", await write(writer, 2))
            assert seen.numbers == [2]
        with psycopg.connect(on_postgres.store, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {other}")

    run(main())


def test_facts_on_the_caller_s_sqlite_connection(deployment: Deployment) -> None:
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            with contextlib.closing(sqlite3.connect(path)) as connection:
                async with writer.write(orders, connection=connection) as fact:
                    connection.execute("CREATE TABLE business (n INTEGER)")
                    fact.add(Order(1, "ours"))
                await reader.wait_for(orders, "w1", fact.id)
                connection.execute("INSERT INTO business VALUES (1)")
                with pytest.raises(ConfigError, match=r"bus\.write"):
                    async with writer.write(orders, connection=connection):
                        pass
                connection.rollback()
            async with writer.write(orders) as fact:
                await write(writer, 2)  # nothing holds the lock yet
                await fact.execute("SELECT 1")
                with pytest.raises(ConfigError, match="one write lock"):  # at once, not after a deadlock
                    await write(writer, 3)
            await until(lambda: seen.numbers == [1, 2])

    run(main())


def test_a_database_file_that_was_replaced_is_told(deployment: Deployment) -> None:
    """A backup moved to its place: who has the former file open would read, and prove, what nobody else sees."""
    path = Path(deployment.store.removeprefix("sqlite:///"))

    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            store = await deployment.store_of()
            await write(writer, 1)
            for name in (f"{path}-wal", f"{path}-shm", str(path)):
                shutil.copy(name, f"{name}.backup")
            for name in (f"{path}-wal", f"{path}-shm", str(path)):
                os.replace(f"{name}.backup", name)
            with pytest.raises(Unavailable, match="restart this process"):
                await store.known()
            with pytest.raises(Unavailable, match="restart this process"):
                await write(writer, 2)
            await store.close()
            async with deployment.bus(start={"orders": {"w1": 0}}) as later:
                seen = Seen()
                later.subscribe(orders)(seen)
                await later.wait_for(orders, "w1", 1)
                assert seen.numbers == [1]

    run(main())


def test_a_backend_that_dies_at_commit_leaves_a_fact_that_the_table_decides(on_postgres: Deployment) -> None:
    """Rule 9.1: no answer to COMMIT says neither committed nor aborted."""

    async def main() -> None:
        seen = Seen()
        async with FaultyLink(on_postgres.store) as proxy:
            async with on_postgres.bus(writer="w1", store=proxy.url) as writer, on_postgres.bus() as reader:
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", await write(writer, 1))
                with pytest.raises(busrep.BusrepError):
                    async with writer.write(orders) as fact:
                        fact.add(Order(2, "in doubt"))
                        await fact.execute("SELECT 1")
                        # COMMIT goes into the hole; then the link dies.
                        proxy.black_hole()
                        asyncio.get_running_loop().call_later(0.1, proxy.cut)
                        asyncio.get_running_loop().call_later(0.1, proxy.heal)
                await reader.wait_for(orders, "w1", await write(writer, 3))
                committed = 2 in seen.numbers
                assert seen.numbers == ([1, 2, 3] if committed else [1, 3])
                with psycopg.connect(on_postgres.store) as connection:
                    rows = connection.execute("SELECT count(*) FROM busrep_facts WHERE stream = 'orders'").fetchone()
                assert rows == (3 if committed else 2,)
                assert writer.statistics()["writer"]["in_doubt"] == 0

    run(main())


# -- waiting --------------------------------------------------------------------------------------------------


def test_r11_waiting_for_one_writer(deployment: Deployment) -> None:
    async def main() -> None:
        async with (
            deployment.bus(writer="w1") as w1,
            deployment.bus(writer="w2") as w2,
            deployment.bus() as reader,
        ):
            target = await write(w1, 1) + 2
            waiting = asyncio.create_task(reader.wait_for(orders, "w1", target))
            await reader.wait_for(orders, "w2", await write(w2, 2, 3, 4, 5))
            assert w2.positions()["orders"]["w2"] > target
            await write(w1, 6)  # w1's own row, past it
            await waiting
            await w1.wait_for(orders, "w1", 10**9)  # the own writer: at once
            with pytest.raises(WaitTimeout) as caught:
                await reader.wait_for(orders, "w1", 10**9, timeout=0.05)
            assert caught.value.token == 10**9
            assert isinstance(caught.value, TimeoutError)
            assert reader.statistics()["reader"]["waiting"] == 0

    run(main())


def test_an_idle_writer_follows_so_that_nobody_waits_for_it(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="idle"), deployment.bus(writer="busy") as busy, deployment.bus() as reader:
            last = await write(busy, 1, 2, 3)
            await reader.wait_for(orders, "idle", last)
            await until_async(lambda: reader.linear_position(orders), last)

    run(main())


def test_a_transaction_that_has_ended_is_asked_after_whole(
    on_postgres: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when one of its facts has been asked after alone, before the other was noted."""

    async def nobody() -> None:
        pass

    async def main() -> None:
        async with (
            on_postgres.bus(writer="w1") as writer,
            await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
        ):
            writing = writer.writing
            assert writing is not None
            monkeypatch.setattr(writing, "settle", nobody)
            facts = []
            await connection.execute("SELECT 1")
            for number in (1, 2):
                async with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(number, "new"))
                facts.append(fact)
            await connection.commit()
            await writing._settle(writing.doubts[0])
            assert len(writing.doubts) == 1
            facts[0].ended()
            await until(lambda: not writing.doubts)

    run(main())


async def until_async(ask: Callable[[], Awaitable[int]], at_least: int) -> None:
    async with asyncio.timeout(60):
        while await ask() < at_least:
            await asyncio.sleep(0.02)


def test_waiters_are_bounded_and_leave_nothing(deployment: Deployment) -> None:
    async def main() -> None:
        settings = attrs.evolve(QUICK, waiters=2)
        async with deployment.bus(settings=settings) as reader:
            waits = [asyncio.create_task(reader.wait_for(orders, "w", 9)) for _ in range(2)]
            await until(lambda: reader.statistics()["reader"]["waiting"] == 2)
            with pytest.raises(ConfigError, match="waiters"):
                await reader.wait_for(orders, "w", 9)
            waits[0].cancel()
            await asyncio.gather(waits[0], return_exceptions=True)
            assert reader.statistics()["reader"]["waiting"] == 1
            await reader.close()
            with pytest.raises(Closed):
                await waits[1]

    run(main())


# -- the link -------------------------------------------------------------------------------------------------


def test_killed_subscriptions_lose_nothing(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            client = redis.asyncio.Redis.from_url(deployment.redis)
            for number in range(300):
                last = await write(writer, number)
                if number % 50 == 25:
                    await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == list(range(300))
            await until(lambda: reader.statistics()["link"]["reconnects"] > 0)
            await client.aclose()

    run(main())


def test_a_redis_that_restarts_loses_nothing(bus_name: str, sqlite_url: str) -> None:
    async def main(server: RedisServer) -> None:
        seen = Seen()
        deployment = await Deployment(server.url, bus_name, sqlite_url).init()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 0))
            await asyncio.to_thread(server.stop)
            await write(writer, *range(1, 20))  # business goes on
            assert reader.statistics()["link"]["connected"] is False
            await asyncio.to_thread(server.start)
            await reader.wait_for(orders, "w1", await write(writer, 20), timeout=20)
            assert seen.numbers == list(range(21))

    with start_redis() as server:
        run(main(server))


def test_readers_follow_through_the_table_while_redis_is_away(bus_name: str, sqlite_url: str) -> None:
    async def main(server: RedisServer) -> None:
        seen = Seen()
        deployment = await Deployment(server.url, bus_name, sqlite_url).init()
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 0))
            await asyncio.to_thread(server.kill)
            last = await write(writer, 1, 2, 3)
            await reader.wait_for(orders, "w1", last, timeout=10)
            assert seen.numbers == [0, 1, 2, 3]

    with start_redis() as server:
        run(main(server))


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_a_half_open_link_is_noticed(deployment: Deployment, side: str) -> None:
    """With the default heartbeat of 2 s the bound is 10 s; here 1 s."""

    async def main() -> None:
        seen = Seen()
        async with FaultyLink(deployment.redis) as proxy:
            options = {"reader": {}, "writer": {}, side: {"redis": proxy.url}}
            async with (
                deployment.bus(writer="w1", **options["writer"]) as writer,
                deployment.bus(**options["reader"]) as reader,
            ):
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", await write(writer, 0))
                proxy.black_hole()
                started = asyncio.get_running_loop().time()
                bus = reader if side == "reader" else writer
                await until(lambda: bus.statistics()["link"]["connected"] is False)
                bound = (QUICK.silent_after_beats + 2.5) * QUICK.heartbeat + QUICK.redis_timeout
                assert asyncio.get_running_loop().time() - started < bound
                last = await write(writer, 1, 2)
                proxy.cut()
                proxy.heal()
                await reader.wait_for(orders, "w1", last, timeout=10)
                assert seen.numbers == [0, 1, 2]

    run(main())


def test_rows_dropped_from_a_full_publish_queue_are_fetched(deployment: Deployment) -> None:
    """W8 with both ends real."""

    async def main() -> None:
        seen = Seen()
        settings = attrs.evolve(QUICK, publish_queue_bytes=2_000)
        async with (
            FaultyLink(deployment.redis) as proxy,
            deployment.bus(writer="w1", redis=proxy.url, settings=settings) as writer,
            deployment.bus() as reader,
        ):
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 0))
            proxy.refuse = True
            proxy.cut()
            last = await write(writer, *range(1, 100))
            statistics = writer.statistics()["writer"]
            assert statistics["queued_bytes"] <= 2_000
            assert statistics["rows_dropped"] > 0
            proxy.refuse = False
            await reader.wait_for(orders, "w1", last, timeout=10)
            assert seen.numbers == list(range(100))

    run(main())


def test_a_reader_that_lags_falls_back_to_catch_up_within_its_bound(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        settings = attrs.evolve(QUICK, receive_queue_bytes=20_000, page_rows=100, held_bytes=10_000)
        async with deployment.bus(writer="w1") as writer, deployment.bus(settings=settings) as reader:
            gate = asyncio.Event()

            @reader.subscribe(orders)
            async def slow(batch: Batch[Order]) -> None:
                await gate.wait()
                seen(batch)

            await reader.wait_for(orders, "w1", 0)
            for start in range(0, 5_000, 500):
                ids = await writer.publish(orders, [Order(n, "x" * 50) for n in range(start, start + 500)])
            await until(lambda: reader.statistics()["reader"]["overflows"] > 0)
            statistics = reader.statistics()["reader"]
            # One frame, or one page a fetch, may stand above the bound.
            assert statistics["queue_bytes_peak"] < 20_000 + 4 * 100 * 250 + 66_000 * 2.5
            gate.set()
            await reader.wait_for(orders, "w1", ids[-1], timeout=20)
            assert seen.numbers == list(range(5_000))

    run(main())


def test_a_redis_that_is_not_there(deployment: Deployment) -> None:
    async def main() -> None:
        gone = "redis://127.0.0.1:1/0"
        with pytest.raises(Unavailable, match="Redis"):
            async with deployment.bus(writer="w1", redis=gone):
                pass
        async with deployment.bus(writer="w1", redis=gone, require_redis=False) as writer:
            assert await write(writer, 1) == 1
        with pytest.raises(ConfigError, match="Redis URL"):
            deployment.bus(redis="http://nowhere")

    run(main())


def test_users_passwords_sockets_and_databases_of_a_url(tmp_path: Path, bus_name: str, sqlite_url: str) -> None:
    socket = tmp_path / "redis.sock"

    async def main(server: RedisServer) -> None:
        client = sync_redis.Redis(port=server.port, password="top")
        client.execute_command("ACL", "SETUSER", "bus", "on", ">secret", "allchannels", "+@pubsub", "+@connection")
        client.close()
        for url in (
            f"redis://:top@127.0.0.1:{server.port}/3",
            f"redis://bus:secret@127.0.0.1:{server.port}",
            f"unix://bus:secret@{socket}",
        ):
            deployment = await Deployment(url, bus_name, sqlite_url).init()
            async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
                await reader.wait_for(orders, "w1", await write(writer, 1))
        with pytest.raises(ConfigError, match="refuses"):
            async with Deployment(f"redis://bus:wrong@127.0.0.1:{server.port}", bus_name, sqlite_url).bus():
                pass

    with start_redis(config={"requirepass": "top", "unixsocket": str(socket)}) as server:
        run(main(server))


# -- durable readers ------------------------------------------------------------------------------------------


def test_a_durable_reader_goes_on_where_it_was(deployment: Deployment) -> None:
    async def main() -> None:
        first, second = Seen(), Seen()
        async with deployment.bus(writer="w1") as writer:
            await write(writer, 1)
            async with deployment.bus(reader="billing") as reader:
                reader.subscribe(orders)(first)
                await reader.wait_for(orders, "w1", await write(writer, 2))
            await write(writer, 3)
            async with deployment.bus(reader="billing") as reader:
                reader.subscribe(orders)(second)
                await reader.wait_for(orders, "w1", await write(writer, 4))
        assert first.numbers == [1, 2]  # a new durable reader begins at the oldest row
        assert second.numbers == [3, 4]

    run(main())


def test_where_a_reader_begins(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            await write(writer, 1, 2, 3)
            await until_async(_proven(deployment), 3)
            async with deployment.bus(start="now") as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", 3)
                await reader.wait_for(orders, "w1", await write(writer, 4))
                assert seen.numbers == [4]
            async with deployment.bus(start="earliest") as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", 4)
                assert seen.numbers == [1, 2, 3, 4]
            async with deployment.bus(start={"orders": {"w1": 2}}) as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", 4)
                assert seen.numbers == [3, 4]

    run(main())


def test_a_durable_reader_from_now_owes_all_of_a_writer_that_joins_while_it_is_down(deployment: Deployment) -> None:
    """Also when there was no writer at all in its first life, and so no position to save."""

    async def main() -> None:
        seen = Seen()
        async with deployment.bus(reader="r", start="now") as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", 0)
        async with deployment.bus(writer="w1") as writer:
            last = await write(writer, 1, 2)
        async with deployment.bus(reader="r", start="now") as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", last)
        assert seen.numbers == [1, 2]
        store = await deployment.store_of()
        status = await store.status()
        await store.close()
        assert list(status["readers"]["r"]["orders"]) == ["w1"]

    run(main())


def test_exactly_once_saves_in_the_handler_s_transaction(on_postgres: Deployment) -> None:
    async def main() -> None:
        with psycopg.connect(on_postgres.store) as connection:
            connection.execute("CREATE TABLE effects (n int)")
        async with on_postgres.bus(writer="w1") as writer:
            last = await write(writer, *range(20))
            failures = iter([True, False, True, False])
            async with (
                on_postgres.bus(reader="billing", settings=attrs.evolve(QUICK, handler_batch_rows=5)) as reader,
                await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
            ):

                @reader.subscribe(orders)
                async def handle(batch: Batch[Order]) -> None:
                    async with connection.transaction():
                        for row in batch.rows:
                            await connection.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                        await batch.save(connection)
                    if next(failures, False):
                        raise OSError("the COMMIT went through, its answer was lost")

                await reader.wait_for(orders, "w1", last)
        with psycopg.connect(on_postgres.store) as connection:
            numbers = [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY n")]
        assert numbers == list(range(20))

    run(main())


def test_a_writer_that_joins_later_is_saved_exactly_once_on_sqlite(deployment: Deployment) -> None:
    """The handler holds SQLite's one write lock: nothing busrep does for it may want that lock."""
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        seen = Seen()
        async with deployment.bus(reader="billing") as reader:
            with contextlib.closing(sqlite3.connect(path, timeout=2)) as connection:

                @reader.subscribe(orders)
                async def handle(batch: Batch[Order]) -> None:
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        await batch.save(connection)
                        connection.commit()
                    finally:
                        connection.rollback()
                    seen(batch)

                await until(lambda: "orders" in reader.reading.core.followed)
                async with deployment.bus(writer="late") as writer:
                    # At once: the handler's connection blocks this loop, on which a fact's open transaction would wait.
                    ids = await writer.publish(orders, [Order(number, "late") for number in (1, 2, 3)])
                    await reader.wait_for(orders, "late", ids[-1])
            assert seen.numbers == [1, 2, 3]

    run(main(), timeout=15)


def test_two_processes_under_one_reader_name_are_found_out(on_postgres: Deployment) -> None:
    async def main() -> None:
        with psycopg.connect(on_postgres.store) as connection:
            connection.execute("CREATE TABLE effects (n int)")
        moved: list[ReaderMoved] = []

        async def follow(bus: Bus, connection: Any) -> None:
            @bus.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                try:
                    async with connection.transaction():
                        for row in batch.rows:
                            await connection.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                        await batch.save(connection)
                except ReaderMoved as error:
                    moved.append(error)
                    raise

        settings = attrs.evolve(QUICK, save_every=600.0)
        async with (
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus(reader="twin", settings=settings) as one,
            on_postgres.bus(reader="twin", settings=settings) as two,
            await psycopg.AsyncConnection.connect(on_postgres.store) as a,
            await psycopg.AsyncConnection.connect(on_postgres.store) as b,
        ):
            await follow(one, a)
            await follow(two, b)
            for number in range(30):
                last = await write(writer, number)
            await one.wait_for(orders, "w1", last)
            await two.wait_for(orders, "w1", last)
        with psycopg.connect(on_postgres.store) as connection:
            numbers = [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY n")]
        assert numbers == list(range(30))  # exactly once, whoever did it
        assert moved

    run(main())


def test_positions_may_be_saved_in_another_database(deployment: Deployment, tmp_path: Path) -> None:
    async def main() -> None:
        elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
        await Deployment(deployment.redis, deployment.name, elsewhere).init()
        async with deployment.bus(writer="w1") as writer:
            for number in (1, 2):
                seen = Seen()
                async with deployment.bus(reader="billing", reader_store=elsewhere) as reader:
                    reader.subscribe(orders)(seen)
                    await reader.wait_for(orders, "w1", await write(writer, number))
                assert seen.numbers == [number]

    run(main())


def test_a_stream_that_counts_down(deployment: Deployment) -> None:
    backfill = Stream("backfill", Order, negative=True)

    async def main() -> None:
        store = open_store(deployment.store, Registry([backfill]))
        await store.init()
        await store.close()
        seen = Seen()
        async with (
            deployment.bus(streams=[backfill], writer="w1") as writer,
            deployment.bus(streams=[backfill]) as reader,
        ):
            reader.subscribe(backfill)(seen)
            last = await write(writer, 1, 2, stream=backfill)
            assert last < 0
            ids = await writer.publish(backfill, [Order(3, "bulk")])
            assert ids[0] < last
            await reader.wait_for(backfill, "w1", ids[0])
            assert seen.numbers == [1, 2, 3]

    run(main())


def test_saving_needs_a_durable_reader(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            errors: list[Exception] = []

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                try:
                    await batch.save(None)
                except ConfigError as error:
                    errors.append(error)

            await reader.wait_for(orders, "w1", await write(writer, 1))
            assert "reader=" in str(errors[0])

    run(main())


# -- poison ---------------------------------------------------------------------------------------------------


def test_a_poison_row_stops_its_writer_loudly_and_the_others_flow(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        poisoned = True
        settings = attrs.evolve(QUICK, handler_retries=1)
        async with (
            deployment.bus(writer="w1") as w1,
            deployment.bus(writer="w2") as w2,
            deployment.bus(settings=settings, start="earliest") as reader,
        ):
            last = await write(w1, 1, 2, 3, 4)

            @reader.subscribe(orders)
            def handle(batch: Batch[Order]) -> None:
                if poisoned and any(row.number == 3 for row in batch.rows):
                    raise ValueError("poison")
                seen(batch)

            with pytest.raises(HandlerFailed) as caught:
                await reader.wait_for(orders, "w1", last)
            assert (caught.value.token, str(caught.value.error)) == (3, "poison")
            assert seen.numbers == [1, 2]  # what came before it was handled
            await reader.wait_for(orders, "w2", await write(w2, 10))
            with pytest.raises(HandlerFailed):
                await reader.wait_for(orders, "w1", last)
            assert "poison" in reader.statistics()["reader"]["stopped"]["orders w1"]
            poisoned = False
            reader.resume(orders, "w1")
            await reader.wait_for(orders, "w1", last)
            assert sorted(seen.numbers) == [1, 2, 3, 4, 10]

    run(main())


def test_a_dead_letter_is_kept_and_the_rest_goes_on(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        settings = attrs.evolve(QUICK, handler_retries=0)
        async with (
            deployment.bus(writer="w1") as writer,
            deployment.bus(settings=settings, reader="r", on_poison="dead_letter") as reader,
        ):

            @reader.subscribe(orders)
            def handle(batch: Batch[Order]) -> None:
                if any(row.number == 3 for row in batch.rows):
                    raise ValueError("poison")
                seen(batch)

            await reader.wait_for(orders, "w1", await write(writer, 1, 2, 3, 4, 5))
            assert seen.numbers == [1, 2, 4, 5]
        store = await deployment.store_of()
        letters = await store.dead_letters(10)
        await store.close()
        assert [(one.reader, one.stream, list(one.tokens), one.payloads) for one in letters] == [
            ("r", "orders", [3], [b'[3,"new"]'])
        ]
        assert "poison" in letters[0].error

    run(main())


# -- following by iteration -----------------------------------------------------------------------------------


def test_follow_counts_a_batch_as_handled_when_the_next_is_asked_for(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            numbers: list[int] = []
            await reader.wait_for(orders, "w1", 0)
            await write(writer, 1)
            async for batch in reader.follow(orders):
                if not numbers:
                    with pytest.raises(WaitTimeout):
                        await reader.wait_for(orders, "w1", batch.position, timeout=0.05)
                numbers += [row.number for row in batch.rows]
                if numbers[-1] < 5:
                    await write(writer, numbers[-1] + 1)
                else:
                    break
            assert numbers == [1, 2, 3, 4, 5]
            # Left: the last batch was never acknowledged, and waits for whoever follows next.
            await write(writer, 6)
            again: list[int] = []
            iterator: AsyncIterator[Batch[Order]] = reader.follow(orders)
            async for batch in iterator:
                again += [row.number for row in batch.rows]
                if again[-1] == 6:
                    break
            assert again == [5, 6]

    run(main())


def test_follow_ends_with_the_bus(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus() as reader:

            async def follow() -> None:
                async for _ in reader.follow(orders, payments):
                    pass

            task = asyncio.create_task(follow())
            await until(lambda: len(reader.reading.subscribed) == 2)
        with pytest.raises(Closed):
            await task
        with pytest.raises(Closed):
            reader.follow(orders)

    run(main())


# -- writers that die -----------------------------------------------------------------------------------------


def test_a_silent_writer_is_finished_from_the_table(deployment: Deployment) -> None:
    """Rule 9.5: a crash between COMMIT and PUBLISH is repaired even when the writer never returns."""

    async def main() -> None:
        seen = Seen()
        async with deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            writer = deployment.bus(writer="w1")
            await writer.open()
            await reader.wait_for(orders, "w1", await write(writer, 1))
            await crash(writer)
            last = await write(writer, 2)  # committed, never published
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 2]
            await until_async(_registered(deployment), 0)
            assert writer.writing is not None
            before = writer.writing.incarnation
            await reader.wait_for(orders, "w1", await write(writer, 3))  # it comes back to life under a later one alone
            assert writer.writing.incarnation > before
            await writer.close()

    run(main())


def _registered(deployment: Deployment) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        store = await deployment.store_of()
        known = [one for one in await store.known() if one.stream == "orders" and one.writer == "w1"]
        await store.close()
        return 0 if not known[0].registered else -1

    return ask


@pytest.mark.servers
@pytest.mark.parametrize("ahead", ["0", "1 year"])
def test_a_dead_writer_is_found_though_the_database_s_clock_was_set_back(on_postgres: Deployment, ahead: str) -> None:
    with opened_store(on_postgres.store) as store, psycopg.connect(on_postgres.store, autocommit=True) as operator:
        claim = store.claim("dead", ["orders"], timeout=10.0)
        (id,) = store.reserve("orders", 1)
        transaction = store.transaction(claim)
        transaction.begin()
        transaction.insert("orders", [(id, (Order(1, "last"),), (b'[1,"last"]',))])
        transaction.commit()
        operator.execute(f"UPDATE busrep_positions SET seen_at = seen_at + interval '{ahead}'")

    async def main() -> None:
        seen = Seen()
        async with on_postgres.bus() as reader, on_postgres.bus(writer="w2"):
            reader.subscribe(orders)(seen)
            await until(lambda: seen.numbers == [1])
            known = await (store := await on_postgres.store_of()).known()
            assert [one.writer for one in known if one.stream == "orders" and one.registered] == ["w2"]
            await store.close()

    run(main())


def test_a_writer_that_gave_up_one_of_its_streams_is_not_taken_for_dead(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            await write(writer, 1)
            await write(writer, 1, stream=payments)
        async with FaultyLink(deployment.redis) as proxy, deployment.bus(redis=proxy.url) as reader:
            seen = Seen()
            reader.subscribe(orders, payments)(seen)
            async with deployment.bus(writer="w1", streams=[orders]) as writer:
                await reader.wait_for(orders, "w1", await write(writer, 2))
                proxy.refuse = True  # the reader hears nobody, and looks at the table alone
                proxy.cut()
                await asyncio.sleep((QUICK.silent_after_beats + 7) * QUICK.heartbeat)
                await reader.wait_for(orders, "w1", await write(writer, 3), timeout=10)
                assert writer.statistics()["writer"]["fenced"] is False

    run(main())


@pytest.mark.parametrize("kept", [orders, typing], ids=["another with a table", "none with a table"])
def test_the_last_rows_of_a_stream_that_a_writer_gave_up_are_not_lost(
    deployment: Deployment, kept: Stream[Any]
) -> None:
    async def main() -> None:
        seen = Seen()
        store = await deployment.store_of()
        async with deployment.bus() as reader:
            reader.subscribe(payments)(seen)
            first = deployment.bus(writer="w1")
            await first.open()
            await reader.wait_for(payments, "w1", await write(first, 1, stream=payments))
            await crash(first)
            last = await write(first, 2, stream=payments)  # committed, never published
            async with deployment.bus(writer="w1", streams=[kept]) as second:
                # At once: as long as it is heard of, it is not taken for silent.
                left = [one.stream for one in await store.known() if one.registered]
                assert left == (["orders"] if kept is orders else [])
                await second.publish(kept, [Order(3, "new") if kept is orders else ["new"]])
                await reader.wait_for(payments, "w1", last)
                await until_async(lambda: reader.linear_position(payments), last)
                assert second.statistics()["writer"]["fenced"] is False
            assert seen.numbers == [1, 2]
            await first.close()
        await store.close()

    run(main())


def test_a_stream_that_a_writer_gave_up_while_its_predecessor_lives_is_not_lost(deployment: Deployment) -> None:
    """A rolling restart: the former process is finished, wins its name back, and writes until its successor's claim."""

    async def main() -> None:
        seen = Seen()
        store = await deployment.store_of()
        async with deployment.bus() as reader:
            reader.subscribe(payments)(seen)
            former = deployment.bus(writer="w1", redis="redis://127.0.0.1:1", require_redis=False)
            await former.open()
            assert former.writing is not None
            await store.finish("w1", former.writing.incarnation, timeout=10)
            last = await write(former, 1, stream=payments)  # committed, never published
            async with deployment.bus(writer="w1", streams=[orders]):
                assert [one.stream for one in await store.known() if one.registered] == ["orders"]
                await reader.wait_for(payments, "w1", last)
                await until_async(lambda: reader.linear_position(payments), last)
            assert seen.numbers == [1]
            await former.close()
        await store.close()

    run(main())


def test_a_writer_cut_off_from_redis_alone_is_followed_not_fenced(deployment: Deployment) -> None:
    # Silence lasts two seconds, not half of one: a disk that is busy with other tests must not pass for a dead writer.
    deployment = attrs.evolve(deployment, settings=attrs.evolve(QUICK, heartbeat=0.4, silent_after_beats=5))

    async def main() -> None:
        seen = Seen()
        async with FaultyLink(deployment.redis) as proxy:
            async with deployment.bus(writer="w1", redis=proxy.url) as writer, deployment.bus() as reader:
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", await write(writer, 1))
                before = writer.statistics()["writer"]["incarnation"]
                proxy.refuse = True
                proxy.cut()
                last = await write(writer, 2)
                await reader.wait_for(orders, "w1", last, timeout=10)
                # Twice as long as silence lasts: nobody may fence it.
                await asyncio.sleep(10 * deployment.settings.heartbeat)
                last = await write(writer, 3)
                await reader.wait_for(orders, "w1", last, timeout=10)
                assert seen.numbers == [1, 2, 3]
                assert writer.statistics()["writer"]["incarnation"] == before  # fenced, it would win its name back

    run(main())


def test_a_name_claimed_anew_fences_its_former_holder(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as old, deployment.bus() as reader:
            reader.subscribe(orders)(seen)
            await write(old, 1)
            async with deployment.bus(writer="w1") as new:
                with pytest.raises(WriterFenced):
                    await write(old, 2)
                await reader.wait_for(orders, "w1", await write(new, 3))
                assert old.statistics()["writer"]["fenced"] is True
            assert seen.numbers == [1, 3]

    run(main())


CRASHING_WRITER = """
import asyncio, os, signal, sys
import busrep
from busrep.links.redis import RedisLink

redis, name, store, number = sys.argv[1:]
orders = busrep.Stream("orders")

async def main():
    bus = busrep.connect(redis, name=name, streams=[orders], store=store, writer="w1")
    async with bus:
        async def publish(self, messages):
            if any(b"RDATA" in data for _, data in messages):
                os.kill(os.getpid(), signal.SIGKILL)
            return await sent(self, messages)
        sent, RedisLink.publish = RedisLink.publish, publish
        async with bus.write(orders) as fact:
            fact.add([int(number), "crash"])
        await asyncio.sleep(30)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_crash_between_commit_and_publish_is_repaired_by_the_successor(
    kind: str, request: pytest.FixtureRequest
) -> None:
    deployment: Deployment = request.getfixturevalue("deployment" if kind == "sqlite" else "on_postgres")
    script = textwrap.dedent(CRASHING_WRITER)
    arguments = [sys.executable, "-c", script, deployment.redis, deployment.name, deployment.store]

    async def main() -> None:
        seen = Seen()
        # Silence must not finish the writer before the successor is there: that is another test.
        settings = attrs.evolve(QUICK, silent_after_beats=100)
        async with deployment.bus(settings=settings) as reader:
            reader.subscribe(orders)(seen)
            for number in (1, 2):
                process = await asyncio.to_thread(subprocess.run, [*arguments, str(number)], timeout=20)
                assert process.returncode == -signal.SIGKILL
            # The second process found what the first had committed, announced it, and died the same way.
            assert 2 not in seen.numbers
            async with deployment.bus(writer="w1") as writer:
                await reader.wait_for(orders, "w1", await write(writer, 3))
            assert seen.numbers == [1, 2, 3]

    run(main(), timeout=60)


def test_a_reader_that_writes_too_gets_what_its_dead_predecessor_committed(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        # It saves only in an orderly end, and does not get that far.
        first = deployment.bus(writer="w1", reader="w1", settings=attrs.evolve(QUICK, save_every=600.0))
        await first.open()
        first.subscribe(orders)(seen)
        await until(lambda: "orders" in first.reading.core.followed)
        await write(first, 1)
        await crash(first)
        first.reading.reader = ""
        await first.reading.close(0)
        await first.store.close()
        async with deployment.bus(writer="w1", reader="w1") as second:
            second.subscribe(orders)(seen)
            await until(lambda: 1 in seen.numbers)
            await write(second, 2)  # its own: not echoed
        async with deployment.bus(writer="w1", reader="w1") as third:
            third.subscribe(orders)(seen)
            await third.wait_for(orders, "w1", 2)
            async with deployment.bus(writer="w2") as other:
                await third.wait_for(orders, "w2", await write(other, 9))
        assert seen.numbers == [1, 9]  # 2 was published, and handled by its writer, before an orderly end

    run(main())


def test_own_facts_come_back_when_asked_for(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1", own=True) as bus:
            bus.subscribe(orders)(seen)
            await bus.wait_for(orders, "w1", await write(bus, 1, 2))
            assert seen.numbers == [1, 2]

    run(main())


# -- the log changes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["rebootstrap", "stop"])
def test_a_restored_database_is_noticed(deployment: Deployment, policy: str) -> None:
    async def main() -> None:
        seen = Seen()
        resets: list[tuple[str, str, int]] = []
        async with deployment.bus(writer="w1") as writer, deployment.bus(on_epoch_change=policy, reader="r") as reader:
            reader.subscribe(orders)(seen)
            reader.on_reset(orders)(lambda *args: resets.append(args))
            await reader.wait_for(orders, "w1", await write(writer, 1, 2))
            store = await deployment.store_of()
            await store.restored()
            await store.close()
            with pytest.raises(WriterFenced):
                await write(writer, 3)
            async with deployment.bus(writer="w1") as again:
                if policy == "stop":
                    with pytest.raises(EpochChanged):
                        await reader.wait_for(orders, "w1", 10**6)
                    return
                await until(lambda: resets)
                await reader.wait_for(orders, "w1", await write(again, 4))
                assert resets == [("orders", "w1", 0)]
                assert seen.numbers == [1, 2, 1, 2, 4]

    run(main())


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_rows_that_were_pruned_before_they_were_read(deployment: Deployment, policy: str) -> None:
    async def main() -> None:
        seen = Seen()
        missed: list[tuple[str, str, int, int]] = []
        async with deployment.bus(writer="w1") as writer:
            await write(writer, *range(1, 6))
            await until_async(_proven(deployment), 5)
            store = await deployment.store_of()
            floors = await store.prune(keep=2)
            await store.close()
            floor = floors["orders", "w1"]
            start = {"orders": {"w1": 1}}
            async with deployment.bus(start=start, on_too_old=policy) as reader:
                reader.on_missed()(lambda *args: missed.append(args))
                reader.subscribe(orders)(seen)
                if policy == "stop":
                    with pytest.raises(PositionTooOld) as caught:
                        await reader.wait_for(orders, "w1", 5)
                    assert caught.value.floor == floor
                    with pytest.raises(PositionTooOld):
                        async for _ in reader.follow(orders):
                            pass
                    return
                await reader.wait_for(orders, "w1", 5)
                assert missed == [("orders", "w1", 1, floor)]
                assert seen.numbers == list(range(floor + 1, 6))

    run(main())


def _proven(deployment: Deployment) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        store = await deployment.store_of()
        known = [one.position for one in await store.known() if one.stream == "orders" and one.writer == "w1"]
        await store.close()
        return int(known[0])

    return ask


# -- resettable streams, channels, other commands -------------------------------------------------------------


def test_an_in_memory_stream_is_reset_when_its_writer_restarts(deployment: Deployment) -> None:
    async def main() -> None:
        rows: list[Any] = []
        resets: list[tuple[str, str, int]] = []
        missed: list[Any] = []
        # Nothing brings back what is published while a link is dead, and with quick beats a busy machine makes it so.
        calm = attrs.evolve(QUICK, silent_after_beats=100)
        async with deployment.bus(store=None, streams=[typing], settings=calm) as reader:
            reader.subscribe(typing)(lambda batch: rows.extend(batch.rows))
            reader.on_reset()(lambda *args: resets.append(args))
            reader.on_missed(typing)(lambda *args: missed.append(args))
            for life in range(2):
                async with deployment.bus(store=None, streams=[typing], writer="w1") as writer:
                    for number in range(3):
                        async with writer.write(typing) as fact:
                            fact.add(["room", life, number])
                            with pytest.raises(ConfigError):
                                await fact.execute("SELECT 1")
                    await reader.wait_for(typing, "w1", 3)
                    await until(lambda life=life: missed or len(rows) == 3 * (life + 1))
                    assert missed == []
        assert rows == [["room", life, number] for life in range(2) for number in range(3)]
        assert resets == [("typing", "w1", 0)]

    run(main())


def test_a_stream_on_its_own_channel(deployment: Deployment) -> None:
    aside = Stream("aside", Order, channel="aside")

    async def main() -> None:
        store = open_store(deployment.store, Registry([aside, orders]))
        await store.init()
        await store.close()
        lines: list[tuple[str, bytes]] = []
        seen = Seen()
        async with (
            deployment.bus(streams=[aside, orders], writer="w1") as writer,
            deployment.bus(streams=[aside]) as reader,
        ):
            reader.on_line(lambda _, channel, line: lines.append((channel, line)))
            reader.subscribe(aside)(seen)
            await write(writer, 1)
            await reader.wait_for(aside, "w1", await write(writer, 2, stream=aside))
            assert seen.numbers == [2]
            received = [channel for channel, line in lines if line.startswith((b"RDATA", b"POSITION"))]
            assert set(received) == {f"{deployment.name}/aside"}

    run(main())


def test_other_commands_reach_every_process(deployment: Deployment) -> None:
    async def main() -> None:
        got: list[Any] = []
        commands = [
            RemoteServerUp("example.com"),
            UserSync("p1", "@a:example.com", None, True, 5),
            UserIp("@a", "token", "127.0.0.1", "agent", None, 5),
        ]
        async with deployment.bus() as one, deployment.bus() as two:
            for command in commands:

                @two.on(type(command))
                async def handle(command: Any) -> None:
                    got.append(command)

            lines: list[tuple[str, bytes]] = []
            one.on_line(lambda direction, _, line: lines.append((direction, line)))
            await until(lambda: not two.tasks)
            while len(got) < len(commands):  # a subscription to a sub-channel takes its moment
                got.clear()
                for command in commands:
                    await one.send(command)
                await asyncio.sleep(0.1)
            assert sorted(map(repr, got[:3])) == sorted(map(repr, commands))
            assert (">", commands[0].format()) in lines

    run(main())


def test_a_beat_behind_the_end_of_reading_looks_for_nothing(deployment: Deployment) -> None:
    """Nobody would wait for it, or end it, before the store is closed."""

    async def main() -> None:
        async with deployment.bus(reader="r") as reader:
            reader.subscribe(orders)(Seen())
            await reader.reading.followed(orders)
            await reader.reading.close(1.0)
            reader.reading.beat(all_known=True)
            assert [task for task in reader.reading.tasks if not task.done()] == []

    run(main())


def test_replicate_is_answered_and_bad_lines_are_counted(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            await write(writer, 1)
            client = redis.asyncio.Redis.from_url(deployment.redis)
            pubsub = client.pubsub()
            await pubsub.subscribe(deployment.name)
            await client.publish(deployment.name, "REPLICATE ")
            expected = Position("orders", "w1", 1, 1).format()
            async with asyncio.timeout(60):
                async for message in pubsub.listen():
                    if message["type"] == "message" and expected in message["data"].split(b"\n"):
                        break
            for junk in (b"", b"12345", b"\xff\xfe\x00", b"x" * (QUICK.message_bytes + 1), b"RDATA orders"):
                await client.publish(deployment.name, junk)
            await until(lambda: writer.statistics()["reader"]["parse_errors"] >= 4)
            assert await write(writer, 2) == 2
            await pubsub.aclose()
            await client.aclose()

    run(main())


def test_a_flood_of_bad_lines_fills_no_log(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with deployment.bus() as bus:
            caplog.clear()
            for number in range(5, 1000):
                bus.receiver.receive(deployment.name, b"POSITION s w %d 4" % number)
            bus.receiver.receive(deployment.name, b"POSITION s")
            assert bus.statistics()["reader"]["parse_errors"] == 996

    run(main())
    logged = [record.message for record in caplog.records if "bad " in record.message]
    assert len(logged) <= 20, "a line a second and reason, and not over and over"
    assert any(text.startswith("bad prev: 5 is above new, 4") for text in logged)
    assert any(text.startswith("bad line: POSITION takes 4 fields") for text in logged)


# -- errors a user can make -----------------------------------------------------------------------------------


def test_errors_say_what_to_do(deployment: Deployment, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="store="):
            connect(deployment.redis, name="x", streams=[orders])
        for bad in ("", "two words", "new\nline"):
            with pytest.raises(ConfigError, match="name"):
                connect(deployment.redis, name=bad)
        with pytest.raises(ConfigError, match="on_poison"):
            connect(deployment.redis, name="x", on_poison="shrug")
        with pytest.raises(SchemaError, match="busrep db init"):
            async with deployment.bus(store=f"sqlite:///{tmp_path / 'empty.db'}"):
                pass
        bus = deployment.bus(writer="w1")
        with pytest.raises(ConfigError, match="async with"):
            bus.subscribe(orders)
        with pytest.raises(ConfigError, match="async with"):
            bus.write(orders)
        with pytest.raises(ConfigError, match="start="):
            deployment.bus(start="sometime")
        with pytest.raises(ConfigError, match="store="):
            connect(deployment.redis, name="x", reader="r")
        with pytest.raises(ConfigError, match="store="):
            connect(deployment.redis, name="x", store=3)
        with pytest.raises(ConfigError, match="streams="):
            connect(deployment.redis, name="x", streams=[1])  # type: ignore[list-item]
        with pytest.raises(ConfigError) as caught:
            connect("http://user:secret@nowhere", name="x")
        assert "secret" not in str(caught.value)
        async with deployment.bus() as reader:
            with pytest.raises(NotAWriter, match="writer="):
                reader.write(orders)
            with pytest.raises(UnknownStream):
                reader.subscribe(Stream("nobody"))(print)
            with pytest.raises(ConfigError):
                await reader.linear_position(typing)
            with pytest.raises(ConfigError, match="command"):
                await reader.send("hello")  # type: ignore[arg-type]
        with pytest.raises(Closed):
            reader.write(orders)
        with pytest.raises(Closed):
            await reader.open()
        async with deployment.bus(writer="w1") as writer:
            with pytest.raises(ConfigError):
                writer.write()
            with pytest.raises(ConfigError, match="async with"):
                writer.write(orders).add(Order(1, "new"))
            assert await writer.publish(orders, []) == []
            with pytest.raises(NotAWriter):
                writer.write(Stream("nobody"))

    run(main())
