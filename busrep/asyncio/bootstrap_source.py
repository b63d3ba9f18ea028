"""Where snapshots come from: the source that was given, or the store; and the log's rows, page by page, where neither
gives one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from busrep.core.snapshots import Agreement, PartRows, SnapshotSource
from busrep.errors import NoSnapshots, Unavailable
from busrep.stores.interface import provides

from ..runtime.tasks import stop
from ..snapshots.parts import read_part
from ..snapshots.sources import check_log, checked_part
from .context import ReaderContext

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
            core.new_epoch = current
            context.pump()
        raise Unavailable(source, f"its snapshot is of epoch {found.epoch}, the log is of epoch {current}")
    for one in await store.known():
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
    known = [one for one in await context.store.known() if one.stream == name]
    async with context.saving:
        positions = await _read_to(context, name)
        begins = {one.writer: positions.get(one.writer, 0) for one in known}
        if any(one.floor > begins[one.writer] for one in known):
            return False
        if context.reader:
            new = {(name, ""): 0} | {(name, writer): at for writer, at in begins.items()}
            await context.reader_store.register_reader(context.reader, new, context.core.epoch or "")
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
