"""The server's end of direct TCP: everybody hears everybody, as on a Redis channel (protocol.md, section 7).

A server stands alone, or in front of a Redis (a relay), whose channel its clients then speak and hear through it. A bus
in the server's own process takes part without a socket: pass the server to ``connect()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import ssl
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import redis.asyncio as aioredis

from busrep.core.commands import Name, Replicate, Server
from busrep.core.direct import CLOSING, join_messages
from busrep.core.framing import parse_message
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.streams import Stream

from ..runtime.tasks import Tasks, stop, wait_until_set
from .tcp import AUTH_LINE, DEFAULT_PORT, ERROR_LINE, check_secret, log, no_passphrase
from .tcp_connection import GOODBYE, SHOWN, SOCKET_BYTES, Connection
from .tcp_relay import LocalLink, Relay, Routes

# Connections that have not shown yet who they are, at a time. Of more the oldest one goes: who knows the secret shows
# it within milliseconds.
STRANGERS = 100


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
        self._routes = Routes(name, {stream.name: stream.channel for stream in streams})
        self.listener: asyncio.Server | None = None
        self.strangers: dict[Connection, None] = {}
        self.clients: dict[Connection, None] = {}
        self.leaving: dict[Connection, None] = {}
        self.members: dict[LocalLink, None] = {}  # buses in this process
        self.refused: Counter[str] = Counter()
        self.accepted = self.queue_bytes_peak = self.own_bytes = 0
        self._fresh: list[bytes] = []  # to send out in this turn of the loop
        self.tasks = Tasks(self.settings)
        self.messages = self.errors_heard = 0
        self.relay = None if redis is None else Relay(self, redis, self._routes.channels())

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the Redis that is relayed, and listen. Raises ConfigError for an address that cannot be had,
        Unavailable."""
        loop, self.tasks.closed = asyncio.get_running_loop(), False
        try:
            if self.relay is not None:
                await self.relay.link.start(required=True)
            self.listener = await loop.create_server(lambda: Connection(self), self.host, self.port, backlog=512)
        except (OSError, UnicodeError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {reason}") from None
        except BaseException:
            await self.close()
            raise
        self.port = self.listener.sockets[0].getsockname()[1]
        self.tasks.spawn(self._keep_alive, "tcp-alive", again=True)
        if self.relay is not None:
            self.tasks.spawn(self.relay.keep_publishing, "tcp-relay", again=True)

    async def close(self) -> None:
        """Tell the clients, publish what they said (within ``shutdown_timeout``), end all connections. May be
        repeated."""
        was_open = self.listener is not None
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self._flush()
        self.cut("server stopping", refused=False)
        for stranger in list(self.strangers):
            stranger.end("server stopping", refused=False)
        gone = [asyncio.ensure_future(one.gone.wait()) for one in self.leaving]
        if gone:
            await asyncio.wait(gone, timeout=2 * GOODBYE)
        await stop([one for one in gone if not one.done()], GOODBYE)
        if was_open and self.relay is not None:
            await wait_until_set(self.relay.idle, self.settings.shutdown_timeout)
        await self.tasks.stop(self.settings.shutdown_timeout)
        if self.relay is not None:
            await self.relay.close()

    async def __aenter__(self) -> TcpServer:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(min(self.settings.tcp_ping, self.settings.tcp_timeout) / 4)
            self._look(asyncio.get_running_loop().time())

    def _look(self, now: float) -> None:
        # Apart from the loop above, which would hold on to the last connection until the next round.
        for connection in [*self.clients, *self.strangers]:
            connection.look(now)
        if self.relay is not None:
            self.relay.check(now)

    # -- messages ---------------------------------------------------------------------------------------------

    def deliver(self, message: bytes) -> None:
        """Give a message to every client and member, with all others of this turn of the loop."""
        self.messages += 1
        if b"ERROR" in message:
            message = ERROR_LINE.sub(b"", message)  # of a connection that is not theirs: they would give theirs up
        if not message:
            return
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(message)

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        for some in _portions(fresh):
            data, commands = join_messages(some), sum(message.count(b"\n") + 1 for message in some)
            for client in list(self.clients):
                client.hear(some, data, commands)
        for member in list(self.members):
            for message in fresh:
                member.hear(message)

    def publish(self, message: bytes, channel: str) -> None:
        """A client or member says something: to all, over Redis if there is one. Look at ``congested`` first."""
        if self.relay is None:
            self.deliver(message)
        else:
            self.relay.publish(message, channel)

    def cut(self, reason: str, *, refused: bool = True) -> None:
        """End the connections of all clients: what they said, or should hear, may be lost, and so they begin anew."""
        for client in list(self.clients):
            client.end(reason, refused=refused)
        for member in list(self.members):
            member.reconnect(reason)

    def received(self, client: Connection, message: bytes) -> None:
        """What a client sent. Raises ParseError for what is not of the protocol."""
        if b"AUTH" in message:
            message = AUTH_LINE.sub(b"", message)  # not wanted, or not again, and never quoted
        goodbye = ERROR_LINE.search(message) if b"ERROR" in message else None
        if goodbye is not None:
            message = message[: goodbye.start()]
        frame = parse_message(message, self.settings)
        if frame.errors:
            raise frame.errors[0]
        for item in frame.items:  # what the message says of the client, and of what the client knows
            if isinstance(item, Name):  # a client with an incarnation is native, and hears every line
                client.name = repr(item.instance[:SHOWN])
                client.native = client.native or item.incarnation is not None
            elif isinstance(item, Replicate):
                client.view.forget()
            elif isinstance(item, Server) and item.name != self.name:
                client.end(f"wrong name: this server is {self.name!r}, not {item.name[:SHOWN]!r}")
                return
        for channel, part in self._routes.parts(message, frame):
            if self.relay is not None and self.relay.congested:
                client.end("Redis cannot keep up")
            if client.ending:
                return
            self.publish(part, channel)
        if goodbye is not None:
            if goodbye[0].rstrip(b"\n") != CLOSING.rstrip(b"\n"):
                self.errors_heard += 1
                log.info("client %s says: %r", client.name, goodbye[0][:SHOWN])
            client.end("")

    # -- connections ------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> None:
        """A connection is accepted, and has shown nothing yet."""
        self.accepted += 1
        self.strangers[connection] = None
        if len(self.strangers) > STRANGERS:
            oldest = next(iter(self.strangers))
            oldest.end(f"too many strangers: {STRANGERS} are here that have not shown who they are")

    def move(self, connection: Connection, group: dict[Connection, None] | None) -> None:
        """Move a connection to ``clients`` or ``leaving``; None: it is gone."""
        for each in (self.strangers, self.clients, self.leaving):
            each.pop(connection, None)
        if group is not None:
            group[connection] = None

    def queued(self, connection: Connection, own: int) -> None:
        """``own`` bytes more wait for a client that no other client has too. What native clients wait for they share;
        the others must not come to a multiple of the bound either."""
        self.queue_bytes_peak = max(self.queue_bytes_peak, connection.queued_bytes)
        self.own_bytes += own
        if own > 0 and self.own_bytes > self.settings.tcp_queue_bytes:
            max(self.clients, key=lambda client: client.own_bytes).end("failed to keep up")

    def full(self) -> str | None:
        """Why one more client cannot stay; None if it can."""
        if (why := self.down()) is None and len(self.clients) >= self.settings.tcp_clients:
            return f"too many clients: {self.settings.tcp_clients} (Settings.tcp_clients)"
        return why

    def down(self) -> str | None:
        """Why nobody can take part now; None if they can."""
        if self.listener is None:
            return "server stopping"
        if self.relay is not None and not self.relay.link.connected:
            return "the link to Redis is down"
        return None

    def knows(self, secret: bytes) -> bool:
        """Whether that is the secret, or none is needed; in a time that does not tell how much of it was right."""
        return self._secret is None or hmac.compare_digest(secret, self._secret)

    def statistics(self) -> dict[str, Any]:
        """Counters and levels, JSON-able. ``refused``: {why: how often} clients were cut off; ``errors_heard``: clients
        that left with an ERROR; ``dropped``: messages from Redis that are not of the protocol."""
        return {
            "clients": len(self.clients),
            "strangers": len(self.strangers),
            "leaving": len(self.leaving),
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "queue_bytes": max((client.queued_bytes for client in self.clients), default=0),
            "queue_bytes_peak": self.queue_bytes_peak,
            "messages": self.messages,
            "errors_heard": self.errors_heard,
            "dropped": 0 if self.relay is None else self.relay.dropped,
            "redis": None if self.relay is None else self.relay.link.statistics(),
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
