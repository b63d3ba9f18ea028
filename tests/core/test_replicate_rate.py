"""A REPLICATE is answered at once, and a flood of them ever more seldom: none forgotten, none dear."""

from __future__ import annotations

import asyncio
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
from tests.test_rules import simulated

__all__ = ["deployment"]  # a fixture

CALM = attrs.evolve(QUICK, heartbeat=30.0, answer_interval=0.1)


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
