"""What may happen to a bootstrap: its source, its function, its store and its process fail, and the link does.

In memory, on a virtual clock. Of real processes and databases see test_bootstrap_saving.py, and test_bootstrap_kills.py
in tests/proof.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest

from busrep import Batch, Bus, HandlerFailed, SnapshotPart
from busrep.core.snapshots import Agreement
from busrep.errors import Closed, ConfigError, EpochChanged, ReaderMoved, SnapshotBusy, SnapshotGone, Unavailable
from busrep.testing import virtual
from busrep.testing.pair import MemoryDeployment
from tests.shop import Order, orders, payments

from .bootstraps import SMALL, Source, Target, crash, deployment, online, state, until, write
from .deadlines import cut_off


@attrs.define
class Bench:
    """A writer that has written 35 rows, in four parts, and a source to break; ``read`` makes readers of it."""

    shop: MemoryDeployment
    writer: Bus
    last: int

    @contextlib.asynccontextmanager
    async def read(self, **options: Any) -> AsyncIterator[tuple[Bus, Source, Target]]:
        bus = self.shop.bus(**{"start": None, **options})
        source = Source(bus.store)
        bus.reading.bootstrapping.source.given = source
        async with bus:
            yield bus, source, Target()
        assert (source.held, source.open_loads) == ([], 0)


@contextlib.asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    async with deployment(attrs.evolve(SMALL, **settings)) as shop, shop.bus(writer="w1") as writer:
        last = await write(writer, 35)
        await writer.writing.beat()
        yield Bench(shop, writer, last)


class Times:
    """Raises an error the first few times."""

    def __init__(self, count: int, error: BaseException) -> None:
        self.left, self.error = count, error

    async def __call__(self, *_: Any) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error


class Gate:
    """Holds up whoever comes with that number, once, until it is opened."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.at, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, number: int | None = None) -> None:
        if number in self.numbers or not self.numbers:
            self.at.set()
            await self.go_on.wait()


# -- the source -----------------------------------------------------------------------------------------------

ERRORS = [Unavailable("the database", "gone away"), SnapshotBusy("the database", 4), RuntimeError("a bug"), OSError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("reader", ["billing", None])
def test_a_source_that_fails_is_asked_again(error: Exception, reader: str | None) -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader=reader) as (bus, source, target):
            source.on_agree, source.on_load = Times(3, error), Times(3, error)
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last)
            assert target.parts == [0, 1, 2, 3]
            await online(bus)
            found = bus.statistics()["bootstrap"]["orders"]
            assert (found["syncs"], found["error"]) == (1, None)
            assert found["attempts"] >= 4

    virtual.run(main())


def test_the_parts_that_are_applied_are_not_loaded_again() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, source, target):
            failing = Times(2, Unavailable("the database", "gone away"))

            async def third(number: int) -> None:
                if number == 2:
                    await failing()

            source.on_load = third
            target.of(bus)
            await online(bus)
            assert target.parts == [0, 1, 2, 3]
            assert source.loads.count(0) == source.loads.count(1) == 1
            assert source.agrees[0] is None
            assert all(again is not None and again.same(target.applied[0].agreement) for again in source.agrees[1:])

    virtual.run(main())


@pytest.mark.parametrize("where", ["agree", "load"])
def test_a_source_that_hangs_is_given_up(where: str) -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            hung = 0

            async def hang(*_: Any) -> None:
                nonlocal hung
                if hung < 2:
                    hung += 1
                    await asyncio.Event().wait()

            if where == "agree":
                source.on_agree = hang
            else:
                source.on_load = hang
            target.of(bus)
            await until(lambda: hung == 2, timeout=60)
            assert bus.statistics()["bootstrap"]["orders"]["error"] is not None or where == "load"
            await bus.wait_for(orders, "w1", made.last, timeout=60)
            assert target.numbers == list(range(35))

    virtual.run(main())


