"""The writing half of a bus: facts in the caller's transaction, their IDs, and what is published of them.

`FactBase` and `WriterSession` wait for nothing and lock nothing: the threads' runtime (busrep.sync) builds on them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

import attrs

from busrep.caches.cache import is_invalidations
from busrep.caches.freshness import Commits
from busrep.core.commands import Name, Position, Server
from busrep.core.framing import Frame, Rows
from busrep.core.ids import IdGenerator, Noted, ReservedIds, Ticket
from busrep.core.senders import SenderTracker
from busrep.core.writer import Writer
from busrep.errors import (
    BusrepError,
    CommitsLost,
    CommitUnknown,
    ConfigError,
    NotAWriter,
    SequenceWentBack,
    Unavailable,
    WriterFenced,
)
from busrep.settings import Settings
from busrep.stores.interface import AsyncTransaction, Claim, FactLog, KnownWriter, Registered
from busrep.streams import Registry, Stream, checked_stream

from ..runtime.tasks import within

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")
OtherT = TypeVar("OtherT")

# After a failover facts of so many transactions of each stream are looked for. It loses those that were committed last;
# of those that were answered last the one that was committed last is one, unless more connections were at COMMIT.
COMMITS_CHECKED = 100

# An unknown COMMIT is asked after at this pace at first, doubling up to the slowest: a held transaction may take long.
SETTLE_FIRST, SETTLE_SLOWEST = 0.01, 1.0


class Keeper(Protocol):
    """Who takes the facts that are completed: the writer core, and whoever keeps a resettable stream's in memory."""

    def fact_completed(self, stream: str, token: int, payloads: Sequence[bytes]) -> None: ...  # noqa: D102
    def rows_completed(self, stream: str, tokens: Sequence[int], payloads: Sequence[bytes]) -> None: ...  # noqa: D102
    def position_moved(self, stream: str, position: int) -> None: ...  # noqa: D102


@attrs.define(eq=False)
class OpenFacts:
    """The facts of one stream in one transaction: their IDs, and the rows of each.

    ``each``: one row per ID, in order; else ``payloads`` holds the rows of an ID, and ``rows`` those of them that
    busrep inserts. ``ticket``: the IDs come from a sequence that is rolled back with the transaction (SQLite, the
    caller's); until it has ended the generator knows no more than that some were asked for.
    """

    stream: Stream[Any]
    ids: ReservedIds
    rows: dict[int, list[Any]] = attrs.field(factory=dict)
    payloads: dict[int, list[bytes]] = attrs.field(factory=dict)
    each: tuple[Sequence[Any], list[bytes]] | None = None
    ticket: Ticket | None = None
    first: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.ids[0], takes_self=True))

    def add(self, row: Any, *, insert: bool) -> None:
        """Add a row to the (first) fact."""
        payload, id = self.stream.encode(row), self.ids[0]
        self.payloads.setdefault(id, []).append(payload)
        if insert:
            self.rows.setdefault(id, []).append(row)

    def to_insert(self) -> list[tuple[int, Sequence[Any], Sequence[bytes]]]:
        """The facts that busrep inserts: ID, rows, and the rows as payloads."""
        if self.each is not None:
            return [(id, (row,), (payload,)) for id, row, payload in zip(self.ids, *self.each, strict=True)]
        return [(id, rows, self.payloads[id][: len(rows)]) for id, rows in self.rows.items()]

    def written(self) -> Sequence[bytes]:
        """The payloads of all rows."""
        if self.each is not None:
            return self.each[1]
        return [payload for id in self.ids for payload in self.payloads.get(id, ())]

    def forget(self) -> None:
        """The transaction did not commit: the IDs are empty."""
        self.each = None
        self.payloads.clear()

    def complete(self, core: Keeper) -> tuple[int, int]:
        """Hand the facts to the writer core, or to who keeps them besides; give how many facts and rows they were."""
        name = self.stream.name
        if self.each is not None:
            core.rows_completed(name, self.ids, self.each[1])
            return len(self.ids), len(self.ids)
        facts = rows = 0
        for id in self.ids:
            payloads = self.payloads.get(id, ())
            core.fact_completed(name, id, payloads)
            facts += bool(payloads)
            rows += len(payloads)
        return facts, rows


