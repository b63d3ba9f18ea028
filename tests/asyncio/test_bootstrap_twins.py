"""Two processes under one reader name, and a snapshot: whatever one handled before the other began it is void."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from busrep import Batch, Bus, SnapshotPart
from busrep.core.snapshots import AppliedParts
from busrep.errors import Closed, Unavailable
from busrep.testing import virtual
from tests.shop import Order, orders

from .bootstraps import SMALL, Source, crash, deployment, heard, online, state, until, write
from .test_bootstrap import _restore

RARELY = attrs.evolve(SMALL, save_every=1_000.0)  # positions are saved when a test says so


@attrs.define
class Shared:
    """What two processes of one name keep together; at least once, for nothing is saved with it."""

    rows: dict[tuple[str, int], int] = attrs.field(factory=dict)
    parts: list[int] = attrs.field(factory=list)
    gate: asyncio.Event = attrs.field(factory=asyncio.Event)
    held: asyncio.Event = attrs.field(factory=asyncio.Event)
    at: int | None = None  # the part that waits at the gate

    async def apply(self, part: SnapshotPart[Order]) -> None:
        if part.number == self.at:
            self.held.set()
            await self.gate.wait()
        if part.first:
            self.rows.clear()
        for token, writer, row in zip(part.tokens, part.writers, part.rows, strict=True):
            self.rows[writer, token] = row.number
        self.parts.append(part.number)

    def handle(self, batch: Batch[Order]) -> None:
        for token, rows in batch.facts():
            self.rows[batch.writer, token] = rows[0].number

    async def stuck(self, _: Batch[Order]) -> None:
        self.held.set()
        await asyncio.Event().wait()

    @property
    def numbers(self) -> list[int]:
        return sorted(self.rows.values())


async def saved(bus: Bus, writer: str = "w1") -> int:
    return int((await bus.store.load_reader("billing")).positions["orders", writer])


@pytest.mark.parametrize("behind", [0, 3])
def test_a_position_that_is_what_it_was_is_another_after_a_snapshot(behind: int) -> None:
    """One has handled rows that it has not saved; the other loads a snapshot that ends at the very position that is
    saved, or behind it, and dies: the first one's rows are gone from the target, and must come again."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target = Shared()
            first = await write(writer, 35)
            await writer.writing.beat()
            async with shop.bus(reader="billing", start="earliest") as two:
                two.subscribe(orders)(target.handle)
                await two.wait_for(orders, "w1", first)
                await two.reading.saver.save()
                assert await saved(two) == first
                if behind:
                    await write(writer, behind, first=35)
                await writer.writing.beat()
                one = shop.bus(reader="billing", start="earliest")
                await one.open()
                await heard(one, "w1")
                agreed = await one.store.agree("orders", part_rows=10)
                await two.wait_for(orders, "w1", await write(writer, 8 - behind, first=35 + behind))
                source = one.reading.bootstrapping.source.given = Source(one.store)
                source.change = lambda _: agreed

                @one.snapshot(orders)
                async def apply(part: SnapshotPart[Order]) -> None:
                    await target.apply(part)
                    if part.last:
                        one.subscribe(orders)(target.stuck)

                asking = asyncio.create_task(one.bootstrap(orders))
                await target.held.wait()
                assert state(one) == "draining"
                assert target.numbers == list(range(35 + behind))
                assert await saved(one) == first + behind
                await crash(one)
                assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], Closed)
                await two.reading.saver.save()
                await until(lambda: target.numbers == list(range(43)))
                await two.wait_for(orders, "w1", await write(writer, 2, first=43))
                assert target.numbers == list(range(45))
                await two.reading.saver.save()
                assert await saved(two) == 45

    virtual.run(main())


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("began", ["before", "meanwhile"])
def test_a_process_waits_until_the_others_snapshot_is_applied(knows: bool, began: str) -> None:
    """Without a function for it, too; and it asks for news now and then, no more."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target, handled = Shared(at=1), []
            last = await write(writer, 35)
            await writer.writing.beat()
            two = shop.bus(reader="billing", start="earliest")

            async def begin() -> None:
                await two.open()
                if knows:
                    two.snapshot(orders)(target.apply)

                @two.subscribe(orders)
                def handle(batch: Batch[Order]) -> None:
                    handled.append(batch.position)
                    target.handle(batch)

            if began == "before":
                await begin()
                await two.wait_for(orders, "w1", last)
                await heard(two, "w1")
                await two.reading.saver.save()
            async with shop.bus(reader="billing", start="earliest" if began == "before" else None) as one:
                one.snapshot(orders)(target.apply)
                one.subscribe(orders)(target.handle)
                asking = asyncio.create_task(one.bootstrap(orders))
                await target.held.wait()
                if began == "meanwhile":
                    await begin()
                last = await write(writer, 5, first=35)
                if began == "before" and not knows:  # it goes on, and finds out when it saves
                    await two.wait_for(orders, "w1", last)
                await two.reading.saver.save()
                await until(lambda: "orders" in two.reading.core.bootstrapping)
                handled.clear()
                asked = 0
                load = two.store.load_reader

                async def counted(reader: str) -> Any:
                    nonlocal asked
                    asked += 1
                    return await load(reader)

                two.store.load_reader = counted
                begun = asyncio.get_running_loop().time()
                waiting = asyncio.create_task(two.wait_for(orders, "w1", last, timeout=1_000))
                await asyncio.sleep(100)
                assert not waiting.done()
                assert handled == []
                assert "orders" not in two.positions()
                passed = asyncio.get_running_loop().time() - begun
                assert 0 < asked <= 1.1 * passed / two.settings.heartbeat, "each beat at most"
                target.gate.set()
                await asking
                await waiting
                await one.wait_for(orders, "w1", last)
                assert target.numbers == list(range(40))
                last = await write(writer, 5, first=40)
                await two.wait_for(orders, "w1", last)
                assert target.numbers == list(range(45))
            await two.reading.saver.save()
            assert await saved(two) == last
            await two.close()

    virtual.run(main())


def test_one_that_drains_when_the_other_begins_anew_goes_on_with_that() -> None:
    """The positions that it would go on behind are those of a target that is half filled by now."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target = Shared()
            await write(writer, 35)
            await writer.writing.beat()
            async with shop.bus(reader="billing", start=None) as one:
                store, load = writer.store, one.store.load_reader
                anew: list[Any] = []
                applied: list[list[int]] = []  # when rows were handed out

                async def late(reader: str) -> Any:
                    if target.parts == [0, 1, 2, 3] and not anew:
                        await write(writer, 5, first=35)
                        await writer.writing.beat()
                        found = await store.agree("orders", part_rows=10)
                        await store.leave(found)
                        anew.append(found)
                        await store.begin_bootstrap("billing", found, syncs=1, reason="asked for")
                        await write(writer, 5, first=40)
                    return await load(reader)

                one.store.load_reader = late
                one.snapshot(orders)(target.apply)

                @one.subscribe(orders)
                def handle(batch: Batch[Order]) -> None:
                    applied.append(list(target.parts))
                    target.handle(batch)

                await until(lambda: anew)
                await online(one)
                last = await write(writer, 5, first=45)
                await one.wait_for(orders, "w1", last)
                assert target.numbers == list(range(50))
                assert [0, 1, 2, 3] not in applied, "handed out on what would be emptied"
                assert target.parts == [0, 1, 2, 3, 0, 1, 2, 3]
                await one.reading.saver.save()
                assert await saved(one) == last

    virtual.run(main())


