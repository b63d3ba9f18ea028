"""Arrow record batches of rows, as all that reads archives and tables cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from busrep.errors import MissingExtra

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError:
    raise MissingExtra("spark", "the jobs on Spark") from None

# Lines of a batch are put together in memory, and an array of strings holds 2 GiB.
PIECE_BYTES = 2**27


def pieces(batch: Any) -> Iterator[Any]:
    """The batch, in as many pieces as it takes to keep each below `PIECE_BYTES`."""
    if batch.nbytes <= PIECE_BYTES or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from pieces(batch.slice(0, half))
    yield from pieces(batch.slice(half))


def text_in(lines: Any) -> tuple[memoryview, memoryview]:
    """Of an array of strings where each begins, and where the last ends, in bytes; and those bytes. They lie one behind
    the other: nothing is copied."""
    _, offsets, values = lines.buffers()
    return memoryview(offsets).cast("i")[lines.offset :], memoryview(values)


def strangers(batch: Any, after: Mapping[str, int], upto: Mapping[str, int]) -> list[tuple[str, int]]:
    """Of each writer that has rows in the batch that are not above ``after`` and up to ``upto``, (writer, token) of
    one of them."""
    writers, tokens = batch.column("writer"), batch.column("token")
    names = pc.unique(writers).to_pylist()
    found = []
    for writer in names:
        ends = pc.min_max(tokens if len(names) == 1 else tokens.filter(pc.equal(writers, writer))).as_py()
        if ends["max"] > upto.get(writer, 0):
            found.append((writer, ends["max"]))
        elif ends["min"] <= after.get(writer, 0):
            found.append((writer, ends["min"]))
    return found


def within(batch: Any, after: Mapping[str, int], upto: Mapping[str, int]) -> Any:
    """The rows of a batch that are above ``after`` and up to ``upto``, by writer."""
    writers, tokens = batch.column("writer"), batch.column("token")
    out = pyarrow.array([False] * batch.num_rows, pyarrow.bool_())
    for writer, _ in strangers(batch, after, upto):
        beyond = pc.or_(pc.greater(tokens, upto.get(writer, 0)), pc.less_equal(tokens, after.get(writer, 0)))
        out = pc.or_(out, pc.and_(pc.equal(writers, writer), beyond))
    return batch.filter(pc.invert(out)) if out.true_count else batch
