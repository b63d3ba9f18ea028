"""`busrep pipeline` without Spark: commands from declarations, reports, exit codes, secrets."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result

import busrep.spark.jobs
from busrep.cli.app import cli
from busrep.cli.pipeline import describe, job_command, stage_bars
from busrep.errors import ConfigError
from busrep.spark import job
from busrep.spark.failures import is_sparks, quiet, reason
from tests.spark.jobs import counting

SESSION = importlib.import_module("busrep.spark.session")  # `busrep.spark.session` is the function


class FakeSession:
    """What the runner needs of a session."""

    def __init__(self) -> None:
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@attrs.define
class Runs:
    """`busrep pipeline counting` with a job that only notes what it is told."""

    result: Any = attrs.field(factory=dict)
    seen: list[counting.Options] = attrs.field(factory=list)
    sessions: list[tuple[str, Any, dict[str, str]]] = attrs.field(factory=list)
    spark: FakeSession = attrs.field(factory=FakeSession)

    def run(self, spark: Any, options: counting.Options, progress: job.Progress) -> job.Report:
        assert spark is self.spark
        self.seen.append(options)
        progress("counting", 1, None)
        if isinstance(self.result, BaseException):
            raise self.result
        found: dict[str, Any] = self.result
        return found

    def __call__(self, *arguments: str, **env: str) -> Result:
        return CliRunner().invoke(cli, ["pipeline", "counting", *arguments], env=env)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()

    def session(app: str, *, master: str | None, conf: dict[str, str]) -> FakeSession:
        found.sessions.append((app, master, conf))
        return found.spark

    monkeypatch.setattr(counting, "run", found.run)
    monkeypatch.setattr(busrep.spark.jobs, "__path__", [str(Path(counting.__file__).parent)])
    monkeypatch.setitem(sys.modules, "busrep.spark.jobs.counting", counting)
    monkeypatch.setattr(SESSION, "session", session)
    monkeypatch.setattr(SESSION, "active", lambda: None)
    monkeypatch.setattr(SESSION, "check_extra", lambda: None)
    monkeypatch.setattr("busrep.spark.failures.quiet", lambda: None)
    for name in ("BUSREP_STORE", "BUSREP_STORE_PASSWORD", "PYSPARK_GATEWAY_PORT"):
        # Set, then removed: so it is removed again after the test, if the command sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return found


# -- options ---------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_job(runs: Runs) -> None:
    assert runs().exit_code == 0
    assert runs.seen == [counting.Options()]
    assert runs.sessions == [("busrep counting", None, {"spark.log.level": "OFF"})]
    assert runs.spark.stopped == 1


def test_each_kind_of_option(runs: Runs) -> None:
    result = runs(
        *("--store", "sqlite:////x.db", "--stream", "a", "--stream", "b", "--rows", "7", "--every", "2m"),
        *("--how", "badly", "--quietly", "--master", "local[3]", "--conf", "spark.a=b=c", "--conf", "spark.d="),
        COUNTING_FOLDER="here",
    )
    assert result.exit_code == 0, result.output
    assert runs.seen == [
        counting.Options(
            store="sqlite:////x.db",
            stream=("a", "b"),
            rows=7,
            every=120.0,
            how="badly",
            quietly=True,
            folder=Path("here"),
        )
    ]
    told = {"spark.log.level": "OFF", "spark.a": "b=c", "spark.d": ""}
    assert runs.sessions == [("busrep counting", "local[3]", told)]


@pytest.mark.parametrize(
    ("flags", "level"), [((), "OFF"), (("-v",), "ERROR"), (("-vv",), "WARN"), (("-vvv",), "WARN")], ids=str
)
def test_what_spark_logs(flags: tuple[str, ...], level: str, runs: Runs) -> None:
    assert CliRunner().invoke(cli, [*flags, "pipeline", "counting"]).exit_code == 0
    runs("--conf", "spark.log.level=INFO")
    assert [conf["spark.log.level"] for _, _, conf in runs.sessions] == [level, "INFO"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "0"), "x>=1"),
        (("--rows", "many"), "not a valid integer"),
        (("--every", "soon"), "is not a duration"),
        (("--how", "so-so"), "'well', 'badly'"),
        (("--conf", "driver.memory=1g"), "spark.NAME=VALUE"),
        (("--conf", "spark.driver.memory"), "spark.NAME=VALUE"),
        (("--nothing",), "No such option"),
    ],
)
def test_usage_errors_start_nothing(arguments: tuple[str, ...], said: str, runs: Runs) -> None:
    result = runs(*arguments)
    assert (result.exit_code, runs.sessions) == (2, [])
    assert said in re.sub(r"\s+", " ", result.stderr)


def test_what_options_refuse_is_a_usage_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.frozen(kw_only=True)
    class Options:
        needed: str = job.option(help="Needed.")
        both: bool = job.option(True, help="Yes or no.")

        def __attrs_post_init__(self) -> None:
            if not self.both:
                raise ValueError("--no-both does not work")

    monkeypatch.setattr(counting, "Options", Options)
    assert "Missing option '--needed'" in runs().stderr
    assert "--no-both does not work" in runs("--needed", "x", "--no-both").stderr
    assert runs("--needed", "x").exit_code == 0
    assert runs.seen == [Options(needed="x")]


def test_help_is_the_modules() -> None:
    result = CliRunner().invoke(job_command("counting", counting), ["--help"])
    text = " ".join(result.stdout.split())
    assert "Count rows, where Spark runs. A job for the tests" in text
    for part in (
        "--rows INTEGER RANGE",
        "[default: 10; x>=1]",
        "--how [well|badly]",
        "BUSREP_STORE",
        "COUNTING_FOLDER",
    ):
        assert part in text
    assert "The stream's name. May be repeated." in text
    assert job_command("counting", counting).get_short_help_str() == "Count rows, where Spark runs."


def test_the_groups_help_lists_the_jobs_and_loads_no_spark() -> None:
    code = """
