"""Messages on the channel that no process of the deployment sent: stray, forged, foreign and hostile ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import redis

from tests.proof.soak.database import psycopg
from tests.proof.soak.faults.common import Fault
from tests.proof.soak.task import NAME, ROLES
from tests.proof.soak.world import World, ask_redis

# Messages of one fault.
MESSAGES = 100
# Unknown lines of one hostile message: 2.6 MB, as it froze an event loop once.
HOSTILE_LINES = 1_300_000
# The largest position that a line can hold.
HIGHEST = 2**63 - 1
# An epoch that no fact log has.
OTHER_EPOCH = "0123456789abcdef" * 2

WRITERS = [role.who for role in ROLES if role.writes]


def stray_message(dice: random.Random, positions: Mapping[tuple[str, str], int]) -> str:
    """One message that must change nothing. ``positions``: (stream, writer) -> proven position."""
    (stream, writer), at = dice.choice(sorted(positions.items()))
    above = at + dice.choice([1, 10, 1_000, 2**40, 2**62 - at])
    # Another deployment's process of the same name, and one that nobody registered.
    speaker = dice.choice([writer, "nobody", f"{writer}-old"])
    named = f"NAME {speaker} {dice.choice([1, 5, 2**50])}\n"
    server = f"SERVER {NAME} {OTHER_EPOCH}\n"
    lines = [
        f"POSITION {stream} {writer} 0 {above}",
        f"POSITION {stream} {writer} {above} {above}",
        f'RDATA {stream} {writer} {above} {{"stray":true}}',
        f"POSITION {stream} nobody {2**62} {2**62}",
        f'RDATA {stream} nobody {above} ["stray"]',
        f"{server}{named}POSITION {stream} {speaker} {above} {above}",
        f"{named}POSITION {stream} {speaker} 0 {HIGHEST}",
        f"NAME {writer} {2**52}",
        "NAME ghost 5",
        f"{server}NAME {writer} 1",
        "REPLICATE",
        "\0",
        f"POSITION {stream} {'n' * 9_000} 1 1",
        f"POSITION {stream} a\0b 1 1",
        "12",
        "",
    ]
    return dice.choice(lines)


async def publish(world: World, *messages: str | bytes) -> bool:
    """Publish messages on the deployment's channel, as somebody who may."""
    try:
        master = await asyncio.to_thread(world.master)
        for message in messages:
            await asyncio.to_thread(ask_redis, master, "PUBLISH", NAME, message)  # type: ignore[arg-type]
    except (redis.RedisError, StopIteration):
        return False
    return True


async def stray_lines(world: World, dice: random.Random) -> bool:
    """Lines of processes that are gone, never were, or belong to another deployment."""
    try:
        positions = await asyncio.to_thread(world.database.positions)
    except psycopg().OperationalError:  # it is being restarted
        return False
    return bool(positions) and await publish(world, *(stray_message(dice, positions) for _ in range(MESSAGES)))


async def hostile_message(world: World, _: random.Random) -> bool:
    """One message of so many bad lines that to look at each would take long."""
    return await publish(world, b"X\n" * HOSTILE_LINES)


async def replicate_flood(world: World, _: random.Random) -> bool:
    """Everybody is asked for positions, again and again."""
    return await publish(world, *["REPLICATE"] * MESSAGES)


FAULTS: dict[str, Fault] = {
    "stray lines": stray_lines,
    "hostile message": hostile_message,
    "REPLICATE flood": replicate_flood,
}
