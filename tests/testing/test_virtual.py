"""The virtual clock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from busrep.testing.virtual import START, GoesRound, NothingLeft, VirtualLoop, run


def test_waiting_takes_no_time_and_keeps_its_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time() - START))

        await asyncio.gather(wait("a", 3600), wait("b", 1), wait("c", 1), wait("d", 0))
        return seen

    assert run(main()) == [("d", 0.0), ("b", 1.0), ("c", 1.0), ("a", 3600.0)]


def test_a_timeout_ends_what_would_wait_for_ever() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time() - START

    assert run(main()) == 30.0


def test_a_wait_that_nothing_can_end_is_an_error_that_names_it() -> None:
    async def main() -> None:
        asyncio.current_task().set_name("the one that waits")  # type: ignore[union-attr]
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft, match="the one that waits"):
        run(main())


def test_a_loop_that_spins_is_an_error() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(GoesRound):
        run(main())


def test_what_is_given_to_a_thread_runs_on_the_loop() -> None:
    async def main() -> tuple[int, str]:
        def fails() -> None:
            raise ValueError("inside")

        with pytest.raises(ValueError, match="inside"):
            await asyncio.to_thread(fails)
        return await asyncio.to_thread(threading.get_ident), "done"

    assert run(main()) == (threading.get_ident(), "done")


def test_errors_of_tasks_reach_the_loop_s_handler() -> None:
    caught: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: caught.append(context["exception"]))

        def fails() -> None:
            raise ValueError("in a callback")

        loop.call_later(1, fails)
        await asyncio.sleep(2)

    run(main())
    assert [str(error) for error in caught] == ["in a callback"]


def test_tasks_that_are_left_end_with_the_run() -> None:
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("left")

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(left())
        await asyncio.sleep(0)
        assert not task.done()

    run(main())
    assert ended == ["left"]


def test_a_loop_of_one_s_own(virtual_loop: VirtualLoop) -> None:
    for at in (1, 2):
        virtual_loop.run_until_complete(asyncio.sleep(60))
        assert virtual_loop.time() == START + at * 60
