"""Tables for the tests of the source: facts of several writers, with holes, open IDs and several rows a fact."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import psycopg

from busrep import Stream
from busrep.stores.blocking import BlockingStore
from busrep.stores.interface import Claim
from busrep.streams import Registry, Table
from busrep.testing.servers import PostgresServer
from tests.shop import opened_store


@attrs.frozen
class Trade:
    number: int
    price: float
    name: str
    open: bool
    at: datetime
    note: str | None = None
    tags: list[str] = attrs.field(factory=list)
    counts: dict[str, int] = attrs.field(factory=dict)
    more: object = None


@attrs.frozen
class Item:
    number: int
    name: str
    sold: bool


trades = Stream("trades", Trade)
items = Stream("items", Item, table=Table("app_items", index="place"))
STREAMS = [trades, items]
NOON = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)


def trade(number: int) -> Trade:
    return Trade(
        number, number / 4, f"it's \\ é {number}", number % 2 == 0, NOON + timedelta(seconds=number),
        None if number % 3 else "note", ["a", str(number)], {"n": number}, {"deep": [number]},
    )  # fmt: skip


@attrs.define
class Log:
    """A store, its writers, and what the source has to give. ``options``: of the source.

    On SQLite the store is of no use once this process has read the file through ADBC, as an executor does in a process
    of its own: ADBC brings a second copy of SQLite, and that deletes the ``-wal`` file when it closes the database.
    """

    url: str
    store: BlockingStore
    options: dict[str, str]
    claims: dict[str, Claim] = attrs.field(factory=dict)
    epoch: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.epoch = self.store.epoch()

    def claim(self, writer: str) -> Claim:
        if writer not in self.claims:
            self.claims[writer] = self.store.claim(writer, [stream.name for stream in STREAMS], timeout=5)
        return self.claims[writer]

    def write(self, writer: str, rows: Sequence[Any], *, stream: Stream[Any] = trades, token: int = 0) -> int:
        """One fact."""
        token = token or self.reserve(stream)
        transaction = self.store.transaction(self.claim(writer))
        transaction.begin()
        payloads = [row if isinstance(row, bytes) else stream.encode(row) for row in rows]
        transaction.insert(stream.name, [(token, "", payloads)])
        transaction.commit()
        return token

    def reserve(self, stream: Stream[Any] = trades) -> int:
        return self.store.reserve(stream.name, 1)[0]

    def prove(self, **positions: int) -> None:
        """The writers' positions in the stream ``trades``."""
        for writer, position in positions.items():
            self.store.heartbeat(self.claim(writer), {"trades": position})

    def rows(self, condition: str = "1 = 1") -> list[tuple[Any, ...]]:
        """(stream, writer, token, index, row, committed_at) of the proven rows, in order."""
        proven = (
            "SELECT f.stream, f.writer, id, idx, row, committed_at FROM busrep_facts f JOIN busrep_positions p "
            "ON f.stream = p.stream AND f.writer = p.writer AND f.id <= p.position "
            f"WHERE f.stream = 'trades' AND ({condition}) ORDER BY f.writer, id, idx"
        )
        found = self.sql(proven)
        return [(*row[:5], self.time(row[5])) for row in found]

    def time(self, stored: Any) -> datetime:
        if isinstance(stored, datetime):
            return stored.astimezone(UTC)
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(stored * 1_000_000 + 0.5))

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        if self.url.startswith("sqlite"):
            with contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection, connection:
                return connection.execute(text).fetchall()
        with psycopg.connect(self.url, autocommit=True) as pg:
            cursor = pg.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

    def committed(self, token: int, time: datetime) -> None:
        """Say that a fact was committed then."""
        if self.url.startswith("sqlite"):
            text = repr((time - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(seconds=1))
        else:
            text = f"'{time.isoformat()}'"
        self.sql(f"UPDATE busrep_facts SET committed_at = {text} WHERE id = {token}")

    def fill(self) -> None:
        """Two writers; 7 and 12 were rolled back; 19, of w2, is open, and 20 is committed behind it."""
        for at in range(1, 19):
            token = self.reserve()
            if at not in (7, 12):
                self.write("w1" if at % 3 else "w2", [trade(at)] * (3 if at == 5 else 1), token=token)
        self.reserve()
        self.write("w2", [trade(20)])
        self.prove(w1=18, w2=18)


@contextlib.contextmanager
def opened_log(kind: str, postgres: PostgresServer | None, folder: Path) -> Iterator[Log]:
    """A new store of that kind of database, and the options for it."""
    if postgres is None or kind == "sqlite":
        url = f"sqlite:///{folder / 'log.db'}"
        options = {"store": url}
    else:
        name = f"log_{folder.name.replace('-', '_').lower()}"[-60:]
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        url = postgres.database_url(name)
        (folder / "password").write_text(postgres.password + "\n")
        options = {
            "store": url.replace(f":{postgres.password}@", "@"), "passwordFile": str(folder / "password"),
        }  # fmt: skip
    made = (
        "CREATE TABLE app_items (id bigint, writer text, place integer, number bigint, name text, sold boolean, "
        "PRIMARY KEY (writer, id, place))"
    )
    with opened_store(url, Registry(STREAMS)) as store:
        log = Log(url, store, {**options, "stream": "trades"})
        log.sql(made)
        yield log
