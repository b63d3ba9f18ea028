"""The Spark source beside Spark's own JDBC source and a bare ADBC read, on one PostgreSQL table, in one run.

    BUSREP_JDBC_JAR=postgresql.jar python benchmarks/spark_source.py [--rows 1000000] [--partitions 1,2,4] [--repeat 3]
    python benchmarks/spark_source.py --memory 100000,1000000,10000000

Rows/s (the best of ``--repeat``, all ways in turns) to nowhere (Spark's ``noop``) and to Parquet. JDBC reads the
source's own partitions, as predicates, with the same columns, if BUSREP_JDBC_JAR names PostgreSQL's driver. ``bare``
is ADBC in one process without Spark: all batches to nowhere, or into one Parquet file. ``--memory`` instead reads so
many rows in one task and prints the peak of resident memory (bytes) of the Python worker and of the JVM.

Needs the extras ``spark`` and ``postgres``, and a PostgreSQL that can be started. Prints JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet
import setting
from adbc_driver_postgresql import dbapi
from pyspark.sql import DataFrame, SparkSession

from busrep.spark import session
from busrep.spark.planning import Span, partitions
from busrep.stores.blocking import open_blocking_store
from busrep.streams import Registry, Stream
from busrep.testing.servers import PostgresServer, start_postgres

WRITERS = ("w1", "w2", "w3", "w4")
# 120 bytes of JSON a row; a fact in ten was rolled back.
FILL = """
INSERT INTO busrep_facts (stream, writer, id, idx, row)
SELECT 'rows', (ARRAY['w1','w2','w3','w4'])[1 + (id / 10) %% 4], id, 0,
       '[' || id || ',"' || repeat('x', 90) || '",' || (id %% 97) || '.5,true,null]'
