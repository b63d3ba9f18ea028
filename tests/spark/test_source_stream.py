"""The source in streams, through Spark: batches, restarts, what is lost, and the bus."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from busrep.spark.failures import reason
from busrep.spark.lag import Lag, LagListener, lags_of
from busrep.testing.servers import start_redis
from tests.spark.long import long
from tests.spark.source_facts import Log, trade

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(180)]


@attrs.define
class Target:
    """What a query has delivered: {batch: [(writer, token, index)]}, each time it was delivered."""

    spark: SparkSession
    log: Log
    checkpoint: Path
    batches: list[tuple[int, list[tuple[str, int, int]]]] = attrs.field(factory=list)
    heard: Callable[[], None] = lambda: None

    def take(self, frame: DataFrame, batch: int) -> None:
        rows = frame.select("writer", "token", "index").collect()
        self.batches.append((batch, sorted((row[0], row[1], row[2]) for row in rows)))
        self.heard()

    def start(self, *, available_now: bool = True, **options: Any) -> StreamingQuery:
        stream = self.spark.readStream.format("busrep").options(**{**self.log.options, **options}).load()
        writer = stream.writeStream.foreachBatch(self.take).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(self, **options: Any) -> list[tuple[int, list[tuple[str, int, int]]]]:
        """The batches of one run to its end."""
        before = len(self.batches)
        query = self.start(**options)
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return self.batches[before:]

    def rows(self) -> list[tuple[str, int, int]]:
        return [row for _, rows in self.batches for row in rows]

    def offset(self, batch: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])
        return found

    def uncommit(self, batch: int) -> None:
        """As a crash leaves it between the end of a batch and Spark's note of it."""
        for name in (str(batch), f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink()


@pytest.fixture
def target(spark: SparkSession, log: Log, tmp_path: Path) -> Target:
    return Target(spark, log, tmp_path / "checkpoint")


@pytest.fixture
def one_target(spark: SparkSession, one_log: Log, tmp_path: Path) -> Target:
    return Target(spark, one_log, tmp_path / "checkpoint")


def keys(log: Log) -> list[tuple[str, int, int]]:
    return sorted((row[1], row[2], row[3]) for row in log.rows())


def test_batches_restarts_and_a_crash_lose_nothing_and_double_nothing(target: Target) -> None:
    log = target.log
    log.fill()
    first = target.run(maxRowsPerTrigger=7)
    assert [batch for batch, _ in first] == [0, 1, 2]
    assert all(0 < len(rows) <= 7 for _, rows in first)
    assert sorted(target.rows()) == keys(log)  # nothing of 20, which is committed above the open 19
    assert [max(token for _, token, _ in rows) for _, rows in first] == sorted(
        max(token for _, token, _ in rows) for _, rows in first
    )
    assert target.run() == []
    log.write("w2", [trade(19)] * 4, token=19)
    log.prove(w1=20, w2=20)
    assert target.run(maxRowsPerTrigger=2) == [
        (3, [("w2", 19, index) for index in range(4)]),  # one fact of more rows than a batch has
        (4, [("w2", 20, 0)]),
    ]
    # Planned and delivered, and the driver died before it noted that; more was written meanwhile.
    log.write("w1", [trade(21)])
    log.prove(w1=21)
    target.uncommit(4)
    assert target.run() == [(4, [("w2", 20, 0)]), (5, [("w1", 21, 0)])]
    # Planned, and the driver died at once: also with another limit, it is the same batch.
    target.uncommit(5)
    assert target.run(maxRowsPerTrigger=1) == [(5, [("w1", 21, 0)])]
    assert sorted(set(target.rows())) == keys(log)
    assert target.offset(5) == {
        "epoch": log.store.epoch(), "positions": {"w1": 21, "w2": 20}, "stream": "trades",
    }  # fmt: skip
    found = [path.read_bytes() for path in target.checkpoint.rglob("*") if path.is_file()]
    password = log.options.get("passwordFile")
    if password is not None:
        assert not any(Path(password).read_bytes().strip() in text for text in found)


def test_the_progress_of_a_query_tells_its_lag_and_a_listener_hears_it(one_target: Target) -> None:
    one_target.log.fill()
    told: list[Lag] = []
    ended = threading.Event()

    def tell(lag: Lag) -> None:
        told.append(lag)
        if not lag.rows:
            ended.set()

    listener = LagListener(tell)
    one_target.spark.streams.addListener(listener)
    try:
        query = one_target.start(maxRowsPerTrigger=7)
        assert query.awaitTermination(120)
        assert ended.wait(60), "the listener's last word is that nothing is left"
    finally:
        one_target.spark.streams.removeListener(listener)
    batches = [lag for each in query.recentProgress for lag in lags_of(each) if lag.rows]
    assert told == [*batches, attrs.evolve(batches[0], rows={}, seconds={})]
    rows = len(keys(one_target.log))
    assert [sum(lag.rows.values()) for lag in batches] == [
        rows - done for done in accumulate(len(rows) for _, rows in one_target.batches)
    ]
    assert all(lag.stream == "trades" and min(lag.seconds.values()) >= 0 for lag in batches)


@long
def test_options_of_a_stream(one_target: Target) -> None:
    log = one_target.log
    log.fill()
    assert one_target.run(startingPositions="latest", writers="w2") == [(0, [])]  # Spark writes down where it began
    log.write("w2", [trade(21)])
    log.write("w1", [trade(22)])
    log.prove(w1=22, w2=22)
    # The option says where a query begins; the checkpoint where it is. So 20 and 21 are the first it reads of w2.
    found = one_target.run(startingPositions="earliest", writers="w2", streams="tests.spark.source_facts:STREAMS",
                           typed="false")  # fmt: skip
    assert [row for _, rows in found for row in rows] == [("w2", 20, 0), ("w2", 21, 0)]
    text = failed(one_target, endingPositions="latest")
    assert text == "option 'endingPositions' is for spark.read alone: a stream has no end"


def test_typed_rows_are_followed(spark: SparkSession, one_log: Log, tmp_path: Path) -> None:
    one_log.fill()
    options = {**one_log.options, "streams": "tests.spark.source_facts:STREAMS", "columns": "number,at"}
    stream = spark.readStream.format("busrep").options(**options).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
    assert query.awaitTermination(120)
    found = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(row["number"] for row in found.collect()) == sorted(row[2] for row in one_log.rows())


def failed(target: Target, **options: Any) -> str:
    with pytest.raises(Exception, match="busrep") as caught:
        target.run(**options)
    return reason(caught.value)


def test_a_pruned_range_is_an_error_or_a_counted_skip(one_target: Target) -> None:
    log = one_target.log
    log.fill()
    one_target.run(maxRowsPerTrigger=3)
    shutil.rmtree(one_target.checkpoint / "commits")
    shutil.rmtree(one_target.checkpoint / "offsets")
    (one_target.checkpoint / "offsets").mkdir()
    (one_target.checkpoint / "commits").mkdir()
    at = {"epoch": log.store.epoch(), "positions": {"w1": 1, "w2": 0}}
    (one_target.checkpoint / "offsets" / "0").write_text(
        f"v1\n{json.dumps({'batchWatermarkMs': 0, 'batchTimestampMs': 0, 'conf': {}})}\n{json.dumps(at)}"
    )
    (one_target.checkpoint / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    log.store.prune(keep=3)
    text = failed(one_target)
    assert "the query is at 1, below the retention floor" in text
    assert "failOnDataLoss=false" in text
    found = one_target.run(failOnDataLoss="false")
    assert sorted(row for _, rows in found for row in rows) == keys(log)
    floors = dict(log.sql("SELECT writer, floor FROM busrep_positions WHERE stream = 'trades'"))
    assert one_target.offset(1)["skipped"] == floors["w1"] - 1 + floors["w2"]


def test_a_restored_database_is_an_error_or_a_new_beginning(one_target: Target) -> None:
    log = one_target.log
    log.fill()
    one_target.run()
    old = one_target.offset(0)
    new = log.store.restored()
    log.claims.clear()
    log.write("w1", [trade(21)])
    log.prove(w1=21)
    text = failed(one_target)
    assert f"positions of epoch {old['epoch']}, the fact log is of epoch {new}" in text
    found = one_target.run(failOnDataLoss="false")
    assert sorted(row for _, rows in found for row in rows) == keys(log)
    assert one_target.offset(1)["epoch"] == new
    assert one_target.run() == []


def test_a_writer_that_is_gone_is_an_error(one_target: Target) -> None:
    log = one_target.log
    log.fill()
    one_target.run()
    log.sql("DELETE FROM busrep_positions WHERE writer = 'w2'")
    log.write("w1", [trade(21)])
    log.prove(w1=21)
    assert "stream 'trades' has no writer 'w2' in this store (it has: w1)" in failed(one_target)
    assert one_target.run(failOnDataLoss="false") == [(1, [("w1", 21, 0)])]


def test_facts_are_heard_of_on_the_bus_before_the_table_tells(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    news = threading.Semaphore(0)
    target = Target(spark, log, tmp_path / "checkpoint", heard=lambda: news.release())
    log.fill()
    positions = log.sql("SELECT writer, position FROM busrep_positions")
    with start_redis() as server, contextlib.closing(redis.Redis.from_url(server.url)) as client:
        query = target.start(available_now=False, redis=server.url, name="shop")
        try:
            while len(target.rows()) < len(keys(log)):
                assert news.acquire(timeout=60)
            log.write("w1", [trade(21)])
            while not client.pubsub_numsub("shop")[0][1]:
                assert query.isActive
            # The table is not told: whoever learns of it has heard this.
            claim = log.claim("w1")
            lines = f"SERVER shop {claim.epoch}\nNAME w1 {claim.incarnation}\nPOSITION trades w1 21 21"
            client.publish("shop", lines)
            while ("w1", 21, 0) not in target.rows():
                assert news.acquire(timeout=60)
        finally:
            query.stop()
    assert sorted(target.rows()) == sorted([*keys(log), ("w1", 21, 0)])
    assert log.sql("SELECT writer, position FROM busrep_positions") == positions
