"""What a deployment costs in which nothing happens.

    python benchmarks/idle.py [--streams 100] [--writers 20] [--readers 2] [--seconds 30] [--model] [--json FILE]

Every writer and every reader is a process of its own, with the default settings, on a real Redis and a PostgreSQL (15
or later) with fsync. Each writer has written one fact to each stream; each reader, which saves its positions, has
handled them. Then nobody does anything, and after ``--settle`` seconds, in which connections are closed that nobody
needs (one in half a minute), the clock runs for ``--seconds``. Printed, per second: processor time of all processes and
of both servers, in cores; rows that the database updated, WAL that it wrote, transactions; messages on Redis and their
deliveries. And how many connections PostgreSQL has.

``--model`` measures 20 and 60 writers of 10 streams, too, and goes on from them to 1,000 writers that are 1,000
processes: messages that Redis delivers a second, processor time of one process and of PostgreSQL. What a process does
for each message that it hears, and for each pair in the registry, grows with the number of writers, and so does what
PostgreSQL does for each writer's beat: straight lines through the two points.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import psycopg
import redis
import setting

import busrep
from busrep.stores import open_store
from busrep.streams import Registry

FEW, MANY, MODEL = 20, 60, 1_000  # writers: of the two that are measured for the model, and of the model
TICKS = os.sysconf("SC_CLK_TCK")


def streams_of(count: int) -> list[busrep.Stream[Any]]:
    return [busrep.Stream(f"stream{number}") for number in range(count)]


async def child(role: str, name: str, url: str, store: str, streams: int, writers: int) -> None:
    """A writer or a reader, until standard input ends. Says when it has done its work."""
    made = streams_of(streams)
    mine = {"writer": name} if role == "writer" else {"reader": name, "start": "earliest"}
    async with busrep.connect(url, name="idle", streams=made, store=store, **mine) as bus:
        if role == "writer":
            for stream in made:
                await bus.publish(stream, [[name]])
        else:
            got, done = 0, asyncio.Event()

            def handle(batch: busrep.Batch[Any]) -> None:
                nonlocal got
                got += len(batch.rows)
                if got == streams * writers:
                    done.set()

            for stream in made:
                bus.subscribe(stream)(handle)
            await done.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def processor(pids: Sequence[int]) -> float:
    """Seconds that these processes, and those that they waited for, have had so far.

    Of threads that run the scheduler knows nanoseconds (Linux, Documentation/scheduler/sched-stats.rst). In stat they
    are rounded down to ticks of 10 ms, which is more than a process at rest has in a second.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            waited = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15])
            threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
            total += sum(waited) / TICKS + sum(int(one.read_text().split()[0]) for one in threads) / 1e9
    return total


@attrs.frozen
class Costs:
    """Counters at one moment, or what came between two."""

    bus: float
    postgres: float
    redis: float
    updated: float
    transactions: float
    wal: float
    published: float
    delivered: float

    def since(self, before: Costs, seconds: float) -> Costs:
        """Of each second between the two."""
        mine, theirs = attrs.astuple(self), attrs.astuple(before)
        return Costs(*[(now - then) / seconds for now, then in zip(mine, theirs, strict=True)])


class Watch:
    def __init__(self, buses: list[int], postgres: int, server: int, connection: Any, client: redis.Redis) -> None:
        self.buses, self.postgres, self.redis = buses, postgres, server
        self.connection, self.client = connection, client

    def look(self) -> Costs:
        self.connection.execute("SELECT pg_stat_force_next_flush()")
        updated, transactions, wal = self.connection.execute(
            "SELECT tup_updated, xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0') FROM pg_stat_database "
            "WHERE datname = current_database()"
        ).fetchone()
        commands = self.client.info("commandstats")
        return Costs(
            processor(self.buses), processor([self.postgres, *children_of(self.postgres)]), processor([self.redis]),
            updated, transactions, float(wal), commands.get("cmdstat_publish", {"calls": 0})["calls"],
            self.client.info("stats").get("total_net_output_bytes", 0),
        )  # fmt: skip


