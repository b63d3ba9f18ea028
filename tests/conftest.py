"""Fixtures that start real servers, once a session, and the check that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import psycopg
import pytest

from busrep.testing.servers import PostgresServer, RedisServer
from tests import ROOT
from tests.scratch import memory_folder

pytest_plugins = ["busrep.testing.fixtures"]

LINUX = sys.platform == "linux"


# Hypothesis's own time limits (200 ms an example, a second to make ten) fail on a busy machine.
hypothesis.settings.register_profile("busrep", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busrep")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it puts in the background (`.ci/run &`) with SIGINT ignored, and children inherit that: the
    # tests of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A cancelled CI job gets SIGTERM: as an interrupt, the fixtures still stop their servers and remove their files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in ("BUSREP_TEST_REDIS", "BUSREP_TEST_POSTGRES"):
        os.environ.pop(name, None)  # these tests stop and kill servers: only such as they started
    if LINUX:
        # PR_SET_CHILD_SUBREAPER: what a killed child leaves behind becomes ours, and the leak check sees it.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    if not hasattr(config, "workerinput") and not config.option.basetemp and (folder := memory_folder()):
        os.environ["TMPDIR"] = str(folder)  # for the workers, and for what the tests start
        tempfile.tempdir = None
        if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
            # None in the source tree. But each process that a test starts would compile all of busrep again.
            os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_report_header() -> str:
    return f"temporary files: {tempfile.gettempdir()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """The workers collect the same files in the same order, so in a new tree each would compile all of them. Here each
    begins with a part of its own, and finds the others' compiled."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    given = [ROOT / argument.partition("::")[0] for argument in session.config.args]
    files = sorted({path for one in given for path in (one.rglob("test_*.py") if one.is_dir() else [one])})
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection comes upon it again, and says so
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # What was imported and collected stays: no collection of garbage, of which some tests ask for many, looks at it.
    gc.collect()
    gc.freeze()


# Files whose tests take longest, most of it waiting for processes that they start and kill. They begin first, and each
# test goes to whichever worker is free: else the last minutes would be one worker's.
LONGEST = tuple(
    f"tests/{name}.py"
    for name in (
        "proof/test_bootstrap_kills",
        "stores/test_failover",
        "sync/test_fork",
        "cli/test_demo",
        "links/test_tcp_session",
        "http/test_bus",
        "asyncio/test_faults",
        "docs/test_testing_example",
        "commands/test_presence",
        "pipeline/test_replay",
        "integrations/test_celery",
        "docs/test_caches",
        "docs/test_integrations",
        "asyncio/test_trust",
    )
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, with `LONGEST` in parts, and all that needs Spark on one worker: any other would start
    a JVM of its own, which takes longest to run its first tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # it would put the files with the most tests first

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/spark/"):
                return "tests/spark"
            return nodeid.partition("[")[0] if nodeid.startswith(LONGEST) else super()._split_scope(nodeid)

    return Scheduling(config, log)


# PySpark makes these two when one of its errors has a query context. They do not propagate, so pytest attaches its own
# handlers to them, and their addHandler() gives each handler a JSON formatter: `caplog` of every later test of the
# process is JSON then (pyspark/logger/logger.py, _pytest/logging.py).
SPARK_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        for name in SPARK_LOGGERS:
            if name in logging.root.manager.loggerDict:
                logging.getLogger(name).propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Before the stacks of the threads of a test that took too long, say where its asyncio tasks stand: the frame of an
    event loop says nothing."""
    handled = yield
    ring = signal.getsignal(signal.SIGALRM)
    if handled and callable(ring):

        def with_tasks(signum: int, frame: FrameType | None) -> Any:
            with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
                for task in asyncio.all_tasks():
                    task.print_stack()
            return ring(signum, frame)

        signal.signal(signal.SIGALRM, with_tasks)
    return handled


# For how long a process may be seen that has ended: between its last instruction and its state "zombie", on a busy
# machine, it has a process ID and no command line. Seconds.
ENDING = 10.0


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
    ends = time.monotonic() + ENDING
    while LINUX and (left := own_children()):
        if time.monotonic() < ends:
            time.sleep(0.05)
            continue
        sys.stderr.write(f"\nprocesses left behind by the tests: {left}\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        break


@pytest.fixture(scope="session")
def redis_server(busrep_redis_server: RedisServer) -> RedisServer:
    return busrep_redis_server


@pytest.fixture(scope="session")
def postgres_server(busrep_postgres_server: PostgresServer) -> PostgresServer:
    # Half of what a new connection costs the server is SCRAM's 4,096 rounds, in which it checks the password.
    with psycopg.connect(busrep_postgres_server.url, autocommit=True) as connection:
        with contextlib.suppress(psycopg.Error):  # where MD5 is forbidden it is as slow as it is
            connection.execute("SET password_encryption = 'md5'")
            connection.execute(f"ALTER ROLE postgres PASSWORD '{busrep_postgres_server.password}'".encode())
    return busrep_postgres_server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The session's Redis, started again if a test before this one stopped it. Use ``bus_name`` on it."""
    redis_server.start()
    return redis_server.url


@pytest.fixture
def bus_name(busrep_name: str) -> str:
    """A channel name nobody else uses: the name is all that separates buses on one Redis."""
    return busrep_name


class Superuser:
    """Runs statements on the session's server, over one connection as long as that lives: to open another costs the
    server as much as to drop a database."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._kept: psycopg.Connection | None = None

    def run(self, sql: str) -> None:
        self._server.start()  # again, if a test before this one stopped it
        if self._kept is not None:
            with contextlib.suppress(psycopg.OperationalError):
                self._kept.execute(sql.encode())
                return
        self.close()
        self._kept = psycopg.connect(self._server.url, autocommit=True)
        self._kept.execute(sql.encode())

    def make_database(self, name: str) -> None:
        version = 0 if self._kept is None else self._kept.info.server_version  # 0: unknown yet
        # The default since 15 takes the blocks through the log: that costs more than a copy's checkpoints do here.
        self.run(f"CREATE DATABASE {name}" + " STRATEGY file_copy" * (version >= 150_000))

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


@pytest.fixture(scope="session")
def superuser(postgres_server: PostgresServer) -> Iterator[Superuser]:
    with contextlib.closing(Superuser(postgres_server)) as found:
        yield found


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, superuser: Superuser) -> Iterator[str]:
    """A fresh, empty database. As `busrep_postgres`; but there are hundreds of them."""
    database = f"test_{secrets.token_hex(6)}"
    superuser.make_database(database)
    yield postgres_server.database_url(database)
    superuser.run(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A database file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'busrep.db'}"
