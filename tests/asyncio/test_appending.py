"""Facts whose blocks run no statement: they share a transaction, which begins when the blocks have ended (9.26)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
import pytest

from busrep.caches.freshness import Commits
from busrep.core.catchup import FetchUpdates
from busrep.errors import BusrepError, CommitUnknown, ConfigError, StatementRefused, Unavailable, WriterFenced
from busrep.stores import appending, facts, sharing
from busrep.stores.interface import Appended, Claim, Group
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
        self.before: Callable[[], Coroutine[Any, Any, Any]] | None = None
        store.appends.write = self.write

    async def write(self, claim: Claim, group: Group, given: Any) -> None:
        self.facts.append(
            sum(map(len, (part for one in given for part in (*one.facts.values(), *one.unnumbered.values()))))
        )
        if self.before is not None:
            await self.before()
        await self.given(claim, group, given)


def test_facts_that_end_together_share_a_transaction(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            written, held = Written(writer.store), asyncio.Event()

            written.before = held.wait
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

            async def fact(number: int) -> int:
                async with writer.write(orders) as one:
                    one.add(Order(number, "bad" if number == 3 else "good"))
                return int(one.id)

            written.before = held.wait
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

            async def lost(claim: Claim, group: Group, rows: Any) -> None:
                store.appends.write = given
                sent.append((rows, group.series))
                if landed:
                    await given(claim, group, rows)
                    group.settled = False
                raise CommitUnknown(group, OSError("connection lost"))

            sent: list[tuple[Any, int]] = []
            store.appends.write = lost
            with pytest.raises(CommitUnknown):
                await write(writer, 1)
            last = await write(writer, 2)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == ([1, 2] if landed else [2])
            # The request arrives at last, and finds the next series.
            ((rows, series),) = sent
            late = appending.append(store.dialect, writer.writing.claim, rows, series, 5.0)
            assert await store.write(late) == series + 1
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
            assert await store.write(appending.end_series(store.dialect, writer.writing.claim, 4, 5.0)) == 5
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
            late = {"orders": [(token, [[1, "late"]], [b'[1,"late"]'])]}
            async with await store.connect() as other, await store.connect() as watch:
                await other.execute("BEGIN")
                await other.execute(
                    "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', %s, 0, '')",
                    [token],
                )
                plan = appending.append(store.dialect, claim, [Appended(late)], 0, 30.0)
                writing = asyncio.create_task(store.write(plan, 30.0))
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not (await (await watch.execute(waiting)).fetchone())[0]:
                    pass
                asking = asyncio.create_task(store.outcome(claim, Group(), [("orders", token)]))
                while (await (await watch.execute(waiting)).fetchone())[0] < 2 and not asking.done():
                    pass
                await other.execute("ROLLBACK")
                await writing
                assert await asking == {("orders", token): [b'[1,"late"]']}

    run(work())


async def finish(bus: Any) -> None:
    """As a reader does for which the writer was silent for too long: a suspended machine, say."""
    await bus.store.finish("w1", bus.writing.incarnation, timeout=5)


def test_9_26_a_fact_begins_under_a_name_that_is_its_writer_s(place: Deployment) -> None:
    """It was finished, and has not noticed: whoever reads the fact's ID reads one that will be written."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await finish(writer)
            async with writer.write(orders) as fact:
                fact.add(Order(fact.id, "told"))
                assert await fact.execute("SELECT 1") == [(1,)]
            await finish(writer)
            (last,) = await writer.publish(orders, [Order(0, "published")])
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [fact.id, 0]

    run(work())


@pytest.mark.parametrize("kind", ["write", "execute", "execute, and go on"])
def test_9_26_a_fact_whose_writer_was_finished_meanwhile_is_refused(place: Deployment, kind: str) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            incarnation = writer.writing.incarnation
            with pytest.raises(Unavailable, match=r"Write it again"):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "late"))
                    await finish(writer)
                    if kind == "execute":
                        await fact.execute("SELECT 1")
                    elif kind != "write":
                        with contextlib.suppress(Unavailable):
                            await fact.execute("SELECT 1")
            last = await write(writer, 99)
            assert writer.statistics()["writer"]["incarnation"] > incarnation
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [99]

    run(work())


