"""What ``bus.cached`` gives in both runtimes: a function that can be invalidated; and what prunes the table of that."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from busrep.caches.cache import Caches, Invalidation, row_of_call, row_of_key
from busrep.caches.cached import wrap
from busrep.errors import BusrepError
from busrep.stores.interface import StoreAdmin
from busrep.streams import Stream

from .fact import FactBase

log = logging.getLogger("busrep.caches")

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

Write = Callable[[Stream[Invalidation], Sequence[Invalidation]], Any]


class AnyCachedFunction(Protocol[P, R_co]):
    """What ``bus.cached`` makes of a function: called like it, and a few ways to invalidate what it returned."""

    cache_name: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """What the function returned for these arguments, or returns now."""

    def invalidate_in(self, fact: FactBase[Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """As ``invalidate``, when this fact is committed: ``bus.write(orders, caches)``."""

    def invalidate_all_in(self, fact: FactBase[Any]) -> None:
        """As ``invalidate_all``, when this fact is committed."""

    def statistics(self) -> dict[str, int]:
        """hits, misses, bypassed, invalidations, fills_refused, size."""


class CachedFunction(AnyCachedFunction[P, R_co], Protocol[P, R_co]):
    """The same on an event loop, with what writes a fact of its own."""

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Drop in every process what was returned for these arguments: a fact, and a transaction, of its own."""

    async def invalidate_many(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """The same for many keys (what ``key`` makes of the arguments, or they themselves), in one fact."""

    async def invalidate_all(self) -> None:
        """Drop everything that it returned."""


class BlockingCachedFunction(AnyCachedFunction[P, R_co], Protocol[P, R_co]):
    """The same in threads."""

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """See `CachedFunction`."""

    def invalidate_many(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """See `CachedFunction`."""

    def invalidate_all(self) -> None:
        """See `CachedFunction`."""


def unix_ms() -> int:
    """Now, as rows carry it."""
    return int(time.time() * 1000)


def add_cached(caches: Caches, function: Callable[..., Any], write: Write, **options: Any) -> Any:
    """The function with a cache before it, and with the ways to invalidate what it returned. Raises ConfigError,
    MissingExtra.

    ``write`` writes rows as one fact. If it is a coroutine function, these ways are to be awaited as well.
    """
    cache = caches.add(function, **options)
    cached, stream = wrap(cache, function, caches.clock), cache.feed.stream

    def invalidate(*args: Any, **kwargs: Any) -> Any:
        return write(stream, [row_of_call(cache, args, kwargs, unix_ms())])

    def invalidate_many(keys: Iterable[tuple[Any, ...]]) -> Any:
        return write(stream, [row_of_key(cache, key, unix_ms()) for key in keys])

    def invalidate_all() -> Any:
        return write(stream, [row_of_key(cache, None, unix_ms())])

    def invalidate_in(fact: FactBase[Any], *args: Any, **kwargs: Any) -> None:
        fact.add(row_of_call(cache, args, kwargs, unix_ms()), stream=stream)

    def invalidate_all_in(fact: FactBase[Any]) -> None:
        fact.add(row_of_key(cache, None, unix_ms()), stream=stream)

    for method in (invalidate, invalidate_many, invalidate_all, invalidate_in, invalidate_all_in):
        setattr(cached, method.__name__, method)
    return cached


def first_pruning(kept: float) -> float:
    """Seconds until the first time: a process may be restarted with many others."""
    return random.random() * kept / 10


async def prune(store: StoreAdmin, streams: Iterable[str], kept: float) -> float:
    """Prune rows of invalidations that are older than ``kept`` seconds; seconds until the next time.

    Every process that writes the streams does, now and then: who prunes what is pruned already does nothing.
    """
    for stream in streams:
        try:
            await store.prune(older_than=kept, stream=stream)
        except BusrepError as error:
            log.warning("old rows of %s cannot be pruned now: %s", stream, error)
        except Exception:  # a bug, in a store perhaps: the table would grow for ever
            log.exception("old rows of %s cannot be pruned", stream)
    return kept / 10 * (0.9 + 0.2 * random.random())


async def keep_pruning(store: StoreAdmin, streams: Iterable[str], kept: float) -> None:
    """Prune again and again, until cancelled."""
    pause = first_pruning(kept)
    while True:
        await asyncio.sleep(pause)
        pause = await prune(store, streams, kept)
