"""What a fact holds, in every runtime."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

from busrep.errors import ConfigError
from busrep.streams import Stream, checked_stream

from .open_facts import OpenFacts
from .session import WriterSession

RowT = TypeVar("RowT")
OtherT = TypeVar("OtherT")


class FactState(enum.Enum):
    """Where a fact is in its life. Only an OPEN one takes rows; none is opened twice."""

    NEW = enum.auto()
    OPENING = enum.auto()
    OPEN = enum.auto()
    ENDED = enum.auto()  # its block: the rows are being inserted, or were, or will never be


class FactContents(Generic[RowT]):
    """What a fact holds: its IDs, and rows that are checked and encoded as they are added, inside its block alone.

    ``RowT``: the row class of its first stream.
    """

    _how = "async with"

    def __init__(self, streams: Sequence[Stream[Any]]) -> None:
        self._streams = streams
        self._state = FactState.NEW
        self._opened: dict[str, OpenFacts] = {}
        self._session: WriterSession | None = None

    @property
    def id(self) -> int:
        """The fact's ID in the first stream. Raises ConfigError before the block."""
        if (name := self._streams[0].name) not in (ids := self.ids):
            raise self._not_begun()
        return ids[name]

    @property
    def ids(self) -> dict[str, int]:
        """The fact's ID per stream, as it stands in the table (below zero on a negative stream)."""
        return {name: self._table_id(opened)(opened.first) for name, opened in self._opened.items() if opened.first}

    def _table_id(self, opened: OpenFacts) -> Callable[[int], int]:
        assert self._session is not None  # noqa: S101 (it has begun, for it has opened something)
        return self._session.generators[opened.stream.name].table_id

    @overload
    def add(self, row: RowT, *, stream: None = None, insert: bool = True, at: int = 0) -> None: ...
    @overload
    def add(self, row: OtherT, *, stream: Stream[OtherT], insert: bool = True, at: int = 0) -> None: ...
    def add(self, row: Any, *, stream: Stream[Any] | None = None, insert: bool = True, at: int = 0) -> None:
        """Add a row to the fact. Raises RowError, and ConfigError outside the block: the row would be lost.

        ``stream``: needed only for another than the first. ``insert=False``: the application inserts the row into the
        stream's own table itself, under ``fact.id``; behind those that busrep inserts. ``at``: to which of ``count``
        facts, counted from 0; their IDs ascend.
        """
        self._of(stream).add(row, insert=insert, at=at)

    @overload
    def add_each(self, rows: Sequence[RowT], stream: None = None) -> list[int]: ...
    @overload
    def add_each(self, rows: Sequence[OtherT], stream: Stream[OtherT]) -> list[int]: ...
    def add_each(self, rows: Sequence[Any], stream: Stream[Any] | None = None) -> list[int]:
        """Add each row as a fact of its own, one for each ID reserved; give their IDs. Raises ConfigError for more rows
        or fewer, beside rows that were added before, and outside the block."""
        opened = self._of(stream)
        opened.add_each(rows)
        return self._table_ids(opened)

    def published_ids(self) -> list[int]:
        """All IDs in the first stream."""
        return self._table_ids(self._opened[self._streams[0].name])

    def _table_ids(self, opened: OpenFacts) -> list[int]:
        return [*map(self._table_id(opened), opened.ids)] if opened.stream.negative else list(opened.ids)

    def _of(self, stream: Stream[Any] | None) -> OpenFacts:
        self._check_in_block()
        name = self._streams[0].name if stream is None else checked_stream(stream).name
        if name not in self._opened:
            known = ", ".join(self._opened)
            raise ConfigError(f"this fact is of {known}, not of {name!r}: name all its streams in bus.write()")
        return self._opened[name]

    def _begin_once(self) -> None:
        """The block begins. Raises ConfigError when it did before."""
        if self._state is not FactState.NEW:
            raise ConfigError("a fact is written once: call bus.write() for each")
        self._state = FactState.OPENING

    def _check_in_block(self) -> None:
        """Raises ConfigError outside the block. In a joined transaction, too, the rows go in at the block's end."""
        if self._state is FactState.ENDED:
            raise ConfigError(
                f"the block of {self._called()} has ended, this would be lost: do it inside the block, or write "
                "another fact with bus.write()"
            )
        if self._state is not FactState.OPEN:
            raise self._not_begun()

    def _not_begun(self) -> ConfigError:
        return ConfigError(f"this fact is not open: use '{self._how} bus.write(...) as fact'")

    def _called(self) -> str:
        """The fact for a person: its IDs by stream."""
        if not self.ids:
            return f"a fact of {', '.join(stream.name for stream in self._streams)}"
        return "the fact " + ", ".join(f"{id} of stream {name!r}" for name, id in self.ids.items())
