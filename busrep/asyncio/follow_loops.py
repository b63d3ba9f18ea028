"""The loops over ``bus.follow()``: each offers batches to one task, which asks for the next when it has handled one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from busrep.errors import BusrepError

from ..runtime.batch import Batch
from .position_waiters import refuse

Offer = tuple[Batch[Any], "asyncio.Future[None]"]
"""A batch, and what is done when it is handled."""


class DetachedError(Exception):
    """The loop that took a batch ended before it asked for the next: the batch was not handled."""


class FollowLoop:
    """One loop. ``streams``: the names of those that it is over."""

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


class FollowLoops:
    """All loops of one bus."""

    def __init__(self) -> None:
        self._loops: dict[FollowLoop, None] = {}

    def __iter__(self) -> Iterator[FollowLoop]:
        return iter(self._loops)

    @contextlib.contextmanager
    def loop(self, streams: Iterable[str]) -> Iterator[FollowLoop]:
        """A loop, for a block."""
        loop = FollowLoop(streams)
        self._loops[loop] = None
        try:
            yield loop
        finally:
            del self._loops[loop]
            loop.detach()

    def interrupt(self, error: BusrepError, stream: str | None = None) -> None:
        """Raise an error in all loops, or those over a stream."""
        for loop in self._loops:
            if stream is None or stream in loop.streams:
                loop.interrupt(error)

    def detach(self) -> None:
        """The bus closes."""
        for loop in self._loops:
            loop.detach()