def test_a_part_that_takes_long_is_waited_for_as_long_as_something_comes() -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            given = source.load

            async def slow(agreement: Agreement, number: int) -> Any:
                async for piece in given(agreement, number):
                    for at in range(0, len(piece), 50):
                        await asyncio.sleep(0.9)  # fetch_timeout is 1 s
                        yield piece[at : at + 50]

            source.load = slow  # type: ignore[method-assign]
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last, timeout=120)
            assert bus.statistics()["bootstrap"]["orders"]["attempts"] == 1

    virtual.run(main())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda text: text[: text.index(b"\n") + 1], "has 1 rows, and 10 were agreed on"),
        (lambda text: b"9" + text, "not ordered"),
        (lambda text: b"".join(b"10" + line + b"\n" for line in text.splitlines()), "outside of"),
        (lambda text: text.replace(b" w1 ", b" w2 "), "above the position agreed on"),
        (lambda text: text[:-1], "its last line is cut off"),
        (lambda text: text.replace(b" ", b""), "is not 'token writer row'"),
    ],
)
def test_a_part_that_is_not_what_was_agreed_on_is_refused(
    spoil: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            spoiled = 0

            def once(number: int, text: bytes) -> bytes:
                nonlocal spoiled
                spoiled += 1
                return spoil(text) if spoiled == 1 else text

            source.on_piece = once
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last)
            assert target.numbers == list(range(35))

    virtual.run(main())
    assert told in caplog.text


def test_a_snapshot_that_is_gone_begins_anew_and_raises_the_alarm_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with bench(full_sync_alarm=2) as made, made.read(reader="billing") as (bus, source, target):
            gone = Times(3, SnapshotGone("orders", "rows of it were pruned"))
            asked = 0

            async def third(number: int) -> None:
                if number == 2:
                    await gone()

            def other(agreement: Agreement) -> Agreement:
                nonlocal asked
                asked += 1  # a writer joined, that wrote nothing
                return attrs.evolve(agreement, positions={**agreement.positions, f"x{asked}": 0})

            source.on_load, source.change = third, other
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last, timeout=60)
            assert target.parts == [0, 1, 0, 1, 0, 1, 0, 1, 2, 3]
            assert target.numbers == list(range(35))
            found = bus.statistics()["bootstrap"]["orders"]
            assert (found["syncs"], found["alarm"]) == (4, True)
            assert [one.syncs for one in await bus.store.bootstraps("billing")] == [4]

    virtual.run(main())
    assert caplog.text.count("full syncs within an hour") == 1


def test_a_snapshot_older_than_what_was_pruned_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A directory that was written yesterday: applied, it would need rows that nobody has."""

    async def main() -> None:
        async with bench() as made:
            store = made.writer.store
            old = await store.agree("orders", part_rows=10)
            await store.leave(old)
            await write(made.writer, 10, first=35)
            await made.writer.writing.beat()
            await store.prune(keep=3)
            async with made.read(reader="billing") as (bus, source, target):
                source.change = lambda found: old if len(source.agrees) <= 2 else found
                source.under = Forgiving(source.under)
                target.of(bus)
                await online(bus)
                assert target.numbers == [42, 43, 44]
                assert len(source.agrees) == 3

    virtual.run(main())
    assert "make a newer snapshot" in caplog.text


class Forgiving:
    """Lets go of snapshots that it never gave."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_snapshot_of_another_stream_or_log_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):

            def wrong(found: Agreement) -> Agreement:
                if len(source.agrees) == 1:
                    return attrs.evolve(found, epoch="0" * 32)
                return attrs.evolve(found, stream="payments") if len(source.agrees) == 2 else found

            source.change = wrong
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last)
            assert target.numbers == list(range(35))
            assert len(source.agrees) == 3

    virtual.run(main())
    assert "its snapshot is of epoch 00000000" in caplog.text
    assert "it gave a snapshot of stream 'payments'" in caplog.text


def test_a_source_that_cannot_work_at_all_stops_the_stream_until_it_is_mended() -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            source.on_agree = Times(1, ConfigError("no such directory"))
            target.of(bus)
            with pytest.raises(ConfigError, match="no such directory"):
                await bus.wait_for(orders, "w1", made.last)
            with pytest.raises(ConfigError, match="no such directory"):
                async for _ in bus.follow(orders):
                    pass
            assert "no such directory" in bus.statistics()["bootstrap"]["orders"]["stopped"]
            await asyncio.sleep(10)
            assert len(source.agrees) == 1, "asked again before somebody has mended it"
            bus.resume(orders, "w1")
            await bus.wait_for(orders, "w1", made.last)
            assert target.numbers == list(range(35))

    virtual.run(main())


