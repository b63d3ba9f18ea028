"""The service's tests: in memory, on a virtual clock, on a bad network, on a Redis that refuses, with drawn orders."""

# ruff: noqa: S101, D103
from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import NoPermissionError
from service import Bookmark, Desk, Order, SearchIndex, orders, words

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing import FaultyLink, MemoryDeployment, VirtualLoop, bus_pair, virtual

QUICK = busrep.Settings(heartbeat=0.1, poison_after=0.0, retry_min=0.02, retry_max=0.1)


# In memory: two real buses, no server.


def test_an_order_is_found_at_once_by_whoever_placed_it() -> None:
    async def main() -> None:
        async with bus_pair(orders) as (writer, reader):
            desk, index = Desk(writer), SearchIndex(reader)
            await desk.place(1, "green Tea")
            placed = await desk.place(2, "black tea")
            assert await index.find("tea", after=placed) == [1, 2]
            withdrawn = await desk.place(1, None)
            assert await index.find("tea", after=withdrawn) == [2]
            assert await index.find("green") == []

    asyncio.run(main())


# On a virtual clock: an hour passes at once, and the bus's own periods with it.


def test_an_index_that_was_away_for_an_hour_has_all_orders(virtual_loop: VirtualLoop) -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=busrep.Settings()) as deployment,
            deployment.bus(writer="web-1") as writer,
        ):
            for number in range(3600):
                (last,) = await writer.publish(orders, [Order(number, f"tea {number}")])
                await asyncio.sleep(1)
            async with deployment.bus() as late:
                index = SearchIndex(late)
                assert await index.find("3599", after=Bookmark("web-1", last)) == [3599]
                assert len(await index.find("tea")) == 3600

    virtual_loop.run_until_complete(main())


# On a bad network, in front of a real Redis.


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    asyncio.run(open_store(url, Registry([orders])).init())
    return url


def test_orders_placed_while_the_network_is_away_are_found_after_it(
    busrep_redis: str, busrep_name: str, busrep_link: Callable[[str], FaultyLink], store: str
) -> None:
    link = busrep_link(busrep_redis)

    async def main() -> None:
        async with (
            busrep.connect(
                link.url, name=busrep_name, streams=[orders], store=store, writer="web-1", settings=QUICK
            ) as writer,
            busrep.connect(
                busrep_redis, name=busrep_name, streams=[orders], store=store, start="earliest", settings=QUICK
            ) as reader,
        ):
            desk, index = Desk(writer), SearchIndex(reader)
            assert await index.find("tea", after=await desk.place(1, "tea")) == [1]
            link.black_hole()
            placed = await desk.place(2, "tea")  # business goes on
            with pytest.raises(busrep.WaitTimeout):
                await index.find("tea", after=placed, timeout=0.05)
            link.heal()
            assert await index.find("tea", after=placed) == [1, 2]

    asyncio.run(main())


# On a Redis that refuses.


def test_a_user_without_rights_is_told_so() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as deployment:
            deployment.redis.refuse = NoPermissionError("No permissions to access a channel")
            with pytest.raises(busrep.ConfigError, match="Redis refuses this user"):
                await deployment.bus().open()

    asyncio.run(main())


# With drawn orders: nobody would think of placing them.


@settings(deadline=None, max_examples=10)
@given(st.lists(st.builds(Order, st.integers(1, 9), st.none() | st.text()), min_size=1))
def test_the_index_equals_the_orders_whatever_is_placed(placed: list[Order]) -> None:
    async def main() -> None:
        async with bus_pair(orders) as (writer, reader):
            index = SearchIndex(reader)
            ids = await writer.publish(orders, placed)
            await reader.wait_for(orders, "writer", ids[-1])
            last = {order.number: order.text for order in placed}
            assert index.texts == {number: text for number, text in last.items() if text is not None}
            for word in {word for text in index.texts.values() for word in words(text)}:
                assert await index.find(word) == sorted(n for n, text in index.texts.items() if word in words(text))

    virtual.run(main())
