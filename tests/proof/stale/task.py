"""What the processes of a run share, and what one of them is told."""

from __future__ import annotations

import attrs

from busrep.settings import Settings

# The deployment's name on Redis, and the channel of the ordinary way.
NAME, ORDINARY_CHANNEL = "stale", "stale-ordinary"
# Names of the two caches, and the special name of both.
ITEM, PART, BOTH = "item", "part", "item_and_part"
# What is compared: ours, and two ordinary ones. The second of those is careful: it forgets all when it reconnects.
BUSREP, PUBSUB, CAREFUL = WAYS = ("busrep", "pub/sub", "pub/sub, cleared on reconnect")

# Keys, of which a cache holds most: entries are pushed out as well.
KEYS, MAXSIZE = 400, 300
# Zipf's exponent: the most popular key gets some 8 % of the reads, and as much of the writes.
SKEW = 0.9
# Lanes of one process: tasks or threads that read, and that write.
READ_LANES, WRITE_LANES = 3, 3
# Blocks of counters of one life: for each way one of each lane, of the lane for threads, and of two last looks.
LIFE_BLOCKS = (READ_LANES + 3) * len(WAYS)


@attrs.frozen(kw_only=True)
class Role:
    """One name of the deployment. ``threads``: on `busrep.sync`."""

    who: str
    writes: bool = False
    reads: bool = False
    threads: bool = False


ROLES = (
    Role(who="both-1", writes=True, reads=True),
    Role(who="both-2", writes=True, reads=True, threads=True),
    Role(who="writer", writes=True),
    Role(who="reader-1", reads=True),
    Role(who="reader-2", reads=True, threads=True),
)


@attrs.frozen(kw_only=True)
class Task:
    """What one process is told, in its first message.

    ``redis``, ``postgres``: through the process's own links. ``memory``: the oracle's file; ``block``: the first of its
    counters that are this life's. ``heartbeat``: seconds, the other periods in proportion. ``rate``: most reads a
    second of each lane and way, ``pause``: mean seconds between two writes of a lane. ``broken``: the cache believes
    that it may serve for an hour what it cannot prove to be fresh. ``quiet``: all were told to write no more.
    """

    who: str
    life: int
    seed: int
    writes: bool
    reads: bool
    threads: bool
    redis: str
    postgres: str
    memory: str
    block: int
    heartbeat: float
    rate: float
    pause: float
    broken: bool = False
    quiet: bool = False


def settings_of(heartbeat: float, *, broken: bool = False) -> Settings:
    """The defaults at a heartbeat of 2 s, and the same in proportion at a quicker one.

    Only rows are not kept for an hour but for four beats, so that processes that stood still miss some for good.
    """
    return Settings(
        heartbeat=heartbeat,
        redis_timeout=2.5 * heartbeat,
        retry_max=2.5 * heartbeat,
        claim_timeout=5 * heartbeat,
        fetch_timeout=15 * heartbeat,
        invalidations_kept=4 * heartbeat,
        cache_bound=3_600.0 if broken else None,
    )


def bound_of(heartbeat: float) -> float:
    """The bound that is promised, in seconds: `Settings.cache_bound`'s default."""
    return 1.25 * heartbeat
