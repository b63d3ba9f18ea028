"""The caches of a bus for threads (docs/caches.md).

Calls of cached functions come from any thread, and ask nobody: the core (busrep.caches) has a lock for each cache, and
what may be returned at all stands in the feed, which the upkeep (busrep.asyncio.caching) moves on the loop of the
reading half. So a hit costs what it costs with asyncio, and a loop that stands still makes the caches expire.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from busrep.asyncio.cached import add_methods, unix_ms
from busrep.asyncio.caching import CacheUpkeep
from busrep.caches.cache import Caches, Feed, Invalidation
from busrep.caches.cached import Lock, wrap
from busrep.caches.freshness import Own
from busrep.errors import BusrepError, ConfigError
from busrep.runtime.fact import FactBase
from busrep.settings import Settings
from busrep.stores.blocking import BlockingStore
from busrep.streams import Registry, Stream

if TYPE_CHECKING:
    from .bus import BlockingBus
    from .reading_bus import ReadingBus
    from .writing import SharedWriter

log = logging.getLogger("busrep.caches")

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_ALL: weakref.WeakSet[SharedCaches] = weakref.WeakSet()


class BlockingCachedFunction(Protocol[P, R_co]):
    """What ``bus.cached`` makes of a function: called like it, and a few ways to invalidate what it returned."""

    cache_name: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """What the function returned for these arguments, or returns now."""

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Drop in every process what was returned for these arguments: a fact, and a transaction, of its own."""

    def invalidate_many(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """The same for many keys (what ``key`` makes of the arguments, or they themselves), in one fact."""

    def invalidate_all(self) -> None:
        """Drop everything that it returned."""

    def invalidate_in(self, fact: FactBase[Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """As ``invalidate``, when this fact is committed: ``bus.write(orders, caches)``."""

    def invalidate_all_in(self, fact: FactBase[Any]) -> None:
        """As ``invalidate_all``, when this fact is committed."""

    def statistics(self) -> dict[str, int]:
        """hits, misses, bypassed, invalidations, fills_refused, size."""


class SharedCaches:
    """The caches of one bus. All methods may be called from any thread."""

    def __init__(self, bus: BlockingBus, streams: Registry, settings: Settings) -> None:
        self.caches = Caches(streams, settings, clock=time.monotonic, lock=threading.RLock)
        self._bus = bus
        self._adding = threading.RLock()
        _ALL.add(self)

    @property
    def used(self) -> bool:
        """Whether there is any."""
        return bool(self.caches.caches)

    # -- caches -----------------------------------------------------------------------------------------------

    def add(self, function: Callable[..., Any], **options: Any) -> Any:
        """The function with a cache before it. Raises ConfigError, MissingExtra."""
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is a coroutine function: a bus for threads caches plain ones")
        with self._adding:
            cache = self.caches.add(function, **options)
        cached = wrap(cache, function, self.caches.clock)
        stream = next(feed.stream for feed in self.caches.feeds.values() if cache.name in feed.caches)
        add_methods(cached, cache, stream, self.write)
        return cached

    def forget(self, name: str) -> None:
        """Whoever added it could not be told that it is kept fresh: it may be added again."""
        with self._adding:
            del self.caches.caches[name]
            for feed in self.caches.feeds.values():
                feed.caches.pop(name, None)

    def special(self, name: str, members: Iterable[Any], stream: Stream[Any] | None) -> None:
        """See `BlockingBus.special_cache`."""
        with self._adding:
            self.caches.special(name, members, stream)

    # -- invalidations ----------------------------------------------------------------------------------------

    def invalidate(self, name: str, keys: Iterable[Any] | None, stream: Stream[Any] | None) -> None:
        """See `BlockingBus.invalidate`."""
        found, row = self.caches.row(name, keys, unix_ms(), stream)
        self.write(found, [row])

    def write(self, stream: Stream[Invalidation], rows: Sequence[Invalidation]) -> None:
        """Write rows as one fact, if there are any."""
        if rows:
            with self._bus.write(stream) as fact:
                for row in rows:
                    fact.add(row)

    def prunes(self, stream: Stream[Any]) -> bool:
        """Whether rows of it are busrep's to prune: those in a table of the application's own are the application's."""
        return stream.name in self.caches.feeds and not stream.resettable and stream.table is None

    def committed(self, stream: str, payloads: Sequence[bytes]) -> None:
        """Apply own facts, before whoever committed them goes on."""
        feed = self.caches.feeds[stream]
        if feed.caches:
            feed.apply(feed.stream.decode(payloads))

    def drop_all(self) -> None:
        """Own facts may have been committed that nobody will tell of here: drop whatever they may have invalidated,
        and what is being loaded."""
        for cache in list(self.caches.caches.values()):
            cache.clear()

    # -- fork() -----------------------------------------------------------------------------------------------

    def locks(self) -> Iterator[Lock]:
        """All there are; take each before the next is asked for."""
        yield self._adding
        for cache in self.caches.caches.values():
            yield cache.lock

    def forked(self) -> None:
        """In the child: nobody here hears what is invalidated. What its own bus hears counts from its opening on."""
        for feed in self.caches.feeds.values():
            if feed.following:
                feed.stop()


class Pruning:
    """Prunes rows of invalidations that are older than ``kept`` seconds, in a thread. Every process that writes the
    streams does, now and then: who prunes what is pruned already does nothing."""

    def __init__(self, store: BlockingStore, streams: Sequence[str], kept: float) -> None:
        self._store, self._streams, self._kept = store, streams, kept
        self._first = True

    def work(self) -> float:
        """Prune, but for the first time; seconds until the next."""
        if self._first:  # a process that was restarted, with many others
            self._first = False
            return random.random() * self._kept / 10
        for stream in self._streams:
            try:
                self._store.prune(older_than=self._kept, stream=stream)
            except BusrepError as error:
                log.warning("old rows of %s cannot be pruned now: %s", stream, error)
        return self._kept / 10 * (0.9 + 0.2 * random.random())


class ReadingUpkeep(CacheUpkeep):
    """The upkeep of these caches, by a bus that reads for a process whose facts are written by ``writing``."""

    def __init__(self, bus: ReadingBus, caches: Caches, writing: SharedWriter | None) -> None:
        super().__init__(bus, caches)
        self._beside = writing

    def follow(self, feed: Feed) -> None:
        """It has a cache now."""
        if self._open:
            self._follow(feed)

    def _own(self, stream: str) -> Own | None:
        writing = self._beside
        found = None if writing is None else writing.shared.freshness(stream)
        return None if writing is None or found is None else Own(writing.shared.name, *found)


def _before_fork() -> None:
    """Hold all locks, each of which is held for a few instructions only: so in the child nobody has any, and what they
    guard is whole. Threads that fork at a time meet at the first one."""
    for caching in list(_ALL):
        for lock in caching.locks():
            lock.__enter__()
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().__exit__(None, None, None)


def _forked() -> None:
    _after_fork()
    for caching in list(_ALL):
        caching.forked()


_held: list[Lock] = []
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
