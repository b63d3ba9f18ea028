"""Readers' reports, as the audit reads them: which line has what, in a database on the disk; then lines by range.

A report may have as many lines as there are rows, so of each only its place in the file is kept. Files are appended to
while they are read: `Reports.scan` goes on where it was.
"""

from __future__ import annotations

import binascii
import sqlite3
from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import orjson

from busrep.errors import ConfigError
from busrep.reports import HASH, VERSION, indexes_of

# Tokens in the ranges by which lines are found again.
RANGE = 20_000
# Bytes of a line: one of a fact of a million rows has a fifth of it.
MOST_BYTES = 2**26
# Lines that cannot be used are named up to so many, and counted.
NAMED = 5
# How each line begins, and ends: one that does not end was torn by a crash.
BEGINNING, END = b'{"version":', b"}"

Finding = dict[str, Any]


@attrs.frozen
class Span:
    """A line: rows of one (stream, writer) as a reader has handled them; ``hashes`` are numbers."""

    reader: str
    epoch: str | None
    stream: str
    writer: str
    after: int
    upto: int
    tokens: Sequence[int]
    indexes: Sequence[int]
    hashes: Sequence[int]

    @property
    def ascending(self) -> bool:
        """Whether its facts are in order, and none is twice."""
        return all(one <= other for one, other in zip(self.tokens, self.tokens[1:], strict=False))


def read_span(line: bytes) -> Span:
    """A line. Raises ValueError for one that is none."""
    found = orjson.loads(line)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    try:
        after, upto, hashes = found["after"], found["upto"], array("Q", b64decode(found["hashes"], validate=True))
        tokens = array("q", list(accumulate(found["tokens"], initial=after))[1:])
        reader, epoch, stream, writer = (found[name] for name in ("reader", "epoch", "stream", "writer"))
        counts = found["facts"], found["rows"]
        if not all(isinstance(name, str | None) for name in (reader, epoch)):
            raise TypeError
        if not (isinstance(stream, str) and isinstance(writer, str) and type(after) is type(upto) is int):
            raise TypeError
    except (KeyError, TypeError, OverflowError, binascii.Error):
        raise ValueError("it has not what a line has") from None
    if counts != (len(set(tokens)), len(tokens)) or len(hashes) != len(tokens) or hashes.itemsize != HASH:
        raise ValueError(f"its {len(tokens)} rows are not those that it counts")
    if tokens and not after < min(tokens) <= max(tokens) <= upto:
        raise ValueError(f"it has tokens that are not in ({after}, {upto}]")
    return Span(
        reader or "(unnamed)", epoch, stream, writer, after, upto, tokens, array("i", indexes_of(tokens)), hashes
    )


@attrs.define
class Covered:
    """What a reader says of one writer in one epoch: all above ``after`` and up to ``upto`` was handled, in so many
    lines, of which these are the first and the last."""

    after: int
    upto: int
    first: int
    last: int = 0
    lines: int = 0


Key = tuple[str, str, str]
"""(reader, stream, writer)."""


