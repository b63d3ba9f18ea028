"""What the job ``stats`` does: counts an archive or a table with Spark, listens to the bus, writes tables and a page.

::

    <to>/report.html                  the page, complete in itself
    <to>/report.json                  its summary
    <to>/writers.parquet ...          a table each, see stats_tables.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra
from busrep.spark import job, secrets, stats_tables
from busrep.spark.archive_store import Root
from busrep.spark.archiving import streams_in_store
from busrep.spark.options import declared_stream, stream_of
from busrep.spark.replay_sources import Source, names_of, sources_of, tasks_for
from busrep.spark.stats_listen import Samples, readers_of
from busrep.spark.stats_live import Live, listen
from busrep.spark.stats_page import page
from busrep.spark.stats_svg import round_time
from busrep.spark.table import Table
from busrep.spark.waiting import waiting_rows

try:
    import pyarrow
    from pyarrow import parquet
    from pyspark import StorageLevel
except ImportError:
    raise MissingExtra("spark", "statistics in Parquet files") from None

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from busrep.spark.jobs.stats import Options

# Windows of a page that is as wide as a screen.
WINDOWS = 160
TEXT, WHOLE, REAL = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
TIME = pyarrow.timestamp("us", "UTC")

# The tables as they are written: columns and their types, in order.
TABLES: Mapping[str, Mapping[str, Any]] = {
    "writers": {
        "stream": TEXT, "writer": TEXT, "facts": WHOLE, "rows": WHOLE, "bytes": WHOLE, "first_token": WHOLE,
        "last_token": WHOLE, "first_time": TIME, "last_time": TIME, "most_rows_per_fact": WHOLE,
        "facts_without_time": WHOLE,
    },
    "rates": {"stream": TEXT, "writer": TEXT, "window": TIME, "facts": WHOLE, "rows": WHOLE, "bytes": WHOLE},
    "rows_per_fact": {"stream": TEXT, "writer": TEXT, "rows": WHOLE, "facts": WHOLE},
    "row_sizes": {"stream": TEXT, "low": REAL, "high": REAL, "rows": WHOLE},
    "row_size_percentiles": {"stream": TEXT, "p50": WHOLE, "p99": WHOLE, "most": WHOLE},
    "steps": {
        "stream": TEXT, "writer": TEXT, "whose": TEXT, "low": WHOLE, "high": WHOLE, "steps": WHOLE, "tokens": WHOLE,
    },
    "top_keys": {"stream": TEXT, "rank": WHOLE, "key": TEXT, "rows": WHOLE, "share": REAL, "keys": WHOLE},
    "latencies": {
        "measure": TEXT, "stream": TEXT, "writer": TEXT, "reader": TEXT, "count": WHOLE, "p50": REAL, "p90": REAL,
        "p99": REAL, "p999": REAL, "most": REAL,
    },
    "readers": {"reader": TEXT, "stream": TEXT, "writer": TEXT, "position": WHOLE, "behind": WHOLE, "saved": TIME},
}  # fmt: skip
SAMPLES = pyarrow.schema({"measure": TEXT, "stream": TEXT, "writer": TEXT, "reader": TEXT, "seconds": REAL})


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.stats.run`."""
    root = Root(options.to)
    check_options(options)
    live, readers = Live(), []
    waiting = waiting_rows(options, names_of(options))
    if options.archive is None:
        waiting.look()
    # Those of an archive are taken now: it says of which log the store has to be.
    sources = sources_of(spark, options, checked=False) if options.archive is not None else []
    if options.store is not None:
        url = secrets.resolve(options.store, options.password_file)
        with _tables(url, options, sources) as tables:
            if options.listen:
                live = listen(spark, options, url, tables, progress)
            readers = _readers(tables)
    sources = sources or sources_of(spark, options, checked=False)
    found = {**counted(spark, options, sources, progress), "readers": readers}
    found["latencies"] = stats_tables.percentiles(live.samples)
    summary = _summary(found, sources, live, options)
    for name, columns in TABLES.items():
        _write_table(root, name, _table(columns, found[name]))
    _write_table(root, "latency_samples", sample_table(live.samples))
    root.replace("report.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    root.replace("report.html", page(summary, found, live.samples).encode())
    return {**summary, "to": root.shown, "page": f"{root.shown}/report.html", **waiting.report()}


def check_options(options: Options) -> None:
    """Raises ConfigError for options that do not work together."""
    if (options.redis is None) != (options.name is None):
        raise ConfigError("--redis and --name go together: the Redis of a bus, and the bus's name there")
    if options.listen and (options.redis is None or options.store is None):
        raise ConfigError("--listen needs the bus to listen to, --redis and --name, and its table, --store")
    if options.listen < 0:
        raise ConfigError("--listen is a time from 0 on")
    if options.window is not None and (options.window < 1 or options.window != int(options.window)):
        raise ConfigError("--window is whole seconds, 1 at least")


@contextlib.contextmanager
def _tables(url: str, options: Options, sources: list[Source]) -> Iterator[list[Table]]:
    """Of the store's streams; ``sources``: those of an archive. Raises ConfigError when it is another log's."""
    names = [one.stream for one in sources] or options.stream or streams_in_store(url)
    tables = [Table(url, stream_of(options.streams, name)) for name in names]
    try:
        for source, table in zip(sources, tables, strict=False):
            if source.epoch != (found := table.log().epoch):
                raise ConfigError(
                    f"the archive of stream {source.stream!r} is of log {source.epoch}, and the store (--store, or "
                    f"BUSREP_STORE) has log {found}, whose readers have nothing to do with it: pass the store that was "
                    "archived, or none (env -u BUSREP_STORE)"
                )
        yield tables
    finally:
        for table in tables:
            table.close()


def _readers(tables: list[Table]) -> list[dict[str, Any]]:
    found = []
    for table in tables:
        saved_at = readers_of(table)
        newest = dict(table.log().positions)
        for _, _, writer, at, _ in saved_at:  # which may have heard more than is proven in the table yet
            newest[writer] = max(newest.get(writer, 0), at)
        found += [
            {"reader": reader, "stream": stream, "writer": writer, "position": at,
             "behind": newest[writer] - at, "saved": round(saved * 1e6)}
            for reader, stream, writer, at, saved in saved_at
        ]  # fmt: skip
    return found


# -- what there is -----------------------------------------------------------------------------------------------


def counted(
    spark: SparkSession, options: Options, sources: list[Source], progress: job.Progress
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """The tables of what the sources have. Raises ConfigError when that is nothing."""
    frames = [
        one.rows(one.start, {writer: one.end[writer] for writer in one.writers}) for one in sources if one.writers
    ]
    if not frames:
        raise ConfigError("there is no row in that range")
    fields = {one.stream: _field(options, one.stream) for one in sources if one.writers}
    with tasks_for(spark, sources), contextlib.ExitStack() as stack:
        rows: DataFrame = reduce(lambda one, other: one.unionByName(other), frames)
        if options.archive is None:  # a database is asked once, and is not to do so much
            rows = rows.persist(StorageLevel.DISK_ONLY)
            stack.callback(rows.unpersist)
        stats_tables.check_names(rows, fields)
        facts = stats_tables.facts_of(rows).persist()
        stack.callback(facts.unpersist)
        found: dict[str, list[dict[str, Any]]] = {"writers": stats_tables.writers(facts)}
        if not found["writers"]:
            raise ConfigError("there is no row in that range")
        window = int(options.window or _window(found["writers"]))
        work: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "rates": lambda: stats_tables.rates(facts, window),
            "rows_per_fact": lambda: stats_tables.rows_per_fact(facts),
            "steps": lambda: stats_tables.steps(facts),
            "row_sizes": lambda: stats_tables.row_sizes(rows),
            "row_size_percentiles": lambda: stats_tables.row_size_percentiles(rows),
            "top_keys": lambda: stats_tables.top_keys(rows, fields, options.top),
        }
        for done, (name, count) in enumerate(work.items(), 1):
            progress("counted tables", done, len(work))
            found[name] = count()
    return found


def _window(writers: list[dict[str, Any]]) -> int:
    """Seconds, so that a page shows them well, and the table of rates has a bearable number of rows."""
    times = [one[name] for one in writers for name in ("first_time", "last_time") if one[name] is not None]
    count = max(1, min(WINDOWS, stats_tables.MOST_ROWS // len(writers) - 1))
    return round_time((max(times) - min(times)) / 1e6 / count) if times else 1


def _field(options: Options, stream: str) -> str | None:
    """Where the key is in the rows: a place in an array, or a name in an object. Raises ConfigError."""
    declared = None if options.streams is None else declared_stream(options.streams, stream)
    if options.key is None or options.key.isdecimal() or declared is None or declared.row_type is None:
        return options.key
    names = [field.name for field in attrs.fields(declared.row_type) if field.init]
    if options.key not in names:
        raise ConfigError(f"--key {options.key}: the rows of stream {stream!r} have {', '.join(names)}")
    return str(names.index(options.key))


def _summary(
    found: Mapping[str, list[dict[str, Any]]], sources: list[Source], live: Live, options: Options
) -> dict[str, Any]:  # fmt: skip
    writers = found["writers"]
    times = [one[name] for one in writers for name in ("first_time", "last_time") if one[name] is not None]
    span = (max(times) - min(times)) / 1e6 if times else 0.0
    window = int(options.window or _window(writers))
    per_window: dict[int, int] = {}
    for one in found["rates"]:
        per_window[one["window"]] = per_window.get(one["window"], 0) + one["rows"]
    rows = sum(one["rows"] for one in writers)
    return {
        "rows": rows, "facts": sum(one["facts"] for one in writers), "bytes": sum(one["bytes"] for one in writers),
        "streams": sorted({one["stream"] for one in writers}), "writers": len({one["writer"] for one in writers}),
        "first": min(times) / 1e6 if times else None, "last": max(times) / 1e6 if times else None, "span": span,
        "window": window, "rows_per_second": rows / span if span else None,
        "peak_rows_per_second": max(per_window.values(), default=0) / window,
        "source": "archive" if options.archive is not None else "table",
        "epochs": sorted({one.epoch for one in sources}), "key": options.key,
        "positions": {one.stream: {"after": dict(one.start), "upto": dict(one.end)} for one in sources},
        "listened": live.seconds, "heard": live.heard, "heard_left_out": live.left_out, "link_cuts": live.cuts,
        "clock_ahead": round(live.ahead, 6), "clock_exact": round(live.exact, 6),
        "latencies": [one for one in found["latencies"] if not one["stream"]],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _table(columns: Mapping[str, Any], rows: list[dict[str, Any]]) -> Any:
    schema = pyarrow.schema(list(columns.items()))
    seconds = {"window"}  # the others are microseconds
    arrays = [
        pyarrow.array(
            [one[column] * 1_000_000 if column in seconds and kind == TIME else one[column] for one in rows], kind
        )
        for column, kind in columns.items()
    ]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def sample_table(samples: Samples) -> Any:
    """A row for each."""
    parts = []
    for key, values in sorted(samples.items()):
        names = [pyarrow.repeat(name, len(values)) for name in key]
        parts.append(pyarrow.Table.from_arrays([*names, stats_tables.floats(values)], schema=SAMPLES))
    return pyarrow.concat_tables(parts) if parts else SAMPLES.empty_table()


def _write_table(root: Root, name: str, table: Any) -> None:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    root.replace(f"{name}.parquet", sink.getvalue().to_pybytes())
