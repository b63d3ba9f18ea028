"""Derive a stream from others, by a function of yours.

FUNCTION(row, stream, writer, token) is called with each row of the streams, in parallel on the executors, and gives the
rows that it becomes: several, one, or none. Each is a fact of --writer in the stream --into; of each source writer they
are in its order. The rows are those of an archive, of the table up to what is proven when the job first starts, or of
both. Killed at any moment and started again it goes on, and each row is written once.
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

    store: str = job.store()
    password_file: str | None = job.password_file()
    streams: str | None = job.streams()
    stream: tuple[str, ...] = job.stream()
    function: str = job.option(help="What a row becomes.", metavar="MODULE:FUNCTION")
    into: str = job.option(help="The stream to write.", metavar="NAME")
    writer: str = job.option(help="The writer of its facts: a name for this job alone.", metavar="NAME")
    checkpoint: str = job.option(
        help="Where it notes what is to be done: the same folder at each start, of this backfill alone.", metavar="PATH"
    )
    archive: str | None = job.option(
        None, help="Take the rows of this archive, and behind its end the table's.", metavar="PATH"
    )
    table: bool = job.option(True, help="Whether rows come from the table. Without: from the archive alone.")
    start: str = job.option("earliest", help='Where the table\'s rows begin: earliest, or {"writer": token}.')
    to_store: str | None = job.option(
        None, help="The store to write to; by default --store.", metavar="URL", shown=True,
        elsewhere="the file of --to-password-file, or ~/.pgpass",
    )  # fmt: skip
    to_password_file: str | None = job.option(None, help="A file with the password of --to-store.", metavar="FILE")
    batch_ids: int = job.option(
        200_000, minimum=1, help="IDs of the source a batch: its rows become facts in one transaction."
    )
    partitions: int | None = job.option(None, minimum=1, help="Tasks that read the table, a batch; by default up to 8.")
    query: str | None = job.option(
        None, help="Its name in the target, where nothing is written twice under one; by default backfill:INTO:WRITER."
    )
    redis: str | None = job.redis("The bus to tell of the new rows.", shown=True)
    redis_password_file: str | None = job.option(None, help="Its password.", metavar="FILE")
    name: str | None = job.option(None, help="The bus's name.")
    finish_silent: bool = job.finish_silent()
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import checks
    from busrep.spark.backfilling import check_options

    check_options(options)
    checks.check_folder(options.checkpoint)
    if options.archive is not None:
        checks.check_archive(options.archive, options.stream, exists=True)
    if options.table:
        checks.check_table(options, options.stream)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """Do what is not done yet. Raises BusrepErrors, and what Spark raises: started again, it goes on."""
    from busrep.spark.backfilling import run
    from busrep.spark.failures import with_restarts

    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    before = f" ({report['batches_before']} were done before)" if report["batches_before"] else ""
    lines = [
        f"{name}: up to " + (", ".join(f"{writer} {at}" for writer, at in upto.items()) or "nothing")
        for name, upto in report["upto"].items()
    ]
    written = f"{report['rows']:,} facts of {report['writer']} in {report['batches']} batches"
    lines.append(f"{report['into']}: {written}{before}")
    return "\n".join(lines)


def main() -> None:
    """For spark-submit."""
    job.submit("backfill")


if __name__ == "__main__":
    main()
