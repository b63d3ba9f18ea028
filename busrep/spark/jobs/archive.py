"""Archive streams in Parquet files, each row once.

Follows the streams, or with --available-now ends with what there is. Every batch becomes part of the archive in one
step, by its manifest: killed at any moment and started again, it goes on without loss or duplicate. docs/pipeline.md
has the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from busrep.spark import job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@attrs.frozen(kw_only=True)
class Options:
    """What the job is told."""

    store: str = job.store()
    password_file: str | None = job.password_file()
    streams: str | None = job.streams()
    stream: tuple[str, ...] = job.stream(())
    archive: str = job.option(help="The archive's folder, or s3://bucket/prefix.", metavar="PATH")
    available_now: bool = job.option(False, help="End with what there is now, instead of following.")
    every: float = job.option(10.0, duration=True, help="When following: a batch so often.")
    file_rows: int = job.option(1_000_000, minimum=1, help="About so many rows a file, at most.")
    batch_rows: int = job.option(2_000_000, minimum=1, help="About so many rows a batch, at most.")
    partitions: int | None = job.option(None, minimum=1, help="Tasks a batch; by default after its size, up to 8.")
    start: str = job.option("earliest", help='Where a new archive begins: earliest, latest, or {"writer": token}.')
    checkpoint: str | None = job.option(None, help="Spark's checkpoints; by default in the archive.")
    format: Literal["parquet", "delta"] = job.option("parquet", help="Delta: a Delta log beside the files, too.")
    redis: str | None = job.redis("The bus to hear of new rows from, instead of asking.", shown=True)
    redis_password_file: str | None = job.option(None, help="Its password.", metavar="FILE")
    name: str | None = job.option(None, help="The bus's name.")
    finish_silent: bool = job.finish_silent()
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import archive_driver, checks

    if options.format == "delta":
        from busrep.spark.archive_delta import check_delta

        check_delta()
    if options.start not in ("earliest", "latest"):
        archive_driver.positions_of(options.start)
    checks.check_bus(options.redis, options.name, options.redis_password_file)
    checks.check_folder(options.checkpoint or options.archive)
    checks.check_archive(options.archive, options.stream, exists=False)
    checks.check_table(options, options.stream)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Archive; returns when there is no more, or a query fails, or on KeyboardInterrupt. Raises BusrepErrors, and what
    Spark raises."""
    from busrep.spark.archiving import run

    return run(spark, options, progress)


def describe(report: job.Report) -> str:
    """The report for a person."""
    lines = [
        f"{name}: {one['rows']:,} rows in {one['batches']} batches, {one['files']} files, {one['bytes']:,} bytes"
        for name, one in report["streams"].items()
    ]
    return "\n".join([*lines, f"archived {report['rows']:,} rows into {report['archive']}"])


def main() -> None:
    """For spark-submit."""
    job.submit("archive")


if __name__ == "__main__":
    main()
