"""The writing half of a bus for threads: facts in the calling thread, and what is published of them.

The pure cores are those of asyncio (`WriterSession`), under one lock, which is held for bookkeeping alone: never
while a database or Redis is asked something. Publishing has a lock of its own. Whoever ends a transaction publishes
all that is due, in the order in which the core composed it.

A signal handler may raise (KeyboardInterrupt, Celery's time limits) wherever the main thread is. Three rules keep that
from losing or blocking anything:

- Whatever is not known to have been rolled back, or committed and booked, is a fact in doubt: the table tells (9.1).
- Bookkeeping that is interrupted half-way leaves a *torn* session. Nothing more is done with it, as after a crash: the
  name is claimed anew, and what was committed is in the table.
- A fact that nobody ends (its thread was lost) is put in doubt when it is garbage.

The garbage collector may end a fact in the middle of anything, too: in a generator that nobody wants any more, in
whatever thread. So all locks here can be taken again by who has them, and tell that this is so; then the fact is put in
doubt, or published by who is publishing already.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import attrs

from busrep.asyncio.writing import (
    SETTLE_FIRST,
    SETTLE_SLOWEST,
    FactBase,
    FactState,
    InDoubt,
    OpenFacts,
    WinningBack,
    WriterSession,
)
from busrep.core.backoff import pause_after
from busrep.core.ids import ReservedIds
from busrep.errors import BusrepError, CommitsLost, ConfigError, NotAWriter, SequenceWentBack, Unavailable, WriterFenced
from busrep.settings import Settings
from busrep.stores.blocking import BlockingStore, BlockingTransaction
from busrep.stores.interface import Claim
from busrep.streams import Registry, Stream

from .publisher import Publisher

log = logging.getLogger("busrep.writer")

T = TypeVar("T")
RowT = TypeVar("RowT")


class _ReenteredError(Exception):
    """This thread is in the middle of bookkeeping already."""


class Bell:
    """A `threading.Event` that may be set in the middle of anything, its own methods included."""

    def __init__(self) -> None:
        # Entered itself, not its condition: that is done in Python, where an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._rung = False

    def set(self) -> None:
        """Wake who waits, now or next."""
        with self._lock:
            self._rung = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget it."""
        with self._lock:
            self._rung = False

    def wait(self, timeout: float) -> None:
        """Wait until it is set, or for so many seconds."""
        with self._lock:
            if not self._rung:
                self._changed.wait(timeout)


@attrs.define(eq=False)
class _Doubt(InDoubt):
    """A transaction whose end is not known. ``transaction``: it may be open, and then holds a connection, and locks."""

    transaction: BlockingTransaction | None = None

    def end(self) -> None:
        """Roll it back if it is open still, and not the caller's. One thread at a time."""
        transaction = self.transaction
        if transaction is not None and not transaction.joined:
            transaction.rollback()
        self.transaction = None


class Session(WriterSession):
    """What this process knows under one incarnation of its name. ``torn``: interrupted half-way, not to be used."""

    def __init__(
        self,
        name: str,
        server: str,
        streams: Registry,
        settings: Settings,
        *,
        claim: Claim | None,
        incarnation: int,
        listens: bool,
    ) -> None:
        super().__init__(name, server, streams, settings, claim=claim, incarnation=incarnation, listens=listens)
        self.claim = claim
        self.torn = False
        self.promised: list[OpenFacts] = []  # with IDs that are given back if their transaction is rolled back

    def redeem(self, one: OpenFacts) -> None:
        """The transaction that gave the IDs has ended: with rows they are its own, else they are nobody's yet."""
        if one.ticket is None:
            return
        generator, ticket, one.ticket = self.generators[one.stream.name], one.ticket, None
        self.promised.remove(one)
        if one.each is None and not any(one.payloads.values()):
            one.ids = ReservedIds()
            generator.give_up(ticket)
            return
        try:
            generator.answer(ticket, one.ids)
        except BusrepError:
            self.torn = True  # its rows are committed: whoever claims the name next finds them in the table
            raise

    def given_again(self, stream: str, ids: Sequence[int]) -> None:
        """The sequence gave these: who was promised one of them before was rolled back."""
        for one in [one for one in self.promised if one.stream.name == stream and not {*ids}.isdisjoint(one.ids)]:
            one.forget()
            self.redeem(one)

    @property
    def ended(self) -> bool:
        """Whether nothing more may be done under this incarnation."""
        return self.torn or self.fenced is not None


