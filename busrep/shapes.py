"""The fields of row classes as the store keeps them, and which changes of a row class fit them.

A row travels as an array of its fields, so a field is known by its place alone. Two classes of one stream fit when they
agree in every place that both have, and when the places that only one of them has are at the end and have defaults.
Which of the two is the newer one does not matter: while a service is deployed, both are at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import orjson

from busrep.errors import RowClassMismatch
from busrep.row_types import ANYTHING, Field, Fields, required_places, split_type, type_named
from busrep.streams import Stream

# A value that does not fit is quoted in messages of at most so many characters.
_MOST = 200


def row_of(fields: Fields, value: Any) -> list[Any]:
    """The row, an array, that a JSON value stands for: the array itself, or an object of the values by field name.

    Raises ValueError, which says what does not fit.
    """
    if isinstance(value, dict):
        value = _array_of(fields, value)
    if not isinstance(value, list):
        raise ValueError(f"an array, or an object, of the fields {shown(fields)} is needed")
    if not required_places(fields) <= len(value) <= len(fields):
        raise ValueError(f"it has {len(value)} values for the fields {shown(fields)}")
    for one, given in zip(fields, value, strict=False):
        if not type_named(one.type).admits(given):
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


def includes(wider: str, narrower: str) -> bool:
    """Whether a field of the first type takes every value of the second."""
    alternatives = split_type(wider, "|")
    return all(any(_takes(one, value) for one in alternatives) for value in split_type(narrower, "|"))


def _takes(wider: str, narrower: str) -> bool:
    if wider in (narrower, ANYTHING) or (wider, narrower) == ("float", "int"):
        return True
    (kind, _, inside), (other, _, value) = wider.partition("["), narrower.partition("[")
    if kind != other or not value:
        return False
    if not inside:  # an array of anything
        return True
    parts, values = split_type(inside[:-1], ","), split_type(value[:-1], ",")
    return len(parts) == len(values) and all(map(includes, parts, values))


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


def fields_to_store(streams: Iterable[Stream[Any]], stored: dict[str, str | None]) -> dict[str, str | None]:
    """The fields of each stream, as the store is to keep them. Raises RowClassMismatch for the first stream whose row
    class does not fit what is stored of it."""
    wanted: dict[str, str | None] = {}
    for stream in streams:
        fields, known = stream.fields, stored.get(stream.name)
        wanted[stream.name] = known if fields is None else dump(merged(stream.name, fields, load(known)))
    return wanted
