"""Who is believed, by the cores alone: registered writers, incarnations, other logs (rules 9.16 to 9.19)."""

from __future__ import annotations

import attrs
import pytest

from busrep.core.admission import MOST_UNCONFIRMED
from busrep.core.catchup import UpdatesPage
from busrep.core.commands import Name
from busrep.core.delivery import Reset
from busrep.core.framing import MOST_ERRORS, Rows, parse_message
from busrep.core.ids import IdGenerator
from busrep.core.received import Followed
from busrep.core.states import State
from busrep.core.writer import Writer
from busrep.errors import ConfigError, RowError
from busrep.settings import Settings
from busrep.stores.interface import Claim, KnownWriter, Registered, claims_of, silence_of
from busrep.streams import Registry, Stream, checked_stream
from tests.support.reader import Reader

EPOCH, OTHER = "0" * 32, "f" * 32


def announced(writer: str, incarnation: int, line: str, epoch: str = EPOCH) -> bytes:
    return f"SERVER test {epoch}\nNAME {writer} {incarnation}\n{line}".encode()


def reader_of(stream: Followed, claims: dict[tuple[str, str], int] | None = None) -> Reader:
    reader = Reader([stream], epoch=EPOCH)
    if claims is not None:
        reader.admission.registered(claims)
        for name, writer in claims:
            reader.start_at(name, writer, 5)
    return reader


def joined(reader: Reader, claims: dict[tuple[str, str], int]) -> dict[tuple[str, str, int | None], int]:
    reader.admission.registered(claims)
    return reader.admission.joined()


def test_9_18_a_line_of_a_writer_that_is_not_registered_moves_nothing_and_asks_for_the_registry() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.receive(b"POSITION s ghost 9 9", 0.0)
    assert not reader.admission.registry_doubted  # it does not say who it is: no reason to ask
    reader.receive(announced("w2", 3, "POSITION s w2 9 9"), 0.0)
    reader.receive(announced("w2", 3, "RDATA s w2 11 [1]"), 0.0)
    assert reader.admission.registry_doubted
    assert ("s", "w2") not in reader.progress
    assert ("s", "ghost") not in reader.progress
    assert reader.counters.unregistered_lines == 3
    assert joined(reader, {("s", "w1"): 7, ("s", "w2"): 3}) == {("s", "w2", 3): 11}
    assert reader.admission.registry_doubted  # until that is asked for, which may fail
    assert reader.admission.joined() == {("s", "w2", 3): 11}
    reader.admission.confirmed(("s", "w2", 3))
    assert not reader.admission.registry_doubted
    assert reader.admission.joined() == {}


def test_9_18_an_answer_of_the_registry_may_be_older_than_what_was_heard() -> None:
    """Asked before, or of a replica that lags. A writer without beats says nothing again for long."""
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    beats = reader.settings.silent_after_beats
    reader.receive(announced("w2", 3, "POSITION s w2 0 9"), 0.0)
    for _ in range(beats - 1):
        assert joined(reader, {("s", "w1"): 7}) == {}
        assert reader.admission.registry_doubted
    reader.receive(announced("w3", 4, "RDATA s w3 11 [1]"), 0.0)
    assert joined(reader, {("s", "w1"): 7, ("s", "w2"): 3}) == {("s", "w2", 3): 9}
    for _ in range(beats - 2):
        assert joined(reader, {("s", "w1"): 7}) == {}
        assert reader.admission.registry_doubted
    assert joined(reader, {("s", "w1"): 7}) == {}
    assert not reader.admission.registry_doubted  # whoever said that is nobody
    assert joined(reader, {("s", "w1"): 7, ("s", "w3"): 4}) == {}


def test_9_18_a_life_that_began_while_one_before_was_confirmed_is_asked_for() -> None:
    reader = reader_of(Followed("s"), {})
    reader.receive(announced("w", 1, "POSITION s w 0 9"), 0.0)
    assert joined(reader, {("s", "w"): 1}) == {("s", "w", 1): 9}
    reader.receive(announced("w", 2, "POSITION s w 0 20"), 0.0)
    reader.admission.registered({("s", "w"): 2})
    reader.admission.confirmed(("s", "w", 1))
    assert reader.admission.joined() == {("s", "w", 2): 20}


def test_9_18_what_was_said_in_the_log_before_is_no_word_in_the_new_one() -> None:
    """Its writer may have the same incarnation there, and an open fact below what it said."""
    reader = reader_of(Followed("s"), {})
    reader.receive(announced("w", 1, "POSITION s w 0 9"), 0.0)
    reader.rebase(OTHER, {})
    assert joined(reader, {("s", "w"): 1}) == {}


