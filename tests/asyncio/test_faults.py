"""Crashes, cuts, cancellations and races against the asyncio runtime: nothing is lost, in order, never silently.

First one test per fault, then a seeded soak of all of them together. ``BUSREP_SOAK=120`` runs the soak for that many
seconds instead of a few, ``BUSREP_SEED`` repeats one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
import psycopg
import pytest
import redis.asyncio

import busrep.sync
from busrep import Batch, Bus
from busrep.core.application_commands import RemoteServerUp
from busrep.errors import BusrepError, Closed, CommitUnknown, HandlerFailed, Unavailable, WriterFenced
from busrep.runtime.tasks import stop
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import RedisServer, start_redis
from tests.shop import STREAMS

from .test_bus import QUICK, Deployment, Gate, Order, Seen, deployment, on_postgres, orders, payments, run, until, write

__all__ = ["deployment", "on_postgres"]  # fixtures

pytestmark = pytest.mark.servers

IMPATIENT = attrs.evolve(QUICK, handler_retries=0)
UNSAVED = attrs.evolve(QUICK, save_every=600.0)


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest, redis_url: str, bus_name: str) -> Deployment:
    """A deployment on each of the two stores."""
    found = Deployment(redis_url, bus_name, request.getfixturevalue(f"{request.param}_url"))
    asyncio.run(found.init())
    return found


async def crash(bus: Bus) -> None:
    """As kill -9 does, of a bus in this process: nothing more is published, saved or released."""
    bus.reading.reader = ""
    if bus.writing is not None:
        bus.writing.core.fenced()
        bus.writing.store = bus.writing.claim = None
    tasks = [*bus.background, *bus.tasks, *bus.reading.tasks, *bus.reading.workers.values()]
    bus.background.closed = bus.tasks.closed = bus.reading.tasks.closed = True
    await stop(tasks, 5.0)
    assert all(task.done() for task in tasks)
    await bus.reading.close(0.01)
    await bus.link.close()
    for store in bus._stores:
        await store.close()
    bus._state = "closed"


async def saved(deployment: Deployment, reader: str) -> dict[tuple[str, str], int]:
    store = await deployment.store_of()
    try:
        return dict((await store.load_reader(reader)).positions)
    finally:
        await store.close()


async def facts(deployment: Deployment) -> list[tuple[str, int]]:
    """(writer, ID) of all rows of orders, by ID."""
    query = "SELECT writer, id FROM busrep_facts WHERE stream = 'orders' ORDER BY id"
    if deployment.store.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(deployment.store.removeprefix("sqlite:///"))) as connection:
            return connection.execute(query).fetchall()
    async with await psycopg.AsyncConnection.connect(deployment.store) as asynchronous:
        return await (await asynchronous.execute(query)).fetchall()


# -- who has a claim to rows ----------------------------------------------------------------------------------


def test_a_durable_reader_from_now_gets_all_of_a_writer_that_joined_while_it_was_down(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as w1:
            await write(w1, 1)
            async with deployment.bus(reader="r", start="now") as reader:
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", await write(w1, 2))
            async with deployment.bus(writer="w2") as w2:
                last = await write(w2, 3, 4)
            async with deployment.bus(reader="r", start="now") as reader:
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w2", last)
            assert [number for number in seen.numbers if number > 2] == [3, 4]

    run(main())


def test_a_durable_reader_s_first_handler_gets_what_passed_before_it(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:
            await reader.wait_for(orders, "w1", await write(writer, 1, 2))
            await asyncio.sleep(3 * QUICK.save_every)
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 3))
            assert seen.numbers == [1, 2, 3]

    run(main())


def test_a_writer_that_joins_between_two_loops_over_follow_is_not_handed_to_nobody(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as w1, deployment.bus(start="earliest") as reader:
            await write(w1, 1)

            async def follow(upto: int) -> list[int]:
                got: list[int] = []
                async with contextlib.aclosing(reader.follow(orders)) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        got += [row.number for row in batch.rows]
                        if upto in got:
                            return got
                return got

            assert await follow(1) == [1]
            async with deployment.bus(writer="w2") as w2:
                last = await write(w2, 2)
                received = reader.statistics()["reader"]["frames_received"]
                await until(lambda: reader.statistics()["reader"]["frames_received"] > received + 4)
                assert reader.positions()["orders"].get("w2", 0) < last
                got = []
                while 2 not in got or 1 not in got:
                    got += await follow(2 if 2 not in got else 1)
                assert sorted(set(got)) == [1, 2]

    run(main())


def test_what_a_dead_writer_left_comes_after_resume_without_hearing_it(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        poisoned = True
        async with deployment.bus(writer="w1") as writer:
            last = await write(writer, 1, 2)
            await asyncio.sleep(3 * QUICK.heartbeat)
        settings = attrs.evolve(IMPATIENT, silent_after_beats=1000)
        async with deployment.bus(start="earliest", settings=settings) as reader:

            @reader.subscribe(orders)
            def handle(batch: Batch[Order]) -> None:
                if poisoned:
                    raise ValueError("poison")
                seen(batch)

            with pytest.raises(HandlerFailed):
                await reader.wait_for(orders, "w1", last)
            poisoned = False
            reader.resume(orders, "w1")
            await reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1, 2]

    run(main())


def test_own_facts_do_not_hide_those_a_predecessor_left(deployment: Deployment) -> None:
    """A process that reads and writes: its own new facts must not carry the saved position over older rows."""

    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as predecessor:
            left = await write(predecessor, 1, 2)
        gate = asyncio.Event()
        bus = deployment.bus(writer="w1", reader="r")
        await bus.open()

        @bus.subscribe(orders)
        async def stuck(_: Batch[Order]) -> None:
            await gate.wait()

        last = await write(bus, 3)
        await until(lambda: bus.reading.workers)
        await until(lambda: bus.statistics()["writer"]["streams"]["orders"]["sent"] >= last)
        assert bus.positions()["orders"]["w1"] == 0
        await asyncio.sleep(4 * QUICK.save_every)
        await crash(bus)
        assert (await saved(deployment, "r")).get(("orders", "w1"), 0) == 0
        async with deployment.bus(writer="w1", reader="r") as again:
            again.subscribe(orders)(seen)
            await until(lambda: len(seen.numbers) >= 2)
            assert seen.numbers[:2] == [1, 2]
            await until(lambda: again.positions()["orders"]["w1"] >= left)

    run(main())


def test_a_link_lost_while_a_predecessor_s_rows_are_fetched_does_not_end_that(deployment: Deployment) -> None:
    """A lost link ends all catching up until the next POSITION, and of the own name nobody sends one."""

    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1", streams=[orders]) as first:
            await write(first, 1, 2)
        async with deployment.bus(writer="w1", reader="r") as second:
            gate = Gate(second.reading.store, "fetch")
            second.subscribe(orders)(seen)
            await gate.at.wait()
            before = second.statistics()["link"]["reconnects"]
            client = redis.asyncio.Redis.from_url(deployment.redis)
            await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")  # type: ignore[no-untyped-call]
            await client.aclose()
            link = second.statistics
            await until(lambda: link()["link"]["reconnects"] > before and link()["link"]["connected"])
            gate.go_on.set()
            await until(lambda: seen.numbers == [1, 2])

    run(main())


async def heard_once(deployment: Deployment, method: str) -> None:
    """A writer without beats joins while the reader asks the registry, and ``method`` of the reader's store fails once
    after that: its one row comes though nothing is said of it again."""
    patient = attrs.evolve(QUICK, silent_after_beats=10_000)  # nobody is finished, nor looked for
    seen = Seen()
    async with deployment.bus(settings=patient, streams=[orders]) as reader:
        reader.subscribe(orders)(seen)
        await until(lambda: "orders" in reader.reading.core.followed)
        core, store = reader.reading.core, reader.reading.store
        asked = Gate(store, "known", after=True)
        reader.reading.beat(all_known=True)
        await asked.at.wait()
        given, failed = getattr(store, method), asyncio.Event()

        async def fails_once(*args: Any, **kwargs: Any) -> Any:
            if not failed.is_set():
                failed.set()
                raise Unavailable("the store", "a test")
            return await given(*args, **kwargs)

        with busrep.sync.connect(
            deployment.redis, name=deployment.name, streams=[orders], store=deployment.store, writer="w1", beats=False,
            settings=patient,
        ) as writer:  # fmt: skip
            (token,) = await asyncio.to_thread(writer.publish, orders, [Order(1, "new")])
            await until(lambda: any(end == token for end, _ in core.admission._unconfirmed.values()))
            if method != "known":
                setattr(store, method, fails_once)
            asked.go_on.set()
            await until(lambda: seen.numbers == [1])
            assert reader.positions()["orders"]["w1"] == token
            assert failed.is_set() == (method != "known")


def test_a_writer_without_beats_that_joins_while_the_registry_is_read_is_heard(deployment: Deployment) -> None:
    run(heard_once(deployment, "known"))


def test_a_writer_without_beats_that_joined_is_heard_though_the_sequence_was_away(deployment: Deployment) -> None:
    run(heard_once(deployment, "sequence"))


@contextlib.asynccontextmanager
async def succeeded(deployment: Deployment, old: Bus) -> AsyncIterator[tuple[Seen, int]]:
    """A process that has written has a successor, which wrote too: what the first has handled, and the fact's ID."""
    seen = Seen()
    old.subscribe(orders)(seen)
    await old.wait_for(payments, "w1", 0)
    await write(old, 1)
    async with deployment.bus(writer="w1") as new:
        last = await write(new, 2)
        await until(lambda: old.statistics()["writer"]["fenced"])
        yield seen, last