def test_one_that_cannot_go_on_holds_nothing_at_the_source() -> None:
    """Others wait for its place there."""

    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            source.on_load = Times(1, ConfigError("not allowed to read the table"))
            target.of(bus)
            with pytest.raises(ConfigError, match="not allowed"):
                await bus.bootstrap(orders)
            await until(lambda: not source.held)
            bus.resume(orders, "w1")
            await bus.wait_for(orders, "w1", made.last)
            assert target.parts == [0, 1, 2, 3]

    virtual.run(main())


def test_reading_that_has_failed_holds_nothing_at_the_source() -> None:
    async def main() -> None:
        async with bench() as made, made.read(on_epoch_change="stop") as (bus, source, target):
            gate = Gate(1)
            source.on_load = gate
            target.of(bus)
            await gate.at.wait()
            assert len(source.held) == 1
            bus.reading.core.new_epoch = "0" * 32
            bus.reading.pump()
            with pytest.raises(EpochChanged):
                await bus.wait_for(orders, "w1", made.last)
            await until(lambda: not source.held)
            assert source.open_loads == 0

    virtual.run(main())


def test_a_source_that_hangs_when_it_is_opened_is_a_fault_that_shows() -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            go_on, given = asyncio.Event(), source.open

            async def open_() -> None:
                await go_on.wait()
                await given()

            source.open = open_  # type: ignore[method-assign]
            target.of(bus)
            await until(lambda: "could not be opened" in str(bus.statistics()["bootstrap"].get("orders")))
            assert bus.statistics()["bootstrap"]["orders"]["attempts"] >= 1
            go_on.set()
            await online(bus)
            assert source.opens == 1
            assert target.numbers == list(range(35))

    virtual.run(main())


def test_a_source_of_its_own_is_opened_once_and_closed() -> None:
    async def main() -> None:
        async with bench() as made:
            async with made.read() as (bus, source, target):
                failing = Times(2, Unavailable("the server", "not there yet"))
                given = source.open

                async def open_() -> None:
                    await failing()
                    await given()

                source.open = open_  # type: ignore[method-assign]
                target.of(bus)
                await online(bus)
                await bus.bootstrap(orders)
                assert (source.opens, source.closes) == (1, 0)
            assert (source.opens, source.closes) == (1, 1)
            async with made.read() as (bus, source, _):
                assert source.opens == 0
            assert source.closes == 0, "what was never opened"

    virtual.run(main())


# -- the function ---------------------------------------------------------------------------------------------


def test_a_function_that_raises_is_called_again_with_the_same_part() -> None:
    async def main() -> None:
        async with bench(handler_retries=2) as made, made.read(reader="billing") as (bus, _source, target):
            failing, seen = Times(2, ValueError("no")), []

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                seen.append(part.number)
                if part.number == 1:
                    await failing()
                target.apply(part)

            await online(bus)
            assert seen == [0, 1, 1, 1, 2, 3]
            assert target.parts == [0, 1, 2, 3]
            assert bus.statistics()["reader"]["handler_failures"] == 2

    virtual.run(main())


def test_a_function_that_keeps_raising_stops_the_stream_and_no_other() -> None:
    async def main() -> None:
        async with bench(handler_retries=1) as made, made.read(reader="billing") as (bus, _source, target):
            failing, got = Times(2, ValueError("no")), []

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                if part.number == 1:
                    await failing()
                target.apply(part)

            bus.subscribe(orders)(target.handle)
            bus.subscribe(payments)(got.append)
            with pytest.raises(HandlerFailed, match="ValueError: no") as raised:
                await bus.wait_for(orders, "w1", made.last)
            assert (raised.value.stream, raised.value.writer, raised.value.token) == ("orders", "w1", 20)
            with pytest.raises(HandlerFailed):
                await bus.bootstrap(orders)
            await bus.wait_for(payments, "w1", await write(made.writer, 1, stream=payments))
            assert len(got) == 1
            last = await write(made.writer, 5, first=35)
            assert target.parts == [0]
            assert "ValueError" in bus.statistics()["bootstrap"]["orders"]["stopped"]
            bus.resume(orders, raised.value.writer)
            await bus.wait_for(orders, "w1", last)
            assert target.parts == [0, 1, 2, 3]
            assert target.numbers == list(range(40))
            await online(bus)
            assert bus.statistics()["bootstrap"]["orders"]["stopped"] is None

    virtual.run(main())


