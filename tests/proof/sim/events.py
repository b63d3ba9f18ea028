"""What can happen to a simulated deployment: the work that its services do, and the faults that befall them.

``EVENTS`` maps each kind of `Event` to the function that makes it happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from busrep.asyncio.bus import Bus
from busrep.errors import BusrepError, CommitUnknown, WaitTimeout
from busrep.stores.postgres.dialect import sequence_name

from .database import Replicated
from .record import Sample
from .redis import OUTSIDE
from .scenario import MEMORY, WRITER, Event
from .service import BIG, NAME, POISON, DeliberateError, Item, Service, orders, payments, presence
from .strangers import Scene, said
from .tables import DEFINITIONS, REFUSED, SimError

if TYPE_CHECKING:
    from .world import World

# -- work -------------------------------------------------------------------------------------------------


def _writer(world: World, event: Event) -> Service | None:
    service = world.current.get(event.who)
    return service if service is not None and service.running else None


def _work(world: World, service: Service, work: Any) -> asyncio.Task[None]:
    task = service.process.start(work)
    world.watch(task)
    service.working[task] = None
    task.add_done_callback(lambda done: service.working.pop(done, None))
    return task


async def write(world: World, event: Event) -> None:
    """A fact, or none, in one transaction of the bus's."""
    service = _writer(world, event)
    if service is not None and service.bus is not None:
        task = _work(world, service, _write(world, service, service.bus, event))
        if event.args["end"] == "cancel":
            world.loop.call_later(event.args["cancel"], task.cancel, context=OUTSIDE)


async def _write(world: World, service: Service, bus: Bus, event: Event) -> None:
    args = event.args
    streams = (orders, payments) if args["both"] else (orders,)
    ids: dict[str, int] = {}
    epoch, inside = "", False
    try:
        async with bus.write(*streams) as fact:
            ids, epoch, inside = dict(fact.ids), service.claimed_epoch, True
            await _statements(world, service, fact, args.get("statement", ""))
            _add(world, fact, args)
            if args["hold"]:
                await asyncio.sleep(args["hold"])
            if args["end"] == "rollback":
                raise DeliberateError("rolled back")
            inside = False
    except CommitUnknown as error:
        service.note(f"fact in doubt: {dict(ids)}: {error}")
        return
    except (BusrepError, DeliberateError, SimError) as error:
        service.note(f"fact not written: {ids}: {type(error).__name__}")
        world.record.refuse(epoch, service.role.name, ids)
        return
    except asyncio.CancelledError:
        if inside:
            world.record.refuse(epoch, service.role.name, ids)
        raise
    service.note(f"wrote {ids}")
    if args["rows"]:
        for stream, id in ids.items():
            world.last[stream, service.role.name] = id
        _tell(world, service, bus, ids.items())


async def _statements(world: World, service: Service, fact: Any, kind: str) -> None:
    """Statements of the application's in a fact's block: none, one, two at the same time, or one that the block does
    not wait for."""
    question = "SELECT value FROM busrep_meta WHERE key = 'epoch'"
    if kind == "left":
        world.watch(service.process.start(_left(fact, question)))
        await asyncio.sleep(0)
    elif kind:
        await asyncio.gather(*(fact.execute(question) for _ in range(1 if kind == "one" else 2)))


async def _left(fact: Any, question: str) -> None:
    with contextlib.suppress(BusrepError, SimError):
        await fact.execute(question)


def _tell(world: World, service: Service, bus: Bus, facts: Iterable[tuple[str, int]]) -> None:
    """This life of the writer knows them to be committed. Not where the bus that wrote them was closed meanwhile: it
    looks for nothing any more, and the one that the process has opened in its place never knew of them."""
    if service.bus is bus:
        world.told.setdefault(service.number, set()).update(facts)


def _add(world: World, fact: Any, args: Any) -> list[int]:
    """Add rows; their numbers."""
    numbers = []
    for at in range(args["rows"]):
        text = POISON if args["poison"] else BIG if args["big"] else REFUSED if args.get("refused") else ""
        numbers.append(next(world.row))
        fact.add(Item(numbers[-1], text))
        if args["both"] and at == 0:
            numbers.append(next(world.row))
            fact.add(Item(numbers[-1]), stream=payments)
    return numbers


async def publish(world: World, event: Event) -> None:
    """Several facts in one transaction."""
    service = _writer(world, event)
    if service is not None and service.bus is not None:
        text = REFUSED if event.args.get("refused") else "bulk"
        items = [Item(next(world.row), text) for _ in range(event.args["rows"])]
        _work(world, service, _publish(world, service, service.bus, items))


