"""One process of the soak: a bus as an application would hold it, its load and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.sentinel import Sentinel

from busrep.asyncio import Bus
from busrep.errors import ClaimBlocked, HandlerFailed, Unavailable, WaitTimeout, WriterFenced
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.children import Parent
from busrep.testing.soak.handling import Reading
from busrep.testing.soak.ledger import Ledger
from busrep.testing.soak.load import Load
from busrep.testing.soak.task import FENCED, NAME, SETTINGS, Task

# Seconds between two reports.
REPORT_EVERY = 0.25


class Rerouted(Sentinel):
    """Reaches each server through this process's own link to it; Sentinel knows where they really are."""

    def __init__(self, port: int, routes: dict[str, str], **settings: Any) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            [("127.0.0.1", port)], sentinel_kwargs={"socket_timeout": 1.0}, **settings
        )
        self._routes = routes

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The address of this process's link to the master."""
        host, port = await super().discover_master(service_name)
        link = urlsplit(f"//{self._routes[f'{host}:{port}']}")
        return link.hostname or "", link.port or 0


class Process:
    """One life of one role."""

    def __init__(self, parent: Parent, task: Task) -> None:
        self.parent, self.task = parent, task
        self.ledger = Ledger(task.ledger)
        self.dice = random.Random(f"{task.seed} {task.who} {task.life}")
        self.stopping = asyncio.Event()
        self.bus: Bus
        self.load: Load | None = None
        self.positions: dict[str, dict[str, int]] = {}

    def make_bus(self, sentinel: Sentinel) -> Bus:
        """The bus of this role, not open yet."""
        task = self.task
        registry = Registry(task.streams)
        store = open_store(task.store, registry, settings=SETTINGS)
        other = task.reader_store if task.reads and task.reader_store != task.store else None
        return Bus(
            task.tcp or sentinel.master_for(task.service),
            name=NAME,
            streams=task.streams,
            writer=task.who if task.writes else None,
            store=store,
            reader=task.who if task.reads in ("loose", "exact") else None,
            reader_store=None if other is None else open_store(other, registry, settings=SETTINGS),
            settings=SETTINGS,
            on_too_old="skip",
            require_redis=False,  # it may be away while this process is started
        )

    async def open(self, sentinel: Sentinel) -> None:
        """Open a bus, however long the database is away."""
        while True:
            bus = self.make_bus(sentinel)
            try:
                await bus.open()
            except (Unavailable, ClaimBlocked) as error:
                logging.getLogger("soak").info("cannot open yet: %s", error)
                await asyncio.sleep(0.3)
            else:
                self.bus = bus
                return

    async def run(self) -> None:
        """From the first message to the last."""
        task = self.task
        sentinel = Rerouted(task.sentinel, task.routes, username=task.user, password=task.password)
        try:
            await self.open(sentinel)
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
                stack.push_async_callback(self.bus.close)
                works = [group.create_task(self.report_for_ever())]
                if task.reads:
                    works.append(group.create_task(self.read()))
                if task.writes:
                    self.load = Load(self.bus, task, self.ledger, self.dice)
                    works.append(group.create_task(self.load.run()))
                works.append(group.create_task(self.become_ready()))
                await self.obey(group)
                for work in works:
                    work.cancel()
            self.parent.tell(**self.report())
        finally:
            for one in sentinel.sentinels:
                await one.aclose()

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

    async def read(self) -> None:
        """Hand every batch to the handler; from saved positions, or from now on."""
        reading = Reading(self.task, self.bus, self.ledger, self.dice)
        try:
            await reading.run()
        finally:
            await reading.close()

    async def burst(self, size: dict[str, int]) -> None:
        """Write much at once."""
        if self.load is not None:
            await self.load.burst(size["facts"], size["bytes"])

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
        reader = statistics["reader"]
        return {
            "statistics": statistics,
            "positions": self.bus.positions(),
            "made": None if self.load is None else dict(self.load.made),
            "trouble": [*reader["stopped"].values(), *filter(None, [reader["failure"]])],
        }

    async def report_for_ever(self) -> None:
        """Tell the parent how it goes."""
        while True:
            await asyncio.sleep(REPORT_EVERY)
            report = self.report()
            self.parent.tell(**report)
            writer = report["statistics"]["writer"]
            if writer is not None and writer["fenced"]:
                raise WriterFenced(self.task.who, writer["incarnation"])


async def main() -> None:
    """Take the task, and do it."""
    parent = Parent()
    await Process(parent, Task(**await parent.hear())).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(main())
        except* WriterFenced as fenced:
            logging.getLogger("soak").error("%s", fenced.exceptions[0])
            sys.exit(FENCED)
