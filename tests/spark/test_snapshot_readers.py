"""The snapshot job: with readers that follow, on PostgreSQL too, and killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import busrep
from busrep.core.snapshots import encode_rows, part_hash
from busrep.errors import ConfigError
from busrep.snapshots.parquet import ParquetSource
from busrep.snapshots.parquet_manifest import NAME
from busrep.spark import job, secrets
from busrep.spark.jobs import snapshot
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.shop import QUICK
from tests.spark.archives import Bench, Order
from tests.spark.drivers import killed_when
from tests.spark.long import long
from tests.spark.snapshots import DECLARED, Row, filled, latest, orders, read, rows_of, run, text


@contextlib.asynccontextmanager
async def writers(count: int, redis: str, name: str, store: str) -> AsyncIterator[list[busrep.Bus]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                busrep.connect(redis, name=name, streams=[orders], store=store, writer=f"w{at}", settings=QUICK)
            )
            for at in range(count)
        ]


def proven(bench: Bench) -> int:
    """The lowest position of both writers."""
    with contextlib.closing(sqlite3.connect(bench.path)) as connection:
        found = [at for (at,) in connection.execute("SELECT position FROM busrep_positions")]
    return min(found) if len(found) == 2 else 0


@pytest.mark.servers
def test_a_reader_bootstraps_while_writers_go_on(
    spark: SparkSession, redis_url: str, bus_name: str, tmp_path: Path
) -> None:
    """A table of the latest orders, kept by a reader, ends as the log says it should. Each writer has numbers of its
    own: between writers there is no order."""
    bench = Bench(spark, tmp_path)
    state: dict[int, str] = {}
    told: dict[str, Any] = {}

    def keep(rows: Any) -> None:
        for row in rows:
            state.pop(row.number, None)
            if row.status != "gone":
                state[row.number] = row.status

    async def go_on(bus: busrep.Bus, at: int, ended: asyncio.Event) -> None:
        turn = 0
        while not ended.is_set() or turn < 20:
            turn += 1
            rows = [Order(at + 2 * (turn * k % 50), "gone" if (turn + k) % 5 == 0 else f"{turn}.{k}") for k in range(9)]
            async with bus.write(orders) as fact:
                for row in rows:
                    fact.add(row)
            await asyncio.sleep(0.005)

    async def follow() -> None:
        async with writers(2, redis_url, bus_name, bench.url) as buses:
            ended = asyncio.Event()
            writing = [asyncio.create_task(go_on(bus, at, ended)) for at, bus in enumerate(buses)]
            async with asyncio.timeout(60):
                while await asyncio.to_thread(proven, bench) < 20:  # there is no event for it
                    await asyncio.sleep(0.05)
            report = await asyncio.to_thread(run, bench, tombstone="status=gone")
            async with busrep.connect(
                redis_url, name=bus_name, streams=[orders], store=bench.url, reader="search", settings=QUICK,
                reader_store=f"sqlite:///{tmp_path}/reader.db", snapshot_source=(tmp_path / "snapshot").as_uri(),
            ) as reader:  # fmt: skip
                reader.snapshot(orders)(lambda part: keep(part.rows))
                reader.subscribe(orders)(lambda batch: keep(batch.rows))
                await reader.bootstrap(orders)
                told.update(reader.statistics()["bootstrap"]["orders"])
                ended.set()
                await asyncio.gather(*writing)
                for bus, writer in zip(buses, ("w0", "w1"), strict=True):
                    token = (await bus.publish(orders, [Order(1000 + int(writer[1]), "last")]))[-1]
                    await reader.wait_for(orders, writer, token, timeout=20)
        assert told["rows"] == report["rows"]
        assert 0 < report["rows"] <= 100
        assert min(report["positions"].values()) > 0

    async def made() -> None:
        store = open_store(f"sqlite:///{tmp_path}/reader.db", Registry([orders]))
        await store.init()

    asyncio.run(made())
    asyncio.run(follow())
    table = bench.table()
    ends = dict.fromkeys(("w0", "w1"), 10**9)
    assert state == {json.loads(row)[0]: json.loads(row)[1] for _, _, row in latest(table, ends)}
    assert len(state) > 50


def text_of(rows: list[Row]) -> bytes:
    return encode_rows(*([row[at] for row in rows] for at in (0, 1)), [row[2].encode() for row in rows])


class RolledBackError(Exception):
    pass


async def write_on(bus: busrep.Bus, at: int, ended: asyncio.Event) -> None:
    """Facts of several rows, some at the same time, some rolled back; 60 at least."""

    async def one(turn: int) -> None:
        with contextlib.suppress(RolledBackError):
            async with bus.write(orders) as fact:
                for k in range(1 + turn % 3):
                    fact.add(Order(at + 2 * (turn * k % 50), f"{turn}.{k} ü"))
                await asyncio.sleep(0.001 * (turn % 4))
                if turn % 7 == 0:
                    raise RolledBackError

    for turn in itertools.count():
        await asyncio.gather(*(one(4 * turn + number) for number in range(4)))
        await asyncio.sleep(0.02)  # a busy machine has others to serve as well
        if ended.is_set() and turn > 15:
            return


@pytest.mark.servers
def test_of_postgresql(
    spark: SparkSession,
    redis_url: str,
    bus_name: str,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    """What the job writes of a table that two writers go on with is the table's text; a reader that begins with it and
    follows gets each row once, in order."""
    store, password = secrets.split(postgres_url)
    (tmp_path / "password").write_text(f"{password}\n")
    told: dict[str, Any] = {
        "store": store, "password_file": str(tmp_path / "password"), "stream": "orders", "part_rows": 50,
    }  # fmt: skip
    tokens: dict[str, list[int]] = {"w0": [], "w1": []}
    loaded: list[Row] = []
    live: list[tuple[int, str]] = []

    def job_run(name: str, **options: Any) -> dict[str, Any]:
        return snapshot.run(spark, snapshot.Options(**told, **options, to=str(tmp_path / name)), job.silent)

    async def stored() -> list[Row]:
        """The table's own, now."""
        return (await rows_of(open_store(postgres_url, Registry([orders]))))[1]

    async def follow() -> None:
        ended = asyncio.Event()
        async with writers(2, redis_url, bus_name, postgres_url) as buses:
            writing = [asyncio.create_task(write_on(bus, at, ended)) for at, bus in enumerate(buses)]
            async with asyncio.timeout(60):
                while len({row[1] for row in await stored()}) < 2:  # there is no event for it
                    await asyncio.sleep(0.05)
            report = await asyncio.to_thread(job_run, "all", all=True)
            async with busrep.connect(
                redis_url, name=bus_name, streams=[orders], store=postgres_url, settings=QUICK,
                reader="search", reader_store=postgres_url, snapshot_source=(tmp_path / "all").as_uri(),
            ) as reader:  # fmt: skip
                reader.snapshot(orders)(
                    lambda part: loaded.extend(zip(part.tokens, part.writers, part.rows, strict=True))
                )
                reader.subscribe(orders)(lambda batch: live.extend((token, batch.writer) for token in batch.tokens))
                await reader.bootstrap(orders)
                ended.set()
                await asyncio.gather(*writing)
                for bus, writer in zip(buses, tokens, strict=True):
                    token = (await bus.publish(orders, [Order(1000, "last")]))[-1]
                    await reader.wait_for(orders, writer, token, timeout=20)
        whole = await stored()
        agreement, rows = await rows_of(ParquetSource((tmp_path / "all").as_uri()))
        assert report["positions"] == agreement.positions
        wanted = [row for row in whole if row[0] <= agreement.positions[row[1]]]
        assert len(wanted) == len(rows) == report["rows"] > 0
        assert part_hash(text_of(rows)) == part_hash(text_of(wanted))
        assert [row[:2] for row in loaded] == [row[:2] for row in rows]
        assert len(live) > 10
        for writer in tokens:  # none lost, none twice, in order
            got = [row[0] for row in loaded if row[1] == writer] + [token for token, who in live if who == writer]
            assert got == [row[0] for row in whole if row[1] == writer]

    with contextlib.closing(open_blocking_store(postgres_url, Registry([orders]))) as made:
        made.init()
    asyncio.run(follow())
    report = job_run("latest", key="number", streams=DECLARED)
    upto = report["positions"]
    whole = [(writer, token, at, row) for at, (token, writer, row) in enumerate(asyncio.run(stored()))]
    assert read(tmp_path / "latest")[1] == latest(whole, upto)
    assert 50 < report["rows"] <= 101