async def _publish(world: World, service: Service, bus: Bus, items: Sequence[Item]) -> None:
    try:
        ids = await bus.publish(orders, items)
    except CommitUnknown as error:
        service.note(f"bulk in doubt: {error}")
    except (BusrepError, SimError) as error:
        service.note(f"bulk not written: {type(error).__name__}")
        world.record.refused_rows.update(item.number for item in items)
    else:
        service.note(f"wrote {ids}")
        world.last[orders.name, service.role.name] = ids[-1]
        _tell(world, service, bus, [(orders.name, id) for id in ids])


async def joined(world: World, event: Event) -> None:
    """A fact in a transaction of the caller's own, which ends when the caller likes."""
    service = _writer(world, event)
    if service is not None and service.bus is not None:
        _work(world, service, _joined(world, service, service.bus, event))


async def _joined(world: World, service: Service, bus: Bus, event: Event) -> None:
    args = event.args
    try:
        connection = await service.database.connect()
        try:
            await connection.begin()
            async with bus.write(orders, connection=connection) as fact:
                numbers = _add(world, fact, {**args, "both": False})
            if args["hold"]:
                await asyncio.sleep(args["hold"])
            if args["end"] == "commit":
                await connection.commit()
            else:
                await connection.rollback()
        finally:
            await connection.close()
    except (BusrepError, DeliberateError, SimError) as error:
        service.note(f"fact not written: {type(error).__name__}")
    else:
        service.note(f"joined {args['end']} {dict(fact.ids)}")
        if args["end"] != "commit":
            world.record.refused_rows.update(numbers)  # not the ID: after a crash it may be given again (9.22)


async def write_presence(world: World, event: Event) -> None:
    """Rows of the stream that lives in memory."""
    service = _writer(world, event)
    if service is not None and service.bus is not None:
        _work(world, service, _presence(world, service, service.bus, event.args["rows"]))


async def _presence(world: World, service: Service, bus: Bus, rows: int) -> None:
    with contextlib.suppress(BusrepError):
        async with bus.write(presence) as fact:
            for _ in range(rows):
                fact.add(Item(next(world.row), f"{service.role.name} {bus.writing.incarnation}"))  # type: ignore[union-attr]


async def wait(world: World, event: Event) -> None:
    """A reader waits for a writer's last fact."""
    service = world.current.get(event.who)
    token = world.last.get((orders.name, event.args["writer"]))
    if service is None or not service.running or service.bus is None or token is None:
        return
    work = _wait(world, service, service.bus, event.args["writer"], token)
    task = service.process.start(work, name=f"wait for {event.args['writer']} {token}")
    world.waits[task] = (service, world.now())


async def _wait(world: World, service: Service, bus: Bus, writer: str, token: int) -> None:
    began, epoch = world.now(), service.epoch
    try:
        await bus.wait_for(orders, writer, token, timeout=3.0)
    except WaitTimeout:
        service.note(f"waited in vain for {writer} {token}")
    except BusrepError as error:
        service.note(f"waiting for {writer} {token}: {error}")
    else:
        service.note(f"waited for {writer} {token}")
        if epoch == service.epoch:
            world.record.samples.append(
                Sample(world.now(), service.role.name, service.number, epoch, (orders.name, writer), token, "wait_for")
            )
    if world.now() - began > 3.5 and not service.process.paused and not paused_since(world, service, began):
        world.record.breaks("no wait hangs", f"{service.name} waited {world.now() - began:.1f} s of 3")


def paused_since(world: World, service: Service, began: float) -> bool:
    """Whether a process was stopped since then: then it may be late."""
    return any(
        event.kind == "pause" and event.who == service.role.name and event.at + event.args["lasting"] > began
        for event in world.scenario.events
    )


# -- faults -----------------------------------------------------------------------------------------------


def _victims(world: World, event: Event) -> list[Service]:
    found = [
        service
        for service in world.services.values()
        if service.process.alive and service.role.name == event.who and not service.main.done()
    ]
    if found or not event.who:
        world.record.count(event.kind)
    return found


async def redis_cut(world: World, event: Event) -> None:
    """A process's connections to Redis are reset."""
    for service in _victims(world, event):
        service.redis.cut(event.args["pubsub"])


async def redis_hole(world: World, event: Event) -> None:
    """Nothing passes between a process and Redis, in one direction or both."""
    way = event.args["way"]
    for service in _victims(world, event):
        path = service.redis
        path.hole_in, path.hole_out = way in ("in", "both"), way in ("out", "both")
        world.later(event.args["lasting"], path.heal)


