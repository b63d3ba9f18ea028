"""Answers of a server that has not seen a restore, or that come after it: they say nothing of the log that is read."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest

from busrep.errors import Unavailable
from busrep.stores import memory, open_store
from busrep.stores.interface import KnownWriter
from busrep.streams import Registry
from busrep.testing import MemoryDeployment, virtual
from tests.shop import Order, orders, payments


class TwoServers:
    """The way of a reader to the log: of two servers at one address ``old`` has not seen the restore.

    ``old``: its epoch and registry. ``turns``: it gives so many of the next answers. ``slow``: the next registry comes
    when this is set, as it was when it was asked for; ``asked`` is set then.
    """

    def __init__(self, deployment: MemoryDeployment) -> None:
        self.store: Any = open_store(deployment.store, Registry([orders, payments]), settings=deployment.settings)
        self.old: tuple[str, Sequence[KnownWriter]] = ("", [])
        self.turns = self.answered = 0
        self.slow: asyncio.Event | None = None
        self.asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def remember(self) -> None:
        self.old = await self.store.epoch(), await self.store.known()

    def _is_old(self) -> bool:
        self.turns -= 1
        self.answered += self.turns >= 0
        return self.turns >= 0

    async def epoch(self) -> str:
        return self.old[0] if self._is_old() else str(await self.store.epoch())

    async def known(self, epoch: str | None = None) -> Sequence[KnownWriter]:
        if self._is_old():
            if epoch not in (None, self.old[0]):
                raise Unavailable("the old server", "its epoch is another one")
            return self.old[1]
        found: Sequence[KnownWriter] = await self.store.known(epoch)
        if self.slow is not None:
            slow, self.slow = self.slow, None
            self.asked.set()
            await slow.wait()
            self.answered += 1
        return found


class Restoring:
    """A deployment of which a backup is restored: there w1 is at ``kept``, at 2 * ``kept`` it was before."""

    kept = 5

    def __init__(self, deployment: MemoryDeployment, stream: Any) -> None:
        self.deployment, self.stream = deployment, stream
        self.world, self.source = memory.world_of(deployment.name), TwoServers(deployment)
        self.backup = sqlite3.connect(":memory:")

    async def write_before(self) -> None:
        async with self.deployment.bus(writer="w1") as w1:
            await w1.publish(self.stream, [Order(n, "kept") for n in range(self.kept)])
            await asyncio.sleep(1.0)
            self.world.connection.backup(self.backup)
            await w1.publish(self.stream, [Order(n, "lost") for n in range(self.kept)])

    async def restore(self) -> None:
        self.backup.backup(self.world.connection)
        await self.source.store.restored()


@pytest.mark.parametrize("how", ["late", "of another server"])
def test_a_registry_of_the_log_before_tells_nothing_of_this_one(how: str) -> None:
    """A writer that has an open fact would pass for one that is further: the fact would be stepped over."""

    async def main() -> None:
        async with MemoryDeployment(orders, payments) as deployment:
            restoring = Restoring(deployment, orders)
            source, got = restoring.source, list[int]()
            async with deployment.bus(store=source) as reader:
                reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
                await restoring.write_before()
                await reader.wait_for(orders, "w1", 10)
                await source.remember()
                late = asyncio.Event()
                if how == "late":
                    source.slow = late
                    await source.asked.wait()
                await restoring.restore()
                got.clear()
                async with deployment.bus(writer="w1") as w1, deployment.bus(writer="w2") as w2:
                    (first,) = await w2.publish(orders, [Order(1, "new")])
                    await reader.wait_for(orders, "w2", first)  # it reads the new log
                    async with w1.write(orders) as fact:
                        fact.add(Order(2, "new"))
                        (last,) = await w2.publish(orders, [Order(3, "new")])
                        late.set()
                        source.turns = 2 * (how != "late")
                        while not source.answered:
                            await asyncio.sleep(0.05)
                        await asyncio.sleep(1.0)
                    await reader.wait_for(orders, "w1", fact.id)
                    await reader.wait_for(orders, "w2", last)
                    assert fact.id in got

    virtual.run(main())


@pytest.mark.parametrize("beside", [True, False], ids=["beside another one", "alone"])
def test_a_stream_begins_in_the_log_that_is_read(beside: bool) -> None:
    """Floors of the other log would be where it begins: the rows below them would never be asked for."""

    async def main() -> None:
        async with MemoryDeployment(orders, payments) as deployment:
            restoring = Restoring(deployment, payments)
            source, got = restoring.source, list[int]()
            await restoring.write_before()
            await source.store.prune(stream="payments", keep=1)
            await source.remember()
            await restoring.restore()
            async with deployment.bus(writer="w1") as w1, deployment.bus(store=source, start="earliest") as reader:
                if beside:
                    (first,) = await w1.publish(orders, [Order(1, "new")])
                    reader.subscribe(orders)(lambda _: None)
                    await reader.wait_for(orders, "w1", first)
                ids = await w1.publish(payments, [Order(n, "new") for n in range(7)])
                source.turns = 2
                reader.subscribe(payments)(lambda batch: got.extend(batch.tokens))
                async with asyncio.timeout(60.0):
                    while not set(range(1, ids[-1] + 1)) <= set(got):
                        await asyncio.sleep(0.1)

    virtual.run(main())


@pytest.mark.parametrize("stream", [orders, payments], ids=["of the stream itself", "of another one"])
def test_a_log_of_which_nothing_was_read_is_left_without_a_page(stream: Any) -> None:
    """There was no writer: nothing can be asked of it that would tell of the restore."""

    async def main() -> None:
        async with MemoryDeployment(orders, payments) as deployment:
            source, got = TwoServers(deployment), list[int]()
            async with deployment.bus(store=source, start="earliest") as reader:
                reader.subscribe(orders)(lambda _: None)
                await reader.reading.followed(orders)
                await source.store.restored()
                async with deployment.bus(writer="w1") as w1:
                    ids = await w1.publish(stream, [Order(1, "new")])
                    reader.subscribe(stream)(lambda batch: got.extend(batch.tokens))
                    await reader.wait_for(stream, "w1", ids[-1])
            assert got == ids

    virtual.run(main())


def test_the_linear_position_is_of_one_log() -> None:
    """Of a registry of the log before a writer is missing, and with it the fact that it has open."""

    async def main() -> None:
        async with MemoryDeployment(orders, payments) as deployment:
            source = TwoServers(deployment)
            async with deployment.bus(writer="w1") as w1:
                await w1.publish(orders, [Order(1, "old")])
                await source.remember()
            await source.store.restored()
            async with (
                deployment.bus(writer="w1") as w1,
                deployment.bus(writer="w2") as w2,
                deployment.bus(store=source) as reader,
            ):
                reader.subscribe(orders)(lambda _: None)
                async with w2.write(orders) as fact:
                    fact.add(Order(2, "new"))
                    (last,) = await w1.publish(orders, [Order(3, "new")])
                    await reader.wait_for(orders, "w1", last)
                    source.turns = 1
                    with pytest.raises(Unavailable):
                        await reader.linear_position(orders)
                    assert await reader.linear_position(orders) < fact.id

    virtual.run(main())
