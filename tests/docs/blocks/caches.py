"""The short example of caches, in docs/guides/reading.md."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator

import busrep
from busrep.caches import invalidations
from busrep.stores import open_store
from busrep.streams import Registry
from tests.docs.markdown import Scope


async def near_cache(at: Scope) -> AsyncGenerator[None, None]:
    at.busrep = busrep
    await open_store("sqlite:///shop.db", Registry([invalidations()])).init()
    at.db = sqlite3.connect("shop.db", isolation_level=None)
    at.stack.callback(at.db.close)
    at.db.execute("CREATE TABLE prices (item INTEGER PRIMARY KEY, price INTEGER)")
    at.db.execute("INSERT INTO prices VALUES (7, 100)")
    yield
    await at.stack.enter_async_context(at.bus)
    while not at.bus.statistics()["caches"]["streams"]["caches"]["trusted"]:
        await asyncio.sleep(0.01)
    assert [await at.price(7), await at.price(7)] == [100, 100]
    assert at.price.statistics()["hits"] == 1
    await at.change(7, 250)
    assert await at.price(7) == 250
