"""Sources of snapshots: the one that a URL names, and what whatever comes from one is held to before it is used.

Stores are sources as well, and opened elsewhere. What a check finds wrong it says in a ValueError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import gt
from typing import Any

from busrep.core.catchup import FetchUpdates
from busrep.core.fields import INT64_MAX, refuse_name
from busrep.core.snapshots import Agreement, PartRange, PartRows, SnapshotSource, decode_part
from busrep.errors import ConfigError, RowError, Unavailable
from busrep.settings import Settings
from busrep.stores.interface import FactSource, KnownWriter
from busrep.streams import Registry, Stream
from busrep.urls import check_url

from ..http.pages import is_epoch

FORMS = "http://:SECRET@host:port/prefix, https://..., file:///directory, s3://bucket/prefix, gs://bucket/prefix"
STORES = ("sqlite", "postgresql", "postgres", "memory")

# Bytes of a part that are decoded and checked between two looks at the event loop: some 1,000 rows, 1 ms.
DECODED_AT_ONCE = 2**17


def open_source(
    url: str, streams: Registry | Iterable[Stream[Any]], settings: Settings | None = None
) -> SnapshotSource:
    """The source of a URL, not connected yet: of a process with the table, over HTTP, or of Parquet files.

    ``streams``: those of the bus; the source may have some of them. Raises ConfigError for a URL of another form;
    MissingExtra.
    """
    scheme = check_url(url, "the URL of a snapshot source", FORMS).scheme
    if scheme in ("http", "https"):
        from ..http.source import HttpSource

        return HttpSource(url, streams, settings, some=True)
    if scheme and scheme not in STORES:
        from .parquet import ParquetSource

        return ParquetSource(url)
    stores = ": a table is opened with busrep.stores.open_store, and is a source itself" if scheme in STORES else ""
    raise ConfigError(f"this URL names no source of snapshots{stores}; these forms do: {FORMS}")


# -- checks -----------------------------------------------------------------------------------------------------


def check_agreement(agreement: Agreement, stream: str) -> None:
    """Raise ValueError unless it can be an agreement on a snapshot of ``stream``."""
    if agreement.stream != stream:
        raise ValueError(f"it is of stream {agreement.stream!r}, not of {stream!r}")
    if not is_epoch(agreement.epoch):
        raise ValueError("epoch is not 32 hexadecimal digits")
    for writer, position in agreement.positions.items():
        if refuse_name(writer) or not 0 <= position <= INT64_MAX:
            raise ValueError(f"{writer!r}: {position} is not a writer with a position of 64 bits")
    for writer, floor in agreement.floors.items():
        if not 0 < floor <= agreement.positions.get(writer, 0):
            raise ValueError(f"the floor {floor} of writer {writer!r} is not above 0, or above its position")
    begin = agreement.parts[0].after if agreement.parts else 0
    for writer, position in agreement.positions.items():
        floor = agreement.floors.get(writer, 0)
        if floor < min(begin, position):
            raise ValueError(f"the parts begin after {begin}: rows of writer {writer!r} above {floor} are in none")
    end = None
    for part in agreement.parts:
        if end not in (None, part.after):
            raise ValueError(f"the part after {part.after} does not begin where the last one ends, at {end}")
        if not 0 <= part.after < part.upto <= INT64_MAX or not -1 <= part.rows <= INT64_MAX:
            raise ValueError(f"({part.after}, {part.upto}] is no range of tokens, or {part.rows} no number of rows")
        end = part.upto


async def check_log(agreement: Agreement, store: FactSource, *, patience: float) -> None:
    """Whether the log that ``store`` reads has no rows that are neither in this snapshot nor behind it: nobody would
    ever miss them. Raises Unavailable.

    ``patience``: a log that lags, a replica's, is waited for so many seconds.
    """
    source, loop = agreement.source or "the snapshot source", asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        known = {one.writer: one for one in await store.known(agreement.epoch) if one.stream == agreement.stream}
        wrong = _ahead(agreement, known)
        if wrong is None or loop.time() >= deadline:
            break
        await asyncio.sleep(patience / 20)
    if wrong is not None:
        raise Unavailable(source, wrong)
    end = agreement.parts[-1].upto if agreement.parts else 0
    for writer, position in agreement.positions.items():
        after = max(end, known[writer].floor) if writer in known else end
        if after >= position:
            continue
        page = await store.fetch(FetchUpdates(agreement.stream, writer, after, position, 1))
        if page.tokens:
            raise Unavailable(
                source, f"its parts end at {end}, and the log has row {page.tokens[0]} of {writer!r}, up to {position}"
            )


def _ahead(agreement: Agreement, known: Mapping[str, KnownWriter]) -> str | None:
    """What it says that the log does not."""
    for writer, position in agreement.positions.items():
        proven = known[writer].position if writer in known else 0
        if position > proven:
            return (
                f"its snapshot ends at {position} of {writer!r}, of which the log has proven no more than {proven}: "
                "is it of another log, or does the log that is read lag?"
            )
    for writer, floor in agreement.floors.items():
        if floor > (known[writer].floor if writer in known else 0):
            return f"its snapshot leaves out rows up to {floor} of {writer!r}, which are not pruned in the log"
    return None


async def checked_part(agreement: Agreement, number: int, text: bytes) -> PartRows:
    """The rows of a part's text, if they are those that were agreed on: a source that gives others would lose some
    silently, or have them handled twice. Raises Unavailable."""
    tokens: list[int] = []
    writers: list[str] = []
    payloads: list[bytes] = []
    try:
        for piece in _lines(text, DECODED_AT_ONCE):
            rows = decode_part(piece, stream=agreement.stream)
            before = max(0, len(tokens) - 1)  # with the last row of the piece before, so that order is checked across
            tokens += rows.tokens
            writers += rows.writers
            payloads += rows.payloads
            _check_range(agreement, agreement.parts[number], tokens[before:], writers[before:])
            await asyncio.sleep(0)
        if agreement.parts[number].rows not in (-1, len(tokens)):
            raise ValueError(f"it has {len(tokens)} rows, and {agreement.parts[number].rows} were agreed on")
    except RowError as error:
        raise refused_part(agreement, number, error.reason) from None
    except ValueError as error:
        raise refused_part(agreement, number, error) from None
    # Tuples: if the application fails, it is handed the same again.
    return PartRows(tuple(tokens), tuple(writers), tuple(payloads), len(text))


def _lines(text: bytes, size: int) -> Iterator[bytes]:
    """Whole lines, of that size and a rest of a line together; the last line may be cut off."""
    start = 0
    while start < len(text):
        end = (text.find(b"\n", start + size) + 1) or len(text)
        yield text[start:end]
        start = end


def refused_part(agreement: Agreement, number: int, reason: object) -> Unavailable:
    """The error for a part that is not what was agreed on."""
    return Unavailable(agreement.source or "the snapshot source", f"part {number} is refused: {reason}")


def _check_range(agreement: Agreement, part: PartRange, tokens: Sequence[int], writers: Sequence[str]) -> None:
    if not tokens:
        return
    if any(map(gt, tokens, islice(tokens, 1, None))):
        raise ValueError("it is not ordered by token")
    if not part.after < tokens[0] <= tokens[-1] <= part.upto:
        raise ValueError(f"it has tokens {tokens[0]} to {tokens[-1]}, outside of ({part.after}, {part.upto}]")
    # Of each writer the last token, and the first: they ascend, so all others lie between.
    for writer, token in dict(zip(writers, tokens, strict=True)).items():
        if token > agreement.positions.get(writer, -1):
            raise ValueError(f"it has row {token} of {writer!r}, which is above the position agreed on, or has none")
    for writer, token in dict(zip(reversed(writers), reversed(tokens), strict=True)).items():
        if token <= agreement.floors.get(writer, 0):
            raise ValueError(f"it has row {token} of {writer!r}, which is not above the floor agreed on")
