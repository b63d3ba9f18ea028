"""An archive as a Delta table, too: beside its files lies a Delta log, which says what the manifests say.

The manifests stay what makes a batch exist; the log follows them. It is brought up to them after every batch, at the
start of a job, and by compaction before it deletes anything, so what dies in between does no harm. `deltalake` writes
it, in an object store on condition that nobody else did, so it needs neither Spark nor jars; who reads the table may
be Spark with Delta's jars, or anything else that knows Delta.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import orjson

from busrep.errors import ConfigError, MissingExtra, Unavailable
from busrep.spark.archive_objects import first_line, options_of, plain
from busrep.spark.archive_store import Root, data_path, load
from busrep.spark.archived import NO_DATE, Archive, DataFile, Manifest, data_folder

# Another job, that follows the same manifests, may be faster.
ATTEMPTS = 5


def check_delta() -> None:
    """Raises MissingExtra."""
    try:
        import deltalake  # noqa: F401
    except ImportError:
        raise MissingExtra("delta", "an archive that is a Delta table") from None


def is_delta(root: Root, stream: str) -> bool:
    """Whether there is a Delta log beside the files."""
    return bool(root.names(f"{data_folder(stream)}/_delta_log"))


def follow(root: Root, stream: str) -> int:
    """Bring the log up to the manifests; how many files came or went. Raises ConfigError, Unavailable, MissingExtra."""
    check_delta()
    from deltalake import exceptions

    error: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            return _follow(root, stream)
        except (exceptions.CommitFailedError, exceptions.TableNotFoundError) as failed:
            error = failed  # another job has committed meanwhile: what is there now is looked at again
        except (exceptions.DeltaError, OSError) as failed:
            raise Unavailable(f"the Delta log of {root.shown}, stream {stream!r}", first_line(failed)) from None
    raise Unavailable(f"the Delta log of {root.shown}, stream {stream!r}", first_line(error or OSError("busy")))


def _follow(root: Root, stream: str) -> int:
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import create_table_with_add_actions

    # The table first: what it has by now the manifests have, too, so that nothing is taken for gone that has just come.
    place, options = _place(root, stream), options_of(root.url)
    known: set[str] = set()
    table, schema = None, None
    if is_delta(root, stream):
        table = DeltaTable(place, storage_options=options)
        known, schema = _paths(table), _arrow(table.schema())
    archive = load(root, stream).checked()
    wanted = {file.file: (manifest, file) for manifest, file in archive.files}
    added, gone = wanted.keys() - known, known - wanted.keys()
    if not wanted or not (added or gone):
        return 0
    merged = Schema.from_arrow(_merged(root, archive, sorted(added), schema))
    actions = [_action(*wanted[name], new=not gone) for name in sorted(added)]
    if table is None:
        create_table_with_add_actions(place, merged, actions, "error", ["date"], storage_options=options)
        return len(added)
    if merged != table.schema():
        table.alter.add_columns(merged.fields)
    table.create_write_transaction([*actions, *map(_removal, sorted(gone))], "append", merged, ["date"])
    return len(added) + len(gone)


def _place(root: Root, stream: str) -> str:
    if root.local:
        return root.path(data_folder(stream))
    return plain(root.below(data_folder(stream)).url)


def _paths(table: Any) -> set[str]:
    import pyarrow

    return set(pyarrow.table(table.get_add_actions(flatten=True)).column("path").to_pylist())


def _arrow(schema: Any) -> Any:
    import pyarrow

    return pyarrow.schema(schema.to_arrow())


def _action(manifest: Manifest, file: DataFile, *, new: bool) -> Any:
    """``new``: whether the rows are; those of a compaction are not."""
    from deltalake.transaction import AddAction

    written = int(datetime.fromisoformat(manifest.written_at).timestamp() * 1000)
    stats = {
        "numRecords": file.rows, "minValues": {"token": file.min_token}, "maxValues": {"token": file.max_token},
        "nullCount": {"token": 0},
    }  # fmt: skip
    day = None if file.date == NO_DATE else file.date
    return AddAction(file.file, file.bytes, {"date": day}, written, new, orjson.dumps(stats).decode())


def _removal(name: str) -> Any:
    from deltalake.transaction import RemoveAction

    day = name.partition("/")[0].removeprefix("date=")
    return RemoveAction(
        path=name, partition_values={"date": None if day == NO_DATE else day}, data_change=False,
        deletion_timestamp=int(time.time() * 1000),
    )  # fmt: skip


# -- columns --------------------------------------------------------------------------------------------------


def _merged(root: Root, archive: Archive, names: Iterable[str], schema: Any) -> Any:
    """The table's schema, with the fields that these files have more: of row classes that have grown."""
    import pyarrow
    from pyarrow import parquet

    for name in names:
        with root.open(data_path(archive.stream, name)) as source:
            found = parquet.read_schema(source).remove_metadata()
        try:
            schema = found.append(pyarrow.field("date", pyarrow.date32())) if schema is None else both(schema, found)
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"stream {archive.stream!r}: {name} cannot be in one Delta table with the files before it: {error}"
            ) from None
    return schema


def both(left: Any, right: Any) -> Any:
    """A schema, or a struct's fields, with all fields of both. Raises ArrowTypeError for one of two types."""
    import pyarrow

    fields = {field.name: field for field in left}
    for field in right:
        before = fields.setdefault(field.name, field)
        if pyarrow.types.is_struct(before.type) and pyarrow.types.is_struct(field.type):
            inner = pyarrow.struct(both(list(before.type), list(field.type)))
            fields[field.name] = pyarrow.field(field.name, inner)
        elif before.type != field.type:
            raise pyarrow.ArrowTypeError(f"{field.name} was {before.type}, and is {field.type}")
    return pyarrow.schema(fields.values()) if isinstance(left, pyarrow.Schema) else list(fields.values())
