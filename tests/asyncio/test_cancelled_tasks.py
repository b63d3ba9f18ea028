"""Tasks of an open bus that somebody else cancels, as who cancels all tasks of a loop does: they go on."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from busrep.asyncio import Bus
from busrep.asyncio.writing import Writing
from busrep.caches.cache import invalidations
from busrep.commands.presence import Presence
from busrep.core.application_commands import RemoteServerUp
from busrep.errors import CommitUnknown, Unavailable, WriterFenced
from busrep.stores.memory import MemoryStore, MemoryTransaction
from busrep.testing import MemoryDeployment
from busrep.testing.virtual import run
from tests.shop import Order, orders

caches = invalidations()
AGES = 1_000  # beats, of a virtual clock


def ours() -> list[asyncio.Task[Any]]:
    """The tasks of the buses."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("busrep-")]


async def until(happened: Callable[[], object]) -> None:
    """Wait for it; the virtual clock moves on meanwhile."""
    async with asyncio.timeout(AGES):
        while not happened():
            await asyncio.sleep(0.001)


async def cancelled(name: str) -> None:
    """Wait for a task of that name, and cancel it before its next step."""
    found: list[asyncio.Task[Any]] = []
    async with asyncio.timeout(AGES):
        while not found:
            await asyncio.sleep(0.001)
            found = [task for task in ours() if task.get_name().startswith(f"busrep-{name}")]
    found[0].cancel()
    await asyncio.wait(found[:1])
    assert found[0].cancelled()


async def write(bus: Bus, number: int) -> int:
    async with bus.write(orders) as fact:
        fact.add(Order(number, "new"))
    return fact.id


def told(log: pytest.LogCaptureFixture) -> Counter[str]:
    """Which tasks the log says to have been cancelled, and how often."""
    said = [record.getMessage().partition(" was cancelled, not by close()") for record in log.records]
    return Counter(name for name, found, _ in said if found)


def test_a_worker_that_is_cancelled_before_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1, shop.bus(reader="r") as reader:
            got: list[int] = []
            reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
            await reader.wait_for(orders, "w1", await write(w1, 1))
            loop, made = asyncio.get_running_loop(), []

            def factory(loop: Any, work: Any, **options: Any) -> Any:
                task = asyncio.Task(work, loop=loop, **options)
                if "_work" in work.__qualname__ and not made:
                    made.append(task)
                    task.cancel()
                return task

            loop.set_task_factory(factory)
            await write(w1, 2)
            await reader.wait_for(orders, "w1", await write(w1, 3), timeout=AGES)
            assert made[0].cancelled()
            assert got == [1, 2, 3]

    run(main())
    assert "what hands out rows of ('orders', 'w1') was cancelled, not by close()" in caplog.text


