"""The parts of the statistics' page on what was written: rates, writers, shapes, tokens, keys. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from busrep.spark.stats import words
from busrep.spark.stats.charts import Charts, Palette, Series, bars, columns, heat, over_time, palette
from busrep.spark.stats.words import MOST_LINES, Rows, clipped, number, part_of, picked, seconds, share, span_of, table

# Windows that a chart can show; of a longer span they are put together.
MOST_WINDOWS = 320
# Bars of a chart; the Parquet tables have all.
MOST_BARS = 12
# Streams whose keys the page shows; the Parquet table has all.
MOST_KEYED = 6


def streams_of(writers: Rows) -> Palette:
    """The streams of the table of writers, those with most rows first."""
    return palette("stream", _sums(writers, "stream", "rows"))


def _sums(table: Rows, by: str, of: str) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for one in table:
        found[one[by]] += one[of]
    return found


# -- rates -------------------------------------------------------------------------------------------------------


def windows(summary: Mapping[str, Any], rates_: Rows) -> tuple[int, int, int]:
    """(first window, seconds of a window, how many), so that a chart can show them."""
    times = [one["window"] for one in rates_]
    window = summary["window"]
    count = (max(times) - min(times)) // window + 1
    window *= -(-count // MOST_WINDOWS)
    first = min(times) // window * window
    return first, window, (max(times) - first) // window + 1


def _placed(
    rates_: Rows, key: Callable[[Mapping[str, Any]], Any], place: tuple[int, int, int], of: str = "rows"
) -> dict[Any, list[float]]:
    first, window, count = place
    found: dict[Any, list[float]] = {}
    for one in rates_:
        values = found.setdefault(key(one), [0.0] * count)
        values[(one["window"] - first) // window] += one[of] / window
    return found


def rates(charts: Charts, summary: Mapping[str, Any], tables: Mapping[str, Rows], streams: Palette) -> str:
    """Rows per second over time: by stream, and by the size of facts."""
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
    day = "" if summary["span"] < 86_400 else f"{at:%-d %b} "
    title = f"Rows per second: {number(totals[top])} at the peak, at {day}{at:%H:%M:%S} UTC"
    if len(series) > 1:
        title += f", of which {share(values[top], totals[top])} {clipped(name, 60)}"
    unit = f"rows/s, windows of {seconds(place[1])}"
    card = charts.card(title, over_time(series, place[0], place[1], unit), streams.legend())
    return f"<h2>Rates</h2>{card}{_by_size(charts, tables, place)}"


def _by_size(charts: Charts, tables: Mapping[str, Rows], place: tuple[int, int, int]) -> str:
    table_ = tables["rates_by_size"]

    def name_of(one: Mapping[str, Any]) -> str:
        return f"facts of {span_of(one['low'], one['high'])} row{words.plural(one['high'])}"

    rows, facts = Counter[str](), Counter[str]()
    for one in table_:
        rows[name_of(one)] += one["rows"]
        facts[name_of(one)] += one["facts"]
    sizes = palette("size", rows)
    cards = []
    for of, sums in (("rows", rows), ("facts", facts)):
        by_size = _placed(table_, name_of, place, of)
        top = max(sums, key=lambda name: (sums[name], name))
        title = f"{of.title()} per second by size of fact: {part_of(sums[top], sums.total(), of[:-1])} in {top}"
        series = sizes.split(by_size.__getitem__)
        cards.append(
            charts.card(title, over_time(series, place[0], place[1], f"{of}/s, windows of {seconds(place[1])}"))
        )
    return f"{sizes.legend()}<div class='pair'>{''.join(cards)}</div>"


def writers(charts: Charts, summary: Mapping[str, Any], tables: Mapping[str, Rows], streams: Palette) -> str:
    """Which writer wrote when, and a row for each writer of a stream."""
    order = {name: at for at, name in enumerate(streams.names)}
    its = sorted(tables["writers"], key=lambda one: (order[one["stream"]], -one["rows"], one["writer"]))
    map_ = ""
    if tables["rates"]:
        place = windows(summary, tables["rates"])
        lines = _placed(tables["rates"], lambda one: (one["stream"], one["writer"]), place)
        keys = [key for one in its if (key := (one["stream"], one["writer"])) in lines][:MOST_LINES]
        drawn, legend = heat([(" · ".join(key), lines[key]) for key in keys], place[0], place[1], "rows/s")
        most = "" if len(keys) == len(its) else f", the first {len(keys)} of {len(its):,}"
        title = f"Rows per second of each writer of a stream, in windows of {seconds(place[1])}{most}"
        map_ = charts.card(title, drawn, legend)
    peaks: dict[Any, float] = {}
    for one in tables["rates"]:
        key = (one["stream"], one["writer"])
        peaks[key] = max(peaks.get(key, 0.0), one["rows"] / summary["window"])
    heads = ["stream", "writer", "peak rows/s", "rows", "facts", "rows a fact", "bytes a row", "tokens"]
    body = [
        [*picked(one, "stream", "writer"), number(peaks.get((one["stream"], one["writer"]), 0.0)),
         f"{one['rows']:,}", f"{one['facts']:,}", number(one["rows"] / one["facts"]),
         number(one["bytes"] / one["rows"]), f"{one['first_token']} – {one['last_token']}"]
        for one in its[:MOST_LINES]
    ]  # fmt: skip
    return f"<h2>Writers</h2>{map_}{table('', heads, 2, body, len(its), 'writers')}"


# -- facts and rows ----------------------------------------------------------------------------------------------


def _powers(most: int, first: int = 1) -> list[tuple[int, int]]:
    """Ranges of counts: first, then up to the next powers of two: (1, 1), (2, 2), (3, 4), (5, 8), ..."""
    found = [(first, first)] if first == 1 else [(0, 0), (1, 1)]
    while found[-1][1] < most:
        low, last = found[-1][1] + 1, found[-1][1]
        found.append((low, last * 2 if first == 1 else last * 2 + 1))
    return found


def _shares(
    rows: Rows, streams: Palette, places: Sequence[Any], place: Callable[[Mapping[str, Any]], int], count: str
) -> list[Series]:  # fmt: skip
    total = sum(one[count] for one in rows) or 1
    found: dict[str, list[float]] = {name: [0.0] * len(places) for name in streams.names}
    for one in rows:
        found[one["stream"]][place(one)] += 100 * one[count] / total
    return streams.split(lambda name: found[name])


def shapes(charts: Charts, tables: Mapping[str, Rows], streams: Palette) -> str:
    """Rows per fact, and sizes of rows."""
    per_fact, sizes = tables["rows_per_fact"], tables["row_sizes"]
    ranges = _powers(max(one["rows"] for one in per_fact))
    series = _shares(
        per_fact, streams, ranges, lambda one: next(at for at, span in enumerate(ranges) if one["rows"] <= span[1]),
        "facts",
    )  # fmt: skip
    single = sum(one["facts"] for one in per_fact if one["rows"] == 1)
    most = max(per_fact, key=lambda one: one["rows"])
    title = (
        f"{part_of(single, sum(one['facts'] for one in per_fact), 'fact')} {'has' if single == 1 else 'have'} one row; "
        f"the largest has {most['rows']:,} ({clipped(most['stream'], 60)})"
    )
    left = charts.card(title, columns([span_of(*span) for span in ranges], series, "% of facts", "rows in a fact"))
    least, most_ = (pick(one["low"] for one in sizes) for pick in (min, max))
    first = 2.0 ** math.floor(math.log2(least))  # every second column begins at a power of two
    places = [first * 2 ** (at / 2) for at in range(round(2 * math.log2(most_ / first)) + 1)]
    series = _shares(sizes, streams, places, lambda one: round(2 * math.log2(one["low"] / places[0])), "rows")
    most = max(tables["row_size_percentiles"], key=lambda one: one["most"])
    title = (
        f"At least half of the rows have at most {_median(sizes):,} bytes; the largest has {most['most']:,} "
        f"({clipped(most['stream'], 60)})"
    )
    drawn = columns([words.size(at) for at in places], series, "% of rows", "bytes of a row's JSON", edges=True)
    return f"<h2>Shape of facts</h2>{streams.legend()}<div class='pair'>{left}{charts.card(title, drawn)}</div>"


def _median(sizes: Rows) -> int:
    """The most bytes that a row in the range of the median can have."""
    total, seen = sum(one["rows"] for one in sizes), 0
    for one in sorted(sizes, key=lambda one: float(one["low"])):
        seen += one["rows"]
        if 2 * seen >= total:
            return math.ceil(float(one["high"])) - 1
    return 0


# -- tokens ------------------------------------------------------------------------------------------------------


def steps(charts: Charts, tables: Mapping[str, Rows], streams: Palette) -> str:
    """What lies between a writer's facts."""
    found = tables["steps"]
    if not found:
        return ""
    cards = []
    for whose in ("others", "nobody"):
        its = [one for one in found if one["whose"] == whose]
        count, tokens = sum(one["steps"] for one in its), sum(one["tokens"] for one in its)
        none = sum(one["steps"] for one in its if one["high"] == 0)
        ranges = _powers(max(one["low"] for one in its), first=0)
        place = {span[0]: at for at, span in enumerate(ranges)}
        series = _shares(its, streams, ranges, lambda one, place=place: place[one["low"]], "steps")  # type: ignore[misc]
        if whose == "others":
            title = f"In {part_of(none, count, 'step')} no fact of another writer between"
            title += f"; {number(tokens / count)} on average"
            under = "facts of other writers between two of a writer"
        else:
            title = (
                f"In {part_of(none, count, 'step')} no token without a fact between; {tokens:,} in all steps together"
            )
            under = "tokens without a fact between two facts"
        cards.append(charts.card(title, columns([span_of(*span) for span in ranges], series, "% of steps", under)))
    note = (
        "A step is from one fact of a writer to its next. No skip is a loss by itself: what is lost, the audit finds."
    )
    head = f"<h2>Steps of tokens</h2><p class='note'>{note}</p>{streams.legend()}"
    return f"{head}<div class='pair'>{''.join(cards)}</div>{_unused(charts, tables['unused_ids'])}"


