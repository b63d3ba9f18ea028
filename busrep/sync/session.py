"""The session of a writer whose threads share it: its bookkeeping under a lock, its name, and what it publishes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from busrep.asyncio.messages import channel_of
from busrep.caches.cache import Caches
from busrep.caches.freshness import Own
from busrep.core.backoff import pause_after
from busrep.core.outgoing import OutgoingFrame
from busrep.errors import CommitsLost, SequenceWentBack, Unavailable, WriterFenced
from busrep.runtime.config import WriterConfig
from busrep.runtime.fact import ReenteredError
from busrep.runtime.open_facts import InDoubt, OpenFacts
from busrep.runtime.own_name import NameWatch, claim_name, win_back
from busrep.runtime.session import WriterSession
from busrep.stores.plans import complete

from .publisher import Publisher
from .threads import Bell, OwnedLock, uninterrupted

log = logging.getLogger("busrep.writer")

T = TypeVar("T")


class SharedSession:
    """The present `WriterSession`, in ``session``, and its name. All methods may be called from any thread.

    ``config.store``: its coroutines wait for nothing. ``caches``: get the invalidations that are committed here.
    ``beats``: threads do what is due. ``on_loss(error)`` is called when another process has taken the name.

    ``lost``: why the name is another process's for good. ``starts``: where the facts of this process begin, however
    often its name is won back. ``settling``: the lock of those who end transactions in doubt. ``doubted`` rings when
    there are facts in doubt, or the name is to be won back.
    """

    def __init__(
        self, config: WriterConfig, caches: Caches, *, beats: bool, on_loss: Callable[[WriterFenced], None]
    ) -> None:
        self.config, self._caches, self.beats, self._on_loss = config, caches, beats, on_loss
        self.name, self.store, self.settings = config.name, config.store, config.settings
        self._cores = OwnedLock()
        self.settling = OwnedLock()
        self._renewing = OwnedLock()
        self._outdone = 0  # the highest incarnation of a predecessor, without a claim
        self._watch = NameWatch(self.settings, since=time.monotonic())
        self.doubted = Bell()
        self.lost: WriterFenced | None = None
        self.session = complete(self._begin())
        self.starts: Mapping[str, int] = {} if self.session.claim is None else self.session.claim.starts

    # -- bookkeeping ------------------------------------------------------------------------------------------

    def guarded(self, session: WriterSession, step: Callable[[], T]) -> T:
        """Do a step of bookkeeping. Whatever matters it writes down before it ends: the return may be interrupted."""
        if self._cores.is_mine:
            raise ReenteredError
        with self._cores:
            try:
                return step()
            except (SequenceWentBack, WriterFenced):  # raised on purpose, with all bookkeeping done
                raise
            except BaseException:
                session.torn = True
                raise

    def ask(self, question: Callable[[WriterSession], T]) -> T:
        """Ask the present session something."""
        session = self.session
        return self.guarded(session, lambda: question(session))

    @property
    def in_the_middle(self) -> bool:
        """Whether this thread is in the middle of bookkeeping: then it is the garbage collector that calls."""
        return self._cores.is_mine or self.settling.is_mine or self._renewing.is_mine

    def commit_sent(self, session: WriterSession, opened: Iterable[OpenFacts]) -> None:
        """COMMIT goes out now, or is the caller's to send: until it is known what became of it, this process does not
        know all invalidations."""
        if session.commits:
            with self._cores:  # one step, which nothing can tear: also in the middle of bookkeeping
                session.commit_sent(opened)

    def own_applied(self, stream: str) -> Own | None:
        """As of when this process has applied all that it committed to a stream of invalidations (`time.monotonic`);
        None if that is not known."""
        with self._cores:
            session = self.session
            if session.ended or self.lost is not None or stream not in session.commits:
                return None
            return Own(self.name, session.incarnation, session.applied_as_of(stream))

    # -- the name ---------------------------------------------------------------------------------------------

    async def _begin(self, again: int | None = None, former: WriterSession | None = None) -> WriterSession:
        claim, incarnation = await claim_name(self.config, again=again, former=former)
        session = WriterSession(self.config, claim, incarnation, listens=self.beats)
        session.on_invalidations = self._caches.committed
        return session

    def live(self) -> WriterSession:
        """The session to write in; the name is won back first if it was finished for silence, or the session is torn.

        Raises WriterFenced when another process has the name, ClaimBlocked, Unavailable.
        """
        if self.lost is not None:
            if isinstance(self.lost, CommitsLost):
                raise self.lost.with_traceback(None)
            raise WriterFenced(self.lost.writer, self.lost.incarnation)  # anew: it holds the frames of who got it
        former = self.session
        if not former.ended:
            return former
        # A claim that was committed, and whose incarnation an interrupt kept from being noted, would pass for another
        # process's: the name would be lost.
        uninterrupted(lambda: self._renew(former))
        return self.live()

    def _renew(self, former: WriterSession) -> None:
        with self._renewing:
            if self.session is not former:
                return
            with self.settling:
                drop_doubts(former)
            try:
                session = complete(win_back(former, self._outdone, partial(self._begin, former=former)))
            except WriterFenced as error:
                self.lose(error)
                raise
            # Before it is trusted: facts were in doubt, or their bookkeeping was interrupted.
            self._caches.drop_all()
            self.session = session

    def lose(self, error: WriterFenced) -> None:
        """Another process has the name, for good."""
        if self.lost is None:
            self.lost = error if isinstance(error, CommitsLost) else WriterFenced(error.writer, error.incarnation)
            self.fence(self.session, error)
            self._caches.drop_all()
            self._on_loss(self.lost)

    def fence(self, session: WriterSession, error: WriterFenced) -> None:
        """Nothing more is written or published under that incarnation."""
        if (error.writer, error.incarnation) == (self.name, session.incarnation):
            self.guarded(session, lambda: session.fence(error))

    def look_at_claim(self, session: WriterSession, error: SequenceWentBack) -> None:
        """A sequence that went back may be a new primary's, which fences all writers: returns when this one is
        fenced, else raises the error."""
        if self.store is None or session.claim is None:
            raise error
        try:
            complete(self.store.check_claim(session.claim))
        except WriterFenced as fenced:
            self.fence(session, fenced)
        else:
            raise error


def drop_doubts(session: WriterSession) -> None:
    """The session has ended: what they committed is in the table, and the next one begins behind it."""
    while session.doubts:
        release(session.doubts.pop())


def release(doubt: InDoubt) -> None:
    """Roll a transaction in doubt back, if it is open still, and not the caller's. One thread at a time."""
    transaction = doubt.transaction
    if transaction is not None and not transaction.joined:
        complete(transaction.rollback())
    doubt.transaction = None


