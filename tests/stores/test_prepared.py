"""Statements that the server keeps the plan of: which they are, and what becomes of facts when it has lost them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.errors import ConfigError, Unavailable
from busrep.stores import open_store
from busrep.stores.plans import NoSuchTable, run_sync
from busrep.stores.postgres.prepared import MOST, Prepared
from busrep.streams import Registry
from busrep.testing import FaultyLink
from tests.shop import QUICK, STREAMS, Order, opened_store, orders

PREPARED = "SELECT statement, generic_plans + custom_plans FROM pg_prepared_statements ORDER BY prepare_time"
NEXT_ID = "SELECT nextval"
SESSION = "SELECT pg_backend_pid()"
PROCESS = 7


def prepared_by(prepared: Prepared, answers: Callable[[str], list[Any]] | None = None) -> list[str]:
    """Do what is due as a server does whose process is the one that the driver was told; the statements that it got."""
    got: list[str] = []

    def execute(steps: Sequence[Any]) -> list[Any]:
        got.extend(step.text for step in steps)
        return [(answers or answer)(step.text) for step in steps]

    run_sync(prepared.prepare(), execute)
    return got


def made() -> Prepared:
    prepared = Prepared(PROCESS)
    prepared.tag = "t"
    return prepared


def answer(text: str) -> list[Any]:
    return [(PROCESS,)] if text == SESSION else []


def use(prepared: Prepared, *texts: str) -> list[str | None]:
    return [prepared.call(text) for text in texts]


def test_a_statement_is_prepared_when_it_came_twice() -> None:
    prepared = made()
    text = "INSERT INTO t VALUES (?, ?)"

    assert use(prepared, text) == [None]
    assert not prepared.due
    assert use(prepared, text, "SELECT 1") == [None, None]
    assert prepared.due
    assert prepared_by(prepared) == [SESSION, "PREPARE busrep_t_1 AS INSERT INTO t VALUES ($1, $2)"]
    assert not prepared.due
    assert use(prepared, text, "SELECT 1") == ["EXECUTE busrep_t_1(%s, %s)", None]
    assert prepared_by(prepared) == ["PREPARE busrep_t_2 AS SELECT 1"]
    assert use(prepared, "SELECT 1") == ["EXECUTE busrep_t_2"]


def test_what_the_server_refused_to_prepare_is_executed_as_it_is_and_its_name_is_not_used_again() -> None:
    prepared = made()
    use(prepared, "SELECT ?", "SELECT ?")

    def refuse(text: str) -> list[Any]:
        if text.startswith("PREPARE"):
            raise NoSuchTable(ValueError("no such table"))
        return answer(text)

    prepared_by(prepared, refuse)
    assert use(prepared, "SELECT ?", "SELECT ?") == [None, None]
    assert prepared_by(prepared) == ["PREPARE busrep_t_2 AS SELECT $1"]


def test_in_a_pooler_s_session_nothing_is_prepared() -> None:
    prepared = made()
    use(prepared, "SELECT ?", "SELECT ?")

    assert prepared_by(prepared, lambda _: [(PROCESS + 1,)]) == [SESSION]
    assert use(prepared, *["SELECT ?"] * 3) == [None] * 3
    assert not prepared.due


def test_the_server_holds_so_many_and_no_more() -> None:
    """Not the newest ones in place of others: in turn all would be prepared anew each time."""
    prepared = made()
    texts = [f"SELECT {number}" for number in range(MOST + 1)]
    use(prepared, *texts[:-1], *texts[:-1])
    assert len(prepared_by(prepared)) == 1 + MOST

    assert use(prepared, *[texts[-1]] * 3) == [None] * 3
    assert not prepared.due
    assert all(use(prepared, *texts[:-1]))


def test_nobody_else_has_these_names() -> None:
    """In a session that two clients have in turn, with the server's own process shown to both."""
    assert Prepared(PROCESS).tag != Prepared(PROCESS).tag


def test_what_comes_once_is_not_remembered_for_ever() -> None:
    prepared = made()
    use(prepared, *[f"SELECT {number}" for number in range(MOST)], "SELECT new", "SELECT 0")

    assert not prepared.due


