"""What an open bus for threads consists of: its store, its connection to Redis, both halves, and threads."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any

import attrs
import redis as redis_py

from busrep.asyncio import Bus as AsyncioBus
from busrep.caches.cache import Feed
from busrep.errors import BusrepError, ConfigError, Unavailable
from busrep.links.transports import is_direct
from busrep.options import BusOptions, OnFailure
from busrep.runtime.cached import first_pruning, prune
from busrep.runtime.config import WriterConfig
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.plans import complete

from .caching import SharedCaches
from .effects import EffectsStore
from .lifetime import Here
from .publisher import Publisher, async_client
from .reading import ReadingThreads
from .reading_bus import ReadingBus
from .session import WriterCallbacks
from .threads import Bell, Chore, in_a_thread
from .writing import SharedWriter

log = logging.getLogger("busrep")


class BusParts:
    """The parts of one bus, each None while it is not open.

    ``publisher``: None for a server that is reached without Redis. ``reading`` begins when something is first read.
    Raises ConfigError for arguments that cannot work.
    """

    def __init__(self, redis: str | redis_py.Redis, options: BusOptions, caching: SharedCaches) -> None:
        self._redis, self._options, self._caching = redis, options, caching
        self.streams, self.settings = options.streams, options.settings
        direct = isinstance(redis, str) and is_direct(redis)
        if options.writer is not None:
            if direct:
                raise ConfigError("a writer in threads needs a Redis: direct TCP is for readers, and for asyncio")
            if not isinstance(options.store, str | None):
                raise ConfigError(f"store={options.store!r}: a writer in threads needs the URL of its store")
        self.publisher = None if direct else Publisher(redis, self.settings)
        # An asyncio bus that is never opened checks all there is now, not in some thread later. Whether asyncio has the
        # like of a client is asked when something is read: a writer may do without.
        AsyncioBus(redis if isinstance(redis, str) else "redis://localhost", options.opened())
        self.store: BlockingStore | None = None
        self.writing: SharedWriter | None = None
        self.reading: ReadingThreads | None = None
        self.chores: list[Chore] = []
        self._here: Here = lambda _: True

    # -- opening ----------------------------------------------------------------------------------------------

    def open(self, here: Here) -> None:
        """Open the store, claim the writer's name, connect to Redis; with cached functions, begin to read."""
        self._here = here
        if self._options.writer is not None:
            self._begin_writing(self._options.writer)
        if self._caching.caches.caches:
            self.begin_reading()
            self.begin_beats()

    def undo(self) -> None:
        """Leave nothing of an `open` that failed."""
        try:
            for chore in self.chores:
                chore.stop()
            if self.publisher is not None:
                self.publisher.drop()
            if self.store is not None:
                self.store.close()
        finally:
            self.chores, self.writing, self.store = [], None, None

    def _begin_writing(self, writer: str) -> None:
        assert self.publisher is not None  # noqa: S101 (looked at in __init__)
        if isinstance(self._options.store, str):
            self.store = open_blocking_store(self._options.store, self.streams, settings=self.settings)
            self.store.open()
        if self._options.require_redis:
            _connect(self.publisher)
        store = None if self.store is None else self.store.wrapped
        config = WriterConfig(writer, self._options.name, self.streams, self.settings, store)
        callbacks = WriterCallbacks(
            on_loss=self._lost,
            on_invalidations=self._caching.caches.committed,
            on_unknown=self._caching.caches.drop_all,
        )
        self.writing = SharedWriter(
            config, callbacks, publisher=self.publisher, beats=self._options.beats, here=self._here
        )
        self.writing.publishing.publish(now=True)
        if self._options.beats:
            self._begin_chores(self.writing)

    def _begin_chores(self, writing: SharedWriter) -> None:
        self.chores = [
            Chore(writing.publishing.announce, writing.publishing.stale, "busrep-announce"),
            Chore(writing.look, writing.shared.doubted, "busrep-look"),
        ]
        pruned, kept = self._caching.caches.pruned, self.settings.invalidations_kept
        if pruned and self.store is not None:
            store = self.store.wrapped
            work = lambda: complete(prune(store, pruned, kept))  # noqa: E731
            self.chores.append(Chore(work, Bell(), "busrep-prune", first=first_pruning(kept)))
        for chore in self.chores:
            chore.start()

    def begin_beats(self) -> None:
        """Also with ``beats=False``, for there are threads now: a fact in doubt ends the trust in what is cached here,
        until somebody asks after it."""
        if self.writing is not None and not self.chores:
            self.writing.shared.beats = True
            self._begin_chores(self.writing)

    # -- reading ----------------------------------------------------------------------------------------------

    def begin_reading(self) -> ReadingThreads:
        """Begin to read, if that has not begun. One thread at a time. Raises what opening the asyncio bus raises."""
        if self.reading is None:
            effects = EffectsStore(self._options.positions_store, self.streams, self.settings)
            reading = ReadingThreads(effects, self._here)
            reading.start(self._make_reading_bus)
            self.reading = reading
            if self.writing is not None and self.writing.shared.lost is not None:  # meanwhile
                reading.disown()
        return self.reading

    def _make_reading_bus(self) -> ReadingBus:
        redis: Any = self._redis if isinstance(self._redis, str) else async_client(self._redis)
        on_failure = None if self._options.on_failure is None else self._tell_failure
        options = attrs.evolve(self._options.opened(), writer=None, on_failure=on_failure)
        beside = None if self.writing is None or self.writing.shared.lost is not None else self._options.writer
        return ReadingBus(redis, options, beside=beside, writing=self.writing, caches=self._caching.caches)

    def keep_fresh(self, feed: Feed) -> None:
        """A function is cached that these invalidations concern."""
        self.begin_reading().do(lambda bus: bus.caching.follow(feed))
        self.begin_beats()

    # -- failures ---------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        if self.reading is not None:
            self.reading.disown()
        if self.writing is not None and self.writing.shared.lost is not None:
            self._tell_failure(self.writing.shared.lost)

    def _tell_failure(self, error: BusrepError) -> None:
        """In a thread of its own: neither the bus's loop nor a thread that writes may wait for the application."""
        if (on_failure := self._options.on_failure) is not None:
            in_a_thread(partial(_call, on_failure, error), "busrep-failure")

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Publish what is due (within ``shutdown_timeout``), save positions, close everything."""
        timeout = self.settings.shutdown_timeout
        with contextlib.ExitStack() as stack:  # each of them, whatever the others raise
            if self.store is not None:
                stack.callback(self.store.close)
            if self.publisher is not None:
                stack.callback(_close_publisher, self.publisher)
            if self.writing is not None:
                stack.callback(self.writing.close, timeout)
            for chore in self.chores:
                chore.stop()
                stack.callback(chore.join, timeout)
            if self.reading is not None:
                self.reading.close(timeout)


def _call(on_failure: OnFailure, error: BusrepError) -> None:
    try:
        on_failure(error)
    except Exception:  # what stopped is in the log already
        log.exception("on_failure= failed")


def _connect(publisher: Publisher) -> None:
    with publisher.lock:
        try:
            publisher.open()
        except Unavailable as error:
            raise (error.__cause__ if isinstance(error.__cause__, ConfigError) else error) from None


def _close_publisher(publisher: Publisher) -> None:
    with publisher.lock:  # somebody may be sending, and has deadlines
        publisher.close()
