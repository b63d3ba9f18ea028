"""Only busrep's errors leave a store, whatever it is asked and whatever becomes of its file; and the driver's own for
the caller's own statement."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from busrep.core.catchup import FetchUpdates
from busrep.errors import BusrepError, CommitUnknown, ConfigError, StatementRefused, Unavailable, WriterFenced
from busrep.stores import open_store
from busrep.stores.blocking import BlockingStore, open_blocking_store
from busrep.stores.sqlite.base import WRITE, Holder
from busrep.streams import Registry
from tests.asyncio.test_bus import Deployment, deployment, run
from tests.shop import STREAMS

__all__ = ["deployment"]  # fixtures

TOO_LARGE = 2**63
NAMES = ["w\0", "\ud800"]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


async def done(result: Any) -> Any:
    """What a store of either runtime answers."""
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(params=["asyncio", "threads"])
def opened(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    make: Callable[..., Any] = open_store if request.param == "asyncio" else open_blocking_store

    @asynccontextmanager
    async def open_one(url: str) -> AsyncIterator[Any]:
        store = make(url, Registry(STREAMS))
        await done(store.init())
        await done(store.open())
        try:
            yield store
        finally:
            await done(store.close())

    return open_one


def questions(store: Any, claim: Any, epoch: str) -> dict[str, Callable[[], Any]]:
    """Every operation that takes a caller's, or a peer's, value, with one that the database may not take."""
    made: dict[str, Callable[[], Any]] = {}
    for bad in NAMES:
        key = ("orders", bad)
        made |= {
            f"claim {bad!r}": lambda bad=bad: store.claim(bad, ["orders"], timeout=1),
            f"finish {bad!r}": lambda bad=bad: store.finish(bad, 1, timeout=1),
            f"load {bad!r}": lambda bad=bad: store.load_reader(bad),
            f"register {bad!r}": lambda key=key: store.register_reader("r", {key: 1}, epoch),
            f"reset {bad!r}": lambda key=key: store.reset_reader("r", {key: 1}, epoch),
            f"stopped {bad!r}": lambda bad=bad: store.note_stopped("r", "orders", bad, "why"),
            f"dead {bad!r}": lambda bad=bad: store.dead_letter("r", "orders", bad, [1], [b"[1]"], "why"),
            f"dead for {bad!r}": lambda bad=bad: store.dead_letter("r", "orders", "w", [1], [b"[1]"], bad),
            f"fetch {bad!r}": lambda bad=bad: store.fetch(FetchUpdates("orders", bad, 0, 5, 10)),
        }
    for bad_ in (TOO_LARGE, -TOO_LARGE - 1, 2**200):
        made |= {
            f"finish {bad_}": lambda bad=bad_: store.finish("w", bad, timeout=1),
            f"register {bad_}": lambda bad=bad_: store.register_reader("r", {("orders", "w"): bad}, epoch),
            f"reset {bad_}": lambda bad=bad_: store.reset_reader("r", {("orders", "w"): bad}, epoch),
            f"letters {bad_}": lambda bad=bad_: store.dead_letters(bad),
            f"prune {bad_}": lambda bad=bad_: store.prune(keep=bad),
            f"prune older {bad_}": lambda bad=bad_: store.prune(older_than=bad),
            f"fetch {bad_}": lambda bad=bad_: store.fetch(FetchUpdates("orders", "w", bad, bad, 10)),
            f"fetch so many {bad_}": lambda bad=bad_: store.fetch(FetchUpdates("orders", "w", 0, 5, bad)),
            f"again {bad_}": lambda bad=bad_: store.claim("w", ["orders"], timeout=1, again=bad),
        }
    return made


def test_no_value_makes_a_driver_s_error_leave_a_store(url: str, opened: Callable[[str], Any]) -> None:
    async def main() -> None:
        async with opened(url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            refused: set[str] = set()
            asked = questions(store, claim, await done(store.epoch()))
            for what, ask in asked.items():
                try:
                    await done(ask())
                except StatementRefused:
                    refused.add(what)
                except BusrepError:
                    pass
            # Not one more than the database has to: but these it has to.
            assert {"load '\\ud800'", f"register {TOO_LARGE}", f"letters {TOO_LARGE}"} <= refused
            await done(store.check_claim(claim))

    run(main())


def test_the_caller_s_own_statement_raises_the_driver_s_error(url: str, opened: Callable[[str], Any]) -> None:
    async def main() -> None:
        mark = "?" if url.startswith("sqlite") else "%s"
        async with opened(url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            for text, params, expected in (
                ("SELECT nonsense FROM nowhere", (), (sqlite3.OperationalError, psycopg.errors.UndefinedTable)),
                ("SELECT * FROM busrep_nowhere", (), (sqlite3.OperationalError, psycopg.errors.UndefinedTable)),
                (f"SELECT {mark}", ("\ud800",), UnicodeEncodeError),
                (f"DELETE FROM busrep_facts WHERE id = {mark}", (object(),), (sqlite3.Error, psycopg.Error)),
            ):
                (token,) = await done(store.reserve("orders", 1))
                transaction = store.transaction(claim)
                await done(transaction.begin())
                await done(transaction.insert("orders", [(token, [["[1]"]], [b"[1]"])]))
                with pytest.raises(expected):
                    await done(transaction.execute(text, params))
                await done(transaction.rollback())
            # What busrep sends before it is busrep's own.
            transaction = store.transaction(claim)
            await done(transaction.begin())
            await done(transaction.insert("orders", [(token, [["[1]"]], [b"[1]"])] * 2))
            with pytest.raises(StatementRefused, match="refuses a statement"):
                await done(transaction.execute("SELECT 1"))
            await done(transaction.rollback())

    run(main())


@pytest.mark.servers
def test_an_error_of_the_application_s_at_commit_is_no_refusal(postgres_url: str, opened: Callable[[str], Any]) -> None:
    """psycopg calls handlers of notifications while it reads the answer to COMMIT."""

    def heard(_: psycopg.Notify) -> None:
        raise ValueError("a bug of the application's")

    async def main() -> None:
        async with opened(postgres_url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            (token,) = await done(store.reserve("orders", 1))
            with contextlib.closing(psycopg.connect(postgres_url, autocommit=True)) as connection:
                connection.execute("LISTEN shop")
                connection.add_notify_handler(heard)
                transaction = store.transaction(claim, connection)
                await done(transaction.begin())
                await done(transaction.insert("orders", [(token, [["[1]"]], [b"[1]"])]))
                await done(transaction.execute("NOTIFY shop"))
                # In threads a signal handler may raise in the same way: there the fact itself leaves that to the table.
                with pytest.raises(ValueError if isinstance(store, BlockingStore) else CommitUnknown):
                    await done(transaction.commit())
                asked = [("orders", token)]
                assert await done(store.outcome(claim, transaction.marker, asked)) == {asked[0]: [b"[1]"]}

    run(main())


@pytest.mark.parametrize("how", ["ours", "ours, and another", "the caller's", "the caller's, and another"])
def test_a_transaction_that_is_ended_inside_the_block(url: str, opened: Callable[[str], Any], how: str) -> None:
    """The claim is let go of with it: a row that is inserted afterwards is none that a successor waited for."""
    sqlite = url.startswith("sqlite")

    def connect() -> Any:
        return sqlite3.connect(url.removeprefix("sqlite:///")) if sqlite else psycopg.connect(url)

    async def main() -> None:
        async with opened(url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            with contextlib.closing(connect()) as callers:
                callers.execute("CREATE TABLE shop (number int)")
                callers.commit()
                (token,) = await done(store.reserve("orders", 1))
                transaction = store.transaction(claim, None if "ours" in how else callers)
                await done(transaction.begin())
                await done(transaction.execute("COMMIT"))
                if not sqlite or how != "ours":
                    with contextlib.closing(open_blocking_store(url, Registry(STREAMS))) as successor:
                        successor.open()
                        successor.claim("w", ["orders"], timeout=1)
                if how == "ours, and another":
                    await done(transaction.execute("BEGIN"))
                elif "another" in how:
                    callers.execute("INSERT INTO shop VALUES (1)")
                await done(transaction.insert("orders", [(token, [["[1]"]], [b"[1]"])]))
                with pytest.raises((CommitUnknown, WriterFenced)):
                    await done(transaction.commit())
                await done(transaction.rollback())
                assert callers.execute("SELECT * FROM busrep_facts").fetchall() == []

    run(main())


def test_a_caller_s_connection_that_is_closed_is_an_outage(url: str, opened: Callable[[str], Any]) -> None:
    async def main() -> None:
        async with opened(url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            epoch = await done(store.epoch())
            sqlite = url.startswith("sqlite")
            connection: Any = sqlite3.connect(url[len("sqlite:///") :]) if sqlite else psycopg.connect(url)
            connection.close()
            with pytest.raises(Unavailable):
                await done(store.save_reader("r", [("orders", "w", 0, 1)], epoch, connection))
            with pytest.raises(Unavailable):
                await done(store.transaction(claim, connection).begin())

    run(main())


def test_a_file_that_is_damaged_full_or_read_only(sqlite_url: str, opened: Callable[[str], Any]) -> None:
    path = sqlite_url[len("sqlite:///") :]

    async def main() -> None:
        async with opened(sqlite_url) as store:
            claim = await done(store.claim("w", ["orders"], timeout=1))
            writing = store.wrapped if hasattr(store, "wrapped") else store
            connection = writing.role(WRITE)
            connection.execute("PRAGMA query_only = 1")
            with pytest.raises(Unavailable):
                await done(store.reserve("orders", 1))
            connection.execute("PRAGMA query_only = 0")
            connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
            with pytest.raises(Unavailable, match="full"):
                await done(store.dead_letter("r", "orders", "w", [1], [b"x" * 2**20], "why"))
            connection.execute("PRAGMA max_page_count = 1000000")
            await done(store.heartbeat(claim, {}))
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with Path(path).open("r+b") as file:  # noqa: ASYNC230 - a test
            size = file.seek(0, os.SEEK_END)
            file.seek(100)
            file.write(b"\xff" * (size - 100))
        with pytest.raises(StatementRefused, match="malformed"):
            async with opened(sqlite_url):
                pass

    run(main())


def test_a_store_that_is_closed_while_a_write_waits(sqlite_url: str) -> None:
    async def main() -> None:
        store: Any = open_store(sqlite_url, Registry(STREAMS))
        await store.init()
        await store.open()
        holder = Holder()
        await store.turn.take(holder, 1)
        waiting = asyncio.ensure_future(store.reserve("orders", 1))
        while not store.turn.lock._waiters:
            await asyncio.sleep(0)
        await store.close()
        store.turn.leave(holder)
        with pytest.raises(Unavailable, match="not open"):
            await waiting

    run(main())


@pytest.mark.parametrize("bad", [-1, 2**63, "5", {"w\0": 1}])
def test_a_start_that_no_store_can_keep_is_a_config_error(deployment: Deployment, bad: Any) -> None:
    with pytest.raises(ConfigError, match="start="):
        deployment.bus(reader="r", start={"orders": bad if isinstance(bad, dict) else {"w": bad}})
