"""Rule 9.27: what a beat announces, and how a reader hears of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from busrep.core.received import Followed
from busrep.core.states import State
from busrep.settings import Settings
from busrep.streams import Stream
from tests.core.test_core_trust import EPOCH, announced
from tests.core.test_writer import OPENING, Bench
from tests.support.reader import Reader

FIVE = [Stream[Any](f"s{number}") for number in range(5)]


class Beating(Bench):
    """A bench with beats: `beat` gives the streams that the next one announces, in each message."""

    at = 0.0

    def beat(self) -> list[list[str]]:
        self.at += 2.0
        assert self.writer.tick(self.at)
        return self.announced()

    def announced(self) -> list[list[str]]:
        messages = self.publish()
        assert all(message[:2] == OPENING for message in messages)
        return [[line.split()[1] for line in message[2:]] for message in messages]


def test_9_27_a_beat_announces_streams_in_which_nothing_happened_in_turns() -> None:
    bench = Beating(*FIVE, quiet_streams=2)
    assert [bench.beat() for _ in range(5)] == [
        [["s0", "s1"]],
        [["s2", "s3"]],
        [["s0", "s4"]],
        [["s1", "s2"]],
        [["s3", "s4"]],
    ]


def beats_of(number: int, writers: int, *, now: float, clock: float) -> list[float]:
    """When a writer beats by the common clock, after it has joined the others at a beat of its own."""
    writer = Bench().writer
    beats, writer.announcements.writers = [], writers
    for _ in range(3):
        writer.announcements.join(number, now, clock)
        assert writer.tick(now)
        clock += writer.announcements.next_beat - now
        now = writer.announcements.next_beat
        beats.append(clock)
    return beats


def test_9_27_writers_beat_together_by_a_clock_that_all_see() -> None:
    """Whatever their own clocks show: they are woken for one another once."""
    assert beats_of(1, 7, now=50.0, clock=1001.5) == beats_of(2, 7, now=7.25, clock=1001.5) == [1002.0, 1004.0, 1006.0]
    late = beats_of(1, 7, now=50.0, clock=1001.9)  # its timer is early by a little: that is no beat of its own
    assert late == pytest.approx([1004.0, 1006.0, 1008.0])


def test_9_27_writers_of_a_large_deployment_beat_in_groups() -> None:
    """So that rows do not wait behind what a thousand of them say."""
    beats = [beats_of(number, 47, now=50.0, clock=1000.5)[-1] for number in range(6)]
    assert beats[:3] == pytest.approx(beats[3:])
    assert sorted(beats[:3]) == pytest.approx([1005 + 1 / 3, 1006, 1006 + 2 / 3])


class Resting(Beating):
    """One of so many writers, the first of them in the registry, that has published nothing for some beats."""

    def __init__(self, *streams: Stream[Any], writers: int = 20, rank: int = 0, **settings: Any) -> None:
        super().__init__(*streams or FIVE[:1], quiet_streams=1, **settings)
        self.writer.announcements.writers, self.writer.announcements.rank = writers, rank
        self.writer.announcements.quiet_beats = 10

    def says(self, *, stored: bool = True, hears: bool = True) -> bool:
        """Whether it announces anything at the next beat."""
        self.writer.announcements.stored = stored
        self.at += 2.0
        assert self.writer.tick(self.at, hears=hears)
        return bool(self.publish())


def test_9_27_of_many_writers_at_rest_four_speak_at_each_beat() -> None:
    """So everybody hears something, and each writer at least at every sixteenth beat."""
    for writers, apart in ((7, 1), (8, 2), (20, 5), (64, 16), (1000, 16)):
        resting = [Resting(writers=writers, rank=rank) for rank in range(writers)]
        for _ in range(3):
            spoke = [[one.says() for _ in range(apart)] for one in resting]
            assert [sum(said) for said in spoke] == [1] * writers, (writers, apart)
            for speakers in map(sum, zip(*spoke, strict=True)):
                assert writers // apart <= speakers <= -(-writers // apart)


def test_9_27_who_rests_tells_of_as_many_streams_as_if_it_did_not() -> None:
    one = Resting(*FIVE, writers=8)
    while not one.says():
        pass
    said = []
    for _ in range(6):
        one.writer.announcements.stored = True
        one.at += 2.0
        one.writer.tick(one.at, hears=True)
        said += one.announced()
    assert [len(streams) for streams in said] == [2, 2, 2]
    assert {stream for streams in said for stream in streams} == {stream.name for stream in FIVE}


def test_9_27_whom_somebody_asks_does_not_rest_for_a_round() -> None:
    """Else a reader that hears only a few of the writers asks them all at each beat."""
    one = Resting(writers=20)
    while not one.says():
        pass
    assert [one.says() for _ in range(6)] == [False] * 4 + [True, False]
    one.writer.replicate_received(one.at + 1.0)
    assert [one.says() for _ in range(7)] == [True] * 5 + [False] * 2


def test_9_27_writers_that_rest_take_turns_by_the_clock_that_all_see() -> None:
    """Whenever each has begun, and whatever its own clock shows."""
    spoke = []
    for rank, began in ((0, 1000.0), (0, 1004.0), (1, 1000.0), (1, 1004.0)):
        one = Resting(writers=12, rank=rank)
        one.writer.announcements.join(1, 0.0, began)
        said = [(one.says(), began + one.at)[::-1] for _ in range(12)]
        spoke.append({at for at, says in said if says and at > 1010})
    assert spoke[0]
    assert spoke[2]
    for first, later in ((spoke[0], spoke[1]), (spoke[2], spoke[3])):
        assert {at for at in later if at < 1024} == {at for at in first if at < 1024}
    assert not spoke[0] & spoke[2]


@pytest.mark.parametrize(
    "why", ["it hears nobody", "no table has it", "a fact", "somebody asks", "somebody asked too soon", "in memory",
            "others moved it", "single lines"],
)  # fmt: skip
def test_9_27_a_writer_that_has_something_to_tell_does_not_rest(why: str) -> None:
    streams = [Stream[Any]("events", foreign_writers=why == "single lines")]
    if why == "in memory":
        streams.append(Stream("typing", resettable=True))
    one = Resting(*streams, one_line_messages=why == "single lines")
    if why not in ("in memory", "single lines"):
        while not one.says():
            pass
        assert not one.says()
    for beat in range(4):  # less than its turn comes
        if why == "a fact":
            one.complete(11 + beat, "1")
            one.publish()
        elif why == "somebody asks":
            one.writer.replicate_received(one.at + 1.0)
            assert one.publish() == []
        elif why == "somebody asked too soon":
            one.writer.replicate_received(one.at + 1.9)
        elif why == "others moved it":
            one.move(11 + beat)
            one.publish()
        assert one.says(hears=why != "it hears nobody", stored=why != "no table has it")


def test_9_27_a_beat_is_left_out_only_if_it_was_stored() -> None:
    one = Resting()
    while not one.says():
        pass
    assert [one.says(stored=stored) for stored in (True, False, True, False)] == [False, True, False, True]


def test_9_27_a_stream_that_moved_is_announced_at_the_next_beat() -> None:
    bench = Beating(*FIVE, quiet_streams=1)
    bench.complete(11, "1", stream="s3")
    bench.publish()
    assert bench.beat() == [["s0", "s3"]]
    assert bench.beat() == [["s1"]]
    bench.move(12, stream="s4")  # others' progress, which goes out behind the beat's announcement
    bench.writer.tick(bench.at + 2.0)
    bench.at += 2.0
    announcement, progress = bench.publish()
    assert announcement[2:] == ["POSITION s2 w1 10 10"]
    assert progress[1:] == ["POSITION s4 w1 10 12"]
    assert bench.beat() == [["s3", "s4"]]
    assert bench.beat() == [["s4"]]  # its turn


def test_9_27_rows_that_were_dropped_are_announced_at_the_next_beat() -> None:
    bench = Beating(*FIVE, quiet_streams=1, publish_queue_bytes=0)
    bench.complete(11, "1", stream="s3")
    assert bench.lines()[1:] == ["POSITION s3 w1 11 11"]
    assert bench.beat() == [["s0", "s3"]]


def test_9_27_all_streams_are_announced_to_whoever_asks_after_a_reconnect_and_at_the_end() -> None:
    everything = [[stream.name for stream in FIVE]]
    bench = Beating(*FIVE, quiet_streams=1)
    bench.ask()
    assert bench.announced() == everything
    bench.at = bench.asked_at
    assert bench.beat() == [["s0"]]
    bench.writer.disconnected(bench.at)
    bench.writer.connected(bench.at)
    assert bench.announced() == everything
    bench.beat()
    bench.writer.farewell()
    assert bench.announced() == everything


def test_9_27_a_replicate_that_waited_for_a_beat_is_answered_whole() -> None:
    bench = Beating(*FIVE, quiet_streams=1, answer_interval=5.0)
    bench.writer.replicate_received(1.0)
    assert bench.announced() == []
    assert bench.beat() == [[stream.name for stream in FIVE]]


def test_9_27_a_replicate_behind_a_beat_that_is_not_composed_is_answered_with_it() -> None:
    bench = Beating(*FIVE, quiet_streams=1)
    assert bench.writer.tick(2.0)
    bench.writer.replicate_received(2.0)
    assert bench.announced() == [[stream.name for stream in FIVE]]


def test_9_27_streams_in_memory_are_announced_at_every_beat() -> None:
    bench = Beating(*FIVE, Stream("typing", resettable=True), quiet_streams=1)
    assert [bench.beat() for _ in range(3)] == [[["s0", "typing"]], [["s1", "typing"]], [["s2", "typing"]]]


def test_9_27_every_channel_carries_a_sign_of_life() -> None:
    bench = Beating(*FIVE, Stream("a", channel="live"), Stream("b", channel="live"), quiet_streams=1)
    assert [bench.beat() for _ in range(3)] == [[["s0"], ["a"]], [["s1"], ["b"]], [["s2"], ["a"]]]


def test_9_27_a_writer_of_single_lines_announces_all() -> None:
    streams = [Stream[Any](f"s{number}", foreign_writers=True) for number in range(3)]
    bench = Beating(*streams, quiet_streams=1, one_line_messages=True)
    bench.writer.tick(2.0)
    assert [line.split()[1] for line in bench.lines()] == ["s0", "s1", "s2"]


def test_9_27_the_turns_of_a_beat_that_redis_held_up_are_not_lost() -> None:
    bench = Beating(*FIVE, quiet_streams=1)
    bench.complete(11, "1", stream="s3")
    bench.publish()
    assert bench.writer.tick(2.0)
    (held,) = bench.writer.frames_to_publish()
    assert bench.writer.tick(4.0)
    assert bench.writer.tick(6.0)
    assert bench.writer.frames_to_publish() == []
    bench.writer.published(held)
    assert bench.announced() == [["s1", "s2"]]


# -- readers


def reader_of(*streams: str, **followed: Any) -> Reader:
    reader = Reader([Followed(name, **followed) for name in streams], epoch=EPOCH, settings=Settings())
    reader.connected(0.0)
    return reader


def test_9_27_a_reader_asks_until_every_stream_of_a_writer_that_it_hears_is_known() -> None:
    reader = reader_of("s", "t")
    reader.start_at("s", "w1", 5)
    reader.start_at("t", "w1", 5)
    assert not reader.unheard(1.0)  # nobody to answer
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 1.0)
    assert reader.unheard(1.0)
    reader.receive(announced("w1", 7, "POSITION t w1 5 5"), 2.0)
    assert not reader.unheard(2.0)
    reader.connected(3.0)
    reader.receive(b"NAME w1 7\nPOSITION s w1 5 5", 3.0)
    assert reader.unheard(3.0)
    assert not reader.unheard(14.0)  # it is silent: the table is asked


def test_9_27_of_lines_that_were_dropped_for_a_bound_the_positions_are_asked_for() -> None:
    reader = reader_of("s")
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 1.0)
    assert not reader.unheard(1.0)
    reader.progress["s", "w1"].lose()
    assert reader.unheard(1.0)


def test_9_27_who_will_not_tell_is_not_asked() -> None:
    reader = reader_of("s", "t", "u")
    for stream in ("s", "t", "u"):
        reader.start_at(stream, "w1", 5)
    reader.admission.registered({("s", "w1"): 7, ("u", "w1"): 7})  # t it has given up
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 1.0)
    assert reader.unheard(1.0)
    reader.progress["u", "w1"].stop()
    assert reader.progress["u", "w1"].state is State.STOPPED
    assert not reader.unheard(1.0)


def test_9_27_who_has_told_while_rows_are_fetched_is_not_asked() -> None:
    """What it told waits behind the rows, which the table said were due."""
    reader = reader_of("s", "t")
    for stream in ("s", "t"):
        reader.start_at(stream, "w1", 5)
    reader.progress["s", "w1"].learned(8)
    reader.receive(announced("w1", 7, "POSITION t w1 5 5"), 1.0)
    assert reader.unheard(1.0)
    reader.receive(announced("w1", 7, "POSITION s w1 8 8"), 2.0)
    assert not reader.unheard(2.0)


@pytest.mark.parametrize("followed", [{"resettable": True}, {"fetchable": False}])
def test_9_27_what_is_announced_at_every_beat_is_not_asked_for(followed: dict[str, bool]) -> None:
    reader = reader_of("s", "t", **followed)
    reader.start_at("t", "w1", 5)
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 1.0)
    assert not reader.unheard(1.0)


def test_9_27_a_writer_that_hears_no_replicate_announces_all_streams_at_each_beat() -> None:
    bench = Beating(*FIVE, quiet_streams=1)
    bench.writer.announcements.in_turns = False
    assert [bench.beat() for _ in range(2)] == [[[stream.name for stream in FIVE]]] * 2
