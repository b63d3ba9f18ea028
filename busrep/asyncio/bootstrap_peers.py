"""Bootstraps that other processes under this reader's name have begun, or brought to an end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from busrep.core.snapshots import BootstrapProgress
from busrep.core.states import unfinished
from busrep.errors import BusrepError
from busrep.stores.interface import KnownWriter, ReaderState

from .context import ReaderContext

log = logging.getLogger("busrep.reader")


class PeerBootstraps:
    """What one reading process makes of its peers' bootstraps.

    ``go_on(stream, saved)`` joins in one, where it is known how to apply it. ``loading``: streams that a peer loads, as
    long as this process does not join in; ``unknown``: those whose snapshot it is not known how to apply.
    """

    def __init__(self, context: ReaderContext, go_on: Callable[[str, BootstrapProgress], None]) -> None:
        self._context, self._go_on = context, go_on
        self.loading: dict[str, None] = {}
        self.unknown: dict[str, None] = {}

    async def saved(self, stream: str) -> BootstrapProgress | None:
        """What is saved of the last bootstrap of a stream. Raises Unavailable."""
        context = self._context
        for saved in await context.reader_store.bootstraps(context.reader) if context.reader else ():
            if saved.agreement.stream == stream:
                return saved
        return None

    def hold(self, stream: str, known: Sequence[KnownWriter] = ()) -> None:
        """From now on lines of the stream are held, until the snapshot is applied. ``known``: its writers, for nobody
        may be there to announce them."""
        core = self._context.core
        if stream not in core.followed:
            core.follow(self._context.followed_as(stream))
        for one in known:
            if (stream, one.writer) not in core.progress:
                core.start_at(stream, one.writer, 0)
        self._context.let_go(stream)
        core.bootstrap(stream)
        for one in known:
            core.learned(stream, one.writer, one.position)

    async def look_at(self, state: ReaderState) -> set[str]:
        """See what peers have begun or brought to an end; give the streams of which positions in memory are void.

        Of these nothing may be registered, saved, or taken from ``state``. While ``saving`` is held, as it was since
        ``state`` was read.
        """
        context, core = self._context, self._context.core
        begun = [name for name, how in core.followed.items() if how.durable and name in state.loading]
        for name in [name for name in begun if not context.holds(name)]:
            log.warning("another process under the name %r loads a snapshot of stream %s", context.reader, name)
            self.hold(name)
            self.loading[name] = None
        passed: set[str] = set()
        if state.epoch in (None, core.epoch):
            for name in [name for name in self.loading if name not in state.loading]:
                self._follow(name, state)  # it is over, and this process has no part in it
            known = [name for name in context.saved.bootstraps if not context.holds(name)]
            passed = {name for name in known if context.saved.is_news(state, name)}
            for name in passed:
                log.warning(
                    "another process under the name %r has loaded a snapshot of stream %s", context.reader, name
                )
                self.hold(name)
                self._follow(name, state)
        await self._join_in()
        return passed | set(core.bootstrapping)

    def _follow(self, stream: str, state: ReaderState) -> None:
        """Go on where another process is, behind a snapshot that it applied: whatever was handled before is void."""
        self.loading.pop(stream, None)
        self.unknown.pop(stream, None)
        self._context.bootstrapped(stream, self._context.saved.behind_snapshot(state, stream))

    async def _join_in(self) -> None:
        """Load with them, where it is known how to apply what is loaded: they may die."""
        for name in [name for name in self.loading if name not in self.unknown]:
            try:
                saved = await self.saved(name)
            except BusrepError as error:
                log.warning("bootstrap of %s: what is saved cannot be read yet: %s", name, error)
                continue  # the next beat does
            if name in self.loading and saved is not None and unfinished(saved):
                self._go_on(name, saved)

    async def look(self) -> None:
        """Look for them. Raises Unavailable."""
        context = self._context
        if context.reader:
            async with context.saving:
                state = await context.reader_store.load_reader(context.reader)
                if not context.ended:
                    await self.look_at(state)

    async def look_now(self) -> None:
        """Look for them; else the next beat does."""
        try:
            await self.look()
        except BusrepError as error:
            log.warning("what is saved of bootstraps cannot be read yet: %s", error)
