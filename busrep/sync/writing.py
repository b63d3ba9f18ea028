"""The writing half of a bus for threads: facts in the calling thread, and what is published of them.

The pure cores are those of asyncio (`WriterSession`), under one lock, which is held for bookkeeping alone: never
while a database or Redis is asked something. Publishing has a lock of its own. Whoever ends a transaction publishes
all that is due, in the order in which the core composed it.

A signal handler may raise (KeyboardInterrupt, Celery's time limits) wherever the main thread is. Three rules keep that
from losing or blocking anything:

- Whatever is not known to have been rolled back, or committed and booked, is a fact in doubt: the table tells.
- Bookkeeping that is interrupted half-way leaves a *torn* session. Nothing more is done with it, as after a crash: the
  name is claimed anew, and what was committed is in the table.
- A fact that nobody ends (its thread was lost) is put in doubt when it is garbage.

The garbage collector may end a fact in the middle of anything, too: in a generator that nobody wants any more, in
whatever thread. So all locks here can be taken again by who has them, and tell that this is so; then the fact is put in
doubt, or published by who is publishing already.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from busrep.caches.cache import Caches
from busrep.errors import BusrepError, CommitUnknown, SequenceWentBack, WriterFenced
from busrep.runtime.config import WriterConfig
from busrep.runtime.contents import FactState
from busrep.runtime.fact import SETTLE_FIRST, FactBase, next_look, settle
from busrep.runtime.open_facts import InDoubt
from busrep.runtime.own_name import Hint
from busrep.runtime.session import WriterSession
from busrep.stores.interface import AsyncTransaction
from busrep.stores.plans import complete

from .publisher import Publisher
from .session import Publishing, SharedSession, drop_doubts, release
from .threads import OwnedLock, attempt

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")


class BlockingFact(FactBase[RowT]):
    """As `busrep.Fact`, in threads: ``with bus.write(stream) as fact``."""

    _how = "with"
    _writing: SharedWriter

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._beginning = OwnedLock()

    @property
    def connection(self) -> Any:
        """The driver's connection that the transaction runs on; None for streams without a table. The transaction
        begins, if it has not: see `execute`."""
        self._writing.here(True)
        return None if self._transaction is None else complete(self._begin_late()).hand_out()

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """As `busrep.Fact.execute`, in threads."""
        self._writing.here(True)
        return list(complete(complete(self._begin_late()).execute(sql, params)))

    def ended(self) -> None:
        """Say that the caller's transaction, which this fact had joined, has ended: look now how, and publish.

        Raises nothing: what cannot be found out now is looked at again later. If it goes on in truth, nothing happens.
        """
        if self._session is not None and self._writing.here(False):
            self._writing.ended(self._session, self._joined)

    def __enter__(self) -> BlockingFact[RowT]:
        writing = self._writing
        writing.here(True)
        self._begin_once()
        writing.before_a_fact(self._caller)
        complete(self._begin_live())
        self._state = FactState.OPEN
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing = self._writing
        try:
            self._state = FactState.ENDED
            if not writing.here(error is None):  # forked meanwhile: the transaction is the parent's
                return
            writing.ending.add(self)
            complete(self._finish(error))
        except BaseException:
            if not self._booked and self._session is not None and writing.here(False):
                self._doubt(self._session)  # interrupted before it could begin to end
            raise
        finally:
            if writing.here(False):
                writing.ending.discard(self)

    async def _begin_late(self) -> AsyncTransaction:
        with self._beginning:  # threads of the block's may run statements at the same time
            return await super()._begin_late()

    async def _live(self) -> WriterSession:
        return self._writing.live()

    async def _look_at_claim(self, session: WriterSession, error: SequenceWentBack) -> None:
        self._writing.look_at_claim(session, error)

    def _guarded(self, session: WriterSession, step: Callable[[], object]) -> None:
        self._writing.guarded(session, step)

    def _commit_sent(self, session: WriterSession) -> None:
        self._writing.commit_sent(session, self._opened.values())

    def _leaves_doubt(self, error: BaseException) -> bool:
        # What is not busrep's may be an interrupt: before COMMIT was sent, or after it was answered.
        return isinstance(error, CommitUnknown) or not isinstance(error, BusrepError)

    def _owner(self) -> str:
        return threading.current_thread().name

    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        self._writing.fence(session, error)

    def _publish(self) -> None:
        self._writing.publishing.publish()

    def _doubted(self, doubt: InDoubt) -> None:
        self._writing.in_doubt(doubt)

    def __del__(self) -> None:
        # Whatever thread this is, it may hold any lock: nothing but an append.
        session = getattr(self, "_session", None)
        if session is not None and not self._booked and self._writing.here(False):
            session.doubts.append(self._in_doubt())


class SharedWriter(SharedSession):
    """One process's writer. All methods may be called from any thread. See `SharedSession` for the other arguments.

    ``here(raising)``: whether this is the process that opened the bus; raises ConfigError if told so. ``ending``: the
    facts that are being ended, for `close` to wait for; one whose thread was interrupted leaves as garbage.
    """

    def __init__(
        self,
        config: WriterConfig,
        caches: Caches,
        publisher: Publisher,
        *,
        beats: bool,
        here: Callable[[bool], bool],
        on_loss: Callable[[WriterFenced], None],
    ) -> None:
        super().__init__(config, caches, beats=beats, on_loss=on_loss)
        self.here = here
        self.publishing = Publishing(self, publisher)
        self.ending: weakref.WeakSet[BlockingFact[Any]] = weakref.WeakSet()
        self._beat_at = time.monotonic() + self.settings.heartbeat
        self._settle_pause: float | None = None
        self._left = 0  # in doubt when that was looked at last

    # -- facts in doubt ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Ask after every fact in doubt once, now. Raises WriterFenced, Unavailable, or what else kept one unknown."""
        try:
            self._ask_after_all()
        except WriterFenced:
            self.live()  # perhaps it was finished for its silence alone: then all is in the table
        self.publishing.publish()  # another thread may have asked just before, and not have published yet

    def _ask_after_all(self) -> None:
        trouble: Exception | None = None
        session = self.session
        if not session.doubts or self.in_the_middle:
            return
        with self.settling:
            for doubt in {one.marker: one for one in session.doubts}.values():  # a question for each transaction
                if session.ended:
                    drop_doubts(session)
                    break
                try:
                    self.settle_one(session, *session.ended_with(doubt))
                except WriterFenced as error:
                    self.fence(session, error)
                    trouble = error
                except Exception as error:  # the others may have ended all the same
                    trouble = error
        self.publishing.publish()
        if trouble is not None:
            raise trouble

    def settle_one(self, session: WriterSession, *doubts: InDoubt) -> None:
        """Ask what became of one transaction; ``doubts``: what it left, with one marker. With the lock ``settling``."""
        for doubt in doubts:
            release(doubt)
        complete(settle(session, doubts, partial(self.guarded, session)))

    def ended(self, session: WriterSession, doubt: InDoubt | None) -> None:
        """The caller says that this transaction has ended. Nothing is raised into what comes after its COMMIT."""
        if self.in_the_middle:
            return  # what is in doubt is asked after later
        try:
            with self.settling:
                if doubt is not None and not session.ended and (same := session.ended_with(doubt)):
                    self.settle_one(session, *same)
            self.publishing.publish()
        except WriterFenced as error:
            self.fence(session, error)
        except Exception as error:  # of whatever kind: it is committed, and is asked after again
            log.warning("the outcome of a transaction is not known yet: %s", error)
        self._win_back()  # now: in a transaction of the caller's on SQLite the name cannot be won back

    def in_doubt(self, doubt: InDoubt) -> None:
        """The end of this fact's transaction is not known. Let it hold nothing up, and have the table asked."""
        # The garbage collector may call, and who settles may wait for a lock that this thread has: so the thread that
        # asks ends it. Without one, the next fact does, or `settle`.
        if not self.beats and not self._cores.is_mine and self._end_own(doubt):
            attempt(self._ask_after_all)  # what is committed behind it waits for the answer
        self.doubted.ring()

    def _end_own(self, doubt: InDoubt) -> bool:
        """Roll the transaction of a fact in doubt back if it is open still. False: it is the caller's, or has ended."""
        if doubt.transaction is None or doubt.transaction.joined:
            return False
        with self.settling:
            release(doubt)
        return True

    # -- what has to be done now and then ---------------------------------------------------------------------

    def _win_back(self) -> None:
        if self.session.ended and self.lost is None:
            attempt(self.live)

    def beat(self) -> None:
        """Store the proven positions and, the claim being ours still, follow the others. Raises Unavailable,
        WriterFenced."""
        session = self.session
        if session.ended or session.claim is None or self.store is None:
            return
        beat = self.guarded(session, session.beat_begins)
        try:
            registry = complete(self.store.heartbeat(session.claim, beat.positions, registry=beat.whole))
        except WriterFenced as error:
            self.fence(session, error)
            raise
        self.guarded(session, lambda: session.beat_stored(beat, registry))

    def before_a_fact(self, connection: Any = None) -> None:
        """Without a thread that does so: do first what is overdue.

        ``connection``: the caller's. Beside a transaction on SQLite's nothing can be written: that waits.
        """
        for doubt in list(self.session.doubts):
            self._end_own(doubt)  # of a fact that nobody ended: it may hold what this one needs
        if self.beats:
            return
        if not getattr(connection, "in_transaction", False):
            self._beat_if_due()
            if self.session.doubts:
                attempt(self._ask_after_all)
        self.publishing.tick(time.monotonic())

    def _beat_if_due(self) -> bool:
        now = time.monotonic()
        due = now >= self._beat_at
        if due:
            self._beat_at = now + self.settings.heartbeat
            attempt(self.beat)
        return due

    def keep_beating(self) -> float:
        """Store the positions, if it is due. Seconds until the next time."""
        if self._beat_if_due():
            for stuck in self.stuck():
                log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
        self._win_back()
        return max(0.0, self._beat_at - time.monotonic())

    def look(self) -> float:
        """Ask after the facts in doubt. Seconds until the next time."""
        session = self.session
        if session.doubts:
            time.sleep(SETTLE_FIRST)  # what comes meanwhile is asked after as well
        before = len(session.doubts)
        pause = self._settle_pause if before == self._left else None
        if before:
            attempt(self._ask_after_all)
        self._win_back()
        self._left = len(session.doubts)
        self._settle_pause = next_look(pause, before, self._left)
        return self._settle_pause or self.settings.heartbeat  # a fact that is garbage rings no bell

    def heard_name(self, incarnation: int, *, has_log: bool) -> None:
        """The own name was heard; see `NameWatch.heard`."""
        session = self.session
        if self.lost is not None:
            return
        hint = self._watch.heard(session, incarnation, time.monotonic(), has_log=has_log)
        error = WriterFenced(self.name, session.incarnation)
        if hint is Hint.ASK:
            threading.Thread(target=self._check_claim, name="busrep-claim", daemon=True).start()
        elif hint is Hint.OUTDONE:
            self._outdone = max(self._outdone, incarnation)
            self.fence(session, error)
            self.doubted.ring()  # who looks after the name goes on with it
        elif hint is Hint.LOST:
            self.lose(error)

    def _check_claim(self) -> None:
        attempt(self.beat)
        self._win_back()

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Wait for transactions that are being ended, publish and store where this writer is, and finish its name."""
        until, self.beats = time.monotonic() + timeout, False  # their threads have ended
        while self.ending and time.monotonic() < until:
            time.sleep(0.01)
        attempt(self._ask_after_all)
        self.publishing.farewell()
        attempt(self._leave)

    def _leave(self) -> None:
        """See `busrep.asyncio.writing.Writing.leave`."""
        self.beat()
        session = self.session
        if self.store is None or session.claim is None or session.ended:
            return
        if not self.guarded(session, lambda: session.unfinished):
            work = self.store.finish(self.name, session.incarnation, timeout=self.settings.heartbeat)
            log.info("writer %s left at %s", self.name, dict(complete(work)))

    # -- what others ask --------------------------------------------------------------------------------------

    def positions(self) -> dict[str, int]:
        """Stream -> the position up to which Redis confirmed its frames."""
        return self.ask(lambda session: session.core.positions())

    def written(self, stream: str) -> tuple[int, bool] | None:
        """See `WriterSession.written`."""
        return self.ask(lambda session: session.written(stream))

    def is_successors(self, stream: str, token: int) -> bool:
        """Whether a fact under the own name is another process's, or may be: see `WriterSession`."""
        return self.lost is not None or self.ask(lambda session: session.is_successors(stream, token))

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {**self.ask(WriterSession.statistics), "lost": self.lost is not None}

    def stuck(self) -> list[dict[str, Any]]:
        """Facts open for longer than ``stuck_after``, JSON-able."""
        return self.ask(lambda session: session.stuck(time.monotonic()))
