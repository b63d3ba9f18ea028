"""The writer core: cases W1-W8 of protocol.md, section 9 where it speaks of writers, a random model."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest

from busrep.core.outgoing import OutgoingFrame
from busrep.core.writer import Writer
from busrep.errors import ConfigError, UnknownStream
from busrep.settings import Settings
from busrep.streams import Stream

EPOCH = "0" * 32
NAME = "NAME w1 7"
OPENING = [f"SERVER test {EPOCH}", NAME]


class Bench:
    """A writer `w1`, what it published, and a Redis that confirms everything at once."""

    def __init__(
        self, *streams: Stream[Any], start: int = 10, connected: bool = True, listens: bool = True, **settings: Any
    ) -> None:
        bounds = Settings(**settings)
        self.writer = Writer(
            "test", "w1", incarnation=7, epoch=EPOCH, settings=bounds, listens=listens, jitter=lambda: 0.5
        )
        self.asked_at = 0.0
        for stream in streams or (Stream("events"),):
            self.writer.add_stream(stream, start)
        if connected:
            self.writer.connected(0.0)
            self.publish()

    def complete(self, token: int, *rows: str, stream: str = "events", position: int | None = -1) -> None:
        """A fact ends; the position moves to its token, to ``position``, or (None) not at all."""
        self.writer.fact_completed(stream, token, [row.encode() for row in rows])
        if position is not None:
            self.writer.position_moved(stream, token if position == -1 else position)

    def move(self, position: int, stream: str = "events") -> None:
        self.writer.position_moved(stream, position)

    def ask(self) -> None:
        """REPLICATE, long after the last one."""
        self.asked_at += 1.0
        self.writer.replicate_received(self.asked_at)

    def publish(self) -> list[list[str]]:
        """Everything that is to be published, confirmed; the lines of each message."""
        messages = []
        while frames := self.writer.frames_to_publish():
            for frame in frames:
                messages.append(lines_of(frame))
                self.writer.published(frame)
        return messages

    def lines(self) -> list[str]:
        return [line for message in self.publish() for line in message]


def lines_of(frame: OutgoingFrame) -> list[str]:
    return frame.data.decode().split("\n")


def short(lines: Iterable[str]) -> list[str]:
    """The notation of the cases: the heads, the announcements' opening and the names left out."""
    kept = []
    for line in lines:
        command, _, rest = line.partition(" ")
        if command in ("POSITION", "RDATA"):
            kept.append(f"{command} {rest.split(' ', 2)[2]}")
    return kept


# --- section 4 ---


def w1(bench: Bench) -> None:
    bench.ask()


def w2(bench: Bench) -> None:
    bench.complete(11, "1", "2")
    bench.complete(12, "3")


def w3(bench: Bench) -> None:
    bench.complete(13, "4", position=15)


def w4(bench: Bench) -> None:
    bench.move(20)


def w5(bench: Bench) -> None:
    bench.complete(22)


W_TO_5: list[tuple[str, Callable[[Bench], None], list[str]]] = [
    ("W1", w1, ["POSITION 10 10"]),
    ("W2", w2, ["POSITION 10 10", "RDATA batch 1", "RDATA 11 2", "RDATA 12 3"]),
    ("W3", w3, ["POSITION 12 12", "RDATA 13 4", "POSITION 13 15"]),
    ("W4", w4, ["POSITION 15 20"]),
    ("W5", w5, ["POSITION 20 22"]),
]


@pytest.mark.parametrize("last", range(len(W_TO_5)), ids=[case[0] for case in W_TO_5])
def test_cases_one_after_the_other(last: int) -> None:
    bench = Bench()
    for _, act, expected in W_TO_5[: last + 1]:
        act(bench)
        assert short(bench.lines()) == expected
    assert bench.writer.positions() == {"events": [10, 12, 15, 20, 22][last]}


def w6_others(bench: Bench) -> None:
    bench.move(20)


def w6_others_at_a_beat(bench: Bench) -> None:
    bench.move(20)
    bench.writer.tick(100.0)


def w6_own_row(bench: Bench) -> None:
    bench.complete(13, "1", position=15)


def w6_own_empty(bench: Bench) -> None:
    bench.complete(13, position=15)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        pytest.param(w6_others, [], id="W6 others advanced"),
        pytest.param(w6_others_at_a_beat, ["POSITION 10 10"], id="W6 others advanced, a heartbeat"),
        pytest.param(w6_own_row, ["POSITION 10 10", "RDATA 13 1"], id="W6 others advanced past an own row"),
        pytest.param(w6_own_empty, ["POSITION 10 13"], id="W6 others advanced past an own empty fact"),
    ],
)
def test_invalidations_do_not_echo_others(act: Callable[[Bench], None], expected: list[str]) -> None:
    bench = Bench(Stream("events", follows=False))
    act(bench)
    assert short(bench.lines()) == expected


