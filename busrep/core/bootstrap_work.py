"""What a bootstrap wants done next, and the parts of its snapshot.

The classes of `Work` are the questions of `bootstrap`, each with the input that answers it. Each is handed out once,
and known again by identity: an answer to one that was given up meanwhile tells nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import attrs

from ..settings import Settings
from .snapshots import Agreement, BootstrapProgress, PartRows


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


@attrs.define(eq=False)
class HandedOut:
    """What was handed out, and is not answered."""

    in_hand: Apply | None = None  # being applied, of whatever agreement: until it is answered nothing else is
    _wanted: dict[Work, None] = attrs.field(factory=dict, init=False)  # whose answers count

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


@attrs.define(eq=False)
class Parts:
    """The parts of one snapshot: which are applied, which are loaded and wait for that, and at what pace."""

    _settings: Settings
    applied: int = 0  # how many parts are, with so many rows and bytes
    rows: int = 0
    bytes: int = 0
    ahead: dict[int, PartRows] = attrs.field(factory=dict)  # loaded, and not applied yet
    rest_until: float = 0.0  # when the next parts are due, by snapshot_rate
    _since: tuple[float, int, int] = (0.0, 0, 0)  # when loading began, and the parts and rows that were applied by then

    def drop(self) -> None:
        """Another snapshot, or the same one from its beginning."""
        self.ahead.clear()
        self.applied = self.rows = self.bytes = 0

    def restore(self, saved: BootstrapProgress) -> None:
        """Go on from what is saved."""
        self.ahead = {number: part for number, part in self.ahead.items() if number >= saved.parts}
        self.applied, self.rows, self.bytes = saved.parts, saved.rows, saved.bytes

    def too_large(self, agreement: Agreement) -> bool:
        """Whether its parts are of a larger ``snapshot_part_rows``: of their size the process may have died, and would
        again. Asked once a process, when it finds what is saved: two of one name with different settings would replace
        one another's for ever. Nothing tells what was asked for, and a part is larger by a fact: so twice as large."""
        return agreement.rows > 2 * self._settings.snapshot_part_rows * len(agreement.parts)

    def begin(self, now: float) -> None:
        """Loading begins, or goes on."""
        self._since = (now, self.applied, self.rows)
        self.rest_until = max(now, self.rest_until)

    def plan(self, agreement: Agreement, handed_out: HandedOut, id: str) -> list[Work]:
        """The next parts to load, as many as may be in memory at a time; and the one to apply, if it is there."""
        loading = {work.number for work in handed_out.under_way if isinstance(work, Load)} | self.ahead.keys()
        end = min(self.applied + self._settings.snapshot_connections, len(agreement.parts))
        planned: list[Work] = [Load(agreement, number) for number in range(self.applied, end) if number not in loading]
        part = self.ahead.get(self.applied) if agreement.parts else PartRows((), (), ())
        if part is not None and handed_out.in_hand is None:
            planned.append(Apply(agreement, self.applied, part, self.rows, self.bytes, id))
        return planned

    def apply(self, work: Apply, rows: int, now: float) -> None:
        """A part with so many rows is applied."""
        self.ahead.pop(work.number, None)
        self.applied, self.rows, self.bytes = work.parts_after, work.rows + rows, work.bytes + work.part.size
        if self._settings.snapshot_rate is not None:  # whoever is slower than that never makes up for it in a burst
            self.rest_until = max(now, self.rest_until + rows / self._settings.snapshot_rate)

    def eta(self, agreement: Agreement, now: float) -> float | None:
        """Seconds until all parts are applied, at the rate since loading began, or went on. None: not known."""
        since, parts, rows = self._since
        if agreement.rows >= 0:
            done, left = self.rows - rows, agreement.rows - self.rows
        else:
            done, left = self.applied - parts, len(agreement.parts) - self.applied
        return max(left, 0) * (now - since) / done if done > 0 else None

    def statistics(self, agreement: Agreement | None, now: float, *, loading: bool) -> dict[str, Any]:
        """How far it is, JSON-able. None: unknown, or does not apply."""
        return {
            "rows": self.rows,
            "rows_total": None if agreement is None or agreement.rows < 0 else agreement.rows,
            "bytes": self.bytes,
            "parts": self.applied,
            "parts_total": None if agreement is None else len(agreement.parts),
            "eta": self.eta(agreement, now) if loading and agreement is not None else None,
        }
