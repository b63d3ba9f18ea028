"""Many readers that start at once: few load at a time, all come online, and the load on the database is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import attrs
import psycopg
import pytest

from busrep import Bus, Settings
from busrep.caches.cache import invalidations
from busrep.errors import ConfigError
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.stores.postgres.snapshots import SLOTS
from busrep.streams import Registry
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment, MemoryRedis
from tests.shop import orders, payments

from .bootstraps import SMALL, Source, Target, deployment, state, until, write

caches = invalidations()
READERS = 50


@attrs.define
class Watched:
    """Counts how many snapshots are held at a time, over all readers, and how often each reader asks for one."""

    now: int = 0
    most: int = 0
    asked: Counter[str] = attrs.field(factory=Counter)


class Shared:
    """One reader's view of a store that all have in common: a server does not take hundreds of connections."""

    def __init__(self, store: Any, name: str, watched: Watched) -> None:
        self._store, self._name, self._watched = store, name, watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def agree(self, *args: Any, **options: Any) -> Any:
        watched = self._watched
        watched.asked[self._name] += 1
        found = await self._store.agree(*args, **options)
        watched.now += 1
        watched.most = max(watched.most, watched.now)
        return found

    async def leave(self, agreement: Any) -> None:
        self._watched.now -= 1
        await self._store.leave(agreement)


@pytest.mark.servers
@pytest.mark.timeout(320)
def test_fifty_readers_at_once_on_postgresql(postgres_url: str) -> None:
    """All of them come online, though four load at a time; who waits asks only now and then."""
    settings = Settings(
        heartbeat=2.0,
        save_every=1.0,
        snapshot_part_rows=100,
        snapshots=4,
        snapshot_connections=1,
        retry_min=0.1,
        retry_max=2.0,
    )
    registry, redis, watched = Registry([orders, payments]), MemoryRedis(), Watched()

    def bus(store: Any, **options: Any) -> Bus:
        given = BusOptions(name="shop", streams=registry, store=store, start=None, settings=settings, **options)
        return Bus(redis.client(), given)

    async def main() -> None:
        store = open_store(postgres_url, registry, settings=settings)
        await store.init()
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(300):
            writer = await stack.enter_async_context(bus(store, writer="w1"))
            last = await write(writer, 1_000)
            await writer.writing.beat()
            readers = [bus(Shared(store, f"r{at}", watched), reader=f"r{at}") for at in range(READERS)]
            for one in readers:
                await stack.enter_async_context(one)
            begun = asyncio.get_running_loop().time()
            targets = [Target().of(one) for one in readers]
            await until(lambda: all(state(one) == "online" for one in readers), timeout=280)
            took = asyncio.get_running_loop().time() - begun
            assert watched.most <= 4
            assert watched.now == 0
            # A full pause is two seconds at most, one on the average: nobody asks much more often than that.
            assert max(watched.asked.values()) <= 5 + 3 * took
            await asyncio.gather(*(one.wait_for(orders, "w1", last) for one in readers))
            assert [target.numbers == list(range(1_000)) for target in targets] == [True] * READERS
            syncs = [found.syncs for found in await writer.store.bootstraps()]
            assert syncs == [1] * READERS
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            held = connection.execute("SELECT count(*) FROM pg_locks WHERE classid = %s", (SLOTS,)).fetchone()
            assert held == (0,)

    asyncio.run(main())


def test_a_bus_whose_streams_all_begin_at_once_loads_as_many_as_are_allowed() -> None:
    """And its caches' stream beside them goes its own way, without a position or a snapshot."""

    async def main() -> None:
        settings = attrs.evolve(SMALL, snapshots=1)
        async with MemoryDeployment(orders, payments, caches, settings=settings) as shop:
            async with shop.bus(writer="w1") as writer:
                last = {stream: await write(writer, 35, stream=stream) for stream in (orders, payments)}
                await writer.writing.beat()
                async with shop.bus(reader="billing", start=None) as reader:
                    source = reader.reading.bootstrapping.source.given = Source(reader.store)
                    most = 0

                    async def watch(_: int) -> None:
                        nonlocal most
                        most = max(most, len(source.held))

                    source.on_load = watch

                    @reader.cached()
                    def double(number: int) -> int:
                        return 2 * number

                    targets = {orders: Target(), payments: Target()}
                    for stream, target in targets.items():
                        reader.snapshot(stream)(target.apply)
                        reader.subscribe(stream)(target.handle)
                    with pytest.raises(ConfigError, match="caches begin empty"):
                        reader.snapshot(caches)(targets[orders].apply)
                    for stream, target in targets.items():
                        await reader.wait_for(stream, "w1", last[stream])
                        assert target.numbers == list(range(35))
                    assert most == 1
                    await until(lambda: {state(reader), state(reader, "payments")} == {"online"})
                    await until(lambda: reader.statistics()["caches"]["streams"]["caches"]["trusted"])
                    assert [double(1), double(1)] == [2, 2]
                    await writer.invalidate(double.cache_name, (1,))
                    found = reader.statistics()["caches"]["caches"][double.cache_name]
                    await until(lambda: reader.statistics()["caches"]["caches"][double.cache_name]["invalidations"])
                    assert found["hits"] == 1
                    await reader.reading.saver.save()
                    kept = await reader.store.load_reader("billing")
                    assert kept.streams == {"orders", "payments"}

    virtual.run(main())


def test_who_waits_for_a_snapshot_may_give_up_and_it_goes_on() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 35)
            await writer.writing.beat()
            async with shop.bus(reader="billing", start="earliest") as reader:
                source = reader.reading.bootstrapping.source.given = Source(reader.store)
                at, go_on = asyncio.Event(), asyncio.Event()

                async def gate(_: int) -> None:
                    at.set()
                    await go_on.wait()

                source.on_load, target = gate, Target().of(reader)
                asking = asyncio.create_task(reader.bootstrap(orders))
                await at.wait()
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                assert state(reader) == "loading"
                go_on.set()
                await reader.bootstrap(orders)
                assert target.parts == [0, 1, 2, 3]
                await reader.wait_for(orders, "w1", last)

    virtual.run(main())
