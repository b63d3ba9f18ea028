"""Rows/s of a reader that catches up from the table, beside the bare driver reading the same rows from it.

    python benchmarks/catch_up.py [--rows 200000] [--rounds 5] [--json FILE]

The rows are written once, some 120 bytes each as JSON, one a fact. In each round every variant reads all of them from
the oldest on, in turns, each in a fresh process; printed are medians over the rounds, and the median of the rounds'
ratios to the bare driver on the same database. All variants end with the same typed rows, and count them.

``bare``    psycopg or sqlite3: pages of `Settings.page_rows` behind the last ID of the page before, one
            ``orjson.loads`` a page, and a Row of each.
``busrep``  ``busrep.connect(start="earliest")``: the clock runs from before it connects to the last row at its handler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import orjson
import psycopg
import setting
from rows import Row, fill, rows

import busrep

PAGE = busrep.Settings().page_rows


PAGES = "SELECT id, row FROM busrep_facts WHERE stream = 'rows' AND writer = 'w1' AND id > {} ORDER BY id, idx LIMIT {}"


def bare(store: str) -> int:
    """How many rows there were."""
    connection: Any
    if store.startswith("postgresql"):
        connection, mark = psycopg.connect(store, autocommit=True), "%s"
    else:
        connection, mark = sqlite3.connect(store.removeprefix("sqlite:///")), "?"
    question, last, got = PAGES.format(mark, mark), 0, 0
    while page := connection.execute(question, (last, PAGE)).fetchall():
        found = [Row(*each) for each in orjson.loads(f"[{','.join([text for _, text in page])}]")]
        last, got = page[-1][0], got + len(found)
    connection.close()
    return got


async def caught_up(redis: str, store: str, count: int) -> int:
    """The same, by a reader of the bus."""
    done, got = asyncio.Event(), 0
    async with busrep.connect(redis, name="bench", streams=[rows], store=store, start="earliest") as bus:

        @bus.subscribe(rows)
        def handle(batch: busrep.Batch[Row]) -> None:
            nonlocal got
            got += len(batch.rows)
            if got >= count:
                done.set()

        await done.wait()
    return got


def child(kind: str, redis: str, store: str, count: int) -> float:
    """Seconds."""
    started = time.monotonic()
    got = bare(store) if kind == "bare" else asyncio.run(caught_up(redis, store, count))
    taken = time.monotonic() - started
    if got != count:
        raise SystemExit(f"{kind} got {got} rows of {count}")
    return taken


def measure(**spec: Any) -> float:
    """Rows/s of one run."""
    arguments = [sys.executable, __file__, "--child", json.dumps(spec)]
    count: int = spec["count"]
    return count / float(subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    setting.add_json(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(child(**given.child))
        return
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="busrep-bench-"))
        for title, store in (("PostgreSQL", postgres.url), ("SQLite", f"sqlite:///{folder}/bench.db")):
            asyncio.run(fill(redis.url, store, given.rows))
            rates: dict[str, list[float]] = {"bare": [], "busrep": []}
            for _ in range(given.rounds):
                for kind, those in rates.items():
                    those.append(measure(kind=kind, redis=redis.url, store=store, count=given.rows))
            ratio = median(b / a for a, b in zip(rates["bare"], rates["busrep"], strict=True))
            shown = [f"{kind} {median(those):,.0f} rows/s" for kind, those in rates.items()]
            print(f"{title:12}" + "   ".join(shown) + f"   {ratio:.2f}x", flush=True)
            found[title] = rates
    setting.write(given, found)


if __name__ == "__main__":
    main()
