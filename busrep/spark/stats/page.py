"""The statistics as one page of HTML, complete in itself: plotly.js stands in it, and nothing is loaded from a host.

Pure: made of the summary and the tables of job.py. Texts from the data are never part of a script: the charts are in
an element of JSON, and the page's policy (Content-Security-Policy) lets a browser run these two scripts alone, by
their hashes, and lets it load nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from busrep.spark.stats.charts import Charts, plotly_js
from busrep.spark.stats.delays import archive_lag, latencies, readers, waiting
from busrep.spark.stats.sections import keys, rates, shapes, steps, streams_of, writers
from busrep.spark.stats.words import Rows, counted, duration, number, plural, seconds, size

if TYPE_CHECKING:
    from busrep.spark.stats.tables import Samples


def page(summary: Mapping[str, Any], tables: Mapping[str, Rows], samples: Samples) -> str:
    """The page."""
    charts, streams = Charts(), streams_of(tables["writers"])
    title = f"{counted(summary['rows'], 'row')} of {counted(len(streams.names), 'stream')}"
    if summary["span"]:
        title += f" in {duration(summary['span'])}"
    parts = [
        f"<header><h1>{escape(title)}</h1>{_under(summary)}</header>", tiles(summary),
        rates(charts, summary, tables, streams), latencies(charts, summary, tables, samples),
        writers(charts, summary, tables, streams), waiting(summary, tables["table_writers"]),
        archive_lag(tables["archive_lag"]), readers(tables["readers"]), shapes(charts, tables, streams),
        steps(charts, tables, streams), keys(charts, tables, streams),
        f"<h2>What the numbers mean</h2><div class='card'><dl>{_meaning(summary)}</dl></div>",
    ]  # fmt: skip
    library = plotly_js()
    scripts = f"{_hash(library)} {_hash(SCRIPT)}"
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n<noscript><p class='note'>The charts need JavaScript, which is switched off.</p></noscript></main>\n"
        f'<script type="application/json" id="charts">{charts.json()}</script>\n'
        f"<script>{library}</script>\n<script>{SCRIPT}</script></body></html>\n"
    )


def _hash(script: str) -> str:
    """As a policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _under(summary: Mapping[str, Any]) -> str:
    told = [f"From the {summary['source']}"]
    if summary["first"] is not None:
        first, last = (datetime.fromtimestamp(summary[name], UTC) for name in ("first", "last"))
        same = first.date() == last.date()
        told.append(
            f"committed {first:%-d %b %Y %H:%M:%S} to {last:{'%H:%M:%S' if same else '%-d %b %Y %H:%M:%S'}} UTC"
        )
    told += [f"log {epoch[:8]}" for epoch in summary["epochs"]]
    return f'<p class="soft">{escape(", ".join(told))}. Made {escape(summary["made"][:16].replace("T", " "))} UTC.</p>'


def _meaning(summary: Mapping[str, Any]) -> str:
    return "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
        for name, text, needs in MEANING
        if not needs or summary[needs]
    )


