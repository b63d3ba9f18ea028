"""The two connections to Redis: one subscribes, one publishes.

Connections of redis-py are driven directly rather than through its PubSub class, which reconnects and subscribes
again by itself: here a reconnect must be seen, for it means that messages were lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, Unpack

import redis.asyncio as aioredis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, InvalidResponse, NoPermissionError, RedisError

from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.urls import check_url, shown_url

from .link import Link, LinkEvents, run_until_first

FORMS = "redis://[user:password@]host:port/db, rediss://... or unix:///path?db=0"

PoolT = TypeVar("PoolT")

_TROUBLE = (RedisError, OSError, TimeoutError, EOFError)


def redis_settings(url: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Read what a Redis URL says, with the ``parse_url`` of one of the driver's runtimes. Raises ConfigError.

    ``rediss://`` checks the certificate and the host's name in it, unless the URL says ``ssl_cert_reqs=none`` or
    ``ssl_check_hostname=false``.
    """
    check_url(url, "the Redis URL", FORMS)
    try:
        return {**tls_defaults(url), **parse(url)}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the Redis URL {shown_url(url)!r} does not work: {error}; use {FORMS}") from None


def tls_defaults(url: str) -> dict[str, Any]:
    """The driver's arguments for ``rediss://``, as far as the URL does not say otherwise: before redis-py 6 the name in
    a certificate was not compared with the host, so that any certificate of the authority would do."""
    if not url.startswith("rediss://"):
        return {}
    unchecked = re.search(r"[?&]ssl_cert_reqs=none(?:&|$)", url, re.IGNORECASE)
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": unchecked is None}


