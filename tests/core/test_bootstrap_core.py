"""The bootstrap core by itself: its states, what it asks for next, its pauses; and the model of it all, at random."""

from __future__ import annotations

from typing import Any

import attrs
import orjson
import pytest

from busrep.core.backoff import LONGEST_PAUSE
from busrep.core.bootstrap import Bootstrap
from busrep.core.bootstrap_work import Agree, Apply, Begin, Drain, Leave, Load, Work
from busrep.core.progress import Progress
from busrep.core.received import Followed, HeldLines
from busrep.core.snapshots import Agreement, BootstrapProgress, PartRange, PartRows, decode_part
from busrep.core.states import BOOTSTRAP_TRANSITIONS, BootstrapState, unfinished
from busrep.core.states import State as ReaderState
from busrep.errors import ReaderMoved, RowError, SnapshotBusy, SnapshotGone, Unavailable
from busrep.settings import Settings
from tests.support.reader import Reader

from .bootstrap_model import walk
from .bootstrap_process import Process

AWAY = Unavailable("the source", "away")
PART = decode_part(b"1 w [1]\n2 w [2]\n")


def agreement(parts: int = 3, *, rows: int = 2, at: int = 100, epoch: str = "e", id: str = "") -> Agreement:
    ranges = [PartRange(10 * number, 10 * number + 10, rows) for number in range(parts)]
    return Agreement("s", epoch, {"w": at}, {}, ranges, "here", id)


class Driver:
    """A bootstrap, and what it was answered."""

    def __init__(self, **settings: Any) -> None:
        self.core = Bootstrap("s", settings=Settings(**settings), jitter=lambda: 1.0)
        self.now = 0.0
        self.left: list[Agreement] = []

    def work(self) -> list[Work]:
        """What is to be done now; leaving is done."""
        wanted = self.core.work(self.now)
        self.left += [work.agreement for work in wanted if isinstance(work, Leave)]
        return [work for work in wanted if not isinstance(work, Leave)]

    def one(self, kind: type[Any]) -> Any:
        (work,) = self.work()
        assert isinstance(work, kind)
        return work

    def later(self, seconds: float = 10.0) -> Driver:
        self.now += seconds
        return self

    def agree(self, given: Agreement) -> Driver:
        self.core.agreed(self.one(Agree), given, self.now)
        return self

    def begin(self, given: Agreement | None = None) -> Driver:
        """Requested, agreed, saved."""
        self.core.request("new", self.now)
        self.agree(given or agreement())
        self.core.begun(self.one(Begin), self.now)
        return self

    def load(self, *works: Work) -> list[Work]:
        for work in works:
            assert isinstance(work, Load)
            self.core.loaded(work, PART, self.now)
        return self.work()

    def states(self) -> list[str]:
        states = [after.value for _, after in self.core.changes]
        self.core.changes.clear()
        return states


def saved(
    given: Agreement, parts: int, *, state: BootstrapState = BootstrapState.LOADING, **more: Any
) -> BootstrapProgress:
    return BootstrapProgress("r", given, state.value, parts, 2 * parts, 16 * parts, reason="saved", **more)


# -- the way through ------------------------------------------------------------------------------------------


def test_all_states_in_their_order() -> None:
    d = Driver(snapshot_connections=2)
    given = agreement()
    assert d.work() == []
    assert d.core.state is None
    assert d.core.request("new", d.now)
    asked = d.one(Agree)
    assert (asked.stream, asked.again) == ("s", None)
    assert d.work() == []  # nothing is handed out twice
    d.core.agreed(asked, given, d.now)
    begin = d.one(Begin)
    assert (begin.agreement, begin.syncs, begin.reason) == (given, 1, "new")
    assert d.work() == []
    d.core.begun(begin, d.now)
    first, second = d.work()
    (apply,) = d.load(first)
    assert isinstance(apply, Apply)
    assert (apply.number, apply.part, apply.first, apply.last, apply.parts_after) == (
        0, PART, True, False, 1,
    )  # fmt: skip
    assert d.load(second) == []  # one part is applied at a time, and no more than two are in memory
    assert len(d.core.under_way) == 1
    d.core.applied(apply, 2, d.now)
    third, apply = d.work()
    assert isinstance(third, Load)
    assert isinstance(apply, Apply)
    assert (third.number, apply.number, apply.rows, apply.bytes) == (2, 1, 2, 16)
    assert d.left == []
    assert d.load(third) == []
    assert d.left == [given]  # as soon as nothing is left to load
    d.core.applied(apply, 2, d.now)
    apply = d.one(Apply)
    assert (apply.number, apply.first, apply.last) == (2, False, True)
    assert d.core.state is BootstrapState.LOADING
    d.core.applied(apply, 2, d.now)
    drain = d.one(Drain)
    assert drain.agreement is given
    assert d.work() == []
    d.core.drained(d.now)
    assert d.work() == []
    assert d.states() == ["requested", "agreed", "loading", "draining", "online"]
    assert (d.core.parts.applied, d.core.parts.rows, d.core.parts.bytes, d.core.attempts) == (3, 6, 48, 1)
    d.core.drained(d.now)  # said once more, it means nothing
    d.core.gone("later", d.now)  # what is over cannot be lost
    d.core.failed(None, AWAY, d.now)
    assert d.states() == []
    assert not d.core.under_way


