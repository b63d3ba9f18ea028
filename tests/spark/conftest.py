"""A Spark session for the tests of one process, and a standalone cluster. Needs the extra ``spark``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from busrep.spark import session
from tests.spark.cluster import Cluster, settings, started_cluster

# Seconds for a test: on a busy machine a Java takes a minute to start, and a cluster has five.
TIMEOUT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def _spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder: Path = tmp_path_factory.mktemp("spark")
    made = session("busrep tests", master="local[2]", conf=settings(folder))
    yield made
    made.stop()
    end_jvm()


@pytest.fixture
def spark(_spark: SparkSession) -> Iterator[SparkSession]:
    """The session of this process, on ``local[2]``. Queries that a test leaves running are stopped."""
    yield _spark
    for query in _spark.streams.active:
        query.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A standalone master and two workers; see `Cluster.run`."""
    with started_cluster() as running:
        yield running


def end_jvm() -> None:
    """End the JVM of this process, which otherwise lasts as long as the process."""
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()
    process.wait(30)
    SparkContext._gateway = SparkContext._jvm = None
