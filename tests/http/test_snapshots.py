"""Snapshots over HTTP: one source for many readers, and what may happen to either side, on the way, and on disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import hashlib
import itertools
import os
import secrets
import signal
import ssl
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import httpx
import orjson
import pytest

from busrep import Settings
from busrep.core.snapshots import Agreement, PartRange, SnapshotSource, encode_rows
from busrep.errors import ConfigError, SnapshotBusy, SnapshotGone, Unavailable, UnknownStream
from busrep.http import snapshots_client as http_snapshots_client
from busrep.http import snapshots_spool as http_snapshots_spool
from busrep.http.serve import ServeLimits, serve
from busrep.http.server import CatchUpLimits, catch_up_app
from busrep.http.snapshots import Snapshots, UnknownSnapshot
from busrep.http.snapshots_limits import SnapshotLimits
from busrep.http.snapshots_spool import PIECE, Spool
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
needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="no folder locks there")


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
    left: asyncio.Event = attrs.field(factory=asyncio.Event)

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
        self.left.set()


def app_of(source: Any, **limits: Any) -> Any:
    top = {name: limits.pop(name) for name in ("deadline", "retry_after") if name in limits}
    return catch_up_app(
        Scripted(),  # type: ignore[arg-type]
        STREAMS,
        secret=SECRET,
        limits=CatchUpLimits(snapshots=SnapshotLimits(**limits), **{"retry_after": 0, **top}),
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
        yield client, app.state.catch_up.snapshots.snapshots, source


@contextlib.asynccontextmanager
async def reading(app: Any, *, port: int = 0, **options: Any) -> AsyncIterator[tuple[HttpSource, int]]:
    """A reader of a server that listens; and where."""
    async with serve(app, port=port) as serving:
        source = HttpSource(serving.url, [orders], options.pop("settings", QUICK), secret=SECRET, **options)
        source._state = _state  # type: ignore[method-assign]  # peers of these tests have none
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
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def path_of(agreement: dict[str, Any], number: int) -> str:
    return f"/replication/v1/snapshot_parts/{agreement['id']}/{number}"


# -- what passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
@sync
async def test_a_reader_gets_what_the_store_has(compress: bool) -> None:
    async with memory_store() as store, closing(catch_up_app(store, STREAMS, secret=SECRET)) as app:
        own = await store.agree("orders", part_rows=2)
        async with serve(app) as serving:
            source = HttpSource(serving.url, STREAMS, QUICK, secret=SECRET, compress=compress)
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
        part = await client.get(path_of(found, 1))
        assert part.content == source.text(1)
        assert part.headers["busrep-sha256"] == hashlib.sha256(source.text(1)).hexdigest()
        assert part.headers["content-length"] == str(len(part.content))
        assert part.headers["content-type"] == "text/plain; charset=utf-8"


RANGES = {
    None: (200, 0, None),
    "bytes=0-": (200, 0, None),
    "bytes=5-": (206, 5, None),
    "bytes=5-9": (206, 5, 10),
    "bytes=5-100000": (206, 5, None),
    "bytes=-5": (200, 0, None),
    "bytes=5-7,9-": (200, 0, None),
    "lines=1-": (200, 0, None),
    "bytes=9-5": (416, 0, 0),
    "bytes=100000-": (416, 0, 0),
}


@pytest.mark.parametrize("asked_for", RANGES)
@sync
async def test_ranges(asked_for: str | None) -> None:
    status, begin, end = RANGES[asked_for]
    async with asked() as (client, _, source):
        path = path_of((await client.get(AGREE, params={"part_rows": 10})).json(), 0)
        text = source.text(0)
        tag = (await client.get(path)).headers["etag"]
        given = {} if asked_for is None else {"range": asked_for, "if-range": tag}
        answer = await client.get(path, headers={**given, "accept-encoding": "gzip"})
        assert answer.status_code == status
        if status != 416:
            assert answer.content == text[begin:end]
            assert answer.headers.get("content-encoding") == ("gzip" if status == 200 else None)
        if status == 206:
            assert answer.headers["content-range"] == f"bytes {begin}-{(end or len(text)) - 1}/{len(text)}"
            other = await client.get(path, headers={"range": asked_for or "", "if-range": '"another"'})
            assert (other.status_code, other.content) == (200, text)


@sync
async def test_a_packed_part_is_the_part() -> None:
    async with asked(Table(rows=5_000)) as (client, _, source):
        path = path_of((await client.get(AGREE, params={"part_rows": 5_000})).json(), 2)
        async with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
            raw = b"".join([piece async for piece in answer.aiter_raw()])
        assert len(raw) < len(source.text(2)) / 10
        assert gzip.decompress(raw) == source.text(2)
        assert "etag" not in answer.headers, "ranges are of the text as it is"


@sync
async def test_an_empty_part_is_one() -> None:
    async with closing(app_of(Table(parts=1, rows=1, width=0))) as app:
        source = app.state.catch_up.snapshots.snapshots._source.source
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
    "another one's id": ("POST", f"/replication/v1/snapshot_parts/{'0' * 64}/0", {}, ORDERS, 400, "bad_agreement"),
    "a long one": ("POST", AGREE, {"part_rows": 1}, b"[" * 5_000, 413, "body"),
    "a POST elsewhere": ("POST", "/replication/v1/state", {}, b"{}", 405, "method"),
    "a PUT": ("PUT", AGREE, {"part_rows": 1}, b"", 405, "method"),
    "an unknown one": ("GET", f"/replication/v1/snapshot_parts/{'0' * 64}/0", {}, b"", 410, "snapshot_unknown"),
    "no number": ("GET", f"/replication/v1/snapshot_parts/{'0' * 64}/x", {}, b"", 400, "bad_parameter"),
    "no such number": ("GET", "PART", {}, b"", 400, "bad_parameter"),
    "too many parts": ("GET", AGREE, {"part_rows": 3}, b"", 400, "too_many_parts"),
}


@pytest.mark.parametrize("case", REFUSALS)
@sync
async def test_what_is_refused(case: str) -> None:
    method, path, params, body, status, code = REFUSALS[case]
    source = Table(parts=1_000 if case == "too many parts" else 3)
    async with asked(source, agreement_bytes=4_096) as (client, snapshots, _):
        if path == "PART":
            path = path_of((await client.get(AGREE, params={"part_rows": 10})).json(), 3)
        headers = {"authorization": "Bearer wrong"} if code == "unauthorized" else {}
        answer = await client.request(method, path, params=params, content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert snapshots.statistics()["spooled_bytes"] == 0
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
async def test_a_hundred_readers_at_once_cost_as_much_as_one() -> None:
    source, context, patient = Table(parts=4, rows=300), ssl.create_default_context(), Settings()
    async with closing(app_of(source)) as app, serve(app, limits=ServeLimits(connections=500)) as serving:

        async def read() -> bytes:
            reader = HttpSource(serving.url, [orders], patient, secret=SECRET, verify=context)
            reader._state = _state  # type: ignore[method-assign]
            await reader.open()
            agreement = await reader.agree("orders", part_rows=300)
            texts = []
            for number in range(0, len(agreement.parts), 2):
                texts += await asyncio.gather(*(text_of(reader, agreement, n) for n in (number, number + 1)))
            await reader.close()
            return b"".join(texts)

        found = await asyncio.gather(*(read() for _ in range(100)))
        assert set(found) == {b"".join(map(source.text, range(4)))}
        assert source.agreed == [None]
        assert sorted(source.loaded) == [0, 1, 2, 3]
        numbers = app.state.catch_up.statistics()["snapshots"]
        assert (numbers["agreements"], numbers["parts_loaded"]) == (1, 4)
        await until(lambda: not source.held)


@sync
async def test_a_reader_that_hangs_up_leaves_the_work_to_the_others() -> None:
    source = Table(agreeing=asyncio.Event(), hold=asyncio.Event())
    assert source.agreeing is not None
    assert source.hold is not None
    async with asked(source) as (client, _, _):
        first, second = (asyncio.create_task(client.get(AGREE, params={"part_rows": 10})) for _ in range(2))
        await until(lambda: source.agreed)
        first.cancel()
        source.agreeing.set()
        agreement = (await second).json()
        first, second = (asyncio.create_task(client.get(path_of(agreement, 0))) for _ in range(2))
        await until(lambda: source.loaded)
        first.cancel()
        source.hold.set()
        assert (await second).content == source.text(0)
        assert (source.agreed, source.loaded) == ([None], [0])


@sync
async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    source = Table(hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source, loads=1) as (client, snapshots, _):
        agreement = (await client.get(AGREE, params={"part_rows": 10})).json()
        first, second = (asyncio.create_task(client.get(path_of(agreement, n))) for n in (0, 1))
        (kept,) = snapshots._kept.values()
        await until(lambda: len(kept.loading) == 2 and source.loaded)
        for task in (first, second):
            task.cancel()
        await asyncio.wait([first, second])
        source.hold.set()
        await until(lambda: not kept.loading)
        assert source.loaded == [0], "that was under way: it is there for whoever comes next"
        assert (await client.get(path_of(agreement, 0))).content == source.text(0)
        assert (await client.get(path_of(agreement, 1))).content == source.text(1)
        assert source.loaded == [0, 1]


@sync
async def test_newcomers_share_a_young_agreement_and_not_an_old_one() -> None:
    source, now = Table(), 0.0
    snapshots = Snapshots(source, SnapshotLimits(shared_for=60), clock=lambda: now)
    first = await snapshots.agree("orders", 10, None)
    now, source.position = 60.0, 2_000_000
    assert await snapshots.agree("orders", 10, None) == first
    assert Agreement.from_json(await snapshots.agree("orders", 11, None)).positions == {"w1": 2_000_000}
    assert await snapshots.agree("payments", 10, None) != first
    now = 61.0
    assert await snapshots.agree("orders", 10, None) != first
    await snapshots.close()
    assert source.held == []


@sync
async def test_the_same_content_agreed_on_anew_keeps_its_parts() -> None:
    source, now = Table(), 0.0
    snapshots = Snapshots(source, SnapshotLimits(shared_for=60), clock=lambda: now)
    first = Agreement.from_json(await snapshots.agree("orders", 10, None))
    (await snapshots.part(first.digest, 0)).close()
    now = 61.0
    assert Agreement.from_json(await snapshots.agree("orders", 10, None)) == first
    assert (len(source.agreed), len(source.held)) == (2, 1)
    (await snapshots.part(first.digest, 0)).close()
    assert source.loaded == [0]
    await snapshots.close()
    assert source.held == []


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
    async with asked() as (client, snapshots, source):
        honest = Agreement.from_json((await client.get(AGREE, params={"part_rows": 10})).content)
        wrong = attrs.evolve(honest, parts=[attrs.evolve(part, rows=1) for part in honest.parts])
        unknown = attrs.evolve(honest, parts=[attrs.evolve(part, rows=-1) for part in honest.parts])
        assert wrong.digest == honest.digest
        snapshots._forget(honest.id)
        for mine in (wrong, honest, unknown):
            answer = await client.post(AGREE, params={"part_rows": 10}, content=mine.to_json())
            assert Agreement.from_json(answer.content) == mine
        fresh = Agreement.from_json((await client.get(AGREE, params={"part_rows": 10})).content)
        assert fresh == honest
        again = Agreement.from_json((await client.get(AGREE, params={"part_rows": 10})).content)
        assert again == honest
        assert [one is None for one in source.agreed] == [True, False, True]


@sync
async def test_a_part_is_of_so_many_rows_and_bytes_at_most() -> None:
    """Whatever is asked for; what others have on disk does not go for it."""
    asked_for = []

    class Large(Table):
        async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
            asked_for.append(part_rows)
            return await super().agree(stream, part_rows=part_rows, again=again)

    source = Large(parts=2, rows=4_000, width=80)  # 370 kB each
    async with asked(source, part_rows=500, part_bytes=400_000, spool_bytes=800_000) as (client, snapshots, _):
        agreement = (await client.get(AGREE, params={"part_rows": 10**12})).json()
        assert asked_for == [500]
        assert (await client.get(path_of(agreement, 0))).status_code == 200
        source.width = 160
        answer = await client.get(path_of(agreement, 1))
        assert (answer.status_code, answer.json()["code"]) == (400, "part_too_long")
        assert "SnapshotLimits.part_bytes" in answer.json()["error"]
        assert snapshots.statistics()["spooled_parts"] == 1
    async with closing(app_of(source, part_bytes=400_000)) as app, reading(app) as (reader, _):
        agreed = await reader.agree("orders", part_rows=10)
        with pytest.raises(ConfigError, match="lower Settings.snapshot_part_rows"):
            await text_of(reader, agreed, 0)
    assert len(source.loaded) == 3


# -- what the source holds ------------------------------------------------------------------------------------


@sync
async def test_a_stalled_client_holds_nothing_of_the_source() -> None:
    """It takes the head of its answer, and nothing more; the source is let go of, and in the end the client is."""
    source = Table(parts=1, rows=5_000)
    async with asked(source, deadline=0.2) as (client, snapshots, _):
        agreement = (await client.get(AGREE, params={"part_rows": 5_000})).json()
        stalled = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                stalled.set()
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {
            "type": "http", "method": "GET", "path": path_of(agreement, 0), "query_string": b"", "root_path": "",
            "headers": [(b"authorization", BEARER["authorization"].encode())],
        }  # fmt: skip
        app = client._transport.app  # type: ignore[attr-defined]
        answering = asyncio.create_task(app(scope, receive, send))
        await stalled.wait()
        await source.left.wait()
        assert source.held == []
        await answering
        (part,) = snapshots._spool._parts
        assert part.readers == 0
        assert app.state.catch_up.statistics()["refused"] == {"gone": 1}


@sync
async def test_a_download_that_takes_too_long_is_cut_and_no_error_of_the_server_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over a slow link each part takes several requests: that is counted, and not told each time."""
    source = Table(parts=1, rows=40_000, width=400)
    async with closing(app_of(source, deadline=0.5)) as app, serve(app) as serving:
        snapshots = app.state.catch_up.snapshots.snapshots
        agreement = Agreement.from_json(await snapshots.agree("orders", 40_000, None))
        (await snapshots.part(agreement.digest, 0)).close()
        head = f"GET {path_of({'id': agreement.digest}, 0)} HTTP/1.1\r\nHost: x\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.port, limit=1_000)
        writer.write(f"{head}Authorization: {BEARER['authorization']}\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: app.state.catch_up.statistics()["refused"])
        read = 0
        while piece := await reader.read(2**20):
            read += len(piece)
        assert read < len(source.text(0)), "cut, not ended"
        writer.close()
        await writer.wait_closed()
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == []


@sync
async def test_an_idle_snapshot_is_let_go_of_and_taken_up_again() -> None:
    source = Table()
    async with asked(source, held_for=0.01) as (client, snapshots, _):
        agreement = (await client.get(AGREE, params={"part_rows": 10})).json()
        await source.left.wait()
        assert snapshots.statistics()["held"] == 0
        for number in range(3):
            source.left.clear()
            assert (await client.get(path_of(agreement, number))).content == source.text(number)
            await source.left.wait()
        assert [None if again is None else again.digest for again in source.agreed] == [None] + 3 * [agreement["id"]]
        assert source.held == []


@sync
async def test_a_snapshot_that_is_read_on_and_on_is_renewed_at_the_source() -> None:
    source, now = Table(hold=asyncio.Event()), 0.0
    assert source.hold is not None
    snapshots = Snapshots(source, SnapshotLimits(held_at_most=300, loads=3), clock=lambda: now)
    agreement = Agreement.from_json(await snapshots.agree("orders", 10, None))
    first = asyncio.create_task(snapshots.part(agreement.digest, 0))
    await until(lambda: source.loaded)
    now = 301.0
    second = asyncio.create_task(snapshots.part(agreement.digest, 1))
    await until(lambda: snapshots._kept[agreement.digest].hold.lock.locked())
    assert len(source.held) == 1, "what is being loaded ends first"
    source.hold.set()
    for reading_ in await asyncio.gather(first, second):
        reading_.close()
    assert [again is None for again in source.agreed] == [True, False]
    assert len(source.held) == 1
    await snapshots.close()
    assert source.held == []


@sync
async def test_only_so_many_snapshots_at_a_time() -> None:
    source = Table()
    async with closing(app_of(source, snapshots=1, held_for=60)) as app, reading(app) as (reader, port):
        agreement = await reader.agree("orders", part_rows=10)
        other = HttpSource(f"http://127.0.0.1:{port}", [payments], QUICK, secret=SECRET)
        other._state = lambda *_: _other_state()  # type: ignore[method-assign, assignment]
        await other.open()
        with pytest.raises(SnapshotBusy) as caught:
            await other.agree("payments", part_rows=10)
        assert caught.value.limit == 1
        for number in range(3):
            await text_of(reader, agreement, number)
        await source.left.wait()  # all of it is on disk
        assert (await other.agree("payments", part_rows=10)).stream == "payments"
        await other.close()


async def _other_state() -> Any:
    return _State(("payments",))


@sync
async def test_a_source_that_takes_too_long_is_given_up() -> None:
    for source in (Table(agreeing=asyncio.Event()), Table(hold=asyncio.Event())):
        async with asked(source, load_timeout=0.01) as (client, snapshots, _):
            answer = await client.get(AGREE, params={"part_rows": 10})
            if source.hold is not None:
                answer = await client.get(path_of(answer.json(), 0))
            assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
            assert snapshots.statistics()["spooled_bytes"] == 0
        assert source.held == []


@sync
async def test_a_slow_agreement_outlives_the_requests_that_wait_for_it() -> None:
    source = Table(agreeing=asyncio.Event())
    assert source.agreeing is not None
    async with asked(source, deadline=0.02) as (client, _, _):
        for _ in range(3):
            assert (await client.get(AGREE, params={"part_rows": 10})).json()["code"] == "deadline"
        source.agreeing.set()
        await until(lambda: source.held)
        assert (await client.get(AGREE, params={"part_rows": 10})).status_code == 200
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
        agreement = (await client.get(AGREE, params={"part_rows": 10})).json()
        source.error = error
        for path, params in ((AGREE, {"part_rows": 11}), (path_of(agreement, 1), {})):
            answer = await client.get(path, params=params)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert "secret-of-somebody" not in answer.text
        assert snapshots.statistics()["spooled_bytes"] == 0
        source.error = None
        assert (await client.get(path_of(agreement, 1))).content == source.text(1)


@sync
async def test_a_pruned_part_ends_it_for_who_needs_it_and_for_newcomers() -> None:
    async with closing(app_of(Table(gone=1))) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=10)
        source = app.state.catch_up.snapshots.snapshots._source.source
        with pytest.raises(SnapshotGone, match="pruned by now"):
            await text_of(reader, agreement, 1)
        assert await text_of(reader, agreement, 2) == source.text(2), "somebody who has applied that part goes on"
        source.floor = 5
        assert not (await reader.agree("orders", part_rows=10)).same(agreement)


