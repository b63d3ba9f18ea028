"""The core that keeps a resettable stream's rows until they are acknowledged: what it holds, proves and lets go of."""

from __future__ import annotations

import random
from typing import Any

import pytest

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.framing import parse_frame
from busrep.core.reader import Reader
from busrep.core.received import Followed
from busrep.core.retained import FACT_BYTES, RetainedRows
from busrep.core.states import State
from busrep.core.writer import Writer
from busrep.errors import ConfigError, PositionTooOld, UnknownStream
from busrep.settings import Settings
from busrep.streams import Stream


def kept(*expected: str, **options: Any) -> RetainedRows:
    given = {"incarnation": 3, "max_bytes": 2**20, "max_rows": 1_000, **options}
    return RetainedRows("typing", "w", expected=expected or ("c",), **given)


def write(rows: RetainedRows, *tokens: int) -> None:
    for token in tokens:
        rows.fact_completed("typing", token, [b"%d" % token])
    rows.position_moved("typing", max(tokens))


def ask(after: int, upto: int, limit: int = 1_000, incarnation: int | None = 3) -> FetchUpdates:
    return FetchUpdates("typing", "w", after, upto, limit, incarnation)


def shown(page: UpdatesPage) -> tuple[list[int], int, bool]:
    assert [int(payload) for payload in page.payloads] == list(page.tokens)
    return list(page.tokens), page.upto, page.limited


# -- what is handed out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "upto", "limit", "found"),
    [
        (0, 9, 100, ([2, 3, 5, 7], 9, False)),
        (2, 5, 100, ([3, 5], 5, False)),
        (3, 4, 100, ([], 4, False)),
        (0, 9, 3, ([2, 3, 5], 5, True)),
        (0, 9, 4, ([2, 3, 5, 7], 9, False)),
        (0, 7, 1, ([2], 2, True)),
        (0, 9, 0, ([2], 2, True)),
        (7, 9, 1, ([], 9, False)),
        (0, 50, 100, ([2, 3, 5, 7], 9, False)),
        (9, 50, 100, ([], 9, False)),
        (12, 50, 100, ([], 12, False)),
        (5, 5, 100, ([], 5, False)),
        (5, 3, 100, ([], 5, False)),
    ],
)
def test_a_page_holds_what_is_asked_for_and_proves_no_more_than_the_position(
    after: int, upto: int, limit: int, found: tuple[list[int], int, bool]
) -> None:
    rows = kept()
    write(rows, 2, 3, 5, 7)
    rows.position_moved("typing", 9)
    page = rows.fetch(ask(after, upto, limit))
    assert shown(page) == found
    assert (page.stream, page.writer, page.after, page.incarnation) == ("typing", "w", after, 3)


def test_facts_go_whole() -> None:
    rows = kept()
    rows.fact_completed("typing", 1, [b"1"] * 3)
    rows.fact_completed("typing", 2, [b"2"] * 3)
    rows.fact_completed("typing", 3, [])
    rows.position_moved("typing", 3)
    assert shown(rows.fetch(ask(0, 3, 1))) == ([1, 1, 1], 1, True)
    assert shown(rows.fetch(ask(0, 3, 5))) == ([1, 1, 1], 1, True)
    assert shown(rows.fetch(ask(0, 3, 6))) == ([1, 1, 1, 2, 2, 2], 3, False)


def test_what_waits_for_an_open_fact_is_not_proven() -> None:
    rows = kept()
    rows.rows_completed("typing", [8, 9], [b"8", b"9"])
    assert shown(rows.fetch(ask(0, 9))) == ([], 0, False)
    rows.fact_completed("typing", 7, [b"7"])
    rows.position_moved("typing", 8)
    rows.position_moved("typing", 4)
    assert shown(rows.fetch(ask(0, 9))) == ([7, 8], 8, False)
    rows.position_moved("typing", 9)
    assert shown(rows.fetch(ask(8, 9))) == ([9], 9, False)


