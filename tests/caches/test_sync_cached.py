"""Caches of a bus for threads: what others commit, what this process commits, threads, interrupts, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import psycopg
import pytest

from busrep.caches.cache import Invalidation, invalidations
from busrep.errors import CommitUnknown, ConfigError, NotAWriter, Unavailable, WriterFenced
from busrep.runtime.session import WriterSession
from busrep.stores.planned import PlannedStore
from busrep.sync import Bus, connect
from busrep.testing.links import FaultyLink
from tests.asyncio.bus_conformance import Seen, until
from tests.shop import QUICK, Order, opened_store, orders
from tests.sync.test_races import in_thread
from tests.sync.test_writing import Deployment, Interrupt, SoftLimit, silence, threads

pytestmark = pytest.mark.servers

caches = invalidations()
CACHED = [orders, caches]

# The bound of QUICK is 0.125 s: a beat, and some. With LONG nothing that is kept gets too old in a test.
LONG = attrs.evolve(QUICK, cache_bound=60.0)


@attrs.define
class Cached(Deployment):
    """Buses of one name that have caches, and one table of what is cached."""

    def bus(self, **options: Any) -> Bus:
        return Deployment.bus(self, **{"streams": CACHED, "writer": None} | options)

    def table(self) -> Any:
        return opened_store(self.store, _registry())


def _registry() -> Any:
    from busrep.streams import Registry

    return Registry(CACHED)


@pytest.fixture
def shop(redis_url: str, bus_name: str, postgres_url: str) -> Cached:
    found = Cached(redis_url, bus_name, postgres_url)
    with found.table():
        return found


@pytest.fixture
def on_file(redis_url: str, bus_name: str, sqlite_url: str) -> Cached:
    found = Cached(redis_url, bus_name, sqlite_url)
    with found.table():
        return found


class Items:
    """What is cached, and how often it was looked up."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.loads = 0

    def __call__(self, key: Any) -> Any:
        self.loads += 1
        return self.values.get(key, 0)

    def loaded(self, work: Callable[[], Any]) -> int:
        before = self.loads
        work()
        return self.loads - before


def cached(bus: Bus, items: Items, **options: Any) -> Any:
    @bus.cached(**{"name": "item"} | options)
    def item(key: Any) -> Any:
        return items(key)

    return item


def stream_of(bus: Bus) -> dict[str, Any]:
    return bus.statistics()["caches"]["streams"]["caches"]  # type: ignore[no-any-return]


def trusted(*buses: Bus) -> None:
    """Wait until what they hold is returned at whatever age."""
    for bus in buses:
        until(lambda bus=bus: stream_of(bus)["trusted"])  # type: ignore[misc]


# -- what others commit, and what this process does -----------------------------------------------------------


def test_an_invalidation_reaches_every_process(shop: Cached) -> None:
    here, there = Items(), Items()
    with shop.bus(writer="w1") as writing, shop.bus() as reading:
        mine, theirs = cached(writing, here), cached(reading, there)
        trusted(writing, reading)
        assert [mine(1), mine(key=1), theirs(1), theirs(1)] == [0, 0, 0, 0]
        assert (here.loads, there.loads) == (1, 1)
        here.values[1] = there.values[1] = 7
        mine.invalidate(1)
        assert mine(1) == 7  # at once
        until(lambda: theirs(1) == 7)
        assert mine.statistics()["hits"] >= 1
        assert mine.cache_name == "item"
        assert mine.__wrapped__(1) == 7
        assert json.dumps(writing.statistics()["caches"])


def test_the_ways_to_invalidate(shop: Cached) -> None:
    items = Items()
    with shop.bus(writer="w1", settings=LONG) as bus:
        item, other = cached(bus, items), cached(bus, items, name="other")
        bus.special_cache("both", [item, "other"])
        trusted(bus)
        keys = range(6)

        def held(one: Any) -> set[int]:
            return {key for key in keys if not items.loaded(lambda key=key: one(key))}  # type: ignore[misc]

        def fill() -> None:
            for key in keys:
                item(key)
                other(key)

        fill()
        assert held(item) == {*keys}
        item.invalidate(0)
        item.invalidate_many([(1,), (2,)])
        bus.invalidate("item", (3,))
        with bus.write(orders, caches) as fact:
            item.invalidate_in(fact, 4)
            assert held(item) == {4, 5}, "not committed yet"
            fill()
        assert held(item) == {*keys} - {4}
        bus.invalidate("both", (5,))
        assert held(item) == held(other) == {*keys} - {5}
        bus.invalidate("nobody's", (5,))
        bus.invalidate("nobody's", None)
        fill()
        item.invalidate_all()
        assert (held(item), held(other)) == (set(), {*keys})
        with bus.write(caches) as fact:
            other.invalidate_all_in(fact)
        assert held(other) == set()
        with pytest.raises(ConfigError, match="by key only"):
            bus.invalidate("both", None)
        assert stream_of(bus)["unknown_names"] == 2


