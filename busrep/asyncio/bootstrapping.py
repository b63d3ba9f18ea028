"""Snapshots that a reader takes: for which streams, when, and from where. One `Run` a stream does the work.

A stream with a function of ``bus.snapshot`` is bootstrapped when its reader is new, too far behind or below the floor,
when the log is another one, when an earlier bootstrap was not brought to its end, and when somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from busrep.core.bootstrap import BootstrapState, unfinished
from busrep.core.snapshots import Agreement, BootstrapProgress, SnapshotSource
from busrep.errors import BusrepError, ConfigError, NoSnapshots, SnapshotGone, Unavailable
from busrep.settings import Settings
from busrep.stores.interface import FactSource, KnownWriter, ReaderPositions, ReaderState, provides

from ..runtime.tasks import stop
from ..snapshots.parts import Applier
from .bootstrap_run import ASKED_FOR, Run

if TYPE_CHECKING:
    from .reading import Reading

log = logging.getLogger("busrep.reader")


class Bootstrapping:
    """The bootstraps of one reading process.

    ``fresh_ones``: a reader without saved positions takes a snapshot, for nobody said where it should start.
    ``saving``: held while saved positions change.
    """

    def __init__(
        self,
        reading: Reading,
        settings: Settings,
        *,
        store: FactSource | None,
        reader_store: ReaderPositions | None,
        reader: str | None,
        source: SnapshotSource | None,
        fresh_ones: bool,
        saving: asyncio.Lock,
    ) -> None:
        self.reading, self.settings, self.saving = reading, settings, saving
        self.store, self.reader_store, self.reader = store, reader_store, reader
        self._given, self._fresh_ones = source, fresh_ones
        self._opened: asyncio.Task[None] | None = None
        self._runs: dict[str, Run] = {}
        self._appliers: dict[str, Applier] = {}
        self._due: dict[str, str] = {}  # streams that would begin with a snapshot, if it was known how to apply it
        self._waiting: dict[str, BootstrapProgress] = {}  # unfinished ones of which it is not known
        self._twins: dict[str, None] = {}  # streams that another process loads, as long as this one does not join in
        self.known: dict[str, str] = {}  # of which bootstrap positions in memory are, by its id
        self._finishing: dict[asyncio.Task[None], None] = {}
        self.stopped: dict[str, BusrepError] = {}
        self._given_up: dict[str, NoSnapshots] = {}  # streams that are fetched page by page
        self.closed = False

    # -- the source -------------------------------------------------------------------------------------------

    @property
    def source(self) -> SnapshotSource:
        """Where snapshots come from."""
        source: Any = self._given if self._given is not None else self.store
        if not provides(source, SnapshotSource):
            raise NoSnapshots(repr(source))
        return source

    async def open_source(self) -> None:
        """Connect it, once. The store is open already."""
        opened_by_bus: tuple[object, ...] = (self.store, self.reader_store)
        if self._given is None or self._given in opened_by_bus:
            return
        if self._opened is None or (self._opened.done() and (self._opened.cancelled() or self._opened.exception())):
            self._opened = asyncio.create_task(self._given.open(), name="busrep-snapshot-source")
        longest = self.settings.fetch_timeout
        try:
            async with asyncio.timeout(longest):
                await asyncio.shield(self._opened)  # that goes on, for who asks next
        except TimeoutError:
            raise Unavailable("the snapshot source", f"it could not be opened within {longest:g} s") from None

    # -- when -------------------------------------------------------------------------------------------------

    def register(self, applier: Applier) -> None:
        """Know how to apply snapshots of a stream from now on. Raises ConfigError."""
        name = applier.stream.name
        if applier.stream.resettable:
            raise ConfigError(f"stream {name!r} is kept in memory: there is nothing to take a snapshot of")
        if name in self.reading.unsaved:
            raise ConfigError(f"stream {name!r} is of invalidations: caches begin empty, and need no snapshot")
        if name in self._appliers:
            raise ConfigError(f"stream {name!r} has a function for its snapshots already")
        self.source  # noqa: B018 - says so now if there is none
        self._appliers[name] = applier
        if self._waiting.pop(name, None) is not None:  # as it is by now: another process may have gone on with it
            self.reading.spawn(self._look_now(), "twins")
        elif (reason := self._due.pop(name, None)) is not None:
            self.begin(name, reason)

    async def saved(self, name: str) -> BootstrapProgress | None:
        """What is saved of the last bootstrap of a stream. Raises Unavailable."""
        if self.reader is None or self.reader_store is None:
            return None
        for saved in await self.reader_store.bootstraps(self.reader):
            if saved.agreement.stream == name:
                return saved
        return None

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
            self._hold(name, known)
            self._go_on(name, saved)
            return True
        if reason is not None and positions is not None and name in self._appliers:
            reason = None  # another process under this name has begun in this log already
        if reason is None and positions is None and self._fresh_ones:
            reason = "no saved positions"
        if reason is None and positions is not None:
            lag = sum(max(0, one.position - positions.get((name, one.writer), 0)) for one in known)
            if lag > self.settings.bootstrap_lag:
                reason = f"{lag} IDs behind, more than bootstrap_lag"
        finishing = saved is not None and saved.state == BootstrapState.DRAINING.value
        if name not in self._appliers:
            if reason is not None:
                self._due[name] = reason
            return False
        if reason is None and not finishing:
            return False
        self._hold(name, known)
        run = self._run(name)
        if saved is not None:
            # One that is over counts towards the alarm; where nobody has said that it is, it is found out.
            run.restore(saved)
        if reason is not None:
            run.machine.changes.clear()
            self.begin(name, reason, new_log=new_log)
        run.advance()
        return True

    # -- other processes under this reader's name -------------------------------------------------------------

    def loaded(self, state: ReaderState, *names: str) -> None:
        """Positions in memory of these streams are as saved, and as of the bootstrap that is saved with them."""
        self.known.update((name, state.bootstraps.get(name, "")) for name in names)

    async def look_at(self, state: ReaderState) -> set[str]:
        """See what they have begun or brought to an end; give the streams of which positions in memory are void.

        Of these nothing may be registered, saved, or taken from ``state``. While ``saving`` is held, as it was since
        ``state`` was read.
        """
        core = self.reading.core
        begun = [name for name, how in core.followed.items() if how.durable and name in state.loading]
        for name in [name for name in begun if not self.holds(name)]:
            log.warning("another process under the name %r loads a snapshot of stream %s", self.reader, name)
            self._hold(name, ())
            self._twins[name] = None
        if state.epoch in (None, core.epoch):
            for name in [name for name in self._twins if name not in state.loading]:
                self._follow(name, state)  # it is over, and this process has no part in it
            known = {name: state.bootstraps.get(name, "") for name in self.known if not self.holds(name)}
            passed = {name for name, id in known.items() if id != self.known[name]}
            for name in passed:
                log.warning("another process under the name %r has loaded a snapshot of stream %s", self.reader, name)
                self._hold(name, ())
                self._follow(name, state)
        else:
            passed = set()
        await self._join_in()
        return passed | set(core.bootstrapping)

    def _follow(self, name: str, state: ReaderState) -> None:
        """Go on where another process is, behind a snapshot that it applied: whatever was handled before is void."""
        self._twins.pop(name, None)
        self._waiting.pop(name, None)
        self.loaded(state, name)
        positions = {writer: at for (stream, writer), at in state.positions.items() if stream == name}
        self.reading.saved_anew(name, positions)
        self.reading.bootstrapped(name, positions)

    async def _join_in(self) -> None:
        """Load with them, where it is known how to apply what is loaded: they may die."""
        for name in [name for name in self._twins if name not in self._waiting]:
            try:
                saved = await self.saved(name)
            except BusrepError as error:
                log.warning("bootstrap of %s: what is saved cannot be read yet: %s", name, error)
                continue  # the next beat does
            if name in self._twins and saved is not None and unfinished(saved):
                self._go_on(name, saved)

    async def _look_now(self) -> None:
        try:
            await self.look()
        except BusrepError as error:  # the next beat looks again
            log.warning("what is saved of bootstraps cannot be read yet: %s", error)

    def is_news(self, state: ReaderState, name: str) -> bool:
        """Whether ``state`` shows that another process has begun a bootstrap of a stream, over by now or not."""
        return name in state.loading or state.bootstraps.get(name, "") != self.known.get(name, "")

    async def look_again(self) -> None:
        """Once a beat: look for them, where that concerns anything. What is saved in between finds out by itself.
        Raises Unavailable."""
        if self._appliers or self._twins:
            await self.look()

    async def look(self) -> None:
        """Look for them. Raises Unavailable."""
        if self.reader is None or self.reader_store is None:
            return
        async with self.saving:
            state = await self.reader_store.load_reader(self.reader)
            if not self.closed:
                await self.look_at(state)

    def _go_on(self, name: str, saved: BootstrapProgress) -> None:
        """The positions saved with it are where the snapshot ends, of which the target has a part: a promise to
        pruning, no more."""
        if name not in self._appliers:
            self._waiting[name], self._twins[name] = saved, None
            log.error(
                "reader %r has an unfinished bootstrap of stream %s: nothing of it is handled before @bus.snapshot "
                "says how to apply the rest, or another process has applied it", self.reader, name,
            )  # fmt: skip
            return
        self._twins.pop(name, None)
        run = self._run(name)
        run.restore(saved)
        if saved.agreement.epoch != self.reading.core.epoch:
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
            saved = await self.saved(name)
            if saved is not None and (unfinished(saved) or saved.agreement.epoch == epoch):
                continue
            assert self.reader is not None and self.reader_store is not None  # noqa: S101, PT018
            nothing = Agreement(name, before, {}, {}, [])
            with contextlib.suppress(SnapshotGone):  # another process is in the new log already
                await self.reader_store.begin_bootstrap(self.reader, nothing, syncs=0, reason="the log is another one")

    def begin_due(self) -> None:
        """Begin those whose log was found to be another one, now that the new one is read."""
        for name in [name for name in self._due if name in self._appliers and name in self.reading.core.followed]:
            self.stopped.pop(name, None)
            self.begin(name, self._due.pop(name), new_log=True)

    def begin(self, name: str, reason: str, *, new_log: bool = False) -> bool:
        """Take a snapshot, unless one is being loaded. False: it is not known how to apply it."""
        if name not in self._appliers or name in self._given_up or self.closed or self.reading.failure is not None:
            return False
        self._hold(name, ())
        self._twins.pop(name, None)
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
            self._runs[name] = Run(self, self._appliers[name])
        return self._runs[name]

    def _hold(self, name: str, known: Sequence[KnownWriter]) -> None:
        """From now on lines of the stream are held, until the snapshot is applied."""
        core = self.reading.core
        if name not in core.followed:
            core.follow(self.reading.followed_as(name))
        for one in known:
            if (name, one.writer) not in core.progress:
                core.start_at(name, one.writer, 0)
        self.reading.let_go(name)
        core.bootstrap(name)
        for one in known:
            core.learned(name, one.writer, one.position)  # nobody may be there to announce it

    def holds(self, name: str) -> bool:
        """Whether nothing of a stream is delivered because its snapshot is not applied yet."""
        return name in self.reading.core.bootstrapping

    # -- what comes of it -------------------------------------------------------------------------------------

    def pumped(self) -> None:
        """Something was received or handled."""
        for run in list(self._runs.values()):
            run.look()

    def finished(self, run: Run) -> None:
        """A stream is online: say so where `busrep bootstrap --status` looks."""
        if self.reader is not None and not self.closed:
            machine = run.machine
            assert machine.agreement is not None and machine.id is not None  # noqa: S101, PT018 (it was applied)
            # As it is now: before the task runs, another one may have been asked for.
            finish = self._finish(run.name, machine.id, len(machine.agreement.parts), machine.rows, machine.bytes)
            task = asyncio.create_task(finish, name="busrep-bootstrap-online")
            self._finishing[task] = None
            task.add_done_callback(lambda done: self._finishing.pop(done, None))

    async def _finish(self, name: str, id: str, parts: int, rows: int, size: int) -> None:
        assert self.reader is not None  # noqa: S101
        assert self.reader_store is not None  # noqa: S101
        try:
            await self.reader_store.save_bootstrap(
                self.reader,
                name,
                id,
                parts=parts,
                applied=parts,
                rows=rows,
                bytes=size,
                state=BootstrapState.ONLINE.value,
            )
        except BusrepError as error:  # only for the eye: it is over for whoever starts again, as well
            log.info("bootstrap of %s: that it is over could not be saved: %s", name, error)

    def stop(self, name: str, error: BusrepError) -> None:
        """A bootstrap stops loudly; other streams flow."""
        if name not in self.stopped:
            self.reading.on_stop(error)
        self.stopped[name] = error
        self.reading.interrupt(name, error)

    def resume(self, name: str) -> None:
        """Go on with one that stopped, at the part that stopped it."""
        if self.stopped.pop(name, None) is not None:
            self._runs[name].resume()

    def is_worker(self, task: asyncio.Task[Any], stream: str | None = None) -> bool:
        """Whether a task is one that calls the application's function, of that stream or any."""
        runs = [run for name, run in self._runs.items() if stream in (None, name)]
        return any(task in run.tasks.values() for run in runs)

    # -- the end ----------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Reading has stopped for good: let go of the source now, for the bus may stay open for long."""
        task = asyncio.create_task(self._let_go(self.end()), name="busrep-bootstrap-leave")
        self._finishing[task] = None
        task.add_done_callback(lambda done: self._finishing.pop(done, None))

    async def _let_go(self, ending: Collection[asyncio.Task[None]]) -> None:
        if ending:
            await asyncio.wait(ending)
        for run in self._runs.values():
            await run.leave()

    def end(self) -> list[asyncio.Task[None]]:
        """Begin nothing more; return the tasks that are still to end."""
        self.closed = True
        return [task for run in self._runs.values() for task in run.end()]

    async def close(self, timeout: float) -> None:
        """Let go of the source, once all tasks have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for run in self._runs.values():
                    await run.leave()
                if self._finishing:
                    await asyncio.wait(self._finishing)
        await stop(self._finishing, timeout)
        if self._opened is not None and self._given is not None:
            await stop([self._opened], timeout)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._given.close()

    def statistics(self) -> dict[str, Any]:
        """Per stream, JSON-able."""
        now, core = asyncio.get_running_loop().time(), self.reading.core
        found: dict[str, Any] = {}
        for name, run in self._runs.items():
            if run.machine.state is not None:
                stopped = self.stopped.get(name)
                found[name] = {
                    **run.machine.statistics(now),
                    "stopped": None if stopped is None else str(stopped),
                    "buffer_bytes": core.buffer_bytes,
                    "buffer_bytes_peak": core.buffer_bytes_peak,
                }
        return found
