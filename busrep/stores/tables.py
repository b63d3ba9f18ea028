"""The tables, by the version of the schema that has them first; schema.py says what each is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from busrep.stores.plans import Sql

# In braces stand the words that differ: {when} is the type of a timestamp and {now} its default, {number} numbers rows,
# {plain} and {hot} are what stands behind a table, {hot} where rows are updated often. A table of SQLite alone stands
# behind {sqlite}.
VERSIONS: Mapping[int, Sequence[str]] = {
    1: (
        "CREATE TABLE busrep_meta (key text PRIMARY KEY, value text NOT NULL){plain}",
        # Locked FOR SHARE by every write transaction: nothing that changes often may live here.
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
    4: (
        "ALTER TABLE busrep_streams ADD COLUMN fields text",
        "ALTER TABLE busrep_readers ADD COLUMN stopped text",
    ),
}


def statements(version: int, words: Mapping[str, str]) -> list[Sql]:
    """The statements that bring the schema from ``version`` - 1 to ``version``."""
    mine = [text for text in VERSIONS[version] if not text.startswith("{") or text[1 : text.index("}")] in words]
    return [Sql(text.format_map(words)) for text in mine]
