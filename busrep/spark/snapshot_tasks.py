"""What the snapshot job's tasks do: keys of rows, and files of parts. They run on executors."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra
from busrep.spark.archive_store import Root
from busrep.spark.columns import Field, Kind, arrow_column, decode, fields_of
from busrep.spark.options import declared_stream
from busrep.spark.ranged import ROWS
from busrep.stores.snapshots import lines_of

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise MissingExtra("spark", "a snapshot in Parquet files") from None

Task = Callable[[Iterator[Any]], Iterator[Any]]

# As docs/bootstrap.md has it, and `busrep bootstrap --to` writes it.
PARTS = pyarrow.schema([("token", pyarrow.int64()), ("writer", pyarrow.string()), ("row", pyarrow.string())])


# -- keys -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Keys:
    """Which rows are of one key, and which say that it is gone. Can be pickled.

    ``names``: fields of the row class; ``tombstone``: a field, and its value in JSON.
    """

    stream: str
    streams: str
    names: Sequence[str]
    tombstone: tuple[str, Any] | None = None

    def fields(self) -> list[Field]:
        """Of the row class. Raises ConfigError for a class that has no such fields."""
        fields = fields_of(declared_stream(self.streams, self.stream))
        known = {field.name: field for field in fields}
        for name in [*self.names, *([self.tombstone[0]] if self.tombstone else [])]:
            if name not in known:
                raise ConfigError(f"stream {self.stream!r} has no field {name!r}; there are: {', '.join(known)}")
        for name in self.names:
            if _has_map(known[name].kind):
                raise ConfigError(f"--key {name}: a map cannot be a key")
        return fields

    def columns(self) -> list[str]:
        """The key's columns of what `keyed` gives."""
        return [f"key_{at}" for at in range(len(self.names))]

    def schema(self) -> str:
        """Of what `keyed` gives. Raises ConfigError."""
        known = {field.name: field for field in self.fields()}
        types = [known[name].kind.spark_type().simpleString() for name in self.names]
        return ", ".join([*map(" ".join, zip(self.columns(), types, strict=True)), "gone boolean", ROWS])


def _has_map(kind: Kind) -> bool:
    return kind.name == "dict" or (kind.inner is not None and _has_map(kind.inner))


def read_keys(stream: str, streams: str, key: str, tombstone: str | None) -> Keys:
    """What the options ``key`` and ``tombstone`` say. Raises ConfigError."""
    names = tuple(name.strip() for name in key.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--key is {key!r}: names of fields are needed, separated by commas, each once")
    if tombstone is None:
        made = Keys(stream, streams, names)
    else:
        name, equals, value = tombstone.partition("=")
        if not equals:
            raise ConfigError(f"--tombstone is {tombstone!r}: FIELD=VALUE is needed")
        fields = {field.name: field for field in Keys(stream, streams, [name]).fields()}
        made = Keys(stream, streams, names, (name, _value(fields[name].kind, tombstone, value)))
    made.fields()
    return made


def _value(kind: Kind, tombstone: str, text: str) -> Any:
    """A field's value as it stands in JSON: of a text itself, of others their JSON."""
    if kind.name in ("str", "datetime") and not (kind.nullable and text == "null"):
        return text
    try:
        return orjson.loads(text)
    except ValueError:
        raise ConfigError(
            f"--tombstone {tombstone}: the field holds no text, so VALUE is JSON: true, 0, null"
        ) from None


def keyed(keys: Keys) -> Task:
    """Rows, with the columns of `Keys.schema`: their keys, and whether they say that the key is gone."""

    def add(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark.sql.pandas.types import to_arrow_type

        fields = keys.fields()
        at = {field.name: number for number, field in enumerate(fields)}
        wanted = [at[name] for name in keys.names]
        types = [to_arrow_type(fields[number].kind.spark_type(), timezone="UTC") for number in wanted]
        for batch in batches:
            if not batch.num_rows:
                continue
            picked = [*wanted, *([at[keys.tombstone[0]]] if keys.tombstone else [])]
            values = decode(keys.stream, fields, picked, batch.column("token"), batch.column("row"))
            columns = [
                arrow_column(keys.stream, fields[number], column, kind)
                for number, column, kind in zip(wanted, values, types, strict=False)
            ]
            gone = [False] * batch.num_rows
            if keys.tombstone is not None:
                gone = [_same(value, keys.tombstone[1]) for value in values[-1]]
            yield pyarrow.RecordBatch.from_arrays(
                [*columns, pyarrow.array(gone, pyarrow.bool_()), *batch.columns],
                [*keys.columns(), "gone", *batch.schema.names],
            )

    return add


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; for Python true is 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


# -- parts ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Part:
    """A part's file. ``first`` and ``last``: tokens in it; ``sha256``: of its text."""

    file: str
    first: int
    last: int
    rows: int
    bytes: int
    sha256: str


@attrs.define(eq=False)
class PartFiles:
    """Writes rows, ordered by token, into parts of about ``limit`` rows: more only where one fact has more, for facts
    go whole. Holds the rows of one part in memory, as whoever reads it does."""

    root: Root
    stream: str
    run: str
    task: int
    limit: int
    done: list[Part] = attrs.field(factory=list)
    _made: str = attrs.field(factory=lambda: secrets.token_hex(4))
    _pending: list[Any] = attrs.field(factory=list)
    _rows: int = 0
    _last: int | None = None

    def add(self, batch: Any) -> None:
        """Rows behind those before."""
        tokens = batch.column("token").to_pylist()
        start = 0
        for at in range(len(tokens)):
            before = tokens[at - 1] if at else self._last
            if self._rows + at - start >= self.limit and tokens[at] != before:
                self._keep(batch.slice(start, at - start))
                self.flush()
                start = at
        self._keep(batch.slice(start))
        self._last = tokens[-1] if tokens else self._last

    def _keep(self, batch: Any) -> None:
        if batch.num_rows:
            self._pending.append(batch)
            self._rows += batch.num_rows

    def flush(self, *, empty: bool = False) -> None:
        """Write what there is, as a part; with ``empty`` also where there is nothing. Raises RowError."""
        if not self._pending and not empty:
            return
        table = pyarrow.Table.from_batches(self._pending, PARTS)
        hashed = hashlib.sha256()
        tokens = table.column("token").to_pylist()
        payloads = table.column("row").cast(pyarrow.binary()).to_pylist()
        hashed.update(lines_of(self.stream, tokens, table.column("writer").to_pylist(), payloads))
        # The task's number first: names are in the order of their tokens, for people.
        name = f"part-{self.task:05d}-{len(self.done):05d}-{self.run}-{self._made}.parquet"
        with self.root.create(name) as sink:
            parquet.write_table(table, sink, compression="zstd")
        self.root.settle(name)
        first, last = (tokens[0], tokens[-1]) if tokens else (0, 0)
        self.done.append(Part(name, first, last, len(tokens), self.root.size(name) or 0, hashed.hexdigest()))
        self._pending, self._rows = [], 0


def parting(root: Root, stream: str, run: str, limit: int) -> Task:
    """A task's parts, each as JSON."""

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        files = PartFiles(root, stream, run, context.partitionId(), limit)
        for batch in batches:
            columns = [batch.column(name).cast(PARTS.field(name).type) for name in PARTS.names]
            files.add(pyarrow.RecordBatch.from_arrays(columns, schema=PARTS))
        files.flush()
        texts = [orjson.dumps(attrs.asdict(part)).decode() for part in files.done]
        yield pyarrow.RecordBatch.from_arrays([pyarrow.array(texts, pyarrow.string())], ["part"])

    return write
