"""Shortcuts that row_types.py takes where they do the same as its plain way: reading by msgspec, and assigning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import attrs


def values_reader(types: Sequence[str]) -> Callable[[bytes], tuple[Any, ...]] | None:
    """What reads the values of one payload in one step, for fields of these types (``FieldType.text``), by msgspec
    (extra ``fast``). None without it, and where it would not read as the plain way does. It raises for what does not
    fit, and for rows of another number of fields, as another version of the class writes them: the plain way tells."""
    try:
        import msgspec  # here, for it takes 40 ms, and not every process has rows of a class
    except ImportError:
        return None
    # Beyond 64 bits orjson makes a float of an integer, which is refused.
    whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    plain: dict[str, Any] = {"int": whole, "float": float, "str": str, "bool": bool}
    # The parts of a union are sorted by name.
    known = plain | {" | ".join(sorted((name, "null"))): Optional[made] for name, made in plain.items()}  # noqa: UP045
    if not all(text in known for text in types):
        return None
    return msgspec.json.Decoder(tuple[tuple(known[text] for text in types)]).decode  # type: ignore[misc]


def thawed(row_type: type[Any], names: Sequence[str]) -> type[Any] | None:
    """A subclass of a frozen class with slots whose constructor assigns plainly; None where it would not do the same.

    attrs' constructor of a frozen class with slots calls object.__setattr__ for each field, three times the
    cost of plain assignments. The subclass adds no slots, so an object made as one can be given the class
    ``row_type`` itself. Only for classes whose constructor does nothing else: no converters, validators,
    hooks, nor one of their own.
    """
    slots = [slot for base in row_type.__mro__ for slot in base.__dict__.get("__slots__", ())]
    code = getattr(row_type.__init__, "__code__", None)
    if (
        sorted(slots) != sorted([*names, "__weakref__"])
        or row_type.__dictoffset__
        or type(row_type) is not type
        or code is None
        or not code.co_filename.startswith("<attrs generated")
        or row_type.__dict__.get("__setattr__") is None
        or any("__new__" in base.__dict__ for base in row_type.__mro__[:-1])
        or any(hasattr(row_type, hook) for hook in ("__attrs_pre_init__", "__attrs_post_init__"))
        or any(field.validator or field.converter or not field.init for field in attrs.fields(row_type))
        or any("__init_subclass__" in base.__dict__ for base in row_type.__mro__[:-1])
    ):
        return None
    plain: Any = attrs.make_class(row_type.__name__, list(names), slots=True)
    body = {
        "__slots__": (),
        "__init__": plain.__init__,
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,  # CPython assigns plainly only where both are object's
    }
    return type(row_type.__name__, (row_type,), body)
