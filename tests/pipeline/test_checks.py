"""Bad options of `busrep pipeline` are found before Spark is started."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from busrep.cli.app import cli
from tests.spark.archives import Bench, Local, orders

SESSION = importlib.import_module("busrep.spark.session")  # `busrep.spark.session` is the function
STREAMS = "tests.spark.archives:STREAMS"


class SparkStartedError(Exception):
    """What these options would have cost a minute for."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    def session(*_: Any, **__: Any) -> None:
        raise SparkStartedError

    monkeypatch.setattr(SESSION, "session", session)
    monkeypatch.setattr(SESSION, "active", lambda: None)
    monkeypatch.setattr("busrep.spark.failures.quiet", lambda: None)
    for name in ("BUSREP_STORE", "BUSREP_STORE_PASSWORD", "BUSREP_REDIS_PASSWORD", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    made = Bench(Local(), tmp_path)
    made.write("w1", orders(range(1, 10)), upto=9)
    made.archived_by_hand()
    return made


def arguments(bench: Bench, command: str) -> list[str]:
    """A command with its paths."""
    places = {
        "STORE": bench.url, "ARCHIVE": bench.root.url, "NEW": f"{bench.folder}/new", "FILE": f"{bench.folder}/table.db",
        "NOWHERE": f"sqlite:///{bench.folder}/nowhere.db", "STREAMS": STREAMS,
    }  # fmt: skip
    return ["pipeline", *(places.get(word, word) for word in command.split(" "))]


ARCHIVE = "archive --store STORE --archive ARCHIVE"
AUDIT = "audit --store STORE --archive ARCHIVE"
SNAPSHOT = "snapshot --store STORE --stream orders --to NEW"
REPLAY = "replay --store STORE --to-name b --to-redis redis://x"
STATS = "stats --store STORE --to NEW"
BACKFILL = "backfill --store STORE --stream orders --function builtins:len --into lengths --writer w --checkpoint NEW"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("archive --store mysql://x --archive NEW", "these forms work"),
        ("archive --store NOWHERE --archive NEW", "no busrep tables"),
        ("archive --store STORE --archive what://x", "cannot be used"),
        (f"{ARCHIVE} --stream other", "which the store does not have"),
        (f"{ARCHIVE} --stream orders --streams no.such:STREAMS", "no.such"),
        (f"{ARCHIVE} --start yesterday", "--start"),
        (f"{ARCHIVE} --redis redis://x", "go together"),
        (f"{ARCHIVE} --redis what://x --name n", "the Redis URL"),
        (f"{ARCHIVE} --redis-password-file FILE", "needs --redis"),
        (f"{ARCHIVE} --password-file FILE", "passwordFile is for PostgreSQL"),
        (f"{AUDIT} --handled NEW", "--handled"),
        (f"{AUDIT} --stream other", "which the store does not have"),
        ("compact --archive what://x", "cannot be used"),
        (SNAPSHOT, "--key FIELD"),
        (f"{SNAPSHOT} --key nothing --streams STREAMS", "nothing"),
        (f"{SNAPSHOT} --all --archive NEW", "there is no archive"),
        (f"{REPLAY} --speed 1 --flat-out", "three paces"),
        ("replay --archive NEW --to-name b --to-redis redis://x", "there is no archive"),
        (f"{REPLAY} --from-positions yesterday", "--from-positions"),
        (f"{REPLAY} --stream other", "which the store does not have"),
        ("replay --store STORE --to-name b --to-redis what://x", "the Redis URL"),
        (f"{REPLAY} --to-store memory://x", "in memory"),
        (f"{STATS} --listen 1s", "--listen"),
        (f"{STATS} --to-positions tomorrow", "--to-positions"),
        (f"{STATS} --redis-password-file FILE", "needs --redis"),
        (f"{STATS} --stream other", "which the store does not have"),
        (f"{BACKFILL} --into orders", "--into orders"),
        (f"{BACKFILL} --function no.such:function", "no.such"),
        (f"{BACKFILL} --start yesterday", "--start"),
        (f"{BACKFILL} --redis-password-file FILE", "'redisPasswordFile' needs the option 'redis'"),
        (f"{BACKFILL} --stream other", "which the store does not have"),
    ],
)
def test_a_bad_option_is_found_without_spark(bench: Bench, command: str, error: str) -> None:
    found = CliRunner().invoke(cli, arguments(bench, command))
    assert found.exit_code == 2, (found.output, found.exception)
    assert error in found.output


@pytest.mark.parametrize(
    "command",
    [
        ARCHIVE,
        f"{ARCHIVE} --stream orders --streams STREAMS",
        "archive --store STORE --archive NEW --available-now",
        AUDIT,
        "compact --archive ARCHIVE",
        f"{SNAPSHOT} --all",
        f"{SNAPSHOT} --all --archive ARCHIVE",
        REPLAY,
        "replay --archive ARCHIVE --to-name b --to-redis redis://x",
        STATS,
        BACKFILL,
    ],
)
def test_with_good_options_spark_is_started(bench: Bench, command: str) -> None:
    found = CliRunner().invoke(cli, arguments(bench, command))
    assert isinstance(found.exception, SparkStartedError), found.output
    assert not (bench.folder / "new").exists(), "a check writes nothing"


def test_a_table_that_has_lost_its_writers_is_for_the_audit_to_tell(bench: Bench) -> None:
    bench.sql("DELETE FROM busrep_positions")
    assert isinstance(CliRunner().invoke(cli, arguments(bench, AUDIT)).exception, SparkStartedError)
    assert "no writer has registered" in CliRunner().invoke(cli, arguments(bench, ARCHIVE)).output


def test_a_process_with_a_bad_option_starts_no_java(bench: Bench, tmp_path: Path) -> None:
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    java.chmod(0o755)
    command = [sys.executable, "-m", "busrep.cli", *arguments(bench, f"{ARCHIVE} --stream other")]
    done = subprocess.run(
        command, env={**os.environ, "JAVA_HOME": str(tmp_path / "java")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "which the store does not have" in done.stderr
    assert not (tmp_path / "started").exists()
