"""Catch-up from the reference system: each of its writers answers for its own rows, at its own address.

Such an answer names neither its writer nor its log, so this side has to know whose address it asks (9.25).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from busrep.core.catchup import FetchUpdates, UpdatesPage, nothing_of
from busrep.core.snapshots import Agreement
from busrep.errors import ConfigError, NoSnapshots
from busrep.settings import Settings
from busrep.stores.interface import KnownWriter
from busrep.streams import Registry, Stream

from .client import HttpClient, HttpOptions
from .pages import REFERENCE_PATH, read_reference_page
from .source import segment

log = logging.getLogger("busrep.reader")

# Rows that the reference system puts into a page, about: it ends a page with the row that makes so many. Some of its
# streams then add the rest of that row's fact, others do not.
PAGE_ROWS = 100


class ReferenceSource:
    """A `FactSource` that reads from the reference system: ``ReferenceSource({"master": url, ...}, [events])``.

    ``writers``: the address of each writer's process, under the name by which it calls itself on the channel. Rows of
    a writer are asked for at its own address alone; a writer that is not named here is refused with an error, and its
    (stream, writer) shows as stale. ``streams``: those that will be read, resettable ones too. ``log``: a name for the
    deployment's log. Readers begin anew when it changes: change it when the deployment was set up anew or restored.
    ``options``: for all addresses.

    It knows no writers and gives no snapshots. Raises ConfigError for an address of another form; MissingExtra.
    """

    foreign_writers = True
    serves_resettable = True

    def __init__(
        self,
        writers: Mapping[str, str],
        streams: Registry | Iterable[Stream[Any]],
        settings: Settings | None = None,
        options: HttpOptions | None = None,
        *,
        log: str = "",
    ) -> None:
        if isinstance(writers, str) or not writers:
            raise ConfigError("ReferenceSource needs the address of each writer: {writer: url, ...}")
        self.streams = streams if isinstance(streams, Registry) else Registry(streams)
        self._epoch = hashlib.blake2b(f"reference {log}".encode(), digest_size=16).hexdigest()
        settings = settings or Settings()
        self._writers = {
            writer: HttpClient(url, settings, options or HttpOptions(), settings.fetches)
            for writer, url in writers.items()
        }

    def __repr__(self) -> str:
        return f"ReferenceSource({ {writer: one.url for writer, one in self._writers.items()}!r})"

    async def open(self) -> None:
        """See `AsyncStore`. Nothing is asked: the reference system tells nothing about itself."""
        context = None
        try:
            for one in self._writers.values():
                context = one.open(context)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `AsyncStore`."""
        await asyncio.gather(*(one.close() for one in self._writers.values()))

    async def epoch(self) -> str:
        """See `AsyncStore`: made from ``log``, for the reference system names none."""
        return self._epoch

    async def sequence(self, stream: str, epoch: str | None = None) -> None:  # noqa: ARG002
        """See `AsyncStore`: not told."""
        self.streams[stream]

    async def known(self, epoch: str | None = None) -> list[KnownWriter]:  # noqa: ARG002
        """See `AsyncStore`: none. Where a writer is, is heard on the channel only."""
        return []

    async def newest(self, stream: str) -> None:
        """See `AsyncStore`: not told."""
        self.streams[stream]

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """See `AsyncStore`: the writer itself answers, which proves what it says (9.25). ConfigError for a writer
        without an address."""
        self.streams[question.stream]
        if question.after == question.upto:  # asks for the epoch
            return nothing_of(question, self._epoch)
        one = self._writers.get(question.writer)
        if one is None:
            raise ConfigError(
                f"no address is known of writer {question.writer!r}, rows of stream {question.stream!r} cannot be "
                f"fetched: name it in ReferenceSource({{{question.writer!r}: url, ...}})"
            )
        path = f"{REFERENCE_PATH}{segment(question.stream)}/{secrets.token_hex(8)}"
        params = {"instance_name": question.writer, "from_token": question.after, "upto_token": question.upto}
        page = await one.ask(path, params, partial(read_reference_page, asked=question, epoch=self._epoch))
        # It may be the beginning of its only fact: asked again it would be the same, and behind it nothing of the fact
        # comes. With more rows than a page has it was completed.
        if page.limited and 0 < len(page.tokens) <= PAGE_ROWS and page.tokens[0] == page.upto:
            log.warning(
                "(%s, %s): %d rows of %d fill a page of %s: if the fact has more, the others may have been missed",
                page.stream, page.writer, len(page.tokens), page.upto, one.where,
            )  # fmt: skip
        return page

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> NoReturn:  # noqa: ARG002
        """See `SnapshotSource`. Refused: NoSnapshots, so that a bootstrap reads page by page."""
        raise NoSnapshots(f"catch-up from {', '.join(sorted(self._writers))}")

    async def load(self, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:  # noqa: ARG002
        """See `SnapshotSource`: nothing is agreed on."""
        raise NoSnapshots(repr(self))
        yield b""  # which makes it a generator

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`: there is none."""
