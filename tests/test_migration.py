"""The schema is versioned: the next version's statements run once, on a database that keeps its rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import busrep
from busrep.errors import SchemaError
from busrep.stores import open_store, schema
from busrep.stores.plans import Sql
from busrep.stores.postgres_dialect import PostgresDialect
from busrep.stores.sqlite_dialect import SqliteDialect
from busrep.streams import Registry

orders = busrep.Stream("orders")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busrep whose schema is one further: dead letters got a column."""
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    for dialect in (SqliteDialect, PostgresDialect):
        old = dialect.ddl

        def ddl(self: Any, version: int, old: Any = old) -> Any:
            if version == schema.VERSION:
                return [Sql("ALTER TABLE busrep_dead_letters ADD COLUMN seen INTEGER")]
            return old(self, version)

        monkeypatch.setattr(dialect, "ddl", ddl)


@pytest.mark.servers
def test_a_newer_busrep_migrates_and_an_older_one_refuses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def store() -> Any:
        return open_store(url, Registry([orders]))

    async def before() -> str:
        first = store()
        await first.init()
        await first.open()
        claim = await first.claim("w1", ["orders"], timeout=5)
        transaction = first.transaction(claim)
        (id,) = await first.reserve("orders", 1)
        await transaction.begin()
        await transaction.insert("orders", [(id, [["kept"]], [b'["kept"]'])])
        await transaction.commit()
        epoch: str = await first.epoch()
        await first.close()
        return epoch

    async def after(epoch: str) -> None:
        second = store()
        with pytest.raises(SchemaError, match="busrep db init"):
            await second.open()
        # Two processes of a deployment may do it at the same moment; the statements run once all the same.
        await asyncio.gather(second.init(), store().init())
        await second.open()
        page = await second.fetch(busrep.updates.FetchUpdates("orders", "w1", 0, 1))
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

    epoch = asyncio.run(before())
    with monkeypatch.context() as patched:
        next_version(patched)
        asyncio.run(after(epoch))
    asyncio.run(older())
