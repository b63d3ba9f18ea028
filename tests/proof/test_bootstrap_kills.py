"""Either channel of a bootstrap dies, and the reader itself, in every state: it goes on, and nothing is lost.

``python -m tests.proof.test_bootstrap_kills`` prints the table of docs/bootstrap.md, which holds what each cell must
give: the part that is applied first after the death. A cell is a reader process that stops in one state, what dies
there, writers that go on meanwhile, and a comparison of all that the reader got with the table, byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.processes import free_port
from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis
from tests import ROOT
from tests.shop import Order, orders

from .bootstrap_child import PART_ROWS, SETTINGS, TABLES, ReaderProcess

PARTS = 6
FACT_ROWS = 5
DOCS = ROOT / "docs" / "bootstrap.md"
SECRET = "kills"
# Seconds that a cell may take.
PATIENCE = 60.0
# Of an answer of the source passes before it is cut off in its middle, bytes. An agreement is short, a part has 2 kB.
IN_AN_AGREEMENT, IN_A_PART = 20, 1_000

# State -> where the reader stops when its source dies, and where when anything else does.
MIDDLE, LAST = PARTS // 2, PARTS - 1
STATES = {
    "requested": ("agree", "agree"),
    "agreed": ("begin", "begin"),
    "loading, first part": ("load 0", "apply 0"),
    "loading, middle part": (f"load {MIDDLE}", f"apply {MIDDLE}"),
    "loading, last part": (f"load {LAST}", f"apply {LAST}"),
    "a part was committed": (f"committed {MIDDLE}", f"committed {MIDDLE}"),
    "draining": ("handle", "handle"),
}
SOURCE_DEATHS = ("link cut", "link silent", "backend terminated", "server killed")
OTHER_DEATHS = ("Redis link cut", "Redis restarted", "reader killed")
DEATHS = {
    "table": ("backend terminated", "link cut", "link silent", *OTHER_DEATHS),
    "http": ("server killed", "link cut", "link silent", *OTHER_DEATHS),
    "sqlite": OTHER_DEATHS,
}


@attrs.frozen
class Cell:
    deployment: str
    state: str
    death: str

    @property
    def hold(self) -> str:
        return STATES[self.state][0 if self.death in SOURCE_DEATHS else 1]

    @property
    def state_name(self) -> str:
        return "loading" if self.state == "a part was committed" else self.state.partition(",")[0]

    def __str__(self) -> str:
        return f"{self.deployment}-{self.state}-{self.death}".replace(", ", "-").replace(" ", "_")


CELLS = [
    Cell(deployment, state, death) for deployment, deaths in DEATHS.items() for state in STATES for death in deaths
]

# Of each kind of death one deployment, in every state: the suite's short form. BUSREP_KILLS=all runs every cell.
SHORT = {
    ("table", "backend terminated"), ("table", "Redis link cut"), ("table", "reader killed"),
    ("http", "server killed"), ("http", "link cut"), ("sqlite", "reader killed"),
}  # fmt: skip
CHOSEN = [cell for cell in CELLS if os.environ.get("BUSREP_KILLS") == "all" or (cell.deployment, cell.death) in SHORT]


@attrs.frozen
class Outcome:
    """What became of a bootstrap. ``applied``: the parts in the order of their commits."""

    applied: Sequence[int]
    before: int
    from_snapshot: int
    after_it: int
    lost: int
    extra: int
    equal: bool

    @property
    def text(self) -> str:
        """Of the table: how it went on."""
        if list(self.applied) == list(range(len(self.applied))):
            return f"part {self.before}" if self.before < len(self.applied) else "all applied"
        return "restarted" if self.applied.count(0) > 1 else f"parts {self.applied}"


# -- what is round the reader ----------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Shop:
    """Two writers, a table, and the ways to them that can be cut."""

    facts: str
    """URL of the table."""
    target: str
    """URL of the reader's own database."""
    buses: Sequence[busrep.Bus]
    redis: RedisServer
    redis_link: FaultyLink
    source_link: FaultyLink | None
    server: Server | None
    task: dict[str, Any]
    numbers: Iterator[int] = attrs.field(factory=lambda: iter(range(10**9)))
    last: dict[str, int] = attrs.field(factory=dict)

    async def write(self, rows: int) -> None:
        for at in range(rows // FACT_ROWS):
            bus = self.buses[at % 2]
            async with bus.write(orders) as fact:
                for _ in range(FACT_ROWS):
                    fact.add(Order(next(self.numbers), 'odd \\ "and" \u00e9'))
            assert bus.writer is not None
            self.last[bus.writer] = fact.id

    async def proven(self) -> None:
        """Until what was written is proven: a snapshot taken before would end earlier."""
        store = open_store(self.facts, Registry([orders]))
        await store.open()
        try:
            # A writer with nothing open follows the others' IDs: it may be further than its own last one.
            while any(one.position < self.last[one.writer] for one in await store.known()):
                await asyncio.sleep(0.01)  # the writers prove it with their next beat, which nobody tells of
        finally:
            await store.close()

    def query(self, url: str, sql: str) -> list[tuple[Any, ...]]:
        if url.startswith("sqlite:///"):
            with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db:
                return db.execute(sql).fetchall()
        with psycopg.connect(url, autocommit=True) as connection:
            return connection.execute(sql.encode()).fetchall()

    def applied(self) -> list[int]:
        return [number for (number,) in self.query(self.target, "SELECT number FROM parts ORDER BY at")]

    def outcome(self, before: int) -> Outcome:
        found = self.query(self.facts, "SELECT id, writer, row FROM busrep_facts WHERE stream = 'orders'")
        table = {(token, writer, *_row(row)) for token, writer, row in found}
        got = self.query(self.target, "SELECT token, writer, number, status, via FROM got")
        mirrored = {one[:4] for one in got}
        assert len(mirrored) == len(got)
        return Outcome(
            applied=self.applied(),
            before=before,
            from_snapshot=sum(one[4] == "part" for one in got),
            after_it=sum(one[4] == "batch" for one in got),
            lost=len(table - mirrored),
            extra=len(mirrored - table),
            equal=_hash(table) == _hash(mirrored),
        )


def _row(row: Any) -> list[Any]:
    return json.loads(row) if isinstance(row, str | bytes) else list(row)


def _hash(rows: set[Any]) -> str:
    return hashlib.sha256("".join(f"{row}\n" for row in sorted(rows)).encode()).hexdigest()


@attrs.define(eq=False)
class Server:
    """`busrep serve --http` on one port, which may be killed and started again."""

    command: Sequence[str]
    url: str
    folder: Path  # of its temporary files: who is killed leaves them
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "busrep.cli", *self.command,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(self.folder)},
        )  # fmt: skip
        assert self.process.stdout is not None
        assert b"listening" in await self.process.stdout.readline()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def opened(cell: Cell, redis: RedisServer, facts: str, folder: Path, name: str) -> AsyncIterator[Shop]:
    async with contextlib.AsyncExitStack() as stack:
        store = open_store(facts, Registry([orders]))
        await store.init()
        redis_link = await stack.enter_async_context(FaultyLink(redis.url))
        server, source_link = None, None
        task: dict[str, Any] = {"redis": redis_link.url, "name": name, "process": 1}
        task |= {"store": facts, "source": facts, "target": facts}
        # A source that says nothing for so long is given up; where none falls silent nothing depends on it.
        task["patience"] = 1.0 if cell.death == "link silent" else 20.0
        if cell.deployment != "table":
            task["target"] = f"sqlite:///{folder / 'reader.db'}"
            await open_store(task["target"], Registry([orders])).init()
        if cell.deployment == "http":
            server = await _serve(facts, folder, stack)
            task["store"] = server.url
        if cell.deployment != "sqlite":
            source_link = await stack.enter_async_context(FaultyLink(server.url if server else facts))
            task["source"] = source_link.url + ("" if server else "?application_name=snapshots")
        buses = [
            await stack.enter_async_context(
                busrep.connect(redis.url, name=name, streams=[orders], store=facts, writer=writer, settings=SETTINGS)
            )
            for writer in ("w1", "w2")
        ]
        shop = Shop(facts, task["target"], buses, redis, redis_link, source_link, server, task)
        make_tables(task["target"])
        yield shop


