"""What a ``FaultyLink`` is made of: two pipes a connection, which hold back, delay, cut and throw away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from busrep.testing.links import FaultyLink

Direction = Literal["to_server", "from_server"]
Side = Literal["client", "server"]

Ending = Literal["end", "reset"]
"""Stands in a pipe's queue behind the last bytes."""

DIRECTIONS: tuple[Direction, Direction] = ("to_server", "from_server")
# What a pipe holds before it stops reading, bytes: the kernel's buffers then fill up, as before a real hole.
MOST_HELD = 1 << 20
# Of what has passed, bytes in which a pattern may have begun.
MOST_REMEMBERED = 1 << 10
# Read at a time.
PIECE = 1 << 16
# With a limited bandwidth, bytes go out in portions of this many seconds' worth.
PORTION = 0.05


@attrs.define(eq=False)
class Trigger:
    """Cuts a connection when ``pattern`` passed, or after ``left`` bytes."""

    kind: str
    pattern: bytes = b""
    after: bool = True
    left: int = 0
    happened: concurrent.futures.Future[None] = attrs.field(factory=concurrent.futures.Future)

    def passes(self, before: bytes, data: bytes) -> int | None:
        """How many bytes of ``data``, which come ``before`` others, still pass; None: all, and nothing is cut."""
        if not self.pattern:
            if len(data) < self.left:
                self.left -= len(data)
                return None
            return self.left
        begun = before[-len(self.pattern) :][1:]  # a part of the pattern may have passed
        at = (begun + data).find(self.pattern)
        if at < 0:
            return None
        # After: the whole piece, for a message goes on behind the pattern (the zero behind PostgreSQL's COMMIT).
        return len(data) if self.after else max(0, at - len(begun))


@attrs.frozen(eq=False)
class Faults:
    """What is wrong with one direction of a link just now."""

    hole: bool = False
    delay: tuple[float, float] = (0.0, 0.0)
    bandwidth: float | None = None
    triggers: list[Trigger] = attrs.field(factory=list)


@attrs.define(eq=False)
class Pipe:
    """One direction of one connection, from ``source`` to ``target``.

    It holds what it may not pass on yet, in order, with the time from which it may, and stops reading when it holds
    much. A hole thus behaves as a network whose lost packets are sent again: what was sent into it arrives once it
    heals.
    """

    connection: PipedConnection
    direction: Direction
    source: asyncio.StreamReader
    target: asyncio.StreamWriter
    held: deque[tuple[float, bytes | Ending]] = attrs.field(factory=deque)
    size: int = 0
    discards: bool = False
    _passed: bytes = b""
    _last_due: float = 0.0
    _free_at: float = 0.0
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def faults(self) -> Faults:
        """What is wrong with it just now."""
        return self.connection.link.faults[self.direction]

    async def receive(self) -> None:
        """Hold what the source says, and how it ends; returns behind its end."""
        ending: Ending = "end"
        try:
            while data := await self.source.read(PIECE):
                self.take(data)
                while self.size > MOST_HELD:
                    await self._wait(None)
        except OSError:
            ending = "reset"
        self.take(ending)

    def take(self, what: bytes | Ending) -> None:
        """What came from the source: bytes, or how it ended."""
        if self.discards:
            return
        # Never before what came earlier: a delay that varies must not change the order.
        due = asyncio.get_running_loop().time() + self.connection.link.random.uniform(*self.faults.delay)
        self._last_due = max(self._last_due, due)
        self.held.append((self._last_due, what))
        self.size += len(what) if isinstance(what, bytes) else 0
        self._changed.set()

    async def pass_on(self) -> None:
        """Pass on what may pass, until the source has ended, or the connection is cut behind what a trigger names."""
        try:
            while isinstance(what := await self._next(), bytes):
                self._write(what)
                await self.target.drain()
            if what == "reset":
                reset(self.target)
            elif what == "end" and self.target.can_write_eof():
                self.target.write_eof()
            elif what == "end":  # TLS: there is no half-closed connection
                self.target.close()
        except OSError:  # the target is gone
            self.discard()

    def _write(self, data: bytes) -> None:
        """Write what bandwidth and triggers leave of it."""
        if bandwidth := self.faults.bandwidth:
            portion = max(1, int(bandwidth * PORTION))
            if len(data) > portion:
                self.held.appendleft((0.0, data[portion:]))
                self.size += len(data) - portion
                data = data[:portion]
            self._free_at = asyncio.get_running_loop().time() + len(data) / bandwidth
        for trigger in self.faults.triggers:
            passing = trigger.passes(self._passed, data)
            if passing is not None:
                self.target.write(data[:passing])
                self.connection.link.fire(self.direction, trigger)
                self.connection.end("client" if self.direction == "to_server" else "server")
                self.target.close()  # in order: what was passed on so far arrives
                return
        self.target.write(data)
        self._passed = (self._passed + data)[-MOST_REMEMBERED:]
        self.connection.link.counts[f"bytes_{self.direction}"] += len(data)

    async def _next(self) -> bytes | Ending | None:
        """What may pass now; None when all is thrown away."""
        while not self.discards:
            wait = None
            if self.held and not self.faults.hole:
                due, what = self.held[0]
                wait = max(due, self._free_at) - asyncio.get_running_loop().time()
                if wait <= 0:
                    self.held.popleft()
                    self.size -= len(what) if isinstance(what, bytes) else 0
                    self._changed.set()
                    return what
            await self._wait(wait)
        return None

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def hurry(self) -> None:
        """Pass on all that is held, without the delays it had."""
        self.held = deque((0.0, what) for _, what in self.held)
        self._last_due = self._free_at = 0.0
        self._changed.set()

    def discard(self) -> None:
        """Throw away what is held and whatever comes."""
        self.discards = True
        self.held.clear()
        self.size = 0
        self._changed.set()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once, with RST instead of FIN."""
    # AttributeError: asyncio's TLS transport forgets its connection when it is closed for the second time.
    with contextlib.suppress(OSError, AttributeError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class PipedConnection:
    """A client's connection and the one made for it to the server."""

    def __init__(self, link: FaultyLink, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.link, self._reader = link, reader
        self._sides: dict[Side, asyncio.StreamWriter] = {"client": client}
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - it serves the client
        self.task = task
        self.pipes: tuple[Pipe, ...] = ()

    async def run(self, host: str, port: int) -> None:
        """Connect to the server, and pass on what both say until both have ended."""
        client = self._sides["client"]
        try:
            reader, server = await asyncio.open_connection(host, port)
        except OSError:
            self.link.counts["unreachable"] += 1
            reset(client)
            return
        self._sides["server"] = server
        there = self.link.pipe(self, "to_server", self._reader, server)
        back = self.link.pipe(self, "from_server", reader, client)
        self.pipes = (there, back)
        try:
            await asyncio.gather(there.receive(), there.pass_on(), back.receive(), back.pass_on())
        finally:
            client.close()
            server.close()

    def end(self, *sides: Side) -> None:
        """Throw away all that is on its way or comes, and reset these sides; the other one stays open."""
        for pipe in self.pipes:
            pipe.discard()
        for side in sides:
            if side in self._sides:
                reset(self._sides[side])
        if "client" in sides and "server" not in self._sides:  # it is not connected yet
            self.task.cancel()
