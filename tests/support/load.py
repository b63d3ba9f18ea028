"""Load for a bus: mixed operations whose outcome is kept to compare with.

::

    log = await mixed(bus, [orders, payments], operations=500, seed=1)
    await log.reached(reader)
    log.check(ledger)           # everything committed was handled, once, in order; nothing else was

Time is the loop's, so all of it runs on a virtual clock as well.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from busrep.asyncio import Batch, Bus
from busrep.errors import Closed, CommitUnknown, ConfigError, NotAWriter, RowError, WriterFenced
from busrep.streams import Stream
from tests.support.rows import random_rows

# Errors that the next write would meet as well: they end a load, all others are counted.
FATAL = (Closed, ConfigError, NotAWriter, RowError, WriterFenced)


Facts = dict[str, dict[int, list[Any]]]
"""Stream -> ID, as on the wire -> rows."""


@attrs.define(eq=False)
class Ledger:
    """Keeps what it is called with: ``reader.subscribe(orders)(ledger)``."""

    facts: dict[str, Facts] = attrs.field(factory=dict)
    """Writer -> stream -> ID -> rows."""
    wrong: list[str] = attrs.field(factory=list)
    """Facts that came again, or after a later one of their writer: what a reader that starts once never gets."""

    def __call__(self, batch: Batch[Any]) -> None:
        """Take the facts of a batch in."""
        known = self.facts.setdefault(batch.writer, {}).setdefault(batch.stream.name, {})
        highest = max(known, default=0)
        for token, rows in batch.facts():
            if token <= highest:
                self.wrong.append(f"{batch.stream.name} {batch.writer} {token} came after {highest}")
            known[token] = rows
            highest = max(highest, token)


@attrs.define(eq=False)
class Log:
    """What became of mixed operations of one writer."""

    writer: str
    committed: Facts = attrs.field(factory=dict)
    """Facts with rows that are in the table; empty facts are nobody's."""
    doubtful: Facts = attrs.field(factory=dict)
    """Facts that may be there or not: cancelled while they ended, or COMMIT got no answer."""
    done: Counter[str] = attrs.field(factory=Counter)
    """Operations by kind."""
    failures: Counter[str] = attrs.field(factory=Counter)
    """Operations that raised, by the error's class, other than those that were meant to."""

    def rows(self, stream: Stream[Any]) -> list[Any]:
        """All rows committed to the stream, in the order of their IDs."""
        return [row for _, rows in sorted(self.committed.get(stream.name, {}).items()) for row in rows]

    def add(self, other: Log) -> None:
        """Take in the log of further operations of the same writer."""
        for mine, theirs in ((self.committed, other.committed), (self.doubtful, other.doubtful)):
            for stream, facts in theirs.items():
                mine.setdefault(stream, {}).update(facts)
        self.done.update(other.done)
        self.failures.update(other.failures)

    async def reached(self, reader: Bus, timeout: float = 60.0) -> None:
        """Wait until ``reader`` has handled all that was committed. Raises WaitTimeout after ``timeout`` seconds."""
        for stream, facts in self.committed.items():
            if facts:
                await reader.wait_for(reader.streams[stream], self.writer, max(facts), timeout)

    def check(self, ledger: Ledger) -> None:
        """Raise AssertionError unless the ledger holds what was committed, maybe what is doubtful, and nothing else.

        And all of it once, in order, with the same rows.
        """
        found = ledger.facts.get(self.writer, {})
        wrong = list(ledger.wrong)
        for stream in sorted({*found, *self.committed}):
            committed, handled = self.committed.get(stream, {}), found.get(stream, {})
            possible = {**committed, **self.doubtful.get(stream, {})}
            wrong += [f"{stream} {id}: lost" for id in sorted(committed.keys() - handled.keys())]
            wrong += [f"{stream} {id}: never written" for id in sorted(handled.keys() - possible.keys())]
            wrong += [
                f"{stream} {id}: other rows" for id in sorted(handled) if possible.get(id, []) not in ([], handled[id])
            ]
        if wrong:
            more = f"\n... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise AssertionError(f"facts of {self.writer}:\n" + "\n".join(wrong[:20]) + more)


