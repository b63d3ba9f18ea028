"""A standalone Spark cluster on loopback: a master and two workers, started from pyspark's own files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from busrep.spark.java import find_java
from busrep.testing.processes import POLL, ServerProcess

ROOT = Path(__file__).parent.parent.parent

# What sessions run on otherwise.
LOCAL = "local[2]"

# An application has an executor of one core on each worker: with the driver, the master, the workers and the Pythons it
# fits into 4 GB. Workers take several applications, for a test's session is there while a process of its own runs.
WORKER_CORES = 4
WORKER_MEMORY = "2800m"
EXECUTOR_MEMORY = "600m"  # Spark takes no less than 450 MB
DAEMON_MEMORY = "192m"
DRIVER_MEMORY = "600m"
# Short runs on few cores: no time for the best code, no threads for the garbage, no files in /tmp.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


@attrs.define(eq=False)
class Daemon(ServerProcess):
    """A master or a worker. What it has started, executors and their Pythons, ends with it."""

    started: str = ""
    """What its log says when it serves."""
    main_class: str = ""
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)

    def command(self) -> list[str]:
        spec = importlib.util.find_spec("pyspark")
        assert spec is not None
        assert spec.origin is not None
        spark_class = Path(spec.origin).parent / "bin" / "spark-class"
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0", *self.arguments]
        return ["/usr/bin/env", *variables, str(spark_class), self.main_class, *arguments]

    def is_ready(self) -> bool:
        return self.started in (self.directory / "server.log").read_text(errors="replace")

    def port_taken(self) -> bool:
        return "could not bind" in (self.directory / "server.log").read_text(errors="replace")

    def end(self, signum: signal.Signals) -> None:
        session = None if self.child is None else self.child.pid
        super().end(signum)
        if session is not None:
            end_session(session)


def end_session(leader: int) -> None:
    """Kill what is left of the session of processes that ``leader`` led, and wait until it is gone."""
    killed: set[int] = set()
    while left := members(leader):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(left)
        time.sleep(POLL)
    for pid in killed:
        with contextlib.suppress(ChildProcessError):  # orphans have become ours, see tests/conftest.py
            os.waitpid(pid, os.WNOHANG)


def members(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] not in ("X", "Z"):
                    found.append(int(entry.name))
    return found


def command_line(pid: int) -> bytes:
    """Its command line; nothing of a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@attrs.frozen(kw_only=True)
class Cluster:
    """A running cluster. One session a process is all that Spark has: what runs on it has a process of its own."""

    master: str
    """``spark://127.0.0.1:port``."""
    folder: Path
    """With all its files."""
    daemon: Daemon
    workers: Sequence[Daemon]
    environment: Mapping[str, str]
    """Of a process that is to run on it: the master, settings that fit into it, and this tree's modules."""

    def start(self, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
        """Start ``python arguments`` with the environment of this cluster; its output is for the caller."""
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str | Path, timeout: float = 280, **variables: str) -> subprocess.CompletedProcess[str]:
        """``start`` it and wait for its end. Nothing of it is left, its JVM included."""
        with self.start(*arguments, **variables) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            finally:
                end_session(process.pid)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def executors(self) -> list[int]:
        """The process IDs of the executors that run now, to be killed."""
        all_of_them = [pid for worker in self.workers for pid in members(worker.process.pid)]
        return [pid for pid in all_of_them if b"CoarseGrainedExecutorBackend" in command_line(pid)]


def settings(folder: Path) -> dict[str, str]:
    """What a session of the tests is told, so that it is small, and leaves no files elsewhere."""
    return {
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.executor.memory": EXECUTOR_MEMORY,
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} {JVM}",
        "spark.executor.extraJavaOptions": JVM,
    }


def hide_java(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a PATH of all programs but Java, in that folder, and have no JAVA_HOME."""
    for place in os.get_exec_path():
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name != "java" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program.absolute())
    patched.setenv("PATH", str(folder))
    patched.delenv("JAVA_HOME", raising=False)
    assert shutil.which("java") is None


@contextlib.contextmanager
def started_cluster(workers: int = 2) -> Iterator[Cluster]:
    """A cluster with so many workers; it and its files are gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="busrep-spark-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = _environment(folder)
        (folder / "conf").mkdir()
        lines = [f"{name} {value}\n" for name, value in settings(folder).items()]
        (folder / "conf" / "spark-defaults.conf").write_text("".join(lines))

        def start(name: str, main_class: str, started: str, *arguments: str) -> Daemon:
            (folder / name).mkdir()
            daemon = Daemon(
                folder / name,
                started=started,
                main_class=f"org.apache.spark.deploy.{main_class}",
                arguments=arguments,
                environment=environment,
            )
            return stack.enter_context(daemon.opened())

        daemon = start("master", "master.Master", "New state: ALIVE")
        master = f"spark://127.0.0.1:{daemon.port}"
        told = ("--cores", str(WORKER_CORES), "--memory", WORKER_MEMORY)
        yield Cluster(
            master=master,
            folder=folder,
            daemon=daemon,
            workers=[
                start(
                    f"worker-{number}",
                    "worker.Worker",
                    "Successfully registered with master",
                    *(*told, "--work-dir", str(folder / f"worker-{number}"), master),
                )
                for number in range(workers)
            ],
            environment={
                "BUSREP_SPARK_MASTER": master,
                "SPARK_CONF_DIR": str(folder / "conf"),
                "SPARK_LOCAL_IP": "127.0.0.1",
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(folder),
            },
        )


def _environment(folder: Path) -> dict[str, str]:
    home = find_java().home
    return {
        "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
        # A taken port is an error, as with our other servers, and not the next one. Clusters of other test processes
        # have the port for applications over REST, which is always the same one.
        "SPARK_DAEMON_JAVA_OPTS": f"-Dspark.port.maxRetries=0 -Dspark.master.rest.enabled=false "
        f"-Djava.io.tmpdir={folder} {JVM}",
        "SPARK_LAUNCHER_OPTS": JVM,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
        **({} if home is None else {"JAVA_HOME": str(home)}),
    }
