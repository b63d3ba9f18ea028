"""The caches' core: keys, loads that race with invalidations, gaps, silence, and the rows that name caches."""

from __future__ import annotations

import asyncio
import enum
import math
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from cachetools import TTLCache

from busrep import Settings, Stream
from busrep.caches.cache import Caches, Feed, Invalidation, invalidations, row_of_call, row_of_key
from busrep.caches.cached import MARKS, Cache, wrap
from busrep.errors import ConfigError, MissingExtra
from busrep.stores.plans import complete
from busrep.streams import Registry
from tests import ROOT

BOUND = 10.0
stream = invalidations()


def row(cache: str, *keys: Any) -> Invalidation:
    return Invalidation(cache, list(keys), 1)


def everything(cache: str) -> Invalidation:
    return Invalidation(cache, None, 1)


class World:
    """One feed that is followed and trusted, a clock that stands still, and a table of values that are loaded."""

    def __init__(self, *, offline: float = 0.0, followed: bool = True) -> None:
        self.now = 1000.0
        settings = Settings(cache_bound=BOUND, cache_offline=offline)
        self.caches = Caches([stream], settings, clock=lambda: self.now, lock=threading.RLock)
        self.table: dict[Any, int] = {}
        self.loads = 0
        self.meanwhile: Callable[[], None] = lambda: None  # while a load is under way, before it returns
        if followed:
            self.feed.follow()
            self.feed.prove(self.now)

    @property
    def feed(self) -> Feed:
        return self.caches.feed_of()

    def add(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        given = {"name": "item", **options}
        function = self.load if function is None else function
        return wrap(self.caches.add(function, **given), function, self.caches.clock)

    def cache(self, name: str = "item") -> Cache:
        return self.caches.caches[name]

    def load(self, key: int) -> int:
        self.loads += 1
        value = self.table.get(key, 0)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return value

    async def load_async(self, key: int) -> int:
        return self.load(key)

    def apply(self, *rows: Invalidation) -> list[str]:
        return self.feed.apply(rows)


# -- calls and keys -------------------------------------------------------------------------------------------


def test_a_result_is_loaded_once_and_counted() -> None:
    world = World()
    item = world.add()
    world.table[1] = 7
    assert [item(1), item(1), item(1), item(2)] == [7, 7, 7, 0]
    assert world.loads == 2
    assert item.statistics() == {
        "hits": 2, "misses": 2, "bypassed": 0, "invalidations": 0, "fills_refused": 0, "size": 2,
    }  # fmt: skip
    assert item.cache_name == "item"
    assert item.__wrapped__ == world.load


def test_a_coroutine_function_stays_one() -> None:
    world = World()
    item = world.add(world.load_async)

    async def main() -> list[int]:
        return [await item(1), await item(key=1)]

    world.table[1] = 7
    assert asyncio.iscoroutinefunction(item)
    assert asyncio.run(main()) == [7, 7]
    assert world.loads == 1


def test_what_a_function_raises_is_not_kept() -> None:
    world = World()

    @world.add
    def fails(key: int) -> int:
        raise LookupError(key)

    for _ in range(2):
        with pytest.raises(LookupError):
            fails(1)
    assert fails.statistics()["misses"] == 2
    assert fails.statistics()["size"] == 0


def test_one_result_however_the_arguments_are_given() -> None:
    world = World()
    calls = []

    def function(a: int, b: str = "x", *, c: float | None = None) -> int:
        calls.append((a, b, c))
        return len(calls)

    item = world.add(function)
    assert item(1) == item(1, "x") == item(a=1) == item(b="x", a=1) == item(1, c=None) == 1
    assert item(1, "y") == item(1, b="y") == 2
    assert item(1, c=0.5) == 3
    assert row_of_call(world.cache(), (1,), {}, 5) == Invalidation("item", [1, "x", None], 5)
    with pytest.raises(TypeError, match="missing a required argument"):
        item()
    with pytest.raises(TypeError, match="too many positional"):
        item(1, "x", None)


def test_any_number_of_arguments() -> None:
    world = World()
    item = world.add(lambda *parts: len(parts), name="many")
    both = world.add(lambda *parts, last=0: (parts, last), name="both")
    assert [item(), item(1), item(1, 2), item(1)] == [0, 1, 2, 1]
    # (1, 2) is the key of the second call, and what is given in the third.
    assert [both(1), both(1, last=2), both(1, 2)] == [((1,), 0), ((1,), 2), ((1, 2), 0)]
    world.apply(row("many", 1))
    assert world.cache("many").statistics()["size"] == 2
    assert world.feed.other_keys == 0


class Color(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "part",
    [uuid.UUID(int=1), 2**63, -(2**63) - 1, math.nan, math.inf, "\ud800", b"x", (1,), [1], {}, Color.RED, object()],
)
def test_a_part_without_one_form_in_json_is_refused(part: Any) -> None:
    world = World()
    item = world.add()
    with pytest.raises(ConfigError, match="pass key="):
        item(part)
    with pytest.raises(ConfigError, match="pass key="):
        row_of_call(world.cache(), (part,), {}, 1)
    assert world.loads == 0


@pytest.mark.parametrize("part", ["", "ü", "a b", 0, -(2**63), 2**63 - 1, True, None, 0.5, -1e300])
def test_a_part_that_survives_json_is_a_key(part: Any) -> None:
    world = World()
    item = world.add()
    item(part)
    assert world.apply(*stream.decode([stream.encode(row_of_call(world.cache(), (part,), {}, 1))])) == []
    assert item.statistics()["size"] == 0


def test_key_says_what_a_result_depends_on() -> None:
    world = World()

    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @lambda function: world.add(function, key=lambda self, id: (self.name, str(id)))
        def price(self, id: uuid.UUID) -> int:
            world.loads += 1
            return world.loads

    one, other, id = Shop("one"), Shop("other"), uuid.UUID(int=5)
    assert [one.price(id), Shop("one").price(id), other.price(id), one.price(id=id)] == [1, 1, 2, 1]
    world.apply(row_of_call(world.cache(), (one, id), {}, 1))
    assert [one.price(id), other.price(id)] == [3, 2]


def test_a_method_without_key_is_told_so() -> None:
    world = World()

    class Shop:
        @world.add
        def price(self, id: int) -> int:
            return id

    with pytest.raises(ConfigError, match="Shop.*pass key="):
        Shop().price(1)


@pytest.mark.parametrize("made", ["1", [1], 1, None])
def test_key_gives_a_tuple(made: Any) -> None:
    world = World()
    item = world.add(key=lambda key: made)
    with pytest.raises(ConfigError, match="a key is a tuple"):
        item(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxsize": 0}, "maxsize=0"), ({"maxsize": None}, "maxsize=None"), ({"maxsize": True}, "maxsize"),
        ({"ttl": 0}, "ttl=0"), ({"ttl": -1.0}, "ttl"), ({"name": "a b"}, "one word"), ({"name": ""}, "one word"),
        ({"name": 5}, "one word"), ({"stream": Stream("orders")}, "no stream of invalidations"),
    ],
)  # fmt: skip
def test_what_a_cache_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World().add(**options)


