"""Stores for threads: the same operations from the same plans, run in the calling thread.

An `AsyncStore` whose executor never waits for an event loop is a blocking store in disguise: each of its coroutines
runs to its end at the first step. `BlockingStore` takes the disguise off. So there is one text of each operation, and
nothing in it knows which runtime it is for. Each database's own blocking.py holds what differs: connections, locks, and
COMMIT.

No store here starts a thread or opens a connection before it is asked something. All methods may be called from any
thread; a transaction belongs to one thread at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from busrep.settings import Settings
from busrep.stores import store_of
from busrep.stores.interface import AsyncStore, AsyncTransaction, Claim, SavedAt
from busrep.stores.plans import complete
from busrep.streams import Registry

P = ParamSpec("P")
T = TypeVar("T")


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
    """An `AsyncTransaction` for threads; see there for what each method promises."""

    def __init__(self, transaction: AsyncTransaction) -> None:
        self.wrapped = transaction

    connection = wrapped("connection")
    joined: bool = wrapped("joined")
    marker = wrapped("marker")
    ended: bool = wrapped("ended")
    claimed: bool = wrapped("claimed")
    reserves: bool = wrapped("reserves")
    exclusive: bool = wrapped("exclusive")
    hand_out: Callable[[], Any] = wrapped("hand_out")
    begin = blocking(AsyncTransaction.begin)
    insert = blocking(AsyncTransaction.insert)
    execute = blocking(AsyncTransaction.execute)
    commit = blocking(AsyncTransaction.commit)
    rollback = blocking(AsyncTransaction.rollback)


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
    append = blocking(AsyncStore.append)
    outcome = blocking(AsyncStore.outcome)
    rolled_back = blocking(AsyncStore.rolled_back)
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

    def effects(self, at: SavedAt) -> BlockingTransaction:
        """Return a transaction for the effects of a handler. See `AsyncStore.effects`."""
        return BlockingTransaction(self.wrapped.effects(at))

    def transaction(self, claim: Claim, connection: Any = None) -> BlockingTransaction:
        """Return a transaction for facts. See `AsyncStore.transaction`."""
        return BlockingTransaction(self.wrapped.transaction(claim, connection))


def open_blocking_store(url: str, streams: Registry, *, settings: Settings | None = None) -> BlockingStore:
    """Make the store of a URL, for threads; it is not connected yet. Raises ConfigError, MissingExtra."""
    return BlockingStore(store_of(url, streams, settings, blocking=True))
