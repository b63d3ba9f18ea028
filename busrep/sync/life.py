"""The parts of a bus for threads and their life: from its first use to the end of the process, and in no process forked
from it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its own end first, see the end of this file)
import contextlib
import logging
import os
import threading
import weakref
from typing import Any

import attrs
import redis as redis_py

from busrep.asyncio import Bus as AsyncioBus
from busrep.errors import BusrepError, Closed, ConfigError, Unavailable
from busrep.links import is_direct
from busrep.options import BusOptions
from busrep.runtime.cached import first_pruning, prune
from busrep.runtime.config import WriterConfig
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.plans import complete

from .caching import SharedCaches
from .publisher import Publisher, async_client
from .reading import ReadingBus, ReadingThreads, check_plain
from .threads import Bell, Chore, in_a_thread
from .writing import SharedWriter

log = logging.getLogger("busrep")

_ALL: weakref.WeakSet[BlockingLife] = weakref.WeakSet()

# What a child process has of its parent's open buses. Kept: nothing of it may be closed, or given to the garbage
# collector, for the sockets and the event loop's selector are the parent's as well.
_INHERITED: list[object] = []


class BlockingLife:
    """The parts of a `busrep.sync.Bus` and their life. What the application calls stands in the subclass.

    Attributes without a docstring are parts. They are for tests and for busrep itself, and may change. Those that are
    opened are None before. ``publisher``: None for a server that is reached without Redis. ``reading`` begins when
    something is first read.
    """

    def __init__(self, redis: str | redis_py.Redis, options: BusOptions) -> None:
        if options.on_failure is not None:
            check_plain(options.on_failure)
        self._redis, self._options = redis, options
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
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
        self.caching = SharedCaches(self.streams, self.settings)
        self.store: BlockingStore | None = None
        self.writing: SharedWriter | None = None
        self.reading: ReadingThreads | None = None
        self.chores: list[Chore] = []
        self._lock = threading.RLock()  # held while the state changes; a thread that has it may ask for it again
        self._state, self._pid = "new", 0
        _ALL.add(self)

    @property
    def state(self) -> str:
        """One of "new", "opening", "open", "closing" and "closed"."""
        return self._state

    def _here(self, raising: bool = True) -> bool:
        """Whether this is the process that opened the bus, if any has. Raises ConfigError unless told not to."""
        if self._pid in (0, os.getpid()):
            return True
        if raising:
            raise ConfigError(
                f"this bus was opened in process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "connections are not this one's. Connect after the fork (gunicorn: post_fork, Celery: "
                "worker_process_init), under a writer name of its own in each process; or do not use the bus before"
            )
        return False

    # -- opening ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the store, claim the writer's name, connect to Redis. ``with`` does it, and so does the first use.

        A mere reader connects when it first reads; a bus with cached functions reads from here on. Raises Closed when
        it was opened before. When opening fails the next use tries again: at the first request of a process a server
        may be away for a moment.
        """
        self._here()
        with self._lock:
            if self._state != "new":
                raise Closed
            self._state, self._pid = "opening", os.getpid()
            try:
                if self._options.writer is not None:
                    self._begin_writing(self._options.writer)
                if self.caching.caches:
                    self._begin_reading()
                    self._begin_beats()
            except BaseException:
                try:
                    self._undo()
                finally:
                    self._state, self._pid = "new", 0
                raise
            self._state = "open"

    def ensure_open(self) -> None:
        """Open the bus if nothing has. Raises Closed once it is closed, and what `open` raises."""
        self._here()
        if self._state in ("new", "opening"):
            with self._lock:  # another thread may be at it
                if self._state == "new":
                    self.open()
        if self._state != "open":
            raise Closed

    def _undo(self) -> None:
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
            with self.publisher.lock:
                try:
                    self.publisher.open()
                except Unavailable as error:
                    raise (error.__cause__ if isinstance(error.__cause__, ConfigError) else error) from None
        store = None if self.store is None else self.store.wrapped
        self.writing = SharedWriter(
            WriterConfig(writer, self.name, self.streams, self.settings, store, hears=False),
            self.caching, self.publisher, beats=self._options.beats, here=self._here, on_loss=self._lost,
        )  # fmt: skip
        self.writing.publishing.publish(now=True)
        if self._options.beats:
            self._begin_beats()

    def _begin_beats(self) -> None:
        """Start the threads that look after the writer, if there is one and they are not there. With cached functions
        also for ``beats=False``: a fact in doubt ends the trust in what is cached, until somebody asks after it."""
        writing = self.writing
        if writing is None or self.chores:
            return
        writing.beats = True
        self.chores = [
            Chore(writing.publishing.announce, writing.publishing.stale, "busrep-announce"),
            # Of its own: a beat may wait for its deadline, behind whoever has locked a row.
            Chore(writing.keep_beating, Bell(), "busrep-beat"),
            Chore(writing.look, writing.doubted, "busrep-look"),
        ]
        pruned, kept = self.caching.pruned, self.settings.invalidations_kept
        if pruned and self.store is not None:
            store = self.store.wrapped
            work = lambda: complete(prune(store, pruned, kept))  # noqa: E731
            self.chores.append(Chore(work, Bell(), "busrep-prune", first=first_pruning(kept)))
        for chore in self.chores:
            chore.start()

    # -- reading ----------------------------------------------------------------------------------------------

    def _begin_reading(self) -> ReadingThreads:
        """Begin to read, if that has not begun. With the lock. Raises what opening the asyncio bus raises."""
        if self.reading is None:
            reading = ReadingThreads(self._options, self._here)
            reading.start(self._make_reading_bus)
            self.reading = reading
            if self.writing is not None and self.writing.lost is not None:  # meanwhile
                reading.disown()
        return self.reading

    def _make_reading_bus(self) -> ReadingBus:
        redis: Any = self._redis if isinstance(self._redis, str) else async_client(self._redis)
        options = attrs.evolve(self._options.opened(), writer=None, on_failure=self._tell_failure)
        beside = self.writing if self.writing is not None and self.writing.lost is None else None
        return ReadingBus(redis, options, beside, self.caching)

    # -- failures ---------------------------------------------------------------------------------------------

    def _lost(self, error: BusrepError) -> None:
        if self.reading is not None:
            self.reading.disown()
        if self.writing is not None:
            self._tell_failure(error)

    def _tell_failure(self, error: BusrepError) -> None:
        """In a thread of its own: neither the bus's loop nor a thread that writes may wait for the application."""
        if (on_failure := self._options.on_failure) is None:
            return

        def tell() -> None:
            try:
                on_failure(error)
            except Exception:  # what stopped is in the log already
                log.exception("on_failure= failed")

        in_a_thread(tell, "busrep-failure")

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Publish what is due (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        From inside a handler it returns at once, for it waits until the handler has ended. In a child process of the
        one that opened the bus it does nothing: nothing there is the child's to close.
        """
        if not self._here(raising=False):
            return
        if self.reading is not None and self.reading.is_handler():
            threading.Thread(target=self.close, name="busrep-close", daemon=True).start()
            return
        with self._lock:
            if self._state in ("closing", "closed"):
                return
            self._state = "closing"
            try:
                self._close()
            finally:
                self._state = "closed"

    def _close(self) -> None:
        timeout = self.settings.shutdown_timeout
        with contextlib.ExitStack() as stack:  # each of them, whatever the others raise
            if self.store is not None:
                stack.callback(self.store.close)
            if self.publisher is not None:
                stack.callback(self.publisher.close)
            if self.writing is not None:
                stack.callback(self.writing.close, timeout)
            for chore in self.chores:
                chore.stop()
                stack.callback(chore.join, timeout)
            if self.reading is not None:
                self.reading.finish(timeout)

    def _forked(self) -> None:
        """In the child: threads that are not here may have held the lock, and what is open is the parent's."""
        self._lock = threading.RLock()
        if self._pid:
            _INHERITED.append(vars(self).copy())


def _close_all() -> None:
    """The interpreter ends: what was committed is published, as close() would have done."""
    for life in list(_ALL):
        if life.state == "open":
            try:
                life.close()
            except Exception:  # the others are closed all the same
                log.exception("a bus could not be closed")


def _forked() -> None:
    for life in list(_ALL):
        life._forked()


# Before the pools of concurrent.futures end, in whose threads the SQLite store reads; they do so before atexit, in a
# way that is theirs alone. Where it is not to be had, only the last positions are not saved.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_forked)