def test_what_was_rolled_back_invalidates_nothing(shop: Cached) -> None:
    items = Items()
    with shop.bus(writer="w1", settings=LONG) as bus:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        with pytest.raises(KeyError):
            with bus.write(caches) as fact:
                item.invalidate_in(fact, 1)
                raise KeyError
        assert items.loaded(lambda: item(1)) == 0
        assert item.statistics()["invalidations"] == 0


def test_a_fact_in_the_caller_s_own_transaction(shop: Cached) -> None:
    items = Items()
    with shop.bus(writer="w1", settings=LONG) as bus, psycopg.connect(shop.store) as connection:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        connection.execute("SELECT 1")
        with bus.write(caches, connection=connection) as fact:
            item.invalidate_in(fact, 1)
        assert items.loaded(lambda: item(1)) == 0
        connection.commit()
        bus.settle()
        assert items.loaded(lambda: item(1)) == 1


def test_on_sqlite(on_file: Cached) -> None:
    items = Items()
    with on_file.bus(writer="w1", settings=LONG) as bus, on_file.bus(writer="w2") as other:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        other.invalidate("item", (1,))
        until(lambda: items.loaded(lambda: item(1)) == 1)
        item.invalidate(1)
        assert items.loaded(lambda: item(1)) == 1


def test_an_asyncio_process_and_one_of_threads_invalidate_each_other(shop: Cached) -> None:
    import busrep

    items = Items()

    async def work(item: Any) -> None:
        def common(**options: Any) -> Any:
            return {"name": shop.name, "streams": CACHED, "store": shop.store, "settings": LONG} | options

        async with busrep.connect(shop.redis, **common(writer="w2")) as other:

            @other.cached(name="item")
            async def theirs(key: int) -> Any:
                return items(key)

            await theirs(1)
            items.values[1] = 1
            await asyncio.to_thread(item.invalidate, 1)
            async with asyncio.timeout(10):
                while await theirs(1) != 1:
                    await asyncio.sleep(0.01)
            items.values[1] = 2
            await theirs.invalidate(1)
            async with asyncio.timeout(10):
                while item(1) != 2:
                    await asyncio.sleep(0.01)

    with shop.bus(writer="w1", settings=LONG) as bus:
        asyncio.run(work(cached(bus, items)))


def test_what_cannot_work_says_so(shop: Cached) -> None:
    async def coroutine(key: int) -> int:
        return key

    with shop.bus() as bus, shop.bus(streams=[orders]) as without:
        with pytest.raises(ConfigError, match="coroutine function"):
            bus.cached()(coroutine)
        item = cached(bus, Items())
        with pytest.raises(ConfigError, match="two caches"):
            cached(bus, Items())
        for call in (
            lambda: item.invalidate(1), item.invalidate_all, lambda: item.invalidate_many([(1,)]),
            lambda: bus.invalidate("item", (1,)),
        ):  # fmt: skip
            with pytest.raises(NotAWriter):
                call()
        with pytest.raises(ConfigError, match="stream of invalidations"):
            cached(without, Items())
        with pytest.raises(ConfigError, match="stream of invalidations"):
            without.invalidate("item", (1,))


def test_no_row_is_written_of_no_keys(shop: Cached) -> None:
    with shop.bus(writer="w1") as bus:
        item = cached(bus, Items())
        item.invalidate_many([])
        assert bus.statistics()["writer"]["facts"] == 0


# -- life -----------------------------------------------------------------------------------------------------