def run(streams: int, writers: int, readers: int, given: argparse.Namespace) -> dict[str, float]:
    """What such a deployment costs, by name."""
    with contextlib.ExitStack() as stack:
        server, postgres = setting.servers(stack, max_connections="300")
        asyncio.run(open_store(postgres.url, Registry(streams_of(streams))).init())
        client = stack.enter_context(redis.Redis.from_url(server.url, decode_responses=True))
        connection = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        spec = {"url": server.url, "store": postgres.url, "streams": streams, "writers": writers}
        children = []
        for role, count in (("writer", writers), ("reader", readers)):
            for number in range(count):
                arguments = json.dumps({"role": role, "name": f"{role}{number}", **spec})
                children.append(
                    stack.enter_context(
                        subprocess.Popen(
                            [sys.executable, __file__, "--child", arguments],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                        )
                    )
                )  # fmt: skip
        for one in children:
            assert one.stdout is not None
            assert one.stdout.readline().strip() == "ready"
        time.sleep(given.settle)
        watch = Watch([one.pid for one in children], postgres.process.pid, server.process.pid, connection, client)
        before, started = watch.look(), time.monotonic()
        time.sleep(given.seconds)
        costs = watch.look().since(before, time.monotonic() - started)
        (connections,) = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        ).fetchone()
        print(f"{streams} streams, {writers} writers, {readers} readers, nothing to do; per second:")
        shares = f"{costs.bus:.1%} of a core in busrep, {costs.postgres:.1%} PostgreSQL, {costs.redis:.1%} Redis"
        print(f"processor    {shares}")
        print(
            f"PostgreSQL   {costs.updated:,.0f} rows updated, {costs.transactions:,.0f} transactions, "
            f"{costs.wal / 1024:,.1f} KiB of WAL; {connections} connections"
        )
        print(f"Redis        {costs.published:,.1f} PUBLISH, {costs.delivered / 1024:,.1f} KiB sent to subscribers")
        for one in children:
            one.communicate()
    return {**attrs.asdict(costs), "connections": connections}


def modelled(few: dict[str, float], many: dict[str, float]) -> dict[str, float]:
    """1,000 writers of 10 streams, from what `FEW` and `MANY` of them cost."""

    def at(figure: Callable[[dict[str, float]], float], of: Callable[[int], int]) -> float:
        """The figure of one process or writer of 1,000; ``of``: how many of them share the measured one. It grows on in
        proportion from many, as it grew from few. It does not fall on: fixed costs, shared by more, make it fall."""
        low, high = figure(few) / of(FEW), figure(many) / of(MANY)
        return high + max(0.0, high - low) / (MANY - FEW) * (MODEL - MANY)

    return {
        "deliveries": many["published"] / MANY * MODEL * MODEL,
        "process": at(lambda one: one["bus"], lambda writers: writers + 1),
        "postgres": MODEL * at(lambda one: one["postgres"], lambda writers: writers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--writers", type=int, default=20)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--settle", type=float, default=135.0, help="seconds before the clock runs")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--model", action="store_true", help="1,000 writers, by two measured deployments more")
    setting.add_json(parser)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        asyncio.run(child(**given.child))
        return
    figures = {"nothing to do": run(given.streams, given.writers, given.readers, given)}
    if given.model:
        few, many = (run(10, writers, 1, given) for writers in (FEW, MANY))
        model = figures["1,000 writers of 10 streams"] = modelled(few, many)
        print(
            f"1,000 writers of 10 streams, by these: {model['deliveries']:,.0f} messages delivered/s, "
            f"{model['process']:.1%} of a core a process, {model['postgres']:.1f} cores of PostgreSQL"
        )
    setting.write(given, {title: {name: [one] for name, one in found.items()} for title, found in figures.items()})


if __name__ == "__main__":
    main()
