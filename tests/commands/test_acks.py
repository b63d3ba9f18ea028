"""A writer keeps its rows until they are acknowledged, whatever is lost, repeated, late or of another life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest

import busrep
from busrep import ConfigError, PositionTooOld, Unavailable
from busrep.commands import acks as module
from busrep.commands.acks import Acknowledgements, Retained
from busrep.core.application_commands import FederationAck
from busrep.core.catchup import FetchUpdates
from busrep.errors import NotAWriter, UnknownStream
from busrep.testing import MemoryRedis
from tests.commands.commands_child import Child, sending
from tests.commands.test_presence import CALM, Lossy, virtually
from tests.stores.store_conformance import sync


@asynccontextmanager
async def writing(server: MemoryRedis, *expected: str, **options: Any) -> AsyncIterator[tuple[busrep.Bus, Retained]]:
    async with busrep.connect(server.client(), name="shop", streams=[sending], writer="w", settings=CALM) as bus:
        retained = Retained(bus, sending, expected=expected or ("c",), **options)
        yield bus, retained


@asynccontextmanager
async def consuming(server: MemoryRedis) -> AsyncIterator[tuple[busrep.Bus, Acknowledgements]]:
    async with busrep.connect(server.client(), name="shop", streams=[sending], settings=CALM) as bus:
        yield bus, Acknowledgements(bus, sending, "w", "c")


def acknowledging(bus: busrep.Bus, acks: Acknowledgements) -> list[int]:
    """Handle what comes, and acknowledge it; the tokens handled."""
    handled: list[int] = []

    @bus.subscribe(sending)
    async def handle(batch: Any) -> None:
        for token, _ in batch.facts():
            handled.append(token)
            await acks.acknowledge(token)

    return handled


async def write(bus: busrep.Bus, count: int = 1) -> list[int]:
    return await bus.publish(sending, list(range(count)))


def acks_on(server: Lossy) -> list[bytes]:
    return [data for _, data in server.published if b"FEDERATION_ACK" in data]


@virtually
async def test_rows_are_kept_until_they_are_acknowledged() -> None:
    server = Lossy()
    async with writing(server, "c", "d") as (writer, retained), consuming(server) as (bus, acks):
        handled = acknowledging(bus, acks)
        await asyncio.sleep(1)
        assert await write(writer, 3) == [1, 2, 3]
        await asyncio.sleep(1)
        assert handled == [1, 2, 3]
        incarnation = retained.kept.incarnation
        assert retained.statistics()["acknowledged"] == {"c": 3, "d": 0}
        assert acks.incarnation == incarnation
        assert b"FEDERATION_ACK c@%d 3" % incarnation in acks_on(server)
        page = await retained.fetch(FetchUpdates("sending", "w", 1, 3, 100, incarnation))
        assert (page.tokens, page.payloads, page.upto) == ([2, 3], [b"1", b"2"], 3)
        await bus.send(FederationAck("d", 2))  # as a peer that knows no incarnations
        await asyncio.sleep(1)
        assert (retained.kept.floor, retained.kept.rows) == (2, 1)
        with pytest.raises(PositionTooOld):
            await retained.fetch(FetchUpdates("sending", "w", 1, 3))
        retained.expect("e")
        retained.give_up("d")
        retained.give_up("e")
        assert (retained.kept.floor, retained.kept.rows) == (3, 0)
        async with writer.write(sending) as fact:
            fact.add("a")
            fact.add("b")
        await asyncio.sleep(1)
        assert handled == [1, 2, 3, 4]
        assert retained.kept.floor == 4


@virtually
async def test_a_lost_acknowledgement_is_repeated() -> None:
    server = Lossy()
    async with writing(server) as (writer, retained), consuming(server) as (bus, acks):
        acknowledging(bus, acks)
        await asyncio.sleep(5)
        server.lose = b"FEDERATION_ACK"
        await write(writer)
        await asyncio.sleep(1)
        assert retained.kept.floor == 0
        server.lose = None
        await asyncio.sleep(module.REPEAT)
        assert retained.kept.floor == 1


@pytest.mark.parametrize("asked", [False, True])
@virtually
async def test_it_is_sent_again_after_a_reconnect_and_when_asked(asked: bool) -> None:
    server = Lossy()
    async with writing(server) as (writer, retained), consuming(server) as (bus, acks):
        acknowledging(bus, acks)
        await asyncio.sleep(5)
        server.lose = b"FEDERATION_ACK"
        await write(writer)
        await asyncio.sleep(1)
        server.lose = None
        if asked:
            writer.publisher.ask_for_positions()
        else:
            server.lose = b"REPLICATE"  # of its own accord
            server.cut()
        await asyncio.sleep(2)
        assert retained.kept.floor == 1


@virtually
async def test_acknowledgements_of_the_life_before_let_go_of_nothing() -> None:
    server = Lossy()
    async with consuming(server) as (bus, acks):
        handled = acknowledging(bus, acks)
        async with writing(server) as (writer, first):
            await asyncio.sleep(1)
            await write(writer, 5)
            await asyncio.sleep(1)
            assert first.kept.floor == 5
        async with writing(server) as (writer, second):
            late = FederationAck(f"c@{first.kept.incarnation}", 5)
            server.lose = b"RDATA"
            await write(writer, 6)
            await asyncio.sleep(0)
            await bus.send(late)
            await asyncio.sleep(0.05)
            assert second.kept.counters.acks_refused >= 1
            assert second.kept.rows == 6, "they were lost on the wire, and are here"
            server.lose = None
            assert acks.incarnation == second.kept.incarnation
            assert acks.token is None
            await write(writer)
            await asyncio.sleep(1)
            assert handled == [1, 2, 3, 4, 5, 7]
            assert second.kept.positions == {"c": 7}


@virtually
async def test_what_is_handled_while_the_writer_restarts_is_acknowledged_to_its_own_life() -> None:
    """The handler has a row of the first life in hand when the second one begins, and gets as far."""
    server, go_on = Lossy(), asyncio.Event()
    async with consuming(server) as (bus, acks):
        seen: list[int | None] = []

        @bus.subscribe(sending)
        async def handle(batch: Any) -> None:
            life = acks.incarnation
            seen.append(life)
            if len(seen) == 1:
                await go_on.wait()
                await acks.acknowledge(batch.tokens[-1])
            elif len(seen) == 2:
                await acks.acknowledge(1, incarnation=seen[0])
                assert acks.token is None

        async with writing(server) as (writer, first):
            await asyncio.sleep(1)
            await write(writer)
            await asyncio.sleep(1)
        async with writing(server) as (writer, second):
            await asyncio.sleep(1)
            await write(writer, 2)
            await asyncio.sleep(1)
            go_on.set()
            await asyncio.sleep(1)
            assert second.kept.rows == 2
            assert second.kept.positions == {"c": 0}
        assert seen == [first.kept.incarnation, second.kept.incarnation]
        assert acks.outdated == 1


@virtually
async def test_a_slow_first_handler_does_not_acknowledge_to_the_life_that_began_meanwhile() -> None:
    """It never asked which life its row is of: that was noted when the writer was first heard."""
    server, go_on, done = Lossy(), asyncio.Event(), asyncio.Event()
    async with consuming(server) as (bus, acks):

        @bus.subscribe(sending)
        async def handle(batch: Any) -> None:
            if not done.is_set():
                await go_on.wait()
                await acks.acknowledge(batch.tokens[-1])
                done.set()

        async with writing(server) as (writer, _):
            await asyncio.sleep(1)
            await write(writer)
            await asyncio.sleep(1)
        async with writing(server) as (writer, second):
            await asyncio.sleep(1)
            await write(writer, 2)
            await asyncio.sleep(1)
            go_on.set()
            await done.wait()
            await asyncio.sleep(1)
            assert second.kept.positions == {"c": 0}
            assert second.kept.rows == 2


@virtually
async def test_the_latest_is_told_before_the_end_and_then_nothing() -> None:
    server = Lossy()
    async with writing(server) as (writer, retained):
        async with consuming(server) as (bus, acks):
            await asyncio.sleep(1)
            await write(writer, 9)
            bus.subscribe(sending)(lambda batch: None)
            await asyncio.sleep(1)
            await acks.acknowledge(9)
            await acks.acknowledge(4)
            assert acks.token == 9
        assert acks_on(server)[-1] == b"FEDERATION_ACK c@%d 9" % retained.kept.incarnation
        assert retained.kept.floor == 9
        count = len(acks_on(server))
        await asyncio.sleep(100)
        assert len(acks_on(server)) == count
        await acks.acknowledge(10)
        assert len(acks_on(server)) == count


@virtually
async def test_what_could_not_be_sent_is_sent_later() -> None:
    server = Lossy()
    async with writing(server) as (writer, retained), consuming(server) as (bus, acks):
        acknowledging(bus, acks)
        await asyncio.sleep(1)
        with mock.patch.object(bus, "send", side_effect=Unavailable("Redis", "too many wait")):
            await write(writer)
            await asyncio.sleep(5)
        assert retained.kept.floor == 0
        await asyncio.sleep(module.REPEAT)
        assert retained.kept.floor == 1


@virtually
async def test_a_burst_is_acknowledged_a_few_times() -> None:
    server = Lossy()
    async with writing(server) as (writer, retained), consuming(server) as (bus, acks):
        acknowledging(bus, acks)
        await asyncio.sleep(5)
        before = len(acks_on(server))
        for _ in range(200):
            await write(writer)
        await asyncio.sleep(1)
        assert retained.kept.floor == 200
        assert len(acks_on(server)) - before <= 5


@virtually
async def test_dropped_rows_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with writing(MemoryRedis(), max_rows=3) as (writer, retained):
        await write(writer, 10)
        await asyncio.sleep(module.LOG_EVERY + 1)
        assert (
            "7 rows were dropped before all had acknowledged them; kept: (7, 10], acknowledged: {'c': 0}" in caplog.text
        )
        await asyncio.sleep(100)
        await write(writer, 1)
    assert caplog.text.count("dropped before all had") == 2, "and what came last, at the end"
    assert retained.statistics()["rows_dropped"] == 8


@virtually
async def test_a_handler_that_acknowledges_while_the_bus_closes_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Called again it would do what it did once more."""
    server, calls, go_on = Lossy(), list[int](), asyncio.Event()
    async with writing(server) as (writer, _):
        async with consuming(server) as (bus, acks):

            @bus.subscribe(sending)
            async def handle(batch: Any) -> None:
                calls.extend(batch.tokens)
                await go_on.wait()
                await acks.acknowledge(batch.tokens[-1])

            await asyncio.sleep(1)
            await write(writer)
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_later(0.1, go_on.set)
        assert calls == [1]
        assert acks.token == 1
        assert bus.reading.handler_failures == 0
    assert "trying again" not in caplog.text


