"""A server in a program of the application's, in docs/guides/tcp.md."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import busrep
from tests.docs.blocks.writing import on_sqlite
from tests.docs.markdown import Scope


async def in_process(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    at.heard = []
    yield
    assert at.heard == [at.OrderChanged(7, "new")]


async def client(at: Scope) -> AsyncGenerator[None, None]:
    from shop import orders

    at.busrep, at.orders = busrep, orders
    yield  # an address that leads nowhere: it is taken, and asked for when the bus is opened
