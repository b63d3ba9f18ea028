"""What is read, and in which pieces: pure functions from positions to ranges, and from ranges to partitions.

The IDs of a stream come from one sequence that all its writers share. So the tokens of all writers lie on one axis, on
which an ID has one fact at most, and a slice of the axis holds about as many facts as it has IDs, whichever writers
they are of. Partitions are such slices, cut at equal numbers of IDs, never at rows: that needs no count of the table,
and never cuts a fact, whose rows share one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

Span = tuple[str, int, int]
"""Rows of one writer: (writer, after, upto), that is after < token <= upto."""

# Partitions of a query that does not say how many it wants; the source is not told how many cores there are.
PARTITIONS = 8
# A partition that nobody asked for is not made for less: a task costs some 50 ms, as long as reading so many rows.
LEAST_IDS = 20_000


@attrs.frozen
class Ranges:
    """What lies between two positions. ``spans``: what there is to read; ``lost``: what is pruned by now, per writer
    (after, upto]."""

    spans: Sequence[Span]
    lost: Sequence[Span]


def ranges(start: Mapping[str, int], end: Mapping[str, int], floors: Mapping[str, int]) -> Ranges:
    """The spans between two maps of positions (a writer that is in none is at 0), writers in order."""
    spans: list[Span] = []
    lost: list[Span] = []
    for writer in sorted(end):
        after, upto = start.get(writer, 0), end[writer]
        kept = max(after, min(upto, floors.get(writer, 0)))
        if after < kept:
            lost.append((writer, after, kept))
        if kept < upto:
            spans.append((writer, kept, upto))
    return Ranges(spans, lost)


def partitions(spans: Sequence[Span], most: int | None = None, least: int = 1) -> list[list[Span]]:
    """The spans in slices of the axis of tokens, each as a list of spans, in order; each slice has as many IDs, or one
    more.

    There are ``most`` slices, or with None up to `PARTITIONS`, fewer where they would be smaller than `LEAST_IDS`; but
    not fewer than ``least``. Where there are not so many IDs each has a slice of its own.
    """
    covered = _union((after, upto) for _, after, upto in spans)
    total = sum(upto - after for after, upto in covered)
    if not total:
        return []
    wanted = min(PARTITIONS, -(-total // LEAST_IDS)) if most is None else most
    cuts = [covered[0][0], *_cuts(covered, total, min(max(wanted, least), total)), covered[-1][1]]
    slices = []
    for after, upto in pairwise(cuts):
        found = [(writer, max(low, after), min(high, upto)) for writer, low, high in spans]
        slices.append([span for span in found if span[1] < span[2]])
    return slices


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Intervals (after, upto], those that touch or overlap made one, ascending."""
    merged: list[tuple[int, int]] = []
    for after, upto in sorted(intervals):
        if merged and after <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(upto, merged[-1][1]))
        elif after < upto:
            merged.append((after, upto))
    return merged


def _cuts(covered: Sequence[tuple[int, int]], total: int, count: int) -> list[int]:
    """The tokens after which 1, 2, ... of ``count`` equal parts of the ``total`` covered IDs end, short of the last."""
    cuts: list[int] = []
    passed = 0  # IDs of the intervals before
    for after, upto in covered:
        while len(cuts) + 1 < count and (end := total * (len(cuts) + 1) // count) <= passed + upto - after:
            cuts.append(after + end - passed)
        passed += upto - after
    return cuts


def admitted(spans: Sequence[Span], first: int | None, beyond: int | None) -> int | None:
    """The highest token of the next batch; None: all there is, or there is nothing.

    ``first``: the token of the first row of the spans, the oldest over all writers; ``beyond``: that of the first row
    too many (row ``maxRowsPerTrigger`` + 1); None where there is no such row. The fact that row belongs to is left to
    the next batch, whole, unless it is the first one: it alone is then the batch, however many rows it has.
    """
    if first is None or beyond is None or not spans:
        return None
    return beyond if beyond == first else beyond - 1


def upto(start: Mapping[str, int], end: Mapping[str, int], ceiling: int | None) -> dict[str, int]:
    """The positions of a batch that ends at the token ``ceiling`` of the axis, or with None at ``end``; never behind
    ``start``."""
    writers = {*start, *end}
    if ceiling is None:
        return {writer: max(start.get(writer, 0), end.get(writer, 0)) for writer in writers}
    return {writer: max(start.get(writer, 0), min(end.get(writer, 0), ceiling)) for writer in writers}


def clipped(spans: Iterable[Span], least: int | None, most: int | None) -> list[Span]:
    """The parts of spans with ``least`` <= token <= ``most``; None: no bound."""
    low, high = 0 if least is None else least - 1, 2**63 - 1 if most is None else most
    found = ((writer, max(after, low), min(upto, high)) for writer, after, upto in spans)
    return [span for span in found if span[1] < span[2]]
