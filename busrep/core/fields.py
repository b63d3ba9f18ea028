"""The fields of command lines: which values they take, how these are read and written, and the walk over those of a
command (protocol.md, section 1).

Numbers are integers of 64 bits with sign and have one spelling: ``+5``, ``007``, ``1_0`` and ``-0`` are refused, so
that two different lines never mean the same position. How a field is checked, read and written stands once, in a
`FieldKind`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, cast

import attrs
import orjson

from busrep.errors import ConfigError

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)

# The longest name on the wire, of whatever: as long as a user ID of the reference system may be, and the DNS name of a
# server. Names are remembered and stored, so all bounds that count names count bytes by it.
NAME_BYTES = 255

_JSON_ONLY = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_USUAL_TEXT = re.compile(r"[ -~]{1,255}")
_USUAL_NAME = re.compile(r"[!-~]{1,255}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class BadFieldError(ConfigError):
    """A value that has no form on the wire; ``field`` and ``reason`` are what `ParseError` wants to know."""

    def __init__(self, command: str, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{command}({field}=...): {reason}")


def json_bytes(value: object, default: Callable[[Any], Any] | None = None) -> bytes:
    """``value`` as compact, ASCII-escaped JSON (protocol.md, section 1).

    ``default`` turns what JSON does not have into what it has, or raises TypeError.

    Raises:
        ValueError: NaN, Infinity, integers beyond 64 bits, lone surrogates, nesting over 254 levels, or a type that
            JSON does not have.
    """
    try:
        text = orjson.dumps(value, default, _JSON_ONLY)
    except TypeError as error:  # orjson.JSONEncodeError is one
        raise ValueError(str(error)) from None
    # orjson writes NaN and Infinity as null: where there is no null in the text there was none of them.
    if b"null" in text and not _finite(value):
        raise ValueError("NaN and Infinity are not JSON")
    if text.isascii():
        return text
    return _NOT_ASCII.sub(lambda wide: encode_basestring_ascii(wide[0])[1:-1], text.decode()).encode()


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if value is None or isinstance(value, str | int) or not attrs.has(type(value)):
        return not isinstance(value, list | tuple) or all(map(_finite, value))
    return all(_finite(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.init)


@attrs.frozen
class FieldKind:
    """One kind of field: why a value is refused (or None), bytes to value, value to bytes. Is an attrs validator."""

    refuse: Callable[[Any], str | None]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]

    def __call__(self, command: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Refuse a value that has no form on the wire."""
        reason = self.refuse(value)
        if reason is not None:
            raise BadFieldError(type(command).__name__, attribute.name, reason)


def _refuse_string(value: object) -> str | None:
    if not isinstance(value, str):
        return f"a string is needed, not {type(value).__name__}"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "lone surrogates cannot be written as UTF-8"
    return None


def _refuse_note(value: Any) -> str | None:
    return _refuse_string(value) or ("holds a newline" if "\n" in value else None)


def _refuse_text(value: Any) -> str | None:
    if type(value) is str and _USUAL_TEXT.fullmatch(value):
        return None  # the usual text, without the checks one by one
    if (reason := _refuse_note(value)) is not None:
        return reason
    if not value:
        return "is empty"
    if len(value) > NAME_BYTES or len(value.encode()) > NAME_BYTES:
        return f"is longer than {NAME_BYTES} bytes"
    return "holds a control character" if _CONTROL.search(value) else None


def refuse_name(value: Any) -> str | None:
    """Why ``value`` cannot be a name of a stream, a writer, a user...; None if it can."""
    if type(value) is str and _USUAL_NAME.fullmatch(value):
        return None  # the usual name, without the checks one by one
    return _refuse_text(value) or ("holds a space" if " " in value else None)


def refuse_integer(value: object) -> str | None:
    """Why ``value`` is no integer of 64 bits; None if it is one."""
    if type(value) is not int:
        return f"an integer is needed, not {type(value).__name__}"
    return None if INT64_MIN <= value <= INT64_MAX else "is beyond 64 bits"


def _refuse_device(value: Any) -> str | None:
    if value == "None":
        return "a device cannot be named 'None': on the wire that is no device"
    return None if value is None else refuse_name(value)


