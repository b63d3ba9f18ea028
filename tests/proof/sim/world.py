"""A deployment in one process: services that run the real bus, on a simulated Redis and database, and their fate.

`World.run` plays a `Scenario`: its events happen when they are due, then all faults end, then everybody must come
to the same, and the oracle looks at what was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import orjson

from busrep.asyncio.beginning import NOT_REGISTERED
from busrep.asyncio.bus import Bus
from busrep.core import announcements
from busrep.core.announcements import Announcements
from busrep.core.commands import Position, Server
from busrep.core.framing import Rows, parse_frame
from busrep.errors import BusrepError, Closed, CommitsLost, HandlerFailed, PositionTooOld, Unavailable
from busrep.settings import Settings
from busrep.streams import Registry, Stream

from .database import Replica, SimDatabase
from .events import EVENTS, declare, keep_checkpoints
from .path import Path
from .record import Claimed, Record, Reported, Sample, Upto
from .redis import OUTSIDE, SimRedis
from .scenario import MEMORY, WRITER, Event, Scenario
from .service import (  # fmt: skip
    BIG,
    STREAMS,
    DeliberateError,
    Item,
    OutageError,
    Service,
    is_outage,
    orders,
    payments,
    presence,
)
from .store import SimStore
from .tables import DEFINITIONS, SimError
from .virtual import Process

T = TypeVar("T")

# Everybody must have come to the same this many (virtual) seconds after the last fault ended, and those that handlers
# take for what they have yet to handle.
SETTLED_WITHIN = 20.0

# Most bytes that one fact takes in memory: four rows, big ones.
FACT_BYTES = 4 * (len(BIG) + 200)


class World:
    """One run of a scenario. ``trace``, if given, gets (virtual time, who, what)."""

    def __init__(self, scenario: Scenario, trace: Callable[[float, str, str], None] | None = None) -> None:
        self.scenario = scenario
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.record = Record()
        self.tracing = trace is not None
        if trace is not None:
            self.record.note = lambda who, text: trace(self.now(), who, text)
        # Scenarios that were kept are older than this setting; its default outlasts them.
        self.settings = Settings(**{"poison_after": 0.0, **scenario.settings})
        self.dice = random.Random(f"{scenario.seed} world")
        self.database = SimDatabase(self.loop)
        careless = random.Random(f"{scenario.seed} durable")
        if careless.random() < 0.2:
            self.database.synchronous_commit = "off"
        elif careless.random() < 0.25:  # a reload of the server's configuration, in the middle of what is open
            at = careless.uniform(0.0, 10.0)
            self.loop.call_later(at, setattr, self.database, "synchronous_commit", "off")
        self.replicas: list[Replica] = []
        self.redis = SimRedis(output_buffer=self.dice.choice([2_000, 20_000]), on_publish=self._published)
        self.operator = Path(self.database, random.Random(0))
        self.operating = SimStore(Registry(STREAMS), self.settings, self.operator)
        self.numbers = itertools.count(1)
        self.services: dict[Process, Service] = {}
        self.current: dict[str, Service] = {}
        self.roles = {role.name: role for role in scenario.roles}
        self.gone: set[str] = set()  # roles that never come back
        self.seconds: list[Service] = []  # second processes under a name that is taken
        self.last: dict[tuple[str, str], int] = {}  # the last ID of which a writer was told that it is committed
        self.checkpoints: list[tuple[float, Any]] = []
        self.behind: dict[str, float] = {}  # role -> how many seconds its clock is
        self.told: dict[int, set[tuple[str, int]]] = {}  # what each life of a writer knows to be committed
        self.must_stop: list[tuple[Service, int]] = []  # lives of writers of which a failover lost such facts
        self.to_declare: dict[str, None] = {}  # epochs in which a writer has said so
        # To where a failover has put back a reader's saved position: (role, epoch, stream, writer).
        self.put_back: dict[tuple[str, str, str, str], int] = {}
        # What a failover has lost all registrations of, (role, epoch, stream), and up to where a stream's rows were
        # pruned while the table did not have the reader and the reader could not know it, or before it began there.
        self.unregistered: set[tuple[str, str, str]] = set()
        self.first_registered: dict[tuple[str, str, str], int] = {}  # the life that was told first that it is
        self.pruned_unseen: dict[tuple[str, str, str, str], int] = {}
        self.began_behind: dict[tuple[str, str, str], int] = {}  # the life that began this behind pruned rows
        self.when_opened: dict[str, Event] = {}  # role -> the restore that comes when its next bus has opened
        self.poisonous = True
        self.healing = False
        self.restoring: Event | None = None
        self.row = itertools.count(1)
        self.waits: dict[asyncio.Task[None], tuple[Service, float]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.gaps_closed = 0
        self.last_position: dict[tuple[int, str, str, str], int] = {}

    def now(self) -> float:
        """Seconds since the run began."""
        return self.loop.time() - self.began

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.record.note("--", text)

    @property
    def gaps(self) -> int:
        """Gaps that readers found, over all lives."""
        return self.gaps_closed + sum(one.bus.reading.core.counters.gaps_found for one in self._running() if one.bus)

    def unexpected(self, context: dict[str, Any]) -> None:
        """The loop's exception handler: a task or a callback of the library failed unseen."""
        self.record.breaks("nothing unexpected", f"{context.get('message')}: {context.get('exception')!r}")

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> Record:
        """Play the scenario to its end."""
        await self.operating.init()
        lags = random.Random(f"{self.scenario.seed} lag")  # only now, or a replica that lags would have no tables yet
        self.replicas += [self.database.replica(lag=lambda: lags.choice([0.0, 0.02, 0.5, 2.0])) for _ in range(2)]
        await self.operating.open()
        self.record.logs[self.epoch()] = {}
        keep_checkpoints(self)
        for role in self.scenario.roles:
            self.later(role.options.get("late", 0.0), self.join, role.name)
        sampling = self.loop.create_task(self._keep_sampling(), context=OUTSIDE.copy())
        for event in self.scenario.events:
            await self._until(event.at)
            self.note(f"{event.kind} {event.who} {dict(event.args)}")
            await EVENTS[event.kind](self, event)
        await self._until(self.scenario.seconds)
        await self._heal()
        await self._settle()
        sampling.cancel()
        for service in self._running():
            self._sample(service)
        self.read_dead_letters()
        return self.record

    async def operate(self, work: Callable[[], Awaitable[T]]) -> T:
        """Something that a person does: again, when a connection turns out to be dead, or the server is away."""
        for _ in range(100):
            with contextlib.suppress(Unavailable):
                return await work()
            await asyncio.sleep(0.05)
        return await work()

    def read_dead_letters(self) -> None:
        """What readers set aside counts as reported; a letter does not say of which epoch it is."""
        columns = DEFINITIONS["busrep_dead_letters"].columns
        for values in self.database.state.tables["busrep_dead_letters"].committed().values():
            letter = dict(zip(columns, values, strict=True))
            if letter["error"].startswith((OutageError.__name__, SimError.__name__)):
                self.record.breaks("an outage is not poison", f"{letter['reader']} set aside {letter['tokens']}")
            key = (letter["stream"], letter["writer"])
            for epoch in self.record.logs:
                for token in dict.fromkeys(orjson.loads(letter["tokens"])):
                    self.record.reported.append(
                        Reported(0.0, letter["reader"], 0, epoch, key, token - 1, token, "dead letter")
                    )

    async def _until(self, at: float) -> None:
        if at > self.now():
            await asyncio.sleep(at - self.now())

    def later(self, delay: float, function: Callable[..., Any], *args: Any) -> None:
        """Call a function so many seconds later, as nobody of the deployment."""
        self.loop.call_later(delay, function, *args, context=OUTSIDE)

    def spawn(self, work: Any) -> None:
        """Start a task that belongs to nobody of the deployment."""
        task = self.loop.create_task(work, context=OUTSIDE.copy())
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    def join(self, name: str) -> None:
        """A role begins, or begins again."""
        if name in self.gone or (name in self.current and self.current[name].process.alive):
            return
        self.current[name] = Service(self, self.roles[name], next(self.numbers))

    def opened(self, name: str) -> None:
        """A bus of this role has opened, and reads nothing yet."""
        if (event := self.when_opened.pop(name, None)) is not None:
            self.note(f"restore {dict(event.args)}")
            self.spawn(EVENTS["restore"](self, event))

    def _running(self) -> list[Service]:
        return [service for service in self.services.values() if service.running]

    def epoch(self) -> str:
        """The identity of the log."""
        return str(self.database.state.tables["busrep_meta"].committed()[("epoch",)][1])

    def _server(self) -> str:
        """Which server the log was noted to be on."""
        return str(self.database.state.tables["busrep_meta"].committed()[("server",)][1])

    def _incarnation(self, writer: str) -> int:
        found = self.database.state.tables["busrep_writers"].committed().get((writer,))
        return 0 if found is None else int(found[1])

    def floors(self) -> dict[tuple[str, str], int]:
        """The highest ID that was pruned, of each (stream, writer)."""
        at = DEFINITIONS["busrep_positions"].columns.index("floor")
        rows = self.database.state.tables["busrep_positions"].committed()
        return {(stream, writer): int(row[at]) for (stream, writer), row in rows.items()}

    def alone(self, name: str) -> bool:
        """Whether nobody can have the name but this process: none was killed or doubled, and no log was lost."""
        return not any(
            one.kind in ("restore", "restored_at_beginning", "failover")
            or (one.who == name and one.kind in ("kill", "second"))
            for one in self.scenario.events
        )

    async def _heal(self) -> None:
        """All faults end, and whoever is to come back does."""
        self.note("all faults end")
        self.healing, self.poisonous = True, False
        self.when_opened.clear()
        self.database.down = False
        self.database.flush = self.database.standby_at = 0.0
        self.redis.denied.clear()
        for node in self.redis.nodes:
            node.up = True
        for service in [*self.services.values()]:
            if service.process.alive:
                service.heal()
        stale = self.redis.nodes[1 - self.redis.nodes.index(self.redis.master)]
        for connection in list(stale.connections):
            connection.lose("demoted")
        for service in self.seconds:
            service.ending = service.once = True
        if self.epoch() in self.record.void:
            await declare(self)
        elif self.epoch() in self.to_declare:
            await self._declare_lost(self.epoch())
        for role in self.scenario.roles:
            self.join(role.name)

    async def _settle(self) -> None:
        """Wait until everybody is where the log is; then one more fact of each writer, heard by all."""
        within = SETTLED_WITHIN + max([0.0, *map(self._handling_takes, self.current.values())])
        deadline = self.now() + within
        for service in [*self.services.values()]:
            if service.process.alive and service.working:
                _, left = await asyncio.wait(list(service.working), timeout=SETTLED_WITHIN / 2)
                if left and service.process.alive:
                    self.record.breaks("no work hangs", f"{service.name}: {len(left)} facts")
        # By then durable readers have looked whether a failover has put their saved positions back (9.23).
        settings = self.scenario.settings
        beats = settings["silent_after_beats"] + 2 if self.database.timeline > 1 else 0
        looked = self.now() + beats * settings["heartbeat"]
        while (behind := self._behind()) or self.now() < looked:
            if self.now() > deadline:
                self.record.breaks("settles", f"{within:g} s after the last fault: {'; '.join(behind)}")
                return
            for service in self._running():
                self._revive(service)
            await asyncio.sleep(0.5)
        self.note("settled")
        for role in self.scenario.roles:
            if role.kind == WRITER and role.name not in self.gone:
                await self._last_word(role.name, deadline)
        for task, (service, _) in list(self.waits.items()):
            if service.process.alive and not task.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(20):
                        await asyncio.wait([task])
                if not task.done():
                    self.record.breaks("no wait hangs", f"{service.name}: {task.get_name()}")

    def _revive(self, service: Service) -> None:
        """What a person does about a reader that has stopped and said so."""
        bus = service.bus
        assert bus is not None
        for key, error in list(bus.reading.stopped.items()):
            if isinstance(error, HandlerFailed) and is_outage(error.error):
                self.record.breaks("an outage is not poison", f"{service.name}: {error}")
            if not isinstance(error, PositionTooOld):
                bus.resume(next(stream for stream in STREAMS if stream.name == key[0]), key[1])
                continue
            unseen = self.pruned_unseen.get((service.role.name, service.epoch, *key), 0)
            seen = service.durable and error.floor > unseen
            if seen and any(one.role is service.role for one in self.seconds):
                # Two that first start under one name at the same time: the later one may begin where the earlier one
                # has not registered yet. It says so, and is restarted.
                service.kill(zombie=0.0, linger=0.0)
                self.join(service.role.name)
                break
            if service.epoch in self.record.void or service.epoch != self.epoch():
                pass  # who registered since the backup is not known to pruning; it begins anew once it notices
            elif seen:
                self.record.breaks("pruning respects readers", f"{service.name}: {error}")
            else:
                service.report(key, bus.reading.core.delivered(*key), 2**62, "too old")
                if service.role.options.get("loop"):  # it gets the error in place of all other rows: given up
                    service.kill(zombie=0.0, linger=0.0)
                    self.gone.add(service.role.name)
                    break

    def registered(self) -> set[tuple[str, str, str]]:
        """Who is registered to read what, for pruning to see: (reader, epoch, stream)."""
        columns = DEFINITIONS["busrep_readers"].columns
        rows = self.database.state.tables["busrep_readers"].committed().values()
        saved = [dict(zip(columns, values, strict=True)) for values in rows]
        return {(one["reader"], one["epoch"], one["stream"]) for one in saved}

    def unaware(self) -> set[tuple[str, str, str]]:
        """Whose registration a failover has lost, and is not made again, for the reader has not looked yet (9.23): it
        still has saved positions in memory. One that has noticed is registered again before it goes back."""
        found = set()
        for role, epoch, stream in self.unregistered - self.registered():
            bus = self.current[role].bus if role in self.current else None
            if bus is not None and any(key[0] == stream for key in bus.reading.saved.at):
                found.add((role, epoch, stream))
        return found

    def began_anew(self, service: Service, key: tuple[str, str], position: int) -> None:
        """A reader begins another log at its floor, and owes its handlers no row below, even if a failover brings these
        back."""
        role, epoch = service.role.name, service.epoch
        if position > 0:
            self.began_behind[role, epoch, key[0]] = service.number
        # Who prunes may not have its answer yet.
        pruned = self.floors().get(key, 0) if epoch == self.epoch() else 0
        if position > max(pruned, self.record.pruned.get((epoch, key), 0)):
            return
        self.record.begun[role, epoch, key] = max(position, self.record.begun.get((role, epoch, key), 0))
        # A failover may have lost that it had begun that log before, and had handled rows of it.
        if (role, epoch, key[0]) in self.unregistered:
            service.report(key, 0, position, "registration lost")

    def note_pruned(self, unaware: set[tuple[str, str, str]], before: dict[tuple[str, str], int]) -> None:
        """Rows were pruned that such readers may need, and they will be told."""
        for (stream, writer), floor in self.floors().items():
            if floor <= before.get((stream, writer), 0):
                continue
            for role, epoch, name in unaware:
                if (name, epoch) == (stream, self.epoch()):
                    self.pruned_unseen[role, epoch, stream, writer] = floor

    def note_pruned_before(self, lost: set[tuple[str, str, str]]) -> None:
        """A failover has lost registrations. Where an earlier life began behind pruned rows, the present one does not
        know where that was: all rows are due to it again, and it is told that the first ones are gone (9.23)."""
        for role, epoch, stream in lost & self.began_behind.keys():
            if role in self.current and self.current[role].number != self.began_behind[role, epoch, stream]:
                for (name, writer), floor in self.floors().items():
                    if name == stream:
                        self.pruned_unseen[role, epoch, stream, writer] = floor

    def not_registered(self, service: Service, stream: str) -> None:
        """A reader logs that it is not registered, and begins behind what was pruned: this tells it, where a failover
        has lost that it was, or no process of it ever came so far."""
        role, epoch = service.role.name, self.epoch()
        again = self.began_behind.get((role, epoch, stream)) == service.number  # it was registered meanwhile
        self.began_behind[role, epoch, stream] = service.number
        never = not again and self.first_registered.get((role, epoch, stream), service.number) == service.number
        if never or (role, epoch, stream) in self.unregistered:
            for (of, writer), floor in self.floors().items():
                if of == stream:
                    service.report((stream, writer), 0, floor, "registration lost")

    def commits_lost(self, service: Service, error: CommitsLost) -> None:
        """A writer has stopped, and says why: a person runs ``busrep db restored``, sooner or later."""
        if "busrep db restored" not in str(error):
            self.record.breaks("lost commits are not silent", f"{service.name} says {error}")
        if self.epoch() not in self.to_declare:
            self.to_declare[self.epoch()] = None
            self.later(0.0 if self.healing else self.dice.choice([0.1, 1.0, 3.0]), self._notice_loss, self.epoch())

    def _notice_loss(self, epoch: str) -> None:
        self.spawn(self._declare_lost(epoch))

    async def _declare_lost(self, epoch: str) -> None:
        while self.database.down or self.restoring:
            await asyncio.sleep(0.1)
        if self.epoch() == epoch and epoch not in self.record.void and epoch not in self.record.ended:
            self.record.ended[epoch] = self.now()
            self.record.floors[epoch] = self.floors()
            self.note("busrep db restored")
            await declare(self)

    def _behind(self) -> list[str]:
        """Who is not where it should be, for a person."""
        found = [
            f"{service.name} does not know that its commits are lost"
            for service, life in self.must_stop
            if service.process.alive and service.number == life
        ]
        if self.epoch() in self.to_declare:
            found.append("busrep db restored is not run yet")
        found += [f"{one.name} is not gone yet" for one in self.seconds if one.process.alive and not one.main.done()]
        for one in self._running():
            writing = None if one.bus is None else one.bus.writing
            if writing is not None and writing.claim is not None and one not in self.seconds:
                held = self._incarnation(one.role.name)
                if (writing.incarnation, self._server()) != (held, self.database.identity):
                    found.append(f"{one.name} holds no claim")
        if self.record.silent and any(one.role.kind == WRITER for one in self._running()):
            found.append("commits were lost in silence")
        if any(session.linger is not None for session in self.database.sessions):
            found.append("what a dead client had sent may yet be committed")
        for role in self.scenario.roles:
            service = self.current.get(role.name)
            if role.name in self.gone:
                continue
            if service is None or not service.running or service.fenced or service.ending:
                found.append(f"{role.name} is not up")
                continue
            if service.bus is not None and service.reads:
                found += self._behind_of(service, service.bus)
        return found

    def _handling_takes(self, service: Service) -> float:
        """Most seconds that the handlers of a slow process need for the rows it has yet to handle, one by one."""
        slow: float = service.role.options.get("slow", 0.0)
        rows = 0
        for key, log in self.database.facts().items() if slow else ():
            at = 0 if service.bus is None else service.bus.reading.core.delivered(*key)  # 0: it is being opened
            rows += sum(len(payloads) for token, payloads in log.items() if token > at)
        return slow * rows

    def _behind_of(self, service: Service, bus: Bus) -> list[str]:
        core, found = bus.reading.core, []
        if core.epoch != self.epoch() and any(one.stream.fetchable for one in core.progress.values()):
            return [f"{service.name} holds epoch {core.epoch}"]
        if bus.reading.failure is not None:
            return [f"{service.name} failed: {bus.reading.failure}"]
        reported = {one.key for one in self.record.reported if one.life == service.number and one.upto == 2**62}
        for key, log in self.database.facts().items():
            if not log or key in reported:
                continue
            at, last = core.delivered(*key), max(log)
            if key[1] == service.role.name and not bus._own:
                at = max(at, bus.positions().get(key[0], {}).get(key[1], 0))
            if at < last:
                state = core.progress[key].state.value if key in core.progress else "unknown"
                found.append(f"{service.name} is at {at} of {last} of {key[0]} {key[1]} ({state})")
        for writer in self._running():
            if writer.role.kind not in (WRITER, MEMORY) or writer is service:
                continue
            if writer.bus is None or writer.bus.writing is None:
                continue
            sent = writer.bus.writing.core.positions().get(presence.name)
            at = core.delivered(presence.name, writer.role.name)
            if writer not in self.seconds and sent not in (None, at) and not service.role.options.get("tables"):
                found.append(f"{service.name} is at {at} of {sent} of presence {writer.role.name}")
        return found

    async def _last_word(self, name: str, deadline: float) -> None:
        """One more fact of this writer; everybody hears of it."""
        last: dict[Stream[Item], int] = {}
        while len(last) < 2:
            writer, why = self.current[name], "is not up"
            for stream in (orders, payments):
                if writer.bus is None or stream in last:
                    continue
                task = writer.process.start(self._one(writer.bus, stream))
                await asyncio.wait([task], timeout=20)
                if task.done() and task.exception() is None:
                    last[stream] = task.result()
                else:  # connections that died are found out by being used
                    why = repr(task.exception()) if task.done() else "hangs"
            if self.now() > deadline:
                self.record.breaks("healed, everybody writes", f"{writer.name}: {why}")
                return
            if len(last) < 2:
                await asyncio.sleep(0.3)
        for service in self._running():
            if service.role.name == name or service.bus is None or not service.reads or service in self.seconds:
                continue
            for stream, token in last.items():
                if (stream.name, name) in service.bus.reading.stopped:
                    continue
                if why := await self._why_not_heard(service, stream, name, token, deadline):
                    self.record.breaks("healed, everybody hears", f"{service.name}: {why}")

    async def _why_not_heard(
        self, service: Service, stream: Stream[Item], writer: str, token: int, deadline: float
    ) -> str:
        """Why this process does not hear of a fact; "": it does."""
        while True:
            if service.bus is not None:
                wait = service.process.start(service.bus.wait_for(stream, writer, token, 20))
                await asyncio.wait([wait], timeout=30)
                if not wait.done():
                    return "hangs"
                if wait.exception() is None:
                    return ""
                # A COMMIT that took long may have fenced it after all had settled: it is starting anew then.
                if not isinstance(wait.exception(), Closed) or self.now() > deadline:
                    return repr(wait.exception())
            elif self.now() > deadline:
                return "is not up"
            await asyncio.sleep(0.3)

    async def _one(self, bus: Bus, stream: Stream[Item]) -> int:
        async with bus.write(stream) as fact:
            fact.add(Item(next(self.row), "last"))
        return fact.ids[stream.name]

    # -- what is seen on the way ------------------------------------------------------------------------------

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(0.7)
            for service in self._running():
                self._sample(service)
                if service.reads and self.dice.random() < 0.3:
                    self.watch(service.process.start(self._linear(service)))

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Hold on to a task until it ends."""
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    async def _linear(self, service: Service) -> None:
        bus = service.bus
        if bus is None:
            return
        with contextlib.suppress(BusrepError):
            epoch = service.epoch
            position = await bus.linear_position(orders)
            if epoch == service.epoch:
                upto = Upto(self.now(), epoch, orders.name, position, service.role.name, service.number)
                self.record.upto.append(upto)

    def _sample(self, service: Service) -> None:
        bus, record, now = service.bus, self.record, self.now()
        if bus is None:
            return
        core, epoch = bus.reading.core, service.epoch
        for stream, positions in bus.positions().items() if service.reads else ():
            for writer, position in positions.items():
                if stream not in service.life.epochs or core.new_epoch is not None:
                    continue
                key = (stream, writer)
                record.samples.append(Sample(now, service.role.name, service.number, epoch, key, position, "position"))
                before = self.last_position.get((service.number, epoch, *key), 0)
                # A restore puts them back, before its new epoch is noticed; a failover, to what was saved. The own one
                # only until those facts of a predecessor are handled again whose effects the failover took back.
                counts = bus.reading.own.name == writer and bus.reading.own_counts(stream)
                back = before if counts else self._put_back(service, epoch, key, before)
                if position < min(before, back) and epoch == self.epoch() and epoch not in record.void:
                    record.breaks("positions never go back", f"{service.name}: {key} {before} -> {position}")
                self.last_position[service.number, epoch, stream, writer] = position
        self._memory(service, bus)

    def _put_back(self, service: Service, epoch: str, key: tuple[str, str], before: int) -> int:
        if not service.durable or epoch not in self.record.failovers:
            return before
        return self.put_back.get((service.role.name, epoch, *key), 0)

    def _memory(self, service: Service, bus: Bus) -> None:
        settings, core = self.settings, bus.reading.core
        # A bound is looked at before a frame, or the pages that are under way, are taken in.
        slack = FACT_BYTES * (settings.fetches * settings.page_rows + settings.frame_rows)
        if core.intake.queue_bytes_peak > settings.receive_queue_bytes + slack:
            self.record.breaks("memory is bounded", f"{service.name}: {core.intake.queue_bytes_peak} bytes received")
        for key, progress in core.progress.items():
            if progress.held.size > settings.held_bytes + slack:
                self.record.breaks("memory is bounded", f"{service.name}: {progress.held.size} bytes held of {key}")
        if bus.writing is not None and bus.writing.core.queued_bytes > settings.publish_queue_bytes + slack:
            queued = bus.writing.core.queued_bytes
            self.record.breaks("memory is bounded", f"{service.name}: {queued} bytes to publish")

    def _published(self, process: Process, data: bytes) -> None:
        """A server took in a message."""
        service = self.services[process]
        if self.tracing:
            for line in data.split(b"\n"):
                service.note(f"> {line.decode()}")
        frame = parse_frame(data, 2**30)
        if frame.errors:
            self.record.breaks("the wire", f"{service.name} sent {data!r}: {frame.errors[0]}")
        epoch = service.claimed_epoch
        at: dict[tuple[str, str], int] = {}
        for item in frame.items:
            if isinstance(item, Server) and item.epoch is not None:
                epoch = item.epoch
            if not isinstance(item, Position | Rows) or item.stream == presence.name:
                continue
            key = (item.stream, item.writer)
            if isinstance(item, Position):
                self._claimed(epoch, key, item.prev, item.new, None)
                at[key] = item.new
            elif key not in at or item.open:
                self.record.breaks("each row has its head", f"{service.name} sent {data!r}")
            else:
                rows = list(zip(item.tokens, item.payloads, strict=True))
                self._claimed(epoch, key, at[key], item.tokens[-1], rows)
                at[key] = item.tokens[-1]

    def _claimed(
        self, epoch: str, key: tuple[str, str], after: int, upto: int, rows: list[tuple[int, bytes]] | None
    ) -> None:
        if epoch:
            self.record.claimed.append(Claimed(self.now(), epoch, key, after, upto, rows))

    def presence_seen(self, service: Service, writer: str, what: str, token: int, payload: bytes) -> None:
        """A reader heard of a stream that lives in memory."""
        self.record.presence.append((self.now(), service.role.name, service.number, what, token, writer, payload))
        if self.tracing:
            service.note(f"presence {writer}: {what} {token}")


@contextlib.contextmanager
def steered(scenario: Scenario, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """What the library asks of the machine comes from the seed and the virtual clock meanwhile; and its few writers do
    what only many do, where the scenario has it so."""
    seed = scenario.seed
    state = random.getstate()
    random.seed(seed)
    dice, jitter = random.Random(f"{seed} tokens"), random.Random(f"{seed} nanoseconds")

    def now() -> float:
        process = Process.current()
        return 1.7e9 + loop.time() - (0.0 if process is None else process.behind)

    # Lives may begin at whole steps of the virtual clock, which machines do not: some nanoseconds tell them apart.
    clock = mock.Mock(time_ns=lambda: int(now() * 1e9) + jitter.randrange(1000))
    tokens = mock.Mock(token_hex=lambda size: f"{dice.getrandbits(8 * size):0{2 * size}x}")
    try:
        with (
            mock.patch("busrep.runtime.own_name.time", clock),
            mock.patch("busrep.stores.fencing.time", clock),
            mock.patch("busrep.stores.schema.secrets", tokens),
            contextlib.nullcontext() if scenario.together else mock.patch.object(Announcements, "join"),
            mock.patch.multiple(announcements, FEW=0, SPEAKERS=1) if scenario.rests else contextlib.nullcontext(),
        ):
            yield
    finally:
        random.setstate(state)


class Alarm(logging.Handler):
    """Errors that the library logs with a traceback, and that nobody raised on purpose, are bugs. What nothing but the
    log tells is noted here."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self.world, self.record = world, world.record

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        process = Process.current()
        if record.msg == NOT_REGISTERED and process is not None and process in self.world.services:
            assert isinstance(record.args, tuple)
            self.world.not_registered(self.world.services[process], str(record.args[1]))
        if "system identifier and timeline" in record.msg and "busrep db restored" in record.msg:
            self.record.silent = False
        error = record.exc_info[1] if record.exc_info and record.levelno >= logging.ERROR else None
        if error is not None and not isinstance(error, BusrepError | DeliberateError | SimError):
            self.record.breaks("nothing unexpected", f"{record.getMessage()}: {error!r}")
