"""What a writer holds of facts whose transaction has not ended, or of which it is not known how it did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from busrep.core.ids import Ticket
from busrep.core.retained import RetainedRows
from busrep.core.writer import Writer
from busrep.errors import ConfigError, Unavailable
from busrep.stores.interface import AsyncTransaction, Unnumbered
from busrep.streams import Stream


@attrs.define(eq=False)
class OpenFacts:
    """The facts of one stream in one transaction: their IDs, and the rows of each.

    ``each``: one row per ID, in order; else ``payloads`` holds the rows of an ID, and ``rows`` those of them that
    busrep inserts. ``ticket``: the generator knows no more than that IDs were asked for. They have not come yet, or the
    sequence is rolled back with the transaction (SQLite, the caller's), which has not ended. ``late``: they come as the
    rows are written, which are in ``unnumbered``. ``lent``: a server gave them in the caller's transaction, and only
    rows prove that it will not give them again. ``void``: it has, so the transaction was rolled back. ``claimed``: a
    transaction has held the claim since the IDs were reserved, or there is none to hold (9.2). ``first``: 0 before they
    have come.
    """

    stream: Stream[Any]
    ids: list[int] = attrs.field(factory=list)
    rows: dict[int, list[Any]] = attrs.field(factory=dict)
    payloads: dict[int, list[bytes]] = attrs.field(factory=dict)
    each: tuple[Sequence[Any], list[bytes]] | None = None
    ticket: Ticket | None = None
    late: bool = False
    unnumbered: Unnumbered | None = None
    lent: bool = False
    void: bool = False
    claimed: bool = True
    first: int = 0

    def given(self, ids: Iterable[int]) -> None:
        """The IDs have come."""
        self.ids = sorted(ids)
        self.first = self.ids[0] if self.ids else 0

    def add(self, row: Any, *, insert: bool, at: int = 0) -> None:
        """Add a row to one of the facts, counted from 0. Raises ConfigError for no such fact, and behind `add_each`."""
        self._check_free(self.each)
        if not 0 <= at < len(self.ids):
            raise ConfigError(f"at={at} of {len(self.ids)} facts is no place: 0 is the first, and count= adds facts")
        payload, payloads = self.stream.encode(row), self.payloads.setdefault(self.ids[at], [])
        if insert:
            rows = self.rows.setdefault(self.ids[at], [])
            if len(rows) < len(payloads):  # their places in the table are counted from the first one
                raise ConfigError("rows of a fact with insert=False come last, behind those that busrep inserts")
            rows.append(row)
        payloads.append(payload)

    def to_insert(self) -> list[tuple[int, Sequence[Any], Sequence[bytes]]]:
        """The facts that busrep inserts and that have IDs: ID, rows, and the rows as payloads."""
        if self.unnumbered is not None:
            return []
        if self.each is not None:
            return [(id, (row,), (payload,)) for id, row, payload in zip(self.ids, *self.each, strict=True)]
        return [(id, rows, self.payloads[id][: len(rows)]) for id, rows in self.rows.items()]

    def add_each(self, rows: Sequence[Any]) -> None:
        """Add each row as a fact of its own. Raises ConfigError for more or fewer than IDs, and behind other rows."""
        self._check_free(self.each or self.payloads)
        count = len(self.ids) or (self.ticket.count if self.ticket else 0)
        if len(rows) != count:
            raise ConfigError(f"{len(rows)} rows for {count} IDs: pass count={len(rows)} to write()")
        self.each = (rows, self.stream.encode_all(rows))
        if self.late and self.ticket is not None:
            self.unnumbered = Unnumbered(self.ticket.known, self.each[1])

    def _check_free(self, taken: object) -> None:
        if self.void:
            reason = "it was rolled back, for its ID was given again since: did the database crash? Write it again"
            raise Unavailable("the transaction of the fact", reason)
        if taken:
            raise ConfigError("add_each() adds the rows of all facts of a block: call it once, and add() not at all")

    def written(self) -> Sequence[bytes]:
        """The payloads of all rows."""
        if self.each is not None:
            return self.each[1]
        return [payload for id in self.ids for payload in self.payloads.get(id, ())]

    def may_have_written(self, id: int, found: list[bytes]) -> bool:
        """Whether the rows found in the table under one of its IDs may be its own. IDs that the sequence takes back are
        given to others: then the rows tell, of those that busrep inserts. A table of the application's may give them
        back in another form."""
        taken_back = (self.ticket is not None and not self.late) or self.lent
        if not taken_back or self.stream.table is not None:
            return True
        mine = self.payloads.get(id) if self.each is None else [self.each[1][self.ids.index(id)]]
        if self.lent and self.each is None:  # the transaction's state tells as well, but it may be another's by now
            mine = (mine or [])[: len(self.rows.get(id, ()))]
            found = found[: len(mine)]
        return mine == found

    def forget(self) -> None:
        """The transaction did not commit: the IDs are empty."""
        self.each = None
        self.payloads.clear()

    def complete(self, core: Writer | RetainedRows) -> tuple[int, int]:
        """Hand the facts to the writer core, or to who keeps them besides; give how many facts and rows they were."""
        if self.each is not None:
            core.rows_completed(self.stream.name, self.ids, self.each[1])
            return len(self.ids), len(self.ids)
        for id in self.ids:
            core.fact_completed(self.stream.name, id, self.payloads.get(id, ()))
        rows = [len(payloads) for payloads in self.payloads.values() if payloads]
        return len(rows), sum(rows)


@attrs.define(eq=False)
class InDoubt:
    """A transaction whose end is not known: the caller's own, or one whose COMMIT got no answer.

    ``transaction``: it may still be open, and then it holds a connection and locks; None once it was rolled back.
    ``sent``: COMMIT was sent, or is the caller's to send; else its block failed, or never ended.
    """

    marker: object
    opened: list[OpenFacts]
    transaction: AsyncTransaction | None = None
    sent: bool = False
