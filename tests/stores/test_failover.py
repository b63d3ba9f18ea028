"""A failover of PostgreSQL that loses commits, without ``busrep db restored`` (rule 9.23), and one that loses none.

On real servers with streaming replication. Two rounds each; with ``BUSREP_ROUNDS=20`` as many as that.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import psycopg
import pytest

import busrep
from busrep import sync
from busrep.errors import ClaimBlocked, CommitsLost, PositionTooOld, StatementRefused, Unavailable, WriterFenced
from busrep.stores import claims, fencing
from busrep.stores.blocking import BlockingStore
from busrep.stores.fencing import Home, _failovers
from busrep.stores.postgres.dialect import PostgresDialect
from busrep.testing import virtual
from busrep.testing.links import FaultyLink
from busrep.testing.pair import MemoryDeployment
from busrep.testing.servers import PostgresServer, start_postgres
from tests.asyncio.test_bus import Deployment, run, until
from tests.shop import QUICK, STREAMS, Order, opened_store, orders
from tests.support.servers import start_replica

from .test_durability import again, create, write

pytestmark = pytest.mark.servers

ROUNDS = int(os.environ.get("BUSREP_ROUNDS", "2"))
# A sequence on the new primary is ahead of the last ID that it knows by up to 32.
LOST = 60


@attrs.define
class Handled:
    """What a reader was handed, (writer, ID) as often as it came."""

    facts: list[tuple[str, int]] = attrs.field(factory=list)

    def __call__(self, batch: Any) -> None:
        self.facts += [(batch.writer, token) for token in batch.tokens]


@attrs.define
class Pair:
    """A primary, a replica, and a link that leads to the primary, whichever that is."""

    primary: PostgresServer
    replica: PostgresServer
    link: FaultyLink
    url: str

    def ask(self, server: PostgresServer, query: str) -> Any:
        with psycopg.connect(server.database_url("shop"), autocommit=True) as connection:
            found = connection.execute(query.encode())
            return found.fetchall() if found.description is not None else None

    async def caught_up(self) -> None:
        """Until the replica has what is committed by now."""
        ((lsn,),) = self.ask(self.primary, "SELECT pg_current_wal_flush_lsn()")
        while not self.ask(self.replica, f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'")[0][0]:
            await asyncio.sleep(0.02)

    async def cut_replication(self) -> None:
        """What is committed from now on never reaches the replica."""
        self.ask(self.replica, "ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port=1'")
        self.ask(self.replica, "SELECT pg_reload_conf()")
        while self.ask(self.primary, "SELECT 1 FROM pg_stat_replication"):
            await asyncio.sleep(0.02)

    def promote(self) -> None:
        """The replica is the primary; all clients are led to it."""
        assert self.ask(self.replica, "SELECT pg_promote(true)") == [(True,)]
        self.link._target = ("127.0.0.1", self.replica.port)
        self.link.refuse = False
        self.link.cut()

    def rows(self) -> set[tuple[str, int]]:
        return set(self.ask(self.replica, "SELECT writer, id FROM busrep_facts WHERE stream = 'orders'"))


@asynccontextmanager
async def servers() -> AsyncIterator[Pair]:
    with start_postgres(config={"wal_level": "replica", "hot_standby": "on"}) as primary:
        url = await create(primary, "shop")
        with start_replica(primary) as replica:
            async with FaultyLink(url) as link:
                yield Pair(primary, replica, link, url)


# A writer that is finished for its silence while nothing is replicated claims its name again, and loses that claim in
# the failover: it has to stop then.
PATIENT = attrs.evolve(QUICK, silent_after_beats=200)


def write_blocking(bus: Any, number: int) -> int:
    with bus.write(orders) as fact:
        fact.add(Order(number, "paid"))
    return int(fact.id)


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("loses", ["w1", "threads"])
def test_a_failover_that_loses_commits_skips_no_row(
    redis_url: str, bus_name: str, number: int, loses: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer whose commits are lost stops and says so; of what the others write no reader misses a row."""

    async def work() -> None:
        async with servers() as pair, AsyncExitStack() as stack:
            bus = Deployment(redis_url, f"{bus_name}-{number}", pair.link.url, PATIENT).bus
            w1, w2, durable, live = [
                await stack.enter_async_context(bus(**options))
                for options in ({"writer": "w1"}, {"writer": "w2"}, {"reader": "r"}, {})
            ]
            options: dict[str, Any] = {"name": f"{bus_name}-{number}", "streams": STREAMS, "settings": PATIENT}
            threads = await asyncio.to_thread(
                lambda: sync.connect(redis_url, writer="t", store=pair.link.url, **options).__enter__()
            )
            stack.push_async_callback(asyncio.to_thread, threads.close)
            handled = {durable: Handled(), live: Handled()}
            for reader, seen in handled.items():
                reader.subscribe(orders)(seen)

            async def lose(each: int) -> tuple[str, int]:
                if loses == "w1":
                    return "w1", await write(w1, each)
                return "t", await asyncio.to_thread(write_blocking, threads, each)

            for each in range(10):
                last = await lose(each)
                await write(w2, each)
            await pair.caught_up()
            await pair.cut_replication()
            for each in range(LOST):
                last = await lose(100 + each)
            for reader in handled:
                await reader.wait_for(orders, *last, timeout=30)
            pair.link.refuse = True
            pair.primary.kill()
            pair.promote()

            async def reached(reader: Any, who: str, id: int) -> None:
                await reader.wait_for(orders, who, id, timeout=60)
                assert (who, id) in handled[reader].facts  # no false answer

            for _ in range(LOST + 10):
                id = await again(lambda: write(w2, 1000))
                for reader in handled:
                    await reached(reader, "w2", id)
            with pytest.raises(CommitsLost, match="busrep db restored"):
                await again(lambda: lose(2000))
            rows = pair.rows()
            for seen in handled.values():
                assert rows <= set(seen.facts)  # nothing was skipped
            assert "a failover, or a restore" in caplog.text

    run(work(), 240)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_planned_switchover_needs_nobody(redis_url: str, bus_name: str, number: int) -> None:
    """Nothing is lost: all writers go on, and nothing is read again but what was not saved."""

    async def work() -> None:
        async with servers() as pair, AsyncExitStack() as stack:
            bus = Deployment(redis_url, f"{bus_name}-{number}", pair.link.url).bus
            w1, w2, durable, live = [
                await stack.enter_async_context(bus(**options))
                for options in ({"writer": "w1"}, {"writer": "w2"}, {"reader": "r"}, {})
            ]
            handled = {durable: Handled(), live: Handled()}
            for reader, seen in handled.items():
                reader.subscribe(orders)(seen)
            for each in range(LOST):
                last = await write(w1, each)
            for reader in handled:
                await reader.wait_for(orders, "w1", last, timeout=30)
            pair.link.refuse = True
            await asyncio.to_thread(pair.primary.stop)
            pair.promote()
            for writer, name in ((w1, "w1"), (w2, "w2")):
                for each in range(5):
                    id = await again(lambda writer=writer, each=each: write(writer, each))  # type: ignore[misc]
                    for reader in handled:
                        await reader.wait_for(orders, name, id, timeout=60)
            rows = pair.rows()
            for seen in handled.values():
                assert set(seen.facts) == rows
                assert len(seen.facts) == len(rows)
            assert w1.statistics()["writer"]["lost"] is False

    run(work(), 240)


