"""Count rows, where Spark runs.

A job for the tests of `busrep pipeline`; as the real ones it can be submitted by its path.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

import busrep.spark.jobs
from busrep.errors import ConfigError, PositionTooOld
from busrep.spark import job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if __name__ == "__main__":  # the command looks for the job there
    busrep.spark.jobs.__path__.append(str(Path(__file__).parent))


@attrs.frozen(kw_only=True)
class Options:
    """What to count, and what goes wrong."""

    store: str | None = job.store(None)
    stream: tuple[str, ...] = job.stream(())
    rows: int = job.option(10, minimum=1, help="Rows to count.")
    parts: int = job.option(2, help="Partitions.")
    every: float = job.option(1.5, duration=True, help="Nothing.")
    how: Literal["well", "badly"] = job.option("well", help="How it ends.")
    quietly: bool = job.option(False, help="Nothing.")
    folder: Path | None = job.option(None, help="Nothing.", metavar="PATH", env="COUNTING_FOLDER")
    error: str | None = job.option(None, help="What is raised, and where.")


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Count."""
    if options.error == "driver":
        raise ConfigError("the driver fails")
    if options.error == "bug":
        raise ZeroDivisionError
    if options.error == "interrupt":
        raise KeyboardInterrupt
    if options.error == "sql":
        spark.sql("select nothing from nowhere")
    rows, error = options.rows, options.error

    def count(part: int) -> tuple[int, list[str]]:
        # In here, so that it travels by value: this module is none that executors could import.
        import busrep

        if error == "executor":
            raise PositionTooOld("orders", f"w{part}", 3, 8)
        if error == "slow":
            time.sleep(600)
        return rows, [busrep.__file__, os.environ.get("JAVA_HOME", "")]

    progress("counting", 0, rows)
    numbers = spark.sparkContext.parallelize(range(options.parts), options.parts)
    found: list[Any] = numbers.map(count).collect()
    progress("counting", rows, rows)
    return {
        "ok": options.how == "well",
        "counted": sum(rows for rows, _ in found),
        "master": spark.sparkContext.master,
        "zone": spark.conf.get("spark.sql.session.timeZone"),
        "ui": spark.conf.get("spark.ui.enabled"),
        "store": options.store,
        "every": options.every,
        "seen": found[0][1],
    }


def main() -> None:
    """For spark-submit."""
    job.submit("counting")


if __name__ == "__main__":
    main()
