"""The processes of ``busrep demo``: writers make facts of all kinds, readers record every fact that they handle."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import random
import signal
import sys
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import attrs

import busrep
from busrep.cli.demo_table import ABORTED, BULK, connected, content_of
from busrep.cli.servers import first_error
from busrep.errors import BusrepError, WriterFenced
from busrep.streams import Stream

# How facts outside of publish() are made.
KINDS = 5 * ["single"] + 3 * ["many"] + 2 * [ABORTED]
# Facts of one publish(), in one transaction, as in an import; and facts beside, which are open at the same time and
# complete in any order.
BULK_FACTS, LANES = 80, 5
# Seconds between two reports to the parent, and between two looks at its orders.
REPORT_EVERY = 0.05
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
    """What a process is told at its start. ``role``: writer or reader, by the name ``who``. ``exactly_once``: whether a
    reader saves its position with what it does, or a little later. ``life`` counts the processes of the name from 1,
    ``facts`` is what the earlier ones wrote or handled."""

    role: str
    who: str
    redis: str = attrs.field(default="", repr=False)
    store: str = attrs.field(default="", repr=False)
    channel: str = ""
    exactly_once: bool = False
    life: int = 0
    facts: int = 0

    def insert(self, table: str, values: int) -> str:
        """The statement that inserts a row, with parameters as the driver of the store wants them."""
        mark = "?" if self.store.startswith("sqlite:") else "%s"
        return f"INSERT INTO {table} VALUES ({', '.join([mark] * values)})"  # noqa: S608 - our own names


class RolledBack(Exception):
    """Raised in a fact's block to roll it back."""


@attrs.define
class Worker:
    """A process at its work, which the parent ends by killing it. ``orders``: what the parent said: ``allowed``, facts
    that a writer may write by now; ``ends``, where the streams end. ``report``: what the parent is told."""

    task: Task
    pipe: Connection
    bus: busrep.Bus
    orders: dict[str, Any] = attrs.field(factory=dict)
    report: dict[str, Any] = attrs.field(factory=dict)
    counts: Counter[str] = attrs.field(factory=Counter)

    async def converse(self) -> None:
        """Report, and take in orders. The process ends when the parent is gone, however that happened."""
        try:
            while True:
                self.pipe.send({**self.report, **self.counts, "statistics": self.bus.statistics()})
                while self.pipe.poll():
                    self.orders.update(self.pipe.recv())
                await asyncio.sleep(REPORT_EVERY)
        except (EOFError, OSError):
            os._exit(ORPHANED)

    def make_rows(self, kind: str) -> list[DemoRow]:
        """The rows of a fact that is new."""
        self.counts["made"] += 1
        name = f"{self.task.who}.{self.task.life}.{self.counts['made']}"
        count = random.randint(2, 6) if kind in ("many", ABORTED) else 1
        return [DemoRow(name, index, kind, "x" * random.randint(10, 60)) for index in range(count)]

    async def write_one(self, stream: Stream[DemoRow], kind: str) -> None:
        """Write one fact in a transaction of its own, together with a row of a table of the application."""
        try:
            async with self.bus.write(stream) as fact:
                for row in self.make_rows(kind):
                    fact.add(row)
                await fact.execute(self.task.insert("orders", 3), (stream.name, self.task.who, fact.id))
                if kind == ABORTED:
                    raise RolledBack
        except RolledBack:
            self.counts["rollbacks"] += 1
        else:
            self.counts["facts"] += 1

    async def write(self) -> None:
        """Write as many facts as the parent allows, and stay: heartbeats tell readers what they missed."""
        while True:
            while (left := self.orders.get("allowed", 0) - self.counts["facts"]) > 0:
                stream = random.choice(STREAMS)
                rows = [row for _ in range(min(BULK_FACTS, left)) for row in self.make_rows(BULK)]
                self.counts["facts"] += len(await self.bus.publish(stream, rows))
                async with asyncio.TaskGroup() as lanes:
                    for kind in random.choices(KINDS, k=min(LANES, left - len(rows))):
                        lanes.create_task(self.write_one(stream, kind))
            await asyncio.sleep(REPORT_EVERY)

    async def read(self) -> None:
        """Handle all batches; once the parent says where the streams end, report which ends are not reached."""
        task, insert = self.task, self.task.insert("handled", 4)
        # sqlite3 binds parameters with the GIL held, and waits so while another thread's statement on the connection
        # waits for the write lock, which a thread that waits for the GIL may have.
        turn = asyncio.Lock()

        async def handle(batch: busrep.Batch[DemoRow]) -> None:
            """Record a batch as a line. Rows of a fact that do not lie together would show as two facts."""
            facts = [(token, content_of(map(batch.stream.encode, rows))) for token, rows in batch.facts()]
            self.counts["batches"] += 1
            line = json.dumps([batch.stream.name, batch.writer, facts])
            row = (task.who, task.life, self.counts["batches"], line)
            if task.exactly_once:
                async with batch.transaction() as connection:
                    done = connection.execute(insert, row)
                    if inspect.isawaitable(done):
                        await done
            else:  # the position is saved a little later
                async with turn:
                    await asyncio.to_thread(own.execute, insert, row)
            self.counts["facts"] += len(facts)

        with connected(task.store) as own:
            self.bus.subscribe(*STREAMS)(handle)
            while "ends" not in self.orders:  # noqa: ASYNC110 - the parent says it
                await asyncio.sleep(REPORT_EVERY)
            streams, ends = self.bus.streams, self.orders["ends"]
            waits = [self.bus.wait_for(streams[name], writer, end, READ_TIMEOUT) for name, writer, end in ends]
            found = await asyncio.gather(*waits, return_exceptions=True)
            self.report["behind"] = [str(error) for error in found if error is not None]
            await asyncio.Event().wait()


async def work(task: Task, pipe: Connection) -> None:
    """Do the task until the process is killed."""
    role: Any = {task.role: task.who}
    bus = busrep.connect(task.redis, name=task.channel, streams=STREAMS, store=task.store, require_redis=False, **role)
    async with bus:
        worker = Worker(task, pipe, bus, counts=Counter(facts=task.facts))
        await asyncio.gather(worker.converse(), worker.write() if task.role == "writer" else worker.read())


def live(task: Task, pipe: Connection, log: str) -> None:
    """The life of a process. Its log is the file of that name."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's: it ends its children itself
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    status = 0
    try:
        asyncio.run(work(task, pipe))
    except* WriterFenced:
        status = FENCED  # CPython 3.11.2 would put an exit from here into a group, which ends in status 1
    except* BusrepError as failed:
        pipe.send({"error": str(first_error(failed))})
        raise
    sys.exit(status)