@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_a_lost_fact_is_missed_though_a_higher_one_is_there(redis_url: str, bus_name: str, runtime: str) -> None:
    """Facts commit in another order than that of their IDs: the one that is lost may have the lower ID."""

    def hold(bus: Any, opened: threading.Event, go_on: threading.Event) -> None:
        with bus.write(orders) as fact:
            fact.add(Order(1, "paid"))
            opened.set()
            assert go_on.wait(60)

    async def work() -> None:
        async with servers() as pair, AsyncExitStack() as stack:
            options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "settings": QUICK, "store": pair.link.url}

            async def replicate_no_more() -> None:
                await pair.caught_up()
                await pair.cut_replication()

            if runtime == "asyncio":
                bus: Any = await stack.enter_async_context(busrep.connect(redis_url, writer="w", **options))
                async with bus.write(orders) as lower:
                    lower.add(Order(1, "paid"))
                    higher = await write(bus, 2)
                    await replicate_no_more()
                lost = lower.id
            else:
                bus = await asyncio.to_thread(lambda: sync.connect(redis_url, writer="w", **options).__enter__())
                stack.push_async_callback(asyncio.to_thread, bus.close)
                opened, go_on = threading.Event(), threading.Event()
                holding = asyncio.create_task(asyncio.to_thread(hold, bus, opened, go_on))
                await asyncio.to_thread(opened.wait, 60)
                higher = await asyncio.to_thread(write_blocking, bus, 2)
                await replicate_no_more()
                go_on.set()
                await holding
                lost = higher - 1
            pair.link.refuse = True
            pair.primary.kill()
            pair.promote()
            assert pair.rows() == {("w", higher)}
            with pytest.raises(CommitsLost, match="busrep db restored") as caught:
                await again(lambda: write_in(bus))
            assert caught.value.committed == lost < higher

    async def write_in(bus: Any) -> int:
        return await write(bus, 3) if runtime == "asyncio" else await asyncio.to_thread(write_blocking, bus, 3)

    run(work(), 240)


