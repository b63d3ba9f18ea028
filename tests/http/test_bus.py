"""Readers without a database: real buses on a real Redis, whose only way to lost rows is HTTP."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import orjson
import psycopg
import pytest
import redis.asyncio
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

import busrep
from busrep import Batch, Settings, Stream
from busrep.asyncio import ReferenceSource
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.errors import ConfigError, PositionsAheadOfTable, PositionTooOld, Unavailable
from busrep.http import guard as http_guard
from busrep.http import server as http_server
from busrep.http.client import HttpOptions
from busrep.http.serve import Serving, serve
from busrep.http.server import CatchUpLimits, catch_up_app
from busrep.http.source import HttpSource
from busrep.stores import open_store
from busrep.stores.interface import KnownWriter
from busrep.streams import Registry
from busrep.testing.links import FaultyLink
from busrep.testing.processes import free_port
from tests import ROOT
from tests.stores import test_replica
from tests.stores.store_conformance import sync, write

pytestmark = pytest.mark.servers
servers_pair, pair = test_replica.servers_pair, test_replica.pair

SECRET = "s/e c".replace(" ", "@")
IN_URL = "s%2Fe%40c"
QUICK = Settings(
    heartbeat=0.1,
    poison_after=0.0,
    retry_min=0.02,
    retry_max=0.2,
    save_every=0.05,
    redis_timeout=2.0,
    shutdown_timeout=2.0,
    page_rows=7,
)


@pytest.fixture(autouse=True)
def come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "RETRY_AFTER", 0)


@attrs.frozen
class Order:
    number: int
    text: str


orders = Stream("orders", Order)
STREAMS = [orders]


@attrs.define
class Deployment:
    """A database that only the writers and the HTTP server have; readers have Redis and the server's address."""

    redis: str
    name: str
    database: str
    port: int = 0

    def bus(self, store: Any, **options: Any) -> busrep.Bus:
        given = {"name": self.name, "streams": STREAMS, "store": store, "settings": QUICK, **options}
        return busrep.connect(given.pop("redis", self.redis), **given)

    def writer(self, name: str = "w1") -> busrep.Bus:
        return self.bus(self.database, writer=name)

    @contextlib.asynccontextmanager
    async def store(self) -> AsyncIterator[Any]:
        store = open_store(self.database, Registry(STREAMS), settings=QUICK)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    @contextlib.asynccontextmanager
    async def server(self, *, wrap: Any = lambda app: app, **options: Any) -> AsyncIterator[Serving]:
        """Mounted below a prefix; a second one comes up at the address of the first."""
        async with self.store() as store:
            service = Starlette()
            service.mount("/shop/busrep", wrap(catch_up_app(store, STREAMS, **{"secret": SECRET, **options})))
            async with serve(service, port=self.port) as serving:
                self.port = serving.port
                yield serving

    @property
    def url(self) -> str:
        return f"http://:{IN_URL}@127.0.0.1:{self.port}/shop/busrep"


@pytest.fixture
def deployment(redis_url: str, bus_name: str, sqlite_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, sqlite_url)
    asyncio.run(open_store(found.database, Registry(STREAMS)).init())
    return found


@pytest.fixture
def on_postgres(redis_url: str, bus_name: str, postgres_url: str) -> Deployment:
    found = Deployment(redis_url, bus_name, postgres_url)
    asyncio.run(open_store(found.database, Registry(STREAMS)).init())
    return found


@contextlib.asynccontextmanager
async def opened(source: HttpSource) -> AsyncIterator[HttpSource]:
    await source.open()
    try:
        yield source
    finally:
        await source.close()


async def until(true: Any, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.005)


@attrs.define
class Seen:
    """What a handler was given."""

    facts: list[tuple[str, int, list[int]]] = attrs.field(factory=list)

    def __call__(self, batch: Batch[Order]) -> None:
        self.facts += [(batch.writer, token, [row.number for row in rows]) for token, rows in batch.facts()]

    def of(self, writer: str) -> list[tuple[int, list[int]]]:
        return [(token, numbers) for who, token, numbers in self.facts if who == writer]


async def wrote(bus: busrep.Bus, *facts: int) -> list[tuple[int, list[int]]]:
    """A fact of so many rows each; what a reader must see of them."""
    done = []
    for size in facts:
        async with bus.write(orders) as fact:
            numbers = [random.randrange(10**9) for _ in range(size)]
            for number in numbers:
                fact.add(Order(number, "é\n\u2028" * (number % 4)))
        done.append((fact.id, numbers))
    return done


@sync
async def test_a_reader_without_a_database_begins_at_the_oldest_row_and_goes_on_live(on_postgres: Deployment) -> None:
    deployment = on_postgres
    async with deployment.server(), deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 20, 10, 3)  # one fact is larger than a page
        async with deployment.bus(deployment.url, start="earliest") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            expected += await wrote(writer, 2, 1)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            assert seen.of("w1") == expected
            assert reader.statistics()["reader"]["rows_fetched"] >= 33


