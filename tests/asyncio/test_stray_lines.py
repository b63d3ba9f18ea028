"""Lines on the channel that no writer of the deployment sent lose no row, stop no writer, and poison no table."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis as sync_redis

from busrep.links.tcp_server import TcpServer
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.sync import connect
from tests.shop import QUICK, STREAMS, Order, orders

from .bus_conformance import AsyncioBus, until

pytestmark = pytest.mark.servers

ELSEWHERE = "f" * 32
FAR = (2**62, 2**63 - 1)
TIMES = 100

# What is said; {near} is somewhat above where the stream is, {epoch} is the deployment's own.
LINES: dict[str, Sequence[str]] = {
    "a position without NAME": ("POSITION orders w0 0 {near}", *(f"POSITION orders w0 0 {far}" for far in FAR)),
    "rows without NAME": (
        'RDATA orders w0 {near} [1,"stray"]',
        'POSITION orders w1 0 0\nRDATA orders w1 {near} [1,""]',
    ),
    "another's message": (
        "NAME w1 5\nPOSITION orders w0 0 {near}",
        "SERVER {name} {epoch}\nPOSITION orders w0 0 {near}",
    ),
    "a writer that does not exist": (
        *(f"POSITION orders nobody {far} {far}" for far in FAR),
        *(f"SERVER {{name}} {{epoch}}\nNAME nobody 7\nPOSITION orders nobody 0 {far}" for far in FAR),
        'NAME nobody 7\nPOSITION orders nobody 4 4\nRDATA orders nobody 5 [1,"stray"]',
    ),
    "another incarnation": (
        "NAME w0 4611686018427387903",
        "NAME w1 1",
        "SERVER {name} {epoch}\nNAME w0 4611686018427387903\nPOSITION orders w0 0 {near}",
        "SERVER {name} {epoch}\nNAME w1 1\nPOSITION orders w1 0 4611686018427387904",
        "NAME ghost 5",
    ),
    "another deployment": (
        f"SERVER {{name}} {ELSEWHERE}\nNAME w0 4611686018427387903\nPOSITION orders w0 {FAR[0]} {FAR[0]}",
        f"SERVER {{name}} {ELSEWHERE}\nNAME w1 6\nPOSITION orders w1 0 {{near}}",
        'NAME w1 6\nPOSITION orders w1 {near} {near}\nRDATA orders w1 {near} [1,"stray"]',
    ),
}


class Hub:
    """A TCP server on a loop of its own."""

    def __init__(self, name: str) -> None:
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(name)), daemon=True)
        self._thread.start()
        assert self._up.wait(20)

    async def _live(self, name: str) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with TcpServer(name, port=0, settings=QUICK) as server:
            self.port = server.port
            self._up.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@contextlib.contextmanager
def channel(kind: str, redis_url: str, name: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """(where buses connect to, how a stranger says something)."""
    if kind == "redis":
        with contextlib.closing(sync_redis.Redis.from_url(redis_url)) as client:
            yield redis_url, lambda text: client.publish(name, text)
        return
    with contextlib.closing(Hub(name)) as hub:

        def say(text: str) -> None:
            with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
                stranger.sendall(f"{text}\n\n".encode())
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(10)
                while stranger.recv(65_536):
                    pass

        yield f"tcp://127.0.0.1:{hub.port}", say


class Handled:
    """The facts that one reader handled, {writer: [token, ...]}."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {"w0": [], "w1": []}

    def __call__(self, batch: Any) -> None:
        self.tokens.setdefault(batch.writer, []).extend(batch.tokens)


def table_of(store: str) -> tuple[str, int, dict[str, int]]:
    """(epoch, sequence, {who: position that is stored})."""

    async def look() -> tuple[str, int, dict[str, int]]:
        found = open_store(store, Registry(STREAMS))
        await found.init()
        await found.open()
        try:
            stored = {one.writer: one.position for one in await found.known() if one.stream == "orders"}
            for reader in ("r0", "r1"):
                saved = await found.load_reader(reader)
                stored |= {f"{reader} {key[1]}": at for key, at in saved.positions.items() if key[0] == "orders"}
            highest = await found.sequence("orders")
            assert highest is not None
            return await found.epoch(), highest, stored
        finally:
            await found.close()

    return asyncio.run(look())


@pytest.mark.parametrize("said", list(LINES))
@pytest.mark.parametrize("threads", [False, True], ids=["asyncio", "threads"])
@pytest.mark.parametrize("link", ["redis", "tcp"])
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_what_a_stranger_says_harms_nobody(
    request: pytest.FixtureRequest, redis_url: str, bus_name: str, database: str, link: str, threads: bool, said: str
) -> None:
    store = request.getfixturevalue(f"{database}_url")

    epoch, _, _ = table_of(store)
    with contextlib.ExitStack() as stack:
        where, say = stack.enter_context(channel(link, redis_url, bus_name))
        options = {"name": bus_name, "store": store, "streams": STREAMS, "settings": QUICK, "start": "earliest"}
        # A writer in threads needs a Redis.
        writing: Any = connect if threads and link == "redis" else AsyncioBus
        reading: Any = connect if threads else AsyncioBus
        writers = [stack.enter_context(writing(where, writer=f"w{number}", **options)) for number in range(2)]
        handled = [Handled(), Handled()]
        readers = [stack.enter_context(reading(where, reader=f"r{number}", **options)) for number in range(2)]
        for reader, handler in zip(readers, handled, strict=True):
            reader.subscribe(orders)(handler)
        written: dict[str, list[int]] = {"w0": [], "w1": []}

        def write(number: int) -> None:
            with writers[number].write(orders) as fact:
                fact.add(Order(1, "ours"))
            written[f"w{number}"].append(fact.id)

        def hear_all() -> None:
            for reader, handler in zip(readers, handled, strict=True):
                for writer, tokens in written.items():
                    reader.wait_for(orders, writer, tokens[-1], timeout=20)
                    assert tokens == handler.tokens[writer]  # wait_for is right, nothing is lost, nothing comes twice

        for number in range(10):
            write(number % 2)
        hear_all()
        texts = LINES[said]
        for time_ in range(TIMES):
            near = max(written["w0"] + written["w1"]) + 1 + time_ % 20
            say(texts[time_ % len(texts)].format(near=near, epoch=epoch, name=bus_name))
            if time_ % 10 == 0:
                write(time_ // 10 % 2)
            if time_ == TIMES // 2:
                hear_all()
        hear_all()
        time.sleep(4 * QUICK.heartbeat)  # not for an event: what an idle writer would follow, it has followed by then
        assert max(table_of(store)[2].values()) <= table_of(store)[1]
        for number in (0, 1, 0, 1):
            write(number)
        hear_all()
        for writer in writers:
            found = writer.statistics()["writer"]
            assert not found["fenced"]
        for reader in readers:
            found = reader.statistics()["reader"]
            assert not found["stopped"]
            assert found["failure"] is None
        until(lambda: all(set(one.tokens) == {"w0", "w1"} for one in handled))
    stored = table_of(store)
    assert max(stored[2].values()) <= stored[1]
    assert [stored[2][f"r{number} {writer}"] for number in range(2) for writer in written] >= [
        written[writer][-1] for _ in range(2) for writer in written
    ]
