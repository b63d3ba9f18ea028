"""Rule 9.27: a beat does not announce every stream, so whoever lacks one asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

from busrep import Bus, Stream, connect
from busrep.core.commands import Position
from busrep.core.framing import Frame
from busrep.core.states import State
from busrep.streams import Registry
from tests.shop import QUICK, opened_store

from .test_bus import run, until

pytestmark = pytest.mark.servers

NAMES = [f"s{number}" for number in range(12)]
MANY = [Stream[Any](name) for name in NAMES]


@asynccontextmanager
async def opened(redis: str, name: str, store: str, writer: str) -> AsyncIterator[Bus]:
    settings = attrs.evolve(QUICK, quiet_streams=1)
    async with connect(redis, name=name, streams=MANY, store=store, writer=writer, settings=settings) as bus:
        for stream in MANY:
            bus.subscribe(stream)(lambda _: None)
        yield bus


def test_9_27_a_lost_answer_to_replicate_is_asked_for_again(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    """Both write: a process that only reads asks whenever nothing was heard for two beats."""

    with opened_store(sqlite_url, Registry(MANY)):
        pass

    async def work() -> None:
        async with (
            opened(redis_url, bus_name, sqlite_url, "w1") as w1,
            opened(redis_url, bus_name, sqlite_url, "w2") as w2,
        ):
            for bus in (w1, w2):
                for stream in MANY:
                    await bus.reading.followed(stream)
            lost, again, given = 0, asyncio.Event(), w2.reading.receive

            def receive(frame: Frame, now: float) -> None:
                """Loses five answers of w1. Of its beats it loses what they say in turns: that would answer as well."""
                nonlocal lost
                announced = [item.stream for item in frame.items if isinstance(item, Position) and item.writer == "w1"]
                if len(announced) > 1 and lost < 5:
                    lost += 1
                elif len(announced) > 1:
                    again.set()
                    given(frame, now)
                elif again.is_set() or set(announced) <= {NAMES[0]}:
                    given(frame, now)

            w2.reading.receive = receive  # type: ignore[method-assign]
            w2.link.reconnect("by the test")
            await again.wait()
            progress = w2.reading.core.progress
            await until(lambda: all(progress[name, "w1"].state is State.LIVE for name in NAMES))

    run(work())
