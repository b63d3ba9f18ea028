"""What a writer process writes: facts of all kinds, several at a time, some of them rolled back on purpose."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from typing import Any

from busrep.asyncio import Fact
from busrep.errors import BusrepError, Closed, CommitUnknown, WriterFenced
from busrep.streams import Stream
from tests.proof.soak.database import BUSINESS, psycopg
from tests.proof.soak.ledger import Committed, Ledger, RolledBack
from tests.proof.soak.runtime import Bus, Runtime
from tests.proof.soak.task import ABORTED, BULK, FINAL, LEASE, Row, Task, digest
from tests.support.rows import TEXTS

# Facts open at a time: they complete in any order.
LANES = 4
# Seconds between two facts of a lane.
PAUSES = (0.0, 0.05, 0.1, 0.2, 0.4)
# What a lane does next, and how often.
KINDS = {"one": 40, "many": 15, "several streams": 12, "rolled back": 14, "empty": 5, "bulk": 3, "held": 3, "joined": 3}
# Seconds for which a held transaction is open; other facts of its writer complete meanwhile, and wait for it.
HELD = (0.3, 2.5)
# How often, between two facts, a process without beats writes nothing for so many seconds, in all lanes: for longer
# than a lease, so that readers finish it, and it has to win its name back.
SILENT, SILENCE = 0.01, (1.2 * LEASE, 2.5 * LEASE)


class RollBack(Exception):
    """Raised in a fact's block to roll it back."""


