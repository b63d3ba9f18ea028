"""Direct TCP: a server, buses over it, and everything that a client may do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import busrep
from busrep import RemoteServerUp, Settings, Stream
from busrep.core.application_commands import UserIp
from busrep.errors import ConfigError, Unavailable
from busrep.links import link as links
from busrep.links import tcp
from busrep.links.tcp import TcpAddress, client_tls
from busrep.links.tcp_server import TcpServer, server_tls
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from tests import DATA
from tests.stores.store_conformance import sync

CERTIFICATE, KEY = str(DATA / "tls.crt"), str(DATA / "tls.key")
QUICK = Settings(
    heartbeat=0.1,
    answer_interval=0.005,
    silent_after_beats=10,
    retry_min=0.01,
    retry_max=0.1,
    save_every=0.05,
    shutdown_timeout=2.0,
)

orders: Stream[list[Any]] = Stream("orders")
typing: Stream[list[Any]] = Stream("typing", resettable=True)
shouts: Stream[list[Any]] = Stream("shouts", resettable=True, channel="loud")


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
def store(sqlite_url: str) -> str:
    asyncio.run(open_store(sqlite_url, Registry([orders])).init())
    return sqlite_url


def bus(where: Any, name: str = "shop", **options: Any) -> busrep.Bus:
    options.setdefault("settings", QUICK)
    options.setdefault("streams", [orders] if "store" in options else [typing])
    return busrep.connect(where, name=name, **options)


def url(server: TcpServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


@attrs.define
class Hand:
    """Somebody who types lines."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, server: TcpServer, **options: Any) -> AsyncIterator[Hand]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, **options)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    def type(self, text: bytes) -> None:
        self.writer.write(text)

    async def line(self) -> str:
        return (await self.reader.readline()).decode().rstrip("\n")

    async def lines(self, count: int) -> list[str]:
        return [await self.line() for _ in range(count)]

    async def end(self) -> str:
        """Everything up to the end of the connection."""
        return (await self.reader.read()).decode()


# -- buses over it --------------------------------------------------------------------------------------------------


@sync
async def test_facts_reach_readers_in_order(store: str) -> None:
    got: list[Any] = []
    async with TcpServer("shop", port=0, settings=QUICK) as server:
        async with bus(url(server), store=store, writer="w1") as writer, bus(url(server), store=store) as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            for number in range(20):
                async with writer.write(orders) as fact:
                    fact.add([number, "a"])
                    fact.add([number, "b"])
            await reader.wait_for(orders, "w1", fact.id)
            assert writer.statistics()["link"]["reconnects"] == 0
        assert got == [[number, half] for number in range(20) for half in "ab"]
        await until(lambda: server.statistics()["clients"] == 0)


@sync
async def test_a_bus_in_the_server_s_own_process_takes_part(store: str) -> None:
    got: list[Any] = []
    async with TcpServer("shop", port=0) as server:
        async with bus(server, store=store, writer="w1") as writer, bus(url(server), store=store) as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            ids = await writer.publish(orders, [[number] for number in range(100)])
            await reader.wait_for(orders, "w1", ids[-1])
            assert got == [[number] for number in range(100)]
            # It goes on when the link is found dead, as one to Redis does.
            writer.link.reconnect("a test")
            ids = await writer.publish(orders, [["again"]])
            await reader.wait_for(orders, "w1", ids[-1])
            assert writer.statistics()["link"]["reconnects"] == 1


@sync
async def test_a_gap_is_filled_when_the_server_restarts(store: str) -> None:
    got: list[Any] = []
    async with TcpServer("shop", port=0) as first:
        port = first.port
        writer, reader = bus(url(first), store=store, writer="w1"), bus(url(first), store=store, reader="r1")
        async with writer, reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            ids = await writer.publish(orders, [[1]])
            await reader.wait_for(orders, "w1", ids[-1])
            await first.close()
            await until(lambda: not reader.link.connected)
            ids = await writer.publish(orders, [[2], [3]])  # business goes on
            async with TcpServer("shop", port=port):
                await reader.wait_for(orders, "w1", ids[-1], 10)
                ids = await writer.publish(orders, [[4]])
                await reader.wait_for(orders, "w1", ids[-1])
            assert reader.statistics()["link"]["reconnects"] >= 1
    assert got == [[1], [2], [3], [4]]


