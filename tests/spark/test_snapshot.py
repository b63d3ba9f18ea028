"""The snapshot job: what it writes is what the table says, and readers bootstrap from it."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import busrep
from busrep.core.snapshots import Agreement, PartRange
from busrep.errors import ConfigError, EpochChanged
from busrep.snapshots.parquet import ParquetSource
from busrep.snapshots.parquet_manifest import NAME
from busrep.snapshots.sources import check_log
from busrep.spark import job
from busrep.spark.failures import reason
from busrep.spark.jobs import snapshot
from busrep.spark.ranged import FromTable
from busrep.spark.snapshotting import Writing
from busrep.stores import open_store
from busrep.streams import Registry
from tests.spark.archives import Bench
from tests.spark.snapshots import DECLARED, filled, latest, orders, read, rows_of, run, text
from tests.spark.test_docs_archive import blocks


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """See `filled`."""
    return filled(spark, tmp_path)


def test_the_latest_of_each_key(bench: Bench) -> None:
    report = run(bench, tombstone="status=gone")
    upto = {"w1": 290, "w2": 281}
    wanted = latest(bench.table(), upto)
    agreement, rows = read(bench.folder / "snapshot")
    assert rows == wanted
    assert 20 < len(wanted) < 40
    assert (report["rows"], report["positions"], report["floors"]) == (len(wanted), upto, {})
    waiting = {writer: one["waiting_rows"] for writer, one in report["table_writers"]["orders"].items()}
    assert waiting.keys() >= {"w1", "w2"}
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

    def cleaned(self: Writing, made: Any, replaced: Any) -> None:
        (bench.folder / "snapshot" / made.files[0].file).unlink()
        publish(self, made, replaced)

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
