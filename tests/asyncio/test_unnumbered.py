"""What `bus.publish` writes gets its IDs as it is written, in one request (9.28)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from busrep.core.catchup import FetchUpdates
from busrep.core.ids import IdGenerator
from busrep.errors import CommitUnknown, RowError, SequenceWentBack, WriterFenced
from busrep.stores.interface import Claim, Group
from tests.shop import Order, orders, payments

from .test_appending import Written, finish, lose_answer, place, write  # noqa: F401 - a fixture
from .test_bus import Deployment, Seen, deployment, on_postgres, run, until  # noqa: F401 - fixtures

pytestmark = pytest.mark.servers


async def publish(bus: Any, *numbers: int) -> list[int]:
    ids: list[int] = await bus.publish(orders, [Order(number, "new") for number in numbers])
    return ids


async def rows_of(bus: Any) -> dict[int, bytes]:
    page = await bus.store.fetch(FetchUpdates("orders", "w1", 0, 10**6))
    return dict(zip(page.tokens, page.payloads, strict=True))


def refuse_reservations(monkeypatch: pytest.MonkeyPatch, bus: Any) -> None:
    async def reserve(*_: Any) -> Any:
        raise AssertionError("IDs were reserved in a request of their own")

    monkeypatch.setattr(bus.store, "reserve", reserve)


def test_9_28_no_request_asks_for_ids(place: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            refuse_reservations(monkeypatch, writer)
            written = Written(writer.store)
            assert await publish(writer, 10) == [1]
            assert await publish(writer, 20, 30, 40) == [2, 3, 4]
            assert written.facts == [1, 3]
            await reader.wait_for(orders, "w1", 4)
            assert seen.numbers == [10, 20, 30, 40]
            assert writer.writing.generators["orders"].position == 4

    run(work())


def test_9_28_facts_that_are_published_at_the_same_time_share_a_request(place: Deployment) -> None:  # noqa: F811
    """Each gets IDs of its own, and those of a block, which has its ID already, are written with them."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            written, held = Written(writer.store), asyncio.Event()
            written.before = held.wait
            first = asyncio.create_task(publish(writer, 0))
            await until(lambda: written.facts == [1])
            others = [asyncio.create_task(publish(writer, at, 100 + at)) for at in range(1, 9)]
            block = asyncio.create_task(write(writer, 9))
            await until(lambda: writer.writing.generators["orders"].open == 1)
            held.set()
            ids = await asyncio.gather(first, *others)
            assert written.facts == [1, 17]
            every = [*(one for some in ids for one in some), await block]
            assert len(set(every)) == len(every) == 18
            rows = await rows_of(writer)
            for at, some in enumerate(ids):
                assert [rows[one] for one in some] == [b'[%d,"new"]' % number for number in (at, 100 + at)[: len(some)]]
            await reader.wait_for(orders, "w1", max(every))
            assert sorted(seen.numbers) == [*range(10), *range(101, 109)]

    run(work())


@pytest.mark.parametrize("landed", [True, False], ids=["written", "not written"])
def test_9_28_of_ids_whose_answer_was_lost_the_table_tells(place: Deployment, landed: bool) -> None:  # noqa: F811
    """They are those that nobody here was given otherwise: facts that had theirs are written before it is asked."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            asked, given, outcome = asyncio.Event(), store.appends.write, store.outcome
            incarnation = writer.writing.incarnation

            async def lost(claim: Claim, group: Group, batch: Any) -> None:
                store.appends.write = given
                if landed:
                    await given(claim, group, batch)
                    group.settled = False
                raise CommitUnknown(group, OSError("connection lost"))

            async def late(*args: Any) -> Any:
                await asked.wait()
                return await outcome(*args)

            store.outcome = late
            async with writer.write(orders) as open_one:
                store.appends.write = lost
                with pytest.raises(CommitUnknown):
                    await publish(writer, 1, 2, 3)
                open_one.add(Order(10, "open"))
            committed = await write(writer, 20)
            reserved = await publish(writer, 30)  # beside a doubt
            assert writer.writing.generators["orders"].position == open_one.id  # below those in doubt
            asked.set()
            await reader.wait_for(orders, "w1", reserved[0])
            assert seen.numbers == [10, *([1, 2, 3] if landed else []), 20, 30]
            assert (open_one.id, committed, reserved) == ((1, 5, [6]) if landed else (1, 2, [3]))
            assert writer.statistics()["writer"]["in_doubt"] == 0
            assert await publish(writer, 40) == [reserved[0] + 1]
            assert writer.writing.generators["orders"].position == reserved[0] + 1
            assert writer.writing.incarnation == incarnation  # the name was not claimed anew, as after a crash

    run(work())


def test_9_28_beside_a_doubt_ids_are_reserved(place: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Two lost answers could not be told apart from one that is on its way."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            store: Any = writer.store
            asked, outcome, reserve, reserved = asyncio.Event(), store.outcome, store.reserve, []

            async def late(*args: Any) -> Any:
                await asked.wait()
                return await outcome(*args)

            async def noted(*args: Any) -> Any:
                reserved.append(args)
                return await reserve(*args)

            monkeypatch.setattr(store, "outcome", late)
            monkeypatch.setattr(store, "reserve", noted)
            lose_answer(store)
            with pytest.raises(CommitUnknown):
                await publish(writer, 1)
            assert await publish(writer, 2) == [2]
            assert len(reserved) == 1
            asked.set()
            await until(lambda: not writer.statistics()["writer"]["in_doubt"])
            assert await publish(writer, 3) == [3]
            assert len(reserved) == 1

    run(work())


def test_9_28_nothing_is_asked_while_another_answer_is_on_its_way(place: Deployment) -> None:  # noqa: F811
    """Its rows are in the table, and nobody here knows their IDs yet: they would pass for those in doubt."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            given, held, on_its_way, answered = store.appends.write, asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def lost(claim: Claim, group: Group, batch: Any) -> None:
                store.appends.write = slow
                await held.wait()
                await given(claim, group, batch)
                group.settled = False
                raise CommitUnknown(group, OSError("connection lost"))

            async def slow(claim: Claim, group: Group, batch: Any) -> None:
                store.appends.write = given
                await given(claim, group, batch)
                on_its_way.set()
                await answered.wait()

            store.appends.write = lost
            first = asyncio.create_task(publish(writer, 1))
            await until(lambda: store.appends.write is slow)
            second = asyncio.create_task(publish(writer, 2))
            await until(lambda: writer.writing.generators["orders"].asked == 2)
            held.set()
            with pytest.raises(CommitUnknown):
                await first
            await on_its_way.wait()
            refused = asyncio.create_task(writer.settle())
            await refused
            assert writer.statistics()["writer"]["in_doubt"] == 1
            answered.set()
            assert await second == [2]
            await reader.wait_for(orders, "w1", 2)
            assert seen.numbers == [1, 2]

    run(work())