@sync
async def test_frames_cut_anywhere_by_the_way_arrive_whole(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "READ_BYTES", 7)
    got: list[Any] = []
    async with TcpServer("shop", port=0) as server:
        async with bus(server, store=store, writer="w1") as writer, bus(url(server), store=store) as reader:
            reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
            await reader.wait_for(orders, "w1", (await writer.publish(orders, [[0, ""]]))[-1])
            fetches = reader.statistics()["reader"]["fetches"]
            ids = await writer.publish(orders, [[number, "x" * 50] for number in range(50)])
            await reader.wait_for(orders, "w1", ids[-1])
            assert got == [[0, ""], *([number, "x" * 50] for number in range(50))]
            assert reader.statistics()["reader"]["fetches"] == fetches


@sync
async def test_other_commands_are_passed_on(store: str) -> None:
    heard: list[Any] = []
    async with TcpServer("shop", port=0) as server, bus(url(server)) as one, bus(url(server)) as two:
        two.on(RemoteServerUp)(heard.append)
        two.on(UserIp)(heard.append)
        await one.send(RemoteServerUp("elsewhere"))
        user_ip = UserIp("@a:b", "token", "127.0.0.1", "agent", None, 17)
        await one.send(user_ip)
        await until(lambda: len(heard) == 2)
        assert heard == [RemoteServerUp("elsewhere"), user_ip]


