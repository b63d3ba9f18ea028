"""The RDATA lines of one run as bytes: what they open with, where they end, and their tokens and payloads."""

from __future__ import annotations

import re
from operator import itemgetter

import orjson

from busrep.errors import ParseError

from .fields import INT64_MAX, refuse_name

# Bytes of a command's line that count as one item: a string may take four times the bytes of its line in memory.
ITEM_BYTES = 1_024

_RUN_HEAD = re.compile(rb"RDATA ([!-~]{1,255}) ([!-~]{1,255}) ")


def run_head(data: bytes, at: int) -> tuple[bytes, str, str]:
    """What the lines of a run open with, and the stream and the writer in it."""
    if match := _RUN_HEAD.match(data, at):
        return match[0], match[1].decode(), match[2].decode()
    # Names that are not ASCII, or no names. Two of the largest, and a token, have their place in this piece.
    piece = data[at : at + ITEM_BYTES].partition(b"\n")[0]
    head = piece.split(b" ", 3)
    if len(head) != 4 or not head[1] or not head[2]:
        raise ParseError(piece, "line", "RDATA takes a stream, a writer, a token and a row")
    stream, writer = (name.decode("utf-8", "replace") for name in head[1:3])
    for field, name in (("stream", stream), ("writer", writer)):
        if reason := refuse_name(name):
            raise ParseError(piece, field, reason)
    return b"RDATA %b %b " % (head[1], head[2]), stream, writer


def cut_run(data: bytes, at: int, prefix: bytes, most: int) -> tuple[list[bytes], int]:
    """The lines from ``at`` on that have the prefix, without it, at most ``most``, and where the last of them ends."""
    pieces: list[bytes] = []
    end = at - 1
    while len(pieces) < most and data.startswith(prefix, end + 1):
        start = end + 1 + len(prefix)
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        pieces.append(data[start:end])
    return pieces, end


def cut_rows(pieces: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The tokens and the payloads of ``token payload`` pieces; a space may be left behind a token."""
    # All are cut where the first one is, if all tokens are as long: in two thirds of the time, and no tuple a row.
    width, count = pieces[0].find(b" ") + 1, len(pieces)
    texts = list(map(itemgetter(slice(width)), pieces))
    joined = b"".join(texts)
    spaces = joined[width - 1 :: width] if width else b""
    if len(joined) == width * count and spaces == b" " * count and joined.count(b" ") == count:
        return texts, list(map(itemgetter(slice(width, None)), pieces))
    parts = [piece.partition(b" ") for piece in pieces]
    return [text for text, _, _ in parts], [payload for _, _, payload in parts]


def read_tokens(texts: list[bytes]) -> list[int] | None:
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
