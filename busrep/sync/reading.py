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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from busrep import asyncio as runtime
from busrep.errors import ConfigError
from busrep.options import BusOptions
from busrep.runtime.batch import BatchRows
from busrep.snapshots.parts import SnapshotRows
from busrep.streams import Stream

from .batch import BlockingBatch, BlockingSnapshotPart, EffectsStore, exactly_once, fields_of
from .loop_thread import CallQueue, LoopThread, ThreadBoundConnection
from .reading_bus import ReadingBus

log = logging.getLogger("busrep.reader")

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


class ReadingThreads(LoopThread[ReadingBus]):
    """Runs a `ReadingBus` in a thread, from `start` to `close`, and calls handlers in another.

    ``here(raising)``: whether this is the process that opened the bus; raises ConfigError if told so.
    """

    def __init__(self, options: BusOptions, here: Callable[[bool], bool]) -> None:
        super().__init__(partial(here, True))
        self._here = here
        self._effects = EffectsStore(options)  # gives handlers their connections
        self._jobs = CallQueue(interruptible=False)
        self._hand = threading.Thread(target=self._jobs.serve, name="busrep-handle", daemon=True)

    def start(self, make: Callable[[], AbstractAsyncContextManager[ReadingBus]]) -> None:
        """Make the bus and open it, in its thread. Raises what that raises."""
        try:
            self._hand.start()
            super().start(make)
        except BaseException:
            self._jobs.end()
            raise

    def is_handler(self) -> bool:
        """Whether the calling thread is the one in which handlers are called."""
        return threading.current_thread() is self._hand

    def finish(self, timeout: float) -> None:
        """Close the bus there; a handler that does not end is left alone."""
        self.close()
        self._jobs.end()
        self._hand.join(timeout)
        if self._hand.is_alive():
            log.error("a handler has not ended; its rows come again")
        else:
            self._effects.close()

    def disown(self) -> None:
        """The own name was taken over: follow it as any other, from where the own facts end. Does not wait for it."""
        self.call_soon(self.made.reading.disown)

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
                await self._jobs.call(handler, *map(handed, given))

            self.do(lambda bus: registering(bus)(handle))
            return handler

        return register

    def batch(self, batch: runtime.Batch[Any]) -> BlockingBatch[Any]:
        """What a handler is called with for a batch of the asyncio bus."""
        return BlockingBatch(
            **fields_of(batch, BatchRows), save=partial(self._save, batch), begin=partial(self._transaction, batch)
        )

    def part(self, part: runtime.SnapshotPart[Any]) -> BlockingSnapshotPart[Any]:
        """The same for the part of a snapshot."""
        return BlockingSnapshotPart(**fields_of(part, SnapshotRows), save=partial(self._save, part))

    def _save(self, made: runtime.Batch[Any] | runtime.SnapshotPart[Any], connection: Any) -> None:
        here = ThreadBoundConnection(connection)
        here.serve(self.ask(lambda _: made.save(here)))

    @contextlib.contextmanager
    def _transaction(self, batch: runtime.Batch[Any]) -> Iterator[Any]:
        self.do(lambda bus: bus.reading.batches.check_saving(batch))
        try:
            with exactly_once(self._effects.begin(), partial(self._save, batch)) as connection:
                yield connection
        except BaseException:
            batch.handling.saved = False  # or the table will tell, once the handler has failed
            raise

    def follow(self, streams: Sequence[Stream[Any]]) -> Iterator[BlockingBatch[Any]]:
        """See `BlockingBus.follow`."""
        iterator = self.do(lambda bus: bus.follow(*streams))
        return self._follow(iterator)

    def _follow(self, iterator: AsyncIterator[runtime.Batch[Any]]) -> Iterator[BlockingBatch[Any]]:
        async def following(_: ReadingBus) -> runtime.Batch[Any]:
            return await anext(iterator)

        try:
            while True:
                yield self.batch(self.call(following))
        finally:
            # Not waited for: this may be the garbage collector, in whatever thread.
            if self._here(False):
                self.call_soon(partial(_leave, iterator))


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
