from __future__ import annotations

import gzip
import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from busrep.core.commands import Name, Ping, Position, Rdata, Server, is_unknown, parse
from busrep.core.fields import INT64_MAX
from busrep.core.framing import MOST_ERRORS, ROW_OVERHEAD, RUN_OVERHEAD, RUNS_AT_ONCE, Frame, Rows, parse_frame
from busrep.errors import ParseError
from tests import DATA

CAPTURE = DATA / "synapse-1.163.2.jsonl.gz"
LIMIT = 1 << 20
HEAD = Position("s", "w", 5, 5)


def rows(tokens: list[int], payloads: list[bytes], held: list[bytes] | None = None, writer: str = "w") -> Rows:
    return Rows("s", writer, tokens, payloads, held or [], 0)


def same(frame: Frame, items: list[object]) -> None:
    """The items, sizes aside: those have a test of their own."""
    for item in frame.items:
        if isinstance(item, Rows):
            item.size = 0
    assert frame.items == items


# (message, items, fields of the errors, unknown)
CASES: dict[str, tuple[bytes, list[object], list[str], int]] = {
    "empty": (b"", [], [], 0),
    "blank lines": (b"\n\nPING 1\n\n", [Ping(1)], [], 0),
    "single line": (b"RDATA s w 6 [1]", [rows([6], [b"[1]"])], [], 0),
    "chained frame": (
        b"POSITION s w 5 5\nRDATA s w 6 [1]\nRDATA s w 7 [2]",
        [HEAD, rows([6, 7], [b"[1]", b"[2]"])],
        [],
        0,
    ),
    "position behind": (
        b"POSITION s w 5 5\nRDATA s w 6 [1]\nPOSITION s w 6 9\n",
        [HEAD, rows([6], [b"[1]"]), Position("s", "w", 6, 9)],
        [],
        0,
    ),
    "announcement": (b"SERVER x\nNAME w 3\nPOSITION s w 5 5", [Server("x"), Name("w", 3), HEAD], [], 0),
    "batch": (
        b"RDATA s w batch [1]\nRDATA s w 6 [2]\nRDATA s w 7 [3]",
        [rows([6, 6, 7], [b"[1]", b"[2]", b"[3]"])],
        [],
        0,
    ),
    "batch left open": (
        b"RDATA s w 6 [1]\nRDATA s w batch [2]\nRDATA s w batch [3]",
        [rows([6], [b"[1]"], [b"[2]", b"[3]"])],
        [],
        0,
    ),
    "R6": (
        b"RDATA s a batch 1\nRDATA s b 9 2\nRDATA s a 10 3",
        [rows([], [], [b"1"], "a"), rows([9], [b"2"], writer="b"), rows([10], [b"3"], writer="a")],
        [],
        0,
    ),
    "line between": (
        b"RDATA s w 6 1\nPING 1\nRDATA s w 7 2",
        [rows([6], [b"1"]), Ping(1), rows([7], [b"2"])],
        [],
        0,
    ),
    "one stream's name begins like another's": (
        b"RDATA s w 6 1\nRDATA s w2 7 2",
        [rows([6], [b"1"]), rows([7], [b"2"], writer="w2")],
        [],
        0,
    ),
    "negative token": (b"RDATA s w -6 1\nRDATA s w -5 2", [rows([-6, -5], [b"1", b"2"])], [], 0),
    "largest token": (b"RDATA s w %d 1" % INT64_MAX, [rows([INT64_MAX], [b"1"])], [], 0),
    "token 0": (b"RDATA s w 0 1", [rows([0], [b"1"])], [], 0),
    "payload is not decoded": (b'RDATA s w 6 [ "no json', [rows([6], [b'[ "no json'])], [], 0),
    "payload that looks like a line": (
        b'RDATA s w 6 "RDATA s w 7 x"',
        [rows([6], [b'"RDATA s w 7 x"'])],
        [],
        0,
    ),
    "UTF-8": ('RDATA s w 6 "ä"'.encode(), [rows([6], ['"ä"'.encode()])], [], 0),
    "R15 cut in a header": (
        b"POSITION s w 5 5\nRDATA s w 6 1\nRDATA s w",
        [HEAD, rows([6], [b"1"])],
        ["line"],
        0,
    ),
    "R15 cut behind a token": (b"RDATA s w 6 1\nRDATA s w 7 ", [rows([6], [b"1"])], ["row"], 0),
    "rest is dropped": (b"RDATA s w 6 1\nRDATA s w x 2\nRDATA s w 8 3\nPING 1", [rows([6], [b"1"])], ["token"], 0),
    "rest is dropped, batch kept open": (
        b"RDATA s w batch 1\nRDATA s w  2\nRDATA s w 8 3",
        [rows([], [], [b"1"])],
        ["token"],
        0,
    ),
    "rest is dropped behind a command": (b"PING 1\nPOSITION s w 2 1\nPING 2", [Ping(1)], ["prev"], 0),
    "token 007": (b"RDATA s w 007 1", [rows([], [])], ["token"], 0),
    "token +5": (b"RDATA s w +5 1", [rows([], [])], ["token"], 0),
    "token with a tab": (b"RDATA s w 5\t 1", [rows([], [])], ["token"], 0),
    "token of two": (b"RDATA s w 5,6 1", [rows([], [])], ["token"], 0),
    "token over 63 bits": (b"RDATA s w %d 1" % (INT64_MAX + 1), [rows([], [])], ["token"], 0),
    "token over 64 bits": (b"RDATA s w %d 1" % 2**70, [rows([], [])], ["token"], 0),
    "token of 5000 digits": (b"RDATA s w " + b"9" * 5000 + b" 1", [rows([], [])], ["token"], 0),
    "no stream": (b"RDATA  w 6 1", [], ["line"], 0),
    "no writer": (b"RDATA s  6 1", [], ["line"], 0),
    "RDATA alone": (b"RDATA", [], ["line"], 0),
    "unknown command": (b"PING 1\nFUTURE x\nPING 2", [Ping(1), Ping(2)], ["command"], 1),
    "numeric": (b"12345", [], ["command"], 0),
    "garbage drops the rest": (b"rdata s w 6 1\nPING 1", [], ["command"], 0),
    "not UTF-8": (b"PING 1\nERROR \xff", [], ["message"], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_frames(name: str) -> None:
    data, items, errors, unknown = CASES[name]
    frame = parse_frame(data, LIMIT)
    same(frame, items)
    assert [error.field for error in frame.errors] == errors
    assert frame.unknown == unknown


@pytest.mark.parametrize("name", CASES)
def test_without_the_search_for_whole_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrep.core.framing.RUNS_AT_ONCE", 0)
    test_frames(name)


def test_limit_is_inclusive() -> None:
    assert parse_frame(b"PING 1", 6).items == [Ping(1)]
    frame = parse_frame(b"PING 1", 5)
    assert frame.items == []
    assert "6 bytes, 5 are allowed" in str(frame.errors[0])
    assert len(parse_frame(b"x" * 300, 5).errors[0].line) == 200


def test_errors_are_bounded_and_keep_nothing_alive() -> None:
    frame = parse_frame(b"A\n" * 5000, LIMIT)
    assert frame.unknown == 5000
    assert len(frame.errors) == MOST_ERRORS
    assert all(error.__traceback__ is None and error.__context__ is None for error in frame.errors)
    cut = parse_frame(b"RDATA s w x 1", LIMIT).errors[0]
    assert cut.__traceback__ is None
    assert cut.__context__ is None


def test_size_is_payloads_and_overhead() -> None:
    run = parse_frame(b"RDATA s w 6 [1]\nRDATA s w batch [2]", LIMIT).items[0]
    assert isinstance(run, Rows)
    least = RUN_OVERHEAD + 2 * ROW_OVERHEAD + 6
    assert least <= run.size <= least + 2 * 20


def test_streams_in_turns_cost_no_square() -> None:
    lines = [b"RDATA s w%d %d 1" % (i % 2, i) for i in range(40 * RUNS_AT_ONCE)]
    frame = parse_frame(b"\n".join(lines), LIMIT)
    same(frame, [rows([i], [b"1"], writer=f"w{i % 2}") for i in range(40 * RUNS_AT_ONCE)])


def test_capture_message_by_message_and_as_one() -> None:
    messages = [json.loads(line)["data"].encode() for line in gzip.decompress(CAPTURE.read_bytes()).splitlines()]
    for message in messages:
        frame = parse_frame(message, LIMIT)
        assert frame.errors == []
        assert len(frame.items) == 1
    whole = parse_frame(b"\n".join(messages), 1 << 24, most_items=len(messages))
    assert whole.errors == []
    found = sum(len(i.payloads) + len(i.open) if isinstance(i, Rows) else 1 for i in whole.items)
    assert found == len(messages)


# --- rows to lines ---


def format_rows(stream: bytes, writer: bytes, token: int, payloads: Sequence[bytes]) -> list[bytes]:
    """The RDATA lines of one fact: all but the last row as ``batch`` (W2), the last with the number."""
    prefix = b"RDATA %b %b " % (stream, writer)
    return [
        *[b"%bbatch %b" % (prefix, payload) for payload in payloads[:-1]],
        *[b"%b%d %b" % (prefix, token, payload) for payload in payloads[-1:]],
    ]


facts = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        st.integers(-(2**63), INT64_MAX),
        st.lists(st.sampled_from([b"[1]", b'["a b"]', b'"RDATA s a 5 1"', b"0"]), min_size=1, max_size=4),
    ),
    max_size=30,
)


