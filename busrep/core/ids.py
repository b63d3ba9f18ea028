"""Reserve and complete: from finished IDs to positions (protocol.md, section 5, rules 9.2 and 9.15).

One `IdGenerator` per stream and process. It knows the IDs that are *open*, the reservations that were asked for and not
answered, and the IDs that are *finished* above its position: the largest finished ID below everything unfinished. IDs
are kept as runs without a gap, so that a bulk of them costs one entry; of finished runs beyond `MOST_RUNS` only those
are kept that a position can stop at.

IDs are positive inside and on the wire; `IdGenerator.table_id` says what a negative stream's table holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

import attrs

from busrep.errors import SequenceWentBack, WriterFenced

from .runs import Runs, runs_of

MOST_RUNS = 10_000  # of finished IDs, remembered above an open one: under 1 MB


@attrs.frozen
class StuckFact:
    """Open IDs ``id``..``last``; ``id`` None: asked for, not answered. ``age`` is in seconds."""

    stream: str
    id: int | None
    age: float
    owner: str
    last: int | None = None


@attrs.frozen(eq=False)
class Ticket:
    """An unanswered reservation: no ID above ``known`` is finished while it may still be answered."""

    known: int
    count: int
    since: float
    owner: str


@attrs.define(eq=False)
class IdGenerator:
    """The IDs that one process writes to one stream, and its position there. Hold a lock round each call.

    ``position``, ``highest``: of `plan_start`. ``stuck_after``: seconds after which an open fact is reported.
    ``most_runs`` bounds what is remembered above an open ID. ``on_moved`` is called with each new position.
    """

    stream: str
    # The largest finished, or followed, ID below everything unfinished. Never falls.
    position: int = attrs.field(kw_only=True)
    # The largest ID seen: reserved here, in a row, or announced; never read from the sequence.
    highest: int = attrs.field(kw_only=True)
    negative: bool = attrs.field(default=False, kw_only=True)
    stuck_after: float = attrs.field(default=60.0, kw_only=True)
    most_runs: int = attrs.field(default=MOST_RUNS, kw_only=True)
    _on_moved: Callable[[int], None] | None = attrs.field(default=None, kw_only=True)
    own_highest: int = attrs.field(default=0, init=False)  # that was reserved here; 0 if none was
    # The runs of open IDs, ascending: the first ID of each, and its last with the ticket that it came by.
    firsts: list[int] = attrs.field(factory=list, init=False)
    opened: list[tuple[int, Ticket]] = attrs.field(factory=list, init=False)
    # In the order in which they were asked: ``known`` never falls.
    _tickets: dict[Ticket, None] = attrs.field(factory=dict, init=False)
    finished: Runs = attrs.field(factory=Runs, init=False)  # own, above the position
    heard: Runs = attrs.field(factory=Runs, init=False)  # others' rows that came while a ticket is unanswered
    _left: int = attrs.field(default=0, init=False)  # the largest ID that was abandoned
    thinned: bool = attrs.field(default=False, init=False)  # whether finished IDs above a ticket were forgotten
    _fenced: WriterFenced | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.highest = max(self.highest, self.position)

    @property
    def open(self) -> int:
        """How many reserved IDs are not finished."""
        return sum(last - first + 1 for first, (last, _) in zip(self.firsts, self.opened, strict=True))

    @property
    def asked(self) -> int:
        """How many reservations are not answered."""
        return len(self._tickets)

    @property
    def open_floor(self) -> int:
        """The largest ID up to which this writer has nothing unfinished."""
        known = next(iter(self._tickets)).known if self._tickets else self.highest
        return min(known, self.firsts[0] - 1) if self.firsts else known

    @property
    def follows_to(self) -> int:
        """How far an idle writer may follow the others, and its own abandoned IDs, of which some are not known: note it
        before the own claim is read, see `follow`."""
        return self.open_floor if self._tickets or self.firsts else max(self.highest, self._left)

    def table_id(self, token: int) -> int:
        """Give the ID as it stands in the table: negated for a negative stream (G17)."""
        return -token if self.negative else token

    def ask(self, count: int = 1, *, now: float, owner: str = "") -> Ticket:
        """Note that ``count`` IDs are about to be asked of the sequence: call before asking. ``now``: seconds of any
        clock that does not go back. Raises `WriterFenced` once fenced."""
        if self._fenced is not None:
            raise WriterFenced(self._fenced.writer, self._fenced.incarnation)
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        ticket = Ticket(self.highest, count, now, owner)
        self._tickets[ticket] = None
        return ticket

    def answer(self, ticket: Ticket, ids: Sequence[int], *, exact: bool = True, kept: bool = True) -> None:
        """Open the IDs that the sequence gave for ``ticket``. Not ``exact``: they may be more, or fewer. Not ``kept``:
        the sequence may give them again, unless they are completed: `abandon` them first, then.

        Raises `SequenceWentBack` if one of them was known when they were asked for, or is in use; `ValueError` if their
        number is another, or the ticket is not open. Then none is used and the ticket given up.
        """
        if ticket not in self._tickets:
            raise ValueError("the ticket was answered or given up before")
        try:
            runs = [(ids[0], ids[0])] if len(ids) == 1 else runs_of(ids)
            self._check(ticket if exact else attrs.evolve(ticket, count=len(ids)), ids, runs)
            for first, last in runs:
                at = bisect_left(self.firsts, first)
                self.firsts.insert(at, first)
                self.opened.insert(at, (last, ticket))
            self.own_highest = max(self.own_highest, runs[-1][1])
            if kept:
                self.highest = max(self.highest, runs[-1][1])
        finally:
            # Only now: until its answer stood in the list, the ticket kept the position below it.
            self.give_up(ticket)

    def _check(self, ticket: Ticket, ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Refuse IDs that cannot be new."""
        if len(ids) != ticket.count:
            raise ValueError(f"stream {self.stream!r}: asked for {ticket.count} IDs, got {len(ids)}")
        if runs[0][0] <= ticket.known:
            raise SequenceWentBack(self.stream, runs[0][0], ticket.known)
        if sum(last - first + 1 for first, last in runs) != len(ids):
            twice = next(token for token in ids if ids.count(token) > 1)
            raise SequenceWentBack(self.stream, twice, twice)
        for first, last in runs:
            at = bisect_right(self.firsts, last) - 1
            in_use = at >= 0 and self.opened[at][0] >= first
            if in_use or self.finished.overlaps(first, last) or self.heard.overlaps(first, last):
                raise SequenceWentBack(self.stream, first, last)

    def knows(self, id: int) -> bool:
        """Whether an ID above the position is open here, or finished; see `thinned`."""
        at = bisect_right(self.firsts, id) - 1
        return (at >= 0 and self.opened[at][0] >= id) or self.finished.overlaps(id, id)

    def give_up(self, ticket: Ticket) -> None:
        """``ticket`` will never be answered with an ID that is used. Again: nothing."""
        if ticket in self._tickets:
            del self._tickets[ticket]
            if not self._tickets:
                self.heard, self.thinned = Runs(), False
            self._settle()

    def complete_many(self, ids: Iterable[int]) -> None:
        """Finish IDs, in any order, committed or rolled back; the position may move. Again, or once fenced: nothing.

        Raises `ValueError` for an ID above every ID reserved here.
        """
        runs = runs_of(ids)
        if runs and runs[-1][1] > self.own_highest:
            raise ValueError(f"ID {runs[-1][1]} of stream {self.stream!r} was never reserved here")
        self.highest = max(self.highest, runs[-1][1] if runs else 0)
        self._finish(runs)

    def abandon(self, ids: Sequence[int]) -> None:
        """Finish IDs that no row has, though the claim was not looked at since they were reserved.

        The position does not move to them by themselves: a successor may have the name by now, and rows below. It moves
        over them with a later fact, or as the others are followed.
        """
        self._left = max(self._left, *ids, 0)
        self._finish(runs_of(ids), moves=False)

    def fenced(self, error: WriterFenced) -> None:
        """Take in that another process has the name: what is open stays open, the position stays."""
        self._fenced = self._fenced or error

    def stuck(self, now: float) -> list[StuckFact]:
        """Report what has been unfinished for ``stuck_after`` seconds or more, oldest first."""
        facts = [StuckFact(self.stream, None, now - ticket.since, ticket.owner) for ticket in self._tickets]
        for first, (last, ticket) in zip(self.firsts, self.opened, strict=True):
            facts.append(StuckFact(self.stream, first, now - ticket.since, ticket.owner, last))
        return sorted((fact for fact in facts if fact.age >= self.stuck_after), key=lambda fact: -fact.age)

    def rows_seen(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of another writer's published rows, ascending."""
        if tokens:
            self.announced(tokens[-1])
            if self._tickets:  # the sequence may give one of them again
                for first, last in runs_of(tokens)[-self.most_runs :]:
                    self.heard.add(first, last)
                if len(self.heard.starts) > self.most_runs:
                    self.heard.thin()

    def announced(self, position: int) -> None:
        """Take in another writer's position: announced, or of the registry."""
        self.highest = max(self.highest, position)

    def follow(self, noted: int) -> None:
        """Move the position to ``noted``, of `follows_to` and at most the sequence's value, once the claim was read
        unchanged in a transaction that is on the disk."""
        self.highest = max(self.highest, noted)
        self._move(min(noted, self.open_floor))

    def _finish(self, runs: Iterable[tuple[int, int]], *, moves: bool = True) -> None:
        """Complete whatever is open in ``runs``. ``moves``: the position may move there."""
        if self._fenced is not None:
            return
        firsts, opened, finished = self.firsts, self.opened, self.finished
        for first, last in runs:
            at = bisect_right(firsts, last) - 1
            while at >= 0 and opened[at][0] >= first:
                start, (end, ticket) = firsts[at], opened[at]
                low, high = max(first, start), min(last, end)
                left = [run for run in ((start, low - 1), (high + 1, end)) if run[0] <= run[1]]
                firsts[at : at + 1] = [run[0] for run in left]
                opened[at : at + 1] = [(run[1], ticket) for run in left]
                if moves:
                    finished.add(low, high)
                at -= 1
        if len(finished.starts) > self.most_runs + 2 * len(firsts):
            finished.thin(firsts)
            self.thinned = bool(self._tickets)
        self._settle()

    def _settle(self) -> None:
        """Move the position over what is finished."""
        if self.finished.starts:
            self._move(self.finished.largest_upto(self.open_floor))

    def _move(self, position: int) -> None:
        if position > self.position and self._fenced is None:
            self.position = position
            self.finished.drop_to(position)
            if self._on_moved is not None:
                self._on_moved(position)
