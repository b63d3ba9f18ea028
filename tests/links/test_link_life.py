"""Rule 9.21: what is a sign of life of a link, and what a writer says when it closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest

from busrep import Stream
from busrep.asyncio import Bus
from busrep.core.commands import Name
from busrep.core.health import LinkWatch
from busrep.options import BusOptions
from busrep.settings import Settings
from busrep.stores.registry import KnownWriter
from busrep.streams import Registry
from busrep.sync import connect as sync_connect
from busrep.testing import MemoryDeployment
from tests.asyncio.test_bus import Order, Seen, crash, deployment, on_postgres, orders, run, until, write
from tests.shop import opened_async_store
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


@contextlib.asynccontextmanager
async def resting(count: int = 32) -> AsyncIterator[tuple[MemoryDeployment, list[Bus], Bus]]:
    """So many writers, each of which leaves seven beats of eight out, and a reader."""
    async with contextlib.AsyncExitStack() as stack:
        shop = await stack.enter_async_context(MemoryDeployment(orders))
        writers = [await stack.enter_async_context(shop.bus(writer=f"w{number}")) for number in range(count)]
        reader = await stack.enter_async_context(shop.bus())
        reader.subscribe(orders)(Seen())
        for bus in writers:  # without a clock that all see their turns might fall together
            assert bus.writing is not None
            bus.writing.core.announcements.beats = 0
        await silence(shop, 20)
        yield shop, writers, reader


def announcements(bus: Bus) -> int:
    found: int = bus.statistics()["writer"]["announcements"]
    return found


def test_9_27_writers_at_rest_say_little_and_keep_their_links() -> None:
    async def main() -> None:
        async with resting() as (shop, writers, reader):
            before = [announcements(bus) for bus in writers]
            await silence(shop)
            for bus, former in zip(writers, before, strict=True):
                assert BEATS / 10 < announcements(bus) - former < BEATS / 4
            assert reconnects(reader, *writers) == [0] * 33

    simulated(main)


def test_9_21_a_writer_at_rest_finds_out_that_its_subscription_is_gone() -> None:
    async def main() -> None:
        async with resting() as (shop, writers, _):
            for deaf in writers:  # whenever its turn comes
                deaf.link.on_message = lambda *_: None  # type: ignore[attr-defined]
                deaf.link.reconnect("for its next connection")
            await silence(shop, 1 + 2 + shop.settings.silent_after_beats + 3)
            assert reconnects(*writers) == [2] * 32

    simulated(main)


def test_9_21_who_has_heard_nothing_for_two_beats_or_is_not_heard_does_not_rest() -> None:
    watch = LinkWatch(Settings(heartbeat=2.0))
    watch.connected(10.0)
    assert watch.hears(14.0)
    assert not watch.hears(14.1)
    watch.heard_at = 14.1
    watch.said(14.2)
    assert not watch.hears(14.3)
    watch.echo_at = 14.4
    assert watch.hears(16.1)


def test_9_21_a_reader_asks_into_a_silence_that_is_longer_than_that_between_two_turns_to_speak() -> None:
    """Of the writers at rest the one may speak as its beat begins, and the next as the one behind it ends."""
    watch = LinkWatch(Settings(heartbeat=2.0))
    watch.connected(10.0)
    assert not watch.asks(14.0, announces=False)
    assert watch.asks(14.1, announces=False)
    assert not watch.asks(14.1, announces=True)


def test_9_21_a_writer_at_rest_finds_out_that_nobody_hears_it() -> None:
    """A failover left its two connections on different servers: it hears the others."""

    async def main() -> None:
        async with resting() as (shop, writers, _):
            unheard = writers[0]
            unheard.own_name.heard_name = lambda *_: False  # type: ignore[method-assign]
            await silence(shop, 8 + shop.settings.silent_after_beats + 3)
            assert reconnects(unheard) > [0]
            assert reconnects(*writers[1:]) == [0] * 31

    simulated(main)


def test_9_21_a_writer_that_hears_nobody_speaks_itself_and_keeps_its_link() -> None:
    """The others give the table their signs of life, and have no Redis."""

    async def main() -> None:
        with mock.patch("busrep.core.announcements.SPEAKERS", 1):
            async with MemoryDeployment(orders) as shop, opened_async_store(shop.store, Registry([orders])) as store:
                claims = [await store.claim(f"w{number}", ["orders"], timeout=1.0) for number in range(12)]
                async with shop.bus(writer="w12") as alone:
                    await silence(shop, 20)
                    before = announcements(alone)
                    for _ in range(60):
                        await silence(shop, 1)
                        for claim in claims:
                            await store.heartbeat(claim, {"orders": 0})
                    assert reconnects(alone) == [0]
                    assert announcements(alone) - before >= 15
                    assert alone.writing is not None
                    assert alone.writing.core.announcements.writers == 13

    simulated(main)


def test_9_27_who_rests_is_followed_by_the_table_and_costs_no_more_questions() -> None:
    async def main() -> None:
        async with resting() as (shop, writers, reader):
            asked, known = [], reader.reading.store.known
            reader.reading.store.known = lambda *given: asked.append(given) or known(*given)  # type: ignore
            await silence(shop)
            assert len(asked) <= 1.2 * BEATS / shop.settings.silent_after_beats
            # Its announcements, and what it writes then, are lost on their way: the table tells all the same.
            take = reader.reading.receive
            reader.reading.receive = lambda *_: None  # type: ignore[method-assign]
            last = await write(writers[3], 1)
            beats = 2 * shop.settings.silent_after_beats + 2
            await reader.wait_for(orders, "w3", last, timeout=beats * shop.settings.heartbeat)
            reader.reading.receive = take  # type: ignore[method-assign]

    simulated(main)


@pytest.mark.parametrize("lost", ["all of few", "all of many", "one of many"])
def test_9_5_who_writes_without_redis_is_followed_by_the_table_at_each_beat(lost: str) -> None:
    async def main() -> None:
        async with resting(2 if lost == "all of few" else 32) as (shop, writers, reader):
            take, asked, known = reader.reading.receive, [], reader.reading.store.known

            def receive(frame: Any, now: float) -> None:
                if lost == "one of many" and Name("w1", writers[1].writing.incarnation) not in frame.items:  # type: ignore
                    take(frame, now)

            async def counted(epoch: str | None) -> list[KnownWriter]:
                asked.append(epoch)
                return await known(epoch)

            reader.reading.receive = receive  # type: ignore[method-assign]
            for number in range(3 * shop.settings.silent_after_beats):
                await write(writers[1], number)
                await silence(shop, 1)
            reader.reading.store.known = counted  # type: ignore[method-assign]
            for number in range(40):
                await write(writers[1], number)
                await silence(shop, 1)
            # Each fifth beat makes 8. Of two looks between two beats of the writer the second one finds nothing new.
            assert len(asked) >= 16

    simulated(main)


def test_9_5_a_database_s_clock_that_goes_forward_finishes_nobody_who_rests() -> None:
    """For a beat after it each looks silent that has not beaten since, however often the registry is read."""

    async def main() -> None:
        async with resting() as (shop, _, reader):
            known, clock, heartbeat = (
                reader.reading.store.known,
                asyncio.get_running_loop().time,
                shop.settings.heartbeat,
            )
            before, stepped, asked = await known(None), clock(), []

            async def by_that_clock(epoch: str | None) -> list[KnownWriter]:
                asked.append(clock())
                ahead = 8 * heartbeat if clock() < stepped + 1.1 * heartbeat else 0.0
                return [attrs.evolve(one, silent_for=ahead) for one in await known(epoch)]

            reader.reading.store.known = by_that_clock  # type: ignore[method-assign]
            for _ in range(12):
                await reader.reading.look_after_silent(all_known=True)
                await asyncio.sleep(heartbeat / 10)
            await silence(shop, 10)
            assert len([at for at in asked if at < stepped + heartbeat]) > 5
            lives = [sorted((one.writer, one.incarnation) for one in found) for found in (before, await known(None))]
            assert lives[0] == lives[1]

    simulated(main)


def test_9_5_a_dead_writer_that_was_never_heard_is_finished_as_soon_as_one_that_was() -> None:
    async def main() -> None:
        async with resting() as (shop, writers, _):
            await crash(writers[3])
            async with shop.bus() as reader:
                known = reader.reading.store.known

                async def dead(epoch: str | None) -> list[KnownWriter]:
                    silent = 50 * shop.settings.heartbeat
                    return [attrs.evolve(one, silent_for=silent * (one.writer == "w3")) for one in await known(epoch)]

                reader.reading.store.known = dead  # type: ignore[method-assign]
                reader.subscribe(orders)(Seen())
                await silence(shop, 4)
                assert [one.writer for one in await known(None) if not one.registered] == ["w3"]
            await writers[3].close()

    simulated(main)


def test_9_21_who_was_not_heard_back_once_announces_again_and_keeps_its_link() -> None:
    async def main() -> None:
        async with resting() as (shop, writers, _):
            for bus in writers:
                heard, lost = bus.own_name.heard_name, []

                def once_lost(name: Name, now: float, heard: Any = heard, lost: list[Any] = lost) -> bool:
                    lost.append(name)
                    return bool(len(lost) > 1 and heard(name, now))

                bus.own_name.heard_name = once_lost  # type: ignore[method-assign]
            await silence(shop, 40)
            assert reconnects(*writers) == [0] * 32

    simulated(main)


def test_9_21_whose_publishing_connection_alone_is_new_keeps_its_link() -> None:
    """It beats later than it was about to, and has announced nothing when it looks after its link."""

    async def main() -> None:
        async with resting() as (shop, writers, _):
            for bus in writers:
                await silence(shop, 1)
                assert bus.writing is not None
                now = asyncio.get_running_loop().time()
                bus.writing.core.disconnected(now)
                bus.writing.core.connected(now)
                bus.publisher.wake()
            await silence(shop, 20)
            assert reconnects(*writers) == [0] * 32

    simulated(main)


@pytest.mark.parametrize("after", range(5))
def test_9_27_who_dies_at_rest_is_finished_within_ten_beats(after: int) -> None:
    """``after``: beats since the table was read."""

    async def main() -> None:
        async with resting() as (shop, writers, reader):
            store, clock, died = reader.reading.store, asyncio.get_running_loop().time, float("inf")
            known, asked = store.known, []

            async def by_the_virtual_clock(epoch: str | None) -> list[KnownWriter]:
                """The table's clock is the machine's."""
                asked.append(epoch)
                found = await known(epoch)
                return [attrs.evolve(one, silent_for=max(0.0, clock() - died) * (one.writer == "w3")) for one in found]

            store.known = by_the_virtual_clock  # type: ignore[method-assign]
            await until(lambda: asked)
            await silence(shop, after)
            await crash(writers[3])
            died = clock()
            # Of the table's look a beat after its silence counts, and of the one that has to confirm it.
            await silence(shop, shop.settings.silent_after_beats + 5)
            gone = [one.writer for one in await known(None) if not one.registered]
            assert gone == ["w3"]
            await writers[3].close()

    simulated(main)


def test_a_driver_that_does_not_let_go_of_a_beat_keeps_no_announcement_back() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as bus:

            async def hangs() -> None:
                try:
                    await silence(shop)
                except asyncio.CancelledError:
                    await silence(shop, 20)
                    raise

            assert bus.writing is not None
            with mock.patch.object(bus.writing, "beat", hangs):
                before = announcements(bus)
                await silence(shop, 10)
                assert announcements(bus) - before >= 6
                await silence(shop, 20)  # it has let go

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
