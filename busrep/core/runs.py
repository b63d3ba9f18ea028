"""Sets of IDs, kept as runs without a gap: a bulk of IDs costs as much as one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import attrs


@attrs.define
class Runs:
    """Disjoint, not adjacent runs of IDs, ascending."""

    starts: list[int] = attrs.field(factory=list)
    ends: list[int] = attrs.field(factory=list)

    def add(self, first: int, last: int) -> None:
        """Add the IDs ``first``..``last``, joined with what they overlap or touch."""
        starts, ends = self.starts, self.ends
        low = bisect_left(ends, first - 1)
        high = bisect_right(starts, last + 1)
        if low < high:
            first, last = min(first, starts[low]), max(last, ends[high - 1])
        starts[low:high] = (first,)
        ends[low:high] = (last,)

    def overlaps(self, first: int, last: int) -> bool:
        """Whether one of ``first``..``last`` is in here."""
        at = bisect_left(self.ends, first)
        return at < len(self.starts) and self.starts[at] <= last

    def largest_upto(self, bound: int) -> int:
        """The largest ID at or below ``bound``, 0 if there is none."""
        at = bisect_right(self.starts, bound) - 1
        return min(self.ends[at], bound) if at >= 0 else 0

    def drop_to(self, bound: int) -> None:
        """Forget the runs that end at or below ``bound``."""
        at = bisect_right(self.ends, bound)
        del self.starts[:at], self.ends[:at]

    def thin(self, bounds: Iterable[int] = ()) -> None:
        """Forget all runs but the last one below each of ``bounds``, and the very last."""
        kept = {len(self.starts), *(bisect_left(self.starts, bound) for bound in bounds)} - {0}
        self.starts = [self.starts[at - 1] for at in sorted(kept)]
        self.ends = [self.ends[at - 1] for at in sorted(kept)]


def runs_of(ids: Iterable[int]) -> list[tuple[int, int]]:
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
