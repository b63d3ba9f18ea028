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
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import busrep
from busrep import Settings, Stream
from busrep.core.fields import NAME_BYTES
from busrep.links import tcp, tcp_connection, tcp_server
from busrep.links.tcp_server import TcpServer
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT
from tests.docs.markdown import blocks_for
from tests.stores.store_conformance import sync

NETCAT = os.environ.get("BUSREP_NETCAT") or shutil.which("nc") or shutil.which("nc.openbsd")
NAME = "localhost:8823"
# Nothing but what is typed and asked for: no beat comes in between.
CALM = Settings(heartbeat=600.0)

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


PAGE = ROOT / "docs" / "guides" / "tcp.md"
DOCS = PAGE.read_text()


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


@pytest.mark.skipif(NETCAT is None, reason="needs nc, of the Debian package netcat-openbsd")
@pytest.mark.parametrize(
    ("types", "says", "counted"),
    [
        ("AUTH hush\nHELLO\n", ["SERVER shop", "PING", "ERROR bad command: is not known: b'HELLO'"], "bad command"),
        ("AUTH hush\nSERVER other\n", ["SERVER shop", "PING", "ERROR wrong name: this server is 'shop'"], "wrong name"),
        ("AUTH hush\nPING " + "1" * 2_000 + "\n", ["SERVER shop", "PING", "ERROR bad line: over 1024"], "bad line"),
        ("AUTH wrong\n", ["ERROR AUTH failed: this server wants its secret first"], "wrong secret"),
        ("REPLICATE\n", ["ERROR AUTH failed: this server wants its secret first"], "wrong secret"),
    ],
    ids=["malformed", "wrong name", "oversized", "wrong secret", "no secret"],
)
@sync
async def test_what_netcat_is_told_that_is_refused(types: str, says: list[str], counted: str) -> None:
    async with TcpServer("shop", port=0, secret="hush", settings=Settings(line_bytes=1_024)) as server:
        async with program(NETCAT or "", "127.0.0.1", str(server.port)) as netcat:
            assert netcat.stdin is not None
            assert netcat.stdout is not None
            netcat.stdin.write(types.encode())
            said = (await netcat.stdout.read()).decode().splitlines()  # up to the end: closed by the server
        assert [line[: len(start)] for line, start in zip(said, says, strict=True)] == says
        assert server.statistics()["refused"] == {counted: 1}
        assert server.statistics()["clients"] == server.statistics()["leaving"] == 0


def test_the_session_of_the_docs_is_this_one() -> None:
    (session,) = re.findall(r"^```text\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    typed = [line for line in SESSION.replace("{event}", EVENT).strip().splitlines() if not line.startswith("!")]
    assert session.splitlines() == typed


def test_the_program_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, block),) = blocks_for(PAGE, "links/test_tcp_session.py")
    names: dict[str, Any] = {}
    exec("async def main():\n" + textwrap.indent(block.code, "    "), names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out == "0\n"


def test_the_numbers_of_the_docs_are_the_defaults() -> None:
    settings = Settings()
    for name, value, named in (
        ("line_bytes", 2**20, "`line_bytes`, 1 MiB"),
        ("tcp_timeout", 15.0, "`tcp_timeout`, 15 s"),
        ("tcp_queue_commands", 10_000, "`tcp_queue_commands`, 10,000 lines"),
        ("tcp_queue_bytes", 16 * 2**20, "`tcp_queue_bytes`, 16 MiB"),
        ("tcp_clients", 1_000, "`tcp_clients`, 1,000"),
    ):
        assert getattr(settings, name) == value
        assert named in DOCS
    assert f"{tcp_connection.HELLO:g} s | `no secret`" in DOCS
    assert f"{tcp_connection.HELLO_BYTES:,} bytes | `bad AUTH`" in DOCS
    assert f"{NAME_BYTES:,} bytes | `bad instance`" in DOCS
    assert f"{tcp_server.STRANGERS} | `too many strangers`" in DOCS
    assert f"1 to {tcp.SECRET_BYTES:,} bytes" in DOCS
    assert f"later up to {tcp.SLOWEST:g} s" in DOCS


def serve(*args: str) -> Any:
    return program(sys.executable, "-m", "busrep.cli", "serve", *args, cwd=ROOT)


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
        (["--tcp", "0", "--name", "shop", "--secret-file", "/dev/null"], "its first line is empty"),
        (["--tcp", "99999", "--name", "shop"], "no address like"),
        (["--tcp", "0", "--name", "shop 0123456789abcdef0123456789abcdef"], "ends like an epoch"),
        (
            ["--tcp", "0", "--name", "shop", "--redis", "tcp://127.0.0.1:1"],
            "the Redis URL 'tcp://127.0.0.1:1' does not work",
        ),
        (["--tcp", "0", "--name", "shop", "--redis", "redis://127.0.0.1:1"], "not available"),
    ],
)
@sync
async def test_serve_says_what_is_wrong(args: list[str], says: str) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "busrep.cli", "serve", *args, stdout=pipe, stderr=pipe, cwd=ROOT
    )
    _, said = await process.communicate()
    assert says in said.decode()
    assert b"Traceback" not in said
    assert process.returncode == 2