class Publishing:
    """Publishes all that is due, in the order in which the core composed it. May be called from any thread.

    ``stale``: something is to be published, and Redis did not take it.
    """

    def __init__(self, shared: SharedSession, publisher: Publisher) -> None:
        self._shared, self._publisher, self._settings = shared, publisher, shared.settings
        self._failures = 0
        self._retry_at = 0.0
        self.stale = Bell()

    def publish(self, *, now: bool = False) -> bool:
        """Publish what is due. False: Redis is away, or someone else is at it for too long; it goes out later.

        While Redis is away it is tried at a growing pause only, unless ``now``.
        """
        lock = self._publisher.lock
        if lock.is_mine or (not now and self._away()):
            return False
        with lock:  # not for long: whoever has it has deadlines
            return (now or not self._away()) and self._publish_or_note()

    def _away(self) -> bool:
        """Whether Redis is away, as far as known, and it is not the calling thread's turn to look."""
        return bool(self._failures) and (self._shared.beats or time.monotonic() < self._retry_at)

    def _publish_or_note(self) -> bool:
        while True:
            used = self._publisher.connected
            try:
                while self._publish_frames():
                    pass
            except Unavailable as error:
                if used:  # it may have died of being idle; a new one tells
                    continue
                self._failures += 1
                self._retry_at = time.monotonic() + pause_after(self._failures, self._settings)
                log.debug("publishing: %s", error)
                self.stale.ring()
                return False
            self._failures, self._retry_at = 0, 0.0
            return True

    def _publish_frames(self) -> bool:
        """Publish the next frames. False: there are none."""
        session = self._shared.session
        self._publisher.open()
        try:
            ask = partial(session.frames_to_publish, self._publisher.connects, time.monotonic())
            frames: list[OutgoingFrame] = self._shared.guarded(session, lambda: [] if session.torn else ask())
            if not frames:
                return False
            server = self._shared.config.server
            self._publisher.publish(
                [(channel_of(server, frame.channel_suffix), data) for frame in frames for data in frame.messages]
            )
            self._shared.guarded(session, partial(session.published, frames))
        except BaseException:
            # Unknown which arrived: the same frames go out again, byte for byte (9.6).
            self._shared.guarded(session, session.core.publish_failed)
            raise
        return True

    def replicate_received(self) -> None:
        """Somebody asks for the positions."""
        self._shared.ask(lambda session: session.core.replicate_received(time.monotonic()))
        self.stale.ring()

    def tick(self, now: float) -> None:
        """Queue the announcement if it is due."""
        self._shared.ask(lambda session: session.core.tick(now))

    def announce(self) -> float:
        """Publish the announcement, if it is due, and what Redis did not take before. Seconds until the next time."""
        now, heartbeat = time.monotonic(), self._settings.heartbeat
        self.tick(now)
        if self._failures and now < self._retry_at:
            return self._retry_at - now
        if not self.publish(now=True):
            return max(0.0, min(heartbeat, self._retry_at - time.monotonic()))
        return max(0.0, min(1.1 * heartbeat, self._shared.session.core.announcements.next_deadline - time.monotonic()))

    def farewell(self) -> None:
        """Publish what is left, and where this writer ends (9.21)."""
        if self.publish(now=True):
            self._shared.ask(lambda session: session.core.farewell())
            self.publish(now=True)
