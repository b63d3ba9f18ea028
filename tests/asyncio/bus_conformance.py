"""What a bus does, in whatever runtime: tests/sync/test_bus.py runs this class over threads and over asyncio.

It is written as blocking code. `AsyncioBus` makes an asyncio bus look like one for threads: its loop has a thread of
its own, and handlers are called in threads, as a program would do with blocking work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest

import busrep
from busrep import Stream
from busrep.core.application_commands import RemoteServerUp, UserIp
from busrep.errors import (
    BusrepError,
    Closed,
    ConfigError,
    HandlerFailed,
    NotAWriter,
    PositionTooOld,
    ReaderMoved,
    UnknownStream,
    WaitTimeout,
    WriterFenced,
)
from busrep.stores.blocking import BlockingStore
from busrep.stores.planned import PlannedStore
from busrep.testing.links import FaultyLink
from tests.shop import QUICK, STREAMS, Order, make_tables, opened_store, orders, payments, typing


class AsyncioBus:
    """An asyncio bus with the methods of one for threads."""

    def __init__(self, redis: str, **options: Any) -> None:
        self._redis, self._options = redis, options

    def __enter__(self) -> AsyncioBus:
        opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        async def live() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            try:
                async with busrep.connect(self._redis, **self._options) as self.bus:
                    opened.put(None)
                    await self._stop.wait()
            except BaseException as error:
                opened.put(error)

        self._thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
        self._thread.start()
        if (error := opened.get()) is not None:
            raise error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.call(self.bus.close())
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def call(self, work: Any) -> Any:
        """Raises Closed when the loop ends before it is done, or has ended."""

        async def wait() -> Any:
            return await work

        waiting = wait()
        try:
            done = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:
            waiting.close()
            work.close()
            raise Closed from None
        while not concurrent.futures.wait([done], 0.1).done:
            if not self._thread.is_alive() and not done.done():  # the loop has ended, and will never begin it
                waiting.close()
                work.close()
                raise Closed
        return done.result()

    def do(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async def do() -> Any:
            return function(*args, **options)

        if not self._thread.is_alive():  # closed: it says so without a loop
            return function(*args, **options)
        return self.call(do())

    @contextlib.contextmanager
    def write(self, *streams: Stream[Any], connection: Any = None) -> Iterator[Any]:
        fact = self.do(self.bus.write, *streams, connection=connection)
        self.call(fact.__aenter__())
        try:
            yield fact
        except BaseException as error:
            self.call(fact.__aexit__(type(error), error, None))
            raise
        self.call(fact.__aexit__(None, None, None))

    def __getattr__(self, name: str) -> Any:  # publish, settle, wait_for, linear_position, send: coroutines
        method = getattr(self.bus, name)
        if name in ("publish", "settle", "wait_for", "linear_position", "send"):
            return lambda *args, **options: self.call(method(*args, **options))
        return lambda *args, **options: self.do(method, *args, **options)

    def _decorator(self, name: str, *args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        register = self.do(getattr(self.bus, name), *args)

        def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
            async def handle(*given: Any) -> None:
                await asyncio.to_thread(handler, *[self._batch(one) for one in given])

            self.do(register, handle)
            return handler

        return decorate

    def subscribe(self, *args: Any) -> Any:
        return self._decorator("subscribe", *args)

    def on(self, *args: Any) -> Any:
        return self._decorator("on", *args)

    def on_reset(self, *args: Any) -> Any:
        return self._decorator("on_reset", *args)

    def on_missed(self, *args: Any) -> Any:
        return self._decorator("on_missed", *args)

    def _batch(self, given: Any) -> Any:
        return _BlockingBatch(self, given) if isinstance(given, busrep.Batch) else given

    def follow(self, *streams: Stream[Any]) -> Iterator[Any]:
        iterator = self.do(self.bus.follow, *streams)

        def follow() -> Iterator[Any]:
            try:
                while True:
                    yield self._batch(self.call(anext(iterator)))
            finally:
                self.call(iterator.aclose())

        return follow()


class _BlockingBatch:
    def __init__(self, bus: AsyncioBus, batch: busrep.Batch[Any]) -> None:
        self._bus, self._of = bus, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def save(self, connection: Any) -> None:
        self._bus.call(self._of.save(connection))


@attrs.define
class Deployment:
    """Buses of one name on one Redis and one store."""

    redis: str
    name: str
    store: str
    make: Callable[..., Any]

    def bus(self, **options: Any) -> Any:
        given: dict[str, Any] = {
            "name": self.name,
            "streams": STREAMS,
            "store": self.store,
            "settings": QUICK,
            "start": "earliest",  # "now" is some moment after subscribe(): a row written at once may lie before it
            **options,
        }
        return self.make(given.pop("redis", self.redis), **given)

    def table(self) -> AbstractContextManager[BlockingStore]:
        return opened_store(self.store)


@attrs.define
class Seen:
    """What a handler was given: (writer, token, number) in order."""

    facts: list[tuple[str, int, int]] = attrs.field(factory=list)

    def __call__(self, batch: Any) -> None:
        self.facts += [(batch.writer, token, row.number) for token, row in zip(batch.tokens, batch.rows, strict=True)]

    @property
    def numbers(self) -> list[int]:
        return [number for _, _, number in self.facts]


def write(bus: Any, *numbers: int, stream: Stream[Order] = orders) -> int:
    """One fact per number; the last ID."""
    last = 0
    for number in numbers:
        with bus.write(stream) as fact:
            fact.add(Order(number, "new"))
        last = fact.id
    return last


def until(true: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait for something that has no event of its own (a counter in statistics)."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


class BusConformance:
    """Subclasses say how a bus is made: ``make(redis, **options)`` gives a context manager."""

    def make(self, redis: str, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def deployment(self, redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
        found = Deployment(redis_url, bus_name, sqlite_url, self.make)
        make_tables(found.store)
        return found

    @pytest.fixture
    def on_postgres(self, redis_url: str, bus_name: str, postgres_url: str) -> Deployment:
        found = Deployment(redis_url, bus_name, postgres_url, self.make)
        make_tables(found.store)
        return found

    # --- writing and reading

    def test_facts_arrive_whole_in_order_and_typed(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus(writer="w2") as reader:
            batches: list[Any] = []
            reader.subscribe(orders)(batches.append)
            with writer.write(orders) as fact:
                fact.add(Order(1, "new"))
                fact.add(Order(1, "paid"))
            ids = writer.publish(orders, [Order(n, "bulk") for n in range(2, 502)])
            reader.wait_for(orders, "w1", ids[-1])
            facts = [one for batch in batches for one in batch.facts()]
            assert facts[0] == (fact.id, [Order(1, "new"), Order(1, "paid")])
            assert facts[1:] == [(id, [Order(n, "bulk")]) for n, id in enumerate(ids, start=2)]
            assert batches[0].stream is orders
            assert reader.positions()["orders"]["w1"] == ids[-1]
            # Its own is what was published, as far as Redis has said so: that may come behind the rows.
            until(lambda: writer.positions()["orders"]["w1"] == ids[-1])

    def test_several_handlers_and_streams(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            first, second = Seen(), Seen()
            reader.subscribe(orders, payments)(first)
            reader.subscribe(orders)(second)
            reader.wait_for(orders, "w1", write(writer, 1, 2))
            reader.wait_for(payments, "w1", write(writer, 3, stream=payments))
            assert (first.numbers, second.numbers) == ([1, 2, 3], [1, 2])

    def test_a_rolled_back_fact_is_never_seen_and_holds_nothing_up(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            write(writer, 1)
            with pytest.raises(KeyError):
                with writer.write(orders) as fact:
                    fact.add(Order(2, "never"))
                    raise KeyError
            reader.wait_for(orders, "w1", write(writer, 4))
            assert seen.numbers == [1, 4]
            # An ID without a row moves the position all the same.
            with contextlib.suppress(KeyError):
                with writer.write(orders) as fact:
                    raise KeyError
            reader.wait_for(orders, "w1", fact.id)

    def test_an_open_fact_holds_back_later_ones(self, on_postgres: Deployment) -> None:
        with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            with writer.write(orders) as fact:
                fact.add(Order(1, "slow"))
                later = write(writer, 2, 3)
                with pytest.raises(WaitTimeout):
                    reader.wait_for(orders, "w1", later, timeout=0.3)
                assert seen.numbers == []
            reader.wait_for(orders, "w1", later)
            assert seen.numbers == [1, 2, 3]

    def test_one_fact_of_two_streams_is_one_transaction(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            seen = Seen()
            reader.subscribe(orders, payments)(seen)
            with writer.write(orders, payments) as fact:
                fact.add(Order(1, "new"))
                fact.add(Order(2, "due"), stream=payments)
            reader.wait_for(orders, "w1", fact.ids["orders"])
            reader.wait_for(payments, "w1", fact.ids["payments"])
            assert sorted(seen.numbers) == [1, 2]

    def test_facts_on_the_caller_s_connection(self, on_postgres: Deployment) -> None:
        with (
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus() as reader,
            psycopg.connect(on_postgres.store) as connection,
        ):
            seen = Seen()
            reader.subscribe(orders)(seen)
            with writer.write(orders, connection=connection) as fact:
                fact.add(Order(1, "ours"))
            reader.wait_for(orders, "w1", fact.id)
            for number, commit in ((2, True), (3, False), (4, True)):
                connection.execute("SELECT 1")
                with writer.write(orders, connection=connection) as fact:
                    fact.add(Order(number, "joined"))
                (connection.commit if commit else connection.rollback)()
                writer.settle()
                reader.wait_for(orders, "w1", fact.id)
            assert seen.numbers == [1, 2, 4]

    # --- the own facts

    def test_the_own_facts_count_as_handled_and_are_not_delivered(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as bus, deployment.bus(writer="w2") as other:
            seen = Seen()
            bus.subscribe(orders)(seen)
            mine = write(bus, 1, 2)
            bus.wait_for(orders, "w1", mine)
            bus.wait_for(orders, "w1", 10**9)  # at once, whatever it is
            bus.wait_for(orders, "w2", write(other, 3))
            until(lambda: bus.positions()["orders"].get("w1", 0) >= mine)
            assert seen.numbers == [3]

    def test_the_own_facts_are_delivered_if_asked_for(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1", own=True) as bus:
            seen = Seen()
            bus.subscribe(orders)(seen)
            bus.wait_for(orders, "w1", write(bus, 1, 2))
            assert seen.numbers == [1, 2]

    def test_what_a_dead_predecessor_committed_reaches_the_local_handlers(self, deployment: Deployment) -> None:
        with deployment.table() as store:
            claim = store.claim("w1", ["orders", "payments"], timeout=5)
            (token,) = store.reserve("orders", 1)
            transaction = store.transaction(claim)
            transaction.begin()
            transaction.insert("orders", [(token, [], [b'[7,"late"]'])])
            transaction.commit()
        with deployment.bus(writer="w1", reader="r") as bus:
            seen = Seen()
            bus.subscribe(orders)(seen)
            mine = write(bus, 8)
            until(lambda: seen.numbers == [7])
            until(lambda: bus.positions()["orders"].get("w1", 0) >= mine)
        with deployment.table() as store:
            assert store.load_reader("r").positions["orders", "w1"] == mine

    def test_a_writer_that_lost_its_name_follows_it_as_any_other(self, on_postgres: Deployment) -> None:
        with on_postgres.bus(writer="w1") as former:
            seen = Seen()
            former.subscribe(orders)(seen)
            former.wait_for(payments, "w1", write(former, 1))
            with on_postgres.bus(writer="w1") as successor:
                with pytest.raises(WriterFenced):
                    write(former, 2)
                last = write(successor, 3)
                former.wait_for(orders, "w1", last)
                assert seen.numbers == [3]

    # --- waiting

    def test_waiting_for_one_writer(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as w1, deployment.bus(writer="w2") as w2, deployment.bus() as reader:
            last = write(w1, 1)
            reader.wait_for(orders, "w1", last)
            reader.wait_for(orders, "w2", write(w2, 2, 3, 4))
            with pytest.raises(WaitTimeout) as caught:
                reader.wait_for(orders, "w1", 10**9, timeout=0.05)
            assert caught.value.token == 10**9
            assert reader.statistics()["reader"]["waiting"] == 0

    def test_an_idle_writer_follows_so_that_nobody_waits_for_it(self, deployment: Deployment) -> None:
        with deployment.bus(writer="idle"), deployment.bus(writer="busy") as busy, deployment.bus() as reader:
            last = write(busy, 1, 2, 3)
            reader.wait_for(orders, "idle", last)
            until(lambda: reader.linear_position(orders) >= last)
            until(lambda: busy.linear_position(orders) >= last)
            with pytest.raises(ConfigError, match="linear"):
                reader.linear_position(typing)

    # --- what is lost on the way

    def test_killed_links_lose_nothing(self, deployment: Deployment) -> None:
        with FaultyLink.in_thread(deployment.redis) as link, deployment.bus(writer="w1") as writer:
            with deployment.bus(redis=link.url) as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                for number in range(60):
                    last = write(writer, number)
                    if number % 20 == 10:
                        link.cut()
                reader.wait_for(orders, "w1", last, timeout=10)
                assert seen.numbers == list(range(60))

    def test_a_half_open_link_of_the_writer_loses_nothing(self, deployment: Deployment) -> None:
        settings = attrs.evolve(QUICK, redis_timeout=0.3)
        with (
            FaultyLink.in_thread(deployment.redis) as link,
            # On a busy machine the first connection may take longer than that: it is tried again.
            deployment.bus(writer="w1", redis=link.url, settings=settings, require_redis=False) as writer,
            deployment.bus() as reader,
        ):
            seen = Seen()
            reader.subscribe(orders)(seen)
            reader.wait_for(orders, "w1", write(writer, 0))
            link.black_hole()
            last = write(writer, 1, 2, 3)
            link.cut()
            link.heal()
            reader.wait_for(orders, "w1", last, timeout=10)
            assert seen.numbers == [0, 1, 2, 3]

    def test_a_slow_handler_does_not_stop_the_writer_or_the_link(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus(writer="w2") as reader:
            entered, leave, seen = threading.Event(), threading.Event(), Seen()

            @reader.subscribe(orders)
            def slow(batch: Any) -> None:
                entered.set()
                leave.wait()
                seen(batch)

            last = write(writer, 1)
            entered.wait()
            # Long enough for a writer, or a link, to count as silent.
            time.sleep((QUICK.silent_after_beats + 2) * QUICK.heartbeat)
            with deployment.table() as store:
                assert all(one.registered for one in store.known() if one.writer == "w2")
            writer.wait_for(orders, "w2", write(reader, 2))
            leave.set()
            reader.wait_for(orders, "w1", last)
            assert seen.numbers == [1]

    def test_a_silent_writer_is_finished_from_the_table(self, deployment: Deployment) -> None:
        with deployment.table() as store:
            claim = store.claim("dead", ["orders"], timeout=5)
            (token,) = store.reserve("orders", 1)
            with deployment.bus() as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                reader.wait_for(orders, "dead", 0)
                transaction = store.transaction(claim)
                transaction.begin()
                transaction.insert("orders", [(token, [], [b'[7,"late"]'])])
                transaction.commit()  # and nobody publishes it
                reader.wait_for(orders, "dead", token, timeout=10)
                assert seen.numbers == [7]
            with pytest.raises(WriterFenced):
                store.check_claim(claim)

    # --- durable readers

    def test_a_durable_reader_goes_on_where_it_was(self, deployment: Deployment) -> None:
        first, second = Seen(), Seen()
        with deployment.bus(writer="w1") as writer:
            write(writer, 1)
            with deployment.bus(reader="billing") as reader:
                reader.subscribe(orders)(first)
                reader.wait_for(orders, "w1", write(writer, 2))
            write(writer, 3)
            with deployment.bus(reader="billing") as reader:
                reader.subscribe(orders)(second)
                reader.wait_for(orders, "w1", write(writer, 4))
        assert (first.numbers, second.numbers) == ([1, 2], [3, 4])

    def test_where_a_reader_begins(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer:
            last = write(writer, 1, 2, 3)
            with deployment.table() as store:
                until(lambda: any(one.stream == "orders" and one.position >= last for one in store.known()))
            for start, expected in (("now", []), ("earliest", [1, 2, 3]), ({"orders": {"w1": 2}}, [3])):
                with deployment.bus(start=start) as reader:
                    seen = Seen()
                    reader.subscribe(orders)(seen)
                    reader.wait_for(orders, "w1", last)
                    assert seen.numbers == expected

    def test_exactly_once_saves_in_the_handler_s_transaction(self, on_postgres: Deployment) -> None:
        with psycopg.connect(on_postgres.store) as connection:
            connection.execute("CREATE TABLE effects (n int)")
        with on_postgres.bus(writer="w1") as writer:
            last = write(writer, *range(20))
            failures = iter([True, False, True, False])
            with (
                psycopg.connect(on_postgres.store) as connection,
                on_postgres.bus(reader="billing", settings=attrs.evolve(QUICK, handler_batch_rows=5)) as reader,
            ):

                @reader.subscribe(orders)
                def handle(batch: Any) -> None:
                    with connection.transaction():
                        for row in batch.rows:
                            connection.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                        batch.save(connection)
                    if next(failures, False):
                        raise OSError("the COMMIT went through, its answer was lost")

                reader.wait_for(orders, "w1", last)
        with psycopg.connect(on_postgres.store) as connection:
            numbers = [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY n")]
        assert numbers == list(range(20))

    def test_two_processes_under_one_reader_name_are_found_out(self, on_postgres: Deployment) -> None:
        with psycopg.connect(on_postgres.store) as connection:
            connection.execute("CREATE TABLE effects (n int)")
        moved: list[ReaderMoved] = []

        def follow(bus: Any, connection: Any) -> None:
            @bus.subscribe(orders)
            def handle(batch: Any) -> None:
                try:
                    with connection.transaction():
                        for row in batch.rows:
                            connection.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                        batch.save(connection)
                except ReaderMoved as error:
                    moved.append(error)
                    raise

        settings = attrs.evolve(QUICK, save_every=600.0)
        with (
            psycopg.connect(on_postgres.store) as a,
            psycopg.connect(on_postgres.store) as b,
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus(reader="twin", settings=settings) as one,
            on_postgres.bus(reader="twin", settings=settings) as two,
        ):
            follow(one, a)
            follow(two, b)
            for bus in (one, two):  # both have read where the name was, before it moves
                bus.linear_position(orders)
            last = write(writer, *range(30))
            one.wait_for(orders, "w1", last)
            two.wait_for(orders, "w1", last)
        with psycopg.connect(on_postgres.store) as connection:
            numbers = [row[0] for row in connection.execute("SELECT n FROM effects ORDER BY n")]
        assert numbers == list(range(30))  # exactly once, whoever did it
        assert moved

    def test_saving_needs_a_durable_reader(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            errors: list[Exception] = []

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                try:
                    batch.save(None)
                except ConfigError as error:
                    errors.append(error)

            reader.wait_for(orders, "w1", write(writer, 1))
            assert "reader=" in str(errors[0])

    # --- poison

    def test_a_handler_that_raises_is_called_again_with_the_same_rows(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            calls: list[list[int]] = []

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                calls.append([row.number for row in batch.rows])
                if len(calls) < 3:
                    raise OSError("not now")

            reader.wait_for(orders, "w1", write(writer, 1))
            assert calls == [[1], [1], [1]]

    def test_a_poison_row_stops_its_writer_loudly_and_the_others_flow(self, deployment: Deployment) -> None:
        seen, poisoned = Seen(), threading.Event()
        settings = attrs.evolve(QUICK, handler_retries=1)
        with (
            deployment.bus(writer="w1") as w1,
            deployment.bus(writer="w2") as w2,
            deployment.bus(settings=settings) as reader,
        ):
            last = write(w1, 1, 2, 3, 4)

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                if not poisoned.is_set() and any(row.number == 3 for row in batch.rows):
                    raise ValueError("poison")
                seen(batch)

            with pytest.raises(HandlerFailed) as caught:
                reader.wait_for(orders, "w1", last)
            assert (caught.value.token, str(caught.value.error)) == (3, "poison")
            assert seen.numbers == [1, 2]
            reader.wait_for(orders, "w2", write(w2, 10))
            assert "poison" in reader.statistics()["reader"]["stopped"]["orders w1"]
            poisoned.set()
            reader.resume(orders, "w1")
            reader.wait_for(orders, "w1", last)
            assert sorted(seen.numbers) == [1, 2, 3, 4, 10]

    def test_a_dead_letter_is_kept_and_the_rest_goes_on(self, deployment: Deployment) -> None:
        seen = Seen()
        settings = attrs.evolve(QUICK, handler_retries=0)
        with (
            deployment.bus(writer="w1") as writer,
            deployment.bus(settings=settings, reader="r", on_poison="dead_letter") as reader,
        ):

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                if any(row.number == 3 for row in batch.rows):
                    raise ValueError("poison")
                seen(batch)

            reader.wait_for(orders, "w1", write(writer, 1, 2, 3, 4, 5))
            assert seen.numbers == [1, 2, 4, 5]
        with deployment.table() as store:
            letters = store.dead_letters(10)
        assert [(one.reader, list(one.tokens), one.payloads) for one in letters] == [("r", [3], [b'[3,"new"]'])]

    # --- following by iteration

    def test_follow_counts_a_batch_as_handled_when_the_next_is_asked_for(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            numbers: list[int] = []
            write(writer, 1)
            for batch in reader.follow(orders):
                if not numbers:
                    with pytest.raises(WaitTimeout):
                        reader.wait_for(orders, "w1", batch.position, timeout=0.05)
                numbers += [row.number for row in batch.rows]
                if numbers[-1] == 5:
                    break
                write(writer, numbers[-1] + 1)
            assert numbers == [1, 2, 3, 4, 5]
            # Left: the last batch was never acknowledged, and waits for whoever follows next.
            write(writer, 6)
            again: list[int] = []
            for batch in reader.follow(orders):
                again += [row.number for row in batch.rows]
                if again[-1] == 6:
                    break
            assert again == [5, 6]

    def test_follow_ends_with_the_bus(self, deployment: Deployment) -> None:
        ended: list[BaseException] = []
        got = threading.Event()

        def follow() -> None:
            for _ in reader.follow(orders):
                got.set()

        follower = threading.Thread(target=lambda: ended.append(_raised(follow)))
        with deployment.bus(writer="w1") as writer, deployment.bus() as reader:
            follower.start()
            write(writer, 1)
            assert got.wait(10)
        follower.join()
        assert isinstance(ended[0], Closed)
        with pytest.raises(Closed):
            reader.follow(orders)

    # --- resets, restores, retention

    def test_a_stream_in_memory_begins_anew_with_its_writer(self, deployment: Deployment) -> None:
        with deployment.bus() as reader:
            rows: list[Any] = []
            resets: list[tuple[str, str, int]] = []
            reader.subscribe(typing)(lambda batch: rows.extend(batch.rows))
            reader.on_reset(typing)(lambda *notice: resets.append(notice))
            for at, name in enumerate(("anna", "bert")):
                with deployment.bus(writer="w1") as writer:
                    with writer.write(typing) as fact:
                        fact.add([name])
                    until(lambda wanted=at + 1: len(rows) == wanted)
            assert rows == [["anna"], ["bert"]]
            assert ("typing", "w1", 0) in resets

    def test_another_epoch_begins_again_from_the_oldest_row(self, deployment: Deployment) -> None:
        with deployment.bus(reader="r") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            with deployment.bus(writer="w1") as writer:
                reader.wait_for(orders, "w1", write(writer, 1))
            with deployment.table() as store:
                store.restored()
            with deployment.bus(writer="w1") as writer:
                last = write(writer, 2)
                until(lambda: seen.numbers == [1, 1, 2])
                reader.wait_for(orders, "w1", last)

    def test_9_12_the_store_is_told_whether_the_log_is_beside_the_positions(
        self, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[tuple[str, bool]] = []

        def note(method: str) -> None:
            plain = getattr(PlannedStore, method)

            async def noted(store: Any, *args: Any, **options: Any) -> None:
                told.append((method, options["beside_log"]))
                await plain(store, *args, **options)

            monkeypatch.setattr(PlannedStore, method, noted)

        elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
        with Deployment(deployment.redis, deployment.name, elsewhere, self.make).table(), deployment.table() as table:
            note("register_reader")
            note("reset_reader")
            for place, beside in ((None, True), (elsewhere, False)):
                for _ in range(2):
                    with deployment.bus(writer="w1") as writer:
                        with deployment.bus(reader="billing", reader_store=place) as reader:
                            reader.subscribe(orders)(Seen())
                            reader.wait_for(orders, "w1", write(writer, 1))
                    table.restored()
                assert set(told) == {("register_reader", beside), ("reset_reader", beside)}
                told.clear()

    def test_pruned_rows_are_told_of(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as writer:
            last = write(writer, 1, 2, 3)
            with deployment.table() as store:
                until(lambda: any(one.stream == "orders" and one.position >= last for one in store.known()))
                store.prune(keep=1)
            with deployment.bus(start={"orders": {"w1": 0}}) as reader:
                with pytest.raises(PositionTooOld):
                    reader.wait_for(orders, "w1", last)
            with deployment.bus(start={"orders": {"w1": 0}}, on_too_old="skip") as reader:
                seen, missed = Seen(), []
                reader.on_missed(orders)(lambda *notice: missed.append(notice))
                reader.subscribe(orders)(seen)
                reader.wait_for(orders, "w1", last)
                assert seen.numbers == [3]
                assert missed == [("orders", "w1", 0, 2)]

    # --- the rest

    def test_commands_pass_between_buses(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as one, deployment.bus() as two:
            got: queue.SimpleQueue[Any] = queue.SimpleQueue()
            two.on(RemoteServerUp)(got.put)
            two.on(UserIp)(got.put)
            for command in (RemoteServerUp("a"), UserIp("@a:b", "t", "127.0.0.1", "agent", None, 5)):
                received = None
                for _ in range(100):  # news, sent once: perhaps before the other had subscribed
                    one.send(command)
                    with contextlib.suppress(queue.Empty):
                        received = got.get(timeout=0.1)
                        break
                assert received == command

    def test_statistics_are_json(self, deployment: Deployment) -> None:
        with deployment.bus(writer="w1") as bus:
            bus.subscribe(orders)(Seen())
            write(bus, 1)
            statistics = json.loads(json.dumps(bus.statistics()))
            assert statistics["writer"]["facts"] == 1
            assert statistics["reader"]["waiting"] == 0
            assert set(statistics) == {"reader", "writer", "link", "stuck", "bootstrap", "caches"}

    def test_what_a_user_can_get_wrong_is_told(self, deployment: Deployment) -> None:
        for options, what in (
            ({"start": "sometime"}, "start="),
            ({"on_poison": "shrug"}, "on_poison"),
            ({"store": None}, "store="),
            ({"name": "two words"}, "name"),
        ):
            with pytest.raises(ConfigError, match=what):
                with deployment.bus(**options):
                    pass
        with deployment.bus() as reader:
            with pytest.raises(NotAWriter, match="writer="):
                write(reader, 1)
            with pytest.raises(UnknownStream):
                reader.subscribe(Stream("nobody"))(print)
        with pytest.raises(Closed):
            write(reader, 1)


def _raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BusrepError as error:
        return error
    raise AssertionError("it raised nothing")
