"""The types of the fields of rows: what JSON they are read from, and what they are written as.

Rows are checked against the annotations of the attrs class, both ways, and built through the class, so its converters,
validators and ``__attrs_post_init__`` run. A field with a converter is not checked by annotation: the converter says
what it takes.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import chain, islice, starmap
from typing import Any, Generic, TypeVar, cast

import attrs
import orjson

from busrep.errors import ConfigError
from busrep.fast_rows import thawed, values_reader

RowT = TypeVar("RowT")


class MismatchError(ValueError):
    """A value that its annotation does not admit."""

    def __init__(self, reason: str, field: str = "") -> None:
        self.reason, self.field = reason, field
        super().__init__(reason)


# --- types of fields ---

# A field of a converter, or one that is annotated so, takes whatever the converter takes.
ANYTHING = "any"

_Column = Sequence[Any]


@attrs.frozen
class FieldType:
    """What one annotation admits, checked by exact type (a bool is no int). No types at all: anything.

    ``text`` does not depend on how the annotation was spelt: ``int | null``, ``array[int]``, ``any``.
    ``usual`` is the JSON type of a whole column that needs nothing done, ``read`` all JSON types with what
    turns a column of them into the field's values (None: taken as it is). Columns, because asking hundreds of
    values for their type at a time is cheaper than looking at each. ``write``: the types of the field's
    values with a deeper check.
    """

    text: str
    usual: type | None = None
    read: dict[type, Callable[[_Column], _Column] | None] = attrs.field(factory=dict)
    write: dict[type, Callable[[Any], bool] | None] = attrs.field(factory=dict)

    def column(self, column: _Column) -> _Column:
        """The field's values of a column of JSON values; raises MismatchError."""
        if not self.read or (self.usual and list(map(type, column)).count(self.usual) == len(column)):
            return column
        seen = set(map(type, column))
        wrong = sorted(found.__name__ for found in seen - self.read.keys())
        if wrong:
            raise MismatchError(f"{self.text} is needed, not {wrong[0]}")
        for found in seen:
            convert = self.read[found]
            if convert is not None:
                converted = iter(convert([value for value in column if type(value) is found]))
                column = [next(converted) if type(value) is found else value for value in column]
        return column

    def admits(self, value: Any) -> bool:
        """Whether a field may be read from this JSON value."""
        try:
            self.column([value])
        except MismatchError:
            return False
        return True

    def fits(self, value: Any) -> bool:
        """Whether a field may hold this value."""
        if type(value) not in self.write:
            return not self.write
        deeper = self.write[type(value)]
        return deeper is None or deeper(value)


def _floats(column: _Column) -> _Column:
    return list(map(float, column))


def _datetimes(column: _Column) -> _Column:
    try:
        return list(map(datetime.fromisoformat, column))
    except ValueError as error:
        raise MismatchError(str(error)) from None


_ANY = FieldType(ANYTHING)
_AS_IS = {int: "int", str: "str", bool: "bool", type(None): "null", list: "array", dict: "object"}
_SIMPLE: dict[Any, FieldType] = {
    Any: _ANY,
    object: _ANY,
    **{kind: FieldType(text, kind, {kind: None}, {kind: None}) for kind, text in _AS_IS.items()},
    float: FieldType("float", float, {float: None, int: _floats}, {float: None, int: None}),
    datetime: FieldType("datetime", None, {str: _datetimes}, {datetime: None}),
}
_BY_TEXT = {kind.text: kind for kind in _SIMPLE.values()}


def type_of(annotation: Any) -> FieldType:
    """The type of an annotation; raises KeyError for one that has no form in JSON, or not only one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union([type_of(argument) for argument in arguments])
    if origin in (list, tuple) and (origin is list or arguments[1:] == (...,)):
        return _array_of(type_of(arguments[0]), origin)
    if origin is tuple:
        return _tuple_of([type_of(argument) for argument in arguments])
    if origin is dict and arguments[0] is str:
        return _dict_of(type_of(arguments[1]))
    return _SIMPLE[annotation]


def type_named(text: str) -> FieldType:
    """The type of a ``FieldType.text``; for one that this version does not know, anything."""
    if len(alternatives := split_type(text, "|")) > 1:
        return _union([type_named(one) for one in alternatives])
    name, _, inside = text.partition("[")
    parts = [type_named(one) for one in split_type(inside[:-1], ",")] if inside else []
    match name, parts:
        case "array", [part]:
            return _array_of(part, list)
        case "object", [part]:
            return _dict_of(part)
        case "tuple", [_, *_]:
            return _tuple_of(parts)
    return _BY_TEXT.get(text, _ANY)


def split_type(text: str, mark: str) -> list[str]:
    """The parts of a type between marks that stand in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == mark and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _union(kinds: Sequence[FieldType]) -> FieldType:
    if _ANY in kinds:
        return _ANY
    texts = {one for kind in kinds for one in split_type(kind.text, "|")}
    union = FieldType(" | ".join(sorted(texts)), kinds[0].usual)
    # float last: in int | float an integer stays one.
    for kind in sorted(kinds, key=lambda kind: kind.text == "float"):
        for found, convert in kind.read.items():
            if found in union.read and convert is not _floats:
                raise KeyError(found)
            union.read.setdefault(found, convert)
        union.write.update(kind.write | union.write)  # the first one counts
    return union


