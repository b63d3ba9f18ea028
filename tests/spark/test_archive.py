"""The archive job: what is written, exactly once, whatever it dies of."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pyarrow
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from busrep import ConfigError, EpochChanged
from busrep.spark import archive_driver, archive_rows, archived, job
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.archive_store import load
from busrep.spark.archive_typed import dataframe
from busrep.spark.jobs import archive, stats
from tests.spark.archives import NOON, Bench, orders
from tests.spark.long import long


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    return Bench(spark, tmp_path)


def test_what_is_archived_is_what_is_in_the_table(bench: Bench) -> None:
    bench.write("w1", [*orders(range(1, 300, 2)), (301, '[301, "a b"]'), (301, "null"), (301, '"ß\\n"')], upto=305)
    bench.write("w2", orders(range(2, 300, 2)), upto=299)
    report = bench.archive(file_rows=100)
    assert report["rows"] == 302
    assert report["streams"]["orders"]["upto"] == {"w1": 305, "w2": 299}
    assert bench.archived() == bench.table()
    archive = load(bench.root, "orders").checked()
    assert [(one.batch, one.after, one.upto) for one in archive.manifests] == [(0, {}, {"w1": 305, "w2": 299})]
    for _, file in archive.files:
        found = parquet.read_table(Path(bench.root.url) / "stream=orders" / file.file)
        assert file.rows == found.num_rows <= 102
        assert (file.min_token, file.max_token) == (min(found["token"].to_pylist()), max(found["token"].to_pylist()))
    # A fact is in one file.
    assert len({file.file for _, file in archive.files if file.max_token == 301}) == 1


def test_again_means_from_there_on(bench: Bench) -> None:
    """One query after the other, on one checkpoint: the second one's last batch is not lost, nor the first one's done
    again; a manifest that was put, and of which Spark does not know, is found."""
    bench.write("w1", orders(range(1, 50)), upto=49)
    assert bench.archive(batch_rows=30)["streams"]["orders"]["batches"] == 2
    checkpoint = Path(bench.root.path("_busrep/orders/checkpoint"))
    assert sorted(path.name for path in (checkpoint / "commits").iterdir() if path.suffix != ".crc") == ["0", "1"]
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    bench.write("w1", orders(range(50, 60)), upto=60)
    bench.write("w2", orders([61]), upto=61)
    assert bench.archive()["rows"] == 11
    assert bench.archived() == bench.table()
    found = load(bench.root, "orders").checked()
    assert found.upto == {"w1": 60, "w2": 61}
    assert [one.rows for one in found.manifests] == [30, 19, 11]
    assert bench.audit()["ok"]


def test_a_query_that_fails_says_why(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 30)), upto=29)
    bench.archived_by_hand()
    bench.sql("DELETE FROM busrep_facts")
    bench.sql("UPDATE busrep_positions SET position = 99, floor = 50")
    with pytest.raises(Exception, match="below the retention floor 50"):
        bench.archive()


def test_a_file_has_one_date(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 20)), upto=19, at=NOON)
    bench.write("w2", orders(range(20, 30)), upto=29, at=NOON + dt.timedelta(days=1))
    bench.write("w1", orders(range(30, 40)), upto=39, at=NOON + dt.timedelta(hours=12, seconds=-35))
    bench.driven(0, {"w1": 39, "w2": 29})
    assert bench.archived() == bench.table()
    dates: dict[str, int] = {}
    for _, file in load(bench.root, "orders").files:
        dates[file.date] = dates.get(file.date, 0) + file.rows
    assert dates == {"2026-05-11": 24, "2026-05-12": 15}
    frame = dataframe(bench.spark, bench.root, load(bench.root, "orders"))
    assert frame.columns == ["stream", "writer", "token", "index", "row", "committed_at", "date"]
    counted = {str(row[0]): row[1] for row in frame.groupBy("date").count().collect()}
    assert counted == dates
    assert frame.filter("date = committed_at::date and stream = 'orders'").count() == 39


class Death(Exception):
    """As a kill: nothing handles it."""


@pytest.mark.parametrize("where", ["before the manifest", "after the manifest"])
def test_a_driver_that_dies(bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    bench.write("w1", orders(range(1, 60)), upto=59)
    bench.driven(0, {"w1": 29})
    put = archive_driver.put_manifest

    def dying(*args: Any) -> bool:
        if where == "after the manifest":
            put(*args)
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(archive_driver, "put_manifest", dying)
        bench.driven(1, {"w1": 59})
    assert len(bench.files()) == 2  # nobody has cleaned up
    assert bench.driven(1, {"w1": 59}).rows == (30 if where == "before the manifest" else 0)
    assert len(bench.files()) == 2
    assert bench.archived() == bench.table()
    assert bench.manifests() == ["0000000000.json", "0000000001.json"]


def test_a_driver_that_dies_in_its_first_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the archive begins is not forgotten."""
    bench.write("w1", orders(range(1, 60)), upto=59)

    def dying(*_: Any) -> bool:
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(archive_driver, "put_manifest", dying)
        bench.driven(0, {"w1": 59}, start='{"w1": 20}')
    assert bench.driven(0, {"w1": 59}, start='{"w1": 20}').rows == 39
    assert load(bench.root, "orders").checked().after == {"w1": 20}
    assert bench.driven(1, {"w1": 59}).report()["batch"] == 1
    load(bench.root, "orders").checked()


