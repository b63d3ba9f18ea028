"""A simulated Redis, and the ways to it: pub/sub as servers do it, and links as networks do them.

The real `RedisLink` runs on it: `client` gives what `busrep.connect` takes for Redis, with connections that never
touch a socket. Commands are passed as they are, not as bytes.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from .virtual import Process

# Servers are no part of a simulated process: what they do is done whether that is alive or not.
OUTSIDE = contextvars.Context()

# Between two things on one way, seconds: timers of one moment run in any order.
AFTER = 1e-9

# What a message costs in a subscriber's output buffer beside its data, bytes: near enough to Redis's own sum.
MESSAGE_OVERHEAD = 60


class Node:
    """One server: who is subscribed to what, here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.channels: dict[str, dict[SimConnection, None]] = {}
        self.connections: dict[SimConnection, None] = {}
        self.up = True

    def kill_clients(self, *, pubsub: bool) -> int:
        """CLIENT KILL TYPE pubsub or normal: how many there were."""
        chosen = [one for one in self.connections if bool(one.channels) is pubsub]
        for one in chosen:
            one.lose("killed")
        return len(chosen)

    def kill(self) -> None:
        """The server dies, and takes no connections."""
        self.up = False
        for one in list(self.connections):
            one.lose("server died")


class SimRedis:
    """Two servers, of which one is the master; ``failover`` moves that to the other.

    ``output_buffer``: bytes that a subscriber may be behind before it is killed. ``on_publish(process, data)`` sees
    what a server took in, and from whom, in order.
    """

    def __init__(self, *, output_buffer: int, on_publish: Callable[[Process, bytes], None]) -> None:
        self.nodes = [Node("redis-1"), Node("redis-2")]
        self.master = self.nodes[0]
        self.output_buffer = output_buffer
        self.on_publish = on_publish
        self.denied: set[str] = set()  # commands that the users may not use at the moment
        self.published = 0
        self.buffer_kills = 0

    def failover(self) -> None:
        """The other server is the master from now on. Nobody is told: connections stay where they are."""
        self.master = self.nodes[1 - self.nodes.index(self.master)]
        self.master.up = True

    def publish(self, node: Node, process: Process, channel: str, data: bytes) -> int:
        """PUBLISH on that server: how many got it."""
        self.published += 1
        self.on_publish(process, data)
        subscribers = node.channels.get(channel)
        if not subscribers:
            return 0
        for one in list(subscribers):
            one.deliver(channel, data)
        return len(subscribers)

    def inject(self, channel: str, data: bytes) -> None:
        """Somebody who is not of the deployment publishes."""
        for node in self.nodes:
            for one in list(node.channels.get(channel, ())):
                one.deliver(channel, data)


class RedisPath:
    """The way from one process to Redis, and what goes wrong on it.

    Messages to subscribers may be dropped, doubled and reordered (``drop``, ``double``, ``reorder``: how likely each
    is, 0 to 1), as by a relay or by servers that change their roles; TCP itself only cuts. ``hole_out``,
    ``hole_in``: nothing passes in that direction, and nobody is told. ``latency``: seconds, one way, least and most.
    """

    def __init__(self, redis: SimRedis, dice: random.Random, process: Process) -> None:
        self.redis, self.dice, self.process = redis, dice, process
        self.latency = (0.0002, 0.002)
        self.drop = self.double = self.reorder = 0.0
        self.refuse = False
        self.hole_in = self.hole_out = False
        self.connections: dict[SimConnection, None] = {}
        self.master: Node | None = None  # who this process takes for the master, if it has not heard of another

    def client(self) -> aioredis.Redis:
        """What `busrep.connect` takes in place of a URL, and of which it looks at the pool alone."""
        kind: Any = SimConnection
        pool = aioredis.ConnectionPool(connection_class=kind, path=self)
        return cast(aioredis.Redis, SimpleNamespace(connection_pool=pool))

    def cut(self, pubsub: bool | None = None) -> None:
        """Reset all connections, or those that subscribe, or those that do not.

        What is on its way to the server may still arrive, its answer does not.
        """
        for one in list(self.connections):
            if pubsub is None or bool(one.channels) is pubsub:
                one.lose("connection reset", arrives=self.dice.random() < 0.5)

    def kill(self) -> None:
        """The process is dead: what it had sent arrives, then the connections close."""
        for one in list(self.connections):
            one.lose("the process died", arrives=True)

    def heal(self) -> None:
        """All faults end. What was swallowed by a hole is gone, and so are its connections."""
        self.drop = self.double = self.reorder = 0.0
        self.refuse = False
        self.master = None
        if self.hole_in or self.hole_out:
            self.hole_in = self.hole_out = False
            self.cut()

    def delay(self) -> float:
        """How long the next thing travels, seconds."""
        least, most = self.latency
        return least + (most - least) * self.dice.random()


