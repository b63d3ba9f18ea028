"""The audit of what readers have handled: their reports against the archive, and above it against the table.

Both are cut into ranges of tokens. Of one at a time executors give the tokens and hashes of its rows, some 20 bytes a
row, and each line of a report is held against them as a whole; only of a line that differs the rows are looked at.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from busrep.errors import MissingExtra
from busrep.reports import hash_of
from busrep.spark.archive_rows import SCHEMA, text_of
from busrep.spark.archive_store import Root
from busrep.spark.audit_files import Entry, Finding, picking
from busrep.spark.audit_reports import RANGE, Span
from busrep.spark.batches import pieces
from busrep.spark.databases import Question
from busrep.spark.planning import Span as TableSpan
from busrep.spark.reading import read

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError:
    raise MissingExtra("spark", "the audit of an archive") from None

# Rows that were handled, and tokens, of what is compared at a time.
ROWS, TOKENS = 500_000, 100 * RANGE

Rows = list[tuple[str, bytes, bytes, bytes]]
"""By writer, in pieces: tokens (int64), places in the fact (int32), hashes (8 bytes)."""
Place = tuple[int, int]
"""(token, index)."""


# -- on executors ---------------------------------------------------------------------------------------------


def hashed(batches: Iterable[Any]) -> Rows:
    """What is compared of the rows of these batches."""
    found: Rows = []
    for batch in (piece for one in batches for piece in pieces(one)):
        for writer in pc.unique(batch.column("writer")).to_pylist():
            part = batch.filter(pc.equal(batch.column("writer"), writer))
            lines = text_of(part).cast(pyarrow.binary()).to_pylist()
            hashes = b"".join(hash_of(line or b"") for line in lines)
            columns = (array(code, part.column(name).to_pylist()) for code, name in (("q", "token"), ("i", "index")))
            found.append((writer, *(column.tobytes() for column in columns), hashes))
    return found


def of_archive(
    root: Root, stream: str, low: Mapping[str, int], high: Mapping[str, int]
) -> Callable[[Entry], tuple[Rows, str | None]]:
    """As `audit_files.picking`."""
    return picking(root, stream, low, high, lambda batch: hashed([batch]))


def of_table(question: Question, epoch: str) -> Callable[[Sequence[TableSpan]], tuple[Rows, None]]:
    """The rows of a slice. Raises as `audit_table.summing`."""
    return lambda spans: (hashed(read(question, SCHEMA, epoch, spans)), None)


# -- comparing ------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Truth:
    """The rows of a writer in some range, as they should be handled, in order."""

    tokens: Any
    indexes: Any
    hashes: Any

    @classmethod
    def of(cls, parts: Sequence[tuple[bytes, bytes, bytes]]) -> Truth:
        """Of the rows of one writer. A row that is in an archive twice counts once: that is found elsewhere."""
        kinds = {"token": pyarrow.int64(), "index": pyarrow.int32(), "hash": pyarrow.uint64()}
        columns = {
            name: pyarrow.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pyarrow.py_buffer(data)])
            for (name, kind), data in zip(kinds.items(), map(b"".join, zip(*parts, strict=True)), strict=True)
        }
        rows = pyarrow.table(columns).sort_by([("token", "ascending"), ("index", "ascending")]).combine_chunks()
        if rows.num_rows > 1:
            places = [rows.column(name).combine_chunks() for name in ("token", "index")]
            other = pc.or_(*(pc.not_equal(column[1:], column[:-1]) for column in places))
            if not pc.all(other).as_py():
                rows = rows.filter(pyarrow.array([True, *other.to_pylist()]))
        codes = zip(("token", "index", "hash"), "qiQ", strict=True)
        return cls(*(array(code, rows.column(name).to_pylist()) for name, code in codes))

    def find(self, token: int, index: int) -> int | None:
        """Where a row is."""
        at = bisect_left(self.tokens, token) + index
        if at < len(self.tokens) and (self.tokens[at], self.indexes[at]) == (token, index):
            return at
        first, end = bisect_left(self.tokens, token), bisect_right(self.tokens, token)
        at = bisect_left(self.indexes, index, first, end)  # rows of the fact are missing
        return at if at < end and self.indexes[at] == index else None


NOTHING = Truth(array("q"), array("i"), array("Q"))


@attrs.define(eq=False)
class Reader:
    """What a reader has handled of one writer, counted; ``wrong``: the first places that differ, by kind."""

    after: int
    upto: int
    most: int  # places that are kept
    rows: int = 0
    compared: int = 0
    repeated: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    wrong: list[tuple[Place, str, str]] = attrs.field(factory=list)
    first_repeated: Place | None = None

    def differs(self, place: Place, kind: str, text: str) -> None:
        """Count it, and keep it if it is among the first."""
        self.counts[kind] += 1
        if len(self.wrong) < self.most or place < self.wrong[-1][0]:
            self.wrong.append((place, kind, text))
            self.wrong.sort()
            del self.wrong[self.most :]


@attrs.define(eq=False)
class Comparison:
    """Lines of one reader and one writer against the rows that there are between two positions."""

    reader: Reader
    truth: Truth
    others: Mapping[str, Truth]
    known: Callable[[int], bool]
    """Whether a token is one of which it is known what there should be."""
    seen: bytearray = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.seen = bytearray(len(self.truth.tokens))

    def add(self, span: Span, reached: int, first: int, last: int) -> None:
        """Compare the rows of a line whose tokens are ``first`` to ``last``; ``reached``: where the reader was."""
        tokens, indexes, hashes = span.tokens, span.indexes, span.hashes
        if span.ascending:
            low, high = bisect_left(tokens, first), bisect_right(tokens, last)
            tokens, indexes, hashes = tokens[low:high], indexes[low:high], hashes[low:high]
            if not tokens or self._same(tokens, indexes, hashes, reached):
                return
        for token, index, number in zip(tokens, indexes, hashes, strict=True):
            if first <= token <= last:
                self._row((token, index), number, reached)
            reached = max(reached, token - 1)  # more rows of this fact may follow

    def _same(self, tokens: Any, indexes: Any, hashes: Any, reached: int) -> bool:
        """Whether it is as it should be, as a whole."""
        at, truth = bisect_left(self.truth.tokens, tokens[0]), self.truth
        end = at + len(tokens)
        if (truth.tokens[at:end], truth.indexes[at:end], truth.hashes[at:end]) != (tokens, indexes, hashes):
            return False
        new = self.seen.count(0, at, end)
        if new and (tokens[0] <= reached or new < len(tokens)):
            return False
        self.reader.rows += len(tokens)
        self.reader.compared += len(tokens)
        self.seen[at:end] = b"\1" * len(tokens)
        if not new:
            self._repeated((tokens[0], indexes[0]), len(tokens))
        return True

    def _repeated(self, place: Place, count: int) -> None:
        self.reader.repeated += count
        if self.reader.first_repeated is None or place < self.reader.first_repeated:
            self.reader.first_repeated = place

    def _row(self, place: Place, number: int, reached: int) -> None:
        reader, token = self.reader, place[0]
        reader.rows += 1
        if not self.known(token):
            return
        reader.compared += 1
        at = self.truth.find(*place)
        if at is None:
            whose = [writer for writer, truth in self.others.items() if truth.find(*place) is not None]
            text = "was handled, and is not there" + (f": it is of writer {whose[0]}" if whose else "")
            reader.differs(place, "extra", text)
            return
        if self.truth.hashes[at] != number:
            reader.differs(place, "changed", "was not handled as it is")
        if self.seen[at]:
            self._repeated(place, 1)
        elif token <= reached:
            reader.differs(place, "order", f"was handled behind rows up to token {reached}")
        self.seen[at] = 1

    def end(self) -> None:
        """All lines were added: what was not handled is lost."""
        start, end = (bisect_right(self.truth.tokens, at) for at in (self.reader.after, self.reader.upto))
        at = self.seen.find(0, start, end)
        while at >= 0:
            place = self.truth.tokens[at], self.truth.indexes[at]
            self.reader.differs(place, "lost", "was not handled")
            if len(self.reader.wrong) == self.reader.most and self.reader.wrong[-1][0] < place:
                self.reader.counts["lost"] += self.seen.count(0, at + 1, end)  # none of them is among the first
                return
            at = self.seen.find(0, at + 1, end)


def truths(found: Iterable[Rows]) -> dict[str, Truth]:
    """What tasks found, by writer."""
    parts: dict[str, list[tuple[bytes, bytes, bytes]]] = {}
    for writer, *columns in (one for rows in found for one in rows):
        parts.setdefault(writer, []).append((columns[0], columns[1], columns[2]))
    return {writer: Truth.of(some) for writer, some in parts.items()}


def parts(first: int, last: int, rows: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The tokens ``first`` to ``last`` in whole ranges of `RANGE`, (first range, last range), as many at a time as have
    `ROWS` rows or `TOKENS` tokens. Pure."""
    start, count = first // RANGE, 0
    for at in range(start, last // RANGE + 1):
        more = rows.get(at, 0)
        if at > start and (count + more > ROWS or (at - start + 1) * RANGE > TOKENS):
            yield start, at - 1
            start, count = at, 0
        count += more
    yield start, last // RANGE


def findings_of(name: str, writer: str, reader: Reader, *, once: bool) -> Iterator[Finding]:
    """What is wrong with what a reader has handled, the first row first."""
    told = {"reader": name, "writer": writer}
    for (token, index), kind, text in reader.wrong:
        where = f"reader {name}, writer {writer}, token {token}, row {index}: it {text}"
        yield {"kind": f"handled: {kind}", "text": where, "token": token, "index": index, **told}
    if once and reader.first_repeated is not None:
        token, index = reader.first_repeated
        text = f"reader {name}, writer {writer}, token {token}, row {index}: it was handled again"
        yield {"kind": "handled: again", "text": text, "token": token, "index": index, **told}
