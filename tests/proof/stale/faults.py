"""The faults of a run, one function each: do it, and undo it before returning; tell whether it did what it says.

Lengths are drawn in bounds of the caches, so that they lie on both sides of it at any heartbeat.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

import redis

from busrep.caches.cache import invalidations
from busrep.errors import BusrepError
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.pipes import DIRECTIONS
from tests.proof.soak.children import came_true
from tests.proof.stale.task import bound_of
from tests.proof.stale.world import LOST_ALWAYS, Slot, World

Fault = Callable[[World, random.Random], Awaitable[bool]]

# Seconds to wait for something that is about to happen, a COMMIT to pass for example.
SOON = 5.0


def a_slot(world: World, dice: random.Random, *, writers: bool = False) -> Slot:
    """A process, or one that writes."""
    return dice.choice([slot for slot in world.slots.values() if slot.role.writes or not writers])


def a_while(world: World, dice: random.Random, least: float, most: float) -> Awaitable[None]:
    """Sleep for so many bounds."""
    return asyncio.sleep(dice.uniform(least, most) * bound_of(world.heartbeat))


async def lose(world: World, dice: random.Random) -> bool:
    """Messages are lost, some or all, on connections that are otherwise well."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.redis.lost = dice.choice([0.3, 0.7, 1.0, 1.0])
        try:
            await a_while(world, dice, 0.2, 3)
        finally:
            slot.redis.lost = LOST_ALWAYS
    return True


async def lose_everywhere(world: World, dice: random.Random) -> bool:
    """A process publishes, and nobody hears it: all links lose everything for a moment."""
    for slot in world.slots.values():
        slot.redis.lost = 1.0
    try:
        await a_while(world, dice, 0.1, 2)
    finally:
        for slot in world.slots.values():
            slot.redis.lost = LOST_ALWAYS
    return True


async def cut(world: World, dice: random.Random) -> bool:
    """Connections to Redis are reset, and cannot be made again for a while."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.redis.refuse = dice.random() < 0.6
        slot.redis.cut()
        await a_while(world, dice, 0, 2)
        slot.redis.heal()
    return True


async def hole(world: World, dice: random.Random) -> bool:
    """Nothing passes to or from Redis, in one direction or both; afterwards it arrives late, or is gone."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.redis.black_hole(dice.choice([None, *DIRECTIONS]))
        await a_while(world, dice, 0.3, 6)
        if dice.random() < 0.4:
            slot.redis.cut()
        slot.redis.heal()
    return True


async def delay(world: World, dice: random.Random) -> bool:
    """Everything to and from Redis arrives late, up to later than the bound."""
    slot = a_slot(world, dice)
    bound = bound_of(world.heartbeat)
    async with slot.lock:
        slot.redis.delay((0.0, dice.choice([0.1, 0.5, 1.5]) * bound), dice.choice([None, *DIRECTIONS]))
        await a_while(world, dice, 1, 4)
        slot.redis.heal()
    return True


async def half_open(world: World, dice: random.Random) -> bool:
    """One side's connections to Redis are gone, the other side does not know."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.redis.abandon(dice.choice(["client", "server"]))
    return True


async def table_away(world: World, dice: random.Random) -> bool:
    """A process cannot reach the database for a while."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.postgres.refuse = True
        slot.postgres.cut()
        await a_while(world, dice, 0.2, 2)
        slot.postgres.heal()
    return True