def test_9_26_a_fact_of_which_a_statement_was_not_run_is_not_written(
    place: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction could not begin, and the application has let that pass."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            with pytest.raises(Unavailable, match=r"a statement was not run.*Write it again"):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "told"))
                    with monkeypatch.context() as away, contextlib.suppress(Unavailable):
                        away.setattr(writer.store, "transaction", unavailable)
                        await fact.execute("SELECT 1")
            last = await write(writer, 2)
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [2]

    run(work())


def test_9_26_rows_that_the_application_inserts_need_the_claim_also_where_no_statement_ran(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as other:
            with pytest.raises(WriterFenced):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "inserted elsewhere"), insert=False)
                    await other.store.claim("w1", ["orders"], timeout=5)

    run(work())


def unavailable(*_: Any) -> Any:
    raise Unavailable("the database", "too many connections")


@pytest.mark.parametrize("kind", ["write", "execute"])
def test_9_26_a_fact_whose_name_another_process_won_is_fenced(place: Deployment, kind: str) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as other:
            with pytest.raises(WriterFenced):
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "late"))
                    await other.store.claim("w1", ["orders"], timeout=5)
                    if kind == "execute":
                        await fact.execute("SELECT 1")

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

            async def hold() -> None:
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


def lose_answer(store: Any) -> None:
    """The next append is written, and its answer is lost."""
    given = store.appends.write

    async def lost(claim: Claim, group: Group, rows: Any) -> None:
        store.appends.write = given
        await given(claim, group, rows)
        group.settled = False
        raise CommitUnknown(group, OSError("connection lost"))

    store.appends.write = lost


def test_9_26_what_got_no_answer_is_asked_after_beside_facts_with_statements(
    on_postgres: Deployment,  # noqa: F811
) -> None:
    """They hold the claim, one or another at any time: whoever waited for it alone would wait as long as they come."""

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            stop, begun = asyncio.Event(), asyncio.Semaphore(0)

            async def busy() -> None:
                began = (asyncio.Event(), asyncio.Event())

                async def one(at: int) -> None:
                    while not stop.is_set():
                        async with writer.write(orders) as fact:
                            fact.add(Order(at, "busy"))
                            await fact.execute("SELECT 1")
                            begun.release()
                            if not stop.is_set():
                                began[1 - at].clear()
                            began[at].set()  # the other one may end: this one has the claim
                            await began[1 - at].wait()  # it has begun anew, and has the claim
                    began[at].set()

                await asyncio.gather(one(0), one(1))

            task = asyncio.create_task(busy())
            await begun.acquire()
            await begun.acquire()
            lose_answer(writer.store)
            with pytest.raises(CommitUnknown):
                await write(writer, 7)
            await until(lambda: not writer.statistics()["writer"]["in_doubt"])
            assert not task.done()
            stop.set()
            await task

    run(work())


def test_9_26_what_got_no_answer_is_asked_after_beside_who_locks_the_row(on_postgres: Deployment) -> None:  # noqa: F811
    """As a fact does in a transaction of the caller's that has one snapshot for all its statements."""

    async def work() -> None:
        async with (
            on_postgres.bus(writer="w1") as writer,
            await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
        ):
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.execute("SELECT 1")
            async with writer.write(orders, connection=connection) as fact:
                fact.add(Order(1, "open"))
                lose_answer(writer.store)
                with pytest.raises(CommitUnknown):
                    await write(writer, 7)
                await until(lambda: not writer.statistics()["writer"]["in_doubt"])
            await connection.commit()

    run(work())


