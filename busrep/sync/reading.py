"""The reading half of a bus for threads: `busrep.asyncio` on an event loop in a thread of its own.

Two threads: one has the loop, and so the link, the fetches and the saving; in the other all handlers are called, one at
a time, so that a slow one holds up nothing else. Whatever touches the asyncio bus does so on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from busrep import asyncio as runtime
from busrep.errors import ConfigError
from busrep.runtime.batch import BatchRows
from busrep.snapshots.parts import SnapshotRows
from busrep.streams import Stream

from .batch import BlockingBatch, BlockingSnapshotPart, fields_of
from .effects import EffectsStore, exactly_once
from .jobs import HandlerThread, ThreadBoundConnection
from .loop_thread import LoopThread
from .reading_bus import ReadingBus

log = logging.getLogger("busrep.reader")

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
T = TypeVar("T")


class ReadingThreads:
    """Runs a `ReadingBus` in a thread, from `start` to `close`.

    ``effects``: gives handlers their connections. ``here(raising)``: whether this is the process that opened the bus.
    """

    def __init__(self, effects: EffectsStore, here: Callable[[bool], bool]) -> None:
        self._effects, self._here = effects, here
        self._hand = HandlerThread()
        self.thread = LoopThread(partial(here, True))
        self._bus: ReadingBus

    # -- life -------------------------------------------------------------------------------------------------

    def start(self, make: Callable[[], ReadingBus]) -> None:
        """Make the bus and open it, in its thread. Raises what that raises."""
        try:
            self._hand.start()
            self._bus = self.thread.start(make)
        except BaseException:
            self._hand.jobs.end()
            raise

    def is_handler(self) -> bool:
        """Whether the calling thread is the one in which handlers are called."""
        return threading.current_thread() is self._hand

    def close(self, timeout: float) -> None:
        """Close the bus there; a handler that does not end is left alone."""
        self.thread.close()
        self._hand.jobs.end()
        self._hand.join(timeout)
        if self._hand.is_alive():
            log.error("a handler has not ended; its rows come again")
        else:
            self._effects.close()

    # -- what is asked of the bus -----------------------------------------------------------------------------

    def call(self, work: Callable[[ReadingBus], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the bus's on the loop, and wait for it. Raises Closed, and what that raises."""
        return self.thread.call(work(self._bus))

    def do(self, function: Callable[[ReadingBus], T]) -> T:
        """Call a function with the bus, on the loop, and wait for it. Raises Closed, and what that raises."""

        async def do() -> T:
            return function(self._bus)

        return self.thread.call(do())

    def disown(self) -> None:
        """The own name was taken over: follow it as any other, from where the own facts end. Does not wait for it."""
        self.thread.call_soon(self._bus.disown)

    # -- handlers ---------------------------------------------------------------------------------------------

    def decorator(
        self,
        registering: Callable[[ReadingBus], Callable[[Any], Any]],
        handed: Callable[[Any], Any] = lambda given: given,
    ) -> Callable[[AnyHandler], AnyHandler]:
        """Make a decorator of plain functions that are called in the thread of the handlers.

        ``registering(bus)``: the decorator of the asyncio bus. ``handed(given)``: what the function is called with for
        what the asyncio bus gives.
        """

        def register(handler: AnyHandler) -> AnyHandler:
            check_plain(handler)

            async def handle(*given: Any) -> None:
                await self._hand.jobs.call(handler, *map(handed, given))

            self.do(lambda bus: registering(bus)(handle))
            return handler

        return register

    def subscribe(self, streams: Sequence[Stream[Any]]) -> Callable[[AnyHandler], AnyHandler]:
        """See `BlockingBus.subscribe`."""
        return self.decorator(lambda bus: bus.subscribe(*streams), self._batch)

    def snapshot(
        self, stream: Stream[Any], key: Callable[[Any], Hashable] | None
    ) -> Callable[[AnyHandler], AnyHandler]:
        """See `BlockingBus.snapshot`."""
        return self.decorator(lambda bus: bus.snapshot(stream, key=key), self._part)

    def _batch(self, batch: runtime.Batch[Any]) -> BlockingBatch[Any]:
        return BlockingBatch(
            **fields_of(batch, BatchRows), save=partial(self._save, batch), begin=partial(self._transaction, batch)
        )

    def _part(self, part: runtime.SnapshotPart[Any]) -> BlockingSnapshotPart[Any]:
        return BlockingSnapshotPart(**fields_of(part, SnapshotRows), save=partial(self._save, part))

    def _save(self, made: runtime.Batch[Any] | runtime.SnapshotPart[Any], connection: Any) -> None:
        here = ThreadBoundConnection(connection)
        here.serve(self.thread.ask(made.save(here)))

    @contextlib.contextmanager
    def _transaction(self, batch: runtime.Batch[Any]) -> Iterator[Any]:
        self.do(lambda bus: bus.check_saving(batch))
        try:
            with exactly_once(self._effects.begin(), partial(self._save, batch)) as connection:
                yield connection
        except BaseException:
            batch.handling.saved = False  # or the table will tell, once the handler has failed
            raise

    def bootstrap(self, stream: Stream[Any]) -> None:
        """See `BlockingBus.bootstrap`."""
        if self.is_handler():
            raise ConfigError("a snapshot is applied when no handler is at work: ask from another thread")
        self.call(lambda bus: bus.bootstrap(stream))

    # -- iterating --------------------------------------------------------------------------------------------

    def follow(self, streams: Sequence[Stream[Any]]) -> Iterator[BlockingBatch[Any]]:
        """See `BlockingBus.follow`."""
        iterator = self.do(lambda bus: bus.follow(*streams))
        return self._follow(iterator)

    def _follow(self, iterator: AsyncIterator[runtime.Batch[Any]]) -> Iterator[BlockingBatch[Any]]:
        async def following() -> runtime.Batch[Any]:
            return await anext(iterator)

        try:
            while True:
                yield self._batch(self.thread.call(following()))
        finally:
            # Not waited for: this may be the garbage collector, in whatever thread.
            if self._here(False):
                self.thread.call_soon(partial(_leave, iterator))


def _leave(iterator: Any) -> None:
    async def leave() -> None:
        for pause in itertools.repeat(0.001):
            if not iterator.ag_running:
                break
            await asyncio.sleep(pause)  # its step was cancelled a moment ago
        await iterator.aclose()

    task = asyncio.ensure_future(leave())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def check_plain(handler: Callable[..., Any]) -> None:
    """Raise ConfigError for a coroutine function."""
    if inspect.iscoroutinefunction(handler):
        raise ConfigError(f"{handler!r} is a coroutine function: a bus for threads calls plain ones")
