"""The archive job in a process of its own, killed, on a table that real writers go on writing to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from busrep.testing.archive import DRIVER_KILLS, EXECUTOR_KILL, Options, run


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_killed_and_identical(tmp_path: Path) -> None:
    told: list[str] = []
    options = Options(
        rows=20_000, kills=3, pause=1.5, batch_rows=4_000, seed=7, folder=str(tmp_path), on_event=told.append
    )
    report = asyncio.run(run(options))
    assert report["ok"], (report, told)
    assert report["rows_archived"] > report["rows_at_first"] > 20_000
    assert report["lost_or_extra"] == report["findings"] == []
    assert sum(report["killed"].get(how, 0) for how in DRIVER_KILLS) == 3
    assert report["killed"].get(EXECUTOR_KILL) == 1
    assert report["facts_written_meanwhile"] > 100
    assert report["compacted"]["deleted"] > 0
