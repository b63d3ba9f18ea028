"""From commit to Parquet: how long a fact takes into the archive while the job follows its stream.

    python benchmarks/spark_latency.py [--rate 500] [--seconds 60] [--every 0] [--master local[2]]

A PostgreSQL with fsync, a Redis, a writer process that commits facts at a fixed rate, one a transaction, and ``busrep
pipeline archive`` that hears of them from the bus. A fact counts as archived when the manifest that has it is there:
its file is written and synced then. The latency is from the moment at which the writer's commit returned to that
moment, both by this machine's clock; manifests are looked for every 5 ms. Facts of the first ``--warm-up`` seconds,
in which Spark's first batches run, do not count. Prints p50, p90, p99 and the longest, seconds, the batches, and rows
that were archived twice or not at all (none).
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import setting

import busrep
from busrep.spark.archive_rows import read_rows
from busrep.spark.archive_store import Root, load
from busrep.stores import open_store
from busrep.streams import Registry

NAME, WRITER = "latency", "w1"
facts: busrep.Stream[Any] = busrep.Stream("facts")
LOOK = 0.005


async def write(redis: str, store: str, rate: float, log: str) -> None:
    """Commits until standard input ends; then writes [[token, when]], in order."""
    times: list[tuple[int, float]] = []
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stopped.set)
    async with busrep.connect(redis, name=NAME, streams=[facts], store=store, writer=WRITER) as bus:
        due = time.monotonic()
        while not stopped.is_set():
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            async with bus.write(facts) as fact:
                fact.add([len(times), "x" * 80])
            times.append((fact.id, time.time()))
    Path(log).write_text(json.dumps(times))  # noqa: ASYNC240 - the bus is closed


def seen(folder: Path, known: set[str]) -> Iterator[tuple[int, float]]:
    """(position, when) of manifests that have come."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.endswith(".json") and entry.name != "archive.json" and entry.name not in known:
                known.add(entry.name)
                yield json.loads(Path(entry.path).read_text())["upto"].get(WRITER, 0), time.time()


def follow(options: argparse.Namespace, redis: str, store: str, folder: Path) -> tuple[list[Any], list[Any], float]:
    """What the writer committed when, which position was archived when, and when it began to count."""
    spec = json.dumps({"redis": redis, "store": store, "rate": options.rate, "log": str(folder / "log")})
    job = [sys.executable, "-m", "busrep.cli", "pipeline", "archive", "--master", options.master]
    job += ["--stream", facts.name, "--archive", str(folder / "archive"), "--every", f"{options.every}s"]
    job += ["--redis", redis, "--name", NAME]
    known: set[str] = set()
    archived: list[tuple[int, float]] = []
    manifests = folder / "archive" / "_busrep" / facts.name
    with (folder / "job.log").open("wb") as said:
        archiving = subprocess.Popen(job, stdout=said, stderr=said, env={**os.environ, "BUSREP_STORE": store})
        writing = subprocess.Popen([sys.executable, __file__, "--child", spec], stdin=subprocess.PIPE)
        try:
            began = counts = None
            until = time.monotonic() + 300
            while began is None or time.monotonic() < until:
                archived += seen(manifests, known)
                if archived and began is None:
                    began = time.monotonic()
                    until, counts = began + options.warm_up + options.seconds, time.time() + options.warm_up
                if archiving.poll() is not None or (began is None and time.monotonic() > until):
                    raise SystemExit((folder / "job.log").read_text())
                time.sleep(LOOK)
            writing.communicate()
            times = json.loads((folder / "log").read_text())
            late = time.monotonic() + 60
            while archived[-1][0] < times[-1][0] and time.monotonic() < late:
                archived += seen(manifests, known)
                time.sleep(LOOK)
        finally:
            archiving.send_signal(signal.SIGINT)
            archiving.wait()
            writing.kill()
            writing.wait()
    assert counts is not None
    return times, archived, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="facts a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="that count")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds after the first batch")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between batches; 0: as soon as there is one")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        asyncio.run(write(**json.loads(options.child)))
        return 0
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="busrep-bench-")))
        asyncio.run(open_store(postgres.url, Registry([facts])).init())
        times, archived, counts = follow(options, redis.url, postgres.url, folder)
        root = Root(str(folder / "archive"))
        batches = read_rows(root, load(root, facts.name), ["token"])
        tokens = [token for batch in batches for token in batch.column("token").to_pylist()]
    positions = [position for position, _ in archived]
    found = []
    for token, when in times:
        at = bisect.bisect_left(positions, token)
        if when >= counts and at < len(archived):
            found.append(archived[at][1] - when)
    found.sort()
    lost = len({token for token, _ in times} - set(tokens))
    print(
        json.dumps(
            {
                "facts": len(times), "counted": len(found), "batches": len(archived), "rate": options.rate,
                "every": options.every, "master": options.master, "lost": lost, "twice": len(tokens) - len(set(tokens)),
                **{f"p{percent}": round(found[len(found) * percent // 100], 3) for percent in (50, 90, 99)},
                "longest": round(found[-1], 3),
            },
            indent=1,
        )
    )  # fmt: skip
    return 0 if lost == 0 and len(tokens) == len(set(tokens)) else 1


if __name__ == "__main__":
    sys.exit(main())
