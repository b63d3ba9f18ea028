"""The serving half of catch-up over HTTP: every status, its bounds, and clients that are slow or mean to be."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import secrets
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import attrs
import httpx
import orjson
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.errors import ConfigError, PositionTooOld, SchemaError, Unavailable, UnknownStream
from busrep.http import serve as http_serve
from busrep.http import server as http_server
from busrep.http.serve import Serving, serve
from busrep.http.server import CatchUpLimits, catch_up_app
from busrep.stores import memory, open_store
from busrep.stores.interface import KnownWriter
from busrep.streams import Registry, Stream
from tests import DATA
from tests.blocked import DEPENDED_ON, run_blocked
from tests.stores.store_conformance import sync, write

SECRET = "very-secret"
BEARER = {"authorization": f"Bearer {SECRET}"}
UPDATES = "/replication/get_repl_stream_updates/orders"
STATE = "/replication/v1/state"
REFERENCE = "/_synapse/replication/get_repl_stream_updates/orders/txn1"

orders, payments, odd = Stream("orders"), Stream("payments"), Stream("a/bü?%2F..")
typing = Stream("typing", resettable=True)
STREAMS = [orders, payments, odd, typing]


@contextlib.asynccontextmanager
async def memory_store() -> AsyncIterator[Any]:
    """w1 wrote 1, 2 and 2, 3 and 4 of orders; w2 nothing."""
    name = f"test-{secrets.token_hex(6)}"
    store = open_store(f"memory://{name}", Registry(STREAMS))
    await store.init()
    await store.open()
    claim = await store.claim("w1", ["orders"], timeout=1)
    await write(store, claim, 1, 2, 1, 1)
    await store.heartbeat(claim, {"orders": 4})
    await store.claim("w2", ["payments"], timeout=1)
    try:
        yield store
    finally:
        await store.close()
        memory.forget(name)


def client_of(app: Any, *, headers: dict[str, str] | None = BEARER, prefix: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://test{prefix}", headers=headers)


@contextlib.asynccontextmanager
async def served(store: Any = None, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Starlette]]:
    async with contextlib.AsyncExitStack() as stack:
        store = store or await stack.enter_async_context(memory_store())
        app = catch_up_app(store, STREAMS, **{"secret": SECRET, **options})
        yield await stack.enter_async_context(client_of(app)), app


def question(after: Any = 0, upto: Any = 10, writer: Any = "w1", **more: Any) -> dict[str, Any]:
    return {"instance_name": writer, "from_token": after, "upto_token": upto, **more}


@attrs.define
class Scripted:
    """A store that answers what it is told to, or waits."""

    error: BaseException | None = None
    page: UpdatesPage = attrs.field(factory=lambda: UpdatesPage("orders", "w1", 0, 5, [], [], False, "e" * 32))
    hold: asyncio.Event | None = None
    epochs: list[str] = attrs.field(factory=list)
    elsewhere: list[str] = attrs.field(factory=list)  # the registry is asked of a replica of these epochs
    asked: list[Any] = attrs.field(factory=list)

    async def _answer(self, what: Any, answer: Any) -> Any:
        self.asked.append(what)
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        return answer

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        return await self._answer(question, self.page)

    async def known(self, epoch: str | None = None) -> list[KnownWriter]:
        if self.elsewhere and epoch is not None:
            raise Unavailable("the store", f"its epoch is {self.elsewhere.pop(0)}")
        return await self._answer("known", [])

    async def epoch(self) -> str:
        return await self._answer("epoch", self.epochs.pop(0) if self.epochs else "e" * 32)

    async def sequence(self, stream: str, epoch: str | None = None) -> int | None:
        return await self._answer("sequence", None)


# -- what is answered -----------------------------------------------------------------------------------------


@sync
async def test_a_page_is_what_the_protocol_says() -> None:
    async with memory_store() as store, served(store) as (client, _):
        answer = await client.get(UPDATES, params=question(1, 4))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json() == {
            "updates": [[2, [2, 0]], [2, [2, 1]], [3, [3, 0]], [4, [4, 0]]],
            "upto_token": 4,
            "limited": False,
            "epoch": await store.epoch(),
            "stream": "orders",
            "instance_name": "w1",
            "from_token": 1,
        }


@sync
async def test_a_page_is_bounded_by_the_client_and_by_the_server_and_never_splits_a_fact() -> None:
    async with served(limits=CatchUpLimits(page_rows=3)) as (client, _):
        for limit, expected in {
            "1": [1],
            "2": [1],
            "3": [1, 2, 2],
            "100": [1, 2, 2],
            str(2**63 - 1): [1, 2, 2],
        }.items():
            page = (await client.get(UPDATES, params=question(limit=limit))).json()
            assert [token for token, _ in page["updates"]] == expected, limit
            assert (page["upto_token"], page["limited"]) == (expected[-1], True)
        page = (await client.get(UPDATES, params=question(1, 4, limit=1))).json()  # a fact larger than the limit
        assert ([token for token, _ in page["updates"]], page["upto_token"], page["limited"]) == ([2, 2], 2, True)


@sync
async def test_a_page_is_bounded_in_bytes() -> None:
    tokens = [1, 2, 2, 3]
    payloads = [b'"%b"' % (b"x" * 600)] * 4
    store = Scripted(page=UpdatesPage("orders", "w1", 0, 5, tokens, payloads, False, "e" * 32))
    async with served(store, limits=CatchUpLimits(page_bytes=2_000)) as (client, app):
        page = (await client.get(UPDATES, params=question(0, 5))).json()
        assert ([token for token, _ in page["updates"]], page["upto_token"], page["limited"]) == ([1, 2, 2], 2, True)
        assert app.state.catch_up.statistics()["rows"] == 3


@sync
async def test_names_may_be_any_word() -> None:
    async with memory_store() as store, served(store) as (client, _):
        claim = await store.claim("wü/1", [odd.name], timeout=1)
        (token,) = await write(store, claim, 1, stream=odd.name)
        answer = await client.get(
            "/replication/get_repl_stream_updates/a%2Fb%C3%BC%3F%252F..", params=question(writer="wü/1")
        )
        assert answer.json()["updates"] == [[token, [token, 0]]]


@sync
async def test_the_state_names_all_that_a_reader_needs() -> None:
    async with memory_store() as store, served(store) as (client, _):
        found = (await client.get(STATE)).json()
        assert found["epoch"] == await store.epoch()
        assert (found["version"], found["sequence"]) == (1, None)
        assert found["streams"] == sorted([orders.name, payments.name, odd.name])
        writers = {(one["stream"], one["writer"]): one for one in found["writers"]}
        assert writers.keys() == {("orders", "w1"), ("payments", "w2")}
        known = {(one.stream, one.writer): one for one in await store.known()}
        for key, one in writers.items():
            assert {**one, "silent_for": 0} == {**attrs.asdict(known[key]), "silent_for": 0}
        assert writers["orders", "w1"]["position"] == 4
        assert (await client.get(STATE, params={"sequence": "orders"})).json()["sequence"] == 4


@sync
async def test_the_state_is_of_one_log() -> None:
    """A restore between two questions must not give an old epoch with new positions."""
    a, b = "a" * 32, "b" * 32
    async with served(Scripted(epochs=[a, b, b, b])) as (client, _):
        assert (await client.get(STATE)).json()["epoch"] == b
    async with served(Scripted(epochs=[a, b] * 3)) as (client, _):
        assert (await client.get(STATE)).status_code == 503
    # Two replicas at the store's address, of which one has not seen the restore: it tells its own floors.
    async with served(Scripted(elsewhere=[b])) as (client, _):
        assert (await client.get(STATE)).status_code == 503
    store = Scripted(epochs=[a, b, b, b], elsewhere=[b])
    async with served(store) as (client, _):
        assert (await client.get(STATE)).json()["epoch"] == b
    assert store.asked.count("known") == 1


@sync
async def test_every_name_that_a_writer_may_have_is_served() -> None:
    async with memory_store() as store, served(store) as (client, _):
        claim = await store.claim("w\u00a0\u2028\u3000", [orders.name], timeout=1)
        (token,) = await write(store, claim, 1)
        answer = await client.get(UPDATES, params=question(0, token, writer=claim.writer))
        assert [row[0] for row in answer.json()["updates"]] == [token]


@sync
async def test_only_streams_that_are_served_are_told_of() -> None:
    async with memory_store() as store:
        app = catch_up_app(store, [payments], secret=SECRET)
        async with client_of(app) as client:
            found = (await client.get(STATE)).json()
            assert {one["stream"] for one in found["writers"]} == {"payments"}
            assert (await client.get(UPDATES, params=question())).status_code == 400
            assert (await client.get(STATE, params={"sequence": "orders"})).status_code == 400


# -- what is refused ------------------------------------------------------------------------------------------

BIG = 2**63
REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "unknown stream": (UPDATES.replace("orders", "nothing"), question(), 400, "unknown_stream"),
    "no stream": (UPDATES.replace("orders", ""), question(), 400, "unknown_stream"),
    "a stream in memory": (UPDATES.replace("orders", "typing"), question(), 400, "unknown_stream"),
    "a sequence of an unknown stream": (STATE, {"sequence": "nothing"}, 400, "unknown_stream"),
    "no writer": (UPDATES, {"from_token": 0, "upto_token": 1}, 400, "bad_parameter"),
    "an empty writer": (UPDATES, question(writer=""), 400, "bad_parameter"),
    "a writer with a space": (UPDATES, question(writer="w 1"), 400, "bad_parameter"),
    "a writer with a NUL": (UPDATES, question(writer="w\0"), 400, "bad_parameter"),
    "no from": (UPDATES, {"instance_name": "w1", "upto_token": 1}, 400, "bad_parameter"),
    "no upto": (UPDATES, {"instance_name": "w1", "from_token": 1}, 400, "bad_parameter"),
    "from above upto": (UPDATES, question(5, 4), 400, "bad_parameter"),
    "upto beyond 64 bits": (UPDATES, question(0, BIG), 400, "bad_parameter"),
    "upto far beyond 64 bits": (UPDATES, question(0, "9" * 5000), 400, "bad_parameter"),
    "from below zero": (UPDATES, question(-1, 4), 400, "bad_parameter"),
    "both below zero": (UPDATES, question(-4, -1), 400, "bad_parameter"),
    "a point": (UPDATES, question("1.0", 4), 400, "bad_parameter"),
    "a plus": (UPDATES, question("+1", 4), 400, "bad_parameter"),
    "a leading zero": (UPDATES, question("01", 4), 400, "bad_parameter"),
    "an underscore": (UPDATES, question("1", "1_0"), 400, "bad_parameter"),
    "other digits": (UPDATES, question("١", 4), 400, "bad_parameter"),
    "nothing": (UPDATES, question("", 4), 400, "bad_parameter"),
    "given twice": (UPDATES, question([1, 2], 4), 400, "bad_parameter"),
    "a bad limit": (UPDATES, question(limit="x"), 400, "bad_parameter"),
    "a limit below zero": (UPDATES, question(limit=-1), 400, "bad_parameter"),
    "a writer in another encoding": (
        UPDATES + "?instance_name=w%FC&from_token=0&upto_token=1",
        {},
        400,
        "bad_parameter",
    ),
    "a thousand parameters": (UPDATES, question(**{f"x{n}": n for n in range(1000)}), 400, "bad_parameter"),
    "another path": ("/replication", {}, 404, "not_found"),
    "the root": ("/", {}, 404, "not_found"),
    "a slash behind": (STATE + "/", {}, 404, "not_found"),
    "the reference's path, not switched on": (REFERENCE, question(), 404, "not_found"),
}


@pytest.mark.parametrize("case", REFUSED)
@sync
async def test_refused(case: str) -> None:
    path, params, status, code = REFUSED[case]
    store = Scripted()
    async with served(store) as (client, app):
        answer = await client.get(path, params=params or None)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert answer.json()["error"]
        assert store.asked == []
        assert app.state.catch_up.statistics()["refused"] == {code: 1}


@pytest.mark.parametrize("limit", ["0", "1"])
@sync
async def test_the_largest_numbers_are_taken(limit: str) -> None:
    async with served() as (client, _):
        answer = await client.get(UPDATES, params=question(BIG - 1, BIG - 1, limit=limit))
        assert (answer.json()["updates"], answer.json()["upto_token"]) == ([], BIG - 1)


WRONG_SECRETS: dict[str, dict[str, str] | list[tuple[str, str]]] = {
    "none": {},
    "another": {"authorization": "Bearer nonsense"},
    "longer": {"authorization": f"Bearer {SECRET}x"},
    "shorter": {"authorization": f"Bearer {SECRET[:-1]}"},
    "empty": {"authorization": "Bearer "},
    "other letters": {"authorization": f"Bearer {SECRET.upper()}"},
    "basic": {"authorization": f"Basic {SECRET}"},
    "no scheme": {"authorization": SECRET},
    "not ASCII": {"authorization": "Bearer \xe4\xf6"},
    "twice": [("authorization", f"Bearer {SECRET}"), ("authorization", f"Bearer {SECRET}")],
}


@pytest.mark.parametrize("case", WRONG_SECRETS)
@pytest.mark.parametrize("path", [UPDATES, STATE, "/nowhere"])
@sync
async def test_without_the_secret_nothing_is_read(case: str, path: str) -> None:
    store = Scripted()
    app = catch_up_app(store, STREAMS, secret=SECRET)  # type: ignore[arg-type]
    headers = WRONG_SECRETS[case]
    given = headers if isinstance(headers, list) else list(headers.items())
    async with client_of(app, headers=None) as client:
        answer = await client.get(path, params=question(), headers=[(k, v.encode("latin-1")) for k, v in given])  # type: ignore[misc]
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert store.asked == []


@sync
async def test_secrets_may_be_several_or_none() -> None:
    async with memory_store() as store:
        for secret, given, status in [
            (["old", "new"], "old", 200),
            (["old", "new"], "new", 200),
            (["old", "new"], "oldnew", 401),
            (None, "whatever", 200),
        ]:
            async with client_of(catch_up_app(store, STREAMS, secret=secret), headers=None) as client:
                answer = await client.get(STATE, headers={"authorization": f"bearer {given}"})
                assert answer.status_code == status


@pytest.mark.parametrize("secret", ["", "two words", "ümlaut", "line\nbreak", [], ["good", ""]])
def test_a_secret_that_no_header_holds_is_refused(secret: Any) -> None:
    with pytest.raises(ConfigError, match="secret") as caught:
        catch_up_app(Scripted(), STREAMS, secret=secret)  # type: ignore[arg-type]
    assert not secret or str(secret) not in str(caught.value)


def test_an_application_without_a_durable_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to catch up"):
        catch_up_app(Scripted(), [typing], secret=SECRET)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
@sync
async def test_only_get_is_answered(method: str) -> None:
    store = Scripted()
    async with served(store) as (client, _):
        answer = await client.request(method, UPDATES, params=question())
        assert (answer.status_code, answer.headers["allow"], answer.headers["connection"]) == (405, "GET", "close")
    assert store.asked == []


@pytest.mark.parametrize("content", [b"{}", [b"piece", b"by piece"]])
@sync
async def test_a_body_is_not_read(content: Any) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in content:
            yield piece

    async with served() as (client, _):
        body = content if isinstance(content, bytes) else pieces()
        answer = await client.request("GET", UPDATES, params=question(), content=body)
        assert (answer.status_code, answer.json()["code"], answer.headers["connection"]) == (400, "body", "close")


@sync
async def test_pruned_rows_are_gone_and_the_floor_is_named() -> None:
    async with memory_store() as store, served(store) as (client, app):
        assert await store.prune(keep=1) == {("orders", "w1"): 3}
        answer = await client.get(UPDATES, params=question(2, 4))
        assert answer.status_code == 410
        assert answer.json() == {
            "error": "these rows have been deleted",
            "code": "position_too_old",
            "stream": "orders",
            "writer": "w1",
            "position": 2,
            "floor": 3,
            "epoch": await store.epoch(),
        }
        assert app.state.catch_up.statistics()["refused"] == {"position_too_old": 1}
        assert (await client.get(UPDATES, params=question(3, 4))).status_code == 200


@sync
async def test_a_floor_is_of_the_log_that_is_named_with_it() -> None:
    """A restore after that must not give a new epoch with a floor of the log before."""
    store = Scripted(error=PositionTooOld("orders", "w1", 0, 3, "b" * 32))
    async with served(store) as (client, _):
        answer = await client.get(UPDATES, params=question())
        assert (answer.status_code, answer.json()["epoch"]) == (410, "b" * 32)


FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "unavailable": (Unavailable("PostgreSQL at 10.1.2.3", "secret-of-the-database"), 503, "unavailable"),
    "too slow": (TimeoutError(), 503, "deadline"),
    "no tables": (SchemaError(None, 1), 503, "unavailable"),
    "not in the store": (UnknownStream("orders"), 400, "unknown_stream"),
    "a bug": (ValueError("secret-of-somebody"), 500, "internal"),
}


@pytest.mark.parametrize("case", FAILURES)
@sync
async def test_what_the_store_raises_becomes_an_answer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    error, status, code = FAILURES[case]
    async with served(Scripted(error=error)) as (client, app):
        for path, params in ((UPDATES, question()), (STATE, {})):
            answer = await client.get(path, params=params)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert "secret" not in answer.text
            assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
        statistics = app.state.catch_up.statistics()
        assert (statistics["refused"], statistics["in_flight"]) == ({code: 2}, 0)
    assert "secret-of-somebody" not in caplog.text
    logged = len([one for one in caplog.records if one.name == "busrep.http" and one.levelno == logging.ERROR])
    assert logged == (1 if code in ("unavailable", "internal") else 0), "once a second, and not over and over"


@sync
async def test_nothing_of_a_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is uvicorn's access log silenced for others in this process."""
    caplog.set_level(logging.DEBUG)
    async with served(Scripted(error=RuntimeError("oops"))) as (_, app), serve(app) as serving:
        async with httpx.AsyncClient(headers={"authorization": "Bearer wrong-word", "x": "hush"}) as other:
            await other.get(serving.url + UPDATES, params=question(writer="somebody"))
        async with httpx.AsyncClient(headers=BEARER) as other:
            await other.get(serving.url + UPDATES, params=question(writer="somebody"))
        assert app.state.catch_up.statistics()["refused"] == {"unauthorized": 1, "internal": 1}
    logged = "\n".join(one.getMessage() for one in caplog.records if one.name.startswith(("busrep", "uvicorn")))
    assert "RuntimeError" in logged
    assert logging.getLogger("uvicorn.access").hasHandlers()
    assert not any(word in logged for word in (SECRET, "wrong-word", "hush", "somebody"))