@pytest.mark.parametrize("runtime", ["asyncio", "threads"])
def test_an_idle_writer_s_position_outlives_a_failover(redis_url: str, bus_name: str, runtime: str) -> None:
    """One that only follows has lost no fact. What was stored of its position is lost; what it said stands."""

    async def work() -> None:
        async with servers() as pair, AsyncExitStack() as stack:
            options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "settings": QUICK, "store": pair.link.url}
            idle: Any
            if runtime == "asyncio":
                idle = await stack.enter_async_context(busrep.connect(redis_url, writer="idle", **options))
            else:
                idle = await asyncio.to_thread(lambda: sync.connect(redis_url, writer="idle", **options).__enter__())
                stack.push_async_callback(asyncio.to_thread, idle.close)
                await asyncio.to_thread(lambda: idle.subscribe(orders)(lambda batch: None))

            def session() -> Any:
                return idle.writing if runtime == "asyncio" else idle.writing.session

            def position() -> int:
                return int(session().core.positions()["orders"])

            async with busrep.connect(redis_url, writer="w", **options) as writer:
                first = await write(writer, 1)
                await until(lambda: position() >= first, 60)
                await pair.caught_up()
                await pair.cut_replication()
                for each in range(LOST):
                    last = await write(writer, each)
                await until(lambda: position() >= last, 60)
            before, incarnation = position(), session().incarnation
            pair.link.refuse = True
            pair.primary.kill()
            pair.promote()
            await until(lambda: session().incarnation > incarnation, 60)
            assert position() >= before
            assert (await again(lambda: write_in(idle))) > 90_000
            await until(lambda: position() > 90_000, 60)

    async def write_in(bus: Any) -> int:
        return await write(bus, 3) if runtime == "asyncio" else await asyncio.to_thread(write_blocking, bus, 3)

    run(work(), 240)


