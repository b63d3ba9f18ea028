"""PostgreSQL is away for a while under four readers: exactly once and at least once, with asyncio and with threads.

Nothing may stop, be set aside, be lost or count twice, and all is handled within ten seconds of its return. The default
settings. ``BUSREP_OUTAGES=all`` takes 0.4, 5 and 30 seconds ten times each, some 12 minutes, and prints a line a round;
``BUSREP_OUTAGES=all:3`` three times each.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.errors import CommitUnknown, Unavailable
from busrep.testing import servers
from busrep.testing.servers import PostgresServer
from tests.asyncio.bus_conformance import AsyncioBus
from tests.shop import Order, opened_store, orders

pytestmark = pytest.mark.servers

READERS = ("once asyncio", "once threads", "least asyncio", "least threads")
# What is away: the one database of all, under readers that stop at poison; or that of the handlers alone, under readers
# that set poison aside, in a database that is there.
ALL, HANDLERS = "all", "handlers"
INSERT = "INSERT INTO done (reader, number) VALUES (%s, %s)"
UPSERT = INSERT + " ON CONFLICT DO NOTHING"

_asked, _, _times = os.environ.get("BUSREP_OUTAGES", "").partition(":")
ROUNDS = [(away, number) for away in (0.4, 5.0, 30.0) for number in range(int(_times or 10))] if _asked else [(0.4, 0)]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One of its own, for it is stopped."""
    with servers.start_postgres() as found:
        yield found


@attrs.define
class Shop:
    """A deployment on a database that goes away."""

    redis: str
    name: str
    server: PostgresServer
    facts: str
    """The URL of the bus's database."""
    readers: tuple[str, ...]
    numbers: list[int] = attrs.field(factory=list)
    """Of the facts that were tried, in order; the table tells which were committed."""
    over: threading.Event = attrs.field(factory=threading.Event)

    @property
    def url(self) -> str:
        return self.server.database_url(self.name.replace("-", "_"))

    def ask(self, sql: str, url: str | None = None) -> list[tuple[Any, ...]]:
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def write(self) -> None:
        """A writer that goes on through the outage, as a service does; a fact a while."""
        given: Any = {"name": self.name, "streams": [orders], "store": self.facts, "writer": "w"}
        with busrep.sync.connect(self.redis, **given) as bus:
            while not self.over.is_set():
                self.numbers.append(len(self.numbers))
                with contextlib.suppress(Unavailable, CommitUnknown):
                    bus.publish(orders, [Order(self.numbers[-1], "new")])
                self.over.wait(0.02)

    def handler(self, reader: str) -> Any:
        if reader == "once asyncio":

            async def once(batch: Any) -> None:
                async with batch.transaction() as db:
                    for row in batch.rows:
                        await db.execute(INSERT, (reader, row.number))

            return once

        def bill(batch: Any) -> None:
            with batch.transaction() as db:
                for row in batch.rows:
                    db.execute(INSERT, (reader, row.number))

        def note(batch: Any) -> None:
            with psycopg.connect(self.url) as db:
                for row in batch.rows:
                    db.execute(UPSERT, (reader, row.number))

        async def note_async(batch: Any) -> None:
            async with await psycopg.AsyncConnection.connect(self.url) as db:
                for row in batch.rows:
                    await db.execute(UPSERT, (reader, row.number))

        return {"once threads": bill, "least threads": note, "least asyncio": note_async}[reader]

    @contextlib.contextmanager
    def reader(self, reader: str) -> Iterator[Any]:
        given: Any = {
            "name": self.name, "streams": [orders], "store": self.facts, "reader": reader.replace(" ", "-"),
            "on_poison": "stop" if self.facts == self.url else "dead_letter",
        }  # fmt: skip
        handle = self.handler(reader)
        if reader.endswith("threads"):
            with busrep.sync.connect(self.redis, **given) as bus:
                bus.subscribe(orders)(handle)
                yield bus
        else:
            with AsyncioBus(self.redis, **given) as bus:
                bus.do(lambda: bus.bus.subscribe(orders)(handle))
                yield bus

    def committed(self) -> list[int]:
        return [number for (number,) in self.ask("SELECT (row::json->>0)::int FROM busrep_facts", self.facts)]

    def done(self) -> dict[str, Counter[int]]:
        found: dict[str, Counter[int]] = {reader: Counter() for reader in self.readers}
        for reader, number in self.ask("SELECT reader, number FROM done"):
            found[reader][number] += 1
        return found


def until(true: Callable[[], Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


@pytest.fixture(params=[ALL, HANDLERS])
def shop(server: PostgresServer, redis_url: str, bus_name: str, request: pytest.FixtureRequest) -> Shop:
    database = server.database_url(bus_name.replace("-", "_"))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{bus_name.replace("-", "_")}"'.encode())
    if request.param == ALL:
        found = Shop(redis_url, bus_name, server, database, READERS)
    else:
        found = Shop(redis_url, bus_name, server, request.getfixturevalue("postgres_url"), READERS[2:])
    with opened_store(found.facts):
        found.ask("CREATE TABLE done (reader text, number int)")
        # Only of the readers whose handlers may be called again.
        found.ask("CREATE UNIQUE INDEX ON done (reader, number) WHERE reader LIKE 'least%'")
    return found


@pytest.mark.parametrize(("away", "number"), ROUNDS)
def test_an_outage_stops_nothing_loses_nothing_and_counts_nothing_twice(
    away: float, number: int, shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    server = shop.server
    with contextlib.ExitStack() as stack:
        buses = [stack.enter_context(shop.reader(reader)) for reader in shop.readers]
        writing = threading.Thread(target=shop.write, daemon=True)
        writing.start()
        stack.callback(writing.join)
        stack.callback(shop.over.set)
        until(lambda: all(len(rows) >= 20 for rows in shop.done().values()), 60.0)
        try:
            server.stop()
            time.sleep(away)
        finally:
            server.start()
        back = time.monotonic()
        before = set(shop.committed())
        until(lambda: all(before <= rows.keys() for rows in shop.done().values()), 60.0)
        late = time.monotonic() - back
        time.sleep(0.3)
        shop.over.set()
        writing.join()
        committed = shop.committed()
        until(lambda: all(set(committed) <= rows.keys() for rows in shop.done().values()), 60.0)
        statistics = [bus.statistics()["reader"] for bus in buses]
        status = shop.ask("SELECT count(*) FROM busrep_dead_letters", shop.facts)
    done = shop.done()
    figures = {
        "away": away,
        "what": ALL if shop.facts == shop.url else HANDLERS,
        "facts": len(committed),
        "behind": round(late, 1),
        "stopped": sum(len(one["stopped"]) + (one["failure"] is not None) for one in statistics),
        "dead letters": status[0][0],
        "lost": sum(len(set(committed) - rows.keys()) for rows in done.values()),
        "twice": sum(count - 1 for rows in done.values() for count in rows.values()),
        "not in the table": sum(len(rows.keys() - set(committed)) for rows in done.values()),
    }
    if _asked:
        with capsys.disabled():
            print(f"\n{number}: {figures}", flush=True)
    assert {key: figures[key] for key in ("stopped", "dead letters", "lost", "twice", "not in the table")} == {
        "stopped": 0, "dead letters": 0, "lost": 0, "twice": 0, "not in the table": 0,
    }  # fmt: skip
    if _asked:  # a promise about time, on a machine that has time
        assert late <= 10.0
