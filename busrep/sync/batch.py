"""What handlers and functions of a snapshot are called with in threads, and the transactions that they get."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs

from busrep.asyncio.saving import ENDED
from busrep.errors import CommitUnknown, ConfigError
from busrep.options import BusOptions
from busrep.runtime.batch import BatchRows
from busrep.snapshots.parts import SnapshotRows
from busrep.stores.blocking import BlockingStore, BlockingTransaction, open_blocking_store
from busrep.stores.interface import SavedAt

RowT = TypeVar("RowT")


@attrs.define(eq=False)
class BlockingBatch(BatchRows[RowT]):
    """What a handler is called with in threads: rows of one (stream, writer), whole facts, tokens ascending."""

    _save: Callable[[Any], None] = attrs.field(repr=False)
    _begin: Callable[[], AbstractContextManager[Any]] = attrs.field(repr=False)

    def save(self, connection: Any) -> None:
        """As `busrep.Batch.save`, in threads. ``connection``: a psycopg.Connection, or a sqlite3.Connection of this
        thread."""
        self._save(connection)

    def transaction(self) -> AbstractContextManager[Any]:
        """As `busrep.Batch.transaction`, in threads: ``with batch.transaction() as db``.

        The connection is a psycopg.Connection or an sqlite3.Connection. Raises ConfigError for a store that is not
        given by the URL of a PostgreSQL or SQLite database as well.
        """
        return self._begin()


@attrs.define(eq=False)
class BlockingSnapshotPart(SnapshotRows[RowT]):
    """What a function of `bus.snapshot` is called with in threads: rows of a snapshot, of all writers."""

    _save: Callable[[Any], None] = attrs.field(repr=False)

    def save(self, connection: Any) -> None:
        """As `busrep.SnapshotPart.save`, in threads. ``connection``: a psycopg.Connection, or a sqlite3.Connection of
        this thread."""
        self._save(connection)


Handler = Callable[[BlockingBatch[RowT]], None]
ApplyHandler = Callable[[BlockingSnapshotPart[RowT]], None]


def fields_of(made: BatchRows[Any] | SnapshotRows[Any], kind: type[Any]) -> dict[str, Any]:
    """The fields that ``kind`` declares, of one of its subclasses: what both runtimes hand out."""
    return {field.name: getattr(made, field.name) for field in attrs.fields(kind)}


class EffectsStore:
    """The reader's store, as the thread uses it in which handlers are called: it opens when a handler first asks."""

    def __init__(self, options: BusOptions) -> None:
        self._options = options
        self._store: BlockingStore | None = None
        self._opening = threading.Lock()

    def transaction(self, at: SavedAt) -> BlockingTransaction:
        """A transaction, not begun yet. Raises ConfigError for a store that can give none, Unavailable."""
        url = self._options.positions_store
        with self._opening:  # loops of several threads may ask first
            if self._store is None:
                if not isinstance(url, str) or url.startswith(("http://", "https://")):
                    raise ConfigError(
                        "batch.transaction() needs the URL of a PostgreSQL or SQLite database as store=, or as "
                        f"reader_store=, not {type(url).__name__}"
                    )
                store = open_blocking_store(url, self._options.streams, settings=self._options.settings)
                store.open()
                self._store = store
            return self._store.effects(at)

    def close(self) -> None:
        """Close the connections. No handler is at work."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


@contextlib.contextmanager
def exactly_once(effects: BlockingTransaction, save: Callable[[Any], None]) -> Iterator[Any]:
    """Run the body in this transaction, and save with it. See `busrep.asyncio.saving.BatchSaver.transaction`."""
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
