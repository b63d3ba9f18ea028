"""The connection to Redis that publishes, used by one thread at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
import redis.asyncio.sentinel as aiosentinel
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from busrep.errors import ConfigError, Unavailable
from busrep.links.redis import make_pool
from busrep.settings import Settings

from .threads import OwnedLock, in_a_thread

log = logging.getLogger("busrep.redis")

_TROUBLE = (RedisError, OSError, EOFError)

# The kinds of connections that asyncio has the like of.
_PLAIN = (Connection, SSLConnection, UnixDomainSocketConnection)
_OF_SENTINEL = (SentinelManagedConnection, SentinelManagedSSLConnection)


def redis_pool(client: str | redis.Redis, settings: Settings) -> ConnectionPool:
    """See `make_pool`. With a deadline on everything, for the calling thread waits."""
    if not isinstance(client, str | redis.Redis):
        raise ConfigError(f"redis={client!r}: a Redis URL, or a redis.Redis, whose settings are used")
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), settings.redis_timeout)
    return make_pool(ConnectionPool, client, parse_url, Connection, retry=Retry(NoBackoff(), 0), **timeouts)


class _MasterPool(aioredis.ConnectionPool):
    """Of asyncio connections to the master that the Sentinels of a blocking client name, asked by that client."""

    is_master, check_connection = True, False

    def __init__(self, blocking: SentinelConnectionPool, kind: type[Any], kwargs: dict[str, Any]) -> None:
        super().__init__(kind, **kwargs)
        self._blocking = blocking

    async def get_master_address(self) -> tuple[str, int]:
        """What a connection asks when it connects."""
        # Nobody waits for the thread when the waiting ends first: it may have no deadline.
        asked = in_a_thread(self._blocking.get_master_address, "busrep-sentinel")
        address: tuple[str, int] = await asyncio.wrap_future(asked)
        return address


def async_client(client: redis.Redis) -> aioredis.Redis:
    """An asyncio client with the settings of a blocking one. Raises ConfigError for one of another kind."""
    pool: Any = client.connection_pool
    of_sentinel = isinstance(pool, SentinelConnectionPool) and pool.is_master
    if pool.connection_class not in (_OF_SENTINEL if of_sentinel else _PLAIN):
        raise ConfigError(
            f"reading with a client of {pool.connection_class.__name__} is not possible in threads: pass a URL, a "
            "plain redis.Redis or Sentinel.master_for(), or read with busrep.connect() and a redis.asyncio client"
        )
    # Objects that serve one runtime only; what they do is not wanted of a subscription.
    own = ("retry", "credential_provider", "redis_connect_func", "maint_", "oss_cluster_", "orig_", "event_dispatcher")
    kwargs = {key: value for key, value in pool.connection_kwargs.items() if not key.startswith(own)}
    kind = getattr(aiosentinel if of_sentinel else aioredis, pool.connection_class.__name__)  # each has its like there
    if of_sentinel:
        return aioredis.Redis(connection_pool=_MasterPool(pool, kind, kwargs))
    return aioredis.Redis(connection_pool=aioredis.ConnectionPool(kind, **kwargs))


class Publisher:
    """Publishes on a connection that it makes when it is needed. Not thread-safe: hold ``lock`` round each call but
    `close`, and make none where this thread has it already.

    Where nobody has heard anything for ``heartbeat * silent_after_beats`` it gives its connection up: after a failover
    it may be one to the old master, which lives on as a replica, takes messages, and passes them on to nobody. Whoever
    listens would miss the echo of its own announcements; a writer in threads need not listen.

    ``connects`` rises with each new connection: others cannot see that it is one.
    """

    def __init__(self, client: str | redis.Redis, settings: Settings) -> None:
        self._pool = redis_pool(client, settings)
        self._deaf_after = settings.heartbeat * settings.silent_after_beats
        self._heard_at = 0.0
        self._connection: Any = None
        self._closed = False
        self.lock = OwnedLock()
        self.connects = 0
        self.last_error: str | None = None

    @property
    def connected(self) -> bool:
        """Whether the connection stood when it was last used."""
        return self._connection is not None

    def open(self) -> None:
        """Make sure that a connection stands. Raises Unavailable; its cause is a ConfigError for a refused password, or
        a right that is missing."""
        if self._closed:
            raise Unavailable("Redis", "the bus is closed")
        if self._connection is not None:
            return
        connection = self._pool.make_connection()
        try:
            connection.connect()  # type: ignore[no-untyped-call]
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise self._unavailable(error) from ConfigError(f"Redis refuses this user: {error}")
        except _TROUBLE as error:
            raise self._unavailable(error) from error
        self._connection, self._heard_at = connection, time.monotonic()
        self.connects += 1

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """PUBLISH all in one pipeline, in order, on the connection that ``open`` made.

        Raises Unavailable: then it is unknown which of them were published, and the connection is given up.
        """
        connection = self._connection
        if connection is None:
            raise Unavailable("Redis", "the publishing connection is closed")
        try:
            packed = connection.pack_commands([("PUBLISH", *message) for message in messages])
            connection.send_packed_command(packed, check_health=False)
            heard = [connection.read_response(disable_decoding=True) for _ in messages]
        except _TROUBLE as error:
            self.drop()
            raise self._unavailable(error) from error
        except BaseException:  # interrupted between a command and its reply: the connection is out of step
            self.drop()
            raise
        now = time.monotonic()
        if any(heard):
            self._heard_at = now
        elif now - self._heard_at > self._deaf_after:
            self.drop()

    def _unavailable(self, error: BaseException) -> Unavailable:
        text = f"{type(error).__name__}: {error}"
        if text != self.last_error:
            log.warning("Redis link: %s", text)
        self.last_error = text
        return Unavailable("Redis", error)

    def drop(self) -> None:
        """Give the connection up; ``open`` makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_TROUBLE):
                connection.disconnect()

    def send(self, channel: str, data: bytes) -> None:
        """Publish one message; once more on a new connection if the one there was had died. Raises Unavailable."""
        while True:
            used = self.connected
            try:
                self.open()
                return self.publish([(channel, data)])
            except Unavailable:
                if not used:
                    raise

    def statistics(self) -> dict[str, object]:
        """Counters, JSON-able."""
        return {"connected": self.connected, "publisher_connects": self.connects, "last_error": self.last_error}

    def close(self) -> None:
        """Make no more connections. Somebody may be sending, and has deadlines: that is waited for."""
        with self.lock:
            self._closed = True
            self.drop()