def test_a_task_that_fails_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    root, rows = bench.root, archive_rows
    files = rows.RowFiles(root, "orders", "", 0, 0, 5)
    batch = pyarrow.RecordBatch.from_pylist(
        [{"writer": "w", "token": at, "index": 0, "row": "1", "committed_at": NOON} for at in range(1, 8)], rows.SCHEMA
    )
    files.add(batch)
    assert len(bench.files()) == 1
    files.abandon()
    assert bench.files() == []


def test_a_driver_that_was_thought_to_be_dead_is_faster(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write("w1", orders(range(1, 30)), upto=29)
    put = archive_driver.put_manifest

    def late(root: Any, manifest: archived.Manifest) -> bool:
        shutil.copytree(bench.root.path("stream=orders"), bench.folder / "other")
        twins = {path: path.with_name(path.name[:-16] + "00000000.parquet") for path in bench.files()}
        for path, twin in twins.items():
            shutil.copy(path, twin)
        names = {str(path.relative_to(Path(root.url) / "stream=orders")): twin for path, twin in twins.items()}
        files = []
        for file in manifest.files:
            twin = names[file.file]
            files.append(attrs.evolve(file, file=f"{twin.parent.name}/{twin.name}"))
        assert put(root, archived.read_manifest(rewritten(manifest, files)))
        return put(root, manifest)

    monkeypatch.setattr(archive_driver, "put_manifest", late)
    assert bench.driven(0, {"w1": 29}).rows == 0
    assert bench.archived() == bench.table()
    assert [path.name[-16:] for path in bench.files()] == ["00000000.parquet"]


def rewritten(manifest: archived.Manifest, files: list[archived.DataFile]) -> bytes:
    found = json.loads(archived.write_manifest(manifest))
    found["files"] = [attrs.asdict(file) for file in files]
    return json.dumps(found).encode()


def test_a_lost_checkpoint_goes_on_where_the_archive_ends(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 70)), upto=69)
    bench.archived_by_hand(29)
    assert bench.driven(0, {"w1": 69}, checkpoint=str(bench.folder / "elsewhere")).rows == 0
    bench.write("w1", orders(range(70, 75)), upto=74)
    assert bench.driven(0, {"w1": 74}, checkpoint=str(bench.folder / "a third")).report()["batch"] == 4
    assert load(bench.root, "orders").checked().upto == {"w1": 74}
    with pytest.raises(ConfigError, match="has been used, but not for the archive"):
        bench.driven(1, {"w1": 74}, checkpoint=str(bench.folder / "elsewhere"))


def test_an_old_copy_of_the_checkpoint_is_refused(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 70)), upto=69)
    bench.driven(0, {"w1": 29})
    bench.driven(1, {"w1": 59})
    with pytest.raises(ConfigError, match="ends elsewhere than the checkpoint's"):
        bench.driven(1, {"w1": 69})
    assert len(load(bench.root, "orders").checked().manifests) == 2


def test_a_manifest_that_is_gone_stops_the_archive(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 70)), upto=69)
    bench.driven(0, {"w1": 29})
    bench.driven(1, {"w1": 59})
    Path(bench.root.path("_busrep/orders/0000000001.json")).unlink()
    with pytest.raises(ConfigError, match="manifests are missing"):
        bench.driven(2, {"w1": 69})
    Path(bench.root.path("_busrep/orders/archive.json")).write_text("{}")
    with pytest.raises(ConfigError, match="cannot be used"):
        bench.driven(2, {"w1": 69})


def test_another_epoch_is_refused(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 70)), upto=69)
    bench.archived_by_hand(30)
    bench.sql("UPDATE busrep_meta SET value = 'another' WHERE key = 'epoch'")
    with pytest.raises(EpochChanged):
        bench.driven(0, {"w1": 69})


def test_where_a_new_archive_begins(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 30)), upto=29)
    bench.sql("UPDATE busrep_positions SET floor = 10")

    def begins(start: str) -> Any:
        told = archive.Options(store=bench.url, archive=bench.root.url, start=start)
        return StreamArchive(bench.root, "orders", told).prepare(bench.url).positions

    assert begins("earliest") == {"w1": 10}
    assert begins("latest") == {"w1": 29}
    assert begins('{"w1": 20}') == {"w1": 20}
    for wrong in ("yesterday", "{", '{"w1": "1"}', "[1]"):
        with pytest.raises(ConfigError, match="--start"):
            begins(wrong)
    begins('{"w1": 20}')
    bench.archive(start='{"w1": 20}')
    assert [row[1] for row in bench.archived()] == list(range(21, 30))
    assert load(bench.root, "orders").after == {"w1": 20}


