"""Rows of a query as rows of a stream: Arrow batches in, payloads out, and the keys by which they are sorted.

A query's rows are either generic, with the row's JSON text in a column ``row`` (beside it the other columns of the
source's generic schema may stand, which are ignored), or typed: each column is a field, in the order of the row class.
With a row class each row is made an object of it, and so checked as every writer's; without one it is an array of its
columns.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from typing import Any

import attrs
import orjson
import pyarrow as pa

from busrep.core.fields import json_bytes
from busrep.errors import ConfigError, RowError
from busrep.spark.columns import GENERIC, Kind, fields_of
from busrep.stores.dialect import backing_of, columns_of
from busrep.streams import Stream

Keyed = tuple[str, bytes]
Convert = Callable[[Any], Any]

# The largest integer in a column of SQLite's or PostgreSQL's.
LARGEST = 2**63 - 1


def check_columns(stream: Stream[Any], names: Sequence[str], order_by: Sequence[str]) -> bool:
    """Whether rows of these columns are generic ones. Raises ConfigError when they are not rows of the stream."""
    if missing := [name for name in order_by if name not in names]:
        raise ConfigError(f"option 'orderBy' names {missing[0]!r}; the columns are: {', '.join(names)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two columns are named {twice[0]!r}: rename one, or leave it out")
    fields = None if stream.row_type is None else fields_of(stream)
    if fields is not None and "row" not in names:
        wanted = [field.name for field in fields]
        least = max((at + 1 for at, field in enumerate(fields) if field.required), default=0)
        if len(names) < max(least, 1) or list(names) != wanted[: len(names)]:
            raise ConfigError(
                f"the columns {', '.join(names)} are not the fields of stream {stream.name!r}, which are, in this "
                f"order: {', '.join(wanted)}; or pass each row's JSON in a column named row"
            )
        return False
    if "row" not in names:
        if like := [name for name in names if name.lower() == "row"]:
            raise ConfigError(f"column {like[0]!r}: if it holds each row's JSON, name it 'row'; if not, otherwise")
        return False
    if fields is not None and list(names) == [field.name for field in fields][: len(names)]:
        return False  # a class that has a field of that name
    if beside := set(names) - {*GENERIC}:
        raise ConfigError(
            f"beside the column row, which holds each row's JSON, stands {sorted(beside)[0]!r}, which would be lost: "
            "select row alone, or rename it"
        )
    return True


@attrs.define
class Encoder:
    """Makes payloads of Arrow batches. Errors: ConfigError for a type that has no form in JSON, RowError."""

    stream: Stream[Any]
    generic: bool
    order_by: Sequence[str] = ()
    _own: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._own = backing_of(self.stream).own

    def encode(self, batch: Any) -> list[Keyed]:
        """The rows of a record batch, each with its key, "" without ``order_by``."""
        payloads = self._generic(batch) if self.generic else self._typed(batch)
        if self._own:
            self._check_columns(payloads)
        if not self.order_by:
            return [("", payload) for payload in payloads]
        columns = [_keys(name, batch.column(batch.schema.get_field_index(name))) for name in self.order_by]
        # A comma is below all digits: a text that goes on comes after one that ends.
        keys = [",".join(key) for key in zip(*columns, strict=True)]
        return list(zip(keys, payloads, strict=True))

    def _generic(self, batch: Any) -> list[bytes]:
        texts = batch.column(batch.schema.get_field_index("row")).to_pylist()
        payloads = [compact(self.stream.name, text) for text in texts]
        if self.stream.row_type is None:
            return payloads
        return self.stream.encode_all(self.stream.decode(payloads))

    def _typed(self, batch: Any) -> list[bytes]:
        kinds: Sequence[Kind | None] = [None] * batch.num_columns
        if self.stream.row_type is not None:
            kinds = [field.kind for field in fields_of(self.stream)][: batch.num_columns]
        columns = [
            _values(self.stream.name, name, column, kind)
            for name, column, kind in zip(batch.schema.names, batch.columns, kinds, strict=True)
        ]
        payloads = [self._dump(row) for row in zip(*columns, strict=True)]
        if self.stream.row_type is None:
            return payloads
        return self.stream.encode_all(self.stream.decode(payloads))

    def _dump(self, row: Sequence[Any]) -> bytes:
        try:
            return json_bytes(list(row))
        except ValueError as error:
            raise RowError(self.stream.name, "row", str(error), row) from None

    def _check_columns(self, payloads: Sequence[bytes]) -> None:
        """The database makes columns of the JSON: what it would change without a word is refused here."""
        backing = backing_of(self.stream)
        for payload in payloads:
            for name, value in zip(backing.columns, columns_of(backing, payload), strict=True):
                if (type(value) is int and value > LARGEST) or (isinstance(value, str) and "\0" in value):
                    raise RowError(self.stream.name, name, "does not fit a column of the table", value)


def compact(stream: str, text: str | None) -> bytes:
    """A row's JSON text as it travels: the same value, compact, in ASCII. Raises RowError."""
    if text is None:
        raise RowError(stream, "row", "is null; the row null is the text 'null'")
    raw = text.encode()
    try:
        if orjson.dumps(orjson.loads(raw)) == raw and raw.isascii():
            return raw
        # Not orjson: of an integer that is too large it makes a float.
        return json_bytes(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError) as error:
        raise RowError(stream, "row", f"is no JSON of ours: {error}", text) from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


