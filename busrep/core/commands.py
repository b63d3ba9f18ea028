"""The command lines: one frozen attrs class each, `parse` and ``command.format()``.

A line is ``NAME``, a space and the fields, separated by single spaces; only the last field (free text or JSON) may hold
spaces (protocol.md, section 1). A command that exists can be formatted: its constructor raises `ConfigError` for what
has no form on the wire, `parse` raises `ParseError` for the same reasons, and nothing else.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias, cast, get_args

import attrs

from busrep.errors import ParseError

from . import application_commands as application
from . import fields
from .fields import INT64_MAX, BadFieldError, Line, refuse_integer

_POSITION = re.compile(rb"([!-~]{1,255}) ([!-~]{1,255}) (0|[1-9][0-9]{0,17}) (0|[1-9][0-9]{0,17})")
_COMMAND_NAME = re.compile(rb"[A-Z_]+")
_SPEAKER = re.compile(rb"([!-~]{1,255}) (0|[1-9][0-9]{0,18})")
_SERVER = re.compile(r"(.+) ([0-9a-f]{32})", re.DOTALL)
_EPOCH = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"([^ ]+) (0|[1-9][0-9]{0,18})")


@attrs.frozen
class Server(Line):
    """``SERVER name [epoch]``: the identity of the deployment; ``epoch`` (32 hex digits) is that of its fact log."""

    NAME = b"SERVER"
    name: str = attrs.field(validator=fields.TEXT)
    epoch: str | None = attrs.field(default=None)

    @epoch.validator
    def _check_epoch(self, _attribute: object, epoch: object) -> None:
        if epoch is None:
            if _SERVER.fullmatch(self.name):
                raise BadFieldError("Server", "name", "ends like an epoch")
        elif not (isinstance(epoch, str) and _EPOCH.fullmatch(epoch)):
            raise BadFieldError("Server", "epoch", "32 lowercase hexadecimal digits are needed")

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        return b"SERVER " + (self.name if self.epoch is None else f"{self.name} {self.epoch}").encode()

    @classmethod
    def read(cls, rest: bytes) -> Server:
        """See `Line.read`."""
        text = rest.decode()
        match = _SERVER.fullmatch(text)
        return cls(match[1], match[2]) if match else cls(text)


@attrs.frozen
class Name(Line):
    """``NAME instance [incarnation]``: who is speaking; ``incarnation`` rises with each start."""

    NAME = b"NAME"
    instance: str = attrs.field(validator=fields.TEXT)
    incarnation: int | None = attrs.field(default=None)

    @incarnation.validator
    def _check_incarnation(self, _attribute: object, incarnation: object) -> None:
        if incarnation is None:
            if _split_name(self.instance):
                raise BadFieldError("Name", "instance", "ends like an incarnation")
            return
        reason = refuse_integer(incarnation)
        if reason or cast(int, incarnation) < 0:
            raise BadFieldError("Name", "incarnation", reason or "is negative")
        if " " in self.instance:
            raise BadFieldError("Name", "instance", "holds a space, so it cannot carry an incarnation")

    def format(self) -> bytes:
        """The command as a line, without a newline."""
        tail = "" if self.incarnation is None else f" {self.incarnation}"
        return b"NAME " + (self.instance + tail).encode()

    @classmethod
    def read(cls, rest: bytes) -> Name:
        """See `Line.read`."""
        if (match := _SPEAKER.fullmatch(rest)) and (incarnation := int(match[2])) <= INT64_MAX:
            # Every frame begins with one: what the pattern has checked is not checked again.
            name = cls.__new__(cls)
            object.__setattr__(name, "instance", match[1].decode())
            object.__setattr__(name, "incarnation", incarnation)
            return name
        text = rest.decode()
        return cls(*(_split_name(text) or (text,)))


def _split_name(text: str) -> tuple[str, int] | None:
    """Instance and incarnation, if the text is exactly a word, one space and a number; else it is all free text."""
    match = _NAME.fullmatch(text)
    return (match[1], int(match[2])) if match and int(match[2]) <= INT64_MAX else None


@attrs.frozen
class Ping(Line):
    """``PING unix-ms``: keep-alive."""

    NAME = b"PING"
    unix_ms: int = attrs.field(validator=fields.INT)


@attrs.frozen
class Error(Line):
    """``ERROR text``: what the peer did wrong; usually the connection closes next."""

    NAME = b"ERROR"
    text: str = attrs.field(validator=fields.NOTE)


@attrs.frozen
class Replicate(Line):
    """``REPLICATE``: asks every writer for its positions. Real traffic has a space behind it."""

    NAME = b"REPLICATE"


@attrs.frozen
class Position(Line):
    """``POSITION stream writer prev new``: no row of this writer in (prev, new]; it is now at new."""

    NAME = b"POSITION"
    stream: str = attrs.field(validator=fields.WORD)
    writer: str = attrs.field(validator=fields.WORD)
    prev: int = attrs.field(validator=fields.INT)
    new: int = attrs.field(validator=fields.INT)

    def __attrs_post_init__(self) -> None:
        if self.prev > self.new:
            raise BadFieldError("Position", "prev", f"{self.prev} is above new, {self.new}")

    @classmethod
    def read(cls, rest: bytes) -> Position:
        """See `Line.read`."""
        match = _POSITION.fullmatch(rest)
        if match is None:
            return cast(Position, super().read(rest))
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
class Rdata(Line):
    """``RDATA stream writer token row``: one row, any JSON value; ``token`` None is ``batch`` (more rows follow)."""

    NAME = b"RDATA"
    stream: str = attrs.field(validator=fields.WORD)
    writer: str = attrs.field(validator=fields.WORD)
    token: int | None = attrs.field(validator=fields.TOKEN)
    row: Any = attrs.field(validator=fields.JSON)


Command: TypeAlias = (
    Server | Name | Ping | Error | Replicate | Position | Rdata
    | application.UserSync | application.ClearUserSync | application.FederationAck | application.RemoteServerUp
    | application.UserIp | application.LockReleased | application.NewActiveTask | application.CancelTask
)  # fmt: skip

_BY_NAME: dict[bytes, type[Line]] = {cls.NAME: cls for cls in get_args(Command)}


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
        command: Command = cls.read(rest)
    except BadFieldError as error:
        raise ParseError(line, error.field, error.reason) from None
    except UnicodeDecodeError as error:  # of free text, which is the first field
        raise ParseError(line, attrs.fields(cast(Any, cls))[0].name, str(error)) from None
    return command


def is_unknown(line: bytes) -> bool:
    """Whether the line has the form of a command, and its name is none of ours (a newer or foreign peer's)."""
    name = line.partition(b" ")[0]
    return name not in _BY_NAME and _COMMAND_NAME.fullmatch(name) is not None
