"""The streams of the statistics' page, each with its colour, and the words that the page counts with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import attrs

from busrep.spark.stats_svg import COLOURS, Series

Rows = Sequence[Mapping[str, Any]]


@attrs.frozen
class Streams:
    """The streams, those with most rows first; ``colours``: of each."""

    names: Sequence[str]
    colours: Mapping[str, str]
    shown: Sequence[str]

    def split(self, values: Callable[[str], Sequence[float]]) -> list[Series]:
        """A series for each stream that has a colour, and one of all others, from the bottom up."""
        found = [(name, self.colours[name], values(name)) for name in self.shown]
        rest = [values(name) for name in self.names if name not in self.shown]
        if rest:
            found.append((f"{len(rest)} other streams", "co", [sum(column) for column in zip(*rest, strict=True)]))
        return found

    def legend(self) -> str:
        """Which colour is which."""
        items = [f'<span><i class="{self.colours[name]}"></i>{escape(name)}</span>' for name in self.shown]
        others = len(self.names) - len(self.shown)
        if others:
            items.append(f'<span><i class="co"></i>{others} other stream{"s" if others > 1 else ""}</span>')
        return f'<div class="legend">{"".join(items)}</div>' if len(items) > 1 else ""


def streams_of(writers: Rows) -> Streams:
    """The streams of the table of writers."""
    rows = _sums(writers, "stream", "rows")
    names = sorted(rows, key=lambda name: (-rows[name], name))
    shown = names if len(names) <= COLOURS else names[: COLOURS - 1]
    colours = dict.fromkeys(names, "co") | {name: f"c{at}" for at, name in enumerate(shown, 1)}
    return Streams(names, colours, shown)


def cell(text: str, before: str = "") -> str:
    """A cell with a name; pointed at, it shows all of one that is too long."""
    return f'<td class="text" title="{escape(clipped(text))}">{before}{escape(clipped(text))}</td>'


def clipped(text: str, most: int = 300) -> str:
    """A text from elsewhere, of at most so many signs."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def more(count: int, shown: int, where: str) -> str:
    """What is said below a table that does not show all."""
    return f"<p class='note'>and {count - shown:,} more, in {where}.parquet</p>" if count > shown else ""


def _sums(table: Rows, by: str, of: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in table:
        found[one[by]] = found.get(one[by], 0) + one[of]
    return found


def share(part: float, whole: float) -> str:
    """In per cent."""
    found = 100 * part / whole if whole else 0.0
    return f"{found:.0f} %" if found >= 9.5 or found == 0 else f"{found:.1f} %"


def plural(count: float) -> str:
    """What is behind a noun."""
    return "" if count == 1 else "s"


def counted(count: int, what: str) -> str:
    """So many of them."""
    return f"{count:,} {what}{plural(count)}"
