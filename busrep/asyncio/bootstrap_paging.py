"""What takes the place of a snapshot that nobody gives: all rows, page by page, as long as none of them was pruned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from busrep.errors import NoSnapshots, Unavailable

if TYPE_CHECKING:
    from .bootstrapping import Bootstrapping

log = logging.getLogger("busrep.reader")


async def fetch_instead(owner: Bootstrapping, name: str, error: NoSnapshots) -> bool:
    """Go on with a stream that waits for a snapshot from where it was read to. False: rows from there are pruned.

    Raises Unavailable.
    """
    reading, store = owner.reading, owner.store
    assert store is not None  # noqa: S101 (a stream with a table has one)
    known = [one for one in await store.known() if one.stream == name]
    async with owner.saving:
        positions = await _read_to(owner, name)
        begins = {one.writer: positions.get(one.writer, 0) for one in known}
        if any(one.floor > begins[one.writer] for one in known):
            return False
        if owner.reader is not None and owner.reader_store is not None:
            new = {(name, ""): 0} | {(name, writer): at for writer, at in begins.items()}
            await owner.reader_store.register_reader(owner.reader, new, reading.core.epoch or "")
            positions |= begins
            owner.loaded(await owner.reader_store.load_reader(owner.reader), name)
            reading.saved_anew(name, positions)
        log.warning("bootstrap of %s: %s; its rows are fetched page by page, from %s on", name, error, begins or 0)
        reading.bootstrapped(name, positions)
    return True


async def _read_to(owner: Bootstrapping, name: str) -> dict[str, int]:
    core = owner.reading.core
    if owner.reader is None or owner.reader_store is None:
        return {writer: one.queue.delivered for (stream, writer), one in core.progress.items() if stream == name}
    state = await owner.reader_store.load_reader(owner.reader)
    if state.epoch not in (None, core.epoch) or name in state.loading:
        core.doubt(state.epoch)
        raise Unavailable("the store", "another process of this reader is in another log, or loads a snapshot")
    return {writer: at for (stream, writer), at in state.positions.items() if stream == name and writer}
