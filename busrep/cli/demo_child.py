"""The processes of ``busrep demo``: writers make facts of all kinds, readers record every fact that they handle."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import random
import signal
import sys
import threading
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import attrs

import busrep
from busrep.cli.demo_table import ABORTED, BULK, connected, fact_digest
from busrep.cli.servers import first_error
from busrep.errors import BusrepError, WriterFenced
from busrep.streams import Stream

# How facts outside of publish() are made.
KINDS = 5 * ["single"] + 3 * ["many"] + 2 * [ABORTED]
# Facts of one publish(), in one transaction, as in an import; and facts beside, which are open at the same time and
# complete in any order.
BULK_FACTS, LANES = 80, 5
# Seconds between two reports to the parent.
REPORT_EVERY = 0.1
# Exit status of a writer whose name was claimed by another process, and of a process whose parent is gone.
FENCED, ORPHANED = 3, 4
# Seconds that a reader may take, after the last fact, to reach the end.
READ_TIMEOUT = 60.0


@attrs.frozen
class DemoRow:
    """One row. ``fact`` is a name that no other fact of the run has."""

    fact: str
    index: int
    kind: str
    text: str


STREAMS = [Stream("orders", DemoRow), Stream("payments", DemoRow)]


@attrs.frozen(kw_only=True)
class Task:
    """What a child process is told. ``life`` counts the processes of the name ``who`` from 1, ``facts`` is what the
    earlier ones wrote or handled."""

    role: str
    redis: str = attrs.field(repr=False)
    store: str = attrs.field(repr=False)
    channel: str
    who: str
    life: int
    facts: int
    exactly_once: bool

    def insert(self, table: str, values: int) -> str:
        """The statement that inserts a row, with parameters as the driver of the store wants them."""
        mark = "?" if self.store.startswith("sqlite:") else "%s"
        return f"INSERT INTO {table} VALUES ({', '.join([mark] * values)})"  # noqa: S608 - our own names


class Parent:
    """The parent's messages and the way to it, over ``pipe``. Make it on the event loop.

    The process ends when the parent is gone, however that happened.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._pipe.recv()
                loop.call_soon_threadsafe(self._inbox.put_nowait, message)
        os._exit(ORPHANED)

    async def hear(self) -> dict[str, Any]:
        """The next message."""
        return await self._inbox.get()

    def tell(self, **what: object) -> None:
        """Send a message."""
        self._pipe.send(what)


class RolledBack(Exception):
    """Raised in a fact's block to roll it back."""


async def write(task: Task, bus: busrep.Bus, parent: Parent, counts: Counter[str]) -> None:
    """Write as many facts as the parent allows, until it says stop: heartbeats tell readers what they missed."""

    def make_rows(kind: str) -> list[DemoRow]:
        counts["made"] += 1
        name = f"{task.who}.{task.life}.{counts['made']}"
        count = random.randint(2, 6) if kind in ("many", ABORTED) else 1
        return [DemoRow(name, index, kind, "x" * random.randint(10, 60)) for index in range(count)]

    async def write_one(stream: Stream[DemoRow], kind: str) -> None:
        """Write one fact in a transaction of its own, together with a row of a table of the application."""
        try:
            async with bus.write(stream) as fact:
                for row in make_rows(kind):
                    fact.add(row)
                await fact.execute(task.insert("orders", 3), (stream.name, task.who, fact.id))
                if kind == ABORTED:
                    raise RolledBack
        except RolledBack:
            counts["rollbacks"] += 1
        else:
            counts["facts"] += 1

    while "stop" not in (order := await parent.hear()):
        while (left := order["allowed"] - counts["facts"]) > 0:
            stream = random.choice(STREAMS)
            rows = [row for _ in range(min(BULK_FACTS, left)) for row in make_rows(BULK)]
            counts["facts"] += len(await bus.publish(stream, rows))
            async with asyncio.TaskGroup() as lanes:
                for kind in random.choices(KINDS, k=min(LANES, left - len(rows))):
                    lanes.create_task(write_one(stream, kind))


async def read(task: Task, bus: busrep.Bus, parent: Parent, counts: Counter[str]) -> None:
    """Handle all batches until the parent says where the streams end, and these positions are reached."""
    insert = task.insert("handled", 4)

    async def handle(batch: busrep.Batch[DemoRow]) -> None:
        """Record a batch as a line. Rows of a fact that do not lie together would show as two facts."""
        facts = []
        for token, rows in batch.facts():
            payloads = [batch.stream.encode(row) for row in rows]
            facts.append((token, len(payloads), fact_digest(payloads)))
        counts["batches"] += 1
        line = json.dumps([batch.stream.name, batch.writer, facts])
        row = (task.who, task.life, counts["batches"], line)
        if task.exactly_once:
            async with batch.transaction() as connection:
                done = connection.execute(insert, row)
                if inspect.isawaitable(done):
                    await done
        else:  # the position is saved a little later
            await asyncio.to_thread(own.execute, insert, row)
        counts["facts"] += len(facts)

    with connected(task.store) as own:
        bus.subscribe(*STREAMS)(handle)
        ends = (await parent.hear())["ends"]
        waits = [bus.wait_for(bus.streams[name], writer, end, READ_TIMEOUT) for name, writer, end in ends]
        found = await asyncio.gather(*waits, return_exceptions=True)
        parent.tell(behind=[str(error) for error in found if error is not None])


async def work(task: Task, pipe: Connection) -> None:
    """Do the task, and report counts and the bus's statistics meanwhile, and at the end."""
    parent, counts = Parent(pipe), Counter(facts=task.facts)
    role: Any = {task.role: task.who}
    bus = busrep.connect(task.redis, name=task.channel, streams=STREAMS, store=task.store, require_redis=False, **role)

    async def report_for_ever() -> None:
        while True:
            parent.tell(ready=True, **counts, statistics=bus.statistics())
            await asyncio.sleep(REPORT_EVERY)

    try:
        async with bus:
            reporting = asyncio.create_task(report_for_ever())
            try:
                await (write if task.role == "writer" else read)(task, bus, parent, counts)
            finally:
                reporting.cancel()
            parent.tell(**counts, statistics=bus.statistics())
    except* BusrepError as failed:
        parent.tell(error=str(first_error(failed)))
        raise


def live(task: Task, pipe: Connection, log: str) -> None:
    """The life of a process. Its log is the file of that name."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's: it ends its children itself
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(work(task, pipe))
    except* WriterFenced as fenced:
        logging.getLogger("busrep.demo").error("%s", fenced.exceptions[0])
        sys.exit(FENCED)
