"""The session of a writer whose threads share it: its bookkeeping under a lock, and its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import attrs

from busrep.errors import BusrepError, CommitsLost, SequenceWentBack, WriterFenced
from busrep.runtime.config import WriterConfig
from busrep.runtime.fact import ReenteredError
from busrep.runtime.own_name import Hint, NameWatch, claim_name, give_up_streams, win_back
from busrep.runtime.session import InDoubt, OpenFacts, WriterSession
from busrep.stores.plans import complete

from .threads import Bell, OwnedLock, uninterrupted

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class WriterCallbacks:
    """``on_loss()`` is called when another process has taken the name. ``on_invalidations``: of `WriterSession`.
    ``on_unknown()`` drops whatever such rows may have invalidated, where it is not known which were committed."""

    on_loss: Callable[[], None] = lambda: None
    on_invalidations: Callable[[str, Sequence[bytes]], object] = lambda _stream, _payloads: None
    on_unknown: Callable[[], None] = lambda: None


class SharedSession:
    """The present `WriterSession`, in ``session``, and its name. All methods may be called from any thread.

    ``config.store``: its coroutines wait for nothing. ``beats``: threads do what is due.

    ``lost``: why the name is another process's for good. ``starts``: where the facts of this process begin, however
    often its name is won back. ``settling``: the lock of those who end transactions in doubt.
    """

    def __init__(self, config: WriterConfig, callbacks: WriterCallbacks, *, beats: bool) -> None:
        self.config, self._callbacks, self.beats = config, callbacks, beats
        self.name, self.store, self.settings = config.name, config.store, config.settings
        self.durable = config.durable
        self._cores = OwnedLock()
        self.settling = OwnedLock()
        self._renewing = OwnedLock()
        self._outdone = 0  # the highest incarnation of a predecessor, without a claim
        self._watch = NameWatch(self.settings, since=time.monotonic())
        self.doubted = Bell()  # there are facts in doubt, or the name is to be won back
        self.lost: WriterFenced | None = None
        if self.store is not None:
            complete(give_up_streams(self.store, self.name, self.durable, self.settings))
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
            except (BusrepError, ValueError):
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

    def freshness(self, stream: str) -> tuple[int, float] | None:
        """As of when this process has applied all that it committed to a stream of invalidations (`time.monotonic`),
        behind the incarnation of its name; None if that is not known."""
        with self._cores:
            session = self.session
            if session.ended or self.lost is not None or stream not in session.commits:
                return None
            return session.incarnation, session.applied_as_of(stream)

    # -- the name ---------------------------------------------------------------------------------------------

    async def _begin(self, again: int | None = None, former: WriterSession | None = None) -> WriterSession:
        claim, incarnation = await claim_name(self.config, again=again, former=former)
        session = WriterSession(self.config, claim, incarnation, listens=self.beats)
        session.on_invalidations = self._callbacks.on_invalidations
        return session

    @property
    def to_renew(self) -> bool:
        """Whether the session has ended, and the name may be won back."""
        return self.session.ended and self.lost is None

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
            self._callbacks.on_unknown()
            self.session = session

    def lose(self, error: WriterFenced) -> None:
        """Another process has the name, for good."""
        if self.lost is None:
            self.lost = error if isinstance(error, CommitsLost) else WriterFenced(error.writer, error.incarnation)
            self.fence(self.session, error)
            self._callbacks.on_unknown()
            self._callbacks.on_loss()

    def fence(self, session: WriterSession, error: WriterFenced) -> None:
        """Nothing more is written or published under that incarnation."""
        if (error.writer, error.incarnation) == (self.name, session.incarnation):
            self.guarded(session, lambda: session.fence(error))

    def heard(self, incarnation: int, *, has_log: bool) -> Hint:
        """The own name was heard; see `NameWatch.heard`. Gives what is left to do: to ask whether the claim stands."""
        session = self.session
        if self.lost is not None:
            return Hint.NOTHING
        hint = self._watch.heard(session, incarnation, time.monotonic(), has_log=has_log)
        error = WriterFenced(self.name, session.incarnation)
        if hint is Hint.OUTDONE:
            self._outdone = max(self._outdone, incarnation)
            self.fence(session, error)
            self.doubted.ring()  # who looks after the name goes on with it
        elif hint is Hint.LOST:
            self.lose(error)
        return hint

    def epoch_changed(self, epoch: str) -> None:
        """The log is another one: what was written here is of the one before, whose names nobody wins back."""
        session = self.session
        if session.epoch not in (None, epoch):
            self.lose(WriterFenced(self.name, session.incarnation))

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
