"""The snapshot job: what it writes is what the table says, and readers bootstrap from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import orjson
import pyarrow
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import busrep
from busrep.asyncio.parquet import ParquetSource
from busrep.asyncio.parquet_manifest import NAME
from busrep.asyncio.snapshot_sources import check_log, checked_part
from busrep.errors import ConfigError, EpochChanged, RowError
from busrep.snapshots import Agreement, PartRange, SnapshotSource
from busrep.spark import job
from busrep.spark.archive_store import Root
from busrep.spark.failures import reason
from busrep.spark.jobs import snapshot
from busrep.spark.ranged import FromTable
from busrep.spark.snapshot_tasks import PARTS, Part, PartFiles, read_keys
from busrep.spark.snapshotting import Writing, ranges_of
from busrep.stores import open_store
from busrep.streams import Registry
from tests.shop import QUICK
from tests.spark.archives import Bench, Order
from tests.spark.cluster import end_session
from tests.spark.long import long
from tests.spark.test_docs_archive import blocks

DECLARED = "tests.spark.archives:STREAMS"
orders = busrep.Stream("orders", Order)
Row = tuple[int, str, str]
"""Token, writer, text."""


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """Keys 0 to 39, again and again; every third time a key is said to be gone; facts of three rows; a hole."""
    made = Bench(spark, tmp_path)
    for writer, odd in (("w1", 1), ("w2", 0)):
        facts = [
            (token, text(token, at))
            for token in range(1, 301)
            if token % 2 == odd
            for at in range(1 + 2 * (token % 5 == 0))
        ]
        made.write(writer, [fact for fact in facts if fact[0] != 77], upto=290 if odd else 281)
    return made


def text(token: int, at: int = 0) -> str:
    status = "gone" if (token + at) % 3 == 0 else f"v{token} ü"
    return json.dumps([(token * 7 + at) % 40, status], separators=(",", ":"), ensure_ascii=False)


def run(bench: Bench, name: str = "snapshot", **options: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "store": bench.url, "stream": "orders", "streams": DECLARED, "to": str(bench.folder / name), "part_rows": 10,
        "partitions": 3, **options,
    }  # fmt: skip
    if "key" not in told and "all" not in told:
        told["key"] = "number"
    report = snapshot.run(bench.spark, snapshot.Options(**told), job.silent)
    assert json.dumps(report)
    assert report["stream"] in snapshot.describe(report)
    return report


async def rows_of(source: SnapshotSource) -> tuple[Agreement, list[Row]]:
    """All of a snapshot, looked at as a reader does."""
    await source.open()
    agreement = await source.agree("orders", part_rows=10)
    found: list[Row] = []
    for number in range(len(agreement.parts)):
        part = b"".join([piece async for piece in source.load(agreement, number)])
        rows = await checked_part(agreement, number, part)
        found += zip(rows.tokens, rows.writers, [payload.decode() for payload in rows.payloads], strict=True)
    await source.leave(agreement)
    await source.close()
    return agreement, found


def read(folder: Path) -> tuple[Agreement, list[Row]]:
    return asyncio.run(rows_of(ParquetSource(folder.as_uri())))


def latest(rows: list[tuple[str, int, int, str]], upto: dict[str, int], after: int = 0) -> list[Row]:
    """The latest row of each number, without those that are gone."""
    found: dict[int, tuple[int, int, Row]] = {}
    for writer, token, index, row in rows:
        if after < token <= upto[writer]:
            number = json.loads(row)[0]
            found[number] = max(found.get(number, (0, 0, (0, "", ""))), (token, index, (token, writer, row)))
    return [row for _, _, row in sorted(found.values()) if json.loads(row[2])[1] != "gone"]


def test_the_latest_of_each_key(bench: Bench) -> None:
    report = run(bench, tombstone="status=gone")
    upto = {"w1": 290, "w2": 281}
    wanted = latest(bench.table(), upto)
    agreement, rows = read(bench.folder / "snapshot")
    assert rows == wanted
    assert 20 < len(wanted) < 40
    assert (report["rows"], report["positions"], report["floors"]) == (len(wanted), upto, {})
    assert agreement.positions == upto
    assert 10 <= agreement.parts[0].rows < 13
    assert agreement.parts[-1].upto == 290

    async def accepted() -> None:
        """By a reader's checks: no row of the table is neither in it nor behind it."""
        store = open_store(bench.url, Registry([orders]))
        await store.open()
        await check_log(agreement, store, patience=0.0)
        await store.close()

    asyncio.run(accepted())
    bench.archived_by_hand(batch_rows=100)
    bench.sql("DELETE FROM busrep_facts")
    report = run(bench, "of the archive", archive=bench.root.url, store=None, tombstone="status=gone")
    again, rows = read(bench.folder / "of the archive")
    assert rows == wanted
    assert (again.positions, again.epoch, report["from"]) == (upto, agreement.epoch, "archive")