def tiles(summary: Mapping[str, Any]) -> str:
    """The numbers that one looks for first."""
    rows, facts = summary["rows"], summary["facts"]
    found = [(number(rows), "rows"), (number(facts), f"facts, {number(rows / facts)} rows each")]
    if summary["rows_per_second"] is not None:
        found.append((number(summary["rows_per_second"]), "rows/s on average"))
        found.append((number(summary["peak_rows_per_second"]), f"rows/s at the peak, in {seconds(summary['window'])}"))
    found.append((size(summary["bytes"] / rows), f"a row, {size(summary['bytes'])} in all"))
    count = summary["writers"]
    found.append((number(count), f"writer{plural(count)}, {counted(len(summary['streams']), 'stream')}"))
    for one in summary["latencies"]:
        name = {"heard": "commit to the bus", "saved": "commit to saved"}[one["measure"]]
        found.append((seconds(one["p99"]), f"{name}, p99 (p50 {seconds(one['p50'])})"))
    told = "".join(f"<div class=tile><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in found)
    return f"<div class='tiles'>{told}</div>"


# Draws the charts with the page's colours, and again when the screen goes dark or light. A finger that moves over a
# chart scrolls the page, a mouse zooms.
SCRIPT = """
"use strict";
const {charts, config} = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touched = matchMedia("(pointer: coarse)").matches;
function draw() {
  const style = getComputedStyle(document.documentElement);
  const colour = name => style.getPropertyValue("--" + name).trim();
  const lines = {gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line")};
  const template = {layout: {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", dragmode: touched ? false : "zoom",
    font: {color: colour("soft"), size: 12, family: getComputedStyle(document.body).fontFamily},
    xaxis: lines, yaxis: lines, shapedefaults: {line: {color: colour("ink")}},
    annotationdefaults: {font: {color: colour("ink")}, bgcolor: colour("card")},
    hoverlabel: {bgcolor: colour("card"), bordercolor: colour("soft"), font: {color: colour("ink")}, align: "left"},
    modebar: {bgcolor: "transparent", color: colour("soft"), activecolor: colour("ink")}}};
  for (const [place, {data, layout}] of Object.entries(charts)) {
    const coloured = data.map(trace => trace.meta === undefined ? trace : {...trace, fillcolor: colour(trace.meta),
      marker: {...trace.marker, color: colour(trace.meta)}, line: {...trace.line, color: colour(trace.meta)}});
    try { Plotly.react(place, coloured, {...layout, template}, config); } catch (error) { console.error(error); }
  }
}
dark.addEventListener("change", draw);
draw();
"""

# How the page looks, light and dark.
STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #16191d; --soft: #59616b; --line: #e3e6ea;
  --c1: #2a6fdb; --c2: #e8862e; --c3: #17998a; --c4: #8a4fd0; --c5: #d94a63; --c6: #c3a012; --c7: #5aa545;
  --co: #9aa3ad; }
@media (prefers-color-scheme: dark) {
  :root { --page: #101317; --card: #191d23; --ink: #e8ebef; --soft: #9aa4af; --line: #2b313a;
    --c1: #5b97f2; --c2: #f0a05a; --c3: #3fc0b0; --c4: #ae82ea; --c5: #ef7288; --c6: #dcbd3f; --c7: #82c76e;
    --co: #737d88; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 34px 24px 60px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 38px 0 12px; }
h3 { font-size: 15.5px; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; }
.soft, .note { color: var(--soft); }
.note { font-size: 13.5px; margin: 0 0 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px 11px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
.tile span { color: var(--soft); font-size: 13px; }
.card { padding: 16px 18px 14px; margin: 0 0 14px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.pair .card { margin: 0; } .pair + .card, .after { margin-top: 14px; }
.wide { overflow-x: auto; } .chart { margin-top: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 16px; margin: 4px 0 8px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.legend .shades { width: 90px; margin: 0 6px; background: linear-gradient(90deg, #3e80ec33, #3e80ec); }
.c1 { background: var(--c1); } .c2 { background: var(--c2); } .c3 { background: var(--c3); }
.c4 { background: var(--c4); } .c5 { background: var(--c5); } .c6 { background: var(--c6); }
.c7 { background: var(--c7); } .co { background: var(--co); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); padding: 4px 10px 7px;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th.text, td.text { text-align: left; }
td.text { max-width: 250px; overflow: hidden; text-overflow: ellipsis; unicode-bidi: isolate; }
dl { margin: 0; font-size: 14px; } dt { font-weight: 600; margin-top: 10px; } dd { margin: 0; color: var(--soft); }
@media (max-width: 620px) { main { padding: 20px 10px; } .card { padding: 13px 10px 10px; }
  td.text { max-width: 150px; } }
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""

# (name, what it says and what it does not, which entry of the summary it needs)
MEANING = (
    (
        "Row, fact, token",
        "A fact is what one transaction wrote to a stream; it has a token (an ID from the stream's sequence, "
        "which all its writers share) and one or more rows. A row's size is that of its JSON text in bytes.",
        "",
    ),
    (
        "Time of commit",
        "committed_at of the row: on PostgreSQL when the transaction began, on SQLite when the row was "
        "inserted. Rates count rows by it; a window in which nothing was committed has none.",
        "",
    ),
    (
        "Rows/s on average",
        "All rows that have a time, by the time from the first commit to the last, pauses included. The peak "
        "is that of the busiest window.",
        "",
    ),
    (
        "Steps, facts of other writers between",
        "How many tokens between two consecutive facts of a writer belong to facts of other writers of the "
        "stream. It tells how writers interleave. A reader follows each writer by itself, so this is no loss.",
        "",
    ),
    (
        "Steps, tokens without any fact between",
        "IDs that the sequence gave and that have no fact in the range looked at: transactions that rolled "
        "back, IDs that were reserved and given back, rows that were pruned. Whether a fact was lost between "
        "the table and an archive, 'busrep pipeline audit' says.",
        "",
    ),
    (
        "Rolled back at most",
        "Tokens between a writer's first and last fact without a fact of any writer, by these and the writer's facts. "
        "It is no count of rollbacks: a token that was given back, a pruned row, and a fact above its writer's proven "
        "position leave the same gap, and a transaction takes a token of each of its streams. A token without a fact "
        "does not tell which writer took it. So the share of a writer is an upper bound where its stream has several; "
        "that of all writers together counts each token once.",
        "",
    ),
    (
        "By size of fact",
        "Rows and facts per second, of facts of 1, 2, 3 to 4, 5 to 8 rows, and so on, all streams together. "
        "rates_by_size.parquet has them per stream.",
        "",
    ),
    (
        "Log scale",
        "An axis is logarithmic, and says so, where the largest value is more than 50 times the median of the values "
        "above zero. Values are not stacked there: each has a line or points of its own, and zeros are left out.",
        "",
    ),
    (
        "Rows that wait",
        "Committed rows above the position that their writer has proven. No job reads them, this one neither. A live "
        "writer has some between a COMMIT and its next heartbeat.",
        "",
    ),
    (
        "The archive's lag",
        "Rows between the position at which the archive ends and the one that the table has proven, and the age of the "
        "oldest of them by committed_at and the database's clock. Looked at once, with --archive and --store. Rows "
        "that were pruned before they were archived are in neither; the audit finds them.",
        "",
    ),
    (
        "Heard on the bus",
        "From the time of commit to when this job's driver, subscribed like a reader, had the message with "
        "the fact's rows. It holds the rest of the transaction, the commit, the writer's queue, Redis and the "
        "network. Facts that were not heard as rows (dropped from the writer's memory, too large for a "
        "message) are not in it, nor those whose position was not proven in the table in time.",
        "listened",
    ),
    (
        "Handled and saved by readers",
        "From the time of commit to saved_at of the first position at or above the fact's token that a "
        "durable reader saved, both by the database's clock. Readers save about once a second unless they "
        "save in a transaction of their own, and the job looks ten times a second; so it is an upper bound of "
        "how long a reader takes to handle a fact.",
        "listened",
    ),
    (
        "Keys",
        "The first field of each row, or the one of --key. The number of keys is exact. Long ones are shown "
        "without what they have in common, and pointing at one shows all of it.",
        "",
    ),
)
