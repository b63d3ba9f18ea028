"""The reference system's answers over HTTP: made by hand as they were described, and the rows of its channel."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import redis.asyncio

import busrep
from busrep import Settings, Stream
from busrep.asyncio import ReferenceSource
from busrep.core.catchup import FetchUpdates
from busrep.errors import ConfigError, Unavailable
from busrep.http.client import HttpOptions
from busrep.http.pages import read_reference_page
from busrep.http.serve import serve
from busrep.http.server import catch_up_app
from busrep.options import BusOptions
from busrep.stores import open_store
from busrep.stores.interface import AsyncStore
from busrep.streams import Registry
from tests import DATA
from tests.asyncio.bootstraps import until
from tests.asyncio.test_captures import messages
from tests.stores.store_conformance import sync

from .test_server import SECRET, STREAMS, memory_store
from .test_source import EPOCH, Peer

CASES = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "reference").glob("*.json"))}
QUICK = Settings(heartbeat=0.2, retry_min=0.01, retry_max=0.1, save_every=0.05)
events = Stream("events")


def asked_in(case: dict[str, Any]) -> FetchUpdates:
    question = case["question"]
    return FetchUpdates(case["stream"], question["instance_name"], question["from_token"], question["upto_token"])


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "page" in case])
def test_an_answer_of_the_reference_system_is_taken(name: str) -> None:
    case, asked = CASES[name], asked_in(CASES[name])
    page = read_reference_page(json.dumps(case["answer"]).encode(), asked, EPOCH)
    ends = {"first": page.tokens[0], "last": page.tokens[-1]} if page.tokens else {"first": None, "last": None}
    assert {"rows": len(page.tokens), **ends, "upto": page.upto, "limited": page.limited} == case["page"]
    updates = [(token, row) for token, row in case["answer"]["updates"] if token <= page.upto]
    assert list(zip(page.tokens, map(json.loads, page.payloads), strict=True)) == updates
    assert (page.stream, page.writer, page.after, page.epoch) == (asked.stream, asked.writer, asked.after, EPOCH)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "error" in case])
def test_an_answer_that_leads_nowhere_is_refused(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ValueError, match=case["error"]):
        read_reference_page(json.dumps(case["answer"]).encode(), asked_in(case), EPOCH)


# -- the source ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def reference_peer(writers: str = "w1", **given: Any) -> AsyncIterator[tuple[ReferenceSource, Peer]]:
    answering = Peer(**given)
    async with serve(answering) as serving:
        source = ReferenceSource(
            dict.fromkeys(writers.split(), serving.url), STREAMS, QUICK, options=HttpOptions(secret=SECRET)
        )
        await source.open()
        try:
            yield source, answering
        finally:
            await source.close()


def test_it_has_all_that_a_store_has() -> None:
    names = {name for name in vars(AsyncStore) if not name.startswith("_")}
    assert {name for name in names if not hasattr(ReferenceSource, name)} == set()


@sync
async def test_the_reference_systems_own_endpoint_is_followed() -> None:
    """Against our own server, which answers as it does."""
    async with memory_store() as store:
        app = catch_up_app(store, STREAMS, secret=SECRET, reference_paths=True)
        async with serve(app) as serving:
            source = ReferenceSource({"w1": serving.url}, STREAMS, QUICK, options=HttpOptions(secret=SECRET))
            await source.open()
            assert await source.known() == []
            assert await source.sequence("orders") is await source.newest("orders") is None
            epoch = await source.epoch()
            assert len(epoch) == 32
            page = await source.fetch(FetchUpdates("orders", "w1", 0, 9))
            assert (list(page.tokens), page.upto, page.limited, page.epoch) == ([1, 2, 2, 3, 4], 4, False, epoch)
            page = await source.fetch(FetchUpdates("orders", "w1", 9, 9))
            assert (list(page.tokens), page.upto, page.epoch) == ([], 9, epoch)
            await source.close()


@sync
async def test_each_writer_is_asked_at_its_own_address() -> None:
    """One source asked for two writers would deliver the rows of one as the other's."""
    one = Peer(body=b'{"updates": [[4, ["one"]]], "upto_token": 5, "limited": false}')
    two = Peer(body=b'{"updates": [[5, ["two"]]], "upto_token": 5, "limited": false}')
    async with serve(one) as serving_one, serve(two) as serving_two:
        source = ReferenceSource({"w1": serving_one.url, "w2": serving_two.url}, STREAMS, QUICK)
        await source.open()
        for writer, peer, payload in (("w1", one, b'["one"]'), ("w2", two, b'["two"]')):
            page = await source.fetch(FetchUpdates("orders", writer, 3, 5))
            assert (page.writer, list(page.payloads)) == (writer, [payload])
            assert peer.requests[-1]["query_string"] == b"instance_name=%b&from_token=3&upto_token=5" % writer.encode()
        with pytest.raises(ConfigError, match=r"no address is known of writer 'w3'.*ReferenceSource\(\{'w3': url"):
            await source.fetch(FetchUpdates("orders", "w3", 3, 5))
        assert len(one.requests) + len(two.requests) == 2
        await source.close()