# -- on a server ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asked(url: str) -> AsyncIterator[tuple[Callable[[str], Awaitable[list[Any]]], Callable[[], Awaitable[int]]]]:
    """(what runs SQL on the one connection for questions, what takes an ID there)."""
    store: Any = open_store(url, Registry(STREAMS), settings=attrs.evolve(QUICK, fetches=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("busrep.stores.postgres.store.QUESTIONS", 0)
        await store.open()
    try:

        async def run(sql: str) -> list[Any]:
            async with store.questions.connection() as connection:
                cursor = await connection.execute(sql)
                return await cursor.fetchall() if cursor.description else []

        async def reserve() -> int:
            (one,) = await store.reserve("orders", 1)
            return int(one)

        yield run, reserve
    finally:
        await store.close()


def texts(found: list[Any]) -> list[str]:
    return [statement.split(" AS ", 1)[1] for statement, _ in found]


@pytest.mark.servers
def test_a_question_is_planned_once(postgres_url: str) -> None:
    async def main() -> None:
        async with asked(postgres_url) as (run, reserve):
            for _ in range(3):
                await reserve()
            before = await run(PREPARED)
            ids = [await reserve() for _ in range(3)]
            after = await run(PREPARED)
            assert ids == [4, 5, 6]
            assert [text for text in texts(before) if text.startswith(NEXT_ID)] == texts(before) == texts(after)
            assert after[0][1] == before[0][1] + 3

    with opened_store(postgres_url):
        asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.servers
def test_what_is_appended_is_planned_once_and_nothing_is_prepared_where_the_application_runs_statements(
    redis_url: str, bus_name: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrep.stores.postgres.blocking.QUESTIONS", 0)  # one connection
    settings = attrs.evolve(QUICK, fetches=1)
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": postgres_url, "settings": settings}
    with opened_store(postgres_url), busrep.sync.connect(redis_url, writer="w1", **options) as bus:
        for number in range(5):
            bus.publish(orders, [Order(number, "new")])
            with bus.write(orders) as fact:
                fact.add(Order(number, "new"))
                assert fact.execute("SELECT count(*) FROM pg_prepared_statements") == [(0,)]
        store: Any = bus.store.wrapped
        connection = store.questions.take()
        try:
            found = connection.execute(PREPARED).fetchall()
        finally:
            store.questions.put(connection)
    assert {"INSERT IN", "SELECT CA", "SELECT pg"} <= {text[:9] for text in texts(found)}


@pytest.mark.servers
@pytest.mark.parametrize(
    ("threshold", "cursors"), [(5, psycopg.Cursor), (None, psycopg.Cursor), (5, psycopg.ClientCursor)]
)
def test_on_the_caller_s_connection_the_driver_prepares_as_it_is_set_up(
    redis_url: str, bus_name: str, postgres_url: str, threshold: int | None, cursors: type[psycopg.Cursor[Any]]
) -> None:
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": postgres_url, "settings": QUICK}
    with (
        opened_store(postgres_url),
        psycopg.connect(postgres_url, prepare_threshold=threshold, cursor_factory=cursors) as connection,
        busrep.sync.connect(redis_url, writer="w1", **options) as bus,
    ):
        for number in range(7):
            with connection.transaction(), bus.write(orders, connection=connection) as fact:
                fact.add(Order(number, "new"))
        found = texts(connection.execute(PREPARED.replace("statement", "'PREPARE AS ' || statement", 1)).fetchall())
        written = connection.execute("SELECT count(*) FROM busrep_facts").fetchone()
    assert written == (7,)
    assert {text.split()[0] for text in found} == ({"INSERT"} if cursors is psycopg.Cursor and threshold else set())


@pytest.mark.servers
def test_rows_without_columns_are_rows(redis_url: str, bus_name: str, postgres_url: str) -> None:
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": postgres_url, "settings": QUICK}
    with (
        opened_store(postgres_url),
        busrep.sync.connect(redis_url, writer="w1", **options) as bus,
        bus.write(orders) as fact,
    ):
        assert fact.execute("SELECT FROM (VALUES (1), (2)) AS t") == [(), ()]
        assert fact.execute("SET LOCAL work_mem = '1MB'") == []


@pytest.mark.servers
@pytest.mark.parametrize("done", ["DEALLOCATE ALL", "DISCARD ALL"])
def test_a_session_that_somebody_else_uses_costs_one_question(postgres_url: str, done: str) -> None:
    """As a pooler does that shows the server's own process: nothing was executed, and nothing is prepared again."""

    async def main() -> None:
        async with asked(postgres_url) as (run, reserve):
            for _ in range(3):
                await reserve()
            await run(done)
            with pytest.raises(Unavailable, match="does not exist"):
                await reserve()
            assert [await reserve() for _ in range(3)] == [4, 5, 6]
            assert await run(PREPARED) == []

    with opened_store(postgres_url):
        asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.servers
def test_without_an_answer_to_prepare_nothing_is_in_doubt(
    redis_url: str, bus_name: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fact that was to be appended next was not sent."""
    monkeypatch.setattr("busrep.stores.postgres.store.QUESTIONS", 0)  # one connection
    settings = attrs.evolve(QUICK, fetch_timeout=2.0, heartbeat=600.0, fetches=1)
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "settings": settings}

    async def main() -> None:
        async with (
            FaultyLink(postgres_url) as link,
            busrep.connect(redis_url, writer="w1", store=link.url, **options) as bus,
        ):
            for number in range(2):
                await bus.publish(orders, [Order(number, "new")])
            link.black_hole("from_server")
            with pytest.raises(Unavailable, match="no answer"):
                await bus.publish(orders, [Order(2, "new")])
            assert bus.statistics()["writer"]["in_doubt"] == 0
            link.abandon("server")
            link.heal()

    with opened_store(postgres_url):
        asyncio.run(asyncio.wait_for(main(), 60))
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT count(*) FROM busrep_facts").fetchone() == (2,)


@pytest.mark.servers
def test_a_statement_that_cannot_be_prepared_is_refused_as_it_always_was(postgres_url: str) -> None:
    async def main() -> None:
        async with asked(postgres_url) as (run, reserve):
            await reserve()
            await run("ALTER SEQUENCE busrep_seq_orders RENAME TO elsewhere")
            for _ in range(3):
                with pytest.raises(ConfigError, match="no sequence"):
                    await reserve()
            await run("ALTER SEQUENCE elsewhere RENAME TO busrep_seq_orders")
            assert [await reserve() for _ in range(3)] == [2, 3, 4]

    with opened_store(postgres_url):
        asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.servers
def test_a_table_that_changes_is_planned_anew(postgres_url: str) -> None:
    """What the server has planned is of the tables as they were: a sequence that is dropped and made again is found."""

    async def main() -> None:
        async with asked(postgres_url) as (_run, reserve):
            for _ in range(8):  # more than five: the server keeps a plan for any parameters then
                await reserve()
            with psycopg.connect(postgres_url, autocommit=True) as operator:
                operator.execute("DROP SEQUENCE busrep_seq_orders")
                operator.execute("CREATE SEQUENCE busrep_seq_orders START 100")
            assert [await reserve() for _ in range(2)] == [100, 101]

    with opened_store(postgres_url):
        asyncio.run(asyncio.wait_for(main(), 60))