def test_every_state_is_left_and_those_before_draining_survive_a_failure_and_a_loss() -> None:
    assert set(BOOTSTRAP_TRANSITIONS) == set(BootstrapState)
    reached = {after for moves in BOOTSTRAP_TRANSITIONS.values() for after in moves.values()}
    assert reached == set(BootstrapState)
    for state, moves in BOOTSTRAP_TRANSITIONS.items():
        assert set(moves.values()) - {state}, state
        assert all(
            after is BootstrapState.REQUESTED for event, after in moves.items() if event.name in ("FAILED", "GONE")
        )


def test_a_snapshot_without_parts_is_applied_once_so_that_the_target_is_emptied() -> None:
    d = Driver().begin(agreement(0))
    apply = d.one(Apply)
    assert (apply.number, apply.part, apply.first, apply.last, apply.parts_after) == (
        0, PartRows((), (), ()), True, True, 0,
    )  # fmt: skip
    assert len(d.left) == 1
    d.core.applied(apply, 0, d.now)
    assert d.core.state is BootstrapState.DRAINING
    assert d.core.parts.applied == 0


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_no_more_parts_are_in_memory_than_there_are_connections(connections: int) -> None:
    d = Driver(snapshot_connections=connections).begin(agreement(20))
    loads = d.work()
    assert [work.number for work in loads if isinstance(work, Load)] == list(range(connections))
    assert d.load(*loads[1:]) == []  # the first is not there: nothing to apply, nothing more to load
    apply = d.load(loads[0])
    assert len(apply) == 1
    d.core.applied(apply[0], 2, d.now)  # type: ignore[arg-type]
    assert [work.number for work in d.work() if isinstance(work, Load)] == [connections]


def test_one_under_way_is_not_asked_for_again_one_that_drains_or_is_over_is() -> None:
    d = Driver()
    assert d.core.request("first", 0.0)
    assert not d.core.request("second", 0.0)
    d.agree(agreement(1))
    assert not d.core.request("second", 0.0)
    d.core.begun(d.one(Begin), 0.0)
    assert not d.core.request("second", 0.0)
    assert d.core.reason == "first"
    (apply,) = d.load(*d.work())
    d.core.applied(apply, 2, 0.0)  # type: ignore[arg-type]
    drain = d.one(Drain)
    assert d.core.request("pruned meanwhile", 0.0)
    assert drain not in d.core.under_way
    assert d.core.full_syncs.count(0.0) == 1
    d.agree(agreement(1, at=200))
    assert d.one(Begin).syncs == 2
    assert d.states() == ["requested", "agreed", "loading", "draining", "requested", "agreed"]


# -- what fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["the same", "another cut", "another position"])
def test_a_source_that_fails_while_loading_is_asked_for_the_same_again(again: str) -> None:
    d = Driver().begin(first := agreement(4))
    loads = d.work()
    (apply,) = d.load(loads[0])
    d.core.applied(apply, 2, d.now)  # type: ignore[arg-type]
    more = d.work()
    d.core.failed(more[0], AWAY, d.now)
    assert d.core.state is BootstrapState.REQUESTED
    assert d.core.retry.error is AWAY
    assert d.work() == []
    assert d.left == [first]
    assert not d.core.under_way
    d.core.loaded(loads[1], PartRows((), (), ()), d.now)  # type: ignore[arg-type]
    assert d.core.next_retry(d.now) == pytest.approx(d.now + 0.1)
    d.later()
    asked = d.one(Agree)
    assert asked.again is first
    second = {
        "the same": agreement(4, id="2"),
        "another cut": agreement(5, id="2"),
        "another position": agreement(4, at=101, id="2"),
    }[again]
    d.core.agreed(asked, second, d.now)
    assert d.core.agreement is second
    if again == "the same":
        assert (d.core.state, d.core.parts.applied, d.core.full_syncs.count(d.now)) == (BootstrapState.LOADING, 1, 1)
        assert [work.number for work in d.work() if isinstance(work, Load)] == [1, 2]
    else:
        assert (d.core.state, d.core.parts.applied, d.core.parts.rows, d.core.full_syncs.count(d.now)) == (
            BootstrapState.AGREED,
            0,
            0,
            2,
        )
        assert d.one(Begin).agreement is second
    assert d.core.attempts == 2


