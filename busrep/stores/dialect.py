"""Pieces of SQL text: where the rows of a stream lie (`Backing`), and what differs between the databases (`Dialect`).

IDs of a negative stream are positive inside; an application's table may hold them negative, so there ``id < 0`` and
order are turned round.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import orjson

from busrep.core.snapshots import LOADED
from busrep.errors import ClaimBlocked, ConfigError, RowError
from busrep.stores.interface import Claim
from busrep.stores.plans import Control, Locked, Plan, Sql, Step, T
from busrep.streams import Registry, Stream

# SELECTs in one UNION ALL; SQLite takes at most 500. More are nested.
MOST_SELECTS = 400

Span = tuple[str, int, int]
"""Rows of one writer: (writer, after, upto)."""


def quoted(name: str) -> str:
    """A name that `Table` has checked, in double quotes, so that reserved words work."""
    return ".".join(f'"{part}"' for part in name.split("."))


@attrs.frozen
class Backing:
    """The table of one stream. ``id`` ... are quoted column names; ``index`` None: one row per fact."""

    stream: str
    table: str
    id: str
    writer: str
    index: str | None
    columns: tuple[str, ...]
    own: bool
    negative: bool
    definition: Stream[Any]

    @property
    def token(self) -> str:
        """Expression of the ID as busrep counts it."""
        return f"-{self.id}" if self.negative else self.id

    @property
    def top(self) -> str:
        """Aggregate: the highest token."""
        return f"-min({self.id})" if self.negative else f"max({self.id})"

    def of_writer(self, writer: str) -> tuple[str, list[Any]]:
        """Condition and parameters: rows of this stream and writer."""
        if self.own:
            return f"1 = 1 AND {self.writer} = ?", [writer]
        return f"stream = ? AND {self.writer} = ?", [self.stream, writer]

    def between(self, after: int, upto: int) -> tuple[str, list[Any]]:
        """Condition and parameters: after < token <= upto."""
        if self.negative:
            return f"{self.id} < ? AND {self.id} >= ?", [-after, -upto]
        return f"{self.id} > ? AND {self.id} <= ?", [after, upto]

    def rows(self, writer: str, after: int, upto: int) -> tuple[str, list[Any]]:
        """FROM, WHERE and their parameters: rows of this stream and writer with after < token <= upto."""
        where, of = self.of_writer(writer)
        span, limits = self.between(after, upto)
        return f"FROM {self.table} WHERE {where} AND {span}", [*of, *limits]

    @property
    def by_token(self) -> str:
        """ORDER BY the token alone."""
        return f"{self.id} DESC" if self.negative else self.id

    @property
    def by_row(self) -> str:
        """ORDER BY the token, then the row's place in its fact."""
        return f"{self.by_token}, {self.index}" if self.index else self.by_token

    def payload(self, text: str | bytes) -> bytes:
        """The payload of a row as the table gave it: as it is, or, of an application's table, checked anew."""
        raw = text.encode() if isinstance(text, str) else text
        return self.definition.encode(self.definition.decode([raw])[0]) if self.own else raw


def generic_backing(stream: Stream[Any]) -> Backing:
    """Return where a stream's rows are in busrep's own table."""
    return Backing(
        stream=stream.name, table="busrep_facts", id="id", writer="writer", index="idx", columns=("row",),
        own=False, negative=False, definition=stream,
    )  # fmt: skip


def backing_of(stream: Stream[Any]) -> Backing:
    """The table of a stream."""
    table = stream.table
    if table is None:
        return generic_backing(stream)
    return Backing(
        stream=stream.name, table=quoted(table.name), id=quoted(table.id), writer=quoted(table.writer),
        index=quoted(table.index) if table.index else None, columns=tuple(map(quoted, table.columns)),
        own=True, negative=stream.negative, definition=stream,
    )  # fmt: skip


def columns_of(backing: Backing, payload: bytes) -> list[Any]:
    """The column values of one row; RowError when their number does not fit the table."""
    values = orjson.loads(payload)
    if not isinstance(values, list) or len(values) != len(backing.columns):
        raise RowError(backing.stream, "row", f"does not have the {len(backing.columns)} columns of its table", values)
    return values


def union(backing: Backing, rows: Sequence[Span], columns: str, order: str = "") -> tuple[str, list[Any]]:
    """A query of these columns of these rows, and its parameters; one SELECT a writer, each a range of the index.

    ``order``: of each SELECT's rows. PostgreSQL merges them then; it sorts the whole where only the whole has an order.
    SQLite takes none there, and merges them by itself.
    """
    texts, params = [], []
    for writer, after, upto in rows:
        found, of = backing.rows(writer, after, upto)
        texts.append(f"(SELECT {columns} {found} ORDER BY {order})" if order else f"SELECT {columns} {found}")
        params += of
    groups = [" UNION ALL ".join(texts[at : at + MOST_SELECTS]) for at in range(0, len(texts), MOST_SELECTS)]
    if len(groups) > 1:
        groups = [f"SELECT * FROM ({text}) AS g{at}" for at, text in enumerate(groups)]
    return " UNION ALL ".join(groups), params


