"""Snapshots for readers over HTTP, out of one source (docs/http.md has the paths).

A part is loaded into memory whole before it is sent. So its SHA-256 is known before its first byte is sent, and a slow
reader, or one that stalls, costs the source nothing. The places for downloads bound what is in memory.

Nothing is held between two parts, at the source or here: a reader brings its agreement along, and each part is loaded
under it *again*, because the positions alone settle what is in a snapshot (core/snapshots.py). An agreement may take
longer than one request, so it is made by a task, which those share that ask for the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable
from functools import partial
from typing import Any

import attrs
from attrs.validators import ge

from busrep.core.snapshots import Agreement, SnapshotSource, part_hash
from busrep.errors import MissingExtra, SnapshotBusy, SnapshotGone, Unavailable

from ..runtime.tasks import being_cancelled, stop
from ..snapshots.sources import check_agreement
from .guard import AGREEMENT_BYTES, Places, Refused, packed, params_of, position_of, response_of

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
# For how long an agreement is given to readers that come new, seconds: they have to catch up with what came after it.
SHARED_FOR = 60.0
# Agreements that are kept for them.
KEPT = 16
# Requests for parts that wait for a place; further ones are told to come back.
QUEUE = 256
# Sent at a time: what one client costs in memory, beside the part; each piece has a deadline of its own.
PIECE = 65_536


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


class Snapshots:
    """``source``: opened and closed by the caller. ``check_stream``: raises Refused for a stream that is not served."""

    def __init__(self, source: SnapshotSource, limits: SnapshotLimits, check_stream: Callable[[str], None]) -> None:
        self.source, self.limits, self._check_stream = source, limits, check_stream
        self._agreeing: dict[Hashable, asyncio.Task[Agreement]] = {}
        self._loads = asyncio.Semaphore(limits.loads)
        self.downloads = Places(limits.downloads, QUEUE)
        self.agreements = self.parts_loaded = 0

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: agreements made, and parts loaded from the source."""
        return {"agreements": self.agreements, "parts_loaded": self.parts_loaded}

    async def close(self) -> None:
        """End the agreements that are being made. May be called twice."""
        await stop([task for task in self._agreeing.values() if not task.done()], 5.0)
        self._agreeing.clear()

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
        task = self._agreeing.get(key)
        if task is None:
            if sum(not one.done() for one in self._agreeing.values()) >= self.limits.snapshots:
                raise SnapshotBusy(WHAT, self.limits.snapshots)
            making = self._agree(stream, part_rows, again)
            task = self._agreeing[key] = asyncio.create_task(making, name="busrep-snapshots")
            task.add_done_callback(partial(self._made, key))
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Unavailable(WHAT, "it is being closed") from None
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

    def _made(self, key: Hashable, task: asyncio.Task[Agreement]) -> None:
        if task.cancelled() or task.exception() is not None:  # those who wait are told; there may be none any more
            self._forget(key, task)
            return
        asyncio.get_running_loop().call_later(SHARED_FOR, self._forget, key, task)
        done = [(key, one) for key, one in self._agreeing.items() if one.done()]
        for old in done[:-KEPT]:
            self._forget(*old)

    def _forget(self, key: Hashable, task: asyncio.Task[Agreement]) -> None:
        if self._agreeing.get(key) is task:
            del self._agreeing[key]

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
                text = await self._load(agreement, number)
                await _send_part(text, request.headers, send)

        return answer

    async def _load(self, agreement: Agreement, number: int) -> bytes:
        """The text of a part. Raises SnapshotGone, Refused, and what else the source raises."""
        text, most = bytearray(), self.limits.part_bytes
        try:
            async with self._loads, self._held(agreement.stream, self.limits.part_rows, agreement) as held:
                if not held.same(agreement):
                    raise SnapshotGone(agreement.stream, "rows of it were pruned, or the fact log was replaced")
                async with contextlib.aclosing(self.source.load(held, number)) as pieces:
                    async for piece in pieces:
                        text += piece
                        if len(text) > most:
                            break
        except SnapshotGone:  # newcomers are to get another one
            for key, task in [item for item in self._agreeing.items() if item[1].done()]:
                self._forget(key, task)
            raise
        if len(text) > most:
            raise Refused(
                400,
                "part_too_long",
                f"a part of the snapshot is longer than {most} bytes: lower Settings.snapshot_part_rows before a "
                "snapshot is agreed on, or raise SnapshotLimits.part_bytes",
            )
        self.parts_loaded += 1
        return bytes(text)


async def _send_part(text: bytes, asked: Headers, send: Send) -> None:
    digest = await asyncio.to_thread(part_hash, text)  # of the text, however it is packed
    body, coding = await packed(text, asked)
    headers = {
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "busrep-sha256": digest,
        "content-length": str(len(body)),
        **coding,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    for at in range(0, len(body), PIECE):
        await send({"type": "http.response.body", "body": body[at : at + PIECE], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