# -- restarts, and what is forgotten --------------------------------------------------------------------------


@sync
async def test_a_reader_goes_on_with_a_server_that_was_restarted() -> None:
    source = Table()
    async with closing(app_of(source)) as app, reading(app) as (reader, port):
        agreement = await reader.agree("orders", part_rows=10)
        assert await text_of(reader, agreement, 0) == source.text(0)
    source.position += 5  # written since
    async with closing(app_of(source)) as app, serve(app, port=port):
        await reader.open()
        assert await text_of(reader, agreement, 1) == source.text(1)
        assert (await reader.agree("orders", part_rows=10, again=agreement)).same(agreement)
        assert [again is None for again in source.agreed] == [True, False]
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
        cutting = Cutting(first, after=2 * PIECE)
        async with reading(cutting) as (reader, _):
            agreement = await reader.agree("orders", part_rows=8_000)
            cutting.then = second
            async for piece in reader.load(agreement, 0):
                got.append(piece)
        assert b"".join(got) == source.text(0)
        assert source.loaded == [0, 0]
        assert [one for one in cutting.ranges if one] == [cutting.ranges[-1]] * 2, "refused by the second, then not"


@sync
async def test_what_is_not_used_is_forgotten_and_removed_from_disk() -> None:
    source, now = Table(), 0.0
    limits = SnapshotLimits(unused_after=600, kept_at_most=1_000, shared_for=1)
    snapshots = Snapshots(source, limits, clock=lambda: now)
    id = Agreement.from_json(await snapshots.agree("orders", 10, None)).digest
    (await snapshots.part(id, 0)).close()
    now = 600.0
    (await snapshots.part(id, 0)).close()
    now = 1_000.0
    open_one = await snapshots.part(id, 0)
    (kept,) = snapshots._kept.values()
    now = 1_001.0  # used or not
    snapshots._sweep_now()
    assert (snapshots.statistics()["kept"], snapshots.statistics()["spooled_parts"]) == (0, 0)
    assert not kept.parts[0].path.exists()
    assert b"".join([piece async for piece in open_one.pieces()]) == source.text(0), "who has begun gets it whole"
    open_one.close()
    assert snapshots.statistics()["spooled_bytes"] == 0
    await source.left.wait()
    with pytest.raises(UnknownSnapshot):
        await snapshots.part(id, 0)
    await snapshots.agree("orders", 10, None)
    now = 1_700.0
    snapshots._sweep_now()
    assert snapshots._kept == {}
    await snapshots.close()
    assert source.held == []


