"""Kinds: what the values of a field are in JSON, in Python and in Spark.

    int                 bigint              list[X], tuple[X, ...]      array<X>
    float               double              dict[str, X]                map<string, X>
    str                 string              X | None                    X, nullable
    bool                boolean             anything else               string: the value's JSON
    datetime            timestamp (UTC; a time without a zone counts as UTC)

and what only a converter makes of JSON:

    date                date                an Enum of str              string: its value
    Decimal             decimal(38,18)      an Enum of int              bigint: its value
    UUID                string              an Enum of other values     string: its value's JSON
    an attrs class      struct of its fields; in JSON an object
"""

from __future__ import annotations

import types
import typing
import uuid
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import attrs

from busrep.core.fields import json_bytes
from busrep.errors import ConfigError, MissingExtra
from busrep.row_types import plain_value

try:
    from pyspark.sql import types as spark
except ImportError as missing:
    raise MissingExtra("spark", "busrep on Spark") from missing


@attrs.frozen
class Kind:
    """``name``: a key of `_SPARK`, ``list``, ``dict`` or ``struct``. ``inner``: of an element; ``parts``: of the fields
    of a struct. ``made``: the Enum or the attrs class whose objects the values are in Python."""

    name: str
    nullable: bool = False
    inner: Kind | None = None
    parts: tuple[tuple[str, Kind], ...] = ()
    made: type[Any] | None = None

    def spark_type(self) -> spark.DataType:
        """The type of a column of it."""
        if self.name == "struct":
            return spark.StructType([spark.StructField(name, kind.spark_type(), True) for name, kind in self.parts])
        if self.inner is not None:
            inner = self.inner.spark_type()
            if self.name == "list":
                return spark.ArrayType(inner, self.inner.nullable)
            return spark.MapType(spark.StringType(), inner, self.inner.nullable)
        return _SPARK[self.name]

    def has(self, name: str) -> bool:
        """Whether it, or a kind in it, is of that name."""
        inside = [kind for _, kind in self.parts] + ([] if self.inner is None else [self.inner])
        return self.name == name or any(kind.has(name) for kind in inside)

    @property
    def needs_converter(self) -> bool:
        """Whether only a converter makes such values of JSON."""
        inside = self.inner is not None and self.inner.needs_converter
        return inside or self.made is not None or self.name in ("date", "decimal", "uuid")


_SPARK: dict[str, spark.DataType] = {
    "int": spark.LongType(), "float": spark.DoubleType(), "str": spark.StringType(), "bool": spark.BooleanType(),
    "datetime": spark.TimestampType(), "json": spark.StringType(), "text": spark.StringType(),
    "date": spark.DateType(), "decimal": spark.DecimalType(38, 18), "uuid": spark.StringType(),
}  # fmt: skip
_SIMPLE: dict[Any, str] = {
    int: "int", float: "float", str: "str", bool: "bool", datetime: "datetime", date: "date", Decimal: "decimal",
    uuid.UUID: "uuid",
}  # fmt: skip
# Classes of a kind's values in Python; an int is a float, too.
_CLASSES: dict[str, tuple[type, ...]] = {
    **{name: (made,) for made, name in _SIMPLE.items()}, "float": (float, int), "list": (list, tuple), "dict": (dict,),
}  # fmt: skip
_JSON = Kind("json", nullable=True)


def kind_of(annotation: Any, within: tuple[Any, ...] = ()) -> Kind:
    """The kind of a field's annotation. Raises ConfigError for a class whose own annotations cannot be resolved.

    ``within``: the classes that the field is in. One that holds itself has no type in SQL: there it is JSON.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        some = [argument for argument in arguments if argument is not type(None)]
        if len(some) == 1 and len(arguments) == 2:
            return attrs.evolve(kind_of(some[0], within), nullable=True)
        return _JSON
    if (origin is list and arguments) or (origin is tuple and arguments[1:] == (...,)):
        return Kind("list", inner=kind_of(arguments[0], within))
    if origin is dict and arguments[0] is str:
        return Kind("dict", inner=kind_of(arguments[1], within))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _kind_of_enum(annotation)
    if isinstance(annotation, type) and attrs.has(annotation) and annotation not in within:
        return _kind_of_class(annotation, (*within, annotation))
    try:
        return Kind(_SIMPLE[annotation])
    except (KeyError, TypeError):
        return _JSON


def _kind_of_enum(made: type[Enum]) -> Kind:
    found = {type(member.value) for member in made}
    name = next((name for one, name in ((int, "int"), (str, "str")) if found == {one}), "json")
    return Kind(name, made=made)


def _kind_of_class(made: type[Any], within: tuple[Any, ...]) -> Kind:
    try:
        hints = typing.get_type_hints(made)
    except NameError as error:
        raise ConfigError(f"an annotation of {made.__name__} cannot be resolved: {error}") from None
    parts = [(field.name, kind_of(hints.get(field.name, Any), within)) for field in attrs.fields(made) if field.init]
    return Kind("struct", parts=tuple(parts), made=made) if parts else _JSON


class WrongKindError(ValueError):
    """A value that its kind does not admit."""


def arrow_value(kind: Kind, value: Any) -> Any:
    """A value of Python's, as a field has it, as pyarrow takes it. Raises WrongKindError."""
    if value is None and kind.nullable:
        return None
    classes: tuple[type[Any], ...] = _CLASSES.get(kind.name, (object,)) if kind.made is None else (kind.made,)
    if not isinstance(value, classes) or (isinstance(value, bool) and kind.name in ("int", "float")):
        needed = kind.name if kind.made is None else kind.made.__name__
        raise WrongKindError(f"{needed} is needed, not {type(value).__name__}")
    if isinstance(value, Enum):
        value = value.value
    match kind.name:
        case "struct":
            return {name: _part(name, part, getattr(value, name)) for name, part in kind.parts}
        case "list" if kind.inner is not None:
            return [arrow_value(kind.inner, one) for one in value]
        case "dict" if kind.inner is not None:
            return [(name, arrow_value(kind.inner, one)) for name, one in value.items()]
        case "json":
            return _json(value)
        case "date" if isinstance(value, datetime):
            return value.date()
        case "uuid":
            return str(value)
        case "float":
            return float(value)
    return value


def _part(name: str, kind: Kind, value: Any) -> Any:
    try:
        return arrow_value(kind, value)
    except WrongKindError as error:
        raise WrongKindError(f"{name}: {error}") from None


def _json(value: Any) -> str:
    try:
        return json_bytes(value, plain_value).decode()
    except ValueError as error:
        raise WrongKindError(str(error)) from None
