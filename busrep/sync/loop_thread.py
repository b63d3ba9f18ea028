"""An event loop in a thread of its own, and the ways to ask it for something from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from busrep.errors import Closed, ConfigError

log = logging.getLogger("busrep.reader")

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """One that a forked child leaves as it is: it is shared with the parent, whose loop would hear no more of what is
    unregistered in the child, by the garbage collector for example."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See `selectors`."""
        return super().unregister(fileobj) if os.getpid() == self._pid else self.get_key(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See `selectors`."""
        return super().modify(fileobj, events, data) if os.getpid() == self._pid else self.get_key(fileobj)


class LoopThread:
    """Runs an event loop, and what ``make()`` makes on it, from `start` to `close`.

    ``check_process()`` raises ConfigError in a child process, where the thread is not.
    """

    def __init__(self, check_process: Callable[[], object]) -> None:
        self._check_process = check_process
        self._thread: threading.Thread | None = None
        self._asking = threading.RLock()
        self._asked: dict[concurrent.futures.Future[Any], Coroutine[Any, Any, Any]] = {}
        self._over = False  # the loop takes no more turns
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Start the thread, make that there and enter it. Gives what that gives, and raises what it raises."""
        entered: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(make, entered), name="busrep-read", daemon=True)
        try:
            self._thread.start()
            return entered.result()
        except BaseException:
            entered.cancel()  # if this was interrupted it ends as soon as it is open
            raise

    def _run(self, make: Callable[[], AbstractAsyncContextManager[T]], entered: concurrent.futures.Future[T]) -> None:
        try:
            # Selectors on every system: psycopg needs them.
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector())) as runner:
                runner.run(self._live(make, entered))
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            elif not entered.cancelled():
                log.exception("reading ended")
        finally:
            self._refuse_all()

    async def _live(
        self, make: Callable[[], AbstractAsyncContextManager[T]], entered: concurrent.futures.Future[T]
    ) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with make() as made:
            if entered.set_running_or_notify_cancel():
                entered.set_result(made)
                await self._stop.wait()

    def close(self) -> None:
        """Leave what was made, end the loop, and wait for both."""
        if self._thread is not None:
            self.call_soon(self._stop.set)
            self._thread.join()  # each of its steps has its own deadline

    def ask(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have the loop do something. A loop forgets what it is asked after its last turn: who waits is told then.

        Raises Closed, and ConfigError in the loop's own thread, and in a child process.
        """
        try:
            self._check_process()
            if threading.current_thread() is self._thread:
                raise ConfigError("in the thread of the bus's event loop nothing can wait for it: use another thread")
            with self._asking:
                if self._over:
                    raise Closed
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._asked[future] = work
        except RuntimeError:  # it was closed this very moment
            work.close()
            raise Closed from None
        except BaseException:
            work.close()
            raise
        future.add_done_callback(lambda done: self._asked.pop(done, None))
        return future

    def _refuse_all(self) -> None:
        with self._asking:
            self._over = True
            asked = list(self._asked.items())
        for future, work in asked:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(Closed())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it. Raises what `ask` raises, and what that raises."""
        future = self.ask(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the loop has ended
            raise Closed from None
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Have the loop call that soon, if it goes on. Waits for nothing: it may be the garbage collector that asks."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)