@given(facts)
def test_format_then_parse_agrees(written: list[tuple[bytes, int, list[bytes]]]) -> None:
    lines = [line for writer, token, payloads in written for line in format_rows(b"s", writer, token, payloads)]
    frame = parse_frame(b"\n".join(lines), LIMIT)
    assert frame.errors == []
    read = [
        (item.writer.encode(), token, payload)
        for item in frame.items
        if isinstance(item, Rows)
        for token, payload in zip(item.tokens, item.payloads, strict=True)
    ]
    assert read == [(writer, token, payload) for writer, token, payloads in written for payload in payloads]


PARTS = [
    b"RDATA s w ", b"RDATA ", b"POSITION s w 1 1", b"\n", b" ", b"batch ", b"5 ", b"-5 ", b"05 ", b"[1]", b"X", b"\xff",
]  # fmt: skip


@given(st.binary(max_size=200) | st.lists(st.sampled_from(PARTS), max_size=30).map(b"".join), st.integers(0, 300))
def test_any_bytes_leave_a_frame(data: bytes, limit: int) -> None:
    frame = parse_frame(data, limit)
    for item in frame.items:
        if isinstance(item, Rows):
            assert len(item.tokens) == len(item.payloads)
            assert all([*item.payloads, *item.open])


def model(data: bytes) -> list[tuple[str, int | None]]:
    """(writer, token) of each row, None for those left open: one line at a time, headers through `parse`."""
    found: list[tuple[str, int | None]] = []
    key, held = b"", 0
    for line in [*data.split(b"\n"), b""]:
        parts = line.split(b" ", 4)
        row = parts[0] == b"RDATA" and len(parts) > 1
        if parts[1:3] != key.split(b" ") or not row:
            found += [(key.split(b" ")[-1].decode(), None)] * held
            key, held = b" ".join(parts[1:3]) if row else b"", 0
        try:
            command = parse(b" ".join([*parts[:4], b"1"]) if row else line) if line else None
        except ParseError:
            if is_unknown(line):
                continue
            break
        if isinstance(command, Rdata):
            if len(parts) < 5 or not parts[4]:
                break
            held += 1
            if command.token is not None:
                found += [(command.writer, command.token)] * held
                held = 0
    return found + [(key.split(b" ")[-1].decode(), None)] * held


@given(st.lists(st.sampled_from(PARTS[:-1]), max_size=30).map(b"".join))
@example(b"XRDATA s w \nRDATA s w batch RDATA s w ")
def test_runs_agree_with_line_by_line(data: bytes) -> None:
    found: list[tuple[str, int | None]] = []
    for item in parse_frame(data, LIMIT).items:
        if isinstance(item, Rows):
            found += [(item.writer, token) for token in item.tokens] + [(item.writer, None)] * len(item.open)
    assert found == model(data)
