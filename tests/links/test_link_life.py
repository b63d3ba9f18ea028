"""Rule 9.21: what is a sign of life of a link, and what a writer says when it closes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from busrep import Stream
from busrep.asyncio import Bus
from busrep.core.commands import Name
from busrep.options import BusOptions
from busrep.sync import connect as sync_connect
from busrep.testing import MemoryDeployment
from tests.asyncio.test_bus import Order, Seen, deployment, on_postgres, orders, run, until, write
from tests.test_rules import simulated

__all__ = ["deployment", "on_postgres"]  # fixtures

BEATS = 200

live = Stream("live", Order, resettable=True)


def reconnects(*buses: Bus) -> list[Any]:
    """How often each has given its link up."""
    return [bus.statistics()["link"]["reconnects"] for bus in buses]


async def silence(shop: MemoryDeployment, beats: int = BEATS) -> None:
    """Let so many beats pass, in virtual time."""
    await asyncio.sleep(beats * shop.settings.heartbeat)


@pytest.mark.parametrize("who", ["writer", "reader beside a writer", "reader alone", "reader without a store"])
def test_a_stray_name_makes_nobody_reconnect(who: str) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, live) as shop:
            options: dict[str, Any] = {"writer": {"writer": "w1"}}.get(who, {})
            if who == "reader without a store":
                options = {"streams": [live], "store": None, "start": None}
            async with shop.bus(**options) as bus:
                if who == "reader beside a writer":
                    async with shop.bus(writer="w1") as other:
                        await other.send(Name("ghost", 5))
                        await silence(shop)
                        assert reconnects(bus, other) == [0, 0]
                    return
                await bus.send(Name("ghost", 5))
                await until(lambda: "ghost" in bus.reading.core.last_heard)
                await silence(shop)
                assert reconnects(bus) == [0]

    simulated(main)


def test_a_name_in_no_table_is_forgotten_when_it_is_silent() -> None:
    # While it counts as silent, the table is read each beat in vain.
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus() as bus:
            bus.subscribe(orders)(Seen())
            await bus.send(Name("ghost", 5))
            await until(lambda: "ghost" in bus.reading.core.last_heard)
            await silence(shop)
            assert "ghost" not in bus.reading.core.last_heard

    simulated(main)


@pytest.mark.parametrize("stream", [orders, live], ids=["table", "resettable"])
def test_a_writer_that_closes_costs_no_link(stream: Any) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, live) as shop, shop.bus() as reader, shop.bus(writer="w2") as other:
            reader.subscribe(stream)(seen := Seen())
            async with shop.bus(writer="w1") as writer:
                last = await write(writer, 1, 2, stream=stream)
            await reader.wait_for(stream, "w1", last)
            await silence(shop)
            assert reconnects(reader, other) == [0, 0]
            assert [number for _, _, number in seen.facts] == [1, 2]

    simulated(main)


def test_a_writer_announces_its_final_position_last() -> None:
    # The loss of the last rows of a stream without a table would be found by nobody else.
    async def main() -> None:
        heard: list[bytes] = []
        async with MemoryDeployment(orders, live) as shop, shop.bus() as reader:
            reader.on_line(lambda direction, _, line: heard.append(line) if direction == "<" else None)
            async with shop.bus(writer="w1") as writer:
                await asyncio.sleep(0.05)
                last = await write(writer, 1, 2, 3, stream=live)
            await until(lambda: f"POSITION live w1 {last} {last}".encode() in heard)
            lines = [line for line in heard if line != b"REPLICATE"]
            final = lines[max(at for at, line in enumerate(lines) if line.startswith(b"SERVER ")) :]
            assert sorted(final[2:]) == [b"POSITION live w1 %d %d" % (last, last), b"POSITION orders w1 0 0"]

    simulated(main)


def test_a_lost_last_message_of_a_writer_that_closed_is_noticed() -> None:
    async def main() -> None:
        missed: list[Any] = []
        async with MemoryDeployment(live) as shop, shop.bus() as reader:
            reader.on_missed(live)(lambda *gone: missed.append(gone))
            reader.subscribe(live)(seen := Seen())
            async with shop.bus(writer="w1") as writer:
                await reader.wait_for(live, "w1", await write(writer, 1, stream=live))
                take, lost = reader.reading.receive, []

                def deaf(frame: Any, now: float) -> None:
                    if any(getattr(item, "tokens", None) for item in frame.items):
                        lost.append(frame)
                    else:
                        take(frame, now)

                reader.reading.receive = deaf  # type: ignore[method-assign]
                await write(writer, 2, stream=live)
            await until(lambda: missed)
            assert lost
            assert missed == [("live", "w1", 1, 2)]
            assert [number for _, _, number in seen.facts] == [1]

    simulated(main)


def test_an_idle_reader_finds_out_that_its_subscription_is_gone() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus() as bus:
            up = bus.link.on_message  # type: ignore[attr-defined]
            bus.link.on_message = lambda *_: None  # type: ignore[attr-defined]
            await until(lambda: reconnects(bus) == [1])
            bus.link.on_message = up  # type: ignore[attr-defined]
            await silence(shop)
            assert reconnects(bus) == [1]

    simulated(main)


def test_a_process_that_may_not_publish_keeps_its_link() -> None:
    # Then silence proves nothing: there may be nobody to hear.
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus() as bus:
            bus.watch.asked_at = 0.0

            async def refused(_messages: Any) -> None:
                raise ConnectionError

            bus.link.publish = refused  # type: ignore[method-assign]
            bus.watch.heard_at = asyncio.get_running_loop().time()
            await silence(shop)
            assert reconnects(bus) == [0]

    simulated(main)


def test_a_reader_of_a_sub_channel_hears_its_own_question() -> None:
    async def main() -> None:
        aside = Stream("aside", channel="aside")
        async with MemoryDeployment(aside) as shop, shop.bus() as bus:
            await silence(shop)
            assert reconnects(bus) == [0]

    simulated(main)


@pytest.mark.servers
def test_a_closed_writer_of_threads_announces_its_final_position(deployment: Any) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        async with deployment.bus() as reader:
            reader.on_line(lambda direction, _, line: heard.append(line) if direction == "<" else None)

            def work() -> int:
                options = {"name": deployment.name, "streams": [live], "store": deployment.store}
                with sync_connect(deployment.redis, writer="t1", settings=deployment.settings, **options) as bus:
                    with bus.write(live) as fact:
                        fact.add(Order(1, "new"))
                    return fact.id

            last = await asyncio.to_thread(work)
            await until(lambda: f"POSITION live t1 {last} {last}".encode() in heard)
            rows = max(at for at, line in enumerate(heard) if line.startswith(b"RDATA live t1"))
            assert f"POSITION live t1 {last} {last}".encode() in heard[rows:]

    run(main())


async def deaf(then: Any = None) -> None:
    """Swallow one cancellation, as a driver may on Python 3.11, and go on for ever."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if then is not None:
            then()
            return
    await asyncio.Event().wait()


def test_a_subscriber_that_swallows_a_cancellation_does_not_keep_a_bus_open(redis_url: str, bus_name: str) -> None:
    async def main() -> None:
        bus = Bus(redis_url, BusOptions(name=bus_name, streams=[live], writer="w1"))
        async with asyncio.timeout(20):
            await bus.open()
            link: Any = bus.link
            link.tasks.spawn(deaf, "link")
            await asyncio.sleep(0)
            await bus.close()
        assert {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()

    run(main())


def test_what_a_task_starts_while_it_is_stopped_is_stopped_too(redis_url: str, bus_name: str) -> None:
    """A name that is being won back while the bus closes starts to settle: it would go on, and win it back again."""

    async def main() -> None:
        bus = Bus(redis_url, BusOptions(name=bus_name, streams=[live], writer="w1"))
        async with asyncio.timeout(60):
            await bus.open()
            started: list[asyncio.Task[Any]] = []

            def start() -> None:
                started.append(bus.background.spawn(asyncio.Event().wait, "started"))

            bus.background.spawn(partial(deaf, start), "deaf")
            await asyncio.sleep(0)
            await bus.close()
        assert started[0].done()

    run(main())
