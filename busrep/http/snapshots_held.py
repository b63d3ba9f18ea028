"""What the source of snapshots holds for its agreements (a database snapshot, connections): a bounded number of them,
none for longer than it is needed, and agreed on again when it is needed once more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import SnapshotBusy, SnapshotGone, Unavailable

from .snapshots_limits import SnapshotLimits

WHAT = "the snapshots of this server"

Start = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
"""Run something as a task of a name; until it is closed."""


class HeldSource:
    """A source, and the agreements that it holds. ``clock``: seconds, monotonic."""

    def __init__(
        self, source: SnapshotSource, limits: SnapshotLimits, clock: Callable[[], float], start: Start
    ) -> None:
        self.source, self.limits, self.clock, self.start = source, limits, clock, start
        self._held: dict[int, Agreement] = {}  # by their identity
        self._asking = 0  # agreements that will be held in a moment
        self.closed = False  # by whoever closes it, before anything else

    def __len__(self) -> int:
        return len(self._held)

    async def agreed(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        """Agree with the source, which holds it until it is let go of. Raises SnapshotBusy, and what it raises."""
        if len(self._held) + self._asking >= self.limits.snapshots:
            raise SnapshotBusy(WHAT, self.limits.snapshots)
        self._asking += 1
        try:
            async with self.in_time():
                held = await self.source.agree(stream, part_rows=part_rows, again=again)
        finally:
            self._asking -= 1
        self._held[id(held)] = held
        return held

    async def let_go(self, agreement: Agreement) -> None:
        """The source need not hold it any more; may be said twice."""
        if self._held.pop(id(agreement), None) is not None:
            await self.source.leave(agreement)

    async def close(self) -> None:
        """Let go of all."""
        for held in list(self._held.values()):
            await self.let_go(held)

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Whatever is asked of the source has a deadline."""
        try:
            async with asyncio.timeout(self.limits.load_timeout):
                yield
        except TimeoutError:
            raise Unavailable(WHAT, f"the store took more than {self.limits.load_timeout:g} s") from None


class Hold:
    """On one agreement, as long as something is loaded, and a while longer."""

    def __init__(self, source: HeldSource, agreement: Agreement) -> None:
        self._source, self._agreement = source, agreement
        self._held: Agreement | None = None  # the source's own
        self._since = 0.0
        self.users = 0
        self.lock = asyncio.Lock()  # while it is taken or let go of
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving: asyncio.TimerHandle | None = None

    async def offer(self, found: Agreement) -> None:
        """The source has agreed on it: keep that, or let go of it if there is one already."""
        async with self.lock:
            if self._held is None:
                self._keep(found)
                self._leave_later(self._source.limits.held_for if found.parts else 0.0)
        if self._held is not found:
            await self._source.let_go(found)

    def _keep(self, held: Agreement) -> None:
        self._held, self._since = held, self._source.clock()

    @contextlib.asynccontextmanager
    async def using(self, part_rows: int, done: Callable[[], bool]) -> AsyncIterator[Agreement]:
        """The source's agreement, agreed on again if need be. ``done``: whether nothing is left to load, at the end.
        Raises SnapshotGone, and what the source raises."""
        source, agreement = self._source, self._agreement
        async with self.lock:
            if self._held is not None and source.clock() - self._since > source.limits.held_at_most:
                await self._idle.wait()  # nobody new comes in meanwhile: that takes the lock
                await self._leave()
            held = self._held
            if held is None:
                held = await source.agreed(agreement.stream, part_rows, agreement)
                if not held.same(agreement):
                    await source.let_go(held)
                    raise SnapshotGone(agreement.stream, "rows of it were pruned, or the fact log was replaced")
                self._keep(held)
            self.users += 1
            self._idle.clear()
        try:
            yield held
        finally:
            self.users -= 1
            if not self.users:
                self._idle.set()
                self._leave_later(0.0 if done() else source.limits.held_for)

    def _leave_later(self, seconds: float) -> None:
        self.stop()
        if self._source.closed:  # of one that was forgotten: nobody would stop the clock
            return
        self._leaving = asyncio.get_running_loop().call_later(seconds, self.leave_soon)

    def leave_soon(self) -> None:
        """Let go of it, unless something is loaded."""
        self.stop()
        self._source.start(self._leave_idle(), "leave")

    def stop(self) -> None:
        """No timer any more."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    async def _leave_idle(self) -> None:
        async with self.lock:
            if not self.users:
                await self._leave()

    async def _leave(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await self._source.let_go(held)
