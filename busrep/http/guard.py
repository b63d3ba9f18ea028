"""What each request to the catch-up application passes first: the secret, the method, the deadline; and every error an
answer.

A client that hangs up ends its request, as the deadline does: an answer that no client waits for holds no place, and no
connection of the store's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence

from busrep.core.backoff import LogLimiter
from busrep.errors import BusrepError, ConfigError, MissingExtra, SnapshotBusy, SnapshotGone, UnknownStream

from .pages import PART_PATH, SNAPSHOTS_PATH
from .requests import Refused
from .snapshots import AGREEMENT_BYTES

try:
    from starlette.datastructures import Headers
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

log = logging.getLogger("busrep.http")

# Bodies of requests that are read at a time; each is an agreement on a snapshot, of `AGREEMENT_BYTES` at most.
BODIES = 4

_SECRET = re.compile(r"[!-~]+")
# Refusals that say something of the deployment, and not only of one client's question.
_WARNED = ("unauthorized", "busy", "deadline", "snapshot_busy", "too_many_parts")


class Gate:
    """Who is let in, and what becomes of errors; counts both. ``deadline``, ``retry_after``: of `CatchUpLimits`.

    Raises ConfigError for a secret that no header can hold.
    """

    def __init__(self, secret: str | Sequence[str] | None, deadline: float, retry_after: int) -> None:
        self._secrets = None if secret is None else [_digest(one) for one in _checked_secrets(secret)]
        self.deadline, self.retry_after = deadline, retry_after
        self._limiter = LogLimiter()  # of what is refused, and of trouble with the store; all is counted
        self.requests = self.bytes = self.in_flight = 0
        self.refused: Counter[str] = Counter()

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


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate
        self._bodies = asyncio.Semaphore(BODIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # the lifespan of who runs us by ourselves
            await self._app(scope, receive, send)
            return
        gate, started = self._gate, asyncio.Event()

        async def counted(message: Message) -> None:
            started.set()
            gate.bytes += len(message.get("body", b""))
            await send(message)

        gate.requests += 1
        gate.in_flight += 1
        try:
            self._check(scope)
            async with asyncio.timeout(gate.deadline):
                body = await self._body(receive) if scope["method"] == "POST" else b""
                await self._answer(scope, receive, counted, started, body)
        except Exception as error:
            # An answer that breaks off: its client is gone, whatever the server that we are part of calls that.
            gone = started.is_set() and isinstance(error, OSError)
            refusal = gate.refuse(_gone() if gone else error)
            if not started.is_set():
                await self._refuse(scope, receive, send, refusal)
        finally:
            gate.in_flight -= 1

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
        if not self._gate.authorized(headers):
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
            503: {"retry-after": str(self._gate.retry_after)},
        }.get(refusal.status, {})
        if refusal.code in ("unauthorized", "method", "body"):  # a body may be on its way, which nobody will read
            headers["connection"] = "close"
        await response_of(refusal.status, refusal.body, headers)(scope, receive, send)


def response_of(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    """An answer in JSON that no cache keeps."""
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


async def _left(receive: Receive) -> None:
    """Return when the client has hung up: that comes behind the empty body that every GET has."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _gone() -> Refused:
    return Refused(503, "gone", "the client is gone")