def test_9_28_of_two_lost_answers_the_first_that_is_asked_after_tells(place: Deployment) -> None:  # noqa: F811
    """Whose the rows are does not matter: neither was told its IDs."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            given, held, begun, answers = store.appends.write, asyncio.Event(), asyncio.Event(), 0
            incarnation = writer.writing.incarnation

            async def lost(claim: Claim, group: Group, batch: Any) -> None:
                nonlocal answers
                begun.set()
                await held.wait()
                await given(claim, group, batch)
                group.settled, answers = False, answers + 1
                if answers == 2:
                    store.appends.write = given
                raise CommitUnknown(group, OSError("connection lost"))

            store.appends.write = lost
            tasks = [asyncio.create_task(publish(writer, 1, 2))]
            await begun.wait()
            tasks.append(asyncio.create_task(publish(writer, 3)))
            await until(lambda: writer.writing.generators["orders"].asked == 2)
            held.set()
            assert all(isinstance(one, CommitUnknown) for one in await asyncio.gather(*tasks, return_exceptions=True))
            await until(lambda: not writer.statistics()["writer"]["in_doubt"])
            await reader.wait_for(orders, "w1", (await publish(writer, 4))[0])
            assert seen.numbers == [1, 2, 3, 4]
            assert answers == 2
            assert writer.writing.incarnation == incarnation

    run(work())


def test_9_28_a_sequence_that_is_behind_gives_no_id(place: Deployment) -> None:  # noqa: F811
    """What is known was announced: a row at or below it would be stepped over. Others of the group are written."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            assert await publish(writer, 1) == [1]
            writer.writing.generators["orders"].announced(50)  # another writer's, whose rows a backup lacks
            written, held = Written(writer.store), asyncio.Event()
            written.before = held.wait
            first = asyncio.create_task(writer.publish(payments, [Order(7, "paid")]))
            await until(lambda: len(written.facts) == 1)
            refused = asyncio.create_task(publish(writer, 2))
            other = asyncio.create_task(writer.publish(payments, [Order(8, "paid")]))
            await until(lambda: writer.writing.generators["payments"].asked == 2)
            held.set()
            await first
            with pytest.raises(SequenceWentBack, match="gave 2, but 50 was known"):
                await refused
            await other
            assert list(await rows_of(writer)) == [1]
            assert writer.writing.generators["orders"].asked == 0

    run(work())


def test_9_28_under_a_name_that_was_finished_it_is_written_anew(place: Deployment) -> None:  # noqa: F811
    """Nobody has been told an ID."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await publish(writer, 1)
            await finish(writer)
            (last,) = await publish(writer, 2)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 2]
            async with place.bus(writer="w1"):  # another process
                with pytest.raises(WriterFenced):
                    await publish(writer, 3)

    run(work())


def test_9_28_what_is_no_row_takes_no_id(place: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            bad: Any = [Order(1, "new"), "no order"]
            with pytest.raises(RowError):
                await writer.publish(orders, bad)
            assert writer.writing.generators["orders"].asked == 0
            assert await publish(writer, 2) == [1]

    run(work())


def test_9_28_of_ids_that_cannot_be_told_any_more_the_next_claim_tells(place: Deployment) -> None:  # noqa: F811
    """More own facts were finished meanwhile than are remembered apart: the name is claimed anew, as after a crash."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            asked, outcome = asyncio.Event(), store.outcome

            async def late(*args: Any) -> Any:
                await asked.wait()
                return await outcome(*args)

            store.outcome = late
            generator = writer.writing.generators["orders"]
            generator.most_runs = 3
            lose_answer(store)
            with pytest.raises(CommitUnknown):
                await publish(writer, 1)
            for number in range(2, 8):
                await store.reserve("orders", 1)  # another writer's: so that they are no run
                await write(writer, number)
            assert generator.thinned
            asked.set()
            await until(lambda: writer.writing.generators["orders"] is not generator)
            (last,) = await publish(writer, 8)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [*range(1, 9)]

    run(work())


def test_a_session_whose_bookkeeping_failed_is_followed_by_another(
    place: Deployment,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is published in it any more: without a new claim readers would wait for as long as the process lives."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            former = writer.writing

            def answer(*_: Any, **__: Any) -> None:
                raise SequenceWentBack("orders", 1, 1)

            with monkeypatch.context() as patch, pytest.raises(CommitUnknown, match="sequence"):
                patch.setattr(IdGenerator, "answer", answer)
                await publish(writer, 1)
            (last,) = await publish(writer, 2)
            assert writer.writing is not former
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 2]

    run(work())
