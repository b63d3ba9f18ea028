"""Rows/s from one writer process to one reader process on a real Redis, beside plain redis-py pub/sub.

    python benchmarks/throughput.py [--rows 200000] [--rounds 5] [--json FILE]

One round runs every variant once, in turns, each with a fresh writer and a fresh reader process; printed are medians
over the rounds, and their ratio to the first variant. A row is ["w1", i, text, float, bool], some 120 bytes as JSON.
The clock runs from just before the first row is written until the last is in the reader's hands.

``plain``      redis.asyncio with hiredis: one row a message, PUBLISH pipelined by 500; the reader is
               ``pubsub.listen()`` and one ``orjson.loads`` a message. Loses what it loses.
``framed``     the same with a JSON array of 100 rows a message.
``raw``        an ``asyncio.Protocol`` with hiredis' parser and a JSON array of 500 rows a message: the limit.
``memory``     busrep without a table (a resettable stream), ``bus.publish`` by 500, typed rows at the handler.
``uvloop``     the same on uvloop.
``sqlite``     busrep with its table in SQLite: 500 facts a transaction.
``postgres``   busrep with its table in PostgreSQL, with fsync: 500 facts a transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import attrs
import hiredis
import orjson
import redis.asyncio
import setting
import uvloop
from rows import Row, make_tables, row

import busrep

BULK = 500
SIZES = {"plain": 1, "framed": 100}  # rows a message


def stream_of(variant: str) -> busrep.Stream[Row]:
    return busrep.Stream("rows", Row, resettable=variant == "memory")


def payloads(rows: int, size: int) -> Iterator[bytes]:
    """Messages of ``size`` rows: one row, or an array of them."""
    for start in range(0, rows, size):
        found = [attrs.astuple(row(number)) for number in range(start, start + size)]
        yield orjson.dumps(found[0] if size == 1 else found)


async def plain_writer(url: str, name: str, rows: int, size: int) -> float:
    client = redis.asyncio.Redis.from_url(url)
    await client.ping()  # connected before the clock starts, as busrep is
    started, messages = time.monotonic(), payloads(rows, size)
    while some := [*itertools.islice(messages, max(1, BULK // size))]:
        async with client.pipeline(transaction=False) as pipe:
            for message in some:
                pipe.publish(name, message)
            await pipe.execute()
    await client.aclose()
    return started


async def plain_reader(url: str, name: str, rows: int, size: int) -> float:
    client = redis.asyncio.Redis.from_url(url)
    pubsub = client.pubsub()
    await pubsub.subscribe(name)
    got = 0
    async for message in pubsub.listen():
        if message["type"] == "subscribe":
            print("ready", flush=True)
            continue
        found = orjson.loads(message["data"])
        got += 1 if size == 1 else len(found)
        if got >= rows:
            break
    ended = time.monotonic()
    await pubsub.aclose()
    await client.aclose()
    return ended


def command(*words: bytes) -> bytes:
    """A Redis command as it goes over the wire."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


async def raw_writer(url: str, name: str, rows: int) -> float:
    reader, writer = await asyncio.open_connection(*address_of(url))
    answers, parser, sent = 0, hiredis.Reader(), 0
    started = time.monotonic()
    for message in payloads(rows, BULK):
        writer.write(command(b"PUBLISH", name.encode(), message))
        await writer.drain()
        sent += 1
    while answers < sent:
        parser.feed(await reader.read(65_536))
        while parser.gets() is not False:
            answers += 1
    writer.close()
    return started


class RawReader(asyncio.Protocol):
    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows, self.got = name, rows, 0
        self.parser, self.done = hiredis.Reader(), asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(command(b"SUBSCRIBE", self.name.encode()))

    def data_received(self, data: bytes) -> None:
        self.parser.feed(data)
        while (message := self.parser.gets()) is not False:
            if message[0] == b"subscribe":
                print("ready", flush=True)
                continue
            self.got += len(orjson.loads(message[2]))
            if self.got >= self.rows and not self.done.done():
                self.done.set_result(time.monotonic())


async def raw_reader(url: str, name: str, rows: int) -> float:
    transport, protocol = await asyncio.get_running_loop().create_connection(
        lambda: RawReader(name, rows), *address_of(url)
    )
    ended: float = await protocol.done
    transport.close()
    return ended


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return parts.hostname, parts.port or 6379


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
    if variant == "raw":
        return asyncio.run((raw_writer if role == "writer" else raw_reader)(url, name, rows))
    if variant == "uvloop":
        return uvloop.run((bus_writer if role == "writer" else bus_reader)(url, name, rows, "memory", None))
    if variant in SIZES:
        return asyncio.run((plain_writer if role == "writer" else plain_reader)(url, name, rows, SIZES[variant]))
    return asyncio.run((bus_writer if role == "writer" else bus_reader)(url, name, rows, variant, store))


def measure(url: str, rows: int, variant: str, store: str | None, number: int, readers: int = 1) -> float:
    """Rows/s of one run, until the last reader has the last row."""
    name = f"bench-{variant}-{readers}-{number}"
    spec = {"url": url, "name": name, "rows": rows, "variant": variant, "store": store}

    def start(role: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, __file__, "--child", json.dumps({"role": role, **spec})]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as stack:
        reading = [stack.enter_context(start("reader")) for _ in range(readers)]
        for reader in reading:
            assert reader.stdout is not None
            assert reader.stdout.readline().strip() == "ready"
        with start("writer") as writer:
            assert writer.stdout is not None
            started = float(writer.stdout.read())
        ended = max(float(reader.stdout.read()) for reader in reading if reader.stdout is not None)
    return rows / (ended - started)


def servers(stack: contextlib.ExitStack) -> tuple[str, dict[str, str]]:
    """Start what the variants need, until the stack ends: the URL of the Redis, and of the store of each variant."""
    server, postgres = setting.servers(stack)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="busrep-bench-"))
    stores = {"sqlite": f"sqlite:///{folder}/bench.db", "postgres": postgres.url}
    for store in stores.values():
        asyncio.run(make_tables(store, stream_of("store")))
    return server.url, stores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    setting.add_json(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(repr(child(**options.child)))
        return
    variants = ("plain", "framed", "raw", "memory", "uvloop", "sqlite", "postgres")
    found: dict[str, list[float]] = {variant: [] for variant in variants}
    with contextlib.ExitStack() as stack:
        server, stores = servers(stack)
        for number in range(options.rounds):
            for variant, results in found.items():
                results.append(measure(server, options.rows, variant, stores.get(variant), number))
                print(f"round {number + 1}: {variant:10} {results[-1]:>12,.0f} rows/s", file=sys.stderr)
    base = statistics.median(found["plain"])
    print(f"{options.rows:,} rows, medians of {options.rounds}")
    for variant, results in found.items():
        median = statistics.median(results)
        spread = f"({min(results):,.0f} to {max(results):,.0f})"
        print(f"{variant:10} {median:>12,.0f} rows/s  {median / base:5.1f}x   {spread}")
    setting.write(options, {"live": found})


if __name__ == "__main__":
    main()
