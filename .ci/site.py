"""Hooks of the documentation site (.mkdocs.yml): what Markdown on GitHub draws by itself.

GitHub draws a block of Mermaid. The theme would load Mermaid from another host for that. So the site draws the states
of a reader here, and shows other diagrams as tables. The drawing is used if it has exactly the arrows of the page;
otherwise the table takes its place, and a test of the site fails.
"""

import re
from html import escape
from typing import Any, NamedTuple

STATES = re.compile(r"^```mermaid\n(stateDiagram-v2\n.*?)^```$", re.MULTILINE | re.DOTALL)
ARROW = re.compile(r"^ +(\S+) --> (\w+)(?:: (.*))?$", re.MULTILINE)

Event = tuple[str, str, str]  # state before, event, state after


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each block of Mermaid."""
    return STATES.sub(lambda found: drawn(found[1]) or table(found[1]), markdown)


def events(diagram: str) -> list[Event]:
    """What leads where; an arrow may stand for several events."""
    return [(before, event, after) for before, after, why in ARROW.findall(diagram) for event in why.split(" / ")]


def table(diagram: str) -> str:
    """The events as a table, which stays readable on a phone."""
    rows = []
    last = ""
    for before, after, why in ARROW.findall(diagram):
        state = "(start)" if before == "[*]" else f"`{before}`"
        rows.append(f"| {state if before != last else ''} | {why or 'it begins'} | `{after}` |")
        last = before
    return "\n".join(["| state | event | next state |", "|---|---|---|", *rows])


class Arrow(NamedTuple):
    """From each of these states, for these events; the way as in SVG, the place and the anchor of the label."""

    states: str
    events: str
    after: str
    way: str
    label: tuple[int, int, str] = (0, 0, "start")


FOLLOWING = "unsynced catching_up stale live"
BOXES = {
    "unsynced": (130, 228),
    "live": (470, 110),
    "catching_up": (470, 260),
    "stale": (770, 260),
    "stopped": (130, 430),
    "bootstrapping": (640, 430),
}
FAILED, BEGINS, LOST = "handler failed, or rows pruned", "a bootstrap begins", "link lost, or queue full / reset"
UNHEARD, APPLIED = "caught up, link not heard", "snapshot applied, or given up"
ARROWS = (
    Arrow("[*]", "", "unsynced", "M190 34 L190 206"),
    Arrow("unsynced", "POSITION without a gap", "live", "M205 218 C290 205 300 110 393 110", (350, 100, "end")),
    Arrow("unsynced", "a gap", "catching_up", "M205 232 C280 232 320 252 393 252", (310, 232, "middle")),
    Arrow(
        "catching_up",
        "caught up, link not heard",
        "unsynced",
        "M395 270 C320 285 260 275 207 243",
        (310, 298, "middle"),
    ),
    Arrow("live", "a gap", "catching_up", "M450 130 L450 238", (442, 190, "end")),
    Arrow("catching_up", "caught up, link heard", "live", "M490 240 L490 132", (498, 190, "start")),
    Arrow("catching_up", "fetch keeps failing", "stale", "M545 252 L693 252", (619, 243, "middle")),
    Arrow("stale", "a page arrived", "catching_up", "M695 270 L547 270", (619, 288, "middle")),
    Arrow("catching_up stale live", LOST, "unsynced", "M20 228 L53 228", (28, 182, "start")),
    Arrow(FOLLOWING, FAILED, "stopped", "M130 320 L130 408", (138, 398, "start")),
    Arrow("stopped", "resumed", "unsynced", "M60 410 C20 370 20 300 70 250", (42, 345, "start")),
    Arrow(FOLLOWING, BEGINS, "bootstrapping", "M640 320 L640 408", (648, 370, "start")),
    Arrow("stopped", BEGINS, "bootstrapping", "M205 438 L563 438", (390, 456, "middle")),
    Arrow(
        "bootstrapping",
        "snapshot applied, or given up",
        "unsynced",
        "M565 420 C400 410 260 360 175 250",
        (395, 374, "start"),
    ),
)


def drawn(diagram: str) -> str:
    """The states of a reader as a picture, "" if these are other states or events."""
    here = {
        (state, event, arrow.after)
        for arrow in ARROWS
        for state in arrow.states.split()
        for event in arrow.events.split(" / ")
    }
    if here != set(events(diagram)):
        return ""
    parts = [
        '<rect class="states-group" x="20" y="60" width="860" height="260" rx="8"/>',
        '<text class="states-title" x="868" y="82" text-anchor="end">following</text>',
        '<circle class="states-start" cx="190" cy="28" r="6"/>',
    ]
    for arrow in ARROWS:
        x, y, anchor = arrow.label
        parts.append(f'<path class="states-arrow" d="{arrow.way}" marker-end="url(#states-head)"/>')
        for line, text in enumerate(arrow.events.split(" / ")):
            parts.append(f'<text x="{x}" y="{y + 17 * line}" text-anchor="{anchor}">{escape(text)}</text>')
    for state, (x, y) in BOXES.items():
        parts.append(f'<rect class="states-box" x="{x - 75}" y="{y - 20}" width="150" height="40" rx="6"/>')
        parts.append(f'<text class="states-name" x="{x}" y="{y + 5}" text-anchor="middle">{state}</text>')
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
    head = f'<marker id="states-head" {size} orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker>'
    picture = (
        '<div class="states"><svg viewBox="0 0 900 470" role="img" aria-label="The states of a reader; the table below '
        f'has the same"><defs>{head}</defs>{"".join(parts)}</svg></div>'
    )
    note = "An arrow from the edge of the dashed box leaves each of the states in it. As a table:"
    return f"{picture}\n\n{note}\n\n{table(diagram)}"
