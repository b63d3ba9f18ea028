"""Rule 9.20: what one message may hold, and that nothing is lost in silence behind the bound."""

from __future__ import annotations

from typing import Any

import pytest

from busrep.core.catchup import UpdatesPage
from busrep.core.commands import Name, Ping, Position
from busrep.core.delivery import Missed, RawBatch
from busrep.core.framing import COMMAND_BYTES, MOST_ERRORS, Rows, parse_frame, parse_message
from busrep.core.received import Followed
from busrep.core.row_lines import ITEM_BYTES
from busrep.core.writer import Writer
from busrep.settings import MESSAGE_ITEMS, MESSAGE_ROWS, Settings
from busrep.streams import Stream
from tests.support.reader import Reader

LIMIT = 1 << 24
EPOCH = "e" * 32


@pytest.mark.parametrize(
    "lines",
    [b"PING 1\n", b"X\n", b"RDATA s w 1 1\nRDATA s v 1 1\n", b"RDATA s w 1 1\n", b"POSITION s w 1 1\n\n\n"],
    ids=["commands", "unknown", "alternating rows", "repeated rows", "positions"],
)
def test_items_are_bounded(lines: bytes) -> None:
    count = MESSAGE_ITEMS // lines.count(b"1\n") if b"1" in lines else MESSAGE_ITEMS
    whole = parse_frame(lines * count, LIMIT)
    assert not whole.cut
    assert len(whole.items) + whole.unknown == MESSAGE_ITEMS
    cut = parse_frame(lines * (count + 1), LIMIT)
    assert cut.cut == lines.startswith((b"RDATA", b"POSITION"))
    assert cut.malformed
    assert len(cut.items) + cut.unknown == MESSAGE_ITEMS
    assert [str(error)[:23] for error in cut.errors if error.field == "message"] == ["bad message: over 10000"]
    assert len(cut.errors) <= MOST_ERRORS + 1


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("before", [b"", b"RDATA s v 1 1\nRDATA s w 0 1\nRDATA s v 2 1\n"])
def test_rows_are_bounded(before: bytes, *, batch: bool) -> None:
    line = b"RDATA s w batch 1\n" if batch else b"RDATA s w %d 1\n"
    count = MESSAGE_ROWS - before.count(b"\n")
    rows = [line if batch else line % number for number in range(1, count + 2)]
    whole = parse_frame(before + b"".join(rows[:-1]), LIMIT)
    assert not whole.cut
    cut = parse_frame(before + b"".join(rows), LIMIT)
    assert cut.cut
    assert "over 100000 rows" in str(cut.errors[-1])
    runs = [item for item in cut.items if isinstance(item, Rows)]
    assert sum(len(run.payloads) + len(run.open) for run in runs) == MESSAGE_ROWS


def test_a_long_command_counts_for_more() -> None:
    text = b"ERROR " + b"x" * (COMMAND_BYTES - 6)
    most = MESSAGE_ITEMS // (COMMAND_BYTES // ITEM_BYTES + 1)
    assert len(parse_frame(b"\n".join([text] * most), LIMIT).items) == most
    assert parse_frame(b"\n".join([text] * (most + 1)), LIMIT).malformed
    longer = parse_frame(b"PING 1\n" + text + b"x\nPING 2", LIMIT)
    assert longer.items == [Ping(1)]
    assert "over 65536 bytes" in str(longer.errors[0])
    assert not longer.cut
    unknown = parse_frame(b"FUTURE " + b"x" * COMMAND_BYTES + b"\nPING 2", LIMIT)
    assert (unknown.items, unknown.unknown) == ([Ping(2)], 1)


def test_the_largest_frames_of_busrep_pass() -> None:
    settings = Settings(frame_rows=MESSAGE_ROWS, frame_bytes=LIMIT, publish_queue_bytes=2**30)
    writer = Writer("shop", "w", incarnation=1, epoch=EPOCH, settings=settings)
    writer.add_stream(Stream("s"), 0)
    writer.connected(0.0)
    for frame in writer.frames_to_publish():
        writer.published(frame)
    writer.rows_completed("s", range(1, MESSAGE_ROWS + 1), [b"1"] * MESSAGE_ROWS)
    writer.position_moved("s", MESSAGE_ROWS)
    (frame,) = writer.frames_to_publish()
    parsed = parse_message(frame.data, settings)
    assert not parsed.errors
    assert isinstance(parsed.items[2], Rows)
    assert len(parsed.items[2].tokens) == MESSAGE_ROWS


