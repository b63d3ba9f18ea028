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
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from busrep.asyncio.writing import SETTLE_FIRST, SETTLE_SLOWEST
from busrep.errors import BusrepError, CommitUnknown, SequenceWentBack, WriterFenced
from busrep.runtime.config import WriterConfig
from busrep.runtime.fact import FactBase, FactState, settle
from busrep.runtime.own_name import Hint
from busrep.runtime.session import InDoubt, WriterSession
from busrep.stores.plans import complete
from busrep.streams import Stream

from .publisher import Publisher
from .publishing import Publishing
from .session import SharedSession, WriterCallbacks, drop_doubts, release
from .threads import attempt

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")


class BlockingFact(FactBase[RowT]):
    """One transaction in the making: ``with bus.write(stream) as fact``.

    ``id`` is the fact's ID in the (first) stream, ``ids`` {stream name: ID}. On leaving the block the rows are
    inserted, the transaction commits, and the fact is published; an exception rolls it back. In a transaction
    that the caller had begun on the connection already, the caller commits, and the fact is published when that
    is seen to have happened (``bus.settle()`` looks at once).
    """

    _how = "with"

    def __init__(
        self, writing: SharedWriter, streams: Sequence[Stream[Any]], connection: Any = None, count: int = 1
    ) -> None:
        super().__init__(streams, connection, count)
        self._writing = writing

    @property
    def connection(self) -> Any:
        """The driver's connection that the transaction runs on; None for streams without a table."""
        self._writing.here()
        return None if self._transaction is None else self._transaction.hand_out()

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of the caller's in the fact's transaction, in the driver's placeholder style.
        Raises the driver's own errors of it, and ConfigError outside the block."""
        transaction = self._open_transaction()
        self._writing.here()
        return list(complete(transaction.execute(sql, params)))

    def ended(self) -> None:
        """Say that the caller's transaction, which this fact had joined, has ended: look now how, and publish.

        Raises nothing: what cannot be found out now is looked at again later. If it goes on in truth, nothing happens.
        """
        if self._session is not None and self._writing.here(raising=False):
            self._writing.ended(self._session, self._joined)

    def __enter__(self) -> BlockingFact[RowT]:
        writing = self._writing
        writing.here()
        self._begin_once()
        writing.before_a_fact(self._caller)
        session = writing.shared.live()
        try:
            complete(self._begin(session))
        except WriterFenced:
            if self._transaction is not None and self._transaction.reserves:
                raise  # the caller has SQLite's write lock: `ended` wins the name back, if it can be
            # Perhaps for its silence, with nobody after it: then the name is won back. Else this raises.
            complete(self._begin(writing.shared.live()))
        except SequenceWentBack as error:
            writing.shared.look_at_claim(session, error)
            complete(self._begin(writing.shared.live()))
        self._state = FactState.OPEN
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing = self._writing
        try:
            self._state = FactState.ENDED
            if not writing.here(raising=error is None):  # forked meanwhile: the transaction is the parent's
                return
            writing.ending.add(self)
            if self._session is not None:
                complete(self._end(self._session, error))
        except BaseException:
            if not self._booked and self._session is not None and writing.here(raising=False):
                self._doubt(self._session)  # interrupted before it could begin to end
            raise
        finally:
            if writing.pid == os.getpid():
                writing.ending.discard(self)

    def _guarded(self, session: WriterSession, step: Callable[[], object]) -> None:
        self._writing.shared.guarded(session, step)

    def _commit_sent(self, session: WriterSession) -> None:
        self._writing.shared.commit_sent(session, self._opened.values())

    def _leaves_doubt(self, error: BaseException) -> bool:
        # What is not busrep's may be an interrupt: before COMMIT was sent, or after it was answered.
        return isinstance(error, CommitUnknown) or not isinstance(error, BusrepError)

    def _owner(self) -> str:
        return threading.current_thread().name

    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        self._writing.shared.fence(session, error)

    def _publish(self) -> None:
        self._writing.publish()

    def _doubted(self, doubt: InDoubt) -> None:
        self._writing.in_doubt(doubt)

    def __del__(self) -> None:
        # Whatever thread this is, it may hold any lock: nothing but an append.
        session = getattr(self, "_session", None)
        if session is not None and not self._booked and self._writing.pid == os.getpid():
            session.doubts.append(self._in_doubt())