@sync
async def test_only_so_many_agreements_are_remembered() -> None:
    source, now = Table(), 0.0
    snapshots = Snapshots(source, SnapshotLimits(kept=2, snapshots=9), clock=lambda: now)
    ids = []
    for part_rows in (1, 2, 3):
        now, source.position = now + 1, source.position + 1
        ids.append(Agreement.from_json(await snapshots.agree("orders", part_rows, None)).digest)
    assert list(snapshots._kept) == ids[1:]
    source.hold = asyncio.Event()
    loading = [asyncio.create_task(snapshots.part(id, 0)) for id in ids[1:]]
    await until(lambda: len(source.loaded) == 2)
    source.position += 1
    with pytest.raises(SnapshotBusy):
        await snapshots.agree("orders", 4, None)
    source.hold.set()
    for one in await asyncio.gather(*loading):
        one.close()
    await snapshots.close()
    assert source.held == []


@sync
async def test_closing_ends_what_is_under_way() -> None:
    source = Table(hold=asyncio.Event())
    snapshots = Snapshots(source, SnapshotLimits())
    id = Agreement.from_json(await snapshots.agree("orders", 10, None)).digest
    loading = asyncio.create_task(snapshots.part(id, 0))
    await until(lambda: source.loaded)
    (folder,) = [snapshots._spool._folder]
    assert folder is not None
    await snapshots.close()
    with pytest.raises(Unavailable, match="closed"):
        await loading
    assert source.held == []
    assert not folder.path.exists()
    await snapshots.close()


