"""What the SQL stores have in common: every operation of the interface as a plan, run by the store's executor."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from busrep.core.snapshots import Agreement
from busrep.errors import BusrepError, CommitUnknown, Unavailable
from busrep.settings import Settings
from busrep.stores import appending, claims, facts, fencing, interface, readers, schema, snapshots
from busrep.stores.dialect import ROLLED_BACK, Dialect, backing_of
from busrep.stores.interface import AsyncTransaction, Claim, FactLog, FactSource, Group, ReaderPositions, StoreAdmin
from busrep.stores.plans import Control, Plan, Row, Sql, T, Unanswered, only
from busrep.stores.sharing import Appends, Facts, Outcome, Outcomes, Reservations
from busrep.streams import Registry

P = ParamSpec("P")
Operation = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]

# How long 'db status' counts the rows of a table, seconds.
STATUS_WAIT = 3600.0
# How often an append that found another series than it knew is sent again: each lost answer of the writer's begins one.
SERIES_TRIES = 10


def reads(
    method: Operation[P, T], plan: Callable[Concatenate[Dialect, P], Plan[T]], wait: float = 0.0
) -> Operation[P, T]:
    """Bind a plan that writes nothing as a method of `PlannedStore`. Its name, signature and docstring are those of
    ``method``, which interface.py has. ``wait``: see `PlannedStore.read`."""

    @functools.wraps(method)
    def run(self: PlannedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.read(plan(self.dialect, *args, **kwargs), wait)

    return run


def writes(
    method: Operation[P, T], plan: Callable[Concatenate[Dialect, P], Plan[T]], wait: float | None = None
) -> Operation[P, T]:
    """Bind a plan that writes. See `reads`. ``wait``: see `PlannedStore.write`; else the method's ``timeout``."""

    @functools.wraps(method)
    def run(self: PlannedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        timeout: Any = kwargs.get("timeout", wait)
        return self.write(plan(self.dialect, *args, **kwargs), timeout)

    return run


def writes_for_caller(method: Operation[P, T], plan: Callable[..., Plan[T]]) -> Operation[P, T]:
    """Bind a plan that writes, on the caller's connection if there is one. See `reads`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: PlannedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        given = signature.bind(self, *args, **kwargs).arguments
        del given["self"]
        connection = given.pop("connection", None)
        made = plan(self.dialect, **given)
        return self.write(made) if connection is None else self._on(connection, made)

    return run


class PlannedStore(interface.AsyncStore):
    """An `AsyncStore` whose operations are plans. See interface.py for what each method promises."""

    on_loop = True
    """Whether an event loop runs it; else nothing in it waits for one: see blocking.py."""

    def __init__(self, streams: Registry, settings: Settings, dialect: Dialect) -> None:
        self.streams, self.settings, self.dialect = streams, settings, dialect
        dialect.streams = streams
        dialect.backings = {stream.name: backing_of(stream) for stream in streams if not stream.resettable}
        self.reservations, self.appends = Reservations(self._reserve), Appends(self.write_appended)
        self.outcomes = Outcomes(self._outcomes)
        self._series: dict[str, int] = {}  # by writer, as it was found last
        self.snapshots = snapshots.PlannedSnapshots(self, dialect.store)

    @abc.abstractmethod
    async def read(self, plan: Plan[T], wait: float = 0.0) -> T:
        """Run a plan that writes nothing; ``wait``: seconds for which a step may wait, or work, on a server."""

    @abc.abstractmethod
    async def write(self, plan: Plan[T], wait: float | None = None) -> T:
        """Run a plan that writes; ``wait``: bound of its waits for locks, seconds."""

    @abc.abstractmethod
    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        """Run a plan on the caller's connection, in its transaction."""

    @abc.abstractmethod
    def transaction(self, claim: Claim, connection: Any = None) -> PlannedTransaction: ...

    def effects(self, at: interface.SavedAt) -> AsyncTransaction:
        effects = self.transaction(claims.NO_CLAIM)
        effects.at = at
        return effects

    epoch = reads(FactSource.epoch, schema.epoch)
    sequence = reads(FactSource.sequence, claims.sequence)
    fetch = reads(FactSource.fetch, facts.fetch)
    known = reads(FactSource.known, claims.known)
    newest = reads(FactSource.newest, claims.newest)
    claim = writes(FactLog.claim, claims.claim)
    check_claim = reads(FactLog.check_claim, claims.check_claim)
    heartbeat = writes(FactLog.heartbeat, claims.heartbeat)
    finish = writes(FactLog.finish, fencing.finish)
    load_reader = reads(ReaderPositions.load_reader, readers.load)
    register_reader = writes(ReaderPositions.register_reader, readers.register)
    reset_reader = writes(ReaderPositions.reset_reader, readers.reset)
    save_reader = writes_for_caller(ReaderPositions.save_reader, readers.save)
    note_stopped = writes(ReaderPositions.note_stopped, readers.note_stopped)
    dead_letter = writes_for_caller(ReaderPositions.dead_letter, readers.dead_letter)
    dead_letters = reads(ReaderPositions.dead_letters, readers.dead_letters)
    begin_bootstrap = writes(ReaderPositions.begin_bootstrap, readers.begin_bootstrap)
    save_bootstrap = writes_for_caller(ReaderPositions.save_bootstrap, readers.save_bootstrap)
    bootstraps = reads(ReaderPositions.bootstraps, readers.bootstraps)
    verify = reads(StoreAdmin.verify, claims.verify)
    stored_streams = reads(StoreAdmin.stored_streams, schema.stored_streams)
    prune = writes(StoreAdmin.prune, facts.prune)
    restored = writes(StoreAdmin.restored, fencing.restored, fencing.RESTORE_WAIT)
    status = reads(StoreAdmin.status, schema.status, STATUS_WAIT)

    async def _reserve(self, stream: str, count: int, held: Claim | None) -> list[int]:
        return await self.write(facts.reserve(self.dialect, stream, count, held))

    async def reserve(self, stream: str, count: int, held: Claim | None = None) -> list[int]:
        self.dialect.backing(stream)
        return await (self.reservations.reserve if self.on_loop else self._reserve)(stream, count, held)

    def check_append(self) -> None:
        return

    async def append(self, claim: Claim, appended: interface.Appended) -> None:
        if self.on_loop:
            await self.appends.append(claim, appended)
            return
        appended.group = Group()
        await self.write_appended(claim, appended.group, [appended])

    @property
    def append_wait(self) -> float | None:
        """How long an append, or the end of a series, waits for a lock, seconds; None: as any write does."""
        return None

    async def write_appended(self, claim: Claim, group: Group, given: Sequence[interface.Appended]) -> None:
        """Write a group, all or none. Raises as `FactLog.append` does."""
        wait = self.append_wait
        for _ in range(SERIES_TRIES):
            group.series = self._series.get(claim.writer, 0)
            try:
                found = await self.write(appending.append(self.dialect, claim, given, group.series, wait))
            except Unanswered as error:
                raise CommitUnknown(group, error) from error
            if found is None:
                group.settled = True
                return
            self._series[claim.writer] = found
        raise Unavailable(self.dialect.name, f"the series of {claim.writer!r} went on at each of {SERIES_TRIES} tries")

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]], above: Mapping[str, int] | None = None
    ) -> dict[tuple[str, int], list[bytes]] | None:
        if isinstance(marker, Group):
            if marker.under_way:
                return None
            if not marker.settled:
                wait = self.append_wait
                ending = appending.end_series(self.dialect, claim, marker.series, wait)
                self._series[claim.writer] = await self.write(ending)
                marker.settled = True
            marker = None
        if isinstance(marker, PlannedTransaction) and await marker.still_open():
            return None
        if above or self.dialect.server is None:
            return await self.read(facts.outcome(self.dialect, claim, facts_, above))
        if self.on_loop:
            return await self.outcomes.outcome(claim, marker, facts_)
        return (await self._outcomes(claim, [(marker, facts_)]))[0]

    async def _outcomes(self, claim: Claim, asked: Sequence[tuple[object, Facts]]) -> Sequence[Outcome]:
        return await self.read(facts.outcomes(self.dialect, claim, asked))

    async def rolled_back(self, marker: object) -> bool:
        if isinstance(marker, PlannedTransaction):
            return await marker.rolled_back()
        question = self.dialect.outcome(marker)
        return question is not None and (await self.read(only(question)))[0][0][0] == ROLLED_BACK

    def check_open(self) -> None:
        """Raise Unavailable unless the store is open."""

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        self.check_open()
        return await self.snapshots.agree(self.dialect.backing(stream), part_rows, again)

    def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        self.check_open()
        return self.snapshots.load(self.dialect.backing(agreement.stream), agreement, number)

    async def leave(self, agreement: Agreement) -> None:
        await self.snapshots.leave(agreement)


