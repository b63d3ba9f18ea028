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
import re
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import redis.asyncio as aioredis

from busrep.core.commands import NAME_BYTES, Name, Ping, Position, Replicate, Server, UserIp
from busrep.core.direct import CLOSING, join_messages
from busrep.core.framing import Frame, Rows, parse_message
from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.streams import Stream

from ..runtime.tasks import spawn, stop
from .redis import RedisLink
from .tcp import AUTH_LINE, DEFAULT_PORT, check_secret, no_passphrase
from .tcp_connection import GOODBYE, SHOWN, SOCKET_BYTES, Connection
from .tcp_local import LocalLink

log = logging.getLogger("busrep.tcp")

# Connections that have not shown yet who they are, at a time. Of more the oldest one goes: who knows the secret shows
# it within milliseconds.
STRANGERS = 100

# Messages that share a pipeline to Redis.
RELAYED_AT_ONCE = 256

# The head of a row or a position, up to its stream.
HEAD_BYTES = len(b"POSITION ") + NAME_BYTES + 1

_ERROR = re.compile(rb"^ERROR(?: .*)?(?:\n|\Z)", re.MULTILINE)


def server_tls(cert: str, key: str | None = None, *, client_ca: str | None = None) -> ssl.SSLContext:
    """A server's context: files of its certificate and key; ``client_ca``: clients must show a certificate that this
    authority signed. Raises ConfigError for files that cannot be read, and a key that wants a passphrase."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, no_passphrase)
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
        Server(name).format()  # ConfigError for what cannot be said to clients
        if not 0 <= port <= 65_535:
            raise ConfigError(f"port={port}: 0 to 65535")
        check_secret(secret)
        _check_exposure(host, secret, tls)
        self.name, self.host, self.port, self.tls = name, host, port, tls
        self.settings = settings or Settings()
        self._secret = None if secret is None else secret.encode()
        self._subchannels = {stream.name: stream.channel for stream in streams}
        self._server: asyncio.Server | None = None
        self._strangers: dict[Connection, None] = {}
        self._clients: dict[Connection, None] = {}
        self._leaving: dict[Connection, None] = {}
        self._members: dict[LocalLink, None] = {}
        self._fresh: list[bytes] = []  # to send out in this turn of the loop
        self._outbox: deque[tuple[str, bytes]] = deque()  # for Redis
        self._outbox_bytes = 0
        self._wake, self._relayed = asyncio.Event(), asyncio.Event()
        self._relayed.set()
        self._unheard: tuple[bytes, float] | None = None  # published, due to be heard back, since
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.refused: Counter[str] = Counter()
        self.accepted = self.messages = self.dropped = self.errors_heard = 0
        self.queue_bytes_peak = self._own_bytes = 0
        self._relay: RedisLink | None = None
        self._channels = dict.fromkeys(map(self._channel, ("", "USER_IP", *self._subchannels.values())))
        if redis is not None:
            self._relay = RedisLink(
                redis,
                self._channels,
                self.settings,
                on_up=self._redis_back,
                on_message=lambda _, data: self._from_redis(data),
                on_down=self._redis_lost,
            )

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the Redis that is relayed, and listen. Raises ConfigError for an address that cannot be had,
        Unavailable."""
        loop = asyncio.get_running_loop()
        try:
            if self._relay is not None:
                await self._relay.start(required=True)
            self._server = await loop.create_server(lambda: Connection(self), self.host, self.port, backlog=512)
        except (OSError, UnicodeError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {reason}") from None
        except BaseException:
            await self.close()
            raise
        self.port = self._server.sockets[0].getsockname()[1]
        spawn(self.tasks, self._keep_alive(), "busrep-tcp-alive")
        if self._relay is not None:
            spawn(self.tasks, self._keep_relaying(), "busrep-tcp-relay")

    async def close(self) -> None:
        """Tell the clients, publish what they said (within ``shutdown_timeout``), end all connections. May be
        repeated."""
        was_open = self._server is not None
        if self._server is not None:
            self._server.close()
            self._server = None
        self._flush()
        self.cut("server stopping", refused=False)
        for stranger in list(self._strangers):
            stranger.end("server stopping", refused=False)
        gone = [asyncio.ensure_future(one.gone.wait()) for one in self._leaving]
        if gone:
            await asyncio.wait(gone, timeout=2 * GOODBYE)
        await stop([one for one in gone if not one.done()], GOODBYE)
        if was_open and self._relay is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.shutdown_timeout):
                    await self.relayed()
        await stop(list(self.tasks), self.settings.shutdown_timeout)
        self._drop_outbox()
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
            self._look(clock())

    def _look(self, now: float) -> None:
        unix_ms = int(time.time() * 1000)
        for connection in [*self._clients, *self._strangers]:
            connection.look(now, unix_ms)
        self._check_relay(now)

    # -- messages ---------------------------------------------------------------------------------------------

    def deliver(self, message: bytes) -> None:
        """Give a message to every client and member, with all others of this turn of the loop."""
        self.messages += 1
        if b"ERROR" in message:
            message = _ERROR.sub(b"", message)  # of a connection that is not theirs: they would give theirs up
        if not message:
            return
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(message)

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        for some in _portions(fresh):
            data, commands = join_messages(some), sum(message.count(b"\n") + 1 for message in some)
            for client in list(self._clients):
                client.hear(some, data, commands)
            for member in list(self._members):
                for message in some:
                    member.hear(message)

    def publish(self, message: bytes, channel: str) -> None:
        """A client or member says something: to all, over Redis if there is one. Look at ``congested`` first."""
        if self._relay is None:
            self.deliver(message)
            return
        self._outbox.append((channel, message))
        self._outbox_bytes += len(message)
        self._relayed.clear()
        self._wake.set()

    def cut(self, reason: str, *, refused: bool = True) -> None:
        """End the connections of all clients: what they said, or should hear, may be lost, and so they begin anew."""
        for client in list(self._clients):
            client.end(reason, refused=refused)
        for member in list(self._members):
            member.lose(reason)

    def received(self, client: Connection, message: bytes) -> None:
        """What a client sent. Raises ParseError for what is not of the protocol."""
        if b"AUTH" in message:
            message = AUTH_LINE.sub(b"", message)  # not wanted, or not again, and never quoted
        goodbye = _ERROR.search(message) if b"ERROR" in message else None
        if goodbye is not None:
            message = message[: goodbye.start()]
        frame = parse_message(message, self.settings)
        if frame.errors:
            raise frame.errors[0]
        for channel, part in self._said(client, message, frame):
            if self.congested:
                client.end("Redis cannot keep up")
                return
            self.publish(part, channel)
        if goodbye is not None:
            if goodbye[0].rstrip(b"\n") != CLOSING.rstrip(b"\n"):
                self.errors_heard += 1
                log.info("client %s says: %r", client.name, goodbye[0][:SHOWN])
            client.end("")

    def _said(self, client: Connection, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """What is to be passed on of a client's message: (channel, message)."""
        asks = False
        for item in frame.items:
            if isinstance(item, Server | Name):
                text = item.name if isinstance(item, Server) else item.instance
                if isinstance(item, Name):
                    client.named(item)
                elif text != self.name:
                    client.end(f"wrong name: this server is {self.name!r}, not {text[:SHOWN]!r}")
                    return
            elif isinstance(item, Replicate):
                asks = True  # one question is answered as well as many
            elif not isinstance(item, Ping | Rows | Position):
                yield self._channel("USER_IP" if isinstance(item, UserIp) else ""), item.format()
        yield from self._facts(message, frame)
        if asks:
            client.view.forget()
            yield self.name, b"REPLICATE"

    def _facts(self, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """Rows, positions and announcements, under the NAME they came with, for each channel."""
        streams = dict.fromkeys(item.stream for item in frame.items if isinstance(item, Rows | Position))
        if not streams and not any(isinstance(item, Server) for item in frame.items):
            return
        suffixes = dict.fromkeys(self._subchannels.get(stream, "") for stream in streams) or {"": None}
        if len(suffixes) == 1 and all(isinstance(item, Server | Name | Position | Rows) for item in frame.items):
            yield self._channel(next(iter(suffixes))), message
            return
        wanted = {
            (command, stream.encode()): self._subchannels.get(stream, "")
            for stream in streams
            for command in (b"POSITION", b"RDATA")
        }
        kept: dict[str, list[bytes]] = {suffix: [] for suffix in suffixes}
        for line in message.split(b"\n"):
            command, *stream = line[:HEAD_BYTES].split(b" ", 2)[:2]
            if command in (b"SERVER", b"NAME"):
                for lines in kept.values():
                    lines.append(line)
            elif stream and (suffix := wanted.get((command, stream[0]))) is not None:
                kept[suffix].append(line)
        for suffix, lines in kept.items():
            yield self._channel(suffix), b"\n".join(lines)

    def _channel(self, suffix: str) -> str:
        return f"{self.name}/{suffix}" if suffix else self.name

    # -- Redis ------------------------------------------------------------------------------------------------

    def _from_redis(self, data: bytes) -> None:
        if self._unheard is not None and data == self._unheard[0]:
            self._unheard = None
        settings = self.settings
        if len(data) > settings.message_bytes or not _is_utf8(data):
            self.dropped += 1  # as everybody on Redis does
            return
        if _has_line_over(settings.line_bytes, data):
            # Only dropped, it would be missed by nobody; but who begins anew asks for the positions, and fetches it.
            self.dropped += 1
            self.cut(f"a line over {settings.line_bytes} bytes came over Redis", refused=False)
            return
        self.deliver(data)

    def _redis_back(self) -> None:
        self._unheard = None  # what was published before will not be heard

    def _redis_lost(self) -> None:
        self.cut("the link to Redis was lost")

    async def _keep_relaying(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                some = [self._outbox.popleft() for _ in range(min(len(self._outbox), RELAYED_AT_ONCE))]
                self._outbox_bytes -= sum(len(data) for _, data in some)
                try:
                    await self._relay_some(some)
                except Exception as error:
                    if not isinstance(error, Unavailable):  # a bug; a relay that is deaf would be worse
                        log.exception("publishing failed")
                    # Whether these arrived is unknown, as is what clients said meanwhile: they say it anew.
                    self._unheard = None
                    self._drop_outbox()
                    self.cut(f"the link to Redis was lost: {error}")
            self._relayed.set()

    async def _relay_some(self, some: list[tuple[str, bytes]]) -> None:
        relay = self._relay
        assert relay is not None  # noqa: S101 (started with one)
        await relay.open_publisher()
        if self._unheard is None and relay.connected:
            heard = [data for channel, data in some if channel in self._channels]
            if heard:
                self._unheard = (heard[-1], asyncio.get_running_loop().time())
        await relay.publish(some)

    def _check_relay(self, now: float) -> None:
        """As a bus on Redis misses its own echo: the two connections may have ended up on different servers."""
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        if self._relay is not None and self._unheard is not None and now - self._unheard[1] > bound:
            self._unheard = None
            self._relay.reconnect("what is published is not heard back")

    def _drop_outbox(self) -> None:
        self._outbox.clear()
        self._outbox_bytes = 0
        self._relayed.set()

    @property
    def congested(self) -> bool:
        """Whether so much waits for Redis that nothing more is taken."""
        return self._outbox_bytes > self.settings.tcp_queue_bytes

    async def relayed(self) -> None:
        """Wait until nothing waits for Redis: it is there, or lost, and all were told so."""
        await self._relayed.wait()

    async def subscribe(self, channel: str) -> None:
        """Hear one more of Redis's channels."""
        if self._relay is not None:
            self._channels[channel] = None
            await self._relay.subscribe(channel)

    # -- connections ------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> None:
        """It is accepted, and has shown nothing yet."""
        self.accepted += 1
        self._strangers[connection] = None
        if self._server is None:
            connection.end("server stopping", refused=False)
        elif len(self._strangers) > STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.end(f"too many strangers: {STRANGERS} are here that have not shown who they are")

    def admitted(self, connection: Connection) -> None:
        """It is a client now."""
        self._strangers.pop(connection, None)
        self._clients[connection] = None

    def leaving(self, connection: Connection) -> None:
        """It has been told to go."""
        self._strangers.pop(connection, None)
        self._clients.pop(connection, None)
        self._leaving[connection] = None

    def left(self, connection: Connection) -> None:
        """It is gone."""
        self.leaving(connection)
        del self._leaving[connection]

    def queued(self, connection: Connection, own: int) -> None:
        """``own`` bytes more wait for it that no other client has too. What native clients wait for they share; the
        others must not come to a multiple of the bound either."""
        self.queue_bytes_peak = max(self.queue_bytes_peak, connection.queued_bytes)
        self._own_bytes += own
        if own > 0 and self._own_bytes > self.settings.tcp_queue_bytes:
            max(self._clients, key=lambda client: client.own_bytes).fall_behind()

    def full(self) -> str | None:
        """Why one more client cannot stay; None if it can."""
        if (why := self.down()) is not None:
            return why
        if len(self._clients) >= self.settings.tcp_clients:
            return f"too many clients: {self.settings.tcp_clients} (Settings.tcp_clients)"
        return None

    def down(self) -> str | None:
        """Why nobody can take part now; None if they can."""
        if self._server is None:
            return "server stopping"
        if self._relay is not None and not self._relay.connected:
            return "the link to Redis is down"
        return None

    def knows(self, secret: bytes) -> bool:
        """Whether a client has shown the secret; in a time that does not tell how much of it was right."""
        return self._secret is None or hmac.compare_digest(secret, self._secret)

    @property
    def secured(self) -> bool:
        """Whether clients have to show a secret."""
        return self._secret is not None

    @property
    def listening(self) -> bool:
        """Whether it is open."""
        return self._server is not None

    # -- members ----------------------------------------------------------------------------------------------

    def link(
        self,
        channels: Iterable[str],
        *,
        on_up: Callable[[], None],
        on_message: Callable[[str, bytes], None],
        on_down: Callable[[], None],
    ) -> LocalLink:
        """The link of a bus in this process, to these channels of Redis's."""
        return LocalLink(self, channels, on_up=on_up, on_message=on_message, on_down=on_down)

    def joined(self, member: LocalLink) -> None:
        """It takes part."""
        self._members[member] = None

    def parted(self, member: LocalLink) -> None:
        """It does not any more."""
        self._members.pop(member, None)

    def statistics(self) -> dict[str, Any]:
        """Counters and levels, JSON-able. ``refused``: {why: how often} clients were cut off; ``errors_heard``: clients
        that left with an ERROR; ``dropped``: messages from Redis that are not of the protocol."""
        return {
            "clients": len(self._clients),
            "strangers": len(self._strangers),
            "leaving": len(self._leaving),
            "accepted": self.accepted,
            "messages": self.messages,
            "refused": dict(self.refused),
            "errors_heard": self.errors_heard,
            "dropped": self.dropped,
            "queue_bytes": max((client.queued_bytes for client in self._clients), default=0),
            "queue_bytes_peak": self.queue_bytes_peak,
            "redis": None if self._relay is None else self._relay.statistics(),
        }


def _portions(messages: list[bytes]) -> Iterator[list[bytes]]:
    """The messages in portions, so that no more than one of them, and a message, stands in a socket that is full."""
    portion: list[bytes] = []
    size = 0
    for message in messages:
        portion.append(message)
        size += len(message)
        if size >= SOCKET_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _has_line_over(most: int, data: bytes) -> bool:
    """Whether a line has more bytes than that. Without a list of the lines, which may be millions."""
    start = 0
    while len(data) - start > most:
        newline = data.rfind(b"\n", start, start + most + 1)
        if newline < 0:
            return True
        start = newline + 1
    return False


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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
