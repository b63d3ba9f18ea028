"""The audit on Spark. What it finds, and does not: tests/pipeline/test_audit.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.archives import Bench, orders


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> Bench:
    """An archive of four batches by two writers."""
    made = Bench(spark, tmp_path)
    made.write("w1", orders(range(1, 400, 2)), upto=399)
    made.write("w2", [*orders(range(2, 400, 2)), (400, "[400]"), (400, "[4001]")], upto=400)
    made.archived_by_hand(120)
    return made


def test_identical_and_not(bench: Bench) -> None:
    report = bench.audit()
    assert report["ok"]
    assert {name: one["table_rows"] for name, one in report["writers"].items()} == {"w1": 200, "w2": 201}
    bench.sql("DELETE FROM busrep_facts WHERE id IN (15, 16)")
    bench.files()[2].unlink()
    report = bench.audit(differences=3)
    assert [(one["writer"], one["token"], one["kind"]) for one in report["differences"]] == [
        ("w1", 15, "extra"), ("w2", 16, "extra"), ("w1", 241, "lost"),
    ]  # fmt: skip
    assert [one["kind"] for one in report["findings"]] == ["no file"]
    bench.files()[0].write_bytes(b"PAR1")
    assert {one["kind"] for one in bench.audit()["findings"]} == {"file", "no file"}