@sync
async def test_a_question_has_a_transaction_of_its_own() -> None:
    body = b'{"updates": [], "upto_token": 5, "limited": false}'
    async with reference_peer(body=body) as (source, answering):
        for _ in range(2):
            await source.fetch(FetchUpdates("orders", "w1", 3, 5))
        paths = [scope["path"].rpartition("/") for scope in answering.requests]
        assert {path for path, _, _ in paths} == {"/_synapse/replication/get_repl_stream_updates/orders"}
        assert len({transaction for _, _, transaction in paths}) == 2


@sync
async def test_a_fact_that_may_be_cut_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """A page of nothing but one fact, of no more rows than a page has: it is taken, or the pair would stay stale."""

    def body(rows: int) -> bytes:
        return json.dumps({"updates": [[4, ["a"]]] * rows, "upto_token": 4, "limited": True}).encode()

    async with reference_peer(body=body(100)) as (source, answering):
        assert len((await source.fetch(FetchUpdates("orders", "w1", 3, 9))).tokens) == 100
        assert "(orders, w1): 100 rows of 4 fill a page" in caplog.text
        caplog.clear()
        answering.body = body(120)
        assert len((await source.fetch(FetchUpdates("orders", "w1", 3, 9))).tokens) == 120
        assert caplog.text == ""


@sync
async def test_an_answer_that_proves_nothing_is_refused() -> None:
    async with reference_peer(body=b'{"updates": [[4, ["a"]]], "upto_token": 3, "limited": true}') as (source, _):
        with pytest.raises(Unavailable, match="upto_token 3 is below the last row, 4"):
            await source.fetch(FetchUpdates("orders", "w1", 2, 9))


def test_the_log_is_the_same_as_long_as_its_name_is() -> None:
    """Addresses change: a reader's saved positions must not be thrown out for that."""

    def epoch(writers: dict[str, str], **options: Any) -> str:
        return asyncio.run(ReferenceSource(writers, STREAMS, **options).epoch())

    before = epoch({"w1": "http://one.test:1"})
    assert epoch({"w1": "http://other.test:2", "w2": "http://two.test:1"}) == before
    assert epoch({"w1": "http://one.test:1"}, log="restored in May") != before


def test_what_names_no_writer_is_refused() -> None:
    for writers in ({}, "http://one.test:1"):
        with pytest.raises(ConfigError, match=r"\{writer: url, ...\}"):
            ReferenceSource(writers, STREAMS)  # type: ignore[arg-type]


def test_it_only_reads() -> None:
    source = ReferenceSource({"w1": "http://one.test:1"}, STREAMS)
    for asked in ({"writer": "w2"}, {"reader": "r"}, {"on_poison": "dead_letter"}):
        with pytest.raises(ConfigError, match="writes, and .* can only be read"):
            BusOptions(name="shop", streams=STREAMS, store=source, **asked)  # type: ignore[arg-type]


# -- a reader over HTTP alone ----------------------------------------------------------------------------------

Key = tuple[str, str]
Row = tuple[int, str]


@attrs.define
class Capture:
    """What a reader of the channel is given, straight from the text: per (stream, writer) where it begins, its rows in
    order, and those of them that come after the stream was reset."""

    starts: dict[Key, int] = attrs.field(factory=dict)
    rows: dict[Key, list[Row]] = attrs.field(factory=dict)
    positions: dict[Key, int] = attrs.field(factory=dict)

    @classmethod
    def read(cls, sent: list[str]) -> Capture:
        found, batches = cls(), dict[Key, list[str]]()
        at = found.positions
        for line in sent:
            command, stream, writer, *rest = line.split(" ", 4)
            key = (stream, writer)
            if command == "POSITION":
                prev, new = int(rest[0]), int(rest[1])
                batches.pop(key, None)
                if key not in found.starts or new < at[key]:
                    assert prev == new or key in found.starts
                    found.starts[key], found.rows[key] = new, []
                at[key] = new
            elif command == "RDATA" and rest[0] == "batch":
                batches.setdefault(key, []).append(rest[1])
            elif command == "RDATA":
                token, rows = int(rest[0]), [*batches.pop(key, []), rest[1]]
                if token > at.get(key, token):
                    found.rows[key] += [(token, row) for row in rows]
                    at[key] = token
        return found


