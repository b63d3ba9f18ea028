"""What a fact, a row and a join cost, counted: a machine's speed and its neighbours change nothing here.

A figure above its bound is a regression. Lower the bound when a figure got smaller.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

import busrep
from busrep.core.framing import Rows, parse_frame
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.pair import MemoryDeployment
from busrep.testing.virtual import run
from tests.shop import Order, opened_async_store, orders

# No beat, and no timed save, comes while something is counted.
STILL = busrep.Settings(heartbeat=600.0, save_every=600.0)

# Calls of functions, Python's and C's, in CPython 3.11, and a tenth more: other versions make fewer.
CALLS_A_ROW = {100: 2.2, 450: 1.34}
CALLS_A_FACT = 1_070

ROUND_TRIPS_A_FACT = 2  # the IDs, then all of a transaction: BEGIN with the claim, INSERT, COMMIT
# Messages when a reader joins so many writers: its own question, and an answer of each where they are two at most. Of
# more, those that have nothing new to say answer with their next beat, which comes anyway.
PUBLISHED_AT_A_JOIN = {1: 2, 2: 3, 10: 1, 40: 1}
# Of one process to PostgreSQL, by how many facts were open at a time, none of which ran a statement: for questions.
CONNECTIONS = {1: 2, 100: 5}
# PostgreSQL has 2**32 members of multixacts between two vacuums of all its tables. It takes one for each transaction
# that holds a row which another one locks as well.
MEMBERS_A_FACT = 0.0
# Its rows: autovacuum may make the maps of free space and visibility meanwhile, 32 KiB, once.
SIZE = "SELECT pg_relation_size('busrep_positions')"
BYTES_A_BEAT = 100  # by which busrep_positions grows while an old snapshot is open, such as that of pg_dump


class Turns:
    """A proxy of a PostgreSQL server. ``count``: how often the server was ready for the next question, all answers to
    one flush of the client's being sent: its round trips."""

    def __init__(self, url: str) -> None:
        self.server = urlsplit(url)
        self.count = 0

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """The URL to connect to in its place."""
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            listening = await asyncio.start_server(
                lambda *link: tasks.append(group.create_task(self._relay(*link))), "127.0.0.1"
            )
            port = listening.sockets[0].getsockname()[1]
            try:
                yield urlunsplit(
                    self.server._replace(netloc=f"{self.server.netloc.rpartition('@')[0]}@127.0.0.1:{port}")
                )
            finally:
                listening.close()
                for task in tasks:
                    task.cancel()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, server = await asyncio.open_connection(self.server.hostname, self.server.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask(reader, server))
                group.create_task(self._answer(answers, writer))
        finally:
            server.close()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            server.write(data)
        server.write_eof()

    async def _answer(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # it has ended
            while (kind := await answers.readexactly(1)) == b"N":  # no TLS: one byte, before all else
                writer.write(kind)
            while True:
                length = await answers.readexactly(4)
                body = await answers.readexactly(int.from_bytes(length) - 4)
                self.count += kind == b"Z"  # ReadyForQuery
                writer.write(kind + length + body)
                kind = await answers.readexactly(1)


@pytest.mark.servers
def test_the_round_trips_of_a_fact(redis_url: str, bus_name: str, postgres_url: str) -> None:
    """A fact in a transaction of busrep's own on PostgreSQL, one at a time."""

    async def count() -> float:
        store = open_store(postgres_url, Registry([orders]))
        await store.init()
        await store.close()
        turns = Turns(postgres_url)
        async with turns.opened() as url:
            bus = busrep.connect(redis_url, name=bus_name, streams=[orders], store=url, writer="w1", settings=STILL)
            async with bus:
                await write(bus, 40)  # every connection is open, and has prepared what it asks often
                found = []
                for _ in range(3):  # on a busy machine the pool may open one more connection meanwhile
                    before = turns.count
                    await write(bus, 20)
                    found.append((turns.count - before) / 20)
                return min(found)

    assert asyncio.run(count()) == ROUND_TRIPS_A_FACT


@contextlib.asynccontextmanager
async def bus_beside(
    redis_url: str, bus_name: str, postgres_url: str
) -> AsyncIterator[tuple[busrep.Bus, psycopg.AsyncConnection[Any]]]:
    """A bus that writes, on tables that were made for it, and a connection of the test's own to the same database."""
    store = open_store(postgres_url, Registry([orders]))
    await store.init()
    await store.close()
    async with (
        busrep.connect(
            redis_url, name=bus_name, streams=[orders], store=postgres_url, writer="w1", settings=STILL
        ) as bus,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as own,
    ):
        yield bus, own


async def figure(own: psycopg.AsyncConnection[Any], question: LiteralString) -> int:
    """The one number that the database answers."""
    found = await (await own.execute(question)).fetchone()
    assert found is not None
    return int(found[0])


async def write(bus: busrep.Bus, count: int) -> None:
    for number in range(count):
        async with bus.write(orders) as fact:
            fact.add(Order(number, "paid"))


@pytest.mark.servers
@pytest.mark.parametrize("facts", CONNECTIONS)
def test_the_connections_of_a_process(redis_url: str, bus_name: str, postgres_url: str, facts: int) -> None:
    """Of one that reads and writes, after so many facts were open at a time; they stay for a while."""

    async def count() -> int:
        async with bus_beside(redis_url, bus_name, postgres_url) as (bus, own):
            bus.subscribe(orders)(lambda batch: None)
            await asyncio.gather(*(write(bus, 1) for _ in range(facts)))
            return await others_of(own)

    assert asyncio.run(count()) <= CONNECTIONS[facts]


async def others_of(own: psycopg.AsyncConnection[Any]) -> int:
    """How many connections to this database there are but ``own``; autovacuum's workers are in the list, too."""
    return await figure(
        own,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'",
    )


@pytest.mark.servers
def test_an_idle_process_keeps_one_connection(
    redis_url: str, bus_name: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busrep.stores.postgres.store.IDLE", 0.2)

    async def main() -> None:
        async with asyncio.timeout(60), bus_beside(redis_url, bus_name, postgres_url) as (bus, own):
            bus.subscribe(orders)(lambda batch: None)
            together = asyncio.Barrier(3)

            async def hold(number: int) -> None:
                async with bus.write(orders) as fact:
                    fact.add(Order(number, "new"))
                    await fact.execute("SELECT 1")
                    await together.wait()
                    await together.wait()

            facts = asyncio.gather(hold(1), hold(2))
            await together.wait()
            assert await others_of(own) > 1  # while both are open: those that nobody uses may be closed already
            await together.wait()
            await facts
            while await others_of(own) != 1:
                await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.servers
def test_questions_one_behind_the_other_keep_one_connection(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an idle reader asks them, at one beat in five: one that is on its way back to the pool is waited for."""
    monkeypatch.setattr("busrep.stores.postgres.store.IDLE", 1.0)

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            opened_async_store(postgres_url, Registry([orders])) as store,
            await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as own,
        ):
            pool: Any = vars(store)["questions"]
            await pool.wait()  # it dials another connection for whoever asks before its first one is there
            taken = [await pool.getconn() for _ in range(2)]
            assert await others_of(own) == 2
            for one in taken:
                await pool.putconn(one)
            while await others_of(own) != 1:
                for _ in range(3):
                    await store.known()

    asyncio.run(main())


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["appended", "with a statement", "in the caller's transaction"])
def test_the_multixact_members_of_a_fact(redis_url: str, bus_name: str, postgres_url: str, kind: str) -> None:
    """Of several that are open at a time."""
    together = asyncio.Barrier(8)

    async def one(bus: busrep.Bus) -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await connection.execute("SELECT 1")
            joined = connection if kind == "in the caller's transaction" else None
            async with bus.write(orders, connection=joined) as fact:
                if kind == "with a statement":
                    await fact.execute("SELECT 1")
                fact.add(Order(1, "paid"))
                await together.wait()

    async def count() -> float:
        async with bus_beside(redis_url, bus_name, postgres_url) as (bus, own):
            before = await members(own)
            await asyncio.gather(*(one(bus) for _ in range(together.parties)))
            await bus.settle()
            assert bus.statistics()["writer"]["facts"] == together.parties
            return (await members(own) - before) / together.parties

    async def members(own: psycopg.AsyncConnection[Any]) -> int:
        await own.execute("CHECKPOINT")
        return await figure(own, "SELECT next_multi_offset::text::bigint FROM pg_control_checkpoint()")

    assert asyncio.run(count()) <= MEMBERS_A_FACT


@pytest.mark.servers
def test_what_a_beat_leaves_while_an_old_snapshot_is_open(postgres_url: str) -> None:
    """Nothing that it replaces can be reused then, so autovacuum would find nothing to do.

    It is off for this table: while it creates the table's map of free space it waits for the lock on the end of the
    table, and PostgreSQL adds 20 pages for each process that waits there.
    """

    async def count() -> float:
        async with (
            opened_async_store(postgres_url, Registry([orders])) as store,
            await psycopg.AsyncConnection.connect(postgres_url) as old,
        ):
            await old.execute("ALTER TABLE busrep_positions SET (autovacuum_enabled = off)")
            await old.commit()
            claim = await store.claim("w1", ["orders"], timeout=30.0)
            await old.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await old.execute("SELECT FROM busrep_positions")
            before = await figure(old, SIZE)
            for _ in range(1_000):
                await store.heartbeat(claim, claim.starts, registry=False)
            return (await figure(old, SIZE) - before) / 1_000

    assert 0 < asyncio.run(count()) <= BYTES_A_BEAT


@pytest.mark.parametrize("writers", PUBLISHED_AT_A_JOIN)
def test_the_messages_of_a_join(writers: int) -> None:
    """One reader connects to a deployment at rest: each message goes to every process."""
    seldom = busrep.Settings(heartbeat=1e6, save_every=1e6)  # that a beat comes while it is counted: one in 25,000 runs

    async def count() -> int:
        async with MemoryDeployment(orders, settings=seldom) as deployment, contextlib.AsyncExitStack() as stack:
            for number in range(writers):
                bus = await stack.enter_async_context(deployment.bus(writer=f"w{number}"))
                await write(bus, 1)
            await asyncio.sleep(10e6)  # each has read the registry at a beat
            before = len(deployment.redis.published)
            await stack.enter_async_context(deployment.bus())
            await asyncio.sleep(1)
            return len(deployment.redis.published) - before

    assert run(count()) <= PUBLISHED_AT_A_JOIN[writers]


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """[how many functions were called], Python's and C's, once the block has ended. Of one thread.

    The garbage collector is off meanwhile: it calls finalizers and callbacks of what earlier tests left.
    """
    found, count = [0], 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
        found[0] = count


@pytest.mark.parametrize("rows", CALLS_A_ROW)
def test_the_calls_of_a_row_that_is_read(rows: int) -> None:
    """From the bytes of a frame to typed rows."""
    lines = [b"NAME w1 7", b"POSITION orders w1 1000 1000"]
    lines += [b"RDATA orders w1 %d %b" % (1001 + at, orders.encode(Order(at, "paid"))) for at in range(rows)]
    frame = b"\n".join(lines)

    def decode() -> None:
        run_of_rows = parse_frame(frame, 1 << 24).items[2]
        assert isinstance(run_of_rows, Rows)
        assert len(orders.decode(run_of_rows.payloads)) == rows

    decode()
    with counted_calls() as found:
        decode()
    assert found[0] / rows < CALLS_A_ROW[rows]


def test_the_calls_of_a_fact() -> None:
    """From the block of ``bus.write`` to the handler of a reader in the same process, on a table in memory."""

    async def count() -> float:
        got = 0
        async with (
            MemoryDeployment(orders, settings=STILL) as deployment,
            deployment.bus(writer="w1") as writer,
            deployment.bus() as reader,
        ):

            @reader.subscribe(orders)
            def handle(batch: busrep.Batch[Order]) -> None:
                nonlocal got
                got += len(batch.rows)

            await asyncio.sleep(1)
            await write(writer, 3)
            await asyncio.sleep(1)
            with counted_calls() as found:
                await write(writer, 20)
                await asyncio.sleep(1)
            assert got == 23
            return found[0] / 20

    assert run(count()) < CALLS_A_FACT
