"""Columns: the attrs fields of a row class as Spark's types, and the JSON rows of a table as Arrow's columns.

What type a field has kinds.py says. A field with a converter has the type that it is annotated with where only a
converter makes such values (a date, say): the converter is called for each value. With any other annotation it is a
string, and the converter is not called: a JSON text as it is, without quotes, any other value as its JSON.

Rows of other versions of the class are read as busrep/streams.py does it: trailing fields that the class does not know
are dropped, those that are missing have their defaults.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

import attrs
import orjson

from busrep.errors import ConfigError, MissingExtra, RowError
from busrep.spark.kinds import Kind, WrongKindError, arrow_value, kind_of
from busrep.streams import Stream

try:
    import pyarrow
    import pyarrow.compute
    from pyspark.sql import types as spark
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing

GENERIC = ("stream", "writer", "token", "index", "row", "committed_at")
"""The generic schema: the columns of every fact."""

_GENERIC_TYPES = {
    "stream": spark.StringType(), "writer": spark.StringType(), "token": spark.LongType(),
    "index": spark.IntegerType(), "row": spark.StringType(), "committed_at": spark.TimestampType(),
}  # fmt: skip


# -- fields ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Field:
    """A field of a row class. ``default``: what a row that is too short has, in JSON, or before its converter;
    ``required``: there is none. ``converter``: makes values of the kind of JSON values."""

    name: str
    kind: Kind
    required: bool
    default: Any = None
    converter: Callable[[Any], Any] | None = None


def fields_of(stream: Stream[Any]) -> list[Field]:
    """The fields of a stream's row class, in the order of a row. Raises ConfigError for a stream that has none, and for
    a class in it whose annotations cannot be resolved."""
    row_type: Any = stream.row_type
    if row_type is None:
        raise ConfigError(
            f"stream {stream.name!r} has no row class, so its rows have no columns: pass option 'typed' as false"
        )
    hints = typing.get_type_hints(row_type)
    return [_field(stream.name, field, hints.get(field.name, Any)) for field in attrs.fields(row_type) if field.init]


def _field(stream: str, field: attrs.Attribute[Any], annotation: Any) -> Field:
    try:
        kind = kind_of(annotation)
    except ConfigError as error:
        raise ConfigError(f"stream {stream!r}, field {field.name!r}: {error}") from None
    if field.converter is None:
        return Field(field.name, kind, *_default(field.default, kind))
    if not kind.needs_converter or isinstance(field.converter, attrs.Converter):  # which may want the whole row
        kind = Kind("text", nullable=True)
        return Field(field.name, kind, *_default(field.default, kind))
    kind = attrs.evolve(kind, nullable=True)
    if field.default is attrs.NOTHING or getattr(field.default, "takes_self", False):
        return Field(field.name, kind, required=True, converter=field.converter)
    default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default
    return Field(field.name, kind, required=False, default=default, converter=field.converter)


def _default(default: Any, kind: Kind) -> tuple[bool, Any]:
    """Whether a field is required, and else its default in JSON."""
    if default is attrs.NOTHING or getattr(default, "takes_self", False):
        return True, None
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
    try:
        value = orjson.loads(orjson.dumps(default))
    except TypeError:  # of a field with a converter: it has no form in JSON
        value = None
    return value is None and not kind.nullable, value


# -- schemas ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Shape:
    """The columns of a query: which there are, and where each comes from. Can be pickled.

    ``columns``: (name, column of `GENERIC` or place of a field); ``fields``: of the row class, none for generic rows.
    """

    columns: Sequence[tuple[str, str | int]]
    fields: Sequence[Field] = ()

    def schema(self) -> spark.StructType:
        """Spark's schema of them."""
        struct = spark.StructType()
        for name, source in self.columns:
            if isinstance(source, int):
                kind = self.fields[source].kind
                struct.add(name, kind.spark_type(), kind.nullable)
            else:
                struct.add(name, _GENERIC_TYPES[source], True)
        return struct

    @property
    def needed(self) -> set[str]:
        """The generic columns that have to be read."""
        return {source if isinstance(source, str) else "row" for _, source in self.columns}

    def source(self, name: str) -> str | None:
        """The generic column behind a column; None for a field, or no column of ours."""
        found = dict(self.columns).get(name)
        return found if isinstance(found, str) else None

    def subset(self, names: Sequence[str], what: str) -> Shape:
        """Some of the columns, in that order. Raises ConfigError; ``what``: who wants them."""
        known = dict(self.columns)
        for name in names:
            if name not in known:
                raise ConfigError(f"{what} names column {name!r}; there are: {', '.join(known)}")
        return attrs.evolve(self, columns=[(name, known[name]) for name in names])


def generic_shape() -> Shape:
    """The columns of every fact."""
    return Shape([(name, name) for name in GENERIC])


def typed_shape(stream: Stream[Any], *, metadata: bool) -> Shape:
    """The fields of a row class, and behind them with ``metadata`` the columns of every fact, with ``_`` in front.
    Raises ConfigError."""
    fields = fields_of(stream)
    columns: list[tuple[str, str | int]] = [(field.name, at) for at, field in enumerate(fields)]
    if metadata:
        columns += [(f"_{name}", name) for name in GENERIC if name != "row"]
        doubled = {field.name for field in fields} & {name for name, at in columns if isinstance(at, str)}
        if doubled:
            raise ConfigError(
                f"option 'includeMetadata': stream {stream.name!r} has fields {sorted(doubled)} of its own"
            )
    return Shape(columns, fields)


