"""Work that an event loop has done in another thread, and waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class CallQueue:
    """Calls that coroutines ask for, and that one thread makes, in order.

    ``interruptible``: what is no `Exception`, such as KeyboardInterrupt, is raised in that thread as well.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._interruptible = interruptible

    async def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the function called there. Raises what it raises; one that nobody waits for any more is not called."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def job() -> None:
            if done.cancelled():
                return
            try:
                function(*args)
            except BaseException as error:
                _tell(loop, done, error)
                if self._interruptible and not isinstance(error, Exception):
                    raise
            else:
                _tell(loop, done, None)

        self._queue.put(job)
        await done

    def serve(self) -> None:
        """Make the calls, in this thread, until `end` is called."""
        while (job := self._queue.get()) is not None:
            job()

    def end(self) -> None:
        """Let `serve` return after the calls that were asked for."""
        self._queue.put(None)


class HandlerThread(threading.Thread):
    """The thread in which handlers are called, one at a time."""

    def __init__(self) -> None:
        super().__init__(name="busrep-handle", daemon=True)
        self.jobs = CallQueue(interruptible=False)

    def run(self) -> None:
        """The thread's."""
        self.jobs.serve()


class ThreadBoundConnection:
    """A connection that stays in the thread of whoever saves on it: what is done with it is done there, by ``jobs``."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.jobs = CallQueue(interruptible=True)

    def serve(self, until: concurrent.futures.Future[None]) -> None:
        """Do what is asked for until that is done. Raises what that raises."""
        until.add_done_callback(lambda _: self.jobs.end())
        self.jobs.serve()
        until.result()


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None], error: BaseException | None) -> None:
    """Set a loop's future from another thread."""
    if error is not None and (not isinstance(error, Exception) or isinstance(error, StopIteration)):
        error = RuntimeError(f"{type(error).__name__} {error}")  # it would end the loop, or confuse it

    def tell() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for it any more
        loop.call_soon_threadsafe(tell)
