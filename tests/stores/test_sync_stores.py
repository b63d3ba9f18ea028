"""The stores for threads: the stores' conformance suite over each, in real threads, and what only they have to do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest

from busrep.errors import ConfigError, SchemaError, Unavailable, WriterFenced
from busrep.settings import Settings
from busrep.stores import AsyncStore, CommitUnknown
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.plans import Control, complete
from busrep.stores.sqlite import files
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.servers import PostgresServer
from tests.asyncio.bus_conformance import until
from tests.shop import opened_store
from tests.stores import test_stores
from tests.stores.store_conformance import SHORT, StoreConformance, generic


class Threads:
    """A thread for each asyncio task, as a program with threads would have in its place."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
        self._all: list[ThreadPoolExecutor] = []

    async def run(self, function: Any, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        if task not in self._of:
            self._of[task] = ThreadPoolExecutor(1)
            self._all.append(self._of[task])
        # Threads cannot be cancelled: whoever is, waits for the thread, and is cancelled then.
        work = asyncio.get_running_loop().run_in_executor(self._of[task], lambda: function(*args, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            work.cancelled() or work.exception()
            raise

    def stop(self) -> None:
        for thread in self._all:
            thread.shutdown()


class InThreads:
    """A blocking store, or transaction, that looks like an async one: each call is made in the task's own thread."""

    def __init__(self, blocking: Any, threads: Threads) -> None:
        self.blocking, self.threads = blocking, threads

    def __getattr__(self, name: str) -> Any:
        if name in ("connection", "joined", "marker"):
            return getattr(self.blocking, name)
        if name in ("dialect", "where"):
            return getattr(self.blocking.wrapped, name)
        method = getattr(self.blocking, name)
        return lambda *args, **options: self.threads.run(method, *args, **options)

    def transaction(self, *args: Any) -> InThreads:
        return InThreads(self.blocking.transaction(*args), self.threads)

    async def close(self) -> None:
        await self.threads.run(self.blocking.close)
        self.threads.stop()


class Blocking(StoreConformance):
    commits_at_once = True  # who is cancelled waits for the thread all the same

    def make(self, url: str, registry: Registry | None = None) -> AsyncStore:
        store: Any = InThreads(open_blocking_store(url, registry or generic()), Threads())
        return store  # type: ignore[no-any-return]


class TestBlockingMemory(Blocking):
    set_sequence = test_stores.TestMemory.set_sequence

    @pytest.fixture
    def url(self) -> str:
        return f"memory://{secrets.token_hex(6)}"


class BlockingSql(Blocking, test_stores.SqlConformance):
    pass


class TestBlockingSqlite(BlockingSql):
    connect, sql = test_stores.TestSqlite.connect, test_stores.TestSqlite.sql
    set_sequence, lose_sequence = test_stores.TestSqlite.set_sequence, test_stores.TestSqlite.lose_sequence

    @pytest.fixture
    def url(self, sqlite_url: str) -> str:
        return sqlite_url


@pytest.mark.servers
class TestBlockingPostgres(BlockingSql):
    has_clock = True
    mark, json_type = test_stores.TestPostgres.mark, test_stores.TestPostgres.json_type
    sql = test_stores.TestPostgres.sql
    set_sequence, lose_sequence = test_stores.TestPostgres.set_sequence, test_stores.TestPostgres.lose_sequence

    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


# -- what only they have to do --------------------------------------------------------------------------------


def opened(url: str, **options: Any) -> AbstractContextManager[BlockingStore]:
    return opened_store(url, generic(), **options)


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{secrets.token_hex(6)}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


def test_a_store_that_would_wait_is_a_bug_and_says_so() -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        complete(asyncio.sleep(0))


def test_no_store_starts_a_thread(url: str) -> None:
    before = set(threading.enumerate())
    with opened(url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        transaction.begin()
        transaction.commit()
        assert set(threading.enumerate()) <= before


def test_a_name_is_won_back_only_while_it_is_nobody_else_s(url: str) -> None:
    with opened(url) as store:
        first = store.claim("w1", ["orders"], timeout=1)
        second = store.claim("w1", ["orders"], timeout=1, again=first.incarnation)  # as it was
        assert second.incarnation > first.incarnation
        store.finish("w1", second.incarnation, timeout=1)
        third = store.claim("w1", ["orders"], timeout=1, again=second.incarnation)  # finished for its silence
        assert third.incarnation > second.incarnation + 1
        with pytest.raises(WriterFenced):
            store.claim("w1", ["orders"], timeout=1, again=first.incarnation)
        # What it would ask if the third claim had got no answer.
        fourth = store.claim("w1", ["orders"], timeout=1, again=second.incarnation)
        assert fourth.incarnation > third.incarnation
        assert store.finish("w1", second.incarnation, timeout=1) == {}  # nobody takes it for finished still
        assert store.finish("w1", third.incarnation, timeout=1) == {}
        store.check_claim(fourth)
        with pytest.raises(WriterFenced):
            store.claim("w1", ["orders"], timeout=1, again=third.incarnation)
        other = store.claim("w1", ["orders"], timeout=1)  # another process's, after that
        for former in (first, second, third, fourth):
            with pytest.raises(WriterFenced):
                store.claim("w1", ["orders"], timeout=1, again=former.incarnation)
        store.check_claim(other)
        store.finish("w1", other.incarnation, timeout=1)
        for former in (first, second, third, fourth):
            with pytest.raises(WriterFenced):
                store.claim("w1", ["orders"], timeout=1, again=former.incarnation)
        other = store.claim("w1", ["orders"], timeout=1, again=other.incarnation)
        store.claim("w1", ["orders"], timeout=1, again=other.incarnation)
        store.restored()
        with pytest.raises(WriterFenced):
            store.claim("w1", ["orders"], timeout=1, again=other.incarnation)


def test_a_name_that_was_won_back_without_an_answer_and_finished_is_won_back_still(url: str) -> None:
    with opened(url) as store:
        claim = first = store.claim("w1", ["orders"], timeout=1)
        for _ in range(3):
            store.finish("w1", claim.incarnation, timeout=1)
            # What it would ask if none of the claims before had got an answer.
            claim = store.claim("w1", ["orders"], timeout=1, again=first.incarnation)
        store.finish("w1", claim.incarnation, timeout=1)
        claim = store.claim("w1", ["orders"], timeout=1, again=claim.incarnation)  # which it knew
        store.finish("w1", claim.incarnation, timeout=1)
        with pytest.raises(WriterFenced):
            store.claim("w1", ["orders"], timeout=1, again=first.incarnation)
        other = store.claim("w1", ["orders"], timeout=1)  # another process's, after that
        for _ in range(2):
            for former in (first, claim):
                with pytest.raises(WriterFenced):
                    store.claim("w1", ["orders"], timeout=1, again=former.incarnation)
            store.finish("w1", other.incarnation, timeout=1)
        assert [one.writer for one in store.known()] == ["w1"]


def test_a_name_is_won_back_though_it_was_finished_by_two(url: str) -> None:
    """The first got no further than to fence it, and the second took that for another silent incarnation."""
    with opened(url) as store:
        first = store.claim("w1", ["orders"], timeout=1)
        found = store.finish("w1", first.incarnation, timeout=1)
        assert store.finish("w1", first.incarnation + 1, timeout=1) == found
        assert store.claim("w1", ["orders"], timeout=1, again=first.incarnation).incarnation > first.incarnation + 1


def test_bad_urls_are_told_as_for_asyncio() -> None:
    for bad in ("mysql://x", "sqlite://x.db", "sqlite:///:memory:", "memory://"):
        with pytest.raises(ConfigError, match="these forms do"):
            open_blocking_store(bad, generic())


def test_a_missing_sqlite_file_is_a_schema_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SchemaError):
        open_blocking_store(f"sqlite:///{tmp_path}/none.db", generic()).open()
    assert not (tmp_path / "none.db").exists()


def test_sqlite_facts_of_two_threads_take_turns_and_of_one_thread_are_refused(sqlite_url: str) -> None:
    with opened(sqlite_url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        transaction.begin()
        for attempt in (lambda: store.reserve("orders", 1), lambda: store.transaction(claim)):
            with pytest.raises(ConfigError, match="one write lock"):
                attempt()
        reserved: list[int] = []
        other = threading.Thread(target=lambda: reserved.extend(store.reserve("orders", 1)))
        other.start()
        other.join(SHORT)
        assert reserved == []
        transaction.commit()
        other.join()
        assert reserved == [1]


def test_sqlite_what_is_read_after_an_interrupt_is_of_now(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler raised in a reading transaction: what became of a fact was asked in the state before it."""

    class Interrupting(dict[Any, str]):
        def __missing__(self, _: Any) -> str:
            raise KeyboardInterrupt

    with opened(sqlite_url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "CONTROLS", Interrupting({Control.SNAPSHOT: "BEGIN"}))  # at COMMIT
            store.known()
        transaction = store.transaction(claim)
        (token,) = store.reserve("orders", 1)
        transaction.begin()
        transaction.insert("orders", [(token, [[1]], [b"[1]"])])
        transaction.commit()
        assert store.outcome(claim, None, [("orders", token)]) == {("orders", token): [b"[1]"]}
        assert [at.writer for at in store.known()] == ["w1"]


@pytest.mark.parametrize("options", [{}, {"isolation_level": None}], ids=["implicit", "autocommit"])
def test_sqlite_facts_on_the_callers_connection(sqlite_url: str, options: dict[str, Any]) -> None:
    with opened(sqlite_url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), **options)) as connection:
            for commit in (True, False):
                transaction = store.transaction(claim, connection)
                (token,) = store.reserve("orders", 1)
                transaction.begin()
                assert transaction.connection is connection
                transaction.insert("orders", [(token, [[1]], [b"[1]"])])
                assert store.outcome(claim, transaction.marker, [("orders", token)]) is None
                (transaction.commit if commit else transaction.rollback)()
                left = store.outcome(claim, transaction.marker, [("orders", token)])
                assert left == ({("orders", token): [b"[1]"]} if commit else {})
            for commit in (True, False):
                connection.execute("BEGIN")
                transaction = store.transaction(claim, connection)
                assert (transaction.joined, transaction.reserves) == (True, True)
                (token,) = transaction.begin({"orders": 1})["orders"]
                transaction.insert("orders", [(token, [[2]], [b"[2]"])])
                transaction.commit()
                assert store.outcome(claim, transaction.marker, [("orders", token)]) is None
                (connection.commit if commit else connection.rollback)()
                left = store.outcome(claim, transaction.marker, [("orders", token)])
                assert left == ({("orders", token): [b"[2]"]} if commit else {})
        with pytest.raises(ConfigError, match=r"sqlite3\.Connection"):
            store.transaction(claim, object())


@pytest.mark.servers
def test_postgres_connections_are_bounded_and_one_that_is_lost_counts_no_more(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrep.stores.postgres.blocking.POOL_WAIT", SHORT)
    with opened(postgres_url) as store:
        pool = store.wrapped.transactions
        taken = [pool.take() for _ in range(Settings().transactions)]
        with pytest.raises(Unavailable, match="in use"):
            pool.take()
        pool.put(taken.pop())
        taken.append(pool.take())
        lost = taken.pop()
        with pytest.warns(ResourceWarning):
            del lost
        taken.append(pool.take())
        for connection in taken:
            pool.put(connection)


@pytest.mark.servers
def test_postgres_a_connection_that_died_idle_is_not_given_out(postgres_url: str) -> None:
    with opened(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as admin:
        store.epoch()
        admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'busrep' "
            "AND datname = current_database()"
        )
        assert len(store.epoch()) == 32


@pytest.mark.servers
def test_postgres_after_a_restart_of_the_server_it_works_again(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    with opened(postgres_url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        transaction.begin()
        postgres_server.stop()
        with pytest.raises(Unavailable):
            store.epoch()
        with pytest.raises(CommitUnknown):
            transaction.commit()
        postgres_server.start()
        assert store.epoch() == claim.epoch
        store.check_claim(claim)


def hurried(store: BlockingStore, seconds: float, work: Callable[[], Any]) -> Any:
    """What it comes to with so many seconds for each answer, and a minute for all of it."""
    usual, ended = store.wrapped.settings, []

    def run() -> None:
        try:
            ended.append(work())
        except Exception as error:
            ended.append(error)

    store.wrapped.settings = attrs.evolve(usual, fetch_timeout=seconds, claim_timeout=seconds)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    store.wrapped.settings = usual
    assert not thread.is_alive()
    return ended[0]


@pytest.mark.servers
def test_postgres_a_link_with_nobody_at_its_other_end_is_given_up(postgres_url: str) -> None:
    with FaultyLink.in_thread(postgres_url) as link, opened(link.url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        (token,) = store.reserve("orders", 1)
        transaction.begin()
        transaction.insert("orders", [(token, [[1]], [b"[1]"])])
        link.abandon("server")
        refused = hurried(store, 0.3, store.epoch)
        assert isinstance(refused, Unavailable)
        assert str(refused.reason) == "no answer within 0.3 s"
        unknown = hurried(store, 0.3, transaction.commit)
        assert isinstance(unknown, CommitUnknown)
        assert store.epoch() == claim.epoch
        while (left := store.outcome(claim, unknown.marker, [("orders", token)])) is None:
            time.sleep(0.01)
        assert left == {}


@pytest.mark.servers
def test_postgres_who_gives_up_waiting_for_a_lock_leaves_no_session_that_waits(postgres_url: str) -> None:
    with opened(postgres_url) as store, psycopg.connect(postgres_url) as other:
        claim = store.claim("w1", ["orders"], timeout=1)
        other.execute("SELECT FROM busrep_positions FOR UPDATE")
        assert isinstance(hurried(store, 0.3, lambda: store.heartbeat(claim, {"orders": 0})), Unavailable)
        with psycopg.connect(postgres_url, autocommit=True) as watch:
            of_this = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            until(lambda: not watch.execute(of_this).fetchall())
        other.rollback()
        store.heartbeat(claim, {"orders": 0})


@pytest.mark.servers
def test_postgres_the_application_s_statements_have_no_deadline(postgres_url: str) -> None:
    with opened(postgres_url) as store:
        transaction = store.transaction(store.claim("w1", ["orders"], timeout=1))
        transaction.begin()
        assert transaction.connection.within is None
        slow = "SELECT 1 FROM pg_sleep(0.5)"
        assert hurried(store, 0.1, lambda: transaction.execute(slow)) == [(1,)]
        transaction.commit()


@pytest.mark.servers
def test_postgres_no_answer_to_commit(postgres_url: str) -> None:
    with FaultyLink.in_thread(postgres_url) as link, opened(link.url) as store:
        claim = store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        (token,) = store.reserve("orders", 1)
        transaction.begin()
        transaction.insert("orders", [(token, [[1]], [b"[1]"])])
        link.cut_when(b"COMMIT")
        with pytest.raises(CommitUnknown) as caught:
            transaction.commit()
        assert caught.value.marker == transaction.marker
        transaction.rollback()  # does no harm
        while (left := store.outcome(claim, caught.value.marker, [("orders", token)])) is None:
            time.sleep(0.01)
        assert left in ({("orders", token): [b"[1]"]}, {})
