"""Facts in the caller's transaction, beside the same transaction without a bus.

    python benchmarks/joined.py [--transactions 300] [--rounds 5] [--at-a-time 8] [--json FILE]

Each transaction inserts one row of the application's. With busrep it writes a fact of one row as well, which is
published on a Redis; without, the same row is inserted into a second table, as an outbox would. A round gives each
contender ``--transactions`` in turns. The clock runs until the last COMMIT was answered and, with busrep, until the
facts are published: what is asked of the database after COMMIT is part of the price. Processor time is this process's.

``psycopg``     ``async with connection.transaction()``, ``bus.write(stream, connection=connection)``; several at a
                time, each on a connection of its own
``threads``     the same on ``busrep.sync`` with psycopg's Connection, one thread
``sqlalchemy``  ``Session`` and ``busrep.integrations.sqlalchemy.write``, one thread
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import orjson
import psycopg
import setting
from rows import make_tables
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import busrep
import busrep.sync
from busrep.integrations.sqlalchemy import write

BUSINESS = "INSERT INTO business (state) VALUES ('paid')"
OUTBOX = "INSERT INTO outbox (row) VALUES (%s)"


@attrs.define
class Row:
    number: int
    state: str


rows = busrep.Stream("rows", Row)


def payload(number: int) -> str:
    return orjson.dumps([number, "paid"]).decode()


async def several(bus: busrep.Bus | None, connections: list[psycopg.AsyncConnection[Any]], transactions: int) -> None:
    async def one(connection: psycopg.AsyncConnection[Any], number: int) -> None:
        async with connection.transaction():
            await connection.execute(BUSINESS)
            if bus is None:
                await connection.execute(OUTBOX, (payload(number),))
            else:
                async with bus.write(rows, connection=connection) as fact:
                    fact.add(Row(number, "paid"))

    async def loop(connection: psycopg.AsyncConnection[Any]) -> None:
        for number in range(transactions // len(connections)):
            await one(connection, number)

    await asyncio.gather(*map(loop, connections))
    if bus is not None:
        await bus.settle()


def in_a_thread(bus: busrep.sync.Bus | None, connection: psycopg.Connection[Any], transactions: int) -> None:
    for number in range(transactions):
        with connection.transaction():
            connection.execute(BUSINESS)
            if bus is None:
                connection.execute(OUTBOX, (payload(number),))
            else:
                with bus.write(rows, connection=connection) as fact:
                    fact.add(Row(number, "paid"))
    if bus is not None:
        bus.settle()


def in_a_session(bus: busrep.sync.Bus | None, engine: Engine, transactions: int) -> None:
    business, outbox = text(BUSINESS), text("INSERT INTO outbox (row) VALUES (:row)")
    for number in range(transactions):
        with Session(engine) as session:
            session.execute(business)
            if bus is None:
                session.execute(outbox, {"row": payload(number)})
            else:
                with write(bus, session, rows) as fact:
                    fact.add(Row(number, "paid"))
            session.commit()
    if bus is not None:
        bus.settle()


@attrs.define
class Taken:
    """Seconds a transaction, on the clock and of the processor, of each round."""

    clock: list[float] = attrs.field(factory=list)
    processor: list[float] = attrs.field(factory=list)

    def note(self, started: float, cpu: float, transactions: int) -> None:
        self.clock.append((time.monotonic() - started) / transactions)
        self.processor.append((time.process_time() - cpu) / transactions)


found: dict[str, dict[str, Any]] = {}


def report(title: str, bare: Taken, bus: Taken) -> None:
    speed = median(a / b for a, b in zip(bare.clock, bus.clock, strict=True))
    price = median(b / a for a, b in zip(bare.processor, bus.processor, strict=True))
    print(
        f"{title:12} bare {1 / median(bare.clock):8,.0f}/s   busrep {1 / median(bus.clock):8,.0f}/s ({speed:.2f}x)   "
        f"processor {1e6 * median(bare.processor):6,.0f} us and {1e6 * median(bus.processor):6,.0f} us ({price:.2f}x)",
        flush=True,
    )
    found[title] = {"bare": [1 / one for one in bare.clock], "busrep": [1 / one for one in bus.clock]}
    found[f"{title}, processor"] = {"bare": bare.processor, "busrep": bus.processor}


async def on_a_loop(redis: str, url: str, given: argparse.Namespace) -> None:
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(given.at_a_time)]
    bare, joined = Taken(), Taken()
    async with busrep.connect(redis, name="bench", streams=[rows], store=url, writer="loop") as bus:
        for _ in range(given.rounds):
            for taken, made in ((bare, None), (joined, bus)):
                started, cpu = time.monotonic(), time.process_time()
                await several(made, connections, given.transactions)
                taken.note(started, cpu, given.transactions)
    report("psycopg", bare, joined)
    for connection in connections:
        await connection.close()


def in_threads(redis: str, url: str, given: argparse.Namespace) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with (
        busrep.sync.connect(redis, name="bench", streams=[rows], store=url, writer="threads") as bus,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        contenders: dict[str, Callable[[Any], None]] = {
            "threads": lambda made: in_a_thread(made, connection, given.transactions),
            "sqlalchemy": lambda made: in_a_session(made, engine, given.transactions),
        }
        for title, run in contenders.items():
            bare, joined = Taken(), Taken()
            for _ in range(given.rounds):
                for taken, made in ((bare, None), (joined, bus)):
                    started, cpu = time.monotonic(), time.process_time()
                    run(made)
                    taken.note(started, cpu, given.transactions)
            report(title, bare, joined)
    engine.dispose()


async def make_all_tables(url: str) -> None:
    await make_tables(url, rows)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("CREATE TABLE business (id bigserial PRIMARY KEY, state text NOT NULL)")
        await connection.execute("CREATE TABLE outbox (id bigserial PRIMARY KEY, row text NOT NULL)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=300, help="of each contender in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-a-time", type=int, default=8, help="connections of psycopg's")
    setting.add_json(parser)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack)
        asyncio.run(make_all_tables(postgres.url))
        asyncio.run(on_a_loop(redis.url, postgres.url, given))
        in_threads(redis.url, postgres.url, given)
    setting.write(given, found)


if __name__ == "__main__":
    main()
