"""An asyncio writer that was finished for its silence wins its name back, unless another process has it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest import mock

import attrs
import pytest

from busrep.errors import Closed, Unavailable, WriterFenced
from busrep.runtime.own_name import win_back
from busrep.stores.plans import complete
from tests.shop import Order, orders, typing

from .test_bus import QUICK, Deployment, deployment, on_postgres, run, until  # noqa: F401 - fixtures

pytestmark = pytest.mark.servers


async def write(bus: Any, number: int) -> int:
    async with bus.write(orders) as fact:
        fact.add(Order(number, "paid"))
    return int(fact.id)


async def finish(bus: Any) -> int:
    """What a reader does that has not heard of a writer for too long. Returns the incarnation it was."""
    incarnation = int(bus.writing.incarnation)
    await bus.store.finish(bus.writer, incarnation, timeout=10.0)
    return incarnation


@pytest.mark.parametrize("database", ["deployment", "on_postgres"])
def test_a_paused_writer_writes_again(database: str, request: pytest.FixtureRequest) -> None:
    found: Deployment = request.getfixturevalue(database)

    async def work() -> None:
        seen: list[int] = []
        async with found.bus(writer="w") as writer, found.bus(reader="r") as reader:
            reader.subscribe(orders)(lambda batch: seen.extend(row.number for row in batch.rows))
            for number in range(1, 4):
                await reader.wait_for(orders, "w", await write(writer, number), timeout=20)
                before = await finish(writer)
                last = await write(writer, 10 * number)
                assert writer.statistics()["writer"]["incarnation"] > before
                await reader.wait_for(orders, "w", last, timeout=20)
            assert seen == [1, 10, 2, 20, 3, 30]
            assert writer.statistics()["writer"]["facts"] == 6
            assert writer.statistics()["writer"]["lost"] is False

    run(work(), 60)


def test_an_idle_writer_wins_its_name_back_by_itself(deployment: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with deployment.bus(writer="w") as writer:
            await write(writer, 1)
            before = await finish(writer)
            await until(lambda: writer.statistics()["writer"]["incarnation"] > before)
            assert writer.positions() is not None
            known = await writer.store.known()
            assert all(one.registered for one in known if one.writer == "w")

    run(work())


def test_the_name_of_another_process_is_not_won_back(deployment: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with deployment.bus(writer="w") as old:
            await write(old, 1)
            store: Any = old.store
            given, go_on = store.claim, asyncio.Event()

            async def held_up(*args: Any, **kwargs: Any) -> Any:
                await go_on.wait()
                return await given(*args, **kwargs)

            store.claim = held_up
            await finish(old)
            # Not announced on the channel: only the claim tells.
            claim = await given("w", ["orders"], timeout=10.0)
            go_on.set()
            with pytest.raises(WriterFenced):
                await write(old, 2)
            assert old.statistics()["writer"]["lost"] is True
            await old.store.check_claim(claim)

    run(work())


def test_a_fact_in_memory_that_was_open_meanwhile_says_that_it_is_not_published(
    deployment: Deployment,  # noqa: F811
) -> None:
    async def work() -> None:
        async with deployment.bus(writer="w") as writer:
            before = await finish(writer)
            with pytest.raises(Unavailable, match="Write it again"):
                async with writer.write(typing) as fact:
                    fact.add(["ann"])
                    await until(lambda: writer.statistics()["writer"]["incarnation"] > before)
            async with writer.write(typing) as fact:
                fact.add(["ann"])
            assert fact.id == 1

    run(work())


def test_a_caller_who_is_cancelled_does_not_tear_the_claim(deployment: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with deployment.bus(writer="w") as writer:
            store: Any = writer.store
            given, asked, go_on, claims = store.claim, asyncio.Event(), asyncio.Event(), []

            async def held_up(*args: Any, **kwargs: Any) -> Any:
                claim = await given(*args, **kwargs)
                claims.append(claim.incarnation)
                asked.set()
                await go_on.wait()
                return claim

            store.claim = held_up
            await finish(writer)
            task = asyncio.create_task(write(writer, 1))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            await write(writer, 2)
            assert claims == [writer.statistics()["writer"]["incarnation"]]

    run(work())


@pytest.mark.parametrize("callers", [1, 3])
def test_what_fails_when_its_callers_have_left_is_said_once(
    callers: int,
    deployment: Deployment,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By busrep, and not by asyncio: as an exception that was never retrieved, with a traceback."""

    async def work() -> None:
        unseen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        # It does not beat meanwhile: that would wait for the name as well, and be told.
        async with deployment.bus(writer="w", settings=attrs.evolve(QUICK, heartbeat=600.0)) as writer:
            store: Any = writer.store
            given, asked, go_on = store.claim, asyncio.Event(), asyncio.Event()

            async def refused(*_: Any, **__: Any) -> Any:
                asked.set()
                await go_on.wait()
                raise Unavailable("the store", "it was away for long")

            store.claim = refused
            await finish(writer)
            # As a beat that took too long, or a fact whose caller was cancelled.
            tasks = [asyncio.create_task(writer.own_name._renew(writer.writing)) for _ in range(callers)]
            await asked.wait()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} == {asyncio.CancelledError}
            winning = writer.own_name._winning
            go_on.set()
            await asyncio.wait([winning])
            store.claim, writer.own_name._winning = given, None
            del winning
            await asyncio.sleep(0)  # its callbacks
            gc.collect()
            await write(writer, 1)
        assert unseen == []

    run(work())
    assert caplog.text.count("writer w is not won back: the store is not available: it was away for long") == 1


def test_a_caller_is_told_that_the_bus_was_closed_meanwhile(deployment: Deployment) -> None:  # noqa: F811
    """And not cancelled, for nobody cancelled it."""

    async def work() -> None:
        async with deployment.bus(writer="w") as writer:
            store: Any = writer.store
            asked = asyncio.Event()

            async def held_up(*_: Any, **__: Any) -> Any:
                asked.set()
                await asyncio.Event().wait()

            store.claim = held_up
            await finish(writer)
            task = asyncio.create_task(write(writer, 1))
            await asked.wait()
            await writer.close()
            with pytest.raises(Closed):
                await task

    run(work())


@pytest.mark.parametrize(
    ("answers", "raised", "asked"),
    [
        ([Unavailable("the store", "no answer")] * 2, Unavailable, [7, 7]),  # it may be won: once more, at once
        ([Unavailable("the store", "no answer"), WriterFenced("w", 9), WriterFenced("w", 9)], WriterFenced, [7, 7, 9]),
        ([WriterFenced("w", 9), *[Unavailable("the store", "no answer")] * 2], Unavailable, [7, 9, 9]),
        ([WriterFenced("w", 7)], WriterFenced, [7]),
    ],
)
def test_what_is_claimed_after_a_claim_that_failed(
    answers: list[Exception], raised: type[Exception], asked: list[int]
) -> None:
    former: Any = mock.Mock(incarnation=5, kept={}, won=0)
    former.name = "w"
    begun: list[int] = []

    async def begin(again: int) -> Any:
        begun.append(again)
        raise answers[len(begun) - 1]

    with pytest.raises(raised):
        complete(win_back(former, 7, begin))
    assert begun == asked
    assert former.won == asked[-1]  # the next fact asks from there