def test_what_was_loaded_when_the_source_failed_is_not_loaded_again() -> None:
    d = Driver(snapshot_connections=3).begin(agreement(4))
    loads = d.work()
    d.load(loads[1])
    d.core.failed(None, AWAY, d.now)
    d.later().agree(agreement(4))
    assert [work.number for work in d.work() if isinstance(work, Load)] == [0, 2]


def test_a_part_in_hand_when_the_source_fails_counts() -> None:
    d = Driver().begin(agreement(2))
    loads = d.work()
    (apply,) = d.load(loads[0])
    d.core.failed(loads[1], AWAY, d.now)
    assert list(d.core.under_way) == [apply]
    d.core.applied(apply, 2, d.now)  # type: ignore[arg-type]
    assert (d.core.state, d.core.parts.applied) == (BootstrapState.REQUESTED, 1)
    assert d.work() == []  # the source's pause goes on
    d.later().agree(agreement(2))
    loads = d.work()
    (apply,) = d.load(*loads)
    d.core.failed(None, AWAY, d.now)
    d.core.applied(apply, 2, d.now)  # type: ignore[arg-type]
    assert d.core.state is BootstrapState.DRAINING  # it was the last one: the source is not needed any more
    assert isinstance(d.one(Drain), Drain)


def test_pauses_double_up_to_their_bound_and_begin_anew_after_a_success() -> None:
    d = Driver(retry_min=1.0, retry_max=5.0)
    d.core.request("new", d.now)
    pauses = []
    for _ in range(5):
        d.core.failed(d.one(Agree), AWAY, d.now)
        due = d.core.next_retry(d.now)
        assert due is not None
        pauses.append(due - d.now)
        d.now = due
    assert pauses == [1, 2, 4, 5, 5]
    assert d.core.statistics(d.now - 1)["retry_in"] == 1
    d.agree(agreement())
    d.core.begun(d.one(Begin), d.now)
    first, second = d.work()
    d.load(first)
    d.core.failed(second, AWAY, d.now)
    assert d.core.next_retry(d.now) == d.now + 1
    assert d.core.next_retry(d.now + 1) is None


def test_who_finds_the_source_busy_waits_a_random_time_and_not_longer_each_time() -> None:
    d = Driver(retry_min=0.5, retry_max=5.0)
    d.core.request("new", 0.0)
    for share, pause in ((1.0, 5.0), (0.5, 2.5), (0.0, 0.5), (1.0, 5.0)):
        d.core.retry.jitter = lambda share=share: share  # type: ignore[misc]
        d.core.failed(d.one(Agree), SnapshotBusy("the source", 4), d.now)
        due = d.core.next_retry(d.now)
        assert due == d.now + pause
        d.now = due


def test_an_agreement_that_cannot_be_saved_is_saved_later_and_the_source_is_not_asked_again() -> None:
    d = Driver()
    d.core.request("new", 0.0)
    d.agree(first := agreement())
    d.core.failed(d.one(Begin), AWAY, d.now)
    assert d.core.state is BootstrapState.AGREED
    assert d.work() == []
    assert d.left == []
    begin = d.later().one(Begin)
    assert (begin.agreement, begin.syncs) == (first, 1)
    d.core.failed(None, AWAY, d.now)  # now the source goes away
    assert d.core.state is BootstrapState.REQUESTED
    d.core.begun(begin, d.now)  # too late
    d.later().agree(agreement(id="2"))
    assert d.one(Begin).syncs == 1  # the same, and never saved: no other full sync


