"""Where a reader begins in each stream, and in a log that turns out to be another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from busrep.core.backoff import pause_after
from busrep.core.catchup import Key
from busrep.core.received import Followed
from busrep.core.snapshots import BootstrapProgress
from busrep.errors import BusrepError, EpochChanged, Unavailable
from busrep.options import Start
from busrep.stores.interface import KnownWriter, ReaderState, claims_of
from busrep.streams import Stream

from .context import ReaderContext

log = logging.getLogger("busrep.reader")


class Beginning:
    """Begins to follow streams. ``not_begun``: why a stream is not followed yet; that is tried again."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self._core, self._bootstrapping = context, context.core, context.bootstrapping
        default: Start = "earliest" if context.reader else "now"
        self._start = context.options.start if context.options.start is not None else default
        self.not_begun: dict[str, str] = {}

    async def begin(self, stream: Stream[Any]) -> None:
        """Follow a stream, as soon as its positions can be read."""
        context, failures = self._context, 0
        while not context.closed:
            try:
                await self._load(stream)
            except Unavailable as error:
                log.warning("cannot begin to follow %s yet: %s", stream.name, error)
                self.not_begun[stream.name] = str(error)
            except BusrepError as error:
                context.fail(error)
                return
            except Exception as error:  # an error that no store should let out must not end a reader for good
                log.exception("cannot begin to follow %s yet", stream.name)
                self.not_begun[stream.name] = f"{type(error).__name__}: {error}"
            else:
                self.not_begun.pop(stream.name, None)
                context.ask_for_positions()
                context.pump()
                return
            failures += 1
            await asyncio.sleep(pause_after(failures, context.settings))

    async def _load(self, stream: Stream[Any]) -> None:
        if not stream.resettable:
            async with self._context.saving:  # two streams that find a new epoch must not both throw out what was saved
                await self._load_durable(stream.name)
            return
        # The store keeps none of them; a source that asks the writer itself may.
        served = getattr(self._context.store, "serves_resettable", False)
        from_now, foreign = served and self._start == "now", stream.foreign_writers
        self._core.follow(
            Followed(stream.name, resettable=True, fetchable=served, from_now=from_now, foreign_writers=foreign)
        )
        for writer, position in self._given_starts(stream.name).items() if served else ():
            self._core.start_at(stream.name, writer, position)

    def _given_starts(self, stream: str) -> Mapping[str, int]:
        return {} if isinstance(self._start, str) else self._start.get(stream, {})

    async def _epoch(self) -> str:
        """The epoch of the log, which is the one that is read here. Raises Unavailable."""
        epoch = await self._context.store.epoch()
        if not self._core.begins_in(epoch):
            self._context.pump()  # a page tells which one it is
            raise Unavailable("the fact log", f"its epoch is {epoch}, and {self._core.epoch} is read here")
        return epoch

    async def _load_durable(self, name: str) -> None:
        context, core = self._context, self._core
        epoch = await self._epoch()
        everything = await context.store.known(epoch)
        core.admission.registered(claims_of(everything))
        known = {(name, writer.writer): writer for writer in everything if writer.stream == name}
        saves, state, snapshot = bool(context.reader) and name not in context.unsaved, ReaderState(None, {}), None
        if saves:
            state, snapshot = await self._saved_state(name, epoch, everything)
        positions = {key: position for key, position in state.positions.items() if key[0] == name}
        before = name in state.streams
        if self._bootstrapping.at_start(name, list(known.values()), positions if before else None, snapshot):
            return
        # One that joined after those that were saved: this reader owes its handler all of its rows.
        start = "now" if name in context.unsaved else self._start
        starts = {key: 0 if before else start_position(start, known[key]) for key in known if key not in positions}
        oldest = {key: known[key] for key, at in starts.items() if at == known[key].floor and not before}
        foreign = getattr(context.store, "foreign_writers", False)
        if foreign:  # such a source knows no writers: where they are is heard from them, or given
            starts |= {
                (name, writer): at for writer, at in self._given_starts(name).items() if (name, writer) not in positions
            }
        positions |= starts
        if saves:
            positions |= await self._register(name, positions, state, epoch, oldest)
            if not before:
                passed = starts if self._start == "now" else oldest
                tell_where_it_begins(context.reader, name, {key[1]: positions[key] for key in passed}, self._start)
        else:
            context.oldest.at |= {key: (writer.floor, writer.position) for key, writer in oldest.items()}
        if name not in context.unsaved:
            context.saved.at |= positions
        core.follow(context.followed_as(name, from_now=foreign and self._start == "now" and not before))
        for key, position in positions.items():
            # Where another process saved it, or one before: if a failover loses that, so it does all effects, and where
            # they began is not known. If rows from there are pruned the fetch says so.
            core.start_at(*key, position, began=starts.get(key, 0))
        self._learn(list(known.values()))

    async def _saved_state(
        self, name: str, epoch: str, known: Sequence[KnownWriter]
    ) -> tuple[ReaderState, BootstrapProgress | None]:
        """What is saved for a stream, of this log, and of its last bootstrap."""
        context = self._context
        snapshot = await context.saved_bootstrap(name)
        state = await context.reader_store.load_reader(context.reader)
        if state.epoch not in (None, epoch):
            changed = EpochChanged(state.epoch, epoch)
            if context.options.on_epoch_change == "stop":
                context.note(changed, *state.positions)  # of all streams: none of them is loaded
                raise changed
            if context.saved.at:  # a failover lost that this process has begun in this log: it begins again there
                context.another_log(epoch)
                raise Unavailable("the store", f"positions of epoch {state.epoch} are saved: all begin again first")
            log.warning("%s", changed)
            state = await self._begin_anew(epoch, known, name)
        return state, snapshot

    async def _register(
        self, name: str, positions: dict[Key, int], begun: ReaderState, epoch: str, oldest: Mapping[Key, KnownWriter]
    ) -> dict[Key, int]:
        """Register that the reader begins a stream there. Returns what is saved of these positions then.

        At once: who finds the stream registered, and a writer not, takes it for one that joined since.
        """
        context = self._context
        await context.register({(name, ""): 0} | positions, epoch, oldest)
        state = await context.reader_store.load_reader(context.reader)  # it may be another's, as in `register`
        if name in state.loading or state.bootstraps.get(name) != begun.bootstraps.get(name):
            raise Unavailable("the store", f"another process of reader {context.reader!r} begins a bootstrap of {name}")
        context.saved.loaded(state, name)
        return {key: state.positions[key] for key in positions.keys() & state.positions.keys()}

    async def _begin_anew(self, epoch: str, known: Sequence[KnownWriter], *names: str) -> ReaderState:
        """Replace what was saved in another log: these streams, and all that were read under this name, are due from
        the oldest rows of this one. Returns what is saved then."""
        store, reader, bootstrapping = self._context.reader_store, self._context.reader, self._bootstrapping
        before = await store.load_reader(reader)
        streams = {*names, *before.streams}
        others = bootstrapping.log_changed(streams)  # these begin where their snapshot ends
        await bootstrapping.make_void(others & before.streams, before.epoch or "", epoch)
        streams -= others
        floors = {(one.stream, one.writer): one.floor for one in known if one.stream in streams}
        anew = floors | {(stream, ""): 0 for stream in streams}
        await store.reset_reader(reader, anew, epoch, beside_log=self._context.beside_log)
        state = await store.load_reader(reader)
        if state.epoch != epoch and (streams or state.epoch is not None):
            # Restored once more, or this one was told by a replica that lags.
            raise Unavailable("the store", f"positions of epoch {state.epoch}")
        return state

    def _learn(self, known: Sequence[KnownWriter]) -> None:
        """What was proven before we listened: a dead writer's last rows, and, of the own name, a predecessor's."""
        for writer in known:
            key = (writer.stream, writer.writer)
            self._core.learned(*key, self._context.own.known(writer))
            if self._core.progress[key].position > writer.position:
                self._core.stepped_back[key] = None

    # -- another log ------------------------------------------------------------------------------------------

    async def change_epoch(self) -> None:
        """The fact log is another one: begin again, or stop, as the policy says."""
        context, core = self._context, self._core
        held, found = core.epoch or "", core.new_epoch or ""
        if context.options.on_epoch_change == "stop":
            context.fail(EpochChanged(held, found))
            return
        log.warning("%s: starting again from the oldest rows", EpochChanged(held, found))
        loop = asyncio.get_running_loop()
        try:
            current = await context.store.epoch()
            if current == found:
                await self._go_over(found)
            elif current == held:  # restored once more: positions that others have in that log must not be thrown out
                core.keep_epoch(loop.time())
            else:
                core.new_epoch = current
        except BusrepError as error:
            log.warning("cannot read the new log yet: %s", error)
            await asyncio.sleep(context.settings.retry_max)
        loop.call_soon(context.pump)

    async def _go_over(self, epoch: str) -> None:
        """Begin again in a log. Raises BusrepError."""
        context, core, bootstrapping = self._context, self._core, self._bootstrapping
        everything = await context.store.known(epoch)
        known = [one for one in everything if one.stream in core.followed]
        positions = {
            (one.stream, one.writer): one.position if one.stream in context.unsaved else one.floor for one in known
        }
        async with context.saving:
            state = None
            if context.reader:
                state = await self._begin_anew(epoch, everything, *(core.followed.keys() - context.unsaved))
                positions |= {key: at for key, at in state.positions.items() if key[0] in core.followed}
            else:
                bootstrapping.log_changed(core.followed)
            core.rebase(epoch, positions)
            core.admission.registered(claims_of(everything))
            context.saved.at = dict(positions)
            oldest = () if context.reader else known
            context.oldest.at = {(one.stream, one.writer): (one.floor, one.position) for one in oldest}
            context.bisecting.clear()
            for key in list(context.stopped):  # on a row, or a position, of the log before
                del context.stopped[key]
                core.progress[key].resume()
            bootstrapping.begin_due()
            if state is not None:
                context.saved.loaded(state, *(core.followed.keys() - core.bootstrapping))
                await bootstrapping.look_at(state)
        self._learn(known)
        context.ask_for_positions()


