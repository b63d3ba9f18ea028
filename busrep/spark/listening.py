"""Listening to the bus for new positions, in a thread of the driver: a query hears of a fact when it is published.

What a writer says is taken for a position only when the lines themselves tell that it is of the log that is read: the
message opens with the writer's ``NAME`` and incarnation, and that incarnation has announced this very epoch (see
core/admission.py, as readers do it). All else, lines of foreign writers and of writers whose epoch has not been heard
yet, is a signal to ask the table, and so is a link that is down. The table is asked once a heartbeat in any case.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import redis
from redis.exceptions import NoPermissionError, RedisError

from busrep.core.admission import SenderTracker
from busrep.core.commands import Name, Position, Replicate, Server
from busrep.core.framing import Rows, parse_message
from busrep.settings import Settings
from busrep.sync.publisher import redis_pool

log = logging.getLogger("busrep.spark")

_TROUBLE = (RedisError, OSError, EOFError)
# Seconds after which the thread looks whether it is to end, at the latest.
LOOK = 0.25


class Listener:
    """The highest position that each writer of a stream has announced.

    ``url`` is the bus's Redis, with its password; ``name`` the bus's; ``channel`` the suffix of the stream's channel.
    The thread starts with the object, and ends with `close`; it connects by itself, again and again.
    """

    def __init__(
        self, url: str, name: str, stream: str, *, channel: str = "", settings: Settings | None = None
    ) -> None:
        self._settings = settings or Settings()
        self._pool = redis_pool(url, self._settings)
        self._channels = [name] if not channel else [name, f"{name}/{channel}"]
        self._stream = stream
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._epoch: str | None = None
        self._positions: dict[str, int] = {}
        self._senders = SenderTracker(self._settings.followed)
        self._ask = True
        self._linked = False
        self._thread = threading.Thread(target=self._run, name="busrep-spark-listener", daemon=True)
        self._thread.start()

    @property
    def linked(self) -> bool:
        """Whether the subscription stands."""
        return self._linked

    def announced(self, epoch: str) -> tuple[Mapping[str, int], bool]:
        """The positions announced of the log ``epoch`` so far, and whether the table has to be asked besides: the link
        is down, or something was said since the last question that proves nothing by itself."""
        with self._lock:
            self._news.clear()
            if self._epoch != epoch:  # what was heard before was not judged by this epoch
                self._epoch, self._positions, self._ask = epoch, {}, True
            ask, self._ask = self._ask or not self._linked, False
            return dict(self._positions), ask

    def wait(self, seconds: float) -> None:
        """Until something new was said of the stream, at most so long."""
        self._news.wait(seconds)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._news.set()
        self._thread.join()
        self._pool.disconnect()

    def receive(self, data: bytes) -> None:
        """Take in one message of the channel."""
        frame = parse_message(data, self._settings)
        with self._lock:
            self._senders.begin()
            for item in frame.items:
                if isinstance(item, Server | Name):
                    self._senders.observe(item)
                elif isinstance(item, Position | Rows) and item.stream == self._stream:
                    position = item.new if isinstance(item, Position) else max(item.tokens, default=0)
                    self._hear(item.writer, position)

    def _hear(self, writer: str, position: int) -> None:
        named = self._senders.incarnation_of(writer) is not None
        if not named or self._epoch is None or not self._senders.is_trusted(writer, self._epoch):
            self._ask = True
            self._news.set()
        elif position > self._positions.get(writer, -1):
            self._positions[writer] = position
            self._news.set()

    # -- the link --

    def _run(self) -> None:
        pause, told = self._settings.retry_min, ""
        while not self._closed.is_set():
            try:
                self._subscribe()
                pause = self._settings.retry_min
            except _TROUBLE as error:
                if self._linked:  # it stood till now: what went wrong before that was something else
                    pause, told = self._settings.retry_min, ""
                text = f"{type(error).__name__}: {error}"
                if text != told:
                    told = text
                    log.warning("the bus's Redis is not heard, the table is asked instead: %s", text)
            finally:
                self._linked = False
            self._closed.wait(pause)
            pause = min(2 * pause, self._settings.retry_max)

    def _subscribe(self) -> None:
        """Listen until the link breaks, is silent for too long, or all ends."""
        silence = self._settings.heartbeat * self._settings.silent_after_beats
        client = redis.Redis(connection_pool=self._pool)
        with contextlib.closing(client.pubsub()) as subscription:  # type: ignore[no-untyped-call]
            subscription.subscribe(*self._channels)
            missing, heard = len(self._channels), time.monotonic()
            while not self._closed.is_set() and time.monotonic() - heard < silence:
                message: dict[str, Any] | None = subscription.get_message(timeout=LOOK)
                if message is None:
                    continue
                heard = time.monotonic()
                if message["type"] == "message":
                    self.receive(message["data"])
                    continue
                missing -= 1
                if not missing:
                    with self._lock:
                        self._linked = self._ask = True  # what was said before it stood is not known
                    self._news.set()
                    with contextlib.suppress(NoPermissionError):  # they tell with their next heartbeat as well
                        for channel in self._channels:
                            client.publish(channel, Replicate().format())
