"""What carries messages between processes: a connection that is made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypedDict, Unpack

from busrep.core.backoff import pause_after
from busrep.settings import Settings

from ..runtime.tasks import Tasks


class LinkEvents(TypedDict):
    """What a link calls: plain functions, on the loop's thread, that must not block.

    ``on_up()`` when the connection stands, ``on_message(channel, data)`` for each message after that, ``on_down()``
    when the connection is lost.
    """

    on_up: Callable[[], None]
    on_message: Callable[[str, bytes], None]
    on_down: Callable[[], None]


class Link(ABC):
    """Keeps a connection to a server, and publishes. A subclass makes one connection, and serves it to its end."""

    LOG: ClassVar[logging.Logger]
    # Errors that end a connection in the usual course of things. Any other is a bug, and logged as one.
    TROUBLE: ClassVar[tuple[type[Exception], ...]]
    # Longest pause between two tries in seconds, if shorter than ``retry_max``. A connection must have stood for that
    # time so that its end counts as the first failure.
    SLOWEST: ClassVar[float | None] = None

    def __init__(self, server: str, settings: Settings, **events: Unpack[LinkEvents]) -> None:
        self._server, self._settings = server, settings
        self._on_up, self.on_message, self._on_down = events["on_up"], events["on_message"], events["on_down"]
        self.tasks = Tasks(settings)
        self._first: asyncio.Future[None] | None = None
        self._up_since: float | None = None
        self.connected = False
        self.reconnects = self.publisher_connects = 0
        self.last_error: str | None = None

    async def start(self, *, required: bool) -> None:
        """Connect, and keep the connection from now on.

        With ``required`` the first connection must succeed: Unavailable, or ConfigError where trying again is of no
        use, as with a wrong password. Without, it is tried for ever.
        """
        self.tasks.closed = False
        self._first = asyncio.get_running_loop().create_future()
        self.tasks.spawn(self._keep_connected, "link", again=True)
        if not required:
            self._first.add_done_callback(lambda done: done.cancelled() or done.exception())
            return
        try:
            await self._first
        except BaseException as error:
            await self.close()
            raised = self._translated(error)
            if raised is error:
                raise
            raise raised from None

    async def close(self) -> None:
        """End the connection. May be repeated."""
        await self.tasks.stop(self._settings.shutdown_timeout)

    async def _keep_connected(self) -> None:
        failures, clock = 0, asyncio.get_running_loop().time
        while not self.tasks.closed:
            try:
                await self._connect_once()
            except self.TROUBLE as error:
                self._note(error)
            except Exception as error:  # a bug in a callback: what it did not take in comes by catch-up
                self.LOG.exception("taking in a message failed; connecting anew")
                self._note(error)
            finally:
                was_up, self._up_since, self.connected = self._up_since, None, False
                if was_up is not None:
                    self._on_down()
            self.reconnects += was_up is not None
            failures = 1 if was_up is not None and clock() - was_up >= (self.SLOWEST or 0) else failures + 1
            if not self.tasks.closed:
                await asyncio.sleep(pause_after(failures, self._settings, self.SLOWEST))

    def _stands(self) -> None:
        """Tell that the connection stands: a subclass calls it in `_connect_once`."""
        self._up_since, self.connected = asyncio.get_running_loop().time(), True
        self._on_up()
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _note(self, error: BaseException) -> None:
        if self.tasks.closed:
            return
        text = f"{type(error).__name__}: {error}"
        if text != self.last_error:
            self.LOG.warning("link to %s: %s", self._server, text)
        self.last_error = text
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _translated(self, error: BaseException) -> BaseException:
        """What `start` raises for an error of the first connection."""
        return error

    @abstractmethod
    async def _connect_once(self) -> None:
        """Make a connection, call `_stands`, and serve the connection until it ends or fails."""

    async def subscribe(self, channel: str) -> None:  # noqa: B027 (over TCP everything is heard)
        """Hear one more channel, now if the link is up, and on each connect from now on."""

    @abstractmethod
    def reconnect(self, reason: str) -> None:
        """Give the connection up and make a new one."""

    @abstractmethod
    async def open_publisher(self) -> bool:
        """Whether the connection that publishes is a new one since the last call. Raises Unavailable without one."""

    @abstractmethod
    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Publish all (channel, data) in order. Raises Unavailable: then it is unknown which of them arrived."""

    def statistics(self) -> dict[str, object]:
        """Counters, JSON-able."""
        return {
            "connected": self.connected,
            "reconnects": self.reconnects,
            "publisher_connects": self.publisher_connects,
            "last_error": self.last_error,
        }


async def run_until_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all until one of them ends, and cancel the others. Raises what that one raises."""
    tasks = [asyncio.create_task(work, name="busrep-link-part") for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
