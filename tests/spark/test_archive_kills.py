"""The archive job in a process of its own, killed, on a table that real writers go on writing to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from busrep.testing.archive import DRIVER_KILLS, EXECUTOR_KILL, Options, run
from tests.spark.cluster import Cluster
from tests.spark.long import long

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(480), long]


def killed_and_identical(folder: Path, master: str) -> None:
    told: list[str] = []
    options = Options(
        rows=20_000, kills=3, pause=1.5, batch_rows=4_000, seed=7, master=master, folder=str(folder),
        on_event=told.append,
    )  # fmt: skip
    report = asyncio.run(run(options))
    assert report["ok"], (report, told)
    assert report["rows_archived"] > report["rows_at_first"] > 20_000
    assert report["lost_or_extra"] == report["findings"] == []
    assert sum(report["killed"].get(how, 0) for how in DRIVER_KILLS) == 3
    assert report["killed"].get(EXECUTOR_KILL) == 1
    assert report["facts_written_meanwhile"] > 100
    assert report["compacted"]["deleted"] > 0


def test_killed_and_identical(tmp_path: Path) -> None:
    killed_and_identical(tmp_path, "local[2]")


def test_killed_and_identical_on_a_cluster(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors are processes of the workers there, and the driver survives theirs."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    killed_and_identical(tmp_path, cluster.master)
