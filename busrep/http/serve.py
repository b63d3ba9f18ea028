"""Runs the catch-up application by itself: uvicorn, bounded against clients that are slow, or mean to be.

uvicorn bounds requests, and the time between two of them. It does not bound the time that a client takes to send the
head of its first request, nor to read an answer; both are bounded here, the latter by the kernel. So is the number of
connections: of those that have asked for nothing the oldest is cut for a new one, so that silent connections keep no
reader out, and those that got an answer are not touched. All that is refused is counted. A service that mounts the
application in its own should have something in front of it that does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import attrs
from attrs.validators import ge, gt

from busrep.core.backoff import LogLimiter
from busrep.errors import ConfigError, MissingExtra

from ..runtime.tasks import stop

try:
    import h11
    import uvicorn
    from starlette.responses import JSONResponse
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")

# Connections that wait to be accepted.
BACKLOG = 2048

# uvicorn warns of each request that is none: so strangers may fill a disk. We count them, and tell once a second.
_uvicorn_log = logging.getLogger("busrep.http.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)
# It calls an answer that its application breaks off an error: of a download over a slow link that is the usual end, and
# it is counted by the application.
_uvicorn_log.addFilter(lambda record: record.msg != "ASGI callable returned without completing response.")


@attrs.frozen(kw_only=True)
class ServeLimits:
    """Bounds of one listening server. Bytes are bytes, times are seconds."""

    connections: int = attrs.field(default=200, validator=ge(1))
    """Connections that get answers; a request on a further one is told to come back (503). Beside them there may be as
    many strangers: connections without a whole request, or whose last one was refused (a status from 400 on). Of more
    the oldest is cut, for each costs a file descriptor that the store may need; a reader asks within milliseconds."""

    head_timeout: float = attrs.field(default=10.0, validator=gt(0))
    """For a TLS handshake, and for the head of a request, from the connection's first moment or the request's first
    byte."""

    head_bytes: int = attrs.field(default=16_384, validator=ge(1_024))
    """Largest head of a request, as far as it comes in pieces."""

    keep_alive: float = attrs.field(default=75.0, validator=gt(0))
    """Longest pause between two requests; more than the 10 s between two looks of a reader at the known writers."""

    write_timeout: float = attrs.field(default=20.0, validator=gt(0))
    """A client that has read nothing for so long is cut, on Linux: it keeps a page in our memory."""

    shutdown_timeout: float = attrs.field(default=5.0, validator=gt(0))
    """How long closing waits for answers under way."""


class _Places:
    """Which connections have shown that they ask for something, which have not, and what was refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[_BoundedProtocol, None] = {}  # the oldest first
        self._members: set[_BoundedProtocol] = set()
        self._limiter = LogLimiter()
        self.accepted = 0
        self.refused: Counter[str] = Counter()

    def refuse(self, reason: str) -> None:
        """Count it."""
        self.refused[reason] += 1
        if self._limiter.allows(reason, time.monotonic()):
            log.warning("HTTP server: a connection is refused: %s (%d so far)", reason, self.refused[reason])

    def add_stranger(self, connection: _BoundedProtocol) -> _BoundedProtocol | None:
        """Note a connection that has shown nothing; return the one that has to go for it."""
        self._members.discard(connection)
        self._strangers[connection] = None
        return next(iter(self._strangers)) if len(self._strangers) > self._most else None

    def remove_stranger(self, connection: _BoundedProtocol) -> None:
        """A request of it has come whole."""
        self._strangers.pop(connection, None)

    def admit(self, connection: _BoundedProtocol) -> bool:
        """Whether the connection's request gets an answer: it has a place, or there is a free one."""
        if connection not in self._members and len(self._members) >= self._most:
            return False
        self._members.add(connection)
        return True

    def remove(self, connection: _BoundedProtocol) -> None:
        """The connection is closed."""
        self._strangers.pop(connection, None)
        self._members.discard(connection)


