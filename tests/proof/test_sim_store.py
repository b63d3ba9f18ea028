"""The simulated database: the stores' conformance suite over it, the same interleavings as on PostgreSQL, its faults.

Of the suite's cases for SQL databases those are left out that need an application's own tables, other processes, or
SQL that no plan of busrep's uses (DROP TABLE).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import attrs
import psycopg
import pytest

from busrep import Settings
from busrep.core.catchup import FetchUpdates
from busrep.core.snapshots import Agreement
from busrep.errors import (
    ClaimBlocked,
    CommitUnknown,
    ConfigError,
    ReaderMoved,
    SchemaError,
    StatementRefused,
    Unavailable,
    WriterFenced,
)
from busrep.stores import claims, facts, fencing, open_store, readers
from busrep.stores.dialect import backing_of
from busrep.stores.interface import Claim
from busrep.stores.plans import Answers, Control, Plan, Signal, Sql, Step
from busrep.stores.postgres.dialect import PostgresDialect, sequence_name
from busrep.streams import Registry, Stream
from tests.proof.sim import virtual
from tests.proof.sim.database import Path, SimConnection, SimDatabase, SimError
from tests.proof.sim.statements import known
from tests.proof.sim.store import SimStore
from tests.stores.store_conformance import PATIENCE, StoreConformance, generic, page, read, row, write
from tests.stores.test_stores import SqlConformance, nested

BEGIN, SNAPSHOT, COMMIT, ROLLBACK = Control.BEGIN, Control.SNAPSHOT, Control.COMMIT, Control.ROLLBACK
DIALECT = PostgresDialect()


class TestSimulated(StoreConformance):
    has_clock = True

    def server_time(self) -> float:
        return 1.7e9 + self.database.wall()

    @pytest.fixture
    def url(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        monkeypatch.setattr(asyncio, "run", virtual.run)  # what the suite runs its tests with
        self.database, self.dice = SimDatabase(), random.Random(1)
        yield "simulated"
        assert self.database.violations == []

    def make(self, url: str, registry: Registry | None = None) -> SimStore:
        return SimStore(registry or generic(), Settings(), Path(self.database, self.dice))

    def sql(self, url: str, text: str) -> list[tuple[Any, ...]]:
        """A statement of the suite's from outside, whose session lives as long as it takes."""
        path = Path(self.database, self.dice)
        found: list[tuple[Any, ...]] = []

        async def run() -> None:
            connection = await path.connect()
            found.extend(await connection.execute(text))
            await connection.close()

        self.started = asyncio.get_running_loop().create_task(run())
        return found

    def set_sequence(self, url: str, stream: str, value: int) -> None:
        self.database.state.sequences[sequence_name(stream)].given = value

    test_9_5_rows_above = SqlConformance.test_9_5_rows_above_the_sequence_count_in_the_final_position
    test_9_9_a_replica = SqlConformance.test_9_9_a_replica_proves_only_what_its_positions_row_says
    test_9_15_repaired = SqlConformance.test_9_15_a_sequence_behind_the_table_is_repaired
    test_G12_jumped = SqlConformance.test_G12_a_jumped_sequence_proves_nothing
    test_set_back = SqlConformance.test_a_database_set_back_to_an_older_state

    def test_9_4_facts_may_nest_while_a_successor_waits(self, url: str) -> None:
        asyncio.run(nested(self, url))


# --- the same interleavings, on PostgreSQL and on the simulation


@attrs.frozen
class Do:
    """A session sends steps in one round trip; ``wakes``: others that waited, and go on because of it."""

    session: str
    steps: tuple[Step, ...] | Callable[[list[Any]], tuple[Step, ...]]
    wakes: tuple[str, ...] = ()


def do(session: str, *steps: Any, wakes: str = "") -> Do:
    found = steps[0] if callable(steps[0]) else steps
    return Do(session, found, tuple(wakes))


def state_of(error: BaseException) -> str:
    """The SQLSTATE under whatever busrep made of the error."""
    while not isinstance(error, SimError | psycopg.Error):
        error = error.cause if isinstance(error, Signal) else error.reason  # type: ignore[attr-defined]
    return f"error {error.sqlstate}"


