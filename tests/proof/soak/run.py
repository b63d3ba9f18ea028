"""The run: everything up, faults by dice, everything healed, every reader at the end, the verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from busrep.errors import ConfigError
from tests.proof.soak.children import came_true
from tests.proof.soak.faults import faults_over
from tests.proof.soak.ledger import read_ledger
from tests.proof.soak.task import ROLES
from tests.proof.soak.verdict import Truth, Verdict, judge_effects, judge_reader, judge_writer
from tests.proof.soak.world import Slot, World, ask_redis

# Faults under way at a time, and the seconds between the ends of one and the next.
AT_ONCE = 4
PAUSES = (0.0, 0.2, 0.5, 1.0)
# What happens more often than the rest.
OFTEN = {"SIGKILL": 3, "cut": 2, "black hole": 2, "answer to COMMIT lost": 2, "one name twice": 2}
# Seconds for all processes to come up, at the start and after everything healed.
UP = 90.0
# Seconds for every writer to write its last facts, and for every reader to get there.
FINISH = 90.0
# Seconds that harm goes on at most for what a run is to show, beyond those it was given.
LONGER = 120.0
# What the report sums up of the readers' statistics.
READER_COUNTS = ("gaps_found", "gaps_filled", "fetches", "fetches_failed", "duplicates_dropped", "parse_errors")
# Seconds between two lines that say how it goes.
PROGRESS = 10.0


@attrs.frozen
class Options:
    """What to run. ``over``: "redis"; "tcp", a TCP server in front of it; or "sync", with threads in all processes.
    ``kinds``: names of faults, empty for all; ``most`` ends the run early after so many. ``enough``: numbers of the
    report that must be reached before harm ends; a busy machine may take longer than ``seconds`` for them."""

    seconds: float
    seed: int
    kinds: Sequence[str] = ()
    over: str = "redis"
    most: int | None = None
    enough: Mapping[str, int] = attrs.field(factory=dict[str, int])
    keep: bool = False
    on_event: Callable[[str], None] | None = None


def draws(seed: int, kinds: Sequence[str]) -> Iterator[tuple[str, random.Random]]:
    """Faults without end, each with dice of its own: all kinds in an order of the seed's, again and again."""
    order, number = random.Random(seed), 0
    while True:
        bag = [kind for kind in sorted(kinds) for _ in range(OFTEN.get(kind, 1))]
        order.shuffle(bag)
        for kind in bag:
            number += 1
            yield kind, random.Random(f"{seed} {number} {kind}")