def test_a_restart_goes_on_at_the_part_that_stopped_it() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made:
            target = Target()
            async with made.read(reader="billing") as (bus, source, _):

                @bus.snapshot(orders)
                def apply(part: SnapshotPart[Any]) -> None:
                    if part.number == 2:
                        raise ValueError("no")
                    target.apply(part)

                with pytest.raises(HandlerFailed):
                    await bus.wait_for(orders, "w1", made.last)
            async with made.read(reader="billing") as (bus, source, _):
                target.of(bus)
                await bus.wait_for(orders, "w1", made.last)
                assert target.parts == [0, 1, 2, 3]
                assert source.loads == [2, 3]

    virtual.run(main())


def test_a_row_that_does_not_decode_stops_the_stream() -> None:
    async def main() -> None:
        async with bench() as made, made.read() as (bus, source, target):
            source.on_piece = lambda number, text: text.replace(b'[15,"new"]', b'["x","new"]')
            target.of(bus)
            with pytest.raises(HandlerFailed, match="RowError.*int is needed"):
                await bus.wait_for(orders, "w1", made.last)
            assert target.parts == [0]

    virtual.run(main())


def test_a_key_that_raises_counts_as_the_function() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made, made.read() as (bus, _source, target):
            target.of(bus, key=lambda row: [row.number])
            with pytest.raises(HandlerFailed, match="unhashable"):
                await bus.wait_for(orders, "w1", made.last)

    virtual.run(main())


def test_a_function_that_cancels_itself_is_one_that_raises() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made, made.read() as (bus, _source, _target):

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                raise asyncio.CancelledError

            with pytest.raises(HandlerFailed, match="CancelledError"):
                await bus.wait_for(orders, "w1", made.last)

    virtual.run(main())


@pytest.mark.parametrize("then", ["TimeoutError", "CancelledError", "ValueError", "nothing"])
@pytest.mark.parametrize("reader", ["billing", None])
def test_a_deadline_of_the_functions_own_is_an_error_like_any_other(reader: str | None, then: str) -> None:
    """Whatever the function makes of it, the task was cancelled, and nobody but the function knows by whom."""

    async def main() -> None:
        calls: list[int] = []
        async with bench(handler_retries=3) as made, made.read(reader=reader) as (bus, _source, target):

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                calls.append(part.number)
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0
                if len(calls) == 2:
                    await cut_off(0.05, then)
                target.apply(part)

            bus.subscribe(orders)(target.handle)
            await bus.wait_for(orders, "w1", made.last)
            assert calls == ([0, 1, 2, 3] if then == "nothing" else [0, 1, 1, 2, 3])
            assert target.numbers == list(range(35))
            assert bus.health().ok

    virtual.run(main())


@pytest.mark.parametrize("work", ["agree", "load", "apply"])
def test_a_bootstrap_that_somebody_cancels_goes_on(work: str) -> None:
    """asyncio.run() cancels all tasks at its end, and waits until each has ended."""

    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, source, target):
            gate, calls = Gate(), []

            async def held(*_: Any) -> None:
                calls.append(work)
                if len(calls) == 1:
                    await gate()

            if work == "agree":
                source.on_agree = held
            elif work == "load":
                source.on_load = held

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                if work == "apply":
                    await held()
                target.apply(part)

            bus.subscribe(orders)(target.handle)
            await until(lambda: calls)
            tasks = [one for one in asyncio.all_tasks() if one.get_name() == f"busrep-bootstrap-{work}"]
            before = len(calls)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert len(calls) == before
            await bus.wait_for(orders, "w1", made.last)
            assert target.numbers == list(range(35))

    virtual.run(main())


def test_without_a_name_nothing_can_be_saved() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made, made.read() as (bus, _source, _target):

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                await part.save(None)

            with pytest.raises(HandlerFailed, match="needs a durable reader"):
                await bus.wait_for(orders, "w1", made.last)

    virtual.run(main())


# -- handlers that are at work --------------------------------------------------------------------------------


def test_nothing_is_applied_before_the_handlers_have_ended() -> None:
    async def main() -> None:
        async with bench() as made, made.read(start="earliest") as (bus, source, _target):
            gate, order = Gate(), []

            @bus.subscribe(orders)
            async def slow(batch: Batch[Any]) -> None:
                await gate()
                order.append("handled")

            @bus.snapshot(orders)
            def apply(part: SnapshotPart[Any]) -> None:
                order.append(part.number)

            await gate.at.wait()
            asked = asyncio.create_task(bus.bootstrap(orders))
            await until(lambda: source.loads == [0, 1])
            await asyncio.sleep(5)
            assert order == []
            gate.go_on.set()
            await asked
            assert order[:5] == ["handled", 0, 1, 2, 3]

    virtual.run(main())


