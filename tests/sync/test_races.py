"""What may come between two steps of a bus for threads: another process, another thread, an interrupt, the end."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import psycopg
import pytest

from busrep.core.application_commands import RemoteServerUp
from busrep.core.writer import Writer
from busrep.errors import Closed, CommitUnknown, ConfigError, Unavailable, WaitTimeout, WriterFenced
from busrep.runtime.deferred import DeferredTransaction
from busrep.stores import claims
from busrep.stores.interface import FactLog
from busrep.stores.planned import PlannedStore, writes
from busrep.stores.postgres.blocking import Pool
from busrep.stores.postgres.store import PostgresStore
from busrep.stores.sqlite.blocking import ThreadTurn
from busrep.sync.loop_thread import LoopThread
from busrep.sync.publisher import Publisher
from busrep.sync.reading import ReadingBus
from busrep.sync.writing import BlockingFact as Fact
from busrep.testing.links import FaultyLink
from tests.asyncio.bus_conformance import Seen, until
from tests.shop import QUICK, Order, orders, typing
from tests.sync.test_writing import Deployment, Interrupt, Wire, deployment, on_sqlite, silence, threads, wire, write
from tests.transactions import Method, patch_transactions

__all__ = ["deployment", "on_sqlite", "wire"]  # fixtures

pytestmark = pytest.mark.servers


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The thread, and what it came to."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def settings(**options: Any) -> Any:
    return attrs.evolve(QUICK, save_every=0.05, **options)


# -- the name is lost, the log is another one -----------------------------------------------------------------


def test_own_positions_of_the_log_before_are_not_saved_in_the_new_one(on_sqlite: Deployment) -> None:
    path = on_sqlite.store.removeprefix("sqlite:///")
    with on_sqlite.table() as store:
        with on_sqlite.bus(reader="r", beats=False, settings=settings()) as bus:
            seen = Seen()
            bus.subscribe(orders)(seen)
            last = write(bus, 1, 2, 3, 4, 5)
            until(lambda: store.load_reader("r").positions.get(("orders", "w1")) == last)
            with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection, connection:
                connection.execute("DELETE FROM busrep_facts WHERE id > 2")
            epoch = store.restored()
            until(lambda: store.load_reader("r").epoch == epoch)
            until(lambda: seen.numbers == [1, 2])  # as of any other writer, from the oldest on
        assert store.load_reader("r").positions["orders", "w1"] == 2


@pytest.mark.parametrize("when", ["before", "while"])
def test_who_begins_to_read_when_the_name_is_lost_gets_what_the_successor_writes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def lose() -> None:
        successor.open()
        with pytest.raises(WriterFenced):
            write(former, 1)

    opening = ReadingBus.open

    async def late(bus: ReadingBus) -> None:
        lose()
        await opening(bus)

    with deployment.bus(beats=False) as former, contextlib.closing(deployment.bus()) as successor:
        if when == "before":
            lose()
        else:
            monkeypatch.setattr(ReadingBus, "open", late)
        seen = Seen()
        former.subscribe(orders)(seen)
        former.wait_for(orders, "w1", 0)  # what is written before the stream is followed nobody gets
        former.wait_for(orders, "w1", write(successor, 2))
        assert seen.numbers == [2]


def test_a_fenced_writer_waits_for_what_its_successor_wrote(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fenced, and whether another process has its name is being asked."""
    go_on = threading.Event()
    with deployment.bus() as former:
        writing: Any = former.writing
        given, seen = writing.store.claim, Seen()
        monkeypatch.setattr(writing.store, "claim", lambda *args, **options: go_on.wait(60) and given(*args, **options))
        try:
            former.subscribe(orders)(seen)
            mine = write(former, 1)
            with deployment.bus() as successor:
                theirs = write(successor, 2)
                with contextlib.suppress(WriterFenced):
                    writing.beat()
                assert writing.session.fenced is not None
                former.wait_for(orders, "w1", mine, timeout=20)
                with pytest.raises(WaitTimeout):
                    former.wait_for(orders, "w1", theirs, timeout=0.5)
                go_on.set()
                until(lambda: former.statistics()["writer"]["lost"])
                former.wait_for(orders, "w1", theirs, timeout=20)
                assert seen.numbers == [2]
        finally:
            go_on.set()


