"""Plots as inline SVG: axes with units, columns, areas, bars, all coloured by the page's variables. Pure.

A plot is a text; it scales with the page, and each mark has a title that a browser shows when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

import attrs

# The page's colours c1 to c7, and grey for all others.
COLOURS = 7

Series = tuple[str, str, Sequence[float]]
"""(name, colour, a value per column)."""


# -- numbers -----------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """For a person: 0, 0.25, 7.5, 1,234, 45.6 k, 1.2 M."""
    size = abs(value)
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if size >= unit:
            return f"{value / (1e3 if name == ' k' else unit):.3g}{name}"
    if size >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.2g}" if size < 1 else f"{value:.3g}"


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
    """A span of time, as one says it: 42 s, 4 min 57 s, 3 h 5 min, 12 d 4 h."""
    for unit, name, below, less in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= unit:
            rest = int(value % unit // below)
            return f"{int(value // unit)} {name}" + (f" {rest} {less}" if rest else "")
    return seconds(value)


def nice(least: float, steps: Sequence[float] = (1, 2, 5, 10)) -> float:
    """The least of ..., 1, 2, 5, 10, 20, ... that is not below ``least``."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * step for step in steps if unit * step >= least * (1 - 1e-9))


def ticks(most: float, count: int = 4) -> list[float]:
    """From 0 to ``most`` or a little above, some ``count`` equal steps."""
    step = nice(max(most, 1e-12) / count)
    return [step * at for at in range(math.ceil(most / step - 1e-9) + 1)] if most > 0 else [0.0, 1.0]


TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400)


def round_time(least: float) -> int:
    """The least round time, seconds, that is not below ``least``: 1, 2, 5, 10, 15, 30 s, ..., whole days."""
    return next((step for step in TIME_STEPS if step >= least), 86_400 * math.ceil(least / 86_400))


def time_ticks(start: float, end: float, count: int = 7) -> list[tuple[float, str]]:
    """Round times from ``start`` to ``end``, seconds since 1970, and how they are written (UTC)."""
    step = round_time((end - start) / count)
    form = "%b %Y" if step >= 60 * 86_400 else "%-d %b" if step >= 86_400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    if step < 86_400 <= end - start:
        form = "%-d %b %H:%M"
    first = math.ceil(start / step) * step
    return [
        (at, datetime.fromtimestamp(at, UTC).strftime(form)) for at in range(int(first), math.floor(end) + 1, int(step))
    ]