def test_a_handler_cannot_wait_for_a_snapshot_of_its_own_stream() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made, made.read(start="earliest") as (bus, _source, target):
            bus.snapshot(orders)(target.apply)

            @bus.subscribe(orders)
            async def ask(batch: Batch[Any]) -> None:
                await bus.bootstrap(orders)

            with pytest.raises(HandlerFailed, match="ask from another task"):
                await bus.wait_for(orders, "w1", made.last)
            await bus.bootstrap(orders)  # which gets it out of there
            assert target.numbers == list(range(35))
            await bus.wait_for(orders, "w1", made.last)

    virtual.run(main())


def test_a_poison_row_is_left_behind_by_a_snapshot() -> None:
    async def main() -> None:
        async with bench(handler_retries=0) as made, made.read(reader="billing", start="earliest") as (bus, _, target):
            bus.snapshot(orders)(target.apply)

            @bus.subscribe(orders)
            def handle(batch: Batch[Any]) -> None:
                if 7 in batch.tokens:
                    raise ValueError
                target.handle(batch)

            with pytest.raises(HandlerFailed):
                await bus.wait_for(orders, "w1", made.last)
            await bus.bootstrap(orders)
            await bus.wait_for(orders, "w1", await write(made.writer, 3, first=35))
            assert target.numbers == list(range(38))
            assert bus.statistics()["reader"]["stopped"] == {}

    virtual.run(main())


# -- the process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["agree", "0", "1", "3", "apply"])
def test_close_ends_a_bootstrap_and_lets_go_of_the_source(at: str) -> None:
    async def main() -> None:
        async with bench() as made:
            gate = Gate()
            async with made.read(reader="billing") as (bus, source, target):
                if at == "agree":
                    source.on_agree = gate
                elif at != "apply":
                    source.on_load = lambda number: gate(number if str(number) == at else None)  # type: ignore[assignment,return-value]
                    gate.numbers = (int(at),)

                @bus.snapshot(orders)
                async def apply(part: SnapshotPart[Any]) -> None:
                    target.apply(part)
                    if at == "apply" and part.number == 1:
                        await gate()

                asked = asyncio.create_task(bus.bootstrap(orders))
                await gate.at.wait()
                if at == "3":
                    await until(lambda: target.parts == [0, 1, 2])
                if at == "apply":
                    asyncio.get_running_loop().call_later(1.0, gate.go_on.set)
                begun = asyncio.get_running_loop().time()
                await bus.close()
                assert asyncio.get_running_loop().time() - begun <= SMALL.shutdown_timeout
                with pytest.raises(Closed):
                    await asked
            applied = list(target.parts)
            async with made.read(reader="billing") as (bus, source, _):
                target.of(bus)
                await bus.wait_for(orders, "w1", made.last)
                assert target.parts == [0, 1, 2, 3], "what was applied is saved, with the last part that was in hand"
                assert source.loads == [number for number in range(4) if number not in applied]

    virtual.run(main())


def test_close_does_not_wait_for_ever_for_a_function() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, _target):
            at = asyncio.Event()

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                at.set()
                await asyncio.Event().wait()

            await at.wait()
            begun = asyncio.get_running_loop().time()
            await bus.close()
            assert asyncio.get_running_loop().time() - begun <= 2 * SMALL.shutdown_timeout

    virtual.run(main())


def test_close_may_be_called_by_the_function() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, target):
            closed = asyncio.Event()

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                target.apply(part)
                await bus.close()
                closed.set()

            await closed.wait()
            await bus.close()
            assert target.parts == [0]
            assert [one.parts for one in await bus.store.bootstraps("billing")] == [1]

    virtual.run(main())


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_killed_process_goes_on_with_the_next_part(at: int) -> None:
    async def main() -> None:
        async with bench() as made:
            gate, target = Gate(at), Target()
            bus = made.shop.bus(reader="billing", start=None)
            source = bus.reading.bootstrapping.source.given = Source(bus.store)
            source.on_load = gate
            await bus.open()
            target.of(bus)
            await gate.at.wait()
            await until(lambda: len(target.parts) == at and bus.store.world.ask("SELECT 1 FROM busrep_bootstraps"))
            await crash(bus)
            await bus.store.close()
            last = await write(made.writer, 5, first=35)
            async with made.read(reader="billing") as (bus, source, _):
                target.of(bus)
                await bus.wait_for(orders, "w1", last)
                assert target.parts == [0, 1, 2, 3]
                assert source.loads == list(range(at, 4))
                assert target.numbers == list(range(40))
                await online(bus)
                assert bus.statistics()["bootstrap"]["orders"]["syncs"] == 1

    virtual.run(main())


