"""What a backfill is to do: settled at its first start, noted, and cut into numbered batches. Pure.

A batch is a slice of one stream's axis of IDs: whoever cuts the same plan gets the same batches, so a number always
means the same rows, and what of them is done is known by one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import orjson

from busrep.errors import ConfigError
from busrep.spark.offsets import by_writer, positions_in

# Another one means that this library has to be updated.
VERSION = 1


@attrs.frozen(kw_only=True)
class Part:
    """The rows of one stream: after < token <= upto, per writer of ``upto``, in the log ``epoch``."""

    stream: str
    epoch: str
    after: Mapping[str, int] = attrs.field(converter=by_writer)
    upto: Mapping[str, int] = attrs.field(converter=by_writer)


@attrs.frozen
class Slice:
    """One batch: of ``part`` the rows with after < token <= upto."""

    number: int
    part: Part
    after: Mapping[str, int]
    upto: Mapping[str, int]


def read_start(text: str) -> Mapping[str, int] | None:
    """The map of --start; None for ``earliest``. Raises ConfigError."""
    if text == "earliest":
        return None
    try:
        return positions_in(orjson.loads(text))
    except ValueError:
        raise ConfigError(f'--start is {text!r}: earliest, or a map like {{"writer": 55}} is needed') from None


def start_of(text: str, floors: Mapping[str, int], positions: Mapping[str, int]) -> Mapping[str, int]:
    """Where rows of a table begin: ``earliest``, at its floors, or as a map says, {"writer": token}; a writer that is
    not in it at 0. Raises ConfigError, also for a map that names no writer of the table, or rows that are pruned."""
    found = read_start(text)
    if found is None:
        return floors
    if unknown := sorted(found.keys() - positions.keys()):
        raise ConfigError(f"--start names writer {unknown[0]!r}; there are: {', '.join(sorted(positions)) or 'none'}")
    check_floors(found, positions, floors)
    return found


def of_archive(one: Slice, begins: Mapping[str, int], ends: Mapping[str, int]) -> dict[str, int]:
    """Up to where the rows of a batch are in an archive of the rows with begins < token <= ends. Of a writer whose rows
    it does not have from the batch's beginning on, none are: it may have been made later than the plan."""
    return {
        writer: min(upto, ends.get(writer, 0))
        for writer, upto in one.upto.items()
        if begins.get(writer, 0) <= one.after.get(writer, 0) < ends.get(writer, 0)
    }


def check_floors(start: Mapping[str, int], end: Mapping[str, int], floors: Mapping[str, int]) -> None:
    """Raise ConfigError when rows with start < token <= end are pruned."""
    for writer, upto in sorted(end.items()):
        after, floor = start.get(writer, 0), floors.get(writer, 0)
        if after < min(floor, upto):
            raise ConfigError(
                f"rows of writer {writer!r} from {after + 1} up to {min(floor, upto)} were pruned before the backfill "
                "has read them: pass --archive, one that has them, and start it again; or begin another one, behind "
                'them (--start {"writer": token}), with a --checkpoint and a --writer of its own'
            )


def check_order(tasks: Sequence[tuple[int, int]]) -> None:
    """Whether tasks had rows of ascending tokens: (first, last) of each, (0, 0) of one without. Raises ConfigError."""
    last = 0
    for first, end in tasks:
        if first and first <= last:
            raise ConfigError(f"Spark gave token {first} to a later task than token {last}: nothing was written")
        last = max(last, end)


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