def test_before_it_is_open_and_after_it_was_closed_every_call_goes_through(shop: Cached) -> None:
    items = Items()
    bus = shop.bus(writer="w1", settings=LONG)
    item = cached(bus, items)
    assert items.loaded(lambda: [item(1), item(1)]) == 2
    assert bus.state == "new"
    with bus:
        assert {"busrep-read"} <= threads()
        until(lambda: not items.loaded(lambda: item(1)))
    assert items.loaded(lambda: [item(1), item(1)]) == 2
    assert item.statistics()["size"] == 0
    assert threads() == set()


def test_a_bus_without_caches_starts_no_reading(shop: Cached) -> None:
    writing = {"busrep-announce", "busrep-beat", "busrep-look", "busrep-prune"}
    with shop.bus(writer="w1") as bus:
        assert threads() == writing
        bus.invalidate("item", (1,))
        assert threads() == writing
        cached(bus, Items())
        assert threads() - writing >= {"busrep-read", "busrep-handle"}


def test_old_rows_are_pruned(shop: Cached) -> None:
    settings = attrs.evolve(QUICK, invalidations_kept=0.2)
    with shop.bus(writer="w1", settings=settings) as bus, shop.table() as store:
        with bus.write(orders, caches) as fact:
            fact.add(Order(1, "new"))
            fact.add(Invalidation("item", [1], 0), stream=caches)
        until(lambda: any(one.floor for one in store.known() if one.stream == "caches"))
        assert all(one.floor == 0 for one in store.known() if one.stream == "orders")
        assert list(shop.rows(stream="orders")) == [fact.ids["orders"]]


def test_a_process_that_was_cut_off_while_rows_were_pruned_drops_everything(shop: Cached) -> None:
    items = Items()
    # Between two of its beats: with each it would follow the others through the table.
    deaf = attrs.evolve(LONG, heartbeat=4.0)
    with FaultyLink.in_thread(shop.redis) as link, shop.table() as store:
        with shop.bus(redis=link.url, settings=deaf) as bus, shop.bus(writer="w1") as writer:
            item = cached(bus, items)
            trusted(bus)
            item(1)
            link.refuse = True
            link.cut()
            until(lambda: not bus.statistics()["link"]["reading"]["connected"])
            items.values[1] = 1
            for _ in range(3):
                writer.invalidate("item", (1,))
            until(lambda: store.prune(keep=0, stream="caches") and _floor(store) > 1)
            link.refuse = False
            until(lambda: item(1) == 1)
            until(lambda: stream_of(bus)["clears"] >= 1)
            trusted(bus)


def _floor(store: Any) -> int:
    return max(one.floor for one in store.known() if one.stream == "caches")


@pytest.mark.parametrize("when", ["at its opening", "later"])
def test_a_bus_that_reads_already_caches_too(shop: Cached, when: str) -> None:
    items, seen = Items(), Seen()
    with contextlib.ExitStack() as stack:
        bus = shop.bus(settings=LONG)
        if when == "at its opening":
            item = cached(bus, items)
        stack.enter_context(bus)
        bus.subscribe(orders)(seen)
        if when == "later":
            item = cached(bus, items)
        writer = stack.enter_context(shop.bus(writer="w1"))
        until(lambda: not items.loaded(lambda: item(1)))
        with writer.write(orders, caches) as fact:
            fact.add(Order(1, "new"))
            fact.add(Invalidation("item", [1], 0), stream=caches)
        bus.wait_for(orders, "w1", fact.ids["orders"])
        assert seen.numbers == [1]
        until(lambda: items.loaded(lambda: item(1)))


def test_a_bus_that_cannot_open_for_its_caches_is_tried_again(shop: Cached) -> None:
    items = Items()
    with FaultyLink.in_thread(shop.redis) as link:
        bus = shop.bus(redis=link.url, settings=LONG)
        item = cached(bus, items)
        link.refuse = True
        with pytest.raises(Unavailable):
            bus.open()
        assert items.loaded(lambda: item(1)) == 1
        link.refuse = False
        with bus:
            until(lambda: not items.loaded(lambda: item(1)))


def test_a_function_that_could_not_be_cached_is_decorated_again(shop: Cached) -> None:
    items = Items()
    with FaultyLink.in_thread(shop.redis) as link, shop.bus(redis=link.url, settings=LONG) as bus:
        link.refuse = True
        with pytest.raises(Unavailable):
            cached(bus, items)
        link.refuse = False
        item = cached(bus, items)
        until(lambda: not items.loaded(lambda: item(1)))


