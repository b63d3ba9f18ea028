"""Snapshots over HTTP: one source for many readers, and what may happen to either side, on the way, and on disk."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import itertools
import secrets
import ssl
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import attrs
import httpx
import orjson
import pytest

from busrep import Settings
from busrep.core.snapshots import Agreement, PartRange, SnapshotSource, encode_rows
from busrep.errors import ConfigError, SnapshotBusy, SnapshotGone, Unavailable, UnknownStream
from busrep.http import client as http_client
from busrep.http import guard as http_guard
from busrep.http import shared as http_shared
from busrep.http import snapshots as http_snapshots
from busrep.http.client import HttpOptions
from busrep.http.serve import serve
from busrep.http.server import CatchUpLimits, catch_up_app
from busrep.http.snapshots import PIECE, SnapshotLimits, Snapshots
from busrep.http.source import HttpSource
from busrep.snapshots.sources import check_agreement, checked_part
from busrep.stores import open_store
from busrep.streams import Registry
from tests import ROOT
from tests.asyncio.bootstraps import Target, deployment, online
from tests.asyncio.bootstraps import write as write_orders
from tests.stores.store_conformance import sync, write

from .test_server import BEARER, SECRET, STREAMS, Scripted, client_of, memory_store, orders, payments

EPOCH = "0123456789abcdef" * 2
QUICK = Settings(retry_min=0.001, retry_max=0.002, fetch_timeout=5.0)
AGREE = "/replication/v1/snapshots/orders"
PLAIN = {**BEARER, "accept-encoding": "identity"}


@pytest.fixture(autouse=True)
def come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "RETRY_AFTER", 0)


@attrs.define(eq=False, slots=False)
class Table:
    """A source of ``parts`` parts a stream, each of ``rows`` rows, that counts what is asked of it."""

    parts: int = 3
    rows: int = 10
    width: int = 20
    position: int = 1_000_000
    floor: int = 0
    error: BaseException | None = None
    gone: int | None = None  # this part is pruned
    hold: asyncio.Event | None = None  # loads wait for it
    agreeing: asyncio.Event | None = None  # agreements wait for it
    agreed: list[Agreement | None] = attrs.field(factory=list)
    loaded: list[int] = attrs.field(factory=list)
    held: list[Agreement] = attrs.field(factory=list)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        self.agreed.append(again)
        if self.agreeing is not None:
            await self.agreeing.wait()
        if self.error is not None:
            raise self.error
        ranges = [PartRange(n * self.rows, (n + 1) * self.rows, self.rows) for n in range(self.parts)]
        floors = {"w1": self.floor} if self.floor else {}
        positions = {"w1": self.position}
        if again is not None and again.floors == floors and again.epoch == EPOCH:
            positions, ranges = dict(again.positions), list(again.parts)
        found = Agreement(stream, EPOCH, positions, floors, ranges, "postgresql://secret-place", secrets.token_hex(4))
        self.held.append(found)
        return found

    def text(self, number: int) -> bytes:
        tokens = range(number * self.rows + 1, (number + 1) * self.rows + 1)
        row = b'"%b"' % (b"x" * self.width)
        return encode_rows(tokens, ["w1"] * self.rows, [row] * self.rows)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        assert agreement in self.held
        self.loaded.append(number)
        if number == self.gone:
            raise SnapshotGone(agreement.stream, "rows of it are pruned by now")
        text = self.text(number)
        yield text[:7]
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        yield text[7:]

    async def leave(self, agreement: Agreement) -> None:
        self.held.remove(agreement)


def app_of(source: Any, **limits: Any) -> Any:
    top = {name: limits.pop(name) for name in ("deadline",) if name in limits}
    return catch_up_app(
        Scripted(),  # type: ignore[arg-type]
        STREAMS,
        secret=SECRET,
        limits=CatchUpLimits(snapshots=SnapshotLimits(**limits), **top),
        snapshot_source=source,
    )


@contextlib.asynccontextmanager
async def closing(app: Any) -> AsyncIterator[Any]:
    try:
        yield app
    finally:
        await app.state.catch_up.close()


@contextlib.asynccontextmanager
async def asked(source: Any = None, **limits: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Snapshots, Any]]:
    """Without a network between."""
    source = source or Table()
    async with closing(app_of(source, **limits)) as app, client_of(app, headers=PLAIN) as client:
        yield client, app.state.catch_up.snapshots, source


@contextlib.asynccontextmanager
async def reading(app: Any, *, port: int = 0, **options: Any) -> AsyncIterator[tuple[HttpSource, int]]:
    """A reader of a server that listens; and where."""
    async with serve(app, port=port) as serving:
        source = HttpSource(
            serving.url, [orders], options.pop("settings", QUICK), options=HttpOptions(secret=SECRET, **options)
        )
        source.state = _state  # type: ignore[method-assign]  # peers of these tests have none
        await source.open()
        try:
            yield source, serving.port
        finally:
            await source.close()


@attrs.frozen
class _State:
    streams: tuple[str, ...] = ("orders",)


async def _state(*_: Any) -> Any:
    return _State()


async def text_of(source: SnapshotSource, agreement: Agreement, number: int) -> bytes:
    return b"".join([piece async for piece in source.load(agreement, number)])


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


PART_PATH = "/replication/v1/snapshot_parts/"


async def part_of(client: httpx.AsyncClient, agreement: dict[str, Any], number: int, **headers: str) -> httpx.Response:
    return await client.post(f"{PART_PATH}{number}", content=orjson.dumps(agreement), headers=headers)


async def agreed(client: httpx.AsyncClient, part_rows: int = 10, stream: str = "orders") -> dict[str, Any]:
    answer = await client.get(AGREE.replace("orders", stream), params={"part_rows": part_rows})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


# -- what passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_a_reader_gets_what_the_store_has(compress: bool) -> None:
    async with memory_store() as store, closing(catch_up_app(store, STREAMS, secret=SECRET)) as app:
        own = await store.agree("orders", part_rows=2)
        async with serve(app) as serving:
            source = HttpSource(serving.url, STREAMS, QUICK, options=HttpOptions(secret=SECRET, compress=compress))
            await source.open()
            agreement = await source.agree("orders", part_rows=2)
            assert agreement.same(own)
            assert len(agreement.parts) > 1
            for number in range(len(agreement.parts)):
                assert await text_of(source, agreement, number) == await text_of(store, own, number)
            nothing = await source.agree("payments", part_rows=2)
            assert (nothing.parts, nothing.positions) == ([], {"w2": 0})
            again = await source.agree("orders", part_rows=7, again=agreement)
            assert again.same(agreement)
            await source.leave(agreement)
            await source.close()
        await store.leave(own)


@sync
async def test_what_an_agreement_says_and_does_not_say() -> None:
    async with asked() as (client, _, source):
        answer = await client.get(AGREE, params={"part_rows": 10})
        found = answer.json()
        assert (found["source"], found["positions"]) == ("", {"w1": 1_000_000})
        assert "secret-place" not in answer.text
        assert answer.headers["cache-control"] == "no-store"
        part = await part_of(client, found, 1)
        assert part.content == source.text(1)
        assert part.headers["busrep-sha256"] == hashlib.sha256(source.text(1)).hexdigest()
        assert part.headers["content-length"] == str(len(part.content))
        assert part.headers["content-type"] == "text/plain; charset=utf-8"


@sync
async def test_a_packed_part_is_the_part() -> None:
    async with asked(Table(rows=5_000)) as (client, _, source):
        content, headers = orjson.dumps(await agreed(client, 5_000)), {"accept-encoding": "gzip"}
        async with client.stream("POST", f"{PART_PATH}2", content=content, headers=headers) as answer:
            raw = b"".join([piece async for piece in answer.aiter_raw()])
        assert len(raw) < len(source.text(2)) / 10
        assert gzip.decompress(raw) == source.text(2)


@sync
async def test_an_empty_part_is_one() -> None:
    async with closing(app_of(Table(parts=1, rows=1, width=0))) as app:
        source = app.state.catch_up.snapshots.source
        source.text = lambda _: b""
        async with reading(app) as (reader, _):
            agreement = await reader.agree("orders", part_rows=1)
            assert await text_of(reader, agreement, 0) == b""


PAYMENTS = Agreement("payments", EPOCH, {}, {}, ()).to_json()
NOTHING = Agreement("nothing", EPOCH, {}, {}, ()).to_json()
ORDERS = Agreement("orders", EPOCH, {}, {}, ()).to_json()
REFUSALS = {
    "no secret": ("GET", AGREE, {"part_rows": 1}, b"", 401, "unauthorized"),
    "another stream": ("GET", AGREE + "x", {"part_rows": 1}, b"", 400, "unknown_stream"),
    "no part_rows": ("GET", AGREE, {}, b"", 400, "bad_parameter"),
    "part_rows 0": ("GET", AGREE, {"part_rows": 0}, b"", 400, "bad_parameter"),
    "part_rows -1": ("GET", AGREE, {"part_rows": -1}, b"", 400, "bad_parameter"),
    "a body for a GET": ("GET", AGREE, {"part_rows": 1}, b"{}", 400, "body"),
    "no agreement": ("POST", AGREE, {"part_rows": 1}, b"{}", 400, "bad_agreement"),
    "no JSON": ("POST", AGREE, {"part_rows": 1}, b"\xff", 400, "bad_agreement"),
    "another's agreement": ("POST", AGREE, {"part_rows": 1}, PAYMENTS, 400, "bad_agreement"),
    "one of no stream here": ("POST", AGREE, {"part_rows": 1}, NOTHING, 400, "unknown_stream"),
    "no agreement for a part": ("GET", f"{PART_PATH}0", {}, b"", 400, "bad_agreement"),
    "a long one": ("POST", AGREE, {"part_rows": 1}, b"[" * 5_000, 413, "body"),
    "a POST elsewhere": ("POST", "/replication/v1/state", {}, b"{}", 405, "method"),
    "a PUT": ("PUT", AGREE, {"part_rows": 1}, b"", 405, "method"),
    "no number": ("POST", f"{PART_PATH}x", {}, ORDERS, 400, "bad_parameter"),
    "no such number": ("POST", f"{PART_PATH}0", {}, ORDERS, 400, "bad_parameter"),
    "too many parts": ("GET", AGREE, {"part_rows": 3}, b"", 400, "too_many_parts"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http_guard, http_snapshots):
        monkeypatch.setattr(module, "AGREEMENT_BYTES", 4_096)
    asyncio.run(refused(*REFUSALS[case], Table(parts=1_000 if case == "too many parts" else 3)))


async def refused(
    method: str, path: str, params: dict[str, int], body: bytes, status: int, code: str, source: Table
) -> None:
    async with asked(source) as (client, snapshots, _):
        headers = {"authorization": "Bearer wrong"} if code == "unauthorized" else {}
        answer = await client.request(method, path, params=params, content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert snapshots.statistics()["parts_loaded"] == 0
    assert source.held == []


@sync
async def test_a_server_without_snapshots_says_so() -> None:
    off = catch_up_app(Scripted(), STREAMS, secret=None, limits=CatchUpLimits(snapshots=None), snapshot_source=Table())  # type: ignore[arg-type]
    without = catch_up_app(Scripted(), STREAMS, secret=None)  # type: ignore[arg-type]
    for app in (off, without):
        async with client_of(app) as client:
            answer = await client.get(AGREE, params={"part_rows": 1})
            assert (answer.status_code, answer.json()["code"]) == (404, "no_snapshots")
            assert app.state.catch_up.statistics()["snapshots"] is None
        async with reading(app) as (reader, _):
            with pytest.raises(ConfigError, match="gives no snapshots"):
                await reader.agree("orders", part_rows=1)
        await app.state.catch_up.close()
    source = HttpSource("http://localhost:1", [orders])
    with pytest.raises(UnknownStream):
        await source.agree("payments", part_rows=1)


# -- many readers ---------------------------------------------------------------------------------------------


@sync
async def test_a_hundred_readers_at_once_share_an_agreement_and_its_parts() -> None:
    source, context, patient = Table(parts=4, rows=300), ssl.create_default_context(), Settings()
    async with closing(app_of(source)) as app, serve(app, connections=500) as serving:

        async def read() -> bytes:
            reader = HttpSource(serving.url, [orders], patient, options=HttpOptions(secret=SECRET, verify=context))
            reader.state = _state  # type: ignore[method-assign]
            await reader.open()
            agreement = await reader.agree("orders", part_rows=300)
            texts = []
            for number in range(0, len(agreement.parts), 2):
                texts += await asyncio.gather(*(text_of(reader, agreement, n) for n in (number, number + 1)))
            await reader.close()
            return b"".join(texts)

        found = await asyncio.gather(*(read() for _ in range(100)))
        assert set(found) == {b"".join(map(source.text, range(4)))}
        assert source.agreed.count(None) == 1
        assert sorted(source.loaded) == [0, 1, 2, 3]
        numbers = app.state.catch_up.statistics()["snapshots"]
        assert (numbers["agreements"], numbers["parts_loaded"]) == (1, 4)
        await until(lambda: not source.held)


@sync
async def test_a_reader_that_hangs_up_leaves_the_work_to_the_others() -> None:
    source = Table(agreeing=asyncio.Event())
    assert source.agreeing is not None
    async with asked(source) as (client, _, _):
        first, second = (asyncio.create_task(agreed(client)) for _ in range(2))
        await until(lambda: source.agreed)
        first.cancel()
        source.agreeing.set()
        agreement = await second
        assert (await part_of(client, agreement, 0)).content == source.text(0)
        assert source.agreed.count(None) == 1


@sync
async def test_what_nobody_waits_for_any_more_is_not_loaded() -> None:
    source = Table(hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source, loads=1, kept_bytes=0) as (client, _, _):
        agreement = await agreed(client)
        tasks = [asyncio.create_task(part_of(client, agreement, n)) for n in (0, 1)]
        await until(lambda: source.loaded)
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await until(lambda: not source.held)
        assert source.loaded == [0]
        source.hold.set()
        assert (await part_of(client, agreement, 0)).content == source.text(0)
        assert (await part_of(client, agreement, 1)).content == source.text(1)
        assert source.loaded == [0, 0, 1]


def test_newcomers_share_a_young_agreement_and_not_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def young() -> None:
        async with asked() as (client, _, source):
            first = await agreed(client)
            source.position = 2_000_000
            assert await agreed(client) == first
            assert (await agreed(client, 11))["positions"] == {"w1": 2_000_000}
            assert await agreed(client, stream="payments") != first

    async def old() -> None:
        async with asked() as (client, _, source):
            await agreed(client)
            source.position = 3_000_000
            await asyncio.sleep(0.05)
            assert (await agreed(client))["positions"] == {"w1": 3_000_000}

    asyncio.run(young())
    monkeypatch.setattr(http_shared, "SHARED_FOR", 0.001)
    asyncio.run(old())


@sync
async def test_what_one_client_brings_along_is_not_given_to_others() -> None:
    mine = Agreement("orders", EPOCH, {"w1": 2**62}, {}, (PartRange(0, 2**62),))
    async with asked() as (client, _, source):
        answer = await client.post(AGREE, params={"part_rows": 10}, content=mine.to_json())
        assert Agreement.from_json(answer.content).same(mine)
        other = await client.get(AGREE, params={"part_rows": 10})
        assert Agreement.from_json(other.content).positions == {"w1": 1_000_000}
        assert [again is None for again in source.agreed] == [False, True]


@sync
async def test_numbers_of_rows_that_one_client_brings_along_are_not_given_to_others() -> None:
    """They are not in the digest: whoever asks with the same agreement would have all parts refused."""
    async with asked() as (client, _, _):
        honest = Agreement.from_json((await client.get(AGREE, params={"part_rows": 10})).content)
    wrong = attrs.evolve(honest, parts=[attrs.evolve(part, rows=1) for part in honest.parts])
    unknown = attrs.evolve(honest, parts=[attrs.evolve(part, rows=-1) for part in honest.parts])
    assert wrong.digest == honest.digest
    async with asked() as (client, _, source):
        for mine in (wrong, honest, unknown):
            answer = await client.post(AGREE, params={"part_rows": 10}, content=mine.to_json())
            assert Agreement.from_json(answer.content) == mine
        fresh = Agreement.from_json((await client.get(AGREE, params={"part_rows": 10})).content)
        assert fresh == honest
        assert [one is None for one in source.agreed] == [False, True]


@sync
async def test_a_part_is_of_so_many_rows_and_bytes_at_most() -> None:
    """Whatever is asked for."""
    asked_for = []

    class Large(Table):
        async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
            asked_for.append(part_rows)
            return await super().agree(stream, part_rows=part_rows, again=again)

    source = Large(parts=2, rows=4_000, width=80)  # 370 kB each
    async with asked(source, part_rows=500, part_bytes=400_000, kept_bytes=0) as (client, snapshots, _):
        agreement = await agreed(client, 10**12)
        assert asked_for == [500]
        assert (await part_of(client, agreement, 0)).status_code == 200
        source.width = 160
        answer = await part_of(client, agreement, 1)
        assert (answer.status_code, answer.json()["code"]) == (400, "part_too_long")
        assert "SnapshotLimits.part_bytes" in answer.json()["error"]
        assert snapshots.statistics()["parts_loaded"] == 1
    async with closing(app_of(source, part_bytes=400_000)) as app, reading(app) as (reader, _):
        own = await reader.agree("orders", part_rows=10)
        with pytest.raises(ConfigError, match="lower Settings.snapshot_part_rows"):
            await text_of(reader, own, 0)
    assert len(source.loaded) == 3


def loaded_for(agreement: dict[str, Any], number: int) -> tuple[str, int]:
    return Agreement.from_json(orjson.dumps(agreement)).digest, number


@sync
async def test_the_next_part_is_loaded_while_this_one_is_sent() -> None:
    source = Table(parts=4)
    async with asked(source) as (client, snapshots, _):
        agreement = await agreed(client)
        for number, loaded in ((0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])):
            assert (await part_of(client, agreement, number)).content == source.text(number)
            await until(lambda loaded=loaded: snapshots.parts_loaded == len(loaded))
            assert source.loaded == loaded
        assert source.held == []


@sync
async def test_a_part_is_loaded_ahead_only_where_it_is_kept_and_the_source_is_idle() -> None:
    for kept, loaded in ((0, [0]), (len(Table().text(0)) - 1, [0]), (len(Table().text(1)), [0, 1])):
        async with asked(kept_bytes=kept) as (client, snapshots, source):
            await part_of(client, await agreed(client), 0)
            await until(lambda snapshots=snapshots: not snapshots.statistics()["loading"])
            assert source.loaded == loaded
    source = Table(parts=6, hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source) as (client, snapshots, _):
        agreement = await agreed(client)
        first, other = (asyncio.create_task(part_of(client, agreement, n)) for n in (0, 4))
        await until(lambda: len(source.held) == 2)
        source.hold.set()
        assert (await first).content == source.text(0)
        assert (await other).content == source.text(4)
        await until(lambda: not snapshots.statistics()["loading"])
        assert sorted(source.loaded) in ([0, 1, 4], [0, 4, 5]), "one ahead, behind the load that ended last"


@sync
async def test_a_load_ahead_keeps_no_reader_waiting() -> None:
    class Hanging(Table):
        async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
            async for piece in super().load(agreement, number):
                yield piece
                if number == 1:
                    await asyncio.Event().wait()

    source = Hanging(parts=9)
    async with asked(source, loads=1) as (client, snapshots, _):
        agreement = await agreed(client)
        assert (await part_of(client, agreement, 0)).content == source.text(0)
        await until(lambda: source.loaded == [0, 1])
        assert (await part_of(client, agreement, 7)).content == source.text(7)
        await until(lambda: not snapshots.statistics()["loading"])
        assert source.held == []


@sync
async def test_nothing_begins_after_the_close() -> None:
    source = Table(parts=9, hold=asyncio.Event())
    async with asked(source, downloads=2) as (client, snapshots, _):
        agreement = await agreed(client)
        asking = [asyncio.create_task(part_of(client, agreement, number)) for number in range(6)]
        await until(lambda: len(source.loaded) == 2)
        await snapshots.close()
        assert {(await one).json()["code"] for one in asking} == {"unavailable"}
        assert (source.held, len(source.loaded)) == ([], 2)
        assert (await client.get(AGREE, params={"part_rows": 11})).json()["code"] == "unavailable"


@sync
async def test_what_is_wrong_with_a_part_loaded_ahead_is_told_to_who_asks_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asked(Table(gone=1)) as (client, snapshots, source):
        agreement = await agreed(client)
        assert (await part_of(client, agreement, 0)).status_code == 200
        await until(lambda: source.loaded == [0, 1] and not snapshots.statistics()["loading"])
        assert [one.getMessage() for one in caplog.records] == []
        assert (await part_of(client, agreement, 1)).json()["code"] == "snapshot_gone"
        assert source.loaded == [0, 1, 1]


@sync
async def test_a_kept_part_is_of_the_agreement_that_it_was_loaded_for() -> None:
    async with asked() as (client, _, source):
        old = await agreed(client)
        assert (await part_of(client, old, 1)).content == source.text(1)
        source.floor = 5  # parts of before may have lost rows since
        new = await agreed(client, 11)
        assert loaded_for(old, 1) != loaded_for(new, 1)
        before = len(source.loaded)
        assert (await part_of(client, new, 1)).status_code == 200
        assert source.loaded[before] == 1


# -- what the source holds ------------------------------------------------------------------------------------


@sync
async def test_a_stalled_client_holds_nothing_of_the_source() -> None:
    """It takes the head of its answer, and nothing more; the source is let go of, and in the end the client is."""
    source = Table(parts=1, rows=5_000)
    async with asked(source, deadline=2.0, downloads=1) as (client, _, _):
        agreement = await agreed(client, 5_000)
        app = client._transport.app  # type: ignore[attr-defined]
        answering, stalled = stall(app, agreement, 0)
        await stalled.wait()
        assert source.held == []
        await answering
        assert app.state.catch_up.statistics()["refused"] == {"gone": 1}
        assert (await part_of(client, agreement, 0)).content == source.text(0), "its place is free again"


def stall(app: Any, agreement: dict[str, Any], number: int) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A client that takes the head of its part, and nothing more."""
    stalled, body = asyncio.Event(), [orjson.dumps(agreement)]

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            stalled.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        if not body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    scope = {
        "type": "http", "method": "POST", "path": f"{PART_PATH}{number}", "query_string": b"", "root_path": "",
        "headers": [(b"authorization", BEARER["authorization"].encode())],
    }  # fmt: skip
    return asyncio.create_task(app(scope, receive, send)), stalled


