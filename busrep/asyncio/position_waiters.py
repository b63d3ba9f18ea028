"""Who waits until a (stream, writer) has been handled up to a token."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterable

from busrep.core.catchup import Key
from busrep.errors import BusrepError, ConfigError

_Waiter = tuple[int, int, "asyncio.Future[None]"]  # token, a number that makes it unique, what to wake


def refuse(future: asyncio.Future[None], error: BaseException) -> None:
    """Raise an error where the future is awaited, unless it is done."""
    if not future.done():
        future.set_exception(error)


class PositionWaiters:
    """A heap of tokens per (stream, writer). ``most``: how many may wait at a time (`Settings.waiters`)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiters: dict[Key, list[_Waiter]] = {}
        self._numbers = itertools.count()
        self.count = 0

    async def wait(self, key: Key, token: int) -> None:
        """Return once `wake` was called with that token or a higher one. Raises ConfigError where too many wait, and
        what `refuse` was called with."""
        if self.count >= self._most:
            raise ConfigError(f"more than {self._most} waits at a time: raise Settings.waiters")
        waiter = (token, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters.setdefault(key, []), waiter)
        self.count += 1
        try:
            await waiter[2]
        finally:
            self.count -= 1
            waiters = self._waiters.get(key, [])
            if waiter in waiters:  # given up before it was reached
                waiters.remove(waiter)
                heapq.heapify(waiters)
            if not waiters:
                self._waiters.pop(key, None)

    @property
    def awaited(self) -> list[Key]:
        """What somebody waits for."""
        return list(self._waiters)

    def wake(self, key: Key, delivered: int) -> None:
        """Everything up to ``delivered`` has been handled."""
        waiters = self._waiters.get(key, [])
        while waiters and waiters[0][0] <= delivered:
            future = heapq.heappop(waiters)[2]
            if not future.done():
                future.set_result(None)

    def refuse(self, error: BusrepError, keys: Iterable[Key] | None = None) -> None:
        """Raise an error where somebody waits for one of these; None: for any."""
        for key in self.awaited if keys is None else keys:
            for _, _, future in self._waiters.pop(key, ()):
                refuse(future, error)
