"""A TCP link that fails as networks do: a proxy on loopback in front of a real Redis or PostgreSQL.

::

    async with FaultyLink("redis://localhost:6379") as link:
        async with busrep.connect(link.url, ...) as bus:
            link.black_hole("from_server")   # what the server says is not heard any more
            link.heal()
            link.cut()                       # every connection is reset
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import attrs

from busrep.errors import ConfigError
from busrep.testing.pipes import DIRECTIONS, Direction, Faults, Pipe, PipedConnection, Side, Trigger, reset

DEFAULT_PORTS = {
    "redis": 6379, "rediss": 6379, "postgresql": 5432, "postgres": 5432,
    "tcp": 8823, "tcps": 8823, "http": 80, "https": 443,
}  # fmt: skip


class FaultyLink:
    """``async with FaultyLink(url) as link``: use ``link.url`` in place of ``url``.

    ``url`` is ``redis://``, ``rediss://``, ``postgresql://``, or busrep's own ``tcp://``, ``tcps://``, ``http://``,
    ``https://``; bytes pass unchanged, so TLS of the server itself works through it, if the client does not check the
    host's name. With ``tls``, the link is a TLS server in front of a plain Redis, and ``link.url`` says ``rediss://``.
    ``seed`` makes the dice of a varying delay repeatable.

    All methods may be called from any thread, and take effect before they return. ``refuse`` may be set at any
    time: True resets every new connection. Raises ConfigError for a URL without a host and a known scheme.
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, seed: int | None = None) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.scheme not in DEFAULT_PORTS:
            raise ConfigError("FaultyLink needs a URL with a host: redis://host:port, postgresql://host:port/database")
        self._parts = parts._replace(scheme="rediss") if tls and parts.scheme == "redis" else parts
        self._target = (parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme])
        self._tls = tls
        self.random = random.Random(seed)
        self.faults = {direction: Faults() for direction in DIRECTIONS}
        self.open_connections: dict[PipedConnection, None] = {}
        self.url = ""
        self.refuse = False
        self.connections = 0
        """Connections accepted so far."""
        self.counts: Counter[str] = Counter()
        """What it did: a count for each method called, ``refused``, ``unreachable`` (the server did not accept),
        ``cut_after`` and ``cut_when`` once they happened, ``bytes_to_server``, ``bytes_from_server``."""

    @classmethod
    @contextlib.contextmanager
    def in_thread(cls, url: str, *, tls: ssl.SSLContext | None = None, seed: int | None = None) -> Iterator[Self]:
        """The same for code without an event loop: ``with FaultyLink.in_thread(url) as link``."""
        from busrep.sync.loop_thread import LoopThread  # with the bus for threads, which few tests need

        link = cls(url, tls=tls, seed=seed)
        thread: LoopThread[FaultyLink] = LoopThread("faulty-link")
        thread.start(lambda: link)
        try:
            yield link
        finally:
            thread.close()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        user, at, _ = self._parts.netloc.rpartition("@")
        self.url = urlunsplit(self._parts._replace(netloc=f"{user}{at}127.0.0.1:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._heal()
        self._end("client", "server")
        await asyncio.gather(*(one.task for one in self.open_connections), return_exceptions=True)
        await self._server.wait_closed()

    # -- faults -----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Reset all connections, and throw away what is still on its way."""
        self._do("cut", lambda: self._end("client", "server"))

    def black_hole(self, direction: Direction | None = None) -> None:
        """Pass on nothing any more, in one direction or both: connections stay open, new ones are accepted.

        What is sent into the hole is kept, as a sender would send it again, and arrives after ``heal()``.
        """
        self._change("black_hole", direction, hole=True)

    def abandon(self, closed: Side = "server") -> None:
        """Make all connections half-open: ``closed`` is the side that sees a reset.

        The other side keeps an open connection on which nobody answers.
        """
        self._do("abandon", lambda: self._end(closed))

    def delay(self, seconds: float | tuple[float, float], direction: Direction | None = None) -> None:
        """Hold all that comes from now on for so long, or for a time within (least, most); the order is kept."""
        low, high = seconds if isinstance(seconds, tuple) else (seconds, seconds)
        if not 0 <= low <= high:
            raise ValueError(f"a delay of {seconds} s")
        self._change("delay", direction, delay=(low, high))

    def bandwidth(self, bytes_per_second: float | None, direction: Direction | None = None) -> None:
        """Pass on no more than this, for each connection and direction; None: no limit."""
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"a bandwidth of {bytes_per_second} bytes/s: use black_hole()")
        self._change("bandwidth", direction, bandwidth=bytes_per_second)

    def cut_after(self, count: int, direction: Direction = "from_server") -> concurrent.futures.Future[None]:
        """Cut the connection on which the ``count``-th byte from now passes, right behind that byte.

        Happens once. Returns a future that is done when it happened (in a coroutine: ``asyncio.wrap_future``), and
        cancelled when ``heal()``, or the link's end, came first.
        """
        if count < 1:
            raise ValueError(f"cut after {count} bytes")
        return self._arm(direction, Trigger("cut_after", left=count))

    def cut_when(
        self, pattern: bytes, direction: Direction = "to_server", *, after: bool = True
    ) -> concurrent.futures.Future[None]:
        """Cut the connection on which ``pattern`` passes next; happens once, and returns a future as ``cut_after``.

        With ``after`` the pattern arrives, with all that was read in one piece with it, and the answer does not.
        Without, the cut is before its first byte (of a pattern that came in pieces, the first ones have passed).
        ``cut_when(b"COMMIT")`` loses PostgreSQL's answer to COMMIT, or the COMMIT itself: then nobody knows.
        ``cut_when(b"COMMIT", "from_server", after=False)`` loses the answer of a server that did commit.
        """
        if not pattern:
            raise ValueError("cut at an empty pattern")
        return self._arm(direction, Trigger("cut_when", pattern, after))

    def heal(self) -> None:
        """End every fault: no hole, refusal, delay or limit, nothing armed. Abandoned connections stay so."""
        self._do("heal", self._heal)

    # -- inside -----------------------------------------------------------------------------------------------

    def _do(self, name: str, action: Callable[[], object]) -> None:
        self._on_loop(lambda: (self.counts.update([name]), action()))

    def _on_loop(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        if threading.get_ident() == self._thread:
            action()
        else:
            asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _change(self, name: str, direction: Direction | None, **values: Any) -> None:
        which = _directions(direction)
        self._do(name, lambda: self.faults.update({one: attrs.evolve(self.faults[one], **values) for one in which}))

    def _arm(self, direction: Direction, trigger: Trigger) -> concurrent.futures.Future[None]:
        _directions(direction)
        self._on_loop(lambda: self.faults[direction].triggers.append(trigger))
        return trigger.happened

    def fire(self, direction: Direction, trigger: Trigger) -> None:
        """Take the trigger away and say that it happened."""
        self.faults[direction].triggers.remove(trigger)
        self.counts[trigger.kind] += 1
        if trigger.happened.set_running_or_notify_cancel():
            trigger.happened.set_result(None)

    def _heal(self) -> None:
        self.refuse = False
        for direction, faults in self.faults.items():
            for trigger in faults.triggers:
                trigger.happened.cancel()
            self.faults[direction] = Faults()
        for connection in list(self.open_connections):
            for pipe in connection.pipes:
                pipe.hurry()

    def _end(self, *sides: Side) -> None:
        for connection in list(self.open_connections):
            connection.end(*sides)

    def pipe(self, *of: Any) -> Pipe:
        """Make one direction of a connection."""
        return Pipe(*of)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            self.counts["refused"] += 1
            reset(writer)
            return
        self.connections += 1
        connection = PipedConnection(self, reader, writer)
        self.open_connections[connection] = None
        try:
            with contextlib.suppress(asyncio.CancelledError):  # cut before the server had answered
                await connection.run(*self._target)
        finally:
            del self.open_connections[connection]


def _directions(direction: Direction | None) -> tuple[Direction, ...]:
    if direction is not None and direction not in DIRECTIONS:
        raise ValueError(f"the direction {direction!r} is none of {DIRECTIONS}")
    return DIRECTIONS if direction is None else (direction,)