@pytest.mark.parametrize(("registered", "own"), [(True, False), (False, False), (True, True)])
def test_effects_that_a_failover_took_back_are_made_again(
    redis_url: str, bus_name: str, registered: bool, own: bool
) -> None:
    """The facts are still there, and no other follows: the reader finds out that its saved position is not. ``own``: it
    has the name of their writer, who has ended; nobody announces that name's positions to it."""

    async def work() -> None:
        async with servers() as pair, AsyncExitStack() as stack:
            bus = Deployment(redis_url, bus_name, pair.link.url).bus
            pair.ask(pair.primary, "CREATE TABLE effects (id bigint PRIMARY KEY)")
            facts = []
            async with bus(writer="w") as writer:
                if own:
                    facts = [await write(writer, each) for each in range(5)]
            if not own:
                writer = await stack.enter_async_context(bus(writer="w"))
            reader = await stack.enter_async_context(bus(reader="r", **({"writer": "w"} if own else {})))
            go_on = asyncio.Event()

            async def handle(batch: Any) -> None:
                await go_on.wait()
                async with batch.transaction() as connection:
                    for token in batch.tokens:
                        await connection.execute("INSERT INTO effects VALUES (%s)", [token])

            if registered:
                reader.subscribe(orders)(handle)
            facts = facts or [await write(writer, each) for each in range(5)]
            if registered:
                await until(lambda: pair.ask(pair.primary, "SELECT 1 FROM busrep_readers WHERE reader = 'r'"), 60)
            await pair.caught_up()
            await pair.cut_replication()
            if not registered:
                reader.subscribe(orders)(handle)
            go_on.set()
            made = [(id,) for id in facts]
            await until(lambda: pair.ask(pair.primary, "SELECT id FROM effects ORDER BY id") == made, 60)
            # And the reader knows: a COMMIT without an answer is looked up, which is another way.
            await reader.wait_for(orders, "w", facts[-1], timeout=60)
            pair.link.refuse = True
            pair.primary.kill()
            pair.promote()
            assert pair.ask(pair.replica, "SELECT id FROM effects") == []
            await until(lambda: pair.ask(pair.replica, "SELECT id FROM effects ORDER BY id") == made, 60)
            assert not reader.statistics()["reader"]["stopped"]

    run(work(), 240)


def test_effects_are_made_again_that_the_process_before_had_made() -> None:
    """The reader has been restarted since: what it loaded is not where its effects begin."""

    async def main() -> None:
        async with MemoryDeployment(orders, settings=QUICK) as deployment, deployment.bus(writer="w") as writer:
            for number in range(5):
                last = await writer.publish(orders, [Order(number, "new")])
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(Handled())
                await reader.wait_for(orders, "w", last[-1])
            again = Handled()
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(again)
                await asyncio.sleep(5.0)
                assert again.facts == []
                reader.store.world.ask("DELETE FROM busrep_readers WHERE writer = 'w'")
                await asyncio.sleep(30.0)
                assert [token for _, token in again.facts] == list(range(1, last[-1] + 1))
                assert (await reader.store.load_reader("r")).positions == {("orders", "w"): last[-1]}

    virtual.run(main())


def test_of_rows_pruned_before_a_lost_registration_the_next_process_is_told() -> None:
    """It does not know that the one before began behind them, with nothing missed: it may have, and it may not."""

    async def main() -> None:
        async with MemoryDeployment(orders, settings=QUICK) as deployment, deployment.bus(writer="w") as writer:
            for number in range(5):
                last = (await writer.publish(orders, [Order(number, "new")]))[-1]
            await asyncio.sleep(5.0)  # the beats note the position: what is above is not pruned
            assert await writer.store.prune(keep=2) == {("orders", "w"): 3}
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(Handled())
                await reader.wait_for(orders, "w", last)
            again = Handled()
            async with deployment.bus(reader="r") as reader:
                reader.subscribe(orders)(again)
                await asyncio.sleep(5.0)
                reader.store.world.ask("DELETE FROM busrep_readers WHERE writer = 'w'")
                await asyncio.sleep(30.0)
                (told,) = reader.reading.stopped.values()
                assert isinstance(told, PositionTooOld)
                assert (told.position, told.floor, again.facts) == (0, 3, [])
                assert not reader.health().ok

    virtual.run(main())


