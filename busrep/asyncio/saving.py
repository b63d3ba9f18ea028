"""Where a reader's positions are saved, and what the saved ones say: loops and locks round `SavedPositions`.

A position is saved by the handler, in its own transaction, or by time, when its rows were handled. All of it is done
while one lock is held, for what is registered or saved in one log must not slip in among what a new one begins with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

from busrep import errors
from busrep.core.catchup import Key
from busrep.core.delivery import RawBatch
from busrep.core.handled import Change, Reread
from busrep.errors import BusrepError, ConfigError, ReaderMoved, StatementRefused
from busrep.stores.interface import SavedAt

from ..runtime.batch import Batch
from .context import ReaderContext

log = logging.getLogger("busrep.reader")

ENDED = (
    "the transaction of batch.transaction() was ended inside its block: leave COMMIT and ROLLBACK to the block's end, "
    "which saves the position first"
)


class PositionSaver:
    """Saves the positions of one reading process; without a reader name it saves nothing."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self._core, self._saved = context, context.core, context.saved
        self.unsavable: dict[Key, StatementRefused] = {}  # why a position could not be saved
        self._saved_at: dict[Key, float] = {}
        self.refused = 0  # positions, by the store, for they were above the sequence

    async def save_if_due(self, key: Key) -> None:
        """Save a position if it was not saved for ``save_every`` seconds."""
        now = asyncio.get_running_loop().time()
        if self._context.reader and now - self._saved_at.get(key, 0.0) >= self._context.settings.save_every:
            self._saved_at[key] = now
            await self.try_save([key], busy=True)

    async def keep_saving(self) -> None:
        """Save every ``save_every`` seconds until cancelled. At 0 batches are saved at once: this is for the rest."""
        settings = self._context.settings
        while True:
            await asyncio.sleep(settings.save_every or settings.heartbeat)
            await self.try_save(list(self._core.progress))

    async def try_save(self, keys: Sequence[Key], *, busy: bool = False) -> None:
        """Save these positions; what keeps them from it is logged. ``busy``: also those whose worker is at work."""
        try:
            await self.save(keys, busy=busy)
        except BusrepError as error:
            log.warning("positions could not be saved: %s", error)
        except Exception:  # a bug, in a store perhaps: rows may come twice for it, but they must not stop
            log.exception("positions could not be saved")

    async def save(self, keys: Sequence[Key] | None = None, *, busy: bool = False) -> None:
        """Save what was handled and not saved by a handler, of these or of all. Raises Unavailable."""
        context = self._context
        if not context.reader or context.failure is not None:
            return
        keys = list(self._core.progress) if keys is None else keys
        async with context.saving:
            # What a worker is busy with it saves by itself: its handler may be saving this very moment.
            changes = await self._to_save([key for key in keys if busy or key not in context.workers])
            try:
                await self._save_changes(changes)
            except errors.PositionsAheadOfTable as error:
                self.go_back(error, changes)
            except ReaderMoved as error:
                log.error("%s", error)
                void, _ = await self._compare_saved(keys)
                with contextlib.suppress(ReaderMoved):
                    await self._save_changes(self._saved.unmoved(changes, void))

    async def _to_save(self, keys: Sequence[Key]) -> list[Change]:
        context, own, changes = self._context, self._context.bus.own_name.positions(), []
        for key in keys:
            progress = self._core.progress[key]
            # Of most there is nothing to save, once a second, and there may be many thousands of them.
            if self._saved.at.get(key) == progress.queue.delivered and key[1] != context.own.name:
                continue
            # Of a stream that nobody has handled nothing is saved; behind a snapshot that is loaded, where it ends.
            if not progress.stream.durable or key[0] in context.unsaved or key[0] not in context.subscribed:
                continue
            if context.holds(key[0]):
                continue
            position = progress.queue.delivered
            if key[1] == context.own.name and context.own_counts(key[0]):
                position = max(position, own.get(key[0], 0))
            if key not in self._saved.at:
                try:
                    await self.register(key, progress.began)
                except StatementRefused as error:  # it keeps no other from being saved
                    self._refuse_to_save(key, error)
                if key not in self._saved.at:  # refused, or a bootstrap of another process came between
                    continue
            if (change := self._saved.change(key, position)) is not None:
                changes.append(change)
        return changes

    async def _save_changes(self, changes: Sequence[Change]) -> None:
        # Apart, what was refused before: one statement saves all of them or none.
        for some in (
            [c for c in changes if c[:2] not in self.unsavable],
            *([c] for c in changes if c[:2] in self.unsavable),
        ):
            if some:
                await self._save_together(some)

    async def _save_together(self, changes: Sequence[Change]) -> None:
        context = self._context
        try:
            await self.store_changes(changes)
        except StatementRefused as error:
            if len(changes) == 1:
                self._refuse_to_save(changes[0][:2], error)
                return
            for change in changes:  # find out for which of them it does not work
                await self._save_together([change])
            return
        self._saved.confirmed(changes)
        for key in context.stopped.keys() & {change[:2] for change in changes}:
            context.note(context.stopped[key], key)  # what was handled before it stopped cleared the reason
        for stream, writer, _, _ in changes:
            self.unsavable.pop((stream, writer), None)

    def _refuse_to_save(self, key: Key, error: StatementRefused) -> None:
        if key not in self.unsavable:
            log.error("the position of %s cannot be saved, others are: %s", key, error)
        self.unsavable[key] = error

    async def store_changes(self, changes: Sequence[Change], connection: Any = None) -> None:
        """Save positions. Raises ReaderMoved also when another process has begun a bootstrap since they were known."""
        context, epoch = self._context, self._core.epoch or ""
        begun = {change[0]: self._saved.bootstraps.get(change[0], "") for change in changes}
        await context.reader_store.save_reader(context.reader, changes, epoch, connection, bootstraps=begun)

    async def register(self, key: Key, position: int) -> None:
        """Make sure that there is a row to save to. It may be another's, or that of a try without an answer.

        While the lock is held: what is registered in one log must not slip in among what a new one begins with.
        """
        context, epoch = self._context, self._core.epoch
        await context.register({key: position}, epoch or "")
        state = await context.reader_store.load_reader(context.reader)
        void = await self._context.bootstrapping.look_at(state)
        if epoch == self._core.epoch and key[0] not in void:
            self._saved.at[key] = state.positions.get(key, position)

    async def store_notes(self) -> None:
        """Store beside the saved positions what `ReaderContext.note` was told. While the database is away, try again.

        First these positions are saved: that clears what was noted beside them.
        """
        context, due = self._context, self._context.notes
        await self.try_save([key for key in due if key in self._core.progress], busy=True)
        while due:
            key, reason = next(iter(due.items()))
            try:
                await context.reader_store.note_stopped(context.reader, *key, reason)
            except BusrepError as error:
                log.debug("why %s stopped cannot be stored yet: %s", key, error)
                await asyncio.sleep(context.settings.retry_max)
            else:
                if due.get(key) == reason:
                    del due[key]

    # -- what the table says ----------------------------------------------------------------------------------

    async def _compare_saved(self, keys: Sequence[Key]) -> tuple[Collection[str], str | None]:
        """Compare saved positions with the table, while the lock is held: go back where one is below what this
        process had saved. Returns the streams whose positions a bootstrap has made void, and the epoch that the saved
        positions belong to. Raises Unavailable."""
        context, core = self._context, self._core
        known, state = dict(self._saved.at), await context.reader_store.load_reader(context.reader)
        void = await self._context.bootstrapping.look_at(state)
        core.doubt(state.epoch)
        # Positions of another log say nothing of this one; of void streams the end of a snapshot is saved, or more.
        keys = [key for key in keys if state.epoch in (None, core.epoch) and key[0] not in void]
        lost = {key: core.progress[key].began for key in keys if key in known and key not in state.positions}
        if lost:  # with an older epoch, or in a failover. Until they are back nobody who prunes knows of this reader.
            with contextlib.suppress(StatementRefused):  # saving registers each apart, and tells which is refused
                await context.register(lost, core.epoch or "")
        for key, saved in self._saved.compare(keys, known, state.positions, lambda key: core.progress[key].began):
            log.warning("the saved position of %s is %d", key, saved)
            core.progress[key].go_on_from(saved)
            context.ask_for_positions()
        return void, state.epoch

    async def look_at_saved(self) -> bool:
        """Compare saved positions with the table: a failover may have put them back, and the effects saved with them,
        while the rows stayed. Without new rows nothing else would show it. Other processes' bootstraps are looked for
        by the way. Returns False when nothing is saved. Raises Unavailable."""
        context, core = self._context, self._core
        if not context.reader or not self._saved.at or context.failure is not None:
            return False
        async with context.saving:
            keys = [key for key in self._saved.at if key in core.progress and key not in context.workers]
            _, epoch = await self._compare_saved([key for key in keys if not context.holds(key[0])])
        # Positions of an older log, though this process has saved some of this one: the failover lost that step, too.
        older = epoch not in (None, core.epoch) and await context.store.epoch() == core.epoch
        if older:
            context.another_log(core.epoch)
        return True

    async def handled_by_peer(self, error: errors.PositionTooOld) -> bool:
        """Whether another process under this reader's name has handled what was pruned: then go on from there."""
        context, core = self._context, self._core
        key, log_read = (error.stream, error.writer), core.epoch
        if error.stream in context.unsaved or not context.reader:
            return False
        try:
            state = await context.reader_store.load_reader(context.reader)
            if self._saved.is_news(state, error.stream):
                await self._context.bootstrapping.look()
                return True
        except BusrepError as trouble:
            log.warning("saved positions cannot be read yet: %s", trouble)
            return True  # the page is asked for again
        core.doubt(state.epoch)
        if core.epoch != log_read or state.epoch not in (None, log_read):  # the floor may be of another log
            return True
        if context.holds(error.stream):
            return True
        saved = state.positions.get(key, 0)
        if not self._saved.pruned(key, saved, error.floor, core.delivered(*key)):
            return False
        log.warning("%s: handled by another process under the name %r", error, context.reader)
        core.progress[key].go_on_from(saved)
        return True

    def above_sequence(self, key: Key, error: errors.PositionsAheadOfTable) -> None:
        """What was taken in of a (stream, writer) lies above the sequence: go back to what is saved, or stop."""
        saved = self._saved.at.get(key)
        if not self._context.reader or saved is None or self._context.holds(key[0]):
            self._context.stop(key, error)
        else:
            self.go_back(error, [(*key, saved, error.position)])

    def go_back(self, error: errors.PositionsAheadOfTable, changes: Sequence[Change]) -> None:
        """A position above the sequence was refused: what was taken in since the saved one is fetched again."""
        back, stopping = self._saved.above_sequence(error, changes)
        for key in stopping:
            self._context.stop(key, error)
        for (stream, writer), saved in back:
            self.refused += 1
            log.error("%s: reading (%s, %s) goes back to %d, which is saved", error, stream, writer, saved)
            self._core.progress[stream, writer].go_on_from(saved, error.highest)
        self._context.ask_for_positions()
        asyncio.get_running_loop().call_soon(self._context.pump)


