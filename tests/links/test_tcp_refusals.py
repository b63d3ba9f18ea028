"""What a TCP server refuses: who does it is told why, it is counted, and nothing of it is left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from busrep import RemoteServerUp
from busrep.links import tcp_connection, tcp_server
from busrep.links.tcp import client_tls
from busrep.links.tcp_connection import SOCKET_BYTES, Connection
from busrep.links.tcp_server import TcpServer, server_tls
from tests.links.test_tcp import CERTIFICATE, KEY, QUICK, Hand, bus, typing, until
from tests.stores.store_conformance import sync

SHORT = attrs.evolve(QUICK, line_bytes=1_024, tcp_ping=0.02, tcp_timeout=0.1)
EPOCH = "0123456789abcdef0123456789abcdef"
NOTHING = {"clients": 0, "strangers": 0, "leaving": 0, "queue_bytes": 0}


def sockets() -> int:
    """Sockets that this process has open."""
    fds, count = Path("/proc/self/fd"), 0
    for fd in fds.iterdir() if fds.exists() else ():
        with contextlib.suppress(OSError):
            count += os.readlink(fd).startswith("socket:")
    return count


def connections() -> list[Connection]:
    """Those that are still in memory, whoever holds them."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Connection]


@contextlib.asynccontextmanager
async def a_server(**options: Any) -> AsyncIterator[TcpServer]:
    """A server of which, when its clients have gone, nothing is left of them: no task, socket, timer or byte."""
    assert not connections()
    async with TcpServer("shop", port=0, **{"settings": SHORT, **options}) as server:
        tasks, before = asyncio.all_tasks(), sockets()
        yield server
        await until(lambda: {name: server.statistics()[name] for name in NOTHING} == NOTHING)
        await until(lambda: asyncio.all_tasks() == tasks)
        await until(lambda: sockets() == before)
        assert server.own_bytes == 0
        await until(lambda: not connections())  # the loop may still have callbacks of a transport to call
    assert asyncio.all_tasks() == {asyncio.current_task()}


def typed(text: bytes) -> Callable[[Hand], Awaitable[None]]:
    async def type_it(hand: Hand) -> None:
        hand.type(text)

    return type_it


async def drip(hand: Hand) -> None:
    while not hand.reader.at_eof():
        hand.type(b"x")
        await asyncio.sleep(0.01)


async def say_ping_and_nothing_more(hand: Hand) -> None:
    hand.type(b"PING 1\n")


async def say_ping_and_drip(hand: Hand) -> None:
    hand.type(b"PING 1\n")
    await drip(hand)


CASES = [
    pytest.param(typed(b"HELLO\n"), "bad command: is not known: b'HELLO'", "bad command", id="unknown"),
    pytest.param(typed(b"POSITION a b\n"), "bad line", "bad line", id="malformed"),
    pytest.param(typed(b"RDATA s w x []\n"), "bad token", "bad token", id="malformed row"),
    pytest.param(typed(b"\xff\xfe\n"), "bad message: not UTF-8", "bad message", id="not UTF-8"),
    pytest.param(typed(b"PING " + b"1" * 2000 + b"\n"), "over 1024 bytes", "bad line", id="oversized"),
    pytest.param(typed(b"P" * 2000), "over 1024 bytes", "bad line", id="oversized and unfinished"),
    pytest.param(typed(b"\x16\x03\x01\x02\x00\x01\n"), "bad", "bad command", id="TLS"),
    pytest.param(typed(b"GET / HTTP/1.1\r\n"), "bad command", "bad command", id="HTTP"),
    pytest.param(typed(b"SERVER other\n"), "wrong name: this server is 'shop', not 'other'", "wrong name", id="name"),
    pytest.param(
        typed(b"SERVER other %b\nNAME w1 3\n" % EPOCH.encode()), "not 'other'", "wrong name", id="name and epoch"
    ),
    pytest.param(drip, "half a line for 0.1 s", "half a line", id="byte by byte for ever"),
    pytest.param(typed(b"REPLI"), "half a line for 0.1 s", "half a line", id="half a line for ever"),
    pytest.param(say_ping_and_nothing_more, "nothing heard for 0.1 s", "silent", id="silent after PING"),
    pytest.param(say_ping_and_drip, "nothing heard for 0.1 s", "silent", id="byte by byte after PING"),
]