@sync
async def test_what_the_link_loses_comes_over_http_in_order(deployment: Deployment) -> None:
    """Links of the readers that drop messages, double and reorder them, and are cut; facts of two writers meanwhile."""
    dice = random.Random(5)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(deployment.server())
        link = await stack.enter_async_context(FaultyLink(deployment.redis, seed=5))
        writers = {name: await stack.enter_async_context(deployment.writer(name)) for name in ("w1", "w2")}
        reader = await stack.enter_async_context(deployment.bus(deployment.url, redis=link.url, start="earliest"))
        seen = Seen()
        reader.subscribe(orders)(seen)
        expected: dict[str, list[tuple[int, list[int]]]] = {"w1": [], "w2": []}
        for step in range(60):
            if step % 20 == 5:
                link.black_hole("from_server")
            elif step % 20 == 12:
                link.heal()
                link.cut()
            name = dice.choice(["w1", "w2"])
            expected[name] += await wrote(writers[name], dice.randrange(1, 4))
            await asyncio.sleep(0.005)
        link.heal()
        link.cut()
        for name, facts in expected.items():
            await reader.wait_for(orders, name, facts[-1][0], timeout=15)
            assert seen.of(name) == facts, name
        assert reader.statistics()["reader"]["gaps_found"] > 0


@sync
async def test_a_server_that_is_restarted_in_the_middle(deployment: Deployment) -> None:
    async with deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 60)
        halfway = asyncio.Event()
        seen = Seen()

        def handle(batch: Batch[Order]) -> None:
            seen(batch)
            if len(seen.facts) >= 14:
                halfway.set()

        async with contextlib.AsyncExitStack() as stack:
            async with deployment.server() as serving:
                reader = await stack.enter_async_context(deployment.bus(deployment.url, start="earliest"))
                reader.subscribe(orders)(handle)
                await halfway.wait()
            assert serving.connections == 0
            expected += await wrote(writer, 2, 1)
            async with deployment.server():
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=15)
                assert seen.of("w1") == expected


@sync
async def test_while_the_server_is_away_a_gap_is_stale_and_then_filled(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(deployment.writer())
        link = await stack.enter_async_context(FaultyLink(deployment.redis))
        async with deployment.server():
            reader = await stack.enter_async_context(deployment.bus(deployment.url, redis=link.url, start="earliest"))
            seen = Seen()
            reader.subscribe(orders)(seen)
            expected = await wrote(writer, 1)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
        link.black_hole("from_server")
        expected += await wrote(writer, 1, 1)
        link.cut()
        link.heal()
        expected += await wrote(writer, 1)
        await until(lambda: reader.statistics()["reader"]["states"]["orders"]["w1"] == "stale")
        assert "ConnectError" in reader.statistics()["reader"]["trouble"]["orders w1"]
        assert seen.of("w1") == expected[:1]
        async with deployment.server():
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=15)
            assert seen.of("w1") == expected
        assert SECRET not in caplog.text
        assert IN_URL not in caplog.text


@sync
async def test_positions_of_a_durable_reader_are_kept_elsewhere(deployment: Deployment, tmp_path: Any) -> None:
    own = f"sqlite:///{tmp_path / 'reader.db'}"
    await open_store(own, Registry(STREAMS)).init()
    async with deployment.server(), deployment.writer() as writer:
        first = await wrote(writer, 1, 2, 1)
        second: list[tuple[int, list[int]]] = []
        for expected in (first, second, []):
            seen = Seen()
            if expected is second:
                second += await wrote(writer, 3)  # while no reader is there
            async with deployment.bus(deployment.url, reader="billing", reader_store=own) as reader:
                reader.subscribe(orders)(seen)
                last = (first + second)[-1][0]
                await reader.wait_for(orders, "w1", last, timeout=10)
            assert seen.of("w1") == expected
        store = open_store(own, Registry(STREAMS))
        await store.open()
        assert (await store.load_reader("billing")).positions == {("orders", "w1"): last}
        await store.close()


@sync
async def test_exactly_once_into_the_reader_s_own_database(deployment: Deployment, tmp_path: Any) -> None:
    own = f"sqlite:///{tmp_path / 'reader.db'}"
    await open_store(own, Registry(STREAMS)).init()
    with contextlib.closing(sqlite3.connect(tmp_path / "reader.db")) as db:
        db.execute("CREATE TABLE bills (number INTEGER)")
        db.commit()
        async with deployment.server(), deployment.writer() as writer:
            expected = await wrote(writer, *[2] * 10)
            async with deployment.bus(deployment.url, reader="billing", reader_store=own) as reader:
                failures = iter([True, False, True])

                @reader.subscribe(orders)
                async def bill(batch: Batch[Order]) -> None:
                    with db:
                        db.execute("BEGIN IMMEDIATE")
                        db.executemany("INSERT INTO bills VALUES (?)", [[row.number] for row in batch.rows])
                        await batch.save(db)
                        if next(failures, False):
                            raise RuntimeError("and again")

                await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
        billed = [number for (number,) in db.execute("SELECT number FROM bills ORDER BY rowid")]
        assert billed == [number for _, numbers in expected for number in numbers]


