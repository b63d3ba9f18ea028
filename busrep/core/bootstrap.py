"""A bootstrap of one stream: which snapshot, and which parts of it to load and to apply next. No I/O, no clock.

The snapshot comes through a channel of its own, while live lines accumulate in the reader. The states:

``requested``
    A snapshot is wanted, and its source is being asked for one, again and again with growing pauses. Here it begins,
    and here it returns to when the source fails: the agreement, and the parts loaded and applied, are kept meanwhile,
    and the source is asked for the same snapshot again.
``agreed``
    It is settled which snapshot: its positions, and its parts. A new agreement is saved before anything of it is
    applied, so that a restart goes on with it, and that pruning keeps what follows it. One that was saved already
    passes through this state at once.
``loading``
    Parts are loaded, several at a time, and applied in order, one at a time.
``draining``
    The snapshot is applied. The lines that accumulated meanwhile pass through the reader's usual rules, and what is
    missing among them comes by catch-up.
``online``
    All that is delivered. Over, until another one is requested.

Where the agreed snapshot cannot be had any more (rows of it were pruned, the log is another one, the source agrees on
another only), it begins anew from the first part: one more *full sync*. A reader that has had too many of them within
an hour raises the alarm, and waits longer before each.

How to drive it: after each input, and when ``next_retry`` says so, give up what is not in ``under_way`` any more, do
what ``work()`` returns, in its order, and answer each with the input that its class names; drain ``changes``.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from ..errors import SnapshotBusy, SnapshotGone
from ..settings import Settings
from .backoff import pause_after
from .bootstrap_work import Agree, Apply, Begin, Drain, Leave, Load, Work
from .snapshots import LOADED, Agreement, BootstrapProgress, PartRows

__all__ = [
    "TRANSITIONS",
    "Agree",
    "Apply",
    "Begin",
    "Bootstrap",
    "BootstrapEvent",
    "BootstrapState",
    "Drain",
    "Leave",
    "Load",
    "Work",
    "unfinished",
]

HOUR: Final = 3_600.0

LONGEST_PAUSE: Final = 300.0
"""Longest pause, in seconds, before one more full sync while the alarm is raised: a dozen an hour at most do not load
the source all the time, and once the cause is gone nobody stays away for long."""


class BootstrapState(enum.Enum):
    """Where the bootstrap of a stream stands."""

    REQUESTED = "requested"
    AGREED = "agreed"
    LOADING = "loading"
    DRAINING = "draining"
    ONLINE = "online"


class BootstrapEvent(enum.Enum):
    """What moves a bootstrap from one state to another."""

    REQUESTED = "requested once more"
    AGREED = "snapshot_position agreed"
    SAVED = "agreement saved"
    FAILED = "source failed, or nothing can be applied"
    GONE = "snapshot gone"
    APPLIED = "last part applied"
    DRAINED = "what accumulated is delivered"


_S, _E = BootstrapState, BootstrapEvent

TRANSITIONS: Final[Mapping[BootstrapState, Mapping[BootstrapEvent, BootstrapState]]] = {
    _S.REQUESTED: {
        _E.AGREED: _S.AGREED,
        _E.FAILED: _S.REQUESTED,
        _E.GONE: _S.REQUESTED,
        _E.APPLIED: _S.DRAINING,  # it was in hand when the source failed, or in those of another process
    },
    _S.AGREED: {
        _E.SAVED: _S.LOADING,
        _E.FAILED: _S.REQUESTED,
        _E.GONE: _S.REQUESTED,
    },
    _S.LOADING: {
        _E.APPLIED: _S.DRAINING,
        _E.FAILED: _S.REQUESTED,
        _E.GONE: _S.REQUESTED,
    },
    _S.DRAINING: {
        _E.DRAINED: _S.ONLINE,
        _E.REQUESTED: _S.REQUESTED,
        _E.GONE: _S.REQUESTED,
    },
    _S.ONLINE: {
        _E.REQUESTED: _S.REQUESTED,
    },
}


UNFINISHED: Final = tuple(state for state in BootstrapState if state.value not in LOADED)


def unfinished(saved: BootstrapProgress) -> bool:
    """Whether a saved bootstrap is to go on. By its state: there is something to apply of one without parts, too."""
    return BootstrapState(saved.state) in UNFINISHED


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
        self.parts = self.rows = self.bytes = 0  # applied of it
        self.attempts = 0  # times the source was asked since it was requested
        self.error: Exception | str | None = None  # the last one, until something succeeds
        self.stopped_by: Exception | None = None
        self.held: list[Agreement] = []  # what the source may hold something for: to be left, at the end too
        self._jitter = jitter
        self.id: str | None = None  # of what is saved, empty where nothing is kept; None: the agreement is not saved
        self._under_way: dict[Work, None] = {}  # whose answers count
        self._in_hand: Apply | None = None  # of whatever agreement: until it is answered nothing else is applied
        self._recut = False  # whether another agreement is wanted than the one saved, in smaller parts
        self._ahead: dict[int, PartRows] = {}  # loaded, and not applied yet
        self._syncs: list[float] = []  # when each full sync of the last hour was agreed
        self._failures = 0
        self._retry_at = 0.0
        self._rests_until = 0.0  # snapshot_rate: when the next parts are due
        self._loading_since = (0.0, 0, 0)  # when, and the parts and rows that were applied by then

    # -- inputs -----------------------------------------------------------------------------------------------

    def request(self, reason: str, now: float) -> bool:
        """Begin a bootstrap, for ``reason``. False, and nothing happens, while one is under way up to loading."""
        if self.state in UNFINISHED:
            return False
        self._begin(reason, BootstrapEvent.REQUESTED)
        self._failures, self._retry_at = 0, now + self._cooling(now)
        return True

    def restore(self, saved: BootstrapProgress, now: float) -> None:
        """Go on with what is saved: at the start, or when another process under this reader's name has saved more.

        Another bootstrap than the own one is adopted, also one of the same snapshot: what was applied before it began
        its target has lost. What is applied as a whole is only to be drained.
        """
        same = self.agreement is not None and self.agreement.same(saved.agreement) and self.id in (None, saved.id)
        self._recut = self.state is None and saved.parts == 0 and self._too_large(saved.agreement)
        if same and self.state not in UNFINISHED and not unfinished(saved):
            return
        if not (same and self.state in UNFINISHED and saved.parts >= self.parts):
            self._begin(saved.reason, BootstrapEvent.GONE if self.state in UNFINISHED else BootstrapEvent.REQUESTED)
            self.agreement, self._syncs = saved.agreement, [now - saved.age] * saved.syncs
        for work in list(self._under_way):
            if isinstance(work, Begin | Load | Apply) and not _still_wanted(work, saved.parts):
                del self._under_way[work]
        self._ahead = {number: part for number, part in self._ahead.items() if number >= saved.parts}
        self.parts, self.rows, self.bytes = saved.parts, saved.rows, saved.bytes
        self.id, self._failures, self._retry_at = saved.id, 0, now
        if self.state is BootstrapState.AGREED:
            self._start_loading(now)
        if not unfinished(saved):
            self._finish(now)

    def agreed(self, work: Agree, agreement: Agreement, now: float) -> None:
        """The source's answer to ``work``."""
        self.held.append(agreement)
        if not self._answered(work):  # too late: it is only to be left
            return
        self._move(BootstrapEvent.AGREED)
        self._recut = False
        if self.agreement is None or not self.agreement.same(agreement):
            self._drop_parts()
            self.id = None
            self._syncs = [*self._recent(now), now]
        self.agreement = agreement  # the same one, too: the source may call it by another id
        if self.id is not None:
            self._start_loading(now)

    def begun(self, work: Begin, now: float, id: str = "") -> None:
        """The agreement is saved, with nothing of it applied, as the bootstrap ``id``; empty: nothing is kept."""
        if self._answered(work):
            self.id = id
            self._start_loading(now)

    def loaded(self, work: Load, part: PartRows, now: float) -> None:
        """``part`` is whole, and is what was agreed on."""
        if self._answered(work):
            self._ahead[work.number] = part
            self._succeeded(now)

    def applied(self, work: Apply, rows: int, now: float) -> None:
        """The part is applied, and that is saved. ``rows``: how many there are in it."""
        if self._answered(work):
            self._ahead.pop(work.number, None)
            self.parts, self.rows, self.bytes = work.parts_after, work.rows + rows, work.bytes + work.part.size
            if self.settings.snapshot_rate is not None:  # whoever is slower than that never makes up for it in a burst
                self._rests_until = max(now, self._rests_until + rows / self.settings.snapshot_rate)
            if work.last:
                self._finish(now)
            elif self.state is BootstrapState.LOADING:  # else the source is away, and its pause goes on
                self._succeeded(now)

    def drained(self, now: float) -> None:
        """The reader has delivered what had accumulated."""
        if self.state is BootstrapState.DRAINING:
            self._under_way.clear()
            self._succeeded(now)
            self._move(BootstrapEvent.DRAINED)

    def failed(self, work: Work | None, error: Exception, now: float) -> None:
        """``work`` could not be done (None: the source as a whole is away); it is tried again after a pause.

        What could not be saved, applied or drained is tried again by itself. All else goes back to asking the source,
        and SnapshotGone begins anew.
        """
        if work is not None and not self._answered(work):
            return
        if isinstance(error, SnapshotGone):
            self.gone(error, now)
        elif isinstance(work, Begin | Apply | Drain):
            self._retry_later(error, now)
        elif self.state in UNFINISHED:
            self._give_up_source()
            self._retry_later(error, now)

    def gone(self, error: Exception | str, now: float) -> None:
        """What was agreed cannot be had any more, or is of another log: begin anew, from the first part."""
        if self.state in UNFINISHED or self.state is BootstrapState.DRAINING:
            attempts = self.attempts
            self._begin(self.reason, BootstrapEvent.GONE)
            self.attempts = attempts
            self._retry_later(error, now)
            self._retry_at = max(self._retry_at, now + self._cooling(now))

    def stopped(self, work: Apply, error: Exception) -> None:
        """``work`` cannot be done at all: nothing is, until ``resume``, and nothing is held at the source."""
        if self._answered(work):
            self.stopped_by = self.error = error
            self._give_up_source()

    def resume(self, now: float) -> None:
        """Try again what stopped."""
        if self.stopped_by is not None:
            self.stopped_by = self.error = None
            self._failures, self._retry_at = 0, now

    # -- what they change -------------------------------------------------------------------------------------

    def _move(self, event: BootstrapEvent) -> None:
        # An event that the table does not list for this state is a bug here, and raises KeyError.
        before, after = self.state, BootstrapState.REQUESTED if self.state is None else TRANSITIONS[self.state][event]
        if after is not before:
            self.state = after
            self.changes.append((before, after))

    def _begin(self, reason: str, event: BootstrapEvent) -> None:
        self._drop_parts()
        self.agreement = self.id = None
        self.reason, self.attempts, self.error = reason, 0, None
        self._move(event)

    def _drop_parts(self) -> None:
        self._under_way.clear()
        self._ahead.clear()
        self.parts = self.rows = self.bytes = 0

    def _give_up_source(self) -> None:
        # A part that is being applied counts all the same: a snapshot stays what it was.
        self._under_way = {work: None for work in self._under_way if isinstance(work, Apply)}
        self._move(BootstrapEvent.FAILED)

    def _start_loading(self, now: float) -> None:
        self._loading_since = (now, self.parts, self.rows)
        self._rests_until = max(now, self._rests_until)
        self._move(BootstrapEvent.SAVED)

    def _finish(self, now: float) -> None:
        self._under_way.clear()
        self._ahead.clear()
        self.stopped_by = None
        self._succeeded(now)
        self._move(BootstrapEvent.APPLIED)

    def _answered(self, work: Work) -> bool:
        """Whether the answer to ``work`` counts."""
        if work is self._in_hand:
            self._in_hand = None
        if work not in self._under_way:
            return False
        del self._under_way[work]
        return True

    def _succeeded(self, now: float) -> None:
        self._failures, self._retry_at, self.error = 0, now, None

    def _retry_later(self, error: Exception | str, now: float) -> None:
        settings, self.error = self.settings, error
        if isinstance(error, SnapshotBusy):  # others wait for the same: not all are to ask at the same moment
            self._retry_at = now + max(settings.retry_min, settings.retry_max * self._jitter())
            return
        self._failures += 1
        self._retry_at = now + pause_after(self._failures, settings, jitter=self._jitter)

    def _cooling(self, now: float) -> float:
        """The pause before one more full sync: none, unless there were too many."""
        if not self.alarm(now):
            return 0.0
        over = self.syncs(now) - self.settings.full_sync_alarm
        return min(LONGEST_PAUSE, self.settings.retry_max * 2.0 ** min(over, 16)) * (0.5 + self._jitter() / 2)

    def _recent(self, now: float) -> list[float]:
        return [at for at in self._syncs if at > now - HOUR]

    # -- outputs ----------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> Collection[Work]:
        """What was handed out, is not answered, and still wanted. A part in hand is: it cannot be taken back."""
        return self._under_way.keys() | ({self._in_hand} if self._in_hand is not None else set())

    def work(self, now: float) -> list[Work]:
        """What to do next. Nothing comes twice, except what failed."""
        wanted: list[Work] = [*self._leave()]
        if now >= self._retry_at and self.stopped_by is None:
            planned = self._plan(now)
            self._under_way.update(dict.fromkeys(planned))
            wanted += planned
        return wanted

    def _leave(self) -> list[Leave]:
        keep = self.agreement if self.state in (BootstrapState.AGREED, BootstrapState.LOADING) else None
        if keep is not None and self.parts + len(self._ahead) == len(keep.parts):  # nothing is left to load
            keep = None
        left = [Leave(agreement) for agreement in self.held if agreement is not keep]
        self.held = [agreement for agreement in self.held if agreement is keep]
        return left

    def _plan(self, now: float) -> list[Work]:
        if self.state is BootstrapState.REQUESTED:
            if any(isinstance(work, Agree) for work in self._under_way):
                return []
            self.attempts += 1
            return [Agree(self.stream, None if self._recut else self.agreement)]
        if self.agreement is None or self.state is BootstrapState.ONLINE:
            return []
        if self.state is BootstrapState.LOADING:
            return self._plan_parts(self.agreement) if now >= self._rests_until else []
        if self._under_way or self._in_hand is not None:
            return []
        if self.state is BootstrapState.AGREED:
            return [Begin(self.agreement, self.syncs(now), self.reason)]
        return [Drain(self.agreement)]

    def _plan_parts(self, agreement: Agreement) -> list[Work]:
        """The next parts to load, as many as may be in memory at a time; and the one to apply, if it is there."""
        loading = {work.number for work in self._under_way if isinstance(work, Load)}
        ahead = range(self.parts, min(self.parts + self.settings.snapshot_connections, len(agreement.parts)))
        planned: list[Work] = [
            Load(agreement, number) for number in ahead if number not in loading and number not in self._ahead
        ]
        part = self._ahead.get(self.parts) if agreement.parts else PartRows((), (), ())
        if part is not None and self._in_hand is None:
            self._in_hand = Apply(agreement, self.parts, part, self.rows, self.bytes, self.id or "")
            planned.append(self._in_hand)
        return planned

    def _too_large(self, agreement: Agreement) -> bool:
        """Whether its parts are of a larger ``snapshot_part_rows``: of their size the process may have died, and would
        again. Asked once a process, when it finds what is saved: two of one name with different settings would replace
        one another's for ever. Nothing tells what was asked for, and a part is larger by a fact: so twice as large."""
        return agreement.rows > 2 * self.settings.snapshot_part_rows * len(agreement.parts)

    def next_retry(self, now: float) -> float | None:
        """When ``work()`` may next return something by the passing of time alone."""
        if self.stopped_by is not None or self.state in (None, BootstrapState.ONLINE):
            return None
        due = max(self._retry_at, self._rests_until) if self.state is BootstrapState.LOADING else self._retry_at
        return due if due > now else None

    def syncs(self, now: float) -> int:
        """Full syncs of this stream begun within the last hour."""
        return len(self._recent(now))

    def alarm(self, now: float) -> bool:
        """Whether there were more of them than ``full_sync_alarm``."""
        return self.syncs(now) > self.settings.full_sync_alarm

    def eta(self, now: float) -> float | None:
        """Seconds until all parts are applied, at the rate since loading began, or went on. None: not known."""
        if self.state is not BootstrapState.LOADING or self.agreement is None:
            return None
        since, parts, rows = self._loading_since
        if self.agreement.rows >= 0:
            done, left = self.rows - rows, self.agreement.rows - self.rows
        else:
            done, left = self.parts - parts, len(self.agreement.parts) - self.parts
        return max(left, 0) * (now - since) / done if done > 0 else None

    def statistics(self, now: float) -> dict[str, Any]:
        """All this, JSON-able. Times are seconds; None: unknown, or does not apply."""
        agreement = self.agreement
        waits = self.next_retry(now) is not None and self._retry_at > now  # and not resting
        return {
            "state": None if self.state is None else self.state.value,
            "reason": self.reason,
            "source": "" if agreement is None else agreement.source,
            "rows": self.rows,
            "rows_total": None if agreement is None or agreement.rows < 0 else agreement.rows,
            "bytes": self.bytes,
            "parts": self.parts,
            "parts_total": None if agreement is None else len(agreement.parts),
            "eta": self.eta(now),
            "attempts": self.attempts,
            "error": None if self.error is None else str(self.error),
            "stopped": self.stopped_by is not None,
            "syncs": self.syncs(now),
            "alarm": self.alarm(now),
            "retry_in": self._retry_at - now if waits else None,
        }


def _still_wanted(work: Begin | Load | Apply, parts: int) -> bool:
    """Whether what is under way is of use when ``parts`` are applied, and that is saved, by somebody else."""
    if isinstance(work, Load):
        return work.number >= parts
    return isinstance(work, Apply) and work.number == parts
