"""What a backfill does, without Spark: its plan, its batches, and how rows are made."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import orjson
import pyarrow
import pytest

import busrep
from busrep.errors import ConfigError, RowError, Unavailable
from busrep.spark import backfilling, job, staging
from busrep.spark.archive_rows import SCHEMA
from busrep.spark.archive_store import Root
from busrep.spark.backfill_plan import (
    Part,
    Plan,
    Slice,
    check_floors,
    check_order,
    of_archive,
    read_plan,
    start_of,
    write_plan,
)
from busrep.spark.backfill_tasks import Derived, Seen, Staging, derived_rows
from busrep.spark.backfilling import Backfill
from busrep.spark.jobs import backfill
from busrep.spark.sink_options import SinkOptions
from busrep.spark.staging_store import SqliteStage, StagingStore
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry


@attrs.frozen
class Order:
    number: int
    status: str


@attrs.frozen
class Change:
    number: int
    status: str
    token: int


@attrs.frozen
class Twin:
    """Looks like another class."""

    number: int
    status: str
    token: int


STREAMS = [busrep.Stream("orders", Order), busrep.Stream("changes", Change)]


def changes(row: Order, stream: str, writer: str, token: int) -> Iterator[Change]:
    for number in range(row.number % 3):
        yield Change(number, f"{stream}/{writer}", token)


def failing(row: Order, stream: str, writer: str, token: int) -> list[Change]:
    return [Change(1 // (token - 5), row.status, token)]


def failing_late(row: Order, stream: str, writer: str, token: int) -> Iterator[Change]:
    yield Change(1, row.status, token)
    if token == 5:
        raise ConfigError("an error of the library's")


def nothing(row: Order, stream: str, writer: str, token: int) -> None:
    return None


def one(row: Order, stream: str, writer: str, token: int) -> Any:
    return Change(1, row.status, token)


def wrong(row: Order, stream: str, writer: str, token: int) -> list[Any]:
    return [Change(1, row.status, token), *({5: [OTHERS[row.status]]}.get(token, ()))]


OTHERS: dict[str, Any] = {
    "twin": Twin(1, "x", 5), "order": Order(1, "x"), "list": [1, "x", 5], "none": None, "class": Change,
    "text": Change("1", "x", 5),  # type: ignore[arg-type]
}  # fmt: skip


def derived(function: str, rows: list[tuple[str, int, int, str]]) -> list[Any]:
    """What the function makes of rows, two in a batch."""
    how = Derived(f"{__name__}:{function}", "orders", f"{__name__}:STREAMS", "changes")
    names = ("writer", "token", "index", "row")
    schema = pyarrow.schema([SCHEMA.field(name) for name in names])
    batches = [
        pyarrow.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows[at : at + 2]], schema)
        for at in range(0, len(rows), 2)
    ]
    seen = Seen()
    found = [orjson.loads(payload) for payloads in derived_rows(how, seen.each(batches)) for payload in payloads]
    assert (seen.first, seen.last) == ((rows[0][1], rows[-1][1]) if rows else (0, 0))
    return found


def orders(*tokens: int, status: str = "new") -> list[tuple[str, int, int, str]]:
    return [("w", token, 0, f'[{token},"{status}"]') for token in tokens]


def test_several_rows_of_one_and_none() -> None:
    assert derived("changes", orders(3, 4, 5, 8)) == [
        [0, "orders/w", 4], [0, "orders/w", 5], [1, "orders/w", 5], [0, "orders/w", 8], [1, "orders/w", 8],
    ]  # fmt: skip
    assert derived("changes", []) == []
    assert derived("changes", orders(3)) == []


def test_rows_of_many_are_staged_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrep.spark.backfill_tasks.BATCH_ROWS", 2)
    assert [row[2] for row in derived("changes", orders(2, 4, 5, 8, 11))] == [2, 2, 4, 5, 5, 8, 8, 11, 11]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", "failing failed: ZeroDivisionError"),
        ("failing_late", "failing_late failed: ConfigError: an error of the library's"),
        ("nothing", "it gave NoneType: an iterable of rows is needed"),
        ("one", "it gave Change: an iterable of rows is needed"),
    ],
)
def test_a_function_that_fails_names_the_row(function: str, message: str) -> None:
    with pytest.raises(RowError, match=message) as caught:
        derived(function, orders(5, 6))
    assert "token 5" in str(caught.value)


@pytest.mark.parametrize("other", OTHERS)
def test_rows_of_another_class(other: str) -> None:
    """None passes for a row of the target."""
    with pytest.raises(RowError, match=r"wrong made it of 'orders', token 5"):
        derived("wrong", orders(4, 5, 6, status=other))


def test_a_row_that_is_none() -> None:
    with pytest.raises(RowError, match="token 5"):
        derived("changes", [*orders(4), ("w", 5, 0, "{}")])


def test_rows_in_another_order_are_refused() -> None:
    with pytest.raises(RuntimeError, match="token 4 behind 5"):
        derived("changes", orders(3, 5, 4))
    check_order([(1, 5), (0, 0), (6, 6), (7, 9)])
    for tasks in ([(1, 5), (5, 9)], [(4, 5), (0, 0), (1, 3)]):
        with pytest.raises(ConfigError, match="to a later task"):
            check_order(tasks)


def test_batches_of_a_plan() -> None:
    """They are cut the same, and each row is in one."""
    part = Part(stream="a", epoch="e", after={"w1": 10, "w3": 7}, upto={"w1": 35, "w2": 12, "w3": 7})
    gap = Part(stream="b", epoch="e", after={"w2": 1000}, upto={"w1": 5, "w2": 1005})
    plan = Plan(id="x", width=10, parts=(part, gap), told={"into": "c"})
    found = [(one.number, one.part.stream, dict(one.after), dict(one.upto)) for one in plan.slices()]
    assert found == [
        (0, "a", {"w2": 0}, {"w2": 10}),
        (1, "a", {"w1": 10, "w2": 10}, {"w1": 20, "w2": 12}),
        (2, "a", {"w1": 20}, {"w1": 30}),
        (3, "a", {"w1": 30}, {"w1": 35}),
        (4, "b", {"w1": 0}, {"w1": 5}),
        (5, "b", {"w2": 1000}, {"w2": 1005}),
    ]
    assert read_plan(write_plan(plan)) == plan
    assert list(Plan(id="x", width=10, parts=(), told={}).slices()) == []
    for text in (b"[]", b"{", b'{"version":1}', orjson.dumps({"version": 1, "id": "x", "width": 1, "parts": 5})):
        with pytest.raises(ValueError, match=r"."):
            read_plan(text)


def test_an_archive_that_begins_later_has_nothing_of_a_batch() -> None:
    """Of a writer whose first rows it lacks the table is asked for all: they would be in neither."""
    part = Part(stream="a", epoch="e", after={}, upto={"w1": 500, "w2": 500, "w3": 500, "w4": 500})
    batch = Slice(0, part, {"w1": 100, "w2": 100, "w3": 100, "w4": 100}, {"w1": 200, "w2": 200, "w3": 200, "w4": 200})
    begins = {"w1": 100, "w2": 101, "w3": 0}
    assert of_archive(batch, begins, {"w1": 150, "w2": 400, "w3": 400, "w4": 100}) == {"w1": 150, "w3": 200}
    assert of_archive(batch, {}, {}) == {}


def test_where_a_table_begins() -> None:
    assert start_of("earliest", {"w1": 5}, {"w1": 9, "w2": 9}) == {"w1": 5}
    assert start_of('{"w1": 5}', {"w1": 5}, {"w1": 9, "w2": 9}) == {"w1": 5}
    for text, message in (
        ("latest", "earliest, or a map"), ('{"w1": -1}', "earliest, or a map"), ('{"w1": true}', "earliest, or a map"),
        ('{"w3": 7, "w1": 5}', "names writer 'w3'; there are: w1, w2"),
        ('{"w1": 4}', "'w1' from 5 up to 5 were pruned"), ('{"w2": 4}', "'w1' from 1 up to 5 were pruned"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            start_of(text, {"w1": 5}, {"w1": 9, "w2": 9})


def test_pruned_rows_are_told() -> None:
    check_floors({"w1": 5}, {"w1": 9}, {"w1": 5, "w2": 100})
    with pytest.raises(ConfigError, match=r"'w1' from 5 up to 9 were pruned .* pass --archive"):
        check_floors({"w1": 4}, {"w1": 9}, {"w1": 20})


def test_secrets_are_in_no_text() -> None:
    staging = Staging(SinkOptions(store="postgresql://app:secret@db/x", stream="s", writer="w"), "q", 1)
    assert "secret" not in repr(staging)


# -- killed ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Nobody gets to do anything any more."""


