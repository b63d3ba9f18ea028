"""Snapshots for readers over HTTP, out of one source (docs/http.md has the paths).

A part is loaded into memory whole before it is sent. So its SHA-256 is known before its first byte is sent, and a slow
reader, or one that stalls, costs the source nothing. Readers that ask for a part at about the same time share its text.
The places for downloads bound what is in memory, and a number of bytes what is kept beside them.

Nothing is held at the source between two parts: a reader brings its agreement along, and each part is loaded under it
*again*, because the positions alone settle what is in a snapshot (core/snapshots.py). While a part is sent, the next
one is loaded. An agreement may take longer than one request, so it goes on when nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import attrs
from attrs.validators import ge

from busrep.core.snapshots import Agreement, SnapshotSource, part_hash
from busrep.errors import MissingExtra, SnapshotBusy, SnapshotGone, Unavailable

from ..snapshots.sources import check_agreement
from .guard import AGREEMENT_BYTES, Places, Refused, packed, params_of, position_of, response_of
from .shared import Shared

try:
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

WHAT = "the snapshots of this server"
# For the source to agree, seconds. Clients wait for it in several requests.
AGREE_TIMEOUT = 600.0
# Agreements that are kept for readers that come new.
KEPT = 16
# Requests for parts that wait for a place; further ones are told to come back.
QUEUE = 256
# Sent at a time: what one client costs in memory, beside the part; each piece has a deadline of its own.
PIECE = 131_072


@attrs.frozen(kw_only=True)
class SnapshotLimits:
    """Bounds of one application's snapshots, whatever its clients ask for."""

    snapshots: int = attrs.field(default=2, validator=ge(1))
    """Agreements that are made at a time; further readers are told to come back (`SnapshotBusy`). With ``loads`` as
    many as `Settings.snapshots`. Readers that ask for the same at about the same time count once."""

    loads: int = attrs.field(default=2, validator=ge(1))
    """Parts that are loaded from the source at a time, as many as one reader with the database loads
    (`Settings.snapshot_connections`); further ones wait."""

    downloads: int = attrs.field(default=16, validator=ge(1))
    """Parts that are in memory, loaded or being sent, at a time; the others wait."""

    part_rows: int = attrs.field(default=100_000, validator=ge(1))
    """Most rows of one part of an agreement made here (`Settings.snapshot_part_rows`), whatever is asked for."""

    part_bytes: int = attrs.field(default=2**26, validator=ge(65_536))
    """Largest part, in bytes. An `HttpSource` reads no larger one by default."""

    kept_bytes: int = attrs.field(default=2**26, validator=ge(0))
    """Texts of parts that are kept in memory for a minute, for other readers of the same snapshot, and loaded ahead for
    readers that take one part after the other; 0: none are."""


@attrs.frozen
class _Part:
    """The text of a part, and its SHA-256 in hex."""

    text: bytes
    sha256: str


