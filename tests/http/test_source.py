"""The reading half of catch-up over HTTP: what it takes, what it tries again, and what it does not believe."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import attrs
import orjson
import pytest

import busrep
import busrep.sync
from busrep import Settings
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.fields import json_bytes
from busrep.core.snapshots import SnapshotSource
from busrep.errors import ConfigError, PositionTooOld, Unavailable, UnknownStream
from busrep.http import client as http_client
from busrep.http import server as http_server
from busrep.http.client import HttpOptions
from busrep.http.pages import CatchUpState, write_page, write_state
from busrep.http.serve import serve
from busrep.http.server import catch_up_app
from busrep.http.source import HttpSource
from busrep.stores.interface import FactLog, FactSource, KnownWriter, ReaderPositions, provides
from busrep.stores.memory import MemoryStore
from busrep.streams import Registry, Stream
from tests import DATA
from tests.stores.store_conformance import sync, write

from .test_pages import LIES
from .test_server import SECRET, STREAMS, memory_store, odd, orders, typing

EPOCH = "0123456789abcdef" * 2
QUICK = Settings(retry_min=0.001, retry_max=0.002, fetch_timeout=5.0)
ASKED = FetchUpdates("orders", "w1", 3, 10, 2)


def source_of(url: str, streams: Any = (orders,), **options: Any) -> HttpSource:
    return HttpSource(url, list(streams), options.pop("settings", QUICK), HttpOptions(**{"secret": SECRET, **options}))


@contextlib.asynccontextmanager
async def opened(url: str, *streams: Stream[Any], **options: Any) -> AsyncIterator[HttpSource]:
    source = source_of(url, streams or (orders,), **options)
    await source.open()
    try:
        yield source
    finally:
        await source.close()


@attrs.define
class Peer:
    """A server that answers pages with ``body`` and so on, the questions about its state honestly."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    state: bytes = attrs.field(factory=lambda: write_state(CatchUpState(EPOCH, ["orders"], [])))
    failures: int | None = None  # so many answers are ``status``, then 200
    hold: asyncio.Event | None = None
    requests: list[dict[str, Any]] = attrs.field(factory=list)
    of_pages: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(scope)
        status, body, headers = 200, self.state, {}
        if "get_repl_stream_updates" in scope["path"]:
            self.of_pages += 1
            if self.hold is not None:
                await self.hold.wait()
            failing = self.failures is None or self.of_pages <= self.failures
            status, body, headers = (self.status if failing else 200), self.body, self.headers
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


HONEST = write_page(UpdatesPage("orders", "w1", 3, 10, [4, 5], [b"[1]", b"[2]"], False, EPOCH))


@contextlib.asynccontextmanager
async def peer(**given: Any) -> AsyncIterator[tuple[HttpSource, Peer]]:
    options = given.pop("options", {})
    answering = Peer(**{"body": HONEST, **given})
    async with serve(answering) as serving, opened(serving.url, **options) as source:
        yield source, answering


# -- what it is like a store ----------------------------------------------------------------------------------


def test_what_it_is_asked_for() -> None:
    source = source_of("http://127.0.0.1:1")
    assert provides(source, FactSource)
    assert provides(source, SnapshotSource)
    assert not provides(source, FactLog)
    assert not provides(source, ReaderPositions)


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_it_answers_as_the_store_does(compress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "COMPRESS_FROM", 0)
    async with memory_store() as store:
        app = catch_up_app(store, STREAMS, secret=SECRET)
        async with serve(app) as serving, opened(serving.url, *STREAMS, compress=compress) as source:
            assert await source.epoch() == await store.epoch()
            assert await source.sequence("orders") == await store.sequence("orders") == 4
            newest = await source.newest("orders")
            assert newest == await store.newest("orders")
            assert newest is not None
            known = [attrs.evolve(one, silent_for=0) for one in await store.known()]
            assert [attrs.evolve(one, silent_for=0) for one in await source.known()] == known
            for question in (
                FetchUpdates("orders", "w1", 0, 4),
                FetchUpdates("orders", "w1", 0, 4, 1),
                FetchUpdates("orders", "w1", 1, 4, 1),
                FetchUpdates("orders", "w1", 4, 4),
                FetchUpdates("orders", "w1", 2, 2**63 - 1),
                FetchUpdates("orders", "nobody", 0, 4),
                FetchUpdates("payments", "w2", 0, 4),
            ):
                expected = await store.fetch(question)
                found = await source.fetch(question)
                lists = {"tokens": list(found.tokens), "payloads": list(found.payloads)}
                assert attrs.evolve(found, **lists) == expected
            await store.prune(keep=1)
            with pytest.raises(PositionTooOld) as caught:
                await source.fetch(FetchUpdates("orders", "w1", 2, 4))
            assert (caught.value.position, caught.value.floor, caught.value.writer) == (2, 3, "w1")
            with pytest.raises(UnknownStream):
                await source.fetch(FetchUpdates("nothing", "w1", 2, 4))
            with pytest.raises(ConfigError, match="resettable"):
                await source.fetch(FetchUpdates("typing", "w1", 2, 4))


