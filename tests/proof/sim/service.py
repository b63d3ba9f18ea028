"""A process of a simulated deployment: its ways to Redis and to the database, the bus it runs, and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from busrep.asyncio.bus import Bus
from busrep.core.catchup import Key
from busrep.errors import BusrepError, CommitsLost, WriterFenced
from busrep.options import BusOptions
from busrep.runtime.batch import Batch
from busrep.stores.plans import Control, Sql
from busrep.streams import Registry, Stream

from .path import AFTER, SERVER, Path, Request, SimConnection
from .record import Handled, Life, Reported
from .redis import RedisPath
from .scenario import LIVE, MEMORY, REPLICA, STRICT, WRITER, Role
from .store import SimStore
from .tables import SimError
from .virtual import Process

if TYPE_CHECKING:
    from .world import World

NAME = "sim"


@attrs.frozen
class Item:
    """A row."""

    number: int
    text: str = ""


orders: Stream[Item] = Stream("orders", Item)
payments: Stream[Item] = Stream("payments", Item)
presence: Stream[Item] = Stream("presence", Item, resettable=True)
STREAMS = (orders, payments, presence)
POISON, BIG = "poison", "big" * 500


class DeliberateError(Exception):
    """What a handler or a writer of the simulation raises on purpose."""


class OutageError(Exception):
    """What a handler raises while another server that it needs is away."""


def is_outage(error: BaseException) -> bool:
    """What the application says of its errors: ``transient=``."""
    return isinstance(error, OutageError) or (isinstance(error, SimError) and error.operational)


TAKES_CLAIM = re.compile("FOR SHARE|pg_try_advisory_xact_lock_shared")


class ServicePath(Path):
    """The way to the database of one service; a fact's BEGIN, and its COMMIT or that of effects, can be made to fail.

    ``commit_fate``: the connection is cut once COMMIT was sent, so that it is never answered. It arrives all the same
    ("now"), or ``commit_delay`` seconds later ("late"), or is lost with the connection ("never"). ``begin_cut``: the
    connection is cut with the statement that takes the claim, so that a fact that has its ID does not begin.
    """

    commit_fate: str | None = None
    commit_delay = 0.0
    commit_linger = 0.0
    begin_cut = False

    def send(self, request: Request) -> None:
        """See `Path`."""
        super().send(request)
        if self.begin_cut and any(isinstance(step, Sql) and TAKES_CLAIM.search(step.text) for step in request.steps):
            self.begin_cut = False
            self.loop.call_later(AFTER, self._cut_request, request, "never", context=SERVER)
        if self.commit_fate is None or Control.COMMIT not in request.steps:
            return
        if any(isinstance(step, Sql) and step.text.startswith("UPDATE busrep_positions") for step in request.steps):
            return  # a heartbeat
        fate, self.commit_fate = self.commit_fate, None
        self.loop.call_later(AFTER, self._cut_request, request, fate, context=SERVER)

    def _cut_request(self, request: Request, fate: str) -> None:
        if fate == "never" and request.arrival is not None:
            request.arrival.cancel()
            request.arrival, request.done = None, True
            session = request.connection.session
            if session.linger is not None:  # the process was killed meanwhile: nothing else would end it
                session.orphaned(session.linger)
        self.cut(zombie=self.commit_delay if fate == "late" else 0.0, linger=self.commit_linger)


class ServiceStore(SimStore):
    """Notes which life of a reader's was the first to be told that it is registered. ``number``: of this one."""

    first: dict[tuple[str, str, str], int]
    number: int

    async def register_reader(self, reader: str, positions: Mapping[Key, int], epoch: str, **options: Any) -> None:
        """See `ReaderPositions`."""
        await super().register_reader(reader, positions, epoch, **options)
        for stream, _ in positions:
            self.first.setdefault((reader, epoch, stream), self.number)