@attrs.define(eq=False)
class InDoubt:
    """A transaction whose end is not known: the caller's own, or one whose COMMIT got no answer (rule 9.1)."""

    marker: object
    opened: list[OpenFacts]
    stack: AsyncExitStack = attrs.field(factory=AsyncExitStack)


class FactState(enum.Enum):
    """Where a fact is in its life. Only an OPEN one takes rows; none is opened twice."""

    NEW = enum.auto()
    OPENING = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()  # its block: the rows are being inserted, or were, or will never be


class WinningBack:
    """Which incarnation to claim the own name after, when it was fenced (9.5). Pure; both runtimes ask it.

    A reader finishes a writer that is silent, and the name is no other process's then: its process may win it back.
    ``again``: for `AsyncStore.claim`, which refuses where another process has the name.
    """

    def __init__(self, again: int) -> None:
        self.again = again
        self._tried = False

    def failed(self, error: WriterFenced | Unavailable) -> None:
        """Take in how a claim failed: returns when it is to be tried again at once, else raises the error."""
        if isinstance(error, WriterFenced):
            if error.incarnation <= self.again:
                raise error
            self.again = error.incarnation  # won, and finished for its silence before that was known here
        elif self._tried:
            raise error
        else:
            # It may be won all the same. That can be told until readers finish that incarnation too, and the next
            # fact may be long in coming: so not then, but now.
            self._tried = True


