"""The source in batches, through Spark, on PostgreSQL and SQLite."""

from __future__ import annotations

import contextlib
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from busrep.spark.failures import reason
from busrep.spark.options import NAMES
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Stream
from busrep.testing.servers import PostgresServer
from tests import ROOT
from tests.spark.archives import Bench
from tests.spark.source_facts import NOON, Item, Log, items, opened_log, trade

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(180)]

DOCS = (ROOT / "docs" / "pipeline.md").read_text().partition("\n## Source\n")[2].partition("\n## ")[0]


def load(spark: SparkSession, log: Log, **options: Any) -> DataFrame:
    return spark.read.format("busrep").options(**{**log.options, **options}).load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=lambda row: row[1:4])


def utc(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Spark gives times without a zone, in that of this process."""
    return [(*row[:5], row[5].astimezone(UTC)) for row in rows]


def tokens(frame: DataFrame) -> list[int]:
    return sorted(row["token"] for row in frame.select("token").collect())


def test_a_batch_equals_the_table(spark: SparkSession, log: Log) -> None:
    log.fill()
    frame = load(spark, log, partitions=3)
    assert frame.rdd.getNumPartitions() == 3
    found = utc(rows(frame))
    assert found == log.rows()
    assert len(found) == 18
    assert {row[2] for row in found} == set(range(1, 19)) - {7, 12}  # 20 is committed, and 19 below it open
    typed = load(spark, log, streams="tests.spark.source_facts:STREAMS", includeMetadata="true", writers="w1")
    assert [(field.dataType.simpleString(), field.nullable) for field in typed.schema.fields[:9]] == [
        ("bigint", False), ("double", False), ("string", False), ("boolean", False), ("timestamp", False),
        ("string", True), ("array<string>", False), ("map<string,bigint>", False), ("string", True),
    ]  # fmt: skip
    for row in typed.collect():
        wanted = trade(row["number"])
        assert (row["price"], row["name"], row["open"], row["note"]) == (
            wanted.price, wanted.name, wanted.open, wanted.note,
        )  # fmt: skip
        assert (row["tags"], row["counts"]) == (wanted.tags, wanted.counts)
        assert row["more"] == f'{{"deep":[{row["number"]}]}}'
        assert row["at"].astimezone(UTC) == wanted.at
        assert (row["_stream"], row["_writer"], row["_token"]) == ("trades", "w1", row["number"])
    assert typed.count() == sum(row[1] == "w1" for row in log.rows())


def test_a_part_of_it(spark: SparkSession, log: Log) -> None:
    log.fill()
    proven = [row[2] for row in log.rows()]
    w2 = [row[2] for row in log.rows("f.writer = 'w2'")]
    assert tokens(load(spark, log, writers="w2")) == w2
    some = load(spark, log, startingPositions='{"w1": 4, "w2": 18}', endingPositions='{"w1": 13, "w2": 18}')
    assert tokens(some) == [5, 5, 5, 8, 10, 11, 13]
    assert tokens(load(spark, log, startingPositions='{"w1": 18}', endingPositions='{"w2": 9}')) == [3, 6, 9]
    assert load(spark, log, startingPositions="latest").count() == 0
    assert load(spark, log, startingOffsets="latest").count() == 0
    assert load(spark, log, minPartitions=4).rdd.getNumPartitions() == 4
    log.sql("UPDATE busrep_facts SET committed_at = committed_at")
    for token in set(proven):
        log.committed(token, NOON + timedelta(seconds=token))
    span = {"startingPositions": "2026-01-31T12:00:05.000005Z", "endingPositions": "2026-01-31T13:00:09.000005+01:00"}
    assert tokens(load(spark, log, **span)) == [5, 5, 5, 6, 8]
    narrow = load(spark, log, columns="row, token")
    assert narrow.columns == ["row", "token"]
    assert sorted((row["token"], row["row"]) for row in narrow.collect()) == sorted(
        (row[2], row[4]) for row in log.rows()
    )
    given = spark.read.format("busrep").options(**log.options).schema("token bigint").load()
    assert sorted(row[0] for row in given.collect()) == sorted(proven)
    assert narrow.count() == len(proven)


FILTERS = [
    ("token > 3 AND token <= 9", ""),
    ("token = 5", ""),
    ("token >= 5 AND token < 5", ""),
    ("writer = 'w2' AND stream = 'trades'", ""),
    ("writer IN ('w2', 'w9')", ""),
    ("stream = 'others'", ""),
    ("writer = 'it''s'", ""),
    ("committed_at >= TIMESTAMP'2026-01-31 12:00:05.000005Z' AND committed_at < TIMESTAMP'2026-01-31 12:00:09Z'", ""),
    ("committed_at = TIMESTAMP'2026-01-31 12:00:05.000005Z' AND index = 1", "index"),
    ("token > 3 AND row LIKE '%8%'", "row"),
    ("token = 3 OR writer = 'w1'", "token"),
    ("writer <> 'w1' AND token < 9", "writer"),
    ("token IN (3, 5, 99)", "token"),
]


def test_filters_reach_the_table(spark: SparkSession, log: Log) -> None:
    log.fill()
    for token in {row[2] for row in log.rows()}:
        log.committed(token, NOON + timedelta(seconds=token))
    whole = load(spark, log).cache()
    try:
        for condition, left in FILTERS:
            frame = load(spark, log).where(condition)
            plan = frame._jdf.queryExecution().executedPlan().toString()
            # What the table answers is not asked again of Spark.
            assert (") Filter " in plan) == bool(left), condition
            assert left in plan.partition("BatchScan")[0]
            assert rows(frame) == rows(whole.where(condition)), condition
    finally:
        whole.unpersist(blocking=True)
    typed = load(spark, log, streams="tests.spark.source_facts:STREAMS", includeMetadata="true")
    frame = typed.where("_token <= 4 AND _writer = 'w1' AND number > 1")
    plan = frame._jdf.queryExecution().executedPlan().toString().partition(") Filter ")[2].partition("BatchScan")[0]
    assert "number" in plan
    assert "_token" not in plan
    assert "_writer" not in plan
    assert sorted(row["number"] for row in frame.collect()) == [2, 4]


def test_without_pushdown_spark_filters(spark: SparkSession, one_log: Log) -> None:
    one_log.fill()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        frame = load(spark, one_log).where("token = 5 AND writer = 'w1'")
        assert ") Filter " in frame._jdf.queryExecution().executedPlan().toString()
        assert tokens(frame) == [5, 5, 5]
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_a_table_of_the_applications(spark: SparkSession, log: Log) -> None:
    for at in range(1, 6):
        log.write("w1", [Item(at, f"é{at}", at > 2)] * at, stream=items)
    log.store.heartbeat(log.claim("w1"), {"items": 4})
    declared = {"stream": "items", "streams": "tests.spark.source_facts:STREAMS"}
    found = load(spark, log, **declared, partitions=2, columns="number,sold,name").collect()
    assert sorted(tuple(row) for row in found) == sorted(
        (at, at > 2, f"é{at}") for at in range(1, 5) for _ in range(at)
    )
    generic = load(spark, log, **declared, typed="false").where("committed_at IS NULL AND token = 2")
    assert [(row["token"], row["index"], row["row"]) for row in generic.orderBy("index").collect()] == [
        (2, 0, '[2,"\\u00e92",false]'), (2, 1, '[2,"\\u00e92",false]'),
    ]  # fmt: skip


def test_what_is_wrong_is_told_in_one_line(spark: SparkSession, one_log: Log) -> None:
    one_log.fill()
    for options, text in [
        ({"partitions": "none"}, "option 'partitions' is 'none': an integer from 1 to 10000 is needed"),
        ({"columns": "token,nothing"}, "option 'columns' names column 'nothing'; there are: stream, writer, token"),
        ({"endingPositions": '{"w2": 19}'}, "option 'endingPositions': 19 is beyond 18"),
        ({"stream": "nothing"}, "option 'stream' is 'nothing', which the store does not have (it has: items, trades)"),
        ({"writers": "w9"}, "stream 'trades' has no writer 'w9' in this store (it has: w1, w2)"),
        ({"maxRowsPerTrigger": "5"}, "option 'maxRowsPerTrigger' is for spark.readStream alone"),
    ]:
        with pytest.raises(Exception, match="busrep") as caught:
            load(spark, one_log, **options).collect()
        assert reason(caught.value).startswith(text)
    with pytest.raises(Exception, match="busrep") as caught:
        spark.read.format("busrep").options(**one_log.options).schema("token string").load().collect()
    assert reason(caught.value) == "column 'token' is bigint, not string: cast it behind the source"
    assert load(spark, one_log, writers="w9,w1", failOnDataLoss="false").select("writer").distinct().count() == 1


def test_a_pruned_range_is_an_error_or_skipped(spark: SparkSession, one_log: Log) -> None:
    one_log.fill()
    one_log.store.prune(keep=4)
    left = sorted(row[2] for row in one_log.rows())
    assert tokens(load(spark, one_log)) == left  # earliest is what is still there
    with pytest.raises(Exception, match="below the retention floor") as caught:
        load(spark, one_log, startingPositions="{}").count()
    assert "failOnDataLoss=false" in reason(caught.value)
    lenient = load(spark, one_log, startingPositions="{}", failOnDataLoss="false")
    assert tokens(lenient) == left


def test_no_secret_is_shown(spark: SparkSession, postgres: PostgresServer, tmp_path: Path) -> None:
    with opened_log("postgresql", postgres, tmp_path) as log:
        log.fill()
        frame = load(spark, log)
        assert frame.count() == 18
        shown = frame._jdf.queryExecution().toString()
        assert "busrep" in shown
        assert postgres.password not in shown
        with pytest.raises(Exception, match="holds a password") as caught:
            load(spark, log, store=log.url)
        assert postgres.password not in reason(caught.value)
        Path(log.options["passwordFile"]).write_text("wrong")
        with pytest.raises(Exception, match="password authentication failed") as caught:
            load(spark, log).count()
        assert postgres.password not in str(caught.value)


def test_times_in_another_zone_are_the_same(spark: SparkSession, one_log: Log) -> None:
    one_log.committed(one_log.write("w1", [trade(1)]), datetime(2026, 1, 31, 23, 30, tzinfo=UTC))
    one_log.prove(w1=1)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        frame = load(spark, one_log).where("committed_at >= TIMESTAMP'2026-02-01 08:30:00'")
        assert frame.selectExpr("CAST(committed_at AS string)").collect()[0][0] == "2026-02-01 08:30:00"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_sql_in_the_docs(spark: SparkSession, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path)
    bench.write("w1", [(3, "[3]"), (4, "[4]")], upto=4)
    bench.write("w2", [(5, "[5]")], upto=5)
    open_blocking_store(bench.url, Registry([Stream("copies")])).init()
    program = DOCS.partition("```sql\n")[2].partition("```")[0].replace("postgresql://app@db.internal/shop", bench.url)
    try:
        found = [spark.sql(statement).collect() for statement in filter(str.strip, program.split(";"))]
        assert [tuple(row) for row in found[1]] == [("w1", 4, "[4]"), ("w2", 5, "[5]")]
        copied = spark.read.format("busrep").options(store=bench.url, stream="copies").load()
        assert sorted(tuple(row) for row in copied.select("writer", "row").collect()) == [
            ("spark-sql", "[4]"), ("spark-sql", "[5]"),
        ]  # fmt: skip
        with pytest.raises(Exception, match="facts are never replaced"):
            spark.sql("INSERT OVERWRITE copies VALUES ('[1]')")
    finally:
        for view in ("orders", "copies"):
            spark.catalog.dropTempView(view)


def test_a_table_of_sparks_catalog_is_refused(spark: SparkSession, one_log: Log) -> None:
    options = f"USING busrep OPTIONS (store '{one_log.url}', stream 'trades')"
    with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING busrep"):
        spark.sql(f"CREATE TABLE made_by_source {options}")
    spark.sql(f"CREATE TABLE made_by_columns (token bigint) {options}")  # Spark does not ask the source
    try:
        with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING busrep"):
            spark.table("made_by_columns").collect()
        with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING busrep"):
            spark.sql("INSERT INTO made_by_columns VALUES (1)")
    finally:
        spark.sql("DROP TABLE made_by_columns")


def test_the_program_in_the_docs(spark: SparkSession, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path)
    bench.write("w1", [(1, "[1]"), (3, "[3]"), (4, "[4]")], upto=4)
    bench.write("w2", [(2, "[2]"), (5, "[5]")], upto=5)
    code, prints = (DOCS.partition(f"```{language}\n")[2].partition("```")[0] for language in ("python", "text"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"STORE": {"store": bench.url}, "CHECKPOINT": str(tmp_path / "checkpoint")})
    assert printed.getvalue() == prints
    assert all(f"`{name}`" in DOCS for name in NAMES)
