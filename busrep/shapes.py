"""The fields of row classes as the store keeps them, and which changes of a row class fit them.

A row travels as an array of its fields, so a field is known by its place alone. Two classes of one stream fit when they
agree in every place that both have, and when the places that only one of them has are at the end and have defaults.
Which of the two is the newer one does not matter: while a service is deployed, both are at work.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import attrs
import orjson

from busrep.errors import RowClassMismatch
from busrep.streams import Stream

# A field of a converter, or one that is annotated so, takes whatever the converter takes.
ANYTHING = "any"

_NAMES: dict[Any, str] = {
    Any: ANYTHING, object: ANYTHING, type(None): "null", list: "array", dict: "object", tuple: "tuple",
    datetime: "datetime",
}  # fmt: skip


_JSON: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "str": (str,), "bool": (bool,), "null": (type(None),), "array": (list,),
    "tuple": (list,), "object": (dict,), "datetime": (str,),
}  # fmt: skip

# A value that does not fit is quoted in messages of at most so many characters.
_MOST = 200


@attrs.frozen
class Field:
    """One field of a row class: its name, its type as text, and whether it has a default."""

    name: str
    type: str
    default: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{' = default' if self.default else ''}"


Fields = tuple[Field, ...]


def fields_of(stream: Stream[Any]) -> Fields | None:
    """The fields of a stream's rows; None for a stream without a row class."""
    made: Any = stream.row_type
    if made is None:
        return None
    hints = typing.get_type_hints(made)
    return tuple(
        Field(
            one.name,
            ANYTHING if one.converter else type_text(hints.get(one.name, one.type or Any)),
            one.default is not attrs.NOTHING,
        )
        for one in attrs.fields(made)
        if one.init
    )


def type_text(annotation: Any) -> str:
    """An annotation as text that does not depend on how it was spelt: ``int | null``, ``array[int]``, ``any``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted({one for argument in arguments for one in _split(type_text(argument), "|")}))
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return f"array[{type_text(arguments[0])}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(type_text, arguments))}]"
    if origin is dict:
        return f"object[{type_text(arguments[1])}]"
    return _NAMES.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _split(text: str, mark: str) -> list[str]:
    """The parts of a type between marks that stand in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == mark and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def includes(wider: str, narrower: str) -> bool:
    """Whether a field of the first type takes every value of the second."""
    alternatives = _split(wider, "|")
    return all(any(_takes(one, value) for one in alternatives) for value in _split(narrower, "|"))


def _takes(wider: str, narrower: str) -> bool:
    if wider in (narrower, ANYTHING) or (wider, narrower) == ("float", "int"):
        return True
    (kind, _, inside), (other, _, value) = wider.partition("["), narrower.partition("[")
    if kind != other or not value:
        return False
    if not inside:  # an array of anything
        return True
    parts, values = _split(inside[:-1], ","), _split(value[:-1], ",")
    return len(parts) == len(values) and all(map(includes, parts, values))


def value_fits(text: str, value: Any) -> bool:
    """Whether a JSON value is one of a type."""
    return any(_is_one(kind, value) for kind in _split(text, "|"))


def _is_one(text: str, value: Any) -> bool:
    kind, _, inside = text.partition("[")
    wanted = _JSON.get(kind)
    if wanted is None:  # any
        return True
    if type(value) not in wanted:
        return False
    if kind == "datetime":
        return _is_datetime(value)
    if not inside:
        return True
    if kind == "tuple":
        parts = _split(inside[:-1], ",")
        return len(parts) == len(value) and all(map(value_fits, parts, value))
    return all(value_fits(inside[:-1], one) for one in (value.values() if kind == "object" else value))