def start_position(start: Start, writer: KnownWriter) -> int:
    """Where a reader begins with this writer, unless a position is saved."""
    if start == "now":
        return writer.position
    if start == "earliest":
        return writer.floor
    return start.get(writer.stream, {}).get(writer.writer, writer.floor)


# How many writers the warning names.
MOST_NAMED = 10
NOT_REGISTERED = (
    "reader %r is not registered for stream %s. It begins behind the rows of %s%s. If it has read this stream before, "
    "a failover has lost its registration, and it misses rows: bootstrap it anew"
)


def tell_where_it_begins(reader: str, stream: str, starts: Mapping[str, int], start: Start) -> None:
    """Log which rows a durable reader does not get if it was not registered. It begins at ``starts``, by writer.

    A failover may have lost the registration (protocol.md, 9.23). Then the reader misses these rows, and only the log
    tells. With ``start="now"`` the reader was asked to skip rows.
    """
    behind = sorted((writer, position) for writer, position in starts.items() if position > 0)
    if behind:
        level = logging.INFO if start == "now" else logging.WARNING
        named = ", ".join(f"{writer} up to {position}" for writer, position in behind[:MOST_NAMED])
        more = f", and of {len(behind) - MOST_NAMED} more writers" if len(behind) > MOST_NAMED else ""
        log.log(level, NOT_REGISTERED, reader, stream, named, more)
