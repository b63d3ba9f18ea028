"""How long to wait before something that failed is tried again, and how often to log that it fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

from ..errors import SnapshotBusy
from ..settings import Settings

# Reasons that a `LogLimiter` remembers. A stranger may make up more of them.
MOST_REASONS = 1000


def pause_after(
    failures: int, settings: Settings, slowest: float | None = None, jitter: Callable[[], float] = random.random
) -> float:
    """Return the seconds to wait after so many failures in a row: from ``retry_min`` doubling up to ``retry_max``.

    Args:
        failures: How many; none counts as one.
        settings: They have ``retry_min`` and ``retry_max``.
        slowest: The longest pause in seconds, if that is to be shorter than ``retry_max``.
        jitter: Gives numbers in [0, 1). The pause is between half and all of what the doubling gives.
    """
    most = min(settings.retry_max, slowest or settings.retry_max)
    return min(most, settings.retry_min * 2.0 ** min(max(failures, 1) - 1, 16)) * (0.5 + jitter() / 2)


class Retry:
    """Something that is tried again until it succeeds.

    ``failures``: how many in a row. ``error``: the last one, until something succeeds. ``at``: when to try again.
    """

    def __init__(self, settings: Settings, jitter: Callable[[], float] = random.random) -> None:
        self.failures, self.at = 0, 0.0
        self.error: BaseException | str | None = None
        self._settings, self._jitter = settings, jitter

    def clear(self, at: float = 0.0) -> None:
        """It succeeded, or is tried anew; the next time is ``at``."""
        self.failures, self.at, self.error = 0, at, None

    def failed(self, error: BaseException | str | None, now: float) -> None:
        """It failed: try again after a pause."""
        self.error, settings = error, self._settings
        if isinstance(error, SnapshotBusy):  # others wait for the same: not all are to ask at the same moment
            self.at = now + max(settings.retry_min, settings.retry_max * self._jitter())
            return
        self.failures += 1
        self.at = now + pause_after(self.failures, settings, jitter=self._jitter)


class LogLimiter:
    """Lets one line per reason into the log in so many ``seconds``. ``logged``: {reason: when it was last logged}."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self.logged: dict[Hashable, float] = {}

    def allows(self, reason: Hashable, now: float) -> bool:
        """Return whether to log this reason at ``now``, in seconds of one clock; then it counts as logged."""
        if now - self.logged.get(reason, -self._seconds) < self._seconds:
            return False
        if len(self.logged) >= MOST_REASONS:
            self.logged.clear()
        self.logged[reason] = now
        return True
