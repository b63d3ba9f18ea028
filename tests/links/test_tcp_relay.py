"""A TCP server in front of Redis, and the buses in its own process: what Redis says, and what it does not take."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import tracemalloc
from typing import Any

import attrs
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from busrep import RemoteServerUp, Settings
from busrep.core.framing import parse_message
from busrep.errors import ConfigError, Unavailable
from busrep.links import link as links
from busrep.links.tcp_relay import LocalLink, Routes, _has_line_over
from busrep.links.tcp_server import TcpServer
from busrep.stores import memory, open_store
from busrep.streams import Registry
from busrep.testing import MemoryRedis
from busrep.testing.pair import _Connection
from tests.links.test_tcp import QUICK, Hand, bus, orders, shouts, typing, until, url
from tests.stores.store_conformance import sync


class Redis(MemoryRedis):
    """One that may be away, or take its time with what is published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.away = self.takes_nothing = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        connect, send = _Connection.connect, _Connection.send_packed_command

        async def connect_if_there(connection: Any) -> None:
            if self.away:
                raise RedisConnectionError("refused")
            await connect(connection)

        async def send_if_taken(connection: Any, *args: Any, **options: Any) -> None:
            await self.goes_on.wait()
            if self.takes_nothing:
                raise RedisConnectionError("takes nothing")
            await send(connection, *args, **options)

        monkeypatch.setattr(_Connection, "connect", connect_if_there)
        monkeypatch.setattr(_Connection, "send_packed_command", send_if_taken)


@pytest.fixture
def store() -> Any:
    asyncio.run(open_store("memory://relay", Registry([orders])).init())
    yield "memory://relay"
    memory.forget("relay")


@sync
async def test_what_is_not_of_the_protocol_on_redis_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, got, missed = Redis(monkeypatch), list[Any](), list[Any]()
    settings = attrs.evolve(QUICK, message_bytes=100_000, heartbeat=5.0)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server,
        bus(redis.client(), writer="w1", settings=settings) as writer,
        bus(url(server), settings=settings) as reader,
        bus(server, settings=settings) as member,
    ):
        for each in (reader, member):
            each.subscribe(typing)(lambda batch: got.extend(batch.rows))
            each.on_missed(typing)(lambda *what: missed.append(what))
            await until(lambda: each.statistics()["reader"]["states"].get("typing") == {"w1": "live"})  # noqa: B023
        garbage = [b"", b"12345", b"\xff\xfe", b"ERROR go away", b"PING 1\nERROR", b"POSITION a b", b"x" * 200_000]
        for number, each_of_it in enumerate(garbage):
            redis.publish("shop", each_of_it)
            await writer.publish(typing, [[number]])
            redis.publish("shop", each_of_it)
        await until(lambda: len(got) == 2 * len(garbage))
        assert missed == []
        assert reader.statistics()["link"]["reconnects"] == 0
        assert server.statistics()["dropped"] == 4


@sync
async def test_a_line_too_long_for_tcp_is_fetched(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    settings = attrs.evolve(QUICK, line_bytes=2_000)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server,
        bus(redis.client(), writer="w1", store=store) as writer,
        bus(url(server), store=store, settings=settings) as reader,
    ):
        reader.subscribe(orders)(lambda batch: got.extend(len(row[0]) for row in batch.rows))
        for size in (10, 5_000, 20):
            ids = await writer.publish(orders, [["x" * size]])
            await reader.wait_for(orders, "w1", ids[-1], 10)
        assert got == [10, 5_000, 20]
        assert server.statistics()["dropped"] == 1
        assert server.statistics()["refused"] == {}


def test_lines_are_measured_without_a_list_of_them() -> None:
    for size in range(12):
        for text in map(bytes, itertools.product(b"x\n", repeat=size)):
            for most in (1, 2, 3, 5):
                assert _has_line_over(most, text) == (max(map(len, text.split(b"\n"))) > most), (most, text)
    lines = b"X\n" * 2**23
    tracemalloc.start()
    try:
        assert not _has_line_over(2**20, lines)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


