"""The demo's parent: starts writers and readers, does harm in the middle, and compares at the end."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import attrs
import redis

from busrep.cli.demo_child import FENCED, READ_TIMEOUT, STREAMS, Task, live
from busrep.cli.demo_table import Truth, judge
from busrep.cli.servers import make_store, opened, redis_client, run
from busrep.errors import BusrepError

# Seconds between two looks at the processes.
LOOK = 0.02
# Seconds without a new fact, written or handled, after which the run is given up.
PATIENCE = READ_TIMEOUT + 30.0
# The exit status of a process that ended by SIGKILL.
KILLED = -9

_SPAWN = multiprocessing.get_context("spawn")


@attrs.define(eq=False)
class Slot:
    """A writer's or reader's name through all its processes. ``exactly_once``: whether a reader saves its position with
    what it does, or a little later. ``reports``: the newest value of all that each process reported."""

    role: str
    who: str
    exactly_once: bool = False
    reports: list[dict[str, Any]] = attrs.field(factory=list)
    process: SpawnProcess | None = None
    pipe: Connection | None = None

    def latest(self, what: str) -> Any:
        """What the newest process has reported of this; None: nothing yet."""
        return self.reports[-1].get(what)

    @property
    def facts(self) -> int:
        """Facts written or handled, as far as they were reported."""
        return max((report.get("facts", 0) for report in self.reports), default=0)

    def start(self, task: Task, log: Path) -> None:
        """Start a process under this name."""
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=live, args=(task, theirs, str(log)), name=self.who)
        self.process.start()
        theirs.close()
        self.reports.append({})

    def tell(self, **what: object) -> None:
        """Send the process a message; one that has just ended does not read it."""
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(what)

    def hear(self) -> int | None:
        """Take in what the process has reported; its exit status once it has ended."""
        if self.process is None or self.pipe is None:
            return None
        status = self.process.exitcode  # before the last reports, or one could come in between
        with contextlib.suppress(EOFError, OSError):  # it has ended; killed in the middle of a report, perhaps
            while self.pipe.poll():
                self.reports[-1].update(self.pipe.recv())
        return status

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()


@attrs.define(eq=False, kw_only=True)
class DemoRun:
    """One run on the channel ``name``, on a Redis that ``restart_redis`` restarts, if there is such a function, and a
    store of its own. Logs go into ``folder``. ``show`` is called with a sentence for each event."""

    name: str
    redis: str = attrs.field(repr=False)
    store: str = attrs.field(repr=False)
    folder: Path
    restart_redis: Callable[[], None] | None
    facts: int
    writers: list[Slot]
    readers: list[Slot]
    show: Callable[[str], None]
    allowed: int = 0
    """Facts that each writer may write by now."""
    counts: dict[str, int] = attrs.field(
        factory=lambda: dict.fromkeys(("kills", "links_cut", "redis_restarts", "fenced"), 0)
    )

    @property
    def slots(self) -> list[Slot]:
        """All names."""
        return [*self.writers, *self.readers]

    def run(self) -> dict[str, Any]:
        """The whole demo; returns the summary. Raises BusrepError when it cannot be run to its end."""
        run(self._make_tables())
        try:
            for slot in self.slots:
                self._start(slot)
            self._until(lambda: all(slot.latest("ready") for slot in self.slots), "the processes to start")
            self.show(f"{len(self.slots)} processes are up")
            started = time.monotonic()
            self._write()
            behind = self._let_readers_finish()
            seconds = time.monotonic() - started
            for slot in self.writers:
                slot.tell(stop=True)
            self._until(lambda: all(slot.process is None for slot in self.slots), "the processes to end")
        finally:
            for slot in self.slots:
                slot.kill()
        self.show("comparing every reader's record with the table")
        return self._summary(Truth.of(self.store), seconds, behind)

    async def _make_tables(self) -> None:
        store = make_store(self.store, STREAMS)
        async with opened(store, store.init()):
            pass

    def _start(self, slot: Slot) -> None:
        task = Task(
            role=slot.role,
            # The name tells our links from those of other programs on the same Redis.
            redis=f"{self.redis}{'&' if '?' in self.redis else '?'}client_name={slot.who}",
            store=self.store,
            channel=self.name,
            who=slot.who,
            life=len(slot.reports) + 1,
            facts=slot.facts,
            exactly_once=slot.exactly_once,
        )
        slot.start(task, self.folder / f"{slot.who}.{task.life}.log")
        if slot.role == "writer":
            slot.tell(allowed=self.allowed)

    def _look(self) -> None:
        """Take in all reports; start again what was killed or fenced. Raises BusrepError for what failed."""
        for slot in self.slots:
            status = slot.hear()
            if status in (KILLED, FENCED):
                self.counts["fenced"] += status == FENCED
                self._start(slot)
            elif status == 0:
                slot.process = None
            elif status is not None:
                log = (self.folder / f"{slot.who}.{len(slot.reports)}.log").read_text(errors="replace").strip()
                raise BusrepError(f"{slot.who} ended with status {status}: {slot.latest('error') or log[-1_500:]}")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for reports; patience begins anew with every fact that is written or handled."""
        seen, deadline = -1, 0.0
        self._look()
        while not condition():
            facts = sum(slot.facts for slot in self.slots)
            if facts != seen:
                seen, deadline = facts, time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise BusrepError(f"waited {PATIENCE:g} s without any progress for {what}")
            time.sleep(LOOK)
            self._look()

    def _write(self) -> None:
        killed = self.writers[0], *self.readers[:2], self.writers[-1]
        first, second, *others = (partial(self._kill, slot) for slot in killed)
        faults: list[Callable[[], None]] = [
            first,
            self._cut_links,
            second,
            self._restart_redis,
            *others,
            self._cut_links,
        ]
        for number, fault in enumerate(faults):
            self._let_write((number + 1) / len(faults), until=(number + 0.5) / len(faults))
            fault()
        self._let_write(1, until=1)
        # Each of them, not only the sum: a fact behind the ends that readers are told would count as lost.
        self._until(lambda: all((one.latest("facts") or 0) >= self.allowed for one in self.writers), "the writers")

    def _let_write(self, part: float, *, until: float) -> None:
        """Allow a part of all facts, and wait for a smaller one: the rest is written while harm is done."""
        self.allowed = math.ceil(self.facts * part / len(self.writers))
        for slot in self.writers:
            slot.tell(allowed=self.allowed)
        self._until(lambda: sum(slot.facts for slot in self.writers) >= self.facts * until, "the writers")

    def _kill(self, slot: Slot) -> None:
        self.show(f"kill -9 {slot.who}, and start it again under the same name")
        slot.kill()
        self.counts["kills"] += 1

    def _cut_links(self) -> None:
        try:
            cut = run(self._cut())
        except redis.RedisError as error:
            self.show(f"the readers' links could not be cut: {error}")
        else:
            self.counts["links_cut"] += cut
            self.show(f"cut {cut} links of readers")

    async def _cut(self) -> int:
        ours = {slot.who for slot in self.readers}
        async with redis_client(self.redis) as client:
            links = [one for one in await client.client_list(_type="pubsub") if one.get("name") in ours]
            for link in links:
                await client.client_kill_filter(_id=link["id"])
        return len(links)

    def _restart_redis(self) -> None:
        if self.restart_redis is not None:
            self.show("restart Redis")
            self.restart_redis()
            self.counts["redis_restarts"] += 1

    def _let_readers_finish(self) -> list[str]:
        self.show("all facts are written; waiting for the readers")
        ends = [(*key, max(facts)) for key, facts in Truth.of(self.store).facts.items()]
        for slot in self.readers:
            slot.tell(ends=ends)
        self._until(lambda: all(slot.latest("behind") is not None for slot in self.readers), "the readers")
        return [f"{slot.who}: {text}" for slot in self.readers for text in slot.latest("behind")]

    def _summary(self, truth: Truth, seconds: float, behind: list[str]) -> dict[str, Any]:
        """The readers' records judged, and the numbers of all processes added up; JSON-able."""
        verdicts = {
            slot.who: judge(truth.facts, truth.records.get(slot.who, ()), exactly_once=slot.exactly_once)
            for slot in self.readers
        }
        reports = [report for slot in self.slots for report in slot.reports]
        reading = [report["statistics"]["reader"] for slot in self.readers for report in slot.reports if report]
        counted = ("gaps_found", "gaps_filled", "duplicates_dropped", "parse_errors")
        judged = ("redeliveries", "lost", "out_of_order", "extra", "torn")
        rows = sum(content[0] for facts in truth.facts.values() for content in facts.values())
        return {
            "facts": sum(map(len, truth.facts.values())),
            "rows": rows,
            "writers": len(self.writers),
            "readers": len(self.readers),
            "rows_handled": sum(verdict.rows for verdict in verdicts.values()),
            "seconds": round(seconds, 3),
            "rows_per_second": round(rows / seconds, 1),
            "rollbacks": sum(found.get("rollbacks", 0) for found in reports),
            **self.counts,
            **{name: sum(found[name] for found in reading) for name in counted},
            **{name: sum(getattr(verdict, name) for verdict in verdicts.values()) for name in judged},
            "broken_transactions": truth.broken,
            "not_reached": behind,
            "ok": not behind and not truth.broken and all(verdict.clean for verdict in verdicts.values()),
            # Names of a run are demo-RUN-reader-1; the run's number says nothing here.
            "by_reader": {who.split("-", 2)[2]: attrs.asdict(verdict) for who, verdict in verdicts.items()},
        }
