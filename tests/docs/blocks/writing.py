"""docs/guides/writing.md."""

from __future__ import annotations

import asyncio
import io
import sqlite3
import sys
from collections.abc import AsyncGenerator
from typing import Any

import psycopg

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from tests.docs.markdown import Scope, on_postgres

SQLITE = "sqlite:///shop.db"


async def on_sqlite(at: Scope) -> None:
    """The stream of the tutorial in SQLite, a table of the application's, a bus that writes and another that reads."""
    from shop import OrderChanged, orders

    at.busrep, at.OrderChanged, at.orders = busrep, OrderChanged, orders
    await open_store(SQLITE, Registry([orders])).init()
    at.db = sqlite3.connect("shop.db")
    at.stack.callback(at.db.close)
    at.db.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, state TEXT)")
    at.db.execute("INSERT INTO orders VALUES (1, 'new')")
    at.db.commit()
    at.bus = await at.open(streams=[orders], store=SQLITE, writer="web-1")
    at.reading = await at.open(streams=[orders], store=SQLITE, reader="check")
    at.seen = []

    @at.reading.subscribe(orders)
    def see(batch: busrep.Batch) -> None:
        at.seen.extend(batch.facts())


async def fact(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    yield
    await at.reading.wait_for(at.orders, "web-1", at.fact.id)
    assert at.seen == [(at.fact.id, [at.OrderChanged(1, "paid"), at.OrderChanged(1, "to pack")])]
    assert at.db.execute("SELECT state FROM orders").fetchall() == [("paid",)]


async def many(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    yield
    await at.reading.wait_for(at.orders, "web-1", at.ids[-1])
    assert [token for token, _ in at.seen] == at.ids
    assert len(at.ids) == 498


async def own_connection(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    yield
    await at.reading.wait_for(at.orders, "web-1", at.fact.id)
    assert at.db.execute("SELECT state FROM orders").fetchall() == [("sent",)]
    assert not at.db.in_transaction


async def a_database(at: Scope) -> None:
    """The stream of the tutorial and two tables of the application's in PostgreSQL, a writer and a durable reader."""
    from shop import OrderChanged, orders

    url = at.servers.postgres
    at.busrep, at.OrderChanged, at.orders = busrep, OrderChanged, orders
    at.store = open_store(url, Registry([orders]))
    await at.store.init()
    await at.store.open()
    at.stack.push_async_callback(at.store.close)
    at.db = await at.stack.enter_async_context(await psycopg.AsyncConnection.connect(url))
    await at.db.execute("CREATE TABLE orders (number bigint PRIMARY KEY, state text)")
    await at.db.execute("INSERT INTO orders VALUES (1, 'new')")
    await at.db.execute("CREATE TABLE bills (order_number bigint, state text)")
    await at.db.commit()
    at.web = await at.open(streams=[orders], store=url, writer="web-1")
    at.billing = await at.open(streams=[orders], store=url, reader="billing")


async def count_of_bills(at: Scope) -> tuple[int, int]:
    query = await at.db.execute("SELECT count(*), count(DISTINCT order_number) FROM bills")
    found: tuple[int, int] = await query.fetchone()
    return found


@on_postgres
async def joined(at: Scope) -> AsyncGenerator[None, None]:
    await a_database(at)
    at.bus = at.web
    yield
    await at.billing.wait_for(at.orders, "web-1", at.fact.id)
    assert await (await at.db.execute("SELECT row FROM busrep_facts")).fetchall(), "committed"


@on_postgres
async def own_table(at: Scope) -> AsyncGenerator[None, None]:
    url = at.servers.postgres
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    db = await at.stack.enter_async_context(connection)
    await db.execute(
        "CREATE TABLE invoice_log (fact_id bigint PRIMARY KEY, written_by text NOT NULL, number bigint, total float8)"
    )
    await db.execute("CREATE INDEX ON invoice_log (written_by, fact_id)")
    yield
    await open_store(url, Registry([at.invoices])).init()
    got: list[object] = []
    options: dict[str, Any] = {"name": at.servers.name, "streams": [at.invoices], "store": url}
    async with busrep.connect(at.servers.redis, writer="web-1", **options) as bus:
        async with bus.write(at.invoices) as fact:
            fact.add(at.Invoice(7, 9.5))
    async with busrep.connect(at.servers.redis, reader="late", **options) as reading:
        reading.subscribe(at.invoices)(lambda batch: got.extend(batch.rows))
        await reading.wait_for(at.invoices, "web-1", fact.id)
    assert got == [at.Invoice(7, 9.5)]
    assert await (await db.execute("SELECT * FROM invoice_log")).fetchall() == [(fact.id, "web-1", 7, 9.5)]


async def in_memory(at: Scope) -> AsyncGenerator[None, None]:
    at.busrep = busrep
    yield
    printed, sys.stdout = sys.stdout, io.StringIO()
    try:
        reader = await at.open(streams=[at.typing])
        task = asyncio.create_task(at.show_typing(reader))
        for life in range(2):
            bus = busrep.connect(at.servers.redis, name=at.servers.name, streams=[at.typing], writer="w")
            async with bus:
                while "w" not in reader.statistics()["reader"]["states"].get("typing", {}) or "live" not in str(
                    reader.statistics()["reader"]["states"]
                ):
                    await asyncio.sleep(0.01)
                async with bus.write(at.typing) as fact:
                    fact.add(["@a", life])
                while f"['@a', {life}]" not in sys.stdout.getvalue():
                    await asyncio.sleep(0.01)
        task.cancel()
        text = sys.stdout.getvalue()
    finally:
        sys.stdout = printed
    assert text.count("nobody is known to type") == 1, text