@pytest.mark.parametrize("name", [odd.name, "..", ".", "%2e%2e", "a#b", "a?b=c&d", "ü/../ü", "a;b=1", "+"])
@sync
async def test_names_may_be_any_word(name: str) -> None:
    stream, writer = Stream(name), f"w/{name}"
    async with memory_store() as made:
        store: Any = MemoryStore(made.name, Registry([stream]), Settings())
        await store.init()
        claim = await store.claim(writer, [name], timeout=1)
        (token,) = await write(store, claim, 1, stream=name)
        async with serve(catch_up_app(store, [stream], secret=SECRET)) as serving:
            async with opened(serving.url + "/", stream) as source:
                page = await source.fetch(FetchUpdates(name, writer, 0, 10))
                assert (list(page.tokens), list(page.payloads)) == ([token], [b"[%d,0]" % token])


ROWS: list[Any] = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 1.0, 1e300, 5e-324, -0.0, "", "\\", "\"],\n[5,", "ü\u2028\U0001f600\x00",
    [], {}, [[[[]]]], {"": {"a": [1, {"b": None}]}}, "]],\n\"upto_token\"", ["x" * 200_000], '{"updates":[[',
]  # fmt: skip


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_odd_rows_arrive_byte_for_byte(compress: bool) -> None:
    payloads = [json_bytes(value) for value in ROWS]
    async with memory_store() as store:
        claim = await store.claim("w1", ["orders"], timeout=1)
        transaction = store.transaction(claim)
        ids = await store.reserve("orders", len(ROWS))
        await transaction.begin()
        await transaction.insert("orders", [(t, [], [p, p]) for t, p in zip(ids, payloads, strict=True)])
        await transaction.commit()
        async with serve(catch_up_app(store, STREAMS, secret=SECRET)) as serving:
            async with opened(serving.url, compress=compress) as source:
                page = await source.fetch(FetchUpdates("orders", "w1", ids[0] - 1, ids[-1]))
                assert list(page.payloads) == [p for payload in payloads for p in (payload, payload)]
                assert list(page.tokens) == [t for token in ids for t in (token, token)]


# -- what it asks ---------------------------------------------------------------------------------------------


@sync
async def test_a_question_as_the_protocol_has_it() -> None:
    async with peer(options={"headers": {"x-tenant": "seven"}}) as (source, answering):
        await source.fetch(ASKED)
        scope = answering.requests[-1]
        headers = dict(scope["headers"])
        assert scope["path"] == "/replication/get_repl_stream_updates/orders"
        assert scope["query_string"] == b"instance_name=w1&from_token=3&upto_token=10&limit=2"
        assert headers[b"authorization"] == b"Bearer very-secret"
        assert headers[b"accept-encoding"] == b"identity"
        assert headers[b"x-tenant"] == b"seven"


@sync
async def test_connections_are_kept_and_bounded() -> None:
    async with peer(hold=asyncio.Event(), options={"settings": attrs.evolve(QUICK, fetches=2)}) as (source, answering):
        assert answering.hold is not None
        asking = [asyncio.create_task(source.fetch(ASKED)) for _ in range(6)]
        while answering.of_pages < 3:
            await asyncio.sleep(0.001)
        answering.hold.set()
        await asyncio.gather(*asking)
        assert len({scope["client"] for scope in answering.requests}) == 3


