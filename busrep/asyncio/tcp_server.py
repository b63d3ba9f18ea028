"""The server's end of direct TCP: everybody hears everybody, as on a Redis channel (protocol.md, section 7).

A server stands alone, or in front of a Redis (a relay), whose channel its clients then speak and hear through it. A bus
in the server's own process takes part without a socket: pass the server to ``connect()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis.asyncio as aioredis

from busrep.commands import Command, Error, Name, Ping, Position, Replicate, Server, UserIp
from busrep.direct import FrameSplitter, Liveness, PlainView
from busrep.errors import ConfigError, ParseError, Unavailable
from busrep.framing import Frame, Rows, parse_frame
from busrep.settings import Settings
from busrep.streams import Stream

from .link import RedisLink
from .tasks import spawn, stop
from .tcp import DEFAULT_PORT

log = logging.getLogger("busrep.tcp")

# Seconds that a client has to take the reason why it is cut off, and the ones it has to say who it is.
GOODBYE, HELLO = 1.0, 5.0

# Bytes that may stand in a client's socket before what follows waits in the queue, where it is shared by all clients.
SOCKET_BYTES = 65_536

# The longest line before a client has shown the secret.
HELLO_BYTES = 1_024


def server_tls(cert: str, key: str | None = None, *, client_ca: str | None = None) -> ssl.SSLContext:
    """A server's context: files of its certificate and key; ``client_ca``: clients must show a certificate that this
    authority signed. Raises ConfigError for files that cannot be read."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS: {error} (cert={cert}, key={key}, client_ca={client_ca})") from None
    return context