@pytest.mark.parametrize("taken", [False, True], ids=["finished", "taken"])
def test_who_asks_after_facts_is_told_that_the_name_is_lost_only_if_it_is(deployment: Deployment, taken: bool) -> None:
    with deployment.bus(beats=False) as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        with bus.write(orders, connection=connection) as fact:
            fact.add(Order(1, "joined"))
        connection.commit()
        silence(deployment)
        if taken:
            with deployment.bus(), pytest.raises(WriterFenced):
                bus.settle()
            assert bus.statistics()["writer"]["lost"]
        else:
            bus.settle()
            assert bus.statistics()["writer"]["in_doubt"] == 0
            last = write(bus, 2)
            assert list(deployment.rows()) == [fact.id, last]


def test_facts_of_an_earlier_incarnation_are_own_facts(deployment: Deployment) -> None:
    """The name was won back before the first handler was there."""
    with deployment.bus(beats=False, reader="r") as bus, deployment.bus(writer="w2") as other:
        write(bus, 1)
        silence(deployment)
        mine = write(bus, 2)
        seen = Seen()
        bus.subscribe(orders)(seen)
        bus.wait_for(orders, "w2", write(other, 3))
        until(lambda: bus.positions()["orders"].get("w1", 0) >= mine)
        assert seen.numbers == [3]


def test_a_fact_in_memory_whose_incarnation_has_ended_says_that_it_was_not_published(deployment: Deployment) -> None:
    with deployment.bus(beats=False) as bus:
        with pytest.raises(Unavailable, match="Write it again"):
            with bus.write(typing) as fact:
                fact.add(["anna"])
                silence(deployment)
                write(bus, 1)  # wins the name back
        with bus.write(typing) as fact:
            fact.add(["anna"])
        assert bus.statistics()["writer"]["streams"]["typing"]["sent"] == fact.id


def test_a_lost_name_is_told_of_without_remembering_who_was_told(deployment: Deployment) -> None:
    """An exception that is raised over and over holds the frames of all who got it."""
    with deployment.bus(beats=False) as bus, deployment.bus():
        lengths = set()
        for _ in range(5):
            with pytest.raises(WriterFenced) as caught:
                write(bus, 1)
            lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
        assert bus.writing is not None
        assert bus.writing.lost is not None
        assert len(traceback.extract_tb(bus.writing.lost.__traceback__)) <= max(lengths)
        with pytest.raises(WriterFenced) as caught:
            write(bus, 1)
        assert len(traceback.extract_tb(caught.value.__traceback__)) in lengths


# -- interrupts -----------------------------------------------------------------------------------------------


def stepped_over(wire: Wire, token: int) -> list[str]:
    """Announcements that there is no row of that ID."""
    return [
        line
        for line in wire.lines
        if line.startswith("POSITION orders w1 ") and int(line.split(" ")[3]) < token <= int(line.split(" ")[4])
    ]


