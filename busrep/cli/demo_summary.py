"""The demo's result: the readers' records judged, and the numbers of all processes added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from busrep.cli.demo_check import ReaderVerdict, Truth, judge
from busrep.cli.demo_processes import Slot
from busrep.cli.demo_table import DemoTable, file_record


def verdict_on(slot: Slot, table: DemoTable, truth: Truth) -> ReaderVerdict:
    """What is wrong with one reader's record."""
    if slot.record is None:
        return judge(truth, table.handled(slot.who), exactly_once=True)
    record = file_record(slot.record) if Path(slot.record).exists() else iter(())
    return judge(truth, record, exactly_once=False)


def summary(
    table: DemoTable,
    truth: Truth,
    writers: Sequence[Slot],
    readers: Sequence[Slot],
    *,
    seconds: float,
    behind: Sequence[str],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """One JSON-able object. ``behind``: what readers did not reach in time; ``counts``: of the harm done."""
    verdicts = {slot.who: verdict_on(slot, table, truth) for slot in readers}
    rows = sum(content[0] for facts in truth.values() for content in facts.values())
    broken = table.broken_transactions()
    found = {
        name: sum(getattr(verdict, name) for verdict in verdicts.values())
        for name in ("redeliveries", "lost", "out_of_order", "extra", "torn")
    }
    counted = {
        name: sum(slot.total("statistics", "reader", name) for slot in readers)
        for name in ("gaps_found", "gaps_filled", "duplicates_dropped", "parse_errors")
    }
    return {
        "facts": sum(map(len, truth.values())),
        "rows": rows,
        "writers": len(writers),
        "readers": len(readers),
        "seconds": round(seconds, 3),
        "rows_per_second": round(rows / seconds, 1),
        "rows_handled": sum(verdict.rows for verdict in verdicts.values()),
        "rollbacks": sum(slot.total("rollbacks") for slot in writers),
        **counts,
        "reconnects": sum(slot.total("statistics", "link", "reconnects") for slot in (*writers, *readers)),
        **counted,
        **found,
        "broken_transactions": broken,
        "not_reached": list(behind),
        "ok": not behind and not broken and all(verdict.clean for verdict in verdicts.values()),
        # Names of a run are demo-RUN-reader-1; the run's number says nothing here.
        "by_reader": {who.split("-", 2)[2]: attrs.asdict(verdict) for who, verdict in verdicts.items()},
    }