def test_9_26_a_lost_answer_is_asked_after_once(place: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each fact of the group."""
    count, given = 0, appending.end_series

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return given(*args)

    monkeypatch.setattr(appending, "end_series", counted)

    async def work() -> None:
        async with place.bus(writer="w1") as writer, place.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await write(writer, 0)
            written, held = Written(writer.store), asyncio.Event()
            written.before = held.wait
            lose_answer(writer.store)
            tasks = [asyncio.create_task(write(writer, number)) for number in range(1, 50)]
            await until(lambda: writer.writing.generators["orders"].open == 49)
            held.set()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(one, CommitUnknown) for one in ended) > 40
            await until(lambda: not writer.statistics()["writer"]["in_doubt"])
            assert count == 1
            await reader.wait_for(orders, "w1", await write(writer, 50))
            assert sorted(seen.numbers) == list(range(51))

    run(work())


@pytest.mark.parametrize("kind", ["waiting", "on its way"])
def test_9_26_of_a_cancelled_append_the_table_tells_when_it_has_ended(place: Deployment, kind: str) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            store: Any = writer.store
            claim = writer.writing.claim
            # An answer was lost before, and this process does not know of it.
            assert await store.write(appending.end_series(store.dialect, claim, 0, 5.0)) == 1
            first, second = await store.reserve("orders", 2)
            given, sent, go_on = store.appends.write, asyncio.Event(), asyncio.Event()

            async def slow(claim: Claim, group: Group, rows: Any) -> None:
                sent.set()
                await go_on.wait()
                await given(claim, group, rows)

            store.appends.write = slow
            items = [Appended({"orders": [(token, [[1, "x"]], [b'[1,"x"]'])]}) for token in (first, second)]
            tasks = [asyncio.create_task(store.append(claim, items[0]))]
            await sent.wait()
            tasks.append(asyncio.create_task(store.append(claim, items[1])))
            await asyncio.sleep(0)
            at = 1 if kind == "waiting" else 0
            tasks[at].cancel()
            if kind == "waiting":
                with pytest.raises(asyncio.CancelledError):
                    await tasks[at]
            else:
                with pytest.raises(CommitUnknown) as unknown:
                    await tasks[at]
                asked = [("orders", first)]
                assert await store.outcome(claim, unknown.value.marker, asked) is None  # still under way
            go_on.set()
            await tasks[1 - at]
            if kind == "waiting":
                assert await store.read(facts.rows_of(store.dialect, [("orders", second)], "w1")) == {}
            else:
                found = await store.outcome(claim, unknown.value.marker, asked)
                assert found == {("orders", first): [b'[1,"x"]']}

    run(work())


def test_two_statements_at_a_time_begin_one_transaction(place: Deployment) -> None:
    begun: list[object] = []

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            store: Any = writer.store
            transaction = store.transaction
            store.transaction = lambda *arguments: begun.append(1) or transaction(*arguments)
            async with writer.write(orders) as fact:
                fact.add(Order(1, "x"))
                asked = [fact.execute("SELECT 1"), fact.execute("SELECT 2")]
                assert await asyncio.gather(*asked) == [[(1,)], [(2,)]]
                assert len(begun) == 1

    run(work())


def test_9_23_facts_of_one_transaction_are_noted_once(place: Deployment) -> None:
    """Else a failover that took the one before would not be told: of 100 transactions it is looked for what is left."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            async with writer.write(orders) as fact:
                fact.add(Order(1, "x"))
                await fact.execute("SELECT 1")
            written, held = Written(writer.store), asyncio.Event()
            written.before = held.wait
            tasks = [asyncio.create_task(write(writer, number)) for number in range(300)]
            await until(lambda: writer.writing.generators["orders"].open == 300)
            held.set()
            await asyncio.gather(*tasks)
            assert len(written.facts) < 100
            assert ("orders", fact.id) in writer.writing.committed.facts()

    run(work())


def test_what_the_block_has_committed_itself_is_not_called_unwritten(on_postgres: Deployment) -> None:  # noqa: F811
    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            async with await writer.store.connect() as direct:
                await direct.execute("CREATE TABLE app (x int)")
            with pytest.raises(BusrepError) as raised:
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "x"))
                    await fact.execute("INSERT INTO app VALUES (1)")
                    await fact.execute("COMMIT")
                    await finish(writer)
                    await fact.execute("BEGIN")
            assert "Write it again" not in str(raised.value)

    run(work())


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "ends"])
def test_a_statement_that_nobody_waits_for_leaves_nothing(place: Deployment, turns: int, fails: bool) -> None:
    """The block ends while its first statement is beginning a transaction."""

    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            store: Any = writer.store
            began: list[asyncio.Future[Any]] = []
            with pytest.raises(KeyError) if fails else contextlib.nullcontext():
                async with writer.write(orders) as fact:
                    fact.add(Order(1, "x"))
                    began.append(asyncio.ensure_future(fact.execute("SELECT 1")))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if fails:
                        raise KeyError
            with contextlib.suppress(BusrepError):
                await began[0]
            # The claim is free, and the name can be won by another process.
            await write(writer, 2)
            await store.claim("w1", ["orders"], timeout=10)

    run(work())


