"""One run from a seed or a scenario, its outcome, and the smallest scenario that still fails."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import attrs

from busrep.settings import Settings
from busrep.testing.virtual import GoesRound, NothingLeft

from .oracle import Oracle
from .record import Violation
from .scenario import Event, Role, Scenario, draw
from .virtual import SimulatedLoop
from .world import Alarm, World, steered

Trace = Callable[[float, str, str], None]

# Tries at leaving something out, when a scenario is shrunk.
SHRINK_TRIES = 400


@attrs.frozen
class Outcome:
    """What a run came to. ``trace_hash`` tells two runs apart that did not go the same way."""

    scenario: Scenario
    violations: list[Violation]
    facts: int
    handled: int
    faults: dict[str, int]
    seconds: float
    gaps: int


def simulate(scenario: Scenario | int, trace: Trace | None = None) -> Outcome:
    """Play a scenario, or that of a seed, and look at what came of it."""
    collecting = gc.isenabled()
    gc.disable()  # not before the run has ended: what is collected must not depend on when
    try:
        return _simulated(draw(scenario) if isinstance(scenario, int) else scenario, trace)
    finally:  # nothing of the world is held any more: one collection takes it all away
        if collecting:
            gc.enable()


def _simulated(scenario: Scenario, trace: Trace | None) -> Outcome:
    loop = SimulatedLoop()
    logger = logging.getLogger("busrep")
    level, propagate = logger.level, logger.propagate
    with steered(scenario, loop):
        alarm: logging.Handler | None = None
        try:
            world = loop.run_until_complete(_made(scenario, trace))
            alarm = Alarm(world)
            logger.addHandler(alarm)
            logger.setLevel(logging.WARNING if trace is None else logging.INFO)
            logger.propagate = False
            loop.set_exception_handler(lambda _, context: world.unexpected(context))
            loop.run_until_complete(world.run())
        except (NothingLeft, GoesRound) as error:
            world.record.breaks("it goes on", str(error))
        finally:
            logger.setLevel(level)
            logger.propagate = propagate
            if alarm is not None:
                logger.removeHandler(alarm)
            logging.disable(logging.CRITICAL)
            try:
                loop.reap()
            finally:
                logging.disable(logging.NOTSET)
                loop.close()
    return _outcome(world)


async def _made(scenario: Scenario, trace: Trace | None) -> World:
    return World(scenario, trace)


def _outcome(world: World) -> Outcome:
    record = world.record
    oracle = Oracle(
        record,
        world.roles,
        world.gone,
        {name: service.number for name, service in world.current.items()},
        world.database.history,
        world.began,
        world.epoch(),
        world.floors(),
        world.database.effects(),
        world.database.violations,
        calm=not record.faults and not world.redis.buffer_kills and _roomy(world.settings),
    )
    return Outcome(
        world.scenario,
        oracle.look(),
        len(world.database.history),
        sum(len(one.rows) for one in record.handled),
        record.faults,
        world.now(),
        world.gaps,
    )


def _roomy(settings: Settings) -> bool:
    """Whether nothing that a run writes is too much for a queue, or for a frame."""
    return min(settings.receive_queue_bytes, settings.publish_queue_bytes) > 50_000 and settings.frame_rows >= 3


def shrink(scenario: Scenario, invariant: str, tries: int = SHRINK_TRIES) -> Scenario:
    """The smallest scenario found that still breaks the invariant: events and roles left out as long as it does."""
    left = tries

    def fails(smaller: Scenario) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and any(one.invariant == invariant for one in simulate(smaller).violations)

    size = len(scenario.events) // 2
    while size >= 1 and left > 0:
        at = 0
        while at < len(scenario.events):
            smaller = scenario.without(scenario.events[at : at + size])
            if fails(smaller):
                scenario = smaller
            else:
                at += size
        size //= 2
    for role in scenario.roles:
        smaller = scenario.without((), [role])
        if any(one.kind == "writer" for one in smaller.roles) and fails(smaller):
            scenario = smaller
    return scenario


__all__ = ["Event", "Outcome", "Role", "Scenario", "Trace", "draw", "shrink", "simulate"]
