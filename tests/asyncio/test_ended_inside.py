"""Code inside the block of `bus.write()` that ends the transaction itself.

What it committed is published, what it rolled back is not, and no ID is given twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest

import busrep
import busrep.sync
from busrep.errors import CommitUnknown, ConfigError, WriterFenced
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.asyncio.bus_conformance import until
from tests.shop import QUICK, STREAMS, Order, opened_store, orders

pytestmark = pytest.mark.servers


@attrs.frozen
class Invoice:
    number: int


invoices = busrep.Stream("invoices", Invoice, table=busrep.Table("invoice_log", id="fact_id", writer="written_by"))


class OopsError(Exception):
    """The application's."""


@attrs.frozen
class Place:
    """A database with a table of the application's, a channel, and in which runtime facts are written."""

    redis: str
    name: str
    url: str
    runtime: str

    @property
    def values(self) -> str:
        return "VALUES (%s, 'w', %s)" if self.url.startswith("postgres") else "VALUES (?, 'w', ?)"

    @contextlib.contextmanager
    def connection(self) -> Iterator[Any]:
        """One that begins transactions by itself, as both drivers' do if they are not told otherwise."""
        if self.url.startswith("postgres"):
            made: Any = psycopg.connect(self.url)
        else:
            made = sqlite3.connect(self.url.removeprefix("sqlite:///"), check_same_thread=False)
        with contextlib.closing(made):
            yield made

    @property
    def table(self) -> list[int]:
        with self.connection() as connection:
            found = connection.execute("SELECT number FROM invoice_log ORDER BY fact_id").fetchall()
        return [number for (number,) in found]

    def options(self, **options: Any) -> dict[str, Any]:
        return {"name": self.name, "streams": [invoices], "store": self.url, "settings": QUICK, **options}

    def fact(self, body: Callable[[Any, Callable[..., Any]], Any], connection: Any = None) -> None:
        """Write one fact, whose block calls ``body(fact, execute)``, and one after it."""
        if self.runtime == "threads":
            with busrep.sync.connect(self.redis, **self.options(writer="w")) as bus:
                with contextlib.suppress(OopsError, CommitUnknown), bus.write(invoices, connection=connection) as fact:
                    body(fact, fact.execute)
                if connection is not None:
                    rolled_back(connection)
                bus.publish(invoices, [Invoice(99)])
            return

        async def write() -> None:
            async with busrep.connect(self.redis, **self.options(writer="w")) as bus:
                with contextlib.suppress(OopsError, CommitUnknown, psycopg.Error, sqlite3.Error):
                    async with bus.write(invoices, connection=connection) as fact:
                        for statement in body(fact, lambda *statement: statement) or ():
                            await fact.execute(*statement)
                        if connection is None:
                            raise OopsError
                if connection is not None:
                    rolled_back(connection)
                await bus.publish(invoices, [Invoice(99)])

        asyncio.run(asyncio.wait_for(write(), 60))


def rolled_back(connection: Any) -> None:
    with contextlib.suppress(psycopg.OperationalError, sqlite3.ProgrammingError):  # the block may have closed it
        connection.rollback()


@pytest.fixture(params=["asyncio", "threads"])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(redis_url: str, bus_name: str, url: str, runtime: str) -> Place:
    place = Place(redis_url, bus_name, url, runtime)
    with place.connection() as connection:
        connection.execute("CREATE TABLE invoice_log (fact_id bigint, written_by text, number int)")
        connection.execute("CREATE TABLE app (number int)")
        connection.commit()
    with opened_store(url, Registry([invoices])):
        return place


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def place(redis_url: str, bus_name: str, runtime: str, request: pytest.FixtureRequest) -> Place:
    return made(redis_url, bus_name, request.getfixturevalue(request.param), runtime)


@pytest.fixture
def on_file(redis_url: str, bus_name: str, runtime: str, sqlite_url: str) -> Place:
    return made(redis_url, bus_name, sqlite_url, runtime)


@contextlib.contextmanager
def followed(place: Place) -> Iterator[list[int]]:
    """What a reader is given meanwhile that hears all: all that is in the table."""
    given: list[int] = []
    with busrep.sync.connect(place.redis, **place.options(start="earliest")) as reader:

        @reader.subscribe(invoices)
        def take(batch: Any) -> None:
            given.extend(row.number for row in batch.rows)

        until(lambda: reader.statistics()["link"]["reading"]["connected"], 60)
        yield given
        until(lambda: 99 in given, 60)
    assert given == place.table


@pytest.mark.parametrize("then", ["raises", "a statement fails", "closes it"])
def test_what_the_caller_committed_inside_is_published_though_the_block_fails(place: Place, then: str) -> None:
    with followed(place) as given, place.connection() as connection:

        def body(fact: Any, _: Any) -> None:
            fact.add(Invoice(7), insert=False)
            connection.execute(f"INSERT INTO invoice_log {place.values}", (fact.id, 7))
            connection.commit()
            if then == "closes it":  # as `with connection:` of psycopg does behind a commit
                connection.close()
            else:
                connection.execute("SELECT 1")
            if then == "a statement fails":  # in the transaction that the driver has begun since
                with contextlib.suppress(psycopg.Error, sqlite3.Error):
                    connection.execute("SELECT nonsense")
            raise OopsError

        place.fact(body, connection)
    assert given == [7, 99]


