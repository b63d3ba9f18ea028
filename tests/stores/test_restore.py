"""A database put back to an older state without ``busrep db restored``: noticed, never silently accepted."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import busrep
from busrep.errors import PositionsAheadOfTable
from busrep.stores import open_store
from busrep.streams import Registry

orders = busrep.Stream("orders")
QUICK = busrep.Settings(
    heartbeat=0.1, poison_after=0.0, retry_min=0.02, retry_max=0.2, save_every=0.05, shutdown_timeout=1.0
)


@pytest.mark.servers
@pytest.mark.parametrize("writing", [True, False], ids=["a writer lives", "no writer lives"])
def test_a_position_above_all_that_the_sequence_gave_stops_the_reader_loudly(
    redis_url: str, bus_name: str, tmp_path: Path, writing: bool
) -> None:
    file, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    store, elsewhere = f"sqlite:///{file}", f"sqlite:///{tmp_path / 'reader.db'}"
    options = {"name": bus_name, "streams": [orders], "store": store, "settings": QUICK}
    got: list[list[int]] = []

    async def write(*rows: int) -> int:
        async with busrep.connect(redis_url, writer="w1", **options) as bus:
            return (await bus.publish(orders, [[row] for row in rows]))[-1]

    def reading() -> busrep.Bus:
        # Positions live in another database, which is not restored.
        return busrep.connect(redis_url, reader="r", reader_store=elsewhere, **options)

    async def before() -> None:
        for url in (store, elsewhere):
            await open_store(url, Registry([orders])).init()
        await write(1, 2)
        shutil.copy(file, backup)
        async with reading() as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            await reader.wait_for(orders, "w1", await write(3, 4, 5, 6))

    async def after() -> None:
        async with reading() as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            if writing:
                await write(30)  # under an ID that the reader has seen: it would pass for a duplicate
            with pytest.raises(PositionsAheadOfTable, match="busrep db restored"):
                await reader.wait_for(orders, "w1", 10**6)
            assert "orders w1" in reader.statistics()["reader"]["stopped"]

    asyncio.run(asyncio.wait_for(before(), 100))
    for leftover in tmp_path.glob("shop.db-*"):
        leftover.unlink()
    shutil.copy(backup, file)
    asyncio.run(asyncio.wait_for(after(), 100))
    assert got == [[1], [2], [3], [4], [5], [6]]