class _Ending(weakref.WeakSet["BlockingFact[Any]"]):
    """The facts that are being ended, for close() to wait for; one whose thread was interrupted leaves as garbage."""

    def wait(self, timeout: float) -> None:
        """Wait until there are none."""
        until = time.monotonic() + timeout
        while self and time.monotonic() < until:
            time.sleep(0.01)


class SharedWriter:
    """One process's writer. All methods may be called from any thread. See `SharedSession` for the arguments.

    ``shared``: its session and name; ``publishing``: what goes out; ``ending``: the facts that are being ended.
    """

    def __init__(
        self,
        config: WriterConfig,
        callbacks: WriterCallbacks,
        *,
        publisher: Publisher,
        beats: bool,
        here: Callable[[bool], bool],
    ) -> None:
        self.pid, self._here, self._settings = os.getpid(), here, config.settings
        self.shared = SharedSession(config, callbacks, beats=beats)
        self.publishing = Publishing(self.shared, publisher)
        self.ending = _Ending()
        self._beat_at = time.monotonic() + self._settings.heartbeat
        self._settle_pause = SETTLE_FIRST

    def here(self, raising: bool = True) -> bool:
        """Whether this is the process that opened the bus. Raises ConfigError unless told not to."""
        return self._here(raising)

    def publish(self) -> None:
        """Publish what a fact left."""
        self.publishing.publish()

    # -- facts in doubt ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Ask after every fact in doubt once, now. Raises WriterFenced, Unavailable, or what else kept one unknown."""
        try:
            self._ask_after_all()
        except WriterFenced:
            self.shared.live()  # perhaps it was finished for its silence alone: then all is in the table
        self.publishing.publish()  # another thread may have asked just before, and not have published yet

    def _ask_after_all(self) -> None:
        trouble: Exception | None = None
        session = self.shared.session
        if not session.doubts or self.shared.in_the_middle:
            return
        with self.shared.settling:
            for doubt in list(session.doubts):
                if session.ended:
                    drop_doubts(session)
                    break
                try:
                    self.settle_one(session, doubt)
                except WriterFenced as error:
                    self.shared.fence(session, error)
                    trouble = error
                except Exception as error:  # the others may have ended all the same
                    trouble = error
        self.publish()
        if trouble is not None:
            raise trouble

    def settle_one(self, session: WriterSession, *doubts: InDoubt) -> None:
        """Ask what became of one transaction; ``doubts``: what it left, with one marker. With the lock ``settling``."""
        for doubt in doubts:
            release(doubt)
        complete(settle(session, doubts, partial(self.shared.guarded, session)))

    def ended(self, session: WriterSession, doubt: InDoubt | None) -> None:
        """The caller says that this transaction has ended. Nothing is raised into what comes after its COMMIT."""
        if self.shared.in_the_middle:
            return  # what is in doubt is asked after later
        try:
            with self.shared.settling:
                if doubt is not None and not session.ended and (same := session.ended_with(doubt)):
                    self.settle_one(session, *same)
            self.publish()
        except WriterFenced as error:
            self.shared.fence(session, error)
        except Exception as error:  # of whatever kind: it is committed, and is asked after again
            log.warning("the outcome of a transaction is not known yet: %s", error)
        self._win_back()  # now: in a transaction of the caller's on SQLite the name cannot be won back

    def in_doubt(self, doubt: InDoubt) -> None:
        """The end of this fact's transaction is not known. Let it hold nothing up, and have the table asked."""
        if self._end_own(doubt) and not self.shared.beats:  # what is committed behind it waits for the answer
            attempt(self._ask_after_all)
        self.shared.doubted.ring()

    def _end_own(self, doubt: InDoubt) -> bool:
        """Roll the transaction of a fact in doubt back if it is open still. False: it is the caller's, or has ended."""
        if doubt.transaction is None or doubt.transaction.joined:
            return False
        with self.shared.settling:
            release(doubt)
        return True

    # -- what has to be done now and then ---------------------------------------------------------------------

    def _win_back(self) -> None:
        if self.shared.to_renew:
            attempt(self.shared.live)

    def beat(self) -> None:
        """Store the proven positions and, the claim being ours still, follow the others. Raises Unavailable,
        WriterFenced."""
        shared, session = self.shared, self.shared.session
        if not shared.durable or session.ended or session.claim is None or shared.store is None:
            return
        noted, positions = shared.guarded(session, session.noted)
        try:
            registry = complete(shared.store.heartbeat(session.claim, positions))
        except WriterFenced as error:
            shared.fence(session, error)
            raise
        shared.guarded(session, lambda: session.others.registry_read(noted, registry))

    def before_a_fact(self, connection: Any = None) -> None:
        """Without a thread that does so: do first what is overdue.

        ``connection``: the caller's. Beside a transaction on SQLite's nothing can be written: that waits.
        """
        for doubt in list(self.shared.session.doubts):
            self._end_own(doubt)  # of a fact that nobody ended: it may hold what this one needs
        if self.shared.beats:
            return
        if not getattr(connection, "in_transaction", False):
            self._beat_if_due()
        if self.shared.session.doubts:
            attempt(self._ask_after_all)
        self.publishing.tick(time.monotonic())

    def _beat_if_due(self) -> bool:
        now = time.monotonic()
        due = now >= self._beat_at
        if due:
            self._beat_at = now + self._settings.heartbeat
            attempt(self.beat)
        return due

    def look(self) -> float:
        """Store the positions, if it is due, and ask after the facts in doubt. Seconds until the next time."""
        if self._beat_if_due():
            for stuck in self.stuck():
                log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
        session = self.shared.session
        before = len(session.doubts)
        if before:
            attempt(self._ask_after_all)
        self._win_back()
        if not session.doubts:
            self._settle_pause = SETTLE_FIRST
            return max(0.0, self._beat_at - time.monotonic())
        fewer = len(session.doubts) < before
        self._settle_pause = SETTLE_FIRST if fewer else min(2 * self._settle_pause, SETTLE_SLOWEST)
        return self._settle_pause

    def heard_name(self, incarnation: int, *, has_log: bool) -> None:
        """Another process speaks under this name, or this one: see `SharedSession.heard`."""
        if self.shared.heard(incarnation, has_log=has_log) is Hint.ASK:
            threading.Thread(target=self._check_claim, name="busrep-claim", daemon=True).start()

    def _check_claim(self) -> None:
        attempt(self.beat)
        self._win_back()

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Wait for transactions that are being ended, publish and store where this writer is, and finish its name."""
        self.ending.wait(timeout)
        attempt(self._ask_after_all)
        self.publishing.farewell()
        attempt(self._leave)

    def _leave(self) -> None:
        """See `busrep.asyncio.writing.Writing.leave`."""
        self.beat()
        shared, session = self.shared, self.shared.session
        if shared.store is None or session.claim is None or session.ended:
            return
        if not shared.guarded(session, lambda: session.unfinished):
            work = shared.store.finish(shared.name, session.incarnation, timeout=self._settings.heartbeat)
            log.info("writer %s left at %s", shared.name, dict(complete(work)))

    # -- what others ask --------------------------------------------------------------------------------------

    def positions(self) -> dict[str, int]:
        """Stream -> the position up to which Redis confirmed its frames."""
        return self.shared.ask(lambda session: session.core.positions())

    def written(self, stream: str) -> tuple[int, bool] | None:
        """See `WriterSession.written`."""
        return self.shared.ask(lambda session: session.written(stream))

    def is_successors(self, stream: str, token: int) -> bool:
        """Whether a fact under the own name is another process's, or may be: see `WriterSession`."""
        return self.shared.lost is not None or self.shared.ask(lambda session: session.is_successors(stream, token))

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {**self.shared.ask(WriterSession.statistics), "lost": self.shared.lost is not None}

    def stuck(self) -> list[dict[str, Any]]:
        """Facts open for longer than ``stuck_after``, JSON-able."""
        return self.shared.ask(lambda session: session.stuck(time.monotonic()))
