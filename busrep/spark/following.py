"""The positions of a query: where it begins and ends, and how far the next batch goes.

Knows the table, the bus where there is one, and the clock; nothing of Spark. Positions are the table's proven ones, or
were announced by a writer on the bus, never read off the rows that happen to be there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.spark.losses import Losses
from busrep.spark.offsets import Offset
from busrep.spark.options import Options, Positions
from busrep.spark.planning import Span, admitted, ranges, upto
from busrep.spark.table import Unread
from busrep.stores.snapshots import LogState

# Seconds between two looks at the table while the bus tells the news: what a writer that is not heard has written is
# found within the time in which its positions come to the table.
HEARTBEAT = Settings().heartbeat
# Seconds that a question for news waits for some before it says that there are none. Spark asks again at once.
LISTEN, POLL = 0.5, 0.1


class Asked(Protocol):
    """The table, as `busrep.spark.table.Table` is."""

    def log(self) -> LogState:
        """The state now."""

    def frontier(self, spans: Sequence[Span], most: int | None) -> tuple[int | None, int | None]:
        """Tokens of the first row and of the first one too many."""

    def unread(self, begun: Sequence[Span], left: Sequence[Span]) -> Mapping[str, Unread]:
        """What a batch found and leaves, per writer."""

    def at_time(self, log: LogState, micros: int) -> dict[str, int]:
        """Positions at a time."""

    def close(self) -> None:
        """No more questions for now."""


class Heard(Protocol):
    """The bus, as `busrep.spark.listening.Listener` is."""

    def announced(self, epoch: str) -> tuple[Mapping[str, int], bool]:
        """Positions that writers of that log have announced, and whether to look at the table besides: that is told
        once."""

    def wait(self, seconds: float) -> None:
        """Until there are news."""

    def close(self) -> None:
        """Listen no more."""


def selected(log: LogState, options: Options, losses: Losses) -> dict[str, int]:
    """The proven positions of the writers that are read. Raises WriterGone."""
    if options.writers is None:
        return dict(log.positions)
    for writer in options.writers:
        if writer not in log.positions:
            losses.gone(writer, list(log.positions))
    return {writer: position for writer, position in log.positions.items() if writer in options.writers}


def resolved(
    wanted: Positions, option: str, log: LogState, available: Mapping[str, int], table: Asked
) -> dict[str, int]:
    """The positions that an option means, of the writers in ``available``, {writer: proven position}.

    ``earliest``: the floors, so all rows that are still there; ``latest``: what is proven now; a map: as it says, 0 for
    a writer that is not in it; a time: see `Table.at_time`. Raises ConfigError for a map that goes beyond what is
    proven, or names a writer that is not read.
    """
    if wanted.kind == "latest":
        return dict(available)
    if wanted.kind == "earliest":
        return {writer: min(log.floors.get(writer, 0), position) for writer, position in available.items()}
    if wanted.kind == "time":
        found = table.at_time(log, wanted.time)
        return {writer: min(found.get(writer, 0), position) for writer, position in available.items()}
    for writer, token in wanted.map.items():
        if writer not in available:
            known = ", ".join(sorted(available)) or "none"
            raise ConfigError(f"option {option!r} names writer {writer!r}, which is not read here (read are: {known})")
        if token > available[writer]:
            raise ConfigError(
                f"option {option!r}: {token} is beyond {available[writer]}, up to which writer {writer!r} has proven "
                "its facts: rows behind it may still change"
            )
    return {writer: wanted.map.get(writer, 0) for writer in available}


@attrs.define(eq=False)
class Follower:
    """How far a streaming query may go. ``bus``: None where only the table is asked."""

    options: Options
    table: Asked
    losses: Losses
    bus: Heard | None = None
    _log: LogState | None = attrs.field(default=None, init=False)
    _looked: float = attrs.field(default=0.0, init=False)
    _target: Offset | None = attrs.field(default=None, init=False)
    # What the last batch found unread, and what it leaves.
    _begun: Sequence[Span] = attrs.field(default=(), init=False)
    _left: Sequence[Span] = attrs.field(default=(), init=False)
    _available_now: bool = attrs.field(default=False, init=False)
    _stopped: threading.Event = attrs.field(factory=threading.Event, init=False)

    def initial(self) -> Offset:
        """Where a query without a checkpoint begins. Raises ConfigError, WriterGone, Unavailable."""
        log = self._look()
        available = selected(log, self.options, self.losses)
        starting = resolved(self.options.starting, "startingPositions", log, available, self.table)
        return Offset(log.epoch, starting, stream=self.options.stream)

    def prepare(self) -> None:
        """From now on there is no news: what is proven at this moment is read, and nothing behind it."""
        self._available_now = True
        self._target = self._proven(self._look())

    def latest(self, start: Offset, most: int | None) -> Offset:
        """The end of the batch that begins at ``start``; ``start`` itself when there are no rows to read.

        At most ``most`` rows lie between, the oldest IDs over all writers, or one fact that has more. Waits a little
        for news when there are none. Raises LogReplaced, OlderTable, RangePruned, WriterGone, Unavailable, and
        ConfigError for an offset of another stream.
        """
        self._check_stream(start)
        end = self._next(start, most)
        if end is None and not self._available_now:
            if self.bus is not None:
                self.bus.wait(LISTEN)
            else:
                self._stopped.wait(POLL)
            end = self._next(start, most)
        return start if end is None else end

    def report(self) -> Offset | None:
        """The furthest that is known, without asking anybody; None before the first question."""
        if self._log is None:
            return None
        return self._proven(self._log)

    def lag(self) -> Mapping[str, Unread]:
        """Of each writer what was unread when the last batch was planned; nothing where all was read, and while the
        table does not answer."""
        if not self._begun:
            return {}
        try:
            return self.table.unread(self._begun, self._left)
        except Unavailable:  # the next question about the batch itself says so
            return {}

    def spans(self, start: Offset, end: Offset) -> list[Span]:
        """What lies between two offsets, that is still there. Raises LogReplaced, OlderTable, RangePruned, Unavailable,
        and ConfigError for offsets of another stream."""
        self._check_stream(end)
        if end.positions == start.positions and end.epoch == start.epoch:
            return []
        log = self.table.log()
        if end.epoch != log.epoch:  # planned before the log was replaced, and not done yet
            self.losses.replaced(end.epoch, log.epoch)
            return []
        self._check_age(log, end)
        if start.epoch != end.epoch:
            return list(ranges({}, end.positions, log.floors).spans)
        found = ranges(start.positions, end.positions, log.floors)
        self.losses.pruned(found.lost, dict(log.floors))
        return list(found.spans)

    def close(self) -> None:
        """Hang up."""
        self._stopped.set()
        if self.bus is not None:
            self.bus.close()
        self.table.close()

    def _next(self, start: Offset, most: int | None) -> Offset | None:
        log = self._look()
        if start.epoch != log.epoch:
            self.losses.replaced(start.epoch, log.epoch)
            start = Offset(log.epoch, {}, start.skipped)
            lowest = {writer: log.floors.get(writer, 0) for writer in log.positions}  # never there for this query
        else:
            self._check_age(log, start)
            lowest = dict(start.positions)
        available = self._bounded(log, selected(log, self.options, self.losses), lowest)
        for writer in start.positions:
            if writer not in log.positions and self._reads(writer):
                self.losses.gone(writer, list(log.positions))
        found = ranges(lowest, available, log.floors)
        skipped = start.skipped + self.losses.pruned(found.lost, dict(log.floors))
        first, beyond = self.table.frontier(found.spans, most)
        self._begun = self._left = ()
        if first is None:
            return None
        begun = {**start.positions, **{writer: after for writer, after, _ in found.spans}}
        end = upto(begun, available, admitted(found.spans, first, beyond))
        self._begun, self._left = found.spans, ranges(end, available, {}).spans
        return Offset(log.epoch, end, skipped, self.options.stream)

    def _bounded(self, log: LogState, available: dict[str, int], lowest: Mapping[str, int]) -> dict[str, int]:
        """With Trigger.AvailableNow not beyond what was there when the query began; nor behind where it is."""
        if self._available_now:
            if self._target is None or self._target.epoch != log.epoch:
                self._target = self._proven(log)  # of the new log, of which it knew nothing
            target = self._target
            available = {writer: min(position, target.at(writer)) for writer, position in available.items()}
        return {writer: max(position, lowest.get(writer, 0)) for writer, position in available.items()}

    def _proven(self, log: LogState) -> Offset:
        return Offset(log.epoch, selected(log, self.options, self.losses), stream=self.options.stream)

    def _reads(self, writer: str) -> bool:
        return self.options.writers is None or writer in self.options.writers

    def _check_stream(self, offset: Offset) -> None:
        """All streams of a store have one epoch: positions of another one would be taken for this one's."""
        if offset.stream not in (None, self.options.stream):
            raise ConfigError(
                f"the checkpoint is of stream {offset.stream!r}, not of {self.options.stream!r}: what it says was read "
                "of one says nothing of the other. Give each query a checkpointLocation of its own"
            )

    def _check_age(self, log: LogState, held: Offset) -> None:
        """Whether the table still has what it proved before, of this very epoch.

        A replica lags, and what was heard on the bus comes to the table's positions later, or when the writer that said
        it is finished by another; but its rows are in the table.
        """
        if self.bus is not None or log.replica:
            return
        for writer, at in held.positions.items():
            proven = log.positions.get(writer, at)
            if proven < at and self._reads(writer) and self.table.frontier([(writer, proven, at)], None)[0] is None:
                self.losses.older(writer, at, proven)

    def _look(self) -> LogState:
        """The state of the log, as far as it is known; the table is asked when the bus does not tell.

        The bus is asked once, and before the table: it tells once that the table is to be asked, and what it hears
        from then on is for the next look.
        """
        known, said, ask = self._log, dict[str, int](), True
        now = time.monotonic()
        if known is not None and self.bus is not None:
            found, signal = self.bus.announced(known.epoch)
            said = {writer: at for writer, at in found.items() if writer in known.positions}
            # A replica need not have yet what is announced, nor when it is.
            ask = signal or known.replica or len(said) < len(found) or now - self._looked >= HEARTBEAT
        if known is None or ask:
            log, self._looked = self.table.log(), now
            if known is None or log.epoch != known.epoch:
                said = {}
            known = log
        if not known.replica:
            positions = {writer: max(at, said.get(writer, 0)) for writer, at in known.positions.items()}
            known = attrs.evolve(known, positions=positions)
        self._log = known
        return known
