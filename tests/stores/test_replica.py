"""Rule 9.9 on a real streaming replica: it lags as far as the test lets it, and answers only for what it proves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import psycopg
import pytest

import busrep
from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.stores.plans import Control, Plan, Sql
from busrep.stores.postgres.store import PostgresStore
from busrep.streams import Registry, Stream
from busrep.testing.servers import PostgresServer, start_postgres
from tests.stores.store_conformance import page, read, row, sync, write
from tests.support.servers import start_replica

pytestmark = pytest.mark.servers

orders = Stream("orders")
QUICK = Settings(heartbeat=0.1, poison_after=0.0, retry_min=0.02, retry_max=0.1, save_every=0.05)


@attrs.frozen
class Pair:
    """A primary and its replica, and one database of theirs."""

    primary_server: PostgresServer
    replica_server: PostgresServer
    database: str

    @property
    def primary(self) -> str:
        return self.primary_server.database_url(self.database)

    @property
    def replica(self) -> str:
        return self.replica_server.database_url(self.database)

    def ask(self, text: str) -> Any:
        """One value, from the replica."""
        with psycopg.connect(self.replica, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            found = cursor.fetchone() if cursor.description else None
        return found[0] if found else None

    def pause(self) -> None:
        """What is committed from now on stays invisible on the replica."""
        self.ask("SELECT pg_wal_replay_pause()")
        while self.ask("SELECT pg_get_wal_replay_pause_state()") != "paused":
            pass

    def resume(self) -> None:
        self.ask("SELECT pg_wal_replay_resume()")

    def catch_up(self) -> None:
        """Until the replica shows all that is committed by now."""
        with psycopg.connect(self.primary, autocommit=True) as connection:
            found = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert found is not None
        while not self.ask(f"SELECT pg_last_wal_replay_lsn() >= '{found[0]}'::pg_lsn"):
            pass

    @asynccontextmanager
    async def stores(self) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
        """Both, open."""
        async with AsyncExitStack() as stack:
            found = []
            for url in (self.primary, self.replica):
                store = open_store(url, Registry([orders]))
                assert isinstance(store, PostgresStore)
                await store.open()
                stack.push_async_callback(store.close)
                found.append(store)
            yield found[0], found[1]


@pytest.fixture(scope="module")
def servers_pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    with start_postgres() as primary:
        try:
            replica = start_replica(primary)
        except ConfigError as error:
            if "pg_basebackup" not in str(error):
                raise
            pytest.skip(str(error))
        with replica:
            yield primary, replica


@pytest.fixture
def pair(servers_pair: tuple[PostgresServer, PostgresServer]) -> Iterator[Pair]:
    primary, replica = servers_pair
    found = Pair(primary, replica, f"test_{secrets.token_hex(6)}")
    with psycopg.connect(primary.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {found.database}".encode())
    asyncio.run(open_store(found.primary, Registry([orders])).init())
    with psycopg.connect(replica.url, autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_resume()")  # if a test before this one has failed
    while True:
        try:
            found.catch_up()
            break
        except psycopg.OperationalError:  # the database itself is not there yet
            pass
    yield found
    found.resume()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@sync
async def test_9_9_a_row_that_is_visible_proves_nothing_about_those_below(pair: Pair) -> None:
    async with pair.stores() as (primary, replica):
        claim = await primary.claim("w1", ["orders"], timeout=1)
        slow = primary.transaction(claim)
        (first,) = await primary.reserve("orders", 1)
        await slow.begin()
        (second,) = await write(primary, claim, 1)
        pair.catch_up()
        pair.pause()
        await slow.insert("orders", [(first, [[first, 0]], [row(first, 0)])])
        await slow.commit()
        await primary.heartbeat(claim, {"orders": second})  # announced as well: all up to it is committed
        assert pair.ask("SELECT array_agg(id) FROM busrep_facts") == [second]
        found = await page(replica, 0, second)
        assert (found.upto, list(found.tokens), found.limited) == (0, [], False)
        found = await page(primary, 0, second)
        assert (found.upto, list(found.tokens)) == (second, [first, second])
        pair.resume()
        pair.catch_up()
        found = await page(replica, 0, second)
        assert (found.upto, list(found.tokens)) == (second, [first, second])


@sync
async def test_9_9_whatever_the_lag_a_page_is_whole_as_far_as_it_claims(pair: Pair) -> None:
    random_ = random.Random(9)
    async with pair.stores() as (primary, replica):
        claim = await primary.claim("w1", ["orders"], timeout=1)
        pages, lagging, open_ = [], 0, []
        for _ in range(60):
            chance = random_.random()
            if chance < 0.3:  # commits out of order, and some never
                transaction = primary.transaction(claim)
                (token,) = await primary.reserve("orders", 1)
                await transaction.begin()
                await transaction.insert("orders", [(token, [[token, 0]], [row(token, 0)])])
                open_.append((token, transaction))
            elif chance < 0.5:
                await write(primary, claim, 1, 2)
            elif chance < 0.75 and open_:
                _, transaction = open_.pop(random_.randrange(len(open_)))
                await (transaction.rollback() if random_.random() < 0.3 else transaction.commit())
            else:
                (pair.pause if random_.random() < 0.5 else pair.resume)()
            highest = (await primary.reserve("orders", 1))[0]
            announced = min([token - 1 for token, _ in open_], default=highest)
            await primary.heartbeat(claim, {"orders": announced})
            found = await page(replica, 0, announced)
            pages.append(found)
            lagging += found.upto < announced
        pair.resume()
        for _, transaction in open_:
            await transaction.rollback()
        truth = await read(primary, "w1", 0, highest)
        for found in pages:
            had = list(zip(found.tokens, found.payloads, strict=True))
            assert had == [one for one in truth if one[0] <= found.upto]
        assert lagging > 5, "the replica has to lag for this to show anything"


def connect(redis_url: str, name: str, store: str, **options: Any) -> busrep.Bus:
    return busrep.connect(redis_url, name=name, streams=[orders], store=store, settings=QUICK, **options)


@sync
async def test_a_reader_of_a_lagging_replica_catches_up_when_it_does(pair: Pair, redis_url: str, bus_name: str) -> None:
    async with connect(redis_url, bus_name, pair.primary, writer="w1") as writer:
        early = await writer.publish(orders, [[n] for n in range(10)])
        await asyncio.sleep(2 * QUICK.heartbeat)  # its position gets into the table
        pair.catch_up()
        pair.pause()
        late = await writer.publish(orders, [[n] for n in range(10, 20)])
        async with connect(redis_url, bus_name, pair.replica, start="earliest") as reader:
            seen: list[Any] = []
            reader.subscribe(orders)(lambda batch: seen.extend(batch.rows))
            await reader.wait_for(orders, "w1", early[-1], timeout=10)
            await until(lambda: reader.statistics()["reader"]["pages_unproven"] > 3)
            assert seen == [[n] for n in range(10)]
            live = await writer.publish(orders, [[20]])  # arrives, and waits for those before it
            pair.resume()
            await reader.wait_for(orders, "w1", live[-1], timeout=10)
            assert seen == [[n] for n in range(21)]
            assert late[-1] < live[-1]


@sync
async def test_a_mere_reader_of_a_replica_only_follows_who_is_silent(
    pair: Pair, redis_url: str, bus_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busrep")
    async with pair.stores() as (primary, _):
        claim = await primary.claim("dead", ["orders"], timeout=1)
        ids = await write(primary, claim, 1, 1)  # and published nothing, for it was killed
        await primary.heartbeat(claim, {"orders": ids[0]})
        pair.catch_up()
        async with connect(redis_url, bus_name, pair.replica, start="earliest") as reader:
            seen: list[Any] = []
            reader.subscribe(orders)(lambda batch: seen.extend(batch.tokens))
            await reader.wait_for(orders, "dead", ids[0], timeout=10)
            await until(lambda: "cannot be finished yet" in caplog.text)
            assert "read-only" in caplog.text
            # Who may write finishes it (9.5); the replica's reader learns of it from the table.
            assert await primary.finish("dead", claim.incarnation, timeout=1) == {"orders": ids[-1]}
            await reader.wait_for(orders, "dead", ids[-1], timeout=10)
            assert seen == ids
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@sync
async def test_a_durable_reader_of_a_replica_saves_elsewhere(pair: Pair, redis_url: str, bus_name: str) -> None:
    async with connect(redis_url, bus_name, pair.primary, writer="w1") as writer:
        ids = await writer.publish(orders, [[1], [2]])
        for expected in ([ids[0], ids[1]], []):
            seen: list[int] = []
            options = {"reader": "billing", "reader_store": pair.primary}
            async with connect(redis_url, bus_name, pair.replica, **options) as reader:
                reader.subscribe(orders)(lambda batch, seen=seen: seen.extend(batch.tokens))
                await reader.wait_for(orders, "w1", ids[-1], timeout=10)
            assert seen == expected
        async with pair.stores() as (primary, _):
            assert (await primary.load_reader("billing")).positions == {("orders", "w1"): ids[-1]}


@sync
async def test_what_writes_says_that_the_replica_is_read_only(pair: Pair) -> None:
    async with pair.stores() as (primary, replica):
        await replica.init()  # all is there: nothing to write
        claim = await primary.claim("w1", ["orders"], timeout=1)
        pair.catch_up()
        refused: list[Callable[[], Awaitable[Any]]] = [
            lambda: replica.claim("w2", ["orders"], timeout=1),
            lambda: replica.finish("w1", claim.incarnation, timeout=1),
            lambda: replica.heartbeat(claim, {"orders": 1}),
            lambda: replica.reserve("orders", 1),
            lambda: replica.transaction(claim).begin(),
            lambda: replica.register_reader("r", {("orders", "w1"): 0}, claim.epoch),
            lambda: replica.save_reader("r", [("orders", "w1", 0, 1)], claim.epoch),
            lambda: replica.reset_reader("r", {}, claim.epoch),
            lambda: replica.dead_letter("r", "orders", "w1", [1], [b"[]"], "error"),
            lambda: replica.prune(keep=1),
            lambda: replica.restored(),
        ]
        for asked in refused:
            with pytest.raises(Unavailable, match="read-only|recovery") as caught:
                await asked()
            assert str(pair.replica_server.port) in str(caught.value)
        assert [one.writer for one in await replica.known()] == ["w1"]  # and goes on answering
        assert (await replica.status())["streams"]["orders"]["writers"]["w1"]["position"] == 0


@sync
async def test_a_question_cancelled_by_the_replay_is_asked_again_later(pair: Pair) -> None:
    def delay(seconds: int) -> None:
        pair.ask(f"ALTER SYSTEM SET max_standby_streaming_delay = '{seconds}s'")
        pair.ask("SELECT pg_reload_conf()")

    def long_question() -> Plan[None]:
        yield (Control.SNAPSHOT, Sql("SELECT count(*) FROM busrep_positions"))
        reading.set()
        yield Sql("SELECT pg_sleep(20)")

    async with pair.stores() as (primary, replica):
        delay(0)  # only now: every question at its opening could be cancelled, too
        reading = asyncio.Event()
        question = asyncio.create_task(replica.read(long_question()))
        await reading.wait()
        claim = await primary.claim("w1", ["orders"], timeout=1)
        with psycopg.connect(pair.primary) as connection:  # as VACUUM does it when it truncates
            connection.execute("LOCK TABLE busrep_positions IN ACCESS EXCLUSIVE MODE")
            connection.execute("SELECT pg_current_xact_id()")
            connection.commit()
            with pytest.raises(Unavailable, match="conflict with recovery"):
                await question
        delay(60)
        ids = await write(primary, claim, 1)
        await primary.heartbeat(claim, {"orders": ids[0]})
        pair.catch_up()
        assert (await page(replica, 0, ids[0])).upto == ids[0]


@sync
async def test_9_1_a_replica_does_not_tell_what_became_of_a_fact(pair: Pair) -> None:
    async with pair.stores() as (primary, replica):
        claim = await primary.claim("w1", ["orders"], timeout=1)
        pair.catch_up()
        pair.pause()
        transaction = primary.transaction(claim)
        (token,) = await primary.reserve("orders", 1)
        await transaction.begin()
        await transaction.insert("orders", [(token, [[token, 0]], [row(token, 0)])])
        await transaction.commit()
        blocking = open_blocking_store(pair.replica, Registry([orders]))
        blocking.open()
        with contextlib.closing(blocking):
            for marker in (transaction.marker, None):  # which is "in the future" there
                with pytest.raises(Unavailable, match="replica"):
                    await replica.outcome(claim, marker, [("orders", token)])
                with pytest.raises(Unavailable, match="replica"):
                    blocking.outcome(claim, marker, [("orders", token)])
        found = await primary.outcome(claim, transaction.marker, [("orders", token)])
        assert found == {("orders", token): [row(token, 0)]}


def test_without_pg_basebackup_it_says_so(
    servers_pair: tuple[PostgresServer, PostgresServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    primary, _ = servers_pair
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    left = set(primary.directory.parent.glob("busrep-replica-*"))
    with pytest.raises(ConfigError, match="no pg_basebackup"):
        start_replica(primary)
    assert set(primary.directory.parent.glob("busrep-replica-*")) == left
