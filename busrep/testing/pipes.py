"""What a ``FaultyLink`` is made of: two pipes a connection, which hold back, delay, cut and throw away.

A pipe holds what it may not pass on yet, in order, with the time from which it may, and stops reading when it holds
much. A hole thus behaves as a network whose lost packets are sent again: what was sent into it arrives once it
heals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import attrs

Direction = Literal["to_server", "from_server"]
Side = Literal["client", "server"]

Ending = Literal["end", "reset"]
"""Stands in a pipe's queue behind the last bytes."""

DIRECTIONS: tuple[Direction, Direction] = ("to_server", "from_server")

# What a pipe holds before it stops reading, bytes: the kernel's buffers then fill up, as before a real hole.
MOST_HELD = 1 << 20
# Read at a time.
PIECE = 1 << 16
# With a limited bandwidth, bytes go out in portions of this many seconds' worth.
PORTION = 0.05


@attrs.define(eq=False)
class Trigger:
    """Cuts a connection when ``pattern`` passed, or after ``left`` bytes."""

    kind: str
    happened: concurrent.futures.Future[None]
    pattern: bytes = b""
    after: bool = True
    left: int = 0
    tails: WeakKeyDictionary[Pipe, bytes] = attrs.field(factory=WeakKeyDictionary)

    def passes(self, pipe: Pipe, data: bytes) -> int | None:
        """How many bytes of ``data`` still pass before the cut; None: all, and nothing is cut."""
        if not self.pattern:
            if len(data) < self.left:
                self.left -= len(data)
                return None
            return self.left
        tail = self.tails.get(pipe, b"")
        at = (tail + data).find(self.pattern)
        if at < 0:
            self.tails[pipe] = (tail + data)[-(len(self.pattern) - 1) :] if len(self.pattern) > 1 else b""
            return None
        # After: the whole piece, for a message goes on behind the pattern (the zero behind PostgreSQL's COMMIT).
        return len(data) if self.after else max(0, at - len(tail))


@attrs.define(eq=False)
class Faults:
    """What is wrong with a link just now, and what it did so far."""

    loop: asyncio.AbstractEventLoop
    random: random.Random
    counts: Counter[str]
    holes: set[Direction] = attrs.field(factory=set)
    delays: dict[Direction, tuple[float, float]] = attrs.field(factory=lambda: dict.fromkeys(DIRECTIONS, (0.0, 0.0)))
    bandwidths: dict[Direction, float | None] = attrs.field(factory=lambda: dict.fromkeys(DIRECTIONS))
    triggers: dict[Direction, list[Trigger]] = attrs.field(factory=lambda: {one: [] for one in DIRECTIONS})

    def fire(self, direction: Direction, trigger: Trigger) -> None:
        """Take the trigger away and say that it happened."""
        self.triggers[direction].remove(trigger)
        self.counts[trigger.kind] += 1
        if trigger.happened.set_running_or_notify_cancel():
            trigger.happened.set_result(None)

    def disarm(self) -> None:
        """Take all triggers away."""
        for triggers in self.triggers.values():
            for trigger in triggers:
                trigger.happened.cancel()
            triggers.clear()

    def clear(self) -> None:
        """Nothing is wrong any more."""
        self.holes.clear()
        self.disarm()
        for direction in DIRECTIONS:
            self.delays[direction], self.bandwidths[direction] = (0.0, 0.0), None


