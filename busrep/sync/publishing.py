"""What is published of a writer in threads: by whoever ends a transaction, and by a thread that sends the rest."""

from __future__ import annotations

import logging
import time
from functools import partial

from busrep.core.backoff import pause_after
from busrep.core.outgoing import OutgoingFrame
from busrep.errors import Unavailable
from busrep.runtime.session import WriterSession

from .publisher import Publisher
from .session import SharedSession
from .threads import Bell

log = logging.getLogger("busrep.writer")


class Publishing:
    """Publishes all that is due, in the order in which the core composed it. May be called from any thread.

    ``stale``: something is to be published, and Redis did not take it.
    """

    def __init__(self, shared: SharedSession, publisher: Publisher) -> None:
        self._shared, self._publisher, self._settings = shared, publisher, shared.settings
        self._failures = 0
        self._retry_at = 0.0
        self.stale = Bell()

    def publish(self, *, now: bool = False) -> bool:
        """Publish what is due. False: Redis is away, or someone else is at it for too long; it goes out later.

        While Redis is away it is tried at a growing pause only, unless ``now``.
        """
        lock = self._publisher.lock
        if lock.is_mine or (not now and self._away()):
            return False
        with lock:  # not for long: whoever has it has deadlines
            return (now or not self._away()) and self._publish_or_note()

    def _away(self) -> bool:
        """Whether Redis is away, as far as known, and it is not the calling thread's turn to look."""
        return bool(self._failures) and (self._shared.beats or time.monotonic() < self._retry_at)

    def _publish_or_note(self) -> bool:
        while True:
            used = self._publisher.connected
            try:
                while self._publish_frames():
                    pass
            except Unavailable as error:
                if used:  # it may have died of being idle; a new one tells
                    continue
                self._failures += 1
                self._retry_at = time.monotonic() + pause_after(self._failures, self._settings)
                log.debug("publishing: %s", error)
                self.stale.ring()
                return False
            self._failures, self._retry_at = 0, 0.0
            return True

    def _publish_frames(self) -> bool:
        """Publish the next frames. False: there are none."""
        session = self._shared.session
        self._publisher.open()
        try:
            frames = self._shared.guarded(session, partial(self._frames, session))
            if not frames:
                return False
            self._publisher.publish(
                [(self._channel(frame.channel_suffix), data) for frame in frames for data in frame.messages]
            )
            self._shared.guarded(session, partial(session.published, frames))
        except BaseException:
            # Unknown which arrived: the same frames go out again, byte for byte (9.6).
            self._shared.guarded(session, session.core.publish_failed)
            raise
        return True

    def _frames(self, session: WriterSession) -> list[OutgoingFrame]:
        return [] if session.torn else session.frames_to_publish(self._publisher.connects, time.monotonic())

    def _channel(self, suffix: str) -> str:
        return f"{self._shared.config.server}/{suffix}" if suffix else self._shared.config.server

    def replicate_received(self) -> None:
        """Somebody asks for the positions."""
        self._shared.ask(lambda session: session.core.replicate_received(time.monotonic()))
        self.stale.ring()

    def tick(self, now: float) -> None:
        """Queue the announcement if it is due."""
        self._shared.ask(lambda session: session.core.tick(now))

    def announce(self) -> float:
        """Publish the announcement, if it is due, and what Redis did not take before. Seconds until the next time."""
        now, heartbeat = time.monotonic(), self._settings.heartbeat
        self.tick(now)
        if self._failures and now < self._retry_at:
            return self._retry_at - now
        if not self.publish(now=True):
            return max(0.0, min(heartbeat, self._retry_at - time.monotonic()))
        return max(0.0, min(1.1 * heartbeat, self._shared.session.core.announcements.next_deadline - time.monotonic()))

    def farewell(self) -> None:
        """Publish what is left, and where this writer ends (9.21)."""
        if self.publish(now=True):
            self._shared.ask(lambda session: session.core.farewell())
            self.publish(now=True)
