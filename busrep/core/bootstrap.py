"""A bootstrap of one stream: which snapshot, and which parts of it to load and to apply next.

How to drive it: after each input, and when ``next_retry`` says so, give up what is not in ``under_way`` any more, do
what ``work()`` returns, in its order, and answer each with the input that its class names; drain ``changes``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from ..errors import SnapshotGone
from ..settings import Settings
from .backoff import FullSyncs, Retry
from .bootstrap_work import Agree, Apply, Begin, Drain, HandedOut, Leave, Load, Parts, Work
from .snapshots import Agreement, BootstrapProgress, PartRows
from .states import BOOTSTRAP_TRANSITIONS, UNFINISHED, BootstrapEvent, BootstrapState, unfinished


class Bootstrap:
    """The bootstraps of one stream in one process, one after the other."""

    def __init__(
        self, stream: str, *, settings: Settings | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self.stream = stream
        self.settings = settings or Settings()
        self.state: BootstrapState | None = None  # None: none was requested yet
        # (before, after), for the runtime to drain
        self.changes: list[tuple[BootstrapState | None, BootstrapState]] = []
        self.reason = ""
        self.agreement: Agreement | None = None
        self.parts = Parts(self.settings)  # of it
        self.attempts = 0  # times the source was asked since it was requested
        self.retry = Retry(self.settings, jitter)
        self.full_syncs = FullSyncs(self.settings, jitter)
        self.stopped_by: Exception | None = None
        self.held: list[Agreement] = []  # what the source may hold something for: to be left, at the end too
        self.id: str | None = None  # of what is saved, empty where nothing is kept; None: the agreement is not saved
        self._handed_out = HandedOut()
        self._recut = False  # whether another agreement is wanted than the one saved, in smaller parts

    def request(self, reason: str, now: float) -> bool:
        """Begin a bootstrap, for ``reason``. False, and nothing happens, while one is under way up to loading."""
        if self.state in UNFINISHED:
            return False
        self._begin(reason, BootstrapEvent.REQUESTED)
        self.retry.clear(now + self.full_syncs.cooling(now))
        return True

    def restore(self, saved: BootstrapProgress, now: float) -> None:
        """Go on with what is saved: at the start, or when another process under this reader's name has saved more.

        Another bootstrap than the own one is adopted, also one of the same snapshot: what was applied before it began
        its target has lost. What is applied as a whole is only to be drained.
        """
        same = self.agreement is not None and self.agreement.same(saved.agreement) and self.id in (None, saved.id)
        self._recut = self.state is None and saved.parts == 0 and self.parts.too_large(saved.agreement)
        if same and self.state not in UNFINISHED and not unfinished(saved):
            return
        if not (same and self.state in UNFINISHED and saved.parts >= self.parts.applied):
            self._begin(saved.reason, BootstrapEvent.GONE if self.state in UNFINISHED else BootstrapEvent.REQUESTED)
            self.agreement, self.full_syncs.began = saved.agreement, [now - saved.age] * saved.syncs
        self._handed_out.restore(saved.parts)
        self.parts.restore(saved)
        self.id = saved.id
        self.retry.failures, self.retry.at = 0, now
        if self.state is BootstrapState.AGREED:
            self._start_loading(now)
        if not unfinished(saved):
            self._finish(now)

    def agreed(self, work: Agree, agreement: Agreement, now: float) -> None:
        """The source's answer to ``work``."""
        self.held.append(agreement)
        if not self._handed_out.answered(work):  # too late: it is only to be left
            return
        self._move(BootstrapEvent.AGREED)
        self._recut = False
        if self.agreement is None or not self.agreement.same(agreement):
            self._handed_out.give_up()
            self.parts.drop()
            self.id = None
            self.full_syncs.note(now)
        self.agreement = agreement  # the same one, too: the source may call it by another id
        if self.id is not None:
            self._start_loading(now)

    def begun(self, work: Begin, now: float, id: str = "") -> None:
        """The agreement is saved, with nothing of it applied, as the bootstrap ``id``; empty: nothing is kept."""
        if self._handed_out.answered(work):
            self.id = id
            self._start_loading(now)

    def loaded(self, work: Load, part: PartRows, now: float) -> None:
        """``part`` is whole, and is what was agreed on."""
        if self._handed_out.answered(work):
            self.parts.ahead[work.number] = part
            self.retry.clear(now)

    def applied(self, work: Apply, rows: int, now: float) -> None:
        """The part is applied, and that is saved. ``rows``: how many there are in it."""
        if self._handed_out.answered(work):
            self.parts.apply(work, rows, now)
            if work.last:
                self._finish(now)
            elif self.state is BootstrapState.LOADING:  # else the source is away, and its pause goes on
                self.retry.clear(now)

    def drained(self, now: float) -> None:
        """The reader has delivered what had accumulated."""
        if self.state is BootstrapState.DRAINING:
            self._handed_out.give_up()
            self.retry.clear(now)
            self._move(BootstrapEvent.DRAINED)

    def failed(self, work: Work | None, error: BaseException, now: float) -> None:
        """``work`` could not be done (None: the source as a whole is away); it is tried again after a pause.

        What could not be saved, applied or drained is tried again by itself. All else goes back to asking the source,
        and SnapshotGone begins anew.
        """
        if work is not None and not self._handed_out.answered(work):
            return
        if isinstance(error, SnapshotGone):
            self.gone(error, now)
        elif isinstance(work, Begin | Apply | Drain):
            self.retry.failed(error, now)
        elif self.state in UNFINISHED:
            self._give_up_source()
            self.retry.failed(error, now)

    def gone(self, error: Exception | str, now: float) -> None:
        """What was agreed cannot be had any more, or is of another log: begin anew, from the first part."""
        if self.state in UNFINISHED or self.state is BootstrapState.DRAINING:
            self._begin(self.reason, BootstrapEvent.GONE, self.attempts)
            self.retry.failed(error, now)
            self.retry.at = max(self.retry.at, now + self.full_syncs.cooling(now))

    def stopped(self, work: Apply, error: Exception) -> None:
        """``work`` cannot be done at all: nothing is, until ``resume``, and nothing is held at the source."""
        if self._handed_out.answered(work):
            self.stopped_by = self.retry.error = error
            self._give_up_source()

    def resume(self, now: float) -> None:
        """Try again what stopped."""
        if self.stopped_by is not None:
            self.stopped_by = None
            self.retry.clear(now)

    def _move(self, event: BootstrapEvent) -> None:
        # An event that the table does not list for this state is a bug here, and raises KeyError.
        before = self.state
        after = BootstrapState.REQUESTED if before is None else BOOTSTRAP_TRANSITIONS[before][event]
        if after is not before:
            self.state = after
            self.changes.append((before, after))

    def _begin(self, reason: str, event: BootstrapEvent, attempts: int = 0) -> None:
        self._handed_out.give_up()
        self.parts.drop()
        self.agreement = self.id = None
        self.reason, self.attempts, self.retry.error = reason, attempts, None
        self._move(event)

    def _give_up_source(self) -> None:
        # A part that is being applied counts all the same: a snapshot stays what it was.
        self._handed_out.give_up(but=Apply)
        self._move(BootstrapEvent.FAILED)

    def _start_loading(self, now: float) -> None:
        self.parts.begin(now)
        self._move(BootstrapEvent.SAVED)

    def _finish(self, now: float) -> None:
        self._handed_out.give_up()
        self.parts.ahead.clear()
        self.stopped_by = None
        self.retry.clear(now)
        self._move(BootstrapEvent.APPLIED)

    @property
    def under_way(self) -> Collection[Work]:
        """What was handed out, is not answered, and still wanted. A part in hand is: it cannot be taken back."""
        return self._handed_out.under_way

    def work(self, now: float) -> list[Work]:
        """What to do next. Nothing comes twice, except what failed."""
        keep = self.agreement if self.state in (BootstrapState.AGREED, BootstrapState.LOADING) else None
        if keep is not None and self.parts.applied + len(self.parts.ahead) == len(keep.parts):  # all is loaded
            keep = None
        wanted: list[Work] = [Leave(agreement) for agreement in self.held if agreement is not keep]
        self.held = [agreement for agreement in self.held if agreement is keep]
        if now >= self.retry.at and self.stopped_by is None:
            planned = self._plan(now)
            self._handed_out.add(planned)
            wanted += planned
        return wanted

    def _plan(self, now: float) -> list[Work]:
        if self.state is BootstrapState.REQUESTED:
            if any(isinstance(work, Agree) for work in self.under_way):
                return []
            self.attempts += 1
            return [Agree(self.stream, None if self._recut else self.agreement)]
        if self.agreement is None or self.state is BootstrapState.ONLINE:
            return []
        if self.state is BootstrapState.LOADING:
            due = now >= self.parts.rest_until
            return self.parts.plan(self.agreement, self._handed_out, self.id or "") if due else []
        if self.under_way:
            return []
        if self.state is BootstrapState.AGREED:
            return [Begin(self.agreement, self.full_syncs.count(now), self.reason)]
        return [Drain(self.agreement)]

    def next_retry(self, now: float) -> float | None:
        """When ``work()`` may next return something by the passing of time alone."""
        if self.stopped_by is not None or self.state in (None, BootstrapState.ONLINE):
            return None
        due = max(self.retry.at, self.parts.rest_until) if self.state is BootstrapState.LOADING else self.retry.at
        return due if due > now else None

    def statistics(self, now: float) -> dict[str, Any]:
        """All this, JSON-able. Times are seconds; None: unknown, or does not apply."""
        agreement, loading = self.agreement, self.state is BootstrapState.LOADING
        waits = self.next_retry(now) is not None and self.retry.at > now  # and not resting
        return {
            "state": None if self.state is None else self.state.value,
            "reason": self.reason,
            "source": "" if agreement is None else agreement.source,
            **self.parts.statistics(agreement, now, loading=loading),
            "attempts": self.attempts,
            "error": None if self.retry.error is None else str(self.retry.error),
            "stopped": self.stopped_by is not None,
            "syncs": self.full_syncs.count(now),
            "alarm": self.full_syncs.alarm(now),
            "retry_in": self.retry.at - now if waits else None,
        }
