"""The database of one run of the demo, and the verdict on what it holds in the end.

The verdict must not rest on the code that it judges, so this is read by plain SQL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.stores import split_store_url

# Seconds to wait for SQLite's one write lock while several processes write.
BUSY_TIMEOUT = 60.0
# A fact whose rows carry this kind was rolled back on purpose: it must appear nowhere.
ABORTED = "aborted"
# Rows of this kind came by publish(), without a row of the application.
BULK = "bulk"

# What is wrong in a verdict that is not zero there. ``lost``: rows of the table that were never handled. ``extra``:
# facts that were handled and that the table does not hold, such as rolled back ones. ``torn``: facts with other rows
# than the table's, or only a part of them. ``out_of_order``: facts handled after a later one of the same writer, or
# twice, in one process.
WRONG = ("lost", "out_of_order", "extra", "torn")

Fact = tuple[str, str, int]
"""(stream, writer, token)."""

FactContent = tuple[int, str]
"""Number of rows of a fact, and the digest of its rows."""

Handled = tuple[int, Fact, FactContent]
"""One fact as a reader handled it; the number says in which of its processes."""


@contextlib.contextmanager
def own_database(store: str | None, name: str) -> Iterator[tuple[str, Path]]:
    """The URL of a database for one run alone, and a folder for its files: a schema in a given PostgreSQL database, or
    a new SQLite file, beside a given one. Both are removed. Raises ConfigError, MissingExtra, Unavailable."""
    kind, place = ("sqlite", "") if store is None else split_store_url(store)
    if kind == "memory":
        raise ConfigError("a table that processes share is needed: --store sqlite:///file.db or postgresql://...")
    beside = Path(place).parent if kind == "sqlite" and place else None
    made = tempfile.TemporaryDirectory(prefix=f"busrep-{name}-", dir=beside, ignore_cleanup_errors=True)
    with made as folder:
        files = Path(folder).resolve()
        if store is None or kind == "sqlite":
            yield f"sqlite:///{quote(str(files))}/{name}.db", files
            return
        schema = name.replace("-", "_")
        with connected(store) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
        try:
            yield f"{store}{'&' if '?' in store else '?'}options=-csearch_path%3D{schema}", files
        finally:
            with connected(store) as connection:
                connection.execute(f"DROP SCHEMA {schema} CASCADE")


def make_tables(store: str) -> None:
    """The application's table and that of the readers. Raises MissingExtra, Unavailable."""
    with connected(store) as connection:
        connection.execute("CREATE TABLE orders (stream TEXT, writer TEXT, id BIGINT)")
        connection.execute("CREATE TABLE handled (reader TEXT, life BIGINT, n BIGINT, line TEXT)")


@contextlib.contextmanager
def connected(store: str) -> Iterator[Any]:
    """A blocking connection in autocommit, for one thread at a time. Raises MissingExtra, Unavailable."""
    kind, place = split_store_url(store)
    if kind == "sqlite":
        own = sqlite3.connect(place, BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
        with contextlib.closing(own):
            yield own
        return
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("postgres", "a PostgreSQL store") from None
    try:
        with psycopg.connect(place, autocommit=True) as connection:
            yield connection
    except psycopg.Error as error:
        raise Unavailable("PostgreSQL", str(error).strip().splitlines()[-1]) from None


def content_of(payloads: Iterable[bytes]) -> FactContent:
    """The same for two facts that hold the same rows in the same order."""
    rows = list(payloads)
    return len(rows), hashlib.blake2b(b"\n".join(rows), digest_size=8).hexdigest()


@attrs.frozen
class Truth:
    """What the database holds of a run. ``broken``: rows of the application without their fact, facts without their row
    of the application, and facts that were rolled back. ``records``: reader -> what it handled, in its order."""

    facts: dict[Fact, FactContent]
    broken: int
    records: Mapping[str, list[Handled]]

    @classmethod
    def of(cls, store: str) -> Truth:
        """Read it. Blocking."""
        facts: dict[Fact, FactContent] = {}
        records: dict[str, list[Handled]] = defaultdict(list)
        expected, rolled_back = set(), 0
        with connected(store) as connection:
            found = connection.execute(
                "SELECT stream, writer, id, row FROM busrep_facts ORDER BY stream, writer, id, idx"
            )
            for fact, group in groupby(found, key=lambda row: row[:3]):
                payloads = [str(row[3]).encode() for row in group]
                facts[fact] = content_of(payloads)
                kind = json.loads(payloads[0])[2]
                rolled_back += kind == ABORTED
                if kind != BULK:
                    expected.add(fact)
            orders = set(connection.execute("SELECT stream, writer, id FROM orders"))
            for reader, life, line in connection.execute("SELECT reader, life, line FROM handled ORDER BY life, n"):
                stream, writer, handled = json.loads(line)
                records[reader] += [(life, (stream, writer, token), tuple(content)) for token, content in handled]
        return cls(facts, rolled_back + len(expected ^ orders), records)


def judge(truth: Mapping[Fact, FactContent], record: Iterable[Handled], *, exactly_once: bool) -> dict[str, int]:
    """Compare one reader's record, in the order in which it was written, with the table: what it handled, and what is
    `WRONG`. ``redeliveries``: facts handled again by the process after a kill, which at-least-once allows."""
    verdict = dict.fromkeys(("facts", "rows", "redeliveries", *WRONG), 0)
    seen: set[Fact] = set()
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for life, fact, content in record:
        stream, writer, token = fact
        last_life, last_token = last.get((stream, writer), (0, 0))
        verdict["out_of_order"] += last_token >= token and (last_life == life or exactly_once)
        last[stream, writer] = life, token
        verdict["extra"] += fact not in truth
        verdict["torn"] += truth.get(fact, content) != content
        if fact in seen:
            verdict["redeliveries"] += 1
            continue
        seen.add(fact)
        verdict["facts"] += 1
        verdict["rows"] += content[0]
    verdict["lost"] = sum(rows for fact, (rows, _) in truth.items() if fact not in seen)
    return verdict
