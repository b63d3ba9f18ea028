"""The soak's own look at the database, past busrep: the application's tables, the readers' effects, and the truth.

The verdict must not rest on the code that it judges, so facts are read by plain SQL here.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby
from typing import Any

import attrs

from busrep.errors import MissingExtra
from tests.proof.soak.task import ABORTED, BULK, digest
from tests.proof.soak.verdict import Content, Key, Truth

# What the soak's own connections, the application's so to speak, are called on the server.
APPLICATION = "soak"

# Deleted rows are kept aside by the database itself, in the transaction that deletes them: pruned ones still count.
PREPARE = """
CREATE TABLE soak_business (stream TEXT, writer TEXT, id BIGINT, PRIMARY KEY (stream, writer, id));
CREATE TABLE soak_effects (n BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, reader TEXT, stream TEXT,
    writer TEXT, token BIGINT, rows_ BIGINT, digest TEXT);
CREATE TABLE soak_pruned (LIKE busrep_facts);
CREATE FUNCTION soak_keep() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO soak_pruned SELECT OLD.*; RETURN OLD; END $$;
CREATE TRIGGER soak_keep BEFORE DELETE ON busrep_facts FOR EACH ROW EXECUTE FUNCTION soak_keep();
CREATE VIEW soak_facts AS SELECT * FROM busrep_facts UNION ALL SELECT * FROM soak_pruned
"""

BUSINESS = "INSERT INTO soak_business (stream, writer, id) VALUES (%s, %s, %s)"
EFFECTS = """
INSERT INTO soak_effects (reader, stream, writer, token, rows_, digest)
SELECT %s, %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::text[])
"""


def psycopg() -> Any:
    """The driver. Raises MissingExtra."""
    try:
        import psycopg as driver
    except ImportError:
        raise MissingExtra("postgres", "the soak") from None
    return driver


_OPTIONS: dict[str, Any] = {"connect_timeout": 5, "application_name": APPLICATION, "keepalives_idle": 5}


async def application_connection(url: str) -> Any:
    """A connection of the application's own, not of busrep's. Raises psycopg.Error."""
    return await _prepared(await psycopg().AsyncConnection.connect(url, **_OPTIONS))


async def blocking_connection(url: str) -> BlockingConnection:
    """The same for threads. Raises psycopg.Error."""
    connection = BlockingConnection(psycopg().Connection.connect(url, **_OPTIONS))
    await _prepared(connection)
    return connection


async def _prepared(connection: Any) -> Any:
    await connection.execute("SET lock_timeout = '5s'")
    await connection.commit()
    return connection


@attrs.frozen
class BlockingConnection:
    """A psycopg.Connection that is used like an AsyncConnection: its coroutines never wait for an event loop."""

    blocking: Any

    @property
    def closed(self) -> bool:
        """Whether it is."""
        return bool(self.blocking.closed)

    async def execute(self, query: str, params: Sequence[Any] = ()) -> None:
        """Run a statement."""
        self.blocking.execute(query, params)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Committed, or rolled back after an exception."""
        with self.blocking.transaction():
            yield

    async def commit(self) -> None:
        """End the transaction."""
        self.blocking.commit()

    async def rollback(self) -> None:
        """Take it back."""
        self.blocking.rollback()

    async def close(self) -> None:
        """Close it."""
        self.blocking.close()


class Database:
    """The parent's questions and faults, each on a connection of its own. Blocking."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Any]:
        with psycopg().connect(self.url, autocommit=True, connect_timeout=10) as connection:
            yield connection

    def run(self, *statements: str) -> None:
        """Run statements, each by itself."""
        with self._connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def ask(self, query: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        with self._connect() as connection:
            return list(connection.execute(query, params).fetchall())

    def truth(self) -> Truth:
        """All facts that were ever committed, pruned ones too."""
        found: dict[Key, dict[int, Content]] = defaultdict(dict)
        with self._connect() as connection, connection.cursor() as cursor:
            # stream() would hold less in memory; the oracle needs all of it anyway.
            cursor.execute("SELECT stream, writer, id, row FROM soak_facts ORDER BY stream, writer, id, idx")
            for (stream, writer, token), group in groupby(cursor, key=lambda row: row[:3]):
                payloads = [str(row[3]).encode() for row in group]
                found[stream, writer][token] = len(payloads), digest(payloads)
        return dict(found)

    def authors(self, writer: str) -> dict[str, dict[int, int]]:
        """Which life of a writer wrote each of its facts: stream -> token -> number of the life. Rows name it."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for stream, token, row in self.ask(
            "SELECT stream, id, row FROM soak_facts WHERE writer = %s AND idx = 0", (writer,)
        ):
            _, life, _ = json.loads(row)[0].rsplit(".", 2)
            found[stream][token] = int(life)
        return dict(found)

    def effects(self, reader: str) -> dict[Key, list[tuple[int, Content]]]:
        """What an exactly-once reader did, in its order: the token and content of each fact."""
        found: dict[Key, list[tuple[int, Content]]] = defaultdict(list)
        query = "SELECT stream, writer, token, rows_, digest FROM soak_effects WHERE reader = %s ORDER BY n"
        for stream, writer, token, rows, content in self.ask(query, (reader,)):
            found[stream, writer].append((token, (rows, content)))
        return dict(found)

    def broken_transactions(self) -> list[str]:
        """Rows of the application without their fact, facts without their row, facts that were rolled back."""
        same = "f.stream = b.stream AND f.writer = b.writer AND f.id = b.id"
        own_rows = f"""f.row NOT LIKE '%%"{BULK}"%%'"""
        queries = {
            "has a row of the application and no fact": "SELECT b.stream, b.writer, b.id FROM soak_business b "
            f"WHERE NOT EXISTS (SELECT 1 FROM soak_facts f WHERE {same})",
            "has no row of the application": "SELECT f.stream, f.writer, f.id FROM soak_facts f "
            f"WHERE f.idx = 0 AND {own_rows} AND NOT EXISTS (SELECT 1 FROM soak_business b WHERE {same})",
            "was rolled back and is in the table": "SELECT f.stream, f.writer, f.id FROM soak_facts f "
            f"""WHERE f.row LIKE '%%"{ABORTED}"%%'""",
        }
        return [
            f"({stream}, {writer}) {id} {what}"
            for what, query in queries.items()
            for stream, writer, id in self.ask(query)
        ]

    def positions(self) -> dict[Key, int]:
        """The proven position of every writer."""
        query = "SELECT stream, writer, position FROM busrep_positions"
        return {(stream, writer): position for stream, writer, position in self.ask(query)}

    def version(self) -> str:
        """The server's version."""
        return str(self.ask("SHOW server_version")[0][0])