def test_one_that_is_killed_while_draining_is_online_after_the_next_start() -> None:
    async def main() -> None:
        async with bench() as made:
            gate, target = Gate(), Target()
            bus = made.shop.bus(reader="billing", start=None)
            await bus.open()
            bus.snapshot(orders)(target.apply)

            @bus.subscribe(orders)
            async def handle(batch: Batch[Any]) -> None:
                await gate()

            given = bus.reading.bootstrapped

            def bootstrapped(*args: Any) -> None:
                bus.reading.core.learned("orders", "w1", made.last + 5)
                given(*args)

            bus.reading.bootstrapped = bootstrapped  # type: ignore[method-assign]
            last = await write(made.writer, 5, first=35)
            await gate.at.wait()
            assert state(bus) == "draining"
            await crash(bus)
            async with made.read(reader="billing") as (bus, _source, _):
                target.of(bus)
                await bus.wait_for(orders, "w1", last)
                await online(bus)
                assert (target.parts, target.numbers) == ([0, 1, 2, 3], list(range(40)))
                await until(lambda: bus.store.world.ask("SELECT state FROM busrep_bootstraps") == [("online",)])

    virtual.run(main())


def test_an_unfinished_one_waits_for_its_function(caplog: pytest.LogCaptureFixture) -> None:
    """The saved positions are where the snapshot ends: to go on behind them would lose what is not applied."""

    async def main() -> None:
        async with bench() as made:
            gate, target = Gate(2), Target()
            bus = made.shop.bus(reader="billing", start=None)
            source = bus.reading.bootstrapping.source.given = Source(bus.store)
            source.on_load = gate
            await bus.open()
            target.of(bus)
            await gate.at.wait()
            await until(lambda: len(target.parts) == 2)
            await crash(bus)
            await bus.store.close()
            async with made.read(reader="billing") as (bus, source, _):
                bus.subscribe(orders)(target.handle)
                with pytest.raises(TimeoutError):
                    await bus.wait_for(orders, "w1", made.last)
                assert "unfinished bootstrap of stream orders" in caplog.text
                assert target.handled == []
                bus.snapshot(orders)(target.apply)
                await bus.wait_for(orders, "w1", await write(made.writer, 5, first=35))
                assert target.parts == [0, 1, 2, 3]
                assert target.numbers == list(range(40))

    virtual.run(main())


# -- the link -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["agree", "load", "apply"])
def test_a_lost_link_does_not_undo_what_is_loaded(at: str) -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, source, target):
            gate = Gate()
            if at == "agree":
                source.on_agree = gate
            elif at == "load":
                gate.numbers, source.on_load = (2,), gate

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                if at == "apply" and part.number == 2:
                    await gate()
                target.apply(part)

            bus.subscribe(orders)(target.handle)
            await gate.at.wait()
            await write(made.writer, 5, first=35)
            made.shop.redis.cut()
            last = await write(made.writer, 5, first=40)
            await until(lambda: bus.statistics()["link"]["connected"])
            gate.go_on.set()
            await bus.wait_for(orders, "w1", last)
            assert target.parts == [0, 1, 2, 3]
            assert target.numbers == list(range(45))
            assert len(source.agrees) == 1
            await online(bus)

    virtual.run(main())


# -- writers --------------------------------------------------------------------------------------------------


def test_a_writer_that_registers_behind_the_snapshot_is_handled_from_its_first_row() -> None:
    async def main() -> None:
        async with bench() as made:
            async with made.read(reader="billing") as (bus, source, target):
                gate = Gate(2)
                source.on_load = gate
                target.of(bus)
                await gate.at.wait()
                async with made.shop.bus(writer="w2") as other:
                    last = await write(other, 5, first=35)
                gate.go_on.set()
                await bus.wait_for(orders, "w2", last)
                assert target.numbers == list(range(40))
                assert [writer for writer, _ in target.handled] == ["w2"] * 5
            async with made.read(reader="billing") as (bus, source, _):
                target.of(bus)
                await bus.wait_for(orders, "w2", last)
                assert (source.agrees, len(target.handled)) == ([], 5)

    virtual.run(main())


