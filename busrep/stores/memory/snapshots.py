"""Snapshots and bootstraps of the memory store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from busrep.core.snapshots import LOADED, Agreement, BootstrapProgress
from busrep.errors import ConfigError, ReaderMoved
from busrep.stores import snapshots
from busrep.stores.bootstraps import BEGUN, PARTS, begun_at, check_begin, new_id
from busrep.stores.schema import BOOTSTRAP_FIELDS

if TYPE_CHECKING:
    from busrep.settings import Settings
    from busrep.stores.memory.store import _Saved, _World

Key = tuple[str, str]
Fact = tuple[int, str, list[bytes]]


class MemorySnapshots:
    """The part of `MemoryStore` that readers bootstrap from, and save in how far they are."""

    if TYPE_CHECKING:
        name: str
        world: _World
        settings: Settings

        def _stream(self, stream: str) -> str: ...
        def _no(self, connection: Any) -> None: ...
        def _begun(self, positions: Mapping[Key, int], epoch: str, oldest: Collection[Key]) -> dict[Key, _Saved]: ...

    def __init__(self) -> None:
        self._held: set[str] = set()

    # -- what a reader saves

    async def begin_bootstrap(self, reader: str, agreement: Agreement, *, syncs: int, reason: str) -> str:
        """See `AsyncStore`."""
        stream = agreement.stream
        with self.world.lock:
            saved = self.world.readers.setdefault(reader, {})
            floors = {writer: at.floor for (name, writer), at in self.world.positions.items() if name == stream}
            check_begin(agreement, self.world.epoch, floors, {at.epoch for at in saved.values()})
            # Also of those that it had before: each has an entry.
            positions = begun_at(agreement, {writer for name, writer in saved if name == stream})
            saved.update(self._begun(positions, agreement.epoch, ()))
            progress = BootstrapProgress(reader, agreement, BEGUN, syncs=syncs, reason=reason, id=new_id())
            self.world.bootstraps[reader, stream] = progress, time.monotonic()
            return progress.id

    def loading(self, reader: str) -> frozenset[str]:
        """The streams of which this reader loads a snapshot."""
        each = self.world.bootstraps.items()
        return frozenset(stream for (who, stream), (one, _) in each if who == reader and one.state not in LOADED)

    async def save_bootstrap(
        self,
        reader: str,
        stream: str,
        bootstrap_id: str,
        *,
        parts: int,
        applied: int,
        rows: int,
        bytes: int,  # noqa: A002
        state: str,
        connection: Any = None,
    ) -> None:
        """See `AsyncStore`."""
        self._no(connection)
        with self.world.lock:
            progress, _ = self.world.bootstraps.get((reader, stream), (None, 0.0))
            if progress is None or progress.parts != parts or progress.id != bootstrap_id:
                raise ReaderMoved(reader, stream, PARTS, parts)
            moved = attrs.evolve(progress, parts=applied, rows=rows, bytes=bytes, state=state)
            self.world.bootstraps[reader, stream] = moved, time.monotonic()
            alive = self.world.readers.get(reader, {}).get((stream, ""))
            if alive is not None:
                alive.saved_at = time.monotonic()

    async def bootstraps(self, reader: str | None = None) -> list[BootstrapProgress]:
        """See `AsyncStore`."""
        with self.world.lock:
            found = [(at, one) for one, at in self.world.bootstraps.values() if reader in (None, one.reader)]
        found.sort(key=lambda item: item[0], reverse=True)
        return [attrs.evolve(one, age=time.monotonic() - at) for at, one in found]

    def bootstraps_told(self) -> dict[str, Any]:
        """What status() tells."""
        told: dict[str, Any] = {}
        with self.world.lock:
            for (reader, stream), (one, at) in sorted(self.world.bootstraps.items(), key=lambda item: item[0]):
                known = one.asdict() | {"saved_ago": time.monotonic() - at}
                told.setdefault(reader, {})[stream] = {field: known[field] for field in BOOTSTRAP_FIELDS}
        return told

    # -- where it loads from

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """See `SnapshotSource`."""
        self._stream(stream)
        if part_rows < 1:
            raise ConfigError(f"a part of a snapshot has at least one row, not {part_rows}")
        snapshots.SLOTS.take(self._slot, f"memory store {self.name!r}", self.settings.snapshots)
        try:
            with self.world.lock:
                agreement = self._agree(stream, part_rows, again)
        except BaseException:
            snapshots.SLOTS.give_back(self._slot)
            raise
        self._held.add(agreement.id)
        return agreement

    @property
    def _slot(self) -> str:
        return f"memory {self.name}"

    def _agree(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        log, source = self._log(stream), f"memory store {self.name!r}"
        if again is not None and again.stream == stream and snapshots.still(again, log):
            return snapshots.named(again, source)
        counts: Counter[int] = Counter()
        for token, _, payloads in self._facts(stream, log.positions):
            counts[token] += len(payloads)
        size = max(part_rows, -(-sum(counts.values()) // snapshots.MOST_PARTS))
        bounds, total, last = [], 0, max(counts, default=0)
        for token in sorted(counts):
            total += counts[token]
            if total // size > (total - counts[token]) // size or token == last:
                bounds.append((token, total))
        parts = snapshots.parts_of(bounds)
        return snapshots.named(Agreement(stream, log.epoch, log.positions, log.floors, parts), source)

    def _log(self, stream: str) -> snapshots.Log:
        at = {writer: at for (name, writer), at in self.world.positions.items() if name == stream}
        return snapshots.Log(
            self.world.epoch or "",
            False,
            {writer: one.position for writer, one in at.items()},
            {writer: one.floor for writer, one in at.items() if one.floor},
        )

    def _facts(self, stream: str, positions: Mapping[str, int]) -> list[Fact]:
        return [
            (token, writer, payloads)
            for writer, position in positions.items()
            for token, (payloads, _) in self.world.facts.get((stream, writer), {}).items()
            if token <= position
        ]

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`."""
        stream, part = self._stream(agreement.stream), agreement.parts[number]
        with self.world.lock:
            snapshots.check_part(agreement, number, self._log(stream))
            found = [one for one in self._facts(stream, agreement.positions) if part.after < one[0] <= part.upto]
        found.sort(key=lambda fact: fact[:2])
        rows = [(token, writer, payload) for token, writer, payloads in found for payload in payloads]
        for at in range(0, len(rows), snapshots.PIECE_ROWS):
            tokens, writers, payloads = zip(*rows[at : at + snapshots.PIECE_ROWS], strict=True)
            yield snapshots.lines_of(stream, tokens, writers, payloads)

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`."""
        if agreement.id in self._held:
            self._held.discard(agreement.id)
            snapshots.SLOTS.give_back(self._slot)

    def leave_all(self) -> None:
        """The store is closed."""
        while self._held:
            self._held.pop()
            snapshots.SLOTS.give_back(self._slot)
