"""Behind PgBouncer with ``pool_mode = transaction``: each transaction may be in another session of the server's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.errors import ConfigError
from busrep.stores import open_store
from busrep.streams import Registry
from tests.asyncio.test_bus import until
from tests.shop import QUICK, STREAMS, Order, opened_store, orders, payments
from tests.support.bouncer import PROGRAM, start_bouncer

pytestmark = pytest.mark.servers

behind_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer; BUSREP_PGBOUNCER may name one")

ROUNDS, TASKS = 15, 8


@contextlib.contextmanager
def bouncer_of(url: str) -> Iterator[str]:
    with opened_store(url), start_bouncer(url) as bouncer:
        yield bouncer.url


async def write(bus: busrep.Bus, number: int) -> None:
    """Each second one with a statement of the application's."""
    async with bus.write(orders if number % 3 else payments) as fact:
        fact.add(Order(number, "new"))
        if number % 2:
            assert await fact.execute("SELECT %s::int", (number,)) == [(number,)]


@behind_pgbouncer
def test_every_fact_is_written_and_read(redis_url: str, bus_name: str, postgres_url: str) -> None:
    """Two writers on an event loop and one in threads, and three sessions for all of them."""

    async def main(url: str) -> None:
        options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": url, "settings": QUICK}
        handled: list[int] = []
        async with (
            busrep.connect(redis_url, start="earliest", **options) as reader,
            busrep.connect(redis_url, writer="w1", **options) as w1,
            busrep.connect(redis_url, writer="w2", **options) as w2,
        ):
            for stream in (orders, payments):
                reader.subscribe(stream)(lambda batch: handled.extend(row.number for row in batch.rows))
            threads = asyncio.create_task(asyncio.to_thread(write_in_threads, redis_url, options))
            count = 0
            for _ in range(ROUNDS):
                async with asyncio.TaskGroup() as group:
                    for bus in (w1, w2):
                        for _ in range(TASKS):
                            group.create_task(write(bus, count))
                            count += 1
            await threads
            await until(lambda: len(handled) >= count + ROUNDS * TASKS, 60)
            assert sorted(handled) == sorted([*range(count), *range(10_000, 10_000 + ROUNDS * TASKS)])

    with bouncer_of(postgres_url) as url:
        asyncio.run(asyncio.wait_for(main(url), 120))


def write_in_threads(redis_url: str, options: dict[str, Any]) -> None:
    with busrep.sync.connect(redis_url, writer="w3", **options) as bus:

        def work(number: int) -> None:
            for at in range(number, number + ROUNDS):
                with bus.write(orders) as fact:
                    fact.add(Order(at, "threads"))
                    if at % 2:
                        assert fact.execute("SELECT %s::int", (at,)) == [(at,)]

        workers = [threading.Thread(target=work, args=(10_000 + at * ROUNDS,)) for at in range(TASKS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


async def snapshot_is_refused(url: str) -> None:
    store = open_store(url, Registry(STREAMS))
    await store.open()
    try:
        with pytest.raises(ConfigError, match="name the server itself"):
            await store.agree("orders", part_rows=100)
    finally:
        await store.close()


@behind_pgbouncer
def test_a_snapshot_is_refused(postgres_url: str) -> None:
    """It holds a lock of its session's, and sets its time limits: the next client would have both."""

    with bouncer_of(postgres_url) as url:
        asyncio.run(snapshot_is_refused(url))
        with psycopg.connect(postgres_url) as direct:
            held = direct.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
            assert held == (0,)


def test_a_snapshot_is_refused_where_the_session_is_another(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler tells its client of a process that is none of the server's."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)

    with opened_store(postgres_url):
        asyncio.run(snapshot_is_refused(postgres_url))


@pytest.mark.parametrize("kind", ["asyncio", "threads"])
def test_a_session_is_left_as_it_was_found(
    redis_url: str, bus_name: str, postgres_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement is prepared in a pooler's session, however often it is asked."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 1)
    calm = attrs.evolve(QUICK, heartbeat=600.0)
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": postgres_url, "settings": calm}
    prepared = "SELECT count(*) FROM pg_prepared_statements"

    async def main() -> None:
        async with busrep.connect(redis_url, writer="w1", **options) as bus:
            for number in range(10):
                async with bus.write(orders) as fact:
                    fact.add(Order(number, "new"))
                    assert await fact.execute(prepared) == [(0,)]
                await bus.publish(orders, [Order(number, "new")])
            store: Any = bus.store
            async with store.questions.connection() as connection:
                assert await (await connection.execute(prepared)).fetchone() == (0,)

    with opened_store(postgres_url):
        if kind == "asyncio":
            asyncio.run(asyncio.wait_for(main(), 60))
            return
        with busrep.sync.connect(redis_url, writer="w1", **options) as threads:
            for number in range(10):
                with threads.write(orders) as fact:
                    fact.add(Order(number, "new"))
                    assert fact.execute(prepared) == [(0,)]
                threads.publish(orders, [Order(number, "new")])
            store: Any = threads.store.wrapped
            connection = store.questions.take()
            try:
                assert connection.execute(prepared).fetchone() == (0,)
            finally:
                store.questions.put(connection)
