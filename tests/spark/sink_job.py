"""A driver that writes files of numbers to a bus: `python -m tests.spark.sink_job`, its task as JSON on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from busrep.spark import session
from tests.spark.cluster import settings


def main(folder: str, options: dict[str, str], files: int = 1) -> None:
    spark = session("sink", conf=settings(Path(folder)))
    numbers = spark.readStream.schema("value string").option("maxFilesPerTrigger", files).text(f"{folder}/input")
    query = (
        # After a kill at the wrong moment Spark takes two files into one batch, the larger first: the numbers order it.
        numbers.selectExpr("concat('[', value, ']') AS row", "cast(value AS bigint) AS token")
        .writeStream.format("busrep")
        .options(**options, orderBy="token")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(**json.load(sys.stdin))
