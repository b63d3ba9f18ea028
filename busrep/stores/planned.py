"""What the SQL stores have in common: every operation of the interface as a plan, run by the store's executor."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.stores import claims, facts, fencing, readers, report, schema, snapshots
from busrep.stores.backing import Backing, backing_of
from busrep.stores.dialect import Dialect
from busrep.stores.interface import (
    AsyncStore,
    AsyncTransaction,
    Claim,
    FactLog,
    FactRows,
    FactSource,
    Newest,
    ReaderPositions,
    StoreAdmin,
)
from busrep.stores.plans import Plan, Sql, T
from busrep.streams import Registry

P = ParamSpec("P")
Operation = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]

# How long 'db restored' waits for open write transactions, seconds; a person is watching.
RESTORE_WAIT = 30.0
# How long 'db status' counts the rows of a table, seconds.
STATUS_WAIT = 3600.0


# Of a transaction that is no writer's, but for the effects of a handler.
NO_CLAIM = Claim("", 0, "", {}, {}, {})


class Reservations:
    """Reserves for several facts in one round trip: whoever asks while a question is on its way joins the next.

    An ID is never from a question sent before it was asked for (it must be above all known then).
    """

    def __init__(self, ask: Callable[[str, int], Awaitable[list[int]]]) -> None:
        self.ask = ask
        self._waiting: dict[str, list[tuple[int, asyncio.Future[list[int]]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def reserve(self, stream: str, count: int) -> list[int]:
        """``count`` IDs, ascending."""
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(stream, []).append((count, answer))
        if stream not in self._tasks:
            self._tasks[stream] = asyncio.create_task(self._serve(stream), name=f"busrep reserve {stream}")
        return await answer

    async def _serve(self, stream: str) -> None:
        try:
            while waiting := self._waiting.pop(stream, None):
                waiting = [(count, answer) for count, answer in waiting if not answer.done()]
                total = sum(count for count, _ in waiting)
                try:
                    ids = await self.ask(stream, total) if total else []
                except Exception as error:
                    for _, answer in waiting:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                for count, answer in waiting:
                    mine, ids = ids[:count], ids[count:]
                    if not answer.done():  # cancelled meanwhile: its IDs stay holes
                        answer.set_result(mine)
        finally:
            del self._tasks[stream]


def reads(method: Operation[P, T], plan: Callable[Concatenate[Dialect, P], Plan[T]]) -> Operation[P, T]:
    """Bind a plan that writes nothing as a method of `PlannedStore`. Its name, signature and docstring are those of
    ``method``, which interface.py has."""

    @functools.wraps(method)
    def run(self: PlannedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.read(plan(self.dialect, *args, **kwargs))

    return run


def writes(method: Operation[P, T], plan: Callable[Concatenate[Dialect, P], Plan[T]]) -> Operation[P, T]:
    """Bind a plan that writes. See `reads`."""

    @functools.wraps(method)
    def run(self: PlannedStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.write(plan(self.dialect, *args, **kwargs))

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


class PlannedStore(AsyncStore):
    """An `AsyncStore` whose operations are plans. See interface.py for what each method promises."""

    on_loop = True
    """Whether an event loop runs it; else nothing in it waits for one: see blocking.py."""

    def __init__(self, streams: Registry, settings: Settings, dialect: Dialect) -> None:
        self.streams, self.settings, self.dialect = streams, settings, dialect
        self.backings = {stream.name: backing_of(stream) for stream in streams if not stream.resettable}
        self.reservations = Reservations(self._reserve)
        self.snapshots = snapshots.PlannedSnapshots(self.read, dialect, dialect.store, settings.snapshots)

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

    def effects(self) -> AsyncTransaction:
        return self.transaction(NO_CLAIM)

    epoch = reads(FactSource.epoch, schema.epoch)
    known = reads(FactSource.known, claims.known)
    check_claim = reads(FactLog.check_claim, claims.check_claim)
    heartbeat = writes(FactLog.heartbeat, claims.heartbeat)
    stored_streams = reads(StoreAdmin.stored_streams, schema.stored_streams)
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

    def backing(self, stream: str) -> Backing:
        """Where a stream's rows lie: UnknownStream, or ConfigError for one that lives in memory."""
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")
        return self.backings[stream]

    async def verify(self) -> None:
        await self.read(claims.verify(self.dialect, self.backings.values()))

    async def sequence(self, stream: str) -> int | None:
        return await self.read(claims.sequence(self.dialect, self.backing(stream)))

    async def claim(self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None) -> Claim:
        # In a fixed order, so that two claims never wait for each other.
        backings = [self.backing(stream) for stream in sorted(set(streams))]
        now = int(time.time() * 1000)
        return await self.write(claims.claim(self.dialect, writer, backings, timeout, now, again), timeout)

    async def _reserve(self, stream: str, count: int) -> list[int]:
        return await self.write(facts.reserve(self.dialect, stream, count, [self.backing(stream)]))

    async def reserve(self, stream: str, count: int) -> list[int]:
        self.backing(stream)
        return await (self.reservations.reserve if self.on_loop else self._reserve)(stream, count)

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        if isinstance(marker, PlannedTransaction) and await marker.still_open():
            return None
        asked = [(self.backing(stream), token) for stream, token in facts_]
        return await self.read(facts.outcome(self.dialect, marker, asked, claim))

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        return await self.read(facts.fetch(self.dialect, self.backing(question.stream), question))

    async def newest(self, stream: str) -> Newest | None:
        return await self.read(claims.newest(self.dialect, self.backing(stream)))

    async def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:
        return await self.write(fencing.finish(self.dialect, self.backings, writer, incarnation, timeout), timeout)

    def check_open(self) -> None:
        """Raise Unavailable unless the store is open."""

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        self.check_open()
        return await self.snapshots.agree(self.backing(stream), part_rows, again)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        self.check_open()
        pieces = self.snapshots.load(self.backing(agreement.stream), agreement, number)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def leave(self, agreement: Agreement) -> None:
        await self.snapshots.leave(agreement)

    async def prune(
        self,
        *,
        older_than: float | None = None,
        keep: int | None = None,
        reader_cap: float | None = None,
        stream: str | None = None,
    ) -> dict[tuple[str, str], int]:
        if older_than is None and keep is None:
            raise ConfigError("prune needs older_than or keep: without either it would delete everything")
        if stream is None:
            chosen = [backing for backing in self.backings.values() if not backing.own]
        else:
            chosen = [self.backing(stream)]
            if chosen[0].own and keep is None:
                raise ConfigError(f"stream {stream!r} has its own table, without dates: prune it with keep")
        return await self.write(facts.prune(self.dialect, chosen, facts.Kept(older_than, keep, reader_cap)))

    async def restored(self) -> str:
        now = int(time.time() * 1000)
        plan = fencing.restored(self.dialect, list(self.backings.values()), RESTORE_WAIT, now)
        return await self.write(plan, RESTORE_WAIT)

    async def status(self) -> dict[str, Any]:
        return await self.read(report.status(self.dialect, self.backings), STATUS_WAIT)