def test_many_streams_are_announced_in_messages_that_pass() -> None:
    settings = Settings(message_items=100, frame_bytes=2**20)
    writer = Writer("shop", "w", incarnation=1, epoch=EPOCH, settings=settings)
    for number in range(250):
        writer.add_stream(Stream(f"s{number}"), 0)
    writer.connected(0.0)
    frames = [parse_message(frame.data, settings) for frame in writer.frames_to_publish()]
    assert not any(frame.errors for frame in frames)
    assert sum(isinstance(item, Position) for frame in frames for item in frame.items) == 250


def test_facts_between_facts_too_large_make_frames_that_pass() -> None:
    settings = Settings(message_items=100, frame_bytes=2**20, publish_in_flight=1_000, publish_queue_bytes=2**30)
    writer = Writer("shop", "w", incarnation=1, epoch=EPOCH, settings=settings)
    writer.add_stream(Stream("s"), 0)
    writer.connected(0.0)
    for number in range(1, 401):
        writer.fact_completed("s", number, [b"1" * 2**21 if number % 2 else b"1"])
    writer.position_moved("s", 400)
    frames = [parse_message(frame.data, settings) for frame in writer.frames_to_publish()]
    assert not any(frame.errors for frame in frames)
    assert sum(len(item.tokens) for frame in frames for item in frame.items if isinstance(item, Rows)) == 200


def test_settings_whose_own_frames_would_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="message_rows=10 is below frame_rows=1000"):
        Settings(message_rows=10)


def small(**options: Any) -> Reader:
    """A reader that takes 100 items, and 1,500 bytes, of a message, of a stream with a table and one without."""
    streams = [Followed("orders", **options), Followed("typing", resettable=True, fetchable=False, **options)]
    settings = Settings(message_items=100, frame_bytes=1_024, message_bytes=1_500)
    reader = Reader(streams, settings=settings, epoch=EPOCH)
    reader.connected(0.0)
    return reader


PAD = b"PING 1\n" * 100
NATIVE = b"SERVER shop " + EPOCH.encode() + b"\nNAME w 1\n"


def taken(reader: Reader, stream: str, writer: str) -> object:
    """What is handed out next; it counts as handled."""
    found = reader.take(stream, writer)
    reader.done(stream, writer)
    return found


def test_what_a_cut_message_held_of_a_native_writer_is_fetched() -> None:
    reader = small()
    reader.receive(NATIVE + b"POSITION orders w 5 5", 0.0)
    reader.start_at("typing", "w", 0)
    (asked,) = reader.fetches(0.0)
    reader.fetch_failed(asked, None, 0.0)
    reader.receive(NATIVE + PAD + b"POSITION orders w 5 5\nRDATA orders w 6 1", 1.0)
    assert reader.counters.messages_cut == reader.counters.parse_errors == 1
    reader.receive(b"NAME w 1\nPOSITION orders w 6 6\nRDATA orders w 7 1", 2.0)
    assert reader.fetches(100.0)[0].upto >= 5
    assert reader.progress["orders", "w"].position == 0  # 7 did not step over 6


def test_what_a_cut_message_held_of_a_stream_without_a_source_is_said_to_be_missed() -> None:
    reader = small()
    reader.receive(b"NAME w 1\nPOSITION typing w 5 5", 0.0)
    assert taken(reader, "typing", "w") == Missed("typing", "w", 0, 5)
    reader.receive(b"NAME w 1\n" + PAD + b"POSITION typing w 5 5\nRDATA typing w 6 1", 1.0)
    reader.receive(b"NAME w 1\nPOSITION typing w 6 6\nRDATA typing w 7 1", 2.0)
    assert taken(reader, "typing", "w") == Missed("typing", "w", 5, 6)
    assert isinstance(taken(reader, "typing", "w"), RawBatch)


