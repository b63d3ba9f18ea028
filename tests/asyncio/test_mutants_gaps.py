"""What only a mutant showed to be untested; the mutants of tests/mutants.py name these tests."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import attrs
import fakeredis
import psycopg
import pytest

import busrep
from busrep.core.application_commands import RemoteServerUp
from busrep.core.delivery import DeliveryQueue, RawBatch
from busrep.core.writer import Writer
from busrep.errors import HandlerFailed
from busrep.stores import open_store
from busrep.streams import Registry

from .test_bus import Deployment, Gate, on_postgres, run, until, write
from .test_bus import orders as bus_orders

__all__ = ["on_postgres"]  # a fixture


@attrs.frozen
class Order:
    number: int


orders = busrep.Stream("orders", Order)
payments = busrep.Stream("payments", Order)
typing = busrep.Stream("typing", resettable=True)
QUICK = busrep.Settings(heartbeat=0.1, answer_interval=0.005, poison_after=0.0, retry_min=0.02, retry_max=0.2)
CALM = attrs.evolve(QUICK, heartbeat=600.0)


@attrs.frozen
class InMemory:
    """Buses of one name on one Redis and one store, all of it in this process."""

    redis: fakeredis.FakeAsyncRedis
    store: str

    def bus(self, **options: Any) -> busrep.Bus:
        given: dict[str, Any] = {"streams": [orders, payments], "store": self.store, "settings": QUICK, **options}
        return busrep.connect(self.redis, name="shop", **given)


async def in_memory() -> InMemory:
    store = f"memory://{secrets.token_hex(6)}"
    await open_store(store, Registry([orders, payments])).init()
    return InMemory(fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer()), store)


def test_5_a_reader_from_now_gets_a_fact_that_was_open_when_it_began() -> None:
    async def main() -> None:
        shop, got = await in_memory(), []
        async with AsyncExitStack() as stack:
            writer = await stack.enter_async_context(shop.bus(writer="w1"))
            async with writer.write(orders) as slow:
                slow.add(Order(1))
                reader = await stack.enter_async_context(shop.bus(start="now"))
                reader.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
                await reader.wait_for(orders, "w1", 0)  # it has begun
            await reader.wait_for(orders, "w1", slow.id)
        assert got == [1]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_r11_a_wait_for_one_writer_goes_on_while_another_advances_past_it() -> None:
    async def main() -> None:
        shop = await in_memory()
        async with (
            shop.bus(writer="w1", settings=CALM) as w1,  # follows nobody before its first beat
            shop.bus(writer="w2", settings=CALM) as w2,
            shop.bus(settings=CALM, start="earliest") as reader,
        ):
            (first,) = await w1.publish(orders, [Order(1)])
            waiting = asyncio.create_task(reader.wait_for(orders, "w1", first + 2))
            last = (await w2.publish(orders, [Order(2), Order(3), Order(4)]))[-1]
            await reader.wait_for(orders, "w2", last)
            await asyncio.sleep(0)
            assert last > first + 2
            assert not waiting.done()
            await w1.publish(orders, [Order(5)])
            await waiting

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_3_rows_of_a_writer_prove_no_position_to_a_reader(sqlite_url: str) -> None:
    async def main() -> None:
        store = open_store(sqlite_url, Registry([orders]))
        await store.init()
        await store.open()
        claim = await store.claim("w1", ["orders"], timeout=1)
        _, second = await store.reserve("orders", 2)  # the first one is still open
        transaction = store.transaction(claim)
        await transaction.begin()
        await transaction.insert("orders", [(second, [Order(2)], [b"[2]"])])
        await transaction.commit()
        known = await store.known()
        await store.close()
        assert [(one.writer, one.position) for one in known] == [("w1", 0)]

    asyncio.run(main())


def test_4_positions_move_only_when_redis_has_confirmed() -> None:
    writer = Writer("shop", "w1", incarnation=1, epoch="0" * 32, settings=CALM)
    writer.add_stream(orders, 10)
    writer.connected(0.0)
    for announcement in writer.frames_to_publish():
        writer.published(announcement)
    writer.fact_completed("orders", 11, [b"[1]"])
    writer.position_moved("orders", 11)
    (frame,) = writer.frames_to_publish()
    assert writer.positions() == {"orders": 10}
    writer.published(frame)
    assert writer.positions() == {"orders": 11}


def test_3_what_was_put_back_stands_before_what_waits() -> None:
    queue = DeliveryQueue("orders", "w1", 0)
    for token in (1, 2):
        queue.put([token], [b"%d" % token], token, fetched=False)
    assert queue.take(1) is not None
    queue.put_back()
    again = queue.take(9)
    assert isinstance(again, RawBatch)
    assert list(again.tokens) == [1, 2]


@pytest.mark.servers
def test_9_12_a_position_saved_in_a_transaction_is_rolled_back_with_it(on_postgres: Deployment) -> None:
    async def main() -> None:
        fails = iter([True])
        async with (
            on_postgres.bus(writer="w1") as writer,
            on_postgres.bus(reader="billing") as reader,
            await psycopg.AsyncConnection.connect(on_postgres.store) as connection,
        ):
            await connection.execute("CREATE TABLE effects (n int)")
            await connection.commit()

            @reader.subscribe(bus_orders)
            async def handle(batch: Any) -> None:
                async with connection.transaction():
                    for row in batch.rows:
                        await connection.execute("INSERT INTO effects VALUES (%s)", (row.number,))
                    await batch.save(connection)
                    if next(fails, False):
                        raise OSError("before COMMIT")

            await reader.wait_for(bus_orders, "w1", await write(writer, 1, 2))
            found = await (await connection.execute("SELECT n FROM effects ORDER BY n")).fetchall()
            assert found == [(1,), (2,)]

    run(main())


class SlowToConfirm:
    """A server that speaks as much Redis as a bus needs, and confirms subscriptions only while ``confirming``."""

    def __init__(self) -> None:
        self.confirming = asyncio.Event()
        self.confirming.set()
        self.asked = asyncio.Event()
        self.published: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            if words[0] == b"SUBSCRIBE":
                self.asked.set()
                await self.confirming.wait()
                writer.write(b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n" % (len(words[1]), words[1]))
            elif words[0] == b"PUBLISH":
                self.published.put_nowait(words[2])
                writer.write(b":1\r\n")
            else:
                writer.write(b"+OK\r\n")
        writer.close()

    async def until(self, data: bytes) -> list[bytes]:
        """What was published before ``data``."""
        before = []
        while (found := await self.published.get()) != data:
            before.append(found)
        return before


def test_2_replicate_follows_the_confirmation_of_the_subscription() -> None:
    async def main() -> None:
        redis = SlowToConfirm()
        async with await asyncio.start_server(redis.serve, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with busrep.connect(f"redis://{host}:{port}", name="shop", streams=[typing], settings=CALM) as bus:
                await redis.until(b"REPLICATE")
                redis.asked.clear()
                redis.confirming.clear()
                bus.link.reconnect("to subscribe again")
                await redis.asked.wait()
                await bus.send(RemoteServerUp("mark"))
                assert b"REPLICATE" not in await redis.until(b"REMOTE_SERVER_UP mark")
                redis.confirming.set()
                assert await redis.until(b"REPLICATE") == []

    asyncio.run(asyncio.wait_for(main(), 100))


# -- what the simulator found ---------------------------------------------------------------------------------


def test_4_a_batch_does_not_come_again_once_the_next_was_asked_for() -> None:
    """Even where asking for it ends the loop at that very moment, with the failure of another stream."""

    async def main() -> None:
        shop = await in_memory()
        impatient = attrs.evolve(QUICK, handler_retries=0)
        async with (
            shop.bus(writer="w1") as writer,
            shop.bus(settings=impatient, start="earliest") as reader,
        ):

            @reader.subscribe(payments)
            def handle(_: Any) -> None:
                raise ValueError("poison")

            batches = reader.follow(orders, payments)
            (last,) = await writer.publish(orders, [Order(1)])
            assert (await anext(batches)).position == last
            await writer.publish(payments, [Order(2)])
            await until(lambda: reader.reading.stopped)
            with pytest.raises(HandlerFailed):
                await anext(batches)
            assert reader.positions()["orders"]["w1"] == last

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_2_a_fenced_writer_that_reads_does_not_hand_out_its_own_facts() -> None:
    """Not the first of its name: it counts its own facts from where its predecessor's end."""

    async def main() -> None:
        shop, got = await in_memory(), []
        async with shop.bus(writer="w1") as first:
            await first.publish(orders, [Order(1)])
        async with shop.bus(writer="w1", start="earliest") as second:
            second.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            await until(lambda: got == [1])
            await second.publish(orders, [Order(2), Order(3)])
            await until(lambda: second.positions()["orders"]["w1"] == 3)  # published
            async with shop.bus(writer="w1") as third:
                (last,) = await third.publish(orders, [Order(4)])
                await until(lambda: second.statistics()["writer"]["fenced"])
                await second.wait_for(orders, "w1", last)
        assert got == [1, 4]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_12_a_batch_given_up_while_it_is_registered_is_not_handed_to_the_next_loop() -> None:
    async def main() -> None:
        shop = await in_memory()
        async with shop.bus(reader="r") as reader:
            gate = Gate(
                reader.reading.reader_store, "register_reader", when=lambda _, at, *__: ("orders", "") not in at
            )
            left = asyncio.ensure_future(anext(reader.follow(orders)))
            await until(lambda: "orders" in reader.reading.core.followed)
            async with shop.bus(writer="w1") as writer:
                await writer.publish(orders, [Order(1)])
                await gate.at.wait()
                left.cancel()
                await asyncio.wait([left])
                batches = reader.follow(orders)
                asking = asyncio.ensure_future(anext(batches))
                await asyncio.sleep(0)
                gate.go_on.set()
                await writer.publish(orders, [Order(2)])
                got = [row.number for row in (await asking).rows]
                while got[-1] != 2:
                    got += [row.number for row in (await anext(batches)).rows]
                assert got == [1, 2]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_12_a_batch_given_up_between_two_tries_is_not_tried_again() -> None:
    async def main() -> None:
        shop, got = await in_memory(), []
        fails = iter([True])
        async with shop.bus(writer="w1") as writer, shop.bus(start="earliest") as reader:

            @reader.subscribe(orders)
            def handle(batch: Any) -> None:
                if next(fails, False):
                    reader.reading.core.progress["orders", "w1"].go_on_from(
                        0
                    )  # as when the saved position is another one
                    raise OSError("once")
                got.extend(row.number for row in batch.rows)

            await reader.wait_for(orders, "w1", (await writer.publish(orders, [Order(1)]))[-1])
            await reader.wait_for(orders, "w1", (await writer.publish(orders, [Order(2)]))[-1])
        assert got == [1, 2]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_own_positions_count_once_those_of_the_predecessor_are_known() -> None:
    async def main() -> None:
        shop, got = await in_memory(), []
        async with shop.bus(writer="w1") as first:
            await first.publish(orders, [Order(1), Order(2)])
        async with shop.bus(writer="w1", start="earliest") as second:
            second.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            assert second.positions().get("orders", {}).get("w1", 0) == 0  # what was left is not even looked up yet
            await until(lambda: got == [1, 2])
            await until(lambda: second.positions()["orders"]["w1"] == 2)

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_16_own_positions_of_the_log_before_are_not_saved_in_the_new_one() -> None:
    async def main() -> None:
        shop, key, go_on = await in_memory(), ("orders", "w1"), asyncio.Event()
        store = open_store(shop.store, Registry([orders]))
        async with shop.bus(writer="w1", reader="r", settings=CALM) as bus:

            @bus.subscribe(orders)
            async def handle(_: Any) -> None:
                await go_on.wait()

            reading = bus.reading
            await until(lambda: "orders" in reading.core.followed)
            await bus.publish(orders, [Order(1), Order(2)])
            await until(lambda: bus.positions()["orders"]["w1"] == 2)
            epoch = await store.restored()
            reading.core.doubt(epoch)  # as a page, or an announcement, would bring it
            reading.pump()
            await until(lambda: reading.core.epoch == epoch)
            assert bus.positions()["orders"]["w1"] == 0
            await reading.saver.save([key], busy=True)
            saved = await store.load_reader("r")
            assert (saved.epoch, saved.positions[key]) == (epoch, 0)
            go_on.set()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_16_own_positions_are_not_saved_where_the_reader_begins_in_another_log() -> None:
    """A restore comes between the claim and the reader's first look. No sequence tells that the own position is of
    another log: it would be saved, and the rows up to there would be handled by nobody."""

    async def main() -> None:
        shop, key, got = await in_memory(), ("orders", "w1"), []
        store = open_store(shop.store, Registry([orders]))
        async with shop.bus(writer="w1") as first:
            await first.publish(orders, [Order(1), Order(2)])
        async with shop.bus(writer="w1", reader="r", settings=CALM) as bus:
            written = await bus.publish(orders, [Order(3)])
            assert bus.positions()["orders"]["w1"] == written[-1]
            epoch = await store.restored()
            gate = Gate(bus.reading.store, "fetch", when=lambda _: True)
            bus.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            await gate.at.wait()  # it has begun, and has handled nothing
            assert (bus.reading.core.epoch, bus.positions()["orders"]["w1"]) == (epoch, 0)
            await bus.reading.saver.save([key], busy=True)
            saved = await store.load_reader("r")
            assert (saved.epoch, saved.positions[key]) == (epoch, 0)
            gate.go_on.set()
            await until(lambda: got == [1, 2, 3])

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_12_rows_that_a_twin_has_handled_and_that_were_pruned_stop_nobody() -> None:
    async def main() -> None:
        shop, got, there = await in_memory(), [], []
        store = open_store(shop.store, Registry([orders]))
        by_one = attrs.evolve(QUICK, page_rows=1)
        async with shop.bus(writer="w1") as writer, shop.bus(reader="r", settings=by_one) as slower:
            last = (await writer.publish(orders, [Order(1), Order(2), Order(3)]))[-1]
            gate = Gate(slower.reading.store, "fetch", when=lambda question: question.after > 0)
            slower.subscribe(orders)(lambda batch: got.extend(row.number for row in batch.rows))
            await gate.at.wait()
            await until(lambda: slower.positions()["orders"]["w1"] == 1)  # has begun to handle
            async with shop.bus(reader="r") as faster:
                faster.subscribe(orders)(lambda batch: there.extend(row.number for row in batch.rows))
                await faster.wait_for(orders, "w1", last)
            while await store.prune(keep=0) != {("orders", "w1"): last}:  # once the writer's beat has proven them
                await asyncio.sleep(0.01)
            gate.go_on.set()
            await slower.wait_for(orders, "w1", (await writer.publish(orders, [Order(4)]))[-1])
            assert (there[-2:], got) == ([2, 3], [1, 4])

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_7_a_registry_that_lags_bounds_the_linear_position_by_its_own_positions() -> None:
    """A replica does not show yet that somebody joined, and reserved an ID below what was handled here."""

    async def main() -> None:
        shop = await in_memory()
        async with shop.bus(writer="w1") as w1, shop.bus() as reader:
            reader.subscribe(orders)(lambda _: None)
            (first,) = await w1.publish(orders, [Order(1)])
            await reader.wait_for(orders, "w1", first)
            replica = reader.reading.store
            assert replica is not None
            while (known := await replica.known())[0].position < first:  # until the writer's beat has proven it
                await asyncio.sleep(0.01)
            store = open_store(shop.store, Registry([orders]))
            claim = await store.claim("w2", ["orders"], timeout=1)
            (reserved,) = await store.reserve("orders", 1)
            (last,) = await w1.publish(orders, [Order(2)])
            await reader.wait_for(orders, "w1", last)
            assert first < reserved < last

            async def lagging(_: str) -> Any:
                return known

            async def cannot_know(*_: str) -> None:
                return None

            replica.known, replica.sequence = lagging, cannot_know  # type: ignore[method-assign]
            assert await reader.linear_position(orders) == first
            assert claim.writer == "w2"

    asyncio.run(asyncio.wait_for(main(), 100))


