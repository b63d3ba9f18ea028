"""Stores for threads: the same operations from the same plans, run in the calling thread.

An `AsyncStore` whose executor never waits for an event loop is a blocking store in disguise: each of its coroutines
runs to its end at the first step. `BlockingStore` takes the disguise off. So there is one text of each operation, and
nothing in it knows which runtime it is for; the databases' modules (blocking_postgres.py, blocking_sqlite.py) hold what
differs: connections, locks, and COMMIT.

No store here starts a thread or opens a connection before it is asked something. All methods may be called from any
thread; a transaction belongs to one thread at a time.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from busrep.errors import BusrepError, CommitUnknown
from busrep.settings import Settings
from busrep.stores import split_store_url
from busrep.stores.interface import AsyncStore, AsyncTransaction, Claim, EffectsTransaction
from busrep.stores.memory.store import LOOK, MemoryStore
from busrep.streams import Registry

P = ParamSpec("P")
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


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Make the blocking form of a method: run the one of that name of ``self.wrapped`` to its end."""
    name = method.__name__

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work: Coroutine[Any, Any, T] = getattr(self.wrapped, name)(*args, **kwargs)
        return complete(work)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


def wrapped(name: str) -> Any:
    """Make a property that reads the one of that name of ``self.wrapped``."""
    return property(operator.attrgetter(f"wrapped.{name}"))


class BlockingTransaction:
    """An `AsyncTransaction` for threads; see there for what each method promises.

    ``in_doubt``: `commit` was called, and was not refused. So after CommitUnknown; after any exception in `commit` that
    is neither busrep's: a KeyboardInterrupt, or what another signal handler raised, may have come
    before COMMIT was sent or after; and after `commit` itself, for whoever is interrupted before he has noted that it
    was answered. `BlockingStore.outcome` tells.
    """

    def __init__(self, transaction: AsyncTransaction) -> None:
        self.wrapped = transaction
        self.in_doubt = False

    connection = wrapped("connection")
    joined: bool = wrapped("joined")
    marker = wrapped("marker")
    begin = blocking(AsyncTransaction.begin)
    insert = blocking(AsyncTransaction.insert)
    execute = blocking(AsyncTransaction.execute)
    rollback = blocking(AsyncTransaction.rollback)

    def hand_out(self) -> Any:
        """See `AsyncTransaction`."""
        return self.wrapped.hand_out()

    @property
    def reserves(self) -> bool:
        """Whether IDs have to be reserved in this transaction, by `reserve` before `begin`: if it is rolled back, the
        sequence gives them again."""
        return getattr(self.wrapped, "reserves", False)

    def reserve(self, stream: str, count: int) -> list[int]:
        """``count`` new IDs of the stream, until the transaction is rolled back. Raises Unavailable."""
        work: Coroutine[Any, Any, list[int]] = getattr(self.wrapped, "reserve")(stream, count)  # noqa: B009
        return complete(work)

    def commit(self) -> None:
        """See `AsyncTransaction`."""
        self.in_doubt = True
        try:
            complete(self.wrapped.commit())
        except CommitUnknown:
            raise
        except BusrepError:
            self.in_doubt = False
            raise


class BlockingEffects:
    """An `EffectsTransaction` for threads; see there for what each method promises."""

    def __init__(self, effects: EffectsTransaction) -> None:
        self.wrapped = effects

    connection = wrapped("connection")
    ended: bool = wrapped("ended")
    begin = blocking(EffectsTransaction.begin)
    commit = blocking(EffectsTransaction.commit)
    rollback = blocking(EffectsTransaction.rollback)


class BlockingStore:
    """An `AsyncStore` for threads; see there for what each method promises.

    ``store``: one whose coroutines never wait for an event loop, such as `open_blocking_store` makes.
    """

    def __init__(self, store: AsyncStore) -> None:
        self.wrapped = store

    open = blocking(AsyncStore.open)
    close = blocking(AsyncStore.close)
    init = blocking(AsyncStore.init)
    verify = blocking(AsyncStore.verify)
    stored_streams = blocking(AsyncStore.stored_streams)
    epoch = blocking(AsyncStore.epoch)
    sequence = blocking(AsyncStore.sequence)
    claim = blocking(AsyncStore.claim)
    reserve = blocking(AsyncStore.reserve)
    outcome = blocking(AsyncStore.outcome)
    heartbeat = blocking(AsyncStore.heartbeat)
    check_claim = blocking(AsyncStore.check_claim)
    fetch = blocking(AsyncStore.fetch)
    known = blocking(AsyncStore.known)
    newest = blocking(AsyncStore.newest)
    finish = blocking(AsyncStore.finish)
    register_reader = blocking(AsyncStore.register_reader)
    load_reader = blocking(AsyncStore.load_reader)
    save_reader = blocking(AsyncStore.save_reader)
    note_stopped = blocking(AsyncStore.note_stopped)
    reset_reader = blocking(AsyncStore.reset_reader)
    dead_letter = blocking(AsyncStore.dead_letter)
    dead_letters = blocking(AsyncStore.dead_letters)
    prune = blocking(AsyncStore.prune)
    restored = blocking(AsyncStore.restored)
    status = blocking(AsyncStore.status)

    def effects(self) -> BlockingEffects:
        """Return a transaction for the effects of a handler. See `AsyncStore.effects`."""
        return BlockingEffects(self.wrapped.effects())

    def transaction(self, claim: Claim, connection: Any = None) -> BlockingTransaction:
        """Return a transaction for facts. See `AsyncStore.transaction`."""
        return BlockingTransaction(self.wrapped.transaction(claim, connection))


class BlockingMemoryStore(MemoryStore):
    """The memory store without an event loop. It shares its contents with all others of its name."""

    async def _pause(self) -> None:
        time.sleep(LOOK)  # noqa: ASYNC251 - no loop is meant to run it


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