@sync
async def test_what_was_forgotten_while_it_was_loaded_leaves_no_clock_behind() -> None:
    source = Table(hold=asyncio.Event())
    snapshots = Snapshots(source, SnapshotLimits())
    id = Agreement.from_json(await snapshots.agree("orders", 10, None)).digest
    loading = asyncio.create_task(snapshots.part(id, 0))
    await until(lambda: source.loaded)
    hold = snapshots._kept[id].hold
    snapshots._forget(id)
    await snapshots.close()
    with pytest.raises(Unavailable, match="closed"):
        await loading
    assert hold._leaving is None
    assert source.held == []


@sync
async def test_only_so_many_requests_at_a_time() -> None:
    source = Table(hold=asyncio.Event())
    assert source.hold is not None
    async with asked(source, requests=2) as (client, snapshots, _):
        path = path_of((await client.get(AGREE, params={"part_rows": 10})).json(), 0)
        waiting = [asyncio.create_task(client.get(path)) for _ in range(2)]
        (kept,) = snapshots._kept.values()
        await until(lambda: 0 in kept.loading and kept.loading[0].waiting == 2)
        assert (await client.get(path)).json()["code"] == "busy"
        source.hold.set()
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]
        assert (await client.get(path)).status_code == 200


# -- on disk --------------------------------------------------------------------------------------------------


