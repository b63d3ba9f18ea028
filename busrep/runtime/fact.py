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
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, overload

from busrep.errors import CommitUnknown, ConfigError, Unavailable, WriterFenced
from busrep.stores.interface import AsyncTransaction
from busrep.streams import Stream, checked_stream

from .open_facts import InDoubt, OpenFacts
from .session import WriterSession

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")
OtherT = TypeVar("OtherT")


# How often a name is won back while one fact begins. Readers take a writer whose machine is too slow for its heartbeat
# for silent, and may finish each new incarnation at once.
RENEWALS = 5


def check_renewals(name: str, count: int) -> None:
    """Raise Unavailable when a name was fenced more than `RENEWALS` times while one fact began; ``count``: times."""
    if count > RENEWALS:
        reason = "it was finished for its silence again and again: is Settings.heartbeat too short for this machine?"
        raise Unavailable(f"writer {name!r}", reason)


class FactState(enum.Enum):
    """Where a fact is in its life. Only an OPEN one takes rows; none is opened twice."""

    NEW = enum.auto()
    OPENING = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()  # its block: the rows are being inserted, or were, or will never be


class ReenteredError(Exception):
    """This thread is in the middle of bookkeeping already."""


class FactBase(abc.ABC, Generic[RowT]):
    """What a fact is in every runtime: IDs, rows that are checked and encoded as they are added, and its life.

    ``RowT``: the row class of its first stream.
    """

    _how = "async with"

    def __init__(self, writing: Any, streams: Sequence[Stream[Any]], connection: Any = None, count: int = 1) -> None:
        if count < 1:
            raise ConfigError(f"write(count={count!r}): a fact has an ID, so 1 or more are needed")
        self._writing, self._streams, self._count = writing, streams, count
        self._state = FactState.NEW
        self._opened: dict[str, OpenFacts] = {}
        self._session: WriterSession | None = None
        self._caller = connection
        self._transaction: AsyncTransaction | None = None
        self._booked = True  # nothing is open, or whoever settles facts in doubt knows of it
        self._sent = False  # COMMIT, or whatever comes in its place where there is no transaction
        self._joined: InDoubt | None = None  # what is left of it in the caller's transaction

    @property
    def id(self) -> int:
        """The fact's ID in the first stream. Raises ConfigError before the block."""
        if (name := self._streams[0].name) not in (ids := self.ids):
            raise self._not_begun()
        return ids[name]

    @property
    def ids(self) -> dict[str, int]:
        """The fact's ID per stream, as it stands in the table (below zero on a negative stream)."""
        return {name: self._table_id(opened)(opened.first) for name, opened in self._opened.items() if opened.first}

    def _table_id(self, opened: OpenFacts) -> Callable[[int], int]:
        assert self._session is not None  # noqa: S101 (it has begun, for it has opened something)
        return self._session.generators[opened.stream.name].table_id

    @overload
    def add(self, row: RowT, *, stream: None = None, insert: bool = True) -> None: ...
    @overload
    def add(self, row: OtherT, *, stream: Stream[OtherT], insert: bool = True) -> None: ...
    def add(self, row: Any, *, stream: Stream[Any] | None = None, insert: bool = True) -> None:
        """Add a row to the fact. Raises RowError, and ConfigError outside the block: the row would be lost.

        ``stream``: needed only for another than the first. ``insert=False``: the application inserts the row
        into the stream's own table itself, under ``fact.id``; behind those that busrep inserts.
        """
        self._of(stream).add(row, insert=insert)

    @overload
    def add_each(self, rows: Sequence[RowT], stream: None = None) -> list[int]: ...
    @overload
    def add_each(self, rows: Sequence[OtherT], stream: Stream[OtherT]) -> list[int]: ...
    def add_each(self, rows: Sequence[Any], stream: Stream[Any] | None = None) -> list[int]:
        """Add each row as a fact of its own, one for each ID reserved; give their IDs. Raises ConfigError for more rows
        or fewer, and outside the block."""
        opened = self._of(stream)
        if len(rows) != len(opened.ids):
            raise ConfigError(f"{len(rows)} rows for {len(opened.ids)} IDs: pass count={len(rows)} to write()")
        opened.each = (rows, opened.stream.encode_all(rows))
        return [*map(self._table_id(opened), opened.ids)] if opened.stream.negative else list(opened.ids)

    def _tell_what_is_gone(self) -> None:
        """Streams in memory have begun anew, with the writer: rows of before are not in a table either."""
        added = [one for one in self._opened.values() if one.each or one.payloads]
        gone = [one.stream.name for one in added if one.stream.resettable]
        reason = "began anew, as this writer was finished or interrupted, while the fact was open: it is not published"
        if gone and self._transaction is None:
            raise Unavailable(f"stream {', '.join(gone)}", f"it {reason}. Write it again")
        if gone:  # the rest of it is committed
            log.warning("stream %s %s there", ", ".join(gone), reason)

    def _of(self, stream: Stream[Any] | None) -> OpenFacts:
        self._check_in_block()
        name = self._streams[0].name if stream is None else checked_stream(stream).name
        if name not in self._opened:
            known = ", ".join(self._opened)
            raise ConfigError(f"this fact is of {known}, not of {name!r}: name all its streams in bus.write()")
        return self._opened[name]

    def _open_transaction(self) -> AsyncTransaction:
        """The transaction, for a statement of the caller's. Raises ConfigError outside the block, and without one."""
        self._check_in_block()
        if self._transaction is None:
            raise ConfigError("this fact has no transaction: its streams are kept in memory only")
        return self._transaction

    def _begin_once(self) -> None:
        """The block begins. Raises ConfigError when it did before."""
        if self._state is not FactState.NEW:
            raise ConfigError("a fact is written once: call bus.write() for each")
        self._state = FactState.OPENING

    def _check_in_block(self) -> None:
        """Raises ConfigError outside the block. In a joined transaction, too, the rows go in at the block's end."""
        if self._state is FactState.ENDED:
            raise ConfigError(
                f"the block of {self._called()} has ended, this would be lost: do it inside the block, or write "
                "another fact with bus.write()"
            )
        if self._state is not FactState.OPEN:
            raise self._not_begun()

    def _not_begun(self) -> ConfigError:
        return ConfigError(f"this fact is not open: use '{self._how} bus.write(...) as fact'")

    def _called(self) -> str:
        """The fact for a person: its IDs by stream."""
        if not self.ids:
            return f"a fact of {', '.join(stream.name for stream in self._streams)}"
        return "the fact " + ", ".join(f"{id} of stream {name!r}" for name, id in self.ids.items())

    # -- its life ---------------------------------------------------------------------------------------------

    async def _begin(self, session: WriterSession) -> None:
        """Reserve the IDs, and begin the transaction or join the caller's. Raises what these raise; nothing of the fact
        is left then."""
        self._session, self._opened, self._transaction = session, {}, None
        self._booked = self._sent = False
        try:
            if any(not stream.resettable for stream in self._streams):
                self._transaction = session.transaction(self._caller)
            for stream in self._streams:
                await self._reserve(session, stream)
            if self._transaction is not None:
                await self._transaction.begin()
        except BaseException as error:
            for opened in self._opened.values():
                opened.claimed = opened.stream.resettable
            await self._whole(self._end(session, error))
            raise

    async def _reserve(self, session: WriterSession, stream: Stream[Any]) -> None:
        """Open the fact's IDs of a stream. Raises NotAWriter, WriterFenced, SequenceWentBack, Unavailable."""
        name, opened, transaction = stream.name, self._opened, self._transaction
        session.generator_of(name)
        self._guarded(session, lambda: session.ask(opened, stream, self._count, self._owner()))
        if stream.resettable:
            self._guarded(session, lambda: session.reserved_in_memory(opened[name], self._count))
        elif transaction is not None and transaction.reserves:
            ids = await transaction.reserve(name, self._count)
            self._guarded(session, lambda: session.promised(opened[name], ids))
        else:
            ids = await session.log[0].reserve(name, self._count)
            self._guarded(session, lambda: session.reserved(opened[name], ids))

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
        self._complete(session)

    async def _commit(self, session: WriterSession) -> None:
        transaction = self._transaction
        self._sent = transaction is None
        if transaction is not None:
            try:
                for opened in self._opened.values():
                    if not opened.stream.resettable and (facts := opened.to_insert()):
                        await transaction.insert(opened.stream.name, facts)
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
        self._complete(session)

    def _complete(self, session: WriterSession) -> None:
        """Book what the transaction left, apply its invalidations here, and publish."""
        taken = False

        def book() -> None:
            nonlocal taken
            taken = session.book(self._opened.values())
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
    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        """Take in that the name is not the session's any more; nothing if ``error`` is of another one."""

    @abc.abstractmethod
    def _publish(self) -> None:
        """Publish what is due, or see to it."""

    @abc.abstractmethod
    def _doubted(self, doubt: InDoubt) -> None:
        """See to it that the table is asked."""