class SimConnection:
    """A connection as `RedisLink` uses one of redis-py's."""

    def __init__(self, path: RedisPath, **_: Any) -> None:
        self.path = path
        self.node: Node | None = None
        self.channels: dict[str, None] = {}
        self.is_connected = False
        self._inbox: deque[tuple[Any, int]] = deque()
        self._unread = 0
        self._waiting: asyncio.Future[None] | None = None
        self._arrives = [0.0, 0.0]  # when the last thing arrives there, and here: the order is kept
        self._error: str | None = None
        self._arriving = False

    # -- the client's side ------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to whatever this process takes for the master."""
        path = self.path
        if path.hole_in or path.hole_out:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(2 * path.delay())
        node = path.master or path.redis.master
        if path.refuse or not node.up:
            raise RedisConnectionError(f"connecting to {node.name}: connection refused")
        self.node, self.is_connected, self._error = node, True, None
        node.connections[self] = path.connections[self] = None

    def pack_commands(self, commands: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The commands, as they are."""
        return list(commands)

    async def send_packed_command(self, commands: Sequence[tuple[Any, ...]], check_health: bool = True) -> None:
        """Send commands; their answers come in order."""
        for command in commands:
            self._send(command)

    async def send_command(self, *command: Any, check_health: bool = True) -> None:
        """Send one command."""
        self._send(command)

    def _send(self, command: tuple[Any, ...]) -> None:
        if not self.is_connected:
            raise RedisConnectionError(self._error or "not connected")
        if not self.path.hole_out:
            self._after(0, self._serve, command)

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """The next answer or message. Raises redis-py's ConnectionError, or the error that the server sent."""
        while not self._inbox:
            if self._error is not None:
                raise RedisConnectionError(self._error)
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        answer, size = self._inbox.popleft()
        self._unread -= size
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def disconnect(self, nowait: bool = False) -> None:
        """Close."""
        self.lose("closed")

    # -- the server's side ------------------------------------------------------------------------------------

    def lose(self, reason: str, *, arrives: bool = False) -> None:
        """The connection is gone, at both ends; what had arrived here can still be read.

        ``arrives``: what is on its way to the server is still served.
        """
        self.is_connected, self._error = False, self._error or reason
        self._arriving = arrives
        if self.node is not None:
            self.node.connections.pop(self, None)
            for channel in self.channels:
                self.node.channels[channel].pop(self, None)
        self.channels = {}
        self.path.connections.pop(self, None)
        self._wake()

    def _after(self, way: int, function: Callable[..., None], *args: Any) -> None:
        loop, arrives = asyncio.get_running_loop(), self._arrives
        at, soonest = loop.time() + self.path.delay(), arrives[way] + AFTER
        arrives[way] = at = at if at > soonest else soonest
        loop.call_at(at, function, *args, context=OUTSIDE)

    def _serve(self, command: tuple[Any, ...]) -> None:
        node, redis = self.node, self.path.redis
        if node is None or not node.up or not (self.is_connected or self._arriving):
            return
        if command[0] in redis.denied:
            self._answer(NoPermissionError(f"this user has no permissions to run the '{command[0].lower()}' command"))
        elif command[0] == "PUBLISH":
            self._answer(redis.publish(node, self.path.process, command[1], command[2]))
        elif command[0] == "SUBSCRIBE" and self.is_connected:
            for channel in command[1:]:
                self.channels[channel] = None
                node.channels.setdefault(channel, {})[self] = None
                self._answer([b"subscribe", channel.encode(), len(self.channels)])
        elif command[0] in ("PING", "SUBSCRIBE"):
            self._answer([b"pong", b""] if self.channels else b"PONG")
        else:
            raise NotImplementedError(f"the simulated Redis does not know {command[0]}")

    def _answer(self, answer: Any, size: int = 0) -> None:
        if not self.path.hole_in:
            self._after(1, self._arrived, answer, size)

    def _arrived(self, answer: Any, size: int) -> None:
        if self._error is None:
            self._inbox.append((answer, size))
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def deliver(self, channel: str, data: bytes) -> None:
        """A message for this subscriber."""
        path, size = self.path, len(data) + MESSAGE_OVERHEAD
        self._unread += size
        if self._unread > path.redis.output_buffer:
            path.redis.buffer_kills += 1
            self.lose("scheduled to be closed ASAP for overcoming of output buffer limits")
            return
        if path.hole_in:
            return
        message = [b"message", channel.encode(), data]
        if path.drop or path.double or path.reorder:
            self._badly(message, size)
        else:
            self._after(1, self._arrived, message, size)

    def _badly(self, message: list[bytes], size: int) -> None:
        path, loop = self.path, asyncio.get_running_loop()
        if path.dice.random() < path.drop:
            self._unread -= size
            return
        copies = 2 if path.dice.random() < path.double else 1
        for copy in range(copies):
            if path.dice.random() < path.reorder:
                late = loop.time() + path.delay() + 0.05 * path.dice.random()
                loop.call_at(late, self._arrived, message, 0 if copy else size, context=OUTSIDE)
            else:
                self._after(1, self._arrived, message, 0 if copy else size)
