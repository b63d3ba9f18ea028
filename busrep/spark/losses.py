"""What a query cannot have any more: rows that were pruned, a log that was replaced or has gone back, a writer that
is gone.

With ``failOnDataLoss`` each is an error that says what to do. Without, it is logged, counted where there is something
to count, and the query goes on behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from busrep.errors import BusrepError, ConfigError, EpochChanged, PositionsAheadOfTable, PositionTooOld
from busrep.spark.planning import Span

log = logging.getLogger("busrep.spark")

GO_ON = "or pass failOnDataLoss=false to go on"


class RangePruned(PositionTooOld):
    """`PositionTooOld`, with what to do about it in Spark."""

    def __init__(self, stream: str, writer: str, position: int, floor: int) -> None:
        super().__init__(stream, writer, position, floor)
        self.args = (
            f"stream {stream!r}, writer {writer!r}: the query is at {position}, below the retention floor {floor}; the "
            "rows between were pruned before it had read them. Take them from an archive or a backup and begin with "
            "startingPositions=earliest and a new checkpoint, "
            f"{GO_ON} behind them, and keep rows for longer than the query may be away",
        )


class LogReplaced(EpochChanged):
    """`EpochChanged`, with what to do about it in Spark."""

    def __init__(self, held: str, found: str) -> None:
        super().__init__(held, found)
        self.args = (
            f"the query is at positions of epoch {held}, the fact log is of epoch {found}: the database was restored "
            "or replaced, and the same positions mean other rows now. Begin again with a new checkpoint (and a new "
            f"target, if it holds rows that the restore has undone), {GO_ON} with the new log from its beginning",
        )


class OlderTable(PositionsAheadOfTable):
    """`PositionsAheadOfTable`, of a query's positions: the table has gone back, and is of the same epoch still."""

    def __init__(self, stream: str, writer: str, position: int, proven: int) -> None:
        super().__init__(stream, position, proven)
        self.writer = writer
        self.args = (
            f"stream {stream!r}, writer {writer!r}: the query is at {position}, and the table is proven up to {proven} "
            "alone: it was restored to an older state, or a server has taken over that lacked the last transactions, "
            "and tokens will come again with other rows. Run 'busrep db restored' there; if it has all its rows, start "
            "its writer, which proves them, "
            f"{GO_ON} as if those rows were the same",
        )


class WriterGone(ConfigError):
    """A writer that the query reads is not in the table (any more)."""

    def __init__(self, stream: str, writer: str, known: Sequence[str]) -> None:
        self.stream, self.writer, self.known = stream, writer, tuple(known)
        super().__init__(
            f"stream {stream!r} has no writer {writer!r} in this store (it has: {', '.join(sorted(known)) or 'none'}). "
            f"Is it misspelt, or is this another database? Pass its right name or store, {GO_ON} without it until it "
            "comes"
        )


class Losses:
    """What happens to a loss: raised with ``fail``, else logged, each once."""

    def __init__(self, stream: str, *, fail: bool) -> None:
        self._stream, self._fail = stream, fail
        self._told: set[str] = set()

    def pruned(self, lost: Sequence[Span], floors: dict[str, int]) -> int:
        """Ranges that are pruned. Returns how many IDs they had at most. Raises RangePruned."""
        for writer, after, upto in lost:
            self._lost(RangePruned(self._stream, writer, after, max(upto, floors.get(writer, 0))))
        return sum(upto - after for _, after, upto in lost)

    def replaced(self, held: str, found: str) -> None:
        """Another log. Raises LogReplaced."""
        self._lost(LogReplaced(held, found))

    def older(self, writer: str, position: int, proven: int) -> None:
        """A table that is behind the query. Raises OlderTable."""
        self._lost(OlderTable(self._stream, writer, position, proven))

    def gone(self, writer: str, known: Sequence[str]) -> None:
        """A missing writer. Raises WriterGone."""
        self._lost(WriterGone(self._stream, writer, known))

    def _lost(self, error: BusrepError) -> None:
        if self._fail:
            raise error
        text = str(error).partition(". ")[0]
        if text not in self._told:
            self._told.add(text)
            log.warning("going on without rows: %s", text)