def test_what_cannot_be_cached() -> None:
    world = World()

    def numbers() -> Any:
        yield 1

    async def numbers_async() -> Any:
        yield 1

    for function in (numbers, numbers_async):
        with pytest.raises(ConfigError, match="iterator"):
            world.add(function)
    with pytest.raises(ConfigError, match=r"\*\*kwargs needs key="):
        world.add(lambda **kwargs: 1)
    assert world.add(lambda **kwargs: 1, key=lambda **kwargs: (kwargs["id"],))(id=5) == 1


def test_two_caches_of_one_name_are_refused_and_names_are_qualified_by_default() -> None:
    world = World()
    item = world.add(name=None)
    assert item.cache_name == f"{__name__}.World.load"
    with pytest.raises(ConfigError, match="two caches are named"):
        world.add(name=None)
    world.caches.special("special", [item])
    with pytest.raises(ConfigError, match="two caches are named"):
        world.add(name="special")
    with pytest.raises(ConfigError, match="two caches are named"):
        world.caches.special("special", [item])


def test_the_store_underneath_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cachetools", None)
    with pytest.raises(MissingExtra, match=r"bus.cached needs an extra.*busrep\[caches\]"):
        World().add()


def test_the_least_recently_used_goes_first_and_all_after_their_time() -> None:
    world = World()
    item = world.add(maxsize=2)
    for key in (1, 2, 1, 3):
        item(key)
    assert list(world.cache().store) == [(1,), (3,)]
    timed = world.add(name="timed", ttl=5.0)
    timed(1)
    loads = world.loads
    world.now += 4.9
    timed(1)
    assert world.loads == loads
    world.now += 0.2
    timed(1)
    assert world.loads == loads + 1