class Load:
    """The facts of one writer process. ``made`` counts them by kind."""

    def __init__(self, runtime: Runtime, task: Task, bus: Bus, ledger: Ledger, dice: random.Random) -> None:
        self.runtime, self.task, self.bus, self.ledger, self.dice = runtime, task, bus, ledger, dice
        self.streams = [stream for stream in task.streams if stream.name in task.writes]
        self.made: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._ending = False
        self._silent_until = 0.0
        self._lanes: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Write until ``finish``. Raises WriterFenced when another process has the name."""
        async with asyncio.TaskGroup() as group:
            self._lanes = [group.create_task(self.runtime.run(self.lane())) for _ in range(LANES)]

    async def lane(self) -> None:
        """One fact after the other."""
        while not self._ending:
            kind = self.dice.choices(list(KINDS), list(KINDS.values()))[0]
            await self.attempt(kind)
            if self.task.beats is False and self.dice.random() < SILENT:
                self._silent_until = time.monotonic() + self.dice.uniform(*SILENCE)
            await self.runtime.sleep(max(self.dice.choice(PAUSES), self._silent_until - time.monotonic()))

    async def attempt(self, kind: str) -> bool:
        """Try to write one; whether it is certain that it was committed."""
        try:
            await self.make(kind)
        except RollBack:
            self.made["rolled back"] += 1
        except CommitUnknown:
            self.made["unknown"] += 1
        except WriterFenced as error:
            if not self.bus.statistics()["writer"]["fenced"]:
                raise RuntimeError("told that its name is another's, and it is not") from error
            raise
        except Closed:
            self._ending = True
        except (BusrepError, psycopg().Error):  # the database, or the way to it
            self.made["failed"] += 1
            await self.runtime.sleep(0.1)
        else:
            self.made[kind] += 1
            return True
        return False

    def rows(self, kind: str, count: int, size: int | None = None) -> list[Row]:
        """The rows of one new fact."""
        name = f"{self.task.who}.{self.task.life}.{next(self._numbers)}"
        dice = self.dice
        texts = ["x" * (size or dice.randint(5, 300)) + dice.choice(TEXTS) for _ in range(count)]
        return [Row(name, index, count, kind, text) for index, text in enumerate(texts)]

    async def make(self, kind: str) -> None:
        """One fact, or many, in one transaction."""
        stream, dice = self.dice.choice(self.streams), self.dice
        if kind == "bulk":
            await self.bulk(stream, dice.choice([10, 30, 200]), dice.choice([20, 100, 1_000]))
        elif kind == "several streams":
            await self.fact(self.streams, dice.randint(1, 3), kind)
        elif kind == "rolled back":
            await self.fact(dice.choice([[stream], self.streams]), dice.randint(1, 3), ABORTED)
        elif kind == "joined":
            await self.joined(stream, dice.random() < 0.3)
        elif kind == "held":
            await self.fact([stream], 1, kind, held=dice.uniform(*HELD))
        else:
            await self.fact([stream], {"one": 1, "many": dice.randint(2, 20), "empty": 0}.get(kind, 1), kind)

    async def fill(self, fact: Fact[Any], streams: list[Stream[Row]], count: int, kind: str) -> list[Any]:
        """Add rows, and the application's row; what the ledger says of it."""
        noted = []
        for stream in streams:
            rows = self.rows(kind, count)
            for row in rows:
                fact.add(row, stream=stream)
            if rows:
                await fact.execute(BUSINESS, (stream.name, self.task.who, fact.ids[stream.name]))
                noted.append((stream.name, fact.ids[stream.name], len(rows), digest(map(stream.encode, rows))))
        return noted

    async def fact(self, streams: list[Stream[Row]], count: int, kind: str, held: float = 0.0) -> None:
        """One fact of one or more streams, in a transaction of busrep's."""
        noted: list[Any] = []
        try:
            async with self.bus.write(*streams) as fact:
                noted = await self.fill(fact, streams, count, kind)
                await self.runtime.sleep(held or self.dice.choice([0, 0, 0.01]))
                if kind == ABORTED:
                    raise RollBack
        except RollBack:
            self.ledger.note(RolledBack(tuple((stream, id) for stream, id, _, _ in noted)))
            raise
        self.ledger.note(Committed(tuple(noted)))

    async def joined(self, stream: Stream[Row], rolled_back: bool) -> None:
        """A fact in a transaction that the application begins and ends itself, on its own connection."""
        connection = await self.runtime.connect(self.task.store)
        try:
            await connection.execute("SELECT 1")  # begins one
            async with self.bus.write(stream, connection=connection) as fact:
                noted = await self.fill(fact, [stream], 2, ABORTED if rolled_back else "joined")
            if rolled_back:
                await connection.rollback()
                self.ledger.note(RolledBack(tuple((name, id) for name, id, _, _ in noted)))
            else:
                await connection.commit()
                self.ledger.note(Committed(tuple(noted)))
        finally:
            await connection.close()
        await self.bus.settle()

    async def bulk(self, stream: Stream[Row], count: int, size: int) -> None:
        """Many facts of one row in one transaction."""
        rows = [self.rows(BULK, 1, size)[0] for _ in range(count)]
        ids = await self.bus.publish(stream, rows)
        contents = [digest([stream.encode(row)]) for row in rows]
        self.ledger.note(Committed(tuple((stream.name, id, 1, of) for id, of in zip(ids, contents, strict=True))))

    async def burst(self, count: int, size: int) -> None:
        """Much at once, as an import does."""
        try:
            await self.bulk(self.streams[0], count, size)
            self.made["burst"] += 1
        except (BusrepError, psycopg().Error):
            self.made["failed"] += 1

    async def finish(self) -> dict[str, int]:
        """Let the lanes end, and write a last fact of each stream; {stream: ID}."""
        self._ending = True
        if self._lanes:
            await asyncio.wait(self._lanes)
        finals: dict[str, int] = await self.runtime.run(self.last_facts())
        return finals

    async def last_facts(self) -> dict[str, int]:
        """One of each stream, however long it takes."""
        finals = {}
        for stream in self.streams:
            while True:
                try:
                    async with self.bus.write(stream) as fact:
                        noted = await self.fill(fact, [stream], 1, FINAL)
                except WriterFenced:
                    raise
                except (BusrepError, psycopg().Error):
                    await self.runtime.sleep(0.2)
                    continue
                break
            self.ledger.note(Committed(tuple(noted)))
            finals[stream.name] = noted[0][1]
        return finals
