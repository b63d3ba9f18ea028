"""Frames (several lines in one message) and newline-delimited bytes to lines, and rows to lines.

The usual frame is ``POSITION s w p p`` and then hundreds of RDATA lines of the same stream and writer. They are taken
as one run: headers are checked for the run as a whole, payloads stay bytes until a reader delivers them, and only a run
that does not pass as a whole is looked at line by line.

What one message may cost is bounded (rule 9.20): by its bytes, by its items (each is an object, and work for the reader
and the writer), and by its rows. Behind the bound the message is cut, as it is behind a malformed line.
"""

from __future__ import annotations

import codecs
import re
from typing import cast

import attrs

from busrep.core.commands import Command, is_unknown, parse
from busrep.core.fields import read_integer
from busrep.errors import QUOTED_BYTES, ParseError
from busrep.settings import MESSAGE_ITEMS, MESSAGE_ROWS, Settings

from .row_lines import ITEM_BYTES, cut_rows, cut_run, read_tokens, run_head

# What a row costs in memory beside its payload (two list entries, the number, the head of the bytes object: 77 bytes),
# and a run (the object, three lists, two names: 378). sys.getsizeof on CPython 3.11, rounded up.
ROW_OVERHEAD = 100
RUN_OVERHEAD = 500

# Errors that one message can leave: a message made of nothing else must not cost many times its own size.
MOST_ERRORS = 100

# Runs of one message that are searched for their end in the whole rest of the message, fast where runs are long. From
# the next one on lines are taken one by one, so that two streams in turns do not cost the square of the size.
RUNS_AT_ONCE = 8

# The longest line of any other command than RDATA. A command of busrep has some 100 bytes, and free text some 1,000; a
# line of 16 MiB that is JSON would become 37 times as much in memory.
COMMAND_BYTES = 65_536

# Bytes that are decoded at a time where only their validity matters.
CHUNK_BYTES = 65_536

# How lines begin whose loss a foreign writer's next row does not show.
_OF_STREAMS = (b"RDATA", b"POSITION")

_BLANK_LINES = re.compile(rb"\n+")


@attrs.define
class Rows:
    """A run of consecutive RDATA lines of one (stream, writer). It may close a batch that an earlier message began:
    those rows belong before it, under ``tokens[0]``."""

    stream: str
    writer: str
    tokens: list[int]  # of closed facts, one entry a row; not checked for order
    payloads: list[bytes]  # parallel to these
    open: list[bytes]  # the `batch` rows behind the last number: theirs has not come yet
    size: int  # of memory, in bytes, estimated


@attrs.define
class Frame:
    """One message, parsed."""

    items: list[Command | Rows] = attrs.field(factory=list)  # in their order
    errors: list[ParseError] = attrs.field(factory=list)  # why lines were dropped; of unknown commands `MOST_ERRORS`
    unknown: int = 0  # how many commands were unknown
    malformed: bool = False  # the message, or the rest of it, was dropped for the last of the errors
    cut: bool = False  # lines that tell of a stream may have been dropped with it


@attrs.define
class _Room:
    """How many more items and rows the message may hold."""

    most_items: int
    most_rows: int
    items: int = 0
    rows: int = 0

    def take_items(self, line: bytes, count: int = 1) -> None:
        """Count items of the message; ``line`` is for the error."""
        items = self.items = self.items + count
        if items > self.most_items:
            raise ParseError(line, "message", f"over {self.most_items} commands and runs of rows: the rest is dropped")


def parse_frame(
    data: bytes, max_bytes: int, *, most_items: int = MESSAGE_ITEMS, most_rows: int = MESSAGE_ROWS
) -> Frame:
    """The commands and rows of one message. Never raises: what is wrong stands in ``errors``.

    From a malformed line on the rest of the message is dropped, as if it had been cut there: the chain then shows the
    loss, while going on could step over a lost row. An unknown command is counted, and parsing goes on. RDATA payloads
    are not decoded here. A message over ``max_bytes`` bytes, or not UTF-8, is dropped whole; of one that holds more
    than ``most_items`` items (commands, known or not, and runs of rows) or ``most_rows`` rows the rest is.
    """
    frame = Frame()
    try:
        if len(data) > max_bytes:
            raise ParseError(data, "message", f"{len(data)} bytes, {max_bytes} are allowed")
        if not data.isascii():
            _check_utf8(data)
        _parse_lines(data, frame, _Room(most_items, most_rows))
    except ParseError as error:
        frame.malformed = True
        frame.cut = any(data.startswith(line) or b"\n" + line in data for line in _OF_STREAMS)
        _note(frame, error)
    return frame


def parse_message(data: bytes, settings: Settings) -> Frame:
    """As ``parse_frame``, with the bounds of the settings."""
    return parse_frame(data, settings.message_bytes, most_items=settings.message_items, most_rows=settings.message_rows)


