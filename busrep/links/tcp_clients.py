"""The connections to a TCP server: strangers, clients, and those that are leaving; and the bounds of all together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from busrep.core.direct import join_messages
from busrep.settings import Settings

from ..runtime.tasks import stop
from .tcp_connection import GOODBYE, SOCKET_BYTES, Connection

# Connections that have not shown yet who they are, at a time. Of more the oldest one goes: who knows the secret shows
# it within milliseconds.
STRANGERS = 100


class Clients:
    """Who is connected. A `Connection` tells of each step of its life, and of what waits for its client."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.strangers: dict[Connection, None] = {}
        self.clients: dict[Connection, None] = {}
        self.leaving: dict[Connection, None] = {}
        self.refused: Counter[str] = Counter()
        self.accepted = self.queue_bytes_peak = self.own_bytes = 0

    def arrived(self, connection: Connection) -> None:
        """It is accepted, and has shown nothing yet."""
        self.accepted += 1
        self.strangers[connection] = None
        if len(self.strangers) > STRANGERS:
            oldest = next(iter(self.strangers))
            oldest.end(f"too many strangers: {STRANGERS} are here that have not shown who they are")

    def admitted(self, connection: Connection) -> None:
        """It is a client now."""
        self.strangers.pop(connection, None)
        self.clients[connection] = None

    def told_to_leave(self, connection: Connection) -> None:
        """It has been told to go."""
        self.strangers.pop(connection, None)
        self.clients.pop(connection, None)
        self.leaving[connection] = None

    def left(self, connection: Connection) -> None:
        """It is gone."""
        for group in (self.strangers, self.clients, self.leaving):
            group.pop(connection, None)

    def queued(self, connection: Connection, own: int) -> None:
        """``own`` bytes more wait for it that no other client has too. What native clients wait for they share; the
        others must not come to a multiple of the bound either."""
        self.queue_bytes_peak = max(self.queue_bytes_peak, connection.queued_bytes)
        self.own_bytes += own
        if own > 0 and self.own_bytes > self._settings.tcp_queue_bytes:
            max(self.clients, key=lambda client: client.own_bytes).fall_behind()

    def full(self) -> str | None:
        """Why one more client cannot stay; None if it can."""
        if len(self.clients) >= self._settings.tcp_clients:
            return f"too many clients: {self._settings.tcp_clients} (Settings.tcp_clients)"
        return None

    def hear(self, messages: list[bytes]) -> None:
        """Send messages to every client."""
        for some in _portions(messages):
            data, commands = join_messages(some), sum(message.count(b"\n") + 1 for message in some)
            for client in list(self.clients):
                client.hear(some, data, commands)

    def check(self, now: float) -> None:
        """Now and then: look at each connection. ``now``: the loop's time."""
        unix_ms = int(time.time() * 1000)
        for connection in [*self.clients, *self.strangers]:
            connection.look(now, unix_ms)

    def end(self, reason: str, *, refused: bool) -> None:
        """End the connections of all clients. ``refused``: count them as cut off."""
        for client in list(self.clients):
            client.end(reason, refused=refused)

    async def end_all(self, reason: str) -> None:
        """End all connections, and wait until they are gone, each for a moment."""
        for connection in [*self.clients, *self.strangers]:
            connection.end(reason, refused=False)
        gone = [asyncio.ensure_future(one.gone.wait()) for one in self.leaving]
        if gone:
            await asyncio.wait(gone, timeout=2 * GOODBYE)
        await stop([one for one in gone if not one.done()], GOODBYE)

    def statistics(self) -> dict[str, Any]:
        """Counters and levels, JSON-able."""
        return {
            "clients": len(self.clients),
            "strangers": len(self.strangers),
            "leaving": len(self.leaving),
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "queue_bytes": max((client.queued_bytes for client in self.clients), default=0),
            "queue_bytes_peak": self.queue_bytes_peak,
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
