"""What the SQL stores have in common: every operation of the interface as a plan, run by the store's executor."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.snapshots import Agreement, BootstrapProgress
from busrep.errors import ConfigError
from busrep.settings import Settings
from busrep.stores import bootstraps, claims, facts, readers, schema, snapshots
from busrep.stores.backing import Backing, backing_of
from busrep.stores.dialect import Dialect
from busrep.stores.interface import (
    AsyncTransaction,
    Claim,
    DeadLetter,
    EffectsTransaction,
    KnownWriter,
    Newest,
    ReaderState,
    Registered,
    StoredStream,
)
from busrep.stores.plans import Plan, T
from busrep.streams import Registry

# How long 'db restored' waits for open write transactions, seconds; a person is watching.
RESTORE_WAIT = 30.0
# How long 'db status' counts the rows of a table, seconds.
STATUS_WAIT = 3600.0


class Reservations:
    """Reserves for several facts in one round trip: whoever asks while a question is on its way joins the next.

    An ID is never from a question sent before it was asked for (9.15: it must be above all known then).
    """

    def __init__(self, ask: Callable[[str, int], Awaitable[list[int]]]) -> None:
        self._ask = ask
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
                    ids = await self._ask(stream, total) if total else []
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


class PlannedStore(abc.ABC):
    """An `AsyncStore` whose operations are plans. See interface.py for what each method promises."""

    def __init__(self, streams: Registry, settings: Settings, dialect: Dialect) -> None:
        self.streams, self.settings, self.dialect = streams, settings, dialect
        self.backings = {stream.name: backing_of(stream) for stream in streams if not stream.resettable}
        self._reservations = Reservations(self._reserve)

    @abc.abstractmethod
    async def _read(self, plan: Plan[T], wait: float = 0.0) -> T:
        """Run a plan that writes nothing; ``wait``: seconds for which a step may wait, or work, on a server."""

    @abc.abstractmethod
    async def _write(self, plan: Plan[T], wait: float | None = None) -> T:
        """Run a plan that writes; ``wait``: bound of its waits for locks, seconds."""

    @abc.abstractmethod
    async def _on(self, connection: Any, plan: Plan[T]) -> T:
        """Run a plan on the caller's connection, in its transaction."""

    @abc.abstractmethod
    def effects(self) -> EffectsTransaction: ...  # noqa: D102

    @abc.abstractmethod
    def transaction(self, claim: Claim, connection: Any = None) -> AsyncTransaction: ...  # noqa: D102

    def backing(self, stream: str) -> Backing:
        """Where a stream's rows lie: UnknownStream, or ConfigError for one that lives in memory."""
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")
        return self.backings[stream]

    async def verify(self) -> None:  # noqa: D102
        await self._read(claims.verify(self.dialect, self.backings.values()))

    async def stored_streams(self) -> dict[str, StoredStream]:  # noqa: D102
        return await self._read(schema.stored_streams())

    async def epoch(self) -> str:  # noqa: D102
        return await self._read(schema.epoch())

    async def sequence(self, stream: str) -> int | None:  # noqa: D102
        return await self._read(claims.sequence(self.dialect, self.backing(stream)))

    async def claim(  # noqa: D102
        self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None
    ) -> Claim:
        # In a fixed order, so that two claims never wait for each other.
        backings = [self.backing(stream) for stream in sorted(set(streams))]
        now = int(time.time() * 1000)
        return await self._write(claims.claim(self.dialect, writer, backings, timeout, now, again), timeout)

    async def _reserve(self, stream: str, count: int) -> list[int]:
        return await self._write(facts.reserve(self.dialect, stream, count, [self.backing(stream)]))

    async def reserve(self, stream: str, count: int) -> list[int]:  # noqa: D102
        self.backing(stream)
        return await self._reservations.reserve(stream, count)

    async def outcome(  # noqa: D102
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        asked = [(self.backing(stream), token) for stream, token in facts_]
        return await self._read(facts.outcome(self.dialect, marker, asked, claim))

    async def heartbeat(  # noqa: D102
        self, claim: Claim, positions: Mapping[str, int]
    ) -> Registered:
        return await self._write(claims.heartbeat(self.dialect, claim, positions))

    async def check_claim(self, claim: Claim) -> None:  # noqa: D102
        await self._read(claims.check_claim(self.dialect, claim))

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:  # noqa: D102
        return await self._read(facts.fetch(self.dialect, self.backing(question.stream), question))

    async def known(self) -> list[KnownWriter]:  # noqa: D102
        return await self._read(claims.known(self.dialect))

    async def newest(self, stream: str) -> Newest | None:  # noqa: D102
        return await self._read(claims.newest(self.dialect, self.backing(stream)))

    async def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:  # noqa: D102
        return await self._write(claims.finish(self.dialect, self.backings, writer, incarnation, timeout), timeout)

    async def register_reader(  # noqa: D102
        self,
        reader: str,
        positions: Mapping[tuple[str, str], int],
        epoch: str,
        *,
        oldest: Collection[tuple[str, str]] = (),
    ) -> None:
        await self._write(readers.register(self.dialect, reader, positions, epoch, oldest))

    async def load_reader(self, reader: str) -> ReaderState:  # noqa: D102
        return await self._read(readers.load(reader))

    async def save_reader(  # noqa: D102
        self,
        reader: str,
        changes: Sequence[tuple[str, str, int, int]],
        epoch: str,
        connection: Any = None,
        *,
        bootstraps: Mapping[str, str] | None = None,
    ) -> None:
        if changes:
            plan = readers.save(self.dialect, reader, changes, epoch, bootstraps)
            await (self._write(plan) if connection is None else self._on(connection, plan))

    async def note_stopped(  # noqa: D102
        self, reader: str, stream: str, writer: str, reason: str | None
    ) -> None:
        await self._write(readers.note_stopped(reader, stream, writer, reason))

    async def reset_reader(  # noqa: D102
        self, reader: str, positions: Mapping[tuple[str, str], int], epoch: str
    ) -> None:
        await self._write(readers.reset(self.dialect, reader, positions, epoch))

    async def begin_bootstrap(  # noqa: D102
        self, reader: str, agreement: Agreement, *, syncs: int, reason: str
    ) -> str:
        return await self._write(bootstraps.begin(self.dialect, reader, agreement, syncs, reason))

    async def save_bootstrap(  # noqa: D102
        self,
        reader: str,
        stream: str,
        bootstrap_id: str,
        *,
        parts: int,
        applied: int,
        rows: int,
        bytes: int,  # noqa: A002
        state: str,
        connection: Any = None,
    ) -> None:
        plan = bootstraps.save(self.dialect, reader, stream, bootstrap_id, parts, applied, rows, bytes, state)
        await (self._write(plan) if connection is None else self._on(connection, plan))

    async def bootstraps(self, reader: str | None = None) -> list[BootstrapProgress]:  # noqa: D102
        return await self._read(bootstraps.listed(self.dialect, reader))

    # Of a store that has nothing better: each in one transaction, a part at once.

    async def agree(  # noqa: D102
        self, stream: str, *, part_rows: int, again: Agreement | None = None
    ) -> Agreement:
        plan = snapshots.agree(self.dialect, self.backing(stream), part_rows, again, self.dialect.name)
        agreement, _ = await self._read(snapshots.in_snapshot(plan))
        return agreement

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:  # noqa: D102
        backing = self.backing(agreement.stream)
        plan = snapshots.rows_of_part(self.dialect, backing, agreement, number)
        rows = await self._read(snapshots.in_snapshot(plan))
        for at in range(0, len(rows), snapshots.PIECE_ROWS):
            yield snapshots.text_of(self.dialect, backing, rows[at : at + snapshots.PIECE_ROWS])

    async def leave(self, agreement: Agreement) -> None:  # noqa: D102, B027 - nothing is held
        pass

    async def dead_letter(  # noqa: D102
        self,
        reader: str,
        stream: str,
        writer: str,
        tokens: Sequence[int],
        payloads: Sequence[bytes],
        error: str,
        connection: Any = None,
    ) -> None:
        plan = readers.dead_letter(self.dialect, reader, stream, writer, tokens, payloads, error)
        await (self._write(plan) if connection is None else self._on(connection, plan))

    async def dead_letters(self, limit: int) -> list[DeadLetter]:  # noqa: D102
        return await self._read(readers.dead_letters(self.dialect, limit))

    async def prune(  # noqa: D102
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
        return await self._write(facts.prune(self.dialect, chosen, older_than, keep, reader_cap))

    async def restored(self) -> str:  # noqa: D102
        now = int(time.time() * 1000)
        plan = claims.restored(self.dialect, list(self.backings.values()), RESTORE_WAIT, now)
        return await self._write(plan, RESTORE_WAIT)

    async def status(self) -> dict[str, Any]:  # noqa: D102
        return await self._read(schema.status(self.dialect, self.backings), STATUS_WAIT)
