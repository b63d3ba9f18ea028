"""`batch.transaction()`: effects and the saved position in one transaction, in both runtimes, on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.options import BusOptions
from busrep.stores.blocking import open_blocking_store
from busrep.stores.interface import SavedAt
from busrep.sync.batch import EffectsStore
from busrep.testing.links import FaultyLink
from busrep.testing.pair import MemoryDeployment
from tests.asyncio.bus_conformance import AsyncioBus
from tests.shop import QUICK, Order, opened_store, orders

pytestmark = pytest.mark.servers

PATIENT = attrs.evolve(QUICK, poison_after=30.0)


@attrs.define
class Place:
    """Where a test runs: a runtime, and a database with a table of effects."""

    redis: str
    name: str
    url: str
    runtime: str

    @property
    def insert(self) -> str:
        return f"INSERT INTO bills VALUES ({'%s' if self.url.startswith('postgres') else '?'})"

    def connect(self) -> Any:
        if self.url.startswith("postgres"):
            return psycopg.connect(self.url, autocommit=True)
        return contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None))

    def ask(self, sql: str) -> list[Any]:
        with self.connect() as connection:
            cursor = connection.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def bills(self) -> list[int]:
        return [number for (number,) in self.ask("SELECT number FROM bills ORDER BY number")]

    @contextlib.contextmanager
    def bus(self, handle: Any, **options: Any) -> Iterator[Any]:
        """A durable reader. ``handle(batch)``: its handler, with asyncio a coroutine function."""
        given = {
            "name": self.name,
            "streams": [orders],
            "store": self.url,
            "reader": "r",
            "settings": PATIENT,
            **options,
        }
        if self.runtime == "threads":
            with busrep.sync.connect(self.redis, **given) as bus:

                @bus.subscribe(orders)
                def bill(batch: Any) -> None:
                    handle(batch)

                yield bus
        else:
            with AsyncioBus(self.redis, **given) as bus:
                bus.do(lambda: bus.bus.subscribe(orders)(handle))
                yield bus


@pytest.fixture(params=["asyncio", "threads"])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def place(runtime: str, redis_url: str, bus_name: str, request: pytest.FixtureRequest) -> Place:
    found = Place(redis_url, bus_name, request.getfixturevalue(request.param), runtime)
    with opened_store(found.url):
        found.ask("CREATE TABLE bills (number bigint)")
    return found


@pytest.fixture
def on_postgres(runtime: str, redis_url: str, bus_name: str, postgres_url: str) -> Place:
    found = Place(redis_url, bus_name, postgres_url, runtime)
    with opened_store(found.url):
        found.ask("CREATE TABLE bills (number bigint)")
    return found


def handler_of(place: Place, before: Callable[..., None] = lambda *_: None) -> Any:
    """A handler that bills each order, once ``before(batch, db, number)`` has returned."""

    def blocking(batch: Any) -> None:
        with batch.transaction() as db:
            for row in batch.rows:
                db.execute(place.insert, (row.number,))
                before(batch, db, row.number)

    async def coroutine(batch: Any) -> None:
        async with batch.transaction() as db:
            for row in batch.rows:
                done = db.execute(place.insert, (row.number,))
                if inspect.isawaitable(done):
                    await done
                before(batch, db, row.number)

    return blocking if place.runtime == "threads" else coroutine


def until(true: Callable[[], Any], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def write(place: Place, numbers: range) -> int:
    with busrep.sync.connect(
        place.redis, name=place.name, streams=[orders], store=place.url, writer="w", settings=QUICK
    ) as bus:
        return bus.publish(orders, [Order(number, "new") for number in numbers])[-1]


def publish_and_wait(place: Place, writer: Any, number: int) -> int:
    """The ID of a fact whose effects are saved."""
    (id,) = writer.publish(orders, [Order(number, "new")])
    until(lambda: saved(place) == id)
    return int(id)


def saved(place: Place) -> int:
    found = place.ask("SELECT position FROM busrep_readers WHERE reader = 'r' AND writer = 'w'")
    return int(found[0][0]) if found else 0


def test_the_effects_and_the_position_are_committed_together(place: Place) -> None:
    with place.bus(handler_of(place)):
        last = write(place, range(50))
        until(lambda: len(place.bills()) == 50)
        until(lambda: saved(place) == last)
    with place.bus(handler_of(place)):
        write(place, range(50, 60))
        until(lambda: len(place.bills()) >= 60)
    assert place.bills() == list(range(60))


def test_effects_that_were_lost_with_the_registration_are_made_again(place: Place) -> None:
    """As by a failover. The handler's own transaction finds it out: no look at the saved positions comes before."""
    write(place, range(1))
    with (
        busrep.sync.connect(
            place.redis, name=place.name, streams=[orders], store=place.url, writer="w", settings=QUICK
        ) as writer,
        place.bus(handler_of(place), settings=attrs.evolve(PATIENT, heartbeat=600.0)),
    ):
        last = writer.publish(orders, [Order(number, "new") for number in range(1, 3)])[-1]
        until(lambda: saved(place) == last)
        with place.connect() as db:
            for statement in ("BEGIN", "DELETE FROM bills", "DELETE FROM busrep_readers", "COMMIT"):
                db.execute(statement)
        writer.publish(orders, [Order(3, "new")])
        until(lambda: len(place.bills()) == 4)
    assert place.bills() == list(range(4))


