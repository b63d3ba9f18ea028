"""The parts of one snapshot: which are applied, which are loaded and wait for that, and at what pace."""

from __future__ import annotations

from typing import Any

from ..settings import Settings
from .bootstrap_work import Apply, HandedOut, Load, Work
from .snapshots import Agreement, BootstrapProgress, PartRows


class Parts:
    """``applied``: how many parts are, with so many ``rows`` and ``bytes``. ``ahead``: loaded, and not applied yet.

    ``rest_until``: when the next parts are due, by ``snapshot_rate``.
    """

    def __init__(self, settings: Settings) -> None:
        self.applied = self.rows = self.bytes = 0
        self.ahead: dict[int, PartRows] = {}
        self.rest_until = 0.0
        self._settings = settings
        self._since = (0.0, 0, 0)  # when loading began, and the parts and rows that were applied by then

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

    def all_loaded(self, agreement: Agreement) -> bool:
        """Whether nothing is left to load."""
        return self.applied + len(self.ahead) == len(agreement.parts)

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