# -- loads and invalidations ----------------------------------------------------------------------------------


def change(world: World, key: int = 1) -> None:
    world.table[key] = world.table.get(key, 0) + 1
    world.apply(row("item", key))


def test_an_invalidation_before_a_load_leaves_it_alone() -> None:
    world = World()
    item = world.add()
    change(world)
    assert [item(1), item(1)] == [1, 1]
    assert world.loads == 1


def test_an_invalidation_during_a_load_refuses_what_it_read() -> None:
    world = World()
    item = world.add()
    world.meanwhile = lambda: change(world)
    assert [item(1), item(1), item(1)] == [0, 1, 1]
    assert item.statistics()["fills_refused"] == 1


def test_an_invalidation_after_a_load_drops_it() -> None:
    world = World()
    item = world.add()
    assert item(1) == 0
    change(world)
    assert item(1) == 1
    assert item.statistics()["invalidations"] == 1


def test_an_invalidation_of_another_key_refuses_nothing() -> None:
    world = World()
    item = world.add()
    world.meanwhile = lambda: change(world, 2)
    assert [item(1), item(1)] == [0, 0]
    assert world.loads == 1


def test_an_invalidation_of_a_key_with_the_same_mark_refuses_one_load_and_no_more() -> None:
    other = next(key for key in range(2, 10**6) if hash((key,)) % MARKS == hash((1,)) % MARKS)
    world = World()
    item = world.add()
    world.meanwhile = lambda: change(world, other)
    assert [item(1), item(1), item(1)] == [0, 0, 0]
    assert world.loads == 2
    change(world, other)
    item(1)
    assert world.loads == 2


def test_of_two_loads_of_a_key_each_is_judged_by_when_it_began() -> None:
    world = World()
    item = world.add()

    def second() -> None:
        change(world)  # between the beginnings of the two
        assert item(1) == 1

    world.meanwhile = second
    assert item(1) == 0
    assert item(1) == 1
    assert world.loads == 2
    assert item.statistics()["fills_refused"] == 1


def test_of_two_loads_that_are_both_right_the_later_is_kept() -> None:
    """The row may be on its way still: who has seen the new value should not see the old one again."""
    world = World()
    item = world.add()

    def second() -> None:
        world.now += 1
        world.table[1] = 5
        assert item(1) == 5

    world.meanwhile = second
    assert item(1) == 0
    assert item(1) == 5


@pytest.mark.parametrize(
    "what",
    [
        lambda world: world.apply(everything("item")),
        lambda world: world.feed.clear(),
        lambda world: world.feed.gap(),
        lambda world: (world.feed.gap(), world.feed.mended()),
        lambda world: (world.feed.stop(), world.feed.follow()),
        lambda world: world.apply(row("item", 1, 2)),  # of a key of another kind: all goes
        lambda world: world.apply(row("item", [1])),
    ],
)
def test_whatever_doubts_all_entries_refuses_what_is_being_loaded(what: Callable[[World], Any]) -> None:
    world = World()
    item = world.add()
    world.meanwhile = lambda: what(world)
    item(1)
    assert item.statistics()["size"] == 0
    assert item.statistics()["fills_refused"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, ValueError])
