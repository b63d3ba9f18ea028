"""The bus for threads: what an application holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import redis as redis_py

from busrep.asyncio.messages import channel_of, format_command
from busrep.caches.cache import Invalidation
from busrep.core.application_commands import UserIp
from busrep.core.commands import Command
from busrep.core.health import Health, closed, health_of
from busrep.errors import Closed, ConfigError, NotAWriter, Unavailable
from busrep.options import BusOptions, ThreadOptions
from busrep.runtime.cached import BlockingCachedFunction, add_cached, unix_ms
from busrep.runtime.fact import RENEWALS
from busrep.settings import Settings
from busrep.stores.interface import AsyncStore
from busrep.streams import Stream, checked_stream

from .batch import ApplyHandler, BlockingBatch, Handler
from .life import BlockingLife
from .reading import ReadingThreads
from .writing import BlockingFact, SharedWriter

CommandT = TypeVar("CommandT", bound=Command)
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")


class BlockingBus(BlockingLife):
    """One process's part in a deployment, for threads. Made by ``busrep.sync.connect``; see there for the arguments.

    ``with bus`` opens and closes it; without, it opens at its first use, and closes when the interpreter ends. All
    methods may be called from any thread. In a signal handler raise an exception instead of calling them.
    """

    def __enter__(self) -> BlockingBus:
        self.ensure_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing ----------------------------------------------------------------------------------------------

    @overload
    def write(
        self, stream: Stream[RowT], /, *streams: Stream[Any], connection: Any = None, count: int = 1
    ) -> BlockingFact[RowT]: ...
    @overload
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> BlockingFact[Any]: ...
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> BlockingFact[Any]:
        """As `busrep.Bus.write`, in threads: ``with bus.write(orders) as fact``.

        ``connection``: a psycopg.Connection, or a sqlite3.Connection of this thread. If it is in a transaction already,
        that one is joined and its end is the caller's: `settle`, or `Fact.ended`, looks what became of it. On entry
        raises ClaimBlocked as well.
        """
        return BlockingFact(self._writer_of(streams), streams, connection, count)

    def publish(self, stream: Stream[RowT], rows: Sequence[RowT], *, connection: Any = None) -> list[int]:
        """As `busrep.Bus.publish`, in threads."""
        writing = self._writer_of((stream,))
        if not rows:
            return []
        for again in range(RENEWALS, -1, -1):
            fact = BlockingFact[RowT](writing, (stream,), connection, len(rows), unnumbered=True)
            try:
                with fact:
                    fact.add_each(rows)
                break
            except Unavailable as error:
                if not again or error is not fact.not_written:
                    raise
        return fact.published_ids()

    def settle(self) -> None:
        """As `busrep.Bus.settle`, in threads."""
        self.ensure_open()
        if self.writing is not None:
            self.writing.settle()

    def _writer_of(self, streams: Sequence[Stream[Any]]) -> SharedWriter:
        self.ensure_open()
        if not streams:
            raise ConfigError("write() needs a stream: bus.write(orders)")
        writing = self.writing
        for stream in streams:
            if checked_stream(stream).name not in self.streams or writing is None:
                raise NotAWriter(stream.name, self.writer)
        assert writing is not None  # noqa: S101 (just looked)
        return writing

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self) -> ReadingThreads:
        """The reading half, started if it was not."""
        self.ensure_open()
        if (reading := self.reading) is not None:
            return reading
        with self._lock:
            self.ensure_open()
            return self._begin_reading()

    @overload
    def subscribe(self, *streams: Stream[RowT]) -> Callable[[Handler[RowT]], Handler[RowT]]: ...
    @overload
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]: ...
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Handler[Any]], Handler[Any]]:
        """As `busrep.Bus.subscribe`, for plain functions. They are called in a thread of the bus, one call at a time,
        all handlers together."""
        reading = self._read()
        return reading.decorator(lambda bus: bus.subscribe(*streams), reading.batch)

    @overload
    def follow(self, *streams: Stream[RowT]) -> Iterator[BlockingBatch[RowT]]: ...
    @overload
    def follow(self, *streams: Stream[Any]) -> Iterator[BlockingBatch[Any]]: ...
    def follow(self, *streams: Stream[Any]) -> Iterator[BlockingBatch[Any]]:
        """Iterate over the batches of ``streams``; a batch counts as handled when the next one is asked for."""
        return self._read().follow(streams)

    def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """As `busrep.Bus.wait_for`, in threads. In a handler it waits in vain: no other handler is called meanwhile."""
        self.ensure_open()
        writing = self.writing
        if (
            writer != self.writer
            or self._options.own
            or (writing is not None and writing.is_successors(stream.name, abs(token)))
        ):
            self._read().call(lambda bus: bus.wait_for(stream, writer, token, timeout))

    def on_reset(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """As `busrep.Bus.on_reset`, for plain functions."""
        return self._read().decorator(lambda bus: bus.on_reset(stream))

    def on_missed(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """As `busrep.Bus.on_missed`, for plain functions."""
        return self._read().decorator(lambda bus: bus.on_missed(stream))

    def positions(self) -> dict[str, dict[str, int]]:
        """As `busrep.Bus.positions`, in threads."""
        self.ensure_open()
        if (reading := self.reading) is not None:
            return reading.do(lambda bus: bus.positions())
        writing = self.writing
        if writing is None or self._options.own or writing.lost is not None:
            return {}
        return {stream: {writing.name: at} for stream, at in writing.positions().items()}

    def linear_position(self, stream: Stream[Any]) -> int:
        """As `busrep.Bus.linear_position`, in threads."""
        return self._read().call(lambda bus: bus.linear_position(stream))

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """As `busrep.Bus.resume`, in threads."""
        self._read().do(lambda bus: bus.resume(stream, writer))

    def snapshot(
        self, stream: Stream[RowT], *, key: Callable[[RowT], Hashable] | None = None
    ) -> Callable[[ApplyHandler[RowT]], ApplyHandler[RowT]]:
        """As `busrep.Bus.snapshot`, for plain functions, which are called as handlers are. Decorate one before the
        handlers of ``subscribe``."""
        reading = self._read()
        return reading.decorator(lambda bus: bus.snapshot(stream, key=key), reading.part)

    def bootstrap(self, stream: Stream[Any]) -> None:
        """As `busrep.Bus.bootstrap`, in threads. Raises ConfigError from inside any handler."""
        reading = self._read()
        if reading.is_handler():
            raise ConfigError("a snapshot is applied when no handler is at work: ask from another thread")
        reading.call(lambda bus: bus.bootstrap(stream))

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
        """As `busrep.Bus.cached`, for plain functions.

        Before the bus is open, after it was closed, and in a child process of the one that opened it, every call goes
        through; a call opens nothing. What was decorated before begins to be kept when the bus opens, which starts the
        threads of the reading half. On an open bus raises what opening raises as well.
        """
        self._here()

        def decorate(function: Callable[P, R]) -> BlockingCachedFunction[P, R]:
            if inspect.iscoroutinefunction(function):
                raise ConfigError(f"{function!r} is a coroutine function: a bus for threads caches plain ones")
            options = {"maxsize": maxsize, "ttl": ttl, "name": name, "key": key, "stream": stream}
            with self._lock:  # opened meanwhile, it would not know of this one
                feed = self.caching.feed_of(stream)
                if self.state == "open":
                    self._begin_reading().do(lambda bus: bus.caching.follow(feed))
                    self._begin_beats()
                cached: BlockingCachedFunction[P, R] = add_cached(self.caching, function, self._write_rows, **options)
            return cached

        return decorate

    def invalidate(self, name: str, keys: Iterable[Any] | None, *, stream: Stream[Any] | None = None) -> None:
        """As `busrep.Bus.invalidate`, in threads."""
        found, row = self.caching.row(name, keys, unix_ms(), stream)
        self._write_rows(found, [row])

    def _write_rows(self, stream: Stream[Invalidation], rows: Sequence[Invalidation]) -> None:
        if rows:
            with self.write(stream) as fact:
                for row in rows:
                    fact.add(row)

    def special_cache(self, name: str, caches: Iterable[Any], *, stream: Stream[Any] | None = None) -> None:
        """As `busrep.Bus.special_cache`."""
        self.caching.special(name, caches, stream)

    # -- other commands ---------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """As `busrep.Bus.send`, in threads, but at once: raises Unavailable when Redis is not there."""
        self.ensure_open()
        line, publisher = format_command(command), self.publisher
        if publisher is None:
            self._read().call(lambda bus: bus.send(command))
            return
        channel = channel_of(self.name, "USER_IP" if isinstance(command, UserIp) else "")
        if publisher.lock.is_mine:  # a signal handler, or the garbage collector, in the middle of publishing
            raise Unavailable("Redis", "this thread is publishing already")
        with publisher.lock:
            publisher.send(channel, line)

    def on(self, kind: type[CommandT]) -> Callable[[Callable[[CommandT], Any]], Callable[[CommandT], Any]]:
        """As `busrep.Bus.on`, for plain functions."""
        return self._read().decorator(lambda bus: bus.on(kind))

    # -- the rest ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """As `busrep.Bus.health`. It opens nothing: before the first use, and once closed, the bus is not open."""
        try:
            return health_of(self.statistics()) if self.state == "open" else closed()
        except Closed:  # this very moment
            return closed()

    def statistics(self) -> dict[str, Any]:
        """Counters, levels and states of this process, JSON-able. ``reader`` is None before anything was read."""
        self.ensure_open()
        writing, reading, publisher = self.writing, self.reading, self.publisher
        found = {} if reading is None else reading.do(lambda bus: bus.statistics())
        return {
            "reader": found.get("reader"),
            "writer": None if writing is None else writing.statistics(),
            "link": {**({} if publisher is None else publisher.statistics()), "reading": found.get("link")},
            "stuck": [] if writing is None else writing.stuck(),
            "bootstrap": found.get("bootstrap", {}),
            "caches": self.caching.statistics(),
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
            default) three threads announce the writer, for readers finish it as silent after
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