def test_a_fact_interrupted_after_its_commit_is_never_announced_as_none(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(commit: Method) -> Method:
        async def replaced(transaction: Any) -> None:
            await commit(transaction)
            monkeypatch.undo()
            raise Interrupt

        return replaced

    with deployment.bus() as bus:
        first = write(bus, 1)
        patch_transactions(monkeypatch, "commit", interrupted)
        with pytest.raises(Interrupt):
            write(bus, 2, begin=True)
        last = write(bus, 3)
        assert wire.tokens(last) == [first, first + 1, last]
        assert stepped_over(wire, first + 1) == []
    assert list(deployment.rows()) == [first, first + 1, last]


class Interrupting(list[Any]):
    """Takes what is appended, and then is interrupted, once."""

    def append(self, item: Any) -> None:
        super().append(item)
        if len(self) == 1:
            raise Interrupt


@pytest.mark.parametrize("beats", [True, False])
def test_a_doubt_that_is_interrupted_while_it_is_noted_is_one_doubt(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    def unanswered(commit: Method) -> Method:
        async def replaced(transaction: Any) -> None:
            await commit(transaction)
            monkeypatch.undo()
            raise CommitUnknown(transaction.marker, OSError())

        return replaced

    calm = attrs.evolve(QUICK, heartbeat=600.0)
    with deployment.bus(beats=beats, settings=calm) as bus:
        first = write(bus, 1)
        assert bus.writing is not None
        session = bus.writing.session
        patch_transactions(monkeypatch, "commit", unanswered)
        session.doubts = Interrupting()
        with pytest.raises(Interrupt):
            write(bus, 2, begin=True)
        assert len(session.doubts) == 1
        bus.settle()
        last = write(bus, 3)
        assert wire.tokens(last) == [first, first + 1, last]


@pytest.mark.parametrize("ended", [False, True], ids=["session goes on", "session has ended"])
def test_a_transaction_may_be_told_to_have_ended_in_the_middle_of_asking_after_it(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """As when the garbage collector closes a generator that had a session of SQLAlchemy's open."""
    with deployment.bus(beats=False) as bus, psycopg.connect(deployment.store) as connection:
        first = write(bus, 1)
        connection.execute("SELECT 1")
        with bus.write(orders, connection=connection) as fact:
            fact.add(Order(2, "joined"))
        connection.commit()
        outcome = bus.store.wrapped.outcome

        async def collecting(*args: Any) -> Any:
            monkeypatch.undo()
            if ended:
                silence(deployment)
            fact.ended()
            return await outcome(*args)

        monkeypatch.setattr(bus.store.wrapped, "outcome", collecting)
        with contextlib.suppress(WriterFenced):
            bus.settle()
        last = write(bus, 3)
        wire.tokens(last)
        assert stepped_over(wire, fact.id) == []
        assert bus.statistics()["writer"]["in_doubt"] == 0
        assert list(deployment.rows()) == [first, fact.id, last]


@pytest.mark.parametrize("beats", [True, False])
def test_on_sqlite_an_interrupted_thread_keeps_no_turn(
    on_sqlite: Deployment, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """A function is interrupted before its first step, also one that is called to tidy up."""
    main = threading.get_ident()
    leave = ThreadTurn.leave

    def interrupted(turn: ThreadTurn, holder: Any) -> None:
        if threading.get_ident() == main:
            monkeypatch.undo()
            raise Interrupt
        leave(turn, holder)

    with on_sqlite.bus(beats=beats) as bus:
        monkeypatch.setattr(ThreadTurn, "leave", interrupted)
        with pytest.raises(Interrupt) as caught:
            write(bus, 1)
        assert write(bus, 2)
        assert caught.value.__traceback__  # what it was about is remembered still, and none of it is garbage
        other, ids = in_thread(lambda: write(bus, 3))
        other.join(10)
        assert ids == [max(on_sqlite.rows())]


def test_a_greenlet_that_is_killed_in_the_middle_of_a_fact(deployment: Deployment, wire: Wire) -> None:
    greenlet = pytest.importorskip("greenlet")
    lost: list[int] = []

    def work() -> None:
        with bus.write(orders) as fact:
            fact.add(Order(1, "never"))
            lost.append(fact.id)
            greenlet.getcurrent().parent.switch()

    with deployment.bus() as bus:
        for killed in (True, False):
            one = greenlet.greenlet(work)
            one.switch()
            if killed:
                one.throw()
            del one  # or collected
        last = write(bus, 2)
        assert wire.tokens(last) == [last]
    assert lost == [1, 2]
    assert list(deployment.rows()) == [last]


def test_on_sqlite_an_interrupted_thread_leaves_no_transaction(
    on_sqlite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        plan = claims.heartbeat(*args, **options)
        yield from ()
        answers = yield next(plan)  # BEGIN
        plan.send(answers)
        monkeypatch.undo()
        raise Interrupt

    with on_sqlite.bus(beats=False) as bus:
        write(bus, 1)
        assert bus.writing is not None
        monkeypatch.setattr(PlannedStore, "heartbeat", writes(FactLog.heartbeat, interrupted))
        with pytest.raises(Interrupt):
            bus.writing.beat()
        # Other processes can write, though this one does not.
        with contextlib.closing(sqlite3.connect(on_sqlite.store.removeprefix("sqlite:///"), timeout=0)) as another:
            another.execute("BEGIN IMMEDIATE")
        assert write(bus, 2, 3) == 3
        assert list(on_sqlite.rows()) == [1, 2, 3]


@pytest.mark.parametrize("store", ["deployment", "on_sqlite"])
def test_a_fact_whose_end_is_interrupted_before_it_begins_holds_nothing_up(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Somebody has it still: it is not found out about as garbage."""

    def interrupted(fact: Fact) -> None:
        monkeypatch.undo()
        raise Interrupt

    place: Deployment = request.getfixturevalue(store)
    with Wire(place.redis, place.name) as wire, place.bus(beats=False) as bus:
        assert bus.writing is not None
        monkeypatch.setattr(bus.writing.ending, "add", interrupted)
        fact = bus.write(orders)
        with pytest.raises(Interrupt):
            with fact:
                fact.add(Order(1, "never"))
        last = write(bus, 2)
        bus.settle()
        assert wire.tokens(last) == [last]
        assert list(place.rows()) == [last]
        assert fact.id < last


def test_a_fact_whose_end_is_interrupted_at_its_end_does_not_hold_up_the_bus(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fact: Fact) -> None:
        monkeypatch.undo()
        raise Interrupt

    patient = attrs.evolve(QUICK, shutdown_timeout=60.0)
    with deployment.bus(settings=patient) as bus:
        monkeypatch.setattr(bus.writing.ending, "discard", interrupted)  # type: ignore[union-attr]
        with pytest.raises(Interrupt):
            write(bus, 1)
        last = write(bus, 2)
        assert wire.tokens(last) == [1, last]
        assert len(bus.writing.ending) == 0  # type: ignore[union-attr]


def test_a_transaction_may_be_told_to_have_ended_while_another_is_rolled_back(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has ended, and a thread of busrep's that would make another needs what this one has."""

    def collecting(rollback: Method) -> Method:
        async def replaced(transaction: Any) -> Any:
            monkeypatch.undo()
            assert bus.writing is not None
            bus.writing.session.torn = True
            joined.ended()
            return await rollback(transaction)

        return replaced

    def interrupted(_commit: Method) -> Method:
        async def replaced(_transaction: Any) -> None:
            raise Interrupt

        return replaced

    with deployment.bus(beats=False) as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        with bus.write(orders, connection=connection) as joined:
            joined.add(Order(1, "joined"))
        connection.commit()
        patch_transactions(monkeypatch, "rollback", collecting)
        patch_transactions(monkeypatch, "commit", interrupted)
        with pytest.raises(Interrupt):
            write(bus, 2, begin=True)
        last = write(bus, 3)
        wire.tokens(last)
        assert stepped_over(wire, joined.id) == []
        assert list(deployment.rows()) == [joined.id, last]


@pytest.mark.parametrize("beats", [True, False])
def test_a_fact_that_ends_in_the_middle_of_bookkeeping_waits_for_no_other_thread(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """As when the garbage collector ends it, and who asks after a fact in doubt wants to book what it was told."""
    told, booking = threading.Event(), threading.Event()
    outcome, complete = PostgresStore.outcome, Writer.fact_completed

    async def asked(*args: Any) -> Any:
        found = await outcome(*args)
        if found is not None:
            told.set()
            booking.wait(60)
        return found

    def booked(*args: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not booking.is_set():
            assert told.wait(60)
            booking.set()
            garbage.close()
        complete(*args)

    calm = attrs.evolve(QUICK, heartbeat=600.0)
    with deployment.bus(beats=beats, settings=calm) as bus, psycopg.connect(deployment.store) as connection:

        def writing() -> Iterator[int]:
            with bus.write(orders) as fact:
                fact.add(Order(1, "garbage"))
                yield fact.id

        garbage = writing()
        lost = next(garbage)
        monkeypatch.setattr(PostgresStore, "outcome", asked)
        monkeypatch.setattr(Writer, "fact_completed", booked)
        with bus.write(orders) as fact:
            fact.add(Order(2, "new"))
            connection.execute("SELECT 1")
            joined = write(bus, 3, connection=connection)
            connection.commit()
            settling, _ = in_thread(bus.settle)
        settling.join()
        monkeypatch.undo()
        bus.settle()
        bus.store.claim("w1", ["orders"], timeout=10)  # the transaction of what was garbage has ended
        assert bus.statistics()["writer"]["in_doubt"] == 0
        assert wire.tokens(joined) == [fact.id, joined]
        assert lost not in deployment.rows()


def test_a_connection_whose_thread_was_interrupted_before_it_was_made_counts_no_more() -> None:
    class Lock:
        """Interrupted when it is given back."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.lock.__exit__(*error)
            pool._lock = self.lock
            raise Interrupt

    made: list[Any] = []

    class Connection:
        closed = False

    def dial() -> Any:
        made.append(Connection())
        return made[-1]

    pool = Pool(dial, 1, "nowhere")
    pool._lock = Lock(pool._lock)  # type: ignore[assignment]
    with pytest.raises(Interrupt):
        pool.take()
    assert pool.take() is made[0]


def test_a_reading_half_that_is_interrupted_while_it_begins_ends(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = threading.main_thread().ident
    assert main is not None
    opening = ReadingBus.open
    interrupted = threading.Event()

    async def slow(bus: ReadingBus) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        interrupted.wait()
        await opening(bus)

    with deployment.bus(writer=None) as reader:
        monkeypatch.setattr(ReadingBus, "open", slow)
        with pytest.raises(KeyboardInterrupt):
            reader.subscribe(orders)
        monkeypatch.undo()
        interrupted.set()
        until(lambda: not threads())
        seen = Seen()
        reader.subscribe(orders)(seen)
        with deployment.bus() as writer:
            reader.wait_for(orders, "w1", write(writer, 1))
        assert seen.numbers == [1]


# -- the end --------------------------------------------------------------------------------------------------


def test_a_call_that_comes_after_the_loop_s_last_turn_is_told_that_the_bus_is_closed(deployment: Deployment) -> None:
    with deployment.bus(writer=None) as reader:
        reader.subscribe(orders)
        assert reader.reading is not None
        loop = reader.reading._loop
        close, closing, go_on = loop.close, threading.Event(), threading.Event()

        def slow() -> None:
            closing.set()
            go_on.wait()
            close()

        loop.close = slow  # type: ignore[method-assign]
        ending, _ = in_thread(reader.close)
        assert closing.wait(10)
        calling, told = in_thread(partial(reader.reading.do, ReadingBus.positions))
        until(lambda: loop._ready)  # type: ignore[attr-defined]
        go_on.set()
        ending.join()
        calling.join(10)
        assert [type(error) for error in told] == [Closed]


def test_a_call_that_comes_when_the_loop_was_closed_is_told_so_too(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing, go_on = threading.Event(), threading.Event()
    refuse_all = LoopThread._refuse_all

    def slow(thread: LoopThread) -> None:
        refusing.set()
        go_on.wait()
        refuse_all(thread)

    with deployment.bus(writer=None) as reader:
        reader.subscribe(orders)
        assert reader.reading is not None
        monkeypatch.setattr(LoopThread, "_refuse_all", slow)
        ending, _ = in_thread(reader.close)
        assert refusing.wait(10)
        with pytest.raises(Closed):
            reader.reading.do(ReadingBus.positions)
        go_on.set()
        ending.join()
        with pytest.raises(Closed):
            reader.reading.do(ReadingBus.positions)


def test_the_loop_s_own_thread_cannot_wait_for_itself(deployment: Deployment) -> None:
    with deployment.bus(writer=None) as reader:
        reader.subscribe(orders)
        assert reader.reading is not None
        told: list[BaseException] = []

        def from_the_loop() -> None:
            try:
                reader.positions()
            except ConfigError as error:
                told.append(error)

        reader.reading._loop.call_soon_threadsafe(from_the_loop)
        until(lambda: told)
        assert "event loop" in str(told[0])


@pytest.mark.parametrize("writer", ["w1", None])
def test_who_sends_while_the_bus_closes_is_waited_for(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, writer: str | None
) -> None:
    """A connection that is closed under its user fails in ways that are no trouble of Redis."""
    bus = deployment.bus(writer=writer)
    bus.open()
    send, sending, go_on = Publisher.send, threading.Event(), threading.Event()
    closed_meanwhile: list[bool] = []

    def slow(publisher: Publisher, channel: str, data: bytes) -> None:
        sending.set()
        go_on.wait()
        closed_meanwhile.append(publisher._closed)
        send(publisher, channel, data)

    monkeypatch.setattr(Publisher, "send", slow)
    sender, told = in_thread(lambda: bus.send(RemoteServerUp("a")))
    assert sending.wait(10)
    closer, _ = in_thread(bus.close)
    until(lambda: bus.state != "open")
    closer.join(0.3)
    go_on.set()
    sender.join()
    closer.join()
    assert (told, closed_meanwhile) == ([None], [False])


# -- the beginning --------------------------------------------------------------------------------------------


def test_a_bus_that_could_not_be_opened_is_tried_again_at_its_next_use(deployment: Deployment) -> None:
    with FaultyLink.in_thread(deployment.redis) as link, FaultyLink.in_thread(deployment.store) as database:
        bus = deployment.bus(redis=link.url, store=database.url)
        for faulty in (link, database):
            faulty.refuse = True
            faulty.cut()
            with pytest.raises(Unavailable):
                write(bus, 1)
            with pytest.raises(Unavailable):
                bus.open()
            assert threads() == set()
            faulty.refuse = False
        assert write(bus, 1) == 1
        bus.close()
    with pytest.raises(Closed):
        write(bus, 2)


@pytest.mark.parametrize("store", ["deployment", "on_sqlite"])
def test_9_27_a_writer_in_threads_beats_as_a_whole(request: pytest.FixtureRequest, store: str) -> None:
    """It hears neither the others nor who asks for positions."""
    place: Deployment = request.getfixturevalue(store)
    with place.bus(beats=False) as bus:
        assert bus.writing is not None
        bus.writing.beat()
        session = bus.writing.session
        assert session.beat_begins().whole
        assert not session.core.announcements.in_turns


def test_two_threads_of_a_block_begin_one_transaction(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, another = threading.Event(), threading.Event(), threading.Event()
    given = DeferredTransaction.begin_now

    async def begin(transaction: DeferredTransaction) -> None:
        (another if began.is_set() else began).set()
        assert go_on.wait(60)
        await given(transaction)

    monkeypatch.setattr(DeferredTransaction, "begin_now", begin)
    with deployment.bus(beats=False) as bus, bus.write(orders) as fact:
        first, _ = in_thread(lambda: fact.execute("SELECT 1"))
        assert began.wait(60)
        second, found = in_thread(lambda: fact.execute("SELECT 2"))
        assert not another.wait(0.3)  # as long as a second one would have to begin
        go_on.set()
        first.join(60)
        second.join(60)
        assert found == [[(2,)]]
