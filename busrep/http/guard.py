"""What each request to the catch-up application passes: the secret, the method, the deadline, its turn; and the answer
of one that is refused, which every error becomes.

A client that hangs up ends its request, as the deadline does: an answer that no client waits for holds no place, and no
connection of the store's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import hmac
import logging
import re
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from busrep.core.backoff import LogLimiter
from busrep.core.fields import json_bytes, read_integer
from busrep.errors import BusrepError, ConfigError, MissingExtra, SnapshotBusy, SnapshotGone, UnknownStream

from .pages import PART_PATH, SNAPSHOTS_PATH

try:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")

# Largest body, which is an agreement on a snapshot, and how many are read at a time.
AGREEMENT_BYTES = 4 * 2**20
BODIES = 16
# Of one query; four are known.
MOST_PARAMETERS = 16
# The fastest: rows of a kind shrink to a tenth with it, and the others take three times as long for a little.
GZIP_LEVEL = 1

# What a 503 says in Retry-After, seconds.
RETRY_AFTER = 1

_SECRET = re.compile(r"[!-~]+")
# Refusals that say something of the deployment, and not only of one client's question.
_WARNED = ("unauthorized", "busy", "deadline", "snapshot_busy", "too_many_parts")


class Refused(Exception):
    """A request that gets an answer other than 200."""

    def __init__(self, status: int, code: str, text: str, **fields: Any) -> None:
        self.status, self.code = status, code
        self.body = json_bytes({"error": text, "code": code, **fields})
        super().__init__(text)


class Places(asyncio.Semaphore):
    """So many requests at a time; others wait in a queue of bounded length."""

    def __init__(self, most: int, queue: int) -> None:
        super().__init__(most)
        self._queue, self.waiting = queue, 0

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Have a place. Raises Refused when the queue is full."""
        if waits := self.locked():
            if self.waiting >= self._queue:
                raise Refused(503, "busy", "too many requests at a time: come back later")
            self.waiting += 1
        try:
            await self.acquire()
        finally:
            self.waiting -= waits
        try:
            yield
        finally:
            self.release()


