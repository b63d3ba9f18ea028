"""The life of a fact, written once for both runtimes.

The coroutines of `FactBase` are that life: reserve IDs, begin, insert, commit, and book what became of it. An asyncio
fact awaits them. A fact in threads runs them to their end in the calling thread: there nothing that they await waits
for an event loop (`busrep.stores.plans.complete`). What else differs between the runtimes are the hooks at the end.

Wherever an interrupt or a cancellation comes, one of three things holds for the fact: its transaction is known to have
ended, and it is booked; or it is noted as in doubt, and the table tells (9.1); or `FactBase._booked` is False, and
whoever sees that notes it as in doubt.
"""

from __future__ import annotations

import abc
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from busrep.errors import CommitUnknown, ConfigError, SequenceWentBack, Unavailable, WriterFenced
from busrep.stores.interface import AsyncTransaction, Group
from busrep.streams import Stream

from .contents import FactContents
from .deferred import DeferredTransaction
from .late_ids import asked_above
from .open_facts import InDoubt
from .session import WriterSession

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")


# How often a name is won back while one fact begins. Readers take a writer whose machine is too slow for its heartbeat
# for silent, and may finish each new incarnation at once.
RENEWALS = 5


def check_renewals(name: str, count: int) -> None:
    """Raise Unavailable when a name was fenced more than `RENEWALS` times while one fact began; ``count``: times."""
    if count > RENEWALS:
        reason = "it was finished for its silence again and again: is Settings.heartbeat too short for this machine?"
        raise Unavailable(f"writer {name!r}", reason)


class ReenteredError(Exception):
    """This thread is in the middle of bookkeeping already."""


