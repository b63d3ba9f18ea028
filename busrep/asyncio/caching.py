"""The caches of a bus: feeds the core (busrep.caches) with what the reading half hears and finds out.

What it watches: rows, in the stream's handler; gaps, whenever the reader core has moved; the table, each beat, and
where there is none the announcements; own facts, as they are completed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from busrep.caches.cache import Caches, Feed, Invalidation
from busrep.caches.freshness import HeardProof, TableProof
from busrep.core.backoff import LogLimiter
from busrep.core.catchup import Key
from busrep.core.commands import Name, Position
from busrep.core.delivery import Missed, Reset
from busrep.core.framing import Frame, Rows
from busrep.core.progress import Progress
from busrep.core.states import State
from busrep.errors import BusrepError
from busrep.stores.interface import KnownWriter
from busrep.streams import Stream

from ..runtime.batch import Batch
from ..runtime.cached import add_cached, keep_pruning

if TYPE_CHECKING:
    from .bus import Bus

log = logging.getLogger("busrep.caches")


@attrs.define(eq=False)
class _Watched:
    """A stream of invalidations that is followed: what is proven of it, and where rows are missing.

    ``table``, or, of a stream that has none, ``heard``: what proves it.
    ``gapped``: (stream, writer) -> the position that has to be delivered for the gap to be mended, None if unknown.
    ``live``: those that lost nothing since the link is up.
    """

    feed: Feed
    table: TableProof | None
    heard: HeardProof | None
    gapped: dict[Key, int | None] = attrs.field(factory=dict)
    live: set[Key] = attrs.field(factory=set)

    @property
    def proof(self) -> TableProof | HeardProof:
        """What proves it."""
        found = self.table if self.table is not None else self.heard
        assert found is not None  # noqa: S101 (one of them)
        return found

    def missing(self, key: Key, progress: Progress, *, again: bool) -> None:
        """Rows of this (stream, writer) are known to be missing. ``again``: something was lost since the last look."""
        # A second gap behind the first shows when the lines that were held are looked at: it never ceases to catch up.
        if again or key not in self.gapped:
            self.feed.gap()
        due = max(progress.target, progress.later) if progress.catching_up else None
        before = self.gapped.get(key, due)
        self.gapped[key] = None if due is None or before is None else max(due, before)

    def mend(self, found: Mapping[Key, Progress]) -> bool:
        """Whether rows were missing that have been handled by now, and none are any more."""
        for key, due in list(self.gapped.items()):
            progress = found[key]
            if due is None:  # how far it had been is to be heard first; or, once it has left, is known for good
                final = None if self.table is None else self.table.final(key[1])
                due = progress.position if progress.state is State.LIVE else final
                self.gapped[key] = due
            settled = progress.state is State.LIVE or progress.state is State.UNSYNCED
            if settled and due is not None and progress.queue.delivered >= due:
                del self.gapped[key]
        return not self.gapped

    def lost(self, key: Key, state: State, *, connected: bool) -> bool:
        """A line of this one came: has it lost what the link brought, for want of room or a batch without an end?"""
        if state is State.LIVE:
            self.live.add(key)
        elif state is State.UNSYNCED and key in self.live and connected:
            self.live.discard(key)
            return True
        return False


class CacheUpkeep:
    """The caches of one bus, and their upkeep. All methods are called on the bus's loop, unless they say otherwise."""

    def __init__(self, bus: Bus, caches: Caches | None = None) -> None:
        self._bus, self._reading, self._store = bus, bus.reading, bus.reading.options.store
        self.caches = caches or Caches(bus.streams, bus.settings, clock=time.monotonic, lock=threading.RLock)
        self._watched: dict[str, _Watched] = {}
        self._open = False
        self._connected = False
        self._losses_seen = 0
        self._other_log = False
        self._untold = False
        self._proving: asyncio.TimerHandle | None = None
        self._limiter = LogLimiter()  # of rows that cannot be taken as they are, or a registry that cannot be read
        bus.reading.after_pump = self.look

    # -- life -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The bus is open: begin to follow what caches need, and to prune what this bus writes."""
        self._open = True
        for feed in self.caches.feeds.values():
            if feed.caches:
                self.follow(feed)
        pruned, kept = self.caches.pruned, self._bus.settings.invalidations_kept
        if pruned and self._bus.writing is not None and self._store is not None:
            self._bus.run_in_background(partial(keep_pruning, self._store, pruned, kept), "prune")

    def close(self) -> None:
        """The bus is closing: nothing is kept any more."""
        self._open = False
        for feed in self.caches.feeds.values():
            feed.stop()
        if self._proving is not None:
            self._proving.cancel()
            self._proving = None

    def add(self, function: Callable[..., Any], **options: Any) -> Any:
        """The function with a cache before it. Before the bus is open, from any thread."""
        cached = add_cached(self.caches, function, self.write, **options)
        self.follow(self.caches.feed_of(options["stream"]))
        return cached

    async def write(self, stream: Stream[Invalidation], rows: Sequence[Invalidation]) -> None:
        """Write rows as one fact, if there are any."""
        if rows:
            async with self._bus.write(stream) as fact:
                for row in rows:
                    fact.add(row)

    # -- rows -------------------------------------------------------------------------------------------------

    def follow(self, feed: Feed) -> None:
        """It has a cache: hear what invalidates it, once the bus is open."""
        stream = feed.stream
        if not self._open or stream.name in self._watched:
            return
        settings = self._bus.settings
        silent = settings.heartbeat * settings.silent_after_beats
        if not self._watched:
            self._bus.run_in_background(self._keep_asking, "newest")
        proofs = (None, HeardProof(silent)) if stream.resettable else (TableProof(), None)
        self._watched[stream.name] = _Watched(feed, *proofs)
        feed.link(self._connected)
        reading = self._reading
        reading.handlers.on_notice(Reset, stream.name, self._reset)
        reading.handlers.on_notice(Missed, stream.name, lambda *_: feed.clear())
        reading.subscribe(stream, self._apply)
        reading.follow_stream(stream).add_done_callback(lambda begun: self._begun(feed, begun))

    def _begun(self, feed: Feed, begun: asyncio.Future[None]) -> None:
        if self._open and not begun.cancelled() and self._reading.failure is None:
            feed.follow()
            self.look()

    def _apply(self, batch: Batch[Invalidation]) -> None:
        for complaint in self.caches.feeds[batch.stream.name].apply(batch.rows):
            self._warn("rows", "%s", complaint)

    def _reset(self, stream: str, writer: str, _position: int) -> None:
        watched = self._watched[stream]
        if watched.heard is not None:
            watched.heard.forget(writer)
        watched.feed.clear()

    # -- gaps -------------------------------------------------------------------------------------------------

    def link(self, *, connected: bool) -> None:
        """The link stands, or is lost. That alone loses no row that is known of: the proof gets older. What was lost
        while it did not stand, the first announcements tell."""
        self._connected = connected
        for watched in self._watched.values():
            watched.live.clear()
            watched.feed.link(connected)

    def look(self) -> None:
        """The reader core has moved. Called often: most of the time there is nothing to see."""
        if not self._watched:
            return
        reading, core = self._reading, self._reading.core
        for key in itertools.chain(core.catching_up, reading.stopped):
            if key[0] in self._watched:
                self._missing(key)
        for key in core.ready:
            # Rows are gone for good, or the stream has begun anew: the handlers are told in their turn, the caches now.
            if key[0] in self._watched and core.progress[key].queue.noticed:
                self._watched[key[0]].feed.clear()
        self._look_at_log()
        self._losses_seen = self._losses()
        for watched in self._watched.values():
            if watched.gapped and watched.mend(core.progress) and not self._other_log:
                watched.feed.mended()
            if watched.proof.waiting:
                self._prove_soon()

    def _missing(self, key: Key) -> None:
        again = self._losses() != self._losses_seen
        self._watched[key[0]].missing(key, self._reading.core.progress[key], again=again)

    def _losses(self) -> int:
        counters = self._reading.core.counters
        return counters.gaps_found + counters.overflows + counters.rejected

    def _look_at_log(self) -> None:
        reading = self._reading
        other = reading.core.new_epoch is not None
        for watched in self._watched.values():
            if other and not self._other_log and watched.table is not None:
                watched.table.begin_anew()
                watched.feed.gap()
            if reading.failure is not None and watched.feed.following:
                watched.feed.stop()
        if self._other_log and not other:
            for watched in self._watched.values():
                if not watched.gapped:
                    watched.feed.mended()
        self._other_log = other

    # -- the proof --------------------------------------------------------------------------------------------

    def heard(self, frame: Frame) -> None:
        """One message, after the reader core has taken it in."""
        if not self._watched:
            return
        now = self.caches.clock()
        speaker: Name | None = None
        said: dict[Key, tuple[int, int | None]] = {}
        for item in frame.items:
            if isinstance(item, Name):
                speaker = item
            elif isinstance(item, Position | Rows) and item.stream in self._watched:
                key = (item.stream, item.writer)
                if key not in self._reading.core.progress:  # own, or too many
                    continue
                state = self._reading.core.progress[key].state
                if self._watched[item.stream].lost(key, state, connected=self._connected):
                    self._missing(key)
                if isinstance(item, Position):
                    named = speaker is not None and speaker.instance == item.writer
                    said[key] = item.new, speaker.incarnation if speaker is not None and named else None
                else:
                    said.pop(key, None)  # it was the head of these rows
        for (stream, writer), (position, incarnation) in said.items():
            if (heard := self._watched[stream].heard) is not None:
                heard.announced(writer, incarnation, position, now)
                self._prove_soon()

    def _prove_soon(self) -> None:
        # Not at each step: with a thousand writers that would be a million of them a beat.
        if self._proving is None and self._open:
            loop = asyncio.get_running_loop()
            self._proving = loop.call_later(self._bus.settings.heartbeat / 100, self._prove)

    def _prove(self) -> None:
        self._proving = None
        core = self._reading.core
        for stream, watched in self._watched.items():
            as_of = watched.proof.as_of(partial(core.delivered, stream), self._bus.own_name.applied(stream))
            if as_of is not None:
                watched.feed.prove(as_of)

    async def _keep_asking(self) -> None:
        """Ask the table each beat, and a little more often, for a proof must not end in between."""
        heartbeat, clock = self._bus.settings.heartbeat, self.caches.clock
        while True:
            asked = clock()
            try:
                async with asyncio.timeout(max(2 * heartbeat, 1.0)):
                    await self._ask(asked)
            except (BusrepError, TimeoutError) as error:
                self._warn("table", "caches: the newest rows are not known now: %s", repr(error))
            except Exception:  # a bug, in a store perhaps: else the caches would be of no use for ever
                log.exception("caches: the newest rows are not known now")
            for watched in self._watched.values():
                for writer in () if watched.heard is None else watched.heard.gone(clock()):
                    # No warning: without a table, one that closed in order and one that crashed look the same.
                    log.info("caches: %s is silent; all is dropped, for what it wrote last may be lost", writer)
                    watched.feed.clear()
            self._prove()
            await asyncio.sleep(max(0.0, asked + heartbeat * (0.8 + 0.2 * random.random()) - clock()))

    async def _ask(self, asked: float) -> None:
        store, core = self._store, self._reading.core
        tables = {name: one.table for name, one in self._watched.items() if one.table is not None}
        if store is None or not tables:
            return
        log_read = core.epoch
        known = await store.known(log_read)
        for name, table in tables.items():
            if name in core.followed:
                newest = await store.newest(name)
                if core.epoch != log_read:  # begun again meanwhile
                    break
                self._registered(name, table, [one for one in known if one.stream == name])
                if newest is None:
                    if not self._untold:
                        log.warning("caches: %r cannot tell what was written: little is kept (docs/caches.md)", store)
                    self._untold = True
                elif newest.epoch == core.epoch and core.new_epoch is None:
                    table.looked(asked, newest.rows)
                else:
                    core.doubt(newest.epoch)
        self._reading.pump()

    def _registered(self, stream: str, table: TableProof, known: Sequence[KnownWriter]) -> None:
        core, own = self._reading.core, self._bus.own_name.applied(stream)
        table.registered(known)
        for one in known:
            if own is not None and one.writer == own.writer:
                continue
            # Whoever is not heard, now or ever, is followed through the table: who registered since, who left, and all
            # while the link is down.
            progress = core.progress.get((stream, one.writer))
            if progress is None or (progress.state is State.UNSYNCED and progress.position < one.position):
                core.learned(stream, one.writer, one.position)

    def _warn(self, what: str, text: str, *args: object) -> None:
        if self._limiter.allows(what, self.caches.clock()):
            log.warning(text, *args)
