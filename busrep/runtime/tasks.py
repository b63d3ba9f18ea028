"""Background tasks of one event loop, and threads beside it: started, stopped, and never failing in silence."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

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

    Unlike asyncio.timeout it cancels until the work has ended: psycopg, cancelled once, waits ten seconds for a server
    that does not answer; cancelled again, it lets go.
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


def spawn(tasks: dict[asyncio.Task[Any], None], work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Run ``work`` as a task that is among ``tasks`` until it has ended, and says so if it fails."""
    task = asyncio.create_task(work, name=name)
    tasks[task] = None
    task.add_done_callback(lambda done: tasks.pop(done, None))
    task.add_done_callback(log_failure)
    return task


async def wait_until_set(event: asyncio.Event, timeout: float) -> bool:
    """Whether the event was set within ``timeout`` seconds."""
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
