"""Silent connections keep no reader out of the HTTP server, and those that have an answer are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import busrep
from busrep.core.catchup import FetchUpdates
from busrep.http.serve import ServeLimits, Serving, serve
from busrep.http.server import catch_up_app
from busrep.http.source import HttpSource
from busrep.settings import Settings
from tests.stores.store_conformance import sync
from tests.test_layers import DEPENDENCIES, EXTRAS

from .test_server import SECRET, STREAMS, connection, ended, head, memory_store, orders, serving_of, until

# Longer than a test may take: nothing here is solved by this clock.
NEVER = 600.0


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head())
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"null}")


@pytest.mark.parametrize("strangers", [205, 450])
@sync
async def test_a_reader_gets_its_page_beside_silent_connections(strangers: int) -> None:
    """As `busrep serve` is set: 200 connections."""
    async with memory_store() as store, contextlib.AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_of(store, ServeLimits(head_timeout=NEVER)))
        for at in range(strangers):
            _, writer = await stack.enter_async_context(connection(serving))
            writer.write((b"", b"GET / HTTP/1.1\r\n")[at % 2])  # also a head that does not end
        await until(lambda: serving.statistics()["accepted"] == strangers)
        url = serving.url.replace("://", f"://:{SECRET}@")
        source = HttpSource(url, [orders], Settings())
        await source.open()
        stack.push_async_callback(source.close)
        page = await source.fetch(FetchUpdates("orders", "w1", 0, 4, 100))
        assert list(page.tokens) == [1, 2, 2, 3, 4]
        assert serving.connections <= 200 + 5
        assert serving.statistics()["refused"].keys() == {"stranger"}


@sync
async def test_a_silent_connection_may_ask_while_there_is_room() -> None:
    async with memory_store() as store, serving_of(store, ServeLimits(connections=2, head_timeout=NEVER)) as serving:
        async with connection(serving) as first, connection(serving) as second, connection(serving) as third:
            await until(lambda: serving.statistics()["accepted"] == 3)
            assert await ended(first[0]) == b""
            await answered(*second)
            await answered(*third)


@sync
async def test_readers_with_an_answer_are_left_alone() -> None:
    async with memory_store() as store, contextlib.AsyncExitStack() as stack:
        serving = await stack.enter_async_context(serving_of(store, ServeLimits(connections=2, head_timeout=NEVER)))
        readers = [await stack.enter_async_context(connection(serving)) for _ in range(2)]
        for one in readers:
            await answered(*one)
        for _ in range(10):
            await stack.enter_async_context(connection(serving))
        await until(lambda: serving.statistics()["accepted"] == 12)
        for one in readers:
            await answered(*one)
        assert serving.statistics()["refused"] == {"stranger": 8}
        readers[0][1].close()  # its place is free again
        await until(lambda: serving.connections == 3)
        await answered(*await stack.enter_async_context(connection(serving)))


async def refuse(_scope: object, _receive: object, send: object) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 404, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"no"})  # type: ignore[operator]


@sync
async def test_who_was_refused_is_a_stranger_again() -> None:
    """It keeps its connection, and no place."""
    limits = ServeLimits(connections=2, head_timeout=NEVER, keep_alive=NEVER)
    async with serve(refuse, limits=limits) as serving, contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(5):
            reader, writer = await stack.enter_async_context(connection(serving))
            writer.write(head("/nothing"))
            assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 404")
            found.append(reader)
        assert [await ended(one) for one in found[:3]] == [b""] * 3
        assert serving.statistics()["refused"] == {"stranger": 3}


@sync
async def test_places_are_given_back() -> None:
    """Whatever way a connection ends: no place is lost."""
    async with memory_store() as store:
        app = catch_up_app(store, STREAMS, secret=SECRET)
        async with serve(app, limits=ServeLimits(connections=1, head_timeout=NEVER)) as serving:
            for number in range(30):
                async with connection(serving) as (reader, writer):
                    if number % 3 == 0:
                        await answered(reader, writer)
                    elif number % 3 == 1:
                        writer.write(head() * 3)
                        writer.transport.abort()
                    else:
                        writer.write(head("/nothing", "connection: close"))
                        await ended(reader)
                await gone(serving)
            async with connection(serving) as one:
                await answered(*one)


async def gone(serving: Serving) -> None:
    await until(lambda: serving.connections == 0)


def test_what_is_imported_is_declared() -> None:
    """A package that another one brings along today may not come with it tomorrow."""
    project = tomllib.loads((Path(busrep.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.match(r"[\w.-]+", one)[0].lower() for one in wanted}  # type: ignore[index]
    names = importlib.metadata.packages_distributions()
    missing = {
        module
        for module in (*DEPENDENCIES, *EXTRAS)
        if not {one.lower() for one in names.get(module, ())} & declared
    }  # fmt: skip
    # pyspark brings py4j in the very version that it speaks to; the drivers bring their manager.
    assert missing == {"py4j", "adbc_driver_manager"}
