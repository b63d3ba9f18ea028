"""The schema is versioned: the next version's statements run once, on a database that keeps its rows."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import psycopg
import pytest

import busrep
from busrep.core.snapshots import Agreement
from busrep.errors import SchemaError
from busrep.spark.staging import StagedBatch
from busrep.spark.staging_store import StagingPlace, StagingStore, open_staging_store
from busrep.stores import open_store, readers, schema
from busrep.stores.plans import Plan, Sql
from busrep.stores.postgres.dialect import PostgresDialect
from busrep.streams import Registry
from tests.stores.store_conformance import sync

orders = busrep.Stream("orders")

# As a process of an older version takes a name.
TAKEN = "UPDATE busrep_writers SET incarnation = incarnation + 1 WHERE writer = 'w1'"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busrep whose schema is one further: dead letters got a column."""
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    versions = {**schema.VERSIONS, schema.VERSION: ("ALTER TABLE busrep_dead_letters ADD COLUMN seen INTEGER",)}
    monkeypatch.setattr(schema, "VERSIONS", versions)


async def _with_facts(store: Any) -> str:
    """A database with a fact of w1 and a reader at 0; its epoch."""
    await store.init()
    await store.open()
    claim = await store.claim("w1", ["orders"], timeout=5)
    transaction = store.transaction(claim)
    (id,) = await store.reserve("orders", 1)
    await transaction.begin()
    await transaction.insert("orders", [(id, [["kept"]], [b'["kept"]'])])
    await transaction.commit()
    await store.heartbeat(claim, {"orders": id})
    await store.write(_registered(store.dialect, claim.epoch))  # also where there are no later tables
    await store.close()
    return str(claim.epoch)


def older(url: str, version: int) -> str:
    """A database of an older version: one of today's, without what later versions added. Its epoch."""
    epoch = asyncio.run(_with_facts(open_store(url, Registry([orders]))))

    def without_later(dialect: Any) -> Plan[None]:
        for later in range(schema.VERSION, version, -1):
            for step in reversed(schema.statements(dialect, later)):
                if made := re.match(r"CREATE (?:UNLOGGED |OR REPLACE )?(TABLE|FUNCTION) (\w+)", step.text):
                    yield Sql(f"DROP {made[1]} {made[2]}")
                elif made := re.match(r"CREATE TRIGGER (\w+) .* ON (\w+)", step.text):
                    yield Sql(f"DROP TRIGGER {made[1]} ON {made[2]}")
                elif added := re.match(r"ALTER TABLE (\w+) ADD COLUMN (\w+)", step.text):
                    yield Sql(f"ALTER TABLE {added[1]} DROP COLUMN {added[2]}")
        yield Sql("UPDATE busrep_meta SET value = ? WHERE key = 'version'", (str(version),))
        yield Sql("DELETE FROM busrep_meta WHERE key NOT IN ('version', 'epoch')")

    async def downgrade() -> None:
        store: Any = open_store(url, Registry([orders]))
        await store.open()
        await store.write(without_later(store.dialect))
        await store.close()

    asyncio.run(downgrade())
    return epoch


def _registered(dialect: Any, epoch: str) -> Plan[None]:
    yield tuple(readers.rows_of(dialect, "r", {("orders", "w1"): 0}, epoch))


@pytest.mark.servers
def test_a_newer_busrep_migrates_and_an_older_one_refuses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def store() -> Any:
        return open_store(url, Registry([orders]))

    async def after(epoch: str) -> None:
        second = store()
        with pytest.raises(SchemaError, match="busrep db init"):
            await second.open()
        # Two processes of a deployment may do it at the same moment; the statements run once all the same.
        await asyncio.gather(second.init(), store().init())
        await second.open()
        page = await second.fetch(busrep.core.catchup.FetchUpdates("orders", "w1", 0, 1))
        assert list(page.payloads) == [b'["kept"]']
        assert page.epoch == epoch
        await second.close()

    async def older() -> None:
        third = store()
        with pytest.raises(SchemaError, match="upgrade busrep"):
            await third.open()
        with pytest.raises(SchemaError, match="upgrade busrep"):
            await third.init()
        await third.close()

    epoch = asyncio.run(_with_facts(store()))
    with monkeypatch.context() as patched:
        next_version(patched)
        asyncio.run(after(epoch))
    asyncio.run(older())


@pytest.mark.servers
def test_version_2_keeps_bootstraps(url: str) -> None:
    """Of a version 1 with facts, a claim and a reader nothing changes, and afterwards bootstraps can be saved."""

    def store() -> Any:
        return open_store(url, Registry([orders]))

    older(url, 1)

    async def after() -> None:
        new = store()
        with pytest.raises(SchemaError, match="busrep db init") as caught:
            await new.open()
        assert (caught.value.found, caught.value.expected) == (1, schema.VERSION)
        await asyncio.gather(new.init(), store().init())
        await new.open()
        page = await new.fetch(busrep.core.catchup.FetchUpdates("orders", "w1", 0, 1))
        assert list(page.payloads) == [b'["kept"]']
        assert (await new.load_reader("r")).positions == {("orders", "w1"): 0}
        assert await new.bootstraps() == []
        await new.begin_bootstrap("r", Agreement("orders", page.epoch, {"w1": 1}, {}, []), syncs=1, reason="new")
        assert (await new.load_reader("r")).positions == {("orders", "w1"): 1}
        assert len(await new.bootstraps()) == 1
        agreement = await new.agree("orders", part_rows=5)
        assert agreement.rows == 1
        await new.close()

    asyncio.run(after())


