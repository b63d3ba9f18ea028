"""The serving half of catch-up over HTTP (protocol.md, section 8): a Starlette application over a store.

It reads what a store has, and writes nothing. Mount it in a service's own application, or run it by itself with
``busrep.http.serve``. The store is the caller's: open while requests come, closed by whoever opened it.

What a request passes, in this order: the secret, before anything is looked at, and the method (guard.py); parameters; a
place among ``concurrency``, or in the queue before them; the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs.validators import ge, gt

from busrep.core.catchup import FetchUpdates
from busrep.core.fields import refuse_name
from busrep.core.snapshots import SnapshotSource
from busrep.errors import ConfigError, MissingExtra, PositionTooOld, Unavailable
from busrep.stores.interface import FactSource, provides
from busrep.streams import Registry, Stream

from . import pages
from .guard import Guard, Places, Refused, packed, params_of, position_of, response_of
from .pages import CatchUpState, bounded, write_page, write_state
from .snapshots import SnapshotLimits, Snapshots

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

# Looks at the epoch that must agree before an answer about writers is given: a restore may come between two questions.
EPOCH_TRIES = 3
# Answers of so many bytes and more are compressed for clients that accept gzip; smaller ones gain nothing.
COMPRESS_FROM = 16_384


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
    """For an answer to begin, waiting included, and then for each piece of it that the client takes: below the 30 s
    after which a reader gives up (`Settings.fetch_timeout`)."""

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
    closed ends the agreements on snapshots that are being made.

    Raises ConfigError for a secret that no header can hold, and for no streams that are kept in a table; MissingExtra.
    """
    service = CatchUp(store, Registry(streams), secret, limits or CatchUpLimits(), snapshot_source)
    given = service.snapshots
    routes = [
        Route(pages.UPDATES_PATH + "{stream:path}", service.updates, methods=["GET"]),
        Route(pages.STATE_PATH, service.state, methods=["GET"]),
        Route(pages.PART_PATH + "{number}", given.part if given else _no_snapshots, methods=["GET", "POST"]),
        Route(pages.SNAPSHOTS_PATH + "{stream:path}", given.agree if given else _no_snapshots, methods=["GET", "POST"]),
    ]
    if reference_paths:
        routes.append(
            Route(pages.REFERENCE_PATH + "{stream:path}/{txn_id}", service.reference_updates, methods=["GET"])
        )
    app = Starlette(
        routes=routes, middleware=[Middleware(service.guard.around)], exception_handlers={HTTPException: _not_found}
    )
    app.router.redirect_slashes = False
    app.state.catch_up = service
    return app


async def _not_found(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    raise Refused(status, "not_found", "no such path: is the prefix of the URL right?")


async def _no_snapshots(_request: Request) -> Response:
    raise Refused(404, "no_snapshots", "this server gives no snapshots")


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
        self.guard = Guard(secret, limits.deadline)
        self.places = Places(limits.concurrency, limits.queue)
        # Stores of others' making need not have snapshots.
        source = snapshot_source or (store if provides(store, SnapshotSource) else None)
        self.snapshots: Snapshots | None = None
        if source is not None and limits.snapshots is not None:
            self.snapshots = Snapshots(source, limits.snapshots, self._check_stream)
        self.rows = 0

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able: requests, rows and bytes sent, requests in flight and waiting for a place, how many
        were refused, by reason; and of snapshots (`Snapshots.statistics`)."""
        return {
            "requests": self.guard.requests,
            "rows": self.rows,
            "bytes": self.guard.bytes,
            "in_flight": self.guard.in_flight,
            "waiting": self.places.waiting,
            "refused": dict(self.guard.refused),
            "snapshots": None if self.snapshots is None else self.snapshots.statistics(),
        }

    async def close(self) -> None:
        """End the agreements on snapshots that are being made. May be called twice."""
        if self.snapshots is not None:
            await self.snapshots.close()

    # -- the paths --------------------------------------------------------------------------------------------

    async def updates(self, request: Request) -> Response:
        """One page of catch-up."""
        params = params_of(request)
        question = self._question(request.path_params["stream"], params.get("instance_name"), params)
        async with self.places.taken():
            return await self._page(request, question)

    async def reference_updates(self, request: Request) -> Response:
        """The same, to the reference system's clients: here the server is the writer, so it must be one we know."""
        params = params_of(request)
        stream = request.path_params["stream"]
        question = self._question(stream, params.get("instance_name", "?"), params)
        async with self.places.taken():
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
        async with self.places.taken():
            for _ in range(EPOCH_TRIES):
                epoch = await self._store.epoch()
                try:
                    known = [one for one in await self._store.known(epoch) if one.stream in self._streams]
                except Unavailable:  # also of a replica that has not seen a restore, or has seen it already
                    if epoch == await self._store.epoch():
                        raise
                    continue
                sequence = None if stream is None else await self._store.sequence(stream, epoch)
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
        if writer is None or refuse_name(writer) is not None:
            raise Refused(400, "bad_parameter", "instance_name: the name of a writer is needed")
        after, upto = position_of(params, "from_token"), position_of(params, "upto_token")
        if after > upto:
            raise Refused(400, "bad_parameter", "from_token is above upto_token")
        limit = position_of(params, "limit") if "limit" in params else self.limits.page_rows
        return FetchUpdates(stream, writer, after, upto, max(1, min(limit, self.limits.page_rows)))

    async def _page(self, request: Request, question: FetchUpdates, *, reference: bool = False) -> Response:
        try:
            page = bounded(await self._store.fetch(question), self.limits.page_bytes)
        except PositionTooOld as error:
            fields = {name: getattr(error, name) for name in ("stream", "writer", "position", "floor", "epoch")}
            raise Refused(410, "position_too_old", "these rows have been deleted", **fields) from None
        response = await self._answer(request, write_page(page, reference=reference))
        self.rows += len(page.tokens)
        return response

    async def _answer(self, request: Request, body: bytes) -> Response:
        headers = {"vary": "accept-encoding"}
        if len(body) >= COMPRESS_FROM:
            body, headers = await packed(body, request.headers)
        return response_of(200, body, headers)
