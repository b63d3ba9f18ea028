"""The short form of benchmarks/memory.py: memory stays bounded while a handler sleeps, and nothing is missing after."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import ROOT

BENCHMARK = ROOT / "benchmarks" / "memory.py"


@pytest.mark.servers
def test_a_sleeping_handler_costs_no_more_than_the_configured_bounds() -> None:
    found = subprocess.run(
        [sys.executable, str(BENCHMARK), "--seconds", "6"], capture_output=True, text=True, timeout=90, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads(found.stdout)
    assert report["overflows"] > 0, "it was not filled: the test shows nothing"
    assert report["handled"] == report["rows"] > 10_000
    assert report["in_order"]
    assert report["resident_growth"] <= report["bound"]
