"""Why a durable reader stopped, stored beside its saved positions: `busrep lag` and `busrep db status` show it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from busrep.core.catchup import Key
from busrep.errors import BusrepError
from busrep.settings import Settings
from busrep.stores.interface import ReaderPositions

log = logging.getLogger("busrep.reader")


class StopNotes:
    """What is still to be stored. ``due``: {key: the reason, or None that it goes on}."""

    def __init__(self, store: ReaderPositions | None, reader: str | None, settings: Settings) -> None:
        self._store, self._reader, self._settings = store, reader, settings
        self.due: dict[Key, str | None] = {}

    def put(self, keys: Iterable[Key], reason: str | None) -> None:
        """Note it, to be stored; nothing for a reader that saves nothing."""
        if self._reader is not None and self._store is not None:
            self.due.update(dict.fromkeys(keys, reason))

    async def store(self) -> None:
        """Store what is due; while the database is away, try again."""
        while self.due and self._store is not None and self._reader is not None:
            key, reason = next(iter(self.due.items()))
            try:
                await self._store.note_stopped(self._reader, *key, reason)
            except BusrepError as error:
                log.debug("why %s stopped cannot be stored yet: %s", key, error)
                await asyncio.sleep(self._settings.retry_max)
            else:
                if self.due.get(key) == reason:
                    del self.due[key]
