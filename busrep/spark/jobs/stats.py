"""Statistics of streams: rates, latencies, steps, sizes, keys; as Parquet tables and a page with charts.

Of an archive, or of a table; with both, also by how much the archive is behind. With --listen also how long facts take:
it listens to the bus for so long, and looks on while readers save. The page needs no network; each number on it says
what it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from busrep.spark import job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@attrs.frozen(kw_only=True)
class Options:
    """What the job is told."""

    archive: str | None = job.option(None, help="Of this archive: its folder, or s3://...", metavar="PATH")
    store: str | None = job.store(None)
    password_file: str | None = job.password_file()
    streams: str | None = job.streams()
    stream: tuple[str, ...] = job.stream(())
    to: str = job.option(help="The folder to write the tables and report.html to.", metavar="PATH")
    from_positions: str = job.option(
        "earliest", help='From here: earliest, {"writer": token}, or a time like 2026-01-31T12:00:00Z.'
    )
    to_positions: str = job.option("latest", help="Up to here: latest, a map, or a time.")
    window: float | None = job.option(
        None, duration=True, minimum=1, help="Count rates in windows of whole seconds. [default: after the time span]"
    )
    key: str | None = job.option(
        None, help="The rows' key: a field's name, or its place from 0. [default: the first field]", metavar="FIELD"
    )
    top: int = job.option(20, minimum=1, help="So many keys of each stream.")
    listen: float = job.option(0.0, duration=True, help="Listen to the bus for so long, and measure latencies.")
    redis: str | None = job.redis("The bus's Redis, with --listen.")
    redis_password_file: str | None = job.option(None, help="Its password.", metavar="FILE")
    name: str | None = job.option(None, help="The bus's name.")
    partitions: int | None = job.option(None, minimum=1, help="Tasks that read the table; by default up to 8.")
    finish_silent: bool = job.finish_silent()
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import checks
    from busrep.spark.replay_sources import range_of
    from busrep.spark.stats.job import check_options

    check_options(options)
    checks.check_bus(options.redis, options.name, options.redis_password_file)
    checks.check_folder(options.to)
    *_, names = range_of(options)
    if options.archive is not None:
        checks.check_archive(options.archive, names, exists=True)
    if options.store is not None:
        checks.check_table(options, names)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Count, and write. Raises BusrepErrors, and what Spark raises."""
    from busrep.spark.failures import with_restarts
    from busrep.spark.stats.job import run

    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    lines = [
        f"{report['rows']:,} rows, {report['facts']:,} facts, {len(report['streams'])} streams, "
        f"{report['writers']} writers"
    ]
    if report["rows_per_second"] is not None:
        lines.append(
            f"{report['rows_per_second']:,.1f} rows/s over {report['span']:,.0f} s, at most "
            f"{report['peak_rows_per_second']:,.1f} in {report['window']} s"
        )
    for one in report["latencies"]:
        name = {"heard": "commit to the bus", "saved": "commit to a reader's saved position"}[one["measure"]]
        lines.append(f"{name}: p50 {one['p50'] * 1e3:,.1f} ms, p99 {one['p99'] * 1e3:,.1f} ms, {one['count']:,} facts")
    if report["archive_lag_rows"]:
        age = report["archive_lag_seconds"]
        old = "" if age is None else f", the oldest {age:,.0f} s old"
        lines.append(f"the archive lacks {report['archive_lag_rows']:,} rows that the table has proven{old}")
    return "\n".join([*lines, f"the page: {report['page']}"])


def main() -> None:
    """For spark-submit."""
    job.submit("stats")


if __name__ == "__main__":
    main()
