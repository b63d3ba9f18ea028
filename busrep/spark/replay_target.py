"""Where a replay writes: a bus for each writer, and in the target's store a mark of how far each of them is.

The mark is a row of busrep_sinks, which also says in ``busrep db status`` how far a replay is. It moves in the
transaction that writes the facts, which holds the claim on the writer's name. Whoever replays claims the names
first and reads the marks then, so a process that was killed, or given up for dead, cannot commit behind them (9.4).

A COMMIT without an answer is no answer: the bus is opened anew, and the mark tells what became of it.
"""

# ruff: noqa: S608 - names of columns are ours, values are parameters
from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs

from busrep import sync
from busrep.asyncio.tasks import pause_after
from busrep.commands import json_bytes
from busrep.errors import CommitUnknown, ConfigError, Unavailable
from busrep.settings import Settings
from busrep.spark.replay_pace import Fact
from busrep.spark.table import dialect_of
from busrep.stores.blocking_staging import StagingStore, open_staging_store
from busrep.stores.staging import FIELDS, Done
from busrep.streams import Registry, Stream
from busrep.sync.writing import Fact as OpenFact

log = logging.getLogger("busrep.spark")

# Times in a row that a transaction, or Redis, is tried before the replay gives up; the pauses grow up to 5 s.
TRIES = 8


class Verbatim(Stream[Any]):
    """A stream whose rows are given as the text that they have in the source, and stay so, byte for byte."""

    def encode(self, row: bytes) -> bytes:
        """The row as it travels: itself, as long as it is one line of ASCII."""
        if row.isascii() and b"\n" not in row:
            return row
        import orjson

        return json_bytes(orjson.loads(row))


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
    """Of the mark of a target writer, in busrep_sinks."""
    return f"replay:{stream}:{writer}"


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
    _buses: dict[str, sync.Bus] = attrs.field(factory=dict, init=False)
    _writes: dict[str, list[str]] = attrs.field(factory=dict, init=False)
    _staging: StagingStore | None = attrs.field(default=None, init=False)
    _upsert: str = attrs.field(default="", init=False)

    def open(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Claim the names for these (stream, source writer); then give where each of them stands, 0 at the beginning.

        Raises ConfigError when a writer was replayed to from another log, ClaimBlocked, SchemaError, UnknownStream,
        Unavailable.
        """
        found = sorted(pairs)
        for stream, writer in found:
            self._writes.setdefault(writer, []).append(stream)
        if self.store is not None:
            self._staging = open_staging_store(self.store, Registry(self.streams.values()), settings=self.settings)
            self._staging.open()
            self._check(self._staging)
            self._upsert = _upsert(self.store)
        for writer in self._writes:
            self._bus(writer)
        return {pair: self.mark(*pair) for pair in found}

    def _check(self, staging: StagingStore) -> None:
        epoch = staging.epoch()
        for stream, source in self.epochs.items():
            if source == epoch:
                raise ConfigError(
                    f"the target's store is the very log that stream {stream!r} is replayed from: its readers would "
                    "get every fact again. Pass another --to-store"
                )
            staging.check_backing(stream)

    def _bus(self, writer: str) -> sync.Bus:
        bus = self._buses.get(writer)
        if bus is None:
            bus = sync.connect(
                self.redis, name=self.name, streams=[self.streams[name] for name in self._writes[writer]],
                store=self.store, writer=self.prefix + writer, settings=self.settings,
            )  # fmt: skip
            bus.open()
            self._buses[writer] = bus
        return bus

    def mark(self, stream: str, writer: str) -> int:
        """The last token of a source writer that is replayed. Raises ConfigError, Unavailable."""
        if self._staging is None:
            return 0
        found: Done | None = self._staging.done(mark_name(stream, self.prefix + writer))
        if found is None:
            return 0
        if found.checkpoint != self.epochs[stream]:
            raise ConfigError(
                f"writer {self.prefix + writer!r} of stream {stream!r} was replayed to from another log (epoch "
                f"{found.checkpoint}, this is {self.epochs[stream]}): pass another --to-writer"
            )
        return found.number

    def write(self, facts: Sequence[Fact]) -> None:
        """Write a chunk: facts of a writer in their order, in one transaction while they are of one row each.

        Raises WriterFenced when another process replays to these writers; Unavailable, after a while.
        """
        by_writer: dict[tuple[str, str], list[Fact]] = {}
        for fact in facts:
            by_writer.setdefault((fact.stream, fact.writer), []).append(fact)
        for (stream, writer), its in by_writer.items():
            for plain, run in groupby(its, key=lambda fact: len(fact.rows) == 1):
                for part in [list(run)] if plain else [[fact] for fact in run]:
                    self._written(stream, writer, part)

    def _written(self, stream: str, writer: str, facts: list[Fact]) -> None:
        for failures in range(TRIES):
            try:
                if failures:
                    facts = self._left(stream, writer, facts)
                if facts:
                    self._commit(stream, writer, facts)
                return
            except (Unavailable, CommitUnknown) as error:
                if failures == TRIES - 1 or self.store is None:
                    raise
                log.warning("replaying to writer %s: %s; looking again", self.prefix + writer, error)
                time.sleep(pause_after(failures + 1, self.settings))

    def _left(self, stream: str, writer: str, facts: list[Fact]) -> list[Fact]:
        """Those that are not committed: the name is claimed again, which waits for what may still commit."""
        self._close(writer)
        self._bus(writer)
        at = self.mark(stream, writer)
        return [fact for fact in facts if fact.token > at]

    def _commit(self, stream: str, writer: str, facts: list[Fact]) -> None:
        bus, target = self._bus(writer), self.streams[stream]
        single = len(facts[0].rows) == 1
        payloads = [row for fact in facts for row in fact.rows]
        rows = payloads if isinstance(target, Verbatim) else target.decode(payloads)
        with OpenFact(bus._writer_of((target,)), (target,), None, len(facts)) as made:
            if single:
                ids = made.add_each(rows)
            else:
                ids = [made.id]
                for row in rows:
                    made.add(row)
            if self.store is not None:
                done = Done(
                    mark_name(stream, self.prefix + writer), self.epochs[stream], facts[-1].token, "replay", stream,
                    self.prefix + writer, 0, len(rows), ids[0], ids[-1],
                )  # fmt: skip
                made.execute(self._upsert, attrs.astuple(done))
        if self.store is None:
            self._sent(bus)

    def _sent(self, bus: sync.Bus) -> None:
        """What is in memory alone is gone when Redis did not take it: wait until it has. Raises Unavailable."""
        assert bus._writing is not None  # noqa: S101 (it has just written)
        for failures in range(1, TRIES + 1):
            if bus._writing.publish(now=True):
                break
            if failures == TRIES:
                raise Unavailable("Redis", "it does not take what is replayed, and nothing else keeps it")
            time.sleep(pause_after(failures, self.settings))
        found = bus.statistics()["writer"]
        if found["rows_dropped"] or found["facts_too_large"]:
            raise ConfigError(
                "a fact is larger than a message (frame_bytes), or than the queue: readers of a stream in memory would "
                "never see it. Replay into a store (--to-store), from which they fetch it"
            )

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
