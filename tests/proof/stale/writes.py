"""What a process writes: new versions, and their invalidation in the same transaction, in all ways that there are."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from busrep.caches.cache import Invalidation
from busrep.errors import BusrepError, Closed, CommitUnknown, WriterFenced
from busrep.streams import Stream
from tests.proof.soak.database import psycopg
from tests.proof.stale.items import PATIENCE, UPDATE, one_value
from tests.proof.stale.memory import Memory
from tests.proof.stale.ordinary import EVERYTHING
from tests.proof.stale.reads import draw
from tests.proof.stale.runtime import fact_of
from tests.proof.stale.task import BOTH, KEYS

# What a lane does next, and how often.
KINDS = {"one": 50, "many": 15, "special": 12, "everything": 1, "rolled back": 8, "held": 7, "joined": 7}
# For how long a held transaction is open, in bounds: what its writer commits meanwhile cannot be announced.
HELD = (0.2, 2.0)
# How often somebody tells busrep at once that a joined transaction has ended; else it finds out.
SETTLES = 0.5


class RollBack(Exception):
    """Raised in a fact's block to roll it back."""


class Writes:
    """The writing lanes of one process. ``made`` counts transactions by kind, and how others ended.

    ``caches`` are the cached functions; ``publish`` tells the ordinary caches; ``connect`` makes a connection of the
    application's own.
    """

    def __init__(
        self,
        memory: Memory,
        bus: Any,
        stream: Stream[Invalidation],
        caches: Collection[Any],
        *,
        connect: Callable[[], Awaitable[Any]],
        sleep: Callable[[float], Awaitable[None]],
        publish: Callable[[Iterable[int | str]], Awaitable[None]],
        pause: float,
    ) -> None:
        self._memory, self._bus, self._stream, self._caches = memory, bus, stream, caches
        self._connect, self._sleep, self._publish, self._pause = connect, sleep, publish, pause
        self.made: Counter[str] = Counter()
        self.ending = False

    async def lane(self, dice: random.Random) -> None:
        """Write until ``ending``. Raises WriterFenced."""
        while not self.ending:
            await self.attempt(dice)
            await self._sleep(dice.expovariate(1 / self._pause))

    async def attempt(self, dice: random.Random) -> None:
        """Write once. What went wrong is the next reader's business. Raises WriterFenced."""
        (kind,) = dice.choices(list(KINDS), list(KINDS.values()))
        # A held transaction has a row that few others want: it is busrep that shall wait for it, not they.
        keys = [dice.randrange(KEYS)] if kind == "held" else draw(dice, dice.randint(2, 6) if kind == "many" else 1)
        keys = sorted(set(keys))  # in one order, or two transactions wait for each other
        try:
            versions = await (self._joined(keys, dice) if kind == "joined" else self._fact(kind, keys, dice))
        except RollBack:
            self.made[kind] += 1
        except CommitUnknown:
            self.made["unknown"] += 1
        except WriterFenced:
            raise
        except Closed:
            self.ending = True
        except (BusrepError, psycopg().Error):
            self.made["failed"] += 1
            await self._sleep(0.1)
        else:
            now = time.monotonic_ns()
            for key, version in zip(keys, versions, strict=True):
                self._memory.note(key, version, now)
            self.made[kind] += 1
            await self._publish([EVERYTHING] if kind == "everything" else keys)

    async def _fact(self, kind: str, keys: list[int], dice: random.Random) -> list[int]:
        """A transaction of busrep's; the versions that it made."""
        async with self._bus.write(self._stream) as fact:
            await fact.execute(PATIENCE)
            versions = [int((await fact.execute(UPDATE, (key,)))[0][0]) for key in keys]
            self._invalidate(fact_of(fact), kind, keys)
            await self._sleep(dice.uniform(*HELD) * self._memory.shape.bound if kind == "held" else 0)
            if kind == "rolled back":
                raise RollBack
        return versions

    async def _joined(self, keys: list[int], dice: random.Random) -> list[int]:
        """A transaction that the application begins and ends, on its own connection."""
        connection = await self._connect()
        try:
            await connection.execute(PATIENCE)
            async with self._bus.write(self._stream, connection=connection) as fact:
                versions = [await one_value(connection, UPDATE, key) for key in keys]
                self._invalidate(fact_of(fact), "joined", keys)
            await self._sleep(dice.choice([0, 0, 0.05, 0.5]))
            await connection.commit()
        finally:
            await connection.close()
        if dice.random() < SETTLES:
            await self._bus.settle()
        return versions

    def _invalidate(self, fact: Any, kind: str, keys: list[int]) -> None:
        if kind == "special":
            for key in keys:
                fact.add(Invalidation(BOTH, [key], time.time_ns() // 1_000_000))
            return
        for cache in self._caches:
            if kind == "everything":
                cache.invalidate_all_in(fact)
                continue
            for key in keys:
                cache.invalidate_in(fact, key)
