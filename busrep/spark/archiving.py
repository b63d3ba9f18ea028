"""What the job ``archive`` does: a streaming query for each stream. What its batches become: see archive_driver.py."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from busrep.errors import ConfigError
from busrep.spark import job, secrets
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.archive_store import Root
from busrep.spark.archive_typed import has_file_system
from busrep.spark.failures import STARTS, WorkersTooSlow, is_slow_worker, is_sparks, warn_of_restart, with_restarts
from busrep.spark.waiting import WaitingRows, waiting_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from busrep.spark.jobs.archive import Options

# How often the driver looks whether a query has ended, seconds.
LOOK = 0.2
# How often it looks for writers that are silent with committed rows, seconds.
LOOK_WAITING = 30.0
# What Spark says, in one way or another, when two queries write to one checkpoint.
_CONCURRENT = re.compile(r"CONCURRENT_STREAM_LOG_UPDATE|ConcurrentModification|Multiple streaming (jobs|queries)")


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.archive.run`."""
    root = Root(options.archive)
    _check(spark, root, options)
    url = secrets.resolve(options.store, options.password_file)
    # Each once: two queries cannot have one checkpoint.
    names = list(dict.fromkeys(options.stream or streams_in_store(url)))
    archives: dict[str, StreamArchive] = {}
    running: list[StartedQuery] = []
    waiting = waiting_rows(options, names)
    waiting.look()

    def begin(one: StreamArchive) -> StreamingQuery:
        """Start a query, which goes on from its checkpoint as in a process that is started again."""
        one.prepare(url)
        return with_restarts(lambda: one.start(spark))

    def told() -> None:
        progress("archived rows", sum(one.rows for one in archives.values()), None)

    try:
        for name in names:
            archives[name] = one = StreamArchive(root, name, options, told)
            running.append(StartedQuery(one, begin(one)))
            _settle(running[-1].query)
        _wait(running, begin, waiting)
    except Exception as error:
        if is_sparks(error) and _CONCURRENT.search(str(error)):
            raise ConfigError(
                f"another job archives into {root.shown} with the same checkpoint at this moment: one at a time. "
                "Nothing was lost, or written twice"
            ) from error
        raise
    finally:
        for each in running:
            with contextlib.suppress(Exception):  # a session that is gone has stopped it
                each.query.stop()
    reports = {name: one.report() for name, one in archives.items()}
    totals = {key: sum(one[key] for one in reports.values()) for key in ("rows", "batches", "files", "bytes")}
    return {"archive": root.shown, "format": options.format, **totals, "streams": reports, **waiting.report()}


def _check(spark: SparkSession, root: Root, options: Options) -> None:
    if options.format == "delta":
        from busrep.spark.archive_delta import check_delta

        check_delta()
    place = root if options.checkpoint is None else Root(options.checkpoint)
    if not has_file_system(spark, place):
        raise ConfigError(
            f"Spark cannot keep its checkpoint at {place.shown}, for it has no file system for that: name a local "
            "folder with --checkpoint (when it is lost, the archive goes on behind its last batch), or give Spark one, "
            "as with --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:VERSION"
        )


def streams_in_store(url: str) -> list[str]:
    """The streams that the store keeps. Raises ConfigError when there are none."""
    from busrep.stores.blocking import open_blocking_store
    from busrep.streams import Registry

    store = open_blocking_store(url, Registry([]))
    store.open()
    try:
        found = sorted({one.stream for one in store.known()})
    finally:
        store.close()
    if not found:
        raise ConfigError("no writer has registered a stream in this store yet: name the streams with --stream")
    return found


def _settle(query: StreamingQuery) -> None:
    """Until the query has its source, or has failed: that is a process, to which Spark gives ten seconds to answer, and
    many at a time do not make it."""
    while query.isActive and query.status["message"].startswith("Initializing"):
        time.sleep(LOOK)


@attrs.define(eq=False)
class StartedQuery:
    """The query of one stream. ``starts``: how often in a row it was started without getting to a batch."""

    archive: StreamArchive
    query: StreamingQuery
    starts: int = 1
    batches: int = 0

    def failed_to_start(self) -> int:
        """Count a start that failed. Returns how many there were in a row."""
        if self.archive.batches > self.batches:
            self.starts, self.batches = 1, self.archive.batches
        found, self.starts = self.starts, self.starts + 1
        return found


def _wait(
    running: Sequence[StartedQuery], again: Callable[[StreamArchive], StreamingQuery], waiting: WaitingRows
) -> None:
    """Until all queries have ended. One that has ended because a Python worker was slow is started ``again``. Raises
    what made another one fail."""
    left = list(running)
    looked = time.monotonic()
    while left:
        if time.monotonic() > looked + LOOK_WAITING:
            waiting.look_again()
            looked = time.monotonic()
        # Not by a call into the JVM: Ctrl-C would come in the middle of it, and leave pages of traces.
        time.sleep(LOOK)
        for one in list(left):
            if one.query.isActive:
                continue
            error = one.query.exception()
            if error is None:
                left.remove(one)
                continue
            ours = next((each.archive.error for each in running if each.archive.error is not None), None)
            if ours is not None or not is_slow_worker(error):
                raise ours or error
            if (starts := one.failed_to_start()) >= STARTS:
                raise WorkersTooSlow(starts) from error
            warn_of_restart(starts)
            one.query = again(one.archive)