@sync
async def test_a_message_of_more_lines_than_anybody_takes_is_shown_to_nobody_who_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    settings = attrs.evolve(QUICK, message_items=100, message_rows=1_000)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server,
        bus(redis.client(), writer="w1") as writer,
        bus(url(server)) as reader,
        Hand.of(server) as hand,
    ):
        reader.subscribe(typing)(lambda batch: got.extend(batch.rows))
        await until(lambda: reader.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
        hand.type(b"NAME hand\n")
        await writer.publish(typing, [[1]])
        while not (await hand.line()).startswith("RDATA typing w1 "):
            pass
        redis.publish("shop", b"PING 1\n" * 1_000)
        redis.publish("shop", b"PING 1\n" * 2_000)
        assert "ERROR a message of over 1100 lines came" in await hand.end()
        await writer.publish(typing, [[2]])
        await until(lambda: len(got) == 2)
        assert reader.statistics()["link"]["reconnects"] == 0


@sync
async def test_clients_of_a_relay_that_is_cancelled_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, missed = Redis(monkeypatch), list[Any]()
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server,
        bus(server, writer="w1") as member,
        bus(redis.client()) as reader,
    ):
        assert server.relay is not None
        reader.on_missed(typing)(lambda *what: missed.append(what))
        reader.subscribe(typing)(lambda _: None)
        await until(lambda: reader.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
        redis.goes_on.clear()
        await member.publish(typing, [[1]])
        await until(lambda: not server.relay.idle.is_set() and not server.relay.outbox)
        (relaying,) = [task for task in server.tasks if task.get_name() == "busrep-tcp-relay"]
        relaying.cancel()
        await asyncio.wait([relaying])
        redis.goes_on.set()
        await until(lambda: missed == [("typing", "w1", 0, 1)])
        assert member.statistics()["link"]["reconnects"] >= 1  # more, where the machine is slow for the relay's Redis
        await member.publish(typing, [[2]])
        await reader.wait_for(typing, "w1", 2, 10)


@sync
async def test_a_redis_that_takes_nothing_is_asked_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, pauses = Redis(monkeypatch), list[int]()
    monkeypatch.setattr(links, "pause_after", lambda failures, *_: pauses.append(failures) or 0.001)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server,
        bus(server, writer="w1") as member,
    ):
        redis.takes_nothing = True
        await until(lambda: len(pauses) >= 5)
        redis.takes_nothing = False
        assert pauses[:5] == [1, 2, 3, 4, 5]
        published = len(redis.published)
        await until(lambda: len(redis.published) > published)
        assert member.statistics()["link"]["last_error"].startswith("the link to Redis was lost")


@sync
async def test_nobody_takes_part_while_redis_is_away(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server,
        bus(server, store=store, reader="r1") as member,
    ):
        member.subscribe(orders)(lambda batch: got.extend(batch.rows))
        redis.away = True
        redis.cut()
        await until(lambda: not server.statistics()["redis"]["connected"])
        await until(lambda: not member.statistics()["link"]["connected"])
        with pytest.raises(Unavailable, match="the link to Redis is down"):
            await bus(server, store=store).open()
        async with bus(server, require_redis=False) as patient:
            assert not patient.statistics()["link"]["connected"]
            redis.away = False
            await until(lambda: patient.statistics()["link"]["connected"])
        async with bus(redis.client(), store=store, writer="w1") as writer:
            ids = await writer.publish(orders, [[1]])
            await member.wait_for(orders, "w1", ids[-1], 10)
        assert member.statistics()["link"]["reconnects"] == 1
    assert got == [[1]]


@sync
async def test_a_server_whose_redis_was_away_can_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    server = TcpServer("shop", port=0, redis=redis.client(), settings=QUICK)
    redis.away = True
    with pytest.raises(Unavailable):
        await server.open()
    redis.away = False
    async with asyncio.timeout(20), server, Hand.of(server) as hand:
        assert len(await hand.lines(2)) == 2
    async with asyncio.timeout(20), server, bus(server) as member:
        assert member.statistics()["link"]["connected"]


