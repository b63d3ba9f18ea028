"""Spark's Python workers: where they have pyspark from, and an archive job whose worker is too slow for Spark."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.archives import Bench, Local, orders

# Longer than the ten seconds that Spark waits.
TOO_LONG = 12

SLOW_AT_FIRST = """#!/bin/sh
case "$*" in *python_streaming_source_runner*)
    if mkdir {seen} 2>/dev/null; then sleep {seconds}; fi;;
esac
exec {python} "$@"
"""


def test_workers_have_the_installed_pyspark(spark: SparkSession) -> None:
    def where(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    assert ".zip" not in spark.sparkContext.parallelize([0], 1).map(where).collect()[0]


def test_an_archive_whose_first_worker_is_too_slow(tmp_path: Path) -> None:
    bench = Bench(Local(), tmp_path)
    bench.write("w1", orders(range(1, 100)), upto=99)
    python = tmp_path / "python"
    script = SLOW_AT_FIRST.format(seen=tmp_path / "seen", seconds=TOO_LONG, python=shlex.quote(sys.executable))
    python.write_text(script)
    python.chmod(0o755)
    command = ["pipeline", "archive", "--store", bench.url, "--archive", bench.root.url, "--available-now"]
    done = subprocess.run(
        [sys.executable, "-m", "busrep.cli", *command, "--master", "local[1]"],
        env={**os.environ, "PYSPARK_PYTHON": str(python)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trying again (1 of 5)" in done.stderr
    assert "archived 99 rows" in done.stdout
    assert bench.archived() == bench.table()