class Pipe:
    """One direction of one connection, from ``source`` to ``target``."""

    def __init__(
        self, faults: Faults, direction: Direction, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        self.faults, self.direction, self.source, self.target = faults, direction, source, target
        self.held: deque[tuple[float, bytes | Ending]] = deque()
        self.size = 0
        self.discards = False
        self._last_due = self._free_at = 0.0
        self._changed = asyncio.Event()

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
        low, high = self.faults.delays[self.direction]
        # Never before what came earlier: a delay that varies must not change the order.
        due = self.faults.loop.time() + self.faults.random.uniform(low, high)
        self._last_due = max(self._last_due, due)
        self.held.append((self._last_due, what))
        self.size += len(what) if isinstance(what, bytes) else 0
        self._changed.set()

    async def pass_on(self, cut: Callable[[Pipe], None]) -> None:
        """Pass on what may pass, until the source has ended. ``cut`` is called when a trigger fires."""
        try:
            while isinstance(what := await self._next(), bytes):
                if not self._write(what, cut):
                    return
                await self.target.drain()
            if what == "reset":
                reset(self.target)
            elif what == "end" and self.target.can_write_eof():
                self.target.write_eof()
            elif what == "end":  # TLS: there is no half-closed connection
                self.target.close()
        except OSError:  # the target is gone
            self.discard()

    def _write(self, data: bytes, cut: Callable[[Pipe], None]) -> bool:
        """Write what bandwidth and triggers leave of it; False when the connection is cut behind it."""
        if bandwidth := self.faults.bandwidths[self.direction]:
            portion = max(1, int(bandwidth * PORTION))
            if len(data) > portion:
                self.held.appendleft((0.0, data[portion:]))
                self.size += len(data) - portion
                data = data[:portion]
            self._free_at = self.faults.loop.time() + len(data) / bandwidth
        for trigger in self.faults.triggers[self.direction]:
            passing = trigger.passes(self, data)
            if passing is not None:
                self.target.write(data[:passing])
                self.faults.fire(self.direction, trigger)
                cut(self)
                return False
        self.target.write(data)
        self.faults.counts[f"bytes_{self.direction}"] += len(data)
        return True

    async def _next(self) -> bytes | Ending | None:
        """What may pass now; None when all is thrown away."""
        while not self.discards:
            wait = None
            if self.held and self.direction not in self.faults.holes:
                due, what = self.held[0]
                wait = max(due, self._free_at) - self.faults.loop.time()
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


PipeMaker = Callable[[Faults, Direction, asyncio.StreamReader, asyncio.StreamWriter], Pipe]


class PipedConnection:
    """A client's connection and the one made for it to the server. ``pipe`` makes each of its pipes."""

    def __init__(
        self, faults: Faults, reader: asyncio.StreamReader, client: asyncio.StreamWriter, pipe: PipeMaker
    ) -> None:
        self._faults, self._reader, self._client, self._pipe = faults, reader, client, pipe
        self._server: asyncio.StreamWriter | None = None
        self._task = asyncio.current_task()
        self.pipes: tuple[Pipe, ...] = ()

    async def run(self, host: str, port: int) -> None:
        """Connect to the server, and pass on what both say until both have ended."""
        try:
            reader, self._server = await asyncio.open_connection(host, port)
        except OSError:
            self._faults.counts["unreachable"] += 1
            reset(self._client)
            return
        there = self._pipe(self._faults, "to_server", self._reader, self._server)
        back = self._pipe(self._faults, "from_server", reader, self._client)
        self.pipes = (there, back)
        try:
            works = [work for pipe in self.pipes for work in (pipe.receive(), pipe.pass_on(self._cut_behind))]
            await asyncio.gather(*works)
        finally:
            self._client.close()
            self._server.close()

    def cut(self) -> None:
        """Reset both sides."""
        for pipe in self.pipes:
            pipe.discard()
        reset(self._client)
        if self._server is not None:
            reset(self._server)
        elif self._task is not None:
            self._task.cancel()

    def _cut_behind(self, pipe: Pipe) -> None:
        """Cut it, but what was passed on so far arrives."""
        for one in self.pipes:
            one.discard()
        there, back = self.pipes
        reset((back if pipe is there else there).target)
        pipe.target.close()

    def abandon(self, side: Side) -> None:
        """Close one side; the other one stays open, and what it says is thrown away."""
        for pipe in self.pipes:
            pipe.discard()
            if pipe.direction == ("from_server" if side == "client" else "to_server"):
                reset(pipe.target)