async def begun(agreement: dict[str, Any], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has read the first line of the answer with a part."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_000)
    body = orjson.dumps(agreement)
    head = f"POST {PART_PATH}0 HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Authorization: {BEARER['authorization']}\r\n\r\n".encode() + body)
    first = await reader.readline()
    if first != b"HTTP/1.1 200 OK\r\n":
        writer.close()
        await writer.wait_closed()
    assert first == b"HTTP/1.1 200 OK\r\n"
    return reader, writer


@sync
async def test_a_download_that_stalls_is_cut_and_no_error_of_the_server_s(caplog: pytest.LogCaptureFixture) -> None:
    """Its place goes to others: that is counted, and not told each time."""
    source = Table(parts=1, rows=40_000, width=400)
    async with closing(app_of(source, deadline=2.0)) as app, serve(app) as serving:
        async with httpx.AsyncClient(base_url=serving.url, headers=PLAIN) as client:
            agreement = await agreed(client, 40_000)
        reader, writer = await begun(agreement, serving.port)
        await until(lambda: app.state.catch_up.statistics()["refused"])
        read = 0
        while piece := await reader.read(2**20):
            read += len(piece)
        assert read < len(source.text(0)), "cut, not ended"
        writer.close()
        await writer.wait_closed()
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


@sync
async def test_a_download_that_gets_on_has_the_time_that_it_takes() -> None:
    """Over a slow link a part takes longer than the deadline of one request."""
    source, deadline = Table(parts=1, rows=40_000, width=400), 2.0
    async with closing(app_of(source, deadline=deadline)) as app, serve(app) as serving:
        async with httpx.AsyncClient(base_url=serving.url, headers=PLAIN) as client:
            agreement = await agreed(client, 40_000)
        reader, writer = await begun(agreement, serving.port)
        loop = asyncio.get_running_loop()
        begin, got = loop.time(), b""
        while piece := await reader.read(2**20):
            got += piece
            if loop.time() < begin + deadline + 0.5:
                await asyncio.sleep(0.05)
        assert got.endswith(source.text(0))
        assert loop.time() > begin + deadline
        writer.close()
        await writer.wait_closed()
        assert app.state.catch_up.statistics()["refused"] == {}


