"""What the driver asks the table: the log's state, where positions at a time are, how far a batch of rows goes.

It works on a primary and on a replica alike: whatever it answers is of one snapshot, in which the positions are proven,
so a replica that lags knows an older state, and no wrong one.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import attrs

from busrep.errors import ConfigError, Unavailable
from busrep.settings import Settings
from busrep.spark.planning import Span
from busrep.stores import schema
from busrep.stores.dialect import Backing, Dialect, backing_of, union
from busrep.stores.plans import Plan, Row, Sql, complete
from busrep.stores.snapshots import LogState, in_snapshot, read_log
from busrep.stores.sqlite.dialect import SqliteDialect
from busrep.stores.sqlite.files import connect, run
from busrep.streams import Registry, Stream

T = TypeVar("T")

# Rows of a writer that are counted for the lag of a query: the count of more would cost as much as reading them.
MOST_COUNTED = 100_000


Ages = Mapping[str, float | None]
"""{writer: seconds since its first row of a span was committed}; None where the table has no times."""


def seconds_of(age: Any) -> float | None:
    """An age that the database told; never below 0, for its clock may have been set back."""
    return None if age is None else max(0.0, float(age))


@attrs.frozen
class Unread:
    """What a query had not read of a writer when a batch was planned.

    ``rows``: proven rows behind the batch's end, at most `MOST_COUNTED`. ``seconds``: the age of the first row that was
    not read before the batch; None in a table of the application's, which has no times.
    """

    rows: int
    seconds: float | None


def sqlite_path(url: str) -> str | None:
    """The file of an SQLite store's URL; None for another store."""
    scheme, _, rest = url.partition("://")
    return os.path.abspath(unquote(rest[1:])) if scheme == "sqlite" else None


def absolute(url: str) -> str:
    """The same store, for a process that is elsewhere: the file of an SQLite store from the root on."""
    path = sqlite_path(url)
    return url if path is None else f"sqlite:///{quote(path)}"


def server(url: str) -> tuple[str, str]:
    """How to connect to a PostgreSQL store, with deadlines (nobody waits for ever for a peer that is gone without a
    word), and what to call it. Raises ConfigError, MissingExtra."""
    from busrep.stores.postgres.blocking import BlockingPostgresStore

    store = BlockingPostgresStore(url, Registry([]), Settings())
    return store.url, store.where


def dialect_of(url: str) -> Dialect:
    """The SQL of a store. Raises MissingExtra."""
    if sqlite_path(url) is not None:
        return SqliteDialect()
    from busrep.stores.postgres.dialect import PostgresDialect

    return PostgresDialect()


