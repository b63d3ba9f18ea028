"""Rows/s from one writer process to one reader process on a real Redis, beside plain redis-py pub/sub.

    python benchmarks/throughput.py [--rows 200000] [--rounds 5]

One round runs every variant once, in turns, each with a fresh writer and a fresh reader process; printed are medians
over the rounds, and their ratio to the first variant. A row is ["w1", i, text, float, bool], some 120 bytes as JSON.
The clock runs from just before the first row is written until the last is in the reader's hands.

``plain``      redis.asyncio with hiredis: one row a message, PUBLISH pipelined by 500; the reader is
               ``pubsub.listen()`` and one ``orjson.loads`` a message. Loses what it loses.
``memory``     busrep without a table (a resettable stream), ``bus.publish`` by 500, typed rows at the handler.
``sqlite``     busrep with its table in SQLite: 500 facts a transaction.
``postgres``   busrep with its table in PostgreSQL: 500 facts a transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import attrs
import orjson
import redis.asyncio

import busrep
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.servers import start_postgres, start_redis

BULK = 500
TEXT = "x" * 84


@attrs.define
class Row:
    writer: str
    number: int
    text: str
    amount: float
    flag: bool


def stream_of(variant: str) -> busrep.Stream[Row]:
    return busrep.Stream("rows", Row, resettable=variant == "memory")


def row(number: int) -> Row:
    return Row("w1", number, TEXT, number / 7, number % 2 == 0)


async def plain_writer(url: str, name: str, rows: int) -> float:
    client = redis.asyncio.Redis.from_url(url)
    started = time.monotonic()
    for start in range(0, rows, BULK):
        async with client.pipeline(transaction=False) as pipe:
            for number in range(start, start + BULK):
                pipe.publish(name, orjson.dumps(attrs.astuple(row(number))))
            await pipe.execute()
    await client.aclose()
    return started


async def plain_reader(url: str, name: str, rows: int) -> float:
    client = redis.asyncio.Redis.from_url(url)
    pubsub = client.pubsub()
    await pubsub.subscribe(name)
    got = 0
    async for message in pubsub.listen():
        if message["type"] == "subscribe":
            print("ready", flush=True)
            continue
        orjson.loads(message["data"])
        got += 1
        if got == rows:
            break
    ended = time.monotonic()
    await pubsub.aclose()
    await client.aclose()
    return ended


async def bus_writer(url: str, name: str, rows: int, variant: str, store: str | None) -> float:
    stream = stream_of(variant)
    async with busrep.connect(url, name=name, streams=[stream], store=store, writer="w1") as bus:
        started = time.monotonic()
        for start in range(0, rows, BULK):
            await bus.publish(stream, [row(number) for number in range(start, start + BULK)])
    return started


async def bus_reader(url: str, name: str, rows: int, variant: str, store: str | None) -> float:
    stream = stream_of(variant)
    done = asyncio.Event()
    got = 0
    async with busrep.connect(url, name=name, streams=[stream], store=store) as bus:

        @bus.subscribe(stream)
        def handle(batch: busrep.Batch[Row]) -> None:
            nonlocal got
            got += len(batch.rows)
            if got >= rows:
                done.set()

        while not bus.statistics()["link"]["connected"] or "rows" not in bus.reading.core.followed:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await done.wait()
        ended = time.monotonic()
        reader = bus.statistics()["reader"]
        print(f"gaps {reader['gaps_found']} missed {reader['missed']}", file=sys.stderr)
    return ended


def child(role: str, url: str, name: str, rows: int, variant: str, store: str | None) -> float:
    if variant == "plain":
        return asyncio.run((plain_writer if role == "writer" else plain_reader)(url, name, rows))
    return asyncio.run((bus_writer if role == "writer" else bus_reader)(url, name, rows, variant, store))


def measure(url: str, rows: int, variant: str, store: str | None, number: int) -> float:
    """Rows/s of one run."""
    spec = {"url": url, "name": f"bench-{variant}-{number}", "rows": rows, "variant": variant, "store": store}

    def start(role: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, __file__, "--child", json.dumps({"role": role, **spec})]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    with start("reader") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "ready"
        with start("writer") as writer:
            assert writer.stdout is not None
            started = float(writer.stdout.read())
        ended = float(reader.stdout.read())
    return rows / (ended - started)


async def make_tables(store: str) -> None:
    opened = open_store(store, Registry([stream_of("store")]))
    await opened.init()
    await opened.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(repr(child(**options.child)))
        return
    found: dict[str, list[float]] = {"plain": [], "memory": [], "sqlite": [], "postgres": []}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_redis())
        postgres = stack.enter_context(start_postgres())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stores: dict[str, Any] = {"sqlite": f"sqlite:///{folder}/bench.db", "postgres": postgres.url}
        for store in stores.values():
            asyncio.run(make_tables(store))
        for number in range(options.rounds):
            for variant, results in found.items():
                results.append(measure(server.url, options.rows, variant, stores.get(variant), number))
                print(f"round {number + 1}: {variant:10} {results[-1]:>12,.0f} rows/s", file=sys.stderr)
    base = statistics.median(found["plain"])
    print(f"{options.rows:,} rows, medians of {options.rounds}")
    for variant, results in found.items():
        median = statistics.median(results)
        spread = f"({min(results):,.0f} to {max(results):,.0f})"
        print(f"{variant:10} {median:>12,.0f} rows/s  {median / base:5.1f}x   {spread}")


if __name__ == "__main__":
    main()
