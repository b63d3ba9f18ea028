"""How a process of the soak runs: on an event loop, or in threads. Its load and its handlers are one text for both.

In threads, each coroutine of the load is run in a thread of its own by `complete`, and never waits for an event loop:
what looks like asyncio there, `InThreads` and `blocking_connection`, blocks instead. The process's own life (the
parent's messages, the reports) is on an event loop either way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import attrs
import redis.sentinel
from redis.asyncio.sentinel import Sentinel

from busrep import asyncio as on_loop
from busrep import sync
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.stores.plans import complete
from busrep.streams import Registry, Stream
from tests.proof.soak.database import application_connection, blocking_connection
from tests.proof.soak.task import NAME, SETTINGS, Task

T = TypeVar("T")


class Bus(Protocol):
    """What the soak uses of `busrep.asyncio.Bus`; see there."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    def write(self, *streams: Stream[Any], connection: Any = None) -> Any: ...
    async def publish(self, stream: Stream[Any], rows: Sequence[Any]) -> list[int]: ...
    async def settle(self) -> None: ...
    def subscribe(self, *streams: Stream[Any]) -> Callable[[Any], Any]: ...
    def follow(self, *streams: Stream[Any]) -> AsyncIterator[Any]: ...
    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None: ...
    def on_reset(self) -> Callable[[Any], Any]: ...
    def on_missed(self) -> Callable[[Any], Any]: ...
    def positions(self) -> dict[str, dict[str, int]]: ...
    def statistics(self) -> dict[str, Any]: ...


@attrs.frozen
class Runtime:
    """``sleep`` and ``connect`` (the application's own connection to a URL) are for coroutines that ``run`` runs."""

    sleep: Callable[[float], Awaitable[None]]
    connect: Callable[[str], Awaitable[Any]]
    run: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
    make_bus: Callable[[Task], Bus]


def runtime_of(task: Task) -> Runtime:
    """The one that a task wants."""
    return LOOP if task.beats is None else THREADS


def link_to(routes: Mapping[str, str], address: tuple[str, int]) -> tuple[str, int]:
    """This process's own link to the server at an address."""
    link = urlsplit(f"//{routes['{}:{}'.format(*address)]}")
    return link.hostname or "", link.port or 0


def _options(task: Task) -> dict[str, Any]:
    """Of a bus of this task's, on either runtime."""
    return {
        "name": NAME,
        "streams": task.streams,
        "writer": task.who if task.writes else None,
        "reader": task.who if task.reads in ("loose", "exact") else None,
        "settings": SETTINGS,
        "on_too_old": "skip",
        "require_redis": False,  # it may be away while this process is started
    }


def _reader_store(task: Task) -> str | None:
    return task.reader_store if task.reads and task.reader_store != task.store else None


# -- on an event loop -----------------------------------------------------------------------------


class Rerouted(Sentinel):
    """Reaches each server through this process's own link to it; Sentinel knows where they really are."""

    def __init__(self, task: Task) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            [("127.0.0.1", task.sentinel)],
            sentinel_kwargs={"socket_timeout": 1.0},
            username=task.user,
            password=task.password,
        )
        self._routes = task.routes

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """The address of this process's link to the master."""
        return link_to(self._routes, await super().discover_master(service_name))


class OnLoop(on_loop.Bus):
    """A bus that closes its Sentinel with it."""

    def __init__(self, task: Task) -> None:
        self._sentinel = Rerouted(task)
        registry, other = Registry(task.streams), _reader_store(task)
        super().__init__(
            task.tcp or self._sentinel.master_for(task.service),
            BusOptions(
                store=open_store(task.store, registry, settings=SETTINGS),
                reader_store=None if other is None else open_store(other, registry, settings=SETTINGS),
                **_options(task),
            ),
        )

    async def close(self) -> None:
        """As any bus."""
        try:
            await super().close()
        finally:
            for one in self._sentinel.sentinels:
                await one.aclose()