def test_9_18_what_another_incarnation_said_is_no_word_of_the_registered_one() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.receive(announced("w2", 99, "POSITION s w2 9 9"), 0.0)
    assert joined(reader, {("s", "w1"): 7, ("s", "w2"): 3}) == {}


def test_9_18_a_bounded_number_of_writers_is_noted_for_the_registry() -> None:
    reader = reader_of(Followed("s"), {})
    for number in range(MOST_UNCONFIRMED + 10):
        reader.receive(announced(f"w{number}", 1, f"POSITION s w{number} 1 1"), 0.0)
    claims = {("s", f"w{number}"): 1 for number in range(MOST_UNCONFIRMED + 10)}
    assert len(joined(reader, claims)) == MOST_UNCONFIRMED


STRAY = b"NAME w 1"  # what anybody on the channel can say


def test_a_stray_name_makes_no_native_writer_of_a_foreign_one() -> None:
    """Its rows prove nothing of what was before them, whatever somebody said under its name."""
    reader = reader_of(Followed("s", foreign_writers=True), {})
    reader.start_at("s", "w", 5)
    for line in (b"POSITION s w 5 5", b"RDATA s w 6 1", STRAY):
        reader.receive(line, 0.0)
    reader.connected(1.0)  # row 7 is lost meanwhile
    for line in (b"POSITION s w 5 5", b"RDATA s w 8 1"):  # the first is an old one
        reader.receive(line, 1.0)
    assert reader.progress["s", "w"].position == 6


@pytest.mark.parametrize("stray", [STRAY, STRAY + b"\nPOSITION s w 50 50"])
def test_a_stray_name_does_not_hide_that_a_foreign_writer_began_anew(stray: bytes) -> None:
    reader = reader_of(Followed("s", resettable=True, fetchable=False, foreign_writers=True), {})
    for line in (b"POSITION s w 0 0", b"RDATA s w 50 1", stray, b"POSITION s w 50 50"):
        reader.receive(line, 0.0)
    for line in (b"POSITION s w 3 3", b"RDATA s w 4 1"):
        reader.receive(line, 1.0)
    assert reader.take("s", "w") == Reset("s", "w", 3)
    reader.done("s", "w")
    assert getattr(reader.take("s", "w"), "tokens", None) == [4]


def test_pages_of_a_foreign_writer_count_whatever_incarnation_was_said() -> None:
    """The reference system's answers name none: refused, the pair would be stale for good."""
    reader = reader_of(Followed("s", resettable=True, foreign_writers=True), {})
    for line in (b"POSITION s w 0 0", b"RDATA s w 6 1", STRAY + b"\nPOSITION s w 6 6", b"POSITION s w 9 9"):
        reader.receive(line, 0.0)
    (asked,) = reader.fetches(0.0)
    reader.receive_page(asked, UpdatesPage("s", "w", asked.after, 6, [6], [b"1"], False, EPOCH), 0.0)
    (asked,) = reader.fetches(9.0)
    reader.receive_page(asked, UpdatesPage("s", "w", asked.after, 9, [9], [b"1"], False, EPOCH), 9.0)
    assert reader.progress["s", "w"].position == 9
    assert reader.counters.fetches_failed == 0


def test_9_18_a_declared_foreign_writer_is_followed_without_name() -> None:
    reader = reader_of(Followed("s", foreign_writers=True), {})
    reader.receive(b"POSITION s abroad 3 3", 0.0)
    assert ("s", "abroad") in reader.progress
    reader.receive(b"POSITION s abroad 3 4", 0.0)
    assert reader.counters.unregistered_lines == 0


def test_9_18_a_followed_writer_that_left_the_registry_is_not_believed() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.admission.registered({})
    reader.receive(announced("w1", 7, "POSITION s w1 5 9"), 0.0)
    assert reader.progress["s", "w1"].position == 5


def test_9_16_and_9_19_only_the_claimed_incarnation_of_this_log_counts() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 0.0)
    for message in (
        b"POSITION s w1 5 9",
        announced("w1", 7, "POSITION s w1 5 9", OTHER),
        announced("w1", 6, "POSITION s w1 5 9"),
        announced("w1", 8, "POSITION s w1 5 9"),
    ):
        reader.receive(message, 0.0)
    counters = reader.counters
    assert reader.progress["s", "w1"].position == 5
    assert (counters.unnamed_lines, counters.other_logs, counters.old_incarnations) == (1, 1, 2)
    assert reader.admission.registry_doubted  # of the higher one: the claim decides
    reader.receive(b"NAME w1 9\nPOSITION s w1 5 9", 0.0)
    assert (counters.other_logs, counters.old_incarnations) == (2, 2)  # it has not said of which log it is
    reader.receive(announced("w1", 7, "POSITION s w1 5 9"), 0.0)
    assert reader.progress["s", "w1"].position == 9