async def table_slow(world: World, dice: random.Random) -> bool:
    """What the database says arrives late: answers to COMMIT, and what loaders ask."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.postgres.delay((0.0, dice.choice([0.05, 0.2, 0.6]) * bound_of(world.heartbeat)), "from_server")
        await a_while(world, dice, 1, 3)
        slot.postgres.heal()
    return True


async def answer_lost(world: World, dice: random.Random) -> bool:
    """A COMMIT arrives, its answer does not."""
    slot = a_slot(world, dice, writers=True)
    async with slot.lock:
        return await _at_commit(slot)


async def killed_at_commit(world: World, dice: random.Random) -> bool:
    """A writer dies behind its COMMIT, before anybody was told."""
    slot = a_slot(world, dice, writers=True)
    async with slot.lock:
        if not slot.ready or not await _at_commit(slot):
            return False
        return await _killed(world, slot, dice)


async def _at_commit(slot: Slot) -> bool:
    happened = asyncio.wrap_future(slot.postgres.cut_when(b"COMMIT", "to_server"))
    done, _ = await asyncio.wait([happened], timeout=SOON)
    slot.postgres.heal()
    return bool(done)


async def kill(world: World, dice: random.Random) -> bool:
    """A process dies at once, and is started again: soon, or after others had reason to finish it."""
    slot = a_slot(world, dice)
    async with slot.lock:
        return slot.ready and await _killed(world, slot, dice)


async def _killed(world: World, slot: Slot, dice: random.Random) -> bool:
    assert slot.child is not None
    slot.restart_after = dice.choice([0.0, 0.0, 1.0, 6.0]) * bound_of(world.heartbeat)
    await slot.child.kill()
    await came_true(lambda: slot.ready, 4 * SOON)
    return True


async def slow_start(world: World, dice: random.Random) -> bool:
    """A writer is started again while everything comes late: nobody knows how late what it says is."""
    slot = a_slot(world, dice, writers=True)
    late = dice.choice([0.3, 0.8, 1.5]) * bound_of(world.heartbeat)
    async with slot.lock:
        for one in world.slots.values():
            one.redis.delay(late, "from_server")
        try:
            if not slot.ready or not await _killed(world, slot, dice):
                return False
            await a_while(world, dice, 2, 4)
        finally:
            for one in world.slots.values():
                one.redis.delay(0.0, "from_server")
    return True


async def pause(world: World, dice: random.Random) -> bool:
    """A process stands still, and goes on with what it remembers and with all that was sent to it meanwhile."""
    slot = a_slot(world, dice)
    async with slot.lock:
        child = slot.child
        if child is None or not slot.ready:
            return False
        child.signal(signal.SIGSTOP)
        try:
            await a_while(world, dice, 0.3, 7)
        finally:
            child.signal(signal.SIGCONT)
    return True


async def block(world: World, dice: random.Random) -> bool:
    """A process's event loop stands still, while its threads go on to read."""
    slot = a_slot(world, dice)
    async with slot.lock:
        child = slot.child
        if child is None or not slot.ready:
            return False
        seconds = dice.uniform(0.3, 4) * bound_of(world.heartbeat)
        child.tell(block=seconds)
        await asyncio.sleep(seconds)
    return True


async def restart_redis(world: World, dice: random.Random) -> bool:
    """Redis dies, and comes back."""
    async with world.redis_lock:
        await asyncio.to_thread(world.redis.kill)
        await asyncio.sleep(dice.choice([0.0, 0.3, 1.5]) * bound_of(world.heartbeat))
        world.redis.start()
    return True


async def freeze_redis(world: World, dice: random.Random) -> bool:
    """Redis stands still, with all its connections open."""
    async with world.redis_lock:
        world.redis.pause()
        try:
            await a_while(world, dice, 0.3, 3)
        finally:
            world.redis.resume()
    return True


async def throw_out(world: World, dice: random.Random) -> bool:
    """Redis disconnects all subscribers, or all others."""

    def ask() -> bool:
        with redis.Redis.from_url(world.redis.url, socket_timeout=2.0) as client:
            return bool(client.execute_command("CLIENT", "KILL", "TYPE", dice.choice(["pubsub", "normal"])))

    try:
        return await asyncio.to_thread(ask)
    except redis.RedisError:  # another fault's
        return False


async def restart_postgres(world: World, dice: random.Random) -> bool:
    """PostgreSQL crashes, and recovers."""
    async with world.postgres_lock:
        await asyncio.to_thread(world.postgres.kill)
        await asyncio.sleep(dice.choice([0.0, 0.3, 1.0]) * bound_of(world.heartbeat))
        world.postgres.start()
    return True


async def prune(world: World, dice: random.Random) -> bool:
    """Rows are deleted that a process, which hears nothing meanwhile, still needs."""
    slot = a_slot(world, dice)
    async with slot.lock:
        slot.redis.lost = 1.0
        try:
            await a_while(world, dice, 0.3, 1.5)
            return await _prune(world)
        finally:
            slot.redis.lost = LOST_ALWAYS


async def _prune(world: World) -> bool:
    store = open_store(world.postgres.url, Registry([invalidations()]))
    try:
        await store.open()
        return bool(await store.prune(keep=0))
    except BusrepError:
        return False
    finally:
        await store.close()


FAULTS: dict[str, Fault] = {
    "messages lost": lose,
    "messages lost everywhere": lose_everywhere,
    "cut": cut,
    "black hole": hole,
    "delay": delay,
    "half-open": half_open,
    "table away": table_away,
    "table slow": table_slow,
    "answer to COMMIT lost": answer_lost,
    "SIGKILL behind COMMIT": killed_at_commit,
    "SIGKILL": kill,
    "SIGKILL and restart on slow links": slow_start,
    "SIGSTOP": pause,
    "event loop blocked": block,
    "Redis SIGKILL and restart": restart_redis,
    "Redis frozen": freeze_redis,
    "CLIENT KILL": throw_out,
    "PostgreSQL crash and restart": restart_postgres,
    "pruned": prune,
}
"""All of them, by name."""
KILLS = ("SIGKILL", "SIGKILL behind COMMIT", "SIGKILL and restart on slow links")
