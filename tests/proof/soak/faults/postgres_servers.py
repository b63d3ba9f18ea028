"""Faults of PostgreSQL and its replica, and what an administrator does to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from busrep.errors import BusrepError
from busrep.stores import open_store
from busrep.streams import Registry
from tests.proof.soak.children import came_true
from tests.proof.soak.database import APPLICATION, Database, psycopg
from tests.proof.soak.faults.common import SOON, Fault, pick
from tests.proof.soak.task import LEASE, STREAMS
from tests.proof.soak.world import World

# Rows of each (stream, writer) that pruning leaves.
KEEP = 200

BUSREP_BACKENDS = f"application_name IN ('busrep', '{APPLICATION}')"


async def crash_postgres(world: World, dice: random.Random) -> bool:
    """Immediate shutdown, recovery at the start: sequences jump ahead."""
    async with world.postgres_lock:
        await asyncio.to_thread(world.postgres.kill)
        await asyncio.sleep(dice.choice([0.0, 0.0, 1.0, 5.0]))
        world.postgres.start()
    return True


async def crash_unsynchronized(world: World, dice: random.Random) -> bool:
    """The same of a server that answers a COMMIT before the disk has it, unless the transaction asks for more."""
    setting = "ALTER SYSTEM SET synchronous_commit = 'off'"
    async with world.postgres_lock:
        try:
            await asyncio.to_thread(world.database.run, setting, "SELECT pg_reload_conf()")
            await asyncio.sleep(dice.uniform(0.3, LEASE))
            await asyncio.to_thread(world.postgres.kill)
        finally:
            world.postgres.start()
            await asyncio.to_thread(
                world.database.run, "ALTER SYSTEM RESET synchronous_commit", "SELECT pg_reload_conf()"
            )
    return True


async def crash_replica(world: World, dice: random.Random) -> bool:
    """The same for the replica."""
    if world.replica is None:
        return False
    async with world.postgres_lock:
        await asyncio.to_thread(world.replica.kill)
        await asyncio.sleep(dice.choice([0.0, 1.0]))
        world.replica.start()
    return True


@contextlib.asynccontextmanager
async def replay_paused(world: World) -> AsyncIterator[bool]:
    """The replica shows nothing new meanwhile; false when there is none."""
    if world.replica is None:
        yield False
        return
    async with world.postgres_lock:
        replica = Database(world.replica.url)
        try:
            await asyncio.to_thread(replica.run, "SELECT pg_wal_replay_pause()")
            yield True
        finally:
            await asyncio.to_thread(replica.run, "SELECT pg_wal_replay_resume()")


async def lag(world: World, dice: random.Random) -> bool:
    """The replica shows nothing new for a while."""
    async with replay_paused(world) as paused:
        if paused:
            await asyncio.sleep(dice.uniform(0.5, 2 * LEASE))
        return paused


async def terminate(world: World, _: random.Random) -> bool:
    """An administrator ends one of busrep's, or the application's, connections."""
    query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {BUSREP_BACKENDS} ORDER BY random() LIMIT 2"
    try:
        return bool(await asyncio.to_thread(world.database.ask, query))
    except psycopg().OperationalError:  # it is being restarted
        return False


async def terminate_at_commit(world: World, _: random.Random) -> bool:
    """Transactions that wait for the replica are ended there: committed here, and the client is not told."""
    async with replay_paused(world) as paused:
        if not paused:
            return False
        try:
            await asyncio.to_thread(
                world.database.run,
                "ALTER SYSTEM SET synchronous_standby_names = '*'",
                "ALTER SYSTEM SET synchronous_commit = 'remote_apply'",
                "SELECT pg_reload_conf()",
            )
            return await terminate_waiting(world)
        finally:
            await asyncio.to_thread(
                world.database.run,
                "ALTER SYSTEM RESET synchronous_standby_names",
                "ALTER SYSTEM RESET synchronous_commit",
                "SELECT pg_reload_conf()",
            )


async def terminate_waiting(world: World) -> bool:
    """End those that wait in COMMIT, as soon as there are some."""
    query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND {BUSREP_BACKENDS}"
    for _ in range(10):
        await asyncio.sleep(0.2)
        if await asyncio.to_thread(world.database.ask, query):
            return True
    return False


async def prune(world: World, dice: random.Random) -> bool:
    """Old rows are deleted while a reader that was away catches up."""
    slot = pick(world, dice, readers=True)
    async with slot.lock:
        if slot.child is None or not slot.ready:
            return False
        slot.restart_after = 1.0
        await slot.child.kill()
        moved = 0
        for _ in range(4):
            await asyncio.sleep(0.6)
            try:
                moved += await prune_once(world)
            except BusrepError:
                continue
        await came_true(lambda: slot.ready, 3 * SOON)
    return moved > 0


async def prune_once(world: World) -> int:
    """How many floors moved."""
    store = open_store(world.postgres.url, Registry(STREAMS))
    await store.open()
    try:
        return len(await store.prune(keep=KEEP))
    finally:
        await store.close()


FAULTS: dict[str, Fault] = {
    "PostgreSQL crash and restart": crash_postgres,
    "PostgreSQL crash, synchronous_commit off": crash_unsynchronized,
    "replica crash and restart": crash_replica,
    "replica lags": lag,
    "backend terminated": terminate,
    "backend terminated at COMMIT": terminate_at_commit,
    "prune during catch-up": prune,
}