class OnPostgres:
    """Sessions on a real server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self) -> Any:
        return open_store(self.url, generic())

    async def connect(self, name: str) -> Any:
        connection = await psycopg.AsyncConnection.connect(self.url, autocommit=True)
        if name == "b":  # who looks for a deadlock first is its victim: on a slow machine too that is "a"
            await connection.execute("SET deadlock_timeout = '1min'")
        return connection

    async def run(self, connection: Any, steps: tuple[Step, ...]) -> Answers:
        from busrep.stores.postgres.steps import execute_steps

        return await execute_steps(connection, steps)

    async def settled(self, connection: Any, task: asyncio.Task[Any]) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as watch:
            while not task.done():
                cursor = await watch.execute(
                    "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'",
                    (connection.info.backend_pid,),
                )
                if await cursor.fetchall():
                    return
                await asyncio.sleep(0.005)


class Simulated:
    """Sessions on the simulation."""

    def __init__(self) -> None:
        self.database, self.dice = SimDatabase(), random.Random(3)

    def store(self) -> SimStore:
        return SimStore(generic(), Settings(), Path(self.database, self.dice))

    async def connect(self, name: str) -> SimConnection:
        return await Path(self.database, self.dice).connect()

    async def run(self, connection: SimConnection, steps: tuple[Step, ...]) -> Answers:
        return await connection.run(steps)

    async def settled(self, connection: SimConnection, task: asyncio.Task[Any]) -> None:
        while not task.done() and connection.session.wait is None:
            await asyncio.sleep(0.001)


async def played(side: OnPostgres | Simulated, script: Sequence[Do]) -> list[Any]:
    """What each session was answered, in order; transaction IDs by their order of appearance."""
    store = side.store()
    await store.init()
    await store.open()
    with mock.patch("time.time_ns", return_value=1):  # what the scripts know this incarnation as
        claim = await store.claim("w1", ["orders", "payments"], timeout=1)
    assert claim.incarnation == HELD.incarnation
    await write(store, claim, 1, 2, 1)
    await store.heartbeat(claim, {"orders": 3})
    for writer in ("w1", "w2"):
        await store.register_reader("r", {("orders", writer): 0}, "e" * 32)
    await store.close()
    async with contextlib.AsyncExitStack() as stack:
        connections = {}
        for name in dict.fromkeys(one.session for one in script):
            connections[name] = await side.connect(name)
            stack.push_async_callback(connections[name].close)
        running: dict[str, asyncio.Task[Any]] = {}
        raw: list[Any] = []
        seen: list[Any] = []

        async def outcome(name: str) -> None:
            (found,) = await asyncio.gather(running.pop(name), return_exceptions=True)
            raw.append(found)
            seen.append((name, state_of(found) if isinstance(found, BaseException) else found))

        for one in script:
            steps = one.steps(raw) if callable(one.steps) else one.steps
            task = asyncio.ensure_future(side.run(connections[one.session], steps))
            running[one.session] = task
            await side.settled(connections[one.session], task)
            if task.done() and one.session not in one.wakes:
                await outcome(one.session)
            else:  # or it has waited, for as long as it may
                seen.append((one.session, "waits"))
            for name in one.wakes:
                async with asyncio.timeout(PATIENCE):
                    await outcome(name)
            # Whoever is not said to go on waits still.
            assert not any(other.done() for other in running.values())
        assert not running
    names: dict[str, str] = {}
    return [(name, _named(found, names)) for name, found in seen]


def _named(found: Any, names: dict[str, str]) -> Any:
    """Markers and epochs differ from server to server."""
    if isinstance(found, list | tuple):
        return [_named(each, names) for each in found]
    if isinstance(found, str) and found.endswith(("/1/w1", "/")):  # a note
        return _named(found.partition("/")[0], names)
    if isinstance(found, str) and ((found.isdigit() and len(found) > 2) or len(found) == 32):
        return names.setdefault(found, f"name {len(names)}")
    return found


HELD = Claim("w1", 1, "e" * 32, {}, {}, {})
LOCK = claims.lock_claim(DIALECT, HELD)
INCARNATION = Sql("SELECT 1 FROM busrep_writers WHERE writer = ? AND incarnation = ?", ("w1", 2))
POSITIONS = Sql("SELECT writer, position, registered FROM busrep_positions WHERE stream = ?", ("orders",))
ORDERS = backing_of(Stream("orders"))
DIALECT.streams, DIALECT.backings = Registry([Stream("orders")]), {"orders": ORDERS}


def steps_of(plan: Plan[Any], answer: list[tuple[Any, ...]] | None = None) -> tuple[Step, ...]:
    """All steps of a plan that gets the same answer to every question."""
    found: list[Step] = []
    with contextlib.suppress(StopIteration, IndexError, ValueError):  # at its end it may miss what was not answered
        steps = next(plan)
        while True:
            asked = steps if isinstance(steps, tuple) else (steps,)
            found += asked
            steps = plan.send([answer or []] * len(asked))
    return tuple(found)


def step(plan: Plan[Any], begins: str, answer: list[tuple[Any, ...]] | None = None) -> Sql:
    """The one statement of a plan that begins so."""
    (found,) = (one for one in steps_of(plan, answer) if isinstance(one, Sql) and one.text.startswith(begins))
    return found


def begun_steps() -> tuple[Step, ...]:
    """What a bootstrap that begins writes, of a reader that had w1 and w2."""
    agreement = Agreement("orders", "e" * 32, {"w1": 0}, {}, [])
    with mock.patch.object(readers, "token_hex", return_value="7" * 16):
        plan = readers.begin_bootstrap(DIALECT, "r", agreement, 1, "new")
    held = [("orders", "w1", "e" * 32), ("orders", "w2", "e" * 32)]
    next(plan)
    answers: list[Answers] = [[[]], [[]], [[("e" * 32,)], []], [held]]
    for answer in answers:
        steps = plan.send(answer)
    assert isinstance(steps, tuple)
    return tuple(one for one in steps if isinstance(one, Sql))


SHARE = (*DIALECT.share_name(HELD, claims.claim_stands(DIALECT, HELD)), claims.lock_claim(DIALECT, HELD, row=False))
STANDS = claims.claim_stands(DIALECT, HELD)
(TAKE_HELD,) = DIALECT.take_name("w1", STANDS)
TAKE, TAKE_ALL = *DIALECT.take_name("w1"), *DIALECT.take_name(None)
ROW, MARKER = Sql(*DIALECT.note_name(HELD, LOCK)), Sql(f"SELECT {DIALECT.marker}")
FENCE = step(fencing._fence(DIALECT, "w1", 1, 10), "UPDATE")
WIN = step(claims._win(DIALECT, "w9", [ORDERS], 10, 7), "INSERT INTO busrep_writers")
WIN_BACK = step(claims._win(DIALECT, "w1", [ORDERS], 10, 7), "INSERT INTO busrep_writers")
REGISTER = step(claims._win(DIALECT, "w9", [ORDERS], 10, 7), "INSERT INTO busrep_positions")
BEAT = step(claims.heartbeat(DIALECT, HELD, {"orders": 3}), "UPDATE", [("9",)])
FINISH = Sql(
    "UPDATE busrep_positions SET position = ?, registered = FALSE, finished = ? WHERE stream = ? AND writer = ?",
    (9, 1, "orders", "w1"),
)
FINALS = step(fencing._finals(DIALECT, "w1", 1, 10), "SELECT 1 FROM busrep_writers")
REPEATABLE = Sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
KNOWN = Sql("SELECT stream, writer, position FROM busrep_positions WHERE registered ORDER BY stream, writer")
IDS = DIALECT.next_ids("orders", 2)
SEQUENCE = DIALECT.sequence("orders")
RAISE = steps_of(DIALECT.raise_sequence("orders", 50))
DUPLICATE = Sql("INSERT INTO busrep_meta (key, value) VALUES ('epoch', ?)", ("x",))
FACT = DIALECT.insert(ORDERS, "w1", [(7, 0, b"[7]"), (7, 1, b"[8]")])[0]
ONE_FACT = DIALECT.insert(ORDERS, "w1", [(8, 0, b"[9]")])[0]
FETCH = next(facts.fetch(DIALECT, FetchUpdates("orders", "w1", 0, 9, 1)))
PAGE = DIALECT.page(ORDERS, "w1", 0, 9, 1)
FLOOR = Sql(
    "SELECT coalesce(max(floor), 0), coalesce(max(position), 0) FROM busrep_positions WHERE stream = ? AND writer = ?",
    ("orders", "w1"),
)
READER = step(readers.register(DIALECT, "r2", {("orders", "w1"): 4}, "e" * 32), "INSERT")
LOAD = step(readers.load(DIALECT, "r"), "SELECT stream, writer")
BEGUN = step(readers.load(DIALECT, "r"), "SELECT stream, id")
BOOTSTRAP = begun_steps()
LOADED = Sql("UPDATE busrep_bootstraps SET state = ? WHERE reader = ?", ("draining", "r"))
SLOW = DIALECT.lock_timeout(0.05)[0]


def save(*changes: tuple[str, int, int], last: str | None = None) -> Sql:
    moved = json.dumps([["orders", *change, last, '"no_sequence"', 0] for change in changes])
    return DIALECT.save("r", "e" * 32, moved, len(changes))


def pruned() -> tuple[Step, ...]:
    """Deleting all that is proven, as prune does it in the end."""
    where, params = ORDERS.of_writer("w1")
    return (
        BEGIN,
        Sql(
            "SELECT position, floor FROM busrep_positions WHERE stream = ? AND writer = ? FOR UPDATE", ("orders", "w1")
        ),
        Sql(f"DELETE FROM busrep_facts WHERE {where} AND id > ? AND id <= ?", (*params, 0, 2)),
        Sql(
            "UPDATE busrep_positions SET floor = greatest(floor, ?) WHERE stream = ? AND writer = ?",
            (2, "orders", "w1"),
        ),
        COMMIT,
    )


def asked(at: int) -> Callable[[list[Any]], tuple[Step, ...]]:
    """What has become of the transaction whose marker answer number ``at`` was."""

    def steps(raw: list[Any]) -> tuple[Step, ...]:
        question = DIALECT.outcome(raw[at][0][0][0])
        assert question is not None
        return (question,)

    return steps


def held(at: int) -> Callable[[list[Any]], tuple[Step, ...]]:
    """An insert where the transaction holds the name whose marker answer number ``at`` was."""
    return lambda raw: (DIALECT.while_held(ONE_FACT, HELD, raw[at][0][0][0].partition("/")[0]),)


INTERLEAVINGS: dict[str, list[Do]] = {
    "9.4 a name is taken when all have ended that share it": [
        do("a", BEGIN, *SHARE), do("b", BEGIN, *SHARE), do("c", BEGIN, TAKE), do("a", COMMIT),
        do("b", COMMIT, wakes="c"), do("c", COMMIT),
    ],
    "9.4 a name is not taken where another has it": [
        do("b", BEGIN, FENCE, COMMIT), do("a", BEGIN, LOCK), do("a", ROLLBACK), do("a", BEGIN, TAKE_ALL),
        do("c", BEGIN, TAKE_HELD), do("c", COMMIT), do("a", COMMIT),
    ],
    "9.4 whoever waits for a name looks once, and again behind the wait": [
        do("a", BEGIN, *SHARE), do("b", BEGIN, TAKE_HELD), do("a", FENCE), do("a", COMMIT, wakes="b"), do("b", STANDS),
        do("b", COMMIT),
    ],
    "9.4 who comes while somebody waits for a name does not share it": [
        do("a", BEGIN, *SHARE), do("b", BEGIN, TAKE), do("c", BEGIN, *SHARE), do("a", *SHARE), do("c", LOCK),
        do("a", COMMIT, wakes="b"), do("b", FENCE), do("c", COMMIT, wakes="b"), do("b", COMMIT),
    ],
    "9.4 a name that was taken is not shared": [
        do("b", BEGIN, TAKE), do("a", BEGIN, *SHARE), do("b", FENCE, COMMIT), do("a", *SHARE), do("a", LOCK),
        do("a", ROLLBACK),
    ],
    "9.4 in one snapshot nobody shares a name": [
        do("a", REPEATABLE), do("a", *SHARE), do("a", ROLLBACK),
    ],
    "9.4 rows are inserted where the name is held": [
        do("a", BEGIN, *SHARE), do("a", held(0)), do("a", COMMIT), do("a", BEGIN), do("a", held(0)), do("a", COMMIT),
    ],
    "9.4 nobody shares a name while somebody waits for all": [
        do("a", BEGIN, *SHARE), do("b", BEGIN, TAKE_ALL), do("c", BEGIN, *SHARE), do("a", COMMIT, wakes="b"),
        do("c", COMMIT), do("b", COMMIT),
    ],
    "9.4 what waited for the row in vain notes nothing": [
        do("b", BEGIN, FENCE), do("a", BEGIN, ROW), do("b", COMMIT, wakes="a"), do("a", MARKER), do("a", held(3)),
        do("a", COMMIT),
    ],
    "9.4 rows are inserted where the claim's row is locked": [
        do("a", BEGIN, ROW), do("a", held(0)), do("a", COMMIT), do("a", BEGIN), do("a", held(0)), do("a", COMMIT),
    ],
    "9.4 a name of another incarnation is not shared": [
        do("b", BEGIN, FENCE, COMMIT), do("a", BEGIN, *SHARE), do("b", BEGIN, TAKE), do("b", COMMIT), do("a", COMMIT),
    ],
    "9.4 a fence waits for the claim's lock, and the next lock finds it moved": [
        do("a", BEGIN, LOCK), do("b", BEGIN, FENCE), do("a", COMMIT, wakes="b"), do("b", INCARNATION), do("b", COMMIT),
        do("a", BEGIN, LOCK), do("a", ROLLBACK),
    ],
    "9.4 a lock that waited for a fence is checked again": [
        do("b", BEGIN, FENCE), do("a", BEGIN, LOCK), do("b", COMMIT, wakes="a"), do("a", ROLLBACK),
    ],
    "9.4 a lock that waited for a fence that was rolled back is granted": [
        do("b", BEGIN, FENCE), do("a", BEGIN, LOCK), do("b", ROLLBACK, wakes="a"), do("a", COMMIT),
    ],
    "9.4 nested facts are granted though a fence waits": [
        do("a", BEGIN, LOCK), do("b", BEGIN, FENCE), do("c", BEGIN, LOCK), do("a", COMMIT), do("c", COMMIT, wakes="b"),
        do("b", COMMIT),
    ],
    "9.4 a lock that waits behind a fence": [
        do("a", BEGIN, FENCE), do("b", BEGIN, FENCE), do("c", BEGIN, LOCK), do("a", ROLLBACK, wakes="b"),
        do("b", COMMIT, wakes="c"), do("c", COMMIT),
    ],
    "9.4 a lock without the lock": [
        do("a", BEGIN, Sql(LOCK.text.removesuffix(" FOR SHARE"), LOCK.params)), do("b", BEGIN, FENCE, COMMIT),
        do("a", FACT, COMMIT), do("a", BEGIN, Sql(LOCK.text.removesuffix(" FOR SHARE"), LOCK.params)),
        do("a", ROLLBACK),
    ],
    "a share that becomes exclusive waits for the others": [
        do("a", BEGIN, LOCK), do("b", BEGIN, LOCK), do("a", FENCE), do("b", COMMIT, wakes="a"), do("a", COMMIT),
    ],
    "a lock that is not granted in time": [
        do("a", BEGIN, LOCK), do("b", BEGIN, SLOW), do("b", FENCE, wakes="b"), do("b", INCARNATION), do("b", COMMIT),
        do("b", INCARNATION), do("a", COMMIT),
    ],
    "9.4 of two new claims the second waits, and raises": [
        do("a", BEGIN, WIN), do("b", BEGIN, WIN), do("a", REGISTER), do("a", COMMIT, wakes="b"), do("b", REGISTER),
        do("b", COMMIT), do("a", POSITIONS),
    ],
    "9.4 of two new claims the second is the first when that is rolled back": [
        do("a", BEGIN, WIN), do("b", BEGIN, WIN), do("a", ROLLBACK, wakes="b"), do("b", COMMIT),
    ],
    "9.5 a claim waits while final positions are taken": [
        do("a", BEGIN, FENCE, COMMIT), do("a", BEGIN, FINALS), do("b", BEGIN, WIN_BACK), do("a", FINISH),
        do("a", COMMIT, wakes="b"), do("b", POSITIONS), do("b", COMMIT),
    ],
    "a row that was changed meanwhile is checked again after the wait": [
        do("a", BEGIN, FINISH), do("b", BEAT), do("a", COMMIT, wakes="b"), do("b", POSITIONS), do("b", KNOWN),
    ],
    "a row that was changed and rolled back is updated after the wait": [
        do("a", BEGIN, FINISH), do("b", BEAT), do("a", ROLLBACK, wakes="b"), do("b", POSITIONS), do("b", KNOWN),
    ],
    "own changes are seen, those of others when they are committed": [
        do("a", BEGIN, FINISH, POSITIONS), do("b", BEGIN, POSITIONS), do("a", COMMIT), do("b", POSITIONS),
        do("b", COMMIT),
    ],
    "9.9 a snapshot stays, and begins with its first question": [
        do("a", SNAPSHOT), do("b", FINISH), do("a", POSITIONS), do("b", Sql(FINISH.text, (11, 1, "orders", "w1"))),
        do("a", POSITIONS), do("a", COMMIT, POSITIONS),
    ],
    "a snapshot is for reading": [do("a", SNAPSHOT, FINISH), do("a", POSITIONS), do("a", COMMIT), do("a", POSITIONS)],
    "9.12 of two saves of one position the second hits nothing": [
        do("a", BEGIN, save(("w1", 0, 5))), do("b", save(("w1", 0, 6))), do("a", COMMIT, wakes="b"), do("b", LOAD),
    ],
    "9.12 a save after one that was rolled back": [
        do("a", BEGIN, save(("w1", 0, 5))), do("b", save(("w1", 0, 6))), do("a", ROLLBACK, wakes="b"), do("b", LOAD),
    ],
    "9.12 a save of several moves all or none": [
        do("a", save(("w1", 0, 5), ("w2", 1, 5))), do("a", LOAD), do("a", save(("w1", 0, 5), ("w2", 0, 7))),
        do("a", LOAD), do("a", save(("w3", 0, 5))),
    ],
    "9.12 a save that waits for one of several": [
        do("a", BEGIN, save(("w2", 0, 4))), do("b", save(("w1", 0, 5), ("w2", 0, 6))), do("a", COMMIT, wakes="b"),
        do("b", LOAD),
    ],
    "9.12 a save in a snapshot loses to one that was committed since": [
        do("a", REPEATABLE), do("a", LOAD), do("b", save(("w1", 0, 5))), do("a", save(("w1", 0, 6))), do("a", ROLLBACK),
    ],
    "9.4 a lock in a snapshot fails when the claim has moved since": [
        do("a", REPEATABLE), do("a", LOAD), do("b", FENCE), do("a", LOCK), do("a", ROLLBACK),
    ],
    "9.4 a lock in a snapshot fails when the claim moves while it waits": [
        do("a", REPEATABLE), do("a", LOAD), do("b", BEGIN, WIN_BACK), do("a", LOCK), do("b", COMMIT, wakes="a"),
        do("a", ROLLBACK),
    ],
    "9.12 a save for reading alone": [do("a", SNAPSHOT, LOAD), do("a", save(("w1", 0, 5))), do("a", ROLLBACK)],
    "saves that wait for each other": [
        do("a", BEGIN, save(("w1", 0, 5))), do("b", BEGIN, save(("w2", 0, 6))), do("a", save(("w2", 0, 5))),
        do("b", save(("w1", 0, 6)), wakes="ab"), do("a", ROLLBACK), do("b", COMMIT), do("b", LOAD),
    ],
    "9.12 a save that waits for a bootstrap that begins finds its row gone": [
        do("a", BEGIN, *BOOTSTRAP), do("b", save(("w1", 0, 5))), do("a", COMMIT, wakes="b"), do("b", LOAD, BEGUN),
    ],
    "9.12 a save that waits for a bootstrap that is rolled back": [
        do("a", BEGIN, *BOOTSTRAP), do("b", save(("w1", 0, 5))), do("a", ROLLBACK, wakes="b"), do("b", LOAD, BEGUN),
    ],
    "9.12 a save while a snapshot is loaded, and after it": [
        do("a", BEGIN, *BOOTSTRAP, COMMIT), do("b", save(("w1", 0, 5))), do("b", save(("w1", 0, 5), last="7" * 16)),
        do("a", LOADED), do("b", save(("w1", 0, 5), last="8" * 16)), do("b", save(("w1", 0, 5), last="7" * 16)),
        do("b", save(("w1", 5, 6))), do("b", LOAD, BEGUN),
    ],
    "9.12 a bootstrap waits for a save": [
        do("b", BEGIN, save(("w1", 0, 5))), do("a", BEGIN, *BOOTSTRAP), do("b", COMMIT, wakes="a"), do("a", COMMIT),
        do("b", LOAD, BEGUN),
    ],
    "a reader that registers waits for who prunes the stream": [
        do("a", BEGIN, Sql(readers.LOCK_STREAM + DIALECT.exclusive, ("orders",))),
        do("b", *steps_of(readers.register(DIALECT, "r2", {("orders", "w1"): 4}, "e" * 32))),
        do("a", COMMIT, wakes="b"),
    ],
    "a reader that begins anew waits for who prunes the stream": [
        do("a", BEGIN, Sql(readers.LOCK_STREAM + DIALECT.exclusive, ("orders",))),
        do("b", *steps_of(readers.reset(DIALECT, "r2", {("orders", "w1"): 4}, "e" * 32))),
        do("a", COMMIT, wakes="b"),
    ],
    "an insert waits for one of the same key, and is left out": [
        do("a", BEGIN, READER), do("b", READER), do("a", COMMIT, wakes="b"), do("b", READER),
    ],
    "a row that is locked is no obstacle to leaving it out": [
        do("a", BEGIN, LOCK), do("b", BEGIN, save(("w1", 0, 5))), do("c", READER),
        do("a", step(readers.register(DIALECT, "r", {("orders", "w2"): 4}, "e"), "INSERT")), do("a", COMMIT),
        do("b", COMMIT),
    ],
    "a duplicate waits for who was first": [
        do("a", BEGIN, FACT), do("b", BEGIN, FACT), do("a", COMMIT, wakes="b"), do("b", COMMIT), do("b", PAGE),
    ],
    "a duplicate of what was rolled back": [
        do("a", BEGIN, FACT), do("b", BEGIN, FACT), do("a", ROLLBACK, wakes="b"), do("b", COMMIT), do("b", PAGE),
    ],
    "a failed statement ends the transaction, and COMMIT says so": [
        do("a", BEGIN, ONE_FACT), do("a", DUPLICATE), do("a", POSITIONS), do("a", COMMIT), do("a", PAGE),
        do("a", BEGIN, DUPLICATE, COMMIT), do("a", ROLLBACK), do("a", POSITIONS),
    ],
    "a failed statement frees the locks before ROLLBACK": [
        do("a", BEGIN, LOCK), do("b", BEGIN, FENCE), do("a", DUPLICATE, wakes="b"), do("a", ROLLBACK),
        do("b", ROLLBACK),
    ],
    "statements of one round trip are one transaction": [
        do("a", ONE_FACT, DUPLICATE), do("a", PAGE), do("a", ONE_FACT, FACT), do("a", PAGE),
    ],
    "a sequence is in no transaction": [
        do("a", BEGIN, IDS), do("b", IDS), do("a", ROLLBACK), do("a", IDS), do("a", SEQUENCE),
    ],
    "9.15 a sequence that is raised gives nothing meanwhile": [
        do("a", BEGIN, *RAISE), do("b", IDS), do("a", COMMIT, wakes="b"), do("b", SEQUENCE), do("a", BEGIN, *RAISE),
        do("a", COMMIT),
    ],
    "9.1 what has become of a transaction": [
        do("a", BEGIN, LOCK), do("b", asked(0)), do("a", COMMIT), do("b", asked(0)), do("a", BEGIN, LOCK),
        do("b", asked(4)), do("a", ROLLBACK), do("b", asked(4)),
        do("b", lambda _: (DIALECT.outcome("99999999"),)), do("b", asked(0)),
    ],
    "9.10 a page ends with a whole fact": [
        do("a", PAGE), do("a", Sql(PAGE.text, ("orders", "w1", 1, 9))), do("a", *FETCH),
    ],
    "9.9 rows that are pruned stay in the snapshot of a fetch": [
        do("a", SNAPSHOT, FLOOR), do("b", *pruned()), do("a", PAGE), do("a", COMMIT), do("a", FLOOR), do("a", PAGE),
    ],
    "pruning waits for a beat": [
        do("a", BEGIN, LOCK, BEAT), do("b", *pruned()), do("a", COMMIT, wakes="b"), do("a", FLOOR),
    ],
}  # fmt: skip


@pytest.mark.servers
@pytest.mark.parametrize("name", INTERLEAVINGS)
def test_the_simulation_answers_as_postgresql(name: str, postgres_url: str) -> None:
    real = asyncio.run(played(OnPostgres(postgres_url), INTERLEAVINGS[name]))
    simulated = virtual.run(played(Simulated(), INTERLEAVINGS[name]))
    assert simulated == real


# --- what the world does to it


class World:
    """A database with two processes that have a store each; the first has claimed "w1"."""

    claim: Claim

    def __init__(self) -> None:
        self.database, self.dice = SimDatabase(), random.Random(7)
        self.paths = [Path(self.database, self.dice) for _ in range(2)]
        self.stores = [SimStore(generic(), Settings(), path) for path in self.paths]
        self.path, self.store, self.other = self.paths[0], *self.stores

    async def held(self, *rows_: bytes) -> Any:
        """A transaction that is open, with one fact of these rows."""
        transaction = self.store.transaction(self.claim)
        (token,) = await self.store.reserve("orders", 1)
        await transaction.begin()
        await transaction.insert("orders", [(token, [[1]] * len(rows_), rows_)])
        return transaction

    async def settled(self, marker: object, token: int) -> dict[tuple[str, int], list[bytes]]:
        """What the table says in the end, asked by the other process."""
        while (left := await self.other.outcome(self.claim, marker, [("orders", token)])) is None:
            await asyncio.sleep(0.01)
        return left


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    await made.store.init()
    for store in made.stores:
        await store.open()
    made.claim = await made.store.claim("w1", ["orders", "payments"], timeout=1)
    yield made
    for store in made.stores:
        await store.close()
    assert made.database.violations == []


@pytest.mark.parametrize("zombie", [0.0, 2.0])
@pytest.mark.parametrize("tell", [True, False])
def test_9_1_a_commit_under_way_when_the_link_is_cut_still_commits(zombie: float, tell: bool) -> None:
    async def main() -> None:
        async with world() as at:
            transaction = await at.held(row(1))
            committing = asyncio.ensure_future(transaction.commit())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            before = asyncio.get_running_loop().time()
            (at.path.cut if tell else at.path.kill)(zombie=zombie)
            if zombie:
                assert await at.other.outcome(at.claim, transaction.marker, [("orders", 1)]) is None
            assert await at.settled(transaction.marker, 1) == {("orders", 1): [row(1)]}
            assert asyncio.get_running_loop().time() - before >= zombie
            why = "closed the connection" if tell else "no answer within 30 s"
            with pytest.raises(CommitUnknown, match=why) as caught:
                await committing
            assert caught.value.marker == transaction.marker
            assert (asyncio.get_running_loop().time() - before >= at.store.settings.fetch_timeout - 0.001) is not tell
            assert await write(at.store, at.claim, 1) == [2]  # on a new connection
            assert (at.path.lost_replies, at.path.zombie_commits) == (1, 1)
            epoch, *fact, _, incarnation = at.database.history[0]
            claimed = at.claim.incarnation
            assert (epoch, *fact, incarnation) == (at.claim.epoch, "orders", "w1", 1, (row(1),), claimed)

    virtual.run(main())


def test_9_1_a_commit_whose_answer_is_lost() -> None:
    async def main() -> None:
        async with world() as at:
            transaction = await at.held(row(1))
            committing = asyncio.ensure_future(transaction.commit())
            while not at.database.history:
                await asyncio.sleep(0.0001)
            assert not committing.done()
            at.path.cut()
            with pytest.raises(CommitUnknown):
                await committing
            assert at.database.facts() == {("orders", "w1"): {1: (row(1),)}}
            await asyncio.sleep(1)
            assert (at.path.lost_replies, at.path.zombie_commits, at.path.rollbacks) == (1, 1, 0)

    virtual.run(main())


def test_9_4_a_held_transaction_holds_back_a_claim_until_the_server_notices() -> None:
    async def main() -> None:
        async with world() as at:
            await at.held(row(1))
            loop = asyncio.get_running_loop()
            at.path.cut(linger=3.0)
            before = loop.time()
            with pytest.raises(ClaimBlocked, match="idle in transaction, transaction open for 0 s"):
                await at.other.claim("w1", ["orders"], timeout=0.5)
            again = await at.other.claim("w1", ["orders"], timeout=PATIENCE)
            assert again.incarnation > at.claim.incarnation
            assert loop.time() - before >= 3.0
            assert at.path.rollbacks == 1
            assert at.database.facts() == {}
            with pytest.raises(WriterFenced):
                await at.store.check_claim(at.claim)

    virtual.run(main())


def test_9_4_a_claim_without_its_lock_is_a_violation() -> None:
    async def main() -> None:
        at = World()
        await at.store.init()
        for store in at.stores:
            await store.open()
        dialect = at.store.dialect
        dialect.share, dialect.share_name = "", lambda *_: ()
        at.claim = await at.store.claim("w1", ["orders"], timeout=1)
        transaction = await at.held(row(1))
        again = await at.other.claim("w1", ["orders"], timeout=1)
        await transaction.commit()
        assert at.database.violations == [
            f"fact 1 of (orders, w1) was committed under incarnation {at.claim.incarnation}, "
            f"but the writer's is {again.incarnation}"
        ]

    virtual.run(main())


def test_nothing_passes_a_hole_and_all_of_it_goes_on_after() -> None:
    async def main() -> None:
        async with world() as at:
            loop = asyncio.get_running_loop()
            before = loop.time()
            at.path.hole = True
            asked = [asyncio.ensure_future(at.store.reserve("orders", 1)), asyncio.ensure_future(at.store.known())]
            await asyncio.sleep(5)
            assert not any(one.done() for one in asked)
            at.path.hole = False
            assert await asked[0] == [1]
            assert [one.stream for one in await asked[1]] == ["orders", "payments"]
            assert 5 < loop.time() - before < 6
            await asyncio.sleep(60)  # no deadline is left behind
            assert await at.store.reserve("orders", 1) == [2]

    virtual.run(main())


def test_an_answer_that_does_not_come_breaks_the_connection() -> None:
    async def main() -> None:
        async with world() as at:
            await at.store.reserve("orders", 1)  # a connection is there
            loop = asyncio.get_running_loop()
            asked = asyncio.ensure_future(at.store.reserve("orders", 1))
            await asyncio.sleep(0)
            at.path.hole = True
            before = loop.time()
            with pytest.raises(Unavailable, match="server closed the connection"):
                await asked
            with pytest.raises(Unavailable, match="timeout expired"):
                await at.store.known()
            assert loop.time() - before == pytest.approx(20, abs=1)
            at.path.hole = False
            assert await at.store.reserve("orders", 1) == [3]  # the question arrived in the end

    virtual.run(main())


def test_a_slow_link_is_slow() -> None:
    async def main() -> None:
        async with world() as at:
            at.path.slow = 2.0
            before = asyncio.get_running_loop().time()
            await at.store.reserve("orders", 1)
            assert 4 < asyncio.get_running_loop().time() - before < 5

    virtual.run(main())


def test_refused_connects_are_unavailable() -> None:
    async def main() -> None:
        async with world() as at:
            at.path.cut()
            at.path.refuse = True
            for _ in range(2):  # the idle connection, which is found to be broken, then a new one
                with pytest.raises(Unavailable):
                    await at.store.reserve("orders", 1)
            with pytest.raises(Unavailable, match="refused"):
                await at.store.transaction(at.claim).begin()
            with pytest.raises(Unavailable, match="refused"):
                await at.store.init()
            await at.other.reserve("orders", 1)
            at.path.refuse, at.database.down = False, True
            with pytest.raises(Unavailable, match="refused"):
                await at.store.reserve("orders", 1)
            at.database.down = False
            connecting = asyncio.ensure_future(at.path.connect())
            await asyncio.sleep(0)
            at.path.cut()
            with pytest.raises(SimError):
                await connecting
            assert await at.store.reserve("orders", 1) == [2]

    virtual.run(main())


def test_9_1_and_9_15_a_crash() -> None:
    async def main() -> None:
        async with world() as at:
            jumps = []
            for _ in range(10):
                open_ = await at.held(row(1))
                committed = await write(at.store, at.claim, 1)
                waiting = asyncio.ensure_future(at.other.claim("w1", ["orders"], timeout=60))
                await asyncio.sleep(0.1)
                at.database.crash(at.dice)
                with pytest.raises(Unavailable):
                    await waiting
                with pytest.raises(CommitUnknown):
                    await open_.commit()
                assert await at.settled(open_.marker, committed[0] - 1) == {}
                while True:
                    try:
                        (token,) = await at.store.reserve("orders", 1)
                    except Unavailable:
                        continue
                    break
                jumps.append(token - committed[0] - 1)
            assert min(jumps) >= 0
            assert max(jumps) <= 32
            assert len(set(jumps)) > 3
            assert await at.store.reserve("payments", 1) == [1]  # never called: nothing was logged ahead
            assert len(at.database.facts()["orders", "w1"]) == 10

    virtual.run(main())


def test_9_22_a_crash_takes_back_ids_that_nothing_was_committed_behind() -> None:
    """Of a joined transaction; those of any other have a COMMIT of their own."""

    async def main() -> None:
        async with world() as at:
            jumps = []
            for _ in range(20):
                (own,) = await at.store.reserve("orders", 1)
                connection = await at.path.connect()
                await connection.begin()
                joined = at.store.transaction(at.claim, connection)
                assert await joined.begin({"orders": 1}) == {"orders": [own + 1]}
                at.database.crash(at.dice)
                connection.discard()
                while True:
                    try:
                        (token,) = await at.store.reserve("orders", 1)
                    except Unavailable:
                        continue
                    break
                jumps.append(token - own - 1)
            assert min(jumps) == 0, "it was given again"
            assert max(jumps) > 1

    virtual.run(main())


def test_9_1_a_marker_that_a_crash_has_forgotten() -> None:
    async def main() -> None:
        async with world() as at:
            assert await at.store.outcome(at.claim, "99999999", [("orders", 1)]) == {}
            connection = await at.path.connect()
            with pytest.raises(SimError, match="in the future"):
                await connection.execute("SELECT coalesce(pg_xact_status(?::xid8) = 'in progress', FALSE)", ("9999",))
            await connection.close()

    virtual.run(main())


def test_9_23_a_standby_that_lacks_commits_is_promoted() -> None:
    async def main() -> None:
        async with world() as at:
            replica = at.database.replica(lag=lambda: 0.0)
            kept = await write(at.store, at.claim, 1)
            replicated = at.database.replicated()
            await write(at.store, at.claim, 1)
            assert replica.view()[1] == at.database.view()[1]
            before = at.database.identity
            at.database.promote(replicated, at.dice)
            assert at.database.identity != before
            assert [id for ids in at.database.facts().values() for id in ids] == kept
            assert replica.view()[0] is at.database.state  # what it had more is gone

    virtual.run(main())


def test_a_restore_goes_back_and_the_operator_says_so() -> None:
    async def main() -> None:
        async with world() as at:
            await write(at.store, at.claim, 1)
            checkpoint = at.database.checkpoint()
            await write(at.store, at.claim, 1, 1)
            await at.store.heartbeat(at.claim, {"orders": 3})
            open_ = await at.held(row(1))
            at.database.restore(checkpoint)
            with pytest.raises(CommitUnknown):
                await open_.commit()
            assert at.database.facts() == {("orders", "w1"): {1: (row(1, 0),)}}
            assert len(at.database.history) == 3
            for store in at.stores:
                store.renew()
            assert [one.position for one in await at.other.known()] == [0, 0]
            epoch = await at.other.restored()
            again = await at.other.claim("w1", ["orders"], timeout=1)
            assert (again.epoch, again.starts) == (epoch, {"orders": 1})
            assert await at.other.reserve("orders", 1) == [2]

    virtual.run(main())


def test_9_9_a_replica_lags_never_goes_back_and_is_not_written() -> None:
    async def main() -> None:
        async with world() as at:
            lag = [1.0]
            replica = at.database.replica(lambda: lag[0])
            store = SimStore(generic(), Settings(), Path(replica, at.dice))
            await store.open()
            claim = await at.store.claim("w1", ["orders"], timeout=1)
            await write(at.store, claim, 1, 1)
            await at.store.heartbeat(claim, {"orders": 2})
            assert (await page(store, 0, 2)).upto == 0  # nothing is proven there yet
            await asyncio.sleep(1.5)
            found = await page(store, 0, 2)
            assert (found.upto, list(found.tokens)) == (2, [1, 2])
            lag[0] = 3600.0
            assert (await page(store, 0, 2)).upto == 2
            assert await store.sequence("orders") is None
            for writing in (
                store.reserve("orders", 1),
                store.heartbeat(claim, {}),
                store.register_reader("r", {("orders", "w1"): 0}, claim.epoch),
                store.transaction(claim).begin(),
            ):
                with pytest.raises(Unavailable, match="read-only"):
                    await writing
            # Nor does it tell what became of a fact: it may lack its rows.
            lacking = await write(at.store, claim, 1)
            for asking in (store.check_claim(claim), store.outcome(claim, None, [("orders", lacking[0])])):
                with pytest.raises(Unavailable, match="replica"):
                    await asking
            # A snapshot there, too, is of one moment.
            connection = await Path(replica, at.dice).connect()
            await connection.run((SNAPSHOT, POSITIONS))
            checkpoint = at.database.checkpoint()
            await at.store.reserve("orders", 9)
            await at.store.heartbeat(claim, {"orders": 9})
            lag[0] = 0.0
            assert (await store.known())[0].position == 9
            assert (await connection.execute(POSITIONS.text, POSITIONS.params))[0][:2] == ("w1", 2)
            lag[0] = 5.0
            at.database.restore(checkpoint)
            assert (await store.known())[0].position == 9
            await asyncio.sleep(6)
            assert (await store.known())[0].position == 2  # made anew
            replica.crash()
            with pytest.raises(Unavailable):
                await store.known()
            assert (await store.known())[0].position == 2

    virtual.run(main())


def test_old_versions_last_as_long_as_somebody_looks_at_them() -> None:
    async def main() -> None:
        async with world() as at:
            connection = await at.path.connect()
            before = await connection.run((SNAPSHOT, POSITIONS))
            await write(at.store, at.claim, 1)
            await at.store.reserve("orders", 400)
            for position in range(200):
                await at.store.heartbeat(at.claim, {"orders": position})
            assert await connection.run((POSITIONS,)) == before
            await at.store.prune(keep=0)
            assert await connection.run((PAGE,)) == [[]]
            await connection.run((COMMIT, SNAPSHOT, POSITIONS))
            record = at.database.state.tables["busrep_positions"].records["orders", "w1"]
            for position in range(200, 400):
                await at.store.heartbeat(at.claim, {"orders": position})
            assert (await connection.run((POSITIONS,)))[0][0][:2] == ("w1", 199)
            await connection.commit()
            await at.store.heartbeat(at.claim, {"orders": 400})
            assert len(record.older) < 10

    virtual.run(main())


def test_a_cancelled_question_rolls_back_and_its_connection_is_closed() -> None:
    async def main() -> None:
        async with world() as at:
            holder = at.other.transaction(at.claim)
            await holder.begin()
            blocked = asyncio.ensure_future(at.store.claim("w1", ["orders"], timeout=PATIENCE))
            await asyncio.sleep(0.2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await blocked
            await asyncio.sleep(0.1)
            assert [session.wait for session in at.database.sessions] == [None] * len(at.database.sessions)
            await holder.commit()
            await at.store.check_claim(at.claim)  # the cancelled claim has left nothing
            connection = await at.path.connect()
            await connection.begin()
            asking = asyncio.ensure_future(connection.execute(KNOWN.text))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert connection.closed
            with pytest.raises(SimError):
                await connection.commit()

    virtual.run(main())


def test_9_1_a_cancelled_commit_goes_on() -> None:
    async def main() -> None:
        async with world() as at:
            transaction = await at.held(row(1))
            with pytest.raises(CommitUnknown) as caught:
                async with asyncio.timeout(0):
                    await transaction.commit()
            assert caught.value.cancelled
            assert await at.settled(transaction.marker, 1) == {("orders", 1): [row(1)]}
            # Sent with the heartbeat's COMMIT, a question that is cancelled goes on as well.
            beat = asyncio.ensure_future(at.store.heartbeat(at.claim, {"orders": 1}))
            while at.path.requests % 2 == 0:
                await asyncio.sleep(0.0001)
            beat.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beat

    virtual.run(main())


def test_transactions_on_the_callers_connection() -> None:
    async def main() -> None:
        async with world() as at:
            await at.store.register_reader("r", {("orders", "w1"): 0}, at.claim.epoch)
            connection = await at.path.connect()
            for commit in (True, False):
                token, *_ = await at.store.reserve("orders", 4)
                await connection.begin()
                transaction = at.store.transaction(at.claim, connection)
                assert transaction.joined
                await transaction.begin()
                await transaction.insert("orders", [(token, [[1]], [row(1)])])
                await transaction.execute(
                    "INSERT INTO effects (reader, epoch, stream, writer, token, row) VALUES (?, ?, ?, ?, ?, ?)",
                    ("r", at.claim.epoch, "orders", "w1", token, "[1]"),
                )
                await at.store.save_reader("r", [("orders", "w1", 0, 4)], at.claim.epoch, connection)
                await transaction.commit()
                assert await at.store.outcome(at.claim, transaction.marker, [("orders", token)]) is None
                await (connection.commit() if commit else connection.rollback())
                left = await at.store.outcome(at.claim, transaction.marker, [("orders", token)])
                assert left == ({("orders", token): [row(1)]} if commit else {})
                if commit:
                    await at.store.save_reader("r", [("orders", "w1", 4, 0)], at.claim.epoch)
            assert at.database.effects() == [("r", at.claim.epoch, "orders", "w1", 1, "[1]")]
            begun = at.store.transaction(at.claim, connection)
            assert not begun.joined
            await begun.begin()
            await begun.rollback()
            assert not connection.in_transaction
            with pytest.raises(ReaderMoved):
                await at.store.save_reader("r", [("orders", "w1", 7, 8)], at.claim.epoch, connection)
            with pytest.raises(ConfigError):
                at.store.transaction(at.claim, object())
            with pytest.raises(ConfigError):
                await begun.execute("SELECT 1", {"named": 1})
            await connection.begin()
            at.path.cut()
            with pytest.raises(SimError):
                await connection.commit()
            assert connection.closed

    virtual.run(main())


def test_a_statement_that_fails_passes_through() -> None:
    async def main() -> None:
        async with world() as at:
            transaction = at.store.transaction(at.claim)
            (token,) = await at.store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(token, [[1]], [row(1)])] * 2)
            with pytest.raises(StatementRefused, match="duplicate key") as caught:
                await transaction.commit()
            assert state_of(caught.value) == "error 23505"
            await transaction.rollback()
            await transaction.rollback()
            assert await read(at.store, "w1", 0, 9) == []

    virtual.run(main())


def test_an_unopened_store_and_one_without_tables_say_so() -> None:
    async def main() -> None:
        database = SimDatabase()
        store = SimStore(generic(), Settings(), Path(database, random.Random(1)))
        with pytest.raises(Unavailable, match="not open"):
            await store.known()
        store._idle = []
        with pytest.raises(SchemaError):
            await store.known()
        with pytest.raises(SchemaError):
            await store.reserve("orders", 1)
        with pytest.raises(SchemaError):
            await SimStore(generic(), Settings(), store.path).open()

    virtual.run(main())


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1 FROM nowhere",
        "SELECT nonsense FROM busrep_facts",
        "SELECT nonsense(1)",
        "VACUUM",
        "SELECT 1 !",
        "SELECT max(id) FROM busrep_facts FOR SHARE OF",
        "SELECT id FROM busrep_facts ORDER BY max(id)",
        "UPDATE busrep_meta SET nonsense = 1",
        "CREATE TABLE busrep_new",
        "SELECT interval '1 week'",
        "INSERT INTO busrep_meta (key, value) VALUES (?, ?) ON CONFLICT (value) DO NOTHING",
    ],
)
def test_an_unknown_statement_is_named(text: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        known(text)
    assert text in str(caught.value)


def test_an_unknown_statement_is_a_violation_nobody_overlooks() -> None:
    async def main() -> None:
        database = SimDatabase()
        connection = await Path(database, random.Random(1)).connect()
        with pytest.raises(NotImplementedError):
            await connection.execute("VACUUM")
        assert "VACUUM" in database.violations[0]

    virtual.run(main())


PROGRAM = """
import asyncio, hashlib, random
from unittest import mock
from busrep import Settings
from busrep.stores import fencing, schema
from busrep.streams import Registry, Stream
from tests.proof.sim import virtual
from tests.proof.sim.database import Path, SimDatabase
from tests.proof.sim.store import SimStore