@pytest.mark.parametrize(
    ("settings", "frames"),
    [
        pytest.param({"frame_rows": 100}, 3, id="W7 bounded by rows"),
        pytest.param({"frame_bytes": 1024}, 10, id="W7 bounded by bytes"),
        pytest.param({}, 1, id="W7 in one frame"),
    ],
)
def test_many_rows_in_bounded_frames(settings: dict[str, Any], frames: int) -> None:
    bench = Bench(start=0, **settings)
    for token in range(1, 251):
        bench.complete(token, f"[{token:10}]")
    messages = bench.publish()
    assert len(messages) == frames
    end = 0
    for message in messages:
        assert message[:2] == [NAME, f"POSITION events w1 {end} {end}"]
        rows = message[2:]
        assert len(rows) <= settings.get("frame_rows", 1000)
        assert len("\n".join(message)) <= settings.get("frame_bytes", 65_536)
        tokens = range(end + 1, end + 1 + len(rows))
        assert rows == [f"RDATA events w1 {token} [{token:10}]" for token in tokens]
        end += len(rows)
    assert end == 250


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        pytest.param(10_000, ["POSITION 250 250", "RDATA 251 1"], id="W8 kept"),
        pytest.param(100, ["POSITION 251 251"], id="W8 dropped from memory"),
    ],
)
def test_written_while_redis_was_away(bound: int, expected: list[str]) -> None:
    bench = Bench(start=250, publish_queue_bytes=bound)
    bench.writer.disconnected(1.0)
    bench.complete(251, "1")
    assert bench.publish() == []
    assert bench.writer.positions() == {"events": 250}
    bench.writer.connected(2.0)
    assert short(bench.lines()) == ["POSITION 250 250", *expected]  # the announcement goes first
    assert bench.writer.positions() == {"events": 251}
    assert bench.writer.queued_bytes == 0


# --- section 9, each a test that fails when the rule is left out ---

RULES: list[Any] = []


def rule(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        RULES.append(pytest.param(check, id=f"rule {name}"))
        return check

    return register


@rule("9.2 not past what the ID generator proved")
def _() -> None:
    bench = Bench()
    bench.complete(13, "3", position=None)
    bench.complete(12, "2", position=None)
    bench.ask()
    assert short(bench.lines()) == ["POSITION 10 10"]
    bench.complete(11, "1", position=12)
    assert short(bench.lines()) == ["POSITION 10 10", "RDATA 11 1", "RDATA 12 2"]
    bench.move(11)  # a position does not move back
    with pytest.raises(ValueError, match="after position 12"):
        bench.complete(12, "2")
    bench.ask()
    assert short(bench.lines()) == ["POSITION 12 12"]


@rule("9.2 nothing is published once fenced")
def _() -> None:
    bench = Bench(publish_in_flight=1, frame_rows=1)
    bench.complete(11, "1")
    bench.complete(12, "2", position=None)
    bench.complete(13, "3", position=12)
    (frame,) = bench.writer.frames_to_publish()
    bench.writer.publish_failed()
    bench.writer.fenced()
    assert bench.writer.queued_bytes == 0
    assert bench.writer.frames_to_publish() == []  # not even again
    bench.writer.published(frame)  # it had arrived
    bench.complete(14, "4")
    assert bench.writer.queued_bytes == 0
    bench.writer.connected(5.0)
    bench.ask()
    assert bench.writer.announcements.next_deadline == math.inf
    assert not bench.writer.tick(1e9)
    assert bench.lines() == []
    assert bench.writer.positions() == {"events": 11}
    assert bench.writer.statistics()["fenced"]
    assert bench.writer.statistics()["streams"]["events"]["position"] == 12  # completes nothing


@rule("9.6 the head is where the previous frame ended")
def _() -> None:
    bench = Bench(frame_rows=1)
    for token in (11, 12, 13):
        bench.complete(token, str(token))
    bench.move(15)
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 10 10", "RDATA 11 11"],
        ["POSITION 11 11", "RDATA 12 12"],
        ["POSITION 12 12", "RDATA 13 13", "POSITION 13 15"],
    ]


@rule("9.6 after a restart: start start")
def _() -> None:
    bench = Bench(connected=False, start=40)
    bench.writer.connected(0.0)
    assert bench.lines() == [*OPENING, "POSITION events w1 40 40"]


@rule("9.6 a stream that comes late is announced: start start")
def _() -> None:
    bench = Bench()
    bench.writer.add_stream(Stream("late"), 3)
    bench.complete(4, "1", stream="late")
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 10 10", "POSITION 3 3"],
        ["POSITION 3 3", "RDATA 4 1"],
    ]