@virtually
async def test_what_was_in_hand_when_the_acknowledgements_began_is_of_its_own_life() -> None:
    server, go_on, begun = Lossy(), asyncio.Event(), asyncio.Event()
    async with busrep.connect(server.client(), name="shop", streams=[sending], settings=CALM) as bus:
        acks: Acknowledgements

        @bus.subscribe(sending)
        async def handle(batch: Any) -> None:
            if not begun.is_set():
                begun.set()
                await go_on.wait()
                await acks.acknowledge(batch.tokens[-1])

        async with writing(server) as (writer, _):
            await asyncio.sleep(1)
            await write(writer)
            await begun.wait()
            acks = Acknowledgements(bus, sending, "w", "c")
        async with writing(server) as (writer, second):
            await asyncio.sleep(1)
            await write(writer, 2)
            await asyncio.sleep(1)
            go_on.set()
            await asyncio.sleep(1)
            assert second.kept.positions == {"c": 0}
            assert second.kept.rows == 2


@virtually
async def test_bad_input_is_refused() -> None:
    server, orders = MemoryRedis(), busrep.Stream[Any]("orders")
    async with busrep.connect(server.client(), name="shop", streams=[sending], settings=CALM) as reading:
        with pytest.raises(NotAWriter):
            Retained(reading, sending, expected=["c"])
        for instance in ("", "a b", "c@12", "c" * 240):
            with pytest.raises(ConfigError):
                Acknowledgements(reading, sending, "w", instance)
        for repeat in (0, -1, float("nan")):
            with pytest.raises(ConfigError, match="repeat"):
                Acknowledgements(reading, sending, "w", "c", repeat=repeat)
        with pytest.raises(UnknownStream):
            Acknowledgements(reading, orders, "w", "c")
        acks = Acknowledgements(reading, sending, "w", "c")
        with pytest.raises(ConfigError):
            await acks.acknowledge(2**63)
        assert acks.incarnation is None
    async with writing(server) as (writer, retained):
        with pytest.raises(NotAWriter):
            Retained(writer, orders, expected=["c"])
        with pytest.raises(ConfigError, match="kept in its table"):
            Retained(writer, busrep.Stream[Any]("sending"), expected=["c"])
        with pytest.raises(ConfigError, match="retained already"):
            Retained(writer, sending, expected=["d"])
        with pytest.raises(ConfigError):
            retained.expect("a b")
        writer.writing.kept.clear()  # type: ignore[union-attr]
        for names in ([], "sender-1", ["a b"], ["c", ""]):
            with pytest.raises(ConfigError):
                Retained(writer, sending, expected=names)
        await write(writer)
        with pytest.raises(ConfigError, match="before the first fact"):
            Retained(writer, sending, expected=["c"])


