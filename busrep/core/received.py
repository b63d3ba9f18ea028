"""What one (stream, writer) has received: lines that are held until what is before them has passed, and the rows that
were taken in, in order and no row twice, and wait to be handled."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import attrs

from .catchup import Key
from .commands import Position
from .delivery import DeliveryQueue, Missed, RecentTokens, Reset
from .framing import Rows
from .intake import Intake

# What was said, the incarnation that said it (None: foreign), and its bytes in memory.
Line = tuple[Rows | Position, int | None, int]
LINE_OVERHEAD = 200  # bytes of the line object itself


@attrs.frozen
class Followed:
    """How one stream is followed."""

    name: str
    resettable: bool = False
    fetchable: bool = True  # a source exists that can answer for it
    from_now: bool = False  # a writer first heard begins at the position that it tells, not at 0
    foreign_writers: bool = False  # declared to have writers that no registry lists, and that never say an incarnation

    @property
    def durable(self) -> bool:
        """Whether its positions are of a log, and can be saved."""
        return self.fetchable and not self.resettable


@attrs.define(eq=False)
class ReceivedRows:
    """Every row up to ``position`` has been taken in; those to be handled wait in ``queue``."""

    _intake: Intake
    stream: Followed
    writer: str
    position: int
    key: Key = attrs.field(init=False)
    queue: DeliveryQueue = attrs.field(init=False)
    native: bool = False  # whether the last line that counted said an incarnation
    open: list[bytes] = attrs.field(factory=list)  # `batch` rows whose number has not come yet
    open_size: int = 0
    _recent: RecentTokens | None = None  # of a foreign writer

    def __attrs_post_init__(self) -> None:
        self.key = self.stream.name, self.writer
        self.queue = DeliveryQueue(*self.key, self.position)

    def _below(self, tokens: list[int]) -> None:
        """Rows at or below the position: repeated ones, or late ones of a foreign writer, whose order nothing proves.
        A late one is not delivered: its place has passed, and the position says that it was handled."""
        late = [] if self._recent is None else self._recent.late(tokens)
        self._intake.counters.late_rows += len(late)
        self._intake.counters.duplicates_dropped += len(tokens) - len(late)
        if late:
            reason = "came late, below the position, and is not delivered: see late_rows in statistics()"
            self._intake.report(f"RDATA {self.stream.name} {self.writer} {late[0]}", "row", reason)

    def _take_rows(self, tokens: list[int], payloads: list[bytes]) -> int:
        """Take in what is new of rows that follow. Gives their last token when there is no room, else 0."""
        intake = self._intake
        if self.open and tokens:
            tokens = [tokens[0]] * len(self.open) + tokens
            payloads = self.open + payloads
            self.open, self.open_size = [], 0
        if tokens and tokens[0] <= self.position:
            fresh = bisect_right(tokens, self.position)
            self._below(tokens[:fresh])
            tokens, payloads = tokens[fresh:], payloads[fresh:]
        if not tokens:
            return 0
        if intake.queue_bytes > intake.settings.receive_queue_bytes:
            intake.counters.overflows += 1
            intake.counters.rows_dropped += len(tokens)
            return tokens[-1]
        intake.counters.rows_received += len(tokens)
        self._take_in(tokens, payloads, tokens[-1], fetched=False)
        return 0

    def _close_batch(self) -> None:
        """Rule 9.14: any POSITION, and any disconnect, ends a batch whose last row has not come."""
        if self.open:
            self._intake.counters.rows_dropped += len(self.open)
            self.open, self.open_size = [], 0

    def _take_in(self, tokens: list[int], payloads: list[bytes], upto: int, *, fetched: bool) -> None:
        if self.native:
            self._recent = None
        elif tokens:
            if self._recent is None:
                self._recent = RecentTokens(self.position)
            self._recent.add(tokens)
        self.position, intake = upto, self._intake
        intake.queue_bytes += self.queue.put(tokens, payloads, upto, fetched=fetched)
        if intake.queue_bytes > intake.queue_bytes_peak:
            intake.queue_bytes_peak = intake.queue_bytes
        if self.queue:
            intake.ready[self.key] = None

    def _miss(self, upto: int) -> None:
        """The rows up to there are not to be had: the handler is told."""
        self._intake.counters.missed += 1
        certain = self.stream.durable or self.native
        self._notice(Missed(self.stream.name, self.writer, self.position, upto, certain))
        self.position, self._recent = upto, None

    def _notice(self, notice: Reset | Missed) -> None:
        self.queue.notice(notice)
        self._intake.ready[self.key] = None

    def _empty(self) -> None:
        self._intake.queue_bytes -= self.queue.clear()
        if not self.queue:
            self._intake.ready.pop(self.key, None)

    def done(self) -> None:
        """What was taken from the queue has been handled."""
        self._intake.queue_bytes -= self.queue.done()
        if self.queue:
            self._intake.ready[self.key] = None


def end_of(item: Rows | Position) -> int:
    """How far a line says that its writer is; 0 when it does not."""
    return item.new if isinstance(item, Position) else item.tokens[-1] if item.tokens else 0


@attrs.define(eq=False)
class HeldLines:
    """The lines held of one (stream, writer), in order (rule 9.13)."""

    intake: Intake
    lines: deque[Line] = attrs.field(factory=deque)
    size: int = 0
    # Held for a bootstrap: then full_sync_buffer_limit bounds them, all streams together; otherwise held_bytes bounds
    # those of one (stream, writer).
    buffered: bool = False
    overflowed: bool = False  # a line was dropped, so every line after it is dropped too

    def __bool__(self) -> bool:
        return bool(self.lines)

    @property
    def end(self) -> int:
        """How far these lines say that the writer is."""
        return max((end_of(item) for item, _, _ in self.lines), default=0)

    def overflows(self, item: Rows | Position) -> bool:
        """Whether there is no room for this line; then there is none for those after it."""
        size = item.size if isinstance(item, Rows) else 0
        if self.buffered:
            full = self.intake.buffer_bytes + size + LINE_OVERHEAD > self.intake.settings.full_sync_buffer_limit
        else:
            full = self.size + size > self.intake.settings.held_bytes
        if full and not self.overflowed:
            self.overflowed = True
            self.intake.counters.overflows += 1
        return self.overflowed

    def append(self, item: Rows | Position, incarnation: int | None) -> None:
        """Hold one more line."""
        # Heartbeats of a catch-up that lasts for hours must not pile up: a repeated POSITION says nothing new.
        if isinstance(item, Position) and self.lines and self.lines[-1][0] == item:
            return
        cost = LINE_OVERHEAD + (item.size if isinstance(item, Rows) else 0)
        self.lines.append((item, incarnation, cost))
        self._resize(self.size + cost)

    def take_out(self) -> HeldLines:
        """Empty this, and return what was in it, which no bound counts: these lines are about to be passed on."""
        taken = HeldLines(self.intake, self.lines, self.size, overflowed=self.overflowed)
        self.clear()
        return taken

    def popleft(self) -> tuple[Rows | Position, int | None]:
        """The oldest line, which is held no longer."""
        item, incarnation, cost = self.lines.popleft()
        self._resize(self.size - cost)
        return item, incarnation

    def put_back(self, rest: HeldLines) -> None:
        """Hold again what could not be passed on."""
        self._resize(rest.size)
        self.lines, self.overflowed = rest.lines, rest.overflowed

    def clear(self) -> None:
        """Drop everything."""
        self._resize(0)
        self.lines, self.overflowed = deque(), False

    def _resize(self, size: int) -> None:
        if self.buffered:
            self.intake.buffer_bytes += size - self.size
            self.intake.buffer_bytes_peak = max(self.intake.buffer_bytes_peak, self.intake.buffer_bytes)
        self.size = size
