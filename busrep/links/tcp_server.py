"""The server's end of direct TCP: everybody hears everybody, as on a Redis channel (protocol.md, section 7).

A server stands alone, or in front of a Redis (a relay), whose channel its clients then speak and hear through it. A bus
in the server's own process takes part without a socket: pass the server to ``connect()``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Iterable
from typing import Any, Unpack

import redis.asyncio as aioredis

from busrep.core.commands import Name, Replicate, Server
from busrep.core.direct import CLOSING
from busrep.core.framing import Frame, parse_message
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.streams import Stream

from ..runtime.tasks import spawn, stop, wait_until_set
from .link import LinkEvents
from .tcp import AUTH_LINE, DEFAULT_PORT, check_secret, log, no_passphrase
from .tcp_clients import Clients
from .tcp_connection import SHOWN, Connection
from .tcp_local import LocalLink
from .tcp_relay import Relay
from .tcp_routes import Routes

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
        self._routes = Routes(name, {stream.name: stream.channel for stream in streams})
        self._server: asyncio.Server | None = None
        self.clients = Clients(self.settings)
        self._members: dict[LocalLink, None] = {}
        self._fresh: list[bytes] = []  # to send out in this turn of the loop
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.messages = self.errors_heard = 0
        self.relay = None if redis is None else Relay(self, redis, self._routes.channels())

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the Redis that is relayed, and listen. Raises ConfigError for an address that cannot be had,
        Unavailable."""
        loop = asyncio.get_running_loop()
        try:
            if self.relay is not None:
                await self.relay.link.start(required=True)
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
        if self.relay is not None:
            spawn(self.tasks, self.relay.keep_publishing(), "busrep-tcp-relay")

    async def close(self) -> None:
        """Tell the clients, publish what they said (within ``shutdown_timeout``), end all connections. May be
        repeated."""
        was_open = self._server is not None
        if self._server is not None:
            self._server.close()
            self._server = None
        self._flush()
        self.cut("server stopping", refused=False)
        await self.clients.end_all("server stopping")
        if was_open and self.relay is not None:
            await wait_until_set(self.relay.idle, self.settings.shutdown_timeout)
        await stop(list(self.tasks), self.settings.shutdown_timeout)
        if self.relay is not None:
            await self.relay.close()

    async def __aenter__(self) -> TcpServer:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _keep_alive(self) -> None:
        clock, settings = asyncio.get_running_loop().time, self.settings
        while True:
            await asyncio.sleep(min(settings.tcp_ping, settings.tcp_timeout) / 4)
            self.clients.check(clock())
            if self.relay is not None:
                self.relay.check(clock())

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
        self.clients.hear(fresh)
        for member in list(self._members):
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
        self.clients.end(reason, refused=refused)
        for member in list(self._members):
            member.reconnect(reason)

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
        self._introduced(client, frame)
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

    def _introduced(self, client: Connection, frame: Frame) -> None:
        """What a message says of the client, and of what it knows."""
        for item in frame.items:
            if isinstance(item, Name):
                client.named(item)
            elif isinstance(item, Replicate):
                client.view.forget()
            elif isinstance(item, Server) and item.name != self.name:
                client.end(f"wrong name: this server is {self.name!r}, not {item.name[:SHOWN]!r}")
                return

    # -- connections ------------------------------------------------------------------------------------------

    def full(self) -> str | None:
        """Why one more client cannot stay; None if it can."""
        return self.down() or self.clients.full()

    def down(self) -> str | None:
        """Why nobody can take part now; None if they can."""
        if self._server is None:
            return "server stopping"
        if self.relay is not None and not self.relay.link.connected:
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

    def link(self, channels: Iterable[str], **events: Unpack[LinkEvents]) -> LocalLink:
        """The link of a bus in this process, to these channels of Redis's."""
        return LocalLink(self, channels, **events)

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
            **self.clients.statistics(),
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
