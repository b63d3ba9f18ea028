"""The statistics' tables, counted by Spark. Each is small: its rows come to the driver.

A fact's ``time`` is the time of its commit; a *step* is what lies between two facts of a writer, on the axis of tokens
that all writers of the stream share.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from busrep.errors import ConfigError, MissingExtra

try:
    import pyarrow
    from pyspark.sql import Window, functions
    from pyspark.sql.functions import col
except ImportError:
    raise MissingExtra("spark", "statistics on Spark") from None

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Table = list[dict[str, Any]]
Samples = dict[tuple[str, str, str, str], "array[float]"]
"""{(measure, stream, writer, reader): seconds}: 8 bytes each, for there are as many as facts times readers."""

# Tokens whose facts are ranked by one task.
BUCKET = 100_000
# Of the tables whose size depends on the data; a table that has more is an error, not a page that nobody can open.
MOST_ROWS = 200_000


def collected(frame: DataFrame, what: str, advice: str = "take fewer streams (--stream)") -> Table:
    """Its rows. Raises ConfigError for too many."""
    rows = frame.limit(MOST_ROWS + 1).collect()
    if len(rows) > MOST_ROWS:
        raise ConfigError(f"the table of {what} has more than {MOST_ROWS:,} rows: {advice}")
    return [row.asDict() for row in rows]


def facts_of(rows: DataFrame) -> DataFrame:
    """One row a fact: stream, writer, token, time (microseconds since 1970), rows, bytes."""
    return rows.groupBy("stream", "writer", "token").agg(
        functions.min(functions.unix_micros("committed_at")).alias("time"),
        functions.count("*").alias("rows"),
        functions.sum(functions.octet_length("row")).alias("bytes"),
    )


def writers(facts: DataFrame) -> Table:
    """Per stream and writer: what there is."""
    return collected(
        facts.groupBy("stream", "writer")
        .agg(
            functions.count("*").alias("facts"),
            functions.sum("rows").alias("rows"),
            functions.sum("bytes").alias("bytes"),
            functions.min("token").alias("first_token"),
            functions.max("token").alias("last_token"),
            functions.min("time").alias("first_time"),
            functions.max("time").alias("last_time"),
            functions.max("rows").alias("most_rows_per_fact"),
            functions.count_if(col("time").isNull()).alias("facts_without_time"),
        )
        .orderBy("stream", "writer"),
        "writers",
    )


def rates(facts: DataFrame, window: int) -> Table:
    """Per stream, writer and window of so many seconds in which something was committed: facts, rows, bytes."""
    return collected(
        facts.where(col("time").isNotNull())
        .groupBy("stream", "writer", window_of(window).alias("window"))
        .agg(
            functions.count("*").alias("facts"),
            functions.sum("rows").alias("rows"),
            functions.sum("bytes").alias("bytes"),
        )
        .orderBy("window", "stream", "writer"),
        "rates",
        "make the --window longer",
    )


def rates_by_size(facts: DataFrame, window: int) -> Table:
    """Per stream, class of size and window: facts of ``low`` to ``high`` rows that were committed in it, and their
    rows. The classes are 1, 2, 3 to 4, 5 to 8 rows, and so on."""
    place = functions.when(col("rows") == 1, 0).otherwise(power_of_two(col("rows") - 1) + 1).cast("int")
    counted = (
        facts.where(col("time").isNotNull())
        .groupBy("stream", place.alias("place"), window_of(window).alias("window"))
        .agg(functions.count("*").alias("facts"), functions.sum("rows").alias("rows"))
        .orderBy("window", "stream", "place")
    )
    return [
        {"stream": one["stream"], "low": 2**place // 2 + 1, "high": 2**place,
         **{name: one[name] for name in ("window", "facts", "rows")}}
        for one in collected(counted, "rates by size", "make the --window longer")
        for place in [one["place"]]
    ]  # fmt: skip


def window_of(window: int) -> Column:
    """The beginning of the window of so many seconds that ``time`` is in, seconds since 1970."""
    length = functions.lit(1_000_000 * window)
    start = (col("time") - functions.pmod(col("time"), length)) / 1_000_000  # in whole numbers, up to here
    return start.cast("bigint")


def rows_per_fact(facts: DataFrame) -> Table:
    """Per stream and writer: how many facts have so many rows."""
    counted = facts.groupBy("stream", "writer", "rows").agg(functions.count("*").alias("facts"))
    return collected(counted.orderBy("stream", "writer", "rows"), "rows per fact")


def power_of_two(count: Column | str) -> Column:
    """The exponent of the highest power of two in a whole number above 0. A logarithm would miss some."""
    return functions.length(functions.bin(count)) - 1


def row_sizes(rows: DataFrame) -> Table:
    """Per stream: how many rows have ``low`` <= bytes < ``high``, which are powers of the square root of 2."""
    size = functions.greatest(functions.octet_length("row").cast("bigint"), functions.lit(1).cast("bigint"))
    place = power_of_two(size * size)
    counted = rows.groupBy("stream", place.cast("int").alias("place")).agg(functions.count("*").alias("rows"))
    found = collected(counted.orderBy("stream", "place"), "row sizes")
    return [
        {"stream": one["stream"], "low": 2 ** (one["place"] / 2), "high": 2 ** ((one["place"] + 1) / 2),
         "rows": one["rows"]}
        for one in found
    ]  # fmt: skip


def row_size_percentiles(rows: DataFrame) -> Table:
    """Per stream: bytes of a row, p50, p99 and the largest."""
    size = functions.octet_length("row")
    found = functions.percentile_approx(size, [0.5, 0.99])
    return collected(
        rows.groupBy("stream")
        .agg(found[0].alias("p50"), found[1].alias("p99"), functions.max(size).alias("most"))
        .orderBy("stream"),
        "row sizes",
    )


# -- steps -------------------------------------------------------------------------------------------------------


def ranked(facts: DataFrame) -> DataFrame:
    """Stream, writer and token of each fact, and ``rank``: how many tokens of the stream that have a fact are below. In
    two steps, so that no task has to sort all of a stream."""
    bucket = functions.floor(col("token") / BUCKET)
    tokens = facts.select("stream", "token", bucket.alias("bucket")).distinct()
    counts = tokens.groupBy("stream", "bucket").agg(functions.count("*").alias("n"))
    # A row for BUCKET tokens: this one may be sorted by one task.
    before = Window.partitionBy("stream").orderBy("bucket").rowsBetween(Window.unboundedPreceding, -1)
    offsets = counts.select(
        "stream", "bucket", functions.coalesce(functions.sum("n").over(before), functions.lit(0)).alias("offset")
    )
    inside = Window.partitionBy("stream", "bucket").orderBy("token")
    found = facts.withColumn("bucket", bucket).join(functions.broadcast(offsets), ["stream", "bucket"])
    rank = col("offset") + functions.dense_rank().over(inside)
    return found.select("stream", "writer", "token", rank.alias("rank"))


def steps(ranked: DataFrame) -> Table:
    """Per stream, writer and power of two: between how many pairs of the writer's consecutive facts there are from
    ``low`` to ``high`` tokens of ``whose``: ``others``: with facts of other writers; ``nobody``: without any fact, as
    rollbacks leave them, and IDs that moved a position alone. ``tokens``: how many they are together. ``ranked``: see
    the function of that name."""
    behind = Window.partitionBy("stream", "writer").orderBy("token")
    paired = ranked.select(
        "stream",
        "writer",
        (col("token") - functions.lag("token").over(behind) - 1).alias("skipped"),
        (col("rank") - functions.lag("rank").over(behind) - 1).alias("others"),
    ).where(col("skipped").isNotNull())
    kinds = {"others": col("others"), "nobody": col("skipped") - col("others")}
    parts = [
        paired.select("stream", "writer", functions.lit(whose).alias("whose"), count.alias("count"))
        for whose, count in kinds.items()
    ]
    place = functions.when(col("count") == 0, -1).otherwise(power_of_two("count"))
    counted = (
        reduce(lambda one, other: one.union(other), parts)
        .groupBy("stream", "writer", "whose", place.cast("int").alias("place"))
        .agg(functions.count("*").alias("steps"), functions.sum("count").alias("tokens"))
        .orderBy("stream", "writer", "whose", "place")
    )
    return [
        {**{name: one[name] for name in ("stream", "writer", "whose")}, "low": 2 ** max(place, 0) if place >= 0 else 0,
         "high": 2 ** (place + 1) - 1 if place >= 0 else 0, "steps": one["steps"], "tokens": one["tokens"]}
        for one in collected(counted, "steps")
        for place in [one["place"]]
    ]  # fmt: skip


def unused_ids(ranked: DataFrame) -> Table:
    """Per stream, and per stream and writer: how many IDs between its first and its last fact have no fact of any
    writer, and their ``share`` in these and its facts. ``writer`` is empty for all writers of the stream together.
    ``ranked``: see the function of that name.

    An ID without a fact does not tell who took it from the sequence. So a writer's share is an upper bound of what it
    has rolled back, unless ``writers``, how many the stream has, is 1.
    """
    counted = (
        ranked.rollup("stream", "writer")
        .agg(
            functions.count_distinct("token").alias("facts"),
            functions.min("token").alias("first_token"),
            functions.max("token").alias("last_token"),
            (functions.max("rank") - functions.min("rank") + 1).alias("used"),
        )
        .where(col("stream").isNotNull())
        .orderBy("stream", functions.asc_nulls_first("writer"))
    )
    found = collected(counted, "unused IDs")
    writers_ = Counter(one["stream"] for one in found if one["writer"] is not None)
    return [
        {**{name: one[name] for name in ("stream", "facts", "first_token", "last_token")},
         "writer": one["writer"] or "", "writers": writers_[one["stream"]], "unused": unused,
         "share": unused / (unused + one["facts"])}
        for one in found
        for unused in [one["last_token"] - one["first_token"] + 1 - one["used"]]
    ]  # fmt: skip


# -- keys --------------------------------------------------------------------------------------------------------


def key_of(field: str | None) -> Column:
    """A field of the rows, as a text: of an array by its place, of an object by its name. Without: the first field; of
    what is neither, the row itself."""
    if field is not None:
        path = f"$[{field}]" if field.isdecimal() else f"$['{field}']"
        return functions.get_json_object("row", path)
    first = functions.get_json_object("row", "$[0]")
    values = functions.map_values(functions.from_json("row", "map<string,string>"))
    return functions.coalesce(first, functions.get(values, functions.lit(0)), col("row"))


def check_names(rows: DataFrame, fields: Mapping[str, str | None]) -> None:
    """Raises ConfigError when the key is a field's name, and there are rows without names."""
    named = [stream for stream, field in fields.items() if field is not None and not field.isdecimal()]
    if named:
        arrays = rows.where(col("stream").isin(named) & functions.ltrim("row").startswith("["))
        for one in arrays.select("stream").limit(1).collect():
            raise ConfigError(
                f"--key {fields[one[0]]}: rows of stream {one[0]!r} are arrays, whose fields have no names in them: "
                "pass --streams MODULE:NAME, where the application declares the stream with its row class, or say "
                "--key with the field's place, from 0"
            )


