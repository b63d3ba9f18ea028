"""The run: everything up, faults by dice, everything healed, a last look at what caches hold, the verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from busrep.errors import ConfigError
from tests.proof.soak.children import came_true
from tests.proof.soak.run import draws
from tests.proof.stale.faults import FAULTS, KILLS
from tests.proof.stale.items import ALL
from tests.proof.stale.memory import AGES, NANO, Sum
from tests.proof.stale.task import BUSREP, LIFE_BLOCKS, ROLES, WAYS, Role, bound_of
from tests.proof.stale.world import World

# Faults under way at a time, and the bounds between the end of one and the next.
AT_ONCE = 3
PAUSES = (0.0, 0.2, 0.5, 1.0)
# Seconds for all processes to come up, and for their last looks.
UP = 90.0
# Bounds after everything healed in which every cache has had the time to hear of everything.
QUIET = 4.0
# Seconds between two lines that say how it goes.
PROGRESS = 10.0


@attrs.frozen(kw_only=True)
class Options:
    """What to run: harm for at least ``seconds``, and until ``reads`` reads were made on each way.

    ``heartbeat``, ``rate``, ``pause``, ``broken``: see `Task`. ``kinds``: names of faults, empty for all.
    """

    seconds: float
    seed: int
    reads: int = 0
    heartbeat: float = 2.0
    rate: float = 20_000.0
    pause: float = 0.2
    roles: tuple[Role, ...] = ROLES
    kinds: Sequence[str] = ()
    broken: bool = False
    keep: bool = False
    on_event: Callable[[str], None] | None = None


class Run:
    """One run."""

    def __init__(self, options: Options) -> None:
        if unknown := set(options.kinds) - set(FAULTS):
            raise ConfigError(f"no such faults: {', '.join(sorted(unknown))}")
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="busrep-stale-"))
        self.started = time.monotonic()
        self.done: Counter[str] = Counter()
        self.without_effect: Counter[str] = Counter()
        self.behind: dict[str, int] = dict.fromkeys(WAYS, 0)
        self._events = (self.folder / "events.log").open("w", buffering=1)
        task = {"rate": options.rate, "pause": options.pause, "broken": options.broken}
        self.world = World(self.folder, options.seed, options.heartbeat, task)

    def event(self, text: str) -> None:
        """Note what happens; the moment as the oracle has it comes first."""
        self._events.write(f"{time.monotonic():.3f} {time.monotonic() - self.started:8.2f} {text}\n")
        if self.options.on_event is not None:
            self.options.on_event(text)

    async def run(self) -> dict[str, Any]:
        """The whole run; the report. ``ok`` says whether it showed what it must."""
        keep = True
        try:
            async with self.world.running(self.options.roles):
                await self._start()
                began = time.monotonic()
                await self._harm()
                harmed = time.monotonic() - began
                await self._heal()
                await self.last_look()
                report = self._report(harmed)
            keep = self.options.keep or not report["ok"]
            return {**report, "folder": str(self.folder) if keep else None}
        except (asyncio.CancelledError, KeyboardInterrupt):
            keep = self.options.keep
            raise
        finally:
            self._events.close()
            if not keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _start(self) -> None:
        self.event(f"seed {self.options.seed}; everything is kept in {self.folder} until it is known to be well")
        for slot in self.world.slots.values():
            await self.world.launch(slot)
        await came_true(lambda: not self._not_ready() or bool(self.world.violations), UP)
        if late := self._not_ready():
            trouble = "\n".join(self.world.violations[:1])
            raise ConfigError(f"not up: {', '.join(late)}; logs are in {self.folder}\n{trouble}")
        self.event(f"{len(self.world.slots)} processes are up")

    def _not_ready(self) -> list[str]:
        return [slot.role.who for slot in self.world.slots.values() if not slot.ready]

    # -- harm -------------------------------------------------------------------------------------

    async def _harm(self) -> None:
        began = time.monotonic()
        faults = draws(self.options.seed, self.options.kinds or tuple(FAULTS))

        def goes_on() -> bool:
            ours = self._sums()[BUSREP]
            short = time.monotonic() - began < self.options.seconds or ours.reads < self.options.reads
            # What comes after a violation would only blur it.
            return short and not ours.stale and not self.world.violations

        async def lane(number: int) -> None:
            pauses = random.Random(f"{self.options.seed} lane {number}")
            while goes_on():
                await self._do(*next(faults))
                await asyncio.sleep(pauses.choice(PAUSES) * bound_of(self.options.heartbeat))

        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._progress())
            await asyncio.wait([group.create_task(lane(number)) for number in range(AT_ONCE)])
            progress.cancel()

    async def _do(self, kind: str, dice: random.Random) -> None:
        self.event(f"begin: {kind}")
        effect = await FAULTS[kind](self.world, dice)
        (self.done if effect else self.without_effect)[kind] += 1
        self.event(f"end: {kind}" if effect else f"end: {kind}, without effect")

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS)
            sums = self._sums()
            stale = ", ".join(f"{sums[way].stale} stale on {way}" for way in WAYS)
            self.event(f"{sums[BUSREP].reads} reads on each way, {self.done.total()} faults; {stale}")

    def _sums(self) -> dict[str, Sum]:
        """What all lanes of all lives have counted so far, by way."""
        sums = {way: Sum() for way in WAYS}
        for block in range(self.world.blocks):
            sums[WAYS[block % LIFE_BLOCKS % len(WAYS)]].add(self.world.memory.tally(block))
        return sums

    # -- the end ----------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.event("everything heals, and nobody writes any more")
        world = self.world
        for slot in world.slots.values():
            slot.redis.lost = 0.0
            slot.redis.heal()
            slot.postgres.heal()
        world.redis.start()
        world.postgres.start()
        if not await came_true(lambda: not self._not_ready(), UP):
            world.violations.append(f"not up, {UP:g} s after everything healed: {', '.join(self._not_ready())}")
        world.tell_all(quiet=True)
        if not await came_true(lambda: all(slot.latest("quiet") for slot in world.slots.values()), UP):
            world.violations.append(f"a process still writes, {UP:g} s after it was told to be quiet")
        await asyncio.sleep(QUIET * bound_of(self.options.heartbeat))

    async def last_look(self) -> None:
        """Every process compares what it gets with the table, which does not change any more."""
        world = self.world
        rows = sorted(await asyncio.to_thread(world.database.ask, ALL))
        world.tell_all(final=[version for _, version in rows])
        if not await came_true(lambda: all(slot.latest("behind") for slot in world.slots.values()), UP):
            world.violations.append(f"a process has not compared its caches with the table in {UP:g} s")
        for slot in world.slots.values():
            for way, entries in (slot.latest("behind") or {}).items():
                self.behind[way] += entries
        if rows != sorted(await asyncio.to_thread(world.database.ask, ALL)):
            world.violations.append("somebody wrote, though all were told to be quiet: what was compared says nothing")
        world.stopping = True
        world.tell_all(stop=True)
        if not await came_true(lambda: not any(s.child and s.child.running for s in world.slots.values()), UP):
            world.violations.append(f"a process that was asked to end is still there after {UP:g} s")

    # -- the verdict ------------------------------------------------------------------------------

    def _report(self, harmed: float) -> dict[str, Any]:
        world = self.world
        made: Counter[str] = Counter()
        for latest in self._reports():
            made.update(latest.get("made") or {})
        report: dict[str, Any] = {
            "seed": self.options.seed,
            "seconds_of_faults": round(harmed, 1),
            "bound": bound_of(self.options.heartbeat),
            "ways": {way: self._numbers(way, found) for way, found in self._sums().items()},
            "transactions": dict(sorted(made.items())),
            "messages_lost": sum(slot.redis.counts["messages_lost"] for slot in world.slots.values()),
            "gaps_found": sum(_number(latest, "reader", "gaps_found") for latest in self._reports()),
            "kills": sum(self.done[kind] for kind in KILLS),
            "faults": self.done.total(),
            "faults_by_kind": dict(sorted(self.done.items())),
            "without_effect": dict(sorted(self.without_effect.items())),
            "processes": {slot.role.who: slot.lives for slot in world.slots.values()},
            "fenced": world.fenced,
            "caches": self._caches(),
        }
        failed = [*world.violations, *judge(report)]
        return {"ok": not failed, **report, "failed": failed}

    def _reports(self) -> Iterator[dict[str, Any]]:
        for slot in self.world.slots.values():
            yield from slot.reports()

    def _numbers(self, way: str, found: Sum) -> dict[str, Any]:
        return {
            "reads": found.reads,
            "hits": max(0, found.reads - found.loads),
            "loads": found.loads,
            "failed": found.failed,
            "stale": found.stale,
            "oldest": round(found.oldest / NANO, 3),
            "behind_at_the_end": self.behind[way],
            "ages": dict(zip(bars(bound_of(self.options.heartbeat)), found.ages, strict=True)),
        }

    def _caches(self) -> dict[str, int]:
        """The counters of all caches, as far as processes that died had reported them."""
        found: Counter[str] = Counter()
        for report in self._reports():
            _add_numbers(found, report.get("statistics", {}).get("caches") or {})
        return dict(sorted(found.items()))


def bars(bound: float) -> list[str]:
    """What the bars of the histogram are called, for people."""
    return ["current", *(f"<= {part * bound:.3g} s" for part in AGES), f"> {AGES[-1] * bound:.3g} s"]


def judge(report: dict[str, Any]) -> list[str]:
    """Why a run did not show what it must: what was stale, and what would have to happen for that to mean something."""
    ours = report["ways"][BUSREP]
    failed = []
    if ours["stale"]:
        failed.append(f"{ours['stale']} reads were older than the bound, the worst by {ours['oldest']} s")
    if ours["behind_at_the_end"]:
        failed.append(f"{ours['behind_at_the_end']} entries were stale at the end, and would have stayed")
    failed += [f"no {name.replace('_', ' ')}" for name in ("messages_lost", "gaps_found", "kills") if not report[name]]
    if ours["hits"] * 2 <= ours["reads"]:
        failed.append(f"only {ours['hits']} of {ours['reads']} reads came from the cache")
    return failed


def _number(report: dict[str, Any], part: str, name: str) -> int:
    return int((report.get("statistics", {}).get(part) or {}).get(name, 0))


def _add_numbers(found: Counter[str], numbers: dict[str, Any]) -> None:
    for name, value in numbers.items():
        if isinstance(value, dict):
            _add_numbers(found, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] += value
