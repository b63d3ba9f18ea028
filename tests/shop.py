"""What the tests' buses carry: streams of a shop, and settings under which nobody waits for long."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import attrs

from busrep import Settings, Stream
from busrep.stores import open_store
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry

# Beats that may fail to come: on a busy machine, with a disk that others use, half a second is soon gone.
QUICK = Settings(
    heartbeat=0.1, answer_interval=0.005,
    silent_after_beats=10, retry_min=0.02, retry_max=0.2, save_every=0.05, redis_timeout=2.0,
    shutdown_timeout=2.0, poison_after=0.0,
)  # fmt: skip


@attrs.frozen
class Order:
    number: int
    status: str


orders = Stream("orders", Order)
payments = Stream("payments", Order)
typing = Stream("typing", resettable=True)
STREAMS = [orders, payments, typing]


def make_tables(url: str) -> None:
    """Make a store of the shop's streams, for others to open: a fixture that opened it would cost a connection more."""
    open_blocking_store(url, Registry(STREAMS)).init()


@contextlib.asynccontextmanager
async def opened_async_store(url: str, streams: Registry | None = None, **options: Any) -> AsyncIterator[AsyncStore]:
    """As `opened_store`, on an event loop."""
    store = open_store(url, Registry(STREAMS) if streams is None else streams, **options)
    await store.init()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def opened_store(url: str, streams: Registry | None = None, **options: Any) -> Iterator[BlockingStore]:
    """A store of these streams, the shop's if none are given, made if need be."""
    store = open_blocking_store(url, Registry(STREAMS) if streams is None else streams, **options)
    store.init()
    store.open()
    try:
        yield store
    finally:
        store.close()
