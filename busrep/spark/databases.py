"""Databases as an executor reads them: one connection, one snapshot, the rows of a span as Arrow arrays.

Busrep's own table comes through ADBC; of an application's table the store knows what its columns mean.
"""

# ruff: noqa: S608 - names are constants, values are quoted
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs

from busrep.errors import ConfigError, MissingExtra, StatementRefused, Unavailable
from busrep.spark.applications import ApplicationsSqlite, Numbering
from busrep.spark.columns import Shape
from busrep.spark.options import stream_of
from busrep.spark.planning import Span
from busrep.spark.table import committed, dialect_of, server, sqlite_path
from busrep.stores.dialect import Backing, backing_of
from busrep.stores.plans import Answers, Control, Row, Signal, Sql, Step, run_sync
from busrep.stores.postgres.dialect import SNAPSHOT
from busrep.stores.server import by_state, final
from busrep.stores.snapshots import LogState, part_of, read_log
from busrep.stores.sqlite.files import BUSY

try:
    import adbc_driver_manager
    import pyarrow
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

# Bytes of one batch, and rows of one of SQLite's, whose driver counts rows alone: large enough that what a batch costs
# by itself, a millisecond here and in the JVM, does not count; small against an executor's memory.
BATCH_BYTES = 8 * 2**20
BATCH_ROWS = 20_000
# Rows of the first batch of a span on SQLite, while nobody knows how large they are.
FIRST_ROWS = 64

_TIMESTAMP = pyarrow.timestamp("us", "UTC")
Columns = Mapping[str, Any]
"""Arrow arrays of some rows by generic column, `columns.GENERIC`; those that do not differ are missing."""


@attrs.frozen
class Question:
    """What all tasks of a query need to know. Pickled for the executors alone: ``url`` holds the password."""

    url: str = attrs.field(repr=False)
    stream: str
    streams: str | None
    shape: Shape
    fail_on_data_loss: bool = True
    times: Sequence[tuple[str, int]] = ()
    """Conditions on the time of the commit: (``>=`` ..., microseconds since 1970)."""
    from_table: bool = False
    """Whether the positions come from the table's own, none from the bus: a table that is behind them has gone back."""

    def backing(self) -> Backing:
        """The stream's table."""
        return backing_of(stream_of(self.streams, self.stream))


def database_of(question: Question) -> Database:
    """A connection to the table of that stream. Raises Unavailable, MissingExtra."""
    backing = question.backing()
    if sqlite_path(question.url) is None:
        return Postgres(question, backing)
    return ApplicationsSqlite(question, backing) if backing.own else Sqlite(question, backing)


class Database(Protocol):
    """One connection to a database."""

    def __init__(self, question: Question, backing: Backing) -> None:
        """Connect."""

    def begin(self) -> LogState:
        """Begin a snapshot; what the log is in it."""

    def end(self) -> None:
        """End the snapshot."""

    def facts(self, span: Span) -> Iterator[Columns]:
        """The rows of a span, in order, batch by batch; none is empty."""

    def close(self) -> None:
        """Close the connection, whatever goes on there."""


def literal(value: object, *, backslashes: bool) -> str:
    """A value in SQL. ``backslashes``: the database may take one for an escape."""
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{value!r} has no form in SQL")
    quoted = value.replace("'", "''")
    if backslashes and "\\" in quoted:
        return "E'" + quoted.replace("\\", "\\\\") + "'"
    return f"'{quoted}'"


class _Adbc:
    """What both of ADBC's drivers have in common."""

    BEGIN: tuple[str, ...]

    def __init__(self, question: Question, backing: Backing) -> None:
        self._question, self._backing = question, backing
        self.dialect = dialect_of(question.url)
        self._uri, self._where = self._place(question.url)
        with self._translated():
            self._connection = self._connected()
            self._cursor = self._connection.cursor()

    def _place(self, url: str) -> tuple[str, str]:
        """What the driver connects to, and what it is called."""
        raise NotImplementedError

    def _driver(self) -> Any:
        raise NotImplementedError

    def _connected(self) -> Any:
        return self._driver().connect(self._uri, autocommit=True)

    def _text(self, sql: Sql) -> str:
        """The statement with its values in it: ADBC streams no answer to a statement with parameters."""
        pieces = sql.text.split("?")
        values = [literal(value, backslashes=self.dialect.name == "postgresql") for value in sql.params]
        return pieces[0] + "".join(value + piece for value, piece in zip(values, pieces[1:], strict=True))

    def ask(self, text: str) -> list[Row]:
        """The answer to a statement."""
        self._cursor.execute(text)
        found: list[Row] = self._cursor.fetchall()
        return found

    def _execute(self, steps: tuple[Step, ...]) -> Answers:
        answers: Answers = []
        for step in steps:
            if isinstance(step, Sql):
                answers.append(self.ask(self._text(step)))
            else:
                for text in self.BEGIN if step is Control.SNAPSHOT else ("COMMIT",):
                    self._cursor.execute(text)
        return answers

    def begin(self) -> LogState:
        """See `Database`."""
        with self._translated():
            return run_sync(read_log(self.dialect, self._question.stream, Control.SNAPSHOT), self._execute)

    def end(self) -> None:
        """See `Database`."""
        with self._translated():
            self._execute((Control.COMMIT,))

    def _batches(self, sql: Sql) -> Iterator[Any]:
        with self._translated():
            self._cursor.execute(self._text(sql))
            # Closed even when whoever reads leaves off: the connection is in the middle of an answer till then.
            with contextlib.closing(self._cursor.fetch_record_batch()) as batches:
                yield from (batch for batch in batches if batch.num_rows)

    def close(self) -> None:
        """See `Database`."""
        for part in (self._cursor, self._connection):
            with contextlib.suppress(adbc_driver_manager.Error):
                part.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except adbc_driver_manager.Error as error:
            operational = isinstance(error, adbc_driver_manager.OperationalError)
            problem = by_state(error, getattr(error, "sqlstate", None), operational=operational)
            if isinstance(problem, Signal):
                problem = final(problem)
            if isinstance(problem, Unavailable | StatementRefused):
                problem = self._unavailable(error)
            raise problem from None
        except (OSError, pyarrow.ArrowException) as error:  # what goes wrong within an answer comes through Arrow
            raise self._unavailable(error) from None

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(self._where, str(error).replace(self._uri, "...").strip())

    def _times(self) -> tuple[str, list[Any]]:
        """Conditions on the time of the commit, each with AND in front, and their parameters."""
        found = [committed(self.dialect, comparison, micros) for comparison, micros in self._question.times]
        return "".join(f" AND {condition}" for condition, _ in found), [param for _, param in found]

    def _span(
        self, span: Span, expressions: Mapping[str, str], place: int | None = None, most: int = 0
    ) -> Iterator[Columns]:
        """The rows of a span of busrep's own table, with the columns that are needed. With ``place``: those behind that
        place in the fact ``after``, ``most`` at most."""
        where, params = self._backing.of_writer(span[0])
        limits, ends = self._backing.between(span[1], span[2])
        end = ""
        if place is not None:
            limits, ends, end = "(id, idx) > (?, ?) AND id <= ?", [span[1], place, span[2]], f" LIMIT {most}"
        times, since = self._times()
        needed = self._question.shape.needed | ({"index"} if place is not None else set())
        names = ["token", *(name for name in ("index", "row", "committed_at") if name in needed)]
        picked = ", ".join(expressions[name] for name in names)
        question = Sql(
            f"SELECT {picked} FROM busrep_facts WHERE {where} AND {limits}{times} ORDER BY id, idx{end}",
            (*params, *ends, *since),
        )
        for batch in self._batches(question):
            yield dict(zip(names, batch.columns, strict=True))


