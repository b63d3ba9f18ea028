"""The session of the protocol's description, typed with a real netcat, line by line; and `busrep serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import busrep
from busrep import Settings, Stream
from busrep.asyncio.tcp_server import TcpServer
from busrep.stores import open_store
from busrep.streams import Registry
from tests.store_conformance import sync

NETCAT = os.environ.get("BUSREP_NETCAT") or shutil.which("nc") or shutil.which("nc.openbsd")
NAME = "localhost:8823"
# Nothing but what is typed and asked for: no beat comes in between.
CALM = Settings(heartbeat=30.0)

events: Stream[list[Any]] = Stream("events")
backfill: Stream[list[Any]] = Stream("backfill", negative=True)
caches: Stream[list[Any]] = Stream("caches")

# protocol.md, section 7. PING says the time, which is another one each time.
EVENT = '["$149019767112vOHxz:localhost:8823","!AFDCvgApUmpdfVjIXm:localhost:8823","m.room.guest_access","",null]'
SESSION = """
> SERVER localhost:8823
> PING 1490197665618
< NAME worker-1
< PING 1490197665618
< REPLICATE
> POSITION events master 1 1
> POSITION backfill master 1 1
> POSITION caches master 1 1
! caches ["get_user_by_id",["@01register-user:localhost:8823"],1490197670513]
> RDATA caches master 2 ["get_user_by_id",["@01register-user:localhost:8823"],1490197670513]
! events {event}
> RDATA events master 14 {event}
< PING 1490197675618
! stop
> ERROR server stopping
"""


@contextlib.asynccontextmanager
async def program(*args: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*args, stdin=pipe, stdout=pipe, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.skipif(NETCAT is None, reason="needs nc, of the Debian package netcat-openbsd")
@sync
async def test_the_session_by_netcat(sqlite_url: str) -> None:
    streams = [events, backfill, caches]
    store = open_store(sqlite_url, Registry(streams))
    await store.init()
    await store.open()
    async with TcpServer(NAME, port=0) as server:
        options: dict[str, Any] = {"name": NAME, "streams": streams, "store": sqlite_url, "settings": CALM}
        async with busrep.connect(server, writer="master", **options) as master:
            for stream in streams:
                await master.publish(stream, [["the first"]])
            await store.reserve("events", 12)  # others have had 2 to 13
            async with program(NETCAT or "", "127.0.0.1", str(server.port)) as netcat:
                assert netcat.stdin is not None
                assert netcat.stdout is not None
                for step in SESSION.strip().replace("{event}", EVENT).splitlines():
                    mark, _, text = step.partition(" ")
                    if mark == "<":
                        netcat.stdin.write(text.encode() + b"\n")
                    elif mark == ">":
                        line = (await netcat.stdout.readline()).decode().removesuffix("\n")
                        assert re.sub(r"(?<=PING )\d{13}$", "1490197665618", line) == text
                    elif text == "stop":
                        await server.close()
                    else:
                        name, _, row = text.partition(" ")
                        await master.publish(next(one for one in streams if one.name == name), [json.loads(row)])
                assert await netcat.stdout.read() == b""  # closed by the server
    await store.close()


def serve(*args: str) -> Any:
    return program(sys.executable, "-m", "busrep.cli", "serve", *args, cwd=Path(__file__).parent.parent)


async def listening(process: asyncio.subprocess.Process) -> dict[str, str]:
    assert process.stdout is not None
    found: dict[str, str] = json.loads(await process.stdout.readline())["listening"]
    return found


@pytest.mark.servers
@sync
async def test_serve_relays_a_redis_until_it_is_told_to_stop(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    await open_store(sqlite_url, Registry([events])).init()
    options: dict[str, Any] = {"name": bus_name, "streams": [events], "store": sqlite_url}
    async with serve("--tcp", "0", "--name", bus_name, "--redis", redis_url, "--json") as server:
        where = (await listening(server))["tcp"]
        async with (
            busrep.connect(redis_url, writer="w1", **options) as writer,
            busrep.connect(where, **options) as reader,
        ):
            got: list[Any] = []
            reader.subscribe(events)(lambda batch: got.extend(batch.rows))
            ids = await writer.publish(events, [[1], [2]])
            await reader.wait_for(events, "w1", ids[-1])
            assert got == [[1], [2]]
            server.send_signal(signal.SIGTERM)
            assert server.stdout is not None
            said = json.loads(await server.stdout.readline())
            assert said["tcp"]["accepted"] == 1
            assert said["tcp"]["messages"] > 0
            assert await server.wait() == 0
            while "server stopping" not in str(reader.statistics()["link"]["last_error"]):
                if "refused" in str(reader.statistics()["link"]["last_error"]).lower():
                    break  # it has tried again already
                await asyncio.sleep(0.01)


@pytest.mark.servers
@sync
async def test_serve_finishes_writers_for_those_who_read_over_http(sqlite_url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    store = open_store(sqlite_url, Registry([events]))
    await store.init()
    await store.open()
    options = ["--tcp", "0", "--name", "shop", "--http", "0", "--store", sqlite_url, "--secret-file", str(secret)]
    async with serve(*options, "--heartbeat", "200ms", "--json") as server:
        where = await listening(server)
        tcp, http = where["tcp"].replace("//", "//:hush@"), where["http"].replace("//", "//:hush@")
        got: list[Any] = []
        quick = Settings(heartbeat=0.2)
        async with busrep.connect(tcp, name="shop", streams=[events], store=http, settings=quick) as reader:
            reader.subscribe(events)(lambda batch: got.extend(batch.rows))
            await reader.wait_for(events, "nobody", 0)
            # A writer that committed, and died before it said a word.
            claim = await store.claim("w1", ["events"], timeout=5)
            (token,) = await store.reserve("events", 1)
            transaction = store.transaction(claim)
            await transaction.begin()
            await transaction.insert("events", [(token, [["last"]], [b'["last"]'])])
            await transaction.commit()
            await reader.wait_for(events, "w1", token, 20)
        assert got == [["last"]]
    await store.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "say what to serve"),
        (["--tcp", "0"], "--tcp needs --name"),
        (["--http", "0"], "--http needs --store"),
        (["--http", "0", "--store", "sqlite:///x.db"], "--http needs --secret-file"),
        (["--tcp", "host", "--name", "shop"], "no address like"),
        (["--tcp", "::1:88", "--name", "shop"], "no address like"),
        (["--tcp", "0.0.0.0:0", "--name", "shop"], "beyond loopback it takes TLS"),
        (["--tcp", "0", "--name", "shop", "--tls-key", "x"], "need --tls-cert"),
        (["--tcp", "0", "--name", "shop", "--tls-cert", "/none"], "TLS:"),
        (["--tcp", "0", "--name", "shop", "--secret-file", "/none"], "--secret-file /none"),
        (["--tcp", "0", "--name", "shop", "--redis", "redis://127.0.0.1:1"], "not available"),
    ],
)
@sync
async def test_serve_says_what_is_wrong(args: list[str], says: str) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "busrep.cli", "serve", *args, stdout=pipe, stderr=pipe, cwd=Path(__file__).parent.parent
    )
    _, said = await process.communicate()
    assert says in said.decode()
    assert b"Traceback" not in said
    assert process.returncode == 2
