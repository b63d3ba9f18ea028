"""FaultyLink against a small server of its own: what arrives, what does not, and in which order."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from busrep.errors import ConfigError
from busrep.testing.links import FaultyLink
from busrep.testing.pipes import MOST_HELD


def run(work: Coroutine[Any, Any, None], timeout: float = 100.0) -> None:
    asyncio.run(asyncio.wait_for(work, timeout))


class Peer:
    """A server of one kind: it keeps what it got, and answers each line with ``answer(line)``."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda line: line) -> None:
        self.answer = answer
        self.got = bytearray()
        self.ended: list[str] = []
        self.changed = asyncio.Condition()
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while data := await reader.read(65_536):
                self.got += data
                for line in data.splitlines(keepends=True):
                    writer.write(self.answer(line))
                await self.note()
            self.ended.append("end")
        except OSError as error:
            self.ended.append(type(error).__name__)
        finally:
            writer.close()
            await self.note()

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(true)


@asynccontextmanager
async def linked(
    answer: Callable[[bytes], bytes] = lambda line: line, **options: Any
) -> AsyncIterator[tuple[FaultyLink, Peer]]:
    peer = Peer(answer)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with FaultyLink(f"redis://127.0.0.1:{port}", **options) as link:
            yield link, peer
            server.close()
        for writer in peer.writers:
            writer.transport.abort()
            await peer.until(lambda: len(peer.ended) == len(peer.writers))
    finally:
        server.close()


async def dial(link: FaultyLink) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.url.rpartition("/")[2].rpartition("@")[2].rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ends(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """What came until the connection ended, and how it ended."""
    got = b""
    try:
        while data := await reader.read(65_536):
            got += data
    except OSError as error:
        return got, type(error).__name__
    return got, "end"


def test_bytes_pass_both_ways_and_an_orderly_end_too() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"one\ntwo\n")
            assert await reader.readexactly(8) == b"one\ntwo\n"
            writer.write_eof()
            assert await ends(reader) == (b"", "end")
            writer.close()
            assert peer.ended == ["end"]
            assert (link.connections, link.counts["bytes_to_server"], link.counts["bytes_from_server"]) == (1, 8, 8)

    run(main())


def test_a_half_closed_connection_still_answers() -> None:
    async def main() -> None:
        async with linked(lambda line: line * 50_000) as (link, _):
            reader, writer = await dial(link)
            writer.write(b"question\n")
            writer.write_eof()
            got, how = await ends(reader)
            assert (len(got), how) == (450_000, "end")
            writer.close()

    run(main())


def test_cut_resets_both_sides() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"x\n")
            await reader.readexactly(2)
            link.cut()
            assert await ends(reader) == (b"", "ConnectionResetError")
            await peer.until(lambda: peer.ended == ["ConnectionResetError"])
            writer.close()
            again, writer = await dial(link)
            writer.write(b"y\n")
            assert await again.readexactly(2) == b"y\n"
            writer.close()
            assert (link.connections, link.counts["cut"]) == (2, 1)

    run(main())


def test_a_reset_of_one_side_is_passed_on() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"x\n")
            await reader.readexactly(2)
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
            await peer.until(lambda: peer.ended == ["ConnectionResetError"])
            assert peer.got == b"x\n"

    run(main())


@pytest.mark.parametrize("direction", ["to_server", "from_server", None])
def test_a_hole_keeps_what_is_sent_into_it(direction: Any) -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            link.black_hole(direction)
            writer.write(b"x\n")
            if direction == "from_server":
                await peer.until(lambda: peer.got == b"x\n")
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.05)
                assert peer.got == b""
            assert link.counts["bytes_from_server"] == 0
            link.heal()
            assert await reader.readexactly(2) == b"x\n"
            writer.close()

    run(main())


def test_the_end_of_a_client_does_not_cross_a_hole() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"x\n")
            await reader.readexactly(2)
            link.black_hole()
            writer.write(b"y\n")
            writer.close()
            await writer.wait_closed()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(peer.until(lambda: bool(peer.ended)), 0.05)
            link.heal()
            await peer.until(lambda: bool(peer.ended))
            assert peer.got == b"x\ny\n"

    run(main())


