"""The name under which an asyncio process writes: claimed, kept, won back. `busrep.runtime.own_name` decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from busrep.caches.freshness import Own
from busrep.core.commands import Name, Server
from busrep.errors import BusrepError, Closed, Unavailable, WriterFenced

from ..runtime.config import WriterConfig
from ..runtime.own_name import Hint, NameWatch, claim_name, win_back
from ..runtime.tasks import heed_cancellation, log_failure
from .writing import Writing

if TYPE_CHECKING:
    from .bus_life import BusLife

log = logging.getLogger("busrep")


class OwnName:
    """The present `Writing` of a bus, in ``writing``: None for a process that does not write, and before `claim`.

    ``name``: under which this process writes, here or beside this bus.
    """

    def __init__(self, bus: BusLife) -> None:
        self.name = bus.writer
        self.writing: Writing | None = None
        self._bus, self._options, self._settings, self._store = bus, bus.options, bus.settings, bus.options.store
        self._winning: asyncio.Task[None] | None = None
        self.watch = NameWatch(self._settings, since=0.0)

    @property
    def lost(self) -> bool:
        """Whether the name is another process's for good. A name that may be won back is followed as the own one."""
        return self.writing is not None and self.writing.lost

    async def claim(self, writer: str) -> Writing:
        """Take the name, at the start. Raises what `AsyncStore.claim` raises."""
        writing = self.writing = await self._begin(writer)
        self.watch.since = asyncio.get_running_loop().time()
        if writing.claim is not None:  # where the facts of this process begin, however often its name is won back
            self._bus.reading.own.claimed(writing.epoch, writing.claim.starts)
        return writing

    async def _begin(self, writer: str, again: int | None = None, former: Writing | None = None) -> Writing:
        """Claim the name, and make what writes under it. See `claim_name`."""
        options = self._options
        config = WriterConfig(writer, options.name, options.streams, self._settings, self._store)
        claim, incarnation = await claim_name(config, again=again, former=former)
        wake = self._bus.publisher.wake
        writing = Writing(config, claim, incarnation, wake=wake, renew=self._renew, on_loss=self._lost)
        writing.on_invalidations = self._bus.caching.caches.committed
        return writing

    # -- winning it back --------------------------------------------------------------------------------------

    async def _renew(self, former: Writing) -> Writing:
        """What goes on in place of one that was fenced, if that was for its silence alone.

        Raises WriterFenced when another process has the name, ClaimBlocked, Unavailable, Closed.
        """
        if self.writing is former:
            tasks = self._bus.tasks
            if self._winning is None or self._winning.done():
                self._winning = asyncio.create_task(self._win_back(former), name="busrep-win-back")
                tasks[self._winning] = None
                self._winning.add_done_callback(lambda done: tasks.pop(done, None))
            # Not given up with the caller: a claim that is committed and not noted would pass for another process's.
            winning = self._winning
            try:
                await asyncio.shield(winning)
            except asyncio.CancelledError as error:
                winning.remove_done_callback(self._tell_not_won_back)  # once, however many leave
                winning.add_done_callback(self._tell_not_won_back)
                heed_cancellation(error)
                if tasks.closed:
                    raise Closed from None
                raise Unavailable(f"writer {former.name!r}", "the task that wins it back was cancelled") from None
        assert self.writing is not None  # noqa: S101 (there was one)
        if self.writing is former:
            raise former.fenced or WriterFenced(former.name, former.incarnation)
        return self.writing

    def _tell_not_won_back(self, winning: asyncio.Task[None]) -> None:
        """A done callback: who would be told has left, perhaps all of them. The next beat, or fact, tries again."""
        if not winning.cancelled() and isinstance(error := winning.exception(), BusrepError):
            log.warning("writer %s is not won back: %s", self._options.writer, error)
        else:
            log_failure(winning)

    async def _win_back(self, former: Writing) -> None:
        try:
            session = await win_back(former, former.outdone, partial(self._begin, former.name, former=former))
        except WriterFenced as error:
            former.lose(error)
            return
        self.writing, bus = session, self._bus
        bus.caching.caches.drop_all()  # what was in doubt is in the table; before this one is trusted
        bus.run_in_background(session.keep_settling, "settle")
        if bus.link.connected:
            session.core.connected(asyncio.get_running_loop().time())
        bus.publisher.wake()

    def _lost(self) -> None:
        """Another process has the name."""
        self._bus.reading.disown()
        if self.writing is not None and self.writing.fenced is not None:
            self._bus.reading.tell_failure(self.writing.fenced)

    # -- what is heard of it ----------------------------------------------------------------------------------

    def heard_name(self, command: Name, now: float) -> bool:
        """A NAME came. Returns whether it is the own one, of the present incarnation."""
        writing = self.writing
        if writing is None or command.instance != writing.name or command.incarnation is None:
            return False
        has_log = writing.others.has_log(command.incarnation)
        hint = self.watch.heard(writing, command.incarnation, now, has_log=has_log)
        if hint is Hint.ASK:
            self._ask(writing)
        elif hint is Hint.OUTDONE:
            writing.outdone = command.incarnation
            writing.fence(WriterFenced(writing.name, writing.incarnation))
        elif hint is Hint.LOST:
            writing.lose(WriterFenced(writing.name, writing.incarnation))
        return command.incarnation == writing.incarnation

    def heard_server(self, command: Server, now: float) -> None:
        """A SERVER came. An epoch that is not this one: either the database was restored, which takes the claim away,
        or another deployment uses the channel."""
        writing, epoch = self.writing, command.epoch
        if writing is None or epoch is None or epoch == writing.epoch:
            return
        if writing.claim is None or self._bus.reading.is_reported(epoch):
            return
        if self.watch.may_ask(writing, now) is Hint.ASK:
            self._ask(writing, epoch)

    def _ask(self, writing: Writing, epoch: str | None = None) -> None:
        """Ask the database whether the claim stands."""
        self._bus.tasks.spawn(partial(self._check_claim, writing, epoch), "claim", again=True)

    async def _check_claim(self, writing: Writing, epoch: str | None) -> None:
        try:
            async with asyncio.timeout(self._settings.heartbeat):
                stands = await writing.check_claim()
        except (BusrepError, TimeoutError) as error:
            log.warning("the claim of %s cannot be read yet: %s", writing.name, error)
        else:
            if stands and epoch is not None:
                self._bus.reading.report_deployment(epoch, writing.epoch)

    # -- what the reading half asks ---------------------------------------------------------------------------

    def positions(self) -> Mapping[str, int]:
        """What this process itself has published, by stream: it counts as handled when positions are saved."""
        return {} if self.writing is None or self._options.own else self.writing.core.positions()

    def written(self, stream: str) -> tuple[int, bool] | None:
        """See `WriterSession.written`."""
        return None if self.writing is None or self._options.own else self.writing.written(stream)

    def applied(self, stream: str) -> Own | None:
        """The own writer of a stream of invalidations, unless the name is another process's by now: then that one
        counts like any other."""
        writing = self.writing
        if writing is None or writing.fenced is not None or stream not in writing.commits:
            return None
        return Own(writing.name, writing.incarnation, writing.applied_as_of(stream))
