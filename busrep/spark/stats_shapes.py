"""The part of the statistics' page that tells of facts and rows: how large, how far apart, of which keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log2
from typing import Any

from busrep.spark.stats_streams import Rows, Streams, clipped, share
from busrep.spark.stats_svg import Series, bars, columns, number, size

# Streams whose keys the page shows; the Parquet table has all.
MOST_KEYED = 6


def _powers(most: int, first: int = 1) -> list[tuple[int, int]]:
    """Ranges of counts: first, then up to the next powers of two: (1, 1), (2, 2), (3, 4), (5, 8), ..."""
    found = [(first, first)] if first == 1 else [(0, 0), (1, 1)]
    while found[-1][1] < most:
        low, last = found[-1][1] + 1, found[-1][1]
        found.append((low, last * 2 if first == 1 else last * 2 + 1))
    return found


def _range(low: int, high: int) -> str:
    return number(low) if low == high else f"{number(low)}–{number(high)}"


def _shares(
    table: Rows, streams: Streams, places: Sequence[Any], place: Callable[[Mapping[str, Any]], int], count: str
) -> list[Series]:  # fmt: skip
    total = sum(one[count] for one in table) or 1
    found: dict[str, list[float]] = {name: [0.0] * len(places) for name in streams.names}
    for one in table:
        found[one["stream"]][place(one)] += 100 * one[count] / total
    return streams.split(lambda name: found[name])


def shapes(tables: Mapping[str, Rows], streams: Streams) -> str:
    """Rows per fact, and sizes of rows."""
    per_fact, sizes = tables["rows_per_fact"], tables["row_sizes"]
    ranges = _powers(max(one["rows"] for one in per_fact))
    series = _shares(
        per_fact, streams, ranges, lambda one: next(at for at, span in enumerate(ranges) if one["rows"] <= span[1]),
        "facts",
    )  # fmt: skip
    single = sum(one["facts"] for one in per_fact if one["rows"] == 1)
    most = max(per_fact, key=lambda one: one["rows"])
    title = f"{share(single, sum(one['facts'] for one in per_fact))} of the facts have one row, the largest {number(most['rows'])} ({most['stream']})"  # noqa: E501
    left = columns(title, [_range(*span) for span in ranges], series, "% of facts", "rows in a fact")
    least, most_ = (pick(one["low"] for one in sizes) for pick in (min, max))
    first = 2.0 ** floor(log2(least))  # every second column begins at a power of two
    places = [first * 2 ** (at / 2) for at in range(round(2 * log2(most_ / first)) + 1)]
    series = _shares(sizes, streams, places, lambda one: round(2 * log2(one["low"] / places[0])), "rows")
    most = max(tables["row_size_percentiles"], key=lambda one: one["most"])
    title2 = (
        f"Half of the rows are below {size(_median(sizes))}; the largest, of {most['stream']}, is {size(most['most'])}"
    )
    right = columns(title2, [size(at) for at in places], series, "% of rows", "bytes of a row's JSON", edges=True)
    cards = [
        f"<div class='card'><h3>{escape(text)}</h3>{plot}</div>" for text, plot in ((title, left), (title2, right))
    ]
    return f"<h2>Shape of facts</h2>{streams.legend()}<div class='pair'>{''.join(cards)}</div>"


def steps(tables: Mapping[str, Rows], streams: Streams) -> str:
    """What lies between a writer's facts."""
    table = tables["steps"]
    if not table:
        return ""
    cards = []
    for whose in ("others", "nobody"):
        its = [one for one in table if one["whose"] == whose]
        count, tokens = sum(one["steps"] for one in its), sum(one["tokens"] for one in its)
        none = sum(one["steps"] for one in its if one["high"] == 0)
        ranges = _powers(max(one["low"] for one in its), first=0)
        place = {span[0]: at for at, span in enumerate(ranges)}
        series = _shares(its, streams, ranges, lambda one, place=place: place[one["low"]], "steps")  # type: ignore[misc]
        if whose == "others":
            title = f"Facts of other writers between: none in {share(none, count)} of the steps, {number(tokens / count)} on average"  # noqa: E501
            under = "facts of other writers between two facts of a writer"
        else:
            title = (
                f"Tokens without any fact between: none in {share(none, count)} of the steps, {number(tokens)} in all"
            )
            under = "tokens without a fact between two facts of a writer"
        plot = columns(title, [_range(*span) for span in ranges], series, "% of steps", under)
        cards.append(f"<div class='card'><h3>{escape(title)}</h3>{plot}</div>")
    note = (
        "A step is from one fact of a writer to its next. No skip is a loss by itself: what is lost, the audit finds."
    )
    return (
        f"<h2>Steps of tokens</h2><p class='note'>{note}</p>{streams.legend()}<div class='pair'>{''.join(cards)}</div>"
    )


def keys(tables: Mapping[str, Rows], streams: Streams) -> str:
    """The keys with most rows."""
    cards: list[str] = []
    by_stream: dict[str, list[Mapping[str, Any]]] = {name: [] for name in streams.names}
    for one in tables["top_keys"]:
        by_stream[one["stream"]].append(one)
    found = [(name, its) for name, its in by_stream.items() if len(its) > 1]  # else there is nothing to compare
    for name, its in found[:MOST_KEYED]:
        shown = its[:12]
        part = sum(one["share"] for one in shown)
        title = f"{name}: {len(shown)} of {number(its[0]['keys'])} keys have {share(part, 1)} of the rows"
        items = [
            (_key(one["key"]), one["rows"], f"{number(one['rows'])} ({share(one['share'], 1)})") for one in shown
        ]  # fmt: skip
        cards.append(f"<div class='card'><h3>{escape(title)}</h3>{bars(title, items, streams.colours[name])}</div>")
    rest = "" if len(found) <= MOST_KEYED else "<p class='note'>The keys of the rest are in top_keys.parquet.</p>"
    return f"<h2>Keys with most rows</h2><div class='pair'>{''.join(cards)}</div>{rest}" if cards else ""


def _median(sizes: Rows) -> float:
    """The upper bound of the bucket in which the median is."""
    total, seen = sum(one["rows"] for one in sizes), 0
    for one in sorted(sizes, key=lambda one: float(one["low"])):
        seen += one["rows"]
        if 2 * seen >= total:
            return float(one["high"])
    return 0.0


def _key(value: str | None) -> str:
    return "null" if value is None else clipped(value) or '""'
