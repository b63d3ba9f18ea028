"""The simulator's loop, and the processes on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from busrep.testing.virtual import START, GoesRound, NothingLeft
from tests.proof.sim.virtual import Process, SimulatedLoop, run


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


def test_waiting_takes_no_time_and_keeps_its_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time() - START))

        await asyncio.gather(wait("a", 3600), wait("b", 1), wait("c", 1), wait("d", 0))
        return seen

    assert run(main()) == [("d", 0.0), ("b", 1.0), ("c", 1.0), ("a", 3600.0)]


async def _ticking(seen: list[tuple[str, float]], name: str) -> None:
    loop = asyncio.get_running_loop()
    try:
        while True:
            await asyncio.sleep(1)
            seen.append((name, loop.time() - START))
    finally:
        seen.append((name, -1.0))


def test_a_killed_process_runs_nothing_any_more() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> list[tuple[str, float]]:
        process = Process("p")

        async def inner() -> None:  # what a process starts is of the process
            asyncio.get_running_loop().create_task(_ticking(seen, "inner"))
            await _ticking(seen, "outer")

        process.start(inner())
        await asyncio.sleep(1.5)
        process.kill()
        await asyncio.sleep(10)
        assert not process.alive
        return list(seen)

    assert sorted(run(main())) == [("inner", 1.0), ("outer", 1.0)]


def test_a_paused_process_is_late_and_then_goes_on() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> list[tuple[str, float]]:
        process, other = Process("p"), Process("q")
        process.start(_ticking(seen, "p"))
        other.start(_ticking(seen, "q"))
        await asyncio.sleep(1.5)
        process.pause()
        assert process.paused
        await asyncio.sleep(3)
        process.resume()
        await asyncio.sleep(1.2)
        return [one for one in seen if one[0] == "p"]

    assert run(main()) == [("p", 1.0), ("p", 4.5), ("p", 5.5)]


def test_a_process_killed_while_paused_stays_dead() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> list[tuple[str, float]]:
        process = Process("p")
        process.start(_ticking(seen, "p"))
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(2)
        process.kill()
        process.resume()
        await asyncio.sleep(2)
        return list(seen)

    assert run(main()) == [("p", 1.0)]


def test_a_call_as_a_process_schedules_for_it() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        process = Process("p")
        loop = asyncio.get_running_loop()
        process.call(loop.call_later, 1.0, seen.append, "killed before")
        loop.call_later(1.0, seen.append, "mine")
        process.kill()
        await asyncio.sleep(2)
        return seen

    assert run(main()) == ["mine"]


def test_reaping_ends_what_was_killed() -> None:
    loop, seen = SimulatedLoop(), []

    async def main() -> None:
        process = Process("p")
        process.start(_ticking(seen, "p"))
        await asyncio.sleep(0)
        process.kill()

    loop.run_until_complete(main())
    assert seen == []
    loop.reap()
    assert seen == [("p", -1.0)]
    assert not asyncio.all_tasks(loop)
    loop.close()


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