def test_4_a_batch_of_a_log_that_is_gone_is_not_handed_to_a_loop() -> None:
    async def main() -> None:
        shop, got, go_on = await in_memory(), [], asyncio.Event()
        store = open_store(shop.store, Registry([orders, payments]))
        async with shop.bus(writer="w1", settings=CALM) as writer, shop.bus(reader="r", settings=CALM) as reader:
            await writer.publish(orders, [Order(1)])
            await writer.publish(payments, [Order(2)])
            at_work = asyncio.Event()

            async def loop() -> None:
                async for batch in reader.follow(orders, payments):
                    got.append((batch.stream.name, reader.reading.core.epoch))
                    at_work.set()
                    await go_on.wait()

            following = asyncio.create_task(loop())
            await at_work.wait()
            await until(
                lambda: sum(one.offered for one in reader.reading.loops) == 2
            )  # the other one's batch waits for the loop
            before = reader.reading.core.epoch
            reader.reading.core.doubt(await store.restored())
            reader.reading.pump()
            await until(lambda: reader.reading.core.epoch != before)
            go_on.set()
            await until(lambda: len(got) == 3)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            # The one that the loop was busy with is of the old log; the other came in the new one only.
            assert [epoch == before for _, epoch in got] == [True, False, False]
            assert {stream for stream, _ in got[1:]} == {"orders", "payments"}

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_12_a_registration_of_the_log_before_does_not_slip_into_the_new_one() -> None:
    """The saved position is gone; meanwhile the log is restored, and the reader begins the new one. Its positions are
    in another database: where they are in the log's, that refuses the registration besides."""

    async def main() -> None:
        shop, key, failing = await in_memory(), ("orders", "w1"), asyncio.Event()
        elsewhere = f"memory://{secrets.token_hex(6)}"
        store, saved = (open_store(url, Registry([orders])) for url in (shop.store, elsewhere))
        await saved.init()
        async with (
            shop.bus(writer="w1", settings=CALM) as writer,
            shop.bus(reader="r", reader_store=elsewhere, settings=CALM) as reader,
        ):
            reading = reader.reading
            got: list[tuple[str | None, list[int]]] = []

            @reader.subscribe(orders)
            async def handle(batch: busrep.Batch[Order]) -> None:
                got.append((reading.core.epoch, list(batch.tokens)))
                if reading.core.epoch == before and 2 in batch.tokens and not failing.is_set():
                    failing.set()
                    # As a restore to before it was registered leaves it.
                    memory.world.ask("DELETE FROM busrep_readers WHERE reader = 'r'")
                    batch.handling.tried = True  # it saved, and what became of that is to be looked at
                    raise ConnectionError

            before = await store.epoch()
            memory: Any = reading.reader_store
            fact_log: Any = reading.store
            await reader.wait_for(orders, "w1", (await writer.publish(orders, [Order(1)]))[-1])
            gate = Gate(memory, "register_reader")
            await writer.publish(orders, [Order(2)])
            await gate.at.wait()  # the worker is about to register position 1 in the log that it knows
            new = await store.restored()

            async def nobody(_epoch: str) -> list[Any]:
                return []  # it was restored to before the writer joined

            fact_log.known = nobody
            reading.core.doubt(new)
            reading.pump()
            changing = asyncio.create_task(until(lambda: reading.core.epoch == new))
            await asyncio.sleep(0.2)  # whatever can happen before it has registered does
            gate.go_on.set()
            await changing
            await until(lambda: key not in reading.workers)
            state = await saved.load_reader("r")
            assert (state.epoch, state.positions.get(key, 0)) == (new, 0)
            assert [tokens for _, tokens in got] == [[1], [2]]

    asyncio.run(asyncio.wait_for(main(), 100))


