"""The bus: what an application calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

from busrep.caches.cache import Caches
from busrep.core.application_commands import UserIp
from busrep.core.commands import Command
from busrep.core.delivery import Missed, Reset
from busrep.core.health import Health, closed, health_of
from busrep.errors import ConfigError, NotAWriter, Unavailable, WriterFenced
from busrep.options import BusOptions
from busrep.stores.interface import KnownWriter
from busrep.streams import Stream, checked_stream

from ..links import ServerAddress
from ..runtime.batch import Batch, Handler, NoticeHandler
from ..runtime.cached import CachedFunction, unix_ms
from ..runtime.fact import RENEWALS
from ..snapshots.parts import Applier, ApplyHandler
from .bus_life import BusLife
from .caching import CacheUpkeep
from .messages import LineSeen, channel_of
from .writing import Fact, Writing

CommandT = TypeVar("CommandT", bound=Command)
P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")
NoticeT = TypeVar("NoticeT", bound=Callable[..., Any])


class Bus(BusLife):
    """One process's part in a deployment. `busrep.connect` makes it; `busrep.options.BusOptions` has its arguments."""

    def __init__(self, redis: ServerAddress, options: BusOptions, *, caches: Caches | None = None) -> None:
        super().__init__(redis, options)
        self.caching = CacheUpkeep(self, caches)

    # -- writing ----------------------------------------------------------------------------------------------

    @overload
    def write(
        self, stream: Stream[RowT], /, *streams: Stream[Any], connection: Any = None, count: int = 1
    ) -> Fact[RowT]: ...
    @overload
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> Fact[Any]: ...
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> Fact[Any]:
        """A fact of ``streams`` (usually one) in one transaction: ``async with bus.write(orders) as fact``.

        ``connection``: the caller's own (sqlite3, psycopg sync or async), else one of busrep's. If it is in a
        transaction already, that one is joined (PostgreSQL) and its end is the caller's. ``count``: so many IDs, for
        `Fact.add_each`. On entry raises NotAWriter, WriterFenced, Unavailable, ConfigError; on exit what the database
        raises, Unavailable when the writer was finished or the bus closed meanwhile, and CommitUnknown when COMMIT got
        no answer: then busrep finds out by itself what became of it.
        """
        return Fact(self._writer_of(streams), streams, connection, count)

    async def publish(self, stream: Stream[RowT], rows: Sequence[RowT], *, connection: Any = None) -> list[int]:
        """Write each row as a fact of its own, all in one transaction. Returns the IDs. Raises RowError, NotAWriter,
        WriterFenced, Unavailable, and CommitUnknown: then it is not known whether they were written."""
        if not rows:
            return []
        for again in range(RENEWALS, -1, -1):
            fact = Fact[RowT](self._writer_of((stream,)), (stream,), connection, len(rows), unnumbered=True)
            try:
                async with fact:
                    fact.add_each(rows)
                break
            except Unavailable as error:
                if not again or error is not fact.not_written:
                    raise
        return fact.published_ids()

    async def settle(self) -> None:
        """Look now whether transactions of the caller's own have committed, and publish their facts: WriterFenced,
        Unavailable."""
        writing = self.writing
        if writing is not None:
            try:
                await writing.settle()
            except WriterFenced as error:
                writing.fence(error)
                await writing.live()  # perhaps it was finished for its silence: then what was committed is in the table

    def _writer_of(self, streams: Sequence[Stream[Any]]) -> Writing:
        self._check_open()
        if not streams:
            raise ConfigError("write() needs a stream: bus.write(orders)")
        for stream in streams:
            if checked_stream(stream).name not in self.streams or self.writing is None:
                raise NotAWriter(stream.name, self.writer)
        assert self.writing is not None  # noqa: S101 (just looked)
        return self.writing

    # -- reading ----------------------------------------------------------------------------------------------

    @overload
    def subscribe(self, *streams: Stream[RowT]) -> Callable[[Handler[RowT]], Handler[RowT]]: ...
    @overload
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]: ...
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]:
        """Decorate a function (async or not) that is called with each ``Batch`` of ``streams``.

        Per (stream, writer) calls are in order and one at a time; different writers' may interleave at awaits.
        A handler that raises is called again with the same rows: in an outage for as long as it lasts, else until
        ``handler_retries`` and ``poison_after`` are over; then ``on_poison`` applies.
        """
        self._check_open()
        found = [self.streams.of(stream) for stream in streams]

        def register(handler: Handler[Any]) -> Handler[Any]:
            for stream in found:
                self.reading.subscribe(stream, handler)
            return handler

        return register

    @overload
    def follow(self, *streams: Stream[RowT]) -> AsyncIterator[Batch[RowT]]: ...
    @overload
    def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]: ...
    def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]:
        """Iterate over the batches of ``streams``; a batch counts as handled when the next one is asked for."""
        self._check_open()
        return self.reading.follow(*[self.streams.of(stream) for stream in streams])

    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """Return once everything that ``writer`` wrote to ``stream`` up to ``token`` has been handled here.

        The own writer's is at once. Without a handler rows count as handled; a durable reader's first handler
        gets them all the same. Raises WaitTimeout after ``timeout`` seconds, HandlerFailed or PositionTooOld when it
        can never be.
        """
        self._check_open()
        if writer != self.writer or self._own or self._is_successors(stream, token):
            # IDs of a negative stream are below zero in the table, above it everywhere else.
            await self.reading.wait_for(self.streams.of(stream), writer, abs(token), timeout)

    def _is_successors(self, stream: Stream[Any], token: int) -> bool:
        writing = self.writing
        return writing is not None and (writing.lost or writing.is_successors(stream.name, abs(token)))

    def on_reset(self, stream: Stream[Any] | None = None) -> Callable[[NoticeHandler], NoticeHandler]:
        """Decorate a function called with (stream name, writer, position) when that stream begins anew."""
        return self._on_notice(Reset, stream)

    def on_missed(self, stream: Stream[Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function called with (stream name, writer, after, upto) when those rows are gone for good, or, of
        a foreign writer, may have been missed: its tokens skip."""
        return self._on_notice(Missed, stream)

    def _on_notice(self, kind: type[Reset | Missed], stream: Stream[Any] | None) -> Callable[[NoticeT], NoticeT]:
        name = None if stream is None else checked_stream(stream).name

        def register(handler: NoticeT) -> NoticeT:
            self.reading.handlers.on_notice(kind, name, handler)
            return handler

        return register

    def positions(self) -> dict[str, dict[str, int]]:
        """Where this process is, {stream: {writer: token}}: handled for others, published for itself.

        While facts that a predecessor under the own name left are not handled, the own name counts as another's. After
        a failover that took back their effects that is so once more, and the position is lower than before.
        """
        found = self.reading.core.positions()
        for stream in self.reading.core.bootstrapping:  # what is there of it is no position
            found.pop(stream, None)
        # Fenced, it may yet win its name back; once it is lost, reading goes on from these positions.
        if self.writing is not None and not self._own and not self.own_name.lost:
            for stream, position in self.writing.core.positions().items():
                if self.reading.own_counts(stream):
                    found.setdefault(stream, {})[self.writing.name] = position
        return found

    async def linear_position(self, stream: Stream[Any]) -> int:
        """Every row of ``stream`` up to here, by any writer, has been handled here (rule 9.7).

        For consumers that need one order over all writers. Raises ConfigError for a stream that does not
        follow or has no table.
        """
        if self.store is None or checked_stream(stream).resettable or not stream.follows:
            raise ConfigError(f"stream {stream.name!r} has no linear position")
        await self.reading.followed(self.streams.of(stream))
        core = self.reading.core
        while True:
            log_read, handled = core.epoch, self.positions().get(stream.name, {})
            known = [one for one in await self.store.known(log_read) if one.stream == stream.name]
            lags = await self.store.sequence(stream.name, log_read) is None
            if core.epoch == log_read:  # else begun again in another log meanwhile
                return _linear_position(known, handled, lags=lags)

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """Go on with a (stream, writer) that stopped on a poison row, at that row; with a bootstrap of the stream that
        stopped, at the part that it stopped at."""
        self.reading.resume(checked_stream(stream).name, writer)

    def snapshot(
        self, stream: Stream[RowT], *, key: Callable[[RowT], Hashable] | None = None
    ) -> Callable[[ApplyHandler[RowT]], ApplyHandler[RowT]]:
        """Decorate a function (async or not) that applies a snapshot of ``stream``, called with each `SnapshotPart`.

        From then on a bootstrap begins when this reader is new (no saved positions, no ``start=``), more than
        ``bootstrap_lag`` IDs behind at its start, in need of rows that are pruned, or in another log than it was; an
        unfinished one goes on. Handlers of ``subscribe`` get what follows the snapshot. ``key``: a function of a row;
        within a part only the latest row of each key is handed on. One part at a time, in order; a function that raises
        is called again with the same part, then the stream stops until ``resume``.

        Decorate it before, or in one go with, the handlers of ``subscribe``. Raises ConfigError for a second function,
        for a stream without a table, and where no snapshots are to be had.
        """
        self._check_open()

        def register(handler: ApplyHandler[RowT]) -> ApplyHandler[RowT]:
            self.reading.snapshot(Applier(self.streams.of(stream), handler, key))
            return handler

        return register

    async def bootstrap(self, stream: Stream[Any]) -> None:
        """Take a snapshot of ``stream`` now, or wait for the one that is being taken; return once the stream is online.

        The bootstrap goes on when the caller is cancelled. Raises ConfigError without a function of ``snapshot``, and
        from inside a handler of the stream, which it would wait for; HandlerFailed when the function keeps failing.
        """
        self._check_open()
        await self.reading.bootstrap(self.streams.of(stream))

    # -- caches -----------------------------------------------------------------------------------------------

    def cached(
        self,
        *,
        maxsize: int = 1024,
        ttl: float | None = None,
        name: str | None = None,
        key: Callable[..., tuple[Any, ...]] | None = None,
        stream: Stream[Any] | None = None,
    ) -> Callable[[Callable[P, R]], CachedFunction[P, R]]:
        """Decorate a function (async or not) whose results are kept in this process until somebody invalidates them.

        After an invalidation is committed, in whatever process, nothing older is returned once ``Settings.cache_bound``
        seconds have passed, though every message about it was lost. Before the bus is open, and once it is closing,
        every call goes through.

        ``maxsize``: results kept; of more the least recently used goes. ``ttl``: seconds after which one goes anyhow.
        ``name``: under which it is invalidated, unlike any other's, by default ``module.qualified_name``. ``key``: a
        function of the arguments that gives a tuple of what a result depends on; by default the arguments, which must
        then be str, int, bool, None or finite float. ``stream``: of `busrep.caches.invalidations`, by default the only
        one of this bus. Raises ConfigError, MissingExtra.
        """
        return lambda function: self.caching.add(function, maxsize=maxsize, ttl=ttl, name=name, key=key, stream=stream)

    async def invalidate(self, name: str, keys: Iterable[Any] | None, *, stream: Stream[Any] | None = None) -> None:
        """Invalidate a key (a tuple of parts) of any cache, of this service or another, or all of it (None).

        A fact, and a transaction, of its own. ``stream``: needed only where there are several streams of invalidations.
        Raises ConfigError, NotAWriter, and what ``write`` raises.
        """
        found, row = self.caching.caches.row(name, keys, unix_ms(), stream)
        await self.caching.write(found, [row])

    def special_cache(self, name: str, caches: Iterable[Any], *, stream: Stream[Any] | None = None) -> None:
        """Let ``name`` stand for several caches with the same key: cached functions, or names. Who invalidates a key of
        it, in whatever process, invalidates that key of each of them; all of it (null) nobody can. Raises ConfigError.
        """
        self.caching.caches.special(name, caches, stream)

    # -- other commands ---------------------------------------------------------------------------------------

    async def send(self, command: Command) -> None:
        """Publish a command that is not about streams (presence, locks, tasks...). It is news: sent at most once
        when all is well, and again when it is unknown whether it arrived. Raises Unavailable when too many wait."""
        if self._state != "closing":  # a handler of before_close may
            self._check_open()
        self.publisher.send(command)

    @property
    def commands_waiting(self) -> int:
        """Commands of `send` that are not published yet."""
        return len(self.publisher.commands)

    def on(self, kind: type[CommandT]) -> Callable[[Callable[[CommandT], Any]], Callable[[CommandT], Any]]:
        """Decorate a function (async or not) that is called with each command of that class."""
        self._check_open()

        def register(handler: Callable[[CommandT], Any]) -> Callable[[CommandT], Any]:
            self.receiver.on(kind, handler)
            channel = channel_of(self.name, "USER_IP" if kind is UserIp else "")
            self.tasks.spawn(partial(self.link.subscribe, channel), "subscribe", again=True)
            return handler

        return register

    def on_connect(self, handler: Callable[[], Any]) -> Callable[[], Any]:
        """Call ``handler`` (async or not) after each connect and reconnect: others may have missed what was sent."""
        self._connect_handlers.append(handler)
        return handler

    def before_close(self, handler: Callable[[], Any]) -> Callable[[], Any]:
        """Call ``handler`` (async or not) when the bus is being closed and the link still stands; what it sends is
        published. It has ``shutdown_timeout`` seconds."""
        self._close_handlers.append(handler)
        return handler

    def on_line(self, handler: LineSeen) -> None:
        """Call ``handler(direction, channel, line)`` for every line received ("<") and sent (">")."""
        self.publisher.lines.append(handler)

    def health(self) -> Health:
        """Whether this process does its part, and the reasons why not. Reads what is in memory; asks no server."""
        return health_of(self.statistics()) if self._state == "open" else closed()

    def statistics(self) -> dict[str, Any]:
        """Counters, levels and states of this process, JSON-able."""
        now = asyncio.get_running_loop().time()
        return {
            "reader": self.reading.statistics(),
            "writer": None if self.writing is None else self.writing.statistics(),
            "link": {
                **self.link.statistics(),
                "commands_waiting": self.commands_waiting,
                "commands_dropped": self.receiver.commands_dropped,
            },
            "stuck": [] if self.writing is None else self.writing.stuck(now),
            "bootstrap": self.reading.bootstrapping.statistics(),
            "caches": self.caching.caches.statistics(),
        }


def _linear_position(known: Iterable[KnownWriter], handled: Mapping[str, int], *, lags: bool) -> int:
    """The linear position of a stream, by its part of the registry and the positions handled here, {writer: token}.

    ``lags``: the registry is a replica's and may be older than what was handled. A writer may have joined since, and
    reserved an ID below that; but none below a position of the same snapshot, for these were given out before.
    """
    lowest, highest = [], 0
    for one in known:
        at = handled.get(one.writer, 0)
        if lags:
            at = min(at, one.position)
        highest = max(highest, at)
        # A writer that left the registry counts until its last rows have been handled here.
        if one.registered or at < one.position:
            lowest.append(at)
    return min(lowest, default=highest)
