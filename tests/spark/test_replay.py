"""Replaying archives and tables on Spark: everything once, in order, at its pace; also when it was interrupted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

import busrep
from busrep.core.catchup import FetchUpdates
from busrep.errors import ConfigError, EpochChanged
from busrep.spark import job, replay_pace, replaying
from busrep.spark.jobs import replay
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.spark.archives import NOON, Bench

pytestmark = pytest.mark.servers

TOKENS = range(1, 121)


def source(spark: SparkSession, folder: Path) -> Bench:
    """Two writers in turn; each fifth fact has three rows; 7 and 8 were committed long before those around them."""
    bench = Bench(spark, folder)
    for writer, rest in (("w1", 1), ("w2", 0)):
        its = [token for token in TOKENS if token % 2 == rest]
        facts = [(token, f"[{token}, {row}]") for token in its for row in range(3 if token % 5 == 0 else 1)]
        bench.write(writer, facts, upto=max(its))
    bench.sql("UPDATE busrep_facts SET committed_at = committed_at - 3600 WHERE id IN (7, 8)")
    return bench


@pytest.fixture
def target(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/target.db"
    open_blocking_store(url, Registry([busrep.Stream("orders")])).init()
    return url


def facts(url: str, writer: str) -> list[list[bytes]]:
    store = open_blocking_store(url, Registry([busrep.Stream("orders")]))
    store.open()
    try:
        page = store.fetch(FetchUpdates("orders", writer, 0, 2**62, limit=10**6))
    finally:
        store.close()
    found: dict[int, list[bytes]] = {}
    for token, payload in zip(page.tokens, page.payloads, strict=True):
        found.setdefault(token, []).append(payload)
    return list(found.values())


def expected(bench: Bench, writer: str, after: int = 0, upto: int = 120) -> list[list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for its, token, _, row in bench.table():
        if its == writer and after < token <= upto:
            found.setdefault(token, []).append(row.encode())
    return list(found.values())


class Interrupted(Exception):
    """What ends a replay in the middle."""


def test_an_archive_interrupted_and_resumed(
    spark: SparkSession, tmp_path: Path, target: str, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = source(spark, tmp_path)
    bench.archived_by_hand(50)
    monkeypatch.setattr(replay_pace, "CHUNK_ROWS", 20)
    options = replay.Options(
        archive=bench.root.url, to_redis=redis_url, to_name=bus_name, to_store=target, flat_out=True
    )

    def stop(stage: str, done: int, total: int | None) -> None:
        if done > 60:
            raise Interrupted

    with pytest.raises(Interrupted):
        replay.run(spark, options, stop)
    begun = [len(facts(target, f"replay-{writer}")) for writer in ("w1", "w2")]
    assert all(10 < one < 60 for one in begun), begun
    shuffles = spark.conf.get("spark.sql.shuffle.partitions")
    report = replay.run(spark, options, job.silent)
    for writer in ("w1", "w2"):
        assert facts(target, f"replay-{writer}") == expected(bench, writer)
    assert spark.conf.get("spark.sql.shuffle.partitions") == shuffles
    its = report["streams"]["orders"]
    assert [its[writer]["facts"] for writer in ("w1", "w2")] == [60 - one for one in begun]
    assert all(one["resumed"] for one in its.values())
    again = replay.run(spark, options, job.silent)
    assert again["rows"] == 0
    assert "replay-w1" in replay.describe(again)


def test_a_range_of_a_table_at_its_pace(
    spark: SparkSession, tmp_path: Path, target: str, redis_url: str, bus_name: str
) -> None:
    bench = source(spark, tmp_path)
    common: dict[str, Any] = {
        "store": bench.url, "stream": ("orders",), "to_redis": redis_url, "to_name": bus_name, "to_store": target,
    }  # fmt: skip
    part = {"from_positions": '{"w1": 20, "w2": 41}', "to_positions": '{"w1": 60, "w2": 80}'}
    report = replay.run(spark, replay.Options(**common, **part, speed=100, to_writer="a-"), job.silent)
    assert facts(target, "a-w1") == expected(bench, "w1", 20, 60)
    assert report["table_writers"]["orders"].keys() == {"w1", "w2"}
    assert facts(target, "a-w2") == expected(bench, "w2", 41, 80)
    assert report["rows_per_second"] < 1.5 * report["rows"] / (59 / 100), "59 s in 0.59 s, at least"
    times = {
        "from_positions": (NOON + timedelta(seconds=50)).isoformat(),
        "to_positions": (NOON + timedelta(seconds=71)).isoformat(),
    }
    replay.run(spark, replay.Options(**common, **times, rate=10_000, to_writer="b-"), job.silent)
    assert facts(target, "b-w1") == expected(bench, "w1", 50, 70)
    assert facts(target, "b-w2") == expected(bench, "w2", 49, 70)
    bench.archived_by_hand()
    common = {**common, "archive": bench.root.url, "store": None}
    replay.run(spark, replay.Options(**common, **times, flat_out=True, to_writer="c-"), job.silent)
    assert facts(target, "c-w1") == expected(bench, "w1", 50, 70)
    assert facts(target, "c-w2") == expected(bench, "w2", 49, 70)
    # 7 and 8 were committed before that, and 1 to 6 after it: what follows goes on where it ended, and nothing is left.
    early = (NOON - timedelta(minutes=5)).isoformat()
    flat = {**common, "to_writer": "d-", "flat_out": True}
    replay.run(spark, replay.Options(**flat, to_positions=early), job.silent)
    replay.run(spark, replay.Options(**flat, from_positions=early), job.silent)
    replay.run(spark, replay.Options(**flat), job.silent)
    assert [facts(target, f"d-{writer}") for writer in ("w1", "w2")] == [
        expected(bench, writer) for writer in ("w1", "w2")
    ]
    for wrong, text in (
        ({"from_positions": '{"w1": 121}'}, "--from-positions"),
        ({"from_positions": '{"w9": 1}'}, "w9"),
        ({"speed": 1.0, "rate": 1.0}, "three paces"),
        ({"speed": 0.0}, "above 0"),
        ({"archive": None}, "--archive, or --store"),
        ({"archive": str(tmp_path / "none"), "stream": ()}, "no archive at"),
        ({"stream": ("orders", "orders")}, "twice"),
        ({"from_positions": times["to_positions"], "to_positions": times["from_positions"]}, "nothing between"),
        ({"stream": ("nothing",)}, "no archive of stream"),
    ):
        with pytest.raises(ConfigError, match=text):
            replay.run(spark, replay.Options(**{**common, **wrong}), job.silent)


def test_what_is_committed_early_waits_for_its_writer(
    spark: SparkSession, tmp_path: Path, target: str, redis_url: str, bus_name: str
) -> None:
    """7 and 8 have times before those of 1 to 6: tokens of a writer ascend all the same, and nobody waits an hour."""
    bench = source(spark, tmp_path)
    options = replay.Options(
        store=bench.url, to_redis=redis_url, to_name=bus_name, to_store=target, to_positions='{"w1": 11, "w2": 12}',
        stream=("orders",), speed=100, to_writer="",
    )  # fmt: skip
    replay.run(spark, options, job.silent)
    assert [facts(target, writer) for writer in ("w1", "w2")] == [
        expected(bench, writer, 0, 12) for writer in ("w1", "w2")
    ]


def test_a_table_that_is_replaced_meanwhile_is_not_replayed(
    spark: SparkSession, tmp_path: Path, target: str, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = source(spark, tmp_path)
    real = replaying.ordered

    def ordered(frames: Any) -> Any:
        bench.sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", [("f" * 32,)])
        return real(frames)

    monkeypatch.setattr(replaying, "ordered", ordered)
    options = replay.Options(
        store=bench.url, stream=("orders",), to_redis=redis_url, to_name=bus_name, to_store=target, flat_out=True
    )
    with pytest.raises(EpochChanged):
        replay.run(spark, options, job.silent)
    assert facts(target, "replay-w1") == []


def test_a_damaged_archive_is_not_replayed(
    spark: SparkSession, tmp_path: Path, target: str, redis_url: str, bus_name: str
) -> None:
    """A file is another one than its manifest says, though Parquet has nothing against it."""
    bench = source(spark, tmp_path)
    bench.archived_by_hand()
    (path,) = bench.files()
    found = parquet.read_table(path)
    parquet.write_table(found.slice(0, found.num_rows - 1), path)
    options = replay.Options(
        archive=bench.root.url, to_redis=redis_url, to_name=bus_name, to_store=target, flat_out=True
    )
    with pytest.raises(Exception, match="the manifest says"):
        replay.run(spark, options, job.silent)
    assert facts(target, "replay-w1") == []
