"""A reader takes a snapshot of 2,000,000 facts while writers go on: what the writers notice, and how fast it is.

    python benchmarks/bootstrap.py [--rows 2000000] [--rate 2000] [--batch 10] [--source table|http|parquet]
    python benchmarks/bootstrap.py --batch 20 --reader-cpu 1 --snapshot-rate 20000 --part-rows 500

One run, one machine, everything real: PostgreSQL with fsync, Redis, writer processes that commit at a fixed rate (due
times, not as fast as they can), and phases: A with nobody listening, B from the start of a reader process until it is
online and has caught up, F with that reader following, as any reader of the bus does all day, A again, and so on; the
last is an A. The reader keeps what it gets in an SQLite file of its own, in the transactions that save its progress,
every row decoded to its type. After the last phase its rows and the table are compared by SHA-256.

With ``--reader-cpu`` the reader has that processor alone, and all else the others, in every phase: as if the reader had
a machine of its own.

Printed: commits of each phase with p50 and p99 of their latency, as the writer's ``await`` sees it and counted from
when the commit was due, which adds the queue behind a slow one; the ratio of each B to the mean of the phases A beside
it, and to its F; growth of the writers' resident memory in each phase, from /proc; rows/s of the snapshot, beside a
bare ``COPY busrep_facts TO STDOUT`` and the source alone (nothing is decoded or kept), in turns while the writers rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import setting
from bootstrap_children import heard, make_table, rows, start, tell
from bootstrap_phases import Commits, Phase, latencies, quiet, watch

import busrep
from busrep.snapshots.sources import open_source
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.processes import free_port

SECRET = "benchmark"

# -- phases ----------------------------------------------------------------------------------------------------------


def table_hash(store: str, reach: dict[str, int]) -> dict[str, Any]:
    """Of the rows up to these tokens, in the order of the tokens: the text that the reader hashes."""
    lines = "SELECT id || ' ' || f.writer || ' ' || row FROM busrep_facts f"
    bound = f"JOIN json_each_text('{json.dumps(reach)}') r ON r.key = f.writer WHERE id <= r.value::bigint"
    sql = f"COPY ({lines} {bound} ORDER BY id) TO STDOUT (FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')"
    digest, count = hashlib.sha256(), 0
    with psycopg.connect(store, autocommit=True) as connection, connection.cursor().copy(sql.encode()) as copy:
        for piece in copy:
            digest.update(piece)
            count += bytes(piece).count(b"\n")
    return {"rows": count, "sha256": digest.hexdigest()}


def last_tokens(store: str) -> dict[str, int]:
    sql = "SELECT writer, position FROM busrep_positions WHERE stream = 'rows'"
    with psycopg.connect(store, autocommit=True) as connection:
        return dict(connection.execute(sql).fetchall())


def measure(options: argparse.Namespace, redis: str, store: str, source: str | None, folder: Path) -> dict[str, Any]:
    """The phases: A B F A ... A."""
    phases: list[Phase] = []
    readers: list[subprocess.Popen[str]] = []
    reports: list[dict[str, Any]] = []
    longest = (options.rounds + 1) * (options.seconds + 300) + 60
    with contextlib.ExitStack() as stack:
        writers = []
        for number in range(options.writers):
            share = {"rate": options.rate / options.writers, "batch": options.batch, "seconds": longest}
            place = {"writer": f"new-{number}", "report": str(folder / f"times-{number}")}
            writers.append(stack.enter_context(start("writer", redis=redis, store=store, **share, **place)))
        for one in writers:
            heard(one)
        watch(Phase("warming up", time.monotonic()), writers, options.warm_up)
        for number in range(1, options.rounds + 1):
            phases.append(quiet(f"A{number}", writers, options.seconds))
            found, report, reader = bootstrap(number, writers, options, redis, store, source, folder, stack)
            phases += found
            reports.append(report)
            readers.append(reader)
        phases.append(quiet(f"A{options.rounds + 1}", writers, options.seconds))
        for one in writers:
            one.communicate()
        for report, reader in zip(reports, readers, strict=True):
            tell(reader, {})
            report["got"], report["table"] = heard(reader), table_hash(store, report.pop("reach"))
    commits = [Commits.read(folder / f"times-{number}") for number in range(options.writers)]
    return {"phases": {phase.name: latencies(commits, phase) for phase in phases}, "readers": reports}


def bootstrap(
    number: int,
    writers: Sequence[subprocess.Popen[str]],
    options: argparse.Namespace,
    redis: str,
    store: str,
    source: str | None,
    folder: Path,
    stack: contextlib.ExitStack,
) -> tuple[list[Phase], dict[str, Any], subprocess.Popen[str]]:
    """Phases B and F of a reader: its process is left waiting, with its bus closed."""
    place = Path(options.reader_folder or folder) / f"{folder.name}-{number}"
    place.mkdir()
    stack.callback(shutil.rmtree, place)
    settings = {
        "snapshot_connections": options.connections,
        "snapshot_part_rows": options.part_rows,
        "snapshot_rate": options.snapshot_rate,
    }
    phase = Phase(f"B{number}", time.monotonic())
    spec = {"redis": redis, "store": store, "source": source, "folder": str(place)}
    place_on = None if options.reader_cpu is None else [options.reader_cpu]
    reader = stack.enter_context(start("reader", **spec, settings=settings, nice=options.nice, processors=place_on))
    with ThreadPoolExecutor(1) as thread:
        online = thread.submit(heard, reader)
        while not online.done():
            watch(phase, writers, 0.1)
    phase.over()
    follows = quiet(f"F{number}", writers, options.seconds)
    report = online.result() | {"reach": last_tokens(store)}
    tell(reader, report["reach"])
    heard(reader)
    return [phase, follows], report, reader


# -- the run ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened_source(kind: str, store: str, folder: Path) -> Iterator[str | None]:
    """What the reader takes for ``snapshot_source=``."""
    command = [sys.executable, "-m", "busrep.cli"]
    if kind == "table":
        yield None
    elif kind == "parquet":
        place = f"file://{folder}/parquet"
        copy = ["bootstrap", "--store", store, "--stream", "rows", "--to", place, "--json"]
        subprocess.run([*command, *copy], check=True, stdout=subprocess.DEVNULL)
        yield place
    else:
        (folder / "secret").write_text(SECRET)
        serve = ["serve", "--http", f"127.0.0.1:{free_port()}", "--secret-file", str(folder / "secret"), "--json"]
        with subprocess.Popen([*command, *serve, "--store", store], stdout=subprocess.PIPE, text=True) as server:
            try:
                yield heard(server)["listening"]["http"].replace("://", f"://:{SECRET}@")
            finally:
                server.send_signal(signal.SIGINT)


def bare_copy(store: str) -> float:
    """Rows/s."""
    with psycopg.connect(store, autocommit=True) as connection:
        started, count = time.monotonic(), 0
        with connection.cursor().copy("COPY busrep_facts TO STDOUT") as copy:
            for piece in copy:
                count += bytes(piece).count(b"\n")
        return count / (time.monotonic() - started)


async def source_alone(url: str, settings: busrep.Settings) -> float:
    """Rows/s from before the agreement to the last byte of the last part, one part after the other."""
    streams = Registry([rows])
    table = url.startswith("postgresql")
    source = open_store(url, streams, settings=settings) if table else open_source(url, streams, settings)
    await source.open()
    try:
        started, count = time.monotonic(), 0
        agreement = await source.agree("rows", part_rows=settings.snapshot_part_rows)
        for number in range(len(agreement.parts)):
            async for piece in source.load(agreement, number):
                count += piece.count(b"\n")
        taken = time.monotonic() - started
        await source.leave(agreement)
    finally:
        await source.close()
    return count / taken


def speeds(store: str, source: str | None, options: argparse.Namespace) -> dict[str, float]:
    """Medians, rows/s: the bare COPY and the source alone, in turns."""
    settings = busrep.Settings(snapshot_part_rows=options.part_rows)
    found: dict[str, list[float]] = {"copy": [], "source": []}
    for _ in range(options.turns):
        found["copy"].append(bare_copy(store))
        found["source"].append(asyncio.run(source_alone(source or store, settings)))
    return {name: statistics.median(rates) for name, rates in found.items()}


def report(options: argparse.Namespace, alone: dict[str, float], found: dict[str, Any]) -> bool:
    """Print it; whether nothing was lost."""
    pace = f"{options.snapshot_rate:,.0f} rows/s at most" if options.snapshot_rate else "as fast as it can"
    print(
        f"{options.rows:,} facts in the table; {options.writers} writers, {options.rate:,} facts/s due, "
        f"{options.batch} a transaction; source: {options.source}, {options.connections} connections, "
        f"{options.part_rows:,} rows a part, {pace}, reader's niceness {options.nice}; "
        f"{os.cpu_count()} processors"
        + ("" if options.reader_cpu is None else f", the reader on {options.reader_cpu} alone, all else on the others")
    )
    phases: dict[str, dict[str, float]] = found["phases"]
    headings = ("facts/s", "commits", "p50", "p99", "p50 due", "p99 due")
    print(f"{'':4}{''.join(f'{heading:>9}' for heading in headings)} ms   busy   memory grew")
    for name, one in phases.items():
        rate = one["commits"] * options.batch / one["seconds"]
        numbers = "".join(f"{one[key]:9.2f}" for key in ("p50", "p99", "due_p50", "due_p99"))
        print(f"{name:4}{rate:9,.0f}{one['commits']:9,}{numbers}{one['busy']:10.2f}   {one['growth_kb']:,} kB")
    whole = True
    for number, reader in enumerate(found["readers"], 1):
        with_it, alone_ones = phases[f"B{number}"], (phases[f"A{number}"], phases[f"A{number + 1}"])
        when, numbers = reader["when"], reader["statistics"]
        loaded = numbers["rows"] / max(when["last part"], 0.001)
        for what, beside in (("A", alone_ones), ("F", (phases[f"F{number}"],))):
            keys = ("p50", "p99", "due_p50", "due_p99")
            ratios = {key: with_it[key] / statistics.mean(one[key] for one in beside) for key in keys}
            print(f"B{number} beside {what}: " + ", ".join(f"{key} {ratio:.2f}x" for key, ratio in ratios.items()))
        print(
            f"   {numbers['rows']:,} rows applied after {when['last part']:.1f} s ({loaded:,.0f} rows/s), "
            f"online after {when['online']:.1f} s; lines held: {numbers['buffer_bytes_peak']:,} bytes at most"
        )
        equal = reader["got"] == reader["table"]
        lost = reader["table"]["rows"] - reader["got"]["rows"]
        verdict = "equal" if equal else "NOT EQUAL"
        print(f"   {reader['got']['rows']:,} rows, {verdict} to the table by SHA-256, lost {lost}")
        whole = whole and equal
    print(
        f"alone: bare COPY {alone['copy']:,.0f} rows/s, the source {alone['source']:,.0f} rows/s "
        f"({alone['source'] / alone['copy']:.2f}x), medians of {options.turns} in turns"
    )
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rate", type=int, default=2_000, help="facts a second, all writers together")
    parser.add_argument("--batch", type=int, default=10, help="facts of one transaction")
    parser.add_argument("--writers", type=int, default=2, help="processes")
    parser.add_argument("--source", choices=("table", "http", "parquet"), default="table")
    parser.add_argument("--connections", type=int, default=2, help="snapshot_connections of the reader")
    parser.add_argument("--part-rows", type=int, default=20_000)
    parser.add_argument("--snapshot-rate", type=float, help="rows/s that the reader applies at most")
    parser.add_argument("--nice", type=int, default=0, help="niceness of the reader, which may be a machine of its own")
    parser.add_argument("--reader-cpu", type=int, help="the processor that the reader has, and nothing else")
    parser.add_argument("--reader-folder", help="where the reader keeps its rows: /dev/shm takes another disk's place")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase A and F")
    parser.add_argument("--warm-up", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1, help="phases B")
    parser.add_argument("--turns", type=int, default=3, help="of the bare COPY and the source alone")
    parser.add_argument("--json", type=Path, help="write all figures into this file too")
    options = parser.parse_args()
    if options.reader_cpu is not None:
        others = os.sched_getaffinity(0) - {options.reader_cpu}
        if not others or options.reader_cpu not in os.sched_getaffinity(0):
            parser.error(f"--reader-cpu: this process may use {sorted(os.sched_getaffinity(0))}, and needs another one")
        os.sched_setaffinity(0, others)  # what is started inherits it: servers, writers
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="busrep-bench-")))
        asyncio.run(make_table(postgres.url, options.rows))
        source = stack.enter_context(opened_source(options.source, postgres.url, folder))
        alone = speeds(postgres.url, source, options)
        found = measure(options, redis.url, postgres.url, source, folder)
    whole = report(options, alone, found)
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "alone": alone, **found}, indent=1)
        )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