def test_a_fenced_process_goes_on_as_a_reader_of_its_successor(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as old, succeeded(deployment, old) as (seen, last):
            await old.wait_for(orders, "w1", last)
            assert seen.numbers[-1:] == [2]
            assert old.positions()["orders"]["w1"] == last

    run(main())


def test_a_process_that_does_not_know_yet_whether_it_lost_its_name_waits_for_its_successor_s_facts(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        known = asyncio.Event()
        store = open_store(deployment.store, Registry(STREAMS))
        async with deployment.bus(writer="w1", store=store) as old:
            claim = store.claim

            async def held(*args: Any, **options: Any) -> Any:
                await known.wait()
                return await claim(*args, **options)

            monkeypatch.setattr(store, "claim", held)
            async with succeeded(deployment, old) as (seen, last):
                assert not old.statistics()["writer"]["lost"]
                waiting = asyncio.create_task(old.wait_for(orders, "w1", last))
                for _ in range(10):  # a wait for an own fact returns at its first step
                    await asyncio.sleep(0)
                assert not waiting.done()
                known.set()
                await waiting
                assert seen.numbers == [2]

    run(main())


# -- handlers -------------------------------------------------------------------------------------------------


def test_a_handler_that_meets_a_cancellation_does_not_make_its_stream_deaf(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        cancelled = iter([True, False])
        async with deployment.bus(writer="w1") as writer, deployment.bus(start="earliest") as reader:

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                if next(cancelled, False):
                    inner = asyncio.ensure_future(asyncio.sleep(60))
                    inner.cancel()
                    await inner
                seen(batch)

            await reader.wait_for(orders, "w1", await write(writer, 1, 2))
            assert seen.numbers == [1, 2]

    run(main())


def test_a_saved_batch_of_a_loop_that_was_left_is_not_offered_again(deployment: Deployment) -> None:
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        got: list[int] = []
        async with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:
            with contextlib.closing(sqlite3.connect(path, timeout=2)) as connection:
                for number in (1, 2, 3):
                    await write(writer, number)
                    async with contextlib.aclosing(reader.follow(orders)) as batches:  # type: ignore[type-var]
                        async for batch in batches:
                            connection.execute("BEGIN IMMEDIATE")
                            try:
                                await batch.save(connection)
                                connection.commit()
                            finally:
                                connection.rollback()
                            got += [row.number for row in batch.rows]
                            break
            assert got == [1, 2, 3]

    run(main())


def test_a_handler_that_fails_for_good_after_its_commit_is_no_poison(deployment: Deployment) -> None:
    """Rule 9.12: after an unknown COMMIT what is saved decides, on the last attempt too."""
    path = deployment.store.removeprefix("sqlite:///")

    async def main() -> None:
        seen = Seen()
        async with (
            deployment.bus(writer="w1") as writer,
            deployment.bus(reader="r", settings=attrs.evolve(IMPATIENT, save_every=600.0)) as reader,
        ):
            with contextlib.closing(sqlite3.connect(path, timeout=2)) as connection:

                @reader.subscribe(orders)
                async def handle(batch: Batch[Order]) -> None:
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        await batch.save(connection)
                        connection.commit()
                    finally:
                        connection.rollback()
                    seen(batch)
                    raise OSError("the answer to COMMIT was lost")

                for number in (1, 2, 3):
                    await reader.wait_for(orders, "w1", await write(writer, number))
            assert seen.numbers == [1, 2, 3]
            assert reader.statistics()["reader"]["stopped"] == {}

    run(main())


def test_a_handler_may_close_the_bus(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer:
            reader = deployment.bus(reader="r", settings=attrs.evolve(UNSAVED, shutdown_timeout=20.0))
            await reader.open()

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                await reader.close()
                seen(batch)

            last = await write(writer, 1)
            await until(lambda: seen.numbers)
            await reader.close()  # waits for the one that is under way
            assert (await saved(deployment, "r"))["orders", "w1"] == last
            left = [task.get_name() for task in asyncio.all_tasks()]
            assert not reader.link.connected
            assert left.count("busrep-link") == 1  # the writer's

    run(main(), timeout=15)


def test_a_slow_handler_does_not_starve_the_other_streams(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        settings = attrs.evolve(QUICK, receive_queue_bytes=5_000, page_rows=50)
        async with deployment.bus(writer="w1") as writer, deployment.bus(settings=settings, start="earliest") as reader:
            gate = asyncio.Event()

            @reader.subscribe(orders)
            async def slow(_: Batch[Order]) -> None:
                await gate.wait()

            reader.subscribe(payments)(seen)
            last = (await writer.publish(orders, [Order(n, "x" * 50) for n in range(1_000)]))[-1]
            await until(lambda: reader.reading.core.intake.queue_bytes > 5_000)
            ids = await writer.publish(payments, [Order(n, "x" * 50) for n in range(1_000)])
            await reader.wait_for(payments, "w1", ids[-1])
            assert seen.numbers == list(range(1_000))
            gate.set()
            await reader.wait_for(orders, "w1", last)

    run(main())


# -- closing, and waiting meanwhile ---------------------------------------------------------------------------


def test_a_close_that_is_cancelled_goes_on(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            reader = deployment.bus(reader="r", settings=UNSAVED)
            await reader.open()
            seen = Seen()
            reader.subscribe(orders)(seen)
            last = await write(writer, 1)
            await reader.wait_for(orders, "w1", last)
            closing = asyncio.ensure_future(reader.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await reader.close()
            assert not reader.link.connected
            assert (await saved(deployment, "r"))["orders", "w1"] == last

    run(main())


def test_who_waits_when_the_bus_closes_is_told_so(on_postgres: Deployment) -> None:
    async def main() -> None:
        async with FaultyLink(on_postgres.store) as proxy:
            reader = on_postgres.bus(store=proxy.url)
            await reader.open()
            proxy.refuse = True
            proxy.cut()
            waits = [
                asyncio.ensure_future(reader.wait_for(orders, "w1", 5, timeout=20)),
                asyncio.ensure_future(reader.linear_position(payments)),
            ]
            await asyncio.sleep(0.1)
            await reader.close()
            for wait in waits:
                with pytest.raises(Closed):
                    await wait

    run(main())


def test_a_database_that_hangs_keeps_no_announcement_back(on_postgres: Deployment) -> None:
    """A writer that waited for each answer would count as dead."""

    async def main() -> None:
        announced: list[bytes] = []
        async with FaultyLink(on_postgres.store) as proxy, on_postgres.bus(writer="w1", store=proxy.url) as writer:
            writer.on_line(lambda way, _, line: announced.append(line) if way == ">" else None)
            await write(writer, 1)
            proxy.black_hole()
            await asyncio.sleep(2 * QUICK.heartbeat)  # a beat is under way, and hangs
            announced.clear()
            # As many as there are to be in two seconds.
            await until(lambda: sum(line.startswith(b"POSITION orders w1 ") for line in announced) >= 20, timeout=5)
            proxy.cut()

    run(main())


def test_a_save_without_an_answer_does_not_deafen_a_reader(on_postgres: Deployment) -> None:
    """The link stands, and nobody is at its other end: so it is behind a proxy whose server has failed over."""

    async def main() -> None:
        settings = attrs.evolve(QUICK, fetch_timeout=2.0)
        async with FaultyLink(on_postgres.store) as proxy, on_postgres.bus(writer="w1") as writer:
            async with on_postgres.bus(reader="r", store=proxy.url, settings=settings) as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", await write(writer, 1))
                for number in range(2, 6):
                    proxy.abandon("server")
                    await write(writer, number)
                    await asyncio.sleep(3 * QUICK.save_every)
                await reader.wait_for(orders, "w1", await write(writer, 6), timeout=40)
                assert seen.numbers == [1, 2, 3, 4, 5, 6]

    run(main(), timeout=60)


@pytest.mark.parametrize("how", ["COMMIT does not arrive", "its answer does not", "ROLLBACK does not arrive"])
def test_the_end_of_a_fact_without_an_answer_holds_up_no_other(on_postgres: Deployment, how: str) -> None:
    """The link stands, and nobody is at its other end: what became of the fact the table tells, on another one."""

    async def main() -> None:
        settings = attrs.evolve(QUICK, fetch_timeout=2.0)
        expected, text = (KeyError, "rolled back") if "ROLLBACK" in how else (CommitUnknown, "no answer within 2 s")
        async with FaultyLink(on_postgres.store) as proxy, on_postgres.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            async with on_postgres.bus(writer="w1", store=proxy.url, settings=settings) as writer:
                await write(writer, 1)
                with pytest.raises(expected, match=text):
                    async with writer.write(orders) as fact:
                        fact.add(Order(2, "new"))
                        if "answer" not in how:  # a statement has the claim looked at before COMMIT
                            await fact.execute("SELECT 1")
                        if "answer" in how:
                            proxy.black_hole("from_server")
                        else:
                            proxy.abandon("server")
                        if expected is KeyError:
                            raise KeyError("rolled back")
                proxy.abandon("server")
                proxy.heal()
                last = None
                while last is None:
                    with contextlib.suppress(Unavailable):  # the connections that nobody has used since
                        last = await write(writer, 3)
                await reader.wait_for(orders, "w1", last, timeout=80)  # busy, a machine takes two seconds for anything
                assert seen.numbers == ([1, 2, 3] if "answer" in how else [1, 3])
                assert writer.statistics()["writer"]["in_doubt"] == 0

    run(main())


def test_shutdown_while_redis_and_the_database_are_away_ends_in_time(on_postgres: Deployment) -> None:
    async def main() -> None:
        async with FaultyLink(on_postgres.redis) as redis_proxy, FaultyLink(on_postgres.store) as proxy:
            settings = attrs.evolve(UNSAVED, shutdown_timeout=0.5)
            bus = on_postgres.bus(redis=redis_proxy.url, store=proxy.url, writer="w1", reader="r", settings=settings)
            await bus.open()
            seen = Seen()
            bus.subscribe(orders)(seen)
            async with on_postgres.bus(writer="w2") as other:
                await bus.wait_for(orders, "w2", await write(other, 1))
                last = await write(bus, 2)
                for each in (redis_proxy, proxy):
                    each.black_hole()
                task = asyncio.ensure_future(write(bus, 3))
                await asyncio.sleep(0.05)
                started = asyncio.get_running_loop().time()
                await bus.close()
                # Each step has `shutdown_timeout`; a question that is cancelled once would take five seconds or ten.
                assert asyncio.get_running_loop().time() - started < 5
                for each in (redis_proxy, proxy):
                    each.cut()
                await asyncio.gather(task, return_exceptions=True)
                after = Seen()
                async with on_postgres.bus(writer="w1", reader="r") as again:
                    again.subscribe(orders)(after)
                    await again.wait_for(orders, "w2", await write(other, 4))
                    assert last
                    assert 4 in after.numbers

    run(main())


# -- the runtime's own tasks ----------------------------------------------------------------------------------


def test_an_onlooker_that_raises_stops_nothing(deployment: Deployment) -> None:
    async def main() -> None:
        def onlooker(direction: str, channel: str, line: bytes) -> None:
            raise ValueError((direction, channel, line))

        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus(start="earliest") as reader:
            writer.on_line(onlooker)
            reader.on_line(onlooker)
            reader.subscribe(orders)(seen)
            for number in range(5):
                await reader.wait_for(orders, "w1", await write(writer, number))
            assert seen.numbers == list(range(5))
            assert reader.statistics()["link"]["reconnects"] == 0

    run(main())


def test_the_runtime_s_tasks_outlive_an_error_of_the_store(deployment: Deployment) -> None:
    async def main() -> None:
        seen = Seen()
        async with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", await write(writer, 1))
            broken: list[str] = []

            def breaking(store: Any, name: str) -> Callable[[], None]:
                whole = getattr(store, name)

                async def broken_once(*args: Any, **options: Any) -> Any:
                    broken.append(name)
                    raise sqlite3.DatabaseError("database disk image is malformed")

                setattr(store, name, broken_once)
                return lambda: setattr(store, name, whole)

            mend = [breaking(writer.store, "heartbeat"), breaking(reader.store, "save_reader")]
            mend.append(breaking(reader.store, "known"))
            await reader.wait_for(orders, "w1", await write(writer, 2))
            await until(lambda: {"heartbeat", "save_reader", "known"} <= set(broken))
            for one in mend:
                one()
            last = await write(writer, 3)
            await reader.wait_for(orders, "w1", last)
            async with asyncio.timeout(60):
                while (await saved(deployment, "r"))["orders", "w1"] < last:
                    await asyncio.sleep(0.05)
            assert all(not task.done() for bus in (writer, reader) for task in bus.background)

    run(main())


async def turns(count: int = 50) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_stopped_writer_with_rows_waiting_makes_no_tasks(deployment: Deployment) -> None:
    async def main() -> None:
        resets: list[Any] = []
        made: list[Any] = []
        started, go_on = asyncio.Event(), asyncio.Event()
        async with (
            deployment.bus(writer="w1") as w1,
            deployment.bus(writer="w2") as w2,
            deployment.bus(settings=IMPATIENT) as reader,
        ):
            core, work = reader.reading.core, reader.reading.handlers._work

            def counted(key: Any) -> Any:
                made.extend([key] if key == ("orders", "w1") else [])
                return work(key)

            reader.reading.handlers._work = counted  # type: ignore[method-assign]

            @reader.subscribe(orders)
            async def handle(batch: Batch[Order]) -> None:
                if batch.writer == "w1":
                    started.set()
                    await go_on.wait()
                    raise ValueError("poison")

            reader.on_reset(orders)(lambda *args: resets.append(args))
            await write(w1, 1)
            await started.wait()
            await write(w1, 2)
            await until(lambda: ("orders", "w1") in core.ready)
            go_on.set()
            await until(lambda: reader.reading.stopped)
            await reader.wait_for(orders, "w2", await write(w2, 3))
            await turns()
            assert len(made) == 1

            core.rebase(core.epoch or "", {})  # a notice waits as well: for resume()
            reader.reading.pump()
            await turns()
            assert len(made) == 1
            assert ("orders", "w1", 0) not in resets
            reader.resume(orders, "w1")
            assert len(made) == 2  # and does not wait for anybody to say something
            await until(lambda: ("orders", "w1", 0) in resets)

    run(main())


def test_without_a_pause_between_saves_nothing_goes_round_idle(deployment: Deployment) -> None:
    async def main() -> None:
        saves: list[Any] = []
        at_once = attrs.evolve(QUICK, save_every=0.0, heartbeat=600.0)
        async with (
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r", settings=at_once) as reader,
        ):
            batches: list[Batch[Order]] = []
            reading = reader.reading
            save = reading.saver.try_save

            async def counted(keys: Any, **options: Any) -> None:
                saves.append(keys)
                await save(keys, **options)

            reading.saver.try_save = counted  # type: ignore[method-assign]
            reader.subscribe(orders)(batches.append)
            for number in range(5):
                await reader.wait_for(orders, "w1", await write(w1, number))
            await until(lambda: len(saves) >= len(batches))
            await turns()
            assert saves == [[("orders", "w1")]] * len(batches)  # after each batch, and never else
            async with asyncio.timeout(60):
                while (await saved(deployment, "r"))["orders", "w1"] != 5:
                    await asyncio.sleep(0.01)

    run(main())


def test_another_bus_s_fencing_does_not_fence_this_one(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as writer:
            with pytest.raises(WriterFenced):
                async with writer.write(orders):
                    raise WriterFenced("somebody", 7)
            assert await write(writer, 1)

    run(main())


def test_a_dead_writer_that_cannot_be_finished_does_not_keep_the_others_from_being_followed(
    bus_name: str, postgres_url: str
) -> None:
    async def main(server: RedisServer) -> None:
        seen = Seen()
        deployment = await Deployment(server.url, bus_name, postgres_url).init()
        dead = deployment.bus(writer="a")  # first in the table's order
        await dead.open()
        async with (
            await psycopg.AsyncConnection.connect(postgres_url) as hung,
            deployment.bus(writer="b") as writer,
            deployment.bus(start="earliest") as reader,
        ):
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "b", await write(writer, 1))
            await hung.execute("SELECT 1 FROM busrep_writers WHERE writer = 'a' FOR SHARE")
            await crash(dead)
            await asyncio.sleep(1.5 * QUICK.heartbeat * QUICK.silent_after_beats)
            await asyncio.to_thread(server.kill)
            await reader.wait_for(orders, "b", await write(writer, 2), timeout=8)
            assert seen.numbers == [1, 2]

    with start_redis() as server:
        run(main(server))


def test_command_handlers_that_are_too_slow_are_bounded(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrep.asyncio.messages.COMMAND_CALLS", 5)

    async def main() -> None:
        gate = asyncio.Event()
        async with deployment.bus() as one, deployment.bus() as two:

            @two.on(RemoteServerUp)
            async def handle(_: RemoteServerUp) -> None:
                await gate.wait()

            await until(lambda: not two.tasks)
            for number in range(20):
                await one.send(RemoteServerUp(f"host-{number}"))
            await until(lambda: two.statistics()["link"]["commands_dropped"] == 15)
            assert len(two.tasks) == 5
            gate.set()

    run(main())


# -- cancellation ---------------------------------------------------------------------------------------------


def test_a_writer_cancelled_anywhere_leaves_no_hole_and_no_ghost(either: Deployment) -> None:
    """bus.write and bus.publish, cancelled once or twice after any number of steps: the table decides."""

    async def main() -> None:
        seen = Seen()
        dice = random.Random(5)
        async with either.bus(writer="w1") as writer, either.bus(start="earliest") as reader:
            reader.subscribe(orders)(seen)

            async def one(number: int) -> None:
                if number % 3:
                    await write(writer, number)
                else:
                    await writer.publish(orders, [Order(number, "bulk"), Order(-number, "bulk")])

            for number in range(1, 80):
                task = asyncio.ensure_future(one(number))
                for _ in range(number % 27):
                    await asyncio.sleep(0 if number % 2 else 0.0003)
                task.cancel()
                if dice.random() < 0.5:
                    await asyncio.sleep(0)
                    task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await reader.wait_for(orders, "w1", await write(writer, 1000))
            assert [(name, token) for name, token, _ in seen.facts] == await facts(either)
            assert writer.statistics()["writer"]["in_doubt"] == 0
            assert writer.writing is not None
            assert writer.writing.generators["orders"].open == 0

    run(main())


def test_a_loop_over_follow_cancelled_anywhere_loses_nothing(deployment: Deployment) -> None:
    async def main() -> None:
        got: list[int] = []
        async with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:

            async def follow() -> None:
                async with contextlib.aclosing(reader.follow(orders)) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        await asyncio.sleep(0)
                        got.extend(row.number for row in batch.rows)

            for number in range(60):
                task = asyncio.ensure_future(follow())
                await write(writer, number)
                for _ in range(number % 13):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            task = asyncio.ensure_future(follow())
            await reader.wait_for(orders, "w1", 60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert list(dict.fromkeys(got)) == list(range(60))

    run(main())


# -- all together ---------------------------------------------------------------------------------------------


@attrs.define
class Ledger:
    """What one durable reader handled, life by life: (writer, token) in order."""

    lives: list[list[tuple[str, int]]] = attrs.field(factory=list)

    def check(self, rows: list[tuple[str, int]]) -> None:
        """At least once, in order: every life begins no later than where the one before ended, and skips nothing."""
        for writer in {name for name, _ in rows}:
            tokens = list(dict.fromkeys(token for name, token in rows if name == writer))
            place = {token: index for index, token in enumerate(tokens)}
            reached = 0
            for life in self.lives:
                at: int | None = None
                for token in dict.fromkeys(token for name, token in life if name == writer):
                    assert token in place, f"{writer} {token} was handled and is not in the table"
                    here = place[token]
                    assert here <= reached if at is None else here == at + 1, f"{writer}: gap before {token}"
                    at, reached = here, max(reached, here + 1)
            assert reached == len(tokens), f"{writer}: {len(tokens) - reached} of {len(tokens)} never came"


class Soak:
    """Writers and durable readers, and what happens to them."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.deployment, self.dice = deployment, random.Random(seed)
        # Handlers fail by chance, so no fact is poison, however often one fails in a row.
        self.settings = attrs.evolve(
            QUICK, handler_retries=1_000, heartbeat=0.05, silent_after_beats=8, page_rows=100, frame_rows=30,
            handler_batch_rows=200, receive_queue_bytes=40_000, held_bytes=3_000, publish_queue_bytes=20_000,
            retry_max=0.1, shutdown_timeout=1.0, claim_timeout=5.0, save_every=0.03,
        )  # fmt: skip
        self.ledgers = {"loose": Ledger(), "strict": Ledger()}
        self.buses: dict[str, Bus] = {}
        self.writing: dict[str, list[asyncio.Task[None]]] = {}
        self.number = 0
        self.stopping = False

    async def open(self, who: str) -> None:
        settings, deployment = self.settings, self.deployment
        while True:
            options: dict[str, Any] = {"settings": settings, "redis": self.proxy.url, "require_redis": False}
            options |= {"reader": who} if who in self.ledgers else {"writer": who}
            bus = deployment.bus(**options)
            try:
                await bus.open()
            except (BusrepError, OSError):
                await asyncio.sleep(0.02)
                continue
            break
        self.buses[who] = bus
        if who in self.ledgers:
            life: list[tuple[str, int]] = []
            self.ledgers[who].lives.append(life)
            bus.subscribe(orders)(self.loose(life) if who == "loose" else self.strict(life))
        else:
            self.writing[who] = [asyncio.create_task(self.write(bus)) for _ in range(3)]

    def loose(self, life: list[tuple[str, int]]) -> Callable[[Batch[Order]], Awaitable[None]]:
        async def handle(batch: Batch[Order]) -> None:
            await asyncio.sleep(self.dice.choice([0, 0, 0.002]))
            if self.dice.random() < 0.05:
                raise ValueError("a handler's bad moment")
            life.extend((batch.writer, token) for token in batch.tokens)

        return handle

    def strict(self, life: list[tuple[str, int]]) -> Callable[[Batch[Order]], Awaitable[None]]:
        async def handle(batch: Batch[Order]) -> None:
            rows = [(batch.writer, token) for token in batch.tokens]
            await self.effects(batch, rows)
            life.extend(rows)
            if self.dice.random() < 0.05:
                raise ValueError("after COMMIT")

        return handle

    async def effects(self, batch: Batch[Order], rows: list[tuple[str, int]]) -> None:
        fails = self.dice.random() < 0.05
        if self.deployment.store.startswith("sqlite"):
            path = self.deployment.store.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
                while True:
                    try:
                        connection.execute("BEGIN IMMEDIATE")
                        break
                    except sqlite3.OperationalError:  # an open fact of this very process
                        await asyncio.sleep(0.001)
                connection.executemany("INSERT INTO effects (writer, token) VALUES (?, ?)", rows)
                await batch.save(connection)
                if fails:
                    raise ValueError("before COMMIT")
                connection.execute("COMMIT")
            return
        async with await psycopg.AsyncConnection.connect(self.deployment.store) as asynchronous:
            async with asynchronous.cursor() as cursor:
                await cursor.executemany("INSERT INTO effects (writer, token) VALUES (%s, %s)", rows)
            await batch.save(asynchronous)
            if fails:
                raise ValueError("before COMMIT")

    async def write(self, bus: Bus) -> None:
        dice = self.dice
        while not self.stopping:
            await asyncio.sleep(dice.choice([0, 0.005, 0.02, 0.05]))
            self.number += 1
            number = self.number
            try:
                if dice.random() < 0.15:
                    await bus.publish(orders, [Order(number, "bulk")] * dice.randint(1, 60))
                    continue
                async with bus.write(orders) as fact:
                    for _ in range(dice.choice([0, 1, 1, 1, 3])):
                        fact.add(Order(number, "new"))
                    await asyncio.sleep(dice.choice([0, 0, 0.003]))
                    if dice.random() < 0.15:
                        raise ValueError("rolled back")
            except ValueError:
                pass
            except (WriterFenced, Closed):
                return
            except BusrepError:
                await asyncio.sleep(0.01)

    async def end_writing(self, who: str) -> None:
        tasks = self.writing.pop(who, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self, who: str) -> None:
        """In an orderly way, or not at all."""
        bus = self.buses.pop(who)
        orderly = self.dice.random() < 0.4
        if orderly and self.dice.random() < 0.5:
            await bus.close()
            await self.end_writing(who)
        else:
            await self.end_writing(who)
            await (bus.close() if orderly else crash(bus))
        if self.dice.random() < 0.3:  # long enough to be finished by a reader
            await asyncio.sleep(0.6)
        await self.open(who)

    async def trouble(self) -> None:
        dice, who = self.dice, self.dice.choice(sorted(self.buses))
        kind = dice.choice(["kill", "kill", "cut", "cancel", "cancel", "restart", "restart", "hole", "refuse"])
        if kind == "kill":
            with contextlib.suppress(redis.exceptions.RedisError):
                await self.client.execute_command(  # type: ignore[no-untyped-call]
                    "CLIENT", "KILL", "TYPE", dice.choice(["pubsub", "normal"])
                )
        elif kind == "cut":
            self.proxy.cut()
        elif kind == "cancel" and self.writing.get(who):
            tasks = self.writing[who]
            tasks.pop(0).cancel()
            tasks.append(asyncio.create_task(self.write(self.buses[who])))
        elif kind == "restart":
            await self.restart(who)
        elif kind == "hole":
            self.proxy.black_hole()
            await asyncio.sleep(dice.random() * 0.3)
            self.proxy.cut()
            self.proxy.heal()
        elif kind == "refuse":
            self.proxy.refuse = True
            self.proxy.cut()
            await asyncio.sleep(dice.random() * 0.3)
            self.proxy.refuse = False

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.client = redis.asyncio.Redis.from_url(self.deployment.redis)
        async with FaultyLink(self.deployment.redis) as self.proxy:
            for who in ("w1", "w2", *self.ledgers):
                await self.open(who)
            until_then = loop.time() + seconds
            while loop.time() < until_then:
                await asyncio.sleep(self.dice.random() * 0.15)
                await self.trouble()
            self.stopping = True
            for who in list(self.writing):
                await self.end_writing(who)
            for who in ("w1", "w2"):  # some were fenced, or died
                await self.buses.pop(who).close()
            last = {}
            for who in ("w1", "w2"):
                self.buses[who] = self.deployment.bus(writer=who, settings=self.settings)
                await self.buses[who].open()
                last[who] = await write(self.buses[who], 0)
            for who in self.ledgers:
                for writer, token in last.items():
                    try:
                        await self.buses[who].wait_for(orders, writer, token, timeout=40)
                    except BusrepError:
                        print(who, writer, token, self.buses[who].statistics())
                        raise
            for bus in self.buses.values():
                await bus.close()
        await self.client.aclose()


SOAK = float(os.environ.get("BUSREP_SOAK", "0"))


# A process that dies leaves its connections to the kernel; a bus that "dies" in this process, to the collector.
@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
def test_soak(either: Deployment) -> None:
    seed = int(os.environ.get("BUSREP_SEED", "0")) or (random.randrange(10**6) if SOAK else 7)
    print("seed", seed)
    create = "CREATE TABLE effects (n INTEGER PRIMARY KEY AUTOINCREMENT, writer TEXT, token BIGINT)"
    if either.store.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(either.store.removeprefix("sqlite:///"))) as connection:
            connection.execute(create)
    else:
        with psycopg.connect(either.store) as postgres:
            postgres.execute(create.replace("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGSERIAL"))
    soak = Soak(either, seed)
    run(soak.run(SOAK or 3.0), timeout=SOAK + 60)
    soak.buses.clear()
    gc.collect()

    async def check() -> None:
        rows = await facts(either)
        assert len(rows) > 50
        # Not the strict one's ledger: a crash between COMMIT and the note of it leaves a gap there. Its table tells.
        soak.ledgers["loose"].check(rows)
        if either.store.startswith("sqlite"):
            with contextlib.closing(sqlite3.connect(either.store.removeprefix("sqlite:///"))) as connection:
                effects = connection.execute("SELECT writer, token FROM effects ORDER BY n").fetchall()
        else:
            async with await psycopg.AsyncConnection.connect(either.store) as postgres:
                effects = await (await postgres.execute("SELECT writer, token FROM effects ORDER BY n")).fetchall()
        for writer in ("w1", "w2"):
            assert [one for one in effects if one[0] == writer] == [one for one in rows if one[0] == writer]

    asyncio.run(check())
