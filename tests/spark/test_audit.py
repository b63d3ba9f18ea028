"""The audit: nothing planted, nothing found; whatever is planted is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow
import pyarrow.compute as pc
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from busrep.spark import archived
from busrep.spark.archive_rows import RowFiles
from busrep.spark.archive_store import load
from busrep.spark.audit_sums import differences, differing, merged
from tests.spark.archives import Bench, orders


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """An archive of four batches by two writers."""
    made = Bench(spark, tmp_path)
    made.write("w1", orders(range(1, 400, 2)), upto=399)
    made.write("w2", [*orders(range(2, 400, 2)), (400, "[400]"), (400, "[4001]")], upto=400)
    made.archived_by_hand(120)
    assert len(made.files()) == 4
    return made


def kinds(report: dict[str, Any]) -> set[str]:
    return {one["kind"] for one in report["findings"]}


def named(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    return [(one["writer"], one["token"], one["kind"]) for one in report["differences"]]


def rewrite(bench: Bench, batch: int, change: Callable[[pyarrow.Table], pyarrow.Table], *, honest: bool) -> None:
    """Change a data file; ``honest``: its manifest is made to say what the file has now."""
    manifest = Path(bench.root.path(f"_busrep/orders/{archived.manifest_name(batch)}"))
    found = json.loads(manifest.read_text())
    path = Path(bench.root.path(f"stream=orders/{found['files'][0]['file']}"))
    table = change(parquet.ParquetFile(path).read())
    path.unlink()
    if not honest:
        parquet.write_table(table, path, compression="zstd")
        return
    files = RowFiles(bench.root, "orders", "", batch, 0, 10**6)
    for one in table.combine_chunks().to_batches():
        files.add(one)
    done = files.close()
    found["files"] = [attrs.asdict(file) for file in done]
    manifest.write_text(json.dumps(found))


def test_identical(bench: Bench) -> None:
    report = bench.audit()
    assert report["ok"]
    assert report["writers"] == {
        "w1": {"after": 0, "upto": 399, "same": True, "differing_buckets": 0, "archive_rows": 200, "table_rows": 200},
        "w2": {"after": 0, "upto": 400, "same": True, "differing_buckets": 0, "archive_rows": 201, "table_rows": 201},
    }
    assert (report["archive_rows"], report["not_compared"]) == (401, 0)


def test_the_table_goes_on_growing(bench: Bench) -> None:
    bench.write("w1", orders(range(401, 500)), upto=500)
    bench.write("w3", orders([501]), upto=501)
    report = bench.audit()
    assert report["ok"]
    assert report["writers"]["w1"]["table_rows"] == 200


@pytest.mark.parametrize("honest", [True, False])
def test_rows_that_are_lost(bench: Bench, honest: bool) -> None:
    gone = [133, 134, 177]
    rewrite(bench, 1, lambda t: t.filter(pc.invert(pc.is_in(t["token"], pyarrow.array(gone)))), honest=honest)
    report = bench.audit()
    assert named(report) == [("w1", 133, "lost"), ("w2", 134, "lost"), ("w1", 177, "lost")]
    assert kinds(report) == (set() if honest else {"file"})
    assert report["writers"]["w1"]["archive_rows"] == 198


@pytest.mark.parametrize("honest", [True, False])
def test_rows_that_are_there_twice(bench: Bench, honest: bool) -> None:
    rewrite(bench, 1, lambda t: pyarrow.concat_tables([t, t.slice(7, 2)]), honest=honest)
    report = bench.audit()
    assert [kind for _, _, kind in named(report)] == ["duplicate"] * 2
    assert kinds(report) == (set() if honest else {"file"})


@pytest.mark.parametrize("column", ["row", "committed_at", "index"])
def test_changed_bytes(bench: Bench, column: str) -> None:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        rows = table.to_pylist()
        at = next(number for number, row in enumerate(rows) if row["token"] == 250)
        values = table[column].to_pylist()
        values[at] = {"row": '[250,"New"]', "index": 1}.get(column, values[0])
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, pyarrow.array(values, table.schema.field(column).type))

    rewrite(bench, 2, change, honest=True)
    report = bench.audit()
    assert named(report)[0][:2] == ("w2", 250)
    assert {kind for _, _, kind in named(report)} == ({"lost", "extra"} if column == "index" else {"changed"})


def test_bytes_changed_on_the_disk(bench: Bench) -> None:
    path = bench.files()[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    report = bench.audit()
    assert kinds(report) == {"file"}
    assert path.name in report["findings"][0]["text"]


def test_rows_swapped_between_writers(bench: Bench) -> None:
    def swap(table: pyarrow.Table) -> pyarrow.Table:
        values = [
            {121: "w2", 122: "w1"}.get(token, writer)
            for token, writer in zip(table["token"].to_pylist(), table["writer"].to_pylist(), strict=True)
        ]
        return table.set_column(0, "writer", pyarrow.array(values))

    rewrite(bench, 1, swap, honest=True)
    report = bench.audit()
    assert {(token, kind) for _, token, kind in named(report)} == {(121, "other writer"), (122, "other writer")}
    assert {name: one["archive_rows"] for name, one in report["writers"].items()} == {"w1": 200, "w2": 201}


def test_a_file_that_is_gone(bench: Bench) -> None:
    path = bench.files()[1]
    path.unlink()
    report = bench.audit()
    assert kinds(report) == {"no file"}
    assert named(report)[0] == ("w1", 121, "lost")


def test_a_truncated_file(bench: Bench) -> None:
    path = bench.files()[1]
    path.write_bytes(path.read_bytes()[:-300])
    report = bench.audit()
    assert kinds(report) == {"file"}
    assert named(report)[0] == ("w1", 121, "lost")


def test_a_manifest_lost_in_the_middle(bench: Bench) -> None:
    Path(bench.root.path("_busrep/orders/0000000001.json")).unlink()
    report = bench.audit()
    assert kinds(report) == {"missing"}
    assert "0000000001.json" in report["findings"][0]["text"]
    assert named(report)[0] == ("w1", 121, "lost")


def test_a_manifest_lost_at_the_end(bench: Bench) -> None:
    Path(bench.root.path("_busrep/orders/0000000003.json")).unlink()
    start = {"checkpoint": "", "base": 1, "epoch": "e", "positions": {}}
    Path(bench.root.path("_busrep/orders/archive.json")).write_text(json.dumps(start))
    commits = Path(bench.root.path("_busrep/orders/checkpoint/commits"))
    commits.mkdir(parents=True)
    for name in ("0", "1", "2", ".2.crc"):
        (commits / name).touch()
    report = bench.audit()
    assert [one["text"] for one in report["findings"]] == [
        "Spark has noted batch 3 as done, and the last manifest is of 2"
    ]


@pytest.mark.parametrize("change", ["{", {"version": 2}, {"upto": {"w1": 50}}, {"epoch": "x"}, {"stream": "payments"}])
def test_manifests_that_were_changed(bench: Bench, change: str | dict[str, Any]) -> None:
    path = Path(bench.root.path("_busrep/orders/0000000001.json"))
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change}))
    report = bench.audit()
    assert not report["ok"]
    assert kinds(report) & {"damaged", "positions", "epoch"}


def test_a_table_that_was_pruned_is_compared_above_its_floor(bench: Bench) -> None:
    bench.sql("DELETE FROM busrep_facts WHERE writer = 'w1' AND id <= 201")
    bench.sql("UPDATE busrep_positions SET floor = 201 WHERE writer = 'w1'")
    report = bench.audit()
    assert report["ok"]
    assert report["writers"]["w1"]["after"] == 201
    assert report["writers"]["w1"]["table_rows"] == 99
    assert report["not_compared"] == 101
    rewrite(bench, 3, lambda t: t.slice(1), honest=True)
    assert named(bench.audit()) == [("w1", 361, "lost")]


def test_a_table_that_lost_rows(bench: Bench) -> None:
    bench.sql("DELETE FROM busrep_facts WHERE id IN (15, 16)")
    assert named(bench.audit()) == [("w1", 15, "extra"), ("w2", 16, "extra")]


def test_an_archive_that_is_ahead_of_the_table(bench: Bench) -> None:
    bench.sql("UPDATE busrep_positions SET position = 300 WHERE writer = 'w1'")
    report = bench.audit()
    assert kinds(report) == {"ahead"}
    bench.sql("DELETE FROM busrep_positions WHERE writer = 'w1'")
    assert kinds(bench.audit()) == {"ahead"}


def test_another_log(bench: Bench) -> None:
    bench.sql("UPDATE busrep_meta SET value = 'another' WHERE key = 'epoch'")
    assert kinds(bench.audit()) == {"epoch"}


def test_readers(bench: Bench) -> None:
    insert = "INSERT INTO busrep_readers (reader, stream, writer, position, epoch, saved_at) SELECT ?, 'orders', ?, ?, "
    insert += "value, 0 FROM busrep_meta WHERE key = 'epoch'"
    bench.sql(insert, [("search", "w1", 390), ("search", "w2", 400), ("mail", "", 0)])
    report = bench.audit()
    assert report["ok"]
    assert {writer: one["behind_archive"] for writer, one in report["readers"]["search"].items()} == {"w1": 9, "w2": 0}
    bench.sql("UPDATE busrep_readers SET position = 900 WHERE writer = 'w1'")
    report = bench.audit()
    assert [one["text"] for one in report["findings"]] == [
        "reader search has handled writer w1 up to 900, and the table has proven 399"
    ]


def test_no_archive_is_not_identical(bench: Bench, tmp_path: Path) -> None:
    report = bench.audit(archive=str(tmp_path / "nothing"))
    assert kinds(report) == {"missing"}


def test_the_differences_named_are_the_first(bench: Bench) -> None:
    bench.sql("DELETE FROM busrep_facts")
    report = bench.audit(differences=7)
    assert [token for _, token, _ in named(report)] == [1, 2, 3, 4, 5, 6, 7]
    assert load(bench.root, "orders").checked().rows == 401


# -- without Spark --------------------------------------------------------------------------------------------

A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize(
    ("archive", "table", "found"),
    [
        ([("w", 1, 0, A)], [("w", 1, 0, A)], []),
        ([], [("w", 1, 0, A)], [("w", 1, "lost")]),
        ([("w", 1, 0, A)], [], [("w", 1, "extra")]),
        ([("w", 1, 0, A)] * 2, [("w", 1, 0, A)], [("w", 1, "duplicate")]),
        ([("w", 1, 0, A), ("w", 1, 0, B)], [("w", 1, 0, A)], [("w", 1, "duplicate")]),
        ([("w", 1, 0, B)], [("w", 1, 0, A)], [("w", 1, "changed")]),
        ([("v", 1, 0, B)], [("w", 1, 0, A)], [("v", 1, "other writer"), ("w", 1, "other writer")]),
        ([("w", 2, 0, A)], [("w", 1, 0, A)], [("w", 1, "lost"), ("w", 2, "extra")]),
    ],
)
def test_kinds_of_differences(archive: Sequence[Any], table: Sequence[Any], found: list[Any]) -> None:
    assert [(one["writer"], one["token"], one["kind"]) for one in differences(archive, table)] == found


def test_sums_of_several_tasks() -> None:
    one = merged([("w", 0, 2, "ff"), ("w", 0, 1, "1"), ("v", 3, 1, "5")])
    assert one == {("w", 0): (3, 256), ("v", 3): (1, 5)}
    assert differing(one, {("w", 0): (3, 256), ("v", 3): (1, 6), ("w", 1): (1, 1)}) == [("w", 1), ("v", 3)]
    assert merged([("w", 0, 1, "f" * 32), ("w", 0, 1, "1")]) == {("w", 0): (2, 0)}