async def spooled(spool: Spool, *pieces: bytes) -> Any:
    async def given() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return await spool.write(given())


@sync
async def test_files_are_private_and_go_with_the_spool(tmp_path: Path) -> None:
    spool = Spool(2**20, str(tmp_path))
    assert entries(tmp_path) == [], "nothing before it is needed"
    part = await spooled(spool, b"a" * 300_000, b"", b"b" * 5)
    (folder,) = entries(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert part.path.stat().st_mode & 0o777 == 0o600
    assert part.path.read_bytes() == b"a" * 300_000 + b"b" * 5
    assert (part.size, part.digest) == (300_005, hashlib.sha256(part.path.read_bytes()).hexdigest())
    spool.close()
    spool.close()
    assert entries(tmp_path) == []


@sync
async def test_the_least_recently_used_parts_make_room(tmp_path: Path) -> None:
    spool = Spool(250, str(tmp_path))
    first, second = await spooled(spool, b"1" * 100), await spooled(spool, b"2" * 100)
    one = spool.open(first)
    assert one is not None
    one.close()
    third = await spooled(spool, b"3" * 100)
    assert [part.removed for part in (first, second, third)] == [False, True, False]
    assert (spool.bytes, spool.parts, spool.open(second)) == (200, 2, None)
    readers = [spool.open(first), spool.open(third)]
    with pytest.raises(http_snapshots_spool.SpoolTrouble, match="spool_bytes"):
        await spooled(spool, b"4" * 100)  # what is being read frees nothing when it goes
    assert (spool.bytes, len(entries(first.path.parent))) == (200, 2)
    for reader in readers:
        assert reader is not None
        reader.close()
    await spooled(spool, b"5" * 200)
    assert (first.removed, third.removed, spool.bytes) == (True, True, 200)
    spool.close()


@sync
async def test_a_full_disk_is_said_and_nothing_half_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = Table(rows=20_000)
    async with closing(app_of(source)) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=20_000)
        real, left = os.write, [400_000]

        def fill(fd: int, data: Any) -> int:
            if len(data) > 10_000:  # a piece of a part; not what wakes an event loop
                left[0] -= len(data)
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, data)

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fill)
            with pytest.raises(Unavailable, match="503 .*cannot be written to the server's disk: No space left"):
                await text_of(reader, agreement, 0)
        numbers = app.state.catch_up.statistics()
        assert (numbers["snapshots"]["spooled_bytes"], set(numbers["refused"])) == (0, {"spool"})
        folder = app.state.catch_up.snapshots.snapshots._spool._folder
        assert entries(folder.path) == []
        assert await text_of(reader, agreement, 0) == source.text(0)
    assert any("cannot be written to disk" in one.getMessage() for one in caplog.records)