@sync
async def test_pruned_rows_stop_the_reader_or_are_skipped_as_it_asks(deployment: Deployment, tmp_path: Any) -> None:
    own = f"sqlite:///{tmp_path / 'reader.db'}"
    await open_store(own, Registry(STREAMS)).init()
    async with deployment.server(), deployment.writer() as writer:
        expected = await wrote(writer, 1)
        options = {"reader": "billing", "reader_store": own}
        async with deployment.bus(deployment.url, **options) as reader:
            reader.subscribe(orders)(Seen())
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
        expected += await wrote(writer, 1, 1, 1)
        async with deployment.store() as store:  # whose positions table does not have this reader
            while (await store.known())[0].position < expected[-1][0]:
                await asyncio.sleep(0.01)
            await store.prune(keep=1)
        async with deployment.bus(deployment.url, **options) as reader:
            reader.subscribe(orders)(Seen())
            with pytest.raises(PositionTooOld) as caught:
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            assert (caught.value.position, caught.value.floor) == (expected[0][0], expected[2][0])
        async with deployment.bus(deployment.url, on_too_old="skip", **options) as reader:
            seen, missed = Seen(), []
            reader.subscribe(orders)(seen)
            reader.on_missed(orders)(lambda *given: missed.append(given))
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            assert seen.of("w1") == expected[-1:]
            assert missed == [("orders", "w1", expected[0][0], expected[2][0])]


@sync
async def test_another_epoch_is_noticed_over_http(deployment: Deployment) -> None:
    async with deployment.server():
        async with deployment.bus(deployment.url, start="earliest") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            async with deployment.writer() as writer:
                expected = await wrote(writer, 1, 1)
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            async with deployment.store() as store:
                await store.restored()
            async with deployment.writer() as writer:
                later = await wrote(writer, 1)
                await until(lambda: reader.statistics()["reader"]["epoch_changes"] == 1)
                await reader.wait_for(orders, "w1", later[-1][0], timeout=10)
            assert seen.of("w1") == expected + expected + later  # from the oldest row on, as the policy says


class Slow:
    """Answers after so many seconds."""

    def __init__(self, app: Any, seconds: float) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(self.seconds)
        await self.app(scope, receive, send)


@pytest.mark.parametrize("beats", [0, 3])
@sync
async def test_a_restore_that_nobody_declared_is_noticed_by_the_sequence(deployment: Deployment, beats: int) -> None:
    """The positions held are above all that the sequence ever gave: never silently accepted.

    Nor where each answer takes longer than a beat.
    """
    async with deployment.store() as store:
        async with deployment.server(wrap=lambda app: Slow(app, beats * QUICK.heartbeat)):
            claim = await store.claim("w1", ["orders"], timeout=1)
            await write(store, claim, 1, 1)
            await store.heartbeat(claim, {"orders": 2})
            async with deployment.bus(deployment.url, start="now") as reader:
                reader.subscribe(orders)(Seen())
                await reader.wait_for(orders, "w1", 2, timeout=10)
                reader.reading.core.progress["orders", "w1"].go_on_from(40)  # as if 40 rows were gone
                reader.reading.core.stepped_back["orders", "w1"] = None
                with pytest.raises(PositionsAheadOfTable):
                    await reader.wait_for(orders, "w1", 41, timeout=10)


@sync
async def test_a_silent_writer_is_followed_and_finished_by_who_has_the_database(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "busrep")
    async with deployment.server(), deployment.store() as store:
        claim = await store.claim("dead", ["orders"], timeout=1)
        ids = []
        for number in range(2):  # and published nothing, for it was killed
            transaction = store.transaction(claim)
            (token,) = await store.reserve("orders", 1)
            await transaction.begin()
            await transaction.insert("orders", [(token, [Order(number, "")], [orders.encode(Order(number, ""))])])
            await transaction.commit()
            ids.append(token)
        await store.heartbeat(claim, {"orders": ids[0]})
        async with deployment.bus(deployment.url, start="earliest") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "dead", ids[0], timeout=10)
            await until(lambda: "dead are silent: a process with the database has to finish them" in caplog.text)
            async with deployment.bus(deployment.database) as other:  # a bus beside the server, say
                other.subscribe(orders)(lambda _: None)
                await reader.wait_for(orders, "dead", ids[-1], timeout=15)
            assert [token for token, _ in seen.of("dead")] == ids
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


@sync
async def test_a_wrong_secret_keeps_the_bus_from_opening(deployment: Deployment) -> None:
    async with deployment.server():
        with pytest.raises(ConfigError, match="401") as caught:
            async with deployment.bus(deployment.url.replace(IN_URL, "wrong-word")):
                pass
        assert "wrong-word" not in str(caught.value)
        with pytest.raises(ConfigError, match="pass its URL as store="):
            async with deployment.bus(deployment.url, writer="w1"):
                pass


