"""How long after a fact was begun its row is in the reader's hands, at a fixed rate, beside INSERT and then PUBLISH.

    python benchmarks/latency.py [--rates 100,1000] [--seconds 10] [--rounds 3] [--json FILE]

One writer process and one reader process on a real Redis and a PostgreSQL with fsync. A fact is due at fixed times,
whether or not the one before has ended, and its delay counts from when it was *due*: a writer that cannot keep up shows
that in its delays. The row carries the time; both processes read one machine's monotonic clock. Contenders take turns,
each round with fresh processes.

``bare``     INSERT ... by psycopg with autocommit on one of eight connections, then PUBLISH by redis-py; the reader is
             ``pubsub.listen()`` and one ``orjson.loads`` a message.
``busrep``   ``async with bus.write(stream) as fact``; the reader is a handler of ``bus.subscribe``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import orjson
import psycopg
import redis.asyncio
import setting
from rows import make_tables

import busrep

CONNECTIONS = 8
WARM_UP = 1.0  # seconds of each run whose facts are not counted


@attrs.define
class Row:
    due: float
    text: str


rows = busrep.Stream("rows", Row)
TEXT = "x" * 84


async def at_rate(write: Callable[[float], Awaitable[None]], rate: float, seconds: float) -> None:
    """Call ``write`` with each due time, without waiting for the one before."""
    started, tasks = time.monotonic(), set()
    for number in range(int(rate * (seconds + WARM_UP))):
        due = started + number / rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(write(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def bare_writer(url: str, store: str, name: str, rate: float, seconds: float) -> None:
    client, free = redis.asyncio.Redis.from_url(url), asyncio.Queue[psycopg.AsyncConnection[Any]]()
    connections = [await psycopg.AsyncConnection.connect(store, autocommit=True) for _ in range(CONNECTIONS)]
    for connection in connections:
        free.put_nowait(connection)

    async def write(due: float) -> None:
        connection, payload = await free.get(), orjson.dumps([due, TEXT])
        await connection.execute("INSERT INTO bare (row) VALUES (%s)", (payload.decode(),))
        free.put_nowait(connection)
        await client.publish(name, payload)

    await at_rate(write, rate, seconds)
    for connection in connections:
        await connection.close()
    await client.aclose()


async def bare_reader(url: str, name: str, count: int) -> list[tuple[float, float]]:
    client, found = redis.asyncio.Redis.from_url(url), []
    pubsub = client.pubsub()
    await pubsub.subscribe(name)
    async for message in pubsub.listen():
        if message["type"] == "subscribe":
            print("ready", flush=True)
            continue
        due, _ = orjson.loads(message["data"])
        found.append((due, time.monotonic() - due))
        if len(found) == count:
            break
    await pubsub.aclose()
    await client.aclose()
    return found


async def bus_writer(url: str, store: str, name: str, rate: float, seconds: float) -> None:
    async with busrep.connect(url, name=name, streams=[rows], store=store, writer="w1") as bus:

        async def write(due: float) -> None:
            async with bus.write(rows) as fact:
                fact.add(Row(due, TEXT))

        await at_rate(write, rate, seconds)


async def bus_reader(url: str, store: str, name: str, count: int) -> list[tuple[float, float]]:
    done, found = asyncio.Event(), []
    async with busrep.connect(url, name=name, streams=[rows], store=store) as bus:

        @bus.subscribe(rows)
        def handle(batch: busrep.Batch[Row]) -> None:
            now = time.monotonic()
            found.extend((row.due, now - row.due) for row in batch.rows)
            if len(found) >= count:
                done.set()

        while not bus.statistics()["link"]["connected"] or "rows" not in bus.reading.core.followed:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await done.wait()
    return found


def child(role: str, kind: str, url: str, store: str, name: str, rate: float, seconds: float) -> None:
    if role == "writer":
        asyncio.run((bare_writer if kind == "bare" else bus_writer)(url, store, name, rate, seconds))
        return
    count = int(rate * (seconds + WARM_UP))
    found = asyncio.run(bare_reader(url, name, count) if kind == "bare" else bus_reader(url, store, name, count))
    first = min(due for due, _ in found) + WARM_UP
    print(json.dumps([delay for due, delay in found if due >= first]))


def run(**spec: Any) -> list[float]:
    """The delays of one run, seconds."""

    def start(role: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, __file__, "--child", json.dumps({"role": role, **spec})]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    with start("reader") as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "ready"
        with start("writer") as writer:
            writer.wait()
        delays: list[float] = json.loads(reader.stdout.read())
    return delays


async def make_all_tables(store: str) -> None:
    await make_tables(store, rows)
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as connection:
        await connection.execute("CREATE TABLE bare (id bigserial PRIMARY KEY, row text NOT NULL)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [*map(float, text.split(","))], default=[100.0, 1000.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    setting.add_json(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(**given.child)
        return
    delays: dict[str, dict[str, list[list[float]]]] = {}
    with contextlib.ExitStack() as stack:
        server, postgres = setting.servers(stack)
        asyncio.run(make_all_tables(postgres.url))
        for rate in given.rates:
            for number in range(given.rounds):
                for kind in ("bare", "busrep"):
                    spec = {"kind": kind, "url": server.url, "store": postgres.url, "name": f"{kind}-{rate}-{number}"}
                    found = run(**spec, rate=rate, seconds=given.seconds)
                    delays.setdefault(f"{rate:g} facts/s", {}).setdefault(kind, []).append(found)
    print("delay from due to handler, ms; medians of the rounds")
    for title, contenders in delays.items():
        for kind, runs in contenders.items():
            cuts = setting.percentiles(runs)
            longest = 1000 * max(map(max, runs))
            print(f"{title + ', ' + kind:24} p50 {cuts[49]:9.2f}   p99 {cuts[98]:9.2f}   longest {longest:9.2f}")
    setting.write(given, delays)


if __name__ == "__main__":
    main()
