"""What the job ``replay`` does: Spark reads and sorts, the driver writes to the bus.

Rows are sorted by when they are due: of a writer by token, for that is the order which readers were promised; between
writers and streams by the time of the commit, a writer's never before that of its earlier facts. The driver takes them
from Spark a partition at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra
from busrep.spark import job, secrets
from busrep.spark.archive_store import Root, load, streams_of
from busrep.spark.archive_typed import dataframe
from busrep.spark.archiving import streams_in_store
from busrep.spark.following import resolved
from busrep.spark.options import EARLIEST, LATEST, Positions, _positions, declared_stream
from busrep.spark.replay_pace import Chunks, Fact, Pace, Row, facts_of
from busrep.spark.replay_target import Target, target_stream
from busrep.spark.table import Table
from busrep.streams import Stream

try:
    from pyspark.sql import functions
except ImportError:
    raise MissingExtra("spark", "replaying on Spark") from None

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from busrep.spark.jobs import stats
    from busrep.spark.jobs.replay import Options

Wait = Callable[[float], object]
# Tokens that a task sorts.
TASK_IDS = 500_000
COLUMNS = ("stream", "writer", "token", "index", "row", "committed_at")


@attrs.frozen
class Source:
    """What there is of a stream: rows of each writer above ``start`` and up to ``end``, and of these times only,
    microseconds since 1970. ``rows(start, end)``: reads them."""

    stream: str
    epoch: str
    start: Mapping[str, int]
    end: Mapping[str, int]
    rows: Callable[[Mapping[str, int], Mapping[str, int]], DataFrame]

    @property
    def writers(self) -> list[str]:
        """Those of which there is something to replay."""
        return sorted(writer for writer, at in self.end.items() if at > self.start.get(writer, 0))


def sources_of(spark: SparkSession, options: Options | stats.Options) -> list[Source]:
    """The streams to replay. Raises ConfigError, Unavailable."""
    start = _given("--from-positions", options.from_positions, EARLIEST)
    end = _given("--to-positions", options.to_positions, LATEST)
    if options.archive is None and options.store is None:
        raise ConfigError("replay what? Pass --archive, or --store")
    if options.archive is not None:
        root = Root(options.archive)
        names = options.stream or tuple(streams_of(root))
    else:
        url = secrets.resolve(options.store or "", options.password_file)
        names = options.stream or tuple(streams_in_store(url))
    if "map" in (start.kind, end.kind) and len(names) != 1:
        raise ConfigError("a map of positions is of one stream: name it with --stream, and replay the others apart")
    if options.archive is not None:
        return [archive_source(spark, root, name, start, end) for name in names]
    return [table_source(spark, options, url, name, start, end) for name in names]


def _given(flag: str, value: str, default: Positions) -> Positions:
    return _positions({flag: value}, flag, default)


def archive_source(spark: SparkSession, root: Root, name: str, start: Positions, end: Positions) -> Source:
    """An archive's rows. Raises ConfigError for positions that it does not have."""
    archive = load(root, name).checked()
    if archive.epoch is None:
        raise ConfigError(f"{root.shown} has no archive of stream {name!r}")
    has = {writer: (archive.after.get(writer, 0), at) for writer, at in archive.upto.items()}
    for flag, given in (("--from-positions", start), ("--to-positions", end)):
        for writer, at in given.map.items():
            least, most = has.get(writer, (0, 0))
            if not least <= at <= most:
                raise ConfigError(f"{flag}: the archive has writer {writer!r} of {name!r} in ({least}, {most}]")
    starts = {writer: _at(start, writer, *ends) for writer, ends in has.items()}
    ends = {writer: _at(end, writer, *ends, latest=True) for writer, ends in has.items()}

    def rows(low: Mapping[str, int], high: Mapping[str, int]) -> DataFrame:
        frame = dataframe(spark, root, archive).select(*COLUMNS).where(within(low, high))
        for given, outside in ((start, "__ge__"), (end, "__lt__")):
            if given.kind == "time":
                micros = functions.unix_micros("committed_at")
                frame = frame.where(getattr(micros, outside)(given.time))
        return frame

    return Source(name, archive.epoch, starts, ends, rows)


