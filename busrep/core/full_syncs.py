"""How many full syncs of a stream there were within an hour, and how long to wait before one more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..settings import Settings

HOUR: Final = 3_600.0

LONGEST_PAUSE: Final = 300.0
"""Longest pause, in seconds, before one more full sync while the alarm is raised: a dozen an hour at most do not load
the source all the time, and once the cause is gone nobody stays away for long."""


class FullSyncs:
    """When the full syncs of the last hour ``began``, in seconds of one clock."""

    def __init__(self, settings: Settings, jitter: Callable[[], float]) -> None:
        self.began: list[float] = []
        self._settings, self._jitter = settings, jitter

    def note(self, now: float) -> None:
        """One more begins."""
        self.began = [*(at for at in self.began if at > now - HOUR), now]

    def count(self, now: float) -> int:
        """How many began within the last hour."""
        return sum(at > now - HOUR for at in self.began)

    def alarm(self, now: float) -> bool:
        """Whether these are more than ``full_sync_alarm``."""
        return self.count(now) > self._settings.full_sync_alarm

    def cooling(self, now: float) -> float:
        """The pause before one more, in seconds: none, unless there were too many."""
        if not self.alarm(now):
            return 0.0
        over = self.count(now) - self._settings.full_sync_alarm
        return min(LONGEST_PAUSE, self._settings.retry_max * 2.0 ** min(over, 16)) * (0.5 + self._jitter() / 2)