def top_keys(rows: DataFrame, fields: Mapping[str, str | None], top: int) -> Table:
    """Per stream: the ``top`` keys that most rows have, and their share of all; ``keys``: how many keys there are."""
    kinds = set(fields.values())
    key = functions.lit(None).cast("string") if len(kinds) > 1 else key_of(*kinds)
    if len(kinds) > 1:
        for name, field in fields.items():
            key = functions.when(col("stream") == name, key_of(field)).otherwise(key)
    counted = rows.groupBy("stream", key.alias("key")).agg(functions.count("*").alias("rows")).persist()
    try:
        wholes = counted.groupBy("stream").agg(functions.count("*").alias("keys"), functions.sum("rows").alias("rows"))
        whole = {one["stream"]: one for one in collected(wholes, "streams")}
        # Of each task's keys no more than ``top`` are sorted and sent: Spark knows this form.
        order = Window.partitionBy("stream").orderBy(functions.desc("rows"), "key")
        ranked_ = counted.withColumn("rank", functions.row_number().over(order)).where(col("rank") <= top)
        found = collected(ranked_.orderBy("stream", "rank"), "keys")
    finally:
        counted.unpersist()
    return [
        {**one, "share": one["rows"] / whole[one["stream"]]["rows"], "keys": whole[one["stream"]]["keys"]}
        for one in found
    ]


# -- what was measured while listening ---------------------------------------------------------------------------


def percentiles(samples: Samples) -> Table:
    """Per measure, stream, writer and reader, and of all together (stream, writer, reader empty): seconds."""
    found = []
    for measure in sorted({key[0] for key in samples}):
        its = {key: floats(values) for key, values in sorted(samples.items()) if key[0] == measure}
        for key, values in [((measure, "", "", ""), pyarrow.concat_arrays(list(its.values()))), *its.items()]:
            names = dict(zip(("measure", "stream", "writer", "reader"), key, strict=True))
            found.append({**names, "count": len(values), **dict(_quantiles(values.sort()))})
    return found


def floats(values: array[float]) -> Any:
    """The same numbers as an Arrow array, not copied."""
    return pyarrow.Array.from_buffers(pyarrow.float64(), len(values), [None, pyarrow.py_buffer(values)])


def _quantiles(values: Any) -> Iterator[tuple[str, float]]:
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        # The nearest rank: a value that was measured.
        place = min(len(values) - 1, max(0, -(-int(share * 1000) * len(values) // 1000) - 1))
        yield name, values[place].as_py()
    yield "most", values[-1].as_py()
