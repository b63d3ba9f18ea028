"""The sink on Spark: batches, streams whose driver or tasks are killed, and readers on the bus beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import busrep
from busrep.spark import secrets
from busrep.spark.failures import reason
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.pipeline.sinks import WRITER, ask, facts, opened, rows, without_password
from tests.pipeline.sql_types import ROW, STREAM, STREAMS
from tests.shop import QUICK
from tests.spark.cluster import Cluster
from tests.spark.drivers import killed_when
from tests.spark.long import long

pytestmark = pytest.mark.servers

orders: busrep.Stream[Any] = busrep.Stream("orders")
FILES, LINES = 6, 300
JOB = "tests.spark.sink_job"


def made(url: str) -> str:
    open_blocking_store(url, Registry([orders])).init()
    return url


def numbered_files(folder: Path, files: int = FILES) -> None:
    """Files of numbers, in the order of their times."""
    (folder / "input").mkdir()
    for at in range(files):
        path = folder / "input" / f"{at:03}.txt"
        path.write_text("".join(f"{at * LINES + line}\n" for line in range(LINES)))
        os.utime(path, (1_000_000 + at, 1_000_000 + at))


def test_a_batch(spark: SparkSession, sqlite_url: str) -> None:
    url = made(sqlite_url)
    numbers = spark.range(0, 5000, 1, 4).selectExpr("concat('[', id, ']') AS row")
    options = {"store": url, "stream": "orders", "writer": WRITER, "batch": "numbers"}
    for _ in range(2):
        numbers.write.format("busrep").mode("append").options(**options).save()
    assert rows(url) == list(range(5000))
    again = spark.read.format("busrep").options(store=url, stream="orders").load()
    copied = {**options, "writer": "copy", "batch": "copy", "orderBy": "token"}
    again.write.format("busrep").mode("append").options(**copied).save()
    assert facts(url, "copy") == facts(url)
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 0
    with pytest.raises(PySparkException) as caught:
        numbers.write.format("busrep").mode("overwrite").options(**options).save()
    assert "facts are never replaced" in reason(caught.value)


def test_types_of_sql_go_both_ways(spark: SparkSession, sqlite_url: str) -> None:
    """Facts of a row class become columns, on which SQL works, and these become equal facts."""
    open_blocking_store(sqlite_url, Registry(STREAMS)).init()
    options = {"store": sqlite_url, "stream": STREAM.name}
    both = [ROW, attrs.evolve(ROW, price=Decimal(7), work=None)]
    texts = spark.createDataFrame([(STREAM.encode(row).decode(),) for row in both], "row string").coalesce(1)
    texts.write.format("busrep").mode("append").options(**options, writer="a").save()
    options["streams"] = "tests.pipeline.sql_types:STREAMS"
    typed = spark.read.format("busrep").options(**options, writers="a").load()
    late = typed.where("day < until AND price * 2 = 3 AND colour = 'red' AND level = 2 AND work.since > home.since")
    late.write.format("busrep").mode("append").options(**options, writer="b").save()
    assert STREAM.decode(facts(sqlite_url, "b", STREAM)) == [ROW]


def test_secrets_are_in_no_plan(
    spark: SparkSession, postgres_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, password = made(postgres_url), secrets.split(postgres_url)[1]
    (tmp_path / "password").write_text(password or "")
    options = {"store": without_password(url), "stream": "orders", "writer": WRITER}
    options["passwordFile"] = str(tmp_path / "password")
    numbers = spark.range(3).selectExpr("id AS number", "timestamp_micros(id) AS at")
    numbers.write.format("busrep").mode("append").options(**options).save()
    assert facts(url)[1] == b'[1,"1970-01-01T00:00:00.000001+00:00"]'
    with pytest.raises(PySparkException) as caught:
        numbers.write.format("busrep").mode("append").options(**{**options, "store": url}).save()
    assert "the option store holds a password" in reason(caught.value)
    assert str(password) not in str(caught.value)


def start(frame: DataFrame, checkpoint: Path, **options: str) -> StreamingQuery:
    writer = frame.writeStream.format("busrep").options(**options).option("checkpointLocation", str(checkpoint))
    return writer.trigger(availableNow=True).start()


@long
def test_tasks_that_are_killed(spark: SparkSession, retried: bool, sqlite_url: str, tmp_path: Path) -> None:
    """The Python process of a task is killed in the middle of a partition: Spark fails the query, and the next start
    does that batch again. On a cluster Spark does the task again."""
    url = made(sqlite_url)
    numbered_files(tmp_path)
    deadly = tmp_path / "deadly"
    deadly.write_text("once")

    def die(value: str) -> str:
        if value == str(3 * LINES + 250) and deadly.exists():
            deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"[{value}]"

    numbers = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).text(str(tmp_path / "input"))
    frame = numbers.select(spark_udf(die)("value").alias("row"))
    options = {"store": url, "stream": "orders", "writer": WRITER}
    if not retried:
        with pytest.raises(PySparkException):
            start(frame, tmp_path / "checkpoint", **options).awaitTermination()
        assert rows(url) == list(range(3 * LINES))
    start(frame, tmp_path / "checkpoint", **options).awaitTermination()
    assert not deadly.exists()
    assert rows(url) == list(range(FILES * LINES))
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 0


def spark_udf(function: Any) -> Any:
    from pyspark.sql.functions import udf

    return udf(function, "string", useArrow=False)  # that way asks for pandas


def test_a_fenced_query_fails(spark: SparkSession, sqlite_url: str, tmp_path: Path) -> None:
    """Another process takes the writer's name between two batches: a clear error, and the next start loses nothing."""
    url = made(sqlite_url)
    numbered_files(tmp_path)

    def claim(value: str) -> str:
        if value == str(2 * LINES):
            store = opened(url)
            store.claim(WRITER, ["orders"], timeout=5)
            store.close()
        return f"[{value}]"

    numbers = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).text(str(tmp_path / "input"))
    options = {"store": url, "stream": "orders", "writer": WRITER}
    with pytest.raises(PySparkException) as caught:
        start(
            numbers.select(spark_udf(claim)("value").alias("row")), tmp_path / "checkpoint", **options
        ).awaitTermination()
    assert "its name was claimed anew" in reason(caught.value)
    assert rows(url) == list(range(2 * LINES))
    frame = numbers.selectExpr("concat('[', value, ']') AS row")
    start(frame, tmp_path / "checkpoint", **options).awaitTermination()
    assert rows(url) == list(range(FILES * LINES))


