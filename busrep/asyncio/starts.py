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
    "reader %r is not registered for stream %s, and does not get the rows there were of %s%s. If it has read this "
    "stream before, a failover has lost that, and it misses rows: bootstrap it anew"
)


def tell_where_it_begins(reader: str, stream: str, starts: Mapping[str, int], start: Start) -> None:
    """Log what a durable reader does not get that was not registered, ``starts`` being {writer: position}.

    A failover may have lost that it was (protocol.md, 9.23): then it misses the rows before, and only this tells.
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
