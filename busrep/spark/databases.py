"""Databases as an executor reads them: one connection, one snapshot, the rows of a span as Arrow arrays.

Busrep's own table comes through ADBC; of an application's table the store knows what its columns mean.
"""

# ruff: noqa: S608 - names are constants, values are quoted
from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.spark.columns import Shape
from busrep.spark.options import declared_stream
from busrep.spark.planning import Span
from busrep.spark.table import committed, dialect_of, sqlite_path
from busrep.stores.backing import Backing, backing_of
from busrep.stores.plans import Answers, Control, Row, Signal, Sql, Step, run_sync
from busrep.stores.snapshots import Log, read_log
from busrep.stores.sqlite_files import BUSY, connect, executor, run
from busrep.stores.transaction import by_state, final
from busrep.streams import Stream

try:
    import adbc_driver_manager
    import pyarrow
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

# Bytes of one batch that PostgreSQL's driver makes, and rows of one of SQLite's: large enough that what a batch costs
# by itself, a millisecond here and in the JVM, does not count; small against an executor's memory.
BATCH_BYTES = 8 * 2**20
BATCH_ROWS = 20_000

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

    def backing(self) -> Backing:
        """The stream's table."""
        return backing_of(Stream(self.stream) if self.streams is None else declared_stream(self.streams, self.stream))


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

    def begin(self) -> Log:
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

    BEGIN: str
    WHERE: str

    def __init__(self, question: Question, backing: Backing) -> None:
        self._question, self._backing = question, backing
        self.dialect = dialect_of(question.url)
        with self._translated():
            self._connection = self._dial(question.url)
            self._cursor = self._connection.cursor()

    def _dial(self, url: str) -> Any:
        raise NotImplementedError

    def _text(self, sql: Sql) -> str:
        """The statement with its values in it: ADBC streams no answer to a statement with parameters."""
        pieces = sql.text.split("?")
        values = [literal(value, backslashes=self.dialect.name == "postgresql") for value in sql.params]
        return pieces[0] + "".join(value + piece for value, piece in zip(values, pieces[1:], strict=True))

    def _execute(self, steps: tuple[Step, ...]) -> Answers:
        answers: Answers = []
        for step in steps:
            if isinstance(step, Sql):
                self._cursor.execute(self._text(step))
                answers.append(self._cursor.fetchall())
            else:
                self._cursor.execute(self.BEGIN if step is Control.SNAPSHOT else "COMMIT")
        return answers

    def begin(self) -> Log:
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
            text = str(error).replace(self._question.url, "...")
            operational = isinstance(error, adbc_driver_manager.OperationalError)
            problem = by_state(error, getattr(error, "sqlstate", None), operational=operational)
            if isinstance(problem, Signal):
                problem = final(problem)
            if isinstance(problem, Unavailable) or problem is error:
                problem = Unavailable(self.WHERE, text)
            raise problem from None

    def _times(self) -> tuple[str, list[Any]]:
        """Conditions on the time of the commit, each with AND in front, and their parameters."""
        found = [committed(self.dialect, comparison, micros) for comparison, micros in self._question.times]
        return "".join(f" AND {condition}" for condition, _ in found), [param for _, param in found]

    def _span(self, span: Span, expressions: Mapping[str, str]) -> Iterator[Columns]:
        """The rows of a span of busrep's own table, with the columns that are needed."""
        where, params = self._backing.of_writer(span[0])
        limits, ends = self._backing.between(span[1], span[2])
        times, since = self._times()
        names = ["token", *(name for name in ("index", "row", "committed_at") if name in self._question.shape.needed)]
        picked = ", ".join(expressions[name] for name in names)
        question = Sql(
            f"SELECT {picked} FROM busrep_facts WHERE {where} AND {limits}{times} ORDER BY id, idx",
            (*params, *ends, *since),
        )
        for batch in self._batches(question):
            yield dict(zip(names, batch.columns, strict=True))


