"""Pauses between attempts, and lines of the log."""

from __future__ import annotations

import pytest

from busrep.core.backoff import MOST_REASONS, LogLimiter, Retry, pause_after
from busrep.errors import SnapshotBusy
from busrep.settings import Settings

SETTINGS = Settings(retry_min=0.1, retry_max=5.0)


@pytest.mark.parametrize(
    ("failures", "pause"), [(0, 0.1), (1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (10_000, 5.0)]
)
def test_pauses_double_up_to_the_longest(failures: int, pause: float) -> None:
    assert pause_after(failures, SETTINGS, jitter=lambda: 0.0) == pytest.approx(pause / 2)
    assert pause_after(failures, SETTINGS, jitter=lambda: 1.0) == pytest.approx(pause)
    assert pause_after(failures, SETTINGS, 1.0, lambda: 1.0) == pytest.approx(min(pause, 1.0))


def test_no_bound_raises_the_longest_pause() -> None:
    assert pause_after(100, SETTINGS, 60.0, lambda: 1.0) == 5.0


def test_what_fails_is_tried_again_later_and_later_until_it_succeeds() -> None:
    retry, away = Retry(SETTINGS, lambda: 1.0), OSError("away")
    for failures, pause in ((1, 0.1), (2, 0.2), (3, 0.4)):
        retry.failed(away, 100.0)
        assert (retry.failures, retry.error, retry.at) == (failures, away, pytest.approx(100.0 + pause))
    retry.clear(7.0)
    assert (retry.failures, retry.error, retry.at) == (0, None, 7.0)


def test_a_source_that_is_busy_is_asked_again_at_any_time_and_that_is_no_failure() -> None:
    for share, pause in ((0.0, 0.1), (0.5, 2.5), (1.0, 5.0)):
        retry, busy = Retry(SETTINGS, lambda share=share: share), SnapshotBusy("the source", 4)  # type: ignore[misc]
        retry.failed(busy, 100.0)
        assert (retry.failures, retry.error, retry.at) == (0, busy, 100.0 + pause)


def test_one_line_per_reason_and_period() -> None:
    limiter = LogLimiter(10.0)
    said = [(reason, now) for now in range(0, 31, 2) for reason in "ab" if limiter.allows(reason, now)]
    assert said == [(reason, now) for now in (0, 10, 20, 30) for reason in "ab"]


def test_reasons_that_are_made_up_do_not_fill_the_memory() -> None:
    limiter = LogLimiter(1e9)
    assert all(limiter.allows(reason, 0.0) for reason in range(10 * MOST_REASONS))
    assert len(limiter.logged) <= MOST_REASONS
