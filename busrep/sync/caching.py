"""The caches of a bus for threads (docs/caches.md).

Calls of cached functions come from any thread, and ask nobody: the core (busrep.caches) has a lock for each cache, and
what may be returned at all stands in the feed, which the upkeep (busrep.asyncio.caching) moves on the loop of the
reading half. So a hit costs what it costs with asyncio, and a loop that stands still makes the caches expire.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from busrep.caches.cache import Caches, Feed, Invalidation
from busrep.caches.cached import Lock
from busrep.errors import ConfigError
from busrep.runtime.cached import add_cached
from busrep.settings import Settings
from busrep.streams import Registry, Stream

if TYPE_CHECKING:
    from .bus import BlockingBus

_ALL: weakref.WeakSet[SharedCaches] = weakref.WeakSet()


class SharedCaches:
    """The caches of one bus. All methods may be called from any thread."""

    def __init__(self, bus: BlockingBus, streams: Registry, settings: Settings) -> None:
        self.caches = Caches(streams, settings, clock=time.monotonic, lock=threading.RLock)
        self._bus = bus
        self._adding = threading.RLock()
        _ALL.add(self)

    def add(self, function: Callable[..., Any], **options: Any) -> Any:
        """The function with a cache before it. Raises ConfigError, MissingExtra."""
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is a coroutine function: a bus for threads caches plain ones")
        with self._adding:
            return add_cached(self.caches, function, self.write, **options)

    def forget(self, name: str, feed: Feed) -> None:
        """Whoever added it could not be told that it is kept fresh: it may be added again."""
        with self._adding:
            del self.caches.caches[name], feed.caches[name]

    def special(self, name: str, members: Iterable[Any], stream: Stream[Any] | None) -> None:
        """See `BlockingBus.special_cache`."""
        with self._adding:
            self.caches.special(name, members, stream)

    def write(self, stream: Stream[Invalidation], rows: Sequence[Invalidation]) -> None:
        """Write rows as one fact, if there are any."""
        if rows:
            with self._bus.write(stream) as fact:
                for row in rows:
                    fact.add(row)

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
