"""The conformance suite over the three stores, and what only one or two of them can do."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import psycopg
import pytest

import busrep.stores.postgres.steps as postgres_steps
from busrep.errors import (
    ClaimBlocked,
    ConfigError,
    MissingExtra,
    PositionsAheadOfTable,
    ReaderMoved,
    RowError,
    SchemaError,
    StatementRefused,
    Unavailable,
    WriterFenced,
)
from busrep.settings import Settings
from busrep.stores import CommitUnknown, memory, open_store
from busrep.stores.interface import Appended, Unnumbered
from busrep.stores.plans import Control, Sql, only
from busrep.stores.postgres.dialect import PostgresDialect, sequence_name
from busrep.stores.postgres.store import StoreConnection
from busrep.stores.schema import VERSION
from busrep.stores.sqlite import files
from busrep.stores.sqlite.files import file_at, names_in
from busrep.streams import Registry, Stream, Table
from busrep.testing.links import FaultyLink
from busrep.testing.servers import PostgresServer
from tests import ROOT
from tests.stores.store_conformance import (
    OWN_TABLES,
    PATIENCE,
    SHORT,
    BootstrapConformance,
    Order,
    StoreConformance,
    generic,
    page,
    read,
    row,
    streams,
    sync,
    write,
)


@contextmanager
def child(url: str, writer: str, facts: int, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """store_child.py; killed with SIGKILL at the end, whatever it does."""
    command = [
        sys.executable,
        str(ROOT / "tests" / "stores" / "store_child.py"),
        url,
        writer,
        str(facts),
        *([then] if then else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def committed(process: subprocess.Popen[str], until: str = "") -> list[int]:
    """The IDs it says it committed, up to the line `until`, or its end."""
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        if line.strip() == until:
            break
        found.append(int(line.split()[1]))
    return found


class TestMemory(StoreConformance, BootstrapConformance):
    commits_at_once = True

    @pytest.fixture
    def url(self) -> str:
        return f"memory://{secrets.token_hex(6)}"

    def set_sequence(self, url: str, stream: str, value: int) -> None:
        world = memory.world_of(url.removeprefix("memory://"))
        world.ask("UPDATE busrep_sequences SET value = ? WHERE stream = ?", (value, stream))

    @sync
    async def test_facts_may_nest(self, url: str) -> None:
        await nested(self, url)

    @sync
    async def test_there_is_no_sql_and_no_connection(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            assert transaction.connection is None
            with pytest.raises(ConfigError):
                store.transaction(claim, object())
            with pytest.raises(ConfigError):
                await transaction.execute("SELECT 1")
            with pytest.raises(ConfigError):
                await store.save_reader("r", [("orders", "w1", 0, 1)], claim.epoch, object())

    @sync
    async def test_who_holds_a_store_that_is_forgotten_goes_on(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1)
            memory.forget(url.removeprefix("memory://"))
            (_, last) = await write(store, claim, 1, 1)
            assert [token for token, _ in await read(store, "w1", 0, last)] == [1, 2, 3]
            async with self.opened(url) as another:
                assert await another.epoch() != claim.epoch
                assert await another.reserve("orders", 1) == [1]

    @sync
    async def test_a_cancelled_wait_for_a_name_leaves_nothing_behind(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for wait in (
                    other.claim("w1", ["orders"], timeout=PATIENCE),
                    other.finish("w1", claim.incarnation, timeout=PATIENCE),
                ):
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(wait, SHORT)
                gc.collect()
            assert [str(one.message) for one in warned if one.category is RuntimeWarning] == []
            await transaction.rollback()
            assert (await other.claim("w1", ["orders"], timeout=1)).incarnation > claim.incarnation


async def nested(suite: StoreConformance, url: str) -> None:
    """A fact opened inside another's transaction, while a successor already waits for the claim."""
    async with suite.opened(url) as store, suite.opened(url) as other:
        claim = await store.claim("w1", ["orders"], timeout=1)
        outer = store.transaction(claim)
        (first,) = await store.reserve("orders", 1)
        await outer.begin()
        successor = asyncio.create_task(other.claim("w1", ["orders"], timeout=PATIENCE))
        await asyncio.wait([successor], timeout=SHORT)
        (second,) = await write(store, claim, 1)
        await outer.insert("orders", [(first, [[first, 0]], [row(first, 0)])])
        await outer.commit()
        assert (await successor).starts == {"orders": second}
        assert [token for token, _ in await read(store, "w1", 0, second)] == [first, second]