def counted(row: Order, stream: str, writer: str, token: int) -> Iterator[Change]:
    """Another row at each call."""
    for number in range(row.number % 3):
        yield Change(number, str(next(CALLS)), token)


CALLS = itertools.count()


class Table:
    """Orders of two writers, and the stream that becomes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder / 'table.db'}"
        store = open_blocking_store(self.url, Registry(STREAMS))
        store.init()
        store.close()
        self.write({"w1": range(1, 100, 2), "w2": range(2, 101, 2)}, {"w1": 90, "w2": 80})
        self.end = {"w1": 90, "w2": 80}

    def sql(self, text: str, rows: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.folder / "table.db")) as connection, connection:
            if "?" in text:
                connection.executemany(text, rows)
                return []
            return connection.execute(text).fetchall()

    def write(self, facts: dict[str, range], positions: dict[str, int]) -> None:
        self.sql(
            "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) "
            "VALUES ('orders', ?, ?, 0, 1, 0) ON CONFLICT DO UPDATE SET position = excluded.position",
            list(positions.items()),
        )
        self.sql(
            "INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at) VALUES ('orders', ?, ?, 0, ?, 0)",
            [(writer, token, f'[{token},"new"]') for writer, tokens in facts.items() for token in tokens],
        )

    def options(self, **options: Any) -> backfill.Options:
        told: dict[str, Any] = {
            "store": self.url, "stream": ("orders",), "streams": f"{__name__}:STREAMS", "into": "changes",
            "function": f"{__name__}:counted", "writer": "fill", "checkpoint": str(self.folder / "checkpoint"),
            "batch_ids": 30, **options,
        }  # fmt: skip
        return backfill.Options(**told)

    def run(self, **options: Any) -> dict[str, Any]:
        return backfilling.run(None, self.options(**options), job.silent)  # type: ignore[arg-type]

    def check(self) -> None:
        """Each row of the source became its rows, once, in order."""
        rows = [
            orjson.loads(row) for (row,) in self.sql("SELECT row FROM busrep_facts WHERE writer = 'fill' ORDER BY id")
        ]
        wanted = [[number, token] for token in range(1, 91) if token % 2 or token <= 80 for number in range(token % 3)]
        assert [[number, token] for number, _, token in rows] == wanted
        assert len({call for _, call, _ in rows}) == len(rows)
        assert self.sql("SELECT batch, rows > 0 FROM busrep_sinks") == [(2, 1)]
        ((position, last),) = self.sql(
            "SELECT position, (SELECT max(id) FROM busrep_facts WHERE writer = 'fill') FROM busrep_positions "
            "WHERE stream = 'changes'"
        )
        assert position == last


@attrs.frozen
class Said:
    attempt: str
    rows: int
    first: int
    last: int


def staged(self: Backfill, one: Slice, staging: Staging) -> list[Said]:
    """As on Spark, in two tasks, the later one first."""
    with contextlib.closing(sqlite3.connect(urlsplit(self.options.store).path[1:])) as connection:
        rows = connection.execute(
            "SELECT writer, id, idx, row FROM busrep_facts WHERE stream = 'orders' ORDER BY id, idx"
        ).fetchall()
    rows = [row for row in rows if one.after.get(row[0], 0) < row[1] <= one.upto.get(row[0], 0)]
    names = ("writer", "token", "index", "row")
    schema = pyarrow.schema([SCHEMA.field(name) for name in names])
    how, found = Derived(self.options.function, "orders", self.options.streams, "changes"), []
    for part, some in ((1, rows[len(rows) // 2 :]), (0, rows[: len(rows) // 2])):
        seen = Seen()
        batch = pyarrow.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in some], schema)
        attempt, count = staging.write(derived_rows(how, seen.each([batch])), part)
        found.append(Said(attempt, count, seen.first, seen.last))
    return found[::-1]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(Backfill, "staged", staged)
    monkeypatch.setattr("busrep.spark.backfill_tasks.BATCH_ROWS", 10)
    return Table(tmp_path)


STEPS: dict[str, tuple[Any, str]] = {
    "plan": (Root, "put"), "stage": (Staging, "write"), "add": (SqliteStage, "add"), "staged": (Backfill, "staged"),
    "claim": (StagingStore, "claim"), "commit": (StagingStore, "commit"), "insert": (staging, "insert_staged"),
    "prove": (StagingStore, "heartbeat"),
}  # fmt: skip


ASKS = ("claim", "commit", "prove")
KILLS = [(step, when) for step in STEPS for when in ("before", "after")] + [(step, "no answer") for step in ASKS]


@pytest.mark.parametrize(("step", "when"), KILLS)
def test_killed_at_each_step(step: str, when: str, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each batch; whoever starts it again writes what is missing, and nothing twice."""
    where, name = STEPS[step]
    real = getattr(where, name)
    for call in range(1, 6):  # of each batch at least once
        calls = itertools.count(1)

        def dying(*given: Any, **named: Any) -> Any:
            if next(calls) != call:  # noqa: B023 - used up within the turn
                return real(*given, **named)
            if when != "before":
                real(*given, **named)
            raise Unavailable("the database", "gone") if when == "no answer" else Killed

        monkeypatch.setattr(where, name, dying)
        monkeypatch.setattr("time.sleep", lambda _: None)
        killed = False
        try:
            table.run()
        except Killed:
            killed = True
        monkeypatch.setattr(where, name, real)
        if (table.folder / "checkpoint" / "backfill.json").exists():
            table.write({}, {"w1": 95, "w2": 100})  # what comes meanwhile is no part of it
        table.run()
        table.check()
        if not killed and next(calls) <= call:
            break
        table.sql("DELETE FROM busrep_facts WHERE stream = 'changes'")
        table.sql("DELETE FROM busrep_sinks")
        table.write({}, table.end)
        (table.folder / "checkpoint" / "backfill.json").unlink()
    assert call > 1