@sync
async def test_refusals_are_logged_once_a_second_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "busrep.http")
    async with served() as (client, app):
        for _ in range(5):
            await client.get(STATE, headers={"authorization": "Bearer wrong-word"})
            await client.get(UPDATES, params=question(writer="no body"))
        assert app.state.catch_up.statistics()["refused"] == {"unauthorized": 5, "bad_parameter": 5}
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        (
            "WARNING",
            "catch-up over HTTP: the secret is missing or wrong: Authorization: Bearer SECRET (unauthorized, 1 so far)",
        ),
        ("INFO", "catch-up over HTTP: instance_name: the name of a writer is needed (bad_parameter, 1 so far)"),
    ]


# -- compression ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("GZIP", True), ("gzip;q=0", False), ("identity", False), ("br", False)],
)
@sync
async def test_large_answers_are_compressed_for_who_accepts_it(
    accepted: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = b'"%b"' % (b"x" * 500)
    store = Scripted(page=UpdatesPage("orders", "w1", 0, 5, [1, 2], [payload] * 2, False, "e" * 32))
    monkeypatch.setattr(http_server, "COMPRESS_FROM", 1_000)
    async with served(store) as (client, app):
        async with client.stream("GET", UPDATES, params=question(), headers={"accept-encoding": accepted}) as answer:
            raw = b"".join([piece async for piece in answer.aiter_raw()])
        assert answer.headers.get("content-encoding") == ("gzip" if compressed else None)
        assert answer.headers["vary"] == "accept-encoding"
        body = gzip.decompress(raw) if compressed else raw
        assert orjson.loads(body)["updates"] == [[1, "x" * 500], [2, "x" * 500]]
        assert app.state.catch_up.statistics()["bytes"] == len(raw)
        store.page = attrs.evolve(store.page, tokens=[1], payloads=[b"1"])
        small = await client.get(UPDATES, params=question(), headers={"accept-encoding": accepted})
        assert "content-encoding" not in small.headers


# -- mounted, and the reference system's path -----------------------------------------------------------------


@sync
async def test_mounted_in_an_application_of_its_own() -> None:
    async with memory_store() as store:
        service = Starlette()
        service.mount("/some/where", catch_up_app(store, STREAMS, secret=SECRET, reference_paths=True))
        async with client_of(service, prefix="/some/where") as client:
            assert len((await client.get(UPDATES, params=question())).json()["updates"]) == 5
            assert (await client.get(STATE)).status_code == 200
            assert (await client.get(REFERENCE, params=question())).status_code == 200
            assert (await client.get("/nowhere")).json()["code"] == "not_found"
        async with client_of(service) as client:
            assert (await client.get(UPDATES, params=question())).status_code == 404


@sync
async def test_mounted_behind_somebody_s_middleware() -> None:
    """Which has its own ways with what comes from the client: nobody is taken for gone who is not, nor kept who is."""
    store = Scripted(hold=asyncio.Event())
    assert store.hold is not None
    app = catch_up_app(store, STREAMS, secret=SECRET)  # type: ignore[arg-type]
    service = FastAPI()

    @service.middleware("http")
    async def noted(request: Any, call_next: Any) -> Any:
        answer = await call_next(request)
        answer.headers["x-noted"] = "yes"
        return answer

    service.mount("/busrep", app)
    async with serve(service) as serving:
        async with connection(serving) as (_, writer):
            writer.write(head("/busrep" + STATE))
            await until(lambda: len(store.asked) == 1)
        await until(lambda: app.state.catch_up.guard.in_flight == 0)
        async with connection(serving) as (reader, writer):
            writer.write(head("/busrep" + STATE))
            await until(lambda: len(store.asked) == 2)
            await asyncio.sleep(0.05)
            store.hold.set()
            got = await reader.readuntil(b"null}")
            assert (got.startswith(b"HTTP/1.1 200"), b"x-noted: yes" in got) == (True, True)
    assert app.state.catch_up.statistics()["refused"] == {"gone": 1}


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
@sync
async def test_mounted_below_a_root_path(kind: Any) -> None:
    """Behind a proxy that takes a prefix away, which the server (uvicorn --root-path) puts back."""
    async with memory_store() as store:
        service = kind()
        service.mount("/busrep", catch_up_app(store, STREAMS, secret=SECRET))
        transport = httpx.ASGITransport(service, root_path="/proxied")
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=BEARER) as client:
            for path, params in ((STATE, {}), (UPDATES, question())):
                answer = await client.get(f"/proxied/busrep{path}", params=params)
                assert answer.status_code == 200, answer.text


