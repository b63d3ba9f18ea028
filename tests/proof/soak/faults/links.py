"""Faults of the links: what a network does."""

from __future__ import annotations

import asyncio
import random

from busrep.testing.pipes import DIRECTIONS, Direction
from tests.proof.soak.faults.common import SOON, Fault, pick, some_links
from tests.proof.soak.task import LEASE
from tests.proof.soak.world import World


async def cut(world: World, dice: random.Random) -> bool:
    """Connections are reset, and cannot be made again for a moment."""
    async with some_links(world, dice) as place:
        for link in place.links:
            link.refuse = dice.random() < 0.5
        place.cut()
        await asyncio.sleep(dice.uniform(0, 1))
    return True


async def delay(world: World, dice: random.Random) -> bool:
    """Everything arrives late, by a time that varies."""
    async with some_links(world, dice) as place:
        for link in place.links:
            link.delay((0.01, dice.choice([0.1, 0.4])))
        await asyncio.sleep(dice.uniform(1, 3))
    return True


async def hole(world: World, dice: random.Random, direction: Direction | None) -> bool:
    """Nothing arrives, for longer than a lease sometimes; then what was sent does, or the connections are gone."""
    async with some_links(world, dice) as place:
        for link in place.links:
            link.black_hole(direction)
        await asyncio.sleep(dice.uniform(0.3, 2.5 * LEASE))
        if dice.random() < 0.5:
            place.cut()
    return True


async def black_hole(world: World, dice: random.Random) -> bool:
    """In both directions."""
    return await hole(world, dice, None)


async def one_way(world: World, dice: random.Random) -> bool:
    """In one direction."""
    return await hole(world, dice, dice.choice(DIRECTIONS))


async def half_open(world: World, dice: random.Random) -> bool:
    """One side's connection is gone, the other side does not know.

    The process must find out by itself on Redis. On PostgreSQL TCP's keepalive does, which here is this function.
    """
    async with some_links(world, dice) as place:
        for link in place.links:
            link.abandon(dice.choice(["client", "server"]))
        if place.links is place.slot.postgres:
            await asyncio.sleep(dice.uniform(0.5, 2 * LEASE))
            place.cut()
    return True


async def answer_lost(world: World, dice: random.Random) -> bool:
    """The COMMIT arrives, its answer does not."""
    return await at_commit(world, dice, after=True)


async def commit_lost(world: World, dice: random.Random) -> bool:
    """The connection breaks before COMMIT has passed."""
    return await at_commit(world, dice, after=False)


async def at_commit(world: World, dice: random.Random, *, after: bool) -> bool:
    """Cut a connection before or behind the next COMMIT; mostly a writer's, else that of an exactly-once reader."""
    slot = pick(world, dice, writers=True) if dice.random() < 0.8 else world.slots["exact"]
    async with slot.lock:
        link = slot.postgres[-1]
        happened = asyncio.wrap_future(link.cut_when(b"COMMIT", "to_server", after=after))
        done, _ = await asyncio.wait([happened], timeout=SOON)
        if not done:
            link.heal()
        return bool(done)


FAULTS: dict[str, Fault] = {
    "cut": cut,
    "delay": delay,
    "black hole": black_hole,
    "black hole, one way": one_way,
    "half-open": half_open,
    "answer to COMMIT lost": answer_lost,
    "COMMIT lost": commit_lost,
}
