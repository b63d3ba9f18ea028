"""FakeNode, and busrep's link to Redis on nodes that refuse, stammer and break off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from busrep.errors import ConfigError, Unavailable
from busrep.links.redis import RedisLink
from busrep.settings import Settings
from tests.support.node import ANY, CLOSE, USUAL, Error, FakeNode, Raw, expect, message, resp

QUICK = Settings(heartbeat=0.1, retry_min=0.01, retry_max=0.05, redis_timeout=1.0)


def run(work: Coroutine[Any, Any, None], timeout: float = 100.0) -> None:
    asyncio.run(asyncio.wait_for(work, timeout))


# -- the node -------------------------------------------------------------------------------------------------


async def talk(node: FakeNode, *commands: bytes, size: int | None = None) -> bytes:
    """Send bytes, and give what comes back until the end, or ``size`` bytes."""
    host, _, port = node.url.removeprefix("redis://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.writelines(commands)
    if size is None:
        writer.write_eof()
    try:
        return await (reader.read() if size is None else reader.readexactly(size))
    finally:
        writer.close()


def command(*arguments: bytes) -> bytes:
    return resp(list(arguments))


def test_a_script_that_is_followed() -> None:
    async def main() -> None:
        script = [
            expect("get", "key").then(b"value"),
            expect("DEL", ANY, lambda key: key.startswith(b"k")).then(2),
            expect("SET", "key", more=True),
            expect("HGETALL", "key").then([b"a", None, [1]]),
            expect("EVAL", more=True).then(Error("ERR no")),
            expect("QUIT").then(Raw(b"+O"), CLOSE),
        ]
        async with FakeNode(*script) as node:
            got = await talk(
                node,
                command(b"PING"),
                command(b"GET", b"key"),
                command(b"CLIENT", b"SETINFO", b"LIB-NAME", b"x"),
                command(b"del", b"", b"k\n"),
                command(b"SET", b"key", b"value", b"EX", b"1"),
                command(b"HGETALL", b"key"),
                command(b"EVAL", b"x", b"0"),
                command(b"QUIT"),
                command(b"PING"),
            )
            await node.finished()
            assert got == (
                b"+PONG\r\n$5\r\nvalue\r\n+OK\r\n:2\r\n+OK\r\n*3\r\n$1\r\na\r\n$-1\r\n*1\r\n:1\r\n-ERR no\r\n+O"
            )
            assert node.received[:2] == [[b"PING"], [b"GET", b"key"]]
            assert node.connections == 1

    run(main())


def test_a_script_that_is_not_followed() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError) as caught:
            async with FakeNode(expect("GET", "a"), expect("SET", ANY, "b"), expect("INCR", "c")) as node:
                got = await talk(node, command(b"GET", b"a"), command(b"GET", b"b" * 200), command(b"SET", b" ", b"b"))
                assert got.splitlines()[1].startswith(b"-ERR this command is not in the script")
        assert str(caught.value).splitlines() == [
            "the conversation was not as written:",
            "  (1) GET a",
            f"! (1) GET {'b' * 60}... (200 characters)",
            "!     instead of: SET ANY b",
            "  (1) SET ' ' b",
            "!     never came: INCR c",
        ]

    run(main())


def test_more_than_the_script_and_no_resp_at_all() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError, match="instead of: nothing more"):
            async with FakeNode() as node:
                await talk(node, command(b"GET", b"a"))
        with pytest.raises(AssertionError, match=r"no RESP: b'GET a\\r\\n' where \* and a number are due"):
            async with FakeNode() as node:
                await talk(node, b"GET a\r\n")

    run(main())


def test_an_error_of_the_block_is_not_hidden() -> None:
    async def main() -> None:
        with pytest.raises(KeyError) as caught:
            async with FakeNode(expect("GET", "a")):
                raise KeyError("x")
        assert "never came: GET a" in caught.value.__notes__[0]

    run(main())


def test_replies_wait_for_an_event() -> None:
    async def main() -> None:
        go = asyncio.Event()
        async with FakeNode(expect("GET", "a").then("first", go, "second")) as node:
            asking = asyncio.create_task(talk(node, command(b"GET", b"a"), size=17))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asking), 0.05)
            go.set()
            assert await asking == b"+first\r\n+second\r\n"

    run(main())


def test_subscriptions_without_a_word_in_the_script() -> None:
    async def main() -> None:
        always = [expect(name, more=True) for name in ("SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH", "GET")]
        async with FakeNode(always=always) as node, redis.asyncio.Redis.from_url(node.url, protocol=2) as client:
            async with client.pubsub() as pubsub:
                await pubsub.subscribe("a", "b")
                assert [(await pubsub.get_message(timeout=5))["data"] for _ in range(2)] == [1, 2]
                assert await client.publish("a", b"x") == 1
                assert node.publish("b", b"y") == 1
                assert node.publish("c", b"y") == 0
                assert [(await pubsub.get_message(timeout=5))["data"] for _ in range(2)] == [b"x", b"y"]
                await pubsub.unsubscribe()
                assert [(await pubsub.get_message(timeout=5))["data"] for _ in range(2)] == [1, 0]
            with pytest.raises(ResponseError, match="not in the script"):
                await client.execute_command("NOPE")
            node._failed = False  # meant

    run(main())


def test_what_has_no_form_in_resp() -> None:
    with pytest.raises(TypeError, match="has no form"):
        resp(1.5)


# -- busrep's link --------------------------------------------------------------------------------------------


class Heard:
    """What a link told, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.changed = asyncio.Condition()

    def add(self, *event: Any) -> None:
        self.events.append(event)
        self._telling = asyncio.get_running_loop().create_task(self.tell())

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(true)


