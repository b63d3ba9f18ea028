"""Rows/s of a reader that catches up over HTTP alone, beside the same reader at the table itself (PostgreSQL).

    python benchmarks/http_catch_up.py [--rows 1000000] [--rounds 3]

The rows are written once, some 120 bytes each as JSON. Then in each round every variant reads all of them from the
oldest on, in turns, each with a fresh reader process; printed are medians over the rounds, and their ratio to the
table. The clock runs from before the reader connects until its handler has the last row. The server of catch-up is
a process of its own and has the database; the reader over HTTP has a Redis and the server's address. The reader's peak
memory is taken when it has a tenth of the rows, and at the end: what lies between is what more rows cost.

``table``      the reader's store is PostgreSQL.
``http``       the reader's store is the server's URL.
``http gzip``  the same, answers compressed: what a link slower than loopback may want.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import setting
from rows import Row, fill, rows

import busrep
from busrep.http.client import HttpOptions
from busrep.http.serve import serve
from busrep.http.server import catch_up_app
from busrep.http.source import HttpSource
from busrep.stores import open_store
from busrep.streams import Registry

SECRET = "benchmark"


async def server(store: str) -> None:
    """Until standard input ends."""
    opened = open_store(store, Registry([rows]))
    await opened.open()
    app = catch_up_app(opened, [rows], secret=SECRET)
    async with serve(app) as serving:
        print(serving.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await opened.close()
    print(json.dumps(app.state.catch_up.statistics()), file=sys.stderr)


def peak() -> float:
    """Most memory that this process has had so far, MiB. (Of Linux: getrusage's counts the parent's before exec.)"""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


async def reader(redis: str, store: str, count: int, compress: bool) -> tuple[float, float, float, float]:
    """Seconds, seconds of this process's own processor time, and its peak memory after a tenth and at the end."""
    done, seen, last, early = asyncio.Event(), 0, -1, 0.0
    source: Any = (
        HttpSource(store, [rows], options=HttpOptions(secret=SECRET, compress=compress))
        if store.startswith("http")
        else store
    )
    started, cpu = time.monotonic(), time.process_time()
    async with busrep.connect(redis, name="bench", streams=[rows], store=source, start="earliest") as bus:

        @bus.subscribe(rows)
        def handle(batch: busrep.Batch[Row]) -> None:
            nonlocal seen, last, early
            assert batch.rows[0].number == last + 1
            seen, last = seen + len(batch.rows), batch.rows[-1].number
            if not early and seen >= count / 10:
                early = peak()
            if seen >= count:
                done.set()

        await done.wait()
        return time.monotonic() - started, time.process_time() - cpu, early, peak()


def start(**spec: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, __file__, "--child", json.dumps(spec)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(redis: str, store: str, count: int, compress: bool) -> tuple[float, ...]:
    """Rows/s, rows per second of the reader's processor time, and its two peaks of memory, MiB."""
    with start(role="reader", redis=redis, store=store, count=count, compress=compress) as child:
        taken, cpu, *peaks = json.loads(child.communicate()[0])
    return count / taken, count / cpu, *peaks


def run_child(role: str, **spec: Any) -> None:
    if role == "server":
        asyncio.run(server(**spec))
    else:
        print(json.dumps(asyncio.run(reader(**spec))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(**options.child)
        return
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack)
        asyncio.run(fill(redis.url, postgres.url, options.rows))
        child = stack.enter_context(start(role="server", store=postgres.url))
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        variants = {"table": (postgres.url, False), "http": (url, False), "http gzip": (url, True)}
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in variants}
        for number in range(options.rounds):
            for name, (store, compress) in variants.items():
                found[name].append(measure(redis.url, store, options.rows, compress))
                print(f"round {number + 1}: {name:10} {found[name][-1][0]:>12,.0f} rows/s", file=sys.stderr)
        child.communicate()  # ends its input, and so the server
    medians = {name: [statistics.median(one) for one in zip(*results, strict=True)] for name, results in found.items()}
    print(f"{options.rows:,} rows, medians of {options.rounds}; of the reader's processor time in brackets")
    for name, (rate, of_cpu, early, late) in medians.items():
        ratio, cpu_ratio = rate / medians["table"][0], of_cpu / medians["table"][1]
        memory = f"peak {early:.0f} MiB after a tenth, {late:.0f} MiB at the end"
        print(f"{name:10} {rate:>10,.0f} rows/s {ratio:5.2f}x   ({of_cpu:>10,.0f} rows/s {cpu_ratio:5.2f}x)   {memory}")


if __name__ == "__main__":
    main()
