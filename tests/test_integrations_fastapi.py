"""The FastAPI service of docs/examples, in two real uvicorn processes on one real Redis."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from busrep import Stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

pytestmark = pytest.mark.servers

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@contextlib.contextmanager
def served(writer: str, environment: dict[str, str]) -> Iterator[httpx.Client]:
    """The service in a process of its own; it ends well when it is told to."""
    command = [sys.executable, "-m", "uvicorn", "fastapi_orders:app", "--port", "0", "--no-access-log"]
    process = subprocess.Popen(
        command, cwd=EXAMPLES, env={**environment, "ORDERS_WRITER": writer}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said: list[str] = []
    with process:
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"running on (http://\S+)", line):
                    break
            else:
                raise AssertionError("".join(said))
            with httpx.Client(base_url=found[1], timeout=10) as client:
                yield client
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=20)[1]
            assert "Application shutdown complete" in rest
        finally:
            process.kill()


def test_two_processes_write_and_follow(redis_url: str, bus_name: str, postgres_url: str) -> None:
    store = open_blocking_store(postgres_url, Registry([Stream("orders")]))
    store.init()
    store.close()
    environment = {
        **os.environ, "BUSREP_REDIS": redis_url, "BUSREP_NAME": bus_name, "BUSREP_STORE": postgres_url,
        "PYTHONPATH": str(EXAMPLES.parent.parent), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    with served("web-1", environment) as one:
        with served("web-2", environment) as two:
            assert one.get("/orders/7").status_code == 404
            for writer, reader in ((one, two), (two, one), (one, one)):
                for state in ("new", "paid", "sent"):
                    answer = writer.put(f"/orders/7/{state}").json()
                    assert reader.get("/orders/7", params=answer).json() == state
        answer = one.put("/orders/8/new").json()
        with served("web-2", environment) as two:  # from the table, what was written before
            assert two.get("/orders/8", params=answer).json() == "new"
            assert two.get("/orders/7", params={"writer": "web-2", "fact": 6}).json() == "sent"
