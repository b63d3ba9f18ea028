"""Python workers that Spark gives up: what they import before they connect, and jobs that are begun again. No Spark."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from pyspark.errors import PySparkException

from busrep import ConfigError
from busrep.spark import archiving, failures, home, job, replaying
from busrep.spark.archive_driver import StreamArchive
from busrep.spark.failures import STARTS, WorkersTooSlow, is_slow_worker, with_restarts
from busrep.spark.jobs import archive, audit, replay
from tests.spark.archives import Bench, Local, orders

SLOW = PySparkException(
    "[STREAM_FAILED] Query [id = 1] terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"
)


def failing(count: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def work() -> str:
        calls.append(1)
        if len(calls) <= count:
            raise error
        return "done"

    return work, calls


@pytest.mark.parametrize(
    ("error", "slow"),
    [
        (SLOW, True),
        (PySparkException("Timed out while waiting for the Python worker to connect back after 60000 ms"), True),
        (PySparkException("Job aborted"), False),
        (ConfigError("Python worker failed to connect back"), False),
        (PySparkException("Python worker failed to connect back\nbusrep.errors.Unavailable: the database"), False),
    ],
)
def test_what_counts_as_a_slow_worker(error: Exception, slow: bool) -> None:
    assert is_slow_worker(error) is slow


def test_work_is_done_again_while_workers_are_slow(caplog: pytest.LogCaptureFixture) -> None:
    work, calls = failing(STARTS - 1, SLOW)
    assert with_restarts(work) == "done"
    assert len(calls) == STARTS
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (STARTS - 1)
    work, calls = failing(STARTS, SLOW)
    with pytest.raises(WorkersTooSlow, match=r"5 times: this machine is too busy") as raised:
        with_restarts(work)
    assert raised.value.__cause__ is SLOW
    assert len(calls) == STARTS


def test_other_failures_are_not_tried_again() -> None:
    work, calls = failing(1, PySparkException("Job aborted"))
    with pytest.raises(PySparkException, match="Job aborted"):
        with_restarts(work)
    assert len(calls) == 1


@attrs.define
class EndedQuery:
    """A query that has ended, with an error or without."""

    error: Exception | None
    isActive: bool = False

    def exception(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        pass


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(archiving, "LOOK", 0.0)
    monkeypatch.setattr(archiving, "has_file_system", lambda *_: True)
    made = Bench(Local(), tmp_path)
    made.write("w1", orders(range(1, 10)), upto=9)
    return made


def archived(bench: Bench, monkeypatch: pytest.MonkeyPatch, *errors: Exception | None, batch: int = -1) -> int:
    """The archive job with queries that end so; before the end of number ``batch`` there was a batch. Returns how
    often a query was started."""
    ends = list(errors)

    def start(self: StreamArchive, _: Any) -> EndedQuery:
        if len(errors) - len(ends) == batch:
            self.batches += 1
        return EndedQuery(ends.pop(0))

    monkeypatch.setattr(StreamArchive, "start", start)
    archive.run(bench.spark, archive.Options(store=bench.url, archive=bench.root.url, stream=("orders",)), job.silent)
    return len(errors) - len(ends)


def test_a_query_whose_worker_was_slow_is_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert archived(bench, monkeypatch, SLOW, SLOW, None) == 3


def test_a_query_that_never_starts_is_an_error_of_that_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkersTooSlow):
        archived(bench, monkeypatch, *[SLOW] * (STARTS + 1))


def test_after_a_batch_starts_are_counted_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert archived(bench, monkeypatch, *[SLOW] * (STARTS + 1), None, batch=2) == STARTS + 2


def test_a_query_that_failed_otherwise_is_not_started_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PySparkException, match="Job aborted"):
        archived(bench, monkeypatch, PySparkException("Job aborted"), None)


def test_a_replay_that_notes_nothing_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    work, calls = failing(1, SLOW)
    monkeypatch.setattr(replaying, "run", lambda *_: work())
    in_memory = replay.Options(archive="a", to_redis="redis://x", to_name="b")
    with pytest.raises(PySparkException):
        replay.run(None, in_memory, job.silent)  # type: ignore[arg-type]
    work, calls = failing(1, SLOW)
    replay.run(None, attrs.evolve(in_memory, to_store="sqlite:////x.db"), job.silent)  # type: ignore[arg-type]
    assert len(calls) == 2


def test_a_job_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    work, calls = failing(1, SLOW)
    monkeypatch.setattr("busrep.spark.auditing.run", lambda *_: work())
    audit.run(None, audit.Options(store="sqlite:////x.db", archive="a"), job.silent)  # type: ignore[arg-type]
    assert len(calls) == 2


# -- what a worker imports before it connects -----------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return tmp_path


def test_a_home_without_the_zip_of_pyspark(cache: Path) -> None:
    found = home.find_home(sys.executable, "local[2]")
    assert found is not None
    assert found.is_relative_to(cache)
    assert (found / "bin" / "spark-submit").is_file()
    assert any((found / "jars").glob("spark-core_*.jar"))
    assert not (found / "python").exists()
    assert home.find_home(sys.executable, "spark://x:7077") == found
    # Spark's first Python, as Spark starts it: from the packages, not from a zip.
    path = f"{found}/python/lib/pyspark.zip"
    code = "import pyspark; print(pyspark.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert ".zip" not in done.stdout
    assert "pyspark" in done.stdout


def test_who_needs_sparks_own_copy_has_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.find_home("/usr/bin/another-python", "local[2]") is None
    assert home.find_home(sys.executable, "yarn") is None
    assert home.find_home(sys.executable, None) is None
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/elsewhere")
    assert home.find_home(sys.executable, "local[2]") is None
    monkeypatch.undo()
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert home.find_home(sys.executable, "local[2]") is None


def test_a_folder_with_other_things_in_it_is_not_used(cache: Path) -> None:
    found = home.find_home(sys.executable, "local[2]")
    assert found is not None
    (found / "jars").unlink()
    (found / "jars").mkdir()
    other = home.find_home(sys.executable, "local[2]")
    assert other is not None
    assert not other.is_relative_to(cache / "busrep")
    assert failures.STARTS > 1
