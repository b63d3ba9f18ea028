"""The FastAPI service of docs/examples, in two real uvicorn processes on one real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from busrep import Stream
from busrep.errors import Unavailable
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry
from tests import ROOT
from tests.stores.store_conformance import sync

pytestmark = pytest.mark.servers

EXAMPLES = ROOT / "docs" / "examples"


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
                if found := re.search(r"running on (http:\S+)", line):
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


@pytest.fixture
def service(redis_url: str, bus_name: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, in this process."""
    store = open_blocking_store(postgres_url, Registry([Stream("orders")]))
    store.init()
    store.close()
    given = {"BUSREP_REDIS": redis_url, "BUSREP_NAME": bus_name, "BUSREP_STORE": postgres_url}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("fastapi_orders")
    for name in ("fastapi_orders", "orders"):
        del sys.modules[name]


@contextlib.asynccontextmanager
async def lived(service: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        service.app.router.lifespan_context(service.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://shop.test") as client,
    ):
        yield client


def test_the_application_may_begin_again(service: Any) -> None:
    """As each test of an application has it begin anew, in an event loop of its own."""

    async def live(turn: int) -> None:
        async with lived(service) as client:
            answer = (await client.put(f"/orders/{turn}/new")).json()
            assert answer == {"writer": "web-1", "fact": turn}
            assert (await client.get(f"/orders/{turn}", params=answer)).json() == "new"
            assert (await client.get("/orders/1")).json() == "new"

    for turn in (1, 2):
        asyncio.run(live(turn))


@sync
async def test_a_bus_that_cannot_be_opened_keeps_the_application_from_beginning(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as away, pytest.raises(Unavailable):
        away.setenv("BUSREP_REDIS", "redis://127.0.0.1:1")
        async with lived(service):
            pytest.fail("it began")
    async with lived(service) as client:
        assert (await client.put("/orders/1/new")).json()["fact"] == 1


@sync
async def test_a_beginning_that_fails_later_closes_the_bus(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(service, "follow")
    with pytest.raises(NameError):
        async with lived(service):
            pytest.fail("it began")
    assert service.bus._state == "closed"
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("busrep")] == []