@rule("9.6 after an unknown outcome: the same frames again, byte for byte, before anything new")
def _() -> None:
    bench = Bench(frame_rows=2, publish_in_flight=2)
    for token in range(11, 16):
        bench.complete(token, str(token))
    first, second = frames = bench.writer.frames_to_publish()
    assert bench.writer.frames_to_publish() == []  # two in flight
    bench.writer.publish_failed()
    bench.complete(16, "16", position=20)
    assert bench.writer.frames_to_publish() == frames
    bench.writer.published(first)
    assert bench.writer.positions() == {"events": 12}
    bench.writer.disconnected(1.0)
    bench.complete(21, "21")
    assert bench.writer.frames_to_publish() == []
    bench.writer.connected(2.0)
    again, announcement = bench.writer.frames_to_publish()
    assert again == second
    assert lines_of(announcement) == [*OPENING, "POSITION events w1 14 14"]
    bench.writer.published(again)
    bench.writer.published(announcement)
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 14 14", "RDATA 15 15", "RDATA 16 16"],
        ["POSITION 16 16", "RDATA 21 21"],
    ]
    assert bench.writer.statistics()["publish_failures"] == 1


@rule("9.6 new new over dropped rows, late ones too, until the position is past them all")
def _() -> None:
    bench = Bench(publish_queue_bytes=1000)
    for token in (13, 15, 17):  # those between are still open
        bench.complete(token, "2" * 100, position=None)
    assert bench.writer.queued_bytes == 0
    assert bench.lines() == []
    bench.complete(11, "1")
    assert short(bench.lines()) == ["POSITION 11 11"]
    bench.complete(14, "3", position=None)  # carried, its head would have to be below 13
    bench.complete(12, "4", position=15)
    assert short(bench.lines()) == ["POSITION 15 15"]
    bench.complete(18, "5", position=None)
    bench.complete(16, "6", position=18)
    bench.move(20)
    assert short(bench.lines()) == ["POSITION 17 17", "RDATA 18 5", "POSITION 18 20"]
    assert bench.writer.statistics()["rows_dropped"] == 7


@rule("9.6 prev new only over no own row: a drop between composed frames")
def _() -> None:
    bench = Bench(publish_in_flight=1, publish_queue_bytes=1000)
    bench.complete(11, "1")
    (frame,) = bench.writer.frames_to_publish()
    for token in (12, 13, 14):
        bench.complete(token, "2" * 100)
    bench.move(16)
    bench.writer.published(frame)
    assert short(bench.lines()) == ["POSITION 16 16"]
    bench.move(17)
    bench.writer.tick(100.0)
    assert short(bench.lines())[-1] == "POSITION 16 17"  # and a chain again


@rule("9.6 each stream has its own head in a shared frame")
def _() -> None:
    bench = Bench(Stream("events"), Stream("rooms"), Stream("idle"))
    bench.complete(11, "1")
    bench.complete(12, "2", stream="rooms", position=14)
    bench.complete(13, "3", position=14)
    assert bench.publish() == [
        [
            NAME,
            "POSITION events w1 10 10",
            "RDATA events w1 11 1",
            "RDATA events w1 13 3",
            "POSITION events w1 13 14",
            "POSITION rooms w1 10 10",
            "RDATA rooms w1 12 2",
            "POSITION rooms w1 12 14",
        ]
    ]


@rule("9.6 a heartbeat is x x, never ahead of the rows that wait")
def _() -> None:
    bench = Bench(publish_in_flight=1)
    bench.complete(11, "1")
    (frame,) = bench.writer.frames_to_publish()
    bench.complete(12, "2")
    assert bench.writer.tick(2.0)
    bench.writer.published(frame)
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 11 11"],
        ["POSITION 11 11", "RDATA 12 2"],
    ]


@rule("9.10 a fact is never split")
def _() -> None:
    bench = Bench(frame_rows=3)
    bench.complete(11, "1", "2")
    bench.complete(12, "3", "4")
    bench.complete(13, "5", "6", "7")
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 10 10", "RDATA batch 1", "RDATA 11 2"],
        ["POSITION 11 11", "RDATA batch 3", "RDATA 12 4"],
        ["POSITION 12 12", "RDATA batch 5", "RDATA batch 6", "RDATA 13 7"],
    ]


@rule("9.10 a fact over the frame bound is POSITION id id")
def _() -> None:
    bench = Bench(frame_rows=2, frame_bytes=1024)
    bench.complete(11, "1" * 1024)
    assert short(bench.lines()) == ["POSITION 11 11"]
    bench.complete(12, "1", "2", "3")
    bench.move(14)
    assert short(bench.lines()) == ["POSITION 14 14"]
    bench.complete(15, "1" * 512, "2" * 512)
    bench.complete(16, "4")
    bench.complete(17, "1" * 2000)
    bench.complete(18, "1" * 2000)
    bench.complete(19, "5")
    bench.complete(20, "1" * 2000)
    bench.complete(21, "6", position=22)
    assert [short(message) for message in bench.publish()] == [
        ["POSITION 15 15", "RDATA 16 4", "POSITION 18 18", "RDATA 19 5", "POSITION 20 20"],
        ["POSITION 20 20", "RDATA 21 6", "POSITION 21 22"],
    ]
    assert bench.writer.statistics()["facts_too_large"] == 6


