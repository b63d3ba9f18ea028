"""Facts a second that one process commits, beside the same rows committed without a bus.

    python benchmarks/facts.py [--seconds 2] [--rounds 5] [--flush-delay 600] [--json FILE]

Nobody reads; busrep publishes each fact on a Redis. All contenders of a line take turns in one process, each for
``--seconds``, on connections that are open before its clock starts. Printed: the medians of the rounds, the median of
the rounds' ratios to the first contender, and what a fact took of this process's processor. A row is
["w1", i, text, float, bool], some 120 bytes as JSON.
``--flush-delay`` makes each flush of PostgreSQL's log take so many microseconds longer (its commit_delay), as a slower
disk does: what a commit costs decides how much anything beside it shows.

PostgreSQL, one fact a transaction, 1, 8 and 32 at a time:
    bare     BEGIN, INSERT, COMMIT by psycopg, a connection for each of those at a time
    busrep   ``async with bus.write(stream) as fact``, whose block has the fact's ID
    publish  ``bus.publish(stream, [row])``, which is told the ID at the end
PostgreSQL, 10, 100 and 500 facts a transaction, one transaction at a time:
    unnest   INSERT ... SELECT ... FROM unnest(...), in a transaction of its own
    COPY     COPY ... FROM STDIN
    busrep   ``bus.publish(stream, rows)``
SQLite, 1 and 100 facts a transaction:
    bare     sqlite3, executemany between BEGIN IMMEDIATE and COMMIT, in the journal and synchronous modes that busrep's
             own connection has
    busrep, publish   as above
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import psycopg
import setting
from rows import make_tables, row, rows

import busrep

TABLE = "CREATE TABLE bare (id bigint PRIMARY KEY, writer text NOT NULL, row text NOT NULL)"


def payload(number: int) -> str:
    return orjson.dumps(attrs.astuple(row(number))).decode()


class Bare:
    """The same rows in a table of their own; IDs are counted here, which costs less than any sequence."""

    def __init__(self, url: str) -> None:
        self.url, self.next = url, 0
        self.connections: list[psycopg.AsyncConnection[Any]] = []

    async def open(self, count: int) -> None:
        self.connections = [await psycopg.AsyncConnection.connect(self.url, autocommit=True) for _ in range(count)]

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    def ids(self, count: int) -> range:
        self.next += count
        return range(self.next - count, self.next)

    async def single(self, worker: int) -> int:
        connection, (number,) = self.connections[worker], self.ids(1)
        async with connection.transaction():
            await connection.execute("INSERT INTO bare VALUES (%s, 'w1', %s)", (number, payload(number)))
        return 1

    async def unnest(self, count: int) -> int:
        ids = self.ids(count)
        async with self.connections[0].transaction():
            await self.connections[0].execute(
                "INSERT INTO bare SELECT id, 'w1', row FROM unnest(%s::bigint[], %s::text[]) AS u (id, row)",
                ([*ids], [payload(number) for number in ids]),
            )
        return count

    async def copy(self, count: int) -> int:
        ids = self.ids(count)
        async with (
            self.connections[0].transaction(),
            self.connections[0].cursor() as cursor,
            cursor.copy("COPY bare FROM STDIN") as copy,
        ):
            for number in ids:
                await copy.write_row((number, "w1", payload(number)))
        return count


class Sqlite:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection, self.next = connection, 0

    async def write(self, count: int) -> int:
        ids = range(self.next, self.next + count)
        self.next += count
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO bare VALUES (?, 'w1', ?)", [(one, payload(one)) for one in ids])
        self.connection.execute("COMMIT")
        return count


class Bus:
    def __init__(self, bus: busrep.Bus) -> None:
        self.bus, self.next = bus, 0

    async def single(self, _: int) -> int:
        self.next += 1
        async with self.bus.write(rows) as fact:
            fact.add(row(self.next))
        return 1

    async def published(self, _: int) -> int:
        return await self.several(1)

    async def several(self, count: int) -> int:
        await self.bus.publish(rows, [row(self.next + at) for at in range(count)])
        self.next += count
        return count


async def rate(write: Callable[[int], Awaitable[int]], arguments: Sequence[int], seconds: float) -> tuple[float, float]:
    """Facts a second of one loop for each argument, all at a time; seconds of this process's processor a fact."""
    ends, processor = time.monotonic() + seconds, time.process_time()

    async def loop(argument: int) -> int:
        written = await write(argument)
        while time.monotonic() < ends:
            written += await write(argument)
        return written

    started = time.monotonic()
    written = sum(await asyncio.gather(*map(loop, arguments)))
    return written / (time.monotonic() - started), (time.process_time() - processor) / written


async def measured(
    title: str,
    contenders: dict[str, Callable[[int], Awaitable[int]]],
    arguments: Sequence[int],
    given: argparse.Namespace,
) -> dict[str, dict[str, list[float]]]:
    """Rates of each contender in each round, and what a fact took of the processor; printed. ``arguments``: one for
    each loop at a time."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(given.rounds):
        for name, write in contenders.items():
            facts, processor = await rate(write, arguments, given.seconds)
            found[name].append(facts)
            taken[name].append(processor)
    return setting.compare(title, found, taken, "facts/s")


@contextlib.asynccontextmanager
async def opened(redis: str, store: str) -> AsyncIterator[Bus]:
    await make_tables(store, rows)
    async with busrep.connect(redis, name="bench", streams=[rows], store=store, writer="w1") as bus:
        yield Bus(bus)


async def on_postgres(redis: str, url: str, given: argparse.Namespace) -> dict[str, Any]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(TABLE)
    found: dict[str, Any] = {}
    bare = Bare(url)
    await bare.open(32)
    async with opened(redis, url) as bus:
        for count in (1, 8, 32):
            contenders = {"bare": bare.single, "busrep": bus.single, "publish": bus.published}
            title = f"PostgreSQL, single facts, {count} at a time"
            found |= await measured(title, contenders, range(count), given)
        for count in (10, 100, 500):
            several = {"unnest": bare.unnest, "COPY": bare.copy, "busrep": bus.several}
            title = f"PostgreSQL, {count} facts a transaction"
            found |= await measured(title, several, [count], given)
    await bare.close()
    return found


async def on_sqlite(redis: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    async with opened(redis, f"sqlite:///{folder / 'busrep.db'}") as bus:
        modes: dict[str, Any] = {}
        async with bus.bus.write(rows) as fact:  # what its own connection has
            for name in ("journal_mode", "synchronous"):
                modes[name] = (await fact.execute(f"PRAGMA {name}"))[0][0]
        connection = sqlite3.connect(folder / "bare.db", isolation_level=None)
        for name, mode in modes.items():
            connection.execute(f"PRAGMA {name} = {mode}")
        connection.execute(TABLE)
        setting.tell(setting.of_sqlite(connection))
        found: dict[str, Any] = {}
        bare = Sqlite(connection)
        for count, ours in ((1, {"busrep": bus.single, "publish": bus.published}), (100, {"busrep": bus.several})):
            title = f"SQLite, {count} fact{'s' if count > 1 else ''} a transaction"
            found |= await measured(title, {"bare": bare.write, **ours}, [count], given)
        connection.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush-delay", type=int, default=0, help="of PostgreSQL's log, microseconds")
    setting.add_json(parser)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack, commit_delay=str(given.flush_delay), commit_siblings="0")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="busrep-bench-")))
        found = asyncio.run(on_postgres(redis.url, postgres.url, given))
        found |= asyncio.run(on_sqlite(redis.url, folder, given))
    setting.write(given, found)


if __name__ == "__main__":
    main()
