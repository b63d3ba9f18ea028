"""Where the table is, and its readers: what an archive of it is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from busrep.errors import Unavailable
from busrep.settings import Settings
from busrep.spark.archived import Archive
from busrep.spark.table import Table
from busrep.stores.plans import Plan, Sql
from busrep.stores.snapshots import LogState
from busrep.streams import Stream

# Positions come to the table with writers' heartbeats: who hears them on the bus is ahead of it till then, and a
# replica of the table is behind it. Seconds that we wait for it, and between two looks.
WAIT, LOOK = 5 * Settings().heartbeat, 0.5

Saved = Sequence[tuple[str, str, int, str]]
"""(reader, writer, position, epoch)."""


def log_of(url: str, stream: Stream[Any]) -> tuple[LogState, Saved]:
    """The log, and readers' saved positions, not younger than it. Raises as `Table`."""

    def saved() -> Plan[list[tuple[Any, ...]]]:
        answers = yield Sql(
            "SELECT reader, writer, position, epoch FROM busrep_readers WHERE stream = ? AND writer <> '' "
            "ORDER BY reader, writer",
            (stream.name,),
        )
        return list(answers[0])

    with Table(url, stream) as table:
        # Readers first: what they have handled was proven before.
        readers = table.ask(saved)
        return table.log(), readers


def caught_up(look: Callable[[], tuple[LogState, Saved]], archive: Archive) -> tuple[LogState, Saved]:
    """The log when it has got to where the archive and readers were, or for long enough has not. Raises Unavailable
    for a replica that has not."""
    late = time.monotonic() + WAIT
    log, readers = look()
    while True:
        due = [(writer, at) for _, writer, at, epoch in readers if epoch == log.epoch]
        if archive.epoch == log.epoch:
            due += archive.upto.items()
        behind = [writer for writer, at in due if at > log.positions.get(writer, 0)]
        if not behind:
            return log, readers
        if time.monotonic() > late:
            if log.replica:
                raise Unavailable("the replica", f"it is behind by more than {WAIT:g} s (writer {behind[0]!r})")
            return log, readers
        time.sleep(LOOK)
        log, _ = look()


def ahead(archived: Mapping[str, int], readers: Saved, log: LogState) -> Iterator[dict[str, Any]]:
    """A finding for each writer of whom an archive, or a reader, has more than the table has proven."""
    for writer, at in archived.items():
        proven = log.positions.get(writer, 0)
        if at > proven:
            text = f"the archive of writer {writer} goes up to {at}, and the table has proven {proven}"
            yield {"kind": "ahead", "text": f"{text}: is it an older copy?", "writer": writer}
    for reader, writer, at, epoch in readers:
        proven = log.positions.get(writer, 0)
        if epoch == log.epoch and at > proven:
            text = f"reader {reader} has handled writer {writer} up to {at}, and the table has proven {proven}"
            yield {"kind": "reader", "text": text, "reader": reader, "writer": writer}


def shown(readers: Saved, archive: Archive) -> dict[str, dict[str, dict[str, Any]]]:
    """Where readers are, for the report: by reader and writer."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for reader, writer, position, epoch in readers:
        behind = max(0, archive.upto.get(writer, 0) - position) if epoch == archive.epoch else 0
        found.setdefault(reader, {})[writer] = {"position": position, "epoch": epoch, "behind_archive": behind}
    return found
