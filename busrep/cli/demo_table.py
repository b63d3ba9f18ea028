"""The database of one run of the demo, and the verdict on what it holds in the end.

The verdict must not rest on the code that it judges, so this is read by plain SQL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import attrs

from busrep.errors import MissingExtra, Unavailable
from busrep.stores import split_store_url

# Seconds to wait for SQLite's one write lock while several processes write.
BUSY_TIMEOUT = 60.0
# A fact whose rows carry this kind was rolled back on purpose: it must appear nowhere.
ABORTED = "aborted"
# Rows of this kind came by publish(), without a row of the application.
BULK = "bulk"

FactContent = tuple[int, str]
"""Number of rows of a fact, and the digest of its rows."""

Facts = Mapping[tuple[str, str], Mapping[int, FactContent]]
"""(stream, writer) -> token -> content: all facts that the table holds."""


@attrs.frozen
class Handled:
    """One fact as a reader handled it, in its ``life``-th process."""

    life: int
    stream: str
    writer: str
    token: int
    content: FactContent


@contextlib.contextmanager
def prepared(store: str, schema: str) -> Iterator[str]:
    """The URL of a database for one run alone, with the application's table and that of the readers: a new SQLite file,
    or a schema in a PostgreSQL database. Raises MissingExtra, Unavailable."""
    postgres = split_store_url(store)[0] == "postgresql"
    url = store
    if postgres:
        url = f"{store}{'&' if '?' in store else '?'}options=-csearch_path%3D{schema}"
        with connected(store) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
    try:
        with connected(url) as connection:
            connection.execute("CREATE TABLE orders (stream TEXT, writer TEXT, id BIGINT)")
            connection.execute("CREATE TABLE handled (reader TEXT, life BIGINT, n BIGINT, line TEXT)")
        yield url
    finally:
        if postgres:
            with connected(store) as connection:
                connection.execute(f"DROP SCHEMA {schema} CASCADE")


@contextlib.contextmanager
def connected(store: str) -> Iterator[Any]:
    """A blocking connection in autocommit, for any thread. Raises MissingExtra, Unavailable."""
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


def fact_digest(payloads: Iterable[bytes]) -> str:
    """Tells whether two facts hold the same rows in the same order."""
    return hashlib.blake2b(b"\n".join(payloads), digest_size=8).hexdigest()


@attrs.define
class Truth:
    """What the database holds of a run.

    ``facts``: (stream, writer) -> token -> content. ``broken``: rows of the application without their fact, facts
    without their row of the application, and facts that were rolled back. ``records``: reader -> what it handled, in
    its order.
    """

    facts: Facts
    broken: int
    records: dict[str, list[Handled]]

    @classmethod
    def of(cls, store: str) -> Truth:
        """Read it. Blocking."""
        facts: dict[tuple[str, str], dict[int, FactContent]] = defaultdict(dict)
        records: dict[str, list[Handled]] = defaultdict(list)
        expected, rolled_back = set(), 0
        with connected(store) as connection:
            found = connection.execute(
                "SELECT stream, writer, id, row FROM busrep_facts ORDER BY stream, writer, id, idx"
            )
            for (stream, writer, token), group in groupby(found, key=lambda row: row[:3]):
                payloads = [str(row[3]).encode() for row in group]
                facts[stream, writer][token] = len(payloads), fact_digest(payloads)
                kind = json.loads(payloads[0])[2]
                rolled_back += kind == ABORTED
                if kind != BULK:
                    expected.add((stream, writer, token))
            orders = set(connection.execute("SELECT stream, writer, id FROM orders"))
            for reader, life, line in connection.execute("SELECT reader, life, line FROM handled ORDER BY life, n"):
                stream, writer, handled = json.loads(line)
                records[reader] += [Handled(life, stream, writer, id, (rows, digest)) for id, rows, digest in handled]
        return cls(facts, rolled_back + len(expected ^ orders), records)


@attrs.define
class ReaderVerdict:
    """What is wrong with one reader's record; all zero but the first three when nothing is.

    ``lost``: rows of the table it never handled. ``extra``: facts it handled that the table does not hold, such
    as rolled back ones. ``torn``: facts with other rows than the table's, or only a part of them.
    ``out_of_order``: facts handled after a later one of the same writer, or twice, in one process.
    ``redeliveries``: facts handled again by the process after a kill, which at-least-once allows.
    """

    facts: int = 0
    rows: int = 0
    redeliveries: int = 0
    lost: int = 0
    out_of_order: int = 0
    extra: int = 0
    torn: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.extra or self.torn or self.out_of_order)


def judge(truth: Facts, record: Iterable[Handled], *, exactly_once: bool) -> ReaderVerdict:
    """Compare one reader's record, in the order in which it was written, with the table."""
    verdict = ReaderVerdict()
    seen: dict[tuple[str, str], set[int]] = {key: set() for key in truth}
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for one in record:
        key = one.stream, one.writer
        life, token = last.get(key, (0, 0))
        if token >= one.token and (life == one.life or exactly_once):
            verdict.out_of_order += 1
        last[key] = one.life, one.token
        content = truth.get(key, {}).get(one.token)
        if content is None:
            verdict.extra += 1
        elif content != one.content:
            verdict.torn += 1
        if one.token in seen.setdefault(key, set()):
            verdict.redeliveries += 1
            continue
        seen[key].add(one.token)
        verdict.facts += 1
        verdict.rows += one.content[0]
    for key, facts in truth.items():
        verdict.lost += sum(content[0] for token, content in facts.items() if token not in seen[key])
    return verdict
