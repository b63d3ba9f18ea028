"""The statistics against the same counted by hand, of real traffic; and latencies measured while facts are written."""

from __future__ import annotations

import json
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

import busrep
from busrep import sync
from busrep.errors import ConfigError
from busrep.spark import job
from busrep.spark.jobs import stats
from busrep.spark.stats import tables as stats_tables
from busrep.spark.stats.job import _field, _window
from tests.shop import QUICK, STREAMS, Order, opened_store, orders
from tests.spark.archives import NOON, Bench
from tests.spark.long import long
from tests.spark.test_archive_captures import capture, facts_of_capture

__all__ = ["capture"]  # a fixture

SEEN = ("events", "to_device", "caches")


def tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: parquet.read_table(path).to_pylist() for path in folder.glob("*.parquet")}


def test_real_traffic(spark: SparkSession, capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_tables, "BUCKET", 100)  # several of them
    options = stats.Options(store=f"sqlite:///{capture}", stream=SEEN, to=str(tmp_path), top=5)
    report = stats.run(spark, options, job.silent)
    json.dumps(report)
    assert {*report["table_writers"]} == {*SEEN}
    found, rows = tables(tmp_path), {name: facts_of_capture()[name] for name in SEEN}
    assert report["rows"] == sum(map(len, rows.values())) == sum(one["rows"] for one in found["rates"])
    assert {one["stream"] for one in found["writers"]} == {*SEEN}
    for name, its in rows.items():
        facts = Counter((writer, token) for writer, token, _, _ in its)
        assert sum(one["facts"] for one in found["writers"] if one["stream"] == name) == len(facts)
        per_fact = Counter((writer, count) for (writer, _), count in facts.items())
        assert per_fact == {
            (one["writer"], one["rows"]): one["facts"] for one in found["rows_per_fact"] if one["stream"] == name
        }
        sizes = [one for one in found["row_sizes"] if one["stream"] == name]
        assert sum(one["rows"] for one in sizes) == len(its)
        for one in sizes:
            inside = [row for *_, row in its if one["low"] <= len(row.encode()) < one["high"]]
            assert len(inside) == one["rows"]
        assert steps_by_hand(facts) == {
            (one["writer"], one["whose"], one["low"]): (one["steps"], one["tokens"])
            for one in found["steps"]
            if one["stream"] == name
        }
        assert sizes_by_hand(facts, report["window"]) == {
            (one["low"], one["high"], int(one["window"].timestamp())): (one["facts"], one["rows"])
            for one in found["rates_by_size"]
            if one["stream"] == name
        }
        unused = {one["writer"]: one for one in found["unused_ids"] if one["stream"] == name}
        assert unused_by_hand(facts) == {writer: (one["facts"], one["unused"]) for writer, one in unused.items()}
        assert all(one["writers"] == len(unused) - 1 for one in unused.values())
        assert all(one["share"] == one["unused"] / (one["unused"] + one["facts"]) for one in unused.values())
        keys = Counter(str(first) if isinstance(first := json.loads(row)[0], str) else first for *_, row in its)
        top = [one for one in found["top_keys"] if one["stream"] == name]
        assert [one["rows"] for one in top] == [count for _, count in keys.most_common(5)]
        assert top[0]["keys"] == len(keys)
        assert all(keys[one["key"]] == one["rows"] for one in top)
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="chart"') > 10
    assert "events" in page
    assert "rows/s" in stats.describe(report)