class Service:
    """One process of a role: its ways to Redis and to the database, and the bus it runs."""

    def __init__(self, world: World, role: Role, number: int) -> None:
        self.world, self.role, self.number = world, role, number
        self.name = f"{role.name}#{number}"
        dice = random.Random(f"{world.scenario.seed} {self.name}")
        self.dice = dice
        self.process = Process(self.name)
        self.process.behind = world.behind.get(role.name, 0.0)
        self.redis = RedisPath(world.redis, random.Random(dice.random()), self.process)
        self.database = ServicePath(world.database, random.Random(dice.random()))
        self.database.kept_out = world.restoring is not None
        self.replica: Path | None = None
        if role.kind == REPLICA:
            first, *others = world.replicas
            self.replica = Path(first, random.Random(dice.random()), others=others)
        self.bus: Bus | None = None
        self.life = Life(role.name, number, world.now())
        self.ending = False
        self.handler_away = False
        self.once = False
        self.looping: asyncio.Task[None] | None = None
        self.working: dict[asyncio.Task[None], None] = {}
        world.record.lives.append(self.life)
        world.services[self.process] = self
        self.main = self.process.start(self._live())

    @property
    def running(self) -> bool:
        """Whether it takes part: alive, not stopped, its bus open."""
        return self.process.alive and not self.process.paused and self.bus is not None

    @property
    def fenced(self) -> bool:
        """Whether its name was taken over."""
        return self.bus is not None and self.bus.writing is not None and self.bus.writing.fenced is not None

    @property
    def reads(self) -> bool:
        """Whether it has handlers."""
        return self.role.reads

    @property
    def durable(self) -> bool:
        """Whether its positions are saved."""
        return self.reads and self.role.kind != LIVE

    @property
    def epoch(self) -> str:
        """Of the positions it holds."""
        return "" if self.bus is None else self.bus.reading.core.epoch or ""

    @property
    def claimed_epoch(self) -> str:
        """Of the log that it writes to, "" for a mere reader."""
        writing = None if self.bus is None else self.bus.writing
        return "" if writing is None or writing.epoch is None else writing.epoch

    def _make(self) -> Bus:
        world, role, options = self.world, self.role, self.role.options
        if role.kind == MEMORY:
            given = BusOptions(
                name=NAME, streams=(presence,), writer=role.name, settings=world.settings, require_redis=False
            )
            return Bus(self.redis.client(), given)
        streams = STREAMS[:-1] if options.get("tables") else STREAMS
        registry = Registry(streams)
        primary = ServiceStore(registry, world.settings, self.database)
        primary.first, primary.number = world.first_registered, self.number
        store = primary if self.replica is None else SimStore(registry, world.settings, self.replica)
        given = BusOptions(
            name=NAME,
            streams=streams,
            writer=role.name if role.kind == WRITER else None,
            store=store,
            reader_store=None if store is primary else primary,
            reader=role.name if self.durable else None,
            start=options.get("start", "earliest") if self.reads else None,
            settings=world.settings,
            on_poison=options.get("on_poison", "stop"),
            on_too_old=options.get("on_too_old", "stop"),
            require_redis=False,
            transient=is_outage,
        )
        return Bus(self.redis.client(), given)

    async def _live(self) -> None:
        """Run a bus; another one when that was fenced, as a supervisor restarts what ends."""
        while not self.ending:
            bus = self._make()
            try:
                await bus.open()
            except BusrepError as error:
                self.note(f"cannot start: {error}")
                if isinstance(error, WriterFenced) and self.world.alone(self.role.name):
                    self.world.record.breaks("whoever is alone starts", f"{self.name}: {error}")
                await asyncio.sleep(0.3)
                continue
            self.bus = bus
            self.note("started")
            self.world.opened(self.role.name)
            if self.reads:
                await self._subscribe(bus)
            while not self.ending and not self.fenced:
                await asyncio.sleep(0.5)
            await bus.close()
            if bus.writing is not None and isinstance(bus.writing.fenced, CommitsLost):
                self.world.commits_lost(self, bus.writing.fenced)
            self.bus = None
            self.world.gaps_closed += bus.reading.core.counters.gaps_found
            self.note("closed")
            if self.once:
                return
            self._new_life("closed")

    def _new_life(self, how: str) -> None:
        world = self.world
        self.life.ended, self.life.how = world.now(), how
        self.number = next(world.numbers)
        self.life = Life(self.role.name, self.number, world.now())
        world.record.lives.append(self.life)

    async def _subscribe(self, bus: Bus) -> None:
        life = self.life
        if self.role.options.get("loop"):
            self.looping = asyncio.get_running_loop().create_task(self._loop(bus))
        else:
            handle = self._strict if self.role.kind == STRICT else self._loose
            for stream in (orders, payments):
                bus.subscribe(stream)(handle)

        def present(batch: Batch[Item]) -> None:
            for token, row in zip(batch.tokens, batch.rows, strict=True):
                self.world.presence_seen(self, batch.writer, "row", token, presence.encode(row))

        if not self.role.options.get("tables"):
            bus.subscribe(presence)(present)

        @bus.on_reset()
        def reset(stream: str, writer: str, position: int) -> None:
            if stream == presence.name:
                self.world.presence_seen(self, writer, "reset", position, b"")
            else:
                self.note(f"{stream} {writer} was reset to {position}")
                self.world.began_anew(self, (stream, writer), position)

        @bus.on_missed()
        def missed(stream: str, writer: str, after: int, upto: int) -> None:
            if stream == presence.name:
                self.world.presence_seen(self, writer, "missed", upto, b"%d" % after)
            else:
                self.report((stream, writer), after, upto, "missed")

        bus.reading.after_pump = lambda: self._see_start(bus)
        with contextlib.suppress(BusrepError):
            for stream in (orders, payments):
                await bus.reading.followed(stream)
                life.epochs[stream.name] = self.epoch
                for key, position in bus.reading.saved.at.items():
                    if key[0] == stream.name:
                        life.starts[key] = position

    def _see_start(self, bus: Bus) -> None:
        """One that begins at the oldest row may find that it is another by now. At once, for it is known no longer than
        until the first row is handled."""
        life = self.life
        for key, at in bus.reading.oldest.at.items():
            if self.bus is bus and self.epoch == life.epochs.get(key[0]):
                life.starts[key] = max(life.starts.get(key, 0), at[0])

    def report(self, key: tuple[str, str], after: int, upto: int, why: str) -> None:
        """This reader was told that it does not get these rows."""
        now, life = self.world.now(), self.life
        self.world.record.reported.append(Reported(now, self.role.name, life.number, self.epoch, key, after, upto, why))
        self.note(f"{why}: {key[0]} {key[1]} ({after}, {upto}]")

    # -- handlers ---------------------------------------------------------------------------------------------

    def _rows(self, batch: Batch[Item]) -> list[tuple[int, bytes]]:
        return [(token, batch.stream.encode(row)) for token, row in zip(batch.tokens, batch.rows, strict=True)]

    async def _trouble(self, batch: Batch[Item]) -> None:
        options = self.role.options
        if options.get("slow"):
            await asyncio.sleep(options["slow"] * self.dice.random())
        if self.handler_away:
            raise OutageError("another server is away")
        if self.world.poisonous and self.dice.random() < options.get("fails", 0.0):
            raise DeliberateError("a bad moment")
        if self.world.poisonous and any(row.text == POISON for row in batch.rows):
            raise DeliberateError("poison")

    def _handled(self, batch: Batch[Item], epoch: str, rows: list[tuple[int, bytes]]) -> None:
        key = (batch.stream.name, batch.writer)
        record = self.world.record
        record.handled.append(Handled(self.world.now(), self.role.name, self.life.number, epoch, key, rows))
        if self.world.tracing:
            self.note(f"handled {key[0]} {key[1]} {[token for token, _ in rows]}")

    async def _loose(self, batch: Batch[Item]) -> None:
        epoch, rows = self.epoch, self._rows(batch)
        await self._trouble(batch)
        self._handled(batch, epoch, rows)

    async def _loop(self, bus: Bus) -> None:
        """Iterate in place of handlers; a loop that fails is begun again, at the batch on which it failed."""
        while not self.ending:
            try:
                async with contextlib.aclosing(bus.follow(orders, payments)) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        if self.dice.random() < 0.1:
                            break  # left in the middle: the batch comes again
                        await self._loose(batch)
            except (BusrepError, DeliberateError, OutageError):
                await asyncio.sleep(0.05)

    async def _apply(
        self, connection: SimConnection, batch: Batch[Item], epoch: str, rows: list[tuple[int, bytes]]
    ) -> None:
        for token, payload in rows:
            await connection.execute(
                "INSERT INTO effects (reader, epoch, stream, writer, token, row) VALUES (?, ?, ?, ?, ?, ?)",
                (self.role.name, epoch, batch.stream.name, batch.writer, token, payload.decode()),
            )

    async def _strict(self, batch: Batch[Item]) -> None:
        epoch, rows = self.epoch, self._rows(batch)
        if self.role.options.get("own"):
            async with batch.transaction() as connection:
                await self._apply(connection, batch, epoch, rows)
                await self._trouble(batch)
        else:
            connection = await self.database.connect()
            try:
                await connection.begin()
                await batch.save(connection)  # first: see Batch.save
                await self._apply(connection, batch, epoch, rows)
                await self._trouble(batch)
                await connection.commit()
            finally:
                await connection.close()
        self._handled(batch, epoch, rows)
        if self.world.poisonous and self.dice.random() < self.role.options.get("fails", 0.0):
            raise DeliberateError("after COMMIT")

    # -- its fate ---------------------------------------------------------------------------------------------

    def kill(self, *, zombie: float, linger: float) -> None:
        """As kill -9."""
        self.process.kill()
        self.redis.kill()
        for path in (self.database, self.replica):
            if path is not None:
                path.kill(zombie=zombie, linger=linger)
        self.life.ended, self.life.how = self.world.now(), "killed"
        self.note("killed")

    def heal(self) -> None:
        """All that is wrong with its links ends."""
        self.redis.heal()
        for path in (self.database, self.replica):
            if path is not None:
                path.refuse = path.hole = False
                path.slow = 0.0
        self.database.commit_fate, self.database.begin_cut = None, False
        self.handler_away = False
        self.process.resume()

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.world.record.note(self.name, text)