@sync
async def test_nothing_is_held_at_the_source_between_two_parts() -> None:
    async with asked() as (client, _, source):
        agreement = await agreed(client)
        for number in range(3):
            assert source.held == []
            assert (await part_of(client, agreement, number)).content == source.text(number)
        assert source.held == []
        assert [None if again is None else again.digest for again in source.agreed] == [None] + 3 * [agreement["id"]]


@sync
async def test_only_so_many_parts_are_loaded_at_a_time() -> None:
    source = Table(parts=6, hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source, loads=2) as (client, _, _):
        agreement = await agreed(client)
        tasks = [asyncio.create_task(part_of(client, agreement, n)) for n in range(6)]
        await until(lambda: len(source.loaded) == 2)
        await asyncio.sleep(0.01)
        assert (len(source.loaded), len(source.held)) == (2, 2)
        source.hold.set()
        assert [answer.content for answer in await asyncio.gather(*tasks)] == [source.text(n) for n in range(6)]
        assert sorted(source.loaded) == list(range(6))


@sync
async def test_only_so_many_agreements_are_made_at_a_time() -> None:
    source = Table(agreeing=asyncio.Event())
    assert source.agreeing is not None
    async with closing(app_of(source, snapshots=1)) as app, reading(app) as (reader, port):
        first = asyncio.create_task(reader.agree("orders", part_rows=10))
        await until(lambda: source.agreed)
        other = HttpSource(f"http://127.0.0.1:{port}", [payments], QUICK, options=HttpOptions(secret=SECRET))
        other.state = lambda *_: _other_state()  # type: ignore[method-assign, assignment]
        await other.open()
        with pytest.raises(SnapshotBusy) as caught:
            await other.agree("payments", part_rows=10)
        assert caught.value.limit == 1
        source.agreeing.set()
        assert (await first).stream == "orders"
        assert (await other.agree("payments", part_rows=10)).stream == "payments"
        await other.close()


