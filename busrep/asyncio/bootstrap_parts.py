"""The parts of a snapshot: where they come from, and how they are applied.

They come from the source that was given, or from the store; where neither gives a snapshot, the log's rows are fetched
page by page. A part is applied exactly once where the application saves it with its effects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from busrep.core.bootstrap_work import Apply
from busrep.core.failures import Verdict
from busrep.core.snapshots import Agreement, AppliedParts, BootstrapProgress, PartRows, SnapshotSource
from busrep.core.states import BootstrapState, unfinished
from busrep.errors import BusrepError, ConfigError, HandlerFailed, NoSnapshots, ReaderMoved, RowError, Unavailable
from busrep.stores.interface import provides

from ..runtime.tasks import call, forget_cancellation, heed_cancellation, stop
from ..snapshots.parts import Applier, DecodedPart, SnapshotPart, decode_rows, read_part
from ..snapshots.sources import check_log, checked_part
from .context import ReaderContext

if TYPE_CHECKING:
    from .bootstrap_run import Run

log = logging.getLogger("busrep.reader")

# A source may have to count all rows before it can say where the parts end, and shows no progress meanwhile.
AGREE_TIMEOUTS = 20


class SourceOnDemand:
    """The snapshot source of one reading process, connected when it is asked for the first time.

    ``given``: `BusOptions.snapshot_source`.
    """

    def __init__(self, context: ReaderContext) -> None:
        self._context = context
        self.given, self.store = context.options.snapshot_source, context.store
        self._opened_by_bus = (context.store, context.reader_store)
        self._longest = context.settings.fetch_timeout
        self._opening: asyncio.Task[None] | None = None
        self._held: list[Agreement] = []  # what the source holds something for

    def check(self) -> SnapshotSource:
        """Return the source. Raises NoSnapshots where there is none."""
        source: Any = self.given if self.given is not None else self.store
        if not provides(source, SnapshotSource):
            raise NoSnapshots(repr(source))
        return source

    async def open(self) -> SnapshotSource:
        """Connect it, once, and return it. Raises NoSnapshots, Unavailable."""
        if self.given is not None and self.given not in self._opened_by_bus:
            opening = self._opening
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
                opening = self._opening = asyncio.create_task(self.given.open(), name="busrep-snapshot-source")
            try:
                async with asyncio.timeout(self._longest):
                    await asyncio.shield(opening)  # that goes on, for who asks next
            except TimeoutError:
                reason = f"it could not be opened within {self._longest:g} s"
                raise Unavailable("the snapshot source", reason) from None
        return self.check()

    async def agree(self, stream: str, *, again: Agreement | None) -> Agreement:
        """Agree on a snapshot that fits the log; the source holds it until `leave`. Raises NoSnapshots, Unavailable."""
        source, longest = await self.open(), AGREE_TIMEOUTS * self._longest
        try:
            async with asyncio.timeout(longest):
                found = await source.agree(stream, part_rows=self._context.settings.snapshot_part_rows, again=again)
        except TimeoutError:
            raise Unavailable("the snapshot source", f"it agreed on nothing within {longest:g} s") from None
        self._held.append(found)
        try:
            await check_fits_log(self._context, stream, found)
        except BaseException:
            await self.leave(found)
            raise
        return found

    async def load(self, agreement: Agreement, number: int) -> PartRows:
        """Return a part of a snapshot. Raises SnapshotGone, Unavailable."""
        return await checked_part(agreement, number, await read_part(self.check(), agreement, number, self._longest))

    async def leave(self, agreement: Agreement) -> None:
        """Let go of what the source holds for a snapshot."""
        self._held = [held for held in self._held if held is not agreement]
        try:
            async with asyncio.timeout(self._longest):
                await self.check().leave(agreement)
        except Exception as error:  # never, says the interface; what it held it loses at its end
            log.warning("leaving a snapshot of %s: %r", agreement.stream, error)

    async def leave_all(self) -> None:
        """Let go of all that the source holds."""
        for agreement in list(self._held):
            await self.leave(agreement)

    async def close(self, timeout: float) -> None:
        """Disconnect it, if it was opened here."""
        if self._opening is not None:
            await stop([self._opening], timeout)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.given.close()


async def check_fits_log(context: ReaderContext, stream: str, found: Agreement) -> None:
    """Raise Unavailable unless rows can go on behind this snapshot: it is of the log that is read, and none of them was
    pruned."""
    core, store = context.core, context.store
    source = f"the snapshot source {found.source}"
    if found.stream != stream:
        raise Unavailable(source, f"it gave a snapshot of stream {found.stream!r}")
    if found.epoch != core.epoch:
        current = await store.epoch()
        if current != core.epoch:
            context.another_log(current)
        raise Unavailable(source, f"its snapshot is of epoch {found.epoch}, the log is of epoch {current}")
    for one in await store.known(found.epoch):
        at = found.positions.get(one.writer, 0)
        if one.stream == stream and one.floor > at:
            raise Unavailable(
                source,
                f"its snapshot ends at {at} of {one.writer}, and rows up to {one.floor} have been pruned since: "
                "make a newer snapshot, or prune later",
            )
    await check_log(found, store, patience=context.settings.fetch_timeout)


async def fetch_instead(context: ReaderContext, name: str, error: NoSnapshots) -> bool:
    """Go on with a stream that waits for a snapshot from where it was read to. False: rows from there are pruned.

    Raises Unavailable.
    """
    known = [one for one in await context.store.known(context.core.epoch) if one.stream == name]
    async with context.saving:
        positions = await _read_to(context, name)
        begins = {one.writer: positions.get(one.writer, 0) for one in known}
        if any(one.floor > begins[one.writer] for one in known):
            return False
        if context.reader:
            new = {(name, ""): 0} | {(name, writer): at for writer, at in begins.items()}
            await context.register(new, context.core.epoch or "")
            positions |= begins
            context.saved.loaded(await context.reader_store.load_reader(context.reader), name)
            context.saved.replace_stream(name, positions)
        log.warning("bootstrap of %s: %s; its rows are fetched page by page, from %s on", name, error, begins or 0)
        context.bootstrapped(name, positions)
    return True


async def _read_to(context: ReaderContext, name: str) -> dict[str, int]:
    core = context.core
    if not context.reader:
        return {writer: one.queue.delivered for (stream, writer), one in core.progress.items() if stream == name}
    state = await context.reader_store.load_reader(context.reader)
    if state.epoch not in (None, core.epoch) or name in state.loading:
        core.doubt(state.epoch)
        raise Unavailable("the store", "another process of this reader is in another log, or loads a snapshot")
    return {writer: at for (stream, writer), at in state.positions.items() if stream == name and writer}


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
