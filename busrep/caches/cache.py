"""A near cache that is never stale for ever: the invalidation stream, and what a process may still return.

A row of the stream is ``[cache_name, keys or null, unix ms]``. Any process may write one, in the transaction that
changes what was cached; every process that caches under that name drops the value. What follows is about the rows that
do not come, come late, or come while the value is being loaded.

*Fills.* A value that was read before an invalidation came must not be stored after it. So an invalidation changes the
mark of its key, and a load whose key has another mark at its end is not stored.

*Gaps.* A `Feed` numbers the moments at which rows turned out to be lost. Every entry carries the number at which its
load began, and only entries at or above ``barrier`` are returned: a gap makes all earlier ones unreachable at once, and
they come back when the lost rows have been applied, those that were invalidated excepted.

*Silence.* A row may be lost without a sign of it until the next beat. So an entry is returned only while it is proven
that everything that was committed ``bound`` seconds ago has been applied here (``expires``, see freshness.py), or if
its load began less than that ago. The clock is asked at each hit: a timer does not fire in a process that was stopped.

Pure: time is passed in as a clock, locks as a factory, for plain functions are called from many threads. ``lock`` must
make those that a thread may take again: the garbage collector runs code of others in the middle of anything.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError
from ..settings import Settings
from ..streams import Stream
from .cached import NOT_FOLLOWING, Cache, Lock, bounded_store, check_key, keys_of


@attrs.frozen
class Invalidation:
    """One row: drop what ``cache`` holds under ``keys``, or all of it (None). ``at_ms``: when it was written, unix
    milliseconds, for people; nothing is decided by it."""

    cache: str
    keys: list[Any] | None
    at_ms: int


def invalidations(name: str = "caches", *, channel: str = "", resettable: bool = False) -> Stream[Invalidation]:
    """The stream of invalidations, to be passed in ``streams=``.

    ``resettable``: without a table. Then a lost row cannot be fetched, and a gap clears the caches; nor can an
    invalidation be part of a transaction, or a writer be known that nobody has heard yet.
    """
    return Stream(name, Invalidation, channel=channel, resettable=resettable, follows=False)


def is_invalidations(stream: Stream[Any]) -> bool:
    """Whether a stream is one of invalidations."""
    return stream.row_type is Invalidation


def row_of_key(cache: Cache, keys: Iterable[Any] | None, at_ms: int) -> Invalidation:
    """The row that invalidates a key (a tuple of parts) of a cache, or everything in it (None). Raises ConfigError."""
    return Invalidation(cache.name, None if keys is None else list(check_key(cache.name, tuple(keys))), at_ms)


def row_of_call(cache: Cache, args: Sequence[Any], kwargs: Mapping[str, Any], at_ms: int) -> Invalidation:
    """The row that invalidates what the function returned for these arguments. Raises ConfigError, TypeError."""
    return Invalidation(cache.name, list(cache.keys.of(args, kwargs)), at_ms)


# -- one stream of invalidations ------------------------------------------------------------------------------


@attrs.define(eq=False, kw_only=True)
class Feed:
    """One invalidation stream as this process hears it, and the caches that it invalidates. Times are of the clock of
    `Caches`, in seconds.

    One thread calls the methods, but for ``apply``, which any may. Calls of cached functions look at ``number``,
    ``barrier``, ``expires`` and ``bound``.
    """

    stream: Stream[Invalidation]
    bound: float
    offline: float
    number: int = 0
    barrier: float = NOT_FOLLOWING
    expires: float = -math.inf
    proof: float = -math.inf
    connected: bool = True
    gaps: int = 0
    caches: dict[str, Cache] = attrs.field(factory=dict)
    specials: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    clears: int = 0
    rows: int = 0
    unknown_names: int = 0
    other_keys: int = 0
    special_nulls: int = 0

    @property
    def following(self) -> bool:
        """Whether the stream is heard at all."""
        return self.barrier != NOT_FOLLOWING

    @property
    def bound_in_force(self) -> float:
        """Seconds after the last proof in which entries are returned: more while the link is down, if so set."""
        return self.bound if self.connected else max(self.bound, self.offline)

    def follow(self) -> None:
        """The positions from which it is heard are known: what is loaded from here on may be kept."""
        self.number += 1  # before the barrier: a load that began before now is refused
        self.barrier = 0

    def gap(self) -> None:
        """Rows are known to be lost, or may be: nothing that was loaded before now is returned until ``mended``."""
        self.number += 1
        if self.following:
            self.gaps += 1
            self.barrier = self.number

    def mended(self) -> None:
        """All rows that were lost have been applied."""
        if self.following:
            self.barrier = 0

    def prove(self, as_of: float) -> None:
        """Everything committed before ``as_of`` has been applied: true for ever, so an older one is ignored."""
        if as_of > self.proof:
            self.proof = as_of
            self.expires = as_of + self.bound_in_force

    def link(self, connected: bool) -> None:
        """The link came up, or went down."""
        self.connected = connected
        self.expires = self.proof + self.bound_in_force

    def stop(self) -> None:
        """It is not heard any more."""
        self.barrier = NOT_FOLLOWING  # before all is dropped: what is stored after that is refused
        self.clear()

    def clear(self) -> None:
        """Drop everything: rows are gone that nothing can bring."""
        self.clears += 1
        self.number += 1
        for cache in list(self.caches.values()):
            cache.clear()

    def apply(self, rows: Iterable[Invalidation]) -> list[str]:
        """Take in rows, in any order, as often as they come. Gives what is wrong with them, for the log."""
        complaints = []
        for row in rows:
            self.rows += 1
            special = self.specials.get(row.cache, ())
            if row.cache in self.caches:
                self._drop(self.caches[row.cache], row.keys)
            elif not special:
                self.unknown_names += 1
            elif row.keys is None:
                self.special_nulls += 1
                complaints.append(f"null keys for the special name {row.cache!r}: the caches it stands for are cleared")
            for name in special:
                if name in self.caches:
                    self._drop(self.caches[name], row.keys)
        return complaints

    def _drop(self, cache: Cache, keys: Sequence[Any] | None) -> None:
        if keys is None:
            cache.invalidations += 1
            cache.clear()
        elif not cache.drop(keys):
            self.other_keys += 1

    def statistics(self, now: float) -> dict[str, Any]:
        """JSON-able. ``bound``: seconds of staleness in force. ``trusted``: whether entries of any age are returned
        now. ``proof_age``: seconds, None without a proof. ``other_keys``: rows whose keys cannot be the cache's."""
        return {
            "following": self.following,
            "bound": self.bound_in_force,
            "trusted": self.barrier == 0 and now < self.expires,
            "proof_age": None if self.proof == -math.inf else now - self.proof,
            "gaps": self.gaps,
            "clears": self.clears,
            "rows": self.rows,
            "unknown_names": self.unknown_names,
            "other_keys": self.other_keys,
            "special_nulls": self.special_nulls,
        }