def test_a_durable_reader_saves_no_positions_of_invalidations(shop: Cached) -> None:
    with shop.bus(reader="r") as bus, shop.bus(writer="w1") as writer:
        item = cached(bus, Items())
        seen = Seen()
        bus.subscribe(orders)(seen)
        trusted(bus)
        with writer.write(orders, caches) as fact:
            fact.add(Order(1, "new"))
            fact.add(Invalidation("item", [1], 0), stream=caches)
        bus.wait_for(orders, "w1", fact.ids["orders"])
        until(lambda: item.statistics()["invalidations"] == 1)
    with shop.table() as store:
        assert {stream for stream, _ in store.load_reader("r").positions} == {"orders"}


# -- threads --------------------------------------------------------------------------------------------------


def test_many_threads_never_see_what_was_before_an_invalidation_of_their_own(shop: Cached) -> None:
    """Each writes, and reads at once what others may be loading."""
    items, wrong = Items(), []
    lock = threading.Lock()
    with shop.bus(writer="w1", settings=LONG) as bus:
        item = cached(bus, items, maxsize=4)
        trusted(bus)

        def work() -> None:
            for turn in range(15):
                key = turn % 3
                with lock:
                    least = items.values[key] = items.values.get(key, 0) + 1
                item.invalidate(key)
                for _ in range(200):
                    if (seen := item(key)) < least:
                        wrong.append((key, seen, least))

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []
        assert item.statistics()["hits"] > 1000
        assert [item(key) for key in range(3)] == [items.values[key] for key in range(3)]


@pytest.mark.parametrize("whose", ["own", "other"])
def test_a_value_that_was_read_before_an_invalidation_is_not_kept(shop: Cached, whose: str) -> None:
    read, go_on = threading.Event(), threading.Event()
    state = {"value": "old"}
    with shop.bus(writer="w1", settings=LONG) as bus, shop.bus(writer="w2") as other:

        @bus.cached(name="item")
        def item(key: int) -> str:
            found = state["value"]
            read.set()
            assert go_on.wait(10)
            return found

        trusted(bus)
        loading, came = in_thread(lambda: item(1))
        assert read.wait(10)
        state["value"] = "new"
        (bus if whose == "own" else other).invalidate("item", (1,))
        until(lambda: item.statistics()["invalidations"] == 1)
        go_on.set()
        loading.join()
        assert came == ["old"]
        assert item(1) == "new"
        assert item.statistics()["fills_refused"] == 1


def test_hits_do_not_wait_for_the_loop_and_know_that_it_stands_still(shop: Cached) -> None:
    items, released = Items(), threading.Event()
    with shop.bus() as bus:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        assert bus.reading is not None
        stands = threading.Event()

        def block() -> None:
            stands.set()
            released.wait(10)

        bus.reading._loop.call_soon_threadsafe(block)
        assert stands.wait(10)
        try:
            began = time.monotonic()
            assert items.loaded(lambda: item(2)) == 1
            assert items.loaded(lambda: item(2)) == 0 or time.monotonic() - began > 0.125
            until(lambda: items.loaded(lambda: item(1)) == 1)  # the bound is over
        finally:
            released.set()
        trusted(bus)


def test_a_call_inside_another_cached_function(shop: Cached) -> None:
    with shop.bus(writer="w1", settings=LONG) as bus:
        items = Items()
        inner = cached(bus, items)

        @bus.cached(name="outer")
        def outer(key: int) -> int:
            return int(inner(key)) + 1

        trusted(bus)
        assert [outer(1), outer(1), inner(1)] == [1, 1, 0]
        assert items.loads == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SoftLimit, KeyError])
def test_an_exception_in_the_function_leaves_nothing_behind(shop: Cached, error: type[BaseException]) -> None:
    with shop.bus(settings=LONG) as bus:
        failing = [True, True]

        @bus.cached(name="item")
        def item(key: int) -> int:
            if failing and failing.pop():
                raise error
            return key

        trusted(bus)
        for _ in range(2):
            with pytest.raises(error):
                item(1)
        cache = bus.caching.caches["item"]
        assert cache.statistics()["size"] == 0
        assert [item(1), item(1)] == [1, 1]
        assert cache.statistics()["hits"] == 1


# -- facts whose end is not known -----------------------------------------------------------------------------


