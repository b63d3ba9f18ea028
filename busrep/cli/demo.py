"""``busrep demo``: writers, readers, kills and cuts on real servers, every row compared at the end."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import attrs
import click
import redis as redis_py

import busrep
from busrep.cli.demo_child import FENCED, READ_TIMEOUT, STREAMS, Task, live
from busrep.cli.demo_table import WRONG, Truth, judge, make_tables, own_database
from busrep.cli.options import json_option
from busrep.cli.output import print_json, print_table
from busrep.cli.servers import make_store, run
from busrep.errors import BusrepError
from busrep.links.redis import tls_defaults
from busrep.testing.servers import start_redis
from busrep.urls import shown_url

# Seconds between two looks at the processes.
LOOK = 0.02
# Seconds without a new fact, written or handled, after which the run is given up.
PATIENCE = READ_TIMEOUT + 30.0
# The exit status of a process that ended by SIGKILL.
KILLED = -9

_SPAWN = multiprocessing.get_context("spawn")


@click.command()
@click.option("--redis", metavar="URL", help="Use this Redis [default: start one, and restart it in the middle].")
@click.option("--store", metavar="URL", help="Use this server or file's folder [default: a file of its own].")
@click.option("--facts", default=50_000, show_default=True, type=click.IntRange(min=1), help="Facts to write.")
@click.option("--writers", default=2, show_default=True, type=click.IntRange(1, 64), help="Writer processes.")
@click.option("--readers", default=2, show_default=True, type=click.IntRange(1, 64), help="Reader processes.")
@json_option()
def demo(as_json: bool, **options: Any) -> None:
    """Show that nothing is lost: writers, readers, and harm done to both.

    Starts writer and reader processes, kills some with -9, cuts links, restarts Redis, rolls transactions back;
    then compares what each reader handled with the table. Without options it brings its own Redis and an SQLite
    file. A given server is left as it was: only the demo's own connections are cut, and what it writes is a schema
    of PostgreSQL, or an SQLite file, of its own, and removed; BUSREP_REDIS and BUSREP_STORE are not looked at. Exit
    status 1 if anything was lost or out of order.
    """
    # As Ctrl-C, also where SIGINT is ignored, as after "&": children are ended and files removed on the way out.
    before: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        summary = DemoRun(quiet=as_json, **options).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print_json(summary)
    else:
        rows = [(key.replace("_", " "), value) for key, value in summary.items() if isinstance(value, (int, float))]
        print_table("busrep demo", ("", "count"), [row for row in rows if row[0] != "ok"])
        columns = ("reader", *(name.replace("_", " ") for name in next(iter(summary["by_reader"].values()))))
        print_table("By reader", columns, [(who, *one.values()) for who, one in summary["by_reader"].items()])
        for text in summary["not_reached"]:
            click.echo(f"not reached: {text}")
        click.echo("Nothing was lost." if summary["ok"] else "SOMETHING WAS LOST OR OUT OF ORDER.")
    if not summary["ok"]:
        raise click.exceptions.Exit(1)


async def _check(redis: str, name: str, store: str) -> None:
    """Make the tables, and see that Redis answers: a process of the demo goes on trying, as a service should, but a
    person wants to be told. Raises ConfigError, Unavailable."""
    await make_store(store, STREAMS).init()
    async with busrep.connect(redis, name=name, streams=[]):
        pass


@attrs.define(eq=False)
class Slot:
    """The processes that do one task, one after the other. ``reports``: the newest value of all that each reported."""

    task: Task
    log: Path
    reports: list[dict[str, Any]] = attrs.field(factory=list)
    process: SpawnProcess = attrs.field(init=False)
    pipe: Connection = attrs.field(init=False)

    def latest(self, what: str) -> Any:
        """What the newest process has reported of this; None: nothing yet."""
        return self.reports[-1].get(what)

    @property
    def facts(self) -> int:
        """Facts written or handled, as far as they were reported."""
        return max((report.get("facts", 0) for report in self.reports), default=0)

    def start(self, orders: dict[str, Any]) -> None:
        """Start a process, and send it its orders."""
        task = attrs.evolve(self.task, life=len(self.reports) + 1, facts=self.facts)
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=live, args=(task, theirs, str(self.log)), name=task.who)
        self.process.start()
        theirs.close()
        self.reports.append({})
        self.tell(orders)

    def tell(self, orders: dict[str, Any]) -> None:
        """Send the process orders; one that has just ended does not read them."""
        with contextlib.suppress(OSError):
            self.pipe.send(orders)

    def hear(self) -> int | None:
        """Take in what the process has reported; its exit status once it has ended."""
        status = self.process.exitcode  # before the last reports, or one could come in between
        with contextlib.suppress(EOFError, OSError):  # it has ended; killed in the middle of a report, perhaps
            while self.pipe.poll():
                self.reports[-1].update(self.pipe.recv())
        return status

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.join()


@attrs.define(eq=False, kw_only=True)
class DemoRun:
    """One run. ``redis``, ``store``: given servers, else its own ones. ``orders``: what all processes were told."""

    redis: str | None = attrs.field(default=None, repr=False)
    store: str | None = attrs.field(default=None, repr=False)
    facts: int
    writers: int
    readers: int
    quiet: bool = False
    slots: dict[str, list[Slot]] = attrs.field(factory=lambda: {"writer": [], "reader": []})
    orders: dict[str, Any] = attrs.field(factory=dict)
    counts: dict[str, int] = attrs.field(
        factory=lambda: dict.fromkeys(("kills", "links_cut", "redis_restarts", "fenced"), 0)
    )
    restart_redis: Callable[[], None] | None = attrs.field(default=None, init=False)
    started: float = attrs.field(factory=time.monotonic, init=False)

    def show(self, text: str) -> None:
        """Say what happens."""
        if not self.quiet:
            click.echo(f"{time.monotonic() - self.started:6.1f} s  {text}", err=True)

    def run(self) -> dict[str, Any]:
        """The whole demo; returns the summary. Raises BusrepError when it cannot be run to its end."""
        with contextlib.ExitStack() as stack:
            store = self._prepare(stack)
            for slot in self.all_slots:
                slot.start(self.orders)
                stack.callback(slot.kill)
            self._until(lambda: all(slot.reports[-1] for slot in self.all_slots), "the processes to start")
            self.show(f"{len(self.all_slots)} processes are up")
            started = time.monotonic()
            self._write()
            self._let_readers_finish(store)
            seconds = time.monotonic() - started
            self.show("comparing every reader's record with the table")
            return self._summary(Truth.of(store), seconds)

    def _prepare(self, stack: contextlib.ExitStack) -> str:
        """Servers, tables, and what each process has to do; gives the store's URL."""
        name = f"demo-{secrets.token_hex(4)}"
        store, folder = stack.enter_context(own_database(self.store, name))
        make_tables(store)
        if self.redis is None:
            server = stack.enter_context(start_redis())
            self.redis, self.restart_redis = server.url, server.restart
        run(_check(self.redis, name, store))
        self.show(f"Redis: {shown_url(self.redis)}, table: {shown_url(store)}")
        for role, count in (("writer", self.writers), ("reader", self.readers)):
            for number in range(count):
                who = f"{name}-{role}-{number + 1}"
                # The name tells our links from those of other programs on the same Redis.
                redis = f"{self.redis}{'&' if '?' in self.redis else '?'}client_name={who}"
                # Some readers save their position with what they did (exactly-once), the others a little later.
                once = role == "reader" and number % 2 == 0
                task = Task(role=role, who=who, redis=redis, store=store, channel=name, exactly_once=once)
                self.slots[role].append(Slot(task, folder / f"{who}.log"))
        return store

    @property
    def all_slots(self) -> list[Slot]:
        """Of writers and readers."""
        return [*self.slots["writer"], *self.slots["reader"]]

    def _order(self, **orders: Any) -> None:
        self.orders |= orders
        for slot in self.all_slots:
            slot.tell(self.orders)

    def _look(self) -> None:
        """Take in all reports; start again what was killed or fenced. Raises BusrepError for what failed."""
        for slot in self.all_slots:
            status = slot.hear()
            if status in (KILLED, FENCED):
                self.counts["fenced"] += status == FENCED
                slot.start(self.orders)
            elif status is not None:
                said = slot.latest("error") or slot.log.read_text(errors="replace").strip()[-1_500:]
                raise BusrepError(f"{slot.task.who} ended with status {status}: {said}")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for reports; patience begins anew with every fact that is written or handled."""
        seen, deadline = -1, 0.0
        self._look()
        while not condition():
            facts = sum(slot.facts for slot in self.all_slots)
            if facts != seen:
                seen, deadline = facts, time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise BusrepError(f"waited {PATIENCE:g} s without any progress for {what}")
            time.sleep(LOOK)
            self._look()

    def _write(self) -> None:
        writers, readers = self.slots["writer"], self.slots["reader"]
        kills = [partial(self._kill, slot) for slot in (writers[0], *readers[:2], writers[-1])]
        cut = self._cut_links
        faults: list[Callable[[], None]] = [kills[0], cut, kills[1], self._restart_redis, *kills[2:], cut]
        for number, fault in enumerate(faults):
            self._let_write((number + 1) / len(faults), until=(number + 0.5) / len(faults))
            fault()
        self._let_write(1, until=1)
        # Each of them, not only the sum: a fact behind the ends that readers are told would count as lost.
        allowed = self.orders["allowed"]
        self._until(lambda: all((one.latest("facts") or 0) >= allowed for one in writers), "the writers")

    def _let_write(self, part: float, *, until: float) -> None:
        """Allow a part of all facts, and wait for a smaller one: the rest is written while harm is done."""
        self._order(allowed=math.ceil(self.facts * part / self.writers))
        self._until(lambda: sum(slot.facts for slot in self.slots["writer"]) >= self.facts * until, "the writers")

    def _kill(self, slot: Slot) -> None:
        self.show(f"kill -9 {slot.task.who}, and start it again under the same name")
        slot.kill()
        self.counts["kills"] += 1

    def _cut_links(self) -> None:
        url = self.redis or ""
        ours = {slot.task.who for slot in self.slots["reader"]}
        try:
            with redis_py.Redis.from_url(url, **tls_defaults(url)) as client:
                links = [one for one in client.client_list(_type="pubsub") if one.get("name") in ours]
                for link in links:
                    client.client_kill_filter(_id=link["id"])
        except redis_py.RedisError as error:
            self.show(f"the readers' links could not be cut: {error}")
        else:
            self.counts["links_cut"] += len(links)
            self.show(f"cut {len(links)} links of readers")

    def _restart_redis(self) -> None:
        if self.restart_redis is not None:
            self.show("restart Redis")
            self.restart_redis()
            self.counts["redis_restarts"] += 1

    def _let_readers_finish(self, store: str) -> None:
        self.show("all facts are written; waiting for the readers")
        ends = {(stream, writer): token for stream, writer, token in sorted(Truth.of(store).facts)}
        self._order(ends=[(*key, token) for key, token in ends.items()])
        self._until(lambda: all(slot.latest("behind") is not None for slot in self.slots["reader"]), "the readers")

    def _summary(self, truth: Truth, seconds: float) -> dict[str, Any]:
        """The readers' records judged, and the numbers of all processes added up; JSON-able."""
        # Names of a run are demo-RUN-reader-1; the run's number says nothing here.
        verdicts = {
            who.split("-", 2)[2]: judge(truth.facts, truth.records.get(who, ()), exactly_once=slot.task.exactly_once)
            for slot in self.slots["reader"]
            for who in [slot.task.who]
        }
        behind = [f"{slot.task.who}: {text}" for slot in self.slots["reader"] for text in slot.latest("behind")]
        reading = [report["statistics"]["reader"] for slot in self.slots["reader"] for report in slot.reports if report]
        counted = ("gaps_found", "gaps_filled", "duplicates_dropped", "parse_errors")
        judged = {name: sum(one[name] for one in verdicts.values()) for name in ("rows", "redeliveries", *WRONG)}
        rows, handled = sum(count for count, _ in truth.facts.values()), judged.pop("rows")
        return {
            "facts": len(truth.facts),
            "rows": rows,
            "writers": self.writers,
            "readers": self.readers,
            "rows_handled": handled,
            "seconds": round(seconds, 3),
            "rows_per_second": round(rows / seconds, 1),
            "rollbacks": sum(report.get("rollbacks", 0) for slot in self.slots["writer"] for report in slot.reports),
            **self.counts,
            **{name: sum(found[name] for found in reading) for name in counted},
            **judged,
            "broken_transactions": truth.broken,
            "not_reached": behind,
            "ok": not behind and not truth.broken and not any(judged[name] for name in WRONG),
            "by_reader": verdicts,
        }
