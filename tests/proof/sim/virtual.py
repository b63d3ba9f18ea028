"""The loop of the simulator: a `VirtualLoop` whose tasks belong to simulated processes, which can be paused and killed.

What is ready runs in the order asyncio promises; when nothing is, the clock jumps to the next timer. So what runs
depends on nothing outside, and runs the same way every time, as long as it asks neither the machine's clock nor its
random numbers. The loop is also faster than asyncio's own, because a simulation runs thousands of callbacks a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import weakref
from collections.abc import Callable, Coroutine, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

from busrep.testing.virtual import ROUNDS, START, GoesRound, NothingLeft, VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _State(enum.Enum):
    RUNNING = enum.auto()
    PAUSED = enum.auto()
    DEAD = enum.auto()


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """Tasks of a `SimulatedLoop` that stand for one operating system process.

    Whatever is started inside of it, however deep, belongs to it. ``behind``: how many seconds its clock is.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.behind = 0.0
        self._state = _State.RUNNING
        self._runs = True
        self._kept: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(_PROCESS.set, self)
        self._last: list[asyncio.Task[Any]] = []

    @property
    def alive(self) -> bool:
        """Whether it has not been killed."""
        return self._state is not _State.DEAD

    @property
    def paused(self) -> bool:
        """Whether it is stopped for now."""
        return self._state is _State.PAUSED

    @staticmethod
    def current() -> Process | None:
        """The one that runs now, if it is any."""
        return _PROCESS.get()

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine in this process. The task may be awaited from outside; killed, it never ends."""
        return asyncio.get_running_loop().create_task(work, name=name or self.name, context=self._context)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process, at once: what it schedules belongs to the process."""
        return self._context.copy().run(function, *args)

    def kill(self) -> None:
        """As kill -9: nothing of it runs any more, no ``finally`` either. Its tasks stay pending for ever."""
        self._state, self._runs = _State.DEAD, False
        # Held on to (the others' do no harm): a task that is collected runs its `finally` blocks.
        self._last = _running().pending()

    def pause(self) -> None:
        """As SIGSTOP: nothing of it runs until `resume`, while time goes on for the others."""
        if self._state is _State.RUNNING:
            self._state, self._runs = _State.PAUSED, False

    def resume(self) -> None:
        """As SIGCONT: what was due meanwhile runs now, in order."""
        if self._state is _State.PAUSED:
            self._state, self._runs = _State.RUNNING, True
            _running()._ready.extend(self._kept)
            self._kept.clear()


def _running() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


class _Handle(asyncio.Handle):
    """As asyncio's, made faster: there are thousands in a second of real time, and none needs to know who made it."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None


class _TimerHandle(asyncio.TimerHandle):
    """The same of a timer. Among those of one moment none is the first: the heap compares moments alone."""

    __slots__ = ()
    __hash__ = asyncio.TimerHandle.__hash__

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, other: object) -> bool:
        return False


class SimulatedLoop(VirtualLoop):
    """A `VirtualLoop` of processes; what runs in no `Process` is the world around them."""

    def __init__(self, start: float = START) -> None:
        super().__init__()
        self._now = start
        self._reaping = False
        self._stopped: dict[Process, None] = {}  # what was due of them was kept: to go on, or to be reaped
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []  # a heap; cancelled ones stay until they are due
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []  # that were made, in order
        self._enough = 1_000  # of them: time to forget those that have ended
        self._ready: Any  # of BaseEventLoop, in every version since 3.4: what runs next

    def time(self) -> float:
        """The virtual clock, seconds."""
        return self._now

    # As BaseEventLoop's, without what its debug mode looks at.

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`."""
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_later`."""
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        when = self._now + delay
        handle = _TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, handle))
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`."""
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        handle = _TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, handle))
        return handle

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """See `asyncio.loop.create_task`."""
        task = super().create_task(coro, **kwargs)
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._enough:
            self._tasks = [weakref.ref(task) for task in self.pending()]
            self._enough = 1_000 + 2 * len(self._tasks)
        return task

    def pending(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended, in the order in which they were made."""
        return [task for one in self._tasks if (task := one()) is not None and not task.done()]

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
                context = handle._context
                process = context.get(_PROCESS)
                if process is None or process._runs or self._reaping:
                    try:
                        context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self._failed(handle, error)
                else:
                    process._kept.append(handle)
                    self._stopped[process] = None

    def _failed(self, handle: asyncio.Handle, error: BaseException) -> None:
        self.call_exception_handler(
            {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
        )

    def _advance(self) -> None:
        """Go to the next timer, and make ready all that are due then."""
        timers, ready = self._timers, self._ready
        while timers:
            when, handle = heappop(timers)
            if not handle._cancelled:
                break
        else:
            waiting = [task.get_name() for task in self.pending()]
            raise NothingLeft(f"nothing can happen any more; waiting for ever: {', '.join(sorted(waiting))}")
        if when > self._now:
            self._now = when
        ready.append(handle)
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[1])

    def close(self) -> None:
        """See `asyncio.loop.close`."""
        super().close()
        self._timers.clear()

    def reap(self) -> None:
        """Cancel and end all that is left, of killed and paused processes too: for when nothing matters any more."""
        self._reaping = True
        for process in self._stopped:
            self._ready.extend(process._kept)
        handler = self._exception_handler  # type: ignore[attr-defined]
        self.set_exception_handler(lambda *_: None)
        try:
            for _ in range(10):  # what is cancelled may start something new
                tasks = self.pending()
                if not tasks:
                    break
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(NothingLeft):  # one that took its cancellation for another's is asked again
                    self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._reaping = False
            self.set_exception_handler(handler)


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, on a `SimulatedLoop`."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimulatedLoop)
        try:
            return runner.run(main)
        finally:
            loop.reap()