class Lying:
    """Changes every second page on its way, each time in another manner."""

    def __init__(self, app: Any) -> None:
        self.app, self.told = app, 0
        self.lies = [
            lambda page: page["updates"].reverse(),
            lambda page: page.update(upto_token=page["upto_token"] + 10**6),
            lambda page: page.update(limited=True, updates=[]),
            lambda page: page["updates"].append(page["updates"][0]),
            lambda page: page["updates"].insert(0, [0, ["x"]]),
            lambda page: page.update(updates=[["1", []]]),
            lambda page: page.pop("epoch"),
        ]
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += "updates" in scope.get("path", "")
        if "updates" not in scope.get("path", "") or self.count % 2 or not self.lies:
            await self.app(scope, receive, send)
            return
        messages: list[Any] = []

        async def keep(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, keep)
        page = orjson.loads(messages[1]["body"])
        if len(page.get("updates", ())) > 1:
            self.lies.pop(0)(page)
            self.told += 1
        body = orjson.dumps(page)
        headers = [(name, value) for name, value in messages[0]["headers"] if name != b"content-length"]
        await send({**messages[0], "headers": headers})
        await send({"type": "http.response.body", "body": body})


@sync
async def test_a_lying_server_delays_and_changes_nothing(deployment: Deployment) -> None:
    async with deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 70)
        liars: list[Lying] = []

        def wrap(app: Any) -> Lying:
            liars.append(Lying(app))
            return liars[-1]

        async with deployment.server(wrap=wrap), deployment.bus(deployment.url, start="earliest") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=20)
            assert seen.of("w1") == expected
            assert liars[0].told == 7
            assert reader.statistics()["reader"]["fetches_failed"] == 7


@sync
async def test_many_readers_share_a_small_server(deployment: Deployment) -> None:
    """More than its queue takes are told to come back, and come back."""
    limits = CatchUpLimits(concurrency=1, queue=1, page_rows=3)
    async with deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 25)
        async with deployment.server(limits=limits), contextlib.AsyncExitStack() as stack:
            readers = []
            while len(readers) < 5:
                try:
                    reader = await stack.enter_async_context(deployment.bus(deployment.url, start="earliest"))
                except Unavailable:  # those that are open keep the server busy: this one comes back, too
                    continue
                seen = Seen()
                reader.subscribe(orders)(seen)
                readers.append((reader, seen))
            for reader, seen in readers:
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=60)
                assert seen.of("w1") == expected


@sync
async def test_a_server_in_the_writer_s_own_process(deployment: Deployment) -> None:
    """One store for a bus and the application: the bus opens and closes it."""
    store = open_store(deployment.database, Registry(STREAMS), settings=QUICK)
    app = catch_up_app(store, STREAMS, secret=SECRET)
    async with deployment.bus(store, writer="w1") as writer, serve(app) as serving:
        expected = await wrote(writer, 1, 2)
        source = HttpSource(serving.url, STREAMS, QUICK, options=HttpOptions(secret=SECRET, compress=True))
        async with deployment.bus(source, start="earliest") as reader:
            seen = Seen()
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=10)
            assert seen.of("w1") == expected


@sync
async def test_a_writer_of_the_reference_system_is_followed(redis_url: str, bus_name: str) -> None:
    """It speaks RDATA and POSITION without SERVER and NAME, and answers at its own path with three keys, a hundred
    rows at a time (here: three), wherever that cuts a fact."""
    events = Stream("events")
    rows = [(1, ["a"]), (2, ["b"]), (2, ["c"]), (3, ["d"]), (4, ["e"]), (6, ["f"])]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith("/_synapse/replication/get_repl_stream_updates/events/")
        params = dict(pair.split("=") for pair in scope["query_string"].decode().split("&"))
        after, upto = int(params["from_token"]), int(params["upto_token"])
        found = [[token, row] for token, row in rows if after < token <= upto]
        limited = len(found) > 3
        if limited:
            found, upto = found[:3], found[2][0]
        body = orjson.dumps({"updates": found, "upto_token": upto, "limited": limited})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    client = redis.asyncio.Redis.from_url(redis_url)
    async with serve(app) as serving, contextlib.aclosing(client):
        source = ReferenceSource({"master": serving.url}, [events], QUICK)
        given: dict[str, Any] = {"name": bus_name, "streams": [events], "store": source, "settings": QUICK}
        async with busrep.connect(redis_url, start="earliest", **given) as reader:
            seen: list[Any] = []
            reader.subscribe(events)(lambda batch: seen.extend(zip(batch.tokens, batch.rows, strict=True)))
            await until(lambda: reader.link.connected and "events" in reader.reading.core.followed)
            await client.publish(bus_name, b"POSITION events master 4 4")
            await reader.wait_for(events, "master", 4, timeout=10)
            assert seen == rows[:5]
            await client.publish(bus_name, b'RDATA events master 5 ["x"]')  # live
            await reader.wait_for(events, "master", 5, timeout=10)
            await client.publish(bus_name, b"POSITION events master 6 6")  # 6 was lost
            await reader.wait_for(events, "master", 6, timeout=10)
            assert seen == [*rows[:5], (5, ["x"]), rows[5]]


