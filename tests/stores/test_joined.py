"""Facts in the caller's transaction on PostgreSQL: what they ask of the server, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import busrep
import busrep.stores.postgres.steps as postgres_steps
import busrep.sync
from busrep.errors import ConfigError, WriterFenced
from busrep.stores import open_store
from busrep.stores.blocking import BlockingStore
from busrep.stores.postgres.dialect import PostgresDialect
from busrep.stores.server import ServerStore
from busrep.streams import Registry, Stream, Table
from tests.shop import Order, opened_store, orders
from tests.stores.store_conformance import sync

pytestmark = pytest.mark.servers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connection of each question, in order."""
    found: list[Any] = []
    execute: Callable[..., Any] = postgres_steps.execute_steps

    async def counted(connection: Any, steps: Any) -> Any:
        if steps:
            found.append(connection)
        return await execute(connection, steps)

    monkeypatch.setattr(postgres_steps, "execute_steps", counted)
    return found


@sync
async def test_a_joined_fact_costs_its_caller_two_round_trips(
    postgres_url: str, redis_url: str, bus_name: str, asked: list[Any]
) -> None:
    """One has the claim and the ID, one the row; what became of it is asked on another connection."""
    with opened_store(postgres_url):
        pass
    async with busrep.connect(redis_url, name=bus_name, streams=[orders], store=postgres_url, writer="w1") as bus:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            for number in range(3):
                await connection.execute("SELECT 1")
                asked.clear()
                async with bus.write(orders, connection=connection) as fact:
                    fact.add(Order(number, "new"))
                assert [one for one in asked if one is connection] == [connection] * 2
                await connection.commit()
        await bus.settle()
        async with asyncio.timeout(60):
            while bus.positions()["orders"]["w1"] != fact.id:
                await asyncio.sleep(0.001)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The transactions that were asked after, as often as they were."""
    found: list[object] = []
    outcome: Callable[..., Any] = ServerStore.outcome

    async def counted(store: ServerStore, claim: Any, marker: object, *args: Any) -> Any:
        found.append(marker)
        return await outcome(store, claim, marker, *args)

    monkeypatch.setattr(ServerStore, "outcome", counted)
    return found


PACE = 0.2  # seconds: longer than a fact takes


@sync
async def test_9_1_facts_in_doubt_are_asked_after_at_a_pace(
    postgres_url: str, redis_url: str, bus_name: str, outcomes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each of them, for the transaction that they are part of goes on."""
    monkeypatch.setattr("busrep.asyncio.writing.SETTLE_FIRST", PACE)
    with opened_store(postgres_url):
        pass
    async with (
        busrep.connect(redis_url, name=bus_name, streams=[orders], store=postgres_url, writer="w1") as bus,
        await psycopg.AsyncConnection.connect(postgres_url) as connection,
    ):
        await connection.execute("SELECT 1")
        began = time.monotonic()
        for number in range(20):
            async with bus.write(orders, connection=connection) as fact:
                fact.add(Order(number, "new"))
        assert len(outcomes) <= (time.monotonic() - began) / PACE
        await connection.commit()
        async with asyncio.timeout(60):
            while bus.positions()["orders"]["w1"] != fact.id:
                await asyncio.sleep(0.001)