@sync
async def test_the_reference_path_answers_exactly_three_keys() -> None:
    async with served(reference_paths=True) as (client, _):
        answer = await client.get(REFERENCE, params=question(0, 4))
        assert answer.json() == {
            "updates": [[1, [1, 0]], [2, [2, 0]], [2, [2, 1]], [3, [3, 0]], [4, [4, 0]]],
            "upto_token": 4,
            "limited": False,
        }
        # Its clients know the writer by the server's address: with one writer there is no doubt whom they mean.
        alone = await client.get(REFERENCE, params={"from_token": 0, "upto_token": 4})
        assert alone.content == answer.content


@sync
async def test_the_reference_path_answers_for_known_writers_only() -> None:
    async with memory_store() as store, served(store, reference_paths=True) as (client, _):
        answer = await client.get(REFERENCE, params=question(writer="w9"))
        assert (answer.status_code, answer.json()["code"]) == (400, "unknown_writer")
        await store.claim("w3", ["orders"], timeout=1)
        answer = await client.get(REFERENCE, params={"from_token": 0, "upto_token": 4})
        assert (answer.status_code, answer.json()["code"]) == (400, "unknown_writer")
        assert (await client.get(REFERENCE, params=question(writer="w3"))).json()["updates"] == []
        for wrong in (REFERENCE.replace("orders", "typing"), REFERENCE.replace("orders", "")):
            assert (await client.get(wrong, params=question())).status_code == 400
        assert (await client.get(REFERENCE, headers={"authorization": "Bearer no"})).status_code == 401


