"""Background tasks of one event loop, and threads beside it: started, stopped, and never failing in silence."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from busrep.core.backoff import pause_after
from busrep.settings import Settings

T = TypeVar("T")

log = logging.getLogger("busrep.reader")


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a handler, whether it is a coroutine function or not; gives what it returns."""
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


def being_cancelled() -> bool:
    """Whether a CancelledError is meant for this task; else something that it awaited was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def heed_cancellation(error: BaseException) -> None:
    """Raise CancelledError if this task is being cancelled, whatever became of it where it was caught: after a COMMIT
    whose outcome is unknown for it, CommitUnknown."""
    if being_cancelled():
        raise asyncio.CancelledError from error


def forget_cancellation() -> bool:
    """Whether this task was cancelled, and goes on: a handler with a deadline of its own may see to that.

    The count is taken down, or whatever the task does next would find it cancelled: task groups, timeouts of Python
    before 3.12, `being_cancelled`.
    """
    task = asyncio.current_task()
    cancelled = being_cancelled()
    while task is not None and task.cancelling() > 0:
        task.uncancel()
    return cancelled


async def stop(tasks: Iterable[asyncio.Task[Any]], timeout: float) -> None:
    """Cancel tasks until they end, within ``timeout``: Python 3.11's wait_for, which drivers use, may swallow one."""
    left = list(tasks)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while left:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=0.1)
                left = [task for task in left if not task.done()]
    for task in left:
        if not task.done():
            log.error("%s ignores its cancellation", task.get_name())


async def within(timeout: float, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` for at most so many seconds, for a process that ends. Raises TimeoutError, and what ``work`` raises.

    Unlike asyncio.timeout it cancels until the work has ended: a driver may wait for a server that does not answer.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=timeout)
    finally:
        await stop([task], timeout)
    if task.cancelled() or not task.done():
        raise TimeoutError
    task.result()


def log_failure(task: asyncio.Task[Any]) -> None:
    """A done callback: a background task that fails says so."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)


class Tasks(dict[asyncio.Task[Any], None]):
    """Background tasks of one owner, from `spawn` until each has ended. While the owner is open none ends in silence.

    Who cancels all tasks of an event loop cancels these too, and only the owner knows that they are to go on.
    ``closed``: it stops them, and nothing begins anew.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings, self.closed = settings, False

    def spawn(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        name: str,
        *,
        again: bool = False,
        once: bool = False,
        failures: int = 0,
    ) -> asyncio.Task[Any]:
        """Run ``work()`` as a task. If it fails, or somebody cancels it while the owner is open, the log says so.

        ``again``: then it also begins anew, after a pause of `pause_after`; ``failures``: how often in a row it did.
        ``once``: not beside another one of that name, which is returned.
        """
        for task in self if once else ():
            if task.get_name() == f"busrep-{name}" and not task.done():
                return task
        loop, task = asyncio.get_running_loop(), asyncio.create_task(work(), name=f"busrep-{name}")
        self[task], begun = None, loop.time()

        def ended(task: asyncio.Task[Any]) -> None:
            self.pop(task, None)
            log_failure(task)
            if self.closed or not (task.cancelled() or task.exception()):
                return
            if task.cancelled():
                log.warning("%s was cancelled, not by close()%s", task.get_name(), ": it begins again" if again else "")
            if again:
                in_a_row = 1 if loop.time() - begun > self._settings.retry_max else failures + 1
                loop.call_later(pause_after(in_a_row, self._settings), begin_again, in_a_row)

        def begin_again(failures: int) -> None:
            if not self.closed:
                self.spawn(work, name, again=True, once=once, failures=failures)

        task.add_done_callback(ended)
        return task

    async def stop(self, timeout: float) -> None:
        """Cancel them until they end, within ``timeout`` seconds."""
        self.closed = True
        await stop(self, timeout)


async def wait_until_set(event: asyncio.Event, timeout: float | None) -> bool:
    """Whether the event was set within ``timeout`` seconds, if that is a bound."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run it in a thread; when cancelled, let it end first: what it works on is the caller's, who then cleans up."""
    running = asyncio.get_running_loop().run_in_executor(None, work, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen: what is told is the cancellation
        raise
