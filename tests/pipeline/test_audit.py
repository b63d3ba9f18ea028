"""The audit without Spark: nothing planted, nothing found; whatever is planted is found and named."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pyarrow
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from busrep.errors import ConfigError, PositionTooOld, Unavailable
from busrep.spark import archived, audit_files, audit_log, audit_table, batches, job
from busrep.spark.archive_rows import SCHEMA, RowFiles
from busrep.spark.archive_store import load
from busrep.spark.archived import DataFile, Manifest
from busrep.spark.audit_files import planned
from busrep.spark.audit_sums import Sums, differences, differing, merged
from busrep.spark.jobs import audit
from busrep.spark.table import Table
from tests.spark.archives import Bench, Local, orders


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An archive of four batches by two writers."""
    monkeypatch.setattr(audit_log, "WAIT", 0.0)
    made = Bench(Local(), tmp_path)
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
        "w1": {
            "after": 0,
            "upto": 399,
            "table_upto": 399,
            "same": True,
            "differing_buckets": 0,
            "archive_rows": 200,
            "table_rows": 200,
        },
        "w2": {
            "after": 0,
            "upto": 400,
            "table_upto": 400,
            "same": True,
            "differing_buckets": 0,
            "archive_rows": 201,
            "table_rows": 201,
        },
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


# -- planted, more of it --------------------------------------------------------------------------------------


def set_values(column: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[pyarrow.Table], pyarrow.Table]:
    """Change the values of a column, row by row."""

    def work(table: pyarrow.Table) -> pyarrow.Table:
        place = table.schema.get_field_index(column)
        values = pyarrow.array([change(row) for row in table.to_pylist()], table.schema.field(column).type)
        return table.set_column(place, column, values)

    return work


