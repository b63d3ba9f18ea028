"""Compare an archive with the table that it is of, and with what readers have handled.

Per stream and writer: counts, holes, duplicates, order and hashes of all rows up to where the archive ends, above the
table's retention floor; each file with its manifest, and the manifests with one another; and the reports of readers on
what they have handled. Exits with 1, and names the
first tokens that differ, when anything does. The table may be written to meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
    bucket: int = job.option(10_000, minimum=1, help="Tokens that are compared by one hash, per writer.")
    differences: int = job.option(20, minimum=1, help="How many differing rows to name, per stream.")
    handled: tuple[str, ...] = job.option(
        (), help="A reader's report, of busrep.ReaderReport or busrep tail --handled.", metavar="FILE"
    )
    once: bool = job.option(False, help="A row that a reader has handled again, after a crash perhaps, is wrong.")
    partitions: int | None = job.option(None, minimum=1, help="Tasks that read the table; by default up to 8.")
    max_behind: float | None = job.option(
        None, duration=True,
        help="Proven and committed rows that are older, and not in the archive, are wrong. Without --stream: of "
        "streams that are in the archive.",
    )  # fmt: skip
    lease: float = job.lease()


def check(options: Options) -> None:
    """Check the options without Spark. Raises ConfigError, MissingExtra, SchemaError, Unavailable."""
    from busrep.spark import checks

    checks.check_folder(options.archive)
    checks.check_files("--handled", options.handled)
    # A table that has lost its streams is for the audit to tell.
    checks.check_table(options, options.stream, may_be_empty=True)


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """The report, in which ``ok`` is false when anything differs. Raises BusrepErrors, and what Spark raises."""
    from busrep.spark.auditing import run
    from busrep.spark.failures import with_restarts

    return with_restarts(lambda: run(spark, options, progress))


def describe(report: job.Report) -> str:
    """The report for a person."""
    lines = []
    for name, stream in report["streams"].items():
        lines.append(f"{name}: {stream['archive_rows']:,} rows in {stream['files']} files")
        for writer, one in stream["writers"].items():
            verdict = "identical" if one["same"] else f"DIFFERS in {one['differing_buckets']} ranges"
            if one["table_upto"] > one["upto"]:
                verdict += f"  (the table goes on to {one['table_upto']})"
            lines.append(
                f"  {writer}: ({one['after']}, {one['upto']}]  archive {one['archive_rows']:,}  table "
                f"{one['table_rows']:,}  {verdict}"
            )
        if stream["not_compared"]:
            lines.append(f"  not compared: {stream['not_compared']:,} rows that the table does not have any more")
        for reader, positions in stream["readers"].items():
            behind = sum(at["behind_archive"] for at in positions.values())
            lines.append(f"  reader {reader}: " + (f"{behind:,} IDs behind the archive" if behind else "not behind"))
        lines += list(_of_readers(stream.get("handled", {})))
        lines += [f"  WRONG: {found['text']}" for found in stream["findings"]]
        lines += [
            f"  WRONG: writer {one['writer']}, token {one['token']}: {one['text']}" for one in stream["differences"]
        ]
    lines += [f"WRONG: {found['text']}" for found in report["findings"]]
    lines += [f"{path}: {count} lines that a crash has torn" for path, count in report["torn_lines"].items()]
    if report["not_archived"]:
        lines.append(f"not archived: {', '.join(report['not_archived'])}")
    if not report["streams"]:
        lines.append(f"WRONG: there is no archive at {report['archive']}")
    verdict = "identical" if report["ok"] else "NOT IDENTICAL"
    return "\n".join([*lines, f"{verdict}: {report['compared_rows']:,} rows compared"])


def _of_readers(handled: dict[str, Any]) -> Iterator[str]:
    """What readers say that they have handled."""
    for reader, found in handled.items():
        for writer, one in found["writers"].items():
            counts = {name: one[name] for name in ("repeated", "lost", "extra", "changed", "out_of_order")}
            told = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
            if one["not_compared"]:
                told.append(f"{one['not_compared']:,} not compared")
            yield (
                f"  reader {reader} handled {writer}: ({one['after']}, {one['upto']}]  {one['rows']:,} rows  "
                f"{'identical' if one['same'] else 'DIFFERS'}" + (f"  ({', '.join(told)})" if told else "")
            )
        if found["not_reported"]:
            yield f"  reader {reader} reports nothing of {', '.join(found['not_reported'])}"


def main() -> None:
    """For spark-submit."""
    job.submit("audit")


if __name__ == "__main__":
    main()
