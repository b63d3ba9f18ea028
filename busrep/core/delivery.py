"""What the reader hands out, and the queue in which it waits: one queue per (stream, writer), in order.

A queue holds chunks (rows, or a bare step of the position) and notices (a reset, rows that are gone). The position
*received* is where the last chunk ends, the position *delivered* is where the last handled batch ended; savers, waiters
and linear consumers look at the delivered one only (protocol.md, section 9, last paragraph).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from .framing import ROW_OVERHEAD

# Tokens of a foreign writer that are remembered: a row that is late by more counts as a repetition.
RECENT_TOKENS = 1_000


@attrs.frozen
class RawBatch:
    """Rows of one (stream, writer) to be handled together: whole facts, tokens ascending, one token a row."""

    stream: str
    writer: str
    after: int  # where the previous batch ended
    position: int  # once this is handled, everything of this writer up to here has been
    tokens: Sequence[int]
    payloads: Sequence[bytes]  # the rows as JSON
    fetched: bool  # they come from a source, not from the wire
    size: int


@attrs.frozen
class Reset:
    """The stream of this writer began anew (an in-memory stream, or another epoch): positions restart here."""

    stream: str
    writer: str
    position: int


@attrs.frozen
class Missed:
    """Rows in (``after``, ``upto``] cannot be had: there is no source for the stream, or they are pruned.

    ``certain``: whether there were any. A foreign writer's tokens skip, for its sequence numbers others' rows too.
    """

    stream: str
    writer: str
    after: int
    upto: int
    certain: bool = attrs.field(default=True, eq=False)


@attrs.define(eq=False)
class RecentTokens:
    """The tokens last taken in of one foreign writer: they tell a row that comes late from one that is repeated."""

    _floor: int  # what was taken in up to here is not known
    _tokens: deque[int] = attrs.field(factory=deque, init=False)

    def add(self, tokens: Sequence[int]) -> None:
        """These were taken in; they ascend."""
        known = self._tokens
        if len(tokens) > RECENT_TOKENS:
            known.clear()
            self._floor = tokens[-RECENT_TOKENS - 1]
        known.extend(tokens[-RECENT_TOKENS:])
        while len(known) > RECENT_TOKENS:
            self._floor = known.popleft()

    def late(self, tokens: Sequence[int]) -> list[int]:
        """Those of them that were never taken in, as far as it is known."""
        known = set(self._tokens)
        return [token for token in tokens if token > self._floor and token not in known]


@attrs.define
class Chunk:
    """Consecutive rows, or none, that end at ``upto``."""

    tokens: Sequence[int]
    payloads: Sequence[bytes]
    upto: int
    fetched: bool
    size: int


@attrs.define(eq=False)
class DeliveryQueue:
    """Chunks and notices of one (stream, writer) between receipt and handling."""

    stream: str
    writer: str
    delivered: int
    size: int = 0  # bytes in memory, the batch being handled included
    handling: RawBatch | Reset | Missed | None = None
    _entries: deque[Chunk | Reset | Missed] = attrs.field(factory=deque, init=False)

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def noticed(self) -> bool:
        """Whether a notice waits here: rows that are gone, or a reset."""
        return any(not isinstance(entry, Chunk) for entry in self._entries)

    def put(self, tokens: Sequence[int], payloads: Sequence[bytes], upto: int, *, fetched: bool) -> int:
        """Append rows that end at ``upto`` (bare step without rows); return the bytes they hold."""
        if not tokens:
            if self._entries and isinstance(last := self._entries[-1], Chunk):
                last.upto = upto
            elif self._entries or self.handling is not None:
                self._entries.append(Chunk((), (), upto, False, 0))
            else:
                self.delivered = upto
            return 0
        size = sum(map(len, payloads)) + ROW_OVERHEAD * len(payloads)
        self._entries.append(Chunk(tokens, payloads, upto, fetched, size))
        self.size += size
        return size

    def notice(self, notice: Reset | Missed) -> None:
        """Append a notice, to be handled in its turn. Of resets that nobody was told of, the last will do, and of
        losses with no row between them one: a handler that hangs must not cost memory with each."""
        if isinstance(notice, Reset):
            self._entries.clear()
        else:
            notice = self._joined(notice)
        self._entries.append(notice)

    def _joined(self, missed: Missed) -> Missed:
        """``missed``, with what was missed right before it and waits, which is taken from the queue."""
        entries = self._entries
        # Between the two there may be a step without rows: that there were none in it is not worth an entry.
        step = entries.pop() if entries and isinstance(last := entries[-1], Chunk) and not last.tokens else None
        if entries and isinstance(before := entries[-1], Missed):
            entries.pop()
            certain = before.certain or missed.certain
            return attrs.evolve(missed, after=before.after, certain=certain)
        if step is not None:
            entries.append(step)
        return missed

    def take(self, most_rows: int) -> RawBatch | Reset | Missed | None:
        """The next thing to handle: a notice, or a batch of at most ``most_rows`` rows (more only for one fact). Small
        chunks are joined, so that a handler that lags behind gets fewer, larger batches."""
        if self.handling is not None or not self._entries:
            return None
        first = self._entries.popleft()
        if not isinstance(first, Chunk):
            self.handling = first
            return first
        first = self._cut(first, most_rows)
        tokens, payloads, size, upto = first.tokens, first.payloads, first.size, first.upto
        if self._joinable(first, len(tokens), most_rows):
            tokens, payloads = list(tokens), list(payloads)
            while (more := self._joinable(first, len(tokens), most_rows)) is not None:
                self._entries.popleft()
                tokens += more.tokens
                payloads += more.payloads
                size, upto = size + more.size, more.upto
        batch = RawBatch(self.stream, self.writer, self.delivered, upto, tokens, payloads, first.fetched, size)
        self.handling = batch
        return batch

    def _joinable(self, first: Chunk, rows: int, most_rows: int) -> Chunk | None:
        following = self._entries[0] if self._entries else None
        if not isinstance(following, Chunk) or rows + len(following.tokens) > most_rows:
            return None
        return following if following.fetched == first.fetched or not following.tokens else None

    def _cut(self, chunk: Chunk, most_rows: int) -> Chunk:
        """Cut ``chunk`` behind the last whole fact within ``most_rows`` rows; put the rest back."""
        tokens, cut = chunk.tokens, most_rows
        if len(tokens) <= most_rows:
            return chunk
        while cut > 0 and tokens[cut] == tokens[cut - 1]:
            cut -= 1
        if cut == 0:  # the first fact alone is larger
            cut = next((i for i in range(most_rows, len(tokens)) if tokens[i] != tokens[0]), len(tokens))
        if cut == len(tokens):
            return chunk
        head = chunk.payloads[:cut]
        size = sum(map(len, head)) + ROW_OVERHEAD * cut
        rest = Chunk(tokens[cut:], chunk.payloads[cut:], chunk.upto, chunk.fetched, chunk.size - size)
        self._entries.appendleft(rest)
        return Chunk(tokens[:cut], head, tokens[cut - 1], chunk.fetched, size)

    def done(self) -> int:
        """What was taken has been handled: move ``delivered``; return the bytes freed."""
        handled, self.handling = self.handling, None
        freed = 0
        if isinstance(handled, RawBatch):
            self.delivered, freed = handled.position, handled.size
        elif isinstance(handled, Missed):
            self.delivered = handled.upto
        self.size -= freed
        # Steps behind what was handled need no handler: nothing stands between them and the delivered position.
        while self._entries and isinstance(first := self._entries[0], Chunk) and not first.tokens:
            self.delivered = first.upto
            self._entries.popleft()
        return freed

    def put_back(self) -> None:
        """Undo the last ``take``: the same rows come again, cut as the next ``take`` asks."""
        batch, self.handling = self.handling, None
        if isinstance(batch, RawBatch):
            self._entries.appendleft(Chunk(batch.tokens, batch.payloads, batch.position, batch.fetched, batch.size))

    def clear(self) -> int:
        """Drop all that waits, and what is being handled; return the bytes freed. A reset is still to be told of."""
        freed, self.size, self.handling = self.size, 0, None
        resets = [entry for entry in self._entries if isinstance(entry, Reset)]
        self._entries = deque(resets)
        return freed
