"""The states of one (stream, writer) in a reader, those of the bootstrap of a stream, and what moves from one to
another.

Of one (stream, writer):

``unsynced``
    Nothing heard from this writer since the link came up. Rows are dropped, for it is unknown what came before
    them; the next POSITION tells.
``catching_up``
    A POSITION showed a gap. The rows in it are being fetched, page by page; lines of this (stream, writer) are held
    in order meanwhile and pass through the same rules afterwards.
``stale``
    Fetching keeps failing. As ``catching_up``, and still trying; a state of its own so that people see it.
``live``
    Every row arrives on the wire; each frame's first POSITION proves that none was lost before it.
``stopped``
    Its handler failed for good, or its rows are gone below the retention floor. Nothing is taken in until
    ``resume``; the others go on.
``bootstrapping``
    A snapshot of the whole stream is being loaded: all its writers are in this state, also those first heard meanwhile.
    Nothing is fetched or handed out; lines are held in order as while catching up, bounded by
    ``full_sync_buffer_limit`` over all streams together. A lost link costs what is held, not the state. Once the
    snapshot is applied each goes on from its position in it, through what is held, and the rest by catch-up.

Of a bootstrap, whose snapshot comes through a channel of its own, while live lines accumulate in the reader:

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
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from .snapshots import LOADED, BootstrapProgress


class State(enum.Enum):
    """Where one (stream, writer) stands."""

    UNSYNCED = "unsynced"
    CATCHING_UP = "catching_up"
    STALE = "stale"
    LIVE = "live"
    STOPPED = "stopped"
    BOOTSTRAPPING = "bootstrapping"


class Event(enum.Enum):
    """What moves a (stream, writer) from one state to another."""

    UP_TO_DATE = "POSITION without a gap"
    GAP = "a gap"
    CAUGHT_UP = "caught up, link heard"
    CAUGHT_UP_UNHEARD = "caught up, link not heard"
    KEEPS_FAILING = "fetch keeps failing"
    PAGE = "a page arrived"
    LOST = "link lost, or queue full"
    RESET = "reset"
    GIVEN_UP = "handler failed, or rows pruned"
    RESUMED = "resumed"
    BOOTSTRAP = "a bootstrap begins"
    BOOTSTRAPPED = "snapshot applied, or given up"


_S, _E = State, Event

# What may happen at any time to one that is followed.
_ENDS = {_E.LOST: _S.UNSYNCED, _E.RESET: _S.UNSYNCED, _E.GIVEN_UP: _S.STOPPED, _E.BOOTSTRAP: _S.BOOTSTRAPPING}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    _S.UNSYNCED: {_E.UP_TO_DATE: _S.LIVE, _E.GAP: _S.CATCHING_UP, **_ENDS},
    _S.CATCHING_UP: {
        _E.CAUGHT_UP: _S.LIVE,
        _E.CAUGHT_UP_UNHEARD: _S.UNSYNCED,
        _E.KEEPS_FAILING: _S.STALE,
        _E.PAGE: _S.CATCHING_UP,
        **_ENDS,
    },
    _S.STALE: {_E.PAGE: _S.CATCHING_UP, _E.KEEPS_FAILING: _S.STALE, **_ENDS},
    _S.LIVE: {_E.UP_TO_DATE: _S.LIVE, _E.GAP: _S.CATCHING_UP, **_ENDS},
    _S.STOPPED: {
        _E.LOST: _S.STOPPED,
        _E.RESET: _S.STOPPED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.RESUMED: _S.UNSYNCED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.BOOTSTRAPPING: {_E.LOST: _S.BOOTSTRAPPING, _E.RESET: _S.BOOTSTRAPPING, _E.BOOTSTRAPPED: _S.UNSYNCED},
}


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


_B, _BE = BootstrapState, BootstrapEvent

BOOTSTRAP_TRANSITIONS: Final[Mapping[BootstrapState, Mapping[BootstrapEvent, BootstrapState]]] = {
    _B.REQUESTED: {
        _BE.AGREED: _B.AGREED,
        _BE.FAILED: _B.REQUESTED,
        _BE.GONE: _B.REQUESTED,
        _BE.APPLIED: _B.DRAINING,  # it was in hand when the source failed, or in those of another process
    },
    _B.AGREED: {_BE.SAVED: _B.LOADING, _BE.FAILED: _B.REQUESTED, _BE.GONE: _B.REQUESTED},
    _B.LOADING: {_BE.APPLIED: _B.DRAINING, _BE.FAILED: _B.REQUESTED, _BE.GONE: _B.REQUESTED},
    _B.DRAINING: {_BE.DRAINED: _B.ONLINE, _BE.REQUESTED: _B.REQUESTED, _BE.GONE: _B.REQUESTED},
    _B.ONLINE: {_BE.REQUESTED: _B.REQUESTED},
}

UNFINISHED: Final = tuple(state for state in BootstrapState if state.value not in LOADED)


def unfinished(saved: BootstrapProgress) -> bool:
    """Whether a saved bootstrap is to go on. By its state: there is something to apply of one without parts, too."""
    return BootstrapState(saved.state) in UNFINISHED
