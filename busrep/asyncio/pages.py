"""Fetches the pages that the reader core asks for; and what follows when their rows are pruned."""

from __future__ import annotations

import asyncio
import logging

from busrep.core.catchup import FetchUpdates
from busrep.errors import BusrepError, PositionTooOld

from .bootstrapping import Bootstrapping
from .context import ReaderContext
from .saving import PositionSaver

log = logging.getLogger("busrep.reader")


class Pages:
    """Fetches for one reading process."""

    def __init__(self, context: ReaderContext, bootstrapping: Bootstrapping, saver: PositionSaver) -> None:
        self._context, self._core = context, context.core
        self._bootstrapping, self._saver = bootstrapping, saver

    async def fetch(self, asked: FetchUpdates) -> None:
        """Fetch a page, and hand it to the core."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._context.settings.fetch_timeout):
                page = await self._context.store.fetch(asked)
        except PositionTooOld as error:
            self._core.fetch_failed(asked, error, clock())
            if self._context.holds(error.stream):
                pass  # the answer to a question given up
            elif not self._begins_later(error) and not await self._saver.handled_by_peer(error):
                self._too_old(error)
        except (BusrepError, TimeoutError) as error:
            log.warning("fetching (%s, %s) from %d: %s", asked.stream, asked.writer, asked.after, error)
            self._core.fetch_failed(asked, error, clock())
        except Exception as error:  # a bug, in a store perhaps: loud, and tried again
            log.exception("fetching (%s, %s) from %d failed", asked.stream, asked.writer, asked.after)
            self._core.fetch_failed(asked, error, clock())
        else:
            self._core.receive_page(asked, page, clock())
        self._context.pump()

    def _begins_later(self, error: PositionTooOld) -> bool:
        """Whether this reader was to begin at the oldest row, and that is another one by now of those there were."""
        key = (error.stream, error.writer)
        later = self._context.oldest.begins_later(error, self._core.delivered(*key))
        if later:
            self._core.progress[key].go_on_from(error.floor)
        return later

    def _too_old(self, error: PositionTooOld) -> None:
        context, key = self._context, (error.stream, error.writer)
        if self._core.progress[key].position >= error.floor or context.holds(error.stream):
            return  # the answer to a question given up meanwhile
        if self._bootstrapping.begin(error.stream, str(error)):
            return
        log.error("%s", error)
        if context.options.on_too_old == "skip" or error.stream in context.unsaved:
            self._core.progress[key].skip(error.floor)
        else:
            context.stop(key, error)
