"""Lines that a reader holds until what is before them has passed."""

from __future__ import annotations

from collections import deque

import attrs

from .commands import Position
from .framing import Rows
from .intake import Intake

Line = tuple[Rows | Position, int | None, int]
"""What was said, the incarnation that said it (None: foreign), and its bytes in memory."""

# Bytes of the line object itself.
LINE_OVERHEAD = 200


def end_of(item: Rows | Position) -> int:
    """How far a line says that its writer is; 0 when it does not."""
    return item.new if isinstance(item, Position) else item.tokens[-1] if item.tokens else 0


@attrs.define(eq=False)
class HeldLines:
    """The lines held of one (stream, writer), in order (rule 9.13).

    ``buffered``: they are held for a bootstrap. Then ``full_sync_buffer_limit`` bounds them, all streams together;
    otherwise ``held_bytes`` bounds those of one (stream, writer). ``overflowed``: a line was dropped, so every line
    after it is dropped too.
    """

    intake: Intake
    lines: deque[Line] = attrs.field(factory=deque)
    size: int = 0
    buffered: bool = False
    overflowed: bool = False

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
            self.intake.buffered(size - self.size)
        self.size = size
