"""The paths under which snapshots are served (docs/http.md): requests and answers, round snapshots.py."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Callable

from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import MissingExtra

from ..snapshots.sources import check_agreement
from .guard import GZIP_LEVEL, Places, Refused, accepts_gzip, params_of, position_of
from .pages import PART_PATH, SNAPSHOTS_PATH
from .snapshots import PartText, Snapshots
from .snapshots_limits import SnapshotLimits

try:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Requests for agreements at a time, and for parts that wait; further ones are told to come back.
REQUESTS = 256
# Sent at a time: what one client costs in memory, beside the part.
PIECE = 65_536

_RANGE = re.compile(r"bytes=([0-9]{1,18})-")


class SnapshotPaths:
    """``check_stream``: raises Refused for a stream that is not served. ``source``: None where there are none."""

    def __init__(
        self, source: SnapshotSource | None, limits: SnapshotLimits, check_stream: Callable[[str], None]
    ) -> None:
        self._check_stream, self._limits = check_stream, limits
        self.snapshots = None if source is None else Snapshots(source, limits)
        self._agreeing = Places(REQUESTS, 0)
        self.downloads = Places(limits.downloads, REQUESTS)

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route(PART_PATH + "{id}/{number}", self.part, methods=["GET", "POST"]),
            Route(SNAPSHOTS_PATH + "{stream:path}", self.agree, methods=["GET", "POST"]),
        ]

    async def agree(self, request: Request) -> Response:
        """An agreement; with a body, the one in it again, if that can be."""
        stream, params = request.path_params["stream"], params_of(request)
        self._check_stream(stream)
        snapshots = self._given()
        part_rows = position_of(params, "part_rows")
        if part_rows == 0:
            raise Refused(400, "bad_parameter", "part_rows is 0")
        again = await self._brought(request)
        if again is not None and again.stream != stream:
            raise Refused(400, "bad_agreement", f"the agreement in the body is of stream {again.stream!r}")
        async with self._agreeing.taken():
            agreement = await snapshots.agree(stream, min(part_rows, self._limits.part_rows), again)
        return Response(agreement.to_json(), 200, {"cache-control": "no-store"}, "application/json")

    async def part(self, request: Request) -> ASGIApp:
        """The text of a part; a body is the agreement that it is of, in case that is not known here."""
        params_of(request)
        snapshots, number = self._given(), position_of(request.path_params, "number")
        agreement, id = await self._brought(request), request.path_params["id"]
        if agreement is not None and agreement.digest != id:
            raise Refused(400, "bad_agreement", "the agreement in the body is another one")

        async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
            async with self.downloads.taken():
                part = await snapshots.part(id, number, agreement)
                await _send_part(part, request.headers, send)

        return answer

    async def _brought(self, request: Request) -> Agreement | None:
        """The agreement in a request's body."""
        if not (body := await request.body()):
            return None
        try:
            agreement = Agreement.from_json(body)
            check_agreement(agreement, agreement.stream)
        except (ValueError, OverflowError) as error:
            raise Refused(400, "bad_agreement", f"the agreement in the body: {error}") from None
        self._check_stream(agreement.stream)
        return agreement

    def _given(self) -> Snapshots:
        if self.snapshots is None:
            raise Refused(404, "no_snapshots", "this server gives no snapshots")
        return self.snapshots


async def _send_part(part: PartText, asked: Headers, send: Send) -> None:
    """Send a part, or what follows a Range, piece by piece."""
    status, text, tag = 200, part.text, f'"{part.digest}"'
    headers = {
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "accept-ranges": "bytes",
        "vary": "accept-encoding",
        "busrep-sha256": part.digest,  # of the text, however it is packed
    }
    begin = _begin_of(asked, len(text), tag)
    if begin:
        status, headers["content-range"] = 206, f"bytes {begin}-{len(text) - 1}/{len(text)}"
    elif accepts_gzip(asked):
        text = await asyncio.to_thread(gzip.compress, text, GZIP_LEVEL, mtime=0)
        headers["content-encoding"] = "gzip"
    if "content-encoding" not in headers:
        headers["etag"] = tag
    headers["content-length"] = str(len(text) - begin)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    for at in range(begin, len(text), PIECE):
        await send({"type": "http.response.body", "body": text[at : at + PIECE], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _begin_of(asked: Headers, size: int, tag: str) -> int:
    """Where to begin. A Range of another form than ``bytes=N-``, or of another text, counts for nothing."""
    found = _RANGE.fullmatch(asked.get("range", ""))
    if found is None or asked.get("if-range", tag) != tag:
        return 0
    if (begin := int(found[1])) >= size:
        raise Refused(416, "range", f"the part ends at {size}")
    return begin
