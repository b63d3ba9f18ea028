"""Caches of asyncio buses on a real Redis and real stores: what is invalidated, lost, cut, in doubt, claimed anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psycopg
import pytest

from busrep import Bus, Settings, Stream, connect
from busrep.caches.cache import Invalidation, invalidations
from busrep.caches.cached import bounded_store
from busrep.errors import Closed, CommitUnknown, ConfigError, NotAWriter, Unavailable
from busrep.http.client import HttpOptions
from busrep.http.serve import serve
from busrep.http.server import catch_up_app
from busrep.http.source import HttpSource
from busrep.links.tcp_server import TcpServer
from busrep.stores import open_store
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from tests.asyncio.test_bus import crash, run, until
from tests.shop import Order

pytestmark = pytest.mark.servers

caches = invalidations()
orders = Stream("orders", Order)
memory = invalidations("memory", resettable=True)

# A bound of several beats: on a machine that is busy with other tests a beat may come late.
QUICK = Settings(
    heartbeat=0.1,
    cache_bound=1.0,
    retry_min=0.02,
    retry_max=0.2,
    redis_timeout=2.0,
    shutdown_timeout=2.0,
    silent_after_beats=10,
)
# Entries are returned by a proof alone, and a proof lasts.
LONG = attrs.evolve(QUICK, cache_bound=30.0)


@attrs.define
class Loss:
    """What comes over a link, and does not get through."""

    link: Any
    lose: Callable[[bytes], bool] = lambda _: False
    lost: list[bytes] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        given = self.link.on_message

        def on_message(channel: str, data: bytes) -> None:
            if self.lose(data):
                self.lost.append(data)
            else:
                given(channel, data)

        self.link.on_message = on_message


LOSSES: weakref.WeakKeyDictionary[Bus, Loss] = weakref.WeakKeyDictionary()


@attrs.define
class World:
    """Buses of one name on one Redis and one store, and a value that they cache."""

    redis: str
    name: str
    store: str
    settings: Settings = LONG
    value: int = 0
    loads: int = 0

    def bus(self, **options: Any) -> Bus:
        given: dict[str, Any] = {
            "name": self.name, "streams": [orders, caches], "store": self.store, "settings": self.settings, **options,
        }  # fmt: skip
        bus = connect(given.pop("redis", self.redis), **given)
        LOSSES[bus] = Loss(bus.link)
        return bus

    def cached(self, bus: Bus, **options: Any) -> Any:
        @bus.cached(name="item", **options)
        async def item(key: int) -> int:
            self.loads += 1
            return self.value

        return item


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest, redis_url: str, bus_name: str) -> World:
    """Tests that ask for it run on both stores."""
    return made(World(redis_url, bus_name, request.getfixturevalue(f"{request.param}_url")))


@pytest.fixture
def on_sqlite(redis_url: str, bus_name: str, sqlite_url: str) -> World:
    return made(World(redis_url, bus_name, sqlite_url))


@pytest.fixture
def on_postgres(redis_url: str, bus_name: str, postgres_url: str) -> World:
    return made(World(redis_url, bus_name, postgres_url))


def made(world: World) -> World:
    async def make() -> None:
        store = open_store(world.store, Registry([orders, caches]))
        await store.init()
        await store.close()

    asyncio.run(make())
    return world


def stream_of(bus: Bus, name: str = "caches") -> dict[str, Any]:
    found: dict[str, Any] = bus.statistics()["caches"]["streams"][name]
    return found


async def trusted(*buses: Bus) -> None:
    for bus in buses:
        await until(lambda bus=bus: stream_of(bus)["trusted"])  # type: ignore[misc]


async def untrusted(bus: Bus) -> None:
    await until(lambda: not stream_of(bus)["trusted"])


async def becomes(item: Any, value: int) -> None:
    """Wait until a call returns it, by whatever way the news come."""
    async with asyncio.timeout(10):
        while await item(1) != value:
            await asyncio.sleep(0.005)


# -- what is said, and heard ----------------------------------------------------------------------------------


def test_an_invalidation_reaches_every_process(world: World) -> None:
    async def main() -> None:
        async with world.bus(writer="w1") as writer, world.bus() as reader, world.bus(writer="w2") as both:
            items = [world.cached(bus) for bus in (writer, reader, both)]
            await trusted(writer, reader, both)
            assert [await item(1) for item in items for _ in range(3)] == [0] * 9
            assert world.loads == 3
            world.value = 1
            await items[0].invalidate(1)
            for item in items:
                await becomes(item, 1)
            assert world.loads == 6
            world.value = 2
            await items[2].invalidate_all()
            for item in items:
                await becomes(item, 2)
            assert items[1].statistics()["invalidations"] == 2
            json.dumps(reader.statistics())

    run(main())


def test_own_invalidations_are_applied_before_the_fact_returns(world: World) -> None:
    async def main() -> None:
        async with world.bus(writer="w1") as bus:
            item = world.cached(bus)
            await trusted(bus)
            for value in range(1, 5):
                await item(1)
                async with bus.write(orders, caches) as fact:
                    fact.add(Order(1, "new"))
                    item.invalidate_in(fact, 1)
                    world.value = value
                assert await item(1) == value
            await item(1)
            async with bus.write(caches) as fact:
                item.invalidate_all_in(fact)
                world.value = 9
            assert await item(1) == 9

    run(main())


def test_what_is_rolled_back_invalidates_nothing(world: World) -> None:
    async def main() -> None:
        async with world.bus(writer="w1") as bus, world.bus() as reader:
            items = [world.cached(bus), world.cached(reader)]
            await trusted(bus, reader)
            for item in items:
                await item(1)
            with pytest.raises(KeyError):
                async with bus.write(caches) as fact:
                    await fact.begin()
                    items[0].invalidate_in(fact, 1)
                    raise KeyError
            await reader.wait_for(caches, "w1", fact.id)
            assert [await item(1) for item in items] == [0, 0]
            assert world.loads == 2
            await trusted(bus, reader)

    run(main())


def test_many_keys_are_one_fact(on_sqlite: World) -> None:
    async def main() -> None:
        batches = []
        async with on_sqlite.bus(writer="w1") as bus, on_sqlite.bus() as reader:
            reader.subscribe(caches)(batches.append)
            item = on_sqlite.cached(bus)
            await item.invalidate_many([])
            await item.invalidate_many([(1,), (2,), (3,)])
            await until(lambda: batches)
            assert [row.keys for row in batches[0].rows] == [[1], [2], [3]]
            assert len(set(batches[0].tokens)) == 1
            assert batches[0].rows[0].cache == "item"
            with pytest.raises(ConfigError, match="pass key="):
                await item.invalidate_many([(1,), (uuid.uuid4(),)])
            with pytest.raises(ConfigError, match="name all its streams"):
                async with bus.write(orders) as fact:
                    item.invalidate_in(fact, 1)

    run(main())


def test_names_of_other_services_special_names_and_names_that_nobody_knows(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer, on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            reader.special_cache("cs_cache_fake", [item, "elsewhere"])
            writer.special_cache("known_here", ["item"])
            await trusted(reader)
            await item(1)
            on_sqlite.value = 1
            await writer.invalidate("nobody_knows", None)
            await writer.invalidate("cs_cache_fake", (1,))
            await becomes(item, 1)
            # The value may have been loaded again because it was too old, before the rows came.
            await until(lambda: stream_of(reader)["unknown_names"] == 1)
            with pytest.raises(ConfigError, match="special name"):
                await writer.invalidate("known_here", None)
            on_sqlite.value = 2
            await writer.publish(caches, [Invalidation("cs_cache_fake", None, 1)])  # as one who does not know does
            await becomes(item, 2)
            await until(lambda: stream_of(reader)["special_nulls"] == 1)  # as above

    run(main())


def test_a_bus_that_cannot_says_what_to_do(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            for work in (item.invalidate(1), item.invalidate_all(), reader.invalidate("x", (1,))):
                with pytest.raises(NotAWriter, match="pass writer="):
                    await work
        bus = on_sqlite.bus(streams=[orders])
        with pytest.raises(ConfigError, match="busrep.caches.invalidations"):
            on_sqlite.cached(bus)
        with pytest.raises(ConfigError, match="busrep.caches.invalidations"):
            await bus.invalidate("x", (1,))
        with pytest.raises(ConfigError, match="busrep.caches.invalidations"):
            bus.special_cache("x", ["y"])

    run(main())


def test_before_the_bus_is_open_and_after_it_is_closed_every_call_goes_through(on_sqlite: World) -> None:
    async def main() -> None:
        bus = on_sqlite.bus(writer="w1")
        item = on_sqlite.cached(bus)
        assert [await item(1), await item(1)] == [0, 0]
        assert on_sqlite.loads == 2
        with pytest.raises(ConfigError, match="not open yet"):
            await item.invalidate(1)
        async with bus:
            await trusted(bus)
            await item(1), await item(1)
            assert on_sqlite.loads == 3
        await item(1), await item(1)
        assert on_sqlite.loads == 5
        assert item.statistics()["size"] == 0
        with pytest.raises(Closed):
            await item.invalidate(1)

    run(main())


def test_a_plain_function_is_called_from_threads(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as bus:

            @bus.cached(name="plain", key=lambda key: (str(key),))
            def plain(key: uuid.UUID) -> int:
                return on_sqlite.value

            await trusted(bus)
            key = uuid.uuid4()
            assert await asyncio.gather(*[asyncio.to_thread(plain, key) for _ in range(20)]) == [0] * 20
            on_sqlite.value = 1
            await plain.invalidate(key)
            assert await asyncio.to_thread(plain, key) == 1
            assert plain.statistics()["hits"] > 0

    run(main())


def test_a_stream_without_a_table(redis_url: str, bus_name: str) -> None:
    world = World(redis_url, bus_name, "")

    async def main() -> None:
        options: dict[str, Any] = {"streams": [memory], "store": None}
        async with world.bus(writer="w1", **options) as writer, world.bus(**options) as reader:
            items = [world.cached(writer), world.cached(reader)]
            await until(lambda: stream_of(reader, "memory")["trusted"])
            for item in items:
                await item(1)
            world.value = 1
            await items[0].invalidate(1)
            assert await items[0](1) == 1
            await becomes(items[1], 1)
        async with world.bus(**options) as reader:
            # Begun anew, with the writer: what it wrote in between nobody can tell.
            item = world.cached(reader, maxsize=5)
            for rows in (1, 2):
                async with world.bus(writer="w1", **options) as writer:
                    await until(lambda: stream_of(reader, "memory")["trusted"])
                    await writer.invalidate("other", (1,))
                    await until(lambda rows=rows: stream_of(reader, "memory")["rows"] == rows)
                    assert item.statistics()["size"] == 0
                    await item(1)
            assert stream_of(reader, "memory")["clears"] >= 1

    run(main())


def test_a_durable_reader_neither_saves_nor_owes_invalidations(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer:
            for key in range(5):
                await writer.invalidate("item", (key,))
            assert writer.writing is not None
            await writer.writing.beat()  # where it is stands in the table now
            async with on_sqlite.bus(reader="r1") as reader:
                item = on_sqlite.cached(reader)
                await trusted(reader)
                assert stream_of(reader)["rows"] == 0  # a cache is empty at the start: what was before is no matter
                await writer.invalidate("item", (1,))
                await until(lambda: stream_of(reader)["rows"] == 1)
                assert item.statistics()["invalidations"] == 1
            path = on_sqlite.store.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(path)) as connection:
                saved = connection.execute("SELECT stream FROM busrep_readers").fetchall()
            assert ("caches",) not in saved

    run(main())


# -- what is lost ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dropping(bus: Bus, lose: Callable[[bytes], bool]) -> Iterator[list[bytes]]:
    """Messages to this bus that are lost, as pub/sub loses them: nobody is told. Gives those that were."""
    loss = LOSSES[bus]
    loss.lose, loss.lost = lose, []
    try:
        yield loss.lost
    finally:
        loss.lose = lambda _: False


def of_rows(data: bytes) -> bool:
    return b"RDATA caches" in data


def test_a_lost_row_is_found_with_the_next_announcement_and_fetched(world: World) -> None:
    async def main() -> None:
        async with world.bus(writer="w1") as writer, world.bus() as reader:
            item = world.cached(reader)
            await trusted(reader)
            await item(1), await item(2)
            loads = world.loads
            world.value = 1
            with dropping(reader, of_rows) as lost:
                await writer.invalidate("item", (1,))
                await becomes(item, 1)
                assert len(lost) == 1
            await trusted(reader)
            assert stream_of(reader)["gaps"] == 1
            assert await item(2) == 0  # not among the rows that were lost
            assert world.loads - loads <= 3  # 1, and perhaps each once while it was not known which
            assert stream_of(reader)["clears"] == 0

    run(main())


def test_a_gap_hides_all_entries_until_its_rows_are_fetched(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer, on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            await trusted(reader)
            await item(1), await item(2)
            fetch, go_on, asked = reader.store.fetch, asyncio.Event(), asyncio.Event()  # type: ignore[union-attr]

            async def held_up(question: Any) -> Any:
                asked.set()
                await go_on.wait()
                return await fetch(question)

            reader.store.fetch = held_up  # type: ignore[union-attr, method-assign]
            on_sqlite.value = 1
            with dropping(reader, of_rows):
                await writer.invalidate("item", (1,))
                await asked.wait()
                assert [await item(1), await item(2)] == [1, 1]
                on_sqlite.value = 2
                assert [await item(1), await item(2)] == [1, 1]  # loaded since: they are kept
            go_on.set()
            await becomes(item, 2)
            assert await item(2) == 1
            await trusted(reader)

    run(main())


def test_silence_ends_trust_within_the_bound(on_sqlite: World) -> None:
    """Every message is lost, rows and announcements: the reader has no way to know, and does not need one."""
    on_sqlite.settings = QUICK

    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer, on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            await trusted(reader)
            clock = asyncio.get_running_loop().time
            database_away(reader)
            with dropping(reader, lambda data: True):
                await item(1)
                on_sqlite.value = 1
                await writer.invalidate("item", (1,))
                committed = clock()
                while True:
                    began = clock()
                    if await item(1) == 1:
                        break
                    assert began - committed < 1.0
                    await asyncio.sleep(0.005)
                assert reader.reading.core.counters.gaps_found == 0

    run(main())


def test_what_is_trusted_ends_by_the_clock_alone(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1"), on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            await trusted(reader)
            await item(1)
            ahead = reader.caching.caches.clock() + 31
            feed = reader.caching.caches.feed_of()
            assert feed.expires < ahead  # no timer, no message: the next call alone finds out
            _value, _number, until = reader.caching.caches.caches["item"].store[(1,)]
            assert until < ahead

    run(main())


def test_an_answer_of_the_table_that_comes_late_counts_as_of_the_question(on_sqlite: World) -> None:
    on_sqlite.settings = attrs.evolve(LONG, silent_after_beats=10_000)

    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer, on_sqlite.bus() as reader:
            on_sqlite.cached(reader)
            await trusted(reader)
            store: Any = reader.store
            feed, newest = reader.caching.caches.feed_of(), store.newest
            asked, go_on, again = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def late(stream: str) -> Any:
                if go_on.is_set():
                    again.set()
                found = await newest(stream)
                asked.set()
                await go_on.wait()
                return found

            store.newest = late
            await asked.wait()
            before = feed.proof
            with dropping(reader, lambda data: True):
                await writer.invalidate("item", (1,))
                committed = reader.caching.caches.clock()
                go_on.set()
                await again.wait()
                assert before < feed.proof < committed

    run(main())


def test_a_link_that_is_cut_and_comes_back(world: World) -> None:
    async def main() -> None:
        async with FaultyLink(world.redis) as proxy, world.bus(writer="w1") as writer:
            async with world.bus(redis=proxy.url) as reader:
                item = world.cached(reader)
                await trusted(reader)
                await item(1), await item(2)
                proxy.refuse = True
                proxy.cut()
                await until(lambda: not reader.link.connected)
                store: Any = reader.store
                known = store.known
                database_away(reader, "known")  # else the row comes by way of the table
                world.value = 1
                await writer.invalidate("item", (1,))
                assert stream_of(reader)["gaps"] == 0  # nothing is known to be lost
                assert await item(1) == 0  # within the bound, which is long here
                proxy.heal()
                await until(lambda: reader.link.connected)
                store.known = known
                await becomes(item, 1)
                await trusted(reader)
                assert stream_of(reader)["gaps"] == 1
                assert await item(2) == 0

    run(main())


def test_a_link_that_is_down_is_served_from_for_as_long_as_is_set(on_sqlite: World) -> None:
    on_sqlite.settings = attrs.evolve(QUICK, cache_bound=0.3, cache_offline=600.0)

    async def main() -> None:
        async with FaultyLink(on_sqlite.redis) as proxy, on_sqlite.bus(writer="w1"):
            async with on_sqlite.bus(redis=proxy.url) as reader:
                item = on_sqlite.cached(reader)
                await trusted(reader)
                await item(1)
                proxy.refuse = True
                proxy.cut()
                await until(lambda: stream_of(reader)["bound"] == 600.0)
                database_away(reader)
                await until(lambda: stream_of(reader)["proof_age"] > 1.0)
                assert await item(1) == 0
                assert on_sqlite.loads == 1
                proxy.heal()
                await until(lambda: stream_of(reader)["bound"] == 0.3)

    run(main())


def database_away(bus: Bus, *methods: str) -> None:
    async def away(*_: Any) -> Any:
        raise Unavailable("the store", "away")

    for method in methods or ("newest", "known", "sequence", "fetch"):
        setattr(bus.store, method, away)


def test_while_redis_is_away_the_table_tells(on_sqlite: World) -> None:
    on_sqlite.settings = QUICK

    async def main() -> None:
        async with FaultyLink(on_sqlite.redis) as proxy, on_sqlite.bus(writer="w1") as writer:
            async with on_sqlite.bus(redis=proxy.url) as reader:
                item = on_sqlite.cached(reader)
                await trusted(reader)
                proxy.refuse = True
                proxy.cut()
                await until(lambda: not reader.link.connected)
                proof = reader.caching.caches.feed_of().proof
                for value in (1, 2):
                    await item(1)
                    on_sqlite.value = value
                    await writer.invalidate("item", (1,))
                    await becomes(item, value)
                    await until(lambda value=value: stream_of(reader)["rows"] == value)
                    await trusted(reader)
                await until(lambda: reader.caching.caches.feed_of().proof > proof + 1.5)
                assert not reader.link.connected
                assert (await item(1), item.statistics()["hits"] > 0) == (2, True)

    run(main())


def test_rows_that_were_pruned_clear_the_caches(on_sqlite: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pruned = asyncio.Event()
        async with FaultyLink(on_sqlite.redis) as proxy, on_sqlite.bus(writer="w1") as writer:
            async with on_sqlite.bus(redis=proxy.url) as reader:
                item = on_sqlite.cached(reader)
                await trusted(reader)
                await item(1), await item(2)
                assert reader.store is not None
                fetch = reader.store.fetch

                async def later(asked: Any) -> Any:  # it looks at the table by itself, perhaps before the row is pruned
                    await pruned.wait()
                    return await fetch(asked)

                monkeypatch.setattr(reader.store, "fetch", later)
                proxy.refuse = True
                proxy.cut()
                await until(lambda: not reader.link.connected)
                on_sqlite.value = 1
                await writer.invalidate("item", (1,))
                assert writer.writing is not None
                assert writer.store is not None
                await writer.writing.beat()
                assert await writer.store.prune(older_than=0.0, stream="caches")
                pruned.set()
                proxy.heal()
                await becomes(item, 1)
                await until(lambda: stream_of(reader)["clears"] >= 1)
                await trusted(reader)
                assert await item(2) == 1
                assert reader.reading.stopped == {}

    run(main())


def test_old_rows_are_pruned_in_the_background(on_sqlite: World) -> None:
    on_sqlite.settings = attrs.evolve(LONG, invalidations_kept=0.2)

    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer:
            async with writer.write(orders, caches) as fact:
                fact.add(Order(1, "new"))
                fact.add(Invalidation("item", [1], 1), stream=caches)
            path = on_sqlite.store.removeprefix("sqlite:///")

            def left() -> list[str]:
                with contextlib.closing(sqlite3.connect(path)) as connection:
                    return [one for (one,) in connection.execute("SELECT stream FROM busrep_facts")]

            await until(lambda: left() == ["orders"])

    run(main())


def test_rows_that_nobody_can_read_clear_the_caches_and_stop_nothing(on_sqlite: World) -> None:
    other = Stream("caches", follows=False)  # one that writes something else there

    async def main() -> None:
        async with on_sqlite.bus(writer="w1", streams=[orders, other]) as writer, on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            await until(lambda: stream_of(reader)["following"])
            await item(1)
            on_sqlite.value = 1
            await writer.publish(other, [{"not": "a row"}])
            await becomes(item, 1)
            on_sqlite.value = 2
            await writer.publish(other, [["item", [1], 5]])
            await becomes(item, 2)
            assert reader.reading.stopped == {}
            assert stream_of(reader)["clears"] == 1

    run(main())


# -- writers that die, hang, and are new ----------------------------------------------------------------------


def test_a_writer_that_dies_counts_until_it_is_finished(world: World) -> None:
    async def main() -> None:
        async with world.bus() as reader:
            item = world.cached(reader)
            dead = world.bus(writer="w1")
            await dead.open()
            await trusted(reader)
            await item(1)
            world.value = 1
            with dropping(reader, of_rows):
                await dead.invalidate("item", (1,))
                await crash(dead)
            proof = reader.caching.caches.feed_of().proof
            await becomes(item, 1)  # it is finished, and its last row fetched
            await until(lambda: reader.caching.caches.feed_of().proof > proof + 1.5)
            await trusted(reader)
            await dead.store.close()  # type: ignore[union-attr]

    run(main())


def test_a_writer_that_stops_in_order_costs_no_trust(world: World) -> None:
    world.settings = QUICK

    async def main() -> None:
        async with world.bus() as reader, world.bus(writer="w1"):
            world.cached(reader)
            async with world.bus(writer="w2") as leaving:
                await trusted(reader)
                await leaving.invalidate("item", (1,))
            proof = reader.caching.caches.feed_of().proof
            assert leaving.store is not None
            await until(lambda: reader.caching.caches.feed_of().proof > proof + 0.5, timeout=2.0)
            async with world.bus(writer="w2") as again:  # and may come back
                await again.invalidate("item", (1,))
                await until(lambda: stream_of(reader)["rows"] == 2)

    run(main())


def test_a_new_writer_of_which_nothing_is_heard_is_followed_through_the_table(on_sqlite: World) -> None:
    on_sqlite.settings = QUICK

    async def main() -> None:
        async with on_sqlite.bus(writer="w1"), on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            await trusted(reader)
            with dropping(reader, lambda data: b" new " in data):
                async with on_sqlite.bus(writer="new") as new:
                    await item(1)
                    on_sqlite.value = 1
                    await new.invalidate("item", (1,))
                    await becomes(item, 1)
                    await until(lambda: stream_of(reader)["rows"] == 1)  # by way of the table
                    await trusted(reader)
            await trusted(reader)

    run(main())


def test_a_fact_that_is_held_back_ends_trust_elsewhere_and_not_here(on_postgres: World) -> None:
    """An earlier fact of the same writer is open: others cannot be told of the later one."""
    on_postgres.settings = QUICK

    async def main() -> None:
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            items = [on_postgres.cached(writer), on_postgres.cached(reader)]
            await trusted(writer, reader)
            entered, held = asyncio.Event(), asyncio.Event()

            async def slow() -> None:
                async with writer.write(caches) as fact:
                    fact.add(Invalidation("other", [1], 1))
                    entered.set()
                    await held.wait()

            task = asyncio.create_task(slow())
            await entered.wait()
            for item in items:
                await item(1)
            await trusted(writer, reader)  # nothing is committed that is not known
            on_postgres.value = 1
            await items[0].invalidate(1)
            assert await items[0](1) == 1
            await becomes(items[1], 1)
            await untrusted(reader)
            assert stream_of(reader)["rows"] == 0
            await trusted(writer)
            held.set()
            await task
            await trusted(reader)
            assert stream_of(reader)["rows"] == 2

    run(main())


def test_a_joined_fact_holds_no_trust_while_it_is_open_and_is_applied_once_committed(on_postgres: World) -> None:
    on_postgres.settings = QUICK

    async def main() -> None:
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            items = [on_postgres.cached(writer), on_postgres.cached(reader)]
            await trusted(writer, reader)
            connection = await psycopg.AsyncConnection.connect(on_postgres.store)
            async with connection:
                await connection.execute("SELECT 1")
                async with writer.write(caches, connection=connection) as fact:
                    items[0].invalidate_in(fact, 1)
                await trusted(writer, reader)
                proof = reader.caching.caches.feed_of().proof
                # The table says again and again that it is open still: what is not committed hides nothing.
                await until(lambda: reader.caching.caches.feed_of().proof > proof + 1.5)
                for item in items:
                    await item(1)
                on_postgres.value = 1
                await connection.commit()
                await writer.settle()
                assert await items[0](1) == 1
                await becomes(items[1], 1)
                await trusted(writer, reader)

    run(main())


def test_a_commit_without_an_answer_ends_trust_until_it_is_known(on_postgres: World) -> None:
    on_postgres.settings = QUICK

    async def main() -> None:
        async with on_postgres.bus(writer="w1") as writer, on_postgres.bus() as reader:
            items = [on_postgres.cached(writer), on_postgres.cached(reader)]
            await trusted(writer, reader)
            for item in items:
                await item(1)
            store: Any = writer.store
            append, outcome = store.append, store.outcome

            async def unknown(*_: Any) -> Any:
                raise Unavailable("the store", "away")

            async def no_answer(claim: Any, appended: Any) -> None:
                await append(claim, appended)
                raise CommitUnknown(appended, OSError("no answer"))

            store.append, store.outcome = no_answer, unknown
            on_postgres.value = 1
            with pytest.raises(CommitUnknown):
                await items[0].invalidate(1)
            for item in items:
                await becomes(item, 1)  # neither was told
            for bus in (writer, reader):
                await untrusted(bus)
                assert stream_of(bus)["rows"] == 0
            store.append, store.outcome = append, outcome
            await trusted(writer, reader)
            await until(lambda: stream_of(reader)["rows"] == stream_of(writer)["rows"] == 1)

    run(main())


def test_a_name_that_is_claimed_anew_is_followed_from_the_new_one(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            async with on_sqlite.bus(writer="w1") as before:
                own = on_sqlite.cached(before)
                await trusted(before, reader)
                await own(1), await item(1)
                async with on_sqlite.bus(writer="w1") as after:
                    on_sqlite.value = 1
                    await after.invalidate("item", (1,))
                    await becomes(item, 1)
                    await becomes(own, 1)  # fenced, and still a reader
                    await trusted(before, reader)

    run(main())


def test_another_log_clears_the_caches(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus() as reader:
            item = on_sqlite.cached(reader)
            async with on_sqlite.bus(writer="w1"):
                await trusted(reader)
                await item(1)
            store = open_store(on_sqlite.store, Registry([orders, caches]))
            await store.open()
            await store.restored()
            await store.close()
            on_sqlite.value = 1
            async with on_sqlite.bus(writer="w1"):
                await becomes(item, 1)
                await trusted(reader)
                assert stream_of(reader)["clears"] >= 1

    run(main())


def test_where_rows_come_over_http_the_same(on_sqlite: World) -> None:
    async def main() -> None:
        async with on_sqlite.bus(writer="w1") as writer:
            assert writer.store is not None
            async with serve(catch_up_app(writer.store, [orders, caches], secret="for-tests")) as serving:
                source = HttpSource(serving.url, [orders, caches], LONG, HttpOptions(secret="for-tests"))
                async with on_sqlite.bus(store=source) as reader:
                    item = on_sqlite.cached(reader)
                    await trusted(reader)
                    await item(1)
                    on_sqlite.value = 1
                    with dropping(reader, of_rows):
                        await writer.invalidate("item", (1,))
                        await becomes(item, 1)
                    await trusted(reader)

    run(main())


def test_over_direct_tcp_the_same(on_sqlite: World) -> None:
    async def main() -> None:
        async with (
            TcpServer(on_sqlite.name, port=0, settings=LONG) as server,
            on_sqlite.bus(redis=server, writer="w1") as writer,
            on_sqlite.bus(redis=f"tcp://127.0.0.1:{server.port}") as reader,
        ):
            item = on_sqlite.cached(reader)
            await trusted(reader)
            await item(1)
            on_sqlite.value = 1
            await writer.invalidate("item", (1,))
            await becomes(item, 1)
            await trusted(reader)

    run(main())


def test_through_a_relay_the_same(redis_url: str, bus_name: str) -> None:
    """The writer speaks direct TCP, the reader hears Redis, and there is no table to ask."""
    world = World(redis_url, bus_name, "")

    async def main() -> None:
        options: dict[str, Any] = {"streams": [memory], "store": None}
        async with (
            TcpServer(world.name, port=0, settings=LONG, redis=world.redis, streams=[memory]) as server,
            world.bus(redis=f"tcp://127.0.0.1:{server.port}", writer="w1", **options) as writer,
            world.bus(**options) as reader,
        ):
            item = world.cached(reader)
            await until(lambda: stream_of(reader, "memory")["trusted"])
            await item(1)
            world.value = 1
            await writer.invalidate("item", (1,))
            await becomes(item, 1)

    run(main())


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_what_a_cache_does_not_hold_is_no_exception(ttl: float | None) -> None:
    store = bounded_store(10, ttl, lambda: 0.0)()
    assert (store["key",], len(store)) == ((None, -1, float("-inf")), 0)
