"""Fixtures that start real servers, once a session, and the check that nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from busrep.testing.servers import PostgresServer, RedisServer, start_postgres, start_redis

LINUX = sys.platform == "linux"


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it puts in the background (`.ci/run &`) with SIGINT ignored, and children inherit that: the
    # tests of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A cancelled CI job gets SIGTERM: as an interrupt, the fixtures still stop their servers and remove their files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if LINUX:
        # PR_SET_CHILD_SUBREAPER: what a killed child leaves behind becomes ours, and the leak check sees it.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def own_children() -> dict[int, str]:
    """Process ID -> command line of the children of this process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended meanwhile
        state, parent = fields[0], int(fields[1])
        if parent == os.getpid() and state != "Z" and "multiprocessing" not in command:
            found[int(entry.name)] = command
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if LINUX and (left := own_children()):
        sys.stderr.write(f"\nprocesses left behind by the tests: {left}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with start_redis() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with start_postgres() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The session's Redis, started again if a test before this one stopped it. Use ``bus_name`` on it."""
    redis_server.start()
    return redis_server.url


@pytest.fixture
def bus_name() -> str:
    """A channel name nobody else uses: the name is all that separates buses on one Redis."""
    return f"bus-{secrets.token_hex(6)}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, empty database."""
    postgres_server.start()
    database = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
    yield postgres_server.database_url(database)
    postgres_server.start()
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A database file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'busrep.db'}"