def make_pool(
    kind: Callable[..., PoolT], client: Any, parse: Callable[[str], Any], plain: type[Any], **settings: Any
) -> PoolT:
    """A factory of connections for a Redis URL, or with the settings of a client, in either runtime.

    ``parse`` is the runtime's ``parse_url``, ``plain`` its class of plain connections. Raises ConfigError for a URL
    that redis-py does not understand, and for settings that do not go together.
    """
    if isinstance(client, str):
        kwargs = redis_settings(client, parse)
        made = kwargs.pop("connection_class", plain)
    else:
        # What the driver keeps there for maintenance notifications of RESP3 has no place in RESP2.
        private = ("maint_", "oss_cluster_", "orig_")
        given, made = client.connection_pool.connection_kwargs, client.connection_pool.connection_class
        kwargs = {key: value for key, value in given.items() if not key.startswith(private)}
        if "connection_pool" in kwargs:
            # A client of Sentinel.master_for(): each connection asks its pool where the master is now. The driver
            # refers to the pool weakly, and the application may not keep its client.
            kwargs["connection_pool"] = client.connection_pool
    # RESP2: in a subscription a message is a plain list. No retries inside the driver, for a connection made behind our
    # back hides that messages were lost.
    kwargs.update(protocol=2, decode_responses=False, health_check_interval=0, **settings)
    kwargs.update(retry_on_error=[], retry_on_timeout=False)
    try:
        return kind(connection_class=made, **kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Redis settings that do not go together: {error}") from None


def redis_pool(redis: str | aioredis.Redis) -> aioredis.ConnectionPool:
    """See `make_pool`. No timeout on reads, for silence is judged by the beats."""
    retry = Retry(NoBackoff(), 0)
    return make_pool(aioredis.ConnectionPool, redis, parse_url, aioredis.Connection, socket_timeout=None, retry=retry)


class RedisLink(Link):
    """Keeps a subscription alive, and publishes, on a connection each."""

    LOG = logging.getLogger("busrep.redis")
    TROUBLE = _TROUBLE

    def __init__(
        self, redis: str | aioredis.Redis, channels: Iterable[str], settings: Settings, **events: Unpack[LinkEvents]
    ) -> None:
        super().__init__("Redis", settings, **events)
        self._pool = redis_pool(redis)
        self._channels = list(dict.fromkeys(channels))
        self._subscriber: Any = None
        self._publisher: Any = None
        self._publisher_doubted = False
        self._dead: asyncio.Event = asyncio.Event()
        self._heard_at = 0.0

    def _translated(self, error: BaseException) -> BaseException:
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            return ConfigError(f"Redis refuses this user: {error}")
        return Unavailable("Redis", error) if isinstance(error, _TROUBLE) else error

    async def close(self) -> None:
        """Close both connections."""
        await super().close()
        await self._drop_publisher()

    # -- subscribing ------------------------------------------------------------------------------------------

    async def subscribe(self, channel: str) -> None:
        """Subscribe to one more channel, now if the link is up, and on each connect from now on.

        What is published there is received from some moment on; ask with REPLICATE afterwards.
        """
        if channel in self._channels:
            return
        self._channels.append(channel)
        if self.connected and self._subscriber is not None and self._subscriber.is_connected:
            with contextlib.suppress(*_TROUBLE):  # the reconnect that follows subscribes to it too
                await self._subscriber.send_command("SUBSCRIBE", channel)

    def reconnect(self, reason: str) -> None:
        """Give the subscription up and make a new one, and a new publishing connection before the next message.

        Both, for the two may have ended up on different servers: after a failover one of them may still be with the
        old master, which lives on as a replica and takes messages that nobody hears.
        """
        self.last_error = reason
        self._publisher_doubted = True
        self._dead.set()

    async def _connect_once(self) -> None:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._settings.redis_timeout):
                await connection.connect()
                asked = confirmed = 0
                while asked < len(self._channels) or confirmed < asked:
                    if asked < len(self._channels):  # one more may be asked for while these are confirmed
                        await connection.send_command("SUBSCRIBE", *self._channels[asked:], check_health=False)
                        asked = len(self._channels)
                    reply = await connection.read_response(disable_decoding=True)
                    if not isinstance(reply, list) or not reply:
                        raise InvalidResponse(f"no subscription's reply: {reply!r:.200}")
                    # A message that comes before the last confirmation is dropped: REPLICATE follows.
                    confirmed += reply[0] == b"subscribe"
            self._subscriber = connection
            self._dead.clear()
            self._heard_at = asyncio.get_running_loop().time()
            self._stands()
            await run_until_first(self._read(connection), self._ping(connection), self._dead.wait())
        finally:
            self._subscriber = None
            with contextlib.suppress(*_TROUBLE):
                await connection.disconnect(nowait=True)

    async def _read(self, connection: Any) -> None:
        clock = asyncio.get_running_loop().time
        read, on_message = connection.read_response, self.on_message
        names: dict[bytes, str] = {}
        while True:
            reply = await read(disable_decoding=True)
            self._heard_at = clock()
            if not isinstance(reply, list) or not reply:
                raise InvalidResponse(f"no message: {reply!r:.200}")
            if reply[0] == b"message":
                channel = names.get(reply[1])
                if channel is None:
                    channel = names[reply[1]] = reply[1].decode("utf-8", "replace")
                on_message(channel, reply[2])

    async def _ping(self, connection: Any) -> None:
        """A sign of life asked for each beat: a half-open link answers nothing, and is given up."""
        settings, clock = self._settings, asyncio.get_running_loop().time
        bound = settings.heartbeat * settings.silent_after_beats
        while connection.is_connected:
            if clock() - self._heard_at > bound:
                raise TimeoutError(f"nothing heard for {bound:g} s")
            await connection.send_command("PING", check_health=False)
            await asyncio.sleep(settings.heartbeat)
        raise ConnectionError("connection closed")

    # -- publishing -------------------------------------------------------------------------------------------

    async def open_publisher(self) -> bool:
        """Make sure that the publishing connection stands; True when it is a new one. Raises Unavailable."""
        if self._publisher is not None and not self._publisher_doubted:
            return False
        await self._drop_publisher()
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._settings.redis_timeout):
                await connection.connect()
        except _TROUBLE as error:
            with contextlib.suppress(*_TROUBLE):
                await connection.disconnect(nowait=True)
            self.last_error = f"{type(error).__name__}: {error}"
            raise Unavailable("Redis", error) from error
        self._publisher, self._publisher_doubted = connection, False
        self.publisher_connects += 1
        return True

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """PUBLISH all in one pipeline, in order, on the connection that ``open_publisher`` made.

        Raises Unavailable: then it is unknown which of them were published, and the connection is given up.
        """
        connection = self._publisher
        if connection is None or not connection.is_connected:
            await self._drop_publisher()
            raise Unavailable("Redis", "the publishing connection is closed")
        try:
            async with asyncio.timeout(self._settings.redis_timeout):
                packed = connection.pack_commands([("PUBLISH", *message) for message in messages])
                await connection.send_packed_command(packed, check_health=False)
                for _ in messages:
                    await connection.read_response(disable_decoding=True)
        except _TROUBLE as error:
            await self._drop_publisher()
            self._note(error)
            raise Unavailable("Redis", error) from error
        except BaseException:  # cancelled between a command and its reply: the connection is out of step
            await self._drop_publisher()
            raise

    async def _drop_publisher(self) -> None:
        connection, self._publisher = self._publisher, None
        if connection is not None:
            with contextlib.suppress(*_TROUBLE):
                await connection.disconnect(nowait=True)
