"""The simulated Redis: what the real link sees of it, and the faults it can have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from busrep.errors import Unavailable
from busrep.links.redis import RedisLink
from busrep.settings import Settings
from tests.proof.sim.redis import RedisPath, SimConnection, SimRedis
from tests.proof.sim.virtual import Process, run

SETTINGS = Settings(heartbeat=1.0, redis_timeout=1.0, retry_min=0.05, retry_max=0.2, silent_after_beats=3)


class Client:
    """A real link on a path of its own."""

    def __init__(self, redis: SimRedis, name: str) -> None:
        self.process = Process(name)
        self.path = RedisPath(redis, random.Random(name), self.process)
        self.got: list[bytes] = []
        self.ups = self.downs = 0
        self.link = RedisLink(
            self.path.client(), ["c"], SETTINGS, on_up=self._up, on_message=self._message, on_down=self._down
        )

    def _up(self) -> None:
        self.ups += 1

    def _down(self) -> None:
        self.downs += 1

    def _message(self, channel: str, data: bytes) -> None:
        self.got.append(data)

    async def publish(self, *messages: bytes) -> None:
        await self.link.open_publisher()
        await self.link.publish([("c", message) for message in messages])


def simulated(
    test: Callable[[SimRedis, Client, Client], Coroutine[Any, Any, None]], *, output_buffer: int = 10_000
) -> list[bytes]:
    """Run a test with two connected clients; what the servers took in."""
    published: list[bytes] = []

    async def main() -> None:
        redis = SimRedis(output_buffer=output_buffer, on_publish=lambda _, data: published.append(data))
        one, two = Client(redis, "one"), Client(redis, "two")
        for client in (one, two):
            await client.link.start(required=True)
        await test(redis, one, two)
        for client in (one, two):
            await client.link.close()

    run(main())
    return published


def test_messages_come_in_order_to_every_subscriber() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        for number in range(50):
            await one.publish(b"%d" % number, b"%d again" % number)
        await asyncio.sleep(0.1)
        assert one.got == two.got == [b"%d%b" % (n, again) for n in range(50) for again in (b"", b" again")]

    assert len(simulated(test)) == 100


def test_a_cut_connection_comes_again_and_what_was_published_meanwhile_is_gone() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        two.path.cut()
        await one.publish(b"lost")
        await asyncio.sleep(1)
        await one.publish(b"heard")
        await asyncio.sleep(0.1)
        assert (two.got, two.ups, two.downs) == ([b"heard"], 2, 1)
        assert one.got == [b"lost", b"heard"]

    simulated(test)


def test_a_publish_whose_connection_is_cut_under_way_may_have_arrived() -> None:
    outcomes = set()
    for cut_at in range(12):

        async def test(redis: SimRedis, one: Client, two: Client, cut_at: int = cut_at) -> None:
            await one.publish(b"first")
            task = asyncio.ensure_future(one.publish(b"second"))
            await asyncio.sleep(0.0003 * cut_at)
            one.path.cut(pubsub=False)
            refused = False
            try:
                await task
            except Unavailable:
                refused = True
            await asyncio.sleep(0.1)
            outcomes.add((refused, b"second" in two.got))

        simulated(test)
    assert outcomes == {(True, True), (True, False), (False, True)}


def test_what_a_killed_process_had_sent_arrives() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        await one.link.open_publisher()
        one.process.start(one.link.publish([("c", b"last words")]))
        await asyncio.sleep(0)
        one.process.kill()
        before = list(one.path.connections)
        one.path.kill()
        await asyncio.sleep(0.1)
        assert two.got == [b"last words"]
        assert len(before) == 2
        assert not redis.master.connections.keys() & set(before)

    simulated(test)


def test_nothing_passes_a_hole_and_the_link_gives_up() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        two.path.hole_in = True
        await one.publish(b"swallowed")
        await asyncio.sleep(5)
        assert (two.got, two.downs) == ([], 1)  # given up after three silent beats
        two.path.heal()
        await asyncio.sleep(2)
        await one.publish(b"heard")
        await asyncio.sleep(0.1)
        assert two.got == [b"heard"]

    simulated(test)


def test_one_way_holes() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        await one.link.open_publisher()
        one.path.hole_in = True  # what is sent arrives, the answer does not
        with pytest.raises(Unavailable):
            await one.link.publish([("c", b"arrives")])
        assert two.got == [b"arrives"]
        one.path.heal()
        await one.link.open_publisher()
        one.path.hole_out = True
        with pytest.raises(Unavailable):
            await one.link.publish([("c", b"does not")])
        assert two.got == [b"arrives"]

    simulated(test)


def test_a_subscriber_that_does_not_read_is_killed_at_the_limit() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        two.process.pause()  # its link runs outside of it in this test: what stops reading is the hole
        two.path.hole_in = True
        for _ in range(20):
            await one.publish(b"x" * 300)
        assert redis.buffer_kills == 1
        assert one.downs == 0

    simulated(test, output_buffer=3_000)


def test_bad_links_drop_double_and_reorder() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        two.path.drop = two.path.double = two.path.reorder = 0.3
        sent = [b"%d" % number for number in range(300)]
        for message in sent:
            await one.publish(message)
        await asyncio.sleep(1)
        assert one.got == sent
        assert set(two.got) < set(sent)
        assert len(two.got) > len(set(two.got))
        assert two.got != sorted(two.got, key=int)
        two.path.heal()
        two.got.clear()
        await one.publish(b"a", b"b")
        await asyncio.sleep(0.1)
        assert two.got == [b"a", b"b"]

    simulated(test)


def test_after_a_failover_publishers_and_subscribers_may_be_on_different_masters() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        await one.link.open_publisher()
        old = redis.master
        redis.failover()
        one.path.cut(pubsub=False)
        with pytest.raises(Unavailable):
            await one.link.publish([("c", b"on the old one, cut")])
        await one.publish(b"on the new one")
        await asyncio.sleep(0.1)
        assert two.got == []
        for connection in list(old.connections):
            connection.lose("demoted")
        await asyncio.sleep(1)
        await one.publish(b"heard")
        await asyncio.sleep(0.1)
        assert two.got == [b"heard"]

    simulated(test)


def test_a_right_that_is_taken_away_is_an_error() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        redis.denied.add("PUBLISH")
        with pytest.raises(Unavailable, match="no permissions"):
            await one.publish(b"denied")
        redis.denied.clear()
        await one.publish(b"allowed")
        await asyncio.sleep(0.1)
        assert two.got == [b"allowed"]

    assert simulated(test) == [b"allowed"]


def test_a_server_that_is_down_refuses() -> None:
    async def test(redis: SimRedis, one: Client, two: Client) -> None:
        redis.master.kill()
        with pytest.raises(Unavailable):
            await one.publish(b"x")
        await asyncio.sleep(1)
        assert not two.link.connected
        redis.master.up = True
        await asyncio.sleep(1)
        assert two.link.connected

    simulated(test)


def test_a_connection_without_a_server() -> None:
    async def main() -> None:
        redis = SimRedis(output_buffer=1, on_publish=lambda *_: None)
        path = RedisPath(redis, random.Random(1), Process("p"))
        path.refuse = True
        connection = SimConnection(path)
        with pytest.raises(RedisConnectionError, match="refused"):
            await connection.connect()
        with pytest.raises(RedisConnectionError, match="not connected"):
            await connection.send_command("PING")

    run(main())
