"""Two buses, or more, that need nothing beside themselves: a Redis and a table in this process's memory.

::

    async with bus_pair(orders) as (writer, reader):
        reader.subscribe(orders)(got.append)
        async with writer.write(orders) as fact:
            fact.add(Order(1))
        await reader.wait_for(orders, "writer", fact.id)

The buses are the real ones, from the handlers down to the frames; only the socket and the database are not there.
Runs on any asyncio loop, `busrep.testing.virtual` too, where seconds of waiting take no time.
"""

# ruff: noqa: ARG002 - connections have redis-py's parameters
from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from busrep.asyncio import Bus
from busrep.options import BusOptions
from busrep.settings import Settings
from busrep.stores import memory, open_store
from busrep.streams import Registry, Stream

# A deployment in memory loses nothing, so beats matter only to tests that break something; those do not want to wait.
# Nor do tests of rows that a handler cannot handle.
QUICK = Settings(
    heartbeat=0.1, answer_interval=0.005,
    retry_min=0.01, retry_max=0.1, save_every=0.05, shutdown_timeout=2.0, poison_after=0.0
)  # fmt: skip


class MemoryRedis:
    """Pub/sub in memory, for the buses of one event loop: pass ``client()`` to ``busrep.connect`` in place of a URL.

    Knows SUBSCRIBE, UNSUBSCRIBE, PUBLISH and PING; delivers at once, in order, to whoever is subscribed.
    """

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes]] = []
        """All messages so far, (channel, data)."""
        self.refuse: RedisError | None = None
        """While set, the answer to every command: ``NoPermissionError("...")``, ``BusyLoadingError("...")``."""
        self.connections: dict[_Connection, None] = {}

    def client(self) -> aioredis.Redis:
        """A client of redis.asyncio; only its settings are used, by whoever makes connections like it."""
        kind: Any = _Connection
        return aioredis.Redis(connection_pool=aioredis.ConnectionPool(connection_class=kind, server=self))

    def publish(self, channel: str, data: bytes) -> int:
        """What PUBLISH does; gives the number of those who got it."""
        self.published.append((channel, data))
        subscribed = [one for one in self.connections if channel in one.channels]
        for connection in subscribed:
            connection.hear([b"message", channel.encode(), data])
        return len(subscribed)

    def cut(self) -> None:
        """Close all connections, as a server that restarts does."""
        for connection in list(self.connections):
            connection.lose("connection closed by server")


class _Connection:
    """A connection as busrep uses one of redis-py's."""

    def __init__(self, server: MemoryRedis, **_: Any) -> None:
        self.server = server
        self.is_connected = False
        self.channels: dict[str, None] = {}
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()

    async def connect(self) -> None:
        self.is_connected, self._inbox = True, asyncio.Queue()
        self.server.connections[self] = None

    async def disconnect(self, nowait: bool = False) -> None:
        self.lose("closed")

    def pack_commands(self, commands: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return list(commands)

    async def send_packed_command(self, commands: Iterable[tuple[Any, ...]], check_health: bool = True) -> None:
        for command in commands:
            await self.send_command(*command)

    async def send_command(self, *command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            raise RedisConnectionError("not connected")
        name, *arguments = command
        if self.server.refuse is not None:
            self.hear(self.server.refuse)
        elif name == "PUBLISH":
            channel, data = arguments
            self.hear(self.server.publish(channel, data))
        elif name == "SUBSCRIBE":
            for channel in arguments:
                self.channels[channel] = None
                self.hear([b"subscribe", channel.encode(), len(self.channels)])
        elif name == "UNSUBSCRIBE":
            for channel in arguments or list(self.channels):
                self.channels.pop(channel, None)
                self.hear([b"unsubscribe", channel.encode(), len(self.channels)])
        elif name == "PING":
            self.hear([b"pong", b""] if self.channels else b"PONG")
        else:
            self.hear(ResponseError(f"unknown command '{name}'"))

    async def read_response(self, disable_decoding: bool = False) -> Any:
        if not self.is_connected and self._inbox.empty():
            raise RedisConnectionError("not connected")
        answer = await self._inbox.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hear(self, what: Any) -> None:
        self._inbox.put_nowait(what)

    def lose(self, reason: str) -> None:
        if self.is_connected:
            self.hear(RedisConnectionError(reason))
        self.is_connected = False
        self.channels.clear()
        self.server.connections.pop(self, None)


class MemoryDeployment:
    """Any number of buses of one name in memory: ``async with MemoryDeployment(orders) as deployment``.

    ``bus(writer="w1")`` makes one, to be opened with ``async with``. Inside the block the table of ``streams`` is
    initialised; behind it its contents are gone. ``settings`` of all buses: beats of 0.1 s if not given.
    """

    def __init__(self, *streams: Stream[Any], settings: Settings = QUICK) -> None:
        self.streams, self.settings = streams, settings
        self.name = f"memory-{secrets.token_hex(6)}"
        self.redis = MemoryRedis()
        self.store = f"memory://{self.name}"
        """The store's URL."""

    async def __aenter__(self) -> MemoryDeployment:
        await open_store(self.store, Registry(self.streams)).init()
        return self

    async def __aexit__(self, *_: object) -> None:
        memory.forget(self.name)

    def bus(self, **options: Any) -> Bus:
        """A bus of this deployment, not open yet; ``options`` as of ``busrep.connect``, and they win.

        A reader that saves no positions begins with the oldest fact, unless ``start`` says something else: then a
        test need not ask whether it was there before the first one.
        """
        registry = Registry(options.pop("streams", self.streams))
        settings = options.pop("settings", self.settings)
        given: dict[str, Any] = {
            "name": self.name,
            "streams": registry,
            "store": open_store(self.store, registry, settings=settings),
            "settings": settings,
            "start": "earliest",
            **options,
        }
        return Bus(given.pop("redis", None) or self.redis.client(), BusOptions(**given))


@asynccontextmanager
async def bus_pair(
    *streams: Stream[Any], writer: str = "writer", reader: str | None = None, settings: Settings = QUICK
) -> AsyncIterator[tuple[Bus, Bus]]:
    """``async with bus_pair(orders) as (writer, reader)``: two open buses, of which one writes.

    ``writer``: its name. ``reader``: a name under which the other one saves positions; None: it saves none. It is
    told every fact from the first.
    """
    async with (
        MemoryDeployment(*streams, settings=settings) as deployment,
        deployment.bus(writer=writer) as writing,
        deployment.bus(reader=reader) as reading,
    ):
        yield writing, reading
