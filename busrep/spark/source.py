"""The format ``busrep``: a Python data source of Spark's, for batches and streams.

::

    spark.read.format("busrep").options(store="postgresql://app@db/shop", stream="orders").load()
    spark.readStream.format("busrep").options(store=..., stream="orders", maxRowsPerTrigger=100_000).load()

Its options are those of `busrep.spark.options.Options`. Spark makes these objects in processes of its own: one that
plans, one for each query that follows a stream, and the executors', in which ``read`` runs without anything of the
driver's.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from busrep.errors import ConfigError, MissingExtra
from busrep.spark import secrets
from busrep.spark.columns import Shape, generic_shape, typed_shape
from busrep.spark.databases import Question
from busrep.spark.filters import Pushed
from busrep.spark.following import Follower, resolved, selected
from busrep.spark.lag import shown
from busrep.spark.losses import Losses
from busrep.spark.offsets import Offset
from busrep.spark.options import Options, read_options, stream_of
from busrep.spark.planning import partitions, ranges
from busrep.spark.reading import read
from busrep.spark.table import Table, absolute
from busrep.streams import Stream

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

# The process in which Spark pushes filters down. Where it does not, a reader with pushFilters is refused.
_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


class BusrepSource(DataSource):
    """The format ``busrep``."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "busrep"

    def schema(self) -> StructType:
        """The generic columns, or those of the stream's row class. Raises ConfigError."""
        return _shape(read_options(self.options)).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a range. Raises ConfigError."""
        options = read_options(self.options, streaming=False)
        kind = FilteringReader if _pushes() else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Follows a stream. Raises ConfigError."""
        return StreamReader(read_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Writes facts."""
        from busrep.spark import sink

        return sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Writes facts, micro-batch by micro-batch."""
        from busrep.spark import sink

        return sink.stream_writer(self.options, schema, overwrite)


def _pushes() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHING in sys.modules or getattr(spec, "name", None) == _PUSHING


def _stream(options: Options) -> Stream[Any]:
    return stream_of(options.streams, options.stream)


def _shape(options: Options) -> Shape:
    whole = generic_shape()
    if options.typed:
        whole = typed_shape(_stream(options), metadata=options.include_metadata)
    return whole if options.columns is None else whole.subset(options.columns, "option 'columns'")


def _asked_for(options: Options, schema: StructType) -> Shape:
    """The columns of a schema, which the user may have given: some of ours, of the same types. Raises ConfigError."""
    shape = _shape(options).subset(schema.fieldNames(), "the schema given")
    for ours, given in zip(shape.schema().fields, schema.fields, strict=True):
        if ours.dataType != given.dataType:
            raise ConfigError(
                f"column {given.name!r} is {ours.dataType.simpleString()}, not {given.dataType.simpleString()}: cast "
                "it behind the source"
            )
    return shape


@functools.cache
def _keep_imports() -> None:
    """Once in a worker: Spark collects garbage behind each task, and looks at all that was ever imported, for 30 ms."""
    gc.collect()
    gc.freeze()


class _Reader:
    """What both kinds of readers are; the executors' copy has no more than this."""

    def __init__(self, options: Options, schema: StructType) -> None:
        stream = _stream(options)
        self._options, self._schema = options, schema
        self._question = Question(
            absolute(secrets.resolve(options.store, options.password_file)), options.stream,
            options.streams if stream.table is not None else None, _asked_for(options, schema),
            options.fail_on_data_loss,
        )  # fmt: skip

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        """Arrow record batches of a partition; none of what Spark passes when there is no partition."""
        value = None if partition is None else partition.value
        if value is None:
            return
        epoch, spans = value
        yield from read(self._question, to_arrow_schema(self._schema, timezone="UTC"), epoch, spans)
        _keep_imports()

    def _partitions(self, epoch: str, spans: Sequence[Any]) -> list[InputPartition]:
        options = self._options
        return [InputPartition((epoch, one)) for one in partitions(spans, options.partitions, options.min_partitions)]


class BatchReader(_Reader, DataSourceReader):
    """Reads what lies between two maps of positions, both proven when the query is planned."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._question = attrs.evolve(self._question, from_table=True)

    def partitions(self) -> list[InputPartition]:
        """Slices of the range. Raises ConfigError, RangePruned, WriterGone, Unavailable."""
        options = self._options
        with Table(self._question.url, _stream(options)) as table:
            log = table.log()
            losses = Losses(options.stream, fail=options.fail_on_data_loss)
            available = selected(log, options, losses)
            start = resolved(options.starting, "startingPositions", log, available, table)
            end = resolved(options.ending, "endingPositions", log, available, table)
            found = ranges(start, end, log.floors)
            if options.starting.kind == "map":
                losses.pruned(found.lost, dict(log.floors))
        return self._partitions(log.epoch, self._filtered(found.spans))

    def _filtered(self, spans: Sequence[Any]) -> Sequence[Any]:
        return spans


class FilteringReader(BatchReader):
    """The same, where Spark pushes filters down."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        known = _stream(options).table is None
        self._pushed = Pushed(options.stream, _shape(options), times_known=known)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take up what the table can answer."""
        rest = list(self._pushed.push(filters))
        self._question = attrs.evolve(self._question, times=tuple(self._pushed.times))
        return rest

    def _filtered(self, spans: Sequence[Any]) -> Sequence[Any]:
        return self._pushed.spans(spans)


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a stream from its checkpoint on. Connects when first asked something, in the query's own process."""

    _follower: Follower | None = None

    def _following(self) -> Follower:
        if self._follower is None:
            options, stream = self._options, _stream(self._options)
            losses = Losses(options.stream, fail=options.fail_on_data_loss)
            self._follower = Follower(options, Table(self._question.url, stream), losses, _listener(options, stream))
        return self._follower

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return self._following().initial().to_dict()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._following().latest(Offset.from_dict(start), most).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """``maxRowsPerTrigger``."""
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the stream is known to be, and the query's lag, for the query's progress: see busrep/spark/lag.py."""
        found = self._following().report()
        return None if found is None else {**found.to_dict(), "lag": shown(self._following().lag())}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is there now is all."""
        self._following().prepare()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[InputPartition]:
        """Slices of a batch."""
        until = Offset.from_dict(end)
        return self._partitions(until.epoch, self._following().spans(Offset.from_dict(start), until))

    def stop(self) -> None:
        """The query has ended."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None


def _listener(options: Options, stream: Stream[Any]) -> Any:
    if options.redis is None or options.name is None:
        return None
    from busrep.spark.listening import Listener

    url = secrets.with_redis_password(options.redis, options.redis_password_file)
    return Listener(url, options.name, options.stream, channel=stream.channel)