def test_a_handler_never_works_on_a_state_without_the_fact_before(place: Place) -> None:
    """A failover took it back with its position. The save at the end is too late: if another process under this name
    handles that fact again meanwhile, the position is right then."""
    states = []

    def look(_: Any, __: Any, number: int) -> None:
        states.append((number, place.bills()))

    settings = attrs.evolve(PATIENT, heartbeat=600.0, handler_batch_rows=1)
    with (
        busrep.sync.connect(
            place.redis, name=place.name, streams=[orders], store=place.url, writer="w", settings=QUICK
        ) as writer,
        place.bus(handler_of(place, look), settings=settings),
    ):
        first, second = (publish_and_wait(place, writer, number) for number in range(2))
        with place.connect() as db:
            for statement in (
                "BEGIN",
                "DELETE FROM bills WHERE number = 1",
                f"UPDATE busrep_readers SET position = {first} WHERE position = {second}",
                "COMMIT",
            ):
                db.execute(statement)
        publish_and_wait(place, writer, 2)
    assert place.bills() == list(range(3))
    assert all(bills == list(range(number)) for number, bills in states)


def test_a_position_that_another_process_saved_is_no_failure_of_the_handler(place: Place) -> None:
    """It saved one below these rows. The handler may still fail as often as without that."""
    calls, bill = [], handler_of(place)

    def trouble(batch: Any) -> None:
        if batch.writer == "w" and batch.rows[0].number == 2:
            calls.append(batch.after)
            if len(calls) == 1:
                place.ask(f"UPDATE busrep_readers SET position = {batch.after} WHERE writer = 'w'")
            elif len(calls) == 2:
                raise ValueError("once")

    def blocking(batch: Any) -> None:
        trouble(batch)
        bill(batch)

    async def coroutine(batch: Any) -> None:
        trouble(batch)
        await bill(batch)

    handle = blocking if place.runtime == "threads" else coroutine
    settings = attrs.evolve(QUICK, heartbeat=600.0, save_every=600.0, handler_retries=1)
    given = {"name": place.name, "streams": [orders], "store": place.url, "settings": QUICK}
    with (
        busrep.sync.connect(place.redis, writer="w", **given) as writer,
        busrep.sync.connect(place.redis, writer="v", **given) as other,
        place.bus(handle, settings=settings) as bus,
    ):
        first = publish_and_wait(place, writer, 0)
        (between,) = other.publish(orders, [Order(1, "new")])
        until(lambda: bus.positions()["orders"]["w"] >= between)
        assert saved(place) == first
        last = publish_and_wait(place, writer, 2)
        assert bus.statistics()["reader"]["stopped"] == {}
    assert len(calls) == 3
    assert place.bills() == list(range(3))
    assert first < between < last


