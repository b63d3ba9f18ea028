"""What the job ``stats`` does with ``--listen``: it hears facts, sees readers save, asks when each was committed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from busrep.errors import ConfigError
from busrep.spark import job, secrets, stats_tables
from busrep.spark.options import LATEST, Positions, stream_of
from busrep.spark.replay_sources import table_source, tasks_for
from busrep.spark.stats_listen import PATIENCE, Handled, Heard, Recorder, Samples, ahead_of_us, latencies, watch
from busrep.spark.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from busrep.spark.jobs.stats import Options


@attrs.frozen
class Live:
    """What was measured while listening. ``ahead``, ``exact``: of the database's clock, seconds."""

    samples: Samples = attrs.field(factory=dict)
    seconds: float = 0.0
    heard: int = 0
    left_out: int = 0
    cuts: int = 0
    ahead: float = 0.0
    exact: float = 0.0


def listen(
    spark: SparkSession, options: Options, url: str, tables: list[Table], progress: job.Progress
) -> Live:  # fmt: skip
    """Measure for ``--listen`` seconds. Raises ConfigError when the bus cannot be heard; Unavailable."""
    channels = {
        f"{options.name}/{stream_of(options.streams, one.backing.stream).channel}".rstrip("/") for one in tables
    }
    heard, handled = Heard([table.backing.stream for table in tables]), Handled()
    before = {table.backing.stream: table.log().positions for table in tables}
    ahead, exact = ahead_of_us(tables[0])
    assert options.redis is not None  # noqa: S101 (_check)
    recorder = Recorder(
        secrets.with_redis_password(options.redis, options.redis_password_file), sorted(channels), heard
    )
    try:
        if not recorder.linked.wait(PATIENCE):
            raise ConfigError(f"the Redis of --redis cannot be listened to: {recorder.reason}")
        began = time.monotonic()

        def until() -> bool:
            progress("listened seconds", int(time.monotonic() - began), int(options.listen))
            return time.monotonic() - began >= options.listen

        watch(tables, handled, until, time.sleep)
    finally:
        recorder.close()
    committed = _committed(spark, options, url, tables, before, heard)
    samples = latencies(heard.times, handled.spans, committed, ahead)
    return Live(samples, options.listen, len(heard.times), heard.left_out, recorder.cuts, ahead, exact)


def _committed(
    spark: SparkSession, options: Options, url: str, tables: list[Table], before: Mapping[str, Mapping[str, int]],
    heard: Heard,
) -> dict[tuple[str, str, int], float]:  # fmt: skip
    """When the facts that are new since ``before`` were committed, seconds since 1970: those that are proven."""
    found: dict[tuple[str, str, int], float] = {}
    for table in tables:
        name = table.backing.stream
        newest: dict[str, int] = {}
        for stream, writer, token in heard.times:
            if stream == name:
                newest[writer] = max(newest.get(writer, 0), token)
        _proven(table, newest)
        start = Positions("map", map=before[name])
        source = table_source(spark, options, url, name, start, LATEST)
        if source.writers:
            rows = source.rows(source.start, source.end)
            facts = stats_tables.facts_of(rows).where("time IS NOT NULL").select("writer", "token", "time")
            with tasks_for(spark, [source]):
                for row in facts.limit(heard.bound).toLocalIterator():
                    found[name, row["writer"], row["token"]] = row["time"] / 1e6
    return found


def _proven(table: Table, newest: Mapping[str, int]) -> None:
    """Wait a little until what was heard of each writer is proven in the table, where positions come once a
    heartbeat."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        positions = table.log().positions
        if all(positions.get(writer, 0) >= token for writer, token in newest.items()):
            return
        time.sleep(0.2)
