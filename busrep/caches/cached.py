"""One cached function: its keys, its entries, the loads that are under way, and the call itself (see cache.py for why).

A key is a tuple of parts that have one form in JSON, for it travels in the rows that invalidate it. 1, 1.0 and True are
one key, as they are to a dict; so they are to `functools.lru_cache`.

What a hit costs stands in `wrap`: it is about what `cachetools.cached` takes for the same store and lock. A miss costs
some 1.4 times what it costs there, of an async function 1.5 (benchmarks/cache_hit.py).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

from ..core.fields import INT64_MAX, INT64_MIN
from ..errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from .cache import Feed

Key = tuple[Any, ...]
Lock = AbstractContextManager[Any]
Store = MutableMapping[Key, Any]

NOT_FOLLOWING = math.inf
"""The barrier of a feed that hears nothing yet, or any more: nothing is kept, every call goes through."""


# -- keys -----------------------------------------------------------------------------------------------------


def check_key(cache: str, key: object) -> Key:
    """A key as it is kept and written. Raises ConfigError for parts that have no one form in JSON."""
    if not isinstance(key, tuple):
        raise ConfigError(f"cache {cache!r}: a key is a tuple of parts, not {key!r}: end key= in a comma, (id,)")
    for part in key:
        kind = type(part)
        if kind is int:
            fits = INT64_MIN <= part <= INT64_MAX
        elif kind is str:
            fits = part.isascii() or not any("\ud800" <= character <= "\udfff" for character in part)
        elif kind is bool or part is None:
            fits = True
        else:
            fits = kind is float and math.isfinite(part)
        if not fits:
            raise ConfigError(
                f"cache {cache!r}: {part!r} cannot be part of a key ({kind.__name__}): pass key=, a function of the "
                "arguments that gives a tuple of str, int of 64 bits, bool, None and finite float, such as str(id)"
            )
    return key


@attrs.frozen
class Keys:
    """How the arguments of a function become a key. ``parts``: of how many it always consists, if that is known.
    ``plain``: positional arguments alone, if they are all given, are the key."""

    cache: str
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    parts: int | None
    plain: bool

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
        """The key. Raises ConfigError, and TypeError for arguments that the function does not take."""
        return check_key(self.cache, self.make(args, kwargs))


def keys_of(cache: str, function: Callable[..., Any], key: Callable[..., Any] | None) -> Keys:
    """The keys of a function: what ``key`` makes of the arguments, else the arguments, defaults filled in.

    Raises ConfigError for a function with ``**kwargs`` and no ``key``: there is no one order of them.
    """
    if key is not None:
        given = key
        return Keys(cache, lambda args, kwargs: given(*args, **kwargs), None, False)
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        raise ConfigError(f"cache {cache!r}: a function with **kwargs needs key=, a function that gives its key")
    by_name = inspect.Parameter.KEYWORD_ONLY in kinds
    count = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(signature.parameters)

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) == count and not kwargs and not by_name:
            return args
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args + tuple(bound.kwargs.values())

    return Keys(cache, make, count, not by_name)


# -- entries --------------------------------------------------------------------------------------------------


# No entry: below every barrier.
_NOTHING = (None, -1, -math.inf)


Load = tuple[Key, int, int, float]
"""A load that is under way: the key, its mark (`Cache.begin`), and the feed's number and the clock as it began."""

# Marks of a cache. Keys share them by their hash: a load is refused once in so many invalidations of other keys, too.
MARKS = 1_024


