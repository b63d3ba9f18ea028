"""How long an archive may be behind its table: committed rows that it lacks, and that are older than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from busrep.spark.archived import Archive
from busrep.spark.audit_files import Finding
from busrep.spark.planning import Span
from busrep.spark.table import Ages
from busrep.spark.waiting import TableWriter
from busrep.stores.snapshots import LogState


def proven_and_not_archived(archive: Archive, log: LogState) -> list[Span]:
    """The spans of each writer that the table has proven and the archive lacks."""
    ends = ((writer, max(archive.upto.get(writer, 0), log.floors.get(writer, 0))) for writer in sorted(log.positions))
    return [(writer, at, log.positions[writer]) for writer, at in ends if at < log.positions[writer]]


def behind(
    archive: Archive, spans: Sequence[Span], ages: Ages, writers: Sequence[TableWriter], most: float
) -> Iterator[Finding]:
    """The findings of ``--max-behind``. ``spans``, ``ages``: of the rows that are proven and not archived; ``writers``:
    those of the table, with the rows that are not proven; ``most``: seconds.

    A table of the application's has no times. There a row counts for as long as its writer is silent.
    """
    silent_for = {one.writer: one.silent_for for one in writers}
    for writer, at, upto in spans:
        seconds = _older(ages[writer], silent_for.get(writer, 0.0), most) if writer in ages else None
        if seconds is None:
            continue
        for_long = f"the first of the rows between has been there for {seconds:,.0f} s"
        if writer in archive.upto:
            text = f"the archive of writer {writer} ends at {at}, and the table has proven {upto}: {for_long}"
            yield {"kind": "behind", "text": text, "writer": writer}
        else:
            text = f"the archive has nothing of writer {writer}, and the table has proven {upto}: {for_long}"
            yield {"kind": "no writer", "text": text, "writer": writer}
    for one in writers:
        seconds = _older(one.waiting_for, one.silent_for, most) if one.waiting_rows else None
        if seconds is not None:
            text = (
                f"writer {one.writer} has {one.waiting_rows:,} committed rows above its proven position "
                f"{one.position}, for {seconds:,.0f} s; it was last seen {one.silent_for:,.0f} s ago. If it is dead, "
                "pass --finish-silent to 'busrep pipeline archive'"
            )
            yield {"kind": "waiting", "text": text, "writer": one.writer}


def _older(age: float | None, silent_for: float, most: float) -> float | None:
    """The age of a row when it is above ``most``, else None."""
    seconds = silent_for if age is None else age
    return seconds if seconds > most else None


def behind_of(
    archive: Archive, log: LogState, ask: Callable[[Sequence[Span]], Ages], writers: Sequence[TableWriter], most: float
) -> list[Finding]:
    """As `behind`; ``ask`` reads the ages. Of an archive without manifests, and of another log, nothing is known."""
    if archive.epoch != log.epoch:
        return []
    spans = proven_and_not_archived(archive, log)
    return list(behind(archive, spans, ask(spans), writers, most))
