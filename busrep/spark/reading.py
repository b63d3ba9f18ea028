"""Reading a partition, on an executor: its spans from the database, in Arrow batches.

One connection a task, and on it one snapshot of the database, in which the epoch and the floors are looked at before
anything is read: what a partition yields is complete, or it is an error. Rows come in batches of some MiB, each passed
on before the next is read, so memory does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from busrep.errors import MissingExtra, RowError, Unavailable
from busrep.spark.columns import arrow_column, decode
from busrep.spark.databases import Columns, Database, Question, database_of
from busrep.spark.losses import Losses
from busrep.spark.planning import Span
from busrep.stores.snapshots import LogState

try:
    import pyarrow
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

# Seconds that a task waits for a replica which is behind the one that the driver asked.
REPLICA_WAIT = 30.0
REPLICA_LOOK = 0.2


def read(question: Question, schema: Any, epoch: str, spans: Sequence[Span]) -> Iterator[Any]:
    """The rows of these spans, in order, as Arrow record batches of the Arrow ``schema``.

    Raises LogReplaced, OlderTable or RangePruned for what is gone, unless the query goes on without; Unavailable;
    RowError.
    """
    losses = Losses(question.stream, fail=question.fail_on_data_loss)
    with contextlib.closing(database_of(question)) as database:
        log = _proven_log(database, spans)
        if log.epoch != epoch:
            losses.replaced(epoch, log.epoch)
            return
        for span in spans:
            proven = log.positions.get(span[0], 0)
            if question.from_table and proven < span[2]:  # on a replica it was waited for
                losses.older(span[0], span[2], proven)
            if log.floors.get(span[0], 0) > span[1]:
                losses.pruned([(span[0], span[1], min(span[2], log.floors[span[0]]))], dict(log.floors))
            for columns in database.facts(span):
                yield _batch(question, schema, span[0], columns)


def _proven_log(database: Database, spans: Sequence[Span]) -> LogState:
    """The log's state in the snapshot that is read from now on; on a replica one that has all of the spans."""
    late = time.monotonic() + REPLICA_WAIT
    while True:
        log = database.begin()
        behind = [writer for writer, _, upto in spans if log.replica and log.positions.get(writer, 0) < upto]
        if not behind:
            return log
        if time.monotonic() > late:
            raise Unavailable(
                "the replica", f"it has been behind by more than {REPLICA_WAIT:g} s (writer {behind[0]!r})"
            )
        database.end()
        time.sleep(REPLICA_LOOK)


def _batch(question: Question, schema: Any, writer: str, columns: Columns) -> Any:
    """A record batch of the query's columns. Raises RowError, which tells where the row is."""
    try:
        return pyarrow.RecordBatch.from_arrays(_arrays(question, schema, writer, columns), schema=schema)
    except RowError as error:
        raise _located(error, question, schema, writer, columns) from None


def _located(error: RowError, question: Question, schema: Any, writer: str, columns: Columns) -> RowError:
    """The error of the first row that is none: columns are made of all rows at once, without a look at each."""
    first, count = 0, len(columns["token"])
    while count > 1:  # of these rows one is bad
        half = count // 2
        try:
            _arrays(question, schema, writer, _slice(columns, first, half))
            first, count = first + half, count - half
        except RowError:
            count = half
    one = _slice(columns, first, 1)
    try:
        _arrays(question, schema, writer, one)
    except RowError as found:
        token = f"token {one['token'][0].as_py()}"
        where = found.field if found.field.startswith(token) else f"{token}, {found.field}"
        return RowError(found.stream, where, found.reason, one["row"][0].as_py())
    return error  # of no single row


def _slice(columns: Columns, first: int, count: int) -> Columns:
    return {name: values.slice(first, count) for name, values in columns.items()}


def _arrays(question: Question, schema: Any, writer: str, columns: Columns) -> list[Any]:
    count = len(columns["token"])
    constants = {"stream": question.stream, "writer": writer}
    shape = question.shape
    wanted = [source for _, source in shape.columns if isinstance(source, int)]
    fields: dict[int, list[Any]] = {}
    if wanted:
        decoded = decode(question.stream, shape.fields, wanted, columns["token"], columns["row"])
        fields = dict(zip(wanted, decoded, strict=True))
    arrays = []
    for (_, source), kind in zip(shape.columns, schema.types, strict=True):
        if isinstance(source, int):
            arrays.append(arrow_column(question.stream, shape.fields[source], fields.pop(source), kind))
        elif source in constants:
            arrays.append(pyarrow.repeat(pyarrow.scalar(constants[source], kind), count))
        elif source in columns:
            arrays.append(columns[source].cast(kind))
        else:  # an application's table does not tell when a row was committed
            arrays.append(pyarrow.nulls(count, kind))
    return arrays
