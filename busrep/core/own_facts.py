"""The facts of this process's own writer, as its reader sees them.

A process does not hear itself: what its own writer published counts as handled. Two kinds of facts under the own name
do not, and are fetched and handled like another writer's: those that a predecessor left, and those behind a snapshot,
for the target was emptied after they had their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from busrep.stores.interface import KnownWriter

from .reader import Reader


@attrs.define(eq=False)
class OwnFacts:
    """Which facts under the own name are due to this process's handlers. Pure.

    Args:
        reader: The reader core, which fetches what is due.
        name: The own writer's; None for a process that writes nothing, or has lost its name.
        written: Gives of a stream up to where all own facts are finished, and whether others are under way; None for a
            stream that is not written here.
    """

    _reader: Reader
    name: str | None
    _written: Callable[[str], tuple[int, bool] | None]
    starts: Mapping[str, int] = attrs.field(factory=dict)  # stream -> where this process's own facts begin
    # Stream -> the position up to which facts under the own name are due.
    _due_upto: dict[str, int] = attrs.field(factory=dict)
    # Streams that were bootstrapped, whose own facts are due as yet.
    _behind_snapshot: dict[str, None] = attrs.field(factory=dict)

    @property
    def any_behind_snapshot(self) -> bool:
        """Whether own facts are due behind a snapshot: look at them again at each beat."""
        return bool(self._behind_snapshot)

    def known(self, writer: KnownWriter) -> int:
        """The position up to which the table's rows of a registered writer are due to this reader."""
        if writer.writer != self.name:
            return writer.position
        position = min(writer.position, self.starts.get(writer.stream, writer.position))
        self._due_upto[writer.stream] = position
        return position

    def learn(self) -> None:
        """Go on fetching what is due: a lost link ends all catching up, and nobody announces the own positions."""
        for stream, position in self._due_upto.items():
            self._reader.learned(stream, self.name or "", position)

    def count_as_handled(self, stream: str) -> bool:
        """Whether what the own writer publishes counts as handled: all that was due before has been."""
        if stream in self._behind_snapshot:
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
