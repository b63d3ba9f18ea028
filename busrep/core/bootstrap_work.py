"""What a bootstrap wants done next: the questions of `bootstrap`, each with the input that answers it.

Each is handed out once, and known again by identity: an answer to one that was given up meanwhile tells nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from .snapshots import Agreement, PartRows


@attrs.frozen(eq=False)
class Agree:
    """Ask the source for a snapshot; answer with ``agreed``. ``again``: the one that is to go on, if it can."""

    stream: str
    again: Agreement | None


@attrs.frozen(eq=False)
class Begin:
    """Save a new agreement, with nothing of it applied; answer with ``begun``. ``syncs``: full syncs within the hour,
    this one included."""

    agreement: Agreement
    syncs: int
    reason: str


@attrs.frozen(eq=False)
class Load:
    """Load one part; answer with ``loaded``."""

    agreement: Agreement
    number: int


@attrs.frozen(eq=False)
class Apply:
    """Apply one part, and save that; answer with ``applied``. ``rows``, ``bytes``: applied before it.

    A snapshot without parts has one to apply all the same, without rows: the target is to be emptied. ``id``: of the
    bootstrap that it is saved for, as ``begun`` or ``restore`` told it: not of one begun since.
    """

    agreement: Agreement
    number: int
    part: PartRows
    rows: int
    bytes: int
    id: str

    @property
    def parts_after(self) -> int:
        """How many parts are applied with it."""
        return min(self.number + 1, len(self.agreement.parts))

    @property
    def first(self) -> bool:
        """Whether the target is to be emptied before."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether the snapshot is whole with it."""
        return self.parts_after == len(self.agreement.parts)


@attrs.frozen(eq=False)
class Drain:
    """Let the reader go on behind the snapshot; call ``drained`` once the reader says that it is."""

    agreement: Agreement


@attrs.frozen(eq=False)
class Leave:
    """Tell the source that nothing more will be loaded, before doing what follows. There is no answer."""

    agreement: Agreement


Work = Agree | Begin | Load | Apply | Drain | Leave


class HandedOut:
    """What was handed out, and is not answered.

    ``in_hand``: the part that is being applied, of whatever agreement: until it is answered nothing else is applied.
    """

    def __init__(self) -> None:
        self.in_hand: Apply | None = None
        self._wanted: dict[Work, None] = {}  # whose answers count

    @property
    def under_way(self) -> Collection[Work]:
        """What is still wanted. The part in hand is: it cannot be taken back."""
        return self._wanted.keys() | ({self.in_hand} if self.in_hand is not None else set())

    def add(self, works: Iterable[Work]) -> None:
        """These are handed out now."""
        for work in works:
            self._wanted[work] = None
            if isinstance(work, Apply):
                self.in_hand = work

    def answered(self, work: Work) -> bool:
        """Take in an answer; whether it counts."""
        if work is self.in_hand:
            self.in_hand = None
        if work not in self._wanted:
            return False
        del self._wanted[work]
        return True

    def give_up(self, but: type[Work] | tuple[()] = ()) -> None:
        """No answer counts any more, ``but`` those to works of that kind."""
        self._wanted = {work: None for work in self._wanted if isinstance(work, but)}

    def restore(self, parts: int) -> None:
        """So many parts are applied, and that is saved, by somebody else: what is of no use then is given up."""
        for work in list(self._wanted):
            done = isinstance(work, Begin) or (isinstance(work, Load) and work.number < parts)
            if done or (isinstance(work, Apply) and work.number != parts):
                del self._wanted[work]