def killed(bench: Bench, *targets: Path) -> None:
    """The job, once for each target, killed with all that it has started once it has written some parts of each."""
    scratch = bench.folder / "scratch"
    scratch.mkdir()
    options = {"store": bench.url, "stream": "orders", "all": True, "part_rows": 1, "partitions": 4}
    told = {"folder": str(scratch), "options": [{**options, "to": str(target)} for target in targets]}
    before = [set(target.glob("*")) for target in targets]

    def enough() -> bool:
        return all(len(set(target.glob("*")) - old) >= 20 for target, old in zip(targets, before, strict=True))

    assert not killed_when("tests.spark.snapshot_job", told, enough, scratch / "stderr")


@long
def test_killed(spark: SparkSession, tmp_path: Path) -> None:
    """In the middle: no snapshot, or the older one whole; and the next run is as any other."""
    bench = filled(spark, tmp_path)
    fresh, older = bench.folder / "fresh", bench.folder / "older"
    run(bench, "older", tombstone="status=gone", grace=0.0)
    before = read(older)
    assert len(os.listdir(older)) == 1 + len(before[0].parts)
    bench.write("w3", [(token, text(token)) for token in range(1000, 5000)], upto=5000)
    killed(bench, fresh, older)
    assert not (fresh / NAME).exists()
    with pytest.raises(ConfigError, match=r"there is no manifest\.json"):
        read(fresh)
    assert read(older) == before
    assert len(os.listdir(older)) >= 20 + len(before[0].parts)
    run(bench, "fresh", all=True, part_rows=1000, grace=0.0)
    agreement, rows = read(fresh)
    assert [row[0] for row in rows if row[1] == "w3"] == list(range(1000, 5000))
    assert len(os.listdir(fresh)) == 1 + len(agreement.parts)  # what had been left is gone