def test_another_incarnation_gets_no_proof_and_is_told_which_this_is() -> None:
    rows = kept()
    write(rows, 1, 2)
    page = rows.fetch(ask(0, 2, incarnation=2))
    assert (shown(page), page.incarnation) == (([], 0, False), 3)
    assert shown(rows.fetch(ask(0, 2, incarnation=None))) == ([1, 2], 2, False)


def test_what_is_not_kept_here_is_refused() -> None:
    rows = kept()
    for stream, writer in (("typing", "other"), ("other", "w")):
        with pytest.raises(ConfigError, match="not kept here"):
            rows.fetch(FetchUpdates(stream, writer, 0, 1))
    write(rows, 1)
    rows.fact_completed("typing", 3, [b"3"])
    for token in (1, 3):
        with pytest.raises(ValueError, match="twice"):
            rows.fact_completed("typing", token, [b"1"])
    with pytest.raises(UnknownStream):
        rows.fact_completed("other", 2, [b"2"])
    with pytest.raises(UnknownStream):
        rows.position_moved("other", 2)


def test_bad_settings_are_refused() -> None:
    for bad in ({"max_bytes": 0}, {"max_rows": 0}):
        with pytest.raises(ConfigError, match="1 or more"):
            kept("c", **bad)
    with pytest.raises(ConfigError, match="expected="):
        RetainedRows("typing", "w", incarnation=1, expected=(), max_bytes=1, max_rows=1)


# -- what is acknowledged -------------------------------------------------------------------------------------


def test_rows_go_when_all_have_acknowledged_them() -> None:
    rows = kept("a", "b")
    write(rows, 1, 2, 3)
    assert rows.acknowledged("a", 3, 3)
    assert (rows.floor, rows.rows) == (0, 3)
    assert rows.acknowledged("b", 2)
    assert (rows.floor, rows.rows, rows.bytes) == (2, 1, FACT_BYTES + 1)
    assert shown(rows.fetch(ask(2, 3))) == ([3], 3, False)
    with pytest.raises(PositionTooOld) as raised:
        rows.fetch(ask(1, 3))
    assert (raised.value.stream, raised.value.writer, raised.value.floor) == ("typing", "w", 2)
    assert rows.acknowledged("b", 1), "an old one, late"
    assert rows.positions == {"a": 3, "b": 2}
    assert rows.acknowledged("b", 3)
    assert (rows.floor, rows.rows, rows.bytes) == (3, 0, 0)
    assert rows.counters.rows_acknowledged == 3
    assert shown(rows.fetch(ask(3, 3))) == ([], 3, False)


@pytest.mark.parametrize(
    ("instance", "token", "incarnation", "counter"),
    [
        ("c", 500, None, "acks_refused"),  # of the life before: nothing of this one is that far
        ("c", 2, 2, "acks_refused"),
        ("c", 2, 4, "acks_refused"),
        ("c", -1, None, "acks_refused"),
        ("x", 2, None, "acks_unexpected"),
    ],
)
def test_an_acknowledgement_of_something_else_lets_go_of_nothing(
    instance: str, token: int, incarnation: int | None, counter: str
) -> None:
    rows = kept()
    write(rows, 1, 2)
    assert not rows.acknowledged(instance, token, incarnation)
    assert (rows.floor, rows.rows) == (0, 2)
    assert rows.statistics()[counter] == 1


def test_instances_come_and_go() -> None:
    rows = kept("a")
    write(rows, 1, 2)
    rows.expect("b")
    rows.acknowledged("a", 1)
    assert rows.floor == 0
    rows.give_up("b")
    assert rows.floor == 1
    rows.expect("b")
    rows.expect("a")
    assert rows.positions == {"a": 1, "b": 1}
    rows.give_up("a")
    for name in ("b", "a"):
        with pytest.raises(ConfigError, match="last one"):
            rows.give_up(name)
    assert shown(rows.fetch(ask(1, 2))) == ([2], 2, False)