@asynccontextmanager
async def reader_saving_in(path: Path) -> AsyncIterator[tuple[busrep.Bus, busrep.Bus]]:
    """A writer whose facts are in memory, and a durable reader whose positions are in a database of their own."""
    shop, elsewhere = await in_memory(), f"sqlite:///{path}"
    store = open_store(elsewhere, Registry([orders, payments]))
    await store.init()
    await store.close()
    async with (
        shop.bus(writer="w1", settings=CALM) as writer,
        shop.bus(reader="r", reader_store=elsewhere, settings=CALM) as reader,
    ):
        yield writer, reader


def test_9_23_a_stream_that_begins_finds_that_a_failover_lost_the_step_into_this_log(tmp_path: Path) -> None:
    """All begin there again, and are told so. Were the saved positions replaced in the table alone, above rows that
    were pruned since, they would look like those of another process that has handled these."""

    async def main() -> None:
        async with reader_saving_in(tmp_path / "positions.db") as (writer, reader):
            resets: list[tuple[str, str, int]] = []
            got: list[int] = []
            reader.on_reset()(lambda *told: resets.append(told))
            reader.subscribe(orders)(lambda batch: got.extend(batch.tokens))
            await writer.publish(orders, [Order(1)])
            await reader.wait_for(orders, "w1", 1)
            with closing(sqlite3.connect(tmp_path / "positions.db", isolation_level=None)) as connection:
                connection.execute("UPDATE busrep_readers SET epoch = 'before'")
            reader.subscribe(payments)(lambda _: None)
            await reader.reading.followed(payments)
            await until(lambda: got == [1, 1])
            assert resets == [("orders", "w1", 0)]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_23_nothing_is_registered_beside_positions_of_an_older_log(tmp_path: Path) -> None:
    """A failover of the positions' own database loses the reader's step into this log, and all effects since: they are
    made again, each once, from the first one on."""

    async def main() -> None:
        async with reader_saving_in(tmp_path / "positions.db") as (writer, reader):
            reading, calls = reader.reading, 0

            def ask(sql: str) -> list[Any]:
                with closing(sqlite3.connect(tmp_path / "positions.db", isolation_level=None)) as connection:
                    return connection.execute(sql).fetchall()

            def bills() -> list[int]:
                return [number for (number,) in ask("SELECT number FROM bills")]

            ask("CREATE TABLE bills (number int)")

            @reader.subscribe(orders)
            async def handle(batch: busrep.Batch[Order]) -> None:
                nonlocal calls
                calls += 2 in batch.tokens
                if calls == 1 and 2 in batch.tokens:
                    for lost in (
                        "DELETE FROM bills",
                        "DELETE FROM busrep_readers WHERE stream = 'orders' AND writer = 'w1'",
                        "UPDATE busrep_readers SET epoch = 'before'",
                    ):
                        ask(lost)
                    batch.handling.tried = True  # it saved, and what became of that is to be looked at
                    raise ConnectionError
                async with batch.transaction() as db:
                    for row in batch.rows:
                        db.execute("INSERT INTO bills VALUES (?)", (row.number,))

            await writer.publish(orders, [Order(1)])
            await until(lambda: bills() == [1])
            await writer.publish(orders, [Order(2)])
            await until(lambda: calls >= 3 or bills() == [2])
            assert await reading.saver.look_at_saved()  # as some beats later
            await until(lambda: 1 in bills())
            await reader.wait_for(orders, "w1", 2)
            assert bills() == [1, 2]

    asyncio.run(asyncio.wait_for(main(), 100))