async def _other_state() -> Any:
    return _State(("payments",))


def test_a_source_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_snapshots, "AGREE_TIMEOUT", 0.01)

    async def main() -> None:
        async with asked(Table(agreeing=asyncio.Event())) as (client, _, source):
            answer = await client.get(AGREE, params={"part_rows": 10})
            assert (answer.status_code, answer.json()["code"], source.held) == (503, "unavailable", [])
        async with asked(Table(hold=asyncio.Event()), deadline=1.0) as (client, snapshots, source):
            answer = await part_of(client, await agreed(client), 0)
            assert (answer.status_code, answer.json()["code"]) == (503, "deadline")
            await until(lambda: not source.held)
            assert snapshots.statistics()["parts_loaded"] == 0

    asyncio.run(main())


@sync
async def test_a_slow_agreement_outlives_the_requests_that_wait_for_it() -> None:
    source = Table(agreeing=asyncio.Event())
    assert source.agreeing is not None
    async with asked(source, deadline=0.02) as (client, snapshots, _):
        for _ in range(3):
            assert (await client.get(AGREE, params={"part_rows": 10})).json()["code"] == "deadline"
        source.agreeing.set()
        await until(lambda: snapshots.agreements)
        async with asyncio.timeout(60):  # a busy machine may take longer than the deadline for a request
            while (await client.get(AGREE, params={"part_rows": 10})).status_code != 200:
                pass
        assert source.agreed == [None]


FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "unavailable": (Unavailable("the store", "gone"), 503, "unavailable"),
    "busy": (SnapshotBusy("the store", 7), 503, "snapshot_busy"),
    "a bug": (RuntimeError("secret-of-somebody"), 500, "internal"),
    "gone": (SnapshotGone("orders", "pruned"), 410, "snapshot_gone"),
}


@pytest.mark.parametrize("case", FAILURES)
@sync
async def test_what_the_source_raises_becomes_an_answer_and_leaves_nothing(case: str) -> None:
    error, status, code = FAILURES[case]
    async with asked() as (client, snapshots, source):
        agreement = await agreed(client)
        source.error = error
        for answer in (await client.get(AGREE, params={"part_rows": 11}), await part_of(client, agreement, 1)):
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert "secret-of-somebody" not in answer.text
        assert snapshots.statistics()["parts_loaded"] == 0
        source.error = None
        assert (await part_of(client, agreement, 1)).content == source.text(1)


@sync
async def test_a_pruned_part_ends_it_for_who_needs_it_and_for_newcomers() -> None:
    async with closing(app_of(Table(gone=1))) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=10)
        source = app.state.catch_up.snapshots.source
        with pytest.raises(SnapshotGone, match="pruned by now"):
            await text_of(reader, agreement, 1)
        assert await text_of(reader, agreement, 2) == source.text(2), "somebody who has applied that part goes on"
        source.floor = 5
        assert not (await reader.agree("orders", part_rows=10)).same(agreement)


# -- restarts, and what is forgotten --------------------------------------------------------------------------


@sync
async def test_a_reader_goes_on_with_a_server_that_was_restarted() -> None:
    source = Table()
    async with closing(app_of(source, kept_bytes=0)) as app, reading(app) as (reader, port):
        agreement = await reader.agree("orders", part_rows=10)
        assert await text_of(reader, agreement, 0) == source.text(0)
    source.position += 5  # written since
    async with closing(app_of(source, kept_bytes=0)) as app, serve(app, port=port):
        await reader.open()
        assert await text_of(reader, agreement, 1) == source.text(1)
        assert (await reader.agree("orders", part_rows=10, again=agreement)).same(agreement)
        assert [again is None for again in source.agreed] == [True, False, False, False]
        await reader.close()
    source.floor = 15  # pruned since: another agreement is all there is
    async with closing(app_of(source)) as app, serve(app, port=port):
        await reader.open()
        with pytest.raises(SnapshotGone, match="rows of it were pruned"):
            await text_of(reader, agreement, 2)
        await reader.close()


@sync
async def test_several_servers_behind_one_address() -> None:
    """Which take turns, however they do it."""
    source = Table(parts=6)
    async with contextlib.AsyncExitStack() as stack:
        apps = [await stack.enter_async_context(closing(app_of(source))) for _ in range(3)]
        turns = itertools.cycle(apps)

        async def balancer(scope: Any, receive: Any, send: Any) -> None:
            await next(turns)(scope, receive, send)

        async with reading(balancer) as (reader, _):
            agreement = await reader.agree("orders", part_rows=10)
            for number in range(6):
                assert await text_of(reader, agreement, number) == source.text(number)


@sync
async def test_a_download_goes_on_after_the_server_was_restarted_in_the_middle() -> None:
    source = Table(parts=1, rows=8_000)
    got: list[bytes] = []
    async with closing(app_of(source)) as first, closing(app_of(source)) as second:
        cutting = Cutting(first, after=PIECE)
        async with reading(cutting) as (reader, _):
            agreement = await reader.agree("orders", part_rows=8_000)
            cutting.then = second
            async for piece in reader.load(agreement, 0):
                got.append(piece)
        assert b"".join(got) == source.text(0)
        assert source.loaded == [0, 0]
        assert cutting.requests == 2


