"""The reading half of a bus: feeds the reader core, fetches its pages, calls handlers, saves positions."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import attrs

from busrep.caches.cache import is_invalidations
from busrep.core.backoff import pause_after
from busrep.core.catchup import FetchUpdates
from busrep.core.delivery import Missed, RawBatch, Reset
from busrep.core.failures import Verdict
from busrep.core.framing import Frame
from busrep.core.reader import Followed, Key, Reader
from busrep.errors import (
    BusrepError,
    Closed,
    ConfigError,
    EpochChanged,
    HandlerFailed,
    PositionsAheadOfTable,
    PositionTooOld,
    ReaderMoved,
    RowError,
    StatementRefused,
    Unavailable,
    WaitTimeout,
)
from busrep.options import BusOptions, Start
from busrep.stores.interface import FactSource, KnownWriter, ReaderPositions, ReaderState, claims_of
from busrep.streams import Stream

from ..runtime.tasks import call, forget_cancellation, heed_cancellation, spawn, stop, within
from ..snapshots.parts import Applier
from .bootstrapping import Bootstrapping
from .effects import exactly_once
from .retrying import Retrying
from .silent import SilentWriters
from .starts import start_position, tell_where_it_begins
from .stop_notes import StopNotes

log = logging.getLogger("busrep.reader")

RowT = TypeVar("RowT")


@attrs.define(eq=False)
class Batch(Generic[RowT]):
    """Rows of one (stream, writer) to handle together: whole facts, tokens ascending.

    ``tokens`` and ``rows`` are parallel; rows of one fact repeat its token. When the handler returns, everything
    of ``writer`` up to ``position`` counts as handled; ``after`` is where the batch before ended. ``epoch``: of the log
    that they are of; ``reader``: the name under which positions are saved.
    """

    stream: Stream[RowT]
    writer: str
    after: int
    position: int
    tokens: Sequence[int]
    rows: Sequence[RowT]
    _save: Callable[[Batch[RowT], Any], Awaitable[None]] = attrs.field(repr=False)
    _raw: RawBatch = attrs.field(repr=False)
    _begin: Callable[[Batch[RowT]], AbstractAsyncContextManager[Any]] = attrs.field(repr=False)
    epoch: str | None = attrs.field(default=None, repr=False)
    reader: str | None = attrs.field(default=None, repr=False)
    _tried: bool = attrs.field(default=False, init=False, repr=False)
    _saved: bool = attrs.field(default=False, init=False, repr=False)
    _last: bool = attrs.field(default=True, init=False, repr=False)  # no other handler is called with it after this one

    @property
    def payloads(self) -> Sequence[bytes]:
        """The rows as JSON, as they came."""
        return self._raw.payloads

    def facts(self) -> Iterator[tuple[int, list[RowT]]]:
        """The same, fact by fact: (token, rows)."""
        pairs = zip(self.tokens, self.rows, strict=True)
        for token, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            yield token, [row for _, row in group]

    async def save(self, connection: Any) -> None:
        """Save this reader's position in the caller's open transaction: the effects count exactly once.

        ``connection``: the caller's, of the reader store's database. Commit before the handler returns. Raises
        ReaderMoved when these rows were handled before, or elsewhere: let it out, and roll back; ConfigError
        when the bus has no ``reader`` name, or the stream has another handler that was subscribed later.
        """
        await self._save(self, connection)
        self._saved = True

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """``async with batch.transaction() as db``: a connection in a transaction, at whose end the position is saved.

        So the effects of the block count exactly once. The connection is of the bus's own pool, to the database of the
        reader's store: a psycopg.AsyncConnection, or an sqlite3.Connection, which blocks the event loop while it works.
        When the block ends the position is saved, and the transaction committed; when it raises, rolled back. One block
        a batch. Where the server went away, or COMMIT got no answer, let the error out: the handler is called again
        unless the position shows that it was committed.

        Raises ConfigError when the bus has no ``reader`` name, or the stream has another handler that was subscribed
        later, and for a store without connections (memory, HTTP); ReaderMoved when these rows were handled before, or
        elsewhere; Unavailable, CommitUnknown.
        """
        return self._begin(self)


Handler = Callable[[Batch[RowT]], Awaitable[None] | None]
NoticeHandler = Callable[[str, str, int], Awaitable[None] | None]


# Epochs of other deployments that are told of, each once.
MOST_REPORTED = 16

_Waiter = tuple[int, int, "asyncio.Future[None]"]  # token, a number that makes it unique, what to wake


class _DetachedError(Exception):
    """The loop that took a batch ended before it asked for the next: the batch was not handled."""


def _refuse(future: asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class Reading:
    """Owns a ``Reader`` core and drives it.

    ``ask()`` is called when REPLICATE should be published; ``own_positions()`` gives what this process itself has
    published, which counts as handled when positions are saved; ``own_written(stream)`` up to where it has finished all
    its facts, and whether others are under way, None where it writes none; ``on_epoch(epoch)`` is called when the log
    turned out to be another one.
    """

    def __init__(
        self,
        options: BusOptions,
        *,
        own: str | None,
        ask: Callable[[], None],
        own_positions: Callable[[], Mapping[str, int]],
        own_written: Callable[[str], tuple[int, bool] | None],
        on_epoch: Callable[[str], None],
        on_stop: Callable[[BusrepError], None],
    ) -> None:
        settings = options.settings
        self.core = Reader((), settings=settings, own=[own] if own else (), undeclared=options.undeclared)
        self._registry, self._settings = options.streams, settings
        # A cache is empty at the start: of invalidations nothing is read but what is new, and no position is saved.
        self.unsaved = frozenset(stream.name for stream in options.streams if is_invalidations(stream))
        self.after_pump: Callable[[], None] = lambda: None
        store: FactSource | None = options.store
        reader_store: ReaderPositions | None = options.positions_store
        reader = options.reader
        self._store, self._reader_store, self._name = store, reader_store, reader
        self._start: Start = options.start if options.start is not None else ("earliest" if reader else "now")
        self._own = own
        self.own_starts: Mapping[str, int] = {}  # stream -> where this process's own facts begin
        self._own_from: dict[str, int] = {}
        self._own_due: dict[str, None] = {}  # streams bootstrapped, whose own facts are handled like another's as yet
        self._on_poison, self._on_too_old = options.on_poison, options.on_too_old
        self._on_epoch_change = options.on_epoch_change
        self._ask, self._own_positions, self._on_epoch = ask, own_positions, on_epoch
        self._own_written = own_written
        self.retrying = Retrying(settings, options.transient)
        self.on_stop = on_stop
        self.notes = StopNotes(reader_store, reader, settings)
        self._following: dict[str, asyncio.Task[None]] = {}
        self._handlers: dict[str, list[Handler[Any]]] = {}
        self._reset_handlers: list[tuple[str | None, NoticeHandler]] = []
        self._missed_handlers: list[tuple[str | None, Callable[..., Awaitable[None] | None]]] = []
        self._workers: dict[Key, asyncio.Task[None]] = {}
        self._cancelled: dict[Key, None] = {}  # whose worker was cancelled, not by close(): another one will go on
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._careful: dict[Key, int] = {}
        # Without a name, for which pruning would wait: begun at the oldest row there was, {key: (its floor, the last
        # row)}, until one is handed out.
        self._oldest: dict[Key, tuple[int, int]] = {}
        self._saved: dict[Key, int] = {}
        self.unsavable: dict[Key, StatementRefused] = {}  # why a position could not be saved
        self._paused: dict[Key, None] = {}
        self._saving = asyncio.Lock()
        self.bootstrapping = Bootstrapping(
            self,
            settings,
            store=store,
            reader_store=reader_store,
            reader=reader,
            source=options.snapshot_source,
            fresh_ones=options.start is None,
            saving=self._saving,
        )
        self.silent = SilentWriters(self, settings, store)
        self._waiters: dict[Key, list[_Waiter]] = {}
        self._waiting = 0
        self._look_at_all = False  # a look is due that asks for all writers
        self._registry_read_at = -math.inf
        self._reported: set[str] = set()  # epochs of other deployments
        self._numbers = itertools.count()
        self._offers: dict[asyncio.Queue[Any], frozenset[str]] = {}  # of which streams
        self._offered: dict[asyncio.Future[None], None] = {}
        self._saved_at: dict[Key, float] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self.stopped: dict[Key, BusrepError] = {}
        self.failure: BusrepError | None = None
        self.not_begun: dict[str, str] = {}  # stream -> why it is not followed yet; tried again
        self.poison_rows = 0
        self.rows_delivered = 0
        self.positions_refused = 0  # by the store, for they were above the sequence
        self.handler_failures = 0

    # -- following --------------------------------------------------------------------------------------------

    def subscribe(self, stream: Stream[Any], handler: Handler[Any]) -> None:
        """Call ``handler`` with the stream's batches from now on."""
        if stream.name not in self._handlers and self._name is not None and stream.name not in self.unsaved:
            # What passed while nobody handled it (somebody waited, perhaps) was not saved, and is due to this one.
            for key, progress in self.core.progress.items():
                held = key in self.stopped or self.bootstrapping.holds(key[0])
                if key[0] == stream.name and progress.stream.durable and not held:
                    self.core.move_to(*key, self._saved.get(key, progress.began))
        handlers = self._handlers.setdefault(stream.name, [])
        handlers.append(handler)
        if len(handlers) == 1:
            for key in [key for key in self._paused if key[0] == stream.name]:
                del self._paused[key]
                self.core.resume(*key)
            self._ask()
        self.follow_stream(stream)
        self.pump()

    def unsubscribe(self, stream: Stream[Any], handler: Handler[Any]) -> None:
        """Stop calling ``handler``; without another one the stream's rows wait in the table."""
        handlers = self._handlers[stream.name]
        handlers.remove(handler)
        if not handlers:
            for key in [key for key in self.core.progress if key[0] == stream.name]:
                self._pause(key)

    def _pause(self, key: Key) -> None:
        if key not in self.stopped:
            self._paused[key] = None
            self.core.stop(*key)
        self.core.ready.pop(key, None)

    def _handed_out(self, key: Key) -> bool:
        """Whether rows are taken: where nobody ever asked for them they count as handled, where the last one left
        they wait for the next."""
        return key[0] not in self._handlers or bool(self._handlers[key[0]])

    def follow_stream(self, stream: Stream[Any]) -> asyncio.Task[None]:
        """Begin to follow a stream, once; the task ends when its positions are known."""
        task = self._following.get(stream.name)
        if task is None:
            if not stream.resettable and self._store is None:
                raise ConfigError(
                    f"stream {stream.name!r} is kept in a table: pass store= to connect(), or declare it resettable"
                )
            task = asyncio.create_task(self._begin(stream), name=f"busrep-follow-{stream.name}")
            self._following[stream.name] = task
        return task

    async def _begin(self, stream: Stream[Any]) -> None:
        failures = 0
        while not self._closed:
            try:
                await self._load(stream)
            except Unavailable as error:
                log.warning("cannot begin to follow %s yet: %s", stream.name, error)
                self.not_begun[stream.name] = str(error)
            except BusrepError as error:
                self._fail(error)
                return
            except Exception as error:  # an error that no store should let out must not end a reader for good
                log.exception("cannot begin to follow %s yet", stream.name)
                self.not_begun[stream.name] = f"{type(error).__name__}: {error}"
            else:
                self.not_begun.pop(stream.name, None)
                self._ask()
                self.pump()
                return
            failures += 1
            await asyncio.sleep(pause_after(failures, self._settings))

    async def followed(self, stream: Stream[Any]) -> None:
        """Wait until a stream's positions are known. Raises what keeps them from it."""
        await asyncio.wait([self.follow_stream(stream)])  # which is cancelled by close(), unlike the one who waits
        if self._closed:
            raise Closed
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # it is raised again and again, and would hold on to every frame

    async def _load(self, stream: Stream[Any]) -> None:
        if stream.resettable or self._store is None:
            # The store keeps none of them; a source that asks the writer itself may.
            served = getattr(self._store, "serves_resettable", False)
            self.core.follow(
                Followed(
                    stream.name,
                    resettable=True,
                    fetchable=served,
                    from_now=served and self._start == "now",
                    foreign_writers=stream.foreign_writers,
                )
            )
            for writer, position in self._given_starts(stream.name).items() if served else ():
                self.core.start_at(stream.name, writer, position)
            return
        async with self._saving:  # two streams that find a new epoch must not both throw out what was saved
            await self._load_durable(stream.name, self._store)

    def followed_as(self, name: str, *, from_now: bool = False) -> Followed:
        """How a stream with a table is followed."""
        foreign = self._registry[name].foreign_writers or bool(getattr(self._store, "foreign_writers", False))
        return Followed(name, from_now=from_now, foreign_writers=foreign)

    async def _load_durable(self, name: str, store: FactSource) -> None:
        core = self.core
        epoch = await store.epoch()
        if core.epoch is None:
            core.epoch = epoch
        everything = await store.known()
        core.registered(claims_of(everything))
        known = {(name, writer.writer): writer for writer in everything if writer.stream == name}
        positions: dict[Key, int] = {}
        before = False
        reader = None if name in self.unsaved else self._name
        saved = None
        if reader is not None and self._reader_store is not None:
            saved = await self.bootstrapping.saved(name)
            state = await self._reader_store.load_reader(reader)
            if state.epoch not in (None, epoch):
                if self._on_epoch_change == "stop":
                    changed = EpochChanged(state.epoch, epoch)
                    self._note(changed, *state.positions)  # of all streams: none of them is loaded
                    raise changed
                log.warning("%s", EpochChanged(state.epoch, epoch))
                state = await self._begin_anew(epoch, everything, name)
                self._saved.clear()
            positions = {key: position for key, position in state.positions.items() if key[0] == name}
            before = name in state.streams
        if self.bootstrapping.at_start(name, list(known.values()), positions if before else None, saved):
            return
        # One that joined after those that were saved: this reader owes its handler all of its rows.
        start = "now" if name in self.unsaved else self._start
        starts = {key: 0 if before else start_position(start, known[key]) for key in known if key not in positions}
        oldest = {key: known[key] for key, at in starts.items() if at == known[key].floor and not before}
        foreign = getattr(store, "foreign_writers", False)
        if foreign:  # such a source knows no writers: where they are is heard from them, or given
            starts |= {
                (name, writer): at for writer, at in self._given_starts(name).items() if (name, writer) not in positions
            }
        positions |= starts
        if reader is not None and self._reader_store is not None:
            # At once: who finds the stream registered, and a writer not, takes it for one that joined since.
            await self._reader_store.register_reader(reader, {(name, ""): 0} | positions, epoch, oldest=oldest)
            begun, state = state, await self._reader_store.load_reader(reader)  # as in _register
            if name in state.loading or state.bootstraps.get(name) != begun.bootstraps.get(name):
                raise Unavailable("the store", f"another process of reader {reader!r} begins a bootstrap of {name}")
            self.bootstrapping.loaded(state, name)
            positions |= {key: state.positions[key] for key in positions.keys() & state.positions.keys()}
            if not before:
                passed = starts if self._start == "now" else oldest
                tell_where_it_begins(reader, name, {key[1]: positions[key] for key in passed}, self._start)
        else:
            self._oldest |= {key: (writer.floor, writer.position) for key, writer in oldest.items()}
        if name not in self.unsaved:
            self._saved |= positions
        core.follow(self.followed_as(name, from_now=foreign and self._start == "now" and not before))
        for key, position in positions.items():
            # Where another process saved it, or one before: if a failover loses that, so it does all effects, and where
            # they began is not known. If rows from there are pruned the fetch says so.
            core.start_at(*key, position, began=starts.get(key, 0))
        self._learn(list(known.values()))

    async def _begin_anew(self, epoch: str, known: Sequence[KnownWriter], *names: str) -> ReaderState:
        """Replace what was saved in another log: these streams, and all that were read under this name, are due from
        the oldest rows of this one. Returns what is saved then."""
        assert self._name is not None  # noqa: S101
        assert self._reader_store is not None  # noqa: S101
        before = await self._reader_store.load_reader(self._name)
        streams = {*names, *before.streams}
        others = self.bootstrapping.log_changed(streams)  # these begin where their snapshot ends
        await self.bootstrapping.make_void(others & before.streams, before.epoch or "", epoch)
        streams -= others
        floors = {(one.stream, one.writer): one.floor for one in known if one.stream in streams}
        await self._reader_store.reset_reader(self._name, floors | {(stream, ""): 0 for stream in streams}, epoch)
        state = await self._reader_store.load_reader(self._name)
        if state.epoch != epoch and (streams or state.epoch is not None):
            # Restored once more, or this one was told by a replica that lags.
            raise Unavailable("the store", f"positions of epoch {state.epoch}")
        return state

    def _learn(self, known: Sequence[KnownWriter]) -> None:
        """What was proven before we listened: a dead writer's last rows, and, of the own name, a predecessor's."""
        for writer in known:
            position = writer.position
            if writer.writer == self._own:
                position = min(position, self.own_starts.get(writer.stream, position))
                self._own_from[writer.stream] = position
            key = (writer.stream, writer.writer)
            self.core.learned(*key, position)
            if self.core.progress[key].position > writer.position:
                self.core.stepped_back[key] = None

    def own_counts(self, stream: str) -> bool:
        """Whether the own facts count as handled: not before those that a predecessor left are known, and have been."""
        if stream in self._following and stream not in self.core.followed:
            return False
        if stream in self._own_due or self.bootstrapping.holds(stream):
            return False
        return stream not in self._own_from or self.core.delivered(stream, self._own or "") >= self._own_from[stream]

    def disown(self) -> None:
        """The own name was taken over: follow it as any other, from where the own facts end."""
        counted = {stream for stream in self.core.followed if self.own_counts(stream)}
        own, self._own = self._own, None
        self.core.disown()
        positions = self._own_positions()
        for key, progress in self.core.progress.items():
            if key[1] == own and key[0] in counted and positions.get(key[0], 0) > progress.position:
                self.core.move_to(*key, positions[key[0]])
        self._own_from.clear()
        self._own_due.clear()
        self._ask()

    # -- bootstraps -------------------------------------------------------------------------------------------

    def snapshot(self, applier: Applier) -> None:
        """Apply snapshots of a stream so, and follow it."""
        self.bootstrapping.register(applier)
        self.follow_stream(applier.stream)

    async def bootstrap(self, stream: Stream[Any]) -> None:
        """Take a snapshot, and wait until the stream is online."""
        task = asyncio.current_task()
        workers = [worker for key, worker in self._workers.items() if key[0] == stream.name]
        if task in workers or (task is not None and self.bootstrapping.is_worker(task, stream.name)):
            raise ConfigError("a snapshot is applied when no handler of its stream is at work: ask from another task")
        await self.followed(stream)
        await self.bootstrapping.bootstrap(stream.name)

    def let_go(self, stream: str) -> None:
        """Whatever stopped or paused a stream's writers: a snapshot comes in place of their rows."""
        kept: tuple[dict[Key, Any], ...] = (self.stopped, self._paused, self._careful, self._oldest)
        for key in [key for key in self.core.progress if key[0] == stream]:
            for one in kept:
                one.pop(key, None)

    def at_work(self) -> list[Key]:
        """Whose rows are being handled, or who has to be told of a reset before that."""
        return [*self._workers, *(key for key in self.core.ready if self._handed_out(key))]

    def saved_anew(self, stream: str, positions: Mapping[str, int]) -> None:
        """These positions are saved now, in place of all that were of this stream."""
        self._saved = {key: at for key, at in self._saved.items() if key[0] != stream}
        self._saved |= {(stream, writer): at for writer, at in positions.items()}

    def bootstrapped(self, stream: str, positions: Mapping[str, int]) -> None:
        """A snapshot is applied: go on behind it."""
        self._own_from.pop(stream, None)
        if self._own is not None and self._own_written(stream) is not None:
            # Own facts behind the snapshot may have had their effects on a target that was emptied after them.
            self._own_due[stream] = None
            self._learn_own_due()
        self.core.bootstrapped(stream, positions)
        self._ask()
        self.pump()

    def _learn_own_due(self) -> None:
        """Own facts are fetched as another's would be, until all have been handled and none is under way: the handler
        of an older one must not come after the effects of a later one."""
        for stream in list(self._own_due):
            own, written = self._own or "", self._own_written(stream)
            position, under_way = written or (0, False)
            held = self.bootstrapping.holds(stream)
            if written is None or not (held or under_way or self.core.delivered(stream, own) < position):
                del self._own_due[stream]
            elif position > self._own_from.get(stream, 0):
                self._own_from[stream] = position
                self.core.learned(stream, own, position)

    def interrupt(self, stream: str, error: BusrepError) -> None:
        """Tell all who wait for rows of a stream that none come."""
        self._interrupt(error, stream)
        for key in [key for key in self._waiters if key[0] == stream]:
            for waiter in self._waiters.pop(key):
                _refuse(waiter[2], error)

    def _given_starts(self, stream: str) -> Mapping[str, int]:
        return {} if isinstance(self._start, str) else self._start.get(stream, {})

    # -- what comes over the link -----------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """The subscription stands (again)."""
        self.core.connected(now)
        self._learn_own()
        self.pump()

    def disconnected(self) -> None:
        """The subscription is lost."""
        self.core.disconnected()
        self._learn_own()
        self.pump()

    def _learn_own(self) -> None:
        """Go on fetching what a predecessor left: a lost link ends all catching up, and nobody announces one's own."""
        for stream, position in self._own_from.items():
            self.core.learned(stream, self._own or "", position)

    def receive(self, frame: Frame, now: float) -> None:
        """One message."""
        self.core.receive_frame(frame, now)
        self.pump()

    # -- the pump: what the core wants done -------------------------------------------------------------------

    def pump(self) -> None:
        """Start the fetches and the handlers that the core asks for."""
        if self._closed:
            return
        core, now = self.core, asyncio.get_running_loop().time()
        if core.new_epoch is not None and self.failure is None:
            self.spawn(self._change_epoch(), "epoch", once=True)
        self._learn_own_due()
        if core.registry_doubted and now - self._registry_read_at >= self._settings.heartbeat:
            self._registry_read_at = now  # whatever is said on the channel: the table is asked once a beat at most
            self.beat(all_known=True)
        for epoch in core.other_deployments:
            self.report_deployment(epoch, core.epoch)
        core.other_deployments.clear()
        for asked in core.fetches(now):
            self.spawn(self._fetch(asked), "fetch")
        for key in list(core.ready):
            if not self._handed_out(key):
                self._pause(key)
            elif key not in self._workers and key not in self.stopped and key not in self._cancelled:
                task = asyncio.create_task(self._work(key), name=f"busrep-handle-{key[0]}-{key[1]}")
                self._workers[key] = task
        self.bootstrapping.pumped()
        for key in list(self._waiters):  # a position may move without rows, and so without a handler
            self._wake(key)
        due = core.next_retry(now)
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None
        if due is not None:
            self._retry = asyncio.get_running_loop().call_at(due, self.pump)
        self.after_pump()

    def ask_for_positions(self) -> None:
        """Have REPLICATE published."""
        self._ask()

    def report_deployment(self, epoch: str, own: str | None) -> None:
        """Say once that lines of another log are heard."""
        if self.is_reported(epoch) or len(self._reported) >= MOST_REPORTED:
            return
        self._reported.add(epoch)
        log.error(
            "another deployment uses this channel: lines of epoch %s are heard and ignored, the log here is of epoch "
            "%s. Give each deployment a name of its own (name=). If this one's database was restored just now, its new "
            "epoch is not known here yet", epoch, own,
        )  # fmt: skip

    def is_reported(self, epoch: str) -> bool:
        """Whether `report_deployment` has told of this epoch."""
        return epoch in self._reported

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, once: bool = False) -> None:
        """Run ``work`` until it ends, or the bus closes; with ``once`` not beside another of that name."""
        name = f"busrep-{name}"
        if once and any(task.get_name() == name and not task.done() for task in self._tasks):
            work.close()
            return
        spawn(self._tasks, work, name)

    async def _fetch(self, asked: FetchUpdates) -> None:
        clock = asyncio.get_running_loop().time
        assert self._store is not None  # noqa: S101 (only fetchable streams are asked for)
        try:
            async with asyncio.timeout(self._settings.fetch_timeout):
                page = await self._store.fetch(asked)
        except PositionTooOld as error:
            self.core.fetch_failed(asked, error, clock())
            if self.bootstrapping.holds(error.stream):
                pass  # the answer to a question given up
            elif not self._begins_later(error) and not await self._handled_by_a_twin(error):
                self._too_old(error)
        except (BusrepError, TimeoutError) as error:
            log.warning("fetching (%s, %s) from %d: %s", asked.stream, asked.writer, asked.after, error)
            self.core.fetch_failed(asked, error, clock())
        except Exception as error:  # a bug, in a store perhaps: loud, and tried again
            log.exception("fetching (%s, %s) from %d failed", asked.stream, asked.writer, asked.after)
            self.core.fetch_failed(asked, error, clock())
        else:
            self.core.receive_page(asked, page, clock())
        self.pump()

    def _begins_later(self, error: PositionTooOld) -> bool:
        """Whether this reader was to begin at the oldest row, and that is another one by now of those there were."""
        key = (error.stream, error.writer)
        begun, last = self._oldest.get(key, (-1, -1))
        if self.core.delivered(*key) != begun or error.floor > last:  # rows that were due to it are gone
            return False
        self._oldest[key] = (error.floor, last)
        self.core.move_to(*key, error.floor)
        return True

    async def _handled_by_a_twin(self, error: PositionTooOld) -> bool:
        """Whether another process under this reader's name has handled what was pruned: then go on from there."""
        key, log_read = (error.stream, error.writer), self.core.epoch
        if error.stream in self.unsaved or self._name is None or self._reader_store is None:
            return False
        try:
            state = await self._reader_store.load_reader(self._name)
            if self.bootstrapping.is_news(state, error.stream):
                await self.bootstrapping.look()
                return True
        except BusrepError as trouble:
            log.warning("saved positions cannot be read yet: %s", trouble)
            return True  # the page is asked for again
        self.core.doubt(state.epoch)
        if self.core.epoch != log_read or state.epoch not in (None, log_read):  # the floor may be of another log
            return True
        if self.bootstrapping.holds(error.stream):
            return True
        saved = state.positions.get(key, 0)
        if saved < error.floor or saved <= self.core.delivered(*key):
            return False
        log.warning("%s: handled by another process under the name %r", error, self._name)
        self._saved[key] = saved
        self.core.move_to(*key, saved)
        return True

    def _too_old(self, error: PositionTooOld) -> None:
        key = (error.stream, error.writer)
        if self.core.progress[key].position >= error.floor or self.bootstrapping.holds(error.stream):
            return  # the answer to a question given up meanwhile
        if self.bootstrapping.begin(error.stream, str(error)):
            return
        log.error("%s", error)
        if self._on_too_old == "skip" or error.stream in self.unsaved:
            self.core.skip(*key, error.floor)
        else:
            self.stop(key, error)

    def stop(self, key: Key, error: BusrepError) -> None:
        """Stop one (stream, writer) loudly; the others flow."""
        if key not in self.stopped:
            self.on_stop(error)
        self.stopped[key] = error
        self._note(error, key)
        self.retrying.over(key)
        self.core.stop(*key)
        self._interrupt(error)
        for waiter in self._waiters.pop(key, []):
            _refuse(waiter[2], error)

    def resume(self, stream: str, writer: str) -> None:
        """Go on with a (stream, writer) that stopped, at the rows that stopped it."""
        self.bootstrapping.resume(stream)
        if self.stopped.pop((stream, writer), None) is not None:
            self._note(None, (stream, writer))
            self.core.resume(stream, writer)
            self._ask()
            self.pump()  # a notice of a reset may have been waiting

    def _note(self, error: BusrepError | None, *keys: Key) -> None:
        """Store beside the saved positions why these stopped, or that they go on."""
        self.notes.put(keys, None if error is None else str(error))
        if self.notes.due and not self._closed:
            self.spawn(self._store_notes(), "note", once=True)

    async def _store_notes(self) -> None:
        await self._try_save([key for key in self.notes.due if key in self.core.progress], busy=True)  # it clears them
        await self.notes.store()

    def _fail(self, error: BusrepError) -> None:
        log.error("reading stopped: %s", error)
        if self.failure is None:
            self.on_stop(error)
        self.failure = error
        self._note(error, *self._saved)
        self.bootstrapping.fail()
        self._interrupt(error)
        for waiters in self._waiters.values():
            for waiter in waiters:
                _refuse(waiter[2], error)

    async def _change_epoch(self) -> None:
        """The fact log is another one: begin again, or stop, as the policy says."""
        core = self.core
        held, found = core.epoch or "", core.new_epoch or ""
        if self._on_epoch_change == "stop":
            self._fail(EpochChanged(held, found))
            return
        log.warning("%s: starting again from the oldest rows", EpochChanged(held, found))
        assert self._store is not None  # noqa: S101 (an epoch comes from a store's page)
        try:
            current = await self._store.epoch()
            if current != found:  # restored once more: positions that others have in that log must not be thrown out
                loop = asyncio.get_running_loop()
                if current == held:
                    core.keep_epoch(loop.time())
                else:
                    core.new_epoch = current
                loop.call_soon(self.pump)
                return
            everything = await self._store.known()
            known = [one for one in everything if one.stream in core.followed]
            positions = {
                (one.stream, one.writer): one.position if one.stream in self.unsaved else one.floor for one in known
            }
            oldest = {(one.stream, one.writer): (one.floor, one.position) for one in known}
            async with self._saving:
                state = None
                if self._name is not None and self._reader_store is not None:
                    state = await self._begin_anew(found, everything, *(core.followed.keys() - self.unsaved))
                    positions |= {key: at for key, at in state.positions.items() if key[0] in core.followed}
                    oldest = {}
                else:
                    self.bootstrapping.log_changed(core.followed)
                self._on_epoch(found)
                core.rebase(found, positions)
                core.registered(claims_of(everything))
                self._saved = dict(positions)
                self._oldest = oldest
                self._careful.clear()
                for key in list(self.stopped):  # on a row, or a position, of the log before
                    del self.stopped[key]
                    core.resume(*key)
                self.bootstrapping.begin_due()
                if state is not None:
                    self.bootstrapping.loaded(state, *(core.followed.keys() - core.bootstrapping))
                    await self.bootstrapping.look_at(state)
        except BusrepError as error:
            log.warning("cannot read the new log yet: %s", error)
            await asyncio.sleep(self._settings.retry_max)
        else:
            self._learn(known)
            self._ask()
        asyncio.get_running_loop().call_soon(self.pump)

    # -- handlers ---------------------------------------------------------------------------------------------

    async def _work(self, key: Key) -> None:
        """Hand out what waits for one (stream, writer), in order, until nothing does."""
        core = self.core
        try:
            while not (self._closed or key in self.stopped or key in self._cancelled) and self._handed_out(key):
                careful = core.delivered(*key) < self._careful.get(key, 0)
                taken = core.take(*key, 1 if careful else None)
                if taken is None:
                    break
                if isinstance(taken, RawBatch):
                    if not await self._handle(key, taken):
                        break
                else:
                    await self._notify(taken)
                    core.done(*key)
                self._wake(key)
                await self._save_if_due(key)
                # A handler that never waits must not keep the link from being read.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if not self._closed:
                log.warning("what hands out rows of %s was cancelled, not by close(): it begins again", key)
                self._cancelled[key] = None
                if core.progress[key].queue.handling is not None:
                    core.put_back(*key)
            raise
        except Exception as error:  # ours, not the handler's: loud, and not over and over
            self.stop(key, HandlerFailed(*key, core.delivered(*key), error))
            log.exception("handing out rows of %s failed", key)
        finally:
            del self._workers[key]
            if key in self._cancelled:
                seconds = self.retrying.seconds(key, self._settings.retry_min)
                asyncio.get_running_loop().call_later(seconds, self._begin_again, key)
            self.pump()

    def _begin_again(self, key: Key) -> None:
        del self._cancelled[key]
        self.pump()

    async def _notify(self, notice: Reset | Missed) -> None:
        if isinstance(notice, Reset):
            log.info("(%s, %s) was reset to %d", notice.stream, notice.writer, notice.position)
            calls = [(f, (notice.position,)) for s, f in self._reset_handlers if s in (None, notice.stream)]
        else:
            what = "are gone" if notice.certain else "may have been missed"
            found = (notice.after, notice.upto)
            log.info("(%s, %s): rows in (%d, %d] %s", notice.stream, notice.writer, *found, what)
            calls = [(f, found) for s, f in self._missed_handlers if s in (None, notice.stream)]  # type: ignore[misc]
        for function, args in calls:
            try:
                await call(function, notice.stream, notice.writer, *args)
                forget_cancellation()
            except (Exception, asyncio.CancelledError) as error:
                self._call_failed((notice.stream, notice.writer), error)
                log.exception("the handler of a reset or of missed rows failed")

    def _call_failed(self, key: Key, error: BaseException) -> None:
        """Raise CancelledError if it is close() that cancelled this worker, whatever the handler made of it.

        Somebody else may have: the handler, at a deadline of its own, or who cancels all tasks, as asyncio.run() does
        at its end. It failed then, and another worker calls it again, for asyncio.run() waits until this one has ended.
        """
        if self._closed:
            heed_cancellation(error)  # it lost its patience
        if forget_cancellation():
            self._cancelled[key] = None

    async def _handle(self, key: Key, raw: RawBatch) -> bool:
        """Call the handlers with a batch. False: nothing was handled, and this worker ends."""
        core = self.core
        stream = self._stream(raw.stream)
        try:
            rows = stream.decode(raw.payloads)
        except RowError as error:
            if not raw.fetched:
                log.warning("rows that do not decode, fetched again: %s", error)
                core.reject(raw)
                return False
            return await self._failed(key, raw, error)
        if not await self._registered(key, raw):
            return True
        log_read = core.epoch
        place = (stream, raw.writer, raw.after, raw.position, raw.tokens)
        self.retrying.begin(key, raw.after)
        batch = Batch(*place, rows, self._save_batch, raw, self._transaction_of, log_read, self._name)
        while True:
            if not self._in_hand(key, raw):  # while it was registered, or paused for: stopped, or of a log that is gone
                return True
            if self._closed or key in self._cancelled:
                core.put_back(*key)
                return False
            self._oldest.pop(key, None)
            try:
                batch._tried = batch._saved = False
                await self._call_handlers(raw.stream, batch)
            except _DetachedError:
                if not batch._tried or not await self._reload(key, raw, log_read):
                    core.put_back(*key)
                return False
            except (Exception, asyncio.CancelledError) as error:
                self._call_failed(key, error)
                self.handler_failures += 1
                facts = 2 if raw.tokens and raw.tokens[0] != raw.tokens[-1] else 1
                patient = key[0] not in self.unsaved  # rows of these are better skipped, see _failed
                cut_off = key in self._cancelled
                verdict = self.retrying.failed(key, raw.after, error, facts=facts, patient=patient, cancelled=cut_off)
                if (
                    isinstance(error, PositionsAheadOfTable)
                    # Of this very save (9.17). From a write to another stream, or log, it is an error like any other.
                    and (batch._tried and (error.stream, error.position) == (key[0], raw.position))
                    and (self._in_hand(key, raw) and key in self._saved)
                ):
                    self._go_back(error, [(*key, self._saved[key], raw.position)])
                    return True
                if batch._tried or isinstance(error, ReaderMoved):
                    log.warning("handler of %s failed after it saved: %r", key, error)
                    if await self._reload(key, raw, log_read):
                        return True
                if verdict in (Verdict.NARROW, Verdict.POISON):
                    return await self._failed(key, raw, error)
                if not cut_off:
                    await self.retrying.pause(key)
            else:
                break
        self.retrying.over(key)
        self.rows_delivered += len(rows)
        if batch._saved:
            if not self._in_hand(key, raw):  # stopped or reset meanwhile: the core forgot these rows, the table did not
                return await self._reload(key, raw, log_read)
            self._saved[key] = raw.position
        core.done(*key)
        return True

    async def _call_handlers(self, stream: str, batch: Batch[Any]) -> None:
        due = list(self._handlers.get(stream, ()))
        while due:
            handler = due.pop(0)
            batch._last = not due
            if handler in self._handlers[stream]:  # a loop may have been left while another handler was at work
                await call(handler, batch)
                forget_cancellation()

    def _in_hand(self, key: Key, raw: RawBatch) -> bool:
        return self.core.progress[key].queue.handling is raw

    async def _registered(self, key: Key, raw: RawBatch) -> bool:
        """Make sure that there is a row to save to, for a writer that joined while we listened, and that no save of our
        own is under way while the handler may save.

        Before the handler, for its transaction may hold the only write lock there is (SQLite).
        """
        if self._name is None or not self.core.progress[key].stream.durable or key[0] in self.unsaved:
            return True
        if key in self._saved and not self._saving.locked():
            return True
        try:
            async with self._saving:  # which registers too
                if not self._in_hand(key, raw):  # of a log that is gone by now: where it began says nothing of this one
                    return True
                if key not in self._saved:
                    await self._register(key, raw.after)
        except BusrepError as trouble:
            log.warning("the position of %s cannot be registered yet: %s", key, trouble)
            await self.retrying.sleep(self._settings.retry_max)
            self.core.put_back(*key)
            return False
        return True

    def _stream(self, name: str) -> Stream[Any]:
        # A stream that nobody declared has rows of any shape.
        return self._registry[name] if name in self._registry else Stream(name, resettable=True)

    async def _failed(self, key: Key, raw: RawBatch, error: BaseException) -> bool:
        """The handler kept failing: find the fact that it fails on, then stop, or set that fact aside."""
        core = self.core
        if not self._in_hand(key, raw):  # void: stopped, or of a former life
            return True
        if raw.tokens and raw.tokens[0] != raw.tokens[-1]:
            self._careful[key] = raw.position
            core.put_back(*key)
            return True
        self.poison_rows += len(raw.tokens)
        if key[0] in self.unsaved:  # without these rows caches are cleared: that is better than to be deaf
            log.error("rows of %s at %d cannot be handled: skipped", key, raw.position, exc_info=error)
            await self._notify(Missed(*key, raw.after, raw.position))
            core.done(*key)
            return True
        failure = HandlerFailed(raw.stream, raw.writer, raw.position, error)
        if self._on_poison == "dead_letter" and self._reader_store is not None:
            log.error("%s: kept as a dead letter", failure, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            try:
                await self._reader_store.dead_letter(
                    self._name or "", raw.stream, raw.writer, raw.tokens, raw.payloads, text
                )
            except BusrepError as trouble:
                log.warning("the dead letter could not be kept yet: %s", trouble)
                await self.retrying.sleep(self._settings.retry_max)
                core.put_back(*key)
                return True
            core.done(*key)
            return True
        log.error("%s: stopped", failure, exc_info=error)
        self.stop(key, failure)
        return False

    # -- saved positions --------------------------------------------------------------------------------------

    async def _save_batch(self, batch: Batch[Any], connection: Any) -> None:
        self.check_saving(batch)
        key = (batch.stream.name, batch.writer)
        change = (*key, self._saved[key], batch.position)
        batch._tried = True
        await self._store_changes([change], connection)

    @contextlib.asynccontextmanager
    async def _transaction_of(self, batch: Batch[Any]) -> AsyncIterator[Any]:
        self.check_saving(batch)
        assert self._reader_store is not None  # noqa: S101 (just looked)
        try:
            async with exactly_once(self._reader_store.effects(), batch.save) as connection:
                yield connection
        except BaseException:
            batch._saved = False  # or the table will tell, see _reload
            raise

    def check_saving(self, batch: Batch[Any]) -> None:
        """Raise ConfigError where the position of a batch cannot be saved, ReaderMoved where it must not be."""
        if self._name is None or self._reader_store is None:
            raise ConfigError("saving a position needs a durable reader: pass reader= and store= to connect()")
        if batch._saved:
            raise ConfigError("the position of this batch is saved already: one save, or one transaction, a batch")
        if not batch._last:  # what is saved is not handed out again, whatever becomes of the calls that follow
            raise ConfigError(
                f"stream {batch.stream.name!r} has another handler, which is called later and would lose these rows if "
                "it failed: subscribe the one that saves last, or give each a bus and a reader name of its own"
            )
        key = (batch.stream.name, batch.writer)
        if not self.core.progress[key].stream.durable or key[0] in self.unsaved:
            what = "of invalidations" if key[0] in self.unsaved else "kept in memory"
            raise ConfigError(f"stream {batch.stream.name!r} is {what}: its positions are not saved")
        # A reset, a stop: what is known here is not of these rows any more. Or another process under this name is
        # known to be further: saved over its position these rows would be handled twice.
        if not self._in_hand(key, batch._raw) or self._saved.get(key, batch.after + 1) > batch.after:
            raise ReaderMoved(self._name, *key, batch.after)

    async def _store_changes(self, changes: Sequence[tuple[str, str, int, int]], connection: Any = None) -> None:
        """Raises ReaderMoved also when another process has begun a bootstrap since these positions were known."""
        assert self._name is not None  # noqa: S101
        assert self._reader_store is not None  # noqa: S101
        begun = {change[0]: self.bootstrapping.known.get(change[0], "") for change in changes}
        epoch = self.core.epoch or ""
        await self._reader_store.save_reader(self._name, changes, epoch, connection, bootstraps=begun)

    async def _register(self, key: Key, position: int) -> None:
        """Make sure that there is a row to save to. It may be another's, or that of a try without an answer.

        While ``_saving`` is held: what is registered in one log must not slip in among what a new one begins with.
        """
        assert self._name is not None  # noqa: S101
        assert self._reader_store is not None  # noqa: S101
        epoch = self.core.epoch
        await self._reader_store.register_reader(self._name, {key: position}, epoch or "")
        state = await self._reader_store.load_reader(self._name)
        void = await self.bootstrapping.look_at(state)
        if epoch == self.core.epoch and key[0] not in void:
            self._saved[key] = state.positions.get(key, position)

    async def _reload(self, key: Key, raw: RawBatch, log_read: str | None) -> bool:
        """Rule 9.12: what is saved decides, whatever became of the handler's transaction.

        False when nothing was saved: the rows are to be handled again.
        """
        core = self.core
        assert self._name is not None  # noqa: S101
        assert self._reader_store is not None  # noqa: S101
        try:
            async with self._saving:
                state = await self._reader_store.load_reader(self._name)
                void = key[0] in await self.bootstrapping.look_at(state)
                saved = state.positions.get(key)
                lost = saved is None and core.epoch == log_read and not void
                if lost:  # by a failover, with all effects since
                    await self._register(key, core.progress[key].began)
                    saved = self._saved.get(key)
        except BusrepError as trouble:
            log.warning("saved positions cannot be read yet: %s", trouble)
            await self.retrying.pause(key)
            core.put_back(*key)
            return True
        core.doubt(state.epoch)
        if saved is None or core.epoch != log_read:  # rows of a log that is gone: what is saved in the new one is known
            return True
        if void or self.bootstrapping.holds(key[0]):  # these rows are void, and what is saved is the snapshot's
            return True
        if state.epoch not in (None, log_read):  # another process has gone over to a new log, or is at it
            await asyncio.sleep(self._settings.retry_max)
            if self._in_hand(key, raw):
                core.put_back(*key)
            return True
        if saved == self._saved.get(key) and saved <= raw.after and not lost and self._in_hand(key, raw):
            return False
        log.warning("the saved position of %s is %d", key, saved)
        self._saved[key] = saved
        if saved == raw.position and self._in_hand(key, raw):
            core.done(*key)
        else:
            core.move_to(*key, saved)
            self._ask()
        return True

    async def _save_if_due(self, key: Key) -> None:
        now = asyncio.get_running_loop().time()
        if self._name is None or now - self._saved_at.get(key, 0.0) < self._settings.save_every:
            return
        self._saved_at[key] = now
        await self._try_save([key], busy=True)

    async def save(self) -> None:
        """Save what was handled and not saved by a handler. Raises Unavailable."""
        await self._save(list(self.core.progress))

    async def _save(self, keys: Sequence[Key], *, busy: bool = False) -> None:
        if self._name is None or self._reader_store is None or self.failure is not None:
            return
        async with self._saving:
            # What a worker is busy with it saves by itself: its handler may be saving this very moment.
            changes = await self._to_save([key for key in keys if busy or key not in self._workers])
            try:
                await self._save_changes(changes)
            except PositionsAheadOfTable as error:
                self._go_back(error, changes)
            except ReaderMoved as error:
                log.error("%s", error)
                void, _ = await self._compare_saved(keys)
                # One that was moved must not keep back the others.
                unmoved = [one for one in changes if one[0] not in void and self._saved.get(one[:2]) == one[2]]
                with contextlib.suppress(ReaderMoved):
                    await self._save_changes(unmoved)

    async def _compare_saved(self, keys: Sequence[Key]) -> tuple[Collection[str], str | None]:
        """Compare saved positions with the table, while ``_saving`` is held: go back where one is below what this
        process had saved. Returns the streams whose positions a bootstrap has made void, and the epoch that the saved
        positions belong to. Raises Unavailable."""
        assert self._name is not None  # noqa: S101
        assert self._reader_store is not None  # noqa: S101
        known, state = dict(self._saved), await self._reader_store.load_reader(self._name)
        void = await self.bootstrapping.look_at(state)
        self.core.doubt(state.epoch)
        # Positions of another log say nothing of this one; of void streams the end of a snapshot is saved, or more.
        keys = [key for key in keys if state.epoch in (None, self.core.epoch) and key[0] not in void]
        lost = {key: self.core.progress[key].began for key in keys if key in known and key not in state.positions}
        if lost:  # with an older epoch, or in a failover. Until they are back nobody who prunes knows of this reader.
            with contextlib.suppress(StatementRefused):  # saving registers each apart, and tells which is refused
                await self._reader_store.register_reader(self._name, lost, self.core.epoch or "")
        for key in keys:
            if self._saved.get(key, 0) > known.get(key, 0):
                continue  # its handler saved, perhaps after that was read
            if (before := self._saved.pop(key, None)) is None and key not in state.positions:
                continue
            saved = state.positions.get(key, self.core.progress[key].began)
            if key in state.positions:
                self._saved[key] = saved
            # No other process moves it back; a restore or a failover does, and what was handled since is undone.
            if key not in state.positions or saved < (before or 0):
                log.warning("the saved position of %s is %d", key, saved)
                self.core.move_to(*key, saved)
                self._ask()
        return void, state.epoch

    def above_sequence(self, key: Key, error: PositionsAheadOfTable) -> None:
        """What was taken in of a (stream, writer) lies above the sequence (9.17): go back to what is saved, or stop."""
        saved = self._saved.get(key)
        if self._name is None or saved is None or self.bootstrapping.holds(key[0]):
            self.stop(key, error)
        else:
            self._go_back(error, [(*key, saved, error.position)])

    def _go_back(self, error: PositionsAheadOfTable, changes: Sequence[tuple[str, str, int, int]]) -> None:
        """A position above the sequence was refused (9.17): what was taken in since the saved one is fetched again."""
        for stream, writer, saved, position in changes:
            if stream != error.stream or position <= error.highest:
                continue
            if saved > error.highest:
                self.stop((stream, writer), error)
                continue
            self.positions_refused += 1
            log.error("%s: reading (%s, %s) goes back to %d, which is saved", error, stream, writer, saved)
            self.core.move_to(stream, writer, saved, error.highest)
        self._ask()
        asyncio.get_running_loop().call_soon(self.pump)

    async def _to_save(self, keys: Sequence[Key]) -> list[tuple[str, str, int, int]]:
        own, changes = self._own_positions(), []
        for key in keys:
            progress = self.core.progress[key]
            if not progress.stream.durable or key[0] in self.unsaved:
                continue
            if key[0] not in self._handlers:  # nobody has handled anything
                continue
            if self.bootstrapping.holds(key[0]):  # what is saved is where the snapshot ends
                continue
            position = progress.queue.delivered
            if key[1] == self._own and self.own_counts(key[0]):
                position = max(position, own.get(key[0], 0))
            if key not in self._saved:
                with self._refusable(key):
                    await self._register(key, progress.began)
                if key not in self._saved:  # refused, or a bootstrap of another process came between
                    continue
            # Never back: another process, or a handler whose COMMIT was not answered, is further.
            if self._saved[key] < position:
                changes.append((*key, self._saved[key], position))
        return changes

    async def _save_changes(self, changes: Sequence[tuple[str, str, int, int]]) -> None:
        # Apart, what was refused before: one statement saves all of them or none.
        for some in (
            [c for c in changes if c[:2] not in self.unsavable],
            *([c] for c in changes if c[:2] in self.unsavable),
        ):
            if some:
                await self._save_together(some)

    async def _save_together(self, changes: Sequence[tuple[str, str, int, int]]) -> None:
        try:
            await self._store_changes(changes)
        except StatementRefused as error:
            if len(changes) == 1:
                self._refuse_to_save(changes[0][:2], error)
                return
            for change in changes:  # find out for which of them it does not work
                await self._save_together([change])
            return
        self._saved.update({(stream, writer): new for stream, writer, _, new in changes})
        for key in self.stopped.keys() & {change[:2] for change in changes}:
            self._note(self.stopped[key], key)  # what was handled before it stopped cleared the reason
        for stream, writer, _, _ in changes:
            self.unsavable.pop((stream, writer), None)

    @contextlib.contextmanager
    def _refusable(self, key: Key) -> Iterator[None]:
        """What the store refuses of this key keeps no other from being saved."""
        try:
            yield
        except StatementRefused as error:
            self._refuse_to_save(key, error)

    def _refuse_to_save(self, key: Key, error: StatementRefused) -> None:
        if key not in self.unsavable:
            log.error("the position of %s cannot be saved, others are: %s", key, error)
        self.unsavable[key] = error

    async def keep_saving(self) -> None:
        """Save every ``save_every`` seconds until cancelled. At 0 batches are saved at once: this is for the rest."""
        while True:
            await asyncio.sleep(self._settings.save_every or self._settings.heartbeat)
            await self._try_save(list(self.core.progress))

    async def _try_save(self, keys: Sequence[Key], *, busy: bool = False) -> None:
        try:
            await self._save(keys, busy=busy)
        except BusrepError as error:
            log.warning("positions could not be saved: %s", error)
        except Exception:  # a bug, in a store perhaps: rows may come twice for it, but they must not stop
            log.exception("positions could not be saved")

    def beat(self, *, all_known: bool) -> None:
        """Look into the table by the side: one slower than a beat must not delay the beats, nor be cut off by them."""
        self._look_at_all |= all_known
        self.spawn(self._look(), "look", once=True)

    async def _look(self) -> None:
        all_known, self._look_at_all = self._look_at_all, False
        try:
            async with asyncio.timeout(self._settings.fetch_timeout):
                await self.look_after_silent(all_known=all_known)
        except (BusrepError, TimeoutError) as error:
            self._look_at_all |= all_known  # the next beat looks again
            log.warning("looking for silent writers: %s: %s", type(error).__name__, error)

    async def look_after_silent(self, *, all_known: bool) -> None:
        """What nobody announces is looked for in the table, and who is not heard."""
        if self._own_due:
            self.pump()
        with contextlib.suppress(BusrepError):  # the next beat looks again
            if not all_known or not await self._look_at_saved():
                await self.bootstrapping.look_again()
        if self._following:
            await self.silent.look(self._own, all_known=all_known)

    async def _look_at_saved(self) -> bool:
        """Compare saved positions with the table: a failover may have put them back, and the effects saved with them,
        while the rows stayed. Without new rows nothing else would show it. Other processes' bootstraps are looked for
        by the way. Returns False when nothing is saved. Raises Unavailable."""
        if self._name is None or not self._saved or self.failure is not None:
            return False
        core, store = self.core, self._store
        async with self._saving:
            _, epoch = await self._compare_saved(
                [
                    key
                    for key in self._saved
                    if key in core.progress and key not in self._workers and not self.bootstrapping.holds(key[0])
                ]
            )
        # Positions of an older log, though this process has saved some of this one: the failover lost that step, too.
        older = store is not None and epoch not in (None, core.epoch) and await store.epoch() == core.epoch
        if older and core.new_epoch is None:
            core.new_epoch = core.epoch
            self.pump()
        return True

    # -- waiting ----------------------------------------------------------------------------------------------

    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float) -> None:
        """Return once everything of ``writer`` up to ``token`` was handled here. Raises WaitTimeout."""
        key = (stream.name, writer)
        try:
            async with asyncio.timeout(timeout):
                await self.followed(stream)
                await self._reached(key, token)
        except TimeoutError:
            raise WaitTimeout(*key, token, self.core.delivered(*key), timeout) from None

    async def _reached(self, key: Key, token: int) -> None:
        if self._closed:
            raise Closed
        error = self.failure or self.stopped.get(key) or self.bootstrapping.stopped.get(key[0])
        if error is not None:
            raise error.with_traceback(None)
        if self.core.delivered(*key) >= token and not self.bootstrapping.holds(key[0]):
            return
        if self._waiting >= self._settings.waiters:
            raise ConfigError(f"more than {self._settings.waiters} waits at a time: raise Settings.waiters")
        future = asyncio.get_running_loop().create_future()
        waiter = (token, next(self._numbers), future)
        heapq.heappush(self._waiters.setdefault(key, []), waiter)
        self._waiting += 1
        try:
            await future
        finally:
            self._waiting -= 1
            waiters = self._waiters.get(key, [])
            if waiter in waiters:  # given up before it was reached
                waiters.remove(waiter)
                heapq.heapify(waiters)
            if not waiters:
                self._waiters.pop(key, None)

    def _wake(self, key: Key) -> None:
        waiters = self._waiters.get(key)
        if waiters and not self.bootstrapping.holds(key[0]):
            delivered = self.core.delivered(*key)
            while waiters and waiters[0][0] <= delivered:
                future = heapq.heappop(waiters)[2]
                if not future.done():
                    future.set_result(None)

    # -- iteration --------------------------------------------------------------------------------------------

    async def follow(self, *streams: Stream[Any]) -> AsyncIterator[Batch[Any]]:
        """Yield the batches of ``streams``; each counts as handled when the next is asked for."""
        offers: asyncio.Queue[tuple[Batch[Any], asyncio.Future[None]] | BusrepError] = asyncio.Queue()
        pending: dict[asyncio.Future[None], None] = {}

        async def offer(batch: Batch[Any]) -> None:
            handled = asyncio.get_running_loop().create_future()
            for futures in (pending, self._offered):
                futures[handled] = None
            offers.put_nowait((batch, handled))
            try:
                await handled
            finally:
                for futures in (pending, self._offered):
                    futures.pop(handled, None)

        names = frozenset(stream.name for stream in streams)
        self._offers[offers] = names
        for stream in streams:
            self.subscribe(stream, offer)
        stopped = [error for key, error in self.stopped.items() if key[0] in names]
        stopped += [error for name, error in self.bootstrapping.stopped.items() if name in names]
        for error in [self.failure, *stopped, Closed() if self._closed else None]:
            if error is not None:
                offers.put_nowait(error)
        try:
            while True:
                offered = await offers.get()
                if isinstance(offered, BusrepError):
                    if getattr(offered, "stream", None) in {None, *names}:
                        raise offered
                    continue
                batch, handled = offered
                if handled.done():  # given up meanwhile: the bus is closed
                    continue
                if not self._in_hand((batch.stream.name, batch.writer), batch._raw):  # of a log that is gone
                    handled.set_result(None)
                    continue
                yield batch
                if not handled.done():
                    handled.set_result(None)
        finally:
            self._offers.pop(offers, None)
            try:
                # Whoever asked for this batch has handled the one before: its worker must take note of that first, or
                # the batch would come again.
                await asyncio.sleep(0)
            finally:
                for stream in streams:
                    self.unsubscribe(stream, offer)
                for future in pending:
                    _refuse(future, _DetachedError())

    def _interrupt(self, error: BusrepError, stream: str | None = None) -> None:
        for offers, names in self._offers.items():
            if stream is None or stream in names:
                offers.put_nowait(error)

    # -- the rest ---------------------------------------------------------------------------------------------

    def on_reset(self, stream: str | None, handler: NoticeHandler) -> None:
        """Call ``handler(stream, writer, position)`` when a stream began anew."""
        self._reset_handlers.append((stream, handler))

    def on_missed(self, stream: str | None, handler: Callable[..., Awaitable[None] | None]) -> None:
        """Call ``handler(stream, writer, after, upto)`` when rows cannot be had any more."""
        self._missed_handlers.append((stream, handler))

    def is_worker(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is one that calls handlers."""
        if task is None or self.bootstrapping.is_worker(task):
            return task is not None
        return task in self._workers.values() or task in self._tasks

    async def close(self, timeout: float) -> None:
        """Let running handlers end, save, stop everything."""
        self._closed = True
        self.retrying.end()
        self._interrupt(Closed())
        if self._retry is not None:
            self._retry.cancel()
        for task in [*self._following.values(), *self._tasks]:
            task.cancel()
        for waiters in list(self._waiters.values()):
            for waiter in waiters:
                _refuse(waiter[2], Closed())
        for future in list(self._offered):  # a loop that was left, or is at work: its batch comes again next time
            _refuse(future, _DetachedError())
        workers = [*self._workers.values(), *self.bootstrapping.end()]
        if workers:
            await asyncio.wait(workers, timeout=timeout)
        await stop([*workers, *self._following.values(), *self._tasks], timeout)
        await self.bootstrapping.close(timeout)
        with contextlib.suppress(BusrepError, TimeoutError):
            await within(timeout, self.save())
            if self.notes.due:
                await within(timeout, self.notes.store())

    def statistics(self) -> dict[str, Any]:
        """Counters and states, JSON-able."""
        return {
            **self.core.statistics(),
            "rows_delivered": self.rows_delivered,
            "positions_refused": self.positions_refused,
            "handler_failures": self.handler_failures,
            "poison_rows": self.poison_rows,
            "retrying": self.retrying.statistics([*self._workers, *self._cancelled]),
            "stopped": {f"{stream} {writer}": str(error) for (stream, writer), error in self.stopped.items()},
            "unsavable": {f"{stream} {writer}": str(error) for (stream, writer), error in self.unsavable.items()},
            "failure": None if self.failure is None else str(self.failure),
            "not_begun": dict(self.not_begun),
            "waiting": self._waiting,
        }
