"""What a handler is called with, in both runtimes."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import attrs

from busrep.core.delivery import RawBatch
from busrep.streams import Stream

RowT = TypeVar("RowT")


@attrs.define(eq=False)
class BatchHandling:
    """How far the handling of a batch is.

    ``tried``: its handler has begun to save the position; ``saved``: that was answered. ``last``: no other handler is
    called with the batch after this one. ``expected``: the saved position that the handler's is to replace.
    """

    raw: RawBatch
    tried: bool = False
    saved: bool = False
    last: bool = True
    expected: int | None = None


@attrs.define(eq=False)
class BatchRows(Generic[RowT]):
    """Rows of one (stream, writer) to handle together: whole facts, tokens ascending.

    ``tokens`` and ``rows`` are parallel; rows of one fact repeat its token. When the handler returns, everything
    of ``writer`` up to ``position`` counts as handled; ``after`` is where the batch before ended. ``epoch``: of the log
    that they are of; ``reader``: the name under which positions are saved; ``handling``: for the runtime.
    """

    stream: Stream[RowT]
    writer: str
    after: int
    position: int
    tokens: Sequence[int]
    rows: Sequence[RowT]
    handling: BatchHandling = attrs.field(repr=False)
    epoch: str | None = attrs.field(repr=False)
    reader: str | None = attrs.field(repr=False)

    @property
    def payloads(self) -> Sequence[bytes]:
        """The rows as JSON, as they came."""
        return self.handling.raw.payloads

    def facts(self) -> Iterator[tuple[int, list[RowT]]]:
        """The same, fact by fact: (token, rows)."""
        pairs = zip(self.tokens, self.rows, strict=True)
        for token, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            yield token, [row for _, row in group]


@attrs.define(eq=False)
class Batch(BatchRows[RowT]):
    """What a handler is called with on an event loop: rows of one (stream, writer), whole facts, tokens ascending."""

    _save: Callable[[Batch[RowT], Any], Awaitable[None]] = attrs.field(repr=False)
    _begin: Callable[[Batch[RowT]], AbstractAsyncContextManager[Any]] = attrs.field(repr=False)

    async def save(self, connection: Any) -> None:
        """Save this reader's position in the caller's open transaction: the effects count exactly once.

        ``connection``: the caller's, of the reader store's database. Call this first in the transaction if the handler
        reads what earlier facts left there. Commit before the handler returns. Raises
        ReaderMoved when these rows were handled before, or elsewhere: let it out, and roll back; ConfigError
        when the bus has no ``reader`` name, or the stream has another handler that was subscribed later.
        """
        await self._save(self, connection)
        self.handling.saved = True

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """``async with batch.transaction() as db``: a connection in a transaction, at whose end the position is saved.

        So the effects of the block count exactly once. The connection is of the bus's own pool, to the database of the
        reader's store: a psycopg.AsyncConnection, or an sqlite3.Connection, which blocks the event loop while it works.
        When the block ends the position is saved, and the transaction committed; when it raises, rolled back. One block
        a batch. Where the server went away, or COMMIT got no answer, let the error out: the handler is called again
        unless the position shows that it was committed.

        Raises ConfigError when the bus has no ``reader`` name, or the stream has another handler that was subscribed
        later, and for a store without connections (memory, HTTP); ReaderMoved when these rows were handled before, or
        elsewhere; Unavailable, CommitUnknown.
        """
        return self._begin(self)


Handler = Callable[[Batch[RowT]], Awaitable[None] | None]
NoticeHandler = Callable[[str, str, int], Awaitable[None] | None]