@pytest.mark.parametrize("landed", [True, False], ids=["committed", "aborted"])
def test_a_commit_without_an_answer_is_not_trusted_until_the_table_tells(shop: Cached, landed: bool) -> None:
    """By others neither, if there is a row: they have not got it."""
    # Now and then it is a beat's COMMIT that is cut.
    assert any(answer_lost(shop, landed) for _ in range(10))


def answer_lost(shop: Cached, landed: bool) -> bool:
    """The test; False when it was another connection that was cut."""
    patient = attrs.evolve(QUICK, silent_after_beats=10_000)  # or `other` finishes `bus`, and gets the row, and trusts
    here, there = Items(), Items()
    with (
        FaultyLink.in_thread(shop.store) as link,
        shop.bus(writer="w1", store=link.url, settings=patient) as bus,
        shop.bus(settings=patient) as other,
    ):
        item, theirs = cached(bus, here), cached(other, there)
        trusted(bus, other)
        assert (item(1), theirs(1)) == (0, 0)
        try:
            with bus.write(caches) as fact:
                item.invalidate_in(fact, 1)
                fact.execute("SELECT 1")  # what is sent next holds COMMIT
                link.refuse = True
                link.cut_when(b"COMMIT", "from_server" if landed else "to_server", after=False)
            return False
        except CommitUnknown:
            pass
        here.values[1] = there.values[1] = 1 if landed else 0
        # Not trusted until the table has told what became of it, or, later than it was asked, that it is open still. A
        # connection that was not cut may have told at once.
        until(lambda: bus.statistics()["writer"]["in_doubt"] == 0 or not stream_of(bus)["trusted"])
        if landed:
            until(lambda: bus.statistics()["writer"]["in_doubt"] == 0 or not stream_of(other)["trusted"])
        link.refuse = False
        link.heal()
        trusted(bus, other)
        until(lambda: bus.statistics()["writer"]["in_doubt"] == 0)
        until(lambda: (item(1), theirs(1)) == ((1, 1) if landed else (0, 0)))
        assert item.statistics()["invalidations"] == landed
        return True


def proof_of(bus: Bus) -> float:
    return bus.caching.feed_of().proof


def test_a_joined_fact_holds_no_trust_while_it_is_open_and_is_applied_once_committed(shop: Cached) -> None:
    here, there = Items(), Items()
    with shop.bus(writer="w1") as bus, shop.bus() as other, psycopg.connect(shop.store) as connection:
        item, theirs = cached(bus, here), cached(other, there)
        trusted(bus, other)
        connection.execute("SELECT 1")
        with bus.write(caches, connection=connection) as fact:
            item.invalidate_in(fact, 1)
        joined = time.monotonic()
        # The table says again and again that it is open still: what is not committed hides nothing.
        until(lambda: min(proof_of(bus), proof_of(other)) > joined + 0.3)
        assert (item(1), theirs(1)) == (0, 0)
        here.values[1] = there.values[1] = 1
        connection.commit()
        bus.settle()
        assert item(1) == 1
        until(lambda: theirs(1) == 1)
        trusted(bus, other)


def test_a_fact_that_is_held_back_ends_trust_elsewhere_and_not_here(shop: Cached) -> None:
    """An earlier fact of the same writer is open: others cannot be told of the later one."""
    here, there = Items(), Items()
    with shop.bus(writer="w1") as bus, shop.bus() as other:
        item, theirs = cached(bus, here), cached(other, there)
        trusted(bus, other)
        with bus.write(caches) as first:
            first.add(Invalidation("item", [2], 0))
            theirs(1)
            here.values[1] = there.values[1] = 1
            ended = in_thread(lambda: item.invalidate(1))
            ended[0].join()
            assert ended[1] == [None]
            committed = time.monotonic()
            assert item(1) == 1
            until(lambda: proof_of(bus) > committed + 0.3)
            until(lambda: theirs(1) == 1)
            assert proof_of(other) <= committed
        until(lambda: proof_of(other) > committed)
        trusted(bus, other)


