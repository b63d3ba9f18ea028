"""The writing half for threads, on real servers: order, faults of the database and of Redis, interrupts, silence."""

from __future__ import annotations

import contextlib
import gc
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import attrs
import psycopg
import pytest
import redis as redis_py

import busrep.sync
from busrep import Stream
from busrep.core.application_commands import RemoteServerUp
from busrep.core.catchup import FetchUpdates
from busrep.core.ids import IdGenerator
from busrep.core.writer import Writer
from busrep.errors import (
    BusrepError,
    Closed,
    CommitUnknown,
    ConfigError,
    NotAWriter,
    RowError,
    SchemaError,
    StatementRefused,
    Unavailable,
    WriterFenced,
)
from busrep.runtime.fact import SETTLE_FIRST
from busrep.runtime.late_ids import LateIds
from busrep.runtime.open_facts import OpenFacts
from busrep.runtime.session import WriterSession
from busrep.stores import claims, open_store
from busrep.stores.blocking import BlockingStore
from busrep.stores.planned import PlannedStore
from busrep.stores.sqlite.blocking import BlockingSqliteStore
from busrep.streams import Registry
from busrep.sync import Bus, connect
from busrep.sync.publisher import Publisher
from busrep.sync.writing import SharedWriter
from busrep.testing.links import FaultyLink
from busrep.testing.servers import start_redis
from tests.asyncio.bus_conformance import until
from tests.shop import QUICK, STREAMS, Order, make_tables, opened_store, orders, payments, typing
from tests.transactions import TRANSACTIONS, Method, patch_methods, surrounded

pytestmark = pytest.mark.servers


@attrs.define
class Deployment:
    """Buses of one name on one Redis and one store."""

    redis: str
    name: str
    store: str

    def bus(self, **options: Any) -> Bus:
        given = {"name": self.name, "streams": STREAMS, "store": self.store, "settings": QUICK, "writer": "w1"}
        given |= options
        return connect(given.pop("redis", self.redis), **given)

    def table(self) -> AbstractContextManager[BlockingStore]:
        return opened_store(self.store)

    def rows(self, writer: str = "w1", stream: str = "orders") -> dict[int, list[bytes]]:
        with self.table() as store:
            page = store.fetch(FetchUpdates(stream, writer, 0, 10**6, 10**6))
        found: dict[int, list[bytes]] = {}
        for token, payload in zip(page.tokens, page.payloads, strict=True):
            found.setdefault(token, []).append(payload)
        return found


@pytest.fixture
def deployment(redis_url: str, bus_name: str, postgres_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, postgres_url)
    make_tables(found.store)
    return found


@pytest.fixture
def on_sqlite(redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, sqlite_url)
    make_tables(found.store)
    return found


class Wire:
    """All that is published on a deployment's channel."""

    def __init__(self, url: str, channel: str) -> None:
        self.frames: list[list[str]] = []
        self._client = redis_py.Redis.from_url(url)
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(channel)
        self._pubsub.get_message(timeout=5)  # the confirmation

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._pubsub.close()
        self._client.close()

    def read(self, until: Callable[[list[str]], bool], timeout: float = 60.0) -> list[str]:
        """All lines so far, once they are what is waited for."""
        deadline = time.monotonic() + timeout
        while not until(self.lines):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen: {self.lines[-20:]}"
            message = self._pubsub.get_message(timeout=left)
            if message is not None:
                self.frames.append(message["data"].decode().split("\n"))
        return self.lines

    @property
    def lines(self) -> list[str]:
        return [line for frame in self.frames for line in frame]

    def tokens(self, until: int, stream: str = "orders", writer: str = "w1") -> list[int]:
        """The tokens of the rows published, once that one was."""
        wanted = f"RDATA {stream} {writer} {until} "
        lines = self.read(lambda lines: any(line.startswith(wanted) for line in lines))
        rows = [line.split(" ")[3] for line in lines if line.startswith(f"RDATA {stream} {writer} ")]
        return [int(token) for token in rows if token != "batch"]

    def chained(self, stream: str = "orders", writer: str = "w1") -> bool:
        """Whether each frame begins where the one before ended (rule 9.6), or steps over what is to be fetched. The
        same bytes may come again."""
        end = None
        once = {"\n".join(frame): frame for frame in self.frames}
        for line in [line for frame in once.values() for line in frame]:
            name, *fields = line.split(" ", 4)
            if name == "POSITION" and fields[:2] == [stream, writer]:
                if end is not None and int(fields[2]) < end:
                    return False
                end = int(fields[3])
            elif name == "RDATA" and fields[:2] == [stream, writer] and fields[2] != "batch":
                if end is None or int(fields[2]) <= end:
                    return False
                end = int(fields[2])
        return True

    def reaching_readers(self, rows: set[int], stream: str = "orders", writer: str = "w1") -> set[int]:
        """Those of the facts in the table that are on the wire, or that a POSITION tells readers to fetch. An RDATA
        line says that its writer has no fact between the one before and its own."""
        at, reaching = 0, set()
        for line in self.lines:
            name, *fields = line.split(" ", 4)
            if fields[:2] == [stream, writer] and name == "POSITION":
                reaching |= {row for row in rows if at < row <= int(fields[2])}
                at = max(at, int(fields[3]))
            elif fields[:2] == [stream, writer] and name == "RDATA":
                reaching.add(int(fields[2]))
                at = max(at, int(fields[2]))
        return reaching


@pytest.fixture
def wire(deployment: Deployment) -> Iterator[Wire]:
    with Wire(deployment.redis, deployment.name) as found:
        yield found


def write(bus: Bus, *numbers: int, begin: bool = False, **options: Any) -> int:
    """One fact per number; the last ID. ``begin``: a statement begins a transaction of its own."""
    last = 0
    for number in numbers:
        with bus.write(orders, **options) as fact:
            fact.add(Order(number, "new"))
            if begin:
                fact.execute("SELECT 1")
        last = fact.id
    return last


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("busrep")}


BEATS = pytest.mark.parametrize("beats", [True, False], ids=["beats", "no beats"])


# -- writing --------------------------------------------------------------------------------------------------


@BEATS
def test_facts_are_committed_and_published_when_the_block_ends(deployment: Deployment, wire: Wire, beats: bool) -> None:
    with deployment.bus(beats=beats) as bus:
        with bus.write(orders) as fact:
            fact.add(Order(1, "new"))
            fact.add(Order(1, "paid"))
        ids = bus.publish(orders, [Order(n, "bulk") for n in range(2, 302)])
        assert bus.positions() == {"orders": {"w1": ids[-1]}, "payments": {"w1": 0}, "typing": {"w1": 0}}
        assert ids == list(range(fact.id + 1, fact.id + 301))
        assert wire.tokens(ids[-1]) == [fact.id, *ids]
        bus.wait_for(orders, "w1", ids[-1])  # the own: at once, and without a reading half
        assert threads() == ({"busrep-announce", "busrep-beat", "busrep-look"} if beats else set())
    assert deployment.rows()[fact.id] == [b'[1,"new"]', b'[1,"paid"]']
    assert wire.chained()
    assert threads() == set()


