"""The reader core by itself: the R cases of the protocol, and the rules of its section 9 that concern a reader."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import attrs
import pytest

from busrep.core.catchup import FetchUpdates, UpdatesPage, nothing_of
from busrep.core.commands import Name, Replicate, Server
from busrep.core.delivery import Missed, RawBatch, Reset
from busrep.core.received import Followed
from busrep.core.states import TRANSITIONS, Event, State
from busrep.errors import ConfigError
from busrep.settings import Settings
from tests import ROOT
from tests.support.reader import Reader

EPOCH = "0" * 31 + "1"
OTHER_EPOCH = "0" * 31 + "2"


class Table:
    """The truth: facts per (stream, writer), and pages of it."""

    def __init__(self, page_rows: int = 1000) -> None:
        self.rows: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
        self.page_rows, self.epoch = page_rows, EPOCH
        self.proven: int | None = None

    def write(self, writer: str, *tokens: int, stream: str = "s") -> None:
        rows = self.rows.setdefault((stream, writer), [])
        rows += [(token, payload(writer, token, i)) for i, token in enumerate(tokens)]
        rows.sort(key=lambda row: row[0])

    def page(self, asked: FetchUpdates) -> UpdatesPage:
        upto = asked.upto if self.proven is None else max(asked.after, min(asked.upto, self.proven))
        rows = [row for row in self.rows.get((asked.stream, asked.writer), []) if asked.after < row[0] <= upto]
        limited = len(rows) > self.page_rows
        if limited:
            last = rows[self.page_rows - 1][0]
            rows = [row for row in rows if row[0] <= last]
            limited = True
            upto = last
        tokens, payloads = [row[0] for row in rows], [row[1] for row in rows]
        return UpdatesPage(
            asked.stream, asked.writer, asked.after, upto, tokens, payloads, limited, self.epoch, asked.incarnation
        )


def payload(writer: str, token: int, index: int = 0) -> bytes:
    return b'["%s",%d,%d]' % (writer.encode(), token, index)


def rdata(writer: str, token: int | str, row: bytes | None = None, stream: str = "s") -> bytes:
    shown = row if row is not None else payload(writer, token if isinstance(token, int) else 0)
    return f"RDATA {stream} {writer} {token} ".encode() + shown


def position(writer: str, prev: int, new: int, stream: str = "s") -> bytes:
    return f"POSITION {stream} {writer} {prev} {new}".encode()


class Driver:
    """Drives a reader as a runtime does, without one: answers its fetches, handles what it hands out."""

    def __init__(self, *, at: dict[str, int] | None = None, live: tuple[str, ...] = (), **options: object) -> None:
        stream = options.pop("stream", Followed("s"))
        settings = options.pop("settings", Settings())
        self.table = options.pop("table", None) or Table()
        self.reader = Reader([stream], settings=settings, epoch=EPOCH, jitter=lambda: 0.5, **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.log: list[tuple[str, str, int, bytes]] = []
        self.notices: list[Reset | Missed] = []
        self.asked: list[FetchUpdates] = []
        self.answer = True
        self.fail = 0
        for writer, where in (at or {}).items():
            self.reader.start_at("s", writer, where)
        for writer in live:
            self.send(position(writer, (at or {})[writer], (at or {})[writer]))

    def send(self, *lines: bytes) -> Driver:
        """One message of these lines."""
        self.reader.receive(b"\n".join(lines), self.now)
        return self.run()

    def run(self) -> Driver:
        while True:
            asked = self.reader.fetches(self.now)
            self.asked += asked
            for one in asked if self.answer else ():
                if self.fail:
                    self.fail -= 1
                    self.reader.fetch_failed(one, OSError("away"), self.now)
                else:
                    self.reader.receive_page(one, self.table.page(one), self.now)
            if not self.handle() and not (asked and self.answer):
                return self

    def handle(self) -> bool:
        handled = bool(self.reader.ready)
        while self.reader.ready:
            key = min(self.reader.ready)
            taken = self.reader.take(*key)
            if isinstance(taken, RawBatch):
                assert len(taken.tokens) == len(taken.payloads)
                self.log += [(*key, *pair) for pair in zip(taken.tokens, taken.payloads, strict=True)]
            elif taken is not None:
                self.notices.append(taken)
            self.reader.done(*key)
        return handled

    def tokens(self, writer: str) -> list[int]:
        return [token for _, name, token, _ in self.log if name == writer]

    def at(self, writer: str) -> int:
        progress = self.reader.progress["s", writer]
        assert progress.queue.delivered == progress.position
        return progress.position

    def state(self, writer: str) -> State:
        return self.reader.progress["s", writer].state

    def later(self, seconds: float) -> Driver:
        self.now += seconds
        return self.run()


def r1() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 6)
    d.send(rdata("w", 6))
    assert d.log == []
    d.send(position("w", 6, 6))
    assert [(a.after, a.upto) for a in d.asked] == [(5, 6)]
    assert d.tokens("w") == [6]
    assert d.state("w") is State.LIVE


def r2() -> None:
    for together in (True, False):
        d = Driver(at={"w": 6}, live=("w",))
        lines = [rdata("w", 7, b"1"), rdata("w", 7, b"2"), rdata("w", 6)]
        if together:
            d.send(*lines)
        else:
            for line in lines:
                d.send(line)
        assert d.log == [("s", "w", 7, b"1")]
        assert d.reader.counters.duplicates_dropped == 2


def r3() -> None:
    d = Driver(at={"w": 0}, table=Table(page_rows=100))
    d.table.write("w", *range(1, 251))
    d.send(position("w", 0, 0)).send(position("w", 250, 250))
    assert len(d.asked) == 3
    assert d.tokens("w") == list(range(1, 251))


def r3_as_written() -> None:
    """POSITION 0 250 at 0 is no gap: the writer says that it wrote no row in (0, 250]. Behind a gap it is."""
    d = Driver(at={"w": 0}, live=("w",))
    d.send(position("w", 0, 250))
    assert d.asked == []
    assert d.at("w") == 250


def r4() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7, 8)
    d.send(rdata("w", 6))
    d.send(position("w", 7, 7), rdata("w", 8))
    d.send(position("w", 8, 9))
    assert d.tokens("w") == [6, 7, 8]
    assert d.at("w") == 9


def r5() -> None:
    d = Driver(at={"w": 6}, live=("w",))
    d.table.write("w", 7, 8)
    d.send(position("w", 8, 9))
    assert [(a.after, a.upto) for a in d.asked] == [(6, 9)]
    assert d.tokens("w") == [7, 8]
    assert d.at("w") == 9


def r6() -> None:
    d = Driver(at={"a": 5, "b": 5}, live=("a", "b"))
    d.send(rdata("a", "batch", b"1")).send(rdata("b", 9, b"2")).send(rdata("a", 10, b"3"))
    assert d.log == [("s", "b", 9, b"2"), ("s", "a", 10, b"1"), ("s", "a", 10, b"3")]


def r7() -> None:
    d = Driver(at={"a": 5, "b": 9}, live=("a", "b"))
    d.send(rdata("a", "batch", b"1")).send(rdata("b", 9)).send(rdata("a", 10, b"3"))
    assert d.log == [("s", "a", 10, b"1"), ("s", "a", 10, b"3")]


def r8() -> None:
    d = Driver(at={"a": 5, "b": 5}, live=("a", "b"))
    d.send(rdata("a", "batch", b"1")).send(position("b", 5, 8)).send(rdata("a", 10, b"3"))
    assert d.log == [("s", "a", 10, b"1"), ("s", "a", 10, b"3")]
    assert d.at("b") == 8


def r9() -> None:
    d = Driver(at={"a": 0, "b": 5})
    d.table.write("b", 12, 20)
    d.send(position("a", 0, 0)).send(rdata("b", 20)).send(position("b", 20, 20))
    assert d.tokens("b") == [12, 20]


def r10() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", *range(6, 10))
    d.fail = 2
    d.send(position("w", 9, 9))
    assert d.log == []
    d.later(10)
    assert d.log == []
    d.later(10)
    assert d.tokens("w") == [6, 7, 8, 9]
    assert d.state("w") is State.LIVE
    assert d.reader.counters.fetches_failed == 2


def r12() -> None:
    for start in (10, 11, 12):
        d = Driver(at={"w": start})
        d.send(position("w", 10, 12))
        assert d.asked == []
        assert d.at("w") == 12
        assert d.state("w") is State.LIVE


def r13() -> None:
    for live in (("w",), ()):
        d = Driver(at={"w": 15}, live=live)
        d.send(position("w", 10, 12))
        assert d.at("w") == 15
        assert d.notices == []
        assert d.asked == []


def r14() -> None:
    d = Driver(at={"w": 15}, stream=Followed("s", resettable=True, fetchable=False))
    d.send(position("w", 15, 15))
    d.send(position("w", 3, 3))
    assert d.at("w") == 3
    assert d.notices == [Reset("s", "w", 3)]
    d.send(rdata("w", 4))
    assert d.tokens("w") == [4]


def r14_with_a_source() -> None:
    d = Driver(at={"w": 15}, stream=Followed("s", resettable=True))
    d.table.write("w", 1, 3)
    d.send(position("w", 15, 15))
    d.send(position("w", 3, 3))
    assert d.notices == [Reset("s", "w", 0)]
    assert d.tokens("w") == [1, 3]
    assert d.at("w") == 3


FRAMES = [
    [position("w", 5, 5), rdata("w", 6), rdata("w", 7)],
    [position("w", 7, 7), rdata("w", "batch", payload("w", 9, 0)), rdata("w", 9, payload("w", 9, 1))],
    [position("w", 9, 9), rdata("w", 12), position("w", 12, 15)],
]


def r15() -> None:
    whole = [b"\n".join(frame) for frame in FRAMES]
    deliveries = [
        [whole[0], whole[0], whole[1], whole[1], whole[2], whole[2]],
        [whole[1], whole[0], whole[2]],
        [whole[2], whole[1], whole[0]],
        [whole[0], whole[2], whole[0], whole[1], whole[2]],
    ]
    for number in range(3):  # every cut of every frame
        for end in range(len(whole[number])):
            deliveries.append([*whole[:number], whole[number][:end], *whole[number + 1 :]])
    for messages in deliveries:
        d = Driver(at={"w": 5}, live=("w",))
        d.table.write("w", 6, 7, 9, 9, 12)
        d.table.rows["s", "w"] = [
            (t, payload("w", t, 1 if i == 3 else 0)) for i, (t, _) in enumerate(d.table.rows["s", "w"])
        ]
        expected = [("s", "w", token, row) for token, row in d.table.rows["s", "w"]]
        for message in messages:
            decodes(d, message)
        d.send(position("w", 15, 15))  # the heartbeat
        assert d.log == expected, messages
        assert d.at("w") == 15


def decodes(d: Driver, message: bytes) -> None:
    """As a runtime: what does not decode is rejected, and fetched."""
    import orjson

    reader = d.reader
    reader.receive(message, d.now)
    while reader.ready:
        key = min(reader.ready)
        taken = reader.take(*key)
        assert isinstance(taken, RawBatch)
        try:
            for row in taken.payloads:
                orjson.loads(row)
        except ValueError:
            assert not taken.fetched
            reader.progress[taken.stream, taken.writer].reject(taken)
        else:
            d.log += [(*key, *pair) for pair in zip(taken.tokens, taken.payloads, strict=True)]
            reader.done(*key)
    d.run()


CASES = [r1, r2, r3, r3_as_written, r4, r5, r6, r7, r8, r9, r10, r12, r13, r14, r14_with_a_source, r15]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__.upper().replace("_", "-") for case in CASES])
def test_case(case: Callable[[], None]) -> None:
    case()


# R11 is about waiting: tests/asyncio/test_bus.py.


# -- section 9 ------------------------------------------------------------------------------------------------


def announce(writer: str, incarnation: int, *lines: bytes, epoch: str = EPOCH) -> tuple[bytes, ...]:
    return (f"SERVER bus {epoch}".encode(), f"NAME {writer} {incarnation}".encode(), *lines)


def test_rule_9_9_a_page_counts_for_what_it_proves_not_for_what_was_asked() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6)
    d.table.proven = 6  # a replica that lags: 8 exists, and it cannot know
    d.send(position("w", 8, 8))
    assert d.tokens("w") == [6]
    assert d.at("w") == 6
    assert d.state("w") is State.CATCHING_UP
    d.table.write("w", 8)
    d.table.proven = None
    d.later(10)
    assert d.tokens("w") == [6, 8]
    assert d.state("w") is State.LIVE
    assert d.reader.counters.pages_unproven == 1


def test_rule_9_11_a_lower_incarnation_is_ignored() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(*announce("w", 7, position("w", 0, 0)), rdata("w", 1))
    d.send(*announce("w", 6, position("w", 9, 9)), rdata("w", 10))
    assert d.tokens("w") == [1]
    assert d.at("w") == 1
    assert d.reader.counters.old_incarnations == 2


@pytest.mark.parametrize("new", [3, 9], ids=["back", "forward"])
def test_rule_9_11_a_higher_incarnation_is_always_a_reset_in_any_direction(new: int) -> None:
    d = Driver(stream=Followed("s", resettable=True))
    d.table.write("w", 1, 5)
    d.send(*announce("w", 7, position("w", 5, 5)))
    assert d.tokens("w") == [1, 5]
    d.table.rows.clear()
    d.table.write("w", 2, new)
    d.send(*announce("w", 8, position("w", new, new)))
    assert d.notices == [Reset("s", "w", 0)]
    assert d.asked[-1].after == 0
    assert d.asked[-1].incarnation == 8
    assert d.tokens("w") == [1, 5, 2, new]


def test_rule_9_11_a_page_of_another_incarnation_is_not_taken() -> None:
    d = Driver(stream=Followed("s", resettable=True))
    d.answer = False
    d.send(*announce("w", 7, position("w", 5, 5)))
    d.reader.receive_page(d.asked[0], attrs.evolve(d.table.page(d.asked[0]), incarnation=6), d.now)
    assert d.state("w") is State.CATCHING_UP
    assert d.reader.counters.fetches_failed == 1


def test_rule_9_11_a_step_back_within_one_incarnation_is_a_repeated_frame() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(*announce("w", 7, position("w", 0, 0)), rdata("w", 1), rdata("w", 2))
    d.send(*announce("w", 7, position("w", 1, 1)), rdata("w", 2))
    d.send(b"NAME w 7", position("w", 1, 1))
    assert d.notices == []
    assert d.tokens("w") == [1, 2]
    assert d.reader.counters.old_positions == 2


def test_rule_9_13_lines_are_held_in_order_while_catching_up_and_follow_the_same_rules() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7, 8, 9, 10)
    d.answer = False
    d.send(position("w", 7, 7), rdata("w", 8))
    d.send(position("w", 9, 9), rdata("w", 10))  # a second gap among the held lines
    d.send(position("w", 10, 12))
    assert d.log == []
    d.answer = True
    for one in d.asked[:]:
        d.reader.receive_page(one, d.table.page(one), d.now)
    d.run()
    assert d.tokens("w") == [6, 7, 8, 9, 10]
    assert d.at("w") == 12


def test_rule_9_13_on_overflow_the_newest_are_dropped_and_it_stays_unconnected() -> None:
    d = Driver(at={"w": 5}, live=("w",), settings=Settings(held_bytes=600))
    d.table.write("w", *range(6, 20))
    d.answer = False
    d.send(position("w", 7, 7), rdata("w", 8))
    for token in range(9, 20):
        d.send(rdata("w", token))
    assert d.reader.progress["s", "w"].held.size <= 600
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), d.now)
    d.answer = True
    d.run()
    assert d.state("w") is State.UNSYNCED  # not live: what came after the held lines is unknown
    d.send(rdata("w", 20))
    assert 20 not in d.tokens("w")
    d.table.write("w", 20)
    d.send(position("w", 20, 20))
    assert d.tokens("w") == list(range(6, 21))


def test_rule_9_13_overflow_survives_a_second_gap_among_the_held_lines() -> None:
    d = Driver(at={"w": 5}, live=("w",), settings=Settings(held_bytes=500))
    d.table.write("w", *range(6, 12))
    d.answer = False
    d.send(position("w", 6, 6))
    d.send(position("w", 9, 9))
    d.send(rdata("w", "batch", b"x" * 600))  # dropped, and tells nothing of where the writer is
    d.answer = True
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), d.now)
    d.run()
    assert d.tokens("w") == [6, 7, 8, 9]
    assert d.state("w") is State.UNSYNCED
    d.send(rdata("w", 11))
    assert d.tokens("w") == [6, 7, 8, 9]
    d.send(position("w", 11, 11))
    assert d.tokens("w") == list(range(6, 12))


def test_rule_9_14_a_position_clears_a_held_batch() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7)
    d.send(rdata("w", "batch", b"lost"))
    d.send(position("w", 5, 5), rdata("w", 6, b"six"))
    assert d.log == [("s", "w", 6, b"six")]


def test_rule_9_14_a_disconnect_clears_a_held_batch() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.send(rdata("w", "batch", b"lost"))
    d.reader.connected(0.0)
    assert d.state("w") is State.UNSYNCED
    assert d.reader.progress["s", "w"].open == []


def test_sequences_below_a_held_position_are_ignored_and_counted() -> None:
    d = Driver()
    d.send(*announce("w", 1, position("w", 0, 9)))
    d.send(*announce("w", 1, position("w", 4, 4)))
    assert d.at("w") == 9
    assert d.reader.counters.old_positions == 1
    assert d.state("w") is State.LIVE


def test_a_native_writer_can_be_followed_from_an_old_head_a_foreign_one_cannot() -> None:
    native = Driver(at={"w": 15})
    native.send(*announce("w", 1, position("w", 12, 12)))
    native.send(b"NAME w 1", position("w", 12, 12), rdata("w", 16))
    assert native.tokens("w") == [16]
    foreign = Driver(at={"w": 15})
    foreign.table.write("w", 16, 17)
    foreign.send(position("w", 12, 12)).send(rdata("w", 17))
    assert foreign.log == []  # 16 may have been sent before
    foreign.send(position("w", 17, 17))
    assert foreign.tokens("w") == [16, 17]


def named(writer: str, incarnation: int, *lines: bytes) -> tuple[bytes, ...]:
    """A message of a native writer that is no announcement."""
    return (f"NAME {writer} {incarnation}".encode(), *lines)


def test_rule_9_16_what_a_writer_of_another_log_says_is_not_taken_for_positions_in_this_one() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 7, 8)
    d.send(*announce("w", 1, position("w", 9, 9), epoch=OTHER_EPOCH))  # from before a restore
    d.send(*named("w", 1, position("w", 5, 9), rdata("w", 10)))
    assert d.at("w") == 5
    assert d.log == []
    assert d.state("w") is State.UNSYNCED
    assert d.reader.counters.other_logs == 3
    d.send(*announce("w", 2, position("w", 8, 8)))  # its successor, of this log
    d.send(*named("w", 1, position("w", 9, 9)))  # and the former one again
    assert d.tokens("w") == [7, 8]
    assert d.at("w") == 8
    assert d.reader.counters.other_logs == 4


def test_rule_9_16_a_native_writer_counts_from_its_first_announcement() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 6, 7)
    d.send(*named("w", 1, position("w", 5, 5), rdata("w", 6)))
    assert d.log == []
    d.send(*announce("w", 1, position("w", 6, 6)))
    d.send(*named("w", 1, position("w", 6, 6), rdata("w", 7)))
    assert d.tokens("w") == [6, 7]
    assert d.reader.counters.other_logs == 2


def test_rule_9_16_after_an_epoch_change_writers_of_the_new_log_count_and_those_of_the_old_do_not() -> None:
    d = Driver(at={"w": 5, "v": 5})
    d.send(*announce("w", 1, position("w", 5, 5)), *named("v", 1, position("v", 5, 5)))
    d.table.epoch = OTHER_EPOCH
    d.send(*announce("w", 2, position("w", 2, 2), epoch=OTHER_EPOCH))
    d.reader.rebase(OTHER_EPOCH, {})
    d.handle()
    d.table.write("v", 1, 2)  # by its successor
    d.send(*announce("v", 1, position("v", 0, 9)))  # "no row in (0, 9]" was true of the old log
    assert d.at("v") == 0
    d.send(*announce("v", 2, position("v", 2, 2), epoch=OTHER_EPOCH))
    assert d.tokens("v") == [1, 2]


@pytest.mark.parametrize("zombie", [1, 9], ids=["a lower incarnation", "a higher one"])
def test_rule_9_16_what_is_not_believed_is_no_sign_of_life(zombie: int) -> None:
    """Else nobody would look in the table after a writer that died, as long as one of another log goes on talking."""
    settings = Settings()
    d = Driver(at={"w": 5}, settings=settings)
    d.send(*announce("w", zombie, position("w", 9, 9), epoch=OTHER_EPOCH))
    assert d.reader.last_heard == {}
    d.send(*announce("w", 2, position("w", 5, 5)))
    d.now += settings.heartbeat * settings.silent_after_beats + 1
    d.send(*announce("w", zombie, position("w", 9, 9), epoch=OTHER_EPOCH))
    d.send(*named("w", zombie, position("w", 9, 9), rdata("w", 10)))
    assert d.reader.silent(d.now) == ["w"]
    d.send(*named("w", 2, rdata("w", 6)))
    assert d.reader.silent(d.now) == []


def test_rule_9_16_lines_in_another_s_message_count_for_nothing() -> None:
    d = Driver(at={"w": 5})
    d.send(*announce("w", 2, position("w", 5, 5)))
    d.now += 100
    d.send(*announce("v", 1, position("w", 5, 9)))
    assert d.reader.silent(d.now) == ["w"]
    assert d.at("w") == 5
    assert d.reader.counters.unnamed_lines == 1


def test_rule_9_16_streams_without_a_table_have_no_log() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(*announce("w", 1, position("w", 0, 0), epoch=OTHER_EPOCH))
    d.send(*named("w", 1, rdata("w", 1)))
    assert d.tokens("w") == [1]
    assert d.reader.counters.other_logs == 0


# -- the epoch ------------------------------------------------------------------------------------------------


def test_a_refuted_epoch_is_asked_about_again_when_it_is_announced_again() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))  # asked of a replica that has not heard of the restore yet
    d.table.epoch = OTHER_EPOCH
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))
    assert len(d.asked) == 1  # not with every heartbeat
    assert d.reader.next_retry(d.now) == Settings().retry_max
    d.later(Settings().retry_max)
    assert len(d.asked) == 2
    assert d.reader.new_epoch == OTHER_EPOCH


def test_a_refuted_epoch_that_nobody_repeats_is_not_asked_about_again() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))
    assert d.reader.next_retry(d.now) is None
    d.later(Settings().retry_max)
    assert len(d.asked) == 1


def test_the_announced_epoch_is_a_hint_and_a_page_decides() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.send(*announce("w", 1, position("w", 5, 5), epoch=OTHER_EPOCH))
    assert [(a.after, a.upto) for a in d.asked] == [(5, 5)]
    assert d.reader.new_epoch is None
    assert d.state("w") is State.LIVE
    d.send(*announce("w", 1, position("w", 5, 5), epoch=OTHER_EPOCH))
    assert len(d.asked) == 1  # refuted a moment ago, not asked again yet


def test_a_runtime_that_found_another_log_says_so_and_nothing_more_is_fetched() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.reader.new_epoch = OTHER_EPOCH
    d.table.write("w", 6, 7)
    d.send(position("w", 7, 7))
    assert (d.reader.new_epoch, d.tokens("w")) == (OTHER_EPOCH, [])


def test_where_the_log_turned_out_to_be_the_old_one_all_that_was_asked_is_asked_again() -> None:
    """A page of another log was refused, and its question has no answer; then the store is found in the epoch held."""
    d = Driver(at={"w": 5, "v": 3}, live=("w", "v"), settings=Settings(fetches=1))
    d.table.write("w", 6, 7)
    d.table.write("v", 4)
    d.table.epoch = OTHER_EPOCH
    d.send(position("w", 7, 7), position("v", 4, 4))
    assert d.reader.new_epoch == OTHER_EPOCH
    d.table.epoch = EPOCH
    d.reader.keep_epoch(d.now)
    d.run()
    assert (d.tokens("w"), d.tokens("v")) == ([6, 7], [4])
    assert d.state("w") is d.state("v") is State.LIVE


def test_an_epoch_that_the_store_was_not_found_in_is_asked_about_again_when_it_is_announced_again() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.epoch = OTHER_EPOCH
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))
    assert d.reader.new_epoch == OTHER_EPOCH
    d.reader.keep_epoch(d.now)  # asked of a replica that has not heard of the restore yet
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))
    assert d.reader.new_epoch is None  # not at once
    d.later(Settings().retry_max)
    d.send(*announce("w", 1, epoch=OTHER_EPOCH))
    assert d.reader.new_epoch == OTHER_EPOCH


def test_another_epoch_stops_everything_until_rebased() -> None:
    d = Driver(at={"w": 5, "v": 3}, live=("w", "v"))
    d.table.epoch = OTHER_EPOCH
    d.send(*announce("w", 2, position("w", 2, 2), epoch=OTHER_EPOCH))
    assert d.reader.new_epoch == OTHER_EPOCH
    d.answer = False
    d.send(position("v", 9, 9))
    assert len(d.asked) == 1  # no fetch while the log is in doubt
    d.answer = True
    d.table.write("w", 1, 2)
    d.reader.rebase(OTHER_EPOCH, {("s", "u"): 4})
    d.send(*announce("w", 2, position("w", 2, 2), epoch=OTHER_EPOCH))
    assert d.tokens("w") == [1, 2]
    assert set(d.notices) == {Reset("s", "w", 0), Reset("s", "v", 0), Reset("s", "u", 4)}
    assert d.reader.statistics()["epoch_changes"] == 1


def test_a_page_of_another_epoch_is_not_delivered() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6)
    d.table.epoch = OTHER_EPOCH
    d.send(position("w", 6, 6))
    assert d.log == []
    assert d.reader.new_epoch == OTHER_EPOCH
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), d.now)
    assert d.reader.counters.epoch_changes == 1


def test_the_first_page_gives_a_reader_without_an_epoch_its_epoch() -> None:
    d = Driver(at={"w": 5})
    d.reader.epoch = None
    d.send(*announce("w", 1, position("w", 6, 6), epoch=OTHER_EPOCH))
    assert d.reader.epoch == EPOCH


def test_an_epoch_check_that_fails_is_repeated_after_a_pause() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.fail = 1
    d.send(*announce("w", 1, position("w", 5, 5), epoch=OTHER_EPOCH))
    assert len(d.asked) == 1
    assert d.reader.next_retry(d.now) == Settings().retry_max
    d.later(6)
    assert len(d.asked) == 2


def test_an_epoch_that_concerns_nothing_followed_is_not_checked() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(*announce("w", 1, position("w", 5, 5), epoch=OTHER_EPOCH))
    assert d.asked == []


def test_a_page_of_another_epoch_while_one_is_known_already_is_dropped() -> None:
    d = Driver(at={"w": 5, "v": 5}, live=("w", "v"))
    d.answer = False
    d.send(position("w", 6, 6), position("v", 6, 6))
    d.table.write("v", 6)
    good = d.table.page(d.asked[1])
    d.table.epoch = OTHER_EPOCH
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), 0.0)
    d.reader.receive_page(d.asked[1], good, 0.0)
    d.handle()
    assert d.log == []


# -- catch-up -------------------------------------------------------------------------------------------------


def test_while_one_catches_up_the_others_flow() -> None:
    d = Driver(at={"a": 5, "b": 5}, live=("a", "b"))
    d.answer = False
    d.send(position("a", 9, 9)).send(position("b", 5, 5), rdata("b", 6))
    assert d.tokens("b") == [6]
    assert d.state("a") is State.CATCHING_UP


def test_a_catch_up_that_keeps_failing_is_stale_and_still_tries() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 6)
    d.fail = 5
    d.send(position("w", 6, 6))
    for _ in range(5):
        assert d.reader.next_retry(d.now) is not None
        d.later(10)
    assert d.tokens("w") == [6]
    assert d.state("w") is State.LIVE
    d.reader.progress["s", "w"].state = State.LIVE
    d.fail = 3
    d.table.write("w", 9)
    d.send(position("w", 9, 9)).later(10).later(10)
    assert d.state("w") is State.STALE
    assert d.reader.statistics()["states"] == {"s": {"w": "stale"}}
    assert d.reader.statistics()["trouble"] == {"s w": "OSError('away')"}
    d.later(10)
    assert d.state("w") is State.LIVE
    assert d.reader.statistics()["trouble"] == {}


def test_pages_are_asked_for_in_turn_and_at_most_so_many_at_a_time() -> None:
    names = [f"w{i}" for i in range(6)]
    d = Driver(at=dict.fromkeys(names, 0), table=Table(page_rows=1), settings=Settings(fetches=2))
    for name in names:
        d.table.write(name, 1, 2, 3)
    d.answer = False
    d.send(*[position(name, 3, 3) for name in names])
    assert len(d.asked) == 2
    d.answer = True
    order = []
    asked = d.asked[:]
    while asked:
        order += [one.writer for one in asked]
        for one in asked:
            d.reader.receive_page(one, d.table.page(one), 0.0)
        d.handle()
        asked = d.reader.fetches(0.0)
    assert order[:6] == names  # nobody waits for the whole of another's catch-up
    assert all(d.tokens(name) == [1, 2, 3] for name in names)


def test_a_page_that_comes_after_a_disconnect_is_ignored() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6)
    d.answer = False
    d.send(position("w", 6, 6))
    d.reader.disconnected()
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), 0.0)
    d.reader.fetch_failed(d.asked[0], OSError(), 0.0)
    assert d.reader.counters.pages_ignored == 2
    assert d.at("w") == 5
    d.answer = True
    d.send(position("w", 6, 6))
    assert d.tokens("w") == [6]


def test_a_position_learned_from_the_table_is_fetched_without_the_link() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 6, 7)
    d.reader.learned("s", "w", 7)
    d.run()
    assert d.tokens("w") == [6, 7]
    assert d.state("w") is State.UNSYNCED  # nothing was heard on the link yet
    d.answer = False
    d.reader.learned("s", "w", 9)
    d.run()
    d.reader.learned("s", "w", 12)
    d.reader.learned("s", "w", 11)
    assert d.reader.progress["s", "w"].target == 12
    d.reader.learned("s", "new", 3)
    assert d.state("new") is State.CATCHING_UP


def test_a_pruned_range_is_skipped_only_when_told_so_and_reported() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.answer = False
    d.table.write("w", 9, 10)
    d.send(position("w", 10, 10))
    d.reader.progress["s", "w"].skip(8)
    d.answer = True
    d.run()
    assert d.notices == [Missed("s", "w", 5, 8)]
    assert d.tokens("w") == [9, 10]
    d.reader.progress["s", "w"].skip(10)
    d.reader.learned("s", "w", 20)
    d.reader.progress["s", "w"].skip(20)
    d.run()
    assert d.state("w") is State.LIVE
    assert d.at("w") == 20


def test_rows_that_do_not_decode_are_fetched_again() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7)
    d.reader.receive(position("w", 5, 5) + b"\n" + rdata("w", 6, b'["cut'), 0.0)
    d.reader.receive(position("w", 6, 6) + b"\n" + rdata("w", 7), 0.0)
    taken = d.reader.take("s", "w")
    assert isinstance(taken, RawBatch)
    assert d.reader.in_hand(("s", "w"), taken)
    d.reader.progress["s", "w"].reject(taken)
    assert not d.reader.in_hand(("s", "w"), taken)
    d.reader.progress["s", "w"].reject(taken)  # handled no more: a second time is nothing
    d.run()
    assert d.tokens("w") == [6, 7]
    assert d.reader.counters.rejected == 1


def test_rows_that_do_not_decode_while_a_catch_up_runs() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7, 8)
    d.answer = False
    d.reader.receive(position("w", 5, 5) + b"\n" + rdata("w", 6, b'["cut'), 0.0)
    taken = d.reader.take("s", "w")
    assert isinstance(taken, RawBatch)
    d.reader.receive(position("w", 8, 8), 0.0)
    d.reader.fetches(0.0)
    d.reader.progress[taken.stream, taken.writer].reject(taken)
    d.answer = True
    d.run()
    assert d.tokens("w") == [6, 7, 8]


def test_a_stream_without_a_source_says_what_it_missed() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.send(position("w", 0, 0)).send(rdata("w", 1)).send(position("w", 4, 4), rdata("w", 5))
    assert d.tokens("w") == [1, 5]
    assert d.notices == [Missed("s", "w", 1, 4)]
    assert d.reader.statistics()["needed_catch_up"] == {"s": ["w"]}


def test_a_page_that_proves_nothing_is_asked_for_again_after_a_pause() -> None:
    for limited in (False, True):
        d = Driver(at={"w": 5}, live=("w",))
        d.answer = False
        d.send(position("w", 9, 9))
        d.reader.receive_page(d.asked[0], UpdatesPage("s", "w", 5, 5, [], [], limited, EPOCH), 0.0)
        assert d.reader.fetches(0.0) == []
        assert d.reader.next_retry(0.0) is not None


def test_a_stale_one_that_is_skipped_to_its_end_is_live() -> None:
    d = Driver(at={"w": 5}, live=("w",), settings=Settings(stale_after=1))
    d.fail = 1
    d.send(position("w", 9, 9))
    assert d.state("w") is State.STALE
    d.reader.progress["s", "w"].skip(9)
    assert d.state("w") is State.LIVE


def test_a_reset_while_a_batch_is_being_handled() -> None:
    d = Driver(stream=Followed("s", resettable=True, fetchable=False))
    d.reader.receive(b"NAME w 1\n" + position("w", 0, 0) + b"\n" + rdata("w", 1), 0.0)
    assert d.reader.take("s", "w") is not None
    d.reader.receive(b"NAME w 2\n" + position("w", 0, 0) + b"\n" + rdata("w", 1, b"again"), 0.0)
    d.reader.done("s", "w")  # of the former life: it must not count in the new one
    assert d.reader.delivered("s", "w") == 0
    d.handle()
    assert d.notices == [Reset("s", "w", 0)]
    assert d.log == [("s", "w", 1, b"again")]


@pytest.mark.parametrize("happens", ["a higher incarnation", "another log"])
def test_what_was_handled_before_a_reset_is_no_position_of_the_new_life(happens: str) -> None:
    d = Driver(stream=Followed("s", resettable=happens == "a higher incarnation", fetchable=True))
    d.table.write("w", 1, 5)
    d.send(*announce("w", 1, position("w", 5, 5)))
    assert d.reader.delivered("s", "w") == 5
    if happens == "another log":
        d.reader.rebase(OTHER_EPOCH, {("s", "w"): 2})
    else:
        d.reader.receive(b"\n".join(announce("w", 2, position("w", 9, 9))), d.now)
    now = 2 if happens == "another log" else 0
    assert list(d.reader.ready) == [("s", "w")]  # the handler has not been told yet
    assert d.reader.delivered("s", "w") == now
    assert d.reader.positions() == {"s": {"w": now}}
    d.handle()
    assert d.notices == [Reset("s", "w", now)]


@pytest.mark.parametrize("emptied", ["stopped", "moved", "rejected"])
def test_a_queue_that_was_emptied_has_nothing_to_take(emptied: str) -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.reader.receive(rdata("w", 6), d.now)
    batch = d.reader.take("s", "w")
    assert isinstance(batch, RawBatch)
    d.reader.receive(rdata("w", 7), d.now)
    assert list(d.reader.ready) == [("s", "w")]
    if emptied == "stopped":
        d.reader.progress["s", "w"].stop()
    elif emptied == "moved":
        d.reader.progress["s", "w"].go_on_from(7)
    else:
        d.reader.progress[batch.stream, batch.writer].reject(batch)
    assert d.reader.ready == {}
    assert d.reader.take("s", "w") is None
    assert d.reader.intake.queue_bytes == 0


@pytest.mark.parametrize("emptied", ["stopped", "moved", "reset again"])
def test_a_reset_that_nobody_was_told_of_outlives_what_empties_the_queue(emptied: str) -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6)
    d.reader.receive(rdata("w", 6), d.now)
    assert isinstance(d.reader.take("s", "w"), RawBatch)  # at work when the log changes
    d.reader.rebase(OTHER_EPOCH, {})
    if emptied == "stopped":
        d.reader.progress["s", "w"].stop()
        d.reader.progress["s", "w"].resume()
    elif emptied == "moved":
        d.reader.progress["s", "w"].go_on_from(3)
    else:  # the last of several resets will do
        d.reader.rebase(EPOCH, {("s", "w"): 2})
    assert list(d.reader.ready) == [("s", "w")]
    d.handle()
    assert d.notices == [Reset("s", "w", 2 if emptied == "reset again" else 0)]
    assert d.at("w") == {"moved": 3, "reset again": 2}.get(emptied, 0)


def test_a_reset_that_came_while_its_stream_was_stopped_is_told_of_when_it_goes_on() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.reader.progress["s", "w"].stop()
    d.reader.rebase(OTHER_EPOCH, {})
    d.reader.ready.clear()  # as for whoever hands out nothing of what is stopped
    d.reader.progress["s", "w"].resume()
    d.handle()
    assert d.notices == [Reset("s", "w", 0)]


def test_one_that_is_moved_goes_on_to_what_it_was_after() -> None:
    d = Driver(at={"w": 5})
    d.answer = False
    d.reader.learned("s", "w", 100)  # which nobody tells again, of the own name
    d.run()
    d.reader.progress["s", "w"].go_on_from(50)
    d.run()
    assert [(asked.after, asked.upto) for asked in d.asked] == [(5, 100), (50, 100)]


def test_a_new_log_leaves_in_memory_streams_alone() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.reader.follow(Followed("t", resettable=True, fetchable=False))
    d.send(position("w", 4, 4, stream="t"))
    d.reader.rebase(OTHER_EPOCH, {})
    d.handle()
    assert d.reader.positions() == {"s": {"w": 0}, "t": {"w": 4}}


def test_one_fact_larger_than_a_batch_stays_whole() -> None:
    d = Driver(at={"w": 0}, live=("w",), settings=Settings(handler_batch_rows=2))
    d.reader.receive(b"\n".join([rdata("w", "batch")] * 4 + [rdata("w", 1)]), 0.0)
    taken = d.reader.take("s", "w")
    assert isinstance(taken, RawBatch)
    assert list(taken.tokens) == [1] * 5


def test_a_target_that_moved_while_a_page_was_fetched_is_fetched_at_once() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 9)
    d.answer = False
    d.reader.learned("s", "w", 6)
    d.run()
    d.reader.learned("s", "w", 9)
    d.answer = True
    d.reader.receive_page(d.asked[0], d.table.page(d.asked[0]), 0.0)
    d.run()
    assert d.tokens("w") == [6, 9]


# -- bounds ---------------------------------------------------------------------------------------------------


def test_a_full_receive_queue_drops_to_catch_up_and_loses_nothing() -> None:
    settings = Settings(receive_queue_bytes=2_000, page_rows=10)
    d = Driver(at={"w": 0}, live=("w",), settings=settings, table=Table(page_rows=10))
    reader = d.reader
    for token in range(1, 201):  # nobody handles
        d.table.write("w", token)
        reader.receive(position("w", token - 1, token - 1) + b"\n" + rdata("w", token), 0.0)
        d.asked += reader.fetches(0.0)
    assert reader.intake.queue_bytes < 2_200
    assert d.asked == []  # no fetch while there is no room
    assert reader.counters.overflows >= 1
    d.run()
    d.send(position("w", 200, 200))
    assert d.tokens("w") == list(range(1, 201))
    assert reader.intake.queue_bytes == 0
    assert reader.intake.queue_bytes_peak < 2_200


def test_an_endless_batch_is_bounded() -> None:
    d = Driver(at={"w": 5}, live=("w",), settings=Settings(held_bytes=1_000))
    for _ in range(100):
        d.send(rdata("w", "batch", b"x" * 50))
    assert d.reader.progress["s", "w"].open_size <= 1_000
    assert d.state("w") is State.UNSYNCED


def test_repeated_positions_are_held_once() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.answer = False
    d.send(position("w", 9, 9))
    for _ in range(1000):
        d.send(position("w", 9, 9))
    assert len(d.reader.progress["s", "w"].held.lines) == 1


def test_large_batches_are_cut_at_fact_boundaries_and_small_ones_joined() -> None:
    d = Driver(at={"w": 0}, live=("w",), settings=Settings(handler_batch_rows=4))
    reader = d.reader
    reader.receive(b"\n".join(rdata("w", token) for token in (1, 2, 3)), 0.0)
    reader.receive(b"\n".join([rdata("w", "batch"), rdata("w", "batch"), rdata("w", 4), rdata("w", 5)]), 0.0)
    big = [rdata("w", "batch") for _ in range(9)]
    reader.receive(b"\n".join([*big, rdata("w", 6), rdata("w", 7)]), 0.0)
    reader.receive(position("w", 7, 9), 0.0)
    sizes = []
    while reader.ready:
        taken = reader.take("s", "w")
        assert isinstance(taken, RawBatch)
        sizes.append((list(taken.tokens), taken.after, taken.position))
        reader.done("s", "w")
    assert sizes == [
        ([1, 2, 3], 0, 3),
        ([4, 4, 4, 5], 3, 5),
        ([6] * 10, 5, 6),
        ([7], 6, 9),
    ]
    assert reader.intake.queue_bytes == 0


def test_put_back_gives_the_same_rows_again_one_fact_at_a_time() -> None:
    d = Driver(at={"w": 0}, live=("w",))
    d.reader.receive(b"\n".join(rdata("w", token) for token in (1, 2, 3)), 0.0)
    assert d.reader.take("s", "w") is not None
    assert d.reader.take("s", "w") is None  # one at a time
    d.reader.put_back("s", "w")
    tokens = []
    for _ in range(3):
        taken = d.reader.take("s", "w", 1)
        assert isinstance(taken, RawBatch)
        tokens.append(list(taken.tokens))
        d.reader.done("s", "w")
    assert tokens == [[1], [2], [3]]
    d.reader.put_back("s", "w")  # nothing taken: nothing put back
    assert d.reader.take("s", "w") is None


def test_a_batch_is_in_hand_until_it_is_done_or_void() -> None:
    d = Driver(at={"w": 0}, live=("w",))
    key = ("s", "w")
    d.reader.receive(b"\n".join(rdata("w", token) for token in (1, 2)), 0.0)
    first = d.reader.take(*key, 1)
    assert isinstance(first, RawBatch)
    assert d.reader.in_hand(key, first)
    d.reader.done(*key)
    assert not d.reader.in_hand(key, first)
    second = d.reader.take(*key)
    assert isinstance(second, RawBatch)
    assert d.reader.in_hand(key, second)
    d.reader.rebase(OTHER_EPOCH, {})
    assert not d.reader.in_hand(key, second)  # of a log that is gone


def test_a_runtime_that_read_the_log_says_that_it_is_another() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.reader.epoch = EPOCH
    d.reader.new_epoch = OTHER_EPOCH
    assert d.reader.new_epoch == OTHER_EPOCH
    d.reader.rebase(OTHER_EPOCH, {("s", "w"): 3})
    assert (d.reader.epoch, d.reader.new_epoch) == (OTHER_EPOCH, None)
    assert d.reader.positions() == {"s": {"w": 3}}


@pytest.mark.parametrize("lossy", ["each head shows a gap", "gaps and steps in turns", "the queue is full"])
def test_losses_while_a_handler_hangs_are_one_notice(lossy: str) -> None:
    settings = Settings(receive_queue_bytes=0 if lossy == "the queue is full" else 2**20)
    reader = Reader([Followed("s", resettable=True, fetchable=False)], settings=settings, jitter=lambda: 0.0)
    reader.connected(0.0)
    reader.receive(b"NAME w 1\nPOSITION s w 0 0\nRDATA s w 1 [1]", 0.0)
    batch = reader.take("s", "w")  # its handler does not return
    for at in range(2, 10_000, 2):
        if lossy == "the queue is full":
            lines = b"POSITION s w %d %d\nRDATA s w %d [1]" % (at - 1, at - 1, at + 1)
        elif lossy == "each head shows a gap":
            lines = b"POSITION s w %d %d" % (at + 1, at + 1)
        else:
            lines = b"POSITION s w %d %d\nPOSITION s w %d %d" % (at, at, at, at + 1)
        reader.receive(b"NAME w 1\n" + lines, 0.0)
    reader.receive(b"NAME w 1\nPOSITION s w 9999 9999", 0.0)
    assert reader.done("s", "w") == getattr(batch, "position", None) == 1
    missed = reader.take("s", "w")
    assert (getattr(missed, "after", None), getattr(missed, "certain", None)) == (1, True)
    assert reader.done("s", "w") == 9_999
    assert reader.take("s", "w") is None


def test_losses_with_a_row_or_a_reset_between_them_are_told_in_their_turn() -> None:
    reader = Reader([Followed("s", resettable=True, fetchable=False)], jitter=lambda: 0.0)
    reader.connected(0.0)
    frames = [(1, b"POSITION s w 5 5\nRDATA s w 6 [1]\nPOSITION s w 6 7"), (1, b"POSITION s w 9 9")]
    frames += [(2, b"POSITION s w 0 3"), (2, b"POSITION s w 3 4\nPOSITION s w 6 6")]
    told: list[object] = []
    for number, (incarnation, lines) in enumerate(frames):
        reader.receive(b"NAME w %d\n" % incarnation + lines, 0.0)
        while number in (1, 3) and (found := reader.take("s", "w")) is not None:
            told.append(found if not isinstance(found, RawBatch) else list(found.tokens))
            reader.done("s", "w")
    assert told == [Missed("s", "w", 0, 5), [6], Missed("s", "w", 7, 9), Reset("s", "w", 0), Missed("s", "w", 4, 6)]


def test_a_position_behind_a_batch_being_handled_waits_for_it() -> None:
    d = Driver(at={"w": 0}, live=("w",))
    d.reader.receive(rdata("w", 1), 0.0)
    d.reader.take("s", "w")
    d.reader.receive(position("w", 1, 5), 0.0)
    assert d.reader.delivered("s", "w") == 0
    assert d.reader.done("s", "w") == 5


# -- stopping and going on ------------------------------------------------------------------------------------


def test_a_stopped_one_takes_in_nothing_until_it_is_resumed() -> None:
    d = Driver(at={"w": 5, "v": 5}, live=("w", "v"))
    d.table.write("w", 6, 7)
    d.reader.receive(position("w", 5, 5) + b"\n" + rdata("w", 6), 0.0)
    d.reader.take("s", "w")
    d.reader.progress["s", "w"].stop()
    d.send(rdata("w", 7)).send(position("w", 7, 7)).send(rdata("v", 6))
    d.reader.learned("s", "w", 7)
    d.reader.connected(0.0)
    d.reader.progress["s", "w"].stop()
    assert d.state("w") is State.STOPPED
    assert d.at("w") == 5
    assert d.tokens("v") == [6]
    d.reader.progress["s", "w"].resume()
    d.reader.progress["s", "w"].resume()
    d.send(position("w", 7, 7))
    assert d.tokens("w") == [6, 7]


def test_moving_to_a_saved_position_forth_and_back() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", *range(6, 11))
    d.send(position("w", 5, 5), rdata("w", 6), rdata("w", 7))
    d.reader.progress["s", "w"].go_on_from(5)
    d.run()
    assert d.tokens("w") == [6, 7, 6, 7]
    d.reader.progress["s", "w"].go_on_from(9)
    d.run()
    d.send(position("w", 10, 10))
    assert d.tokens("w") == [6, 7, 6, 7, 10]


# -- the rest -------------------------------------------------------------------------------------------------


def test_lines_nobody_asked_for_are_counted_and_ignored() -> None:
    d = Driver(at={"w": 5}, own=["me"], live=("w",))
    d.send(rdata("w", 6, stream="unknown"))
    d.send(rdata("me", 6), position("me", 7, 7), position("x", 1, 1, stream="unknown"))
    for junk in (b"", b"123", b"\xff\xfe", b"RDATA", b"RDATA s w x [1]", b"NOSUCH thing", b"POSITION s w 5 4"):
        d.send(junk)
    counters = d.reader.counters
    assert counters.rows_unregistered == 1
    assert counters.parse_errors >= 4
    assert counters.unknown_lines == 1
    assert len(d.reader.errors) == counters.parse_errors + counters.unknown_lines
    assert ("s", "me") not in d.reader.progress
    assert d.at("w") == 5


def test_a_message_over_the_bound_is_dropped_and_its_rows_are_fetched() -> None:
    d = Driver(at={"w": 5}, live=("w",), settings=Settings(message_bytes=2_000))
    d.table.write("w", 6)
    d.send(position("w", 5, 5), rdata("w", 6, b'"' + b"x" * 4_000 + b'"'))
    d.send(position("w", 6, 6))
    assert d.log == [("s", "w", 6, payload("w", 6))]


def test_other_commands_are_handed_out() -> None:
    d = Driver()
    d.send(b"REPLICATE ", b"NAME somebody", *announce("w", 3))
    assert d.reader.commands == [Replicate(), Name("somebody"), Server("bus", EPOCH), Name("w", 3)]


def test_silent_writers_are_told() -> None:
    d = Driver(own=["me"])
    d.send(*announce("w", 1, position("w", 0, 0)))
    d.send(*announce("me", 1))
    assert d.reader.silent(10.0) == []
    assert d.reader.silent(10.1) == ["w"]
    d.reader.connected(5.0)
    assert d.reader.silent(10.1) == []
    d.now = 9.0
    d.send(b"NAME w 1", position("w", 0, 0))
    assert d.reader.silent(18.0) == []


def test_who_was_silent_before_a_reconnect_is_so_after_it() -> None:
    """A reader that hears nobody reconnects: that must not start the silence of the dead anew, each time."""
    d = Driver()
    d.send(*announce("dead", 1, position("dead", 0, 0)))
    d.now = 6.0
    d.send(*announce("alive", 1, position("alive", 0, 0)))
    d.reader.connected(11.0)
    assert d.reader.silent(12.0) == ["dead"]
    d.now = 12.0
    d.send(b"NAME dead 1", position("dead", 0, 0))
    assert d.reader.silent(12.0) == []


def test_undeclared_streams_are_followed_as_resettable() -> None:
    d = Driver(undeclared=True)
    d.send(position("w", 4, 4, stream="new"))
    assert d.reader.positions() == {"new": {"w": 4}}
    assert d.reader.delivered("new", "w") == 4
    assert d.reader.delivered("new", "nobody") == 0


def test_noise_of_many_names_is_bounded_counted_and_told() -> None:
    d = Driver(at={"w": 5}, live=("w",), undeclared=True, settings=Settings(followed=3))
    for number in range(10):
        d.send(b"NAME n%d 1" % number, position(f"n{number}", 0, 0), position("w", 0, 0, stream=f"t{number}"))
    assert len(d.reader.progress) == 3
    assert len(d.reader.last_heard) == 3
    assert len(d.reader.followed) <= 3
    assert d.reader.counters.writers_refused == 18
    assert "raise Settings.followed" in str(d.reader.errors[0])
    d.send(rdata("w", 6))
    assert d.tokens("w") == [6]
    d.table.write("n9", 1)
    d.reader.learned("s", "n9", 1)  # the table knows it: it is followed all the same
    d.run()
    assert d.tokens("n9") == [1]


def test_streams_can_be_followed_later() -> None:
    d = Driver()
    d.send(position("w", 4, 4, stream="late"))
    d.reader.follow(Followed("late", fetchable=False, resettable=True))
    assert set(d.reader.followed) == {"s", "late"}
    d.send(position("w", 5, 5, stream="late"))
    assert d.reader.positions() == {"late": {"w": 5}}


# -- bootstrap ------------------------------------------------------------------------------------------------


def bootstrapping(*, at: int = 5, **options: object) -> Driver:
    """One writer at ``at``, live, when a bootstrap begins; the table holds what is not sent yet."""
    d = Driver(at={"w": at}, live=("w",), **options)
    d.table.write("w", *range(at + 1, at + 21))
    d.reader.bootstrap("s")
    assert d.state("w") is State.BOOTSTRAPPING
    assert list(d.reader.bootstrapping) == ["s"]
    return d


def test_rule_9_13_while_a_snapshot_loads_all_lines_are_held_and_follow_it_in_order() -> None:
    d = bootstrapping()
    d.send(*announce("w", 1, position("w", 5, 5), rdata("w", 6)))
    d.send(b"NAME w 1", position("w", 6, 6), rdata("w", 7), rdata("w", 8))
    d.send(b"NAME w 1", position("w", 9, 9), rdata("w", 10))  # 9 was lost
    d.send(rdata("late", 4)).send(position("late", 4, 4), rdata("late", 11))  # heard for the first time
    assert (d.log, d.asked) == ([], [])
    assert d.state("late") is State.BOOTSTRAPPING
    assert not d.reader.drained("s")
    d.table.write("late", 3, 4, 11)
    d.reader.bootstrapped("s", {"w": 7})
    assert d.reader.delivered("s", "w") == 7
    d.run()
    assert d.tokens("w") == [8, 9, 10]
    assert d.tokens("late") == [3, 4, 11]
    assert [(one.writer, one.after, one.upto) for one in d.asked] == [("w", 8, 9), ("late", 0, 4)]
    assert d.reader.drained("s")
    assert d.state("w") is d.state("late") is State.LIVE
    assert list(d.reader.bootstrapping) == []


def test_a_bootstrap_drops_what_was_taken_in_and_not_handled() -> None:
    d = bootstrapping()
    d.reader.bootstrapped("s", {"w": 5})
    d.reader.receive(position("w", 5, 5) + b"\n" + rdata("w", 6) + b"\n" + rdata("w", 7), d.now)
    taken = d.reader.take("s", "w", 1)
    assert isinstance(taken, RawBatch)
    d.reader.bootstrap("s")
    d.reader.bootstrap("s")  # once is enough
    assert not d.reader.ready
    assert d.reader.intake.queue_bytes == 0
    assert d.reader.done("s", "w") == 5  # the handler was at work: what it did is void
    d.reader.bootstrapped("s", {"w": 6})
    d.run()
    assert d.tokens("w") == [7]  # received before, so known to be due


def test_a_snapshot_older_than_what_was_handled_brings_the_rows_behind_it_once_more() -> None:
    d = bootstrapping(at=15)
    d.table.write("w", *range(1, 16))
    d.reader.bootstrapped("s", {"w": 12})
    d.run()
    assert d.tokens("w") == [13, 14, 15]
    assert d.reader.drained("s")


def test_writers_of_the_snapshot_that_nobody_heard_of_are_where_it_says() -> None:
    d = bootstrapping()
    d.reader.bootstrapped("s", {"w": 5, "dead": 3})
    assert d.at("dead") == 3
    assert d.state("dead") is State.UNSYNCED


def test_a_lost_link_costs_what_is_held_and_not_the_state() -> None:
    d = bootstrapping()
    d.send(position("w", 5, 5), rdata("w", 6))
    held = d.reader.intake.buffer_bytes
    assert 0 < held == d.reader.intake.buffer_bytes_peak
    d.reader.disconnected()
    assert d.state("w") is State.BOOTSTRAPPING
    assert d.reader.intake.buffer_bytes == 0
    d.reader.connected(d.now)
    d.send(rdata("w", 9))  # unknown what came before it
    assert d.reader.intake.buffer_bytes == 0
    d.reader.bootstrapped("s", {"w": 5})
    d.run()
    assert d.tokens("w") == [6]  # known to be due, though its writer may never be heard again
    assert d.state("w") is State.UNSYNCED
    d.send(position("w", 9, 9))
    assert d.tokens("w") == [6, 7, 8, 9]
    assert d.reader.statistics()["buffer_bytes_peak"] == held


def test_the_buffer_of_all_streams_together_is_bounded_and_what_has_no_room_is_fetched() -> None:
    limit = 1_500
    reader = Reader([Followed("s"), Followed("t")], settings=Settings(full_sync_buffer_limit=limit), epoch=EPOCH)
    d = Driver()
    d.reader = reader
    for stream in ("s", "t"):
        reader.start_at(stream, "w", 0)
        reader.bootstrap(stream)
        d.table.write("w", *range(1, 21), stream=stream)
    for token in range(1, 21):
        for stream in ("s", "t"):
            d.send(position("w", token - 1, token - 1, stream), rdata("w", token, stream=stream))
            assert reader.intake.buffer_bytes <= limit
    assert reader.intake.buffer_bytes_peak > limit - 400
    assert reader.counters.overflows == 2
    reader.bootstrapped("s", {"w": 0})
    d.run()
    assert not reader.drained("t")
    assert d.tokens("w") == list(range(1, 21))
    assert reader.drained("s")
    assert d.state("w") is State.UNSYNCED  # what came behind the dropped lines is unknown
    reader.bootstrapped("t", {"w": 10})
    d.run()
    assert [token for stream, _, token, _ in d.log if stream == "t"] == list(range(11, 21))
    assert reader.intake.buffer_bytes == 0
    assert {one.stream for one in d.asked} == {"s", "t"}


def test_a_snapshot_that_is_further_than_the_lines_held_makes_them_duplicates() -> None:
    d = bootstrapping()
    d.send(position("w", 5, 5), rdata("w", 6), rdata("w", 7))
    d.reader.bootstrapped("s", {"w": 20})
    d.run()
    assert (d.tokens("w"), d.asked, d.at("w")) == ([], [], 20)
    assert d.reader.drained("s")


def test_held_lines_wait_for_room_and_later_ones_behind_them() -> None:
    d = bootstrapping(settings=Settings(receive_queue_bytes=1_000))
    for token in range(6, 26):
        d.send(position("w", token - 1, token - 1), rdata("w", token))
    d.reader.bootstrapped("s", {"w": 5})
    d.asked += d.reader.fetches(d.now)
    assert d.reader.intake.queue_bytes < 1_200
    assert d.reader.intake.buffer_bytes
    assert d.state("w") is State.LIVE
    d.table.write("w", 26, 27)
    d.reader.receive(position("w", 25, 25) + b"\n" + rdata("w", 26), d.now)
    d.reader.learned("s", "w", 27)  # of a writer that is not heard any more
    d.asked += d.reader.fetches(d.now)
    assert d.asked == []
    assert not d.reader.drained("s")
    d.run()
    assert d.tokens("w") == list(range(6, 28))
    assert [(one.after, one.upto) for one in d.asked] == [(26, 27)]
    assert d.reader.drained("s")
    assert d.reader.intake.buffer_bytes == 0


def test_held_lines_do_not_wait_for_a_queue_that_is_full_of_others() -> None:
    d = bootstrapping(settings=Settings(receive_queue_bytes=1_000))
    d.send(position("w", 5, 5), rdata("w", 6), rdata("w", 7))
    d.reader.follow(Followed("t"))
    d.reader.receive(position("slow", 0, 0, "t") + b"\n" + rdata("slow", 1, b"x" * 2_000, "t"), d.now)
    d.reader.bootstrapped("s", {"w": 5})
    (asked,) = d.reader.fetches(d.now)  # they go the way of every line that has no room
    d.reader.receive_page(asked, d.table.page(asked), d.now)
    assert list(d.reader.ready) == [("t", "slow"), ("s", "w")]
    d.run()
    assert d.tokens("w") == [6, 7]


def test_a_link_lost_while_draining_ends_in_catch_up() -> None:
    d = bootstrapping(settings=Settings(receive_queue_bytes=1_000))
    for token in range(6, 26):
        d.send(position("w", token - 1, token - 1), rdata("w", token))
    d.reader.bootstrapped("s", {"w": 5})
    d.asked += d.reader.fetches(d.now)
    d.reader.connected(d.now)
    assert d.reader.intake.buffer_bytes == 0
    d.run()
    assert d.tokens("w") != list(range(6, 26))
    assert not d.reader.drained("s")  # lines were held, and are due
    d.send(position("w", 25, 25))
    assert d.tokens("w") == list(range(6, 26))
    assert d.reader.drained("s")


@pytest.mark.parametrize("then", ["goes on", "is over", "begins anew"])
def test_one_that_is_stopped_while_it_bootstraps_is_stopped_after_it(then: str) -> None:
    d = bootstrapping()
    d.send(position("w", 5, 5), rdata("w", 6))
    d.reader.progress["s", "w"].stop()
    assert d.state("w") is State.BOOTSTRAPPING
    if then == "goes on":
        d.reader.progress["s", "w"].resume()
        d.reader.bootstrapped("s", {"w": 5})
        d.run()
        assert d.tokens("w") == [6]
        return
    d.reader.bootstrapped("s", {"w": 5})
    assert d.state("w") is State.STOPPED
    assert d.reader.drained("s")  # of those that are not stopped
    if then == "is over":
        d.reader.progress["s", "w"].resume()
        d.run()
        assert d.tokens("w") == [6]
    else:
        d.reader.bootstrap("s")
        d.reader.bootstrapped("s", {"w": 5})
        d.run()
        assert d.tokens("w") == [6]


def test_rows_that_are_pruned_while_a_snapshot_loads_are_not_missed() -> None:
    d = bootstrapping()
    d.send(position("w", 7, 7), rdata("w", 8))
    d.reader.progress["s", "w"].skip(9)  # the answer to a page asked before
    d.reader.learned("s", "w", 9)
    d.reader.bootstrapped("s", {"w": 5})
    d.run()
    assert d.tokens("w") == [6, 7, 8, 9]
    assert d.notices == []


def test_another_log_while_a_snapshot_loads_voids_what_is_held() -> None:
    d = bootstrapping()
    d.send(position("w", 5, 5), rdata("w", 6))
    d.reader.doubt(OTHER_EPOCH)
    d.table.epoch = OTHER_EPOCH
    d.run()
    assert d.asked[-1].after == 5
    assert d.reader.new_epoch == OTHER_EPOCH
    d.reader.rebase(OTHER_EPOCH, {("s", "w"): 2})
    assert d.state("w") is State.BOOTSTRAPPING
    assert d.reader.intake.buffer_bytes == 0
    d.run()
    assert d.notices == [Reset("s", "w", 2)]
    d.reader.bootstrapped("s", {"w": 3})
    d.run()
    assert d.tokens("w") == []
    assert d.reader.drained("s")


def test_while_a_snapshot_loads_the_log_is_looked_at_where_its_rows_are() -> None:
    d = Driver(at={"w": 0})
    d.table.write("w", *range(1, 21))
    d.reader.learned("s", "w", 20)
    d.reader.bootstrap("s")  # at 0 there is nothing any more, and no answer
    d.reader.doubt(OTHER_EPOCH)
    d.answer = False
    d.run()
    assert [(one.after, one.upto) for one in d.asked] == [(20, 20)]


def test_it_is_drained_once_nothing_is_held_since() -> None:
    d = bootstrapping()
    d.send(position("w", 5, 5), rdata("w", 6))
    d.reader.bootstrapped("s", {"w": 5})
    d.answer = False
    d.run()
    d.send(position("w", 9, 9))
    assert d.tokens("w") == [6]
    assert not d.reader.drained("s")  # what was known then is there, but it catches up with what came since
    d.answer = True
    d.reader.receive_page(d.asked[-1], d.table.page(d.asked[-1]), d.now)
    d.run()
    assert d.reader.drained("s")


def test_only_what_is_kept_in_a_table_has_snapshots() -> None:
    for stream in (Followed("s", resettable=True), Followed("s", fetchable=False)):
        with pytest.raises(ConfigError, match="not kept in a table"):
            Driver(stream=stream).reader.bootstrap("s")


# -- the table of transitions ---------------------------------------------------------------------------------


def test_every_state_can_be_lost_stopped_and_left() -> None:
    for state, moves in TRANSITIONS.items():
        # A bootstrap outlives a lost link; one that is given up meanwhile is stopped after it.
        stays = state in (State.STOPPED, State.BOOTSTRAPPING)
        assert moves[Event.LOST] is (state if stays else State.UNSYNCED)
        assert moves.get(Event.GIVEN_UP, State.STOPPED) is State.STOPPED
        assert moves.get(Event.BOOTSTRAP, State.BOOTSTRAPPING) is State.BOOTSTRAPPING
        assert set(moves.values()) - {state}


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> unsynced"]
    for state, moves in TRANSITIONS.items():
        arrows: dict[str, list[str]] = {}
        for event, target in moves.items():
            if target is not state:
                arrows.setdefault(target.value, []).append(event.value)
        lines += [f"    {state.value} --> {target}: {' / '.join(events)}" for target, events in arrows.items()]
    return "\n".join(lines)


def test_the_diagram_of_the_docs_is_drawn_from_the_table() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    found = re.search(r"```mermaid\n(.*?)\n```", page, re.DOTALL)
    assert found is not None
    assert found[1] == diagram()


# -- at random ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_channels_lose_nothing(seed: int) -> None:
    """Chained frames over a channel that drops, repeats, reorders, cuts and disconnects; then it heals."""
    rng = random.Random(seed)
    writers = ["a", "b"]
    settings = Settings(held_bytes=rng.choice([800, 10**6]), receive_queue_bytes=rng.choice([3_000, 10**6]))
    d = Driver(at=dict.fromkeys(writers, 0), settings=settings, table=Table(page_rows=rng.choice([3, 1000])))
    ends = dict.fromkeys(writers, 0)
    channel: list[bytes] = []
    token = 0
    for _ in range(150):
        writer = rng.choice(writers)
        lines = [position(writer, ends[writer], ends[writer])]
        for _ in range(rng.randrange(4)):
            token += rng.randrange(1, 4)
            rows = rng.randrange(1, 4)
            d.table.write(writer, *[token] * rows)
            lines += [rdata(writer, "batch", payload(writer, token, i)) for i in range(rows - 1)]
            lines.append(rdata(writer, token, payload(writer, token, rows - 1)))
            ends[writer] = token
        channel.append(b"\n".join(lines))
        if rng.random() < 0.3:
            rng.shuffle(channel)
        while channel and rng.random() < 0.7:
            message = channel.pop(0)
            fate = rng.random()
            if fate < 0.15:
                continue
            if fate < 0.3:
                channel.append(message)
            if fate < 0.4:
                message = message[: message.rfind(b"\n")] if b"\n" in message else b""
            if rng.random() < 0.05:
                d.reader.connected(d.now)
            if rng.random() < 0.1:
                d.fail = rng.randrange(4)
            d.answer = rng.random() < 0.8
            d.reader.receive(message, d.now)
            if rng.random() < 0.6:
                d.run()
            d.now += rng.random() * 3
    d.fail, d.answer = 0, True
    for _ in range(4):
        for asked in [p.asked for p in d.reader.progress.values() if p.asked is not None]:
            d.reader.fetch_failed(asked, TimeoutError(), d.now)
        d.later(20)
        d.send(*[position(writer, ends[writer], ends[writer]) for writer in writers])
    for writer in writers:
        expected = [("s", writer, *row) for row in d.table.rows.get(("s", writer), [])]
        assert [entry for entry in d.log if entry[1] == writer] == expected
        assert d.at(writer) == ends[writer]
    assert d.reader.intake.queue_bytes == 0


# -- found by fault tests -------------------------------------------------------------------------------------


def test_rows_held_before_any_position_are_not_taken_for_live_ones() -> None:
    d = Driver(at={"w": 5})
    d.table.write("w", 6, 7, 8)
    d.answer = False
    d.reader.learned("s", "w", 6)  # from the positions table: nothing was heard on this link yet
    d.send(rdata("w", 8))  # 7 was lost before it
    d.send(position("w", 8, 8))
    assert d.reader.counters.rows_dropped == 1
    d.answer = True
    for asked in list(d.asked):
        d.reader.receive_page(asked, d.table.page(asked), d.now)
    d.run()
    assert d.tokens("w") == [6, 7, 8]


@pytest.mark.parametrize("when", ["at the start", "while catching up", "while a snapshot loads"])
def test_rows_behind_an_old_line_of_a_foreign_writer_are_not_taken_for_all_there_are(when: str) -> None:
    """What was learned since is caught up with, and says nothing of rows between it and the next line."""
    d = Driver(at={"w": 10})
    d.table.write("w", *range(11, 20))
    d.answer = False
    if when == "while a snapshot loads":
        d.reader.bootstrap("s")
    elif when == "while catching up":
        d.reader.learned("s", "w", 15)
        d.run()
    d.send(position("w", 5, 5), rdata("w", 16))
    if when == "while a snapshot loads":
        d.reader.bootstrapped("s", {"w": 10})
    d.reader.learned("s", "w", 15)  # it was read before 16 was there
    d.run()
    d.answer = True
    for asked in list(d.asked):
        d.reader.receive_page(asked, d.table.page(asked), d.now)
    d.run()
    assert d.tokens("w") == [11, 12, 13, 14, 15]
    d.send(rdata("w", 17))  # 16 was dropped, or never seen
    assert 17 not in d.tokens("w")
    assert d.state("w") is State.UNSYNCED
    d.send(position("w", 17, 17))
    assert d.tokens("w") == list(range(11, 18))
    assert d.state("w") is State.LIVE


def test_whoever_is_catching_up_is_named_and_so_is_a_notice_that_waits() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.answer = False
    queue = d.reader.progress["s", "w"].queue
    d.reader.receive(position("w", 5, 5) + b"\n" + rdata("w", 6), d.now)
    assert not queue.noticed
    d.reader.receive(position("w", 8, 8), d.now)
    assert list(d.reader.catching_up) == [("s", "w")]
    d.reader.progress["s", "w"].skip(8)
    assert list(d.reader.catching_up) == []
    assert queue.noticed
    d.handle()
    assert d.notices == [Missed("s", "w", 6, 8)]
    assert not queue.noticed


def test_a_page_that_was_given_up_tells_nothing_of_the_epoch() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.answer = False
    d.send(position("w", 7, 7))
    (asked,) = d.asked
    late = d.table.page(asked)
    d.reader.rebase(OTHER_EPOCH, {("s", "w"): 0})
    d.reader.receive_page(asked, late, d.now)
    assert d.reader.new_epoch is None
    assert d.reader.counters.pages_ignored == 1


def test_what_is_pruned_in_another_log_proves_nothing_and_tells_of_that_log() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.answer = False
    d.send(position("w", 9, 9))
    (asked,) = d.asked
    page = nothing_of(asked, OTHER_EPOCH)
    assert (page.after, page.upto, page.tokens, page.limited) == (5, 5, (), False)
    d.reader.receive_page(asked, page, d.now)
    assert d.reader.new_epoch == OTHER_EPOCH
    assert d.reader.progress["s", "w"].position == 5


def test_a_full_queue_of_one_does_not_keep_another_from_its_rows() -> None:
    d = Driver(at={"a": 0, "b": 0}, live=("a", "b"), settings=Settings(receive_queue_bytes=300))
    d.answer = False
    for token in range(1, 5):
        d.reader.receive(rdata("a", token), d.now)
    assert d.reader.intake.queue_bytes > 300
    d.table.write("b", 1, 2)
    d.reader.receive(position("a", 9, 9), d.now)
    d.reader.receive(position("b", 2, 2), d.now)
    assert [asked.writer for asked in d.reader.fetches(d.now)] == ["b"]


def test_resume_fetches_at_once_what_was_known_when_it_stopped() -> None:
    d = Driver(at={"w": 5}, live=("w",))
    d.table.write("w", 6, 7, 8)
    d.reader.receive(rdata("w", 6), d.now)
    d.reader.progress["s", "w"].stop()
    d.reader.learned("s", "w", 8)
    assert d.run().tokens("w") == []
    d.reader.progress["s", "w"].resume()
    assert d.run().tokens("w") == [6, 7, 8]


def test_an_own_name_that_was_taken_over_is_followed_as_any_other() -> None:
    d = Driver(at={"me": 5}, own=("me",))
    d.table.write("me", 6)
    assert d.send(position("me", 6, 6)).tokens("me") == []
    d.reader.disown()
    assert d.send(position("me", 6, 6)).tokens("me") == [6]


def test_9_11_the_first_log_is_the_one_that_is_read() -> None:
    reader = Reader([Followed("s")])
    assert reader.begins_in("a" * 32)
    assert reader.epoch == "a" * 32
    assert reader.begins_in("a" * 32)


def test_9_11_of_another_log_a_page_tells_and_where_nothing_was_read_the_runtime_looks_again() -> None:
    reader = Reader([Followed("s")], epoch="a" * 32)
    assert not reader.begins_in("b" * 32)
    assert (reader.epoch, reader.new_epoch) == ("a" * 32, "b" * 32)
    reader = Reader([Followed("s")], epoch="a" * 32)
    reader.start_at("s", "w", 5)
    assert not reader.begins_in("b" * 32)
    assert (reader.epoch, reader.new_epoch) == ("a" * 32, None)
    question = reader.log_question(0.0)
    assert question is not None
    assert (question.after, question.upto) == (5, 5)
