"""Snapshots for many readers at once, from one source: what stands behind the paths of snapshots_server.py.

Readers that come at about the same time get the same agreement, and each part of it is taken from the source once: it
goes to disk, and from there to all of them. So a slow reader, or one that stalls, costs the store nothing. What the
source holds for an agreement (a database snapshot) is let go of when nothing was loaded for a while, and agreed on
*again* when somebody comes back: the content is settled by the positions, see core/snapshots.py. For the same reason
an agreement may be forgotten here at any time: its reader brings it along, and it is taken up again.

The modules: http_snapshots_server.py has requests and answers, round this one; http_snapshots_held.py what the source
holds; http_snapshots_spool.py the files; http_snapshots_limits.py the bounds of all of it. http_snapshots_client.py is
the other side's download, for http_source.py. What both sides check of an agreement is in snapshot_sources.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import attrs

from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import SnapshotBusy, SnapshotGone, Unavailable
from busrep.settings import Settings

from ..runtime.tasks import being_cancelled, stop
from .snapshots_held import WHAT, HeldSource, Hold
from .snapshots_limits import SnapshotLimits
from .snapshots_spool import PartReading, Spool, SpooledPart, SpoolTrouble

T = TypeVar("T")

log = logging.getLogger("busrep.http")


# Of agreements that do not say how many rows their parts have.
PART_ROWS = Settings().snapshot_part_rows


class UnknownSnapshot(Exception):
    """An agreement that is not, or no longer, known here."""


class NoSuchPart(Exception):
    """A number beyond the agreement's parts."""


class TooManyParts(Exception):
    """An agreement that would be larger than ``agreement_bytes``."""


@attrs.define(eq=False)
class _Kept:
    """One agreement. ``agreement``: as clients know it, its id the digest; ``text``: as JSON. ``agreed``: when, the
    last time. ``shared``: with readers that come new. ``ever``: parts that have been loaded once."""

    agreement: Agreement
    text: bytes
    hold: Hold
    part_rows: int
    agreed: float
    made: float
    used: float
    shared: bool
    parts: dict[int, SpooledPart] = attrs.field(factory=dict)
    loading: dict[int, _Loading] = attrs.field(factory=dict)
    ever: set[int] = attrs.field(factory=set)

    def done(self) -> bool:
        """Whether all of it has been loaded."""
        return len(self.ever) == len(self.agreement.parts)


@attrs.define(eq=False)
class _Loading:
    """A part on its way to disk: how many wait for it, and whether the source has been asked."""

    task: asyncio.Task[SpooledPart] | None = None
    waiting: int = 0
    begun: bool = False


