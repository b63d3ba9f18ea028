"""``batch.transaction()`` for threads: connections for handlers, which open when a handler first asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from busrep.asyncio.saving import ENDED
from busrep.errors import CommitUnknown, ConfigError
from busrep.settings import Settings
from busrep.stores.blocking import BlockingStore, BlockingTransaction, open_blocking_store
from busrep.streams import Registry


class EffectsStore:
    """The reader's store, as the thread uses it in which handlers are called. ``store``: as given to connect()."""

    def __init__(self, store: Any, streams: Registry, settings: Settings) -> None:
        self._given, self._streams, self._settings = store, streams, settings
        self._store: BlockingStore | None = None
        self._opening = threading.Lock()

    def begin(self) -> BlockingTransaction:
        """A transaction, not begun yet. Raises ConfigError for a store that can give none, Unavailable."""
        with self._opening:  # loops of several threads may ask first
            if self._store is None:
                if not isinstance(self._given, str) or self._given.startswith(("http://", "https://")):
                    raise ConfigError(
                        "batch.transaction() needs the URL of a PostgreSQL or SQLite database as store=, or as "
                        f"reader_store=, not {type(self._given).__name__}"
                    )
                store = open_blocking_store(self._given, self._streams, settings=self._settings)
                store.open()
                self._store = store
            return self._store.effects()

    def close(self) -> None:
        """Close the connections. No handler is at work."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


@contextlib.contextmanager
def exactly_once(effects: BlockingTransaction, save: Callable[[Any], None]) -> Iterator[Any]:
    """As `busrep.asyncio.saving.BatchSaver.transaction`."""
    effects.begin()
    try:
        yield effects.connection
        if effects.ended:
            raise ConfigError(ENDED)
        save(effects.connection)
        effects.commit()
    except CommitUnknown:
        raise
    except BaseException:
        effects.rollback()
        raise
