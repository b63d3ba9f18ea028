"""What handlers and functions of a snapshot are called with in threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import attrs

from busrep.runtime.batch import BatchRows
from busrep.snapshots.parts import SnapshotRows

RowT = TypeVar("RowT")


@attrs.define(eq=False)
class BlockingBatch(BatchRows[RowT]):
    """What a handler is called with in threads: rows of one (stream, writer), whole facts, tokens ascending."""

    _save: Callable[[Any], None] = attrs.field(repr=False)
    _begin: Callable[[], AbstractContextManager[Any]] = attrs.field(repr=False)

    def save(self, connection: Any) -> None:
        """Save this reader's position in the caller's open transaction: the effects count exactly once.

        ``connection``: the caller's (a psycopg.Connection, or a sqlite3.Connection of this thread), of the reader
        store's database. Commit before the handler returns. Raises ReaderMoved when these rows were handled before, or
        elsewhere: let it out, and roll back; ConfigError when the bus has no ``reader`` name, or the stream has another
        handler that was subscribed later.
        """
        self._save(connection)

    def transaction(self) -> AbstractContextManager[Any]:
        """``with batch.transaction() as db``: a connection in a transaction, at whose end the position is saved.

        So the effects of the block count exactly once. The connection is of the bus's own, to the database of the
        reader's store: a psycopg.Connection or an sqlite3.Connection. When the block ends the position is saved, and
        the transaction committed; when it raises, rolled back. One block a batch. Where the server went away, or COMMIT
        got no answer, let the error out: the handler is called again unless the position shows that it was committed.

        Raises ConfigError when the bus has no ``reader`` name, or the stream has another handler that was subscribed
        later, and for a store that is not given by the URL of a PostgreSQL or SQLite database; ReaderMoved when these
        rows were handled before, or elsewhere; Unavailable, CommitUnknown.
        """
        return self._begin()


@attrs.define(eq=False)
class BlockingSnapshotPart(SnapshotRows[RowT]):
    """What a function of `bus.snapshot` is called with in threads: rows of a snapshot, of all writers."""

    _save: Callable[[Any], None] = attrs.field(repr=False)

    def save(self, connection: Any) -> None:
        """Save that this part is applied in the caller's open transaction: it is applied exactly once.

        ``connection``: the caller's (a psycopg.Connection, or a sqlite3.Connection of this thread), of the reader
        store's database. Commit before the function returns. Raises ReaderMoved when this part was applied before, or
        elsewhere: let it out, and roll back; ConfigError when the bus has no ``reader`` name.
        """
        self._save(connection)


Handler = Callable[[BlockingBatch[RowT]], None]
ApplyHandler = Callable[[BlockingSnapshotPart[RowT]], None]


def fields_of(made: BatchRows[Any] | SnapshotRows[Any], kind: type[Any]) -> dict[str, Any]:
    """The fields that ``kind`` declares, of one of its subclasses: what both runtimes hand out."""
    return {field.name: getattr(made, field.name) for field in attrs.fields(kind)}
