from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.cli.options import DURATION
from busrep.cli.output import print_table
from busrep.cli.servers import first_error
from busrep.errors import BusrepError, ConfigError
from busrep.urls import shown_url


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10s", 10), ("2m", 120), ("1h", 3600), ("7d", 604_800), ("1.5", 1.5), (" 3s ", 3)],
)
def test_durations(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0", "0ms", "0.0h"])
def test_a_heartbeat_of_no_time_is_refused(text: str) -> None:
    assert DURATION.convert(text, None, None) == 0
    found = CliRunner().invoke(cli, ["serve", "--name", "x", "--tcp", "0", "--heartbeat", text, "--for", "0"])
    assert (found.exit_code, "is not above 0" in found.stderr) == (2, True)


@pytest.mark.parametrize("text", ["", "ten", "5 s", "-1s", "1w", "1e3", "s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="500ms"):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("postgresql://me:se@cret@host/db", "postgresql://..."),
        ("redis://me:se/c:ret@host:1", "redis://..."),
        ("unix:///run/redis.sock?password=secret&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("sqlite:///file.db", "sqlite:///file.db"),
        ("redis://[broken", "redis://..."),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_of_a_group_of_errors_ours_is_shown() -> None:
    ours = ConfigError("ours")
    group = BaseExceptionGroup("", [ValueError("theirs"), ExceptionGroup("", [ours])])
    assert first_error(group) is ours
    assert isinstance(first_error(ExceptionGroup("", [ValueError()])), ValueError)
    assert first_error(ours) is ours


def failing(error: BaseException) -> click.Command:
    @click.command("fail")
    def command() -> None:
        raise error

    return command


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> object:
    def run(error: BaseException, *options: str) -> object:
        monkeypatch.setitem(cli.commands, "fail", failing(error))
        return CliRunner().invoke(cli, [*options, "fail"])

    return run


def test_our_errors_are_one_line_and_status_2(fail_with) -> None:  # type: ignore[no-untyped-def]
    result = fail_with(BusrepError("what to do"))
    assert (result.exit_code, result.stderr) == (2, "busrep: what to do\n")
    result = fail_with(BusrepError("what to do"), "--verbose")
    assert (result.exit_code, result.stderr) == (2, "busrep: what to do\n")


def test_interrupted_is_status_130(fail_with) -> None:  # type: ignore[no-untyped-def]
    assert fail_with(KeyboardInterrupt()).exit_code == 130


def test_a_full_disk_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "busrep.cli", "db", "--help"], stdout=full, check=False)
        assert done.returncode != 0
        command = [sys.executable, "-m", "busrep.cli", "db", "init", "--store", "memory://x"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.stderr.splitlines()[0] == b"busrep: [Errno 28] No space left on device"
    assert b"Traceback" not in done.stderr


def test_a_closed_pipe_is_left_to_click(fail_with) -> None:  # type: ignore[no-untyped-def]
    result = fail_with(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize(("terminal", "width"), [(40, 79), (80, 80), (100, 100)])
def test_tables_fold_long_names_alone_and_show_them_as_they_are(
    terminal: int, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    columns = ("stream", "writer", "position", "floor", "incarnation", "last heard", "registered")
    long = "a-writer-with-a-name-of-its-own-that-is-long"
    print_table("Writers", columns, [("a[/b]:heart:", long, 123_456, 7, 1, "113.0 s ago", "yes")])
    lines = re.sub("\x1b.*?m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) == width
    cells = [re.split("[\u2502\u2503]", line)[1:-1] for line in lines]  # the lines between columns
    folded = ["".join(map(str.strip, column)) for column in zip(*filter(None, cells), strict=True)]
    shown = ["a[/b]:heart:", long, "123,456", "7", "1", "113.0 s ago", "yes"]
    headings = [column if width >= 80 else column.replace(" ", "") for column in columns]
    assert folded == [heading + cell for heading, cell in zip(headings, shown, strict=True)]


def test_bugs_keep_their_traceback(fail_with) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(fail_with(ZeroDivisionError()).exception, ZeroDivisionError)


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import busrep.cli; busrep.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'busrep[cli]'" in done.stderr


def test_version_and_help() -> None:
    done = subprocess.run([sys.executable, "-m", "busrep.cli", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "db", "positions", "tail", "publish", "lag"):
        assert command in done.stdout
    version = CliRunner().invoke(cli, ["--version"])
    assert version.exit_code == 0
    assert "0.1.0" in version.stdout
