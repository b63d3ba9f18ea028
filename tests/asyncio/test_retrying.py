"""Handlers whose errors are an outage, or may be: they are called again, in their place, and nothing else waits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import attrs
import pytest

import busrep
from busrep.core.delivery import Missed
from busrep.errors import HandlerFailed, PositionsAheadOfTable
from busrep.streams import Stream
from busrep.testing import virtual
from busrep.testing.pair import QUICK, MemoryDeployment
from tests.asyncio.deadlines import cut_off, deadline
from tests.shop import Order, orders, payments, typing

PATIENT = attrs.evolve(QUICK, poison_after=60.0, retry_max=5.0, heartbeat=5.0)  # an hour of beats takes its time


def run(work: Any) -> None:
    virtual.run(work)


async def until(true: Any) -> None:
    async with asyncio.timeout(1000.0):
        while not true():
            await asyncio.sleep(0.05)


@attrs.define
class Flaky:
    """A handler that raises ``error`` while there is one."""

    error: BaseException | None = None
    rows: list[int] = attrs.field(factory=list)
    calls: int = 0

    def __call__(self, batch: Any) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.rows += [row.number for row in batch.rows]


@pytest.mark.parametrize("on_poison", ["stop", "dead_letter"])
def test_an_outage_of_an_hour_is_no_poison(on_poison: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, payments, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(writer="w2") as w2,
            deployment.bus(reader="r", on_poison=on_poison) as reader,
        ):
            flaky, beside = Flaky(ConnectionRefusedError("away")), Flaky()
            reader.subscribe(orders)(flaky)
            reader.subscribe(payments)(beside)
            for number in range(101):
                await w1.publish(orders, [Order(number, "new")])
            await asyncio.sleep(3600.0)
            assert not reader.statistics()["reader"]["stopped"]
            (state,) = reader.statistics()["reader"]["retrying"].items()
            assert state[0] == "orders w1"
            assert state[1]["outage"]
            assert 3590.0 < state[1]["for"] <= 3600.0
            assert state[1]["error"] == "ConnectionRefusedError: away"
            assert reader.positions()["orders"]["w1"] == 0
            assert reader.statistics()["reader"]["queue_bytes"] <= PATIENT.receive_queue_bytes
            assert flaky.calls < 3600 / 2.5 + 20
            token = (await w2.publish(payments, [Order(1, "paid")]))[-1]  # the others flow
            await reader.wait_for(payments, "w2", token)
            assert beside.rows == [1]
            flaky.error = None
            await until(lambda: len(flaky.rows) == 101)
            assert flaky.rows == list(range(101))
            await until(lambda: not reader.statistics()["reader"]["retrying"])
            assert (await reader.store.status())["dead_letters"] == 0

    with caplog.at_level(logging.INFO, "busrep.reader"):
        run(main())
    lines = [line for line in caplog.messages if "handler of" in line]
    assert 100 <= len(lines) <= 125  # one in half a minute
    assert sum(record.exc_info is not None for record in caplog.records if "handler of" in record.getMessage()) == 1
    assert any("goes on after" in line for line in caplog.messages)


def test_an_application_s_own_error_is_an_outage_where_it_says_so() -> None:
    class AwayError(Exception):
        pass

    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r", transient=AwayError) as reader,
        ):
            flaky = Flaky(AwayError())
            reader.subscribe(orders)(flaky)
            await w1.publish(orders, [Order(1, "new")])
            await asyncio.sleep(600.0)
            flaky.error = None
            await until(lambda: flaky.rows == [1])

    run(main())


def test_an_unknown_error_of_ten_seconds_sets_no_good_fact_aside() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r", on_poison="dead_letter") as reader,
        ):
            flaky = Flaky(AttributeError("'NoneType' object has no attribute 'execute'"))
            reader.subscribe(orders)(flaky)
            for number in range(101):
                await w1.publish(orders, [Order(number, "new")])
            await asyncio.sleep(10.0)
            flaky.error = None
            await until(lambda: len(flaky.rows) == 101)
            assert (await reader.store.status())["dead_letters"] == 0
            assert flaky.rows == list(range(101))

    run(main())


@pytest.mark.parametrize("on_poison", ["stop", "dead_letter"])
def test_the_fact_that_is_poison_is_found_after_a_minute_and_the_others_are_handled(on_poison: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r", on_poison=on_poison) as reader,
        ):
            rows: list[int] = []
            began = loop.time()

            def handle(batch: Any) -> None:
                numbers = [row.number for row in batch.rows]
                if 5 in numbers:
                    raise ValueError("no order")
                rows.extend(numbers)

            await w1.publish(orders, [Order(number, "new") for number in range(10)])
            reader.subscribe(orders)(handle)
            await until(lambda: len(rows) == 5)
            assert loop.time() - began < 30.0  # those before it do not wait for the verdict
            await asyncio.sleep(40.0)
            assert not reader.statistics()["reader"]["stopped"]
            assert not reader.statistics()["reader"]["retrying"]["orders w1"]["outage"]
            if on_poison == "stop":
                await until(lambda: reader.statistics()["reader"]["stopped"])
                assert 60.0 <= loop.time() - began < 90.0
                assert reader.statistics()["reader"]["retrying"] == {}
                with pytest.raises(HandlerFailed, match="no order"):
                    await reader.wait_for(orders, "w1", 10)
                assert rows == [0, 1, 2, 3, 4]
            else:
                await until(lambda: len(rows) == 9)
                assert 60.0 <= loop.time() - began < 90.0
                assert rows == [0, 1, 2, 3, 4, 6, 7, 8, 9]
                assert (await reader.store.status())["dead_letters"] == 1

    run(main())


@pytest.mark.parametrize(
    "refused",
    [
        PositionsAheadOfTable("payments", 9, 4),
        PositionsAheadOfTable("orders", 9, 4),
        PositionsAheadOfTable("orders", 1, 0),
    ],
)
def test_what_the_handler_wrote_elsewhere_was_refused(refused: PositionsAheadOfTable) -> None:
    """A relay's target is an older state, with streams of these or other names: nothing was saved here."""

    async def main() -> None:
        async with (
            MemoryDeployment(orders, payments, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            relay = Flaky(refused)
            reader.subscribe(orders)(relay)
            await w1.publish(orders, [Order(1, "new")])
            await until(lambda: relay.calls > 1)
            relay.error = None
            token = (await w1.publish(orders, [Order(2, "new")]))[-1]
            await reader.wait_for(orders, "w1", token, timeout=1000.0)
            assert relay.rows == [1, 2]
            relay.error = refused
            await w1.publish(orders, [Order(3, "new")])
            await until(lambda: reader.statistics()["reader"]["stopped"])  # it is poison, as any other
            with pytest.raises(HandlerFailed, match="PositionsAheadOfTable"):
                await reader.wait_for(orders, "w1", token + 1)

    run(main())


def test_a_loop_that_is_left_while_another_handler_works_keeps_nothing_back() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            rows: list[int] = []

            async def slow(batch: Any) -> None:
                await asyncio.sleep(10.0)
                rows.extend(row.number for row in batch.rows)

            reader.subscribe(orders)(slow)
            step = asyncio.ensure_future(anext(reader.follow(orders)))
            await asyncio.sleep(1.0)
            await w1.publish(orders, [Order(1, "new")])
            await asyncio.sleep(1.0)
            step.cancel()  # the loop ends
            token = (await w1.publish(orders, [Order(2, "new")]))[-1]
            await reader.wait_for(orders, "w1", token, timeout=100.0)
            assert rows == [1, 2]

    run(main())


def test_effects_that_were_lost_behind_a_stop_come_before_what_stopped_it() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=QUICK) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            rows, poison = [], [3]

            def handle(batch: Any) -> None:
                for row in batch.rows:
                    if row.number in poison:
                        raise ValueError(row.number)
                    rows.append(row.number)

            reader.subscribe(orders)(handle)
            for number in (1, 2):
                last = (await w1.publish(orders, [Order(number, "new")]))[-1]
                await reader.wait_for(orders, "w1", last)
            await w1.publish(orders, [Order(3, "new")])
            await until(lambda: reader.statistics()["reader"]["stopped"])
            world = reader.store.world
            await until(lambda: world.ask("SELECT position FROM busrep_readers WHERE writer = 'w1'") == [(last,)])
            world.ask("UPDATE busrep_readers SET position = ? WHERE writer = 'w1'", (last - 1,))  # by a failover
            await asyncio.sleep(30.0)
            assert rows == [1, 2]
            poison.clear()
            reader.resume(orders, "w1")
            await until(lambda: len(rows) >= 4)
            assert rows == [1, 2, 2, 3]

    run(main())


@pytest.mark.parametrize("start", ["earliest", "now"])
def test_a_reader_that_is_not_registered_says_what_it_does_not_get(
    caplog: pytest.LogCaptureFixture, start: Any
) -> None:
    """A failover may have lost the registration while its process was down: nothing else tells."""
    caplog.set_level(logging.INFO, "busrep.reader")

    def told() -> list[tuple[int, str]]:
        found = [one for one in caplog.records if "is not registered for stream orders" in one.getMessage()]
        caplog.clear()
        return [(one.levelno, one.getMessage()) for one in found]

    async def main() -> None:
        async with MemoryDeployment(orders, settings=QUICK) as deployment, deployment.bus(writer="w1") as w1:

            async def life() -> list[int]:
                handler = Flaky()
                async with deployment.bus(reader="r", start=start) as reader:
                    reader.subscribe(orders)(handler)
                    await reader.reading.followed(orders)
                    last = (await w1.publish(orders, [Order(99, "new")]))[-1]
                    await reader.wait_for(orders, "w1", last)
                return handler.rows

            assert await life() == [99]
            assert told() == [], "nothing was there"
            missed = (await w1.publish(orders, [Order(number, "new") for number in range(5)]))[-1]
            world = w1.store.world
            proven = "SELECT position FROM busrep_positions WHERE stream = 'orders'"
            await until(lambda: world.ask(proven) == [(missed,)])
            world.ask("DELETE FROM busrep_readers")  # by a failover
            if start == "earliest":
                await w1.store.prune(keep=0)
            assert await life() == [99]
            level = logging.WARNING if start == "earliest" else logging.INFO
            [(found, text)] = told()
            assert (found, f"w1 up to {missed}." in text) == (level, True), text
            assert await life() == [99]
            assert told() == [], "it is registered again"

    run(main())


def test_a_lost_registration_that_was_noticed_holds_back_pruning_at_once() -> None:
    """Not with the next save, or the next rows, only: the database may be away when these come."""

    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=attrs.evolve(QUICK, save_every=1000.0)) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            handler, store, goes_on = Flaky(), reader.store, asyncio.Event()
            fetch = store.fetch

            async def slow(question: Any) -> Any:
                await goes_on.wait()
                return await fetch(question)

            reader.subscribe(orders)(handler)
            for number in range(5):
                last = (await w1.publish(orders, [Order(number, "new")]))[-1]
            await reader.wait_for(orders, "w1", last)
            store.fetch = slow
            store.world.ask("DELETE FROM busrep_readers")  # by a failover
            await until(lambda: reader.positions()["orders"]["w1"] == 0)
            assert await store.prune(keep=1) == {}
            goes_on.set()
            await reader.wait_for(orders, "w1", last)
            assert handler.rows == [0, 1, 2, 3, 4] * 2

    run(main())