def test_fields_of_row_classes_that_grow(bench: Bench) -> None:
    bench.write("w1", orders(range(1, 10)), upto=9)
    bench.driven(0, {"w1": 9}, streams="tests.spark.archives:STREAMS")
    bench.write("w1", [(10, '[10,"old"]'), (11, '[11,"new","fragile",2.5]')], upto=11)
    bench.driven(1, {"w1": 11}, streams="tests.spark.archives:LATER")
    assert bench.archived() == bench.table()
    plain = dataframe(bench.spark, bench.root, load(bench.root, "orders"))
    found = {row.token: row.fields.asDict() for row in plain.collect()}
    assert found[9] == {"number": 9, "status": "new", "note": None, "weight": None}
    assert found[10] == {"number": 10, "status": "old", "note": "none", "weight": None}
    assert found[11] == {"number": 11, "status": "new", "note": "fragile", "weight": 2.5}
    anew = dataframe(bench.spark, bench.root, load(bench.root, "orders"), "tests.spark.archives:LATER")
    assert {row.token: row.fields.asDict() for row in anew.collect()} == {**found, **{
        token: {"number": token, "status": "new", "note": "none", "weight": None} for token in range(1, 10)
    }}  # fmt: skip
    # Files of two versions are not merged into one, and lose nothing.
    assert bench.compact(grace=0.0)["files"] == 2
    merged = dataframe(bench.spark, bench.root, load(bench.root, "orders"))
    assert {row.token: row.fields.asDict() for row in merged.collect()} == found


def test_fields_of_a_row_class_that_shrinks(bench: Bench, tmp_path: Path) -> None:
    bench.write("w1", orders(range(1, 10)), upto=9)
    bench.driven(0, {"w1": 9}, streams="tests.spark.archives:LATER")
    bench.write("w1", [(10, "[10]")], upto=10)
    bench.driven(1, {"w1": 10}, streams="tests.spark.archives:SHORT")
    bench.write("w1", orders([11]), upto=11)
    bench.driven(2, {"w1": 11}, streams="tests.spark.archives:STREAMS")
    found = {
        row.token: row.fields.asDict()
        for row in dataframe(bench.spark, bench.root, load(bench.root, "orders")).collect()
    }
    assert found[9] == {"number": 9, "status": "new", "note": "none", "weight": None}
    assert found[10] == {"number": 10, "status": None, "note": None, "weight": None}
    assert found[11] == {"number": 11, "status": "new", "note": None, "weight": None}
    assert bench.audit()["ok"]


@pytest.mark.parametrize(
    ("streams", "row", "first", "second", "field"),
    [
        ("OTHER", "[10,7]", "string", "int64", "status"),
        ("THIRD", '[10.5,"new"]', "int64", "double", "number"),
        ("DATED", '[10,["2026-05-11"]]', "string", "list<element: date32[day]>", "status"),
    ],
)
@long
def test_fields_of_another_type_are_not_read_as_one(
    bench: Bench, tmp_path: Path, streams: str, row: str, first: str, second: str, field: str
) -> None:
    """An error that names the field, and no wrong value; what does not ask for fields reads on."""
    bench.write("w1", orders(range(1, 10)), upto=9)
    bench.driven(0, {"w1": 9}, streams="tests.spark.archives:STREAMS")
    bench.write("w1", [(10, row)], upto=10)
    bench.driven(1, {"w1": 10}, streams=f"tests.spark.archives:{streams}")
    archive = load(bench.root, "orders")
    old, new = (file.file for _, file in archive.files)
    with pytest.raises(ConfigError) as raised:
        dataframe(bench.spark, bench.root, archive)
    assert f"the field {field!r} is {first} in {old}, and {second} in {new}. With streams=" in str(raised.value)
    plain = dataframe(bench.spark, bench.root, archive, fields=False)
    assert [one.row for one in plain.orderBy("token").collect()] == [one[3] for one in bench.table()]
    assert bench.audit()["ok"]
    told = stats.Options(archive=bench.root.url, to=str(tmp_path / "stats"), from_positions="2026-05-11T12:00:05Z")
    assert stats.run(bench.spark, told, job.silent)["rows"] == 6
    assert bench.compact(grace=0.0)["files"] == 2
    with pytest.raises(ConfigError, match=f"the field {field!r}"):
        dataframe(bench.spark, bench.root, load(bench.root, "orders"))
    anew = dataframe(bench.spark, bench.root, load(bench.root, "orders"), f"tests.spark.archives:{streams}")
    if streams != "THIRD":  # the old rows are none of the new class
        with pytest.raises(Exception, match="field 'status'"):
            anew.collect()
    else:
        assert [one.fields.number for one in anew.orderBy("token").collect()] == [*map(float, range(1, 10)), 10.5]


def test_an_archive_of_no_batches_is_an_empty_frame(bench: Bench) -> None:
    found = dataframe(bench.spark, bench.root, load(bench.root, "orders"))
    assert found.count() == 0
