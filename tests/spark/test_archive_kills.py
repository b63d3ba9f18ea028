"""The archive job in a process of its own, killed, on a table that real writers go on writing to."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from busrep import Stream
from busrep.spark.interrupts import PATIENCE
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.proof.archive import DRIVER_KILLS, EXECUTOR_KILL, Options, run
from tests.spark.cluster import LOCAL, Cluster, command_line, end_session, members
from tests.spark.jobs import counting
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
    killed_and_identical(tmp_path, LOCAL)


def test_killed_and_identical_on_a_cluster(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors are processes of the workers there, and the driver survives theirs."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    killed_and_identical(tmp_path, cluster.master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_while_java_is_asked(number: signal.Signals, tmp_path: Path) -> None:
    """What the executors do is cancelled, for the call would take minutes."""
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, counting.__file__, "--error", "slow", "--master", LOCAL], stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        while not any(b"pyspark.daemon" in command_line(pid) for pid in members(job.pid)):
            assert job.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        time.sleep(1)
        began = time.monotonic()
        (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
        assert job.wait(60) == 130
        assert time.monotonic() - began < PATIENCE
        said = (tmp_path / "log").read_text()
        assert said.endswith("\nbusrep: interrupted\n")
        assert [word for word in ("Traceback", "Exception", "Error", "py4j") if word in said] == []
    finally:
        end_session(job.pid)
        job.wait()


def test_ctrl_c(tmp_path: Path) -> None:
    """Status 130 and one line, whatever Spark does at that moment."""
    path = tmp_path / "table.db"
    store = open_blocking_store(f"sqlite:///{path}", Registry([Stream("orders")]))
    store.init()
    store.close()
    command = [sys.executable, "-m", "busrep.cli", "pipeline", "archive", "--store", f"sqlite:///{path}"]
    command += ["--archive", str(tmp_path / "archive"), "--stream", "orders"]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while not (tmp_path / "archive/_busrep/orders/checkpoint/metadata").exists():
            assert job.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        time.sleep(1 + 4 * random.random())  # any moment of following
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does it
        assert job.wait(60) == 130
        said = (tmp_path / "log").read_text()
        assert said.endswith("\nbusrep: interrupted\n")  # Java's own first lines come before it
        assert [word for word in ("Traceback", "Exception", "Error", "py4j") if word in said] == []
    finally:
        end_session(job.pid)
        job.wait()