@attrs.define
class Reference:
    """One process of the reference system: answers for its rows as it does, a hundred at a time more or less.

    ``pages``: how often an answer was of which kind.
    """

    writer: str
    rows: dict[Key, list[Row]]
    pages: dict[str, int] = attrs.field(factory=dict)

    def answer(self, stream: str, after: int, upto: int) -> dict[str, Any]:
        """What it says to a question."""
        every = [row for row in self.rows.get((stream, self.writer), []) if row[0] > after]
        found = [row for row in every if row[0] <= upto]
        if len(found) <= 100:
            if len(every) > len(found) and after % 2:  # it goes on behind what was asked for
                return self._page("beyond", every[: len(found) + 20], every[: len(found) + 20][-1][0], limited=False)
            return self._page("whole", found, upto, limited=False)
        if found[0][0] == found[100][0]:
            fact = [row for row in found if row[0] == found[0][0]]
            return self._page("one fact", fact, fact[0][0], limited=True)
        last = found[99][0]
        if found[100][0] > last + 1 and after % 2:
            return self._page("above", found[:100], found[100][0] - 1, limited=True)
        return self._page("cut", found[:100], last, limited=True)

    def _page(self, kind: str, rows: list[Row], upto: int, *, limited: bool) -> dict[str, Any]:
        self.pages[kind] = self.pages.get(kind, 0) + 1
        return {"updates": [[token, json.loads(row)] for token, row in rows], "upto_token": upto, "limited": limited}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        params = dict(pair.split("=") for pair in scope["query_string"].decode().split("&"))
        stream, _, _ = scope["path"].removeprefix("/_synapse/replication/get_repl_stream_updates/").partition("/")
        # It answers for itself, whoever was meant.
        body = json.dumps(self.answer(stream, int(params["from_token"]), int(params["upto_token"]))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


@attrs.define
class Seen:
    """Rows as a handler gets them."""

    rows: dict[Key, list[Row]] = attrs.field(factory=dict)

    def __call__(self, batch: busrep.Batch[Any]) -> None:
        texts = [json.dumps(row, ensure_ascii=False) for row in batch.rows]
        self.rows.setdefault((batch.stream.name, batch.writer), []).extend(zip(batch.tokens, texts, strict=True))

    def reset(self, stream: str, writer: str, position: int) -> None:
        """See ``bus.on_reset``."""
        self.rows.pop((stream, writer), None)


def compact(rows: dict[Key, list[Row]]) -> dict[Key, list[Row]]:
    """Rows of each (stream, writer) that has any, their JSON as `Seen` writes it."""
    return {
        key: [(token, json.dumps(json.loads(row), ensure_ascii=False)) for token, row in found]
        for key, found in rows.items()
        if found
    }


def with_a_large_fact(sent: list[str]) -> list[str]:
    """One more fact behind them: the state of a new room, 120 rows."""
    end = max(int(line.split(" ")[4]) for line in sent if line.startswith("POSITION events event_persister1 "))
    end = max(end, *(int(t) for line in sent if line.startswith("RDATA events event_persister1 ")
                     and (t := line.split(" ")[3]) != "batch"))  # fmt: skip
    prefix, rows = "RDATA events event_persister1", [f'["state",["!new:example.test",{n}]]' for n in range(120)]
    return [*sent, *(f"{prefix} batch {row}" for row in rows[:-1]), f"{prefix} {end + 7} {rows[-1]}"]


async def publish_all(client: redis.asyncio.Redis, channel: str, lines: list[str]) -> None:
    for start in range(0, len(lines), 500):
        async with client.pipeline(transaction=False) as pipe:
            for line in lines[start : start + 500]:
                pipe.publish(channel, line)
            await pipe.execute()


@pytest.mark.servers
@sync
async def test_a_reader_over_http_alone_ends_where_a_reader_of_the_channel_does(redis_url: str, bus_name: str) -> None:
    """One hears every row, the other only how far each writer is, at three points on the way."""
    lines = [message["data"] for message in messages() if message["data"].startswith(("RDATA ", "POSITION "))]
    lines = with_a_large_fact([line for line in lines if line.split(" ", 2)[1] != "typing"])
    capture = Capture.read(lines)
    names = sorted({stream for stream, _ in capture.starts})
    writers = {writer: Reference(writer, capture.rows) for _, writer in sorted(capture.starts)}
    starts: dict[str, dict[str, int]] = {}
    for (stream, writer), at in capture.starts.items():
        starts.setdefault(stream, {})[writer] = at
    channel, over_http = Seen(), Seen()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(contextlib.aclosing(redis.asyncio.Redis.from_url(redis_url)))
        urls = {name: (await stack.enter_async_context(serve(app))).url for name, app in writers.items()}
        streams = [Stream(name, resettable=True) for name in names]
        listening = await stack.enter_async_context(
            busrep.connect(redis_url, name=f"{bus_name}a", streams=streams, settings=QUICK)
        )
        for stream in streams:
            listening.subscribe(stream)(channel)
        durable = [Stream(name) for name in names]
        fetching = await stack.enter_async_context(
            busrep.connect(
                redis_url,
                name=f"{bus_name}b",
                streams=durable,
                store=ReferenceSource(urls, durable, QUICK),
                start=starts,
                settings=QUICK,
            )
        )
        for stream in durable:
            fetching.subscribe(stream)(over_http)
        await until(lambda: listening.statistics()["link"]["connected"] and fetching.statistics()["link"]["connected"])
        await until(lambda: fetching.positions() == starts)
        await publish_all(client, f"{bus_name}a", lines)
        for part in (3, 2, 1):
            positions = Capture.read(lines[: len(lines) // part]).positions
            told = [f"POSITION {stream} {writer} {at} {at}" for (stream, writer), at in positions.items()]
            await publish_all(client, f"{bus_name}b", told)
            await until(
                lambda expected=positions: all(  # type: ignore[misc]
                    fetching.positions().get(stream, {}).get(writer) == at for (stream, writer), at in expected.items()
                ),
                timeout=60,
            )
        await until(lambda: sum(map(len, channel.rows.values())) == sum(map(len, capture.rows.values())), timeout=60)
        expected = compact(capture.rows)
        assert channel.rows == expected
        assert over_http.rows == expected
        found = fetching.statistics()["reader"]
        assert found["rows_received"] == found["missed"] == 0
        assert {"whole", "cut", "above", "beyond", "one fact"} <= {
            kind for one in writers.values() for kind in one.pages
        }


# -- where a reader begins -------------------------------------------------------------------------------------

ROWS: dict[Key, list[Row]] = {
    ("events", writer): [(token, f'["{writer} {token}"]') for token in range(first, 30, 2)]
    for writer, first in (("w1", 1), ("w2", 2))
}
START = {
    "now": ("now", {"w1": 20, "w2": 20}),
    "by default": (None, {"w1": 20, "w2": 20}),
    "earliest": ("earliest", {"w1": 0, "w2": 0}),
    "a map": ({"events": {"w1": 15}}, {"w1": 15, "w2": 0}),
}


@contextlib.asynccontextmanager
async def followed(redis_url: str, name: str, **options: Any) -> AsyncIterator[tuple[busrep.Bus, Seen, Any]]:
    """A bus that follows both writers of `ROWS`, what its handler gets, and a function that publishes lines."""
    stream, prepare = options.pop("stream", events), options.pop("prepare", lambda bus, stream: None)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(contextlib.aclosing(redis.asyncio.Redis.from_url(redis_url)))
        urls = {
            writer: (await stack.enter_async_context(serve(Reference(writer, ROWS)))).url for writer in ("w1", "w2")
        }
        source = ReferenceSource(urls, [stream], QUICK)
        given = {"name": name, "streams": [stream], "store": source, "settings": QUICK, **options}
        bus = await stack.enter_async_context(busrep.connect(redis_url, **given))
        seen = Seen()
        prepare(bus, stream)
        bus.on_reset(stream)(seen.reset)
        bus.subscribe(stream)(seen)
        link = bus.statistics
        await until(lambda: link()["link"]["connected"] and "events" in bus.reading.core.followed)

        async def say(*lines: str) -> None:
            await publish_all(client, name, list(lines))

        yield bus, seen, say


def rows_above(starts: dict[str, int], upto: int) -> dict[Key, list[Row]]:
    return compact({(s, w): [row for row in rows if starts[w] < row[0] <= upto] for (s, w), rows in ROWS.items()})


@pytest.mark.servers
@pytest.mark.parametrize("name", START)
@sync
async def test_a_reader_begins_where_it_is_told_to(name: str, redis_url: str, bus_name: str) -> None:
    """Now is where each writer is when it is first heard: the source tells no positions."""
    start, begins = START[name]
    async with followed(redis_url, bus_name, start=start) as (bus, seen, say):
        await say('RDATA events w1 19 ["unknown what was before it"]', "POSITION events w1 20 20")
        await say("POSITION events w2 18 20")
        await until(lambda: bus.positions() == {"events": {"w1": 20, "w2": 20}})
        assert seen.rows == rows_above(begins, 20)
        await say("POSITION events w1 28 28", "POSITION events w2 28 28")
        await until(lambda: bus.positions() == {"events": {"w1": 28, "w2": 28}})
        assert seen.rows == rows_above(begins, 28)


@pytest.mark.servers
@sync
async def test_a_durable_reader_that_began_now_goes_on_from_there(
    redis_url: str, bus_name: str, sqlite_url: str
) -> None:
    """Where it began is saved, also when no row has come since."""
    options = {"start": "now", "reader": "r1", "reader_store": sqlite_url}
    await open_store(sqlite_url, Registry([events])).init()
    registered: list[dict[Key, int]] = []

    def watch(bus: busrep.Bus, _: Stream[Any]) -> None:
        store = bus.reading.reader_store
        register = store.register_reader

        async def noted(reader: str, positions: dict[Key, int], *rest: Any, **options: Any) -> None:
            registered.append(positions)
            await register(reader, positions, *rest, **options)

        store.register_reader = noted

    async with followed(redis_url, bus_name, prepare=watch, **options) as (bus, seen, say):
        await say("POSITION events w1 20 20")
        await until(lambda: bus.positions() == {"events": {"w1": 20}})
    assert seen.rows == {}
    # At once: a process that is killed before it saves again goes on from there, too.
    assert {one["events", "w1"] for one in registered if ("events", "w1") in one} == {20}
    async with followed(redis_url, bus_name, **options) as (bus, seen, say):
        await until(lambda: bus.positions() == {"events": {"w1": 20}})
        await say("POSITION events w1 28 28", "POSITION events w2 28 28")
        await until(lambda: bus.positions() == {"events": {"w1": 28, "w2": 28}})
        assert seen.rows == rows_above({"w1": 20, "w2": 0}, 28)  # w2 joined after those that were saved


# -- streams kept in memory ------------------------------------------------------------------------------------


@pytest.mark.servers
@sync
async def test_a_resettable_stream_is_fetched_from_its_writer(redis_url: str, bus_name: str) -> None:
    """What a link that was down has cost, and after a reset all of the new life."""
    stream = Stream("events", resettable=True)
    async with followed(redis_url, bus_name, start="earliest", stream=stream) as (bus, seen, say):
        await say("POSITION events w1 10 10")
        await until(lambda: bus.positions() == {"events": {"w1": 10}})
        await say("POSITION events w1 20 20")
        await until(lambda: bus.positions() == {"events": {"w1": 20}})
        everything = rows_above({"w1": 0, "w2": 99}, 20)
        assert seen.rows == everything
        assert bus.statistics()["reader"]["missed"] == 0
        await say("POSITION events w1 6 6")  # it was restarted
        await until(lambda: bus.positions() == {"events": {"w1": 6}})
        assert seen.rows == rows_above({"w1": 0, "w2": 99}, 6)


@pytest.mark.servers
@sync
async def test_positions_of_a_resettable_stream_are_not_saved(redis_url: str, bus_name: str, sqlite_url: str) -> None:
    """Its tokens mean nothing once its writer is another process."""
    stream = Stream("events", resettable=True)
    options = {"reader": "r1", "reader_store": sqlite_url, "stream": stream}
    store = open_store(sqlite_url, Registry([events]))
    await store.init()
    await store.open()
    for _ in range(2):
        async with followed(redis_url, bus_name, **options) as (bus, seen, say):
            await say("POSITION events w1 10 10")
            await until(lambda: bus.positions() == {"events": {"w1": 10}})
            await bus.reading.saver.save()
            assert seen.rows == rows_above({"w1": 0, "w2": 99}, 10)
            assert (await store.load_reader("r1")).positions == {}
    await store.close()
