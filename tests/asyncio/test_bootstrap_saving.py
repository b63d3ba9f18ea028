"""Parts of a snapshot saved together with their effects, on SQLite: each applied exactly once, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from busrep import Batch, Bus, SnapshotPart
from busrep.core.snapshots import AppliedParts
from busrep.errors import ReaderMoved, Unavailable
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.pair import MemoryRedis
from tests.shop import Order, orders, payments

from .bootstraps import SMALL, Source, crash, online, state, until, write

# All processes of these tests share one event loop: a handler that waited for SQLite's lock would keep its holder from
# going on. So it does not wait, but fails, and is called again.
PATIENT = attrs.evolve(SMALL, handler_retries=100)

TABLES = """
CREATE TABLE IF NOT EXISTS bills (writer TEXT, token INTEGER, number INTEGER, times INTEGER DEFAULT 1,
                                  PRIMARY KEY (writer, token));
CREATE TABLE IF NOT EXISTS parts (process TEXT, number INTEGER)
"""


@attrs.define
class Shop:
    """A deployment whose facts are in one SQLite file, and what its readers keep of them in the same, or another."""

    path: Path
    redis: MemoryRedis = attrs.field(factory=MemoryRedis)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def bus(self, **options: Any) -> Bus:
        registry = Registry([orders, payments])
        options = {"store": self.url, "start": None, "settings": PATIENT, **options}
        for name in ("store", "reader_store"):
            if options.get(name):
                options[name] = open_store(options[name], registry, settings=PATIENT)
        return Bus(self.redis.client(), BusOptions(name="shop", streams=registry, **options))


@attrs.define
class Bills:
    """An application's table: each row, and how often it was applied."""

    process: str
    db: sqlite3.Connection
    before_save: Callable[[SnapshotPart[Order]], None] = lambda _: None
    after_commit: Callable[[SnapshotPart[Order]], None] = lambda _: None
    saves: bool = True

    def of(self, bus: Bus) -> Bills:
        bus.snapshot(orders)(self.apply)
        bus.subscribe(orders)(self.handle)
        return self

    async def apply(self, part: SnapshotPart[Order]) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            if part.first:
                self.db.execute("DELETE FROM bills")
            for token, writer, row in zip(part.tokens, part.writers, part.rows, strict=True):
                self._insert(writer, token, row)
            self.db.execute("INSERT INTO parts VALUES (?, ?)", (self.process, part.number))
            self.before_save(part)
            if self.saves:
                await part.save(self.db)
        except BaseException:
            self.db.rollback()
            raise
        self.db.commit()
        self.after_commit(part)

    async def handle(self, batch: Batch[Order]) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for token, rows in batch.facts():
                self._insert(batch.writer, token, rows[0])
            if self.saves:
                await batch.save(self.db)
        except BaseException:
            self.db.rollback()
            raise
        self.db.commit()

    def _insert(self, writer: str, token: int, row: Order) -> None:
        self.db.execute(
            "INSERT INTO bills (writer, token, number) VALUES (?, ?, ?) "
            "ON CONFLICT (writer, token) DO UPDATE SET times = times + 1",
            (writer, token, row.number),
        )

    @property
    def numbers(self) -> list[int]:
        """Of all rows; those that were applied more than once as often."""
        return [
            n for n, times in self.db.execute("SELECT number, times FROM bills ORDER BY number") for _ in range(times)
        ]

    @property
    def parts(self) -> list[int]:
        return [number for (number,) in self.db.execute("SELECT number FROM parts ORDER BY rowid")]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    found = Shop(tmp_path / "facts.db")
    asyncio.run(open_store(found.url, Registry([orders, payments])).init())
    return found


@contextlib.contextmanager
def opened(path: Path, process: str = "one") -> Any:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0.02)) as db:
        db.executescript(TABLES)
        yield Bills(process, db)


@contextlib.asynccontextmanager
async def written(shop: Shop, count: int = 35) -> AsyncIterator[tuple[Bus, int]]:
    async with shop.bus(writer="w1") as writer:
        last = await write(writer, count)
        await writer.writing.beat()
        yield writer, last


