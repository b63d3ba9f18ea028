"""What a program gets wrong is told in one message, with the command to run, and without a driver's traceback."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sqlite3
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import psycopg
import pytest

import busrep.sync
from busrep import Stream, Table
from busrep.errors import BusrepError, ConfigError, RowClassMismatch, SchemaError
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.stores.declared import init_command
from busrep.stores.plans import run_async, run_sync
from busrep.streams import Registry
from busrep.urls import shown_url
from tests.asyncio.test_bus import Deployment, deployment, run
from tests.shop import QUICK, orders, payments

__all__ = ["deployment"]


@attrs.frozen
class Swapped:
    status: str
    number: int


swapped = Stream("orders", Swapped)
own = Stream("own", Swapped, table=Table("own_rows"))
raw = Stream("raw")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def execute(url: str, text: str) -> None:
    connection: Any
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    else:
        connection = psycopg.connect(url, autocommit=True)
    connection.execute(text)
    connection.close()


def both(url: str, *streams: Stream[Any], claim: bool = True) -> list[BusrepError]:
    """The errors of the stores of both runtimes, when they are opened, or their names are claimed."""
    names = [stream.name for stream in streams]

    async def main() -> None:
        store = open_store(url, Registry(streams))
        try:
            await store.open()
            if claim:
                await store.claim("w1", names, timeout=5)
        finally:
            await store.close()

    def threads() -> None:
        store = open_blocking_store(url, Registry(streams))
        try:
            store.open()
            if claim:
                store.claim("w1", names, timeout=5)
        finally:
            store.close()

    errors = []
    for work in (lambda: asyncio.run(main()), threads):
        with pytest.raises(BusrepError) as error:
            work()
        errors.append(error.value)
    return errors


def check(url: str, errors: list[BusrepError], kind: type[BusrepError], *texts: str) -> None:
    for error in errors:
        assert type(error) is kind
        told = "".join(traceback.format_exception(error))
        for no in ("psycopg.errors", "psycopg.Op", "sqlite3.", "During handling", "direct cause"):
            assert no not in told
        for text in texts:
            assert text in str(error)
        assert "postgres:" not in str(error) or ":***@" in str(error)


def store(url: str) -> str:
    return shlex.quote(shown_url(url))


@pytest.mark.servers
def test_tables_that_are_not_there(url: str) -> None:
    command = f"run 'busrep db init --store {store(url)} --streams tests.shop:orders --stream raw'"
    check(url, both(url, orders, raw), SchemaError, command)
    if url.startswith("sqlite"):  # a file without tables
        execute(url, "CREATE TABLE other (x int)")
        check(url, both(url, orders, raw), SchemaError, command)


@pytest.mark.servers
def test_an_older_version_of_the_tables(url: str) -> None:
    open_blocking_store(url, Registry([orders])).init()
    execute(url, "UPDATE busrep_meta SET value = '1' WHERE key = 'version'")
    command = f"run 'busrep db init --store {store(url)} --streams tests.shop:orders'"
    check(url, both(url, orders), SchemaError, "version 1", command)


@pytest.mark.servers
def test_a_stream_that_was_not_made(url: str) -> None:
    open_blocking_store(url, Registry([orders])).init()
    command = f"busrep db init --store {store(url)} --streams tests.shop:payments"
    check(url, both(url, payments), ConfigError, "stream 'payments' has no sequence yet", command)


@pytest.mark.servers
def test_a_row_class_that_does_not_fit(url: str) -> None:
    open_blocking_store(url, Registry([orders])).init()
    command = (
        f"busrep db init --store {store(url)} --streams tests.asyncio.test_config_errors:swapped --redefine orders"
    )
    check(url, both(url, swapped, claim=False), RowClassMismatch, command)


@pytest.mark.servers
def test_a_table_of_the_applications_without_a_column(url: str) -> None:
    execute(url, "CREATE TABLE own_rows (id bigint, writer text, number bigint, status text)")
    open_blocking_store(url, Registry([own])).init()
    execute(url, "ALTER TABLE own_rows RENAME COLUMN status TO state")
    check(url, both(url, own), ConfigError, "it has id, writer, number, state", 'not "status"')
    execute(url, "DROP TABLE own_rows")
    check(url, both(url, own), ConfigError, "there is no such table")


def test_the_command_as_it_is_typed() -> None:
    local = Stream("local", Swapped)
    streams = [orders, payments, raw, Stream("a b".replace(" ", ";")), local]
    assert init_command("postgresql://me:***@host/shop?a=1&b=2", streams) == (
        "busrep db init --store 'postgresql://me:***@host/shop?a=1&b=2' --streams tests.shop:orders "
        "--streams tests.shop:payments --stream raw --stream 'a;b' --streams MODULE:NAME"
    )


def test_an_error_that_a_plan_raises_itself_has_no_context() -> None:
    def plan() -> Any:
        with contextlib.suppress(KeyError):
            yield ()
        raise ConfigError("its own")

    def fails(_: object) -> Any:
        raise KeyError("the driver's")

    async def fails_async(_: object) -> Any:
        raise KeyError("the driver's")

    works: list[Callable[[], Any]] = [
        lambda: run_sync(plan(), fails),
        lambda: asyncio.run(run_async(plan(), fails_async)),
    ]
    for work in works:
        with pytest.raises(ConfigError, match="its own") as error:
            work()
        assert error.value.__context__ is None


@pytest.mark.servers
def test_a_stream_is_needed_not_its_name(deployment: Deployment) -> None:
    async def main() -> None:
        async with deployment.bus(writer="w1") as bus:
            name: Any = "orders"
            works: list[Callable[[], Any]] = [
                lambda: bus.write(name), lambda: bus.write(orders, name), lambda: bus.subscribe(name),
                lambda: bus.follow(name), lambda: bus.resume(name, "w1"), lambda: bus.on_reset(name)(print),
            ]  # fmt: skip
            for work in works:
                with pytest.raises(ConfigError, match="a busrep.Stream is needed, not 'orders'"):
                    work()
            for waiting in (
                bus.publish(name, [1]), bus.wait_for(name, "w2", 1), bus.linear_position(name), bus.bootstrap(name),
            ):  # fmt: skip
                with pytest.raises(ConfigError, match="a busrep.Stream is needed, not 'orders'"):
                    await waiting
            async with bus.write(orders) as fact:
                with pytest.raises(ConfigError, match="a busrep.Stream is needed, not 'payments'"):
                    fact.add(["x"], stream="payments")  # type: ignore[call-overload]

    run(main())
    with busrep.sync.connect(
        deployment.redis, name=deployment.name, streams=[orders], store=deployment.store, writer="w2", settings=QUICK
    ) as bus:
        name: Any = "orders"
        works: list[Callable[[], Any]] = [
            lambda: bus.write(name), lambda: bus.publish(name, [1]), lambda: bus.subscribe(name)(print),
            lambda: next(bus.follow(name)), lambda: bus.wait_for(name, "w1", 1),
        ]  # fmt: skip
        for work in works:
            with pytest.raises(ConfigError, match="a busrep.Stream is needed, not 'orders'"):
                work()
