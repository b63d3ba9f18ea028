"""Stores as sources of snapshots and keepers of bootstraps: the suite over all three, and what only databases can do.

What is PostgreSQL's own (limits across processes, what dies) is in test_snapshots_postgres.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import tracemalloc
from contextlib import aclosing, closing
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.core.snapshots import AppliedParts, decode_part
from busrep.errors import ConfigError, ReaderMoved, Unavailable
from busrep.stores.interface import AsyncStore, Claim
from tests.stores import snapshot_conformance
from tests.stores.snapshot_conformance import SnapshotConformance, fetched, some_facts, text_of, tiles, whole
from tests.stores.store_conformance import OWN_TABLES, Order, row, streams, sync, write

test_an_agreement_and_its_json = snapshot_conformance.test_an_agreement_and_its_json


class TestMemory(SnapshotConformance):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{secrets.token_hex(6)}"

    @sync
    async def test_there_is_no_connection(self, url: str) -> None:
        async with self.opened(url) as store:
            with pytest.raises(ConfigError, match="no connections"):
                await store.save_bootstrap(
                    "r", "orders", "", AppliedParts(parts=0, applied=0, rows=0, bytes=0, state=""), connection=object()
                )


class SqlConformance(SnapshotConformance):
    """What both databases can do and memory cannot."""

    json_type = "text"

    def connect(self, url: str) -> Any:
        """A blocking connection that begins transactions by itself."""
        raise NotImplementedError

    def sql(self, url: str, text: str) -> list[tuple[Any, ...]]:
        """Run a statement beside the store, committed."""
        with closing(self.connect(url)) as connection, connection:
            cursor = connection.execute(text)
            found: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
            return found

    @sync
    async def test_progress_is_saved_in_the_caller_s_transaction(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, *(1,) * 6)
            agreement = await store.agree("orders", part_rows=2)
            id = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            self.sql(url, "CREATE TABLE bills (number int)")

            async def apply(commit: bool, parts: int = 0) -> None:
                with closing(self.connect(url)) as connection:
                    connection.execute("INSERT INTO bills VALUES (1)")
                    step = AppliedParts(parts=parts, applied=parts + 1, rows=2, bytes=9, state="loading")
                    await store.save_bootstrap("r", "orders", id, step, connection)
                    connection.commit() if commit else connection.rollback()

            for commit, expected in ((False, (0, 0)), (True, (1, 1))):
                await apply(commit)
                (progress,) = await store.bootstraps()
                assert (progress.parts, len(self.sql(url, "SELECT * FROM bills"))) == expected
            with pytest.raises(ReaderMoved) as caught:
                await apply(True)
            assert (caught.value.stream, caught.value.expected) == ("orders", 0)
            assert len(self.sql(url, "SELECT * FROM bills")) == 1
            await store.leave(agreement)

    @sync
    async def test_of_many_writers(self, url: str) -> None:
        """More than one compound SELECT of SQLite holds."""
        async with self.opened(url) as store:
            now = "now()" if url.startswith("postgres") else "0"
            known = ", ".join(f"('orders', 'w{at}', 520, 0, TRUE, {now})" for at in range(520))
            self.sql(
                url,
                f"INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) VALUES {known}",
            )
            rows = ", ".join(f"('orders', 'w{at * 13}', {at + 1}, {k}, '[{k}]')" for at in range(40) for k in (0, 1))
            self.sql(url, f"INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES {rows}")
            agreement = await store.agree("orders", part_rows=25)
            assert len(agreement.positions) == 520
            text = await whole(store, agreement)
            tiles(agreement, text)
            assert len(set(decode_part(text).writers)) == 40
            assert len(decode_part(text).tokens) == 80
            await store.leave(agreement)

    @sync
    async def test_a_long_snapshot_is_a_sign_of_life(self, url: str) -> None:
        """Prune counts readers that saved within reader_cap: the positions stand still while parts are applied."""
        async with self.opened(url) as store:
            first, _ = await some_facts(store, *(1,) * 4)
            agreement = await store.agree("orders", part_rows=2)
            id = await store.begin_bootstrap("r", agreement, syncs=1, reason="new")
            (last,) = await write(store, first, 1)
            await store.heartbeat(first, {"orders": last})
            long_ago = "to_timestamp(0)" if url.startswith("postgres") else "0"
            self.sql(url, f"UPDATE busrep_readers SET saved_at = {long_ago}")
            await store.save_bootstrap(
                "r", "orders", id, AppliedParts(parts=0, applied=1, rows=2, bytes=9, state="loading")
            )
            await store.prune(keep=0, reader_cap=3600)
            assert {one.writer: one.floor for one in await store.known()} == {"w1": 3, "w2": 4}
            self.sql(url, f"UPDATE busrep_readers SET saved_at = {long_ago}")
            await store.prune(keep=0, reader_cap=3600)
            assert {one.writer: one.floor for one in await store.known()} == {"w1": last, "w2": 4}
            await store.leave(agreement)

    async def own_facts(self, url: str, store: AsyncStore) -> Claim:
        claim = await store.claim("w1", ["own", "backfill"], timeout=1)
        transaction = store.transaction(claim)
        own = await store.reserve("own", 4)
        old = await store.reserve("backfill", 5)
        await transaction.begin()
        orders = [Order('ä\'\\ "x" \t', 1.5, True, ["a", "\n", "\\N"]), Order("", 1e300, False, [], "")]
        payloads = [store.dialect.backings["own"].definition.encode(one) for one in orders]  # type: ignore[attr-defined]
        await transaction.insert("own", [(token, orders, payloads) for token in own])
        await transaction.insert("backfill", [(token, [[f"{token}\\"]], [row(f"{token}\\")]) for token in old])
        await transaction.commit()
        await store.heartbeat(claim, {"own": own[-1], "backfill": old[-2]})
        return claim

    @sync
    async def test_application_s_own_tables_and_negative_streams(self, url: str) -> None:
        """One with a column for the place in the fact, and one without, whose IDs go downwards."""
        for text in OWN_TABLES:
            self.sql(url, text.format(json=self.json_type))
        async with self.opened(url, streams()) as store:
            await self.own_facts(url, store)
            for stream, tokens in (("own", [1, 1, 2, 2, 3, 3, 4, 4]), ("backfill", [1, 2, 3, 4])):
                agreement = await store.agree(stream, part_rows=3)
                assert len(agreement.parts) >= 2
                text = await whole(store, agreement)
                tiles(agreement, text)
                assert list(decode_part(text).tokens) == tokens
                assert text == await fetched(store, agreement)
                await store.leave(agreement)

    def many_rows(self, url: str, count: int, size: int) -> None:
        """Facts of w1 on orders, with rows of so many bytes."""
        raise NotImplementedError

    @sync
    async def test_a_part_is_never_in_memory_as_a_whole(self, url: str) -> None:
        async with self.opened(url) as store:
            claim = await store.claim("w1", ["orders"], timeout=1)
            self.many_rows(url, 20_000, 1000)
            await store.heartbeat(claim, {"orders": 20_000})
            agreement = await store.agree("orders", part_rows=20_000)
            assert agreement.rows == 20_000
            assert len(agreement.parts) == 1
            await text_of(store, agreement, 0)  # what is imported and cached once
            tracemalloc.start()
            try:
                size = 0
                async with aclosing(store.load(agreement, 0)) as pieces:
                    async for piece in pieces:
                        size += len(piece)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert size > 20_000_000
            assert peak < 4_000_000
            await store.leave(agreement)

    @sync
    async def test_while_a_part_is_loaded_everybody_goes_on(self, url: str) -> None:
        """Claims, facts, heartbeats, catch-up, a prune: none of them waits for the snapshot."""
        async with self.opened(url) as store, self.opened(url) as other:
            first, _ = await some_facts(store, *(400,) * 10)
            agreement = await store.agree("orders", part_rows=100_000)
            async with aclosing(store.load(agreement, 0)) as pieces:
                text = await anext(pieces)
                async with asyncio.timeout(60):
                    third = await other.claim("w3", ["orders"], timeout=1)
                    (token,) = await write(other, third, 2)
                    await other.heartbeat(third, {"orders": token})
                    (token,) = await write(store, first, 2)
                    await store.heartbeat(first, {"orders": token})
                    await store.begin_bootstrap("r", await other.agree("orders", part_rows=9), syncs=1, reason="new")
                    assert await other.prune(keep=0) != {}
                    (second,) = [one for one in await other.known() if one.writer == "w2"]
                    assert await other.finish("w2", second.incarnation, timeout=1) != {}
                text += b"".join([piece async for piece in pieces])
            tiles(agreement, text)  # what was pruned meanwhile is in it
            assert len(decode_part(text).tokens) == 4000
            await store.leave(agreement)

    @sync
    async def test_a_store_that_is_closed_gives_nothing(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 1)
            agreement = await store.agree("orders", part_rows=2)
            await store.close()
            with pytest.raises(Unavailable):
                await store.agree("orders", part_rows=2)
            with pytest.raises(Unavailable):
                await text_of(store, agreement, 0)
            await store.leave(agreement)
            await store.open()
            again = await store.agree("orders", part_rows=2, again=agreement)
            assert again.same(agreement)
            assert await text_of(store, again, 0) == b"1 w1 [1,0]\n"


class TestSqlite(SqlConformance):
    @pytest.fixture
    def url(self, sqlite_url: str) -> str:
        return sqlite_url

    def connect(self, url: str) -> sqlite3.Connection:
        return sqlite3.connect(url.removeprefix("sqlite:///"))

    def many_rows(self, url: str, count: int, size: int) -> None:
        with closing(self.connect(url)) as connection, connection:
            connection.executemany(
                "INSERT INTO busrep_facts (stream, writer, id, idx, row) VALUES ('orders', 'w1', ?, 0, ?)",
                ((number, row("x" * size).decode()) for number in range(1, count + 1)),
            )
            connection.execute("UPDATE busrep_sequences SET value = ? WHERE stream = 'orders'", (count,))

    def test_db_status_shows_it(self, url: str) -> None:
        async def begin() -> None:
            async with self.opened(url) as store:
                await some_facts(store, *(1,) * 6)
                agreement = await store.agree("orders", part_rows=2)
                id = await store.begin_bootstrap("r", agreement, syncs=4, reason="below the floor")
                await store.save_bootstrap(
                    "r", "orders", id, AppliedParts(parts=0, applied=1, rows=2, bytes=9, state="loading")
                )

        asyncio.run(begin())
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["db", "status", "--store", url])
        assert shown.exit_code == 0, shown.output
        line = next(line for line in shown.output.splitlines() if "loading" in line)
        for word in ("orders", "1 of 3", "4 ALARM", "below the floor"):
            assert word in line

    @sync
    async def test_the_wal_is_emptied_between_parts_and_behind_one_that_was_left(self, url: str) -> None:
        """A reader that has read to the end of the WAL, or none, lets it begin again: it does not grow with time."""

        async def emptied() -> None:
            while self.sql(url, "PRAGMA wal_checkpoint(TRUNCATE)") != [(0, 0, 0)]:
                await asyncio.sleep(0.001)  # the thread that closes its connection is on its way

        async with self.opened(url) as store:
            first, _ = await some_facts(store, *(400,) * 10)
            agreement = await store.agree("orders", part_rows=2000)
            await emptied()
            pieces = store.load(agreement, 0)
            await anext(pieces)
            await write(store, first, 1)
            assert self.sql(url, "PRAGMA wal_checkpoint(PASSIVE)")[0][1] > 0  # what the part does not see
            loading = asyncio.create_task(anext(pieces))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait([loading])
            await emptied()
            await pieces.aclose()
            left = store.load(agreement, 1)
            await anext(left)
            await store.close()
            await left.aclose()
            await emptied()

    @sync
    async def test_a_file_that_was_replaced_is_not_read(self, url: str) -> None:
        async with self.opened(url) as store:
            await some_facts(store, 1)
            agreement = await store.agree("orders", part_rows=2)
            path = url.removeprefix("sqlite:///")
            os.rename(path, f"{path}.gone")
            with pytest.raises(Unavailable, match="moved away"):
                await text_of(store, agreement, 0)
            with pytest.raises(Unavailable, match="moved away"):
                await store.agree("orders", part_rows=2)


@pytest.mark.servers
class TestPostgres(SqlConformance):
    json_type = "jsonb"

    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    def connect(self, url: str) -> psycopg.Connection[Any]:
        return psycopg.connect(url)

    def many_rows(self, url: str, count: int, size: int) -> None:
        self.sql(
            url,
            "INSERT INTO busrep_facts (stream, writer, id, idx, row) SELECT 'orders', 'w1', i, 0, "
            f"'[\"' || repeat('x', {size}) || '\"]' FROM generate_series(1, {count}) AS i",
        )
        self.sql(url, f"SELECT setval('busrep_seq_orders', {count})")
