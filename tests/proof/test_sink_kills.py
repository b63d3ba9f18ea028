"""SIGKILL between each pair of steps of a batch, and what the next try makes of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any

import pytest

import busrep
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.shop import QUICK

pytest.importorskip("pyspark")

from busrep.spark import secrets, sink_commit
from tests.pipeline.sink_child import STEPS
from tests.pipeline.sinks import WRITER, Query, ask, rows

pytestmark = [pytest.mark.servers, pytest.mark.slow]

orders: busrep.Stream[Any] = busrep.Stream("orders")


def killed(url: str, options: dict[str, str], number: int, step: str) -> None:
    task = {
        "url": url, "options": options, "run": f"run{number}", "number": number, "step": step,
        "parts": [[10 * number, 10 * number + 1], [10 * number + 2]],
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.sink_child"], input=json.dumps(task).encode(), capture_output=True,
        timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_driver_killed_at_each_step(
    kind: str, request: pytest.FixtureRequest, redis_url: str, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is begun by a process that is killed, at another step, and done again by another one, partitioned
    otherwise. Nothing is lost and nothing comes twice, in the table and on the bus."""
    url: str = request.getfixturevalue(f"{kind}_url")
    monkeypatch.setenv("BUSREP_STORE_PASSWORD", secrets.split(url)[1] or "")
    monkeypatch.setattr(sink_commit, "Settings", lambda: QUICK)
    open_blocking_store(url, Registry([orders])).init()
    options = {"redis": redis_url, "name": bus_name}
    steps = ["a task", "staged", *STEPS]
    seen: list[Any] = []

    async def run() -> None:
        # From the first row: "now" is some moment after subscribe(), and may lie behind rows written at once.
        common = {"streams": [orders], "store": url, "settings": QUICK}
        async with busrep.connect(redis_url, name=bus_name, start="earliest", **common) as bus:

            @bus.subscribe(orders)
            async def handle(batch: busrep.Batch[Any]) -> None:
                seen.extend(row[0] for row in batch.rows)

            for number, step in enumerate(steps):
                await asyncio.to_thread(killed, url, options, number, step)
                again = Query(url, run=f"run{number}'", options=options)
                await asyncio.to_thread(again.batch, number, [[10 * number + at] for at in range(3)])
            last = await asyncio.to_thread(ask, url, "SELECT max(id) FROM busrep_facts")
            await bus.wait_for(orders, WRITER, last, timeout=20)

    asyncio.run(run())
    expected = [10 * number + at for number in range(len(steps)) for at in range(3)]
    assert rows(url) == expected
    assert seen == expected
    assert ask(url, "SELECT count(*) FROM busrep_staged") == 0