# -- real processes -------------------------------------------------------------------------------------------


async def until_retained(child: Child, **wanted: Any) -> None:
    while True:
        found = await child.call("deeds.retained")
        if {name: found[name] for name in wanted} == wanted:
            return
        await asyncio.sleep(0.02)  # another process hears it: there is nothing here to be awaited


@pytest.mark.servers
@sync
async def test_rows_outlive_a_killed_consumer_and_acks_a_killed_writer(redis_url: str, bus_name: str) -> None:
    consumer: dict[str, Any] = {"acknowledges": "w"}
    async with Child.start("w", redis_url, bus_name, writes=True) as writer:
        await writer.call("deeds.retain", "c")
        async with Child.start("c", redis_url, bus_name, **consumer) as one:
            for token in range(1, 4):
                assert await writer.call("deeds.write", "x") == token
            await one.until("rows", 3, ["x"])
            await until_retained(writer, rows=0, acknowledged={"c": 3})
            await one.kill()
        await writer.call("deeds.write", "while it was dead")
        await until_retained(writer, rows=1, floor=3, acknowledged={"c": 3})
        async with Child.start("c", redis_url, bus_name, **consumer) as two:
            await writer.call("deeds.write", "y")
            await two.until("rows", 5, ["y"])
            await until_retained(writer, rows=0, floor=5)
            await writer.kill()
            async with Child.start("w", redis_url, bus_name, writes=True) as successor:
                await successor.call("deeds.retain", "c")
                assert await successor.call("deeds.write", "z") == 1
                await two.until("rows", 1, ["z"])
                await until_retained(successor, rows=0, floor=1, acknowledged={"c": 1})
