from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from busrep.errors import ConfigError, EpochChanged, PositionsAheadOfTable, PositionTooOld, Unavailable
from busrep.spark import following
from busrep.spark.following import Follower, resolved
from busrep.spark.losses import Losses, WriterGone
from busrep.spark.offsets import Offset
from busrep.spark.options import EARLIEST, LATEST, Options, Positions
from busrep.spark.planning import Span
from busrep.spark.table import Unread
from busrep.stores.snapshots import LogState

ONE, TWO = "1" * 32, "2" * 32


@attrs.define
class FakeTable:
    """A table of facts {token: (writer, rows)}."""

    facts: dict[int, tuple[str, int]] = attrs.field(factory=dict)
    positions: dict[str, int] = attrs.field(factory=dict)
    floors: dict[str, int] = attrs.field(factory=dict)
    epoch: str = ONE
    replica: bool = False
    looks: int = 0
    counts: int = 0
    away: bool = False

    def log(self) -> LogState:
        self.looks += 1
        return LogState(self.epoch, self.replica, dict(self.positions), dict(self.floors))

    def frontier(self, spans: Sequence[Span], most: int | None) -> tuple[int | None, int | None]:
        rows = self.rows(spans)
        return (rows[0] if rows else None), (rows[most] if most is not None and len(rows) > most else None)

    def rows(self, spans: Sequence[Span]) -> list[int]:
        return [
            token
            for token, (writer, count) in sorted(self.facts.items())
            if any(name == writer and after < token <= upto for name, after, upto in spans)
            for _ in range(count)
        ]

    def unread(self, begun: Sequence[Span], left: Sequence[Span]) -> dict[str, Unread]:
        self.counts += 1
        if self.away:
            raise Unavailable("the table", "it is away")
        first = {writer: rows[0] for writer, after, upto in begun if (rows := self.rows([(writer, after, upto)]))}
        rows = {writer: len(self.rows([span for span in left if span[0] == writer])) for writer in first}
        return {writer: Unread(rows[writer], float(token)) for writer, token in first.items()}

    def at_time(self, log: LogState, micros: int) -> dict[str, int]:
        return {writer: min(position, micros) for writer, position in log.positions.items()}

    def close(self) -> None:
        pass


@attrs.define
class FakeBus:
    """A bus that has said this. ``signal``: and something that proves nothing by itself; it tells of it once."""

    told: dict[str, dict[str, int]] = attrs.field(factory=dict)
    signal: bool = False
    waits: int = 0
    questions: int = 0

    def announced(self, epoch: str) -> tuple[Mapping[str, int], bool]:
        self.questions += 1
        signal, self.signal = self.signal, False
        return self.told.get(epoch, {}), signal or epoch not in self.told

    def wait(self, seconds: float) -> None:
        self.waits += 1

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL", 0.0)


def offset(epoch: str, positions: Mapping[str, int] = {}, skipped: int = 0) -> Offset:
    return Offset(epoch, positions, skipped, "orders")


def follower(table: FakeTable, bus: FakeBus | None = None, **given: Any) -> Follower:
    options = Options(store="sqlite:////x.db", stream="orders", **given)
    return Follower(options, table, Losses("orders", fail=options.fail_on_data_loss), bus)


def test_a_query_goes_up_to_the_proven_positions_and_not_beyond() -> None:
    table = FakeTable({1: ("a", 1), 2: ("b", 2), 3: ("a", 1), 5: ("a", 1)}, {"a": 3, "b": 2})
    one = follower(table)
    start = one.initial()
    assert start == offset(ONE, {"a": 0, "b": 0})
    end = one.latest(start, None)
    assert end == offset(ONE, {"a": 3, "b": 2})  # 5 is there, and not proven: one below it may still be open
    assert one.spans(start, end) == [("a", 0, 3), ("b", 0, 2)]
    assert one.latest(end, None) == end
    assert one.spans(end, end) == []
    assert one.report() == end
    table.positions["a"] = 5
    assert one.latest(end, None) == offset(ONE, {"a": 5, "b": 2})


def test_the_lag_is_what_a_batch_finds_and_what_it_leaves() -> None:
    table = FakeTable(dict.fromkeys(range(1, 8), ("a", 1)) | {8: ("b", 2)}, {"a": 7, "b": 7})
    one = follower(table)
    assert one.lag() == {}
    at = one.latest(one.initial(), 3)
    assert one.lag() == {"a": Unread(4, 1.0)}
    table.positions["b"] = 8
    at = one.latest(at, 3)
    assert one.lag() == {"a": Unread(1, 4.0), "b": Unread(2, 8.0)}
    table.away = True
    assert one.lag() == {}, "the table does not answer"
    table.away = False
    at = one.latest(at, None)
    assert one.lag() == {"a": Unread(0, 7.0), "b": Unread(0, 8.0)}
    counts = table.counts
    assert one.latest(at, None) is at
    assert one.lag() == {}
    assert table.counts == counts, "a query that has read all asks nothing"


