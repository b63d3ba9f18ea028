"""The audit's side of the table: in which slices it is read, and what tasks do with them, on executors.

They read as the source's tasks do, in a snapshot in which the epoch and the floors are looked at first, and hash the
rows where they are read: through Spark's own rows they would go through Java twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from busrep.spark.archive_rows import SCHEMA
from busrep.spark.audit_files import rows_of
from busrep.spark.audit_sums import Row, Spans, Sums
from busrep.spark.columns import generic_shape
from busrep.spark.databases import Question
from busrep.spark.planning import LEAST_IDS, PARTITIONS, Span, clipped
from busrep.spark.reading import read
from busrep.spark.table import absolute
from busrep.streams import Stream


def question_of(url: str, stream: Stream[Any], streams: str | None) -> Question:
    """What the tasks have to know; ``url``: the store with its password."""
    declared = streams if stream.table is not None else None
    shape = generic_shape().subset(SCHEMA.names, "the audit")
    return Question(absolute(url), stream.name, declared, shape)


def slices(start: Mapping[str, int], end: Mapping[str, int], size: int, count: int | None) -> list[list[Span]]:
    """What lies between two maps of positions, in about ``count`` slices of whole ranges of ``size`` tokens. Pure."""
    spans = [(writer, start[writer], end[writer]) for writer in sorted(end) if start[writer] < end[writer]]
    if not spans:
        return []
    first, last = (min(after for _, after, _ in spans) + 1) // size, max(upto for *_, upto in spans) // size
    ranges = last - first + 1
    wanted = count or min(PARTITIONS, -(-ranges * size // LEAST_IDS))
    width = -(-ranges // wanted)
    found = (clipped(spans, at * size, (at + width) * size - 1) for at in range(first, last + 1, width))
    return [one for one in found if one]


def summing(
    question: Question, epoch: str, size: int, start: Mapping[str, int], end: Mapping[str, int], mixed: Spans
) -> Callable[[Sequence[Span]], list[Any]]:
    """The sums of a slice. Raises LogReplaced or RangePruned for what is gone, Unavailable."""

    def work(spans: Sequence[Span]) -> list[Any]:
        sums = Sums(size, start, end, mixed)
        for batch in read(question, SCHEMA, epoch, spans):
            sums.add(batch)
        return sums.result()

    return work


def picking(question: Question, epoch: str) -> Callable[[Sequence[Span]], list[Row]]:
    """The rows of a slice. Raises as `summing`."""

    def work(spans: Sequence[Span]) -> list[Row]:
        return [row for batch in read(question, SCHEMA, epoch, spans) for row in rows_of(batch)]

    return work