def _array_of(inner: FieldType, made: type) -> FieldType:
    def read(column: _Column) -> _Column:
        values = iter(inner.column(list(chain.from_iterable(column))))
        return [made(islice(values, len(value))) for value in column]

    def fits(value: Any) -> bool:
        return all(map(inner.fits, value))

    return FieldType(f"array[{inner.text}]", None, {list: read}, {made: fits})


def _dict_of(inner: FieldType) -> FieldType:
    def read(column: _Column) -> _Column:
        values = iter(inner.column(list(chain.from_iterable(value.values() for value in column))))
        return [dict(zip(value, islice(values, len(value)), strict=True)) for value in column]

    def fits(value: Any) -> bool:
        return all(map(inner.fits, value.values()))

    return FieldType(f"object[{inner.text}]", None, {dict: read}, {dict: fits})


def _tuple_of(inner: Sequence[FieldType]) -> FieldType:
    text = f"tuple[{', '.join(kind.text for kind in inner)}]"

    def read(column: _Column) -> _Column:
        if set(map(len, column)) != {len(inner)}:
            raise MismatchError(f"{text} is needed")
        parts = [kind.column(part) for kind, part in zip(inner, zip(*column, strict=True), strict=True)]
        return list(zip(*parts, strict=True))

    def fits(value: Any) -> bool:
        return len(value) == len(inner) and all(kind.fits(part) for kind, part in zip(inner, value, strict=True))

    return FieldType(text, None, {list: read}, {tuple: fits})


def plain_value(value: Any) -> Any:
    """What is written for a value that JSON does not have."""
    if isinstance(value, datetime):
        # In UTC: a database gives the same instant back in the zone of whoever asks, and a row has one form only.
        return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    if isinstance(value, date | Decimal):
        return str(value)
    if attrs.has(type(value)):
        return {field.name: getattr(value, field.name) for field in attrs.fields(type(value)) if field.init}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


# --- row classes ---


@attrs.frozen
class Field:
    """One field of a row class: its name, its type as text, and whether it has a default."""

    name: str
    type: str
    default: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{' = default' if self.default else ''}"


Fields = tuple[Field, ...]
_PLAIN = (int, float, str, bool)


