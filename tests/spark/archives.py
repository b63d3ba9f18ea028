"""A table that tests fill by hand, and archives of it."""

from __future__ import annotations

import contextlib
import json
import pickle
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pyarrow
from pyspark import cloudpickle

from busrep import Stream
from busrep.spark import job
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.archive_rows import SCHEMA, RowFiles, read_rows
from busrep.spark.archive_store import Root, load, put_manifest
from busrep.spark.archived import Manifest
from busrep.spark.jobs import archive, audit, compact
from busrep.spark.offsets import Offset
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

ROWS = "writer string, token bigint, index int, row string, committed_at timestamp"
NOON = datetime(2026, 5, 11, 12, tzinfo=UTC)


@attrs.frozen
class Order:
    number: int
    status: str


@attrs.frozen
class LaterOrder:
    """The same row class, a version later."""

    number: int
    status: str
    note: str = "none"
    weight: float | None = None


@attrs.frozen
class ShortOrder:
    """The same row class, with a field less."""

    number: int


@attrs.frozen
class OtherOrder:
    """The same row class, with a field of another type."""

    number: int
    status: int


@attrs.frozen
class ThirdOrder:
    """And one that Spark could take for the first one's."""

    number: float
    status: str


@attrs.frozen
class DatedOrder:
    """And one whose field was a text in archives of earlier versions of busrep."""

    number: int
    status: list[date] = attrs.field(converter=lambda days: [date.fromisoformat(day) for day in days])


STREAMS = [Stream("orders", Order)]
DATED = [Stream("orders", DatedOrder)]
SHORT = [Stream("orders", ShortOrder)]
OTHER = [Stream("orders", OtherOrder)]
THIRD = [Stream("orders", ThirdOrder)]
LATER = [Stream("orders", LaterOrder)]

Fact = tuple[int, str]
"""Token and JSON text; several rows of a token are a fact of several rows."""


class Local:
    """In a session's place, for jobs that only have functions run on executors: they run here, without a Java. Before
    each of these rounds the next one of ``meanwhile`` is called. What executors get is pickled, as for them."""

    defaultParallelism = 2

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], object]] = []

    @property
    def sparkContext(self) -> Local:
        return self

    def parallelize(self, parts: Sequence[Any], count: int) -> _Parts:
        assert 0 < count <= len(parts)
        return _Parts(self, parts)


@attrs.frozen
class _Parts:
    context: Local
    parts: Sequence[Any]

    def map(self, task: Callable[[Any], Any]) -> _Parts:
        pickled = cloudpickle.dumps(task)
        if self.context.meanwhile:
            self.context.meanwhile.pop(0)()
        return _Parts(self.context, [pickle.loads(pickled)(pickle.loads(pickle.dumps(part))) for part in self.parts])

    def collect(self) -> list[Any]:
        return list(self.parts)