import sys
from busrep.cli.app import cli
for arguments in (["--help"], ["pipeline", "--help"]):
    try:
        cli(arguments)
    except SystemExit as end:
        assert end.code == 0
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"pyspark", "py4j", "pyarrow", "pandas"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pipeline " in done.stdout
    assert done.stdout.count("[]\n") == 2
    named = [path.stem for path in Path(busrep.spark.jobs.__path__[0]).glob("[a-z]*.py")]
    assert [name for name in named if f"  {name} " not in done.stdout] == []


def test_an_unknown_job() -> None:
    result = CliRunner().invoke(cli, ["pipeline", "nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.stderr


def test_without_spark_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["pyspark"] = None
import busrep.spark.jobs
busrep.spark.jobs.__path__.append({str(Path(counting.__file__).parent)!r})
from busrep.cli import main
main(["pipeline", "counting", "--report", {str(tmp_path / "r.json")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "busrep: busrep on Spark needs an extra that is not installed: pip install 'busrep[spark]'\n"
    )
    assert "busrep[spark]" in json.loads((tmp_path / "r.json").read_text())["error"]


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ok", [True, False])
def test_reports_and_status(ok: bool, runs: Runs, tmp_path: Path) -> None:
    runs.result = {"rows": 1_234_567, "ok": ok}
    path = tmp_path / "report.json"
    result = runs("--json", "--report", str(path))
    assert (result.exit_code, result.stderr) == (int(not ok), "")
    printed = json.loads(result.stdout)
    assert printed == json.loads(path.read_text())
    assert printed.pop("seconds") >= 0
    assert printed == {"job": "counting", "ok": ok, "rows": 1_234_567}
    assert list(tmp_path.iterdir()) == [path]
    result = runs()
    assert "rows     1,234,567\n" in result.stdout


def test_a_job_may_describe_its_report(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "describe", lambda report: f"it was {report['ok']}", raising=False)
    assert runs().stdout == "it was True\n"


def test_rows_that_wait_stand_below_each_report(runs: Runs) -> None:
    writer = {"position": 5, "waiting_rows": 2, "silent_for": 60.0, "waiting_for": 61.0}
    live = {**writer, "silent_for": 9.0}
    runs.result = {"table_writers": {"orders": {"w1": writer, "w2": live}}, "finished": {}, "lease": 10.0}
    (line,) = [line for line in runs().stdout.splitlines() if line.startswith("WAITING")]
    assert line == (
        "WAITING: stream 'orders', writer 'w1': 2 committed rows above its proven position 5, and it was last seen "
        "60 s ago"
    )


def test_reports_for_a_person() -> None:
    text = describe({"rows": 1_000, "shop": {"orders": {"w1": 5}, "x": {}}, "ok": True, "names": ["a"]})
    assert text.splitlines() == [
        "rows   1,000",
        "shop",
        "  orders",
        "    w1  5",
        "  x       {}",
        "ok     True",
        "names  ['a']",
    ]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(ConfigError("what to do"), 2, "what to do"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_a_run_that_fails_is_reported_too(
    error: BaseException, status: int, said: str, runs: Runs, tmp_path: Path
) -> None:
    runs.result = error
    path = tmp_path / "report.json"
    path.write_text("of an earlier run")
    result = runs("--json", "--report", str(path))
    assert (result.exit_code, result.stdout) == (status, "")
    found = json.loads(path.read_text())
    assert (found["job"], found["ok"], found["error"]) == ("counting", False, said)
    assert runs.spark.stopped == 1


def test_bugs_keep_their_traceback_and_the_session_ends(runs: Runs, tmp_path: Path) -> None:
    runs.result = ZeroDivisionError("no")
    assert isinstance(runs("--report", str(tmp_path / "r.json")).exception, ZeroDivisionError)
    assert runs.spark.stopped == 1
    assert json.loads((tmp_path / "r.json").read_text())["error"] == "ZeroDivisionError: no"


def test_a_java_that_has_died_is_told_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SESSION, "has_died", lambda error: isinstance(error, ConnectionRefusedError))
    runs.result = ConnectionRefusedError(111, "Connection refused")
    result = runs()
    assert (result.exit_code, result.stderr[:29]) == (2, "busrep: Spark's Java has died")


def test_sigterm_is_as_ctrl_c(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is stopped with it: the queries are ended, and the report is written."""
    before = signal.getsignal(signal.SIGTERM)

    def run(spark: Any, options: Any, progress: Any) -> job.Report:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr(counting, "run", run)
    assert runs("--report", str(tmp_path / "r.json")).exit_code == 130
    assert json.loads((tmp_path / "r.json").read_text())["error"] == "interrupted"
    assert runs.spark.stopped == 1
    assert signal.getsignal(signal.SIGTERM) is before


JAVA = """
def call(send, ended):
    for _ in range(3):
        send()
    ended.append(True)
    if len(ended) > 1:
        raise OSError("cancelled")
"""


@pytest.mark.parametrize("cut", [False, True], ids=["it ends", "it fails"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_ctrl_c_waits_for_a_call_into_java(
    number: signal.Signals, cut: bool, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the connection would have half an answer in it. But what the call was for is not waited for."""
    before = signal.getsignal(number)
    java: dict[str, Any] = {"__name__": "py4j.java_gateway"}
    exec(JAVA, java)
    ended: list[bool] = [False] if cut else []

    def run(spark: Any, options: Any, progress: Any) -> job.Report:
        java["call"](lambda: signal.raise_signal(number), ended)
        time.sleep(10)
        raise AssertionError

    monkeypatch.setattr(counting, "run", run)
    result = runs("--report", str(tmp_path / "r.json"))
    assert (result.exit_code, result.stderr) == (130, "busrep: interrupted\n")
    assert ended[-1]
    assert json.loads((tmp_path / "r.json").read_text())["error"] == "interrupted"
    assert runs.spark.stopped == 1
    assert signal.getsignal(number) is before
    for thread in threading.enumerate():
        if thread.name in ("busrep-interrupt", "busrep-cancel"):
            thread.join(5)
            assert not thread.is_alive()


def test_a_call_into_java_that_does_not_end_is_interrupted(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrep.spark.interrupts.PATIENCE", 0.3)
    java: dict[str, Any] = {"__name__": "py4j.java_gateway"}
    exec("def call(send, wait):\n    send()\n    wait(10)", java)
    began = time.monotonic()

    def run(*_: Any) -> job.Report:
        java["call"](lambda: signal.raise_signal(signal.SIGINT), time.sleep)
        raise AssertionError

    monkeypatch.setattr(counting, "run", run)
    assert runs().exit_code == 130
    assert time.monotonic() - began < 5


def test_a_call_that_begins_behind_the_cancelled_one_is_cancelled_too(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[float] = []
    monkeypatch.setattr(SESSION, "cancel", lambda: cancelled.append(time.monotonic()))
    java: dict[str, Any] = {"__name__": "py4j.java_gateway"}
    exec("def call(send, wait):\n    send()\n    while not wait():\n        pass", java)

    def run(*_: Any) -> job.Report:
        java["call"](lambda: signal.raise_signal(signal.SIGINT), lambda: time.sleep(0.01) or len(cancelled) > 2)
        time.sleep(10)
        raise AssertionError

    monkeypatch.setattr(counting, "run", run)
    began = time.monotonic()
    assert runs().exit_code == 130
    assert time.monotonic() - began < 5
    assert len(cancelled) == 3


def test_our_handler_takes_the_place_of_pysparks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls into Java, from wherever the signal came."""
    before = signal.getsignal(signal.SIGINT)

    def session(*_: Any, **__: Any) -> FakeSession:
        signal.signal(signal.SIGINT, lambda *_: None)
        return runs.spark

    def run(spark: Any, options: Any, progress: Any) -> job.Report:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(SESSION, "session", session)
    monkeypatch.setattr(counting, "run", run)
    assert runs().exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_a_session_that_was_there_stays(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SESSION, "active", lambda: runs.spark)
    assert runs().exit_code == 0
    assert runs.spark.stopped == 0


def test_a_report_that_cannot_be_written_is_told_before(runs: Runs, tmp_path: Path) -> None:
    result = runs("--report", str(tmp_path / "none" / "report.json"))
    assert (result.exit_code, runs.sessions) == (2, [])
    assert "--report" in result.stderr


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_no_plain_file_is_written_into(kind: str, runs: Runs, tmp_path: Path) -> None:
    """And not replaced: /dev/stdout, /dev/null, which root could."""
    path, target = tmp_path / "report", tmp_path / "target"
    if kind == "link":
        path.symlink_to(target)
        assert runs("--report", str(path)).exit_code == 0
        assert path.is_symlink()
        assert json.loads(target.read_text())["ok"]
        return
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert runs("--report", str(path)).exit_code == 0
        assert json.loads(os.read(reading, 10_000))["ok"]
    finally:
        os.close(reading)
    assert path.is_fifo()


def test_a_report_that_cannot_be_written_is_printed_all_the_same(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    runs.result = {"rows": 7}
    monkeypatch.setattr("busrep.private_files.os.replace", full)
    result = runs("--json", "--report", str(tmp_path / "r.json"))
    assert result.exit_code == 2
    assert json.loads(result.stdout)["rows"] == 7
    assert "No space left" in result.stderr
    assert list(tmp_path.iterdir()) == []


# -- secrets ---------------------------------------------------------------------------------------------------------

STORE = "postgresql://me@db/shop"


def test_a_password_on_the_command_line_goes_into_the_environment(runs: Runs) -> None:
    assert runs("--store", "postgresql://me:p%40w@db/shop").exit_code == 0
    assert runs.seen[0].store == STORE
    assert os.environ["BUSREP_STORE_PASSWORD"] == "p@w"


def test_a_password_of_the_environment_stays_there(runs: Runs) -> None:
    assert runs(BUSREP_STORE="postgresql://me:pw@db/shop").exit_code == 0
    assert runs.seen[0].store == STORE
    assert "BUSREP_STORE_PASSWORD" not in os.environ


def test_a_password_in_arguments_of_spark_submit_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java's command line has them, and Spark's UI shows it."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    result = runs("--store", "postgresql://me:pw@db/shop")
    assert (result.exit_code, runs.sessions) == (2, [])
    assert "BUSREP_STORE_PASSWORD" in result.stderr
    assert "pw@" not in result.stderr
    assert runs(BUSREP_STORE="postgresql://me:pw@db/shop").exit_code == 0
    assert runs.seen[0].store == STORE


PLACES = {
    "archive": {"archive": "x", "redis": "redis://h"},
    "backfill": {"stream": "a", "function": "m:f", "into": "b", "writer": "w", "checkpoint": "c", "redis": "redis://h"},
    "replay": {"to-redis": "redis://h", "to-name": "n"},
    "stats": {"to": "x", "redis": "redis://h"},
    "snapshot": {"stream": "a", "to": "x"},
}
URLS = [
    ("archive", "redis", "redis://:se/cret@h", "BUSREP_REDIS_PASSWORD"),
    ("archive", "archive", "s3://key:se/cret@bucket/a", "the environment"),
    ("backfill", "redis", "redis://me:secret@h:1/0", "--redis-password-file"),
    ("backfill", "to-store", "postgresql://me:secret@db/shop", "--to-password-file"),
    ("replay", "to-redis", "redis://h?password=secret", "--to-redis-password-file"),
    ("replay", "to-store", "postgresql://me:se/cret@db/shop", "--to-password-file"),
    ("replay", "store", "postgresql://db/shop?user=me&password=secret", "--password-file"),
    ("stats", "redis", "redis://:secret@h", "--redis-password-file"),
    ("snapshot", "to", "s3://bucket?secret_key=secret", "the environment"),
]


def asked(name: str, flag: str, url: str) -> Result:
    """`busrep pipeline NAME`, as far as options go: to be refused there."""
    told = {"store": "sqlite:////x.db", **PLACES[name], flag: url}
    module = importlib.import_module(f"busrep.spark.jobs.{name}")
    arguments = [part for flag, value in told.items() for part in (f"--{flag}", value)]
    return CliRunner().invoke(cli, ["pipeline", module.__name__.rpartition(".")[2], *arguments, "--master", "none"])


@pytest.mark.parametrize(("name", "flag", "url", "place"), URLS)
def test_a_password_in_any_url_of_spark_submit_is_refused(
    name: str, flag: str, url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    result = asked(name, flag, url)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"busrep: --{flag} holds a password, which Spark's UI shows: put it into ")
    assert place in result.stderr
    assert "cret" not in result.stderr.replace("secret_key", "")


@pytest.mark.parametrize(("name", "flag", "url", "place"), [URLS[0], URLS[2], URLS[3]])
def test_a_password_that_would_become_an_option_of_sparks_is_refused(
    name: str, flag: str, url: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without spark-submit, and before Spark starts."""
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    result = asked(name, flag, url)
    assert (result.exit_code, place in result.stderr) == (2, True)
    assert f"--{flag} holds a password" in result.stderr


def test_a_password_of_a_url_that_stays_in_this_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    assert "the Spark master 'none'" in asked("replay", "to-redis", "redis://:secret@h").stderr
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "the Spark master 'none'" in asked("replay", "to-redis", "redis://h:6379/0").stderr
    monkeypatch.setenv("BUSREP_TO_STORE", "postgresql://me:secret@db/shop")  # which nothing shows
    assert "the Spark master 'none'" in asked("replay", "to-redis", "redis://h:6379/0").stderr


# -- errors of Spark's -----------------------------------------------------------------------------------------------

TRACE = """
  An exception was thrown from the Python worker:

Traceback (most recent call last):
  File "worker.py", line 7, in main
    process()
{last}

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            TRACE.format(last="busrep.errors.PositionTooOld: (orders, w1): rows are gone. Start again"),
            "(orders, w1): rows",
        ),
        (TRACE.format(last="ModuleNotFoundError: No module named 'x'"), "ModuleNotFoundError: No module named 'x'"),
        (TRACE.format(last="KeyError"), "KeyError"),
        ("[TABLE_OR_VIEW_NOT_FOUND] The table cannot be found.\n== SQL ==\nx", "Error: [TABLE_OR_VIEW_NOT_FOUND] The"),
        ("", "Error"),
    ],
)
def test_errors_of_sparks_in_one_line(text: str, told: str) -> None:
    class Error(Exception):
        pass

    found = reason(Error(text))
    assert found.startswith(told)
    assert "\n" not in found
    assert not is_sparks(Error())
    Error.__module__ = "pyspark.errors.exceptions.base"
    assert is_sparks(Error())


def test_what_spark_raises_ends_in_one_line(runs: Runs) -> None:
    kind = type("PythonException", (Exception,), {"__module__": "pyspark.errors"})
    runs.result = kind(TRACE.format(last="busrep.errors.ConfigError: what to do"))
    result = runs()
    assert (result.exit_code, result.stderr) == (2, "busrep: what to do\n")


def test_traces_of_sparks_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """py4j writes one for a Ctrl-C, to the root logger."""
    root, told = logging.getLogger(), logging.getLogger("py4j")
    before = told.level
    try:
        for _ in range(2):
            quiet()
        assert len(root.filters) == 1
        root.handle(root.makeRecord("root", logging.ERROR, "/lib/py4j/java_gateway.py", 1, "interrupted", (), None))
        logging.getLogger("py4j.clientserver").error("lost")
        root.error("ours")
    finally:
        told.setLevel(before)
        for one in list(root.filters):
            root.removeFilter(one)
    assert caplog.messages == ["ours"]


# -- progress --------------------------------------------------------------------------------------------------------


def test_progress_goes_to_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with stage_bars("counting", quiet=False) as progress:
        progress("reading", 1, 10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_for_each_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with stage_bars("counting", quiet=False) as progress:
        progress("reading [x]", 1, None)
        progress("reading [x]", 1_000, 2_000)
        progress("writing", 5, 5)
    shown = capsys.readouterr()
    assert shown.out == ""
    text = re.sub("\x1b.*?[a-zA-Z]", "", shown.err)
    assert "counting: reading [x]" in text
    assert "1,000 of 2,000" in text
    assert re.search(r"counting: writing.* 5 of 5 ", text)


def test_the_command_of_a_job_takes_the_common_options() -> None:
    names = {name for param in job_command("counting", counting).params for name in param.opts}
    assert {"--master", "--conf", "--json", "--report"} <= names
    assert isinstance(job_command("counting", counting), click.Command)
