"""What is measured while facts are on their way: when the driver hears of them, and when readers have saved them.

``heard``: the driver is subscribed as a reader is, and notes when a message with a fact's rows has come. ``saved``: the
table of positions that durable readers keep is looked at again and again; each time that one has moved, all facts
between were handled and saved by then. How long either took counts from the row's ``committed_at``: on PostgreSQL the
beginning of the transaction, on SQLite the insert.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import redis
from redis.exceptions import RedisError

from busrep.core.framing import Rows, parse_frame
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.spark import job, secrets
from busrep.spark.options import LATEST, Positions, stream_of
from busrep.spark.replay_sources import table_source, tasks_for
from busrep.spark.stats.tables import Samples, facts_of
from busrep.spark.table import Table
from busrep.stores.plans import Plan, Sql
from busrep.sync.publisher import redis_pool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from busrep.spark.jobs.stats import Options

log = logging.getLogger("busrep.spark")

# Facts whose times are kept; more are counted. Some 100 MB.
MOST_FACTS = 500_000
# Seconds between two looks at the readers' positions, which they save every second by default.
LOOK = 0.1
# Seconds that a subscription may take, and a writer's position may need to come to the table.
PATIENCE = 10.0

FactKey = tuple[str, str, int]
"""(stream, writer, token)."""
Saved = tuple[str, str, str, int, float]
"""(reader, stream, writer, position, seconds since 1970 by the database's clock)."""


@attrs.define
class Heard:
    """When facts were heard of first, seconds since 1970; and how many were left out, for there were too many."""

    streams: Sequence[str]
    times: dict[FactKey, float] = attrs.field(factory=dict)
    left_out: int = 0
    bound: int = MOST_FACTS

    def receive(self, data: bytes, now: float, message_bytes: int) -> None:
        """Take in one message of the channel. Rows that a reader would fetch are not in any message."""
        for item in parse_frame(data, message_bytes).items:
            if isinstance(item, Rows) and item.stream in self.streams:
                for token in item.tokens:
                    key = (item.stream, item.writer, token)
                    if key in self.times:
                        continue
                    if len(self.times) >= self.bound:
                        self.left_out += 1
                    else:
                        self.times[key] = now


@attrs.define
class Handled:
    """Positions that readers have saved, as they move: spans (reader, stream, writer, after, upto, saved at)."""

    spans: list[tuple[str, str, str, int, int, float]] = attrs.field(factory=list)
    now: dict[tuple[str, str, str], tuple[int, float]] = attrs.field(factory=dict)
    _begun: bool = False

    def look(self, saved: Iterable[Saved]) -> None:
        """The table as it is now; the first time it is what later ones are compared with."""
        for reader, stream, writer, position, at in saved:
            key = (reader, stream, writer)
            before = self.now.get(key, (position if not self._begun else 0, at))[0]
            if position > before:
                self.spans.append((reader, stream, writer, before, position, at))
            self.now[key] = (position, at)
        self._begun = True


def latencies(
    heard: Mapping[FactKey, float], handled: Iterable[tuple[str, str, str, int, int, float]],
    committed: Mapping[FactKey, float], ahead: float,
) -> Samples:  # fmt: skip
    """How long each fact took whose time of commit is known. ``ahead``: by how much the database's clock is ahead of
    the driver's."""
    found: Samples = {}
    for key, at in committed.items():
        if key in heard:
            found.setdefault(("heard", key[0], key[1], ""), array("d")).append(heard[key] + ahead - at)
    tokens: dict[tuple[str, str], list[int]] = {}
    for stream, writer, token in sorted(committed):
        tokens.setdefault((stream, writer), []).append(token)
    for reader, stream, writer, after, upto, saved in handled:
        its = tokens.get((stream, writer), [])
        within = its[bisect_right(its, after) : bisect_right(its, upto)]
        if within:
            values = found.setdefault(("saved", stream, writer, reader), array("d"))
            values.extend(saved - committed[stream, writer, token] for token in within)
    return found


# -- asking ------------------------------------------------------------------------------------------------------


def readers_of(table: Table) -> list[Saved]:
    """The readers' positions in the log as it is now. Raises Unavailable."""
    age = table.dialect.age("r.saved_at")

    def body() -> Plan[list[Saved]]:
        answers = yield Sql(
            f"SELECT r.reader, r.writer, r.position, {_now(table)} - ({age}) FROM busrep_readers r "  # noqa: S608
            "WHERE r.stream = ? AND r.writer <> '' AND r.epoch = (SELECT value FROM busrep_meta WHERE key = 'epoch') "
            "ORDER BY r.reader, r.writer",
            (table.backing.stream,),
        )
        return [(reader, table.backing.stream, writer, at, float(saved)) for reader, writer, at, saved in answers[0]]

    return table.ask(body)


def _now(table: Table) -> str:
    return table.dialect.now if table.dialect.name == "sqlite" else f"extract(epoch FROM {table.dialect.now})"


def ahead_of_us(table: Table) -> tuple[float, float]:
    """By how many seconds the database's clock is ahead of this machine's, and how exactly that is known."""

    def body() -> Plan[float]:
        return float((yield Sql(f"SELECT {_now(table)}"))[0][0][0])

    best = (0.0, float("inf"))
    for _ in range(5):
        before = time.time()
        found = table.ask(body)
        after = time.time()
        if after - before < best[1]:
            best = found - (before + after) / 2, after - before
    return best[0], best[1] / 2


class Recorder:
    """Subscribed to a bus, in a thread, until `close`. ``cuts``: times that the link was lost; what was published
    meanwhile was not heard. ``reason``: of the last one. Raises ConfigError for a URL that is none."""

    def __init__(self, url: str, channels: Sequence[str], heard: Heard, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._pool = redis_pool(url, self._settings)
        self._channels, self._heard = channels, heard
        self._closed, self.linked = threading.Event(), threading.Event()
        self.cuts, self.reason = 0, "no answer"
        self._thread = threading.Thread(target=self._run, name="busrep-spark-recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()
        self._pool.disconnect()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except (RedisError, OSError, EOFError) as error:
                self.cuts, self.reason = self.cuts + 1, f"{type(error).__name__}: {error}"
                log.warning("the bus's Redis is not heard: %s: %s", type(error).__name__, error)
                self._closed.wait(self._settings.retry_min)

    def _listen(self) -> None:
        client = redis.Redis(connection_pool=self._pool)
        with contextlib.closing(client.pubsub()) as subscription:  # type: ignore[no-untyped-call]
            subscription.subscribe(*self._channels)
            missing = len(self._channels)
            while not self._closed.is_set():
                message: dict[str, Any] | None = subscription.get_message(timeout=LOOK)
                if message is None:
                    continue
                if message["type"] == "message":
                    self._heard.receive(message["data"], time.time(), self._settings.message_bytes)
                    continue
                missing -= 1
                if not missing:
                    self.linked.set()


def watch(
    tables: Sequence[Table], handled: Handled, until: Callable[[], bool], wait: Callable[[float], object]
) -> None:
    """Look at the readers' positions until then. Raises Unavailable."""
    while True:
        done = until()
        handled.look(one for table in tables for one in readers_of(table))
        if done:
            return
        wait(LOOK)


# -- the whole ---------------------------------------------------------------------------------------------------


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
    assert options.redis is not None  # noqa: S101 (check_options)
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
            facts = facts_of(rows).where("time IS NOT NULL").select("writer", "token", "time")
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
