"""What is set for a role or a database in PostgreSQL changes no row and no ID; what would is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from busrep.errors import ConfigError
from busrep.stores import AsyncStore, open_store
from busrep.streams import Registry, Stream
from tests.stores.store_conformance import sync

pytestmark = pytest.mark.servers

orders, payments = Stream("orders"), Stream("payments")


def ask(url: str, text: str) -> None:
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(text.encode())


@asynccontextmanager
async def opened(url: str, *streams: Stream[Any]) -> AsyncIterator[AsyncStore]:
    store = open_store(url, Registry(streams))
    try:
        await store.open()
        yield store
    finally:
        await store.close()


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
