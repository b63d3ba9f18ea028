"""The states of one (stream, writer) in a reader, and what moves it from one to another.

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
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


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
_ENDS = {
    _E.LOST: _S.UNSYNCED,
    _E.RESET: _S.UNSYNCED,
    _E.GIVEN_UP: _S.STOPPED,
    _E.BOOTSTRAP: _S.BOOTSTRAPPING,
}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    _S.UNSYNCED: {
        _E.UP_TO_DATE: _S.LIVE,
        _E.GAP: _S.CATCHING_UP,
        **_ENDS,
    },
    _S.CATCHING_UP: {
        _E.CAUGHT_UP: _S.LIVE,
        _E.CAUGHT_UP_UNHEARD: _S.UNSYNCED,
        _E.KEEPS_FAILING: _S.STALE,
        _E.PAGE: _S.CATCHING_UP,
        **_ENDS,
    },
    _S.STALE: {
        _E.PAGE: _S.CATCHING_UP,
        _E.KEEPS_FAILING: _S.STALE,
        **_ENDS,
    },
    _S.LIVE: {
        _E.UP_TO_DATE: _S.LIVE,
        _E.GAP: _S.CATCHING_UP,
        **_ENDS,
    },
    _S.STOPPED: {
        _E.LOST: _S.STOPPED,
        _E.RESET: _S.STOPPED,
        _E.GIVEN_UP: _S.STOPPED,
        _E.RESUMED: _S.UNSYNCED,
        _E.BOOTSTRAP: _S.BOOTSTRAPPING,
    },
    _S.BOOTSTRAPPING: {
        _E.LOST: _S.BOOTSTRAPPING,
        _E.RESET: _S.BOOTSTRAPPING,
        _E.BOOTSTRAPPED: _S.UNSYNCED,
    },
}