# -- plots -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Frame:
    """A plot's place: margins round an area with a vertical axis from 0 to the last of ``marks``."""

    width: int
    height: int
    marks: Sequence[float]
    left: int = 62
    right: int = 12
    top: int = 26
    bottom: int = 40

    @property
    def inner(self) -> int:
        """Width of the area."""
        return self.width - self.left - self.right

    def x(self, share: float) -> float:
        """Of 0 (left) to 1."""
        return round(self.left + share * self.inner, 1)

    def y(self, value: float) -> float:
        """Of a value on the axis."""
        area = self.height - self.top - self.bottom
        return round(self.top + area * (1 - value / self.marks[-1]), 1)

    def axis(self, unit: str, under: str) -> str:
        """The vertical axis with its unit above, and what the horizontal one is below."""
        lines = [
            f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{self.y(at)}" y2="{self.y(at)}"/>'
            f'<text class="tick" x="{self.left - 7}" y="{self.y(at) + 4}" text-anchor="end">{number(at)}</text>'
            for at in self.marks
        ]
        unit_text = f'<text class="unit" x="4" y="12">{escape(unit)}</text>'
        middle = self.left + self.inner / 2
        name = f'<text class="unit" x="{middle}" y="{self.height - 4}" text-anchor="middle">{escape(under)}</text>'
        return "".join([*lines, unit_text, name])

    def tick(self, share: float, text: str) -> str:
        """On the horizontal axis."""
        # One at the right end would be cut off.
        anchor = "end" if self.x(share) + 4 * len(text) > self.width else "middle"
        x = self.x(share) if anchor == "middle" else self.width - 2
        return (
            f'<text class="tick" x="{x}" y="{self.height - self.bottom + 17}" '
            f'text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, title: str, *parts: str) -> str:
        """The plot; ``title`` is for those who hear it read."""
        kind = ' class="wide"' if self.width > 1000 else ""
        return (
            f'<svg{kind} viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(title)}">'
            f"{''.join(parts)}</svg>"
        )


def over_time(title: str, series: Sequence[Series], start: float, window: float, unit: str) -> str:
    """Stacked areas of values per window of time, steps without interpolation; ``start``: of the first window."""
    count = len(series[0][2]) if series else 0
    totals = [sum(one[2][at] for one in series) for at in range(count)]
    frame = Frame(1060, 300, ticks(max(totals, default=0.0)))
    end = start + count * window
    parts = [frame.axis(unit, f"time of commit, UTC, in windows of {seconds(window)}")]
    below = [0.0] * count
    for name, colour, values in series:
        above = [low + value for low, value in zip(below, values, strict=True)]
        path = _steps(frame, above) + _steps(frame, below, back=True)
        parts.append(f'<path class="{colour}" d="M{path}Z"><title>{escape(name)}</title></path>')
        below = above
    parts += [frame.tick((at - start) / (end - start), text) for at, text in time_ticks(start, end)]
    parts += [_hover(frame, series, totals, at, start + at * window, unit) for at in range(count)]
    return frame.svg(title, *parts)


def _steps(frame: Frame, values: Sequence[float], *, back: bool = False) -> str:
    order = range(len(values) - 1, -1, -1) if back else range(len(values))
    found = []
    for at in order:
        ends = (at, at + 1)[:: -1 if back else 1]
        found += [f"{frame.x(end / len(values))} {frame.y(values[at])}" for end in ends]
    return ("L" if back else "") + "L".join(found)


def _hover(
    frame: Frame, series: Sequence[Series], totals: Sequence[float], at: int, time: float, unit: str
) -> str:  # fmt: skip
    width = frame.x(1 / len(totals)) - frame.x(0)
    its = [f"{name}: {number(values[at])}" for name, _, values in reversed(series) if values[at]]
    text = "\n".join([datetime.fromtimestamp(time, UTC).strftime("%-d %b %Y %H:%M:%S"), *its])
    text += f"\nall: {number(totals[at])} {unit}"
    area = frame.height - frame.top - frame.bottom
    return (
        f'<rect class="hover" x="{frame.x(at / len(totals))}" y="{frame.top}" width="{width:.1f}" height="{area}">'
        f"<title>{escape(text)}</title></rect>"
    )


def columns(
    title: str, labels: Sequence[str], series: Sequence[Series], unit: str, under: str, *,
    marked: Sequence[tuple[float, str]] = (), edges: bool = False, axis: Sequence[str] = (),
) -> str:  # fmt: skip
    """Columns, one a label, of the series on one another. ``edges``: a label stands at the left edge of its column,
    which begins there. ``marked``: (place, text) of lines, in columns. ``axis``: texts below the columns, where they
    are not the labels."""
    most = max((sum(one[2][at] for one in series) for at in range(len(labels))), default=0.0)
    frame = Frame(520, 250, ticks(most), top=26 + 15 * len(marked))
    parts = [frame.axis(unit, under)]
    slot = frame.inner / max(len(labels), 1)
    for at, label in enumerate(labels):
        parts += _column(frame, at, slot, label, series, unit)
    skip = 1 if axis else max(1, math.ceil(max(map(len, labels), default=1) * 7.2 / max(slot, 1)))
    parts += [
        frame.tick((at + (0 if edges else 0.5)) / len(labels), text)
        for at, text in enumerate(axis or labels)
        if text and at % skip == 0
    ]
    for row, (place, text) in enumerate(marked):
        parts.append(_mark(frame, place / max(len(labels), 1), text, row))
    return frame.svg(title, *parts)


def _column(frame: Frame, at: int, slot: float, label: str, series: Sequence[Series], unit: str) -> list[str]:
    found, base = [], 0.0
    gap = min(slot * 0.18, 6)
    for name, colour, values in series:
        value = values[at]
        if not value:
            continue
        x = frame.left + at * slot + gap / 2
        top, bottom = frame.y(base + value), frame.y(base)
        if base == 0:
            top = min(top, bottom - 1)  # what is there is seen
        text = f"{label}\n{name}: {number(value)} {unit}"
        found.append(
            f'<rect class="{colour}" x="{x:.1f}" y="{top}" width="{slot - gap:.1f}" height="{bottom - top:.1f}">'
            f"<title>{escape(text)}</title></rect>"
        )
        base += value
    return found


def _mark(frame: Frame, share: float, text: str, row: int) -> str:
    x, y = frame.x(share), 28 + 15 * row
    end = share > 0.72
    return (
        f'<line class="mark" x1="{x}" x2="{x}" y1="{y - 10}" y2="{frame.height - frame.bottom}"/>'
        f'<text class="marked" x="{x - 5 if end else x + 5}" y="{y}" text-anchor="{"end" if end else "start"}">'
        f"{escape(text)}</text>"
    )


def bars(title: str, items: Sequence[tuple[str, float, str]], colour: str) -> str:
    """Horizontal bars: (label, value, text at the bar's end)."""
    row, left, width = 21, 190, 520
    most = max((value for _, value, _ in items), default=1.0) or 1.0
    parts = []
    shorts = shortened([label for label, _, _ in items], 23)
    for at, ((label, value, text), short) in enumerate(zip(items, shorts, strict=True)):
        y, length = at * row, max(1.5, (width - left - 118) * value / most)
        parts.append(
            f'<text class="label" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(short)}'
            f"<title>{escape(label)}</title></text>"
            f'<rect class="{colour}" x="{left}" y="{y + 3}" width="{length:.1f}" height="{row - 6}" rx="2">'
            f"<title>{escape(label)}\n{escape(text)}</title></rect>"
            f'<text class="tick" x="{left + length + 6:.1f}" y="{y + 14}">{escape(text)}</text>'
        )
    return Frame(width, max(1, len(items)) * row + 4, [0, 1]).svg(title, *parts)


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
    """How many signs at their beginning several texts have in common."""
    if len(texts) < 2:
        return 0
    return next((at for at, signs in enumerate(zip(*texts, strict=False)) if len(set(signs)) > 1), min(map(len, texts)))


def sparkline(title: str, values: Sequence[float], colour: str) -> str:
    """A small area without axes, from 0 to its own maximum."""
    frame = Frame(170, 26, [0, max(values, default=0.0) or 1.0], left=0, right=0, top=2, bottom=1)
    path = _steps(frame, values) + _steps(frame, [0.0] * len(values), back=True)
    return frame.svg(title, f'<path class="{colour}" d="M{path}Z"/>')