@sync
async def test_a_bound_that_is_too_small_is_named() -> None:
    async with asked(Table(rows=5_000), spool_bytes=65_536) as (client, _, _):
        agreement = (await client.get(AGREE, params={"part_rows": 5_000})).json()
        answer = await client.get(path_of(agreement, 0))
        assert (answer.status_code, answer.json()["code"]) == (503, "spool")
        assert "SnapshotLimits.spool_bytes" in answer.json()["error"]


@sync
async def test_a_spool_smaller_than_the_snapshot_serves_it_all_the_same() -> None:
    source = Table(parts=5, rows=1_000)  # of 30 kB each
    async with closing(app_of(source, spool_bytes=70_000)) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=1_000)
        for _ in range(2):
            for number in range(5):
                assert await text_of(reader, agreement, number) == source.text(number)
        assert app.state.catch_up.statistics()["snapshots"]["spooled_bytes"] <= 70_000
        assert len(source.loaded) == 10


@pytest.mark.parametrize("damage", ["flipped", "shortened", "removed"])
@sync
async def test_a_part_that_was_changed_on_disk_is_refused_and_loaded_again(damage: str) -> None:
    source = Table(parts=1, rows=8_000)
    async with closing(app_of(source)) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=8_000)
        assert await text_of(reader, agreement, 0) == source.text(0)
        (part,) = app.state.catch_up.snapshots.snapshots._spool._parts
        raw = bytearray(part.path.read_bytes())
        if damage == "removed":
            part.path.unlink()
        elif damage == "shortened":
            part.path.write_bytes(raw[:-1_000])
        else:
            raw[100] ^= 1
            part.path.write_bytes(raw)
            with pytest.raises(Unavailable, match="SHA-256"):
                await text_of(reader, agreement, 0)
        assert await text_of(reader, agreement, 0) == source.text(0)
        assert source.loaded == [0, 0]


