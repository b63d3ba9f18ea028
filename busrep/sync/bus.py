"""The bus for threads: what an application holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import redis as redis_py

from busrep.asyncio.publisher import format_command
from busrep.core.application_commands import UserIp
from busrep.core.commands import Command
from busrep.core.health import Health, closed, health_of
from busrep.errors import Closed, ConfigError, NotAWriter, Unavailable
from busrep.options import BusOptions, ThreadOptions
from busrep.runtime.cached import BlockingCachedFunction, unix_ms
from busrep.settings import Settings
from busrep.stores.interface import AsyncStore
from busrep.streams import Stream, checked_stream

from .batch import ApplyHandler, BlockingBatch, Handler
from .caching import SharedCaches
from .lifetime import Lifetime
from .parts import BusParts
from .reading import ReadingThreads, check_plain
from .writing import BlockingFact, SharedWriter

CommandT = TypeVar("CommandT", bound=Command)
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")


class BlockingBus:
    """One process's part in a deployment, for threads. Made by ``busrep.sync.connect``; see there for the arguments.

    ``with bus`` opens and closes it; without, it opens at its first use, and closes when the interpreter ends. All
    methods may be called from any thread. In a signal handler raise an exception instead of calling them.
    """

    def __init__(self, redis: str | redis_py.Redis, options: BusOptions) -> None:
        if options.on_failure is not None:
            check_plain(options.on_failure)
        self._options = options
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
        self.streams, self.settings = options.streams, options.settings
        self.caching = SharedCaches(self, self.streams, self.settings)
        self.parts = BusParts(redis, options, self.caching)
        self._life = Lifetime(self.parts)

    # -- life -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the store, claim the writer's name, connect to Redis. ``with`` does it, and so does the first use.

        A mere reader connects when it first reads; a bus with cached functions reads from here on.
        """
        self._life.open()

    def close(self) -> None:
        """Publish what is due (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        From inside a handler it returns at once, for it waits until the handler has ended. In a child process of the
        one that opened the bus it does nothing: nothing there is the child's to close.
        """
        if not self._life.here(raising=False):
            return
        reading = self.parts.reading
        if reading is not None and reading.is_handler():
            threading.Thread(target=self.close, name="busrep-close", daemon=True).start()
            return
        self._life.close()

    def __enter__(self) -> BlockingBus:
        self._life.ensure_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> str:
        """One of "new", "opening", "open", "closing" and "closed"."""
        return self._life.state

    def ensure_open(self) -> None:
        """Open the bus if nothing has. Raises Closed once it is closed, and what `open` raises."""
        self._life.ensure_open()

    # -- writing ----------------------------------------------------------------------------------------------

    @overload
    def write(
        self, stream: Stream[RowT], /, *streams: Stream[Any], connection: Any = None, count: int = 1
    ) -> BlockingFact[RowT]: ...
    @overload
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> BlockingFact[Any]: ...
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> BlockingFact[Any]:
        """A fact of ``streams`` (usually one) in one transaction: ``with bus.write(orders) as fact``.

        ``connection``: the caller's own (a psycopg.Connection, or a sqlite3.Connection of this thread), else one of
        busrep's. If it is in a transaction already, that one is joined and its end is the caller's: `settle`, or
        `Fact.ended`, looks what became of it. ``count``: so many IDs, for `Fact.add_each`. On entry raises
        NotAWriter, WriterFenced, ClaimBlocked, Unavailable, ConfigError; on exit what the database raises, and
        CommitUnknown when COMMIT got no answer: then busrep finds out by itself what became of it.
        """
        return BlockingFact(self._writer_of(streams), streams, connection, count)

    def publish(self, stream: Stream[RowT], rows: Sequence[RowT], *, connection: Any = None) -> list[int]:
        """Each row a fact of its own, in one transaction, IDs reserved at once. Returns the IDs."""
        writing = self._writer_of((stream,))
        if not rows:
            return []
        fact: BlockingFact[RowT] = BlockingFact(writing, (stream,), connection, len(rows))
        with fact:
            return fact.add_each(rows)

    def settle(self) -> None:
        """Look now whether transactions of the caller's own have committed, and publish their facts: WriterFenced,
        Unavailable."""
        self._life.ensure_open()
        if self.parts.writing is not None:
            self.parts.writing.settle()

    def _writer_of(self, streams: Sequence[Stream[Any]]) -> SharedWriter:
        self._life.ensure_open()
        if not streams:
            raise ConfigError("write() needs a stream: bus.write(orders)")
        writing = self.parts.writing
        for stream in streams:
            if checked_stream(stream).name not in self.streams or writing is None:
                raise NotAWriter(stream.name, self.writer)
        assert writing is not None  # noqa: S101 (just looked)
        return writing

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self) -> ReadingThreads:
        """The reading half, started if it was not."""
        self._life.ensure_open()
        if (reading := self.parts.reading) is not None:
            return reading
        with self._life.lock:
            self._life.ensure_open()
            return self.parts.begin_reading()

    @overload
    def subscribe(self, *streams: Stream[RowT]) -> Callable[[Handler[RowT]], Handler[RowT]]: ...
    @overload
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]: ...
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]:
        """Decorate a function that is called with each ``Batch`` of ``streams``, in a thread of the bus.

        One call at a time, all handlers together; per (stream, writer) in order. A handler that raises is called again
        with the same rows: in an outage for as long as it lasts, else until ``handler_retries`` and ``poison_after``
        are over; then ``on_poison`` applies.
        """
        return self._read().subscribe(streams)

    @overload
    def follow(self, *streams: Stream[RowT]) -> Iterator[BlockingBatch[RowT]]: ...
    @overload
    def follow(self, *streams: Stream[Any]) -> Iterator[BlockingBatch[Any]]: ...
    def follow(self, *streams: Stream[Any]) -> Iterator[BlockingBatch[Any]]:
        """Iterate over the batches of ``streams``; a batch counts as handled when the next one is asked for."""
        return self._read().follow(streams)

    def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """Return once everything that ``writer`` wrote to ``stream`` up to ``token`` has been handled here.

        The own writer's is at once. Without a handler rows count as handled; a durable reader's first handler
        gets them all the same. Raises WaitTimeout after ``timeout`` seconds, HandlerFailed or PositionTooOld when it
        can never be. In a handler it waits in vain: no other handler is called meanwhile.
        """
        self._life.ensure_open()
        if writer != self.writer or self._options.own or self._is_successors(stream, token):
            self._read().call(lambda bus: bus.wait_for(stream, writer, token, timeout))

    def _is_successors(self, stream: Stream[Any], token: int) -> bool:
        writing = self.parts.writing
        return writing is not None and writing.is_successors(stream.name, abs(token))

    def on_reset(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """Decorate a function called with (stream name, writer, position) when that stream begins anew."""
        return self._read().decorator(lambda bus: bus.on_reset(stream))

    def on_missed(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """Decorate a function called with (stream name, writer, after, upto) when those rows are gone for good, or, of
        a foreign writer, may have been missed: its tokens skip."""
        return self._read().decorator(lambda bus: bus.on_missed(stream))

    def positions(self) -> dict[str, dict[str, int]]:
        """Where this process is, {stream: {writer: token}}: handled for others, published for itself.

        While facts that a predecessor under the own name left are not handled, the own name counts as another's. After
        a failover that took back their effects that is so once more, and the position is lower than before.
        """
        self._life.ensure_open()
        if (reading := self.parts.reading) is not None:
            return reading.do(lambda bus: bus.positions())
        writing = self.parts.writing
        if writing is None or self._options.own or writing.shared.lost is not None:
            return {}
        return {stream: {writing.shared.name: at} for stream, at in writing.positions().items()}

    def linear_position(self, stream: Stream[Any]) -> int:
        """Every row of ``stream`` up to here, by any writer, has been handled here.

        For consumers that need one order over all writers. Raises ConfigError for a stream that does not
        follow or has no table.
        """
        return self._read().call(lambda bus: bus.linear_position(stream))

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """Go on with a (stream, writer) that stopped on a poison row, at that row; with a bootstrap of the stream that
        stopped, at the part that it stopped at."""
        self._read().do(lambda bus: bus.resume(stream, writer))

    def snapshot(
        self, stream: Stream[RowT], *, key: Callable[[RowT], Hashable] | None = None
    ) -> Callable[[ApplyHandler[RowT]], ApplyHandler[RowT]]:
        """Decorate a function that applies a snapshot of ``stream``, called with each `SnapshotPart`, as handlers are.

        When a bootstrap begins, and what ``key`` is, see `busrep.Bus.snapshot`. Decorate it before the handlers of
        ``subscribe``, which get what follows the snapshot. Raises ConfigError for a second function, for a stream
        without a table, and where no snapshots are to be had.
        """
        return self._read().snapshot(stream, key)

    def bootstrap(self, stream: Stream[Any]) -> None:
        """Take a snapshot of ``stream`` now, or wait for the one that is being taken; return once the stream is online.

        Raises ConfigError without a function of ``snapshot``, and from inside a handler, which it would wait for;
        HandlerFailed when the function keeps failing.
        """
        self._read().bootstrap(stream)

    # -- caches -----------------------------------------------------------------------------------------------

    def cached(
        self,
        *,
        maxsize: int = 1024,
        ttl: float | None = None,
        name: str | None = None,
        key: Callable[..., tuple[Any, ...]] | None = None,
        stream: Stream[Any] | None = None,
    ) -> Callable[[Callable[P, R]], BlockingCachedFunction[P, R]]:
        """Decorate a plain function whose results are kept in this process until somebody invalidates them.

        As `busrep.asyncio.Bus.cached`; see there for the arguments. Before the bus is open, after it was closed, and in
        a child process of the one that opened it, every call goes through; a call opens nothing. What was decorated
        before begins to be kept when the bus opens, which starts the threads of the reading half. Raises ConfigError,
        MissingExtra; on an open bus what opening raises.
        """
        self._life.here()

        def decorate(function: Callable[P, R]) -> BlockingCachedFunction[P, R]:
            options = {"maxsize": maxsize, "ttl": ttl, "name": name, "key": key, "stream": stream}
            with self._life.lock:  # opened meanwhile, it would not know of this one
                cached: BlockingCachedFunction[P, R] = self.caching.add(function, **options)
                feed = self.caching.caches.feed_of(stream)
                try:
                    if self._life.state == "open":
                        self.parts.keep_fresh(feed)
                except BaseException:  # decorated again, it is not a second one
                    self.caching.forget(cached.cache_name, feed)
                    raise
            return cached

        return decorate

    def invalidate(self, name: str, keys: Iterable[Any] | None, *, stream: Stream[Any] | None = None) -> None:
        """Invalidate a key (a tuple of parts) of any cache, of this service or another, or all of it (None).

        A fact, and a transaction, of its own. ``stream``: needed only where there are several streams of invalidations.
        Raises ConfigError, NotAWriter, and what ``write`` raises.
        """
        found, row = self.caching.caches.row(name, keys, unix_ms(), stream)
        self.caching.write(found, [row])

    def special_cache(self, name: str, caches: Iterable[Any], *, stream: Stream[Any] | None = None) -> None:
        """Let ``name`` stand for several caches with the same key: cached functions, or names. Who invalidates a key of
        it, in whatever process, invalidates that key of each of them; all of it (null) nobody can. Raises ConfigError.
        """
        self.caching.special(name, caches, stream)

    # -- other commands ---------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Publish a command that is not about streams (presence, locks, tasks...). It is news: sent once when all is
        well, twice when it is unknown whether it arrived. Raises Unavailable when Redis is not there."""
        self._life.ensure_open()
        line, publisher = format_command(command), self.parts.publisher
        if publisher is None:
            self._read().call(lambda bus: bus.send(command))
            return
        channel = f"{self.name}/USER_IP" if isinstance(command, UserIp) else self.name
        if publisher.lock.is_mine:  # a signal handler, or the garbage collector, in the middle of publishing
            raise Unavailable("Redis", "this thread is publishing already")
        with publisher.lock:
            publisher.send(channel, line)

    def on(self, kind: type[CommandT]) -> Callable[[Callable[[CommandT], Any]], Callable[[CommandT], Any]]:
        """Decorate a function that is called with each command of that class, in a thread of the bus."""
        return self._read().decorator(lambda bus: bus.on(kind))

    # -- the rest ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether this process does its part, and the reasons why not. Reads what is in memory; asks no server.

        It opens nothing: before the first use, and once closed, the bus is not open.
        """
        if self._life.state != "open":
            return closed()
        try:
            return health_of(self.statistics())
        except Closed:  # this very moment
            return closed()

    def statistics(self) -> dict[str, Any]:
        """Counters, levels and states of this process, JSON-able. ``reader`` is None before anything was read."""
        self._life.ensure_open()
        parts = self.parts
        found = {} if parts.reading is None else parts.reading.do(lambda bus: bus.statistics())
        publisher = {} if parts.publisher is None else parts.publisher.statistics()
        return {
            "reader": found.get("reader"),
            "writer": None if parts.writing is None else parts.writing.statistics(),
            "link": {**publisher, "reading": found.get("link")},
            "stuck": [] if parts.writing is None else parts.writing.stuck(),
            "bootstrap": found.get("bootstrap", {}),
            "caches": self.caching.caches.statistics(),
        }


def connect(
    redis: str | redis_py.Redis,
    *,
    name: str,
    streams: Iterable[Stream[Any]] = (),
    store: str | AsyncStore | None = None,
    writer: str | None = None,
    reader: str | None = None,
    settings: Settings | None = None,
    **options: Unpack[ThreadOptions],
) -> BlockingBus:
    """Make a bus for the threads of this process: ``with busrep.sync.connect(...) as bus``, or open at its first use.

    Args:
        redis: As of `busrep.connect`, or a ``redis.Redis``.
        name, streams, writer, reader, settings: See `busrep.options.BusOptions`.
        store: See there. A writer in threads needs a URL.
        options: See there. ``on_failure`` is a plain function here, called in a thread of its own. With ``beats`` (the
            default) two threads announce the writer, for readers finish it as silent after
            ``heartbeat * silent_after_beats`` seconds; they send again what Redis did not take, and find out what
            became of facts in doubt. With ``beats=False`` there is no thread: each write first does what is overdue. A
            writer that was finished for its silence wins its name back before the next fact, as long as no other
            process has claimed the name. (A bus with cached functions has threads that read, and beats all the same.)

    Raises:
        ConfigError: For arguments that cannot work. Opening the bus raises Unavailable, SchemaError, ClaimBlocked and
            PositionsAheadOfTable.
    """
    given = BusOptions(
        name=name, streams=streams, store=store, writer=writer, reader=reader, settings=settings, **options
    )
    return BlockingBus(redis, given)
