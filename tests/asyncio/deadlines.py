"""Deadlines as they were made before asyncio.timeout(): a task that has itself cancelled."""

from __future__ import annotations

import asyncio


def deadline(seconds: float) -> None:
    """Cancel whoever calls after so many seconds."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(seconds, task.cancel)


async def cut_off(seconds: float, then: str) -> None:
    """Wait for a deadline. ``then``: what is made of the cancellation, TimeoutError, ValueError, CancelledError or
    nothing."""
    deadline(seconds)
    try:
        await asyncio.sleep(1000.0)
    except asyncio.CancelledError:
        if then == "TimeoutError":
            raise TimeoutError("too slow") from None
        if then == "ValueError":
            raise ValueError("too slow") from None
        if then == "CancelledError":
            raise
