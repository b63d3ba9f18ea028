"""A fact takes rows inside its block only: what comes later would be accepted and lost, so it is refused."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import psycopg
import pytest
from django.db import transaction
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from busrep.errors import ConfigError
from busrep.integrations.django import write as write_django
from busrep.integrations.sqlalchemy import write as write_session
from tests.asyncio.test_bus import Deployment, deployment, on_postgres, run
from tests.integrations.test_django import shop
from tests.integrations.test_sqlalchemy import driver_url
from tests.shop import Order, make_tables, orders, payments, typing
from tests.sync.test_writing import Deployment as Threads

__all__ = ["deployment", "on_postgres", "shop"]

pytestmark = pytest.mark.servers

STORES = pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
LATE = Order(9, "late")


@pytest.fixture
def threads(request: pytest.FixtureRequest, redis_url: str, bus_name: str, database: str) -> Threads:
    found = Threads(redis_url, bus_name, request.getfixturevalue(database))
    make_tables(found.store)
    return found


def refused(fact: Any) -> None:
    """Rows are refused, with the fact's name; the ID can be read still."""
    for late in (lambda: fact.add(LATE), lambda: fact.add_each([LATE])):
        with pytest.raises(ConfigError, match=rf"fact {fact.id} of stream 'orders'.* has ended.*another fact"):
            late()


def statement_refused(fact: Any) -> None:
    refused(fact)
    with pytest.raises(ConfigError, match=rf"fact {fact.id} of stream 'orders'.* has ended"):
        fact.execute("SELECT 1")


async def statement_refused_async(fact: Any) -> None:
    refused(fact)
    with pytest.raises(ConfigError, match=rf"fact {fact.id} of stream 'orders'.* has ended"):
        await fact.execute("SELECT 1")


@STORES
def test_asyncio(request: pytest.FixtureRequest, redis_url: str, bus_name: str, database: str) -> None:
    async def main() -> None:
        found = await Deployment(redis_url, bus_name, request.getfixturevalue(database)).init()
        async with found.bus(writer="w1") as bus:
            fact = bus.write(orders, payments)
            for early in (lambda: fact.add(LATE), lambda: fact.id, lambda: fact.execute("SELECT 1")):
                with pytest.raises(ConfigError, match="is not open: use 'async with"):
                    result = early()
                    await result  # type: ignore[misc]
            async with fact:
                fact.add(Order(1, "new"))
            await statement_refused_async(fact)
            with pytest.raises(ConfigError, match=f"{fact.ids['payments']} of stream 'payments'"):
                fact.add(LATE, stream=payments)
            with pytest.raises(ConfigError, match="written once"):
                async with fact:
                    pass
            broken = bus.write(orders)
            with pytest.raises(KeyError):
                async with broken:
                    raise KeyError
            await statement_refused_async(broken)

    run(main())


def test_asyncio_while_the_block_ends(on_postgres: Deployment) -> None:
    async def main() -> None:
        await on_postgres.init()
        async with on_postgres.bus(writer="w1") as bus:
            fact = bus.write(orders)
            await fact.__aenter__()
            ending = asyncio.create_task(fact.__aexit__(None, None, None))
            while not ending.done():
                await asyncio.sleep(0)
                if not ending.done():
                    refused(fact)
            await ending

    asyncio.run(on_postgres.init())
    run(main())


def test_asyncio_in_a_joined_transaction(on_postgres: Deployment) -> None:
    async def main() -> None:
        async with (
            on_postgres.bus(writer="w1") as bus,
            await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
        ):
            await connection.execute("SELECT 1")
            async with bus.write(orders, connection=connection) as fact:
                fact.add(Order(1, "new"))
            await statement_refused_async(fact)
            await connection.commit()
            await statement_refused_async(fact)

    run(main())


def test_without_a_table(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as bus:
            async with bus.write(typing) as fact:
                fact.add("one")
            with pytest.raises(ConfigError, match=f"fact {fact.id} of stream 'typing'"):
                fact.add("late")

    run(main())


@STORES
def test_threads(threads: Threads) -> None:
    with threads.bus() as bus:
        fact = bus.write(orders)
        with pytest.raises(ConfigError, match="is not open: use 'with bus"):
            fact.add(LATE)
        with fact:
            fact.add(Order(1, "new"))
        statement_refused(fact)
        with pytest.raises(ConfigError, match="written once"), fact:
            pass
        broken = bus.write(orders)
        with pytest.raises(KeyError), broken:
            raise KeyError
        statement_refused(broken)


@STORES
def test_threads_in_a_joined_transaction(threads: Threads) -> None:
    with threads.bus() as bus:
        connection: Any
        if threads.store.startswith("sqlite"):
            connection = sqlite3.connect(threads.store.removeprefix("sqlite:///"), isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
        else:
            connection = psycopg.connect(threads.store)
            connection.execute("SELECT 1")
        with bus.write(orders, connection=connection) as fact:
            fact.add(Order(1, "new"))
        statement_refused(fact)
        connection.commit()
        statement_refused(fact)
        connection.close()
    assert list(threads.rows()) == [fact.id]


@pytest.mark.parametrize("database", ["postgres_url"])
def test_sqlalchemy_before_and_after_its_commit(threads: Threads) -> None:
    engine = create_engine(driver_url(threads.store))
    with threads.bus() as bus, Session(engine) as session:
        with write_session(bus, session, orders) as fact:
            fact.add(Order(1, "new"))
        statement_refused(fact)
        session.commit()
        statement_refused(fact)
    engine.dispose()


def test_sqlalchemy_async_before_and_after_its_commit(on_postgres: Deployment) -> None:
    async def main() -> None:
        engine = create_async_engine(driver_url(on_postgres.store))
        async with on_postgres.bus(writer="w1") as bus, AsyncSession(engine) as session:
            async with write_session(bus, session, orders) as fact:
                fact.add(Order(1, "new"))
            await statement_refused_async(fact)
            await session.commit()
            await statement_refused_async(fact)
        await engine.dispose()

    run(main())


def test_django_before_and_after_its_commit(shop: Threads) -> None:
    with transaction.atomic():
        with write_django(orders) as fact:
            fact.add(Order(1, "new"))
        statement_refused(fact)
    statement_refused(fact)