@sync
async def test_of_a_redis_that_cannot_keep_up_only_those_hear_who_say_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    settings = attrs.evolve(QUICK, tcp_queue_bytes=10_000, redis_timeout=20.0)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server,
        bus(server, writer="w1", settings=settings) as member,
        bus(redis.client(), settings=settings) as reader,
        Hand.of(server) as quiet,
        Hand.of(server) as loud,
    ):
        reader.subscribe(typing)(lambda batch: got.extend(row[0] for row in batch.rows))
        await until(lambda: reader.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
        await quiet.lines(2)
        redis.goes_on.clear()
        while not server.refused:
            loud.type(b"USER_SYNC process-1 @a:b None start 1\n" * 20)
            await asyncio.sleep(0)
        assert (await loud.end()).endswith("ERROR Redis cannot keep up\n")
        ids = []
        for number in range(30):  # and who is in this process waits
            ids += await member.publish(typing, [[number, "x" * 1000]])
        assert server.statistics()["refused"] == {"Redis cannot keep up": 1}
        assert server.relay.outbox_bytes < 10_000 + 2 * settings.frame_bytes
        quiet.type(b"PING 1\n")
        redis.goes_on.set()
        await until(lambda: got == list(range(30)))
        assert server.statistics()["clients"] == 1
        assert member.statistics()["link"]["reconnects"] == 0


@sync
async def test_what_clients_said_is_published_before_the_server_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    async with TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server, Hand.of(server) as hand:
        await hand.lines(2)
        waiting, wait = asyncio.Event(), server.relay.idle.wait

        async def wait_for_redis() -> Any:
            waiting.set()
            return await wait()

        monkeypatch.setattr(server.relay.idle, "wait", wait_for_redis)
        redis.goes_on.clear()
        hand.type(b"".join(b"REMOTE_SERVER_UP s%d\n" % number for number in range(1_000)))
        await until(lambda: server.relay.outbox)
        closing = asyncio.create_task(server.close())
        assert (await hand.end()).endswith("ERROR server stopping\n")
        await waiting.wait()
        redis.goes_on.set()
        await closing
        assert [data for _, data in redis.published] == [b"REMOTE_SERVER_UP s%d" % n for n in range(1_000)]
        assert asyncio.all_tasks() == {asyncio.current_task()}


@sync
async def test_a_server_that_cannot_publish_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    settings = attrs.evolve(QUICK, shutdown_timeout=0.1)
    async with TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server, Hand.of(server) as hand:
        await hand.lines(2)
        redis.goes_on.clear()
        hand.type(b"REMOTE_SERVER_UP s\n")
        await until(lambda: server.relay.outbox_bytes or not server.relay.idle.is_set())
    assert asyncio.all_tasks() == {asyncio.current_task()}


@sync
async def test_a_bug_while_relaying_ends_no_relay(
    store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server,
        bus(redis.client(), store=store, reader="r1") as reader,
        bus(url(server), store=store, writer="w1") as writer,
    ):
        reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
        publish = server.relay.link.publish

        async def fail(messages: Any) -> None:
            monkeypatch.setattr(server.relay.link, "publish", publish)
            raise ValueError("a bug")

        monkeypatch.setattr(server.relay.link, "publish", fail)
        ids = await writer.publish(orders, [[1]])
        await reader.wait_for(orders, "w1", ids[-1], 10)
    assert got == [[1]]
    assert "publishing failed" in caplog.text


@sync
async def test_a_relay_that_does_not_hear_what_it_publishes_connects_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    settings = attrs.evolve(QUICK, tcp_ping=0.1)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=settings) as server,
        bus(url(server), writer="w1", settings=attrs.evolve(settings, heartbeat=600.0)) as writer,
    ):
        for connection in redis.connections:  # as one does that became a replica of another
            connection.channels = {"elsewhere": None} if connection.channels else {}
        await writer.send(RemoteServerUp("elsewhere"))
        await until(lambda: server.statistics()["redis"]["reconnects"] == 1)
        assert server.statistics()["redis"]["last_error"] == "what is published is not heard back"
        await until(lambda: writer.statistics()["link"]["connected"])
        # All is heard again: there is no second time.
        await writer.send(RemoteServerUp("elsewhere"))
        await until(lambda: server.relay.unheard is None)
        assert server.statistics()["redis"]["reconnects"] == 1


