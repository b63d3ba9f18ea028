"""The bus: what an application holds. Wires the link, the reading and the writing half together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

import redis.asyncio as aioredis

from busrep.core.backoff import LogLimiter, pause_after
from busrep.core.commands import Command, Name, Replicate, Server, UserIp
from busrep.core.framing import COMMAND_BYTES, parse_message
from busrep.core.health import Health, closed, health_of
from busrep.errors import (
    BusrepError,
    Closed,
    CommitsLost,
    ConfigError,
    NotAWriter,
    ParseError,
    Unavailable,
    WriterFenced,
)
from busrep.options import BusOptions
from busrep.settings import Settings
from busrep.stores.interface import AsyncStore, FactLog, provides
from busrep.streams import Stream, checked_stream

from ..links.redis import Link, RedisLink
from ..links.tcp import TcpAddress, TcpLink, identity_of
from ..links.tcp_server import TcpServer
from ..runtime.tasks import call, heed_cancellation, log_failure, spawn, stop, within
from ..snapshots.parts import Applier, ApplyHandler
from .cached import CachedFunction, unix_ms
from .caching import Caching
from .failing import tell
from .reading import Batch, Handler, NoticeHandler, Reading
from .writing import Claimed, Fact, WinningBack, Writing

log = logging.getLogger("busrep")

CommandT = TypeVar("CommandT", bound=Command)
P = ParamSpec("P")
R = TypeVar("R")
RowT = TypeVar("RowT")
LineSeen = Callable[[str, str, bytes], None]

# Other commands (presence, locks...) waiting for Redis, and their bytes. They are news, not facts: beyond this, send()
# says no.
COMMAND_QUEUE, COMMAND_QUEUE_BYTES = 10_000, 16 * 2**20

# Calls of command handlers under way. Handlers may be slower than commands come: beyond this they are dropped, counted.
COMMAND_CALLS = 10_000

_NUMBER = re.compile(r"\b\d+\b")


class Bus:
    """One process's part in a deployment. `busrep.connect` makes it; `busrep.options.BusOptions` has its arguments."""

    def __init__(self, redis: str | aioredis.Redis | TcpAddress | TcpServer, options: BusOptions) -> None:
        self._options = options
        self._on_failure = options.on_failure
        self.name, self.writer, self.reader = options.name, options.writer, options.reader
        self.streams, self.settings = options.streams, options.settings
        self._store: AsyncStore | None = options.store
        self._own = options.own
        self._commands: deque[tuple[str, bytes]] = deque()
        self._commands_bytes = 0
        self._command_handlers: dict[type[Any], list[Callable[[Any], Awaitable[None] | None]]] = {}
        self._line_handlers: list[LineSeen] = []
        self._connect_handlers: list[Callable[[], Any]] = []
        self._close_handlers: list[Callable[[], Any]] = []
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._ask = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._background: list[asyncio.Task[None]] = []
        self._limiter = LogLimiter()  # per reason; all are counted (protocol.md, section 1)
        self._claim_asked_at = -math.inf
        self._echo_at = self._heard_at = 0.0
        self._answering: asyncio.TimerHandle | None = None
        self._asked_at = 0.0  # when REPLICATE was published last
        self._reconnected_at = 0.0
        self._state = "new"
        self._closing: asyncio.Task[None] | None = None
        self._winning: asyncio.Task[None] | None = None
        self._named_at = 0.0  # when the writer's first incarnation began
        self._commands_dropped = 0
        self._writing: Writing | None = None
        self._reading = Reading(
            options,
            own=None if options.own else options.writer,
            ask=self._ask_for_positions,
            own_positions=self._own_positions,
            own_written=self._own_written,
            on_epoch=self._epoch_changed,
            on_stop=self._tell_failure,
        )
        self._caching = Caching(self)
        self._stores = [one for one in dict.fromkeys((options.store, options.reader_store)) if one is not None]
        channels = [self._channel(stream.channel) for stream in self.streams]
        if self.writer is not None or options.undeclared or not channels:
            channels.insert(0, self.name)
        # Writers hear the first; this process hears itself on the last.
        own_channel = self.name if self.name in channels else channels[0]
        self._asking_channels = tuple(dict.fromkeys((self.name, own_channel)))
        self._link = self._make_link(redis, channels)

    def _make_link(self, redis: str | aioredis.Redis | TcpAddress | TcpServer, channels: Sequence[str]) -> Link:
        callbacks: dict[str, Any] = {"on_up": self._up, "on_message": self._message, "on_down": self._down}
        if isinstance(redis, TcpServer):
            if redis.name != self.name:
                raise ConfigError(f"the TCP server is of {redis.name!r}, this bus of {self.name!r}")
            return redis.link(channels, **callbacks)
        if isinstance(redis, str) and redis.startswith(("tcp://", "tcps://")):
            redis = TcpAddress.parse(redis)
        if isinstance(redis, TcpAddress):
            return TcpLink(redis, self.name, self.settings, identity=self._identity, **callbacks)
        return RedisLink(redis, channels, self.settings, **callbacks)

    def _identity(self) -> Name:
        return identity_of(self.writer, self.reader, None if self._writing is None else self._writing.incarnation)

    # -- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the store, claim the writer's name, connect to Redis. ``async with`` does it."""
        if self._state != "new":
            raise Closed
        self._state = "open"
        try:
            for store in self._stores:
                await store.open()
            if self.writer is not None:
                self._writing = await self._begin_writing(self.writer)
                self._named_at = asyncio.get_running_loop().time()
                self._writing.on_invalidations = self._caching.committed
            await self._link.start(required=self._options.require_redis)
        except BaseException:
            await self.close()
            raise
        self._background = [self._start(self._keep_publishing(), "publish"), self._start(self._keep_beating(), "beat")]
        if self._writing is not None:
            self._background.append(self._start(self._writing.keep_settling(), "settle"))
        if self.reader is not None:
            self._background.append(self._start(self._reading.keep_saving(), "save"))
        self._caching.open()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"busrep-{name}")
        task.add_done_callback(log_failure)
        return task

    async def _begin_writing(self, writer: str, again: int | None = None, former: Writing | None = None) -> Writing:
        """Claim the name, and make what writes under it. ``again``: it is won back, from this incarnation on, for
        what goes on in place of ``former``."""
        durable = self._options.durable
        # Without a table the clock makes incarnations that rise (9.11).
        claimed, incarnation = None, max(int(time.time() * 1000), (again or 0) + 1)
        if again is None and provides(self._store, FactLog):
            await self._give_up_streams(self._store, writer, durable)
        if durable and self._store is not None:
            claim = await self._store.claim(writer, durable, timeout=self.settings.claim_timeout, again=again)
            if former is not None:
                claim = claim.resumed(former.epoch, former.core.positions())
            claimed, incarnation = Claimed(self._store, claim), claim.incarnation
            if again is None:  # where the facts of this process begin, however often its name is won back
                self._reading.own_starts = claim.starts
        return Writing(
            writer,
            self.name,
            self.streams,
            self.settings,
            claimed=claimed,
            incarnation=incarnation,
            wake=self._wake.set,
            renew=self._renew_writing,
            on_loss=self._lost,
        )

    async def _renew_writing(self, former: Writing) -> Writing:
        """What goes on in place of one that was fenced, if that was for its silence alone.

        Raises WriterFenced when another process has the name, ClaimBlocked, Unavailable, Closed.
        """
        if self._writing is former:
            if self._winning is None or self._winning.done():
                self._winning = asyncio.create_task(self._win_back(former), name="busrep-win-back")
                self._tasks[self._winning] = None
                self._winning.add_done_callback(lambda done: self._tasks.pop(done, None))
            # Not given up with the caller: a claim that is committed and not noted would pass for another process's.
            winning = self._winning
            try:
                await asyncio.shield(winning)
            except asyncio.CancelledError as error:
                winning.remove_done_callback(self._tell_not_won_back)  # once, however many leave
                winning.add_done_callback(self._tell_not_won_back)
                heed_cancellation(error)
                raise Closed from None  # only close() ends it
        assert self._writing is not None  # noqa: S101 (there was one)
        if self._writing is former:
            raise former.fenced or WriterFenced(former.name, former.incarnation)
        return self._writing

    def _tell_not_won_back(self, winning: asyncio.Task[None]) -> None:
        """A done callback: who would be told has left, perhaps all of them. The next beat, or fact, tries again."""
        if not winning.cancelled() and isinstance(error := winning.exception(), BusrepError):
            log.warning("writer %s is not won back: %s", self.writer, error)
        else:
            log_failure(winning)

    async def _win_back(self, former: Writing) -> None:
        winning = WinningBack(max(former.incarnation, former.outdone))
        session: Writing | None = None
        # Rows that are kept for consumers are of the incarnation that wrote them.
        while session is None and not former.kept:
            try:
                won = await self._begin_writing(former.name, winning.again, former)
                await self._check_committed(former, won)
            except CommitsLost as error:
                log.error("%s", error)
                former.lose(error)
                return
            except (WriterFenced, Unavailable) as error:
                try:
                    winning.failed(error)
                except WriterFenced:
                    break
            else:
                session = won
        if session is None:
            former.lose(WriterFenced(former.name, former.incarnation))
            return
        session.committed = former.committed
        log.warning("writer %s was fenced; it goes on as incarnation %d", former.name, session.incarnation)
        session.facts, session.rows = former.facts, former.rows
        session.on_invalidations = self._caching.committed
        self._caching.drop_all()  # what was in doubt is in the table; before this one is trusted
        self._writing = session
        self._background.append(self._start(session.keep_settling(), "settle"))
        if self._link.connected:
            session.core.connected(asyncio.get_running_loop().time())
        self._wake.set()

    async def _check_committed(self, former: Writing, won: Writing) -> None:
        """Whether what was committed is still there: PostgreSQL may have failed over (9.23). Raises CommitsLost, and
        WriterFenced when what was won is fenced already."""
        if won.claimed is not None and (noted := former.noted_commits()):
            store = won.claimed.store
            found = await store.outcome(won.claimed.claim, None, noted)
            former.check_committed(found, await store.known())

    async def _give_up_streams(self, store: FactLog, writer: str, durable: Sequence[str]) -> None:
        """A predecessor wrote streams that this process does not: finish it (9.5), or their last rows would wait for a
        writer that never comes back, and it would hold back their linear position."""
        for known in await store.known():
            if known.writer == writer and known.registered and known.stream not in durable:
                await store.finish(writer, known.incarnation, timeout=self.settings.claim_timeout)
                return

    async def close(self) -> None:
        """Publish what is queued (within ``shutdown_timeout``), save positions, close everything. May be repeated.

        Goes on when the caller is cancelled: a service that stops still publishes what it committed, and saves what
        it handled. From inside a handler it returns at once, for it waits until the handler has ended.
        """
        if self._closing is None:
            self._state = "closing"
            self._caching.close()
            self._closing = self._start(self._close(), "close")
        task = asyncio.current_task()
        if task not in self._tasks and not self._reading.is_worker(task):
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        timeout = self.settings.shutdown_timeout
        async with contextlib.AsyncExitStack() as stack:  # each of them, whatever the others raise
            for store in self._stores:
                stack.push_async_callback(store.close)
            stack.push_async_callback(self._link.close)
            stack.push_async_callback(self._stop_tasks, timeout)
            for handler in self._close_handlers:
                await self._before_close(handler, timeout)
            self._state = "closed"
            if self._writing is not None:
                await self._writing.close(timeout)
            await self._flush(timeout)
            if self._writing is not None:
                self._writing.core.farewell()
                await self._flush(timeout)
            await self._reading.close(timeout)

    async def _before_close(self, handler: Callable[[], Any], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await call(handler)
        except Exception:  # what is not said now is found out by others; the rest is closed all the same
            log.exception("a handler of before_close failed")

    async def _stop_tasks(self, timeout: float) -> None:
        if self._answering is not None:
            self._answering.cancel()
        await stop([*self._background, *self._tasks], timeout)
        # A name that was won back meanwhile has started another.
        await stop([*self._background, *self._tasks], timeout)
        if self._writing is not None:
            with contextlib.suppress(BusrepError, TimeoutError):
                await within(timeout, self._writing.leave())

    async def __aenter__(self) -> Bus:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _flush(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._link.connected and self._unsent():
                    self._flushed.clear()
                    self._wake.set()
                    await self._flushed.wait()

    def _unsent(self) -> bool:
        writing = self._writing
        return bool(self._commands) or (writing is not None and writing.fenced is None and writing.core.unsent)

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
        raises, and CommitUnknown when COMMIT got no answer: then busrep finds out by itself what became of it.
        """
        return Fact(self._writer_of(streams), streams, connection, count)

    async def publish(self, stream: Stream[RowT], rows: Sequence[RowT], *, connection: Any = None) -> list[int]:
        """Each row a fact of its own, in one transaction, IDs reserved at once. Returns the IDs."""
        if not rows:
            return []
        writing = self._writer_of((stream,))
        fact: Fact[RowT] = Fact(writing, (stream,), connection, len(rows))
        async with fact:
            return fact.add_each(rows)

    async def settle(self) -> None:
        """Look now whether transactions of the caller's own have committed, and publish their facts: WriterFenced,
        Unavailable."""
        writing = self._writing
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
            if checked_stream(stream).name not in self.streams or self._writing is None:
                raise NotAWriter(stream.name, self.writer)
        assert self._writing is not None  # noqa: S101 (just looked)
        return self._writing

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
                self._reading.subscribe(stream, handler)
            return handler

        return register

    @overload
    def follow(self, *streams: Stream[RowT]) -> AsyncIterator[Batch[RowT]]: ...
    @overload
    def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]: ...
    def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]:
        """Iterate over the batches of ``streams``; a batch counts as handled when the next one is asked for."""
        self._check_open()
        return self._reading.follow(*[self.streams.of(stream) for stream in streams])

    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """Return once everything that ``writer`` wrote to ``stream`` up to ``token`` has been handled here.

        The own writer's is at once. Without a handler rows count as handled; a durable reader's first handler
        gets them all the same. Raises WaitTimeout after ``timeout`` seconds, HandlerFailed or PositionTooOld when it
        can never be.
        """
        self._check_open()
        if writer != self.writer or self._own or self._is_successors(stream, token):
            # IDs of a negative stream are below zero in the table, above it everywhere else.
            await self._reading.wait_for(self.streams.of(stream), writer, abs(token), timeout)

    def _is_successors(self, stream: Stream[Any], token: int) -> bool:
        writing = self._writing
        return writing is not None and (writing.lost or writing.is_successors(stream.name, abs(token)))

    def on_reset(self, stream: Stream[Any] | None = None) -> Callable[[NoticeHandler], NoticeHandler]:
        """Decorate a function called with (stream name, writer, position) when that stream begins anew."""

        def register(handler: NoticeHandler) -> NoticeHandler:
            self._reading.on_reset(None if stream is None else checked_stream(stream).name, handler)
            return handler

        return register

    def on_missed(self, stream: Stream[Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function called with (stream name, writer, after, upto) when those rows are gone for good, or, of
        a foreign writer, may have been missed: its tokens skip."""

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            self._reading.on_missed(None if stream is None else checked_stream(stream).name, handler)
            return handler

        return register

    def positions(self) -> dict[str, dict[str, int]]:
        """Where this process is, {stream: {writer: token}}: handled for others, published for itself.

        While facts that a predecessor under the own name left are not handled, the own name counts as another's. After
        a failover that took back their effects that is so once more, and the position is lower than before.
        """
        found = self._reading.core.positions()
        for stream in self._reading.core.bootstrapping:  # what is there of it is no position
            found.pop(stream, None)
        # Fenced, it may yet win its name back; once it is lost, reading goes on from these positions.
        if self._writing is not None and not self._own and not self._name_lost:
            for stream, position in self._writing.core.positions().items():
                if self._reading.own_counts(stream):
                    found.setdefault(stream, {})[self._writing.name] = position
        return found

    async def linear_position(self, stream: Stream[Any]) -> int:
        """Every row of ``stream`` up to here, by any writer, has been handled here (rule 9.7).

        For consumers that need one order over all writers. Raises ConfigError for a stream that does not
        follow or has no table.
        """
        if self._store is None or checked_stream(stream).resettable or not stream.follows:
            raise ConfigError(f"stream {stream.name!r} has no linear position")
        await self._reading.followed(self.streams.of(stream))
        handled = self.positions().get(stream.name, {})
        known = await self._store.known()
        # A replica's registry may be older than what was handled: a writer may have joined since, and reserved an ID
        # below that. But none below a position of the same snapshot, for these were given out before.
        lags = await self._store.sequence(stream.name) is None
        lowest, highest = [], 0
        for one in known:
            if one.stream != stream.name:
                continue
            at = handled.get(one.writer, 0)
            if lags:
                at = min(at, one.position)
            highest = max(highest, at)
            # One that left the registry counts until its last rows have been handled here.
            if one.registered or at < one.position:
                lowest.append(at)
        return min(lowest, default=highest)

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """Go on with a (stream, writer) that stopped on a poison row, at that row; with a bootstrap of the stream that
        stopped, at the part that it stopped at."""
        self._reading.resume(checked_stream(stream).name, writer)

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
            self._reading.snapshot(Applier(self.streams.of(stream), handler, key))
            return handler

        return register

    async def bootstrap(self, stream: Stream[Any]) -> None:
        """Take a snapshot of ``stream`` now, or wait for the one that is being taken; return once the stream is online.

        The bootstrap goes on when the caller is cancelled. Raises ConfigError without a function of ``snapshot``, and
        from inside a handler of the stream, which it would wait for; HandlerFailed when the function keeps failing.
        """
        self._check_open()
        await self._reading.bootstrap(self.streams.of(stream))

    def _epoch_changed(self, epoch: str) -> None:
        """The log is another one: its writers have been fenced, and what was written here is of the one before."""
        writing = self._writing
        if writing is not None and writing.epoch not in (None, epoch):
            writing.lose(WriterFenced(writing.name, writing.incarnation))

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

        def decorate(function: Callable[P, R]) -> CachedFunction[P, R]:
            cached: CachedFunction[P, R] = self._caching.add(
                function, maxsize=maxsize, ttl=ttl, name=name, key=key, stream=stream
            )
            return cached

        return decorate

    async def invalidate(self, name: str, keys: Iterable[Any] | None, *, stream: Stream[Any] | None = None) -> None:
        """Invalidate a key (a tuple of parts) of any cache, of this service or another, or all of it (None).

        A fact, and a transaction, of its own. ``stream``: needed only where there are several streams of invalidations.
        Raises ConfigError, NotAWriter, and what ``write`` raises.
        """
        found, row = self._caching.caches.row(name, keys, unix_ms(), stream)
        await self._caching.write(found, [row])

    def special_cache(self, name: str, caches: Iterable[Any], *, stream: Stream[Any] | None = None) -> None:
        """Let ``name`` stand for several caches with the same key: cached functions, or names. Who invalidates a key of
        it, in whatever process, invalidates that key of each of them; all of it (null) nobody can. Raises ConfigError.
        """
        self._caching.caches.special(name, caches, stream)

    # -- other commands ---------------------------------------------------------------------------------------

    async def send(self, command: Command) -> None:
        """Publish a command that is not about streams (presence, locks, tasks...). It is news: sent at most once
        when all is well, and again when it is unknown whether it arrived. Raises Unavailable when too many wait.
        """
        if self._state != "closing":  # a handler of before_close may
            self._check_open()
        line = format_command(command)
        if len(self._commands) >= COMMAND_QUEUE or self._commands_bytes + len(line) > COMMAND_QUEUE_BYTES:
            raise Unavailable("Redis", f"{len(self._commands)} commands are waiting for it")
        channel = self._channel("USER_IP" if isinstance(command, UserIp) else "")
        self._commands.append((channel, line))
        self._commands_bytes += len(line)
        self._wake.set()

    def on(self, kind: type[CommandT]) -> Callable[[Callable[[CommandT], Any]], Callable[[CommandT], Any]]:
        """Decorate a function (async or not) that is called with each command of that class."""
        self._check_open()

        def register(handler: Callable[[CommandT], Any]) -> Callable[[CommandT], Any]:
            self._command_handlers.setdefault(kind, []).append(handler)
            channel = self._channel("USER_IP" if kind is UserIp else "")
            spawn(self._tasks, self._link.subscribe(channel), "busrep-subscribe")
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
        self._line_handlers.append(handler)

    # -- the link's callbacks ---------------------------------------------------------------------------------

    def _up(self) -> None:
        now = asyncio.get_running_loop().time()
        self._echo_at = self._heard_at = self._reconnected_at = now
        self._reading.connected(now)
        self._caching.up()
        if self._writing is not None:
            self._writing.core.connected(now)
        self._ask_for_positions()
        for handler in self._connect_handlers:
            spawn(self._tasks, call(handler), "busrep-connect")

    def _down(self) -> None:
        self._caching.down()
        self._reading.disconnected()

    def _ask_for_positions(self) -> None:
        self._ask = True
        self._wake.set()

    def _message(self, channel: str, data: bytes) -> None:
        now = self._heard_at = asyncio.get_running_loop().time()
        if self._line_handlers:
            self._show("<", channel, data)
        if self._writing is not None and not self._name_lost and self._writing.is_echo(data):
            self._echo_at = now
            if not self._own:
                return
        frame = parse_message(data, self.settings)
        if self._writing is not None:
            self._writing.heard(frame)
        self._reading.receive(frame, now)
        self._caching.heard(frame)
        core = self._reading.core
        if core.asks:
            core.asks = False
            self._ask_for_positions()
        if core.errors:
            for error in core.errors:
                self._log_error(error, now)
            core.errors.clear()
        if core.commands:
            commands, core.commands = core.commands, []
            for command in commands:
                self._command(command, now)

    def _show(self, direction: str, channel: str, data: bytes) -> None:
        for line in data.split(b"\n"):
            for handler in self._line_handlers:
                try:
                    handler(direction, channel, line)
                except Exception:  # who looks on must not stop the traffic
                    log.exception("the handler of a line failed")

    def _command(self, command: Command, now: float) -> None:
        writing = self._writing
        if isinstance(command, Replicate):
            if writing is not None:
                self._answer(writing, now)
        elif isinstance(command, Name) and writing is not None and command.instance == writing.name:
            if command.incarnation == writing.incarnation:
                self._echo_at = now
            elif command.incarnation is not None and command.incarnation > writing.incarnation:
                if writing.claimed is not None:  # a hint: the claim decides (9.19)
                    self._doubt_claim(writing, now)
                else:
                    self._outdone(writing, command.incarnation, now)
        elif isinstance(command, Server) and writing is not None and command.epoch not in (None, writing.epoch):
            self._other_epoch(writing, command.epoch or "", now)
        for handler in self._command_handlers.get(type(command), ()):
            if len(self._tasks) < COMMAND_CALLS:
                spawn(self._tasks, call(handler, command), "busrep-command")
                continue
            self._commands_dropped += 1
            self._log_error(ParseError(command.format(), type(command).__name__, "handlers are too slow: dropped"), now)

    def _answer(self, writing: Writing, now: float) -> None:
        writing.core.replicate_received(now)
        self._wake.set()
        if self._answering is None and (due := writing.core.next_answer) < math.inf:

            def answer() -> None:
                self._answering = None
                writing.core.tick(max(due, asyncio.get_running_loop().time()))
                self._wake.set()

            self._answering = asyncio.get_running_loop().call_at(due, answer)

    def _outdone(self, writing: Writing, incarnation: int, now: float) -> None:
        """A higher incarnation of the own name is heard: of a successor, or, just after the start, of a predecessor.

        Where no stream has a table no claim tells which. Above a predecessor, whose clock was ahead, it goes on (9.24).
        One that writes to a log has a claim, and so the name.
        """
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        if not writing.kept and now - self._named_at <= bound and not writing.has_log(incarnation):
            log.warning(
                "writer %s is heard under a higher incarnation, %d: a clock is behind", writing.name, incarnation
            )
            writing.outdone = incarnation
            writing.fence(WriterFenced(writing.name, writing.incarnation))
        else:
            writing.lose(WriterFenced(writing.name, writing.incarnation))

    def _doubt_claim(self, writing: Writing, now: float, epoch: str | None = None) -> None:
        """Ask the database whether the claim stands. Once a beat at most, whatever is said: the beat looks, too."""
        if writing.fenced is None and now - self._claim_asked_at >= self.settings.heartbeat:
            self._claim_asked_at = now
            spawn(self._tasks, self._check_claim(writing, epoch), "busrep-claim")

    async def _check_claim(self, writing: Writing, epoch: str | None) -> None:
        try:
            async with asyncio.timeout(self.settings.heartbeat):
                stands = await writing.check_claim()
        except (BusrepError, TimeoutError) as error:
            log.warning("the claim of %s cannot be read yet: %s", writing.name, error)
        else:
            if stands and epoch is not None:
                self._reading.report_deployment(epoch, writing.epoch)

    def _other_epoch(self, writing: Writing, epoch: str, now: float) -> None:
        """Either the database was restored, which takes the claim away, or another deployment uses the channel."""
        if writing.claimed is not None and not self._reading.is_reported(epoch):
            self._doubt_claim(writing, now, epoch)

    def _log_error(self, error: ParseError, now: float) -> None:
        reason = f"{error.field} {_NUMBER.sub('', error.reason)}"  # else a line with another number is another reason
        if self._limiter.allows(reason, now):
            log.warning("%s", error)

    # -- publishing -------------------------------------------------------------------------------------------

    async def _keep_publishing(self) -> None:
        settings, failures = self.settings, 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._publish_all()
                failures = 0
            except Exception as error:
                if not isinstance(error, Unavailable):  # a bug; what is not published is lost to whoever waits for it
                    log.exception("publishing failed")
                failures += 1
                if self._writing is not None:
                    self._writing.publishing = False
                    self._writing.drained()
                log.debug("publishing: %s", error)
                await asyncio.sleep(pause_after(failures, settings))
                self._wake.set()
            self._flushed.set()

    async def _publish_all(self) -> None:
        link, writing = self._link, self._writing
        while True:
            if await link.open_publisher() and writing is not None:
                # Others cannot see that we came back: say where we are.
                writing.core.connected(asyncio.get_running_loop().time())
            frames = writing.core.frames_to_publish() if writing is not None else []
            asked, self._ask = self._ask, False
            commands = list(self._commands)[: settings_in_flight(self.settings)]
            messages = [(channel, Replicate().format()) for channel in self._asking_channels] if asked else []
            messages += commands
            for frame in frames:
                messages += [(self._channel(frame.channel_suffix), data) for data in frame.messages]
            if not messages:
                return
            try:
                await link.publish(messages)
            except BaseException:
                # Unknown which arrived: the same frames go out again, byte for byte (9.6).
                self._ask = self._ask or asked
                if writing is not None:
                    writing.core.publish_failed()
                raise
            if asked:
                self._asked_at = asyncio.get_running_loop().time()
            for _ in commands:
                self._commands_bytes -= len(self._commands.popleft()[1])
            if writing is not None:
                for frame in frames:
                    writing.core.published(frame)
                writing.publishing = True
                writing.drained()
            if self._line_handlers:
                for channel, data in messages:
                    self._show(">", channel, data)

    def _channel(self, suffix: str) -> str:
        return f"{self.name}/{suffix}" if suffix else self.name

    def _own_positions(self) -> Mapping[str, int]:
        return {} if self._writing is None or self._own else self._writing.core.positions()

    def _own_written(self, stream: str) -> tuple[int, bool] | None:
        writing = self._writing
        return None if writing is None or self._own else writing.written(stream)

    # -- the beat ---------------------------------------------------------------------------------------------

    async def _keep_beating(self) -> None:
        loop, heartbeat = asyncio.get_running_loop(), self.settings.heartbeat
        beats = 0
        beating: asyncio.Task[None] | None = None
        while True:
            pause = heartbeat * (0.9 + 0.2 * random.random())
            if self._writing is not None:  # the core has jittered its beat already
                pause = max(0.0, min(1.1 * heartbeat, self._writing.core.next_beat - loop.time()))
            await asyncio.sleep(pause)
            beats += 1
            if self._writing is not None and (beating is None or beating.done()):
                beating = spawn(self._tasks, self._beat(self._writing), "busrep-beat")
                # What it finds out is announced at once. But a database that hangs must not keep the announcement
                # back, nor a driver that takes its time to let go of a question (psycopg: up to ten seconds).
                await asyncio.wait({beating}, timeout=heartbeat / 4)
            self._reading.beat(all_known=beats % self.settings.silent_after_beats == 1)
            if self._writing is not None:
                self._writing.core.tick(loop.time())
                self._wake.set()
                for stuck in self._writing.stuck(loop.time()):
                    log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
            self._check_link(loop.time())

    async def _beat(self, writing: Writing) -> None:
        try:
            async with asyncio.timeout(self.settings.heartbeat):
                if writing.fenced is not None and not writing.lost:
                    writing = await writing.live()
                await writing.beat()
        except (BusrepError, TimeoutError) as error:
            log.warning("beat: %s: %s", type(error).__name__, error)
        except Exception:  # a bug, in a store perhaps; the positions are stored a beat later
            log.exception("beat failed")

    def _check_link(self, now: float) -> None:
        """Give up a link that carries no messages (rule 9.21): five beats without an echo of what was published.

        The echo of its own announcements is what a writer goes by. A process without a writer goes by any message; when
        there is none for a beat it publishes REPLICATE, which comes back.
        """
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        if not self._link.connected:
            return
        if self._writing is not None and self._writing.fenced is None:
            if now - self._reconnected_at > bound and now - self._echo_at > bound:
                self._link.reconnect("own announcements are not heard back")
            return
        if now - self._heard_at > bound and self._asked_at > self._heard_at:
            self._link.reconnect("nothing is heard, not even what is published")
        elif now - self._heard_at > self.settings.heartbeat:
            self._ask_for_positions()

    # -- the rest ---------------------------------------------------------------------------------------------

    @property
    def _name_lost(self) -> bool:
        """Whether the name is another process's for good. A name that may be won back is followed as the own one."""
        return self._writing is not None and self._writing.lost

    def _check_open(self) -> None:
        if self._state in ("closing", "closed"):
            raise Closed
        if self._state == "new":
            raise ConfigError("the bus is not open yet: use 'async with busrep.connect(...) as bus'")

    def _lost(self) -> None:
        self._reading.disown()
        if self._writing is not None and self._writing.fenced is not None:
            self._tell_failure(self._writing.fenced)

    def _tell_failure(self, error: BusrepError) -> None:
        if self._on_failure is not None:
            spawn(self._tasks, tell(self._on_failure, error), "busrep-failure")

    def health(self) -> Health:
        """Whether this process does its part, and the reasons why not. Reads what is in memory; asks no server."""
        return health_of(self.statistics()) if self._state == "open" else closed()

    def statistics(self) -> dict[str, Any]:
        """Counters, levels and states of this process, JSON-able."""
        now = asyncio.get_running_loop().time()
        return {
            "reader": self._reading.statistics(),
            "writer": None if self._writing is None else self._writing.statistics(),
            "link": {
                **self._link.statistics(),
                "commands_waiting": len(self._commands),
                "commands_dropped": self._commands_dropped,
            },
            "stuck": [] if self._writing is None else self._writing.stuck(now),
            "bootstrap": self._reading.bootstrapping.statistics(),
            "caches": self._caching.statistics(),
        }


def format_command(command: Any) -> bytes:
    """The line of what ``send()`` was given. Raises ConfigError for what is no command, or longer than readers take."""
    if not isinstance(command, Command):
        raise ConfigError(f"send() takes a command of busrep.commands, not {command!r}")
    line = command.format()
    if len(line) > COMMAND_BYTES:
        raise ConfigError(f"a {type(command).__name__} of {len(line)} bytes: {COMMAND_BYTES} are taken by readers")
    return line


def settings_in_flight(settings: Settings) -> int:
    """Commands that share a pipeline with frames."""
    return settings.publish_in_flight * 16