def open_sockets() -> int:
    """Of this process. (SQLite keeps files open a while longer, for their locks.)"""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own, closed by now
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@sync
async def test_readers_are_served_among_strangers_who_are_counted_and_leave_nothing(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong secrets, heads that do not end, nonsense, bodies, other methods, hang-ups; and then all of it is over."""
    path = b"/shop/busrep/replication/v1/state HTTP/1.1\r\nhost: x\r\n"
    right = b"authorization: Bearer " + SECRET.encode() + b"\r\n"
    strangers = {
        "wrong secret": b"GET " + path + b"authorization: Bearer wrong\r\n\r\n",
        "no secret": b"GET " + path + b"\r\n",
        "slow": b"GET " + path,
        "silent": b"",
        "nonsense": b"\x00\x01\x02\r\n\r\n",
        "POST": b"POST " + path + right + b"content-length: 5\r\n\r\nabcde",
        "a body": b"GET " + path + right + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        "too large a head": b"GET " + path + b"x: " + b"y" * 20_000,
    }

    async def one(port: int, sent: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    caplog.set_level(logging.WARNING)
    async with deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 100)
        sockets, tasks = open_sockets(), len(asyncio.all_tasks())
        async with contextlib.AsyncExitStack() as stack:
            store = await stack.enter_async_context(deployment.store())
            service = Starlette()
            app = catch_up_app(store, STREAMS, secret=SECRET)
            service.mount("/shop/busrep", app)
            serving = await stack.enter_async_context(serve(service))
            deployment.port = serving.port
            coming = [asyncio.create_task(one(serving.port, sent)) for sent in strangers.values() for _ in range(10)]
            reader = await stack.enter_async_context(deployment.bus(deployment.url, start="earliest"))
            seen = Seen()
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", expected[-1][0], timeout=20)
            assert seen.of("w1") == expected
            await until(lambda: sum(one.done() for one in coming) == 60)  # the others wait, as slow ones do
            refused = app.state.catch_up.statistics()["refused"]
            assert (refused["unauthorized"], refused["method"]) == (20, 10)
        await asyncio.gather(*coming)
        assert (serving.connections, app.state.catch_up.statistics()["in_flight"]) == (0, 0)
        await until(lambda: open_sockets() <= sockets and len(asyncio.all_tasks()) <= tasks)
    logged = [one for one in caplog.records if one.name.startswith(("busrep.http", "uvicorn"))]
    assert len(logged) < 20, "a stranger fills the log"


@pytest.mark.parametrize("how", ["the client hangs up", "the deadline"])
@sync
async def test_connections_of_the_store_are_given_back(how: str, on_postgres: Deployment) -> None:
    """More questions than there are connections, none of which the database answers: it holds a lock."""
    limits = CatchUpLimits(deadline=20.0 if how == "the client hangs up" else 0.1)

    def waiting(connection: psycopg.Connection[Any]) -> int:
        found = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
        assert found is not None
        return int(found[0])

    async with on_postgres.server(limits=limits) as serving, on_postgres.writer() as writer:
        (fact,) = await wrote(writer, 1)
        url = f"{serving.url}/shop/busrep/replication/get_repl_stream_updates/orders"
        params: dict[str, Any] = {"instance_name": "w1", "from_token": 0, "upto_token": fact[0]}
        options: dict[str, Any] = {"headers": {"authorization": f"Bearer {SECRET}"}, "params": params}
        with psycopg.connect(on_postgres.database) as locking, psycopg.connect(on_postgres.database) as looking:
            looking.autocommit = True
            async with httpx.AsyncClient() as client:
                locking.execute("LOCK TABLE busrep_facts IN ACCESS EXCLUSIVE MODE")
                for _ in range(12):
                    asking = asyncio.create_task(client.get(url, **options))
                    if how == "the client hangs up":
                        await until(lambda: waiting(looking))
                        asking.cancel()
                        await asyncio.wait([asking])
                    else:
                        assert (await asking).json()["code"] == "deadline"
                    await until(lambda: not waiting(looking))
                locking.rollback()
                page = (await client.get(url, **options)).json()
                assert [token for token, _ in page["updates"]] == [fact[0]]


@sync
async def test_a_cache_that_looks_at_paths_alone_costs_no_row(deployment: Deployment) -> None:
    """It answers a question with what another one got: an empty page, say, of somebody who asked for the epoch."""

    class Cache:
        def __init__(self, app: Any) -> None:
            self.app, self.kept, self.told = app, b"", 0

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if "updates" not in scope["path"] or not self.kept or self.told >= 5:
                await self.app(scope, receive, send)
            else:
                self.told += 1
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": self.kept})

    caches: list[Cache] = []

    def wrap(app: Any) -> Cache:
        caches.append(Cache(app))
        return caches[-1]

    async with deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 10)
        async with deployment.server(wrap=wrap) as serving:
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {SECRET}"}) as client:
                half = expected[4][0]
                path = "/shop/busrep/replication/get_repl_stream_updates/orders"
                params = {"instance_name": "w1", "from_token": half, "upto_token": half}
                caches[0].kept = (await client.get(serving.url + path, params=params)).content
            async with deployment.bus(deployment.url, start="earliest") as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=15)
                assert seen.of("w1") == expected
                assert caches[0].told == 5


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_answers_that_are_cut_anywhere_and_connections_that_hang(
    compress: bool, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reader and the server: what has arrived of an answer is nothing, and comes again whole."""
    dice = random.Random(7)
    settings = attrs.evolve(QUICK, fetch_timeout=0.5)
    monkeypatch.setattr(http_server, "COMPRESS_FROM", 0)
    async with deployment.server() as serving, deployment.writer() as writer:
        expected = await wrote(writer, *[1] * 300)
        async with FaultyLink(serving.url, seed=7) as link:
            source = HttpSource(
                link.url + "/shop/busrep", STREAMS, settings, options=HttpOptions(secret=SECRET, compress=compress)
            )
            async with deployment.bus(source, start="earliest", settings=settings) as reader:
                seen = Seen()
                reader.subscribe(orders)(seen)
                for step in range(25):
                    if step % 8 == 3:
                        link.black_hole("from_server")
                        await asyncio.sleep(0.05)
                        link.heal()
                        link.cut()
                    cut = link.cut_after(dice.randrange(1, 900))
                    expected += await wrote(writer, dice.randrange(1, 4))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):  # or nothing more is asked
                            await asyncio.wrap_future(cut)
                link.heal()
                link.cut()
                await reader.wait_for(orders, "w1", expected[-1][0], timeout=20)
                assert seen.of("w1") == expected
                assert link.counts["cut_after"] >= 10
                assert source.client.transport is not None
                pool: Any = source.client.transport._pool
                await until(lambda: all(one.is_idle() for one in pool.connections) and not pool._requests)