def test_claims_behind_a_failover_are_above_those_that_it_lost(postgres_url: str) -> None:
    """Readers ignore lower incarnations (9.11): they would be deaf for some beats to streams in memory."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        kept = store.claim("a", ["orders"], timeout=10.0)
        store.finish("a", kept.incarnation, timeout=10.0)
        before = operator.execute("SELECT writer, incarnation, finished FROM busrep_writers").fetchall()
        ahead = time.time_ns() + 600 * 10**9
        with mock.patch("time.time_ns", return_value=ahead):  # a machine whose clock is ahead
            lost = [store.claim(name, ["orders"], timeout=10.0).incarnation for name in ("a", "b")]
        operator.execute("DELETE FROM busrep_writers")
        for row in before:
            operator.execute("INSERT INTO busrep_writers (writer, incarnation, finished) VALUES (%s, %s, %s)", row)
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
        again = [store.claim(name, ["orders"], timeout=10.0).incarnation for name in ("a", "b")]
        assert all(later > former for later, former in zip(again, lost, strict=True))


CLAIMS = ("busrep_writers", "busrep_meta")


def keep_claims(operator: psycopg.Connection[Any]) -> None:
    """Keep what the database knows of claims, for `claim_after`."""
    for table in CLAIMS:
        operator.execute(f"CREATE TABLE kept_{table} AS TABLE {table}")


def claim_after(event: str, store: BlockingStore, operator: psycopg.Connection[Any]) -> int:
    """The incarnation of a claim after a failover, or a restore, of what was kept; what came since is taken back."""
    for table in CLAIMS:
        operator.execute(f"DELETE FROM {table}")
        operator.execute(f"INSERT INTO {table} TABLE kept_{table}")
    if event == "restore":
        store.restored()
    else:
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
    return store.claim("a", ["orders"], timeout=10.0).incarnation


def test_incarnations_rise_whatever_is_taken_back(postgres_url: str) -> None:
    """A failover loses a restore, or a restore a failover, or a backup is restored twice."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        store.claim("a", ["orders"], timeout=10.0)
        keep_claims(operator)
        before = 0
        for event in ("failover", "restore", "restore", "failover", "failover", "restore"):
            claimed = claim_after(event, store, operator)
            assert claimed > before, event
            before = claimed