def test_a_hole_holds_a_bounded_number_of_bytes() -> None:
    async def main() -> None:
        async with linked(lambda line: b"") as (link, peer):
            _, writer = await dial(link)
            link.black_hole()
            data = (b"z" * 9_999 + b"\n") * 1600
            writer.write(data)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.2)
            (connection,) = link.open_connections
            assert MOST_HELD < connection.pipes[0].size < 2 * MOST_HELD
            link.heal()
            await peer.until(lambda: len(peer.got) == len(data))
            assert peer.got == data
            writer.close()

    run(main())


def test_refused_connections_are_reset_until_it_heals() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            link.refuse = True
            for _ in range(2):
                reader, writer = await dial(link)
                assert await ends(reader) == (b"", "ConnectionResetError")
                writer.close()
            link.heal()
            reader, writer = await dial(link)
            writer.write(b"x\n")
            assert await reader.readexactly(2) == b"x\n"
            writer.close()
            assert (link.connections, link.counts["refused"], len(peer.writers)) == (1, 2, 1)

    run(main())


def test_a_server_that_is_not_there() -> None:
    async def main() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # not listening
            async with FaultyLink(f"redis://127.0.0.1:{closed.getsockname()[1]}") as link:
                reader, writer = await dial(link)
                assert await ends(reader) == (b"", "ConnectionResetError")
                writer.close()
                assert link.counts["unreachable"] == 1

    run(main())


def test_delay_holds_back_in_one_direction_and_keeps_the_order() -> None:
    async def main() -> None:
        async with linked(seed=3) as (link, peer):
            reader, writer = await dial(link)
            link.delay((0.0, 0.05), "from_server")
            clock = asyncio.get_running_loop().time
            sent = b""
            for number in range(50):
                line = b"%d\n" % number
                writer.write(line)
                sent += line
                await peer.until(lambda: peer.got == sent)  # each a piece of its own  # noqa: B023
            assert await reader.readexactly(len(sent)) == sent
            link.delay(0.1)
            started = clock()
            writer.write(b"x\n")
            assert await reader.readexactly(2) == b"x\n"
            assert clock() - started >= 0.19
            writer.close()

    run(main())


def test_bandwidth_stretches_a_large_answer() -> None:
    async def main() -> None:
        async with linked(lambda line: b"a" * 10_000) as (link, _):
            reader, writer = await dial(link)
            link.bandwidth(50_000, "from_server")
            started = asyncio.get_running_loop().time()
            writer.write(b"x\n")
            assert await reader.readexactly(10_000) == b"a" * 10_000
            assert asyncio.get_running_loop().time() - started >= 0.14  # the first portion is free
            writer.close()

    run(main())


@pytest.mark.parametrize("closed", ["server", "client"])
def test_abandon_leaves_one_side_open_and_deaf(closed: Any) -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"x\n")
            await reader.readexactly(2)
            link.abandon(closed)
            if closed == "server":
                await peer.until(lambda: peer.ended == ["ConnectionResetError"])
                writer.write(b"y\n" * 1000)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.05)
            else:
                assert await ends(reader) == (b"", "ConnectionResetError")
                peer.writers[0].write(b"anybody?\n")
                await asyncio.sleep(0.05)
                assert peer.ended == []
            assert peer.got == b"x\n"
            writer.close()

    run(main())


def test_cut_after_counts_bytes() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            happened = link.cut_after(5)
            reader, writer = await dial(link)
            writer.write(b"abc\ndef\n")
            got, _ = await ends(reader)
            assert got == b"abc\nd"
            await asyncio.wrap_future(happened)
            await peer.until(lambda: bool(peer.ended))
            writer.close()
            assert link.counts["cut_after"] == 1

    run(main())