async def _as_it_is(work: Coroutine[Any, Any, T]) -> T:
    return await work


LOOP = Runtime(asyncio.sleep, application_connection, _as_it_is, OnLoop)

# -- in threads -----------------------------------------------------------------------------------


class BlockingRerouted(redis.sentinel.Sentinel):
    """`Rerouted` for threads."""

    def __init__(self, task: Task) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            [("127.0.0.1", task.sentinel)],
            sentinel_kwargs={"socket_timeout": 1.0},
            username=task.user,
            password=task.password,
        )
        self._routes = task.routes

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The address of this process's link to the master."""
        return link_to(self._routes, super().discover_master(service_name))  # type: ignore[no-untyped-call]


class _Fact:
    """`busrep.sync.Fact`, to be used like asyncio's."""

    def __init__(self, fact: sync.Fact[Any]) -> None:
        self._fact = fact
        self.add = fact.add

    @property
    def ids(self) -> Mapping[str, int]:
        return self._fact.ids

    async def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        self._fact.execute(sql, params)

    async def __aenter__(self) -> _Fact:
        self._fact.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fact.__exit__(kind, error, trace)


@attrs.frozen
class _Batch:
    """`busrep.sync.Batch`, to be used like asyncio's."""

    batch: sync.Batch[Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)

    async def save(self, connection: Any) -> None:
        self.batch.save(connection.blocking)


class InThreads:
    """`busrep.sync.Bus`, to be used like asyncio's."""

    def __init__(self, task: Task) -> None:
        self._sentinel = BlockingRerouted(task)
        self._bus = sync.Bus(
            self._sentinel.master_for(task.service),  # type: ignore[no-untyped-call]
            BusOptions(store=task.store, reader_store=_reader_store(task), beats=bool(task.beats), **_options(task)),
        )
        self.on_reset, self.on_missed, self.positions = self._bus.on_reset, self._bus.on_missed, self._bus.positions

    # For the process's event loop, which waits for another thread.

    async def open(self) -> None:
        """See `Bus`."""
        await asyncio.to_thread(self._bus.open)

    async def close(self) -> None:
        """See `Bus`."""
        await asyncio.to_thread(self._bus.close)
        self._sentinel.close()

    async def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """See `Bus`."""
        await asyncio.to_thread(self._bus.wait_for, stream, writer, token, timeout)

    def statistics(self) -> dict[str, Any]:
        """As asyncio's: one that lost its name for good is fenced; one that was finished for its silence is not."""
        found = self._bus.statistics()
        writer, link = found["writer"], found["link"]
        return {
            **found,
            "writer": None if writer is None else {**writer, "fenced": writer["lost"]},
            "link": {**link, **(link["reading"] or {})},
        }

    # For coroutines that are completed in the calling thread.

    def write(self, *streams: Stream[Any], connection: Any = None) -> _Fact:
        """See `Bus`."""
        return _Fact(self._bus.write(*streams, connection=None if connection is None else connection.blocking))

    async def publish(self, stream: Stream[Any], rows: Sequence[Any]) -> list[int]:
        """See `Bus`."""
        return self._bus.publish(stream, rows)

    async def settle(self) -> None:
        """See `Bus`."""
        self._bus.settle()

    def subscribe(self, *streams: Stream[Any]) -> Callable[[Any], Any]:
        """See `Bus`."""
        return lambda handler: self._bus.subscribe(*streams)(lambda batch: complete(handler(_Batch(batch))))

    async def follow(self, *streams: Stream[Any]) -> AsyncIterator[_Batch]:
        """See `Bus`."""
        batches: Iterator[sync.Batch[Any]] = self._bus.follow(*streams)
        for batch in batches:
            yield _Batch(batch)


async def _block(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - no loop runs it


async def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.to_thread(complete, work)


THREADS = Runtime(_block, blocking_connection, _in_a_thread, InThreads)
