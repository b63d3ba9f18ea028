"""What the audit compares: sums of the hashes of rows by writer and range of tokens, and rows where they differ.

A sum does not depend on the order of its rows, so either side may count them in as many tasks as it likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import attrs

from busrep.errors import MissingExtra

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError:
    raise MissingExtra("spark", "the audit of an archive") from None

# Sums are of 128 bits, and wrap around.
MASK = 2**128 - 1

Key = tuple[str, int]
"""(writer, token // size of a range)."""
Sum = tuple[int, int]
"""(rows, sum of their hashes)."""
Row = tuple[str, int, int, bytes]
"""(writer, token, index, hash)."""


def hashes_of(batch: Any) -> list[bytes]:
    """16 bytes a row, of all its columns."""
    text, null = pyarrow.string(), pyarrow.scalar("-", pyarrow.string())
    columns = [pc.fill_null(batch.column(name).cast(text), null) for name in ("token", "index", "writer")]
    times = pc.fill_null(batch.column("committed_at").cast(pyarrow.int64()).cast(text), null)
    lines = pc.binary_join_element_wise(*columns, times, pc.fill_null(batch.column("row"), null), " ")
    return [blake2b(line, digest_size=16).digest() for line in lines.cast(pyarrow.binary()).to_pylist()]


@attrs.define
class Sums:
    """Adds up rows, those of a writer above ``after`` and up to ``upto``. ``size``: tokens in a range."""

    size: int
    after: Mapping[str, int]
    upto: Mapping[str, int]
    found: dict[Key, list[int]] = attrs.field(factory=dict)
    outside: int = 0
    """Rows that were left out."""

    def add(self, batch: Any) -> None:
        """Add these rows."""
        rows = zip(batch.column("writer").to_pylist(), batch.column("token").to_pylist(), hashes_of(batch), strict=True)
        for writer, token, digest in rows:
            if not self.after.get(writer, 0) < token <= self.upto.get(writer, 0):
                self.outside += 1
                continue
            key = (writer, token // self.size)
            entry = self.found.get(key)
            if entry is None:
                entry = self.found[key] = [0, 0]
            entry[0] += 1
            entry[1] += int.from_bytes(digest, "little")

    def strangers(self, batch: Any) -> list[tuple[str, int]]:
        """Of each writer that has rows in the batch that would be left out, (writer, token) of one of them."""
        found = []
        for writer in pc.unique(batch.column("writer")).to_pylist():
            tokens = batch.column("token").filter(pc.equal(batch.column("writer"), writer))
            ends = pc.min_max(tokens).as_py()
            if ends["max"] > self.upto.get(writer, 0):
                found.append((writer, ends["max"]))
            elif ends["min"] <= self.after.get(writer, 0):
                found.append((writer, ends["min"]))
        return found

    def result(self) -> list[tuple[str, int, int, str]]:
        """(writer, range, rows, sum in hexadecimal digits)."""
        return [(writer, at, count, f"{total & MASK:x}") for (writer, at), (count, total) in self.found.items()]


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