class Snapshots:
    """``source``: opened and closed by the caller. ``check_stream``: raises Refused for a stream that is not served."""

    def __init__(self, source: SnapshotSource, limits: SnapshotLimits, check_stream: Callable[[str], None]) -> None:
        self.source, self.limits, self._check_stream = source, limits, check_stream
        self._agreements = Shared[Agreement](WHAT, KEPT, lambda _: 1, abandon=False)
        self._parts = Shared[_Part](WHAT, limits.kept_bytes, lambda part: len(part.text), abandon=True)
        self._loads = asyncio.Semaphore(limits.loads)
        self.downloads = Places(limits.downloads, QUEUE)
        self.agreements = self.parts_loaded = 0

    def statistics(self) -> dict[str, Any]:
        """JSON-able: agreements made and parts loaded from the source so far, and parts that are being loaded."""
        return {"agreements": self.agreements, "parts_loaded": self.parts_loaded, "loading": self._parts.making}

    async def close(self) -> None:
        """End what is being made. May be called twice."""
        await self._agreements.close()
        await self._parts.close()

    # -- agreements -------------------------------------------------------------------------------------------

    async def agree(self, request: Request) -> Response:
        """An agreement; with a body, the one in it again, if that can be."""
        stream, params = request.path_params["stream"], params_of(request)
        self._check_stream(stream)
        part_rows = position_of(params, "part_rows")
        if part_rows == 0:
            raise Refused(400, "bad_parameter", "part_rows is 0")
        again = await self._brought(request)
        if again is not None and again.stream != stream:
            raise Refused(400, "bad_agreement", f"the agreement in the body is of stream {again.stream!r}")
        agreement = await self._agreed(stream, min(part_rows, self.limits.part_rows), again)
        return response_of(200, agreement.to_json(), {})

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

    async def _agreed(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        key = (stream, part_rows, None if again is None else again.digest)
        if key not in self._agreements and self._agreements.making >= self.limits.snapshots:
            raise SnapshotBusy(WHAT, self.limits.snapshots)
        found = await self._agreements.get(key, partial(self._agree, stream, part_rows, again))
        if again is None or not again.same(found):
            return found
        # Its own back: how many rows its parts have is not in the digest, and may be known to it alone.
        return attrs.evolve(again, source="", id=found.id)

    async def _agree(self, stream: str, part_rows: int, again: Agreement | None) -> Agreement:
        try:
            async with asyncio.timeout(AGREE_TIMEOUT), self._held(stream, part_rows, again) as held:
                agreement = attrs.evolve(held, source="", id=held.digest)  # where our store is concerns nobody
        except TimeoutError:
            raise Unavailable(WHAT, f"the store took more than {AGREE_TIMEOUT:g} s") from None
        if len(agreement.to_json()) > AGREEMENT_BYTES:
            reason = f"a snapshot in {len(agreement.parts)} parts: raise Settings.snapshot_part_rows"
            raise Refused(400, "too_many_parts", reason)
        self.agreements += 1
        return agreement

    @contextlib.asynccontextmanager
    async def _held(self, stream: str, part_rows: int, again: Agreement | None) -> AsyncIterator[Agreement]:
        """What the source agrees on, and holds meanwhile."""
        held = await self.source.agree(stream, part_rows=part_rows, again=again)
        try:
            yield held
        finally:
            await self.source.leave(held)

    # -- parts ------------------------------------------------------------------------------------------------

    async def part(self, request: Request) -> ASGIApp:
        """The text of a part of the agreement in the body."""
        params_of(request)
        number, agreement = position_of(request.path_params, "number"), await self._brought(request)
        if agreement is None:
            raise Refused(400, "bad_agreement", "there is no agreement in the body")
        if number >= len(agreement.parts):
            raise Refused(400, "bad_parameter", "there is no part of this number")

        async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
            async with self.downloads.taken():
                digest = agreement.digest
                part = await self._parts.get((digest, number), partial(self._load, agreement, number))
                # The reader is about to ask for the next one. Others go first, if there are any.
                if number + 1 < len(agreement.parts) and not self._parts.making:
                    load = partial(self._load, agreement, number + 1)
                    self._parts.make_ahead((digest, number + 1), load, len(part.text))
                await _send_part(part, request.headers, send)

        return answer

    async def _load(self, agreement: Agreement, number: int) -> _Part:
        """Raises SnapshotGone, Refused, and what else the source raises."""
        if self._loads.locked():
            self._parts.give_up_ahead()
        pieces: list[bytes] = []
        size, most = 0, self.limits.part_bytes
        try:
            async with self._loads, self._held(agreement.stream, self.limits.part_rows, agreement) as held:
                if not held.same(agreement):
                    raise SnapshotGone(agreement.stream, "rows of it were pruned, or the fact log was replaced")
                async with contextlib.aclosing(self.source.load(held, number)) as loading:
                    async for piece in loading:
                        pieces.append(piece)
                        size += len(piece)
                        if size > most:
                            break
            text = b"".join(pieces)
        except SnapshotGone:  # newcomers are to get another one
            self._agreements.forget_all()
            raise
        finally:
            pieces.clear()  # the traceback of an error may keep them, until garbage is collected
        if size > most:
            raise Refused(
                400,
                "part_too_long",
                f"a part of the snapshot is longer than {most} bytes: lower Settings.snapshot_part_rows before a "
                "snapshot is agreed on, or raise SnapshotLimits.part_bytes",
            )
        self.parts_loaded += 1
        return _Part(text, await asyncio.to_thread(part_hash, text))


async def _send_part(part: _Part, asked: Headers, send: Send) -> None:
    body, coding = await packed(part.text, asked)
    headers = {
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "busrep-sha256": part.sha256,  # of the text, however it is packed
        "content-length": str(len(body)),
        **coding,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    for at in range(0, len(body), PIECE):
        await send({"type": "http.response.body", "body": body[at : at + PIECE], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
