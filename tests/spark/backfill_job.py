"""The backfill job in a process of its own, to be killed: `python -m tests.spark.backfill_job`, options on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from busrep.spark import job, session
from busrep.spark.jobs import backfill
from tests.spark.cluster import settings


def main(folder: str, options: dict[str, Any]) -> None:
    spark = session("backfill", conf=settings(Path(folder)))
    backfill.run(spark, backfill.Options(**{**options, "stream": tuple(options["stream"])}), job.silent)
    spark.stop()


if __name__ == "__main__":
    main(**json.load(sys.stdin))