@pytest.mark.parametrize(
    ("after", "pieces", "arrives"),
    [
        (True, [b"BEGIN;\n", b"COMMIT;\n"], b"BEGIN;\nCOMMIT;\n"),
        (False, [b"BEGIN;\n", b"COMMIT;\n"], b"BEGIN;\n"),
        (True, [b"BEGIN;\nCOM", b"MIT;\n"], b"BEGIN;\nCOMMIT;\n"),
        (False, [b"BEGIN;\nCOM", b"MIT;\n"], b"BEGIN;\nCOM"),
    ],
)
def test_cut_when_a_pattern_passes(after: bool, pieces: list[bytes], arrives: bytes) -> None:
    async def main() -> None:
        async with linked(lambda line: b"answer to " + line if b"MIT" in line else b"") as (link, peer):
            happened = link.cut_when(b"COMMIT", after=after)
            reader, writer = await dial(link)
            for piece in pieces:
                writer.write(piece)
                if piece is pieces[0]:  # the next one shall be a piece of its own
                    await peer.until(lambda: peer.got == pieces[0])
            assert await ends(reader) == (b"", "ConnectionResetError")
            await asyncio.wrap_future(happened)
            await peer.until(lambda: bool(peer.ended))
            assert peer.got == arrives
            writer.close()
            _, writer = await dial(link)
            writer.write(b"COMMIT\n")
            await peer.until(lambda: peer.got == arrives + b"COMMIT\n")  # only once
            writer.close()

    run(main())


def test_the_answer_can_be_cut_off() -> None:
    async def main() -> None:
        async with linked(lambda line: b"done " + line) as (link, peer):
            happened = link.cut_when(b"COMMIT", "from_server", after=False)
            reader, writer = await dial(link)
            writer.write(b"COMMIT\n")
            got, _ = await ends(reader)
            await asyncio.wrap_future(happened)
            assert (got, peer.got) == (b"done ", b"COMMIT\n")
            writer.close()

    run(main())


def test_heal_disarms() -> None:
    async def main() -> None:
        async with linked() as (link, _):
            armed = [link.cut_when(b"x"), link.cut_after(1)]
            link.heal()
            assert [one.cancelled() for one in armed] == [True, True]
            reader, writer = await dial(link)
            writer.write(b"x\n")
            assert await reader.readexactly(2) == b"x\n"
            writer.close()

    run(main())


def test_heal_does_not_wait_for_the_delays_before() -> None:
    async def main() -> None:
        async with linked() as (link, peer):
            reader, writer = await dial(link)
            writer.write(b"1\n")
            await reader.readexactly(2)
            link.delay(3600)
            writer.write(b"2\n")
            await asyncio.sleep(0.05)
            assert peer.got == b"1\n"
            link.heal()
            writer.write(b"3\n")
            assert await reader.readexactly(4) == b"2\n3\n"
            writer.close()

    run(main())


def test_in_a_thread_for_blocking_code() -> None:
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://user:word@127.0.0.1:{server.getsockname()[1]}/base?a=b"
        with FaultyLink.in_thread(url) as link:
            assert link.url.startswith("postgresql://user:word@127.0.0.1:")
            assert link.url.endswith("/base?a=b")
            port = int(link.url.rpartition(":")[2].partition("/")[0])
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                there, _ = server.accept()
                with there:
                    there.settimeout(5)
                    client.sendall(b"one")
                    assert there.recv(10) == b"one"
                    happened = link.cut_when(b"two")
                    client.sendall(b"two")
                    happened.result(5)
                    assert there.recv(10) == b"two"
                    assert there.recv(10) == b""
                    with pytest.raises(ConnectionResetError):
                        client.recv(1)
            assert (link.connections, link.counts["cut_when"]) == (1, 1)
    assert threading.enumerate() == before


def test_in_a_thread_an_error_of_the_start_is_raised() -> None:
    with pytest.raises(ConfigError, match="needs a URL with a host"), FaultyLink.in_thread("unix:///path"):
        pass


@pytest.mark.parametrize("url", ["unix:///run/redis", "localhost:6379", "ftp://127.0.0.1:1"])
def test_urls_without_host_or_known_scheme(url: str) -> None:
    with pytest.raises(ConfigError, match="FaultyLink needs a URL"):
        FaultyLink(url)


@pytest.mark.parametrize(
    "call",
    [
        lambda link: link.delay(-1),
        lambda link: link.delay((2, 1)),
        lambda link: link.bandwidth(0),
        lambda link: link.cut_after(0),
        lambda link: link.cut_when(b""),
        lambda link: link.cut_when(b"x", "server"),
        lambda link: link.black_hole("server"),
    ],
)
def test_bad_arguments(call: Callable[[FaultyLink], Any]) -> None:
    with pytest.raises(ValueError, match=r"delay|bandwidth|cut|direction"):
        call(FaultyLink("redis://127.0.0.1"))