class FactBase(Generic[RowT]):
    """What a fact is in every runtime: IDs, and rows that are checked and encoded as they are added.

    ``RowT``: the row class of its first stream.
    """

    _how = "async with"

    def __init__(self, streams: Sequence[Stream[Any]], count: int) -> None:
        if count < 1:
            raise ConfigError(f"write(count={count!r}): a fact has an ID, so 1 or more are needed")
        self._streams, self._count = streams, count
        self._state = FactState.NEW
        self._opened: dict[str, OpenFacts] = {}
        self._generators: Mapping[str, IdGenerator] = {}
        self._transaction: Any = None

    @property
    def id(self) -> int:
        """The fact's ID in the first stream. Raises ConfigError before the block."""
        if not self._opened:
            raise self._not_begun()
        return self.ids[self._streams[0].name]

    @property
    def ids(self) -> dict[str, int]:
        """The fact's ID per stream, as it stands in the table (below zero on a negative stream)."""
        generators = self._generators
        return {name: generators[name].table_id(opened.first) for name, opened in self._opened.items()}

    @overload
    def add(self, row: RowT, *, stream: None = None, insert: bool = True) -> None: ...
    @overload
    def add(self, row: OtherT, *, stream: Stream[OtherT], insert: bool = True) -> None: ...
    def add(self, row: Any, *, stream: Stream[Any] | None = None, insert: bool = True) -> None:
        """Add a row to the fact. Raises RowError, and ConfigError outside the block: the row would be lost.

        ``stream``: needed only for another than the first. ``insert=False``: the application inserts the row
        into the stream's own table itself, under ``fact.id``.
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
        table_id = self._generators[opened.stream.name].table_id
        return [table_id(id) for id in opened.ids] if opened.stream.negative else list(opened.ids)

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

    def _not_claimed(self) -> None:
        """The transaction did not begin: nobody has looked at the claim since the IDs were reserved (9.2)."""
        for one in self._opened.values():
            one.ids.unclaimed = not one.stream.resettable

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
        if not self._opened:
            return f"a fact of {', '.join(stream.name for stream in self._streams)}"
        return "the fact " + ", ".join(f"{id} of stream {name!r}" for name, id in self.ids.items())


class Fact(FactBase[RowT]):
    """One transaction in the making: ``async with bus.write(stream) as fact``.

    ``id`` is the fact's ID in the (first) stream, ``ids`` {stream name: ID}. On leaving the block the rows are
    inserted, the transaction commits, and the fact is published; an exception rolls it back. In a transaction
    that the caller had begun on the connection already, the caller commits, and the fact is published when that
    is seen to have happened (``bus.settle()`` looks at once).
    """

    def __init__(
        self, writing: Writing, streams: Sequence[Stream[Any]], connection: Any = None, count: int = 1
    ) -> None:
        super().__init__(streams, count)
        self._writing, self._generators = writing, writing.generators
        self._caller = connection
        self._transaction: AsyncTransaction | None
        self._stack = AsyncExitStack()
        self._joined: InDoubt | None = None  # what is left of it in the caller's transaction

    @property
    def connection(self) -> Any:
        """The driver's connection that the transaction runs on; None for streams without a table."""
        return None if self._transaction is None else self._transaction.hand_out()

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of the caller's in the fact's transaction, in the driver's placeholder style.
        Raises the driver's own errors of it, and ConfigError outside the block."""
        self._check_in_block()
        if self._transaction is None:
            raise ConfigError("this fact has no transaction: its streams are kept in memory only")
        return list(await self._transaction.execute(sql, params))

    def ended(self) -> None:
        """Say that the caller's transaction, which this fact had joined, has ended: it is looked at, and published,
        in the background. If it goes on in truth, nothing happens."""
        if self._joined is not None:
            self._writing.ended(self._joined)

    async def __aenter__(self) -> Fact[RowT]:
        self._begin_once()
        writing = await self._writing.live()
        await writing.room()
        try:
            await self._begin(writing)
        except (WriterFenced, SequenceWentBack) as error:
            await writing.look_at_claim(error)
            # Perhaps for its silence, with no successor: then the name is won back. Else this raises.
            await self._begin(await writing.live())
        self._state = FactState.OPEN
        return self

    async def _begin(self, writing: Writing) -> None:
        self._writing, self._generators, self._opened = writing, writing.generators, {}
        self._transaction, self._stack = None, AsyncExitStack()
        try:
            if any(not stream.resettable for stream in self._streams):
                self._transaction = writing.transaction(self._caller)
            for stream in self._streams:
                ids = await self._stack.enter_async_context(writing.reserve(stream, self._count))
                self._opened[stream.name] = OpenFacts(stream, ids)
            if self._transaction is not None:
                await self._transaction.begin()
        except BaseException as error:
            self._state = FactState.ENDED
            self._look(error)
            self._not_claimed()
            await writing.finish(self._rolled_back())
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = FactState.ENDED
        # Neither half may be torn by a cancellation: whether COMMIT was sent decides what the fact becomes.
        if error is not None:
            await self._writing.finish(self._rolled_back())
        else:
            await self._writing.finish(self._commit())

    def _look(self, error: BaseException) -> None:
        # Not at what the caller's block raised: that may be of another bus.
        if isinstance(error, WriterFenced):
            self._writing.fence(error)

    async def _rolled_back(self) -> None:
        transaction = self._transaction
        if transaction is not None:
            known = await transaction.rollback()
            # The caller may yet commit, or have committed: rows the application inserted under this ID would be facts.
            if not known or (transaction.joined and transaction.marker is not None):
                self._doubt()
                return
        for opened in self._opened.values():
            opened.forget()
        await self._writing.completed(list(self._opened.values()), self._stack)

    async def _commit(self) -> None:
        transaction = self._transaction
        if transaction is not None:
            try:
                for opened in self._opened.values():
                    if not opened.stream.resettable and (facts := opened.to_insert()):
                        await transaction.insert(opened.stream.name, facts)
                for opened in self._opened.values():
                    opened.ids.commit_sent()
                self._writing.commit_sent(self._opened.values())
                await transaction.commit()
            except CommitUnknown:  # the table will tell
                self._doubt()
                raise
            except BaseException as error:
                await self._failed(error)
                raise
            if transaction.joined:
                self._doubt()
                return
        taken = self._writing.fenced is None
        await self._writing.completed(list(self._opened.values()), self._stack)
        if not taken:
            self._tell_what_is_gone()

    async def _failed(self, error: BaseException) -> None:
        for opened in self._opened.values():
            opened.ids.outcome_known()
        self._look(error)
        await self._rolled_back()

    def _doubt(self) -> None:
        for opened in self._opened.values():
            opened.ids.commit_sent()
        self._writing.commit_sent(self._opened.values())
        assert self._transaction is not None  # noqa: S101 (only a transaction leaves a doubt)
        doubt = InDoubt(self._transaction.marker, list(self._opened.values()), self._stack)
        self._joined = doubt if self._transaction.joined else None
        self._writing.in_doubt(doubt)