async def redis_refuse(world: World, event: Event) -> None:
    """A process cannot connect to Redis, and loses its connections."""
    for service in _victims(world, event):
        service.redis.refuse = True
        service.redis.cut()
        world.later(event.args["lasting"], service.redis.heal)


async def redis_bad(world: World, event: Event) -> None:
    """Messages to a process are dropped, doubled, reordered."""
    for service in _victims(world, event):
        path, args = service.redis, event.args
        path.drop, path.double, path.reorder = args["drop"], args["double"], args["reorder"]
        world.later(args["lasting"], path.heal)


async def redis_clients(world: World, event: Event) -> None:
    """CLIENT KILL."""
    _victims(world, event)
    for node in world.redis.nodes:
        node.kill_clients(pubsub=event.args["pubsub"])


async def redis_down(world: World, event: Event) -> None:
    """The server dies and comes back."""
    _victims(world, event)
    node = world.redis.master
    node.kill()
    world.later(event.args["lasting"], setattr, node, "up", True)


async def redis_failover(world: World, event: Event) -> None:
    """Another master; those that ``stay`` go on with the old one for a while, those that publish or subscribe."""
    _victims(world, event)
    old = world.redis.master
    world.redis.failover()
    for service in list(world.services.values()):
        if service.role.name in event.args["stay"]:
            service.redis.master = old
            service.redis.cut(pubsub=world.dice.random() < 0.5)
        else:
            service.redis.cut(pubsub=world.dice.choice([None, True, False]))
    world.later(event.args["lasting"], _demote, world, old)


def _demote(world: World, node: Any) -> None:
    for service in world.services.values():
        service.redis.master = None
    for connection in list(node.connections):
        connection.lose("demoted")


async def redis_denied(world: World, event: Event) -> None:
    """The users lose the right to a command."""
    _victims(world, event)
    world.redis.denied.add(event.args["command"])
    world.later(event.args["lasting"], world.redis.denied.discard, event.args["command"])
    for node in world.redis.nodes:
        node.kill_clients(pubsub=True)


async def database_cut(world: World, event: Event) -> None:
    """A process's connections to the database are reset; a COMMIT under way may still arrive."""
    for service in _victims(world, event):
        for path in (service.database, service.replica):
            if path is not None:
                path.cut(zombie=event.args["zombie"], linger=event.args["linger"])


async def commit_cut(world: World, event: Event) -> None:
    """The next COMMIT of a process gets no answer."""
    for service in _victims(world, event):
        path = service.database
        path.commit_fate, path.commit_delay, path.commit_linger = (
            event.args["fate"], event.args["zombie"], event.args["linger"],
        )  # fmt: skip


async def handler_outage(world: World, event: Event) -> None:
    """What the handlers of a process need besides is away."""
    for service in _victims(world, event):
        service.handler_away = True
        world.later(event.args["lasting"], setattr, service, "handler_away", False)


async def database_hole(world: World, event: Event) -> None:
    """Nothing passes between a process and the database."""
    for service in _victims(world, event):
        service.database.hole = True
        world.later(event.args["lasting"], setattr, service.database, "hole", False)


async def database_refuse(world: World, event: Event) -> None:
    """A process cannot connect to the database, and loses its connections."""
    for service in _victims(world, event):
        service.database.refuse = True
        service.database.cut()
        world.later(event.args["lasting"], setattr, service.database, "refuse", False)


async def database_slow(world: World, event: Event) -> None:
    """Statements of a process travel slowly."""
    for service in _victims(world, event):
        service.database.slow = event.args["slow"]
        world.later(event.args["lasting"], setattr, service.database, "slow", 0.0)


async def database_flush(world: World, event: Event) -> None:
    """COMMIT takes long: a slow disk; or, if ``slow`` is 0, a synchronous standby that is away for a while."""
    _victims(world, event)
    slow, lasting = event.args["slow"], event.args["lasting"]
    if slow:
        world.database.flush = slow
        world.later(lasting, setattr, world.database, "flush", 0.0)
    else:
        world.database.standby_at = world.database.now() + lasting


async def database_clock(world: World, event: Event) -> None:
    """The database's clock is set back: what was stamped before lies in the future, for that long."""
    _victims(world, event)
    world.database.behind += event.args["behind"]


async def sequence_set(world: World, event: Event) -> None:
    """ALTER SEQUENCE ... RESTART WITH a value further on; not while a claim has it locked."""
    sequence = world.database.state.sequences[sequence_name(event.args["stream"])]
    if not sequence.lock.lockers:
        _victims(world, event)
        sequence.given += event.args["by"]
        sequence.restarted = sequence.flushed = sequence.given