@sync
async def test_parts_in_memory_are_bounded_together() -> None:
    """Whatever clients do with them: slow ones must not come to fill the memory."""
    source = Table(parts=8)
    async with asked(source, downloads=2, kept_bytes=0) as (client, _, _):
        agreement = await agreed(client)
        app = client._transport.app  # type: ignore[attr-defined]
        slow = [stall(app, agreement, number) for number in (0, 1)]
        for _, stalled in slow:
            await stalled.wait()
        waiting = asyncio.create_task(part_of(client, agreement, 2))
        await until(lambda: app.state.catch_up.snapshots.downloads.waiting == 1)
        assert source.loaded == [0, 1]
        slow[0][0].cancel()
        assert (await waiting).content == source.text(2)
        assert source.loaded == [0, 1, 2]
        slow[1][0].cancel()
        await asyncio.wait([answering for answering, _ in slow])
        assert (await part_of(client, agreement, 7)).content == source.text(7)


@sync
async def test_only_so_many_agreements_are_kept() -> None:
    source = Table()
    async with asked(source) as (client, _, _):
        for part_rows in (*range(1, 30), 29):
            await agreed(client, part_rows)
        assert source.agreed.count(None) == 29
        await agreed(client, 29 - http_snapshots.KEPT)
        assert source.agreed.count(None) == 30


@sync
async def test_closing_ends_what_is_under_way() -> None:
    source = Table(agreeing=asyncio.Event())
    async with asked(source) as (client, snapshots, _):
        asking = asyncio.create_task(client.get(AGREE, params={"part_rows": 10}))
        await until(lambda: source.agreed)
        await snapshots.close()
        assert (await asking).json()["code"] == "unavailable"
        assert source.held == []
        await snapshots.close()


def test_only_so_many_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_snapshots, "QUEUE", 1)
    asyncio.run(too_many_requests())


async def too_many_requests() -> None:
    source = Table(hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source, downloads=1) as (client, snapshots, _):
        agreement = await agreed(client)
        tasks = [asyncio.create_task(part_of(client, agreement, 0)) for _ in range(2)]
        await until(lambda: snapshots.downloads.waiting == 1)
        assert (await part_of(client, agreement, 0)).json()["code"] == "busy"
        source.hold.set()
        assert [one.status_code for one in await asyncio.gather(*tasks)] == [200, 200]
        assert (await part_of(client, agreement, 0)).status_code == 200


# -- a process of its own -------------------------------------------------------------------------------------