def edit_manifest(bench: Bench, batch: int, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = Path(bench.root.path(f"_busrep/orders/{archived.manifest_name(batch)}"))
    found = json.loads(manifest.read_text())
    change(found)
    manifest.write_text(json.dumps(found))


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(("batch", "at", "token"), [(0, 0, 1), (0, 119, 120), (1, 0, 121), (3, 0, 361), (3, 40, 400)])
def test_a_row_lost_at_an_end(bench: Bench, batch: int, at: int, token: int, size: int) -> None:
    rewrite(bench, batch, lambda t: t.filter(pyarrow.array([n != at for n in range(len(t))])), honest=True)
    report = bench.audit(bucket=size)
    assert [(place, kind) for _, place, kind in named(report)] == [(token, "lost")]


def test_a_writer_that_is_lost(bench: Bench) -> None:
    for batch in range(4):
        rewrite(bench, batch, lambda t: t.filter(pc.equal(t["writer"], "w1")), honest=True)
    report = bench.audit()
    assert {(who, kind) for who, _, kind in named(report)} == {("w2", "lost")}
    assert report["writers"]["w2"]["archive_rows"] == 0


def test_a_batch_without_its_files(bench: Bench) -> None:
    edit_manifest(bench, 2, lambda found: found.update(files=[]))
    assert named(bench.audit())[0] == ("w1", 241, "lost")


def test_rows_that_changed_places(bench: Bench) -> None:
    order = [1, 0, *range(2, 120)]
    rewrite(bench, 1, lambda t: t.take([3, *range(1, 3), 0, *range(4, 120)]), honest=False)
    report = bench.audit()
    assert kinds(report) == {"file"}
    texts = {1: '[2,"new"]', 2: '[1,"new"]'}  # the same texts, on the whole, and as many
    rewrite(bench, 0, set_values("row", lambda row: texts.get(row["token"], row["row"])), honest=True)
    assert named(bench.audit())[:2] == [("w1", 1, "changed"), ("w2", 2, "changed")]
    assert len(order) == 120


@pytest.mark.parametrize("size", [100, 10**6])
def test_texts_swapped_within_a_writer(bench: Bench, size: int) -> None:
    texts = {123: '[125,"new"]', 125: '[123,"new"]'}
    rewrite(bench, 1, set_values("row", lambda row: texts.get(row["token"], row["row"])), honest=True)
    assert named(bench.audit(bucket=size)) == [("w1", 123, "changed"), ("w1", 125, "changed")]


def test_a_row_in_the_files_of_two_batches(bench: Bench) -> None:
    first = parquet.ParquetFile(bench.files()[0]).read()
    rewrite(bench, 3, lambda t: pyarrow.concat_tables([first.slice(5, 1), t]), honest=True)
    report = bench.audit()
    assert kinds(report) == {"positions"}
    assert named(report) == [("w2", 6, "duplicate")]


def test_a_row_under_two_dates(bench: Bench) -> None:
    """A file for each of the dates, both honest."""
    later = set_values("committed_at", lambda row: row["committed_at"].replace(day=12))
    rewrite(bench, 1, lambda t: pyarrow.concat_tables([t, later(t.slice(9, 1))]), honest=False)
    edit_manifest(bench, 1, lambda found: None)
    rewrite_many(bench, 1)
    report = bench.audit()
    assert named(report) == [("w2", 130, "duplicate")]


def rewrite_many(bench: Bench, batch: int) -> None:
    """The batch's one file anew, as one a date, with an honest manifest."""

    def change(found: dict[str, Any]) -> None:
        path = Path(bench.root.path(f"stream=orders/{found['files'][0]['file']}"))
        table = parquet.ParquetFile(path).read()
        path.unlink()
        days = table["committed_at"].to_pylist()
        done = []
        for day in sorted({time.day for time in days}):
            files = RowFiles(bench.root, "orders", "", batch, 0, 10**6)
            for one in table.filter(pyarrow.array([time.day == day for time in days])).combine_chunks().to_batches():
                files.add(one)
            done += files.close()
        found["files"] = [attrs.asdict(file) for file in done]

    edit_manifest(bench, batch, change)


def test_a_batch_of_two_dates_is_sound(bench: Bench) -> None:
    """Not in order from file to file: what was committed late has an older date than its neighbours."""
    late = set_values("committed_at", lambda row: row["committed_at"].replace(day=11 + row["token"] % 7 // 6))
    rewrite(bench, 1, late, honest=False)
    rewrite_many(bench, 1)
    with contextlib.closing(sqlite3.connect(bench.path)) as connection, connection:
        connection.execute(
            "UPDATE busrep_facts SET committed_at = committed_at + 86400 WHERE id % 7 = 6 AND id BETWEEN 121 AND 240"
        )
    for size in (10, 100, 10**6):
        report = bench.audit(bucket=size)
        assert (report["findings"], report["differences"]) == ([], [])
    bench.compact()
    assert bench.audit()["ok"]


def test_a_file_in_the_folder_of_another_date(bench: Bench) -> None:
    path = bench.files()[1]
    folder = path.parent.parent / "date=2026-05-13"
    folder.mkdir()
    path.rename(folder / path.name)
    edit_manifest(bench, 1, lambda found: found["files"][0].update(file=f"date=2026-05-13/{path.name}"))
    report = bench.audit()
    assert kinds(report) == {"file"}
    assert "rows of 2026-05-11 in the folder of 2026-05-13" in report["findings"][0]["text"]


@pytest.mark.parametrize("change", [{"min_token": 122}, {"max_token": 239}, {"min_token": 1}, {"max_token": 10**9}])
def test_tokens_by_which_others_choose_files(bench: Bench, change: dict[str, int]) -> None:
    edit_manifest(bench, 1, lambda found: found["files"][0].update(change))
    assert kinds(bench.audit()) == {"file"}


@pytest.mark.parametrize("writer", ["w2", "w3", "a,b c"])
def test_a_row_under_another_writer(bench: Bench, writer: str) -> None:
    rewrite(bench, 1, set_values("writer", lambda row: writer if row["token"] == 133 else row["writer"]), honest=True)
    report = bench.audit()
    assert not report["ok"]
    assert ("w1", 133, "other writer" if writer == "w2" else "lost") in named(report)
    assert kinds(report) == (set() if writer == "w2" else {"positions"})


def test_a_row_behind_the_end(bench: Bench) -> None:
    bench.write("w1", orders([401]), upto=401)
    rewrite(bench, 3, set_values("token", lambda row: 401 if row["token"] == 399 else row["token"]), honest=True)
    report = bench.audit()
    assert kinds(report) == {"positions"}
    assert named(report) == [("w1", 399, "lost")]


def test_files_that_nobody_names_are_no_part_of_it(bench: Bench) -> None:
    path = bench.files()[1]
    (path.parent / "0000000001-00000-0123abcd.parquet").write_bytes(path.read_bytes())
    assert bench.audit()["ok"]


@pytest.mark.parametrize("column", ["token", "index", "writer", "row", "committed_at"])
def test_nulls(bench: Bench, column: str) -> None:
    rewrite(bench, 1, set_values(column, lambda row: None if row["token"] == 150 else row[column]), honest=False)
    report = bench.audit()
    assert named(report)[0] == ("w2", 150, "changed") if column == "committed_at" else ("w1", 121, "lost")
    assert "file" in kinds(report)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("index", pyarrow.string()),
        ("token", pyarrow.int32()),
        ("row", pyarrow.large_string()),
        ("row", pyarrow.binary()),
    ],
)
def test_a_column_of_another_type(bench: Bench, column: str, kind: pyarrow.DataType) -> None:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, table[column].cast(kind))

    rewrite(bench, 1, change, honest=False)
    edit_manifest(bench, 1, lambda found: found["files"][0].update(bytes=bench.files()[1].stat().st_size))
    assert kinds(bench.audit()) == {"file"}


