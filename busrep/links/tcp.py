"""The client's end of direct TCP: one connection that is both subscription and publisher (protocol.md, section 7)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Unpack
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from busrep.core.commands import Error, Name, Server, parse
from busrep.core.direct import CLOSING, FrameSplitter, Liveness, join_messages
from busrep.errors import ConfigError, ParseError, Unavailable
from busrep.settings import Settings
from busrep.urls import check_url

from .link import Link, LinkEvents, run_until_first

log = logging.getLogger("busrep.tcp")

FORM = "tcp://host:port, tcps://:secret@host:port, or tcps://host:port?ca=FILE&cert=FILE&key=FILE"
DEFAULT_PORT = 8823
SCHEMES = ("tcp", "tcps")

# Bytes read at a time; more than a frame, so that one is seldom cut in two.
READ_BYTES = 2**18

# Longest pause between two tries (protocol.md, section 7): who was cut off for being slow is back soon. A connection
# that stood for less counts as one more failure: who is cut off again and again does not come back at once each time.
SLOWEST = 1.0

# The longest secret: it has to fit the longest line that a server takes before it has seen it.
SECRET_BYTES = 1_000

# A line that shows a secret: neither side passes on, or quotes, one that is said to it.
AUTH_LINE = re.compile(rb"^AUTH(?: .*)?(?:\n|\Z)", re.MULTILINE)
ERROR_LINE = re.compile(rb"^ERROR(?: (.*))?(?:\n|\Z)", re.MULTILINE)


def check_secret(secret: str | None) -> None:
    """Raises ConfigError, which does not show it, for what does not fit a line, or protects nothing."""
    if secret is not None and not (secret.strip() and secret.isprintable() and len(secret.encode()) <= SECRET_BYTES):
        raise ConfigError(f"secret: 1 to {SECRET_BYTES} bytes of printable characters are needed")


def no_passphrase() -> str:
    """In place of OpenSSL's own way, which asks at the terminal: a service would hang."""
    raise ConfigError("TLS: the key file wants a passphrase; store it without one, readable by the service alone")


@attrs.frozen
class TcpAddress:
    """Where a TCP server listens, and what to show it: pass it, or its URL, to ``connect()`` in place of Redis's.

    ``secret``: the server's, if it wants one. ``tls``: a client's SSLContext; None for a plain connection. Raises
    ConfigError for a port or a secret that is none.
    """

    host: str
    port: int = DEFAULT_PORT
    secret: str | None = attrs.field(default=None, repr=False, validator=lambda _self, _at, value: check_secret(value))
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str) -> TcpAddress:
        """The address of a ``tcp://`` or ``tcps://`` URL. Raises ConfigError, which does not show the secret."""
        check_url(url, "the TCP address", FORM)
        try:
            parts = urlsplit(url)
            host, secret = parts.hostname, parts.password
            port = DEFAULT_PORT if parts.port is None else parts.port
            options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        except ValueError:  # its text may quote the secret
            raise ConfigError(f"a bad TCP address: use {FORM}, special characters of the secret as %XX") from None
        if not host or parts.path.strip("/") or parts.username or not options.keys() <= {"ca", "cert", "key"}:
            raise ConfigError(f"a bad TCP address: use {FORM}, special characters of the secret as %XX")
        if parts.scheme not in SCHEMES or (parts.scheme == "tcp" and options):
            raise ConfigError(f"tcp:// takes no certificates, tcps:// does: use {FORM}")
        tls = client_tls(**options) if parts.scheme == "tcps" else None
        return cls(host, port, unquote(secret) if secret else None, tls)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.port <= 65_535:
            raise ConfigError(f"a bad TCP address: port {self.port}")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tcps' if self.tls else 'tcp'}://{host}:{self.port}"