def test_close_ends_a_pause_at_once_and_the_rows_come_again() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        calm = attrs.evolve(PATIENT, retry_min=600.0, retry_max=600.0, shutdown_timeout=300.0)
        async with MemoryDeployment(orders, settings=calm) as deployment, deployment.bus(writer="w1") as w1:
            await w1.publish(orders, [Order(1, "new")])
            flaky = Flaky(TimeoutError("away"))
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(flaky)
                await until(lambda: flaky.calls == 1)
                began = loop.time()
            assert loop.time() - began < 10.0
            again = Flaky()
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(again)
                await until(lambda: again.rows == [1])

    run(main())


@pytest.mark.parametrize("where", ["a batch", "a notice"])
def test_close_cancels_a_handler_that_makes_another_error_of_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """As batch.transaction() does at COMMIT. The handler has not stopped for good."""

    async def main() -> None:
        told: list[Any] = []
        started = asyncio.Event()

        async def handle(*_: Any) -> None:
            started.set()
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError as error:
                raise busrep.CommitUnknown(1, error, cancelled=True) from error

        async with (
            MemoryDeployment(orders, settings=attrs.evolve(QUICK, shutdown_timeout=0.5)) as deployment,
            deployment.bus(writer="w1") as w1,
        ):
            async with deployment.bus(reader="r", on_failure=told.append) as reader:
                if where == "a batch":
                    reader.subscribe(orders)(handle)
                    await w1.publish(orders, [Order(1, "new")])
                    await started.wait()
                else:
                    reader.on_missed(orders)(handle)
                    task = asyncio.create_task(reader.reading.handlers._notify(Missed("orders", "w1", 0, 1)))
                    await started.wait()
                    reader.reading.closed = True  # as close() does first
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            assert told == []
            assert reader.statistics()["reader"]["stopped"] == {}

    with caplog.at_level(logging.ERROR, "busrep.reader"):
        run(main())
    assert caplog.messages == []


