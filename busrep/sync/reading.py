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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import attrs

from busrep import asyncio as runtime
from busrep.asyncio.own_name import OwnName
from busrep.caches.cache import Caches
from busrep.caches.freshness import Own
from busrep.core.commands import Name, Replicate
from busrep.core.snapshots import AppliedParts
from busrep.errors import ConfigError
from busrep.options import BusOptions
from busrep.runtime.batch import BatchRows
from busrep.snapshots.parts import SnapshotRows
from busrep.stores.plans import complete
from busrep.streams import Stream

from .batch import BlockingBatch, BlockingSnapshotPart, EffectsStore, exactly_once, fields_of
from .loop_thread import CallQueue, LoopThread, ThreadBoundConnection
from .writing import SharedWriter

log = logging.getLogger("busrep.reader")

AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])


class ReadingBus(runtime.Bus):
    """An asyncio bus that reads for a process whose facts are written elsewhere, by ``writing``: they count as handled
    here, and their positions as its own."""

    def __init__(self, redis: Any, options: BusOptions, writing: SharedWriter | None, caches: Caches) -> None:
        self._beside = writing
        if options.reader is not None:
            there = _ThreadSavingStore(options.positions_store)
            store = there if options.reader_store is None else options.store
            options = attrs.evolve(options, store=store, reader_store=there)
        super().__init__(redis, options, caches=caches)
        if writing is not None:
            self.reading.own.claimed(writing.session.epoch, writing.starts)

    def _make_own_name(self) -> OwnName:
        return NameBeside(self, self._beside)

    async def open(self) -> None:
        """As the asyncio bus, and answer for the writer beside it."""
        await super().open()
        if (writing := self._beside) is not None:
            self.on(Replicate)(lambda _: writing.publishing.replicate_received())
            self.on(Name)(lambda name: self._name(writing, name))

    def _name(self, writing: SharedWriter, name: Name) -> None:
        if name.instance == writing.name and name.incarnation is not None:
            senders = self.reading.core.admission.senders
            writing.heard_name(name.incarnation, has_log=senders.has_log(name.instance, name.incarnation))

    def positions(self) -> dict[str, dict[str, int]]:
        """As the asyncio bus, and the own positions of the writer beside it."""
        found = super().positions()
        if (writing := self._beside) is not None and writing.lost is None:
            for stream, position in self.own_name.positions().items():
                if self.reading.own_counts(stream):
                    found.setdefault(stream, {})[writing.name] = position
        return found


class NameBeside(OwnName):
    """The name of the writer beside a bus."""

    def __init__(self, bus: ReadingBus, beside: SharedWriter | None) -> None:
        super().__init__(bus)
        self._beside = beside
        self.name = None if beside is None else beside.name

    def positions(self) -> Mapping[str, int]:
        """As of a bus that writes."""
        return {} if self._beside is None or self._options.own else self._beside.positions()

    def written(self, stream: str) -> tuple[int, bool] | None:
        """As of a bus that writes."""
        return None if self._beside is None or self._options.own else self._beside.written(stream)

    def applied(self, stream: str) -> Own | None:
        """As of a bus that writes."""
        return None if self._beside is None else self._beside.own_applied(stream)


class _ThreadSavingStore:
    """A reader's store, on the loop, that saves on a connection of another thread there."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save_reader(self, reader: str, changes: Any, epoch: str, connection: Any = None, **known: Any) -> None:
        """See `AsyncStore`."""
        await self._there(lambda on: self._store.save_reader(reader, changes, epoch, on, **known), connection)

    async def save_bootstrap(
        self, reader: str, stream: str, bootstrap_id: str, step: AppliedParts, connection: Any = None
    ) -> None:
        """See `AsyncStore`."""
        await self._there(lambda on: self._store.save_bootstrap(reader, stream, bootstrap_id, step, on), connection)

    async def _there(self, save: Callable[[Any], Coroutine[Any, Any, None]], connection: Any) -> None:
        if not isinstance(connection, ThreadBoundConnection):
            await save(connection)
            return
        there = connection.connection
        if inspect.iscoroutinefunction(getattr(there, "execute", None)):
            raise ConfigError(f"a blocking connection is needed, not {type(there).__name__}")
        # On a blocking connection the store's coroutine waits for nothing.
        await connection.jobs.call(lambda: complete(save(there)))


class ReadingThreads(LoopThread[ReadingBus]):
    """Runs a `ReadingBus` in a thread, from `start` to `close`, and calls handlers in another.

    ``here(raising)``: whether this is the process that opened the bus; raises ConfigError if told so.
    """

    def __init__(self, options: BusOptions, here: Callable[[bool], bool]) -> None:
        super().__init__("busrep-read", partial(here, True))
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
        at = self.do(lambda bus: bus.reading.batches.begins(batch))
        try:
            with exactly_once(self._effects.transaction(at), partial(self._save, batch)) as connection:
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
