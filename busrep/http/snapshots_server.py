"""The paths under which snapshots are served (docs/http.md): requests and answers, round snapshots.py."""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from busrep.core.snapshots import Agreement, SnapshotSource
from busrep.errors import MissingExtra, SnapshotBusy, SnapshotGone

from ..snapshots.sources import check_agreement
from .pages import PART_PATH, SNAPSHOTS_PATH
from .requests import Refused, accepts_gzip, params_of, position_of
from .snapshots import NoSuchPart, Snapshots, TooManyParts, UnknownSnapshot
from .snapshots_limits import SnapshotLimits
from .snapshots_spool import PartReading, PartTooLong, SpoolChanged, SpoolTrouble

try:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Agreements that clients bring along, read at a time: each may be `SnapshotLimits.agreement_bytes` long.
BODIES = 4
# The fastest level, as for pages.
GZIP_LEVEL = 1

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class SnapshotPaths:
    """``check_stream``: raises Refused for a stream that is not served. ``source``: None where there are none."""

    def __init__(
        self, source: SnapshotSource | None, limits: SnapshotLimits, check_stream: Callable[[str], None]
    ) -> None:
        self._check_stream = check_stream
        self.limits = limits
        self.snapshots = None if source is None else Snapshots(source, limits)
        self._bodies = asyncio.Semaphore(BODIES)
        self._downloads = asyncio.Semaphore(limits.downloads)
        self._requests = 0

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
        with self._place():
            text = await snapshots.agree(stream, min(part_rows, self.limits.part_rows), again)
        return Response(text, 200, {"cache-control": "no-store"}, "application/json")

    async def part(self, request: Request) -> PartAnswer:
        """The text of a part; a body is the agreement that it is of, in case that is not known here."""
        params_of(request)
        snapshots, number = self._given(), position_of(request.path_params, "number")
        agreement, id = await self._brought(request), request.path_params["id"]
        if agreement is not None and agreement.digest != id:
            raise Refused(400, "bad_agreement", "the agreement in the body is another one")
        return PartAnswer(self, snapshots, id, number, agreement, request.headers)

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

    @contextlib.asynccontextmanager
    async def body_place(self) -> AsyncIterator[None]:
        """While a body is read."""
        async with self._bodies:
            yield

    @contextlib.contextmanager
    def _place(self) -> Any:
        """One of ``requests``, until it is answered."""
        if self._requests >= self.limits.requests:
            raise Refused(503, "busy", "too many requests for snapshots at a time: come back later")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextlib.asynccontextmanager
    async def opened(
        self, snapshots: Snapshots, id: str, number: int, agreement: Agreement | None
    ) -> AsyncIterator[PartReading]:
        """A part, and a place among those who download."""
        with self._place():
            if agreement is not None:
                await snapshots.take_up(agreement)
            reading = await snapshots.part(id, number)
            try:
                async with self._downloads:
                    yield reading
            finally:
                reading.close()


class PartAnswer:
    """An answer that sends a part from its file, piece by piece."""

    def __init__(
        self,
        paths: SnapshotPaths,
        snapshots: Snapshots,
        id: str,
        number: int,
        agreement: Agreement | None,
        headers: Headers,
    ) -> None:
        self._paths, self._asked, self._headers = paths, (snapshots, id, number, agreement), headers

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it; as ASGI has it."""
        async with self._paths.opened(*self._asked) as reading:
            size, tag = reading.part.size, f'"{reading.part.digest}"'
            headers = {
                "cache-control": "no-store",
                "content-type": "text/plain; charset=utf-8",
                "accept-ranges": "bytes",
                "vary": "accept-encoding",
                "busrep-sha256": reading.part.digest,  # of the text, however it is packed
            }
            begin, end = self._range(size, tag)
            packer = None
            if (begin, end) != (0, size):
                status, headers["content-range"] = 206, f"bytes {begin}-{end - 1}/{size}"
            else:
                status = 200
                if accepts_gzip(self._headers):
                    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 31)
                    headers["content-encoding"] = "gzip"
            if packer is None:
                headers |= {"content-length": str(end - begin), "etag": tag}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": raw})
            left = end - begin
            async with contextlib.aclosing(reading.pieces(begin)) as pieces:
                async for piece in pieces:
                    left -= len(piece)
                    text = piece[: len(piece) + min(left, 0)]
                    if packer is not None:
                        text = await asyncio.to_thread(packer.compress, text)
                    await send({"type": "http.response.body", "body": text, "more_body": True})
                    if left <= 0:
                        break
            await send({"type": "http.response.body", "body": packer.flush() if packer else b"", "more_body": False})

    def _range(self, size: int, tag: str) -> tuple[int, int]:
        """What is asked for, [begin, end). A Range of another form, or of another text, counts for nothing."""
        found = _RANGE.fullmatch(self._headers.get("range", ""))
        if found is None or self._headers.get("if-range", tag) != tag:
            return 0, size
        begin, last = int(found[1]), int(found[2] or size)
        if begin >= size or last < begin:
            raise Refused(416, "range", f"the part ends at {size}")
        return begin, min(last + 1, size)


def refusal_of(error: Exception) -> Refused | None:
    """The answer that an error about snapshots becomes; None for others."""
    match error:
        case UnknownSnapshot():
            return Refused(410, "snapshot_unknown", "this agreement is not known here (any more): send it again")
        case SnapshotGone():
            return Refused(410, "snapshot_gone", error.reason)
        case SnapshotBusy():
            return Refused(503, "snapshot_busy", "too many snapshots at a time: come back later", limit=error.limit)
        case NoSuchPart():
            return Refused(400, "bad_parameter", "there is no part of this number")
        case TooManyParts():
            return Refused(400, "too_many_parts", str(error))
        case PartTooLong():
            return Refused(400, "part_too_long", str(error))
        case SpoolTrouble():
            return Refused(503, "spool", str(error))
        case SpoolChanged():
            return Refused(503, "spool_changed", str(error))
    return None