def test_a_part_that_cannot_be_saved_is_applied_later_and_not_loaded_again() -> None:
    d = Driver().begin(agreement(1))
    (apply,) = d.load(*d.work())
    d.core.failed(apply, AWAY, d.now)
    assert d.core.state is BootstrapState.LOADING
    assert d.work() == []
    assert isinstance(d.later().one(Apply), Apply)


def test_draining_that_fails_is_tried_again_after_a_pause() -> None:
    d = Driver().begin(agreement(0))
    d.core.applied(d.one(Apply), 0, d.now)
    d.core.failed(d.one(Drain), AWAY, d.now)
    assert d.core.state is BootstrapState.DRAINING
    assert d.work() == []
    assert isinstance(d.later().one(Drain), Drain)


def test_a_part_that_cannot_be_applied_at_all_stops_it_until_resumed() -> None:
    d = Driver().begin(agreement(2))
    loads = d.work()
    (apply,) = d.load(loads[0])
    d.core.stopped(apply, error := ValueError("poison"))  # type: ignore[arg-type]
    assert d.core.statistics(d.now)["stopped"]
    assert d.later().work() == []
    assert len(d.left) == 1  # nothing is held open for it at the source
    assert d.core.next_retry(d.now) is None
    assert d.core.stopped_by is d.core.retry.error is error
    d.core.stopped(apply, ValueError("late"))  # type: ignore[arg-type]
    assert d.core.stopped_by is error
    d.core.resume(d.now)
    d.core.resume(d.now)
    d.agree(agreement(2))
    (load, apply) = d.work()
    assert isinstance(load, Load)
    assert isinstance(apply, Apply)
    assert (load.number, apply.number) == (1, 0)


@pytest.mark.parametrize("how", ["said", "by a load", "after the apply", "while draining"])
def test_a_snapshot_that_is_gone_begins_anew_from_the_first_part(how: str) -> None:
    d = Driver().begin(agreement(2))
    loads = d.work()
    (apply,) = d.load(loads[0])
    assert isinstance(apply, Apply)
    if how == "said":
        d.core.gone("another epoch", d.now)
        assert d.core.retry.error == "another epoch"
    elif how == "by a load":
        d.core.failed(loads[1], SnapshotGone("s", "pruned"), d.now)
    else:
        d.core.applied(apply, 2, d.now)
        d.load(loads[1])
        (last,) = d.core.under_way
        if how == "while draining":
            d.core.applied(last, 2, d.now)  # type: ignore[arg-type]
            assert isinstance(d.one(Drain), Drain)
        d.core.gone("another epoch", d.now)
        apply = last if how == "after the apply" else None  # type: ignore[assignment]
    assert (d.core.state, d.core.parts.applied, d.core.parts.rows, d.core.agreement) == (
        BootstrapState.REQUESTED,
        0,
        0,
        None,
    )
    asked = d.later().one(Agree)
    assert asked.again is None
    assert d.core.attempts == 2
    d.core.agreed(asked, agreement(2, at=200), d.now)
    if apply is not None:
        assert d.work() == []  # a part of the former snapshot is still being applied
        assert list(d.core.under_way) == [apply]
        d.core.applied(apply, 2, d.now)
        assert d.core.parts.applied == 0
    assert d.one(Begin).syncs == 2


def test_an_agreement_that_comes_too_late_is_left() -> None:
    d = Driver()
    d.core.request("new", 0.0)
    asked = d.one(Agree)
    d.core.failed(None, AWAY, d.now)
    d.core.agreed(asked, late := agreement(), d.now)
    assert d.core.state is BootstrapState.REQUESTED
    assert d.work() == []
    assert d.left == [late]
    d.core.failed(asked, AWAY, d.now)
    d.later().one(Agree)
    d.core.gone("nothing is there to lose", d.now)
    assert d.core.state is BootstrapState.REQUESTED


def test_before_it_was_requested_nothing_is_lost() -> None:
    d = Driver()
    d.core.gone("another epoch", 0.0)
    d.core.failed(None, AWAY, 0.0)
    assert d.core.state is None
    assert d.core.next_retry(0.0) is None
    assert orjson.loads(orjson.dumps(d.core.statistics(0.0))) == {
        "state": None, "reason": "", "source": "", "rows": 0, "rows_total": None, "bytes": 0, "parts": 0,
        "parts_total": None, "eta": None, "attempts": 0, "error": None, "stopped": False, "syncs": 0, "alarm": False,
        "retry_in": None,
    }  # fmt: skip