# -- rows ------------------------------------------------------------------------------------------------------------


# JSON types of a kind's values; of the others they are all.
_ADMITTED: dict[str, set[type]] = {
    "int": {int}, "float": {float, int}, "str": {str}, "bool": {bool}, "datetime": {str}, "list": {list},
    "dict": {dict},
}  # fmt: skip


def decode(stream: str, fields: Sequence[Field], wanted: Sequence[int], tokens: Any, rows: Any) -> list[list[Any]]:
    """The JSON values of some fields of many rows, column by column.

    ``tokens`` and ``rows`` are Arrow arrays. All rows are parsed at once, as one JSON text, and transposed: several
    times as fast as one by one. Raises RowError, which names the token of the first row that is none.
    """
    count = len(rows)
    whole = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), rows)
    joined = pyarrow.compute.binary_join(whole, ",")[0].as_buffer()
    compute = pyarrow.compute
    try:
        if not compute.all(compute.and_(compute.starts_with(rows, "["), compute.ends_with(rows, "]"))).as_py():
            raise ValueError("not all are arrays, and the halves of one might be taken for two")
        parsed = orjson.loads(b"[%b]" % joined.to_pybytes())
        if len(parsed) != count or list(map(type, parsed)).count(list) != count:
            raise ValueError("not as many arrays as rows")
    except ValueError:
        parsed = _one_by_one(stream, tokens, rows)
    try:
        columns = list(zip(*parsed, strict=True))
    except ValueError:  # rows of several versions of the class
        columns = list(zip(*(_evened(stream, fields, row) for row in parsed), strict=True))
    if len(columns) < len(fields):
        columns += zip(*[_evened(stream, fields, list(parsed[0]))[len(columns) :]] * count, strict=True)
    return [list(columns[at]) for at in wanted]


def _one_by_one(stream: str, tokens: Any, rows: Any) -> list[Any]:
    parsed = []
    for token, row in zip(tokens.to_pylist(), rows.to_pylist(), strict=True):
        try:
            value = orjson.loads(row)
        except ValueError as error:
            raise RowError(stream, f"token {token}", f"not JSON: {error}", row) from None
        if not isinstance(value, list):
            raise RowError(stream, f"token {token}", "an array is needed", value)
        parsed.append(value)
    return parsed


def _evened(stream: str, fields: Sequence[Field], row: list[Any]) -> list[Any]:
    """A row with as many values as there are fields."""
    for field in fields[len(row) :]:
        if field.required:
            raise RowError(stream, f"field {field.name!r}", "is missing", row)
    return [*row[: len(fields)], *(field.default for field in fields[len(row) :])]


def arrow_column(stream: str, field: Field, values: list[Any], arrow_type: Any) -> Any:
    """An Arrow array of a field's JSON values. Raises RowError."""
    try:
        if field.converter is not None:
            return pyarrow.array(_through(field.converter, field.kind, values), arrow_type)
        plain = _converted(field.kind, values)
        if field.kind.name == "datetime":
            return _timestamps(plain, arrow_type)
        return pyarrow.array(plain, arrow_type)
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise RowError(stream, f"field {field.name!r}", str(error)) from None


def _through(converter: Callable[[Any], Any], kind: Kind, values: list[Any]) -> list[Any]:
    """What the application's converter makes of values, as pyarrow takes it. Raises WrongKindError."""
    found = []
    for value in values:
        try:
            made = None if value is None else converter(value)
        except Exception as error:  # the application's code may raise anything
            raise WrongKindError(f"its converter refuses {value!r:.200}: {type(error).__name__}: {error}") from None
        try:
            found.append(arrow_value(kind, made))
        except WrongKindError as error:
            raise WrongKindError(f"its converter makes {made!r:.200} of {value!r:.200}: {error}") from None
    return found


def _converted(kind: Kind, values: list[Any]) -> list[Any]:
    """JSON values as pyarrow takes them; times stay text. Raises WrongKindError."""
    if kind.name == "json":
        return [None if value is None else orjson.dumps(value).decode() for value in values]
    if kind.name == "text":
        return [value if value is None or type(value) is str else orjson.dumps(value).decode() for value in values]
    admitted = _ADMITTED[kind.name]
    found = set(map(type, values))
    for wrong in found - admitted - ({type(None)} if kind.nullable else set()):
        raise WrongKindError(f"{kind.name} is needed, not {wrong.__name__}")
    if kind.name == "float" and int in found:
        return [float(value) if type(value) is int else value for value in values]
    if kind.inner is None:
        return values
    each = [value or () for value in values]
    contents = [value.values() if isinstance(value, dict) else value for value in each]
    flat = _converted(kind.inner, list(chain.from_iterable(contents)))
    inner = iter(map(_time, flat) if kind.inner.name == "datetime" else flat)
    if kind.name == "list":
        return [None if value is None else list(islice(inner, len(value))) for value in values]
    return [None if value is None else list(zip(value, islice(inner, len(value)), strict=True)) for value in values]


def _timestamps(values: list[str | None], arrow_type: Any) -> Any:
    try:
        return pyarrow.array(values, pyarrow.string()).cast(arrow_type)
    except pyarrow.ArrowInvalid:  # another spelling of ISO 8601, or no zone
        return pyarrow.array(list(map(_time, values)), arrow_type)


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    time = datetime.fromisoformat(text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