@sync
async def test_a_part_that_cannot_be_read_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async with asked(Table(parts=1)) as (client, _, source):
        path = path_of((await client.get(AGREE, params={"part_rows": 10})).json(), 0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", failing)
            with contextlib.suppress(AssertionError, httpx.TransportError):  # an answer without an end
                await client.get(path)
        assert (await client.get(path)).content == source.text(0)
        assert source.loaded == [0, 0]


@sync
async def test_a_folder_that_somebody_cleaned_away_is_made_anew(tmp_path: Path) -> None:
    spool = Spool(2**20, str(tmp_path))
    part = await spooled(spool, b"1")
    part.path.unlink()
    part.path.parent.rmdir()
    assert spool.open(part) is None
    other = await spooled(spool, b"2")
    assert other.path.read_bytes() == b"2"
    spool.close()
    assert entries(tmp_path) == []


CHILD = """
import asyncio, sys
from busrep.http.snapshots_spool import Spool

async def main():
    async def pieces():
        yield b"x" * 1000
    spool = Spool(2**20, sys.argv[1])
    await spool.write(pieces())
    print("written", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


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


@needs_locks
@sync
async def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    with (
        child(CHILD, str(tmp_path)) as killed,
        child(CHILD, str(tmp_path)) as ended,
        child(CHILD, str(tmp_path)) as alive,
    ):
        for process in (killed, ended, alive):
            assert process.stdout.readline() == "written\n"
        assert len(entries(tmp_path)) == 3
        ended.communicate("\n")
        assert len(entries(tmp_path)) == 2, "removed at exit"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        (tmp_path / "busrep-spool-a-file").touch()
        (tmp_path / "busrep-spool-elsewhere").symlink_to(tmp_path.parent)
        assert len(entries(tmp_path)) == 4
        spool = Spool(2**20, str(tmp_path))
        await spooled(spool, b"1")
        assert len([one for one in entries(tmp_path) if one.is_dir() and not one.is_symlink()]) == 2
        assert tmp_path.parent.exists()
        spool.close()
        alive.communicate("\n")
    assert {one.name for one in entries(tmp_path)} == {"busrep-spool-a-file", "busrep-spool-elsewhere"}


@needs_locks
@sync
async def test_a_place_where_no_folder_can_be_locked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks: what cannot be told from what was left behind is not used."""
    import fcntl

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    spool = Spool(2**20, str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", failing)
        with pytest.raises(http_snapshots_spool.SpoolTrouble, match="No locks available"):
            async with asyncio.timeout(10):
                await spooled(spool, b"1")
    assert entries(tmp_path) == []
    assert (await spooled(spool, b"1")).path.exists()
    spool.close()


@needs_locks
@sync
async def test_a_link_in_the_place_of_the_folder_leads_nowhere(tmp_path: Path) -> None:
    """Somebody cleaned the folder away, and somebody else made a link of its name."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1.part").write_bytes(b"theirs")
    base = tmp_path / "base"
    base.mkdir()
    spool = Spool(2**20, str(base))
    part = await spooled(spool, b"ours")
    part.path.unlink()
    part.path.parent.rmdir()
    part.path.parent.symlink_to(elsewhere)
    assert spool.open(part) is None
    other = await spooled(spool, b"ours as well")
    assert other.path.parent != part.path.parent
    spool.close()
    assert {one.name: one.read_bytes() for one in entries(elsewhere)} == {"1.part": b"theirs"}


@needs_locks
@sync
async def test_a_write_that_outlives_its_spool_touches_no_other_one(tmp_path: Path) -> None:
    """The number of a closed folder is soon that of another one."""
    spool, begun, go_on = Spool(2**20, str(tmp_path)), asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 300_000
        begun.set()
        await go_on.wait()
        raise ConnectionError

    writing = asyncio.create_task(spool.write(pieces()))
    await begun.wait()
    (folder,) = entries(tmp_path)
    spool.close()
    other = Spool(2**20, str(tmp_path))
    part = await spooled(other, b"theirs")
    folder.mkdir()
    (folder / "1.part").touch()  # somebody else's
    go_on.set()
    with pytest.raises(ConnectionError):
        await writing
    assert part.path.read_bytes() == b"theirs"
    assert (folder / "1.part").exists()
    other.close()


@sync
async def test_a_cancelled_write_leaves_nothing(tmp_path: Path) -> None:
    spool, begun = Spool(2**20, str(tmp_path)), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 600_000
        begun.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(spool.write(pieces()))
    await begun.wait()
    assert spool.bytes > 500_000
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    (folder,) = entries(tmp_path)
    assert (spool.bytes, spool.parts, entries(folder)) == (0, 0, [])
    spool.close()


# -- the way between ------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Cutting:
    """Before an application: cuts, changes, or rewrites parts that pass."""

    app: Any
    after: int | None = None  # cut there, each answer
    times: int = 1
    flip: int | None = None  # this byte of the text, this many times
    status: int | None = None  # instead of 206, with the whole text
    drop: bytes | None = None  # this header
    then: Any = None  # the application after the first cut
    ranges: list[bytes] = attrs.field(factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if "snapshot_parts" not in scope["path"]:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        self.ranges.append(headers.get(b"range", b""))
        if self.status == 200:
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"range"]}
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
@pytest.mark.parametrize("status", [206, 200])
@sync
async def test_a_download_that_was_cut_goes_on(status: int, compress: bool) -> None:
    source = Table(parts=1, rows=2_000, width=400)
    text = noise(source)
    source.text = lambda _: text  # type: ignore[method-assign]
    async with closing(app_of(source)) as app:
        cutting = Cutting(app, after=3 * PIECE, times=3, status=status if status == 200 else None)
        async with reading(cutting, compress=compress) as (reader, _):
            agreement = await reader.agree("orders", part_rows=2_000)
            assert await text_of(reader, agreement, 0) == source.text(0)
        assert cutting.times == 0
        assert cutting.ranges[0] == b""
        assert all(one.startswith(b"bytes=") for one in cutting.ranges[1:])
        assert len(cutting.ranges) == 4
        assert source.loaded == [0]


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
            with pytest.raises(Unavailable, match="part 0 .*refused: it does not have the SHA-256"):
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
        assert len(cutting.ranges) == http_snapshots_client.TRIES


@attrs.define
class Peer:
    """Answers requests for parts with these, one after the other: status, headers, body."""

    answers: list[tuple[int, dict[str, str], bytes]]
    ranges: list[bytes] = attrs.field(factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.ranges.append(dict(scope["headers"]).get(b"range", b""))
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


TEXT = b"1 w1 [1]\n2 w1 [2]\n"
HASH = {"busrep-sha256": hashlib.sha256(TEXT).hexdigest()}
PART = Agreement("orders", EPOCH, {"w1": 9}, {}, (PartRange(0, 9, 2),))
HALF = (200, {**HASH, "content-encoding": "gzip"}, gzip.compress(TEXT, 0)[:-9])  # cut: goes on with a range
LIES: dict[str, tuple[list[tuple[int, dict[str, str], bytes]], str]] = {
    "no range was asked for": ([(206, {**HASH, "content-range": "bytes 0-17/18"}, TEXT)], "goes on elsewhere"),
    "another place": ([HALF, (206, {**HASH, "content-range": "bytes 1-17/18"}, TEXT[1:])], "goes on elsewhere"),
    "no place": ([HALF, (206, HASH, TEXT[1:])], "goes on elsewhere"),
    "another text": ([HALF, (200, {"busrep-sha256": "0" * 64}, TEXT)], "another text"),
    "shorter": ([HALF, (200, HASH, b"1 w1")], "shorter"),
    "another coding": ([(200, {**HASH, "content-encoding": "br"}, TEXT)], "was not asked for"),
    "damaged": ([(200, {**HASH, "content-encoding": "gzip"}, b"\x1f\x8b" + b"x" * 20)], "damaged"),
    "a tail": ([(200, {**HASH, "content-encoding": "gzip"}, gzip.compress(TEXT) + b"x")], "follows"),
    "less": ([(200, HASH, TEXT[:9])], "SHA-256"),
    "416": ([HALF, (416, {}, b"")], "shorter"),
}


@pytest.mark.parametrize("case", LIES)
@sync
async def test_what_is_not_believed(case: str) -> None:
    answers, reason = LIES[case]
    peer = Peer(list(answers))
    async with reading(peer, max_bytes=1_000, compress=True) as (reader, _):
        with pytest.raises(Unavailable, match=reason):
            await text_of(reader, PART, 0)
    assert len(peer.ranges) == len(answers)


LONG: dict[str, tuple[dict[str, str], bytes]] = {
    "a bomb": ({"content-encoding": "gzip"}, gzip.compress(b"0" * 10**7)),
    "by and by": ({"transfer-encoding": "chunked"}, b"0" * 1_001),
    "as announced": ({"content-length": "1001"}, b"0" * 10),
}


@pytest.mark.parametrize("case", LONG)
@sync
async def test_a_part_that_is_too_long_is_not_asked_for_again_and_again(case: str) -> None:
    headers, body = LONG[case]
    peer = Peer([(200, {**HASH, **headers}, body)])
    async with reading(peer, max_bytes=1_000, compress=True) as (reader, _):
        with pytest.raises(ConfigError, match="longer than 1000 bytes: raise max_bytes="):
            await text_of(reader, PART, 0)
    assert len(peer.ranges) == 1


@sync
async def test_a_packed_text_of_which_only_the_end_mark_is_missing_is_whole() -> None:
    peer = Peer([(200, {**HASH, "content-encoding": "gzip"}, gzip.compress(TEXT)[:-8]), (416, {}, b"")])
    async with reading(peer, compress=True) as (reader, _):
        assert await text_of(reader, PART, 0) == TEXT
    assert peer.ranges == [b""]


@sync
async def test_half_a_packed_text_is_gone_on_with() -> None:
    answers = [HALF, (200, HASH, TEXT)]
    async with reading(Peer(answers), compress=True) as (reader, _):
        assert await text_of(reader, PART, 0) == TEXT


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
    async with closing(app_of(source)) as app, reading(app) as (reader, _):
        agreement = await reader.agree("orders", part_rows=30_000)
        pieces = reader.load(agreement, 0)
        assert await anext(pieces)
        await pieces.aclose()
        assert await text_of(reader, agreement, 0) == source.text(0)
        (part,) = app.state.catch_up.snapshots.snapshots._spool._parts
        await until(lambda: part.readers == 0)


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
            limits = CatchUpLimits(snapshots=SnapshotLimits(held_for=0.001))
            port, agreement, got = 0, None, []
            for number in range(len(own.parts)):
                app = catch_up_app(store, [orders], secret=SECRET, limits=limits)
                async with closing(app), serve(app, port=port) as serving:
                    port = serving.port
                    source = HttpSource(serving.url, [orders], QUICK, secret=SECRET)
                    await source.open()
                    agreement = agreement or await source.agree("orders", part_rows=10)
                    await until(lambda app=app: not app.state.catch_up.statistics()["snapshots"]["held"])
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
        source = HttpSource(serving.url, [orders], QUICK, secret=SECRET)
        await source.open()
        agreement = await source.agree("orders", part_rows=2)
        first = await text_of(source, agreement, 0)
        claim = await store.claim("w1", ["orders"], timeout=1)
        await write(store, claim, 1, 1, 1)
        await store.heartbeat(claim, {"orders": 7})
        assert (await source.agree("orders", part_rows=2, again=agreement)).same(agreement)
        await store.prune(keep=1)
        assert await text_of(source, agreement, 0) == first, "that is on the server's disk"
        with pytest.raises(SnapshotGone):
            await text_of(source, agreement, 1)
        await source.close()


@sync
async def test_a_reader_comes_online_through_it_while_its_server_restarts() -> None:
    """The whole way: a bus that gets its rows and its snapshot over HTTP, downloads cut, the server once replaced."""
    async with deployment() as shop, shop.bus(writer="w1") as writer:
        last = await write_orders(writer, 95)
        await writer._writing.beat()
        store = writer._store
        async with closing(catch_up_app(store, shop.streams, secret=SECRET)) as first:
            async with closing(catch_up_app(store, shop.streams, secret=SECRET)) as second:
                cutting = Cutting(first, after=1, times=2, then=second)
                async with serve(cutting) as serving:
                    source = serving.url.replace("://", f"://:{SECRET}@")
                    settings = attrs.evolve(shop.settings, fetch_timeout=20.0)
                    reader = shop.bus(
                        store=source_of(source, shop.streams, settings),
                        reader_store=writer._store,
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
    app = app_of(Table(parts=20, rows=10_000, width=180), spool_bytes=2**24)
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
    """40 MB, each part for three readers, through a spool of 16 MB."""
    with child(MEMORY) as server:
        reader = HttpSource(f"http://127.0.0.1:{int(server.stdout.readline())}", [orders], QUICK, secret=SECRET)
        reader._state = _state  # type: ignore[method-assign]

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
            if number == 3:
                before = resident()
        grown = resident() - before
        assert total > 115_000_000
        assert grown < 8_000, f"{grown} kB"
        await reader.close()
        server.stdin.close()
        assert server.wait() == 0
