"""Offsets: where a query is in a stream, as Spark writes it into its checkpoint.

::

    {"epoch": "0f3c...", "positions": {"w1": 55, "w2": 54}}

``positions`` holds, per writer, the highest token up to which the query has everything. Each is *proven*: the writer
has said that no fact of its own at or below it is still open. A writer that is not in the map is at 0. ``skipped``,
where there is one, counts the IDs that were pruned before this query had read them, and that it was told to go on
without (``failOnDataLoss=false``).

Spark compares offsets as JSON text, so the keys are always in the same order, and what is nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from busrep.errors import ConfigError


def _sorted(positions: Mapping[str, int]) -> dict[str, int]:
    return {writer: positions[writer] for writer in sorted(positions)}


@attrs.frozen
class Offset:
    """A place in one fact log. ``epoch``: the log's identity; ``positions``: {writer: token}."""

    epoch: str
    positions: Mapping[str, int] = attrs.field(factory=dict, converter=_sorted)
    skipped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """What Spark keeps."""
        found: dict[str, Any] = {"epoch": self.epoch, "positions": dict(self.positions)}
        return {**found, "skipped": self.skipped} if self.skipped else found

    @classmethod
    def from_dict(cls, found: object) -> Offset:
        """An offset of a checkpoint. Raises ConfigError for what is none of this source's."""
        try:
            if not isinstance(found, Mapping) or not found.keys() <= {"epoch", "positions", "skipped"}:
                raise TypeError("an object of epoch and positions is needed")
            epoch, positions = found["epoch"], found["positions"]
            if not isinstance(epoch, str) or not isinstance(positions, Mapping):
                raise TypeError("the epoch is a text, the positions are an object")
            return cls(epoch, {str(writer): token_of(at) for writer, at in positions.items()},
                       token_of(found.get("skipped", 0)))  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint holds {found!r}, which is no offset of a busrep stream ({error}): is it another "
                "query's checkpoint? Give each query a checkpointLocation of its own"
            ) from None

    def at(self, writer: str) -> int:
        """The position of a writer."""
        return self.positions.get(writer, 0)

    def advance(self, other: Offset) -> Offset:
        """The further of two offsets of one log, writer by writer: an offset never goes back. Raises ValueError for
        offsets of two logs, between which there is no order."""
        if other.epoch != self.epoch:
            raise ValueError(f"offsets of two epochs, {self.epoch} and {other.epoch}, have no order")
        writers = {*self.positions, *other.positions}
        return Offset(
            self.epoch,
            {writer: max(self.at(writer), other.at(writer)) for writer in writers},
            max(self.skipped, other.skipped),
        )


def token_of(value: object) -> int:
    """A token or position. Raises ValueError for anything but an integer from 0 on."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no position: an integer from 0 on is needed")
    return value
