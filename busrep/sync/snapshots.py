"""Parts of a snapshot, as functions of a bus for threads get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import attrs

from busrep import asyncio as runtime
from busrep.core.snapshots import Agreement, BootstrapProgress
from busrep.streams import Stream

RowT = TypeVar("RowT")


@attrs.frozen(eq=False)
class SnapshotPart(Generic[RowT]):
    """Rows of a snapshot to apply together, of all writers: whole facts, tokens ascending.

    ``tokens``, ``writers`` and ``rows`` are parallel. ``number`` counts from 0; ``first``: what the target holds of an
    earlier time is to go now; ``last``: what comes next are the rows behind ``agreement.positions``, to the handlers
    of ``bus.subscribe``. ``progress``: what is loaded once this part is applied.
    """

    stream: Stream[RowT]
    number: int
    first: bool
    last: bool
    agreement: Agreement
    tokens: Sequence[int]
    writers: Sequence[str]
    rows: Sequence[RowT]
    progress: BootstrapProgress
    _part: runtime.SnapshotPart[RowT] = attrs.field(repr=False)
    _save: Callable[[Any, Any], None] = attrs.field(repr=False)

    @classmethod
    def of(cls, part: runtime.SnapshotPart[RowT], save: Callable[[Any, Any], None]) -> SnapshotPart[RowT]:
        """The same part; ``save(part, connection)`` saves it from another thread."""
        return cls(
            part.stream, part.number, part.first, part.last, part.agreement,
            part.tokens, part.writers, part.rows, part.progress, part, save,
        )  # fmt: skip

    def save(self, connection: Any) -> None:
        """Save that this part is applied in the caller's open transaction: it is applied exactly once.

        ``connection``: the caller's (a psycopg.Connection, or a sqlite3.Connection of this thread), of the reader
        store's database. Commit before the function returns. Raises ReaderMoved when this part was applied before, or
        elsewhere: let it out, and roll back; ConfigError when the bus has no ``reader`` name.
        """
        self._save(self._part, connection)


ApplyHandler = Callable[[SnapshotPart[RowT]], None]