# -- many at a time -------------------------------------------------------------------------------------------


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


@sync
async def test_beyond_the_queue_requests_are_told_to_come_back() -> None:
    store = Scripted(hold=asyncio.Event())
    assert store.hold is not None
    async with served(store, limits=CatchUpLimits(concurrency=2, queue=3)) as (client, app):
        service = app.state.catch_up
        asking = [asyncio.create_task(client.get(UPDATES, params=question())) for _ in range(5)]
        await until(lambda: service.places.waiting == 3)
        assert (len(store.asked), service.statistics()["in_flight"]) == (2, 5)
        answer = await client.get(UPDATES, params=question())
        assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "busy", "1")
        assert (await client.get(UPDATES, params=question(), headers={"authorization": "x"})).status_code == 401
        store.hold.set()
        assert [one.status_code for one in await asyncio.gather(*asking)] == [200] * 5
        statistics = service.statistics()
        assert (statistics["in_flight"], statistics["waiting"]) == (0, 0)
        assert (statistics["requests"], statistics["refused"]) == (7, {"busy": 1, "unauthorized": 1})


@sync
async def test_a_request_has_a_deadline_in_the_queue_and_at_the_store() -> None:
    store = Scripted(hold=asyncio.Event())
    async with served(store, limits=CatchUpLimits(concurrency=1, queue=3, deadline=0.05)) as (client, app):
        answers = await asyncio.gather(*[client.get(UPDATES, params=question()) for _ in range(3)])
        assert [(one.status_code, one.json()["code"]) for one in answers] == [(503, "deadline")] * 3
        service = app.state.catch_up
        assert (service.guard.in_flight, service.places.waiting, service.places.locked()) == (0, 0, False)
        assert store.hold is not None
        store.hold.set()
        async with asyncio.timeout(60):  # a busy machine may take longer than the deadline for a request
            while (await client.get(UPDATES, params=question())).status_code != 200:
                pass


