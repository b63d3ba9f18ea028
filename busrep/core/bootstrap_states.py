"""The states of a bootstrap, and what leads from one to another.

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
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from .snapshots import LOADED, BootstrapProgress


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
