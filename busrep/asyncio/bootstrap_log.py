"""How a snapshot and the log fit together; and the log's rows, page by page, where no source gives a snapshot."""

from __future__ import annotations

import logging

from busrep.core.snapshots import Agreement
from busrep.errors import NoSnapshots, Unavailable

from ..snapshots.sources import check_log
from .context import ReaderContext

log = logging.getLogger("busrep.reader")


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