class WriterSession:
    """What one incarnation of a writer knows of its facts: a ``Writer`` core, and one ID generator per stream.

    ``claim``: None for a writer whose streams are all kept in memory. ``listens``: see `Writer`. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        server: str,
        streams: Registry,
        settings: Settings,
        *,
        claim: Claim | None,
        incarnation: int,
        listens: bool = True,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.epoch = epoch = None if claim is None else claim.epoch
        self._settings = settings
        # Of invalidations: since when facts may be committed that are not applied here.
        self.commits = {stream.name: Commits() for stream in streams if is_invalidations(stream)}
        # Called with what was committed to them, before whoever wrote it goes on: so a process reads its own writes.
        self.on_invalidations: Callable[[str, Sequence[bytes]], None] | None = None
        self.core = Writer(server, name, incarnation=incarnation, epoch=epoch, settings=settings, listens=listens)
        self.generators: dict[str, IdGenerator] = {}
        self._last: dict[str, int] = {}
        for stream in streams:
            start, highest, known = 0, 0, {name: 0}
            if not stream.resettable:
                if claim is None:  # connect() has refused streams with a table and no store
                    raise ConfigError("pass store= to connect()")
                start, highest = claim.starts[stream.name], claim.highest[stream.name]
                known = {**claim.known[stream.name], name: start}
            self.generators[stream.name] = IdGenerator(
                stream.name,
                name,
                start=known,
                highest=highest,
                negative=stream.negative,
                stuck_after=settings.stuck_after,
                on_moved=functools.partial(self.position_moved, stream.name),
            )
            self.core.add_stream(stream, start)
        self._name_on_wire = name.encode()
        self._own_opening = b"NAME %b %d\n" % (name.encode(), incarnation)
        self._senders = SenderTracker(settings.followed)
        self._claims: Mapping[tuple[str, str], int] = {} if claim is None else claim.claims  # of the others
        self._durable = {stream.name: stream for stream in streams if not stream.resettable}
        self._doubts: list[InDoubt] = []
        self.kept: dict[str, Keeper] = {}  # of resettable streams whose rows outlive their publication
        self.fenced: WriterFenced | None = None
        # stream -> the own facts that are known to be in busrep's table: of the last transactions, one of each
        self.committed: dict[str, deque[int]] = {}
        self.facts = 0
        self.rows = 0

    def commit_sent(self, opened: Iterable[OpenFacts]) -> None:
        """COMMIT goes out now, or is the caller's to send from now on."""
        for one in opened:
            if (commits := self.commits.get(one.stream.name)) is not None:
                commits.sent(one, time.monotonic())

    def still_open(self, doubts: Iterable[InDoubt], asked: float) -> None:
        """The table said so, in answer to a question asked then (`time.monotonic`)."""
        for doubt in doubts:
            for one in doubt.opened:
                if (commits := self.commits.get(one.stream.name)) is not None:
                    commits.still_open(one, asked)

    def note_end(self, opened: Iterable[OpenFacts]) -> None:
        """The transaction has ended, with these facts: apply the invalidations among them here."""
        for one in opened:
            if (commits := self.commits.get(one.stream.name)) is not None:
                payloads = one.written()
                if self.on_invalidations is not None and payloads:
                    self.on_invalidations(one.stream.name, payloads)
                commits.ended(one)

    def note_committed(self, one: OpenFacts) -> None:
        """These facts are committed; looked for after a failover (`check_committed`)."""
        name = one.stream.name
        if self.fenced is None and name in self._durable and one.stream.table is None:
            ids = one.ids if one.each is not None else [id for id, payloads in one.payloads.items() if payloads]
            if ids:
                self.committed.setdefault(name, deque(maxlen=COMMITS_CHECKED)).append(max(ids))

    def noted_commits(self) -> list[tuple[str, int]]:
        """What `check_committed` is to be told of."""
        return [(stream, id) for stream, ids in self.committed.items() for id in ids]

    def check_committed(self, found: Collection[tuple[str, int]] | None, known: Iterable[KnownWriter]) -> None:
        """Whether what was committed last is still there, of which this was ``found``. ``known`` was read after that:
        rows may have been deleted. Raises CommitsLost."""
        floors = {one.stream: one.floor for one in known if one.writer == self.name}
        for stream, id in self.noted_commits():
            if id > floors.get(stream, 0) and (stream, id) not in (found or ()):
                raise CommitsLost(self.name, self.incarnation, stream, id)

    def applied_as_of(self, stream: str) -> float:
        """As of when this process has applied all that it committed to a stream of invalidations (`time.monotonic`)."""
        return self.commits[stream].as_of(time.monotonic())

    def ids_in_memory(self, stream: str, count: int) -> list[int]:
        """``count`` new IDs of a stream that has no table."""
        last = self._last.get(stream, 0)
        self._last[stream] = last + count
        return list(range(last + 1, last + count + 1))

    def in_doubt_of(self, doubt: InDoubt) -> list[tuple[str, int]]:
        """The facts that the table has to tell of."""
        return [(one.stream.name, id) for one in doubt.opened if one.stream.name in self._durable for id in one.ids]

    def ended_with(self, doubt: InDoubt) -> list[InDoubt]:
        """What is in doubt of a transaction that has ended: all at once, so that the next ones have nothing left to
        ask. The others also when this one has been asked after meanwhile, perhaps before they were noted."""
        same = [one for one in self._doubts if one.marker == doubt.marker]
        return same if doubt.marker is not None or doubt in same else []

    def written(self, stream: str) -> tuple[int, bool] | None:
        """Up to where all facts of a stream are finished, and whether others are under way; None if it is not written
        here."""
        generator = self.generators.get(stream)
        return None if generator is None else (generator.position, bool(generator.open or generator.asked))

    @property
    def unfinished(self) -> bool:
        """Whether a fact is open, or in doubt."""
        return bool(self._doubts) or any(one.open or one.asked for one in self.generators.values())

    def decide(self, doubt: InDoubt, found: Mapping[tuple[str, int], list[bytes]]) -> None:
        """The transaction has ended and left what was ``found``: that, and nothing else, is what the facts were."""
        self._doubts.remove(doubt)
        durable = [one for one in doubt.opened if one.stream.name in self._durable]
        for one in durable:
            one.each = None
            one.payloads = {id: found[one.stream.name, id] for id in one.ids if (one.stream.name, id) in found}
        if not any(one.payloads for one in durable):
            for one in doubt.opened:
                one.forget()

    def noted(self) -> tuple[dict[str, tuple[int, Noted]], dict[str, int]]:
        """What is known before the claim and the registry are read, and the own positions to store (9.2, 9.7)."""
        noted = {name: (self.generators[name].followable(), self.generators[name].noted()) for name in self._durable}
        positions = {name: self.generators[name].position for name in self._durable}
        return noted, positions

    def registry_read(self, noted: Mapping[str, tuple[int, Noted]], registry: Registered) -> None:
        """The claim stands, and this is the registry: follow the others as far as was noted before."""
        self._claims = registry.claims
        for name, stream in self._durable.items():
            generator = self.generators[name]
            generator.registry_read(noted[name][1], registry[name])
            if stream.follows:  # never above the sequence: what was announced may be forged (9.17)
                generator.follow(min(noted[name][0], registry.sequences[name]))

    def position_moved(self, stream: str, position: int) -> None:
        """The ID generator moved the own position, by whatever event: what is complete up to there is published."""
        if (kept := self.kept.get(stream)) is not None:
            kept.position_moved(stream, position)
        self.core.position_moved(stream, position)

    def is_echo(self, data: bytes) -> bool:
        """Whether a message is a frame of rows that this process sent: all its lines are its own, none matters here.

        Announcements are not meant: they are looked at, for they may be another process's under the same name. Lines
        that are messages by themselves say no more of their sender than the writer's name: all of them are meant.
        """
        if self._settings.one_line_messages:
            command, _, rest = data.partition(b" ")
            return command in (b"RDATA", b"POSITION") and rest.split(b" ", 2)[1:2] == [self._name_on_wire]
        return data.startswith(self._own_opening)

    def is_successors(self, stream: str, token: int) -> bool:
        """Whether a fact under the own name is none of this process's, which is fenced: it may be a successor's."""
        if self.fenced is None:
            return False
        generator = self.generators.get(stream)
        return generator is None or token > max(generator.position, generator.own_highest)

    def has_log(self, incarnation: int) -> bool:
        """Whether a process with the own name has announced an epoch under this incarnation."""
        return self._senders.has_log(self.name, incarnation)

    def heard(self, frame: Frame) -> None:
        """Other writers' rows and positions move what is known of the shared sequences: those of registered writers, in
        the incarnation that has the claim (9.18, 9.19)."""
        epoch = self.epoch
        senders = self._senders
        senders.begin()
        for item in frame.items:
            if isinstance(item, Server | Name):
                senders.observe(item)
            elif isinstance(item, Rows | Position) and item.writer != self.name and item.stream in self._durable:
                claim = self._claims.get((item.stream, item.writer), -1)
                if senders.incarnation_of(item.writer) != claim or not senders.is_trusted(item.writer, epoch):
                    continue
                if isinstance(item, Rows):
                    self.generators[item.stream].rows_seen(item.writer, item.tokens)
                else:
                    self.generators[item.stream].announced(item.writer, item.new)

    def fence(self, error: WriterFenced) -> None:
        """Another process has the name: nothing more is written or published under it."""
        if self.fenced is None:
            log.error("%s", error)
            self.fenced = error
            self.core.fenced()
            for generator in self.generators.values():
                generator.fenced(error)

    def stuck(self, now: float) -> list[dict[str, Any]]:
        """Facts open for longer than ``stuck_after``, JSON-able."""
        return [attrs.asdict(fact) for generator in self.generators.values() for fact in generator.stuck(now)]

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {
            **self.core.statistics(),
            "facts": self.facts,
            "rows": self.rows,
            "in_doubt": len(self._doubts),
            "incarnation": self.incarnation,
        }


