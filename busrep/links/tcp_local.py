"""The link of a bus in the TCP server's own process: no socket, the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Unpack

from busrep.errors import ConfigError, Unavailable

from .link import Link, LinkEvents
from .tcp import SLOWEST, log

if TYPE_CHECKING:
    from .tcp_server import TcpServer


class LocalLink(Link):
    """Takes part in ``server`` as a client would. ``channels``: those of Redis that a relay has to hear for it."""

    LOG = log
    TROUBLE = (Unavailable,)
    SLOWEST = STEADY = SLOWEST

    def __init__(self, server: TcpServer, channels: Iterable[str], **events: Unpack[LinkEvents]) -> None:
        super().__init__("the TCP server of this process", server.settings, **events)
        self._hub, self._channels = server, list(channels)
        self._new = False
        self._lost = asyncio.Event()

    async def start(self, *, required: bool) -> None:
        """Take part. Raises ConfigError when the server is not open; with ``required`` Unavailable when it has lost its
        Redis; without, it joins when that is back."""
        if not self._hub.listening:
            raise ConfigError("open the TCP server before the bus: async with server, busrep.connect(server, ...)")
        for channel in self._channels:
            await self.subscribe(channel)
        await super().start(required=required)

    async def _connect_once(self) -> None:
        if (why := self._hub.down()) is not None:
            raise Unavailable("the TCP server", why)
        self._lost.clear()
        self._hub.joined(self)
        try:
            self._new = True
            self.publisher_connects += 1
            self._stands()
            await self._lost.wait()
        finally:
            self._hub.parted(self)

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