class FactBase(FactContents[RowT], abc.ABC):
    """A fact, with its life.

    ``RowT``: the row class of its first stream.
    """

    def __init__(
        self, writing: Any, streams: Sequence[Stream[Any]], connection: Any = None, count: int = 1, *,
        unnumbered: bool = False,
    ) -> None:  # fmt: skip
        if count < 1:
            raise ConfigError(f"write(count={count!r}): a fact has an ID, so 1 or more are needed")
        super().__init__(streams)
        self._writing, self._count = writing, count
        self._caller = connection
        self._unnumbered = unnumbered and connection is None  # nobody asks for the IDs before the block has ended
        self._transaction: AsyncTransaction | None = None
        self._booked = True  # nothing is open, or whoever settles facts in doubt knows of it
        self._sent = False  # COMMIT, or whatever comes in its place where there is no transaction
        self.not_written: Unavailable | None = None  # raised when its writer was finished first, and won its name back
        self._joined: InDoubt | None = None  # what is left of it in the caller's transaction

    def _open_transaction(self) -> AsyncTransaction:
        """The transaction, for a statement of the caller's. Raises ConfigError outside the block, and without one."""
        self._check_in_block()
        if self._transaction is None:
            raise ConfigError("this fact has no transaction: its streams are kept in memory only")
        return self._transaction

    def _tell_what_is_gone(self) -> None:
        """Streams in memory have begun anew, with the writer: rows of before are not in a table either."""
        added = [one for one in self._opened.values() if one.each or one.payloads]
        gone = [one.stream.name for one in added if one.stream.resettable]
        reason = "began anew, as this writer was finished or interrupted, while the fact was open: it is not published"
        if gone and self._transaction is None:
            raise Unavailable(f"stream {', '.join(gone)}", f"it {reason}. Write it again")
        if gone:  # the rest of it is committed
            log.warning("stream %s %s there", ", ".join(gone), reason)

    # -- its life ---------------------------------------------------------------------------------------------

    async def _begin(self, session: WriterSession) -> None:
        """Reserve the IDs, and begin the transaction or join the caller's. Raises what these raise; nothing of the fact
        is left then."""
        self._session, self._opened, self._transaction = session, {}, None
        self._booked = self._sent = False
        try:
            if any(not stream.resettable for stream in self._streams):
                self._transaction = session.transaction(self._caller)
            joined = {stream.name: self._count for stream in self._streams if not await self._reserve(session, stream)}
            if self._transaction is not None:
                given = await self._transaction.begin(joined)
                hand_out = session.late_ids.promised if self._transaction.exclusive else session.late_ids.lent
                for name, ids in given.items():
                    self._guarded(session, partial(hand_out, self._opened[name], ids))
        except BaseException as error:
            self._without_claim()
            await self._whole(self._end(session, error))
            raise

    async def _reserve(self, session: WriterSession, stream: Stream[Any]) -> bool:
        """Open the fact's IDs of a stream, unless they come as its rows are written. False: the transaction gives them
        as it begins. Raises NotAWriter, WriterFenced, SequenceWentBack, Unavailable."""
        name, opened, transaction = stream.name, self._opened, self._transaction
        session.generator_of(name)
        ask = partial(session.ask, opened, stream, self._count, self._owner(), late=self._unnumbered)
        self._guarded(session, ask)
        if opened[name].late:
            return True
        if stream.resettable:
            self._guarded(session, lambda: session.reserved_in_memory(opened[name], self._count))
        elif transaction is not None and transaction.reserves:
            return False
        else:
            store, claim = session.log
            ids = await store.reserve(name, self._count, claim)
            self._guarded(session, lambda: session.late_ids.reserved(opened[name], ids))
        return True

    async def _begin_late(self) -> AsyncTransaction:
        """The transaction, begun, for a statement of the caller's. Raises ConfigError outside the block, and without
        one; what beginning raises."""
        transaction = self._open_transaction()
        if isinstance(transaction, DeferredTransaction):
            try:
                await transaction.begin_now()
            except WriterFenced as fenced:
                raise await self._stepped_over(fenced) from fenced
        return transaction

    async def _finish(self, error: BaseException | None) -> None:
        """The block has ended: commit, or after ``error`` roll back. Raises what committing raises."""
        if self._session is None:
            return
        try:
            await self._whole(self._end(self._session, error))
        except WriterFenced as fenced:
            if not isinstance(self._transaction, DeferredTransaction) or self._transaction.begun:
                raise
            raise await self._stepped_over(fenced) from fenced
        except SequenceWentBack as behind:  # of facts that get their IDs as they are written
            await self._look_at_claim(self._session, behind)
            gone = WriterFenced(self._session.name, self._session.incarnation)
            raise await self._stepped_over(gone) from behind

    async def _stepped_over(self, fenced: WriterFenced) -> Unavailable:
        """What is raised for a fact whose writer was finished before its transaction began: its IDs may have been
        stepped over, and the application may have stored them. The name is won back first; raises WriterFenced when
        another process has it."""
        assert self._session is not None  # noqa: S101 (a claim was lost, so there was one)
        self._fence(self._session, fenced)
        await self._live()
        reason = "it was finished for its silence while the fact was open: nothing of it was written. Write it again"
        self.not_written = Unavailable(f"writer {self._session.name!r}", reason)
        return self.not_written

    async def _begin_live(self) -> None:
        """Begin under the incarnation that goes on; if it was fenced for silence, with no successor, the name is won
        back, several times if need be. Raises WriterFenced when another process has it; what `_begin` raises."""
        for fenced in itertools.count(1):
            session = await self._live()
            try:
                await self._begin(session)
                return
            except WriterFenced:
                if self._transaction is not None and self._transaction.exclusive:
                    raise  # the caller has SQLite's write lock: `ended` wins the name back, if it can be
            except SequenceWentBack as error:
                await self._look_at_claim(session, error)
            check_renewals(session.name, fenced)

    async def _end(self, session: WriterSession, error: BaseException | None) -> None:
        """Commit, or after ``error`` roll back, and book the outcome. Raises what committing raises."""
        try:
            if isinstance(error, WriterFenced):
                self._fence(session, error)
            if error is not None:
                await self._roll_back(session)
            else:
                await self._commit(session)
        except BaseException:
            if not self._booked:
                self._doubt(session)
            raise

    async def _roll_back(self, session: WriterSession) -> None:
        transaction = self._transaction
        if transaction is not None:
            known = await transaction.rollback()
            # The caller may yet commit, or have committed: rows the application inserted under this ID would be facts.
            if not known or (transaction.joined and transaction.marker is not None):
                self._doubt(session)
                return
        for opened in self._opened.values():
            opened.forget()
        if transaction is not None and not transaction.claimed:
            self._without_claim()
        self._complete(session)

    def _without_claim(self) -> None:
        """Nothing has held the claim since the IDs were reserved: a successor may have stepped over them."""
        for opened in self._opened.values():
            opened.claimed = opened.stream.resettable

    async def _commit(self, session: WriterSession) -> None:
        transaction = self._transaction
        self._sent = transaction is None
        if transaction is not None:
            try:
                for opened in self._opened.values():
                    if opened.unnumbered is not None and isinstance(transaction, DeferredTransaction):
                        transaction.unnumbered[opened.stream.name] = opened.unnumbered
                    elif not opened.stream.resettable and opened.written():
                        # None where the caller has inserted them: then it is still to hold the claim.
                        await transaction.insert(opened.stream.name, opened.to_insert())
                self._commit_sent(session)
                self._sent = True
                await transaction.commit()
            except BaseException as error:
                if self._sent and self._leaves_doubt(error):
                    self._doubt(session)
                else:
                    await self._end(session, error)
                raise
            if transaction.joined:
                self._doubt(session)
                return
            for opened in self._opened.values():
                if opened.unnumbered is not None:
                    opened.given(opened.unnumbered.ids)
            if not transaction.claimed:  # there was nothing to insert
                self._without_claim()
        self._complete(session)

    def _complete(self, session: WriterSession) -> None:
        """Book what the transaction left, apply its invalidations here, and publish."""
        taken = False

        def book() -> None:
            nonlocal taken
            taken = session.book(self._opened.values(), None if self._transaction is None else self._transaction.marker)
            self._booked = True

        session.apply_invalidations(self._opened.values())
        try:
            self._guarded(session, book)
        except ReenteredError:
            self._doubt(session)
            return
        if not taken:
            self._tell_what_is_gone()
        self._publish()

    def _doubt(self, session: WriterSession) -> None:
        """Leave it to the table what becomes of the fact (9.1)."""
        self._commit_sent(session)
        note, doubt = session.doubts.append, self._in_doubt()
        # In this order: an interrupt comes at the end of a call. Noted twice it would be completed twice.
        self._booked = True
        note(doubt)
        if doubt.transaction is None or doubt.transaction.joined:
            self._joined = doubt
        self._doubted(doubt)

    def _in_doubt(self) -> InDoubt:
        transaction = self._transaction
        marker = None if transaction is None else transaction.marker
        return InDoubt(marker, list(self._opened.values()), transaction, sent=self._sent)

    # -- what differs between the runtimes --------------------------------------------------------------------

    def _guarded(self, _session: WriterSession, step: Callable[[], object]) -> None:
        """Do a step of bookkeeping. Raises ReenteredError in the middle of another one, and what the step raises."""
        step()

    def _commit_sent(self, session: WriterSession) -> None:
        """Note that COMMIT goes out now, or is the caller's to send from now on."""
        session.commit_sent(self._opened.values())

    def _leaves_doubt(self, error: BaseException) -> bool:
        """Whether this exception of ``commit`` says nothing of the transaction."""
        return isinstance(error, CommitUnknown)

    def _owner(self) -> str:
        """Who has the fact open, for whoever looks for facts that are stuck."""
        return ""

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the end of the fact to its end."""
        await work

    @abc.abstractmethod
    async def _live(self) -> WriterSession:
        """The session to write in: the name is won back first if it was finished for silence. Raises WriterFenced when
        another process has it, ClaimBlocked, Unavailable."""

    @abc.abstractmethod
    async def _look_at_claim(self, session: WriterSession, error: SequenceWentBack) -> None:
        """A sequence that went back may be a new primary's, which fences all writers: return if the claim is gone, else
        raise ``error``."""

    @abc.abstractmethod
    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        """Take in that the name is not the session's any more; nothing if ``error`` is of another one."""

    @abc.abstractmethod
    def _publish(self) -> None:
        """Publish what is due, or see to it."""

    @abc.abstractmethod
    def _doubted(self, doubt: InDoubt) -> None:
        """See to it that the table is asked."""