class _RollbackError(Exception):
    """Raised in a fact's block to roll it back."""


async def mixed(
    bus: Bus, streams: Sequence[Stream[Any]], *, operations: int, seed: int, at_once: int = 4, hold: float = 0.02
) -> Log:
    """Do random operations on a writer, ``at_once`` of them at a time; the log says what they did.

    Facts of no row, one and several, of one stream and of more; bulk publishes; rollbacks; transactions held open up to
    ``hold`` seconds while others commit; facts cancelled at any moment. Rows are those of `random_rows`. The same seed
    makes the same operations, in an order that depends on the store. Errors of the network and the database are
    counted in the log's ``failures``.
    """
    if bus.writer is None:
        raise NotAWriter(streams[0].name, None)
    work = _Mixed(bus, streams, hold, Log(bus.writer))
    numbers = iter(range(operations))

    async def worker() -> None:
        for number in numbers:
            await work.operation(random.Random(f"{seed} {number}"))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return work.log


class _Mixed:
    def __init__(self, bus: Bus, streams: Sequence[Stream[Any]], hold: float, log: Log) -> None:
        self.bus, self.streams, self.hold, self.log = bus, streams, hold, log
        kinds = {"fact": 6, "several": 3, "bulk": 2, "rollback": 2, "held": 1, "cancelled": 2}
        self.kinds = [kind for kind, weight in kinds.items() for _ in range(weight)]

    async def operation(self, dice: random.Random) -> None:
        kind = dice.choice(self.kinds)
        self.log.done[kind] += 1
        try:
            if kind == "bulk":
                await self.bulk(dice)
            elif kind == "cancelled":
                await self.cancelled(dice)
            else:
                await self.fact(dice, kind)
        except _RollbackError:
            pass
        except FATAL:
            raise
        except Exception as error:  # of the database's driver, whichever that is
            self.log.failures[type(error).__name__] += 1

    def some(self, stream: Stream[Any], most: int, dice: random.Random) -> list[Any]:
        return list(itertools.islice(random_rows(stream.row_type, dice.getrandbits(32)), dice.randint(0, most)))

    async def bulk(self, dice: random.Random) -> None:
        stream = dice.choice(self.streams)
        rows = self.some(stream, 20, dice)
        for id, row in zip(await self.bus.publish(stream, rows), rows, strict=True):
            self.log.committed.setdefault(stream.name, {})[abs(id)] = [row]

    async def fact(self, dice: random.Random, kind: str) -> None:
        count = dice.randint(1, len(self.streams)) if kind == "several" else 1
        rows = {stream: self.some(stream, 4, dice) for stream in dice.sample(self.streams, count)}
        ids: dict[str, int] = {}
        ending = False
        try:
            async with self.bus.write(*rows) as fact:
                ids = fact.ids
                for stream, its in rows.items():
                    for row in its:
                        fact.add(row, stream=stream)
                if kind == "rollback":
                    raise _RollbackError
                if kind in ("held", "cancelled"):
                    await asyncio.sleep(dice.uniform(0, self.hold))
                ending = True
        except (CommitUnknown, asyncio.CancelledError):
            if ending:
                self.note(self.log.doubtful, ids, rows)
            raise
        self.note(self.log.committed, ids, rows)

    def note(self, where: Facts, ids: dict[str, int], rows: dict[Stream[Any], list[Any]]) -> None:
        for stream, its in rows.items():
            if its:
                where.setdefault(stream.name, {})[abs(ids[stream.name])] = its

    async def cancelled(self, dice: random.Random) -> None:
        writing = asyncio.create_task(self.fact(dice, "cancelled"))
        try:
            await asyncio.wait([writing], timeout=dice.uniform(0, 1.5 * self.hold))
        finally:
            writing.cancel()
            await asyncio.wait([writing])
        if not writing.cancelled():
            writing.result()