class TcpServer:
    """``async with TcpServer("shop", port=8823) as server``.

    ``name``: the deployment's; a client that expects another one leaves. ``redis``: relay this Redis's channel, and the
    sub-channels of ``streams``. ``secret``: clients must know it. ``tls``: of ``server_tls``. Beyond loopback it takes
    TLS, and a secret or client certificates: ConfigError without. ``port`` 0: any free one, see ``server.port``.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        redis: str | aioredis.Redis | None = None,
        streams: Iterable[Stream[Any]] = (),
        secret: str | None = None,
        tls: ssl.SSLContext | None = None,
        settings: Settings | None = None,
    ) -> None:
        _check_exposure(host, secret, tls)
        self.name, self.host, self.port, self.settings = name, host, port, settings or Settings()
        self._secret = None if secret is None else secret.encode()
        self._tls = tls
        self._subchannels = {stream.name: stream.channel for stream in streams}
        self._server: asyncio.Server | None = None
        self._clients: dict[_Client, None] = {}
        self._members: dict[LocalLink, None] = {}
        self._fresh: list[bytes] = []  # to send out in this turn of the loop
        self._outbox: deque[tuple[str, bytes]] = deque()  # for Redis
        self._outbox_bytes = 0
        self._wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.refused: Counter[str] = Counter()
        self.accepted = self.messages = 0
        self.queue_bytes_peak = 0
        self._relay: RedisLink | None = None
        if redis is not None:
            channels = dict.fromkeys(("", "USER_IP", *self._subchannels.values()))
            self._relay = RedisLink(
                redis,
                [self._channel(suffix) for suffix in channels],
                self.settings,
                on_up=lambda: None,
                on_message=lambda _, data: self.deliver(data),
                on_down=lambda: self.cut("the link to Redis was lost"),
            )

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the Redis that is relayed, and listen. Raises ConfigError for an address that cannot be had,
        Unavailable."""
        if self._relay is not None:
            await self._relay.start(required=True)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Client(self), self.host, self.port, ssl=self._tls, backlog=512
            )
        except OSError as error:
            await self.close()
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {error.strerror or error}") from None
        self.port = self._server.sockets[0].getsockname()[1]
        spawn(self._tasks, self._keep_alive(), "busrep-tcp-alive")
        if self._relay is not None:
            spawn(self._tasks, self._keep_relaying(), "busrep-tcp-relay")

    async def close(self) -> None:
        """Tell the clients, and end all connections. May be repeated."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._flush()
        self.cut("server stopping", refused=False)
        for member in list(self._members):
            member.lose("the server is closed")
        gone = [client.gone.wait() for client in self._clients]
        if gone:
            await asyncio.wait([asyncio.ensure_future(one) for one in gone], timeout=2 * GOODBYE)
        await stop(list(self._tasks), self.settings.shutdown_timeout)
        if self._relay is not None:
            await self._relay.close()

    async def __aenter__(self) -> TcpServer:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _keep_alive(self) -> None:
        clock, settings = asyncio.get_running_loop().time, self.settings
        while True:
            await asyncio.sleep(min(settings.tcp_ping, settings.tcp_timeout) / 4)
            now, unix_ms = clock(), int(time.time() * 1000)
            for client in list(self._clients):
                client.look(now, unix_ms)

    # -- messages ---------------------------------------------------------------------------------------------

    def deliver(self, message: bytes) -> None:
        """Give a message to every client and member, with all others of this turn of the loop."""
        self.messages += 1
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(message)

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        data = b"\n".join([*fresh, b""])
        commands = data.count(b"\n")
        for client in list(self._clients):
            client.hear(fresh, data, commands)
        for member in list(self._members):
            for message in fresh:
                member.hear(message)

    def publish(self, message: bytes, channel: str) -> None:
        """A client or member says something: to all, over Redis if there is one."""
        if self._relay is None:
            self.deliver(message)
            return
        if self._outbox_bytes + len(message) > self.settings.tcp_queue_bytes:
            self.cut("Redis cannot keep up")
            return
        self._outbox.append((channel, message))
        self._outbox_bytes += len(message)
        self._wake.set()

    async def _keep_relaying(self) -> None:
        relay = self._relay
        assert relay is not None  # noqa: S101 (started with one)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                some = [self._outbox.popleft() for _ in range(min(len(self._outbox), 256))]
                self._outbox_bytes -= sum(len(data) for _, data in some)
                try:
                    await relay.open_publisher()
                    await relay.publish(some)
                except Unavailable as error:
                    # Whether these arrived is unknown, as is what clients said meanwhile: they say it anew.
                    self._outbox.clear()
                    self._outbox_bytes = 0
                    self.cut(f"the link to Redis was lost: {error}")

    def cut(self, reason: str, *, refused: bool = True) -> None:
        """End the connections of all clients: what they said, or should hear, may be lost, and so they begin anew."""
        for client in list(self._clients):
            client.end(reason, refused=refused)
        for member in list(self._members):
            member.lose(reason)

    def received(self, client: _Client, message: bytes) -> None:
        """What a client sent. Raises ParseError for what is not of the protocol."""
        if message.startswith(b"AUTH ") and not self.secured:
            message = message.partition(b"\n")[2]  # not wanted here, and never quoted
        frame = parse_frame(message, self.settings.message_bytes)
        if frame.errors:
            raise frame.errors[0]
        for item in frame.items:
            if isinstance(item, Error):
                log.info("client %s says: %s", client.name, item.text)
                client.end("")
                return
            if isinstance(item, Name):
                client.named(item)
            elif isinstance(item, Replicate):
                client.view.forget()
                self.publish(b"REPLICATE", self.name)
            elif not isinstance(item, Ping | Server | Rows | Position):
                suffix = "USER_IP" if isinstance(item, UserIp) else ""
                self.publish(item.format(), self._channel(suffix))
        self._pass_on(message, frame)

    def _pass_on(self, message: bytes, frame: Frame) -> None:
        """Rows, positions and announcements, under the NAME they came with."""
        streams = [item.stream for item in frame.items if isinstance(item, Rows | Position)]
        if not streams and not any(isinstance(item, Server) for item in frame.items):
            return
        if any(isinstance(item, Command) and not isinstance(item, Server | Name | Position) for item in frame.items):
            kept = (b"SERVER ", b"NAME ", b"POSITION ", b"RDATA ")
            message = b"\n".join([line for line in message.split(b"\n") if line.startswith(kept)])
        self.publish(message, self._channel(self._subchannels.get(streams[0], "") if streams else ""))

    def _channel(self, suffix: str) -> str:
        return f"{self.name}/{suffix}" if suffix else self.name

    # -- members ----------------------------------------------------------------------------------------------

    def link(
        self,
        *,
        on_up: Callable[[], None],
        on_message: Callable[[str, bytes], None],
        on_down: Callable[[], None],
    ) -> LocalLink:
        """The link of a bus in this process."""
        return LocalLink(self, on_up=on_up, on_message=on_message, on_down=on_down)

    @property
    def listening(self) -> bool:
        """Whether it is open."""
        return self._server is not None

    def full(self) -> str | None:
        """Why a client that has just connected cannot stay; None if it can."""
        if self._server is None:
            return "server stopping"
        if self._relay is not None and not self._relay.connected:
            return "the link to Redis is down"
        if len(self._clients) > self.settings.tcp_clients:
            return f"too many clients: {self.settings.tcp_clients} (Settings.tcp_clients)"
        return None

    def knows(self, secret: bytes) -> bool:
        """Whether a client has shown the secret; in a time that does not tell how much of it was right."""
        return self._secret is None or hmac.compare_digest(secret, self._secret)

    @property
    def secured(self) -> bool:
        """Whether clients have to show a secret."""
        return self._secret is not None

    def statistics(self) -> dict[str, Any]:
        """Counters and levels, JSON-able. ``refused``: {why: how often} clients were cut off."""
        return {
            "clients": len(self._clients),
            "accepted": self.accepted,
            "messages": self.messages,
            "refused": dict(self.refused),
            "queue_bytes": max((client.queued_bytes for client in self._clients), default=0),
            "queue_bytes_peak": self.queue_bytes_peak,
            "redis": None if self._relay is None else self._relay.statistics(),
        }


class _Client(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: TcpServer) -> None:
        self.server = server
        self.name = "?"
        self.view = PlainView()
        self.gone = asyncio.Event()
        self.queued_bytes = 0
        self._queue: deque[tuple[bytes, int]] = deque()
        self._queued_commands = 0
        self._paused = self._ending = False
        self._native = False
        self._known = not server.secured
        self._splitter = FrameSplitter(server.settings.line_bytes)
        self._liveness = Liveness(server.settings, 0.0, 0.0)
        self._since = 0.0
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (of a stream's server)
        server, loop = self.server, asyncio.get_running_loop()
        self.transport, self._since = transport, loop.time()
        self._liveness = Liveness(server.settings, self._since, self._since)
        transport.set_write_buffer_limits(SOCKET_BYTES)
        server._clients[self] = None
        server.accepted += 1
        peer = transport.get_extra_info("peername")
        self.name = str(peer)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (why := server.full()) is not None:
            self.end(why)
        elif self._known:
            self._greet()
        else:
            self._splitter = FrameSplitter(HELLO_BYTES)

    def _greet(self) -> None:
        self._write(b"%b\nPING %d\n" % (Server(self.server.name).format(), int(time.time() * 1000)))

    def connection_lost(self, _error: Exception | None) -> None:
        self.server._clients.pop(self, None)
        self._queue.clear()
        self.gone.set()

    # -- what comes -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        try:
            if not self._known:
                data = self._hello(data)
            messages = self._splitter.feed(data) if self._known else []
            self._liveness.heard(asyncio.get_running_loop().time(), messages)
            for message in messages:
                if not self._ending:
                    self.server.received(self, message)
        except ParseError as error:
            self.end(f"{error}"[:300])

    def _hello(self, data: bytes) -> bytes:
        """AUTH must come first; gives what follows it."""
        self._first += data
        line, newline, rest = self._first.partition(b"\n")
        if not newline:
            if len(line) > HELLO_BYTES:
                raise ParseError(b"", "AUTH", "is needed first")
            return b""
        command, _, secret = line.partition(b" ")
        if command != b"AUTH" or not self.server.knows(secret.rstrip(b"\r")):
            # Not a word of what came: it may be a secret, a wrong one of this server, or a right one of another.
            self.end("AUTH failed: this server wants its secret first", why="wrong secret")
            return b""
        self._known, self._first = True, b""
        self._splitter = FrameSplitter(self.server.settings.line_bytes)
        self._greet()
        return rest

    def named(self, name: Name) -> None:
        """It says who it is. With an incarnation it is native, and hears every line."""
        self.name = name.instance
        self._native = self._native or name.incarnation is not None

    # -- what goes --------------------------------------------------------------------------------------------

    def hear(self, messages: Sequence[bytes], data: bytes, commands: int) -> None:
        """Send messages; ``data``: the same as bytes, ``commands`` lines."""
        if self._ending or not self._known:
            return
        if not self._native:
            data = b"".join([self.view.show(message) for message in messages])
            commands = data.count(b"\n")
        if data:
            self._write(data, commands)

    def _write(self, data: bytes, commands: int = 1) -> None:
        self._liveness.sent_at = asyncio.get_running_loop().time()
        if not self._paused:
            self.transport.write(data)
            return
        settings = self.server.settings
        self._queue.append((data, commands))
        self._queued_commands += commands
        self.queued_bytes += len(data)
        self.server.queue_bytes_peak = max(self.server.queue_bytes_peak, self.queued_bytes)
        if self._queued_commands > settings.tcp_queue_commands or self.queued_bytes > settings.tcp_queue_bytes:
            self.end("failed to keep up")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        while self._queue and not self._paused:
            data, commands = self._queue.popleft()
            self._queued_commands -= commands
            self.queued_bytes -= len(data)
            self.transport.write(data)

    def look(self, now: float, unix_ms: int) -> None:
        """Now and then: is it alive, and does it know that we are?"""
        if self._ending:
            return
        if not self._known:
            if now - self._since > HELLO:
                self.end("AUTH is needed first", why="no secret")
        elif self._liveness.gone(now):
            self.end(f"nothing heard for {self.server.settings.tcp_timeout:g} s", why="silent")
        elif line := self._liveness.ping(now, unix_ms):
            self._write(line)

    def end(self, reason: str, *, why: str | None = None, refused: bool = True) -> None:
        """Say why, and close; at once if it does not take that either."""
        if self._ending:
            return
        self._ending = True
        if refused and reason:
            self.server.refused[why or reason.partition(":")[0]] += 1
            log.info("client %s is cut off: %s", self.name, why or reason)
        self._queue.clear()
        self._queued_commands = self.queued_bytes = 0
        if reason:
            self.transport.write(b"%b\n" % Error(reason.replace("\n", " ")).format())
        # Closed while it still sends, the connection would be reset, and the reason lost with what was under way.
        if reason and self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        asyncio.get_running_loop().call_later(GOODBYE, self._cut)

    def _cut(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            # A reset: who has not closed its end by now would take half a closed connection for an open one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class LocalLink:
    """The link of a bus in the server's own process."""

    def __init__(
        self,
        server: TcpServer,
        *,
        on_up: Callable[[], None],
        on_message: Callable[[str, bytes], None],
        on_down: Callable[[], None],
    ) -> None:
        self._server = server
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._new = False
        self._lost: str | None = None
        self.connected = False
        self.reconnects = self.connects = 0

    async def start(self, *, required: bool) -> None:  # noqa: ARG002 - it is there or not
        """Take part. Raises ConfigError when the server is not open."""
        if not self._server.listening:
            raise ConfigError("open the TCP server before the bus: async with server, busrep.connect(server, ...)")
        self._join()

    def _join(self) -> None:
        self._server._members[self] = None
        self._new = self.connected = True
        self.connects += 1
        self._on_up()

    async def close(self) -> None:
        """Leave."""
        self._server._members.pop(self, None)
        self.connected = False

    async def subscribe(self, channel: str) -> None:
        """Everything is heard."""

    def reconnect(self, reason: str) -> None:
        """Begin anew, as after a lost connection."""
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """What was said, or should be heard, may be lost."""
        self._lost = reason
        if self.connected:
            self.connected = False
            self._server._members.pop(self, None)
            self._on_down()
            if self._server.listening:
                self.reconnects += 1
                self._join()

    def hear(self, message: bytes) -> None:
        """A message, this member's own included."""
        self._on_message(self._server.name, message)

    async def open_publisher(self) -> bool:
        """Whether it joined (again) since the last call. Raises Unavailable when the server is closed."""
        if not self.connected:
            raise Unavailable("the TCP server", self._lost or "not open")
        new, self._new = self._new, False
        return new

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """To all. Raises Unavailable when the server is closed."""
        if not self.connected:
            raise Unavailable("the TCP server", self._lost or "not open")
        for channel, data in messages:
            self._server.publish(data, channel)

    def statistics(self) -> dict[str, object]:
        """Counters, JSON-able."""
        return {
            "connected": self.connected,
            "reconnects": self.reconnects,
            "publisher_connects": self.connects,
            "last_error": self._lost,
        }


def _check_exposure(host: str, secret: str | None, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host == "localhost":
        return
    if tls is None or (secret is None and tls.verify_mode != ssl.CERT_REQUIRED):
        raise ConfigError(
            f"listening on {host!r} lets others in: beyond loopback it takes TLS, and a secret or client certificates"
        )