def test_an_exception_rolls_both_back(place: Place) -> None:
    failures = []

    def fail(batch: Any, db: Any, number: int) -> None:
        if number == 7 and len(failures) < 5:
            failures.append(number)
            raise ConnectionResetError("another server")

    with place.bus(handler_of(place, fail)) as bus:
        write(place, range(10))
        until(lambda: len(place.bills()) == 10)
        assert bus.statistics()["reader"]["poison_rows"] == 0
    assert len(failures) == 5
    assert place.bills() == list(range(10))


@pytest.mark.parametrize("late", [False, True], ids=["in the block", "after it"])
@pytest.mark.parametrize("runtime", ["asyncio"], indirect=True)
def test_a_deadline_of_the_handlers_own_rolls_both_back(place: Place, late: bool) -> None:
    """One made with ``task.cancel()``, which counts on as a cancellation of the task."""
    calls = []

    async def handle(batch: Any) -> None:
        calls.append(batch.position)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        try:
            async with batch.transaction() as db:
                for row in batch.rows:
                    done = db.execute(place.insert, (row.number,))
                    if inspect.isawaitable(done):
                        await done
                if len(calls) == 1 and not late:
                    task.cancel()
                    await asyncio.sleep(60.0)
            if len(calls) == 1 and late:
                task.cancel()
                await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            raise TimeoutError("too slow") from None

    with place.bus(handle) as bus:
        last = write(place, range(10))
        until(lambda: saved(place) == last)
        write(place, range(10, 20))
        until(lambda: len(place.bills()) >= 20)
        assert bus.statistics()["reader"]["handler_failures"] == 1
        assert bus.statistics()["reader"]["stopped"] == {}
    assert place.bills() == list(range(20))


def test_a_block_that_ends_the_transaction_itself_is_told(place: Place) -> None:
    async def coroutine(batch: Any) -> None:
        async with batch.transaction() as db:
            done = db.execute("ROLLBACK")
            if inspect.isawaitable(done):
                await done

    def blocking(batch: Any) -> None:
        with batch.transaction() as db:
            db.execute("ROLLBACK")

    impatient = attrs.evolve(QUICK, handler_retries=0)
    with place.bus(blocking if place.runtime == "threads" else coroutine, settings=impatient) as bus:
        write(place, range(1))
        until(lambda: bus.statistics()["reader"]["stopped"])
        assert "was ended inside its block" in bus.statistics()["reader"]["stopped"]["orders w"]


def test_without_a_reader_name_it_says_what_to_pass(place: Place) -> None:
    impatient = attrs.evolve(QUICK, handler_retries=0)
    with place.bus(handler_of(place), settings=impatient, reader=None, start="earliest") as bus:
        write(place, range(1))
        until(lambda: bus.statistics()["reader"]["stopped"])
        assert "pass reader= and store=" in bus.statistics()["reader"]["stopped"]["orders w"]
    assert place.bills() == []


def test_a_second_block_is_refused_before_it_has_effects(place: Place) -> None:
    async def coroutine(batch: Any) -> None:
        await once(batch)
        await once(batch)

    def blocking(batch: Any) -> None:
        once(batch)
        once(batch)

    once = handler_of(place)
    with place.bus(blocking if place.runtime == "threads" else coroutine):
        last = write(place, range(5))
        until(lambda: saved(place) == last)
    assert place.bills() == list(range(5))


