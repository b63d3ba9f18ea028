"""The source, the sink and each job once on a small table: `python -m tests.spark.all_jobs JSON`, what it is told.

Where Spark runs, and what it is told, is the environment's. Prints what the jobs have reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from busrep.spark import job, session
from busrep.spark.jobs import archive, audit, backfill, compact, replay, snapshot, stats

STREAMS = "tests.spark.backfill_functions:STREAMS"
ROWS = 90


def copied(spark: SparkSession, folder: Path, store: str) -> None:
    """Rows of a writer's, and a stream of them to another writer."""
    sink = {"store": store, "stream": "orders", "writer": "w1", "batch": "first"}
    rows = spark.range(0, ROWS, 1, 3).selectExpr("""concat('[', id, ',"new"]') AS row""")
    rows.write.format("busrep").mode("append").options(**sink).save()
    source = {"store": store, "stream": "orders", "maxRowsPerTrigger": "60"}
    query = (
        spark.readStream.format("busrep").options(**source).load().select("row")
        .writeStream.format("busrep").options(store=store, stream="payments", writer="w2")
        .option("checkpointLocation", str(folder / "copied")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()


def read(spark: SparkSession, store: str, stream: str) -> int:
    found = spark.read.format("busrep").options(store=store, stream=stream, streams=STREAMS).load()
    found.explain("extended")
    return found.select("number").distinct().count()


def main(folder: str, store: str, redis: str, name: str, password_file: str | None = None, **conf: str) -> None:
    spark = session("all jobs", conf=conf)
    at, told = Path(folder), {"store": store, "streams": STREAMS, "password_file": password_file}
    copied(spark, at, store)
    reports: dict[str, Any] = {"read": [read(spark, store, "orders"), read(spark, store, "payments")]}

    def run(module: Any, **options: Any) -> None:
        reports[module.__name__.rpartition(".")[2]] = module.run(spark, module.Options(**options), job.silent)

    orders = {"stream": ("orders",), **told}
    run(archive, archive=f"{folder}/archive", available_now=True, batch_rows=40, **orders)
    run(compact, archive=f"{folder}/archive", grace=0.0)
    run(audit, archive=f"{folder}/archive", **orders)
    run(snapshot, key="number", to=f"{folder}/snapshot", **{**orders, "stream": "orders"})
    run(replay, to_redis=redis, to_name=name, flat_out=True, **orders)
    run(stats, to=f"{folder}/stats", **orders)
    into = {"into": "changes", "writer": "backfill", "checkpoint": f"{folder}/backfill"}
    run(backfill, function="tests.spark.backfill_functions:changes", **into, **orders)
    reports["master"] = spark.sparkContext.master
    reports["executors"] = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    reports["java"] = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")  # type: ignore[union-attr]
    sys.stdout.write(json.dumps(reports) + "\n")
    sys.stdout.flush()
    spark.stop()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