def test_a_reader_that_came_after_the_last_announcement_believes_the_next_fact(deployment: Deployment) -> None:
    """Nobody answers its REPLICATE, and there may be no announcement for as long as this writer lives."""
    seldom = attrs.evolve(QUICK, heartbeat=600.0)
    patient = attrs.evolve(QUICK, silent_after_beats=10_000)  # finishes nobody
    with deployment.bus(settings=seldom, beats=False) as bus:
        bus.positions()  # open
        with deployment.bus(writer=None, settings=patient) as reader:
            heard: list[int] = []
            reader.subscribe(orders)(lambda batch: heard.extend(batch.tokens))
            until(lambda: reader.statistics()["reader"]["states"].get("orders") == {"w1": "unsynced"})
            until(lambda: reader.statistics()["link"]["reading"]["connected"])
            first = write(bus, 1)
            until(lambda: heard == [first])
            assert reader.statistics()["reader"]["other_logs"] == 0


def test_facts_of_one_row_with_something_else_in_their_transaction(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus(beats=False) as bus:
        with bus.write(orders, count=3) as fact:
            ids = fact.add_each([Order(n, "bulk") for n in range(3)])
            assert ids == [fact.id, fact.id + 1, fact.id + 2]
            assert fact.execute("SELECT 1") == [(1,)]
        for rows in (1, 3):
            with pytest.raises(ConfigError, match=f"count={rows}"), bus.write(orders, count=2) as fact:
                fact.add_each([Order(n, "wrong") for n in range(rows)])
        assert wire.tokens(ids[-1]) == ids
    assert [deployment.rows()[id] for id in ids] == [[b'[%d,"bulk"]' % n] for n in range(3)]
    assert len(deployment.rows()) == 3


def test_facts_of_several_rows_in_one_transaction(deployment: Deployment, wire: Wire) -> None:
    """Each has an ID of its own; one without rows leaves its ID empty, and one of one row is among them."""
    with deployment.bus(beats=False) as bus:
        with bus.write(orders, count=3) as fact:
            fact.add(Order(2, "new"), at=2)
            for status in ("new", "paid"):
                fact.add(Order(1, status), at=0)
            first, _, last = fact.published_ids()
        assert deployment.rows() == {first: [b'[1,"new"]', b'[1,"paid"]'], last: [b'[2,"new"]']}
        assert wire.tokens(last) == [first, last]  # each with the last of its rows
        for at in (-1, 2):
            with pytest.raises(ConfigError, match=f"at={at} of 2 facts.*count="), bus.write(orders, count=2) as fact:
                fact.add(Order(1, "wrong"), at=at)
        assert bus.statistics()["writer"]["facts"] == 2
        assert bus.statistics()["writer"]["rows"] == 3
    assert len(deployment.rows()) == 2


@pytest.mark.parametrize(("first", "second"), [("add", "each"), ("each", "add"), ("each", "each")])
def test_rows_whose_place_others_would_take_are_an_error(deployment: Deployment, first: str, second: str) -> None:
    """``add_each`` has the rows of all facts of the block: those of another call would be lost in silence."""
    with deployment.bus(beats=False) as bus:
        with pytest.raises(ConfigError, match="call it once, and add"), bus.write(orders, count=2) as fact:
            for way in (first, second):
                fact.add(Order(1, "one")) if way == "add" else fact.add_each([Order(1, "each"), Order(2, "each")])
        assert deployment.rows() == {}


def test_threads_that_use_it_first_at_once_open_it_once(deployment: Deployment, wire: Wire) -> None:
    bus, ready, ids = deployment.bus(), threading.Barrier(4), []

    def work(number: int) -> None:
        ready.wait()
        ids.extend(bus.publish(orders, [Order(number, "new")]))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    bus.close()
    assert sorted(ids) == [1, 2, 3, 4]
    assert wire.tokens(4) == [1, 2, 3, 4]


def test_a_rolled_back_fact_is_never_published_and_holds_nothing_up(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus:
        first = write(bus, 1)
        with pytest.raises(KeyError):
            with bus.write(orders) as fact:
                fact.add(Order(2, "never"))
                raise KeyError
        with pytest.raises(RowError):
            with bus.write(orders) as fact:
                fact.add(Order("three", "never"))  # type: ignore[arg-type]
        last = write(bus, 4)
        assert wire.tokens(last) == [first, last]
    assert list(deployment.rows()) == [first, last]


@BEATS
def test_facts_of_many_threads_are_published_in_the_order_of_their_ids(
    deployment: Deployment, wire: Wire, beats: bool
) -> None:
    with deployment.bus(beats=beats) as bus:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for at in range(15):
                    with contextlib.suppress(KeyError):
                        with bus.write(orders) as fact:
                            fact.add(Order(number, "new"))
                            if (at + number) % 5 == 0:
                                raise KeyError
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()
        assert errors == []
        last = write(bus, 99)
        tokens = wire.tokens(last)
        assert tokens == sorted(set(tokens)) == list(deployment.rows())
        assert len(tokens) == 8 * 12 + 1
        assert wire.chained()
        assert bus.statistics()["writer"]["facts"] == len(tokens)


def test_a_fact_that_is_open_holds_back_later_ones_of_other_threads(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus:
        with bus.write(orders) as first:
            first.add(Order(1, "slow"))
            later: list[int] = []
            other = threading.Thread(target=lambda: later.append(write(bus, 2)))
            other.start()
            other.join()
            assert bus.positions()["orders"]["w1"] < first.id
        assert wire.tokens(later[0]) == [first.id, later[0]]


def test_facts_nest(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus:
        with bus.write(orders) as outer:
            inner = write(bus, 2)
            outer.add(Order(1, "outer"))
        assert wire.tokens(inner) == [outer.id, inner]


def test_one_fact_of_several_streams_is_one_transaction(deployment: Deployment) -> None:
    with deployment.bus() as bus:
        with bus.write(orders, payments, typing) as fact:
            fact.add(Order(1, "new"))
            fact.add(Order(2, "due"), stream=payments)
            fact.add(["anna"], stream=typing)
            with pytest.raises(ConfigError, match="name all its streams"):
                fact.add(1, stream=Stream("other"))
        assert set(fact.ids) == {"orders", "payments", "typing"}
        with contextlib.suppress(KeyError):
            with bus.write(orders, payments) as never:
                never.add(Order(1, "new"))
                raise KeyError
    assert list(deployment.rows()) == [fact.id]
    assert list(deployment.rows(stream="payments")) == [fact.ids["payments"]]


def test_a_writer_of_streams_in_memory_needs_no_store(redis_url: str, bus_name: str) -> None:
    with Wire(redis_url, bus_name) as wire, connect(redis_url, name=bus_name, streams=[typing], writer="w1") as bus:
        with bus.write(typing) as fact:
            fact.add(["anna"])
            with pytest.raises(ConfigError, match="memory"):
                fact.execute("SELECT 1")
        assert wire.tokens(fact.id, "typing") == [1]


def test_business_statements_and_the_fact_share_a_transaction(deployment: Deployment) -> None:
    with psycopg.connect(deployment.store) as connection:
        connection.execute("CREATE TABLE business (n int)")
    with deployment.bus() as bus:
        with bus.write(orders) as fact:
            fact.execute("INSERT INTO business VALUES (%s)", (1,))
            fact.connection.execute("INSERT INTO business VALUES (2)")
            fact.add(Order(1, "new"))
        with pytest.raises(psycopg.Error):
            with bus.write(orders) as never:
                never.execute("INSERT INTO business VALUES (3)")
                never.execute("SELECT nonsense")
        assert write(bus, 4) > fact.id
    with psycopg.connect(deployment.store) as connection:
        assert connection.execute("SELECT n FROM business ORDER BY n").fetchall() == [(1,), (2,)]


@BEATS
@pytest.mark.parametrize("autocommit", [True, False], ids=["autocommit", "implicit"])
def test_facts_on_the_caller_s_connection(deployment: Deployment, wire: Wire, autocommit: bool, beats: bool) -> None:
    with deployment.bus(beats=beats) as bus, psycopg.connect(deployment.store, autocommit=autocommit) as connection:
        own = write(bus, 1, connection=connection)
        published = [own]
        for number, commit in ((2, True), (3, False), (4, True)):
            connection.execute("BEGIN" if autocommit else "SELECT 1")
            joined = write(bus, number, connection=connection)
            later = write(bus, number + 10)
            assert bus.positions()["orders"]["w1"] < joined
            (connection.commit if commit else connection.rollback)()
            bus.settle()
            published += [joined] * commit + [later]
            assert wire.tokens(later) == published


def test_a_joined_transaction_is_seen_to_commit_without_being_told(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        joined = write(bus, 1, connection=connection)
        connection.commit()
        assert wire.tokens(joined) == [joined]


def test_a_transaction_that_is_held_slows_down_no_other(deployment: Deployment) -> None:
    with (
        deployment.bus(beats=False) as bus,
        psycopg.connect(deployment.store) as held,
        psycopg.connect(deployment.store) as other,
    ):
        held.execute("SELECT 1")
        write(bus, 1, connection=held)
        assert [bus.writing.look() for _ in range(3)] == [SETTLE_FIRST, 2 * SETTLE_FIRST, 4 * SETTLE_FIRST]
        other.execute("SELECT 1")
        write(bus, 2, connection=other)
        assert bus.writing.look() == SETTLE_FIRST


def test_settle_publishes_what_another_thread_asked_after(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the bus's asks by itself. It may be between the answer and publishing when the caller asks too."""
    with deployment.bus(beats=False) as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        joined = write(bus, 1, connection=connection)
        connection.commit()
        with monkeypatch.context() as held_up:
            held_up.setattr(bus.writing.publishing, "publish", lambda **_: False)
            bus.writing.settle()
        assert not bus.writing.session.doubts
        assert bus.positions()["orders"]["w1"] < joined
        bus.settle()
        assert bus.positions()["orders"]["w1"] == joined
        assert wire.tokens(joined) == [joined]


def test_a_transaction_that_has_ended_is_published_whole(deployment: Deployment, wire: Wire) -> None:
    """Also when one of its facts has been asked after alone, before the other was noted."""
    with deployment.bus(beats=False) as bus, psycopg.connect(deployment.store) as connection:  # no thread asks
        connection.execute("SELECT 1")
        facts = []
        for number in (1, 2):
            with bus.write(orders, connection=connection) as fact:
                fact.add(Order(number, "new"))
            facts.append(fact)
        connection.commit()
        session = bus.writing.session
        bus.writing.settle_one(session, session.doubts[0])
        assert len(session.doubts) == 1
        facts[0].ended()
        assert bus.positions()["orders"]["w1"] == facts[1].id
        assert wire.tokens(facts[1].id) == [fact.id for fact in facts]


def test_a_joined_transaction_may_commit_though_the_fact_s_block_failed(deployment: Deployment, wire: Wire) -> None:
    """Rule 9.1: rows that the application inserts itself, under the fact's ID."""
    with deployment.bus() as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        with contextlib.suppress(KeyError):
            with bus.write(orders, connection=connection) as fact:
                connection.execute(
                    "INSERT INTO busrep_facts (stream, writer, id, idx, row) "
                    "VALUES ('orders', 'w1', %s, 0, '[1,\"x\"]')",
                    (fact.id,),
                )
                raise KeyError
        connection.commit()
        assert wire.tokens(fact.id) == [fact.id]


def test_a_savepoint_rolled_back_inside_the_block_does_not_let_go_of_the_claim(
    deployment: Deployment, wire: Wire
) -> None:
    """With it goes the lock on the claim, if it is older than the fact: its successor would take the ID for empty."""
    with deployment.bus() as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SAVEPOINT before")
        with bus.write(orders, connection=connection) as fact:
            fact.add(Order(1, "still ours"))
            connection.execute("ROLLBACK TO before")
        connection.commit()
        assert wire.tokens(fact.id) == [fact.id]
        connection.execute("SAVEPOINT before")
        with pytest.raises(WriterFenced):
            with bus.write(orders, connection=connection) as late:
                late.add(Order(2, "of the one before"))
                connection.execute("ROLLBACK TO before")
                with deployment.bus() as successor:
                    write(successor, 3)
        connection.commit()
    assert late.id not in deployment.rows()


def test_a_transaction_that_ends_inside_the_block_is_told(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus, psycopg.connect(deployment.store) as connection:
        connection.execute("SELECT 1")
        with pytest.raises(ConfigError, match="after the block"):
            with bus.write(orders, connection=connection) as fact:
                fact.add(Order(1, "in no transaction of ours"))
                connection.commit()
        connection.commit()
        last = write(bus, 2)
        assert wire.tokens(last) == [last]


def test_facts_on_sqlite(on_sqlite: Deployment) -> None:
    path = on_sqlite.store.removeprefix("sqlite:///")
    with Wire(on_sqlite.redis, on_sqlite.name) as wire, on_sqlite.bus() as bus:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            first = write(bus, 1, connection=connection)
            with bus.write(orders, connection=connection) as fact:
                connection.execute("CREATE TABLE business (n INTEGER)")
                fact.add(Order(2, "ours"))
            connection.execute("INSERT INTO business VALUES (1)")
            assert write(bus, 3, connection=connection) == fact.id + 1  # joined
            connection.rollback()
            bus.settle()
        with bus.write(orders) as last:
            nested = write(bus, 4)  # nothing holds the lock yet
            last.execute("SELECT 1")
            with pytest.raises(ConfigError, match="one write lock"):
                write(bus, 5)
            last.add(Order(6, "new"))
        assert sorted(wire.tokens(nested)) == [first, fact.id, last.id, nested]


def test_9_2_a_fact_that_never_began_does_not_step_over_a_successor_s(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets its ID when a successor has the name, and a fact below; it fails before it can learn of that."""
    with deployment.bus(beats=False, settings=attrs.evolve(QUICK, heartbeat=600.0)) as bus:
        first = write(bus, 1)
        store: Any = bus.store.wrapped  # type: ignore[union-attr]
        reserve = store.reserve

        async def late(stream: str, count: int, held: Any = None) -> list[int]:
            await store.claim("w1", ["orders"], timeout=5.0)
            await reserve(stream, 1)  # the successor's
            return await reserve(stream, count)

        async def cut(_transaction: Any) -> None:
            raise Unavailable("the database", OSError("cut"))

        with monkeypatch.context() as patch, pytest.raises(Unavailable):
            patch.setattr(store, "reserve", late)
            patch_methods(patch, TRANSACTIONS, "begin", lambda _: cut)
            write(bus, 2, begin=True)
        assert bus.positions()["orders"]["w1"] == first
        with pytest.raises(WriterFenced):
            write(bus, 3)


# -- a COMMIT without an answer (9.1) -------------------------------------------------------------------------


@BEATS
@pytest.mark.parametrize("landed", [True, False], ids=["committed", "aborted"])
def test_9_1_no_answer_to_commit(deployment: Deployment, wire: Wire, landed: bool, beats: bool) -> None:
    calm = attrs.evolve(QUICK, heartbeat=5.0)  # or a beat's COMMIT may be the one that is cut
    with (
        FaultyLink.in_thread(deployment.store) as link,
        deployment.bus(store=link.url, beats=beats, settings=calm) as bus,
    ):
        first = write(bus, 1)
        with pytest.raises(CommitUnknown):
            with bus.write(orders) as fact:
                fact.add(Order(2, "in doubt"))
                fact.execute("SELECT 1")  # what is sent next holds COMMIT
                link.cut_when(b"COMMIT", "from_server" if landed else "to_server", after=False)
        last = write(bus, 3)
        if not beats:  # the server may not have seen yet that the link is cut
            until(lambda: bus.settle() or bus.statistics()["writer"]["in_doubt"] == 0)
        assert wire.tokens(last) == ([first, fact.id, last] if landed else [first, last])
        assert bus.statistics()["writer"]["in_doubt"] == 0
    assert wire.chained()
    assert (fact.id in deployment.rows()) is landed


def test_an_outcome_that_is_not_told_holds_up_nobody_for_ever(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler, or a proxy, whose server is gone: who asks has the lock that `ended` and `settle` take."""
    calm = attrs.evolve(QUICK, heartbeat=600.0)
    with (
        FaultyLink.in_thread(deployment.store) as link,
        deployment.bus(store=link.url, settings=calm) as bus,
        psycopg.connect(deployment.store) as connection,
    ):
        store: Any = bus.store.wrapped  # type: ignore[union-attr]
        outcome, asked = store.outcome, threading.Event()

        async def unanswered(*args: Any) -> Any:
            if not asked.is_set():
                store.settings = attrs.evolve(calm, fetch_timeout=0.3)
                link.abandon("server")
                asked.set()
            try:
                return await outcome(*args)
            finally:
                store.settings = calm

        write(bus, 1)
        monkeypatch.setattr(store, "outcome", unanswered)
        connection.execute("SELECT 1")
        with bus.write(orders, connection=connection) as fact:
            fact.add(Order(2, "joined"))
        assert asked.wait(60)
        connection.commit()
        telling = threading.Thread(target=fact.ended, daemon=True)
        telling.start()
        telling.join(60)
        assert not telling.is_alive()
        assert wire.tokens(fact.id)[-1] == fact.id


def test_a_beat_that_waits_for_a_row_holds_up_no_fact(deployment: Deployment, wire: Wire) -> None:
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with deployment.bus() as bus, psycopg.connect(deployment.store) as admin:
        write(bus, 1)
        admin.execute("SELECT FROM busrep_positions WHERE writer = 'w1' FOR UPDATE")
        with psycopg.connect(deployment.store, autocommit=True) as connection:
            until(lambda: bool(connection.execute(waiting).fetchall()))
            with connection.transaction():
                joined = write(bus, 2, connection=connection)
            wire.read(lambda lines: any(line.startswith(f"RDATA orders w1 {joined} ") for line in lines), timeout=20.0)
            assert connection.execute(waiting).fetchall()
        admin.rollback()


def test_9_1_a_refused_commit_is_no_commit(deployment: Deployment, wire: Wire) -> None:
    with psycopg.connect(deployment.store) as connection:
        connection.execute("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with deployment.bus() as bus:
        with pytest.raises(StatementRefused, match="UniqueViolation"):
            with bus.write(orders) as fact:
                fact.execute("INSERT INTO once VALUES (1), (1)")
                fact.add(Order(1, "never"))
        last = write(bus, 2)
        assert wire.tokens(last) == [last]
        assert bus.statistics()["writer"]["in_doubt"] == 0


# -- Redis is away --------------------------------------------------------------------------------------------


@BEATS
def test_business_goes_on_while_redis_is_away(bus_name: str, sqlite_url: str, beats: bool) -> None:
    with start_redis() as server:
        deployment = Deployment(server.url, bus_name, sqlite_url)
        with deployment.table():
            pass
        with deployment.bus(beats=beats) as bus:
            first = write(bus, 1)
            server.stop()
            for number in range(2, 12):
                write(bus, number)
            server.start()
            deadline = time.monotonic() + 10
            last = write(bus, 12)
            while bus.positions()["orders"]["w1"] < last:  # without beats: with the next write after a pause
                assert time.monotonic() < deadline
                time.sleep(0.05)
                last = last if beats else write(bus, 13)
            with Wire(server.url, bus_name) as wire:
                assert wire.tokens(write(bus, 14)) == [last + 1]
                assert f"POSITION orders w1 {last} {last}" in wire.lines  # the chain: whoever lacks one fetches it
            assert first == 1


def test_9_6_after_a_publish_without_an_answer_the_same_bytes_go_out_again(deployment: Deployment, wire: Wire) -> None:
    with FaultyLink.in_thread(deployment.redis) as link, deployment.bus(redis=link.url, beats=False) as bus:
        first = write(bus, 1)
        link.cut_when(b"RDATA orders w1 2 ")
        last = write(bus, 2, 3)
        assert wire.tokens(last)[-1] == last
    rows = [frame for frame in wire.frames if any(line.startswith("RDATA orders w1 2 ") for line in frame)]
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert first == 1


def test_a_full_queue_is_announced_to_be_fetched(deployment: Deployment, wire: Wire) -> None:
    small = attrs.evolve(QUICK, publish_queue_bytes=2_000)
    with FaultyLink.in_thread(deployment.redis) as link, deployment.bus(redis=link.url, settings=small) as bus:
        write(bus, 0)
        link.refuse = True
        link.cut()
        last = write(bus, *range(1, 60))
        statistics = bus.statistics()["writer"]
        assert statistics["queued_bytes"] <= 2_000
        assert statistics["rows_dropped"] > 0
        link.refuse = False
        wire.read(lambda lines: any(line.startswith(f"POSITION orders w1 {last} {last}") for line in lines))


def test_a_redis_that_is_not_there(deployment: Deployment) -> None:
    gone = "redis://127.0.0.1:1/0"
    with pytest.raises(Unavailable, match="Redis"):
        deployment.bus(redis=gone).open()
    with deployment.bus(redis=gone, require_redis=False) as bus:
        assert write(bus, 1) == 1
        with pytest.raises(Unavailable):
            bus.send(RemoteServerUp("a"))
    assert threads() == set()


def test_a_redis_that_swallows_everything_stalls_a_write_for_no_longer_than_its_deadline(
    deployment: Deployment,
) -> None:
    # On a busy machine the first connection may take longer than that: it is tried again.
    options = {"settings": attrs.evolve(QUICK, redis_timeout=0.3), "require_redis": False}
    with FaultyLink.in_thread(deployment.redis) as link, deployment.bus(redis=link.url, **options) as bus:
        write(bus, 1)
        link.black_hole()
        last = write(bus, *range(2, 40))  # some wait; none for ever
        assert last == 39
        link.cut()
        link.heal()
        deadline = time.monotonic() + 10
        while bus.positions()["orders"]["w1"] < last:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_commands_are_sent(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus(writer=None) as bus:
        bus.send(RemoteServerUp("a"))
        wire.read(lambda lines: "REMOTE_SERVER_UP a" in lines)
        with pytest.raises(ConfigError, match="command"):
            bus.send("REMOTE_SERVER_UP a")  # type: ignore[arg-type]


# -- signs of life, and the name ------------------------------------------------------------------------------


def test_beats_announce_and_store_the_positions(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus:
        last = write(bus, 1, 2)
        before = len(wire.read(lambda lines: f"POSITION orders w1 {last} {last}" in lines))
        wire.read(lambda lines: f"POSITION orders w1 {last} {last}" in lines[before:])  # and again
        with deployment.table() as store:
            deadline = time.monotonic() + 10
            while not any(one.stream == "orders" and one.position >= last for one in store.known()):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_9_2_an_idle_writer_follows_the_others(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus(writer="idle"), deployment.bus(writer="busy") as busy:
        last = write(busy, 1, 2, 3)
        wire.read(lambda lines: f"POSITION orders idle {last} {last}" in lines)


def silence(deployment: Deployment, writer: str = "w1") -> int:
    """As a reader does with a writer that gives no sign of life: finish it."""
    with deployment.table() as store:
        incarnation = next(one.incarnation for one in store.known() if one.writer == writer)
        # It tells no final positions where the writer has won its name back by then.
        store.finish(writer, incarnation, timeout=5)
        return int(incarnation)


@BEATS
def test_a_writer_that_was_finished_for_its_silence_goes_on(deployment: Deployment, wire: Wire, beats: bool) -> None:
    with deployment.bus(beats=beats) as bus:
        first = write(bus, 1)
        incarnation = silence(deployment)
        last = write(bus, 2)
        assert wire.tokens(last)[-1] == last
        assert bus.statistics()["writer"]["incarnation"] > incarnation + 1
        assert f"NAME w1 {bus.statistics()['writer']['incarnation']}" in wire.lines
    assert list(deployment.rows()) == [first, last]


def test_a_fact_that_has_its_ids_when_the_writer_is_finished_is_refused(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployment.bus(beats=False) as bus:
        first = write(bus, 1)
        reserve = bus.store.wrapped.reserve

        async def late(stream: str, count: int, held: Any = None) -> list[int]:
            ids: list[int] = await reserve(stream, count)
            monkeypatch.undo()
            silence(deployment)
            return ids

        monkeypatch.setattr(bus.store.wrapped, "reserve", late)
        with pytest.raises(Unavailable, match="Write it again"):
            write(bus, 2)
        last = write(bus, 3)
        assert last == first + 2  # the first ID is a hole
        assert wire.tokens(last) == [first, last]


class LosingAnswers:
    """The next append of a store gets no answer, and what became of it is not told before ``asked`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bus: Any, landed: bool) -> None:
        self.store, self.landed, self.asked = bus.store.wrapped, landed, threading.Event()
        self.patch, self.given, self.outcome = monkeypatch, self.store.write_appended, self.store.outcome
        monkeypatch.setattr(self.store, "outcome", self.late)

    def begin(self) -> None:
        self.patch.setattr(self.store, "write_appended", self.lost)

    async def lost(self, claim: Any, group: Any, batch: Any) -> None:
        self.patch.setattr(self.store, "write_appended", self.given)
        if self.landed:
            await self.given(claim, group, batch)
            group.settled = False
        raise CommitUnknown(group, OSError("connection lost"))

    async def late(self, *args: Any) -> Any:
        if not self.asked.is_set():
            raise Unavailable("the store", "not yet")
        return await self.outcome(*args)


@BEATS
@pytest.mark.parametrize("landed", [True, False], ids=["written", "not written"])
def test_9_28_of_ids_whose_answer_was_lost_the_table_tells(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, landed: bool, beats: bool
) -> None:
    """What another thread writes meanwhile is not taken for that."""
    with deployment.bus(beats=beats) as bus:
        losing = LosingAnswers(monkeypatch, bus, landed)
        with bus.write(orders) as fact:
            losing.begin()
            with pytest.raises(CommitUnknown):
                bus.publish(orders, [Order(number, "lost") for number in (1, 2)])
            fact.add(Order(3, "open"))
        reserved = bus.publish(orders, [Order(4, "reserved")])
        losing.asked.set()
        bus.settle()
        last = bus.publish(orders, [Order(5, "last")])
        lost_ids = [2, 3] if landed else []
        assert [fact.id, *reserved, *last] == ([1, 4, 5] if landed else [1, 2, 3])
        assert wire.tokens(last[0]) == [fact.id, *lost_ids, *reserved, *last]
        assert bus.statistics()["writer"]["in_doubt"] == 0
    assert list(deployment.rows()) == [fact.id, *lost_ids, *reserved, *last]


def test_9_28_ids_of_a_joined_transaction_are_not_taken_for_them(
    on_sqlite: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SQLite these come with the transaction, and are known for good when it was asked after."""
    path = on_sqlite.store.removeprefix("sqlite:///")
    with on_sqlite.bus(beats=False) as bus, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as caller:
        losing = LosingAnswers(monkeypatch, bus, landed=True)
        caller.execute("BEGIN IMMEDIATE")
        with bus.write(orders, typing, connection=caller) as joined:
            joined.add(Order(1, "joined"))
            joined.add(["anna"], stream=typing)
        caller.execute("COMMIT")
        losing.begin()
        with pytest.raises(CommitUnknown):
            bus.publish(orders, [Order(2, "lost")])
        session = bus.writing.session
        session.doubts.reverse()  # the second is asked after first
        losing.asked.set()
        bus.settle()
        last = bus.publish(orders, [Order(3, "last")])
        assert wire.tokens(last[0]) == [1, 2, 3]
        assert bus.writing.session is session
        assert wire.tokens(1, "typing") == [1]  # it was committed


@pytest.mark.parametrize("number", [1, 2], ids=["the same row", "another row"])
@pytest.mark.parametrize("when", ["before it is booked", "after", "in doubt, first", "in doubt, last"])
def test_9_28_an_id_that_was_promised_and_given_again_is_the_second_fact_s(
    on_sqlite: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, when: str, number: int
) -> None:
    """The transaction that it was promised in was rolled back, and is asked after at any time."""
    path = on_sqlite.store.removeprefix("sqlite:///")
    with on_sqlite.bus(beats=False) as bus, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as caller:
        store, session = bus.store.wrapped, bus.writing.session
        given = store.write_appended

        async def beside_a_joined_fact(claim: Any, group: Any, batch: Any) -> None:
            monkeypatch.setattr(store, "write_appended", given)
            caller.execute("BEGIN IMMEDIATE")
            with bus.write(orders, typing, connection=caller) as joined:
                joined.add(Order(1, "new"))
                joined.add(["gone"], stream=typing)
            assert joined.id == 1
            caller.execute("ROLLBACK")
            await given(claim, group, batch)
            if when == "before it is booked":
                bus.settle()
            elif when != "after":
                group.settled = False
                raise CommitUnknown(group, OSError("connection lost"))

        monkeypatch.setattr(store, "write_appended", beside_a_joined_fact)
        with pytest.raises(CommitUnknown) if "doubt" in when else contextlib.nullcontext():
            assert bus.publish(orders, [Order(number, "new")]) == [1]
        if when == "in doubt, last":
            session.doubts.reverse()
        until(lambda: bus.settle() or bus.statistics()["writer"]["in_doubt"] == 0)
        (last,) = bus.publish(orders, [Order(3, "last")])
        assert wire.tokens(last) == [1, 2]
        assert bus.writing.session is session
        if number != 1 or "doubt" not in when:  # else nothing in the table tells which of them it was
            assert not any("gone" in line for line in wire.lines)


@pytest.mark.parametrize(
    ("lost", "silent"), [(1, False), (2, False), (2, True)], ids=["once", "twice", "twice, and finished since"]
)
def test_a_name_won_back_without_an_answer_is_this_process_s_still(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, lost: int, silent: bool
) -> None:
    with FaultyLink.in_thread(deployment.store) as link, deployment.bus(store=link.url, beats=False) as bus:
        first = write(bus, 1)
        silence(deployment)
        claim, asked = bus.store.wrapped.claim, []

        def unanswered(*args: Any, **options: Any) -> Any:
            asked.append(options["again"])
            if len(asked) <= lost:
                link.cut_when(b"COMMIT", "from_server", after=False)
            return claim(*args, **options)

        monkeypatch.setattr(bus.store.wrapped, "claim", unanswered)
        if lost == 2:
            with pytest.raises(Unavailable):
                write(bus, 2)
        if silent:
            silence(deployment)
        last = write(bus, 3)
        assert len(asked) == lost + 1
        assert len(set(asked)) == 1
        assert wire.tokens(last) == [first, last]


def test_a_name_that_was_finished_while_it_was_won_back_is_won_back_again(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployment.bus(beats=False) as bus:
        first = write(bus, 1)
        finished = silence(deployment)
        beat = claims.heartbeat

        def late(dialect: Any, held: Any, positions: Any) -> Any:
            if held.incarnation > finished:  # not that of the claim before
                monkeypatch.undo()
                silence(deployment)
            return (yield from beat(dialect, held, positions))

        monkeypatch.setattr(claims, "heartbeat", late)
        last = write(bus, 2)
        assert claims.heartbeat is beat
        assert wire.tokens(last) == [first, last]


@BEATS
def test_a_name_that_another_process_took_is_lost(deployment: Deployment, beats: bool) -> None:
    with deployment.bus(beats=beats) as bus:
        write(bus, 1)
        silence(deployment)
        with deployment.table() as store:
            claim = store.claim("w1", ["orders", "payments"], timeout=5)
        for _ in range(2):
            with pytest.raises(WriterFenced):
                write(bus, 2)
        with deployment.table() as store:
            store.check_claim(claim)
        assert bus.statistics()["writer"]["lost"]
    assert len(deployment.rows()) == 1


def test_a_writer_from_before_a_restore_stays_fenced(deployment: Deployment) -> None:
    with deployment.bus(beats=False) as bus:
        write(bus, 1)
        with deployment.table() as store:
            store.restored()
        with pytest.raises(WriterFenced):
            write(bus, 2)


def test_a_fact_under_way_keeps_its_writer_from_being_finished(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus(beats=False) as bus:
        with bus.write(orders) as fact:
            fact.add(Order(1, "slow"))
            fact.execute("SELECT 1")
            with deployment.table() as store:
                incarnation = next(one.incarnation for one in store.known())
                with pytest.raises(BusrepError, match="held by"):
                    store.finish("w1", incarnation, timeout=0.1)
        assert wire.tokens(fact.id) == [fact.id]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("url", ["sqlite_url", "postgres_url"])
def test_rows_in_memory_alone_are_published_with_the_caller_s_transaction(
    redis_url: str, bus_name: str, url: str, end: str, request: pytest.FixtureRequest
) -> None:
    """No row in a table tells what became of it."""
    place = Deployment(redis_url, bus_name, request.getfixturevalue(url))
    with place.table(), place.bus() as bus, Wire(place.redis, place.name) as wire:
        path = place.store.removeprefix("sqlite:///")
        caller: Any = sqlite3.connect(path) if url == "sqlite_url" else psycopg.connect(place.store)
        caller.execute("BEGIN IMMEDIATE" if url == "sqlite_url" else "SELECT 1")
        with bus.write(orders, typing, connection=caller) as fact:
            fact.add(["room", "a"], stream=typing)
        getattr(caller, end)()
        caller.close()
        fact.ended()
        bus.settle()
        wire.tokens(write(bus, 2))
        rows = [line for line in wire.lines if line.startswith("RDATA typing w1 ")]
        assert rows == ['RDATA typing w1 1 ["room","a"]'] * (end == "commit")


# -- interrupts -----------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """As KeyboardInterrupt, or what Celery raises in its signal handlers."""


class SoftLimit(Exception):
    """As Celery's SoftTimeLimitExceeded."""


PLACES: dict[str, tuple[tuple[type, ...], str]] = {
    "reserve": ((PlannedStore,), "_reserve"),
    "append": ((PlannedStore,), "write_appended"),
    "begin": (TRANSACTIONS, "begin"),
    "commit": (TRANSACTIONS, "commit"),
    "book": ((Writer,), "fact_completed"),
    "position": ((Writer,), "position_moved"),
    "compose": ((Writer,), "frames_to_publish"),
    "publish": ((Publisher,), "publish"),
    "confirm": ((Writer,), "published"),
}


# Of facts that get their IDs as they are written. The last ones: once more, while the first time is being settled.
PUBLISHING: dict[str, list[tuple[tuple[type, ...], str]]] = {
    "ask": [((WriterSession,), "ask")],
    "add": [((OpenFacts,), "add_each")],
    "append": [((PlannedStore,), "write_appended")],
    "answered": [((WriterSession,), "apply_invalidations")],
    "redeem": [((LateIds,), "redeem")],
    "book": [((Writer,), "rows_completed")],
    "position": [((Writer,), "position_moved")],
    "publish": [((Publisher,), "publish")],
    "outcome": [((WriterSession,), "apply_invalidations"), ((PlannedStore,), "outcome")],
    "decide": [((WriterSession,), "apply_invalidations"), ((WriterSession,), "decide")],
    "resolve": [((WriterSession,), "apply_invalidations"), ((WriterSession,), "resolve")],
}


@attrs.define
class Interruption:
    """Raises ``kind`` in this thread, once at each of its places, in their order. ``due``: the next one."""

    kind: type[BaseException]
    when: str
    places: int = 0
    due: int = 0
    thread: int = attrs.field(factory=threading.get_ident)

    def at(self, monkeypatch: pytest.MonkeyPatch, classes: tuple[type, ...], method: str) -> None:
        place, self.places = self.places, self.places + 1

        def interrupt() -> None:
            if self.due == place and threading.get_ident() == self.thread:
                self.due += 1
                raise self.kind("interrupted")

        def around(method: Method) -> Method:
            return surrounded(method, **{self.when: interrupt})

        patch_methods(monkeypatch, classes, method, around)


def check_nothing_lost(deployment: Deployment, wire: Wire, bus: Bus, first: int) -> None:
    """After interrupts of another write the writer goes on, and readers learn of whatever was committed."""
    write(bus, 3)
    bus.settle()
    last = write(bus, 4)
    assert wire.tokens(last)[-1] == last
    bus.settle()
    statistics = bus.statistics()
    assert statistics["writer"]["in_doubt"] == 0
    assert statistics["writer"]["streams"]["orders"]["held"] == 0
    ids = bus.writing.session.generators["orders"]  # type: ignore[union-attr]
    assert (ids.open, ids.asked) == (0, 0)
    rows = set(deployment.rows())
    assert {first, last} <= rows
    assert wire.chained()
    assert wire.reaching_readers(rows) == rows


@BEATS
@pytest.mark.parametrize("kind", [Interrupt, SoftLimit])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_from_anywhere_loses_nothing_and_blocks_nothing(
    deployment: Deployment,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    when: str,
    kind: type[BaseException],
    beats: bool,
) -> None:
    """As a signal handler raises it, between any two steps of a write."""
    interruption = Interruption(kind, when)
    # A slow heart: otherwise the thread of the beats may have published what this one is to be interrupted at.
    with deployment.bus(beats=beats, settings=attrs.evolve(QUICK, heartbeat=600.0)) as bus:
        first = write(bus, 1)
        interruption.at(monkeypatch, *PLACES[place])
        with pytest.raises(kind):
            write(bus, 2, begin=place in ("begin", "commit"))
        monkeypatch.undo()
        assert interruption.due == 1
        check_nothing_lost(deployment, wire, bus, first)


@pytest.mark.parametrize("kind", [Interrupt, SoftLimit])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PUBLISHING)
def test_an_exception_while_facts_get_their_ids_loses_nothing(
    deployment: Deployment,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    when: str,
    kind: type[BaseException],
) -> None:
    with deployment.bus(beats=False) as bus:  # nothing is settled by another thread
        first = write(bus, 1)
        interruption = Interruption(kind, when)
        for one in PUBLISHING[place]:
            interruption.at(monkeypatch, *one)
        with pytest.raises(kind):
            bus.publish(orders, [Order(2, "a"), Order(2, "b")])
        with contextlib.suppress(kind):
            bus.settle()
        monkeypatch.undo()
        assert interruption.due == interruption.places
        check_nothing_lost(deployment, wire, bus, first)


def test_a_doubt_is_settled_while_another_thread_has_the_turn_to_write(
    on_sqlite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block may last: neither the doubt nor who has to settle it waits for it."""
    leave, entered = threading.Event(), threading.Event()

    def hold() -> None:
        with bus.write(orders) as fact:
            fact.execute("SELECT 1")
            fact.add(Order(3, "later"))
            entered.set()
            leave.wait(60.0)

    def interrupt() -> None:
        if not other.ident:
            other.start()
            assert entered.wait(60.0)
            raise Interrupt

    def around(method: Method) -> Method:
        return surrounded(method, after=interrupt)

    with on_sqlite.bus(beats=False) as bus:
        other = threading.Thread(target=hold)
        patch_methods(monkeypatch, (BlockingSqliteStore,), "write", around)
        with pytest.raises(Interrupt):
            bus.publish(orders, [Order(1, "a"), Order(2, "b")])
        bus.settle()
        assert bus.statistics()["writer"]["in_doubt"] == 0
        assert bus.positions()["orders"]["w1"] == 2
        assert other.is_alive()
        leave.set()
        other.join()
    assert sorted(on_sqlite.rows()) == [1, 2, 3]


def test_a_reservation_that_failed_is_given_up_whatever_comes(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a signal's comes just as its ticket is to be given up."""
    armed: list[str] = []

    def away() -> None:
        armed.append("the reservation failed")
        raise Unavailable("PostgreSQL", "away")

    def interrupt() -> None:
        if armed:
            monkeypatch.undo()
            raise Interrupt

    def failing(method: Method) -> Method:
        return surrounded(method, before=away)

    def interrupted(method: Method) -> Method:
        return surrounded(method, before=interrupt)

    with deployment.bus(beats=False) as bus:
        write(bus, 1)
        patch_methods(monkeypatch, (PlannedStore,), "_reserve", failing)
        patch_methods(monkeypatch, (SharedWriter,), "guarded", interrupted)
        with pytest.raises(Interrupt):
            write(bus, 2)
        last = write(bus, 3)
        assert wire.tokens(last)[-1] == last
        assert bus.positions()["orders"]["w1"] == last


@pytest.mark.parametrize("kind", [ValueError, Unavailable])
@pytest.mark.parametrize("place", [(IdGenerator, "answer"), (Writer, "fact_completed")], ids=["reserved", "completed"])
def test_what_interrupts_bookkeeping_may_be_an_error_of_any_class(
    deployment: Deployment,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[type, str],
    kind: type[Exception],
) -> None:
    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            raise kind("interrupted", OSError())

    with deployment.bus() as bus:
        first = write(bus, 1)
        patch_methods(monkeypatch, place[:1], place[1], partial(surrounded, after=interrupt))
        with pytest.raises((kind, CommitUnknown)):
            write(bus, 2)
        last = write(bus, 3)
        assert wire.tokens(last)[-1] == last
        assert {first, last} <= set(deployment.rows())
        assert bus.statistics()["writer"]["in_doubt"] == 0


def test_an_interrupted_claim_does_not_lose_the_name(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new incarnation is committed, and whoever claimed it is interrupted before it is noted."""
    with deployment.bus(beats=False) as bus:
        write(bus, 1)
        silence(deployment)
        claim, claimed, go_on = bus.store.wrapped.claim, threading.Event(), threading.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            found = await claim(*args, **options)
            claimed.set()
            go_on.wait()
            return found

        def interrupt() -> None:
            claimed.wait()
            signal.pthread_kill(main, signal.SIGINT)

        main = threading.main_thread().ident
        assert main is not None
        monkeypatch.setattr(bus.store.wrapped, "claim", slow)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            write(bus, 2)
        interrupting.join()
        go_on.set()
        last = write(bus, 3)
        assert wire.tokens(last)[-1] == last


@pytest.mark.parametrize("how", ["roll back", "commit"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fact_may_end_in_the_middle_of_anything(
    deployment: Deployment, wire: Wire, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    """As when the garbage collector closes a generator, in whatever thread, with whatever lock held."""
    me = threading.get_ident()

    def close_one() -> None:
        if threading.get_ident() == me and generators:
            generators.pop().close()

    with deployment.bus(settings=attrs.evolve(QUICK, heartbeat=600.0)) as bus:

        def writing() -> Iterator[int]:
            with bus.write(orders) as fact:
                fact.add(Order(2, "garbage"))
                with contextlib.suppress(*[GeneratorExit] * (how == "commit")):
                    yield fact.id

        generators = []
        with bus.write(orders) as first:
            first.add(Order(1, "new"))
            generators.append(writing())
            garbage = next(generators[0])
            patch_methods(monkeypatch, *PLACES[place], partial(surrounded, before=close_one))
        second = write(bus, 3, begin=place in ("begin", "commit"))
        monkeypatch.undo()
        bus.settle()
        last = write(bus, 4)
        assert generators == []
        assert wire.tokens(last) == [first.id, *[garbage] * (how == "commit"), second, last]
        assert bus.statistics()["writer"]["in_doubt"] == 0


def test_a_ctrl_c_while_commit_waits(deployment: Deployment, wire: Wire) -> None:
    """A real signal, in the middle of a real COMMIT that waits."""
    with psycopg.connect(deployment.store, autocommit=True) as gate:
        gate.execute(
            "CREATE TABLE gate (x int); CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_lock(7); RETURN NULL; END'; CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON "
            "gate DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_here()"
        )
        gate.execute("SELECT pg_advisory_lock(7)")
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            with psycopg.connect(deployment.store, autocommit=True) as watch:
                while not watch.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'").fetchall():
                    time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)

        with deployment.bus() as bus:
            first = write(bus, 1)
            other = threading.Thread(target=interrupt)
            other.start()
            with pytest.raises(KeyboardInterrupt):
                with bus.write(orders) as fact:
                    fact.execute("INSERT INTO gate VALUES (1)")
                    fact.add(Order(2, "interrupted"))
            other.join()
            gate.execute("SELECT pg_advisory_unlock(7)")
            last = write(bus, 3)
            committed = [token for token in (first, fact.id, last) if token in deployment.rows()]
            assert wire.tokens(last) == committed


def test_a_generator_closed_while_its_fact_is_open_rolls_it_back(deployment: Deployment, wire: Wire) -> None:
    with deployment.bus() as bus:

        def writing() -> Iterator[int]:
            with bus.write(orders) as fact:
                fact.add(Order(1, "never"))
                yield fact.id

        generator = writing()
        lost = next(generator)
        del generator
        last = write(bus, 2)
        assert wire.tokens(last) == [last]
        assert lost not in deployment.rows()


@BEATS
def test_a_fact_that_nobody_ends_is_found_out(deployment: Deployment, wire: Wire, beats: bool) -> None:
    """Its thread was lost: no block ends it."""
    with deployment.bus(beats=beats) as bus:
        fact = bus.write(orders)
        fact.__enter__()
        fact.add(Order(1, "never"))
        lost = fact.id
        del fact
        gc.collect()
        last = write(bus, 2)
        bus.settle()
        assert wire.tokens(last) == [last]
        assert lost not in deployment.rows()
        bus.store.claim("w1", ["orders"], timeout=1)  # its transaction has ended


@pytest.mark.parametrize("begin", [True, False], ids=["a statement has run", "nothing has begun"])
def test_close_while_another_thread_commits(deployment: Deployment, wire: Wire, begin: bool) -> None:
    """What has begun is committed: a reader finds it once the writer counts as silent. What has not is refused."""
    bus = deployment.bus()
    bus.open()
    entered, leave = threading.Event(), threading.Event()
    ids: list[int] = []
    refused: list[Unavailable] = []

    def work() -> None:
        try:
            with bus.write(orders) as fact:
                fact.add(Order(1, "late"))
                if begin:
                    fact.execute("SELECT 1")
                ids.append(fact.id)
                entered.set()
                leave.wait()
        except Unavailable as error:
            refused.append(error)

    other = threading.Thread(target=work)
    other.start()
    entered.wait()
    bus.close()
    leave.set()
    other.join()
    assert list(deployment.rows()) == ids * begin
    assert len(refused) == (not begin)
    with pytest.raises(Closed):
        write(bus, 2)
    assert threads() == set()


def test_a_fact_that_is_interrupted_when_the_bus_is_closed_lets_go_of_the_name(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(_transaction: Any) -> None:
        raise Interrupt

    with deployment.bus() as bus:
        fact = bus.write(orders)
        fact.__enter__()
        fact.execute("SELECT 1")
    patch_methods(monkeypatch, TRANSACTIONS, "commit", lambda _: interrupted)
    with pytest.raises(Interrupt):
        fact.__exit__(None, None, None)
    with deployment.table() as store:
        store.claim("w1", ["orders"], timeout=10)


# -- errors a user can make -----------------------------------------------------------------------------------


def test_errors_say_what_to_do(deployment: Deployment, on_sqlite: Deployment) -> None:
    with pytest.raises(ConfigError, match="store="):
        connect(deployment.redis, name="x", streams=[orders])
    with pytest.raises(ConfigError, match="white space"):
        deployment.bus(writer="two words")
    with pytest.raises(ConfigError, match="Redis URL"):
        deployment.bus(redis="http://nowhere")
    with pytest.raises(ConfigError, match=r"redis\.Redis"):
        deployment.bus(redis=object())
    with pytest.raises(ConfigError, match="URL of its store"):
        deployment.bus(store=open_store("memory://x", Registry(STREAMS)))
    with pytest.raises(SchemaError, match="busrep db init"):
        deployment.bus(store=on_sqlite.store + ".none").open()
    with pytest.raises(ConfigError, match="direct TCP"):
        deployment.bus(redis="tcp://127.0.0.1:1")
    with deployment.bus() as bus:
        with pytest.raises(ConfigError, match="needs a stream"):
            bus.write()
        with pytest.raises(NotAWriter):
            bus.write(Stream("other", resettable=True))
        fact = bus.write(orders)
        with pytest.raises(ConfigError, match="use 'with"):
            fact.add(Order(1, "early"))
        with fact:
            pass
        with pytest.raises(ConfigError, match="once"):
            fact.__enter__()
        with pytest.raises(ConfigError, match=r"psycopg\.Connection"):
            write(bus, 1, connection=object())
        assert bus.publish(orders, []) == []
    with deployment.bus(writer=None) as reader:
        with pytest.raises(NotAWriter):
            reader.write(orders)
    for closed in (bus.open, lambda: bus.write(orders), bus.positions, bus.settle, bus.__enter__):
        with pytest.raises(Closed):
            closed()
    bus.close()  # once more does no harm


def test_it_opens_at_its_first_use(deployment: Deployment, wire: Wire) -> None:
    bus = deployment.bus()
    assert threads() == set()
    last = write(bus, 1)
    assert wire.tokens(last) == [last]
    bus.close()


def test_a_client_may_be_passed_in_place_of_a_url(deployment: Deployment, wire: Wire) -> None:
    with redis_py.Redis.from_url(deployment.redis) as client, deployment.bus(redis=client) as bus:
        last = write(bus, 1)
        assert wire.tokens(last) == [last]
    assert busrep.sync.Bus is Bus
