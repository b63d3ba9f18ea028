"""Whether a process does its part, read from its statistics; and whether its link carries messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from ..settings import Settings

Code = Literal["stopped", "fenced", "link", "stale", "unsaved", "stuck", "retrying", "closed"]


@attrs.frozen
class HealthReason:
    """One thing that is wrong.

    ``code``:

    - ``stopped``: a (stream, writer), a bootstrap, or all reading stopped for good; a person has to act;
    - ``fenced``: another process has the writer's name; restart this one;
    - ``link``: Redis (or the TCP server) is not connected;
    - ``stale``: a (stream, writer) cannot be caught up, or a stream not be followed at all, for the table is away;
    - ``unsaved``: the store refuses a position; its rows come again at the next start;
    - ``stuck``: a fact has been open for longer than ``Settings.stuck_after``;
    - ``retrying``: a handler fails, and is called again;
    - ``closed``: the bus is not open.

    ``about``: the "stream writer", the stream, the writer, or "". ``text``: for a person.
    """

    code: Code
    about: str
    text: str


@attrs.frozen
class Health:
    """``ok``: nothing is wrong. ``reasons``: what is, the most serious first."""

    ok: bool
    reasons: tuple[HealthReason, ...] = ()


def closed() -> Health:
    """Of a bus that is not open."""
    return Health(False, (HealthReason("closed", "", "the bus is not open"),))


def health_of(statistics: Mapping[str, Any]) -> Health:
    """What `statistics` of either runtime's bus say."""
    reasons = tuple(_reasons(statistics))
    return Health(not reasons, reasons)


def _reasons(statistics: Mapping[str, Any]) -> Iterator[HealthReason]:
    reader, writer = statistics["reader"] or {}, statistics["writer"]
    if reader.get("failure"):
        yield HealthReason("stopped", "", reader["failure"])
    for about, text in reader.get("stopped", {}).items():
        yield HealthReason("stopped", about, text)
    for stream, bootstrap in statistics["bootstrap"].items():
        if bootstrap["stopped"]:
            yield HealthReason("stopped", stream, bootstrap["stopped"])
    if writer is not None and writer["lost"]:
        yield HealthReason("fenced", "", "another process has claimed the writer's name: restart this one")
    yield from _links(statistics["link"], writing=writer is not None)
    for stream, text in reader.get("not_begun", {}).items():
        yield HealthReason("stale", stream, text)
    for stream, states in reader.get("states", {}).items():
        for name, state in states.items():
            if state == "stale":
                text = reader["trouble"].get(f"{stream} {name}", "it cannot be caught up")
                yield HealthReason("stale", f"{stream} {name}", text)
    for about, text in reader.get("unsavable", {}).items():
        yield HealthReason("unsaved", about, text)
    for fact in statistics["stuck"]:
        text = f"fact {fact['id']} is open for {fact['age']:.0f} s ({fact['owner']})"
        yield HealthReason("stuck", fact["stream"], text)
    for about, trouble in reader.get("retrying", {}).items():
        text = f"for {trouble['for']:.1f} s, {trouble['calls']} calls: {trouble['error']}"
        yield HealthReason("retrying", about, text)


def _links(link: Mapping[str, Any], *, writing: bool) -> Iterator[HealthReason]:
    """With threads there are two: one publishes, which a mere reader does not need, and one reads."""
    if "reading" in link:
        if writing and not link.get("connected"):
            yield HealthReason("link", "publishing", link.get("last_error") or "not connected")
        link = link["reading"] or {"connected": True}
    if not link.get("connected"):
        yield HealthReason("link", "", link.get("last_error") or "not connected")


@attrs.define
class LinkWatch:
    """Rule 9.21: when something was heard over the link, and published over it; seconds of one monotonic clock."""

    settings: Settings
    heard_at: float = 0.0
    echo_at: float = 0.0  # the own announcements were heard last
    said_at: float = 0.0  # the first of them since
    asked_at: float = 0.0  # REPLICATE was published last

    def connected(self, now: float) -> None:
        """The link is up; silence is counted from here."""
        self.echo_at = self.heard_at = now

    def said(self, now: float) -> None:
        """The own positions are being announced."""
        if self.said_at <= self.echo_at:
            self.said_at = now

    def hears(self, now: float) -> bool:
        """Whether something was heard lately, and what was announced came back: else there is no rest."""
        return now - self.heard_at <= 2 * self.settings.heartbeat and self.said_at <= self.echo_at

    def fault(self, now: float, *, announces: bool) -> str | None:
        """Why the link is to be given up, or None: five beats without an echo of what was published.

        The echo of its own announcements is what a writer (``announces``) goes by. A process without a writer goes by
        any message; when there is none for two beats it publishes REPLICATE, which comes back.
        """
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        if announces:
            unheard = self.said_at > self.echo_at and now - self.said_at > bound
            return "own announcements are not heard back" if unheard else None
        if now - self.heard_at > bound and self.asked_at > self.heard_at:
            return "nothing is heard, not even what is published"
        return None

    def asks(self, now: float, *, announces: bool) -> bool:
        """Whether REPLICATE is to be published, to hear something. Writers at rest may leave almost two beats
        between two turns: asking in that gap would wake all of them."""
        return not announces and now - self.heard_at > 2 * self.settings.heartbeat