SECRET_CASES = [
    pytest.param(typed(b""), "AUTH is needed first", "no secret", id="connects and says nothing"),
    pytest.param(typed(b"AUTH hush"), "AUTH is needed first", "no secret", id="half the line with the secret"),
    pytest.param(drip, "AUTH is needed first", "no secret", id="byte by byte for ever"),
    pytest.param(typed(b"AUTH hus\n"), "AUTH failed", "wrong secret", id="wrong secret"),
    pytest.param(typed(b"AUTH\n"), "AUTH failed", "wrong secret", id="empty secret"),
    pytest.param(typed(b"REPLICATE\n"), "AUTH failed", "wrong secret", id="none"),
    pytest.param(typed(b"\xff" * 500 + b"\n"), "AUTH failed", "wrong secret", id="not UTF-8"),
    pytest.param(typed(b"AUTH " + b"x" * 1100), "bad AUTH: is needed first", "bad AUTH", id="endless secret"),
]


async def refused(
    server: TcpServer,
    does: Callable[[Hand], Awaitable[None]],
    greeting: int,
    *,
    times_out: bool = False,
    **options: Any,
) -> str:
    """Return what a client is told that does that. With ``times_out`` the time for the secret is short once TLS stands,
    however long that took."""
    async with Hand.of(server, **options) as hand, contextlib.AsyncExitStack() as stack:
        if times_out:
            hello = stack.enter_context(pytest.MonkeyPatch.context())
            await until(lambda: all(one.secured for one in connections()))
            hello.setattr(tcp_connection, "HELLO", 0.1)
        await hand.lines(greeting)
        doing = asyncio.ensure_future(does(hand))
        said = await hand.end()
        await doing
    return said


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize(("does", "says", "counted"), CASES)
@sync
async def test_what_is_not_of_the_protocol(
    does: Callable[[Hand], Awaitable[None]], says: str, counted: str, tls: bool
) -> None:
    options = {"tls": server_tls(CERTIFICATE, KEY)} if tls else {}
    async with a_server(**options) as server:
        async with bus(server) as other:
            heard: list[Any] = []
            other.on_line(lambda *seen: heard.append(seen))
            said = await refused(server, does, 2, **({"ssl": client_tls(ca=CERTIFICATE)} if tls else {}))
            *_, last = said.splitlines()
            assert last.startswith("ERROR ")
            assert says in last
            assert server.statistics()["refused"] == {counted: 1}
            assert {line for _, _, line in heard} <= {b"REPLICATE"}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize(("does", "says", "counted"), SECRET_CASES)