@rule("9.11, 9.16 every frame opens with NAME, of resettable streams and of the others")
def _() -> None:
    bench = Bench(Stream("events"), Stream("typing", resettable=True))
    bench.complete(11, "1")
    assert bench.lines() == [NAME, "POSITION events w1 10 10", "RDATA events w1 11 1"]
    bench.complete(12, "2")
    bench.complete(13, "3", stream="typing")
    assert bench.lines() == [
        NAME,
        "POSITION events w1 11 11",
        "RDATA events w1 12 2",
        "POSITION typing w1 10 10",
        "RDATA typing w1 13 3",
    ]
    bench.move(15, stream="typing")
    assert bench.lines() == [NAME, "POSITION typing w1 13 15"]
    bench.writer.tick(100.0)
    assert bench.lines()[:2] == OPENING


@rule("9.16 a writer that hears no REPLICATE says the epoch in every frame, within the same bounds")
def _() -> None:
    bench = Bench(listens=False, frame_bytes=1024)
    for token in range(11, 211):
        bench.complete(token, '"%s"' % ("x" * 20), position=None)
    bench.move(210)
    frames = bench.publish()
    assert len(frames) > 5
    for frame in frames:
        assert frame[:2] == OPENING
        assert len("\n".join(frame)) <= 1024


@rule("9 a REPLICATE after an answer was composed gets another")
def _() -> None:
    bench = Bench()
    bench.ask()
    bench.ask()
    (answer,) = bench.writer.frames_to_publish()
    assert answer.announcement
    assert lines_of(answer) == [*OPENING, "POSITION events w1 10 10"]
    bench.ask()
    bench.ask()
    assert bench.writer.frames_to_publish() == []  # a burst is answered once the first answer is out
    bench.writer.published(answer)
    (another,) = bench.writer.frames_to_publish()
    assert lines_of(another) == lines_of(answer)
    assert another.number > answer.number
    bench.writer.published(another)
    assert bench.writer.frames_to_publish() == []


@rule("9 others are followed on heartbeats only: once a beat")
def _() -> None:
    bench = Bench()
    bench.move(20)
    assert short(bench.lines()) == ["POSITION 10 20"]
    for position in range(21, 30):
        bench.move(position)
        assert bench.lines() == []
    bench.writer.tick(2.0)
    assert [short(message) for message in bench.publish()] == [["POSITION 20 20"], ["POSITION 20 29"]]
    bench.move(30)
    assert bench.lines() == []
    bench.complete(32, "1", position=33)  # it comes along with rows
    assert short(bench.lines()) == ["POSITION 29 29", "RDATA 32 1", "POSITION 32 33"]


@pytest.mark.parametrize("check", RULES)
def test_rules(check: Callable[[], None]) -> None:
    check()


# --- bounds, channels, beats, misuse ---


def test_the_stream_with_most_waiting_rows_drops() -> None:
    bench = Bench(Stream("events"), Stream("rooms"), publish_queue_bytes=1000)
    for token in (12, 13):
        bench.complete(token, "1" * 100, position=None)  # 11 is open for long
    for token in range(14, 24):
        bench.complete(token, "2" * 10, stream="rooms", position=None)
        assert bench.writer.queued_bytes <= 1000
    bench.move(23, stream="rooms")
    assert [line for line in short(bench.lines()) if line.startswith("RDATA")] != []
    bench.complete(11, position=13)
    assert short(bench.lines()) == ["POSITION 13 13"]


def test_memory_stays_bounded_behind_a_fact_that_never_ends() -> None:
    bench = Bench(publish_queue_bytes=10_000)
    for token in range(12, 2_000):
        bench.complete(token, "1", position=None)
        assert bench.writer.queued_bytes <= 10_000
    for token in range(2_000, 4_000):
        bench.complete(token, position=None)  # facts without rows occupy memory too
        assert bench.writer.queued_bytes <= 10_000
    bench.complete(11, position=3_999)
    end = short(bench.lines())
    assert end[0].startswith("POSITION")
    assert end[-1].split()[-1] == "3999"
    assert bench.writer.queued_bytes == 0


def test_a_queue_of_no_bytes_carries_nothing() -> None:
    bench = Bench(publish_queue_bytes=0)
    bench.complete(11, "1")
    bench.complete(12, "1", position=12)
    assert short(bench.lines()) == ["POSITION 12 12"]


def test_streams_take_turns() -> None:
    bench = Bench(Stream("events"), Stream("rooms"), frame_rows=2)
    for token in range(11, 17):
        bench.complete(token, "1")
    bench.complete(17, "2", stream="rooms")
    assert [message[:2] for message in bench.publish()] == [
        [NAME, "POSITION events w1 10 10"],
        [NAME, "POSITION rooms w1 10 10"],
        [NAME, "POSITION events w1 13 13"],
        [NAME, "POSITION events w1 15 15"],
    ]


