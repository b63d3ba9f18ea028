"""When each fact of a replay is due: rows in order made facts, facts given their time, and taken together while late.

Facts are taken together twice. A chunk has facts of all writers that are due. A group has facts of one writer of a
chunk, and is what one transaction writes.

Pure but for the clock and the waiting, which are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import attrs

from busrep.errors import BusrepError, ConfigError

# A chunk, of facts that come late, or flat out: enough that the transaction of each of several writers is worth its
# COMMIT, few enough that facts of different writers stay near each other.
CHUNK_ROWS = 8_000
CHUNK_BYTES = 8 * 2**20
# A group: enough that the four answers of the database that a transaction waits for cost little beside its rows, few
# enough that it lasts some 0.1 s.
GROUP_ROWS = 4_000
GROUP_BYTES = 2**20
# Seconds of a pause that are waited for at once: no sleep is too long for the system, and who looks on is told.
SLICE = 60.0

Row = tuple[str, str, int, int | None, str]
"""(stream, writer, token, microseconds since 1970, JSON text)."""


@attrs.frozen
class Fact:
    """A fact of the source. ``time``: microseconds since 1970, None where the source does not tell; ``rows``: JSON."""

    stream: str
    writer: str
    token: int
    time: int | None
    rows: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of its rows."""
        return sum(map(len, self.rows))


class OutOfOrder(BusrepError):
    """The rows to replay do not ascend within a writer: the source was read wrongly, or an archive is damaged."""

    def __init__(self, fact: Fact, last: int) -> None:
        self.fact, self.last = fact, last
        super().__init__(
            f"stream {fact.stream!r}, writer {fact.writer!r}: token {fact.token} comes behind {last}, and is not "
            "replayed. 'busrep pipeline audit' says whether the archive is whole"
        )


def facts_of(rows: Iterable[Row]) -> Iterator[Fact]:
    """The facts of rows, of which those of a fact lie together. Raises OutOfOrder."""
    last: dict[tuple[str, str], int] = {}
    for (stream, writer, token), group in groupby(rows, key=lambda row: row[:3]):
        found = list(group)
        fact = Fact(stream, writer, token, found[0][3], tuple(row[4].encode() for row in found))
        before = last.get((stream, writer), -1)
        if token <= before:
            raise OutOfOrder(fact, before)
        last[stream, writer] = token
        yield fact


def grouped(facts: Iterable[Fact]) -> Iterator[list[Fact]]:
    """Facts of one writer in groups, in their order: up to GROUP_ROWS and GROUP_BYTES in each. A fact is never divided,
    so a larger one is a group of its own."""
    held: list[Fact] = []
    rows = size = 0
    for fact in facts:
        rows, size = rows + len(fact.rows), size + fact.size
        if held and (rows > GROUP_ROWS or size > GROUP_BYTES):
            yield held
            held, rows, size = [], len(fact.rows), fact.size
        held.append(fact)
    if held:
        yield held


@attrs.define
class Pace:
    """When facts are due, seconds from the first: by their times, ``speed`` times as fast; at ``rate`` rows a second;
    or at once, where both are None. ``longest_pause``: seconds; what would be longer is cut."""

    speed: float | None = None
    rate: float | None = None
    longest_pause: float | None = None
    _last: int | None = None
    _due: float = 0.0
    _rows: int = 0

    def due(self, fact: Fact) -> float:
        """Of the next fact; never before the one before. Raises ConfigError for one that has no time and needs one."""
        if self.rate is not None:
            found = self._rows / self.rate
            self._rows += len(fact.rows)
            return found
        if self.speed is None:
            return 0.0
        if fact.time is None:
            raise ConfigError(
                f"stream {fact.stream!r}: its rows do not tell when they were committed, so they have no pace of their "
                "own: replay them with --rate, or --flat-out"
            )
        if self._last is not None:
            pause = max(0, fact.time - self._last) / 1e6 / self.speed
            self._due += pause if self.longest_pause is None else min(pause, self.longest_pause)
        self._last = fact.time if self._last is None else max(self._last, fact.time)
        return self._due


@attrs.define
class Chunks:
    """Facts in the order given, each when it is due; those that are due at once, or late, together.

    ``clock`` tells seconds, ``wait`` waits for so many. ``late``: the most seconds by which one came too late.
    ``told``: called again and again in a pause, with the seconds that are left of it.
    """

    pace: Pace
    clock: Callable[[], float]
    wait: Callable[[float], object]
    told: Callable[[float], object] = lambda _: None
    late: float = attrs.field(default=0.0, init=False)

    def of(self, facts: Iterable[Fact]) -> Iterator[list[Fact]]:
        """The chunks, none of them empty. The clock starts with the first fact."""
        held: list[Fact] = []
        rows = size = 0
        start: float | None = None
        for fact in facts:
            start = self.clock() if start is None else start
            due = start + self.pace.due(fact)
            full = rows + len(fact.rows) > CHUNK_ROWS or size + fact.size > CHUNK_BYTES
            if held and (full or due > self.clock()):
                yield held
                held, rows, size = [], 0, 0
            while (rest := due - self.clock()) > 0:
                self.told(rest)
                self.wait(min(rest, SLICE))
            if self.pace.speed is not None or self.pace.rate is not None:
                self.late = max(self.late, self.clock() - due)
            held.append(fact)
            rows, size = rows + len(fact.rows), size + fact.size
        if held:
            yield held
