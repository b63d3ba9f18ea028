"""The column ``fields`` of an archive, a struct of the row class's fields; and archives as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra
from busrep.spark.archive_rows import SCHEMA, read_file
from busrep.spark.archive_store import Root, data_path
from busrep.spark.archived import NO_DATE, Archive, DataFile, data_folder
from busrep.spark.columns import arrow_column, decode, fields_of
from busrep.spark.failures import is_sparks
from busrep.spark.mapped import map_in_arrow
from busrep.spark.options import declared_stream
from busrep.streams import Stream

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise MissingExtra("spark", "an archive in Parquet files") from None

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

ROWS = "writer string, token bigint, index int, row string, committed_at timestamp"
# Tasks that read an archive, at most, where Spark cannot do it by itself.
READERS = 64


class Fields:
    """Adds the column to batches. Everything in it may be null: a file of an older row class has no later fields.

    Raises ConfigError for a stream without a row class.
    """

    def __init__(self, stream: Stream[Any]) -> None:
        from pyspark.sql.pandas.types import to_arrow_type

        self._stream, self._fields = stream.name, fields_of(stream)
        types = [to_arrow_type(field.kind.spark_type(), timezone="UTC") for field in self._fields]
        self.type = pyarrow.struct(
            [(field.name, kind) for field, kind in zip(self._fields, types, strict=True)]  # all nullable
        )
        self.schema = SCHEMA.append(pyarrow.field("fields", self.type))

    def added(self, batch: Any) -> Any:
        """The batch with the column at its end. Raises RowError for a row that the class does not take."""
        if not batch.num_rows:
            return pyarrow.RecordBatch.from_arrays(
                [pyarrow.array([], one.type) for one in self.schema], schema=self.schema
            )
        values = decode(
            self._stream, self._fields, range(len(self._fields)), batch.column("token"), batch.column("row")
        )
        columns = [
            arrow_column(self._stream, field, column, self.type.field(at).type)
            for at, (field, column) in enumerate(zip(self._fields, values, strict=True))
        ]
        struct = pyarrow.StructArray.from_arrays(columns, fields=list(self.type))
        return pyarrow.RecordBatch.from_arrays([*batch.columns, struct], schema=self.schema)


def dataframe(
    spark: SparkSession, root: Root, archive: Archive, streams: str | None = None, *, fields: bool = True
) -> DataFrame:
    """The rows of an archive: stream, writer, token, index, row, committed_at, date, and ``fields``.

    ``fields`` are those of the files where they were archived with ``--streams``; a field that a file does not have,
    because it was written by an older version of the row class, is null. With ``streams`` (MODULE:NAME) they are made
    anew of the rows instead, by the class as it is now, with its defaults; without ``fields`` there are none. Raises
    ConfigError for a damaged archive, and for files in which a field has several types. The files are read later; those
    that a compaction replaces meanwhile stay for its grace period. In an object store that Spark itself cannot read
    tasks read them by pyarrow, without ``fields``, unless they are made anew.
    """
    from pyspark.sql import functions

    paths = [root.spark_path(data_path(archive.stream, file.file)) for _, file in archive.checked().files]
    if not paths:
        frame = spark.createDataFrame([], f"{ROWS}, date date")
    elif not has_file_system(spark, root):
        frame = _by_tasks(spark, root, archive)
    else:
        reader = spark.read.option("basePath", root.spark_path(data_folder(archive.stream)))
        if fields and streams is None:
            frame = _merged(reader, paths, root, archive)
        else:
            frame = reader.schema(f"{ROWS}, date string").parquet(*paths)
        frame = frame.withColumn("date", functions.col("date").cast("date"))
    if streams is not None:
        frame = _made_anew(frame, archive.stream, streams)
    return frame.select(functions.lit(archive.stream).alias("stream"), "*")


def _merged(reader: DataFrameReader, paths: list[str], root: Root, archive: Archive) -> DataFrame:
    try:
        return reader.option("mergeSchema", "true").parquet(*paths)
    except Exception as error:
        if is_sparks(error) and (found := _two_types(root, archive)):
            raise ConfigError(
                f"the archive of stream {archive.stream!r} at {root.shown} cannot be read as one: {found}. With "
                "streams=MODULE:NAME the fields are made anew, of the rows, by the class as it is now; with "
                "fields=False there are none"
            ) from error
        raise


def _two_types(root: Root, archive: Archive) -> str | None:
    """A field that is of one type in a file, and of another in another."""
    seen: dict[str, tuple[str, str]] = {}
    for _, file in archive.files:
        with root.open(data_path(archive.stream, file.file)) as source:
            schema = parquet.read_schema(source)
        for field in schema.field("fields").type if "fields" in schema.names else ():
            kind = str(field.type).replace(" not null", "")
            before, where = seen.setdefault(field.name, (kind, file.file))
            if before != kind:
                return f"the field {field.name!r} is {before} in {where}, and {kind} in {file.file}"
    return None


def has_file_system(spark: SparkSession, root: Root) -> bool:
    """Whether Spark itself, by Hadoop, can read and write there."""
    if root.local:
        return True
    context: Any = spark.sparkContext
    try:
        place = context._jvm.org.apache.hadoop.fs.Path(root.spark_path(""))
        place.getFileSystem(context._jsc.hadoopConfiguration())
    except Exception as error:
        if not is_sparks(error):
            raise
        return False
    return True


def _by_tasks(spark: SparkSession, root: Root, archive: Archive) -> DataFrame:
    stream = archive.stream
    files = [(orjson.dumps(attrs.asdict(file)).decode(),) for _, file in archive.files]

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for text in batch.column(0).to_pylist():
                file = DataFile(**orjson.loads(text))
                day = None if file.date == NO_DATE else date.fromisoformat(file.date)
                for rows in read_file(root, stream, file, SCHEMA.names):
                    days = pyarrow.array([day] * rows.num_rows, pyarrow.date32())
                    yield pyarrow.RecordBatch.from_arrays([*rows.columns, days], [*SCHEMA.names, "date"])

    frame = spark.createDataFrame(files, "file string").repartition(min(len(files), READERS))
    return map_in_arrow(frame, read, f"{ROWS}, date date")


def _made_anew(frame: DataFrame, stream: str, streams: str) -> DataFrame:
    from pyspark.sql import types

    struct = types.StructType()
    for field in fields_of(declared_stream(streams, stream)):
        struct.add(field.name, field.kind.spark_type(), True)
    wanted = ["writer", "token", "index", "row", "committed_at", "date"]

    def add(batches: Iterator[Any]) -> Iterator[Any]:
        fields = Fields(declared_stream(streams, stream))
        for batch in batches:
            rows = pyarrow.RecordBatch.from_arrays(
                [batch.column(name).cast(SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA
            )
            made = fields.added(rows)
            yield pyarrow.RecordBatch.from_arrays(
                [*rows.columns, batch.column("date"), made.column("fields")], [*wanted, "fields"]
            )

    return map_in_arrow(frame.select(*wanted), add, f"{ROWS}, date date, fields {struct.simpleString()}")
