"""The charts of the statistics' page, made by plotly: areas over time, columns, bars and a map of writers.

A chart has no colours of its own: a trace's ``meta`` names one of the page's (c1 to c7, co), which the page's script
puts in, light or dark. Titles stand above a chart, in HTML, where they wrap on a narrow screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from statistics import median_low
from typing import Any

import attrs

from busrep.errors import MissingExtra
from busrep.spark.stats.words import clipped, label, markup, number, plural, shortened

try:
    from plotly import graph_objects
    from plotly.io.json import to_json_plotly
    from plotly.offline import get_plotlyjs
except ImportError:
    raise MissingExtra("spark", "the statistics' page") from None

# The page's colours c1 to c7; what has none is grey.
COLOURS = 7
# An axis is logarithmic when its largest value is more than so many times the median: in a chart of 250 pixels half of
# the values would have less than five.
HIDES = 50

CONFIG = {
    "responsive": True,
    "displayModeBar": False,  # without a mouse it would always cover a part of the chart
    "displaylogo": False,
    "showSendToCloud": False,  # plotly.js 4 has a button that sends the data away, unless it is told not to
    "plotlyServerURL": "",
    "topojsonURL": "none",
    "typesetMath": False,
}
"""What plotly.js is told: nothing comes from another host, and nothing goes to one. A double click ends a zoom."""

Series = tuple[str, str, Sequence[float]]
"""(name, colour, a value per column)."""


@cache
def plotly_js() -> str:
    """The library as it stands in a page. Some 5 MB."""
    return str(get_plotlyjs())


def hides(values: Iterable[float]) -> bool:
    """Whether the largest of these values hides the others on a linear axis. The lower median counts, so that the
    larger of two values can hide the smaller one. Zeros do not count, they are hidden on any axis."""
    found = [value for value in values if value > 0]
    return bool(found) and max(found) > HIDES * median_low(found)


@attrs.frozen
class Palette:
    """Names with their colours, those with the highest counts first. ``shown``: those that have a colour."""

    what: str
    names: Sequence[str]
    colours: Mapping[str, str]
    shown: Sequence[str]

    def split(self, values: Callable[[str], Sequence[float]]) -> list[Series]:
        """A series for each name that has a colour, and one of all others, from the bottom up."""
        found = [(name, self.colours[name], values(name)) for name in self.shown]
        rest = [values(name) for name in self.names if name not in self.shown]
        if rest:
            found.append((self._others(len(rest)), "co", [sum(column) for column in zip(*rest, strict=True)]))
        return found

    def legend(self) -> str:
        """Which colour is which, in HTML; nothing where there is one."""
        items = [(name, self.colours[name]) for name in self.shown]
        if len(self.names) > len(self.shown):
            items.append((self._others(len(self.names) - len(self.shown)), "co"))
        parts = (f'<span><i class="{colour}"></i>{escape(clipped(name, 60))}</span>' for name, colour in items)
        return f'<div class="legend">{"".join(parts)}</div>' if len(items) > 1 else ""

    def _others(self, count: int) -> str:
        return f"{count} other {self.what}{plural(count)}"


def palette(what: str, counts: Mapping[str, float]) -> Palette:
    """``what``: what the names are, as a singular noun. ``counts``: by name."""
    names = sorted(counts, key=lambda name: (-counts[name], name))
    shown = names if len(names) <= COLOURS else names[: COLOURS - 1]
    colours = dict.fromkeys(names, "co") | {name: f"c{at}" for at, name in enumerate(shown, 1)}
    return Palette(what, names, colours, shown)


@attrs.define
class Charts:
    """The charts of one page, by the identifiers of their places in it."""

    figures: dict[str, Any] = attrs.field(factory=dict)

    def card(self, title: str, figure: Any, before: str = "") -> str:
        """The place of a chart, in HTML. ``before``: HTML between the title and the chart."""
        name = f"chart{len(self.figures) + 1}"
        self.figures[name] = figure
        heading = escape(title).replace(" %", "&nbsp;%")
        return (
            f'<div class="card"><h3>{heading}</h3>{before}'
            f'<div class="chart" id="{name}" role="img" aria-label="{escape(title)}" '
            f'style="height:{figure.layout.height}px"></div></div>'
        )

    def json(self) -> str:
        """All of them, for the page's script. It cannot end a ``script`` element: plotly writes ``<`` as an escape."""
        told = {"charts": {name: one.to_plotly_json() for name, one in self.figures.items()}, "config": CONFIG}
        return str(to_json_plotly(told, engine="orjson"))


