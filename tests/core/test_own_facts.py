"""Which facts under the own name are due to this process's handlers."""

from __future__ import annotations

from busrep.core.handled import OwnFacts
from busrep.core.reader import Reader
from busrep.core.received import Followed
from busrep.settings import Settings
from busrep.stores.interface import KnownWriter

ME, STREAM = ("s", "me"), "s"


class Written:
    """What the own writer says of its stream."""

    def __init__(self) -> None:
        self.answer: tuple[int, bool] | None = (0, False)

    def __call__(self, stream: str) -> tuple[int, bool] | None:
        return self.answer


def own_facts(name: str | None = "me") -> tuple[OwnFacts, Reader, Written]:
    reader = Reader([Followed(STREAM)], settings=Settings(), own=[name] if name else ())
    reader.connected(0.0)
    reader.start_at(STREAM, "me", 0)
    written = Written()
    return OwnFacts(reader, name, written), reader, written


def known(position: int, writer: str = "me") -> KnownWriter:
    return KnownWriter(STREAM, writer, position, 0, True, 1, 0.0)


def due(reader: Reader) -> list[tuple[int, int]]:
    """What is fetched of the own name: (after, up to)."""
    return [(asked.after, asked.upto) for asked in reader.fetches(0.0) if asked.writer == "me"]


def test_what_a_predecessor_left_is_due_and_own_facts_are_not() -> None:
    own, reader, _ = own_facts()
    own.claimed(None, {STREAM: 7})
    assert own.known(known(20, "other")) == 20
    assert own.known(known(20)) == 7
    assert not own.count_as_handled(STREAM)
    own.learn()
    assert due(reader) == [(0, 7)]
    reader.progress[ME].go_on_from(7)
    assert own.count_as_handled(STREAM)


def test_where_own_facts_begin_says_nothing_of_another_log() -> None:
    """A restore came between the claim and the reader's first look at the log."""
    own, reader, _ = own_facts()
    own.claimed("old", {STREAM: 7})
    assert own.count_as_handled(STREAM), "nothing is read yet"
    reader.epoch = "new"
    assert not own.count_as_handled(STREAM)
    assert own.known(known(20)) == 20
    own.learn()
    assert due(reader) == [(0, 20)]
    reader.progress[ME].go_on_from(20)
    assert not own.count_as_handled(STREAM), "they are of the log before"
    reader.epoch = "old"
    assert own.known(known(20)) == 7
    assert own.count_as_handled(STREAM)


def test_without_a_predecessor_own_facts_count_at_once() -> None:
    own, reader, _ = own_facts()
    own.learn()
    assert own.count_as_handled(STREAM)
    assert due(reader) == []


def test_own_facts_behind_a_snapshot_are_due_until_none_is_under_way() -> None:
    own, reader, written = own_facts()
    held = True
    written.answer = (9, True)
    own.bootstrapped(STREAM)
    assert own.any_behind_snapshot
    assert not own.count_as_handled(STREAM)
    own.learn_behind_snapshots(lambda _: held)
    assert due(reader) == [(0, 9)]
    own.learn_behind_snapshots(lambda _: held)  # nothing new
    reader.progress[ME].go_on_from(9)
    held = False
    own.learn_behind_snapshots(lambda _: held)
    assert own.any_behind_snapshot, "one is under way"
    written.answer = (9, False)
    own.learn_behind_snapshots(lambda _: held)
    assert not own.any_behind_snapshot
    assert own.count_as_handled(STREAM)


def test_a_snapshot_of_a_stream_that_is_not_written_here() -> None:
    own, _, written = own_facts()
    written.answer = None
    own.bootstrapped(STREAM)
    assert not own.any_behind_snapshot
    written.answer = (3, False)
    own.bootstrapped(STREAM)
    written.answer = None  # the name was lost meanwhile
    own.learn_behind_snapshots(lambda _: False)
    assert not own.any_behind_snapshot


def test_a_name_that_is_lost_is_another_s() -> None:
    own, reader, _ = own_facts()
    own.known(known(5))
    own.disown({STREAM: 9})
    assert own.name is None
    assert reader.progress[ME].position == 9
    assert own.count_as_handled(STREAM), "there are none any more"
    assert own.known(known(30)) == 30
    own.disown({STREAM: 50})  # again: nothing
    assert reader.progress[ME].position == 9


def test_a_name_that_is_lost_does_not_go_back() -> None:
    own, reader, _ = own_facts()
    reader.progress[ME].go_on_from(20)
    own.disown({STREAM: 9})
    assert reader.progress[ME].position == 20
