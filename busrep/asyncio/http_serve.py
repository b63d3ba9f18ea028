"""Runs the catch-up application by itself: uvicorn, bounded against clients that are slow, or mean to be.

uvicorn bounds requests, and the time between two of them. It does not bound the time that a client takes to send the
head of its first request, nor to read an answer; both are bounded here, on the connection. A service that mounts the
application in its own should have something in front of it that does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs
from attrs.validators import ge, gt

from busrep.errors import ConfigError, MissingExtra

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")


@attrs.frozen(kw_only=True)
class ServeLimits:
    """Bounds of one listening server. Bytes are bytes, times are seconds."""

    connections: int = attrs.field(default=200, validator=ge(1))
    """Connections that get answers; more are told to come back (503), and twice as many are cut when they come, for
    each costs a file descriptor that the store may need."""

    head_timeout: float = attrs.field(default=10.0, validator=gt(0))
    """For the head of a request, from the connection's first moment or the request's first byte (TLS handshakes have
    asyncio's own bound, 60 s)."""

    head_bytes: int = attrs.field(default=16_384, validator=ge(1_024))
    """Largest head of a request."""

    keep_alive: float = attrs.field(default=75.0, validator=gt(0))
    """Longest pause between two requests; more than the 10 s between two looks of a reader at the known writers."""

    write_timeout: float = attrs.field(default=20.0, validator=gt(0))
    """A client that has read nothing for so long is cut: it keeps a page in our memory."""

    shutdown_timeout: float = attrs.field(default=5.0, validator=gt(0))
    """How long closing waits for answers under way."""


class Serving:
    """A running server. ``port`` and ``url`` are where it listens."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], address: tuple[str, int], tls: bool) -> None:
        self._server, self._task = server, task
        self.host, self.port = address
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    async def wait(self) -> None:
        """Return when the server has ended, which it does not do by itself."""
        await asyncio.shield(self._task)


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
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_bounded_protocol(limits),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # it is only added to the loop's clock
        timeout_graceful_shutdown=limits.shutdown_timeout,  # type: ignore[arg-type]  # the same
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    config.load()
    config.ssl = tls
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="busrep-http")
    ready = asyncio.create_task(server.ready.wait(), name="busrep-http-ready")
    try:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():  # it says in its own words why it did not start
            task.result()
        yield Serving(server, task, listening.getsockname()[:2], tls is not None)
    finally:
        ready.cancel()
        server.should_exit = True
        await asyncio.shield(_ended(server, task, listening))


async def _ended(server: uvicorn.Server, task: asyncio.Task[None], listening: socket.socket) -> None:
    await asyncio.wait([task])
    for one in getattr(server, "servers", ()):  # where uvicorn failed it leaves all this open
        one.close()
    listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.sleep(0)  # for their connection_lost
    if server.started and not task.cancelled() and (error := task.exception()) is not None:
        log.error("the HTTP server failed", exc_info=error)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise ConfigError(f"cannot listen on {host}:{port}: a port is at most 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    return listening


class _Server(uvicorn.Server):
    """Signals are the caller's, and its start is an event."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bounded_protocol(limits: ServeLimits) -> type[asyncio.Protocol]:
    return type("BoundedProtocol", (_BoundedProtocol,), {"limits": limits})


class _BoundedProtocol(H11Protocol):
    """uvicorn's connection, with a deadline for each request's head and for reading the answers."""

    limits: ServeLimits
    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What was asked for belongs in no log. Said here, for uvicorn's own switch silences the whole process.
        self.access_log = False
        if len(self.connections) > 2 * self.limits.connections:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn leaves it running when the connection broke
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # stops the clock of keep-alive at the first byte
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """A request that has come whole is the application's matter; one that has begun is waited for."""
        # h11: IDLE until the head is there; DONE: the answer is not, and more has come.
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head is None and self.conn.trailing_data[0]:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self.limits.head_timeout, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.limits.write_timeout, self._check_writing, left)

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_writing()
