"""What the helpers of the other commands share: waiting to be woken, and background work that ends with its bus.

Commands are news (at most once): whatever waits for one also has a time after which it goes on without.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from busrep.errors import Closed, ConfigError

from ..asyncio.bus import Bus
from ..runtime.tasks import Tasks, call, log_failure, wait_until_set

log = logging.getLogger("busrep.commands")

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")

# Waits of one helper at a time, as ``Settings.waiters``: beyond it something waits that nobody ends.
WAITERS = 10_000


def run_until_closed(
    bus: Bus, work: Callable[[], Coroutine[Any, Any, None]], name: str, last: Callable[[], Any]
) -> None:
    """Run ``work()`` as a task until the bus closes; then call ``last`` (async or not), while the link still stands."""
    tasks = Tasks(bus.settings)
    tasks.spawn(work, name, again=True)

    @bus.before_close
    async def end() -> None:
        await tasks.stop(bus.settings.shutdown_timeout)
        await call(last)


# An event loop refers to its tasks weakly.
_UNDER_WAY: set[asyncio.Task[Any]] = set()


def in_background(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin it, in a task that runs to its end whatever becomes of the caller."""
    task = asyncio.create_task(work, name="busrep-news")
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    return task


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end, also when the caller is cancelled; what it raises then is logged."""
    task = in_background(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(log_failure)
        raise


async def call_all(handlers: Iterable[Callable[[T], Any]], news: T, what: str) -> None:
    """Call handlers of ``what`` (async or not) in turn. What one raises is logged and keeps nothing from the others."""
    for handler in list(handlers):
        try:
            await call(handler, news)
        except Exception:
            log.exception("a handler of %s failed", what)


class Waiters(Generic[KeyT]):
    """Who waits for what: any number of waiters per key, all woken together. ``most``: of all keys at a time."""

    def __init__(self, most: int = WAITERS) -> None:
        self._most = most
        # Those who wait hold the event; without them it is gone.
        self.events: WeakValueDictionary[KeyT, asyncio.Event] = WeakValueDictionary()
        self._closed = False
        self.count = 0
        """How many wait now."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Somebody waits meanwhile. Raises ConfigError when too many do."""
        if self.count >= self._most:
            raise ConfigError(f"{self._most} wait already: wait for less at a time")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    def next_wake(self, key: KeyT) -> asyncio.Event:
        """An event that is set when the key is woken next. Raises Closed."""
        if self._closed:
            raise Closed
        return self.events.setdefault(key, asyncio.Event())

    async def wait(self, key: KeyT, timeout: float) -> bool:
        """Wait to be woken: True, or False after ``timeout`` seconds. Raises Closed, ConfigError."""
        with self.counted():
            woken = await wait_until_set(self.next_wake(key), timeout)
        if self._closed:
            raise Closed
        return woken

    def wake(self, key: KeyT) -> None:
        """Wake all that wait for the key."""
        if (event := self.events.pop(key, None)) is not None:
            event.set()

    def wake_all(self) -> None:
        """Wake all, whatever they wait for."""
        for key in list(self.events):
            self.wake(key)

    def close(self) -> None:
        """Wake all for good: they raise Closed."""
        self._closed = True
        self.wake_all()