class Bench:
    """A table in an SQLite file, and an archive of it in a folder beside."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.path = folder / "table.db"
        self.url = f"sqlite:///{self.path}"
        self.root = Root(str(folder / "archive"))
        store = open_blocking_store(self.url, Registry([Stream("orders")]))
        store.init()
        store.close()

    def sql(self, text: str, rows: Iterable[tuple[Any, ...]] = ((),)) -> None:
        sqlite_rows(self.path, text, rows)

    def write(self, writer: str, facts: Iterable[Fact], *, upto: int, at: datetime = NOON) -> None:
        """Rows, a second apart, and the position that the writer has proven."""
        self.sql(
            "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) "
            "VALUES ('orders', ?, ?, 0, 1, 0) ON CONFLICT DO UPDATE SET position = excluded.position",
            [(writer, upto)],
        )
        seen: dict[int, int] = {}
        rows = []
        for token, text in facts:
            seen[token] = seen.get(token, -1) + 1
            rows.append((writer, token, seen[token], text, (at + timedelta(seconds=token)).timestamp()))
        self.sql(
            "INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at) VALUES ('orders', ?, ?, ?, ?, ?)",
            rows,
        )

    def archive(self, **options: Any) -> job.Report:
        told = {"store": self.url, "archive": self.root.url, "available_now": True, "stream": ("orders",), **options}
        return archive.run(self.spark, archive.Options(**told), job.silent)

    def archived_by_hand(self, batch_rows: int = 10**9) -> None:
        """As the job does it, without Spark: a query takes seconds to start. Batches as the source cuts them."""
        before = load(self.root, "orders")
        upto, number = dict(before.upto), before.last
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            proven = dict(connection.execute("SELECT writer, position FROM busrep_positions"))
            (epoch,) = connection.execute("SELECT value FROM busrep_meta WHERE key = 'epoch'").fetchone()
            # Rounded as the source does it: SQLite's way, away from zero.
            committed_at = "CAST(round(committed_at * 1000000) AS INTEGER)"
            rows = connection.execute(f"SELECT writer, id, idx, row, {committed_at} FROM busrep_facts ORDER BY id, idx")
            new = [row for row in rows if upto.get(row[0], 0) < row[1] <= proven[row[0]]]
        while new or number == before.last:
            part = [row for row in new if row[1] <= new[min(batch_rows, len(new)) - 1][1]]
            new, number = new[len(part) :], number + 1
            files = RowFiles(self.root, "orders", "", number, 0, 10**9)
            columns = list(zip(*part, strict=True)) or [()] * 5
            arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
            files.add(pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA))
            end = {writer: min(at, part[-1][1]) for writer, at in proven.items()} if new else proven
            manifest = Manifest(
                stream="orders", query="q", batch=number, epoch=epoch, after=upto, upto=end, files=tuple(files.close())
            )
            assert put_manifest(self.root, manifest)
            upto = end

    def driven(self, batch: int, upto: dict[str, int], **options: Any) -> StreamArchive:
        """One batch of the job's, as Spark has it done in a query that is started for it: its end is in the log, then
        it is written. Returns the driver."""
        told = archive.Options(store=self.url, archive=self.root.url, available_now=True, **options)
        driver = StreamArchive(self.root, "orders", told)
        begin = driver.prepare(self.url)
        end = Offset(begin.epoch, upto)
        log = Path(driver.checkpoint.path("offsets"))
        log.mkdir(parents=True, exist_ok=True)
        (log / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(end.to_dict())}")
        after = (
            begin.positions
            if batch == 0
            else json.loads((log / str(batch - 1)).read_text().splitlines()[2])["positions"]
        )
        rows = [row for row in self.table() if after.get(row[0], 0) < row[1] <= upto.get(row[0], 0)]
        times = "SELECT writer, id, idx, committed_at FROM busrep_facts"
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            at = {tuple(row[:3]): datetime.fromtimestamp(row[3], UTC) for row in connection.execute(times)}
        frame = self.spark.createDataFrame([(*row, at[row[:3]]) for row in rows], ROWS).coalesce(1)
        frame = frame.selectExpr("'orders' AS stream", "writer", "token", "index", "row", "committed_at")
        driver.write(frame, batch, end, "q")
        return driver

    def audit(self, **options: Any) -> dict[str, Any]:
        """The report on orders; whether all is well agrees with what the report says."""
        told = {"store": self.url, "archive": self.root.url, "stream": ("orders",), "bucket": 100, **options}
        report = audit.run(self.spark, audit.Options(**told), job.silent)
        json.dumps(report)
        assert audit.describe(report)
        found: dict[str, Any] = report["streams"]["orders"]
        assert report["ok"] == found["ok"] == (not found["findings"] and not found["differences"])
        return found

    def compact(self, **options: Any) -> dict[str, Any]:
        report = compact.run(self.spark, compact.Options(archive=self.root.url, **options), job.silent)
        found: dict[str, Any] = report["streams"]["orders"]
        return found

    def archived(self) -> list[tuple[str, int, int, str]]:
        """All rows, as they are in the archive."""
        return rows_of(self.root)

    def table(self) -> list[tuple[str, int, int, str]]:
        """All rows, as they are in the table, in order."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            return connection.execute("SELECT writer, id, idx, row FROM busrep_facts ORDER BY 2, 3, 1").fetchall()

    def files(self) -> list[Path]:
        return sorted(Path(self.root.url).glob("stream=orders/date=*/*.parquet"))

    def manifests(self) -> list[str]:
        return [path.name for path in sorted(Path(self.root.url).glob("_busrep/orders/*[0-9].json"))]


def sqlite_rows(path: Path, text: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Run a statement for each of the rows, in one transaction."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(text, rows)


def rows_of(root: Root, stream: str = "orders") -> list[tuple[str, int, int, str]]:
    found = []
    for batch in read_rows(root, load(root, stream)):
        found += [tuple(row[name] for name in ("writer", "token", "index", "row")) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row[1], row[2], row[0]))


def orders(tokens: Iterable[int]) -> list[Fact]:
    """A row each, of class Order."""
    return [(token, f'[{token},"new"]') for token in tokens]