def run(work: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


class Once:
    """Raises an error when that part comes, once."""

    def __init__(self, number: int, error: Exception) -> None:
        self.number, self.error, self.raised = number, error, False

    def __call__(self, part: SnapshotPart[Order]) -> None:
        if part.number == self.number and not self.raised:
            self.raised = True
            raise self.error


@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("when", ["before_save", "after_commit", "no error"])
def test_each_part_is_applied_once_whatever_the_function_raises(shop: Shop, number: int, when: str) -> None:
    """Raised behind its COMMIT: what is saved decides, and it is not called again."""

    async def main() -> None:
        with opened(shop.path) as bills:
            failing = Once(number, ValueError("no"))
            if when != "no error":
                setattr(bills, when, failing)
            async with written(shop) as (writer, last), shop.bus(reader="billing") as reader:
                bills.of(reader)
                await reader.wait_for(orders, "w1", last)
                assert bills.numbers == list(range(35))
                assert bills.parts == [0, 1, 2, 3]
                assert failing.raised == (when != "no error")
                more = await write(writer, 5, first=35)
                await reader.wait_for(orders, "w1", more)
                assert bills.numbers == list(range(40))
                await online(reader)

    run(main())


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_save_that_was_rolled_back_in_silence_is_found_out(shop: Shop, at: int) -> None:
    """The part after it finds that it is not where it was left; or what comes after the last one does."""

    async def main() -> None:
        with opened(shop.path) as bills:
            lied = []
            given = bills.apply

            async def apply(part: SnapshotPart[Order]) -> None:
                if part.number == at and not lied:
                    lied.append(part)
                    bills.db.execute("BEGIN IMMEDIATE")
                    await part.save(bills.db)
                    bills.db.rollback()
                    return
                await given(part)

            async with written(shop) as (_, last), shop.bus(reader="billing") as reader:
                reader.snapshot(orders)(apply)
                await reader.wait_for(orders, "w1", last)
                assert bills.parts == [0, 1, 2, 3]
                assert bills.numbers == list(range(35))

    run(main())


def test_a_function_that_does_not_save_is_saved_for(shop: Shop) -> None:
    async def main() -> None:
        with opened(shop.path.with_name("bills.db")) as bills:
            bills.saves = False
            async with written(shop) as (_, last), shop.bus(reader="billing") as reader:
                bills.of(reader)
                await reader.wait_for(orders, "w1", last)
                assert bills.numbers == list(range(35))
                saved = await reader.store.bootstraps("billing")
                assert [(one.parts, one.rows) for one in saved] == [(4, 35)]

    run(main())


def test_the_readers_store_may_be_another_database(shop: Shop) -> None:
    async def main() -> None:
        path = shop.path.with_name("readers.db")
        await open_store(f"sqlite:///{path}", Registry([orders, payments])).init()
        with opened(path) as bills:
            async with written(shop) as (writer, last):
                for _ in range(2):
                    async with shop.bus(reader="billing", reader_store=f"sqlite:///{path}") as reader:
                        bills.of(reader)
                        await reader.wait_for(orders, "w1", last)
                        assert bills.numbers == list(range(last))
                        assert bills.parts == [0, 1, 2, 3]
                    last = await write(writer, 5, first=last)
            assert len(await _bootstraps(f"sqlite:///{path}")) == 1
            assert await _bootstraps(shop.url) == []

    run(main())


async def _bootstraps(url: str) -> list[Any]:
    store = open_store(url, Registry([orders, payments]))
    await store.open()
    try:
        return list(await store.bootstraps("billing"))
    finally:
        await store.close()


@pytest.mark.parametrize("lost", ["question", "answer"])
@pytest.mark.parametrize("method", ["begin_bootstrap", "save_bootstrap"])
def test_a_store_that_gives_no_answer_is_asked_what_became_of_it(shop: Shop, method: str, lost: str) -> None:
    async def main() -> None:
        with opened(shop.path.with_name("bills.db")) as bills:
            bills.saves = False  # busrep saves, and so it is what gets no answer
            async with written(shop) as (_, last), shop.bus(reader="billing") as reader:
                given, calls = getattr(reader.store, method), 0

                async def unknown(*args: Any, **options: Any) -> Any:
                    nonlocal calls
                    calls += 1
                    answer = await given(*args, **options) if calls > 1 or lost == "answer" else None
                    if calls == 1:
                        raise Unavailable("the store", "no answer")
                    return answer

                setattr(reader.store, method, unknown)
                bills.of(reader)
                await reader.wait_for(orders, "w1", last)
                assert bills.parts == [0, 1, 2, 3]
                assert bills.numbers == list(range(35))
                assert [one.syncs for one in await reader.store.bootstraps("billing")] == [1]

    run(main())


def test_two_processes_of_one_name_apply_each_part_once_between_them(shop: Shop) -> None:
    async def main() -> None:
        with opened(shop.path) as first, opened(shop.path, "two") as second:
            async with written(shop, 200) as (writer, last):
                async with shop.bus(reader="billing") as one, shop.bus(reader="billing") as other:
                    first.of(one)
                    second.of(other)
                    await asyncio.gather(one.wait_for(orders, "w1", last), other.wait_for(orders, "w1", last))
                    last = await write(writer, 20, first=200)
                    await asyncio.gather(one.wait_for(orders, "w1", last), other.wait_for(orders, "w1", last))
                    assert first.numbers == list(range(220))
                    await online(one)
                    await online(other)
                    assert await _unsettled(one) == []

    run(main())


async def _unsettled(bus: Bus) -> list[Any]:
    return [one for one in await bus.store.bootstraps("billing") if one.state not in ("draining", "online")]


@pytest.mark.parametrize("part", [0, 1, 3])
@pytest.mark.parametrize("committed", [True, False])
def test_one_that_is_killed_about_its_commit_goes_on_exactly_there(shop: Shop, part: int, committed: bool) -> None:
    async def main() -> None:
        async with written(shop) as (writer, last):
            at = asyncio.Event()
            with opened(shop.path) as bills:
                given = bills.apply

                async def killed(one: SnapshotPart[Order]) -> None:
                    if one.number == part and not committed:
                        at.set()
                        await asyncio.Event().wait()
                    await given(one)
                    if one.number == part:
                        at.set()
                        await asyncio.Event().wait()

                reader = shop.bus(reader="billing")
                await reader.open()
                reader.snapshot(orders)(killed)
                await at.wait()
                await crash(reader)
                await reader.store.close()
            last = await write(writer, 5, first=35)
            with opened(shop.path) as bills:
                async with shop.bus(reader="billing") as reader:
                    bills.of(reader)
                    await reader.wait_for(orders, "w1", last)
                    assert bills.parts == [0, 1, 2, 3]
                    assert bills.numbers == list(range(40))
                    await online(reader)
                    await until(lambda: not reader.reading.bootstrapping._finishing)
                    assert [one.state for one in await reader.store.bootstraps("billing")] == ["online"]

    run(main())


def test_the_positions_saved_hold_back_pruning(shop: Shop) -> None:
    """From the agreement on: what follows the snapshot is kept for who loads it, however long that takes."""

    async def main() -> None:
        with opened(shop.path) as bills:
            async with written(shop) as (writer, last), shop.bus(reader="billing") as reader:
                at, go_on = asyncio.Event(), asyncio.Event()
                given = bills.apply

                async def slow(part: SnapshotPart[Order]) -> None:
                    at.set()
                    await go_on.wait()
                    await given(part)

                reader.snapshot(orders)(slow)
                reader.subscribe(orders)(bills.handle)
                await at.wait()
                reader.link.reconnect("a test says so")  # what is held goes, and is fetched
                more = await write(writer, 10, first=35)
                await writer.writing.beat()
                assert set((await writer.store.prune(keep=1)).values()) <= {last}
                go_on.set()
                await reader.wait_for(orders, "w1", more)
                assert max(bills.numbers) == 44
                assert bills.numbers[-10:] == list(range(35, 45))

    run(main())


def test_reader_moved_is_what_a_function_sees_of_a_twin(shop: Shop) -> None:
    async def main() -> None:
        with opened(shop.path) as bills:
            async with written(shop) as (_, last), shop.bus(reader="billing") as reader:
                seen: list[Exception] = []
                given = bills.apply

                async def apply(part: SnapshotPart[Order]) -> None:
                    if part.number == 1 and not seen:
                        (saved,) = await reader.store.bootstraps("billing")
                        await reader.store.save_bootstrap(
                            "billing", "orders", saved.id,
                            AppliedParts(parts=1, applied=2, rows=20, bytes=500, state="loading"),
                        )  # fmt: skip
                        try:
                            await given(part)
                        except ReaderMoved as error:
                            seen.append(error)
                            raise
                    await given(part)

                reader.snapshot(orders)(apply)
                await reader.wait_for(orders, "w1", last)
                assert len(seen) == 1
                assert bills.parts == [0, 2, 3], "the twin has applied part 1"

    run(main())


def test_a_handler_that_is_at_work_when_it_begins_cannot_save_over_it(shop: Shop) -> None:
    """Its rows are void from then on: they come again behind the snapshot, or are in it."""

    async def main() -> None:
        with opened(shop.path) as bills:
            async with written(shop) as (writer, _), shop.bus(reader="billing", start="earliest") as reader:
                at, go_on, refused = asyncio.Event(), asyncio.Event(), []

                async def handle(batch: Batch[Order]) -> None:
                    if not at.is_set():
                        at.set()
                        await go_on.wait()
                    try:
                        await bills.handle(batch)
                    except ReaderMoved as error:
                        refused.append(error)
                        raise

                reader.snapshot(orders)(bills.apply)
                reader.subscribe(orders)(handle)
                await at.wait()
                asked = asyncio.create_task(reader.bootstrap(orders))
                await until(lambda: state(reader) == "loading")
                go_on.set()
                await asked
                more = await write(writer, 5, first=35)
                await reader.wait_for(orders, "w1", more)
                assert len(refused) == 1
                assert bills.numbers == list(range(40))

    run(main())


@pytest.mark.parametrize("saves", [True, False])
def test_a_process_that_reads_joins_the_snapshot_that_another_of_its_name_begins(shop: Shop, saves: bool) -> None:
    """What it went on to handle would lie on a target that is half filled."""

    async def main() -> None:
        with opened(shop.path) as first, opened(shop.path, "two") as second:
            first.saves = second.saves = saves
            async with written(shop) as (writer, _), shop.bus(reader="billing", start="earliest") as one:
                older = await writer.store.agree("orders", part_rows=10)
                await writer.store.leave(older)
                first.of(one)
                await one.wait_for(orders, "w1", await write(writer, 5, first=35))
                await until(lambda: one.reading.saved.at["orders", "w1"] == 40)
                async with shop.bus(reader="billing", start="earliest") as other:
                    source = other.reading.bootstrapping.source.given = Source(other.store)
                    source.change = lambda _: older
                    at, go_on = asyncio.Event(), asyncio.Event()

                    async def slow(part: SnapshotPart[Order]) -> None:
                        if part.number == 1 and not at.is_set():
                            at.set()
                            await go_on.wait()
                        await second.apply(part)

                    other.snapshot(orders)(slow)
                    other.subscribe(orders)(second.handle)
                    asked = asyncio.create_task(other.bootstrap(orders))
                    await at.wait()
                    last = await write(writer, 5, first=40)
                    await until(lambda: state(one) is not None)  # its next save shows it
                    await one.wait_for(orders, "w1", last)
                    go_on.set()
                    await asked
                    last = await write(writer, 5, first=45)
                    await one.wait_for(orders, "w1", last)
                    await other.wait_for(orders, "w1", last)
                    assert sorted(set(first.numbers)) == list(range(50))
                    assert first.numbers == list(range(50)) or not saves

    run(main())
