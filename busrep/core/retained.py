"""Rows of a resettable stream that its writer keeps in memory until every expected consumer has acknowledged them.

It takes the same inputs as the writer core (``fact_completed``, ``rows_completed``, ``position_moved``), and answers
the one question of catch-up. A row is

    waiting      completed; an earlier fact of this writer is still open
    kept         proven by the position; it is handed out by ``fetch``
    gone         acknowledged by all, or dropped over the bound: at or below ``floor``

A resettable stream's tokens begin again with each incarnation of its writer. An acknowledgement of the life before
could let go of rows that nobody has seen: so one that names another incarnation is refused, and one that names none
(FEDERATION_ACK has no field for it) as far as it is ahead of the position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import attrs

from ..errors import ConfigError, PositionTooOld, UnknownStream
from .catchup import FetchUpdates, UpdatesPage

# What a fact costs beside its rows' bytes: token, tuple, list entries, bytes headers.
FACT_BYTES = 200


@attrs.define
class RetainedCounters:
    """What was kept so far, and what became of it."""

    rows_kept: int = 0
    rows_acknowledged: int = 0
    rows_dropped: int = 0
    acks: int = 0
    acks_refused: int = 0
    acks_unexpected: int = 0


class RetainedRows:
    """The rows of one resettable stream of one writer, kept for ``expected`` instances.

    ``max_bytes`` and ``max_rows`` bound what is kept; over them the oldest facts go, counted in ``rows_dropped``, and
    who asks for them gets PositionTooOld. ``epoch`` is what its pages name. Raises ConfigError.
    """

    def __init__(
        self,
        stream: str,
        writer: str,
        *,
        incarnation: int,
        expected: Iterable[str],
        max_bytes: int,
        max_rows: int,
        epoch: str = "",
    ) -> None:
        if max_bytes < 1 or max_rows < 1:
            raise ConfigError(f"max_bytes={max_bytes!r}, max_rows={max_rows!r}: both 1 or more")
        self.stream, self.writer, self.incarnation = stream, writer, incarnation
        self.position = 0  # every own fact up to here has ended
        self.floor = 0  # the highest token that is gone; never above ``position``
        self.bytes = self.rows = 0  # held now
        self.counters = RetainedCounters()
        self._max_bytes, self.max_rows, self._epoch = max_bytes, max_rows, epoch
        self._acknowledged: dict[str, int] = dict.fromkeys(expected, 0)
        if not self._acknowledged:
            raise ConfigError("expected=: name the instances that acknowledge, or nothing would ever be kept")
        self._tokens: list[int] = []
        self._facts: list[Sequence[bytes]] = []
        self.waiting: dict[int, Sequence[bytes]] = {}
        self._order: list[int] = []  # the keys of ``waiting``, as a heap
        self._dropped = 0  # the highest token that was dropped while it waited

    def fact_completed(self, stream: str, token: int, payloads: Sequence[bytes]) -> None:
        """A fact has ended, with these rows or none. In any order, each before the position moves over it.

        Raises UnknownStream, and ValueError for one that is completed already or that the position has passed.
        """
        self._check(stream)
        if token <= self.position or token in self.waiting:
            raise ValueError(f"stream {stream!r}: {token} completed twice, or after position {self.position}")
        if payloads:
            kept = tuple(payloads)
            self.counters.rows_kept += len(kept)
            if token <= self._dropped:  # what follows it is gone: it would be a page with a hole
                self.counters.rows_dropped += len(kept)
                return
            self.waiting[token] = kept
            heappush(self._order, token)
            self._count(kept, 1)
            # Over the bound the oldest facts go: those kept, then those that wait for an open one.
            while self.rows > self.max_rows or self.bytes > self._max_bytes:
                if self._tokens:
                    self.counters.rows_dropped += self._remove(self._tokens[0])
                else:
                    self._dropped = heappop(self._order)
                    self.counters.rows_dropped += self._count(self.waiting.pop(self._dropped), -1)

    def rows_completed(self, stream: str, tokens: Sequence[int], payloads: Sequence[bytes]) -> None:
        """As ``fact_completed``, for many facts of one row each."""
        for token, payload in zip(tokens, payloads, strict=True):
            self.fact_completed(stream, token, (payload,))

    def position_moved(self, stream: str, position: int) -> None:
        """All own facts up to ``position`` have ended, and were told here before. A lower one is ignored."""
        self._check(stream)
        if position <= self.position:
            return
        self.position = position
        while self._order and self._order[0] <= position:
            token = heappop(self._order)
            self._tokens.append(token)
            self._facts.append(self.waiting.pop(token))
        if self._dropped:
            self.counters.rows_dropped += self._remove(min(self._dropped, position))
        self._trim()

    def _check(self, stream: str) -> None:
        if stream != self.stream:
            raise UnknownStream(stream, (self.stream,))

    def acknowledged(self, instance: str, token: int, incarnation: int | None = None) -> bool:
        """An instance has handled everything up to ``token`` of that incarnation; whether that was believed."""
        if instance not in self._acknowledged:
            self.counters.acks_unexpected += 1
            return False
        if incarnation not in (None, self.incarnation) or not 0 <= token <= self.position:
            self.counters.acks_refused += 1
            return False
        self.counters.acks += 1
        self._acknowledged[instance] = max(self._acknowledged[instance], token)
        self._trim()
        return True

    def expect(self, instance: str) -> None:
        """Keep rows for one instance more, from now on."""
        self._acknowledged.setdefault(instance, self.floor)

    def give_up(self, instance: str) -> None:
        """Keep nothing for this instance any more. Raises ConfigError when it is the last one, or not expected."""
        if set(self._acknowledged) <= {instance} or instance not in self._acknowledged:
            raise ConfigError(f"instance {instance!r} is the last one expected, or is not; expect another one first")
        del self._acknowledged[instance]
        self._trim()

    @property
    def positions(self) -> dict[str, int]:
        """What each expected instance has acknowledged."""
        return dict(self._acknowledged)

    def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """The page that is asked for; it names the own incarnation, and proves nothing about another.

        Raises PositionTooOld when rows of it are gone, ConfigError when another writer's rows are asked for.
        """
        after = question.after
        if (question.stream, question.writer) != (self.stream, self.writer):
            raise ConfigError(
                f"({question.stream}, {question.writer}) is not kept here, but ({self.stream}, {self.writer}) is: "
                "ask the process that writes it"
            )
        upto = max(after, min(question.upto, self.position))
        if question.incarnation not in (None, self.incarnation):
            upto = after
        if after < min(upto, self.floor):
            raise PositionTooOld(self.stream, self.writer, after, self.floor, self._epoch)
        first, end = bisect_right(self._tokens, after), bisect_right(self._tokens, upto)
        last, rows = first, 0
        for at in range(first, end):  # at least one fact, and facts go whole
            rows += len(self._facts[at])
            if rows > question.limit and at > first:
                break
            last = at + 1
        tokens, facts = self._tokens[first:last], self._facts[first:last]
        return UpdatesPage(
            stream=self.stream,
            writer=self.writer,
            after=after,
            upto=tokens[-1] if last < end else upto,
            tokens=[token for token, rows in zip(tokens, facts, strict=True) for _ in rows],
            payloads=[row for rows in facts for row in rows],
            limited=last < end,
            epoch=self._epoch,
            incarnation=self.incarnation,
        )

    def _count(self, payloads: Sequence[bytes], sign: int) -> int:
        self.rows += sign * len(payloads)
        self.bytes += sign * (FACT_BYTES + sum(map(len, payloads)))
        return len(payloads)

    def _trim(self) -> None:
        self.counters.rows_acknowledged += self._remove(min(self._acknowledged.values()))

    def _remove(self, upto: int) -> int:
        """Remove what is kept up to there; how many rows they were."""
        self.floor = max(self.floor, upto)
        end = bisect_right(self._tokens, upto)
        rows = sum(self._count(payloads, -1) for payloads in self._facts[:end])
        del self._tokens[:end], self._facts[:end]
        return rows

    def statistics(self) -> dict[str, object]:
        """Counters since the start and levels now, JSON-able."""
        return {
            **attrs.asdict(self.counters),
            "position": self.position,
            "floor": self.floor,
            "rows": self.rows,
            "bytes": self.bytes,
            "acknowledged": self.positions,
        }
