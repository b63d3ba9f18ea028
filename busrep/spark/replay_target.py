"""Where a replay writes: a bus for each writer, and in the target's store a mark of how far each of them is.

The mark is a row of busrep_sinks, which also says in ``busrep db status`` how far a replay is. It moves in the
transaction that writes the facts, which holds the claim on the writer's name. Whoever replays claims the names
first and reads the marks then, so a process that was killed, or given up for dead, cannot commit behind them (9.4).
The mark also tells where the replay began: all facts between the two are there, so a range that is not connected to
them is refused, as is a writer that has facts and no mark.

A COMMIT without an answer is no answer: the bus is opened anew, and the mark tells what became of it.
"""

# ruff: noqa: S608 - names of columns are ours, values are parameters
from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from busrep import sync
from busrep.core.backoff import pause_after
from busrep.core.catchup import FetchUpdates
from busrep.errors import CommitUnknown, ConfigError, PositionTooOld, Unavailable
from busrep.settings import Settings
from busrep.spark.replay_pace import Fact, grouped
from busrep.spark.staging import FIELDS, Done
from busrep.spark.staging_store import StagingStore, open_staging_store
from busrep.spark.table import dialect_of
from busrep.streams import Registry, Stream

log = logging.getLogger("busrep.spark")

# Times in a row that a transaction, or Redis, is tried before the replay gives up; the pauses grow up to 5 s.
TRIES = 8
# Writers whose buses are open at a time, the last ones used: each has three threads, a connection to Redis and a few to
# the store, of which a server takes some 100. A bus that is opened again costs a claim, and a look at the mark.
MOST_OPEN = 16
# In memory a writer cannot be closed and go on: this many at most.
MOST_IN_MEMORY = 100

Pair = tuple[str, str]
"""(stream, source writer)."""

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


class Verbatim(Stream[Any]):
    """A stream whose rows are given as the text that they have in the source, and stay so, byte for byte."""

    def encode(self, row: bytes) -> bytes:
        """The row as it travels: itself, as long as it is one line of ASCII. Else other signs are escaped, and nothing
        else changes: numbers keep all of their digits."""
        if row.isascii() and b"\n" not in row:
            return row
        # In texts of JSON there is no line's end, and outside of them nothing but ASCII.
        return _NOT_ASCII.sub(lambda sign: json.dumps(sign[0])[1:-1], row.decode()).replace("\n", " ").encode()


def target_stream(name: str, declared: Stream[Any] | None, *, in_memory: bool) -> Stream[Any]:
    """The stream that is written to: as it is declared, so that it is published on the same channel. Raises ConfigError
    for one that is to be in memory, and has a table of the application's."""
    if declared is None:
        return Verbatim(name, resettable=in_memory)
    if declared.table is not None:
        if in_memory:
            raise ConfigError(f"stream {name!r} is kept in a table of the application's: pass --to-store")
        return declared
    return Verbatim(
        name, channel=declared.channel, resettable=in_memory, follows=declared.follows, negative=declared.negative
    )


def mark_name(stream: str, writer: str) -> str:
    """Of the mark of a target writer, in busrep_sinks. There is no space in either, nor in a query of the sink."""
    return f"replay {stream} {writer}"


