"""What the tests of bootstraps share: a deployment, a source that can be held up and broken, a target to apply to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import attrs

from busrep import Batch, Bus, Settings, SnapshotPart
from busrep.core.snapshots import Agreement
from busrep.testing.pair import MemoryDeployment
from tests.shop import QUICK, Order, orders, payments

SMALL = attrs.evolve(QUICK, snapshot_part_rows=10, retry_min=0.01, retry_max=0.1, fetch_timeout=1.0)


class Source:
    """A `SnapshotSource` in front of another: counts what is asked, and does first what a test says."""

    def __init__(self, under: Any) -> None:
        self.under = under
        self.agrees: list[Agreement | None] = []  # again=, of each call
        self.loads: list[int] = []
        self.held: list[Agreement] = []
        self.opens = self.closes = self.open_loads = 0
        self.on_agree: Callable[[], Awaitable[None]] | None = None
        self.on_load: Callable[[int], Awaitable[None]] | None = None
        self.on_piece: Callable[[int, bytes], bytes] | None = None
        self.change: Callable[[Agreement], Agreement] | None = None

    async def open(self) -> None:
        self.opens += 1

    async def close(self) -> None:
        self.closes += 1

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        self.agrees.append(again)
        if self.on_agree is not None:
            await self.on_agree()
        found = await self.under.agree(stream, part_rows=part_rows, again=again)
        if self.change is not None:
            found = self.change(found)
        self.held.append(found)
        return found

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        self.loads.append(number)
        self.open_loads += 1
        try:
            if self.on_load is not None:
                await self.on_load(number)
            async for piece in self.under.load(agreement, number):
                yield piece if self.on_piece is None else self.on_piece(number, piece)
        finally:
            self.open_loads -= 1

    async def leave(self, agreement: Agreement) -> None:
        assert self.open_loads == 0, "left while it is read"
        self.held = [held for held in self.held if held is not agreement]
        await self.under.leave(agreement)


@attrs.define
class Target:
    """What an application keeps of a stream: all its rows, and in what order they came."""

    rows: dict[tuple[str, int], list[Order]] = attrs.field(factory=dict)
    parts: list[int] = attrs.field(factory=list)
    handled: list[tuple[str, int]] = attrs.field(factory=list)  # (writer, token) after the snapshot
    applied: list[SnapshotPart[Order]] = attrs.field(factory=list)

    def apply(self, part: SnapshotPart[Order]) -> None:
        if part.first:
            self.rows.clear()
            self.handled.clear()
        for token, writer, row in zip(part.tokens, part.writers, part.rows, strict=True):
            self.rows.setdefault((writer, token), []).append(row)
        self.parts.append(part.number)
        self.applied.append(part)

    def handle(self, batch: Batch[Order]) -> None:
        for token, rows in batch.facts():
            assert (batch.writer, token) not in self.rows, "handed out twice"
            self.rows[batch.writer, token] = rows
            self.handled.append((batch.writer, token))

    @property
    def numbers(self) -> list[int]:
        """Of all rows, sorted."""
        return sorted(row.number for rows in self.rows.values() for row in rows)

    def of(self, bus: Bus, **options: Any) -> Target:
        bus.snapshot(orders, **options)(self.apply)
        bus.subscribe(orders)(self.handle)
        return self


def deployment(settings: Settings = SMALL) -> MemoryDeployment:
    return MemoryDeployment(orders, payments, settings=settings)


async def write(bus: Bus, count: int, first: int = 0, stream: Any = orders) -> int:
    """Facts of one row each, numbered; the last ID."""
    return (await bus.publish(stream, [Order(first + at, "new") for at in range(count)]))[-1]


def state(bus: Bus, stream: str = "orders") -> str | None:
    found = bus.statistics()["bootstrap"].get(stream)
    return None if found is None else found["state"]


async def until(true: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait for something that has no event of its own (a counter in statistics)."""
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.005)


async def online(bus: Bus, stream: str = "orders") -> None:
    await until(lambda: state(bus, stream) == "online")


async def heard(bus: Bus, *writers: str) -> None:
    """Wait until these writers have told their positions: rows that come before that are fetched, not taken as they
    come. A REPLICATE soon behind another announcement is answered later (`Settings.answer_interval`)."""
    await until(lambda: bus.reading.core.last_heard.keys() >= set(writers))


async def crash(bus: Bus) -> None:
    """As kill -9 does, of a bus in this process: nothing more is published, saved or released."""
    reading = bus.reading
    reading.closed = reading.tasks.closed = bus.background.closed = bus.tasks.closed = True
    tasks = [
        *bus.background, *bus.tasks, *reading.tasks, *reading.workers.values(), *reading.following.values(),
        *reading.bootstrapping.end(),
    ]  # fmt: skip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if bus.writing is not None:
        bus.writing.core.fenced()
    await bus.link.close()