class PlannedTransaction(AsyncTransaction):
    """What the transactions of these stores have in common. It holds no claim if that is `NO_CLAIM`.

    ``connection`` is the driver's own; None until `begin` has taken one from the store.
    """

    # What COMMIT raises when it has failed, or got no answer.
    failures: type[Exception] = Exception
    joined: bool = False
    reserves: bool = False
    connection: Any = None

    def __init__(self, store: PlannedStore, claim: Claim, connection: Any) -> None:
        self.store, self.claim, self.connection = store, claim, connection
        # Whose connection it is, and whether code of the application's may have ended the transaction on it.
        self._callers = self._handed_out = connection is not None
        self._pending: list[Sql] = []

    @property
    def marker(self) -> object:
        """This object: it knows whether it has ended."""
        return self

    async def still_open(self) -> bool:
        """Whether it may still become committed, as far as this process knows: the table is asked later."""
        return False

    async def reserve(self, stream: str, count: int) -> list[int]:
        raise NotImplementedError

    def hand_out(self) -> Any:
        self._handed_out = True
        return self.connection

    async def insert(self, stream: str, facts_: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`; sent together with the next statement or COMMIT: one round trip less."""
        self._pending += facts.insert(self.store.dialect, self.store.backing(stream), self.claim.writer, facts_)

    def _take_pending(self) -> list[Sql]:
        pending, self._pending = self._pending, []
        return pending
