"""What the snapshot job's tasks do: keys of rows, and files of parts. They run on executors."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import orjson

from busrep.core.fields import json_bytes
from busrep.core.snapshots import part_hash
from busrep.errors import ConfigError, MissingExtra, RowError
from busrep.row_types import plain_value
from busrep.snapshots.parquet import MAX_BYTES
from busrep.spark.archive_store import Root
from busrep.spark.columns import Field, arrow_column, decode, fields_of
from busrep.spark.kinds import Kind
from busrep.spark.options import declared_stream
from busrep.spark.ranged import COLUMNS, schema_of
from busrep.stores.snapshots import lines_of

try:
    import pyarrow
    from pyarrow import compute, parquet
except ImportError:
    raise MissingExtra("spark", "a snapshot in Parquet files") from None

Task = Callable[[Iterator[Any]], Iterator[Any]]

# As docs/bootstrap.md has it, and `busrep bootstrap --to` writes it.
PARTS = pyarrow.schema([("token", pyarrow.int64()), ("writer", pyarrow.string()), ("row", pyarrow.string())])

# Text of a part, where its rows are large; one fact may add to it until no reader takes the part any more.
PART_BYTES = MAX_BYTES // 4
# Of a token in it, with what is between the fields.
MOST_DIGITS = 22


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
            if known[name].kind.has("dict"):
                raise ConfigError(f"--key {name}: a map cannot be a key")
        return fields

    def kept(self) -> str:
        """Which rows these are, for people."""
        kept = f"the latest row of each {','.join(self.names)}"
        if self.tombstone is None:
            return kept
        return f"{kept} but {self.tombstone[0]}={orjson.dumps(self.tombstone[1]).decode()}"

    def columns(self) -> list[str]:
        """The key's columns of what `keyed` gives."""
        return [f"key_{at}" for at in range(len(self.names))]

    def schema(self) -> str:
        """Of what `keyed` gives. Raises ConfigError."""
        known = {field.name: field for field in self.fields()}
        types = [known[name].kind.spark_type().simpleString() for name in self.names]
        return ", ".join([*map(" ".join, zip(self.columns(), types, strict=True)), "gone boolean", schema_of(COLUMNS)])


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
        made = Keys(stream, streams, names, (name, _value(stream, fields[name], value)))
    made.fields()
    return made


def _value(stream: str, field: Field, text: str) -> Any:
    """A field's value as it stands in JSON: of a text itself, of others their JSON. Raises ConfigError for one that no
    row has there: all keys would be taken for alive."""
    kind = field.kind
    if kind.name in ("str", "datetime") and field.converter is None and not (kind.nullable and text == "null"):
        return text
    try:
        value = orjson.loads(text)
    except ValueError:
        raise ConfigError(
            f"--tombstone {field.name}={text}: its values are not texts alone, so VALUE is JSON: true, 0, null, "
            '"gone" with the quotes'
        ) from None
    try:
        arrow_column(stream, field, [value], arrow_type(kind))
    except RowError as error:
        raise ConfigError(f"--tombstone {field.name}={text}: no row has this there: {error.reason}") from None
    return value


