"""The handlers of a reader process: note, do something, note."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

from busrep.asyncio import Batch
from tests.proof.soak.database import EFFECTS, psycopg
from tests.proof.soak.ledger import Anew, Gone, Handled, Ledger, Started
from tests.proof.soak.runtime import Bus, Runtime
from tests.proof.soak.task import Row, Task, digest


class MomentaryFailure(Exception):
    """What a handler raises now and then; it is called again."""


class Reading:
    """What one reader process does with its batches."""

    def __init__(self, runtime: Runtime, task: Task, bus: Bus, ledger: Ledger, dice: random.Random) -> None:
        self.runtime, self.task, self.bus, self.ledger, self.dice = runtime, task, bus, ledger, dice
        self._connection: Any = None
        self._one_at_a_time = asyncio.Lock()
        bus.on_reset()(lambda stream, writer, position: ledger.note(Anew(stream, writer, position)))
        bus.on_missed()(lambda *what: ledger.note(Gone(*what)))

    async def run(self) -> None:
        """Have everything handled from now on, and with "now" do it here; both ways to read are used."""
        if self.task.reads == "now":
            async with contextlib.aclosing(self.bus.follow(*self.task.streams)) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    await self.handle(batch)
        self.bus.subscribe(*self.task.streams)(self.handle)

    async def handle(self, batch: Batch[Row]) -> None:
        """Note that it came, do it, note that it is done."""
        facts = []
        for token, rows in batch.facts():
            facts.append((token, len(rows), digest(map(batch.stream.encode, rows))))
        self.ledger.note(Started(batch.stream.name, batch.writer, batch.after, batch.position, tuple(facts)))
        if self.task.reads == "exact":
            await self.in_one_transaction(batch, facts)
        else:
            await self.runtime.sleep(self.dice.choice([0, 0, 0, 0.002, 0.02]))
        if self.task.reads != "now" and self.dice.random() < 0.01:
            # The exactly-once one has committed by now.
            raise MomentaryFailure
        self.ledger.note(Handled(batch.stream.name, batch.writer, batch.position))

    async def in_one_transaction(self, batch: Batch[Row], facts: list[tuple[int, int, str]]) -> None:
        """The effects and the position, both or neither."""
        async with self._one_at_a_time:
            connection = await self.connection()
            try:
                async with connection.transaction():
                    columns = [list(column) for column in zip(*facts, strict=True)] or [[], [], []]
                    await connection.execute(EFFECTS, (self.task.who, batch.stream.name, batch.writer, *columns))
                    await batch.save(connection)
                    if self.dice.random() < 0.01:
                        raise MomentaryFailure
            except psycopg().Error:
                await self.close()
                raise

    async def connection(self) -> Any:
        """The application's connection; a new one, as soon as there can be one, when the last one broke."""
        while self._connection is None or self._connection.closed:
            with contextlib.suppress(psycopg().Error):
                self._connection = await self.runtime.connect(self.task.reader_store)
                break
            await self.runtime.sleep(0.1)
        return self._connection

    async def close(self) -> None:
        """Close the application's connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
