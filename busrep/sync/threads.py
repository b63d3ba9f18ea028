"""Locks, bells and threads that stand interrupts and the garbage collector anywhere."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from busrep.errors import BusrepError, WriterFenced

log = logging.getLogger("busrep.writer")

T = TypeVar("T")


class OwnedLock(type(threading.RLock())):  # type: ignore[misc] # the class has no public name
    """A `threading.RLock` that tells the thread that has it so. An interrupt leaves it neither held nor lost, because
    ``with`` enters and leaves it without a step in Python."""

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has it: then the garbage collector, or a signal handler, asks."""
        mine: bool = self._is_owned()  # what `threading.Condition` asks of a lock, too
        return mine


class Bell:
    """Wakes a thread that waits, now or next. It may be rung in the middle of anything, its own methods included."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one thing that may be entered again anywhere

    def ring(self) -> None:
        """Wake who waits, now or next."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout: float) -> None:
        """Wait until it rings, or for so many seconds."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout)


class Chore(threading.Thread):
    """Does something over and over: ``work()`` gives the seconds until the next time, ``wake`` cuts them short.

    ``first``: seconds until the first time.
    """

    def __init__(self, work: Callable[[], float], wake: Bell, name: str, *, first: float = 0.0) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._wake, self._first, self._stopped = work, wake, first, False

    def run(self) -> None:
        """The thread's."""
        if self._first:
            self._wake.wait(self._first)
        while not self._stopped:
            try:
                pause = self._work()
            except Exception:  # a bug; without beats this process would count as dead
                log.exception("%s failed", self.name)
                pause = 1.0
            self._wake.wait(pause)

    def stop(self) -> None:
        """End after what is being done now; does not wait for it."""
        self._stopped = True
        self._wake.ring()


def in_a_thread(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Do it in a thread of its own, which the end of the process does not wait for."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only left alone

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def uninterrupted(work: Callable[[], None]) -> None:
    """Do it, and wait for it, where no signal handler raises anything: in another thread than the main one."""
    if threading.current_thread() is threading.main_thread():
        in_a_thread(work, "busrep-claim").result()
    else:
        work()


def attempt(work: Callable[[], Any]) -> None:
    """Do what is tried again later if it fails."""
    try:
        work()
    except WriterFenced:
        pass  # the name is won back before the next fact, or that raises
    except BusrepError as error:
        log.warning("%s: %s", type(error).__name__, error)
