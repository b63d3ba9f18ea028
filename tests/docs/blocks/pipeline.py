"""docs/pipeline.md: what needs no Spark."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

import busrep
from tests.docs.blocks.writing import on_sqlite
from tests.docs.markdown import Scope


async def report(at: Scope) -> AsyncGenerator[None, None]:
    await on_sqlite(at)
    at.Order, handled = at.OrderChanged, []
    web, at.bus = at.bus, await at.open(streams=[at.orders], store="sqlite:///shop.db", reader="search")

    async def put_into_index(batch: busrep.Batch) -> None:
        handled.extend(batch.rows)

    at.put_into_index = put_into_index
    # The report of the page is in a folder that is not there.
    at.busrep = SimpleNamespace(Batch=busrep.Batch, ReaderReport=lambda path: busrep.ReaderReport("handled.jsonl"))
    yield
    (token,) = await web.publish(at.orders, [at.OrderChanged(7, "paid")])
    await at.bus.wait_for(at.orders, "web-1", token)
    at.report.close()
    assert handled == [at.OrderChanged(7, "paid")]
    assert '"web-1"' in await asyncio.to_thread(Path("handled.jsonl").read_text)


@attrs.frozen
class Invoice:
    number: int
    token: int


async def derive(at: Scope) -> AsyncGenerator[None, None]:
    at.Invoice = Invoice
    yield
    assert list(at.invoices(SimpleNamespace(number=7, status="paid"), "orders", "web-1", 55)) == [Invoice(7, 55)]
    assert list(at.invoices(SimpleNamespace(number=7, status="new"), "orders", "web-1", 56)) == []


@attrs.define
class Gauge:
    """As prometheus_client has them: ``values`` is {labels: value}."""

    values: dict[tuple[str, ...], float] = attrs.field(factory=dict)

    def labels(self, *names: str) -> Any:
        return SimpleNamespace(set=lambda value: self.values.update({names: value}))


async def lag(at: Scope) -> AsyncGenerator[None, None]:
    at.rows, at.age, added = Gauge(), Gauge(), []
    at.spark = SimpleNamespace(streams=SimpleNamespace(addListener=added.append))
    yield
    writers = {"w1": {"rows": 3, "seconds": 2.5}, "w2": {"rows": 1, "seconds": 1.0}}
    latest = json.dumps({"epoch": "1", "stream": "orders", "lag": writers})
    progress = SimpleNamespace(id="q1", name="copies", sources=[SimpleNamespace(latestOffset=latest)])
    added[0].onQueryProgress(SimpleNamespace(progress=progress))
    assert (at.rows.values, at.age.values) == ({("copies", "orders"): 4}, {("copies", "orders"): 2.5})
    added[0].onQueryTerminated(SimpleNamespace(id="q1"))
    assert (at.rows.values, at.age.values) == ({("copies", "orders"): 0}, {("copies", "orders"): 0})