# -- all of a bus ---------------------------------------------------------------------------------------------


class Caches:
    """The caches of one process, by name, and the streams that invalidate them.

    ``clock``: monotonic seconds, those that every time given here is of. ``lock`` makes one lock per cache.
    """

    def __init__(
        self,
        streams: Iterable[Stream[Any]],
        settings: Settings,
        *,
        clock: Callable[[], float],
        lock: Callable[[], Lock],
    ) -> None:
        bound = 1.25 * settings.heartbeat if settings.cache_bound is None else settings.cache_bound
        found = [stream for stream in streams if is_invalidations(stream)]
        self.feeds = {stream.name: Feed(stream=stream, bound=bound, offline=settings.cache_offline) for stream in found}
        self.caches: dict[str, Cache] = {}
        self.clock = clock
        self._lock = lock

    @property
    def pruned(self) -> list[str]:
        """The streams whose old rows are busrep's to prune. Those in a table of the application's are not."""
        streams = [feed.stream for feed in self.feeds.values()]
        return [stream.name for stream in streams if not stream.resettable and stream.table is None]

    def feed_of(self, stream: Stream[Any] | None = None) -> Feed:
        """The feed of a stream, by default of the only one. Raises ConfigError."""
        if stream is not None:
            if stream.name in self.feeds:
                return self.feeds[stream.name]
            raise ConfigError(f"stream {stream.name!r} is no stream of invalidations of this bus: pass it in streams=")
        if len(self.feeds) == 1:
            return next(iter(self.feeds.values()))
        if self.feeds:
            raise ConfigError(f"several streams of invalidations ({', '.join(self.feeds)}): say which one, stream=")
        raise ConfigError(
            "caches need a stream of invalidations: pass busrep.caches.invalidations() in streams= of connect()"
        )

    def add(
        self,
        function: Callable[..., Any],
        *,
        maxsize: int = 1024,
        ttl: float | None = None,
        name: str | None = None,
        key: Callable[..., Any] | None = None,
        stream: Stream[Any] | None = None,
    ) -> Cache:
        """A cache of a function's results; ``bus.cached`` says what the arguments mean. Raises ConfigError,
        MissingExtra."""
        feed = self.feed_of(stream)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{function!r} gives an iterator, which is used up by its first caller: return a list")
        if name is None:
            module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
            if not (isinstance(module, str) and isinstance(qualified, str)):
                raise ConfigError(f"{function!r} has no name: pass name=")
            name = f"{module}.{qualified}"
        self._check_name(name, feed)
        keys = keys_of(name, function, key)
        cache = Cache(feed, keys, bounded_store(maxsize, ttl, self.clock), self._lock())
        self.caches[name] = feed.caches[name] = cache
        return cache

    def special(self, name: str, members: Iterable[object], stream: Stream[Any] | None = None) -> None:
        """Let ``name`` stand for several caches with the same key: names, or cached functions. Raises ConfigError."""
        feed = self.feed_of(stream)
        names = []
        for member in members:
            found = member if isinstance(member, str) else getattr(member, "cache_name", None)
            if not isinstance(found, str):
                raise ConfigError(f"special cache {name!r}: {member!r} is neither a name nor a cached function")
            if found in self.caches and self.caches[found].feed is not feed:
                raise ConfigError(f"special cache {name!r}: {found!r} is invalidated by another stream")
            names.append(found)
        if not names:
            raise ConfigError(f"special cache {name!r}: name the caches that it stands for")
        self._check_name(name, feed)
        feed.specials[name] = tuple(dict.fromkeys(names))

    def _check_name(self, name: object, feed: Feed) -> None:
        _check_word(name)
        if name in self.caches or name in feed.specials:
            raise ConfigError(f"two caches are named {name!r}: pass name=")

    def row(
        self, name: str, keys: Iterable[Any] | None, at_ms: int, stream: Stream[Any] | None = None
    ) -> tuple[Stream[Invalidation], Invalidation]:
        """The row that invalidates a key of any cache, of this process or of others, and the stream that it goes to.

        Raises ConfigError: for null keys of a special name too.
        """
        known = [feed for feed in self.feeds.values() if name in feed.caches or name in feed.specials]
        feed = known[0] if known and stream is None else self.feed_of(stream)
        _check_word(name)
        if keys is None and name in feed.specials:
            raise ConfigError(
                f"{name!r} is a special name, which is invalidated by key only: invalidate the caches it stands for, "
                f"{', '.join(feed.specials[name])}"
            )
        if isinstance(keys, str):
            raise ConfigError(f"cache {name!r}: keys={keys!r} is one part of a key: pass a tuple, ({keys!r},)")
        parts = None if keys is None else list(check_key(name, tuple(keys)))
        return feed.stream, Invalidation(name, parts, at_ms)

    def committed(self, stream: str, payloads: Sequence[bytes]) -> list[str]:
        """Apply own facts, before whoever committed them goes on. Gives what is wrong with them, for the log."""
        feed = self.feeds[stream]
        return feed.apply(feed.stream.decode(payloads))

    def drop_all(self) -> None:
        """Own facts may have been committed that were not applied here: drop all, and what is being loaded."""
        for cache in list(self.caches.values()):
            cache.clear()

    def statistics(self) -> dict[str, Any]:
        """JSON-able: {"streams": {stream: see `Feed`}, "caches": {name: see `Cache`}}."""
        now = self.clock()
        return {
            "streams": {name: feed.statistics(now) for name, feed in self.feeds.items()},
            "caches": {name: cache.statistics() for name, cache in self.caches.items()},
        }


def _check_word(name: object) -> None:
    if not isinstance(name, str) or not name or any(map(str.isspace, name)):
        raise ConfigError(f"a cache's name is one word, not {name!r}: pass name=")