# -- what is saved --------------------------------------------------------------------------------------------


def test_a_restart_goes_on_with_the_next_part() -> None:
    d = Driver()
    d.core.restore(saved(agreement(3), 2, syncs=2, age=600.0), d.now)
    assert (d.core.state, d.core.parts.applied, d.core.parts.rows, d.core.reason) == (
        BootstrapState.REQUESTED,
        2,
        4,
        "saved",
    )
    asked = d.one(Agree)
    assert asked.again == agreement(3)
    d.core.agreed(asked, agreement(3, id="2"), d.now)
    assert d.states() == ["requested", "agreed", "loading"]
    assert d.one(Load).number == 2
    assert d.core.full_syncs.count(d.now) == 2
    assert d.core.full_syncs.count(d.now + 3_001) == 0


def test_a_restart_with_smaller_parts_asks_for_them_while_nothing_is_applied() -> None:
    """The first part may be what it dies of: too large for its memory, it would be so at each start."""
    large = agreement(3, rows=50)
    d = Driver(snapshot_part_rows=20)
    d.core.restore(saved(large, 0, id="one", syncs=1), d.now)
    asked = d.one(Agree)
    assert asked.again is None
    d.core.failed(asked, AWAY, d.now)
    d.later()
    asked = d.one(Agree)
    assert asked.again is None
    d.core.agreed(asked, small := agreement(8, at=110, rows=20), d.now)
    begin = d.one(Begin)
    assert (begin.agreement, begin.syncs) == (small, 2)
    d.core.begun(begin, d.now, "two")
    d.core.failed(None, AWAY, d.now)
    d.later()
    assert d.one(Agree).again is small
    # The source may not care, and has the same again.
    d = Driver(snapshot_part_rows=20)
    d.core.restore(saved(large, 0, id="one"), d.now)
    d.agree(agreement(3, rows=50, id="2"))
    assert (d.core.state, d.core.id) == (BootstrapState.LOADING, "one")


@pytest.mark.parametrize("why", ["applied", "as asked", "unknown", "a twin's", "over"])
def test_a_restart_goes_on_with_the_parts_as_they_are(why: str) -> None:
    given = agreement(3, rows={"as asked": 40, "unknown": -1}.get(why, 50))
    d = Driver(snapshot_part_rows=20)
    if why == "a twin's":  # of other settings perhaps: two would replace one another's for ever
        d.core.request("new", d.now)
        d.agree(agreement(2))
        d.work()
    if why == "over":
        d.core.restore(saved(agreement(3), 3, state=BootstrapState.ONLINE, id="zero"), d.now)
        d.work()
        d.core.drained(d.now)
    d.core.restore(saved(given, int(why == "applied"), id="one"), d.now)
    assert d.one(Agree).again is given


def test_what_is_saved_as_applied_is_only_drained() -> None:
    for state in (BootstrapState.DRAINING, BootstrapState.ONLINE):
        d = Driver()
        d.core.restore(saved(agreement(3), 3, state=state), d.now)
        assert isinstance(d.one(Drain), Drain)
        d.core.restore(saved(agreement(3), 3, state=state), d.now)  # known
        assert d.states() == ["requested", "draining"]
        assert not unfinished(saved(agreement(3), 3, state=state))
    assert unfinished(saved(agreement(0), 0))


def test_a_twin_that_was_faster_is_followed() -> None:
    d = Driver(snapshot_connections=3).begin(agreement(6))
    loads = d.work()
    (apply,) = d.load(loads[0], loads[1])
    d.core.failed(apply, ReaderMoved("r", "s", "", 0), d.now)
    d.core.restore(saved(agreement(6), 2), d.now)
    assert (d.core.state, d.core.parts.applied, d.core.parts.rows) == (BootstrapState.LOADING, 2, 4)
    assert list(d.core.under_way) == [loads[2]]
    (apply,) = [work for work in d.load(loads[2]) if isinstance(work, Apply)]
    assert (apply.number, apply.rows) == (2, 4)
    d.core.restore(saved(agreement(6), 4), d.now)  # while it is in hand
    assert apply in d.core.under_way
    assert [work for work in d.work() if isinstance(work, Apply)] == []
    d.core.failed(apply, ReaderMoved("r", "s", "", 2), d.now)
    assert d.core.parts.applied == 4
    d.core.restore(saved(agreement(6), 6, state=BootstrapState.DRAINING), d.now)
    assert isinstance(d.one(Drain), Drain)


