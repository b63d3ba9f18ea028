"""What the job ``replay`` does: Spark reads and sorts, the driver writes to the bus.

Rows are sorted by when they are due: of a writer by token, for that is the order which readers were promised; between
writers and streams by the time of the commit, a writer's never before that of its earlier facts. The driver takes them
from Spark a partition at a time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from busrep.errors import ConfigError, EpochChanged, MissingExtra
from busrep.settings import Settings
from busrep.spark import job, secrets
from busrep.spark.options import declared_stream
from busrep.spark.replay_pace import Chunks, Fact, Pace, Row, facts_of
from busrep.spark.replay_sources import Source, names_of, sources_of, tasks_for
from busrep.spark.replay_target import Target, target_stream
from busrep.spark.staging_store import open_staging_store
from busrep.spark.waiting import waiting_rows
from busrep.streams import Registry
from busrep.sync.publisher import redis_pool

try:
    from pyspark.sql import functions
except ImportError:
    raise MissingExtra("spark", "replaying on Spark") from None

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs.replay import Options

Wait = Callable[[float], object]


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
        yield tuple(row)  # a Row looks for each field by its name, which takes as long as all else that is done here


# -- the job -----------------------------------------------------------------------------------------------------


def run(spark: SparkSession, options: Options, progress: job.Progress, wait: Wait = time.sleep) -> job.Report:
    """See `busrep.spark.jobs.replay.run`."""
    pace = pace_of(options)
    one_source(options)
    waiting = waiting_rows(options, names_of(options) if options.archive is None else ())
    waiting.look()
    sources = sources_of(spark, options, checked=True)
    target = target_of(options, sources)
    began = time.monotonic()
    try:
        marks = target.open(
            {(one.stream, writer): one.start.get(writer, 0) for one in sources for writer in one.writers}
        )
        counted = Counted(sources, marks)
        frames = [
            one.rows(low, high) for one in sources for low, high in [counted.left(one)] if high
        ]  # fmt: skip
        chunks = Chunks(
            pace, time.monotonic, wait, told=lambda rest: progress("seconds to the next fact", 0, int(rest))
        )
        with tasks_for(spark, sources):
            for number, chunk in enumerate(chunks.of(facts_of(ordered(frames))) if frames else ()):
                if not number:  # Spark has planned what it reads, and so far nothing is written
                    _check_logs(sources)
                target.write(chunk)
                counted.add(chunk)
                progress("replayed rows", counted.rows, None)
        target.finish({(one.stream, writer): one.end[writer] for one in sources for writer in one.writers})
    finally:
        target.close()
    seconds = time.monotonic() - began
    return {
        "from": "table" if options.archive is None else "archive",
        "to": options.to_name, "durable": options.to_store is not None, "rows": counted.rows, "facts": counted.facts,
        "rows_per_second": round(counted.rows / seconds) if seconds else 0, "late": round(chunks.late, 3),
        "streams": counted.report(options.to_writer), **waiting.report(),
    }  # fmt: skip


def one_source(options: Options) -> None:
    """Raises ConfigError for --archive with --store: which of them would it be? But the environment's store is there
    for other jobs, too."""
    if options.archive is None or options.store is None:
        return
    if options.store != secrets.split(os.environ.get("BUSREP_STORE", ""))[0]:
        raise ConfigError("--archive and --store are two sources: pass one of them. The target is --to-store")


def _check_logs(sources: list[Source]) -> None:
    """Raises EpochChanged when a table was replaced since its positions were taken."""
    for one in sources:
        if one.epoch != (found := one.epoch_now()):
            raise EpochChanged(one.epoch, found)


def pace_of(options: Options) -> Pace:
    """What --speed, --rate and --flat-out say. Raises ConfigError."""
    given = [options.speed is not None, options.rate is not None, options.flat_out]
    if sum(given) > 1:
        raise ConfigError("--speed, --rate and --flat-out are three paces: pass one of them")
    for pace in (options.speed, options.rate):
        if pace is not None and not 0 < pace < math.inf:
            raise ConfigError("a --speed or --rate above 0 is needed, and a number; --flat-out is as fast as it goes")
    if options.longest_pause is not None and (options.rate is not None or options.flat_out):
        raise ConfigError("--longest-pause goes with --speed: there are no other pauses")
    if options.longest_pause is not None and not options.longest_pause >= 0:
        raise ConfigError("--longest-pause is a time from 0 on")
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
    """The target's Redis. Its password may stand in the URL, which stays in this process; BUSREP_REDIS_PASSWORD is that
    of another Redis, and is not told to this one. Raises ConfigError."""
    if options.to_redis_password_file is None:
        return options.to_redis
    return secrets.with_redis_password(options.to_redis, options.to_redis_password_file)


def check_target(options: Options) -> None:
    """Check the URLs of the target. Connects to nothing. Raises ConfigError, MissingExtra."""
    redis_pool(target_redis(options), Settings()).disconnect()
    store = target_store(options)
    if store is not None:
        open_staging_store(store, Registry([]))


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