@pytest.mark.parametrize("event", ["failover", "restore"])
def test_incarnations_rise_under_a_server_s_clock_that_was_set_back(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """The second event takes the first one back, and comes to the same highest claim."""
    monkeypatch.setattr(PostgresDialect, "seconds", "0.0::float8")
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        ahead = time.time_ns() + 3 * 86_400 * 10**9
        store.claim("a", ["orders"], timeout=10.0)
        operator.execute("UPDATE busrep_writers SET incarnation = %s", (ahead,))
        keep_claims(operator)
        before = ahead
        for milliseconds in (1, 2, 1002):
            monkeypatch.setattr(fencing, "clock", lambda now=milliseconds * 10**6: now)
            monkeypatch.setattr(claims, "clock", fencing.clock)
            claimed = claim_after(event, store, operator)
            assert claimed > before
            before = claimed


def test_9_4_a_failover_waits_for_open_facts(postgres_url: str) -> None:
    """And takes one lock for all names: a server has room for so many."""
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND classid = 'busrep_meta'::regclass"
    with (
        opened_store(postgres_url) as store,
        opened_store(postgres_url) as other,
        psycopg.connect(postgres_url, autocommit=True) as operator,
        ThreadPoolExecutor(1) as threads,
    ):
        claim = store.claim("a", ["orders"], timeout=10.0)
        transaction = store.transaction(claim)
        transaction.begin()
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
        claiming = threads.submit(other.claim, "b", ["orders"], timeout=60.0)
        while operator.execute(waiting).fetchone() == (0,) and not claiming.done():
            time.sleep(0.01)
        assert not claiming.done()
        transaction.commit()
        claiming.result(60)
        with pytest.raises(WriterFenced):
            store.check_claim(claim)


def test_another_timeline_fences_all_writers_until_they_claim_again(postgres_url: str) -> None:
    """Who holds IDs of the new timeline has them from below those that are left out: they must not be used."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        a, b = (store.claim(name, ["orders"], timeout=10.0) for name in ("a", "b"))
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")  # a failover, as it looks
        early = store.reserve("orders", 1)
        store.register_reader("r", {("orders", "a"): 0}, store.epoch())
        with pytest.raises(Unavailable, match="failed over"):
            store.save_reader("r", [("orders", "a", 0, 80)], store.epoch())
        operator.execute("ALTER SEQUENCE busrep_seq_orders RESTART WITH 50")
        store.save_reader("r", [("orders", "a", 0, early[0])], store.epoch())  # not above it, so nothing is in doubt
        assert store.sequence("orders") is None  # no reader may take its positions for ahead of the table
        for one in (a, b):
            with pytest.raises(WriterFenced):
                store.heartbeat(one, {})
            with pytest.raises(WriterFenced):
                store.transaction(one).begin()
        again = store.claim("a", ["orders"], timeout=10.0, again=a.incarnation)
        with pytest.raises(WriterFenced):
            store.check_claim(b)
        assert store.claim("b", ["orders"], timeout=10.0, again=b.incarnation).incarnation > b.incarnation
        store.heartbeat(again, {})
        assert store.reserve("orders", 1)[0] > early[0] + 90_000
        c = store.claim("c", ["orders"], timeout=10.0)  # noted: not once more
        store.check_claim(c)
        store.check_claim(again)
        assert (store.sequence("orders") or 0) > early[0] + 90_000
        assert store.reserve("orders", 1)[0] < 2 * 100_000


@pytest.mark.parametrize(
    ("noted", "now", "times"),
    [
        ("7/00000001", "7/00000002", 1),
        ("7/00000009", "7/0000000C", 3),
        ("7/00000003", "7/00000002", 1),
        ("7/00000001", "8/00000009", 1),
        ("7/00000001", "7/00FFFFFF", 100),
    ],
)
def test_how_many_failovers_there_were(noted: str, now: str, times: int) -> None:
    """Of which this log knows nothing: each left out IDs, and may have been lost with those that were given behind."""
    assert _failovers(noted, now) == times


def test_what_is_left_out_is_decided_once_for_each_failover() -> None:
    first = Home("7/00000001").moved_to("7/00000002", {"orders": 500, "items": 0})
    assert first.up_to == {"orders": 100_500, "items": 100_000}
    assert Home.read(first.written()) == first
    # Another try, behind IDs that were left out already, or given to who may not use them.
    assert first.moved_to("7/00000002", {"orders": 100_510, "items": 0}) == first
    # The next failover came before that was done. Its server may lack what this one left out, or have it.
    for given in (500, 100_500):
        again = first.moved_to("7/00000003", {"orders": given, "items": 0})
        assert again == Home("7/00000001", "7/00000003", {"orders": 200_500, "items": 200_000})


def test_a_claim_that_fails_after_a_failover_leaves_out_the_same_ids_again(postgres_url: str) -> None:
    """No rollback takes a sequence back. What one failover leaves out is what the next one leaves out again."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        held = store.claim("a", ["orders"], timeout=10.0)
        (given,) = store.reserve("orders", 1)
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")  # a failover, as it looks
        operator.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$; "
            "CREATE TRIGGER refuse BEFORE UPDATE ON busrep_meta FOR EACH ROW WHEN (OLD.value LIKE '{%') "
            "EXECUTE FUNCTION refuse()"
        )
        for _ in range(3):
            with pytest.raises(StatementRefused, match="not now"):
                store.claim("a", ["orders"], timeout=10.0, again=held.incarnation)
            with pytest.raises(WriterFenced):
                store.check_claim(held)
        operator.execute("DROP TRIGGER refuse ON busrep_meta")
        again = store.claim("a", ["orders"], timeout=10.0, again=held.incarnation)
        assert store.reserve("orders", 1) == [given + 100_001]
        store.check_claim(again)
        ((noted,),) = operator.execute("SELECT value FROM busrep_meta WHERE key = 'server'")
        assert noted.endswith("/00000001")
        assert noted != "1/00000001"


def test_a_claim_that_cannot_give_up_a_stream_takes_the_name_from_nobody(postgres_url: str) -> None:
    with opened_store(postgres_url) as store:
        former = store.claim("w", ["orders", "payments"], timeout=10.0)
        with psycopg.connect(postgres_url) as pruning:
            pruning.execute("SELECT 1 FROM busrep_positions WHERE stream = 'payments' AND writer = 'w' FOR UPDATE")
            with pytest.raises(ClaimBlocked):
                store.claim("w", ["orders"], timeout=0.3)
        store.check_claim(former)