@attrs.define(eq=False)
class Reports:
    """Readers' reports. Of one reader several files follow on one another, in the order given."""

    paths: Sequence[str]
    streams: set[str] = attrs.field(factory=set, init=False)
    torn: Counter[str] = attrs.field(factory=Counter, init=False)
    unusable: Counter[str] = attrs.field(factory=Counter, init=False)
    findings: list[Finding] = attrs.field(factory=list, init=False)
    _covered: dict[Key, dict[str | None, Covered]] = attrs.field(factory=dict, init=False)
    _number: int = attrs.field(default=0, init=False)
    _files: list[BinaryIO] = attrs.field(factory=list, init=False)
    _at: list[int] = attrs.field(factory=list, init=False)
    _lines: list[int] = attrs.field(factory=list, init=False)
    _index: sqlite3.Connection = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._index = sqlite3.connect("")  # a file of its own, which nobody sees, and which is gone with it
        self._index.execute(
            "CREATE TABLE lines (number INTEGER PRIMARY KEY, stream TEXT, place INTEGER, reader TEXT, writer TEXT, "
            "epoch TEXT, file INTEGER, at INTEGER, size INTEGER, reached INTEGER, rows INTEGER)"
        )
        self._index.execute("CREATE INDEX by_place ON lines (stream, place)")
        try:
            for path in self.paths:
                self._files.append(Path(path).open("rb"))  # noqa: SIM115 - closed by `close`
                self._at.append(0)
                self._lines.append(0)
        except OSError as error:
            self.close()
            raise ConfigError(f"--handled {path}: {error.strerror or error}") from None

    def close(self) -> None:
        """Close the files."""
        self._index.close()
        for file in self._files:
            file.close()

    def scan(self) -> None:
        """Read what is new; a last line that is not whole is left for later."""
        for number, file in enumerate(self._files):
            file.seek(self._at[number])
            while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
                self._lines[number] += 1
                self._note(number, self._at[number], line)
                self._at[number] += len(line)
            if len(line) == MOST_BYTES:
                raise ConfigError(f"--handled {self.paths[number]}: it is no reader's report: a line does not end")
        self._index.commit()

    def unfinished(self) -> dict[str, int]:
        """By file, lines that a crash has torn, the last one included."""
        found = Counter(self.torn)
        for path, file, at in zip(self.paths, self._files, self._at, strict=True):
            if file.seek(0, 2) > at:
                found[path] += 1
        return dict(found)

    def _note(self, file: int, at: int, line: bytes) -> None:
        path = self.paths[file]
        text = line.rstrip(b"\n")
        try:
            span = read_span(text)
        except ValueError as error:
            whole = text.endswith(END) or not (text.startswith(BEGINNING) or BEGINNING.startswith(text))
            (self.unusable if whole else self.torn)[path] += 1
            if whole and self.unusable[path] <= NAMED:
                told = f"{path}, line {self._lines[file]}, cannot be used: {error}"
                self.findings.append({"kind": "report", "text": told})
            return
        key = (span.reader, span.stream, span.writer)
        if span.epoch is not None:  # a stream without a table has none
            self.streams.add(span.stream)
        self._number += 1
        found = self._covered.setdefault(key, {})
        covered = found.setdefault(span.epoch, Covered(span.after, span.after, self._number))
        covered.lines, covered.last = covered.lines + 1, self._number
        first, last = (end(span.tokens, default=0) // RANGE for end in (min, max))
        rows = {first: len(span.tokens)} if first == last else Counter(token // RANGE for token in span.tokens)
        self._index.executemany(
            "INSERT INTO lines (stream, place, reader, writer, epoch, file, at, size, reached, rows) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (span.stream, place, span.reader, span.writer, span.epoch, file, at, len(line), covered.upto, count)
                for place, count in sorted(rows.items())
            ],
        )
        covered.after, covered.upto = min(covered.after, span.after), max(covered.upto, span.upto)

    def covered(self, stream: str) -> Mapping[tuple[str, str], Mapping[str | None, Covered]]:
        """By (reader, writer), and by epoch, what is said of a stream."""
        return {(reader, writer): found for (reader, of, writer), found in self._covered.items() if of == stream}

    def rows(self, stream: str, epoch: str) -> dict[int, int]:
        """By range, how many rows were handled."""
        asked = "SELECT place, sum(rows) FROM lines WHERE stream = ? AND epoch = ? GROUP BY place"
        return dict(self._index.execute(asked, (stream, epoch)))

    def spans(self, stream: str, epoch: str, first: int, last: int) -> Iterator[tuple[Span, int]]:
        """The lines that have rows in these ranges, in order; of each, where its reader had got to before."""
        asked = (
            "SELECT file, at, size, min(reached) FROM lines WHERE stream = ? AND place BETWEEN ? AND ? AND epoch = ? "
            "GROUP BY file, at ORDER BY min(number)"
        )
        for file, at, size, reached in self._index.execute(asked, (stream, first, last, epoch)):
            self._files[file].seek(at)
            yield read_span(self._files[file].read(size)), reached
