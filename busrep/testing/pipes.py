"""What a ``FaultyLink`` is made of: two pipes a connection, which hold back, delay, cut and throw away.

A pipe holds what it may not pass on yet, in order, with the time from which it may, and stops reading when it holds
much. A hole thus behaves as a network whose lost packets are sent again: what was sent into it arrives once it
heals. Nothing polls; the only timers are those of a delay and of a bandwidth.
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
from typing import Literal, cast

import attrs

Direction = Literal["to_server", "from_server"]
Side = Literal["client", "server"]

DIRECTIONS: tuple[Direction, Direction] = ("to_server", "from_server")

# What a pipe holds before it stops reading, bytes: the kernel's buffers then fill up, as before a real hole.
MOST_HELD = 1 << 20
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
    tails: dict[Pipe, bytes] = attrs.field(factory=dict)

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
    half_close: bool
    """Whether a side may end while the other goes on: TCP knows that, TLS does not."""
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


class Ending:
    """Stands in a pipe's queue behind the last bytes: an orderly end, or a reset."""


END, RESET = Ending(), Ending()


class Pipe:
    """One direction of one connection."""

    def __init__(self, faults: Faults, connection: PipedConnection, direction: Direction) -> None:
        self.faults, self.connection, self.direction = faults, connection, direction
        self.source: End
        self.target: End
        self.held: deque[tuple[float, bytes | Ending]] = deque()
        self.size = 0
        self.last_due = self.free_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.stalled = self.discards = self.reading_paused = False

    def take(self, what: bytes | Ending) -> None:
        """What came from the source: bytes, or how it ended."""
        if self.discards:
            return
        low, high = self.faults.delays[self.direction]
        # Never before what came earlier: a delay that varies must not change the order.
        due = self.last_due = max(self.last_due, self.faults.loop.time() + self.faults.random.uniform(low, high))
        self.held.append((due, what))
        self.size += len(what) if isinstance(what, bytes) else 0
        self.flush()
        if self.size > MOST_HELD and not self.reading_paused and not self.source.gone:
            self.reading_paused = True
            self.source.transport.pause_reading()

    def flush(self) -> None:
        """Pass on what may pass now; set a timer for what may later."""
        while self.held and self.target.ready and not self.stalled and self.direction not in self.faults.holes:
            due, what = self.held[0]
            due = max(due, self.free_at)
            if due > (now := self.faults.loop.time()):
                self.stop_timer()
                self.timer = self.faults.loop.call_at(due, self.flush)
                return
            self.held.popleft()
            if isinstance(what, bytes):
                self.size -= len(what)
                self.pass_on(what, now)
            elif what is RESET:
                self.target.reset()
            else:
                self.target.finish()
        if self.reading_paused and self.size <= MOST_HELD // 2 and not self.source.gone:
            self.reading_paused = False
            self.source.transport.resume_reading()

    def pass_on(self, data: bytes, now: float) -> None:
        """Write to the target what bandwidth and triggers leave of it."""
        if bandwidth := self.faults.bandwidths[self.direction]:
            portion = max(1, int(bandwidth * PORTION))
            if len(data) > portion:
                self.held.appendleft((now, data[portion:]))
                self.size += len(data) - portion
                data = data[:portion]
            self.free_at = now + len(data) / bandwidth
        for trigger in self.faults.triggers[self.direction]:
            passing = trigger.passes(self, data)
            if passing is not None:
                self.target.send(data[:passing])
                self.faults.fire(self.direction, trigger)
                self.connection.cut_behind(self)
                return
        self.target.send(data)
        self.faults.counts[f"bytes_{self.direction}"] += len(data)

    def hurry(self) -> None:
        """Pass on all that is held, without the delays it had."""
        self.held = deque((0.0, what) for _, what in self.held)
        self.last_due = self.free_at = 0.0
        self.flush()

    def discard(self) -> None:
        """Throw away what is held and whatever comes."""
        self.discards = True
        self.held.clear()
        self.size = 0
        self.stop_timer()

    def stop_timer(self) -> None:
        """Forget the next look."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class End(asyncio.Protocol):
    """The socket of one side: what it receives goes into ``outgoing``; ``incoming`` writes to it."""

    def __init__(self, connection: PipedConnection, outgoing: Pipe, incoming: Pipe) -> None:
        self.connection, self.outgoing, self.incoming = connection, outgoing, incoming
        outgoing.source = incoming.target = self
        self.transport: asyncio.Transport
        self.ready = False  # may be written to
        self.gone = False
        self.ended = False  # said its last
        self.unwanted = False  # to be reset as soon as it is open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = cast(asyncio.Transport, transport)
        self.ready = True
        self.connection.opened(self)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.outgoing.take(data)

    def eof_received(self) -> bool:
        """Called by the loop."""
        self.ended = True
        self.outgoing.take(END)
        # Half closed: the other direction goes on. TLS has no such state; an abandoned side is not worth keeping.
        return self.connection.faults.half_close and not self.outgoing.discards

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        self.gone, self.ready = True, False
        self.incoming.discard()
        self.outgoing.take(RESET if error else END)
        self.connection.closed()

    def pause_writing(self) -> None:
        """Called by the loop: the peer reads too slowly."""
        self.incoming.stalled = True

    def resume_writing(self) -> None:
        """Called by the loop."""
        self.incoming.stalled = False
        # Not here: what is flushed may end in an abort, and asyncio is in the middle of writing.
        asyncio.get_running_loop().call_soon(self.incoming.flush)

    def send(self, data: bytes) -> None:
        """Write, unless it is closing already."""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def finish(self) -> None:
        """The other side will say no more: this one shall see that."""
        if self.incoming.source.gone or self.ended or not self.transport.can_write_eof():
            self.transport.close()
        elif not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # it was reset, and the loop has not said so yet
                self.transport.abort()

    def reset(self) -> None:
        """Close at once, with RST instead of FIN."""
        self.unwanted = True
        if self.ready:
            # AttributeError: asyncio's TLS transport forgets its connection when it is closed for the second time.
            with contextlib.suppress(OSError, AttributeError):
                raw = self.transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class PipedConnection:
    """A client's connection and the one made for it to the server."""

    def __init__(
        self,
        faults: Faults,
        target: tuple[str, int],
        admit: Callable[[PipedConnection], bool],
        forget: Callable[[PipedConnection], None],
    ) -> None:
        self.faults, self.target, self.admit, self.forget = faults, target, admit, forget
        there, back = Pipe(faults, self, "to_server"), Pipe(faults, self, "from_server")
        self.pipes = (there, back)
        self.client, self.server = End(self, there, back), End(self, back, there)
        self.dialling: asyncio.Task[None] | None = None

    def opened(self, end: End) -> None:
        """One side is open: the client, then the server."""
        if end is self.server:
            if end.unwanted:
                end.reset()
            self.pipes[0].flush()
        elif self.admit(self):
            self.dialling = self.faults.loop.create_task(self.dial(), name="faulty-link-dial")
        else:
            self.server.gone = True
            end.reset()

    async def dial(self) -> None:
        """Connect to the server."""
        try:
            await self.faults.loop.create_connection(lambda: self.server, *self.target)
        except OSError:
            self.faults.counts["unreachable"] += 1
            self.client.reset()
        finally:
            if not self.server.ready:
                self.server.gone = True
                self.closed()

    def closed(self) -> None:
        """One side is closed."""
        if self.client.gone and self.server.gone:
            self.forget(self)

    def cut(self) -> None:
        """Reset both sides."""
        for pipe in self.pipes:
            pipe.discard()
        self.client.reset()
        self.server.reset()

    def cut_behind(self, pipe: Pipe) -> None:
        """Cut it, but what was passed on so far arrives."""
        for one in self.pipes:
            one.discard()
        pipe.source.reset()
        pipe.target.transport.close()

    def abandon(self, side: Side) -> None:
        """Close one side; the other one stays open, and what it says is thrown away."""
        for pipe in self.pipes:
            pipe.discard()
            pipe.flush()
        (self.client if side == "client" else self.server).reset()
