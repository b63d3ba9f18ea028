"""What a reader saved must outlive a crash with asynchronous commits (rule 9.22): `wait_for` has returned for it."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from busrep.core.snapshots import Agreement, PartRange
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.servers import PostgresServer
from tests.asyncio.test_bus import Deployment, run, until
from tests.shop import STREAMS, orders

from .test_durability import careless, create, write

__all__ = ["careless"]  # a fixture

pytestmark = pytest.mark.servers


def saved(url: str) -> int | None:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT position FROM busrep_readers WHERE reader = 'r' AND stream = 'orders' AND writer = 'w'"
        ).fetchone()
    return None if row is None else int(row[0])


@pytest.mark.parametrize("how", ["with the effects", "by itself"])
def test_no_position_is_saved_that_a_crash_takes_back(
    careless: PostgresServer,
    redis_url: str,
    bus_name: str,
    how: str,
) -> None:
    async def work() -> None:
        url = await create(careless, f"saved_{how.replace(' ', '_')}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE effects (number integer)")
        bus = Deployment(redis_url, bus_name, url).bus
        async with bus(writer="w") as writer, bus(reader="r") as reader:
            if how == "with the effects":

                async def handle(batch: Any) -> None:
                    async with await psycopg.AsyncConnection.connect(url) as effects:
                        for row in batch.rows:
                            await effects.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                        await batch.save(effects)
            else:

                async def handle(batch: Any) -> None:
                    pass

            reader.subscribe(orders)(handle)
            for number in range(5):
                last = await write(writer, number)
            await reader.wait_for(orders, "w", last, timeout=30)
            await until(lambda: saved(url) == last, timeout=30)
            careless.kill()
            careless.start()
            assert saved(url) == last
            if how == "with the effects":
                with psycopg.connect(url) as after:
                    assert after.execute("SELECT count(*) FROM effects").fetchone() == (5,)

    run(work(), 90)


@pytest.mark.parametrize("what", ["a bootstrap", "reading", "reading anew"])
def test_what_a_reader_began_outlives_a_crash(careless: PostgresServer, what: str) -> None:
    """A target is emptied on the ground of it, or the first rows are handled before any position is saved."""
    key, first = ("orders", "w"), {("orders", "w"): 7, ("orders", ""): 0}

    async def begin(url: str) -> None:
        store = open_store(url, Registry(STREAMS))
        await store.open()
        epoch = await store.epoch()
        if what == "a bootstrap":
            agreement = Agreement("orders", epoch, {"w": 7}, {}, [PartRange(0, 7, 7)])
            await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
        elif what == "reading":
            await store.register_reader("r", first, epoch)
        else:
            await store.register_reader("r", dict.fromkeys(first, 0), "before")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("CHECKPOINT")
            await store.reset_reader("r", first, epoch)
        await store.close()

    async def found(url: str) -> tuple[Any, bool]:
        store = open_store(url, Registry(STREAMS))
        await store.open()
        state = await store.load_reader("r")
        await store.close()
        return state.positions, "orders" in state.loading

    url = asyncio.run(create(careless, f"began {what}".replace(" ", "_")))
    asyncio.run(begin(url))
    careless.kill()
    careless.start()
    assert asyncio.run(found(url)) == ({key: 7}, what == "a bootstrap")
