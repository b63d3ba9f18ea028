"""The bus for threads: what an application holds."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its own end first, see the end of this file)
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import attrs
import redis as redis_py

from busrep.asyncio import Bus as AsyncioBus
from busrep.asyncio.bus import format_command
from busrep.caches.cache import Feed
from busrep.core.commands import Command, UserIp
from busrep.core.health import Health, closed, health_of
from busrep.errors import BusrepError, Closed, ConfigError, NotAWriter, Unavailable
from busrep.options import BusOptions, ThreadOptions
from busrep.settings import Settings
from busrep.stores.blocking import open_blocking_store
from busrep.stores.interface import AsyncStore
from busrep.streams import Stream, checked_stream

from .caching import CachedFunction, Caching, Pruning
from .effects import EffectsStore
from .publisher import Publisher, async_client
from .reading import Batch, Handler, Reading, ReadingBus
from .snapshots import ApplyHandler
from .writing import Bell, Chore, Fact, Writing

log = logging.getLogger("busrep")

CommandT = TypeVar("CommandT", bound=Command)
AnyHandler = TypeVar("AnyHandler", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")

_BUSES: weakref.WeakSet[Bus] = weakref.WeakSet()

# What a child process has of its parent's open buses. Kept: nothing of it may be closed, or given to the garbage
# collector, for the sockets and the event loop's selector are the parent's as well.
_INHERITED: list[object] = []


class Bus:
    """One process's part in a deployment, for threads. Made by ``busrep.sync.connect``; see there for the arguments.

    ``with bus`` opens and closes it; without, it opens at its first use, and closes when the interpreter ends. All
    methods may be called from any thread. In a signal handler raise an exception instead of calling them.
    """

    def __init__(self, redis: str | redis_py.Redis, options: BusOptions) -> None:
        if options.on_failure is not None:
            _plain(options.on_failure)
        self._options = options
        self._redis = redis
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
        self.streams, self.settings = options.streams, options.settings
        direct = isinstance(redis, str) and redis.startswith(("tcp://", "tcps://"))
        if self.writer is not None:
            if direct:
                raise ConfigError("a writer in threads needs a Redis: direct TCP is for readers, and for asyncio")
            if not isinstance(options.store, str | None):
                raise ConfigError(f"store={options.store!r}: a writer in threads needs the URL of its store")
        self._publisher = None if direct else Publisher(redis, self.settings)
        self._caching = Caching(self, self.streams, self.settings)
        self._writing: Writing | None = None
        self._check_arguments()
        self._fresh_locks()
        self._state = "new"
        self._pid = 0
        self._blocking: Any = None
        self._reading: Reading | None = None
        self._chores: list[Chore] = []
        _BUSES.add(self)

    def _fresh_locks(self) -> None:
        self._opening = threading.RLock()

    # -- life -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the store, claim the writer's name, connect to Redis. ``with`` does it, and so does the first use.

        A mere reader connects when it first reads; a bus with cached functions reads from here on.
        """
        self._here()
        with self._opening:
            if self._state != "new":
                raise Closed
            self._pid = os.getpid()
            self._state = "opening"
            try:
                if self.writer is not None:
                    self._begin_writing(self.writer)
                if self._caching.used:
                    self._begin_reading()
                    self._begin_beats()
            except BaseException:
                self._undo_opening()
                raise
            self._state = "open"

    def _undo_opening(self) -> None:
        """The next use tries again: at the first request of a process a server may be away for a moment."""
        try:
            for chore in self._chores:
                chore.stop()
            if self._publisher is not None:
                self._publisher.drop()
            if self._blocking is not None:
                self._blocking.close()
        finally:
            self._chores, self._writing, self._blocking = [], None, None
            self._state, self._pid = "new", 0

    def _begin_writing(self, writer: str) -> None:
        assert self._publisher is not None  # noqa: S101 (looked at in __init__)
        if isinstance(self._options.store, str):
            self._blocking = open_blocking_store(self._options.store, self.streams, settings=self.settings)
            self._blocking.open()
        if self._options.require_redis:
            self._connect(self._publisher)
        self._writing = Writing(
            writer, self.name, self.streams, self.settings,
            store=self._blocking, publisher=self._publisher, beats=self._options.beats, here=self._here,
            on_loss=self._lost, on_invalidations=self._caching.committed, on_unknown=self._caching.drop_all,
        )  # fmt: skip
        self._writing.publish(now=True)
        if self._options.beats:
            self._begin_chores(self._writing)

    def _begin_chores(self, writing: Writing) -> None:
        self._chores = [
            Chore(writing.announce, writing.stale, "busrep-announce"),
            Chore(writing.look, writing.doubted, "busrep-look"),
        ]
        pruned = [stream.name for stream in self.streams if self._caching.prunes(stream)]
        if pruned:
            pruning = Pruning(self._blocking, pruned, self.settings.invalidations_kept)
            self._chores.append(Chore(pruning.work, Bell(), "busrep-prune"))
        for chore in self._chores:
            chore.start()

    def _connect(self, publisher: Publisher) -> None:
        with publisher.lock:
            try:
                publisher.open()
            except Unavailable as error:
                raise (error.__cause__ if isinstance(error.__cause__, ConfigError) else error) from None

    def close(self) -> None:
        """Publish what is due (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        From inside a handler it returns at once, for it waits until the handler has ended. In a child process of the
        one that opened the bus it does nothing: nothing there is the child's to close.
        """
        if not self._here(raising=False):
            return
        if self._reading is not None and self._reading.is_handler():
            threading.Thread(target=self.close, name="busrep-close", daemon=True).start()
            return
        with self._opening:
            if self._state in ("closing", "closed"):
                return
            self._state = "closing"
            try:
                self._close(self.settings.shutdown_timeout)
            finally:
                self._state = "closed"

    def _close(self, timeout: float) -> None:
        for chore in self._chores:
            chore.stop()
        try:
            if self._reading is not None:
                self._reading.close(timeout)
        finally:
            try:
                for chore in self._chores:
                    chore.join(timeout)
                if self._writing is not None:
                    self._writing.close(timeout)
            finally:
                if self._publisher is not None:
                    with self._publisher.lock:  # somebody may be sending, and has deadlines
                        self._publisher.close()
                if self._blocking is not None:
                    self._blocking.close()

    def __enter__(self) -> Bus:
        if self._state == "new":
            self.open()
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _here(self, raising: bool = True) -> bool:
        """Whether this is the process that opened the bus, if anyone has."""
        if self._pid in (0, os.getpid()):
            return True
        if raising:
            raise ConfigError(
                f"this bus was opened in process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "connections are not this one's. Connect after the fork (gunicorn: post_fork, Celery: "
                "worker_process_init), under a writer name of its own in each process; or do not use the bus before"
            )
        return False

    def _check_open(self) -> None:
        self._here()
        if self._state in ("new", "opening"):
            with self._opening:  # another thread may be at it
                if self._state == "new":
                    self.open()
        if self._state != "open":
            raise Closed

    # -- writing ----------------------------------------------------------------------------------------------

    @overload
    def write(
        self, stream: Stream[RowT], /, *streams: Stream[Any], connection: Any = None, count: int = 1
    ) -> Fact[RowT]: ...
    @overload
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> Fact[Any]: ...
    def write(self, *streams: Stream[Any], connection: Any = None, count: int = 1) -> Fact[Any]:
        """A fact of ``streams`` (usually one) in one transaction: ``with bus.write(orders) as fact``.

        ``connection``: the caller's own (a psycopg.Connection, or a sqlite3.Connection of this thread), else one of
        busrep's. If it is in a transaction already, that one is joined and its end is the caller's: `settle`, or
        `Fact.ended`, looks what became of it. ``count``: so many IDs, for `Fact.add_each`. On entry raises
        NotAWriter, WriterFenced, ClaimBlocked, Unavailable, ConfigError; on exit what the database raises, and
        CommitUnknown when COMMIT got no answer: then busrep finds out by itself what became of it.
        """
        return Fact(self._writer_of(streams), streams, connection, count)

    def publish(self, stream: Stream[RowT], rows: Sequence[RowT], *, connection: Any = None) -> list[int]:
        """Each row a fact of its own, in one transaction, IDs reserved at once. Returns the IDs."""
        writing = self._writer_of((stream,))
        if not rows:
            return []
        fact: Fact[RowT] = Fact(writing, (stream,), connection, len(rows))
        with fact:
            return fact.add_each(rows)

    def settle(self) -> None:
        """Look now whether transactions of the caller's own have committed, and publish their facts: WriterFenced,
        Unavailable."""
        self._check_open()
        if self._writing is not None:
            self._writing.settle()

    def _writer_of(self, streams: Sequence[Stream[Any]]) -> Writing:
        self._check_open()
        if not streams:
            raise ConfigError("write() needs a stream: bus.write(orders)")
        for stream in streams:
            if checked_stream(stream).name not in self.streams or self._writing is None:
                raise NotAWriter(stream.name, self.writer)
        assert self._writing is not None  # noqa: S101 (just looked)
        return self._writing

    def _lost(self) -> None:
        if self._reading is not None:
            self._reading.disown()
        if self._writing is not None and self._writing.lost is not None:
            self._tell_failure(self._writing.lost)

    def _tell_failure(self, error: BusrepError) -> None:
        """In a thread of its own: neither the bus's loop nor a thread that writes may wait for the application."""
        if self._options.on_failure is not None:
            threading.Thread(target=self._call_on_failure, args=(error,), name="busrep-failure", daemon=True).start()

    def _call_on_failure(self, error: BusrepError) -> None:
        try:
            if self._options.on_failure is not None:
                self._options.on_failure(error)
        except Exception:  # what stopped is in the log already
            log.exception("on_failure= failed")

    # -- reading ----------------------------------------------------------------------------------------------

    def _make_reading_bus(self) -> ReadingBus:
        redis: Any = self._redis if isinstance(self._redis, str) else async_client(self._redis)
        beside = None if self._writing is None or self._writing.lost is not None else self.writer
        return ReadingBus(
            redis, self._reading_options(), beside=beside, writing=self._writing, caches=self._caching.caches
        )

    def _reading_options(self) -> BusOptions:
        on_failure = None if self._options.on_failure is None else self._tell_failure
        return attrs.evolve(self._options.opened(), writer=None, on_failure=on_failure)

    def _check_arguments(self) -> None:
        """Raise ConfigError now, not in some thread later: an asyncio bus that is never opened checks all there is."""
        # Whether asyncio has the like of a client is asked when something is read: a writer may do without.
        AsyncioBus(self._redis if isinstance(self._redis, str) else "redis://localhost", self._options.opened())

    def _read(self) -> Reading:
        """The reading half, started if it was not."""
        self._check_open()
        if self._reading is None:
            with self._opening:
                self._check_open()
                if self._reading is None:
                    self._begin_reading()
        assert self._reading is not None  # noqa: S101 (just begun)
        return self._reading

    def _begin_reading(self) -> None:
        given = self._options.positions_store
        effects = EffectsStore(given, self.streams, self.settings)
        reading = Reading(self._make_reading_bus, self.settings, effects, self._here)
        reading.start()
        self._reading = reading
        writing = self._writing
        if writing is not None and writing.lost is not None:  # meanwhile
            reading.disown()

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
        reading = self._read()

        def register(handler: Handler[Any]) -> Handler[Any]:
            reading.subscribe(streams, _plain(handler))
            return handler

        return register

    @overload
    def follow(self, *streams: Stream[RowT]) -> Iterator[Batch[RowT]]: ...
    @overload
    def follow(self, *streams: Stream[Any]) -> Iterator[Batch[Any]]: ...
    def follow(self, *streams: Stream[Any]) -> Iterator[Batch[Any]]:
        """Iterate over the batches of ``streams``; a batch counts as handled when the next one is asked for."""
        return self._read().follow(streams)

    def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """Return once everything that ``writer`` wrote to ``stream`` up to ``token`` has been handled here.

        The own writer's is at once. Without a handler rows count as handled; a durable reader's first handler
        gets them all the same. Raises WaitTimeout after ``timeout`` seconds, HandlerFailed or PositionTooOld when it
        can never be. In a handler it waits in vain: no other handler is called meanwhile.
        """
        self._check_open()
        if writer != self.writer or self._options.own or self._is_successors(stream, token):
            self._read().wait_for(stream, writer, token, timeout)

    def _is_successors(self, stream: Stream[Any], token: int) -> bool:
        return self._writing is not None and self._writing.is_successors(stream.name, abs(token))

    def on_reset(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """Decorate a function called with (stream name, writer, position) when that stream begins anew."""
        reading = self._read()

        def register(handler: AnyHandler) -> AnyHandler:
            reading.on_reset(stream, _plain(handler))
            return handler

        return register

    def on_missed(self, stream: Stream[Any] | None = None) -> Callable[[AnyHandler], AnyHandler]:
        """Decorate a function called with (stream name, writer, after, upto) when those rows are gone for good, or, of
        a foreign writer, may have been missed: its tokens skip."""
        reading = self._read()

        def register(handler: AnyHandler) -> AnyHandler:
            reading.on_missed(stream, _plain(handler))
            return handler

        return register

    def positions(self) -> dict[str, dict[str, int]]:
        """Where this process is, {stream: {writer: token}}: handled for others, published for itself.

        While facts that a predecessor under the own name left are not handled, the own name counts as another's. After
        a failover that took back their effects that is so once more, and the position is lower than before.
        """
        self._check_open()
        if self._reading is not None:
            return self._reading.positions()
        writing = self._writing
        if writing is None or self._options.own or writing.lost is not None:
            return {}
        return {stream: {writing.name: position} for stream, position in writing.positions().items()}

    def linear_position(self, stream: Stream[Any]) -> int:
        """Every row of ``stream`` up to here, by any writer, has been handled here (rule 9.7).

        For consumers that need one order over all writers. Raises ConfigError for a stream that does not
        follow or has no table.
        """
        return self._read().linear_position(stream)

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """Go on with a (stream, writer) that stopped on a poison row, at that row; with a bootstrap of the stream that
        stopped, at the part that it stopped at."""
        self._read().resume(stream, writer)

    def snapshot(
        self, stream: Stream[RowT], *, key: Callable[[RowT], Hashable] | None = None
    ) -> Callable[[ApplyHandler[RowT]], ApplyHandler[RowT]]:
        """Decorate a function that applies a snapshot of ``stream``, called with each `SnapshotPart`, as handlers are.

        When a bootstrap begins, and what ``key`` is, see `busrep.Bus.snapshot`. Decorate it before the handlers of
        ``subscribe``, which get what follows the snapshot. Raises ConfigError for a second function, for a stream
        without a table, and where no snapshots are to be had.
        """
        reading = self._read()

        def register(handler: ApplyHandler[RowT]) -> ApplyHandler[RowT]:
            reading.snapshot(stream, _plain(handler), key)
            return handler

        return register

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
    ) -> Callable[[Callable[P, R]], CachedFunction[P, R]]:
        """Decorate a plain function whose results are kept in this process until somebody invalidates them.

        As `busrep.asyncio.Bus.cached`; see there for the arguments. Before the bus is open, after it was closed, and in
        a child process of the one that opened it, every call goes through; a call opens nothing. What was decorated
        before begins to be kept when the bus opens, which starts the threads of the reading half. Raises ConfigError,
        MissingExtra; on an open bus what opening raises.
        """
        self._here()

        def decorate(function: Callable[P, R]) -> CachedFunction[P, R]:
            options = {"maxsize": maxsize, "ttl": ttl, "name": name, "key": key, "stream": stream}
            with self._opening:  # opened meanwhile, it would not know of this one
                cached: CachedFunction[P, R] = self._caching.add(function, **options)
                if self._state == "open":
                    try:
                        self._keep_fresh(self._caching.caches.feed_of(stream))
                    except BaseException:  # decorated again, it is not a second one
                        self._caching.forget(cached.cache_name)
                        raise
            return cached

        return decorate

    def _keep_fresh(self, feed: Feed) -> None:
        self._read().follow_invalidations(feed)
        self._begin_beats()

    def _begin_beats(self) -> None:
        """Also with ``beats=False``, for there are threads now: a fact in doubt ends the trust in what is cached here,
        until somebody asks after it."""
        if self._writing is not None and not self._chores:
            self._writing.begin_beats()
            self._begin_chores(self._writing)

    def invalidate(self, name: str, keys: Iterable[Any] | None, *, stream: Stream[Any] | None = None) -> None:
        """Invalidate a key (a tuple of parts) of any cache, of this service or another, or all of it (None).

        A fact, and a transaction, of its own. ``stream``: needed only where there are several streams of invalidations.
        Raises ConfigError, NotAWriter, and what ``write`` raises.
        """
        self._caching.invalidate(name, keys, stream)

    def special_cache(self, name: str, caches: Iterable[Any], *, stream: Stream[Any] | None = None) -> None:
        """Let ``name`` stand for several caches with the same key: cached functions, or names. Who invalidates a key of
        it, in whatever process, invalidates that key of each of them; all of it (null) nobody can. Raises ConfigError.
        """
        self._caching.special(name, caches, stream)

    # -- other commands ---------------------------------------------------------------------------------------

    def send(self, command: Command) -> None:
        """Publish a command that is not about streams (presence, locks, tasks...). It is news: sent once when all is
        well, twice when it is unknown whether it arrived. Raises Unavailable when Redis is not there."""
        self._check_open()
        line = format_command(command)
        if self._publisher is None:
            self._read().send(command)
            return
        channel = f"{self.name}/USER_IP" if isinstance(command, UserIp) else self.name
        with self._publisher.lock:
            if self._publisher.busy:  # a signal handler, or the garbage collector, in the middle of publishing
                raise Unavailable("Redis", "this thread is publishing already")
            try:
                self._publisher.busy = True
                self._publisher.send(channel, line)
            finally:
                self._publisher.busy = False

    def on(self, kind: type[CommandT]) -> Callable[[Callable[[CommandT], Any]], Callable[[CommandT], Any]]:
        """Decorate a function that is called with each command of that class, in a thread of the bus."""
        reading = self._read()

        def register(handler: Callable[[CommandT], Any]) -> Callable[[CommandT], Any]:
            reading.on(kind, _plain(handler))
            return handler

        return register

    # -- the rest ---------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether this process does its part, and the reasons why not. Reads what is in memory; asks no server.

        It opens nothing: before the first use, and once closed, the bus is not open.
        """
        if self._state != "open":
            return closed()
        try:
            return health_of(self.statistics())
        except Closed:  # this very moment
            return closed()

    def statistics(self) -> dict[str, Any]:
        """Counters, levels and states of this process, JSON-able. ``reader`` is None before anything was read."""
        self._check_open()
        found = self._reading.statistics() if self._reading is not None else {}
        publisher = {} if self._publisher is None else self._publisher.statistics()
        return {
            "reader": found.get("reader"),
            "writer": None if self._writing is None else self._writing.statistics(),
            "link": {**publisher, "reading": found.get("link")},
            "stuck": [] if self._writing is None else self._writing.stuck(),
            "bootstrap": found.get("bootstrap", {}),
            "caches": self._caching.caches.statistics(),
        }


def _plain(handler: AnyHandler) -> AnyHandler:
    if inspect.iscoroutinefunction(handler):
        raise ConfigError(f"{handler!r} is a coroutine function: a bus for threads calls plain ones")
    return handler


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
) -> Bus:
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
    return Bus(redis, given)


def _close_all() -> None:
    """The interpreter ends: what was committed is published, as close() would have done."""
    for bus in list(_BUSES):
        if bus._state == "open":
            try:
                bus.close()
            except Exception:  # the others are closed all the same
                log.exception("a bus could not be closed")


def _forked() -> None:
    """In the child: locks may have been held by threads that are not here, and what is open is the parent's."""
    for bus in list(_BUSES):
        bus._fresh_locks()
        if bus._pid:
            _INHERITED.append(bus.__dict__.copy())


# Before the pools of concurrent.futures end, in whose threads the SQLite store reads; they do so before atexit, in a
# way that is theirs alone. Where it is not to be had, only the last positions are not saved.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_forked)
