"""Creating, checking and describing the tables.

meta (key, value): schema version, epoch; ``server``: PostgreSQL's system identifier and timeline, which the first claim
    notes; ``incarnations``: claims are above that, since a restore or a failover.
writers (writer, incarnation, finished): one row a name; write transactions may lock it FOR SHARE, so nothing
    that changes often may live in it. ``finished``: the incarnation that was fenced for being silent;
    below zero, the one whose process has won the name back since: it may not know yet, and ask again. If that is
    finished as well, the row "NAME won" keeps both. A row "NAME series" holds the number of the series of a name's
    appends, once an answer to one was lost.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from busrep.errors import ConfigError, RowClassMismatch, SchemaError
from busrep.shapes import fields_to_store, load
from busrep.stores.declared import init_command
from busrep.stores.dialect import Backing, Dialect
from busrep.stores.interface import StoredStream, silence_of
from busrep.stores.plans import Control, NoSuchTable, Plan, Row, Sql, in_transaction, transaction
from busrep.streams import Stream

# The tables, by the version of the schema that has them first. In braces stand the words of a dialect: {when} is the
# type of a timestamp and {now} its default, {number} numbers rows, {plain} and {hot} are what stands behind a table,
# {hot} where rows are updated often. What one database alone has stands behind {sqlite} or {postgresql}.
VERSIONS: Mapping[int, Sequence[str]] = {
    1: (
        "CREATE TABLE busrep_meta (key text PRIMARY KEY, value text NOT NULL){plain}",
        # Locked FOR SHARE by write transactions: nothing that changes often may live here.
        "CREATE TABLE busrep_writers (writer text PRIMARY KEY, incarnation bigint NOT NULL, claimed_at {when}, "
        "finished bigint){plain}",
        "CREATE TABLE busrep_positions (stream text, writer text, position bigint NOT NULL, floor bigint NOT NULL, "
        "registered boolean NOT NULL, seen_at {when} NOT NULL, finished bigint, PRIMARY KEY (stream, writer)){hot}",
        "CREATE TABLE busrep_streams (stream text PRIMARY KEY, backing text){plain}",
        "{sqlite}CREATE TABLE busrep_sequences (stream text PRIMARY KEY, value bigint NOT NULL){plain}",
        "CREATE TABLE busrep_facts (stream text, writer text, id bigint, idx integer, row text NOT NULL, "
        "committed_at {when} NOT NULL DEFAULT {now}, PRIMARY KEY (stream, writer, id, idx)){plain}",
        "CREATE TABLE busrep_readers (reader text, stream text, writer text, position bigint NOT NULL, "
        "epoch text NOT NULL, saved_at {when} NOT NULL, PRIMARY KEY (reader, stream, writer)){hot}",
        "CREATE TABLE busrep_dead_letters (id {number} PRIMARY KEY, reader text NOT NULL, stream text NOT NULL, "
        "writer text NOT NULL, tokens text NOT NULL, payloads text NOT NULL, error text NOT NULL, "
        "dead_at {when} NOT NULL)",
    ),
    2: (
        "CREATE TABLE busrep_bootstraps (reader text, stream text, id text NOT NULL, agreement text NOT NULL, "
        "digest text NOT NULL, state text NOT NULL, parts bigint NOT NULL, rows bigint NOT NULL, "
        "bytes bigint NOT NULL, parts_total bigint NOT NULL, rows_total bigint NOT NULL, syncs bigint NOT NULL, "
        "reason text NOT NULL, saved_at {when} NOT NULL, PRIMARY KEY (reader, stream)){hot}",
    ),
    3: (
        # Unlogged: what a crash of the server takes is staged again, for its rows are counted before they become facts.
        "CREATE {unlogged}TABLE busrep_staged (query text, attempt text, seq bigint, batch bigint NOT NULL, "
        "part integer NOT NULL, key text {bytewise}NOT NULL, rows text NOT NULL, "
        "staged_at {when} NOT NULL DEFAULT {now}, PRIMARY KEY (query, attempt, seq)){plain}",
        "CREATE TABLE busrep_sinks (query text PRIMARY KEY, checkpoint text NOT NULL, batch bigint NOT NULL, "
        "run text NOT NULL, stream text NOT NULL, writer text NOT NULL, incarnation bigint NOT NULL, "
        "rows bigint NOT NULL, first bigint NOT NULL, last bigint NOT NULL, once boolean NOT NULL, "
        "done_at {when} NOT NULL){hot}",
    ),
    4: ("ALTER TABLE busrep_streams ADD COLUMN fields text", "ALTER TABLE busrep_readers ADD COLUMN stopped text"),
    5: (
        # For processes of older versions, which take a name by an UPDATE of its row: they wait for facts that hold it
        # by an advisory lock, but not for long, for they have the row meanwhile. A row that is no name's nobody holds.
        "{postgresql}CREATE OR REPLACE FUNCTION busrep_take_name() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = "
        "'200ms' SET search_path = pg_catalog, pg_temp AS $$BEGIN PERFORM pg_advisory_xact_lock(TG_RELID::int, "
        "hashtext(NEW.writer)); RETURN NEW; END$$",
        "{postgresql}CREATE TRIGGER busrep_take_name BEFORE UPDATE OF incarnation ON busrep_writers FOR EACH ROW "
        "WHEN (coalesce(current_setting('busrep.takes_name', true), '') = '') EXECUTE FUNCTION busrep_take_name()",
    ),
}

VERSION = max(VERSIONS)

# The row stays the same one: who prunes, or registers to read, may be waiting for its lock.
INSERT_STREAM = (
    "INSERT INTO busrep_streams (stream, backing, fields) VALUES (?, ?, ?) "
    "ON CONFLICT (stream) DO UPDATE SET backing = excluded.backing, fields = excluded.fields"
)
STREAMS = Sql("SELECT stream, backing, fields FROM busrep_streams")


def statements(dialect: Dialect, version: int) -> list[Sql]:
    """The statements that bring the schema from ``version`` - 1 to ``version``."""
    words = dialect.words
    mine = [text for text in VERSIONS[version] if not text.startswith("{") or text[1 : text.index("}")] in words]
    return [Sql(text.format_map(words)) for text in mine]


def new_epoch() -> str:
    """A random identity for a fact log: 32 lowercase hex digits."""
    return secrets.token_hex(16)


def init(dialect: Dialect, redefine: Collection[str] = ()) -> Plan[None]:
    """Create or migrate all tables, and the sequences of the streams.

    ``redefine``: streams whose fields are stored as declared, whatever was stored. Raises SchemaError when the schema
    is newer, ConfigError when an application's table has other columns, RowClassMismatch.
    """
    wanted = dialect.backings

    def body() -> Plan[None]:
        yield (Control.BEGIN, *dialect.init_lock)
        found = yield from dialect.version()
        if found is not None and found > VERSION:
            raise SchemaError(found, VERSION)
        yield from dialect.check_schema()
        for version in range((found or 0) + 1, VERSION + 1):
            yield tuple(statements(dialect, version))
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
            yield dialect.create_sequence(stream), Sql(INSERT_STREAM, (stream, declared, fields))
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
    tables = {stream: orjson.dumps(backing.table).decode() for stream, backing in wanted.items() if backing.own}
    return {stream: (tables.get(stream), fields[stream]) for stream in wanted}


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
        answers = yield (Control.BEGIN, *dialect.init_lock, STREAMS)
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


def missing(dialect: Dialect, found: int | None = None) -> SchemaError:
    """The error of tables that are not there, or of version ``found``."""
    return SchemaError(
        found, VERSION, init_command(dialect.store, [one.definition for one in dialect.backings.values()])
    )


@contextlib.contextmanager
def _with_command(dialect: Dialect, streams: Collection[Stream[Any]]) -> Iterator[None]:
    """Name the command in the error of a row class."""
    try:
        yield
    except RowClassMismatch as error:
        command = init_command(dialect.store, [stream for stream in streams if stream.name == error.stream])
        raise RowClassMismatch(error.stream, error.reason, error.declared, error.stored, command) from None


def check(dialect: Dialect, *others: Backing) -> Plan[str]:
    """The epoch, once version, rights and row classes are checked: SchemaError, RowClassMismatch, Unavailable."""
    found = yield from dialect.version()
    if found != VERSION:
        raise missing(dialect, found)
    backings = [*dialect.backings.values(), *others]
    yield from dialect.check_visible([backing.table for backing in backings if backing.own])
    streams = [backing.definition for backing in backings if backing.definition.row_type is not None]
    if streams:
        stored = {stream: fields for stream, _, fields in (yield STREAMS)[0]}
        with _with_command(dialect, streams):
            fields_to_store(streams, stored)
    return (yield from epoch(dialect))


EPOCH = Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'")


def epoch(_: Dialect) -> Plan[str]:
    """The identity of the fact log."""
    answers = yield EPOCH
    return str(answers[0][0][0])


# The fields of each entry, in the order of the queries below.
WRITER = ("position", "floor", "registered", "incarnation", "silent_for")
READER = ("position", "lag", "epoch", "saved_ago", "stopped")
BOOTSTRAP = ("state", "parts", "parts_total", "rows", "rows_total", "bytes", "syncs", "reason", "saved_ago")
SINK = ("stream", "writer", "batch", "rows", "last", "done_ago")


@transaction
def status(dialect: Dialect) -> Plan[dict[str, Any]]:
    """Everything ``busrep db status`` shows, from one snapshot."""
    answers = yield (Control.SNAPSHOT, *_questions(dialect))
    ((epoch, replica),), listed, writers, readers, ((dead,),), counts, bootstraps, sinks = answers
    # What is staged is in no log of the server's: a replica does not have it.
    staged = None
    if not replica:
        staged = len((yield Sql("SELECT attempt, count(*) FROM busrep_staged GROUP BY attempt"))[0])
    streams: dict[str, Any] = {}
    for name, declared in listed:
        streams[name] = yield from _stream(dialect, name, declared, dict(counts).get(name, 0))
    yield Control.COMMIT
    silence = silence_of((writer, float(silent_for)) for _, writer, *_, silent_for in writers)
    for stream, writer, *state in writers:
        at = streams.setdefault(stream, {"table": None, "rows": None, "sequence": None, "writers": {}})
        told = dict(zip(WRITER, state, strict=True))
        at["writers"][writer] = told | {"registered": bool(told["registered"]), "silent_for": silence[writer]}
    reading: dict[str, Any] = {}
    for reader, stream, writer, *state in readers:
        told = dict(zip(READER, state, strict=True))
        told |= {"lag": max(0, told["lag"]), "saved_ago": float(told["saved_ago"])}
        reading.setdefault(reader, {}).setdefault(stream, {})[writer] = told
    loading: dict[str, Any] = {}
    for reader, stream, *saved in bootstraps:
        loading.setdefault(reader, {})[stream] = dict(zip(BOOTSTRAP, saved, strict=True))
    return {
        "schema_version": VERSION, "database": dialect.name, "epoch": epoch, "streams": streams,
        "readers": reading, "dead_letters": dead, "bootstraps": loading,
        "sinks": {query: dict(zip(SINK, done, strict=True)) for query, *done in sinks}, "staged": staged,
    }  # fmt: skip


def _questions(dialect: Dialect) -> list[Sql]:
    return [
        Sql(f"SELECT value, {dialect.replica} FROM busrep_meta WHERE key = 'epoch'"),
        Sql("SELECT stream, backing FROM busrep_streams ORDER BY stream"),
        Sql(
            "SELECT p.stream, p.writer, p.position, p.floor, p.registered, coalesce(w.incarnation, 0), "
            f"{dialect.age('p.seen_at')} FROM busrep_positions p LEFT JOIN busrep_writers w "
            "ON w.writer = p.writer ORDER BY p.stream, p.writer"
        ),
        Sql(
            "SELECT r.reader, r.stream, r.writer, r.position, coalesce(p.position, 0) - r.position, r.epoch, "
            f"{dialect.age('r.saved_at')}, r.stopped FROM busrep_readers r LEFT JOIN busrep_positions p "
            "ON p.stream = r.stream AND p.writer = r.writer WHERE r.writer <> '' ORDER BY r.reader, r.stream, r.writer"
        ),
        Sql("SELECT count(*) FROM busrep_dead_letters"),
        Sql("SELECT stream, count(*) FROM busrep_facts GROUP BY stream"),
        Sql(
            "SELECT reader, stream, state, parts, parts_total, rows, rows_total, bytes, syncs, reason, "
            f"{dialect.age('saved_at')} FROM busrep_bootstraps ORDER BY reader, stream"
        ),
        Sql(
            f"SELECT query, stream, writer, batch, rows, last, {dialect.age('done_at')} FROM busrep_sinks "
            "WHERE batch >= 0 ORDER BY query"
        ),
    ]


def _stream(dialect: Dialect, name: str, declared: str | None, rows: int | None) -> Plan[dict[str, Any]]:
    backing = dialect.backings.get(name)
    found = (yield dialect.sequence(name))[0]
    if declared is not None:  # counted only if this process declared it: else its name alone is known
        rows = (yield Sql(f"SELECT count(*) FROM {backing.table}"))[0][0][0] if backing else None
    return {
        "table": orjson.loads(declared) if declared else "busrep_facts", "rows": rows,
        "sequence": found[0][0] if found else None, "writers": {},
    }  # fmt: skip
