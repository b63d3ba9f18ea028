"""The reading half of a bus for threads: `busrep.asyncio` on an event loop in a thread of its own.

Two threads: one has the loop, and so the link, the fetches and the saving; in the other all handlers are called, one at
a time, so that a slow one holds up nothing else. Whatever touches the asyncio bus does so on the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import logging
import os
import queue
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import attrs

from busrep import asyncio as runtime
from busrep.caches.cache import Caches, Feed
from busrep.core.commands import Command, Name, Replicate
from busrep.core.reader import Reader
from busrep.errors import Closed, ConfigError
from busrep.options import BusOptions
from busrep.settings import Settings
from busrep.stores.blocking import complete
from busrep.streams import Stream

from .caching import ReadingUpkeep
from .effects import EffectsStore, exactly_once
from .snapshots import ApplyHandler, SnapshotPart
from .writing import Writing

log = logging.getLogger("busrep.reader")

RowT = TypeVar("RowT")
T = TypeVar("T")


@attrs.frozen(eq=False)
class Batch(Generic[RowT]):
    """Rows of one (stream, writer) to handle together: whole facts, tokens ascending.

    ``tokens`` and ``rows`` are parallel; rows of one fact repeat its token. When the handler returns, everything
    of ``writer`` up to ``position`` counts as handled; ``after`` is where the batch before ended.
    """

    stream: Stream[RowT]
    writer: str
    after: int
    position: int
    tokens: Sequence[int]
    rows: Sequence[RowT]
    _batch: runtime.Batch[RowT] = attrs.field(repr=False)
    _save: Callable[[runtime.Batch[RowT], Any], None] = attrs.field(repr=False)
    _begin: Callable[[runtime.Batch[RowT]], AbstractContextManager[Any]] = attrs.field(repr=False)

    @property
    def payloads(self) -> Sequence[bytes]:
        """The rows as JSON, as they came."""
        return self._batch.payloads

    @property
    def epoch(self) -> str | None:
        """Of the log that they are of."""
        return self._batch.epoch

    @property
    def reader(self) -> str | None:
        """The name under which positions are saved."""
        return self._batch.reader

    def facts(self) -> Iterator[tuple[int, list[RowT]]]:
        """The same, fact by fact: (token, rows)."""
        return self._batch.facts()

    def save(self, connection: Any) -> None:
        """Save this reader's position in the caller's open transaction: the effects count exactly once.

        ``connection``: the caller's (a psycopg.Connection, or a sqlite3.Connection of this thread), of the reader
        store's database. Commit before the handler returns. Raises ReaderMoved when these rows were handled before, or
        elsewhere: let it out, and roll back; ConfigError when the bus has no ``reader`` name, or the stream has another
        handler that was subscribed later.
        """
        self._save(self._batch, connection)

    def transaction(self) -> AbstractContextManager[Any]:
        """``with batch.transaction() as db``: a connection in a transaction, at whose end the position is saved.

        So the effects of the block count exactly once. The connection is of the bus's own, to the database of the
        reader's store: a psycopg.Connection or an sqlite3.Connection. When the block ends the position is saved, and
        the transaction committed; when it raises, rolled back. One block a batch. Where the server went away, or COMMIT
        got no answer, let the error out: the handler is called again unless the position shows that it was committed.

        Raises ConfigError when the bus has no ``reader`` name, or the stream has another handler that was subscribed
        later, and for a store that is not given by the URL of a PostgreSQL or SQLite database; ReaderMoved when these
        rows were handled before, or elsewhere; Unavailable, CommitUnknown.
        """
        return self._begin(self._batch)


Handler = Callable[[Batch[RowT]], None]


class ReadingBus(runtime.Bus):
    """An asyncio bus that reads for a process whose facts are written elsewhere, by ``writing``, under the name
    ``beside``: they count as handled here, and their positions as its own."""

    _caching: ReadingUpkeep

    def __init__(
        self, redis: Any, options: BusOptions, *, beside: str | None, writing: Writing | None, caches: Caches
    ) -> None:
        self._beside, self._beside_writing = None if options.own else beside, writing
        if options.reader is not None:
            options = attrs.evolve(options, reader_store=_SavesThere(options.positions_store))
        super().__init__(redis, options)
        self._caching = ReadingUpkeep(self, caches, writing)
        if self._beside is not None:
            self._reading.core = Reader((), settings=self.settings, own=[self._beside], undeclared=options.undeclared)
            self._reading._own = self._beside
        if writing is not None:
            self._reading.own_starts = writing.starts

    async def open(self) -> None:
        """As the asyncio bus, and answer for the writer beside it."""
        await super().open()
        writing = self._beside_writing
        if writing is not None:
            self.on(Replicate)(lambda _: writing.replicate_received())
            self.on(Name)(lambda name: self._name(writing, name))

    def _name(self, writing: Writing, name: Name) -> None:
        if name.instance == writing.name and name.incarnation is not None:
            writing.taken(name.incarnation, has_log=self._reading.core.has_log(name.instance, name.incarnation))

    def _own_positions(self) -> Mapping[str, int]:
        if self._beside_writing is None or self._beside is None:
            return {}
        return self._beside_writing.positions()

    def _own_written(self, stream: str) -> tuple[int, bool] | None:
        if self._beside_writing is None or self._beside is None:
            return None
        return self._beside_writing.written(stream)

    def _epoch_changed(self, epoch: str) -> None:
        writing = self._beside_writing
        if writing is not None:
            writing.epoch_changed(epoch)
            if writing.lost is not None:  # now, before anything is saved in the new log
                self._reading.disown()

    def positions(self) -> dict[str, dict[str, int]]:
        """As the asyncio bus, and the own positions of the writer beside it."""
        found = super().positions()
        writing = self._beside_writing
        if writing is not None and self._beside is not None and writing.lost is None:
            for stream, position in writing.positions().items():
                if self._reading.own_counts(stream):
                    found.setdefault(stream, {})[writing.name] = position
        return found


class _Here:
    """A connection that stays in the thread of whoever saves on it: what is to be done with it is done there."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    async def run(self, work: Callable[[], None]) -> None:
        """Have that thread do some work."""
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                work()
            except BaseException as error:
                _tell(loop, done, error)
                if not isinstance(error, Exception):
                    raise
            else:
                _tell(loop, done, None)

        self._jobs.put(job)
        await done

    def serve(self, until: concurrent.futures.Future[None]) -> None:
        """Do what is to be done until that is done."""
        until.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job()
        until.result()


