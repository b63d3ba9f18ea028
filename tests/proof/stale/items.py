"""The table that everything is about, and the loader that reads it. One text for event loops and threads."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from tests.proof.soak.database import psycopg
from tests.proof.stale.memory import Memory, Tally

PREPARE = """
CREATE TABLE items (key INTEGER PRIMARY KEY, version BIGINT NOT NULL);
INSERT INTO items SELECT key, 0 FROM generate_series(0, %d) key
"""
LOAD = "SELECT version FROM items WHERE key = %s"
ALL = "SELECT key, version FROM items"
UPDATE = "UPDATE items SET version = version + 1 WHERE key = %s RETURNING version"
# Somebody who waits for a process that stands still in its transaction gives up.
PATIENCE = "SET LOCAL lock_timeout = '3s'"

# How often a loader is slow between the table's answer and its own, and how slow: that is where fills race.
SLOW, SECONDS = 0.05, 0.03
# How often it is slower than any bound.
SLOWEST, BOUNDS = 0.002, 1.5

READER: ContextVar[Tally] = ContextVar("READER")
"""Whose loads these are: set by the lane that reads."""


class Items:
    """Reads of one process. ``connect`` and ``sleep`` are an event loop's, or of threads (see `soak.runtime`)."""

    def __init__(
        self,
        memory: Memory,
        url: str,
        dice: random.Random,
        connect: Callable[[str], Awaitable[Any]],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._memory, self._url, self._dice, self._connect, self._sleep = memory, url, dice, connect, sleep
        self._idle: deque[Any] = deque()  # of connections; threads share it

    async def load(self, key: int) -> int:
        """The version of a key, by the table. Raises psycopg.Error."""
        version = await self._ask(key)
        self._memory.note(key, version, time.monotonic_ns())
        READER.get().loaded()
        dice = self._dice.random()
        if dice < SLOWEST:
            await self._sleep(BOUNDS * self._memory.shape.bound)
        elif dice < SLOW:
            await self._sleep(self._dice.uniform(0, SECONDS))
        return version

    async def _ask(self, key: int) -> int:
        connection = self._idle.pop() if self._idle else await self._connect(self._url)
        try:
            version = await one_value(connection, LOAD, key)
        except BaseException:
            await connection.close()
            raise
        self._idle.append(connection)
        return version

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            await self._idle.pop().close()


async def one_value(connection: Any, query: str, key: int) -> int:
    """The one number that a query gives, on an AsyncConnection or what looks like one."""
    cursor = await connection.execute(query, (key,))
    ((value,),) = await cursor.fetchall()
    return int(value)


async def connect(url: str, *, autocommit: bool = True) -> Any:
    """A connection of the application's own, on an event loop. Raises psycopg.Error."""
    return await psycopg().AsyncConnection.connect(url, autocommit=autocommit, **_OPTIONS)


async def connect_blocking(url: str, *, autocommit: bool = True) -> Blocking:
    """The same for threads."""
    return Blocking(psycopg().Connection.connect(url, autocommit=autocommit, **_OPTIONS))


_OPTIONS: dict[str, Any] = {"connect_timeout": 5, "application_name": "stale"}


class Blocking:
    """A psycopg connection or cursor whose methods look like coroutines, and never wait for an event loop."""

    def __init__(self, blocking: Any) -> None:
        self.blocking = blocking

    async def execute(self, query: str, params: Any = ()) -> Blocking:
        """Run a statement; what it gave."""
        return Blocking(self.blocking.execute(query, params))

    async def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows."""
        return list(self.blocking.fetchall())

    async def commit(self) -> None:
        """End the transaction."""
        self.blocking.commit()

    async def close(self) -> None:
        """Close it."""
        self.blocking.close()
