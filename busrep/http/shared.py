"""What is made once for all who ask for it at about the same time: agreements on snapshots, texts of their parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

import attrs

from busrep.errors import Unavailable

from ..runtime.tasks import being_cancelled, stop

T = TypeVar("T")

# For how long something is kept after it was made, seconds: who is given an agreement has to catch up from there.
SHARED_FOR = 60.0


@attrs.define(eq=False)
class _Item(Generic[T]):
    """A thing that is made, or kept. ``waiting``: so many wait for it. ``asked``: somebody has asked for it."""

    task: asyncio.Task[T]
    waiting: int = 0
    asked: bool = False
    timer: asyncio.TimerHandle | None = None


class Shared(Generic[T]):
    """Things by key, each made by a task of its own, so that it outlives the request that asked first.

    A thing is kept for `SHARED_FOR` seconds, as long as all of them together are no larger than ``most``, by ``size``:
    the oldest go first, and those that nobody has asked for yet go last. What could not be made is not kept. ``what``
    names the server in errors. ``abandon``: what is being made is given up when the last who waited for it has gone.
    """

    def __init__(self, what: str, most: int, size: Callable[[T], int], *, abandon: bool) -> None:
        self._what, self._most, self._size, self._abandon = what, most, size, abandon
        self._items: dict[Hashable, _Item[T]] = {}
        self._making: set[asyncio.Task[T]] = set()
        self._closed = False

    @property
    def making(self) -> int:
        """How many are being made."""
        return len(self._making)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    async def get(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The thing of this key, made now if nobody has asked for it. Raises what ``make`` raises, and Unavailable."""
        item = self._items.get(key)
        if item is None:
            if self._closed:
                raise self._being_closed()
            item = self._begin(key, make())
        item.asked = True
        item.waiting += 1
        try:
            return await asyncio.shield(item.task)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise self._being_closed() from None
        finally:
            item.waiting -= 1
            if self._abandon and not item.waiting:
                self._end(key, item)

    def make_ahead(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]], size: int) -> None:
        """Make a thing that is likely to be asked for, of about this size, if it can be kept until it is."""

        async def made() -> T:
            async with asyncio.timeout(SHARED_FOR):  # nobody may ever wait for it
                return await make()

        size = max(size, 1)  # what seems to need nothing may need anything
        ahead = [one.task for one in self._items.values() if not one.asked]
        known = sum(size if task in self._making else self._size(task.result()) for task in ahead)
        if key not in self._items and known + size <= self._most and not self._closed:
            self._begin(key, made())

    def give_up_ahead(self) -> None:
        """End what is being made and nobody has asked for, to make room for what somebody has."""
        for key, item in [*self._items.items()]:
            if not item.asked:
                self._end(key, item)

    def forget_all(self) -> None:
        """Make anew whatever is asked for from now on; what is being made goes to those who wait for it."""
        for key, item in [*self._items.items()]:
            if item.task not in self._making:
                self._forget(key, item)

    async def close(self) -> None:
        """End what is being made, and begin nothing more. May be called twice."""
        self._closed = True
        for key, item in [*self._items.items()]:
            self._forget(key, item)
        await stop(self._making, 5.0)

    def _begin(self, key: Hashable, making: Coroutine[Any, Any, T]) -> _Item[T]:
        task = asyncio.create_task(making, name="busrep-snapshots")
        item = self._items[key] = _Item(task)
        self._making.add(task)
        task.add_done_callback(partial(self._made, key, item))
        return item

    def _made(self, key: Hashable, item: _Item[T], task: asyncio.Task[T]) -> None:
        self._making.discard(task)
        # Of one that failed those who wait are told; there may be none any more.
        if task.cancelled() or task.exception() is not None or self._size(task.result()) > self._most:
            self._forget(key, item)
        if self._items.get(key) is not item:
            return
        item.timer = asyncio.get_running_loop().call_later(SHARED_FOR, self._forget, key, item)
        kept = [(key, one) for key, one in self._items.items() if one.task not in self._making]
        over = sum(self._size(one.task.result()) for _, one in kept) - self._most
        for key, one in sorted(kept, key=lambda pair: not pair[1].asked):
            if over <= 0:
                break
            over -= self._size(one.task.result())
            self._forget(key, one)

    def _end(self, key: Hashable, item: _Item[T]) -> None:
        if not item.task.done():
            self._forget(key, item)
            item.task.cancel()

    def _forget(self, key: Hashable, item: _Item[T]) -> None:
        if self._items.get(key) is item:
            del self._items[key]
        if item.timer is not None:  # it would keep the thing in memory
            item.timer.cancel()

    def _being_closed(self) -> Unavailable:
        return Unavailable(self._what, "it is being closed")
