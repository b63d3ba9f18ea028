"""Where a writer's IDs begin: positions at the start, from one snapshot of the store (rules 9.3, 9.8)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from busrep.errors import NotAWriter, PositionsAheadOfTable


@attrs.frozen
class Start:
    """Where a stream's generators start, and what the store has to do first. IDs are positive, of negative streams too,
    whose table holds them negated."""

    positions: Mapping[str, int]  # a proven one per registered writer
    highest: int  # the largest ID known
    repair_sequence_to: int | None  # set the sequence so that it gives larger IDs than this, and log a warning
    forget: tuple[str, ...]  # writers that left: a later registration under the same name has nothing of theirs (G12)


def plan_start(
    *,
    stream: str,
    rows: Mapping[str, int],
    positions: Mapping[str, int],
    sequence: int,
    writers: Collection[str],
    own: str | None = None,
    negative: bool = False,
) -> Start:
    """Decide positions at start from one snapshot of the store.

    ``rows``: highest row ID per writer, of every writer with rows. ``positions``: the whole positions table. Both as
    they stand in the table. ``sequence``: the last ID the sequence gave, 0 if none. ``writers``: the registry. ``own``:
    this process's writer name, only once its claim is won and committed.

    Rows prove a position for ``own`` alone (9.3), and the sequence proves nothing (9.8). A writer without a
    stored position was registered anew: ``own`` starts at the highest known ID, because a name that was never
    registered, or left, has nothing open; of any other nothing is proven yet. Raises `NotAWriter` if ``own``
    is not registered, `PositionsAheadOfTable` if the table is older than the positions.
    """
    if own is not None and own not in writers:
        raise NotAWriter(stream, own)
    sign = -1 if negative else 1
    proven = {writer: sign * position for writer, position in positions.items()}
    last_row = max((sign * row for row in rows.values()), default=0)
    last_proven = max(proven.values(), default=0)
    if last_proven > max(last_row, sequence):
        raise PositionsAheadOfTable(stream, last_proven, max(last_row, sequence))
    highest = max(last_row, last_proven)
    start = {writer: proven.get(writer, 0) for writer in writers}
    if own is not None:
        start[own] = max(proven[own], sign * rows.get(own, 0)) if own in proven else highest
    return Start(
        positions=start,
        highest=highest,
        repair_sequence_to=highest if sequence < highest else None,
        forget=tuple(sorted(proven.keys() - set(writers))),
    )