def _at(given: Positions, writer: str, least: int, most: int, *, latest: bool = False) -> int:
    """Of an archive's writer, which has (least, most]."""
    if given.kind == "map":
        return given.map.get(writer, least)
    return {"earliest": least, "latest": most}.get(given.kind, most if latest else least)


def table_source(
    spark: SparkSession, options: Any, url: str, name: str, start: Positions, end: Positions
) -> Source:  # fmt: skip
    """A table's rows, as far as they are proven now. Raises ConfigError, Unavailable, and of a start that was pruned
    meanwhile RangePruned, when they are read. ``options``: of a job that reads a table."""
    table = Table(url, Stream(name) if options.streams is None else declared_stream(options.streams, name))
    try:
        log = table.log()
        starts = resolved(start, "--from-positions", log, log.positions, table)
        ends = resolved(end, "--to-positions", log, log.positions, table)
    finally:
        table.close()

    def rows(low: Mapping[str, int], high: Mapping[str, int]) -> DataFrame:
        reader = spark.read.format("busrep").option("store", options.store).option("stream", name)
        given = {
            "passwordFile": options.password_file, "streams": options.streams, "typed": "false",
            "partitions": options.partitions,
            "startingPositions": orjson.dumps(dict(low)).decode(), "endingPositions": orjson.dumps(dict(high)).decode(),
            "writers": ",".join(high),
        }  # fmt: skip
        for option, value in given.items():
            if value is not None:
                reader = reader.option(option, value)
        return reader.load().select(*COLUMNS)

    return Source(name, log.epoch, starts, ends, rows)


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


def within(low: Mapping[str, int], high: Mapping[str, int]) -> Column:
    """Rows of these writers, above ``low`` and up to ``high``."""
    token = functions.col("token")
    parts = [
        (functions.col("writer") == writer) & (token > low.get(writer, 0)) & (token <= at)
        for writer, at in high.items()
    ]
    return reduce(lambda one, other: one | other, parts)


def ordered(frames: list[DataFrame]) -> Iterator[Row]:
    """Their rows by when they are due, fetched from Spark a partition at a time."""
    from pyspark.sql import Window

    frame = reduce(lambda one, other: one.unionByName(other), frames)
    frame = frame.withColumn("time", functions.unix_micros("committed_at"))
    # Of a fact, one; and never before an earlier fact of the writer.
    so_far = Window.partitionBy("stream", "writer").orderBy("token").rangeBetween(
        Window.unboundedPreceding, Window.currentRow
    )  # fmt: skip
    frame = frame.withColumn("due", functions.max("time").over(so_far))
    frame = frame.orderBy("due", "stream", "token", "writer", "index").select("stream", "writer", "token", "due", "row")
    for row in frame.toLocalIterator(prefetchPartitions=True):
        yield row["stream"], row["writer"], row["token"], row["due"], row["row"]


# -- the job -----------------------------------------------------------------------------------------------------


def run(spark: SparkSession, options: Options, progress: job.Progress, wait: Wait = time.sleep) -> job.Report:
    """See `busrep.spark.jobs.replay.run`."""
    pace = pace_of(options)
    sources = sources_of(spark, options)
    target = target_of(options, sources)
    began = time.monotonic()
    try:
        marks = target.open((one.stream, writer) for one in sources for writer in one.writers)
        counted = Counted(sources, marks)
        frames = [
            one.rows(low, high) for one in sources for low, high in [counted.left(one)] if high
        ]  # fmt: skip
        chunks = Chunks(pace, time.monotonic, wait)
        with tasks_for(spark, sources):
            for chunk in chunks.of(facts_of(ordered(frames))) if frames else ():
                target.write(chunk)
                counted.add(chunk)
                progress("replayed rows", counted.rows, None)
    finally:
        target.close()
    seconds = time.monotonic() - began
    return {
        "to": options.to_name, "durable": options.to_store is not None, "rows": counted.rows, "facts": counted.facts,
        "rows_per_second": round(counted.rows / seconds) if seconds else 0, "late": round(chunks.late, 3),
        "streams": counted.report(options.to_writer),
    }  # fmt: skip


