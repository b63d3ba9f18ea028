"""What the command lines share: the walk over the fields of their class."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from busrep.errors import ParseError

from .fields import FieldKind, json_bytes, read_json


class Line:
    """What the commands share: the walk over the fields of the class."""

    __slots__ = ()

    NAME: ClassVar[bytes]
    JSON_FROM: ClassVar[int | None] = None
    """The fields from this one on are one JSON array."""

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        names, plain, _ = _shape(type(self))
        fields = [kind.write(getattr(self, name)) for name, kind in zip(names, plain, strict=False)]
        if self.JSON_FROM is not None:
            fields.append(json_bytes([getattr(self, name) for name in names[self.JSON_FROM :]]))
        return b" ".join([self.NAME, *fields])

    @classmethod
    def read(cls, line: bytes, rest: bytes) -> Any:
        """The command whose fields are ``rest``; ``line`` is for the error."""
        names, plain, count = _shape(cls)
        parts = rest.split(b" ", count - 1) if rest or count else []
        if len(parts) != count:
            raise ParseError(line, "line", f"{cls.NAME.decode()} takes {count} fields")
        values: list[Any] = []
        try:
            for kind, part in zip(plain, parts, strict=False):
                values.append(kind.read(part))
        except ValueError as error:
            raise ParseError(line, names[len(values)], str(error)) from None
        if cls.JSON_FROM is not None:
            values += cls._read_array(line, parts[-1], len(names) - len(plain))
        return cls(*values)

    @classmethod
    def _read_array(cls, line: bytes, part: bytes, count: int) -> list[Any]:
        try:
            array = read_json(part)
        except ValueError as error:
            raise ParseError(line, "json", str(error)) from None
        if type(array) is not list or len(array) != count:
            raise ParseError(line, "json", f"an array of {count} is needed")
        return array


_Shape = tuple[tuple[str, ...], tuple[FieldKind, ...], int]
_shapes: dict[type[Any], _Shape] = {}


def _shape(cls: type[Any]) -> _Shape:
    """Names of all fields, kinds of those outside JSON, and the number of fields on the wire."""
    if cls not in _shapes:
        fields = attrs.fields(cls)
        plain = tuple(field.validator for field in fields[: cls.JSON_FROM])
        _shapes[cls] = tuple(field.name for field in fields), plain, len(plain) + (cls.JSON_FROM is not None)
    return _shapes[cls]
