"""What a session is made of, without one: pyspark's builder is told by a fake what a real one would be."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pyspark
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from busrep.errors import ConfigError
from busrep.spark.java import Java

SESSION = importlib.import_module("busrep.spark.session")  # `busrep.spark.session` is the function


@attrs.define
class Fake:
    """A builder and its session."""

    conf: Any = attrs.field(factory=dict)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    version: str = pyspark.__version__
    stopped: int = 0
    started: int = 0
    executors: int = 0
    error: Exception | None = None
    before: Callable[[], None] = lambda: None

    def appName(self, name: str) -> Fake:
        return self

    def config(self, *, map: Mapping[str, str]) -> Fake:  # noqa: A002 - as Spark calls it
        self.conf = dict(map)
        return self

    def getOrCreate(self) -> Fake:
        self.before()
        self.environment = dict(os.environ)
        if self.error is not None:
            raise self.error
        self.started += 1
        return self

    def stop(self) -> None:
        self.stopped += 1
        if self.error is not None:
            raise self.error

    @property
    def sparkContext(self) -> Fake:
        return self

    @property
    def master(self) -> str:
        return str(self.conf["spark.master"])

    # What is asked of Java.

    @property
    def _jsc(self) -> Fake:
        return self

    def sc(self) -> Fake:
        return self

    def getExecutorMemoryStatus(self) -> Fake:
        return self

    def size(self) -> int:
        return self.executors + 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(SparkSession, "builder", made)
    monkeypatch.setattr(SESSION, "active", lambda: made if made.started else None)
    monkeypatch.setattr(SESSION, "register", lambda spark: None)
    monkeypatch.setattr(SESSION, "check_master", lambda master: None)
    monkeypatch.setattr("busrep.spark.java.find_java", lambda: Java(None, 21, Path("java")))
    for name in ("BUSREP_SPARK_MASTER", "PYSPARK_PYTHON", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_where_the_master_comes_from(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def master(**told: Any) -> str:
        fake.started = 0
        SESSION.session("x", **told)
        return fake.master

    assert master() == "local[*]"
    monkeypatch.setenv("BUSREP_SPARK_MASTER", "local[3]")
    assert master() == "local[3]"
    assert master(conf={"spark.master": "local[4]"}) == "local[4]"
    assert master(conf={"spark.master": "local[4]"}, master="local[5]") == "local[5]"


def test_which_python_the_executors_have(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(**conf: str) -> str:
        fake.started = 0
        SESSION.session("x", conf={f"spark.pyspark.{name}": value for name, value in conf.items()})
        assert os.environ.get("PYSPARK_PYTHON") in (None, "/theirs")  # as before
        return fake.environment["PYSPARK_PYTHON"]

    assert python() == sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", "/theirs")
    assert python() == "/theirs"
    assert python(python="/told") == "/told"


def test_sparks_own_copy_of_pyspark_is_left_out(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers on this machine would compile it each time that one is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SESSION.session("x")
    home = Path(fake.environment["SPARK_HOME"])
    assert (home / "jars").is_dir()
    assert not (home / "python").exists()
    assert "SPARK_HOME" not in os.environ
    fake.started = 0
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/another/python")  # which may have no pyspark of its own
    SESSION.session("x")
    assert "SPARK_HOME" not in fake.environment


def test_a_java_part_of_another_version(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.version = "3.5.9"
    with pytest.raises(ConfigError, match=rf"pyspark is {pyspark.__version__}, and its Java part 3\.5\.9$"):
        SESSION.session("x")
    assert fake.stopped == 1
    fake.started = 0
    monkeypatch.setenv("SPARK_HOME", "/opt/spark-3.5")
    with pytest.raises(ConfigError, match=r"SPARK_HOME is '/opt/spark-3\.5', unset it"):
        SESSION.session("x")


def test_a_session_that_was_there_is_not_ended_by_a_failure(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(spark: Any) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(SESSION, "register", fails)
    with pytest.raises(ConfigError, match="no"):
        SESSION.session("x")
    assert fake.stopped == 1  # it was ours
    fake.started, fake.stopped = 1, 0
    with pytest.raises(ConfigError, match="no"):
        SESSION.session("x")
    assert fake.stopped == 0


def test_two_threads_get_one_session(fake: Fake) -> None:
    meeting = threading.Barrier(2)

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)  # nobody else comes

    fake.before = meet
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(SESSION.session("x"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [fake, fake]
    assert fake.started == 1


@pytest.mark.parametrize(
    ("executors", "dynamic", "said"), [(0, "false", True), (1, "false", False), (0, "true", False)]
)
def test_a_cluster_that_gives_no_executor_is_told(
    executors: int,
    dynamic: str,
    said: bool,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(SESSION, "EXECUTOR_WAIT", 0.01)
    fake.executors = executors
    with caplog.at_level(logging.WARNING, "busrep.spark"):
        SESSION.session("x", master="spark://host:7077", conf={SESSION.DYNAMIC: dynamic})
        for thread in threading.enumerate():
            if thread.name == SESSION.WATCHER:
                thread.join()
    assert caplog.messages == (
        ["spark://host:7077 has given no executor in 0.01 s: has it workers, with enough memory and a core that is not "
         "in use? The job waits until it has"] if said else []
    )  # fmt: skip


def test_on_this_machine_nobody_waits_for_executors(fake: Fake) -> None:
    SESSION.session("x", master="local[2]")
    assert SESSION.WATCHER not in [thread.name for thread in threading.enumerate()]


def test_what_does_not_start(fake: Fake) -> None:
    fake.error = PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited", messageParameters={})
    with pytest.raises(ConfigError, match="Spark did not start: .*JAVA_GATEWAY_EXITED"):
        SESSION.session("x")


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), None])
def test_the_end_of_a_session_whose_java_has_died(error: Exception | None, fake: Fake) -> None:
    fake.error = error or Py4JNetworkError("An error occurred while trying to connect to the Java server")
    SESSION.stop(fake)
    assert fake.stopped == 1
    fake.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        SESSION.stop(fake)


@pytest.mark.parametrize(
    ("error", "status", "died"),
    [
        (ConnectionRefusedError(111, "refused"), -9, True),
        (Py4JNetworkError("Answer from Java side is empty"), -9, True),
        (Py4JError("An error occurred while calling o29.sc"), 1, True),
        (ConnectionRefusedError(111, "of a database's"), None, False),
        (ZeroDivisionError(), -9, False),
    ],
)
def test_a_java_that_has_died(
    error: Exception, status: int | None, died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @attrs.define
    class Process:
        proc: Any = None

        def wait(self, seconds: float) -> int:
            if status is None:
                raise subprocess.TimeoutExpired("java", seconds)
            return status

    monkeypatch.setattr("pyspark.SparkContext._gateway", Process(Process()))
    assert SESSION.has_died(error) is died
    monkeypatch.setattr("pyspark.SparkContext._gateway", Process())  # spark-submit has started us, and not we it
    assert not SESSION.has_died(error)
