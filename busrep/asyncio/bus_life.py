"""The parts of a bus and their life: they are opened, told of the link and of the own name, and closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from busrep.caches.freshness import Own
from busrep.core.commands import Name
from busrep.core.link_watch import LinkWatch
from busrep.errors import BusrepError, Closed, ConfigError, WriterFenced
from busrep.options import BusOptions
from busrep.stores.interface import AsyncStore

from ..links.link import Link, LinkEvents
from ..links.tcp import identity_of
from ..links.transports import ServerAddress, make_link
from ..runtime.tasks import call, log_failure, spawn, stop, within
from .beats import Beats
from .caching import CacheUpkeep
from .own_name import OwnName
from .publisher import ChannelPublisher, channels_of
from .reading import Reading
from .receiver import Receiver
from .writing import Writing

log = logging.getLogger("busrep")


class BusLife:
    """The parts of a `busrep.Bus` and their life. What the application calls stands in the subclass.

    Attributes without a docstring are parts. They are for tests and for busrep itself, and may change.
    """

    caching: CacheUpkeep  # set by the subclass, whose write() it calls

    def __init__(self, redis: ServerAddress, options: BusOptions) -> None:
        self._options = options
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
        self.streams, self.settings = options.streams, options.settings
        self.store: AsyncStore | None = options.store
        self._own = options.own
        self._connect_handlers: list[Callable[[], Any]] = []
        self._close_handlers: list[Callable[[], Any]] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.background: list[asyncio.Task[None]] = []
        self._watch = LinkWatch(self.settings)
        self._state = "new"
        self._closing: asyncio.Task[None] | None = None
        self.publisher = ChannelPublisher(
            options, link=lambda: self.link, writing=lambda: self.writing, watch=self._watch
        )
        self.reading = Reading(
            options,
            own=None if options.own else self._own_name(),
            ask=self.publisher.ask_for_positions,
            own_positions=self._own_positions,
            own_written=self._own_written,
            on_epoch=self._epoch_changed,
            on_stop=self._tell_failure,
        )
        self.own_name = OwnName(
            options,
            self.reading,
            self.tasks,
            wake=self.publisher.wake,
            renewed=self._renewed,
            on_loss=self._lost,
        )
        self.receiver = Receiver(
            options, self.reading, self.own_name, self.publisher,
            watch=self._watch, heard=lambda frame: self.caching.heard(frame), tasks=self.tasks,
        )  # fmt: skip
        self._stores = [one for one in dict.fromkeys((options.store, options.reader_store)) if one is not None]
        self.link = self._make_link(redis, channels_of(options))

    @property
    def writing(self) -> Writing | None:
        """What writes under the name now; None without a name, and before it is claimed."""
        return self.own_name.writing

    def _own_name(self) -> str | None:
        """Under which name this process writes, here or beside this bus."""
        return self.writer

    def _make_link(self, server: ServerAddress, channels: Sequence[str]) -> Link:
        events: LinkEvents = {"on_up": self._up, "on_message": self.receiver.receive, "on_down": self._down}
        return make_link(server, self.name, channels, self.settings, identity=self._identity, **events)

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
                writing = await self.own_name.claim(self.writer)
                writing.on_invalidations = self.caching.caches.committed
            await self.link.start(required=self._options.require_redis)
        except BaseException:
            await self.close()
            raise
        self.run_in_background(self.publisher.run(), "publish")
        beats = Beats(self.settings, self.reading, self.own_name, self.publisher, self.link, self._watch, self.tasks)
        self.run_in_background(beats.run(), "beat")
        if self.writing is not None:
            self.run_in_background(self.writing.keep_settling(), "settle")
        if self.reader is not None:
            self.run_in_background(self.reading.saver.keep_saving(), "save")
        self.caching.open()

    def run_in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` until the bus closes."""
        self.background.append(self._start(work, name))

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"busrep-{name}")
        task.add_done_callback(log_failure)
        return task

    def _renewed(self, writing: Writing) -> None:
        """The name was won back."""
        writing.on_invalidations = self.caching.caches.committed
        self.caching.caches.drop_all()  # what was in doubt is in the table; before this one is trusted
        self.run_in_background(writing.keep_settling(), "settle")
        if self.link.connected:
            writing.core.connected(asyncio.get_running_loop().time())
        self.publisher.wake()

    async def close(self) -> None:
        """Publish what is queued (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        Goes on when the caller is cancelled: a service that stops still publishes what it committed, and saves what
        it handled. From inside a handler it returns at once, for it waits until the handler has ended.
        """
        if self._closing is None:
            self._state = "closing"
            self.caching.close()
            self._closing = self._start(self._close(), "close")
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
                await self._before_close(handler, timeout)
            self._state = "closed"
            if self.writing is not None:
                await self.writing.close(timeout)
            await self.publisher.flush(timeout)
            if self.writing is not None:
                self.writing.core.farewell()
                await self.publisher.flush(timeout)
            await self.reading.close(timeout)

    async def _before_close(self, handler: Callable[[], Any], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await call(handler)
        except Exception:  # what is not said now is found out by others; the rest is closed all the same
            log.exception("a handler of before_close failed")

    async def _stop_tasks(self, timeout: float) -> None:
        self.receiver.close()
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
        self._watch.connected(now)
        self.reading.connected(now)
        self.caching.link(connected=True)
        if self.writing is not None:
            self.writing.core.connected(now)
        self.publisher.ask_for_positions()
        for handler in self._connect_handlers:
            spawn(self.tasks, call(handler), "busrep-connect")

    def _down(self) -> None:
        self.caching.link(connected=False)
        self.reading.disconnected()

    # -- what others ask of the own writer -----------------------------------------------------------------------

    def _own_positions(self) -> Mapping[str, int]:
        return {} if self.writing is None or self._own else self.writing.core.positions()

    def _own_written(self, stream: str) -> tuple[int, bool] | None:
        writing = self.writing
        return None if writing is None or self._own else writing.written(stream)

    def own_applied(self, stream: str) -> Own | None:
        """The own writer of a stream of invalidations, unless the name is another process's by now: then that one
        counts like any other."""
        writing = self.writing
        if writing is None or writing.fenced is not None or stream not in writing.commits:
            return None
        return Own(writing.name, writing.incarnation, writing.applied_as_of(stream))

    # -- the rest ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state in ("closing", "closed"):
            raise Closed
        if self._state == "new":
            raise ConfigError("the bus is not open yet: use 'async with busrep.connect(...) as bus'")

    def _lost(self) -> None:
        self.reading.disown()
        if self.writing is not None and self.writing.fenced is not None:
            self._tell_failure(self.writing.fenced)

    def _tell_failure(self, error: BusrepError) -> None:
        if (on_failure := self._options.on_failure) is not None:
            spawn(self.tasks, call(on_failure, error), "busrep-on_failure")

    def _epoch_changed(self, epoch: str) -> None:
        """The log is another one: its writers have been fenced, and what was written here is of the one before."""
        writing = self.writing
        if writing is not None and writing.epoch not in (None, epoch):
            writing.lose(WriterFenced(writing.name, writing.incarnation))