class Snapshots:
    """``source``: opened and closed by the caller. ``clock``: seconds, monotonic."""

    def __init__(
        self, source: SnapshotSource, limits: SnapshotLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock = limits, clock
        self._source = HeldSource(source, limits, clock, self._start)
        self._kept: dict[str, _Kept] = {}  # by digest
        self._agreeing: dict[tuple[str, int, str], asyncio.Task[_Kept]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loads = asyncio.Semaphore(limits.loads)
        self._spool = Spool(limits.spool_bytes, limits.spool_folder, part_bytes=limits.part_bytes)
        self._sweeping: asyncio.TimerHandle | None = None
        self.agreements = self.parts_loaded = self.parts_shared = 0

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: agreements that are kept, and held at the source; parts and bytes on disk; agreements
        made, parts loaded from the source, and parts that were there already when somebody asked."""
        return {
            "kept": len(self._kept),
            "held": len(self._source),
            "spooled_parts": self._spool.parts,
            "spooled_bytes": self._spool.bytes,
            "agreements": self.agreements,
            "parts_loaded": self.parts_loaded,
            "parts_shared": self.parts_shared,
        }

    async def close(self) -> None:
        """Let go of everything at the source, remove the files. May be called twice."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._source.closed = True  # what ends now sets no clocks any more
        await stop(self._tasks, 5.0)
        for kept in self._kept.values():
            kept.hold.stop()
        self._kept.clear()
        await self._source.close()
        self._spool.close()

    # -- agreements -------------------------------------------------------------------------------------------

    async def agree(self, stream: str, part_rows: int, again: Agreement | None) -> bytes:
        """The agreement for a client, as JSON. Raises what the source raises, SnapshotBusy, TooManyParts."""
        kept = await self._agreement(stream, part_rows, again)
        if again is None or not again.same(kept.agreement):
            return kept.text
        # Its own back: how many rows its parts have may be known to it alone.
        return attrs.evolve(again, source="", id=kept.agreement.id).to_json()

    async def take_up(self, agreement: Agreement) -> None:
        """Know an agreement that a client brings along. Raises SnapshotGone, and what `agree` raises."""
        rows = max((part.rows for part in agreement.parts), default=0)
        kept = await self._agreement(agreement.stream, rows if rows > 0 else PART_ROWS, agreement)
        if not kept.agreement.same(agreement):
            raise SnapshotGone(agreement.stream, "rows of it were pruned, or the fact log was replaced")

    async def _agreement(self, stream: str, part_rows: int, again: Agreement | None) -> _Kept:
        self._sweep()
        kept = self._known(stream, part_rows, again)
        if kept is None:
            key = (stream, part_rows, "" if again is None else again.digest)
            task = self._agreeing.get(key)
            if task is None:
                task = self._agreeing[key] = self._start(self._agree(stream, part_rows, again), "agree")
                task.add_done_callback(lambda _: self._agreeing.pop(key, None))
            # Who hangs up leaves it to the others, and to whoever asks next: it may take longer than one request.
            kept = await _shared(task)
        kept.used = self._clock()
        return kept

    def _known(self, stream: str, part_rows: int, again: Agreement | None) -> _Kept | None:
        if again is not None:
            return self._kept.get(again.digest)
        young = self._clock() - self.limits.shared_for
        fitting = [
            kept
            for kept in self._kept.values()
            if kept.agreement.stream == stream and kept.part_rows == part_rows and kept.shared and kept.agreed >= young
        ]
        return max(fitting, key=lambda kept: kept.agreed, default=None)

    async def _agree(self, stream: str, part_rows: int, again: Agreement | None) -> _Kept:
        found = await self._source.agreed(stream, part_rows, again)
        try:
            # What one client brings along is not given to others: they shall have what the source agrees on by itself.
            kept = self._keep(found, part_rows, shared=again is None or not again.same(found))
            await kept.hold.offer(found)
        except BaseException:
            await self._source.let_go(found)
            raise
        self.agreements += 1
        self._sweep_later()
        return kept

    def _keep(self, found: Agreement, part_rows: int, *, shared: bool) -> _Kept:
        agreement = attrs.evolve(found, source="", id=found.digest)  # where our store is concerns nobody
        text, now = agreement.to_json(), self._clock()
        if len(text) > self.limits.agreement_bytes:
            raise TooManyParts(f"a snapshot in {len(found.parts)} parts: raise Settings.snapshot_part_rows")
        kept = self._kept.get(agreement.id)
        if kept is None:
            self._make_room()
            hold = Hold(self._source, agreement)
            kept = self._kept[agreement.id] = _Kept(agreement, text, hold, part_rows, now, now, now, shared)
        elif shared:  # nothing was written since: what is on disk of it serves again
            kept.agreed, kept.shared, kept.part_rows = now, True, part_rows
            kept.agreement, kept.text = agreement, text  # the numbers of rows may have been a client's until now
        return kept

    def _make_room(self) -> None:
        idle = sorted((kept.used, id) for id, kept in self._kept.items() if not kept.hold.users and not kept.loading)
        for _, id in idle[: max(0, len(self._kept) + 1 - self.limits.kept)]:
            self._forget(id)
        if len(self._kept) >= self.limits.kept:
            raise SnapshotBusy(WHAT, self.limits.kept)

    # -- parts ------------------------------------------------------------------------------------------------

    async def part(self, id: str, number: int) -> PartReading:
        """The part, open for reading; close it. Raises UnknownSnapshot, NoSuchPart, SnapshotGone, SpoolTrouble, and
        what else the source raises."""
        self._sweep()
        kept = self._kept.get(id)
        if kept is None:
            raise UnknownSnapshot
        if not 0 <= number < len(kept.agreement.parts):
            raise NoSuchPart
        for _ in range(3):  # between its loading and our turn it may have had to make room for others
            kept.used = self._clock()
            part = kept.parts.get(number)
            if part is not None and not part.removed:
                self.parts_shared += 1
            else:
                part = await self._spooled(kept, number)
            reading = self._spool.open(part)
            if reading is not None:
                return reading
        raise SpoolTrouble("the parts of snapshots that are asked for at a time do not fit on the server's disk")

    async def _spooled(self, kept: _Kept, number: int) -> SpooledPart:
        loading = kept.loading.get(number)
        if loading is None:
            loading = kept.loading[number] = _Loading()
            loading.task = self._start(self._load(kept, number, loading), "load")
        assert loading.task is not None  # noqa: S101 - for mypy
        loading.waiting += 1
        try:
            return await _shared(loading.task)
        finally:
            loading.waiting -= 1
            if not loading.waiting and not loading.begun:
                # Begun, it ends by itself, and is there when the client comes again. Else it would be a queue of what
                # nobody wants any more.
                loading.task.cancel()
                if kept.loading.get(number) is loading:
                    del kept.loading[number]

    async def _load(self, kept: _Kept, number: int, loading: _Loading) -> SpooledPart:
        try:
            async with self._loads:
                loading.begun = True
                async with kept.hold.using(kept.part_rows, kept.done) as held, self._source.in_time():
                    async with contextlib.aclosing(self._source.source.load(held, number)) as pieces:
                        part = await self._spool.write(pieces)
                    kept.parts[number] = part
                    kept.ever.add(number)
        except SnapshotGone:
            kept.shared = False
            raise
        finally:
            if kept.loading.get(number) is loading:
                del kept.loading[number]
        self.parts_loaded += 1
        if self._kept.get(kept.agreement.id) is not kept:  # forgotten meanwhile
            self._spool.remove(part)
        return part

    # -- what is forgotten ------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        now, limits = self._clock(), self.limits
        for id, kept in list(self._kept.items()):
            if now - kept.used > limits.unused_after or now - kept.made > limits.kept_at_most:
                self._forget(id)

    def _forget(self, id: str) -> None:
        kept = self._kept.pop(id)
        for part in kept.parts.values():
            self._spool.remove(part)
        kept.hold.leave_soon()

    def _sweep_later(self) -> None:
        """Also when nobody asks for anything any more."""
        if self._sweeping is None and self._kept:
            self._sweeping = asyncio.get_running_loop().call_later(self.limits.unused_after, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweeping = None
        self._sweep()
        self._sweep_later()

    # -- small things -----------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"busrep-snapshots-{what}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Told to whoever waits for it; and that may be nobody any more.
            log.debug("%s failed: %s", task.get_name(), error)


async def _shared(task: asyncio.Task[T]) -> T:
    """What the task gives, to one of many that wait for it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise Unavailable(WHAT, "it is being closed") from None
