"""What ``bus.cached`` gives: a function that can be invalidated; and the pruning of what that leaves in the table."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from busrep.caches.cache import Invalidation, row_of_call, row_of_key
from busrep.caches.cached import Cache
from busrep.errors import BusrepError
from busrep.settings import Settings
from busrep.stores.interface import StoreAdmin
from busrep.streams import Stream

from ..runtime.fact import FactBase

log = logging.getLogger("busrep.caches")

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

Write = Callable[[Stream[Invalidation], Sequence[Invalidation]], Any]


class CachedFunction(Protocol[P, R_co]):
    """What ``bus.cached`` makes of a function: called like it, and a few ways to invalidate what it returned."""

    cache_name: str
    __wrapped__: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """What the function returned for these arguments, or returns now."""

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Drop in every process what was returned for these arguments: a fact, and a transaction, of its own."""

    async def invalidate_many(self, keys: Iterable[tuple[Any, ...]]) -> None:
        """The same for many keys (what ``key`` makes of the arguments, or they themselves), in one fact."""

    async def invalidate_all(self) -> None:
        """Drop everything that it returned."""

    def invalidate_in(self, fact: FactBase[Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """As ``invalidate``, when this fact is committed: ``bus.write(orders, caches)``."""

    def invalidate_all_in(self, fact: FactBase[Any]) -> None:
        """As ``invalidate_all``, when this fact is committed."""

    def statistics(self) -> dict[str, int]:
        """hits, misses, bypassed, invalidations, fills_refused, size."""


def unix_ms() -> int:
    """Now, as rows carry it."""
    return int(time.time() * 1000)


def add_methods(cached: Any, cache: Cache, stream: Stream[Invalidation], write: Write) -> None:
    """Give a wrapped function the ways to invalidate what it returned; ``write`` writes rows as one fact. If it is a
    coroutine function, they are to be awaited as well."""

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


async def keep_pruning(store: StoreAdmin | None, stream: Stream[Any], settings: Settings) -> None:
    """Prune rows of invalidations that are older than ``invalidations_kept``, until cancelled.

    Every process that writes the stream does, now and then: who prunes what is pruned already does nothing.
    """
    kept = settings.invalidations_kept
    pause = random.random() * kept / 10
    while store is not None:
        await asyncio.sleep(pause)
        pause = kept / 10 * (0.9 + 0.2 * random.random())
        try:
            await store.prune(older_than=kept, stream=stream.name)
        except BusrepError as error:
            log.warning("old rows of %s cannot be pruned now: %s", stream.name, error)
        except Exception:  # a bug, in a store perhaps: the table would grow for ever
            log.exception("old rows of %s cannot be pruned", stream.name)