def test_what_the_other_has_begun_is_looked_for_again_when_it_cannot_be_read() -> None:
    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target, failed = Shared(at=1), []
            last = await write(writer, 35)
            await writer.writing.beat()
            async with shop.bus(reader="billing", start="earliest") as two:
                two.snapshot(orders)(target.apply)
                two.subscribe(orders)(target.handle)
                await two.wait_for(orders, "w1", last)
                await two.reading.saver.save()
                given = two.store.bootstraps

                async def unknown(*args: Any) -> Any:
                    if not failed:
                        failed.append(args)
                        raise Unavailable("the store", "no answer")
                    return await given(*args)

                async with shop.bus(reader="billing", start="earliest") as one:
                    one.snapshot(orders)(target.apply)
                    one.subscribe(orders)(target.handle)
                    asking = asyncio.create_task(one.bootstrap(orders))
                    await target.held.wait()
                    two.store.bootstraps = unknown
                    await until(lambda: state(two) == "loading")
                    assert len(failed) == 1
                    target.gate.set()
                    await asking
                    await online(two)
                    last = await write(writer, 5, first=35)
                    await asyncio.gather(one.wait_for(orders, "w1", last), two.wait_for(orders, "w1", last))
                    assert target.numbers == list(range(40))

    virtual.run(main())


