"""What was announced must outlive the database's faults: crashes with asynchronous commits (rule 9.22).

On real servers. Two rounds each; with ``BUSREP_ROUNDS=20`` as many as that.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from busrep.errors import CommitUnknown, ConfigError, Unavailable
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.servers import PostgresServer, start_postgres
from tests.asyncio.test_bus import Deployment, deployment, run  # noqa: F401 - fixtures
from tests.shop import STREAMS, Order, opened_store, orders

pytestmark = pytest.mark.servers

T = TypeVar("T")
ROUNDS = int(os.environ.get("BUSREP_ROUNDS", "2"))


@pytest.fixture(scope="module")
def careless() -> Iterator[PostgresServer]:
    """A server that answers COMMIT long before it writes it down."""
    with start_postgres(config={"synchronous_commit": "off", "wal_writer_delay": "10s", "fsync": "off"}) as server:
        yield server


async def create(server: PostgresServer, name: str) -> str:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    url = server.database_url(name)
    store: Any = open_store(url, Registry(STREAMS))
    await store.init()
    return url


async def write(bus: Any, number: int) -> int:
    async with bus.write(orders) as fact:
        fact.add(Order(number, "paid"))
    return int(fact.id)


async def again(work: Callable[[], Awaitable[T]]) -> T:
    """Try until the database is there."""
    while True:
        try:
            return await work()
        except (Unavailable, CommitUnknown):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("how", ["own", "joined", "empty"])
def test_no_fact_is_announced_that_a_crash_takes_back(
    careless: PostgresServer, redis_url: str, bus_name: str, number: int, how: str
) -> None:
    async def work() -> None:
        url = await create(careless, f"crash_{how}_{number}")
        bus = Deployment(redis_url, bus_name, url).bus
        handled: dict[int, int] = {}
        async with bus(writer="w") as writer, bus(reader="r") as reader:

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                handled.update(zip(batch.tokens, (row.number for row in batch.rows), strict=True))

            last = 0
            async with await psycopg.AsyncConnection.connect(url) as connection:
                for each in range(20):
                    if how == "joined":
                        await connection.execute("SELECT 1")
                    joined = {"connection": connection} if how == "joined" else {}
                    async with writer.write(orders, **joined) as fact:
                        if how != "empty":
                            fact.add(Order(each, "paid"))
                    last = fact.id
                    if how == "joined":
                        await connection.commit()
                        await writer.settle()
                await reader.wait_for(orders, "w", last, timeout=30)
            careless.kill()
            careless.start()
            with psycopg.connect(url) as connection:
                rows = {row[0] for row in connection.execute("SELECT id FROM busrep_facts").fetchall()}
                ahead = connection.execute("SELECT nextval('busrep_seq_orders')").fetchone()
            assert handled.keys() <= rows
            assert ahead is not None
            assert ahead[0] > last  # an ID that was announced is not given out again
            after = await again(lambda: write(writer, 100))
            await reader.wait_for(orders, "w", after, timeout=30)
            assert handled[after] == 100

    run(work(), 90)


def setting(url: str, value: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = {value}'.encode())


@pytest.mark.parametrize(
    ("value", "wanted"), [("off", "local"), ("local", "local"), ("on", "on"), ("remote_apply",) * 2]
)
def test_a_fact_s_transaction_is_durable(
    postgres_url: str, redis_url: str, bus_name: str, value: str, wanted: str
) -> None:
    found = Deployment(redis_url, bus_name, postgres_url)
    setting(postgres_url, value)

    async def work() -> None:
        await found.init()
        async with found.bus(writer="w") as writer:
            async with writer.write(orders) as fact:
                assert await fact.execute("SHOW synchronous_commit") == [(wanted,)]
            async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
                await connection.execute("SELECT 1")
                async with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(1, "paid"))
                assert await shown(connection) == wanted
                await connection.commit()
                assert await shown(connection) == value  # the caller's own transactions are the caller's
        with opened_store(postgres_url) as store:
            claim = store.claim("t", ["orders"], timeout=10.0)
            with psycopg.connect(postgres_url) as blocking:
                for joined in (False, True):
                    if joined:
                        blocking.execute("SELECT 1")
                    transaction = store.transaction(claim, blocking)
                    transaction.begin()
                    assert transaction.execute("SHOW synchronous_commit") == [(wanted,)]
                    transaction.rollback()
                    blocking.rollback()

    run(work())


def test_a_reload_of_the_configuration_inside_a_fact_leaves_it_durable(redis_url: str, bus_name: str) -> None:
    """A server takes in a reload between two statements of an open transaction."""

    async def work() -> None:
        with start_postgres(config={"fsync": "off"}) as server:
            bus = Deployment(redis_url, bus_name, await create(server, "reloaded")).bus
            async with bus(writer="w") as writer, writer.write(orders) as fact:
                fact.add(Order(1, "paid"))
                await fact.begin()
                with psycopg.connect(server.url, autocommit=True) as operator:
                    operator.execute("ALTER SYSTEM SET synchronous_commit = off")
                    operator.execute("ALTER SYSTEM SET work_mem = '5MB'")
                    operator.execute("SELECT pg_reload_conf()")
                while await fact.execute("SHOW work_mem") != [("5MB",)]:
                    pass
                assert await fact.execute("SHOW synchronous_commit") == [("on",)]

    run(work(), 90)


def test_an_id_that_no_row_holds_is_on_disk_when_it_is_given(careless: PostgresServer) -> None:
    """The sequence wrote it to the log ahead, in a transaction of others that is still open."""
    with psycopg.connect(careless.url, autocommit=True) as operator:
        operator.execute("CREATE DATABASE ahead")
        url = careless.database_url("ahead")
        with opened_store(url, Registry(STREAMS)) as store, psycopg.connect(url) as other:
            (sequence,) = other.execute(
                "SELECT sequencename FROM pg_sequences WHERE sequencename LIKE '%orders'"
            ).fetchone() or ("",)
            other.execute("SELECT nextval(%s)", (sequence,))
            (ahead,) = operator.execute("SELECT pg_current_wal_insert_lsn()").fetchone() or ("",)
            assert store.reserve("orders", 1) == [2]
            assert operator.execute("SELECT pg_current_wal_flush_lsn() >= %s", (ahead,)).fetchone() == (True,)


async def shown(connection: psycopg.AsyncConnection[Any]) -> str:
    row = await (await connection.execute("SHOW synchronous_commit")).fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize("level", ["OFF", "NORMAL"])
def test_a_caller_s_sqlite_connection_is_made_durable(deployment: Deployment, level: str) -> None:  # noqa: F811
    path = deployment.store.removeprefix("sqlite:///")

    async def work() -> None:
        async with deployment.bus(writer="w") as writer:
            connection = sqlite3.connect(path, isolation_level=None)
            connection.execute(f"PRAGMA synchronous = {level}")
            async with writer.write(orders, connection=connection) as fact:
                fact.add(Order(1, "paid"))
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
            connection.close()

    run(work())


@pytest.mark.parametrize("level", ["OFF", "NORMAL"])
def test_a_caller_s_transaction_on_sqlite_that_may_be_lost_is_refused(deployment: Deployment, level: str) -> None:  # noqa: F811
    path = Path(deployment.store.removeprefix("sqlite:///"))
    with opened_store(deployment.store) as store:
        claim = store.claim("w", ["orders"], timeout=10.0)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute(f"PRAGMA synchronous = {level}")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigError, match="PRAGMA synchronous = FULL"):
            store.transaction(claim, connection)
        connection.execute("ROLLBACK")
        store.transaction(claim, connection)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        connection.close()