@pytest.mark.parametrize("mine", ["requested", "agreed", "loading", "online"])
def test_what_a_twin_began_is_adopted(mine: str) -> None:
    d = Driver()
    d.core.request("mine", 0.0)
    if mine != "requested":
        d.agree(agreement(1))
        begin = d.one(Begin)
    if mine in ("loading", "online"):
        d.core.begun(begin, d.now)
        (apply,) = d.load(*d.work())
    if mine == "online":
        d.core.applied(apply, 2, d.now)  # type: ignore[arg-type]
        assert isinstance(d.one(Drain), Drain)
        d.core.drained(d.now)
    d.core.restore(saved(other := agreement(3, at=200), 1), d.now)
    assert (d.core.state, d.core.parts.applied, d.core.reason) == (BootstrapState.REQUESTED, 1, "saved")
    if mine == "loading":
        d.core.applied(apply, 2, d.now)  # type: ignore[arg-type]
        assert d.core.parts.applied == 1
    asked = d.one(Agree)
    assert asked.again is other
    d.core.agreed(asked, other, d.now)
    assert [work.number for work in d.work() if isinstance(work, Load)] == [1, 2]


def test_the_same_agreement_begun_by_a_twin_is_not_begun_once_more() -> None:
    d = Driver()
    d.core.request("mine", 0.0)
    d.agree(agreement(3))
    begin = d.one(Begin)
    d.core.restore(saved(agreement(3), 1), d.now)
    assert d.core.state is BootstrapState.LOADING
    d.core.begun(begin, d.now)
    assert [work.number for work in d.work() if isinstance(work, Load)] == [1, 2]
    d.core.restore(saved(agreement(3), 0), d.now)  # the twin has begun it anew
    assert (d.core.state, d.core.parts.applied) == (BootstrapState.REQUESTED, 0)


def test_another_bootstrap_of_the_same_snapshot_is_adopted() -> None:
    """The target was emptied since: what is loaded and in hand is of the one before, and so is what is applied."""
    d = Driver()
    d.core.restore(saved(agreement(6), 1, id="one"), d.now)
    d.agree(agreement(6))
    loads = d.work()
    apply = next(work for work in d.load(*loads) if isinstance(work, Apply))
    assert (apply.number, apply.id) == (1, "one")
    d.core.restore(saved(agreement(6), 1, id="one"), d.now)
    assert (d.core.state, d.core.id) == (BootstrapState.LOADING, "one")
    d.core.restore(saved(agreement(6), 1, id="other"), d.now)
    assert (d.core.state, d.core.id, d.core.parts.applied) == (BootstrapState.REQUESTED, "other", 1)
    d.agree(agreement(6))
    again = d.work()
    assert [work.number for work in again if isinstance(work, Load)] == [1, 2]
    d.core.applied(apply, 2, d.now)
    assert d.core.parts.applied == 1, "it was applied to what the other one has emptied"
    apply = next(work for work in d.load(*again) if isinstance(work, Apply))
    assert (apply.number, apply.id) == (1, "other")


def test_a_snapshot_that_a_twin_has_loaded_once_more_is_drained_once_more() -> None:
    d = Driver()
    d.core.restore(saved(agreement(3), 3, state=BootstrapState.DRAINING, id="one"), d.now)
    assert isinstance(d.one(Drain), Drain)
    d.core.drained(d.now)
    d.core.restore(saved(agreement(3), 3, state=BootstrapState.DRAINING, id="other"), d.now)
    assert isinstance(d.one(Drain), Drain)
    assert d.core.id == "other"


# -- numbers --------------------------------------------------------------------------------------------------


def test_too_many_full_syncs_raise_the_alarm_and_the_pauses() -> None:
    d = Driver(full_sync_alarm=3, retry_max=5.0)
    d.core.request("new", d.now)
    pauses = []
    for number in range(12):
        d.agree(agreement(at=100 + number))
        assert d.core.full_syncs.alarm(d.now) is (d.core.full_syncs.count(d.now) > 3)
        d.core.gone("pruned", d.now)
        due = d.core.next_retry(d.now)
        assert due is not None
        pauses.append(due - d.now)
        d.now = due
    assert pauses[2] <= 5.0
    assert pauses[3:] == pytest.approx([10, 20, 40, 80, 160, *[LONGEST_PAUSE] * 4])
    assert d.core.statistics(d.now)["alarm"]
    d.later(3_600)
    assert not d.core.full_syncs.alarm(d.now)
    assert d.core.full_syncs.count(d.now) == 0


