"""A bus for code without an event loop, threads among it.

::

    with BlockingBus(busrep.connect(...)) as blocking:
        id = blocking.write(orders, Order(1))
        log = blocking.mixed([orders], operations=100, seed=1)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from busrep.asyncio import Batch, Bus
from busrep.streams import Stream
from busrep.testing.load import Log, mixed

T = TypeVar("T")


class BlockingBus:
    """A bus for blocking code: ``with BlockingBus(bus) as blocking``; it is opened, and closed, in a thread's loop.

    ``bus``: not open yet, or a function that makes it there. The methods may be called from many threads at a time.
    What handlers do, they do in that thread. Errors are those of the bus, and TimeoutError after ``timeout`` seconds.
    """

    def __init__(self, bus: Bus | Callable[[], Bus], *, timeout: float = 30.0) -> None:
        self._given, self.timeout = bus, timeout
        self.bus: Bus

    def __enter__(self) -> BlockingBus:
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="blocking-bus", daemon=True)
        self._thread.start()
        try:
            opened.result()
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._ended.result()

    def _run(self, opened: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._live(opened))
        except BaseException as error:
            (self._ended if opened.done() else opened).set_exception(error)
        else:
            self._ended.set_result(None)

    async def _live(self, opened: concurrent.futures.Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.bus = self._given if isinstance(self._given, Bus) else self._given()
        async with self.bus:
            opened.set_result(None)
            await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the bus's loop and wait for it; ``blocking.call(blocking.bus.settle())``."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.timeout if timeout is None else timeout)
        except BaseException:
            future.cancel()
            raise

    def write(self, stream: Stream[Any], *rows: Any) -> int:
        """Write one fact; gives its ID."""

        async def write() -> int:
            async with self.bus.write(stream) as fact:
                for row in rows:
                    fact.add(row)
            return fact.id

        return self.call(write())

    def publish(self, stream: Stream[Any], rows: Sequence[Any]) -> list[int]:
        """Write each row as a fact of its own; gives their IDs."""
        return self.call(self.bus.publish(stream, rows))

    def subscribe(self, *streams: Stream[Any]) -> Callable[[Callable[[Batch[Any]], Any]], Callable[[Batch[Any]], Any]]:
        """As ``Bus.subscribe``."""

        async def register(handler: Callable[[Batch[Any]], Any]) -> Callable[[Batch[Any]], Any]:
            return self.bus.subscribe(*streams)(handler)

        return lambda handler: self.call(register(handler))

    def wait_for(self, stream: Stream[Any], writer: str, token: int, timeout: float = 5.0) -> None:
        """As ``Bus.wait_for``."""
        self.call(self.bus.wait_for(stream, writer, token, timeout), timeout + self.timeout)

    def mixed(self, streams: Sequence[Stream[Any]], *, operations: int, seed: int, hold: float = 0.02) -> Log:
        """As `mixed`, one operation at a time and each waited for: call it in as many threads as shall compete."""
        log = Log(self.bus.writer or "")
        for number in range(operations):
            work = mixed(self.bus, streams, operations=1, seed=seed * 1_000_003 + number, at_once=1, hold=hold)
            log.add(self.call(work))
        return log