def time_text(micros: int) -> str:
    """Microseconds since 1970 as PostgreSQL reads them."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)).isoformat()


def committed(dialect: Dialect, comparison: str, micros: int) -> tuple[str, Any]:
    """A condition on the time of a commit and its parameter: ``comparison`` (``>=`` ...) to microseconds since 1970.

    SQLite has seconds with a fraction; they are compared as the microseconds that readers get.
    """
    if dialect.name == "sqlite":
        return f"CAST(round(committed_at * 1000000) AS INTEGER) {comparison} ?", micros
    return f"committed_at {comparison} CAST(? AS timestamptz)", time_text(micros)


class Table:
    """The driver's questions about one stream; ``url``: the store with its password. Connects when first asked.

    All methods raise Unavailable when the database cannot be reached, SchemaError when it has no tables of this
    version, and of PostgreSQL MissingExtra. Not thread-safe.
    """

    def __init__(self, url: str, stream: Stream[Any]) -> None:
        self.backing: Backing = backing_of(stream)
        self.dialect = dialect_of(url)
        path = sqlite_path(url)
        if path is not None:
            self._database: _Sqlite | _Postgres = _Sqlite(path)
        else:
            self._database = _Postgres(url)
        self._checked = False

    def close(self) -> None:
        """Close the connection; the next question makes another."""
        self._database.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ask(self, question: Callable[[], Plan[T]]) -> T:
        """The answer to a question that only reads, all of it of one state of the database; asked again if the
        connection was lost meanwhile."""
        return self._database.ask(lambda: in_snapshot(question()))

    def log(self) -> LogState:
        """Epoch, proven positions and floors, of one state. Raises ConfigError for a stream that is not there, or that
        is kept in a table which has to be declared."""

        def body() -> Plan[LogState]:
            if not self._checked:
                yield from schema.check(self.dialect, self.backing)
                answers = yield Sql("SELECT stream, backing FROM busrep_streams")
                self._check(dict(answers[0]))
            return (yield from read_log(self.dialect, self.backing.stream))

        log = self.ask(body)
        self._checked = True
        return log

    def _check(self, listed: Mapping[str, str | None]) -> None:
        name = self.backing.stream
        if name not in listed:
            known = ", ".join(sorted(listed)) or "none"
            raise ConfigError(f"option 'stream' is {name!r}, which the store does not have (it has: {known})")
        if listed[name] is not None and not self.backing.own:
            raise ConfigError(
                f"stream {name!r} is kept in a table of the application's: pass option 'streams', MODULE:NAME where it "
                "is declared"
            )

    def frontier(self, spans: Sequence[Span], most: int | None) -> tuple[int | None, int | None]:
        """(token of the first row of these spans, token of row ``most`` + 1), in the order of tokens over all writers;
        None where there is no such row. Walks over at most so many entries of the index."""
        if not spans:
            return None, None
        text, params = union(self.backing, spans, f"{self.backing.token} AS token")
        rows = f"SELECT token FROM ({text}) AS r ORDER BY token LIMIT 1"

        def body() -> Plan[tuple[int | None, int | None]]:
            first = (yield Sql(rows, params))[0]
            if most is None or not first:
                return (first[0][0] if first else None), None
            beyond = (yield Sql(f"{rows} OFFSET ?", (*params, most)))[0]
            return first[0][0], beyond[0][0] if beyond else None

        return self.ask(body)

    def unread(self, begun: Sequence[Span], left: Sequence[Span]) -> dict[str, Unread]:
        """What a batch found and leaves, per writer. ``begun``: the spans that were not read before it; ``left``: those
        that it does not read either. Asks for one row of each span in ``begun``, and counts the rows of ``left``."""

        def body() -> Plan[dict[str, Unread]]:
            ages = yield from self._first_ages(begun)
            counts = yield from self._each(
                left, lambda rows: f"SELECT count(*) FROM (SELECT 1 {rows} LIMIT {MOST_COUNTED}) AS r"
            )
            rows = {writer: count for writer, ((count,),) in counts.items()}
            return {writer: Unread(rows.get(writer, 0), seconds) for writer, seconds in ages.items()}

        return self.ask(body)

    def first_ages(self, spans: Sequence[Span]) -> Ages:
        """The age of the first row of each span; a span without rows is left out."""
        return self.ask(lambda: self._first_ages(spans))

    def _first_ages(self, spans: Sequence[Span]) -> Plan[Ages]:
        age = "NULL" if self.backing.own else self.dialect.age("committed_at")
        found = yield from self._each(spans, lambda rows: f"SELECT {age} {rows} ORDER BY {self.backing.by_row} LIMIT 1")
        return {writer: seconds_of(one) for writer, rows in found.items() for (one,) in rows}

    def _each(self, spans: Sequence[Span], text: Callable[[str], str]) -> Plan[dict[str, list[Row]]]:
        """The answers to a question about the rows of each span, by writer, in one round trip. ``text`` makes the
        question of the rows' FROM and WHERE."""
        if not spans:
            return {}
        asked = []
        for span in spans:
            rows, params = self.backing.rows(*span)
            asked.append(Sql(text(rows), params))
        answers = yield tuple(asked)
        return {writer: answer for (writer, _, _), answer in zip(spans, answers, strict=True)}

    def at_time(self, log: LogState, micros: int) -> dict[str, int]:
        """The positions at a time, microseconds since 1970, of each writer of the log: just below its first proven row
        that was committed at that time or later, and where there is none its proven position.

        So reading from there leaves out no row of that time or later, and reading up to there takes in none. Of a time
        older than the oldest fact that is still open, two reads, up to it and from it, have together each row once; a
        fact of before a later time that is proven only after the first read may be in neither. Rows before the time
        may be among the first ones read, for facts may be committed in another order than that of their IDs.
        ``committed_at`` is the time at which the transaction began on PostgreSQL, and that of the insert on SQLite. The
        search walks over the rows from the floor on until it has found that row. Raises ConfigError for a table of the
        application's, which has no such time.
        """
        if self.backing.own:
            raise ConfigError(
                f"stream {self.backing.stream!r} is kept in a table of the application's, which does not tell when "
                "rows were committed: a timestamp does not work as startingPositions or endingPositions, a map does"
            )
        condition, param = committed(self.dialect, ">=", micros)

        def body() -> Plan[dict[str, int]]:
            found: dict[str, int] = {}
            for writer, position in sorted(log.positions.items()):
                where, params = self.backing.of_writer(writer)
                span, limits = self.backing.between(log.floors.get(writer, 0), position)
                question = Sql(
                    f"SELECT id FROM busrep_facts WHERE {where} AND {span} AND {condition} ORDER BY id, idx LIMIT 1",
                    (*params, *limits, param),
                )
                first = (yield question)[0]
                found[writer] = first[0][0] - 1 if first else position
            return found

        return self.ask(body)


class _Sqlite:
    """A connection for each question: one that is kept would go on reading a file that was replaced."""

    def __init__(self, path: str) -> None:
        self._path = path

    def ask(self, plan: Callable[[], Plan[T]]) -> T:
        with contextlib.closing(connect(self._path, "rw")) as connection:
            return run(plan(), connection, self._path)

    def close(self) -> None:
        pass


class _Postgres:
    """One connection, made anew where it was lost."""

    def __init__(self, url: str) -> None:
        self._url, self._where = server(url)
        self._connection: Any = None

    def ask(self, plan: Callable[[], Plan[T]]) -> T:
        from busrep.stores.postgres.steps import on_connection

        while True:
            fresh = self._connection is None
            if fresh:
                self._connection = self._dial()
            try:
                return complete(on_connection(self._connection, plan()))
            except Unavailable as error:
                self.close()
                if fresh:
                    raise Unavailable(self._where, error.reason) from error
            except BaseException:
                self.close()
                raise

    def _dial(self) -> Any:
        import psycopg

        from busrep.stores.postgres.store import OPTIONS

        try:
            return psycopg.Connection.connect(self._url, **OPTIONS)
        except psycopg.Error as error:
            raise Unavailable(self._where, error) from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            from busrep.stores.postgres.blocking import close

            close(connection)
