"""Rows of a query as rows of a stream: Arrow batches in, payloads out, and the keys by which they are sorted.

A query's rows are either generic, with the row's JSON text in a column ``row`` (beside it the other columns of the
source's generic schema may stand, which are ignored), or typed: each column is a field, in the order of the row class.
With a row class each row is made an object of it, and so checked as every writer's; without one it is an array of its
columns. What a converter makes of a column has to be what the column has: one that divides an amount would otherwise
divide it with each copy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import attrs
import orjson
import pyarrow as pa

from busrep.core.fields import json_bytes
from busrep.errors import ConfigError, RowError
from busrep.spark.columns import GENERIC, Field, fields_of
from busrep.spark.kinds import Kind, WrongKindError, arrow_value
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
        fields: Sequence[Field | None] = [None] * batch.num_columns
        if self.stream.row_type is not None:
            fields = fields_of(self.stream)[: batch.num_columns]
        columns = [
            _values(self.stream.name, name, column, None if field is None else field.kind)
            for name, column, field in zip(batch.schema.names, batch.columns, fields, strict=True)
        ]
        payloads = [self._dump(row) for row in zip(*columns, strict=True)]
        if self.stream.row_type is None:
            return payloads
        rows = self.stream.decode(payloads)
        for field, column, values in zip(fields, batch.columns, columns, strict=True):
            if field is not None and field.converter is not None and _is_of(field.kind, column.type):
                self._check_converted(field, column.type, values, rows)
        return self.stream.encode_all(rows)

    def _check_converted(self, field: Field, type_: Any, values: Sequence[Any], rows: Sequence[Any]) -> None:
        """Whether a column's values, in JSON, are what the row objects have."""
        convert = _converter(field.name, type_, field.kind)
        for value, row in zip(values, rows, strict=True):
            try:
                made = _one(convert, arrow_value(field.kind, getattr(row, field.name)))
            except WrongKindError as error:
                raise RowError(self.stream.name, field.name, f"its converter's value: {error}", row) from None
            if made != value:
                reason = f"its converter makes {made!r:.200} of {value!r:.200}, which the column has"
                raise RowError(self.stream.name, field.name, reason, row)

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
    if types.is_decimal(type_) and kind is not None and kind.name == "decimal":
        return _digits
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
        kinds = {} if kind is None else dict(kind.parts)
        parts = {field.name: _converter(name, field.type, kinds.get(field.name)) for field in type_}
        return lambda row: {key: _one(parts[key], value) for key, value in row.items()}
    raise ConfigError(f"column {name!r} is {type_}, which has no form in JSON: cast it, to string for instance")


_ARROW = {
    "int": pa.types.is_integer, "float": pa.types.is_floating, "str": pa.types.is_string, "bool": pa.types.is_boolean,
    "datetime": pa.types.is_timestamp, "json": pa.types.is_string, "date": pa.types.is_date, "uuid": pa.types.is_string,
    "decimal": pa.types.is_decimal,
}  # fmt: skip


def _is_of(kind: Kind, type_: Any) -> bool:
    """Whether a column of this type holds the kind's own values, and not, say, a date's text."""
    if kind.name == "struct":
        found = {field.name: field.type for field in type_} if pa.types.is_struct(type_) else {}
        return found.keys() == dict(kind.parts).keys() and all(_is_of(part, found[name]) for name, part in kind.parts)
    if kind.inner is None:
        return bool(_ARROW[kind.name](type_))
    if kind.name == "dict":
        return pa.types.is_map(type_) and _is_of(kind.inner, type_.item_type)
    return (pa.types.is_list(type_) or pa.types.is_large_list(type_)) and _is_of(kind.inner, type_.value_type)


def _one(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


def _iso(value: date) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return value.isoformat()


def _digits(value: Decimal) -> str:
    """A Decimal without the zeros that the column's scale adds."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