# -- typed columns ---------------------------------------------------------------------------------------------------


def _values(stream: str, name: str, column: Any, kind: Kind | None) -> list[Any]:
    """A column's values as JSON has them."""
    convert = _converter(name, column.type, kind)
    values = _times(column) if pa.types.is_timestamp(column.type) else column.to_pylist()
    if convert is None:
        return list(values)
    try:
        return [None if value is None else convert(value) for value in values]
    except ValueError as error:
        raise RowError(stream, name, str(error)) from None


def _times(column: Any) -> list[datetime | None]:
    # Without the zone, which Python would look up by name for each value; the instants are in UTC.
    plain = column.cast(pa.timestamp("us")).to_pylist()
    if column.type.tz is None:
        return list(plain)
    return [None if value is None else value.replace(tzinfo=UTC) for value in plain]


def _converter(name: str, type_: Any, kind: Kind | None) -> Convert | None:
    """What makes JSON of a value that pyarrow gives; None: it is JSON already. Raises ConfigError."""
    types = pa.types
    if kind is not None and kind.name == "json" and (types.is_string(type_) or types.is_large_string(type_)):
        return orjson.loads
    if types.is_integer(type_) or types.is_boolean(type_) or types.is_string(type_) or types.is_large_string(type_):
        return None
    if types.is_floating(type_) or types.is_null(type_):
        return None
    if types.is_timestamp(type_) or types.is_date(type_):
        return _iso
    inner = None if kind is None else kind.inner
    if types.is_map(type_):
        item = _converter(name, type_.item_type, inner)
        if not types.is_string(type_.key_type):
            raise ConfigError(f"column {name!r}: the keys of a map are strings in JSON, not {type_.key_type}")
        return lambda pairs: {key: _one(item, value) for key, value in pairs}
    if types.is_list(type_) or types.is_large_list(type_):
        element = _converter(name, type_.value_type, inner)
        return None if element is None else lambda values: [_one(element, value) for value in values]
    if types.is_struct(type_):
        parts = {field.name: _converter(name, field.type, None) for field in type_}
        return lambda row: {key: _one(parts[key], value) for key, value in row.items()}
    raise ConfigError(f"column {name!r} is {type_}, which has no form in JSON: cast it, to string for instance")


def _one(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _iso(value: date) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return value.isoformat()


# -- keys ------------------------------------------------------------------------------------------------------------


def _keys(name: str, column: Any) -> list[str]:
    """Texts that sort, by their bytes, as a column's values do; null before all."""
    types, type_ = pa.types, column.type
    convert: Callable[[Any], str]
    if types.is_timestamp(type_):
        column, convert = column.cast(pa.timestamp("us")).cast(pa.int64()), _integer
    elif types.is_date32(type_):
        column, convert = column.cast(pa.int32()), _integer
    elif types.is_integer(type_) or types.is_boolean(type_):
        convert = _integer
    elif types.is_floating(type_):
        convert = _float
    elif types.is_string(type_) or types.is_large_string(type_):
        convert = _text
    else:
        raise ConfigError(f"option 'orderBy': column {name!r} is {type_}; numbers, texts and times can be sorted by")
    return ["0" if value is None else convert(value) for value in column.to_pylist()]


def _integer(value: int) -> str:
    return f"1{int(value) + 2**63:016x}"


def _float(value: float) -> str:
    (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # -0.0 is 0.0
    return f"1{bits ^ (2**64 - 1) if bits >> 63 else bits | 2**63:016x}"


def _text(value: str) -> str:
    return "1" + value.encode().hex()