def test_a_stream_that_does_not_fit_goes_into_the_next_frame() -> None:
    bench = Bench(Stream("events"), Stream("rooms"), Stream("typing", resettable=True), frame_bytes=1024)
    bench.complete(11, "1" * 870)
    bench.complete(12, "2", stream="rooms")
    bench.complete(13, "3", stream="typing")
    first, second = bench.publish()
    assert first[:2] == [NAME, "POSITION events w1 10 10"]
    assert second[:2] == [NAME, "POSITION typing w1 10 10"]
    assert second[3] == "POSITION rooms w1 10 10"


def test_heads_behind_facts_that_are_too_large_count_as_bytes() -> None:
    bench = Bench(frame_bytes=1024, start=0)
    for token in range(1, 201):
        bench.complete(token, "1" * (2000 if token % 2 else 1))
    messages = bench.publish()
    assert all(len("\n".join(message)) <= 1024 for message in messages)
    assert sum(line.startswith("RDATA") for message in messages for line in message) == 100


def test_sub_channels_have_their_own_frames_and_announcements() -> None:
    bench = Bench(Stream("events"), Stream("presence", channel="live"), connected=False)
    bench.complete(11, "1")
    bench.complete(12, "2", stream="presence")
    bench.writer.connected(0.0)
    frames = bench.writer.frames_to_publish()
    assert [(frame.channel_suffix, lines_of(frame)) for frame in frames] == [
        ("", [*OPENING, "POSITION events w1 10 10"]),
        ("live", [*OPENING, "POSITION presence w1 10 10"]),
        ("", [NAME, "POSITION events w1 10 10", "RDATA events w1 11 1"]),
        ("live", [NAME, "POSITION presence w1 10 10", "RDATA presence w1 12 2"]),
    ]
    assert [frame.number for frame in frames] == [1, 2, 3, 4]


def test_an_announcement_is_cut_into_bounded_messages_and_begun_anew_after_a_reconnect() -> None:
    streams = [Stream(f"stream{number}") for number in range(30)]
    bench = Bench(*streams, frame_bytes=1024, publish_in_flight=1, connected=False)
    bench.writer.connected(0.0)
    (first,) = bench.writer.frames_to_publish()
    bench.writer.disconnected(1.0)
    bench.writer.connected(1.0)
    assert bench.writer.frames_to_publish() == [first]
    bench.writer.published(first)
    messages = bench.publish()
    assert len(messages) == 2
    assert all(message[:2] == OPENING and len("\n".join(message)) <= 1024 for message in messages)
    assert sorted(line for message in messages for line in message[2:]) == sorted(
        f"POSITION {stream.name} w1 10 10" for stream in streams
    )


def test_beats_are_jittered_and_stop_while_disconnected() -> None:
    numbers, settings = iter([0.0, 1.0]), Settings(heartbeat=10.0)
    writer = Writer("test", "w1", incarnation=7, epoch=EPOCH, settings=settings, jitter=numbers.__next__)
    assert writer.announcements.next_deadline == math.inf
    writer.connected(100.0)
    assert writer.announcements.next_deadline == pytest.approx(109.0)
    assert not writer.tick(108.9)
    assert writer.tick(109.0)
    assert writer.announcements.next_deadline == pytest.approx(120.0)
    writer.disconnected(115.0)
    assert writer.announcements.next_deadline == math.inf
    assert not writer.tick(120.0)
    assert writer.frames_to_publish() == []


def test_confirmations_come_in_order_and_late_ones_do_no_harm() -> None:
    bench = Bench(frame_rows=1)
    bench.complete(11, "1")
    bench.complete(12, "2")
    first, second = bench.writer.frames_to_publish()
    with pytest.raises(ValueError, match=f"frame {second.number} confirmed before frame {first.number}"):
        bench.writer.published(second)
    bench.writer.disconnected(1.0)
    bench.writer.published(first)  # the reply was already on its way
    bench.writer.published(first)
    assert bench.writer.positions() == {"events": 11}
    bench.writer.connected(2.0)
    assert bench.writer.frames_to_publish()[0] == second
    bench.writer.published(second)
    bench.lines()
    bench.writer.published(second)
    assert bench.writer.positions() == {"events": 12}


def test_a_fact_is_completed_once_and_in_time() -> None:
    bench = Bench()
    bench.complete(12, "2", position=None)
    for token in (10, 12):
        with pytest.raises(ValueError, match=f"'events': {token} completed twice, or after position 10"):
            bench.complete(token, "1")
    with pytest.raises(UnknownStream, match="'rooms' is not registered"):
        bench.complete(11, "1", stream="rooms")
    with pytest.raises(UnknownStream):
        bench.move(11, stream="rooms")


