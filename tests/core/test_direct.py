"""Direct TCP without sockets: bytes to messages, what a client without an incarnation is shown, who is alive."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrep.core import direct
from busrep.core.direct import FrameSplitter, Liveness, PlainView, join_messages
from busrep.core.framing import parse_frame
from busrep.errors import ParseError
from busrep.settings import Settings

EPOCH = b"0123456789abcdef0123456789abcdef"
FRAMES = [
    b"SERVER shop\nPING 1",
    b"SERVER shop %b\nNAME w1 3\nPOSITION s w1 0 0\nPOSITION t w1 0 0" % EPOCH,
    b'NAME w1 3\nPOSITION s w1 0 0\nRDATA s w1 batch ["NAME x 1"]\nRDATA s w1 1 [2]',
    b"NAME w2 7\nPOSITION s w2 5 5\nRDATA s w2 6 []",
    b"SERVER shop %b\nNAME w2 7\nPOSITION s w2 6 6" % EPOCH,
]
BYTES = b"".join(frame + b"\n" for frame in FRAMES)


def said(messages: list[bytes]) -> list[tuple[bytes | None, bytes]]:
    """Every line, and the NAME line that it came under in its own message."""
    found = []
    for message in messages:
        speaker = None
        for line in message.split(b"\n"):
            if line.startswith(b"NAME "):
                speaker = line
            elif not line.startswith(b"SERVER "):
                found.append((speaker, line))
    return found


def test_messages_come_out_as_they_were_sent() -> None:
    assert FrameSplitter(1000).feed(BYTES) == FRAMES


def test_byte_by_byte_every_line_comes_once_under_who_said_it() -> None:
    splitter = FrameSplitter(1000)
    messages = [message for at in range(len(BYTES)) for message in splitter.feed(BYTES[at : at + 1])]
    assert said(messages) == said(FRAMES)


@pytest.mark.parametrize("cut", range(1, len(BYTES)))
def test_cut_in_two_anywhere(cut: int) -> None:
    splitter = FrameSplitter(1000)
    messages = [*splitter.feed(BYTES[:cut]), *splitter.feed(BYTES[cut:])]
    assert said(messages) == said(FRAMES)
    assert not any(parse_frame(message, 10_000).errors for message in messages)


def test_an_epoch_stays_with_its_name_across_a_cut() -> None:
    splitter = FrameSplitter(1000)
    announcement = FRAMES[1] + b"\n"
    cut = announcement.index(b"NAME")
    first, second = [*splitter.feed(announcement[:cut]), *splitter.feed(announcement[cut:])]
    assert first == b"SERVER shop " + EPOCH
    assert second == FRAMES[1]


def test_what_a_foreign_client_says_opens_with_nothing() -> None:
    splitter = FrameSplitter(1000)
    assert splitter.feed(b"NAME worker one\nPING 1\n") == [b"NAME worker one\nPING 1"]
    assert splitter.feed(b"REPLICATE\n") == [b"REPLICATE"]
    assert splitter.feed(b"\n\n") == []


SHORT = [b"REPLICATE", b"POSITION s foreign 5 5\nRDATA s foreign 6 []", b"\xff\xfe", b"12345"]


@pytest.mark.parametrize("cut", range(0, 600, 7))
def test_messages_that_do_not_say_who_speaks_stay_apart(cut: int) -> None:
    """Else a malformed one would take the one before it with it, and a foreign one pass under another's NAME."""
    messages = [FRAMES[2], *SHORT, FRAMES[1], SHORT[1], FRAMES[3]]
    data = join_messages(messages)
    splitter = FrameSplitter(1000)
    found = [*splitter.feed(data[:cut]), *splitter.feed(data[cut:])]
    assert said(found) == said(messages)
    apart = [message for message in found if message in SHORT]
    assert len(apart) >= len(SHORT)  # each alone, but for the one that is cut


@given(st.lists(st.sampled_from([*b"".join(FRAMES).split(b"\n"), b"", b"REPLICATE", b"NAME a b c"])), st.randoms())
def test_no_line_is_lost_or_made_up(lines: list[bytes], dice: random.Random) -> None:
    data = b"".join(line + b"\n" for line in lines)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(5)) if data else []
    splitter = FrameSplitter(1000)
    pieces = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)])]
    messages = [message for piece in pieces for message in splitter.feed(piece)]
    heard = [line for _, line in said(messages) if line]
    assert heard == [line for line in lines if line and not line.startswith((b"NAME ", b"SERVER "))]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param([b"x" * 101], id="without an end"),
        pytest.param([b"x" * 60, b"x" * 60], id="in parts"),
        pytest.param([b"x" * 101 + b"\n"], id="whole"),
        pytest.param([b"PING 1\n" + b"x" * 101], id="behind a good one"),
        pytest.param([b"PING 1\n" + b"x" * 101 + b"\nPING 2\n"], id="between good ones"),
    ],
)
def test_a_line_over_the_limit_is_refused(data: list[bytes]) -> None:
    splitter = FrameSplitter(100)
    with pytest.raises(ParseError, match="over 100 bytes") as caught:
        for piece in data:
            splitter.feed(piece)
    assert len(caught.value.line) <= 200


