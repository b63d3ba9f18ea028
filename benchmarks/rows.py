"""The row that the benchmarks write, some 120 bytes as JSON, and its stream."""

from __future__ import annotations

from typing import Any

import attrs

import busrep
from busrep.stores import open_store
from busrep.streams import Registry

TEXT = "x" * 84


@attrs.define
class Row:
    writer: str
    number: int
    text: str
    amount: float
    flag: bool


rows = busrep.Stream("rows", Row)


def row(number: int) -> Row:
    return Row("w1", number, TEXT, number / 7, number % 2 == 0)


async def make_tables(store: str, stream: busrep.Stream[Any]) -> None:
    """Make busrep's tables, for one stream."""
    opened = open_store(store, Registry([stream]))
    await opened.init()
    await opened.close()


async def fill(redis: str, store: str, count: int, bulk: int = 5_000) -> None:
    """Make the tables, and write so many facts of one row under the name w1."""
    await make_tables(store, rows)
    async with busrep.connect(redis, name="bench", streams=[rows], store=store, writer="w1") as bus:
        for start in range(0, count, bulk):
            await bus.publish(rows, [row(number) for number in range(start, min(start + bulk, count))])
