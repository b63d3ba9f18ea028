"""Facts whose IDs are known for good only when their transaction has ended.

The sequence is rolled back with the transaction (the caller's, on SQLite), or it gives the IDs as the rows are written
(9.28). Until then the ID generator knows a ticket, no more. In the caller's transaction a server gives the IDs: a crash
may take these back, until anything is committed behind them (9.22).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from busrep.core.ids import IdGenerator, Ticket
from busrep.errors import SequenceWentBack
from busrep.streams import Stream

from .open_facts import InDoubt, OpenFacts


def asked_above(doubt: InDoubt) -> dict[str, int]:
    """By stream, above which ID the facts in doubt are that were to get theirs as they were written."""
    return {one.stream.name: one.unnumbered.known for one in doubt.opened if one.unnumbered is not None and one.ticket}


class LateIds:
    """The facts of one session whose IDs were asked for, and that the generator was not told of."""

    def __init__(self, generators: Mapping[str, IdGenerator]) -> None:
        self._generators = generators
        self._pending: list[OpenFacts] = []

    def asked(self, stream: Stream[Any], ticket: Ticket, *, late: bool) -> OpenFacts:
        """Open facts: whatever comes, `redeem` gives their ticket up, or answers it."""
        one = OpenFacts(stream, ticket=ticket, late=late)
        self._pending.append(one)
        return one

    def reserved(self, one: OpenFacts, ids: Sequence[int]) -> None:
        """The sequence gave these IDs for good. Raises SequenceWentBack."""
        self._given_again(one, ids)
        assert one.ticket is not None  # noqa: S101 (asked for, and not answered before)
        self._generators[one.stream.name].answer(one.ticket, ids)
        one.given(ids)
        one.ticket = None
        self._pending.remove(one)

    def promised(self, one: OpenFacts, ids: Sequence[int]) -> None:
        """The sequence takes these IDs back if the transaction is rolled back: the ticket is answered at its end."""
        self._given_again(one, ids)
        one.given(ids)

    def lent(self, one: OpenFacts, ids: Sequence[int]) -> None:
        """A server gave these IDs in the caller's transaction. They are open, and until they have rows not known: the
        server may crash, and give them again. Raises SequenceWentBack; also where that was so, and who asked later has
        them already: in a thread that was stopped before it took its answer in."""
        for other in self._pending[self._pending.index(one) + 1 :]:
            if other.lent and other.stream.name == one.stream.name and not {*ids}.isdisjoint(other.ids):
                raise SequenceWentBack(one.stream.name, ids[0], other.first)
        self._given_again(one, ids)
        assert one.ticket is not None  # noqa: S101 (asked for, and not answered before)
        self._generators[one.stream.name].answer(one.ticket, ids, kept=False)
        one.given(ids)
        one.ticket, one.lent = None, True

    def _given_again(self, one: OpenFacts, ids: Iterable[int]) -> None:
        """The sequence gave these: who was promised, or lent, one of them before was rolled back."""
        given = {*ids}
        for other in self._others(one):
            if not (other.late or given.isdisjoint(other.ids)):
                other.void = True
                other.forget()
                self.redeem(other)

    def _others(self, one: OpenFacts) -> list[OpenFacts]:
        """The other facts of its stream."""
        return [other for other in self._pending if other is not one and other.stream.name == one.stream.name]

    def redeem(self, one: OpenFacts) -> None:
        """The transaction has ended: with rows the IDs are its own, else they are nobody's yet. So are those that never
        came. Raises what `IdGenerator.answer` does."""
        if one.ticket is None and not one.lent:
            return
        generator, ticket, lent = self._generators[one.stream.name], one.ticket, one.lent
        one.ticket, one.lent = None, False
        self._pending.remove(one)
        if one.each is None and not any(one.payloads.values()):
            ids, one.ids = one.ids, []
            if lent:
                generator.abandon(ids)
            if ticket is not None:
                generator.give_up(ticket)
        elif ticket is not None:
            if one.late:
                self._given_again(one, one.ids)
            generator.answer(ticket, one.ids, exact=not one.late)

    def are_coming(self, doubts: Iterable[InDoubt]) -> bool:
        """Whether facts are open that get their IDs so, beside those in doubt: also before they have rows, for another
        thread may write them at any moment."""
        doubted = {id(one) for doubt in doubts for one in doubt.opened}
        return any(one.late and id(one) not in doubted for one in self._pending)

    def may_be_others(self, doubts: Iterable[InDoubt], found: Mapping[tuple[str, int], list[bytes]]) -> bool:
        """Whether rows ``found`` of facts in doubt may be those of a fact that gets its IDs so, and has no answer yet:
        the IDs were promised, and were given again. Or those of one whose IDs were lent, of which the table has not
        told yet."""
        late = {one.stream.name for doubt in doubts for one in doubt.opened if one.late and one.ticket is not None}
        lent = {(one.stream.name, id) for one in self._pending if one.lent for id in one.ids} if late else set()
        return any(stream in late and (stream, id) in lent for stream, id in found) or any(
            one.may_have_written(id, rows)
            for doubt in doubts
            for one in doubt.opened
            if one.ticket is not None and not one.late
            for id in one.ids
            if (rows := found.get((one.stream.name, id)))
            for other in self._others(one)
            if other.unnumbered is not None and rows[0] in other.unnumbered.payloads
        )

    def find(self, one: OpenFacts, found: Mapping[tuple[str, int], list[bytes]]) -> bool:
        """Give facts in doubt their IDs: those of the own facts in the table that nobody here was given. False: that
        cannot be told any more."""
        if one.unnumbered is None or one.ticket is None:
            return True
        name, known, generator = one.stream.name, one.unnumbered.known, self._generators[one.stream.name]
        ids = [id for stream, id in found if stream == name and id > known]
        # Others are given theirs before they are booked: an interrupt may have come between.
        others = [(id, other) for other in self._others(one) for id in ids if id in other.ids]
        theirs = {id for id, other in others if other.may_have_written(id, found[name, id])}
        one.given(id for id in ids if id not in theirs and not generator.knows(id))
        return not generator.thinned