class SqlConformance(StoreConformance):
    """What both databases can do and memory cannot."""

    mark = "?"  # the driver's placeholder
    json_type = "text"

    def sql(self, url: str, text: str) -> list[tuple[Any, ...]]:
        """Run a statement beside the store, committed."""
        raise NotImplementedError

    def lose_sequence(self, url: str, stream: str) -> None:
        raise NotImplementedError

    def own_tables(self, url: str) -> None:
        for text in OWN_TABLES:
            self.sql(url, text.format(json=self.json_type))

    @sync
    async def test_9_11_claims_behind_a_restore_are_above_those_that_it_lost(self, url: str) -> None:
        async with self.opened(url) as store:
            ahead = time.time_ns() + 600 * 10**9
            with mock.patch("time.time_ns", return_value=ahead):  # a machine whose clock is ahead
                lost = await store.claim("w1", ["orders"], timeout=1)
            self.sql(url, "DELETE FROM busrep_writers")  # the backup is older
            await store.restored()
            assert (await store.claim("w1", ["orders"], timeout=1)).incarnation > lost.incarnation

    @sync
    async def test_9_28_a_sequence_that_is_gone_is_named(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            self.lose_sequence(url, "orders")
            with pytest.raises((ConfigError, SchemaError), match="busrep db init"):
                await store.append(claim, Appended({}, {"orders": Unnumbered(0, [row(1)])}))

    @sync
    async def test_another_schema_version_is_told(self, url: str) -> None:
        async with self.opened(url) as store:
            for version in (0, 99):
                self.sql(url, f"UPDATE busrep_meta SET value = '{version}' WHERE key = 'version'")
                late = self.make(url)
                with pytest.raises(SchemaError) as caught:
                    await late.open()
                assert (caught.value.found, caught.value.expected) == (version, VERSION)
            with pytest.raises(SchemaError):
                await store.init()  # newer: never downgraded
            self.sql(url, f"UPDATE busrep_meta SET value = '{VERSION}' WHERE key = 'version'")
            self.sql(url, "DROP TABLE busrep_positions")
            with pytest.raises(SchemaError):
                await store.known()

    @sync
    async def test_business_writes_share_the_transaction(self, url: str) -> None:
        self.sql(url, "CREATE TABLE stock (item text, left_over int)")
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            for commit in (True, False):
                transaction = store.transaction(claim)
                (token,) = await store.reserve("orders", 1)
                await transaction.begin()
                await transaction.insert("orders", [(token, [[1]], [row(1)])])
                assert (
                    await transaction.execute(f"INSERT INTO stock VALUES ({self.mark}, {self.mark})", ("nail?", 7))
                    == []
                )
                assert await transaction.execute("SELECT item, left_over FROM stock") in (
                    [("nail?", 7)],
                    [("nail?", 7)] * 2,
                )
                await (transaction.commit() if commit else transaction.rollback())
            assert self.sql(url, "SELECT * FROM stock") == [("nail?", 7)]
            assert len(await read(store, "w1", 0, 9)) == 1

    @sync
    async def test_a_failed_statement_passes_through_and_nothing_is_committed(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            with pytest.raises((sqlite3.Error, psycopg.Error)):
                await transaction.execute("SELECT nonsense FROM nowhere")
            await transaction.rollback()
            await transaction.rollback()  # once more does no harm
            await write(store, claim, 1)
            (token,) = await store.reserve("orders", 1)
            twice = store.transaction(claim)
            await twice.begin()
            await twice.insert("orders", [(token, [[1]], [row(1)])] * 2)
            with pytest.raises(StatementRefused) as caught:  # this one is busrep's own
                await twice.commit()
            assert isinstance(caught.value.reason, sqlite3.IntegrityError | psycopg.IntegrityError)
            await twice.rollback()
            assert await read(store, "w1", 1, 9) == []
            await write(store, claim, 1)

    @sync
    async def test_a_beat_writes_one_row_and_those_whose_positions_moved(self, url: str) -> None:
        """A hundred streams with nothing to do cost the database one row a beat."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders", "payments"], timeout=1)
            await store.claim("w2", ["orders"], timeout=1)
            await write(store, claim, 1, stream="payments")
            zero = "to_timestamp(0)" if url.startswith("postgres") else "0"

            def beaten() -> set[tuple[str, str]]:
                """The rows that a beat has written since this was asked last."""
                found = {
                    (stream, writer)
                    for stream, writer in self.sql(
                        url, f"SELECT stream, writer FROM busrep_positions WHERE seen_at > {zero}"
                    )
                }
                self.sql(url, f"UPDATE busrep_positions SET seen_at = {zero}")
                return found

            beaten()
            await store.heartbeat(claim, {"orders": 0, "payments": 0})
            assert beaten() == {("orders", "w1")}
            await store.heartbeat(claim, {"orders": 0, "payments": 1})
            assert beaten() == {("orders", "w1"), ("payments", "w1")}
            await store.heartbeat(claim, {"orders": 0, "payments": 1})
            assert beaten() == {("orders", "w1")}

    @sync
    async def test_9_7_a_silent_writer_counts_until_it_is_finished(self, url: str) -> None:
        async with self.opened(url) as store:
            silent = await store.claim("w2", ["orders"], timeout=1)
            claim = await store.claim("w1", ["orders"], timeout=1)
            long_ago = "to_timestamp(0)" if url.startswith("postgres") else "0"
            self.sql(url, f"UPDATE busrep_positions SET seen_at = {long_ago} WHERE writer = 'w2'")
            assert await store.heartbeat(claim, {"orders": 0}) == {"orders": {"w1": 0, "w2": 0}}
            assert await store.finish("w2", silent.incarnation, timeout=1) == {"orders": 0}
            assert await store.heartbeat(claim, {"orders": 0}) == {"orders": {"w1": 0}}

    @sync
    async def test_9_5_rows_above_the_sequence_count_in_the_final_position(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            self.set_sequence(url, "orders", 1)
            assert await store.finish("w1", claim.incarnation, timeout=1) == {"orders": 3}

    @sync
    async def test_9_9_a_replica_proves_only_what_its_positions_row_says(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with self.opened(url) as store, self.opened(url) as replica:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1, 1)
            await store.heartbeat(claim, {"orders": 2})
            monkeypatch.setattr(replica.dialect, "replica", "1 = 1")  # type: ignore[attr-defined]
            found = await page(replica, 0, 4)
            assert (found.upto, list(found.tokens), found.limited) == (2, [1, 2], False)
            found = await page(replica, 3, 4)  # beyond what is proven: nothing, and no step back
            assert (found.upto, list(found.tokens), found.limited) == (3, [], False)
            assert (await page(store, 0, 4)).upto == 4
            await store.heartbeat(claim, {"orders": 4})
            assert (await page(replica, 0, 4)).upto == 4
            limited = await page(replica, 0, 4, 3)
            assert (limited.upto, limited.limited) == (3, True)

    # --- the application's own tables

    @sync
    async def test_rows_in_an_own_table_come_back_as_they_were_written(self, url: str) -> None:
        self.own_tables(url)
        stream: Stream[Order] = streams()["own"]
        rows = [
            Order("a?%s'\\", 1.5, True, ["x", "y"], None),
            Order("\N{SNOWMAN}", 0.1 + 0.2, False, [], "n"),
            Order("", -3.0, True, ['"'], ""),
        ]
        payloads = [stream.encode(each) for each in rows]
        async with self.opened(url, streams()) as store:
            claim = await store.claim("w1", ["own"], timeout=1)
            transaction = store.transaction(claim)
            ids = await store.reserve("own", 3)
            await transaction.begin()
            await transaction.insert(
                "own", [(ids[0], rows, payloads), (ids[1], rows[:1], payloads[:1]), (ids[2], [], [])]
            )
            await transaction.commit()
            expected = [*((1, payload) for payload in payloads), (2, payloads[0])]
            for limit in (1, 2, 3, 4, 9):
                assert await read(store, "w1", 0, 3, limit=limit, stream="own") == expected
            assert self.sql(url, "SELECT customer FROM shop_orders WHERE fact_id = 2") == [("a?%s'\\",)]
            left = await store.outcome(claim, transaction.marker, [("own", 1), ("own", 2), ("own", 3)])
            assert left == {("own", 1): payloads, ("own", 2): payloads[:1]}
            assert (await store.claim("w1", ["own"], timeout=1)).starts == {"own": 2}
            await store.heartbeat(await store.claim("w1", ["own"], timeout=1), {"own": 3})
            assert await store.prune(keep=0) == {}  # the application's rows are not ours to delete unasked
            with pytest.raises(ConfigError):
                await store.prune(older_than=0, stream="own")
            assert await store.prune(keep=1, stream="own") == {("own", "w1"): 1}
            assert (await store.status())["streams"]["own"]["rows"] == 1
            bad = store.transaction(await store.claim("w1", ["own"], timeout=1))
            await bad.begin()
            with pytest.raises(RowError):
                await bad.insert("own", [(4, [[1]], [b"[1]"])])
            await bad.rollback()

    @sync
    async def test_G2_and_G13_own_rows_from_before_repair_the_sequence(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.own_tables(url)
        for token in (1, 7, 26):
            self.sql(url, f"INSERT INTO shop_orders VALUES ({token}, 'w1', 0, 'c', 1.0, {self.true}, '[]', NULL)")
        async with self.opened(url, streams()) as store:
            with caplog.at_level(logging.WARNING, "busrep.stores"):
                claim = await store.claim("w1", ["own"], timeout=1)
            assert "behind its table at 26" in caplog.text
            assert (claim.starts, claim.highest) == ({"own": 26}, {"own": 26})
            assert await store.reserve("own", 1) == [27]
            caplog.clear()
            await store.claim("w1", ["own"], timeout=1)
            assert not caplog.text

    true = "TRUE"

    @sync
    async def test_G17_and_G18_negative_streams_are_positive_inside(self, url: str) -> None:
        self.own_tables(url)
        async with self.opened(url, streams()) as store:
            first = await store.claim("a", ["backfill"], timeout=1)
            assert await store.reserve("backfill", 1) == [1]
            second = await store.claim("b", ["backfill"], timeout=1)
            await store.reserve("backfill", 9)
            for claim, token in ((first, 1), (second, 8), (second, 10)):
                transaction = store.transaction(claim)
                await transaction.begin()
                await transaction.insert("backfill", [(token, [["x"]], [row("x")])])
                await transaction.commit()
            assert sorted(self.sql(url, "SELECT id FROM history")) == [(-10,), (-8,), (-1,)]
            await store.heartbeat(first, {"backfill": 1})
            again = await store.claim("b", ["backfill"], timeout=1)
            assert again.starts == {"backfill": 10}
            assert again.highest == {"backfill": 10}
            assert await store.reserve("backfill", 1) == [11]
            for limit in (1, 5):
                found = await read(store, "b", 0, 10, stream="backfill", limit=limit)
                assert [token for token, _ in found] == [8, 10]
            assert await read(store, "b", 8, 10, stream="backfill") == [(10, row("x"))]
            assert await store.outcome(again, None, [("backfill", 8), ("backfill", 9)]) == {("backfill", 8): [row("x")]}
            await store.heartbeat(again, {"backfill": 10})
            assert await store.prune(keep=1, stream="backfill") == {("backfill", "b"): 8}

    @sync
    async def test_an_own_table_that_is_missing_is_named(self, url: str) -> None:
        async with self.opened(url, streams()) as store:
            with pytest.raises(ConfigError, match="shop_orders"):
                await store.claim("w1", ["own"], timeout=1)

    @sync
    async def test_9_15_a_sequence_behind_the_table_is_repaired(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            self.set_sequence(url, "orders", 1)
            await store.claim("w2", ["orders"], timeout=1)
            assert "repaired" in caplog.text
            assert await store.reserve("orders", 1) == [4]

    @sync
    async def test_G12_a_jumped_sequence_proves_nothing(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            self.set_sequence(url, "orders", 35)  # what PostgreSQL does in a crash
            again = await store.claim("w1", ["orders"], timeout=1)
            assert (again.starts, again.highest, again.known["orders"]["w1"]) == ({"orders": 3}, {"orders": 3}, 3)
            assert await store.reserve("orders", 1) == [36]

    @sync
    async def test_a_database_set_back_to_an_older_state(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            await store.heartbeat(claim, {"orders": 3})
            self.sql(url, "DELETE FROM busrep_facts WHERE id > 1")
            self.set_sequence(url, "orders", 1)
            for writer in ("w1", "w2"):
                with pytest.raises(ClaimBlocked if writer == "" else Exception) as caught:
                    await store.claim(writer, ["orders"], timeout=1)
                assert type(caught.value).__name__ == "PositionsAheadOfTable"
            epoch = await store.restored()
            again = await store.claim("w1", ["orders"], timeout=1)
            assert (again.starts, again.epoch) == ({"orders": 1}, epoch)
            assert await store.reserve("orders", 1) == [2]

    # --- processes

    def test_9_5_a_writer_killed_between_commit_and_publish(self, url: str) -> None:
        asyncio.run(self.make(url).init())
        with child(url, "w1", 5, "hang") as process:
            written = committed(process, until="hang")
            process.kill()
            process.wait()
        assert written == [1, 2, 4, 5]

        @sync
        async def others() -> None:
            async with self.opened(url) as store:
                (dead,) = await store.known()
                assert dead.position == 0
                assert await store.finish("w1", dead.incarnation, timeout=PATIENCE) == {"orders": 5}
                assert [token for token, _ in await read(store, "w1", 0, 5)] == written
                assert (await store.claim("w1", ["orders"], timeout=PATIENCE)).starts == {"orders": 5}

        others()

    def test_9_4_a_transaction_of_a_killed_process_does_not_hold_the_name_for_ever(self, url: str) -> None:
        asyncio.run(self.make(url).init())

        @sync
        async def claim() -> None:
            async with self.opened(url) as store:
                with pytest.raises(ClaimBlocked):
                    await store.claim("w1", ["orders"], timeout=SHORT)
                process.kill()
                process.wait()
                assert (await store.claim("w1", ["orders"], timeout=PATIENCE)).starts == {"orders": 1}

        with child(url, "w1", 1, "hold") as process:
            assert committed(process, until="hold") == [1]
            claim()

    def test_processes_race_on_one_sequence(self, url: str) -> None:
        asyncio.run(self.make(url).init())
        with child(url, "w1", 20) as one, child(url, "w2", 20) as two:
            written = {"w1": committed(one), "w2": committed(two)}
            assert one.wait() == two.wait() == 0

        @sync
        async def compare() -> None:
            async with self.opened(url) as store:
                for writer, ids in written.items():
                    assert len(ids) == 14
                    assert [token for token, _ in await read(store, writer, 0, 40)] == ids

        compare()
        assert not set(written["w1"]) & set(written["w2"])


class TestSqlite(SqlConformance, BootstrapConformance):
    @pytest.fixture
    def url(self, sqlite_url: str) -> str:
        return sqlite_url

    def connect(self, url: str, **options: Any) -> sqlite3.Connection:
        return sqlite3.connect(url.removeprefix("sqlite:///"), **options)

    def sql(self, url: str, text: str) -> list[tuple[Any, ...]]:
        with closing(self.connect(url)) as connection, connection:
            return connection.execute(text).fetchall()

    def lose_sequence(self, url: str, stream: str) -> None:
        self.sql(url, f"DELETE FROM busrep_sequences WHERE stream = '{stream}'")

    def set_sequence(self, url: str, stream: str, value: int) -> None:
        self.sql(url, f"UPDATE busrep_sequences SET value = {value} WHERE stream = '{stream}'")

    @sync
    async def test_a_fact_that_cannot_begin_leaves_the_file_to_others(self, url: str) -> None:
        """BEGIN has the write lock already when what comes behind it fails."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            self.sql(url, "ALTER TABLE busrep_writers RENAME TO elsewhere")
            for _ in range(2):
                with pytest.raises(SchemaError):
                    await store.transaction(claim).begin()
            self.sql(url, "ALTER TABLE elsewhere RENAME TO busrep_writers")
            await write(store, claim, 1)

    @pytest.mark.parametrize("linked", [False, True], ids=["file", "link"])
    @pytest.mark.parametrize("suffix", ["", "-wal"])
    @sync
    async def test_nothing_is_written_to_a_file_that_is_gone(self, url: str, suffix: str, linked: bool) -> None:
        """No other process, and no later one, would see it: the fact would be published, and lost."""
        opened = f"{url}-link" if linked else url
        if linked:
            os.symlink(url.removeprefix("sqlite:///"), opened.removeprefix("sqlite:///"))
        async with self.opened(opened) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1)
            os.unlink(url.removeprefix("sqlite:///") + suffix)
            transaction = store.transaction(claim)
            for call in (store.reserve("orders", 1), transaction.begin(), store.heartbeat(claim, {})):
                with pytest.raises(Unavailable, match=f"{suffix or '.db'}.* was moved away, deleted or replaced"):
                    await call

    @pytest.mark.parametrize("change", ["deleted", "replaced"])
    @sync
    async def test_a_log_is_not_asked_after_while_its_folder_is_as_it_was(
        self, url: str, change: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Linux makes each write to a file dearer that was asked for its times since the last one."""
        path = url.removeprefix("sqlite:///")
        log, folder, asked = f"{path}-wal", Path(path).parent, list[str]()
        probe = folder / "elsewhere" / "probe"
        probe.parent.mkdir()
        monkeypatch.setattr(files, "COARSEST", 0.0)  # as if the folder had been left alone for long
        monkeypatch.setattr(files, "file_at", lambda of: asked.append(of) or file_at(of))
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1)
            asked.clear()
            await write(store, claim, 1)
            assert set(asked) == {path}
            # What the clock of the file system cannot tell apart is left to COARSEST.
            while probe.write_text("") or probe.stat().st_ctime_ns <= folder.stat().st_ctime_ns:
                probe.unlink()
            if change == "replaced":
                shutil.copy(log, f"{log}.copy")
                os.replace(f"{log}.copy", log)
            else:
                os.unlink(log)
            for _ in range(2):
                with pytest.raises(Unavailable, match="-wal was moved away, deleted or replaced"):
                    await store.reserve("orders", 1)

    def test_what_was_changed_just_now_may_be_changed_once_more_at_the_same_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The times of some file systems are in whole seconds."""
        assert names_in(str(tmp_path)) is None
        assert names_in(str(tmp_path / "none")) is None
        now = time.time() + files.COARSEST + 1
        monkeypatch.setattr(time, "time", lambda: now)
        assert names_in(str(tmp_path)) is not None

    @sync
    async def test_a_file_in_another_journal_mode_is_no_reason_to_refuse(self, url: str) -> None:
        async with self.opened(url):
            pass
        self.sql(url, "PRAGMA journal_mode = DELETE")
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1)
            await write(store, claim, 1)

    @sync
    async def test_a_fact_inside_a_fact_is_refused_at_once(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            with pytest.raises(ConfigError, match="one write lock"):
                store.transaction(claim)
            for call in (
                store.reserve("orders", 1),
                store.heartbeat(claim, {}),
                store.register_reader("r", {("orders", "w1"): 0}, claim.epoch),
            ):
                with pytest.raises(ConfigError, match="one write lock"):
                    await call
            await transaction.rollback()
            await write(store, claim, 1)

    @sync
    async def test_cancelled_while_it_begins(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            with closing(self.connect(url, isolation_level=None)) as blocker:
                blocker.execute("BEGIN IMMEDIATE")
                task = asyncio.create_task(store.transaction(claim).begin())
                await asyncio.sleep(SHORT)
                task.cancel()
                await asyncio.sleep(0)
                blocker.execute("ROLLBACK")
                with pytest.raises(asyncio.CancelledError):
                    await task
            await write(store, claim, 1)

    @pytest.mark.parametrize("options", [{}, {"isolation_level": None}], ids=["legacy", "autocommit"])
    @sync
    async def test_facts_on_the_callers_connection(self, url: str, options: dict[str, Any]) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            with closing(self.connect(url, **options)) as connection:
                connection.row_factory = sqlite3.Row
                connection.execute("CREATE TABLE stock (item text)")
                for commit in (True, False):
                    (token,) = await store.reserve("orders", 1)
                    transaction = store.transaction(claim, connection)
                    await transaction.begin()
                    assert connection.in_transaction
                    assert transaction.connection is connection
                    assert not transaction.joined
                    connection.execute("INSERT INTO stock VALUES ('nail')")
                    assert await transaction.execute("SELECT item FROM stock") == [("nail",)] * (1 if commit else 2)
                    await transaction.insert("orders", [(token, [[1]], [row(1)])])
                    assert await store.outcome(claim, transaction.marker, [("orders", token)]) is None
                    await (transaction.commit() if commit else transaction.rollback())
                    assert not connection.in_transaction
                assert self.sql(url, "SELECT * FROM stock") == [("nail",)]
                assert [token for token, _ in await read(store, "w1", 0, 9)] == [1]
                connection.execute("BEGIN")
                with pytest.raises(ConfigError, match="reserved before"):
                    store.transaction(claim, connection)
                connection.rollback()
                await store.claim("w1", ["orders"], timeout=1)
                with pytest.raises(WriterFenced):
                    await store.transaction(claim, connection).begin()
                assert not connection.in_transaction
            with pytest.raises(ConfigError):
                store.transaction(claim, object())

    @sync
    async def test_9_12_saved_in_the_callers_transaction(self, url: str) -> None:
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            await store.register_reader("r", {("orders", "w1"): 0}, epoch)
            with closing(self.connect(url)) as connection:
                for end in (connection.rollback, connection.commit):
                    connection.execute("BEGIN IMMEDIATE")
                    await store.save_reader("r", [("orders", "w1", 0, 4)], epoch, connection)
                    await store.dead_letter("r", "orders", "w1", [4], [b"1"], "no", connection)
                    assert connection.in_transaction
                    end()
                with pytest.raises(ReaderMoved):
                    await store.save_reader("r", [("orders", "w1", 0, 4)], epoch, connection)
                with pytest.raises(ConfigError):
                    await store.save_reader("r", [("orders", "w1", 0, 4)], epoch, object())
                connection.text_factory = bytes  # the answer would name no stream that was asked for
                with pytest.raises(ConfigError, match="text_factory"):
                    await store.save_reader("r", [("orders", "w1", 4, 5)], epoch, connection)
                connection.text_factory = lambda text: text.decode(errors="replace")
                await store.save_reader("r", [("orders", "w1", 4, 5)], epoch, connection)
                connection.rollback()
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 4}
            assert len(await store.dead_letters(9)) == 1

    @sync
    async def test_what_cannot_be_opened_is_told(self, url: str, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("no database" * 100)
        with pytest.raises(ConfigError, match="not an SQLite database"):
            await self.make(f"sqlite:///{tmp_path}/text").open()
        with pytest.raises(Unavailable):
            await self.make(f"sqlite:///{tmp_path}/no/such/directory.db").init()
        with pytest.raises(Unavailable, match="not open"):
            await self.make(url).epoch()
        assert not Path(url.removeprefix("sqlite:///")).exists()  # noqa: ASYNC240

    def test_relative_and_absolute_paths(self) -> None:
        assert open_store("sqlite:///a%20b.db", generic()).path == "a b.db"  # type: ignore[attr-defined]
        assert open_store("sqlite:////x/a.db", generic()).path == "/x/a.db"  # type: ignore[attr-defined]


class Cutter:
    """A TCP link to a server that, once `armed`, passes on the client's COMMIT and then answers nothing more."""

    def __init__(self, url: str) -> None:
        self.url, self.armed = url, False
        self._ends: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Cutter:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for end in self._ends.values():
            end.close()
        await asyncio.gather(*self._ends)

    @property
    def through(self) -> str:
        parts = urlsplit(self.url)
        port = self.server.sockets[0].getsockname()[1]
        return parts._replace(netloc=parts.netloc.rpartition("@")[0] + f"@127.0.0.1:{port}").geturl()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._ends[task] = writer
        parts = urlsplit(self.url)
        upstream, downstream = await asyncio.open_connection(parts.hostname, parts.port)
        deaf = asyncio.Event()

        async def answers() -> None:
            while (data := await upstream.read(65536)) and not deaf.is_set():
                writer.write(data)
            writer.close()

        answering = asyncio.create_task(answers())
        try:
            while data := await reader.read(65536):
                if self.armed and b"COMMIT" in data:
                    self.armed = False
                    deaf.set()
                downstream.write(data)
        except ConnectionError:
            pass
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            for end in (writer, downstream):
                end.close()
                with suppress(ConnectionError):
                    await end.wait_closed()


@pytest.mark.servers
class TestPostgres(SqlConformance, BootstrapConformance):
    has_clock = True
    mark = "%s"
    json_type = "jsonb"
    WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    async def until_it_waits(
        self, url: str, task: asyncio.Task[Any], *, beside: int = 0, question: str = WAITING
    ) -> None:
        """Until the task waits for a lock, beside so many that do, or has ended. ``question``: how many do."""
        while self.sql(url, question)[0][0] <= beside and not task.done():
            await asyncio.sleep(0.01)

    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    def sql(self, url: str, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def lose_sequence(self, url: str, stream: str) -> None:
        self.sql(url, f"DROP SEQUENCE {sequence_name(stream)}")

    def set_sequence(self, url: str, stream: str, value: int) -> None:
        self.sql(url, f"SELECT setval('{sequence_name(stream)}', {value})")

    @sync
    async def test_9_17_positions_are_saved_below_a_sequence_that_was_set_and_gave_no_id_since(self, url: str) -> None:
        """pg_sequence_last_value() gives NULL then, as for one that has given no ID at all."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 3)
            await store.register_reader("r", {("orders", "w1"): 0, ("orders", "w2"): 0}, claim.epoch)
            self.sql(url, f"ALTER SEQUENCE {sequence_name('orders')} RESTART WITH 1000")
            await store.save_reader("r", [("orders", "w2", 0, 3), ("orders", "w1", 0, 2)], claim.epoch)
            with pytest.raises(ReaderMoved):
                await store.save_reader("r", [("orders", "w1", 0, 3)], claim.epoch)
            with pytest.raises(PositionsAheadOfTable) as caught:
                await store.save_reader("r", [("orders", "w1", 2, 1000)], claim.epoch)
            assert caught.value.highest == 999
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 2, ("orders", "w2"): 3}

    @sync
    async def test_9_17_a_save_that_is_tried_again_is_compared_again(self, url: str) -> None:
        """Behind a pooler the server may be restored under a session."""
        tries: list[str] = []

        def save(self_: PostgresDialect, reader: str, epoch: str, moved: str, count: int) -> Sql:
            tries.append(moved)
            if len(tries) == 2:
                self.set_sequence(url, "orders", 2)
                self.sql(url, "UPDATE busrep_readers SET position = 0")
            return plain(self_, reader, epoch, moved, count)

        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await store.reserve("orders", 3)
            await store.register_reader("r", {("orders", "w1"): 1}, claim.epoch)
            plain = PostgresDialect.save
            with mock.patch.object(PostgresDialect, "save", save), pytest.raises(PositionsAheadOfTable):
                await store.save_reader("r", [("orders", "w1", 0, 3)], claim.epoch)
            assert len(tries) == 2
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 0}

    @sync
    async def test_9_1_several_transactions_are_asked_after_at_once(self, url: str) -> None:
        """One is open, one committed, one rolled back, and of one the server knows nothing."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            made = []
            for number in range(3):
                (token,) = await store.reserve("orders", 1)
                transaction = store.transaction(claim)
                await transaction.begin()
                await transaction.insert("orders", [(token, [[number]], [row(number)])])
                made.append((transaction, [("orders", token)]))
            markers = [transaction.marker for transaction, _ in made]
            await made[1][0].commit()
            await made[2][0].rollback()
            given, sizes = store.outcomes.ask, []  # type: ignore[attr-defined]

            async def counted(claim: Any, asked: Any) -> Any:
                sizes.append(len(asked))
                return await given(claim, asked)

            store.outcomes.ask = counted  # type: ignore[attr-defined]
            asking = [store.outcome(claim, marker, facts) for marker, (_, facts) in zip(markers, made, strict=True)]
            assert await asyncio.gather(*asking) == [None, {made[1][1][0]: [row(1)]}, {}]
            assert sizes == [3]
            unknown, facts = str(2**62 + 1_000), made[1][1]
            found = await asyncio.gather(*(store.outcome(claim, one, facts) for one in (*markers[:2], unknown)))
            assert found == [None, {facts[0]: [row(1)]}, {}], "it is gone: what is there is somebody else's"
            await made[0][0].rollback()
            assert await store.finish("w1", claim.incarnation, timeout=1)
            with pytest.raises(WriterFenced):
                await store.outcome(claim, markers[1], facts)

    @sync
    async def test_9_4_facts_may_nest_while_a_successor_waits(self, url: str) -> None:
        await nested(self, url)

    @pytest.mark.parametrize(
        "change", ["CACHE 10", "CYCLE", "INCREMENT 2"], ids=["9_15_cache", "9_15_cycle", "9_15_increment"]
    )
    @sync
    async def test_9_15_the_sequence_is_verified(self, url: str, change: str) -> None:
        async with self.opened(url) as store:
            self.sql(url, f"ALTER SEQUENCE busrep_seq_orders {change}")
            with pytest.raises(ConfigError, match=change.split()[0]):
                await store.claim("w1", ["orders"], timeout=1)
            assert await store.known() == []

    @sync
    async def test_9_15_a_server_crash_lets_ids_jump_and_never_go_back(
        self, url: str, postgres_server: PostgresServer
    ) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1, 1)
            postgres_server.kill()
            postgres_server.start()
            found = None
            while found is None:
                try:
                    found = await store.claim("w1", ["orders"], timeout=1)
                except Unavailable:
                    await asyncio.sleep(0.02)
            assert (found.starts, found.highest) == ({"orders": 3}, {"orders": 3})
            assert (await store.reserve("orders", 1))[0] > 3
            await write(store, found, 1)

    def test_sequence_names(self) -> None:
        assert sequence_name("orders") == "busrep_seq_orders"
        odd = [sequence_name(name) for name in ("Orders", "or-ders", "or.ders", "x" * 90, "x" * 91, 'a"b', "ä")]
        assert len(set(odd)) == len(odd)
        assert all(len(name) <= 63 for name in odd)

    @sync
    async def test_streams_of_any_name(self, url: str) -> None:
        registry = Registry([Stream("we\"ird'?%s-\N{SNOWMAN}")])
        (stream,) = (each.name for each in registry)
        async with self.opened(url, registry) as store:
            claim = await store.claim("w'?%s", [stream], timeout=1)
            await write(store, claim, 1, stream=stream)
            assert len(await read(store, "w'?%s", 0, 1, stream=stream)) == 1
            await store.claim("w'?%s", [stream], timeout=1)

    @sync
    async def test_9_4_who_begins_while_a_successor_waits_holds_it_up(self, url: str) -> None:
        """It does not share the name, for the successor is before it: it locks the row, which the successor changes."""
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = '{}'".format
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            first = store.transaction(claim)
            await first.begin()
            successor = asyncio.create_task(other.claim("w1", ["orders"], timeout=PATIENCE))
            await self.until_it_waits(url, successor, question=waits("advisory"))
            second = store.transaction(claim)
            (id,) = await store.reserve("orders", 1)
            await second.begin()
            await second.insert("orders", [(id, [[id, 0]], [row(id, 0)])])
            await first.commit()
            await self.until_it_waits(url, successor, question=waits("transactionid"))
            assert not successor.done()
            await second.commit()
            assert (await successor).starts == {"orders": id}

    @sync
    async def test_9_5_finish_waits_for_an_open_fact(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            finishing = asyncio.create_task(other.finish("w1", claim.incarnation, timeout=PATIENCE))
            await self.until_it_waits(url, finishing)
            assert not finishing.done()
            (id,) = await store.reserve("orders", 1)
            await transaction.insert("orders", [(id, [[id, 0]], [row(id, 0)])])
            await transaction.commit()
            assert await finishing == {"orders": id}

    @sync
    async def test_9_5_a_late_finish_waits_for_no_fact_of_a_successor(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            before = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(await store.claim("w1", ["orders"], timeout=1))
            await transaction.begin()
            assert await other.finish("w1", before.incarnation, timeout=SHORT) == {}
            await transaction.rollback()

    @sync
    async def test_9_5_a_name_is_won_back_beside_who_finishes_it(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both wait for an open fact, in the same order of locks: else neither could go on. Beats go on meanwhile."""
        execute: Callable[..., Any] = postgres_steps.execute_steps

        async def in_turn(connection: Any, steps: Any) -> Any:
            """Who wins the name waits before it does: else its finisher may find it won between two transactions."""
            if asyncio.current_task() is winning and any("INTO busrep_writers" in str(step) for step in steps):
                await asyncio.wait({finishing})
            return await execute(connection, steps)

        async with self.opened(url) as store, self.opened(url) as reader, self.opened(url) as winner:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            finishing = asyncio.create_task(reader.finish("w1", claim.incarnation, timeout=PATIENCE))
            await self.until_it_waits(url, finishing)
            winning = asyncio.create_task(winner.claim("w1", ["orders"], timeout=PATIENCE, again=claim.incarnation))
            monkeypatch.setattr(postgres_steps, "execute_steps", in_turn)
            await self.until_it_waits(url, winning, beside=1)
            await store.heartbeat(claim, claim.starts)
            assert not finishing.done()
            assert not winning.done()
            await transaction.commit()
            assert await finishing == {"orders": 0}
            assert (await winning).incarnation > claim.incarnation

    @sync
    async def test_9_5_a_name_is_not_won_back_from_who_claims_it_meanwhile(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other, self.opened(url) as winner:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            claiming = asyncio.create_task(other.claim("w1", ["orders"], timeout=PATIENCE))
            await self.until_it_waits(url, claiming)
            winning = asyncio.create_task(winner.claim("w1", ["orders"], timeout=PATIENCE, again=claim.incarnation))
            await self.until_it_waits(url, winning, beside=1)
            await transaction.commit()
            assert (await claiming).incarnation > claim.incarnation
            with pytest.raises(WriterFenced):
                await winning

    @sync
    async def test_9_4_a_restore_waits_for_open_facts(self, url: str) -> None:
        """And takes one lock for all names: a server has room for so many."""
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND classid = 'busrep_meta'::regclass"
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            (id,) = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(id, [[id, 0]], [row(id, 0)])])
            restoring = asyncio.create_task(other.restored())
            await self.until_it_waits(url, restoring, question=waiting)
            assert not restoring.done()
            await transaction.commit()
            await restoring
            assert [one.position for one in await store.known() if one.stream == "orders"] == [id]

    @sync
    async def test_9_4_the_blocker_is_named(self, url: str) -> None:
        async with self.opened(f"{url}?application_name=old-web") as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            bystander = await other.claim("w2", ["orders"], timeout=1)
            standing = other.transaction(bystander)
            await standing.begin()
            for count in (1, 2):
                held = [store.transaction(claim) for _ in range(count)]
                for transaction in held:
                    await transaction.begin()
                with pytest.raises(ClaimBlocked) as caught:
                    await other.claim("w1", ["orders"], timeout=SHORT)
                assert len(caught.value.blockers) == count
                assert all("old-web, idle in transaction" in blocker for blocker in caught.value.blockers)
                for transaction in held:
                    await transaction.rollback()
            callers = [await psycopg.AsyncConnection.connect(f"{url}?application_name=old-web") for _ in range(2)]
            for caller in callers:  # who has one snapshot for all locks the row: two are a multixact
                await caller.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
                await caller.execute("SELECT 1")
                await store.transaction(claim, caller).begin()
            with pytest.raises(ClaimBlocked) as caught:
                await other.claim("w1", ["orders"], timeout=SHORT)
            assert len(caught.value.blockers) == 2
            for caller in callers:
                await caller.rollback()  # while one is there, who comes next stands in a multixact with it
                await caller.close()
            with psycopg.connect(f"{url}?application_name=old-web") as alone:  # as who comes while somebody waits
                alone.execute("SELECT 1 FROM busrep_writers WHERE writer = 'w1' FOR SHARE")
                with pytest.raises(ClaimBlocked, match="old-web, idle in transaction"):
                    await other.claim("w1", ["orders"], timeout=SHORT)
            await standing.rollback()

    @sync
    async def test_9_4_the_blockers_of_a_restore_are_named(self, url: str) -> None:
        """Of rows that several lock, beside one that is locked alone."""
        async with self.opened(url) as store:
            for name in ("w1", "w2"):
                await store.claim(name, ["orders"], timeout=1)
            with ExitStack() as stack:
                names = ("several", "several", "alone", "elsewhere")
                one, two, alone, elsewhere = (
                    stack.enter_context(psycopg.connect(f"{url}?application_name={name}")) for name in names
                )
                for connection, name in ((one, "w1"), (two, "w1"), (alone, "w2")):
                    connection.execute("SELECT 1 FROM busrep_writers WHERE writer = %s FOR SHARE", (name,))
                elsewhere.execute("SELECT pg_current_xact_id()")
                for name, expected in (("w1", ["several"] * 2), ("w2", ["alone"]), ("*", ["alone", *["several"] * 2])):
                    found = await store.read(PostgresDialect().blockers(name))
                    assert sorted(one.split("(")[1].split(",")[0] for one in found) == expected

    @sync
    async def test_9_4_a_serialization_failure_of_the_lock_is_a_fence(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                await connection.execute("SELECT 1")  # its snapshot still shows the old incarnation
                await store.claim("w1", ["orders"], timeout=1)
                with pytest.raises(WriterFenced):
                    await store.transaction(claim, connection).begin()
                await connection.rollback()

    @sync
    async def test_9_4_a_claim_waits_for_a_restore_that_is_at_work(self, url: str) -> None:
        """Else it would stand in a log that is gone, and the restore, which has not seen it, would not fence it."""
        async with self.opened(url) as store, await psycopg.AsyncConnection.connect(url) as restoring:
            await restoring.execute("UPDATE busrep_meta SET value = repeat('2', 32) WHERE key = 'epoch'")
            claiming = asyncio.create_task(store.claim("w1", ["orders"], timeout=PATIENCE))
            await self.until_it_waits(url, claiming)
            await restoring.commit()
            assert (await claiming).epoch == "2" * 32

    @sync
    async def test_9_5_a_finish_waits_for_a_restore_that_is_at_work(self, url: str) -> None:
        """Both lock two rows of a name that was won back and finished, the restore in any order: a deadlock."""
        async with self.opened(url) as store, await psycopg.AsyncConnection.connect(url) as restoring:
            claim = await store.claim("w1", ["orders"], timeout=1)
            for _ in range(2):
                await store.finish("w1", claim.incarnation, timeout=PATIENCE)
                claim = await store.claim("w1", ["orders"], timeout=1, again=claim.incarnation)
            fence = (
                "UPDATE busrep_writers SET incarnation = incarnation + 1, finished = 0 WHERE writer = %s RETURNING 1"
            )
            await restoring.execute("UPDATE busrep_meta SET value = repeat('2', 32) WHERE key = 'epoch'")
            (take,) = PostgresDialect().take_name(None)
            await restoring.execute(take.text.encode(), take.params)
            await restoring.execute(fence, ["w1"])
            finishing = asyncio.create_task(store.finish("w1", claim.incarnation, timeout=PATIENCE))
            await self.until_it_waits(url, finishing)
            assert await (await restoring.execute(fence, ["w1 won"])).fetchall() == [(1,)]
            await restoring.commit()
            assert await finishing == {}

    @sync
    async def test_9_12_a_restore_waits_for_who_registers(self, url: str) -> None:
        """Else a reader that begins in the restored log finds nobody registered, and another one in the log before
        appears beside it."""
        async with self.opened(url) as store, await psycopg.AsyncConnection.connect(url) as slow:
            before = await store.epoch()
            await slow.execute("SELECT 1 FROM busrep_streams WHERE stream = 'payments' FOR UPDATE")
            at = {(stream, ""): 0 for stream in ("payments", "orders")}
            registering = asyncio.create_task(store.register_reader("r", at, before, beside_log=True))
            await self.until_it_waits(url, registering)
            restoring = asyncio.create_task(store.restored())
            await self.until_it_waits(url, restoring, beside=1)
            assert not restoring.done()
            await slow.rollback()
            await registering
            await restoring
            assert (await store.load_reader("r")).epoch == before

    @sync
    async def test_9_12_who_registers_waits_for_a_restore(self, url: str) -> None:
        """In the same order of streams: else each could wait for the other."""
        async with self.opened(url) as store, await psycopg.AsyncConnection.connect(url) as slow:
            before = await store.epoch()
            await slow.execute("SELECT 1 FROM busrep_streams WHERE stream = 'orders' FOR UPDATE")
            restoring = asyncio.create_task(store.restored())
            await self.until_it_waits(url, restoring)
            at = {(stream, ""): 0 for stream in ("payments", "orders")}
            registering = asyncio.create_task(store.register_reader("r", at, before, beside_log=True))
            await self.until_it_waits(url, registering, beside=1)
            await slow.rollback()
            epoch = await restoring
            with pytest.raises(Unavailable, match=f"its epoch is {epoch}"):
                await registering
            assert (await store.load_reader("r")).streams == set()

    @sync
    async def test_9_12_who_waits_for_a_stream_s_lock_has_it_when_init_is_through(self, url: str) -> None:
        """Else a prune and a registration are at work at a time: what the new reader begins with is pruned."""
        orders, later = Stream("orders"), Stream("payments")
        async with (
            self.opened(url, Registry([orders])),
            await psycopg.AsyncConnection.connect(url) as making,
            await psycopg.AsyncConnection.connect(url) as pruning,
        ):
            await making.execute("CREATE SEQUENCE busrep_seq_payments")  # init waits for it, orders being written
            init = asyncio.create_task(self.make(url, Registry([orders, later])).init())
            await self.until_it_waits(url, init)
            lock = pruning.execute("SELECT 1 FROM busrep_streams WHERE stream = 'orders' FOR UPDATE")
            locking = asyncio.create_task(lock)
            await self.until_it_waits(url, locking, beside=1)
            await making.rollback()
            await init
            assert await (await locking).fetchall() == [(1,)]

    def test_9_4_claims_race_whatever_the_default_isolation_is(self, url: str) -> None:
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self.sql(url, f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'")
        self.test_racing_claims_have_incarnations_of_their_own(url)

    # --- 9.1, on a real link

    @pytest.mark.parametrize("landed", [True, False], ids=["9_1_committed", "9_1_aborted"])
    @sync
    async def test_9_1_no_answer_to_commit(self, url: str, landed: bool) -> None:
        self.sql(
            url,
            "CREATE TABLE gate (x int); CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_lock(7); RETURN NULL; END'; CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON "
            "gate DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_here()",
        )
        async with Cutter(url) as link, self.opened(link.through) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            (token,) = await store.reserve("orders", 1)
            await transaction.begin()
            pid = (await transaction.execute("SELECT pg_backend_pid()"))[0][0]
            await transaction.insert("orders", [(token, [[1]], [row(1)])])
            with psycopg.connect(url, autocommit=True) as gate:
                if landed:
                    link.armed = True
                    with pytest.raises(CommitUnknown) as caught:
                        await transaction.commit()
                else:
                    gate.execute("SELECT pg_advisory_lock(7)")
                    await transaction.execute("INSERT INTO gate VALUES (1)")
                    committing = asyncio.create_task(transaction.commit())
                    while not gate.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'advisory'", (pid,)
                    ).fetchall():
                        await asyncio.sleep(0.01)
                    assert await store.outcome(claim, transaction.marker, [("orders", token)]) is None
                    gate.execute("SELECT pg_terminate_backend(%s)", (pid,))
                    with pytest.raises(CommitUnknown) as caught:
                        await committing
            assert not caught.value.cancelled
            assert caught.value.marker == transaction.marker
            await transaction.rollback()
            while (left := await store.outcome(claim, transaction.marker, [("orders", token)])) is None:
                await asyncio.sleep(0.01)
            assert left == ({("orders", token): [row(1)]} if landed else {})
            await write(store, claim, 1)

    @sync
    async def test_9_1_a_marker_from_the_future_is_a_transaction_that_a_crash_undid(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            assert await store.outcome(claim, "99999999", [("orders", 1)]) == {}

    @pytest.mark.parametrize("how", ["in the transaction", "past it"])
    @sync
    async def test_9_1_commit_of_a_failed_transaction_is_an_error(self, url: str, how: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            with pytest.raises(psycopg.Error):
                await (transaction if how == "in the transaction" else transaction.connection).execute("SELECT 1 / 0")
            with pytest.raises(StatementRefused, match="InFailedSqlTransaction"):
                await transaction.commit()
            await transaction.rollback()
            await write(store, claim, 1)

    @sync
    async def test_9_1_a_commit_that_rolls_back_is_an_error(self, url: str) -> None:
        """Also where no statement goes before it, which the server would refuse."""
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute("BEGIN")
            with pytest.raises(psycopg.errors.DivisionByZero):
                await connection.execute("SELECT 1 / 0")
            with pytest.raises(StatementRefused, match="InFailedSqlTransaction"):
                await postgres_steps.on_connection(connection, only(Control.COMMIT))

    # --- the caller's connection

    @pytest.mark.parametrize("autocommit", [True, False], ids=["autocommit", "implicit"])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    @pytest.mark.parametrize("joined", [True, False], ids=["joined", "begun"])
    @sync
    async def test_facts_on_the_callers_connection(self, url: str, kind: str, autocommit: bool, joined: bool) -> None:
        self.sql(url, "CREATE TABLE stock (item text)")
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            connection: Any
            if kind == "sync":
                connection = psycopg.connect(url, autocommit=autocommit, row_factory=psycopg.rows.dict_row)
            else:
                connection = await psycopg.AsyncConnection.connect(url, autocommit=autocommit)

            async def call(method: Callable[..., Any], *args: Any) -> Any:
                answer = method(*args)
                return await answer if kind == "async" else answer

            for commit in (True, False):
                if joined:
                    await call(connection.execute, "BEGIN" if autocommit else "SELECT 1")
                (token,) = await store.reserve("orders", 1)
                transaction = store.transaction(claim, connection)
                assert transaction.joined is joined
                await transaction.begin()
                assert transaction.connection is connection
                await call(connection.execute, "INSERT INTO stock VALUES ('nail')")
                await transaction.insert("orders", [(token, [[1]], [row(1)])])
                await (transaction.commit() if commit else transaction.rollback())
                if joined:  # ours did nothing: the caller's word counts
                    assert await store.outcome(claim, transaction.marker, [("orders", token)]) is None
                    await call(connection.commit if commit else connection.rollback)
                assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
                left = await store.outcome(claim, transaction.marker, [("orders", token)])
                assert left == ({("orders", token): [row(1)]} if commit else {})
            assert self.sql(url, "SELECT * FROM stock") == [("nail",)]
            await store.claim("w1", ["orders"], timeout=1)
            with pytest.raises(WriterFenced):
                await store.transaction(claim, connection).begin()
            await call(connection.rollback)
            await call(connection.close)
            with pytest.raises(ConfigError):
                store.transaction(claim, object())

    @pytest.mark.parametrize("kind", ["sync", "async"])
    @sync
    async def test_9_12_saved_in_the_callers_transaction(self, url: str, kind: str) -> None:
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            await store.register_reader("r", {("orders", "w1"): 0}, epoch)
            connection: Any
            if kind == "sync":
                connection = psycopg.connect(url)
            else:
                connection = await psycopg.AsyncConnection.connect(url)
            for method in ("rollback", "commit"):
                await store.save_reader("r", [("orders", "w1", 0, 4)], epoch, connection)
                await store.dead_letter("r", "orders", "w1", [4], [b"1"], "no", connection)
                assert (await store.load_reader("r")).positions == {("orders", "w1"): 0}
                ended = getattr(connection, method)()
                await (ended if kind == "async" else asyncio.sleep(0))
            with pytest.raises(ReaderMoved):
                await store.save_reader("r", [("orders", "w1", 0, 4)], epoch, connection)
            assert (await store.load_reader("r")).positions == {("orders", "w1"): 4}
            closed = connection.close()
            await (closed if kind == "async" else asyncio.sleep(0))
            assert len(await store.dead_letters(9)) == 1

    @sync
    async def test_9_12_a_save_under_repeatable_read_loses_to_an_earlier_one(self, url: str) -> None:
        async with self.opened(url) as store:
            for stream in ("orders", "payments"):
                self.set_sequence(url, stream, 1000)  # below which all these positions are
            epoch = await store.epoch()
            await store.register_reader("r", {("orders", "w1"): 0}, epoch)
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                await connection.execute("SELECT 1")
                await store.save_reader("r", [("orders", "w1", 0, 4)], epoch)
                with pytest.raises(ReaderMoved):
                    await store.save_reader("r", [("orders", "w1", 0, 5)], epoch, connection)
                await connection.rollback()

    # --- connections

    @sync
    async def test_reservations_do_not_wait_for_open_facts(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            held = [store.transaction(claim) for _ in range(10)]
            for transaction in held:
                await transaction.begin()
            assert await store.reserve("orders", 1) == [1]
            await store.heartbeat(claim, {"orders": 1})
            for transaction in held:
                await transaction.rollback()

    @sync
    async def test_after_a_restart_of_the_server_it_works_again(
        self, url: str, postgres_server: PostgresServer
    ) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            transaction = store.transaction(claim)
            await transaction.begin()
            postgres_server.restart()
            with pytest.raises(psycopg.Error):
                await transaction.execute("SELECT 1")
            await transaction.rollback()
            tries = 0
            while True:
                try:
                    await store.check_claim(claim)
                    await write(store, claim, 1)
                    break
                except Unavailable:
                    tries += 1
                    assert tries < 100
                    await asyncio.sleep(0.02)

    @sync
    async def test_a_cancelled_question_leaves_a_usable_store(self, url: str) -> None:
        async with self.opened(url) as store, self.opened(url) as other:
            claim = await store.claim("w1", ["orders"], timeout=1)
            holder = store.transaction(claim)
            await holder.begin()
            blocked = asyncio.create_task(other.claim("w1", ["orders"], timeout=PATIENCE))
            await asyncio.wait([blocked], timeout=SHORT)
            blocked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await blocked
            await holder.commit()
            await store.check_claim(claim)  # the cancelled claim has left nothing
            assert (await other.claim("w1", ["orders"], timeout=1)).incarnation > claim.incarnation

    @sync
    async def test_who_is_cancelled_takes_no_connection_along(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """While a connection comes back, psycopg's pool must not be cut: it may be promised to somebody already."""
        async with self.opened(url) as store:
            pool, coming_back = store.questions, asyncio.Event()
            give_back = pool.putconn

            async def slowly(connection: Any) -> None:
                coming_back.set()
                await asyncio.sleep(SHORT)
                await give_back(connection)

            monkeypatch.setattr(pool, "putconn", slowly)
            asked = asyncio.create_task(store.epoch())
            await coming_back.wait()
            asked.cancel()
            await asyncio.wait([asked])
            await self.all_back(pool)

    @sync
    async def test_who_is_cut_twice_while_it_begins_takes_no_connection_along(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two deadlines, one around the other: the second one cuts the rollback that the first one began."""
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            run_plan, served = store.run_plan, asyncio.Event()

            async def served_without_an_answer(*args: Any) -> None:
                await run_plan(*args)
                served.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(store, "run_plan", served_without_an_answer)
            transaction = store.transaction(claim)
            beginning = asyncio.create_task(transaction.begin())
            for _ in ("BEGIN", "ROLLBACK"):
                await served.wait()
                served.clear()
                beginning.cancel()
            await asyncio.wait([beginning])
            assert transaction.connection is None
            await self.all_back(store.transactions)

    async def all_back(self, pool: Any) -> None:
        """Wait until every connection of a pool can be given to somebody."""
        async with asyncio.timeout(PATIENCE):
            while (found := pool.get_stats())["pool_available"] < found["pool_size"]:
                await asyncio.sleep(0.005)

    @sync
    async def test_questions_one_after_the_other_need_one_connection(self, url: str) -> None:
        async with self.opened(url) as store:
            await store.questions.wait()  # else the first one dials, too
            for _ in range(50):
                await store.epoch()
            assert store.questions.get_stats()["pool_size"] == 1

    @sync
    async def test_connections_without_an_answer_keep_nobody_from_the_others(self, url: str) -> None:
        """A question that gets none is Unavailable after ``fetch_timeout``, and the pool is as good as new."""
        registry = generic()
        async with FaultyLink(url) as proxy:
            store = open_store(proxy.url, registry, settings=Settings(fetch_timeout=1.0))
            await store.init()
            await store.open()
            try:
                await asyncio.gather(*(store.epoch() for _ in range(50)))
                proxy.abandon("server")
                with pytest.raises(Unavailable, match="no answer within 1 s"):
                    await store.epoch()
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(*(store.epoch() for _ in range(50)))
                await self.all_back(store.questions)
            finally:
                await store.close()

    @pytest.mark.parametrize("how", ["at its deadline", "cancelled"])
    @sync
    async def test_who_gives_up_is_not_held_up_by_a_server_that_says_nothing(self, url: str, how: str) -> None:
        """psycopg waits for ten seconds then: until the server has heard of it, and has said so."""
        async with FaultyLink(url) as proxy:
            store = open_store(proxy.url, generic(), settings=Settings(fetch_timeout=0.5))

            async def answered() -> None:
                async with asyncio.timeout(PATIENCE):
                    while True:
                        with suppress(Unavailable):  # half a second is not long on a busy machine
                            await store.epoch()
                            return

            await store.init()
            await store.open()
            try:
                await answered()
                proxy.black_hole("from_server")
                begun = time.monotonic()
                asking = asyncio.create_task(store.epoch())
                if how == "cancelled":
                    await asyncio.wait([asking], timeout=SHORT)
                    asking.cancel()
                await asyncio.wait([asking])
                assert time.monotonic() - begun < 5.0
                assert asking.cancelled() == (how == "cancelled")
                if not asking.cancelled():
                    assert isinstance(asking.exception(), Unavailable)
                proxy.abandon("server")
                proxy.heal()
                await answered()
            finally:
                await store.close()

    @pytest.mark.parametrize("failed", [False, True])
    @sync
    async def test_a_connection_does_not_outlive_a_cancel_that_is_on_its_way(self, url: str, failed: bool) -> None:
        """The statement ended by itself: the cancel would meet the next one. One that failed may have been sent."""
        released = asyncio.Event()

        async def late(_: Any, *, timeout: float) -> None:
            if failed:
                raise psycopg.errors.ConnectionTimeout
            await released.wait()

        connection = await StoreConnection.connect(url, autocommit=True)
        with mock.patch.object(StoreConnection, "cancel_safe", late):
            asking = asyncio.create_task(connection.execute("SELECT pg_sleep(0.1)"))
            while connection.info.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            assert connection.closed
            released.set()

    @sync
    async def test_a_question_that_is_cancelled_leaves_no_transaction_open(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            with psycopg.connect(url) as connection:
                connection.execute("SELECT * FROM busrep_positions FOR UPDATE")
                beat = asyncio.create_task(store.heartbeat(claim, claim.starts))
                sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = 'busrep'"
                behind = f"{sessions} AND wait_event_type = 'Lock'"
                async with asyncio.timeout(PATIENCE):
                    while not self.sql(url, behind):
                        await asyncio.sleep(0.01)
                    beat.cancel()
                    await asyncio.wait([beat])
                    while self.sql(url, behind):  # until the server was told
                        await asyncio.sleep(0.01)
            await store.heartbeat(claim, claim.starts)
            states = "SELECT state FROM pg_stat_activity WHERE application_name = 'busrep'"
            async with asyncio.timeout(PATIENCE):
                while set(self.sql(url, states)) != {("idle",)}:  # a session that was closed may be ending
                    await asyncio.sleep(0.01)

    @sync
    async def test_what_cannot_be_reached_is_told(self, url: str) -> None:
        for bad in ("postgresql://nobody@127.0.0.1:1/none", url + "_missing"):
            with pytest.raises(Unavailable):
                await self.make(bad).open()
            with pytest.raises(Unavailable):
                await self.make(bad).init()
        with pytest.raises(Unavailable, match="not open"):
            await self.make(url).epoch()
        with pytest.raises(ConfigError) as caught:
            self.make("postgresql://u:secret@h/d?nonsense=1")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "orders.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///a%00b.db",
        "memory://",
        "mysql://u:secret@h/d",
        "redis://h",
    ],
)
def test_a_bad_url_says_which_forms_work(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"sqlite:///relative\.db") as caught:
        open_store(bad, generic())
    assert "secret" not in str(caught.value)


def test_without_psycopg_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from busrep.stores import open_store; from busrep.streams import Registry\n"
        "open_store('sqlite:///x.db', Registry([])); open_store('postgresql://h/d', Registry([]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert MissingExtra.__name__ in ended.stderr
    assert "pip install 'busrep[postgres]'" in ended.stderr


def test_a_table_can_be_declared_with_reserved_words() -> None:
    from busrep.stores.dialect import backing_of

    backing = backing_of(Stream("s", table=Table("app.order", id="key", columns=("select",))))
    assert (backing.table, backing.id, backing.columns) == ('"app"."order"', '"key"', ('"select"',))
