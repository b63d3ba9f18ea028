"""What the helpers of the other commands share: waiting to be woken, and background work that ends with its bus.

Commands are news (at most once): whatever waits for one also has a time after which it goes on without.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, Generic, TypeVar

from busrep.errors import Closed, ConfigError

from ..asyncio.bus import Bus
from ..runtime.tasks import call, log_failure, wait_until_set

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")

# Waits of one helper at a time, as ``Settings.waiters``: beyond it something waits that nobody ends.
WAITERS = 10_000


def run_until_closed(bus: Bus, work: Coroutine[Any, Any, None], name: str, last: Callable[[], Any]) -> None:
    """Run ``work`` as a task until the bus closes; then call ``last`` (async or not), while the link still stands."""
    task = asyncio.create_task(work, name=f"busrep-{name}")
    task.add_done_callback(log_failure)

    @bus.before_close
    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])
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


class Waiters(Generic[KeyT]):
    """Who waits for what: any number of waiters per key, all woken together. ``most``: of all keys at a time."""

    def __init__(self, most: int = WAITERS) -> None:
        self._most = most
        self._waiting: dict[KeyT, dict[asyncio.Event, None]] = {}
        self._closed = False
        self.count = 0
        """How many wait now."""

    @contextlib.contextmanager
    def waiting(self, key: KeyT) -> Iterator[asyncio.Event]:
        """An event that is set whenever the key is woken; clear it to wait again.

        Raises Closed, and ConfigError when too many wait.
        """
        self.check_open()
        if self.count >= self._most:
            raise ConfigError(f"{self._most} wait already: raise waiters=, or wait for less at a time")
        event = asyncio.Event()
        self._waiting.setdefault(key, {})[event] = None
        self.count += 1
        try:
            yield event
        finally:
            self.count -= 1
            events = self._waiting[key]
            del events[event]
            if not events:
                del self._waiting[key]

    async def wait(self, key: KeyT, timeout: float) -> bool:
        """Wait to be woken: True, or False after ``timeout`` seconds. Raises as ``waiting``."""
        with self.waiting(key) as event:
            woken = await wait_until_set(event, timeout)
        self.check_open()
        return woken

    def wake(self, key: KeyT) -> None:
        """Wake all that wait for the key."""
        for event in self._waiting.get(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake all, whatever they wait for."""
        for key in self._waiting:
            self.wake(key)

    def close(self) -> None:
        """Wake all for good: they raise Closed."""
        self._closed = True
        self.wake_all()

    def check_open(self) -> None:
        """Raises Closed once closed."""
        if self._closed:
            raise Closed