def test_only_the_last_handler_of_a_stream_may_save(place: Place) -> None:
    """What it saved is not handed out again: another one that came after it and failed would lose the rows."""
    failures, seen = [ConnectionResetError("another server")], []

    def beside(batch: Any) -> None:
        if failures:
            raise failures.pop()
        seen.extend(row.number for row in batch.rows)

    def subscribe(bus: Any, handler: Any) -> None:
        if place.runtime == "asyncio":
            bus.do(lambda: bus.bus.subscribe(orders)(handler))
        else:
            bus.subscribe(orders)(handler)

    with place.bus(handler_of(place), settings=attrs.evolve(QUICK, handler_retries=0)) as bus:
        subscribe(bus, beside)
        write(place, range(1))
        until(lambda: bus.statistics()["reader"]["stopped"])
        assert "subscribe the one that saves last" in bus.statistics()["reader"]["stopped"]["orders w"]
    assert (place.bills(), seen, saved(place)) == ([], [], 0)
    with place.bus(beside if place.runtime == "threads" else lambda batch: beside(batch)) as bus:
        subscribe(bus, handler_of(place))
        last = write(place, range(1, 5))
        until(lambda: saved(place) == last)
    assert (place.bills(), seen, failures) == (list(range(5)), list(range(5)), [])


def test_threads_that_ask_first_at_the_same_time_share_a_store(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loops in threads of their own, at the start: one of two stores would never be closed."""
    with opened_store(sqlite_url):
        pass
    opened: list[Any] = []
    opening = threading.Event()

    def open_slowly(*args: Any, **options: Any) -> Any:
        store = open_blocking_store(*args, **options)
        opened.append(store)
        opening.wait(0.1)
        return store

    monkeypatch.setattr("busrep.sync.batch.open_blocking_store", open_slowly)
    at = SavedAt("r", "orders", "w", 0, "e")
    effects = EffectsStore(BusOptions(name="shop", streams=[orders], store=sqlite_url, settings=QUICK))
    threads = [threading.Thread(target=effects.transaction, args=[at]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    effects.close()
    assert len(opened) == 1


def test_a_memory_store_has_no_connections() -> None:
    async def main() -> None:
        errors: list[Any] = []
        async with (
            MemoryDeployment(orders) as deployment,
            deployment.bus(writer="w") as w,
            deployment.bus(reader="r") as bus,
        ):

            @bus.subscribe(orders)
            async def handle(batch: Any) -> None:
                try:
                    async with batch.transaction():
                        pass
                except busrep.ConfigError as error:
                    errors.append(str(error))

            (token,) = await w.publish(orders, [Order(1, "new")])
            await bus.wait_for(orders, "w", token)
        assert errors == ["the memory store has no connections: use an SQLite or PostgreSQL store"]

    asyncio.run(main())


def test_connections_that_the_server_ends_are_replaced(on_postgres: Place) -> None:
    """As at a restart of the server, in the middle of the block, between two batches, and at COMMIT."""
    ended = []

    def end(batch: Any, db: Any, number: int) -> None:
        if number % 10 == 3 and number not in ended:
            ended.append(number)
            on_postgres.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND datname = current_database() AND application_name = 'busrep'"
            )

    write(on_postgres, range(50))
    small = attrs.evolve(PATIENT, handler_batch_rows=5)
    with on_postgres.bus(handler_of(on_postgres, end), settings=small) as bus:
        until(lambda: len(on_postgres.bills()) >= 50)
        assert bus.statistics()["reader"]["stopped"] == {}
    assert on_postgres.bills() == list(range(50))
    assert len(ended) == 5


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_without_an_answer_is_looked_up(on_postgres: Place, arrives: bool) -> None:
    with FaultyLink.in_thread(on_postgres.url) as link:
        cuts = []

        def cut(batch: Any, db: Any, number: int) -> None:
            if number == 4 and not cuts:
                cuts.append(number)
                link.cut_when(b"COMMIT", after=arrives)

        with on_postgres.bus(handler_of(on_postgres, cut), reader_store=link.url):
            last = write(on_postgres, range(5))
            until(lambda: saved(on_postgres) == last and len(on_postgres.bills()) >= 5)
            last = write(on_postgres, range(5, 10))
            until(lambda: saved(on_postgres) == last)
        assert link.counts["cut_when"]
    assert on_postgres.bills() == list(range(10))