@pytest.mark.servers
def test_version_3_stages_rows(url: str) -> None:
    """Of a version 2 with facts, a claim and a reader nothing changes, and afterwards a batch can be staged."""

    def store() -> StagingStore:
        return open_staging_store(url, Registry([orders]))

    epoch = older(url, 2)
    new = store()
    with pytest.raises(SchemaError, match="busrep db init") as caught:
        new.open()
    assert (caught.value.found, caught.value.expected) == (2, schema.VERSION)
    new.init()
    store().init()
    new.open()
    try:
        assert (new.epoch(), new.load_reader("r").positions) == (epoch, {("orders", "w1"): 0})
        assert new.status()["sinks"] == {}
        stage = new.stage(StagingPlace("q", 0, 0, "a"))
        stage.add([("", b'["new"]')])
        stage.close()
        assert new.status()["staged"] == 1
        made = new.commit(new.claim("w1", ["orders"], timeout=5), "orders", StagedBatch("q", 0, "c", "run", ["a"], 1))
        assert made == new.done("q")
        page = new.fetch(busrep.core.catchup.FetchUpdates("orders", "w1", 0, made.last))
        assert list(page.payloads) == [b'["kept"]', b'["new"]']
        assert (new.status()["sinks"]["q"]["batch"], new.status()["staged"]) == (0, 0)
    finally:
        new.close()


@pytest.mark.servers
def test_version_4_keeps_fields_and_reasons(url: str) -> None:
    """Of a version 3 with facts and a reader nothing changes; its fields are not known, and its reader did not stop."""
    epoch = older(url, 3)

    async def after() -> None:
        new: Any = open_store(url, Registry([orders]))
        with pytest.raises(SchemaError, match="busrep db init"):
            await new.open()
        await new.init()
        await new.open()
        page = await new.fetch(busrep.core.catchup.FetchUpdates("orders", "w1", 0, 1))
        assert (list(page.payloads), page.epoch) == ([b'["kept"]'], epoch)
        answers = await new.read(_added())
        assert answers == [[(None,)], [(None,)]]
        await new.close()

    asyncio.run(after())


@pytest.mark.servers
@pytest.mark.parametrize("path", ["", "public, pg_catalog"], ids=["plain", "with a hashtext of its own"])
@sync
async def test_9_4_version_5_holds_names_against_processes_of_before(postgres_url: str, path: str) -> None:
    """One that was there before the migration takes a name by an UPDATE of its row, and knows no other lock. It must
    not wait long: it has the row, for which the writer's beats wait, and whoever takes the name as it is done now."""
    await asyncio.to_thread(older, postgres_url, 4)
    async with contextlib.AsyncExitStack() as stack:
        new, reader = [open_store(postgres_url, Registry([orders])) for _ in range(2)]
        await new.init()
        for store in (new, reader):
            await store.open()
            stack.push_async_callback(store.close)
        before = await stack.enter_async_context(await psycopg.AsyncConnection.connect(postgres_url))
        if path:
            await before.execute(
                "CREATE FUNCTION public.hashtext(text) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 7';"
                f"SET search_path = {path}"
            )
        await before.execute("SET statement_timeout = '10s'")
        await before.commit()
        claim = await new.claim("w1", ["orders"], timeout=5)
        transaction = new.transaction(claim)
        (id,) = await new.reserve("orders", 1)
        await transaction.begin()
        finishing = asyncio.create_task(reader.finish("w1", claim.incarnation, timeout=30))
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        while not (await new.read(_one(waits)))[0] and not finishing.done():
            await asyncio.sleep(0.01)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await before.execute(TAKEN)
        await before.rollback()
        await new.heartbeat(claim, claim.starts)
        await transaction.insert("orders", [(id, [["kept"]], [b'["kept"]'])])
        await transaction.commit()
        assert await finishing == {"orders": id}
        await before.execute(TAKEN)


@pytest.mark.servers
def test_tables_that_were_dropped_are_made_anew(postgres_url: str) -> None:
    """A function stays where its table is dropped."""
    asyncio.run(_with_facts(open_store(postgres_url, Registry([orders]))))
    with psycopg.connect(postgres_url) as connection:
        for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'busrep%'").fetchall():
            connection.execute(f"DROP TABLE {name}".encode())
    asyncio.run(_with_facts(open_store(postgres_url, Registry([orders]))))


@pytest.mark.servers
def test_9_4_who_takes_all_names_takes_one_lock(postgres_url: str) -> None:
    """A server has room for so many locks, and a deployment may have had many names."""
    asyncio.run(_with_facts(open_store(postgres_url, Registry([orders]))))
    (take,) = PostgresDialect().take_name(None)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "INSERT INTO busrep_writers (writer, incarnation) SELECT 'w' || n, 1 FROM generate_series(2, 50) n"
        )
        connection.execute(take.text.encode(), take.params)
        connection.execute("UPDATE busrep_writers SET incarnation = incarnation + 1")
        held = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
    assert held == (1,)


def _one(text: str) -> Plan[Any]:
    return (yield (Sql(text),))


def _added() -> Plan[Any]:
    return (yield Sql("SELECT fields FROM busrep_streams"), Sql("SELECT DISTINCT stopped FROM busrep_readers"))
