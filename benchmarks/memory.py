"""A reader whose handler sleeps while a writer goes on: its memory stays bounded, and it catches up afterwards.

    python benchmarks/memory.py [--seconds 60]

Writer and reader are processes of their own on a real Redis and an SQLite table. Printed as JSON: rows written, the
growth of the reader's resident memory while it slept (bytes) beside the sum of its configured bounds
(``receive_queue_bytes`` + ``held_bytes`` + what ``fetches`` pages may hold), and what it handled in the end.
Exit 1 if the growth is over the sum, or a row is missing, doubled or out of order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.servers import start_redis

ROW_BYTES, BULK, PAUSE = 200, 200, 0.02
SETTINGS = busrep.Settings(receive_queue_bytes=8 * 2**20, held_bytes=2 * 2**20)
# What a row of a page costs while it is fetched: its text in the driver's rows and once more as payload.
PAGE_BYTES = SETTINGS.fetches * SETTINGS.page_rows * (3 * ROW_BYTES + 400)
LEAST = 3 * SETTINGS.receive_queue_bytes // ROW_BYTES // 2
SETTLE = 2.0  # seconds for the last lines to come in
BOUND = SETTINGS.receive_queue_bytes + SETTINGS.held_bytes + PAGE_BYTES

rows = busrep.Stream("rows")


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def write(url: str, store: str, seconds: float) -> None:
    """Writes for so long, and until the reader's queue must have overflown; prints how many rows."""
    number, text = 0, "x" * (ROW_BYTES - 20)
    async with busrep.connect(url, name="memory", streams=[rows], store=store, writer="w1") as bus:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or number < LEAST:
            await bus.publish(rows, [[number + i, text] for i in range(BULK)])
            number += BULK
            await asyncio.sleep(PAUSE)
    print(number)


async def read(url: str, store: str) -> None:
    """Sleeps in the handler until all is written, then handles; prints what happened."""
    seen: list[int] = []
    peak = 0
    total = asyncio.get_running_loop().create_future()
    awake = asyncio.Event()

    async with busrep.connect(
        url, name="memory", streams=[rows], store=store, settings=SETTINGS, start="earliest"
    ) as bus:
        base = resident()

        @bus.subscribe(rows)
        async def handle(batch: busrep.Batch[Any]) -> None:
            await awake.wait()
            seen.extend(row[0] for row in batch.rows)

        async def watch() -> None:
            nonlocal peak
            while not awake.is_set():
                peak = max(peak, resident() - base)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        print("ready", flush=True)
        asyncio.get_running_loop().add_reader(sys.stdin, lambda: total.done() or total.set_result(sys.stdin.readline()))
        expected = int(await total)
        asyncio.get_running_loop().remove_reader(sys.stdin)
        await asyncio.sleep(SETTLE)
        awake.set()
        await watching
        woke = time.monotonic()
        while len(seen) < expected and time.monotonic() < woke + 300:
            await asyncio.sleep(0.05)
        found = bus.statistics()["reader"]
        print(
            json.dumps({
                "rows": expected,
                "handled": len(seen),
                "in_order": seen == list(range(expected)),
                "resident_growth": peak,
                "bound": BOUND,
                "queue_bytes_peak": found["queue_bytes_peak"],
                "overflows": found["overflows"],
                "rows_fetched": found["rows_fetched"],
                "catch_up_seconds": round(time.monotonic() - woke, 2),
            })
        )  # fmt: skip


async def make_tables(store: str) -> None:
    opened = open_store(store, Registry([rows]))
    await opened.init()
    await opened.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        role, url, store = options.child
        asyncio.run(write(url, store, options.seconds) if role == "write" else read(url, store))
        return 0
    with start_redis() as server, tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/memory.db"
        asyncio.run(make_tables(store))

        def child(role: str) -> subprocess.Popen[str]:
            seconds = str(options.seconds)
            arguments = [sys.executable, __file__, "--seconds", seconds, "--child", role, server.url, store]
            return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        with child("read") as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            with child("write") as writer:
                written = writer.communicate()[0]
            report = json.loads(reader.communicate(written)[0])
    print(json.dumps(report, indent=2))
    return 0 if report["in_order"] and report["resident_growth"] <= report["bound"] else 1


if __name__ == "__main__":
    sys.exit(main())
