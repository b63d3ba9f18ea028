"""One stream's bootstrap at work: does what its machine (core/bootstrap.py) asks for, each piece of work in a task.

What goes wrong with a piece of work is told to the machine, which knows what comes next. Parts are applied by
bootstrap_parts.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from busrep.core.bootstrap import Bootstrap
from busrep.core.bootstrap_work import Agree, Apply, Begin, Drain, Leave, Load, Work
from busrep.core.snapshots import Agreement, BootstrapProgress
from busrep.core.states import BootstrapState, unfinished
from busrep.errors import BusrepError, Closed, ConfigError, NoSnapshots, Unavailable

from ..runtime.tasks import being_cancelled, log_failure
from ..snapshots.parts import Applier
from .bootstrap_parts import Applying, fetch_instead
from .context import ReaderContext

log = logging.getLogger("busrep.reader")

# The reason of a bootstrap that the application asked for.
ASKED_FOR = "asked for"


class Run:
    """The bootstraps of one stream, one after the other."""

    def __init__(self, context: ReaderContext, applier: Applier) -> None:
        self.context, self._source = context, context.bootstrapping.source
        self.name: str = applier.stream.name
        self.machine: Bootstrap = Bootstrap(self.name, settings=context.settings)
        self.turn = asyncio.Event()  # set whenever something was handled
        self.tasks: dict[Work, asyncio.Task[None]] = {}
        self._ending: dict[asyncio.Task[None], None] = {}  # of works that are not wanted any more, and of Leave
        self._online: asyncio.Future[None] | None = None  # what is waited for until the stream is online
        self._timer: asyncio.TimerHandle | None = None
        self._alarmed = False
        self._drain_begun = False
        self._applying = Applying(context, self, applier)
        self.restored = False  # others may be at it, or have brought it to its end
        self.ours: str | None = None  # the id of the bootstrap that this process has begun, or gone on with
        self.new_log = False  # it was asked for because the log is another one: so may another process have done
        self._before: str | None = None  # the id of the one that was over before
        self._looked = False  # for that
        self._partly = False  # the target may have a part of a snapshot

    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    # -- the machine ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Start what the machine wants done, and end what it does not want any more."""
        if self.context.ended:
            return
        machine, now = self.machine, self.now()
        wanted = machine.work(now)
        for given in [given for given in self.tasks if given not in machine.under_way and not isinstance(given, Apply)]:
            task = self.tasks.pop(given)
            if task is not asyncio.current_task():
                task.cancel()
                self._ending[task] = None
        for work in wanted:
            doing = self._do(work, list(self._ending))
            task = asyncio.create_task(doing, name=f"busrep-bootstrap-{type(work).__name__.lower()}")
            task.add_done_callback(partial(self._ended, work))
            if isinstance(work, Leave):
                self._ending[task] = None
            else:
                self.tasks[work] = task
        for old, new in machine.changes:
            self._changed(old, new)
        machine.changes.clear()
        if self._timer is not None:
            self._timer.cancel()
        due = machine.next_retry(now)
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self.advance)

    def _ended(self, work: Work, task: asyncio.Task[None]) -> None:
        """A done callback: `_do` sees to all that becomes of a task, unless it is cancelled before its first step."""
        log_failure(task)
        self._ending.pop(task, None)
        if self.tasks.get(work) is task and not self.context.ended:
            del self.tasks[work]
            self._was_cancelled(work)
            self.advance()

    def _was_cancelled(self, work: Work) -> None:
        log.warning("bootstrap of %s: %s was cancelled: it is tried again", self.name, type(work).__name__.lower())
        self.machine.failed(work, Unavailable("the snapshot source", "it was cancelled"), self.now())

    def _changed(self, old: BootstrapState | None, new: BootstrapState) -> None:
        machine = self.machine
        why = f": {machine.reason}" if new is BootstrapState.REQUESTED and machine.retry.error is None else ""
        if new is BootstrapState.REQUESTED and machine.retry.error is not None:
            why = f" after {machine.retry.error}; {machine.parts.applied} parts are applied"
        elif machine.agreement is not None:
            parts, total = machine.parts, len(machine.agreement.parts)
            why = f" ({parts.applied} of {total} parts applied, {parts.rows} rows)"
        log.info("bootstrap of %s: %s -> %s%s", self.name, "none" if old is None else old.value, new.value, why)
        if new is not BootstrapState.DRAINING:
            self._drain_begun = False
        if new is BootstrapState.ONLINE and self._online is not None and not self._online.done():
            self._online.set_result(None)

    async def _do(self, work: Work, before: Sequence[asyncio.Task[None]]) -> None:
        machine = self.machine
        try:
            # What a source holds is left when nothing of it is read any more, and before anything else is asked of it.
            if before and not isinstance(work, Apply):
                await asyncio.wait(before)
            if isinstance(work, Leave):
                await self._source.leave(work.agreement)
            elif isinstance(work, Agree):
                await self._agree(work)
            elif isinstance(work, Begin):
                await self._begin(work)
            elif isinstance(work, Load):
                machine.loaded(work, await self._source.load(work.agreement, work.number), self.now())
            elif isinstance(work, Apply):
                await self._applying.apply(work)
            else:
                await self._drain(work)
        except ConfigError as error:  # it cannot work at all, until somebody has mended it
            machine.failed(work, error, self.now())
            machine.failed(None, error, self.now())  # nothing stays held there meanwhile
            machine.stopped_by = error
            self.stop(error)
        except BusrepError as error:
            log.warning("bootstrap of %s: %s", self.name, error)
            machine.failed(work, error, self.now())
        except asyncio.CancelledError:
            if being_cancelled() and (self.context.ended or work not in machine.under_way):  # it is not wanted any more
                raise
            self._was_cancelled(work)
        except (KeyboardInterrupt, SystemExit):  # they end the event loop
            raise
        except BaseException as error:  # a bug, in a source perhaps: loud, and tried again
            log.exception("bootstrap of %s failed", self.name)
            machine.failed(work, error, self.now())
        finally:
            self.tasks.pop(work, None)
        self.advance()
        self.context.pump()

    # -- agreeing ---------------------------------------------------------------------------------------------

    async def _agree(self, work: Agree) -> None:
        if await self._follow_peer():
            return
        try:
            found = await self._source.agree(self.name, again=work.again)
        except NoSnapshots as error:
            if not await self._fetch_instead(error):
                raise
            return
        self.machine.agreed(work, found, self.now())

    async def _fetch_instead(self, error: NoSnapshots) -> bool:
        """Whether catch-up takes the snapshot's place: it brings the same rows to a target that is as this reader left
        it, and to no other."""
        if self._partly or self.new_log or self.machine.reason == ASKED_FOR:
            return False
        if not await fetch_instead(self.context, self.name, error):
            return False
        self.machine.stopped_by = error
        self.context.bootstrapping.give_up(self.name, error)
        self.refuse(error)
        return True

    async def _begin(self, work: Begin) -> None:
        context, id = self.context, ""
        self._partly = True
        if context.reader:
            async with context.saving:
                if await self._follow_peer():
                    return
                context.saved.bootstraps[self.name] = id = await context.reader_store.begin_bootstrap(
                    context.reader, work.agreement, syncs=work.syncs, reason=work.reason
                )
                context.saved.replace_stream(self.name, work.agreement.positions)
        self.ours, self.restored = id, False
        self.machine.begun(work, self.now(), id)
        if self.machine.full_syncs.alarm(self.now()) and not self._alarmed:
            log.error(
                "bootstrap of %s: %d full syncs within an hour: this reader does not keep up, or its rows are pruned "
                "sooner than it can load a snapshot", self.name, self.machine.full_syncs.count(self.now()),
            )  # fmt: skip
        self._alarmed = self.machine.full_syncs.alarm(self.now())

    async def _follow_peer(self) -> bool:
        """Whether another process under this reader's name has begun one, or is over it: then that is gone on with."""
        saved = await self.context.saved_bootstrap(self.name)
        if saved is None or saved.agreement.epoch != self.context.core.epoch:
            return False
        if not self._looked:
            self._looked = True
            if not unfinished(saved) and not self.new_log:
                self._before = saved.id  # over before this one was asked for
        if saved.id in (self.ours, self._before):
            return False
        self.restore(saved)
        return True

    def request(self, reason: str, *, new_log: bool = False) -> None:
        """Take a snapshot, unless one is being loaded. ``new_log``: an agreement of the log before is void."""
        machine = self.machine
        begun = machine.request(reason, self.now())
        if new_log and not begun:
            machine.gone(reason, self.now())
            machine.resume(self.now())
        if begun or new_log:
            self._looked, self.new_log = False, new_log
        self.advance()

    def restore(self, saved: BootstrapProgress) -> None:
        """Go on with what is saved."""
        if unfinished(saved):
            log.info("bootstrap of %s: goes on with what is saved, %d parts", self.name, saved.parts)
        self.ours, self.restored, self._partly = saved.id, True, unfinished(saved)
        self.machine.restore(saved, self.now())

    def stop(self, error: BusrepError) -> None:
        """Do nothing more until ``resume``, and tell whoever waits."""
        if isinstance(error, ConfigError):
            log.error("bootstrap of %s has stopped: %s", self.name, error)
        self.context.stop_bootstrap(self.name, error)
        self.refuse(error)

    def resume(self) -> None:
        """Go on behind what stopped it."""
        self.restored = True
        self.machine.resume(self.now())
        self.advance()

    # -- the end ----------------------------------------------------------------------------------------------

    async def _drain(self, work: Drain) -> None:
        """The snapshot is applied: what was held goes on behind it, and the rest is fetched."""
        while True:
            try:
                positions = await self._end_of(work.agreement)
                break
            except BusrepError as error:
                if work not in self.machine.under_way:
                    return
                log.warning("bootstrap of %s: saved positions cannot be read yet: %s", self.name, error)
                await asyncio.sleep(self.context.settings.retry_max)
        if work not in self.machine.under_way:
            return
        if positions is None:
            self.machine.gone("the positions that were saved with it are gone", self.now())
            return
        self._drain_begun = True
        self.context.bootstrapped(self.name, positions)

    async def _end_of(self, agreement: Agreement) -> Mapping[str, int] | None:
        """Where the snapshot ends; or where another process under this reader's name is by now."""
        context = self.context
        if not context.reader:
            return agreement.positions
        async with context.saving:
            state = await context.reader_store.load_reader(context.reader)
            if state.epoch not in (None, agreement.epoch):
                context.core.doubt(state.epoch)
                raise Unavailable("the store", f"positions of epoch {state.epoch}")
            if self.name not in state.streams:
                return None
            if self.name in state.loading:
                saved = await self.context.saved_bootstrap(self.name)
                if saved is not None and unfinished(saved):  # another process has begun anew
                    self.restore(saved)
                raise Unavailable("the store", "another process of this reader loads a snapshot")
            return context.saved.behind_snapshot(state, self.name)

    def look(self) -> None:
        """Something was received or handled: perhaps that was all there was."""
        self.turn.set()
        if self.machine.state is BootstrapState.DRAINING and self._drain_begun and self.context.core.drained(self.name):
            self._partly = False
            self.machine.drained(self.now())
            self.advance()
            self.context.bootstrapping.finished(self)

    async def online(self) -> None:
        """Wait until it is over. Raises HandlerFailed, ConfigError, Closed."""
        if (error := self.context.failure or self.context.stopped_bootstraps.get(self.name)) is not None:
            raise error.with_traceback(None)
        if self.machine.state is BootstrapState.ONLINE:
            return
        if self._online is None or self._online.done():
            self._online = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._online)

    def refuse(self, error: BusrepError) -> None:
        """Tell those who wait for its end that it does not come."""
        if self._online is not None and not self._online.done():
            self._online.set_exception(error)
            self._online.exception()  # seen, for all that waited may have left

    def end(self) -> list[asyncio.Task[None]]:
        """Begin nothing more, and cancel all but a function that is applying a part; return what is still to end."""
        if self._timer is not None:
            self._timer.cancel()
        self.refuse(self.context.failure or Closed())
        for work, task in self.tasks.items():
            if not (isinstance(work, Apply) and self._applying.busy):
                task.cancel()
        return [*self.tasks.values(), *self._ending]
