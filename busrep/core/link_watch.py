"""Whether the link to the channel still carries messages (rule 9.21)."""

from __future__ import annotations

import attrs

from ..settings import Settings


@attrs.define
class LinkWatch:
    """When something was heard over the link, and published over it; times of one monotonic clock, in seconds.

    ``echo_at``: the own announcements were heard last. ``asked_at``: REPLICATE was published last.
    """

    settings: Settings
    heard_at: float = 0.0
    echo_at: float = 0.0
    asked_at: float = 0.0
    _connected_at: float = 0.0

    def connected(self, now: float) -> None:
        """The link is up; silence is counted from here."""
        self.echo_at = self.heard_at = self._connected_at = now

    def fault(self, now: float, *, announces: bool) -> str | None:
        """Why the link is to be given up, or None: five beats without an echo of what was published.

        The echo of its own announcements is what a writer (``announces``) goes by. A process without a writer goes by
        any message; when there is none for a beat it publishes REPLICATE, which comes back.
        """
        bound = self.settings.heartbeat * self.settings.silent_after_beats
        if announces:
            unheard = now - self._connected_at > bound and now - self.echo_at > bound
            return "own announcements are not heard back" if unheard else None
        if now - self.heard_at > bound and self.asked_at > self.heard_at:
            return "nothing is heard, not even what is published"
        return None

    def asks(self, now: float, *, announces: bool) -> bool:
        """Whether REPLICATE is to be published, to hear something."""
        return not announces and now - self.heard_at > self.settings.heartbeat