def _unused(charts: Charts, found: Rows) -> str:
    """The share of IDs without a fact, per writer: what may have been rolled back."""
    wholes = [one for one in found if not one["writer"]]
    unused, ids = sum(one["unused"] for one in wholes), sum(one["unused"] + one["facts"] for one in wholes)
    if not unused:
        return "<p class='note'>Each ID between a stream's first and last fact has a fact: nothing was rolled back.</p>"
    its = [one for one in found if one["writer"] or one["writers"] > 1]
    its.sort(key=lambda one: (-one["share"], -one["unused"], one["stream"], one["writer"]))
    items = [
        (f"{one['stream']} · {one['writer'] or 'all writers'}", 100 * one["share"],
         f"{'≤ ' if one['writer'] and one['writers'] > 1 else ''}{share(one['unused'], one['unused'] + one['facts'])}"
         f" ({one['unused']:,})")
        for one in its[:MOST_BARS]
    ]  # fmt: skip
    note = (
        "Of the IDs between a writer's first and last fact, without those of other writers' facts. A rollback leaves "
        "such an ID. So do an ID that was given back, a pruned row and a fact that is not proven yet. An ID without a "
        "fact does not tell whose it was: in a stream of several writers it counts for each of them, and the share, "
        "marked ≤, is an upper bound."
    )
    title = f"Rolled back at most: {part_of(unused, ids, 'ID')}"
    rest = (
        f"<p class='note'>and {len(its) - MOST_BARS:,} more, in unused_ids.parquet</p>" if len(its) > MOST_BARS else ""
    )
    card = charts.card(title, bars(items, "c2", "% of IDs without a fact"), f"<p class='note'>{escape(note)}</p>")
    return f"<div class='after'>{card}{rest}</div>"


