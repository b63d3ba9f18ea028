"""A reader process of ``busrep demo``: records every fact it handles, in the order of handling."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Protocol

import busrep
from busrep.cli.demo_rows import REPORT_EVERY, DemoRow, Task, demo_streams, fact_digest, run_child
from busrep.cli.demo_table import HandledTable
from busrep.errors import WaitTimeout
from busrep.testing.children import Parent

Entry = tuple[str, str, int, int, str]
"""stream, writer, token, rows, digest of one handled fact."""


class Recorder(Protocol):
    """Where a reader keeps what it handled."""

    async def record(self, batch: busrep.Batch[DemoRow], entries: list[Entry]) -> None:
        """Keep the facts of one batch."""


class FileRecorder:
    """An append-only file; the bus saves the positions by itself, a little later: at-least-once."""

    def __init__(self, path: str, life: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._drop_torn_line()
        self._life = life

    def _drop_torn_line(self) -> None:
        # A kill may cut a write short. That batch counts as not handled and comes again.
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, 1_000, max(0, size - 1_000))
        os.ftruncate(self._file, size - (len(tail) - tail.rfind(b"\n") - 1))

    async def record(self, batch: busrep.Batch[DemoRow], entries: list[Entry]) -> None:  # noqa: ARG002 - see Recorder
        """Append a line per fact."""
        lines = "".join(f"{self._life} {' '.join(map(str, entry))}\n" for entry in entries).encode()
        while lines:
            lines = lines[os.write(self._file, lines) :]


class StoreRecorder:
    """A table in the store, written in the transaction that saves the position: exactly-once."""

    def __init__(self, task: Task) -> None:
        self._task, self._table = task, HandledTable(task.store, task.run)

    async def record(self, batch: busrep.Batch[DemoRow], entries: list[Entry]) -> None:
        """Insert the facts and save the position, both or neither."""
        rows = [(self._task.who, self._task.life, *entry) for entry in entries]
        async with self._table.transaction() as connection:
            await self._table.insert(connection, rows)
            await batch.save(connection)


def entries_of(batch: busrep.Batch[DemoRow]) -> Iterator[Entry]:
    """One entry per fact of a batch; a fact whose rows do not lie together would show as two."""
    for token, rows in batch.facts():
        payloads = [batch.stream.encode(row) for row in rows]
        yield batch.stream.name, batch.writer, token, len(payloads), fact_digest(payloads)


class DemoReading:
    """The handlers of one reader process, and its counters."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        self.streams = demo_streams(task.run)
        self.recorder = recorder
        self.facts = self.rows = 0

    async def handle(self, batch: busrep.Batch[DemoRow]) -> None:
        """Record one batch."""
        entries = list(entries_of(batch))
        await self.recorder.record(batch, entries)
        self.facts, self.rows = self.facts + len(entries), self.rows + len(batch.rows)

    async def follow(self, bus: busrep.Bus) -> None:
        """Handle all batches of both streams in one loop."""
        async for batch in bus.follow(*self.streams):
            await self.handle(batch)


async def reach(bus: busrep.Bus, finals: dict[str, dict[str, int]], timeout: float) -> list[str]:
    """Wait until all up to ``finals`` was handled; returns what was not reached in ``timeout`` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    behind = []
    for stream, writers in finals.items():
        for writer, position in writers.items():
            left = max(0.001, deadline - asyncio.get_running_loop().time())
            try:
                await bus.wait_for(bus.streams[stream], writer, position, timeout=left)
            except WaitTimeout as error:
                behind.append(str(error))
    return behind


async def _reports(parent: Parent, reading: DemoReading, bus: busrep.Bus) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY)
        parent.tell(facts=reading.facts, rows=reading.rows, statistics=bus.statistics())


async def read() -> None:
    """Follow both streams until told where they end."""
    parent = Parent()
    task = Task(**await parent.hear())
    recorder = FileRecorder(task.record, task.life) if task.record else StoreRecorder(task)
    reading = DemoReading(task, recorder)
    bus = busrep.connect(
        task.redis,
        name=task.name,
        streams=reading.streams,
        store=task.store,
        reader=task.who,
        settings=task.settings,
        require_redis=False,  # it may be away while this process is started again
    )
    async with bus:
        background = [asyncio.create_task(_reports(parent, reading, bus))]
        # Both ways to read: handlers where the position is saved with the effects, a loop where it is not.
        if task.record is None:
            bus.subscribe(*reading.streams)(reading.handle)
        else:
            background.append(asyncio.create_task(reading.follow(bus)))
        parent.tell(ready=True)
        try:
            message = await parent.hear()
            behind = await reach(bus, message["finish"], message["timeout"])
        finally:
            for one in background:
                one.cancel()
        parent.tell(facts=reading.facts, rows=reading.rows, statistics=bus.statistics(), finished=True, behind=behind)


def main() -> None:
    """Entry point of the process."""
    run_child(read())


if __name__ == "__main__":
    main()
