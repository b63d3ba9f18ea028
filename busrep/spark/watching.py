"""How far Spark is with what the driver waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from busrep.spark.failures import is_sparks
from busrep.spark.job import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Seconds between two looks.
LOOK = 0.5


@contextlib.contextmanager
def watched(spark: SparkSession, progress: Progress, stage: str) -> Iterator[None]:
    """Tell ``progress`` how many tasks of the stages that are running are done, until the block ends."""
    ended = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def look() -> None:
        while not ended.wait(LOOK):
            try:
                found = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            except Exception as error:
                if is_sparks(error) or isinstance(error, OSError):
                    return  # Spark is ending: whoever waits for it says why
                raise
            stages = [one for one in found if one is not None]
            if stages:
                progress(stage, sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages))

    progress(stage, 0, None)
    thread = threading.Thread(target=look, name="busrep-watching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