def test_a_function_known_late_goes_on_with_what_is_saved_by_then() -> None:
    """Not with what was saved at the start: its first part would empty a target that another process filled since."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target = Shared(at=1)
            await write(writer, 35)
            await writer.writing.beat()
            found = await writer.store.agree("orders", part_rows=10)
            await writer.store.leave(found)
            await writer.store.begin_bootstrap("billing", found, syncs=1, reason="killed since")
            async with shop.bus(reader="billing", start=None) as two:
                two.subscribe(orders)(target.handle)
                await until(lambda: "orders" in two.reading.core.bootstrapping)
                async with shop.bus(reader="billing", start=None) as one:
                    one.snapshot(orders)(target.apply)
                    await target.held.wait()
                    assert target.parts == [0]
                    two.snapshot(orders)(target.apply)
                    await until(lambda: state(two) and two.statistics()["bootstrap"]["orders"]["parts"] == 1)
                    target.gate.set()
                    await asyncio.gather(online(one), online(two))
                assert target.parts.count(0) == 1
                last = await write(writer, 5, first=35)
                await two.wait_for(orders, "w1", last)
                assert target.numbers == list(range(40))

    virtual.run(main())


def test_a_part_that_stopped_one_is_not_applied_again_behind_the_others_back() -> None:
    """It stopped at the first part, which empties the target; since then another process has applied them all."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target, failing = Shared(), [ValueError("no")] * 4
            await write(writer, 35)
            await writer.writing.beat()
            async with shop.bus(reader="billing", start=None) as two:

                @two.snapshot(orders)
                async def apply(part: SnapshotPart[Order]) -> None:
                    if failing:
                        raise failing.pop()
                    await target.apply(part)

                two.subscribe(orders)(target.handle)
                await until(lambda: two.reading.stopped_bootstraps)
                assert failing == []
                async with shop.bus(reader="billing", start=None) as one:
                    one.snapshot(orders)(target.apply)
                    one.subscribe(orders)(target.handle)
                    last = await write(writer, 5, first=35)
                    await one.wait_for(orders, "w1", last)
                    await one.reading.saver.save()
                assert target.parts == [0, 1, 2, 3]
                two.resume(orders, "w1")
                await online(two)
                assert target.parts == [0, 1, 2, 3]
                assert target.numbers == list(range(40))
                await two.wait_for(orders, "w1", await write(writer, 5, first=40))
                assert target.numbers == list(range(45))

    virtual.run(main())