def test_a_load_that_is_interrupted_leaves_nothing_behind(error: type[BaseException]) -> None:
    world = World()

    def interrupt() -> None:
        raise error

    for function in (world.load, world.load_async):
        item = world.add(function, name=function.__name__)
        world.meanwhile = interrupt

        def call(item: Any = item, *, waits: bool = function == world.load_async) -> Any:
            return complete(item(1)) if waits else item(1)

        with pytest.raises(error):
            call()
        assert item.statistics()["size"] == 0
        assert (call(), call()) == (0, 0)
        assert item.statistics()["hits"] == 1


class _Interrupt(BaseException):
    pass


def _interrupted(work: Callable[[], Any], at: int) -> bool:
    """Do it with an interrupt before its instruction number ``at``, as a signal may come; whether there is one."""
    passed = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal passed
        if not any(part in frame.f_code.co_filename for part in ("cachetools", "cached.py")):
            return None
        frame.f_trace_opcodes = True
        passed += event == "opcode"
        if event == "opcode" and passed == at:
            raise _Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except _Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _works(world: World, item: Any) -> dict[str, Callable[[], Any]]:
    return {
        "keep": lambda: item(7), "expire": lambda: item(7), "drop": lambda: world.apply(row("item", 2)),
        "clear": lambda: world.apply(everything("item")), "count": item.statistics,
    }  # fmt: skip


def _in_a_process(call: str) -> None:
    """Exceptions out of trace functions leave CPython 3.11 with a wrong count of its recursion, and with one that it
    takes for being handled: other tests of this process would fail, now and then, of that."""
    program = f"from tests.caches import test_caches; test_caches.{call}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ttl", [None, 10.0])
@pytest.mark.parametrize("what", ["keep", "expire", "drop", "clear", "count"])
def test_a_cache_is_whole_again_after_an_interrupt_at_any_instruction(what: str, ttl: float | None) -> None:
    _in_a_process(f"whole_again({what!r}, {ttl!r})")


def whole_again(what: str, ttl: float | None) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        world = World()
        item = world.add(maxsize=2, ttl=ttl)
        cache = world.cache()
        work = _works(world, item)[what]
        assert [item(key) for key in (1, 2)] == [0, 0]
        world.now += 11 if what == "expire" else 1
        world.table = dict.fromkeys(range(10), 1)
        goes_on = _interrupted(work, at)
        world.feed.prove(world.now)
        if what in ("drop", "clear"):
            work()  # whoever was interrupted applies it again
            assert item(2) == 1
        assert [item(key) for key in (3, 4, 5, 5, 4)] == [1] * 5, at
        assert cache.statistics()["size"] == len(cache.store) == 2, at
        hits = cache.hits
        world.apply(row("item", 4))
        assert (item(4), item(5), cache.hits) == (1, 1, hits + 1), at
        world.now += 11
        world.feed.prove(world.now)
        loads = world.loads
        item(5)
        assert world.loads == loads + (ttl is not None), at
    assert at > 10


def test_an_invalidation_that_is_interrupted_and_comes_again_refuses_what_was_being_loaded() -> None:
    _in_a_process("refused_again()")


def refused_again() -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        world = World()
        item = world.add()
        interrupted = []

        def meanwhile(world: World = world, at: int = at, interrupted: list[bool] = interrupted) -> None:
            world.table[1] = 1
            interrupted.append(_interrupted(lambda: world.apply(row("item", 1)), at))
            world.apply(row("item", 1))

        world.meanwhile = meanwhile
        assert (item(1), item(1)) == (0, 1), at
        goes_on = interrupted[0]
    assert at > 10


def test_entries_are_counted_under_the_lock() -> None:
    """Counting throws out what is too old, which two threads must not do at a time."""
    world = World()
    item = world.add(ttl=10.0)
    cache, held = world.cache(), list[bool]()

    class Counted(TTLCache[Any, Any]):
        def __len__(self) -> int:
            other = threading.Thread(target=lambda: held.append(not cache.lock.acquire(blocking=False)))  # type: ignore[attr-defined]
            other.start()
            other.join()
            return super().__len__()

    cache.make = lambda: Counted(10, 10.0)
    cache.clear()
    item(1)
    held.clear()
    assert item.statistics()["size"] == 1
    assert held == [True]


