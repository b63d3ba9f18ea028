"""The ordinary way: PUBLISH the key after the commit, delete it on receipt, come back when the connection breaks.

Nothing here is done badly on purpose. The driver reconnects and subscribes again by itself, the listener starts over
when it gives up, health checks find half-open connections. What is missing is what such code does not have: knowledge
of what it did not receive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import redis

from busrep.errors import MissingExtra
from tests.proof.stale.task import MAXSIZE, ORDINARY_CHANNEL

# Says that every key is old.
EVERYTHING = "*"
# Seconds until a PUBLISH or a health check counts as failed, between two health checks, and after a broken connection.
TIMEOUT, HEALTH_CHECK, PAUSE = 2.0, 5.0, 0.5

log = logging.getLogger("stale.ordinary")


class OrdinaryCache:
    """Key -> version, deleted when told so. ``careful``: all of it, when the subscription had to be made again."""

    def __init__(self, *, careful: bool) -> None:
        try:
            from cachetools import LRUCache
        except ImportError:
            raise MissingExtra("caches", "the comparison with an ordinary cache") from None
        self.careful = careful
        self._entries: Any = LRUCache(MAXSIZE)
        self._lock = threading.Lock()

    async def get(self, key: int, load: Callable[[int], Awaitable[int]]) -> int:
        """What is cached, or what ``load`` gives, which is then cached."""
        with self._lock:
            version = self._entries.get(key)
        if version is None:
            version = await load(key)
            with self._lock:
                self._entries[key] = version
        return int(version)

    def delete(self, key: str) -> None:
        """Forget a key, or all."""
        with self._lock:
            if key == EVERYTHING:
                self._entries.clear()
            else:
                self._entries.pop(int(key), None)


class Ordinary:
    """The ordinary caches of one process, the thread that listens for them, and what its writers do."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)
        self._listener = redis.Redis.from_url(
            url,
            health_check_interval=HEALTH_CHECK,
            socket_timeout=3 * TIMEOUT,
            socket_connect_timeout=TIMEOUT,
            decode_responses=True,
        )
        self.plain, self.careful = OrdinaryCache(careful=False), OrdinaryCache(careful=True)
        self.subscribed = self.received = self.unsent = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen_for_ever, name="ordinary", daemon=True)
        self._thread.start()

    def publish(self, keys: Iterable[int | str]) -> None:
        """Tell everybody, oneself first, that keys are old. What Redis does not take is lost."""
        for key in map(str, keys):
            self.plain.delete(key)
            self.careful.delete(key)
            try:
                self._client.publish(ORDINARY_CHANNEL, key)
            except redis.RedisError as error:
                self.unsent += 1
                log.info("not published: %s", error)

    def _listen_for_ever(self) -> None:
        while not self._ending.is_set():
            try:
                self._listen()
            except (redis.RedisError, OSError) as error:
                log.info("listens again: %s", error)
                self._ending.wait(PAUSE)

    def _listen(self) -> None:
        with self._listener.pubsub() as subscription:  # type: ignore[no-untyped-call]
            subscription.subscribe(ORDINARY_CHANNEL)
            while not self._ending.is_set():
                message = subscription.get_message(timeout=1.0)
                if message is None:
                    continue
                if message["type"] == "message":
                    self.received += 1
                    self.plain.delete(message["data"])
                    self.careful.delete(message["data"])
                elif message["type"] == "subscribe":  # by the driver itself too, when it had to reconnect
                    self.careful.delete(EVERYTHING)
                    self.subscribed += 1

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.join()
        self._listener.close()
        self._client.close()
