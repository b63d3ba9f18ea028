"""The bus for threads: what every bus does, and what only this one has to do."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import threading
from typing import Any

import attrs
import psycopg
import pytest
import redis as redis_py

from busrep.core.commands import Replicate
from busrep.errors import Closed, ConfigError, HandlerFailed, Unavailable
from busrep.sync import Bus, connect
from busrep.testing.links import FaultyLink
from tests.asyncio.bus_conformance import QUICK, AsyncioBus, BusConformance, Deployment, Seen, orders, until, write
from tests.shop import make_tables
from tests.sync.test_writing import Wire

pytestmark = pytest.mark.servers


class TestThreads(BusConformance):
    def make(self, redis: str, **options: Any) -> Any:
        return connect(redis, **options)


class TestAsyncio(BusConformance):
    def make(self, redis: str, **options: Any) -> Any:
        return AsyncioBus(redis, **options)


@pytest.fixture
def deployment(redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, sqlite_url, connect)
    make_tables(found.store)
    return found


def test_handlers_are_called_in_one_thread_one_at_a_time(deployment: Deployment) -> None:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(deployment.bus(writer=f"w{number}")) for number in range(3)]
        reader = stack.enter_context(deployment.bus())
        inside, most, callers = 0, 0, set()

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            callers.add(threading.current_thread().name)
            reader.positions()  # the loop goes on meanwhile
            inside -= 1

        for writer in writers:
            reader.wait_for(orders, writer.writer, write(writer, 1, 2, 3))
        assert (most, callers) == (1, {"busrep-handle"})


def test_exactly_once_on_a_sqlite_connection_of_the_handler_s_thread(deployment: Deployment) -> None:
    """Which no other thread may use: the position is saved where the handler runs."""
    path = deployment.store.removeprefix("sqlite:///")
    with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:
        seen, own = Seen(), threading.local()

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            if not hasattr(own, "connection"):
                own.connection = sqlite3.connect(path, timeout=10)
            with own.connection:
                own.connection.execute("CREATE TABLE IF NOT EXISTS effects (n INTEGER)")
                own.connection.executemany("INSERT INTO effects VALUES (?)", [(row.number,) for row in batch.rows])
                batch.save(own.connection)
            own.connection.close()
            del own.connection
            seen(batch)

        reader.wait_for(orders, "w1", write(writer, 1, 2, 3))
        assert seen.numbers == [1, 2, 3]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT n FROM effects").fetchall() == [(1,), (2,), (3,)]


def test_saving_wants_a_blocking_connection(deployment: Deployment, postgres_url: str) -> None:
    with deployment.bus(writer="w1") as writer, deployment.bus(reader="r") as reader:
        errors: list[ConfigError] = []

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            for connection in (object.__new__(psycopg.AsyncConnection), object()):
                with pytest.raises(ConfigError) as caught:
                    batch.save(connection)
                errors.append(caught.value)

        reader.wait_for(orders, "w1", write(writer, 1))
        assert "blocking" in str(errors[0])
        assert "sqlite3.Connection" in str(errors[1])


def test_a_handler_that_wants_to_exit_has_failed(deployment: Deployment) -> None:
    with (
        deployment.bus(writer="w1") as writer,
        deployment.bus(settings=attrs.evolve(QUICK, handler_retries=0)) as reader,
    ):

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            raise SystemExit("enough")

        with pytest.raises(HandlerFailed, match="SystemExit enough"):
            reader.wait_for(orders, "w1", write(writer, 1))
        assert reader.positions()["orders"]["w1"] == 0


def test_coroutine_functions_are_refused(deployment: Deployment) -> None:
    async def handle(batch: Any) -> None:
        await asyncio.sleep(0)

    with deployment.bus() as reader:
        for decorate in (reader.subscribe(orders), reader.on_reset(), reader.on_missed(), reader.on(Replicate)):
            with pytest.raises(ConfigError, match="plain"):
                decorate(handle)


def test_a_handler_may_close_the_bus(deployment: Deployment) -> None:
    reader = deployment.bus()
    with deployment.bus(writer="w1") as writer:

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            reader.close()

        write(writer, 1)
        until(lambda: reader.state == "closed")
    with pytest.raises(Closed):
        reader.positions()


def test_who_waits_is_told_when_the_bus_closes(deployment: Deployment) -> None:
    reader = deployment.bus()
    reader.open()
    told: list[type[BaseException]] = []

    def wait() -> None:
        try:
            reader.wait_for(orders, "w1", 99, timeout=60)
        except BaseException as error:
            told.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: reader.reading is not None and reader.statistics()["reader"]["waiting"] == 1)
    reader.close()
    waiting.join()
    assert told == [Closed]


@pytest.mark.parametrize("what", ["wait_for", "follow"])
def test_ctrl_c_while_waiting(deployment: Deployment, what: str) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
        reader.wait_for(orders, "w1", 0)
        interrupting = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            if what == "wait_for":
                reader.wait_for(orders, "w1", 99, timeout=60)
            else:
                next(reader.follow(orders))
        interrupting.join()
        until(lambda: reader.statistics()["reader"]["waiting"] == 0)
        seen = Seen()
        reader.subscribe(orders)(seen)
        reader.wait_for(orders, "w1", write(writer, 1))
        assert seen.numbers == [1]


def test_many_threads_start_one_reading_half(deployment: Deployment) -> None:
    with deployment.bus(writer="w1") as bus:
        threads = [threading.Thread(target=lambda: bus.subscribe(orders)(Seen())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.name for one in threading.enumerate()].count("busrep-read") == 1
    assert not [one.name for one in threading.enumerate() if one.name.startswith("busrep")]


def test_reading_begins_once_redis_is_there(deployment: Deployment) -> None:
    with FaultyLink.in_thread(deployment.redis) as link, deployment.bus(redis=link.url) as reader:
        link.refuse = True
        with pytest.raises(Unavailable):
            reader.subscribe(orders)
        link.refuse = False
        seen = Seen()
        reader.subscribe(orders)(seen)
        with deployment.bus(writer="w1") as writer:
            reader.wait_for(orders, "w1", write(writer, 1))
        assert seen.numbers == [1]


def test_a_writer_that_reads_answers_whoever_asks_for_positions(deployment: Deployment) -> None:
    settings = attrs.evolve(QUICK, heartbeat=600.0)
    with Wire(deployment.redis, deployment.name) as wire, deployment.bus(writer="w1", settings=settings) as bus:
        bus.subscribe(orders)(Seen())
        last = write(bus, 1)
        wire.tokens(last)
        before = len(wire.lines)
        with redis_py.Redis.from_url(deployment.redis) as client:
            client.publish(deployment.name, Replicate().format())
        wire.read(lambda lines: f"POSITION orders w1 {last} {last}" in lines[before:])


def test_a_client_may_be_passed_in_place_of_a_url(deployment: Deployment) -> None:
    with redis_py.Redis.from_url(deployment.redis) as client:
        with deployment.bus(writer="w1", redis=client) as writer, deployment.bus(redis=client) as reader:
            reader.wait_for(orders, "w1", write(writer, 1))

            class Special(redis_py.Connection):
                pass

            pool = redis_py.ConnectionPool(Special, **client.connection_pool.connection_kwargs)
            special = redis_py.Redis(connection_pool=pool)
            with deployment.bus(writer="w2", redis=special) as other:
                reader.wait_for(orders, "w2", write(other, 2))
                with pytest.raises(ConfigError, match="Special"):
                    other.subscribe(orders)


def test_a_mere_reader_connects_when_it_reads(deployment: Deployment) -> None:
    reader = connect("redis://127.0.0.1:1", name="x", streams=[orders], store=deployment.store)
    assert isinstance(reader, Bus)
    with reader:
        assert reader.positions() == {}
        with pytest.raises(Unavailable):
            reader.follow(orders)