def _figure(traces: Sequence[Any], height: int, **layout: Any) -> Any:
    return graph_objects.Figure(
        traces,
        {
            "template": graph_objects.layout.Template(), "height": height, "showlegend": False,
            "margin": {"l": 8, "r": 10, "t": 8, "b": 8}, **layout,
        },
    )  # fmt: skip


def _axis(title: str, *, log: bool = False, **more: Any) -> dict[str, Any]:
    """An axis of values from 0 on, or a logarithmic one, which says so."""
    found = {
        "title": {"text": f"{markup(title)}, log scale" if log else markup(title)}, "type": "log" if log else "linear",
        "automargin": True, "exponentformat": "SI", "minexponent": 4, **more,
    }  # fmt: skip
    return {"dtick": 1, **found} if log else {"rangemode": "tozero", **found}


def _seen(values: Sequence[float], log: bool) -> list[float | None]:
    """A logarithmic axis has no place for a zero."""
    return [value or None for value in values] if log else list(values)


def over_time(series: Sequence[Series], start: int, window: int, unit: str) -> Any:
    """Values per window of time, in steps: stacked areas, or, on a logarithmic axis, a line each, for there the height
    of a stack is no sum. ``start``: of the first window, seconds since 1970; ``window``: seconds."""
    count = len(series[0][2])
    log = hides(sum(one[2][at] for one in series) for at in range(count))
    # The last step ends where its window does.
    times = [1000 * (start + at * window) for at in range(count + 1)]
    form: dict[str, Any] = (
        {"mode": "lines+markers", "marker": {"size": 3}} if log else {"mode": "lines", "fill": "tonexty"}
    )
    if not log:
        form["stackgroup"] = "all"
    traces = [
        graph_objects.Scatter(
            x=times, y=_seen([*values, values[-1]], log), name=label(name), meta=colour,
            line={"shape": "hv", "width": 1.5 if log else 0.5}, hovertemplate="%{y:,.3~r}", **form,
        )
        for name, colour, values in series
    ]  # fmt: skip
    return _figure(
        traces, 310, hovermode="x unified",
        xaxis={"type": "date", "title": {"text": "time of commit, UTC"}, "automargin": True, "nticks": 6},
        yaxis=_axis(unit, log=log),
    )  # fmt: skip


