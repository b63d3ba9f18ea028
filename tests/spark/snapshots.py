"""What the tests of the snapshot job have in common: a table, the job, and what readers make of its files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import busrep
from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.snapshots.parquet import ParquetSource
from busrep.snapshots.sources import checked_part
from busrep.spark import job
from busrep.spark.jobs import snapshot
from tests.spark.archives import Bench, Order

DECLARED = "tests.spark.archives:STREAMS"
orders = busrep.Stream("orders", Order)
Row = tuple[int, str, str]
"""Token, writer, text."""


def filled(spark: SparkSession, folder: Path) -> Bench:
    """Keys 0 to 39, again and again; every third time a key is said to be gone; facts of three rows; a hole."""
    made = Bench(spark, folder)
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
