"""The memory store for threads."""

from __future__ import annotations

import time

from busrep.stores.memory.store import LOOK, MemoryStore


class BlockingMemoryStore(MemoryStore):
    """The memory store without an event loop. It shares its contents with all others of its name."""

    async def _pause(self) -> None:
        time.sleep(LOOK)  # noqa: ASYNC251 - no loop is meant to run it


STORE = BlockingMemoryStore