def test_positions_that_move_over_nothing_make_no_batch() -> None:
    table = FakeTable({1: ("a", 1)}, {"a": 1, "b": 0})
    one = follower(table)
    at = one.latest(one.initial(), None)
    table.positions |= {"a": 50, "b": 50}
    assert one.latest(at, None) is at
    table.facts[60] = ("b", 1)
    table.positions["b"] = 60
    assert one.latest(at, None) == offset(ONE, {"a": 50, "b": 60})


def test_batches_of_so_many_rows_come_to_the_end() -> None:
    table = FakeTable({at: ("ab"[at % 2], 1 + at % 3) for at in range(1, 40) if at % 5}, {"a": 38, "b": 39})
    one = follower(table)
    at, seen = one.initial(), []
    while (end := one.latest(at, 4)) != at:
        rows = table.rows(one.spans(at, end))
        assert 0 < len(rows) <= 4
        seen += rows
        at = end
    assert seen == table.rows([("a", 0, 38), ("b", 0, 39)])


def test_available_now_ends_with_what_was_there() -> None:
    table = FakeTable(dict.fromkeys(range(1, 31), ("a", 1)), {"a": 10})
    one = follower(table)
    start = one.initial()
    one.prepare()
    table.positions["a"] = 30
    table.positions["new"] = 30
    at = one.latest(start, 4)
    assert at.positions == {"a": 4, "new": 0}
    at = one.latest(at, None)
    assert at.at("a") == 10
    assert one.latest(at, None) == at
    # A query that had heard of more on the bus than the table tells yet: nothing to do, and no way back.
    further = offset(ONE, {"a": 25})
    assert one.latest(further, None) == further


def test_a_new_writer_begins_at_its_beginning() -> None:
    table = FakeTable({1: ("a", 1), 2: ("b", 1)}, {"a": 2})
    one = follower(table, starting=LATEST)
    start = one.initial()
    assert start.positions == {"a": 2}
    table.positions["b"] = 2
    assert one.spans(start, one.latest(start, None)) == [("b", 0, 2)]


def test_rows_that_were_pruned_are_an_error() -> None:
    table = FakeTable({8: ("a", 1)}, {"a": 9}, {"a": 5})
    one = follower(table)
    assert one.initial().positions == {"a": 5}  # earliest: what is still there
    with pytest.raises(PositionTooOld, match="at 3, below the retention floor 5.*failOnDataLoss=false") as caught:
        one.latest(offset(ONE, {"a": 3}), None)
    assert (caught.value.position, caught.value.floor) == (3, 5)
    with pytest.raises(PositionTooOld):
        one.spans(offset(ONE, {"a": 3}), offset(ONE, {"a": 9}))


def test_rows_that_were_pruned_are_counted_once_when_told_so() -> None:
    table = FakeTable({8: ("a", 1), 9: ("a", 1), 2: ("b", 1)}, {"a": 9, "b": 9}, {"a": 5})
    one = follower(table, fail_on_data_loss=False)
    start = offset(ONE, {"a": 3}, 10)
    first = one.latest(start, 1)
    assert first == offset(ONE, {"a": 7, "b": 7}, 12)
    assert one.spans(start, first) == [("a", 5, 7), ("b", 0, 7)]
    second = one.latest(first, 1)
    assert second.skipped == 12
    assert one.latest(second, None) == offset(ONE, {"a": 9, "b": 9}, 12)


def test_a_floor_beyond_the_batch_does_not_take_the_position_back() -> None:
    table = FakeTable({60: ("a", 1), 5: ("b", 1)}, {"a": 100, "b": 100}, {"a": 50})
    one = follower(table, fail_on_data_loss=False)
    first = one.latest(offset(ONE), 1)
    assert first == offset(ONE, {"a": 59, "b": 59}, 50)
    assert one.latest(first, 1).skipped == 50


def test_another_log_is_an_error() -> None:
    table = FakeTable({1: ("a", 1)}, {"a": 1})
    one = follower(table)
    at = one.latest(one.initial(), None)
    table.epoch = TWO
    with pytest.raises(EpochChanged, match="restored or replaced.*failOnDataLoss=false") as caught:
        one.latest(at, None)
    assert (caught.value.held, caught.value.found) == (ONE, TWO)
    with pytest.raises(EpochChanged):
        one.spans(offset(ONE), at)  # planned before, to be done again now


