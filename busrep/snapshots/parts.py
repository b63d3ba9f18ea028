"""Parts of a snapshot: read from a source, checked, made rows of, and handed to the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import attrs

from busrep.core.snapshots import Agreement, BootstrapProgress, PartRows, SnapshotSource
from busrep.errors import Unavailable
from busrep.streams import Stream

RowT = TypeVar("RowT")

RowKey = Callable[[Any], Hashable]

# Rows decoded between two looks at the event loop: some 2 ms, in which the link is not read.
DECODED_AT_ONCE = 1_000


@attrs.define(eq=False)
class SnapshotRows(Generic[RowT]):
    """Rows of a snapshot to apply together, of all writers: whole facts, tokens ascending.

    ``tokens``, ``writers`` and ``rows`` are parallel. ``number`` counts from 0; ``first``: what the target holds of an
    earlier time is to go now; ``last``: what comes next are the rows behind ``agreement.positions``, to the handlers
    of ``bus.subscribe``. ``progress``: what is loaded once this part is applied. For the runtime:
    ``tried``, the function has begun to save; ``saved``, that was answered.
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


@attrs.define(eq=False)
class SnapshotPart(SnapshotRows[RowT]):
    """What a function of `bus.snapshot` is called with on an event loop: rows of a snapshot, of all writers."""

    _save: Callable[[SnapshotPart[RowT], Any], Awaitable[None]] = attrs.field(repr=False)
    tried: bool = attrs.field(default=False, init=False, repr=False)
    saved: bool = attrs.field(default=False, init=False, repr=False)

    async def save(self, connection: Any) -> None:
        """Save that this part is applied in the caller's open transaction: it is applied exactly once.

        ``connection``: the caller's, of the reader store's database. Commit before the function returns. Raises
        ReaderMoved when this part was applied before, or elsewhere: let it out, and roll back; ConfigError when the bus
        has no ``reader`` name.
        """
        await self._save(self, connection)
        self.saved = True

    def keep_latest(self, key: RowKey) -> None:
        """Of the rows of one key leave only the last; the application need not call it, see ``key`` of bus.snapshot."""
        kept = sorted({key(row): at for at, row in enumerate(self.rows)}.values())
        self.tokens, self.writers = [self.tokens[at] for at in kept], [self.writers[at] for at in kept]
        self.rows = [self.rows[at] for at in kept]


ApplyHandler = Callable[[SnapshotPart[RowT]], Awaitable[None] | None]


@attrs.frozen
class Applier:
    """What the application does with the snapshot of one stream. ``key``: of a row; only the latest of each counts."""

    stream: Stream[Any]
    handler: ApplyHandler[Any]
    key: RowKey | None = None


@attrs.frozen
class DecodedPart:
    """The rows of one part, decoded; parallel sequences."""

    tokens: Sequence[int]
    writers: Sequence[str]
    rows: Sequence[Any]


async def read_part(source: SnapshotSource, agreement: Agreement, number: int, timeout: float) -> bytes:
    """The text of a part; Unavailable when for ``timeout`` seconds nothing of it came."""
    pieces: list[bytes] = []
    generator = source.load(agreement, number)
    try:
        while True:
            async with asyncio.timeout(timeout):
                piece = await anext(generator, None)
            if piece is None:
                return b"".join(pieces)
            pieces.append(piece)
    except TimeoutError:
        reason = f"nothing came of part {number} for {timeout:g} s"
        raise Unavailable(f"the snapshot source {agreement.source}", reason) from None
    finally:
        with contextlib.suppress(TimeoutError):  # one that hangs is left to the garbage collector
            async with asyncio.timeout(timeout):
                await generator.aclose()


async def decode_rows(stream: Stream[Any], part: PartRows) -> DecodedPart:
    """The typed rows of a part. Raises RowError."""
    rows: list[Any] = []
    for at in range(0, len(part.payloads), DECODED_AT_ONCE):
        rows += stream.decode(part.payloads[at : at + DECODED_AT_ONCE])
        await asyncio.sleep(0)
    return DecodedPart(part.tokens, part.writers, rows)