@pytest.mark.parametrize("scheme", ["tcp", "tcps"])
@sync
async def test_last_words_arrive(scheme: str) -> None:
    """What a slow network has not taken yet when the bus is closed is sent all the same; so is a goodbye."""
    tls = server_tls(CERTIFICATE, KEY) if scheme == "tcps" else None
    # Beats come late behind so much, and the machine may be busy. Many a PING is due while it is being sent.
    patient = attrs.evolve(QUICK, shutdown_timeout=60.0, heartbeat=60.0, redis_timeout=60.0, tcp_ping=0.1)
    got: list[Any] = []
    missed: list[Any] = []
    heard: list[Any] = []
    async with TcpServer("shop", port=0, tls=tls) as server, bus(server, settings=patient) as reader:
        reader.subscribe(typing)(lambda batch: got.extend(row[0] for row in batch.rows))
        reader.on_missed()(lambda *what: missed.append(what))
        reader.on(RemoteServerUp)(heard.append)
        end = f"?ca={CERTIFICATE}" if tls else ""
        async with FaultyLink(f"{scheme}://127.0.0.1:{server.port}{end}") as link:
            async with bus(link.url, writer="w1", settings=patient) as writer:
                await until(lambda: reader.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
                link.bandwidth(15_000_000, "to_server")
                await writer.publish(typing, [[number, "x" * 2_000] for number in range(6_000)])
                await writer.send(RemoteServerUp("goodbye"))
        assert "write_eof" not in str(writer.statistics()["link"]["last_error"])
        await until(lambda: len(got) == 6_000)
        await until(lambda: heard)
        assert got == list(range(6_000))
        assert missed == []
        assert server.statistics()["refused"] == {}
        assert server.statistics()["errors_heard"] == 0


@sync
async def test_a_server_that_does_not_answer_keeps_no_bus_from_closing() -> None:
    settings = attrs.evolve(QUICK, shutdown_timeout=0.1)
    async with TcpServer("shop", port=0) as server, FaultyLink(url(server)) as link:
        async with bus(link.url, settings=settings):
            link.black_hole()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@sync
async def test_nothing_is_heard_before_it_is_known_who_hears() -> None:
    """A native client that heard frames without their NAME would take their writer for a foreign one, and the next for
    a new life of it."""
    async with TcpServer("shop", port=0, settings=QUICK) as server, bus(server, writer="w1") as writer:
        async with Hand.of(server) as hand:
            await hand.lines(2)
            beats = server.messages
            await writer.publish(typing, [[1]])
            await until(lambda: server.messages > beats + 2)
            hand.type(b"NAME reader 1\nREPLICATE\n")
            assert (await hand.line()).startswith(("SERVER shop", "NAME w1 ", ""))
            found = ""
            while not found.startswith("POSITION typing"):
                before, found = found, await hand.line()
            assert before.startswith("NAME w1 ")


@sync
async def test_who_is_cut_off_again_and_again_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(links, "pause_after", lambda failures, *_: pauses.append(failures) or 0.001)

    async def greet_and_go(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SERVER shop\nPING 1\n")
        with contextlib.suppress(EOFError):  # the last one may be cut by the end of the test
            await reader.readuntil(b"REPLICATE\n")
        writer.write(b"ERROR failed to keep up\n")
        writer.close()

    server = await asyncio.start_server(greet_and_go, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with bus(f"tcp://127.0.0.1:{port}", require_redis=False):
        await until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [1, 2, 3, 4, 5]
    server.close()
    await server.wait_closed()


# -- the relay ------------------------------------------------------------------------------------------------------


@pytest.mark.servers
@sync
async def test_a_relay_joins_those_on_redis_and_those_behind_it(redis_url: str, bus_name: str, store: str) -> None:
    got: dict[str, list[Any]] = {"tcp": [], "redis": []}
    options: dict[str, Any] = {"name": bus_name, "store": store}
    async with (
        TcpServer(bus_name, port=0, redis=redis_url, settings=QUICK) as server,
        bus(redis_url, writer="w1", **options) as on_redis,
        bus(url(server), writer="w2", **options) as behind,
    ):
        behind.subscribe(orders)(lambda batch: got["tcp"].extend(batch.rows))
        on_redis.subscribe(orders)(lambda batch: got["redis"].extend(batch.rows))
        one = await on_redis.publish(orders, [["from redis", number] for number in range(10)])
        two = await behind.publish(orders, [["from tcp", number] for number in range(10)])
        await behind.wait_for(orders, "w1", one[-1])
        await on_redis.wait_for(orders, "w2", two[-1])
        assert got["tcp"] == [["from redis", number] for number in range(10)]
        assert got["redis"] == [["from tcp", number] for number in range(10)]
        beats = server.messages
        await until(lambda: server.messages > beats + 10)
        assert behind.statistics()["link"]["reconnects"] == 0  # its echo comes back through Redis


@pytest.mark.servers
@sync
async def test_a_relay_keeps_the_sub_channels_apart(redis_url: str, bus_name: str) -> None:
    streams, heard = [typing, shouts], list[tuple[str, bytes]]()
    async with (
        TcpServer(bus_name, port=0, redis=redis_url, streams=streams) as server,
        bus(redis_url, name=bus_name, streams=streams, writer="w1") as on_redis,
        bus(url(server), name=bus_name, streams=streams, writer="w2") as behind,
    ):
        on_redis.on_line(lambda way, channel, line: heard.append((channel, line)) if way == "<" else None)
        on_redis.on(UserIp)(lambda _: None)
        got: list[Any] = []
        on_redis.subscribe(shouts)(lambda batch: got.extend(batch.rows))
        behind.subscribe(shouts)(lambda batch: got.extend(batch.rows))
        await until(lambda: on_redis.statistics()["reader"]["states"].get("shouts") == {"w2": "live"})
        await until(lambda: behind.statistics()["reader"]["states"].get("shouts") == {"w1": "live"})
        await behind.publish(shouts, [["hey"]])
        await on_redis.publish(shouts, [["you"]])
        await until(lambda: sorted(got) == [["hey"], ["you"]])
        await behind.send(UserIp("@a:b", "token", "127.0.0.1", "agent", None, 17))
        await until(lambda: any(line.startswith(b"USER_IP") for _, line in heard))
        assert {channel for channel, line in heard if line.startswith(b"RDATA shouts w2")} == {f"{bus_name}/loud"}
        assert {channel for channel, line in heard if line.startswith(b"USER_IP")} == {f"{bus_name}/USER_IP"}


@pytest.mark.servers
@sync
async def test_a_relay_that_loses_redis_lets_its_clients_begin_anew(redis_url: str, bus_name: str, store: str) -> None:
    got: list[Any] = []
    options: dict[str, Any] = {"name": bus_name, "store": store}
    async with FaultyLink(redis_url) as link:
        async with (
            TcpServer(bus_name, port=0, redis=link.url, settings=QUICK) as server,
            bus(redis_url, writer="w1", **options) as on_redis,
            bus(url(server), reader="r1", **options) as behind,
        ):
            behind.subscribe(orders)(lambda batch: got.extend(batch.rows))
            ids = await on_redis.publish(orders, [[1]])
            await behind.wait_for(orders, "w1", ids[-1])
            link.refuse = True
            link.cut()
            await until(lambda: not behind.link.connected)
            ids = await on_redis.publish(orders, [[2]])
            await until(lambda: "the link to Redis is down" in str(behind.statistics()["link"]["last_error"]))
            link.refuse = False
            await behind.wait_for(orders, "w1", ids[-1], 10)
            assert got == [[1], [2]]
            assert server.refused["the link to Redis was lost"] >= 1


# -- by hand --------------------------------------------------------------------------------------------------------


@sync
async def test_a_session_by_hand(store: str) -> None:
    async with TcpServer("shop", port=0, settings=QUICK) as server, Hand.of(server) as hand:
        greeting = await hand.lines(2)
        assert greeting[0] == "SERVER shop"
        assert greeting[1].startswith("PING 1")
        async with bus(server, store=store, streams=[orders, typing], writer="master") as master:
            await master.publish(orders, [["new"]])
            hand.type(b"NAME worker one\nREPLICATE \n")
            heard = [await hand.line() for _ in range(2)]
            while "RDATA orders master 1" not in heard[-1] and "POSITION orders master 1 1" not in heard:
                heard.append(await hand.line())
            await master.publish(typing, [["@a"]])
            while not (line := await hand.line()).startswith("RDATA typing"):
                assert not line.startswith(("NAME", "SERVER"))
            assert line == 'RDATA typing master 1 ["@a"]'
        await server.close()
        assert (await hand.end()).endswith("ERROR server stopping\n")


@sync
async def test_a_client_that_says_error_is_let_go() -> None:
    async with TcpServer("shop", port=0) as server, Hand.of(server) as hand:
        await hand.lines(2)
        hand.type(b"ERROR I have had enough\n")
        assert await hand.end() == ""
        assert server.statistics()["refused"] == {}
        assert server.statistics()["errors_heard"] == 1


@sync
async def test_who_sends_a_ping_must_go_on_and_who_does_not_may_be_silent() -> None:
    settings = attrs.evolve(QUICK, tcp_ping=0.02, tcp_timeout=0.1)
    async with TcpServer("shop", port=0, settings=settings) as server:
        async with Hand.of(server) as silent, Hand.of(server) as pinging:
            await silent.lines(2)
            pinging.type(b"PING 1\n")
            said = await pinging.end()
            assert said.endswith("ERROR nothing heard for 0.1 s\n")
            assert said.count("PING ") >= 3  # each side says something now and then
            assert server.refused == {"silent": 1}
            silent.type(b"REPLICATE\n")
            assert (await silent.line()).startswith("PING ")


# -- who cannot keep up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"tcp_queue_commands": 100}, {"tcp_queue_bytes": 100_000}], ids=str)
@sync
async def test_a_client_that_cannot_keep_up_is_cut_off_and_the_others_hear_all(bound: dict[str, int]) -> None:
    settings = attrs.evolve(QUICK, **bound)
    async with TcpServer("shop", port=0, settings=settings) as server, bus(server, writer="w1") as writer:
        got: list[Any] = []
        async with Hand.of(server, limit=1024) as stalled, bus(url(server)) as other:
            other.subscribe(typing)(lambda batch: got.extend(batch.rows))
            await until(lambda: other.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
            await stalled.line()
            stalled.type(b"NAME stalled 1\n")
            sent = 0
            while not server.refused:
                await writer.publish(typing, [[sent + number, "x" * 1000] for number in range(20)])
                sent += 20
                await until(lambda: len(got) == sent)  # noqa: B023
            assert server.refused == {"failed to keep up": 1}
            assert server.queue_bytes_peak <= max(bound.get("tcp_queue_bytes", 0), 200_000) + 65_536
            await until(lambda: server.statistics()["clients"] == 1)
            assert [row[0] for row in got] == list(range(sent))


@sync
async def test_a_slow_reader_that_was_cut_off_comes_back_and_catches_up(store: str) -> None:
    got: list[Any] = []
    settings = attrs.evolve(QUICK, tcp_queue_commands=50, heartbeat=1.0)
    async with TcpServer("shop", port=0, settings=settings) as server:
        async with FaultyLink(url(server)) as link:
            where = link.url
            async with (
                bus(server, store=store, writer="w1", settings=settings) as writer,
                bus(where, store=store, settings=settings) as reader,
            ):
                reader.subscribe(orders)(lambda batch: got.extend(batch.rows))
                await reader.wait_for(orders, "w1", 0)
                ids = await writer.publish(orders, [[0, ""]])
                await reader.wait_for(orders, "w1", ids[-1])
                link.bandwidth(1_000, "from_server")
                sent = 1
                while not server.refused:
                    ids = await writer.publish(orders, [[sent + number, "x" * 1000] for number in range(50)])
                    sent += 50
                    await asyncio.sleep(0)
                link.heal()
                await reader.wait_for(orders, "w1", ids[-1], 15)
                assert [row[0] for row in got] == list(range(sent))


# -- who may come ---------------------------------------------------------------------------------------------------


@sync
async def test_a_secret_opens_and_nothing_else_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with TcpServer("shop", port=0, secret="s3:cr/et ü") as server:
        address = TcpAddress("127.0.0.1", server.port, "s3:cr/et ü")
        async with bus(address) as member, bus(f"tcp://:s3%3Acr%2Fet%20%C3%BC@127.0.0.1:{server.port}"):
            assert member.statistics()["link"]["connected"]
        for wrong in (f"tcp://127.0.0.1:{server.port}", f"tcp://:s3cret@127.0.0.1:{server.port}"):
            with pytest.raises(ConfigError, match="refuses this process: AUTH failed"):
                await bus(wrong).open()
        async with Hand.of(server) as hand:
            hand.type(b"AUTH s3:cr/et \xc3\xbc\r\nREPLICATE\n")
            assert await hand.line() == "SERVER shop"
        assert server.refused == {"wrong secret": 2}
    async with TcpServer("shop", port=0) as server, bus(TcpAddress("127.0.0.1", server.port, "s3cret")):
        pass  # one that wants none takes it for none
    assert "s3" not in caplog.text


@sync
async def test_tls_with_a_server_certificate() -> None:
    async with TcpServer("shop", port=0, tls=server_tls(CERTIFICATE, KEY), secret="secret") as server:
        where = f"tcps://:secret@127.0.0.1:{server.port}"
        async with bus(f"{where}?ca={CERTIFICATE}", writer="w1") as writer, bus(f"{where}?ca={CERTIFICATE}") as reader:
            got: list[Any] = []
            reader.subscribe(typing)(lambda batch: got.extend(batch.rows))
            await until(lambda: reader.statistics()["reader"]["states"].get("typing") == {"w1": "live"})
            await writer.publish(typing, [["x" * 1000]] * 500)
            await until(lambda: len(got) == 500)
        with pytest.raises(ConfigError, match="(?i)certificate"):  # nobody vouches for it
            await bus(where).open()
        with pytest.raises((Unavailable, ConfigError)):  # plain
            await bus(f"tcp://:secret@127.0.0.1:{server.port}", settings=attrs.evolve(QUICK, redis_timeout=0.5)).open()


@sync
async def test_tls_with_client_certificates() -> None:
    context = server_tls(CERTIFICATE, KEY, client_ca=CERTIFICATE)
    async with TcpServer("shop", port=0, tls=context) as server:
        where = f"tcps://127.0.0.1:{server.port}?ca={CERTIFICATE}"
        async with bus(f"{where}&cert={CERTIFICATE}&key={KEY}") as member:
            assert member.statistics()["link"]["connected"]
        with pytest.raises((ConfigError, Unavailable)):
            await bus(where).open()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, False),
        ({"secret": "s"}, False),
        ({"tls": "server"}, False),
        ({"tls": "server", "secret": "s"}, True),
        ({"tls": "client"}, True),
    ],
)
def test_beyond_loopback_it_takes_tls_and_a_secret_or_client_certificates(
    options: dict[str, Any], allowed: bool
) -> None:
    if "tls" in options:
        options = {
            **options,
            "tls": server_tls(CERTIFICATE, KEY, client_ca=None if options["tls"] == "server" else CERTIFICATE),
        }
    for host in ("0.0.0.0", "::", "", "example.org"):
        if allowed:
            assert TcpServer("shop", host=host, **options).host == host
        else:
            with pytest.raises(ConfigError, match="beyond loopback"):
                TcpServer("shop", host=host, **options)
    for host in ("127.0.0.1", "127.3.4.5", "::1", "localhost"):
        TcpServer("shop", host=host)


@sync
async def test_a_server_of_another_name() -> None:
    async with TcpServer("shop", port=0) as server:
        with pytest.raises(ConfigError, match="is 'shop', not 'other'"):
            await bus(url(server), name="other").open()
        await until(lambda: server.statistics()["errors_heard"] == 1)  # the client says why it leaves
        with pytest.raises(ConfigError, match="of 'shop', this bus of 'other'"):
            bus(server, name="other")
        await until(lambda: server.statistics()["clients"] == 0)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"PING 1\n", "no SERVER line"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no server of this protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no server of this protocol"),
    ],
    ids=["PING", "HTTP", "SSH"],
)
@sync
async def test_something_else_that_listens(answer: bytes, says: str) -> None:
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=says):
        await bus(f"tcp://127.0.0.1:{port}").open()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "answer",
    [
        b"%b",
        b"500 unknown: %b",
        b"SERVER %b",
        b"ERROR unknown: %b",
        b"SERVER shop\n%b",
        b"SERVER shop\n\nPING 1\n\n%b",
        b"SERVER shop\n\nERROR AUTH failed: %b",
    ],
)
@sync
async def test_what_quotes_the_secret_is_not_quoted(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def quote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer.replace(b"%b", (await reader.readline()).strip()) + b"\n")
        writer.close()

    caplog.set_level("DEBUG")
    server = await asyncio.start_server(quote, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    told = []
    for address in (f"tcp://:hush@127.0.0.1:{port}", TcpAddress("127.0.0.1", port, "hu\u00dfh")):
        try:
            async with bus(address) as one:
                await until(lambda one=one: one.statistics()["link"]["reconnects"])
                told.append(str(one.statistics()))
        except (ConfigError, Unavailable) as error:
            while error is not None:
                told.append(f"{error} {error!r} {vars(error)}")
                error = error.__cause__ or error.__context__
    server.close()
    await server.wait_closed()
    for text in (*told, caplog.text):
        assert "hush" not in text
        assert "hu\u00dfh" not in text
        assert "hu\\xc3\\x9fh" not in text


@sync
async def test_something_that_listens_and_says_nothing() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"):
        await bus(f"tcp://127.0.0.1:{port}", settings=attrs.evolve(QUICK, redis_timeout=0.1)).open()
    server.close()
    await server.wait_closed()


@sync
async def test_a_host_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match="is no host name"):
        await bus(f"tcp://{'a' * 64}.example:1").open()
    with pytest.raises(ConfigError, match="cannot listen on"):
        await TcpServer("shop", host=f"{'a' * 64}.example", secret="s", tls=server_tls(CERTIFICATE, KEY)).open()