class Postgres(_Adbc):
    """PostgreSQL: rows come by COPY, in binary."""

    BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
    WHERE = "PostgreSQL"
    EXPRESSIONS: ClassVar = {"token": "id", "index": "idx", "row": "row", "committed_at": "committed_at"}

    def _dial(self, url: str) -> Any:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise MissingExtra("spark", "reading PostgreSQL in Spark") from None
        return dbapi.connect(url, autocommit=True)

    def begin(self) -> Log:
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
        question = self.dialect.part(self._backing, [span])
        if question is not None:
            numbering = _Numbering()
            for batch in self._batches(question):
                _, tokens, payloads = batch.columns
                rows = [self._backing.payload(text).decode() for text in payloads.to_pylist()]
                yield numbering.columns(tokens.to_pylist(), rows)


class Sqlite(_Adbc):
    """SQLite, busrep's own table."""

    BEGIN = "BEGIN"
    WHERE = "SQLite"
    EXPRESSIONS: ClassVar = {
        "token": "id", "index": "idx", "row": "row",
        "committed_at": "CAST(round(committed_at * 1000000) AS INTEGER)",
    }  # fmt: skip

    def _dial(self, url: str) -> Any:
        try:
            from adbc_driver_sqlite import dbapi
        except ImportError:
            raise MissingExtra("spark", "reading SQLite in Spark") from None
        return dbapi.connect(f"{Path(sqlite_path(url) or '').as_uri()}?mode=rw", autocommit=True)

    def begin(self) -> Log:
        """See `Database`."""
        with self._translated():
            # A reader waits as well, for whoever closes the file as the last one, or has found it after a crash.
            self._cursor.execute(f"PRAGMA busy_timeout = {BUSY * 1000:.0f}")
            self._cursor.fetchall()
        log = super().begin()
        self._cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        return log

    def facts(self, span: Span) -> Iterator[Columns]:
        """See `Database`."""
        for columns in self._span(span, self.EXPRESSIONS):
            if "committed_at" in columns:
                columns = {**columns, "committed_at": columns["committed_at"].view(_TIMESTAMP)}
            yield columns


class ApplicationsSqlite:
    """SQLite, a table of the application's: its columns are of any type, and the store knows what they mean."""

    def __init__(self, question: Question, backing: Backing) -> None:
        self._path = sqlite_path(question.url) or ""
        self._backing, self._stream = backing, question.stream
        self.dialect = dialect_of(question.url)
        self._connection = connect(self._path, "rw")

    def begin(self) -> Log:
        """See `Database`."""
        plan = read_log(self.dialect, self._stream, Control.SNAPSHOT)
        return run(plan, executor(self._connection, self._path), self._path)

    def end(self) -> None:
        """See `Database`."""
        self._connection.execute("COMMIT")

    def facts(self, span: Span) -> Iterator[Columns]:
        """See `Database`."""
        question = self.dialect.part(self._backing, [span])
        if question is None:
            return
        numbering = _Numbering()
        try:
            with contextlib.closing(self._connection.execute(question.text, question.params)) as cursor:
                while rows := cursor.fetchmany(BATCH_ROWS):
                    some: list[Row] = [row[1:] for row in rows]
                    payloads = [payload.decode() for payload in self.dialect.payloads(self._backing, some)]
                    yield numbering.columns([row[0] for row in some], payloads)
        except sqlite3.Error as error:
            raise Unavailable(f"SQLite database {self._path}", error) from error

    def close(self) -> None:
        """See `Database`."""
        self._connection.close()


class _Numbering:
    """The places of rows in their facts, where the table gives them in order only."""

    def __init__(self) -> None:
        self._token, self._place = 0, -1

    def columns(self, tokens: Sequence[int], rows: Sequence[str]) -> Columns:
        """The columns of the next rows."""
        places = []
        for token in tokens:
            self._place = self._place + 1 if token == self._token else 0
            self._token = token
            places.append(self._place)
        return {
            "token": pyarrow.array(tokens, pyarrow.int64()),
            "index": pyarrow.array(places, pyarrow.int32()),
            "row": pyarrow.array(rows, pyarrow.string()),
        }