class _SavesThere:
    """A reader's store, on the loop, that saves on a connection of another thread there."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save_reader(
        self,
        reader: str,
        changes: Sequence[tuple[str, str, int, int]],
        epoch: str,
        connection: Any = None,
        **known: Any,
    ) -> None:
        """See `AsyncStore`."""
        await self._there(lambda on: self._store.save_reader(reader, changes, epoch, on, **known), connection)

    async def save_bootstrap(
        self, reader: str, stream: str, bootstrap_id: str, *, connection: Any = None, **progress: Any
    ) -> None:
        """See `AsyncStore`."""
        save = self._store.save_bootstrap
        await self._there(lambda on: save(reader, stream, bootstrap_id, connection=on, **progress), connection)

    async def _there(self, save: Callable[[Any], Coroutine[Any, Any, None]], connection: Any) -> None:
        if not isinstance(connection, _Here):
            await save(connection)
            return
        there = connection.connection
        if inspect.iscoroutinefunction(getattr(there, "execute", None)):
            raise ConfigError(f"a blocking connection is needed, not {type(there).__name__}")
        # On a blocking connection the store's coroutine waits for nothing.
        await connection.run(lambda: complete(save(there)))


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None], error: BaseException | None) -> None:
    """Set a loop's future from another thread."""
    if error is not None and (not isinstance(error, Exception) or isinstance(error, StopIteration)):
        error = RuntimeError(f"{type(error).__name__} {error}")  # it would end the loop, or confuse it

    def tell() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for it any more
        loop.call_soon_threadsafe(tell)


