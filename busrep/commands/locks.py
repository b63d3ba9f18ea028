"""LOCK_RELEASED: whoever waits for a lock tries again the moment it is free.

The lock itself is elsewhere, a row in a table for example. The command only carries the news of its release, and
may be lost: so `Locks.acquire` also tries by itself, every now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from busrep.core.application_commands import LockReleased
from busrep.errors import Closed, ConfigError, Unavailable

from ..asyncio.bus import Bus
from ..runtime.tasks import call, log_failure, wait_until_set
from .news import Waiters, in_background, see_through

log = logging.getLogger("busrep.locks")

HeldT = TypeVar("HeldT")

# Seconds between two tries when no news comes, as the heartbeat: what was lost is found out within one beat, at one
# statement per waiter and beat.
POLL = 2.0


class Locks:
    """The news of released locks, on an open bus; lives as long as the bus.

    ``instance``: this process's name in what it sends (default: the bus's writer or reader name, else its own name).
    Raises ConfigError.
    """

    def __init__(self, bus: Bus, instance: str | None = None) -> None:
        self._bus = bus
        self._instance = instance or bus.writer or bus.reader or bus.name
        LockReleased(self._instance, "", "")  # raises ConfigError
        self._waiters: Waiters[tuple[str, str]] = Waiters()
        bus.on(LockReleased)(self._heard)
        # A release may have passed while the link was down: who waits looks.
        bus.on_connect(self._waiters.wake_all)
        bus.before_close(self._waiters.close)

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._waiters.count

    def _heard(self, command: LockReleased) -> None:
        self._waiters.wake((command.lock, command.key))

    async def released(self, name: str, key: str) -> None:
        """Tell everybody that this lock may be free. Call it when the release is committed, not before.

        Who waits in this process is woken at once, also while Redis is away. Raises ConfigError, Unavailable, Closed.
        """
        command = LockReleased(self._instance, name, key)
        self._waiters.wake((name, key))
        await self._bus.send(command)

    async def wait(self, name: str, key: str, timeout: float) -> bool:
        """Wait until the lock may be free: True when woken, False after ``timeout`` seconds. Either way: try.

        Woken by its LOCK_RELEASED, however many wait, and by a reconnect, for the news may have been missed. A
        release between a failed try and this call is not seen: `acquire` has no such gap. Raises ConfigError when too
        many wait, Closed when the bus closes.
        """
        return await self._waiters.wait((name, key), timeout)

    @contextlib.asynccontextmanager
    async def acquire(
        self,
        name: str,
        key: str,
        try_acquire: Callable[[], Awaitable[HeldT] | HeldT],
        *,
        release: Callable[[HeldT], object] | None = None,
        timeout: float | None = None,
        poll: float = POLL,
    ) -> AsyncIterator[HeldT]:
        """Hold a lock: ``async with locks.acquire("room", "!a", try_acquire, release=release) as held``.

        ``try_acquire()`` (async or not) takes the lock, or gives something false at once when another has it; what it
        gives is ``held``. It is called first, at each wake-up, and every ``poll`` seconds (jittered, -50 %), so a lost
        message delays and never blocks. ``release(held)`` (async or not) is called when the block ends; without it the
        block itself gives the lock up. Then LOCK_RELEASED is sent. Both run in tasks of their own, to their end: what a
        try gets whose caller was cancelled meanwhile is released.

        Nobody is first in line. A holder may crash: give the lock an end of its own, an expiry for example.

        Raises TimeoutError when it could not be had within ``timeout`` seconds (None: any time), ConfigError, Closed,
        and what the two functions raise.
        """
        if not poll > 0:
            raise ConfigError(f"poll={poll!r}: a number of seconds above 0")
        LockReleased(self._instance, name, key)  # raises ConfigError: now, not when the lock is held
        lock, clock = (name, key), asyncio.get_running_loop().time
        deadline = math.inf if timeout is None else clock() + timeout
        with self._waiters.counted():
            while True:
                woken = self._waiters.next_wake(lock)  # before the try: a release in between wakes it
                held = await self._try(lock, try_acquire, release)
                if held:
                    break
                left = deadline - clock()
                if left <= 0:
                    raise TimeoutError(f"lock {name!r} of {key!r} was not free within {timeout:g} s")
                await wait_until_set(woken, min(left, poll * (0.5 + random.random() / 2)))
        del woken  # an event that is held counts as waited for
        try:
            yield held
        finally:
            await see_through(self._give_back(lock, held, release))

    async def _try(
        self,
        lock: tuple[str, str],
        try_acquire: Callable[[], Awaitable[HeldT] | HeldT],
        release: Callable[[HeldT], object] | None,
    ) -> HeldT:
        """What a try gets. The lock may be taken before that is known here: whoever is cancelled meanwhile gives back
        what he does not know that he has."""
        trying: asyncio.Task[HeldT] = in_background(call(try_acquire))
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:

            async def undo() -> None:
                held = await trying
                if held:
                    await self._give_back(lock, held, release)

            in_background(undo()).add_done_callback(log_failure)
            raise

    async def _give_back(self, lock: tuple[str, str], held: HeldT, release: Callable[[HeldT], object] | None) -> None:
        # Others are told also when release failed: the lock may be free all the same, and a try too many does no harm.
        try:
            if release is not None:
                await call(release, held)
        finally:
            try:
                await self.released(*lock)
            except (Closed, Unavailable) as error:  # the lock is free; others find out when they try
                log.debug("LOCK_RELEASED of %s %s was not sent: %s", *lock, error)