def test_9_1_threads_ask_after_facts_in_doubt_at_a_pace(
    postgres_url: str, redis_url: str, bus_name: str, outcomes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrep.sync.writing.SETTLE_FIRST", PACE)
    with (
        opened_store(postgres_url),
        busrep.sync.connect(redis_url, name=bus_name, streams=[orders], store=postgres_url, writer="w1") as bus,
        psycopg.connect(postgres_url) as connection,
    ):
        connection.execute("SELECT 1")
        began = time.monotonic()
        for number in range(20):
            with bus.write(orders, connection=connection) as fact:
                fact.add(Order(number, "new"))
        assert len(outcomes) <= (time.monotonic() - began) / PACE
        outcomes.clear()
        bus.settle()
        assert len(outcomes) <= 2  # one for all of a transaction, and perhaps the thread's
        connection.commit()
        until = time.monotonic() + 60
        while bus.positions()["orders"]["w1"] != fact.id:
            assert time.monotonic() < until
            time.sleep(0.001)


def test_the_claim_s_statement_gives_the_ids(postgres_url: str) -> None:
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders", "payments"], timeout=5)
        connection.execute("SELECT 1")
        transaction = store.transaction(claim, connection)
        assert (transaction.joined, transaction.reserves, transaction.exclusive) == (True, True, False)
        assert transaction.begin({"orders": 1, "payments": 3}) == {"orders": [1], "payments": [1, 2, 3]}
        assert transaction.marker is not None
        assert store.reserve("orders", 1) == [2]
        connection.rollback()
        assert store.reserve("payments", 1) == [4]


def test_a_writer_that_is_fenced_is_given_none(postgres_url: str) -> None:
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders"], timeout=5)
        store.finish("w1", claim.incarnation, timeout=5)
        connection.execute("SELECT 1")
        with pytest.raises(WriterFenced):
            store.transaction(claim, connection).begin({"orders": 1})
        assert connection.execute("SELECT 1").fetchone() == (1,), "the caller's transaction goes on"


def written(store: BlockingStore, claim: Any, url: str, id: int) -> None:
    """A row under an ID, as of whoever was given it again."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1")
        transaction = store.transaction(claim, connection)
        transaction.begin()
        transaction.insert("orders", [(id, [[2]], [b"[2]"])])
        transaction.commit()


def test_9_22_of_a_transaction_that_was_rolled_back_no_row_is_its_own(postgres_url: str) -> None:
    """The server crashed, and gave its ID again."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders"], timeout=5)
        connection.execute("SELECT 1")
        transaction = store.transaction(claim, connection)
        (id,) = transaction.begin({"orders": 1})["orders"]
        connection.rollback()
        written(store, claim, postgres_url, id)
        assert store.outcome(claim, transaction.marker, [("orders", id)]) == {}
        assert store.outcome(claim, None, [("orders", id)]) == {("orders", id): [b"[2]"]}


OWN = Stream("own", Order, table=Table("shop_orders", id="fact_id", writer="by_writer", index="n"))
INTO_CHILD = "INSERT INTO shop_child SELECT NEW.*"
REDIRECTED = {
    "by a trigger": (
        f"CREATE FUNCTION redirect() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {INTO_CHILD}; RETURN NULL; END $$; "
        "CREATE TRIGGER redirect BEFORE INSERT ON shop_orders FOR EACH ROW EXECUTE FUNCTION redirect()"
    ),
    "by a rule": f"CREATE RULE redirect AS ON INSERT TO shop_orders DO INSTEAD {INTO_CHILD}",
}


@pytest.mark.parametrize("how", REDIRECTED)
def test_rows_of_a_table_that_puts_them_elsewhere_are_written_once(postgres_url: str, how: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute("CREATE TABLE shop_orders (fact_id bigint, by_writer text, n int, number int, status text)")
        owner.execute("CREATE TABLE shop_child () INHERITS (shop_orders)")
        owner.execute(REDIRECTED[how].encode())
    with opened_store(postgres_url, Registry([OWN])) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["own"], timeout=5)
        connection.execute("SELECT 1")
        transaction = store.transaction(claim, connection)
        (id,) = transaction.begin({"own": 1})["own"]
        transaction.insert("own", [(id, [Order(1, "new")], [b'[1,"new"]'])])
        transaction.commit()
        connection.commit()
        assert store.outcome(claim, transaction.marker, [("own", id)]) == {("own", id): [b'[1,"new"]']}


def test_a_trigger_of_busrep_s_own_table_that_drops_rows_is_told(postgres_url: str) -> None:
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders"], timeout=5)
        connection.execute(
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
            "CREATE TRIGGER nothing BEFORE INSERT ON busrep_facts FOR EACH ROW EXECUTE FUNCTION nothing()"
        )
        transaction = store.transaction(claim, connection)
        (id,) = transaction.begin({"orders": 1})["orders"]
        transaction.insert("orders", [(id, [Order(1, "new")], [b'[1,"new"]'])])
        with pytest.raises(ConfigError, match="has a trigger"):
            transaction.commit()


