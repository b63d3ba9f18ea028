"""The Redis that a TCP server stands in front of: what its clients say is published there, and heard from there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import redis.asyncio as aioredis

from busrep.errors import Unavailable

from .redis import RedisLink
from .tcp import log

if TYPE_CHECKING:
    from .tcp_server import TcpServer

# Messages that share a pipeline to Redis.
RELAYED_AT_ONCE = 256


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
                except Exception as error:
                    if not isinstance(error, Unavailable):  # a bug; a relay that is deaf would be worse
                        log.exception("publishing failed")
                    # Whether these arrived is unknown, as is what clients said meanwhile: they say it anew.
                    self.unheard = None
                    self._drop_outbox()
                    self._server.cut(f"the link to Redis was lost: {error}")
            self.idle.set()

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
