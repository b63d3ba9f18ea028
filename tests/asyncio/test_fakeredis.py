"""The bus on fakeredis, in process: how an application's own unit tests may use it, without any server."""

from __future__ import annotations

import asyncio
import secrets

import attrs
import fakeredis
import pytest

import busrep
from busrep.stores import open_store
from busrep.streams import Registry


@attrs.frozen
class Order:
    number: int


orders = busrep.Stream("orders", Order)
QUICK = busrep.Settings(heartbeat=0.1, answer_interval=0.005, poison_after=0.0, retry_min=0.02, retry_max=0.2)


@pytest.fixture
def redis() -> fakeredis.FakeAsyncRedis:
    return fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())


@pytest.fixture
def store() -> str:
    url = f"memory://{secrets.token_hex(6)}"
    asyncio.run(open_store(url, Registry([orders])).init())
    return url


def test_facts_reach_readers(redis: fakeredis.FakeAsyncRedis, store: str) -> None:
    async def main() -> None:
        options = {"name": "shop", "streams": [orders], "store": store, "settings": QUICK}
        async with (
            busrep.connect(redis, writer="w1", **options) as w1,
            busrep.connect(redis, writer="w2", **options) as w2,
            busrep.connect(redis, reader="billing", **options) as reader,
        ):
            got: list[int] = []
            reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            live = {"orders": {"w1": "live", "w2": "live"}}
            while reader.statistics()["reader"]["states"] != live:  # they come over the channel, not out of the table
                await asyncio.sleep(0.005)
            for number in range(10):
                async with (w1 if number % 2 else w2).write(orders) as fact:
                    fact.add(Order(number))
            await reader.wait_for(orders, "w1", fact.id)
            await reader.wait_for(orders, "w2", fact.id - 1)
            assert sorted(got) == list(range(10))
            assert [number for number in got if number % 2] == [1, 3, 5, 7, 9]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_a_lost_last_message_is_found_within_a_beat(
    redis: fakeredis.FakeAsyncRedis, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        options = {"name": "shop", "streams": [orders], "store": store, "settings": QUICK}
        async with (
            busrep.connect(redis, writer="w1", **options) as writer,
            busrep.connect(redis, **options) as reader,
        ):
            got: list[int] = []
            reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            await reader.wait_for(orders, "w1", 0)
            taken_in = reader.link.on_message

            def lose(channel: str, data: bytes) -> None:
                if b"RDATA" not in data:
                    taken_in(channel, data)

            monkeypatch.setattr(reader.link, "on_message", lose)
            reader.link.reconnect("to read through lose()")
            while reader.statistics()["link"]["reconnects"] == 0 or not reader.statistics()["link"]["connected"]:
                await asyncio.sleep(0.01)
            ids = await writer.publish(orders, [Order(1), Order(2)])
            await reader.wait_for(orders, "w1", ids[-1])
            assert got == [1, 2]
            found = reader.statistics()["reader"]
            assert (found["rows_received"], found["rows_fetched"]) == (0, 2)

    asyncio.run(asyncio.wait_for(main(), 100))
