"""Making facts of staged rows: one statement for a batch, which each database writes in its own way.

PostgreSQL keeps many staged rows in one row of the staging table, one a line. In SQLite a staged row is a row of it:
SQLite cannot split a text without reading its JSON.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from busrep.stores.dialect import Backing, Dialect
from busrep.stores.plans import Plan, Sql
from busrep.stores.postgres.dialect import PostgresDialect, sequence_name


def insert_staged(
    dialect: Dialect, backing: Backing, writer: str, query: str, attempts: Sequence[str], ordered: bool
) -> Plan[tuple[int, int, int]]:
    """Insert a fact for each row that these attempts staged, within a transaction.

    The IDs come from the stream's sequence in the order of (part, seq), with ``ordered`` of (key, part, seq). Returns
    (facts, first token, last token).
    """
    named = orjson.dumps(list(attempts)).decode()
    insert = _in_postgres if isinstance(dialect, PostgresDialect) else _in_sqlite
    return insert(dialect, backing, writer, (query, named), ordered)


def _in_postgres(
    dialect: Any, backing: Backing, writer: str, params: tuple[str, str], ordered: bool
) -> Plan[tuple[int, int, int]]:
    """The IDs are taken above the sort."""
    numbered = (
        f"(SELECT nextval('\"{sequence_name(backing.stream)}\"') AS id, 0 AS idx, o.row FROM (SELECT u.row "
        "FROM busrep_staged s, unnest(string_to_array(s.rows, chr(10))) WITH ORDINALITY AS u(row, place) "
        "WHERE s.query = ? AND s.attempt IN (SELECT json_array_elements_text(?::json)) "
        f"ORDER BY {'s.key, ' if ordered else ''}s.part, s.seq, u.place) AS o) AS f"
    )
    if backing.own:
        text, first = dialect.insert_own(backing, numbered), [writer]
    else:
        names = "stream, writer, id, idx, row"
        text = f"INSERT INTO busrep_facts ({names}) SELECT ?, ?, f.id, f.idx, f.row FROM {numbered}"
        first = [backing.stream, writer]
    answers = yield Sql(
        f"WITH new AS ({text} RETURNING {backing.token} AS token) "
        "SELECT count(*), coalesce(min(token), 0), coalesce(max(token), 0) FROM new",
        (*first, *params),
    )
    count, lowest, highest = answers[0][0]
    return count, lowest, highest


def _in_sqlite(
    dialect: Dialect, backing: Backing, writer: str, params: tuple[str, str], ordered: bool
) -> Plan[tuple[int, int, int]]:
    source = "FROM busrep_staged WHERE query = ? AND attempt IN (SELECT value FROM json_each(?))"
    count = (yield Sql(f"SELECT count(*) {source}", params))[0][0][0]
    if not count:
        return 0, 0, 0
    last = (yield dialect.next_ids(backing.stream, count))[0][0][0]
    order = "key, part, seq" if ordered else "part, seq"
    id = f"{'-' if backing.negative else ''}(? + row_number() OVER (ORDER BY {order}))"
    if backing.own:
        index = [backing.index] if backing.index else []
        names = [backing.id, backing.writer, *index, *backing.columns]
        # Of an array or an object it gives the JSON text, of a boolean a number: as a fact is stored.
        picked = [f"json_extract(rows, '$[{at}]')" for at in range(len(backing.columns))]
        values = ", ".join([id, "?", *("0" for _ in index), *picked])
        text = f"INSERT INTO {backing.table} ({', '.join(names)}) SELECT {values}"
        first: tuple[Any, ...] = (last - count, writer)
    else:
        text = f"INSERT INTO busrep_facts (stream, writer, id, idx, row) SELECT ?, ?, {id}, 0, rows"
        first = (backing.stream, writer, last - count)
    yield Sql(f"{text} {source}", (*first, *params))
    return count, last - count + 1, last
