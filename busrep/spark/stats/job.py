"""What the job ``stats`` does: counts an archive or a table with Spark, listens to the bus, writes tables and a page.

::

    <to>/report.html                  the page, complete in itself
    <to>/report.json                  its summary
    <to>/writers.parquet ...          a table each, see `TABLES`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra
from busrep.spark import job, secrets
from busrep.spark.archive_store import Root, load
from busrep.spark.archived import Archive
from busrep.spark.archiving import streams_in_store
from busrep.spark.audit_behind import proven_and_not_archived
from busrep.spark.options import declared_stream, stream_of
from busrep.spark.replay_sources import Source, names_of, sources_of, tasks_for
from busrep.spark.stats import tables
from busrep.spark.stats.listen import Live, listen, readers_of
from busrep.spark.stats.page import page
from busrep.spark.stats.words import round_time
from busrep.spark.table import Table, seconds_of
from busrep.spark.waiting import waiting_rows
from busrep.stores.plans import Plan, Sql
from busrep.stores.snapshots import LogState, read_log

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
    "rates_by_size": {"stream": TEXT, "low": WHOLE, "high": WHOLE, "window": TIME, "facts": WHOLE, "rows": WHOLE},
    "rows_per_fact": {"stream": TEXT, "writer": TEXT, "rows": WHOLE, "facts": WHOLE},
    "row_sizes": {"stream": TEXT, "low": REAL, "high": REAL, "rows": WHOLE},
    "row_size_percentiles": {"stream": TEXT, "p50": WHOLE, "p99": WHOLE, "most": WHOLE},
    "steps": {
        "stream": TEXT, "writer": TEXT, "whose": TEXT, "low": WHOLE, "high": WHOLE, "steps": WHOLE, "tokens": WHOLE,
    },
    "unused_ids": {
        "stream": TEXT, "writer": TEXT, "writers": WHOLE, "facts": WHOLE, "first_token": WHOLE, "last_token": WHOLE,
        "unused": WHOLE, "share": REAL,
    },
    "top_keys": {"stream": TEXT, "rank": WHOLE, "key": TEXT, "rows": WHOLE, "share": REAL, "keys": WHOLE},
    "latencies": {
        "measure": TEXT, "stream": TEXT, "writer": TEXT, "reader": TEXT, "count": WHOLE, "p50": REAL, "p90": REAL,
        "p99": REAL, "p999": REAL, "most": REAL,
    },
    "readers": {"reader": TEXT, "stream": TEXT, "writer": TEXT, "position": WHOLE, "behind": WHOLE, "saved": TIME},
    "table_writers": {
        "stream": TEXT, "writer": TEXT, "position": WHOLE, "waiting_rows": WHOLE, "waiting_for": REAL,
        "silent_for": REAL,
    },
    "archive_lag": {
        "stream": TEXT, "writer": TEXT, "archived": WHOLE, "proven": WHOLE, "rows": WHOLE, "seconds": REAL,
    },
}  # fmt: skip
SAMPLES = pyarrow.schema({"measure": TEXT, "stream": TEXT, "writer": TEXT, "reader": TEXT, "seconds": REAL})


def run(spark: SparkSession, options: Options, progress: job.Progress) -> job.Report:
    """See `busrep.spark.jobs.stats.run`."""
    root = Root(options.to)
    check_options(options)
    live = Live()
    asked: dict[str, list[dict[str, Any]]] = {"readers": [], "archive_lag": []}
    waiting = waiting_rows(options, names_of(options))
    if options.archive is None:
        waiting.look()
    # Those of an archive are taken now: it says of which log the store has to be.
    sources = sources_of(spark, options, checked=False) if options.archive is not None else []
    if options.store is not None:
        url = secrets.resolve(options.store, options.password_file)
        with _tables(url, options, sources) as opened:
            if options.listen:
                live = listen(spark, options, url, opened, progress)
            asked["readers"] = _readers(opened)
            if options.archive is not None:
                asked["archive_lag"] = archive_lag(Root(options.archive), opened)
    sources = sources or sources_of(spark, options, checked=False)
    found = {**counted(spark, options, sources, progress), **asked}
    found["latencies"] = tables.percentiles(live.samples)
    waits = waiting.report()
    found["table_writers"] = _waiting(waits["table_writers"])
    summary = {
        **_summary(found, sources, live, options), **_worst_lag(asked["archive_lag"]), "lease": options.lease,
    }  # fmt: skip
    for name, columns in TABLES.items():
        _write_table(root, name, _table(columns, found[name]))
    _write_table(root, "latency_samples", sample_table(live.samples))
    root.replace("report.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    root.replace("report.html", page(summary, found, live.samples).encode())
    return {**summary, "to": root.shown, "page": f"{root.shown}/report.html", **waits}


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


# -- what the database is asked for -------------------------------------------------------------------------------


@contextlib.contextmanager
def _tables(url: str, options: Options, sources: Sequence[Source]) -> Iterator[list[Table]]:
    """Of the store's streams; ``sources``: those of an archive. Raises ConfigError when it is another log's."""
    names = [one.stream for one in sources] or options.stream or streams_in_store(url)
    opened = [Table(url, stream_of(options.streams, name)) for name in names]
    try:
        for source, table in zip(sources, opened, strict=False):
            if source.epoch != (found := table.log().epoch):
                raise ConfigError(
                    f"the archive of stream {source.stream!r} is of log {source.epoch}, and the store (--store, or "
                    f"BUSREP_STORE) has log {found}, whose readers have nothing to do with it: pass the store that was "
                    "archived, or none (env -u BUSREP_STORE)"
                )
        yield opened
    finally:
        for table in opened:
            table.close()


def _readers(opened: Sequence[Table]) -> list[dict[str, Any]]:
    """The positions of durable readers, and how far each is behind."""
    found = []
    for table in opened:
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


def _waiting(table_writers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The writers of a report's ``table_writers``, as a table."""
    return [
        {"stream": stream, "writer": writer, **one}
        for stream, writers in table_writers.items() for writer, one in writers.items()
    ]  # fmt: skip


