"""What a backfill is to do: settled at its first start, noted, and cut into numbered batches. Pure.

A batch is a slice of one stream's axis of IDs: whoever cuts the same plan gets the same batches, so a number always
means the same rows, and what of them is done is known by one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import orjson

# Another one means that this library has to be updated.
VERSION = 1


def _sorted(positions: Mapping[str, int]) -> dict[str, int]:
    return {writer: positions[writer] for writer in sorted(positions)}


@attrs.frozen(kw_only=True)
class Part:
    """The rows of one stream: after < token <= upto, per writer of ``upto``, in the log ``epoch``."""

    stream: str
    epoch: str
    after: Mapping[str, int] = attrs.field(converter=_sorted)
    upto: Mapping[str, int] = attrs.field(converter=_sorted)


@attrs.frozen
class Slice:
    """One batch: of ``part`` the rows with after < token <= upto."""

    number: int
    part: Part
    after: Mapping[str, int]
    upto: Mapping[str, int]


@attrs.frozen(kw_only=True)
class Plan:
    """All of it. ``id``: what its batches are counted in; ``width``: IDs a batch; ``told``: the options that make the
    rows what they are."""

    id: str
    width: int
    parts: Sequence[Part]
    told: Mapping[str, Any]

    def slices(self) -> Iterator[Slice]:
        """The batches, in order; those that cannot have a row are left out."""
        number = 0
        for part in self.parts:
            spans = {w: (part.after.get(w, 0), at) for w, at in part.upto.items() if at > part.after.get(w, 0)}
            low, high = min((a for a, _ in spans.values()), default=0), max((b for _, b in spans.values()), default=0)
            for begin in range(low, high, self.width):
                # Not with those above the slice, nor below: nothing is asked for what is not in it.
                inside = {w: (max(a, begin), min(b, begin + self.width)) for w, (a, b) in spans.items()}
                inside = {w: (a, b) for w, (a, b) in inside.items() if a < b}
                if inside:
                    ends = {w: b for w, (_, b) in inside.items()}
                    yield Slice(number, part, {w: a for w, (a, _) in inside.items()}, ends)
                    number += 1


def write_plan(plan: Plan) -> bytes:
    """Its text."""
    return orjson.dumps({"version": VERSION, **attrs.asdict(plan)}, option=orjson.OPT_INDENT_2)


def read_plan(text: bytes) -> Plan:
    """The other way round. Raises ValueError."""
    found = orjson.loads(text)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"it is of another version than {VERSION}, or no plan")
    try:
        parts = tuple(Part(**part) for part in found["parts"])
        return Plan(id=str(found["id"]), width=int(found["width"]), parts=parts, told=dict(found["told"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no plan: {error}") from None
