"""What waits for rows: calls of ``bus.wait_for()``, and the loops over ``bus.follow()``."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from busrep.core.catchup import Key
from busrep.errors import BusrepError, ConfigError

from ..runtime.batch import Batch

_Waiter = tuple[int, "asyncio.Future[None]"]  # token, what to wake


def refuse(future: asyncio.Future[None], error: BaseException) -> None:
    """Raise an error where the future is awaited, unless it is done."""
    if not future.done():
        future.set_exception(error)


class PositionWaiters:
    """Waits until a (stream, writer) has been handled up to a token, the lowest first.

    ``most``: how many may wait at a time (`Settings.waiters`).
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiters: dict[Key, list[_Waiter]] = {}
        self.count = 0

    async def wait(self, key: Key, token: int) -> None:
        """Return once `wake` was called with that token or a higher one. Raises ConfigError where too many wait, and
        what `refuse` was called with."""
        if self.count >= self._most:
            raise ConfigError(f"more than {self._most} waits at a time: raise Settings.waiters")
        waiter = (token, asyncio.get_running_loop().create_future())
        insort(self._waiters.setdefault(key, []), waiter, key=itemgetter(0))
        self.count += 1
        try:
            await waiter[1]
        finally:
            self.count -= 1
            waiters = self._waiters.get(key, [])
            if waiter in waiters:  # given up before it was reached
                waiters.remove(waiter)
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
            _, future = waiters.pop(0)
            if not future.done():
                future.set_result(None)

    def refuse(self, error: BusrepError, keys: Iterable[Key]) -> None:
        """Raise an error where somebody waits for one of these."""
        for key in keys:
            for _, future in self._waiters.pop(key, ()):
                refuse(future, error)


Offer = tuple[Batch[Any], "asyncio.Future[None]"]
"""A batch, and what is done when it is handled."""


class DetachedError(Exception):
    """The loop that took a batch ended before it asked for the next: the batch was not handled."""


class FollowLoop:
    """Offers batches to one loop, which asks for the next when it has handled one. ``streams``: their names."""

    def __init__(self, streams: Iterable[str]) -> None:
        self.streams = frozenset(streams)
        self._offers: asyncio.Queue[Offer | BusrepError] = asyncio.Queue()
        self._offered: dict[asyncio.Future[None], None] = {}

    async def offer(self, batch: Batch[Any]) -> None:
        """Hand out a batch, and wait until it is handled: the loop's handler. Raises DetachedError."""
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offered[handled] = None
        self._offers.put_nowait((batch, handled))
        try:
            await handled
        finally:
            self._offered.pop(handled, None)

    @property
    def offered(self) -> int:
        """How many batches wait for the loop, or are handled in it."""
        return len(self._offered)

    def interrupt(self, error: BusrepError) -> None:
        """Raise an error at the loop's next turn."""
        self._offers.put_nowait(error)

    async def next(self) -> Offer:
        """Return what is offered next. Raises what `interrupt` was called with."""
        while True:
            offered = await self._offers.get()
            if isinstance(offered, BusrepError):
                raise offered
            if not offered[1].done():  # else it was given up meanwhile: the bus is closed
                return offered

    def detach(self) -> None:
        """The loop was left, or the bus closes: its batch comes again next time."""
        for handled in list(self._offered):
            refuse(handled, DetachedError())
