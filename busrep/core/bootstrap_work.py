"""What a bootstrap wants done next: the questions of `bootstrap`, each with the input that answers it.

Each is handed out once, and known again by identity: an answer to one that was given up meanwhile tells nothing.
"""

from __future__ import annotations

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
    def parts(self) -> int:
        """How many parts are applied before it."""
        return self.number

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
