"""Write a snapshot of a stream for readers to bootstrap from: the latest row of each key, or all rows.

Of the table, at the positions that its writers have proven at this moment, or of an archive, at those where it ends.
The directory holds one snapshot, in the layout of docs/bootstrap.md, for snapshot_source=file:///directory. The
manifest is written last, in one step: until then there is no snapshot, or the one before, whole.
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

    store: str | None = job.store(None)
    password_file: str | None = job.password_file()
    streams: str | None = job.streams()
    stream: str = job.stream()
    archive: str | None = job.option(
        None, help="Take the rows of this archive, instead of the table's.", metavar="PATH"
    )
    to: str = job.option(help="The snapshot's directory: a path, file:///path or s3://bucket/prefix.", metavar="URL")
    key: str | None = job.option(
        None, help="Keep the latest row of each value of these fields of the row class.", metavar="FIELD[,FIELD]"
    )
    all: bool = job.option(False, help="Keep all rows.")
    tombstone: str | None = job.option(
        None, help="Keys whose latest row has this value in this field are left out.", metavar="FIELD=VALUE"
    )
    part_rows: int = job.option(20_000, minimum=1, help="Rows a part: what a reader applies in one transaction.")
    partitions: int | None = job.option(None, minimum=1, help="Tasks that write parts; by default after the size.")
    grace: float = job.option(
        3600.0, duration=True, help="So long the parts of an older snapshot, and of a run that died, are left alone."
    )
    finish_silent: bool = job.finish_silent()
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import checks
    from busrep.spark.snapshotting import keys_of, present

    keys_of(options)
    present(checks.check_folder(options.to), options.stream)
    if options.archive is not None:
        checks.check_archive(options.archive, [options.stream], exists=True)
    else:
        checks.check_table(options, [options.stream])


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Write it. Raises BusrepErrors: ConfigError, RowError, Unavailable; and what Spark raises."""
    from busrep.spark.failures import with_restarts
    from busrep.spark.snapshotting import run

    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    positions = ", ".join(f"{writer} {at}" for writer, at in report["positions"].items()) or "none"
    return (
        f"{report['stream']}: {report['rows']:,} rows ({report['kept']}) in {report['parts']} parts, "
        f"{report['bytes']:,} bytes, at positions: {positions}\nwritten to {report['to']}"
    )


def main() -> None:
    """For spark-submit."""
    job.submit("snapshot")


if __name__ == "__main__":
    main()
