"""Facts whose blocks run no statement: they share a transaction, which begins when the blocks have ended (9.26)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from busrep.core.catchup import FetchUpdates
from busrep.errors import CommitUnknown, ConfigError, StatementRefused, Unavailable, WriterFenced
from busrep.stores import facts, sharing
from busrep.stores.interface import Appended, Claim
from tests.shop import Order, orders, payments

from .test_bus import Deployment, Seen, deployment, on_postgres, run, until  # noqa: F401 - fixtures

pytestmark = pytest.mark.servers

Work = Callable[[Deployment], Coroutine[Any, Any, None]]


@pytest.fixture(params=["deployment", "on_postgres"])
def place(request: pytest.FixtureRequest) -> Deployment:
    """On SQLite, and on PostgreSQL."""
    found: Deployment = request.getfixturevalue(request.param)
    return found


async def write(bus: Any, number: int) -> int:
    async with bus.write(orders) as fact:
        fact.add(Order(number, "new"))
    return int(fact.id)


class Written:
    """Counts what is appended to a store, and may stand in its way. ``facts``: how many were in each transaction."""

    def __init__(self, store: Any) -> None:
        self.store, self.given, self.facts = store, store.appends.write, []
        self.before: Callable[[Appended], Coroutine[Any, Any, None]] | None = None
        store.appends.write = self.write

    async def write(self, claim: Claim, appended: Appended) -> None:
        self.facts.append(sum(map(len, appended.facts.values())))
        if self.before is not None:
            await self.before(appended)
        await self.given(claim, appended)


def test_facts_that_end_together_share_a_transaction(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            written, held = Written(writer.store), asyncio.Event()

            async def hold(_: Appended) -> None:
                await held.wait()

            written.before = hold
            tasks = [asyncio.create_task(write(writer, number)) for number in range(20)]
            await until(lambda: writer.writing.generators["orders"].open == 20)
            held.set()
            ids = await asyncio.gather(*tasks)
            assert len(written.facts) < 20
            assert sum(written.facts) == 20
            await reader.wait_for(orders, "w1", max(ids))
            assert sorted(seen.numbers) == list(range(20))

    run(work())


def test_a_group_is_bounded(place: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "GROUP_BYTES", 1_000)

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            written = Written(writer.store)
            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(writer.publish(orders, [Order(number, "x" * 300)] * 2))
            assert sum(written.facts) == 24
            assert max(written.facts) == 2  # one call's facts stay together, however large they are

    run(work())


def test_a_fact_that_the_table_refuses_fails_alone(on_postgres: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            connection = await writer.store.connect()
            async with connection:
                await connection.execute("ALTER TABLE busrep_facts ADD CHECK (row NOT LIKE '%bad%')")
            written, held = Written(writer.store), asyncio.Event()

            async def hold(_: Appended) -> None:
                await held.wait()

            async def fact(number: int) -> int:
                async with writer.write(orders) as one:
                    one.add(Order(number, "bad" if number == 3 else "good"))
                return int(one.id)

            written.before = hold
            tasks = [asyncio.create_task(fact(number)) for number in range(6)]
            await until(lambda: writer.writing.generators["orders"].open == 6)
            held.set()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [number for number, one in enumerate(ended) if isinstance(one, StatementRefused)] == [3]
            last = await write(writer, 6)
            await reader.wait_for(orders, "w1", last)
            assert sorted(seen.numbers) == [0, 1, 2, 4, 5, 6]

    run(work())


@pytest.mark.parametrize("landed", [True, False], ids=["written", "not written"])
def test_9_26_of_what_got_no_answer_the_table_decides(place: Deployment, landed: bool) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            given = store.appends.write

            async def lost(claim: Claim, appended: Appended) -> None:
                store.appends.write = given
                sent.append(appended)
                if landed:
                    await given(claim, appended)
                raise CommitUnknown(appended, OSError("connection lost"))

            sent: list[Appended] = []
            store.appends.write = lost
            with pytest.raises(CommitUnknown):
                await write(writer, 1)
            last = await write(writer, 2)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == ([1, 2] if landed else [2])
            # The request arrives at last, and finds the next series.
            late = facts.append(store.dialect, writer.writing.claim, sent[0].facts, sent[0].series)
            assert await store.write(late) == sent[0].series + 1
            page = await store.fetch(FetchUpdates("orders", "w1", 0, last))
            assert len(page.tokens) == len(seen.numbers)
            assert writer.statistics()["writer"]["in_doubt"] == 0

    run(work())


def test_9_26_a_series_that_another_question_has_ended_is_no_loss(place: Deployment) -> None:
    """Its answer was lost, too: only the database knows how far it is."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await write(writer, 1)
            store: Any = writer.store
            assert await store.write(facts.end_series(store.dialect, writer.writing.claim, 4, 5.0)) == 5
            await reader.wait_for(orders, "w1", await write(writer, 2))
            assert seen.numbers == [1, 2]

    run(work())