def test_9_16_of_a_stream_without_a_table_unnamed_lines_of_a_native_writer_and_other_logs_do_not_count() -> None:
    reader = reader_of(Followed("m", resettable=True, fetchable=False))
    reader.follow(Followed("s"))
    reader.start_at("s", "w1", 0)  # there is a log to read
    reader.receive(announced("w1", 7, "POSITION m w1 0 0"), 0.0)
    reader.receive(b"POSITION m w1 0 9", 0.0)
    reader.receive(announced("w1", 8, "POSITION m w1 0 9", OTHER), 0.0)
    assert reader.progress["m", "w1"].position == 0
    assert (reader.counters.unnamed_lines, reader.counters.other_logs) == (1, 1)


def test_9_18_a_name_that_has_no_claim_is_believed_on_a_stream_of_foreign_writers_alone() -> None:
    reader = reader_of(Followed("s", foreign_writers=True), {("s", "w1"): 7})
    reader.receive(b"POSITION s w1 5 9", 0.0)  # registered, and never heard to say its NAME: single lines
    assert reader.progress["s", "w1"].position == 9


def test_errors_about_too_many_writers_are_bounded() -> None:
    reader = Reader([Followed("s")], settings=Settings(followed=1))
    lines = "\n".join(f"POSITION s w{number} 0 0" for number in range(MOST_ERRORS + 10))
    reader.receive(lines.encode(), 0.0)
    assert len(reader.errors) == MOST_ERRORS
    assert reader.counters.writers_refused == MOST_ERRORS + 9


def test_a_reader_that_begins_now_begins_where_the_first_position_says() -> None:
    reader = reader_of(Followed("s", foreign_writers=True, from_now=True), {})
    reader.receive(b"POSITION s abroad 7 7", 0.0)
    assert reader.progress["s", "abroad"].position == 7
    assert reader.fetches(0.0) == []


def test_whether_an_incarnation_has_a_log() -> None:
    reader = reader_of(Followed("s"))
    reader.receive(b"NAME w1 6\nPOSITION s w1 0 0", 0.0)
    reader.receive(announced("w1", 7, "POSITION s w1 0 0"), 0.0)
    assert [reader.admission.senders.has_log("w1", life) for life in (6, 7)] == [False, True]
    assert not reader.admission.senders.has_log("w2", 7)


def test_a_fenced_writer_takes_no_leave() -> None:
    writer = Writer("test", "w1", incarnation=7, epoch=EPOCH, settings=Settings())
    writer.add_stream(Stream("s"), 0)
    writer.connected(0.0)
    writer.fenced()
    writer.farewell()
    assert writer.frames_to_publish() == []


def test_the_registry_by_stream_and_its_claims() -> None:
    registry = Registered([("s", "w1", 4, 7), ("s", "w2", 5, 8), ("t", "w1", 6, 7)], {"s": 9}, read=True)
    assert registry == {"s": {"w1": 4, "w2": 5}, "t": {"w1": 6}}
    assert registry.claims == {("s", "w1"): 7, ("s", "w2"): 8, ("t", "w1"): 7}
    known = [KnownWriter("s", "w1", 4, 0, True, 7, 0.0), KnownWriter("s", "w2", 5, 0, False, 8, 0.0)]
    assert claims_of(known) == {("s", "w1"): 7}


def test_9_5_a_writer_was_last_heard_of_in_any_of_its_rows() -> None:
    assert silence_of([("w1", 9.0), ("w2", 5.0), ("w1", 2.0), ("w1", 4.0)]) == {"w1": 2.0, "w2": 5.0}
    assert silence_of([]) == {}


@attrs.frozen
class Order:
    number: int
    state: str = "new"


def test_a_row_by_the_names_of_its_fields() -> None:
    orders = Stream("orders", Order)
    assert orders.decode_named({"number": 1}) == Order(1)
    assert orders.decode_named({"state": "paid", "number": 2}) == Order(2, "paid")
    for values, field in (({}, "number"), ({"number": 1, "colour": "red"}, "colour"), ({"number": "one"}, "number")):
        with pytest.raises(RowError, match=field):
            orders.decode_named(values)
    with pytest.raises(ConfigError, match="no row type"):
        Stream("raw").decode_named({})


def test_a_stream_is_needed_and_not_its_name() -> None:
    orders = Stream("orders", Order)
    assert Registry([orders]).of(orders) is orders
    for given in ("orders", None):
        with pytest.raises(ConfigError, match=r"a busrep\.Stream is needed"):
            checked_stream(given)