def test_streams_that_cannot_be_written() -> None:
    bench = Bench(frame_bytes=1024)
    with pytest.raises(ConfigError, match="twice"):
        bench.writer.add_stream(Stream("events"), 0)
    with pytest.raises(ConfigError, match="frame_bytes=1024"):
        Writer("x" * 255, "w" * 255, incarnation=1, epoch=EPOCH, settings=Settings(frame_bytes=1024)).add_stream(
            Stream("s" * 255), 0
        )
    with pytest.raises(ConfigError):
        Writer("test", "a writer", incarnation=1, epoch=EPOCH, settings=Settings())


def test_statistics() -> None:
    bench = Bench(publish_in_flight=1)
    bench.complete(11, "1")
    bench.complete(13, "3", position=None)
    (frame,) = bench.writer.frames_to_publish()
    assert bench.writer.statistics() == {
        "frames": 2,
        "announcements": 1,
        "rows": 1,
        "bytes": len("\n".join([*OPENING, "POSITION events w1 10 10"])) + len(frame.data),
        "publish_failures": 0,
        "rows_dropped": 0,
        "facts_too_large": 0,
        "queued_bytes": bench.writer.queued_bytes,
        "unconfirmed_bytes": len(frame.data),
        "in_flight": 1,
        "connected": True,
        "fenced": False,
        "streams": {"events": {"sent": 10, "composed": 11, "position": 11, "ready": 0, "held": 1}},
    }


# --- a random model ---


Truth = dict[str, dict[int, list[str]]]


@attrs.define
class ModelReader:
    """A reader of three rules: mind the chain, fetch from the truth, take no row twice."""

    truth: Truth
    position: dict[str, int]
    seen: dict[str, list[tuple[int, list[str]]]] = attrs.field(factory=lambda: defaultdict(list))
    batch: dict[str, list[str]] = attrs.field(factory=lambda: defaultdict(list))

    def receive(self, frame: OutgoingFrame) -> None:
        for line in lines_of(frame):
            command, _, rest = line.partition(" ")
            if command == "POSITION":
                stream, _, prev, new = rest.split(" ")
                self.batch[stream].clear()
                if int(prev) > self.position[stream]:
                    self.fetch(stream, int(new))
                self.position[stream] = max(int(new), self.position[stream])
            elif command == "RDATA":
                stream, _, number, row = rest.split(" ", 3)
                self.batch[stream].append(row)
                if number != "batch":
                    rows, self.batch[stream] = self.batch[stream], []
                    if int(number) > self.position[stream]:
                        self.seen[stream].append((int(number), rows))
                        self.position[stream] = int(number)

    def fetch(self, stream: str, upto: int) -> None:
        facts = sorted(self.truth[stream].items())
        self.seen[stream] += [(token, rows) for token, rows in facts if self.position[stream] < token <= upto]


@attrs.define
class Auditor:
    """Holds every new frame against the truth (9.6, 9.10, 9.11, 9.16)."""

    truth: Truth
    proven: dict[str, int]
    end: dict[str, int]
    own: dict[str, set[int]]
    settings: Settings
    last: int = 0

    def audit(self, frame: OutgoingFrame) -> None:
        if frame.number <= self.last:
            return  # again; that it is the same is checked where it is handed out
        self.last += 1
        assert frame.number == self.last
        lines = lines_of(frame)
        assert len(frame.data) <= self.settings.frame_bytes
        rows = [line for line in lines if line.startswith("RDATA")]
        assert len(rows) == frame.rows <= self.settings.frame_rows
        positions = [line for line in lines if line.startswith("POSITION")]
        streams = {line.split(" ")[1] for line in positions}
        assert all(row.split(" ")[1] in streams for row in rows)
        opening = lines[: len(lines) - len(rows) - len(positions)]
        assert opening == (OPENING if frame.announcement else [NAME])
        for stream in streams:
            start = self.end[stream]
            self.audit_stream(stream, [line for line in lines if line.split(" ")[1] == stream])
            if frame.announcement:
                assert self.end[stream] == start
            else:
                assert frame.ends[stream] == self.end[stream]

    def audit_stream(self, stream: str, lines: list[str]) -> None:
        headed, batch, end = False, [], self.end[stream]
        for line in lines:
            fields = line.split(" ", 4)
            if fields[0] == "RDATA":
                assert headed
                batch.append(fields[4])
                if fields[3] != "batch":
                    token = int(fields[3])
                    assert self.rows_between(stream, end, token) == {token: batch}
                    end, batch = token, []
            else:
                assert batch == []  # a fact is not split
                prev, new = int(fields[3]), int(fields[4])
                assert new <= self.proven[stream]
                if prev < new:
                    assert prev == end
                    assert self.rows_between(stream, prev, new) == {}
                elif new != end:  # stepping over something, for a reason: one fact that will not be published
                    assert any(end < token for token in self.own[stream])
                headed, end = True, new
        assert batch == []
        self.end[stream] = end

    def rows_between(self, stream: str, after: int, upto: int) -> dict[int, list[str]]:
        return {token: rows for token, rows in self.truth[stream].items() if after < token <= upto}


