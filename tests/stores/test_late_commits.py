"""Rule 9.22: a COMMIT that takes too long is not cancelled.

On a server with a synchronous standby it would be seen without that, with no more than a warning, and a failover would
take back what was announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.errors import CommitUnknown, Unavailable
from busrep.testing.servers import PostgresServer, start_postgres
from tests.asyncio.bus_conformance import until
from tests.shop import QUICK, STREAMS, Order, make_tables, orders
from tests.stores.store_conformance import PATIENCE

pytestmark = pytest.mark.servers

SETTINGS = attrs.evolve(QUICK, fetch_timeout=1.0)


class Primary:
    """A server that waits for a standby that does not come, from `wait` to `release`."""

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.url

    def ask(self, *statements: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = local")
            for sql in statements:
                cursor = connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []

    def wait(self) -> None:
        self.ask("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        until(lambda: self.ask("SHOW synchronous_standby_names") == [("nobody",)])

    def release(self) -> None:
        self.ask("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")

    def facts(self) -> int:
        return int(self.ask("SELECT count(*) FROM busrep_facts")[0][0])

    def waiting(self) -> int:
        return int(self.ask("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")[0][0])


@pytest.fixture
def primary() -> Iterator[Primary]:
    with start_postgres() as server:
        make_tables(server.url)
        yield Primary(server)


@pytest.mark.parametrize("how", ["write", "publish"])
@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_9_22_a_late_commit_waits_for_its_standby(
    primary: Primary, redis_url: str, bus_name: str, runtime: str, how: str
) -> None:
    options: dict[str, Any] = {
        "writer": "w1", "name": bus_name, "streams": STREAMS, "store": primary.url, "settings": SETTINGS,
    }  # fmt: skip

    def looked_at() -> None:
        assert primary.waiting() >= 1
        assert primary.facts() == 1  # the second is not seen before the standby has it
        primary.release()
        until(lambda: primary.facts() == 2)

    def in_threads() -> None:
        with busrep.sync.connect(redis_url, **options) as bus:
            bus.publish(orders, [Order(1, "new")])
            primary.wait()
            with pytest.raises(CommitUnknown):
                if how == "publish":
                    bus.publish(orders, [Order(2, "new")])
                else:
                    with bus.write(orders) as fact:
                        fact.execute("SELECT 1")  # else it is appended, as one that is published
                        fact.add(Order(2, "new"))
            looked_at()

    async def on_loop() -> None:
        async with busrep.connect(redis_url, **options) as bus:
            await bus.publish(orders, [Order(1, "new")])
            await asyncio.to_thread(primary.wait)
            with pytest.raises(CommitUnknown):
                if how == "publish":
                    await bus.publish(orders, [Order(2, "new")])
                else:
                    async with bus.write(orders) as fact:
                        await fact.execute("SELECT 1")
                        fact.add(Order(2, "new"))
            await asyncio.to_thread(looked_at)

    if runtime == "threads":
        in_threads()
    else:
        asyncio.run(asyncio.wait_for(on_loop(), 2 * PATIENCE))


@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_a_fact_behind_a_locked_table_leaves_no_session_that_waits(
    postgres_url: str, redis_url: str, bus_name: str, runtime: str
) -> None:
    """Its COMMIT is not cancelled: the server itself gives the lock up."""
    make_tables(postgres_url)
    options: dict[str, Any] = {
        "writer": "w1", "name": bus_name, "streams": STREAMS, "store": postgres_url, "settings": SETTINGS,
    }  # fmt: skip

    def none_waits(watch: psycopg.Connection[Any]) -> None:
        of_it = "query LIKE '%INSERT INTO busrep_facts%' AND wait_event_type = 'Lock' AND datname = current_database()"
        until(lambda: not watch.execute(f"SELECT pid FROM pg_stat_activity WHERE {of_it}".encode()).fetchall())

    def in_threads(watch: psycopg.Connection[Any]) -> None:
        with busrep.sync.connect(redis_url, **options) as bus, psycopg.connect(postgres_url) as other:
            bus.publish(orders, [Order(1, "new")])
            other.execute("LOCK TABLE busrep_facts IN ACCESS EXCLUSIVE MODE")
            with pytest.raises((Unavailable, CommitUnknown)), bus.write(orders) as fact:
                fact.execute("SELECT 1")
                fact.add(Order(2, "new"))
            none_waits(watch)
            other.rollback()

    async def on_loop(watch: psycopg.Connection[Any]) -> None:
        async with busrep.connect(redis_url, **options) as bus:
            await bus.publish(orders, [Order(1, "new")])
            with psycopg.connect(postgres_url) as other:
                other.execute("LOCK TABLE busrep_facts IN ACCESS EXCLUSIVE MODE")
                with pytest.raises((Unavailable, CommitUnknown)):
                    async with bus.write(orders) as fact:
                        await fact.execute("SELECT 1")
                        fact.add(Order(2, "new"))
                await asyncio.to_thread(none_waits, watch)

    with psycopg.connect(postgres_url, autocommit=True) as watch:
        if runtime == "threads":
            in_threads(watch)
        else:
            asyncio.run(asyncio.wait_for(on_loop(watch), 2 * PATIENCE))