@pytest.mark.parametrize(("name", "asked"), [("fetch", "fetch"), ("follow", "epoch"), ("look", "known")])
def test_a_question_that_is_cancelled_is_asked_again(name: str, asked: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1:
            await write(w1, 1)
            got: list[int] = []
            reader = shop.bus(reader="r")
            whole = getattr(reader.store, asked)

            async def slow(*args: Any, **options: Any) -> Any:
                await asyncio.sleep(0.05)
                return await whole(*args, **options)

            setattr(reader.store, asked, slow)
            async with reader:
                reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
                following = asyncio.create_task(reader.reading.followed(orders))
                await cancelled(name)
                await following
                assert "orders" in reader.reading.core.followed
                await reader.wait_for(orders, "w1", await write(w1, 2), timeout=AGES)
            assert got == [1, 2]

    run(main())
    assert any(task.startswith(f"busrep-{name}") for task in told(caplog))


@pytest.mark.parametrize("step", ["agree", "begin", "load", "apply", "drain"])
def test_a_step_of_a_bootstrap_that_is_cancelled_before_it_begins_is_tried_again(step: str) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1:
            await write(w1, 1)
            assert w1.writing is not None
            await w1.writing.beat()
            async with shop.bus(reader="r", start=None) as reader:
                got, made = list[int](), list[Any]()

                def factory(loop: Any, work: Any, **options: Any) -> Any:
                    task = asyncio.Task(work, loop=loop, **options)
                    given = work.cr_frame.f_locals.get("work")
                    if "Run._do" in work.__qualname__ and type(given).__name__.lower() == step and not made:
                        made.append(task)
                        task.cancel()
                    return task

                asyncio.get_running_loop().set_task_factory(factory)
                reader.snapshot(orders)(lambda part: got.extend(row.number for row in part.rows))
                await asyncio.wait_for(reader.bootstrap(orders), AGES)
                assert made[0].cancelled()
                assert got == [1]

    run(main())


def test_who_cancels_all_tasks_does_not_end_a_bus(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, caches) as shop, shop.bus(writer="w1") as w1:
            bus, got, heard = shop.bus(reader="r"), list[int](), list[str]()
            item = bus.cached(name="item")(lambda _: len(got))
            async with bus:
                bus.subscribe(orders)(lambda batch: got.extend(batch.tokens))
                bus.on(RemoteServerUp)(lambda command: heard.append(command.server))
                Presence(bus, "p1")
                await bus.wait_for(orders, "w1", await write(w1, 1))
                await until(lambda: bus.reading.saved.at.get(("orders", "w1")) == 1)
                names = Counter(task.get_name() for task in ours())
                for _ in range(3):
                    for task in ours():
                        task.cancel()
                    await until(lambda: Counter(task.get_name() for task in ours()) >= names)
                await bus.wait_for(orders, "w1", await write(w1, 2), timeout=AGES)
                await until(lambda: bus.reading.saved.at["orders", "w1"] == 2)
                await w1.send(RemoteServerUp("a"))
                await until(lambda: heard == ["a"])
                item(1)
                await w1.invalidate("item", None)
                await until(lambda: item.statistics()["size"] == 0)
                assert bus.health().ok
                assert w1.health().ok
            assert got == [1, 2]

    run(main())
    parts = ("link", "publish", "beat", "save", "settle", "newest", "presence", "presence-forget")
    assert told(caplog).keys() >= {f"busrep-{part}" for part in parts}


def test_who_cancels_all_tasks_over_and_over_gets_no_flood(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1, shop.bus() as reader:
            got: list[int] = []
            reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
            for _ in range(10_000):
                for task in ours():
                    task.cancel()
                await asyncio.sleep(shop.settings.retry_min / 10)
            await reader.wait_for(orders, "w1", await write(w1, 1), timeout=AGES)
            assert got == [1]

    run(main())
    assert max(told(caplog).values()) < 500  # retry_max is a hundredth of that time


@pytest.mark.parametrize(("name", "broken"), [("beat", "reading.beat"), ("newest", "own_name.applied")])
def test_a_task_that_fails_is_begun_anew(name: str, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of the caches' nothing would be proven any more, and they would be of no use."""

    async def main() -> None:
        async with MemoryDeployment(orders, caches) as shop:
            bus = shop.bus()
            bus.cached(name="item")(lambda _: 1)
            *path, last = broken.split(".")
            part = attrgetter(".".join(path))(bus)
            whole, calls = getattr(part, last), list[None]()

            def failing(*args: Any, **options: Any) -> Any:
                calls.append(None)
                if len(calls) in range(10, 13):
                    raise ValueError("a bug")
                return whole(*args, **options)

            setattr(part, last, failing)
            async with bus:
                await until(lambda: len(calls) > 100)

    run(main())
    assert f"busrep-{name} failed" in caplog.text


def test_close_is_quiet_and_begins_nothing_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with MemoryDeployment(orders, caches) as shop:
            bus = shop.bus(writer="w1", reader="r", own=True)
            bus.cached(name="item")(lambda _: 1)
            async with bus:
                bus.subscribe(orders)(lambda _: None)
                Presence(bus, "p1")
                await bus.wait_for(orders, "w1", await write(bus, 1))
                before = ours()
                for task in before:
                    task.cancel()
                await asyncio.wait(before)
                await asyncio.sleep(0)  # close() comes before they would begin anew
                caplog.clear()
            await asyncio.sleep(AGES)
            assert ours() == []

    run(main())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_facts_in_doubt_are_asked_after_by_who_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells it of them: they were in doubt before."""
    commit, outcome, goes_on = MemoryTransaction.commit, MemoryStore.outcome, True

    async def lose_the_answer(transaction: MemoryTransaction) -> None:
        await commit(transaction)
        raise CommitUnknown(transaction.marker, OSError("connection lost"))

    async def asked(store: MemoryStore, *args: Any) -> Any:
        return None if goes_on else await outcome(store, *args)

    async def main() -> None:
        nonlocal goes_on
        async with MemoryDeployment(orders) as shop, shop.bus(writer="w1") as w1:
            with monkeypatch.context() as lost:
                lost.setattr(MemoryTransaction, "commit", lose_the_answer)
                with pytest.raises(CommitUnknown):
                    async with w1.write(orders) as fact:
                        await fact.begin()
                        fact.add(Order(1, "new"))
            await asyncio.sleep(10.0)  # it has been asked after, and is open still
            await cancelled("settle")
            await asyncio.sleep(10.0)
            assert w1.positions()["orders"]["w1"] == 0
            goes_on = False
            await until(lambda: w1.positions()["orders"]["w1"] == fact.id)

    monkeypatch.setattr(MemoryStore, "outcome", asked)
    run(main())


def test_that_one_question_is_cancelled_ends_neither_the_others_nor_who_asks_them() -> None:
    """An application may cancel any task. The loss of the name is told before all else."""

    async def ask(doubt: Any) -> None:
        asked.append(doubt.marker)
        if doubt.raises is not None:
            raise doubt.raises

    def settle(*raised: BaseException | None) -> Any:
        asked.clear()
        doubts = [SimpleNamespace(marker=at, raises=one) for at, one in enumerate(raised)]
        writing: Any = SimpleNamespace(doubts=doubts, _settle=ask)
        return asyncio.run(Writing.settle(writing))

    asked: list[int] = []
    settle(None, None)
    with pytest.raises(Unavailable):
        settle(asyncio.CancelledError(), None)
    assert asked == [0, 1]
    with pytest.raises(WriterFenced):
        settle(Unavailable("the database", "away"), asyncio.CancelledError(), WriterFenced("w1", 1))
