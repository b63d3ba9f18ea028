"""The oracle: every invariant can fail. A small run is written down by hand, true at first, then wrong in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.proof.sim.oracle import Oracle
from tests.proof.sim.record import Claimed, Handled, Life, Record, Reported, Sample, Upto
from tests.proof.sim.scenario import LIVE, LOOSE, STRICT, WRITER, Role

E, KEY = "e1", ("orders", "w1")
ROLES = {
    "w1": Role("w1", WRITER),
    "r": Role("r", LOOSE),
    "x": Role("x", STRICT),
    "l": Role("l", LIVE, {"start": "earliest"}),
}


def row(number: int) -> bytes:
    return b"[%d]" % number


@attrs.define
class Run:
    """Facts 1, 2, 3 of w1, committed at seconds 1, 2, 3, sent half a second later, handled by three readers at .9."""

    record: Record = attrs.field(factory=Record)
    history: list[Any] = attrs.field(factory=list)
    effects: list[Any] = attrs.field(factory=list)
    database: list[str] = attrs.field(factory=list)
    roles: dict[str, Role] = ROLES

    def __attrs_post_init__(self) -> None:
        record = self.record
        record.logs[E] = {}
        record.lives += [Life(name, number, 0.0, epochs={KEY[0]: E}) for number, name in enumerate(ROLES, 1)]
        for n in (1, 2, 3):
            self.history.append((E, *KEY, n, (row(n),), float(n), 1))
            record.claimed.append(Claimed(n + 0.5, E, KEY, n - 1, n - 1, None))
            record.claimed.append(Claimed(n + 0.5, E, KEY, n - 1, n, [(n, row(n))]))
            self.effects.append(("x", E, *KEY, n, row(n).decode()))
            for number, name in ((2, "r"), (3, "x"), (4, "l")):
                record.handled.append(Handled(n + 0.9, name, number, E, KEY, [(n, row(n))]))
                record.samples.append(Sample(n + 0.95, name, number, E, KEY, n, "position"))
            record.upto.append(Upto(n + 0.6, E, "orders", n, "r", 2))

    def handled(self, role: str, token: int) -> int:
        """The place of what this role noted of a fact."""
        return next(i for i, one in enumerate(self.record.handled) if (one.role, one.rows[0][0]) == (role, token))

    def look(self) -> set[str]:
        oracle = Oracle(
            self.record, self.roles, (), {name: at for at, name in enumerate(ROLES, 1)}, self.history, 0.0, E, {},
            self.effects, self.database, calm=True,
        )  # fmt: skip
        return {one.invariant for one in oracle.look()}


def test_a_run_in_which_all_is_well() -> None:
    assert Run().look() == set()


def lose(run: Run) -> None:
    del run.record.handled[run.handled("r", 3) :]
    del run.record.samples[-3:]


def skip(run: Run) -> None:
    del run.record.handled[run.handled("r", 2)]


def invert(run: Run) -> None:
    handled, a, b = run.record.handled, run.handled("r", 2), run.handled("r", 3)
    handled[a], handled[b] = handled[b], handled[a]


def abort(run: Run) -> None:
    at = run.handled("l", 2)
    run.record.handled[at] = attrs.evolve(run.record.handled[at], rows=[(2, row(2)), (9, row(9))])


def garble(run: Run) -> None:
    at = run.handled("r", 2)
    run.record.handled[at] = attrs.evolve(run.record.handled[at], rows=[(2, row(7))])


def tear(run: Run) -> None:
    run.history[1] = (E, *KEY, 2, (row(2), row(2)), 2.0, 1)


def early(run: Run) -> None:
    at = run.handled("r", 2)
    run.record.handled[at] = attrs.evolve(run.record.handled[at], at=1.95)


def lost_later(run: Run) -> None:
    skip(run)
    run.record.lost[E, "orders", "w1", 2] = 9.0  # a failover; by then it was owed


def lost_effects(run: Run) -> None:
    run.record.effects.append((4.0, list(run.effects)))
    del run.effects[-1]


def lost_effects_in_a_failover(run: Run) -> None:
    run.record.effects.append((4.0, list(run.effects)))
    run.record.failovers[E] = 4.0
    del run.effects[1]


def given_twice(run: Run) -> None:
    run.record.lost[E, "orders", "w1", 3] = 5.0
    run.history.append((E, *KEY, 3, (row(3),), 6.0, 1))


def given_to_another(run: Run) -> None:
    run.history.append((E, "orders", "w2", 3, (row(3),), 6.0, 1))


def refused(run: Run) -> None:
    run.record.refuse(E, "w1", {"orders": 2})


def twice(run: Run) -> None:
    run.effects.append(run.effects[1])


def unsaved(run: Run) -> None:
    del run.effects[1]


def late_commit(run: Run) -> None:
    run.history[0] = (E, *KEY, 1, (row(1),), 2.7, 1)


def silent_span(run: Run) -> None:
    run.record.claimed.append(Claimed(9.0, E, KEY, 1, 3, None))


def thin_frame(run: Run) -> None:
    run.record.claimed.append(Claimed(9.0, E, KEY, 0, 2, [(2, row(2))]))


def other_bytes(run: Run) -> None:
    run.record.claimed.append(Claimed(9.0, E, KEY, 1, 2, [(2, row(5))]))


def sent_early(run: Run) -> None:
    run.record.claimed.append(Claimed(2.9, E, KEY, 2, 3, [(3, row(3))]))


def ahead(run: Run) -> None:
    run.record.samples.append(Sample(2.5, "r", 2, E, KEY, 2, "position"))


def waited(run: Run) -> None:
    run.record.samples.append(Sample(2.5, "l", 4, E, KEY, 2, "wait_for"))


def linear(run: Run) -> None:
    run.record.upto.append(Upto(2.5, E, "orders", 3, "r", 2))


def zombie(run: Run) -> None:
    run.database.append("fact 3 was committed under incarnation 1, but the writer's is 2")


def noted(run: Run) -> None:
    run.record.breaks("settles", "r is not up")


def lives_run_together(run: Run) -> None:
    for token, text in ((1, "w1 1"), (2, "w1 2")):
        run.record.presence.append((1.0, "r", 2, "row", token, "w1", b'[1,"%b"]' % text.encode()))


def life_goes_back(run: Run) -> None:
    for what, token, text in (("row", 1, "w1 2"), ("reset", 0, ""), ("row", 1, "w1 1")):
        run.record.presence.append((1.0, "r", 2, what, token, "w1", b'[1,"%b"]' % text.encode()))


def reset_for_nothing(run: Run) -> None:
    for what, token in (("row", 1), ("reset", 0), ("row", 2)):
        run.record.presence.append((1.0, "r", 2, what, token, "w1", b'[1,"w1 1"]'))


def missed_for_nothing(run: Run) -> None:
    run.record.presence.append((1.0, "r", 2, "missed", 4, "w1", b"2"))


def presence_inverted(run: Run) -> None:
    for token in (2, 1):
        run.record.presence.append((1.0, "r", 2, "row", token, "w1", b'[1,"w1 1"]'))


@pytest.mark.parametrize(
    ("wrong", "invariant"),
    [
        (lose, "nothing lost"),
        (skip, "no skip"),
        (invert, "no inversion"),
        (abort, "nothing that was not committed"),
        (garble, "the same bytes everywhere"),
        (tear, "the same bytes everywhere"),
        (tear, "exactly once, in order"),
        (early, "no row before its COMMIT"),
        (lost_later, "no skip"),
        (lost_later, "position means handled"),
        (lost_effects, "nothing lost"),
        (lost_effects_in_a_failover, "exactly once, in order"),
        (given_twice, "no ID is given twice"),
        (given_to_another, "no ID is given twice"),
        (refused, "what is refused is not written"),
        (twice, "exactly once, in order"),
        (unsaved, "exactly once, in order"),
        (late_commit, "what is announced is complete"),
        (silent_span, "no row in a POSITION's span"),
        (thin_frame, "a frame carries every row of its span"),
        (other_bytes, "the same bytes everywhere"),
        (sent_early, "no row before its COMMIT"),
        (ahead, "position means handled"),
        (waited, "wait_for means handled"),
        (linear, "below the linear position all is complete"),
        (zombie, "one live incarnation per writer"),
        (noted, "settles"),
        (lives_run_together, "a reset stands between lives"),
        (life_goes_back, "a reset means a new life"),
        (reset_for_nothing, "a reset means a new life"),
        (missed_for_nothing, "nothing is missed without a reason"),
        (presence_inverted, "no inversion"),
    ],
)
def test_what_is_wrong_is_found(wrong: Callable[[Run], None], invariant: str) -> None:
    run = Run()
    wrong(run)
    assert invariant in run.look()


@pytest.mark.parametrize(
    ("claimed", "void", "wrong"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_a_life_goes_back_where_no_claim_knows_the_one_before(claimed: bool, void: bool, wrong: bool) -> None:
    """Under a clock that is behind: there is no claim, or a restore without a word has taken it back."""
    run = Run()
    life_goes_back(run)
    run.record.behind["w1"] = not claimed
    if void:
        run.record.void["f" * 32] = None
    assert run.look() == ({"a reset means a new life"} if wrong else set())


def test_what_was_reported_is_not_lost() -> None:
    run = Run()
    skip(run)
    run.record.reported.append(Reported(1.0, "r", 2, E, KEY, 1, 2, "dead letter"))
    assert run.look() == set()


def test_what_was_reported_to_another_is_lost_all_the_same() -> None:
    run = Run()
    skip(run)
    run.record.reported.append(Reported(1.0, "l", 4, E, KEY, 1, 2, "missed"))
    assert "no skip" in run.look()


def test_a_durable_reader_s_next_life_may_repeat_but_not_skip() -> None:
    run = Run()
    run.record.lives.append(Life("r", 9, 5.0, epochs={KEY[0]: E}))
    run.record.handled.append(Handled(6.0, "r", 9, E, KEY, [(2, row(2))]))
    run.record.handled.append(Handled(6.1, "r", 9, E, KEY, [(3, row(3))]))
    assert run.look() == set()
    run.history.append((E, *KEY, 4, (row(4),), 6.2, 1))
    run.history.append((E, *KEY, 5, (row(5),), 6.3, 1))
    run.record.handled.append(Handled(7.0, "r", 9, E, KEY, [(5, row(5))]))
    assert "no skip" in run.look()


def test_a_restore_puts_saved_positions_back_and_rows_may_come_again() -> None:
    def repeated(role: str, number: int) -> set[str]:
        run = Run()
        run.record.ended[E] = 8.0
        run.record.handled.append(Handled(8.1, role, number, E, KEY, [(2, row(2))]))
        return run.look()

    assert repeated("r", 2) == set()
    assert "no inversion" in repeated("l", 4)  # keeps no positions


def test_what_a_failover_lost_was_right_until_then_and_is_owed_to_nobody_after_it() -> None:
    run = Run()
    run.record.lost[E, "orders", "w1", 3] = 3.7  # it was sent, and one reader has it
    del run.record.handled[run.handled("r", 3)], run.record.handled[run.handled("x", 3)]
    del run.effects[-1]
    run.record.claimed.append(Claimed(9.0, E, KEY, 2, 4, None))
    run.history.append((E, *KEY, 5, (row(5),), 9.5, 1))
    run.record.claimed.append(Claimed(9.6, E, KEY, 2, 5, [(5, row(5))]))
    for number, name in ((2, "r"), (3, "x"), (4, "l")):
        run.record.handled.append(Handled(9.7, name, number, E, KEY, [(5, row(5))]))
    run.effects.append(("x", E, *KEY, 5, row(5).decode()))
    assert run.look() == set()
    run.record.claimed.append(Claimed(3.6, E, KEY, 2, 4, None))
    assert run.look() == {"no row in a POSITION's span"}


def test_a_failover_puts_saved_positions_back_and_rows_may_come_again() -> None:
    run = Run()
    run.record.failovers[E] = 8.0
    run.record.handled.append(Handled(8.1, "r", 2, E, KEY, [(2, row(2))]))
    assert run.look() == set()
    run.record.handled.append(Handled(8.1, "l", 4, E, KEY, [(2, row(2))]))
    assert "no inversion" in run.look()


def test_the_log_of_an_epoch_keeps_what_a_restore_took_away() -> None:
    """What was handled before is held against the log that it was handled of."""
    run = Run()
    run.record.logs["e2"] = {KEY: {1: (row(1),)}}
    for name, number in (("r", 2), ("l", 4), ("x", 3)):
        run.record.handled.append(Handled(9.0, name, number, "e2", KEY, [(1, row(1))]))
    run.effects.append(("x", "e2", *KEY, 1, row(1).decode()))
    assert run.look() == set()
    run.record.handled.append(Handled(9.1, "r", 2, "e2", KEY, [(2, row(2))]))
    assert "nothing that was not committed" in run.look()


def test_a_writer_that_reads_is_owed_what_a_restored_log_holds_under_its_name() -> None:
    run = Run(roles={**ROLES, "w1": Role("w1", WRITER, {"reads": True})})
    assert run.look() == set(), "what it wrote itself"
    run.record.logs[E] = {KEY: {1: (row(1),)}}
    assert run.look() == {"nothing lost"}
    run.record.handled.append(Handled(5.0, "w1", 1, E, KEY, [(1, row(1))]))
    assert run.look() == set()