def _refuse_json(value: object) -> str | None:
    try:
        json_bytes(value)
    except ValueError as error:
        return str(error)
    return None


def read_integer(data: bytes) -> int:
    """An integer of 64 bits in its one spelling; raises ValueError, which says what is wrong with it."""
    if data.isdigit() and len(data) < 19 and not data.startswith(b"0"):
        return int(data)  # the usual token, without the pattern
    if not _INTEGER.fullmatch(data):
        raise ValueError("is not an integer" if len(data) < 20 else "is not an integer of 64 bits")
    number = int(data)
    if not INT64_MIN <= number <= INT64_MAX:
        raise ValueError("is beyond 64 bits")
    return number


def _read_switch(data: bytes) -> bool:
    if data not in (b"start", b"end"):
        raise ValueError("is neither start nor end")
    return data == b"start"


def read_json(data: bytes) -> Any:
    """The value of a JSON text; raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


NOTE = FieldKind(_refuse_note, bytes.decode, str.encode)
TEXT = FieldKind(_refuse_text, bytes.decode, str.encode)
WORD = FieldKind(refuse_name, bytes.decode, str.encode)
INT = FieldKind(refuse_integer, read_integer, b"%d".__mod__)
DEVICE = FieldKind(
    _refuse_device,
    lambda data: None if data == b"None" else bytes.decode(data),
    lambda value: b"None" if value is None else value.encode(),
)
SWITCH = FieldKind(
    lambda value: None if type(value) is bool else "a bool is needed",
    _read_switch,
    lambda value: b"start" if value else b"end",
)
TOKEN = FieldKind(
    lambda value: None if value is None else refuse_integer(value),
    lambda data: None if data == b"batch" else read_integer(data),
    lambda value: b"batch" if value is None else b"%d" % value,
)
JSON = FieldKind(_refuse_json, read_json, json_bytes)
# Inside a JSON array: read and written by it.
STRING = FieldKind(_refuse_string, bytes.decode, str.encode)
STRING_OR_NULL = FieldKind(lambda value: None if value is None else _refuse_string(value), bytes.decode, str.encode)


class Line:
    """A command: the walk over the fields of its class."""

    __slots__ = ()

    NAME: ClassVar[bytes]
    JSON_FROM: ClassVar[int | None] = None  # the fields from this one on are one JSON array

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        names, wire = _shape(cast(Any, type(self)))
        values = [getattr(self, name) for name in names]
        if self.JSON_FROM is not None:
            values[self.JSON_FROM :] = [values[self.JSON_FROM :]]
        return b" ".join([self.NAME, *(kind.write(value) for (_, kind), value in zip(wire, values, strict=True))])

    @classmethod
    def read(cls, rest: bytes) -> Any:
        """The command whose fields are ``rest``. Raises BadFieldError; UnicodeDecodeError where these are free text."""
        names, wire = _shape(cast(Any, cls))
        parts = rest.split(b" ", len(wire) - 1) if rest or wire else []
        if len(parts) != len(wire):
            raise BadFieldError(cls.__name__, "line", f"{cls.NAME.decode()} takes {len(wire)} fields")
        values: list[Any] = []
        for (name, kind), part in zip(wire, parts, strict=True):
            try:
                values.append(kind.read(part))
            except ValueError as error:
                raise BadFieldError(cls.__name__, name, str(error)) from None
        if cls.JSON_FROM is not None:
            array, count = values.pop(), len(names) - cls.JSON_FROM
            if type(array) is not list or len(array) != count:
                raise BadFieldError(cls.__name__, "json", f"an array of {count} is needed")
            values += array
        return cls(*values)


@cache
def _shape(cls: Any) -> tuple[tuple[str, ...], tuple[tuple[str, FieldKind], ...]]:
    """The names of all fields, and what stands on the wire: names and kinds."""
    fields = attrs.fields(cls)
    wire = [(field.name, field.validator) for field in fields[: cls.JSON_FROM]]
    if cls.JSON_FROM is not None:
        wire.append(("json", JSON))
    return tuple(field.name for field in fields), tuple(wire)
