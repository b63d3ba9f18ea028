"""Reserve and complete: from finished IDs to positions.

protocol.md, section 5, and of section 9 the rules 1, 2, 3, 7, 8 and 15.

One `IdGenerator` per stream and process, pure: no clock, no SQL. What it knows of its own writer is a sorted
list of *barriers*, the unfinished: runs of open IDs, and reservations that were asked for and not answered.
Between two barriers only the largest finished ID is kept, for that is where the position goes once the lower
barrier falls. So memory grows with what is open, never with what has finished above it, and bulk reservations
cost one entry.

What it knows of everybody is their positions, and runs of IDs that are known complete, one by one.

IDs are positive inside and on the wire; `IdGenerator.table_id` says what a negative stream's table holds.

Longer than the other core files because start planning, the generator and its context managers share one
invariant: nothing here may step over an ID that can still be used.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType

import attrs

from busrep.errors import NotAWriter, PositionsAheadOfTable, SequenceWentBack, WriterFenced

MAX_KNOWN_RUNS = 10_000
"""Runs of complete IDs remembered above a hole: under 1 MB; what is forgotten waits for a registry read."""


@attrs.frozen
class Start:
    """Where a generator starts, and what the store has to do first.

    ``positions``: a proven position per registered writer. ``highest``: the largest ID known.
    ``repair_sequence_to``: if not None, the sequence must be set so that it gives larger IDs than this, and a
    warning logged. ``forget``: writers that left; what is stored of them must not serve a later registration
    under the same name (G12). IDs are positive, of negative streams too.
    """

    positions: Mapping[str, int]
    highest: int
    repair_sequence_to: int | None
    forget: tuple[str, ...]


def plan_start(
    *,
    stream: str,
    rows: Mapping[str, int],
    positions: Mapping[str, int],
    sequence: int,
    writers: Collection[str],
    own: str | None = None,
    negative: bool = False,
) -> Start:
    """Decide positions at start from one snapshot of the store.

    ``rows``: highest row ID per writer, of every writer with rows. ``positions``: the whole positions table.
    Both as they stand in the table, negative for a negative stream. ``sequence``: the last ID the sequence
    gave, 0 if none. ``writers``: the registry. ``own``: this process's writer name, only once its claim is
    won and committed.

    Rows prove a position for ``own`` alone (9.3), and the sequence proves nothing (9.8). A writer without a
    stored position was registered anew: ``own`` starts at the highest known ID, because a name that was never
    registered, or left, has nothing open; of any other nothing is proven yet. Raises `NotAWriter` if ``own``
    is not registered, `PositionsAheadOfTable` if the table is older than the positions.
    """
    if own is not None and own not in writers:
        raise NotAWriter(stream, own)
    sign = -1 if negative else 1
    proven = {writer: sign * position for writer, position in positions.items()}
    last_row = max((sign * row for row in rows.values()), default=0)
    last_proven = max(proven.values(), default=0)
    if last_proven > max(last_row, sequence):
        raise PositionsAheadOfTable(stream, last_proven, max(last_row, sequence))
    highest = max(last_row, last_proven)
    start = {writer: proven.get(writer, 0) for writer in writers}
    if own is not None:
        start[own] = max(proven[own], sign * rows.get(own, 0)) if own in proven else highest
    return Start(
        positions=start,
        highest=highest,
        repair_sequence_to=highest if sequence < highest else None,
        forget=tuple(sorted(proven.keys() - set(writers))),
    )


@attrs.frozen
class StuckFact:
    """Open IDs ``id``..``last``; ``id`` None: asked for, not answered. ``age`` is in seconds."""

    stream: str
    id: int | None
    age: float
    owner: str
    last: int | None = None


@attrs.frozen
class Noted:
    """What a generator knew before its claim and the registry were read (9.2, 9.7)."""

    highest: int
    positions: Mapping[str, int]


@attrs.frozen(eq=False)
class Ticket:
    """An unanswered reservation: no ID above ``known`` is finished while it may still be answered."""

    known: int
    count: int
    since: float
    owner: str


@attrs.define(eq=False)
class _Barrier:
    """Open IDs up to ``last``, or (no ``ticket``) ``asked`` tickets; ``peak``: the largest finished above."""

    ticket: Ticket | None
    last: int = 0
    asked: int = 0
    peak: int = 0


class ReservedIds(list[int]):
    """The IDs of one fact or bulk, ascending; what of them is still open completes when the block ends."""

    in_doubt = False
    unclaimed = False
    """Whether no transaction has held the claim since they were reserved: see `IdGenerator.abandon`."""

    def commit_sent(self) -> None:
        """Say that COMMIT goes out now: an exception from here on leaves the IDs open (9.1).

        Whoever then learns that the transaction has ended calls `IdGenerator.complete_many`.
        """
        self.in_doubt = True

    def outcome_known(self) -> None:
        """Say that the transaction has ended for certain: an exception completes the IDs again."""
        self.in_doubt = False


class _Runs:
    """Disjoint, not adjacent runs of IDs, ascending; of more than ``limit`` the lowest are forgotten."""

    __slots__ = ("ends", "limit", "starts")

    def __init__(self, limit: int) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.limit = limit

    def add(self, first: int, last: int) -> None:
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, first - 1)
        high = bisect_right(starts, last + 1)
        if low < high:
            first, last = min(first, starts[low]), max(last, ends[high - 1])
        starts[low:high] = (first,)
        ends[low:high] = (last,)
        if len(starts) > self.limit:
            del starts[0], ends[0]

    def overlaps(self, first: int, last: int) -> bool:
        at = bisect_left(self.ends, first)
        return at < len(self.starts) and self.starts[at] <= last

    def largest_below(self, bound: int) -> int:
        at = bisect_left(self.starts, bound) - 1
        return min(self.ends[at], bound - 1) if at >= 0 else 0

    def drop_to(self, bound: int) -> None:
        """Forget the runs that end at or below ``bound``."""
        at = bisect_right(self.ends, bound)
        del self.starts[:at], self.ends[:at]


def _runs_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Give the maximal runs of ``ids``, ascending."""
    ordered = sorted(set(ids))
    if ordered and ordered[-1] - ordered[0] + 1 == len(ordered):
        return [(ordered[0], ordered[-1])]
    runs: list[tuple[int, int]] = []
    for token in ordered:
        if runs and runs[-1][1] == token - 1:
            runs[-1] = (runs[-1][0], token)
        else:
            runs.append((token, token))
    return runs


