"""What a process notes of what it did: one JSON array a line, in a file for each of its lives.

::

    ["S", at, stream, writer, after, position, [[token, rows, digest], ...]]   a batch came to the handler
    ["H", at, stream, writer, position]                                        and was handled
    ["M", at, stream, writer, after, upto]                                     rows were reported as gone
    ["R", at, stream, writer, position]                                        a stream began anew
    ["C", at, [[stream, id, rows, digest], ...]]                               a transaction committed
    ["A", at, [[stream, id], ...]]                                             and this one was rolled back

``at`` is the time of day in seconds. A line is one write() to a file opened with O_APPEND: what was written before
a SIGKILL stays.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import attrs

Fact = tuple[int, int, str]
"""Token, number of rows, digest of one fact as it came to a handler."""


@attrs.frozen
class Started:
    """A batch came to the handler."""

    stream: str
    writer: str
    after: int
    position: int
    facts: tuple[Fact, ...]


@attrs.frozen
class Handled:
    """The handler ended well."""

    stream: str
    writer: str
    position: int


@attrs.frozen
class Gone:
    """Rows in (``after``, ``upto``] were reported as pruned."""

    stream: str
    writer: str
    after: int
    upto: int


@attrs.frozen
class Anew:
    """A stream of a writer was reported to begin anew."""

    stream: str
    writer: str
    position: int


@attrs.frozen
class Committed:
    """A transaction of a writer committed with these (stream, id, rows, digest)."""

    facts: tuple[tuple[str, int, int, str], ...]


@attrs.frozen
class RolledBack:
    """A transaction of a writer was rolled back with these (stream, id)."""

    facts: tuple[tuple[str, int], ...]


Entry = Started | Handled | Gone | Anew | Committed | RolledBack
_KINDS: dict[str, type[Any]] = {
    "S": Started, "H": Handled, "M": Gone, "R": Anew, "C": Committed, "A": RolledBack,
}  # fmt: skip
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Ledger:
    """One process's file. Raises OSError when it cannot be made."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, entry: Entry) -> None:
        """Append one entry."""
        values = attrs.astuple(entry, recurse=False)
        line = json.dumps([_LETTERS[type(entry)], round(time.time(), 3), *values], separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")


def read_ledger(path: Path) -> list[Entry]:
    """All entries of a life; a last line that a kill cut short counts as not written."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    entries: list[Entry] = []
    for line in lines:
        letter, _, *values = json.loads(line)
        entries.append(_KINDS[letter](*map(_tuples, values)))
    return entries
