"""One process of the soak: a bus as an application would hold it, its load and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from busrep.errors import ClaimBlocked, HandlerFailed, Unavailable, WaitTimeout
from tests.proof.soak.children import report_for_ever
from tests.proof.soak.handling import Reading
from tests.proof.soak.ledger import Ledger
from tests.proof.soak.load import Load
from tests.proof.soak.runtime import Bus, runtime_of
from tests.proof.soak.task import Task
from tests.support.children import Parent, run_child

# Seconds between two reports.
REPORT_EVERY = 0.25
# More than ever wait at a time, where the bus is one for threads.
THREADS = 32


class Process:
    """One life of one role."""

    def __init__(self, parent: Parent, task: Task) -> None:
        self.parent, self.task, self.runtime = parent, task, runtime_of(task)
        self.ledger = Ledger(task.ledger)
        self.dice = random.Random(f"{task.seed} {task.who} {task.life}")
        self.bus: Bus
        self.load: Load | None = None
        self.reading: Reading | None = None
        self.incarnations: set[int] = set()

    async def open(self) -> None:
        """Open a bus, however long the database is away."""
        task = self.task
        while True:
            bus = self.runtime.make_bus(task)
            try:
                await bus.open()
                if task.reads:  # in threads this opens what it reads from
                    self.reading = Reading(self.runtime, task, bus, self.ledger, self.dice)
            except (Unavailable, ClaimBlocked) as error:
                logging.getLogger("soak").info("cannot open yet: %s", error)
                await bus.close()
                await asyncio.sleep(0.3)
            else:
                self.bus = bus
                return

    async def run(self) -> None:
        """From the first message to the last."""
        task, runtime = self.task, self.runtime
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        await self.open()
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            if self.reading is not None:
                stack.push_async_callback(self.reading.close)
            stack.push_async_callback(self.bus.close)
            works = [group.create_task(report_for_ever(self.parent, self.task.who, self.report, REPORT_EVERY))]
            if self.reading is not None:
                works.append(group.create_task(runtime.run(self.reading.run())))
            if task.writes:
                self.load = Load(runtime, task, self.bus, self.ledger, self.dice)
                works.append(group.create_task(self.load.run()))
            works.append(group.create_task(self.become_ready()))
            await self.obey(group)
            for work in works:
                work.cancel()
            self.parent.tell(**self.report())

    async def become_ready(self) -> None:
        """Say so once it is known where reading begins: what is written from then on counts."""
        for stream in self.task.streams if self.task.reads else ():
            while True:
                with contextlib.suppress(WaitTimeout):
                    await self.bus.wait_for(stream, "nobody", 0)
                    break
        self.parent.tell(ready=True)

    async def obey(self, group: asyncio.TaskGroup) -> None:
        """Do what the parent says, until it says stop."""
        obey: dict[str, Callable[[Any], Awaitable[None]]] = {
            "finish": self.finish_writing,
            "reach": self.reach,
            "burst": self.burst,
        }
        while "stop" not in (message := await self.parent.hear()):
            for word, what in message.items():
                group.create_task(obey[word](what))  # type: ignore[arg-type]

    async def burst(self, size: dict[str, int]) -> None:
        """Write much at once."""
        if self.load is not None:
            await self.runtime.run(self.load.burst(size["facts"], size["bytes"]))

    async def finish_writing(self, _: object) -> None:
        """End the load, and write one last fact of each stream."""
        if self.load is not None:
            finals = await self.load.finish()
            self.parent.tell(finals=finals)

    async def reach(self, goal: dict[str, Any]) -> None:
        """Wait until all was handled, up to {stream: {writer: token}}; say what was not in time."""
        behind = []
        deadline = asyncio.get_running_loop().time() + goal["timeout"]
        for stream in self.task.streams:
            for writer, token in goal["finals"].get(stream.name, {}).items():
                left = max(0.01, deadline - asyncio.get_running_loop().time())
                try:
                    await self.bus.wait_for(stream, writer, token, timeout=left)
                except (WaitTimeout, HandlerFailed) as error:
                    behind.append(str(error))
        self.parent.tell(reached=True, behind=behind)

    def report(self) -> dict[str, Any]:
        """Counters and positions; and the end, when the name was lost."""
        statistics = self.bus.statistics()
        reader, writer = statistics["reader"], statistics["writer"]
        if writer is not None:
            self.incarnations.add(writer["incarnation"])
        return {
            "statistics": statistics,
            "positions": self.bus.positions(),
            "won_back": max(0, len(self.incarnations) - 1),
            "made": None if self.load is None else dict(self.load.made),
            # In threads a process that only writes has no reader.
            "trouble": [*reader["stopped"].values(), *filter(None, [reader["failure"]])] if reader else [],
        }


if __name__ == "__main__":
    run_child("soak", lambda parent, task: Process(parent, Task(**task)).run())