class IdGenerator:
    """The IDs and positions of one stream, as one process sees them.

    Not thread-safe: hold a lock round each call.

    ``writer``: own name, None on a process that does not write the stream. ``start``, ``highest``: of
    `plan_start`. ``stuck_after``: seconds after which an open fact is reported. ``max_known_runs`` bounds
    what is remembered above a hole. ``on_moved``: called with the own position whenever that has moved.
    """

    def __init__(
        self,
        stream: str,
        writer: str | None,
        *,
        start: Mapping[str, int],
        highest: int,
        negative: bool = False,
        stuck_after: float = 60.0,
        max_known_runs: int = MAX_KNOWN_RUNS,
        on_moved: Callable[[int], None] | None = None,
    ) -> None:
        self._on_moved = on_moved
        self.stream, self.writer, self.negative, self.stuck_after = stream, writer, negative, stuck_after
        self._fenced: WriterFenced | None = None
        self._positions: dict[str, int] = dict(start)
        self._position = start.get(writer, 0) if writer is not None else 0
        self._highest = max(highest, *start.values(), 0)
        self._own_highest = 0
        self._open = 0
        # Sorted, parallel. Key of a run of open IDs: twice its first; of tickets: twice the known, plus 1.
        self._keys: list[int] = []
        self._barriers: list[_Barrier] = []
        self._tickets: dict[Ticket, None] = {}
        self._asking: set[asyncio.Future[Sequence[int]]] = set()
        # Own IDs finished while a ticket is unanswered: its answer may yet lie between them.
        self._late = _Runs(max_known_runs)
        self._upto = 0
        self._complete = _Runs(max_known_runs)  # above persisted_upto
        self.registry_read(self.noted(), start)

    @property
    def position(self) -> int:
        """Own position: the largest finished, or followed, ID below everything unfinished. Never falls."""
        return self._position

    @property
    def persisted_upto(self) -> int:
        """All IDs up to it, by any writer, are complete. Never falls."""
        return self._upto

    @property
    def highest(self) -> int:
        """The largest ID seen: reserved here, in a row, or announced; never read from the sequence (9.8)."""
        return self._highest

    @property
    def own_highest(self) -> int:
        """The largest ID that was reserved here; 0 if none was."""
        return self._own_highest

    @property
    def open(self) -> int:
        """How many reserved IDs are not finished."""
        return self._open

    @property
    def asked(self) -> int:
        """How many reservations are not answered."""
        return len(self._tickets)

    @property
    def open_floor(self) -> int:
        """The largest ID up to which this writer has nothing unfinished; ``highest`` when nothing is."""
        return (self._keys[0] - 1) // 2 if self._keys else self._highest

    def position_of(self, writer: str) -> int:
        """Give the position of ``writer`` as seen here: announced, or persisted_upto if that is larger."""
        return max(self.positions().get(writer, 0), self._upto)

    def positions(self) -> dict[str, int]:
        """Give the announced position of each registered writer, and the own one."""
        positions = dict(self._positions)
        if self.writer is not None and self.writer in positions:
            positions[self.writer] = max(positions[self.writer], self._position)
        return positions

    def table_id(self, token: int) -> int:
        """Give the ID as it stands in the table: negated for a negative stream (G17)."""
        return -token if self.negative else token

    # --- own IDs

    def ask(self, count: int = 1, *, now: float, owner: str = "") -> Ticket:
        """Note that ``count`` IDs are about to be asked of the sequence: call before asking.

        Raises `NotAWriter`, or `WriterFenced` once fenced. ``now``: seconds of any clock that does not go
        back.
        """
        if self._fenced is not None:
            raise WriterFenced(self._fenced.writer, self._fenced.incarnation)
        if self.writer is None or self.writer not in self._positions:
            raise NotAWriter(self.stream, self.writer)
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        known = self._highest
        ticket = Ticket(known, count, now, owner)
        self._tickets[ticket] = None
        key = 2 * known + 1
        if self._keys and self._keys[-1] == key:
            self._barriers[-1].asked += 1
        else:
            self._keys.append(key)
            self._barriers.append(_Barrier(None, 0, 1))
        return ticket

    def answer(self, ticket: Ticket, ids: Sequence[int]) -> None:
        """Open the IDs that the sequence gave for ``ticket``.

        Raises `SequenceWentBack` if one of them was known when they were asked for, or is in use;
        `ValueError` if there are not as many as were asked for, or the ticket is not open. Then none is used
        and the ticket given up.
        """
        if ticket not in self._tickets:
            raise ValueError("the ticket was answered or given up before")
        try:
            runs = [(ids[0], ids[0])] if len(ids) == 1 else _runs_of(ids)
            self._check(ticket, ids, runs)
            for first, last in runs:
                self._insert(first, last, ticket)
            self._own_highest = max(self._own_highest, runs[-1][1])
            self._highest = max(self._highest, self._own_highest)
            self._open += len(ids)
        finally:
            # Only now: until its answer stood in the list, the ticket kept the position below it.
            self.give_up(ticket)

    def give_up(self, ticket: Ticket) -> None:
        """Say that ``ticket`` will never be answered with an ID that is used. Again: nothing."""
        if ticket not in self._tickets:
            return
        del self._tickets[ticket]
        at = bisect_left(self._keys, 2 * ticket.known + 1)
        barrier = self._barriers[at]
        barrier.asked -= 1
        if not barrier.asked:
            del self._keys[at], self._barriers[at]
            self._raise_peak(at, barrier.peak)
        if self._late.starts:
            self._late.drop_to(next(iter(self._tickets)).known if self._tickets else self._own_highest)

    def complete(self, token: int) -> None:
        """Finish one ID, committed or rolled back; position and persisted_upto may move. Again: nothing.

        Raises `ValueError` for an ID above every ID reserved here. Once fenced it completes nothing (9.2).
        """
        if token > self._own_highest:
            raise ValueError(f"ID {token} of stream {self.stream!r} was never reserved here")
        if self._fenced is None:
            self._finish(token, token)

    def complete_many(self, ids: Iterable[int]) -> None:
        """Finish several IDs, in any order, as `complete` does; a contiguous run costs as much as one ID."""
        runs = _runs_of(ids)
        if runs and runs[-1][1] > self._own_highest:
            raise ValueError(f"ID {runs[-1][1]} of stream {self.stream!r} was never reserved here")
        if self._fenced is None:
            for first, last in runs:
                self._finish(first, last)

    def abandon(self, ids: Iterable[int]) -> None:
        """Finish IDs that no row has, though nobody has looked at the claim since they were reserved (9.2).

        They hold nothing up, but the position does not move to them by themselves: a successor may have the name by
        now, and rows below. It moves over them with a later fact, or as the others are followed.
        """
        if self._fenced is None:
            for first, last in _runs_of(ids):
                self._finish(first, last, moves=False)

    def finish(self, ids: ReservedIds) -> None:
        """Complete the IDs of a fact whose end is known, or abandon them where no claim was looked at."""
        if ids.unclaimed:
            self.abandon(ids)
        else:
            self.complete_many(ids)

    def fenced(self, error: WriterFenced) -> None:
        """Take in that another process has the name: what is open stays open, the own position stays."""
        if self._fenced is None and self.writer is not None:
            self._positions = self.positions()
            self._fenced = error

    def stuck(self, now: float) -> list[StuckFact]:
        """Report what has been unfinished for ``stuck_after`` seconds or more, oldest first."""
        facts = [StuckFact(self.stream, None, now - ticket.since, ticket.owner) for ticket in self._tickets]
        for key, barrier in zip(self._keys, self._barriers, strict=True):
            if barrier.ticket is not None:
                age = now - barrier.ticket.since
                facts.append(StuckFact(self.stream, key // 2, age, barrier.ticket.owner, barrier.last))
        return sorted((fact for fact in facts if fact.age >= self.stuck_after), key=lambda fact: -fact.age)

    # --- other writers

    def row_seen(self, writer: str, token: int) -> None:
        """Take in a row that ``writer`` published: its ID is complete, as is all that it wrote below."""
        self.rows_seen(writer, (token,))

    def rows_seen(self, writer: str, tokens: Sequence[int]) -> None:
        """Take in the tokens of a writer's published rows, in the order of the wire. Own echoes: nothing."""
        if not tokens or (writer == self.writer and self._fenced is None):
            return
        self.announced(writer, tokens[-1])
        # Of more runs than are remembered the lowest would be forgotten one by one, each at the cost of the whole list.
        runs = [(tokens[0], tokens[0])] if len(tokens) == 1 else _runs_of(tokens)
        for first, last in runs[-self._complete.limit :]:
            self._saw(first, last)

    def announced(self, writer: str, position: int) -> None:
        """Take in a bare POSITION: it counts in the minimum, but says nothing of single IDs (9.8)."""
        if writer != self.writer or self._fenced is not None:
            self.register(writer, position)

    def register(self, writer: str, position: int = 0) -> None:
        """Count ``writer`` in the minimum from now on, at a proven position (9.7)."""
        self._positions[writer] = max(self._positions.get(writer, 0), position)
        self._highest = max(self._highest, position)

    def leave(self, writer: str) -> None:
        """Stop counting ``writer``: only after it was fenced and finished (9.5, 9.7)."""
        self._positions.pop(writer, None)

    def noted(self) -> Noted:
        """Note what is known: call before the claim and the registry are read (9.2, 9.7)."""
        positions = self.positions()
        if self.writer is not None and self.writer in positions and self._fenced is None:
            positions[self.writer] = self.open_floor
        return Noted(self._highest, positions)

    def registry_read(self, noted: Noted, writers: Mapping[str, int]) -> None:
        """Take in the registry, read after ``noted`` was taken: writer -> stored position (0 if none).

        The own claim must have been seen unchanged in the same read; else call `fenced`. persisted_upto moves
        to the minimum of what was known *before* the read: who registered since then reserves above it (9.7).
        """
        for writer, position in writers.items():
            self.register(writer, position)
        for writer in self._positions.keys() - writers.keys():
            self.leave(writer)
        least = min(
            (max(noted.positions.get(writer, 0), position) for writer, position in writers.items()),
            default=noted.highest,
        )
        if least > self._upto:
            self._upto = least
            self._extend()

    def followable(self) -> int:
        """Note how far an idle writer may follow the others: before the own claim is read (9.2)."""
        return self.open_floor

    def follow(self, noted: int) -> None:
        """Move the own position to ``noted``, of `followable`, once the claim was read unchanged (9.2)."""
        if self._fenced is None:
            self._move(min(noted, self.open_floor))

    # --- context managers

    def reserve(
        self,
        next_ids: Callable[[int], Sequence[int]],
        count: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        owner: str = "",
    ) -> AbstractContextManager[ReservedIds]:
        """Reserve the IDs that ``next_ids(count)`` gives for a ``with`` block; its end completes them.

        An exception too, but not after `ReservedIds.commit_sent`, when it leaves them open (9.1), nor
        `WriterFenced`, which completes nothing (9.2). Raises on entry what `ask` and `answer` raise.
        """
        return _Reservation(self, next_ids, count, clock, owner)

    def reserve_async(
        self,
        next_ids: Callable[[int], Awaitable[Sequence[int]]],
        count: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        owner: str = "",
    ) -> AbstractAsyncContextManager[ReservedIds]:
        """Do as `reserve`, for ``async with``.

        Cancelled while asking, the question goes on alone: the IDs it brings are completed unused, so that
        they leave no hole, and until then it keeps the position back.
        """
        return _AsyncReservation(self, next_ids, count, clock, owner)

    # --- inside

    def _check(self, ticket: Ticket, ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Refuse IDs that cannot be new (9.15)."""
        if len(ids) != ticket.count:
            raise ValueError(f"stream {self.stream!r}: asked for {ticket.count} IDs, got {len(ids)}")
        if runs[0][0] <= ticket.known:
            raise SequenceWentBack(self.stream, runs[0][0], ticket.known)
        if sum(last - first + 1 for first, last in runs) != len(ids):
            twice = next(token for token in ids if ids.count(token) > 1)
            raise SequenceWentBack(self.stream, twice, twice)
        for first, last in runs:
            at = bisect_right(self._keys, 2 * last) - 1
            while at >= 0 and self._barriers[at].asked:
                at -= 1
            in_use = at >= 0 and self._barriers[at].last >= first
            if in_use or first <= self._upto or self._complete.overlaps(first, last):
                raise SequenceWentBack(self.stream, first, last)

    def _insert(self, first: int, last: int, ticket: Ticket) -> None:
        """Add a run of open IDs above the barrier of its own ticket; split it where another ticket stands."""
        at = bisect_right(self._keys, 2 * first)
        end = last
        if at < len(self._keys) and self._keys[at] < 2 * last:
            end = self._keys[at] // 2
            self._insert(end + 1, last, ticket)
        below = self._barriers[at - 1]
        barrier = _Barrier(ticket, end)
        if below.peak > first:
            barrier.peak = below.peak
            found = self._late.largest_below(first)
            below.peak = found if found > self._keys[at - 1] // 2 else 0
        self._keys.insert(at, 2 * first)
        self._barriers.insert(at, barrier)

    def _finish(self, first: int, last: int, *, moves: bool = True) -> None:
        """Complete whatever is open in ``first``..``last``. ``moves``: the position may move there."""
        keys, barriers = self._keys, self._barriers
        while first <= last:
            at = bisect_right(keys, 2 * last) - 1
            while at >= 0 and barriers[at].asked:
                at -= 1
            if at < 0 or barriers[at].last < first:
                return
            barrier, start = barriers[at], keys[at] // 2
            low, high = max(first, start), min(last, barrier.last)
            if high < barrier.last:
                keys.insert(at + 1, 2 * high + 2)
                barriers.insert(at + 1, _Barrier(barrier.ticket, barrier.last, 0, barrier.peak))
                barrier.peak = 0
            if moves:
                barrier.peak = max(barrier.peak, high)
            if low == start:
                del keys[at], barriers[at]
                self._raise_peak(at, barrier.peak)
            else:
                barrier.last = low - 1
            self._open -= high - low + 1
            if self._tickets:
                self._late.add(low, high)
            self._saw(low, high)
            last = low - 1

    def _raise_peak(self, at: int, peak: int) -> None:
        """Hand the largest finished ID above a fallen barrier to the one below, or to the position."""
        if at:
            below = self._barriers[at - 1]
            below.peak = max(below.peak, peak)
        else:
            self._move(peak)

    def _move(self, position: int) -> None:
        if position > self._position:
            self._position = position
            if self._on_moved is not None:
                self._on_moved(position)

    def _saw(self, first: int, last: int) -> None:
        """Take in complete IDs, by any writer."""
        if first > self._upto + 1:
            self._complete.add(first, last)
        elif last > self._upto:
            self._upto = last
            self._extend()

    def _extend(self) -> None:
        """Move persisted_upto over the run of complete IDs that it touches."""
        runs = self._complete
        touched = bisect_right(runs.starts, self._upto + 1)
        if touched:
            self._upto = max(self._upto, runs.ends[touched - 1])
            runs.drop_to(self._upto)

    def _leave_block(self, ids: ReservedIds, error: BaseException | None) -> None:
        if isinstance(error, WriterFenced):
            self.fenced(error)
        elif error is None or not ids.in_doubt:
            self.finish(ids)

    def _settle(self, ticket: Ticket, asking: asyncio.Future[Sequence[int]]) -> None:
        """Take in the answer to a question whose asker was cancelled."""
        self._asking.discard(asking)
        if asking.cancelled() or asking.exception() is not None:
            self.give_up(ticket)
            return
        # The asker is gone; a sequence that went back meets the next one.
        with suppress(SequenceWentBack, ValueError):
            self.answer(ticket, asking.result())
            self.abandon(asking.result())


@attrs.define(eq=False)
class _Reservation:
    """The context manager of `IdGenerator.reserve`."""

    generator: IdGenerator
    next_ids: Callable[[int], Sequence[int]]
    count: int
    clock: Callable[[], float]
    owner: str
    ids: ReservedIds = attrs.field(init=False)

    def __enter__(self) -> ReservedIds:
        ticket = self.generator.ask(self.count, now=self.clock(), owner=self.owner)
        try:
            ids = self.next_ids(self.count)
        except BaseException:
            self.generator.give_up(ticket)
            raise
        self.generator.answer(ticket, ids)
        self.ids = ReservedIds(sorted(ids))
        return self.ids

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.generator._leave_block(self.ids, error)


@attrs.define(eq=False)
class _AsyncReservation:
    """The context manager of `IdGenerator.reserve_async`."""

    generator: IdGenerator
    next_ids: Callable[[int], Awaitable[Sequence[int]]]
    count: int
    clock: Callable[[], float]
    owner: str
    ids: ReservedIds = attrs.field(init=False)

    async def __aenter__(self) -> ReservedIds:
        generator = self.generator
        ticket = generator.ask(self.count, now=self.clock(), owner=self.owner)
        try:
            asking = asyncio.ensure_future(self.next_ids(self.count))
        except BaseException:
            generator.give_up(ticket)
            raise
        try:
            await asyncio.wait((asking,))
        except asyncio.CancelledError:
            # The sequence may have given the IDs already. A set holds the task: event loops do it weakly.
            generator._asking.add(asking)
            asking.add_done_callback(lambda done: generator._settle(ticket, done))
            raise
        try:
            ids = asking.result()
        except BaseException:
            generator.give_up(ticket)
            raise
        generator.answer(ticket, ids)
        self.ids = ReservedIds(sorted(ids))
        return self.ids

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.generator._leave_block(self.ids, error)