def test_times_that_there_are_not(bench: Bench) -> None:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        times = [2**62 if token == 150 else time for token, time in zip(
            table["token"].to_pylist(), table["committed_at"].cast(pyarrow.int64()).to_pylist(), strict=True
        )]  # fmt: skip
        return table.set_column(4, "committed_at", pyarrow.array(times).cast(SCHEMA.field("committed_at").type))

    rewrite(bench, 1, change, honest=False)
    edit_manifest(bench, 1, lambda found: found["files"][0].update(bytes=bench.files()[1].stat().st_size))
    report = bench.audit()
    assert kinds(report) == {"file"}
    assert named(report) == [("w2", 150, "changed")]


def test_bytes_that_are_no_text(bench: Bench) -> None:
    bench.sql("UPDATE busrep_facts SET row = CAST(x'5b22ff225d' AS TEXT) WHERE id = 150")
    raw = set_raw(150, b'["\xff"]')
    rewrite(bench, 1, raw, honest=True)
    assert bench.audit()["ok"]
    rewrite(bench, 1, set_raw(150, b'["\xfe"]'), honest=True)
    assert named(bench.audit()) == [("w2", 150, "changed")]


def set_raw(token: int, content: bytes) -> Callable[[pyarrow.Table], pyarrow.Table]:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        rows = table["row"].cast(pyarrow.binary()).to_pylist()
        texts = [content if at == token else row for at, row in zip(table["token"].to_pylist(), rows, strict=True)]
        column = pyarrow.chunked_array([pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())])
        return table.set_column(table.schema.get_field_index("row"), "row", column)

    return change