def test_two_drivers_at_a_time(table: Table) -> None:
    """One was given up for dead, and goes on: whoever writes a batch first has written it."""
    one, other = (Backfill(None, table.options()) for _ in range(2))  # type: ignore[arg-type]
    plan = one.plan()
    assert other.plan() == plan
    first, second, third = plan.slices()
    found = [one.write(plan, first), other.write(plan, first), other.write(plan, second), one.write(plan, second)]
    assert found == [30, 30, 30, 30]
    late = one.staged(third, Staging(one.sink, str(one.sink.query), 2))
    assert other.write(plan, third) > 0
    assert sum(task.rows for task in late) > 0
    assert table.sql("SELECT count(*) FROM busrep_staged") == [(0,)]
    assert table.run()["batches"] == 0
    table.check()


def test_a_function_that_was_mended(table: Table) -> None:
    """Its name stays: what is written stays, the rest is made by it as it is now."""
    global HOW
    HOW = failing_later
    with pytest.raises(RowError, match="token 40"):
        table.run(function=f"{__name__}:changing")
    HOW = counted
    assert table.run(function=f"{__name__}:changing")["batches_before"] == 1
    table.check()


def failing_later(row: Order, stream: str, writer: str, token: int) -> Iterator[Change]:
    yield from counted(row, stream, writer, token // (token != 40) if token == 40 else token)


HOW: Any = None


def changing(*given: Any) -> Any:
    return HOW(*given)
