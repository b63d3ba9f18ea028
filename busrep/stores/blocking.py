"""Stores for threads: the same operations from the same plans, run in the calling thread.

An `AsyncStore` whose executor never waits for an event loop is a blocking store in disguise: each of its coroutines
runs to its end at the first step. `BlockingStore` takes the disguise off. So there is one text of each operation, and
nothing in it knows which runtime it is for; the databases' modules (blocking_postgres.py, blocking_sqlite.py) hold what
differs: connections, locks, and COMMIT.

No store here starts a thread or opens a connection before it is asked something. All methods may be called from any
thread; a transaction belongs to one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.errors import BusrepError, ClaimBlocked, CommitUnknown
from busrep.settings import Settings
from busrep.stores import split_store_url
from busrep.stores.interface import (
    AsyncStore,
    AsyncTransaction,
    Claim,
    DeadLetter,
    EffectsTransaction,
    FactRows,
    KnownWriter,
    Newest,
    ReaderState,
    Registered,
    StoredStream,
)
from busrep.stores.memory.store import LOOK, MemoryStore, _Name
from busrep.streams import Registry

T = TypeVar("T")


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("a blocking store waited for an event loop")


class BlockingTransaction:
    """An `AsyncTransaction` for threads; see there for what each method promises.

    ``in_doubt``: `commit` was called, and was not refused. So after CommitUnknown; after any exception in `commit` that
    is neither busrep's: a KeyboardInterrupt, or what another signal handler raised, may have come
    before COMMIT was sent or after; and after `commit` itself, for whoever is interrupted before he has noted that it
    was answered. `BlockingStore.outcome` tells.
    """

    def __init__(self, transaction: AsyncTransaction) -> None:
        self._transaction = transaction
        self.in_doubt = False

    @property
    def connection(self) -> Any:
        """See `AsyncTransaction`."""
        return self._transaction.connection

    @property
    def joined(self) -> bool:
        """See `AsyncTransaction`."""
        return self._transaction.joined

    @property
    def marker(self) -> object:
        """See `AsyncTransaction`."""
        return self._transaction.marker

    @property
    def reserves(self) -> bool:
        """Whether IDs have to be reserved in this transaction, by `reserve` before `begin`: if it is rolled back, the
        sequence gives them again."""
        return getattr(self._transaction, "reserves", False)

    def reserve(self, stream: str, count: int) -> list[int]:
        """``count`` new IDs of the stream, until the transaction is rolled back. Raises Unavailable."""
        work: Coroutine[Any, Any, list[int]] = getattr(self._transaction, "reserve")(stream, count)  # noqa: B009
        return complete(work)

    def begin(self) -> None:
        """See `AsyncTransaction`."""
        complete(self._transaction.begin())

    def insert(self, stream: str, facts: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`."""
        complete(self._transaction.insert(stream, facts))

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`."""
        return complete(self._transaction.execute(sql, params))

    def commit(self) -> None:
        """See `AsyncTransaction`."""
        self.in_doubt = True
        try:
            complete(self._transaction.commit())
        except CommitUnknown:
            raise
        except BusrepError:
            self.in_doubt = False
            raise

    def rollback(self) -> bool:
        """See `AsyncTransaction`."""
        return complete(self._transaction.rollback())


class BlockingEffects:
    """An `EffectsTransaction` for threads; see there for what each method promises."""

    def __init__(self, effects: EffectsTransaction) -> None:
        self._effects = effects

    @property
    def connection(self) -> Any:
        """See `EffectsTransaction`."""
        return self._effects.connection

    @property
    def ended(self) -> bool:
        """See `EffectsTransaction`."""
        return self._effects.ended

    def begin(self) -> None:
        """See `EffectsTransaction`."""
        complete(self._effects.begin())

    def commit(self) -> None:
        """See `EffectsTransaction`."""
        complete(self._effects.commit())

    def rollback(self) -> None:
        """See `EffectsTransaction`."""
        complete(self._effects.rollback())


class BlockingStore:
    """An `AsyncStore` for threads; see there for what each method promises.

    ``store``: one whose coroutines never wait for an event loop, such as `open_blocking_store` makes.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    def open(self) -> None:
        """See `AsyncStore`."""
        complete(self._store.open())

    def close(self) -> None:
        """See `AsyncStore`."""
        complete(self._store.close())

    def init(self, redefine: Collection[str] = ()) -> None:
        """See `AsyncStore`."""
        complete(self._store.init(redefine))

    def verify(self) -> None:
        """See `AsyncStore`."""
        complete(self._store.verify())

    def stored_streams(self) -> dict[str, StoredStream]:
        """See `AsyncStore`."""
        return complete(self._store.stored_streams())

    def epoch(self) -> str:
        """See `AsyncStore`."""
        return complete(self._store.epoch())

    def sequence(self, stream: str) -> int | None:
        """See `AsyncStore`."""
        return complete(self._store.sequence(stream))

    def claim(self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None) -> Claim:
        """See `AsyncStore`."""
        return complete(self._store.claim(writer, streams, timeout=timeout, again=again))

    def reserve(self, stream: str, count: int) -> list[int]:
        """See `AsyncStore`."""
        return complete(self._store.reserve(stream, count))

    def effects(self) -> BlockingEffects:
        """See `AsyncStore`."""
        return BlockingEffects(self._store.effects())

    def transaction(self, claim: Claim, connection: Any = None) -> BlockingTransaction:
        """See `AsyncStore`."""
        return BlockingTransaction(self._store.transaction(claim, connection))

    def outcome(
        self, claim: Claim, marker: object, facts: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """See `AsyncStore`."""
        return complete(self._store.outcome(claim, marker, facts))

    def heartbeat(self, claim: Claim, positions: Mapping[str, int]) -> Registered:
        """See `AsyncStore`."""
        return complete(self._store.heartbeat(claim, positions))

    def check_claim(self, claim: Claim) -> None:
        """See `AsyncStore`."""
        complete(self._store.check_claim(claim))

    def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """See `AsyncStore`."""
        return complete(self._store.fetch(question))

    def known(self) -> list[KnownWriter]:
        """See `AsyncStore`."""
        return complete(self._store.known())

    def newest(self, stream: str) -> Newest | None:
        """See `AsyncStore`."""
        return complete(self._store.newest(stream))

    def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:
        """See `AsyncStore`."""
        return complete(self._store.finish(writer, incarnation, timeout=timeout))

    def register_reader(
        self,
        reader: str,
        positions: Mapping[tuple[str, str], int],
        epoch: str,
        *,
        oldest: Collection[tuple[str, str]] = (),
    ) -> None:
        """See `AsyncStore`."""
        complete(self._store.register_reader(reader, positions, epoch, oldest=oldest))

    def load_reader(self, reader: str) -> ReaderState:
        """See `AsyncStore`."""
        return complete(self._store.load_reader(reader))

    def save_reader(
        self, reader: str, changes: Sequence[tuple[str, str, int, int]], epoch: str, connection: Any = None
    ) -> None:
        """See `AsyncStore`."""
        complete(self._store.save_reader(reader, changes, epoch, connection))

    def note_stopped(self, reader: str, stream: str, writer: str, reason: str | None) -> None:
        """See `AsyncStore`."""
        complete(self._store.note_stopped(reader, stream, writer, reason))

    def reset_reader(self, reader: str, positions: Mapping[tuple[str, str], int], epoch: str) -> None:
        """See `AsyncStore`."""
        complete(self._store.reset_reader(reader, positions, epoch))

    def dead_letter(
        self,
        reader: str,
        stream: str,
        writer: str,
        tokens: Sequence[int],
        payloads: Sequence[bytes],
        error: str,
        connection: Any = None,
    ) -> None:
        """See `AsyncStore`."""
        complete(self._store.dead_letter(reader, stream, writer, tokens, payloads, error, connection))

    def dead_letters(self, limit: int) -> list[DeadLetter]:
        """See `AsyncStore`."""
        return complete(self._store.dead_letters(limit))

    def prune(
        self,
        *,
        older_than: float | None = None,
        keep: int | None = None,
        reader_cap: float | None = None,
        stream: str | None = None,
    ) -> dict[tuple[str, str], int]:
        """See `AsyncStore`."""
        return complete(self._store.prune(older_than=older_than, keep=keep, reader_cap=reader_cap, stream=stream))

    def restored(self) -> str:
        """See `AsyncStore`."""
        return complete(self._store.restored())

    def status(self) -> dict[str, Any]:
        """See `AsyncStore`."""
        return complete(self._store.status())


class BlockingMemoryStore(MemoryStore):
    """The memory store without an event loop. It shares its contents with all others of its name."""

    async def _without_transactions(self, writer: str, wait: float) -> _Name:
        looking = super()._without_transactions(writer, 0.0)
        deadline = time.monotonic() + wait
        while True:
            try:
                return await looking
            except ClaimBlocked:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK)  # noqa: ASYNC251 - no loop is meant to run it
            looking = super()._without_transactions(writer, 0.0)


def open_blocking_store(url: str, streams: Registry, *, settings: Settings | None = None) -> BlockingStore:
    """Make the store of a URL, for threads; it is not connected yet. Raises ConfigError, MissingExtra."""
    settings = settings or Settings()
    kind, place = split_store_url(url)
    if kind == "sqlite":
        from busrep.stores.sqlite.blocking import BlockingSqliteStore

        return BlockingStore(BlockingSqliteStore(place, streams, settings))
    if kind == "postgresql":
        from busrep.stores.postgres.blocking import BlockingPostgresStore

        return BlockingStore(BlockingPostgresStore(place, streams, settings))
    return BlockingStore(BlockingMemoryStore(place, streams, settings))
