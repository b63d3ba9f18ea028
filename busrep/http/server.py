"""The serving half of catch-up over HTTP (protocol.md, section 8): a Starlette application over a store.

It reads what a store has, and writes nothing. Mount it in a service's own application, or run it by itself with
``busrep.http.serve``. The store is the caller's: open while requests come, closed by whoever opened it.

What a request passes, in this order: the secret, before anything is looked at; method and parameters; a place among
``concurrency`` (or in the queue before them); the store. Over all of it stands the deadline, and whoever hangs up ends
it too: what nobody waits for any more holds no place, and no connection of the store's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import traceback
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs.validators import ge, gt

from busrep.core.backoff import LogLimiter
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.snapshots import SnapshotSource
from busrep.errors import BusrepError, ConfigError, MissingExtra, PositionTooOld, UnknownStream
from busrep.stores.interface import FactSource, provides
from busrep.streams import Registry, Stream

from .pages import (
    PART_PATH,
    REFERENCE_PATH,
    SNAPSHOTS_PATH,
    STATE_PATH,
    UPDATES_PATH,
    CatchUpState,
    bounded,
    write_page,
    write_state,
)
from .requests import Refused, accepts_gzip, params_of, position_of
from .snapshots_limits import SnapshotLimits
from .snapshots_server import SnapshotPaths, refusal_of

try:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")

# Looks at the epoch that must agree before an answer about writers is given: a restore may come between two questions.
EPOCH_TRIES = 3

_SECRET = re.compile(r"[!-~]+")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]+")


@attrs.frozen(kw_only=True)
class CatchUpLimits:
    """Bounds of one application, whatever its clients ask for. Bytes are bytes, times are seconds."""

    page_rows: int = attrs.field(default=1_000, validator=ge(1))
    """Most rows of one page (more only when one fact has more), as `Settings.page_rows`."""

    page_bytes: int = attrs.field(default=4 * 2**20, validator=ge(1_024))
    """Most bytes of rows of one page (more only when one fact has more): what one slow client can make us keep."""

    concurrency: int = attrs.field(default=4, validator=ge(1))
    """Requests that use the store at a time: as many as one reader of its own fetches (`Settings.fetches`), so that
    catch-up leaves connections to the service that it is part of."""

    queue: int = attrs.field(default=64, validator=ge(0))
    """Requests that wait for a place; further ones are told to come back (503)."""

    deadline: float = attrs.field(default=20.0, validator=gt(0))
    """Of one request, waiting included: below the 30 s after which a reader gives up (`Settings.fetch_timeout`)."""

    retry_after: int = attrs.field(default=1, validator=ge(0))
    """What a 503 says in Retry-After."""

    compress_from: int = attrs.field(default=16_384, validator=ge(0))
    """Answers of so many bytes and more are compressed for clients that accept gzip; smaller ones gain nothing."""

    snapshots: SnapshotLimits | None = attrs.field(factory=SnapshotLimits)
    """Those of snapshots; None: give none."""


def catch_up_app(
    store: FactSource,
    streams: Iterable[Stream[Any]],
    *,
    secret: str | Sequence[str] | None,
    limits: CatchUpLimits | None = None,
    reference_paths: bool = False,
    snapshot_source: SnapshotSource | None = None,
) -> Starlette:
    """An application that answers readers without a database: ``service.mount("/busrep", catch_up_app(...))``.

    ``store``: where the facts are, opened and closed by the caller (that of a bus, say). ``streams``: those that may
    be read. ``secret``: what clients send as bearer token; several while it is being changed; None: whoever reaches
    the port may read. ``reference_paths``: answer the reference system's own path too, whose clients take the
    application for the writer itself. ``snapshot_source``: where snapshots come from, opened and closed by the caller;
    default: the store.

    ``app.state.catch_up.statistics()`` has its counters. ``await app.state.catch_up.close()`` before the store is
    closed lets go of snapshots and removes their files, which otherwise happens at the process's end.

    Raises ConfigError for a secret that no header can hold, and for no streams that are kept in a table; MissingExtra.
    """
    service = CatchUp(store, Registry(streams), secret, limits or CatchUpLimits(), snapshot_source)
    routes = [
        Route(UPDATES_PATH + "{stream:path}", service.updates, methods=["GET"]),
        Route(STATE_PATH, service.state, methods=["GET"]),
        *service.snapshots.routes(),
    ]
    if reference_paths:
        routes.append(Route(REFERENCE_PATH + "{stream:path}/{txn_id}", service.reference_updates, methods=["GET"]))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, service=service)],
        exception_handlers={HTTPException: _not_found},
    )
    app.router.redirect_slashes = False
    app.state.catch_up = service
    return app


async def _not_found(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    raise Refused(status, "not_found", "no such path: is the prefix of the URL right?")


class CatchUp:
    """What stands behind the paths of one application."""

    def __init__(
        self,
        store: FactSource,
        streams: Registry,
        secret: str | Sequence[str] | None,
        limits: CatchUpLimits,
        snapshot_source: SnapshotSource | None = None,
    ) -> None:
        self._store, self.limits = store, limits
        self._streams = {stream.name for stream in streams if not stream.resettable}
        if not self._streams:
            raise ConfigError("none of these streams is kept in a table: there is nothing to catch up with over HTTP")
        self._secrets = None if secret is None else [_digest(one) for one in _checked_secrets(secret)]
        self._places = asyncio.Semaphore(limits.concurrency)
        # Stores of others' making need not have snapshots.
        source = snapshot_source or (store if provides(store, SnapshotSource) else None)
        self.snapshots = SnapshotPaths(
            source if limits.snapshots else None, limits.snapshots or SnapshotLimits(), self._check_stream
        )
        self._limiter = LogLimiter()  # of what is refused, and of trouble with the store; all is counted
        self.requests = self.rows = self.bytes = self.in_flight = self.waiting = 0
        self.refused: Counter[str] = Counter()

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: requests, rows and bytes sent, requests in flight and waiting for a place, how many
        were refused, by reason; and of snapshots (`Snapshots.statistics`)."""
        snapshots = self.snapshots.snapshots
        return {
            "requests": self.requests,
            "rows": self.rows,
            "bytes": self.bytes,
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "refused": dict(self.refused),
            "snapshots": None if snapshots is None else snapshots.statistics(),
        }

    async def close(self) -> None:
        """Let go of snapshots, and remove their files. May be called twice."""
        if self.snapshots.snapshots is not None:
            await self.snapshots.snapshots.close()

    # -- the paths --------------------------------------------------------------------------------------------

    async def updates(self, request: Request) -> Response:
        """One page of catch-up."""
        params = params_of(request)
        question = self._question(request.path_params["stream"], params.get("instance_name"), params)
        async with self._place():
            return await self._page(request, question)

    async def reference_updates(self, request: Request) -> Response:
        """The same, to the reference system's clients: here the server is the writer, so it must be one we know."""
        params = params_of(request)
        stream = request.path_params["stream"]
        question = self._question(stream, params.get("instance_name", "?"), params)
        async with self._place():
            known = [one.writer for one in await self._store.known() if one.stream == stream]
            if "instance_name" not in params and len(known) == 1:  # its clients know the writer by its address
                question = attrs.evolve(question, writer=known[0])
            if question.writer not in known:
                raise Refused(400, "unknown_writer", "instance_name is no writer of this stream")
            return await self._page(request, question, reference=True)

    async def state(self, request: Request) -> Response:
        """Epoch, streams and known writers; with ``?sequence=stream`` also that sequence, and with ``?newest=stream``
        the highest rows of its writers."""
        params = params_of(request)
        stream, rows_of = params.get("sequence"), params.get("newest")
        for name in (stream, rows_of):
            if name is not None:
                self._check_stream(name)
        async with self._place():
            for _ in range(EPOCH_TRIES):
                epoch = await self._store.epoch()
                known = [one for one in await self._store.known() if one.stream in self._streams]
                sequence = None if stream is None else await self._store.sequence(stream)
                newest = None if rows_of is None else await self._store.newest(rows_of)
                if epoch == await self._store.epoch() and (newest is None or newest.epoch == epoch):
                    break
            else:
                raise Refused(503, "unavailable", "the fact log is being restored")
        rows = None if newest is None else newest.rows
        state = CatchUpState(epoch, sorted(self._streams), known, sequence, rows)
        return await self._answer(request, write_state(state))

    def _check_stream(self, stream: str) -> None:
        if stream not in self._streams:
            raise Refused(400, "unknown_stream", "this stream is not served here", known=sorted(self._streams))

    def _question(self, stream: str, writer: str | None, params: Mapping[str, str]) -> FetchUpdates:
        self._check_stream(stream)
        if writer is None or not _NAME.fullmatch(writer):
            raise Refused(400, "bad_parameter", "instance_name: the name of a writer is needed")
        after, upto = position_of(params, "from_token"), position_of(params, "upto_token")
        if after > upto:
            raise Refused(400, "bad_parameter", "from_token is above upto_token")
        limit = position_of(params, "limit") if "limit" in params else self.limits.page_rows
        return FetchUpdates(stream, writer, after, upto, max(1, min(limit, self.limits.page_rows)))

    async def _fetch(self, question: FetchUpdates) -> UpdatesPage:
        try:
            return await self._store.fetch(question)
        except PositionTooOld:
            # A page names its log, this does not; asked for again between two looks at the epoch it is of that one.
            for _ in range(EPOCH_TRIES):
                epoch = await self._store.epoch()
                try:
                    return await self._store.fetch(question)
                except PositionTooOld as error:
                    if epoch == await self._store.epoch():
                        fields = {name: getattr(error, name) for name in ("stream", "writer", "position", "floor")}
                        gone = "these rows have been deleted"
                        raise Refused(410, "position_too_old", gone, **fields, epoch=epoch) from None
            raise Refused(503, "unavailable", "the fact log is being restored") from None

    async def _page(self, request: Request, question: FetchUpdates, *, reference: bool = False) -> Response:
        page = bounded(await self._fetch(question), self.limits.page_bytes)
        response = await self._answer(request, write_page(page, reference=reference))
        self.rows += len(page.tokens)
        return response

    async def _answer(self, request: Request, body: bytes) -> Response:
        headers = {"vary": "accept-encoding"}
        if len(body) >= self.limits.compress_from and accepts_gzip(request.headers):
            body = await asyncio.to_thread(_gzip, body)
            headers["content-encoding"] = "gzip"
        return _response(200, body, headers)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of ``concurrency`` places at the store, after a turn in the queue."""
        if waits := self._places.locked():
            if self.waiting >= self.limits.queue:
                raise Refused(503, "busy", "too many requests at a time: come back later")
            self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= waits
        try:
            yield
        finally:
            self._places.release()

    # -- around them ------------------------------------------------------------------------------------------

    def authorized(self, headers: Headers) -> bool:
        """Whether the request brings the secret; in constant time."""
        if self._secrets is None:
            return True
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = _digest(token.strip(" "))
        same = [hmac.compare_digest(digest, secret) for secret in self._secrets]
        return any(same) and scheme.lower() == "bearer"

    def refusal(self, error: Exception) -> Refused:
        """The answer that an error becomes: the one place where that is decided."""
        if (refusal := refusal_of(error)) is not None:
            return refusal
        match error:
            case Refused():
                return error
            case UnknownStream():
                return Refused(400, "unknown_stream", "this stream is not in the store")
            case TimeoutError():
                return Refused(503, "deadline", "that took too long: come back later")
            case BusrepError():
                return Refused(503, "unavailable", "the store is not available now")
        return Refused(500, "internal", "internal error")

    def refuse(self, error: Exception) -> Refused:
        """The answer that an error becomes, counted, and logged without anything of the request."""
        refusal = self.refusal(error)
        code = refusal.code
        self.refused[code] += 1
        if self._limiter.allows(code, time.monotonic()):
            match code:
                case "unavailable":
                    log.error("catch-up over HTTP: %s: %s", type(error).__name__, error)
                case "internal":  # a bug; its message may hold what was asked for, where it happened does not
                    where = "".join(traceback.format_tb(error.__traceback__))
                    log.error("catch-up over HTTP failed with %s\n%s", type(error).__name__, where)
                case _:
                    level = logging.WARNING if code in _WARNED else logging.INFO
                    log.log(level, "catch-up over HTTP: %s (%s, %d so far)", refusal, code, self.refused[code])
        return refusal


# Refusals that say something of the deployment, and not only of one client's question.
_WARNED = ("unauthorized", "busy", "deadline", "snapshot_busy", "spool", "spool_changed", "too_many_parts")


class _Guard:
    """Outermost: the secret, the method, the deadline, who hangs up, the counters, and every error an answer."""

    def __init__(self, app: ASGIApp, service: CatchUp) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan of who runs us by ourselves
            await self._app(scope, receive, send)
            return
        service, started = self._service, asyncio.Event()

        async def counted(message: Message) -> None:
            started.set()
            service.bytes += len(message.get("body", b""))
            await send(message)

        service.requests += 1
        service.in_flight += 1
        try:
            self._check(scope)
            async with asyncio.timeout(service.limits.deadline):
                body = await self._body(receive) if scope["method"] == "POST" else b""
                await self._answer(scope, receive, counted, started, body)
        except Exception as error:
            # An answer that breaks off: its client is gone, whatever the server that we are part of calls that.
            gone = started.is_set() and isinstance(error, OSError)
            refusal = service.refuse(_gone() if gone else error)
            if not started.is_set():
                await self._refuse(scope, receive, send, refusal)
        finally:
            service.in_flight -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send, started: asyncio.Event, body: bytes) -> None:
        """Let the application answer, unless the client hangs up before that begins."""
        answering = asyncio.create_task(self._run(scope, send, body), name="busrep-http-answer")
        leaving = asyncio.create_task(_left(receive), name="busrep-http-left")
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not started.is_set():
                leaving.result()  # if the server that we are part of has failed there
                raise _gone()
            await answering
        finally:
            # Once: a driver that is cancelled while it takes back its question gives up the connection.
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _run(self, scope: Scope, send: Send, body: bytes) -> None:
        async def received() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, received, send)

    async def _body(self, receive: Receive) -> bytes:
        """All of it, of a bounded length; a bounded number of them at a time."""
        most, body = self._service.snapshots.limits.agreement_bytes, bytearray()
        async with self._service.snapshots.body_place():
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _gone()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise Refused(413, "body", f"a body is at most {most} bytes long here")
        return bytes(body)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._service.authorized(headers):
            raise Refused(401, "unauthorized", "the secret is missing or wrong: Authorization: Bearer SECRET")
        if scope["method"] == "POST" and any(path in scope["path"] for path in (SNAPSHOTS_PATH, PART_PATH)):
            return  # an agreement is brought along
        if scope["method"] != "GET":
            raise Refused(405, "method", "only GET is answered here")
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise Refused(400, "body", "a GET has no body here")

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, refusal: Refused) -> None:
        headers = {
            401: {"www-authenticate": "Bearer"},
            405: {"allow": "GET"},
            503: {"retry-after": str(self._service.limits.retry_after)},
        }.get(refusal.status, {})
        if refusal.code in ("unauthorized", "method", "body"):  # a body may be on its way, which nobody will read
            headers["connection"] = "close"
        await _response(refusal.status, refusal.body, headers)(scope, receive, send)


# -- small things ---------------------------------------------------------------------------------------------


def _response(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    # A page kept by a cache on the way would claim what its table no longer proves.
    return Response(body, status, {"cache-control": "no-store", **headers}, "application/json")


def _checked_secrets(secret: str | Sequence[str]) -> list[str]:
    secrets = [secret] if isinstance(secret, str) else list(secret)
    if not secrets or not all(isinstance(one, str) and _SECRET.fullmatch(one) for one in secrets):
        raise ConfigError(
            "secret= takes visible ASCII characters without spaces, at least one (try: python -c "
            "'import secrets; print(secrets.token_urlsafe())'), or None where something else keeps strangers out"
        )
    return secrets


def _digest(secret: str) -> bytes:
    # Of equal length, so that comparing tells nothing of the secret's own.
    return hashlib.blake2b(secret.encode("utf-8", "surrogatepass")).digest()


def _gzip(body: bytes) -> bytes:
    # The fastest level: rows of a kind shrink to a tenth with it, and the others take three times as long for a little.
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(body) + packer.flush()


async def _left(receive: Receive) -> None:
    """Return when the client has hung up: that comes behind the empty body that every GET has."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _gone() -> Refused:
    return Refused(503, "gone", "the client is gone")
