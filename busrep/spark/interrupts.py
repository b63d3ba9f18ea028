"""Ctrl-C, and SIGTERM with which a container is stopped, for jobs on Spark.

An exception in the middle of a call into Java leaves half an answer in the connection, and what is called next, such as
the end of the session, fails with pages of traces. pyspark's own handler does worse: it makes another call from there.
So this one raises KeyboardInterrupt outside of such calls alone. One that takes long is cut short by another thread,
which has a connection of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import types
from typing import Any

# Seconds between two looks whether the call has ended.
LOOK = 0.05
# Seconds between two times that what is done is cancelled.
AGAIN = 0.5
# Seconds for it; then it is interrupted all the same.
PATIENCE = 10.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def in_java(frame: types.FrameType | None) -> bool:
    """Whether a call into Java is being made."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "py4j":
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """``with Interrupts():`` around a job, in the main thread; in another one, to which no signal comes, it does
    nothing."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._first: float | None = None
        self._raised = threading.Event()
        self._helper: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _SIGNALS}
            self.install()
        return self

    def install(self) -> None:
        """Take the place of another handler again."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._raised.set()
        if self._helper is not None:
            self._helper.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # What was cut short ends with an error of Spark's, or of a callback's.
        if self._first is not None and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        if not in_java(frame) or now - self._first > PATIENCE:
            self._raised.set()
            raise KeyboardInterrupt
        if self._helper is None and not self._raised.is_set():
            self._helper = threading.Thread(target=self._help, args=[number], name="busrep-interrupt", daemon=True)
            self._helper.start()

    def _help(self, number: int) -> None:
        """Cut the call short, and send the signal again until it comes at a good moment."""
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101 - it has started us
        # Beside, for Java may not answer.
        threading.Thread(target=self._cancel, name="busrep-cancel", daemon=True).start()
        while not self._raised.wait(LOOK):
            signal.pthread_kill(main, number)

    def _cancel(self) -> None:
        from .session import cancel

        with contextlib.suppress(Exception):  # of a Java that is about to end
            cancel()
            # Again and again: another call may have begun right behind the one in which the signal came.
            while not self._raised.wait(AGAIN):
                cancel()