def test_large_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than what is hashed at a time."""
    monkeypatch.setattr(batches, "PIECE_BYTES", 1_000_000)
    large = [(token, f'["{chr(token % 26 + 65) * 700_000}"]') for token in (401, 402, 403)]
    bench.write("w1", large, upto=403)
    bench.archived_by_hand()
    assert bench.audit()["ok"]
    changed = set_values("row", lambda row: row["row"][:-3] + '!"]' if row["token"] == 402 else row["row"])
    rewrite(bench, 4, changed, honest=True)
    assert named(bench.audit()) == [("w1", 402, "changed")]


def test_a_row_of_a_fact_that_is_lost(bench: Bench) -> None:
    rewrite(bench, 3, lambda t: t.slice(0, len(t) - 1), honest=True)
    assert [(one["token"], one["index"]) for one in bench.audit()["differences"]] == [(400, 1)]


def test_what_the_last_manifest_says_is_held_against_spark_s_log(bench: Bench) -> None:
    """A writer that is missing there would be one whose rows nobody looks for."""
    noted(bench, {"w1": 399, "w2": 400})
    assert bench.audit()["ok"]
    noted(bench, {"w1": 399, "w2": 400, "w3": 0})
    assert bench.audit()["ok"]
    noted(bench, {"w1": 399, "w2": 400, "w3": 380})
    assert kinds(bench.audit()) == {"positions"}


def noted(bench: Bench, upto: dict[str, int], start: dict[str, int] | None = None) -> None:
    """As the job and Spark note that batch 3 ends there."""
    folder = Path(bench.root.path("_busrep/orders"))
    note = {"checkpoint": "", "base": 0, "epoch": "e", "positions": start or {"w1": 0}}
    (folder / "archive.json").write_text(json.dumps(note))
    (folder / "checkpoint/offsets").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint/offsets/3").write_text("v1\n{}\n" + json.dumps({"epoch": "e", "positions": upto}))


def test_where_the_first_manifest_begins_is_held_against_the_job_s_note(bench: Bench) -> None:
    rewrite(bench, 0, lambda t: t.slice(4), honest=True)
    edit_manifest(bench, 0, lambda found: found.update(after={"w1": 4, "w2": 4}))
    noted(bench, {"w1": 399, "w2": 400})
    assert kinds(bench.audit()) == {"positions"}
    noted(bench, {"w1": 399, "w2": 400}, {"w1": 4, "w2": 4})
    assert bench.audit()["ok"]


@pytest.mark.parametrize("note", ["[]", "{", '{"checkpoint": 5, "base": "x", "positions": {}}', '{"positions": 5}'])
def test_a_damaged_note(bench: Bench, note: str) -> None:
    Path(bench.root.path("_busrep/orders/archive.json")).write_text(note)
    assert kinds(bench.audit()) == {"damaged"}


def test_streams_whose_manifests_are_all_gone(bench: Bench, tmp_path: Path) -> None:
    (Path(bench.root.url) / "stream=payments").mkdir()
    told = audit.Options(store=bench.url, archive=bench.root.url)
    with pytest.raises(ConfigError, match="'payments', which the store does not have"):
        audit.run(bench.spark, told, job.silent)
    shutil.rmtree(Path(bench.root.url) / "_busrep")
    (Path(bench.root.url) / "stream=payments").rmdir()
    report = audit.run(bench.spark, told, job.silent)
    assert not report["ok"]
    assert kinds(report["streams"]["orders"]) == {"missing"}
    report = audit.run(bench.spark, attrs.evolve(told, archive=str(tmp_path / "nothing")), job.silent)
    assert (report["ok"], report["streams"], report["not_archived"]) == (False, {}, ["orders"])
    assert "there is no archive" in audit.describe(report)


# -- meanwhile ------------------------------------------------------------------------------------------------


def pruned(bench: Bench, floor: int) -> None:
    bench.sql("DELETE FROM busrep_facts WHERE writer = 'w1' AND id <= ?", [(floor,)])
    bench.sql("UPDATE busrep_positions SET floor = ? WHERE writer = 'w1'", [(floor,)])


def test_pruned_before_it_was_read(bench: Bench) -> None:
    bench.spark.meanwhile = [lambda: pruned(bench, 51), lambda: pruned(bench, 61)]
    report = bench.audit()
    assert report["ok"]
    assert report["writers"]["w1"]["after"] == 61


def test_pruned_all_the_time(bench: Bench) -> None:
    bench.spark.meanwhile = [partial(pruned, bench, floor) for floor in (51, 61, 71)]
    with pytest.raises(PositionTooOld):
        bench.audit()


def test_pruned_between_the_table_and_the_archive(bench: Bench) -> None:
    bench.spark.meanwhile = [lambda: None, lambda: pruned(bench, 399)]
    report = bench.audit()
    assert report["ok"]
    assert report["writers"]["w1"]["table_rows"] == 200


def test_a_difference_that_is_pruned_before_it_can_be_named(bench: Bench) -> None:
    """It was one."""
    rewrite(bench, 0, lambda t: t.filter(pc.not_equal(t["token"], 31)), honest=True)
    bench.spark.meanwhile = [lambda: None, lambda: None, lambda: pruned(bench, 51)]
    report = bench.audit()
    assert kinds(report) == {"differs"}
    assert "tokens 0 to 99" in report["findings"][0]["text"]


def test_one_that_is_pruned_again_and_again(bench: Bench) -> None:
    rewrite(bench, 0, lambda t: t.filter(pc.not_equal(t["token"], 31)), honest=True)
    later = [partial(pruned, bench, floor) for floor in (51, 61, 71)]
    bench.spark.meanwhile = [lambda: None, lambda: None, *later]
    assert kinds(bench.audit()) == {"differs"}


def test_the_log_is_replaced_meanwhile(bench: Bench) -> None:
    replace = partial(bench.sql, "UPDATE busrep_meta SET value = 'another' WHERE key = 'epoch'")
    bench.spark.meanwhile = [replace]
    assert kinds(bench.audit()) == {"epoch"}


@pytest.mark.parametrize("before", [1, 2])
def test_compacted_meanwhile(bench: Bench, before: int) -> None:
    """Without a grace period files are deleted that are about to be read."""
    bench.sql("DELETE FROM busrep_facts WHERE id = 15")
    bench.spark.meanwhile = [lambda: None] * before + [lambda: bench.compact(grace=0.0)]
    report = bench.audit()
    assert (kinds(report), named(report)) == (set(), [("w1", 15, "extra")])
    assert report["files"] == 1


def test_archived_meanwhile(bench: Bench) -> None:
    def more(first: int) -> None:
        bench.write("w1", orders(range(first, first + 50)), upto=first + 49)
        bench.archived_by_hand(20)

    bench.spark.meanwhile = [partial(more, 401), partial(more, 451)]
    report = bench.audit()
    assert report["ok"]
    assert report["archive_rows"] == 401


def test_positions_come_to_the_table_later_than_to_who_hears_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a writer's heartbeats: the archive job, and readers, have them from the bus."""
    bench.sql("UPDATE busrep_positions SET position = 390")
    insert = (
        "INSERT INTO busrep_readers (reader, stream, writer, position, epoch, saved_at) "
        "SELECT 'search', 'orders', 'w1', 399, value, 0 FROM busrep_meta"
    )
    bench.sql(f"{insert} WHERE key = 'epoch'")
    assert kinds(bench.audit()) == {"ahead", "reader"}
    monkeypatch.setattr(audit_log, "WAIT", 60.0)
    beats = [390, 395, 400]

    def beat(_: float) -> None:
        bench.sql("UPDATE busrep_positions SET position = ?", [(beats.pop(0),)])

    monkeypatch.setattr(audit_log.time, "sleep", beat)
    assert bench.audit()["ok"]
    assert not beats


