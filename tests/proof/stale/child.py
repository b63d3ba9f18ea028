"""One process: a bus, two cached functions, and lanes that read and write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from busrep import asyncio as on_loop
from busrep import sync
from busrep.caches.cache import invalidations
from busrep.errors import ClaimBlocked, Unavailable
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.stores.plans import complete
from busrep.streams import Registry
from tests.proof.soak.children import report_for_ever
from tests.proof.stale.items import Items
from tests.proof.stale.memory import Memory, Shape
from tests.proof.stale.ordinary import Ordinary, OrdinaryCache
from tests.proof.stale.reads import Read, Reads
from tests.proof.stale.runtime import LOOP, THREADS, AnyBus, InThreads
from tests.proof.stale.task import (
    BOTH,
    BUSREP,
    CAREFUL,
    ITEM,
    KEYS,
    MAXSIZE,
    NAME,
    PART,
    PUBSUB,
    READ_LANES,
    WAYS,
    WRITE_LANES,
    Task,
    bound_of,
    settings_of,
)
from tests.proof.stale.writes import Writes
from tests.support.children import Parent, run_child

# Seconds between two reports.
REPORT_EVERY = 0.25
# More than ever wait at a time.
THREADS_MOST = 24


class Process:
    """One life of one role."""

    def __init__(self, parent: Parent, task: Task) -> None:
        self.parent, self.task = parent, task
        self.runtime = THREADS if task.threads else LOOP
        self.memory = Memory(Shape(task.memory, KEYS, bound_of(task.heartbeat)))
        self.stream = invalidations()
        self.bus = self._make_bus()
        self.ordinary = Ordinary(task.redis)
        self.items = self._items(self.runtime)
        self.parts = self._items(THREADS)
        self.item, self.part = self._cached_functions()
        self.reads = Reads(self.memory, task.rate, self.runtime.sleep, self.describe)
        # The bus's own statistics are its loop's to ask for.
        self.part_reads = Reads(self.memory, task.rate, THREADS.sleep, lambda: self.part.statistics())
        self.writes: Writes | None = None
        self.write_lanes: list[asyncio.Task[None]] = []

    def _make_bus(self) -> AnyBus:
        task = self.task
        settings = settings_of(task.heartbeat, broken=task.broken)
        options: dict[str, Any] = {
            "name": NAME,
            "streams": [self.stream],
            "writer": task.who if task.writes else None,
            "settings": settings,
            "require_redis": False,  # it may be away while this process is started
        }
        if task.threads:
            return InThreads(sync.Bus(task.redis, BusOptions(store=task.postgres, **options)))
        store = open_store(task.postgres, Registry([self.stream]), settings=settings)
        return on_loop.Bus(task.redis, BusOptions(store=store, **options))

    def _items(self, runtime: Any) -> Items:
        return Items(self.memory, self.task.postgres, self.dice("loader"), runtime.connect, runtime.sleep)

    def _cached_functions(self) -> tuple[Any, Any]:
        """One for an event loop, unless this process has none, and one for threads; a special name for both."""
        bus = self.bus.bus if isinstance(self.bus, InThreads) else self.bus
        items, parts = self.items, self.parts

        async def item(key: int) -> int:
            return await items.load(key)

        def blocking_item(key: int) -> int:
            return complete(items.load(key))

        def part(key: int) -> int:
            return complete(parts.load(key))

        first: Any = blocking_item if self.task.threads else item
        cached_item = bus.cached(maxsize=MAXSIZE, name=ITEM)(first)
        cached_part = bus.cached(maxsize=MAXSIZE, name=PART)(part)
        bus.special_cache(BOTH, [cached_item, cached_part])
        return cached_item, cached_part

    def dice(self, what: object) -> random.Random:
        """Dice for one purpose."""
        return random.Random(f"{self.task.seed} {self.task.who} {self.task.life} {what}")

    def describe(self) -> object:
        """What the caches think of themselves."""
        return self.bus.statistics().get("caches")

    # -- its life ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the bus, however long the database is away."""
        while True:
            try:
                await self.bus.open()
            except (Unavailable, ClaimBlocked) as error:
                logging.getLogger("stale").info("cannot open yet: %s", error)
                await self.bus.close()
                await asyncio.sleep(0.3)
                self.bus = self._make_bus()
                self.item, self.part = self._cached_functions()
            else:
                return

    async def run(self) -> None:
        """From the first message to the last."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_MOST))
        await self.open()
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            stack.push_async_callback(self.bus.close)
            stack.push_async_callback(asyncio.to_thread, self.ordinary.close)
            reporter = group.create_task(report_for_ever(self.parent, self.task.who, self.report, REPORT_EVERY))
            self._start_lanes(group)
            self.parent.tell(ready=True)
            try:
                await self.obey(group)
            finally:  # threads cannot be cancelled, and a process that was fenced must end too
                self.end_lanes()
            reporter.cancel()
            self.parent.tell(**self.report())

    def _start_lanes(self, group: asyncio.TaskGroup) -> None:
        task, run = self.task, self.runtime.run
        if task.reads:
            for number in range(READ_LANES):
                work = self.reads.lane(self.ways(), task.block + number * len(WAYS), self.dice(f"read {number}"))
                group.create_task(_awaited(run(work)))
            last = task.block + READ_LANES * len(WAYS)
            work = self.part_reads.lane(self.part_ways(), last, self.dice("read part"))
            group.create_task(_awaited(THREADS.run(work)))
        if task.writes and not task.quiet:
            self.writes = Writes(
                self.memory,
                self.bus,
                self.stream,
                [self.item, self.part],
                connect=lambda: self.runtime.connect(task.postgres, autocommit=False),
                sleep=self.runtime.sleep,
                publish=lambda keys: self.runtime.call(self.ordinary.publish, keys),
                pause=task.pause,
            )
            self.write_lanes = [
                group.create_task(_awaited(run(self.writes.lane(self.dice(f"write {number}")))))
                for number in range(WRITE_LANES)
            ]

    def ways(self) -> dict[str, Read]:
        """How the lanes of this process's kind read."""

        async def blocking(key: int) -> int:
            version: int = self.item(key)
            return version

        ours: Read = blocking if self.task.threads else self.item
        return {BUSREP: ours, **self._ordinary_ways(self.items)}

    def part_ways(self) -> dict[str, Read]:
        """How the lane in a thread of its own reads."""

        async def blocking(key: int) -> int:
            version: int = self.part(key)
            return version

        return {BUSREP: blocking, **self._ordinary_ways(self.parts)}

    def _ordinary_ways(self, items: Items) -> dict[str, Read]:
        def way(cache: OrdinaryCache) -> Read:
            return lambda key: cache.get(key, items.load)

        return {PUBSUB: way(self.ordinary.plain), CAREFUL: way(self.ordinary.careful)}

    async def obey(self, group: asyncio.TaskGroup) -> None:
        """Do what the parent says, until it says stop."""
        while "stop" not in (message := await self.parent.hear()):
            if "block" in message:
                # What no application should do, and many do: the loop stands still, the threads go on.
                time.sleep(message["block"])  # noqa: ASYNC251
            if "quiet" in message:
                group.create_task(self.become_quiet())
            if "final" in message:
                group.create_task(self.last_look(message["final"]))

    async def become_quiet(self) -> None:
        """Write no more; say so when what was begun has ended."""
        if self.writes is not None:
            self.writes.ending = True
            await asyncio.wait(self.write_lanes)
        self.parent.tell(quiet=True)

    def end_lanes(self) -> None:
        """Let all lanes come to an end."""
        self.reads.ending = self.part_reads.ending = True
        if self.writes is not None:
            self.writes.ending = True

    async def last_look(self, versions: list[int]) -> None:
        """Say which entries are not as the table is, now that all is quiet."""
        if not self.task.reads:
            self.parent.tell(behind=dict.fromkeys(WAYS, 0))
            return
        block = self.task.block + (READ_LANES + 1) * len(WAYS)
        behind = await self.runtime.run(self.reads.entries_behind(self.ways(), versions, block))
        parts = {BUSREP: self.part_ways()[BUSREP]}  # the ordinary caches are those of the items
        more = await THREADS.run(self.part_reads.entries_behind(parts, versions, block + len(WAYS)))
        self.parent.tell(behind={**behind, BUSREP: behind[BUSREP] + more[BUSREP]})

    def report(self) -> dict[str, Any]:
        """Counters, as far as they are not in the oracle's file."""
        return {
            "statistics": self.bus.statistics(),
            "made": dict(self.writes.made) if self.writes is not None else {},
            "ordinary": {"received": self.ordinary.received, "unsent": self.ordinary.unsent},
        }


async def _awaited(work: Any) -> None:
    await work


if __name__ == "__main__":
    run_child("stale", lambda parent, task: Process(parent, Task(**task)).run())
