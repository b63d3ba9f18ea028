"""How a process runs: on an event loop, or in threads. Its reads and writes are one text for both, as in the soak.

In threads each lane is a coroutine that a thread completes without an event loop: what looks like asyncio blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import attrs

from busrep import sync
from busrep.asyncio import Bus
from busrep.stores.plans import complete
from busrep.streams import Stream
from tests.proof.stale import items


@attrs.frozen
class Runtime:
    """``sleep``, ``connect`` and ``call`` (of a function that blocks) are for coroutines that ``run`` runs."""

    sleep: Callable[[float], Awaitable[None]]
    connect: Callable[..., Awaitable[Any]]
    call: Callable[..., Awaitable[Any]]
    run: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]


async def _as_it_is(work: Coroutine[Any, Any, Any]) -> Any:
    return await work


async def _in_a_thread(work: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.to_thread(complete, work)


async def _block(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - no loop runs it


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


LOOP = Runtime(asyncio.sleep, items.connect, asyncio.to_thread, _as_it_is)
THREADS = Runtime(_block, items.connect_blocking, _call, _in_a_thread)


class _Fact:
    """`busrep.sync.Fact`, to be used like asyncio's."""

    def __init__(self, fact: sync.Fact[Any]) -> None:
        self.fact = fact

    async def execute(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]:
        return list(self.fact.execute(sql, params))

    async def __aenter__(self) -> _Fact:
        self.fact.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.fact.__exit__(kind, error, trace)


@attrs.frozen
class InThreads:
    """`busrep.sync.Bus`, to be used like asyncio's, by coroutines that a thread completes; but for open and close."""

    bus: sync.Bus

    async def open(self) -> None:
        """See `Bus`."""
        await asyncio.to_thread(self.bus.open)

    async def close(self) -> None:
        """See `Bus`."""
        await asyncio.to_thread(self.bus.close)

    def write(self, *streams: Stream[Any], connection: Any = None) -> _Fact:
        """See `Bus`."""
        return _Fact(self.bus.write(*streams, connection=None if connection is None else connection.blocking))

    async def settle(self) -> None:
        """See `Bus`."""
        self.bus.settle()

    def statistics(self) -> dict[str, Any]:
        """See `Bus`; fenced is who lost its name for good."""
        found = self.bus.statistics()
        writer = found["writer"]
        return {**found, "writer": None if writer is None else {**writer, "fenced": writer["lost"]}}


def fact_of(fact: Any) -> Any:
    """The fact as busrep knows it."""
    return fact.fact if isinstance(fact, _Fact) else fact


AnyBus = Bus | InThreads
