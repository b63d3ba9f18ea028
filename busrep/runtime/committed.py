"""The own facts that were committed last, of which a failover may have lost some."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from busrep.errors import CommitsLost
from busrep.stores.interface import Claim, Group, KnownWriter

from .open_facts import OpenFacts

# After a failover facts of so many transactions of each stream are looked for. It loses those that were committed last;
# of those that were answered last the one that was committed last is one, unless more connections were at COMMIT.
COMMITS_CHECKED = 100


class LastCommits:
    """By stream, one fact of each of the last transactions. Known to be in busrep's table."""

    def __init__(self) -> None:
        self._noted: dict[str, dict[object, int]] = {}

    def note(self, one: OpenFacts, marker: object) -> None:
        """These facts are committed, in the transaction of that marker."""
        ids = one.ids if one.each is not None else [id for id, payloads in one.payloads.items() if payloads]
        if ids:
            noted = self._noted.setdefault(one.stream.name, {})
            unit = marker if isinstance(marker, Group) else object()  # of other facts' transaction, too
            noted[unit] = max(max(ids), noted.pop(unit, 0))
            if len(noted) > COMMITS_CHECKED:
                del noted[next(iter(noted))]

    def facts(self) -> list[tuple[str, int]]:
        """What the table is to be asked for, as (stream, ID)."""
        return [(stream, id) for stream, noted in self._noted.items() for id in noted.values()]

    def check(self, claim: Claim, found: Collection[tuple[str, int]] | None, known: Iterable[KnownWriter]) -> None:
        """Whether all of them are among those ``found``. ``claim``: that they were written under; ``known`` was read
        after that: rows may have been deleted. Raises CommitsLost."""
        floors = {one.stream: one.floor for one in known if one.writer == claim.writer}
        for stream, id in self.facts():
            if id > floors.get(stream, 0) and (stream, id) not in (found or ()):
                raise CommitsLost(claim.writer, claim.incarnation, stream, id)
