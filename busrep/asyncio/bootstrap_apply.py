"""Parts of a snapshot, handed to the application and saved: exactly once, where it saves them with their effects."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from busrep.core.bootstrap_states import BootstrapState, unfinished
from busrep.core.bootstrap_work import Apply
from busrep.core.failures import Verdict
from busrep.core.snapshots import AppliedParts, BootstrapProgress
from busrep.errors import BusrepError, ConfigError, HandlerFailed, ReaderMoved, RowError

from ..runtime.tasks import call, forget_cancellation, heed_cancellation
from ..snapshots.parts import Applier, DecodedPart, SnapshotPart, decode_rows
from .context import ReaderContext

if TYPE_CHECKING:
    from .bootstrap_run import Run

log = logging.getLogger("busrep.reader")


class Applying:
    """Applies the parts of one `Run`."""

    def __init__(self, context: ReaderContext, run: Run, applier: Applier) -> None:
        self.context, self.run, self.machine = context, run, run.machine
        self.applier, self.name = applier, run.name
        self.busy = False  # the application's function is at work, or what it did is being saved

    async def apply(self, work: Apply) -> None:
        """Apply a part, and tell the machine what became of it."""
        await self._quiet()
        machine, applied, cancelled = self.machine, False, False
        self.busy = True
        try:
            decided = await self._decided(work) if self.run.restored and self.context.reader else None
            if decided is None:
                applied = await self._hand_out(work, await decode_rows(self.applier.stream, work.part))
            else:  # on a target that is further already nothing of it may be applied again
                applied = decided
        except RowError as error:
            self._poison(work, error)
        except asyncio.CancelledError:
            cancelled = True  # and if not by close(), another task goes on with the same part
            raise
        finally:
            self.busy = False
            if not cancelled:
                self.context.retrying.over((self.name, ""))
        if applied:
            machine.applied(work, len(work.part.tokens), self.run.now())
        elif machine.stopped_by is None:  # not by this process, or not any more: what is saved has been looked up
            moved = ReaderMoved(self.context.reader, self.name, "", work.number)
            machine.failed(work, moved, self.run.now())

    async def _hand_out(self, work: Apply, rows: DecodedPart) -> bool:
        """Call the application's function with a part, and save that. False: this was not the one to do it."""
        retrying, key = self.context.retrying, (self.name, "")
        while True:
            part = self._part(work, rows)
            try:
                if self.applier.key is not None:
                    part.keep_latest(self.applier.key)
                await call(self.applier.handler, part)
                forget_cancellation()
                return part.saved or await self._saved(work, part)
            except (Exception, asyncio.CancelledError) as error:
                if self.context.ended:
                    heed_cancellation(error)  # close() lost its patience
                cancelled = forget_cancellation()  # by a deadline of the function's own, or who cancels all tasks
                self.context.handler_failures += 1
                verdict = retrying.failed(key, work.number, error, facts=1, cancelled=cancelled)
                decided = await self._decided(work) if part.tried or isinstance(error, ReaderMoved) else None
                if decided is not None or self.context.ended:
                    return bool(decided)
                if verdict is Verdict.POISON:
                    self._poison(work, error)
                    return False
                await retrying.pause(key)
                if self._void(work) or self.context.ended:
                    return False
                if cancelled:  # another task goes on: asyncio.run(), which cancels all, waits until this one has ended
                    raise asyncio.CancelledError from error

    async def _quiet(self) -> None:
        """Wait for the handlers that are at work, and the notices of a reset: the fresh target is no place for them."""
        while self.context.is_at_work(self.name):
            self.run.turn.clear()
            await self.run.turn.wait()

    def _part(self, work: Apply, rows: DecodedPart) -> SnapshotPart[Any]:
        progress = BootstrapProgress(
            self.context.reader,
            work.agreement,
            BootstrapState.DRAINING.value if work.last else BootstrapState.LOADING.value,
            work.parts_after,
            work.rows + len(rows.rows),
            work.bytes + work.part.size,
            self.machine.full_syncs.count(self.run.now()),
            self.machine.reason,
        )
        part: SnapshotPart[Any]

        async def save(_: SnapshotPart[Any], connection: Any) -> None:
            if not self.context.reader:
                raise ConfigError("saving a part needs a durable reader: pass reader= and store= to connect()")
            if self._void(work):
                raise ReaderMoved(self.context.reader, self.name, "", work.number)
            part.tried = True
            await self._save(work, part, connection)

        part = SnapshotPart(
            self.applier.stream, work.number, work.first, work.last, work.agreement,
            rows.tokens, rows.writers, rows.rows, progress, save,
        )  # fmt: skip
        return part

    async def _save(self, work: Apply, part: SnapshotPart[Any], connection: Any = None) -> None:
        progress = part.progress
        rows, size, state = progress.rows, progress.bytes, progress.state
        step = AppliedParts(parts=work.number, applied=work.parts_after, rows=rows, bytes=size, state=state)
        await self.context.reader_store.save_bootstrap(self.context.reader, self.name, work.id, step, connection)

    async def _saved(self, work: Apply, part: SnapshotPart[Any]) -> bool:
        """Save what the function did not; until it is known to be saved. False: another process goes on with it."""
        while self.context.reader:
            try:
                await self._save(work, part)
            except ReaderMoved as error:
                log.warning("%s", error)
                return bool(await self._decided(work))
            except BusrepError as error:
                log.warning("bootstrap of %s: what is applied cannot be saved yet: %s", self.name, error)
                await asyncio.sleep(self.context.settings.retry_max)
            else:
                break
        return True

    def _void(self, work: Apply) -> bool:
        """Whether it was begun anew meanwhile."""
        current, agreed = self.machine.agreement, work.agreement
        return current is None or self.machine.id != work.id or not (current is agreed or current.same(agreed))

    async def _decided(self, work: Apply) -> bool | None:
        """What is saved decides whether a part is applied, whatever became of the function's transaction.

        True when it is, None when it is to be applied again; False when something else is to be done by now.
        """
        while True:
            try:
                saved = await self.context.saved_bootstrap(self.name)
                break
            except BusrepError as error:
                log.warning("bootstrap of %s: what is saved cannot be read yet: %s", self.name, error)
                await asyncio.sleep(self.context.settings.retry_max)
        if self._void(work):
            return False
        if saved is None:
            self.machine.gone("what was saved of it is gone", self.run.now())
            return False
        if saved.id == work.id and saved.parts in (work.number, work.parts_after):
            if unfinished(saved) and (saved.parts == work.number or work.last):
                return None
            if saved.parts == work.parts_after and unfinished(saved) != work.last:
                return True
        self.run.restore(saved)
        return False

    def _poison(self, work: Apply, error: BaseException) -> None:
        if self._void(work):
            return
        upto = work.agreement.parts[work.number].upto if work.agreement.parts else 0
        failure = HandlerFailed(self.name, next(reversed(work.part.writers), ""), upto, error)
        log.error("%s: the bootstrap has stopped at part %d", failure, work.number, exc_info=error)
        self.machine.stopped(work, failure)
        self.run.stop(failure)
