"""A virtual clock: an asyncio loop on which waiting takes no time.

    def test_a_silent_writer_is_noticed() -> None:
        async def main() -> None:
            ...
            await asyncio.sleep(3600)  # at once

        virtual.run(main())

When no task can run, the clock jumps to the next timer. There are no sockets, and functions given to threads run at
once, on the loop.
"""

from __future__ import annotations

import asyncio
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


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time; ``asyncio.Runner(loop_factory=VirtualLoop)`` and `run` use it.

    Raises `NothingLeft` instead of waiting for ever, and `GoesRound` instead of spinning.
    """

    def __init__(self, start: float = START) -> None:
        super().__init__()
        self._now, self._rounds = start, 0
        self._selector = self  # where asyncio's loop has what it waits with

    def time(self) -> float:
        """The virtual clock, seconds."""
        return self._now

    def select(self, timeout: float | None) -> tuple[()]:
        """Move the clock on by ``timeout`` seconds, which the loop would wait; None: no timer is set. Raises
        NothingLeft, GoesRound."""
        if timeout is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise NothingLeft(f"nothing can happen any more; waiting for ever: {', '.join(waiting)}")
        self._rounds = 0 if timeout else self._rounds + 1
        if self._rounds > ROUNDS:
            self._rounds = 0  # so that the tasks can still be cancelled
            raise GoesRound(f"{ROUNDS} rounds at {self._now:.3f} without time passing")
        self._now += timeout
        return ()

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


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
