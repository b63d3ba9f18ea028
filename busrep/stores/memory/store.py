"""The memory store: for tests, and for buses whose facts need not outlive the process.

Stores of one name share their contents within the process. Every operation is one step under a lock, so there are
no snapshots to take; transactions keep their rows to themselves until they commit.
"""

# ruff: noqa: ARG002 - the interface has parameters that memory has no use for
from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.ids import Start, plan_start
from busrep.core.snapshots import BootstrapProgress
from busrep.errors import (
    ClaimBlocked,
    ConfigError,
    PositionsAheadOfTable,
    PositionTooOld,
    ReaderMoved,
    SchemaError,
    WriterFenced,
)
from busrep.settings import Settings
from busrep.shapes import check_fields, fields_to_store, load
from busrep.stores.claims import bounded
from busrep.stores.interface import (
    MIXED,
    Claim,
    DeadLetter,
    EffectsTransaction,
    FactRows,
    KnownWriter,
    Newest,
    ReaderState,
    Registered,
    StoredStream,
)
from busrep.stores.memory.snapshots import MemorySnapshots
from busrep.stores.schema import VERSION, new_epoch
from busrep.streams import Registry, Stream

# Between two looks whether a writer's open transactions have ended: they may end in another thread, seconds.
LOOK = 0.002

Key = tuple[str, str]


@attrs.define
class _Name:
    incarnation: int = 0
    finished: int | None = None
    open: int = 0


@attrs.define
class _Position:
    position: int = 0
    floor: int = 0
    registered: bool = True
    seen_at: float = attrs.field(factory=time.monotonic)
    finished: int | None = None


@attrs.define
class _Saved:
    position: int
    epoch: str
    saved_at: float = attrs.field(factory=time.monotonic)
    stopped: str | None = None


@attrs.define
class _World:
    """The contents that stores of one name share."""

    lock: threading.RLock = attrs.field(factory=threading.RLock)
    epoch: str | None = None
    sequences: dict[str, int] = attrs.field(factory=dict)
    fields: dict[str, str | None] = attrs.field(factory=dict)
    names: dict[str, _Name] = attrs.field(factory=dict)
    positions: dict[Key, _Position] = attrs.field(factory=dict)
    # (stream, writer) -> ID -> (payloads, committed at)
    facts: dict[Key, dict[int, tuple[list[bytes], float]]] = attrs.field(factory=dict)
    readers: dict[str, dict[Key, _Saved]] = attrs.field(factory=dict)
    dead: list[tuple[DeadLetter, float]] = attrs.field(factory=list)
    # (reader, stream) -> what is saved of its bootstrap, and when
    bootstraps: dict[Key, tuple[BootstrapProgress, float]] = attrs.field(factory=dict)

    def highest_row(self, stream: str) -> int:
        return max((max(rows) for (name, _), rows in self.facts.items() if name == stream and rows), default=0)

    def own_row(self, stream: str, writer: str) -> int:
        return max(self.facts.get((stream, writer), ()), default=0)


_WORLDS: dict[str, _World] = {}


