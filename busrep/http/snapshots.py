"""Snapshots for readers over HTTP, out of one source: what stands behind the paths of snapshots_server.py.

A part is loaded into memory whole before it is sent. So its SHA-256 is known before its first byte is sent, and a slow
reader, or one that stalls, costs the store nothing. Parts that are being sent, or kept for other readers, are bounded
together.

The source holds nothing between two parts: each is loaded under the agreement *again*, because the positions alone
settle what is in a snapshot (core/snapshots.py). For the same reason an agreement may be forgotten here at any time:
its reader brings it along.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import attrs

from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import SnapshotBusy, SnapshotGone, Unavailable

from ..runtime.tasks import being_cancelled, stop
from .guard import AGREEMENT_BYTES, Refused
from .snapshots_limits import SnapshotLimits

T = TypeVar("T")

log = logging.getLogger("busrep.http")

WHAT = "the snapshots of this server"
# Finished parts that stay for other readers: those of some readers that load the same at about the same time.
PARTS_KEPT = 8
# Agreements that are remembered; a client sends along one that is not.
AGREEMENTS_KEPT = 16


class SharedTasks(Generic[T]):
    """Work that is done once for all who ask for it at about the same time.

    It goes on when those who wait for it hang up, because it may take longer than one request, and the client comes
    again. ``kept``: most results that are kept, and ``seconds``: for how long.
    """

    def __init__(self, kept: int, seconds: float) -> None:
        self._kept, self._seconds = kept, seconds
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}

    @property
    def running(self) -> int:
        """Tasks that have not ended."""
        return sum(not task.done() for task in self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def find(self, key: Hashable) -> asyncio.Task[T] | None:
        """The task of that key, under way or done."""
        return self._tasks.get(key)

    def start(self, key: Hashable, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do the work of a key that has no task."""
        task = self._tasks[key] = asyncio.create_task(work, name="busrep-snapshots")
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        if task.cancelled() or (error := task.exception()) is not None:
            if not task.cancelled():  # those who wait are told; there may be none any more
                log.debug("%s failed: %s", task.get_name(), error)
            self.forget(key)
            return
        if key in self._tasks:
            self._timers[key] = asyncio.get_running_loop().call_later(self._seconds, self.forget, key)
        for old in list(self._timers)[: -self._kept]:
            self.forget(old)

    def forget(self, key: Hashable) -> None:
        """Do not give this result to anybody else."""
        self._tasks.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def forget_results(self, unwanted: Callable[[T], bool]) -> None:
        """The same of all results that are ``unwanted``."""
        for key in [key for key in self._timers if unwanted(self._tasks[key].result())]:
            self.forget(key)

    async def close(self) -> None:
        """End what is under way, and forget everything."""
        await stop([task for task in self._tasks.values() if not task.done()], 5.0)
        for key in list(self._tasks):
            self.forget(key)