def _note(frame: Frame, error: ParseError) -> None:
    # Without the traceback and the error before it, which would keep the whole message alive.
    error.__context__ = None
    frame.errors.append(error.with_traceback(None))


def _check_utf8(data: bytes) -> None:
    # In pieces: decoded as a whole, one wide character makes a text of four times the size.
    view, at = memoryview(data), 0
    while at < len(data):
        try:
            _, used = codecs.utf_8_decode(view[at : at + CHUNK_BYTES], "strict", at + CHUNK_BYTES >= len(data))
        except UnicodeDecodeError as error:
            bad = at + error.start
            raise ParseError(data[bad : bad + QUOTED_BYTES], "message", "not UTF-8") from None
        at += used


def _parse_lines(data: bytes, frame: Frame, room: _Room) -> None:
    at, runs = 0, 0
    while at < len(data):
        if data.startswith(b"RDATA ", at):
            runs += 1
            at = _parse_run(data, at, frame, room, at_once=runs <= RUNS_AT_ONCE)
            continue
        end = data.find(b"\n", at)
        if end == at:
            at = cast(re.Match[bytes], _BLANK_LINES.match(data, at)).end()
            continue
        end = len(data) if end < 0 else end
        size = end - at
        line = data[at:end] if size <= COMMAND_BYTES else data[at : at + COMMAND_BYTES]
        at = end + 1
        if size < ITEM_BYTES and room.items < room.most_items:
            room.items += 1  # the usual line
        else:
            room.take_items(line, 1 + len(line) // ITEM_BYTES)
        try:
            if size > COMMAND_BYTES:
                raise ParseError(line, "line", f"over {COMMAND_BYTES} bytes")
            frame.items.append(parse(line))
        except ParseError as error:
            if not is_unknown(line):
                raise
            frame.unknown += 1
            if len(frame.errors) < MOST_ERRORS:
                _note(frame, error)


def _parse_run(data: bytes, at: int, frame: Frame, room: _Room, *, at_once: bool) -> int:
    """Adds the run of rows whose first line begins at ``at``; returns where the line behind it begins."""
    prefix, stream, writer = run_head(data, at)
    room.take_items(prefix)
    most, pieces, end = room.most_rows - room.rows, [], at
    if at_once:
        # One split finds all rows, if nothing else stands between them and the last line with this prefix.
        last = max(data.rfind(b"\n" + prefix, at) + 1, at)
        end = data.find(b"\n", last)
        end = len(data) if end < 0 else end
        pieces = data[at + len(prefix) : end].split(b"\n" + prefix, most)
    # Other lines stand between them? Found in a copy: data.count() looks at byte after byte, nine times as slow.
    if not pieces or len(pieces) > most or b"\n" in b"".join(pieces):
        pieces, end = cut_run(data, at, prefix, most)
    size = RUN_OVERHEAD + ROW_OVERHEAD * len(pieces) + (end - at + 1) - (len(prefix) + 1) * len(pieces)
    rows = Rows(stream, writer, [], [], [], size)
    frame.items.append(rows)
    room.rows += len(pieces)
    if pieces:
        _add_rows(frame, rows, prefix, pieces, room)
    if room.rows >= room.most_rows and data.startswith(prefix, end + 1):
        raise ParseError(prefix, "message", f"over {room.most_rows} rows: the rest is dropped")
    return end + 1


def _add_rows(frame: Frame, rows: Rows, prefix: bytes, pieces: list[bytes], room: _Room) -> None:
    """Adds the rows of ``token payload`` pieces, up to the first malformed one, which raises ParseError."""
    texts, payloads = cut_rows(pieces)
    numbers = read_tokens(texts) if all(payloads) else None
    if numbers is not None:
        rows.tokens, rows.payloads = numbers, payloads
        return
    for piece, text, payload in zip(pieces, texts, payloads, strict=True):
        try:
            number = None if text.removesuffix(b" ") == b"batch" else read_integer(text.removesuffix(b" "))
        except ValueError as error:
            raise ParseError(prefix + piece[:QUOTED_BYTES], "token", str(error)) from None
        if not payload:
            raise ParseError(prefix + piece, "row", "is empty")
        if number is not None and rows.tokens and number <= rows.tokens[-1]:
            # A repeated or older fact: in a run of its own, so that who reads a run need not look for it.
            room.take_items(prefix)
            following = Rows(rows.stream, rows.writer, [], [], rows.open, RUN_OVERHEAD + ROW_OVERHEAD + len(payload))
            rows.open = []
            rows = following
            frame.items.append(rows)
        rows.open.append(payload)
        if number is not None:
            rows.tokens += [number] * len(rows.open)
            rows.payloads += rows.open
            rows.open.clear()