async def settle(
    session: WriterSession, doubts: Sequence[InDoubt], guarded: Callable[[Callable[[], object]], object]
) -> bool:
    """Ask the table what became of one transaction, and book it. False: it is still open.

    ``doubts``: what the transaction left, with one marker. Raises WriterFenced, Unavailable.
    """
    asked_at = time.monotonic()
    found: Mapping[tuple[str, int], list[bytes]] | None = {}
    if session.store is not None and session.claim is not None:
        asked = [fact for doubt in doubts for fact in session.in_doubt_of(doubt)]
        found = await session.store.outcome(session.claim, doubts[0].marker, asked)
    if found is None:
        guarded(lambda: session.still_open(doubts, asked_at))
        return False
    untold, rolled_back = [doubt for doubt in doubts if session.is_told_by_no_row(doubt)], True
    if untold:
        marker = untold[0].marker
        rolled_back = session.store is not None and marker is not None and await session.store.rolled_back(marker)
    for doubt in doubts:
        if doubt in session.doubts:
            gone = rolled_back or doubt not in untold
            # Until the last step it stays in doubt: interrupted, all of this is done again.
            guarded(partial(session.decide, doubt, found, rolled_back=gone))
            session.apply_invalidations(doubt.opened)
            guarded(partial(session.resolve, doubt))
    return True