async def result_of(task: asyncio.Task[T]) -> T:
    """What a task gives to one of many that wait for it."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise Unavailable(WHAT, "it is being closed") from None


@attrs.frozen(eq=False)
class PartText:
    """The text of a part, and its SHA-256, in hexadecimal."""

    text: bytes = attrs.field(repr=False)
    digest: str


class Snapshots:
    """``source``: opened and closed by the caller."""

    def __init__(self, source: SnapshotSource, limits: SnapshotLimits) -> None:
        self.source, self.limits = source, limits
        self._known: dict[str, Agreement] = {}  # by digest
        self._agreements = SharedTasks[Agreement](AGREEMENTS_KEPT, limits.shared_for)
        self._parts = SharedTasks[PartText](PARTS_KEPT, limits.shared_for)
        self._loads = asyncio.Semaphore(limits.loads)
        self._texts: WeakSet[PartText] = WeakSet()  # all that are in memory, whoever has them
        self.agreements = self.parts_loaded = 0

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: agreements that are remembered, parts that are loaded or kept for others, agreements
        made, and parts loaded from the source."""
        return {
            "kept": len(self._known),
            "parts": len(self._parts),
            "agreements": self.agreements,
            "parts_loaded": self.parts_loaded,
        }

    async def close(self) -> None:
        """Let go of everything. May be called twice."""
        await self._agreements.close()
        await self._parts.close()
        self._known.clear()

    async def agree(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        """The agreement for a client. Raises what the source raises, SnapshotBusy, Refused."""
        key = (stream, part_rows, None if again is None else again.digest)
        task = self._agreements.find(key)
        if task is None:
            if self._agreements.running >= self.limits.snapshots:
                raise SnapshotBusy(WHAT, self.limits.snapshots)
            task = self._agreements.start(key, self._agree(stream, part_rows, again))
        found = await result_of(task)
        if again is None or not again.same(found):
            return found
        # Its own back: how many rows its parts have is not in the digest, and may be known to it alone.
        return attrs.evolve(again, source="", id=found.id)

    async def _agree(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        async with self._held(stream, part_rows, again) as held:
            agreement = attrs.evolve(held, source="", id=held.digest)  # where our store is concerns nobody
        if len(agreement.to_json()) > AGREEMENT_BYTES:
            raise Refused(
                400,
                "too_many_parts",
                f"a snapshot in {len(agreement.parts)} parts: raise Settings.snapshot_part_rows",
            )
        self._remember(agreement)
        self.agreements += 1
        return agreement

    def _remember(self, agreement: Agreement) -> None:
        self._known.pop(agreement.digest, None)
        self._known[agreement.digest] = agreement
        if len(self._known) > AGREEMENTS_KEPT:
            del self._known[next(iter(self._known))]

    async def part(self, id: str, number: int, agreement: Agreement | None) -> PartText:
        """A part of the agreement with that digest, which a client may bring along. Raises Refused, SnapshotGone, and
        what else the source raises."""
        agreement = agreement or self._known.get(id)
        if agreement is None:
            raise Refused(410, "snapshot_unknown", "this agreement is not known here (any more): send it again")
        if not 0 <= number < len(agreement.parts):
            raise Refused(400, "bad_parameter", "there is no part of this number")
        key = (id, number)
        task = self._parts.find(key)
        if task is None:
            await self._loads.acquire()  # what a client waits for that hangs up is not begun
            task = self._parts.find(key)
            if task is None:
                task = self._parts.start(key, self._load(agreement, number))
                task.add_done_callback(lambda _: self._loads.release())
            else:
                self._loads.release()
        return await result_of(task)

    async def _load(self, agreement: Agreement, number: int) -> PartText:
        self._check_memory()
        try:
            async with self._held(agreement.stream, self.limits.part_rows, agreement) as held:
                if not held.same(agreement):
                    raise SnapshotGone(agreement.stream, "rows of it were pruned, or the fact log was replaced")
                async with contextlib.aclosing(self.source.load(held, number)) as pieces:
                    part = await self._whole(pieces)
        except SnapshotGone:
            gone = agreement.digest
            self._agreements.forget_results(lambda one: one.id == gone)
            raise
        self._remember(agreement)
        self.parts_loaded += 1
        return part

    @contextlib.asynccontextmanager
    async def _held(self, stream: str, part_rows: int, again: Agreement | None) -> AsyncIterator[Agreement]:
        """What the source agrees on and holds meanwhile; all of it within a deadline."""
        try:
            async with asyncio.timeout(self.limits.load_timeout):
                held = await self.source.agree(stream, part_rows=part_rows, again=again)
                try:
                    yield held
                finally:
                    await self.source.leave(held)
        except TimeoutError:
            raise Unavailable(WHAT, f"the store took more than {self.limits.load_timeout:g} s") from None

    def _check_memory(self) -> None:
        """Let go of the parts that are only kept, when all together are too large. Raises Refused when those that are
        being sent are."""
        if self._bytes() > self.limits.memory:
            self._parts.forget_results(lambda _: True)
        if self._bytes() > self.limits.memory:
            raise Refused(503, "busy", "too many parts of snapshots are being sent: come back later")

    def _bytes(self) -> int:
        return sum(len(part.text) for part in self._texts)

    async def _whole(self, pieces: AsyncIterable[bytes]) -> PartText:
        """A part. Raises Refused, and what ``pieces`` raises."""
        text, most = bytearray(), self.limits.part_bytes
        async for piece in pieces:
            text += piece
            if len(text) > most:
                raise Refused(
                    400,
                    "part_too_long",
                    f"a part of the snapshot is longer than {most} bytes: lower Settings.snapshot_part_rows before a "
                    "snapshot is agreed on, or raise SnapshotLimits.part_bytes",
                )
        part = PartText(bytes(text), await asyncio.to_thread(lambda: hashlib.sha256(text).hexdigest()))
        self._texts.add(part)
        return part