def test_all_rows_are_the_stores_own_snapshot(bench: Bench) -> None:
    bench.sql("UPDATE busrep_positions SET floor = 20 WHERE writer = 'w1'")
    bench.sql("DELETE FROM busrep_facts WHERE writer = 'w1' AND id <= 20")
    run(bench, all=True, streams=None, part_rows=1)
    ours, rows = read(bench.folder / "snapshot")
    theirs, wanted = asyncio.run(rows_of(open_store(bench.url, Registry([busrep.Stream("orders")]))))
    assert rows == wanted
    assert (ours.positions, ours.floors, ours.epoch) == (theirs.positions, {"w1": 20}, theirs.epoch)
    # A row a part, but facts go whole.
    assert {part.rows for part in ours.parts} == {1, 3}
    assert len(ours.parts) == len({row[0] for row in rows})


def test_nothing_is_left(bench: Bench) -> None:
    """A snapshot without a row has positions, and says that there is nothing up to them."""
    bench.sql("""UPDATE busrep_facts SET row = '[1,"gone"]'""")
    report = run(bench, tombstone="status=gone")
    agreement, rows = read(bench.folder / "snapshot")
    assert (report["rows"], rows, agreement.parts) == (0, [], (PartRange(0, 290, 0),))
    bench.sql("DELETE FROM busrep_facts")
    bench.sql("UPDATE busrep_positions SET position = 0")
    report = run(bench, "empty", all=True)
    agreement, rows = read(bench.folder / "empty")
    assert (report["rows"], rows, agreement.parts) == (0, [], ())


def test_replaced_and_cleaned(bench: Bench) -> None:
    """The older snapshot's files stay until the next run, for who reads it; what a dead run left goes."""
    folder = bench.folder / "snapshot"
    run(bench, grace=0.0)
    first = set(os.listdir(folder))
    dead = folder / "part-00000-00000-deadbeef-deadbeef.parquet"
    dead.write_bytes(b"PAR1")
    (folder / "notes.txt").write_text("somebody's")
    source = ParquetSource(folder.as_uri())

    async def agreed() -> tuple[Agreement, bytes]:
        await source.open()
        agreement = await source.agree("orders", part_rows=1)
        return agreement, b"".join([piece async for piece in source.load(agreement, 0)])

    before, part = asyncio.run(agreed())
    bench.write("w2", [(400, text(400))], upto=400)
    assert run(bench, grace=0.0)["replaced"]
    assert not dead.exists()
    assert first < set(os.listdir(folder))

    async def load() -> bytes:
        return b"".join([piece async for piece in source.load(before, 0)])

    assert asyncio.run(load()) == part
    assert run(bench, grace=0.0)["removed_files"] == len(first) - 1
    found = {name for name in os.listdir(folder) if name in first}
    assert found == {NAME}
    assert (folder / "notes.txt").exists()
    assert read(folder)[0].positions["w2"] == 400