@sync
async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    store = Scripted(hold=asyncio.Event())
    async with served(store, limits=CatchUpLimits(concurrency=1)) as (client, app):
        service = app.state.catch_up
        asking = [asyncio.create_task(client.get(UPDATES, params=question())) for _ in range(3)]
        await until(lambda: service.places.waiting == 2)
        for one in reversed(asking):
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert (service.guard.in_flight, service.places.waiting, service.places.locked()) == (0, 0, False)


# -- served by uvicorn ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving_of(store: Any, **options: Any) -> AsyncIterator[Serving]:
    async with serve(catch_up_app(store, STREAMS, secret=SECRET), **options) as serving:
        yield serving


def head(path: str = STATE, *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: x", f"authorization: Bearer {SECRET}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65_536):
            found += piece
    return found


@contextlib.asynccontextmanager
async def connection(serving: Serving) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_between_requests_there_may_be_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count(pause: float) -> int:
        async with memory_store() as store, serving_of(store) as serving, connection(serving) as (reader, writer):
            got = b""
            for _ in range(3):
                with contextlib.suppress(ConnectionError):
                    writer.write(head())
                    got += await reader.readuntil(b"null}")
                    await asyncio.sleep(pause)
            return got.count(b"200 OK")

    assert asyncio.run(count(0.1)) == 3
    monkeypatch.setattr(http_serve, "KEEP_ALIVE", 0.05)
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(count(0.2))