async def _serve(facts: str, folder: Path, stack: contextlib.AsyncExitStack) -> Server:
    (folder / "secret").write_text(SECRET)
    port = free_port()
    arguments = ["--http", f"127.0.0.1:{port}", "--store", facts, "--secret-file", str(folder / "secret"), "--json"]
    server = Server(["serve", *arguments], f"http://:{SECRET}@127.0.0.1:{port}", folder)
    stack.push_async_callback(server.kill)
    await server.start()
    return server


def make_tables(target: str) -> None:
    if target.startswith("sqlite:///"):
        with contextlib.closing(sqlite3.connect(target.removeprefix("sqlite:///"))) as db:
            for sql in TABLES:
                db.execute(sql)
    else:
        with psycopg.connect(target, autocommit=True) as connection:
            for sql in TABLES:
                connection.execute(sql)


# -- deaths ----------------------------------------------------------------------------------------------------------


async def die(cell: Cell, shop: Shop, reader: ReaderProcess) -> None:
    """Something dies while the reader is held, it is let go, and what died comes back, if it can."""
    link, go = shop.source_link, lambda: reader.tell(go=cell.hold)
    felt = cell.state not in ("draining", "a part was committed")
    match cell.death:
        case "backend terminated":
            await asyncio.to_thread(_terminate, shop.facts)
            go()
        case "server killed":
            assert shop.server is not None
            await shop.server.kill()
            go()
            await shop.write(10 * FACT_ROWS)
            await shop.server.start()
        case "link cut" if felt:
            assert link is not None
            happened = link.cut_after(IN_AN_AGREEMENT if cell.hold == "agree" else IN_A_PART)
            go()
            await asyncio.wrap_future(happened)
        case "link cut":
            assert link is not None
            link.cut()
            go()
        case "link silent":
            assert link is not None
            link.black_hole()
            go()
            if felt and cell.state != "requested":
                await reader.until("failed")
            else:  # an agreement may take long, and so is waited for long: somebody resets the link at last
                await shop.write(10 * FACT_ROWS)
                link.cut()
            link.heal()
        case "Redis link cut":
            shop.redis_link.cut()
            go()
        case "Redis restarted":
            await asyncio.to_thread(shop.redis.restart)
            go()
        case "reader killed":
            await reader.kill()


