"""What the jobs ``replay`` and ``stats`` read: streams of an archive or a table, between two positions of each writer.

Positions are of tokens, also where a time is told, so that two ranges which meet have each fact once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from busrep.errors import ConfigError, MissingExtra
from busrep.spark import secrets
from busrep.spark.archive_store import Root, existing, streams_of
from busrep.spark.archive_typed import dataframe
from busrep.spark.archiving import streams_in_store
from busrep.spark.following import resolved
from busrep.spark.options import EARLIEST, LATEST, Positions, positions_of, stream_of
from busrep.spark.ranged import FromTable, rows_of_archive
from busrep.spark.table import Table

try:
    from pyspark.sql import functions
except ImportError:
    raise MissingExtra("spark", "reading streams on Spark") from None

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs import replay, stats

# Tokens that a task sorts.
TASK_IDS = 500_000
COLUMNS = ("stream", "writer", "token", "index", "row", "committed_at")


@attrs.frozen
class Source:
    """What there is of a stream: rows of each writer above ``start`` and up to ``end``. ``rows(start, end)``: reads
    them. ``epoch_now``: asks of which log they are."""

    stream: str
    epoch: str
    start: Mapping[str, int]
    end: Mapping[str, int]
    rows: Callable[[Mapping[str, int], Mapping[str, int]], DataFrame]
    epoch_now: Callable[[], str]

    @property
    def writers(self) -> list[str]:
        """Those of which there is something to replay."""
        return sorted(writer for writer, at in self.end.items() if at > self.start.get(writer, 0))


def sources_of(
    spark: SparkSession, options: replay.Options | stats.Options, *, checked: bool
) -> list[Source]:  # fmt: skip
    """The streams to read: those of the archive, where one is named, else of the table. ``checked``: an archive's files
    are compared with their manifests. Raises ConfigError, Unavailable."""
    start, end, names = range_of(options)
    if options.archive is not None:
        root = Root(options.archive)
        return [archive_source(spark, root, name, start, end, checked=checked) for name in names]
    url = secrets.resolve(options.store or "", options.password_file)
    return [table_source(spark, options, url, name, start, end) for name in names]


def range_of(options: replay.Options | stats.Options) -> tuple[Positions, Positions, tuple[str, ...]]:
    """Where to begin and to end, and the streams. Raises ConfigError, Unavailable."""
    start = _given("--from-positions", options.from_positions, EARLIEST)
    end = _given("--to-positions", options.to_positions, LATEST)
    if start.kind == end.kind == "time" and start.time >= end.time:
        raise ConfigError("--to-positions is no later than --from-positions: there is nothing between")
    names = names_of(options)
    if len(set(names)) < len(names):
        raise ConfigError("a stream is named twice by --stream")
    if "map" in (start.kind, end.kind) and len(names) != 1:
        raise ConfigError("a map of positions is of one stream: name it with --stream, and take the others apart")
    return start, end, names


def names_of(options: replay.Options | stats.Options) -> tuple[str, ...]:
    """The streams of the archive, where one is named, else of the table. Raises ConfigError, Unavailable."""
    if options.archive is not None:
        root = Root(options.archive)
        if names := options.stream or tuple(streams_of(root)):
            return names
        raise ConfigError(f"there is no archive at {root.shown}")
    if options.store is None:
        raise ConfigError("of what? Pass --archive, or --store")
    return options.stream or tuple(streams_in_store(secrets.resolve(options.store, options.password_file)))


def _given(flag: str, value: str, default: Positions) -> Positions:
    return positions_of({flag: value}, flag, default)


def archive_source(
    spark: SparkSession, root: Root, name: str, start: Positions, end: Positions, *, checked: bool
) -> Source:  # fmt: skip
    """An archive's rows. Raises ConfigError for positions that it does not have."""
    archive, epoch = existing(root, name)
    has = {writer: (archive.after.get(writer, 0), at) for writer, at in archive.upto.items()}
    for flag, given in (("--from-positions", start), ("--to-positions", end)):
        for writer, at in given.map.items():
            least, most = has.get(writer, (0, 0))
            if not least <= at <= most:
                raise ConfigError(f"{flag}: the archive has writer {writer!r} of {name!r} in ({least}, {most}]")

    def positions(given: Positions) -> dict[str, int]:
        if given.kind == "time":
            return archive_at(dataframe(spark, root, archive, fields=False), has, given.time)
        if given.kind == "latest":
            return {writer: most for writer, (_, most) in has.items()}
        return {writer: given.map.get(writer, least) for writer, (least, _) in has.items()}

    def rows(low: Mapping[str, int], high: Mapping[str, int]) -> DataFrame:
        if checked:
            found = rows_of_archive(spark, root, archive, low, high, COLUMNS[1:])
            return found.select(functions.lit(name).alias("stream"), "*")
        frame = dataframe(spark, root, archive, fields=False).select(*COLUMNS)
        if dict(high) == dict(archive.upto) and all(low.get(writer, 0) <= has[writer][0] for writer in high):
            return frame
        limits = [(writer, low.get(writer, 0), at) for writer, at in high.items()]
        ranges = spark.createDataFrame(limits, "writer string, low bigint, high bigint")
        inside = (functions.col("token") > functions.col("low")) & (functions.col("token") <= functions.col("high"))
        return frame.join(functions.broadcast(ranges), "writer").where(inside).select(*COLUMNS)

    return Source(name, epoch, positions(start), positions(end), rows, lambda: epoch)


def archive_at(rows: DataFrame, has: Mapping[str, tuple[int, int]], micros: int) -> dict[str, int]:
    """The positions at a time, microseconds since 1970, of writers that have (least, most]: as `Table.at_time` has
    them, just below the first row of that time or later. Not each row is on the right side of it, for the order of
    times is not that of tokens; but two ranges that meet at a time have each row once."""
    late = rows.where(functions.unix_micros("committed_at") >= micros)
    first = {
        row["writer"]: row["first"]
        for row in late.groupBy("writer").agg(functions.min("token").alias("first")).collect()
    }
    return {writer: first.get(writer, most + 1) - 1 for writer, (_, most) in has.items()}


def table_source(
    spark: SparkSession, options: Any, url: str, name: str, start: Positions, end: Positions
) -> Source:  # fmt: skip
    """A table's rows, as far as they are proven now. Raises ConfigError, Unavailable, and of a start that was pruned
    meanwhile RangePruned, when they are read. ``options``: of a job that reads a table."""
    source = FromTable(store=options.store, password_file=options.password_file, streams=options.streams, stream=name)
    table = Table(url, stream_of(options.streams, name))

    def epoch_now() -> str:
        with table:
            return table.log().epoch

    with table:
        log = table.log()
        starts = resolved(start, "--from-positions", log, log.positions, table)
        ends = resolved(end, "--to-positions", log, log.positions, table)

    def rows(low: Mapping[str, int], high: Mapping[str, int]) -> DataFrame:
        return source.rows(spark, low, high, options.partitions, COLUMNS)

    return Source(name, log.epoch, starts, ends, rows, epoch_now)


@contextlib.contextmanager
def tasks_for(spark: SparkSession, sources: list[Source]) -> Iterator[None]:
    """Shuffles in as many tasks as the ranges of tokens call for: Spark's 200 cost seconds where there is little."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    ids = sum(max(one.end.values(), default=0) - min(one.start.values(), default=0) for one in sources)
    spark.conf.set(name, str(max(spark.sparkContext.defaultParallelism, min(200, ids // TASK_IDS))))
    try:
        yield
    finally:
        spark.conf.set(name, before or "200")