@asynccontextmanager
async def linked(node: FakeNode, *channels: str) -> AsyncIterator[tuple[RedisLink, Heard]]:
    heard = Heard()
    link = RedisLink(
        node.url,
        channels or ["shop"],
        QUICK,
        on_up=lambda: heard.add("up"),
        on_message=lambda channel, data: heard.add(channel, data),
        on_down=lambda: heard.add("down"),
    )
    try:
        yield link, heard
    finally:
        await link.close()


SUBSCRIBE = expect("SUBSCRIBE", "shop")
UP, DOWN, HELLO = ("up",), ("down",), ("shop", b"hello")


@pytest.mark.parametrize(
    "refusal",
    [
        "NOAUTH Authentication required.",
        "NOPERM User x has no permissions to run the 'subscribe' command",
        "NOPERM No permissions to access a channel",
    ],
)
def test_a_refusal_at_the_start_is_a_config_error(refusal: str) -> None:
    async def main() -> None:
        async with FakeNode(SUBSCRIBE.then(Error(refusal))) as node, linked(node) as (link, heard):
            with pytest.raises(ConfigError, match="Redis refuses this user"):
                await link.start(required=True)
            assert heard.events == []
            assert refusal.partition(" ")[2][:12] in str(link.last_error)

    run(main())


def test_a_wrong_password_is_a_config_error() -> None:
    async def main() -> None:
        refused = expect("AUTH", more=True).then(Error("WRONGPASS invalid username-password pair or user is disabled."))
        async with FakeNode(refused) as node:
            node.url = node.url.replace("redis://", "redis://someone:secret@")
            async with linked(node) as (link, _):
                with pytest.raises(ConfigError, match="invalid username-password pair"):
                    await link.start(required=True)

    run(main())