class MemoryStore(MemorySnapshots):
    """An `AsyncStore` in this process's memory."""

    def __init__(self, name: str, streams: Registry, settings: Settings) -> None:
        self.name, self.streams, self.settings = name, streams, settings
        self.world = _WORLDS.setdefault(name, _World())
        super().__init__()

    async def open(self) -> None:
        """See `AsyncStore`."""
        if self.world.epoch is None:
            raise SchemaError(None, VERSION)
        check_fields(self._durable(), self.world.fields)

    async def close(self) -> None:
        """See `AsyncStore`; the contents stay as long as the process."""
        self.leave_all()

    def _durable(self) -> list[Stream[Any]]:
        return [stream for stream in self.streams if not stream.resettable]

    async def init(self, redefine: Collection[str] = ()) -> None:
        """See `AsyncStore`."""
        with self.world.lock:
            stored = {stream: fields for stream, fields in self.world.fields.items() if stream not in redefine}
            self.world.fields.update(fields_to_store(self._durable(), stored))
            self.world.epoch = self.world.epoch or new_epoch()
            for stream in self._durable():
                self.world.sequences.setdefault(stream.name, 0)

    async def verify(self) -> None:
        """See `AsyncStore`."""
        for stream in self._durable():
            self._stream(stream.name)

    def _stream(self, stream: str) -> str:
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")
        if stream not in self.world.sequences:
            raise ConfigError(f"stream {stream!r} has no sequence yet: run 'busrep db init' with it")
        return stream

    async def stored_streams(self) -> dict[str, StoredStream]:
        """See `AsyncStore`."""
        world = self.world
        return {name: StoredStream(None, load(world.fields.get(name))) for name in world.sequences}

    async def epoch(self) -> str:
        """See `AsyncStore`."""
        if self.world.epoch is None:
            raise SchemaError(None, VERSION)
        return self.world.epoch

    async def sequence(self, stream: str) -> int | None:
        """See `AsyncStore`."""
        return self.world.sequences[self._stream(stream)]

    async def claim(self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None) -> Claim:
        """See `AsyncStore`."""
        names = [self._stream(stream) for stream in sorted(set(streams))]
        world = self.world
        with world.lock:
            world.fields.update(fields_to_store([self.streams[name] for name in names], world.fields))
        name = await self._without_transactions(writer, timeout)
        with world.lock:
            if again is not None and name.incarnation != again:
                finished = (name.incarnation, name.finished) == (again + 1, again)
                if not finished and name.finished != -again:
                    raise WriterFenced(writer, again)
            name.incarnation = max(name.incarnation + 1, int(time.time() * 1000))
            name.finished = None if again is None else -again
            starts, known, highest = {}, {}, {}
            fresh = [key for key in ((name, writer) for name in names) if not self._registered(key)]
            for stream in names:
                own = world.positions.setdefault((stream, writer), _Position())
                own.registered, own.finished, own.seen_at = True, None, time.monotonic()
            for stream in names:
                start = self._start(stream, writer, (stream, writer) in fresh)
                world.positions[stream, writer].position = starts[stream] = start.positions[writer]
                known[stream], highest[stream] = start.positions, start.highest
                if start.repair_sequence_to is not None:
                    world.sequences[stream] = start.repair_sequence_to
            claims = self._registry(()).claims
            sequences = {stream: world.sequences[stream] for stream in names}
            return Claim(writer, name.incarnation, await self.epoch(), starts, known, highest, claims, sequences)

    def _registry(self, streams: Iterable[str]) -> Registered:
        world = self.world
        rows = [
            (stream, writer, at.position, world.names[writer].incarnation)
            for (stream, writer), at in world.positions.items()
            if at.registered
        ]
        return Registered(rows, {stream: world.sequences[stream] for stream in streams})

    def _registered(self, key: Key) -> bool:
        return key in self.world.positions and self.world.positions[key].registered

    def _start(self, stream: str, writer: str, fresh: bool) -> Start:
        """As claims.py plans it."""
        world = self.world
        listed = {who: at for (of, who), at in world.positions.items() if of == stream}
        return plan_start(
            stream=stream,
            rows={writer: world.own_row(stream, writer), " ": world.highest_row(stream)},
            positions={" " if who == writer and fresh else who: at.position for who, at in listed.items()},
            sequence=world.sequences[stream],
            writers=[who for who, at in listed.items() if at.registered],
            own=writer,
        )

    async def _without_transactions(self, writer: str, wait: float) -> _Name:
        """The name, once none of its transactions is open: they hold it as FOR SHARE does in a database (9.4)."""
        deadline = time.monotonic() + wait
        while True:
            with self.world.lock:
                name = self.world.names.setdefault(writer, _Name())
                if not name.open:
                    return name
            if time.monotonic() >= deadline:
                raise ClaimBlocked(writer, [f"{name.open} open transaction(s) of this process"])
            await asyncio.sleep(LOOK)

    def _check(self, claim: Claim) -> _Name:
        name = self.world.names.get(claim.writer)
        if name is None or name.incarnation != claim.incarnation:
            raise WriterFenced(claim.writer, claim.incarnation)
        return name

    async def reserve(self, stream: str, count: int) -> list[int]:
        """See `AsyncStore`."""
        with self.world.lock:
            last = self.world.sequences[self._stream(stream)] + count
            self.world.sequences[stream] = last
            return list(range(last - count + 1, last + 1))

    def effects(self) -> EffectsTransaction:
        """See `AsyncStore`; there are no connections here."""
        raise ConfigError("the memory store has no connections: use an SQLite or PostgreSQL store")

    def transaction(self, claim: Claim, connection: Any = None) -> MemoryTransaction:
        """See `AsyncStore`."""
        if connection is not None:
            raise ConfigError("the memory store has no connections: use an SQLite or PostgreSQL store")
        return MemoryTransaction(self, claim)

    async def outcome(
        self, claim: Claim, marker: object, facts: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """See `AsyncStore`."""
        if isinstance(marker, MemoryTransaction) and marker.open:
            return None
        with self.world.lock:
            self._check(claim)
            found = {}
            for stream, token in facts:
                if fact := self.world.facts.get((stream, claim.writer), {}).get(token):
                    found[stream, token] = list(fact[0])
            return found

    async def heartbeat(self, claim: Claim, positions: Mapping[str, int]) -> Registered:
        """See `AsyncStore`."""
        with self.world.lock:
            self._check(claim)
            stored = bounded(positions, self.world.sequences)
            for (stream, writer), at in self.world.positions.items():
                if writer == claim.writer and at.registered:
                    at.position, at.seen_at = max(at.position, stored.get(stream, 0)), time.monotonic()
            return self._registry(positions)

    async def check_claim(self, claim: Claim) -> None:
        """See `AsyncStore`."""
        with self.world.lock:
            self._check(claim)

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """See `AsyncStore`."""
        stream, writer, after, upto = self._stream(question.stream), question.writer, question.after, question.upto
        with self.world.lock:
            at = self.world.positions.get((stream, writer))
            if at is not None and after < at.floor and after < upto:
                raise PositionTooOld(stream, writer, after, at.floor)
            rows = self.world.facts.get((stream, writer), {})
            due = sorted(token for token in rows if after < token <= upto)
            tokens: list[int] = []
            payloads: list[bytes] = []
            limited = False
            for token in due:
                fact = rows[token][0]
                if tokens and len(tokens) + len(fact) > question.limit:
                    limited = True
                    break
                tokens += [token] * len(fact)
                payloads += fact
            given = max(self.world.sequences[stream], tokens[-1] if tokens else 0)  # nothing above it was (9.17)
            proven = tokens[-1] if limited else max(after, min(upto, given))
            return UpdatesPage(stream, writer, after, proven, tokens, payloads, limited, await self.epoch())

    async def known(self) -> list[KnownWriter]:
        """See `AsyncStore`."""
        with self.world.lock:
            return [
                KnownWriter(
                    stream,
                    writer,
                    at.position,
                    at.floor,
                    at.registered,
                    self.world.names[writer].incarnation,
                    time.monotonic() - at.seen_at,
                )
                for (stream, writer), at in sorted(self.world.positions.items(), key=lambda item: item[0])
            ]

    async def newest(self, stream: str) -> Newest | None:
        """See `AsyncStore`."""
        stream, epoch = self._stream(stream), await self.epoch()
        with self.world.lock:
            rows = {
                writer: max(at.floor, self.world.own_row(stream, writer))
                for (name, writer), at in self.world.positions.items()
                if name == stream
            }
            return Newest(epoch, rows)

    async def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:
        """See `AsyncStore`."""
        name = await self._without_transactions(writer, timeout)
        with self.world.lock:
            if (name.incarnation, name.finished) == (incarnation, incarnation - 1):  # fenced already
                incarnation -= 1
            if name.incarnation == incarnation:
                name.incarnation, name.finished = incarnation + 1, incarnation
            if (name.incarnation, name.finished) != (incarnation + 1, incarnation):
                return {}
            finals = {}
            for (stream, who), at in self.world.positions.items():
                if who == writer and at.registered:
                    last = max(self.world.sequences[stream], self.world.own_row(stream, writer))
                    at.position, at.registered, at.finished = last, False, incarnation
                if who == writer and at.finished == incarnation:
                    finals[stream] = at.position
            return finals

    async def register_reader(
        self,
        reader: str,
        positions: Mapping[tuple[str, str], int],
        epoch: str,
        *,
        oldest: Collection[tuple[str, str]] = (),
    ) -> None:
        """See `AsyncStore`."""
        with self.world.lock:
            saved, loading = self.world.readers.setdefault(reader, {}), self.loading(reader)
            for key, at in self._begun(positions, epoch, oldest).items():
                if key[0] not in loading:
                    saved.setdefault(key, at)

    def _begun(
        self, positions: Mapping[tuple[str, str], int], epoch: str, oldest: Collection[tuple[str, str]]
    ) -> dict[tuple[str, str], _Saved]:
        known = self.world.positions if epoch == self.world.epoch else {}
        floors = {key: known[key].floor for key in oldest if key in known}
        return {key: _Saved(max(at, floors.get(key, 0)), epoch) for key, at in positions.items()}

    async def load_reader(self, reader: str) -> ReaderState:
        """See `AsyncStore`."""
        with self.world.lock:
            saved = self.world.readers.get(reader, {})
            epochs = {at.epoch for at in saved.values()}
            epoch = MIXED if len(epochs) > 1 else next(iter(epochs), None)
            positions = {key: at.position for key, at in saved.items() if key[1]}
            begun = {stream: one.id for (who, stream), (one, _) in self.world.bootstraps.items() if who == reader}
            return ReaderState(epoch, positions, frozenset(stream for stream, _ in saved), begun, self.loading(reader))

    async def save_reader(
        self,
        reader: str,
        changes: Sequence[tuple[str, str, int, int]],
        epoch: str,
        connection: Any = None,
        *,
        bootstraps: Mapping[str, str] | None = None,
    ) -> None:
        """See `AsyncStore`."""
        self._no(connection)
        with self.world.lock:
            saved, loading = self.world.readers.get(reader, {}), self.loading(reader)
            for stream, writer, old, new in changes:
                at, (last, _) = saved.get((stream, writer)), self.world.bootstraps.get((reader, stream), (None, 0.0))
                other = last is not None and bootstraps is not None and bootstraps.get(stream, "") != last.id
                if at is None or at.position != old or at.epoch != epoch or stream in loading or other:
                    raise ReaderMoved(reader, stream, writer, old)
                if epoch == self.world.epoch and new > (given := self.world.sequences.get(stream, new)):
                    raise PositionsAheadOfTable(stream, new, given)
            for stream, writer, _, new in changes:
                saved[stream, writer] = _Saved(new, epoch)

    async def note_stopped(self, reader: str, stream: str, writer: str, reason: str | None) -> None:
        """See `AsyncStore`."""
        with self.world.lock:
            at = self.world.readers.get(reader, {}).get((stream, writer))
            if at is not None:
                at.stopped = reason

    async def reset_reader(self, reader: str, positions: Mapping[tuple[str, str], int], epoch: str) -> None:
        """See `AsyncStore`."""
        with self.world.lock:
            saved = self.world.readers.get(reader, {})
            if self.world.epoch != epoch and any(at.epoch == self.world.epoch for at in saved.values()):
                return
            stay = {key: at for key, at in saved.items() if at.epoch == epoch}
            loading = self.loading(reader) & {stream for stream, _ in stay}
            begun = self._begun(positions, epoch, positions)
            self.world.readers[reader] = {key: at for key, at in begun.items() if key[0] not in loading} | stay

    def _no(self, connection: Any) -> None:
        if connection is not None:
            raise ConfigError("the memory store has no connections: use an SQLite or PostgreSQL store")

    async def dead_letter(
        self,
        reader: str,
        stream: str,
        writer: str,
        tokens: Sequence[int],
        payloads: Sequence[bytes],
        error: str,
        connection: Any = None,
    ) -> None:
        """See `AsyncStore`."""
        self._no(connection)
        letter = DeadLetter(reader, stream, writer, list(tokens), list(payloads), error, 0.0)
        with self.world.lock:
            self.world.dead.append((letter, time.monotonic()))

    async def dead_letters(self, limit: int) -> list[DeadLetter]:
        """See `AsyncStore`."""
        with self.world.lock:
            latest = self.world.dead[::-1][:limit]
        return [attrs.evolve(letter, age=time.monotonic() - at) for letter, at in latest]

    async def prune(
        self,
        *,
        older_than: float | None = None,
        keep: int | None = None,
        reader_cap: float | None = None,
        stream: str | None = None,
    ) -> dict[tuple[str, str], int]:
        """See `AsyncStore`."""
        if older_than is None and keep is None:
            raise ConfigError("prune needs older_than or keep: without either it would delete everything")
        moved: dict[Key, int] = {}
        with self.world.lock:
            for key, rows in self.world.facts.items():
                if stream is not None and key[0] != self._stream(stream):
                    continue
                bound = self._bound(key, rows, older_than, keep, reader_cap)
                gone = [token for token in rows if token <= bound]
                if gone:
                    for token in gone:
                        del rows[token]
                    moved[key] = self.world.positions[key].floor = max(gone)
        return moved

    def _bound(
        self,
        key: Key,
        rows: dict[int, tuple[list[bytes], float]],
        older_than: float | None,
        keep: int | None,
        reader_cap: float | None,
    ) -> int:
        """As facts.py bounds it."""
        now = time.monotonic()
        bounds = [self.world.positions[key].position]
        for saved in self.world.readers.values():
            mine = [at for (stream, _), at in saved.items() if stream == key[0]]
            if mine and (reader_cap is None or max(at.saved_at for at in mine) > now - reader_cap):
                bounds.append(saved[key].position if key in saved else 0)
        if older_than is not None:
            bounds += [token - 1 for token, (_, at) in rows.items() if at > now - older_than]
        if keep:
            each = [token for token in sorted(rows, reverse=True) for _ in rows[token][0]]
            bounds.append(each[keep - 1] - 1 if len(each) >= keep else 0)
        return min(bounds)

    async def restored(self) -> str:
        """See `AsyncStore`."""
        world = self.world
        with world.lock:
            base = int(time.time() * 1000)
            for name in world.names.values():
                name.incarnation, name.finished = max(name.incarnation, base) + 1, None
            for (stream, writer), at in world.positions.items():
                at.position = max(at.floor, world.own_row(stream, writer))
                world.sequences[stream] = max(world.sequences[stream], world.highest_row(stream), at.position)
            world.epoch = new_epoch()
            return world.epoch

    async def status(self) -> dict[str, Any]:
        """See `AsyncStore`."""
        world = self.world
        with world.lock:
            streams: dict[str, Any] = {
                stream: {"table": "busrep_facts", "rows": 0, "sequence": value, "writers": {}}
                for stream, value in sorted(world.sequences.items())
            }
            for (stream, _), rows in world.facts.items():
                streams[stream]["rows"] += sum(len(payloads) for payloads, _ in rows.values())
            for known in await self.known():
                streams[known.stream]["writers"][known.writer] = attrs.asdict(
                    known, filter=lambda field, _: field.name not in ("stream", "writer")
                )
            readers: dict[str, Any] = {}
            for reader, saved in sorted(world.readers.items()):
                for (stream, writer), at in sorted(saved.items(), key=lambda item: item[0]):
                    if not writer:
                        continue
                    proven = world.positions.get((stream, writer), _Position()).position
                    readers.setdefault(reader, {}).setdefault(stream, {})[writer] = {
                        "position": at.position,
                        "lag": max(0, proven - at.position),
                        "epoch": at.epoch,
                        "saved_ago": time.monotonic() - at.saved_at,
                        "stopped": at.stopped,
                    }
            return {
                "schema_version": VERSION,
                "database": "memory",
                "epoch": await self.epoch(),
                "streams": streams,
                "readers": readers,
                "dead_letters": len(world.dead),
                "bootstraps": self.bootstraps_told(),
                "sinks": {},  # of other processes, which cannot reach it
                "staged": 0,
            }


class MemoryTransaction:
    """An `AsyncTransaction`: rows that become visible together."""

    joined = False
    connection = None

    def __init__(self, store: MemoryStore, claim: Claim) -> None:
        self.store, self.claim = store, claim
        self.open = False
        self._rows: list[tuple[str, int, list[bytes]]] = []

    @property
    def marker(self) -> object:
        """This object: it knows whether it has ended."""
        return self

    async def begin(self) -> None:
        """See `AsyncTransaction`."""
        with self.store.world.lock:
            self.store._check(self.claim).open += 1
            self.open = True

    async def insert(self, stream: str, facts: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`."""
        self.store._stream(stream)
        self._rows += [(stream, token, list(payloads)) for token, _, payloads in facts if payloads]

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`; there is no SQL here."""
        raise ConfigError("the memory store runs no SQL: use an SQLite or PostgreSQL store")

    async def commit(self) -> None:
        """See `AsyncTransaction`."""
        with self.store.world.lock:
            for stream, token, payloads in self._rows:
                facts = self.store.world.facts.setdefault((stream, self.claim.writer), {})
                facts[token] = (payloads, time.monotonic())
            await self.rollback()

    async def rollback(self) -> bool:
        """See `AsyncTransaction`."""
        with self.store.world.lock:
            self._rows = []
            if self.open:
                self.open = False
                self.store.world.names[self.claim.writer].open -= 1
        return True
