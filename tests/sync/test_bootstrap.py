"""Bootstraps of a bus for threads: the function runs where handlers do, and saves on a connection of its thread."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import psycopg
import pytest

from busrep.errors import ConfigError, HandlerFailed
from busrep.sync import Bus, SnapshotPart, connect
from tests.asyncio.bus_conformance import QUICK, Deployment, orders, until
from tests.shop import Order, make_tables

pytestmark = pytest.mark.servers

SMALL = attrs.evolve(QUICK, snapshot_part_rows=10)


def small(redis: str, **options: Any) -> Bus:
    return connect(redis, **{**options, "settings": SMALL})


@pytest.fixture
def deployment(redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, sqlite_url, small)
    make_tables(found.store)
    return found


@contextlib.contextmanager
def written(deployment: Deployment, count: int = 35) -> Iterator[tuple[Bus, int]]:
    """A writer that has written so many rows, all of them proven."""
    with deployment.bus(writer="w1") as writer:
        last = writer.publish(orders, [Order(at, "new") for at in range(count)])[-1]
        with deployment.table() as store:
            until(lambda: last in [one.position for one in store.known() if one.stream == "orders"])
        yield writer, last


class Bills:
    """A table of the application: each row, and how often it was applied; filled from whatever thread calls it."""

    def __init__(self, connect: Any, marks: str = "?") -> None:
        self.connect, self.marks = connect, marks
        self.parts: list[int] = []
        self.handled = 0
        self.callers: set[str] = set()
        self.fails: BaseException | None = None
        with contextlib.closing(connect()) as db:
            db.execute("CREATE TABLE bills (writer TEXT, token INTEGER, number INTEGER, times INTEGER DEFAULT 1)")
            db.execute("CREATE UNIQUE INDEX one ON bills (writer, token)")
            db.commit()

    def of(self, bus: Bus, **options: Any) -> Bills:
        bus.snapshot(orders, **options)(self.apply)
        bus.subscribe(orders)(self.handle)
        return self

    def _insert(self, db: Any, writer: str, token: int, row: Order) -> None:
        db.execute(
            "INSERT INTO bills (writer, token, number) VALUES (?, ?, ?) "
            "ON CONFLICT (writer, token) DO UPDATE SET times = bills.times + 1".replace("?", self.marks),
            (writer, token, row.number),
        )

    def apply(self, part: SnapshotPart[Order]) -> None:
        self.callers.add(threading.current_thread().name)
        with contextlib.closing(self.connect()) as db, db:
            if part.first:
                db.execute("DELETE FROM bills")
            for token, writer, row in zip(part.tokens, part.writers, part.rows, strict=True):
                self._insert(db, writer, token, row)
            part.save(db)
        self.parts.append(part.number)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error

    def handle(self, batch: Any) -> None:
        self.callers.add(threading.current_thread().name)
        with contextlib.closing(self.connect()) as db, db:
            for token, rows in batch.facts():
                self._insert(db, batch.writer, token, rows[0])
                self.handled += 1
            batch.save(db)

    @property
    def rows(self) -> list[tuple[int, int]]:
        with contextlib.closing(self.connect()) as db:
            return list(db.execute("SELECT number, times FROM bills ORDER BY number").fetchall())


def sqlite_bills(deployment: Deployment) -> Bills:
    return Bills(lambda: sqlite3.connect(deployment.store.removeprefix("sqlite:///"), timeout=10))


def state(bus: Bus) -> str | None:
    return bus.statistics()["bootstrap"].get("orders", {}).get("state")


def test_a_snapshot_is_applied_in_the_thread_of_the_handlers(deployment: Deployment) -> None:
    with written(deployment) as (writer, last):
        bills = sqlite_bills(deployment)
        with deployment.bus(reader="billing", start=None) as reader:
            bills.of(reader)
            reader.wait_for(orders, "w1", last)
            more = writer.publish(orders, [Order(at, "new") for at in range(35, 40)])[-1]
            reader.wait_for(orders, "w1", more)
            assert bills.rows == [(number, 1) for number in range(40)]
            assert bills.callers == {"busrep-handle"}
            until(lambda: state(reader) == "online")
            parts = list(bills.parts)
            assert parts == list(range(len(parts)))
            reader.bootstrap(orders)
            assert bills.rows == [(number, 1) for number in range(40)]
            assert reader.statistics()["bootstrap"]["orders"]["syncs"] == 2
        with deployment.bus(reader="billing", start=None) as reader:
            bills.parts.clear()
            bills.of(reader)
            reader.wait_for(orders, "w1", writer.publish(orders, [Order(40, "new")])[-1])
            assert bills.rows == [(number, 1) for number in range(41)]
            assert bills.parts == []


def test_on_a_postgresql_connection(redis_url: str, bus_name: str, postgres_url: str) -> None:
    deployment = Deployment(redis_url, bus_name, postgres_url, small)
    with deployment.table(), written(deployment) as (_, last):
        bills = Bills(lambda: psycopg.connect(postgres_url), "%s")
        bills.fails = ValueError("behind the COMMIT")
        with deployment.bus(reader="billing", start=None) as reader:
            bills.of(reader)
            reader.wait_for(orders, "w1", last)
            assert bills.rows == [(number, 1) for number in range(35)]
            assert bills.parts == sorted(set(bills.parts))
            assert reader.statistics()["reader"]["handler_failures"] == 1


def test_a_function_that_keeps_raising_stops_it_until_resume(deployment: Deployment) -> None:
    with written(deployment) as (_, last), deployment.bus(start=None) as reader:
        applied, mended = [], threading.Event()

        @reader.snapshot(orders, key=lambda row: row.number % 2)
        def apply(part: SnapshotPart[Order]) -> None:
            if not mended.is_set():
                raise ValueError("no")
            applied.append([row.number for row in part.rows])

        with pytest.raises(HandlerFailed):
            reader.bootstrap(orders)
        with pytest.raises(HandlerFailed):
            reader.wait_for(orders, "w1", last)
        mended.set()
        reader.resume(orders, "w1")
        reader.wait_for(orders, "w1", last)
        assert applied[0] == [8, 9]


def test_a_handler_cannot_wait_for_a_snapshot(deployment: Deployment) -> None:
    with written(deployment) as (writer, _), deployment.bus(start="earliest") as reader:
        errors: list[ConfigError] = []

        @reader.subscribe(orders)
        def handle(batch: Any) -> None:
            with pytest.raises(ConfigError, match="ask from another thread") as raised:
                reader.bootstrap(orders)
            errors.append(raised.value)

        reader.wait_for(orders, "w1", writer.publish(orders, [Order(35, "new")])[-1])
        assert errors != []


def test_functions_are_plain_ones_and_sources_are_checked_at_once(deployment: Deployment) -> None:
    with deployment.bus() as reader:

        async def apply(part: Any) -> None: ...

        with pytest.raises(ConfigError, match="calls plain ones"):
            reader.snapshot(orders)(apply)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"decorate with bus\.snapshot"):
            reader.bootstrap(orders)
    with pytest.raises(ConfigError, match="names no source of snapshots"):
        deployment.bus(snapshot_source="sqlite:///other.db")
