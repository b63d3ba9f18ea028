"""Rows of a stream between two maps of positions, of the table or of an archive, as DataFrames for jobs.

Both have the columns `COLUMNS`, and no order. What they give is all that lies between, or reading fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import ConfigError
from busrep.spark import secrets
from busrep.spark.archive_rows import DamagedFile, read_file
from busrep.spark.archive_store import Root
from busrep.spark.archived import Archive, DataFile
from busrep.spark.batches import within
from busrep.spark.mapped import map_in_arrow
from busrep.spark.options import given_to, stream_of
from busrep.spark.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TYPES = {
    "stream": "string", "writer": "string", "token": "bigint", "index": "int", "row": "string",
    "committed_at": "timestamp",
}  # fmt: skip
COLUMNS = ("writer", "token", "index", "row")

# Files are read by at most so many tasks at a time.
MOST_TASKS = 1000


def schema_of(columns: Sequence[str]) -> str:
    """As Spark reads it."""
    return ", ".join(f"{name} {TYPES[name]}" for name in columns)


@attrs.frozen(kw_only=True)
class FromTable:
    """A stream in a table, as a job's options name it; ``store`` without a password."""

    store: str
    password_file: str | None
    streams: str | None
    stream: str

    def table(self) -> Table:
        """For the driver's questions. Raises ConfigError."""
        return Table(secrets.resolve(self.store, self.password_file), stream_of(self.streams, self.stream))

    def rows(
        self, spark: SparkSession, start: Mapping[str, int], end: Mapping[str, int], partitions: int | None = None,
        columns: Sequence[str] = COLUMNS,
    ) -> DataFrame:  # fmt: skip
        """The rows with start < token <= end, per writer of ``end``; both are proven. They are read later, and fail
        then with RangePruned, LogReplaced, Unavailable. ``columns``: some of `TYPES`."""
        end = {writer: at for writer, at in end.items() if at > start.get(writer, 0)}
        if not end:
            return spark.createDataFrame([], schema_of(columns))
        given = {
            "store": self.store, "stream": self.stream, "passwordFile": self.password_file, "streams": self.streams,
            "typed": "false", "partitions": partitions,
            "startingPositions": orjson.dumps({writer: start.get(writer, 0) for writer in end}).decode(),
            "endingPositions": orjson.dumps(end).decode(),
        }  # fmt: skip
        return given_to(spark.read.format("busrep"), given).load().select(*(f"`{name}`" for name in columns))


def rows_of_archive(
    spark: SparkSession, root: Root, archive: Archive, start: Mapping[str, int], end: Mapping[str, int],
    columns: Sequence[str] = COLUMNS,
) -> DataFrame:  # fmt: skip
    """The rows of an archive with start < token <= end, per writer of ``end``. Each file that may have some is read as
    a whole, and checked against its manifest: reading fails with ConfigError for a damaged one. ``columns``: some of
    `TYPES` but stream, writer and token among them. Raises ConfigError for a damaged archive."""
    schema = schema_of(columns)
    end = {writer: at for writer, at in end.items() if at > start.get(writer, 0)}
    lowest = min((start.get(writer, 0) for writer in end), default=0)
    highest = max(end.values(), default=0)
    files = [file for _, file in archive.checked().files if file.max_token > lowest and file.min_token <= highest]
    if not end or not files:
        return spark.createDataFrame([], schema)
    texts = [(orjson.dumps(attrs.asdict(file)).decode(),) for file in files]
    entries = spark.createDataFrame(spark.sparkContext.parallelize(texts, min(len(texts), MOST_TASKS)), "file string")
    return map_in_arrow(entries, _reading(root, archive.stream, dict(start), end, tuple(columns)), schema)


def _reading(
    root: Root, stream: str, start: Mapping[str, int], end: Mapping[str, int], columns: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does with the files that it is given. Runs on executors."""

    def read(entries: Iterator[Any]) -> Iterator[Any]:
        for entry in entries:
            for text in entry.column(0).to_pylist():
                file = DataFile(**orjson.loads(text))
                try:
                    for batch in read_file(root, stream, file, columns):
                        yield within(batch, start, end).select(columns)
                except DamagedFile as error:
                    raise ConfigError(
                        f"the archive at {root.shown} is damaged: {file.file} of stream {stream!r}: {error}. 'busrep "
                        "pipeline audit' says what is lost"
                    ) from None
                except FileNotFoundError:
                    raise ConfigError(
                        f"the archive at {root.shown} has lost {file.file} of stream {stream!r}. Was it compacted "
                        "meanwhile, with too short a grace period? Then start again; else 'busrep pipeline audit' says "
                        "what is lost"
                    ) from None

    return read