def test_another_log_begins_at_its_beginning_when_told_so() -> None:
    table = FakeTable({7: ("a", 1), 8: ("b", 1)}, {"a": 8, "b": 8}, {"a": 6}, epoch=TWO)
    one = follower(table, fail_on_data_loss=False)
    old = offset(ONE, {"a": 900, "gone": 5})
    end = one.latest(old, None)
    assert end == offset(TWO, {"a": 8, "b": 8})
    assert one.spans(old, end) == [("a", 6, 8), ("b", 0, 8)]
    assert one.spans(offset(ONE), old) == []  # nobody has those rows any more
    table.facts.clear()
    assert one.latest(old, None) is old  # an empty log: the old place stays until there is something


def test_available_now_reads_the_new_log_up_to_where_it_was_first_seen() -> None:
    table = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1})
    one = follower(table, fail_on_data_loss=False)
    start = one.initial()
    one.prepare()
    table.epoch = TWO
    end = one.latest(start, None)
    assert end == offset(TWO, {"a": 1})
    table.positions["a"] = 2
    assert one.latest(end, None) == end


def test_a_missing_writer_is_an_error() -> None:
    table = FakeTable({1: ("a", 1)}, {"a": 1})
    with pytest.raises(WriterGone, match=r"no writer 'b' in this store \(it has: a\)"):
        follower(table, writers=("a", "b")).initial()
    one = follower(table)
    with pytest.raises(WriterGone, match="no writer 'c'"):
        one.latest(offset(ONE, {"a": 0, "c": 7}), None)
    lenient = follower(table, fail_on_data_loss=False, writers=("a", "b"))
    assert lenient.initial().positions == {"a": 0}
    assert lenient.latest(offset(ONE, {"a": 0, "c": 7}), None) == offset(ONE, {"a": 1, "c": 7})


def test_a_writer_that_is_gone_may_be_left_out() -> None:
    table = FakeTable({1: ("a", 1)}, {"a": 1})
    at = offset(ONE, {"a": 0, "gone": 7})
    with pytest.raises(WriterGone):
        follower(table).latest(at, None)
    assert follower(table, writers=("a",)).latest(at, None).positions == {"a": 1, "gone": 7}


def test_a_query_may_leave_writers_out_and_take_them_up_again() -> None:
    table = FakeTable({1: ("a", 1), 2: ("b", 1), 3: ("a", 1), 4: ("b", 1)}, {"a": 4, "b": 4})
    planned = offset(ONE, {"a": 2, "b": 2})
    alone = follower(table, writers=("a",))
    # What was planned before is done as it was planned: somebody may have it already.
    assert alone.spans(offset(ONE, {"a": 0, "b": 0}), planned) == [("a", 0, 2), ("b", 0, 2)]
    end = alone.latest(planned, None)
    assert end == offset(ONE, {"a": 4, "b": 2})
    again = follower(table)
    assert again.spans(end, again.latest(end, None)) == [("b", 2, 4)]


def test_a_checkpoint_of_another_stream_is_told() -> None:
    table = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 2})
    at = Offset(ONE, {"a": 1}, stream="payments")  # the same log: positions there would be believed here
    for ask in (lambda: follower(table).latest(at, None), lambda: follower(table).spans(at, at)):
        with pytest.raises(ConfigError, match="of stream 'payments'.*not of 'orders'.*checkpointLocation of its own"):
            ask()
    older = Offset(ONE, {"a": 1})  # of a checkpoint that does not tell
    assert follower(table).latest(older, None) == offset(ONE, {"a": 2})
    table.facts.clear()
    assert follower(table).latest(older, None) is older


def test_a_table_that_is_older_than_the_query_is_an_error() -> None:
    table = FakeTable({1: ("a", 1), 5: ("a", 1), 8: ("b", 1)}, {"a": 5, "b": 9})
    start, end = offset(ONE, {"a": 5, "b": 2}), offset(ONE, {"a": 9, "b": 9})
    one = follower(table)
    assert one.spans(start, offset(ONE, {"a": 5, "b": 9})) == [("b", 2, 9)]
    for ask in (lambda: one.latest(end, None), lambda: one.spans(start, end)):
        with pytest.raises(PositionsAheadOfTable, match="'a'.*at 9, .*proven up to 5.*'busrep db restored'") as caught:
            ask()
        assert (caught.value.stream, caught.value.position, caught.value.highest) == ("orders", 9, 5)
    # Told so: from where it is, and never back.
    assert follower(table, fail_on_data_loss=False).latest(end, None) is end
    # Of writers that are not read nobody cares.
    assert follower(table, writers=("b",)).latest(end, None) is end
    # A replica lags; and what was heard on the bus need not be in the table's positions yet, though its rows are there.
    table.replica = True
    assert follower(table).latest(end, None) is end
    table.replica = False
    assert follower(table, FakeBus({ONE: {}})).latest(end, None) is end
    table.facts[9] = ("a", 1)
    assert follower(table).latest(end, None) is end


