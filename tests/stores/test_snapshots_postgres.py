"""Snapshots out of PostgreSQL: limited over all processes, read beside pruning, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from busrep.core.snapshots import Agreement
from busrep.errors import PositionTooOld, ReaderMoved, SnapshotBusy, SnapshotGone, Unavailable
from busrep.settings import Settings
from busrep.stores import open_store
from busrep.stores.postgres.snapshots import SLOTS
from busrep.stores.postgres.store import PostgresStore
from tests import ROOT
from tests.shop import opened_async_store
from tests.stores import test_replica
from tests.stores.snapshot_conformance import fetched, some_facts, text_of, tiles, whole
from tests.stores.store_conformance import generic, page, sync, write

pytestmark = pytest.mark.servers

servers_pair, pair = test_replica.servers_pair, test_replica.pair

CHILD = """
import asyncio, sys
from busrep.settings import Settings
from busrep.stores import open_store
from tests.stores.store_conformance import generic

async def main():
    store = open_store(sys.argv[1], generic(), settings=Settings(snapshots=1))
    await store.open()
    await store.agree("orders", part_rows=2)
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def ask(url: str, text: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run a statement beside the store, committed."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(text.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[PostgresStore]:
    async with opened_async_store(url, generic(), settings=Settings(**settings)) as store:
        assert isinstance(store, PostgresStore)
        yield store


async def until(true: Callable[[], Any]) -> None:
    """The test's own deadline ends it otherwise."""
    while not true():
        await asyncio.sleep(0.01)


def snapshots_held(url: str) -> list[int]:
    """Process IDs of the backends that have a place among the snapshots allowed at a time."""
    found = ask(url, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = %s", SLOTS)
    return [pid for (pid,) in found]


def sessions(url: str) -> set[int]:
    """Process IDs of the clients of this database, but for who asks."""
    text = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    return {pid for (pid,) in ask(url, f"{text} AND backend_type = 'client backend'")}


def waiting_for_locks(url: str) -> int:
    found = ask(
        url, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return int(found[0][0])


# --- somebody dies


@sync
async def test_a_place_is_lost_while_parts_are_loaded(postgres_url: str) -> None:
    """The server ends the connection that has it: others may have it, and what is under way comes to its end."""
    async with opened(postgres_url, snapshots=1) as store:
        await some_facts(store, *(4000,) * 8)
        agreement = await store.agree("orders", part_rows=16_000)
        expected = [await text_of(store, agreement, number) for number in (0, 1)]
        async with aclosing(store.load(agreement, 0)) as ended, aclosing(store.load(agreement, 1)) as pieces:
            await anext(ended)
            text = await anext(pieces)
            ask(postgres_url, "SELECT pg_terminate_backend(%s)", *snapshots_held(postgres_url))
            await until(lambda: not snapshots_held(postgres_url))
            with pytest.raises(Unavailable):
                await anext(ended)
            again = await store.agree("orders", part_rows=7, again=agreement)
            text += b"".join([piece async for piece in pieces])
        assert again.same(agreement)
        assert [await text_of(store, again, 0), text] == expected
        with pytest.raises(SnapshotBusy):
            await text_of(store, agreement, 0)
        await store.leave(agreement)
        assert len(snapshots_held(postgres_url)) == 1
        await store.leave(again)
        await until(lambda: not snapshots_held(postgres_url))


@sync
async def test_loads_that_fail_leave_the_limit_where_it_is(postgres_url: str) -> None:
    """Each ends the connection that has the place, and the next one takes a place again, or is told that there is
    none."""
    async with opened(postgres_url, snapshots=1) as store:
        await some_facts(store, *(2000,) * 4)
        agreement = await store.agree("orders", part_rows=4000)
        for _ in range(3):
            async with aclosing(store.load(agreement, 0)) as pieces:
                await anext(pieces)
            await until(lambda: not snapshots_held(postgres_url))
            async with aclosing(store.load(agreement, 1)) as pieces:
                await anext(pieces)
                assert len(snapshots_held(postgres_url)) == 1
                with pytest.raises(SnapshotBusy):
                    await store.agree("orders", part_rows=4000)
        await until(lambda: not snapshots_held(postgres_url))
        other = await store.agree("orders", part_rows=4000)
        for _ in range(2):
            with pytest.raises(SnapshotBusy):
                await text_of(store, agreement, 0)
        await store.leave(other)
        tiles(agreement, await whole(store, agreement))
        assert len(snapshots_held(postgres_url)) == 1
        await store.leave(agreement)
        await until(lambda: not snapshots_held(postgres_url))


@sync
async def test_parts_are_loaded_on_as_many_connections_as_there_are_loads_at_a_time(postgres_url: str) -> None:
    """The connection with the place is one of them."""
    async with opened(postgres_url, snapshots=1) as store:
        await some_facts(store, *(2000,) * 4)
        before = sessions(postgres_url)
        agreement = await store.agree("orders", part_rows=2000)
        for number in range(3):
            await text_of(store, agreement, number)
        assert sessions(postgres_url) - before == set(snapshots_held(postgres_url))
        async with aclosing(store.load(agreement, 0)) as first, aclosing(store.load(agreement, 1)) as second:
            for pieces in (first, second):
                await anext(pieces)
            assert len(sessions(postgres_url) - before) == 2
            for pieces in (first, second):
                assert [piece async for piece in pieces] != []
        tiles(agreement, await whole(store, agreement))
        await store.leave(agreement)
        await until(lambda: sessions(postgres_url) == before)


@sync
async def test_a_connection_that_is_cut_in_the_middle_of_a_part(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        claim = await store.claim("w1", ["orders"], timeout=1)
        await store.reserve("orders", 4000)
        ask(  # more than sockets hold
            postgres_url,
            "INSERT INTO busrep_facts (stream, writer, id, idx, row) SELECT 'orders', 'w1', i, 0, "
            "'[\"' || repeat('x', 10000) || '\"]' FROM generate_series(1, 4000) AS i",
        )
        await store.heartbeat(claim, {"orders": 4000})
        agreement = await store.agree("orders", part_rows=100_000)
        with pytest.raises(Unavailable):
            async with aclosing(store.load(agreement, 0)) as pieces:
                await anext(pieces)
                ask(
                    postgres_url,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'FETCH %'",
                )
                async for _ in pieces:
                    pass
        tiles(agreement, await text_of(store, agreement, 0))  # on another connection, of the same snapshot
        await store.leave(agreement)


@sync
async def test_a_part_is_cancelled_and_the_rest_is_loaded(postgres_url: str) -> None:
    async with opened(postgres_url, snapshot_connections=1) as store:
        await some_facts(store, *(5000,) * 4)
        agreement = await store.agree("orders", part_rows=5000)
        dice = random.Random(1)
        for _ in range(15):
            loading = asyncio.create_task(whole(store, agreement))
            for _ in range(dice.randrange(60)):
                await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait([loading])
        tiles(agreement, await whole(store, agreement))
        await store.leave(agreement)
        await until(lambda: not snapshots_held(postgres_url))


@contextmanager
def holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the only snapshot; killed with SIGKILL at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, url], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@sync
async def test_the_limit_is_of_all_processes_and_a_killed_one_counts_no_more(postgres_url: str) -> None:
    async with opened(postgres_url, snapshots=1) as store:
        await some_facts(store, *(1,) * 4)
        with holder(postgres_url) as process:
            with pytest.raises(SnapshotBusy) as caught:
                await store.agree("orders", part_rows=2)
            assert caught.value.limit == 1
            process.kill()
            await until(lambda: not snapshots_held(postgres_url))
            agreement = await store.agree("orders", part_rows=2)
            tiles(agreement, await whole(store, agreement))


async def more(store: PostgresStore) -> None:
    """Positions move."""
    claim = await store.claim("w9", ["orders"], timeout=1)
    (token,) = await write(store, claim, 1)
    await store.heartbeat(claim, {"orders": token})


# --- rights


@sync
async def test_a_user_who_may_only_read_has_a_snapshot(postgres_url: str) -> None:
    user = f"only_{postgres_url.rpartition('_')[2]}"
    async with opened(postgres_url) as store:
        await some_facts(store, 1, 2)
        ask(postgres_url, f"CREATE ROLE {user} LOGIN PASSWORD 'x'")
        try:
            ask(postgres_url, f"GRANT SELECT ON busrep_meta, busrep_positions, busrep_facts TO {user}")
            head, _, where = postgres_url.partition("//")
            reading = open_store(f"{head}//{user}:x@{where.rpartition('@')[2]}", generic())
            await reading.open()
            agreement = await reading.agree("orders", part_rows=2)
            assert await whole(reading, agreement) == await fetched(store, agreement)
            await reading.leave(agreement)
            await reading.close()
        finally:
            ask(postgres_url, f"DROP OWNED BY {user}; DROP ROLE {user}")


# --- pruning


@sync
async def test_a_part_is_of_the_state_in_which_it_was_checked(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pruned once it is under way is loaded all the same; what was pruned before is gone, and it is told."""
    async with opened(postgres_url) as store:
        await some_facts(store, *(3,) * 20)
        agreement = await store.agree("orders", part_rows=10)
        expected = await text_of(store, agreement, 0)
        run_on = store.run_on

        async def pruned_behind(connection: Any, plan: Any, within: float | None = None) -> Any:
            found = await run_on(connection, plan, within)
            if connection.info.transaction_status == TransactionStatus.INTRANS:
                await store.prune(keep=0)
                ask(postgres_url, "VACUUM busrep_facts")
            return found

        with monkeypatch.context() as patch:
            patch.setattr(store, "run_on", pruned_behind)
            assert await text_of(store, agreement, 0) == expected
        assert (await store.agree("orders", part_rows=10, again=agreement)).same(agreement)
        with pytest.raises(SnapshotGone):
            await text_of(store, agreement, 0)


@sync
async def test_a_prune_that_began_before_the_bootstrap_ends_before_it(postgres_url: str) -> None:
    """It looked at the readers before there was this one; so this one looks at the floors after it."""
    async with opened(postgres_url) as store:
        await some_facts(store, *(1,) * 4)
        agreement = await store.agree("orders", part_rows=2)
        await more(store)
        async with await psycopg.AsyncConnection.connect(postgres_url) as pruning:
            await pruning.execute("SELECT 1 FROM busrep_streams WHERE stream = 'orders' FOR UPDATE")
            beginning = asyncio.create_task(store.begin_bootstrap("r", agreement, syncs=1, reason="new"))
            await until(lambda: beginning.done() or waiting_for_locks(postgres_url))
            await pruning.execute("DELETE FROM busrep_facts")
            await pruning.execute("UPDATE busrep_positions SET floor = position")
            await pruning.commit()
            with pytest.raises(SnapshotGone):
                await beginning
        assert await store.bootstraps() == []
        await store.leave(agreement)


@sync
async def test_a_prune_that_comes_while_a_bootstrap_begins_waits_for_it(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        await some_facts(store, *(1,) * 4)
        agreement = await store.agree("orders", part_rows=2)
        await more(store)
        async with await psycopg.AsyncConnection.connect(postgres_url) as slow:
            await slow.execute("LOCK TABLE busrep_bootstraps IN EXCLUSIVE MODE")
            beginning = asyncio.create_task(store.begin_bootstrap("r", agreement, syncs=1, reason="new"))
            await until(lambda: beginning.done() or waiting_for_locks(postgres_url))
            pruning = asyncio.create_task(store.prune(keep=0))
            await until(lambda: pruning.done() or waiting_for_locks(postgres_url) == 2)
            await slow.rollback()
            await beginning
            floors = await pruning
        assert floors == {("orders", "w1"): 3, ("orders", "w2"): 4}
        await store.leave(agreement)


@sync
async def test_bootstraps_and_prunes_in_any_order_leave_no_gap(postgres_url: str) -> None:
    dice = random.Random(2)
    async with opened(postgres_url) as store:
        first, second = await some_facts(store, 1, 1)
        begun = gone = 0
        for number in range(12):
            agreement = await store.agree("orders", part_rows=100)
            for claim in (first, second):
                (last,) = await write(store, claim, 1)
                await store.heartbeat(claim, {"orders": last})

            async def begin(agreement: Agreement = agreement, reader: str = f"r{number}") -> bool:
                for _ in range(dice.randrange(8)):
                    await asyncio.sleep(0.0005)
                try:
                    await store.begin_bootstrap(reader, agreement, syncs=1, reason="new")
                except SnapshotGone:
                    return False
                return True

            done, _ = await asyncio.gather(begin(), store.prune(keep=0))
            if done:
                begun += 1
                for writer, position in agreement.positions.items():
                    try:
                        await page(store, position, last, writer=writer)
                    except PositionTooOld:
                        pytest.fail(f"what follows {position} of {writer} was pruned")
            gone += not done
            ask(postgres_url, "DELETE FROM busrep_readers")
            await store.leave(agreement)
        assert begun + gone == 12


# --- two processes of one name


async def _begun(store: PostgresStore, **positions: int) -> tuple[str, Agreement]:
    """A reader with these positions, and a snapshot that ends at 3."""
    epoch = await store.epoch()
    await store.reserve("orders", 10)  # positions above the sequence are not saved (9.17)
    await store.register_reader("r", {("orders", writer): at for writer, at in positions.items()}, epoch)
    return epoch, Agreement("orders", epoch, {"w1": 3}, {}, [])


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
@sync
async def test_a_save_that_comes_while_a_bootstrap_begins_is_refused(postgres_url: str, level: str) -> None:
    """Its statement began when there was no bootstrap yet, and its row was as it should be."""
    async with opened(postgres_url) as store, opened(postgres_url) as other:
        epoch, agreement = await _begun(store, w1=3)
        async with (
            await psycopg.AsyncConnection.connect(postgres_url) as slow,
            await psycopg.AsyncConnection.connect(postgres_url) as handler,
        ):
            await handler.set_isolation_level(psycopg.IsolationLevel[level.replace(" ", "_")])
            await handler.execute("SELECT 1 FROM busrep_meta")
            await slow.execute("LOCK TABLE busrep_bootstraps IN EXCLUSIVE MODE")
            beginning = asyncio.create_task(store.begin_bootstrap("r", agreement, syncs=1, reason="new"))
            await until(lambda: beginning.done() or waiting_for_locks(postgres_url) == 1)
            saving = asyncio.create_task(other.save_reader("r", [("orders", "w1", 3, 5)], epoch, handler))
            registering = asyncio.create_task(other.register_reader("r", {("orders", "w2"): 7}, epoch))
            await until(lambda: saving.done() or registering.done() or waiting_for_locks(postgres_url) == 3)
            await slow.rollback()
            with pytest.raises(ReaderMoved):
                await saving
            await beginning
            await registering
            await handler.rollback()
        assert (await store.load_reader("r")).positions == {("orders", "w1"): 3}


@sync
async def test_a_handler_that_has_saved_keeps_a_bootstrap_waiting_and_nobody_else(postgres_url: str) -> None:
    async with opened(postgres_url) as store, opened(postgres_url) as other:
        epoch, agreement = await _begun(store, w1=3, w2=2)
        async with await psycopg.AsyncConnection.connect(postgres_url) as handler:
            await other.save_reader("r", [("orders", "w1", 3, 5)], epoch, handler)
            beginning = asyncio.create_task(store.begin_bootstrap("r", agreement, syncs=1, reason="new"))
            await until(lambda: beginning.done() or waiting_for_locks(postgres_url))
            await other.register_reader("another", {("orders", "w1"): 0}, epoch)
            await other.register_reader("r", {("orders", "w3"): 7}, epoch)
            await other.prune(keep=0)
            await handler.commit()
            await beginning
        ends = {("orders", writer): at for writer, at in (("w1", 3), ("w2", 0), ("w3", 0))}
        assert (await store.load_reader("r")).positions == ends


# --- where and how


@sync
async def test_time_limits_of_the_server_do_not_end_it(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        await some_facts(store, 1, 2)
        database = postgres_url.rpartition("/")[2]
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            ask(postgres_url, f"ALTER DATABASE {database} SET {name} = '40ms'")
        agreement = await store.agree("orders", part_rows=2)
        with psycopg.connect(postgres_url, autocommit=True) as slow, pytest.raises(psycopg.errors.QueryCanceled):
            slow.execute("SELECT pg_sleep(10)")  # so long it takes, and more
        assert await whole(store, agreement) == await fetched(store, agreement)
        await store.leave(agreement)


@sync
async def test_a_part_is_sorted_nowhere(postgres_url: str) -> None:
    """The rows of each writer are read in the order of the index, and merged: a sort of a part goes to the disk."""
    database = postgres_url.rpartition("/")[2]
    ask(postgres_url, f"ALTER DATABASE {database} SET work_mem = '256kB'")  # pg_settings itself needs a third
    backends = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = %s AND pid <> %s"

    async def went_to_disk(url: str) -> int:
        """How often, by all who are gone by now."""
        with psycopg.connect(url, autocommit=True) as last:
            while last.execute(backends, (database, last.info.backend_pid)).fetchall():
                await asyncio.sleep(0.01)
            found = last.execute("SELECT temp_files FROM pg_stat_database WHERE datname = %s", (database,)).fetchone()
            assert found is not None
            return int(found[0])

    async with opened(postgres_url) as store:
        await some_facts(store, *(4000,) * 4)
        agreed = await store.agree("orders", part_rows=100_000)
        await store.leave(agreed)
    ask(postgres_url, "ANALYZE busrep_facts")
    before = await went_to_disk(postgres_url)
    async with opened(postgres_url) as store:
        held = await store.agree("orders", part_rows=100_000, again=agreed)
        assert (await whole(store, held)).count(b"\n") == 16_000
        await store.leave(held)
    assert await went_to_disk(postgres_url) == before
    ask(postgres_url, "SELECT row FROM busrep_facts ORDER BY row DESC")
    assert await went_to_disk(postgres_url) > before  # it is counted


@sync
async def test_a_serializable_or_latin_1_default_changes_nothing(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        claim = await store.claim("w1", ["orders"], timeout=1)
        (token,) = await store.reserve("orders", 1)
        transaction = store.transaction(claim)
        await transaction.begin()
        await transaction.insert("orders", [(token, [["ä€"]], ['["ä€"]'.encode()])])
        await transaction.commit()
        await store.heartbeat(claim, {"orders": token})
        database = postgres_url.rpartition("/")[2]
        ask(postgres_url, f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")
        ask(postgres_url, f"ALTER DATABASE {database} SET client_encoding = 'LATIN1'")
        async with opened(postgres_url) as fresh:
            agreement = await fresh.agree("orders", part_rows=2)
            assert await whole(fresh, agreement) == '1 w1 ["ä€"]\n'.encode()
            await fresh.leave(agreement)


@sync
async def test_closing_while_one_agrees_leaves_nothing(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(postgres_url) as store:
        await some_facts(store, 1)
        agreed, go_on = asyncio.Event(), asyncio.Event()

        async def slow(connection: Any) -> None:
            await lock_slot(connection)
            agreed.set()
            await go_on.wait()

        lock_slot = store.snapshots.lock_slot
        monkeypatch.setattr(store.snapshots, "lock_slot", slow)
        agreeing = asyncio.create_task(store.agree("orders", part_rows=2))
        await agreed.wait()
        await store.close()
        go_on.set()
        with pytest.raises(Unavailable, match="not open"):
            await agreeing
        await until(lambda: not snapshots_held(postgres_url))


@sync
async def test_a_replica_gives_what_it_has_proven(pair: test_replica.Pair) -> None:
    async with pair.stores() as (primary, replica):
        claim = await primary.claim("w1", ["orders"], timeout=1)
        (first,) = await write(primary, claim, 3)
        await primary.heartbeat(claim, {"orders": first})
        pair.catch_up()
        pair.pause()
        (second,) = await write(primary, claim, 1)
        await primary.heartbeat(claim, {"orders": second})
        agreement = await replica.agree("orders", part_rows=2)
        assert agreement.positions == {"w1": first}
        assert await whole(replica, agreement) == await fetched(primary, agreement)
        await replica.leave(agreement)
        ahead = await primary.agree("orders", part_rows=2)
        assert ahead.positions == {"w1": second}
        with pytest.raises(Unavailable, match="lags"):
            await replica.agree("orders", part_rows=2, again=ahead)
        pair.resume()
        pair.catch_up()
        again = await replica.agree("orders", part_rows=2, again=ahead)
        assert again.same(ahead)
        assert await whole(replica, again) == await whole(primary, ahead)
        await replica.leave(again)
        await primary.leave(ahead)
