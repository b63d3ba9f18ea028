"""One (stream, writer) of a reader: what its lines and pages do to it, and what the runtime decides of it."""

from __future__ import annotations

import attrs

from .delivery import RawBatch
from .following import Following
from .states import Event, State


@attrs.define(eq=False)
class Progress(Following):
    """One (stream, writer), which may be given up, stopped, moved, or taken from a snapshot."""

    stops: bool = False  # stopped while bootstrapping: takes effect after it

    @property
    def due(self) -> int:
        """How far rows are known to be due."""
        return max(self.position, self.target, self.later)

    def learned(self, position: int) -> None:
        """A proven position that was not heard on the wire: from the positions table, or of a finished writer."""
        if (self.catching_up and not self.held) or self.state is State.STOPPED:
            self.target = max(self.target, position)
        elif self.holding:  # what is held may bring it
            self.later = max(self.later, position)
        elif position > self.position:
            self._gap(position)

    def nothing_above(self, asked: int, highest: int) -> None:
        """No row is due above ``highest``, which is all that the sequence gave, though lines said that the
        writer is at ``asked``. Where it is later its next head, or beat, shows a gap again."""
        if not self.catching_up or self.target != asked or asked <= highest:
            return
        self.target = max(self.position, highest)
        if self.asked is None and self.position >= self.target:
            self._caught_up()

    def reject(self, batch: RawBatch) -> None:
        """Rows that came over the wire do not decode: drop them and what waits behind, and fetch them. Their stream can
        be fetched."""
        if self.queue.handling is not batch:  # a reset came between
            return
        self._intake.counters.rejected += 1
        received = self.position
        self._empty()
        self.position = self.queue.delivered
        if self.catching_up:
            self.target = max(self.target, received)
            self.abandon()
        else:
            self._intake.counters.gaps_found += 1
            self._gap(received)

    def skip(self, upto: int) -> None:
        """Give up the rows up to ``upto`` (a pruned range, when the policy allows): they are reported missed. While
        bootstrapping nothing is given up: a snapshot comes in place of them."""
        if self.state is State.BOOTSTRAPPING:
            return
        self.abandon()
        if upto > self.position:
            self._miss(upto)
        if self.catching_up and self.position >= self.target:
            self._caught_up()

    def stop(self) -> None:
        """Take in nothing more, and drop what waits, until ``resume``. While bootstrapping that waits until the
        snapshot is applied."""
        if self.state is State.BOOTSTRAPPING:
            self.stops = True
            return
        target = self.due
        self._move(Event.GIVEN_UP)
        self.restart(self.queue.delivered)
        self.target = target

    def resume(self) -> None:
        """Go on behind what was handled; what was dropped comes by catch-up."""
        self.stops = False
        if self.state is State.STOPPED:
            self._move(Event.RESUMED)
            if self.queue:
                self._intake.ready[self.key] = None
            # Not only at the next POSITION: its writer may be dead.
            self.learned(self.target)

    def go_on_from(self, position: int, most: int | None = None) -> None:
        """The saved position turned out to be this one: go on from there, whatever was taken in already. ``most``:
        nothing above it is due, whatever was said."""
        target = self.due if most is None else min(most, self.due)
        self.lose()
        self.restart(position)
        self.learned(target)

    def begin_bootstrap(self) -> None:
        """A snapshot of the stream is loaded: hold what is heard, drop what waits unhandled."""
        # The snapshot may be older than what was taken in already: the rows up to there come again behind it.
        self.later = self.due
        self._move(Event.BOOTSTRAP)
        self.restart(self.queue.delivered)

    def bootstrapped(self, position: int) -> None:
        """The snapshot is applied, and contains what this writer wrote up to ``position``: go on behind it."""
        self.position = self.queue.delivered = self.began = position
        self._intake.draining[self.key] = max(self.later, self.held.end)
        self._move(Event.BOOTSTRAPPED)
        if self.stops:
            self.stops, self.later = False, max(self.later, self.held.end)
            self.stop()
        else:
            # What is held begins with a POSITION: it tells whether it follows.
            self.release()
