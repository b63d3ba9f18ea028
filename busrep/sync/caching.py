"""The caches of a bus for threads (docs/caches.md).

Calls of cached functions come from any thread, and ask nobody: the core (busrep.caches) has a lock for each cache, and
what may be returned at all stands in the feed, which the upkeep (busrep.asyncio.caching) moves on the loop of the
reading half. So a hit costs what it costs with asyncio, and a loop that stands still makes the caches expire.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from busrep.caches.cache import Caches
from busrep.caches.cached import Cache, Lock
from busrep.settings import Settings
from busrep.streams import Stream

_ALL: weakref.WeakSet[SharedCaches] = weakref.WeakSet()


class SharedCaches(Caches):
    """The caches of one bus. All methods may be called from any thread."""

    def __init__(self, streams: Iterable[Stream[Any]], settings: Settings) -> None:
        super().__init__(streams, settings, clock=time.monotonic, lock=threading.RLock)
        self._adding = threading.RLock()
        _ALL.add(self)

    def add(self, function: Callable[..., Any], **options: Any) -> Cache:
        """See `Caches`."""
        with self._adding:
            return super().add(function, **options)

    def special(self, name: str, members: Iterable[object], stream: Stream[Any] | None = None) -> None:
        """See `Caches`."""
        with self._adding:
            super().special(name, members, stream)

    # -- fork() -----------------------------------------------------------------------------------------------

    def locks(self) -> Iterator[Lock]:
        """All there are; take each before the next is asked for."""
        yield self._adding
        for cache in self.caches.values():
            yield cache.lock

    def forked(self) -> None:
        """In the child: nobody here hears what is invalidated. What its own bus hears counts from its opening on."""
        for feed in self.feeds.values():
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
