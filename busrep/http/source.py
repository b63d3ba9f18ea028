"""The reading half of catch-up over HTTP: what a reader without a database uses as its store.

It asks a `catch_up_app` and gives a reader what a store would: pages, known writers, the epoch. It cannot write:
positions are saved elsewhere (``reader_store=``), writers need the database.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

import attrs

from busrep import errors
from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.fields import INT64_MAX
from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError, MissingExtra, PositionTooOld, Unavailable
from busrep.settings import Settings
from busrep.stores.interface import KnownWriter, Newest
from busrep.streams import Registry, Stream

from ..snapshots.sources import check_agreement
from .client import HttpClient, HttpOptions, Misfit, Refusal, unpacked
from .pages import PART_PATH, SNAPSHOTS_PATH, STATE_PATH, UPDATES_PATH, CatchUpState, is_epoch, read_page, read_state

try:
    import httpx
except ImportError:
    raise MissingExtra("http", "catch-up over HTTP") from None

_HASH = re.compile(r"[0-9a-f]{64}")


class HttpSource:
    """A `FactSource` over HTTP: ``connect(store=HttpSource("https://facts.example/busrep", [orders]))``.

    A `SnapshotSource` as well.

    ``url``: of a `catch_up_app`, its prefix included; the secret stands in it or in ``options``. ``streams``: those
    that will be read. ``some``: the server need not serve all of ``streams``. Of the reference system it reads nothing:
    that is a `ReferenceSource`'s, which is told the writer of each address.

    Raises ConfigError for a URL or a secret of another form; MissingExtra.
    """

    def __init__(
        self,
        url: str,
        streams: Registry | Iterable[Stream[Any]],
        settings: Settings | None = None,
        options: HttpOptions | None = None,
        *,
        some: bool = False,
    ) -> None:
        self.streams = streams if isinstance(streams, Registry) else Registry(streams)
        self.settings, self._some = settings or Settings(), some
        client = partial(HttpClient, url, self.settings, options or HttpOptions())
        self.client = client(self.settings.fetches + 1)  # pages, and one question about writers
        # So that long downloads take no connection from pages.
        self._parts = client(self.settings.snapshots * self.settings.snapshot_connections)
        self.url, self.where = self.client.url, self.client.where

    def __repr__(self) -> str:
        return f"HttpSource({self.url!r})"

    # -- what a reader asks -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `AsyncStore`: make sure that the server answers and serves the streams. ConfigError, Unavailable."""
        if self.client.transport is not None:
            return
        try:
            self._parts.open(self.client.open())
            served = (await self.state()).streams
            missing = {stream.name for stream in self.streams if not stream.resettable} - set(served)
            if missing and not self._some:
                raise ConfigError(
                    f"{self.where} does not serve {', '.join(sorted(missing))}: pass them to its catch_up_app()"
                )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `AsyncStore`."""
        await self.client.close()
        await self._parts.close()

    async def epoch(self) -> str:
        """See `AsyncStore`."""
        return (await self.state()).epoch

    async def sequence(self, stream: str, epoch: str | None = None) -> int | None:
        """See `AsyncStore`: as the server's store knows it."""
        self._check(stream)
        state = await self.state(sequence=stream)
        return state.sequence if epoch in (None, state.epoch) else None

    async def known(self, epoch: str | None = None) -> list[KnownWriter]:
        """See `AsyncStore`: the writers of the streams that the server serves."""
        state = await self.state()
        if epoch not in (None, state.epoch):
            raise Unavailable(self.where, "it was restored, or servers behind this address are not of one database")
        return list(state.writers)

    async def newest(self, stream: str) -> Newest | None:
        """See `AsyncStore`: as the server's store knows it; None of an older server."""
        self._check(stream)
        state = await self.state(newest=stream)
        return None if state.newest is None else Newest(state.epoch, state.newest)

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """See `AsyncStore`: what the page proves is what the server's store has proven (9.9)."""
        self._check(question.stream)
        params: dict[str, str | int] = {
            "instance_name": question.writer,
            "from_token": question.after,
            "upto_token": question.upto,
            "limit": question.limit,
        }
        path = UPDATES_PATH + segment(question.stream)
        return await self.client.ask(
            path, params, partial(read_page, asked=question), lambda refusal: self._check_too_old(refusal, question)
        )

    # -- snapshots --------------------------------------------------------------------------------------------

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """See `SnapshotSource`: what the server agrees on with its store, for all readers at about this time."""
        self._check(stream)
        path, params = SNAPSHOTS_PATH + segment(stream), {"part_rows": part_rows}
        explain = partial(self._explain_snapshots, stream)

        def read(body: bytes) -> Agreement:
            agreement = Agreement.from_json(body)
            check_agreement(agreement, stream)
            return agreement

        content = b"" if again is None else again.to_json()
        agreement = await self.client.ask(path, params, read, explain, content)
        return attrs.evolve(agreement, source=self.url, id=agreement.digest)

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`: as it comes; a text of another hash than the server has announced ends with Unavailable
        instead of its end."""
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()  # what is loaded anyway: not more than ``max_bytes``
        download = self._download(agreement, number, pieces.put_nowait)
        loading = asyncio.create_task(download, name="busrep-http-part")
        loading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await loading
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _download(self, agreement: Agreement, number: int, give: Callable[[bytes], None]) -> None:
        """A part, piece by piece. A download that was cut is begun anew, and what has come of it is left out."""
        size, found, announced = 0, hashlib.sha256(), ""

        async def use(response: httpx.Response) -> None:
            nonlocal size, announced
            if response.status_code != 200:
                await self._parts.refuse(response, partial(self._explain_snapshots, agreement.stream))
            digest = response.headers.get("busrep-sha256", "")
            if not _HASH.fullmatch(digest):
                raise Misfit("it names no SHA-256: does a proxy drop headers?")
            if announced not in ("", digest):
                raise Misfit(f"the server has another text for part {number} by now")
            announced, at = digest, 0
            async for piece in unpacked(response):
                new = piece[max(0, size - at) :]
                at += len(piece)
                if at > (most := self._parts.max_bytes):  # as it will be the next time: nothing to be tried again
                    raise ConfigError(
                        f"a part of the snapshot is longer than {most} bytes: raise max_bytes= of HttpSource, or "
                        "lower Settings.snapshot_part_rows before a snapshot is agreed on"
                    )
                size += len(new)
                found.update(new)
                if new:
                    give(new)
            if found.hexdigest() != announced:
                raise Misfit(f"part {number} does not have the SHA-256 that was announced: it was changed on its way")

        await self._parts.exchange(use, f"{PART_PATH}{number}", content=agreement.to_json())

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`: the server holds nothing for one reader."""

    def _check(self, stream: str) -> None:
        if self.streams[stream].resettable:
            raise ConfigError(f"stream {stream!r} is resettable: it lives in memory, not in the store")

    async def state(self, **wanted: str | None) -> CatchUpState:
        """What the server tells of its log; ``wanted``: the stream that a further question is of. Raises Unavailable,
        ConfigError."""
        params: dict[str, str | int] = {name: stream for name, stream in wanted.items() if stream is not None}
        return await self.client.ask(STATE_PATH, params, read_state)

    # -- what refusals mean -----------------------------------------------------------------------------------

    def _explain_snapshots(self, stream: str, refusal: Refusal) -> None:
        match refusal.said.get("code"):
            case "snapshot_gone":
                raise errors.SnapshotGone(stream, f"{self.where} says {refusal.words}")
            case "no_snapshots":
                raise errors.NoSnapshots(self.where)
            case "snapshot_busy" if type(limit := refusal.said.get("limit")) is int:
                raise errors.SnapshotBusy(self.where, limit)

    def _check_too_old(self, refusal: Refusal, asked: FetchUpdates) -> None:
        """What was asked for is deleted, says the server: raise that, unless it cannot be."""
        if refusal.status != 410:
            return
        said = refusal.said
        floor, epoch = said.get("floor"), said.get("epoch")
        if [said.get(name) for name in ("stream", "writer", "position")] != [asked.stream, asked.writer, asked.after]:
            raise self.client.distrust(f"{refusal} to another question")
        if type(floor) is not int or not asked.after < floor <= INT64_MAX or not is_epoch(epoch):
            raise self.client.distrust(f"{refusal} without an epoch and a floor above {asked.after}")
        raise PositionTooOld(asked.stream, asked.writer, asked.after, floor, epoch)


def segment(stream: str) -> str:
    """A stream's name as a part of a path."""
    # Names of dots alone would be taken for steps up the path.
    return quote(stream, safe="") if stream.strip(".") else stream.replace(".", "%2E")
