"""Frames (several lines in one message) and newline-delimited bytes to lines, and rows to lines.

The usual frame is ``POSITION s w p p`` and then hundreds of RDATA lines of the same stream and writer. They
are taken as one run: headers are checked for the run as a whole, payloads stay bytes until a reader delivers
them, and only a run that does not pass as a whole is looked at line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import attrs
import orjson

from busrep.commands import INT64_MAX, Command, is_unknown, parse, read_integer
from busrep.errors import QUOTED_BYTES, ParseError

# What a row costs in memory beside its payload (two list entries, the number, the head of the bytes object: 77 bytes),
# and what a run costs (the object, three lists, two names: 378). sys.getsizeof on CPython 3.11, rounded up.
ROW_OVERHEAD = 100
RUN_OVERHEAD = 500

# Errors that one message can leave: a message made of nothing else must not cost many times its own size.
MOST_ERRORS = 100

# Runs of one message that are searched for their end in the whole rest of the message, fast where runs are
# long. From the next one on lines are taken one by one, so that two streams in turns do not cost the square
# of the size.
RUNS_AT_ONCE = 8


@attrs.define
class Rows:
    """A run of consecutive RDATA lines of one (stream, writer).

    ``tokens`` and ``payloads`` are parallel and hold the rows of closed facts, rows of one fact repeat its
    token; tokens are not checked for order. ``open`` are the ``batch`` rows behind the last number: theirs
    has not come yet. A run may close a batch that an earlier message began: those rows belong before it,
    under ``tokens[0]``. ``size`` is the memory held, in bytes, estimated.
    """

    stream: str
    writer: str
    tokens: list[int]
    payloads: list[bytes]
    open: list[bytes]
    size: int


@attrs.define
class Frame:
    """One message, parsed: commands and runs of rows in their order, the errors, and how many commands were
    unknown.
    """

    items: list[Command | Rows] = attrs.field(factory=list)
    errors: list[ParseError] = attrs.field(factory=list)
    unknown: int = 0


def parse_frame(data: bytes, max_bytes: int) -> Frame:
    """The commands and rows of one message. Never raises: what is wrong stands in ``errors``.

    From a malformed line on the rest of the message is dropped, as if it had been cut there: the chain (rule
    9.6) then shows the loss, while going on could step over a lost row. An unknown command is counted, and
    parsing goes on. RDATA payloads are not decoded here. A message over ``max_bytes`` bytes, or not UTF-8, is
    dropped whole.
    """
    frame = Frame()
    try:
        if len(data) > max_bytes:
            raise ParseError(data, "message", f"{len(data)} bytes, {max_bytes} are allowed")
        if not data.isascii():
            _check_utf8(data)
        _parse_lines(data, frame)
    except ParseError as error:
        _note(frame, error)
    return frame


def _note(frame: Frame, error: ParseError) -> None:
    if len(frame.errors) < MOST_ERRORS:
        # Without the traceback and the error before it, which would keep the whole message alive.
        error.__context__ = None
        frame.errors.append(error.with_traceback(None))


def _check_utf8(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ParseError(data[error.start :], "message", "not UTF-8") from None


def _parse_lines(data: bytes, frame: Frame) -> None:
    at, runs = 0, 0
    while at < len(data):
        if data.startswith(b"RDATA ", at):
            runs += 1
            at = _parse_run(data, at, frame, at_once=runs <= RUNS_AT_ONCE)
            continue
        end = data.find(b"\n", at)
        line = data[at:] if end < 0 else data[at:end]
        at += len(line) + 1
        if not line:
            continue
        try:
            frame.items.append(parse(line))
        except ParseError as error:
            if not is_unknown(line):
                raise
            frame.unknown += 1
            _note(frame, error)


def _parse_run(data: bytes, at: int, frame: Frame, *, at_once: bool) -> int:
    """Adds the run of rows whose first line begins at ``at``; returns where the line behind it begins."""
    line_end = data.find(b"\n", at)
    first = data[at:] if line_end < 0 else data[at:line_end]
    head = first.split(b" ", 3)
    if len(head) != 4 or not head[1] or not head[2]:
        raise ParseError(first, "line", "RDATA takes a stream, a writer, a token and a row")
    prefix = b"RDATA %b %b " % (head[1], head[2])
    pieces: list[bytes] = []
    if at_once:
        # One split finds all rows, if nothing else stands between them and the last line with this prefix.
        last = max(data.rfind(b"\n" + prefix, at) + 1, at)
        end = data.find(b"\n", last)
        end = len(data) if end < 0 else end
        pieces = data[at + len(prefix) : end].split(b"\n" + prefix)
    if not pieces or data.count(b"\n", at, end) != len(pieces) - 1:
        pieces, end = _cut_run(data, at, prefix)
    size = RUN_OVERHEAD + ROW_OVERHEAD * len(pieces) + (end - at + 1) - (len(prefix) + 1) * len(pieces)
    rows = Rows(head[1].decode(), head[2].decode(), [], [], [], size)
    frame.items.append(rows)
    _add_rows(frame, rows, prefix, pieces)
    return end + 1


def _cut_run(data: bytes, at: int, prefix: bytes) -> tuple[list[bytes], int]:
    """The lines from ``at`` on that have the prefix, without it, and where the last of them ends."""
    pieces = []
    end = at - 1
    while data.startswith(prefix, end + 1):
        start = end + 1 + len(prefix)
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        pieces.append(data[start:end])
    return pieces, end


def _add_rows(frame: Frame, rows: Rows, prefix: bytes, pieces: list[bytes]) -> None:
    """Adds the rows of ``token payload`` pieces, up to the first malformed one, which raises ParseError."""
    texts, payloads = _cut_evenly(pieces) or _cut_each(pieces)
    numbers = _read_tokens(texts) if all(payloads) else None
    if numbers is not None:
        rows.tokens, rows.payloads = numbers, payloads
        return
    for piece, text, payload in zip(pieces, texts, payloads, strict=True):
        try:
            number = None if text.removesuffix(b" ") == b"batch" else read_integer(text.removesuffix(b" "))
        except ValueError as error:
            raise ParseError(prefix + piece, "token", str(error)) from None
        if not payload:
            raise ParseError(prefix + piece, "row", "is empty")
        if number is not None and rows.tokens and number <= rows.tokens[-1]:
            # A repeated or older fact: in a run of its own, so that who reads a run need not look for it.
            following = Rows(rows.stream, rows.writer, [], [], rows.open, RUN_OVERHEAD + ROW_OVERHEAD + len(payload))
            rows.open = []
            rows = following
            frame.items.append(rows)
        rows.open.append(payload)
        if number is not None:
            rows.tokens += [number] * len(rows.open)
            rows.payloads += rows.open
            rows.open.clear()


_Cut = tuple[list[bytes], list[bytes]]  # tokens and payloads


def _cut_each(pieces: list[bytes]) -> _Cut:
    cut = [piece.partition(b" ") for piece in pieces]
    return [text for text, _, _ in cut], [payload for _, _, payload in cut]


def _cut_evenly(pieces: list[bytes]) -> _Cut | None:
    """Cut where the first one is cut, if all tokens are as long: in two thirds of the time, and no tuple a row."""
    width, count = pieces[0].find(b" ") + 1, len(pieces)
    texts = list(map(itemgetter(slice(width)), pieces))
    joined = b"".join(texts)
    spaces = joined[width - 1 :: width] if width else b""
    if len(joined) != width * count or spaces != b" " * count or joined.count(b" ") != count:
        return None
    return texts, list(map(itemgetter(slice(width, None)), pieces))


def _read_tokens(texts: list[bytes]) -> list[int] | None:
    """The tokens, if all are plain numbers and each above the one before; None: they need a closer look."""
    if not b"".join(texts).replace(b" ", b"").isdigit():  # a space may be left behind each
        return None
    try:
        # Twice as fast as int() on each. Refuses leading zeros and empty texts; makes floats beyond 64 bits.
        numbers: list[int] = orjson.loads(b"[" + b",".join(texts) + b"]")
    except ValueError:
        return None
    if sorted(numbers) != numbers or numbers[-1] > INT64_MAX or len(set(numbers)) != len(numbers):
        return None
    return numbers


def format_rows(stream: bytes, writer: bytes, token: int, payloads: Sequence[bytes]) -> list[bytes]:
    """The RDATA lines of one fact, without newlines: all but the last row as ``batch``, the last with the
    number.
    """
    prefix = b"RDATA %b %b " % (stream, writer)
    return [
        *[b"%bbatch %b" % (prefix, payload) for payload in payloads[:-1]],
        *[b"%b%d %b" % (prefix, token, payload) for payload in payloads[-1:]],
    ]


class LineSplitter:
    """Cuts a byte stream into lines, however it arrives, holding at most ``max_bytes`` of an unfinished line."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._too_long: ParseError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newlines.

        Raises:
            ParseError: a line is longer than ``max_bytes``. Lines before it in the same ``data`` are returned
            first and
                the next call raises (``feed(b"")`` will do); from then on every call does: close the
                connection.
        """
        if self._too_long is not None:
            raise self._too_long
        lines: list[bytes] = []
        self._rest += data
        if b"\n" in data:
            lines = bytes(self._rest).split(b"\n")
            self._rest = bytearray(lines.pop())
        for at, line in enumerate([*lines, self._rest]):
            if len(line) > self._max_bytes:
                quoted = bytes(line[:QUOTED_BYTES])
                self._too_long = ParseError(quoted, "line", f"over {self._max_bytes} bytes")
                self._rest.clear()
                if at == 0:
                    raise self._too_long
                return lines[:at]
        return lines