@pytest.mark.parametrize("own", [False, True])
def test_a_writer_that_bootstraps_its_own_stream_has_its_own_rows_in_it(own: bool) -> None:
    async def main() -> None:
        async with bench() as made, made.read(writer="w2", own=own, reader="billing") as (bus, source, target):
            await write(bus, 5, first=35)
            await bus.writing.beat()
            gate = Gate(2)
            source.on_load = gate
            target.of(bus)
            await gate.at.wait()
            last = await write(bus, 5, first=40)
            assert "orders" not in bus.positions() or own
            gate.go_on.set()
            await online(bus)
            await until(lambda: bus.positions()["orders"].get("w2") == last)
            assert target.numbers == list(range(45))
            later = await write(bus, 5, first=45)
            await bus.wait_for(orders, "w2", later)
            assert target.numbers == list(range(50 if own else 45)), "own facts count as handled, as ever"
            assert bus.positions()["orders"]["w2"] == later
            await bus.reading.saver.save()
            assert (await bus.store.load_reader("billing")).positions["orders", "w2"] == later

    virtual.run(main())


def test_own_facts_that_are_under_way_when_the_snapshot_is_applied_are_handled_too() -> None:
    """What they did to the target, the snapshot may have undone: they count as another's until none is under way."""

    async def main() -> None:
        async with bench() as made, made.read(writer="w2", reader="billing") as (bus, _, target):
            asked = asyncio.Event()

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                target.apply(part)
                if part.last:
                    asked.set()

            bus.subscribe(orders)(target.handle)
            async with bus.write(orders) as slow:
                slow.add(Order(40, "new"))
                await asked.wait()
                later = await write(bus, 1, first=41)  # committed, and not announced: an earlier one is open
                await online(bus)
                assert target.numbers == list(range(35))
                assert "w2" not in bus.positions()["orders"] or bus.positions()["orders"]["w2"] < slow.id
            await until(lambda: target.numbers == [*range(35), 40, 41])
            await until(lambda: bus.positions()["orders"].get("w2") == later)
            await write(bus, 1, first=42)
            await asyncio.sleep(1.0)
            assert target.numbers == [*range(35), 40, 41], "from then on they count as handled, as ever"

    virtual.run(main())


def test_linear_position_counts_from_the_snapshot() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, source, target):
            gate = Gate(2)
            source.on_load = gate
            target.of(bus)
            await gate.at.wait()
            assert await bus.linear_position(orders) == 0
            gate.go_on.set()
            await online(bus)
            assert await bus.linear_position(orders) == made.last

    virtual.run(main())


# -- what is saved --------------------------------------------------------------------------------------------


def test_while_it_loads_no_positions_are_saved_but_those_of_the_snapshot() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing", start="earliest") as (bus, source, target):
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last)
            await write(made.writer, 5, first=35)
            await made.writer.writing.beat()
            gate = Gate(2)
            source.on_load = gate
            asked = asyncio.create_task(bus.bootstrap(orders))
            await gate.at.wait()
            await write(made.writer, 5, first=40)
            await asyncio.sleep(1.0)
            assert (await bus.store.load_reader("billing")).positions["orders", "w1"] == made.last + 5
            gate.go_on.set()
            await asked
            await bus.reading.saver.save()
            assert (await bus.store.load_reader("billing")).positions["orders", "w1"] == made.last + 10

    virtual.run(main())


def test_a_store_that_is_away_keeps_nothing_from_being_applied_once() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, target):
            store = bus.store
            for method in ("begin_bootstrap", "save_bootstrap", "load_reader"):
                failing, given = Times(2, Unavailable("the store", "away")), getattr(store, method)

                async def once(*args: Any, failing: Any = failing, given: Any = given, **kwargs: Any) -> Any:
                    await failing()
                    return await given(*args, **kwargs)

                setattr(store, method, once)
            target.of(bus)
            await bus.wait_for(orders, "w1", made.last, timeout=30)
            assert target.parts == [0, 1, 2, 3]
            assert [(one.parts, one.syncs) for one in await store.bootstraps("billing")] == [(4, 1)]

    virtual.run(main())