# Seconds until facts in doubt are asked after, for a caller's transaction goes on: at first, and at most, doubling.
SETTLE_FIRST, SETTLE_SLOWEST = 0.005, 1.0


def next_look(pause: float | None, before: int, left: int) -> float | None:
    """Seconds until facts in doubt are asked after once more, ``pause`` seconds after the last time; None if none are
    ``left`` of those ``before``."""
    if not left:
        return None
    return SETTLE_FIRST if pause is None or left < before else min(2 * pause, SETTLE_SLOWEST)


async def settle(
    session: WriterSession, doubts: Sequence[InDoubt], guarded: Callable[[Callable[[], object]], object]
) -> bool:
    """Ask the table what became of one transaction, and book it. False: it is still open.

    ``doubts``: what the transaction left, with one marker. Raises WriterFenced, Unavailable.
    """
    marker = doubts[0].marker
    if isinstance(marker, Group) and marker.under_way:
        return False  # the table could not tell
    above: dict[str, int] = {}
    for doubt in doubts if isinstance(marker, Group) else ():
        for stream, known in asked_above(doubt).items():
            above[stream] = min(known, above.get(stream, known))
    if above and guarded(lambda: session.late_ids.are_coming(session.doubts)):
        return False  # their IDs would be taken for these facts' own
    asked_at = time.monotonic()
    found: Mapping[tuple[str, int], list[bytes]] | None = {}
    if session.store is not None and session.claim is not None:
        asked = [fact for doubt in doubts for fact in session.in_doubt_of(doubt)]
        found = await session.store.outcome(session.claim, marker, asked, above)
    if found is None:
        guarded(lambda: session.still_open(doubts, asked_at))
        return False
    if guarded(partial(session.late_ids.may_be_others, doubts, found)):
        return False
    untold, rolled_back = [doubt for doubt in doubts if session.is_told_by_no_row(doubt)], True
    if untold:
        rolled_back = session.store is not None and marker is not None and await session.store.rolled_back(marker)
    for doubt in doubts:
        if doubt in session.doubts:
            gone = rolled_back or doubt not in untold
            # Until the last step it stays in doubt: interrupted, all of this is done again.
            guarded(partial(session.decide, doubt, found, rolled_back=gone))
            session.apply_invalidations(doubt.opened)
            guarded(partial(session.resolve, doubt))
    return True
