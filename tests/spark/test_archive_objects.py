"""Archives in an object store, by the jobs: Spark itself has no file system for it, the tasks and the driver do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

from busrep import ConfigError
from busrep.spark.archive_objects import options_of, plain
from busrep.spark.archive_store import Root, load
from busrep.spark.archive_typed import dataframe
from tests.pipeline.objects import object_store
from tests.spark.archives import Bench, orders
from tests.spark.long import long


@long
def test_an_archive_and_a_delta_table_in_an_object_store(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalake import DeltaTable

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bench = Bench(spark, tmp_path)
    with object_store() as objects:
        bench.root = Root(objects.url("lake/one"))
        bench.write("w1", orders(range(1, 50)), upto=49)
        with pytest.raises(ConfigError, match="cannot keep its checkpoint at s3://lake/one.*--checkpoint"):
            bench.archive()
        told: Any = {"checkpoint": str(tmp_path / "checkpoint"), "format": "delta"}
        assert bench.archive(batch_rows=30, **told)["rows"] == 49
        bench.write("w1", orders(range(50, 60)), upto=59)
        shutil.rmtree(tmp_path / "checkpoint")  # as on another machine
        assert bench.archive(**told)["rows"] == 10
        assert bench.archived() == bench.table()
        assert bench.audit()["ok"]
        assert bench.compact(grace=0.0)["files"] == 1
        assert [file.rows for _, file in load(bench.root, "orders").files] == [59]
        assert dataframe(spark, bench.root, load(bench.root, "orders")).selectExpr("sum(token)").first() == (1770,)
        url = bench.root.below("stream=orders").url
        found = DeltaTable(plain(url), storage_options=options_of(url))
        assert sorted(pyarrow.table(found.to_pyarrow_table(columns=["token"])).column(0).to_pylist()) == [*range(1, 60)]
        # Nothing of it is on this machine's disk, and the secret nowhere but in the jobs' memory.
        assert not list(tmp_path.rglob("*.parquet"))
