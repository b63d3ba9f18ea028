"""docs/threads.md."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from types import ModuleType, SimpleNamespace

import psycopg

import busrep.sync
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.docs.markdown import Scope, on_postgres


async def gunicorn(at: Scope) -> AsyncGenerator[None, None]:
    at.socket, at.slot = socket, lambda directory: (3, f"the file in {directory}")
    names: list[str] = []
    shop = ModuleType("shop")
    shop.connect = lambda writer: names.append(writer)  # type: ignore[attr-defined]
    sys.modules["shop"] = shop
    yield
    worker = SimpleNamespace()
    at.post_fork(None, worker)
    assert names == [f"{socket.gethostname()}-3"]
    assert worker.slot == "the file in /run/shop"


@on_postgres
async def flask(at: Scope) -> AsyncGenerator[None, None]:
    from shop import OrderChanged, orders

    at.busrep, at.OrderChanged, at.orders = busrep, OrderChanged, orders
    at.REDIS, at.STORE, at.NAME = at.servers.redis, at.servers.postgres, "web-1"
    routes = {}

    def post(rule: str):
        return lambda view: routes.setdefault(rule, view)

    at.app = SimpleNamespace(post=post)
    store = open_blocking_store(at.STORE, Registry([orders]))
    store.init()
    store.close()
    async with await psycopg.AsyncConnection.connect(at.STORE, autocommit=True) as db:
        await db.execute("CREATE TABLE orders (number int PRIMARY KEY, state text)")
        await db.execute("INSERT INTO orders VALUES (7, 'new')")
        yield
        try:
            assert await asyncio.to_thread(routes["/orders/<int:number>/pay"], 7) == ("", 204)
        finally:
            await asyncio.to_thread(at.bus.close)
        assert await (await db.execute("SELECT state FROM orders")).fetchall() == [("paid",)]
        assert await (await db.execute("SELECT row FROM busrep_facts")).fetchall() == [('[7,"paid"]',)]