def pace_of(options: Options) -> Pace:
    """What --speed, --rate and --flat-out say. Raises ConfigError."""
    given = [options.speed is not None, options.rate is not None, options.flat_out]
    if sum(given) > 1:
        raise ConfigError("--speed, --rate and --flat-out are three paces: pass one of them")
    if (options.speed is not None and options.speed <= 0) or (options.rate is not None and options.rate <= 0):
        raise ConfigError("a --speed or --rate above 0 is needed; --flat-out is as fast as it goes")
    speed = options.speed if any(given) else 1.0
    return Pace(speed, options.rate, options.longest_pause)


def target_of(options: Options, sources: list[Source]) -> Target:
    """The bus to write to, not open yet. Raises ConfigError."""
    declared = {
        one.stream: None if options.streams is None else declared_stream(options.streams, one.stream) for one in sources
    }
    in_memory = options.to_store is None
    return Target(
        redis=target_redis(options), name=options.to_name,
        streams={name: target_stream(name, one, in_memory=in_memory) for name, one in declared.items()},
        epochs={one.stream: one.epoch for one in sources}, store=target_store(options), prefix=options.to_writer,
    )  # fmt: skip


def target_redis(options: Options) -> str:
    """The target's Redis. Its password may stand in the URL, which stays in this process. Raises ConfigError."""
    if urlsplit(options.to_redis).password is not None and options.to_redis_password_file is None:
        return options.to_redis
    return secrets.with_redis_password(options.to_redis, options.to_redis_password_file)


def target_store(options: Options) -> str | None:
    """The URL of the target's store with its password, which may stand in it: it stays in this process. Else it is that
    of --to-password-file, or of libpq's own places; not the source's."""
    url = options.to_store
    if url is None or options.to_password_file is None:
        return url
    return secrets.resolve(url, options.to_password_file)


class Counted:
    """How far the replay is, per stream and source writer."""

    def __init__(self, sources: list[Source], marks: Mapping[tuple[str, str], int]) -> None:
        self.rows = self.facts = 0
        self._sources, self._marks = sources, marks
        self._done: dict[tuple[str, str], list[int]] = {}  # facts, rows, last token

    def left(self, source: Source) -> tuple[dict[str, int], dict[str, int]]:
        """What is left of a source: (start, end) of the writers that have something left."""
        start = {
            writer: max(source.start.get(writer, 0), self._marks.get((source.stream, writer), 0))
            for writer in source.writers
        }
        end = {writer: source.end[writer] for writer in start if source.end[writer] > start[writer]}
        return {writer: start[writer] for writer in end}, end

    def add(self, chunk: list[Fact]) -> None:
        """These facts are written."""
        for fact in chunk:
            entry = self._done.setdefault((fact.stream, fact.writer), [0, 0, 0])
            entry[:] = entry[0] + 1, entry[1] + len(fact.rows), fact.token
            self.facts += 1
            self.rows += len(fact.rows)

    def report(self, prefix: str) -> dict[str, Any]:
        """Per stream and source writer: where it began and ended, and what was written."""
        found: dict[str, Any] = {}
        for source in self._sources:
            start, _ = self.left(source)
            for writer in source.writers:
                facts, rows, _ = self._done.get((source.stream, writer), [0, 0, 0])
                mark = self._marks.get((source.stream, writer), 0)
                found.setdefault(source.stream, {})[writer] = {
                    "to": prefix + writer, "after": start.get(writer, source.end[writer]), "upto": source.end[writer],
                    "resumed": mark > source.start.get(writer, 0), "facts": facts, "rows": rows,
                }  # fmt: skip
        return found