class _Hand(threading.Thread):
    """The thread in which handlers are called."""

    def __init__(self) -> None:
        super().__init__(name="busrep-handle", daemon=True)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """The thread's."""
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """End after what was asked for; does not wait for it."""
        self._jobs.put(None)

    async def call(self, handler: Callable[..., Any], *args: Any) -> None:
        """Call it there. Raises what it raises."""
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def job() -> None:
            if done.cancelled():
                return
            try:
                handler(*args)
            except BaseException as error:
                _tell(loop, done, error)
            else:
                _tell(loop, done, None)

        self._jobs.put(job)
        await done


class _Selector(selectors.DefaultSelector):
    """One that a forked child leaves as it is: it is shared with the parent, whose loop would hear no more of what is
    unregistered in the child, by the garbage collector for example."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See `selectors`."""
        return super().unregister(fileobj) if os.getpid() == self._pid else self.get_key(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See `selectors`."""
        return super().modify(fileobj, events, data) if os.getpid() == self._pid else self.get_key(fileobj)


class Reading:
    """Runs a `ReadingBus` in a thread. ``make`` makes it, there. ``effects``: gives handlers their connections.
    ``here(raising)``: see `Bus`."""

    def __init__(
        self,
        make: Callable[[], ReadingBus],
        settings: Settings,
        effects: EffectsStore,
        here: Callable[[bool], bool] = lambda _: True,
    ) -> None:
        self._make, self._settings, self._here = make, settings, here
        self._effects = effects
        self._hand = _Hand()
        self._thread: threading.Thread | None = None
        self._asking = threading.RLock()
        self._asked: dict[concurrent.futures.Future[Any], Coroutine[Any, Any, Any]] = {}
        self._over = False  # the loop takes no more turns
        self._bus: ReadingBus
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the bus there. Raises what that raises."""
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="busrep-read", daemon=True)
        try:
            self._thread.start()
            self._hand.start()
            opened.result()
        except BaseException:
            opened.cancel()  # if this was interrupted it ends as soon as it is open
            self._hand.stop()
            raise

    def _run(self, opened: concurrent.futures.Future[None]) -> None:
        try:
            # Selectors on every system: psycopg needs them.
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector())) as runner:
                runner.run(self._live(opened))
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            elif not opened.cancelled():
                log.exception("reading ended")
        finally:
            self._refuse_all()

    async def _live(self, opened: concurrent.futures.Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._bus = self._make()
        await self._bus.open()
        try:
            if opened.set_running_or_notify_cancel():
                opened.set_result(None)
                await self._stop.wait()
        finally:
            await self._bus.close()

    def is_handler(self) -> bool:
        """Whether the calling thread is the one in which handlers are called."""
        return threading.current_thread() is self._hand

    def close(self, timeout: float) -> None:
        """Close the bus there; a handler that does not end is left alone."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()  # each of its steps has its own deadline
        self._hand.stop()
        self._hand.join(timeout)
        if self._hand.is_alive():
            log.error("a handler has not ended; its rows come again")
        else:
            self._effects.close()

    def _ask(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have the loop do something. A loop forgets what it is asked after its last turn: who waits is told then."""
        try:
            self._here(True)
            if threading.current_thread() is self._thread:
                raise ConfigError("in the thread of the bus's event loop nothing can wait for it: use another thread")
            with self._asking:
                if self._over:
                    raise Closed
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._asked[future] = work
        except RuntimeError:  # it was closed this very moment
            work.close()
            raise Closed from None
        except BaseException:
            work.close()
            raise
        future.add_done_callback(lambda done: self._asked.pop(done, None))
        return future

    def _refuse_all(self) -> None:
        with self._asking:
            self._over = True
            asked = list(self._asked.items())
        for future, work in asked:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(Closed())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the loop, and wait for it."""
        future = self._ask(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the loop has ended
            raise Closed from None
        except BaseException:
            future.cancel()
            raise

    def _do(self, function: Callable[[], T]) -> T:
        async def do() -> T:
            return function()

        return self._call(do())

    # -- what the bus does ------------------------------------------------------------------------------------

    def subscribe(self, streams: Sequence[Stream[Any]], handler: Handler[Any]) -> None:
        """See `Bus`."""

        async def handle(batch: runtime.Batch[Any]) -> None:
            await self._hand.call(handler, self._batch(batch))

        self._do(lambda: self._bus.subscribe(*streams)(handle))

    def _batch(self, batch: runtime.Batch[Any]) -> Batch[Any]:
        return Batch(
            batch.stream, batch.writer, batch.after, batch.position, batch.tokens, batch.rows, batch, self._save,
            self._transaction,
        )  # fmt: skip

    def _save(self, batch: runtime.Batch[Any] | runtime.SnapshotPart[Any], connection: Any) -> None:
        here = _Here(connection)
        here.serve(self._ask(batch.save(here)))

    @contextlib.contextmanager
    def _transaction(self, batch: runtime.Batch[Any]) -> Iterator[Any]:
        self._do(lambda: self._bus._reading.check_saving(batch))
        try:
            with exactly_once(self._effects.begin(), lambda connection: self._save(batch, connection)) as connection:
                yield connection
        except BaseException:
            batch._saved = False  # or the table will tell, once the handler has failed
            raise

    def snapshot(self, stream: Stream[Any], handler: ApplyHandler[Any], key: Callable[[Any], Hashable] | None) -> None:
        """See `Bus`."""

        async def apply(part: runtime.SnapshotPart[Any]) -> None:
            await self._hand.call(handler, SnapshotPart.of(part, self._save))

        self._do(lambda: self._bus.snapshot(stream, key=key)(apply))

    def bootstrap(self, stream: Stream[Any]) -> None:
        """See `Bus`."""
        if self.is_handler():
            raise ConfigError("a snapshot is applied when no handler is at work: ask from another thread")
        self._call(self._bus.bootstrap(stream))

    def follow(self, streams: Sequence[Stream[Any]]) -> Iterator[Batch[Any]]:
        """See `Bus`."""
        iterator = self._do(lambda: self._bus.follow(*streams))
        return self._follow(iterator)

    def _follow(self, iterator: AsyncIterator[runtime.Batch[Any]]) -> Iterator[Batch[Any]]:
        async def following() -> runtime.Batch[Any]:
            return await anext(iterator)

        try:
            while True:
                yield self._batch(self._call(following()))
        finally:
            # Not waited for: this may be the garbage collector, in whatever thread.
            if self._here(False):
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._leave, iterator)

    def _leave(self, iterator: Any) -> None:
        async def leave() -> None:
            for pause in itertools.repeat(0.001):
                if not iterator.ag_running:
                    break
                await asyncio.sleep(pause)  # its step was cancelled a moment ago
            await iterator.aclose()

        task = asyncio.ensure_future(leave())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float) -> None:
        """See `Bus`."""
        self._call(self._bus.wait_for(stream, writer, token, timeout))

    def on_reset(self, stream: Stream[Any] | None, handler: Callable[..., Any]) -> None:
        """See `Bus`."""
        self._do(lambda: self._bus.on_reset(stream)(lambda *args: self._hand.call(handler, *args)))

    def on_missed(self, stream: Stream[Any] | None, handler: Callable[..., Any]) -> None:
        """See `Bus`."""
        self._do(lambda: self._bus.on_missed(stream)(lambda *args: self._hand.call(handler, *args)))

    def on(self, kind: type[Any], handler: Callable[[Any], Any]) -> None:
        """See `Bus`."""
        self._do(lambda: self._bus.on(kind)(lambda command: self._hand.call(handler, command)))

    def send(self, command: Command) -> None:
        """See `Bus`."""
        self._call(self._bus.send(command))

    def positions(self) -> dict[str, dict[str, int]]:
        """See `Bus`."""
        return self._do(self._bus.positions)

    def linear_position(self, stream: Stream[Any]) -> int:
        """See `Bus`."""
        return self._call(self._bus.linear_position(stream))

    def resume(self, stream: Stream[Any], writer: str) -> None:
        """See `Bus`."""
        self._do(lambda: self._bus.resume(stream, writer))

    def statistics(self) -> dict[str, Any]:
        """See `Bus`."""
        return self._do(self._bus.statistics)

    def follow_invalidations(self, feed: Feed) -> None:
        """A function is cached that they concern."""
        self._do(lambda: self._bus._caching.follow(feed))

    def disown(self) -> None:
        """The own name was taken over: follow it as any other, from where the own facts end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._bus._reading.disown)
