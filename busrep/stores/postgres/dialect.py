"""PostgreSQL's pieces of SQL (13 or newer: WITH TIES, pg_current_xact_id)."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters; one interface for both databases
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from busrep.errors import ConfigError, Unavailable
from busrep.stores.dialect import MOVES, NO_BOOTSTRAP, NOT_HELD, Backing, columns_of, no_position_above, row_columns
from busrep.stores.plans import Plan, Sql
from busrep.stores.postgres.names import NameLocks

# See schema.py. Tables that are updated often have room on the page, which keeps these updates off the index.
WORDS = {
    "when": "timestamptz", "now": "now()", "number": "bigint GENERATED ALWAYS AS IDENTITY", "plain": "",
    "hot": " WITH (fillfactor = 50)", "unlogged": "UNLOGGED ", "bytewise": 'COLLATE "C" ', "postgresql": "",
}  # fmt: skip


def sequence_name(stream: str) -> str:
    """The stream's sequence: its name where that is a plain identifier, else made plain, with a hash to be unique."""
    if re.fullmatch(r"[a-z][a-z0-9_]{0,39}", stream):
        return f"busrep_seq_{stream}"
    plain = re.sub(r"[^a-z0-9_]", "_", stream.lower())[:30]
    return f"busrep_seq_{plain}_{hashlib.blake2b(stream.encode(), digest_size=6).hexdigest()}"


# The timeline is another one after each promotion, and after a restore to a point in time. Both functions are
# everybody's to call; on a standby the second is an error.
SERVER = (
    "CASE WHEN pg_is_in_recovery() THEN '' ELSE (SELECT c.system_identifier::text FROM pg_control_system() c) "
    "|| '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8) END"
)
# The schema ``n`` in which busrep's tables are.
BESIDE = (
    "pg_namespace n JOIN pg_class m ON m.relnamespace = n.oid AND m.relname = 'busrep_meta' "
    "AND pg_table_is_visible(m.oid)"
)
# Bulk rows travel as three strings: arrays cost psycopg 2.5 times as much.
ROWS = (
    "unnest(string_to_array(?, ',')::bigint[], string_to_array(?, ',')::int[], "
    "string_to_array(?, chr(10))) AS f(id, idx, row)"
)


def _columns(tokens: Iterable[int], places: Iterable[int], payloads: Iterable[bytes]) -> list[object]:
    """The parameters of `ROWS`."""
    return [",".join(map(str, tokens)), ",".join(map(str, places)), b"\n".join(payloads).decode()]


# In the error of `PostgresDialect.still_in`.
ANOTHER = "busrep: this is another transaction:"
LOCKS = "SET LOCAL lock_timeout"  # how a statement begins that bounds what comes behind it
# By the second statement a policy that hides rows is an error: they would pass for rows that are not there.
SNAPSHOT = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SET LOCAL row_security = off")


