"""Buses in memory: the kit's own Redis and store, on a real loop and on a virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from redis.exceptions import BusyLoadingError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

import busrep
from busrep.errors import SchemaError, Unavailable
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment, MemoryRedis, bus_pair


@attrs.frozen
class Order:
    number: int


orders = busrep.Stream("orders", Order)
typing = busrep.Stream("typing", resettable=True, channel="t")


@pytest.fixture(params=["asyncio", "virtual"])
def run(request: pytest.FixtureRequest) -> Any:
    return asyncio.run if request.param == "asyncio" else virtual.run


def test_facts_reach_the_reader(run: Any) -> None:
    async def main() -> None:
        async with bus_pair(orders, typing) as (writer, reader):
            got: list[Any] = []
            reader.subscribe(orders, typing)(lambda batch: got.extend(batch.rows))
            ids = await writer.publish(orders, [Order(1), Order(2)])
            await reader.wait_for(orders, "writer", ids[-1])
            assert got == [Order(1), Order(2)]
            while reader.positions().get("typing") is None:
                await asyncio.sleep(0.01)
            async with writer.write(typing) as fact:
                fact.add(["ann"])
            await reader.wait_for(typing, "writer", fact.id)
            assert got[2:] == [["ann"]]

    run(main())


def test_several_writers_and_a_durable_reader_that_comes_back(run: Any) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as deployment:
            got: list[int] = []
            async with deployment.bus(writer="w1") as w1, deployment.bus(writer="w2") as w2:
                for life in range(2):
                    ids = [*await w1.publish(orders, [Order(life)]), *await w2.publish(orders, [Order(life)])]
                    async with deployment.bus(reader="r") as reader:
                        reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
                        await reader.wait_for(orders, "w1", ids[0])
                        await reader.wait_for(orders, "w2", ids[1])
            assert sorted(got) == [1, 2, 3, 4]

    run(main())


def test_a_cut_is_healed(run: Any) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as deployment:
            async with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
                got: list[int] = []
                reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
                last = 0
                for number in range(20):
                    deployment.redis.cut()
                    (last,) = await writer.publish(orders, [Order(number)])
                await reader.wait_for(orders, "w1", last)
                assert got == list(range(20))
                assert reader.statistics()["link"]["reconnects"] > 0

    run(main())


def test_a_redis_that_refuses_is_tried_until_it_serves(run: Any) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as deployment:
            deployment.redis.refuse = BusyLoadingError("Redis is loading the dataset in memory")
            with pytest.raises(Unavailable, match="loading"):
                await deployment.bus().open()
            async with (
                deployment.bus(writer="w1", require_redis=False) as writer,
                deployment.bus(require_redis=False) as reader,
            ):
                await asyncio.sleep(0.2)
                assert deployment.redis.published == []
                deployment.redis.refuse = None
                (last,) = await writer.publish(orders, [Order(1)])
                await reader.wait_for(orders, "w1", last)

    run(main())


def test_hours_pass_at_once_on_the_virtual_clock() -> None:
    async def main() -> float:
        async with bus_pair(orders, settings=busrep.Settings()) as (writer, reader):
            await writer.publish(orders, [Order(1)])
            await asyncio.sleep(3600)
            assert reader.statistics()["link"]["reconnects"] == 0
            return asyncio.get_running_loop().time()

    assert virtual.run(main()) >= 3600


def test_nothing_is_left_of_a_deployment() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as deployment:
            async with deployment.bus(writer="w1") as writer:
                await writer.publish(orders, [Order(1)])
        with pytest.raises(SchemaError):
            await open_store(deployment.store, Registry([orders])).open()

    asyncio.run(main())


def test_the_redis_in_memory_answers_as_redis_does() -> None:
    async def main() -> None:
        server = MemoryRedis()
        one, two = (server.client().connection_pool.make_connection() for _ in range(2))
        with pytest.raises(RedisConnectionError):
            await one.send_command("PING")
        await one.connect()
        await two.connect()
        await one.send_command("PING")
        assert await one.read_response() == b"PONG"
        await one.send_command("SUBSCRIBE", "a", "b")
        await one.send_command("PING")
        assert [await one.read_response() for _ in range(3)] == [
            [b"subscribe", b"a", 1],
            [b"subscribe", b"b", 2],
            [b"pong", b""],
        ]
        await two.send_packed_command(two.pack_commands([("PUBLISH", "a", b"x"), ("PUBLISH", "c", b"y")]))
        assert [await two.read_response() for _ in range(2)] == [1, 0]
        assert await one.read_response() == [b"message", b"a", b"x"]
        await one.send_command("UNSUBSCRIBE", "a")
        await one.send_command("UNSUBSCRIBE")
        assert [(await one.read_response())[1:] for _ in range(2)] == [[b"a", 1], [b"b", 0]]
        assert server.publish("a", b"z") == 0
        await one.send_command("FLUSHALL")
        with pytest.raises(ResponseError, match="FLUSHALL"):
            await one.read_response()
        reading = asyncio.create_task(one.read_response())
        await asyncio.sleep(0)
        server.cut()
        with pytest.raises(RedisConnectionError, match="closed by server"):
            await reading
        assert server.published == [("a", b"x"), ("c", b"y"), ("a", b"z")]
        server.refuse = BusyLoadingError("Redis is loading the dataset in memory")
        await two.connect()
        await two.send_command("PUBLISH", "a", b"w")
        with pytest.raises(BusyLoadingError):
            await two.read_response()
        assert len(server.published) == 3

    asyncio.run(main())