@pytest.mark.parametrize("then", ["TimeoutError", "CancelledError", "ValueError", "nothing"])
@pytest.mark.parametrize("reader", ["r", None])
def test_a_deadline_of_the_handlers_own_is_an_error_like_any_other(reader: str | None, then: str) -> None:
    """Whatever the handler makes of it, the task was cancelled, and nobody but the handler knows by whom."""

    async def main() -> None:
        told: list[Any] = []
        calls, beside = [], []

        async def handle(batch: Any) -> None:
            calls.append([row.number for row in batch.rows])
            assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
            if len(calls) > 1:
                return
            await cut_off(0.5, then)

        async def second(batch: Any) -> None:
            beside.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]

        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader=reader, start="earliest", on_failure=told.append) as bus,
        ):
            bus.subscribe(orders)(handle)
            bus.subscribe(orders)(second)
            await w1.publish(orders, [Order(1, "new")])
            await until(lambda: calls)
            last = (await w1.publish(orders, [Order(2, "new")]))[-1]
            await bus.wait_for(orders, "w1", last, timeout=100.0)
            assert [number for call in calls for number in call] == ([1, 2] if then == "nothing" else [1, 1, 2])
            assert beside == [0] * len(beside)
            found = bus.statistics()["reader"]
            assert (found["stopped"], found["retrying"], told) == ({}, {}, [])
            assert found["handler_failures"] == (then != "nothing")

    run(main())