FROM generate_series(1, %s) AS id WHERE id %% 10 <> 3
"""


def filled(server: PostgresServer, rows: int) -> int:
    """Makes the table; returns its highest ID."""
    highest = rows * 10 // 9
    with contextlib.closing(open_blocking_store(server.url, Registry([Stream("rows")]))) as store:
        store.init()
        store.open()
        claims = [store.claim(writer, ["rows"], timeout=5) for writer in WRITERS]
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(FILL, [highest])
            connection.execute("SELECT setval('busrep_seq_rows', %s)", [highest])
            connection.execute("VACUUM ANALYZE busrep_facts")
        for claim in claims:
            store.heartbeat(claim, {"rows": highest})
    return highest


def bests(work: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Seconds, of each the least; in turns, so that a slow minute of the machine is one for all."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeat):
        for name, one in work.items():
            began = time.perf_counter()
            one()
            times[name].append(time.perf_counter() - began)
    return {name: min(some) for name, some in times.items()}


def to_noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def to_parquet(frame: DataFrame, folder: str) -> None:
    frame.write.mode("overwrite").parquet(f"{folder}/out")


def bare(url: str, path: str | None) -> None:
    with dbapi.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT stream, writer, id, idx, row, committed_at FROM busrep_facts ORDER BY id")
        with contextlib.closing(cursor.fetch_record_batch()) as batches:
            if path is None:
                for _ in batches:
                    pass
            else:
                with pyarrow.parquet.ParquetWriter(path, batches.schema) as out:
                    for batch in batches:
                        out.write_batch(batch)


def predicate(spans: list[Span]) -> str:
    each = [f"(writer = '{writer}' AND id > {after} AND id <= {upto})" for writer, after, upto in spans]
    return f"stream = 'rows' AND ({' OR '.join(each)})"


def jdbc(spark: SparkSession, server: PostgresServer, slices: list[list[Span]]) -> DataFrame:
    return spark.read.jdbc(
        f"jdbc:postgresql://127.0.0.1:{server.port}/postgres",
        "busrep_facts",
        predicates=[predicate(spans) for spans in slices],
        properties={
            "user": "postgres", "password": server.password, "driver": "org.postgresql.Driver", "fetchsize": "20000",
        },
    )  # fmt: skip


def source(spark: SparkSession, options: dict[str, str], count: int) -> DataFrame:
    return spark.read.format("busrep").options(**options, partitions=count).load()


def descendants() -> Iterator[tuple[str, int]]:
    """(name, resident bytes) of the processes that this one has started."""
    parents, found = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            pid = int(path.parent.name)
            parents[pid], found[pid] = int(rest[1]), (name, int(rest[21]) * os.sysconf("SC_PAGESIZE"))
    for pid, each in found.items():
        at = pid
        while at in parents and at != os.getpid():
            at = parents[at]
        if at == os.getpid() and pid != at:
            yield each


def peaks(work: Callable[[], object]) -> dict[str, int]:
    """The highest resident memory of one Python worker, and of the JVM, meanwhile; bytes."""
    highest = {"python": 0, "java": 0}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for name, size in descendants():
                kind = "java" if name == "java" else "python"
                if name != "postgres":
                    highest[kind] = max(highest[kind], size)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return highest


def rates(spark: SparkSession, server: PostgresServer, options: dict[str, str], folder: str, args: Any) -> Any:
    highest = filled(server, args.rows)
    rows = source(spark, options, 1).count()
    bares = {"noop": lambda: bare(server.url, None), "parquet": lambda: bare(server.url, f"{folder}/bare.parquet")}
    found: dict[str, Any] = {"rows": rows, "bare": {to: rows / s for to, s in bests(bares, args.repeat).items()}}
    for count in map(int, args.partitions.split(",")):
        slices = partitions([(writer, 0, highest) for writer in WRITERS], count)
        frames = {"source": lambda n=count: source(spark, options, n)}
        if args.jar:
            frames["jdbc"] = lambda some=slices: jdbc(spark, server, some)
        work: dict[str, Callable[[], object]] = {}
        for name, frame in frames.items():
            assert frame().count() == rows
            work[f"{name} to noop"] = lambda of=frame: to_noop(of())
            work[f"{name} to parquet"] = lambda of=frame: to_parquet(of(), folder)
        at = found[f"{count} partitions"] = {name: rows / s for name, s in bests(work, args.repeat).items()}
        for to in ("noop", "parquet"):
            if args.jar:
                at[f"ratio to {to}"] = round(at[f"source to {to}"] / at[f"jdbc to {to}"], 3)
    return found


def memory(spark: SparkSession, server: PostgresServer, options: dict[str, str], args: Any) -> Any:
    sizes = sorted(map(int, args.memory.split(",")))
    highest = filled(server, sizes[-1])
    found = {}
    for size in sizes:
        until = min(highest, size * 10 // 9)
        ends = json.dumps(dict.fromkeys(WRITERS, until))
        frame = source(spark, {**options, "endingPositions": ends}, 1)
        found[size] = peaks(lambda of=frame: to_noop(of))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--partitions", default="1,2,4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", metavar="ROWS,ROWS")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--jar", default=os.environ.get("BUSREP_JDBC_JAR"))
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="busrep-benchmark-")
    try:
        with start_postgres(config={"shared_buffers": "256MB", "max_wal_size": "4GB"}) as server:
            print(setting.machine(), setting.of_postgres(server.url), sep="\n")
            (Path(folder) / "password").write_text(server.password)
            conf = {"spark.driver.memory": "1g", **({"spark.jars": args.jar} if args.jar else {})}
            spark = session("benchmark", master=args.master, conf=conf)
            options = {
                "store": server.url.replace(f":{server.password}", ""), "stream": "rows",
                "passwordFile": f"{folder}/password",
            }  # fmt: skip
            try:
                if args.memory:
                    print(json.dumps(memory(spark, server, options, args), indent=2))
                else:
                    print(json.dumps(rates(spark, server, options, folder, args), indent=2))
            finally:
                spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