# -- what it tries again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@sync
async def test_a_server_that_is_away_for_a_moment_is_asked_again(status: int) -> None:
    async with peer(status=status, failures=2) as (source, answering):
        assert list((await source.fetch(ASKED)).tokens) == [4, 5]
        assert answering.of_pages == 3


@sync
async def test_and_not_for_ever() -> None:
    async with peer(status=503, body=b'{"error":"the store is away"}') as (source, answering):
        with pytest.raises(Unavailable, match="503 'the store is away'"):
            await source.fetch(ASKED)
        assert answering.of_pages == http_client.TRIES


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [("2", 2.0, 3.0), ("999999999", 5.0, 7.5), ("0", 0.0, 0.1), ("-3", 0.0, 0.1), ("soon", 0.0, 0.1), ("nan", 0, 0.1)],
)
@sync
async def test_retry_after_is_honoured_and_bounded(
    retry_after: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def noted(pause: float) -> None:
        pauses.append(pause)
        await real_sleep(0)

    async with peer(status=503, failures=1, headers={"retry-after": retry_after}) as (source, _):
        with monkeypatch.context() as patch:
            patch.setattr(http_client.asyncio, "sleep", noted)
            await source.fetch(ASKED)
        ours = [pause for pause in pauses if pause not in (0, 0.1)]  # uvicorn's own ticks
        assert len(ours) == 1
        assert least <= ours[0] <= most


@sync
async def test_the_deadline_holds_over_all_tries() -> None:
    async with peer(status=503, headers={"retry-after": "60"}) as (source, answering):
        source.client.settings = attrs.evolve(QUICK, fetch_timeout=0.2)  # from here on: opening it may take longer
        with pytest.raises(Unavailable, match="503"):
            await source.fetch(ASKED)
        answering.hold = asyncio.Event()
        with pytest.raises(Unavailable, match="no answer in time"):
            await source.fetch(ASKED)
        answering.hold.set()


@sync
async def test_a_server_that_is_not_there() -> None:
    async with serve(Peer()) as serving:
        pass
    with pytest.raises(Unavailable, match="ConnectError"):
        await source_of(serving.url).open()


@sync
async def test_a_server_that_was_restarted_is_found_again() -> None:
    """The connections kept are dead by then."""
    answering = Peer(HONEST)
    async with contextlib.AsyncExitStack() as stack:
        async with serve(answering) as serving:
            source = await stack.enter_async_context(opened(serving.url))
            await source.fetch(ASKED)
        with pytest.raises(Unavailable):
            await source.fetch(ASKED)
        async with serve(answering, port=serving.port):
            assert list((await source.fetch(ASKED)).tokens) == [4, 5]


@contextlib.asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answers the questions, one connection each, with these bytes, and ends the connection; the last one for ever."""
    asked: list[bytes] = []
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        await server.wait_closed()


def answer_of(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


STATE = answer_of(write_state(CatchUpState(EPOCH, ["orders"], [])))


@pytest.mark.parametrize(
    "torn",
    [
        b"",
        b"HTTP/1.1 200",
        answer_of(HONEST, length=len(HONEST) + 1),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
        b"nonsense\r\n\r\n",
        b"\x00" * 100,
    ],
)
@sync
async def test_an_answer_that_is_torn_is_asked_for_again(torn: bytes) -> None:
    async with raw_server(STATE, torn, answer_of(HONEST)) as (url, asked), opened(url) as source:
        assert list((await source.fetch(ASKED)).tokens) == [4, 5]
        assert len(asked) == 3
    async with raw_server(STATE, torn) as (url, asked), opened(url) as source:
        with pytest.raises(Unavailable, match="Error"):
            await source.fetch(ASKED)
        assert len(asked) == 1 + http_client.TRIES


@sync
async def test_an_endless_answer_is_cut() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b'{"updates":[' + b"[4,0]," * 1_000_000
    async with raw_server(STATE, endless) as (url, _), opened(url, max_bytes=100_000) as source:
        with pytest.raises(Unavailable, match="longer than 100000 bytes: raise max_bytes"):
            await source.fetch(ASKED)


@sync
async def test_cancelling_leaves_no_connection_behind() -> None:
    async with peer(hold=asyncio.Event(), options={"settings": attrs.evolve(QUICK, fetches=1)}) as (source, answering):
        assert answering.hold is not None
        for _ in range(10):  # more than there are connections
            before = answering.of_pages
            asking = asyncio.create_task(source.fetch(ASKED))
            while answering.of_pages == before:
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        answering.hold.set()
        assert list((await source.fetch(ASKED)).tokens) == [4, 5]


@pytest.mark.parametrize("kept", [False, True])
@sync
async def test_a_question_may_be_cancelled_at_any_moment(kept: bool) -> None:
    """Connections are few: one left behind each time, in whatever state, and soon no question is asked any more."""
    async with peer() as (source, _):
        for steps in range(60):
            if not kept:
                await source.close()
                await source.open()
                assert source.client.transport is not None
                await source.client.transport._pool.aclose()  # so that this question has to make a connection
            asking = asyncio.create_task(source.fetch(ASKED))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            assert source.client.transport is not None
            pool: Any = source.client.transport._pool
            assert [one for one in pool.connections if not one.is_idle() and not one.is_closed()] == [], steps
            assert pool._requests == [], steps


@sync
async def test_closing_ends_the_questions_under_way() -> None:
    async with peer(hold=asyncio.Event()) as (source, answering):
        assert answering.hold is not None
        asking = asyncio.create_task(source.fetch(ASKED))
        while not answering.of_pages:
            await asyncio.sleep(0.001)
        await source.close()
        with pytest.raises(Unavailable, match="not open"):
            await asking
        answering.hold.set()


@sync
async def test_a_body_that_stops_in_the_middle() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(STATE if b"/state" in asked else answer_of(HONEST)[:-5])
            await reader.read()  # until the client gives up
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    settings = attrs.evolve(QUICK, fetch_timeout=0.2)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, opened(url, settings=settings) as source:
        for _ in range(source.settings.fetches + 2):
            with pytest.raises(Unavailable, match="no answer in time"):
                await source.fetch(ASKED)


# -- what it does not believe ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", LIES)
@sync
async def test_a_lie_is_refused(lie: str) -> None:
    body, reason = LIES[lie]
    async with peer(body=body) as (source, answering):
        with pytest.raises(Unavailable, match=f"its answer is refused: .*{reason}"):
            await source.fetch(ASKED)
        assert answering.of_pages == 1, "asking again at once would give the same"


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"<html>", b'{"version":2}'])
@sync
async def test_a_state_that_is_none_is_refused(body: bytes) -> None:
    async with peer() as (source, answering):
        answering.state = body
        for asked in (source.known(), source.epoch(), source.sequence("orders")):
            with pytest.raises(Unavailable, match="its answer is refused"):
                await asked


BOMB = gzip.compress(b" " * 50_000_000, mtime=0)


@pytest.mark.parametrize(
    ("coding", "body", "reason"),
    [
        ("gzip", HONEST, "header"),
        ("gzip", gzip.compress(HONEST, mtime=0)[:-4], "cut off"),
        ("gzip", gzip.compress(HONEST, mtime=0)[:-8] + b"\0" * 8, "incorrect data check"),
        ("gzip", b"", "cut off"),
        ("gzip", BOMB, "longer than 1000000 bytes"),
        ("br", HONEST, "was not asked for"),
        ("gzip, gzip", HONEST, "was not asked for"),
        ("gzip", gzip.compress(HONEST, mtime=0) + b"\0" * 5_000_000, "something follows"),
        ("gzip", gzip.compress(HONEST, mtime=0) * 2, "something follows"),
    ],
    ids=[
        "not packed",
        "cut off",
        "damaged",
        "empty",
        "bomb",
        "another coding",
        "packed twice",
        "goes on and on",
        "a second member",
    ],
)
@sync
async def test_what_does_not_unpack_is_refused(coding: str, body: bytes, reason: str) -> None:
    options = {"compress": True, "max_bytes": 1_000_000}
    async with peer(body=body, headers={"content-encoding": coding}, options=options) as (source, _):
        with pytest.raises(Unavailable, match=reason):
            await source.fetch(ASKED)


def too_old(floor: bytes, writer: bytes = b"w1", position: bytes = b"3") -> bytes:
    fields = b'{"stream":"orders","writer":"%b","position":%b,"floor":%b,"epoch":"%b"}'
    return fields % (writer, position, floor, EPOCH.encode())


STATUSES: list[tuple[int, bytes, type[Exception], str]] = [
    (401, b'{"error":"no"}', ConfigError, "401 'no'.*pass secret="),
    (400, b'{"error":"what?","code":"unknown_stream"}', ConfigError, "400 'what.'.*stream"),
    (403, b"<html>", ConfigError, "403.*keeps this client out"),
    (404, b"", ConfigError, "404.*prefix"),
    (418, b"[]", ConfigError, "418"),
    (301, b"", ConfigError, "301, go to 'http://127.0.0.1:1/elsewhere': put the right address into the URL"),
    (308, b"", ConfigError, "308, go to ''"),
    (204, b"", ConfigError, "204"),
    (206, HONEST, ConfigError, "206"),
    (500, b'{"error":"internal error"}', Unavailable, "500 'internal error'"),
    (507, b"\xff", Unavailable, "507"),
    (408, b"", Unavailable, "408"),
    (410, too_old(b"7"), PositionTooOld, "below the retention floor 7"),
    (410, too_old(b"3"), Unavailable, "without an epoch and a floor above 3"),
    (410, too_old(b'"7"'), Unavailable, "without an epoch and a floor"),
    (410, too_old(b"true"), Unavailable, "without an epoch and a floor"),
    (410, too_old(b"99999999999999999999"), Unavailable, "without an epoch and a floor|another question"),
    (410, too_old(b"7").replace(EPOCH.encode(), b""), Unavailable, "without an epoch"),
    (410, too_old(b"7", writer=b"w2"), Unavailable, "another question"),
    (410, too_old(b"7", position=b"2"), Unavailable, "another question"),
    (410, b'{"floor":7}', Unavailable, "another question"),
    (410, b"", Unavailable, "another question"),
]


@pytest.mark.parametrize(("status", "body", "kind", "reason"), STATUSES)
@sync
async def test_what_a_status_means(status: int, body: bytes, kind: type[Exception], reason: str) -> None:
    headers = {"location": "http://:hush@127.0.0.1:1/elsewhere?hush"} if status == 301 else {}
    async with peer(status=status, body=body, headers=headers) as (source, answering):
        with pytest.raises(kind, match=reason) as caught:
            await source.fetch(ASKED)
        assert answering.of_pages == (http_client.TRIES if status == 408 else 1)
        assert SECRET not in str(caught.value)
        assert "hush" not in str(caught.value)


@sync
async def test_a_server_s_own_words_are_cut() -> None:
    async with peer(status=400, body=orjson.dumps({"error": "x" * 10_000})) as (source, _):
        with pytest.raises(ConfigError) as caught:
            await source.fetch(ASKED)
        assert len(str(caught.value)) < 500


@sync
async def test_opening_finds_what_is_not_served() -> None:
    async with serve(Peer()) as serving:
        with pytest.raises(ConfigError, match="does not serve payments"):
            await source_of(serving.url, STREAMS[:2]).open()
        async with opened(serving.url, orders, typing) as source:  # what lives in memory comes over the wire alone
            await source.open()


@sync
async def test_a_wrong_secret_is_named_when_it_opens() -> None:
    async with memory_store() as store, serve(catch_up_app(store, STREAMS, secret=SECRET)) as serving:
        for secret in (None, "wrong-word"):
            source = source_of(serving.url, secret=secret)
            with pytest.raises(ConfigError, match="401.*put the server's secret into the URL") as caught:
                await source.open()
            assert "wrong-word" not in str(caught.value)
            await source.close()


@sync
async def test_closed_or_not_open_it_says_so() -> None:
    source = source_of("http://127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(Unavailable, match="not open"):
            await source.fetch(ASKED)
        await source.close()


# -- what it cannot do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reader": "r"}, "reader='r' writes.*reader_store="),
        ({"on_poison": "dead_letter"}, "on_poison.*reader_store="),
    ],
)
def test_a_bus_that_would_save_there_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        busrep.connect("redis://127.0.0.1:1", name="x", streams=[orders], store="http://127.0.0.1:1", **options)
    other = {**options, "reader_store": "memory://x"}
    busrep.connect("redis://127.0.0.1:1", name="x", streams=[orders], store="http://127.0.0.1:1", **other)


def test_a_bus_that_would_write_there_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="writer='w' writes, and .* can only be read: writers need the database"):
        busrep.connect("redis://127.0.0.1:1", name="x", streams=[orders], store="http://127.0.0.1:1", writer="w")
    with pytest.raises(ConfigError, match="can only be read: writers need the database"):
        busrep.sync.connect("redis://127.0.0.1:1", name="x", streams=[orders], store="http://127.0.0.1:1", writer="w")


# -- its address ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown", "authorization"),
    [
        ("http://host:81/prefix/", "http://host:81/prefix", None),
        ("https://:s%2Fe%40c@host", "https://host", "Bearer s/e@c"),
        ("http://:a@[::1]:81/x", "http://[::1]:81/x", "Bearer a"),
        ("http://:a%20@host", None, None),
        ("http://:@host", None, None),
        ("http://user:hush@host", None, None),
        ("http://hush@host", None, None),
        ("http://host?secret=hush", None, None),
        ("http://host#hush", None, None),
        ("http://host:hush", None, None),
        ("http://:hush@", None, None),
        ("http://", None, None),
        ("http://ho st", None, None),
        ("http://[::1", None, None),
        ("http://host:0", None, None),
        ("http://host:65536", None, None),
        ("http://host,host", None, None),
        ("ftp://:hush@host", None, None),
    ],
)
def test_urls(url: str, shown: str | None, authorization: str | None) -> None:
    if shown is None:
        with pytest.raises(ConfigError) as caught:
            HttpSource(url, [orders])
        assert "hush" not in str(caught.value)
        return
    source = HttpSource(url, [orders])
    assert source.url == shown
    assert source.client.headers.get("authorization") == authorization
    assert repr(source) == f"HttpSource({shown!r})"


def test_connect_takes_a_url() -> None:
    bus = busrep.connect("redis://127.0.0.1:1", name="x", streams=[orders], store="https://:hush@host/prefix")
    assert isinstance(bus.store, HttpSource)
    assert bus.store.url == "https://host/prefix"
    assert bus.store.settings is bus.settings


@pytest.mark.parametrize("options", [{"secret": "two words"}, {"secret": ""}, {"secret": "ü"}])
def test_a_secret_that_no_header_holds_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="visible ASCII"):
        HttpSource("http://host", [orders], options=HttpOptions(**options))
    with pytest.raises(ConfigError, match="once is enough"):
        HttpSource("http://:a@host", [orders], options=HttpOptions(**options))


@sync
async def test_the_secret_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with memory_store() as store, serve(catch_up_app(store, STREAMS, secret=SECRET)) as serving:
        async with opened(serving.url.replace("//", f"//:{SECRET}@"), secret=None) as source:
            await source.fetch(FetchUpdates("orders", "w1", 0, 4))
    assert SECRET not in caplog.text


# -- TLS ------------------------------------------------------------------------------------------------------


@sync
async def test_tls_is_verified() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "tls.crt", DATA / "tls.key")
    async with serve(Peer(HONEST), tls=context) as serving:
        async with opened(serving.url, verify=str(DATA / "tls.crt")) as source:
            assert list((await source.fetch(ASKED)).tokens) == [4, 5]
        with pytest.raises(ConfigError, match="not trusted.*pass verify="):
            await source_of(serving.url).open()
        with pytest.raises(Unavailable):  # no TLS where there is one
            await source_of(serving.url.replace("https", "http")).open()
    with pytest.raises(ConfigError, match="verify="):
        await source_of(serving.url, verify="/no/such/file").open()


@sync
async def test_a_client_may_show_a_certificate() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "tls.crt", DATA / "tls.key")
    context.load_verify_locations(DATA / "tls.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    mine = ssl.create_default_context(cafile=DATA / "tls.crt")
    async with serve(Peer(HONEST), tls=context) as serving:
        with pytest.raises(Unavailable):
            await source_of(serving.url, verify=str(DATA / "tls.crt")).open()
        mine.load_cert_chain(DATA / "tls.crt", DATA / "tls.key")
        async with opened(serving.url, verify=mine) as source:
            assert list((await source.fetch(ASKED)).tokens) == [4, 5]


# -- answers of others ---------------------------------------------------------------------------------------


@sync
async def test_an_answer_to_another_question_proves_nothing() -> None:
    """A cache that does not look at queries, or a proxy that mixes up clients: what is empty there is not so here."""
    for stream, writer, after in (("orders", "w1", 5), ("orders", "w2", 3), ("payments", "w1", 3)):
        page = UpdatesPage(stream, writer, after, 5, [], [], False, EPOCH)
        async with peer(body=write_page(page)) as (source, _):
            with pytest.raises(Unavailable, match="it answers another question"):
                await source.fetch(ASKED)


@sync
async def test_epoch_and_writers_are_of_one_log_or_not_told() -> None:
    """Two servers behind one address, one on a replica that has not seen a restore yet: floors of the log before must
    not pass for those of the new one."""
    old, new = CatchUpState(EPOCH, ["orders"], []), CatchUpState("f" * 32, ["orders"], [], 9)
    async with peer() as (source, answering):
        answering.state = write_state(new)
        epoch = await source.epoch()
        assert await source.known(epoch) == []
        assert await source.sequence("orders", epoch) == 9
        answering.state = write_state(old)
        for _ in range(2):  # also when it was asked for by somebody else meanwhile
            with pytest.raises(Unavailable, match="not of one database"):
                await source.known(epoch)
            assert await source.sequence("orders", epoch) is None
            assert await source.epoch() == old.epoch != epoch


@sync
async def test_a_floor_of_another_log_says_nothing_of_this_one() -> None:
    """So the error names the log that it is of: the reader judges by that."""
    async with peer(status=410, body=too_old(b"7")) as (source, _):
        with pytest.raises(PositionTooOld) as caught:
            await source.fetch(ASKED)
        assert caught.value.epoch == EPOCH


@pytest.mark.parametrize(
    "headers", [{"x": "hush\n"}, {"x": "hüsh"}, {"x": " hush"}, {"x\n": "a"}, {"": "a"}, {"x": 5}, {5: "x"}]
)
def test_a_header_that_is_none_is_refused(headers: Any) -> None:
    with pytest.raises(ConfigError, match="one line of ASCII text") as caught:
        HttpSource("http://host", [orders], options=HttpOptions(headers=headers))
    assert "hush" not in str(caught.value)


def test_no_header_is_sent_twice() -> None:
    source = HttpSource(
        "http://host",
        [orders],
        options=HttpOptions(headers={"Accept-Encoding": "br", "Authorization": "Basic eA==", "X": ""}),
    )
    assert source.client.headers == {
        "user-agent": "busrep", "accept-encoding": "identity", "authorization": "Basic eA==", "x": "",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="one is enough"):
        HttpSource("http://host", [orders], options=HttpOptions(secret="s", headers={"Authorization": "Basic eA=="}))


@sync
async def test_known_writers_are_those_that_are_said_to_be() -> None:
    writers = [KnownWriter("orders", "w1", 5, 1, True, 3, 0.25), KnownWriter("elsewhere", "w2", 1, 0, False, 1, 9.0)]
    async with peer(state=write_state(CatchUpState(EPOCH, ["orders"], writers, 7))) as (source, _):
        assert await source.known() == writers
        assert await source.sequence("orders") == 7
        assert await source.newest("orders") is None  # a server that does not know the question


@sync
async def test_the_newest_rows_are_positions() -> None:
    given: list[Any] = [[], {"w1": -1}, {"w1": "5"}, {"w1": True}]
    async with peer() as (source, answering):
        for newest in given:
            answering.state = write_state(CatchUpState(EPOCH, ["orders"], [], None, newest))
            with pytest.raises(Unavailable, match="newest is no object of positions"):
                await source.newest("orders")
        answering.state = write_state(CatchUpState(EPOCH, ["orders"], [], None, {"w1": 5, "w2": 0}))
        found = await source.newest("orders")
        assert found is not None
        assert (found.epoch, found.rows) == (EPOCH, {"w1": 5, "w2": 0})
