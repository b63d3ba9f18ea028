"""The parts of a bus and their life: they are opened, told of the link, looked after each beat, and closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self

from busrep.core.commands import Name
from busrep.core.health import LinkWatch
from busrep.errors import BusrepError, Closed, ConfigError
from busrep.options import BusOptions
from busrep.stores.interface import AsyncStore

from ..links import ServerAddress, make_link
from ..links.link import Link, LinkEvents
from ..links.tcp import identity_of
from ..runtime.tasks import Tasks, call, log_failure, stop, within
from .caching import CacheUpkeep
from .messages import ChannelPublisher, Receiver, channels_of
from .own_name import OwnName
from .reading import Reading
from .writing import Writing

log = logging.getLogger("busrep")


class BusLife:
    """The parts of a `busrep.Bus` and their life. What the application calls stands in the subclass.

    Attributes without a docstring are parts. They are for tests and for busrep itself, and may change.
    """

    caching: CacheUpkeep  # set by the subclass, whose write() it calls

    def __init__(self, redis: ServerAddress, options: BusOptions) -> None:
        self.options = options
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
        self.streams, self.settings = options.streams, options.settings
        self.store: AsyncStore | None = options.store
        self._own = options.own
        self._connect_handlers: list[Callable[[], Any]] = []
        self._close_handlers: list[Callable[[], Any]] = []
        self.tasks, self.background = Tasks(self.settings), Tasks(self.settings)
        self.watch = LinkWatch(self.settings)
        self._state = "new"
        self._closing: asyncio.Task[None] | None = None
        self.publisher = ChannelPublisher(self)
        self.own_name = self._make_own_name()
        self.reading = Reading(self)
        self.receiver = Receiver(self)
        self._stores = [one for one in dict.fromkeys((options.store, options.reader_store)) if one is not None]
        events: LinkEvents = {"on_up": self._up, "on_message": self.receiver.receive, "on_down": self._down}
        self.link: Link = make_link(
            redis, self.name, channels_of(options), self.settings, identity=self._identity, **events
        )

    @property
    def writing(self) -> Writing | None:
        """What writes under the name now; None without a name, and before it is claimed."""
        return self.own_name.writing

    def _make_own_name(self) -> OwnName:
        return OwnName(self)

    def _identity(self) -> Name:
        return identity_of(self.writer, self.reader, None if self.writing is None else self.writing.incarnation)

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the store, claim the writer's name, connect to Redis. ``async with`` does it."""
        if self._state != "new":
            raise Closed
        self._state = "open"
        try:
            for store in self._stores:
                await store.open()
            if self.writer is not None:
                await self.own_name.claim(self.writer)
            await self.link.start(required=self.options.require_redis)
        except BaseException:
            await self.close()
            raise
        self.run_in_background(self.publisher.run, "publish")
        self.run_in_background(self._keep_beating, "beat")
        if self.writing is not None:
            self.run_in_background(self.writing.keep_settling, "settle")
        if self.reader is not None:
            self.run_in_background(self.reading.saver.keep_saving, "save")
        self.caching.open()

    def run_in_background(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run ``work()`` until it returns, or the bus closes."""
        self.background.spawn(work, name, again=True)

    async def close(self) -> None:
        """Publish what is queued (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        Goes on when the caller is cancelled: a service that stops still publishes what it committed, and saves what
        it handled. From inside a handler it returns at once, for it waits until the handler has ended.
        """
        if self._closing is None:
            self._state = "closing"
            self.caching.close()
            self._closing = asyncio.create_task(self._close(), name="busrep-close")
            self._closing.add_done_callback(log_failure)
        task = asyncio.current_task()
        if task not in self.tasks and not self.reading.is_worker(task):
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        timeout = self.settings.shutdown_timeout
        async with contextlib.AsyncExitStack() as stack:  # each of them, whatever the others raise
            for store in self._stores:
                stack.push_async_callback(store.close)
            stack.push_async_callback(self.link.close)
            stack.push_async_callback(self._stop_tasks, timeout)
            for handler in self._close_handlers:
                try:
                    async with asyncio.timeout(timeout):
                        await call(handler)
                except Exception:  # what is not said now is found out by others; the rest is closed all the same
                    log.exception("a handler of before_close failed")
            self._state = "closed"
            if self.writing is not None:
                await self.writing.close(timeout)
            await self.publisher.flush(timeout)
            if self.writing is not None:
                self.writing.core.farewell()
                await self.publisher.flush(timeout)
            await self.reading.close(timeout)

    async def _stop_tasks(self, timeout: float) -> None:
        self.receiver.close()
        self.background.closed = self.tasks.closed = True
        await stop([*self.background, *self.tasks], timeout)
        # A name that was won back meanwhile has started another.
        await stop([*self.background, *self.tasks], timeout)
        if self.writing is not None:
            with contextlib.suppress(BusrepError, TimeoutError):
                await within(timeout, self.writing.leave())

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- the link's callbacks ---------------------------------------------------------------------------------

    def _up(self) -> None:
        now = asyncio.get_running_loop().time()
        self.watch.connected(now)
        self.reading.connected(now)
        self.caching.link(connected=True)
        if self.writing is not None:
            self.writing.core.connected(now)
        self.publisher.ask_for_positions()
        for handler in self._connect_handlers:
            self.tasks.spawn(partial(call, handler), "connect")

    def _down(self) -> None:
        self.caching.link(connected=False)
        self.reading.disconnected()

    # -- the beat ---------------------------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        """Announce the writer, look into the table, and find out whether the link still carries, until cancelled."""
        loop, heartbeat = asyncio.get_running_loop(), self.settings.heartbeat
        beats = 0
        beating: asyncio.Task[None] | None = None
        while True:
            pause = heartbeat * (0.9 + 0.2 * random.random())
            if (writing := self.writing) is not None:  # the core has jittered its beat already
                pause = max(0.0, min(1.1 * heartbeat, writing.core.announcements.next_beat - loop.time()))
            await asyncio.sleep(pause)
            beats += 1
            if (writing := self.writing) is not None and (beating is None or beating.done()):
                beating = self.tasks.spawn(partial(self._beat, writing), "beat")
                # What it finds out is announced at once. But a database that hangs must not keep the announcement
                # back, nor a driver that takes its time to let go of a question (psycopg: a second).
                await asyncio.wait({beating}, timeout=heartbeat / 4)
            self.reading.beat(all_known=beats % self.settings.silent_after_beats == 1)
            if (writing := self.writing) is not None:
                writing.core.tick(loop.time(), hears=self.watch.hears(loop.time()))
                if not writing.core.announcements.rests:
                    self.watch.said(loop.time())
                self.publisher.wake()
                for stuck in writing.stuck(loop.time()):
                    log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
            self._check_link(loop.time())

    async def _beat(self, writing: Writing) -> None:
        try:
            async with asyncio.timeout(self.settings.heartbeat):
                if writing.fenced is not None and not writing.lost:
                    writing = await writing.live()
                await writing.beat()
        except (BusrepError, TimeoutError) as error:
            log.warning("beat: %s: %s", type(error).__name__, error)
        except Exception:  # a bug, in a store perhaps; the positions are stored a beat later
            log.exception("beat failed")

    def _check_link(self, now: float) -> None:
        if not self.link.connected:
            return
        announces = self.writing is not None and self.writing.fenced is None
        if (fault := self.watch.fault(now, announces=announces)) is not None:
            self.link.reconnect(fault)
        elif self.watch.asks(now, announces=announces) or self.reading.core.unheard(now):
            self.publisher.ask_for_positions()

    # -- the rest ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state in ("closing", "closed"):
            raise Closed
        if self._state == "new":
            raise ConfigError("the bus is not open yet: use 'async with busrep.connect(...) as bus'")