def test_interrupted_after_its_commit_it_is_applied_before_the_cache_is_trusted(
    shop: Cached, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = PlannedStore.append

    async def interrupted(*args: Any) -> None:
        await append(*args)
        monkeypatch.undo()
        raise Interrupt

    items = Items()
    with shop.bus(writer="w1", settings=LONG) as bus:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        items.values[1] = 1
        monkeypatch.setattr(PlannedStore, "append", interrupted)
        with pytest.raises(Interrupt):
            item.invalidate(1)
        bus.settle()
        assert item(1) == 1


@pytest.mark.parametrize("error", [Interrupt, SoftLimit])
@pytest.mark.parametrize("where", ["applied", "booked", "decided"])
def test_interrupted_in_the_middle_of_the_bookkeeping(
    shop: Cached, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    """Then the session is torn, the name is won back, and what was committed is nowhere but in the table."""
    items = Items()
    with shop.bus(writer="w1", settings=LONG) as bus, psycopg.connect(shop.store) as connection:
        item = cached(bus, items)
        trusted(bus)
        item(1)
        items.values[1] = 1
        assert bus.writing is not None
        if where == "decided":
            connection.execute("SELECT 1")
            (looking,) = (chore for chore in bus.chores if chore.name == "busrep-look")
            looking.stop()  # no other thread asks first
            looking.join()
            with bus.write(caches, connection=connection) as fact:
                item.invalidate_in(fact, 1)
            connection.commit()
        steps = {"applied": "on_invalidations", "booked": "book", "decided": "on_invalidations"}
        place: Any = WriterSession if where == "booked" else bus.writing.session
        monkeypatch.setattr(place, steps[where], _raising(monkeypatch, error, getattr(place, steps[where])))
        with pytest.raises(error):
            bus.settle() if where == "decided" else item.invalidate(1)
        bus.invalidate("nobody's", (1,))  # the name is won back at the latest now
        bus.settle()
        until(lambda: item(1) == 1)
        with shop.table() as store:
            assert len(store.known()) > 0
        until(lambda: bus.statistics()["writer"]["in_doubt"] == 0)
        assert bus.statistics()["stuck"] == []


def _raising(monkeypatch: pytest.MonkeyPatch, error: type[BaseException], step: Callable[..., Any]) -> Any:
    """The step, interrupted once, and as interrupts come: in the main thread alone."""

    def interrupted(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            step(*args)
            return
        monkeypatch.undo()
        raise error

    return interrupted


# -- the name -------------------------------------------------------------------------------------------------


def test_a_writer_finished_for_its_silence_goes_on_caching(shop: Cached) -> None:
    items = Items()
    with shop.bus(writer="w1") as bus, shop.bus() as other:
        item, theirs = cached(bus, items), cached(other, items)
        trusted(bus, other)
        incarnation = silence(shop)
        until(lambda: bus.statistics()["writer"]["incarnation"] > incarnation)
        trusted(bus, other)
        assert (item(1), theirs(1)) == (0, 0)
        items.values[1] = 1
        item.invalidate(1)
        assert item(1) == 1
        until(lambda: theirs(1) == 1)


def test_a_name_that_was_taken_clears_and_follows_the_successor(shop: Cached) -> None:
    items = Items()
    with shop.bus(writer="w1") as former:
        item = cached(former, items)
        trusted(former)
        item(1)
        with shop.bus(writer="w1") as successor:
            with pytest.raises(WriterFenced):
                item.invalidate(2)
            items.values[1] = 1
            successor.invalidate("item", (1,))
            trusted(former)
            assert item(1) == 1


def test_a_name_that_was_taken_unnoticed_proves_nothing(shop: Cached) -> None:
    """The successor is not heard, and the database is not asked whose the name is."""
    items = Items()
    with FaultyLink.in_thread(shop.redis) as link, shop.bus(writer="w1", redis=link.url) as former:
        item = cached(former, items)
        trusted(former)
        item(1)
        beating = next(chore for chore in former.chores if chore.name == "busrep-beat")
        beating.stop()
        beating.join()
        link.black_hole("from_server")
        with shop.bus(writer="w1") as successor:
            items.values[1] = 1
            successor.invalidate("item", (1,))
            until(lambda: item(1) == 1)
            assert former.writing is not None
            assert former.writing.lost is None
            link.heal()


def test_without_beats_a_bus_with_caches_beats_all_the_same(shop: Cached) -> None:
    """Else others could not trust what they hold, nor this one its own."""
    items = Items()
    with shop.bus(writer="w1", beats=False) as bus, shop.bus() as other:
        assert threads() == set()
        theirs = cached(other, items)
        item = cached(bus, items)
        trusted(bus, other)
        assert (item(1), theirs(1)) == (0, 0)
        time_was = bus.statistics()["writer"]["announcements"]
        until(lambda: bus.statistics()["writer"]["announcements"] > time_was + 3)
        trusted(other)
    assert threads() == set()


def test_others_trust_a_process_that_only_invalidates_without_beats(shop: Cached) -> None:
    """The table tells them that it has written nothing since."""
    items = Items()
    patient = attrs.evolve(QUICK, silent_after_beats=10_000)  # finishes nobody
    with shop.bus(settings=patient) as other, shop.bus(writer="w1", beats=False) as bus:
        theirs = cached(other, items)
        trusted(other)
        for value in (1, 2):
            theirs(1)
            items.values[1] = value
            bus.invalidate("item", (1,))
            until(lambda value=value: theirs(1) == value)  # type: ignore[misc]
            trusted(other)
        silence(shop)
        trusted(other)
        bus.invalidate("item", (1,))  # wins the name back
        trusted(other)


# -- links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [0.0, 60.0])
def test_while_redis_is_away(shop: Cached, offline: float) -> None:
    items = Items()
    with FaultyLink.in_thread(shop.redis) as link:
        settings = attrs.evolve(QUICK, cache_offline=offline)
        with shop.bus(redis=link.url, settings=settings) as bus, shop.bus(writer="w1") as writer:
            item = cached(bus, items)
            trusted(bus)
            item(1)
            gaps = stream_of(bus)["gaps"]
            link.refuse = True
            link.cut()
            items.values[1] = 1
            writer.invalidate("item", (1,))
            until(lambda: not bus.statistics()["link"]["reading"]["connected"])
            if offline:
                assert item(1) == 0 or stream_of(bus)["gaps"] > gaps, "as old as was allowed, until the table told"
            until(lambda: item(1) == 1)  # from the table
            assert not bus.statistics()["link"]["reading"]["connected"]
            link.refuse = False
            trusted(bus)
            assert item(1) == 1


def test_messages_that_are_swallowed_make_nothing_stale(shop: Cached) -> None:
    items = Items()
    with FaultyLink.in_thread(shop.redis) as link:
        with shop.bus(redis=link.url) as bus, shop.bus(writer="w1") as writer:
            item = cached(bus, items)
            trusted(bus)
            item(1)
            link.black_hole("from_server")
            items.values[1] = 1
            writer.invalidate("item", (1,))
            until(lambda: item(1) == 1)
            link.heal()
            trusted(bus)
            assert item(1) == 1


# -- with other things ----------------------------------------------------------------------------------------


def test_methods_and_keys_of_one_s_own(shop: Cached) -> None:
    with shop.bus(writer="w1", settings=LONG) as bus:

        class Shop:
            loads = 0

            @bus.cached(name="stock", key=lambda shop, item, **_: (item.lower(),))
            def stock(self, item: str, **options: Any) -> int:
                Shop.loads += 1
                return Shop.loads

        trusted(bus)
        one, two = Shop(), Shop()
        assert [one.stock("A"), two.stock("a", limit=3), one.stock("B")] == [1, 1, 2]
        Shop.stock.invalidate(one, "A")
        assert [one.stock("A"), one.stock("B")] == [3, 2]


def test_a_bus_that_is_not_open_can_write_by_being_used(shop: Cached) -> None:
    items = Items()
    bus = shop.bus(writer="w1", settings=LONG)
    item = cached(bus, items)
    with contextlib.closing(bus):
        item.invalidate(1)  # opens it
        assert bus.state == "open"
        until(lambda: not items.loaded(lambda: item(1)))


def test_connect_takes_no_store_for_invalidations_in_memory(redis_url: str, bus_name: str) -> None:
    memory, items = invalidations(resettable=True), Items()
    common: dict[str, Any] = {"name": bus_name, "streams": [memory], "settings": LONG}
    with connect(redis_url, writer="w1", **common) as one, connect(redis_url, writer="w2", **common) as two:
        item, theirs = cached(one, items), cached(two, items)
        until(lambda: not items.loaded(lambda: item(1)))
        until(lambda: not items.loaded(lambda: theirs(1)))
        items.values[1] = 1
        item.invalidate(1)
        assert item(1) == 1
        until(lambda: theirs(1) == 1)