@long
@pytest.mark.slow
@pytest.mark.timeout(240)  # two more drivers, each with a JVM
def test_a_driver_that_is_killed(
    postgres_url: str, redis_url: str, bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is started again from its checkpoint. The table is the input, in order, each row once; and so
    is what a reader on the bus has seen meanwhile."""
    url = made(postgres_url)
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(url)[1] or "")
    numbered_files(tmp_path)
    options = {
        "store": without_password(url),
        "stream": "orders",
        "writer": WRITER,
        "redis": redis_url,
        "name": bus_name,
    }
    task = {"folder": str(tmp_path), "options": options}
    seen: list[int] = []

    async def run() -> bool:
        # From the first row: "now" is some moment after subscribe(), and may lie behind rows written at once.
        common = {"streams": [orders], "store": url, "settings": QUICK}
        async with busrep.connect(redis_url, name=bus_name, start="earliest", **common) as bus:

            @bus.subscribe(orders)
            async def handle(batch: busrep.Batch[Any]) -> None:
                seen.extend(row[0] for row in batch.rows)

            log = tmp_path / "stderr"
            killed = not await asyncio.to_thread(killed_when, JOB, task, lambda: len(seen) >= 2 * LINES, log, 90)
            assert await asyncio.to_thread(killed_when, JOB, task, lambda: False, log, 90)
            last = await asyncio.to_thread(ask, url, "SELECT max(id) FROM busrep_facts")
            await bus.wait_for(orders, WRITER, last, timeout=20)
        return killed

    assert asyncio.run(run())
    assert rows(url) == list(range(FILES * LINES))
    assert seen == list(range(FILES * LINES))
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 0


class Killer:
    """Kills an executor in every second batch, at a random moment of it, from the second on."""

    def __init__(self, cluster: Cluster, url: str, seed: int) -> None:
        self.cluster, self.url, self.random = cluster, url, random.Random(seed)
        self.kills, self.due, self.next = 0, 0, 0.0

    def __call__(self) -> bool:
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + 0.1
            last = ask(self.url, "SELECT coalesce(max(batch), -1) FROM busrep_sinks")
            if last >= self.due and (executors := self.cluster.executors()):
                time.sleep(self.random.uniform(0, 0.8))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(executors), signal.SIGKILL)
                    self.kills += 1
                self.due = last + 2  # it gets somewhere between two kills, or Spark gives the application up
        return False


@long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_executors_that_are_killed(
    cluster: Cluster, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster of two workers, at random points: the table is the input, each row once, batch by batch."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    url, files = made(postgres_url), 12
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(url)[1] or "")
    numbered_files(tmp_path, files)
    options = {"store": without_password(url), "stream": "orders", "writer": WRITER}
    task = {"folder": str(tmp_path), "options": options, "files": 2}
    killer, starts = Killer(cluster, url, 7), 0
    while not killed_when(JOB, task, killer, tmp_path / "stderr", may_fail=True):
        starts += 1
        assert starts < 5
    assert killer.kills >= 2
    found, batch = rows(url), 2 * LINES
    batches = [sorted(found[at : at + batch]) for at in range(0, len(found), batch)]
    assert [number for one in batches for number in one] == list(range(files * LINES))
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 0


def test_nothing_to_write(spark: SparkSession, sqlite_url: str, tmp_path: Path) -> None:
    """A job and a batch without a single partition."""
    url = made(sqlite_url)
    options = {"store": url, "stream": "orders", "writer": WRITER}
    spark.createDataFrame([], "row string").write.format("busrep").mode("append").options(**options).save()
    (tmp_path / "input").mkdir()
    for at, text in enumerate(["", "1\n", "", "", "2\n"]):
        path = tmp_path / "input" / f"{at}.txt"
        path.write_text(text)
        os.utime(path, (1_000_000 + at, 1_000_000 + at))
    numbers = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).text(str(tmp_path / "input"))
    frame = numbers.selectExpr("concat('[', value, ']') AS row")
    start(frame, tmp_path / "checkpoint", **options).awaitTermination()
    assert rows(url) == [1, 2]
    assert ask(url, "SELECT batch FROM busrep_sinks") == 4
