"""How long to wait before something is tried again, a full sync too, and how often to log that something fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Final

import attrs

from ..errors import SnapshotBusy
from ..settings import Settings

# Reasons that a `LogLimiter` remembers. A stranger may make up more of them.
MOST_REASONS = 1000

HOUR: Final = 3_600.0
# The longest pause, in seconds, before one more full sync while the alarm is raised: a dozen an hour at most do not
# load the source all the time.
LONGEST_PAUSE: Final = 300.0


def pause_after(
    failures: int, settings: Settings, slowest: float | None = None, jitter: Callable[[], float] = random.random
) -> float:
    """Return the seconds to wait after so many failures in a row (none counts as one): from ``retry_min`` doubling up
    to ``retry_max``, or ``slowest`` if that is shorter, of which ``jitter``, in [0, 1), leaves between half and all."""
    most = min(settings.retry_max, slowest or settings.retry_max)
    return min(most, settings.retry_min * 2.0 ** min(max(failures, 1) - 1, 16)) * (0.5 + jitter() / 2)


@attrs.define(eq=False)
class Retry:
    """Something that is tried again until it succeeds."""

    settings: Settings
    jitter: Callable[[], float]
    failures: int = 0  # in a row
    at: float = 0.0  # when to try again
    error: BaseException | str | None = None  # the last one, until something succeeds

    def clear(self, at: float = 0.0) -> None:
        """It succeeded, or is tried anew; the next time is ``at``."""
        self.failures, self.at, self.error = 0, at, None

    def failed(self, error: BaseException | str | None, now: float) -> None:
        """It failed: try again after a pause."""
        self.error, settings = error, self.settings
        if isinstance(error, SnapshotBusy):  # others wait for the same: not all are to ask at the same moment
            self.at = now + max(settings.retry_min, settings.retry_max * self.jitter())
            return
        self.failures += 1
        self.at = now + pause_after(self.failures, settings, jitter=self.jitter)


@attrs.define(eq=False)
class FullSyncs:
    """How many full syncs of a stream there were within an hour, and how long to wait before one more."""

    settings: Settings
    jitter: Callable[[], float]
    began: list[float] = attrs.field(factory=list)  # within the last hour, in seconds of one clock

    def note(self, now: float) -> None:
        """One more begins."""
        self.began = [*(at for at in self.began if at > now - HOUR), now]

    def count(self, now: float) -> int:
        """How many began within the last hour."""
        return sum(at > now - HOUR for at in self.began)

    def alarm(self, now: float) -> bool:
        """Whether these are more than ``full_sync_alarm``."""
        return self.count(now) > self.settings.full_sync_alarm

    def cooling(self, now: float) -> float:
        """The pause before one more, in seconds: none, unless there were too many."""
        if not self.alarm(now):
            return 0.0
        over = self.count(now) - self.settings.full_sync_alarm
        return min(LONGEST_PAUSE, self.settings.retry_max * 2.0 ** min(over, 16)) * (0.5 + self.jitter() / 2)


@attrs.define(eq=False)
class LogLimiter:
    """Lets one line per reason into the log in so many ``seconds``. ``logged``: {reason: when it was last logged}."""

    seconds: float = 1.0
    logged: dict[Hashable, float] = attrs.field(factory=dict, init=False)

    def allows(self, reason: Hashable, now: float) -> bool:
        """Return whether to log this reason at ``now``, in seconds of one clock; then it counts as logged."""
        if now - self.logged.get(reason, -self.seconds) < self.seconds:
            return False
        if len(self.logged) >= MOST_REASONS:
            self.logged.clear()
        self.logged[reason] = now
        return True
