"""Faults of the Redis servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator

import redis

from busrep.testing.servers import RedisServer
from tests.proof.soak.children import came_true
from tests.proof.soak.faults.common import Fault, pick
from tests.proof.soak.task import LEASE, NAME
from tests.proof.soak.world import USER, World, ask_redis

# A Sentinel's failover, seconds.
FAILOVER = 20.0
# Junk for the output buffers: one message, and all of them at most. The kernel takes some megabytes for each
# connection before the server has to keep anything.
JUNK_BYTES, JUNK_MOST = 64_000, 48 * 2**20


@contextlib.asynccontextmanager
async def redis_alone(world: World) -> AsyncIterator[None]:
    """No other fault of the Redis servers meanwhile; afterwards they are as they should be."""
    async with world.redis_lock:
        interrupted = False
        try:
            yield
        except asyncio.CancelledError:
            interrupted = True  # the servers are about to be stopped: nobody waits for them to agree
            raise
        finally:
            for server in () if interrupted else world.redis:
                server.start()
            if not interrupted and not await world.redis_settled():
                world.violations.append("the Redis servers do not agree on who is master")
            await world.allow_everything_on_redis()


async def kill_subscribers(world: World, _: random.Random) -> bool:
    """Every subscriber of the master loses its connection."""
    return await client_kill(world, "pubsub")


async def kill_publishers(world: World, _: random.Random) -> bool:
    """Every other client does."""
    return await client_kill(world, "normal")


async def client_kill(world: World, kind: str) -> bool:
    """Ask the master to disconnect all clients of a kind."""
    try:
        return bool(await asyncio.to_thread(ask_redis, world.master(), "CLIENT", "KILL", "TYPE", kind))
    except (redis.RedisError, StopIteration):
        return False


async def flushall(world: World, _: random.Random) -> bool:
    """Redis forgets everything; busrep keeps nothing there."""
    try:
        return bool(await asyncio.to_thread(ask_redis, world.master(), "FLUSHALL"))
    except (redis.RedisError, StopIteration):
        return False


async def output_buffer(world: World, dice: random.Random) -> bool:
    """A subscriber that stopped reading is thrown out by Redis, in the middle of a message perhaps."""
    slot = pick(world, dice)
    async with redis_alone(world), slot.lock:
        child = slot.child
        if child is None or not slot.ready:
            return False
        stops = dice.random() < 0.5
        if stops:
            child.signal(signal.SIGSTOP)
        else:
            for link in slot.redis:
                link.black_hole("from_server")
        try:
            return await overrun(world)
        except (redis.RedisError, StopIteration):
            return False
        finally:
            child.signal(signal.SIGCONT)
            for link in slot.redis:
                link.heal()


async def overrun(world: World) -> bool:
    """Send junk, which every reader has to bear, and large facts, which nobody may lose."""
    master = world.master()
    await asyncio.to_thread(ask_redis, master, "CONFIG", "SET", "client-output-buffer-limit", "pubsub 64kb 32kb 1")
    with contextlib.suppress(redis.ResponseError):  # Valkey 9.1 does not count replies that it does not copy
        await asyncio.to_thread(ask_redis, master, "CONFIG", "SET", "min-string-size-avoid-copy-reply", 0)
    for slot in world.slots.values():
        if slot.role.writes and slot.child is not None:
            slot.child.tell(burst={"facts": 200, "bytes": 2_000})
    before, sent = thrown_out(master), 0
    while sent < JUNK_MOST:
        await asyncio.to_thread(ask_redis, master, "PUBLISH", NAME, "x" * JUNK_BYTES)
        sent += JUNK_BYTES
        if sent % (JUNK_BYTES * 16) == 0 and thrown_out(master) > before:
            return True
    return thrown_out(master) > before


def thrown_out(server: RedisServer) -> int:
    """How often the server disconnected a client for its output buffer. INFO counts it since Redis 7.2 only."""
    return (server.directory / "server.log").read_text(errors="replace").count("output buffer limits")


async def acl(world: World, dice: random.Random) -> bool:
    """busrep's user loses its rights for a while, or its password."""
    rights = dice.choice([["-@all"], ["resetchannels"], ["off"], ["resetpass", ">another"]])
    async with redis_alone(world):
        try:
            for server in world.redis:
                await asyncio.to_thread(ask_redis, server, "ACL", "SETUSER", USER, *rights)
                if rights[0] in ("off", "resetpass"):  # who is connected already would stay
                    await asyncio.to_thread(ask_redis, server, "CLIENT", "KILL", "USER", USER)
        except redis.RedisError:
            return False
        await asyncio.sleep(dice.uniform(0.5, 2 * LEASE))
    return True


async def restart_redis(world: World, _: random.Random) -> bool:
    """The master dies and comes back at once, before Sentinel has an opinion."""
    async with redis_alone(world):
        try:
            master = world.master()
        except (redis.RedisError, StopIteration):
            return False
        await asyncio.to_thread(master.kill)
        master.start()
    return True


async def freeze_redis(world: World, dice: random.Random) -> bool:
    """The master stands still, with all its connections open; sometimes until Sentinel has another one."""
    async with redis_alone(world):
        try:
            master = world.master()
        except (redis.RedisError, StopIteration):
            return False
        master.pause()
        try:
            await asyncio.sleep(dice.choice([0.5, 4.0]))
        finally:
            master.resume()
    return True


async def failover(world: World, dice: random.Random) -> bool:
    """The replica is promoted: on demand, or because the master is dead."""
    async with redis_alone(world):
        try:
            before = world.master()
            if dice.random() < 0.5:
                await asyncio.to_thread(before.kill)
            else:
                await asyncio.to_thread(ask_redis, world.sentinel, "SENTINEL", "FAILOVER", world.sentinel.service)
        except (redis.RedisError, StopIteration):
            return False
        return await came_true(lambda: master_is_not(world, before), FAILOVER)


def master_is_not(world: World, before: object) -> bool:
    """Whether Sentinel names another master than before."""
    try:
        return world.master() is not before
    except (redis.RedisError, StopIteration):
        return False


FAULTS: dict[str, Fault] = {
    "CLIENT KILL TYPE pubsub": kill_subscribers,
    "CLIENT KILL TYPE normal": kill_publishers,
    "FLUSHALL": flushall,
    "output buffer overrun": output_buffer,
    "ACL revoked": acl,
    "Redis SIGKILL and restart": restart_redis,
    "Redis frozen": freeze_redis,
    "failover by Sentinel": failover,
}