def arrow_type(kind: Kind) -> Any:
    """Of a column of it."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind.spark_type(), timezone="UTC")


def keyed(keys: Keys) -> Task:
    """Rows, with the columns of `Keys.schema`: their keys, and whether they say that the key is gone."""

    def add(batches: Iterator[Any]) -> Iterator[Any]:
        fields = keys.fields()
        at = {field.name: number for number, field in enumerate(fields)}
        wanted = [at[name] for name in keys.names]
        types = [arrow_type(fields[number].kind) for number in wanted]
        for batch in batches:
            if not batch.num_rows:
                continue
            picked = [*wanted, *([at[keys.tombstone[0]]] if keys.tombstone else [])]
            values = decode(keys.stream, fields, picked, batch.column("token"), batch.column("row"))
            columns = [
                arrow_column(keys.stream, fields[number], _comparable(fields[number].kind, column), kind)
                for number, column, kind in zip(wanted, values, types, strict=False)
            ]
            gone = [False] * batch.num_rows
            if keys.tombstone is not None:
                gone = [_same(_in_json(value), keys.tombstone[1]) for value in values[-1]]
            yield pyarrow.RecordBatch.from_arrays(
                [*columns, pyarrow.array(gone, pyarrow.bool_()), *batch.columns],
                [*keys.columns(), "gone", *batch.schema.names],
            )

    return add


def _comparable(kind: Kind, values: list[Any]) -> list[Any]:
    return list(map(same_key, values)) if kind.has("json") else values


def same_key(value: Any) -> Any:
    """A JSON value that is compared as its text: names in order, and 1 for 1.0, so that what is equal stays equal."""
    if isinstance(value, dict):
        return {name: same_key(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return list(map(same_key, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _in_json(value: Any) -> Any:
    """A row's value, or a default that goes through a converter, and may be an Enum's member."""
    known = value is None or isinstance(value, str | int | float | list | dict)
    return value if known else orjson.loads(json_bytes(value, plain_value))


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
    """Writes rows, ordered by token, into parts of about ``limit`` rows, fewer where these are large; more only where
    one fact has more, for facts go whole. Holds the rows of one part in memory, as whoever reads it does."""

    root: Root
    stream: str
    run: str
    task: int
    limit: int
    done: list[Part] = attrs.field(factory=list)
    _made: str = attrs.field(factory=lambda: secrets.token_hex(4))
    _pending: list[Any] = attrs.field(factory=list)
    _rows: int = 0
    _bytes: int = 0
    _last: int | None = None

    def add(self, batch: Any) -> None:
        """Rows behind those before. Raises RowError, ConfigError."""
        start = 0
        sizes = compute.add(compute.binary_length(batch.column("row")), compute.binary_length(batch.column("writer")))
        for at, (token, size) in enumerate(zip(batch.column("token").to_pylist(), sizes.to_pylist(), strict=True)):
            full = self._rows >= self.limit or self._bytes + size > PART_BYTES
            if full and self._rows and token != self._last:
                self._keep(batch.slice(start, at - start))
                self.flush()
                start = at
            self._rows += 1
            self._bytes += size + MOST_DIGITS
            self._last = token
        self._keep(batch.slice(start))

    def _keep(self, batch: Any) -> None:
        if batch.num_rows:
            self._pending.append(batch)

    def flush(self, *, empty: bool = False) -> None:
        """Write what there is, as a part; with ``empty`` also where there is nothing. Raises RowError, and ConfigError
        for a part that no reader takes."""
        if not self._pending and not empty:
            return
        table = pyarrow.Table.from_batches(self._pending, PARTS)
        tokens = table.column("token").to_pylist()
        payloads = table.column("row").cast(pyarrow.binary()).to_pylist()
        text = lines_of(self.stream, tokens, table.column("writer").to_pylist(), payloads)
        if len(text) > MAX_BYTES:
            raise ConfigError(
                f"stream {self.stream!r}: the rows of token {tokens[-1]}, one fact, are too large for a snapshot: with "
                f"them a part has {len(text):,} bytes, and readers take {MAX_BYTES:,}"
            )
        # The task's number first: names are in the order of their tokens, for people.
        name = f"part-{self.task:05d}-{len(self.done):05d}-{self.run}-{self._made}.parquet"
        with self.root.create(name) as sink:
            parquet.write_table(table, sink, compression="zstd")
        self.root.settle(name)
        first, last = (tokens[0], tokens[-1]) if tokens else (0, 0)
        self.done.append(Part(name, first, last, len(tokens), self.root.size(name) or 0, part_hash(text)))
        self._pending, self._rows, self._bytes = [], 0, 0


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
