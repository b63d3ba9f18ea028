"""One connection to a TCP server: who is at the other end, what it may say, and what waits for it.

A connection is first a stranger, until TLS stands and the secret was shown; then a client; at last it is leaving: it
has been told why, and has a moment to take that. `TcpServer` knows who is which.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from busrep.core.commands import Error, Server
from busrep.core.direct import FrameSplitter, Liveness, PlainView
from busrep.errors import ParseError

if TYPE_CHECKING:
    from .tcp_server import TcpServer

log = logging.getLogger("busrep.tcp")

# Seconds that a client has to take the reason why it is cut off, and the ones it has to show who it is: for the
# handshake, and again for the secret.
GOODBYE, HELLO = 1.0, 5.0

# Bytes that may stand in a client's socket before what follows waits in the queue, where it is shared by all clients.
SOCKET_BYTES = 65_536

# The longest line before a client has shown the secret.
HELLO_BYTES = 1_024

# Bytes of a client's name, and of a reason, that are shown.
SHOWN = 100


class Connection(asyncio.Protocol):
    """One connection, from the moment it is accepted to its end."""

    transport: asyncio.Transport

    def __init__(self, server: TcpServer) -> None:
        self.server = server
        self.name = "?"
        self.view = PlainView()
        self.gone = asyncio.Event()
        self.queued_bytes = self.own_bytes = 0  # of all that waits, and of what no other client has too
        self._queue: deque[tuple[bytes, int, bool]] = deque()
        self._queued_commands = 0
        self._paused = self.native = self._spoken = False
        self.secured = self._known = False  # TLS stands, if it has to; the secret was shown, if there is one
        self.ending = self._left_early = False
        self._splitter = FrameSplitter(server.settings.line_bytes)
        self._liveness = Liveness(server.settings, 0.0, 0.0)
        self._since = 0.0
        self._first = b""
        self._timers: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is accepted."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (of a stream's server)
        self.transport = transport
        self.name = str(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.arrived(self)
        if self.server.listener is None:
            self.end("server stopping", refused=False)
        if self.ending:
            return
        if self.server.tls is None:
            self._opened(transport)
        else:
            self.server.tasks.spawn(partial(self._shake_hands, self.server.tls), "tcp-handshake")

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        """Here and not by the loop's own server, which lets anybody begin any number of them, and tells nobody."""
        transport: asyncio.Transport | None
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self.transport, self, tls, server_side=True, ssl_handshake_timeout=HELLO, ssl_shutdown_timeout=GOODBYE
            )
        except Exception as error:
            self._refuse_handshake(error)
            return
        finally:
            if not self.secured and self.ending:  # the server is closed, or has too many strangers
                self.connection_lost()
        if transport is None or (transport.is_closing() and not self._left_early):  # lost while it shook hands
            self._refuse_handshake(None)
            return
        if not self.ending:
            self._opened(transport)

    def _refuse_handshake(self, error: Exception | None) -> None:
        self.end(f"TLS handshake failed: {error or 'the connection was lost'}")
        self.connection_lost()  # of a connection that ends before it stands, the loop tells nobody

    def _opened(self, transport: asyncio.Transport) -> None:
        loop, server = asyncio.get_running_loop(), self.server
        transport.set_write_buffer_limits(SOCKET_BYTES)
        self.transport, self.secured, self._since = transport, True, loop.time()
        self._liveness = Liveness(server.settings, self._since, self._since)
        if server.knows(b""):
            self._admit()
        early, self._first = self._first, b""
        if early:
            self.data_received(early)
        if self._left_early:
            self.end("")

    def _admit(self) -> None:
        """It may come in, and is told where it is."""
        self._known = True
        if (why := self.server.full()) is not None:
            self.end(why)
            return
        self.server.move(self, self.server.clients)
        self._write(b"%b\nPING %d\n" % (Server(self.server.name).format(), int(time.time() * 1000)))

    def connection_lost(self, _error: Exception | None = None) -> None:
        """It is closed."""
        self.ending = True
        self.server.move(self, None)
        self._drop_queue()
        self._first = b""
        for timer in self._timers:
            timer.cancel()
        self.gone.set()

    # -- what comes -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self.ending:
            return
        if not self.secured:  # it came together with the end of the handshake
            self._first += data
            return
        try:
            if not self._known:
                data = self._hello(data)
            messages = self._splitter.feed(data) if self._known else []
            now = asyncio.get_running_loop().time()
            self._liveness.heard(now, messages, unfinished=self._splitter.unfinished)
            for message in messages:
                if not self.ending:
                    self.server.received(self, message)
            # Only now: what a native client heard before its NAME would pass for a foreign writer's.
            self._spoken = self._spoken or bool(messages)
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
        self._first = b""
        command, _, secret = line.partition(b" ")
        if command != b"AUTH" or not self.server.knows(secret.rstrip(b"\r")):
            # Not a word of what came: it may be a secret, a wrong one of this server, or a right one of another.
            self.end("AUTH failed: this server wants its secret first", why="wrong secret")
            return b""
        self._admit()
        return rest

    def eof_received(self) -> None:
        """It has said all that it had to say, and leaves: what waits for it is void."""
        if self.secured:
            self.end("")
        self._left_early = True

    # -- what goes --------------------------------------------------------------------------------------------

    def hear(self, messages: Sequence[bytes], data: bytes, commands: int) -> None:
        """Send messages; ``data``: the same as bytes, ``commands`` lines. It hears nothing before it said a word."""
        if not self._spoken:
            return
        if self.native:
            self._write(data, commands, shared=True)
        elif commands > (most := self.server.settings.message_items + self.server.settings.message_rows):
            # Nobody takes a message of so many lines (9.20): each client's view of it would cost a second. It begins
            # anew, and misses nothing.
            self.end(f"a message of over {most} lines came")
        elif data := b"".join([self.view.show(message) for message in messages]):
            self._write(data, data.count(b"\n"))

    def _write(self, data: bytes, commands: int = 1, *, shared: bool = False) -> None:
        if self.ending:
            return
        self._liveness.sent_at = asyncio.get_running_loop().time()
        if not self._paused:
            self.transport.write(data)
            return
        settings = self.server.settings
        self._queue.append((data, commands, shared))
        self._count(len(data), commands, shared)
        if self._queued_commands > settings.tcp_queue_commands or self.queued_bytes > settings.tcp_queue_bytes:
            self.end("failed to keep up")

    def _count(self, size: int, commands: int, shared: bool) -> None:
        self._queued_commands += commands
        self.queued_bytes += size
        if not shared:
            self.own_bytes += size
        self.server.queued(self, 0 if shared else size)

    def _drop_queue(self) -> None:
        self._queue.clear()
        own, self.own_bytes, self.queued_bytes, self._queued_commands = self.own_bytes, 0, 0, 0
        self.server.queued(self, -own)

    def pause_writing(self) -> None:
        """The socket is full: what follows waits."""
        self._paused = True

    def resume_writing(self) -> None:
        """The socket has room again."""
        self._paused = False
        while self._queue and not self._paused:
            data, commands, shared = self._queue.popleft()
            self._count(-len(data), -commands, shared)
            self.transport.write(data)

    def look(self, now: float) -> None:
        """Now and then: is it alive, and does it know that we are?"""
        timeout = self.server.settings.tcp_timeout
        if self.ending:
            pass
        elif not self._known:
            if self.secured and now - self._since > HELLO:
                self.end("AUTH is needed first", why="no secret")
        elif self._liveness.gone(now):
            self.end(f"nothing heard for {timeout:g} s", why="silent")
        elif self._liveness.halting(now):
            self.end(f"half a line for {timeout:g} s", why="half a line")
        elif line := self._liveness.ping(now, int(time.time() * 1000)):
            self._write(line)

    def end(self, reason: str, *, why: str | None = None, refused: bool = True) -> None:
        """Say why, and close; at once if it does not take that either."""
        if self.ending:
            return
        self.ending = True
        self.server.move(self, self.server.leaving)
        if refused and reason:
            self.server.refused[why or reason.partition(":")[0]] += 1
            log.info("client %s is cut off: %s", self.name, why or reason)
        self._drop_queue()
        self._first = b""
        if not self.secured:  # nothing can be said before TLS stands
            self._cut()
            return
        if reason:
            self.transport.write(b"%b\n" % Error(reason.replace("\n", " ")).format())
        # Closed while it still sends, the connection would be reset, and the reason lost with what was under way.
        if reason and self.transport.can_write_eof():
            self.transport.write_eof()
        elif reason:  # TLS has no half-closed connections: who has read the reason has a moment to go by itself
            self._timers.append(asyncio.get_running_loop().call_later(GOODBYE / 2, self.transport.close))
        else:
            self.transport.close()
        self._timers.append(asyncio.get_running_loop().call_later(GOODBYE, self._cut))

    def _cut(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            # A reset: who has not closed its end by now would take half a closed connection for an open one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
