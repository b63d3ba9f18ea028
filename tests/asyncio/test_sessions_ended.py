"""Sessions that PostgreSQL ends, and errors that no store should let out: a reader goes on after them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import pytest

from busrep.errors import StatementRefused, Unavailable
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.stores.plans import Control, Plan, Sql, complete
from busrep.stores.postgres import store as postgres
from busrep.stores.postgres.blocking import BlockingPostgresStore
from busrep.streams import Registry
from tests.shop import STREAMS, Order, orders

from .test_bus import Deployment, deployment, on_postgres, run, until  # noqa: F401 - fixtures

pytestmark = pytest.mark.servers


def ended_in_between(url: str, setting: str) -> Plan[Any]:
    """A transaction that the server ends between two of its statements."""
    answers = yield (
        Control.BEGIN,
        *([Sql(f"SET LOCAL {setting} = 20")] if setting else []),
        Sql("SELECT pg_backend_pid()"),
    )
    pid = answers[-1][0][0]
    with psycopg.connect(url, autocommit=True) as other:
        if not setting:
            other.execute("SELECT pg_terminate_backend(%s)", (pid,))
        while other.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone():
            time.sleep(0.01)
    yield Sql("SELECT 1")


SETTINGS = ("idle_in_transaction_session_timeout", "transaction_timeout", "")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_session_that_the_server_ended_is_an_outage(on_postgres: Deployment, setting: str) -> None:  # noqa: F811
    skip_unknown(on_postgres.store, setting)

    async def work() -> None:
        store: Any = open_store(on_postgres.store, Registry(STREAMS))
        await store.open()
        try:
            with pytest.raises(Unavailable):
                await store.read(ended_in_between(on_postgres.store, setting))
            assert await store.epoch()
        finally:  # a pool that connects takes no notice when the loop cancels it
            await store.close()

    run(work())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_session_that_the_server_ended_is_an_outage_to_a_thread(
    on_postgres: Deployment,  # noqa: F811
    setting: str,
) -> None:
    skip_unknown(on_postgres.store, setting)
    store = BlockingPostgresStore(on_postgres.store, Registry(STREAMS), Settings())
    complete(store.open())
    with pytest.raises(Unavailable):
        complete(store.read(ended_in_between(on_postgres.store, setting)))
    assert complete(store.epoch())
    complete(store.close())


def test_a_fact_s_begin_has_a_deadline(on_postgres: Deployment) -> None:  # noqa: F811
    """As on a pooled connection at whose other end is nobody: its IDs would be open for ever."""

    async def work() -> None:
        settings = Settings(fetch_timeout=0.2, claim_timeout=0.2)
        store: Any = open_store(on_postgres.store, Registry(STREAMS), settings=settings)
        await store.open()
        claim = await store.claim("w", ["orders"], timeout=5)
        with psycopg.connect(on_postgres.store) as other:
            other.execute("LOCK TABLE busrep_writers")
            with pytest.raises(Unavailable, match="no answer within"):
                async with asyncio.timeout(60):
                    await store.transaction(claim).begin()
        await store.close()

    run(work())


def skip_unknown(url: str, setting: str) -> None:
    with psycopg.connect(url) as connection:
        if setting and not connection.execute("SELECT 1 FROM pg_settings WHERE name = %s", (setting,)).fetchone():
            pytest.skip(f"this PostgreSQL has no {setting}")


def test_any_error_that_closes_the_connection_is_an_outage() -> None:
    from busrep.stores.postgres.steps import translated

    error = psycopg.errors.InternalError("a driver may call it anything")
    assert isinstance(translated(error, closed=True), Unavailable)
    assert isinstance(translated(error), StatementRefused)
    # psycopg counts it as operational; the server refuses it each time.
    assert isinstance(translated(psycopg.errors.ProgramLimitExceeded("index row size")), StatementRefused)


def test_a_reader_begins_again_after_an_unknown_error(deployment: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        seen: list[int] = []
        async with deployment.bus(writer="w") as writer, deployment.bus(reader="r") as reader:
            store: Any = reader.store
            given, failures = store.load_reader, 0
            go_on = asyncio.Event()

            async def failing(*args: Any) -> Any:
                nonlocal failures
                if not go_on.is_set():
                    failures += 1
                    raise RuntimeError("a driver's error of no known kind")
                return await given(*args)

            store.load_reader = failing
            reader.subscribe(orders)(lambda batch: seen.extend(batch.tokens))
            async with writer.write(orders) as fact:
                fact.add(Order(1, "paid"))
            await until(lambda: failures >= 2)
            assert "of no known kind" in reader.statistics()["reader"]["not_begun"]["orders"]
            go_on.set()
            await until(lambda: seen == [1])
            assert reader.statistics()["reader"]["not_begun"] == {}

    run(work())


def test_an_append_takes_no_connection_that_the_server_has_ended(on_postgres: Deployment) -> None:  # noqa: F811
    """COMMIT goes out with it: without an answer nobody would know what became of its facts."""

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            first = await writer.publish(orders, [Order(1, "new")])
            with psycopg.connect(on_postgres.store, autocommit=True) as other:
                other.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE application_name = 'busrep' AND datname = current_database()"
                )
            second = await writer.publish(orders, [Order(2, "new")])
            assert second == [first[-1] + 1]

    run(work())


def test_connections_that_are_dead_on_arrival_are_told_of(
    on_postgres: Deployment,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy takes connections for a server that is away, and closes them."""

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            with monkeypatch.context() as away:
                away.setattr(postgres, "alive", lambda _: False)
                away.setattr(postgres, "POOL_WAIT", 0.0)
                with pytest.raises(Unavailable, match="each new connection was closed"):
                    await writer.publish(orders, [Order(1, "new")])
            assert await writer.publish(orders, [Order(2, "new")])

    run(work())
