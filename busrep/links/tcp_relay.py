"""What a TCP server has beside its clients: the Redis that it relays, and the buses in its own process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

import attrs
import redis.asyncio as aioredis

from busrep.core.application_commands import UserIp
from busrep.core.commands import Name, Ping, Position, Replicate, Server
from busrep.core.fields import NAME_BYTES
from busrep.core.framing import Frame, Rows
from busrep.errors import ConfigError, Unavailable

from .link import Link, LinkEvents
from .redis import RedisLink
from .tcp import SLOWEST, log

if TYPE_CHECKING:
    from .tcp_server import TcpServer

# Messages that share a pipeline to Redis.
RELAYED_AT_ONCE = 256

# The head of a row or a position, up to its stream.
HEAD_BYTES = len(b"POSITION ") + NAME_BYTES + 1

# The suffix of the channel of USER_IP, which few want to hear (protocol.md, section 2).
USER_IP = "USER_IP"


@attrs.frozen
class Routes:
    """The channels of a deployment: ``name``, and a sub-channel for each other suffix of ``suffixes``, {stream: suffix
    or ""}."""

    name: str
    suffixes: Mapping[str, str]

    def channel(self, suffix: str) -> str:
        """The channel of a suffix."""
        return f"{self.name}/{suffix}" if suffix else self.name

    def channels(self) -> list[str]:
        """All of them."""
        return [self.channel(suffix) for suffix in dict.fromkeys(("", USER_IP, *self.suffixes.values()))]

    def parts(self, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """What is to be passed on of a client's message: (channel, message). ``frame``: the message, parsed."""
        for item in frame.items:
            if not isinstance(item, Server | Name | Replicate | Ping | Rows | Position):
                yield self.channel(USER_IP if isinstance(item, UserIp) else ""), item.format()
        yield from self._facts(message, frame)
        if any(isinstance(item, Replicate) for item in frame.items):
            yield self.name, b"REPLICATE"  # one question is answered as well as many

    def _facts(self, message: bytes, frame: Frame) -> Iterator[tuple[str, bytes]]:
        """Rows, positions and announcements, under the NAME they came with, for each channel."""
        streams = dict.fromkeys(item.stream for item in frame.items if isinstance(item, Rows | Position))
        if not streams and not any(isinstance(item, Server) for item in frame.items):
            return
        suffixes = dict.fromkeys(self.suffixes.get(stream, "") for stream in streams) or {"": None}
        if len(suffixes) == 1 and all(isinstance(item, Server | Name | Position | Rows) for item in frame.items):
            yield self.channel(next(iter(suffixes))), message
            return
        wanted = {
            (command, stream.encode()): self.suffixes.get(stream, "")
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
            yield self.channel(suffix), b"\n".join(lines)


class Relay:
    """Publishes in order, in a task (`keep_publishing`), and has ``server`` deliver what is heard on ``channels``."""

    def __init__(self, server: TcpServer, redis: str | aioredis.Redis, channels: Iterable[str]) -> None:
        self._server, self._settings = server, server.settings
        self._channels = dict.fromkeys(channels)
        self.link = RedisLink(
            redis,
            self._channels,
            server.settings,
            on_up=self._connected,
            on_message=lambda _, data: self._heard(data),
            on_down=lambda: server.cut("the link to Redis was lost"),
        )
        self.dropped = 0
        self.outbox: deque[tuple[str, bytes]] = deque()
        self.outbox_bytes = 0
        self._wake = asyncio.Event()
        # Set while nothing waits for Redis: it is there, or lost, and all were told so.
        self.idle = asyncio.Event()
        self.idle.set()
        self.unheard: tuple[bytes, float] | None = None  # published, due to be heard back, since

    async def close(self) -> None:
        """Close the connections to Redis. What still waits is dropped."""
        self._drop_outbox()
        await self.link.close()

    def publish(self, message: bytes, channel: str) -> None:
        """Queue a message. Look at ``congested`` first."""
        self.outbox.append((channel, message))
        self.outbox_bytes += len(message)
        self.idle.clear()
        self._wake.set()

    @property
    def congested(self) -> bool:
        """Whether so much waits for Redis that nothing more is taken."""
        return self.outbox_bytes > self._settings.tcp_queue_bytes

    async def subscribe(self, channel: str) -> None:
        """Hear one more channel."""
        self._channels[channel] = None
        await self.link.subscribe(channel)

    def _connected(self) -> None:
        self.unheard = None  # what was published before will not be heard

    def _heard(self, data: bytes) -> None:
        if self.unheard is not None and data == self.unheard[0]:
            self.unheard = None
        settings = self._settings
        if len(data) > settings.message_bytes or not (data.isascii() or _is_utf8(data)):
            self.dropped += 1  # as everybody on Redis does
        elif _has_line_over(settings.line_bytes, data):
            # Only dropped, it would be missed by nobody; but who begins anew asks for the positions, and fetches it.
            self.dropped += 1
            self._server.cut(f"a line over {settings.line_bytes} bytes came over Redis", refused=False)
        else:
            self._server.deliver(data)

    async def keep_publishing(self) -> None:
        """Publish what is queued, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.outbox:
                some = [self.outbox.popleft() for _ in range(min(len(self.outbox), RELAYED_AT_ONCE))]
                self.outbox_bytes -= sum(len(data) for _, data in some)
                try:
                    await self._publish_some(some)
                except asyncio.CancelledError:
                    self._lost("publishing was cancelled")
                    raise
                except Exception as error:
                    if not isinstance(error, Unavailable):  # a bug; a relay that is deaf would be worse
                        log.exception("publishing failed")
                    self._lost(f"the link to Redis was lost: {error}")
            self.idle.set()

    def _lost(self, reason: str) -> None:
        """Whether what was under way arrived is unknown, as is what clients said meanwhile: they say it anew."""
        self.unheard = None
        self._drop_outbox()
        self._server.cut(reason)

    async def _publish_some(self, some: list[tuple[str, bytes]]) -> None:
        await self.link.open_publisher()
        if self.unheard is None and self.link.connected:
            heard = [data for channel, data in some if channel in self._channels]
            if heard:
                self.unheard = (heard[-1], asyncio.get_running_loop().time())
        await self.link.publish(some)

    def check(self, now: float) -> None:
        """As a bus on Redis misses its own echo: the two connections may have ended up on different servers."""
        bound = self._settings.heartbeat * self._settings.silent_after_beats
        if self.unheard is not None and now - self.unheard[1] > bound:
            self.unheard = None
            self.link.reconnect("what is published is not heard back")

    def _drop_outbox(self) -> None:
        self.outbox.clear()
        self.outbox_bytes = 0
        self.idle.set()


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
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class LocalLink(Link):
    """Takes part in ``server`` as a client would. ``channels``: those of Redis that a relay has to hear for it."""

    LOG = log
    TROUBLE = (Unavailable,)
    SLOWEST = SLOWEST

    def __init__(self, server: TcpServer, channels: Iterable[str], **events: Unpack[LinkEvents]) -> None:
        super().__init__("the TCP server of this process", server.settings, **events)
        self._hub, self._channels = server, list(channels)
        self._new = False
        self._lost = asyncio.Event()

    async def start(self, *, required: bool) -> None:
        """Take part. Raises ConfigError when the server is not open; with ``required`` Unavailable when it has lost its
        Redis; without, it joins when that is back."""
        if self._hub.listener is None:
            raise ConfigError("open the TCP server before the bus: async with server, busrep.connect(server, ...)")
        for channel in self._channels:
            await self.subscribe(channel)
        await super().start(required=required)

    async def _connect_once(self) -> None:
        if (why := self._hub.down()) is not None:
            raise Unavailable("the TCP server", why)
        self._lost.clear()
        self._hub.members[self] = None
        try:
            self._new = True
            self.publisher_connects += 1
            self._stands()
            await self._lost.wait()
        finally:
            self._hub.members.pop(self)

    async def subscribe(self, channel: str) -> None:
        """Hear one more of Redis's channels, if the server is a relay; else everything is heard."""
        if self._hub.relay is not None:
            await self._hub.relay.subscribe(channel)

    def reconnect(self, reason: str) -> None:
        """Begin anew: what was said, or should be heard, may be lost."""
        if self.connected:
            self.last_error, self.connected = reason, False
            self._lost.set()

    def hear(self, message: bytes) -> None:
        """A message, this member's own included."""
        if not self.connected:
            return
        try:
            self.on_message(self._hub.name, message)
        except Exception:  # a bug in a callback: what it did not take in comes by catch-up
            log.exception("taking in a message failed; beginning anew")
            self.reconnect("taking in a message failed")

    async def open_publisher(self) -> bool:
        """Whether it joined (again) since the last call. Raises Unavailable when the server is closed, or has lost its
        Redis."""
        self._check()
        new, self._new = self._new, False
        return new

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """To all; waits for a Redis that cannot keep up. Raises Unavailable when the server is closed, or lost its
        Redis: then it is unknown which arrived."""
        self._check()
        joined = self.publisher_connects
        for channel, data in messages:
            if self._hub.relay is not None and self._hub.relay.congested:
                await self._hub.relay.idle.wait()
                self._check(joined)
            self._hub.publish(data, channel)
        await asyncio.sleep(0)  # sent out before more of it comes: a turn of the loop holds no more than one call
        self._check(joined)

    def _check(self, joined: int | None = None) -> None:
        if not self.connected or joined not in (None, self.publisher_connects):
            raise Unavailable("the TCP server", self.last_error or "not open")
