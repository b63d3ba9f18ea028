"""What the audit compares: hashes of rows by writer and range of tokens, and rows where they differ.

A range that one task has as a whole, in order, is hashed as a whole: by far the fastest. Of a range that several tasks
have parts of, in whichever order, the hashes of its rows are added up. Which is which both sides are told beforehand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import attrs

from busrep.errors import MissingExtra
from busrep.spark.batches import pieces, text_in, within

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError:
    raise MissingExtra("spark", "the audit of an archive") from None

# Sums are of 128 bits, and wrap around.
DIGEST = 16
MASK = 2 ** (8 * DIGEST) - 1

Key = tuple[str, int]
"""(writer, token // size of a range)."""
Sum = tuple[int, int]
"""(rows, hash of the range, or sum of their hashes)."""
Row = tuple[str, int, int, bytes]
"""(writer, token, index, hash)."""
Spans = Sequence[tuple[int, int]]
"""Ranges (first, last), ascending and apart."""


def lines_of(batch: Any) -> Any:
    """Of each row its columns but the writer, as binary. As the length of the text is in it, no two ways to cut lines
    that stand one behind the other are the same."""
    text, null = pyarrow.string(), pyarrow.scalar("-", pyarrow.string())
    row = batch.column("row")
    numbers = (
        batch.column("token"), batch.column("index"), batch.column("committed_at").cast(pyarrow.int64()),
        pc.binary_length(row),
    )  # fmt: skip
    columns = [pc.fill_null(number.cast(text), null) for number in numbers]
    return pc.binary_join_element_wise(*columns, pc.fill_null(row, null), " ").cast(pyarrow.binary())


def hashes_of(batch: Any) -> list[bytes]:
    """16 bytes a row, of all its columns but the writer."""
    lines = (line for piece in pieces(batch) for line in lines_of(piece).to_pylist())
    return [blake2b(line, digest_size=DIGEST).digest() for line in lines]


@attrs.define
class Sums:
    """Adds up rows, those of a writer above ``after`` and up to ``upto``. ``size``: tokens in a range; ``mixed``:
    ranges that several tasks have rows of. Of the others all rows of a writer are added here, and in order."""

    size: int
    after: Mapping[str, int]
    upto: Mapping[str, int]
    mixed: Spans = ()
    found: dict[Key, list[int]] = attrs.field(factory=dict, init=False)
    outside: int = attrs.field(default=0, init=False)
    """Rows that were left out."""
    _open: dict[str, tuple[int, Any]] = attrs.field(factory=dict, init=False)
    """By writer the range whose rows come, and their hash so far."""

    def add(self, batch: Any) -> None:
        """Add these rows."""
        wanted = within(batch, self.after, self.upto)
        self.outside += batch.num_rows - wanted.num_rows
        for piece in pieces(wanted):
            if piece.num_rows:
                self._add(piece)

    def _add(self, batch: Any) -> None:
        writers, ranges = batch.column("writer"), pc.divide(batch.column("token"), self.size)
        other = pc.or_(pc.not_equal(writers[1:], writers[:-1]), pc.not_equal(ranges[1:], ranges[:-1]))
        starts = [0, *pc.add(pc.indices_nonzero(other), 1).to_pylist()]
        at, text = text_in(lines_of(batch))
        names, places = (column.take(pyarrow.array(starts)).to_pylist() for column in (writers, ranges))
        for writer, place, (start, end) in zip(names, places, pairwise([*starts, batch.num_rows]), strict=True):
            entry = self.found.setdefault((writer, place), [0, 0])
            entry[0] += end - start
            if self._is_mixed(place):
                entry[1] += sum(
                    _number(blake2b(text[at[n] : at[n + 1]], digest_size=DIGEST)) for n in range(start, end)
                )
                continue
            if writer not in self._open or self._open[writer][0] != place:
                self._close(writer)
                self._open[writer] = place, blake2b(digest_size=DIGEST)
            self._open[writer][1].update(text[at[start] : at[end]])

    def _is_mixed(self, place: int) -> bool:
        before = bisect_right(self.mixed, (place, MASK)) - 1
        return before >= 0 and place <= self.mixed[before][1]

    def _close(self, writer: str) -> None:
        if writer in self._open:
            place, hashed = self._open.pop(writer)
            self.found[writer, place][1] += _number(hashed)

    def result(self) -> list[tuple[str, int, int, str]]:
        """(writer, range, rows, sum in hexadecimal digits), when all rows were added."""
        for writer in list(self._open):
            self._close(writer)
        return [(writer, at, count, f"{total & MASK:x}") for (writer, at), (count, total) in self.found.items()]


def _number(hashed: Any) -> int:
    return int.from_bytes(hashed.digest(), "little")


def merged(results: Iterable[tuple[str, int, int, str]]) -> dict[Key, Sum]:
    """The sums of several tasks."""
    found: dict[Key, Sum] = {}
    for writer, at, count, total in results:
        rows, before = found.get((writer, at), (0, 0))
        found[writer, at] = rows + count, (before + int(total, 16)) & MASK
    return found


def differing(one: Mapping[Key, Sum], other: Mapping[Key, Sum]) -> list[Key]:
    """The ranges that are not the same, by token."""
    return sorted((key for key in one.keys() | other.keys() if one.get(key) != other.get(key)), key=lambda k: k[::-1])


def differences(archive: Iterable[Row], table: Iterable[Row]) -> list[dict[str, Any]]:
    """What differs between the rows of some ranges, by token: ``kind`` is lost (the archive does not have it), extra,
    duplicate, changed or other writer."""
    there, here = _by_place(table), _by_place(archive)
    found = []
    for place in sorted(there.keys() | here.keys(), key=lambda place: (place[1], place[2], place[0])):
        if there.get(place) == here.get(place):
            continue
        kind = _kind(place, here, there)
        writer, token, index = place
        text = {
            "lost": "is in the table, and not in the archive",
            "extra": "is in the archive, and not in the table",
            "duplicate": f"is in the archive {sum(here.get(place, Counter()).values())} times",
            "changed": "is not the same in the archive as in the table",
            "other writer": "is under different writers in the archive and in the table",
        }[kind]
        found.append({"writer": writer, "token": token, "index": index, "kind": kind, "text": f"row {index} {text}"})
    return found


def _by_place(rows: Iterable[Row]) -> dict[tuple[str, int, int], Counter[bytes]]:
    found: dict[tuple[str, int, int], Counter[bytes]] = {}
    for writer, token, index, digest in rows:
        found.setdefault((writer, token, index), Counter())[digest] += 1
    return found


def _kind(place: tuple[str, int, int], here: Mapping[Any, Counter[bytes]], there: Mapping[Any, Counter[bytes]]) -> str:
    if place in here and place in there:
        same = here[place].keys() == there[place].keys()
        return "duplicate" if same or here[place].total() > there[place].total() else "changed"
    one, other = (here, there) if place in here else (there, here)
    elsewhere = any(
        key[1:] == place[1:] and key[0] != place[0] and key not in one for key in other if key[1] == place[1]
    )
    return "other writer" if elsewhere else "extra" if place in here else "lost"