def test_a_replica_that_lags_is_no_difference(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.sql("UPDATE busrep_positions SET position = 390")
    log = Table.log
    monkeypatch.setattr(Table, "log", lambda self: attrs.evolve(log(self), replica=True))
    with pytest.raises(Unavailable, match="behind by more than"):
        bench.audit()


def test_writers_that_the_archive_does_not_have_yet_are_shown(bench: Bench) -> None:
    bench.write("w3", orders([501]), upto=501)
    report = bench.audit()
    assert report["ok"]
    assert (report["writers"]["w3"]["upto"], report["writers"]["w3"]["table_upto"]) == (0, 501)


def test_a_pruned_table_says_what_is_not_compared(bench: Bench) -> None:
    pruned(bench, 399)
    report = audit.run(bench.spark, audit.Options(store=bench.url, archive=bench.root.url), job.silent)
    assert "  not compared: 200 rows that the table does not have any more" in audit.describe(report).splitlines()


# -- sums -----------------------------------------------------------------------------------------------------


def rows(*found: tuple[str, int, int, str]) -> pyarrow.RecordBatch:
    writers, tokens, indexes, texts = map(list, zip(*found, strict=True)) if found else ([], [], [], [])
    columns = [writers, tokens, indexes, texts, [token * 10**6 for token in tokens]]
    return pyarrow.RecordBatch.from_arrays(
        [pyarrow.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def file_of(found: Sequence[Any], number: int) -> tuple[Manifest, DataFile]:
    name = f"date=2026-05-11/{number:010d}-00000-00000000.parquet"
    tokens = [row[1] for row in found]
    file = DataFile(name, "2026-05-11", len(found), 1, min(tokens), max(tokens), "0" * 64)
    manifest = Manifest(stream="orders", query="q", batch=number, epoch="e", after={}, upto={}, files=(file,))
    return manifest, file


@pytest.mark.parametrize("seed", range(60))
def test_however_rows_are_cut_into_files_and_tasks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are those of the table, and with one row changed they are not."""
    dice = random.Random(seed)
    monkeypatch.setattr(audit_files, "LEAST_RANGES", dice.choice([0, 1, 3]))
    size, writers = dice.choice([1, 3, 10, 1000]), ["a", "b", "c"][: dice.randint(1, 3)]
    facts = [(dice.choice(writers), token, dice.randint(1, 3)) for token in range(1, 60) if dice.random() < 0.8]
    table = [(who, token, index, "x" * dice.randint(0, 3)) for who, token, count in facts for index in range(count)]
    upto = dict.fromkeys(writers, 60)

    def of_table(change: dict[int, Any]) -> dict[Any, Any]:
        found = []
        for spans in audit_table.slices(dict.fromkeys(writers, 0), upto, size, dice.randint(1, 8)):
            sums = Sums(size, {}, upto, plan.mixed)
            for who, after, end in spans:
                part = [change.get(at, row) for at, row in enumerate(table) if row[0] == who and after < row[1] <= end]
                cut = dice.randint(0, len(part))
                for some in (part[:cut], part[cut:]):
                    sums.add(rows(*some))
            found += sums.result()
        return merged(found)

    # Files of late and of early facts, whose tokens overlap, each cut in pieces.
    late = dice.choice([0, 0.1, 0.4])
    kinds = [
        [row for row in table if (hash((seed, row[1])) % 100 < late * 100) == is_late] for is_late in (True, False)
    ]
    contents = []
    for found in kinds:
        while found:
            count = dice.randint(1, 40)
            contents.append(found[:count])
            found = found[count:]
    named_files = [file_of(found, number) for number, found in enumerate(contents)]
    plan = planned(named_files, size, dice.randint(1, 6))
    assert sorted(entry.file.file for group in plan.groups for entry in group) == [file.file for _, file in named_files]
    results = []
    for group in plan.groups:
        sums = Sums(size, {}, upto, plan.mixed)
        for entry in group:
            sums.add(rows(*contents[int(entry.file.file.partition("/")[2][:10])]))
        results += sums.result()
    mine = merged(results)
    assert differing(mine, of_table({})) == []
    at = dice.randrange(len(table))
    who, token, index, text = table[at]
    assert differing(mine, of_table({at: (who, token, index, text + "y")})) == [(who, token // size)]


def test_a_range_of_two_tasks_that_is_not_the_first_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_files, "LEAST_RANGES", 0)
    tokens = [(121, 200, 240), (125, 237), (241, 360)]
    files = [file_of([("a", token, 0, "") for token in found], number) for number, found in enumerate(tokens)]
    plan = planned(files, 10, 2)
    assert [len(group) for group in plan.groups] == [1, 2]
    assert plan.mixed == [(12, 24)]


def test_what_a_task_is_sent_does_not_grow_with_the_manifest() -> None:
    files = tuple(file_of([("a", 100 * n + 1, 0, ""), ("a", 100 * n + 99, 0, "")], n)[1] for n in range(3000))
    manifest = Manifest(
        stream="orders", query="q", batch=9**9, epoch="e", after={}, upto={"a": 9**9}, files=files, number=1,
        replaces=tuple(range(5000)),
    )  # fmt: skip
    plan = planned([(manifest, file) for file in files], 10, 4)
    assert len(pickle.dumps(plan.groups[0][0])) < 1000
    assert sum(map(len, plan.groups)) == 3000
    assert len(plan.mixed) <= len(plan.groups)


def test_lines_that_stand_behind_one_another() -> None:
    """Where one ends is part of the hash."""
    start = "2 0 2000000 "
    one, other = Sums(100, {}, {"w": 9}), Sums(100, {}, {"w": 9})
    one.add(rows(("w", 1, 0, ""), ("w", 2, 0, f"{start}b")))
    other.add(rows(("w", 1, 0, start), ("w", 2, 0, "b")))
    assert one.result() != other.result()


def test_rows_that_are_left_out() -> None:
    sums = Sums(100, {"a": 2}, {"a": 5, "b": 9})
    sums.add(rows(("a", 1, 0, ""), ("a", 3, 0, ""), ("a", 6, 0, ""), ("b", 7, 0, ""), ("c", 1, 0, "")))
    sums.add(rows(("c", 1, 0, "")))
    sums.add(rows())
    assert {(writer, count) for writer, _, count, _ in sums.result()} == {("a", 1), ("b", 1)}
    assert sums.outside == 4


def test_slices_are_of_whole_ranges() -> None:
    assert audit_table.slices({"a": 4, "b": 30}, {"a": 29, "b": 41}, 10, 2) == [
        [("a", 4, 29)], [("b", 30, 41)],
    ]  # fmt: skip
    assert audit_table.slices({"a": 9}, {"a": 10}, 10, 5) == [[("a", 9, 10)]]
    assert audit_table.slices({"a": 9}, {"a": 9}, 10, 5) == []
    assert len(audit_table.slices({"a": 0}, {"a": 10**6}, 10_000, None)) <= 8