class Soak:
    """One run."""

    def __init__(self, options: Options) -> None:
        self.faults = faults_over(options.over)
        if unknown := set(options.kinds) - set(self.faults):
            raise ConfigError(f"no such faults: {', '.join(sorted(unknown))}")
        self.kinds = options.kinds or tuple(self.faults)
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="busrep-soak-"))
        self.started = time.monotonic()
        self.done: Counter[str] = Counter()
        self.without_effect: Counter[str] = Counter()
        self._events = (self.folder / "events.log").open("w", buffering=1)
        self.world = World(self.folder, options.seed, self.event, options.over)

    def event(self, text: str) -> None:
        """Note what happens, with the time of day as the ledgers have it."""
        self._events.write(f"{time.time():.3f} {time.monotonic() - self.started:8.2f} {text}\n")
        if self.options.on_event is not None:
            self.options.on_event(text)

    async def run(self) -> dict[str, Any]:
        """The whole soak; the report. ``ok`` says whether all went as it must."""
        kept = self.options.keep
        try:
            async with self.world.running():
                await self._start()
                began = time.monotonic()
                await self._harm()
                harmed = time.monotonic() - began
                await self._heal()
                await self._finish()
                report = await asyncio.to_thread(self._report, harmed, time.monotonic() - began)
            kept = kept or not report["ok"]
            return report
        except Exception:
            kept = True
            raise
        finally:  # an interrupted run leaves nothing
            self._events.close()
            if not kept:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _start(self) -> None:
        self.event(f"seed {self.options.seed}; everything is kept in {self.folder} until it is known to be well")
        for slot in self.world.slots.values():
            await self.world.launch(slot)
        if not await came_true(self._all_ready, UP):
            trouble = "\n".join(self.world.violations[:1])
            late = ", ".join(self._not_ready())
            raise ConfigError(f"not up after {UP:g} s: {late}; logs are in {self.folder}\n{trouble}")
        self.event(f"{len(ROLES)} processes are up")

    def _all_ready(self) -> bool:
        return not self._not_ready()

    def _not_ready(self) -> list[str]:
        return [slot.who for slot in self.world.slots.values() if not slot.ready]

    # -- harm -------------------------------------------------------------------------------------

    async def _harm(self) -> None:
        deadline = time.monotonic() + self.options.seconds
        faults = draws(self.options.seed, self.kinds)
        left = self.options.most if self.options.most is not None else -1

        def goes_on() -> bool:
            beyond = time.monotonic() - deadline
            return beyond < 0 or (beyond < LONGER and not self._shown_enough())

        async def lane(number: int) -> None:
            nonlocal left
            pauses = random.Random(f"{self.options.seed} lane {number}")
            # What comes after a violation would only blur it.
            while goes_on() and left != 0 and not self.world.violations:
                left -= 1
                await self._do(*next(faults))
                await asyncio.sleep(pauses.choice(PAUSES))

        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._progress())
            lanes = [group.create_task(lane(number)) for number in range(AT_ONCE)]
            await asyncio.wait(lanes)
            progress.cancel()

    async def _do(self, kind: str, dice: random.Random) -> None:
        self.event(f"begin: {kind}")
        if await self.faults[kind](self.world, dice):
            self.done[kind] += 1
            self.event(f"end: {kind}")
        else:
            self.without_effect[kind] += 1
            self.event(f"end: {kind}, without effect")

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS)
            self.event(
                f"{self._sum('writer', 'facts')} facts written, {self.done.total()} faults, "
                f"{self._sum('reader', 'gaps_found')} gaps found, {len(self.world.violations)} violations"
            )

    def _shown_enough(self) -> bool:
        counts = self._counts()
        return all(counts[name] >= wanted for name, wanted in self.options.enough.items())

    def _counts(self) -> dict[str, int]:
        """Numbers of the report that are known while it runs."""
        return {
            "faults": self.done.total(),
            "names_won_back": sum(report.get("won_back", 0) for report in self._reports()),
            "reconnects": self._sum("link", "reconnects"),
            **{name: self._sum("reader", name) for name in READER_COUNTS},
        }

    def _reports(self) -> Iterator[dict[str, Any]]:
        for slot in self.world.slots.values():
            yield from slot.reports()

    def _sum(self, part: str, name: str) -> int:
        """A counter, over all lives of all processes, as far as they reported it."""
        found = (report.get("statistics", {}).get(part) for report in self._reports())
        return sum(int(numbers.get(name, 0)) for numbers in found if numbers)

    # -- the end ----------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.event("everything heals")
        world = self.world
        for link in world.links():
            link.heal()
        for server in (*world.redis, world.sentinel, world.postgres, *filter(None, [world.replica])):
            server.start()
        if not await world.redis_settled():
            world.violations.append("the Redis servers do not agree on who is master")
        await world.allow_everything_on_redis()
        if not await came_true(self._all_ready, UP):
            world.violations.append(f"not up, {UP:g} s after everything healed: {', '.join(self._not_ready())}")

    async def _finish(self) -> None:
        """Every writer writes a last fact, every reader gets there, and all have the same positions."""
        world = self.world
        writers = [slot for slot in world.slots.values() if slot.role.writes]
        readers = [slot for slot in world.slots.values() if slot.role.reads]
        world.tell_all(finish=True)
        if not await came_true(lambda: all(slot.latest("finals") for slot in writers), FINISH):
            late = [slot.who for slot in writers if not slot.latest("finals")]
            world.violations.append(f"no last fact after {FINISH:g} s: {', '.join(late)}")
        finals: dict[str, dict[str, int]] = {}
        for (stream, writer), facts in (await asyncio.to_thread(world.database.truth)).items():
            finals.setdefault(stream, {})[writer] = max(facts)
        self.event("all facts are written; the readers get to the end")
        world.tell_all(reach={"finals": finals, "timeout": FINISH})
        await came_true(lambda: all(slot.latest("reached") for slot in readers), FINISH + 10)
        for slot in readers:
            if not slot.latest("reached"):
                world.violations.append(f"{slot.who} does not say that it got to the end")
            for text in slot.latest("behind") or ():
                world.violations.append(f"{slot.who} did not get to the end in {FINISH:g} s: {text}")
        await self._stop(writers)
        if not await came_true(lambda: not self._elsewhere(readers), FINISH):
            world.violations += self._elsewhere(readers)
        await self._stop(readers)

    async def _stop(self, slots: Sequence[Slot]) -> None:
        """Ask processes to end, in order."""
        self.world.stopping = True  # nobody is started again from here on
        for slot in slots:
            if slot.child is not None:
                slot.child.tell(stop=True)
        if not await came_true(lambda: not any(slot.child and slot.child.running for slot in slots), UP):
            late = [slot.who for slot in slots if slot.child and slot.child.running]
            self.world.violations.append(f"asked to end, and still there after {UP:g} s: {', '.join(late)}")

    def _elsewhere(self, readers: Sequence[Slot]) -> list[str]:
        """Readers whose position is not that of the table."""
        expected = self.world.database.positions()
        return [
            f"{slot.who} is at {positions.get(stream, {}).get(writer)} of ({stream}, {writer}), the table at {position}"
            for slot in readers
            if slot.child is not None and slot.child.running
            for positions in [slot.child.latest.get("positions", {})]
            for (stream, writer), position in sorted(expected.items())
            if positions.get(stream, {}).get(writer) != position
        ]

    # -- the verdict ------------------------------------------------------------------------------

    def _verdicts(self, truth: Truth) -> dict[str, Verdict]:
        """Of every reader; what writers were told goes to the violations."""
        found: dict[str, Verdict] = {}
        for slot in self.world.slots.values():
            lives = [(number, read_ledger(path)) for number, path in enumerate(slot.ledgers, 1)]
            for _, entries in lives:
                self.world.violations += judge_writer(slot.who, truth, entries)
            if slot.role.reads:
                exact = slot.role.reads == "exact"
                authors = self.world.database.authors(slot.who)
                found[slot.who] = verdict = judge_reader(
                    slot.who, truth, lives, durable=slot.role.durable, exact=exact, authors=authors
                )
                self.world.violations += verdict.violations
                if exact:
                    effects = judge_effects(slot.who, truth, self.world.database.effects(slot.who))
                    found[f"{slot.who}, effects"] = effects
                    self.world.violations += effects.violations
        return found

    def _report(self, harmed: float, seconds: float) -> dict[str, Any]:
        world = self.world
        truth = world.database.truth()
        verdicts = self._verdicts(truth)
        world.violations += world.database.broken_transactions()
        ((pruned,),) = world.database.ask("SELECT count(*) FROM soak_pruned")
        made: Counter[str] = Counter()
        for report in self._reports():
            made.update(report.get("made") or {})
        by_reader = {who: _numbers(verdict) for who, verdict in verdicts.items()}
        wrong = ("redeliveries", "lost", "out_of_order", "extra", "torn")
        return {
            "ok": not world.violations,
            "seed": self.options.seed,
            "seconds": round(seconds, 1),
            "seconds_of_faults": round(harmed, 1),
            "facts": sum(map(len, truth.values())),
            "rows": sum(rows for facts in truth.values() for rows, _ in facts.values()),
            "rows_pruned": pruned,
            "transactions": dict(sorted(made.items())),
            "faults_by_kind": dict(sorted(self.done.items())),
            "without_effect": dict(sorted(self.without_effect.items())),
            "processes": {slot.who: slot.lives for slot in world.slots.values()},
            "fenced": world.fenced,
            "cut_off_by_tcp_server": dict(sorted(self._cut_off().items())),
            **self._counts(),
            **{name: sum(numbers[name] for numbers in by_reader.values()) for name in wrong},
            "by_reader": by_reader,
            "violations": world.violations,
            "redis": _redis_version(world),
            "postgres": world.database.version(),
            "folder": str(self.folder) if world.violations or self.options.keep else None,
        }

    def _cut_off(self) -> Counter[str]:
        """Why the TCP server, in all its lives, cut clients off."""
        found: Counter[str] = Counter()
        for report in self.world.hub_reports:
            found.update(report.get("statistics", {}).get("tcp", {}).get("refused", {}))
        return found


def _numbers(verdict: Verdict) -> dict[str, int]:
    return {name: value for name, value in attrs.asdict(verdict).items() if name != "violations"}


def _redis_version(world: World) -> str:
    info = ask_redis(world.redis[0], "INFO", "server")
    name = info.get("server_name", "redis")
    return f"{name} {info.get(f'{name}_version', info.get('redis_version'))}"
