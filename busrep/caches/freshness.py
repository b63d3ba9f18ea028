"""As of when a process knows all invalidations.

Each beat a reader asks the table for the highest row of every writer (`TableProof`). Once it has applied the rows up to
these, it has applied all that was committed before it asked: positions that were delivered are proven prefixes, below
which no row appears any more. No clock of others has a part in that, and no message.

Of a stream without a table nobody can be asked. There an announcement of a position counts as of when it came
(`HeardProof`). By how much that may be wrong stands in docs/caches.md.

The rows of this very process are applied as they are committed. What may be committed, and is not known to be, is older
than the moment at which its COMMIT was sent (`Commits`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping

import attrs

from ..stores.interface import KnownWriter

# Answers of the table whose rows are not all applied yet, and announcements of one writer whose positions are not. With
# one a beat no handler is so far behind; of more the latest count, which ask for no less.
PENDING = 16

Delivered = Callable[[str], int]
"""Writer -> the position up to which its rows have been applied."""


@attrs.define(eq=False)
class Commits:
    """The facts of one stream of this process that may be committed and are not applied here, and since when.

    A fact is any object. Times are seconds of one clock that does not go back.
    """

    _open: dict[Hashable, float] = attrs.field(factory=dict)

    def sent(self, fact: Hashable, now: float) -> None:
        """COMMIT goes out now; or the fact is part of the caller's transaction, who may commit from now on."""
        self._open.setdefault(fact, now)

    def still_open(self, fact: Hashable, asked: float) -> None:
        """The table said that the transaction is open still, in answer to a question asked then."""
        if fact in self._open:
            self._open[fact] = max(self._open[fact], asked)

    def ended(self, fact: Hashable) -> None:
        """It is committed, and applied here; or rolled back."""
        self._open.pop(fact, None)

    def as_of(self, now: float) -> float:
        """As of when this process has applied all that it committed."""
        return min(self._open.values(), default=now)


@attrs.frozen
class Own:
    """This process's own writer: ``as_of`` is of `Commits`."""

    writer: str
    incarnation: int
    as_of: float


@attrs.define(eq=False, slots=False)
class TableProof:
    """As of when all invalidations of a stream that has a table have been applied here. Times are of our clock."""

    looks: deque[tuple[float, Mapping[str, int]]] = attrs.field(factory=lambda: deque(maxlen=PENDING))
    _members: dict[str, KnownWriter] = attrs.field(factory=dict)
    _applied: float | None = None

    def registered(self, members: Iterable[KnownWriter]) -> None:
        """The stream's writers in the registry, read before `looked`."""
        self._members = {member.writer: member for member in members}

    def looked(self, asked: float, newest: Mapping[str, int]) -> None:
        """The table says that these are the highest rows, {writer: ID}, of all writers, in one snapshot that was taken
        after ``asked``; so was the registry. Who joined since had nothing committed before that."""
        self.looks.append((asked, newest))

    def begin_anew(self) -> None:
        """The log is another one: what was asked of the former one proves nothing any more."""
        self.looks.clear()
        self._applied = None

    @property
    def waiting(self) -> bool:
        """Whether the table has told of rows that were not applied when it was last looked at."""
        return bool(self.looks)

    def final(self, writer: str) -> int | None:
        """Where a writer that left the registry has ended; None for any other."""
        member = self._members.get(writer)
        return None if member is None or member.registered else member.position

    def as_of(self, delivered: Delivered, own: Own | None) -> float | None:
        """As of when everything has been applied, None if that is not known."""
        # The own rows are not delivered, but applied as they are committed; what is not yet is older than `Own.as_of`.
        # Unless the name is another process's by now.
        member = None if own is None else self._members.get(own.writer)
        mine = own.writer if own is not None and member is not None and member.incarnation == own.incarnation else None
        while self.looks and all(
            delivered(writer) >= newest for writer, newest in self.looks[0][1].items() if writer != mine
        ):
            self._applied, _ = self.looks.popleft()
        if self._applied is None or own is None:
            return self._applied
        return min(self._applied, own.as_of)


@attrs.define
class _Voice:
    """The announcements of one incarnation of one writer."""

    incarnation: int | None
    heard_at: float = -math.inf
    as_of: float | None = None
    pending: deque[tuple[int, float]] = attrs.field(factory=lambda: deque(maxlen=PENDING))


@attrs.define(eq=False)
class HeardProof:
    """The same for a stream without a table: of what was heard. ``silent``: seconds without an announcement after which
    a writer counts as gone."""

    _silent: float
    voices: dict[str, _Voice] = attrs.field(factory=dict)

    def announced(self, writer: str, incarnation: int | None, position: int, received: float) -> None:
        """A position was announced. One of a former incarnation proves nothing any more."""
        voice = self.voices.get(writer)
        known = None if voice is None else voice.incarnation
        if known is not None and (incarnation is None or incarnation < known):
            return
        if voice is None or known != incarnation:
            voice = self.voices[writer] = _Voice(incarnation)
        voice.heard_at = received
        voice.pending.append((position, received))

    def forget(self, writer: str) -> None:
        """Its positions begin anew: what was announced before is of others."""
        self.voices.pop(writer, None)

    def gone(self, now: float) -> list[str]:
        """Writers that have fallen silent. They count no more, and what they said last may be lost: clear the
        caches."""
        silent = [writer for writer, voice in self.voices.items() if now - voice.heard_at > self._silent]
        for writer in silent:
            del self.voices[writer]
        return silent

    @property
    def waiting(self) -> bool:
        """Whether something was announced and not applied when it was last looked at."""
        return any(voice.pending for voice in self.voices.values())

    def as_of(self, delivered: Delivered, own: Own | None) -> float | None:
        """As of when everything has been applied that writers have told of, None if that is not known."""
        times = [] if own is None else [own.as_of]
        for writer, voice in self.voices.items():
            while voice.pending and voice.pending[0][0] <= delivered(writer):
                _, voice.as_of = voice.pending.popleft()
            if voice.as_of is None:
                return None
            times.append(voice.as_of)
        return min(times, default=None)