def highest_row(backing: Backing) -> Sql:
    """The highest token in the stream's table, 0 without rows."""
    if backing.own:
        return Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table}")
    # One look at the index per writer; every writer has a positions row before its first fact.
    return Sql(
        "SELECT coalesce(max(highest), 0) FROM (SELECT (SELECT max(f.id) FROM busrep_facts f WHERE "
        "f.stream = p.stream AND f.writer = p.writer) AS highest FROM busrep_positions p WHERE p.stream = ?) AS h",
        (backing.stream,),
    )


# In the error of `Dialect.hold`.
NOT_HELD = "busrep: the claim or its series is another:"
# Condition on the row ``r`` of busrep_readers that ``v`` moves: no snapshot of the stream is being loaded, and none was
# since the last one that the caller knew (NULL: does not tell).
NO_BOOTSTRAP = (
    "NOT EXISTS (SELECT 1 FROM busrep_bootstraps b WHERE b.reader = r.reader AND b.stream = r.stream "
    f"AND (b.state NOT IN {LOADED} OR b.id <> v.begun))"
)


# Answers to `Dialect.outcome`.
OPEN, ROLLED_BACK = "in progress", "aborted"
# The columns of ``v`` in `Dialect.save`.
MOVES = (
    ("stream", "text"), ("writer", "text"), ("old", "bigint"), ("new", "bigint"), ("begun", "text"),
    ("sequence", "text"), ("given", "bigint"),
)  # fmt: skip


def no_position_above(given: str) -> str:
    """Condition on the row ``r`` that ``v`` moves: its new position is not above the sequence, whose value is
    ``given``, or NULL. A database that keeps another log than these positions are of has nothing to say."""
    return (
        "v.new <= CASE WHEN r.epoch = (SELECT m.value FROM busrep_meta m WHERE m.key = 'epoch') "
        f"THEN coalesce({given}, v.new) ELSE v.new END"
    )


def begin_durably(dialect: Dialect, *, wait: float | None = None) -> tuple[Step, ...]:
    """The first steps of a transaction whose COMMIT is answered when a crash cannot take it back (9.22).

    ``wait``: bound of each wait for a lock, seconds; None leaves it to the caller.
    """
    bound = () if wait is None else dialect.lock_timeout(wait)
    return (Control.BEGIN, Sql(f"SELECT {dialect.durable}"), *bound)


def or_blocked(dialect: Dialect, writer: str, plan: Plan[T]) -> Plan[T]:
    """Run the plan; ClaimBlocked names who holds the lock that it did not get."""
    try:
        return (yield from plan)
    except Locked as locked:
        blockers = yield from dialect.blockers(writer)
        raise ClaimBlocked(writer, blockers) from locked


def row_columns(dialect: Dialect, backing: Backing) -> tuple[str, str]:
    """What a query takes of the rows of a table: token, what `Dialect.payloads` needs, and place in the fact.

    Returns the columns with their names, and the names alone of those that `Dialect.payloads` needs.
    """
    picked = {f"c{at}": column for at, column in enumerate(dialect.picked(backing))}
    columns = "".join(f"{column} AS {name}, " for name, column in picked.items())
    return f"{backing.token} AS token, {columns}{backing.index or 0} AS place", ", ".join(picked)