# -- the bound ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"max_rows": 3}, {"max_bytes": 3 * (FACT_BYTES + 1)}])
def test_over_the_bound_the_oldest_go_and_that_is_counted(bound: dict[str, int]) -> None:
    rows = kept("c", **bound)
    for token in range(1, 7):
        write(rows, token)
    assert (rows.floor, rows.rows, rows.counters.rows_dropped) == (3, 3, 3)
    with pytest.raises(PositionTooOld) as raised:
        rows.fetch(ask(0, 6))
    assert raised.value.floor == 3
    assert shown(rows.fetch(ask(3, 6))) == ([4, 5, 6], 6, False)


def test_the_bound_counts_what_waits_for_an_open_fact_too() -> None:
    rows = kept("c", max_rows=2)
    rows.rows_completed("typing", [2, 3, 4, 5], [b"2", b"3", b"4", b"5"])
    assert (rows.rows, rows.counters.rows_dropped, rows.floor) == (2, 2, 0)
    rows.fact_completed(
        "typing", 1, [b"1"]
    )  # the open one ends: kept with what was dropped behind it, it would be a hole
    rows.position_moved("typing", 5)
    assert (rows.floor, rows.rows) == (3, 2)
    assert rows.bytes == 2 * (FACT_BYTES + 1)
    assert rows.counters.rows_dropped == rows.counters.rows_kept - rows.rows
    with pytest.raises(PositionTooOld):
        rows.fetch(ask(0, 5))
    assert shown(rows.fetch(ask(3, 5))) == ([4, 5], 5, False)


def test_what_was_dropped_while_a_fact_is_open_takes_no_memory() -> None:
    """A fact may be open for hours, and as many others end behind it as there are."""
    rows = kept("c", max_rows=10)
    for token in range(2, 20_002):
        rows.fact_completed("typing", token, [b"x"])
        rows.position_moved("typing", 0)
    assert (rows.rows, rows.counters.rows_dropped) == (10, 19_990)
    assert len(rows.waiting) == 10
    rows.fact_completed("typing", 1, [b"x"])
    assert (rows.rows, rows.counters.rows_dropped) == (10, 19_991), "it would be kept with a hole behind it"
    rows.position_moved("typing", 5_000)
    assert (rows.floor, rows.rows) == (5_000, 10)
    rows.position_moved("typing", 20_001)
    assert (rows.floor, rows.rows, rows.bytes) == (19_991, 10, 10 * (FACT_BYTES + 1))
    assert rows.fetch(ask(19_991, 20_001)).tokens == list(range(19_992, 20_002))
    with pytest.raises(PositionTooOld):
        rows.fetch(ask(19_990, 20_001))


def test_empty_facts_that_wait_take_no_memory() -> None:
    rows = kept("c")
    for token in range(2, 1_000):
        rows.fact_completed("typing", token, [])
    assert rows.waiting == {}


def test_one_fact_over_the_bound_is_dropped_itself() -> None:
    rows = kept("c", max_bytes=300)
    write(rows, 1)
    rows.fact_completed("typing", 2, [b"2" * 1_000])
    rows.position_moved("typing", 2)
    assert (rows.floor, rows.rows, rows.bytes, rows.counters.rows_dropped) == (2, 0, 0, 2)
    write(rows, 3)
    assert shown(rows.fetch(ask(2, 3))) == ([3], 3, False)


# -- any order of events --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_page_is_ever_short_of_a_row(seed: int) -> None:
    """A page holds every row in what it proves, or is refused; memory and counters agree; whatever the order."""
    dice = random.Random(seed)
    rows = kept("a", "b", max_rows=dice.choice([4, 1_000]))
    written: dict[int, int] = {}  # token -> rows of that fact
    open_facts, next_token = list[int](), 1
    for _ in range(300):
        what = dice.random()
        if what < 0.3:
            open_facts.append(next_token)
            next_token += 1
        elif what < 0.7 and open_facts:
            token = open_facts.pop(dice.randrange(len(open_facts)))
            written[token] = dice.randrange(3)
            rows.fact_completed("typing", token, [b"%d" % token] * written[token])
            rows.position_moved("typing", min(open_facts, default=next_token) - 1)
        elif what < 0.8:
            acked = dice.randrange(next_token)
            assert rows.acknowledged(dice.choice("ab"), acked, dice.choice([3, None])) == (acked <= rows.position)
        else:
            after = dice.randrange(next_token)
            question = ask(after, after + dice.randrange(20), dice.randrange(1, 6))
            if after < rows.floor and after < min(question.upto, rows.position):
                with pytest.raises(PositionTooOld) as raised:
                    rows.fetch(question)
                assert raised.value.floor == rows.floor
            else:
                page = rows.fetch(question)
                proven = range(after + 1, page.upto + 1)
                assert list(page.tokens) == [token for token in proven for _ in range(written[token])]
        assert rows.floor <= rows.position
        counters = rows.counters
        assert rows.rows == counters.rows_kept - counters.rows_acknowledged - counters.rows_dropped
        assert rows.rows <= rows.max_rows
    rows.position_moved("typing", next_token)
    for name in "ab":
        rows.acknowledged(name, next_token)
    assert (rows.rows, rows.bytes) == (0, 0)


