"""Offsets: where a query is in a stream, as Spark writes it into its checkpoint.

::

    {"epoch": "0f3c...", "positions": {"w1": 55, "w2": 54}, "stream": "orders"}

``positions`` holds, per writer, the highest token up to which the query has everything. Each is *proven*: the writer
has said that no fact of its own at or below it is still open. A writer that is not in the map is at 0. ``stream`` is
there for a checkpoint that is given to another query: all streams of a store have one epoch, and positions of one would
be believed of the other. ``skipped``, where there is one, counts the IDs that were pruned before a batch of this query
was planned, and that it was told to go on without (``failOnDataLoss=false``).

Spark compares offsets as JSON text, so the keys are always in the same order, and what is nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from busrep.errors import ConfigError

_KEYS = {"epoch", "positions", "skipped", "stream"}


def by_writer(positions: Mapping[str, int]) -> dict[str, int]:
    """Positions in the order of the writers' names: equal ones are the same text."""
    return {writer: positions[writer] for writer in sorted(positions)}


@attrs.frozen
class Offset:
    """A place in one fact log. ``epoch``: the log's identity; ``positions``: {writer: token}; ``stream``: None in
    checkpoints of before it was noted."""

    epoch: str
    positions: Mapping[str, int] = attrs.field(factory=dict, converter=by_writer)
    skipped: int = 0
    stream: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What Spark keeps."""
        found: dict[str, Any] = {"epoch": self.epoch, "positions": dict(self.positions)}
        if self.skipped:
            found["skipped"] = self.skipped
        if self.stream is not None:
            found["stream"] = self.stream
        return found

    @classmethod
    def from_dict(cls, found: object) -> Offset:
        """An offset of a checkpoint. Raises ConfigError for what is none of this source's."""
        try:
            if not isinstance(found, Mapping) or not found.keys() <= _KEYS:
                raise TypeError("an object of epoch and positions is needed")
            epoch, positions, stream = found["epoch"], found["positions"], found.get("stream")
            if not isinstance(epoch, str) or not isinstance(stream, str | None):
                raise TypeError("epoch and stream are texts")
            return cls(epoch, positions_in(positions), token_of(found.get("skipped", 0)), stream)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint holds {found!r}, which is no offset of a busrep stream ({error}): is it another "
                "query's checkpoint? Give each query a checkpointLocation of its own"
            ) from None

    def at(self, writer: str) -> int:
        """The position of a writer."""
        return self.positions.get(writer, 0)


def positions_in(found: object) -> dict[str, int]:
    """A map of positions that was JSON. Raises ValueError."""
    if not isinstance(found, Mapping):
        raise ValueError("the positions are no object of tokens by writer")
    return {str(writer): token_of(at) for writer, at in found.items()}


def token_of(value: object) -> int:
    """A token or position. Raises ValueError for anything but an integer from 0 on."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no position: an integer from 0 on is needed")
    return value
