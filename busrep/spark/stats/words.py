"""Numbers, shares, times, labels and tables as the statistics' page writes them. Pure.

A text on the page never rounds to a falsehood: `share` writes 0 % and 100 % for nothing and for all alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Rows = Sequence[Mapping[str, Any]]

# Lines of a table in HTML; the Parquet tables have all.
MOST_LINES = 25

TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400)


def number(value: float) -> str:
    """For a person: 0, 0.25, 7.5, 1,234, 45.6 k, 1.2 M. What is not whole does not look whole below 100: 1.0."""
    size = abs(value)
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if size >= unit:
            return f"{value / (1e3 if name == ' k' else unit):.3g}{name}"
    if size >= 100 or value == round(value):
        return f"{value:,.0f}"
    text = f"{value:.2g}" if size < 1 else f"{value:.3g}"
    return text if "." in text or "e" in text else f"{value:.1f}"


def size(value: float) -> str:
    """Bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """A time that something took: 850 us, 12 ms, 3.2 s, 2 min, 5 h, 3 d."""
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(value) >= unit * (2 if unit >= 60 else 1):
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.0f} µs"


def duration(value: float) -> str:
    """A span of time: 42 s, 4 min 57 s, 3 h 5 min, 12 d 4 h."""
    for unit, name, below, less in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= unit:
            rest = int(value % unit // below)
            return f"{int(value // unit)} {name}" + (f" {rest} {less}" if rest else "")
    return seconds(value)


def round_time(least: float) -> int:
    """The least round time, seconds, that is not below ``least``: 1, 2, 5, 10, 15, 30 s, ..., whole days."""
    return next((step for step in TIME_STEPS if step >= least), 86_400 * math.ceil(least / 86_400))


def share(part: float, whole: float) -> str:
    """In per cent. Only nothing is 0 %, and only all of it is 100 %."""
    if not whole or not part:
        return "0 %"
    found = 100 * part / whole
    if part >= whole:
        return f"{found:.0f} %"
    if found < 0.05:
        return "<0.1 %"
    if found >= 99.95:
        return ">99.9 %"
    return f"{found:.1f} %" if found < 9.5 or found >= 99.5 else f"{found:.0f} %"


def part_of(part: int, whole: int, what: str) -> str:
    """So many of so many, counted exactly, and their share."""
    return f"{part:,} of {counted(whole, what)} ({share(part, whole)})"


def plural(count: float) -> str:
    """The ending of a noun."""
    return "" if count == 1 else "s"


def counted(count: int, what: str) -> str:
    """So many of them."""
    return f"{count:,} {what}{plural(count)}"


def span_of(low: int, high: int) -> str:
    """A range of counts, exactly."""
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


# -- texts from the data -----------------------------------------------------------------------------------------


def clipped(text: str, most: int = 300) -> str:
    """A text from the data, of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def markup(text: str) -> str:
    """A text from the data in a chart. Plotly reads some of HTML's tags, and its entities, in every text."""
    return escape(text, quote=False)


def label(text: str, most: int = 240) -> str:
    """A text from the data where a chart is pointed at, in lines that fit into a phone's width."""
    return "<br>".join(map(markup, textwrap.wrap(clipped(text, most), 40))) or "&nbsp;"


def shortened(labels: Sequence[str], most: int) -> list[str]:
    """The labels, the long ones without what they have in common at both ends, and cut in the middle where need be."""
    long = [label for label in labels if len(label) > most]
    head = _common(long)
    tail = _common([label[head:][::-1] for label in long])
    found = []
    for label in labels:
        if len(label) > most:
            head_, tail_ = (head if head > 2 else 0), (tail if tail > 2 else 0)
            label = ("…" if head_ else "") + label[head_ : len(label) - tail_] + ("…" if tail_ else "")
        found.append(label if len(label) <= most else f"{label[: most // 2 - 1]}…{label[-(most // 2) :]}")
    return found


def _common(texts: Sequence[str]) -> int:
    """How many characters several texts have in common at their beginning."""
    if len(texts) < 2:
        return 0
    return next((at for at, signs in enumerate(zip(*texts, strict=False)) if len(set(signs)) > 1), min(map(len, texts)))


# -- tables in HTML ----------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """A cell with a text from the data; pointed at, it shows all of one that is too long."""
    return f'<td class="text" title="{escape(clipped(text))}">{escape(clipped(text))}</td>'


def table(title: str, heads: Sequence[str], names: int, rows: Sequence[Sequence[str]], count: int, where: str) -> str:
    """A card with a table of `MOST_LINES` rows at most. ``names``: how many columns, from the first on, are texts from
    the data. ``count``: rows that there are in the Parquet table ``where``."""
    head = "".join(f"<th{' class=text' if at < names else ''}>{name}</th>" for at, name in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(map(cell, row[:names]))}{''.join(f'<td>{escape(text)}</td>' for text in row[names:])}</tr>"
        for row in rows[:MOST_LINES]
    )
    inner = f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>" if body else ""
    rest = count - min(len(rows), MOST_LINES)
    more = f"<p class='note'>{f'and {rest:,} more' if body else counted(rest, 'line')}, in {where}.parquet</p>"
    above = f"<h3>{escape(title)}</h3>" if title else ""
    return f"<div class='card'>{above}{inner}{more if rest else ''}</div>"


def picked(one: Mapping[str, Any], *names: str) -> list[str]:
    """Some columns of a row, which are texts."""
    return [one[name] for name in names]
