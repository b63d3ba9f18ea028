"""A writer process of ``busrep demo``: facts of all kinds, as its parent allows them."""

from __future__ import annotations

import asyncio
import random
import time

import attrs

import busrep
from busrep.cli.demo_rows import ABORTED, BULK, REPORT_EVERY, DemoRow, Task, demo_streams, run_child
from busrep.cli.demo_table import business_insert
from busrep.streams import Stream
from busrep.testing.children import Parent

# Facts of one round. Most come by publish(), in one transaction, as in an import; the rest one by one.
ROUND = 100
BULK_FACTS = 80
# Facts open at a time: they complete in any order.
LANES = 5
# How the facts outside of publish() are made, and how often.
KINDS = {"single": 50, "many": 30, ABORTED: 20}


class RollBack(Exception):
    """Raised in a fact's block to roll it back."""


@attrs.define
class Work:
    """The facts of one writer process."""

    task: Task
    bus: busrep.Bus
    parent: Parent
    allowed: int = 0
    facts: int = 0
    rows: int = 0
    rollbacks: int = 0
    made: int = 0
    chance: random.Random = attrs.field(factory=random.Random)
    wake: asyncio.Event = attrs.field(factory=asyncio.Event)

    def make_rows(self, kind: str) -> list[DemoRow]:
        """The rows of one new fact."""
        self.made += 1
        fact = f"{self.task.who}.{self.task.life}.{self.made}"
        count = self.chance.randint(2, 6) if kind in ("many", ABORTED) else 1
        text = "x" * self.chance.randint(10, 60)
        return [DemoRow(fact, index, count, kind, text) for index in range(count)]

    async def one(self, stream: Stream[DemoRow], kind: str) -> None:
        """One fact in a transaction of its own, together with a row of a table of the application."""
        rows = self.make_rows(kind)
        try:
            async with self.bus.write(stream) as fact:
                for row in rows:
                    fact.add(row)
                sql = business_insert(self.task.store, self.task.run)
                await fact.execute(sql, (stream.name, self.task.who, fact.id))
                if kind == ABORTED:
                    raise RollBack
        except RollBack:
            self.rollbacks += 1
        else:
            self.facts, self.rows = self.facts + 1, self.rows + len(rows)

    async def some(self, stream: Stream[DemoRow], count: int) -> None:
        """``count`` facts, several at a time."""
        kinds = self.chance.choices(list(KINDS), list(KINDS.values()), k=count)
        for start in range(0, count, LANES):
            async with asyncio.TaskGroup() as lanes:
                for kind in kinds[start : start + LANES]:
                    lanes.create_task(self.one(stream, kind))

    async def bulk(self, stream: Stream[DemoRow], count: int) -> None:
        """``count`` facts of one row in one transaction."""
        rows = [row for _ in range(count) for row in self.make_rows(BULK)]
        await self.bus.publish(stream, rows)
        self.facts, self.rows = self.facts + count, self.rows + count

    async def run(self) -> None:
        """Write until all facts are there."""
        streams = demo_streams(self.task.run)
        while self.facts < self.task.facts:
            left = min(self.allowed, self.task.facts) - self.facts
            if left <= 0:
                self.wake.clear()
                await self.wake.wait()
                continue
            stream = self.chance.choice(streams)
            bulk = min(BULK_FACTS, left)
            await self.bulk(stream, bulk)
            await self.some(stream, min(ROUND - BULK_FACTS, left - bulk))

    def report(self, **more: object) -> None:
        """Tell the parent how far it is."""
        numbers = {"facts": self.facts, "rows": self.rows, "rollbacks": self.rollbacks}
        self.parent.tell(**numbers, statistics=self.bus.statistics(), **more)


async def _reports(work: Work) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY)
        work.report()


async def _orders(work: Work, stop: asyncio.Event) -> None:
    while "stop" not in (message := await work.parent.hear()):
        work.allowed = message["allowed"]
        work.wake.set()
    stop.set()


async def write() -> None:
    """Write all facts of the task, then stay until told to go: heartbeats tell readers what they missed."""
    parent, stop = Parent(), asyncio.Event()
    task = Task(**await parent.hear())
    bus = busrep.connect(
        task.redis,
        name=task.name,
        streams=demo_streams(task.run),
        writer=task.who,
        store=task.store,
        settings=task.settings,
        require_redis=False,  # it may be away while this process is started again
    )
    async with bus:
        work = Work(task, bus, parent)
        parent.tell(ready=True)
        background = [asyncio.create_task(_reports(work)), asyncio.create_task(_orders(work, stop))]
        try:
            started = time.monotonic()
            await work.run()
            work.report(done=True, seconds=time.monotonic() - started)
            await stop.wait()
        finally:
            for one in background:
                one.cancel()
        work.report()


def main() -> None:
    """Entry point of the process."""
    run_child(write())


if __name__ == "__main__":
    main()