def _is_datetime(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def row_of(fields: Fields, value: Any) -> list[Any]:
    """The row, an array, that a JSON value stands for: the array itself, or an object of the values by field name.

    Raises ValueError, which says what does not fit.
    """
    if isinstance(value, dict):
        value = _array_of(fields, value)
    if not isinstance(value, list):
        raise ValueError(f"an array, or an object, of the fields {shown(fields)} is needed")
    required = max((at for at, one in enumerate(fields, 1) if not one.default), default=0)
    if not required <= len(value) <= len(fields):
        raise ValueError(f"it has {len(value)} values for the fields {shown(fields)}")
    for one, given in zip(fields, value, strict=False):
        if not value_fits(one.type, given):
            raise ValueError(f"field {one.name!r}: {one.type} is needed, not {given!r}"[:_MOST])
    return value


def _array_of(fields: Fields, values: dict[str, Any]) -> list[Any]:
    names = [one.name for one in fields]
    if unknown := values.keys() - set(names):
        raise ValueError(f"there is no field {min(unknown)!r} (there are: {', '.join(names)})")
    count = max((at for at, name in enumerate(names, 1) if name in values), default=0)
    for one in (*fields[:count], *[one for one in fields[count:] if not one.default]):
        if one.name not in values:
            known = ": its default is in the row class, pass --streams" if one.default else ""
            raise ValueError(f"field {one.name!r} is missing{known}")
    return [values[name] for name in names[:count]]


def merged(stream: str, declared: Fields, stored: Fields | None) -> Fields:
    """The fields to keep of a stream: what both classes have, and what only one of them has.

    Raises RowClassMismatch when they do not fit: rows of one would fill the wrong fields of the other.
    """
    if stored is None:
        return declared
    both = [_merged_field(one, other) for one, other in zip(declared, stored, strict=False)]
    longer = declared if len(declared) > len(stored) else stored
    more = longer[len(both) :]
    if None in both or not all(one.default for one in more):
        raise RowClassMismatch(stream, _reason(both, more, longer is declared), shown(declared), shown(stored))
    return (*[one for one in both if one is not None], *more)


def _merged_field(declared: Field, stored: Field) -> Field | None:
    if declared.name != stored.name:
        return None
    if ANYTHING in (declared.type, stored.type):
        kept = stored.type if declared.type == ANYTHING else declared.type
    elif includes(stored.type, declared.type):
        kept = stored.type
    elif includes(declared.type, stored.type):
        kept = declared.type
    else:
        return None
    return Field(declared.name, kept, declared.default or stored.default)


def _reason(both: Sequence[Field | None], more: Sequence[Field], declared_is_longer: bool) -> str:
    if None in both:
        return f"field {both.index(None) + 1} is another one"
    name = next(one.name for one in more if not one.default)
    where = "added" if declared_is_longer else "missing"
    return f"field {len(both) + 1 + [one.name for one in more].index(name)}, {name!r}, is {where} and has no default"


def shown(fields: Fields) -> str:
    """Fields for a person."""
    return f"({', '.join(map(str, fields))})"


def dump(fields: Fields) -> str:
    """Fields as the store keeps them."""
    return orjson.dumps([attrs.asdict(one) for one in fields]).decode()


def load(text: str | None) -> Fields | None:
    """Fields that the store kept; None when it does not know them."""
    return None if text is None else tuple(Field(**one) for one in orjson.loads(text))


def check_fields(streams: Iterable[Stream[Any]], stored: dict[str, str | None]) -> None:
    """Raises RowClassMismatch for the first stream whose row class does not fit what is stored of it."""
    for stream in streams:
        fields = fields_of(stream)
        if fields is not None:
            merged(stream.name, fields, load(stored.get(stream.name)))


def fields_to_store(streams: Iterable[Stream[Any]], stored: dict[str, str | None]) -> dict[str, str | None]:
    """The fields of each stream, as the store is to keep them. Raises RowClassMismatch."""
    wanted: dict[str, str | None] = {}
    for stream in streams:
        fields, known = fields_of(stream), stored.get(stream.name)
        wanted[stream.name] = known if fields is None else dump(merged(stream.name, fields, load(known)))
    return wanted
