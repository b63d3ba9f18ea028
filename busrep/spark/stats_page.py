"""The statistics as one page of HTML, complete in itself: no network, no scripts, light or dark as the screen is.

Pure: made of the summary and the tables of stats_job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from busrep.spark.stats_latency import latencies, readers
from busrep.spark.stats_meaning import MEANING
from busrep.spark.stats_shapes import keys, shapes, steps
from busrep.spark.stats_streams import Rows, Streams, cell, counted, more, plural, share, streams_of
from busrep.spark.stats_style import STYLE
from busrep.spark.stats_svg import duration, number, over_time, seconds, size, sparkline

if TYPE_CHECKING:
    from busrep.spark.stats_listen import Samples

# Windows that a plot can show; of a longer span they are put together.
MOST_WINDOWS = 320
# Writers that the page lists; the Parquet table has all.
MOST_WRITERS = 40


def page(summary: Mapping[str, Any], tables: Mapping[str, Rows], samples: Samples) -> str:
    """The page."""
    streams = streams_of(tables["writers"])
    title = f"{counted(summary['rows'], 'row')} of {counted(len(streams.names), 'stream')}"
    if summary["span"]:
        title += f" in {duration(summary['span'])}"
    parts = [
        f"<header><h1>{escape(title)}</h1>{_under(summary)}</header>", tiles(summary),
        rates(summary, tables, streams), latencies(summary, tables, samples), writers(summary, tables, streams),
        readers(tables["readers"]), shapes(tables, streams), steps(tables, streams), keys(tables, streams),
        f"<h2>What the numbers mean</h2><div class='card'><dl>{_meaning(summary)}</dl></div>",
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


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
    found.append(
        (
            number(summary["writers"]),
            f"writer{plural(summary['writers'])}, {counted(len(summary['streams']), 'stream')}",
        )
    )
    for one in summary["latencies"]:
        name = {"heard": "commit to the bus", "saved": "commit to saved"}[one["measure"]]
        found.append((seconds(one["p99"]), f"{name}, p99 (p50 {seconds(one['p50'])})"))
    return f"<div class='tiles'>{''.join(f'<div class=tile><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in found)}</div>"  # noqa: E501


# -- rates and writers -------------------------------------------------------------------------------------------


def windows(summary: Mapping[str, Any], rates_: Rows) -> tuple[int, int, int]:
    """(first window, seconds of a window, how many), so that a plot can show them."""
    times = [one["window"] for one in rates_]
    window = summary["window"]
    count = (max(times) - min(times)) // window + 1
    window *= -(-count // MOST_WINDOWS)
    first = min(times) // window * window
    return first, window, (max(times) - first) // window + 1


def _placed(
    rates_: Rows, key: Callable[[Mapping[str, Any]], Any], place: tuple[int, int, int]
) -> dict[Any, list[float]]:
    first, window, count = place
    found: dict[Any, list[float]] = {}
    for one in rates_:
        values = found.setdefault(key(one), [0.0] * count)
        values[(one["window"] - first) // window] += one["rows"] / window
    return found


def rates(summary: Mapping[str, Any], tables: Mapping[str, Rows], streams: Streams) -> str:
    """Rows per second over time."""
    if not tables["rates"]:
        return "<p class='note'>The rows do not tell when they were committed, so there are no rates.</p>"
    place = windows(summary, tables["rates"])
    by_stream = _placed(tables["rates"], lambda one: one["stream"], place)
    none = [0.0] * place[2]
    series = streams.split(lambda name: by_stream.get(name, none))
    totals = [sum(column) for column in zip(*(one[2] for one in series), strict=True)]
    top = max(range(len(totals)), key=totals.__getitem__)
    name, _, values = max((one for one in series if one[1] != "co"), key=lambda one: one[2][top])
    at = datetime.fromtimestamp(place[0] + top * place[1], UTC)
    title = f"Rows per second: {number(totals[top])} at the peak, at {at:%H:%M:%S}"
    if len(series) > 1:
        title += f", of which {share(values[top], totals[top])} {name}"
    plot = over_time(title, series, place[0], place[1], "rows/s")
    return f"<h2>Rates</h2><div class='card'><h3>{escape(title)}</h3>{streams.legend()}{plot}</div>"


def writers(summary: Mapping[str, Any], tables: Mapping[str, Rows], streams: Streams) -> str:
    """A row for each writer of a stream."""
    place = windows(summary, tables["rates"]) if tables["rates"] else (0, 1, 1)
    lines = _placed(tables["rates"], lambda one: (one["stream"], one["writer"]), place)
    peaks: dict[Any, float] = {}
    for one in tables["rates"]:
        key = (one["stream"], one["writer"])
        peaks[key] = max(peaks.get(key, 0.0), one["rows"] / summary["window"])
    order = {name: at for at, name in enumerate(streams.names)}
    its = sorted(tables["writers"], key=lambda one: (order[one["stream"]], -one["rows"], one["writer"]))
    heads = [
        "stream",
        "writer",
        "rows/s over time",
        "peak rows/s",
        "rows",
        "facts",
        "rows a fact",
        "bytes a row",
        "tokens",
    ]
    head = "".join(f"<th{' class=text' if at < 3 else ''}>{name}</th>" for at, name in enumerate(heads))
    body = []
    for one in its[:MOST_WRITERS]:
        key, colour = (one["stream"], one["writer"]), streams.colours[one["stream"]]
        line = sparkline(f"rows/s of {key[1]}", lines[key], colour) if key in lines else ""
        cells = [
            number(peaks.get(key, 0.0)), f"{one['rows']:,}", f"{one['facts']:,}", number(one["rows"] / one["facts"]),
            number(one["bytes"] / one["rows"]), f"{one['first_token']} – {one['last_token']}",
        ]  # fmt: skip
        body.append(
            "<tr>"
            + cell(key[0], f'<i class="{colour}"></i>')
            + cell(key[1])
            + f'<td class="spark">{line}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        )
    rest = more(len(its), MOST_WRITERS, "writers")
    return f"<h2>Writers</h2><div class='card'><table><tr>{head}</tr>{''.join(body)}</table>{rest}</div>"
