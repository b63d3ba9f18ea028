"""When the parts of a bus are open: from its first use to the end of the process, and in no process forked from it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 (registers its own end first, see the end of this file)
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from busrep.errors import Closed, ConfigError

log = logging.getLogger("busrep")

_LIFETIMES: weakref.WeakSet[Lifetime] = weakref.WeakSet()

# What a child process has of its parent's open buses. Kept: nothing of it may be closed, or given to the garbage
# collector, for the sockets and the event loop's selector are the parent's as well.
_INHERITED: list[object] = []


Here = Callable[[bool], bool]
"""``here(raising)``: whether this is the process that has opened a bus; raises ConfigError if told so."""


class Openable(Protocol):
    """What is opened and closed. ``undo`` closes what an `open` that failed has left."""

    def open(self, here: Here) -> None: ...  # noqa: D102
    def undo(self) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Lifetime:
    """Opens the parts of a bus once, and closes them once, whichever threads ask. They belong to this process.

    ``state``: "new", "opening", "open", "closing" or "closed". ``lock``: held while it changes; a thread that has it
    may ask for it again.
    """

    def __init__(self, parts: Openable) -> None:
        self._parts = parts
        self._pid = 0
        self.state = "new"
        self.lock = threading.RLock()
        _LIFETIMES.add(self)

    def here(self, raising: bool = True) -> bool:
        """Whether this is the process that opened them, if any has. Raises ConfigError unless told not to."""
        if self._pid in (0, os.getpid()):
            return True
        if raising:
            raise ConfigError(
                f"this bus was opened in process {self._pid}, and this is process {os.getpid()}, forked from it: its "
                "connections are not this one's. Connect after the fork (gunicorn: post_fork, Celery: "
                "worker_process_init), under a writer name of its own in each process; or do not use the bus before"
            )
        return False

    def open(self) -> None:
        """Open the parts. Raises Closed when that was done before, and what opening them raises: then the next use
        tries again, for at the first request of a process a server may be away for a moment."""
        self.here()
        with self.lock:
            if self.state != "new":
                raise Closed
            self._pid = os.getpid()
            self.state = "opening"
            try:
                self._parts.open(self.here)
            except BaseException:
                try:
                    self._parts.undo()
                finally:
                    self.state, self._pid = "new", 0
                raise
            self.state = "open"

    def ensure_open(self) -> None:
        """Open the parts if nothing has. Raises Closed when they are closed again, and what `open` raises."""
        self.here()
        if self.state in ("new", "opening"):
            with self.lock:  # another thread may be at it
                if self.state == "new":
                    self.open()
        if self.state != "open":
            raise Closed

    def close(self) -> None:
        """Close the parts, if nothing has. In a forked process it does nothing: nothing there is that process's."""
        if not self.here(raising=False):
            return
        with self.lock:
            if self.state in ("closing", "closed"):
                return
            self.state = "closing"
            try:
                self._parts.close()
            finally:
                self.state = "closed"

    def forked(self) -> None:
        """In the child: threads that are not here may have held the lock, and what is open is the parent's."""
        self.lock = threading.RLock()
        if self._pid:
            _INHERITED.append(self._parts)


def _close_all() -> None:
    """The interpreter ends: what was committed is published, as close() would have done."""
    for lifetime in list(_LIFETIMES):
        if lifetime.state == "open":
            try:
                lifetime.close()
            except Exception:  # the others are closed all the same
                log.exception("a bus could not be closed")


def _forked() -> None:
    for lifetime in list(_LIFETIMES):
        lifetime.forked()


# Before the pools of concurrent.futures end, in whose threads the SQLite store reads; they do so before atexit, in a
# way that is theirs alone. Where it is not to be had, only the last positions are not saved.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
os.register_at_fork(after_in_child=_forked)
