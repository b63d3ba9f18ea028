"""Rows a second that a replay writes into PostgreSQL, beside the same rows inserted without a bus.

    python benchmarks/replay.py [--rows 100000] [--writers 1] [--rounds 3] [--spark] [--json FILE]

Facts of one row, and of five, are replayed flat out, as the job does it once it has the rows from Spark: rows made
facts, facts taken together, and written by a bus for each writer, with the marks of where they stand. A row is
["w1", i, text, float, bool], some 120 bytes as JSON. All contenders of a line take turns in one process; replay's
clock runs from the first row until the bus is closed, with all of it published. Printed: the medians of the rounds,
the median of the rounds' ratios to the first contender, and what a row took of this process's processor.

    unnest   INSERT ... SELECT ... FROM unnest(...) into a table with the columns, the key and the defaults of busrep's,
             1,000 rows a transaction, as psycopg binds arrays
    COPY     COPY ... FROM STDIN into it, 1,000 rows a transaction
    replay   what is described above
    job      with ``--spark``: the whole job, ``busrep pipeline replay --flat-out``, in a session that has run before;
             from the first question to the table (another database of the same server) until the report
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import orjson
import psycopg
import setting
from rows import make_tables, row, rows

from busrep.spark import session
from busrep.spark.job import silent
from busrep.spark.jobs.replay import Options, run
from busrep.spark.replay_pace import Chunks, Pace, facts_of
from busrep.spark.replay_target import Target, target_stream
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry

STREAM = rows.name
# Rows of a transaction of the peers.
TRANSACTION = 1_000
COLUMNS = "(stream, writer, id, idx, row)"
FILL = f"COPY busrep_facts {COLUMNS} FROM STDIN"

SourceRow = tuple[str, str, int, int, str]


def source_rows(count: int, writers: int, of_fact: int) -> list[SourceRow]:
    """What Spark gives: (stream, writer, token, time, row), the writers in turns."""
    return [
        (STREAM, f"w{1 + fact % writers}", 1 + fact, at, orjson.dumps(attrs.astuple(row(at))).decode())
        for at in range(count)
        for fact in [at // of_fact]
    ]


def table_rows(source: Sequence[SourceRow], writer: str) -> Iterator[tuple[str, str, int, int, str]]:
    """The same, as they stand in the table, under other names of writers."""
    for (_, its, token), group in itertools.groupby(source, key=lambda one: one[:3]):
        for place, one in enumerate(group):
            yield STREAM, writer + its, token, place, one[4]


class Peers:
    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute("CREATE TABLE bare (LIKE busrep_facts INCLUDING ALL)")

    def clear(self) -> None:
        self.connection.execute("TRUNCATE bare")

    def unnest(self, source: Sequence[SourceRow]) -> None:
        its = table_rows(source, "")
        while part := list(itertools.islice(its, TRANSACTION)):
            with self.connection.transaction():
                self.connection.execute(
                    f"INSERT INTO bare {COLUMNS} SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::int[], "
                    "%s::text[])",
                    [list(column) for column in zip(*part, strict=True)],
                )

    def copy(self, source: Sequence[SourceRow]) -> None:
        its = table_rows(source, "")
        while part := list(itertools.islice(its, TRANSACTION)):
            with (
                self.connection.transaction(),
                self.connection.cursor() as cursor,
                cursor.copy(f"COPY bare {COLUMNS} FROM STDIN") as copy,
            ):
                for one in part:
                    copy.write_row(one)


class Replay:
    def __init__(self, redis: str, url: str) -> None:
        self.redis, self.url, self.number = redis, url, 0

    def write(self, source: Sequence[SourceRow]) -> None:
        self.number += 1
        target = Target(
            self.redis, "bench", {STREAM: target_stream(STREAM, None, in_memory=False)}, {STREAM: "e" * 32},
            store=self.url, prefix=f"r{self.number}-",
        )  # fmt: skip
        try:
            target.open({one[:2]: 0 for one in source})
            for chunk in Chunks(Pace(), time.monotonic, time.sleep).of(facts_of(source)):
                target.write(chunk)
        finally:
            target.close()


class Job:
    """The whole job. Its source is a database that holds the rows already, under proven positions."""

    def __init__(self, spark: Any, redis: str, source: str, target: str) -> None:
        self.spark, self.redis, self.source, self.target, self.number = spark, redis, source, target, 0

    def fill(self, source: Sequence[SourceRow]) -> None:
        with contextlib.closing(open_blocking_store(self.source, Registry([rows]))) as store:
            store.init()
            store.open()
            last: dict[str, int] = {one[1]: one[2] for one in source}
            claims = {writer: store.claim(writer, [STREAM], timeout=5) for writer in last}
            with psycopg.connect(self.source, autocommit=True) as connection:
                connection.execute("TRUNCATE busrep_facts")
                with connection.cursor() as cursor, cursor.copy(FILL) as copy:
                    for one in table_rows(source, ""):
                        copy.write_row(one)
                connection.execute("SELECT setval('busrep_seq_rows', %s)", [max(last.values())])
                connection.execute("VACUUM ANALYZE busrep_facts")
            for writer, claim in claims.items():
                store.heartbeat(claim, {STREAM: last[writer]})
                store.finish(writer, claim.incarnation, timeout=5)

    def write(self, source: Sequence[SourceRow]) -> None:
        self.number += 1
        options = Options(
            store=self.source, stream=(STREAM,), to_redis=self.redis, to_name="bench", to_store=self.target,
            to_writer=f"j{self.number}-", flat_out=True,
        )  # fmt: skip
        report = run(self.spark, options, silent)
        assert report["rows"] == len(source), report


def measured(
    title: str, contenders: dict[str, Callable[[Sequence[SourceRow]], None]], source: Sequence[SourceRow],
    before: Callable[[], None], rounds: int,
) -> dict[str, dict[str, list[float]]]:  # fmt: skip
    """Rates of each contender in each round, and what a row took of the processor; printed."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, write in contenders.items():
            before()
            started, processor = time.monotonic(), time.process_time()
            write(source)
            found[name].append(len(source) / (time.monotonic() - started))
            taken[name].append((time.process_time() - processor) / len(source))
    return setting.compare(title, found, taken, "rows/s")


def spark_job(stack: contextlib.ExitStack, redis: str, url: str) -> Job:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE source")
    # No option of a job takes a password: the environment is where it looks for both.
    os.environ["PGPASSWORD"] = str(psycopg.conninfo.conninfo_to_dict(url)["password"])
    bare = re.sub(r":[^:@/]*@", "@", url)
    spark = session("benchmark", master="local[2]")
    stack.callback(spark.stop)
    return Job(spark, redis, bare.rpartition("/")[0] + "/source", bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spark", action="store_true", help="measure the whole job, too")
    setting.add_json(parser)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        redis, postgres = setting.servers(stack, max_wal_size="4GB")
        asyncio.run(make_tables(postgres.url, rows))
        whole = spark_job(stack, redis.url, postgres.url) if given.spark else None
        peers, ours = Peers(postgres.url), Replay(redis.url, postgres.url)
        contenders = {"unnest": peers.unnest, "COPY": peers.copy, "replay": ours.write}
        if whole is not None:
            contenders["job"] = whole.write
        for of_fact in (1, 5):
            source = source_rows(given.rows, given.writers, of_fact)
            if whole is not None:
                whole.fill(source)
                whole.write(source)
            title = f"facts of {of_fact} row{'s' if of_fact > 1 else ''}"
            found |= measured(title, contenders, source, peers.clear, given.rounds)
    setting.write(given, found)


if __name__ == "__main__":
    main()