def client_tls(*, ca: str | None = None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """A client's context: ``ca``: file of the authority to trust (the system's without); ``cert`` and ``key``: files to
    show the server, if it wants a client certificate. Raises ConfigError for files that cannot be read."""
    if key is not None and cert is None:
        raise ConfigError(f"TLS: key={key} without cert")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key, no_passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS: {error} (ca={ca}, cert={cert}, key={key})") from None
    return context


class TcpLink(Link):
    """Keeps one connection to a TCP server, and publishes over it.

    ``name``: the deployment's, which the server must have too. ``identity()`` gives who this process is, and its
    incarnation.
    """

    LOG = log
    TROUBLE = (OSError, EOFError, ConfigError, ParseError, Unavailable, UnicodeError)
    SLOWEST = SLOWEST

    def __init__(
        self,
        address: TcpAddress,
        name: str,
        settings: Settings,
        *,
        identity: Callable[[], Name],
        **events: Unpack[LinkEvents],
    ) -> None:
        super().__init__(f"the TCP server at {address}", settings, **events)
        self._address, self._name, self._identity = address, name, identity
        self._writer: asyncio.StreamWriter | None = None
        self._new = False
        self._liveness = Liveness(settings, 0.0, 0.0)

    def _translated(self, error: BaseException) -> BaseException:
        match error:
            case ssl.SSLError():
                return ConfigError(f"TLS with {self._address}: {error}")
            case UnicodeError():
                return ConfigError(f"{self._address.host!r} is no host name: {error}")
            case ParseError():
                return ConfigError(f"what listens at {self._address} is no server of this protocol: {error}")
            case OSError() | EOFError():
                return Unavailable(self._server, error)
        return error

    async def close(self) -> None:
        """Say that nothing more comes, and close the connection when the server has taken all that was sent (within
        ``shutdown_timeout``)."""
        self.tasks.closed = True
        if self.tasks and self._writer is not None:
            # Closed with something unread, the connection would be reset, and with it go our own last words.
            with contextlib.suppress(OSError, RuntimeError):
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                else:
                    self._writer.write(CLOSING)
            await asyncio.wait(self.tasks, timeout=self._settings.shutdown_timeout)
        await super().close()

    def reconnect(self, reason: str) -> None:
        """Give the connection up and make a new one."""
        self.last_error = reason
        if self._writer is not None:
            self._writer.transport.abort()

    async def _connect_once(self) -> None:
        address, settings = self._address, self._settings
        writer = None
        splitter = FrameSplitter(settings.line_bytes)
        try:
            async with _deadline(settings.redis_timeout):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls, limit=READ_BYTES
                )
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # At once: a server that wants a secret says nothing before, and without one refuses this.
                secret = b"" if address.secret is None else b"AUTH %b\n" % address.secret.encode()
                writer.write(b"%b%b\nPING %d\n" % (secret, self._identity().format(), _unix_ms()))
                first = await self._greeting(reader, splitter, writer)
            now = asyncio.get_running_loop().time()
            self._liveness = Liveness(settings, now, now)
            self._liveness.heard(now, first)
            self._writer, self._new = writer, True
            self.publisher_connects += 1
            self._stands()
            self._take(first[1:])
            await run_until_first(self._read(reader, splitter), self._ping(writer))
        finally:
            self._writer = None
            if writer is not None:
                writer.transport.abort()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _greeting(
        self, reader: asyncio.StreamReader, splitter: FrameSplitter, writer: asyncio.StreamWriter
    ) -> list[bytes]:
        """What the server says first: SERVER with the name that is expected, else ConfigError."""
        while not (messages := splitter.feed(await _read(reader))):
            pass
        self._refused(messages)
        opening = messages[0].partition(b"\n")[0]
        with contextlib.suppress(ParseError):
            if isinstance(line := parse(opening), Server) and line.name == self._name:
                return messages
        # Outside of the block above: an error raised there would refer to the one that shows the secret.
        shown = self._hide_secret(opening)
        line = parse(shown)
        other = line.name if isinstance(line, Server) else f"no SERVER line but {shown!r:.100}"
        text = f"the server at {self._address} is {other!r}, not {self._name!r}"
        writer.write(b"%b\n" % Error(f"wrong server: {self._name} was expected").format())
        with contextlib.suppress(OSError):
            await writer.drain()
        raise ConfigError(f"{text}: connect() takes the name under which it serves")

    def _refused(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            if found := ERROR_LINE.search(message):
                said = found[1] or b""
                text = self._hide_secret(said).decode("utf-8", "replace")
                if said.startswith(b"AUTH"):
                    raise ConfigError(f"the server at {self._address} refuses this process: {text}")
                raise Unavailable(self._server, f"it says: {text}")

    def _hide_secret(self, said: bytes) -> bytes:
        """What the other side said, for an error: what is no server of ours may quote what it was told."""
        secret = self._address.secret
        return said if secret is None else said.replace(secret.encode(), b"***")

    async def _read(self, reader: asyncio.StreamReader, splitter: FrameSplitter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            messages = splitter.feed(await _read(reader))
            self._liveness.heard(clock(), messages)
            self._take(messages)

    def _take(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            if self.tasks.closed:
                return  # read only so that the connection ends in order
            if b"AUTH" in message:
                message = AUTH_LINE.sub(b"", message)  # no server says that, and whoever cannot read a line quotes it
            if b"ERROR" in message:
                self._refused([message])
            self.on_message(self._name, message)

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        clock, settings = asyncio.get_running_loop().time, self._settings
        while True:
            await asyncio.sleep(min(settings.tcp_ping, settings.tcp_timeout) / 4)
            if self._liveness.gone(clock()):
                raise TimeoutError(f"nothing heard for {settings.tcp_timeout:g} s")
            if not self.tasks.closed and (line := self._liveness.ping(clock(), _unix_ms())):
                writer.write(line)

    # -- publishing -------------------------------------------------------------------------------------------

    async def open_publisher(self) -> bool:
        """Whether the connection is a new one since the last call. Raises Unavailable when there is none."""
        self._open_writer()
        new, self._new = self._new, False
        return new

    def _open_writer(self) -> asyncio.StreamWriter:
        if self._writer is None or self.tasks.closed:
            raise Unavailable(self._server, self.last_error or "not connected")
        return self._writer

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Send all in order. Raises Unavailable: it is unknown which of them arrived, and the connection is given up.

        What is sent may still be lost with the connection: then it stands in the table, and the announcement that
        follows each connect tells the readers.
        """
        writer = self._open_writer()
        try:
            async with _deadline(self._settings.redis_timeout):
                writer.write(join_messages([data for _, data in messages]))
                self._liveness.sent_at = asyncio.get_running_loop().time()
                await writer.drain()
        except OSError as error:
            writer.transport.abort()
            self._note(error)
            raise Unavailable(self._server, error) from error


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError:
        if deadline.expired():
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(READ_BYTES)
    if not data:
        raise EOFError("the server closed the connection")
    return data


def _unix_ms() -> int:
    return int(time.time() * 1000)


def identity_of(writer: str | None, reader: str | None, incarnation: int | None) -> Name:
    """Who this process is, for a server's list of clients; the incarnation tells it that we are native."""
    name = writer or reader or f"{socket.gethostname()}:{os.getpid()}"
    return Name(name, incarnation if incarnation is not None else time.time_ns())
