"""The link of a bus in the TCP server's own process: no socket, the same promises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from busrep.core.backoff import pause_after
from busrep.errors import ConfigError, Unavailable

from .tcp import SLOWEST

if TYPE_CHECKING:
    from .tcp_server import TcpServer

log = logging.getLogger("busrep.tcp")


class LocalLink:
    """Takes part in ``server`` as a client would. ``channels``: those of Redis that a relay has to hear for it."""

    def __init__(
        self,
        server: TcpServer,
        channels: Iterable[str],
        *,
        on_up: Callable[[], None],
        on_message: Callable[[str, bytes], None],
        on_down: Callable[[], None],
    ) -> None:
        self._server, self._channels = server, list(channels)
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._new = False
        self._lost: str | None = None
        self._failures = 0
        self._joined_at = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self.connected = False
        self.reconnects = self.connects = 0

    async def start(self, *, required: bool) -> None:
        """Take part. Raises ConfigError when the server is not open; with ``required`` Unavailable when it has lost its
        Redis; without, it joins when that is back."""
        if not self._server.listening:
            raise ConfigError("open the TCP server before the bus: async with server, busrep.connect(server, ...)")
        for channel in self._channels:
            await self._server.subscribe(channel)
        if (why := self._server.down()) is None:
            self._join()
            return
        if required:
            raise Unavailable("the TCP server", why)
        self._lost = why
        self._rejoin_later()

    def _join(self) -> None:
        self._server.joined(self)
        self._new = self.connected = True
        self._joined_at = asyncio.get_running_loop().time()
        self.connects += 1
        self._on_up()

    async def close(self) -> None:
        """Leave."""
        self._server.parted(self)
        self.connected = False
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    async def subscribe(self, channel: str) -> None:
        """Hear one more of Redis's channels, if the server is a relay; else everything is heard."""
        await self._server.subscribe(channel)

    def reconnect(self, reason: str) -> None:
        """Begin anew, as after a lost connection."""
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """What was said, or should be heard, may be lost."""
        self._lost = reason
        if self.connected:
            self.connected = False
            self._server.parted(self)
            stood = asyncio.get_running_loop().time() - self._joined_at
            self._failures = 1 if stood > SLOWEST else self._failures + 1
            self._on_down()
            self._rejoin_later()

    def _rejoin_later(self) -> None:
        # Not at once: a Redis that takes nothing would be asked without a pause.
        pause = pause_after(self._failures, self._server.settings, SLOWEST)
        self._retry = asyncio.get_running_loop().call_later(pause, self._rejoin)

    def _rejoin(self) -> None:
        self._retry = None
        if not self._server.listening:
            return
        if self._server.down() is None:
            self.reconnects += 1
            self._join()
        else:
            self._failures += 1
            self._rejoin_later()

    def hear(self, message: bytes) -> None:
        """A message, this member's own included."""
        if not self.connected:
            return
        try:
            self._on_message(self._server.name, message)
        except Exception:  # a bug in a callback: what it did not take in comes by catch-up
            log.exception("taking in a message failed; beginning anew")
            self.lose("taking in a message failed")

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
        joined = self.connects
        for channel, data in messages:
            if self._server.congested:
                await self._server.relayed()
                self._check(joined)
            self._server.publish(data, channel)
        await asyncio.sleep(0)  # sent out before more of it comes: a turn of the loop holds no more than one call
        self._check(joined)

    def _check(self, joined: int | None = None) -> None:
        if not self.connected or joined not in (None, self.connects):
            raise Unavailable("the TCP server", self._lost or "not open")

    def statistics(self) -> dict[str, object]:
        """Counters, JSON-able."""
        return {
            "connected": self.connected,
            "reconnects": self.reconnects,
            "publisher_connects": self.connects,
            "last_error": self._lost,
        }