def test_9_26_a_series_ends_when_nothing_of_it_is_being_written(on_postgres: Deployment) -> None:  # noqa: F811
    """Of two requests whose answers were lost one is executed while the outcome is asked for: it waits for a lock."""

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            store: Any = writer.store
            claim = writer.writing.claim
            (token,) = await store.reserve("orders", 1)
            late = Appended({"orders": [(token, [[1, "late"]], [b'[1,"late"]'])]})
            async with await store.connect() as other, await store.connect() as watch:
                await other.execute("BEGIN")
                await other.execute(
                    "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', %s, 0, '')",
                    [token],
                )
                writing = asyncio.create_task(store.write(facts.append(store.dialect, claim, late.facts, 0)))
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not (await (await watch.execute(waiting)).fetchone())[0]:
                    pass
                asking = asyncio.create_task(store.outcome(claim, late, [("orders", token)]))
                while (await (await watch.execute(waiting)).fetchone())[0] < 2 and not asking.done():
                    pass
                await other.execute("ROLLBACK")
                await writing
                assert await asking == {("orders", token): [b'[1,"late"]']}

    run(work())


@pytest.mark.parametrize("kind", ["write", "execute", "publish"])
def test_9_26_a_fact_whose_writer_was_finished_meanwhile_gets_another_id(place: Deployment, kind: str) -> None:
    """For its silence: a suspended machine, say. Nobody knows the ID that was stepped over."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            store: Any = writer.store
            incarnation = writer.writing.incarnation
            if kind == "publish":
                reserve = store.reserve

                async def reserved(stream: str, count: int) -> list[int]:
                    ids: list[int] = await reserve(stream, count)
                    store.reserve = reserve
                    await store.finish("w1", incarnation, timeout=5)
                    return ids

                store.reserve = reserved
                ids = await writer.publish(orders, [Order(1, "a"), Order(2, "b")])
                assert len(ids) == 2
                last = ids[-1]
            else:
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "a"))
                    await store.finish("w1", incarnation, timeout=5)
                    if kind == "execute":
                        assert await fact.execute("SELECT 1") == [(1,)]
                    fact.add(Order(2, "b"))
                last = fact.id
            assert writer.statistics()["writer"]["incarnation"] > incarnation
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 2]

    run(work())


@pytest.mark.parametrize("kind", ["write", "execute"])
def test_9_26_a_fact_whose_id_is_known_does_not_get_another(place: Deployment, kind: str) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            with pytest.raises(WriterFenced):
                async with writer.write(orders) as fact:
                    fact.add(Order(fact.id, "told"))
                    await writer.store.finish("w1", writer.writing.incarnation, timeout=5)
                    if kind == "execute":
                        await fact.execute("SELECT 1")
            last = await write(writer, 99)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [99]

    run(work())


def test_9_2_an_id_that_was_not_used_is_stepped_over_with_the_next(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            with pytest.raises(KeyError):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "rolled back"))
                    raise KeyError
            async with writer.write(orders) as empty:
                pass
            last = await write(writer, 2)
            assert fact.id < empty.id < last
            assert writer.writing.generators["orders"].position == last
            assert writer.writing.generators["orders"].open == 0

    run(work())


def test_a_fact_of_several_streams(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen, paid = Seen(), []
            reader.subscribe(orders)(seen)
            reader.subscribe(payments)(lambda batch: paid.extend(batch.rows))
            async with writer.write(orders, payments) as fact:
                fact.add(Order(1, "a"))
                fact.add(Order(2, "b"), stream=payments)
            await reader.wait_for(orders, "w1", fact.ids["orders"])
            await reader.wait_for(payments, "w1", fact.ids["payments"])
            assert (seen.numbers, [row.number for row in paid]) == ([1], [2])

    run(work())


def test_a_connection_is_there_once_the_transaction_has_begun(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            async with writer.write(orders) as fact:
                with pytest.raises(ConfigError, match=r"await fact\.begin\(\)"):
                    assert fact.connection
                await fact.begin()
                await fact.begin()  # again: nothing
                assert fact.connection is not None
            with pytest.raises(ConfigError, match="has ended"):
                await fact.begin()

    run(work())


def test_a_caller_who_is_cancelled_does_not_stop_it(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            written, sent, go_on = Written(writer.store), asyncio.Event(), asyncio.Event()

            async def hold(_: Appended) -> None:
                sent.set()
                await go_on.wait()

            written.before = hold
            task = asyncio.create_task(write(writer, 1))
            await sent.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            written.before = None
            go_on.set()
            await reader.wait_for(orders, "w1", await write(writer, 2))
            assert seen.numbers == [1, 2]

    run(work())


def test_a_store_that_is_away_before_it_is_asked_has_taken_nothing(
    on_postgres: Deployment,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(_: Any) -> Any:
        raise Unavailable("PostgreSQL", "it is away")

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            with monkeypatch.context() as patch, pytest.raises(Unavailable):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "new"))
                    patch.setattr(writer.store, "_take", away)
            assert writer.statistics()["writer"]["in_doubt"] == 0
            assert writer.writing.generators["orders"].open == 0

    run(work())
