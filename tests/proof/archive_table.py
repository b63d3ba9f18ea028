"""The table of the archive's fault test: a large one of several writers, and real writers that go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from busrep.asyncio import Bus
from busrep.errors import MissingExtra
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.streams import Registry, Stream
from tests.support.load import Log, mixed

NAME = "archive-test"
EVENTS = Stream[Any]("events")
# Writers of the rows that are there from the beginning; two more go on meanwhile.
BULK, LIVE = 6, 2
# IDs that were rolled back, and facts of three rows: one in so many.
ROLLED_BACK, LARGE = 19, 23
# Operations that a live writer does in one go.
OPERATIONS = 50
# A bulk of so many IDs is inserted in one statement.
CHUNK = 1_000_000

FILL = f"""
INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at)
SELECT 'events', 'bulk-' || (1 + abs(hashint8(id) %% {BULK})), id, idx,
       json_build_array(id, idx, md5(id::text), repeat('x', (id %% 60)::int))::text,
       timestamptz '2026-05-11 00:00+00' + id * interval '3 days' / %(rows)s
FROM generate_series(%(low)s::bigint, %(high)s::bigint) AS id,
     generate_series(0, CASE WHEN id %% {LARGE} = 0 THEN 2 ELSE 0 END) AS idx
WHERE id %% {ROLLED_BACK} <> 0
"""


async def fill(url: str, ids: int) -> int:
    """Make the table, of so many IDs; how many rows it has."""
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("postgres", "the archive's test") from None

    names = [f"bulk-{number}" for number in range(1, BULK + 1)]
    store = open_store(url, Registry([EVENTS]))
    await store.init()
    await store.open()
    try:
        claims = [await store.claim(name, ["events"], timeout=10) for name in names]
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            for low in range(1, ids + 1, CHUNK):
                high = min(low + CHUNK - 1, ids)
                await connection.execute(FILL, {"low": low, "high": high, "rows": ids})
            await connection.execute("SELECT setval('busrep_seq_events', %s)", (ids,))
            await connection.execute("ANALYZE busrep_facts")
            answer = await connection.execute("SELECT count(*) FROM busrep_facts")
            (count,) = await answer.fetchone() or (0,)
        for claim in claims:
            await store.heartbeat(claim, {"events": ids})
    finally:
        await store.close()
    return int(count)


@contextlib.asynccontextmanager
async def writers(url: str, redis: str, base: int, logs: list[Log]) -> AsyncIterator[None]:
    """Real writers go on meanwhile: facts of no, one and several rows, rolled back, cancelled, out of order.

    ``base``: of the dice. ``logs``: what they have done is added to it."""
    stop = asyncio.Event()

    async def write(number: int) -> None:
        store = open_store(url, Registry([EVENTS]))
        writer = f"live-{number}"
        async with Bus(redis, BusOptions(name=NAME, store=store, streams=[EVENTS], writer=writer)) as bus:
            turn = 0
            while not stop.is_set():
                turn += 1
                seed = base * 1000 + number * 100_000 + turn
                logs.append(await mixed(bus, [EVENTS], operations=OPERATIONS, seed=seed))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.1)

    async with asyncio.TaskGroup() as group:
        for number in range(1, LIVE + 1):
            group.create_task(write(number))
        try:
            yield
        finally:
            stop.set()