def test_many_lines_are_no_long_line() -> None:
    assert len(FrameSplitter(100).feed(b"PING 1\n" * 1000)[0].split(b"\n")) == 1000


def test_the_plain_view_leaves_out_who_speaks_and_what_was_said() -> None:
    view = PlainView()
    shown = b"".join(view.show(frame) for frame in FRAMES)
    assert shown.decode().splitlines() == [
        "SERVER shop",
        "PING 1",
        "POSITION s w1 0 0",
        "POSITION t w1 0 0",
        'RDATA s w1 batch ["NAME x 1"]',
        "RDATA s w1 1 [2]",
        "POSITION s w2 5 5",
        "RDATA s w2 6 []",
    ]
    assert view.show(FRAMES[4]) == b""
    view.forget()
    assert view.show(FRAMES[4]) == b"POSITION s w2 6 6\n"


def test_the_plain_view_leaves_out_announcements_without_an_epoch_too() -> None:
    assert PlainView().show(b"SERVER shop\nNAME w1 3\nPOSITION s w1 0 0") == b"POSITION s w1 0 0\n"


def test_the_plain_view_remembers_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "SAID_BYTES", 10 * (direct.PAIR_BYTES + 4))
    view = PlainView()
    for number in range(100):
        assert view.show(b"RDATA s w%d 1 []" % number)
        assert len(view.said) <= 10
    assert view.show(b"".join(b"POSITION s v%d 1 1\n" % number for number in range(100)))
    assert len(view.said) <= 11  # also within a message
    assert view.show(b"RDATA s w99 1 []")
    assert view.show(b"POSITION s w99 1 1") == b""
    assert view.show(b"POSITION s w0 1 1") == b"POSITION s w0 1 1\n"  # once more


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"RDATA s %b 1 []" % (b"w" * 2**20), id="writer"),
        pytest.param(b"RDATA %b w 1 []" % (b"s" * 2**20), id="stream"),
        pytest.param(b"RDATA s w %b []" % (b"1" * 2**20), id="token"),
        pytest.param(b"POSITION s w 1 %b" % (b"1" * 2**20), id="position"),
        pytest.param(b"POSITION %b w 1 1" % (b"s" * 256), id="POSITION_long"),
    ],
)
def test_the_plain_view_remembers_nothing_that_is_too_long(line: bytes) -> None:
    view = PlainView()
    assert view.show(line) == line + b"\n"  # its reader says so
    assert view.show(line) == line + b"\n"
    assert not view.said


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"POSITION s w 5 5", True),  # another chain's head: something was lost before this server
        (b"POSITION s w 4 4", False),
        (b"POSITION s w 4 6", True),
        (b"POSITION s other 4 4", True),
        (b"RDATA s w 4 []", True),
        (b"USER_SYNC a b None start 1", True),
        (b"RDATA s w", True),  # malformed: its reader says so
        (b"REPLICATE", False),  # for writers
        (b"", False),
    ],
)
def test_the_plain_view_line_by_line(line: bytes, shown: bool) -> None:
    view = PlainView()
    view.show(b"RDATA s w 4 []")
    assert view.show(line) == (line + b"\n" if shown else b"")


def test_who_is_alive() -> None:
    settings = Settings(tcp_ping=5.0, tcp_timeout=15.0)
    side = Liveness(settings, 0.0, 0.0)
    assert side.ping(4.9, 1) == b""
    assert side.ping(5.0, 17) == b"PING 17\n"
    assert side.ping(9.0, 18) == b""
    assert not side.gone(1e6)  # it never sent a PING: someone types
    side.heard(10.0, [b'RDATA s w 4 ["PING "]'])
    assert not side.gone(1e6)
    side.heard(20.0, [b"NAME x 1\nPING 3"])
    side.heard(21.0, [])  # half a line
    assert not side.gone(35.0)
    assert side.gone(35.1)
    side.heard(35.2, [b"REPLICATE"])
    assert not side.gone(50.0)


def test_a_timeout_that_nobody_would_outlast() -> None:
    with pytest.raises(ValueError, match="no longer than tcp_ping=5"):
        Settings(tcp_timeout=5.0)


def test_who_does_not_end_a_line() -> None:
    side = Liveness(Settings(tcp_timeout=15.0), 0.0, 0.0)
    side.heard(1.0, [b"REPLICATE"])
    assert not side.halting(1e6)
    side.heard(2.0, [], unfinished=True)
    side.heard(10.0, [], unfinished=True)
    assert not side.halting(17.0)
    assert side.halting(17.1)
    side.heard(17.2, [b"REPLICATE"], unfinished=True)  # that one has ended, and another begun
    assert not side.halting(32.0)
    side.heard(32.1, [b"REPLICATE"])
    assert not side.halting(1e6)