@attrs.define(eq=False)
class Target:
    """A bus to replay to. ``store``: with its password; None: streams in memory, without marks. ``prefix``: before the
    names of the source's writers."""

    redis: str = attrs.field(repr=False)
    name: str
    streams: Mapping[str, Stream[Any]]
    epochs: Mapping[str, str]
    store: str | None = attrs.field(default=None, repr=False)
    prefix: str = ""
    settings: Settings = attrs.field(factory=Settings)
    # Where each one stands, and where what it has of the source begins: tokens of the source.
    _at: dict[Pair, int] = attrs.field(factory=dict, init=False)
    _begun: dict[Pair, int] = attrs.field(factory=dict, init=False)
    _buses: dict[str, sync.Bus] = attrs.field(factory=dict, init=False)
    _writes: dict[str, list[str]] = attrs.field(factory=dict, init=False)
    _staging: StagingStore | None = attrs.field(default=None, init=False)
    _upsert: str = attrs.field(default="", init=False)

    def open(self, starts: Mapping[Pair, int]) -> dict[Pair, int]:
        """Claim the names for these (stream, source writer), of which facts above a token are to be replayed; then give
        where each of them stands: what is up to there is written.

        Raises ConfigError when a writer was replayed to from another log, or another range, or has facts of somebody
        else's; ClaimBlocked, SchemaError, UnknownStream, Unavailable.
        """
        for stream, writer in sorted(starts):
            self._writes.setdefault(writer, []).append(stream)
        self._at, self._begun = dict(starts), dict(starts)
        if self.store is None:
            if len(self._writes) > MOST_IN_MEMORY:
                raise ConfigError(
                    f"these are {len(self._writes)} writers, and {MOST_IN_MEMORY} at most have their streams in "
                    "memory: pass --to-store"
                )
        else:
            self._staging = open_staging_store(self.store, Registry(self.streams.values()), settings=self.settings)
            self._staging.open()
            self._check(self._staging)
            self._upsert = _upsert(self.store)
            for pair in sorted(starts):  # before any name is claimed: one that is refused may be somebody's who lives
                if self._look(*pair) is None:
                    self._check_empty(self._staging, *pair)
        for writer in self._writes:
            self._bus(writer)
            for stream in self._writes[writer]:
                self._look(stream, writer)
        return dict(self._at)

    def _check(self, staging: StagingStore) -> None:
        epoch = staging.epoch()
        for stream, source in self.epochs.items():
            if source == epoch:
                raise ConfigError(
                    f"the target's store is the very log that stream {stream!r} is replayed from: its readers would "
                    "get every fact again. Pass another --to-store"
                )
            staging.check_backing(stream)

    def _check_empty(self, staging: StagingStore, stream: str, writer: str) -> None:
        target = self.prefix + writer
        with contextlib.suppress(PositionTooOld):  # there were some
            if not staging.fetch(FetchUpdates(stream, target, 0, 2**62, limit=1)).tokens:
                return
        raise ConfigError(
            f"writer {target!r} of stream {stream!r} has facts in the target that no replay has written, so it is "
            "somebody else's: pass another --to-writer"
        )

    def _bus(self, writer: str) -> sync.Bus:
        bus = self._buses.pop(writer, None)
        if bus is None:
            while self.store is not None and len(self._buses) >= MOST_OPEN:
                self._close(next(iter(self._buses)))
            bus = sync.connect(
                self.redis, name=self.name, streams=[self.streams[name] for name in self._writes[writer]],
                store=self.store, writer=self.prefix + writer, settings=self.settings,
            )  # fmt: skip
            bus.open()
        self._buses[writer] = bus  # behind the others: the first one is the one that was not used for longest
        return bus

    def _look(self, stream: str, writer: str) -> Done | None:
        """The mark of a source writer, noted. Raises ConfigError for one of another replay; Unavailable."""
        pair, target = (stream, writer), self.prefix + writer
        found = None if self._staging is None else self._staging.done(mark_name(stream, target))
        if found is None:
            return None
        name = f"writer {target!r} of stream {stream!r}"
        if found.checkpoint != self.epochs[stream]:
            raise ConfigError(
                f"{name} was replayed to from another log (epoch {found.checkpoint}, this is {self.epochs[stream]}): "
                "pass another --to-writer"
            )
        begun = int(found.run)
        if not begun <= self._at[pair] <= found.number:
            raise ConfigError(
                f"{name} has the source's facts from {begun} to {found.number}, and now it is to go on from "
                f"{self._at[pair]}: what lies between would be missing, or come behind later facts. Pass another "
                "--to-writer, or --from-positions within these"
            )
        self._begun[pair], self._at[pair] = begun, found.number
        return found

    def write(self, facts: Sequence[Fact]) -> None:
        """Write a chunk: facts of a writer in their order, as many in a transaction as `grouped` says.

        Raises WriterFenced when another process replays to these writers; Unavailable, after a while.
        """
        by_writer: dict[Pair, list[Fact]] = {}
        for fact in facts:
            by_writer.setdefault((fact.stream, fact.writer), []).append(fact)
        for pair, its in by_writer.items():
            for group in grouped(its):
                self._written(pair, group, group[-1].token)

    def finish(self, ends: Mapping[Pair, int]) -> None:
        """Note that all facts up to these tokens are written: what is replayed next may begin there. Raises as
        `write`."""
        for pair, end in ends.items():
            if self.store is not None and self._at[pair] < end:
                self._written(pair, [], end)

    def _written(self, pair: Pair, facts: list[Fact], upto: int) -> None:
        stream, writer = pair
        for failures in range(TRIES):
            try:
                if failures or writer not in self._buses:
                    # The name is claimed again, which waits for what may still commit.
                    self._close(writer)
                    self._bus(writer)
                    self._look(stream, writer)
                    facts = [fact for fact in facts if fact.token > self._at[pair]]
                if self._at[pair] < upto:
                    self._commit(stream, writer, facts, upto)
                    self._at[pair] = upto
                return
            except (Unavailable, CommitUnknown) as error:
                if failures == TRIES - 1 or self.store is None:
                    raise
                log.warning("replaying to writer %s: %s; looking again", self.prefix + writer, error)
                time.sleep(pause_after(failures + 1, self.settings))

    def _commit(self, stream: str, writer: str, facts: list[Fact], upto: int) -> None:
        bus, target = self._bus(writer), self.streams[stream]
        payloads = [row for fact in facts for row in fact.rows]
        rows = payloads if isinstance(target, Verbatim) else target.decode(payloads)
        with bus.write(target, count=len(facts) or 1) as made:
            ids = made.published_ids()
            if rows and len(rows) == len(facts):  # of one row each, which cost less
                made.add_each(rows)
            else:
                for row, at in zip(rows, (at for at, fact in enumerate(facts) for _ in fact.rows), strict=True):
                    made.add(row, at=at)
            if self.store is not None:
                done = Done(
                    mark_name(stream, self.prefix + writer), self.epochs[stream], upto,
                    str(self._begun[stream, writer]), stream, self.prefix + writer, 0, len(rows),
                    *((ids[0], ids[-1]) if rows else (0, 0)),
                )  # fmt: skip
                made.execute(self._upsert, attrs.astuple(done))
        if self.store is None:
            self._sent(bus, stream, ids[-1])

    def _sent(self, bus: sync.Bus, stream: str, token: int) -> None:
        """What is in memory alone is gone when Redis did not take it: wait until it has. Raises Unavailable."""
        for failures in range(1, TRIES + 1):
            found = bus.statistics()["writer"]
            if found["rows_dropped"] or found["facts_too_large"]:
                raise ConfigError(
                    "a fact is larger than a message (frame_bytes), or than the queue: readers of a stream in memory "
                    "would never see it. Replay into a store (--to-store), from which they fetch it"
                )
            if found["streams"][stream]["sent"] >= token:
                return
            time.sleep(pause_after(failures, self.settings))  # a thread of the bus tries again meanwhile
        raise Unavailable("Redis", "it does not take what is replayed, and nothing else keeps it")

    def _close(self, writer: str) -> None:
        bus = self._buses.pop(writer, None)
        if bus is not None:
            bus.close()

    def close(self) -> None:
        """Publish what is due, and close everything."""
        with contextlib.ExitStack() as stack:
            if self._staging is not None:
                stack.callback(self._staging.close)
            for writer in list(self._buses):
                stack.callback(self._close, writer)


def _upsert(url: str) -> str:
    dialect = dialect_of(url)
    names = FIELDS.split(", ")
    moved = ", ".join(f"{name} = excluded.{name}" for name in [*names[1:], "done_at"])
    text = (
        f"INSERT INTO busrep_sinks ({FIELDS}, once, done_at) VALUES ({', '.join('?' * len(names))}, FALSE, "
        f"{dialect.now}) ON CONFLICT (query) DO UPDATE SET {moved}"
    )
    return text if dialect.name == "sqlite" else text.replace("?", "%s")
