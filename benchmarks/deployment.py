"""What a deployment costs its servers, beside how often somebody writes: connections, messages of a join, beats, locks.

    python benchmarks/deployment.py [--pairs 10000] [--beats 20000] [--json FILE]

Counts and clocks of a real Redis and of a PostgreSQL with fsync; what idle.py measures is not repeated here.

``connections``  of one process that reads and writes: while 100 facts are written at a time, and when nothing has
                 happened for some minutes
``join``         messages that are published when a reader connects, beside 10 and 100 writers: counted in memory
``beat``         milliseconds of one beat that stores a position, and of one that reads the registry as well (each fifth
                 does), in a registry of few pairs of stream and writer, and beside ``--pairs`` of other writers
``old snapshot`` the same beat before and after ``--beats`` of them while a snapshot is open, as pg_dump's is; and the
                 bytes by which the table has grown, for each of them
``multixacts``   members a fact, with 10, 50 and 100 transactions of one writer open at a time: of facts that run a
                 statement, and of facts in the caller's transaction. PostgreSQL has 2**32 between two vacuums.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from statistics import median
from typing import Any, LiteralString

import psycopg
import setting
from rows import make_tables, row, rows

import busrep
from busrep.stores import open_store
from busrep.stores.interface import Claim, FactLog
from busrep.streams import Registry
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment

AT_A_TIME = 100
CONNECTIONS = "300"  # that the server takes: each of a hundred facts with a statement has one
STREAMS = 10  # of each of the writers whose pairs fill the registry
TIMED = 200  # beats, of which the median is told
PATIENCE = 300.0  # seconds for what a process closes: one connection in half a minute

Figures = dict[str, dict[str, list[float]]]


def bus_on(redis_url: str, url: str, name: str, **role: Any) -> busrep.Bus:
    return busrep.connect(redis_url, name=name, streams=[rows], store=url, **role)


async def number(connection: psycopg.AsyncConnection[Any], question: LiteralString) -> int:
    found = await (await connection.execute(question)).fetchone()
    assert found is not None
    return int(found[0])


async def publish_one(bus: busrep.Bus, at: int) -> None:
    async with bus.write(rows) as fact:
        fact.add(row(at))


async def others(connection: psycopg.AsyncConnection[Any]) -> int:
    """Connections to this database but this one."""
    return await number(
        connection,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'",
    )


async def connections(redis_url: str, url: str, own: psycopg.AsyncConnection[Any]) -> Figures:
    before = await others(own)
    async with bus_on(redis_url, url, "connections", writer="w1", reader="r1") as bus:
        bus.subscribe(rows)(lambda _: None)
        await asyncio.gather(*(publish_one(bus, at) for at in range(AT_A_TIME)))
        busy = await others(own) - before
        ends = time.monotonic() + PATIENCE
        while (idle := await others(own) - before) > 1 and time.monotonic() < ends:
            await asyncio.sleep(1)
    return {"connections": {f"{AT_A_TIME} facts at a time": [busy], "idle": [idle]}}


async def join(writers: int) -> int:
    """On a Redis and a table in memory, where time is virtual and a message is counted when it is published."""
    settings = busrep.Settings(heartbeat=1e6, save_every=1e6)  # no beat while it is counted
    async with MemoryDeployment(rows, settings=settings) as deployment, contextlib.AsyncExitStack() as stack:
        for at in range(writers):
            await publish_one(await stack.enter_async_context(deployment.bus(writer=f"w{at}")), at)
        await asyncio.sleep(10e6)  # each has read the registry at a beat
        before = len(deployment.redis.published)
        await stack.enter_async_context(deployment.bus())
        await asyncio.sleep(1)
        return len(deployment.redis.published) - before


@contextlib.asynccontextmanager
async def store_of(url: str) -> AsyncIterator[FactLog]:
    store = open_store(url, Registry([rows, *(busrep.Stream(f"s{at}") for at in range(STREAMS))]))
    await store.init()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def beat_of(store: FactLog, claim: Claim, *, registry: bool) -> float:
    """Milliseconds."""
    found = []
    for _ in range(TIMED):
        started = time.perf_counter()
        await store.heartbeat(claim, {rows.name: claim.starts[rows.name]}, registry=registry)
        found.append(1000 * (time.perf_counter() - started))
    return median(found)


async def beats_of(store: FactLog, claim: Claim) -> tuple[float, float]:
    return await beat_of(store, claim, registry=False), await beat_of(store, claim, registry=True)


async def beats(url: str, pairs: int) -> Figures:
    async with store_of(url) as store:
        claim = await store.claim("beating", [rows.name], timeout=30.0)
        alone = await beats_of(store, claim)
        for at in range(pairs // STREAMS):
            await store.claim(f"other{at}", [f"s{number}" for number in range(STREAMS)], timeout=30.0)
        many = await beats_of(store, claim)
    titles = ("a beat", "a beat that reads the registry")
    named = zip(titles, alone, many, strict=True)
    return {title: {"few pairs": [few], f"beside {pairs:,} pairs": [all_]} for title, few, all_ in named}


async def old_snapshot(url: str, own: psycopg.AsyncConnection[Any], count: int) -> Figures:
    size: LiteralString = "SELECT pg_table_size('busrep_positions')"
    async with store_of(url) as store, await psycopg.AsyncConnection.connect(url) as old:
        claim = await store.claim("long", [rows.name], timeout=30.0)
        before = await beats_of(store, claim)
        await old.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await old.execute("SELECT FROM busrep_positions")
        empty = await number(own, size)
        for _ in range(count):
            await store.heartbeat(claim, {rows.name: claim.starts[rows.name]}, registry=False)
        grown = (await number(own, size) - empty) / count
        after = await beats_of(store, claim)
    titles = ("a beat", "a beat that reads the registry")
    return {
        "under an old snapshot, bytes a beat": {"grown": [grown]},
        **{
            f"{title}, under an old snapshot": {"before": [fresh], f"after {count:,}": [late]}
            for title, fresh, late in zip(titles, before, after, strict=True)
        },
    }


async def members(own: psycopg.AsyncConnection[Any]) -> int:
    await own.execute("CHECKPOINT")
    return await number(own, "SELECT next_multi_offset::text::bigint FROM pg_control_checkpoint()")


async def multixacts(redis_url: str, url: str, own: psycopg.AsyncConnection[Any], at_a_time: int) -> Figures:
    together = asyncio.Barrier(at_a_time)

    async def one(bus: busrep.Bus, *, joined: bool) -> None:
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(await psycopg.AsyncConnection.connect(url)) if joined else None
            async with bus.write(rows, connection=connection) as fact:
                await fact.execute("SELECT 1")
                fact.add(row(1))
                await together.wait()

    found: dict[str, list[float]] = {}
    settings = busrep.Settings(heartbeat=600.0, transactions=at_a_time)
    async with bus_on(redis_url, url, "multixacts", writer="w1", settings=settings) as bus:
        for kind, joined in (("with a statement", False), ("in the caller's transaction", True)):
            before = await members(own)
            await asyncio.gather(*(one(bus, joined=joined) for _ in range(at_a_time)))
            await bus.settle()
            found[kind] = [(await members(own) - before) / at_a_time]
    return {f"multixact members a fact, {at_a_time} at a time": found}


async def measure(redis_url: str, url: str, given: argparse.Namespace) -> Figures:
    await make_tables(url, rows)
    figures: Figures = {}
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as own:
        figures |= await connections(redis_url, url, own)
        for at_a_time in (10, 50, 100):
            figures |= await multixacts(redis_url, url, own, at_a_time)
        figures |= await old_snapshot(url, own, given.beats)
        figures |= await beats(url, given.pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000, help="of other writers in the registry")
    parser.add_argument("--beats", type=int, default=20_000, help="under the old snapshot")
    setting.add_json(parser)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        server, postgres = setting.servers(stack, max_connections=CONNECTIONS)
        figures = asyncio.run(measure(server.url, postgres.url, given))
    figures["messages of a join"] = {f"{writers} writers": [virtual.run(join(writers))] for writers in (10, 100)}
    for title, found in figures.items():
        print(f"{title:52}" + "   ".join(f"{name} {values[0]:,.2f}" for name, values in found.items()))
    setting.write(given, figures)


if __name__ == "__main__":
    main()