@contextlib.contextmanager
def child(code: str, *args: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


# -- the way between ------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Cutting:
    """Before an application: cuts, changes, or rewrites parts that pass."""

    app: Any
    after: int | None = None  # cut there, each answer
    times: int = 1
    flip: int | None = None  # this byte of the text, this many times
    drop: bytes | None = None  # this header
    then: Any = None  # the application after the first cut
    requests: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if "snapshot_parts" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        self.requests += 1
        sent = 0

        async def passed(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.start" and self.drop:
                message = {**message, "headers": [pair for pair in message["headers"] if pair[0] != self.drop]}
            if message["type"] == "http.response.body":
                body = message["body"]
                if self.flip is not None and self.times and sent <= self.flip < sent + len(body):
                    self.times -= 1
                    raw = bytearray(body)
                    raw[self.flip - sent] ^= 1
                    message = {**message, "body": bytes(raw)}
                sent += len(body)
                if self.after is not None and self.times and sent >= self.after:
                    self.times -= 1
                    self.app = self.then or self.app
                    raise ConnectionError
            await send(message)

        with contextlib.suppress(ConnectionError):
            await self.app(scope, receive, passed)


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_a_download_that_was_cut_goes_on(compress: bool) -> None:
    source = Table(parts=1, rows=2_000, width=400)
    text = noise(source)
    source.text = lambda _: text  # type: ignore[method-assign]
    async with closing(app_of(source)) as app:
        cutting = Cutting(app, after=3 * PIECE, times=3)
        async with reading(cutting, compress=compress) as (reader, _):
            agreement = await reader.agree("orders", part_rows=2_000)
            assert await text_of(reader, agreement, 0) == source.text(0)
        assert cutting.times == 0
        assert (cutting.requests, source.loaded) == (4, [0])


def noise(source: Table) -> bytes:
    """Rows that do not shrink when they are packed."""
    rows = [orjson.dumps(secrets.token_hex(source.width // 2)) for _ in range(source.rows)]
    return encode_rows(range(1, source.rows + 1), ["w1"] * source.rows, rows)


@sync
async def test_a_part_that_was_changed_on_the_way_is_refused() -> None:
    source = Table(parts=1, rows=1_000)
    async with closing(app_of(source)) as app:
        cutting = Cutting(app, flip=20_000)
        async with reading(cutting) as (reader, _):
            agreement = await reader.agree("orders", part_rows=1_000)
            with pytest.raises(Unavailable, match="refused: part 0 does not have the SHA-256"):
                await text_of(reader, agreement, 0)
            assert await text_of(reader, agreement, 0) == source.text(0)


@sync
async def test_a_server_that_names_no_hash_is_not_believed() -> None:
    async with closing(app_of(Table())) as app, reading(Cutting(app, drop=b"busrep-sha256")) as (reader, _):
        agreement = await reader.agree("orders", part_rows=10)
        with pytest.raises(Unavailable, match="names no SHA-256"):
            await text_of(reader, agreement, 0)


@sync
async def test_a_link_that_does_not_get_on_is_given_up() -> None:
    async with closing(app_of(Table(parts=1, rows=8_000))) as app:
        cutting = Cutting(app, after=1, times=1_000)
        async with reading(cutting) as (reader, _):
            agreement = await reader.agree("orders", part_rows=8_000)
            with pytest.raises(Unavailable):
                await text_of(reader, agreement, 0)
        assert cutting.requests == http_client.TRIES


@attrs.define
class Peer:
    """Answers requests for parts with these, one after the other: status, headers, body."""

    answers: list[tuple[int, dict[str, str], bytes]]
    requests: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


TEXT = b"1 w1 [1]\n2 w1 [2]\n"
HASH = {"busrep-sha256": hashlib.sha256(TEXT).hexdigest()}
PART = Agreement("orders", EPOCH, {"w1": 9}, {}, (PartRange(0, 9, 2),))
HALF = (200, {**HASH, "content-encoding": "gzip"}, gzip.compress(TEXT, 0)[:-9])  # cut: asked for again
LIES: dict[str, tuple[list[tuple[int, dict[str, str], bytes]], str]] = {
    "another text": ([HALF, (200, {"busrep-sha256": "0" * 64}, TEXT)], "another text"),
    "another coding": ([(200, {**HASH, "content-encoding": "br"}, TEXT)], "was not asked for"),
    "damaged": ([(200, {**HASH, "content-encoding": "gzip"}, b"\x1f\x8b" + b"x" * 20)], "damaged"),
    "a tail": ([(200, {**HASH, "content-encoding": "gzip"}, gzip.compress(TEXT) + b"x")], "follows"),
    "less": ([(200, HASH, TEXT[:9])], "SHA-256"),
}


@pytest.mark.parametrize("case", LIES)
@sync
async def test_what_is_not_believed(case: str) -> None:
    answers, reason = LIES[case]
    peer = Peer(list(answers))
    async with reading(peer, max_bytes=1_000, compress=True) as (reader, _):
        with pytest.raises(Unavailable, match=reason):
            await text_of(reader, PART, 0)
    assert peer.requests == len(answers)


LONG: dict[str, tuple[dict[str, str], bytes]] = {
    "a bomb": ({"content-encoding": "gzip"}, gzip.compress(b"0" * 10**7)),
    "by and by": ({"transfer-encoding": "chunked"}, b"0" * 1_001),
    "at once": ({}, b"0" * 100_000),
}


@pytest.mark.parametrize("case", LONG)
@sync
async def test_a_part_that_is_too_long_is_not_asked_for_again_and_again(case: str) -> None:
    headers, body = LONG[case]
    peer = Peer([(200, {**HASH, **headers}, body)])
    async with reading(peer, max_bytes=1_000, compress=True) as (reader, _):
        with pytest.raises(ConfigError, match="longer than 1000 bytes: raise max_bytes="):
            await text_of(reader, PART, 0)
    assert peer.requests == 1


@sync
async def test_half_a_packed_text_is_gone_on_with() -> None:
    peer = Peer([HALF, (200, HASH, TEXT)])
    async with reading(peer, compress=True) as (reader, _):
        assert await text_of(reader, PART, 0) == TEXT
    assert peer.requests == 2


ANSWERS = {
    "401": (401, b'{"code":"unauthorized"}', ConfigError),
    "500": (500, b"{}", Unavailable),
    "503": (503, b"{}", Unavailable),
    "moved": (302, b"", ConfigError),
    "gone": (410, b'{"code":"snapshot_gone","error":"why"}', SnapshotGone),
    "busy": (503, b'{"code":"snapshot_busy","limit":3}', SnapshotBusy),
}


@pytest.mark.parametrize("case", ANSWERS)
@sync
async def test_other_answers(case: str) -> None:
    status, body, kind = ANSWERS[case]
    async with reading(Peer([(status, {}, body)])) as (reader, _):
        with pytest.raises(kind) as caught:
            await text_of(reader, PART, 0)
        assert type(caught.value) is kind


@sync
async def test_a_reader_that_stops_in_the_middle_ends_its_download() -> None:
    source = Table(parts=1, rows=30_000)
    async with closing(app_of(source, downloads=1)) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=30_000)
        pieces = reader.load(agreement, 0)
        assert await anext(pieces)
        await pieces.aclose()
        assert await text_of(reader, agreement, 0) == source.text(0)


@sync
async def test_a_source_that_is_not_open() -> None:
    source = HttpSource("http://localhost:1", [orders], QUICK)
    with pytest.raises(Unavailable, match="not open"):
        await text_of(source, PART, 0)


# -- agreements that cannot be --------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "stream": "orders", "epoch": EPOCH, "positions": {"w1": 9}, "floors": {"w1": 2},
    "parts": [[2, 5, 3], [5, 9, -1]], "source": "", "id": "",
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "another stream": {"stream": "payments"},
    "no epoch": {"epoch": "x"},
    "no word": {"positions": {"w 1": 9}, "floors": {}},
    "a name that no database holds": {"positions": {"w1": 9, "w" * 256: 9}, "floors": {"w1": 2, "w" * 256: 2}},
    "a negative position": {"positions": {"w1": -1}, "floors": {}},
    "a position of 65 bits": {"positions": {"w1": 2**63}},
    "a floor above its position": {"floors": {"w1": 10}},
    "a floor of nobody": {"floors": {"w2": 1}},
    "a floor of 0": {"floors": {"w1": 0}},
    "a gap": {"parts": [[2, 5, 3], [6, 9, 3]]},
    "an overlap": {"parts": [[2, 5, 3], [4, 9, 3]]},
    "backwards": {"parts": [[5, 9, 3], [2, 5, 3]]},
    "an empty range": {"parts": [[5, 5, 0]]},
    "a negative token": {"parts": [[-1, 5, 0]]},
    "a token of 65 bits": {"parts": [[0, 2**63, 0]]},
    "rows": {"parts": [[0, 5, -2]]},
    "no range": {"parts": [[0, 5]]},
    "no list": {"parts": 5},
    "a hole at the beginning": {"parts": [[3, 5, 3], [5, 9, -1]]},
    "a hole for one writer": {"positions": {"w1": 9, "w2": 7}},
    "rows of 65 bits": {"parts": [[2, 9, 2**63]]},
    "infinite": {"positions": {"w1": "Infinity"}},
    "no map": {"positions": []},
}


@pytest.mark.parametrize("case", WRONG)
@sync
async def test_agreements_that_are_not_believed(case: str) -> None:
    body = orjson.dumps({**GOOD, **WRONG[case]})
    async with reading(Peer([(200, {}, body)])) as (reader, _):
        with pytest.raises(Unavailable, match="refused"):
            await reader.agree("orders", part_rows=10)


@sync
async def test_an_agreement_that_is_believed() -> None:
    async with reading(Peer([(200, {}, orjson.dumps({**GOOD, "source": "theirs"}))])) as (reader, port):
        agreement = await reader.agree("orders", part_rows=10)
        assert (agreement.source, agreement.id) == (f"http://127.0.0.1:{port}", agreement.digest)
        assert SECRET not in agreement.source


PARTS = {
    "": b"3 w1 1\n3 w1 2\n5 w1 3\n",
    "has 1 rows, and 3": b"3 w1 1\n",
    "not ordered": b"4 w1 1\n3 w1 1\n5 w1 1\n",
    "outside of": b"3 w1 1\n3 w1 1\n6 w1 1\n",
    "above the position agreed on": b"3 w1 1\n3 w2 1\n5 w1 1\n",
    "not above the floor": b"3 w1 1\n4 w3 1\n5 w1 1\n",
    "cut off": b"3 w1 1",
    "not 'token": b"3\n",
}


@pytest.mark.parametrize("reason", PARTS)
def test_rows_that_are_not_of_their_part(reason: str) -> None:
    agreement = Agreement("orders", EPOCH, {"w1": 9, "w3": 4}, {"w1": 2, "w3": 4}, (PartRange(2, 5, 3),))
    check_agreement(agreement, "orders")
    if not reason:
        found = asyncio.run(checked_part(agreement, 0, PARTS[reason]))
        assert (found.tokens, found.writers, found.payloads) == ((3, 3, 5), ("w1",) * 3, (b"1", b"2", b"3"))
        assert found.size == len(PARTS[reason])
    else:
        with pytest.raises(Unavailable, match=f"part 0 is refused: .*{reason}"):
            asyncio.run(checked_part(agreement, 0, PARTS[reason]))


# -- with a real store ----------------------------------------------------------------------------------------


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_snapshot_of_a_database(kind: str, request: pytest.FixtureRequest) -> None:
    """Let go of after each part, agreed on again by another server while rows are written: still of one state."""
    url = request.getfixturevalue(f"{kind}_url")

    async def main() -> None:
        store = open_store(url, Registry([orders]))
        await store.init()
        await store.open()
        try:
            claim = await store.claim("w1", ["orders"], timeout=5)
            await write(store, claim, *[1, 2, 1] * 10)
            await store.heartbeat(claim, {"orders": 30})
            own = await store.agree("orders", part_rows=10)
            texts = [await text_of(store, own, number) for number in range(len(own.parts))]
            await store.leave(own)
            port, agreement, got = 0, None, []
            for number in range(len(own.parts)):
                app = catch_up_app(store, [orders], secret=SECRET)
                async with closing(app), serve(app, port=port) as serving:
                    port = serving.port
                    source = HttpSource(serving.url, [orders], QUICK, options=HttpOptions(secret=SECRET))
                    await source.open()
                    agreement = agreement or await source.agree("orders", part_rows=10)
                    got.append(await text_of(source, agreement, number))
                    await source.close()
                await write(store, claim, 1, 1)
                await store.heartbeat(claim, {"orders": 32 + 2 * number})
            assert agreement is not None
            assert agreement.same(own)
            assert len(got) == 4
            assert got == texts
        finally:
            await store.close()

    asyncio.run(main())


@sync
async def test_pruned_at_the_store() -> None:
    async with (
        memory_store() as store,
        closing(catch_up_app(store, STREAMS, secret=SECRET)) as app,
        serve(app) as serving,
    ):
        source = HttpSource(serving.url, [orders], QUICK, options=HttpOptions(secret=SECRET))
        await source.open()
        agreement = await source.agree("orders", part_rows=2)
        claim = await store.claim("w1", ["orders"], timeout=1)
        await write(store, claim, 1, 1, 1)
        await store.heartbeat(claim, {"orders": 7})
        assert (await source.agree("orders", part_rows=2, again=agreement)).same(agreement)
        await store.prune(keep=1)
        for number in (0, 1):
            with pytest.raises(SnapshotGone):
                await text_of(source, agreement, number)
        await source.close()


@sync
async def test_a_reader_comes_online_through_it_while_its_server_restarts() -> None:
    """The whole way: a bus that gets its rows and its snapshot over HTTP, downloads cut, the server once replaced."""
    async with deployment() as shop, shop.bus(writer="w1") as writer:
        last = await write_orders(writer, 95)
        await writer.writing.beat()
        store = writer.store
        async with closing(catch_up_app(store, shop.streams, secret=SECRET)) as first:
            async with closing(catch_up_app(store, shop.streams, secret=SECRET)) as second:
                cutting = Cutting(first, after=1, times=2, then=second)
                async with serve(cutting) as serving:
                    source = serving.url.replace("://", f"://:{SECRET}@")
                    settings = attrs.evolve(shop.settings, fetch_timeout=20.0)
                    reader = shop.bus(
                        store=source_of(source, shop.streams, settings),
                        reader_store=writer.store,
                        reader="billing",
                        start=None,
                        settings=settings,
                    )
                    async with reader:
                        target = Target().of(reader)
                        await reader.wait_for(shop.streams[0], "w1", last)
                        assert target.parts == list(range(10))
                        more = await write_orders(writer, 5, first=95)
                        await reader.wait_for(shop.streams[0], "w1", more)
                        assert target.numbers == list(range(100))
                        await online(reader)
        assert cutting.times == 0


def source_of(url: str, streams: Any, settings: Settings) -> HttpSource:
    return HttpSource(url, list(streams), settings)


MEMORY = """
import asyncio, os, sys
sys.path.insert(0, os.getcwd())
from busrep.http.serve import serve
from tests.http.test_snapshots import Table, app_of

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

async def main():
    app = app_of(Table(parts=20, rows=10_000, width=180), kept_bytes=2**23)
    async with serve(app) as serving:
        print(serving.port, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(resident(), flush=True)
    await app.state.catch_up.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@sync
async def test_the_server_s_memory_does_not_grow_with_the_snapshot() -> None:
    """40 MB, each part for three readers, and 8 MiB of them kept."""
    with child(MEMORY) as server:
        reader = HttpSource(
            f"http://127.0.0.1:{int(server.stdout.readline())}", [orders], QUICK, options=HttpOptions(secret=SECRET)
        )
        reader.state = _state  # type: ignore[method-assign]

        def resident() -> int:
            server.stdin.write("\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        async def read(agreement: Agreement, number: int) -> int:
            size = 0
            async for piece in reader.load(agreement, number):
                size += len(piece)
            return size

        await reader.open()
        agreement = await reader.agree("orders", part_rows=10_000)
        total = 0
        for number in range(20):
            total += sum(await asyncio.gather(*(read(agreement, number) for _ in range(3))))
            if number == 10:
                before = resident()
        grown = resident() - before
        assert total > 115_000_000
        assert grown < 8_000, f"{grown} kB"
        await reader.close()
        server.stdin.close()
        assert server.wait() == 0
