"""docs/guides/reading.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

import busrep
from tests.docs.blocks.writing import a_database, count_of_bills, on_sqlite
from tests.docs.markdown import Scope, on_postgres


@on_postgres
async def exactly_once(at: Scope) -> AsyncGenerator[None, None]:
    await a_database(at)
    at.bus = at.billing
    yield
    ids = await at.web.publish(at.orders, [at.OrderChanged(number, "paid") for number in range(100)])
    await at.billing.wait_for(at.orders, "web-1", ids[-1])
    assert await count_of_bills(at) == (100, 100)
    state = await at.store.load_reader("billing")
    assert state.positions == {("orders", "web-1"): ids[-1]}


async def wait_for(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    web, at.bus = at.bus, at.reading
    async with web.write(at.orders) as fact:
        fact.add(at.OrderChanged(1, "sent"))
    at.token = fact.id
    yield
    assert at.seen[-1][0] == at.token
    with pytest.raises(busrep.WaitTimeout) as late:
        await at.bus.wait_for(at.orders, "web-1", at.token + 1, timeout=0.05)
    assert late.value.position == at.token


@on_postgres
async def snapshot(at: Scope) -> AsyncGenerator[None, None]:
    await a_database(at)
    at.bus = at.billing
    ids = await at.web.publish(at.orders, [at.OrderChanged(number % 10, "paid") for number in range(100)])
    while (await at.store.known())[0].position < ids[-1]:  # a beat notes it in the table
        await asyncio.sleep(0.05)
    yield
    await at.bus.bootstrap(at.orders)
    assert await count_of_bills(at) == (10, 10)
    assert (await at.store.load_reader("billing")).positions == {("orders", "web-1"): ids[-1]}
