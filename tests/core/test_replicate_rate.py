"""A REPLICATE is answered at once, and a flood of them ever more seldom: none forgotten, none dear."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import attrs
import pytest
import redis.asyncio

from busrep.core.writer import Writer
from busrep.settings import Settings
from busrep.streams import Stream
from busrep.sync import connect as sync_connect
from busrep.testing import MemoryDeployment
from tests.asyncio.test_bus import QUICK, deployment, orders, run, until
from tests.shop import Order
from tests.test_rules import simulated

__all__ = ["deployment"]  # a fixture

CALM = attrs.evolve(QUICK, heartbeat=30.0, answer_interval=0.1)
SECONDS = attrs.evolve(CALM, heartbeat=2.0)
NAMES = ("w0", "w1", "w2", "w3")


class Asked:
    """A writer that answers within 0.1 s, and how often it has announced."""

    def __init__(self, **settings: Any) -> None:
        bounds = Settings(**{"heartbeat": 30.0, "answer_interval": 0.1, **settings})
        self.writer = Writer("shop", "w", incarnation=1, epoch="e" * 32, settings=bounds, jitter=lambda: 0.5)
        self.writer.add_stream(Stream("s"), 0)
        self.writer.connected(0.0)
        assert self.answers() == 1

    def answers(self) -> int:
        """The announcements that are due, published and confirmed."""
        frames = self.writer.frames_to_publish()
        for frame in frames:
            self.writer.published(frame)
        return sum(frame.announcement for frame in frames)


def test_the_first_after_a_pause_is_answered_at_once() -> None:
    asked = Asked()
    for now in (0.1, 5.0, 5.1):
        asked.writer.replicate_received(now)
        assert asked.answers() == 1
        assert asked.writer.announcements.next_answer == math.inf


def test_the_ones_that_come_too_soon_get_one_answer_together_later() -> None:
    asked = Asked()
    for at in range(1, 10):
        asked.writer.replicate_received(at / 100)
        assert asked.answers() == 0
    assert asked.writer.announcements.next_deadline == asked.writer.announcements.next_answer == pytest.approx(0.1)
    assert asked.writer.announcements.next_beat == pytest.approx(30.0)
    assert not asked.writer.tick(0.09)
    assert asked.answers() == 0
    assert not asked.writer.tick(0.1)  # no beat
    assert asked.answers() == 1
    assert asked.writer.announcements.next_answer == math.inf
    asked.writer.replicate_received(0.15)
    assert asked.answers() == 0
    asked.writer.tick(0.2)
    assert asked.answers() == 1


def test_each_answer_doubles_the_time_to_the_next_up_to_a_heartbeat_and_a_pause_sets_it_back() -> None:
    asked = Asked(heartbeat=1.0)
    announcements, now, intervals = asked.writer.announcements, 0.3, list[float]()
    for _ in range(6):
        announcements.next_beat = math.inf
        asked.writer.replicate_received(now)
        asked.writer.tick(now)
        assert asked.answers() == 1
        asked.writer.replicate_received(now)  # somebody else: this one waits
        intervals.append(announcements.next_answer - now)
        now = announcements.next_answer
    assert intervals == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    for pause, interval in ((1.9, 1.0), (2.0, 0.1)):
        asked.writer.tick(now)
        asked.answers()
        now += pause
        asked.writer.replicate_received(now)
        assert asked.answers() == 1
        asked.writer.replicate_received(now)
        assert announcements.next_answer - now == pytest.approx(interval)
        now = announcements.next_answer


@pytest.mark.parametrize("heartbeat", [0.5, 1.0, 2.0])
def test_beats_keep_no_interval_up(heartbeat: float) -> None:
    asked = Asked(heartbeat=heartbeat)
    announcements, now = asked.writer.announcements, 0.0
    while now < 10 * heartbeat:  # a flood
        asked.writer.replicate_received(now)
        now = announcements.next_deadline
        asked.writer.tick(now)
        asked.answers()
    while now < 14 * heartbeat:
        now = announcements.next_deadline
        asked.writer.tick(now)
        asked.answers()
    asked.writer.replicate_received(now + 0.1)
    assert asked.answers() == 1
    asked.writer.replicate_received(now + 0.1)
    assert announcements.next_answer == pytest.approx(now + 0.2)


def test_a_beat_brings_no_answer_forward() -> None:
    asked = Asked(heartbeat=1.0)
    for now in (0.1, 0.2, 0.4):
        asked.writer.replicate_received(now)
        assert asked.answers() == 1
    asked.writer.announcements.next_beat = 0.6
    assert asked.writer.tick(0.6)
    assert asked.answers() == 1
    asked.writer.replicate_received(0.61)
    assert asked.writer.announcements.next_answer == pytest.approx(0.8)


def test_a_beat_answers_as_well() -> None:
    asked = Asked(heartbeat=0.05)
    asked.writer.replicate_received(0.01)
    assert asked.writer.tick(0.05)
    assert asked.answers() == 1
    assert asked.writer.announcements.next_answer == math.inf
    asked.writer.replicate_received(0.06)
    assert asked.writer.announcements.next_answer == pytest.approx(0.15)


def test_one_that_comes_after_an_answer_was_composed_gets_another() -> None:
    asked = Asked()
    asked.writer.replicate_received(1.0)
    (frame,) = asked.writer.frames_to_publish()
    asked.writer.replicate_received(1.0)
    asked.writer.published(frame)
    assert asked.answers() == 0
    asked.writer.tick(1.1)
    assert asked.answers() == 1


def test_a_link_that_comes_back_answers_what_waited() -> None:
    asked = Asked()
    asked.writer.replicate_received(0.05)
    asked.writer.disconnected(0.06)
    assert asked.writer.announcements.next_answer == math.inf
    asked.writer.connected(0.07)
    assert asked.answers() == 1
    assert asked.writer.announcements.next_answer == math.inf


def test_no_interval_answers_each() -> None:
    asked = Asked(answer_interval=0)
    for _ in range(3):
        asked.writer.replicate_received(1.0)
        assert asked.answers() == 1


def test_a_flood_costs_four_announcements_in_a_second() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=CALM) as shop,
            shop.bus(writer="w1") as writer,
            shop.bus() as reader,
        ):
            await asyncio.sleep(1.0)
            before = writer.statistics()["writer"]["announcements"]
            for _ in range(1_000):  # a second's
                reader.publisher.ask_for_positions()
                await asyncio.sleep(0.001)
            sent = writer.statistics()["writer"]["announcements"] - before
            assert sent == 4  # after 0, 0.1, 0.3, 0.7 s
            await asyncio.sleep(0.6)
            assert writer.statistics()["writer"]["announcements"] - before == 5  # the last one is not forgotten

    simulated(main)


def test_one_that_waits_is_answered_though_nothing_else_happens() -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, settings=CALM) as shop, shop.bus(writer="w1") as writer:
            await asyncio.sleep(1.0)
            before = writer.statistics()["writer"]["announcements"]
            for _ in range(2):
                writer.publisher.ask_for_positions()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert writer.statistics()["writer"]["announcements"] == before + 2

    simulated(main)


class Quiet(Asked):
    """One of so many writers, to whom nothing has happened for some beats of a second; the next comes at 3.0."""

    def __init__(self, writers: int = 3, beats: int = 2, **settings: Any) -> None:
        super().__init__(heartbeat=1.0, **settings)
        self.writer.announcements.writers = writers
        for at in range(beats):
            self.beat(3.0 - beats + at)

    def beat(self, now: float) -> int:
        """As a session has them: stored, then announced. Gives the messages of announcements."""
        self.writer.announcements.quiet_beats += 1
        assert self.writer.tick(now)
        return self.answers()

    def announced_when_asked(self, at: float = 2.5) -> int:
        """Messages in answer to a REPLICATE at that time, before the beat."""
        self.writer.replicate_received(at)
        return self.answers()

    def announced_streams(self) -> list[bytes]:
        """Of the one message that is due."""
        (frame,) = self.writer.frames_to_publish()
        self.writer.published(frame)
        return [line.split()[1] for line in frame.messages[0].splitlines() if line.startswith(b"POSITION")]


def test_one_of_many_to_whom_nothing_happens_answers_with_its_beat() -> None:
    """Who asks has read the table, which tells the same: a join does not cost a message of each writer."""
    asked = Quiet(quiet_streams=1)
    asked.writer.add_stream(Stream("t"), 0)
    assert asked.announced_streams() == [b"s", b"t"]
    assert asked.announced_when_asked() == 0
    assert asked.writer.announcements.next_answer == math.inf  # no timer comes before the beat
    assert asked.announced_when_asked(2.9) == 0
    assert asked.writer.tick(3.0)
    assert asked.announced_streams() == [b"s", b"t"]
    assert asked.writer.tick(4.0)
    assert len(asked.announced_streams()) == 1  # nobody has asked: one has its turn


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(lambda: Quiet(writers=0), id="nobody knows of how many"),
        pytest.param(lambda: Quiet(writers=2), id="one of two"),
        pytest.param(lambda: Quiet(beats=0), id="it has just begun"),
        pytest.param(lambda: Quiet(beats=1), id="its positions may not be stored yet"),
    ],
)
def test_others_answer_at_once(asked: Any) -> None:
    assert asked().announced_when_asked() == 1


def test_who_has_published_a_fact_answers_at_once_for_two_beats() -> None:
    asked = Quiet()
    asked.writer.fact_completed("s", 1, [b"1"])
    asked.writer.position_moved("s", 1)
    asked.answers()
    assert asked.announced_when_asked() == 1
    for beat, answers in ((3.0, 1), (4.0, 0)):
        asked.beat(beat)
        assert asked.announced_when_asked(beat + 0.5) == answers


def test_what_others_wrote_is_nothing_that_it_has_to_tell_at_once() -> None:
    asked = Quiet()
    asked.writer.position_moved("s", 7)
    asked.answers()
    assert asked.announced_when_asked() == 0


def test_who_waits_for_the_beat_is_answered_before_the_next_fact() -> None:
    """It may be a process that has never heard this writer, and would not believe its rows."""
    asked = Quiet(quiet_streams=1)
    asked.writer.add_stream(Stream("t"), 0)
    asked.answers()
    assert asked.announced_when_asked() == 0
    asked.writer.fact_completed("s", 1, [b"1"])
    asked.writer.position_moved("s", 1)
    announcement, rows = asked.writer.frames_to_publish()
    assert announcement.messages[0].splitlines()[2:] == [b"POSITION s w 0 0", b"POSITION t w 0 0"]
    assert rows.rows == 1
    for frame in (announcement, rows):
        asked.writer.published(frame)
    asked.writer.fact_completed("s", 2, [b"1"])
    asked.writer.position_moved("s", 2)
    assert asked.answers() == 0  # once


def test_who_has_asked_too_soon_is_not_answered_before_a_fact() -> None:
    """Else a flood of them, and a writer at work, would cost an announcement for each fact."""
    asked = Quiet(writers=2)
    assert asked.announced_when_asked(2.5) == 1
    asked.writer.replicate_received(2.51)
    asked.writer.fact_completed("s", 1, [b"1"])
    asked.writer.position_moved("s", 1)
    assert asked.answers() == 0


def test_a_stream_that_no_table_has_is_told_of_at_once() -> None:
    asked = Quiet()
    for stream in (Stream("typing", resettable=True), Stream("t")):
        asked.writer.add_stream(stream, 0)
    asked.answers()
    assert asked.announced_when_asked() == 1


def test_a_writer_of_single_lines_answers_at_once() -> None:
    """It speaks to those who may have no table."""
    bounds = Settings(heartbeat=1.0, answer_interval=0.1, one_line_messages=True)
    asked = Quiet(beats=0)
    asked.writer = Writer("shop", "w", incarnation=1, epoch="e" * 32, settings=bounds, jitter=lambda: 0.5)
    asked.writer.add_stream(Stream("s", foreign_writers=True), 0)
    asked.writer.connected(0.0)
    asked.writer.announcements.writers = 3
    for at in (1.0, 2.0):
        asked.beat(at)
    assert asked.announced_when_asked() == 1


def test_a_flood_of_questions_brings_no_beat_forward() -> None:
    asked = Quiet()
    for at in range(100):
        assert asked.announced_when_asked(2.0 + at / 100) == 0
    assert asked.writer.announcements.next_deadline == asked.writer.announcements.next_beat == pytest.approx(3.0)


def test_a_reader_that_joins_many_has_what_they_wrote_before_they_say_so() -> None:
    """From the table; and knows within a beat that this was all."""

    async def main() -> None:
        async with MemoryDeployment(orders, settings=SECONDS) as shop, contextlib.AsyncExitStack() as stack:
            for number, name in enumerate(NAMES):
                writer = await stack.enter_async_context(shop.bus(writer=name))
                async with writer.write(orders) as fact:
                    fact.add(Order(number, "paid"))
            await asyncio.sleep(20.0)
            got = list[int]()
            reader = await stack.enter_async_context(shop.bus(start="earliest"))
            reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            await asyncio.sleep(0.1)
            assert sorted(got) == [0, 1, 2, 3]
            assert reader.statistics()["reader"]["states"]["orders"] != dict.fromkeys(NAMES, "live")
            await asyncio.sleep(2.2)
            states = reader.statistics()["reader"]["states"]["orders"]
            assert states == dict.fromkeys(NAMES, "live")

    simulated(main)


def test_a_fact_behind_a_start_is_believed_at_once() -> None:
    """Of a writer that the process which has just started has not heard."""

    async def main() -> None:
        async with MemoryDeployment(orders, settings=SECONDS) as shop, contextlib.AsyncExitStack() as stack:
            writers = [await stack.enter_async_context(shop.bus(writer=name)) for name in NAMES]
            await asyncio.sleep(20.0)
            got = list[int]()
            async with shop.bus(start="now") as reader:
                reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
                await asyncio.sleep(0.01)
                for number, writer in enumerate(writers):
                    async with writer.write(orders) as fact:
                        fact.add(Order(number, "paid"))
                    await reader.wait_for(orders, NAMES[number], fact.id, timeout=0.05)
                assert reader.statistics()["reader"]["other_logs"] == 0
            assert got == [0, 1, 2, 3]

    simulated(main)


@pytest.mark.servers
@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_the_last_of_a_burst_is_answered(deployment: Any, runtime: str) -> None:
    """Of many in one moment the first gets an answer, and all others one: not thousands, and not only one."""

    async def main() -> None:
        options = {"name": deployment.name, "streams": [orders], "store": deployment.store, "settings": CALM}
        heard: list[bytes] = []
        client = redis.asyncio.Redis.from_url(deployment.redis)

        async def flood() -> None:
            pipeline = client.pipeline(transaction=False)
            for _ in range(500):
                pipeline.publish(deployment.name, "REPLICATE")
            await pipeline.execute()
            await until(lambda: heard.count(b"REPLICATE") >= 500)
            last = len(heard) - 1 - heard[::-1].index(b"REPLICATE")
            await until(lambda: any(line.startswith(b"SERVER") for line in heard[last:]))
            assert sum(line.startswith(b"SERVER") for line in heard) < 100

        async with deployment.bus(settings=CALM) as watcher:
            watcher.on_line(lambda direction, _, line: heard.append(line) if direction == "<" else None)
            if runtime == "asyncio":
                async with deployment.bus(writer="w1", settings=CALM):
                    await flood()
            else:
                bus = sync_connect(deployment.redis, writer="w1", **options)
                await asyncio.to_thread(bus.open)
                await asyncio.to_thread(bus.on, type(None))  # it listens from now on
                try:
                    await flood()
                finally:
                    await asyncio.to_thread(bus.close)
        await client.aclose()

    run(main())
