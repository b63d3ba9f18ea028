"""Creating, checking and describing the tables.

meta (key, value): schema version, epoch; ``server``: PostgreSQL's system identifier and timeline, which the first claim
    notes.
writers (writer, incarnation, finished): one row a name; every write transaction locks it FOR SHARE, so nothing
    that changes often may live in it. ``finished``: the incarnation that was fenced for being silent;
    below zero, the one whose process has won the name back since: it may not know yet, and ask again.
positions (stream, writer, position, floor, registered, seen_at, finished): proven prefixes, retention floors, and
    the registry for linear positions.
streams: the sequences that exist, and which streams have a table of the application's. ``fields``, since version 4: the
    fields of the stream's rows, as JSON; NULL: not known.
facts (stream, id, idx, writer, row, committed_at): rows; the primary key is the order that catch-up reads.
readers (reader, stream, writer, position, epoch, saved_at): writer '' notes that the reader reads the stream at all.
    ``stopped``, since version 4: why the reader stopped there; NULL: it did not.
dead_letters.
bootstraps (reader, stream, id, agreement, parts...): since version 2. Which snapshot a reader loads, and how many of
    its parts it has applied. ``digest``: of the agreement, to compare what readers load without reading it; ``id``: of
    this bootstrap, which another one of the same snapshot does not share.
staged (query, attempt, seq, rows...): since version 3. Rows that tasks of a Spark query have written and that are no
    facts yet; see busrep/spark/staging.py.
sinks (query, checkpoint, batch...): since version 3. The last batch of each Spark query that was made facts.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import orjson

from busrep.errors import ConfigError, RowClassMismatch, SchemaError
from busrep.shapes import fields_to_store, load
from busrep.stores.backing import Backing
from busrep.stores.declared import init_command
from busrep.stores.dialect import Dialect
from busrep.stores.interface import StoredStream
from busrep.stores.plans import Control, NoSuchTable, Plan, Row, Sql, in_transaction
from busrep.streams import Stream

VERSION = 4

INSERT_STREAM = "INSERT INTO busrep_streams (stream, backing, fields) VALUES (?, ?, ?)"
STREAMS = Sql("SELECT stream, backing, fields FROM busrep_streams")


def new_epoch() -> str:
    """A random identity for a fact log: 32 lowercase hex digits."""
    return secrets.token_hex(16)


def init(dialect: Dialect, backings: Iterable[Backing], redefine: Collection[str] = ()) -> Plan[None]:
    """Create or migrate all tables and the sequences of these streams.

    ``redefine``: streams whose fields are stored as declared, whatever was stored. Raises SchemaError when the schema
    is newer, ConfigError when an application's table has other columns, RowClassMismatch.
    """
    wanted = {backing.stream: backing for backing in backings}

    def body() -> Plan[None]:
        yield (Control.BEGIN, *dialect.init_lock())
        found = yield from dialect.version()
        if found is not None and found > VERSION:
            raise SchemaError(found, VERSION)
        for version in range((found or 0) + 1, VERSION + 1):
            yield tuple(dialect.ddl(version))
        if found is None:
            yield Sql("INSERT INTO busrep_meta (key, value) VALUES ('epoch', ?)", (new_epoch(),))
        here = dialect.server or "''"  # noted at once: a standby may take its place before the first claim
        yield Sql(f"INSERT INTO busrep_meta (key, value) VALUES ('server', {here}) ON CONFLICT (key) DO NOTHING")
        yield Sql("INSERT INTO busrep_meta (key, value) VALUES ('incarnations', '0') ON CONFLICT (key) DO NOTHING")
        yield (
            Sql("DELETE FROM busrep_meta WHERE key = 'version'"),
            Sql("INSERT INTO busrep_meta (key, value) VALUES ('version', ?)", (str(VERSION),)),
        )
        for stream, (declared, fields) in _rows(dialect, wanted, (yield STREAMS)[0], redefine).items():
            yield (
                dialect.create_sequence(stream),
                Sql("DELETE FROM busrep_streams WHERE stream = ?", (stream,)),
                Sql(INSERT_STREAM, (stream, declared, fields)),
            )
        yield Control.COMMIT

    for backing in wanted.values():
        if backing.own:
            yield from check_columns(dialect, backing, missing_table=True)
    # Where all is there already it takes no lock, and so waits for no writer.
    if (yield from dialect.version()) == VERSION:
        present = (yield STREAMS)[0]
        kept = {stream: (declared, fields) for stream, declared, fields in present}
        if _rows(dialect, wanted, present, redefine).items() <= kept.items():
            return
    yield from in_transaction(body())


def _rows(
    dialect: Dialect, wanted: Mapping[str, Backing], present: Collection[Row], redefine: Collection[str]
) -> dict[str, tuple[str | None, str | None]]:
    """What is to be kept of each stream: where its rows lie, and their fields."""
    stored = {stream: fields for stream, _, fields in present if stream not in redefine}
    streams = [backing.definition for backing in wanted.values()]
    with _with_command(dialect, streams):
        fields = fields_to_store(streams, stored)
    return {stream: (_declared(backing), fields[stream]) for stream, backing in wanted.items()}


def check_columns(dialect: Dialect, backing: Backing, *, missing_table: bool = False) -> Plan[None]:
    """ConfigError unless the application's table has the declared columns; it names those that there are.

    ``missing_table``: the table need not exist yet.
    """
    wanted = [backing.id, backing.writer, *backing.columns, *([backing.index] if backing.index else [])]
    existing = [str(name) for (name,) in (yield dialect.columns(backing.table))[0]]
    if not existing and missing_table:
        return
    # Asked besides: SQLite takes a name in double quotes that is no column for a text.
    lower = {name.lower() for name in existing}
    missing = [name for name in wanted if name.strip('"').lower() not in lower]
    if not missing:
        try:
            yield Sql(f"SELECT {', '.join(wanted)} FROM {backing.table} LIMIT 0")
        except NoSuchTable as error:
            missing = [str(error.cause).strip()]
        else:
            return
    there = f"it has {', '.join(existing)}, not {', '.join(missing)}" if existing else "there is no such table"
    raise ConfigError(
        f"stream {backing.stream!r}: its table {backing.table} with the columns {', '.join(wanted)} is needed: {there}"
    )


def record_fields(dialect: Dialect, backings: Iterable[Backing]) -> Plan[None]:
    """Keep the fields of the rows that a writer of these streams is about to write. Raises RowClassMismatch."""
    streams = [backing.definition for backing in backings if backing.definition.row_type is not None]

    def changes(rows: Collection[Row]) -> dict[str, str | None]:
        stored = {stream: fields for stream, _, fields in rows}
        with _with_command(dialect, streams):
            wanted = fields_to_store(streams, stored)
        return {stream: fields for stream, fields in wanted.items() if fields != stored.get(stream)}

    def body() -> Plan[None]:
        answers = yield (Control.BEGIN, *dialect.init_lock(), STREAMS)
        for stream, fields in changes(answers[-1]).items():
            yield Sql("UPDATE busrep_streams SET fields = ? WHERE stream = ?", (fields, stream))
        yield Control.COMMIT

    if streams and changes((yield STREAMS)[0]):
        yield from in_transaction(body())


def stored_streams(_: Dialect) -> Plan[dict[str, StoredStream]]:
    """What is kept of each stream."""
    return {
        stream: StoredStream(None if backing is None else str(orjson.loads(backing)), load(fields))
        for stream, backing, fields in (yield STREAMS)[0]
    }


def _declared(backing: Backing) -> str | None:
    return orjson.dumps(backing.table).decode() if backing.own else None


def missing(dialect: Dialect, backings: Iterable[Backing], found: int | None = None) -> SchemaError:
    """The error of tables that are not there, or of version ``found``."""
    return SchemaError(found, VERSION, init_command(dialect.store, [backing.definition for backing in backings]))


@contextlib.contextmanager
def _with_command(dialect: Dialect, streams: Collection[Stream[Any]]) -> Iterator[None]:
    """Name the command in the error of a row class."""
    try:
        yield
    except RowClassMismatch as error:
        command = init_command(dialect.store, [stream for stream in streams if stream.name == error.stream])
        raise RowClassMismatch(error.stream, error.reason, error.declared, error.stored, command) from None


def check(dialect: Dialect, backings: Iterable[Backing] = ()) -> Plan[str]:
    """The epoch, after checking the version and the row classes: SchemaError, RowClassMismatch."""
    found = yield from dialect.version()
    backings = list(backings)
    if found != VERSION:
        raise missing(dialect, backings, found)
    streams = [backing.definition for backing in backings if backing.definition.row_type is not None]
    if streams:
        stored = {stream: fields for stream, _, fields in (yield STREAMS)[0]}
        with _with_command(dialect, streams):
            fields_to_store(streams, stored)
    return (yield from epoch(dialect))


def epoch(_: Dialect) -> Plan[str]:
    """The identity of the fact log."""
    answers = yield Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'")
    return str(answers[0][0][0])