class BatchSaver:
    """Saves the positions of batches in the transactions of their handlers, and finds out what became of those."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self._core, self._saved = context, context.core, context.saved

    async def registered(self, key: Key, raw: RawBatch) -> bool:
        """Make sure that there is a row to save to, for a writer that joined while we listened, and that no save of our
        own is under way while the handler may save.

        Before the handler, for its transaction may hold the only write lock there is (SQLite).
        """
        context = self._context
        if not context.is_saved(key) or (key in self._saved.at and not context.saving.locked()):
            return True
        try:
            async with context.saving:  # which registers too
                if not self._core.in_hand(key, raw):  # of a log that is gone: where it began says nothing of this one
                    return True
                if key not in self._saved.at:
                    await self._context.saver.register(key, raw.after)
        except BusrepError as trouble:
            log.warning("the position of %s cannot be registered yet: %s", key, trouble)
            await context.retrying.sleep(context.settings.retry_max)
            self._core.put_back(*key)
            return False
        return True

    async def save_batch(self, batch: Batch[Any], connection: Any) -> None:
        """See `Batch.save`."""
        at = self.begins(batch)
        change = (at.stream, at.writer, at.position, batch.position)
        batch.handling.tried = True
        await self._context.saver.store_changes([change], connection)

    @contextlib.asynccontextmanager
    async def transaction(self, batch: Batch[Any]) -> AsyncIterator[Any]:
        """See `Batch.transaction`."""
        effects = self._context.reader_store.effects(self.begins(batch))
        await effects.begin()
        try:
            yield effects.connection
            if effects.ended:
                raise ConfigError(ENDED)
            await batch.save(effects.connection)
            await effects.commit()
        except BaseException as error:
            batch.handling.saved = False  # or the table will tell, see `reload`
            # To the end: a connection that is left in the middle would be lost to the pool. One whose COMMIT may be
            # under way still goes back by itself.
            if not isinstance(error, errors.CommitUnknown):
                await asyncio.shield(asyncio.ensure_future(effects.rollback()))
            raise

    def begins(self, batch: Batch[Any]) -> SavedAt:
        """Return what is saved before a batch. Raises ConfigError where its position cannot be saved, ReaderMoved where
        it must not be."""
        context = self._context
        if not context.reader:
            raise ConfigError("saving a position needs a durable reader: pass reader= and store= to connect()")
        if batch.handling.saved:
            raise ConfigError("the position of this batch is saved already: one save, or one transaction, a batch")
        if not batch.handling.last:  # what is saved is not handed out again, whatever becomes of the calls that follow
            raise ConfigError(
                f"stream {batch.stream.name!r} has another handler, which is called later and would lose these rows if "
                "it failed: subscribe the one that saves last, or give each a bus and a reader name of its own"
            )
        key = (batch.stream.name, batch.writer)
        if not context.is_saved(key):
            what = "of invalidations" if key[0] in context.unsaved else "kept in memory"
            raise ConfigError(f"stream {batch.stream.name!r} is {what}: its positions are not saved")
        # A reset, a stop: what is known here is not of these rows any more. Or another process under this name is
        # known to be further: saved over its position these rows would be handled twice.
        if not self._core.in_hand(key, batch.handling.raw) or self._saved.at.get(key, batch.after + 1) > batch.after:
            raise ReaderMoved(context.reader, *key, batch.after)
        batch.handling.expected = self._saved.at[key]
        return SavedAt(context.reader, *key, batch.handling.expected, self._core.epoch or "")

    async def reload(self, key: Key, batch: Batch[Any]) -> bool:
        """What is saved decides, whatever became of the transaction. False: the rows are to be handled again."""
        context, core, raw, log_read = self._context, self._core, batch.handling.raw, batch.epoch
        try:
            async with context.saving:
                state = await context.reader_store.load_reader(context.reader)
                void = key[0] in await self._context.bootstrapping.look_at(state)
                saved, saved_epoch = state.positions.get(key), state.epoch
                # Beside positions of an older log nothing is registered: they are replaced first, all together.
                lost = saved is None and core.epoch == log_read and saved_epoch in (None, log_read) and not void
                if lost:  # by a failover, with all effects since
                    await self._context.saver.register(key, core.progress[key].began)
                    saved = self._saved.at.get(key)
        except BusrepError as trouble:
            log.warning("saved positions cannot be read yet: %s", trouble)
            await context.retrying.pause(key)
            core.put_back(*key)
            return True
        core.doubt(state.epoch)
        if void or context.holds(key[0]):
            saved = saved_epoch = None
        epochs = {"log_read": log_read, "epoch": core.epoch, "saved_epoch": saved_epoch}
        in_hand = core.in_hand(key, raw) and not lost
        after = self._saved.reread(key, saved, raw, **epochs, expected=batch.handling.expected, in_hand=in_hand)
        if after is Reread.OTHER_LOG:
            await asyncio.sleep(context.settings.retry_max)
            if core.in_hand(key, raw):
                core.put_back(*key)
        elif after is Reread.BEHIND:
            context.retrying.over(key)
            core.put_back(*key)
        elif after in (Reread.HANDLED, Reread.MOVED):
            log.warning("the saved position of %s is %d", key, self._saved.at[key])
            if after is Reread.HANDLED:
                core.done(*key)
            else:
                core.progress[key].go_on_from(self._saved.at[key])
                context.ask_for_positions()
        return after is not Reread.NOT_SAVED
