"""The oracle: a file that all processes of a run map into memory.

For each key and version it holds the moment at which that version was *known* to be committed, on CLOCK_MONOTONIC,
which all processes of a machine share. Whoever knows first notes it: the writer when COMMIT was answered, a loader or
the harness that finds the version in the table. What is known is at most later than what is, so no read is called stale
that was not; a writer that dies between COMMIT and its note costs the oracle the time until somebody looks.

The counters live there too: a process that is killed takes none with it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

import attrs

from busrep.errors import ConfigError

# Versions that a key may have in one run. The file is sparse: only what was written takes room.
VERSIONS = 65_536
# Blocks of counters: one for each lane and way of each life of each process.
BLOCKS = 16_384
WORD = 8
NANO = 1_000_000_000

# Ages of what was returned, as parts of the bound: upper ends of the histogram's bars, the last one has none.
AGES = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 10.0)
# A block of counters. Behind the names comes the histogram: never replaced when read, then the bars of AGES, then more.
READS, LOADS, FAILED, STALE, OLDEST, HISTOGRAM = range(6)
BLOCK = HISTOGRAM + 2 + len(AGES)


@attrs.frozen
class Shape:
    """What a file is made for: so many keys, and the bound in seconds."""

    path: str
    keys: int
    bound: float


class Memory:
    """The file of one run, mapped for as long as it is referred to, by tallies too."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.bound = int(shape.bound * NANO)
        with open(shape.path, "r+b") as file:
            words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self.times = words[: shape.keys * VERSIONS]
        self._counters = words[shape.keys * VERSIONS :]

    @classmethod
    def create(cls, shape: Shape) -> Self:
        """Make the file: every key is at version 0, committed long ago."""
        Path(shape.path).touch()
        os.truncate(shape.path, (shape.keys * VERSIONS + BLOCKS * BLOCK) * WORD)
        memory = cls(shape)
        for key in range(shape.keys):
            memory.times[key * VERSIONS] = 1
        return memory

    def note(self, key: int, version: int, now: int) -> None:
        """This version is committed, as is known at ``now``, in ns; so are those before, whoever did not note them.

        Two who note at a time may both write: each is right, and the later one by no more than it took.
        Raises ConfigError when the file has no room for so many versions.
        """
        if version + 1 >= VERSIONS:
            raise ConfigError(f"key {key} has had {version} versions: make the run shorter")
        at = key * VERSIONS + version
        while not self.times[at]:
            self.times[at] = now
            at -= 1

    def latest(self, key: int) -> int:
        """The newest version that is known to be committed."""
        first = key * VERSIONS
        low, high = 0, VERSIONS - 1  # noted without holes, so halving finds the end
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.times[first + middle] else (low, middle - 1)
        return low

    def tally(self, block: int) -> Tally:
        """The counters of one block, zero at first. Raises ConfigError when there are no more."""
        if block >= BLOCKS:
            raise ConfigError("processes were started too often for this file: make the run shorter")
        return Tally(self, self._counters[block * BLOCK : (block + 1) * BLOCK])


class Stale(Exception):
    """A read that returned what it must not: ``age`` seconds since ``version`` of ``key`` was replaced."""

    def __init__(self, key: int, version: int, age: float) -> None:
        self.key, self.version, self.age = key, version, age
        super().__init__(f"key {key}: version {version} was returned {age:.3f} s after it was replaced")


class Tally:
    """What one lane counts of one way. One thread or task writes to it."""

    def __init__(self, memory: Memory, counters: memoryview[int]) -> None:
        self._times, self._bound, self.counters = memory.times, memory.bound, counters

    def judge(self, key: int, version: int, began: int) -> None:
        """Count a read that began at ``began`` (ns) and returned ``version``. Raises Stale if that is too old."""
        self.counters[READS] += 1
        replaced = self._times[key * VERSIONS + version + 1]
        # Most are not replaced at all, and that is all there is to see.
        if replaced and replaced < began:
            self._count_age(key, version, began - replaced)
        else:
            self.counters[HISTOGRAM] += 1

    def _count_age(self, key: int, version: int, age: int) -> None:
        part = age / self._bound
        bar = next((at for at, end in enumerate(AGES) if part <= end), len(AGES))
        self.counters[HISTOGRAM + 1 + bar] += 1
        self.counters[OLDEST] = max(self.counters[OLDEST], age)
        if age > self._bound:
            self.counters[STALE] += 1
            raise Stale(key, version, age / NANO)

    def loaded(self) -> None:
        """Count a call of the loader that found its row."""
        self.counters[LOADS] += 1

    def failed(self) -> None:
        """Count a read that returned nothing, because the table was out of reach."""
        self.counters[FAILED] += 1


@attrs.define
class Sum:
    """Tallies added up."""

    reads: int = 0
    loads: int = 0
    failed: int = 0
    stale: int = 0
    oldest: int = 0
    ages: list[int] = attrs.field(factory=lambda: [0] * (2 + len(AGES)))

    def add(self, tally: Tally) -> None:
        """Add one."""
        counters = tally.counters
        self.reads += counters[READS]
        self.loads += counters[LOADS]
        self.failed += counters[FAILED]
        self.stale += counters[STALE]
        self.oldest = max(self.oldest, counters[OLDEST])
        self.ages = [mine + other for mine, other in zip(self.ages, counters[HISTOGRAM:], strict=True)]
