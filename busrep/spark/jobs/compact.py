"""Merge the small files of an archive into files of full size.

May run while the archive is being written and read. What was replaced is deleted by a later run, when the grace period
is over. Needs no store.
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

    archive: str = job.option(help="The archive's folder, or s3://bucket/prefix.", metavar="PATH")
    stream: tuple[str, ...] = job.stream(())
    file_rows: int = job.option(1_000_000, minimum=1, help="About so many rows a file; those of half as many stay.")
    grace: float = job.option(3600.0, duration=True, help="So long who lists the archive has time to read its files.")


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, Unavailable."""
    from busrep.spark import checks

    checks.check_archive(options.archive, options.stream, exists=False)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Compact the archive of each stream. Raises BusrepErrors: ConfigError for an archive that is damaged, which is
    left as it is."""
    from busrep.spark.compacting import run
    from busrep.spark.failures import with_restarts

    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    lines = [
        f"{name}: {one['files_before']} files, now {one['files']}; {one['merged_rows']:,} rows rewritten, "
        f"{one['deleted']} old files deleted"
        for name, one in report["streams"].items()
    ]
    return "\n".join(lines) or "there is no archive"


def main() -> None:
    """For spark-submit."""
    job.submit("compact")


if __name__ == "__main__":
    main()