@sync
async def test_pipelined_requests_are_all_answered() -> None:
    async with memory_store() as store, serving_of(store) as serving:
        async with connection(serving) as (reader, writer):
            writer.write(head() * 2 + head(STATE, "connection: close"))
            assert (await ended(reader)).count(b"200 OK") == 3


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
NONSENSE: dict[str, tuple[str, list[bytes], bytes]] = {  # secret, what follows, what is answered
    "a body, at once": (SECRET, [CHUNKED + b"zz\r\n"], b"HTTP/1.1 400"),
    "a body, at once, of a stranger": ("wrong", [CHUNKED + b"zz\r\n"], b"HTTP/1.1 400"),
    "a body, later": (SECRET, [CHUNKED, b"zz\r\n"], b"HTTP/1.1 400"),  # it is closed by then: a GET has none
    "a second request": (SECRET, [b"\r\n\x00\x00\r\n\r\n"], b"HTTP/1.1 200"),
    "a second request of a stranger": ("wrong", [b"\r\n\x00\x00\r\n\r\n"], b"HTTP/1.1 401"),
}


@pytest.mark.parametrize("case", NONSENSE)
@sync
async def test_nonsense_behind_a_head_is_no_failure_of_ours(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the port could fill the log with tracebacks."""
    secret, pieces, answer = NONSENSE[case]
    async with memory_store() as store, serving_of(store) as serving:
        async with connection(serving) as (reader, writer):
            writer.write(head()[:-2].replace(SECRET.encode(), secret.encode()) + pieces[0])
            got = b""
            for piece in pieces[1:]:
                got += await reader.readuntil(b"}")
                writer.write(piece)
            got += await ended(reader)
            assert got.startswith(answer), got
        await until(lambda: serving.connections == 0)
    assert not [one for one in caplog.records if one.exc_info]


@sync
async def test_a_second_request_of_nonsense_during_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    big = b'"%b"' % (b"x" * 30_000_000)
    store = Scripted(page=UpdatesPage("orders", "w1", 0, 5, [5], [big], False, "e" * 32))
    async with serving_of(store) as serving, connection(serving) as (reader, writer):
        writer.write(head(UPDATES + "?instance_name=w1&from_token=0&upto_token=5") + b"\x00\x00\r\n\r\n")
        got = await ended(reader)
        assert (len(got) > 30_000_000, got.count(b"HTTP/1.1 400")) == (True, 1)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a" * 20_000,
        b"GET /" + b"a" * 20_000,
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a server without
    ],
)
@sync
async def test_what_is_no_request_is_refused(sent: bytes) -> None:
    async with memory_store() as store, serving_of(store) as serving:
        async with connection(serving) as (reader, writer):
            writer.write(sent)
            assert b" 200 " not in await ended(reader)
        await until(lambda: serving.connections == 0)


@sync
async def test_a_body_that_never_comes_holds_nothing() -> None:
    async with memory_store() as store, serving_of(store) as serving:
        for method in ("POST", "GET"):
            async with connection(serving) as (reader, writer):
                writer.write(head(STATE, "content-length: 1000000").replace(b"GET", method.encode()))
                assert (await ended(reader)).startswith(b"HTTP/1.1 40")
        await until(lambda: serving.connections == 0)


@sync
async def test_requests_on_too_many_connections_are_refused() -> None:
    store = Scripted(hold=asyncio.Event())
    assert store.hold is not None
    async with serving_of(store, connections=3) as serving, contextlib.AsyncExitStack() as stack:
        asking = [await stack.enter_async_context(connection(serving)) for _ in range(3)]
        for _, writer in asking:
            writer.write(head())
        await until(lambda: len(store.asked) == 3)
        reader, writer = await stack.enter_async_context(connection(serving))
        writer.write(head())
        assert (await ended(reader)).startswith(b"HTTP/1.1 503")
        assert len(store.asked) == 3
        for _, one in asking:
            one.close()
        await until(lambda: serving.connections == 0)
        store.hold.set()
        reader, writer = await stack.enter_async_context(connection(serving))
        writer.write(head())
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")


@sync
async def test_who_hangs_up_holds_no_place_and_nothing_of_the_store() -> None:
    store = Scripted(hold=asyncio.Event())
    app = catch_up_app(store, STREAMS, secret=SECRET, limits=CatchUpLimits(concurrency=1))  # type: ignore[arg-type]
    service = app.state.catch_up
    async with serve(app) as serving:
        for path in (UPDATES + "?instance_name=w1&from_token=0&upto_token=5", STATE):
            before = len(store.asked)
            async with connection(serving) as (_, writer):
                writer.write(head(path))
                await until(lambda at=before: len(store.asked) > at)  # type: ignore[misc]
            await until(lambda: service.guard.in_flight == 0)
            assert not service.places.locked()
        assert service.statistics()["refused"] == {"gone": 2}


@sync
async def test_who_gave_up_while_waiting_costs_the_store_nothing() -> None:
    store = Scripted(hold=asyncio.Event())
    assert store.hold is not None
    app = catch_up_app(store, STREAMS, secret=SECRET, limits=CatchUpLimits(concurrency=1))  # type: ignore[arg-type]
    service = app.state.catch_up
    query = "?instance_name=w1&from_token=0&upto_token=5"
    async with serve(app) as serving, connection(serving) as (reader, writer):
        writer.write(head(UPDATES + query))
        await until(lambda: len(store.asked) == 1)
        async with connection(serving) as (_, impatient):
            impatient.write(head(UPDATES + query))
            await until(lambda: service.places.waiting == 1)
        await until(lambda: serving.connections == 1)
        store.hold.set()
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        await until(lambda: service.guard.in_flight == 0)
        assert (len(store.asked), service.statistics()["refused"]) == (1, {"gone": 1})


@sync
async def test_closing_ends_what_is_under_way_and_every_connection() -> None:
    store = Scripted(hold=asyncio.Event())
    async with contextlib.AsyncExitStack() as stack:
        async with serving_of(store, shutdown_timeout=0.1) as serving:
            readers = []
            for sent in (b"", b"GET /", head()):
                reader, writer = await stack.enter_async_context(connection(serving))
                writer.write(sent)
                readers.append(reader)
            await until(lambda: store.asked and serving.connections == 3)
        for reader in readers:
            assert b" 200 " not in await ended(reader)
        assert serving.connections == 0
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", serving.port)
        await serving.wait()


@sync
async def test_closing_lets_an_answer_end() -> None:
    store = Scripted(hold=asyncio.Event())
    assert store.hold is not None
    async with contextlib.AsyncExitStack() as stack:
        async with serving_of(store) as serving:
            reader, writer = await stack.enter_async_context(connection(serving))
            writer.write(head())
            await until(lambda: store.asked)
            asyncio.get_running_loop().call_later(0.1, store.hold.set)
        assert b" 200 " in await ended(reader)


@sync
async def test_closing_does_not_wait_for_who_does_not_read() -> None:
    big = b'"%b"' % (b"x" * 30_000_000)
    store = Scripted(page=UpdatesPage("orders", "w1", 0, 5, [5], [big], False, "e" * 32))
    async with serving_of(store, shutdown_timeout=0.1) as serving:
        deaf = socket.create_connection(("127.0.0.1", serving.port))
        deaf.sendall(head(UPDATES + "?instance_name=w1&from_token=0&upto_token=5"))
        await until(lambda: store.asked)
    assert serving.connections == 0
    deaf.close()


@sync
async def test_signals_are_left_to_the_caller() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving_of(Scripted()):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@sync
async def test_what_keeps_it_from_starting_is_raised() -> None:
    with pytest.raises(TypeError, match="ssl"):
        async with serve(Starlette(), tls=True):  # type: ignore[arg-type]
            pass


@sync
async def test_run_by_itself_it_has_a_lifespan_and_opens_nothing() -> None:
    sent: list[Any] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        return {"type": next(messages)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    store = Scripted()
    app = catch_up_app(store, STREAMS, secret=SECRET)  # type: ignore[arg-type]
    await app({"type": "lifespan", "app": app}, receive, send)
    assert (sent, store.asked) == (["lifespan.startup.complete", "lifespan.shutdown.complete"], [])
    assert app.state.catch_up.guard.requests == 0


@sync
async def test_an_answer_that_breaks_off_is_counted_and_not_begun_anew() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            raise OSError("gone")

    app = catch_up_app(Scripted(), STREAMS, secret=None)  # type: ignore[arg-type]
    scope = {"type": "http", "method": "GET", "path": STATE, "raw_path": STATE.encode(), "query_string": b""}
    await app({**scope, "headers": [], "root_path": "", "app": app}, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
    statistics = app.state.catch_up.statistics()
    assert (statistics["refused"], statistics["in_flight"]) == ({"gone": 1}, 0)


@pytest.mark.parametrize("module", ["server", "serve", "source"])
def test_without_the_extra_it_says_what_to_install(module: str) -> None:
    done = run_blocked(
        f"""
        import busrep
        try:
            import busrep.http.{module}
        except busrep.ConfigError as error:
            print(error)
        try:
            busrep.connect("redis://localhost", name="x", store="http://localhost")
        except busrep.ConfigError as error:
            print(error)
        """,
        *DEPENDED_ON,
    )
    text = "catch-up over HTTP needs an extra that is not installed: pip install 'busrep[http]'"
    assert done.stdout.splitlines() == [text, text], done.stderr


@sync
async def test_an_address_that_is_taken_is_named() -> None:
    async with serving_of(Scripted()) as serving:
        for host, port in (("127.0.0.1", serving.port), ("127.0.0.1", 99_999), ("192.0.2.1", 0), ("a" * 70, 0)):
            with pytest.raises(ConfigError, match="cannot listen"):
                async with serve(Starlette(), host, port):
                    pass


@sync
async def test_tls() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "tls.crt", DATA / "tls.key")
    async with memory_store() as store:
        app = catch_up_app(store, STREAMS, secret=SECRET)
        async with serve(app, tls=context) as serving:
            assert serving.url == f"https://127.0.0.1:{serving.port}"
            trusted = ssl.create_default_context(cafile=DATA / "tls.crt")
            async with httpx.AsyncClient(verify=trusted, headers=BEARER) as client:
                assert (await client.get(serving.url + STATE)).json()["version"] == 1


def test_rows_are_not_looked_into() -> None:
    """What is in the store goes out as it is, also what no JSON parser would give back so."""
    payload = b'{"z":1,"a":1.0,"u":"\\u00e9","n":9223372036854775807}'
    page = UpdatesPage("orders", "w1", 0, 5, [5], [payload], False, "e" * 32)

    async def main() -> None:
        async with served(Scripted(page=page)) as (client, _):
            assert payload in (await client.get(UPDATES, params=question(0, 5))).content

    asyncio.run(main())