def test_loads_in_threads_and_invalidations_between_them_end_with_the_last_value() -> None:
    world = World()
    item = world.add()
    started, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def wait(*_: Any) -> None:
        started.release()
        go_on.acquire()

    def slow(key: int) -> int:
        value = world.table.get(key, 0)
        wait()
        return value

    item = world.add(slow, name="slow")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(item(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        started.acquire()
    world.table[1] = 5
    world.apply(row("slow", 1))
    for _ in threads:
        go_on.release()
    for thread in threads:
        thread.join()
    assert found == [0, 0, 0]
    assert item.statistics()["fills_refused"] == 3
    go_on.release()
    assert item(1) == 5


# -- time -----------------------------------------------------------------------------------------------------


def test_an_entry_needs_a_proof_only_once_it_is_older_than_the_bound() -> None:
    world = World()
    item = world.add()
    world.feed.prove(world.now)
    world.now += 8
    item(1)  # loaded at 8
    world.now += 9.9  # no proof is younger than the bound any more, but the entry is
    item(1)
    assert world.loads == 1
    world.now += 0.2
    item(1)
    assert world.loads == 2
    assert item.statistics()["bypassed"] == 1


def test_the_bound_is_counted_from_the_beginning_of_a_load() -> None:
    world = World()
    item = world.add()
    world.now += 100

    def slow() -> None:
        world.now += BOUND

    world.meanwhile = slow
    item(1)
    item(1)
    assert world.loads == 2


def test_a_proof_keeps_entries_of_any_age() -> None:
    world = World()
    item = world.add()
    item(1)
    for _ in range(10):
        world.now += BOUND * 0.9
        world.feed.prove(world.now - 1)
        item(1)
    assert world.loads == 1
    world.feed.prove(world.now - 100)  # one that comes late takes nothing back
    assert item(1) == 0
    assert world.loads == 1
    assert world.feed.statistics(world.now)["proof_age"] == 1


def test_a_process_that_was_stopped_returns_nothing_old() -> None:
    """No timer has fired, no message was read: it is the clock that tells."""
    world = World()
    item = world.add()
    item(1)
    world.now += 3600
    world.table[1] = 1
    assert item(1) == 1


def test_while_the_link_is_down_entries_are_returned_as_long_as_is_set() -> None:
    world = World(offline=100.0)
    item = world.add()
    item(1)
    world.now += 99
    assert world.feed.statistics(world.now)["trusted"] is False
    world.feed.link(False)
    assert world.feed.statistics(world.now)["trusted"] is True
    assert world.feed.statistics(world.now)["bound"] == 100.0
    item(1)
    assert world.loads == 1
    world.now += 1
    item(1)
    assert world.loads == 2
    world.now += BOUND + 1
    world.feed.link(True)  # until somebody announces himself nothing is known of the time between
    item(1)
    assert world.loads == 3


def test_by_default_a_link_that_is_down_changes_nothing() -> None:
    world = World()
    item = world.add()
    item(1)
    world.feed.link(False)
    world.now += BOUND - 1
    item(1)
    assert world.loads == 1
    world.now += 1
    item(1)
    assert world.loads == 2


def test_the_bound_is_a_quarter_more_than_a_heartbeat() -> None:
    def bound(settings: Settings) -> float:
        return Caches([invalidations()], settings, clock=lambda: 0.0, lock=threading.RLock).feed_of().bound

    assert bound(Settings()) == 2.5
    assert bound(Settings(heartbeat=1.0, cache_bound=7.0)) == 7.0


# -- gaps -----------------------------------------------------------------------------------------------------


def test_a_gap_makes_everything_unreachable_at_once_and_mending_brings_back_what_was_not_lost() -> None:
    world = World()
    item = world.add()
    item(1), item(2)
    world.table = {1: 5, 2: 6}
    world.feed.gap()
    world.meanwhile = lambda: None
    assert world.feed.statistics(world.now)["trusted"] is False
    assert item(1) == 5  # loaded after the gap was known: read after the lost rows had been committed
    assert item(1) == 5
    assert world.loads == 3
    world.apply(row("item", 1))
    world.feed.mended()
    assert world.feed.statistics(world.now)["trusted"] is True
    assert item(2) == 0  # nobody said that it changed
    assert item(1) == 5
    assert world.loads == 4


def test_a_second_gap_reaches_what_was_loaded_since_the_first() -> None:
    world = World()
    item = world.add()
    world.feed.gap()
    item(1)
    world.feed.gap()
    item(1)
    assert world.loads == 2
    assert world.feed.gaps == 2


def test_what_is_loaded_while_there_is_a_gap_is_returned_for_no_longer_than_the_bound() -> None:
    world = World()
    item = world.add()
    world.now += BOUND
    world.feed.gap()
    item(1)
    world.now += BOUND - 0.1
    item(1)
    assert world.loads == 1
    world.now += 0.2
    item(1)
    assert world.loads == 2


def test_rows_that_nothing_can_bring_clear_the_caches() -> None:
    world = World()
    item = world.add()
    item(1)
    world.feed.gap()
    world.feed.clear()
    world.feed.mended()
    item(1)
    assert world.loads == 2
    assert world.feed.clears == 1


def test_nothing_is_kept_before_the_stream_is_followed_and_after() -> None:
    world = World(followed=False)
    item = world.add()
    for _ in range(3):
        item(1)
    assert world.loads == 3
    assert item.statistics()["bypassed"] == 3
    world.feed.gap()  # what happens before it is followed concerns nobody
    world.feed.mended()
    assert world.feed.gaps == 0
    world.meanwhile = world.feed.follow  # read before the positions were known: rows may lie between
    item(1)
    assert item.statistics()["size"] == 0
    item(1), item(1)
    assert world.loads == 5
    world.feed.stop()
    item(1)
    assert world.loads == 6
    assert item.statistics()["size"] == 0
    assert world.feed.statistics(world.now)["following"] is False


# -- rows -----------------------------------------------------------------------------------------------------


def test_the_row_of_the_protocol() -> None:
    assert stream.name == "caches"
    assert not stream.follows
    assert not stream.resettable
    assert (
        stream.encode(row("get_user_by_id", "@test:localhost:8823")) == b'["get_user_by_id",["@test:localhost:8823"],1]'
    )
    line = b'["get_user_by_id",["@test4:localhost:8823"],1490197670513]'
    assert stream.decode([line]) == [Invalidation("get_user_by_id", ["@test4:localhost:8823"], 1490197670513)]
    assert stream.decode([b'["x",null,5]']) == [Invalidation("x", None, 5)]


def test_null_clears_the_cache_and_no_other() -> None:
    world = World()
    one, other = world.add(name="one"), world.add(name="other")
    one(1), one(2), other(1)
    world.apply(everything("one"))
    assert [one.statistics()["size"], other.statistics()["size"]] == [0, 1]
    assert one.statistics()["invalidations"] == 1


def test_unknown_names_are_counted_and_ignored() -> None:
    world = World()
    item = world.add()
    item(1)
    assert world.apply(row("other", 1), everything("other")) == []
    assert world.feed.unknown_names == 2
    assert item.statistics()["size"] == 1


def test_keys_of_another_kind_clear_the_cache() -> None:
    world = World()
    item = world.add()
    for keys in ([1, 2], [], [[1]], [{"a": 1}]):
        item(1)
        world.apply(row("item", *keys))
        assert item.statistics()["size"] == 0
    assert world.feed.other_keys == 4


def test_of_a_key_function_the_lengths_that_were_seen_count() -> None:
    world = World()
    item = world.add(key=lambda key: (key, key) if key else ())
    world.apply(row("item", 1, 2, 3))
    assert world.feed.other_keys == 0
    item(1), item(0)
    world.apply(row("item", 2, 2))
    assert item.statistics()["size"] == 2
    world.apply(row("item", 1))
    assert item.statistics()["size"] == 0
    assert world.feed.other_keys == 1


def test_a_special_name_stands_for_several_caches() -> None:
    world = World()
    one, two = world.add(name="one"), world.add(name="two")
    world.caches.special("cs_cache_fake", [one, "two", "of_another_service", one])
    for item in (one, two):
        item(1), item(2)
    assert world.apply(row("cs_cache_fake", 1)) == []
    assert [one.statistics()["size"], two.statistics()["size"]] == [1, 1]
    assert world.feed.unknown_names == 0
    (complaint,) = world.apply(everything("cs_cache_fake"))
    assert "null keys for the special name 'cs_cache_fake'" in complaint
    assert [one.statistics()["size"], two.statistics()["size"]] == [0, 0]
    assert world.feed.special_nulls == 1


def test_a_special_name_is_never_invalidated_as_a_whole_from_here() -> None:
    world = World()
    world.caches.special("cs_cache_fake", ["one", "two"])
    with pytest.raises(ConfigError, match="special name.*one, two"):
        world.caches.row("cs_cache_fake", None, 1)
    assert world.caches.row("cs_cache_fake", (1,), 1) == (stream, row("cs_cache_fake", 1))


@pytest.mark.parametrize("members", [[], [5], [lambda: 1], [None]])
def test_what_a_special_name_cannot_stand_for(members: list[Any]) -> None:
    with pytest.raises(ConfigError, match="special"):
        World().caches.special("special", members)


def test_the_row_for_any_cache() -> None:
    world = World()
    assert world.caches.row("of_another_service", ("a", 1), 5) == (
        stream,
        Invalidation("of_another_service", ["a", 1], 5),
    )
    assert world.caches.row("of_another_service", None, 5)[1].keys is None
    for keys in ("abc", (uuid.UUID(int=1),)):
        with pytest.raises(ConfigError):
            world.caches.row("x", keys, 5)
    for name in ("a b", "", 5):
        with pytest.raises(ConfigError, match="one word"):
            world.caches.row(name, (1,), 5)  # type: ignore[arg-type]
    world.add()
    assert row_of_key(world.cache(), (1,), 5) == Invalidation("item", [1], 5)
    assert row_of_key(world.cache(), None, 5) == Invalidation("item", None, 5)


def test_caches_need_a_stream_and_of_several_one_is_named() -> None:
    def of(*streams: Stream[Any]) -> Caches:
        return Caches(Registry(streams), Settings(), clock=lambda: 0.0, lock=threading.RLock)

    with pytest.raises(ConfigError, match=r"pass busrep.caches.invalidations\(\) in streams="):
        of(Stream("orders")).add(lambda key: key)
    other = invalidations("other")
    both = of(stream, other)
    with pytest.raises(ConfigError, match="caches, other"):
        both.add(lambda key: key)
    cache = both.add(lambda key: key, name="item", stream=other)
    assert cache.feed is both.feed_of(other)
    assert both.row("item", (1,), 1)[0] is other
    with pytest.raises(ConfigError, match="another stream"):
        both.special("special", ["item"], stream)
    both.special("special", ["item"], other)
    assert both.row("special", (1,), 1)[0] is other
    with pytest.raises(ConfigError, match="caches, other"):
        both.row("unknown", (1,), 1)


def test_statistics_are_plain_values() -> None:
    world = World(followed=False)
    world.add()(1)
    found = world.caches.statistics()
    assert found["streams"]["caches"] == {
        "following": False, "bound": BOUND, "trusted": False, "proof_age": None, "gaps": 0, "clears": 0, "rows": 0,
        "unknown_names": 0, "other_keys": 0, "special_nulls": 0,
    }  # fmt: skip
    assert found["caches"]["item"]["bypassed"] == 1


def test_rows_are_values() -> None:
    assert attrs.asdict(row("x", 1)) == {"cache": "x", "keys": [1], "at_ms": 1}
