"""An event loop in a thread of its own: what other threads ask of it, and what it has done in other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import queue
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from busrep.errors import Closed, ConfigError

log = logging.getLogger("busrep.reader")

R = TypeVar("R")
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


class LoopThread(Generic[T]):
    """Runs an event loop, and what is made on it, from `start` to `close`.

    ``name``: the thread's. ``check_process()`` raises ConfigError in a child process, where the thread is not.
    """

    made: T

    def __init__(self, name: str, check_process: Callable[[], object] = lambda: None) -> None:
        self._name, self._check_process = name, check_process
        self._thread: threading.Thread | None = None
        self._asking = threading.RLock()
        self._asked: dict[concurrent.futures.Future[Any], Coroutine[Any, Any, Any]] = {}
        self._over = False  # the loop takes no more turns
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        """Start the thread, make that there and enter it: what that gives is ``made``. Raises what it raises."""
        entered: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(make, entered), name=self._name, daemon=True)
        try:
            self._thread.start()
            entered.result()
        except BaseException:
            entered.cancel()  # if this was interrupted it ends as soon as it is open
            raise

    def _run(
        self, make: Callable[[], AbstractAsyncContextManager[T]], entered: concurrent.futures.Future[None]
    ) -> None:
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
        self, make: Callable[[], AbstractAsyncContextManager[T]], entered: concurrent.futures.Future[None]
    ) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with make() as self.made:
            if entered.set_running_or_notify_cancel():
                entered.set_result(None)
                await self._stop.wait()

    def close(self) -> None:
        """Leave what was made, end the loop, and wait for both."""
        if self._thread is not None:
            self.call_soon(self._stop.set)
            self._thread.join()  # each of its steps has its own deadline

    def ask(self, work: Callable[[T], Coroutine[Any, Any, R]]) -> concurrent.futures.Future[R]:
        """Have the loop do something. A loop forgets what it is asked after its last turn: who waits is told then.

        Raises Closed, and ConfigError in the loop's own thread, and in a child process.
        """
        self._check_process()
        if threading.current_thread() is self._thread:
            raise ConfigError("in the thread of the bus's event loop nothing can wait for it: use another thread")
        with self._asking:
            if self._over:
                raise Closed
            asked = work(self.made)
            try:
                future = asyncio.run_coroutine_threadsafe(asked, self._loop)
            except BaseException as error:
                asked.close()
                if isinstance(error, RuntimeError):  # it was closed this very moment
                    raise Closed from None
                raise
            self._asked[future] = asked
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

    def call(self, work: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """Have the loop run a coroutine, and wait for it. Raises what `ask` raises, and what that raises."""
        future = self.ask(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the loop has ended
            raise Closed from None
        except BaseException:
            future.cancel()
            raise

    def do(self, function: Callable[[T], R]) -> R:
        """Have the loop call a function, and wait for it. Raises what `ask` raises, and what that raises."""

        async def do(made: T) -> R:
            return function(made)

        return self.call(do)

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Have the loop call that soon, if it goes on. Waits for nothing: it may be the garbage collector that asks."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)


class CallQueue:
    """Calls that coroutines ask for, and that one thread makes, in order.

    ``interruptible``: what is no `Exception`, such as KeyboardInterrupt, is raised in that thread as well.
    """

    def __init__(self, *, interruptible: bool) -> None:
        self._queue: queue.SimpleQueue[tuple[concurrent.futures.Future[None], Callable[[], Any]] | None]
        self._queue, self._interruptible = queue.SimpleQueue(), interruptible

    async def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the function called there. Raises what it raises; one that nobody waits for any more is not called."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._queue.put((done, partial(function, *args)))
        await asyncio.wrap_future(done)

    def serve(self) -> None:
        """Make the calls, in this thread, until `end` is called."""
        while (asked := self._queue.get()) is not None:
            done, work = asked
            if not done.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                # Another one would end the loop, or confuse it.
                done.set_exception(error if plain else RuntimeError(f"{type(error).__name__} {error}"))
                if self._interruptible and not isinstance(error, Exception):
                    raise
            else:
                done.set_result(None)

    def end(self) -> None:
        """Let `serve` return after the calls that were asked for."""
        self._queue.put(None)


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