schema.secrets.token_hex = lambda size: "0" * 2 * size

async def main():
    loop = asyncio.get_running_loop()
    fencing.time = mock.Mock(time_ns=lambda: int(loop.time() * 1e9))  # incarnations are the clock
    database, dice = SimDatabase(), random.Random(5)
    paths = [Path(database, dice) for _ in range(4)]
    stores = [SimStore(Registry([Stream("s")]), Settings(), path) for path in paths]
    await stores[0].init()

    async def work(at, store):
        while len(database.history) < 40:
            try:
                await store.open()
                claim = await store.claim(f"w{at // 2}", ["s"], timeout=1)
                for _ in range(5):
                    transaction = store.transaction(claim)
                    (token,) = await store.reserve("s", 1)
                    await transaction.begin()
                    await transaction.insert("s", [(token, [[1]], [b"[%d]" % at])])
                    await (transaction.commit() if dice.random() < 0.8 else transaction.rollback())
                    await store.heartbeat(claim, {"s": token})
            except Exception:
                await asyncio.sleep(dice.random())

    async def trouble():
        while True:
            await asyncio.sleep(dice.random())
            dice.choice(paths).cut(dice.random(), dice.random())
            if dice.random() < 0.1:
                database.crash(dice)

    troubles = asyncio.ensure_future(trouble())
    await asyncio.gather(*(work(at, store) for at, store in enumerate(stores)))
    troubles.cancel()
    assert not database.violations, database.violations
    counts = [(path.requests, path.commits, path.lost_replies, path.zombie_commits) for path in paths]
    print(hashlib.sha256(repr((database.history, counts, database.now())).encode()).hexdigest())

virtual.run(main())
"""


def test_the_same_seed_gives_the_same_run_whatever_the_hashes() -> None:
    ran = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2")
    ]
    assert [one.returncode for one in ran] == [0, 0], ran[0].stderr
    assert ran[0].stdout == ran[1].stdout