def test_writers_that_are_not_asked_for_are_not_read() -> None:
    table = FakeTable({1: ("a", 1), 2: ("b", 1)}, {"a": 2, "b": 2})
    one = follower(table, writers=("b",))
    start = one.initial()
    assert one.spans(start, one.latest(start, None)) == [("b", 0, 2)]


def test_the_bus_is_believed_about_the_log_that_is_read() -> None:
    table, bus = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1}), FakeBus({ONE: {}})
    one = follower(table, bus)
    at = one.latest(one.initial(), None)
    assert at.positions == {"a": 1}
    looks = table.looks
    bus.told[ONE] = {"a": 2}
    assert one.latest(at, None).positions == {"a": 2}
    assert table.looks == looks  # no question was needed to know of it
    assert one.report() == offset(ONE, {"a": 2})


@pytest.mark.parametrize("told", [{}, {TWO: {"a": 2}}, {ONE: {"a": 1, "unknown": 9}}])
def test_what_does_not_count_makes_the_table_be_asked(told: dict[str, dict[str, int]]) -> None:
    table, bus = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1}), FakeBus({ONE: {}})
    one = follower(table, bus)
    at = one.latest(one.initial(), None)
    looks = table.looks
    bus.told = told
    assert one.latest(at, None) == at
    assert table.looks > looks
    table.positions["a"] = 2
    assert one.latest(at, None).positions == {"a": 2}


def test_a_signal_makes_the_table_be_asked_and_is_not_taken_by_anybody_else() -> None:
    table, bus = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1}), FakeBus({ONE: {"a": 1}})
    one = follower(table, bus)
    at = one.latest(one.initial(), None)
    table.positions["a"] = 2
    bus.signal = True
    assert one.report() == offset(ONE, {"a": 1})  # Spark's question for its progress: of what is known
    assert bus.signal
    bus.waits = 0
    assert one.latest(at, None).positions == {"a": 2}
    assert bus.waits == 0
    # One question a look: an answer that nobody acts upon would be a signal lost.
    before = bus.questions, table.looks
    one.latest(offset(ONE, {"a": 1}), None)
    assert (bus.questions, table.looks) == (before[0] + 1, before[1])


def test_what_was_said_of_known_writers_counts_beside_a_signal() -> None:
    table, bus = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1}), FakeBus({ONE: {"a": 1}})
    one = follower(table, bus)
    at = one.latest(one.initial(), None)
    bus.told[ONE] = {"a": 2}
    bus.signal = True
    assert one.latest(at, None).positions == {"a": 2}  # the table does not tell yet, and need not


def test_on_a_replica_the_bus_is_a_signal_only() -> None:
    table = FakeTable({1: ("a", 1), 2: ("a", 1)}, {"a": 1}, replica=True)
    bus = FakeBus({ONE: {"a": 2}})
    one = follower(table, bus)
    at = one.latest(one.initial(), None)
    assert at.positions == {"a": 1}  # it need not have 2 yet
    questions = bus.questions
    assert one.latest(at, None) is at
    assert (bus.questions, bus.waits) == (questions + 2, 1)  # asked, or it would go on being news, and wait for nothing
    table.positions["a"] = 2
    assert one.latest(at, None).positions == {"a": 2}


def test_an_idle_query_waits_for_the_bus() -> None:
    bus = FakeBus({ONE: {}})
    one = follower(FakeTable({}, {"a": 0}), bus)
    start = one.initial()
    assert one.latest(start, None) is start
    assert bus.waits == 1
    one.prepare()
    assert one.latest(start, None) is start
    assert bus.waits == 1  # Trigger.AvailableNow waits for nothing


def test_positions_that_options_mean() -> None:
    table = FakeTable({}, {"a": 10, "b": 20}, {"b": 5})
    log = table.log()
    for wanted, found in [
        (EARLIEST, {"a": 0, "b": 5}),
        (LATEST, {"a": 10, "b": 20}),
        (Positions("map", map={"a": 3}), {"a": 3, "b": 0}),
        (Positions("time", time=15), {"a": 10, "b": 15}),
    ]:
        assert resolved(wanted, "startingPositions", log, log.positions, table) == found
    with pytest.raises(ConfigError, match="'endingPositions': 11 is beyond 10, up to which writer 'a'"):
        resolved(Positions("map", map={"a": 11}), "endingPositions", log, log.positions, table)
    with pytest.raises(ConfigError, match=r"names writer 'c', which is not read here \(read are: a, b\)"):
        resolved(Positions("map", map={"c": 1}), "startingPositions", log, log.positions, table)
