"""What a process reads: the same keys on all ways, again and again, each read judged as it returns."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from busrep.errors import BusrepError
from tests.proof.soak.database import psycopg
from tests.proof.stale.items import READER
from tests.proof.stale.memory import NANO, Memory, Stale, Tally
from tests.proof.stale.task import BUSREP, KEYS, SKEW, WAYS

Read = Callable[[int], Awaitable[int]]

# Of each key, summed up: keys with small numbers are popular.
POPULARITY = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(KEYS)))
# Seconds in which a lane reads one batch, and then rests. Each key of a batch is asked for some times, in turns; what
# goes to the table for everything is left unfinished.
PERIOD, TURNS, LONGEST = 0.05, 10, 0.2
# Seconds to wait after a read that failed: the table is away, and asking at once again helps nobody.
AFTER_FAILURE = 0.05
# Stale reads of ours that one process describes; the rest is counted.
DESCRIBED = 20

log = logging.getLogger("stale.reads")


def draw(dice: random.Random, count: int) -> list[int]:
    """Keys, popular ones more often."""
    return dice.choices(range(KEYS), cum_weights=POPULARITY, k=count)


class Reads:
    """The reading lanes of one process. ``describe`` tells what the caches think, for the log of a stale read."""

    def __init__(
        self,
        memory: Memory,
        rate: float,
        sleep: Callable[[float], Awaitable[None]],
        describe: Callable[[], object],
    ) -> None:
        self._memory, self._sleep, self._describe = memory, sleep, describe
        self._size = max(1, round(rate * PERIOD))
        self._described = 0
        self.ending = False

    async def lane(self, ways: Mapping[str, Read], block: int, dice: random.Random) -> None:
        """Read until ``ending``; count in ``block`` and those behind it, one for each way."""
        tallies = self.tallies(block)
        while not self.ending:
            began = time.monotonic()
            keys = draw(dice, max(1, self._size // TURNS)) * min(TURNS, self._size)
            for way, read in ways.items():
                READER.set(tallies[way])
                await self._batch(way, read, keys, tallies[way])
            await self._sleep(max(0.0, began + PERIOD - time.monotonic()))

    def tallies(self, block: int) -> dict[str, Tally]:
        """The counters of one lane, by way."""
        return {way: self._memory.tally(block + at) for at, way in enumerate(WAYS)}

    async def _batch(self, way: str, read: Read, keys: Sequence[int], tally: Tally) -> None:
        until = time.monotonic_ns() + int(LONGEST * NANO)
        for key in keys:
            began = time.monotonic_ns()
            if began > until:
                break
            try:
                version = await read(key)
            except (psycopg().Error, BusrepError):
                tally.failed()
                await self._sleep(AFTER_FAILURE)
                continue
            try:
                tally.judge(key, version, began)
            except Stale as stale:
                self._note(way, stale, began)

    def _note(self, way: str, stale: Stale, began: int) -> None:
        if way == BUSREP and self._described < DESCRIBED:
            self._described += 1
            log.error("STALE at %.3f: %s; %s", began / 1e9, stale, self._describe())

    async def entries_behind(self, ways: Mapping[str, Read], versions: Sequence[int], block: int) -> dict[str, int]:
        """Of each way, how many keys are not what the table has now that nobody writes any more.

        What is not cached is loaded, and so right: what is counted are entries that would stay.
        """
        tallies = self.tallies(block)
        behind = dict.fromkeys(ways, 0)
        for way, read in ways.items():
            READER.set(tallies[way])
            for key, version in enumerate(versions):
                behind[way] += await read(key) != version
        return behind