@sync
async def test_nobody_there_and_a_port_in_use() -> None:
    async with TcpServer("shop", port=0) as server:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await TcpServer("shop", port=server.port).open()
        port = server.port
    with pytest.raises(Unavailable, match=f"TCP server at tcp://127.0.0.1:{port}"):
        await bus(f"tcp://127.0.0.1:{port}").open()
    async with bus(f"tcp://127.0.0.1:{port}", require_redis=False) as patient:
        async with TcpServer("shop", port=port):
            await until(lambda: patient.statistics()["link"]["connected"])


@pytest.mark.parametrize(
    "bad",
    [
        "tcp://",
        "tcp://host:port",
        "tcp://user:hidden@host:1",
        "tcp://host:1/path",
        "tcp://host:1?ca=x",
        "tcps://host:1?what=x",
        "tcps://host:1?ca=/does/not/exist",
        "tcps://host:1?key=/does/not/matter",
        "tcp://host:0",
        "tcp://host:99999",
        "tcp://:hidden/x@host:1",  # not escaped
        "tcp://:hidden\N{FULLWIDTH NUMBER SIGN}@host:1",
        "tcp://:hidden%0AREPLICATE@host:1",
    ],
)
def test_addresses_that_are_none(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bus(bad)
    assert "hidden" not in str(caught.value)


def test_an_address_in_parts() -> None:
    assert str(TcpAddress.parse("tcp://[::1]")) == "tcp://[::1]:8823"
    assert "hidden" not in repr(TcpAddress("host", secret="hidden"))
    for options in ({"port": 0}, {"port": 65_536}, {"secret": ""}, {"secret": "a\nb"}, {"secret": "x" * 1_001}):
        with pytest.raises(ConfigError) as caught:
            TcpAddress("host", **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        TcpAddress.parse("http://host:1")


@pytest.mark.parametrize(
    "options",
    [
        {"secret": ""},  # beyond loopback it would let everybody in
        {"secret": " "},
        {"secret": "a\nb"},
        {"secret": "x" * 1_001},  # no client could show it
        {"port": -1},
        {"port": 65_536},
        {"name": "a\nb"},
        {"name": ""},
        {"name": "shop 0123456789abcdef0123456789abcdef"},
    ],
    ids=str,
)
def test_servers_that_could_not_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TcpServer(**{"name": "shop", **options})


@sync
async def test_the_longest_secret() -> None:
    secret = "x" * 1_000
    async with TcpServer("shop", port=0, secret=secret) as server:
        async with bus(TcpAddress("127.0.0.1", server.port, secret)):
            assert server.statistics()["clients"] == 1


def test_a_key_with_a_passphrase_is_refused_and_not_asked_for() -> None:
    locked = str(DATA / "tls-passphrase.key")
    with pytest.raises(ConfigError, match="wants a passphrase"):
        server_tls(CERTIFICATE, locked)
    with pytest.raises(ConfigError, match="wants a passphrase"):
        client_tls(cert=CERTIFICATE, key=locked)


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS"):
        server_tls(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="TLS"):
        client_tls(cert=str(DATA / "tls.key"))
    assert isinstance(client_tls(), ssl.SSLContext)


@sync
async def test_a_bus_needs_the_server_open() -> None:
    with pytest.raises(ConfigError, match="open the TCP server before the bus"):
        await bus(TcpServer("shop", port=0)).open()
