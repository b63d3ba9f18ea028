from __future__ import annotations

import gzip
import json
import math
from typing import get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrep.core.application_commands import (
    CancelTask,
    ClearUserSync,
    FederationAck,
    LockReleased,
    NewActiveTask,
    RemoteServerUp,
    UserIp,
    UserSync,
)
from busrep.core.commands import Command, Error, Name, Ping, Position, Rdata, Replicate, Server, is_unknown, parse
from busrep.core.fields import INT64_MAX, INT64_MIN, json_bytes
from busrep.errors import ConfigError, ParseError
from tests import DATA

CAPTURE = DATA / "synapse-1.163.2.jsonl.gz"
EPOCH = "0123456789abcdef0123456789abcdef"

# One table, both directions: the line is parsed to the command, and the command formats to the line.
CASES: list[tuple[bytes, Command]] = [
    (b"SERVER localhost:8823", Server("localhost:8823")),
    (b"SERVER my deployment", Server("my deployment")),
    (b"SERVER example.test " + EPOCH.encode(), Server("example.test", EPOCH)),
    (b"SERVER a b " + EPOCH.encode(), Server("a b", EPOCH)),
    (b"SERVER " + EPOCH.encode(), Server(EPOCH)),
    (b"SERVER  " + EPOCH.encode(), Server(" " + EPOCH)),
    (b"SERVER x " + EPOCH.upper().encode(), Server("x " + EPOCH.upper())),
    (b"NAME worker-1", Name("worker-1")),
    (b"NAME worker-1 7", Name("worker-1", 7)),
    (b"NAME worker-1 0", Name("worker-1", 0)),
    (b"NAME a worker 7", Name("a worker 7")),
    (b"NAME worker  7", Name("worker  7")),
    (b"NAME worker 007", Name("worker 007")),
    (b"NAME worker -7", Name("worker -7")),
    (b"NAME w 9223372036854775807", Name("w", INT64_MAX)),
    (b"NAME w 9223372036854775808", Name("w 9223372036854775808")),
    (b"PING 1490197665618", Ping(1490197665618)),
    (b"ERROR server stopping", Error("server stopping")),
    (b"ERROR ", Error("")),
    ("ERROR zu spät ".encode(), Error("zu spät ")),
    (b"REPLICATE", Replicate()),
    (b"POSITION events master 53 53", Position("events", "master", 53, 53)),
    (b"POSITION events master -5 9223372036854775807", Position("events", "master", -5, INT64_MAX)),
    (b'RDATA events master 54 [1,"a b"]', Rdata("events", "master", 54, [1, "a b"])),
    (b"RDATA caches master batch [null]", Rdata("caches", "master", None, [None])),
    (b'RDATA s w -9223372036854775808 {"a":1.5}', Rdata("s", "w", INT64_MIN, {"a": 1.5})),
    (b"RDATA s w 0 null", Rdata("s", "w", 0, None)),
    (b'RDATA s w 1 "\\u00e4\\ud83d\\ude00\\n"', Rdata("s", "w", 1, "ä😀\n")),
    (b"USER_SYNC p1 @a:b None start 1490197670513", UserSync("p1", "@a:b", None, True, 1490197670513)),
    (b"USER_SYNC p1 @a:b DEV end 0", UserSync("p1", "@a:b", "DEV", False, 0)),
    (b"CLEAR_USER_SYNC p1", ClearUserSync("p1")),
    (b"FEDERATION_ACK worker-1 12", FederationAck("worker-1", 12)),
    (b"FEDERATION_ACK worker-1 -1", FederationAck("worker-1", -1)),
    (b"REMOTE_SERVER_UP 127.0.0.1:18448", RemoteServerUp("127.0.0.1:18448")),
    (b'USER_IP @a:b ["tok","::1","an agent",null,5]', UserIp("@a:b", "tok", "::1", "an agent", None, 5)),
    (b'USER_IP @a:b ["","","\\u00e4\\n","DEV",5]', UserIp("@a:b", "", "", "ä\n", "DEV", 5)),
    (b'LOCK_RELEASED ["w","lock","a key"]', LockReleased("w", "lock", "a key")),
    (b"NEW_ACTIVE_TASK abc", NewActiveTask("abc")),
    (b"CANCEL_TASK abc", CancelTask("abc")),
]
# Lines with another spelling than ours: parsed, but formatted otherwise.
FOREIGN: list[tuple[bytes, Command]] = [
    (b"REPLICATE ", Replicate()),
    (b"ERROR", Error("")),
    (b'RDATA s w 5 ["$foo1:bar.com", "m.room.message"]', Rdata("s", "w", 5, ["$foo1:bar.com", "m.room.message"])),
    ('RDATA events w 5 "ä"'.encode(), Rdata("events", "w", 5, "ä")),
    (b'LOCK_RELEASED [ "w", "l", "k" ]', LockReleased("w", "l", "k")),
]
BAD: list[tuple[bytes, str]] = [
    (b"", "command"),
    (b" ", "command"),
    (b"12345", "command"),
    (b"position a b 1 1", "command"),
    (b"RDATAX", "command"),
    (b"\xff\xfe", "command"),
    (b"9" * 1_000_000, "command"),
    (b"PING 1\nPING 2", "line"),
    (b"REPLICATE x", "line"),
    (b"REPLICATE  ", "line"),
    (b"SERVER", "name"),
    (b"SERVER \xff", "name"),
    (b"NAME ", "instance"),
    (b"NAME \xff", "instance"),
    (b"PING", "unix_ms"),
    (b"PING ", "unix_ms"),
    (b"PING x", "unix_ms"),
    (b"PING +5", "unix_ms"),
    (b"PING 007", "unix_ms"),
    (b"PING -0", "unix_ms"),
    (b"PING 1_0", "unix_ms"),
    (b"PING \xd9\xa1", "unix_ms"),
    (b"PING 1.0", "unix_ms"),
    (b"PING 9223372036854775808", "unix_ms"),
    (b"PING -9223372036854775809", "unix_ms"),
    (b"PING " + b"9" * 5000, "unix_ms"),
    (b"ERROR \xff", "text"),
    (b"POSITION s w 1", "line"),
    (b"POSITION s w 1 1 1", "new"),
    (b"POSITION s w 2 1", "prev"),
    (b"POSITION  w 1 1", "stream"),
    (b"POSITION s  1 1", "writer"),
    (b"RDATA s w 5", "line"),
    (b"RDATA s w 5 ", "row"),
    (b"RDATA s w 5 [", "row"),
    (b"RDATA s w 5 NaN", "row"),
    (b"RDATA s w 5 [Infinity]", "row"),
    (b"RDATA s w 5 1e999", "row"),
    (b"RDATA s w 5 " + b"[" * 500 + b"]" * 500, "row"),
    (b"RDATA s w Batch []", "token"),
    (b"USER_SYNC p u d maybe 1", "is_syncing"),
    (b"USER_SYNC p u  start 1", "device_id"),
    (b"USER_SYNC p u \xff start 1", "device_id"),
    (b"USER_IP u", "line"),
    (b"USER_IP u {}", "json"),
    (b"USER_IP u [", "json"),
    (b"USER_IP u [1,2,3]", "json"),
    (b'USER_IP u ["","","",5,5]', "device_id"),
    (b'USER_IP u ["","","",null,true]', "last_seen_ms"),
    (b'LOCK_RELEASED ["a","b",null]', "key"),
    (b"CANCEL_TASK a b", "task_id"),
]


