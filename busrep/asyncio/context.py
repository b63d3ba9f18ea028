"""What the parts of a reading process share: the reader core, the stores, what stopped, and who waits."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from busrep.caches.cache import is_invalidations
from busrep.core.catchup import Key
from busrep.core.handled import OldestRows, OwnFacts, SavedPositions
from busrep.core.reader import Reader
from busrep.core.received import Followed
from busrep.core.snapshots import BootstrapProgress
from busrep.errors import BusrepError
from busrep.stores.interface import FactSource, KnownWriter, ReaderPositions

from ..runtime.batch import Handler
from ..runtime.tasks import Tasks, call
from .handlers import Retrying
from .waiting import FollowLoop, PositionWaiters

if TYPE_CHECKING:
    from .bootstrapping import Bootstrapping
    from .bus_life import BusLife
    from .saving import BatchSaver, PositionSaver

log = logging.getLogger("busrep.reader")


class ReaderContext(abc.ABC):
    """What each part of a reading process needs of the whole; `Reading` is the whole, and makes the parts.

    ``ask_for_positions()`` has REPLICATE published. ``saving`` is held while saved positions change. ``subscribed``:
    the handlers of each stream that ever had one; ``workers``: the tasks that call them. ``notes``: {key: why it
    stopped, or None that it goes on}, to be stored beside the saved positions, where `busrep lag` finds it.
    """

    bootstrapping: Bootstrapping
    saver: PositionSaver
    batches: BatchSaver

    def __init__(self, bus: BusLife) -> None:
        options = bus.options
        own = None if options.own else bus.own_name.name
        self.bus, self.options, self.settings = bus, options, options.settings
        self.core = Reader((), settings=self.settings, own=[own] if own else (), undeclared=options.undeclared)
        self.own = OwnFacts(self.core, own, bus.own_name.written)
        self.ask_for_positions = bus.publisher.ask_for_positions
        # BusOptions sees to it that there is a store for a stream with a table, and one for the name of a reader.
        self.store: FactSource = options.store
        self.reader_store: ReaderPositions = options.positions_store
        self.beside_log = self.reader_store is self.store
        self.reader = options.reader or ""  # without a name no position is saved
        # A cache is empty at the start: of invalidations nothing is read but what is new, and no position is saved.
        self.unsaved = frozenset(stream.name for stream in options.streams if is_invalidations(stream))
        self.saving = asyncio.Lock()
        self.saved, self.oldest = SavedPositions(), OldestRows()
        self.retrying = Retrying(self.settings, options.transient)
        self.waiters = PositionWaiters(self.settings.waiters)
        self.loops: dict[FollowLoop, None] = {}
        self.following: dict[str, asyncio.Future[None]] = {}
        self.subscribed: dict[str, list[Handler[Any]]] = {}
        self.workers: dict[Key, asyncio.Task[None]] = {}
        self.paused: dict[Key, None] = {}  # whose last handler left
        self.bisecting: dict[Key, int] = {}  # up to where facts are handed out one by one, after a failure
        self.handler_failures = 0
        self.notes: dict[Key, str | None] = {}
        self.stopped: dict[Key, BusrepError] = {}
        self.stopped_bootstraps: dict[str, BusrepError] = {}
        self.failure: BusrepError | None = None
        self.closed = False
        self.tasks = Tasks(self.settings)

    @abc.abstractmethod
    def pump(self) -> None:
        """Start the fetches and the handlers that the core asks for."""

    def another_log(self, epoch: str | None) -> None:
        """Begin again in the log of this epoch, unless that is under way."""
        if self.core.new_epoch is None:
            self.core.new_epoch = epoch
            self.pump()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str, *, once: bool = False) -> None:
        """Run ``work()`` until it returns, or the bus closes; with ``once`` not beside another of that name."""
        self.tasks.spawn(work, name, again=True, once=once)

    # -- stopping ---------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether nothing more is begun."""
        return self.closed or self.failure is not None

    def tell_failure(self, error: BusrepError) -> None:
        """Something has stopped for good: call ``on_failure=``."""
        if (on_failure := self.options.on_failure) is not None:
            self.bus.tasks.spawn(partial(call, on_failure, error), "on_failure")

    def stop(self, key: Key, error: BusrepError) -> None:
        """Stop one (stream, writer) loudly; the others flow."""
        if key not in self.stopped:
            self.tell_failure(error)
        self.stopped[key] = error
        self.note(error, key)
        self.retrying.over(key)
        self.core.progress[key].stop()
        self.interrupt(error, *key)

    def stop_bootstrap(self, stream: str, error: BusrepError) -> None:
        """Stop the bootstrap of a stream loudly; other streams flow."""
        if stream not in self.stopped_bootstraps:
            self.tell_failure(error)
        self.stopped_bootstraps[stream] = error
        self.interrupt(error, stream)

    def fail(self, error: BusrepError) -> None:
        """All reading stops for good."""
        log.error("reading stopped: %s", error)
        if self.failure is None:
            self.tell_failure(error)
        self.failure = error
        self.note(error, *self.saved.at)
        self.interrupt(error)

    def note(self, error: BusrepError | None, *keys: Key) -> None:
        """Store beside the saved positions why these stopped, or that they go on."""
        if self.reader:
            self.notes.update(dict.fromkeys(keys, None if error is None else str(error)))
        if self.notes and not self.closed:
            self.spawn(self.saver.store_notes, "note", once=True)

    def interrupt(self, error: BusrepError, stream: str | None = None, writer: str | None = None) -> None:
        """Tell all who wait for rows of a stream, or of one of its writers, that none come; without one, all."""
        for loop in self.loops:
            if stream is None or stream in loop.streams:
                loop.interrupt(error)
        self.waiters.refuse(
            error, [key for key in self.waiters.awaited if stream in (None, key[0]) and writer in (None, key[1])]
        )

    def wake(self, key: Key) -> None:
        """Wake who waits for what has been handled of a (stream, writer)."""
        if not self.holds(key[0]):
            self.waiters.wake(key, self.core.delivered(*key))

    # -- streams ----------------------------------------------------------------------------------------------

    def followed_as(self, name: str, *, from_now: bool = False) -> Followed:
        """How a stream with a table is followed."""
        foreign = self.options.streams[name].foreign_writers or bool(getattr(self.store, "foreign_writers", False))
        return Followed(name, from_now=from_now, foreign_writers=foreign)

    def holds(self, stream: str) -> bool:
        """Whether nothing of a stream is delivered because its snapshot is not applied yet."""
        return stream in self.core.bootstrapping

    def is_saved(self, key: Key) -> bool:
        """Whether the position of a (stream, writer) is saved."""
        return bool(self.reader) and self.core.progress[key].stream.durable and key[0] not in self.unsaved

    def is_handed_out(self, stream: str) -> bool:
        """Whether rows are taken: where nobody ever asked for them they count as handled, where the last handler left
        they wait for the next."""
        return stream not in self.subscribed or bool(self.subscribed[stream])

    def is_at_work(self, stream: str) -> bool:
        """Whether a handler is at work on rows of a stream, or has to be told of a reset before that."""
        ready = self.core.ready if self.is_handed_out(stream) else ()
        return any(key[0] == stream for key in [*self.workers, *ready])

    def own_counts(self, stream: str) -> bool:
        """Whether the own facts count as handled: not before those that a predecessor left are known, and have been."""
        if stream in self.following and stream not in self.core.followed:
            return False
        return not self.holds(stream) and self.own.count_as_handled(stream)

    def _let_go(self, stream: str) -> None:
        """Whatever stopped or paused a stream's writers: a snapshot comes in place of their rows."""
        for key in [key for key in self.core.progress if key[0] == stream]:
            for noted in (self.stopped, self.oldest.at, self.paused, self.bisecting):
                noted.pop(key, None)

    async def register(self, at: Mapping[Key, int], epoch: str, oldest: Collection[Key] = ()) -> None:
        """Register the reader at these positions of a log. Unavailable where its store keeps another log by now."""
        await self.reader_store.register_reader(self.reader, at, epoch, oldest=oldest, beside_log=self.beside_log)

    async def saved_bootstrap(self, stream: str) -> BootstrapProgress | None:
        """What is saved of the last bootstrap of a stream, by whatever process of this name. Raises Unavailable."""
        saved = await self.reader_store.bootstraps(self.reader) if self.reader else ()
        return next((one for one in saved if one.agreement.stream == stream), None)

    def hold(self, stream: str, known: Sequence[KnownWriter] = ()) -> None:
        """From now on lines of the stream are held, until the snapshot is applied. ``known``: its writers, for nobody
        may be there to announce them."""
        core = self.core
        if stream not in core.followed:
            core.follow(self.followed_as(stream))
        for one in known:
            if (stream, one.writer) not in core.progress:
                core.start_at(stream, one.writer, 0)
        self._let_go(stream)
        core.bootstrap(stream)
        for one in known:
            core.learned(stream, one.writer, one.position)

    def bootstrapped(self, stream: str, positions: Mapping[str, int]) -> None:
        """A snapshot is applied: go on behind it."""
        self.own.bootstrapped(stream)
        self.own.learn_behind_snapshots(self.holds)
        self.core.bootstrapped(stream, positions)
        self.ask_for_positions()
        self.pump()