def sizes_by_hand(facts: Counter[tuple[str, int]], window: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for (_, token), rows in facts.items():
        high = 1 << (rows - 1).bit_length()
        at = NOON.timestamp() + token / 1000
        key = (high // 2 + 1, high, int(at // window * window))
        facts_, rows_ = found.get(key, (0, 0))
        found[key] = facts_ + 1, rows_ + rows
    return found


def unused_by_hand(facts: Counter[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    tokens = {token for _, token in facts}
    found = {}
    for writer in {"", *(writer for writer, _ in facts)}:
        its = {token for one, token in facts if writer in ("", one)}
        found[writer] = len(its), sum(at not in tokens for at in range(min(its), max(its) + 1))
    return found


def steps_by_hand(facts: Counter[tuple[str, int]]) -> dict[tuple[str, str, int], tuple[int, int]]:
    tokens = {token for _, token in facts}
    found: dict[tuple[str, str, int], tuple[int, int]] = {}
    for writer in {writer for writer, _ in facts}:
        its = sorted(token for one, token in facts if one == writer)
        for before, token in pairwise(its):
            others = sum(at in tokens for at in range(before + 1, token))
            for whose, count in (("others", others), ("nobody", token - before - 1 - others)):
                key = (writer, whose, 1 << count.bit_length() - 1 if count else 0)
                steps, total = found.get(key, (0, 0))
                found[key] = steps + 1, total + count
    return found


def test_keys_of_arrays_objects_and_others(spark: SparkSession) -> None:
    texts = ['["a", 1]', '{"id": "b", "n": 2}', '{"n": 3, "id": "b"}', "7", '["a", 4]', '["b", 4]']
    rows = spark.createDataFrame(
        [(name, text) for name in ("one", "two") for text in texts], "stream string, row string"
    )

    def keys(**fields: str | None) -> list[tuple[str, str | None, int]]:
        found = stats_tables.top_keys(rows, fields, 10)
        assert all(one["share"] == one["rows"] / 6 for one in found)
        return sorted((one["stream"], one["key"] or "", one["rows"]) for one in found)

    first = [("3", 1), ("7", 1), ("a", 2), ("b", 2)]
    assert keys(one=None, two="1") == [
        *(("one", *one) for one in first), ("two", "", 3), ("two", "1", 1), ("two", "4", 2),
    ]  # fmt: skip
    assert keys(one="id", two="id") == [
        ("one", "", 4), ("one", "b", 2), ("two", "", 4), ("two", "b", 2),
    ]  # fmt: skip


def test_a_key_whose_name_is_a_path_or_quoted(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("one", '{"a.b": "x", "a": {"b": "y"}, "ü": "z"}')], "stream string, row string")
    assert [stats_tables.top_keys(rows, {"one": key}, 3)[0]["key"] for key in ("a.b", "ü")] == ["x", "z"]


def test_a_name_of_rows_that_are_arrays_is_refused(spark: SparkSession) -> None:
    """There is nothing of that name in them: all keys would be null."""
    texts = [("objects", '{"id": "["}'), ("arrays", ' ["a", 1]'), ("texts", '"["'), ("texts", "7")]
    rows = spark.createDataFrame(texts, "stream string, row string")
    fields: dict[str, str | None] = {"objects": "id", "texts": "id", "arrays": "1"}
    stats_tables.check_names(rows, fields)
    stats_tables.check_names(rows, {**fields, "arrays": None})
    with pytest.raises(ConfigError, match="--key id: rows of stream 'arrays' are arrays.*--streams MODULE:NAME"):
        stats_tables.check_names(rows, {**fields, "arrays": "id"})


def test_ranges_are_exact_at_their_bounds(spark: SparkSession) -> None:
    """Windows, powers of two, and those of the root of two: logarithms and quotients of floats miss some bounds."""
    counts = sorted({max(1, 2**at + by) for at in range(62) for by in (-1, 0, 1)})
    frame = spark.createDataFrame([(one,) for one in counts], "n bigint")
    found = frame.select("n", stats_tables.power_of_two("n")).collect()
    assert {one[0]: one[1] for one in found} == {one: one.bit_length() - 1 for one in counts}

    sizes = sorted({2**at + by for at in range(1, 13) for by in (-1, 0, 1)} | {1, 45, 46, 90, 91, 181, 182})
    rows = spark.createDataFrame([("s", "x" * size) for size in sizes], "stream string, row string")
    its = stats_tables.row_sizes(rows)
    for one in its:
        assert one["rows"] == sum(one["low"] <= size < one["high"] * (1 - 1e-12) for size in sizes), one
    assert sum(one["rows"] for one in its) == len(sizes)

    times = [at * 7_000_000 + by for at in (-3, 0, 1, 250_000_000, 30_000_000_000) for by in (-1, 0, 1)]
    facts = spark.createDataFrame(
        [("s", "w", at, 1, 1) for at in times], "stream string, writer string, time bigint, rows bigint, bytes bigint"
    )
    counted = {one["window"]: one["facts"] for one in stats_tables.rates(facts, 7)}
    assert counted == Counter(at // 7_000_000 * 7 for at in times)


def test_the_window_grows_with_the_number_of_writers() -> None:
    def window(writers: int, rows: int = 1) -> int:
        day = {"first_time": 0, "last_time": 86_400 * 10**6, "most_rows_per_fact": rows}
        return _window([{"stream": f"s{at}", **day} for at in range(writers)])

    assert [window(1), window(1250)] == [600, 600]
    assert all(86_400 / window(many) * many < stats_tables.MOST_ROWS for many in (2_000, 10_000, 150_000))
    # And with the classes of size that each stream may have.
    assert 86_400 / window(2_000, rows=1_000) * 2_000 * 11 < stats_tables.MOST_ROWS
    assert _window([{"stream": "s", "first_time": None, "last_time": None, "most_rows_per_fact": 1}]) == 1


def test_readers_of_another_log_are_not_mixed_in(spark: SparkSession, tmp_path: Path) -> None:
    """BUSREP_STORE is set, and is not what was archived."""
    bench, other = Bench(spark, tmp_path), tmp_path / "other"
    bench.write("w1", [(1, "[1]")], upto=1)
    bench.archived_by_hand()
    other.mkdir()
    told = stats.Options(archive=bench.root.url, store=Bench(spark, other).url, to=str(tmp_path / "stats"))
    with pytest.raises(ConfigError, match="BUSREP_STORE"):
        stats.run(spark, told, job.silent)
    bench.write("w1", [(2, "[2]"), (3, "[3]")], upto=3)
    bench.write("w2", [(4, "[4]"), (5, "[5]")], upto=4)
    report = stats.run(spark, attrs.evolve(told, store=bench.url), job.silent)
    assert (report["rows"], report["span"], report["rows_per_second"]) == (1, 0.0, None)
    page, found = (tmp_path / "stats" / "report.html").read_text(), tables(tmp_path / "stats")
    assert "1 row of 1 stream<" in page
    # What was written since is behind, and what is not proven waits.
    assert [[one[name] for name in ("writer", "archived", "proven", "rows")] for one in found["archive_lag"]] == [
        ["w1", 1, 3, 2], ["w2", 0, 4, 1],
    ]  # fmt: skip
    waits = {one["writer"]: one["waiting_rows"] for one in found["table_writers"]}
    assert waits == {"w1": 0, "w2": 1} == {
        writer: one["waiting_rows"] for writer, one in report["table_writers"]["orders"].items()
    }  # fmt: skip
    assert report["archive_lag_rows"] == 3
    assert "the archive lacks 3 rows that the table has proven, the oldest " in stats.describe(report)
    assert "The archive lacks 3 rows that the table has proven, the oldest " in page


def test_a_key_by_the_name_of_a_field() -> None:
    told = stats.Options(archive="a", to="b", key="status", streams="tests.spark.archives:STREAMS")
    assert _field(told, "orders") == "1"
    with pytest.raises(ConfigError, match="number, status"):
        _field(attrs.evolve(told, key="colour"), "orders")
    assert [_field(attrs.evolve(told, key=key, streams=None), "orders") for key in (None, "3", "id")] == [
        None, "3", "id",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"listen": 1.0}, "--listen needs"),
        ({"name": "shop"}, "go together"),
        ({"archive": None}, "--archive"),
        ({"listen": -1.0}, "--listen"),
        ({"window": 1.5}, "whole seconds"),
        ({"window": 0.0}, "whole seconds"),
    ],
)
def test_what_is_missing_is_said(spark: SparkSession, tmp_path: Path, wrong: dict[str, Any], text: str) -> None:
    told: dict[str, Any] = {"archive": str(tmp_path), "to": str(tmp_path / "stats"), "stream": ("orders",), **wrong}
    with pytest.raises(ConfigError, match=text):
        stats.run(spark, stats.Options(**told), job.silent)


@pytest.mark.servers
@long
def test_latencies_while_facts_are_written(
    spark: SparkSession, sqlite_url: str, redis_url: str, bus_name: str, tmp_path: Path
) -> None:
    """A writer and a durable reader work while the job listens."""
    enough, failed = threading.Event(), []
    with opened_store(sqlite_url):
        pass
    common: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": sqlite_url, "settings": QUICK}

    def write() -> None:
        try:
            with sync.connect(redis_url, writer="w1", **common) as bus:
                number = 0
                while not enough.wait(0.01):
                    number += 1
                    with bus.write(orders) as fact:
                        fact.add(Order(number, "new"))
        except busrep.BusrepError as error:
            failed.append(error)

    writing = threading.Thread(target=write)
    with sync.connect(redis_url, reader="follower", **common) as bus:
        bus.subscribe(orders)(lambda batch: None)
        writing.start()
        try:
            told = stats.Options(
                store=sqlite_url, stream=("orders",), to=str(tmp_path), listen=2.0, redis=redis_url, name=bus_name
            )
            report = stats.run(spark, told, job.silent)
        finally:
            enough.set()
            writing.join()
    assert failed == []
    found = {one["measure"]: one for one in report["latencies"]}
    assert found["heard"]["count"] >= 10
    assert found["saved"]["count"] >= 10
    for one in found.values():
        assert -0.1 < one["p50"] <= one["p90"] <= one["p99"] <= one["most"] < 60
    samples = Counter(one["measure"] for one in tables(tmp_path)["latency_samples"])
    assert samples == {name: one["count"] for name, one in found.items()}
    assert tables(tmp_path)["readers"][0]["reader"] == "follower"
    assert orjson.loads((tmp_path / "report.json").read_bytes())["heard"] >= found["heard"]["count"]
    assert "Handled and saved by readers" in (tmp_path / "report.html").read_text()
    assert "commit to the bus" in stats.describe(report)