def columns(
    labels: Sequence[str], series: Sequence[Series], unit: str, under: str, *,
    marked: Sequence[tuple[float, str]] = (), edges: bool = False, axis: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Columns, one a label, of the series on one another; or, on a logarithmic axis, points. ``edges``: a label stands
    at the left edge of its column, which begins there. ``axis``: texts below the columns, where they are not the
    labels. ``marked``: (place in columns, text) of lines."""
    count = len(labels)
    log = hides(sum(one[2][at] for one in series) for at in range(count))
    traces = []
    for name, colour, values in series:
        texts = [
            f"{label(text)}<br>{label(name)}: {number(value)} {markup(unit)}"
            for text, value in zip(labels, values, strict=True)
        ]
        common = {"x": list(range(count)), "y": _seen(values, log), "name": label(name), "meta": colour,
                  "hovertext": texts, "hoverinfo": "text"}  # fmt: skip
        if log:
            traces.append(graph_objects.Scatter(mode="lines+markers", marker={"size": 8}, line={"width": 1}, **common))
        else:
            traces.append(graph_objects.Bar(**common))
    # Of labels as wide as these so many fit below half of a wide screen.
    skip = 1 if axis else math.ceil(count * max(map(len, labels)) / 60)
    shown = [(at, text) for at, text in enumerate(axis or labels) if text and at % skip == 0]
    # The texts of lines are above the columns.
    room = {"range": [0, 1.3 * max(sum(one[2][at] for one in series) for at in range(count))]} if marked else {}
    figure = _figure(
        traces, 270, barmode="stack", bargap=0.12, hovermode="closest",
        xaxis={
            "title": {"text": markup(under)}, "type": "linear", "range": [-0.6, count - 0.4], "automargin": True,
            "showgrid": False, "tickmode": "array", "tickvals": [at - 0.5 * edges for at, _ in shown],
            "ticktext": [markup(text) for _, text in shown],
        },
        yaxis=_axis(unit, log=log, **({} if log else room)),
    )  # fmt: skip
    for row, (place, text) in enumerate(marked):
        figure.add_vline(
            place - 0.5, line={"dash": "dot", "width": 1}, annotation_text=markup(text), annotation_yshift=-16 * row,
            annotation_position="top left" if place > 0.7 * count else "top right",
        )  # fmt: skip
    return figure


def bars(items: Sequence[tuple[str, float, str]], colour: str, unit: str) -> Any:
    """Horizontal bars, the first at the top: (label, value, text at the bar's end)."""
    names, values, texts = (list(column) for column in zip(*items, strict=True))
    log = hides(values)
    trace = graph_objects.Bar(
        x=_seen(values, log), y=list(range(len(items))), orientation="h", meta=colour, text=list(map(markup, texts)),
        textposition="outside", cliponaxis=False, hoverinfo="text",
        hovertext=[f"{label(name)}<br>{markup(text)}" for name, text in zip(names, texts, strict=True)],
    )  # fmt: skip
    most, least = max(values), min((value for value in values if value > 0), default=1.0)
    # Room for the texts behind the bars.
    span = [math.log10(least) - 0.3, 1.45 * math.log10(most / least) + math.log10(least)] if log else [0, 1.45 * most]
    return _figure(
        [trace], 70 + 21 * len(items), bargap=0.25, hovermode="closest",
        xaxis=_axis(unit, log=log, range=span, nticks=5),
        yaxis=_names(shortened(names, 23)),
    )  # fmt: skip


def heat(rows: Sequence[tuple[str, Sequence[float]]], start: int, window: int, unit: str) -> tuple[Any, str]:
    """A line for each name, the first at the top, and in it a cell for each window of time, deeper where its value is
    higher; and the legend, in HTML. A cell without a value is empty."""
    flat = [value for _, values in rows for value in values if value]
    log = hides(flat)
    scaled: Callable[[float], float] = math.log10 if log else float
    least, most = min(flat, default=1.0), max(flat, default=1.0)
    times = [1000 * (start + at * window) for at in range(len(rows[0][1]) + 1)]
    traces = [
        graph_objects.Heatmap(
            x=times, y=[place - 0.5, place + 0.5], z=[[scaled(value) if value else None for value in values]], ygap=2,
            customdata=[list(values)], name=label(name), zmin=scaled(least) if log else 0.0, zmax=scaled(most),
            colorscale=[[0, "rgba(62,128,236,0.2)"], [1, "rgba(62,128,236,1)"]], showscale=False,
            hovertemplate=f"%{{fullData.name}}<br>%{{x}}<br>%{{customdata:,.3~r}} {markup(unit)}<extra></extra>",
        )
        for place, (name, values) in enumerate(rows)
    ]  # fmt: skip
    figure = _figure(
        traces, 60 + 20 * len(rows), hovermode="closest",
        xaxis={"type": "date", "title": {"text": "time of commit, UTC"}, "automargin": True, "nticks": 6, "ticks": ""},
        yaxis=_names(shortened([name for name, _ in rows], 30)),
    )  # fmt: skip
    ends = f'{number(least) if log else 0} <i class="shades"></i> {number(most)} {escape(unit)}'
    return figure, f'<div class="legend"><span>{ends}{", log scale" if log else ""}</span></div>'


def _names(labels: Sequence[str]) -> dict[str, Any]:
    """A vertical axis of names, the first at the top."""
    return {
        "type": "linear", "range": [len(labels) - 0.4, -0.6], "tickmode": "array", "tickvals": list(range(len(labels))),
        "ticktext": list(map(markup, labels)), "automargin": True, "showgrid": False, "zeroline": False,
        "ticks": "",
    }  # fmt: skip
