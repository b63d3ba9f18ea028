"""The pytest plugin: name it in the ``conftest.py`` of your tests' root.

::

    pytest_plugins = ["busrep.testing.fixtures"]

It does not load by itself: as an entry point it would do so for everybody who has busrep installed. Each fixture
undoes what it did: servers stop, databases go, links close. No asyncio plugin is needed, ``asyncio.run(main())`` and
``virtual_loop.run_until_complete(main())`` will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from urllib.parse import urlsplit

from busrep.errors import ConfigError, MissingExtra
from busrep.stores import memory, open_store
from busrep.streams import Registry, Stream
from busrep.testing import links, pair, servers, virtual

try:
    import pytest
except ImportError:
    raise ConfigError("busrep.testing.fixtures is a pytest plugin, and pytest is not installed") from None


@pytest.fixture
def busrep_name() -> str:
    """A deployment's name that nobody else uses: on one Redis it is all that keeps buses apart."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def busrep_store() -> Iterator[Callable[..., str]]:
    """``busrep_store(stream, ...)``: the URL of a memory store, initialised; its contents are gone after the test."""
    made = []

    def make(*streams: Stream[Any]) -> str:
        made.append(f"test-{secrets.token_hex(6)}")
        url = f"memory://{made[-1]}"
        with ThreadPoolExecutor(1) as thread:  # the test may call this in a coroutine, where no other loop may run
            thread.submit(asyncio.run, open_store(url, Registry(streams)).init()).result()
        return url

    yield make
    for name in made:
        memory.forget(name)


@pytest.fixture
def busrep_pair() -> Any:
    """`busrep.testing.bus_pair`: ``async with busrep_pair(stream, ...) as (writer, reader)``."""
    return pair.bus_pair


@pytest.fixture(scope="session")
def busrep_redis_server() -> Iterator[servers.RedisServer]:
    """A Redis server, started for this session, for tests that stop, restart and pause it."""
    with servers.start_redis() as server:
        yield server


@pytest.fixture(scope="session")
def busrep_redis(request: pytest.FixtureRequest) -> str:
    """The URL of a real Redis: BUSREP_TEST_REDIS, or a server started for this session. Use `busrep_name` on it."""
    given = os.environ.get("BUSREP_TEST_REDIS")
    return given or request.getfixturevalue("busrep_redis_server").url


@pytest.fixture(scope="session")
def busrep_postgres_server() -> Iterator[servers.PostgresServer]:
    """A PostgreSQL server, started for this session, for tests that stop, restart and pause it."""
    with servers.start_postgres() as server:
        yield server


@pytest.fixture
def busrep_postgres(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a fresh, empty database, dropped after the test.

    On the server of BUSREP_TEST_POSTGRES, the URL of a user who may create databases, or on one started for this
    session (and again, if a test stopped it).
    """
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("postgres", "the fixture busrep_postgres") from None
    given = os.environ.get("BUSREP_TEST_POSTGRES")
    server: Any = None if given else request.getfixturevalue("busrep_postgres_server")
    superuser = given or server.url
    database = f"test_{secrets.token_hex(6)}"

    def execute(sql: str) -> None:
        if server is not None:
            server.start()
        with psycopg.connect(superuser, autocommit=True) as connection:
            connection.execute(sql.encode())

    execute(f"CREATE DATABASE {database}")
    yield urlsplit(superuser)._replace(path=f"/{database}").geturl()
    execute(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.fixture
def busrep_link() -> Iterator[Callable[..., links.FaultyLink]]:
    """``busrep_link(url)``: a `FaultyLink` to that server, in a thread of its own; use its ``url``."""
    with contextlib.ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(links.FaultyLink.in_thread(url, **options))


@pytest.fixture
def virtual_loop() -> Iterator[virtual.VirtualLoop]:
    """An event loop on which waiting takes no time: ``virtual_loop.run_until_complete(main())``."""
    with asyncio.Runner(loop_factory=virtual.VirtualLoop) as runner:
        yield cast(virtual.VirtualLoop, runner.get_loop())
