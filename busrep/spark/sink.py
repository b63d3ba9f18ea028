"""The format ``busrep`` to write to: rows of a query become facts of a declared writer, each once.

::

    df.writeStream.format("busrep").options(store="postgresql://app@db/app", stream="orders", writer="spark-orders",
        redis="redis://localhost", name="shop").option("checkpointLocation", "/data/checkpoint").start()

Each row is a fact, in the order of (partition, place in it), or of ``orderBy``. What is written once is a batch of a
query: by the checkpoint's own identity, or by the option ``query``; of ``df.write``, by the option ``batch``, without
which each run writes anew.

Executors stage rows, the driver makes facts of them: see sink_commit.py, and staging.py of the stores.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from busrep.errors import BusrepError, ConfigError, MissingExtra
from busrep.spark.sink_commit import commit
from busrep.spark.sink_options import SinkOptions, read_options
from busrep.spark.sink_rows import Encoder, check_columns
from busrep.spark.staging import StagedBatch
from busrep.spark.staging_store import Stage, StagingPlace, open_staging_store
from busrep.streams import Registry

try:
    from pyspark import TaskContext
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

log = logging.getLogger("busrep.spark")

# What Spark tells the tasks of a streaming query, in their local properties.
QUERY_ID, BATCH_ID, RUN_ID = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"


@attrs.frozen
class Task:
    """A task as Spark sees it. ``checkpoint``: its identity; ``run``: of the query since its last start."""

    part: int
    batch: int = 0
    checkpoint: str = ""
    run: str = ""


@attrs.frozen
class Staged(WriterCommitMessage):
    """What a task has staged, for the driver."""

    query: str
    attempt: str
    rows: int
    task: Task


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of ``df.writeStream``. Raises ConfigError."""
    if overwrite:
        raise ConfigError("facts are never replaced: use the output mode append, or update")
    return StreamSink(*_checked(read_options(options, job=None), schema))


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of ``df.write``. Raises ConfigError."""
    if overwrite:
        raise ConfigError("facts are never replaced: use df.write.mode('append')")
    return BatchSink(*_checked(read_options(options, job=uuid.uuid4().hex), schema))


def _checked(options: SinkOptions, schema: StructType) -> tuple[SinkOptions, bool]:
    return options, check_columns(options.definition(), schema.fieldNames(), options.order_by)


class _Sink:
    """What both writers do. Pickled to the executors, and perhaps to the process that commits."""

    def __init__(self, options: SinkOptions, generic: bool) -> None:
        self._options, self._generic = options, generic

    def _task(self) -> Task:
        raise NotImplementedError

    def _query(self, task: Task) -> str:
        return self._options.query or task.checkpoint

    def write(self, iterator: Iterator[Any]) -> Staged:
        """Stage the rows of a partition. Errors: RowError, ConfigError, Unavailable."""
        options, task = self._options, self._task()
        stream = options.definition()
        encoder = Encoder(stream, self._generic, options.order_by)
        place = StagingPlace(self._query(task), task.batch, task.part, uuid.uuid4().hex)
        rows, stage = 0, None
        try:
            for batch in iterator:
                keyed = encoder.encode(batch)
                if keyed:
                    stage = stage or _stage(options, place)
                    stage.add(keyed)
                    rows += len(keyed)
        finally:
            if stage is not None:
                stage.close()
        return Staged(place.query, place.attempt, rows, task)

    def _commit(self, messages: Sequence[WriterCommitMessage | None], number: int) -> None:
        staged = [message for message in messages if isinstance(message, Staged)]
        if not staged or len(staged) < len(messages):
            raise ConfigError(f"Spark gave {len(staged)} messages of {len(messages)} tasks: nothing was written")
        first = staged[0]
        commit(
            self._options,
            StagedBatch(
                first.query, number, first.task.checkpoint, first.task.run,
                attempts=[one.attempt for one in staged if one.rows], rows=sum(one.rows for one in staged),
                once=self._options.once, ordered=bool(self._options.order_by), first=self._options.first_batch,
            ),
        )  # fmt: skip

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Forget what was staged: of these tasks alone, for a query may run twice by mistake. Facts stay facts."""
        options = self._options
        staged = [message for message in messages if isinstance(message, Staged)]
        query = options.query if options.once else next((one.query for one in staged), None)
        if query is None:
            return
        try:
            store = open_staging_store(options.store, Registry([options.definition()]))
            with contextlib.closing(store):
                store.open()
                store.clear(query, None if options.once else [one.attempt for one in staged])
        except BusrepError as error:  # why Spark aborts is what matters; the next commit removes them
            log.warning("what was staged for query %s stays for now: %s", query, error)


def _stage(options: SinkOptions, place: StagingPlace) -> Stage:
    return open_staging_store(options.store, Registry([options.definition()])).stage(place)


class BatchSink(_Sink, DataSourceArrowWriter):
    """Writes one batch."""

    def __init__(self, options: SinkOptions, generic: bool) -> None:
        super().__init__(options, generic)
        self._run = (
            uuid.uuid4().hex
        )  # of this job: one of the same name begins anew, whoever had the writer's name since

    def _task(self) -> Task:
        context = TaskContext.get()
        return Task(0 if context is None else context.partitionId(), run=self._run)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make facts of what was staged. Errors: see `sink_commit.commit`."""
        self._commit(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged."""
        self._abort(messages)


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """Writes the batches of a query."""

    def _task(self) -> Task:
        context = TaskContext.get()
        told = None if context is None else [context.getLocalProperty(name) for name in (QUERY_ID, BATCH_ID, RUN_ID)]
        if context is None or told is None or None in told:
            raise ConfigError("Spark does not tell this task which query and batch it is of: pyspark 4.2 or newer does")
        checkpoint, batch, run = map(str, told)
        return Task(context.partitionId(), int(batch), checkpoint, run)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Make facts of what was staged. Errors: see `sink_commit.commit`."""
        self._commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Forget what was staged."""
        self._abort(messages)
