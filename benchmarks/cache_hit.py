"""What a call of a cached function costs, on one core, beside the cache that is underneath.

busrep:    a function under `bus.cached`, of an open bus whose Redis and table are in this process's memory: it beats,
           and every hit looks at the clock and asks whether the entry is still proven to be fresh.
cachetools: the same function under `cachetools.cached(LRUCache(1024), lock=threading.Lock())`. cachetools knows no
           coroutines: for those the least that does the same, by hand (`hashkey`, the lock, the look, the await).
lookup:    the least that any cache must do: take the lock, look under the tuple of the arguments. For comparison only.

Hits go round 100 keys. Misses are of keys that were never asked for, in full caches: each pushes an old entry
out. All contenders take turns in one process, and are measured in CPU seconds, so that a busy machine slows them alike;
each figure is the median over the rounds, each ratio the median of the rounds' ratios.

    python benchmarks/cache_hit.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import setting
from cachetools import LRUCache, cached
from cachetools.keys import hashkey

from busrep import Settings
from busrep.caches.cache import invalidations
from busrep.testing.pair import MemoryDeployment

SIZE = 1_024
KEYS = list(range(100))
TARGET = 1.5


def value(key: int) -> int:
    return key


async def value_async(key: int) -> int:
    return key


def looked_up(function: Callable[[int], int]) -> Callable[[int], int]:
    store, lock = LRUCache[Any, int](SIZE), threading.Lock()

    def call(*args: int) -> int:
        with lock:
            if args in store:
                return store[args]
        found = function(*args)
        with lock:
            store[args] = found
        return found

    return call


def cached_async(function: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
    """As `cachetools.cached` is for plain functions, line by line."""
    store, lock = LRUCache[Any, int](SIZE), threading.Lock()

    async def call(*args: Any, **kwargs: Any) -> int:
        key = hashkey(*args, **kwargs)
        with lock:
            try:
                return store[key]
            except KeyError:
                pass
        found = await function(*args, **kwargs)
        with lock:
            store[key] = found
        return found

    return call


def seconds(call: Callable[[int], int], keys: list[int]) -> float:
    start = time.process_time()
    for key in keys:
        call(key)
    return (time.process_time() - start) / len(keys)


async def seconds_async(call: Callable[[int], Awaitable[int]], keys: list[int]) -> float:
    start = time.process_time()
    for key in keys:
        await call(key)
    return (time.process_time() - start) / len(keys)


def report(title: str, names: list[str], rounds: list[list[float]]) -> float:
    """Print the medians, in ns; give the ratio of the last one to the one before it."""
    print(f"{title:14}" + "".join(f"{name:>14}" for name in names) + f"{'ratio':>8}")
    ratio = median(one[-1] / one[-2] for one in rounds)
    print(
        " " * 14 + "".join(f"{median(column) * 1e9:11.0f} ns" for column in zip(*rounds, strict=True)) + f"{ratio:8.2f}"
    )
    return ratio


async def measure(rounds: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds a call, of each round."""
    stream = invalidations()
    # Defaults; beats that come while a round runs would be measured with it, at random.
    async with (
        MemoryDeployment(stream, settings=Settings()) as deployment,
        deployment.bus(writer="w", start=None) as bus,
    ):
        plain = [
            looked_up(value),
            cached(LRUCache[Any, int](SIZE), lock=threading.Lock())(value),
            bus.cached(maxsize=SIZE, name="plain")(value),
        ]
        awaited = [cached_async(value_async), bus.cached(maxsize=SIZE, name="awaited")(value_async)]
        async with asyncio.timeout(30):
            while not bus.statistics()["caches"]["streams"][stream.name]["trusted"]:
                await asyncio.sleep(0.05)
        hits, misses = KEYS * repeats, itertools.count(SIZE)
        for call in plain:
            seconds(call, list(range(SIZE)))
        for call_async in awaited:
            await seconds_async(call_async, list(range(SIZE)))
        found: dict[str, list[list[float]]] = {name: [] for name in ("hit", "hit, async", "miss", "miss, async")}
        for _ in range(rounds):
            await asyncio.sleep(0.01)  # the bus beats here
            new = list(itertools.islice(misses, len(hits) // 10))
            found["miss"].append([seconds(call, new) for call in plain])
            found["miss, async"].append([await seconds_async(call, new) for call in awaited])
            # Warm again: the misses have pushed the keys out.
            for call in plain:
                seconds(call, KEYS)
            for call_async in awaited:
                await seconds_async(call_async, KEYS)
            found["hit"].append([seconds(call, hits) for call in plain])
            found["hit, async"].append([await seconds_async(call, hits) for call in awaited])
        statistics = bus.statistics()["caches"]["caches"]
    names = ["lookup", "cachetools", "busrep"]
    by_name: dict[str, dict[str, Any]] = {}
    for title, figures in found.items():
        mine = names[-len(figures[0]) :]
        report(title, mine, figures)
        by_name[title] = dict(zip(mine, zip(*figures, strict=True), strict=True))
    asked = rounds * len(hits)
    for name, numbers in statistics.items():
        assert numbers["hits"] >= asked, f"{name}: {numbers}: not all that was measured as a hit was one"
    print(f"target: a hit within {TARGET} of cachetools")
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=500, help="times each of 100 keys is asked for in a round")
    setting.add_json(parser)
    given = parser.parse_args()
    setting.tell(setting.machine())
    setting.write(given, asyncio.run(measure(given.rounds, given.repeats)))


if __name__ == "__main__":
    main()
