"""Filters of a query that the table can answer: on the stream, the writer, the token, and the time of the commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs

from busrep.spark.columns import Shape
from busrep.spark.planning import Span, clipped

try:
    from pyspark.sql.datasource import (
        EqualNullSafe,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        IsNotNull,
        LessThan,
        LessThanOrEqual,
    )
except ImportError as missing:
    from busrep.errors import MissingExtra

    raise MissingExtra("spark", "busrep on Spark") from missing

_COMPARISONS = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}


def micros(value: object) -> int | None:
    """A timestamp of Spark's as microseconds since 1970; None for anything else."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    since = value.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


@attrs.define
class Pushed:
    """What a query's filters leave to read. ``times``: conditions on the commit's time, (``>=`` ..., microseconds)."""

    stream: str
    shape: Shape
    times_known: bool  # an application's table does not tell when a row was committed
    nothing: bool = False
    writers: frozenset[str] | None = None
    least: int | None = None
    most: int | None = None
    times: list[tuple[str, int]] = attrs.field(factory=list)

    def push(self, filters: Sequence[Filter]) -> Iterator[Filter]:
        """Take up the filters that can be; the others come back, for Spark."""
        for one in filters:
            if not self._take(one):
                yield one

    def spans(self, spans: Sequence[Span]) -> list[Span]:
        """What is left of these."""
        if self.nothing:
            return []
        some = [span for span in spans if self.writers is None or span[0] in self.writers]
        return clipped(some, self.least, self.most)

    def _take(self, one: Filter) -> bool:
        path: Sequence[str] = getattr(one, "attribute", ())
        column = self.shape.source(path[0]) if len(path) == 1 else None
        if column is None:
            return False
        if isinstance(one, IsNotNull):
            return column != "committed_at" or self.times_known
        if isinstance(one, EqualTo | EqualNullSafe):
            return self._equal(column, [one.value])
        if isinstance(one, In):
            return column in ("stream", "writer") and self._equal(column, list(one.value))
        comparison = _COMPARISONS.get(type(one))
        if comparison is None:
            return False
        return self._compared(column, comparison, getattr(one, "value", None))

    def _equal(self, column: str, values: list[Any]) -> bool:
        if column in ("stream", "writer"):
            if not all(isinstance(value, str) for value in values):
                return False
            if column == "stream":
                self.nothing |= self.stream not in values
            else:
                self.writers = frozenset(values) if self.writers is None else self.writers & frozenset(values)
            return True
        return self._compared(column, ">=", values[0]) and self._compared(column, "<=", values[0])

    def _compared(self, column: str, comparison: str, value: Any) -> bool:
        if column == "token" and type(value) is int:
            if comparison.startswith(">"):
                low = value + (comparison == ">")
                self.least = low if self.least is None else max(self.least, low)
            else:
                high = value - (comparison == "<")
                self.most = high if self.most is None else min(self.most, high)
            return True
        if column == "committed_at" and self.times_known and (at := micros(value)) is not None:
            self.times.append((comparison, at))
            return True
        return False
