"""Functions of an application's, for the backfill job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

import busrep
from tests.spark.archives import Order


@attrs.frozen
class Change:
    """What an order became; ``source`` and ``token``: of which row."""

    number: int
    status: str
    source: str
    token: int
    copy: int = 0


STREAMS = [
    busrep.Stream("orders", Order), busrep.Stream("payments", Order), busrep.Stream("changes", Change),
]  # fmt: skip


def changes(row: Order, stream: str, writer: str, token: int) -> Iterator[Change]:
    """Of every third order none, of every fifth two."""
    if row.number % 3 == 0:
        return
    for copy in range(2 if row.number % 5 == 0 else 1):
        yield Change(row.number, row.status, f"{stream}/{writer}", token, copy)


def slowly(row: Order, stream: str, writer: str, token: int) -> list[Change]:
    """All, with time for whoever kills it."""
    time.sleep(0.0005)
    return [Change(row.number, row.status, f"{stream}/{writer}", token)]


def deadly(row: Order, stream: str, writer: str, token: int) -> list[Change]:
    """The process dies, once: while there is the file that the row names."""
    flag = Path(row.status)
    if token == 551 and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [Change(row.number, row.status, f"{stream}/{writer}", token)]


def plain(row: Any, stream: str, writer: str, token: int) -> list[Any]:
    """Of rows without a class."""
    return [[token, row]]


def failing(row: Order, stream: str, writer: str, token: int) -> list[Change]:
    return [Change(1 // (row.number - 9), row.status, stream, token)]


def scalar(row: Order, stream: str, writer: str, token: int) -> str:
    return "text"


def misfit(row: Order, stream: str, writer: str, token: int) -> list[Any]:
    return [Change("seven", row.status, stream, token)] if row.number == 7 else []  # type: ignore[arg-type]


nothing = 5