def test_names_on_the_wire() -> None:
    frame = parse_message("RDATA ströme w1 1 [1]\nPOSITION ströme w1 1 1".encode(), Settings())
    assert [getattr(item, "stream", None) for item in frame.items] == ["ströme", "ströme"]
    for line in ("RDATA a\x85b w1 1 [1]", f"RDATA s {'ü' * 128} 1 [1]"):
        frame = parse_message(line.encode(), Settings())
        assert (frame.items, frame.malformed) == ([], 1)
    with pytest.raises(ConfigError, match="longer than 255 bytes"):
        Name("n" * 256)


def test_rows_behind_the_bound_of_a_message_are_dropped_whoever_sent_them() -> None:
    settings = Settings(frame_rows=1, message_rows=1)
    frame = parse_message(b"RDATA s a 1 [1]\nRDATA s b 1 [1]\nRDATA s b 2 [1]", settings)
    assert frame.cut
    assert [(item.writer, item.tokens) for item in frame.items if isinstance(item, Rows) and item.tokens] == [
        ("a", [1])
    ]


def test_the_highest_id_that_was_reserved_here() -> None:
    ids = IdGenerator("s", position=5, highest=9)
    assert ids.own_highest == 0
    ids.answer(ids.ask(now=0.0), [12])
    assert (ids.own_highest, ids.position) == (12, 5)


def test_a_name_that_is_won_back_starts_no_lower_than_it_was_announced_in_the_same_log() -> None:
    claim = Claim("w", 2, "e", {"s": 5, "t": 5}, {}, {}, {}, {"s": 9})
    assert claim.resumed("e", {"s": 7, "t": 7}).starts == {"s": 7, "t": 5}  # of t no sequence is known
    assert claim.resumed("e", {"s": 3, "t": 3}).starts == {"s": 5, "t": 5}
    assert claim.resumed("e", {"s": 12, "t": 5}).starts == {"s": 9, "t": 5}  # not above the sequence (9.17)
    assert claim.resumed("another", {"s": 7, "t": 7}) is claim


def test_9_17_what_lies_above_the_sequence_is_not_waited_for() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.connected(0.0)
    reader.receive(announced("w1", 7, "POSITION s w1 5 5"), 0.0)
    reader.receive(announced("w1", 7, f"POSITION s w1 {10**17} {10**17}"), 0.0)
    progress, now = reader.progress["s", "w1"], 0.0

    def answer() -> None:
        (asked,) = reader.fetches(now)
        reader.receive_page(asked, UpdatesPage("s", "w1", asked.after, 5, [], [], False, EPOCH), now)

    answer()
    assert reader.unproven == {("s", "w1"): None}
    reader.receive(announced("w1", 7, "POSITION s w1 5 5\nRDATA s w1 6 [6]"), now)  # held
    for asked_at, highest in (
        (10**17, 10**17),
        (10**16, 5),
    ):  # it may come yet; the line came after the sequence was read
        reader.progress["s", "w1"].nothing_above(asked_at, highest)
        assert progress.target == 10**17
    now = 100.0
    (asked,) = reader.fetches(now)
    reader.progress["s", "w1"].nothing_above(10**17, 6)
    reader.receive_page(asked, UpdatesPage("s", "w1", 5, 6, [6], [b"[6]"], False, EPOCH), now)
    assert progress.state is State.LIVE
    assert progress.position == 6


def test_9_17_a_pair_that_waits_for_nothing_else_is_live_at_once() -> None:
    reader = reader_of(Followed("s"), {("s", "w1"): 7})
    reader.connected(0.0)
    reader.receive(announced("w1", 7, "POSITION s w1 9 9"), 0.0)
    (asked,) = reader.fetches(0.0)
    reader.receive_page(asked, UpdatesPage("s", "w1", 5, 5, [], [], False, EPOCH), 0.0)
    reader.receive(announced("w1", 7, "POSITION s w1 5 5\nRDATA s w1 6 [6]"), 0.0)
    reader.progress["s", "w1"].nothing_above(9, 5)
    assert reader.progress["s", "w1"].state is State.LIVE
    assert reader.progress["s", "w1"].position == 6, "what was held is passed on"


@pytest.mark.parametrize("stray", [b"", b"NAME w1 1"], ids=["", "a stray NAME before"])
def test_9_17_a_foreign_writer_is_waited_for(stray: bytes) -> None:
    reader = Reader([Followed("s", foreign_writers=True)], epoch=EPOCH)
    reader.admission.registered({})
    reader.start_at("s", "w1", 5)
    reader.connected(0.0)
    reader.receive(stray, 0.0)
    reader.receive(b"POSITION s w1 9 9", 0.0)
    (asked,) = reader.fetches(0.0)
    reader.receive_page(asked, UpdatesPage("s", "w1", 5, 5, [], [], False, EPOCH), 0.0)
    assert reader.counters.pages_unproven == 1
    assert not reader.unproven, "its next row would be taken in behind the gap"
