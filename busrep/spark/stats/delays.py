"""The parts of the statistics' page on what takes time: latencies, readers, the archive's lag, waiting rows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from busrep.spark.stats.charts import Charts, columns
from busrep.spark.stats.words import MOST_LINES, Rows, counted, part_of, picked, seconds, table

if TYPE_CHECKING:
    from busrep.spark.stats.tables import Samples

# Columns per power of ten of a latency, and those of them at 1, 2 and 5.
FINE, ROUND = 10, {0: 1, 3: 2, 7: 5}
# (title, what the axis counts, colour)
MEASURES = {
    "heard": ("Heard on the bus", "from commit to the bus", "c1"),
    "saved": ("Handled and saved by readers", "from commit to a reader's saved position", "c3"),
}


def latencies(charts: Charts, summary: Mapping[str, Any], tables: Mapping[str, Rows], samples: Samples) -> str:
    """A chart for each measure, and a row for each writer and reader."""
    if not summary["listened"]:
        return ""
    ahead = summary["clock_ahead"]
    told = (
        f"Listened for {seconds(summary['listened'])}, heard {counted(summary['heard'], 'fact')}; the database's clock "
        f"is {seconds(abs(ahead))} {'ahead of' if ahead >= 0 else 'behind'} this machine's, known to "
        f"±{seconds(summary['clock_exact'])}, and that is taken into account."
    )
    if summary["heard_left_out"]:
        told += f" Not counted, for there were too many: {counted(summary['heard_left_out'], 'fact')}."
    if summary["link_cuts"]:
        cuts = counted(summary["link_cuts"], "time")
        told += f" The link to Redis was lost {cuts}: what was published then is not counted."
    cards = [_latency(charts, whole, samples) for whole in summary["latencies"]]
    empty = "" if cards else "<p class='note'>Nothing was committed meanwhile.</p>"
    its = sorted(
        (one for one in tables["latencies"] if one["stream"]),
        key=lambda one: (one["measure"], -one["count"], one["stream"], one["writer"], one["reader"]),
    )
    heads = ["measure", "stream", "writer", "reader", "facts", "p50", "p90", "p99", "p99.9", "max"]
    body = [
        [*picked(one, "measure", "stream", "writer", "reader"), f"{one['count']:,}",
         *(seconds(one[name]) for name in ("p50", "p90", "p99", "p999", "most"))]
        for one in its[:MOST_LINES]
    ]  # fmt: skip
    listed = table("", heads, 4, body, len(its), "latencies") if its else ""
    head = f"<h2>How long facts take</h2><p class='note'>{escape(told)}</p>{empty}"
    return f"{head}<div class='pair'>{''.join(cards)}</div>{listed}"


def _latency(charts: Charts, whole: Mapping[str, Any], samples: Samples) -> str:
    name, under, colour = MEASURES[whole["measure"]]
    title = f"{name}: p50 {seconds(whole['p50'])}, p99 {seconds(whole['p99'])}, {counted(whole['count'], 'fact')}"
    # Clocks of two machines may say that it took less than nothing; then the first column has it.
    its = (value for key, values in samples.items() if key[0] == whole["measure"] for value in values)
    places = Counter(math.floor(FINE * math.log10(max(value, 1e-4))) for value in its)
    least, most = min(places), max(places)
    found = [100 * places[at] / places.total() for at in range(least, most + 1)]
    labels = [seconds(10 ** (at / FINE)) for at in range(least, most + 1)]
    axis = [
        seconds(ROUND[at % FINE] * 10.0 ** (at // FINE)) if at % FINE in ROUND else "" for at in range(least, most + 1)
    ]
    marks = [
        (FINE * math.log10(max(whole[name], 1e-4)) - least, f"p{name[1:]} {seconds(whole[name])}")
        for name in ("p50", "p99")
    ]
    drawn = columns(labels, [("facts", colour, found)], "% of facts", under, marked=marks, edges=True, axis=axis)
    return charts.card(title, drawn)


def readers(found: Rows) -> str:
    """Where durable readers stand."""
    if not found:
        return ""
    behind = sum(1 for one in found if one["behind"])
    title = "All readers are where the writers are"
    if behind:
        title = f"{part_of(behind, len(found), 'position')} {'is' if behind == 1 else 'are'} behind"
    body = [
        [*picked(one, "reader", "stream", "writer"), str(one["position"]), f"{one['behind']:,}",
         f"{datetime.fromtimestamp(one['saved'] / 1e6, UTC):%-d %b %Y %H:%M:%S}"]
        for one in sorted(found, key=lambda one: -int(one["behind"]))[:MOST_LINES]
    ]  # fmt: skip
    heads = ["reader", "stream", "writer", "position", "behind by tokens", "saved (UTC)"]
    return f"<h2>Readers</h2>{table(title, heads, 3, body, len(found), 'readers')}"


def archive_lag(found: Rows) -> str:
    """What the table has proven and the archive lacks."""
    if not found:
        return ""
    lacking = [one for one in found if one["rows"]]
    title = "The archive has all proven rows that the table has"
    if lacking:
        title = f"The archive lacks {counted(sum(one['rows'] for one in lacking), 'row')} that the table has proven"
        ages = [one["seconds"] for one in lacking if one["seconds"] is not None]
        title += f", the oldest {seconds(max(ages))} old" if ages else ""
    body = [
        [*picked(one, "stream", "writer"), str(one["archived"]), str(one["proven"]), f"{one['rows']:,}",
         _age(one["seconds"])]
        for one in sorted(lacking, key=lambda one: (-one["rows"], one["stream"], one["writer"]))[:MOST_LINES]
    ]  # fmt: skip
    heads = ["stream", "writer", "archived up to", "proven up to", "rows behind", "oldest of them"]
    return f"<h2>The archive's lag</h2>{table(title, heads, 2, body, len(found), 'archive_lag')}"


def waiting(summary: Mapping[str, Any], found: Rows) -> str:
    """Committed rows above the proven positions, which no job reads yet."""
    if not found:
        return ""
    its = [one for one in found if one["waiting_rows"]]
    title = "No rows wait for their writer"
    if its:
        rows = counted(sum(one["waiting_rows"] for one in its), "committed row")
        silent = len({one["writer"] for one in its if one["silent_for"] > summary["lease"]})
        title = f"{rows} above the proven positions of {counted(len({one['writer'] for one in its}), 'writer')}"
        title += f", {silent} of them silent for more than {seconds(summary['lease'])}"
    body = [
        [*picked(one, "stream", "writer"), str(one["position"]), f"{one['waiting_rows']:,}",
         _age(one["waiting_for"]), seconds(one["silent_for"])]
        for one in sorted(its, key=lambda one: (-one["waiting_rows"], one["stream"], one["writer"]))[:MOST_LINES]
    ]  # fmt: skip
    heads = ["stream", "writer", "proven up to", "waiting rows", "first of them waits for", "writer last seen"]
    return f"<h2>Rows that wait</h2>{table(title, heads, 2, body, len(found), 'table_writers')}"


def _age(value: float | None) -> str:
    return "" if value is None else seconds(value)