class Model:
    """A writer of three streams whose facts end in any order, and a Redis that loses, repeats and fails."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        streams = [
            Stream[Any]("events"),
            Stream[Any]("caches", follows=False, channel=self.random.choice(["", "caches"])),
            Stream[Any]("typing", resettable=True),
        ]
        self.names = [stream.name for stream in streams]
        self.settings = Settings(
            frame_bytes=1024,
            frame_rows=self.random.choice([2, 5, 1000]),
            publish_queue_bytes=self.random.choice([0, 3_000, 100_000]),
            publish_in_flight=self.random.choice([1, 3]),
            quiet_streams=self.random.choice([1, 8]),
        )
        self.writer = Writer(
            "test", "w1", incarnation=7, epoch=EPOCH, settings=self.settings, jitter=self.random.random
        )
        for stream in streams:
            self.writer.add_stream(stream, 10)
        self.now = 0.0
        self.highest = dict.fromkeys(self.names, 10)
        self.proven = dict.fromkeys(self.names, 10)
        self.open: dict[str, set[int]] = {name: set() for name in self.names}
        self.ended: dict[str, set[int]] = {name: set() for name in self.names}
        self.truth: Truth = {name: {} for name in self.names}
        self.reader = ModelReader(self.truth, dict.fromkeys(self.names, 10))
        self.auditor = Auditor(self.truth, self.proven, dict.fromkeys(self.names, 10), self.ended, self.settings)
        self.in_flight: list[OutgoingFrame] = []
        self.again: list[OutgoingFrame] = []  # what has to go out first, exactly so
        self.online = False

    def reserve(self) -> None:
        name = self.random.choice(self.names)
        for _ in range(self.random.randint(1, 4)):
            self.highest[name] += 1
            if self.random.random() < 0.7:
                self.open[name].add(self.highest[name])  # else it is another writer's

    def complete(self) -> None:
        name = self.random.choice(self.names)
        if self.open[name] and self.random.random() < 0.3:
            self.end_together(name)
        elif self.open[name]:
            self.end(name, self.random.choice(sorted(self.open[name])))

    def end_together(self, name: str) -> None:
        """One transaction of several facts of one row each."""
        tokens = sorted(self.random.sample(sorted(self.open[name]), self.random.randint(1, len(self.open[name]))))
        rows = [f"[{token},0,{'7' * self.random.choice([1, 30, 300, 1200])}]" for token in tokens]
        self.open[name].difference_update(tokens)
        self.ended[name].update(tokens)
        self.truth[name].update({token: [row] for token, row in zip(tokens, rows, strict=True)})
        self.writer.rows_completed(name, tokens, [row.encode() for row in rows])
        if self.random.random() < 0.8:
            self.move(name)

    def end(self, name: str, token: int) -> None:
        self.open[name].remove(token)
        self.ended[name].add(token)
        count = self.random.choice([0, 1, 1, 1, 2, 3, 7])
        width = self.random.choice([1, 30, 30, 300, 1200])
        rows = [f"[{token},{number},{'7' * width}]" for number in range(count)]
        if rows:
            self.truth[name][token] = rows
        self.writer.fact_completed(name, token, [row.encode() for row in rows])
        if self.random.random() < 0.8:
            self.move(name)

    def move(self, name: str) -> None:
        floor = min(self.open[name], default=self.highest[name] + 1) - 1
        follow = self.random.random() < 0.3
        position = floor if follow else max((t for t in self.ended[name] if t <= floor), default=0)
        self.proven[name] = max(self.proven[name], position)
        self.writer.position_moved(name, position)

    def publish(self) -> None:
        frames = self.writer.frames_to_publish()
        for frame in frames:
            if self.again:
                assert frame == self.again.pop(0)
            self.auditor.audit(frame)
        self.in_flight += frames
        assert len(self.in_flight) <= self.settings.publish_in_flight
        assert self.writer.queued_bytes <= self.settings.publish_queue_bytes

    def confirm(self) -> None:
        for frame in self.in_flight[: self.random.randint(1, 3)]:
            if self.random.random() < 0.9:  # at most once
                self.reader.receive(frame)
            self.in_flight.remove(frame)
            self.writer.published(frame)

    def fail(self) -> None:
        for frame in self.in_flight:
            if self.random.random() < 0.5:
                self.reader.receive(frame)
        self.again = self.in_flight + self.again
        self.in_flight = []
        if self.random.random() < 0.5:
            self.writer.publish_failed()
        else:
            self.writer.disconnected(self.now)
            self.online = False

    def connect(self) -> None:
        if not self.online:
            self.online = True
            self.writer.connected(self.now)

    def beat(self) -> None:
        self.now += self.random.random()
        assert self.writer.tick(self.now) <= self.online

    def ask(self) -> None:
        self.writer.replicate_received(self.now)

    def follow(self) -> None:
        self.move(self.random.choice(self.names))

    def run(self, steps: int) -> None:
        weighted = [
            (self.reserve, 6), (self.complete, 8), (self.follow, 2), (self.publish, 5), (self.confirm, 5),
            (self.fail, 1), (self.connect, 2), (self.beat, 2), (self.ask, 1),
        ]  # fmt: skip
        for action in self.random.choices([a for a, _ in weighted], [w for _, w in weighted], k=steps):
            action()

    def finish(self) -> None:
        """Everything ends, Redis behaves, each stream has its turn at a beat: whatever was lost is found."""
        for name in self.names:
            for token in sorted(self.open[name]):
                self.end(name, token)
            self.proven[name] = self.highest[name]
            self.writer.position_moved(name, self.highest[name])
        self.connect()
        for _ in range(1 + len(self.names)):
            self.now += 10.0
            assert self.writer.tick(self.now)
            for _ in range(1000):
                self.publish()
                if not self.in_flight:
                    break
                for frame in self.in_flight:
                    self.reader.receive(frame)
                    self.writer.published(frame)
                self.in_flight = []
        assert self.again == []
        assert self.writer.queued_bytes == 0
        for name in self.names:
            end = self.highest[name] if name != "caches" else max([10, *self.ended[name]])
            assert self.writer.positions()[name] >= end
            assert self.reader.position[name] == self.writer.positions()[name]
            assert self.reader.seen[name] == sorted(self.truth[name].items())


@pytest.mark.parametrize("seed", range(150))
def test_random_every_fact_once_in_order_and_no_false_chain(seed: int) -> None:
    model = Model(seed)
    model.run(400)
    model.finish()


# --- many facts at once


@pytest.mark.parametrize("seed", range(40))
def test_rows_completed_together_make_the_frames_that_they_make_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    settings = Settings(frame_bytes=rng.choice([1_024, 65_536]))
    together, singly = (
        Writer("bus", "w", incarnation=1, epoch="0" * 32, settings=settings, jitter=lambda: 0.5) for _ in range(2)
    )
    for writer in (together, singly):
        writer.add_stream(Stream("s"), 0)
        writer.connected(0.0)
    position, next_id, waiting = 0, 1, []
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            count = rng.randrange(1, 8)
            step = rng.choice([1, 1, 1, 2])  # another writer's IDs between them
            waiting.append([next_id + step * i for i in range(count)])
            next_id = waiting[-1][-1] + rng.randrange(1, 3)
        rng.shuffle(waiting)
        while waiting and rng.random() < 0.7:
            ids = waiting.pop()
            payloads = [b"[%d,%d]" % (id, 10 ** rng.choice([1, 5, 1_500])) for id in ids]
            together.rows_completed("s", ids, payloads)
            for id, payload in zip(ids, payloads, strict=True):
                singly.fact_completed("s", id, (payload,))
        floor = min((ids[0] for ids in waiting), default=next_id) - 1
        position = max(position, rng.randint(min(position, floor), floor))  # it may stop in the middle of a run
        for writer in (together, singly):
            writer.position_moved("s", position)
        frames, expected = together.frames_to_publish(), singly.frames_to_publish()
        assert [frame.data for frame in frames] == [frame.data for frame in expected]
        for frame in frames:
            together.published(frame)
            singly.published(frame)
        assert together.statistics() == singly.statistics()
    assert together.positions() == singly.positions()


def test_rows_completed_after_the_end_are_ignored_and_below_the_position_refused() -> None:
    writer = Writer("bus", "w", incarnation=1, epoch="0" * 32, settings=Settings())
    writer.add_stream(Stream("s"), 5)
    writer.rows_completed("s", [], [])
    with pytest.raises(ValueError, match="5 completed"):
        writer.rows_completed("s", [5, 6], [b"1", b"2"])
    assert not writer.unsent
    writer.connected(0.0)
    writer.rows_completed("s", [6, 7], [b"1", b"2"])
    writer.position_moved("s", 7)
    assert writer.unsent
    writer.fenced()
    writer.rows_completed("s", [8], [b"1"])
    assert writer.queued_bytes == 0


def test_what_is_due_is_published_also_when_rows_are_dropped_behind_an_open_fact() -> None:
    bench = Bench(publish_queue_bytes=1000)
    bench.move(11)  # others' progress, told once a beat
    assert short(bench.lines()) == ["POSITION 10 11"]
    bench.move(12)
    assert bench.lines() == []
    bench.complete(14, "x" * 2000, position=None)  # 13 is open: too much waits behind it
    assert bench.writer.unsent
    assert short(bench.lines()) == ["POSITION 12 12"]
    assert not bench.writer.unsent  # or who closes waits for it in vain
