"""protocol.md, section 9, rules 12 and 17: what a saved position says of the rows."""

from __future__ import annotations

from typing import Any

import pytest

from busrep.core.delivery import RawBatch
from busrep.core.handled import OldestRows, Reread, SavedPositions
from busrep.errors import PositionsAheadOfTable, PositionTooOld
from busrep.stores.interface import ReaderState

A, B, OTHER = ("s", "a"), ("s", "b"), ("t", "a")
LOG = "e" * 32


def saved_at(**positions: int) -> SavedPositions:
    """{writer of stream s: saved position}."""
    return SavedPositions({("s", writer): at for writer, at in positions.items()})


def test_a_position_is_saved_forwards_only() -> None:
    saved = saved_at(a=5)
    assert saved.change(A, 5) is None
    assert saved.change(A, 3) is None
    assert saved.change(A, 9) == ("s", "a", 5, 9)
    assert saved.at == {A: 5}, "it is not saved before the store has answered"
    saved.confirmed([("s", "a", 5, 9)])
    assert saved.at == {A: 9}


def test_a_snapshot_replaces_what_was_known_of_its_stream() -> None:
    saved = saved_at(a=5, b=7)
    saved.at[OTHER] = 1
    saved.replace_stream("s", {"c": 30})
    assert saved.at == {OTHER: 1, ("s", "c"): 30}


def test_what_was_moved_keeps_back_no_other() -> None:
    saved = saved_at(a=5, b=7)
    changes = [("s", "a", 4, 9), ("s", "b", 7, 9), ("t", "a", 0, 3)]
    assert saved.unmoved(changes, ()) == [("s", "b", 7, 9)]
    assert saved.unmoved(changes, {"s"}) == []


def test_9_17_a_position_above_the_sequence_goes_back_or_stops() -> None:
    saved = saved_at(a=5, b=90)
    error = PositionsAheadOfTable("s", 100, 50)
    changes = [("s", "a", 5, 100), ("s", "b", 90, 95), ("s", "c", 0, 50), ("t", "a", 0, 100)]
    assert saved.above_sequence(error, changes) == ([(A, 5)], [B])


@pytest.mark.parametrize(
    ("known", "before", "found", "back", "after"),
    [
        ({A: 5}, {A: 5}, {A: 5}, [], {A: 5}),
        ({A: 5}, {A: 5}, {A: 9}, [], {A: 9}),
        ({A: 5}, {A: 5}, {A: 3}, [(A, 3)], {A: 3}),
        ({A: 5}, {A: 5}, {}, [(A, 2)], {}),
        ({A: 6}, {A: 5}, {A: 3}, [], {A: 6}),
        ({}, {}, {A: 3}, [], {A: 3}),
        ({}, {}, {}, [], {}),
    ],
    ids=[
        "the same", "another process is further", "a failover took it back", "a failover lost the registration",
        "a handler saved meanwhile", "it was not known", "nobody knows it",
    ],
)  # fmt: skip
def test_9_12_and_9_23_what_the_table_says_is_taken_in(
    known: Any, before: Any, found: Any, back: Any, after: Any
) -> None:
    saved = SavedPositions(dict(known))
    assert saved.compare([A], before, found, lambda _: 2) == back
    assert saved.at == after


BATCH = RawBatch("s", "a", 5, 9, [9], [b"1"], fetched=False, size=1)
NOW: dict[str, Any] = {
    "expected": None, "log_read": LOG, "epoch": LOG, "saved_epoch": LOG, "in_hand": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "changes", "then", "known"),
    [
        (None, {}, Reread.VOID, 5),
        (9, {"epoch": "f" * 32}, Reread.VOID, 5),
        (9, {"saved_epoch": "f" * 32}, Reread.OTHER_LOG, 5),
        (None, {"saved_epoch": "f" * 32}, Reread.OTHER_LOG, 5),
        (9, {"saved_epoch": None}, Reread.HANDLED, 9),
        (5, {}, Reread.NOT_SAVED, 5),
        (5, {"expected": 5}, Reread.NOT_SAVED, 5),
        (5, {"expected": 4}, Reread.BEHIND, 5),
        (5, {"in_hand": False}, Reread.MOVED, 5),
        (3, {}, Reread.MOVED, 3),
        (7, {}, Reread.MOVED, 7),
        (9, {}, Reread.HANDLED, 9),
        (9, {"in_hand": False}, Reread.MOVED, 9),
        (12, {}, Reread.MOVED, 12),
    ],
)
def test_9_12_what_is_saved_decides(saved: int | None, changes: dict[str, Any], then: Reread, known: int) -> None:
    positions = saved_at(a=5)
    assert positions.reread(A, saved, BATCH, **(NOW | changes)) is then
    assert positions.at == {A: known}


def test_9_12_rows_after_what_is_saved_are_not_handled() -> None:
    """The table says what was known, and that is behind these rows' beginning: another batch saved it."""
    assert saved_at(a=7).reread(A, 7, BATCH, **NOW) is Reread.MOVED


def test_9_12_another_process_that_saved_less_moves_nobody_back() -> None:
    """What lies between was handled here, or empty: else it would be saved. The handler is not at fault."""
    positions = saved_at(a=3)
    assert positions.reread(A, 4, BATCH, **NOW) is Reread.BEHIND
    assert positions.at == {A: 4}
    assert SavedPositions().reread(A, 4, BATCH, **NOW) is Reread.MOVED


@pytest.mark.parametrize(
    ("saved", "handled", "moves"), [(19, 5, False), (20, 5, True), (30, 5, True), (20, 20, False), (30, 40, False)]
)
def test_pruned_rows_that_a_peer_has_handled_are_no_loss(saved: int, handled: int, moves: bool) -> None:
    positions = saved_at(a=5)
    assert positions.pruned(A, saved, 20, handled) is moves
    assert positions.at == {A: saved if moves else 5}


def test_positions_are_of_the_bootstrap_that_is_saved_with_them() -> None:
    found = saved_at(w=3)
    found.loaded(ReaderState("e", {}, bootstraps={"s": "1"}), "s", "t")
    assert found.bootstraps == {"s": "1", "t": ""}
    over = ReaderState("e", {("s", "w"): 9, ("t", "w"): 4}, bootstraps={"s": "2"})
    assert found.is_news(over, "s")
    assert not found.is_news(over, "t")
    assert found.is_news(ReaderState("e", {}, loading=frozenset({"t"})), "t")
    assert found.behind_snapshot(over, "s") == {"w": 9}
    assert found.at["s", "w"] == 9
    assert not found.is_news(over, "s")


def test_a_reader_that_was_to_begin_at_the_oldest_row_begins_at_a_later_one_of_those_there_were() -> None:
    oldest = OldestRows()
    oldest.at["s", "w"] = (2, 9)
    assert not oldest.begins_later(PositionTooOld("s", "w", 2, 10), 2)  # written since: it was due
    assert not oldest.begins_later(PositionTooOld("s", "w", 2, 5), 3)  # it has begun
    assert oldest.begins_later(PositionTooOld("s", "w", 2, 5), 2)
    assert oldest.at["s", "w"] == (5, 9)
    del oldest.at["s", "w"]  # they are handed out
    assert not oldest.begins_later(PositionTooOld("s", "w", 5, 6), 5)
