"""The jobs backfill and snapshot on a cluster, while its executors are killed: no row is lost, none is there twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from busrep.snapshots.parquet import ParquetSource
from busrep.spark import secrets
from busrep.stores import open_store
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.pipeline.sinks import ask, facts
from tests.spark.backfill_functions import STREAMS
from tests.spark.cluster import Cluster, end_session
from tests.spark.long import long
from tests.spark.snapshots import rows_of

pytestmark = [pytest.mark.servers, pytest.mark.slow, long]

ROWS = 20_000
DECLARED = "tests.spark.backfill_functions:STREAMS"


@pytest.fixture
def table(postgres_url: str) -> str:
    """Orders of two writers, in PostgreSQL."""
    store = open_blocking_store(postgres_url, Registry(STREAMS))
    store.init()
    store.close()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) "
            "SELECT 'orders', 'w' || n, %s, 0, TRUE, now() FROM generate_series(0, 1) AS n",
            (ROWS,),
        )
        connection.execute(
            "INSERT INTO busrep_facts (stream, writer, id, idx, row, committed_at) "
            "SELECT 'orders', 'w' || n %% 2, n, 0, '[' || n || ',\"new\"]', now() FROM generate_series(1, %s) AS n",
            (ROWS,),
        )
    return postgres_url


def killed(cluster: Cluster, url: str, folder: Path, ready: Callable[[int], bool], *options: str) -> dict[str, Any]:
    """The report of a job, of which two executors were killed, one at a time, once ``ready`` said so of it."""
    store, password = secrets.split(url)
    (folder / "password").write_text(f"{password}\n")
    told = ["--store", store, "--password-file", str(folder / "password"), "--streams", DECLARED, "--stream", "orders"]
    with cluster.start("-m", "busrep.cli", "pipeline", *options, *told, "--json") as process:
        try:
            for number in range(2):
                wait_for(lambda: ready(number), process)  # noqa: B023 - called within the turn
                wait_for(lambda: bool(cluster.executors()), process)
                os.kill(cluster.executors()[0], signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=200)
        finally:
            end_session(process.pid)
    assert process.returncode == 0, stderr
    report: dict[str, Any] = json.loads(stdout)
    return report


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    late = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < late
        time.sleep(0.01)


def test_backfill(cluster: Cluster, table: str, tmp_path: Path) -> None:
    def ready(number: int) -> bool:
        return bool(ask(table, f"SELECT count(*) FROM busrep_sinks WHERE batch >= {2 * number}"))

    report = killed(
        cluster, table, tmp_path, ready, "backfill", "--function", "tests.spark.backfill_functions:slowly",
        "--into", "changes", "--writer", "fill", "--checkpoint", str(tmp_path / "checkpoint"), "--batch-ids", "4000",
        "--partitions", "4",
    )  # fmt: skip
    assert report["rows"] == ROWS
    found = [json.loads(payload) for payload in facts(table, "fill", STREAMS[2])]
    assert found == [[n, "new", f"orders/w{n % 2}", n, 0] for n in range(1, ROWS + 1)]
    assert ask(table, "SELECT count(*) FROM busrep_staged") == 0


def test_snapshot(cluster: Cluster, table: str, tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"

    def ready(number: int) -> bool:
        return len(list(folder.glob("part-*"))) > 20 + 300 * number

    report = killed(
        cluster, table, tmp_path, ready, "snapshot", "--all", "--to", str(folder), "--part-rows", "10",
        "--partitions", "8",
    )  # fmt: skip
    assert report["rows"] == ROWS
    assert report["parts"] >= ROWS // 10  # each task's last part has fewer
    _, rows = asyncio.run(rows_of(ParquetSource(folder.as_uri())))
    assert rows == asyncio.run(rows_of(open_store(table, Registry(STREAMS))))[1]
