"""What of a reader's rows counts as handled: by its saved positions, and of the facts of its own writer (rules 9.12,
9.17).

The saved position decides, not what this process has handled: another process under the same reader name may have
handled more, and a restore or a failover may have taken back what was saved, with the effects that were saved with it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from busrep.errors import PositionsAheadOfTable, PositionTooOld
from busrep.stores.interface import KnownWriter, ReaderState

from .catchup import Key
from .delivery import RawBatch
from .reader import Reader

Change = tuple[str, str, int, int]
"""Stream, writer, the position that is saved, and the one to save in its place."""


class Reread(enum.Enum):
    """What the saved position says of a batch whose handler may have saved it."""

    VOID = enum.auto()  # the rows are of a log that is gone, or a snapshot came in their place
    OTHER_LOG = enum.auto()  # another process has gone over to a new log, or is at it: wait for that
    NOT_SAVED = enum.auto()  # the rows are to be handled again
    BEHIND = enum.auto()  # also, but no handler failed: another process had saved a position below them
    HANDLED = enum.auto()
    MOVED = enum.auto()  # go on at the saved position


@attrs.define(eq=False)
class SavedPositions:
    """{(stream, writer): saved position}."""

    at: dict[Key, int] = attrs.field(factory=dict)
    bootstraps: dict[str, str] = attrs.field(factory=dict)  # which one of a stream its positions are of, by its id

    def loaded(self, state: ReaderState, *streams: str) -> None:
        """The positions of these streams are as saved, and of the bootstrap that is saved with them."""
        self.bootstraps.update((name, state.bootstraps.get(name, "")) for name in streams)

    def behind_snapshot(self, state: ReaderState, stream: str) -> dict[str, int]:
        """What is saved of a stream behind a snapshot, {writer: position}, in place of all that was known of it."""
        self.loaded(state, stream)
        positions = {writer: at for (name, writer), at in state.positions.items() if name == stream}
        self.replace_stream(stream, positions)
        return positions

    def is_news(self, state: ReaderState, stream: str) -> bool:
        """Whether another process has begun a bootstrap of a stream, over by now or not."""
        return stream in state.loading or state.bootstraps.get(stream, "") != self.bootstraps.get(stream, "")

    def replace_stream(self, stream: str, positions: Mapping[str, int]) -> None:
        """A snapshot: {writer: position} in place of all that was known of this stream."""
        self.at = {key: at for key, at in self.at.items() if key[0] != stream}
        self.at |= {(stream, writer): at for writer, at in positions.items()}

    def change(self, key: Key, handled: int) -> Change | None:
        """What to save when all up to ``handled`` was. Never back: another process, or a lost answer, may be above."""
        saved = self.at[key]
        return (*key, saved, handled) if saved < handled else None

    def confirmed(self, changes: Iterable[Change]) -> None:
        """Take in that these are saved."""
        self.at.update({(stream, writer): new for stream, writer, _, new in changes})

    def unmoved(self, changes: Iterable[Change], void: Iterable[str]) -> list[Change]:
        """Those whose saved position is what it was: one that was moved must not keep back the others."""
        return [one for one in changes if one[0] not in void and self.at.get(one[:2]) == one[2]]

    def above_sequence(
        self, error: PositionsAheadOfTable, changes: Sequence[Change]
    ) -> tuple[list[tuple[Key, int]], list[Key]]:
        """What becomes of positions that were refused: those that go back to what is saved, and those that stop, for
        what is saved lies above the sequence, too."""
        refused = [one for one in changes if one[0] == error.stream and one[3] > error.highest]
        back = [((stream, writer), saved) for stream, writer, saved, _ in refused if saved <= error.highest]
        return back, [(stream, writer) for stream, writer, saved, _ in refused if saved > error.highest]

    def compare(
        self, keys: Iterable[Key], before: Mapping[Key, int], found: Mapping[Key, int], began: Callable[[Key], int]
    ) -> list[tuple[Key, int]]:
        """Take in what was ``found`` of these; give those that have to go back, and where to. ``before``: what was
        known when the read began: a handler may have saved since. ``began``: where one that is not found began."""
        back = []
        for key in keys:
            if self.at.get(key, 0) > before.get(key, 0):
                continue  # its handler saved, perhaps after that was read
            known = self.at.pop(key, None)
            if key in found:
                self.at[key] = found[key]
            elif known is None:
                continue
            # No other process moves it back; a restore or a failover does, and what was handled since is undone.
            if key not in found or found[key] < (known or 0):
                back.append((key, found.get(key, began(key))))
        return back

    def reread(
        self,
        key: Key,
        saved: int | None,
        batch: RawBatch,
        *,
        expected: int | None,
        log_read: str | None,
        epoch: str | None,
        saved_epoch: str | None,
        in_hand: bool,
    ) -> Reread:
        """What becomes of a batch whose handler may have saved its position, whatever became of its transaction.

        ``saved``: what was read; None when there is none, or a bootstrap came in place of the rows. ``expected``: what
        the handler's save was to replace. ``log_read``: the epoch that the rows are of; ``epoch``: that of the log now
        read; ``saved_epoch``: that of the saved positions. ``in_hand``: neither these nor the rows were lost meanwhile.
        """
        if epoch == log_read and saved_epoch not in (None, log_read):
            return Reread.OTHER_LOG
        if saved is None or epoch != log_read:  # of a log that is gone: what is saved in the new one is known
            return Reread.VOID
        known, self.at[key] = self.at.get(key, saved + 1), saved
        # Another process under this name may have saved less than was handled here, or empty, since.
        if known <= saved <= batch.after and in_hand:
            return Reread.NOT_SAVED if saved == (known if expected is None else expected) else Reread.BEHIND
        return Reread.HANDLED if saved == batch.position and in_hand else Reread.MOVED

    def pruned(self, key: Key, saved: int, floor: int, handled: int) -> bool:
        """Whether another process under this reader's name has handled what was pruned up to ``floor``: then it goes on
        from there."""
        if saved < floor or saved <= handled:
            return False
        self.at[key] = saved
        return True


@attrs.define(eq=False)
class OldestRows:
    """Where a reader without a name, for which pruning would wait, began at the oldest row there was."""

    # (stream, writer): (its floor, the last row there was), until a row is handed out.
    at: dict[Key, tuple[int, int]] = attrs.field(factory=dict)

    def begins_later(self, error: PositionTooOld, delivered: int) -> bool:
        """Whether the oldest row is another one by now, of those there were: then the reader begins at that."""
        key = (error.stream, error.writer)
        begun, last = self.at.get(key, (-1, -1))
        if delivered != begun or error.floor > last:  # rows that were due to it are gone
            return False
        self.at[key] = (error.floor, last)
        return True


@attrs.define(eq=False)
class OwnFacts:
    """The facts of this process's own writer, as its reader sees them.

    A process does not hear itself: what its own writer published counts as handled. Two kinds of facts under the own
    name do not, and are fetched and handled like another writer's: those that a predecessor left, and those behind a
    snapshot, for the target was emptied after they had their effects.

    ``name``: the own writer's; None for a process that writes nothing, or has lost its name. ``written``: gives of a
    stream up to where all own facts are finished, and whether others are under way; None for one not written here.
    """

    _reader: Reader
    name: str | None
    _written: Callable[[str], tuple[int, bool] | None]
    _log: str | None = None  # that the own facts are of; None: of none
    _starts: Mapping[str, int] = attrs.field(factory=dict)  # stream -> where this process's own facts begin
    # Stream -> the position up to which facts under the own name are due.
    _due_upto: dict[str, int] = attrs.field(factory=dict)
    # Streams that were bootstrapped, whose own facts are due as yet.
    _behind_snapshot: dict[str, None] = attrs.field(factory=dict)

    def claimed(self, log: str | None, starts: Mapping[str, int]) -> None:
        """The own name is won, in a log or in none. ``starts``: {stream: where the own facts begin}."""
        self._log, self._starts = log, starts

    @property
    def _elsewhere(self) -> bool:
        """Whether the log that is read is another one: a restore came between the claim and the reader's beginning. The
        own positions say nothing of it, and all that stands there under the own name is due."""
        return self._log is not None and self._reader.epoch not in (None, self._log)

    @property
    def any_behind_snapshot(self) -> bool:
        """Whether own facts are due behind a snapshot: look at them again at each beat."""
        return bool(self._behind_snapshot)

    def known(self, writer: KnownWriter) -> int:
        """The position up to which the table's rows of a registered writer are due to this reader."""
        if writer.writer != self.name:
            return writer.position
        starts: Mapping[str, int] = {} if self._elsewhere else self._starts
        position = min(writer.position, starts.get(writer.stream, writer.position))
        self._due_upto[writer.stream] = position
        return position

    def learn(self) -> None:
        """Go on fetching what is due: a lost link ends all catching up, and nobody announces the own positions."""
        for stream, position in self._due_upto.items():
            self._reader.learned(stream, self.name or "", position)

    def count_as_handled(self, stream: str) -> bool:
        """Whether what the own writer publishes counts as handled: all that was due before has been."""
        if stream in self._behind_snapshot or self._elsewhere:
            return False
        return stream not in self._due_upto or (
            self._reader.delivered(stream, self.name or "") >= self._due_upto[stream]
        )

    def bootstrapped(self, stream: str) -> None:
        """A snapshot of the stream is applied."""
        self._due_upto.pop(stream, None)
        if self.name is not None and self._written(stream) is not None:
            self._behind_snapshot[stream] = None

    def learn_behind_snapshots(self, held: Callable[[str], bool]) -> None:
        """Fetch own facts as another's would be, until all have been handled and none is under way: the handler of an
        older one must not come after the effects of a later one. ``held``: whether a snapshot of a stream is loaded."""
        for stream in list(self._behind_snapshot):
            own, written = self.name or "", self._written(stream)
            position, under_way = written or (0, False)
            behind = self._reader.delivered(stream, own) < position
            if written is None or not (held(stream) or under_way or behind):
                del self._behind_snapshot[stream]
            elif position > self._due_upto.get(stream, 0):
                self._due_upto[stream] = position
                self._reader.learned(stream, own, position)

    def disown(self, handled: Mapping[str, int]) -> None:
        """The own name was taken over: follow it as any other. ``handled``: {stream: where the own facts end}, of the
        streams whose own facts count as handled."""
        own, self.name = self.name, None
        self._reader.disown()
        for key, progress in self._reader.progress.items():
            if key[1] == own and handled.get(key[0], 0) > progress.position:
                progress.go_on_from(handled[key[0]])
        self._due_upto.clear()
        self._behind_snapshot.clear()