async def database_crash(world: World, event: Event) -> None:
    """The database dies, its sequences jump, and it comes back."""
    _victims(world, event)
    world.database.crash(world.dice)
    world.database.down = True
    world.later(event.args["lasting"], setattr, world.database, "down", False)


def keep_checkpoints(world: World) -> None:
    """Every half second a point in time to go back to, until all faults end."""
    if not world.healing:
        world.checkpoints.append((world.now(), world.database.checkpoint()))
        world.later(0.5, keep_checkpoints, world)


async def restore(world: World, event: Event) -> None:
    """Restored to a point in time; declared before anybody is let in, or only when all faults end."""
    _victims(world, event)
    wanted = world.now() - event.args["back"]
    _, checkpoint = max((one for one in world.checkpoints if one[0] <= wanted), default=world.checkpoints[0])
    world.checkpoints = [one for one in world.checkpoints if one[0] <= wanted] or world.checkpoints[:1]
    world.read_dead_letters()  # which the restore takes away
    world.record.effects.append((world.now(), world.database.effects()))
    world.record.floors[world.epoch()] = world.floors()
    world.database.restore(checkpoint)
    world.last.clear()
    if not event.args.get("declared", True):
        world.record.void[world.epoch()] = None
        return
    world.record.ended[world.epoch()] = world.now()
    world.restoring = event
    for service in world.services.values():
        service.database.kept_out = True
    await declare(world)
    world.later(event.args["lasting"], _let_in, world, event)


async def restored_at_beginning(world: World, event: Event) -> None:
    """A process is restarted, and the database is restored when its next bus has opened, before that reads."""
    for service in _victims(world, event):
        service.kill(zombie=0.0, linger=0.0)
        world.when_opened[event.who] = attrs.evolve(event, kind="restore", who="")
        world.join(event.who)


async def declare(world: World) -> None:
    """``busrep db restored``: a new epoch."""
    try:
        await world.operate(world.operating.restored)
    except BusrepError as error:
        world.record.breaks("the operator", f"restored(): {error}")
    world.record.silent = False
    world.record.logs[world.epoch()] = {key: dict(log) for key, log in world.database.facts().items()}


async def failover(world: World, event: Event) -> None:
    """A standby receives nothing from now on, and takes the primary's place ``behind`` seconds later. Nobody runs
    ``busrep db restored`` before a writer says that its commits are lost."""
    _victims(world, event)
    replicated = world.database.replicated()
    world.later(event.args["behind"], _promote, world, event, world.now(), replicated, len(world.database.history))


def _promote(world: World, event: Event, since: float, replicated: Replicated, facts: int) -> None:
    record, database, epoch, now = world.record, world.database, world.epoch(), world.now()
    if world.healing or world.restoring or database.state is not replicated.state:
        return
    world.note("a standby is promoted")
    world.read_dead_letters()  # which may be lost
    record.effects.append((now, database.effects()))
    world.checkpoints = [one for one in world.checkpoints if one[0] <= since] or world.checkpoints[:1]
    lost = [fact[:4] for fact in database.history[facts:]]
    registered, floors = world.registered(), world.floors()
    database.promote(replicated, world.dice)
    lost_registrations = registered - world.registered()
    world.unregistered |= lost_registrations
    world.note_pruned_before(lost_registrations)
    database.down = True
    world.later(event.args["lasting"], setattr, database, "down", False)
    if epoch != world.epoch():  # `db restored` had not arrived there
        record.void[world.epoch()] = None
        record.floors[epoch] = floors
    record.failovers.setdefault(epoch, now)
    record.lost.update({fact: now for fact in lost if fact[0] == epoch})
    record.silent = record.silent or bool(lost)
    for service in world.services.values():
        told = world.told.get(service.number, set())
        if service.process.alive and any(fact[2] == service.role.name and (fact[1], fact[3]) in told for fact in lost):
            world.must_stop.append((service, service.number))
    columns = DEFINITIONS["busrep_readers"].columns
    for values in database.state.tables["busrep_readers"].committed().values():
        saved = dict(zip(columns, values, strict=True))
        if saved["epoch"] == epoch:
            key = (saved["reader"], epoch, saved["stream"], saved["writer"])
            world.put_back[key] = min(saved["position"], world.put_back.get(key, saved["position"]))


def _let_in(world: World, event: Event) -> None:
    if world.restoring is not event:  # another restore came while this one was declared: that is to be declared, too
        return
    world.restoring = None
    for service in world.services.values():
        service.database.kept_out = False


async def kill(world: World, event: Event) -> None:
    """kill -9; it comes back ``back`` seconds later, or never."""
    for service in _victims(world, event):
        service.kill(zombie=event.args["zombie"], linger=event.args["linger"])
    back = event.args["back"]
    if back is None:
        world.gone.add(event.who)
    else:
        world.later(back, world.join, event.who)