def test_a_handler_that_is_cut_off_again_and_again_is_called_with_pauses_and_told() -> None:
    async def main() -> None:
        calls = []

        async def handle(batch: Any) -> None:
            calls.append(asyncio.get_running_loop().time())
            deadline(0.5)
            await asyncio.sleep(1000.0)

        async with (
            MemoryDeployment(orders, settings=attrs.evolve(PATIENT, handler_retries=0)) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            reader.subscribe(orders)(handle)
            await w1.publish(orders, [Order(1, "new")])
            await asyncio.sleep(300.0)
            found = reader.statistics()["reader"]
            assert found["stopped"] == {}
            assert found["retrying"]["orders w1"]["outage"]
            assert found["retrying"]["orders w1"]["calls"] >= len(calls) - 1
            assert 50 <= len(calls) <= 150
            assert not reader.health().ok

    run(main())


@pytest.mark.parametrize("where", ["the handler", "a pause", "between"])
def test_a_worker_that_somebody_cancels_ends_and_another_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio.run() does, at its end, and waits until it has ended."""

    async def main() -> None:
        flaky = Flaky(ValueError("bug") if where == "a pause" else None)

        async def handle(batch: Any) -> None:
            flaky(batch)
            if where == "the handler" and flaky.calls == 1:
                flaky.rows.clear()
                await asyncio.sleep(1000.0)
            if where == "between" and flaky.calls == 1:
                asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]

        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            reader.subscribe(orders)(handle)
            await w1.publish(orders, [Order(1, "new")])
            await until(lambda: flaky.calls)
            flaky.error = None
            workers = reader.reading.workers.values()
            if where != "between":
                [worker], before = workers, flaky.calls
                worker.cancel()
                done, _ = await asyncio.wait(workers, timeout=0.001)
                assert done
                assert flaky.calls == before
            last = (await w1.publish(orders, [Order(2, "new")]))[-1]
            await reader.wait_for(orders, "w1", last, timeout=100.0)
            assert flaky.rows == [1, 2]
            assert reader.statistics()["reader"]["stopped"] == {}

    with caplog.at_level(logging.WARNING, "busrep.reader"):
        run(main())
    assert any("handler of (orders, w1) failed" in line or "was cancelled" in line for line in caplog.messages)


class Outcome(BaseException):
    """What is no Exception, as the outcomes of pytest.fail() and pytest.skip() are not."""


def test_what_is_raised_and_is_no_exception_stops_a_reader_loudly() -> None:
    async def main() -> None:
        told: list[BaseException] = []
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r", on_failure=told.append) as reader,
        ):
            flaky = Flaky(Outcome("not what was expected"))
            reader.subscribe(orders)(flaky)
            token = (await w1.publish(orders, [Order(1, "new")]))[-1]
            with pytest.raises(HandlerFailed, match="not what was expected"):
                await reader.wait_for(orders, "w1", token, timeout=100.0)
            await until(lambda: told)
            assert not reader.health().ok
            assert flaky.calls == 1
            flaky.error = None
            reader.resume(orders, "w1")
            await reader.wait_for(orders, "w1", token, timeout=100.0)
            assert flaky.rows == [1]

    run(main())


def test_a_notice_whose_handler_has_a_deadline_of_its_own_is_over_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        handled, told = [], []

        async def first(*_: Any) -> None:
            deadline(0.5)
            await asyncio.sleep(1000.0)

        async def second(stream: str, writer: str, position: int) -> None:
            told.append((position, asyncio.current_task().cancelling()))  # type: ignore[union-attr]

        async with (
            MemoryDeployment(typing, settings=PATIENT) as deployment,
            deployment.bus(reader=None) as reader,
        ):
            reader.subscribe(typing)(handled.append)
            for function in (first, second):
                reader.on_reset(typing)(function)
            for number in (1, 2):
                async with deployment.bus(writer="w1") as w1:
                    await w1.publish(typing, [[number]])
                    await until(lambda number=number: len(handled) == number)
            assert [count for _, count in told] == [0] * len(told)
            assert told

    with caplog.at_level(logging.ERROR, "busrep.reader"):
        run(main())
    assert "the handler of a reset or of missed rows failed" in caplog.messages


def test_invalidations_do_not_wait_for_a_handler() -> None:
    """Rows of a stream of invalidations are better skipped: caches are cleared then, and go on."""

    async def main() -> None:
        from busrep.caches.cache import invalidations

        stream = invalidations()
        async with (
            MemoryDeployment(stream, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(streams=[stream]) as reader,
        ):
            missed: list[Any] = []
            flaky = Flaky(TimeoutError("away"))
            reader.subscribe(stream)(flaky)
            reader.on_missed(stream)(lambda *found: missed.append(found))
            await w1.invalidate("a", ["b"])
            began = asyncio.get_running_loop().time()
            await until(lambda: missed)
            assert asyncio.get_running_loop().time() - began < 5.0

    run(main())


def test_the_part_of_a_snapshot_waits_for_the_end_of_an_outage() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            await w1.publish(orders, [Order(number, "new") for number in range(10)])
            rows: list[int] = []
            away = True

            @reader.snapshot(orders)
            def apply(part: Any) -> None:
                if away:
                    raise ConnectionResetError("away")
                rows.extend(row.number for row in part.rows)

            reader.subscribe(orders)(lambda batch: None)
            await asyncio.sleep(20.0)  # until a beat has proven the position, which is where a snapshot ends
            waiting = asyncio.create_task(reader.bootstrap(orders))
            await asyncio.sleep(600.0)
            assert not waiting.done()
            assert reader.statistics()["reader"]["retrying"]["orders"]["outage"]
            away = False
            await waiting
            assert rows == list(range(10))
            assert reader.statistics()["reader"]["retrying"] == {}

    run(main())


def test_what_is_raised_and_is_no_exception_does_not_end_a_bootstrap() -> None:
    async def main() -> None:
        async with (
            MemoryDeployment(orders, settings=PATIENT) as deployment,
            deployment.bus(writer="w1") as w1,
            deployment.bus(reader="r") as reader,
        ):
            await w1.publish(orders, [Order(number, "new") for number in range(10)])
            rows: list[int] = []
            raised = [Outcome("not what was expected")]

            @reader.snapshot(orders)
            def apply(part: Any) -> None:
                if raised:
                    raise raised.pop()
                rows.extend(row.number for row in part.rows)

            reader.subscribe(orders)(lambda batch: None)
            await asyncio.sleep(20.0)  # until a beat has proven the position, which is where a snapshot ends
            async with asyncio.timeout(600.0):
                await reader.bootstrap(orders)
            assert rows == list(range(10))

    run(main())


def test_the_default_is_a_minute() -> None:
    assert busrep.Settings().poison_after == 60.0


@attrs.frozen
class OldTyping:
    """What the reader takes for a row."""

    number: int


@attrs.frozen
class NewTyping:
    """What a process of the next version writes."""

    number: int | str


def test_of_rows_in_memory_those_that_do_not_decode_are_missed_alone() -> None:
    """Nothing keeps them to be fetched. Others were joined with them while the handler was at work."""

    async def main() -> None:
        old, new = Stream("typing", OldTyping, resettable=True), Stream("typing", NewTyping, resettable=True)
        handled, missed, go_on = list[int](), list[tuple[Any, ...]](), asyncio.Event()
        async with MemoryDeployment(old) as deployment, deployment.bus() as reader:

            @reader.on_missed(old)
            def note(*place: Any) -> None:
                missed.append(place)

            @reader.subscribe(old)
            async def handle(batch: Any) -> None:
                await go_on.wait()
                handled.extend(batch.tokens)

            async with deployment.bus(writer="w1", streams=[new]) as writer:
                for number in range(1, 10):
                    await writer.publish(new, [NewTyping("five" if number == 5 else number)])
                await asyncio.sleep(1.0)
                go_on.set()
                await reader.wait_for(old, "w1", 9)
        assert handled == [1, 2, 3, 4, 6, 7, 8, 9]
        assert missed == [("typing", "w1", 4, 5)]

    virtual.run(main())
