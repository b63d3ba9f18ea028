"""Where a reader begins that has no saved positions."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from busrep.options import Start
from busrep.stores.interface import KnownWriter

log = logging.getLogger("busrep.reader")


def start_position(start: Start, writer: KnownWriter) -> int:
    """Where a reader begins with this writer, unless a position is saved."""
    if start == "now":
        return writer.position
    if start == "earliest":
        return writer.floor
    return start.get(writer.stream, {}).get(writer.writer, writer.floor)


# How many writers the warning names.
MOST_NAMED = 10
NOT_REGISTERED = (
    "reader %r is not registered for stream %s. It begins behind the rows of %s%s. If it has read this stream before, "
    "a failover has lost its registration, and it misses rows: bootstrap it anew"
)


def tell_where_it_begins(reader: str, stream: str, starts: Mapping[str, int], start: Start) -> None:
    """Log which rows a durable reader does not get if it was not registered.

    A failover may have lost the registration (protocol.md, 9.23). Then the reader misses these rows, and only the log
    tells.

    Args:
        reader: The reader's name.
        stream: The stream's name.
        starts: {writer: the position behind which the reader begins}.
        start: The option; with "now" the reader was asked to skip rows.
    """
    behind = sorted((writer, position) for writer, position in starts.items() if position > 0)
    if behind:
        log.log(
            logging.INFO if start == "now" else logging.WARNING,
            NOT_REGISTERED,
            reader,
            stream,
            ", ".join(f"{writer} up to {position}" for writer, position in behind[:MOST_NAMED]),
            f", and of {len(behind) - MOST_NAMED} more writers" if len(behind) > MOST_NAMED else "",
        )
