"""What the archive job's tasks do; they run on executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import orjson

from busrep.spark.archive_store import Root
from busrep.spark.options import declared_stream


def writing(
    root: Root, stream: str, number: int, limit: int, declared: str | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does: it writes its batches, and gives their `DataFile`s as JSON. Runs on executors."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        from busrep.spark.archive_rows import SCHEMA, RowFiles
        from busrep.spark.archive_typed import Fields

        fields = None
        if declared is not None and (found := declared_stream(declared, stream)).row_type is not None:
            fields = Fields(found)
        schema = SCHEMA if fields is None else fields.schema
        context: Any = TaskContext.get()
        files = RowFiles(root, stream, "", number, context.partitionId(), limit, schema)
        try:
            for batch in batches:
                plain = pyarrow.RecordBatch.from_arrays(
                    [batch.column(name).cast(SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA
                )
                files.add(plain if fields is None else fields.added(plain))
            done = files.close()
        except BaseException:
            files.abandon()
            raise
        text = orjson.dumps([attrs.asdict(file) for file in done]).decode()
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array([text])], ["files"])

    return write
