"""What is set for a role or a database in PostgreSQL changes no row and no ID; what would is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from busrep.core.catchup import FetchUpdates
from busrep.errors import ConfigError
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Stream, Table
from tests.stores.store_conformance import row, sync
from tests.stores.test_driver_errors import done

pytestmark = pytest.mark.servers

orders, payments = Stream("orders"), Stream("payments")


def ask(url: str, text: str) -> None:
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(text.encode())


@asynccontextmanager
async def opened(url: str, *streams: Stream[Any], make: Callable[..., Any] = open_store) -> AsyncIterator[Any]:
    store = make(url, Registry(streams))
    try:
        await done(store.open())
        yield store
    finally:
        await done(store.close())


# --- search_path


@sync
async def test_init_makes_nothing_in_another_schema_than_that_of_the_tables(postgres_url: str) -> None:
    url = f"{postgres_url}?options=-csearch_path%3Ddeploy,public"
    ask(postgres_url, "CREATE SCHEMA deploy")
    await open_store(postgres_url, Registry([orders])).init()
    other = open_store(url, Registry([orders, payments]))
    with pytest.raises(ConfigError, match=r"in schema 'public'.*search_path"):
        await other.init()
    await open_store(postgres_url, Registry([orders, payments])).init()
    await other.init()  # nothing is missing
    async with opened(url, orders, payments):
        pass


@sync
async def test_a_second_sequence_of_a_stream_is_refused(postgres_url: str) -> None:
    """A busrep from before `init` refused may have made it. Two writers would take the same IDs."""
    ask(postgres_url, "CREATE SCHEMA deploy")
    await open_store(postgres_url, Registry([orders])).init()
    ask(postgres_url, "CREATE SEQUENCE deploy.busrep_seq_orders")
    with pytest.raises(ConfigError, match=r"sequence deploy\.busrep_seq_orders is not in schema 'public'"):
        async with opened(f"{postgres_url}?options=-csearch_path%3Ddeploy,public", orders):
            pass
    async with opened(postgres_url, orders):  # it does not see the other one
        pass


# --- client_encoding

ENCODINGS = pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])


async def fact_with_a_name(store: Any, name: str, connection: Any = None) -> tuple[bytes, bytes]:
    """The row of a fact as it was written, and as it is read; in its transaction the application writes a name."""
    payload = f'["{name}"]'.encode()
    claim = await done(store.claim("w1", ["orders"], timeout=5))
    (token,) = await done(store.reserve("orders", 1))
    transaction = store.transaction(claim, connection)
    await done(transaction.begin())
    await done(transaction.insert("orders", [(token, [[name]], [payload])]))
    await done(transaction.execute(f"INSERT INTO names VALUES ('{name}')"))
    await done(transaction.commit())
    page = await done(store.fetch(FetchUpdates("orders", "w1", token - 1, token, 1)))
    return payload, page.payloads[0]


def names(url: str) -> list[tuple[str]]:
    with psycopg.connect(url, client_encoding="utf8") as server:
        return server.execute("SELECT name FROM names").fetchall()


@pytest.mark.parametrize("make", [open_store, open_blocking_store], ids=["asyncio", "threads"])
@ENCODINGS
@sync
async def test_text_is_kept_whatever_client_encoding_is_set(postgres_url: str, encoding: str, make: Any) -> None:
    await open_store(postgres_url, Registry([orders])).init()
    ask(postgres_url, "CREATE TABLE names (name text)")
    ask(postgres_url, f"ALTER DATABASE {postgres_url.rpartition('/')[2]} SET client_encoding = '{encoding}'")
    async with opened(postgres_url, orders, make=make) as store:
        written, found = await fact_with_a_name(store, "€")
    assert found == written
    assert names(postgres_url) == [("€",)]


@sync
async def test_a_database_without_an_encoding(postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2] + "_ascii"
    ask(postgres_url, f"CREATE DATABASE {database} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    url = f"{postgres_url}_ascii"
    try:
        await open_store(url, Registry([orders])).init()
        ask(url, "CREATE TABLE names (name text)")
        async with opened(url, orders) as store:
            written, found = await fact_with_a_name(store, "€")
        assert found == written
        assert names(url) == [("€",)]
    finally:
        ask(postgres_url, f"DROP DATABASE {database} WITH (FORCE)")


@sync
async def test_the_application_s_statement_is_in_the_encoding_of_its_connection(postgres_url: str) -> None:
    await open_store(postgres_url, Registry([orders])).init()
    ask(postgres_url, "CREATE TABLE names (name text)")
    async with opened(postgres_url, orders) as store:
        with psycopg.connect(postgres_url, client_encoding="LATIN1") as connection:
            written, found = await fact_with_a_name(store, "é", connection)
        with (
            psycopg.connect(postgres_url, client_encoding="SQL_ASCII") as connection,
            pytest.raises(ConfigError, match=r"SQL_ASCII.*client_encoding='utf8'"),
        ):
            await fact_with_a_name(store, "é", connection)
    assert found == written
    assert names(postgres_url) == [("é",)]


# --- extra_float_digits


@sync
async def test_numbers_of_an_own_table_are_read_in_full(postgres_url: str) -> None:
    """By a page, by what became of a COMMIT without an answer, and by a snapshot."""
    prices = Stream("prices", table=Table("prices", columns=("amount",)))
    ask(postgres_url, "CREATE TABLE prices (id bigint PRIMARY KEY, writer text, amount double precision)")
    ask(postgres_url, f"ALTER DATABASE {postgres_url.rpartition('/')[2]} SET extra_float_digits = 0")
    await open_store(postgres_url, Registry([prices])).init()
    async with opened(postgres_url, prices) as store:
        claim = await store.claim("w1", ["prices"], timeout=5)
        (token,) = await store.reserve("prices", 1)
        transaction = store.transaction(claim)
        await transaction.begin()
        await transaction.insert("prices", [(token, [[0.1 + 0.2]], [row(0.1 + 0.2)])])
        await transaction.commit()
        await store.heartbeat(claim, {"prices": token})
        assert (await store.fetch(FetchUpdates("prices", "w1", 0, token, 1))).payloads == [row(0.1 + 0.2)]
        left = await store.outcome(claim, transaction.marker, [("prices", token)])
        assert left == {("prices", token): [row(0.1 + 0.2)]}
        agreement = await store.agree("prices", part_rows=2)
        part = b"".join([piece async for piece in store.load(agreement, 0)])
        assert part == b"%d w1 %b\n" % (token, row(0.1 + 0.2))
        await store.leave(agreement)