class PlannedTransaction(AsyncTransaction):
    """What the transactions of these stores have in common. It holds no claim if that is `claims.NO_CLAIM`.

    ``connection``: the driver's own, None before `begin`. ``at``: the saved position that a handler's has to begin at.
    """

    joined: bool = False
    reserves: bool = False
    exclusive: bool = False
    connection: Any = None
    at: interface.SavedAt | None = None

    def __init__(self, store: PlannedStore, claim: Claim, connection: Any) -> None:
        self.store, self.claim, self.connection = store, claim, connection
        # Whose connection it is, and whether code of the application's may have ended the transaction on it.
        self._callers = self._handed_out = connection is not None
        self._pending: list[Sql] = []

    def hold(self, *begin: Control, ids: Mapping[str, int] = {}) -> Plan[Row]:
        """Hold the claim until the end, and take ``ids``, or see that a handler may begin; ``begin`` rides along.
        Returns what `claims.hold` does."""
        dialect = self.store.dialect
        if self.at is not None:
            return readers.stands(dialect, self.at, *begin)
        return claims.hold(dialect, self.claim, *begin, ids=ids)

    @property
    def failures(self) -> type[Exception]:
        """What COMMIT raises when it has failed, or got no answer: in the calling thread no exception of a signal
        handler, which tells nothing of COMMIT."""
        return Exception if self.store.on_loop else BusrepError

    @property
    def marker(self) -> object:
        """This object: it knows whether it has ended."""
        return self

    async def still_open(self) -> bool:
        """Whether it may still become committed, as far as this process knows: the table is asked later."""
        return False

    async def rolled_back(self) -> bool:
        """Whether it is known to have been, once it has ended."""
        return False

    def hand_out(self) -> Any:
        self._handed_out = True
        return self.connection

    async def insert(self, stream: str, facts_: Sequence[interface.FactRows]) -> None:
        """See `AsyncTransaction`; sent together with the next statement or COMMIT: one round trip less."""
        self._pending += facts.insert(self.store.dialect, stream, self.claim.writer, facts_)

    def _take_pending(self) -> list[Sql]:
        pending, self._pending = self._pending, []
        return pending