def test_one_that_was_finished_too_often_is_begun_later_too() -> None:
    d = Driver(full_sync_alarm=2, retry_max=5.0)
    for number in range(3):
        d.begin(agreement(0, at=number))
        d.core.applied(d.one(Apply), 0, d.now)
        d.one(Drain)
        d.core.drained(d.now)
    assert d.core.request("pruned again", d.now)
    assert d.work() == []
    assert d.core.next_retry(d.now) == d.now + 10


@pytest.mark.parametrize(("rows", "eta"), [(2, 30.0), (-1, 30.0), (1, 10.0), (0, 0.0)])
def test_the_time_left_follows_from_what_was_applied_since_loading_began(rows: int, eta: float) -> None:
    d = Driver()
    d.core.restore(saved(agreement(5, rows=rows), 1), d.now)
    d.core.parts.rows = rows if rows > 0 else 0  # as many as that
    assert d.core.statistics(d.now)["eta"] is None
    d.later(1_000).agree(agreement(5, rows=rows))
    assert d.core.statistics(d.now)["eta"] is None
    (apply,) = [work for work in d.load(*d.work()) if isinstance(work, Apply)]
    d.later(10)
    d.core.applied(apply, 2, d.now)
    assert d.core.statistics(d.now)["eta"] == eta
    shown = d.core.statistics(d.now)
    assert shown["rows_total"] == (None if rows < 0 else 5 * rows)
    assert (shown["state"], shown["parts"], shown["parts_total"], shown["source"]) == ("loading", 2, 5, "here")


# -- at random ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(0, 100, 10))
def test_random_walks_end_with_the_table(start: int) -> None:
    finished = handled = 0
    for seed in range(start, start + 10):
        world = walk(seed, 1_000)
        finished += world.saved.finished
        handled += world.saved.handled
    assert finished >= 5
    assert handled >= 100


class HeldOutlivesTheLink(Reader):
    """What was held when the link was lost stays, and what comes over the next one follows it."""

    def disconnected(self) -> None:
        for progress in self.progress.values():
            if progress.state is not ReaderState.BOOTSTRAPPING:
                progress.lose()


class LateWritersAreLive(Reader):
    """A writer first heard while the snapshot loads is followed at once."""

    def _add(self, stream: Followed, writer: str, position: int) -> Progress:
        kept, self.intake.bootstrapping = self.intake.bootstrapping, {}
        try:
            return super()._add(stream, writer, position)
        finally:
            self.intake.bootstrapping = kept

    def _all_of(self, stream: str) -> list[Progress]:
        begins = stream in self.intake.bootstrapping
        return [one for one in super()._all_of(stream) if begins or one.state is ReaderState.BOOTSTRAPPING]


class GoesOnWhereItHeard(Reader):
    """Positions are the larger of the snapshot's and of those heard."""

    def bootstrapped(self, stream: str, positions: Any) -> None:
        heard = {one.writer: max(one.later, one.held.end) for one in self._all_of(stream)}
        writers = positions.keys() | heard.keys()
        super().bootstrapped(stream, {name: max(positions.get(name, 0), heard.get(name, 0)) for name in writers})


class BoundedAlone(HeldLines):
    """The lines of other writers do not count."""

    def overflows(self, item: Any) -> bool:
        kept, others = self.intake.settings, max(0, self.intake.buffer_bytes - self.size)
        self.intake.settings = attrs.evolve(kept, full_sync_buffer_limit=kept.full_sync_buffer_limit + others)
        try:
            return super().overflows(item)
        finally:
            self.intake.settings = kept


class NoBoundOverAll(Reader):
    """The bound holds for each writer alone."""

    def _add(self, stream: Followed, writer: str, position: int) -> Progress:
        progress = super()._add(stream, writer, position)
        progress.held = BoundedAlone(self.intake, buffered=progress.held.buffered)
        return progress


class LateAnswersCount(Bootstrap):
    """A part counts as loaded though its question was given up."""

    def loaded(self, work: Load, part: PartRows, now: float) -> None:
        self._handed_out.add([work])
        super().loaded(work, part, now)


class NothingIsInHand(Bootstrap):
    """The next snapshot is begun while a part of the former one is being applied."""

    def _plan(self, now: float) -> list[Work]:
        self._handed_out.in_hand = None
        return super()._plan(now)