def name_of(case: object) -> str | None:
    return repr(case)[:60] if isinstance(case, bytes) else ""


@pytest.mark.parametrize(("line", "command"), CASES, ids=name_of)
def test_both_ways(line: bytes, command: Command) -> None:
    assert parse(line) == command
    assert command.format() == line


@pytest.mark.parametrize(("line", "command"), FOREIGN, ids=name_of)
def test_foreign_spelling(line: bytes, command: Command) -> None:
    assert parse(line) == command
    assert parse(command.format()) == command


@pytest.mark.parametrize(("line", "field"), BAD, ids=name_of)
def test_bad_lines_name_the_field(line: bytes, field: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(line)
    assert caught.value.field == field
    assert caught.value.line == line[:200]


def test_every_command_is_in_the_table() -> None:
    assert {type(command) for _, command in CASES} == set(get_args(Command))
    assert all(attrs.has(cls) for cls in get_args(Command))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Position("a b", "w", 1, 1),
        lambda: Position("", "w", 1, 1),
        lambda: Position("s", "w\n", 1, 1),
        lambda: Position("s", "w", 2, 1),
        lambda: Position("s", "w", True, 1),
        lambda: Position("s", "w", 1, 2**63),
        lambda: Position("s", b"w", 1, 1),  # type: ignore[arg-type]
        lambda: Position("s", "\ud800", 1, 1),
        lambda: Rdata("s", "w", 1, math.nan),
        lambda: Rdata("s", "w", 1, {"a": [(math.inf,)]}),
        lambda: Rdata("s", "w", 1, 2**64),
        lambda: Rdata("s", "w", 1, object()),
        lambda: Rdata("s", "w", 1, "\ud800"),
        lambda: Rdata("s", "w", 1.0, None),  # type: ignore[arg-type]
        lambda: Server(""),
        lambda: Server(f"x {EPOCH}"),
        lambda: Server("x", "epoch"),
        lambda: Server("x", 5),  # type: ignore[arg-type]
        lambda: Name("w 7"),
        lambda: Name("a b", 7),
        lambda: Name("w", -1),
        lambda: Name("w", 2**63),
        lambda: Name("w", "7"),  # type: ignore[arg-type]
        lambda: Error("a\nb"),
        lambda: UserSync("p", "u", "None", True, 1),
        lambda: UserSync("p", "u", "a b", True, 1),
        lambda: UserSync("p", "u", None, 1, 1),  # type: ignore[arg-type]
        lambda: UserIp("u", "t", "i", "a", 5, 1),  # type: ignore[arg-type]
    ],
)
def test_constructors_refuse_what_has_no_form(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_error_says_which_field() -> None:
    with pytest.raises(ConfigError, match=r"Position\(writer=...\): holds a space"):
        Position("s", "a b", 1, 1)


def test_unknown_is_a_well_formed_name_that_is_not_ours() -> None:
    assert is_unknown(b"FUTURE x")
    assert not is_unknown(b"POSITION x")
    assert not is_unknown(b"future x")


def test_json_null_is_not_taken_for_nan() -> None:
    assert json_bytes([None, "null", {"a": None}, (1.5,)]) == b'[null,"null",{"a":null},[1.5]]'


def test_nan_in_an_object_of_a_class_is_no_null() -> None:
    point = attrs.make_class("Point", ["x", "note"])
    assert json_bytes([point(1.5, None)], attrs.asdict) == b'[{"x":1.5,"note":null}]'
    for wrong in (point(math.nan, None), point(1.5, [math.inf]), {"deep": (point({"y": -math.inf}, None),)}):
        with pytest.raises(ValueError, match="NaN and Infinity"):
            json_bytes([wrong], attrs.asdict)


def test_capture_parses_whole() -> None:
    lines = [json.loads(line)["data"].encode() for line in gzip.decompress(CAPTURE.read_bytes()).splitlines()]
    assert len(lines) == 21_970
    for line in lines:
        command = parse(line)
        assert parse(command.format()) == command


# --- fuzz ---

plain = st.characters(exclude_categories=["Cc", "Cs"], codec="utf-8")
words = st.text(plain.filter(" ".__ne__), min_size=1, max_size=20)
texts = st.text(plain, min_size=1, max_size=30)
strings = st.text(st.characters(codec="utf-8"), max_size=20)
ints = st.integers(INT64_MIN, INT64_MAX)
values = st.recursive(
    st.none() | st.booleans() | ints | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=10,
)


@st.composite
def commands(draw: st.DrawFn) -> Command:
    low, high = sorted((draw(ints), draw(ints)))
    name, server = draw(texts), draw(texts)
    makers = [
        lambda: Server(server, draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True))),
        lambda: Name(draw(words), draw(st.integers(0, INT64_MAX))),
        lambda: Name("-" + name + " x"),
        lambda: Server(server + " x"),
        lambda: Ping(low),
        lambda: Error(draw(texts)),
        Replicate,
        lambda: Position(draw(words), draw(words), low, high),
        lambda: Rdata(draw(words), draw(words), draw(st.none() | ints), draw(values)),
        lambda: UserSync(draw(words), draw(words), None, draw(st.booleans()), high),
        lambda: UserSync(draw(words), draw(words), "D" + draw(words), draw(st.booleans()), high),
        lambda: ClearUserSync(draw(words)),
        lambda: FederationAck(draw(words), low),
        lambda: RemoteServerUp(draw(words)),
        lambda: UserIp(draw(words), draw(strings), draw(strings), draw(strings), draw(st.none() | strings), low),
        lambda: LockReleased(draw(strings), draw(strings), draw(strings)),
        lambda: NewActiveTask(draw(words)),
        lambda: CancelTask(draw(words)),
    ]
    return draw(st.sampled_from(makers))()


@given(commands())
def test_parse_of_format_agrees(command: Command) -> None:
    line = command.format()
    assert b"\n" not in line
    assert parse(line) == command
    assert parse(line).format() == line


NAMES = [line.split(b" ")[0] for line, _ in CASES]
PARTS = [b" ", b"\n", b"batch", b"None", b"start", b"0", b"-1", b"7", b"s", b"[", b"]", b'"', b"[1]", b"\xff"]
lines = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda name, rest: name + b" " + rest, st.sampled_from(NAMES), st.binary(max_size=60)),
    st.builds(
        lambda name, parts: name + b" " + b"".join(parts),
        st.sampled_from(NAMES),
        st.lists(st.sampled_from(PARTS), max_size=12),
    ),
    st.integers(0).map(lambda number: b"%d" % number),
    st.builds(
        lambda case, at, junk: case[0][:at] + junk + case[0][at + 1 :],
        st.sampled_from(CASES),
        st.integers(0, 60),
        st.binary(max_size=2),
    ),
)


@given(lines)
def test_any_bytes_parse_or_raise_parse_error(line: bytes) -> None:
    try:
        command = parse(line)
    except ParseError:
        return
    assert parse(command.format()) == command
    assert parse(command.format()).format() == command.format()