class Cache:
    """What one function's results are kept in, and the count of what became of its calls.

    Each entry is (value, the feed's number at which its load began, until when it is returned without a proof). An
    invalidation sets the mark of its key to a new number, so that a load sees at its end whether one came meanwhile.
    Nothing is kept for a load: whatever ends it, an interrupt too, leaves nothing behind.
    """

    __slots__ = (
        "_marks", "_numbers", "bypassed", "feed", "fills_refused", "hits", "invalidations", "keys", "lock", "make",
        "misses", "name", "parts", "store", "torn",
    )  # fmt: skip

    def __init__(self, feed: Feed, keys: Keys, make: Callable[[], Store], lock: Lock) -> None:
        self.name, self.feed, self.keys, self.make, self.lock = keys.cache, feed, keys, make, lock
        self.store = make()
        self.parts = set() if keys.parts is None else {keys.parts}
        # Counted in one step of C's: the garbage collector may run another invalidation in the middle of one.
        self._numbers = itertools.count()
        self._marks = [next(self._numbers)] * MARKS
        self.hits = self.misses = self.bypassed = self.invalidations = self.fills_refused = 0
        self.torn = False

    def _changing(self) -> Store:
        """The store, which is about to change: set ``torn`` back when that is done. The lock is held.

        It is Python, and of several parts. An interrupt (KeyboardInterrupt, a task queue's limit) in the middle leaves
        them apart, for good: then it is thrown away.
        """
        if self.torn:
            self.store = self.make()
        self.torn = True
        return self.store

    def begin(self, key: Key, number: int, started: float) -> Load:
        """A load begins: count why. ``number``: of the feed, ``started``: of the clock, both taken before this."""
        with self.lock:
            if self.feed.barrier == NOT_FOLLOWING or key in self.store:
                self.bypassed += 1
            else:
                self.misses += 1
            if self.keys.parts is None:
                self.parts.add(len(key))
            return key, self._marks[hash(key) % MARKS], number, started

    def end(self, load: Load, value: Any) -> None:
        """A load has ended: keep the value, unless it may be of before an invalidation."""
        key, mark, number, started = load
        feed = self.feed
        with self.lock:
            if feed.barrier == NOT_FOLLOWING:
                return
            # First: what the garbage collector drops from here on throws the store away that this one changes.
            store, until = self._changing(), started + feed.bound
            if mark != self._marks[hash(key) % MARKS] or number < feed.number:
                self.fills_refused += 1
            elif store.get(key, _NOTHING)[2] <= until:  # of two that were under way, the one that began later
                store[key] = (value, number, until)
            self.torn = False

    def drop(self, keys: Sequence[Any]) -> bool:
        """Drop one key. False: it cannot be one of this cache's, so all was dropped, to be safe."""
        key = tuple(keys)
        try:
            place = hash(key) % MARKS
        except TypeError:
            self.clear()
            return False
        with self.lock:
            self.invalidations += 1
            # Of a function of any number of arguments every length is right.
            fits = not self.parts or len(key) in self.parts or (self.keys.parts is None and self.keys.plain)
            if fits:
                self._marks[place] = next(self._numbers)
                self._changing().pop(key, None)
                self.torn = False
                return True
        self.clear()
        return False

    def clear(self) -> None:
        """Drop all, and what is being loaded."""
        with self.lock:
            self._marks = [next(self._numbers)] * MARKS
            self.store, self.torn = self.make(), False

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and entries now, reachable or not."""
        with self.lock:
            size = len(self._changing())  # it throws out what is older than its ttl
            self.torn = False
        counters = ("hits", "misses", "bypassed", "invalidations", "fills_refused")
        return {**{name: getattr(self, name) for name in counters}, "size": size}


def bounded_store(maxsize: int, ttl: float | None, clock: Callable[[], float]) -> Callable[[], Store]:
    """What makes that in which entries are kept: the least recently used goes first, and after ``ttl`` seconds all do.
    Raises ConfigError, MissingExtra."""
    if type(maxsize) is not int or maxsize < 1:
        raise ConfigError(f"maxsize={maxsize!r}: how many results are kept at most, at least 1")
    if ttl is not None and not ttl > 0:
        raise ConfigError(f"ttl={ttl!r}: seconds, more than 0, or None")
    try:
        from cachetools import LRUCache, TTLCache
    except ModuleNotFoundError:
        raise MissingExtra("caches", "bus.cached") from None
    # What is not held is no exception, which would make a miss a tenth dearer (benchmarks/cache_hit.py).
    kind: Any = type("Held", (LRUCache if ttl is None else TTLCache,), {"__missing__": lambda _store, _key: _NOTHING})
    return (lambda: kind(maxsize)) if ttl is None else (lambda: kind(maxsize, ttl, clock))


def wrap(cache: Cache, function: Callable[..., Any], clock: Callable[[], float]) -> Any:
    """``function`` with ``cache`` before it: a coroutine function of a coroutine function, else a plain one.

    Both are one step for a hit, whose every instruction counts, and `_begin` for the rest.
    """
    lock, feed, plain = cache.lock, cache.feed, cache.keys.plain

    def call(*args: Any, **kwargs: Any) -> Any:
        if plain and not kwargs:
            try:
                with lock:
                    value, number, until = cache.store[args]
                    if number >= feed.barrier and ((now := clock()) < feed.expires or now < until):
                        cache.hits += 1
                        return value
            except (KeyError, TypeError):  # not held, or not to be hashed: then `keys.of` says what to do
                pass
        value, load = _begin(cache, clock, args, kwargs)
        if load is not None:
            value = function(*args, **kwargs)
            cache.end(load, value)
        return value

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if plain and not kwargs:
            try:
                with lock:
                    value, number, until = cache.store[args]
                    if number >= feed.barrier and ((now := clock()) < feed.expires or now < until):
                        cache.hits += 1
                        return value
            except (KeyError, TypeError):
                pass
        value, load = _begin(cache, clock, args, kwargs)
        if load is not None:
            value = await function(*args, **kwargs)
            cache.end(load, value)
        return value

    wrapper = functools.wraps(function)(call_async if inspect.iscoroutinefunction(function) else call)
    wrapper.cache_name = cache.name  # type: ignore[attr-defined]
    wrapper.statistics = cache.statistics  # type: ignore[attr-defined]
    return wrapper


def _begin(
    cache: Cache, clock: Callable[[], float], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Load | None]:
    """What is held under the key that the arguments make, in whatever form they were given, and None; or a load.

    The number is taken before the mark: what happens in between is seen by one or the other.
    """
    feed, keys = cache.feed, cache.keys
    feed_number, started = feed.number, clock()
    key = keys.of(args, kwargs)
    if not (keys.plain and key is args):  # else `wrap` has looked
        with cache.lock:
            value, number, until = cache.store.get(key, _NOTHING)
            if number >= feed.barrier and (started < feed.expires or started < until):
                cache.hits += 1
                return value, None
    return None, cache.begin(key, feed_number, started)