@sync
async def test_who_does_not_show_the_secret(
    does: Callable[[Hand], Awaitable[None]],
    says: str,
    counted: str,
    tls: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    options = {"tls": server_tls(CERTIFICATE, KEY)} if tls else {}
    async with a_server(secret="hush", **options) as server:
        waits = counted == "no secret"
        said = await refused(server, does, 0, times_out=waits, **({"ssl": client_tls(ca=CERTIFICATE)} if tls else {}))
        assert said.startswith("ERROR ")  # and no word of where it is
        assert says in said
        assert server.statistics()["refused"] == {counted: 1}
    assert "hus" not in caplog.text


async def nothing(_: asyncio.StreamWriter) -> None: ...


async def half_a_handshake(writer: asyncio.StreamWriter) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_tls(ca=CERTIFICATE).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    writer.write(outgoing.read()[:50])


async def half_a_handshake_and_gone(writer: asyncio.StreamWriter) -> None:
    await half_a_handshake(writer)
    writer.close()


async def half_a_handshake_and_reset(writer: asyncio.StreamWriter) -> None:
    await half_a_handshake(writer)
    writer.transport.abort()


async def plain_text(writer: asyncio.StreamWriter) -> None:
    writer.write(b"NAME worker-1\n")


@pytest.mark.parametrize(
    "does",
    [nothing, half_a_handshake, half_a_handshake_and_gone, half_a_handshake_and_reset, plain_text],
    ids=lambda does: does.__name__,
)
@sync
async def test_a_handshake_that_does_not_end(
    does: Callable[[asyncio.StreamWriter], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be told why in a line: that would come before TLS stands."""
    monkeypatch.setattr(tcp_connection, "HELLO", 0.1)
    async with a_server(tls=server_tls(CERTIFICATE, KEY), secret="hush") as server:
        async with Hand.of(server) as hand:
            await does(hand.writer)
            with contextlib.suppress(OSError):
                assert b"ERROR" not in await hand.reader.read()
            await until(lambda: server.statistics()["refused"] == {"TLS handshake failed": 1})


@sync
async def test_a_client_without_the_certificate_that_is_wanted() -> None:
    async with a_server(tls=server_tls(CERTIFICATE, KEY, client_ca=CERTIFICATE)) as server:
        with contextlib.suppress(OSError):  # at the handshake, or (TLS 1.3) at the first read
            async with Hand.of(server, ssl=client_tls(ca=CERTIFICATE)) as hand:
                assert await hand.end() == ""
        await until(lambda: server.statistics()["refused"] == {"TLS handshake failed": 1})


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@sync
async def test_strangers_keep_nobody_out_who_knows_the_secret(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connection, "HELLO", 60.0)
    monkeypatch.setattr(tcp_server, "STRANGERS", 10)
    settings = attrs.evolve(QUICK, tcp_clients=3)
    options = {"tls": server_tls(CERTIFICATE, KEY)} if tls else {}
    async with a_server(secret="hush", settings=settings, **options) as server, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(Hand.of(server)) for _ in range(15)]
        await until(lambda: server.statistics()["refused"] == {"too many strangers": 5})
        assert server.statistics()["strangers"] == 10
        for hand in strangers[:5]:
            with contextlib.suppress(ConnectionError):
                said = await hand.end()
                assert said.startswith("ERROR too many strangers: 10 are here") or tls
        async with Hand.of(server, **({"ssl": client_tls(ca=CERTIFICATE)} if tls else {})) as one:
            one.type(b"AUTH hush\n")
            assert await one.line() == "SERVER shop"


@sync
async def test_too_many_clients() -> None:
    settings = attrs.evolve(QUICK, tcp_clients=2)
    async with a_server(settings=settings) as server:
        async with Hand.of(server) as one, Hand.of(server) as two:
            await one.lines(2)
            await two.lines(2)
            async with Hand.of(server) as three, Hand.of(server) as four:
                assert "ERROR too many clients: 2" in await three.line()
                one.writer.close()
                await until(lambda: server.statistics()["clients"] == 1)
                # There is room, whoever has been told that there is none and has not gone yet.
                async with Hand.of(server) as five:
                    assert await five.line() == "SERVER shop"
                assert "ERROR too many clients: 2" in await four.line()
        assert server.statistics()["refused"] == {"too many clients": 2}


# -- who does not read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("name", [b"NAME native 1\n", b"NAME foreign\n"], ids=["native", "foreign"])
@pytest.mark.parametrize("bound", [{"tcp_queue_commands": 100}, {"tcp_queue_bytes": 100_000}], ids=str)
@sync
async def test_who_sends_and_never_reads(
    bound: dict[str, int], name: bytes, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it hears is what it says itself. It is told why, should it begin to read now."""
    monkeypatch.setattr(tcp_connection, "GOODBYE", 30.0)  # however busy the machine is
    settings = attrs.evolve(QUICK, **bound)
    options = {"tls": server_tls(CERTIFICATE, KEY)} if tls else {}
    async with a_server(settings=settings, **options) as server:
        client = {"ssl": client_tls(ca=CERTIFICATE)} if tls else {}
        async with Hand.of(server, limit=1024, **client) as hand:
            hand.type(name)
            number = 0
            while not server.refused:
                # No more than the server can read before it hangs up: what it leaves unread resets the connection.
                if hand.writer.transport.get_write_buffer_size() < 2**16:
                    number += 1
                    hand.type(b'RDATA s w %d ["%b"]\n' % (number, b"x" * 1000))
                await asyncio.sleep(0)
            held = sum(one.queued_bytes for one in connections())
            assert held == 0
            said = b""
            # Not to the end: with TLS the server waits for the client to go, for as long as its goodbye allows.
            while not said.endswith(b"ERROR failed to keep up\n"):
                said += (part := await hand.reader.read(2**16))
                assert part, said[-200:]
        assert server.statistics()["refused"] == {"failed to keep up": 1}
        assert server.statistics()["queue_bytes_peak"] <= 100_000 + 2 * SOCKET_BYTES


@sync
async def test_foreign_clients_that_do_not_read_share_one_bound() -> None:
    """Each is shown something else, which it does not share with others: five must not take five times as much."""
    settings = attrs.evolve(QUICK, tcp_queue_bytes=200_000)
    async with a_server(settings=settings) as server, bus(server, writer="w1", settings=settings) as writer:
        async with contextlib.AsyncExitStack() as stack:
            hands = [await stack.enter_async_context(Hand.of(server, limit=1024)) for _ in range(5)]
            for hand in hands:
                hand.type(b"NAME foreign\n")
                await hand.line()
            most = 0
            while server.refused["failed to keep up"] < 5:
                await writer.publish(typing, [[number, "x" * 1000] for number in range(20)])
                most = max(most, sum(one.own_bytes for one in server.clients))
            assert most <= 200_000


@sync
async def test_a_great_deal_at_once_does_not_stand_in_every_socket() -> None:
    """What a full socket does not take waits where all clients share it."""
    settings = attrs.evolve(QUICK, tcp_queue_commands=10**6)
    async with a_server(settings=settings) as server, bus(server, writer="w1", settings=settings) as writer:
        async with Hand.of(server, limit=1024) as hand:
            hand.type(b"NAME native 1\n")
            await hand.line()
            await until(lambda: all(client.native for client in server.clients))
            most = 0
            await writer.publish(typing, [["x" * 1000]] * 8_000)
            while not server.queue_bytes_peak > 1_000_000:
                most = max(most, *(client.transport.get_write_buffer_size() for client in server.clients))
                await asyncio.sleep(0)
            assert most < 4 * SOCKET_BYTES


@sync
async def test_who_leaves_and_does_not_read_is_gone_soon() -> None:
    """Half a connection, its socket full: only who reads would end it."""
    settings = attrs.evolve(QUICK, tcp_queue_commands=10**6)
    async with a_server(settings=settings) as server, bus(server, writer="w1", settings=settings) as writer:
        async with Hand.of(server, limit=1024) as hand:
            hand.type(b"NAME native 1\n")
            while not server.queue_bytes_peak:
                await writer.publish(typing, [["x" * 1000]] * 100)
            hand.writer.write_eof()
            await until(lambda: server.statistics()["clients"] == server.statistics()["leaving"] == 0)
            assert server.statistics()["refused"] == {}


# -- what is no fault -----------------------------------------------------------------------------------------------


@sync
async def test_a_name_said_twice_is_another_name() -> None:
    async with a_server(settings=QUICK) as server, bus(server, writer="w1") as writer:
        async with Hand.of(server) as hand:
            await hand.lines(2)
            hand.type(b"NAME worker one\nNAME worker two\nREPLICATE\n")
            assert (await hand.line()).startswith("POSITION typing w1 ")
            (client,) = server.clients
            assert client.name == "'worker two'"
            hand.type(b"NAME worker 3\n")  # native: it hears who speaks
            while not (await hand.line()).startswith("NAME w1 "):
                await writer.publish(typing, [[1]])
            del client
        assert server.statistics()["refused"] == {}


@pytest.mark.parametrize("text", [b"REPLI", b"REPLICATE\n", b"NAME w 1\nREPLICATE\nPOSITION s w 1 1\nRDATA s w bat"])
@pytest.mark.parametrize("end", ["close", "abort"])
@sync
async def test_a_client_cut_in_the_middle(text: bytes, end: str) -> None:
    async with a_server(settings=QUICK) as server:
        async with bus(server, writer="w1") as other:
            heard: list[bytes] = []
            other.on_line(lambda way, _, line: heard.append(line) if way == "<" else None)
            async with Hand.of(server) as hand:
                await hand.lines(2)
                hand.type(text)
                await until(lambda: not hand.writer.transport.get_write_buffer_size())
                getattr(hand.writer.transport, end)()
            await until(lambda: server.statistics()["clients"] == 0)
            assert not [line for line in heard if line.startswith((b"REPLI", b"RDATA")) and line != b"REPLICATE"]
        assert server.statistics()["refused"] == {}


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
@sync
async def test_who_says_a_word_and_leaves_at_once_is_heard(tls: bool) -> None:
    """With TLS it all comes together with the end of the handshake."""
    options = {"tls": server_tls(CERTIFICATE, KEY)} if tls else {}
    async with a_server(settings=QUICK, secret="hush", **options) as server, bus(server) as other:
        heard: list[Any] = []
        other.on(RemoteServerUp)(lambda command: heard.append(command.server))
        client = {"ssl": client_tls(ca=CERTIFICATE)} if tls else {}
        for number in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port, **client)
            writer.write(b"AUTH hush\nREMOTE_SERVER_UP s%d\n" % number)
            writer.close()
            await until(lambda: heard == [f"s{one}" for one in range(number + 1)])  # noqa: B023
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.mark.parametrize("how", ["handshaking", "strange", "stalled", "silent"])
@sync
async def test_a_server_that_is_closed_leaves_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connection, "HELLO", 60.0)
    options: dict[str, Any] = {"handshaking": {"tls": server_tls(CERTIFICATE, KEY)}, "strange": {"secret": "s"}}
    before = sockets()
    async with TcpServer("shop", port=0, settings=QUICK, **options.get(how, {})) as server:
        async with Hand.of(server, limit=1024) as hand:
            await until(lambda: server.accepted)
            if how == "stalled":
                hand.type(b"NAME native 1\n")
                async with bus(server, writer="w1") as writer:
                    while not server.queue_bytes_peak:
                        await writer.publish(typing, [["x" * 1000]] * 100)
            await server.close()
            assert {name: server.statistics()[name] for name in NOTHING} == NOTHING
            assert asyncio.all_tasks() == {asyncio.current_task()}
            await until(lambda: not connections())
    await until(lambda: sockets() == before)


@sync
async def test_the_secret_said_twice_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with a_server(settings=QUICK, secret="hush") as server:
        async with Hand.of(server) as hand:
            hand.type(b"AUTH hush\nAUTH hush\nNAME a 1\nAUTH hush\nPING 1\nHELLO\n")
            said = await hand.end()
            assert "HELLO" in said
            assert "hush" not in said
    assert "hush" not in caplog.text


@sync
async def test_what_was_said_before_an_error_counts() -> None:
    async with a_server(settings=QUICK) as server, bus(server) as other:
        got: list[Any] = []
        other.subscribe(typing)(lambda batch: got.extend(batch.rows))
        async with Hand.of(server) as hand:
            await hand.lines(2)
            hand.type(b'POSITION typing f 1 1\nRDATA typing f 2 ["@a"]\nERROR that was all\nRDATA typing f 3 []\n')
            assert await hand.end() == ""
            await until(lambda: got == [["@a"]])
        assert server.statistics()["errors_heard"] == 1
        assert server.statistics()["refused"] == {}


@sync
async def test_a_name_without_end_is_not_repeated_to_others() -> None:
    async with a_server(settings=QUICK) as server:
        async with Hand.of(server) as hand:
            await hand.lines(2)
            hand.type(b"NAME " + b"x" * 256 + b" 1\n")
            assert "bad instance: is longer than 255 bytes" in await hand.end()
        assert server.statistics()["refused"] == {"bad instance": 1}