@sync
async def test_rows_of_several_sub_channels_in_one_message_go_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    async with (
        TcpServer("shop", port=0, redis=redis.client(), streams=[typing, shouts], settings=QUICK) as server,
        Hand.of(server) as hand,
    ):
        await hand.lines(2)
        hand.type(b"NAME f\nRDATA typing f 1 [1]\nPING 1\nRDATA shouts f 1 [2]\nREPLICATE\n")
        await until(lambda: len(redis.published) == 3)
        assert redis.published == [
            ("shop", b"NAME f\nRDATA typing f 1 [1]"),
            ("shop/loud", b"NAME f\nRDATA shouts f 1 [2]"),
            ("shop", b"REPLICATE"),
        ]


def test_a_message_of_many_streams_and_a_ping_is_taken_apart_in_one_go() -> None:
    routes = Routes("shop", {"typing": "", "shouts": "loud"})
    lines = [b"NAME c 1", *[b"POSITION s%d c 0 0" % number for number in range(30_000)]]
    message = b"\n".join([*lines, b"PING 1", b"POSITION shouts c 0 0"])
    frame = parse_message(message, Settings(message_items=100_000))
    begun = time.thread_time()
    told = list(routes.parts(message, frame))
    # Takes 0.06 s; 5 s and more where each line is held against each stream.
    assert time.thread_time() - begun < 1.5
    assert told == [("shop", b"\n".join(lines)), ("shop/loud", b"NAME c 1\nPOSITION shouts c 0 0")]


@sync
async def test_a_relay_hears_the_sub_channels_of_the_buses_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    redis, got = Redis(monkeypatch), list[Any]()
    async with (
        TcpServer("shop", port=0, redis=redis.client(), settings=QUICK) as server,
        bus(redis.client(), streams=[shouts], writer="w1") as writer,
        bus(server, streams=[shouts]) as member,
    ):
        member.subscribe(shouts)(lambda batch: got.extend(batch.rows))
        await until(lambda: member.statistics()["reader"]["states"].get("shouts") == {"w1": "live"})
        await writer.publish(shouts, [["hey"]])
        await until(lambda: got == [["hey"]])


# -- buses in the server's own process ------------------------------------------------------------------------------


@sync
async def test_what_a_member_publishes_while_it_is_lost_is_published_again() -> None:
    async with TcpServer("shop", port=0, settings=QUICK) as server, bus(server) as member:
        link = member.link
        publishing = asyncio.create_task(link.publish([("shop", b"REMOTE_SERVER_UP s")]))
        await asyncio.sleep(0)
        server.cut("a test")
        with pytest.raises(Unavailable, match="a test"):
            await publishing


@sync
async def test_a_member_that_fails_at_a_message_keeps_it_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    def fail(channel: str, data: bytes) -> None:
        if b"REMOTE" in data:
            raise ValueError("a bug")

    async with TcpServer("shop", port=0, settings=QUICK) as server:
        ups: list[int] = []
        broken = LocalLink(server, [], on_up=lambda: ups.append(1), on_message=fail, on_down=lambda: ups.append(0))
        await broken.start(required=True)
        async with bus(server) as other, bus(url(server)) as client:
            other.on(RemoteServerUp)(heard.append)
            await client.send(RemoteServerUp("s"))
            await until(lambda: heard)
            await until(lambda: ups == [1, 0, 1])
            assert broken.statistics()["reconnects"] == 1
        await broken.close()
    assert "taking in a message failed" in caplog.text


@sync
async def test_a_member_of_a_server_that_is_closed_stays_away() -> None:
    server = TcpServer("shop", port=0, settings=QUICK)
    async with server, bus(server) as member:
        await server.close()
        assert member.statistics()["link"]["last_error"] == "server stopping"
        with pytest.raises(Unavailable, match="server stopping"):
            await member.link.open_publisher()
        with pytest.raises(ConfigError, match="open the TCP server before the bus"):
            await bus(server).open()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@sync
async def test_opening_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = Redis(monkeypatch)
    begun = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", never)
    opening = asyncio.create_task(TcpServer("shop", port=0, redis=redis.client()).open())
    await begun.wait()
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
    assert not redis.connections
    assert asyncio.all_tasks() == {asyncio.current_task()}
