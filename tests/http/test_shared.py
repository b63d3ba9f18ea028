"""Things that are made once for all who ask for them at about the same time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import attrs
import pytest

from busrep.errors import Unavailable
from busrep.http import shared as http_shared
from busrep.http.shared import Shared
from tests.stores.store_conformance import sync


@attrs.define(eq=False)
class Thing:
    key: str
    size: int


@attrs.define(eq=False)
class Maker:
    """Makes things of size 10 when ``go`` is set, and counts them."""

    go: asyncio.Event = attrs.field(factory=asyncio.Event)
    begun: list[str] = attrs.field(factory=list)
    error: BaseException | None = None

    async def make(self, key: str) -> Thing:
        self.begun.append(key)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return Thing(key, 10)

    def of(self, key: str) -> Callable[[], Coroutine[Any, Any, Thing]]:
        return partial(self.make, key)


def shared(most: int = 100, *, abandon: bool = True) -> Shared[Thing]:
    return Shared("the test", most, lambda thing: thing.size, abandon=abandon)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0)


@sync
async def test_all_who_ask_get_the_same_thing() -> None:
    maker, things = Maker(), shared()
    asking = [asyncio.create_task(things.get("a", maker.of("a"))) for _ in range(3)]
    await until(lambda: maker.begun)
    maker.go.set()
    found = await asyncio.gather(*asking, things.get("b", maker.of("b")))
    assert [id(one) for one in found[:3]] == [id(found[0])] * 3
    assert await things.get("a", maker.of("a")) is found[0]
    assert maker.begun == ["a", "b"]
    await things.close()


@pytest.mark.parametrize("abandon", [True, False])
@sync
async def test_the_last_who_goes_may_end_the_work(abandon: bool) -> None:
    maker, things = Maker(), shared(abandon=abandon)
    first, second = (asyncio.create_task(things.get("a", maker.of("a"))) for _ in range(2))
    await until(lambda: maker.begun)
    first.cancel()
    await asyncio.wait([first])
    assert things.making == 1
    second.cancel()
    await asyncio.wait([second])
    maker.go.set()
    assert (await things.get("a", maker.of("a"))).key == "a"
    assert maker.begun == (["a", "a"] if abandon else ["a"])
    await until(lambda: not things.making)
    await things.close()


@sync
async def test_a_newcomer_does_not_get_the_end_of_what_was_given_up() -> None:
    """Work that takes its time to end."""
    ending, things, maker = asyncio.Event(), shared(), Maker()

    async def slow() -> Thing:
        try:
            return await maker.make("slow")
        finally:
            await ending.wait()

    first = asyncio.create_task(things.get("a", slow))
    await until(lambda: maker.begun)
    first.cancel()
    await asyncio.wait([first])
    assert things.making == 1
    maker.go.set()
    newcomer = await things.get("a", maker.of("new"))
    ending.set()
    await until(lambda: not things.making)
    assert newcomer.key == "new"
    assert await things.get("a", maker.of("a")) is newcomer
    await things.close()


@sync
async def test_what_could_not_be_made_is_made_anew() -> None:
    maker, things = Maker(error=ValueError("no")), shared()
    maker.go.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await things.get("a", maker.of("a"))
    maker.error = None
    assert (await things.get("a", maker.of("a"))).key == "a"
    assert len(maker.begun) == 3
    await things.close()


@sync
async def test_the_oldest_go_first_and_those_that_nobody_asked_for_last() -> None:
    maker, things = Maker(), shared(30)
    maker.go.set()
    things.make_ahead("ahead", maker.of("ahead"), 10)
    await until(lambda: not things.making)
    for key in ("a", "b", "c"):
        await things.get(key, maker.of(key))
    assert [key in things for key in ("ahead", "a", "b", "c")] == [True, False, True, True]
    await things.get("ahead", maker.of("ahead"))
    await things.get("d", maker.of("d"))
    assert [key in things for key in ("ahead", "b", "c", "d")] == [False, True, True, True]
    assert maker.begun == ["ahead", "a", "b", "c", "d"]
    await things.close()


@sync
async def test_so_much_is_made_ahead_as_can_be_kept() -> None:
    maker, things = Maker(), shared(30)
    for key in ("a", "b"):
        things.make_ahead(key, maker.of(key), 14)
    things.make_ahead("a", maker.of("a"), 1)  # there already
    things.make_ahead("c", maker.of("c"), 11)  # the others are taken to be as large
    await until(lambda: len(maker.begun) == 2)
    maker.go.set()
    await until(lambda: not things.making)
    things.make_ahead("c", maker.of("c"), 11)
    assert not things.making
    things.make_ahead("c", maker.of("c"), 10)
    await until(lambda: not things.making)
    assert maker.begun == ["a", "b", "c"]
    await things.get("a", maker.of("a"))
    things.make_ahead("d", maker.of("d"), 10)
    await until(lambda: not things.making)
    assert "a" not in things
    assert all(key in things for key in "bcd")
    await things.close()


@sync
async def test_nothing_is_held_of_what_had_to_go() -> None:
    """By the timer that would have ended it."""
    maker, things = Maker(), shared(10)
    maker.go.set()
    old = weakref.ref(await things.get("a", maker.of("a")))
    await things.get("b", maker.of("b"))
    gc.collect()
    assert old() is None
    await things.close()


def test_things_are_kept_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_shared, "SHARED_FOR", 0.001)

    async def main() -> None:
        maker, things = Maker(), shared()
        maker.go.set()
        await things.get("a", maker.of("a"))
        await until(lambda: "a" not in things)
        things.make_ahead("b", maker.of("b"), 10)
        await until(lambda: "b" not in things)
        await things.close()

    asyncio.run(main())


def test_what_is_made_ahead_and_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_shared, "SHARED_FOR", 0.001)

    async def main() -> None:
        maker, things = Maker(), shared()
        things.make_ahead("a", maker.of("a"), 10)
        await until(lambda: maker.begun and not things.making)
        assert "a" not in things
        await things.close()

    asyncio.run(main())


@sync
async def test_what_is_made_ahead_gives_way_unless_somebody_waits_for_it() -> None:
    maker, things = Maker(), shared()
    for key in ("a", "b"):
        things.make_ahead(key, maker.of(key), 10)
    asking = asyncio.create_task(things.get("a", maker.of("a")))
    await until(lambda: len(maker.begun) == 2)
    things.give_up_ahead()
    assert ["a" in things, "b" in things] == [True, False]
    await until(lambda: things.making == 1)
    maker.go.set()
    assert (await asking).key == "a"
    things.make_ahead("c", maker.of("c"), 10)
    await until(lambda: not things.making)
    things.give_up_ahead()
    assert "c" in things, "it is made"
    await things.close()


@sync
async def test_what_is_larger_than_all_that_is_kept_drives_nothing_out() -> None:
    maker, things = Maker(), shared(30)
    maker.go.set()
    for key in ("a", "b"):
        await things.get(key, maker.of(key))

    async def large() -> Thing:
        return Thing("large", 31)

    assert (await things.get("large", large)).size == 31
    assert [key in things for key in ("a", "b", "large")] == [True, True, False]
    await things.close()


@sync
async def test_where_nothing_is_kept_nothing_is_made_ahead() -> None:
    """Not even what looks as if it were of no size."""
    maker, things = Maker(), shared(0)
    things.make_ahead("a", maker.of("a"), 0)
    assert not things.making
    await things.close()


@sync
async def test_closing_ends_what_is_made() -> None:
    maker, things = Maker(), shared()
    asking = asyncio.create_task(things.get("a", maker.of("a")))
    things.make_ahead("b", maker.of("b"), 10)
    await until(lambda: len(maker.begun) == 2)
    await things.close()
    assert not things.making
    with pytest.raises(Unavailable, match="it is being closed"):
        await asking
    await things.close()
    with pytest.raises(Unavailable, match="it is being closed"):
        await things.get("a", maker.of("a"))
    things.make_ahead("b", maker.of("b"), 10)
    assert not things.making


@sync
async def test_newcomers_can_be_sent_to_a_new_thing() -> None:
    maker, things = Maker(), shared()
    asking = asyncio.create_task(things.get("a", maker.of("a")))
    await until(lambda: maker.begun)
    things.forget_all()
    assert "a" in things, "it is being made"
    maker.go.set()
    await asking
    things.forget_all()
    assert "a" not in things
    await things.close()
