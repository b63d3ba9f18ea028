"""Replay an archive, or a range of a table, to another bus.

Each writer of the source becomes a writer of the target, its name behind --to-writer. Facts stay facts, and those of a
writer in their order; between writers they come by the times of their commits, near each other ones perhaps swapped.
With --to-store it goes on where it stood, however it ended, without loss or duplicate; without, streams are in memory.
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

    archive: str | None = job.option(None, help="Replay this archive: its folder, or s3://...", metavar="PATH")
    store: str | None = job.store(None)  # where there is no archive
    password_file: str | None = job.password_file()
    streams: str | None = job.streams()
    stream: tuple[str, ...] = job.stream(())
    from_positions: str = job.option(
        "earliest", help='From here: earliest, {"writer": token}, or a time like 2026-01-31T12:00:00Z.'
    )
    to_positions: str = job.option("latest", help="Up to here: latest (as of the start), a map, or a time.")
    to_redis: str = job.option(
        help="The target's Redis.", metavar="URL", env="BUSREP_TO_REDIS",
        elsewhere="the file of --to-redis-password-file, or have the URL in BUSREP_TO_REDIS",
    )  # fmt: skip
    to_redis_password_file: str | None = job.option(None, help="Its password.", metavar="FILE")
    to_name: str = job.option(help="The target bus's name.", metavar="NAME")
    to_store: str | None = job.option(
        None, help="The target's table. Without, streams are in memory, and are not resumed.", metavar="URL",
        env="BUSREP_TO_STORE", elsewhere="the file of --to-password-file, or have the URL in BUSREP_TO_STORE",
    )  # fmt: skip
    to_password_file: str | None = job.option(None, help="Its password.", metavar="FILE")
    to_writer: str = job.option("replay-", help="What comes before the writers' names in the target.", metavar="PREFIX")
    speed: float | None = job.option(None, help="So many times as fast as the commits were. [default: 1]")
    flat_out: bool = job.option(False, help="As fast as it goes.")
    rate: float | None = job.option(None, help="So many rows a second.")
    longest_pause: float | None = job.option(
        None, duration=True, help="With --speed: wait no longer than this for a fact."
    )
    partitions: int | None = job.option(None, minimum=1, help="Tasks that read the table; by default up to 8.")
    finish_silent: bool = job.finish_silent()
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import checks
    from busrep.spark.replay_sources import range_of
    from busrep.spark.replaying import check_target, one_source, pace_of

    pace_of(options)
    one_source(options)
    check_target(options)
    *_, names = range_of(options)
    if options.archive is not None:
        checks.check_archive(options.archive, names, exists=True)
    else:
        checks.check_table(options, names)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Replay; returns at the end of the range. Raises BusrepErrors, WriterFenced among them when another replay to
    these writers was started, and what Spark raises."""
    from busrep.spark.failures import with_restarts
    from busrep.spark.replaying import run

    if options.to_store is None:  # begun again it would send its rows again: there is no note of what was sent
        return run(spark, options, progress)
    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    lines = []
    for name, writers in report["streams"].items():
        for writer, one in writers.items():
            again = ", resumed" if one["resumed"] else ""
            lines.append(
                f"{name}: {writer} ({one['after']}, {one['upto']}] to {one['to']}: {one['facts']:,} facts, "
                f"{one['rows']:,} rows{again}"
            )
    late = f", at most {report['late']} s late" if report["late"] else ""
    total = f"replayed {report['rows']:,} rows to {report['to']}, {report['rows_per_second']:,} rows/s{late}"
    return "\n".join([*lines, total])


def main() -> None:
    """For spark-submit."""
    job.submit("replay")


if __name__ == "__main__":
    main()
