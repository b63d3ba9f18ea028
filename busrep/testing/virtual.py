"""A virtual clock: an asyncio loop on which waiting takes no time, and processes that can be paused and killed.

    def test_a_silent_writer_is_noticed() -> None:
        async def main() -> None:
            ...
            await asyncio.sleep(3600)  # at once

        virtual.run(main())

What is ready runs in the order asyncio promises; when nothing is, the clock jumps to the next timer. There are no
sockets, and functions given to threads run at once, on the loop. So what runs depends on nothing outside, and runs
the same way every time, as long as it asks neither the machine's clock nor its random numbers.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# A run that passes so many rounds of the loop without the clock moving goes round in circles.
ROUNDS = 100_000

# Where the clock starts, seconds: not at 0, which code may take for "never".
START = 1_000.0


class NothingLeft(RuntimeError):
    """Everything waits, and nothing is left that could happen: on a real loop this would hang for ever."""


class GoesRound(RuntimeError):
    """The loop is busy for ever without time passing."""


class _State(enum.Enum):
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    DEAD = enum.auto()


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """Tasks of a `VirtualLoop` that stand for one operating system process.

    Whatever is started inside of it, however deep, belongs to it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._state = _State.RUNNING
        self._kept: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(_PROCESS.set, self)
        self._last: set[asyncio.Task[Any]] = set()

    @property
    def alive(self) -> bool:
        """Whether it has not been killed."""
        return self._state is not _State.DEAD

    @property
    def paused(self) -> bool:
        """Whether it is stopped for now."""
        return self._state is _State.PAUSED

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine in this process. The task may be awaited from outside; killed, it never ends."""
        return asyncio.get_running_loop().create_task(work, name=name or self.name, context=self._context)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process, at once: what it schedules belongs to the process."""
        return self._context.copy().run(function, *args)

    def kill(self) -> None:
        """As kill -9: nothing of it runs any more, no ``finally`` either. Its tasks stay pending for ever."""
        self._state = _State.DEAD
        self._kept.clear()
        # Held on to (the others' do no harm): a task that is collected runs its `finally` blocks.
        self._last = asyncio.all_tasks()

    def pause(self) -> None:
        """As SIGSTOP: nothing of it runs until `resume`, while time goes on for the others."""
        if self._state is _State.RUNNING:
            self._state = _State.PAUSED

    def resume(self) -> None:
        """As SIGCONT: what was due meanwhile runs now, in order."""
        if self._state is _State.PAUSED:
            self._state = _State.RUNNING
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)  # noqa: S101 - nowhere else is there a process
            loop._ready.extend(self._kept)
            self._kept.clear()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time; ``asyncio.Runner(loop_factory=VirtualLoop)`` and `run` use it.

    Raises `NothingLeft` instead of waiting for ever, and `GoesRound` instead of spinning.
    """

    def __init__(self, start: float = START) -> None:
        super().__init__()
        self._now = start
        self._reaping = False
        # Of BaseEventLoop, where they are in every version since 3.4: what runs next, and the heap of timers.
        self._ready: Any
        self._scheduled: list[asyncio.TimerHandle]

    def time(self) -> float:
        """The virtual clock, seconds."""
        return self._now

    def _run_once(self) -> None:
        ready, rounds = self._ready, 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                self._advance()
                rounds = 0
            else:
                rounds += 1
                if rounds > ROUNDS:
                    raise GoesRound(f"{ROUNDS} rounds at {self._now:.3f} without time passing")
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                process = handle._context.get(_PROCESS)
                if process is None or process._state is _State.RUNNING or self._reaping:
                    handle._run()
                elif process._state is _State.PAUSED:
                    process._kept.append(handle)

    def _advance(self) -> None:
        """Go to the next timer, and make ready all that are due then."""
        timers, ready = self._scheduled, self._ready
        while timers:
            handle = heapq.heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            if not handle._cancelled:
                self._now = max(self._now, handle.when())
                ready.append(handle)
                break
        else:
            waiting = [task.get_name() for task in asyncio.all_tasks(self)]
            raise NothingLeft(f"nothing can happen any more; waiting for ever: {', '.join(sorted(waiting))}")
        while timers and timers[0].when() <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is left in the heap until it is due."""

    def _process_events(self, event_list: Any) -> None:
        """Nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Nothing: there are no other threads."""

    def run_in_executor(  # type: ignore[override]
        self, _: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function now; a thread of its own would run in another time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def reap(self) -> None:
        """Cancel and end all that is left, of killed and paused processes too: for when nothing matters any more."""
        self._reaping = True
        handler = self._exception_handler  # type: ignore[attr-defined]
        self.set_exception_handler(lambda *_: None)
        try:
            for _ in range(10):  # what is cancelled may start something new
                tasks = asyncio.all_tasks(self)
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                ending = asyncio.gather(*tasks, return_exceptions=True)
                self.run_until_complete(ending)
        finally:
            self._reaping = False
            self.set_exception_handler(handler)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)  # noqa: S101 - the factory made it
        try:
            return runner.run(main)
        finally:
            loop.reap()