class Serving:
    """A running server. ``port`` and ``url`` are where it listens."""

    def __init__(self, address: tuple[str, int], tls: bool, state: ServerState, places: _Places) -> None:
        self.state, self._places = state, places
        self.host, self.port = address
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.port}"
        self.closed = asyncio.Event()

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self.state.connections)

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: connections that are open, were accepted, and were refused or cut, by reason: ``busy``
        and ``stranger`` (`ServeLimits.connections`), ``slow`` (``head_timeout``), ``deaf`` (``write_timeout``),
        ``not HTTP``."""
        return {
            "connections": self.connections,
            "accepted": self._places.accepted,
            "refused": dict(self._places.refused),
        }

    async def wait(self) -> None:
        """Return when the server has ended, which it does not do by itself."""
        await self.closed.wait()


@contextlib.asynccontextmanager
async def serve(
    app: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: ssl.SSLContext | None = None,
    limits: ServeLimits | None = None,
) -> AsyncIterator[Serving]:
    """Serve an ASGI application on a TCP port: ``async with serve(app, "0.0.0.0", 8080, tls=context) as serving``.

    ``port`` 0: a free one, in ``serving.port``. ``tls``: a server's context; without it the secret travels in the
    clear. Signals are left to the caller: leaving the block ends answers under way, within ``shutdown_timeout``, and
    closes every connection. Raises ConfigError when the address cannot be listened on.
    """
    limits = limits or ServeLimits()
    state, places = ServerState(), _Places(limits.connections)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # it is only added to the loop's clock
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    config.load()
    try:
        # uvicorn's own server is not needed for this, and gives a TLS handshake 60 s.
        server = await asyncio.get_running_loop().create_server(
            lambda: _BoundedProtocol(config, state, limits, places),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.head_timeout,
            backlog=BACKLOG,
        )
    except (OSError, OverflowError, UnicodeError) as error:  # OverflowError: no port; UnicodeError: no name of a host
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    serving = Serving(server.sockets[0].getsockname()[:2], tls is not None, state, places)
    try:
        yield serving
    finally:
        server.close()
        await asyncio.shield(_ended(state, limits.shutdown_timeout))
        serving.closed.set()


async def _ended(state: ServerState, timeout: float) -> None:
    """Let answers under way end, within that time; then close every connection."""
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while state.connections or state.tasks:  # noqa: ASYNC110 - nothing of uvicorn's tells
                await asyncio.sleep(0.02)
    for connection in list(state.connections):
        connection.transport.abort()
    await stop(state.tasks, timeout)
    await asyncio.sleep(0)  # for their connection_lost


class _BoundedProtocol(H11Protocol):
    """uvicorn's connection, with a deadline for each request's head and for reading the answers."""

    def __init__(self, config: uvicorn.Config, state: ServerState, limits: ServeLimits, places: _Places) -> None:
        super().__init__(config, state, {})
        # What was asked for belongs in no log. Said here, for uvicorn's own switch silences the whole process.
        self.access_log = False
        self.logger = _uvicorn_log
        self._application, self.app = self.app, self._answer
        self.limits, self.places = limits, places
        self._refused = False  # the application did so with its last answer
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (timeout := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux has it
            raw = transport.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, timeout, int(self.limits.write_timeout * 1_000))
        self.places.accepted += 1
        self._make_stranger()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            self.places.refuse("deaf")
        self.places.remove(self)
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn leaves it running when the connection broke
        super().connection_lost(exc)

    def _make_stranger(self) -> None:
        if (oldest := self.places.add_stranger(self)) is not None:
            oldest._cut("stranger")

    def _cut(self, reason: str) -> None:
        self.places.refuse(reason)
        self.places.remove(self)
        self.transport.abort()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Let the application answer, if there is a place."""
        # A closed connection must not take a place: nothing would free it.
        if not self.transport.is_closing() and not self.places.admit(self):
            self.places.refuse("busy")
            body = {"error": "too many connections: come back later", "code": "busy"}
            await JSONResponse(body, 503, {"retry-after": "1", "connection": "close"})(scope, receive, send)
            return

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._refused = message["status"] >= 400
                date = (b"date", formatdate(usegmt=True).encode())
                message = {**message, "headers": [date, *message.get("headers", ())]}
            await send(message)

        await self._application(scope, receive, noted)

    # -- the head of a request --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # stops the clock of keep-alive at the first byte
        self._look()

    def on_response_complete(self) -> None:
        if self._refused and not self.transport.is_closing():
            self._make_stranger()
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # What follows the head of a request is nonsense: its application would answer on top of this.
            self.cycle.disconnected = True
            if self.cycle.response_started:
                self._cut("not HTTP")
                return
        self.places.refuse("not HTTP")
        super().send_400_response(msg)

    def _look(self) -> None:
        """A request that has come whole is the application's matter; one that has begun is waited for."""
        # h11: IDLE until the head is there; DONE: the answer is not, and more has come.
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
            self.places.remove_stranger(self)
        elif self._head is None and self.conn.trailing_data[0]:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self.limits.head_timeout, self._cut, "slow")

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