class Guard:
    """The outermost layer of one application, and its counters. ``deadline``: of `CatchUpLimits`.

    Raises ConfigError for a secret that no header can hold.
    """

    def __init__(self, secret: str | Sequence[str] | None, deadline: float) -> None:
        self._secrets = None if secret is None else [_digest(one) for one in _checked_secrets(secret)]
        self._deadline = deadline
        self._bodies = asyncio.Semaphore(BODIES)
        self._limiter = LogLimiter()  # of what is refused, and of trouble with the store; all is counted
        self.requests = self.bytes = self.in_flight = 0
        self.refused: Counter[str] = Counter()

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application behind this guard."""
        return partial(self._request, app)

    async def _request(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan of who runs us by ourselves
            await app(scope, receive, send)
            return
        started = asyncio.Event()
        self.requests += 1
        self.in_flight += 1
        try:
            self._check(scope)
            async with asyncio.timeout(self._deadline) as clock:

                async def counted(message: Message) -> None:
                    started.set()
                    self.bytes += len(message.get("body", b""))
                    await _deliver(send, message)
                    clock.reschedule(asyncio.get_running_loop().time() + self._deadline)

                body = await self._body(receive) if scope["method"] == "POST" else b""
                await _answer(app, scope, receive, counted, started, body)
        except Exception as error:
            # An answer that breaks off: its client is gone, or takes nothing.
            gone = started.is_set() and isinstance(error, OSError)
            refusal = self._refuse(_gone() if gone else error)
            if not started.is_set():
                with contextlib.suppress(ConnectionError):
                    await self._response(refusal)(scope, receive, partial(_deliver, send))
        finally:
            self.in_flight -= 1

    async def _body(self, receive: Receive) -> bytes:
        """All of it, of a bounded length; a bounded number of them at a time."""
        body, more = bytearray(), True
        async with self._bodies:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _gone()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > AGREEMENT_BYTES:
                    raise Refused(413, "body", f"a body is at most {AGREEMENT_BYTES} bytes long here")
        return bytes(body)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._authorized(headers):
            raise Refused(401, "unauthorized", "the secret is missing or wrong: Authorization: Bearer SECRET")
        if scope["method"] == "POST" and any(path in scope["path"] for path in (SNAPSHOTS_PATH, PART_PATH)):
            return  # an agreement is brought along
        if scope["method"] != "GET":
            raise Refused(405, "method", "only GET is answered here")
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise Refused(400, "body", "a GET has no body here")

    def _authorized(self, headers: Headers) -> bool:
        """Whether the request brings the secret; in constant time."""
        if self._secrets is None:
            return True
        given = headers.getlist("authorization")
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        digest = _digest(token.strip(" "))
        same = [hmac.compare_digest(digest, secret) for secret in self._secrets]
        return any(same) and scheme.lower() == "bearer"

    def _refuse(self, error: Exception) -> Refused:
        """The answer that an error becomes, counted, and logged without anything of the request."""
        refusal = refusal_of(error)
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

    def _response(self, refusal: Refused) -> Response:
        headers = {
            401: {"www-authenticate": "Bearer"},
            405: {"allow": "GET"},
            503: {"retry-after": str(RETRY_AFTER)},
        }.get(refusal.status, {})
        if refusal.code in ("unauthorized", "method", "body"):  # a body may be on its way, which nobody will read
            headers["connection"] = "close"
        return response_of(refusal.status, refusal.body, headers)


def refusal_of(error: Exception) -> Refused:
    """The answer that an error becomes: the one place where that is decided."""
    match error:
        case Refused():
            return error
        case UnknownStream():
            return Refused(400, "unknown_stream", "this stream is not in the store")
        case SnapshotGone():
            return Refused(410, "snapshot_gone", error.reason)
        case SnapshotBusy():
            return Refused(503, "snapshot_busy", "too many snapshots at a time: come back later", limit=error.limit)
        case TimeoutError():
            return Refused(503, "deadline", "that took too long: come back later")
        case BusrepError():
            return Refused(503, "unavailable", "the store is not available now")
    return Refused(500, "internal", "internal error")


def response_of(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    """An answer in JSON that no cache keeps."""
    # A page kept by a cache on the way would claim what its table no longer proves.
    return Response(body, status, {"cache-control": "no-store", **headers}, "application/json")


async def _answer(
    app: ASGIApp, scope: Scope, receive: Receive, send: Send, started: asyncio.Event, body: bytes
) -> None:
    """Let the application answer, unless the client hangs up before that begins."""

    async def received() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> None:
        await app(scope, received, send)

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":  # that comes behind the empty body that every GET has
            pass

    answering = asyncio.create_task(run(), name="busrep-http-answer")
    leaving = asyncio.create_task(left(), name="busrep-http-left")
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


async def _deliver(send: Send, message: Message) -> None:
    """Send it. Whatever the server that we are part of raises means that the client gets nothing: ConnectionError."""
    try:
        await send(message)
    except Exception as error:
        raise ConnectionError from error


def _gone() -> Refused:
    return Refused(503, "gone", "the client is gone")


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


# -- what a request says --------------------------------------------------------------------------------------


def params_of(request: Request) -> dict[str, str]:
    """The query. Raises Refused for one that is not UTF-8, or says something twice."""
    try:  # strictly: a name in another encoding is another name, and of that one there would be nothing
        query = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise Refused(400, "bad_parameter", "the query is not percent-encoded UTF-8, or too long") from None
    params = dict(pairs)
    if len(params) != len(pairs):
        raise Refused(400, "bad_parameter", "a parameter is given twice")
    return params


def position_of(params: Mapping[str, str], name: str) -> int:
    """An integer of the query, not negative. Raises Refused."""
    try:
        number = read_integer(params.get(name, "").encode())
    except ValueError as error:
        raise Refused(400, "bad_parameter", f"{name} {error}") from None
    if number < 0:
        raise Refused(400, "bad_parameter", f"{name} is negative")
    return number


async def packed(body: bytes, headers: Headers) -> tuple[bytes, dict[str, str]]:
    """The body as the client with these headers takes it, and the headers that say so."""
    for part in headers.get("accept-encoding", "").split(","):
        coding, _, weight = part.partition(";")
        if coding.strip().lower() == "gzip" and not re.fullmatch(r"\s*q=0(\.0*)?\s*", weight):
            body = await asyncio.to_thread(gzip.compress, body, GZIP_LEVEL, mtime=0)
            return body, {"vary": "accept-encoding", "content-encoding": "gzip"}
    return body, {"vary": "accept-encoding"}