@pytest.mark.parametrize("before", [b"", b"NAME f 1"])
@pytest.mark.parametrize(
    "message",
    [
        PAD + b"PING 1\nRDATA typing f 6 1",
        b"RDATA typing f 6 " + b"1" * 2_000,
        b'RDATA typing f 6 "\xff"',
        b"PING x\nRDATA typing f 6 1",
        b"PING x\nPOSITION typing f 3 3",
        b"RDATA typing f 6 ",
        b"RDATA",
    ],
)
def test_what_a_cut_message_held_of_a_foreign_writer_is_not_stepped_over(message: bytes, before: bytes) -> None:
    # A foreign writer's rows do not show what was before them: they count again from its next POSITION on. One stray
    # NAME, which is no line of the stream, makes no native writer of it.
    reader = small(foreign_writers=True)
    reader.receive(b"POSITION typing f 0 0\nRDATA typing f 5 1", 0.0)
    assert isinstance(taken(reader, "typing", "f"), RawBatch)
    reader.receive(before, 0.0)
    reader.receive(message, 1.0)
    assert reader.counters.messages_cut == 1
    assert reader.asks  # for a POSITION; who runs it publishes REPLICATE
    reader.receive(b"RDATA typing f 7 1", 2.0)
    assert not reader.ready
    reader.receive(b"POSITION typing f 7 7\nRDATA typing f 8 1", 3.0)
    assert taken(reader, "typing", "f") == Missed("typing", "f", 5, 7)
    assert isinstance(taken(reader, "typing", "f"), RawBatch)


def test_a_message_without_a_line_of_a_stream_takes_nothing_from_foreign_writers() -> None:
    """Whatever is dropped of it: a line that this version takes for malformed may come from another system all day."""
    reader = small()
    reader.receive(b"POSITION typing f 0 0", 0.0)
    for message in (PAD + b"PING 1", b"PING x", b"ERROR \xff", b"X" * 2_000):
        reader.receive(message, 1.0)
    reader.receive(b"RDATA typing f 1 1", 2.0)
    assert isinstance(taken(reader, "typing", "f"), RawBatch)
    assert not reader.asks


def test_who_was_not_heard_yet_is_asked_for_again_after_a_cut_message() -> None:
    """The answer to the REPLICATE of before may have been in it."""
    reader = small()
    reader.receive(b"POSITION typing f 0 0", 0.0)
    for _ in range(2):
        reader.asks = False
        reader.receive(b"RDATA", 1.0)
        assert reader.asks


def test_a_cut_message_does_not_end_the_catch_up_of_who_is_not_heard() -> None:
    """Rows of a predecessor of the own name: nobody announces that one, so nobody would ask for them again."""
    reader = Reader([Followed("orders", foreign_writers=True)], own=["w"], epoch=EPOCH)
    reader.connected(0.0)
    reader.admission.registered({("orders", "w"): 7})
    reader.start_at("orders", "w", 0)
    reader.learned("orders", "w", 5)
    (asked,) = reader.fetches(0.0)
    reader.receive(b"RDATA", 0.0)
    reader.receive_page(asked, UpdatesPage("orders", "w", 0, 5, [5], [b"1"], False, EPOCH), 1.0)
    assert reader.progress["orders", "w"].position == 5


@pytest.mark.parametrize("holding", ["a snapshot loads", "a gap is fetched"])
def test_what_is_held_of_a_foreign_writer_is_not_joined_over_a_cut_message(holding: str) -> None:
    reader = small(foreign_writers=True)
    reader.admission.registered({})
    reader.start_at("orders", "f", 0)
    if holding == "a snapshot loads":
        reader.bootstrap("orders")
    else:
        reader.learned("orders", "f", 5)
        (asked,) = reader.fetches(0.0)
    for message in (b"POSITION orders f 5 5", b"RDATA orders f 6 1", b"RDATA", b"RDATA orders f 8 1"):
        reader.receive(message, 0.0)
    if holding == "a snapshot loads":
        reader.bootstrapped("orders", {"f": 5})
    else:
        reader.receive_page(asked, UpdatesPage("orders", "f", 0, 5, [5], [b"1"], False, EPOCH), 1.0)
    reader.receive(b"POSITION orders f 8 8", 1.0)
    assert reader.progress["orders", "f"].position <= 6  # 8 did not step over 7
    assert reader.fetches(9.0)


def test_unknown_commands_are_counted_as_such() -> None:
    reader = small()
    reader.receive(b"X\n" * 101, 0.0)
    assert (reader.counters.unknown_lines, reader.counters.parse_errors) == (100, 1)
    assert len(reader.errors) == MOST_ERRORS + 1
    assert Name("w", 1) not in reader.commands