def test_pruned_while_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again, at the floor that there is now."""
    rows = FromTable.rows

    def pruned(self: FromTable, *told: Any) -> DataFrame:
        frame = rows(self, *told)
        monkeypatch.setattr(FromTable, "rows", rows)
        bench.sql("UPDATE busrep_positions SET floor = 30")
        bench.sql("DELETE FROM busrep_facts WHERE id <= 30")
        return frame

    monkeypatch.setattr(FromTable, "rows", pruned)
    assert run(bench)["floors"] == {"w1": 30, "w2": 30}
    agreement, found = read(bench.folder / "snapshot")
    assert agreement.floors == {"w1": 30, "w2": 30}
    assert {row[0] for row in found} <= set(range(31, 291))
    assert len(list((bench.folder / "snapshot").glob("part-*"))) == len(agreement.parts)


def test_a_database_that_is_replaced_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writing.write

    def replaced(self: Writing, *told: Any) -> Any:
        found = write(self, *told)
        bench.sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", [("f" * 32,)])
        return found

    monkeypatch.setattr(Writing, "write", replaced)
    with pytest.raises(EpochChanged):
        run(bench)
    assert os.listdir(bench.folder / "snapshot") == []


def test_a_bad_row(bench: Bench) -> None:
    bench.sql("UPDATE busrep_facts SET row = '{}' WHERE id = 33")
    with pytest.raises(PySparkException) as caught:
        run(bench)
    assert "stream 'orders', token 33: an array is needed" in reason(caught.value)
    assert not list(bench.folder.glob("snapshot/*"))


def test_what_does_not_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            run(bench, **options)

    refused("either --key", key=None)
    refused("either --key", key="number", all=True)
    refused("--key needs --streams", streams=None)
    refused("has no field 'size'; there are: number, status", key="size")
    refused("each once", key="number,number")
    refused("--tombstone goes with --key", all=True, tombstone="status=gone")
    refused("FIELD=VALUE is needed", tombstone="status")
    refused("has no field 'deleted'", tombstone="deleted=true")
    refused("VALUE is JSON", tombstone="number=x")
    refused("--store URL is needed", store=None)
    refused("there is no archive", archive=str(bench.folder / "nowhere"))
    (bench.folder / "snapshot").mkdir()
    manifest = bench.folder / "snapshot" / NAME
    manifest.write_text('{"name": "a web page"}')
    refused("is no manifest of a snapshot")
    manifest.unlink()
    run(bench)
    told = orjson.loads(manifest.read_bytes()) | {"stream": "payments"}
    manifest.write_bytes(orjson.dumps(told))
    refused("is of stream 'payments'")
    manifest.unlink()
    # Another run that thinks that ours is dead.
    publish = Writing.publish

    def cleaned(self: Writing, made: Any) -> None:
        (bench.folder / "snapshot" / made.files[0].file).unlink()
        publish(self, made)

    monkeypatch.setattr(Writing, "publish", cleaned)
    refused("is another job writing there")
    assert not manifest.exists()


def test_a_damaged_archive(bench: Bench) -> None:
    bench.archived_by_hand()
    (file,) = bench.files()
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(PySparkException) as caught:
        run(bench, archive=bench.root.url)
    assert "is damaged" in reason(caught.value)
    file.unlink()
    with pytest.raises(PySparkException) as caught:
        run(bench, archive=bench.root.url)
    assert "has lost" in reason(caught.value)
    assert not (bench.folder / "snapshot" / NAME).exists()


def test_facts_are_not_cut(tmp_path: Path) -> None:
    """Wherever batches of rows end."""
    tokens = [1, 2, 2, 2, 3, 5, 5, 8, 9, 9]
    for size in range(1, 11):
        files = PartFiles(Root(str(tmp_path / str(size))), "orders", "run", 0, 2)
        for at in range(0, len(tokens), size):
            some = tokens[at : at + size]
            arrays = [pyarrow.array(some), pyarrow.array(["w"] * len(some)), pyarrow.array(["1"] * len(some))]
            files.add(pyarrow.RecordBatch.from_arrays(arrays, schema=PARTS))
        files.flush()
        assert [(part.first, part.last, part.rows) for part in files.done] == [(1, 2, 4), (3, 5, 3), (8, 9, 3)]
    broken = PartFiles(Root(str(tmp_path)), "orders", "run", 0, 2)
    broken.add(pyarrow.RecordBatch.from_pylist([{"token": 1, "writer": "w", "row": "[\n]"}], schema=PARTS))
    with pytest.raises(RowError, match="line break"):
        broken.flush()


def test_ranges() -> None:
    def part(first: int, last: int, rows: int = 2) -> Part:
        return Part("x", first, last, rows, 100, "0" * 64)

    assert ranges_of([part(5, 9), part(20, 21)], 30) == [PartRange(0, 9, 2), PartRange(9, 30, 2)]
    assert ranges_of([part(0, 0, 0)], 30) == [PartRange(0, 30, 0)]
    assert ranges_of([], 0) == []
    with pytest.raises(ValueError, match="begins at 9"):
        ranges_of([part(5, 9), part(9, 21)], 30)


@attrs.frozen
class Odd:
    name: str | None
    counts: dict[str, int]
    flag: bool


ODD = [busrep.Stream("odd", Odd)]


def test_keys_of_several_kinds() -> None:
    where = f"{__name__}:ODD"
    keys = read_keys("odd", where, "name, flag", "flag=true")
    assert keys.schema().startswith("key_0 string, key_1 boolean, gone boolean, writer string")
    assert keys.tombstone == ("flag", True)
    assert read_keys("odd", where, "flag", "name=null").tombstone == ("name", None)
    assert read_keys("odd", where, "flag", "name=true").tombstone == ("name", "true")
    with pytest.raises(ConfigError, match="a map cannot be a key"):
        read_keys("odd", where, "counts", None)


# -- with readers, and processes that are killed --------------------------------------------------------------


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


def killed(bench: Bench, *targets: Path) -> None:
    """The job, once for each target, killed with all that it has started once it has written some parts of each."""
    scratch = bench.folder / "scratch"
    scratch.mkdir()
    options = {"store": bench.url, "stream": "orders", "all": True, "part_rows": 1, "partitions": 4}
    told = {"folder": str(scratch), "options": [{**options, "to": str(target)} for target in targets]}
    before = [set(target.glob("*")) for target in targets]
    with (
        (scratch / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.spark.snapshot_job"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=stderr, text=True, cwd=Path(__file__).parent.parent.parent, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            late = time.monotonic() + 200
            while any(len(set(target.glob("*")) - old) < 20 for target, old in zip(targets, before, strict=True)):
                assert process.poll() is None, (scratch / "stderr").read_text()
                assert time.monotonic() < late
                time.sleep(0.002)
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL
        finally:
            end_session(process.pid)


@long
def test_killed(bench: Bench) -> None:
    """In the middle: no snapshot, or the older one whole; and the next run is as any other."""
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


def test_the_docs(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program prints what stands below it; the commands' options exist."""
    bench = Bench(spark, tmp_path)
    bench.write("w1", [(1, '[1,"new"]'), (3, '[2,"new"]'), (4, '[1,"paid"]')], upto=4)
    bench.write("w2", [(2, '[3,"gone"]'), (5, '[2,"paid"]')], upto=5)
    (code,), (prints,), (shell,) = (blocks("Snapshot", kind) for kind in ("python", "text", "sh"))
    names = {"STORE": bench.url, "STREAMS": DECLARED, "FOLDER": str(tmp_path / "snapshot"), "spark": spark, "job": job}
    exec(compile(code, "docs/pipeline.md, Snapshot", "exec"), names)
    assert re.sub(r"[\d,]+ bytes", "BYTES bytes", capsys.readouterr().out) == prints
    assert [row[0] for row in read(tmp_path / "snapshot")[1]] == [4, 5]
    known = {field.name for field in attrs.fields(snapshot.Options)}
    for line in shell.splitlines():
        command = shlex.split(line, comments=True)
        assert command[:3] == ["busrep", "pipeline", "snapshot"]
        assert {one[2:].replace("-", "_") for one in command if one.startswith("--")} <= known