class PostgresDialect(NameLocks):
    """A `Dialect`."""

    name: str = "postgresql"
    now: str = "clock_timestamp()"
    ago: str = "(clock_timestamp() - ? * interval '1 second')"
    seconds: str = "extract(epoch FROM statement_timestamp())::float8"
    share: str = " FOR SHARE"
    exclusive: str = " FOR UPDATE"
    replica: str = "pg_is_in_recovery()"
    marker: str = "pg_current_xact_id()::text"
    # Until the end of the transaction; the stricter settings are left alone.
    server: str | None = SERVER
    same_server: str = (
        "(pg_is_in_recovery() OR coalesce(nullif((SELECT m.value FROM busrep_meta m WHERE m.key = 'server'), ''), "
        f"{SERVER}) = {SERVER})"
    )
    # What is not set for the transaction itself, a reload of the server's configuration changes in the middle of it.
    durable: str = (
        "set_config('synchronous_commit', "
        "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'local'), true)"
    )
    # An advisory lock, whose key may be any constant: "busrep" in hex.
    init_lock: Sequence[Sql] = (Sql(f"SELECT pg_advisory_xact_lock({0x627573726570})"),)
    words: Mapping[str, str] = WORDS
    largest: str = "greatest"

    def version(self) -> Plan[int | None]:
        """See `Dialect`; asked in two steps, since an error would end the transaction this may run in.

        Not by to_regclass: it may answer from a cache that does not know yet what another process has made.
        """
        answers = yield Sql("SELECT 1 FROM pg_class WHERE relname = 'busrep_meta' AND pg_table_is_visible(oid)")
        if not answers[0]:
            return None
        answers = yield Sql("SELECT value FROM busrep_meta WHERE key = 'version'")
        return int(answers[0][0][0]) if answers[0] else None

    def check_schema(self) -> Plan[None]:
        answers = yield Sql(f"SELECT n.nspname, current_schema() FROM {BESIDE} WHERE n.nspname <> current_schema()")
        for there, here in answers[0]:
            raise ConfigError(
                f"busrep's tables are in schema {there!r}, and 'db init' would make what is new in {here!r}, which "
                f"comes first in search_path: run it with {there!r} first, such as ?options=-csearch_path%3D{there} in "
                "the store's URL"
            )

    def check_visible(self, tables: Sequence[str]) -> Plan[None]:
        hides, elsewhere = yield (
            Sql(
                "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relrowsecurity AND row_security_active(c.oid) "
                "AND (starts_with(c.relname, 'busrep_') AND pg_table_is_visible(c.oid) "
                "OR c.oid IN (SELECT to_regclass(value) FROM json_array_elements_text(?::json)))",
                (json.dumps(tables),),
            ),
            Sql(
                f"SELECT n.nspname, s.relnamespace::regnamespace || '.' || s.relname FROM {BESIDE} "
                "JOIN pg_class s ON s.relnamespace <> n.oid AND pg_table_is_visible(s.oid) "
                "WHERE s.relname IN (SELECT value FROM json_array_elements_text(?::json))",
                (json.dumps([sequence_name(stream) for stream in self.backings]),),
            ),
        )
        if hidden := ", ".join(table for (table,) in hides):
            reason = f"row-level security may hide rows of {hidden} from this role"
            raise Unavailable("PostgreSQL", f"{reason}: see 'Rights in PostgreSQL' in docs/guides/deploy.md")
        for there, name in elsewhere:  # from two sequences of a stream two writers would take the same IDs
            raise ConfigError(
                f"the sequence {name} is not in schema {there!r}, where busrep's tables are: set search_path so that "
                f"{there!r} comes first. If {there!r} has no such sequence, ALTER SEQUENCE {name} SET SCHEMA {there}"
            )

    def age(self, column: str) -> str:
        return f"extract(epoch FROM clock_timestamp() - {column})::float8"

    def values(self, *columns: tuple[str, str]) -> str:
        picked = ", ".join(f"(value->>{at})::{kind} AS {name}" for at, (name, kind) in enumerate(columns))
        return f"(SELECT {picked} FROM json_array_elements(?::json))"

    def lock_timeout(self, seconds: float) -> Sequence[Sql]:
        """See `Dialect`; 0 would mean no bound."""
        return [Sql(f"{LOCKS} = {max(1, int(seconds * 1000))}")]

    def columns(self, table: str) -> Sql:
        return Sql(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(?::text) AND attnum > 0 "
            "AND NOT attisdropped ORDER BY attnum",
            (table,),
        )

    def create_sequence(self, stream: str) -> Sql:
        return Sql(f'CREATE SEQUENCE IF NOT EXISTS "{sequence_name(stream)}" CACHE 1 NO CYCLE')

    def next_ids(self, stream: str, count: int) -> Sql:
        each = " FROM generate_series(1, ?)" if count > 1 else ""
        # Durable: of IDs that no row holds the sequence alone tells that they were given. PostgreSQL writes that to its
        # log once in 32 values, in the transaction of whoever takes the first of them, which may still be open. COMMIT
        # waits for the disk only in a transaction that has written to the log itself: so it writes an empty message.
        return Sql(
            f"SELECT nextval('\"{sequence_name(stream)}\"'), {self.durable}, "
            "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn() "
            f"THEN pg_logical_emit_message(true, 'busrep', '') IS NULL ELSE false END{each}",
            (count,) if count > 1 else (),
            repeated=True,
        )

    def new_ids(self, stream: str, count: int) -> str:
        """An expression: one new ID, or an array of them. Only COMMIT has them on the disk, see `next_ids`."""
        one = f"nextval('\"{sequence_name(stream)}\"')"
        return one if count == 1 else f"ARRAY(SELECT {one} FROM generate_series(1, {count:d}))"

    def sequence(self, stream: str) -> Sql:
        name = sequence_name(stream)
        return Sql(
            "SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, p.seqcache, p.seqcycle, "
            f'p.seqincrement FROM "{name}" s, pg_sequence p WHERE p.seqrelid = \'"{name}"\'::regclass'
        )

    def sequence_name(self, stream: str) -> str:
        return f'"{sequence_name(stream)}"'

    def raise_sequence(self, stream: str, least: int) -> Plan[None]:
        """See `Dialect`. ALTER takes the lock that nextval waits for, so that setval cannot undo one."""
        name = sequence_name(stream)
        yield (
            Sql(f'ALTER SEQUENCE "{name}" OWNED BY NONE'),
            Sql(
                f'SELECT setval(\'"{name}"\', ?) FROM "{name}" '
                "WHERE CASE WHEN is_called THEN last_value ELSE last_value - 1 END < ?",
                (least, least),
            ),
        )

    def insert(self, backing: Backing, writer: str, rows: Sequence[tuple[int, int, bytes]]) -> Sequence[Sql]:
        if len(rows) > 1 or backing.own:
            source, params = f"SELECT ?, ?, f.id, f.idx, f.row FROM {ROWS}", _columns(*zip(*rows, strict=True))
        else:
            ((token, at, payload),) = rows
            source, params = "VALUES (?, ?, ?, ?, ?)", [token, at, payload.decode()]
        if not backing.own:
            text = f"INSERT INTO busrep_facts (stream, writer, id, idx, row) {source}"
            return [Sql(text, (backing.stream, writer, *params), repeated=True)]
        for *_, payload in rows:
            columns_of(backing, payload)  # their number; their types are the table's matter
        return [Sql(self.insert_own(backing, ROWS), (writer, *params))]

    def hold(self, held: Sql) -> Sql:
        # Of constants alone the server would evaluate the wrong one before it looks.
        return Sql(
            f"SELECT CASE WHEN count(*) = 1 THEN 1 ELSE ('{NOT_HELD} ' || count(*)::text)::int END, {self.durable} "
            f"FROM (SELECT {self.marker} FROM busrep_writers WHERE {held.text} FOR SHARE) AS c",
            held.params,
            repeated=True,
        )

    def insert_numbering(self, stream: str, writer: str, payloads: Sequence[bytes]) -> Sql:
        """See `Dialect`. COMMIT waits for the disk: that the IDs were given is on it, too."""
        next_id = f"nextval('\"{sequence_name(stream)}\"')"
        one, rows = f"VALUES (?, ?, {next_id}, 0, ?)", "unnest(string_to_array(?, chr(10))) AS f(row)"
        source = one if len(payloads) == 1 else f"SELECT ?, ?, {next_id}, 0, f.row FROM {rows}"
        text = f"INSERT INTO busrep_facts (stream, writer, id, idx, row) {source} RETURNING id"
        return Sql(text, (stream, writer, b"\n".join(payloads).decode()), repeated=True)

    def given(self, stream: str) -> Sql:
        return Sql(f'SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM "{sequence_name(stream)}"')

    def insert_own(self, backing: Backing, source: str) -> str:
        """Rows f(id, idx, row) of an application's table; one parameter before those of ``source``: the writer."""
        sign = "-" if backing.negative else ""
        named = ", ".join(f"'{column.strip(chr(34))}', f.row::json->{at}" for at, column in enumerate(backing.columns))
        names = [backing.id, backing.writer, *([backing.index] if backing.index else []), *backing.columns]
        picked = [f"{sign}f.id", "?", *(["f.idx"] if backing.index else []), *(f"r.{c}" for c in backing.columns)]
        return (
            f"INSERT INTO {backing.table} ({', '.join(names)}) SELECT {', '.join(picked)} FROM {source}, "
            f"LATERAL json_populate_record(NULL::{backing.table}, json_build_object({named})) AS r"
        )

    def picked(self, backing: Backing) -> Sequence[str]:
        """See `Dialect`. Of an application's table the server makes the JSON: with all digits of a float, whatever is
        set here. That is set in the same statement, for the transaction alone, before the first row is looked at."""
        if not backing.own:
            return ["row"]
        made = f"json_build_array({', '.join(backing.columns)})::text"
        return [f"CASE WHEN (SELECT set_config('extra_float_digits', '1', true)) <> '' THEN {made} END"]

    def page(self, backing: Backing, writer: str, after: int, upto: int, limit: int) -> Sql:
        where, params = backing.of_writer(writer)
        span, limits = backing.between(after, upto)
        columns, names = row_columns(self, backing)
        return Sql(
            f"SELECT token, {names} FROM (SELECT {columns} FROM {backing.table} "
            f"WHERE {where} AND {span} ORDER BY {backing.by_token} FETCH FIRST {limit + 1} ROWS WITH TIES) AS p "
            "ORDER BY token, place",
            (*params, *limits),
        )

    def payloads(self, backing: Backing, rows: Sequence[tuple[Any, ...]]) -> list[bytes]:
        return [backing.payload(row[1]) for row in rows]

    def still_in(self, marker: object) -> Sql:
        """A statement that fails, with an error whose text has `ANOTHER`, in any transaction but that one."""
        # Of constants alone the server would evaluate it before it asks.
        wrong = f"('{ANOTHER} ' || pg_current_xact_id()::text)::int"
        return Sql(f"SELECT CASE WHEN {self.marker} = ? THEN 0 ELSE {wrong} END", (str(marker),))

    def outcome(self, marker: object) -> Sql | None:
        """See `Dialect`. NULL: so long ago that the server has forgotten it. None: it was never begun."""
        if marker is None:
            return None
        return Sql("SELECT coalesce(pg_xact_status(?::xid8), '')", (str(marker),), repeated=True)

    def save(self, reader: str, epoch: str, moved: str, count: int) -> Sql:
        """See `Dialect`. Locked first, so that what was counted is what is updated. Durable: `wait_for` returned for
        what is saved, and an exactly-once handler's effects are committed with it."""
        values = self.values(*MOVES)
        # Without a sequence of that name NULL; the function gives NULL, too, of one that gave nothing since it was set.
        bound = no_position_above(
            "CASE WHEN to_regclass(v.sequence) IS NULL THEN NULL "
            "ELSE coalesce(pg_sequence_last_value(to_regclass(v.sequence)), v.given) END"
        )
        return Sql(
            f"WITH v AS (SELECT * FROM {values} AS j), hit AS (SELECT r.stream, r.writer, v.new "
            "FROM busrep_readers r JOIN v ON r.stream = v.stream AND r.writer = v.writer AND r.position = v.old "
            f"WHERE r.reader = ? AND r.epoch = ? AND {NO_BOOTSTRAP} AND {bound} "
            "ORDER BY r.stream, r.writer FOR UPDATE OF r), "
            "moved AS (UPDATE busrep_readers r SET position = hit.new, saved_at = clock_timestamp(), "
            "stopped = NULL FROM hit "
            "WHERE r.reader = ? AND r.stream = hit.stream AND r.writer = hit.writer "
            "AND (SELECT count(*) FROM hit) = ? RETURNING r.stream) "
            f"SELECT stream, writer, {self.durable} FROM hit",
            (moved, reader, epoch, reader, count),
        )
