"""What the job ``archive`` does: a streaming query for each stream. What its batches become: see archive_driver.py."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from busrep.errors import ConfigError
from busrep.spark import job, secrets
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.archive_store import Root
from busrep.spark.archive_typed import has_file_system
from busrep.spark.failures import is_sparks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from busrep.spark.jobs.archive import Options

# How often the driver looks whether a query has ended, seconds.
LOOK = 0.2
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
    queries: list[StreamingQuery] = []

    def told() -> None:
        progress("archived rows", sum(one.rows for one in archives.values()), None)

    try:
        for name in names:
            archives[name] = one = StreamArchive(root, name, options, told)
            one.prepare(url)
            queries.append(one.start(spark))
            _settle(queries[-1])
        _wait(queries, archives)
    except Exception as error:
        if is_sparks(error) and _CONCURRENT.search(str(error)):
            raise ConfigError(
                f"another job archives into {root.shown} with the same checkpoint at this moment: one at a time. "
                "Nothing was lost, or written twice"
            ) from error
        raise
    finally:
        for query in queries:
            with contextlib.suppress(Exception):  # a session that is gone has stopped it
                query.stop()
    reports = {name: one.report() for name, one in archives.items()}
    totals = {key: sum(one[key] for one in reports.values()) for key in ("rows", "batches", "files", "bytes")}
    return {"archive": root.shown, "format": options.format, **totals, "streams": reports}


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


def _wait(queries: Sequence[StreamingQuery], archives: Mapping[str, StreamArchive]) -> None:
    """Until all queries have ended. Raises what made one of them fail."""
    running = list(queries)
    while running:
        # Not by a call into the JVM: Ctrl-C would come in the middle of it, and leave pages of traces.
        time.sleep(LOOK)
        for query in list(running):
            if not query.isActive:
                running.remove(query)
                error = query.exception()
                if error is not None:
                    ours = next((one.error for one in archives.values() if one.error is not None), None)
                    raise ours or error