class Dialect(Protocol):
    """Pieces of SQL of one database, and where the streams of one store lie in it. Pure.

    ``store``: the store's URL for a person, without a password. ``streams``, ``backings``: set by the store.
    """

    def __init__(self, store: str = "URL") -> None:
        self.store, self.streams, self.backings = store, Registry([]), {}

    def backing(self, stream: str) -> Backing:
        """Where a stream's rows lie: UnknownStream, or ConfigError for one that lives in memory."""
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")
        return self.backings[stream]

    store: str
    streams: Registry
    backings: Mapping[str, Backing]
    name: str
    now: str  # expression: the database's clock, as a timestamp is stored
    ago: str  # expression with one parameter: the timestamp so many seconds ago
    seconds: str  # expression: the same clock, in seconds since 1970
    share: str  # suffix that locks a row against updates until the transaction ends
    exclusive: str  # suffix that locks a row against everything
    replica: str  # expression: true on a server that only follows another
    marker: str  # expression: identifies the current transaction for outcome()
    durable: str  # expression: a COMMIT of this transaction is answered when a crash cannot take it back
    server: str | None  # expression: the server's identity and timeline, '' where it only follows another
    same_server: str  # condition: they are those that busrep_meta holds
    largest: str  # function: the larger of its arguments
    init_lock: Sequence[Sql]  # what keeps two processes from migrating at once, within a transaction
    words: Mapping[str, str]  # what stands in the braces of schema.py's tables

    def version(self) -> Plan[int | None]:
        """The schema version found; None without tables."""

    def check_schema(self) -> Plan[None]:
        """ConfigError where what is made now would not lie beside busrep's tables."""
        yield from ()

    def check_visible(self, tables: Sequence[str]) -> Plan[None]:  # noqa: ARG002 - most databases have no policies
        """Unavailable where a policy of the database may hide rows from us, of these own tables or of busrep's;
        ConfigError where a stream's sequence does not lie beside busrep's tables."""
        yield from ()

    def age(self, column: str) -> str:
        """Expression: seconds since that timestamp."""

    def values(self, *columns: tuple[str, str]) -> str:
        """A table expression over one parameter, a JSON array of arrays; columns are (name, "text" | "bigint")."""

    def lock_timeout(self, seconds: float) -> Sequence[Sql]:
        """Bounds the waits for locks in the transaction that is open."""

    def blockers(self, writer: str) -> Plan[list[str]]:
        """Who keeps a writer's row locked, for a person."""

    def create_sequence(self, stream: str) -> Sql:
        """Make the stream's sequence unless it exists."""

    def columns(self, table: str) -> Sql:
        """The names of a table's columns; none when there is no such table. ``table``: quoted."""

    def new_ids(self, stream: str, count: int) -> str:
        """An expression that gives new IDs, in the transaction of whoever asks. Of servers only."""

    def next_ids(self, stream: str, count: int) -> Sql:
        """Reserve IDs. It answers with each of them, or with the last one alone."""

    def sequence(self, stream: str) -> Sql:
        """(highest ID given out, cache, cycles, increment); no row when there is no sequence."""

    def sequence_name(self, stream: str) -> str:
        """What `save` finds the stream's sequence by."""

    def raise_sequence(self, stream: str, least: int) -> Plan[None]:
        """Within a transaction: the sequence gives only IDs above ``least``; it never goes back."""

    def insert(self, backing: Backing, writer: str, rows: Sequence[tuple[int, int, bytes]]) -> Sequence[Sql]:
        """Insert rows (ID, place in its fact, payload)."""

    def lock_series(self, writer: str, *, exclusive: bool) -> Sequence[Sql]:
        """Locks a writer's series until the transaction ends: appends share it, and wait while someone waits for it
        exclusively (9.26). None where there is one write transaction at a time."""

    def share_name(self, held: Claim, stands: Sql) -> Sequence[Sql]:  # noqa: ARG002
        """Holds a name until the transaction ends, beside its other transactions, if ``stands`` has a row. Where it
        answers with nothing the claim's row is to be locked. None where a transaction that writes is alone."""
        return ()

    def note_name(self, held: Claim, lock: Sql | None = None) -> tuple[str, Sequence[object]]:  # noqa: ARG002
        """A column of the proof behind `share_name`, with its parameters: notes in the transaction that it holds the
        name. With ``lock``, a question that locks the claim's row, another question: notes it where that answers."""
        return ("", ()) if lock is None else (lock.text, lock.params)

    def take_name(self, writer: str | None, only_while: Sql | None = None) -> tuple[Sql, ...]:  # noqa: ARG002
        """Waits for all that hold a name, or any name, and holds it alone until the transaction ends; does neither
        where ``only_while``, a question, has no row."""
        return ()

    def hold(self, held: Sql) -> Sql:
        """Locks the writer's row where ``held``, a condition on it, and makes the transaction durable. Else it answers
        with nothing; or it fails, with `NOT_HELD` in its error, where the steps behind it are with the server already.
        """

    def insert_numbering(self, stream: str, writer: str, payloads: Sequence[bytes]) -> Sql:
        """Insert rows into busrep's own table, each a fact whose ID the sequence gives, and answer with the IDs. Of
        servers only: elsewhere it takes two steps, each of which is answered before the next."""

    def given(self, stream: str) -> Sql:
        """The highest ID that the stream's sequence has given, as a query."""

    def page(self, backing: Backing, writer: str, after: int, upto: int, limit: int) -> Sql:
        """(token, column...) of the first rows, in order: more than ``limit`` rows if there are more, and then
        including all of the fact that goes beyond it."""

    def picked(self, backing: Backing) -> Sequence[str]:
        """Expressions of a table's columns that `payloads` makes a payload of."""

    def payloads(self, backing: Backing, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """Payloads of rows (token, column...), the columns being those that `picked` names."""

    def outcome(self, marker: object) -> Sql | None:
        """What became of that transaction: `OPEN`, `ROLLED_BACK` or any other text, of one that has ended. None when
        asking is of no use."""

    def save(self, reader: str, epoch: str, moved: str, count: int) -> Sql:
        """Move ``count`` saved positions, all or none; ``moved``: JSON arrays of what `MOVES` names. Answers (stream,
        writer) of those that were where they should be and may be moved, or none (9.12)."""
