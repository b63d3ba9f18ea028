"""Faults of busrep's own processes."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.proof.soak.children import came_true
from tests.proof.soak.faults.common import SOON, Fault, pick
from tests.proof.soak.task import LEASE
from tests.proof.soak.world import World


async def kill(world: World, dice: random.Random) -> bool:
    """A process dies at once, and is started again: soon, or after others had reason to finish it."""
    slot = pick(world, dice)
    async with slot.lock:
        if not await came_true(lambda: slot.ready, SOON):
            return False
        assert slot.child is not None
        slot.restart_after = dice.choice([0.0, 0.0, 0.5, 2 * LEASE])
        await slot.child.kill()
        await came_true(lambda: slot.ready, 3 * SOON)
    return True


async def pause(world: World, dice: random.Random) -> bool:
    """A process stands still until others take it for dead, and then goes on as if nothing had been."""
    slot = pick(world, dice, writers=True) if dice.random() < 0.75 else pick(world, dice, readers=True)
    async with slot.lock:
        child = slot.child
        if child is None or not slot.ready:
            return False
        child.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(LEASE * dice.uniform(1.2, 2.5))
        finally:
            child.signal(signal.SIGCONT)
    return True


async def twice(world: World, dice: random.Random) -> bool:
    """A writer is started while its predecessor lives: the predecessor must notice, and end."""
    slot = pick(world, dice, writers=True)
    async with slot.lock:
        before = slot.child
        if before is None or not slot.ready:
            return False
        await world.launch(slot)
        # Its time to end begins when the successor has the name: that may take long on a database that is away.
        claimed = await came_true(lambda: slot.ready, 4 * SOON)
        if claimed and not await came_true(lambda: not before.running, 4 * SOON):
            world.violations.append(f"{before.name} lives on, though {slot.child and slot.child.name} has its name")
            await before.kill()
    return True


FAULTS: dict[str, Fault] = {
    "SIGKILL": kill,
    "SIGSTOP longer than the lease": pause,
    "one name twice": twice,
}
