"""A reader that would begin with a snapshot, and a source that gives none: its rows are fetched page by page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest

import busrep
from busrep.errors import NoSnapshots
from busrep.http.serve import serve
from busrep.http.server import CatchUpLimits, catch_up_app
from busrep.http.source import HttpSource
from busrep.stores import open_store
from busrep.streams import Registry
from tests.http.test_reference import followed, rows_above
from tests.shop import QUICK, orders
from tests.stores.store_conformance import sync

from .bootstraps import Target, until, write

pytestmark = pytest.mark.servers
SETTINGS = attrs.evolve(QUICK, page_rows=7, bootstrap_lag=5)


@attrs.define
class Shop:
    """A writer with the table, and readers that have Redis and a server without snapshots."""

    redis: str
    name: str
    table: str
    address: str
    writer: busrep.Bus
    positions: str

    def reader(self, **options: Any) -> busrep.Bus:
        given = {"name": self.name, "streams": [orders], "store": HttpSource(self.address, [orders], SETTINGS)}
        return busrep.connect(self.redis, **{**given, "settings": SETTINGS, **options})

    @property
    def durable(self) -> dict[str, Any]:
        return {"reader": "billing", "reader_store": self.positions}


@contextlib.asynccontextmanager
async def shop(redis_url: str, name: str, url: str) -> AsyncIterator[Shop]:
    positions = url.replace("busrep.db", "positions.db")
    for one in (url, positions):
        await open_store(one, Registry([orders])).init()
    store = open_store(url, Registry([orders]), settings=QUICK)
    await store.open()
    app = catch_up_app(store, [orders], secret=None, limits=CatchUpLimits(snapshots=None))
    options: dict[str, Any] = {"name": name, "streams": [orders], "store": url, "settings": QUICK}
    async with serve(app) as serving, busrep.connect(redis_url, writer="w1", **options) as writer:
        yield Shop(redis_url, name, url, serving.url, writer, positions)
    await store.close()


@pytest.mark.parametrize("kind", ["without a name", "durable"])
@sync
async def test_a_new_reader_fetches_all_rows_in_place_of_a_snapshot(
    kind: str, redis_url: str, bus_name: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with shop(redis_url, bus_name, sqlite_url) as deployed:
        await write(deployed.writer, 30)
        options = deployed.durable if kind == "durable" else {}
        async with deployed.reader(**options) as reader:
            target = Target().of(reader)
            await until(lambda: target.numbers == list(range(30)))
            last = await write(deployed.writer, 5, first=30)
            await reader.wait_for(orders, "w1", last, timeout=20)
            assert target.numbers == list(range(35))
            assert target.parts == []
            assert reader.reading.stopped_bootstraps == {}
            with pytest.raises(NoSnapshots, match="gives no snapshots: pass snapshot_source="):
                await reader.bootstrap(orders)
        assert "its rows are fetched page by page, from {'w1': 0} on" in caplog.text
        if kind == "durable":
            await write(deployed.writer, 2, first=35)
            async with deployed.reader(**options) as reader:
                target = Target().of(reader)
                await until(lambda: target.numbers == [35, 36])


@sync
async def test_a_reader_far_behind_goes_on_where_it_was(
    redis_url: str, bus_name: str, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And is not given again what it has handled."""
    async with shop(redis_url, bus_name, sqlite_url) as deployed:
        last = await write(deployed.writer, 10)
        async with deployed.reader(**deployed.durable, start="earliest") as reader:
            reader.subscribe(orders)(lambda batch: None)
            await reader.wait_for(orders, "w1", last, timeout=20)
        last = await write(deployed.writer, 20, first=10)  # more than bootstrap_lag
        store = open_store(deployed.table, Registry([orders]))
        await store.open()
        async with asyncio.timeout(60):
            while not any(one.position >= last for one in await store.known()):  # a beat has stored it: it is known
                await asyncio.sleep(0.01)
        await store.close()
        async with deployed.reader(**deployed.durable) as reader:
            target = Target().of(reader)
            await until(lambda: target.numbers == list(range(10, 30)))
            assert target.parts == []
    assert "its rows are fetched page by page" in caplog.text


@sync
async def test_where_rows_were_pruned_only_a_snapshot_will_do(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    async with shop(redis_url, bus_name, sqlite_url) as deployed:
        await write(deployed.writer, 30)
        store = open_store(deployed.table, Registry([orders]))
        await store.open()
        async with asyncio.timeout(60):
            while not any(one.floor for one in await store.known()):  # once a beat has stored the position
                await store.prune(keep=5)
                await asyncio.sleep(0.01)
        await store.close()
        async with deployed.reader() as reader:
            target = Target().of(reader)
            await until(lambda: "orders" in reader.reading.stopped_bootstraps)
            assert isinstance(reader.reading.stopped_bootstraps["orders"], NoSnapshots)
            assert target.numbers == []


@sync
async def test_a_snapshot_that_was_asked_for_is_not_replaced(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    async with shop(redis_url, bus_name, sqlite_url) as deployed:
        last = await write(deployed.writer, 3)
        async with deployed.reader(start="earliest") as reader:
            target = Target().of(reader)
            await reader.wait_for(orders, "w1", last, timeout=20)
            assert target.numbers == [0, 1, 2]
            with pytest.raises(NoSnapshots):
                await reader.bootstrap(orders)


@sync
async def test_the_reference_system_gives_pages_only(redis_url: str, bus_name: str) -> None:
    def prepare(bus: busrep.Bus, stream: Any) -> None:
        bus.snapshot(stream)(lambda part: pytest.fail("there is no snapshot"))

    async with followed(redis_url, bus_name, prepare=prepare) as (bus, seen, say):
        await say("POSITION events w1 20 20")
        await until(lambda: bus.positions() == {"events": {"w1": 20}})
        assert seen.rows == rows_above({"w1": 0, "w2": 99}, 20)