def test_what_was_saved_and_is_gone_begins_anew() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, target):
            world = bus.store.world

            @bus.snapshot(orders)
            def apply(part: SnapshotPart[Any]) -> None:
                target.apply(part)
                if len(target.parts) == 2:
                    world.ask("DELETE FROM busrep_bootstraps")

            await bus.wait_for(orders, "w1", made.last)
            assert target.parts == [0, 1, 0, 1, 2, 3]
            assert target.numbers == list(range(35))

    virtual.run(main())


def test_positions_that_are_gone_begin_anew() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, target):
            world = bus.store.world

            @bus.snapshot(orders)
            def apply(part: SnapshotPart[Any]) -> None:
                target.apply(part)
                if len(target.parts) == 4:
                    world.ask("DELETE FROM busrep_readers")

            await bus.wait_for(orders, "w1", made.last)
            assert target.parts == [0, 1, 2, 3, 0, 1, 2, 3]

    virtual.run(main())


def test_an_earlier_snapshot_that_is_over_is_not_taken_for_a_new_one() -> None:
    """Also by a process that had no part in it."""

    async def main() -> None:
        async with bench() as made:
            target = Target()
            async with made.read(reader="billing") as (bus, _, _t):
                target.of(bus)
                await online(bus)
            async with made.read(reader="billing") as (bus, _, _t):
                target.of(bus)
                await bus.wait_for(orders, "w1", made.last)
                last = await write(made.writer, 10, first=35)
                await made.writer.writing.beat()
                await bus.wait_for(orders, "w1", last)
                await bus.bootstrap(orders)
                assert target.parts == [0, 1, 2, 3, 0, 1, 2, 3, 4]
                assert [one.syncs for one in await bus.store.bootstraps("billing")] == [1]

    virtual.run(main())


# -- two processes under one name -----------------------------------------------------------------------------


def test_two_processes_of_one_name_load_one_snapshot_between_them() -> None:
    """The second goes on with what the first has begun; each part is saved once, and both are online."""

    async def main() -> None:
        async with bench() as made:
            gate = Gate(2)
            async with made.read(reader="billing") as (one, source, target):
                source.on_load = gate
                target.of(one)
                await gate.at.wait()
                await until(lambda: target.parts == [0, 1])
                async with made.read(reader="billing") as (other, second, _):
                    target.of(other)
                    await online(other)
                    assert target.parts == [0, 1, 2, 3]
                    assert second.loads == [2, 3]
                    gate.go_on.set()
                    await online(one)
                    assert target.parts == [0, 1, 2, 3, 2], "at least once: without save() it cannot know"
                    last = await write(made.writer, 5, first=35)
                    await one.wait_for(orders, "w1", last)
                    assert [one.syncs for one in await made.writer.store.bootstraps("billing")] == [1]

    virtual.run(main())


def test_a_process_whose_snapshot_was_replaced_goes_on_with_the_others() -> None:
    async def main() -> None:
        async with bench() as made:
            gate = Gate(2)
            async with made.read(reader="billing") as (one, source, first):
                source.on_load = gate
                first.of(one)
                await gate.at.wait()
                await until(lambda: first.parts == [0, 1])
                await write(made.writer, 5, first=35)
                await made.writer.writing.beat()
                store = made.writer.store
                found = await store.agree("orders", part_rows=10)
                await store.begin_bootstrap("billing", found, syncs=2, reason="asked for")
                await store.leave(found)
                gate.go_on.set()
                await online(one)
                assert first.parts == [0, 1, 2, 0, 1, 2, 3]
                assert first.applied[-1].agreement.same(found)
                assert first.numbers == list(range(40))

    virtual.run(main())


def test_save_refuses_a_part_that_is_not_this_processs_any_more() -> None:
    async def main() -> None:
        async with bench() as made, made.read(reader="billing") as (bus, _source, target):
            refused = []

            @bus.snapshot(orders)
            async def apply(part: SnapshotPart[Any]) -> None:
                if part.number == 1 and not refused:
                    bus.reading.bootstrapping._runs["orders"].machine.gone("a test says so", 0.0)
                    try:
                        await part.save(None)
                    except ReaderMoved as error:
                        refused.append(error)
                        raise
                target.apply(part)

            await online(bus)
            assert len(refused) == 1
            assert target.parts == [0, 0, 1, 2, 3]

    virtual.run(main())
