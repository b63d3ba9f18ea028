"""Bootstraps in the asyncio runtime: when a reader takes a snapshot, and what may happen to it meanwhile.

In memory and on a virtual clock; on SQLite see test_bootstrap_saving.py.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import attrs
import orjson
import pytest

from busrep import Stream
from busrep.errors import ConfigError, EpochChanged, WaitTimeout
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment
from tests.shop import Order, orders, payments

from .bootstraps import SMALL, Source, Target, crash, deployment, heard, online, state, until, write


def test_a_new_reader_takes_a_snapshot_and_goes_on_behind_it() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 35)
            await writer.writing.beat()  # its position is proven in the table
            async with shop.bus(reader="billing", start=None) as reader:
                target = Target().of(reader)
                await reader.wait_for(orders, "w1", last)
                assert target.parts == [0, 1, 2, 3]
                assert target.handled == []
                assert [part.last for part in target.applied] == [False, False, False, True]
                more = await write(writer, 5, first=35)
                await reader.wait_for(orders, "w1", more)
                assert target.numbers == list(range(40))
                assert [token for _, token in target.handled] == list(range(last + 1, more + 1))
                await online(reader)

    virtual.run(main())


def test_a_paced_snapshot_takes_its_time() -> None:
    async def main() -> None:
        async with deployment(attrs.evolve(SMALL, snapshot_rate=2.0)) as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 35)
            await writer.writing.beat()
            applied: list[float] = []
            async with shop.bus(start=None) as reader:

                @reader.snapshot(orders)
                async def apply(part: Any) -> None:
                    applied.append(asyncio.get_running_loop().time())

                reader.subscribe(orders)(lambda batch: None)
                await reader.wait_for(orders, "w1", last, 60.0)
            # Ten rows a part, two rows a second.
            assert [after - before for before, after in itertools.pairwise(applied)] == pytest.approx([5.0] * 3)

    virtual.run(main())


async def _proven(*writers: Any) -> None:
    """What they wrote is proven in the table."""
    for writer in writers:
        await writer.writing.beat()


# -- when -----------------------------------------------------------------------------------------------------


def test_what_is_written_meanwhile_is_held_and_comes_after_it() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as one, shop.bus(writer="w2") as other:
            await write(one, 15)
            await write(other, 15, first=15)
            await _proven(one, other)
            at, go_on = asyncio.Event(), asyncio.Event()

            async def wait(_: int) -> None:
                at.set()
                await go_on.wait()

            async with shop.bus(start=None) as reader:
                source = Source(reader.store)
                source.on_load = wait
                reader.reading.bootstrapping.source.given = source
                target = Target().of(reader)
                await at.wait()
                assert state(reader) == "loading"
                await heard(reader, "w1", "w2")
                last = [await write(one, 10, first=30), await write(other, 10, first=40)]
                await until(lambda: reader.statistics()["bootstrap"]["orders"]["buffer_bytes"] > 0)
                assert reader.positions() == {}
                with pytest.raises(TimeoutError):
                    await reader.wait_for(orders, "w1", 1, timeout=0.5)
                assert target.parts == [] == target.handled
                go_on.set()
                await reader.wait_for(orders, "w1", last[0])
                await reader.wait_for(orders, "w2", last[1])
                assert target.numbers == list(range(50))
                assert len(target.handled) == 20
                await online(reader)
                found = reader.statistics()["bootstrap"]["orders"]
                assert found["buffer_bytes"] == 0 < found["buffer_bytes_peak"]
                assert (found["rows"], found["rows_total"], found["parts"]) == (30, 30, 3)
                assert reader.statistics()["reader"]["fetches"] == 0, "all that was missing had been held"
                assert source.held == []
                assert orjson.loads(orjson.dumps(found)) == found

    virtual.run(main())


def test_over_the_buffer_limit_the_rest_comes_by_catch_up() -> None:
    async def main() -> None:
        settings = attrs.evolve(SMALL, full_sync_buffer_limit=2_000)
        async with deployment(settings) as shop, shop.bus(writer="w1") as writer:
            await write(writer, 15)
            await _proven(writer)
            at, go_on = asyncio.Event(), asyncio.Event()

            async def wait(_: int) -> None:
                at.set()
                await go_on.wait()

            async with shop.bus(start=None) as reader:
                source = reader.reading.bootstrapping.source.given = Source(reader.store)
                source.on_load = wait
                target = Target().of(reader)
                await at.wait()
                for first in range(15, 115, 10):
                    last = await write(writer, 10, first=first)
                await asyncio.sleep(0.5)
                go_on.set()
                await reader.wait_for(orders, "w1", last)
                assert target.numbers == list(range(115))
                assert reader.statistics()["reader"]["buffer_bytes_peak"] <= 2_000
                assert reader.statistics()["reader"]["fetches"] > 0
                await online(reader)

    virtual.run(main())


def test_a_durable_reader_goes_on_where_it_was_without_another_snapshot() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            await write(writer, 15)
            await _proven(writer)
            target = Target()
            async with shop.bus(reader="billing", start=None) as reader:
                target.of(reader)
                await online(reader)
                await reader.wait_for(orders, "w1", await write(writer, 5, first=15))
            last = await write(writer, 5, first=20)
            async with shop.bus(reader="billing", start=None) as reader:
                target.of(reader)
                await reader.wait_for(orders, "w1", last)
                assert target.parts == [0, 1]
                assert target.numbers == list(range(25))
                assert state(reader) is None
                saved = await reader.store.bootstraps("billing")
                assert [(one.state, one.parts, one.rows, one.syncs) for one in saved] == [("online", 2, 15, 1)]

    virtual.run(main())


@pytest.mark.parametrize("behind", [40, 60])
def test_one_that_is_far_behind_takes_a_snapshot(behind: int) -> None:
    async def main() -> None:
        settings = attrs.evolve(SMALL, bootstrap_lag=50)
        async with deployment(settings) as shop, shop.bus(writer="w1") as writer:
            await write(writer, 15)
            await _proven(writer)
            target = Target()
            async with shop.bus(reader="billing", start=None) as reader:
                target.of(reader)
                await online(reader)
            last = await write(writer, behind, first=15)
            await _proven(writer)
            async with shop.bus(reader="billing", start=None) as reader:
                target.of(reader)
                await reader.wait_for(orders, "w1", last)
                assert target.numbers == list(range(15 + behind))
                if behind > 50:
                    assert target.handled == []
                    await online(reader)
                    found = reader.statistics()["bootstrap"]["orders"]
                    assert (found["reason"], found["syncs"]) == ("60 IDs behind, more than bootstrap_lag", 2)
                else:
                    assert len(target.handled) == behind
                    assert state(reader) is None

    virtual.run(main())


def test_one_that_needs_pruned_rows_takes_a_snapshot() -> None:
    """While it is running, and at a start."""

    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            await write(writer, 15)
            await _proven(writer)
            target = Target()
            for _ in range(2):
                async with shop.bus(reader="billing", start="earliest") as reader:
                    target.of(reader)
                    await reader.wait_for(orders, "w1", 15)
                await write(writer, 10, first=15)
                last = await write(writer, 10, first=25)
                await _proven(writer)
                assert await writer.store.prune(keep=5, reader_cap=0.0) != {}
                async with shop.bus(reader="billing", start="earliest") as reader:
                    target.of(reader)
                    await reader.wait_for(orders, "w1", last)
                    await online(reader)
                    assert target.numbers == sorted(range(30, 35))
                    assert "below the retention floor" in reader.statistics()["bootstrap"]["orders"]["reason"]
                    assert reader.reading.stopped == {}
                return

    virtual.run(main())


def test_a_start_that_was_asked_for_is_no_snapshot() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 15)
            await _proven(writer)
            async with shop.bus(start="earliest") as reader:
                target = Target().of(reader)
                await reader.wait_for(orders, "w1", last)
                assert (target.parts, len(target.handled)) == ([], 15)
                await reader.bootstrap(orders)
                assert state(reader) == "online"
                assert (target.parts, target.handled) == ([0, 1], [])
                more = await write(writer, 5, first=15)
                await reader.wait_for(orders, "w1", more)
                assert target.numbers == list(range(20))
                await reader.bootstrap(orders)
                assert target.numbers == list(range(20))
                assert reader.statistics()["bootstrap"]["orders"]["syncs"] == 2

    virtual.run(main())


def test_what_was_handled_is_waited_for_again_while_a_snapshot_loads() -> None:
    """The target is emptied: that a row had been handled before says nothing of it."""

    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 15)
            await _proven(writer)
            async with shop.bus(start="earliest") as reader:
                source = reader.reading.bootstrapping.source.given = Source(reader.store)
                target = Target().of(reader)
                await reader.wait_for(orders, "w1", last)
                at, go_on = asyncio.Event(), asyncio.Event()

                async def wait(_: int) -> None:
                    at.set()
                    await go_on.wait()

                source.on_load = wait
                asked = asyncio.create_task(reader.bootstrap(orders))
                await at.wait()
                with pytest.raises(WaitTimeout):
                    await reader.wait_for(orders, "w1", last, timeout=0.5)
                waiting = asyncio.create_task(reader.wait_for(orders, "w1", last))
                await asyncio.sleep(0.5)
                assert not waiting.done()
                go_on.set()
                await waiting
                assert target.numbers == list(range(15))
                await asked

    virtual.run(main())


def test_streams_without_a_function_are_read_as_ever() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 15, stream=payments)
            await _proven(writer)
            got: list[int] = []
            async with shop.bus(reader="billing", start=None) as reader:
                Target().of(reader)
                reader.subscribe(payments)(lambda batch: got.extend(batch.tokens))
                await reader.wait_for(payments, "w1", last)
                assert got == list(range(1, 16))
                await online(reader)
                assert set(reader.statistics()["bootstrap"]) == {"orders"}
                with pytest.raises(ConfigError, match=r"decorate with bus\.snapshot"):
                    await reader.bootstrap(payments)

    virtual.run(main())


def test_a_stream_without_rows_empties_the_target() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            async with shop.bus(reader="billing", start=None) as reader:
                target = Target(rows={("old", 1): [Order(1, "old")]}).of(reader)
                await online(reader)
                assert (target.rows, target.parts) == ({}, [0])
                assert (target.applied[0].first, target.applied[0].last) == (True, True)
                await reader.wait_for(orders, "w1", await write(writer, 3))
                assert target.numbers == [0, 1, 2]

    virtual.run(main())


def test_the_latest_of_each_key() -> None:
    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as one, shop.bus(writer="w2") as other:
            for at in range(12):
                await (one, other)[at % 2].publish(orders, [Order(at % 5, f"s{at}")])
            await _proven(one, other)
            async with shop.bus(start=None) as reader:
                target = Target().of(reader, key=lambda row: row.number)
                await online(reader)
                first, second = target.applied
                assert [row.status for row in first.rows] == ["s5", "s6", "s7", "s8", "s9"]
                assert list(first.tokens) == [6, 7, 8, 9, 10]
                assert list(first.writers) == ["w2", "w1", "w2", "w1", "w2"]
                assert [row.status for row in second.rows] == ["s10", "s11"]
                assert (first.progress.rows, second.progress.rows) == (10, 12)
                assert second.progress.parts == len(second.agreement.parts) == 2

    virtual.run(main())


def test_what_cannot_be_bootstrapped_is_said_at_once() -> None:
    async def main() -> None:
        typing = Stream("typing", resettable=True)
        async with MemoryDeployment(orders, typing, settings=SMALL) as shop, shop.bus() as reader:
            with pytest.raises(ConfigError, match="kept in memory"):
                reader.snapshot(typing)(print)
            Target().of(reader)
            with pytest.raises(ConfigError, match="has a function for its snapshots already"):
                reader.snapshot(orders)(print)
            reader.reading.bootstrapping.source.store = object()
            with pytest.raises(ConfigError, match="snapshot_source="):
                reader.reading.bootstrapping.source.check()

    virtual.run(main())


def test_the_function_may_be_known_late() -> None:
    """What was handled until then is begun anew."""

    async def main() -> None:
        async with deployment() as shop, shop.bus(writer="w1") as writer:
            last = await write(writer, 15)
            await _proven(writer)
            async with shop.bus(reader="billing", start=None) as reader:
                target = Target()
                reader.subscribe(orders)(target.handle)
                await reader.wait_for(orders, "w1", last)
                assert len(target.handled) == 15
                reader.snapshot(orders)(target.apply)
                await online(reader)
                assert (target.parts, target.handled) == ([0, 1], [])
                await reader.wait_for(orders, "w1", await write(writer, 5, first=15))
                assert target.numbers == list(range(20))

    virtual.run(main())


# -- another log ----------------------------------------------------------------------------------------------


async def _restore(shop: MemoryDeployment, keep: int) -> None:
    """The database is restored to a state in which w1 had written less."""
    store = open_store(shop.store, Registry([orders, payments]))
    of = "stream = 'orders' AND writer = 'w1'"
    store.world.ask(f"DELETE FROM busrep_facts WHERE {of} AND id > ?", (keep,))
    store.world.ask(f"UPDATE busrep_positions SET position = ? WHERE {of}", (keep,))
    await store.restored()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("when", ["online", "loading"])
def test_another_log_is_a_reason_for_another_snapshot(durable: bool, when: str) -> None:
    async def main() -> None:
        async with deployment() as shop:
            async with shop.bus(writer="w1") as writer:
                await write(writer, 25)
                await _proven(writer)
            go_on, at = asyncio.Event(), asyncio.Event()

            async def wait(number: int) -> None:
                if number == 2:
                    at.set()
                    await go_on.wait()

            async with shop.bus(reader="billing" if durable else None, start=None) as reader:
                source = reader.reading.bootstrapping.source.given = Source(reader.store)
                source.on_load = wait
                target = Target().of(reader)
                resets: list[Any] = []
                reader.on_reset(orders)(lambda *args: resets.append(args))
                await at.wait()
                if when == "online":
                    go_on.set()
                    await online(reader)
                await _restore(shop, 12)
                async with shop.bus(writer="w1") as writer:
                    last = await write(writer, 3, first=100)
                    await _proven(writer)
                    await until(lambda: reader.reading.core.epoch == reader.store.world.epoch)
                    go_on.set()
                    await reader.wait_for(orders, "w1", last)
                    await online(reader)
                    assert target.numbers == [*range(12), 100, 101, 102]
                    assert target.applied[-1].agreement.epoch == reader.store.world.epoch
                    await reader.wait_for(orders, "w1", await write(writer, 3, first=103))
                    assert target.numbers == [*range(12), *range(100, 106)]
                    if durable:
                        await reader.reading.saver.save()
                        state = await reader.store.load_reader("billing")
                        assert state.epoch == reader.store.world.epoch

    virtual.run(main())


def test_another_log_at_the_start() -> None:
    async def main() -> None:
        async with deployment() as shop:
            target = Target()
            async with shop.bus(writer="w1") as writer:
                await write(writer, 25)
                await _proven(writer)
                async with shop.bus(reader="billing", start=None) as reader:
                    target.of(reader)
                    await online(reader)
            await _restore(shop, 12)
            async with shop.bus(reader="billing", start=None) as reader:
                target.of(reader)
                await online(reader)
                assert target.numbers == list(range(12))
                assert reader.statistics()["bootstrap"]["orders"]["reason"] == "the log is another one"

    virtual.run(main())


@pytest.mark.parametrize("start", [None, "earliest"])
def test_one_that_is_killed_before_it_agrees_in_another_log_begins_there_again(start: Any) -> None:
    """What its target holds is of the log before, though other streams are saved in the new one already."""

    async def main() -> None:
        async with deployment() as shop:
            target, handled = Target(), []
            async with shop.bus(writer="w1") as writer:
                await write(writer, 25)
                paid = await write(writer, 5, stream=payments)
                await _proven(writer)
                async with shop.bus(reader="billing", start=start) as reader:
                    target.of(reader)
                    reader.subscribe(payments)(handled.append)
                    await reader.bootstrap(orders)
                    await reader.wait_for(payments, "w1", paid)
                    await reader.reading.saver.save()
            await _restore(shop, 12)
            reader = shop.bus(reader="billing", start=start)
            source = reader.reading.bootstrapping.source.given = Source(reader.store)
            at = asyncio.Event()

            async def killed() -> None:
                at.set()
                await asyncio.Event().wait()

            source.on_agree = killed
            await reader.open()
            target.of(reader)
            reader.subscribe(payments)(handled.append)
            await at.wait()
            await reader.wait_for(payments, "w1", paid)
            await crash(reader)
            async with shop.bus(reader="billing", start=start) as reader:
                target.of(reader)
                await reader.wait_for(orders, "w1", 12)
                assert target.numbers == list(range(12))

    virtual.run(main())


def test_another_log_stops_who_wants_it_so() -> None:
    async def main() -> None:
        async with deployment() as shop:
            async with shop.bus(writer="w1") as writer:
                await write(writer, 25)
                await _proven(writer)
            at = asyncio.Event()

            async def wait(_: int) -> None:
                at.set()
                await asyncio.Event().wait()

            async with shop.bus(start=None, on_epoch_change="stop") as reader:
                source = reader.reading.bootstrapping.source.given = Source(reader.store)
                source.on_load = wait
                Target().of(reader)
                await at.wait()
                waiting = asyncio.create_task(reader.bootstrap(orders))
                await _restore(shop, 12)
                with pytest.raises(EpochChanged):
                    await waiting
                with pytest.raises(EpochChanged):
                    await reader.bootstrap(orders)
            assert (source.held, source.open_loads) == ([], 0)

    virtual.run(main())
