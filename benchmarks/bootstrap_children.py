"""The processes of benchmarks/bootstrap.py: what the table holds, the writers, and the reader that bootstraps."""

from __future__ import annotations

import array
import asyncio
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import orjson
import psycopg

import busrep
from busrep.stores import open_store
from busrep.streams import Registry

READER, TEXT = "mirror", "x" * 84
# Seconds that a writer may be behind its schedule; then it lets go of what it should have written.
LATEST = 1.0
# Facts of the table are of these two, half each, which nobody is any more; the writers of the run have other names.
BEFORE = ("old-1", "old-2")


@attrs.frozen
class Row:
    writer: str
    number: int
    text: str
    amount: float
    flag: bool


rows = busrep.Stream("rows", Row)


def fields(row: Row) -> list[Any]:
    return [row.writer, row.number, row.text, row.amount, row.flag]


# -- the table -------------------------------------------------------------------------------------------------------


async def make_table(store: str, count: int) -> None:
    """COPY in what writers wrote long ago, then let a writer of each name claim it, which proves their positions."""
    opened = open_store(store, Registry([rows]))
    await opened.init()
    with psycopg.connect(store, autocommit=True) as connection:
        with connection.cursor().copy("COPY busrep_facts (stream, writer, id, idx, row) FROM STDIN") as copy:
            for token in range(1, count + 1):
                who = BEFORE[token % 2]
                row = orjson.dumps([who, token, TEXT, token / 7, token % 2 == 0])
                copy.write_row(("rows", who, token, 0, row.decode()))
        connection.execute("SELECT setval('busrep_seq_rows', %s)", [count])
        # As a table that has been there for a while: nobody's first read marks its rows as committed.
        connection.execute("VACUUM (FREEZE, ANALYZE) busrep_facts")
        connection.execute("CHECKPOINT")
    await opened.open()
    for who in BEFORE:
        claim = await opened.claim(who, ["rows"], timeout=10)
        await opened.finish(who, claim.incarnation, timeout=10)
    await opened.close()


# -- processes -------------------------------------------------------------------------------------------------------


async def write(redis: str, store: str, writer: str, rate: float, batch: int, seconds: float, report: str) -> None:
    """Commits ``rate`` facts a second, ``batch`` a transaction, until standard input ends; then writes its times."""
    # Made before the first commit, and touched: what is measured must not grow by being measured.
    most = int(seconds * rate / batch)
    times = [array.array("d", [0.5]) * most for _ in range(3)]
    due_times, starts, ends = times
    done = 0
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, stopped.set)
    async with busrep.connect(redis, name="bench", streams=[rows], store=store, writer=writer) as bus:
        due, number = time.monotonic(), 0
        while not stopped.is_set() and done < most:
            due += batch / rate
            if (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            elif pause < -LATEST:  # it cannot write so much: it would only fall further behind, into the next phase
                due = time.monotonic()
            facts = [Row(writer, number + at, TEXT, at / 7, at % 2 == 0) for at in range(batch)]
            started = time.monotonic()
            await bus.publish(rows, facts)
            due_times[done], starts[done], ends[done] = due, started, time.monotonic()
            done, number = done + 1, number + batch
            if done == 1:
                print(json.dumps("writing"), flush=True)
    Path(report).write_bytes(b"".join(one[:done].tobytes() for one in times))  # noqa: ASYNC240 - the bus is closed


async def read(redis: str, store: str, source: str | None, folder: str, settings: dict[str, Any]) -> None:
    """Bootstraps, and follows until standard input tells it how far; prints what happened when."""
    started = time.monotonic()
    db = sqlite3.connect(f"{folder}/mirror.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    # A power cut may take the last transactions back, rows and positions together: the reader goes on from there. So
    # it does not wait for the disk that the writers' commits wait for.
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("CREATE TABLE mirror (token INTEGER PRIMARY KEY, writer TEXT, row TEXT)")
    insert = "INSERT INTO mirror VALUES (?, ?, ?)"
    target = f"sqlite:///{folder}/mirror.db"
    await open_store(target, Registry([rows])).init()
    when: dict[str, float] = {}
    async with busrep.connect(
        redis,
        name="bench",
        streams=[rows],
        store=store,
        reader_store=target,
        reader=READER,
        snapshot_source=source,
        settings=busrep.Settings(**settings),
    ) as bus:

        @bus.snapshot(rows)
        async def apply(part: busrep.SnapshotPart[Row]) -> None:
            when.setdefault("first part", time.monotonic() - started)
            texts = [orjson.dumps(fields(row)).decode() for row in part.rows]
            db.execute("BEGIN")
            if part.first:
                db.execute("DELETE FROM mirror")
            db.executemany(insert, zip(part.tokens, part.writers, texts, strict=True))
            await part.save(db)
            db.execute("COMMIT")
            when["last part"] = time.monotonic() - started

        @bus.subscribe(rows)
        async def handle(batch: busrep.Batch[Row]) -> None:
            db.execute("BEGIN")
            for token, row in zip(batch.tokens, batch.rows, strict=True):
                db.execute(insert, [token, batch.writer, orjson.dumps(fields(row)).decode()])
            await batch.save(db)
            db.execute("COMMIT")

        while bus.statistics()["bootstrap"].get("rows", {}).get("state") != "online":
            await asyncio.sleep(0.05)
        when["online"] = time.monotonic() - started
        print(json.dumps({"when": when, "statistics": bus.statistics()["bootstrap"]["rows"]}), flush=True)
        reach = json.loads(await asyncio.to_thread(sys.stdin.readline))
        for writer, token in reach.items():
            await bus.wait_for(rows, writer, token, 60.0)
    print(json.dumps({"reached": len(reach)}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # hashing takes a processor, and has to wait for the last phase
    digest, count = hashlib.sha256(), 0
    for token, writer, text in db.execute("SELECT token, writer, row FROM mirror ORDER BY token"):
        if token <= reach[writer]:
            digest.update(f"{token} {writer} {text}\n".encode())
            count += 1
    print(json.dumps({"rows": count, "sha256": digest.hexdigest()}), flush=True)


def start(role: str, **spec: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, __file__, json.dumps({"role": role, **spec})]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(child: subprocess.Popen[str], what: object) -> None:
    assert child.stdin is not None
    print(json.dumps(what), file=child.stdin, flush=True)


def heard(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark has failed")
    return json.loads(line)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    os.nice(spec.pop("nice", 0))
    if processors := spec.pop("processors", None):
        os.sched_setaffinity(0, processors)
    role = {"writer": write, "reader": read}[spec.pop("role")]
    asyncio.run(role(**spec))
