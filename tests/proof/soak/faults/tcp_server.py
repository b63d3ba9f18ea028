"""Faults of the TCP server in front of Redis, in a soak that goes over TCP."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.proof.soak.faults.common import Fault
from tests.proof.soak.world import World


async def restart_hub(world: World, dice: random.Random) -> bool:
    """kill -9; a supervisor starts it again, on the same port."""
    async with world.hub_lock:
        assert world.hub is not None
        await world.hub.kill()
        await asyncio.sleep(dice.choice([0.0, 0.5, 2.0]))
        await world.start_hub()
    return True


async def freeze_hub(world: World, dice: random.Random) -> bool:
    """It stands still, with all its connections open."""
    async with world.hub_lock:
        assert world.hub is not None
        world.hub.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(dice.choice([0.5, 3.0]))
        finally:
            world.hub.signal(signal.SIGCONT)
    return True


FAULTS: dict[str, Fault] = {
    "TCP server SIGKILL and restart": restart_hub,
    "TCP server SIGSTOP": freeze_hub,
}