class Fact(FactBase[RowT]):
    """One transaction in the making: ``with bus.write(stream) as fact``.

    ``id`` is the fact's ID in the (first) stream, ``ids`` {stream name: ID}. On leaving the block the rows are
    inserted, the transaction commits, and the fact is published; an exception rolls it back. In a transaction
    that the caller had begun on the connection already, the caller commits, and the fact is published when that
    is seen to have happened (``bus.settle()`` looks at once).
    """

    _how = "with"

    def __init__(
        self, writing: Writing, streams: Sequence[Stream[Any]], connection: Any = None, count: int = 1
    ) -> None:
        super().__init__(streams, count)
        self._writing = writing
        self._caller = connection
        self._session: Session | None = None
        self._transaction: BlockingTransaction | None = None
        self._booked = True  # nothing is open, or whoever settles facts in doubt knows of it
        self._joined: _Doubt | None = None  # what is left of it in the caller's transaction

    @property
    def connection(self) -> Any:
        """The driver's connection that the transaction runs on; None for streams without a table."""
        self._writing.here()
        return None if self._transaction is None else self._transaction.hand_out()

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of the caller's in the fact's transaction, in the driver's placeholder style.
        Raises the driver's own errors of it, and ConfigError outside the block."""
        self._check_in_block()
        if self._transaction is None:
            raise ConfigError("this fact has no transaction: its streams are kept in memory only")
        self._writing.here()
        return list(self._transaction.execute(sql, params))

    def ended(self) -> None:
        """Say that the caller's transaction, which this fact had joined, has ended: look now how, and publish.

        Raises nothing: what cannot be found out now is looked at again later. If it goes on in truth, nothing happens.
        """
        if self._session is not None and self._writing.here(raising=False):
            self._writing.ended(self._session, self._joined)

    def __enter__(self) -> Fact[RowT]:
        writing = self._writing
        writing.here()
        self._begin_once()
        writing.before_a_fact(self._caller)
        session = writing.live()
        try:
            self._begin(session)
        except WriterFenced:
            if self._transaction is not None and self._transaction.reserves:
                raise  # the caller has SQLite's write lock: `ended` wins the name back, if it can be
            # Perhaps for its silence, with nobody after it: then the name is won back. Else this raises.
            self._begin(writing.live())
        except SequenceWentBack as error:
            writing.look_at_claim(session, error)
            self._begin(writing.live())
        self._state = FactState.OPEN
        return self

    def _begin(self, session: Session) -> None:
        writing = self._writing
        self._session, self._generators, self._opened = session, session.generators, {}
        self._booked = False
        try:
            if any(not stream.resettable for stream in self._streams):
                self._transaction = writing.transaction(session, self._caller)
            for stream in self._streams:
                writing.reserve(session, stream, self._count, self._opened, self._transaction)
            if self._transaction is not None:
                self._transaction.begin()
        except BaseException as error:
            self._not_claimed()
            self._end(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing = self._writing
        try:
            self._state = FactState.ENDED
            if not writing.here(raising=error is None):  # forked meanwhile: the transaction is the parent's
                return
            writing.ending.add(self)
            self._end(error)
        except BaseException:
            if not self._booked and self._session is not None and writing.here(raising=False):
                self._doubt(self._session)  # interrupted before it could begin to end
            raise
        finally:
            if writing.pid == os.getpid():
                writing.ending.discard(self)

    def _end(self, error: BaseException | None) -> None:
        session = self._session
        assert session is not None  # noqa: S101 (it has begun)
        try:
            if isinstance(error, WriterFenced):
                self._writing.fence(session, error)
            if error is not None:
                self._roll_back(session)
            else:
                self._commit(session)
        except BaseException:
            if not self._booked:
                self._doubt(session)
            raise

    def _roll_back(self, session: Session) -> None:
        transaction = self._transaction
        if transaction is not None:
            known = transaction.rollback()
            # The caller may yet commit, or have committed: rows the application inserted under this ID would be facts.
            if not known or (transaction.joined and transaction.marker is not None):
                self._doubt(session)
                if not transaction.joined:
                    self._writing.settle_without_beats()
                return
        for opened in self._opened.values():
            opened.forget()
        self._complete(session)

    def _commit(self, session: Session) -> None:
        transaction = self._transaction
        if transaction is not None:
            try:
                for opened in self._opened.values():
                    if not opened.stream.resettable and (facts := opened.to_insert()):
                        transaction.insert(opened.stream.name, facts)
                self._writing.commit_sent(session, self._opened.values())
                transaction.commit()
            except BaseException as error:
                if transaction.in_doubt:  # the table will tell
                    self._doubt(session)
                else:
                    self._end(error)
                raise
            if transaction.joined:
                self._doubt(session)
                return
        self._complete(session)

    def _complete(self, session: Session) -> None:
        try:
            taken = self._writing.completed(session, list(self._opened.values()), self._book)
        except _ReenteredError:
            self._doubt(session)
            return
        if not taken:
            self._tell_what_is_gone()
        self._writing.publish()

    def _book(self) -> None:
        self._booked = True

    def _doubt(self, session: Session) -> None:
        self._writing.commit_sent(session, self._opened.values())
        note, doubt = session._doubts.append, self._in_doubt()
        # In this order: an interrupt comes at the end of a call. Noted twice it would be completed twice.
        self._booked = True
        note(doubt)
        if self._transaction is not None and not self._transaction.joined:
            self._writing.end(doubt)
        else:
            self._joined = doubt
        self._writing.doubted.set()

    def _in_doubt(self) -> _Doubt:
        transaction = self._transaction
        marker = None if transaction is None else transaction.marker
        return _Doubt(marker, list(self._opened.values()), transaction=transaction)

    def __del__(self) -> None:
        # Whatever thread this is, it may hold any lock: nothing but an append.
        session = getattr(self, "_session", None)
        if session is not None and not self._booked and self._writing.pid == os.getpid():
            session._doubts.append(self._in_doubt())


class _Ending:
    """The facts that are being ended, for close() to wait for; one whose thread was interrupted leaves as garbage."""

    def __init__(self) -> None:
        # Entered itself, not its condition: that is done in Python, where an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._facts: weakref.WeakSet[Fact[Any]] = weakref.WeakSet()

    def add(self, fact: Fact[Any]) -> None:
        """It begins to end."""
        with self._lock:
            self._facts.add(fact)

    def discard(self, fact: Fact[Any]) -> None:
        """It has ended."""
        with self._lock:
            self._facts.discard(fact)
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait until there are none."""
        with self._lock:
            self._changed.wait_for(lambda: not self._facts, timeout)


class Writing:
    """One process's writer. All methods may be called from any thread.

    ``on_loss()`` is called when another process has taken the name. ``on_invalidations(stream, payloads)`` applies what
    was committed to a stream of invalidations in this process, and ``on_unknown()`` drops whatever such rows may have
    invalidated, where it is not known which were committed.
    """

    def __init__(
        self,
        name: str,
        server: str,
        streams: Registry,
        settings: Settings,
        *,
        store: BlockingStore | None,
        publisher: Publisher,
        beats: bool,
        here: Callable[[bool], bool],
        on_loss: Callable[[], None] = lambda: None,
        on_invalidations: Callable[[str, Sequence[bytes]], None] = lambda _stream, _payloads: None,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_invalidations, self._on_unknown = on_invalidations, on_unknown
        self.name, self.server, self.pid = name, server, os.getpid()
        self._streams, self._settings, self._store = streams, settings, store
        self._durable = [stream.name for stream in streams if not stream.resettable]
        self._publisher, self._beats, self._here, self._on_loss = publisher, beats, here, on_loss
        self._lock = threading.RLock()  # the cores
        self._booker = 0  # the thread that has the lock
        self._connects = 0  # of the publisher, of which the core knows
        self._settling = threading.RLock()  # the transactions in doubt
        self._asker = 0  # the thread that asks after them
        self._renewing = threading.RLock()  # the session
        self._renewer = 0  # the thread that makes another
        self._connected: Session | None = None  # the one that knows that the connection stands
        self._failures = 0
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._claim_asked_at = -math.inf
        self._settle_at = 0.0
        self._settle_pause = SETTLE_FIRST
        self._outdone = 0  # the highest incarnation of a predecessor, without a claim
        self._named_until = time.monotonic() + settings.heartbeat * settings.silent_after_beats
        self.ending = _Ending()
        self.doubted = Bell()
        self.stale = Bell()  # something is to be published, and Redis did not take it
        self.lost: WriterFenced | None = None
        if store is not None:
            give_up_streams(store, name, self._durable, settings)
        self.session = self._claim(None)
        # Where the facts of this process begin, however often its name is won back.
        self.starts: Mapping[str, int] = {} if self.session.claim is None else self.session.claim.starts
        self._beat_at = time.monotonic() + settings.heartbeat

    def begin_beats(self) -> None:
        """There are threads now that do what is due."""
        self._beats = True

    def here(self, raising: bool = True) -> bool:
        """Whether this is the process that opened the bus. Raises ConfigError unless told not to."""
        return self._here(raising)

    # -- the name ---------------------------------------------------------------------------------------------

    def _claim(self, again: int | None, former: Session | None = None) -> Session:
        claim, incarnation = None, max(int(time.time() * 1000), (again or 0) + 1)
        if self._durable and self._store is not None:
            claim = self._store.claim(self.name, self._durable, timeout=self._settings.claim_timeout, again=again)
            incarnation = claim.incarnation
            if former is not None:
                claim = claim.resumed(former.epoch, former.core.positions())
        return Session(
            self.name, self.server, self._streams, self._settings,
            claim=claim, incarnation=incarnation, listens=self._beats,
        )  # fmt: skip

    def live(self) -> Session:
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
        _uninterrupted(lambda: self._renew_once(former))
        return self.live()

    def _renew_once(self, former: Session) -> None:
        with self._renewing:
            try:
                self._renewer = threading.get_ident()
                if self.session is former:
                    self._renew(former)
            finally:
                self._renewer = 0

    def _renew(self, former: Session) -> None:
        with self._settling:
            self._drop_doubts(former)
        try:
            session = self._win_back(max(former.incarnation, self._outdone), former)
        except WriterFenced as error:
            self._lose(error)
            raise
        log.warning(
            "writer %s was %s; it goes on as incarnation %d",
            self.name, "interrupted" if former.torn else "finished for its silence", session.incarnation,
        )  # fmt: skip
        session.facts, session.rows = former.facts, former.rows
        session.committed = former.committed
        self._on_unknown()  # those that were in doubt, or whose bookkeeping was interrupted; before this one is trusted
        self.session = session

    def _win_back(self, again: int, former: Session) -> Session:
        winning = WinningBack(again)
        while True:
            try:
                session = self._claim(winning.again, former)
                self._check_committed(former, session)
                return session
            except (WriterFenced, Unavailable) as error:
                winning.failed(error)

    def _check_committed(self, former: Session, won: Session) -> None:
        """Whether what was committed is still there: PostgreSQL may have failed over (9.23). Raises CommitsLost, and
        WriterFenced when what was won is fenced already."""
        if self._store is not None and won.claim is not None and (noted := former.noted_commits()):
            found = self._store.outcome(won.claim, None, noted)
            former.check_committed(found, self._store.known())

    def _lose(self, error: WriterFenced) -> None:
        if self.lost is None:
            self.lost = error if isinstance(error, CommitsLost) else WriterFenced(error.writer, error.incarnation)
            if error is self.lost:
                log.error("%s", error)
            self.fence(self.session, error)
            self._on_unknown()
            self._on_loss()

    def taken(self, incarnation: int, *, has_log: bool = False) -> None:
        """Another process speaks under this name: a successor, or, just after the start, a predecessor.

        A hint, the claim decides (9.19): it is read at once, but not more often than every beat. Where no stream
        has a table no claim tells which. Above a predecessor, whose clock was ahead, it goes on (9.24). ``has_log``:
        the other one writes to a log, so it has a claim, and the name.
        """
        session, now = self.session, time.monotonic()
        if incarnation <= session.incarnation or self.lost is not None:
            return
        error = WriterFenced(self.name, session.incarnation)
        if session.claim is not None:
            if now - self._claim_asked_at >= self._settings.heartbeat:
                self._claim_asked_at = now
                threading.Thread(target=self._check_claim, name="busrep-claim", daemon=True).start()
        elif now <= self._named_until and not has_log:
            log.warning("writer %s is heard under a higher incarnation, %d: a clock is behind", self.name, incarnation)
            self._outdone = max(self._outdone, incarnation)
            self.fence(session, error)
            self.doubted.set()  # who looks after the name goes on with it
        else:
            self._lose(error)

    def _check_claim(self) -> None:
        self._try(self.beat)
        if self.session.ended and self.lost is None:
            self._try(self.live)

    def fence(self, session: Session, error: WriterFenced) -> None:
        """Nothing more is written or published under that incarnation."""
        if error.writer == self.name and error.incarnation == session.incarnation:
            self._guarded(session, lambda: session.fence(error))

    def epoch_changed(self, epoch: str) -> None:
        """The log is another one: what was written here is of the one before, whose names nobody wins back."""
        session = self.session
        if session.epoch not in (None, epoch):
            self._lose(WriterFenced(self.name, session.incarnation))

    def look_at_claim(self, session: Session, error: SequenceWentBack) -> None:
        """A sequence that went back may be a new primary's, which fences all writers (9.23): returns when this one is
        fenced, else raises the error."""
        if self._store is None or session.claim is None:
            raise error
        try:
            self._store.check_claim(session.claim)
        except WriterFenced as fenced:
            self.fence(session, fenced)
        else:
            raise error

    def _guarded(self, session: Session, step: Callable[[], T]) -> T:
        """Do a step of bookkeeping. Whatever matters it writes down before it ends: the return may be interrupted."""
        with self._lock:
            if self._booker:  # it can only be this very one
                raise _ReenteredError
            try:
                self._booker = threading.get_ident()
                return step()
            except (BusrepError, ValueError):
                raise
            except BaseException:
                session.torn = True
                raise
            finally:
                self._booker = 0

    def _in_the_middle(self) -> bool:
        """Whether this thread is in the middle of bookkeeping: then it is the garbage collector that calls."""
        return threading.get_ident() in (self._booker, self._asker, self._renewer)

    # -- facts ------------------------------------------------------------------------------------------------

    def transaction(self, session: Session, connection: Any) -> BlockingTransaction:
        """A transaction of the store on busrep's connection, or the caller's."""
        if self._store is None or session.claim is None:
            raise ConfigError("pass store= to connect()")
        return self._store.transaction(session.claim, connection)

    def reserve(
        self,
        session: Session,
        stream: Stream[Any],
        count: int,
        opened: dict[str, OpenFacts],
        transaction: BlockingTransaction | None,
    ) -> None:
        """Open ``count`` new IDs of a stream, in ``opened``. Raises NotAWriter, WriterFenced."""
        name = stream.name
        generator = session.generators.get(name)
        if generator is None:
            raise NotAWriter(name, self.name)
        tickets = []

        def ask() -> None:
            tickets.append(generator.ask(count, now=time.monotonic(), owner=threading.current_thread().name))

        def answer(ids: Sequence[int]) -> None:
            session.given_again(name, ids)
            generator.answer(tickets[0], ids)
            opened[name] = OpenFacts(stream, ReservedIds(sorted(ids)))

        def promise(ids: Sequence[int]) -> None:
            session.given_again(name, ids)
            opened[name] = OpenFacts(stream, ReservedIds(sorted(ids)), ticket=tickets[0])
            session.promised.append(opened[name])

        def give_up() -> None:
            for ticket in tickets:
                generator.give_up(ticket)

        try:
            self._guarded(session, ask)
            if stream.resettable or self._store is None:
                self._guarded(session, lambda: answer(session.ids_in_memory(name, count)))
            elif transaction is not None and transaction.reserves:
                ids = transaction.reserve(name, count)
                self._guarded(session, lambda: promise(ids))
            else:
                ids = self._store.reserve(name, count)
                self._guarded(session, lambda: answer(ids))
        except BaseException:
            # IDs that the sequence gave to nobody stay holes.
            if name not in opened:
                self._guarded(session, give_up)
            raise

    def commit_sent(self, session: Session, opened: Iterable[OpenFacts]) -> None:
        """COMMIT goes out now, or is the caller's to send: until it is known what became of it, this process does not
        know all invalidations."""
        if session.commits:
            with self._lock:  # one step, which nothing can tear: also in the middle of bookkeeping
                session.commit_sent(opened)

    def freshness(self, stream: str) -> tuple[int, float] | None:
        """As of when this process has applied all that it committed to a stream of invalidations (`time.monotonic`),
        behind the incarnation of its name; None if that is not known."""
        with self._lock:
            session = self.session
            if session.ended or self.lost is not None or stream not in session.commits:
                return None
            return session.incarnation, session.applied_as_of(stream)

    def _apply(self, session: Session, opened: Sequence[OpenFacts]) -> None:
        """Apply the invalidations among these facts here. Before they are booked: interrupted, they are in doubt, and
        come again. And not under the lock of the cores: caches have locks too, and the garbage collector may end a fact
        while one of these is held."""
        for one in opened:
            if one.stream.name in session.commits:
                payloads = one.written()
                if payloads:
                    self._on_invalidations(one.stream.name, payloads)

    def completed(self, session: Session, opened: Sequence[OpenFacts], booked: Callable[[], None]) -> bool:
        """A transaction has ended, with these facts; an ID without rows is completed all the same. False: the session
        has ended, and they are not published under it."""
        self._apply(session, opened)

        def book() -> bool:
            session.note_end(opened)
            taken = not session.ended
            if taken:
                for one in opened:
                    session.redeem(one)
                    session.note_committed(one)
                    facts, rows = one.complete(session.core)
                    session.facts += facts
                    session.rows += rows
                for one in opened:
                    session.generators[one.stream.name].finish(one.ids)
            booked()
            return taken

        return self._guarded(session, book)

    # -- publishing -------------------------------------------------------------------------------------------

    def publish(self, *, now: bool = False) -> bool:
        """Publish what is due. False: Redis is away, or someone else is at it for too long; it goes out later.

        While Redis is away it is tried at a growing pause only, unless ``now``.
        """
        if not now and self._away():
            return False
        with self._publisher.lock:  # not for long: whoever has it has deadlines
            if self._publisher.busy or (not now and self._away()):
                return False
            try:
                self._publisher.busy = True
                return self._publish_or_note()
            finally:
                self._publisher.busy = False

    def _away(self) -> bool:
        """Whether Redis is away, as far as known, and it is not the calling thread's turn to look."""
        return bool(self._failures) and (self._beats or time.monotonic() < self._retry_at)

    def _publish_or_note(self) -> bool:
        while True:
            used = self._publisher.connected
            try:
                self._publish_all()
            except Unavailable as error:
                if used:  # it may have died of being idle; a new one tells
                    continue
                self._failures += 1
                self._retry_at = time.monotonic() + pause_after(self._failures, self._settings)
                log.debug("publishing: %s", error)
                self.stale.set()
                return False
            self._failures, self._retry_at = 0, 0.0
            return True

    def _publish_all(self) -> None:
        while True:
            session = self.session
            self._publisher.open()
            frames: list[Any] = []

            def compose(session: Session = session, frames: list[Any] = frames) -> None:
                if session.torn:
                    return
                known = (self._connected, self._connects)
                if known != (session, self._publisher.connects):
                    # Others cannot see that we came back: say where we are.
                    session.core.connected(time.monotonic())
                    self._connected, self._connects = session, self._publisher.connects
                frames += session.core.frames_to_publish()

            def confirm(session: Session = session, frames: list[Any] = frames) -> None:
                for frame in frames:
                    session.core.published(frame)

            try:
                self._guarded(session, compose)
                if not frames:
                    return
                self._publisher.publish(
                    [(self.channel(frame.channel_suffix), data) for frame in frames for data in frame.messages]
                )
                self._guarded(session, confirm)
            except BaseException:
                # Unknown which arrived: the same frames go out again, byte for byte (9.6).
                self._guarded(session, session.core.publish_failed)
                raise

    def channel(self, suffix: str) -> str:
        """The Redis channel of a stream's."""
        return f"{self.server}/{suffix}" if suffix else self.server

    def replicate_received(self) -> None:
        """Somebody asks for the positions."""
        session = self.session
        self._guarded(session, lambda: session.core.replicate_received(time.monotonic()))
        self.stale.set()

    # -- what has to be done now and then ---------------------------------------------------------------------

    def settle(self) -> None:
        """Ask after every fact in doubt once, now. Raises Unavailable, or what else keeps one from being known;
        WriterFenced when another process has the name."""
        try:
            self._ask_after_all()
        except WriterFenced:
            self.live()  # perhaps it was finished for its silence alone: then all that was committed is in the table

    def settle_without_beats(self) -> None:
        """Ask after the facts in doubt where no thread does: what is committed behind them waits for the answer."""
        if not self._beats:
            self._try(self._ask_after_all)

    def _ask_after_all(self) -> None:
        trouble: Exception | None = None
        session = self.session
        if not session._doubts or self._in_the_middle():
            return
        with self._settling:
            try:
                self._asker = threading.get_ident()
                for doubt in list(session._doubts):
                    if session.ended:
                        self._drop_doubts(session)
                        break
                    try:
                        self._settle(session, doubt)
                    except WriterFenced as error:
                        self.fence(session, error)
                        trouble = error
                    except Exception as error:  # the others may have ended all the same
                        trouble = error
            finally:
                self._asker = 0
        self.publish()
        if trouble is not None:
            raise trouble

    def ended(self, session: Session, doubt: _Doubt | None) -> None:
        """The caller says that this transaction has ended. Nothing is raised into what comes after its COMMIT."""
        if self._in_the_middle():
            return  # what is in doubt is asked after later
        try:
            with self._settling:
                try:
                    self._asker = threading.get_ident()
                    if doubt is not None and not session.ended and (same := session.ended_with(doubt)):
                        self._settle(session, *same)
                finally:
                    self._asker = 0
            self.publish()
        except WriterFenced as error:
            self.fence(session, error)
        except Exception as error:  # of whatever kind: it is committed, and is asked after again
            log.warning("the outcome of a transaction is not known yet: %s", error)
        if session.ended and self.lost is None:
            self._try(self.live)  # now: in a transaction of the caller's on SQLite the name cannot be won back

    def end(self, doubt: _Doubt) -> None:
        """Let the transaction of a fact in doubt hold nothing up."""
        with self._settling:
            asker = self._asker  # this thread, or nobody
            try:
                self._asker = threading.get_ident()
                doubt.end()
            finally:
                self._asker = asker

    def _drop_doubts(self, session: Session) -> None:
        """The session has ended: what they committed is in the table, and the next one begins behind it."""
        while session._doubts:
            doubt = session._doubts.pop()
            if isinstance(doubt, _Doubt):
                doubt.end()

    def _settle(self, session: Session, *doubts: InDoubt) -> None:
        """Ask what became of one transaction; ``doubts``: what it left, with one marker."""
        for doubt in doubts:
            if isinstance(doubt, _Doubt):
                doubt.end()
        asked_at = time.monotonic()
        found: dict[tuple[str, int], list[bytes]] | None = {}
        if self._store is not None and session.claim is not None:
            asked = [fact for doubt in doubts for fact in session.in_doubt_of(doubt)]
            found = self._store.outcome(session.claim, doubts[0].marker, asked)
        if found is None:
            self._guarded(session, lambda: session.still_open(doubts, asked_at))
            return
        for doubt in doubts:
            self._decide(session, doubt, found)

    def _decide(self, session: Session, doubt: InDoubt, found: Mapping[tuple[str, int], list[bytes]]) -> None:
        try:
            self._guarded(session, lambda: session.decide(doubt, found))
            self.completed(session, doubt.opened, lambda: None)
        except (BusrepError, ValueError):
            raise
        except BaseException:
            session.torn = True  # in between it is neither in doubt nor completed, and nobody would ask after it again
            raise

    def beat(self) -> None:
        """Store the proven positions and, the claim being ours still, follow the others. Raises Unavailable,
        WriterFenced."""
        session = self.session
        if not self._durable or session.ended or self._store is None or session.claim is None:
            return
        noted, positions = self._guarded(session, session.noted)
        try:
            registry = self._store.heartbeat(session.claim, positions)
        except WriterFenced as error:
            self.fence(session, error)
            raise
        self._guarded(session, lambda: session.registry_read(noted, registry))

    def before_a_fact(self, connection: Any = None) -> None:
        """Without a thread that does so: do first what is overdue.

        ``connection``: the caller's. Beside a transaction on SQLite's nothing can be written: that waits.
        """
        for doubt in list(self.session._doubts):
            if isinstance(doubt, _Doubt) and doubt.transaction is not None and not doubt.transaction.joined:
                self.end(doubt)  # of a fact that nobody ended: it may hold what this one needs
        if self._beats:
            return
        now = time.monotonic()
        if now >= self._beat_at and not getattr(connection, "in_transaction", False):
            self._beat_at = now + self._settings.heartbeat
            self._try(self.beat)
        if self.session._doubts:
            self._try(self._ask_after_all)
        self.tick(now)

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except WriterFenced:
            pass  # the name is won back before the next fact, or that raises
        except BusrepError as error:
            log.warning("%s: %s", type(error).__name__, error)

    def tick(self, now: float) -> None:
        """Queue the announcement if it is due."""
        session = self.session
        self._guarded(session, lambda: session.core.tick(now))

    def announce(self) -> float:
        """Publish the announcement, if it is due, and what Redis did not take before. Seconds until the next time."""
        self.stale.clear()
        now, heartbeat = time.monotonic(), self._settings.heartbeat
        self.tick(now)
        if self._failures and now < self._retry_at:
            return self._retry_at - now
        if not self.publish(now=True):
            return max(0.0, min(heartbeat, self._retry_at - time.monotonic()))
        return max(0.0, min(1.1 * heartbeat, self.session.core.next_deadline() - time.monotonic()))

    def look(self) -> float:
        """Store the positions, if it is due, and ask after the facts in doubt. Seconds until the next time."""
        self.doubted.clear()
        now, session = time.monotonic(), self.session
        if now >= self._beat_at:
            self._beat_at = now + self._settings.heartbeat
            self._try(self.beat)
            for stuck in self._guarded(session, lambda: session.stuck(now)):
                log.warning("fact %(id)s of stream %(stream)s is open for %(age).0f s (%(owner)s)", stuck)
        before = len(session._doubts)
        if before:
            self._try(self._ask_after_all)
        if session.ended and self.lost is None:
            self._try(self.live)
        if not session._doubts:
            self._settle_pause = SETTLE_FIRST
            return max(0.0, self._beat_at - time.monotonic())
        fewer = len(session._doubts) < before
        self._settle_pause = SETTLE_FIRST if fewer else min(2 * self._settle_pause, SETTLE_SLOWEST)
        return self._settle_pause

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Wait for transactions that are being ended, publish and store where this writer is, and finish its name."""
        self.ending.wait(timeout)
        self._try(self._ask_after_all)
        if self.publish(now=True):
            self._guarded(self.session, self.session.core.farewell)
            self.publish(now=True)
        self._try(self._leave)

    def _leave(self) -> None:
        """See `busrep.asyncio.writing.Writing.leave`."""
        self.beat()
        session = self.session
        if self._store is None or session.claim is None or session.ended:
            return
        if not self._guarded(session, lambda: session.unfinished):
            finals = self._store.finish(self.name, session.incarnation, timeout=self._settings.heartbeat)
            log.info("writer %s left at %s", self.name, dict(finals))

    def positions(self) -> dict[str, int]:
        """Stream -> the position up to which Redis confirmed its frames."""
        session = self.session
        return self._guarded(session, session.core.positions)

    def written(self, stream: str) -> tuple[int, bool] | None:
        """Up to where all facts of a stream are finished, and whether others are under way; None if it is not written
        here."""
        session = self.session
        return self._guarded(session, lambda: session.written(stream))

    def is_successors(self, stream: str, token: int) -> bool:
        """Whether a fact under the own name is another process's, or may be: see `WriterSession`."""
        session = self.session
        return self.lost is not None or self._guarded(session, lambda: session.is_successors(stream, token))

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        session = self.session
        return self._guarded(session, lambda: {**session.statistics(), "lost": self.lost is not None})

    def stuck(self) -> list[dict[str, Any]]:
        """Facts open for longer than ``stuck_after``, JSON-able."""
        session = self.session
        return self._guarded(session, lambda: session.stuck(time.monotonic()))


def give_up_streams(store: BlockingStore, writer: str, streams: Sequence[str], settings: Settings) -> None:
    """A predecessor wrote streams that this process does not: finish it (9.5), or their last rows would wait for a
    writer that never comes back, and it would hold back their linear position."""
    for known in store.known():
        if known.writer == writer and known.registered and known.stream not in streams:
            store.finish(writer, known.incarnation, timeout=settings.claim_timeout)
            return


def _uninterrupted(work: Callable[[], None]) -> None:
    """Do it, and wait for it, where no signal handler raises anything: in another thread than the main one.

    A claim that was committed, and whose incarnation an interrupt kept from being noted, would pass for another
    process's: the name would be lost.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="busrep-claim", daemon=True).start()
    done.result()


class Chore(threading.Thread):
    """Does something over and over: ``work()`` gives the seconds until the next time, ``wake`` cuts them short."""

    def __init__(self, work: Callable[[], float], wake: Bell, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._wake, self._stopped = work, wake, False

    def run(self) -> None:
        """The thread's."""
        while not self._stopped:
            try:
                pause = self._work()
            except Exception:  # a bug; without beats this process would count as dead
                log.exception("%s failed", self.name)
                pause = 1.0
            self._wake.wait(pause)

    def stop(self) -> None:
        """End after what is being done now; does not wait for it."""
        self._stopped = True
        self._wake.set()