# -- keys --------------------------------------------------------------------------------------------------------


def keys(charts: Charts, tables: Mapping[str, Rows], streams: Palette) -> str:
    """The keys with most rows."""
    whole = _sums(tables["writers"], "stream", "rows")
    cards: list[str] = []
    by_stream: dict[str, list[Mapping[str, Any]]] = {name: [] for name in streams.names}
    for one in tables["top_keys"]:
        by_stream[one["stream"]].append(one)
    found = [(name, its) for name, its in by_stream.items() if len(its) > 1]  # else there is nothing to compare
    for name, its in found[:MOST_KEYED]:
        shown = its[:MOST_BARS]
        rows = sum(one["rows"] for one in shown)
        title = f"{clipped(name, 60)}: {len(shown)} of {its[0]['keys']:,} keys have {part_of(rows, whole[name], 'row')}"
        items = [
            (_key(one["key"]), one["rows"], f"{number(one['rows'])} ({share(one['rows'], whole[name])})")
            for one in shown
        ]
        cards.append(charts.card(title, bars(items, streams.colours[name], "rows")))
    rest = "" if len(found) <= MOST_KEYED else "<p class='note'>The keys of the rest are in top_keys.parquet.</p>"
    return f"<h2>Keys with most rows</h2><div class='pair'>{''.join(cards)}</div>{rest}" if cards else ""


def _key(value: str | None) -> str:
    return "null" if value is None else clipped(value) or '""'
