"""Snapshots that a reader takes: for which streams, when, and from where. One `Run` a stream does the work.

A stream with a function of ``bus.snapshot`` is bootstrapped when its reader is new, too far behind or below the floor,
when the log is another one, when an earlier bootstrap was not brought to its end, and when somebody asks. Other
processes under the reader's name, its peers, take part in a bootstrap that one of them has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from busrep.core.snapshots import Agreement, AppliedParts, BootstrapProgress
from busrep.core.states import BootstrapState, unfinished
from busrep.errors import BusrepError, ConfigError, NoSnapshots, SnapshotGone
from busrep.stores.interface import KnownWriter, ReaderState

from ..runtime.tasks import Tasks
from ..snapshots.parts import Applier
from .bootstrap_parts import SourceOnDemand
from .bootstrap_run import ASKED_FOR, Run
from .context import ReaderContext

log = logging.getLogger("busrep.reader")


class Bootstrapping:
    """The bootstraps of one reading process."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self._settings = context, context.settings
        self.source = SourceOnDemand(context)
        self._loading: dict[str, None] = {}  # streams that a peer loads, as long as this process does not join in
        self._unknown: dict[str, None] = {}  # streams whose snapshot it is not known how to apply
        self._runs: dict[str, Run] = {}
        self._appliers: dict[str, Applier] = {}
        self._due: dict[str, str] = {}  # streams that would begin with a snapshot, if it was known how to apply it
        self._finishing = Tasks(self._settings)
        self._given_up: dict[str, NoSnapshots] = {}  # streams that are fetched page by page

    # -- when -------------------------------------------------------------------------------------------------

    def register(self, applier: Applier) -> None:
        """Know how to apply snapshots of a stream from now on. Raises ConfigError."""
        name = applier.stream.name
        if applier.stream.resettable:
            raise ConfigError(f"stream {name!r} is kept in memory: there is nothing to take a snapshot of")
        if name in self._context.unsaved:
            raise ConfigError(f"stream {name!r} is of invalidations: caches begin empty, and need no snapshot")
        if name in self._appliers:
            raise ConfigError(f"stream {name!r} has a function for its snapshots already")
        self.source.check()
        self._appliers[name] = applier
        if name in self._unknown:  # as it is by now: another process may have gone on with it
            del self._unknown[name]
            self._context.spawn(self._look_now, "twins")
        elif (reason := self._due.pop(name, None)) is not None:
            self.begin(name, reason)

    def at_start(
        self,
        name: str,
        known: Sequence[KnownWriter],
        positions: Mapping[tuple[str, str], int] | None,
        saved: BootstrapProgress | None,
    ) -> bool:
        """Whether a stream begins with a snapshot, and not where ``positions`` (None: it was never read) say."""
        reason = self._due.pop(name, None)  # the log is another one
        new_log = reason is not None
        if saved is not None and unfinished(saved):
            self._context.hold(name, known)
            self._go_on(name, saved)
            return True
        if reason is not None and positions is not None and name in self._appliers:
            reason = None  # another process under this name has begun in this log already
        if reason is None and positions is None and self._context.options.start is None:
            reason = "no saved positions"
        if reason is None and positions is not None:
            lag = sum(max(0, one.position - positions.get((name, one.writer), 0)) for one in known)
            if lag > self._settings.bootstrap_lag:
                reason = f"{lag} IDs behind, more than bootstrap_lag"
        finishing = saved is not None and saved.state == BootstrapState.DRAINING.value
        if name not in self._appliers:
            if reason is not None:
                self._due[name] = reason
            return False
        if reason is None and not finishing:
            return False
        self._context.hold(name, known)
        run = self._run(name)
        if saved is not None:
            # One that is over counts towards the alarm; where nobody has said that it is, it is found out.
            run.restore(saved)
        if reason is not None:
            run.machine.changes.clear()
            self.begin(name, reason, new_log=new_log)
        run.advance()
        return True

    def _go_on(self, name: str, saved: BootstrapProgress) -> None:
        """The positions saved with it are where the snapshot ends, of which the target has a part: a promise to
        pruning, no more."""
        if name not in self._appliers:
            self._unknown[name] = self._loading[name] = None
            log.error(
                "reader %r has an unfinished bootstrap of stream %s: nothing of it is handled before @bus.snapshot "
                "says how to apply the rest, or another process has applied it", self._context.reader, name,
            )  # fmt: skip
            return
        self._loading.pop(name, None)
        run = self._run(name)
        run.restore(saved)
        if saved.agreement.epoch != self._context.core.epoch:
            run.request("the log is another one", new_log=True)
        run.advance()

    def log_changed(self, streams: Collection[str]) -> set[str]:
        """Positions in these streams are of another log; give those that begin with a snapshot in this one."""
        for name in streams:
            self._given_up.pop(name, None)
            self._due[name] = "the log is another one"
        return self._appliers.keys() & set(streams)

    async def make_void(self, names: Collection[str], before: str, epoch: str) -> None:
        """Save that these streams wait for a snapshot, before their positions of the log before are thrown out: killed
        in between, this reader could not know any more that its target is of that log. Raises Unavailable."""
        for name in names:
            saved = await self._context.saved_bootstrap(name)
            if saved is not None and (unfinished(saved) or saved.agreement.epoch == epoch):
                continue
            nothing = Agreement(name, before, {}, {}, [])
            with contextlib.suppress(SnapshotGone):  # another process is in the new log already
                await self._context.reader_store.begin_bootstrap(
                    self._context.reader, nothing, syncs=0, reason="the log is another one"
                )

    def begin_due(self) -> None:
        """Begin those whose log was found to be another one, now that the new one is read."""
        for name in [name for name in self._due if name in self._appliers and name in self._context.core.followed]:
            self._context.stopped_bootstraps.pop(name, None)
            self.begin(name, self._due.pop(name), new_log=True)

    def begin(self, name: str, reason: str, *, new_log: bool = False) -> bool:
        """Take a snapshot, unless one is being loaded. False: it is not known how to apply it."""
        if name not in self._appliers or name in self._given_up or self._context.ended:
            return False
        self._context.hold(name)
        self._loading.pop(name, None)
        self._run(name).request(reason, new_log=new_log)
        return True

    def give_up(self, name: str, error: NoSnapshots) -> None:
        """No snapshot of a stream is taken any more, for there is none; its rows are fetched."""
        self._given_up[name] = error
        self._runs.pop(name, None)

    async def bootstrap(self, name: str) -> None:
        """Take a snapshot now, or wait for the one that is being taken, until the stream is online again."""
        if name not in self._appliers:
            raise ConfigError(f"it is not known how to apply a snapshot of stream {name!r}: decorate with bus.snapshot")
        run = self._run(name)
        if (error := self._given_up.get(name)) is not None:
            raise error.with_traceback(None)
        self.begin(name, ASKED_FOR)
        await run.online()

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            self._runs[name] = Run(self._context, self._appliers[name])
        return self._runs[name]

    # -- peers ------------------------------------------------------------------------------------------------

    async def look_for_peers(self) -> None:
        """Once a beat: look for peers' bootstraps, where that concerns anything. What is saved in between finds out by
        itself. Raises Unavailable."""
        if self._appliers or self._loading:
            await self.look()

    async def look(self) -> None:
        """Look for peers' bootstraps. Raises Unavailable."""
        context = self._context
        if context.reader:
            async with context.saving:
                state = await context.reader_store.load_reader(context.reader)
                if not context.ended:
                    await self.look_at(state)

    async def _look_now(self) -> None:
        try:
            await self.look()
        except BusrepError as error:  # the next beat looks again
            log.warning("what is saved of bootstraps cannot be read yet: %s", error)

    async def look_at(self, state: ReaderState) -> set[str]:
        """See what peers have begun or brought to an end; give the streams of which positions in memory are void.

        Of these nothing may be registered, saved, or taken from ``state``. While ``saving`` is held, as it was since
        ``state`` was read.
        """
        context, core = self._context, self._context.core
        begun = [name for name, how in core.followed.items() if how.durable and name in state.loading]
        for name in [name for name in begun if not context.holds(name)]:
            log.warning("another process under the name %r loads a snapshot of stream %s", context.reader, name)
            context.hold(name)
            self._loading[name] = None
        passed: set[str] = set()
        if state.epoch in (None, core.epoch):
            for name in [name for name in self._loading if name not in state.loading]:
                self._follow(name, state)  # it is over, and this process has no part in it
            known = [name for name in context.saved.bootstraps if not context.holds(name)]
            passed = {name for name in known if context.saved.is_news(state, name)}
            for name in passed:
                log.warning(
                    "another process under the name %r has loaded a snapshot of stream %s", context.reader, name
                )
                context.hold(name)
                self._follow(name, state)
        await self._join_in()
        return passed | set(core.bootstrapping)

    def _follow(self, name: str, state: ReaderState) -> None:
        """Go on where a peer is, behind a snapshot that it applied: whatever was handled before is void."""
        self._loading.pop(name, None)
        self._unknown.pop(name, None)
        self._context.bootstrapped(name, self._context.saved.behind_snapshot(state, name))

    async def _join_in(self) -> None:
        """Load with them, where it is known how to apply what is loaded: they may die."""
        for name in [name for name in self._loading if name not in self._unknown]:
            try:
                saved = await self._context.saved_bootstrap(name)
            except BusrepError as error:
                log.warning("bootstrap of %s: what is saved cannot be read yet: %s", name, error)
                continue  # the next beat does
            if name in self._loading and saved is not None and unfinished(saved):
                self._go_on(name, saved)

    # -- what comes of it -------------------------------------------------------------------------------------

    def pumped(self) -> None:
        """Something was received or handled."""
        for run in list(self._runs.values()):
            run.look()

    def finished(self, run: Run) -> None:
        """A stream is online: say so where `busrep bootstrap --status` looks."""
        if self._context.reader and not self._context.ended:
            machine = run.machine
            assert machine.agreement is not None and machine.id is not None  # noqa: S101, PT018 (it was applied)
            # As it is now: before the task runs, another one may have been asked for.
            parts, done = len(machine.agreement.parts), machine.parts
            online = BootstrapState.ONLINE.value
            step = AppliedParts(parts=parts, applied=parts, rows=done.rows, bytes=done.bytes, state=online)
            work = partial(self._finish, run.name, machine.id, step)
            self._finishing.spawn(work, "bootstrap-online", again=True)

    async def _finish(self, name: str, id: str, step: AppliedParts) -> None:
        try:
            await self._context.reader_store.save_bootstrap(self._context.reader, name, id, step)
        except BusrepError as error:  # only for the eye: it is over for whoever starts again, as well
            log.info("bootstrap of %s: that it is over could not be saved: %s", name, error)

    def resume(self, name: str) -> None:
        """Go on with one that stopped, at the part that stopped it."""
        if self._context.stopped_bootstraps.pop(name, None) is not None:
            self._runs[name].resume()

    def is_worker(self, task: asyncio.Task[Any] | None, stream: str | None = None) -> bool:
        """Whether a task is one that calls the application's function, of that stream or any."""
        runs = [run for name, run in self._runs.items() if stream in (None, name)]
        return any(task in run.tasks.values() for run in runs)

    # -- the end ----------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Reading has stopped for good: let go of the source now, for the bus may stay open for long."""
        self._finishing.spawn(partial(self._let_go, self.end()), "bootstrap-leave", again=True)

    async def _let_go(self, ending: Collection[asyncio.Task[None]]) -> None:
        if ending:
            await asyncio.wait(ending)
        await self.source.leave_all()

    def end(self) -> list[asyncio.Task[None]]:
        """Begin nothing more; return the tasks that are still to end."""
        return [task for run in self._runs.values() for task in run.end()]

    async def close(self, timeout: float) -> None:
        """Let go of the source, once all tasks have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.source.leave_all()
                if self._finishing:
                    await asyncio.wait(self._finishing)
        await self._finishing.stop(timeout)
        await self.source.close(timeout)

    def statistics(self) -> dict[str, Any]:
        """Per stream, JSON-able."""
        now, core = asyncio.get_running_loop().time(), self._context.core
        found: dict[str, Any] = {}
        for name, run in self._runs.items():
            if run.machine.state is not None:
                stopped = self._context.stopped_bootstraps.get(name)
                found[name] = {
                    **run.machine.statistics(now),
                    "stopped": None if stopped is None else str(stopped),
                    "buffer_bytes": core.intake.buffer_bytes,
                    "buffer_bytes_peak": core.intake.buffer_bytes_peak,
                }
        return found
