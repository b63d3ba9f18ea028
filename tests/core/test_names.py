"""Rule 9.20: names have at most 255 bytes, and no control characters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import busrep
from busrep.core.application_commands import (
    ClearUserSync,
    FederationAck,
    NewActiveTask,
    RemoteServerUp,
    UserIp,
    UserSync,
)
from busrep.core.commands import Name, Position, Rdata, Server, parse
from busrep.core.fields import NAME_BYTES
from busrep.core.framing import COMMAND_BYTES, parse_frame
from busrep.errors import BusrepError, ConfigError, ParseError
from busrep.streams import Stream
from busrep.sync import connect as sync_connect

LONGEST = ["n" * NAME_BYTES, "\N{SNOWMAN}" * (NAME_BYTES // 3), "a.b-c:d@e/f"]
BAD = ["n" * (NAME_BYTES + 1), "\N{SNOWMAN}" * (NAME_BYTES // 3 + 1), "a\0b", "a\tb", "a\x7fb", "a\x9fb", "\x1b[2J"]

# Lines with a name at their places; the number of names.
LINES = [
    "NAME %s",
    "NAME %s 7",
    "SERVER %s",
    "POSITION %s w 1 1",
    "POSITION s %s 1 1",
    "RDATA %s w 1 1",
    "RDATA s %s 1 1",
    "USER_SYNC %s u None start 1",
    "USER_SYNC i %s None start 1",
    "USER_SYNC i u %s start 1",
    "CLEAR_USER_SYNC %s",
    "FEDERATION_ACK %s 1",
    "REMOTE_SERVER_UP %s",
    'USER_IP %s ["t","i","a",null,1]',
    "NEW_ACTIVE_TASK %s",
    "CANCEL_TASK %s",
]
MAKERS: list[Callable[[str], object]] = [
    Name,
    lambda name: Name(name, 7),
    Server,
    lambda name: Position(name, "w", 1, 1),
    lambda name: Position("s", name, 1, 1),
    lambda name: Rdata(name, "w", 1, 1),
    lambda name: Rdata("s", name, 1, 1),
    lambda name: UserSync(name, "u", None, True, 1),
    lambda name: UserSync("i", name, None, True, 1),
    lambda name: UserSync("i", "u", name, True, 1),
    ClearUserSync,
    lambda name: FederationAck(name, 1),
    RemoteServerUp,
    lambda name: UserIp(name, "t", "i", "a", None, 1),
    NewActiveTask,
    Stream,
    lambda name: Stream("s", channel=name),
    lambda name: busrep.connect("redis://localhost", name=name),
    lambda name: busrep.connect("redis://localhost", name="shop", writer=name),
    lambda name: busrep.connect("redis://localhost", name="shop", reader=name, store="sqlite:///x.db"),
    lambda name: sync_connect("redis://localhost", name=name),
    lambda name: sync_connect("redis://localhost", name="shop", writer=name),
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_with_a_bad_name_is_malformed(line: str) -> None:
    for name in LONGEST:
        parse((line % name).encode())
        frame = parse_frame((line % name).encode(), 2**20)
        assert len(frame.items) == 1
    for name in BAD:
        with pytest.raises(ParseError, match="is longer than 255 bytes|holds a control character"):
            parse((line % name).encode())
        frame = parse_frame((line % name).encode() + b"\nPING 1", 2**20)
        assert frame.items == []
        assert frame.malformed


@pytest.mark.parametrize("make", MAKERS)
def test_a_command_with_a_bad_name_cannot_be_made(make: Callable[[str], object]) -> None:
    for name in LONGEST:
        make(name)
    for name in BAD:
        with pytest.raises(ConfigError) as caught:
            make(name)
        assert len(str(caught.value)) < 600


def test_the_command_line_refuses_a_bad_name() -> None:
    command = [sys.executable, "-m", "busrep.cli", "tail", "--redis", "redis://localhost:1", "--name", "n" * 256]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode != 0
    assert "is longer than 255 bytes" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_command_that_no_reader_would_take_is_not_sent() -> None:
    from busrep.asyncio.messages import format_command

    format_command(UserIp("u", "t" * (COMMAND_BYTES - 40), "i", "a", None, 1))
    with pytest.raises(ConfigError, match="65536 are taken by readers"):
        format_command(UserIp("u", "t" * COMMAND_BYTES, "i", "a", None, 1))
    assert issubclass(ConfigError, BusrepError)
