"""A TCP server with many clients, some of which do not read: what the others notice.

    python benchmarks/tcp_clients.py [--clients 500] [--stalled 50] [--rate 100] [--seconds 40]

Two processes: the server, with a writer in it, and all clients. Each row carries the monotonic time at which it was
published; a client takes the time at which its line was read. Phases of one run: all clients read; then as many
clients more do not read at all; then all read again, for the noise. Prints the delays, the largest queue, and the
server's memory. What a stalled client does not read stands first in the system's buffers (some 2.5 MB each on
loopback), then in the server's queue, until that is full and the client is cut off: a phase should be long enough for
all three, --rate times --bytes times --seconds a multiple of those 2.5 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import ClassVar

import busrep
from busrep.links.tcp_server import TcpServer

rows: busrep.Stream[list[object]] = busrep.Stream("rows", resettable=True)


def resident_mb() -> float:
    """This process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Client(asyncio.Protocol):
    """Reads lines and notes how old each row is; a stalled one reads nothing."""

    delays: ClassVar[list[float]] = []

    def __init__(self, stalled: bool) -> None:
        self.stalled = stalled
        self.rest = b""
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"NAME client 1\nREPLICATE\n")
        if self.stalled:
            transport.pause_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"RDATA "):
                sent = float(line.split(b" ", 4)[4].split(b",", 1)[0][1:])
                Client.delays.append(now - sent)


def summary(delays: list[float]) -> dict[str, float]:
    """Percentiles, ms."""
    found = sorted(delays)
    at = {f"p{p}": round(1000 * found[min(len(found) - 1, len(found) * p // 100)], 2) for p in (50, 99)}
    return {"lines": len(found), **at, "max": round(1000 * found[-1], 2)} if found else {"lines": 0}


async def clients(port: int, count: int, stalled: int, seconds: float) -> None:
    """The client process: three phases."""
    loop = asyncio.get_running_loop()

    async def more(number: int, *, stall: bool) -> list[Client]:
        made = []
        for _ in range(number):
            sock = socket.socket()
            if stall:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            _, protocol = await loop.create_connection(lambda: Client(stall), sock=sock)
            made.append(protocol)
        return made

    async def phase(name: str) -> None:
        await asyncio.sleep(1.0)
        Client.delays = []
        await asyncio.sleep(seconds)
        print(json.dumps({"phase": name, **summary(Client.delays)}), flush=True)

    readers = await more(count - stalled, stall=False)
    await phase("all read")
    idle = await more(stalled, stall=True)
    await phase(f"{stalled} more do not")
    for one in idle:
        one.transport.abort()
    await phase("all read again")
    print(json.dumps({"readers_cut_off": sum(one.lost for one in readers)}), flush=True)


async def serve(options: argparse.Namespace) -> None:
    """The server process: it writes, and starts the clients."""
    settings = busrep.Settings(tcp_clients=options.clients + 100)
    async with (
        TcpServer("bench", port=0, settings=settings) as server,
        busrep.connect(server, name="bench", streams=[rows], writer="w1") as bus,
    ):
        command = [sys.executable, __file__, "--port", str(server.port)]
        for name in ("clients", "stalled", "seconds"):
            command += [f"--{name}", str(getattr(options, name))]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None

        async def report() -> None:
            assert child.stdout is not None
            async for line in child.stdout:
                found = {**json.loads(line), "server_mb": round(resident_mb(), 1)}
                numbers = server.statistics()
                found |= {name: numbers[name] for name in ("clients", "queue_bytes_peak", "refused")}
                print(json.dumps(found), flush=True)

        reporting = asyncio.create_task(report())
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not reporting.done():
            due += 1 / options.rate
            async with bus.write(rows) as fact:
                fact.add([time.monotonic(), "x" * options.bytes])
            await asyncio.sleep(max(0.0, due - loop.time()))
        await child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--stalled", type=int, default=50)
    parser.add_argument("--rate", type=float, default=100.0, help="facts a second")
    parser.add_argument("--bytes", type=int, default=2_000, help="of a row")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, options.clients * 2 + 200)), hard))
    if options.port:
        asyncio.run(clients(options.port, options.clients, options.stalled, options.seconds))
    else:
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