@pytest.mark.parametrize("saves", ["first", "later"])
def test_two_processes_find_another_log_and_load_it_between_them(saves: str) -> None:
    async def main() -> None:
        async with deployment(RARELY) as shop:
            target = Shared()
            async with shop.bus(writer="w1") as writer:
                last = await write(writer, 25)
                await writer.writing.beat()
            async with (
                shop.bus(reader="billing", start="earliest") as one,
                shop.bus(reader="billing", start="earliest") as two,
            ):
                for bus in (one, two):
                    bus.snapshot(orders)(target.apply)
                    bus.subscribe(orders)(target.handle)
                    await bus.wait_for(orders, "w1", last)
                await one.reading.saver.save()
                await _restore(shop, 12)
                async with shop.bus(writer="w1") as writer:
                    await write(writer, 3, first=100)
                    await until(lambda: one.reading.core.epoch == one.store.world.epoch)
                    if saves == "first":
                        await two.reading.saver.save()
                    await until(lambda: state(one) == state(two) == "online")
                    last = await write(writer, 3, first=103)
                    await one.wait_for(orders, "w1", last)
                    await two.wait_for(orders, "w1", last)
                    assert target.numbers == [*range(12), *range(100, 106)]
                    await one.reading.saver.save()
                    await two.reading.saver.save()
                    assert await saved(two) == last
                    assert one.reading.stopped == two.reading.stopped == {}

    virtual.run(main())


def test_a_part_of_a_snapshot_that_another_process_began_anew_meanwhile_is_not_taken_for_one_of_it() -> None:
    """Both load the very same snapshot. One has applied its last part before the other emptied the target, and saves
    it when the other has saved all parts before it, and has died: the part is to be applied again."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target = Shared()
            last = await write(writer, 35)
            await writer.writing.beat()
            store, anew = writer.store, []

            async def begin_anew(part: SnapshotPart[Order]) -> None:
                found = await store.agree("orders", part_rows=10)
                await store.leave(found)
                assert found.same(part.agreement)
                id = await store.begin_bootstrap("billing", found, syncs=2, reason="asked for")
                anew.append(id)
                target.rows = {key: number for key, number in target.rows.items() if number < 30}
                for at in range(part.number):
                    step = AppliedParts(parts=at, applied=at + 1, rows=10, bytes=1, state="loading")
                    await store.save_bootstrap("billing", "orders", id, step)

            async with shop.bus(reader="billing", start=None) as one:

                @one.snapshot(orders)
                async def apply(part: SnapshotPart[Order]) -> None:
                    await target.apply(part)
                    if part.last and not anew:
                        await begin_anew(part)

                one.subscribe(orders)(target.handle)
                await one.wait_for(orders, "w1", last)
                assert target.numbers == list(range(35))
                assert target.parts == [0, 1, 2, 3, 3]
                (saved,) = await store.bootstraps("billing")
                assert (saved.id, saved.parts) == (anew[0], 4)

    virtual.run(main())


def test_who_asks_while_another_process_loads_the_same_snapshot_anew_joins_in() -> None:
    """Both have loaded it before: that it is the same one tells nothing."""

    async def main() -> None:
        async with deployment(RARELY) as shop, shop.bus(writer="w1") as writer:
            target = Shared()
            await write(writer, 35)
            await writer.writing.beat()
            async with (
                shop.bus(reader="billing", start="earliest") as one,
                shop.bus(reader="billing", start="earliest") as two,
            ):
                for bus in (one, two):
                    bus.snapshot(orders)(target.apply)
                    bus.subscribe(orders)(target.handle)
                await two.bootstrap(orders)
                await online(two)
                target.at = 2
                asking = asyncio.create_task(one.bootstrap(orders))
                await target.held.wait()
                (begun,) = await writer.store.bootstraps("billing")
                assert begun.parts == 2
                joining = asyncio.create_task(two.bootstrap(orders))
                await until(lambda: state(two) == "loading")
                (saved,) = await writer.store.bootstraps("billing")
                assert (saved.id, saved.parts) == (begun.id, 2), "begun anew under the other's hands"
                target.gate.set()
                await asyncio.gather(asking, joining)
                assert target.parts.count(0) == 2
                assert target.numbers == list(range(35))

    virtual.run(main())