class OtherAgreementsGoOn(Bootstrap):
    """The parts of one snapshot are counted as those of another."""

    def agreed(self, work: Agree, agreement: Agreement, now: float) -> None:
        if self.agreement is not None:
            self.agreement = agreement
        super().agreed(work, agreement, now)


class TheNewLogIsSavedAtOnce(Process):
    """A restart knows nothing of the other log that the snapshot is for."""

    def change_epoch(self, now: float) -> None:
        if self.log.epoch != self.reader.epoch:
            self.saved.epoch, self.saved.positions, self.saved.bootstrap = self.log.epoch, dict(self.log.floors), None
        super().change_epoch(now)


def variant(broken: type[Any]) -> type[Process]:
    if issubclass(broken, Reader):
        return type("Broken", (Process,), {"reader_class": broken})
    if issubclass(broken, Bootstrap):
        return type("Broken", (Process,), {"bootstrap_class": broken})
    return broken


# What is broken, and where it shows: the trials among which the walk notices it soonest.
BROKEN: list[tuple[type[Any], tuple[str, ...]]] = [
    (HeldOutlivesTheLink, ("cut", "ask")),
    (LateWritersAreLive, ("ask",)),
    (GoesOnWhereItHeard, ("ask",)),
    (NoBoundOverAll, ("ask",)),
    (LateAnswersCount, ("source_dies", "ask")),
    (NothingIsInHand, ("source_dies", "ask")),
    (OtherAgreementsGoOn, ("prune", "source_dies", "ask")),
    (TheNewLogIsSavedAtOnce, ("restore_backup", "kill")),
]


@pytest.mark.parametrize(("broken", "trials"), BROKEN, ids=[broken.__name__ for broken, _ in BROKEN])
def test_the_walk_notices_what_is_broken(broken: type[Any], trials: tuple[str, ...]) -> None:
    for seed in range(300):
        try:
            walk(seed, 1_000, variant(broken), trials)
        except (AssertionError, KeyError, RowError):
            return
    pytest.fail("not noticed")


# -- pacing ---------------------------------------------------------------------------------------------------------


def test_a_bootstrap_of_a_rate_rests_behind_each_part_for_the_rest_of_its_time() -> None:
    d = Driver(snapshot_rate=4.0, snapshot_connections=1)  # two rows a part: half a second
    d.begin(agreement(5))
    (apply,) = d.load(*d.work())
    d.later(0.2)
    d.core.applied(apply, 2, d.now)
    assert d.work() == []
    assert d.core.next_retry(d.now) == 0.5
    assert d.core.statistics(d.now)["retry_in"] is None, "it rests, and nothing failed"
    d.later(0.3)
    load = d.one(Load)
    assert load.number == 1
    d.later(0.1)
    (apply,) = d.load(load)
    d.later(0.3)
    d.core.applied(apply, 2, d.now)
    assert d.core.next_retry(d.now) == 1.0, "loading is in the time as well"
    (apply,) = d.later(0.2).load(d.one(Load))
    d.later(5.0)  # the target is slow
    d.core.applied(apply, 2, d.now)
    (apply,) = d.load(d.one(Load))
    d.core.applied(apply, 2, d.now)
    assert d.core.next_retry(d.now) == d.now + 0.5, "the time lost is not made up for"


def test_the_last_part_of_a_paced_bootstrap_is_followed_by_no_rest() -> None:
    d = Driver(snapshot_rate=0.001)
    d.begin(agreement(1))
    (apply,) = d.load(*d.work())
    d.core.applied(apply, 2, d.now)
    d.one(Drain)


def test_what_fails_in_a_rest_is_tried_again_at_its_own_time() -> None:
    d = Driver(snapshot_rate=0.1, snapshot_connections=2, retry_min=1.0)
    d.begin()
    first, second = d.work()
    (apply,) = d.load(first)
    d.core.applied(apply, 2, d.now)
    assert d.core.next_retry(d.now) == 20.0
    d.core.failed(second, AWAY, d.now)
    assert d.core.next_retry(d.now) == 1.0
    again = d.later(1.0).one(Agree)
    assert again.again is not None
    d.core.agreed(again, again.again, d.now)
    assert d.work() == []
    assert d.core.next_retry(d.now) == 20.0


def test_a_rate_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="snapshot_rate"):
        Settings(snapshot_rate=0.0)
