"""The part of the statistics' page that tells how long facts take. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from busrep.spark.stats_streams import cell, counted, more
from busrep.spark.stats_svg import columns, number, seconds

if TYPE_CHECKING:
    from busrep.spark.stats_listen import Samples

Rows = Sequence[Mapping[str, Any]]

# Lines of a table; the Parquet tables have all.
MOST_LINES = 25
# Columns per power of ten, and those of them at 1, 2 and 5.
FINE, ROUND = 10, {0: 1, 3: 2, 7: 5}
# (title with p50 and p99, what the axis counts)
TITLES = {
    "heard": (
        "Heard on the bus: half of the facts within {p50} of their commit, 99 % within {p99}",
        "from commit to the bus, by the driver's subscription",
    ),
    "saved": (
        "Handled and saved by readers: half of the facts within {p50} of their commit, 99 % within {p99}",
        "from commit to a reader's saved position",
    ),
}


def latencies(summary: Mapping[str, Any], tables: Mapping[str, Rows], samples: Samples) -> str:
    """A plot for each measure."""
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
    cards = [_card(whole, samples) for whole in summary["latencies"]]
    empty = "" if cards else "<p class='note'>Nothing was committed meanwhile.</p>"
    return (
        f"<h2>How long facts take</h2><p class='note'>{escape(told)}</p>{empty}<div class='pair'>{''.join(cards)}</div>"
        + _table(tables["latencies"])
    )


def _card(whole: Mapping[str, Any], samples: Samples) -> str:
    form, under = TITLES[whole["measure"]]
    title = form.format(p50=seconds(whole["p50"]), p99=seconds(whole["p99"]))
    # Clocks of two machines may say that it took less than nothing; then the first column has it.
    its = (value for key, values in samples.items() if key[0] == whole["measure"] for value in values)
    places = Counter(math.floor(FINE * math.log10(max(value, 1e-4))) for value in its)
    least, most = min(places), max(places)
    count = most - least + 1
    found = [100 * places[at] / places.total() for at in range(least, most + 1)]
    labels = [seconds(10 ** ((least + at) / FINE)) for at in range(count)]
    axis = [
        seconds(ROUND[at % FINE] * 10.0 ** (at // FINE)) if at % FINE in ROUND else "" for at in range(least, most + 1)
    ]
    marks = [
        (FINE * math.log10(max(whole[name], 1e-4)) - least, f"p{name[1:]} {seconds(whole[name])}")
        for name in ("p50", "p99")
    ]
    colour = {"heard": "c1", "saved": "c3"}[whole["measure"]]
    plot = columns(title, labels, [("facts", colour, found)], "% of facts", under, marked=marks, edges=True, axis=axis)
    return f"<div class='card'><h3>{escape(title)}</h3>{plot}</div>"


def _table(found: Rows) -> str:
    its = sorted(
        (one for one in found if one["stream"]),
        key=lambda one: (one["measure"], -one["count"], one["stream"], one["writer"], one["reader"]),
    )
    if not its:
        return ""
    head = "".join(f"<th class=text>{name}</th>" for name in ("", "stream", "writer", "reader"))
    head += "".join(f"<th>{name}</th>" for name in ("facts", "p50", "p90", "p99", "p99.9", "max"))
    body = []
    for one in its[:MOST_LINES]:
        texts = ({"heard": "heard", "saved": "saved"}[one["measure"]], one["stream"], one["writer"], one["reader"])
        numbers = [number(one["count"]), *(seconds(one[name]) for name in ("p50", "p90", "p99", "p999", "most"))]
        body.append(
            "<tr>" + "".join(map(cell, texts))
            + "".join(f"<td>{text}</td>" for text in numbers) + "</tr>"
        )  # fmt: skip
    rest = more(len(its), MOST_LINES, "latencies")
    return f"<div class='card' style='margin-top:14px'><table><tr>{head}</tr>{''.join(body)}</table>{rest}</div>"


def readers(found: Rows) -> str:
    """Where durable readers stand."""
    if not found:
        return ""
    behind = sum(1 for one in found if one["behind"])
    title = "All readers are where the writers are" if not behind else f"{behind} of {len(found)} positions are behind"
    head = "".join(f"<th class=text>{name}</th>" for name in ("reader", "stream", "writer"))
    head += "".join(f"<th>{name}</th>" for name in ("position", "behind by tokens", "saved (UTC)"))
    body = []
    for one in sorted(found, key=lambda one: -int(one["behind"]))[:MOST_LINES]:
        saved = datetime.fromtimestamp(one["saved"] / 1e6, UTC)
        body.append(
            "<tr>" + "".join(cell(one[name]) for name in ("reader", "stream", "writer"))
            + f"<td>{one['position']}</td><td>{one['behind']:,}</td><td>{saved:%-d %b %Y %H:%M:%S}</td></tr>"
        )  # fmt: skip
    rest = more(len(found), MOST_LINES, "readers")
    return (
        f"<h2>Readers</h2><div class='card'><h3>{title}</h3><table><tr>{head}</tr>{''.join(body)}</table>{rest}</div>"
    )  # fmt: skip