@sync
async def test_a_bus_is_closed_while_its_questions_hang(deployment: Deployment) -> None:
    asked, held = asyncio.Event(), asyncio.Event()

    def wrap(app: Any) -> Any:
        async def hang(scope: Scope, receive: Receive, send: Send) -> None:
            if "updates" in scope.get("path", ""):
                asked.set()
                await held.wait()
            await app(scope, receive, send)

        return hang

    async with deployment.writer() as writer:
        await wrote(writer, 1, 1)
        async with deployment.server(wrap=wrap) as serving:
            async with deployment.bus(deployment.url, start="earliest", settings=Settings()) as reader:
                reader.subscribe(orders)(Seen())
                await asked.wait()
                leaving = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - leaving < 4, "it waits for nothing: the least bound is 5 s"
            await until(lambda: serving.connections == 0)
            held.set()


@contextlib.asynccontextmanager
async def copied(deployment: Deployment, tmp_path: Path) -> AsyncIterator[tuple[list[tuple[int, list[int]]], Any, Any]]:
    """Six facts; a store on a copy of the database, where all but the last of them were pruned; and the database's."""
    async with deployment.writer() as writer:
        first = await wrote(writer, *[1] * 6)
    with contextlib.closing(sqlite3.connect(deployment.database[10:])) as source:
        with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as copy:
            source.backup(copy)
    old = Deployment(deployment.redis, deployment.name, f"sqlite:///{tmp_path / 'old.db'}")
    async with old.store() as before, deployment.store() as after:
        assert await before.prune(keep=1) == {("orders", "w1"): first[-2][0]}
        yield first, before, after


