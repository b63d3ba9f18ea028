"""What faults have in common: whom they hit, and that they let go of it again."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import attrs

from busrep.testing.links import FaultyLink
from tests.proof.soak.world import Slot, World

Fault = Callable[[World, random.Random], Awaitable[bool]]

# Seconds to wait for something that is about to happen, a COMMIT to pass for example.
SOON = 5.0


def pick(world: World, dice: random.Random, *, writers: bool = False, readers: bool = False) -> Slot:
    """A process."""
    slots = [
        slot
        for slot in world.slots.values()
        if (not writers or slot.role.writes) and (not readers or not slot.role.writes)
    ]
    return dice.choice(slots)


@attrs.frozen
class Place:
    """One process and the links of it that a fault is about."""

    slot: Slot
    links: list[FaultyLink]

    def cut(self) -> None:
        """Reset all connections."""
        for link in self.links:
            link.cut()

    def heal(self) -> None:
        """End the fault."""
        for link in self.links:
            link.heal()


@contextlib.asynccontextmanager
async def some_links(world: World, dice: random.Random, *, redis_only: bool = False) -> AsyncIterator[Place]:
    """A process's links to Redis or to PostgreSQL, for this fault alone; healed afterwards."""
    slot = pick(world, dice)
    links = slot.redis if redis_only or dice.random() < 0.6 else slot.postgres
    async with slot.lock:
        place = Place(slot, links)
        try:
            yield place
        finally:
            place.heal()
