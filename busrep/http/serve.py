"""Runs the catch-up application by itself: uvicorn, bounded against clients that are slow, or mean to be.

uvicorn bounds requests, and the time between two of them. It does not bound the time that a client takes to send the
head of its first request, nor to read an answer; both are bounded here, on the connection. So is the number of
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
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs
from attrs.validators import ge, gt

from busrep.core.backoff import LogLimiter
from busrep.errors import ConfigError, MissingExtra

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")

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
    """A client that has read nothing for so long is cut: it keeps a page in our memory."""

    shutdown_timeout: float = attrs.field(default=5.0, validator=gt(0))
    """How long closing waits for answers under way."""


class _Counts:
    """What has become of connections."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        self._limiter = LogLimiter()

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1
        if self._limiter.allows(reason, time.monotonic()):
            log.warning("HTTP server: a connection is refused: %s (%d so far)", reason, self.refused[reason])


class _Places:
    """Which connections have shown that they ask for something, and which have not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[_BoundedProtocol, None] = {}  # the oldest first
        self._members: set[_BoundedProtocol] = set()

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

    def __init__(
        self, server: uvicorn.Server, task: asyncio.Task[None], address: tuple[str, int], tls: bool, counts: _Counts
    ) -> None:
        self._server, self._task, self._counts = server, task, counts
        self.host, self.port = address
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if tls else 'http'}://{shown}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: connections that are open, were accepted, and were refused or cut, by reason: ``busy``
        and ``stranger`` (`ServeLimits.connections`), ``slow`` (``head_timeout``), ``deaf`` (``write_timeout``),
        ``not HTTP``."""
        return {
            "connections": self.connections,
            "accepted": self._counts.accepted,
            "refused": dict(self._counts.refused),
        }

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
    limits, counts = limits or ServeLimits(), _Counts()
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_bounded_protocol(limits, counts),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # it is only added to the loop's clock
        timeout_graceful_shutdown=limits.shutdown_timeout,  # type: ignore[arg-type]  # the same
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    config.load()
    config.ssl = tls
    server = _Server(config, limits.head_timeout)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="busrep-http")
    task.add_done_callback(server.log_failure)
    ready = asyncio.create_task(server.ready.wait(), name="busrep-http-ready")
    try:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():  # it says in its own words why it did not start
            task.result()
        yield Serving(server, task, listening.getsockname()[:2], tls is not None, counts)
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
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    return listening


class _Server(uvicorn.Server):
    """Signals are the caller's, its start is an event, and TLS handshakes have a bound."""

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._handshake_timeout = handshake_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, whose handshakes may take 60 s each."""
        config = self.config
        await self.lifespan.startup()

        def connection() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        timeout = None if config.ssl is None else self._handshake_timeout
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                connection, sock=one, ssl=config.ssl, ssl_handshake_timeout=timeout, backlog=config.backlog
            )
            for one in sockets or ()
        ]
        self.started = True
        self.ready.set()

    def log_failure(self, task: asyncio.Task[None]) -> None:
        """Say so when it ends with an error, unless whoever starts it gets that."""
        if self.started and not task.cancelled() and (error := task.exception()) is not None:
            log.error("the HTTP server failed", exc_info=error)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bounded_protocol(limits: ServeLimits, counts: _Counts) -> type[asyncio.Protocol]:
    members = {"limits": limits, "counts": counts, "places": _Places(limits.connections)}
    return type("BoundedProtocol", (_BoundedProtocol,), members)


class _BoundedProtocol(H11Protocol):
    """uvicorn's connection, with a deadline for each request's head and for reading the answers."""

    limits: ServeLimits
    counts: _Counts
    places: _Places
    _refused = False  # the application did so with its last answer
    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What was asked for belongs in no log. Said here, for uvicorn's own switch silences the whole process.
        self.access_log = False
        self.logger = _uvicorn_log
        self.counts.accepted += 1
        self._application, self.app = self.app, self._answer
        self._make_stranger()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.remove(self)
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn leaves it running when the connection broke
        self._stop_watching()
        super().connection_lost(exc)

    def _make_stranger(self) -> None:
        if (oldest := self.places.add_stranger(self)) is not None:
            oldest._cut("stranger")

    def _cut(self, reason: str) -> None:
        self.counts.refuse(reason)
        self.places.remove(self)
        self.transport.abort()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Let the application answer, if there is a place."""
        # A closed connection must not take a place: nothing would free it.
        if not self.transport.is_closing() and not self.places.admit(self):
            await self._busy(scope, receive, send)
            return

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._refused = message["status"] >= 400
            await send(message)

        await self._application(scope, receive, noted)

    async def _busy(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Instead of the application, for a connection that came after too many others."""
        self.counts.refuse("busy")
        body = b'{"error":"too many connections: come back later","code":"busy"}'
        headers = {"content-type": "application/json", "content-length": str(len(body)), "retry-after": "1"}
        raw = [(name.encode(), value.encode()) for name, value in {**headers, "connection": "close"}.items()]
        await send({"type": "http.response.start", "status": 503, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    # -- the head of a request --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # stops the clock of keep-alive at the first byte
        self._look()

    def on_response_complete(self) -> None:
        if self._refused and not self.transport.is_closing():
            self._make_stranger()
        super().on_response_complete()
        self._look()
        self._watch_writing()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # What follows the head of a request is nonsense: its application would answer on top of this.
            self.cycle.disconnected = True
            if self.cycle.response_started:
                self._cut("not HTTP")
                return
        self.counts.refuse("not HTTP")
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

    # -- the reading of answers -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """While something waits to be read: also the last of it, which would keep a connection from being closed."""
        self._stop_watching()
        if left := self.transport.get_write_buffer_size():
            self._stalled = self.loop.call_later(self.limits.write_timeout, self._check_writing, left)

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self._cut("deaf")
        else:
            self._watch_writing()
