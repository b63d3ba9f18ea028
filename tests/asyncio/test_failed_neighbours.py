"""A committed fact is published at once when the fact before it, which held it up, fails before it has an ID."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import busrep.sync
from busrep import Stream
from busrep.errors import Unavailable
from busrep.streams import Registry
from busrep.testing.pair import MemoryDeployment
from tests.asyncio.bus_conformance import until
from tests.shop import QUICK, Order, opened_store

# Nothing but its own facts moves the position of such a stream: no beat publishes what was missed.
alone = Stream("alone", Order, follows=False)
CUT = Unavailable("the database", OSError("cut"))


@pytest.mark.parametrize("how", ["fails", "cancelled", "cancelled, and fails"])
def test_a_fact_whose_neighbour_gets_no_id_is_published(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(alone, settings=attrs.evolve(QUICK, heartbeat=600.0)) as deployment,
            deployment.bus(writer="w") as bus,
            deployment.bus() as reader,
        ):
            handled: list[int] = []
            asked, go, there = asyncio.Event(), asyncio.Event(), asyncio.Event()

            @reader.subscribe(alone)
            def take(batch: Any) -> None:
                handled.extend(row.number for row in batch.rows)
                if 2 in handled:
                    there.set()

            async def write(number: int) -> int:
                async with bus.write(alone) as fact:
                    fact.add(Order(number, "new"))
                return fact.id

            await reader.wait_for(alone, "w", await write(1))
            store: Any = bus.store
            reserve = store.reserve

            async def late(stream: str, count: int, held: Any = None) -> Sequence[int]:
                asked.set()
                await go.wait()
                if "fails" in how:
                    raise CUT
                return list(await reserve(stream, count))

            with monkeypatch.context() as patch:
                patch.setattr(store, "reserve", late)
                neighbour = asyncio.create_task(write(99))
                await asked.wait()
            await write(2)
            if "cancelled" in how:
                neighbour.cancel()
                await asyncio.wait([neighbour])
            go.set()
            with pytest.raises((Unavailable, asyncio.CancelledError)):
                await neighbour
            await asyncio.wait_for(there.wait(), 30)  # nobody asks for it, and no beat comes
            assert handled == [1, 2]

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.servers
def test_a_fact_of_threads_whose_neighbour_gets_no_id_is_published(
    redis_url: str, bus_name: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"name": bus_name, "streams": [alone], "store": sqlite_url, "settings": QUICK}
    asked, go = threading.Event(), threading.Event()
    refused: list[Unavailable] = []
    with (
        opened_store(sqlite_url, Registry([alone])) as store,
        busrep.sync.connect(redis_url, writer="w", beats=False, **options) as bus,
        busrep.sync.connect(redis_url, **options) as reader,
    ):
        handled: list[int] = []
        reader.subscribe(alone)(lambda batch: handled.extend(row.number for row in batch.rows))
        until(lambda: reader.statistics()["link"]["reading"]["connected"], 60)
        reader.wait_for(alone, "w", bus.publish(alone, [Order(1, "new")])[0])
        kind: Any = type(store.wrapped)
        reserve = kind.reserve

        async def late(store: Any, stream: str, count: int, held: Any = None) -> Sequence[int]:
            if threading.current_thread() is not neighbour:
                return list(await reserve(store, stream, count))
            asked.set()
            go.wait(60)
            raise CUT

        def write() -> None:
            try:
                with bus.write(alone):
                    pass
            except Unavailable as error:
                refused.append(error)

        neighbour = threading.Thread(target=write)
        monkeypatch.setattr(kind, "reserve", late)
        neighbour.start()
        assert asked.wait(60)
        (last,) = bus.publish(alone, [Order(2, "new")])
        go.set()
        neighbour.join(60)
        assert refused
        reader.wait_for(alone, "w", last)
        assert handled == [1, 2]


@pytest.mark.servers
def test_a_fact_of_threads_whose_neighbour_fails_inside_its_block_is_published(
    redis_url: str, bus_name: str, postgres_url: str
) -> None:
    """It ran a statement, which may have been COMMIT: its end is in doubt, and no beat asks after it."""
    options: dict[str, Any] = {"name": bus_name, "streams": [alone], "store": postgres_url, "settings": QUICK}
    with (
        opened_store(postgres_url, Registry([alone])),
        busrep.sync.connect(redis_url, writer="w", beats=False, **options) as bus,
        busrep.sync.connect(redis_url, **options) as reader,
    ):
        handled: list[int] = []
        reader.subscribe(alone)(lambda batch: handled.extend(row.number for row in batch.rows))
        until(lambda: reader.statistics()["link"]["reading"]["connected"], 60)
        with pytest.raises(KeyError), bus.write(alone) as neighbour:
            neighbour.execute("SELECT 1")
            late = threading.Thread(target=bus.publish, args=(alone, [Order(2, "new")]))
            late.start()
            late.join(60)
            raise KeyError
        reader.wait_for(alone, "w", neighbour.id + 1)
        assert handled == [2]
        assert bus.statistics()["writer"]["in_doubt"] == 0