@pytest.mark.parametrize(
    "refusal",
    [
        "LOADING Redis is loading the dataset in memory",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down",
        "MOVED 3999 127.0.0.1:6381",
        "ERR max number of clients reached",
        "NOPERM No permissions to access a channel",
        "NOAUTH Authentication required.",
    ],
)
def test_errors_to_subscribe_pass(refusal: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever does not need Redis at the start tries on; the log is told once, not at every try."""

    async def main() -> None:
        async with (
            FakeNode(*[SUBSCRIBE.then(Error(refusal))] * 5, SUBSCRIBE) as node,
            linked(node) as (link, heard),
        ):
            await link.start(required=False)
            await heard.until(lambda: heard.events == [UP])
            assert node.publish("shop", b"hello") == 1
            await heard.until(lambda: heard.events == [UP, HELLO])
            assert link.connected
            assert link.reconnects == 0

    with caplog.at_level(logging.WARNING, "busrep.redis"):
        run(main())
    assert len(caplog.records) == 1


def test_loading_at_the_start_is_unavailable_where_redis_is_required() -> None:
    async def main() -> None:
        async with FakeNode(SUBSCRIBE.then(Error("LOADING Redis is loading"))) as node, linked(node) as (link, _):
            with pytest.raises(Unavailable, match="loading"):
                await link.start(required=True)

    run(main())


def test_loading_in_the_handshake_passes() -> None:
    async def main() -> None:
        loading = expect("SELECT", "3").then(Error("LOADING Redis is loading the dataset in memory"))
        async with FakeNode(loading, loading, expect("SELECT", "3"), SUBSCRIBE) as node:
            node.url += "/3"
            async with linked(node) as (link, heard):
                await link.start(required=False)
                await heard.until(lambda: heard.events == [UP])

    run(main())


def test_a_message_before_the_confirmation_is_left_out() -> None:
    """It is asked for again: REPLICATE follows the confirmation of all channels."""

    async def main() -> None:
        go = asyncio.Event()
        confirmed = [[b"subscribe", name, at] for at, name in enumerate((b"shop", b"shop/x"), 1)]
        early = (message("shop", b"early"), confirmed[0], message("shop", b"between"), go, confirmed[1])
        script = expect("SUBSCRIBE", "shop", "shop/x").then(*early, message("shop", b"hello"))
        async with FakeNode(script) as node, linked(node, "shop", "shop/x") as (link, heard):
            starting = asyncio.create_task(link.start(required=True))
            while not node.received or node.received[-1][0] != b"SUBSCRIBE":
                await asyncio.sleep(0.005)
            assert heard.events == []
            go.set()
            await starting
            await heard.until(lambda: len(heard.events) == 2)
            assert heard.events == [UP, HELLO]

    run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50",
        b"*x\r\n",
        b"$99999999999999999999\r\n",
        b"*3\r\n$7\r\nmessage\r\n$4\r\nshop\r\n+\r\n",
        b":17\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"+OK\r\n",
        b"*3\r\n:1\r\n:2\r\n:3\r\n",
        b"*2\r\n$7\r\nmessage\r\n$4\r\nshop\r\n",
        b"*3\r\n$7\r\nmessage\r\n:1\r\n$1\r\nx\r\n",
    ],
)
@pytest.mark.parametrize("when", ["subscribing", "subscribed"])
def test_bytes_that_are_no_message_do_not_stop_the_link(garbage: bytes, when: str) -> None:
    """Whatever a node says, the link is up again in the end, and hears."""

    async def main() -> None:
        babble = (Raw(garbage), CLOSE) if when == "subscribing" else (USUAL, Raw(garbage), CLOSE)
        async with FakeNode(SUBSCRIBE.then(*babble), SUBSCRIBE) as node, linked(node) as (link, heard):
            await link.start(required=False)
            await node.finished()
            await heard.until(lambda: heard.events[-1:] == [UP] and link.connected)
            while not node.publish("shop", b"hello"):
                await asyncio.sleep(0.01)
            await heard.until(lambda: HELLO in heard.events)
            ups = heard.events.count(UP)
            assert heard.events.count(DOWN) == ups - 1
            assert all(isinstance(event[1], bytes) for event in heard.events if len(event) == 2)

    run(main())


@pytest.mark.parametrize("size", range(1, len(resp(message("shop", b"lost"))), 7))
def test_half_a_message_is_no_message(size: int) -> None:
    async def main() -> None:
        half = Raw(resp(message("shop", b"lost"))[:size])
        async with FakeNode(SUBSCRIBE.then(USUAL, half, CLOSE), SUBSCRIBE) as node, linked(node) as (link, heard):
            await link.start(required=True)
            await heard.until(lambda: len(heard.events) == 3)
            while not node.publish("shop", b"hello"):
                await asyncio.sleep(0.01)
            await heard.until(lambda: len(heard.events) == 4)
            assert heard.events == [UP, DOWN, UP, HELLO]
            assert link.reconnects == 1

    run(main())


def test_half_a_confirmation_and_then_nothing() -> None:
    """Bounded by ``redis_timeout``."""

    async def main() -> None:
        half = Raw(b"*3\r\n$9\r\nsubscr")
        async with FakeNode(SUBSCRIBE.then(half), SUBSCRIBE) as node, linked(node) as (link, heard):
            await link.start(required=False)
            await heard.until(lambda: heard.events == [UP])
            assert node.connections == 2

    run(main())


def test_a_ping_without_an_answer_ends_the_link() -> None:
    async def main() -> None:
        silent = [expect("PING").then() for _ in range(QUICK.silent_after_beats)]
        async with FakeNode(SUBSCRIBE, *silent, SUBSCRIBE, always=[expect("PING").then()]) as node:
            async with linked(node) as (link, heard):
                await link.start(required=True)
                await heard.until(lambda: heard.events == [UP, DOWN, UP])
                assert "nothing heard for 0.5 s" in str(link.last_error)

    run(main())


def test_an_error_to_ping_is_survived() -> None:
    """A right that was taken away while the subscription lasts."""

    async def main() -> None:
        refused = expect("PING").then(Error("NOPERM User x has no permissions to run the 'ping' command"))
        async with FakeNode(SUBSCRIBE, refused, SUBSCRIBE, expect("PING")) as node, linked(node) as (link, heard):
            await link.start(required=True)
            await node.finished()
            await heard.until(lambda: heard.events[-1] == UP)
            assert heard.events == [UP, DOWN, UP]
            assert link.connected

    run(main())


def test_a_further_channel_is_subscribed_to_again_after_a_refusal() -> None:
    async def main() -> None:
        script = [
            SUBSCRIBE,
            expect("SUBSCRIBE", "shop/x").then(Error("NOPERM No permissions to access a channel")),
            expect("SUBSCRIBE", "shop", "shop/x"),
        ]
        async with FakeNode(*script) as node, linked(node) as (link, heard):
            await link.start(required=True)
            await link.subscribe("shop/x")
            await node.finished()
            await heard.until(lambda: heard.events == [UP, DOWN, UP])
            while not node.publish("shop/x", b"hello"):
                await asyncio.sleep(0.01)
            await heard.until(lambda: len(heard.events) == 4)
            assert heard.events[-1] == ("shop/x", b"hello")

    run(main())


# -- publishing -----------------------------------------------------------------------------------------------


def publish(data: str) -> Any:
    return expect("PUBLISH", "shop", data)


@pytest.mark.parametrize(
    "replies",
    [
        [Error("NOPERM No permissions to access a channel")],
        [Error("READONLY You can't write against a read only replica.")],
        [Error("OOM command not allowed when used memory > 'maxmemory'.")],
        [Error("ERR something")],
        [Error("MOVED 1 127.0.0.1:1")],
        [Raw(b"?what\r\n"), CLOSE],
        [Raw(b":1"), CLOSE],
        [CLOSE],
        [],
    ],
    ids=str,
)
def test_a_publish_that_fails_gives_the_connection_up(replies: list[Any]) -> None:
    """The replies that follow belong to other commands: a connection out of step would take them for its own."""

    async def main() -> None:
        script = [publish("1"), publish("2").then(*replies), publish("2"), publish("3")]
        # The third of the pipeline may still be read, or not.
        async with FakeNode(*script[:2], always=[publish("2"), publish("3")]) as node, linked(node) as (link, _):
            assert await link.open_publisher()
            with pytest.raises(Unavailable):
                await link.publish([("shop", b"1"), ("shop", b"2"), ("shop", b"3")])
            with pytest.raises(Unavailable, match="is closed"):
                await link.publish([("shop", b"3")])
            assert await link.open_publisher()
            await link.publish([("shop", b"2"), ("shop", b"3")])
            assert not await link.open_publisher()
            assert link.publisher_connects == node.connections == 2

    run(main())


def test_a_publisher_that_is_refused_is_unavailable() -> None:
    async def main() -> None:
        refused = expect("SELECT", "3").then(Error("NOAUTH Authentication required."))
        async with FakeNode(refused, expect("SELECT", "3"), publish("1")) as node:
            node.url += "/3"
            async with linked(node) as (link, _):
                with pytest.raises(Unavailable):
                    await link.open_publisher()
                assert await link.open_publisher()
                await link.publish([("shop", b"1")])

    run(main())


def test_a_cancelled_publish_leaves_no_reply_behind() -> None:
    async def main() -> None:
        never = asyncio.Event()
        async with FakeNode(publish("1").then(never), publish("2").then(7)) as node, linked(node) as (link, _):
            await link.open_publisher()
            publishing = asyncio.create_task(link.publish([("shop", b"1")]))
            while not any(one[0] == b"PUBLISH" for one in node.received):
                await asyncio.sleep(0.005)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            assert await link.open_publisher()
            await link.publish([("shop", b"2")])
            assert node.connections == 2

    run(main())


@pytest.mark.parametrize("reply", [b":17\r\n", b"$-1\r\n", b"*0\r\n", b"+OK\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_no_redis_is_unavailable(reply: bytes) -> None:
    async def main() -> None:
        async with FakeNode(SUBSCRIBE.then(Raw(reply), CLOSE)) as node, linked(node) as (link, _):
            with pytest.raises(Unavailable):
                await link.start(required=True)

    run(main())
