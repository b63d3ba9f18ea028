"""The chain of frames of one stream of a writer, and the facts that are on their way into it.

A fact is *held*, then *ready*, and then *composed* into a frame: see `writer`. Rows that will not be published (the
queue was full, the fact is larger than a frame) are stepped over with ``POSITION stream writer new new``: ``prev new``
would say that there are none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import attrs

from busrep.core.commands import Position, Rdata
from busrep.streams import Stream

# What a waiting fact costs beside its bytes: tuple, number, bytes header, its places in dict, heap and deque.
FACT_BYTES = 250

# Digits of the largest 64-bit number: how much a number may take up in a line whose space is set aside.
DIGITS = 19

# token, its RDATA lines joined (None: more than a frame holds), how many rows (0: the fact wrote none).
_Fact = tuple[int, bytes | None, int]


@attrs.define
class Draft:
    """A frame being composed: what it holds, and the bytes and rows it has room for."""

    room: int
    rows_left: int
    heads_left: int
    lines: list[bytes] = attrs.field(factory=list)
    ends: dict[str, int] = attrs.field(factory=dict)
    full: bool = False


class Chain:
    """One stream of a writer: facts on their way, and how far the chain of frames reaches.

    ``start``: where the chain begins, proven. ``room``: bytes that a frame has for lines. ``most_rows``: rows that it
    takes. A fact that one frame cannot hold is not published: readers are told to fetch it.
    """

    def __init__(self, stream: Stream[Any], writer: str, start: int, *, room: int, most_rows: int) -> None:
        self.stream = stream
        self.line = Position(stream.name, writer, 0, 0).format().removesuffix(b"0 0")
        self.line_bytes = len(self.line) + 2 * DIGITS + 2
        self.rdata = Rdata(stream.name, writer, 0, None).format().removesuffix(b"0 null")
        self.largest = room - 2 * self.line_bytes - 1  # bytes of the largest fact that a frame can hold
        self.most_rows = most_rows
        self.composed = self.sent = start
        self.position = start  # as the ID generator proved it
        self.own = start  # highest ID of an own completed fact at or below position
        self.dropped = start  # no row at or below it that is not composed yet will be published
        self.may_follow = True
        self.moved = False  # something went out that no beat has announced yet
        self.held: dict[int, list[_Fact]] = {}  # runs of facts without a gap, by the first token
        self.tokens: list[int] = []  # the keys of held, as a heap
        self.ready: deque[_Fact] = deque()
        self.queued_bytes = self.rows_dropped = self.facts_too_large = 0

    @property
    def goal(self) -> int:
        """Where the chain may end now. Others' progress counts only on a stream that follows (W6)."""
        if self.stream.follows or self.dropped > self.position:
            return self.position
        return max(self.own, self.composed)

    def due(self) -> bool:
        """Whether there is something to publish. Others' progress alone is told once a beat."""
        if self.ready or self.composed < self.own:
            return True
        return self.composed < self.goal and (self.may_follow or self.composed < self.dropped)

    def hold(self, token: int, payloads: Sequence[bytes]) -> int:
        """Take over a completed fact; gives the bytes it occupies."""
        if token <= self.position or token in self.held:
            # Readers may be past it already: carried now or not, it would be lost without anyone noticing.
            name = self.stream.name
            raise ValueError(f"stream {name!r}: {token} completed twice, or after position {self.position}")
        rows = len(payloads)
        if token <= self.dropped:
            self.rows_dropped += rows
            return 0
        lines: bytes | None = b""
        if rows == 1:
            lines = b"%b%d %b" % (self.rdata, token, payloads[0])
        elif rows > self.most_rows:
            lines = None
        elif rows:
            batch = b"\n%bbatch " % self.rdata
            lines = b"%b\n%b%d %b" % (batch[1:] + batch.join(payloads[:-1]), self.rdata, token, payloads[-1])
        if lines is None or len(lines) > self.largest:
            lines = None
            self.facts_too_large += 1
        return self._keep([(token, lines, rows)])

    def hold_run(self, first: int, payloads: Sequence[bytes]) -> int:
        """Take over facts of one row each, numbered from ``first`` on without a gap, if nothing speaks against taking
        all of them; gives the bytes they occupy, or 0."""
        rdata = self.rdata
        fits = max(map(len, payloads)) + len(rdata) + DIGITS + 1 <= self.largest
        if not fits or first <= max(self.position, self.dropped) or first in self.held:
            return 0
        lines = [b"%b%d %b" % (rdata, token, payload) for token, payload in enumerate(payloads, first)]
        return self._keep([(token, line, 1) for token, line in enumerate(lines, first)])

    def _keep(self, facts: list[_Fact]) -> int:
        self.held[facts[0][0]] = facts
        heappush(self.tokens, facts[0][0])
        cost = FACT_BYTES * len(facts) + sum(len(lines or b"") for _, lines, _ in facts)
        self.queued_bytes += cost
        return cost

    def _next(self, position: int) -> list[_Fact]:
        """The lowest of the held facts, with what follows it without a gap, as far as ``position`` reaches."""
        if not self.tokens or self.tokens[0] > position:
            return []
        first = heappop(self.tokens)
        facts = self.held.pop(first)
        if facts[-1][0] > position:
            heappush(self.tokens, position + 1)
            self.held[position + 1] = facts[position + 1 - first :]
            facts = facts[: position + 1 - first]
        return facts

    def move(self, position: int) -> int:
        """Every fact up to ``position`` has ended: line them up. Gives the bytes set free."""
        self.position = position
        freed = 0
        while facts := self._next(position):
            self.own = facts[-1][0]
            if facts[0][2]:
                self.ready.extend(facts)
            else:
                freed += FACT_BYTES
        if self.own < self.dropped <= position:
            self.own = self.dropped
        self.queued_bytes -= freed
        return freed

    def drop(self) -> int:
        """Forget all waiting facts; readers will be told to fetch them. Gives the bytes set free."""
        facts = [*self.ready, *[fact for run in self.held.values() for fact in run]]
        self.dropped = max((fact[0] for fact in facts), default=self.dropped)
        self.rows_dropped += sum(fact[2] for fact in facts)
        self.ready.clear()
        self.held.clear()
        self.tokens.clear()
        freed, self.queued_bytes = self.queued_bytes, 0
        return freed

    def take(self, draft: Draft) -> int:
        """Move what fits into the draft, each run of rows behind its own head. Gives the bytes set free."""
        room = draft.room - 2 * self.line_bytes  # set aside for the first head and the last line
        if room < 0 or draft.heads_left <= 0:
            draft.full = True
            return 0
        lines, ready, at, freed, headed = draft.lines, self.ready, self.composed, 0, False
        stepped_over = at < self.dropped
        at = max(at, self.dropped)
        while ready:
            token, rdata, rows = ready[0]
            if rdata is None:
                stepped_over, headed = True, False
                room -= self.line_bytes  # another head
                freed += FACT_BYTES
            else:
                size = len(rdata) + 1
                if size > room or rows > draft.rows_left or (not headed and draft.heads_left <= 0):
                    draft.full = True
                    break
                if not headed:
                    draft.heads_left -= 1
                    lines.append(b"%b%d %d" % (self.line, at, at))
                    stepped_over, headed = False, True
                lines.append(rdata)
                room -= size
                draft.rows_left -= rows
                freed += FACT_BYTES + size - 1
            ready.popleft()
            at = token
        draft.room = room
        self._end(draft, at, stepped_over)
        self.queued_bytes -= freed
        return freed

    def _end(self, draft: Draft, at: int, stepped_over: bool) -> None:
        """Close this stream's part of the draft, now at ``at``, with the progress beyond its last row."""
        end = at if self.ready else self.goal
        if stepped_over:
            draft.lines.append(b"%b%d %d" % (self.line, end, end))
        elif end > at:
            draft.lines.append(b"%b%d %d" % (self.line, at, end))
        if end > self.composed:
            draft.ends[self.stream.name] = end
        self.moved = self.moved or stepped_over or end > self.composed
        if self.composed >= self.own:
            self.may_follow = False
        self.composed = end

    def statistics(self) -> dict[str, int]:
        """Where the chain stands, and how many facts wait."""
        return {
            "sent": self.sent,
            "composed": self.composed,
            "position": self.position,
            "ready": len(self.ready),
            "held": sum(map(len, self.held.values())),
        }