@pytest.mark.parametrize("finished", [False, True])
def test_a_name_won_without_an_answer_before_a_failover_is_its_own_still(postgres_url: str, finished: bool) -> None:
    """The standby has all: the claim that asks again is the one that notices the failover."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        held = store.claim("w", ["orders"], timeout=10.0)
        store.finish("w", held.incarnation, timeout=10.0)
        won = store.claim("w", ["orders"], timeout=10.0, again=held.incarnation)  # the answer is lost
        if finished:
            store.finish("w", won.incarnation, timeout=10.0)
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
        store.check_claim(store.claim("w", ["orders"], timeout=10.0, again=held.incarnation))


@pytest.mark.parametrize("restored", [False, True], ids=["failover", "restore"])
def test_a_claim_that_was_lost_does_not_pass_for_the_fence(postgres_url: str, restored: bool) -> None:
    """Under a clock that is behind incarnations go up by one, and so does the fence of a failover: the numbers are the
    same."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        store.claim("a", ["orders"], timeout=10.0)
        ahead = time.time_ns() + 10**15
        operator.execute("UPDATE busrep_writers SET incarnation = %s", (ahead,))
        lost = store.claim("a", ["orders"], timeout=10.0)
        assert lost.incarnation == ahead + 1
        operator.execute("UPDATE busrep_writers SET incarnation = %s", (ahead,))  # what a lagging standby knows
        if restored:
            store.restored()
        else:
            operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
            store.claim("b", ["orders"], timeout=10.0)
        for _ in range(2):
            for work in (
                lambda: store.check_claim(lost),
                lambda: store.heartbeat(lost, {}),
                lambda: store.transaction(lost).begin(),
                lambda: store.claim("a", ["orders"], timeout=10.0, again=lost.incarnation),
            ):
                with pytest.raises(WriterFenced):
                    work()
            ((fence,),) = operator.execute("SELECT incarnation FROM busrep_writers WHERE writer = 'a'")
            assert fence > lost.incarnation if restored else fence == lost.incarnation
            store.finish("a", fence, timeout=10.0)  # readers find it silent
        # Nor does whoever claims the name next: more claims may be lost than this one.
        assert store.claim("a", ["orders"], timeout=10.0).incarnation > lost.incarnation + 1_000


def test_a_restore_that_is_declared_notes_the_server_anew(postgres_url: str) -> None:
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        store.claim("a", ["orders"], timeout=10.0)
        operator.execute("UPDATE busrep_meta SET value = '1/00000001' WHERE key = 'server'")
        store.restored()
        ((noted,),) = operator.execute("SELECT value FROM busrep_meta WHERE key = 'server'")
        assert noted.endswith("/00000001")  # at once: another may take its place before the next claim
        assert noted != "1/00000001"
        store.check_claim(store.claim("a", ["orders"], timeout=10.0))
        assert store.reserve("orders", 1)[0] < 1000


def test_back_on_the_noted_server_before_the_failover_was_done(postgres_url: str) -> None:
    """Somebody may have been given IDs on the other one: they are left out here as well."""
    with opened_store(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as operator:
        held = store.claim("a", ["orders"], timeout=10.0)
        ((here,),) = operator.execute("SELECT value FROM busrep_meta WHERE key = 'server'")
        chosen = Home(here).moved_to("1/00000002", {"orders": 5, "payments": 0})
        operator.execute("UPDATE busrep_meta SET value = %s WHERE key = 'server'", [chosen.written()])
        again = store.claim("a", ["orders"], timeout=10.0, again=held.incarnation)
        store.check_claim(again)
        assert store.reserve("orders", 1)[0] > chosen.up_to["orders"] + 99_000
        assert operator.execute("SELECT value FROM busrep_meta WHERE key = 'server'").fetchall() == [(here,)]