@attrs.frozen
class Claimed:
    """A store, and the writer's name won in it."""

    store: FactLog
    claim: Claim


class Writing(WriterSession):
    """A `WriterSession` on an event loop; calls ``wake()`` when there is something to publish.

    ``renew(self)`` gives the one that goes on under a new incarnation, or raises (see `WinningBack`); None: none does.
    It is asked at once when this one is fenced. ``on_loss()``: another process has the name.
    """

    def __init__(
        self,
        name: str,
        server: str,
        streams: Registry,
        settings: Settings,
        *,
        claimed: Claimed | None,
        incarnation: int,
        wake: Callable[[], None],
        renew: Callable[[Writing], Awaitable[Writing]] | None = None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        claim = None if claimed is None else claimed.claim
        super().__init__(name, server, streams, settings, claim=claim, incarnation=incarnation)
        self._claimed = claimed
        self._wake, self._renew, self._on_loss = wake, renew, on_loss
        self.lost = False  # to another process: it is not won back
        self.outdone = 0  # the higher incarnation of a predecessor, without a claim
        self._finishing: set[asyncio.Task[None]] = set()
        self._looking: set[object] = set()  # at these transactions' ends
        self._doubted = asyncio.Event()
        self._drained = asyncio.Event()
        self.publishing = False  # whether Redis takes what is published; then a full queue is worth a wait

    @property
    def claimed(self) -> Claimed | None:
        """The store, and the name won in it; None for a writer whose streams are all kept in memory."""
        return self._claimed

    async def live(self) -> Writing:
        """This one, or the one that goes on in its place after it was finished for silence.

        Raises WriterFenced when another process has the name, ClaimBlocked, Unavailable.
        """
        if self.fenced is None:
            return self
        if self.lost or self._renew is None:
            raise self.fenced.with_traceback(None)  # it is raised again and again, and would hold on to every frame
        return await self._renew(self)

    async def look_at_claim(self, error: WriterFenced | SequenceWentBack) -> None:
        """A sequence that went back may be a new primary's, which fences all writers (9.23): returns when this one is
        fenced, else raises the error."""
        if isinstance(error, SequenceWentBack) and (self._claimed is None or await self.check_claim()):
            raise error

    @property
    def _table(self) -> Claimed:
        if self._claimed is None:  # connect() has refused streams with a table and no store
            raise ConfigError("pass store= to connect()")
        return self._claimed

    # -- facts ------------------------------------------------------------------------------------------------

    def transaction(self, connection: Any) -> AsyncTransaction:
        """A transaction of the store on busrep's connection, or the caller's."""
        return self._table.store.transaction(self._table.claim, connection)

    def reserve(self, stream: Stream[Any], count: int) -> Any:
        """A context manager that holds ``count`` new IDs of the stream. Raises NotAWriter, WriterFenced."""
        if self.fenced is not None:
            raise self.fenced.with_traceback(None)  # it is raised again and again, and would hold on to every frame
        generator = self.generators.get(stream.name)
        if generator is None:
            raise NotAWriter(stream.name, self.name)
        clock = asyncio.get_running_loop().time  # the one that `stuck` is asked by
        if stream.name in self._durable:
            store = self._table.store
            return generator.reserve_async(lambda count: store.reserve(stream.name, count), count, clock=clock)
        return generator.reserve_async(lambda count: self._next_in_memory(stream.name, count), count, clock=clock)

    async def _next_in_memory(self, stream: str, count: int) -> list[int]:
        return self.ids_in_memory(stream, count)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the end of a transaction to its end, even when the caller is cancelled."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # Its error, if any, would be reported as never retrieved: whoever cancelled asked not to know.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def completed(self, opened: Sequence[OpenFacts], stack: AsyncExitStack) -> None:
        """A transaction has ended, with these facts; an ID without rows is completed all the same."""
        if self.commits:
            self.note_end(opened)
        for one in opened:
            facts, rows = one.complete(self.core)
            self.note_committed(one)
            self.facts += facts
            self.rows += rows
            if (kept := self.kept.get(one.stream.name)) is not None:
                one.complete(kept)
            one.ids.outcome_known()
        await stack.aclose()  # the generator takes the IDs for complete from here on

    def position_moved(self, stream: str, position: int) -> None:
        """See `WriterSession`; the publisher is woken."""
        super().position_moved(stream, position)
        self._wake()

    async def room(self) -> None:
        """Wait while Redis is slower than the writers; never while it is away, for the table has it all."""
        while self.publishing and self.core.queued_bytes > self._settings.publish_queue_bytes // 2:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.redis_timeout):
                    await self._drained.wait()
                    continue
            return

    def drained(self) -> None:
        """Frames were published, or cannot be."""
        self._drained.set()

    # -- facts in doubt ---------------------------------------------------------------------------------------

    def in_doubt(self, doubt: InDoubt) -> None:
        """Facts whose transaction may still be open: the table will tell (rule 9.1)."""
        self._doubts.append(doubt)
        self._doubted.set()

    def ended(self, doubt: InDoubt) -> None:
        """The caller says that this transaction has ended: ask now, without making anyone wait."""

        async def look() -> None:
            try:
                await self._settle(*self.ended_with(doubt))
            except WriterFenced as error:
                self.fence(error)
            except Exception as error:  # of whatever kind: `keep_settling` asks again
                log.debug("the outcome of a transaction is not known yet: %s", error)
            finally:
                self._looking.discard(doubt.marker)

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the garbage collector, after the loop
            return
        if not self.ended_with(doubt) or doubt.marker in self._looking:
            return  # one question is enough for all facts of a transaction
        self._looking.add(doubt.marker)
        task = loop.create_task(look())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def settle(self) -> None:
        """Ask after every fact in doubt once, now. Raises Unavailable, or what else keeps one from being known."""
        trouble: Exception | None = None
        for doubt in list(self._doubts):
            try:
                await self._settle(doubt)
            except Exception as error:  # the others may have ended all the same
                trouble = error
        if trouble is not None:
            raise trouble

    async def _settle(self, *doubts: InDoubt) -> None:
        """Ask what became of one transaction; ``doubts``: what it left, with one marker."""
        if not doubts:
            return
        asked = [fact for doubt in doubts for fact in self.in_doubt_of(doubt)]
        asked_at = time.monotonic()
        found = await self._table.store.outcome(self._table.claim, doubts[0].marker, asked)
        if found is None:
            self.still_open(doubts, asked_at)
            return
        for doubt in doubts:
            if doubt in self._doubts:
                self.decide(doubt, found)
                await self.completed(doubt.opened, doubt.stack)

    async def keep_settling(self) -> None:
        """Settle facts in doubt until cancelled."""
        pause = SETTLE_FIRST
        while self.fenced is None:
            if not self._doubts:
                pause = SETTLE_FIRST
                self._doubted.clear()
                await self._doubted.wait()
                continue
            before = len(self._doubts)
            try:
                await self.settle()
            except WriterFenced as error:
                self.fence(error)
            except Exception as error:  # of whatever kind: the facts in doubt hold back all later ones
                log.warning("the outcome of %d transactions is not known yet: %s", before, error)
            if self._doubts:
                pause = SETTLE_FIRST if len(self._doubts) < before else min(2 * pause, SETTLE_SLOWEST)
                self._doubted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._doubted.wait()
        self._doubts.clear()  # what they committed is in the table

    # -- the others, and the beat -----------------------------------------------------------------------------

    async def beat(self) -> None:
        """Store the proven positions and, the claim being ours still, follow the others. Raises Unavailable."""
        if not self._durable or self.fenced is not None:
            return
        # Noted before the claim and the registry are read, which the store does under one lock (9.2, 9.7).
        noted, positions = self.noted()
        try:
            registry = await self._table.store.heartbeat(self._table.claim, positions)
        except WriterFenced as error:
            self.fence(error)
            return
        self.registry_read(noted, registry)

    async def leave(self) -> None:
        """After the last announcement: store the positions, and finish the own name (9.21), which nobody has to find
        silent then. Not while a fact is open or in doubt: what became of it the table tells later. Raises BusrepError.
        """
        await self.beat()
        if self._claimed is None or self.fenced is not None or self.unfinished:
            return
        finals = await self._claimed.store.finish(self.name, self.incarnation, timeout=self._settings.heartbeat)
        log.info("writer %s left at %s", self.name, dict(finals))

    async def check_claim(self) -> bool:
        """Whether the claim stands, asked on the primary; without a claim nothing tells. Raises Unavailable."""
        if self._claimed is None:
            return False
        try:
            await self._claimed.store.check_claim(self._claimed.claim)
        except WriterFenced as error:
            self.fence(error)
        return self.fenced is None

    def fence(self, error: WriterFenced) -> None:
        """Nothing more is written or published under this incarnation: another process has the name, or a reader has
        finished it for silence. Which of them, the claim tells."""
        if self.fenced is None:
            super().fence(error)
            self._doubted.set()
            self._wake()
            if self._renew is None:
                self.lose(error)
            elif not self.lost:
                task = asyncio.get_running_loop().create_task(self._try_to_renew(self._renew), name="busrep-renew")
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)

    async def _try_to_renew(self, renew: Callable[[Writing], Awaitable[Writing]]) -> None:
        try:
            await renew(self)
        except BusrepError as error:  # the next beat, or the next fact, tries again
            log.warning("writer %s is not won back: %s", self.name, error)

    def lose(self, error: WriterFenced) -> None:
        """Another process has the name, for good."""
        if not self.lost:
            self.lost = True
            self.fence(error)
            self.fenced = error
            self._on_loss()

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {**super().statistics(), "lost": self.lost}

    async def close(self, timeout: float) -> None:
        """Wait for transactions that are being ended."""
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=timeout)
        with contextlib.suppress(BusrepError, TimeoutError):
            await within(timeout, self.settle())
