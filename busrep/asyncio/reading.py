"""The reading half of a bus: makes the parts, and drives them by what comes over the link and by the clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from busrep.core.framing import Frame
from busrep.errors import BusrepError, Closed, ConfigError, WaitTimeout
from busrep.streams import Stream

from ..runtime.batch import Batch, Handler
from ..runtime.tasks import stop, within
from ..snapshots.parts import Applier
from .beginning import Beginning
from .bootstrapping import Bootstrapping
from .context import ReaderContext
from .handlers import Handlers
from .saving import BatchSaver, PositionSaver
from .table import TableReader
from .waiting import FollowLoop

if TYPE_CHECKING:
    from .bus_life import BusLife

log = logging.getLogger("busrep.reader")

# Epochs of other deployments that are told of, each once.
MOST_REPORTED = 16


class Reading(ReaderContext):
    """Owns a ``Reader`` core and drives it."""

    def __init__(self, bus: BusLife) -> None:
        super().__init__(bus)
        self.after_pump: Callable[[], None] = lambda: None
        self.bootstrapping = Bootstrapping(self)
        self.saver, self.batches, self.handlers = PositionSaver(self), BatchSaver(self), Handlers(self)
        self.beginning, self.table = Beginning(self), TableReader(self)
        self._look_at_all = False  # a look is due that asks for all writers
        self._registry_read_at = -math.inf
        self._reported: set[str] = set()  # epochs of other deployments
        self._retry: asyncio.TimerHandle | None = None

    # -- following --------------------------------------------------------------------------------------------

    def subscribe(self, stream: Stream[Any], handler: Handler[Any]) -> None:
        """Call ``handler`` with the stream's batches from now on."""
        if stream.name not in self.subscribed:
            # What passed while nobody handled it (somebody waited, perhaps) was not saved, and is due to this one.
            for key, progress in self.core.progress.items():
                held = key in self.stopped or self.holds(key[0])
                if key[0] == stream.name and self.is_saved(key) and not held:
                    self.core.progress[key].go_on_from(self.saved.at.get(key, progress.began))
        self.handlers.add(stream.name, handler)
        self.follow_stream(stream)
        self.pump()

    def follow_stream(self, stream: Stream[Any]) -> asyncio.Future[None]:
        """Begin to follow a stream, once; what is returned is done when its positions are known."""
        begun = self.following.get(stream.name)
        if begun is None:
            begun = self.following[stream.name] = asyncio.get_running_loop().create_future()
            self.spawn(partial(self._begin, stream, begun), f"follow-{stream.name}")
        return begun

    async def _begin(self, stream: Stream[Any], begun: asyncio.Future[None]) -> None:
        await self.beginning.begin(stream)
        if not begun.done():
            begun.set_result(None)

    async def followed(self, stream: Stream[Any]) -> None:
        """Wait until a stream's positions are known. Raises what keeps them from it."""
        await asyncio.wait([self.follow_stream(stream)])  # which close() cancels, unlike the one who waits
        if self.closed:
            raise Closed
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # it is raised again and again, and would hold on to every frame

    def disown(self) -> None:
        """The own name was taken over: follow it as any other, from where the own facts end."""
        positions = self.bus.own_name.positions()
        self.own.disown({stream: at for stream, at in positions.items() if self.own_counts(stream)})
        self.ask_for_positions()

    def snapshot(self, applier: Applier) -> None:
        """Apply snapshots of a stream so, and follow it."""
        self.bootstrapping.register(applier)
        self.follow_stream(applier.stream)

    async def bootstrap(self, stream: Stream[Any]) -> None:
        """Take a snapshot, and wait until the stream is online."""
        task = asyncio.current_task()
        if self.handlers.is_worker(task, stream.name) or self.bootstrapping.is_worker(task, stream.name):
            raise ConfigError("a snapshot is applied when no handler of its stream is at work: ask from another task")
        await self.followed(stream)
        await self.bootstrapping.bootstrap(stream.name)

    # -- what comes over the link -----------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The subscription stands (again)."""
        self.core.connected(now)
        self.own.learn()
        self.pump()

    def disconnected(self) -> None:
        """The subscription is lost."""
        self.core.disconnected()
        self.own.learn()
        self.pump()

    def receive(self, frame: Frame, now: float) -> None:
        """One message."""
        self.core.receive_frame(frame, now)
        self.pump()

    # -- the pump: what the core wants done -------------------------------------------------------------------

    def pump(self) -> None:
        """Start the fetches and the handlers that the core asks for."""
        if self.closed:
            return
        core, now = self.core, asyncio.get_running_loop().time()
        if core.new_epoch is not None and self.failure is None:
            self.spawn(self.beginning.change_epoch, "epoch", once=True)
        self.own.learn_behind_snapshots(self.holds)
        if core.admission.registry_doubted and now - self._registry_read_at >= self.settings.heartbeat:
            self._registry_read_at = now  # whatever is said on the channel: the table is asked once a beat at most
            self.beat(all_known=True)
        for epoch in core.other_deployments:
            self.report_deployment(epoch, core.epoch)
        core.other_deployments.clear()
        for asked in core.fetches(now):
            self.spawn(partial(self.table.fetch, asked), "fetch")
        self.handlers.hand_out()
        self.bootstrapping.pumped()
        for key in self.waiters.awaited:  # a position may move without rows, and so without a handler
            self.wake(key)
        due = core.next_retry(now)
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None
        if due is not None:
            self._retry = asyncio.get_running_loop().call_at(due, self.pump)
        self.after_pump()

    def report_deployment(self, epoch: str, own: str | None) -> None:
        """Say once that lines of another log are heard."""
        if self.is_reported(epoch) or len(self._reported) >= MOST_REPORTED:
            return
        self._reported.add(epoch)
        log.error(
            "another deployment uses this channel: lines of epoch %s are heard and ignored, the log here is of epoch "
            "%s. Give each deployment a name of its own (name=). If this one's database was restored just now, its new "
            "epoch is not known here yet", epoch, own,
        )  # fmt: skip

    def is_reported(self, epoch: str) -> bool:
        """Whether `report_deployment` has told of this epoch."""
        return epoch in self._reported

    def resume(self, stream: str, writer: str) -> None:
        """Go on with a (stream, writer) that stopped, at the rows that stopped it."""
        self.bootstrapping.resume(stream)
        if self.stopped.pop((stream, writer), None) is not None:
            self.note(None, (stream, writer))
            self.core.progress[stream, writer].resume()
            self.ask_for_positions()
            self.pump()  # a notice of a reset may have been waiting

    def fail(self, error: BusrepError) -> None:
        """All reading stops for good."""
        super().fail(error)
        self.bootstrapping.fail()

    # -- the beat ---------------------------------------------------------------------------------------------

    def beat(self, *, all_known: bool) -> None:
        """Look into the table by the side: one slower than a beat must not delay the beats, nor be cut off by them."""
        self._look_at_all |= all_known
        if not self.closed:  # the beats end later, and nobody would wait for what is begun now
            self.spawn(self._look, "look", once=True)

    async def _look(self) -> None:
        all_known, self._look_at_all = self._look_at_all, False
        try:
            async with asyncio.timeout(self.settings.fetch_timeout):
                await self.look_after_silent(all_known=all_known)
        except (BusrepError, TimeoutError) as error:
            self._look_at_all |= all_known  # the next beat looks again
            log.warning("looking for silent writers: %s: %s", type(error).__name__, error)

    async def look_after_silent(self, *, all_known: bool) -> None:
        """What nobody announces is looked for in the table, and who is not heard."""
        if self.own.any_behind_snapshot:
            self.pump()
        try:
            if not all_known or not await self.saver.look_at_saved():
                await self.bootstrapping.look_for_peers()
        except BusrepError as error:
            self._look_at_all |= all_known  # the next beat looks again
            log.debug("saved positions cannot be read yet: %s", error)
        if self.following and self.options.store is not None:
            await self.table.look(self.own.name, all_known=all_known)

    # -- waiting ----------------------------------------------------------------------------------------------

    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float) -> None:
        """Return once everything of ``writer`` up to ``token`` was handled here. Raises WaitTimeout."""
        key = (stream.name, writer)
        try:
            async with asyncio.timeout(timeout):
                await self.followed(stream)
                if (error := self.stopped.get(key) or self.stopped_bootstraps.get(key[0])) is not None:
                    raise error.with_traceback(None)
                if self.core.delivered(*key) < token or self.holds(key[0]):
                    await self.waiters.wait(key, token)
        except TimeoutError:
            raise WaitTimeout(*key, token, self.core.delivered(*key), timeout) from None

    async def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]:
        """Yield the batches of ``streams``; each counts as handled when the next is asked for."""
        loop = FollowLoop(stream.name for stream in streams)
        self.loops[loop] = None
        try:
            for stream in streams:
                self.subscribe(stream, loop.offer)
            stopped = [error for key, error in self.stopped.items() if key[0] in loop.streams]
            stopped += [error for name, error in self.stopped_bootstraps.items() if name in loop.streams]
            for error in [self.failure, *stopped, Closed() if self.closed else None]:
                if error is not None:
                    loop.interrupt(error)
            while True:
                batch, handled = await loop.next()
                # Else it is of a log that is gone.
                if self.core.in_hand((batch.stream.name, batch.writer), batch.handling.raw):
                    yield batch
                if not handled.done():
                    handled.set_result(None)
        finally:
            try:
                # What asked for this batch has handled the one before: its worker must take note of that first, or the
                # batch would come again.
                await asyncio.sleep(0)
            finally:
                for stream in streams:
                    self.handlers.remove(stream.name, loop.offer)
                del self.loops[loop]
                loop.detach()

    def is_worker(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one that calls handlers."""
        return self.handlers.is_worker(task) or self.bootstrapping.is_worker(task) or task in self.tasks

    async def close(self, timeout: float) -> None:
        """Let running handlers end, save, stop everything."""
        self.closed = self.tasks.closed = True
        self.retrying.end()
        if self._retry is not None:
            self._retry.cancel()
        for task in [*self.following.values(), *self.tasks]:
            task.cancel()
        self.interrupt(Closed())
        for loop in self.loops:
            loop.detach()
        workers = [*self.workers.values(), *self.bootstrapping.end()]
        if workers:
            await asyncio.wait(workers, timeout=timeout)
        await stop([*workers, *self.tasks], timeout)
        await self.bootstrapping.close(timeout)
        with contextlib.suppress(BusrepError, TimeoutError):
            await within(timeout, self.saver.save())
            if self.notes:
                await within(timeout, self.saver.store_notes())

    def statistics(self) -> dict[str, Any]:
        """Counters and states, JSON-able."""
        return {
            **self.core.statistics(),
            "positions_refused": self.saver.refused,
            **self.handlers.statistics(),
            "stopped": {f"{stream} {writer}": str(error) for (stream, writer), error in self.stopped.items()},
            "unsavable": {f"{stream} {writer}": str(error) for (stream, writer), error in self.saver.unsavable.items()},
            "failure": None if self.failure is None else str(self.failure),
            "not_begun": dict(self.beginning.not_begun),
            "waiting": self.waiters.count,
        }