@pytest.mark.parametrize("what", ["state", "updates", "replication"])
@sync
async def test_floors_of_one_log_are_not_taken_for_another_s(what: str, deployment: Deployment, tmp_path: Path) -> None:
    """A restore, and two servers behind one address: one on a copy from before it, where more had been pruned. Its
    answers come in between."""
    async with contextlib.AsyncExitStack() as stack:
        first, before, after = await stack.enter_async_context(copied(deployment, tmp_path))
        apps = [catch_up_app(store, STREAMS, secret=SECRET) for store in (before, after)]
        restored = False
        mixed = 0

        async def balanced(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal mixed
            if restored and what in scope["path"]:
                mixed += 1
                await apps[mixed % 2 if mixed < 6 else 1](scope, receive, send)
            else:
                await apps[restored](scope, receive, send)

        serving = await stack.enter_async_context(serve(balanced))
        source = HttpSource(serving.url, STREAMS, QUICK, options=HttpOptions(secret=SECRET))
        reader = await stack.enter_async_context(deployment.bus(source, start="earliest"))
        seen = Seen()
        reader.subscribe(orders)(seen)
        await reader.wait_for(orders, "w1", first[-1][0], timeout=10)
        assert seen.of("w1") == first[-1:]
        await after.restored()
        restored = True
        writer = await stack.enter_async_context(deployment.writer())
        later = await wrote(writer, 1)
        await until(lambda: reader.statistics()["reader"]["epoch_changes"] >= 1)
        await reader.wait_for(orders, "w1", later[-1][0], timeout=15)
        assert seen.of("w1")[-7:] == first + later


class Balanced(HttpSource):
    """Asks one server, but ``stale`` for the next few answers to each question."""

    stale: HttpSource

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.left: collections.Counter[str] = collections.Counter()

    def _asked(self, question: str) -> HttpSource | None:
        self.left[question] -= 1
        return self.stale if self.left[question] >= 0 else None

    async def known(self, epoch: str | None = None) -> list[KnownWriter]:
        stale = self._asked("known")
        return await (super().known(epoch) if stale is None else stale.known(epoch))

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        stale = self._asked("fetch")
        return await (super().fetch(question) if stale is None else stale.fetch(question))


@pytest.mark.parametrize("begins", ["in the new log", "in the old one"])
@pytest.mark.parametrize("question", ["known", "fetch"])
@sync
async def test_where_a_reader_begins_is_of_the_log_that_it_reads(
    question: str, begins: str, deployment: Deployment, tmp_path: Path
) -> None:
    """The same; the copy gives the next answers to this question, whoever asks it. It tells of a floor, and would have
    the rows below it left out: they are in the new log."""
    async with copied(deployment, tmp_path) as (first, before, after), contextlib.AsyncExitStack() as stack:
        apps = [catch_up_app(store, STREAMS, secret=SECRET) for store in (before, after)]
        servings = [await stack.enter_async_context(serve(app)) for app in apps]
        options = HttpOptions(secret=SECRET)
        balanced = Balanced(servings[1].url, STREAMS, QUICK, options=options)
        stale = HttpSource(servings[0].url, STREAMS, QUICK, options=options)
        balanced.stale = await stack.enter_async_context(opened(stale))
        seen, reader = Seen(), deployment.bus(balanced, start="earliest")
        if begins == "in the old one":
            await stack.enter_async_context(reader)
            reader.subscribe(orders)(seen)
            await reader.wait_for(orders, "w1", first[-1][0], timeout=10)
            assert seen.of("w1") == first
            seen.facts.clear()
        await after.restored()
        writer = await stack.enter_async_context(deployment.writer())
        later = await wrote(writer, 1)
        balanced.left[question] = 3
        if begins == "in the new log":
            await stack.enter_async_context(reader)
            reader.subscribe(orders)(seen)
        await reader.wait_for(orders, "w1", later[-1][0], timeout=30)
        await until(lambda: balanced.left[question] < 0)  # on a busy machine some of the answers come only now
        more = await wrote(writer, 1)
        await reader.wait_for(orders, "w1", more[-1][0], timeout=30)
        assert seen.of("w1") == first + later + more


@sync
async def test_several_servers_behind_one_address_one_of_them_lagging(
    redis_url: str, bus_name: str, pair: test_replica.Pair
) -> None:
    """In turns, as a load balancer does it, and for each kind of request by itself: between two pages an odd number of
    other requests may come each time. What the replica does not have yet it does not prove."""
    async with contextlib.AsyncExitStack() as stack:
        apps = []
        for store in await stack.enter_async_context(pair.stores()):
            apps.append(catch_up_app(store, STREAMS, secret=SECRET))

        asked: collections.Counter[str] = collections.Counter()

        async def balanced(scope: Scope, receive: Receive, send: Send) -> None:
            kind = f"{scope.get('path')} {b'sequence=' in scope.get('query_string', b'')}"
            asked[kind] += 1
            await apps[asked[kind] % 2](scope, receive, send)

        serving = await stack.enter_async_context(serve(balanced))
        deployment = Deployment(redis_url, bus_name, pair.primary)
        writer = await stack.enter_async_context(deployment.writer())
        expected = await wrote(writer, *[1] * 10)
        pair.catch_up()
        pair.pause()
        expected += await wrote(writer, *[1] * 20, 9)
        source = HttpSource(serving.url, STREAMS, QUICK, options=HttpOptions(secret=SECRET))
        reader = await stack.enter_async_context(deployment.bus(source, start="earliest"))
        seen = Seen()
        reader.subscribe(orders)(seen)
        await reader.wait_for(orders, "w1", expected[-1][0], timeout=20)
        assert reader.statistics()["reader"]["pages_unproven"] >= 1
        pair.resume()
        expected += await wrote(writer, 2)
        await reader.wait_for(orders, "w1", expected[-1][0], timeout=20)
        assert seen.of("w1") == expected
        assert reader.statistics()["reader"]["epoch_changes"] == 0


# -- with busrep serve alone ------------------------------------------------------------------------------------------

READER = """
import asyncio, json, sys
import attrs, busrep

@attrs.frozen
class Order:
    number: int
    text: str

orders = busrep.Stream("orders", Order)
name, news, rows = sys.argv[1:]
quick = busrep.Settings(heartbeat=0.1, retry_min=0.02, retry_max=0.2)

async def main():
    async with busrep.connect(news, name=name, streams=[orders], store=rows, start="earliest", settings=quick) as bus:
        async for batch in bus.follow(orders):
            for token, found in batch.facts():
                print(json.dumps([token, [row.number for row in found]]), flush=True)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def busrep_serve(folder: Path, deployment: Deployment, tcp: int, http: int, how: str) -> AsyncIterator[Any]:
    """The command; ended by the signal that is named."""
    arguments = ["serve", "--json", "--name", deployment.name, "--redis", deployment.redis, "--heartbeat", "100ms"]
    arguments += ["--store", deployment.database, "--secret-file", "secret"]
    async with program(folder, "-m", "busrep.cli", *arguments, "--tcp", str(tcp), "--http", str(http)) as process:
        assert process.stdout is not None
        listening = orjson.loads(await process.stdout.readline())
        assert listening.keys() == {"listening"}
        yield process
        process.send_signal(getattr(signal, how))
        said = await process.stdout.read()
        status = await process.wait()
        if how == "SIGTERM":
            assert status == 0
            assert orjson.loads(said)["http"]["rows"] >= 1


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
@sync
async def test_a_process_with_neither_redis_nor_database(how: str, deployment: Deployment, tmp_path: Path) -> None:
    """Commands over TCP, rows over HTTP, both from `busrep serve`, which goes away in between."""
    tcp, http = free_port(), free_port()
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "reader.py").write_text(READER)
    got: list[Any] = []

    async def listen(process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            got.append(orjson.loads(line))

    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(deployment.writer())
        expected = await wrote(writer, *[1] * 20, 9)
        async with busrep_serve(tmp_path, deployment, tcp, http, how):
            urls = [f"tcp://:s3cret@127.0.0.1:{tcp}", f"http://:s3cret@127.0.0.1:{http}"]
            reading = await stack.enter_async_context(program(tmp_path, "reader.py", deployment.name, *urls))
            listening = asyncio.create_task(listen(reading))
            stack.callback(listening.cancel)
            await until(lambda: len(got) == len(expected))
            expected += await wrote(writer, 2, 1)  # live
            await until(lambda: len(got) == len(expected))
        expected += await wrote(writer, *[1] * 15, 8)  # heard by nobody
        async with busrep_serve(tmp_path, deployment, tcp, http, how):
            expected += await wrote(writer, 1, 3)
            await until(lambda: len(got) >= len(expected))
            assert got == [list(fact) for fact in expected]
            assert reading.returncode is None


@sync
async def test_a_reader_that_dies_with_the_server_goes_on_where_it_was(deployment: Deployment, tmp_path: Path) -> None:
    """The same with a name: its positions are in a file of its own, the only thing that it has besides two ports."""
    tcp, http = free_port(), free_port()
    (tmp_path / "secret").write_text("s3cret\n")
    own = f"sqlite:///{tmp_path / 'reader.db'}"
    await open_store(own, Registry(STREAMS)).init()
    seen = Seen()
    expected: list[tuple[int, list[int]]] = []
    options = {"redis": f"tcp://:s3cret@127.0.0.1:{tcp}", "reader": "billing", "reader_store": own}
    async with deployment.writer() as writer:
        for _ in range(3):
            expected += await wrote(writer, *[1] * 15)
            async with busrep_serve(tmp_path, deployment, tcp, http, "SIGKILL"):
                expected += await wrote(writer, 2)
                async with deployment.bus(f"http://:s3cret@127.0.0.1:{http}", **options) as reader:
                    reader.subscribe(orders)(seen)
                    await reader.wait_for(orders, "w1", expected[-1][0], timeout=15)
            assert seen.of("w1") == expected


# -- the page about it ----------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "http.md"
SHOP = """
import attrs, busrep

@attrs.frozen
class OrderChanged:
    order: int
    state: str

orders = busrep.Stream("orders", OrderChanged)
"""


def files_of(page: Path, changes: dict[str, str]) -> dict[str, str]:
    found = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL))
    for name, text in found.items():
        for old, new in changes.items():
            text = text.replace(old, new)
        found[name] = text
    return found


@contextlib.asynccontextmanager
async def program(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "SHOP_SECRET": "SECRET", "PYTHONPATH": f"{folder}:{PAGE.parent.parent}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=folder, env=environment, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.kill()
        await process.wait()


@pytest.mark.parametrize("server", ["service", "alone"])
@sync
async def test_the_programs_of_the_page_run(server: str, redis_url: str, bus_name: str, tmp_path: Path) -> None:
    port = free_port()
    changes = {
        "redis://localhost:6379": redis_url,
        'name="shop"': f'name="{bus_name}"',
        "localhost:8080": f"127.0.0.1:{port}",
        '"127.0.0.1", 8080': f'"127.0.0.1", {port}',
    }
    if server == "alone":
        changes[f"{port}/busrep"] = str(port)
    files = files_of(PAGE, changes)
    assert files.keys() == {"service.py", "alone.py", "reader.py"}
    for name, text in {**files, "shop.py": SHOP}.items():
        (tmp_path / name).write_text(text)
    shop: dict[str, Any] = {}
    exec(SHOP, shop)
    store = f"sqlite:///{tmp_path / 'shop.db'}"
    await open_store(store, Registry([shop["orders"]])).init()
    options = {"name": bus_name, "streams": [shop["orders"]], "store": store, "writer": "web-2"}
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(busrep.connect(redis_url, **options))
        await writer.publish(shop["orders"], [shop["OrderChanged"](1, "paid")])
        if server == "alone":
            serving = await stack.enter_async_context(program(tmp_path, "alone.py"))
            assert serving.stdout is not None
            assert (await serving.stdout.readline()).startswith(b"serving at")
        else:
            arguments = ["-m", "uvicorn", "service:app", "--port", str(port), "--log-level", "error"]
            await stack.enter_async_context(program(tmp_path, *arguments))
            await until(lambda: _answers(port))
        reading = await stack.enter_async_context(program(tmp_path, "reader.py"))
        assert reading.stdout is not None
        assert await reading.stdout.readline() == b"web-2 [OrderChanged(order=1, state='paid')]\n"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
