"""What ``bus.cached`` gives: a function that can be invalidated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from busrep.caches.cache import Invalidation, row_of_call, row_of_key
from busrep.caches.cached import Cache
from busrep.streams import Stream

from ..runtime.fact import FactBase

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
