"""Snapshots: what a bootstrap loads, and what a source of snapshots is.

A snapshot of a stream is *all its rows at a map of positions*: of each writer the rows with token <= its position, of
a writer not in the map none. Facts never change once they are proven, so the positions alone settle what is in it, as
long as nothing is pruned. So a bootstrap is resumable, its parts load in parallel, and its result compares by hash.

The agreement says which snapshot it is, and how it is cut into parts: ranges of tokens, all writers together, so that
a fact goes whole. A part is text, one line a row, ordered by token and the row's place in its fact::

    token SPACE writer SPACE row as JSON NEWLINE

the fields of RDATA. Its hash is the SHA-256 of that text.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import orjson

from ..errors import RowError


@attrs.frozen
class PartRange:
    """One part: the rows with ``after`` < token <= ``upto``. ``rows``: how many there are, -1 when unknown."""

    after: int
    upto: int
    rows: int = -1


@attrs.frozen
class Agreement:
    """Which snapshot of a stream is loaded, and in which parts.

    ``positions``: {writer: position}, proven, and read in the snapshot. ``floors``: {writer: floor} in it, of writers
    whose floor is above 0: rows at or below are pruned, and not part of it. ``parts``: ascending, without a gap;
    empty for a stream without rows. ``source``: what gave it, for people. ``id``: names it there, opaque. ``content``:
    "" where the positions settle what is in it, all rows; of some of them, such as the latest of each key, a text that
    no other choice of rows has.
    """

    stream: str
    epoch: str
    positions: Mapping[str, int]
    floors: Mapping[str, int]
    parts: Sequence[PartRange]
    source: str = ""
    id: str = ""
    content: str = ""

    @property
    def rows(self) -> int:
        """Rows in all parts, -1 when unknown."""
        return -1 if any(part.rows < 0 for part in self.parts) else sum(part.rows for part in self.parts)

    @property
    def digest(self) -> str:
        """Equal for agreements that are the `same`, 64 hex digits: SHA-256 of canonical JSON (keys sorted, no spaces)
        of stream, epoch, positions, floors, the parts' bounds, and ``content`` where there is one."""
        content = self._content() | {"parts": [(part.after, part.upto) for part in self.parts]}
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def _content(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "stream": self.stream,
            "epoch": self.epoch,
            "positions": dict(self.positions),
            "floors": dict(self.floors),
            "parts": [(part.after, part.upto, part.rows) for part in self.parts],
        }
        return found | {"content": self.content} if self.content else found

    def to_json(self) -> bytes:
        """All of it, for `from_json`: saved in a reader's store, sent over HTTP."""
        return orjson.dumps(self._content() | {"source": self.source, "id": self.id})

    @classmethod
    def from_json(cls, text: bytes | str) -> Agreement:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            found = orjson.loads(text)
            parts = [PartRange(int(after), int(upto), int(rows)) for after, upto, rows in found["parts"]]
            maps = [{str(key): int(at) for key, at in found[name].items()} for name in ("positions", "floors")]
            stream, epoch, source, id = (str(found[name]) for name in ("stream", "epoch", "source", "id"))
            content = str(found.get("content", ""))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no agreement on a snapshot: {type(error).__name__}: {error}") from None
        return cls(stream, epoch, maps[0], maps[1], parts, source, id, content)

    def same(self, other: Agreement) -> bool:
        """Whether two agreements are of the same content, cut in the same way: parts of one go on with the other."""
        return self.digest == other.digest


@attrs.frozen
class PartRows:
    """The rows of one part, decoded from its text; three parallel sequences, one entry a row. ``size``: bytes of the
    text."""

    tokens: Sequence[int]
    writers: Sequence[str]
    payloads: Sequence[bytes]
    size: int = 0


def decode_part(text: bytes, *, stream: str = "") -> PartRows:
    """The rows of a part's text. Raises RowError for a line of another form."""
    if not text:
        return PartRows((), (), ())
    if not text.endswith(b"\n"):
        raise RowError(stream, "part", "its last line is cut off")
    fields = [line.split(b" ", 2) for line in text[:-1].split(b"\n")]
    try:
        tokens, writers, payloads = zip(*fields, strict=True)
        numbers = list(map(int, tokens))
        names = {name: name.decode() for name in set(writers)}
    except ValueError as error:
        raise RowError(stream, "part", f"a line is not 'token writer row': {error}") from None
    return PartRows(numbers, [names[name] for name in writers], payloads, len(text))


def encode_rows(tokens: Sequence[int], writers: Sequence[str], payloads: Sequence[bytes]) -> bytes:
    """The text of these rows, in the order given."""
    lines = zip(tokens, writers, payloads, strict=True)
    return b"".join([b"%d %b %b\n" % (token, writer.encode(), payload) for token, writer, payload in lines])


def part_hash(text: bytes) -> str:
    """SHA-256 of a part's text, 64 lowercase hex digits."""
    return hashlib.sha256(text).hexdigest()


class SnapshotSource(Protocol):
    """Where snapshots come from: a store, a process with one over HTTP, a directory of Parquet files.

    Every method may raise Unavailable (try again), SnapshotBusy (too many at a time: try again later), ConfigError
    (cannot work at all).
    """

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """A snapshot of ``stream``, in parts of about ``part_rows`` rows (more only where one fact has more,
        or where there would be too many parts: of a table some 10,000).

        ``again``: one that was agreed before, of which parts are loaded already; what is returned is the `same` if
        that snapshot can still be had (epoch and floors have not moved), else a new one. Whatever is held for it
        (a database snapshot, connections) is held until ``leave``.
        """

    def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """The text of ``agreement.parts[number]``, in pieces of any size; ends early only with an exception. Several
        may be under way at a time. Raises SnapshotGone when the snapshot cannot be had any more: agree anew."""

    async def leave(self, agreement: Agreement) -> None:
        """Nothing more will be loaded: let go of what is held. Never raises."""

    async def open(self) -> None:
        """Connect: Unavailable, ConfigError."""

    async def close(self) -> None:
        """Let go of everything. May be called twice."""


# The states of a saved bootstrap of which nothing is left to apply; in all others it is unfinished.
LOADED = ("draining", "online")


@attrs.frozen
class BootstrapProgress:
    """What is saved of a bootstrap that is not over, in the reader's store; of one that is, for ``--status``."""

    reader: str
    agreement: Agreement
    state: str  # the value of a `BootstrapState`
    parts: int = 0  # how many are applied
    rows: int = 0
    bytes: int = 0
    syncs: int = 1  # full syncs begun within the last hour, this one included
    reason: str = ""
    age: float = 0.0  # seconds since it was saved, by the database's clock
    id: str = ""  # another of each bootstrap, also where two load the same snapshot

    def asdict(self) -> dict[str, Any]:
        """JSON-able, without the list of parts."""
        known = attrs.asdict(self, filter=lambda attribute, _: attribute.name != "agreement")
        return known | {
            "stream": self.agreement.stream,
            "epoch": self.agreement.epoch,
            "positions": dict(self.agreement.positions),
            "parts_total": len(self.agreement.parts),
            "rows_total": self.agreement.rows,
            "source": self.agreement.source,
        }


@attrs.frozen(kw_only=True)
class AppliedParts:
    """One step of a bootstrap's saved progress: from ``parts`` to ``applied`` parts; equal: only the state changes. The
    rest is as of `BootstrapProgress`, once these are applied."""

    parts: int
    applied: int
    rows: int
    bytes: int
    state: str
