"""Facts that nobody ends: the task is garbage, or is cancelled before its first step. They hold nothing later back."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.asyncio.test_bus import Deployment, Seen, run
from tests.asyncio.test_faults import either
from tests.shop import Order, orders, typing

__all__ = ["either"]  # a fixture

pytestmark = pytest.mark.servers


async def check(deployment: Deployment, lose: Any) -> None:
    """A reader gets what is written after ``lose(bus)``, and nothing of the fact that this lost."""
    async with deployment.bus(writer="w1") as bus, deployment.bus(reader="r") as reader:
        seen = Seen()
        reader.subscribe(orders)(seen)
        await lose(bus)
        async with asyncio.timeout(60):  # on SQLite the lost fact has the write lock
            async with bus.write(orders, typing) as fact:
                fact.add(Order(2, "new"))
                fact.add("new", stream=typing)
            await reader.wait_for(orders, "w1", fact.ids["orders"], timeout=60)
            await reader.wait_for(typing, "w1", fact.ids["typing"], timeout=60)
        assert bus.statistics()["stuck"] == []
        assert seen.numbers == [2]


@pytest.mark.filterwarnings("ignore:Exception ignored in.*the_task_is_garbage:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["the loop's thread", "another thread", "another loop"])
@pytest.mark.parametrize("what", ["a statement", "rows"])
def test_the_task_is_garbage(either: Deployment, what: str, where: str) -> None:
    async def lose(bus: Any) -> None:
        begun = asyncio.Event()

        async def write() -> None:
            async with bus.write(orders, typing) as fact:
                fact.add(Order(1, "lost"))
                fact.add("lost", stream=typing)
                if what == "a statement":  # of rows alone there is no transaction yet
                    await fact.execute("SELECT 1")
                begun.set()
                await asyncio.get_running_loop().create_future()  # which nobody has but this task

        async def collect() -> None:
            gc.collect()

        gc.disable()  # or it may come sooner
        try:
            asyncio.create_task(write())  # noqa: RUF006 - to be lost
            await begun.wait()
            if where == "the loop's thread":
                gc.collect()
            elif where == "another thread":
                await asyncio.to_thread(gc.collect)
            else:
                await asyncio.to_thread(lambda: asyncio.run(collect()))
        finally:
            gc.enable()

    run(check(either, lose))


@pytest.mark.parametrize("kept", [True, False])
def test_what_ends_it_is_cancelled_before_its_first_step(either: Deployment, kept: bool) -> None:
    facts: list[Any] = []

    async def lose(bus: Any) -> None:
        async def write() -> None:
            async with bus.write(orders, typing) as fact:
                fact.add(Order(1, "lost"))
                if kept:
                    facts.append(fact)
                asyncio.get_running_loop().set_task_factory(factory)

        def factory(loop: Any, work: Any, **options: Any) -> Any:
            task = asyncio.Task(work, loop=loop, **options)
            loop.set_task_factory(None)
            task.cancel()
            return task

        task = asyncio.create_task(write())
        await asyncio.wait([task])
        assert task.cancelled()

    run(check(either, lose))