def test_9_12_where_a_batch_of_the_log_before_began_is_not_registered_in_the_new_one() -> None:
    """A writer joined, its rows wait for their registration while the log is exchanged."""

    async def main() -> None:
        shop, key = await in_memory(), ("orders", "w1")
        store = open_store(shop.store, Registry([orders]))
        async with shop.bus(reader="r", settings=CALM) as reader:
            reading = reader.reading
            reader.subscribe(orders)(lambda _: None)
            await until(lambda: "orders" in reading.core.followed)
            async with shop.bus(writer="w1", settings=CALM) as writer:
                await reading.saving.acquire()  # something is being saved just now
                await writer.publish(orders, [Order(1)])
                await until(lambda: key in reading.workers)
                await asyncio.sleep(0)
                taken = reading.core.progress[key].queue.handling
                assert taken is not None
                # What beginning a new log does, under the same lock.
                new = await store.restored()
                await store.reset_reader("r", {("orders", ""): 0}, new)
                reading.core.rebase(new, {})
                reading.saved.at = {}
                object.__setattr__(taken, "after", 5)  # it went on from there
                reading.saving.release()
                await until(lambda: not reading.saving.locked() and key not in reading.workers)
            assert (await store.load_reader("r")).positions.get(key, 0) == 0

    asyncio.run(asyncio.wait_for(main(), 100))