# -- with the cores of a writer and a reader ------------------------------------------------------------------


class Link:
    """A writer core, what it retains, and a reader core that can fetch from it; messages may get lost between."""

    def __init__(self, incarnation: int, **options: Any) -> None:
        self.stream = Stream[Any]("typing", resettable=True)
        self.writer = Writer("shop", "w", incarnation=incarnation, epoch=None, settings=Settings())
        self.writer.add_stream(self.stream, 0)
        self.writer.connected(0.0)
        self.rows = kept(incarnation=incarnation, **options)
        self.last = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            self.last += 1
            for core in (self.writer, self.rows):
                core.fact_completed("typing", self.last, [b"%d" % self.last])
                core.position_moved("typing", self.last)

    def send(self, reader: Reader | None) -> None:
        for frame in self.writer.frames_to_publish():
            if reader is not None:
                reader.receive_frame(parse_frame(frame.data, 2**20), 0.0)
            self.writer.published(frame)


def deliver(reader: Reader, link: Link) -> list[Any]:
    """What the handlers get: tokens, and the notices."""
    got: list[Any] = []
    for _ in range(100):
        for asked in reader.fetches(0.0):
            try:
                page = link.rows.fetch(asked)
            except PositionTooOld as error:
                reader.fetch_failed(asked, error, -100.0)
                reader.progress["typing", "w"].skip(error.floor)
            else:
                reader.receive_page(asked, page, 0.0)
        for key in list(reader.ready):
            taken = reader.take(*key)
            got += getattr(taken, "tokens", [taken])
            reader.done(*key)
    return got


def reader() -> Reader:
    made = Reader([Followed("typing", resettable=True, fetchable=True)])
    made.connected(0.0)
    return made


def test_a_reader_that_lost_frames_gets_them_from_the_writers_memory() -> None:
    link, reading = Link(1), reader()
    link.send(reading)
    link.write(3)
    link.send(reading)
    assert deliver(reading, link) == [1, 2, 3]
    link.write(4)
    link.send(None)
    link.write(2)
    link.send(reading)
    assert deliver(reading, link) == [4, 5, 6, 7, 8, 9]
    assert reading.progress["typing", "w"].state is State.LIVE


def test_what_was_dropped_over_the_bound_is_told_as_missed() -> None:
    link, reading = Link(1, max_rows=3), reader()
    link.send(reading)
    link.write(8)
    link.send(None)
    link.write(1)
    link.send(reading)
    first, *rest = deliver(reading, link)
    assert (first.after, first.upto) == (0, 6)
    assert rest == [7, 8, 9]


def test_a_restarted_writers_rows_are_fetched_from_its_own_life() -> None:
    old, reading = Link(1), reader()
    old.write(5)
    old.send(reading)
    deliver(reading, old)
    new = Link(2)
    new.write(3)
    new.send(None)
    new.write(1)
    new.send(reading)
    (notice,) = deliver(reading, old)
    assert notice.position == 0, "a reset, and no row: the former life proves nothing about this one"
    reading.progress["typing", "w"].retry.at = 0.0
    assert deliver(reading, new) == [1, 2, 3, 4]
