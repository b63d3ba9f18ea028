"""What a reader asks the table: the pages that its core wants, and how far the writers are that are not heard.

Such writers are followed through the table, finished when they are dead, and never believed blindly.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from functools import partial

from busrep.core.admission import Life
from busrep.core.announcements import turns_of
from busrep.core.catchup import FetchUpdates, Key, nothing_of
from busrep.errors import BusrepError, PositionsAheadOfTable, PositionTooOld
from busrep.stores.interface import FactLog, KnownWriter, claims_of, provides, silence_of

from .context import ReaderContext

log = logging.getLogger("busrep.reader")


class TableReader:
    """Asks the table for one reading process."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self._core = context, context.core
        self._settings, self._store = context.settings, context.store
        self._ahead: dict[Key, float] = {}  # silences below zero, as they were first seen
        self._resting: dict[str, float] = {}  # writers that may rest, and their last signs of life in the database
        self._overdue: dict[str, float] = {}  # those that give it none for long, and since when that is known

    # -- pages ------------------------------------------------------------------------------------------------

    async def fetch(self, asked: FetchUpdates) -> None:
        """Fetch a page, and hand it to the core."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._settings.fetch_timeout):
                page = await self._store.fetch(asked)
        except PositionTooOld as error:
            if asked.incarnation is None and error.epoch not in (None, self._core.epoch):
                # As an empty page of that other log: it proves nothing, and the reader finds out which log there is.
                self._core.receive_page(asked, nothing_of(asked, error.epoch), clock())
            else:
                self._core.fetch_failed(asked, error, clock())
                if self._context.holds(error.stream):
                    pass  # the answer to a question given up
                elif not self._begins_later(error) and not await self._context.saver.handled_by_peer(error):
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
        if context.bootstrapping.begin(error.stream, str(error)):
            return
        log.error("%s", error)
        if context.options.on_too_old == "skip" or error.stream in context.unsaved:
            self._core.progress[key].skip(error.floor)
        else:
            context.stop(key, error)

    # -- writers that are not heard ---------------------------------------------------------------------------

    async def look(self, own: str | None, *, all_known: bool) -> None:
        """Follow through the table whoever is not heard; finish whoever gave the database no sign of life either.

        A writer that is silent here but alive there still holds its claim and is only followed. ``own``: the
        name of this process's own writer.
        """
        context, core, settings = self._context, self._core, self._settings
        await self.check_sequences()
        await self._check_targets()
        now = asyncio.get_running_loop().time()
        silent, bound = set(core.silent(now)), settings.heartbeat * settings.silent_after_beats
        if not (all_known or core.admission.registry_doubted or self._misses(silent, now - bound)):
            return
        everything = await self._registry()
        if everything is None:
            return
        silence, registered = self._silence(everything), {known.writer for known in everything if known.registered}
        rest = turns_of(len(registered)) > 1
        self._resting = {writer: now - silence[writer] for writer in (registered if rest else ())}
        # Names that are in no table: of a writer of resettable streams that was closed, or of a stray line.
        for writer in silent - registered:
            core.last_heard.pop(writer, None)
        dead: dict[str, int] = {}  # writer -> incarnation
        overdue, self._overdue = self._overdue, {}
        for known in everything:
            heard = known.writer in core.last_heard and known.writer not in silent
            if known.stream not in core.followed or known.writer == own or (heard and known.registered):
                continue
            progress = core.progress.get((known.stream, known.writer))
            if progress is None or known.position > progress.due:
                self._resting.pop(known.writer, None)  # it does not rest, and the table alone tells
            # Also of a stream that one who is heard gave up: nobody else will tell where that ended.
            core.learned(known.stream, known.writer, known.position)
            if known.registered and not heard and silence[known.writer] > bound:
                # If the database's clock went forward all that rest look dead, and have all beaten 1.1 beats later.
                since = self._overdue[known.writer] = overdue.get(known.writer, now)
                if not rest or now - since >= 1.5 * settings.heartbeat:
                    dead[known.writer] = known.incarnation
        context.pump()
        if dead and provides(self._store, FactLog):
            # By itself: one that cannot be finished yet must not keep the others from being followed.
            context.spawn(partial(self._finish_all, self._store, dead), "finish", once=True)
        elif dead:
            log.info("%s are silent: a process with the database has to finish them", ", ".join(sorted(dead)))

    def _misses(self, silent: set[str], long_ago: float) -> bool:
        """Whether the registry is to be read for one of these that are not heard, or one that it showed silent. Not for
        one that rests: every fifth beat tells of it, so it may be a beat later. Where nobody is heard nobody rests."""
        late = long_ago - self._settings.heartbeat
        some_heard = len(silent) < len(self._core.last_heard)
        rest = some_heard and all(self._resting.get(one, -math.inf) >= late for one in silent)
        return bool(self._overdue) or (bool(silent) and not rest)

    async def _registry(self) -> list[KnownWriter] | None:
        """The writers of the log that is read. None where the server tells of another one, or that was begun meanwhile:
        positions of the log before are none of this one."""
        core = self._core
        told = core.begins_in(await self._store.epoch())  # nobody may be there to announce another one
        self._context.pump()
        if not told:
            return None
        log_read = core.epoch
        everything = await self._store.known(log_read)
        if core.epoch == log_read:
            core.admission.registered(claims_of(everything))
            await self._confirm(core.admission.joined())
        return everything if core.epoch == log_read else None

    def _silence(self, everything: Iterable[KnownWriter]) -> dict[str, float]:
        """Seconds since each writer's last sign of life. One that lies in the future, because the database's clock was
        set back, counts from when it was first seen here: else a dead writer would pass for alive until then."""
        ahead = {(known.stream, known.writer): known.silent_for for known in everything if known.silent_for < 0}
        self._ahead = {key: min(seconds, self._ahead.get(key, seconds)) for key, seconds in ahead.items()}
        return silence_of(
            (known.writer, known.silent_for - self._ahead.get((known.stream, known.writer), 0.0))
            for known in everything
        )

    async def _confirm(self, joined: Mapping[Life, int]) -> None:
        """Follow writers that the registry lists now, and lines were heard of before: a writer that joined, or began
        anew. How far they said to be is fetched, as far as the sequence has come; the rest they tell again."""
        core = self._core
        log_read = core.epoch
        for life, end in joined.items():
            stream, writer, _ = life
            try:
                highest = await self._store.sequence(stream, log_read)
            except BusrepError as error:  # the others are looked after all the same
                log.warning("the sequence of %s cannot be read yet: %s", stream, error)
                continue
            if core.epoch != log_read:  # begun again meanwhile
                return
            if highest is None:  # of a replica, which cannot tell: another one may answer the next time
                continue
            if stream in core.followed:
                core.learned(stream, writer, min(end, highest))
            core.admission.confirmed(life)
        if joined:
            self._context.ask_for_positions()

    async def check_sequences(self) -> None:
        """A writer heard below its position may just repeat itself, or have followed others before it restarted. But a
        position above all that the sequence ever gave is of rows that a restore took away: never silently accepted."""
        core = self._core
        while core.stepped_back:
            key, _ = core.stepped_back.popitem()
            log_read, held = core.epoch, core.progress[key].position
            try:
                highest = await self._store.sequence(key[0], log_read)
                if highest is None:  # a replica's, which cannot tell, or another log's
                    core.doubt(await self._store.epoch())
            except BaseException as error:
                core.stepped_back[key] = None  # not looked at: the next beat does
                if not isinstance(error, BusrepError):
                    raise
                log.warning("the sequence of %s cannot be read yet: %s", key[0], error)
                return
            if highest is None or highest >= held or key in self._context.stopped:
                continue
            if core.epoch == log_read:  # else begun again meanwhile
                self._context.saver.above_sequence(key, PositionsAheadOfTable(key[0], held, highest))

    async def _check_targets(self) -> None:
        """What a page does not prove may come yet. But above all that the sequence ever gave is nothing to wait for: a
        forged line spoke of it."""
        core = self._core
        while core.unproven:
            key, _ = core.unproven.popitem()  # one that is not looked at, for the table is away, comes by its next page
            target = core.progress[key].target
            try:
                highest = await self._store.sequence(key[0], core.epoch)
            except BusrepError as error:  # dead writers are looked after all the same
                log.warning("the sequence of %s cannot be read yet: %s", key[0], error)
                return
            if highest is not None:
                core.progress[key].nothing_above(target, highest)
                self._context.pump()

    async def _finish_all(self, facts: FactLog, dead: Mapping[str, int]) -> None:
        for writer, incarnation in dead.items():
            await self._finish(facts, writer, incarnation)
        self._context.pump()

    async def _finish(self, facts: FactLog, writer: str, incarnation: int) -> None:
        core = self._core
        log_read = core.epoch
        try:
            finals = await facts.finish(writer, incarnation, timeout=self._settings.heartbeat)
        except BusrepError as error:  # its last transaction is still open: it goes on being followed
            log.info("writer %s is silent, and cannot be finished yet: %s", writer, error)
            return
        for stream, position in finals.items():
            if stream in core.followed and core.epoch == log_read:
                core.learned(stream, writer, position)
        if finals:
            log.warning("writer %s was silent; finished at %s", writer, dict(finals))
