"""REMOTE_SERVER_UP: one process noticed that a remote server is back; all that wait for it try again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from busrep.core.application_commands import RemoteServerUp
from busrep.errors import ConfigError

from ..asyncio.bus import Bus
from .news import Waiters, call_all, see_through

# Seconds in which a server is told, and passed on to handlers, once. Every request that comes from a server shows
# that it is up, and there may be thousands; while one that went down again is worth a new try that soon.
PERIOD = 10.0

# Servers remembered for that. Forgetting one costs a repeated message.
SERVERS = 10_000

Handler = Callable[[str], Any]


class _Recent:
    """Which servers had their turn within a period."""

    def __init__(self, period: float) -> None:
        self._period = period
        self.at: dict[str, float] = {}

    def __contains__(self, server: object) -> bool:
        at = self.at.get(server)  # type: ignore[call-overload]
        return at is not None and asyncio.get_running_loop().time() - at < self._period

    def add(self, server: str) -> None:
        self.at.pop(server, None)  # the latest stands last
        self.at[server] = asyncio.get_running_loop().time()
        if len(self.at) > SERVERS:
            del self.at[next(iter(self.at))]


class RemoteServers:
    """The news of remote servers that are back, on an open bus; lives as long as the bus.

    ``period``: seconds in which one server is told by this process, and passed on to its handlers, at most once.
    Raises ConfigError.
    """

    def __init__(self, bus: Bus, *, period: float = PERIOD) -> None:
        if not period >= 0:
            raise ConfigError(f"period={period!r}: a number of seconds, 0 or more")
        self._bus = bus
        self.told, self.passed_on = _Recent(period), _Recent(period)
        self._handlers: list[tuple[str | None, Handler]] = []
        self._waiters: Waiters[str] = Waiters()
        bus.on(RemoteServerUp)(self._heard)
        bus.before_close(self._waiters.close)

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._waiters.count

    def on_up(self, server: str | None = None) -> Callable[[Handler], Handler]:
        """Decorate a function (async or not) called with the name of a server that is back; None: of any server.

        What one handler raises is logged and keeps nothing from the others.
        """

        def register(handler: Handler) -> Handler:
            self._handlers.append((server, handler))
            return handler

        return register

    async def up(self, server: str) -> None:
        """A remote server answered, or spoke: tell all processes, this one too.

        To be called as often as it is seen: nothing is sent when it was told or heard within ``period`` seconds. Who
        waits in this process is woken each time. Raises ConfigError for a name that is empty, too long or holds a
        space, Unavailable, Closed.
        """
        command = RemoteServerUp(server)
        self._waiters.wake(server)
        try:
            if server not in self.told:
                await self._bus.send(command)
                self.told.add(server)  # behind it: what could not be sent is sent the next time
        finally:
            await see_through(self._pass_on(server))  # the next one is a period away

    async def wait(self, server: str, timeout: float) -> bool:
        """Wait, before the next try, until the server may be back: True when woken, False after ``timeout`` seconds.

        The news may be lost: try again either way. Raises ConfigError when too many wait, Closed when the bus closes.
        """
        return await self._waiters.wait(server, timeout)

    async def _heard(self, command: RemoteServerUp) -> None:
        # Waiters at each message: who failed after the last one has a reason to try again, and nobody else waits.
        self._waiters.wake(command.server)
        self.told.add(command.server)
        await self._pass_on(command.server)

    async def _pass_on(self, server: str) -> None:
        if server in self.passed_on:
            return
        self.passed_on.add(server)
        handlers = [handler for wanted, handler in self._handlers if wanted in (None, server)]
        await call_all(handlers, server, f"the remote server {server}")