async def pause(world: World, event: Event) -> None:
    """SIGSTOP, SIGCONT."""
    for service in _victims(world, event):
        service.process.pause()
        world.later(event.args["lasting"], service.process.resume)


async def restart(world: World, event: Event) -> None:
    """An orderly end, and another process."""
    for service in _victims(world, event):
        if not service.process.paused:
            service.ending = service.once = True
            world.spawn(_restart(world, service, event.args["away"]))


async def _restart(world: World, service: Service, away: float) -> None:
    await asyncio.wait([service.main])
    service.kill(zombie=0.0, linger=0.0)
    world.record.lives[-1].how = world.record.lives[-1].how or "ended"
    await asyncio.sleep(away)
    world.join(service.role.name)


async def second(world: World, event: Event) -> None:
    """A second process under the same name, for a while. ``begin``: the first one does not hear of it, and cannot begin
    its next fact."""
    role = world.roles[event.who]
    if event.who in world.gone or event.who not in world.current:
        return
    for service in _victims(world, event):
        if event.args.get("begin"):
            service.redis.hole_in = True
            world.later(event.args["lasting"], service.redis.heal)
            world.later(0.1, setattr, service.database, "begin_cut", True)
    second = Service(world, role, next(world.numbers))
    world.seconds.append(second)
    world.later(event.args["lasting"], _end, second)


def _end(service: Service) -> None:
    service.ending = service.once = True


async def clock(world: World, event: Event) -> None:
    """The clock of a machine is so far behind from now on."""
    behind = world.behind[event.who] = event.args["behind"]
    for service in _victims(world, event):
        service.process.behind = behind
    world.record.behind[event.who] = world.roles[event.who].kind == MEMORY


async def prune(world: World, event: Event) -> None:
    """Retention."""
    _victims(world, event)
    world.spawn(_prune(world, event.args["keep"]))


async def _prune(world: World, keep: int) -> None:
    unaware, before, epoch = set[tuple[str, str, str]](), world.floors(), world.epoch()

    def try_it() -> Awaitable[dict[tuple[str, str], int]]:
        nonlocal unaware
        unaware = world.unaware()  # of each try: the one before may have ended in a failover
        return world.operating.prune(keep=keep)

    try:
        floors = await world.operate(try_it)
    except BusrepError as error:
        world.note(f"not pruned: {error}")
    else:
        world.note(f"pruned to {floors}")
        for key, floor in floors.items():
            world.record.pruned[epoch, key] = max(floor, world.record.pruned.get((epoch, key), 0))
    world.note_pruned(unaware, before)


async def stranger(world: World, event: Event) -> None:
    """Somebody who is not of the deployment publishes on its channel, several times."""
    _victims(world, event)
    args = event.args
    dice = random.Random(f"stranger {args['seed']}")
    for number in range(args["times"]):
        world.later(number * args["every"], _say, world, args["says"], dice)


def _say(world: World, kind: str, dice: random.Random) -> None:
    if world.healing:
        return
    facts = world.database.facts()
    highest = {
        stream.name: max((max(log, default=0) for (of, _), log in facts.items() if of == stream.name), default=0)
        for stream in (orders, payments)
    }
    writers = [role.name for role in world.scenario.roles if role.kind == WRITER]
    data = said(kind, Scene(NAME, world.epoch(), writers, highest), dice)
    world.note(f"a stranger says {data!r}")
    world.redis.inject(NAME, data)


EVENTS: dict[str, Callable[[World, Event], Awaitable[None]]] = {
    "write": write,
    "publish": publish,
    "joined": joined,
    "presence": write_presence,
    "wait": wait,
    "redis_cut": redis_cut,
    "redis_hole": redis_hole,
    "redis_refuse": redis_refuse,
    "redis_bad": redis_bad,
    "redis_clients": redis_clients,
    "redis_down": redis_down,
    "redis_failover": redis_failover,
    "redis_denied": redis_denied,
    "database_cut": database_cut,
    "commit_cut": commit_cut,
    "handler_outage": handler_outage,
    "database_hole": database_hole,
    "database_refuse": database_refuse,
    "database_slow": database_slow,
    "database_flush": database_flush,
    "database_clock": database_clock,
    "database_crash": database_crash,
    "sequence_set": sequence_set,
    "restore": restore,
    "restored_at_beginning": restored_at_beginning,
    "kill": kill,
    "pause": pause,
    "restart": restart,
    "second": second,
    "clock": clock,
    "failover": failover,
    "prune": prune,
    "stranger": stranger,
}