@functools.lru_cache(maxsize=8)
def _database(uri: str) -> Any:
    """What ADBC knows of a database, without a connection to it. To find out what its types are takes 40 ms: longer
    than a connection, and longer than many a task. A worker reads few databases: one too many is not freed, which ADBC
    does with `close` alone, and not before its connections are closed."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(uri)


class _Kept:
    """Stands for a database that its connections do not close."""

    def close(self) -> None:
        """Nothing."""


class Postgres(_Adbc):
    """PostgreSQL: rows come by COPY, in binary."""

    BEGIN = SNAPSHOT
    EXPRESSIONS: ClassVar = {"token": "id", "index": "idx", "row": "row", "committed_at": "committed_at"}

    def _place(self, url: str) -> tuple[str, str]:
        return server(url)

    def _driver(self) -> Any:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise MissingExtra("spark", "reading PostgreSQL in Spark") from None
        return dbapi

    def _connected(self) -> Any:
        driver = self._driver()
        if self._backing.own:  # it may have types that were made since
            return driver.connect(self._uri, autocommit=True)
        connection = adbc_driver_manager.AdbcConnection(_database(self._uri))
        return driver.Connection(_Kept(), connection, autocommit=True)

    def begin(self) -> LogState:
        """See `Database`. Rows are wanted as they come, not when the last one was sorted."""
        log = super().begin()
        with self._translated():
            self._cursor.execute("SET LOCAL enable_sort = off")
            self._cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
        return log

    def facts(self, span: Span) -> Iterator[Columns]:
        """See `Database`."""
        if not self._backing.own:
            yield from self._span(span, self.EXPRESSIONS)
            return
        numbering = Numbering()
        for batch in self._batches(part_of(self.dialect, self._backing, [span])):
            _, tokens, payloads = batch.columns
            rows = [self._backing.payload(text).decode() for text in payloads.to_pylist()]
            yield numbering.columns(tokens.to_pylist(), rows)


class Sqlite(_Adbc):
    """SQLite, busrep's own table."""

    BEGIN = ("BEGIN",)
    EXPRESSIONS: ClassVar = {
        "token": "id", "index": "idx", "row": "row",
        "committed_at": "CAST(round(committed_at * 1000000) AS INTEGER)",
    }  # fmt: skip

    def _place(self, url: str) -> tuple[str, str]:
        path = sqlite_path(url) or ""
        return f"{Path(path).as_uri()}?mode=rw", f"SQLite database {path}"

    def _driver(self) -> Any:
        try:
            from adbc_driver_sqlite import dbapi
        except ImportError:
            raise MissingExtra("spark", "reading SQLite in Spark") from None
        return dbapi

    def begin(self) -> LogState:
        """See `Database`."""
        with self._translated():
            # A reader waits as well, for whoever closes the file as the last one, or has found it after a crash.
            self.ask(f"PRAGMA busy_timeout = {BUSY * 1000:.0f}")
        log = super().begin()
        self._cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        return log

    def facts(self, span: Span) -> Iterator[Columns]:
        """See `Database`. One question a batch, of as many rows as the bytes of those before let expect."""
        writer, after, upto = span
        after, place, most = after + 1, -1, FIRST_ROWS  # before the first row behind the span's beginning
        while True:
            count = size = 0
            for columns in self._span((writer, after, upto), self.EXPRESSIONS, place, most):
                count += len(columns["token"])
                size += sum(values.nbytes for values in columns.values())
                after, place = columns["token"][-1].as_py(), columns["index"][-1].as_py()
                if "committed_at" in columns:
                    columns = {**columns, "committed_at": columns["committed_at"].view(_TIMESTAMP)}
                yield columns
            if count < most:
                return
            most = max(1, min(BATCH_ROWS, 16 * most, BATCH_BYTES * count // size))
