"""Corners of the SQL stores that the conformance suite does not reach: batches, lost answers, bounds of waits."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import orjson
import psycopg
import pytest

from busrep.errors import ClaimBlocked, ConfigError, RowError, SchemaError, Unavailable, WriterFenced
from busrep.stores import CommitUnknown, claims, facts, open_store
from busrep.stores.planned import PlannedStore
from busrep.stores.sqlite import base, files
from busrep.streams import Registry, Stream, Table
from tests.stores.store_conformance import read, row, sync, write

pytestmark = pytest.mark.servers


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


async def opened(url: str, *streams: Stream[Any]) -> PlannedStore:
    store = open_store(url, Registry(streams or [Stream("orders")]))
    assert isinstance(store, PlannedStore)
    await store.init()
    await store.open()
    return store


def execute(url: str, *texts: str) -> None:
    """In one transaction, from outside."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            for text in texts:
                file.execute(text)
        file.close()
    else:
        with psycopg.connect(url) as server:
            for text in texts:
                server.execute(text.encode())


@sync
async def test_pruning_goes_in_batches_of_whole_facts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[int | None, bool]] = []
    prune_batch = facts.prune_batch

    def noted(*args: Any) -> Any:
        done = yield from prune_batch(*args)
        batches.append(done)
        return done

    monkeypatch.setattr(facts, "PRUNE_BATCH", 3)
    monkeypatch.setattr(facts, "prune_batch", noted)
    store = await opened(url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    ids = await write(store, claim, 2, 3, 1, 1, 4, 1)
    await store.heartbeat(claim, {"orders": ids[-1]})
    assert await store.prune(keep=1) == {("orders", "w1"): ids[-2]}
    # Each ends with the fact that holds the fourth row, and its floor was committed with it.
    assert batches == [(ids[1], True), (ids[4], True), (None, False)]
    assert [token for token, _ in await read(store, "w1", ids[-2], ids[-1])] == ids[-1:]
    await store.close()


@sync
async def test_pruning_by_age_stops_at_the_first_young_row(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever batch that is. What is old behind it stays."""
    monkeypatch.setattr(facts, "PRUNE_BATCH", 2)
    store = await opened(url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    ids = await write(store, claim, 1, 1, 1, 1, 2, 1, 1)
    await store.heartbeat(claim, {"orders": ids[-1]})
    long_ago = "0" if url.startswith("sqlite") else "'epoch'"
    for old, kept in ((f"NOT IN ({ids[2]}, {ids[5]})", ids[2:]), (f"= {ids[2]}", ids[5:])):
        execute(url, f"UPDATE busrep_facts SET committed_at = {long_ago} WHERE id {old}")
        floor = kept[0] - 1
        assert await store.prune(older_than=3600) == {("orders", "w1"): floor}
        assert await store.prune(older_than=3600) == {}
        assert list(dict(await read(store, "w1", floor, ids[-1]))) == kept
    await store.close()


@sync
async def test_pruning_looks_at_each_old_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of SQLite's machine: as many a row, however many rows and batches there are."""
    monkeypatch.setattr(facts, "PRUNE_BATCH", 50)
    url = f"sqlite:///{tmp_path / 'busrep.db'}"
    store = await opened(url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    found, steps = [], itertools.count()
    store.role(base.WRITE).set_progress_handler(lambda: next(steps) < 0, 10)
    for rows in (500, 5000):
        first = (await store.reserve("orders", rows))[0]
        execute(
            url,
            f"WITH RECURSIVE g(at) AS (SELECT {first} UNION ALL SELECT at + 1 FROM g WHERE at < {first + rows - 1}) "
            "INSERT INTO busrep_facts SELECT 'orders', 'w1', at, 0, '[1]', 0 FROM g",
        )
        await store.heartbeat(claim, {"orders": first + rows - 1})
        before = next(steps)
        assert await store.prune(older_than=3600, keep=1) == {("orders", "w1"): first + rows - 2}
        found.append((next(steps) - before) / rows)
    assert found[1] < 1.2 * found[0]
    await store.close()


@sync
async def test_pruning_a_negative_stream_goes_in_batches(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PRUNE_BATCH", 2)
    execute(url, "CREATE TABLE history (id bigint PRIMARY KEY, writer text, what text)")
    store = await opened(url, Stream("old", negative=True, table=Table("history", columns=("what",))))
    claim = await store.claim("w1", ["old"], timeout=1)
    transaction = store.transaction(claim)
    ids = await store.reserve("old", 8)
    await transaction.begin()
    await transaction.insert("old", [(token, [["x"]], [row("x")]) for token in ids])
    await transaction.commit()
    await store.heartbeat(claim, {"old": ids[-1]})
    assert await store.prune(keep=2, stream="old") == {("old", "w1"): ids[5]}
    assert [token for token, _ in await read(store, "w1", ids[5], ids[-1], stream="old")] == ids[6:]
    await store.close()


@attrs.frozen
class Whatever:
    value: Any


@attrs.frozen
class Tags:
    value: Sequence[str] = attrs.field(converter=list)


@attrs.frozen
class Converted:
    value: list[str] = attrs.field(converter=lambda given: given)


@attrs.frozen
class Switch:
    value: bool | None
    made: int = attrs.field(init=False, default=7)  # no field of the stream


async def kept_in_sqlite(path: Path, row_type: type[Any] | None, value: Any) -> list[bytes]:
    """The payloads of a row's page, of a stream with a table of its own."""
    url = f"sqlite:///{path}"
    execute(url, "CREATE TABLE mine (id INTEGER PRIMARY KEY, writer TEXT, value)")
    stream: Stream[Any] = Stream("mine", row_type, table=Table("mine", columns=("value",)))
    store = await opened(url, stream)
    try:
        claim = await store.claim("w1", ["mine"], timeout=1)
        transaction = store.transaction(claim)
        (token,) = await store.reserve("mine", 1)
        await transaction.begin()
        await transaction.insert("mine", [(token, [value], [orjson.dumps([value])])])
        await transaction.commit()
        return [payload for _, payload in await read(store, "w1", 0, token, stream="mine")]
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("row_type", "value"),
    [
        *((kind, value) for kind in (None, Whatever) for value in (None, 1, 1.0, "[1]", "")),
        (Tags, ["red", "green"]), (Converted, []), (Switch, True), (Switch, None),
    ],
)  # fmt: skip
@sync
async def test_what_sqlite_keeps_in_an_own_table_comes_back(
    tmp_path: Path, row_type: type[Any] | None, value: Any
) -> None:
    assert await kept_in_sqlite(tmp_path / "mine.db", row_type, value) == [orjson.dumps([value])]


@pytest.mark.parametrize(
    ("row_type", "value"),
    [
        *((kind, value) for kind in (None, Whatever) for value in (True, ["x"], {"a": 1}, [])),
        (Converted, "x"), (Converted, "[1]"), (Switch, 1),
    ],
)  # fmt: skip
@sync
async def test_what_would_not_come_back_from_an_own_table_in_sqlite_is_refused(
    tmp_path: Path, row_type: type[Any] | None, value: Any
) -> None:
    with pytest.raises(RowError, match="stream 'mine', field 'value': .* would not come back"):
        await kept_in_sqlite(tmp_path / "mine.db", row_type, value)


@pytest.mark.parametrize("kind", [str | list[str], dict[str, int] | datetime, int | bool | None, float | bool], ids=str)
def test_a_field_of_which_sqlite_does_not_tell_the_type_is_refused_at_once(kind: Any) -> None:
    row_type = attrs.make_class("Either", {"value": attrs.field(type=kind)})
    with pytest.raises(ConfigError, match="stream 'mine', field 'value', which may be .*: annotate it so, or use Post"):
        open_store("sqlite:///none.db", Registry([Stream("mine", row_type, table=Table("mine"))]))


@pytest.mark.parametrize("row_type", [None, Whatever])
@sync
async def test_a_process_that_would_get_text_for_a_list_is_refused(tmp_path: Path, row_type: type[Any] | None) -> None:
    """The writer's class tells a list; on this one's annotations its text would be taken for a text."""
    listing = attrs.make_class("Listing", {"value": attrs.field(type=list[str])})
    await kept_in_sqlite(tmp_path / "mine.db", listing, ["x"])
    with pytest.raises(ConfigError, match=r"field 'value', which may be array\[str\]"):
        await opened(
            f"sqlite:///{tmp_path / 'mine.db'}", Stream("mine", row_type, table=Table("mine", columns=("value",)))
        )


@sync
async def test_9_1_a_cancelled_commit_that_fails_was_aborted_and_disturbs_nobody(url: str) -> None:
    """A deferred constraint makes COMMIT itself fail."""
    execute(url, "CREATE TABLE parent (id bigint PRIMARY KEY)")
    execute(url, "CREATE TABLE child (parent bigint REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)")
    store = await opened(url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    transaction = store.transaction(claim)
    (token,) = await store.reserve("orders", 1)
    await transaction.begin()
    if url.startswith("sqlite"):
        transaction.connection.execute("COMMIT")  # the pragma does nothing in a transaction
        transaction.connection.execute("PRAGMA foreign_keys = ON")
        transaction.connection.execute("BEGIN IMMEDIATE")
    await transaction.execute("INSERT INTO child VALUES (7)")
    await transaction.insert("orders", [(token, [[1]], [row(1)])])
    committing = asyncio.create_task(transaction.commit())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    committing.cancel()
    with pytest.raises(CommitUnknown) as unknown:
        await committing
    while (left := await store.outcome(claim, unknown.value.marker, [("orders", token)])) is None:
        await asyncio.sleep(0.005)
    assert left == {}
    assert len(await write(store, claim, 1)) == 1  # no lock is left
    await store.close()
    await store.close()


@sync
async def test_an_unopened_store_says_so(url: str, tmp_path: Path) -> None:
    store = open_store(url, Registry([Stream("orders")]))
    await store.init()
    with pytest.raises(Unavailable, match="not open"):
        await store.known()
    other = await opened(url)
    claim = await other.claim("w1", ["orders"], timeout=1)
    await other.close()
    with pytest.raises(Unavailable, match="not open"):
        await store.transaction(claim).begin()


@sync
async def test_a_claim_lost_before_its_start_was_read_is_fenced(url: str) -> None:
    store = await opened(url)
    old = await store.claim("w1", ["orders"], timeout=1)
    await store.claim("w1", ["orders"], timeout=1)
    with pytest.raises(WriterFenced):
        await store.read(claims.held_state("w1", old.incarnation, store.dialect, list(store.dialect.backings.values())))
    await store.close()


@sync
async def test_9_5_whoever_does_not_know_a_stream_finishes_its_writer_all_the_same(url: str) -> None:
    store, other = await opened(url), await opened(url, Stream("payments"))
    claim = await store.claim("w1", ["orders"], timeout=1)
    ids = await write(store, claim, 1, 1)
    assert await other.finish("w1", claim.incarnation, timeout=1) == {"orders": ids[-1]}
    await store.close()
    await other.close()


@sync
async def test_reservations_given_up_while_the_question_fails(url: str) -> None:
    store = await opened(url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    ask, asked, go = store.reservations.ask, asyncio.Event(), asyncio.Event()

    async def fails(stream: str, count: int, held: Any) -> list[int]:
        asked.set()
        await go.wait()
        raise Unavailable("the store", "gone")

    store.reservations.ask = fails
    given_up, waiting = (asyncio.create_task(store.reserve("orders", 1)) for _ in range(2))
    await asked.wait()
    given_up.cancel()
    await asyncio.wait([given_up])
    go.set()
    with pytest.raises(Unavailable):
        await waiting

    async def slow(stream: str, count: int, held: Any) -> list[int]:
        asked.set()
        await go.wait()
        return await ask(stream, count, held)

    store.reservations.ask = slow
    asked.clear()
    go.clear()
    given_up, waiting = (asyncio.create_task(store.reserve("orders", 2)) for _ in range(2))
    await asked.wait()
    given_up.cancel()
    await asyncio.wait([given_up])
    go.set()
    assert await waiting == [3, 4]  # 1 and 2 stay holes
    store.reservations.ask = ask
    assert await write(store, claim, 1) == [5]
    await store.close()


@sync
async def test_sqlite_bounds_the_wait_for_a_fact_of_this_process(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BUSY", 0.05)
    store = await opened(sqlite_url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    transaction = store.transaction(claim)
    await transaction.begin()

    async def elsewhere(work: Any) -> Any:  # the task that holds the lock is refused for another reason
        return await asyncio.create_task(work)

    with pytest.raises(Unavailable, match=r"open for more than 0\.05 s"):
        await elsewhere(store.reserve("orders", 1))
    with pytest.raises(ClaimBlocked, match="has been open"):
        await elsewhere(store.claim("w2", ["orders"], timeout=0.05))
    await transaction.rollback()
    assert await store.reserve("orders", 1) == [1]
    await store.close()


@pytest.mark.parametrize("autocommit", [True, False])
@sync
async def test_facts_on_a_synchronous_psycopg_connection(postgres_url: str, autocommit: bool) -> None:
    store = await opened(postgres_url)
    claim = await store.claim("w1", ["orders"], timeout=1)
    with psycopg.connect(postgres_url, autocommit=autocommit) as connection:
        for commit in (True, False):
            transaction = store.transaction(claim, connection)
            (token,) = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(token, [[1]], [row(1)])])
            assert await transaction.execute("SELECT id FROM busrep_facts WHERE id = %s", [token]) == [(token,)]
            assert await transaction.execute("SET LOCAL lock_timeout = 0") == []
            await (transaction.commit() if commit else transaction.rollback())
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert [token for token, _ in await read(store, "w1", 0, 2)] == [1]
    await store.close()


@sync
async def test_a_table_dropped_under_an_open_store_is_a_schema_error(url: str) -> None:
    store = await opened(url)
    execute(url, "DROP TABLE busrep_positions")
    with pytest.raises(SchemaError, match="db init"):
        await store.known()
    await store.close()
