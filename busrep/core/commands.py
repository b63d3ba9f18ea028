"""The command lines: one frozen attrs class each, `parse` and ``command.format()``.

A line is ``NAME``, a space and the fields, separated by single spaces; only the last field (free text or
JSON) may hold spaces (protocol.md, section 1). How a field is checked, read and written stands once, in a
``_FieldKind``: it is the validator of the attrs field, and parsing and formatting walk the fields of the class. So
a command that exists can be formatted: its constructor raises `ConfigError` for what has no form on the wire,
`parse` raises `ParseError` for the same reasons, and nothing else.

Numbers are integers of 64 bits with sign and have one spelling: ``+5``, ``007``, ``1_0`` and ``-0`` are
refused. Nobody writes them, and so two different lines never mean the same position.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, cast

import attrs
import orjson

from busrep.errors import ConfigError, ParseError

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)

NAME_BYTES = 255
"""The longest name on the wire, of whatever (rule 9.20): as long as a user ID of the reference system may be, and the
DNS name of a server. Names are remembered and stored, so all bounds that count names count bytes by it."""

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_POSITION = re.compile(rb"([!-~]{1,255}) ([!-~]{1,255}) (0|[1-9][0-9]{0,17}) (0|[1-9][0-9]{0,17})")
_USUAL_TEXT = re.compile(r"[ -~]{1,255}")
_USUAL_NAME = re.compile(r"[!-~]{1,255}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_COMMAND_NAME = re.compile(rb"[A-Z_]+")
_SPEAKER = re.compile(rb"([!-~]{1,255}) (0|[1-9][0-9]{0,17})")
_SERVER = re.compile(r"(.+) ([0-9a-f]{32})", re.DOTALL)
_EPOCH = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"([^ ]+) (0|[1-9][0-9]{0,18})")


class _BadFieldError(ConfigError):
    """A value that has no form on the wire; ``field`` and ``reason`` are what `ParseError` wants to know."""

    def __init__(self, command: str, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{command}({field}=...): {reason}")


def json_bytes(value: object, default: Callable[[Any], Any] | None = None) -> bytes:
    """``value`` as compact, ASCII-escaped JSON (protocol.md, section 1).

    ``default`` turns what JSON does not have into what it has, or raises TypeError.

    Raises:
        ValueError: NaN, Infinity, integers beyond 64 bits, lone surrogates, nesting over 254 levels, or a
        type that
            JSON does not have.
    """
    try:
        text = orjson.dumps(value, default, _JSON_ONLY)
    except TypeError as error:  # orjson.JSONEncodeError is one
        raise ValueError(str(error)) from None
    # orjson writes NaN and Infinity as null: where there is no null in the text there was none of them.
    if b"null" in text and not _finite(value):
        raise ValueError("NaN and Infinity are not JSON")
    return text if text.isascii() else _NOT_ASCII.sub(_escape, text.decode()).encode()


_JSON_ONLY = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def _finite(value: object) -> bool:
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))


# --- kinds of fields ---


@attrs.frozen
class _FieldKind:
    """One kind of field: why a value is refused (or None), bytes to value, value to bytes. Is an attrs
    validator.
    """

    refuse: Callable[[Any], str | None]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]

    def __call__(self, command: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        reason = self.refuse(value)
        if reason is not None:
            raise _BadFieldError(type(command).__name__, attribute.name, reason)


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
    """Why ``value`` cannot be a name of a stream, a writer, a user... (rule 9.20); None if it can."""
    if type(value) is str and _USUAL_NAME.fullmatch(value):
        return None  # the usual name, without the checks one by one
    return _refuse_text(value) or ("holds a space" if " " in value else None)


def _refuse_integer(value: object) -> str | None:
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


def _read_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


_NOTE = _FieldKind(_refuse_note, bytes.decode, str.encode)
_TEXT = _FieldKind(_refuse_text, bytes.decode, str.encode)
_WORD = _FieldKind(refuse_name, bytes.decode, str.encode)
_INT = _FieldKind(_refuse_integer, read_integer, b"%d".__mod__)
_DEVICE = _FieldKind(
    _refuse_device,
    lambda data: None if data == b"None" else bytes.decode(data),
    lambda value: b"None" if value is None else value.encode(),
)
_SWITCH = _FieldKind(
    lambda value: None if type(value) is bool else "a bool is needed",
    _read_switch,
    lambda value: b"start" if value else b"end",
)
_TOKEN = _FieldKind(
    lambda value: None if value is None else _refuse_integer(value),
    lambda data: None if data == b"batch" else read_integer(data),
    lambda value: b"batch" if value is None else b"%d" % value,
)
_JSON = _FieldKind(_refuse_json, _read_json, json_bytes)
# Inside a JSON array: read and written by it.
_STRING = _FieldKind(_refuse_string, bytes.decode, str.encode)
_STRING_OR_NULL = _FieldKind(lambda value: value if value is None else _refuse_string(value), bytes.decode, str.encode)


# --- commands ---


class _Line:
    """What the commands share: the walk over the fields of the class."""

    __slots__ = ()

    NAME: ClassVar[bytes]
    JSON_FROM: ClassVar[int | None] = None
    """The fields from this one on are one JSON array."""

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        names, plain, _ = _SHAPES[type(self)]
        fields = [kind.write(getattr(self, name)) for name, kind in zip(names, plain, strict=False)]
        if self.JSON_FROM is not None:
            fields.append(json_bytes([getattr(self, name) for name in names[self.JSON_FROM :]]))
        return b" ".join([self.NAME, *fields])

    @classmethod
    def _read(cls, line: bytes, rest: bytes) -> Any:
        """The command whose fields are ``rest``; ``line`` is for the error."""
        names, plain, count = _SHAPES[cls]
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
            array = _read_json(part)
        except ValueError as error:
            raise ParseError(line, "json", str(error)) from None
        if type(array) is not list or len(array) != count:
            raise ParseError(line, "json", f"an array of {count} is needed")
        return array


@attrs.frozen
class Server(_Line):
    """``SERVER name [epoch]``: the identity of the deployment; ``epoch`` (32 hex digits) is that of its fact
    log.
    """

    NAME = b"SERVER"
    name: str = attrs.field(validator=_TEXT)
    epoch: str | None = attrs.field(default=None)

    @epoch.validator
    def _check_epoch(self, _attribute: object, epoch: object) -> None:
        if epoch is None:
            if _SERVER.fullmatch(self.name):
                raise _BadFieldError("Server", "name", "ends like an epoch")
        elif not (isinstance(epoch, str) and _EPOCH.fullmatch(epoch)):
            raise _BadFieldError("Server", "epoch", "32 lowercase hexadecimal digits are needed")

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        return b"SERVER " + (self.name if self.epoch is None else f"{self.name} {self.epoch}").encode()

    @classmethod
    def _read(cls, line: bytes, rest: bytes) -> Server:
        text = _read_rest(line, "name", rest)
        match = _SERVER.fullmatch(text)
        return cls(match[1], match[2]) if match else cls(text)


@attrs.frozen
class Name(_Line):
    """``NAME instance [incarnation]``: who is speaking; ``incarnation`` rises with each start (rule 9.11)."""

    NAME = b"NAME"
    instance: str = attrs.field(validator=_TEXT)
    incarnation: int | None = attrs.field(default=None)

    @incarnation.validator
    def _check_incarnation(self, _attribute: object, incarnation: object) -> None:
        if incarnation is None:
            if _split_name(self.instance):
                raise _BadFieldError("Name", "instance", "ends like an incarnation")
            return
        reason = _refuse_integer(incarnation)
        if reason or cast(int, incarnation) < 0:
            raise _BadFieldError("Name", "incarnation", reason or "is negative")
        if " " in self.instance:
            raise _BadFieldError("Name", "instance", "holds a space, so it cannot carry an incarnation")

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        tail = "" if self.incarnation is None else f" {self.incarnation}"
        return b"NAME " + (self.instance + tail).encode()

    @classmethod
    def _read(cls, line: bytes, rest: bytes) -> Name:
        if match := _SPEAKER.fullmatch(rest):
            # Every frame begins with one: what the pattern has checked is not checked again.
            name = cls.__new__(cls)
            object.__setattr__(name, "instance", match[1].decode())
            object.__setattr__(name, "incarnation", int(match[2]))
            return name
        text = _read_rest(line, "instance", rest)
        return cls(*(_split_name(text) or (text,)))


def _read_rest(line: bytes, field: str, rest: bytes) -> str:
    try:
        return rest.decode()
    except UnicodeDecodeError as error:
        raise ParseError(line, field, str(error)) from None


def _split_name(text: str) -> tuple[str, int] | None:
    """Instance and incarnation, if the text is exactly a word, one space and a number; else it is all free
    text.
    """
    match = _NAME.fullmatch(text)
    return (match[1], int(match[2])) if match and int(match[2]) <= INT64_MAX else None


@attrs.frozen
class Ping(_Line):
    """``PING unix-ms``: keep-alive."""

    NAME = b"PING"
    unix_ms: int = attrs.field(validator=_INT)


@attrs.frozen
class Error(_Line):
    """``ERROR text``: what the peer did wrong; usually the connection closes next."""

    NAME = b"ERROR"
    text: str = attrs.field(validator=_NOTE)


@attrs.frozen
class Replicate(_Line):
    """``REPLICATE``: asks every writer for its positions. Real traffic has a space behind it."""

    NAME = b"REPLICATE"


@attrs.frozen
class Position(_Line):
    """``POSITION stream writer prev new``: no row of this writer in (prev, new]; it is now at new."""

    NAME = b"POSITION"
    stream: str = attrs.field(validator=_WORD)
    writer: str = attrs.field(validator=_WORD)
    prev: int = attrs.field(validator=_INT)
    new: int = attrs.field(validator=_INT)

    def __attrs_post_init__(self) -> None:
        if self.prev > self.new:
            raise _BadFieldError("Position", "prev", f"{self.prev} is above new, {self.new}")

    @classmethod
    def _read(cls, line: bytes, rest: bytes) -> Position:
        match = _POSITION.fullmatch(rest)
        if match is None or not line.isascii():
            return cast(Position, super()._read(line, rest))
        # What the pattern has checked is not checked again, as in `Name`.
        stream, writer, prev, new = match.groups()
        position = cls.__new__(cls)
        object.__setattr__(position, "stream", stream.decode())
        object.__setattr__(position, "writer", writer.decode())
        object.__setattr__(position, "prev", int(prev))
        object.__setattr__(position, "new", int(new))
        position.__attrs_post_init__()
        return position


@attrs.frozen
class Rdata(_Line):
    """``RDATA stream writer token row``: one row, any JSON value; ``token`` None is ``batch`` (more rows
    follow).
    """

    NAME = b"RDATA"
    stream: str = attrs.field(validator=_WORD)
    writer: str = attrs.field(validator=_WORD)
    token: int | None = attrs.field(validator=_TOKEN)
    row: Any = attrs.field(validator=_JSON)


@attrs.frozen
class UserSync(_Line):
    """``USER_SYNC instance_id user_id device_id|None start|end last_sync_ms``: a user started or stopped
    syncing.
    """

    NAME = b"USER_SYNC"
    instance_id: str = attrs.field(validator=_WORD)
    user_id: str = attrs.field(validator=_WORD)
    device_id: str | None = attrs.field(validator=_DEVICE)
    is_syncing: bool = attrs.field(validator=_SWITCH)
    last_sync_ms: int = attrs.field(validator=_INT)


@attrs.frozen
class ClearUserSync(_Line):
    """``CLEAR_USER_SYNC instance_id``: forget all users of that process."""

    NAME = b"CLEAR_USER_SYNC"
    instance_id: str = attrs.field(validator=_WORD)


@attrs.frozen
class FederationAck(_Line):
    """``FEDERATION_ACK instance token``: receipt of federation data."""

    NAME = b"FEDERATION_ACK"
    instance: str = attrs.field(validator=_WORD)
    token: int = attrs.field(validator=_INT)


@attrs.frozen
class RemoteServerUp(_Line):
    """``REMOTE_SERVER_UP server``: a remote server may be back."""

    NAME = b"REMOTE_SERVER_UP"
    server: str = attrs.field(validator=_WORD)


@attrs.frozen
class UserIp(_Line):
    """``USER_IP user_id [access_token, ip, user_agent, device_id|null, last_seen_ms]``; on its own
    sub-channel.
    """

    NAME = b"USER_IP"
    JSON_FROM = 1
    user_id: str = attrs.field(validator=_WORD)
    access_token: str = attrs.field(validator=_STRING)
    ip: str = attrs.field(validator=_STRING)
    user_agent: str = attrs.field(validator=_STRING)
    device_id: str | None = attrs.field(validator=_STRING_OR_NULL)
    last_seen_ms: int = attrs.field(validator=_INT)


@attrs.frozen
class LockReleased(_Line):
    """``LOCK_RELEASED [instance, lock, key]``."""

    NAME = b"LOCK_RELEASED"
    JSON_FROM = 0
    instance: str = attrs.field(validator=_STRING)
    lock: str = attrs.field(validator=_STRING)
    key: str = attrs.field(validator=_STRING)


@attrs.frozen
class NewActiveTask(_Line):
    """``NEW_ACTIVE_TASK task_id``."""

    NAME = b"NEW_ACTIVE_TASK"
    task_id: str = attrs.field(validator=_WORD)


@attrs.frozen
class CancelTask(_Line):
    """``CANCEL_TASK task_id``."""

    NAME = b"CANCEL_TASK"
    task_id: str = attrs.field(validator=_WORD)


Command: TypeAlias = (
    Server | Name | Ping | Error | Replicate | Position | Rdata | UserSync | ClearUserSync | FederationAck
    | RemoteServerUp | UserIp | LockReleased | NewActiveTask | CancelTask
)  # fmt: skip

_CLASSES: tuple[type[_Line], ...] = (
    Server, Name, Ping, Error, Replicate, Position, Rdata, UserSync, ClearUserSync, FederationAck,
    RemoteServerUp, UserIp, LockReleased, NewActiveTask, CancelTask,
)  # fmt: skip


def _shape(cls: type[Any]) -> tuple[tuple[str, ...], tuple[_FieldKind, ...], int]:
    """Names of all fields, kinds of those outside JSON, and the number of fields on the wire."""
    fields = attrs.fields(cls)
    plain = tuple(field.validator for field in fields[: cls.JSON_FROM])
    return tuple(field.name for field in fields), plain, len(plain) + (cls.JSON_FROM is not None)


_SHAPES = {cls: _shape(cls) for cls in _CLASSES}
_BY_NAME = {cls.NAME: cls for cls in _CLASSES}


def parse(line: bytes) -> Command:
    """The command of one line (bytes, without its newline).

    Raises:
        ParseError: and nothing else, whatever the bytes. An unknown command, a wrong shape, a bad field.
    """
    name, _, rest = line.partition(b" ")
    cls = _BY_NAME.get(name)
    if cls is None:
        reason = "is not known" if _COMMAND_NAME.fullmatch(name) else "is not a command name"
        raise ParseError(line, "command", reason)
    if b"\n" in rest:
        raise ParseError(line, "line", "holds a newline")
    try:
        command: Command = cls._read(line, rest)
    except _BadFieldError as error:
        raise ParseError(line, error.field, error.reason) from None
    return command


def is_unknown(line: bytes) -> bool:
    """Whether the line has the form of a command, and its name is none of ours (a newer or foreign peer's)."""
    name = line.partition(b" ")[0]
    return name not in _BY_NAME and _COMMAND_NAME.fullmatch(name) is not None
