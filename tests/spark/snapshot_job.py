"""Snapshot jobs side by side in a process of their own, to be killed: `python -m tests.spark.snapshot_job`, their
options as JSON on stdin."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from busrep.spark import job, session
from busrep.spark.jobs import snapshot
from tests.spark.cluster import settings


def main(folder: str, options: list[dict[str, Any]]) -> None:
    spark = session("snapshot", conf=settings(Path(folder)))
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda one: snapshot.run(spark, snapshot.Options(**one), job.silent), options):
            pass
    spark.stop()


if __name__ == "__main__":
    main(**json.load(sys.stdin))