def archive_lag(root: Root, opened: Sequence[Table]) -> list[dict[str, Any]]:
    """By how much the archive is behind what the table has proven, per stream and writer.

    ``rows`` are those between the archive's position and the proven one, ``seconds`` the age of the oldest of them by
    the database's clock: None without one, and in a table of the application's, which has no times. Rows that were
    pruned before they were archived are not in the table, so they are not counted. Raises ConfigError, Unavailable.
    """
    return [one for table in opened for one in _lag_of(load(root, table.backing.stream), table)]


def _lag_of(archive: Archive, table: Table) -> list[dict[str, Any]]:
    backing = table.backing
    age = "NULL" if backing.own else table.dialect.age("min(committed_at)")

    def body() -> Plan[tuple[LogState, dict[str, tuple[int, float | None]]]]:
        log = yield from read_log(table.dialect, backing.stream)
        found: dict[str, tuple[int, float | None]] = {}
        for writer, after, upto in proven_and_not_archived(archive, log):
            where, params = backing.of_writer(writer)
            between, limits = backing.between(after, upto)
            text = f"SELECT count(*), {age} FROM {backing.table} WHERE {where} AND {between}"  # noqa: S608 - quoted
            ((rows, seconds),) = (yield Sql(text, (*params, *limits)))[0]
            found[writer] = rows, seconds_of(seconds)
        return log, found

    log, lacking = table.ask(body)
    return [
        {"stream": backing.stream, "writer": writer, "archived": archive.upto.get(writer, 0), "proven": proven,
         "rows": rows, "seconds": seconds}
        for writer, proven in sorted(log.positions.items())
        for rows, seconds in [lacking.get(writer, (0, None))]
    ]  # fmt: skip


def _worst_lag(lag: list[dict[str, Any]]) -> dict[str, Any]:
    """For the summary: all rows that the archive lacks, and the age of the oldest; None where it was not asked for."""
    ages = [one["seconds"] for one in lag if one["seconds"] is not None]
    return {
        "archive_lag_rows": sum(one["rows"] for one in lag) if lag else None,
        "archive_lag_seconds": max(ages, default=None),
    }


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
        tables.check_names(rows, fields)
        facts = tables.facts_of(rows).persist()
        stack.callback(facts.unpersist)
        ranked = tables.ranked(facts).persist()
        stack.callback(ranked.unpersist)
        found: dict[str, list[dict[str, Any]]] = {"writers": tables.writers(facts)}
        if not found["writers"]:
            raise ConfigError("there is no row in that range")
        window = int(options.window or _window(found["writers"]))
        work: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "rates": lambda: tables.rates(facts, window),
            "rates_by_size": lambda: tables.rates_by_size(facts, window),
            "rows_per_fact": lambda: tables.rows_per_fact(facts),
            "steps": lambda: tables.steps(ranked),
            "unused_ids": lambda: tables.unused_ids(ranked),
            "row_sizes": lambda: tables.row_sizes(rows),
            "row_size_percentiles": lambda: tables.row_size_percentiles(rows),
            "top_keys": lambda: tables.top_keys(rows, fields, options.top),
        }
        for done, (name, count) in enumerate(work.items(), 1):
            progress("counted tables", done, len(work))
            found[name] = count()
    return found


def _window(writers: list[dict[str, Any]]) -> int:
    """Seconds, so that a page shows them well, and the tables of rates have a bearable number of rows."""
    times = [one[name] for one in writers for name in ("first_time", "last_time") if one[name] is not None]
    largest: dict[str, int] = {}
    for one in writers:
        largest[one["stream"]] = max(largest.get(one["stream"], 0), one["most_rows_per_fact"])
    sizes = sum((most - 1).bit_length() + 1 for most in largest.values())
    count = max(1, min(WINDOWS, tables.MOST_ROWS // max(len(writers), sizes) - 1))
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


def sample_table(samples: tables.Samples) -> Any:
    """A row for each."""
    parts = []
    for key, values in sorted(samples.items()):
        names = [pyarrow.repeat(name, len(values)) for name in key]
        parts.append(pyarrow.Table.from_arrays([*names, tables.floats(values)], schema=SAMPLES))
    return pyarrow.concat_tables(parts) if parts else SAMPLES.empty_table()


def _write_table(root: Root, name: str, table: Any) -> None:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    root.replace(f"{name}.parquet", sink.getvalue().to_pybytes())