def test_a_trigger_that_drops_the_rows_of_one_stream_is_told(postgres_url: str) -> None:
    notes = Stream("notes", Order)
    with opened_store(postgres_url, Registry([orders, notes])) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders", "notes"], timeout=5)
        connection.execute(
            "CREATE FUNCTION only_orders() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RETURN CASE WHEN NEW.stream = 'orders' THEN NEW END; END $$; "
            "CREATE TRIGGER only_orders BEFORE INSERT ON busrep_facts FOR EACH ROW EXECUTE FUNCTION only_orders()"
        )
        transaction = store.transaction(claim, connection)
        ids = transaction.begin({"orders": 1, "notes": 1})
        for stream, (id,) in ids.items():
            transaction.insert(stream, [(id, [Order(1, "new")], [b'[1,"new"]'])])
        with pytest.raises(ConfigError, match="has a trigger"):
            transaction.commit()


@sync
async def test_9_5_a_name_that_was_finished_is_won_back_for_a_joined_fact(
    postgres_url: str, redis_url: str, bus_name: str
) -> None:
    """The caller's transaction must not hold the name meanwhile: its owner waits for what would wait for it."""
    with opened_store(postgres_url) as store:
        async with (
            asyncio.timeout(60),
            busrep.connect(redis_url, name=bus_name, streams=[orders], store=postgres_url, writer="w1") as bus,
            await psycopg.AsyncConnection.connect(postgres_url) as connection,
        ):
            assert bus.writing is not None
            store.finish("w1", bus.writing.incarnation, timeout=30)
            await connection.execute("SELECT 1")
            async with bus.write(orders, connection=connection) as fact:
                fact.add(Order(1, "new"))
            await connection.commit()
            await bus.settle()
            while bus.positions()["orders"]["w1"] != fact.id:  # until Redis has taken it
                await asyncio.sleep(0.01)


@sync
async def test_9_4_a_note_without_its_lock_lets_nothing_in(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fact finds that its name is being finished; the next one, with a new claim, has its lock taken back."""
    with opened_store(postgres_url):
        pass
    async with contextlib.AsyncExitStack() as stack:
        store, other = [open_store(postgres_url, Registry([orders])) for _ in range(2)]
        for one in (store, other):
            await one.open()
            stack.push_async_callback(one.close)
        old = await store.claim("w1", ["orders"], timeout=30)
        finisher, caller = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(postgres_url)) for _ in range(2)
        ]
        (take,) = PostgresDialect().take_name("w1")
        await finisher.execute(take.text.replace("?", "%s").encode(), take.params)
        await finisher.execute(
            "UPDATE busrep_writers SET incarnation = incarnation + 1, finished = incarnation WHERE writer = 'w1'"
        )
        execute: Callable[..., Any] = postgres_steps.execute_steps

        async def hooked(connection: Any, steps: Any) -> Any:
            if connection is caller and any("FOR SHARE" in getattr(step, "text", "") for step in steps):
                await finisher.commit()
            return await execute(connection, steps)

        await caller.execute("SELECT 1")
        with monkeypatch.context() as patched:
            patched.setattr(postgres_steps, "execute_steps", hooked)
            with pytest.raises(WriterFenced):
                await store.transaction(old, caller).begin({"orders": 1})
        new = await store.claim("w1", ["orders"], timeout=30, again=old.incarnation)
        await caller.execute("SAVEPOINT s")
        transaction = store.transaction(new, caller)
        ((id,),) = (await transaction.begin({"orders": 1})).values()
        await caller.execute("ROLLBACK TO s")
        await other.finish("w1", new.incarnation, timeout=30)
        await transaction.insert("orders", [(id, [Order(1, "new")], [b'[1,"new"]'])])
        with pytest.raises(WriterFenced):
            await transaction.commit()


def test_9_22_what_the_caller_sets_does_not_take_the_disk_from_a_fact(postgres_url: str) -> None:
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url) as connection:
        claim = store.claim("w1", ["orders"], timeout=5)
        connection.execute("SELECT 1")
        transaction = store.transaction(claim, connection)
        (id,) = transaction.begin({"orders": 1})["orders"]
        connection.execute("SET LOCAL synchronous_commit = off")
        transaction.insert("orders", [(id, [Order(1, "new")], [b'[1,"new"]'])])
        transaction.commit()
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("local",)