@pytest.mark.parametrize("then", [(), ("BEGIN",), ("BEGIN", "SELECT nonsense")], ids=len)
def test_what_a_statement_committed_inside_is_published_though_the_block_fails(
    place: Place, then: tuple[str, ...]
) -> None:
    """On busrep's own connection; and another transaction may have begun there since."""
    with followed(place) as given:

        def body(fact: Any, execute: Callable[..., Any]) -> Any:
            fact.add(Invoice(7), insert=False)
            done = [execute(f"INSERT INTO invoice_log {place.values}", (fact.id, 7)), execute("COMMIT")]
            with contextlib.suppress(psycopg.Error, sqlite3.Error):
                done += [execute(statement) for statement in then]
            if place.runtime == "threads":
                raise OopsError
            return done

        place.fact(body)
    assert given == [7, 99]


def test_what_the_caller_rolled_back_inside_is_not_published(on_file: Place) -> None:
    """And sqlite3 begins another transaction by itself, which looks just like the first one."""
    with followed(on_file) as given, on_file.connection() as connection:

        def body(fact: Any, _: Any) -> None:
            fact.add(Invoice(7), insert=False)
            connection.execute(f"INSERT INTO invoice_log {on_file.values}", (fact.id, 7))
            connection.rollback()
            connection.execute("INSERT INTO app VALUES (1)")

        on_file.fact(body, connection)
    assert given == [99]


def test_how_the_caller_s_connection_shows_rows_does_not_matter(on_file: Place) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("busrep's own rows are not the application's")

    with followed(on_file) as given, on_file.connection() as connection:
        connection.row_factory = refuse

        def body(fact: Any, _: Any) -> None:
            fact.add(Invoice(7))

        on_file.fact(body, connection)
    assert given == [7, 99]


def test_a_fact_that_fails_leaves_no_doubt_where_nothing_was_committed(on_file: Place) -> None:
    """No question to the table for each: its transaction is rolled back, and that is known."""
    with on_file.connection() as connection, followed(on_file):

        def body(fact: Any, _: Any) -> None:
            fact.add(Invoice(7))
            raise OopsError

        on_file.fact(body, connection)
        assert not connection.in_transaction
    with opened_store(on_file.url, Registry([invoices])) as store:
        transaction = store.transaction(store.claim("v", ["invoices"], timeout=10.0), None)
        transaction.begin()
        assert transaction.rollback()


def test_a_joined_transaction_that_was_rolled_back_inside_is_refused(
    redis_url: str, bus_name: str, sqlite_url: str
) -> None:
    """With it went the fact's ID: the sequence gives it again."""
    options: dict[str, Any] = {"name": bus_name, "streams": STREAMS, "store": sqlite_url, "settings": QUICK}
    with opened_store(sqlite_url), contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as other:
        other.execute("CREATE TABLE app (number int)")
        with (
            busrep.sync.connect(redis_url, writer="w", **options) as bus,
            busrep.sync.connect(redis_url, writer="v", **options) as second,
        ):
            other.execute("INSERT INTO app VALUES (1)")
            with (
                pytest.raises(ConfigError, match="ended inside the fact's block"),
                bus.write(orders, connection=other) as fact,
            ):
                fact.add(Order(1, "new"))
                other.rollback()
                other.execute("INSERT INTO app VALUES (2)")
            other.commit()
            assert second.publish(orders, [Order(5, "new")]) == [fact.id]
            bus.publish(orders, [Order(9, "new")])
        rows = other.execute("SELECT writer, id FROM busrep_facts ORDER BY id").fetchall()
        assert rows == [("v", fact.id), ("w", fact.id + 1)]
        assert other.execute("SELECT number FROM app").fetchall() == [(2,)]


def test_no_row_is_written_in_a_joined_transaction_whose_name_has_a_successor(sqlite_url: str) -> None:
    """Whoever catches WriterFenced may commit what else is in it."""
    path = sqlite_url.removeprefix("sqlite:///")
    with (
        contextlib.closing(open_blocking_store(sqlite_url, Registry(STREAMS))) as store,
        contextlib.closing(open_blocking_store(sqlite_url, Registry(STREAMS))) as successor,
        contextlib.closing(sqlite3.connect(path)) as connection,
    ):
        store.init()
        store.open()
        successor.open()
        claim = store.claim("w", ["orders"], timeout=10.0)
        connection.execute("CREATE TABLE app (number int)")
        connection.execute("INSERT INTO app VALUES (0)")
        transaction = store.transaction(claim, connection)
        (token,) = transaction.begin({"orders": 1})["orders"]
        connection.commit()
        successor.claim("w", ["orders"], timeout=10.0)
        connection.execute("INSERT INTO app VALUES (1)")
        transaction.insert("orders", [(token, [["[1]"]], [b"[1]"])])  # type: ignore[list-item]
        with pytest.raises(WriterFenced):
            transaction.commit()
        connection.commit()
        assert connection.execute("SELECT writer, id FROM busrep_facts").fetchall() == []