class RowSchema(Generic[RowT]):
    """The fields of a row class: the values of a row, and rows made of values."""

    def __init__(self, stream: str, row_type: type[RowT]) -> None:
        made: Any = row_type
        if not attrs.has(made):
            raise ConfigError(f"stream {stream!r}: the row type {row_type!r} is not an attrs class")
        fields = [field for field in attrs.fields(made) if field.init]
        if not fields:
            raise ConfigError(f"stream {stream!r}: the row type {row_type.__name__} has no fields")
        self.row_type = row_type
        self.names = tuple(field.name for field in fields)
        self.kinds = _kinds_of_fields(stream, row_type, fields)
        self.fields = tuple(
            Field(field.name, kind.text, field.default is not attrs.NOTHING)
            for field, kind in zip(fields, self.kinds, strict=True)
        )
        self.usual: list[Any] = [kind.usual for kind in self.kinds]
        self.plain = all(kind.usual in _PLAIN and kind.write.get(kind.usual, _PLAIN) is None for kind in self.kinds)
        self.required = required_places(self.fields)
        self.make: Callable[..., RowT] = row_type
        self.aliases = {field.name: field.alias or field.name for field in fields}
        if any(field.kw_only for field in fields):
            aliases = list(self.aliases.values())
            self.make = lambda *values: row_type(**dict(zip(aliases, values, strict=False)))
        self.thawed = thawed(row_type, self.names)
        self.read_values = values_reader([kind.text for kind in self.kinds])
        getter = operator.attrgetter(*self.names)
        self.values: Callable[[RowT], Sequence[Any]] = getter if fields[1:] else lambda row: [getter(row)]

    def dump(self, rows: Sequence[RowT]) -> list[bytes] | None:
        """The payloads of rows whose fields are all plain; None if one of them needs a closer look."""
        count = len(rows)
        if list(map(type, rows)).count(self.row_type) != count:
            return None
        values = list(map(self.values, rows))
        for usual, column in zip(self.usual, zip(*values, strict=True), strict=True):
            if list(map(type, column)).count(usual) != count:
                return None
            if usual is float and not all(map(math.isfinite, column)):  # orjson would write null
                return None
        try:
            payloads = [orjson.dumps(value) for value in values]
        except (TypeError, ValueError):  # a closer look names the row and the field
            return None
        return payloads if b"".join(payloads).isascii() else None

    def build(self, rows: Sequence[Any]) -> list[RowT]:
        """Row objects of decoded rows; whatever is wrong with one of them raises."""
        if list(map(type, rows)).count(list) != len(rows):
            raise MismatchError("an array is needed")
        try:
            columns = list(zip(*rows, strict=True))
        except ValueError:  # rows of several lengths, as two versions of a class wrote them
            return [self.build([row])[0] for row in rows]
        return self._build_columns(columns, len(rows))

    def build_named(self, values: Mapping[str, Any]) -> RowT:
        """A row object of the JSON values of its fields; whatever is wrong with one of them raises."""
        if unknown := values.keys() - set(self.names):
            raise MismatchError(f"is none of {', '.join(self.names)}", min(unknown))
        made: Any = self.row_type
        arguments = {}
        for field, kind in zip(self.fields, self.kinds, strict=True):
            if field.name in values:
                arguments[self.aliases[field.name]] = _read_column(field.name, kind, [values[field.name]])[0]
            elif not field.default:
                raise MismatchError("is missing", field.name)
        return cast(RowT, made(**arguments))

    def _build_columns(self, columns: Sequence[_Column], count: int) -> list[RowT]:
        if len(columns) < self.required:
            raise MismatchError("is missing", self.names[len(columns)])
        if not columns:
            return [self.make() for _ in range(count)]
        checks = zip(columns, self.usual, strict=False)
        if not all(list(map(type, column)).count(usual) == count for column, usual in checks):
            columns = [_read_column(*one) for one in zip(self.names, self.kinds, columns, strict=False)]
        if len(columns) < len(self.names):
            return list(map(self.make, *columns))
        return self._made(zip(*columns[: len(self.names)], strict=True))

    def read(self, payloads: Sequence[bytes]) -> list[RowT] | None:
        """Row objects of payloads, in half the time of `build`. None where that is not to be had; whatever is wrong
        with one of them raises."""
        return None if self.read_values is None else self._made(map(self.read_values, payloads))

    def _made(self, values: Iterable[tuple[Any, ...]]) -> list[RowT]:
        """Row objects of the values of all fields."""
        if self.thawed is None:
            return list(starmap(self.make, values))
        made, row_type = list(starmap(self.thawed, values)), self.row_type
        for row in made:
            row.__class__ = row_type
        return made


def _read_column(name: str, kind: FieldType, column: _Column) -> _Column:
    try:
        return kind.column(column)
    except MismatchError as error:
        raise MismatchError(error.reason, name) from None


def required_places(fields: Fields) -> int:
    """How many values a row has at least."""
    return max((at for at, one in enumerate(fields, 1) if not one.default), default=0)


def _kinds_of_fields(stream: str, row_type: type[Any], fields: Iterable[attrs.Attribute[Any]]) -> list[FieldType]:
    try:
        hints = typing.get_type_hints(row_type)
    except NameError as error:
        raise ConfigError(
            f"stream {stream!r}: an annotation of {row_type.__name__} cannot be resolved: {error}"
        ) from None
    kinds = []
    for field in fields:
        annotation = hints.get(field.name, field.type or Any)
        try:
            kinds.append(_ANY if field.converter else type_of(annotation))
        except (KeyError, TypeError):
            raise ConfigError(
                f"stream {stream!r}: field {field.name!r} of {row_type.__name__} is annotated {annotation!r}, "
                "which has no form in JSON: give the field a converter"
            ) from None
    return kinds