def _terminate(url: str) -> None:
    sql = b"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'snapshots'"
    with psycopg.connect(url, autocommit=True) as connection:
        assert all(gone for (gone,) in connection.execute(sql))


async def run_cell(cell: Cell, redis: RedisServer, facts: str, folder: Path, name: str) -> Outcome:
    async with asyncio.timeout(PATIENCE), opened(cell, redis, facts, folder, name) as shop:
        await shop.write(PARTS * PART_ROWS)
        await shop.proven()
        # What is to be drained has to come while the last part is applied.
        first = [f"apply {LAST}"] if cell.state == "draining" else []
        async with ReaderProcess.start(**shop.task, holds=[*first, cell.hold]) as reader:
            for hold in first:
                await reader.until("held", hold)
                await shop.write(10 * FACT_ROWS)
                reader.tell(hear=shop.last)
                await reader.until("heard")
                reader.tell(go=hold)
            await reader.until("held", cell.hold)
            if (part := re.fullmatch(r"load (\d+)", cell.hold)) and int(part[1]):
                await reader.until("applied", int(part[1]) - 1)
            await reader.until("state", cell.state_name)
            assert reader.state == cell.state_name
            await shop.write(10 * FACT_ROWS)
            before = len(shop.applied())
            await die(cell, shop, reader)
            await shop.write(10 * FACT_ROWS)
            if cell.death != "reader killed":
                await finish(shop, reader)
        if cell.death == "reader killed":
            async with ReaderProcess.start(**{**shop.task, "process": 2}, holds=[]) as reader:
                await finish(shop, reader)
        return shop.outcome(before)


async def finish(shop: Shop, reader: ReaderProcess) -> None:
    await shop.write(2 * FACT_ROWS)
    reader.tell(reach=shop.last)
    await reader.until("reached")


# -- the tests -------------------------------------------------------------------------------------------------------


def documented(text: str) -> dict[Cell, str]:
    """What the tables of the page say; each stands under its deployment's name."""
    found = {}
    for deployment in DEATHS:
        table = re.search(rf"<!-- kills: {deployment} -->\n((?:\|.*\n)+)", text)
        assert table is not None, deployment
        lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table[1].splitlines()]
        for state, *outcomes in lines[2:]:
            for death, outcome in zip(lines[0][1:], outcomes, strict=True):
                found[Cell(deployment, state, death)] = outcome
    return found


def rendered(outcomes: dict[Cell, str]) -> Iterator[str]:
    for deployment, deaths in DEATHS.items():
        yield f"<!-- kills: {deployment} -->"
        yield f"| state | {' | '.join(deaths)} |"
        yield "|---" * (len(deaths) + 1) + "|"
        for state in STATES:
            yield f"| {state} | {' | '.join(outcomes[Cell(deployment, state, death)] for death in deaths)} |"
        yield ""


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """One that may be restarted."""
    with start_redis() as server:
        yield server


@pytest.mark.servers
@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_a_death(cell: Cell, own_redis: RedisServer, tmp_path: Path, bus_name: str, request: Any) -> None:
    facts = request.getfixturevalue("sqlite_url" if cell.deployment == "sqlite" else "postgres_url")
    outcome = asyncio.run(run_cell(cell, own_redis, facts, tmp_path, bus_name))
    assert (outcome.lost, outcome.extra, outcome.equal) == (0, 0, True)
    assert outcome.text == documented(DOCS.read_text())[cell]


def test_the_table_of_the_docs_has_every_cell() -> None:
    assert set(documented(DOCS.read_text())) == set(CELLS)


def main() -> None:
    outcomes: dict[Cell, Outcome] = {}
    with start_redis() as redis, start_postgres() as postgres:
        for number, cell in enumerate(CELLS):
            with tempfile.TemporaryDirectory() as folder, _database(postgres, f"kills_{number}") as url:
                facts = f"sqlite:///{folder}/facts.db" if cell.deployment == "sqlite" else url
                outcomes[cell] = found = asyncio.run(run_cell(cell, redis, facts, Path(folder), f"kills-{number}"))
            print(f"{cell}: {found.text}, {found}", file=sys.stderr, flush=True)
    print("\n".join(rendered({cell: outcome.text for cell, outcome in outcomes.items()})))
    rows = sum(one.from_snapshot + one.after_it for one in outcomes.values())
    lost, unequal = sum(one.lost for one in outcomes.values()), sum(not one.equal for one in outcomes.values())
    print(f"{len(outcomes)} deaths, {rows:,} rows, lost {lost}, not equal {unequal}")


@contextlib.contextmanager
def _database(postgres: PostgresServer, name: str) -> Iterator[str]:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield postgres.database_url(name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


if __name__ == "__main__":
    main()