def test_9_26_of_a_group_that_is_halved_a_fact_that_was_given_up_is_not_written(place: Deployment) -> None:
    async def work() -> None:
        async with place.bus(writer="w1") as writer:
            store: Any = writer.store
            claim = writer.writing.claim
            first, second, third = await store.reserve("orders", 3)

            def one(token: int) -> Appended:
                return Appended({"orders": [(token, [[1, "x"]], [b'[1,"x"]'])]})

            await store.append(claim, one(first))  # so that it is refused the next time
            given, sent, go_on = store.appends.write, asyncio.Event(), asyncio.Event()

            async def slow(claim: Claim, group: Group, rows: Any) -> None:
                if len(rows) == 1:
                    sent.set()
                    await go_on.wait()
                await given(claim, group, rows)

            store.appends.write = slow
            tasks = [asyncio.create_task(store.append(claim, one(token))) for token in (first, second)]
            await sent.wait()
            tasks[1].cancel()
            with pytest.raises(CommitUnknown) as unknown:
                await tasks[1]
            asked = [("orders", second)]
            assert await store.outcome(claim, unknown.value.marker, asked) == {}
            go_on.set()
            with pytest.raises(StatementRefused):
                await tasks[0]
            await store.append(claim, one(third))  # its turn comes when that of the group is over
            assert await store.read(facts.rows_of(store.dialect, asked, "w1")) == {}

    run(work())


def test_on_sqlite_a_fact_inside_one_that_has_run_a_statement_is_refused(deployment: Deployment) -> None:  # noqa: F811
    """It would wait for its own task."""

    async def work() -> None:
        async with deployment.bus(writer="w1") as writer:
            async with writer.write(orders) as outer:
                with pytest.raises(ConfigError, match="one write lock"):
                    async with writer.write(orders) as inner:
                        inner.add(Order(1, "x"))
                        await outer.execute("SELECT 1")
                outer.add(Order(2, "y"))
            page = await writer.store.fetch(FetchUpdates("orders", "w1", 0, outer.id))
            assert page.tokens == [outer.id]

    run(work())


def test_an_answer_that_is_being_waited_for_is_none_of_the_table_s(on_postgres: Deployment) -> None:  # noqa: F811
    """A cache would take invalidations for applied that are committed and not known here."""

    async def work() -> None:
        async with on_postgres.bus(writer="w1") as writer:
            store: Any = writer.store
            session = writer.writing
            session.commits, session.on_invalidations = {"orders": Commits()}, None
            given, written, go_on = store.appends.write, asyncio.Event(), asyncio.Event()

            async def slow(claim: Claim, group: Group, rows: Any) -> None:
                await given(claim, group, rows)
                written.set()
                await go_on.wait()

            store.appends.write = slow
            task = asyncio.create_task(write(writer, 1))
            await written.wait()
            committed = time.monotonic()
            for inner in list(session._finishing):
                inner.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await session.settle()
            assert session.commits["orders"].as_of(time.monotonic()) <= committed
            go_on.set()
            await until(lambda: not session.doubts)

    run(work())
