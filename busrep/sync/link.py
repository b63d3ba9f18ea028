"""The connection to Redis that publishes, used by one thread at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError
from redis.retry import Retry

from busrep.asyncio.link import without_password
from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings

log = logging.getLogger("busrep.redis")

_TROUBLE = (RedisError, OSError, EOFError)


def redis_pool(client: str | redis.Redis, settings: Settings) -> ConnectionPool:
    """A factory of blocking connections for a Redis URL, or with the settings of a redis.Redis client.

    Raises ConfigError for a URL that redis-py does not understand.
    """
    kwargs: dict[str, Any]
    kind: Any
    if isinstance(client, str):
        try:
            kwargs = dict(parse_url(client))  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"bad Redis URL {without_password(client)!r}: {error}; use redis://[user:password@]host:port/db, "
                "rediss://... or unix:///path?db=0"
            ) from None
        kind = kwargs.pop("connection_class", Connection)
    elif isinstance(client, redis.Redis):
        # What the driver keeps there for maintenance notifications of RESP3 has no place in RESP2.
        private = ("maint_", "oss_cluster_", "orig_")
        given = client.connection_pool.connection_kwargs
        kwargs = {key: value for key, value in given.items() if not key.startswith(private)}
        kind = client.connection_pool.connection_class
        if "connection_pool" in kwargs:
            # A client of Sentinel.master_for(): each connection asks its pool where the master is now. The driver
            # refers to the pool weakly, and the application may not keep its client.
            kwargs["connection_pool"] = client.connection_pool
    else:
        raise ConfigError(f"redis={client!r}: a Redis URL, or a redis.Redis, whose settings are used")
    # A deadline on everything, for the calling thread waits; no retries inside the driver, for a connection made behind
    # our back hides that the one before was lost.
    kwargs.update(protocol=2, decode_responses=False, health_check_interval=0)
    kwargs.update(socket_timeout=settings.redis_timeout, socket_connect_timeout=settings.redis_timeout)
    kwargs.update(retry=Retry(NoBackoff(), 0), retry_on_error=[], retry_on_timeout=False)
    try:
        return ConnectionPool(connection_class=kind, **kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Redis settings that do not go together: {error}") from None


def async_client(client: redis.Redis) -> aioredis.Redis:
    """An asyncio client with the settings of a blocking one. Raises ConfigError for one of another kind."""
    pool = client.connection_pool
    kinds = {
        Connection: aioredis.Connection,
        SSLConnection: aioredis.SSLConnection,
        UnixDomainSocketConnection: aioredis.UnixDomainSocketConnection,
    }
    if pool.connection_class not in kinds:
        raise ConfigError(
            f"reading with a client of {pool.connection_class.__name__} is not possible in threads: pass a URL, or "
            "read with busrep.connect() and a redis.asyncio client"
        )
    # Objects that serve one runtime only; what they do is not wanted of a subscription.
    own = ("retry", "credential_provider", "redis_connect_func", "maint_", "oss_cluster_", "orig_", "event_dispatcher")
    kwargs = {key: value for key, value in pool.connection_kwargs.items() if not key.startswith(own)}
    return aioredis.Redis(connection_pool=aioredis.ConnectionPool(kinds[pool.connection_class], **kwargs))


class Publisher:
    """Publishes on a connection that it makes when it is needed. Not thread-safe: hold ``lock`` round each call, with
    ``busy`` set, and make none where it is set already.

    ``connects`` rises with each new connection: others cannot see that it is one.
    """

    def __init__(self, client: str | redis.Redis, settings: Settings) -> None:
        self._pool = redis_pool(client, settings)
        self._connection: Any = None
        self._closed = False
        self.lock = threading.RLock()
        self.busy = False  # somebody has the lock: if this thread can take it, then this very thread
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
        self._connection = connection
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
            for _ in messages:
                connection.read_response(disable_decoding=True)
        except _TROUBLE as error:
            self.drop()
            raise self._unavailable(error) from error
        except BaseException:  # interrupted between a command and its reply: the connection is out of step
            self.drop()
            raise

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
        used = self.connected
        try:
            self.open()
            self.publish([(channel, data)])
        except Unavailable:
            if not used:
                raise
            self.open()
            self.publish([(channel, data)])

    def statistics(self) -> dict[str, object]:
        """Counters, JSON-able."""
        return {"connected": self.connected, "publisher_connects": self.connects, "last_error": self.last_error}

    def close(self) -> None:
        """Make no more connections."""
        self._closed = True
        self.drop()
