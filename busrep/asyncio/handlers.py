"""Calls the handlers of a reading process, again where they fail, with pauses.

One worker task a (stream, writer) sees to it that its batches come in order.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from busrep.core.catchup import Key
from busrep.core.delivery import Missed, RawBatch, Reset
from busrep.core.failures import RetryPolicy, Transient, Trouble, Verdict, predicate_of, told
from busrep.errors import BusrepError, HandlerFailed, PositionsAheadOfTable, ReaderMoved, RowError
from busrep.settings import Settings
from busrep.streams import Stream, collector_held

from ..runtime.batch import Batch, BatchHandling, Handler
from ..runtime.tasks import call, forget_cancellation, heed_cancellation, wait_until_set
from .waiting import DetachedError

if TYPE_CHECKING:
    from .context import ReaderContext

log = logging.getLogger("busrep.reader")

# A process that is forked while a thread makes rows does not have that thread, which would let the collector go on.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=lambda: gc.enable() if collector_held else None)


class Retrying:
    """The (stream, writer)s whose handlers fail. Of the bootstrap of a stream the writer is ""."""

    def __init__(self, settings: Settings, transient: Transient) -> None:
        self.policy = RetryPolicy(settings, predicate_of(transient))
        self._settings = settings
        self._troubles: dict[Key, Trouble] = {}
        self._ended = asyncio.Event()

    def failed(
        self, key: Key, after: int, error: BaseException, *, facts: int, patient: bool = True, cancelled: bool = False
    ) -> Verdict:
        """A call failed with what follows ``after``. Logs it, and says what follows; see `RetryPolicy.judge`.

        ``cancelled``: the task that called was. If that is the error, it counts as TimeoutError: the rows of a call
        that was cut off are not at fault.
        """
        now = asyncio.get_running_loop().time()
        if cancelled and isinstance(error, asyncio.CancelledError):
            cause, error = error, TimeoutError("the handler was cancelled")
            error.__cause__ = cause
        trouble = self._troubles.get(key)
        if trouble is None or trouble.after != after:
            trouble = self._troubles[key] = Trouble(after, now)
        verdict = self.policy.judge(trouble, error, now, facts=facts, patient=patient)
        if verdict in (Verdict.AGAIN, Verdict.OUTAGE):
            self._log(key, trouble, error, now)
        return verdict

    def _log(self, key: Key, trouble: Trouble, error: BaseException, now: float) -> None:
        known = error if trouble.logged_at is None else None  # one traceback
        if self.policy.to_log(trouble, now):
            what = "an outage: retrying until it is over" if trouble.outage else "trying again"
            values = (*key, trouble.after, trouble.calls, now - trouble.since, what, trouble.error)
            log.warning("handler of (%s, %s) failed behind %d, %d calls in %.1f s, %s: %s", *values, exc_info=known)

    def seconds(self, key: Key, otherwise: float) -> float:
        """How long to wait before the next call; ``otherwise``, where none has failed."""
        trouble = self._troubles.get(key)
        return otherwise if trouble is None else self.policy.pause(trouble)

    async def pause(self, key: Key) -> None:
        """Wait until the next call is due, or the bus closes."""
        await self.sleep(self.seconds(key, self._settings.retry_max))

    async def sleep(self, seconds: float) -> None:
        """Wait so many seconds, or until the bus closes."""
        await wait_until_set(self._ended, seconds)

    def begin(self, key: Key, after: int) -> None:
        """What follows ``after`` is handled next: what failed before that is over."""
        trouble = self._troubles.get(key)
        if trouble is not None and trouble.after != after:
            self.over(key)

    def over(self, key: Key) -> None:
        """What failed was handled, or nobody calls it again."""
        trouble = self._troubles.pop(key, None)
        if trouble is not None and trouble.logged_at is not None:
            lasted = asyncio.get_running_loop().time() - trouble.since
            log.info("(%s, %s) goes on after %d failed calls in %.1f s", *key, trouble.calls, lasted)

    def end(self) -> None:
        """The bus closes: end all pauses."""
        self._ended.set()

    def statistics(self, working: Iterable[Key]) -> dict[str, dict[str, Any]]:
        """What is being retried, JSON-able. ``working``: the keys that are being handled."""
        now, at_work = asyncio.get_running_loop().time(), set(working)
        found = [(key, trouble) for key, trouble in self._troubles.items() if not key[1] or key in at_work]
        return {f"{key[0]} {key[1]}".rstrip(): told(trouble, now) for key, trouble in found}


class Handlers:
    """The workers of one reading process."""

    def __init__(self, context: ReaderContext) -> None:
        self._context, self.core = context, context.core
        self._retrying, self._handlers, self._workers = context.retrying, context.subscribed, context.workers
        self._notice_handlers: list[tuple[type[Reset | Missed], str | None, Callable[..., Any]]] = []
        self._cancelled: dict[Key, None] = {}  # whose worker was cancelled, not by close(): another one will go on
        self.poison_rows = 0
        self.rows_delivered = 0

    def add(self, stream: str, handler: Handler[Any]) -> None:
        """Call ``handler`` with the stream's batches from now on."""
        handlers = self._handlers.setdefault(stream, [])
        handlers.append(handler)
        if len(handlers) == 1:
            for key in [key for key in self._context.paused if key[0] == stream]:
                del self._context.paused[key]
                self.core.progress[key].resume()
            self._context.ask_for_positions()

    def remove(self, stream: str, handler: Handler[Any]) -> None:
        """Stop calling ``handler``; without another one the stream's rows wait in the table."""
        handlers = self._handlers[stream]
        handlers.remove(handler)
        if not handlers:
            for key in [key for key in self.core.progress if key[0] == stream]:
                self._pause(key)

    def hand_out(self) -> None:
        """Begin to hand out what is ready."""
        for key in list(self.core.ready):
            if not self._context.is_handed_out(key[0]):
                self._pause(key)
            elif key not in self._workers and key not in self._context.stopped and key not in self._cancelled:
                task = asyncio.create_task(self._work(key), name=f"busrep-handle-{key[0]}-{key[1]}")
                self._workers[key] = task
                task.add_done_callback(partial(self._ended, key))

    def is_worker(self, task: asyncio.Task[Any] | None, stream: str | None = None) -> bool:
        """Whether a task is one that calls handlers, of that stream or any."""
        return any(task is worker and stream in (None, key[0]) for key, worker in self._workers.items())

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {
            "rows_delivered": self.rows_delivered,
            "handler_failures": self._context.handler_failures,
            "poison_rows": self.poison_rows,
            "retrying": self._retrying.statistics([*self._workers, *self._cancelled]),
        }

    def _pause(self, key: Key) -> None:
        if key not in self._context.stopped:
            self._context.paused[key] = None
            self.core.progress[key].stop()
        self.core.ready.pop(key, None)

    def on_notice(self, kind: type[Reset | Missed], stream: str | None, handler: Callable[..., Any]) -> None:
        """Call ``handler(stream, writer, position)`` when a stream, or any, began anew, or ``handler(stream, writer,
        after, upto)`` when rows cannot be had any more."""
        self._notice_handlers.append((kind, stream, handler))

    def _goes_on(self, key: Key) -> bool:
        ended = self._context.closed or key in self._context.stopped or key in self._cancelled
        return not ended and self._context.is_handed_out(key[0])

    async def _work(self, key: Key) -> None:
        """Hand out what waits for one (stream, writer), in order, until nothing does."""
        core = self.core
        try:
            while self._goes_on(key):
                careful = core.delivered(*key) < self._context.bisecting.get(key, 0)
                taken = core.take(*key, 1 if careful else None)
                if taken is None:
                    break
                if isinstance(taken, RawBatch):
                    if not await self._handle(key, taken):
                        break
                else:
                    await self._notify(taken)
                    core.done(*key)
                self._context.wake(key)
                await self._context.saver.save_if_due(key)
                # A handler that never waits must not keep the link from being read.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._was_cancelled(key)
            raise
        except (KeyboardInterrupt, SystemExit):  # they end the event loop
            raise
        except BaseException as error:  # a bug here, or no Exception of a handler's: loud, and not over and over
            self._context.stop(key, HandlerFailed(*key, core.delivered(*key), error))
            log.exception("handing out rows of %s failed", key)
        finally:
            self._leave(key)

    def _ended(self, key: Key, worker: asyncio.Task[None]) -> None:
        """A done callback: a task that is cancelled before its first step does nothing by itself."""
        if self._workers.get(key) is worker:
            self._was_cancelled(key)
            self._leave(key)

    def _was_cancelled(self, key: Key) -> None:
        if not self._context.closed:
            log.warning("what hands out rows of %s was cancelled, not by close(): it begins again", key)
            self._cancelled[key] = None
            if self.core.progress[key].queue.handling is not None:
                self.core.put_back(*key)

    def _leave(self, key: Key) -> None:
        del self._workers[key]
        if key in self._cancelled:
            seconds = self._retrying.seconds(key, self._context.settings.retry_min)
            asyncio.get_running_loop().call_later(seconds, self._begin_again, key)
        self._context.pump()

    def _begin_again(self, key: Key) -> None:
        del self._cancelled[key]
        self._context.pump()

    async def _notify(self, notice: Reset | Missed) -> None:
        if isinstance(notice, Reset):
            places: tuple[int, ...] = (notice.position,)
            log.info("(%s, %s) was reset to %d", notice.stream, notice.writer, *places)
        else:
            what = "are gone" if notice.certain else "may have been missed"
            places = (notice.after, notice.upto)
            log.info("(%s, %s): rows in (%d, %d] %s", notice.stream, notice.writer, *places, what)
        for kind, stream, handler in list(self._notice_handlers):
            if not isinstance(notice, kind) or stream not in (None, notice.stream):
                continue
            try:
                await call(handler, notice.stream, notice.writer, *places)
                forget_cancellation()
            except (Exception, asyncio.CancelledError) as error:
                self._call_failed((notice.stream, notice.writer), error)
                log.exception("the handler of a reset or of missed rows failed")

    def _call_failed(self, key: Key, error: BaseException) -> None:
        """Raise CancelledError if it is close() that cancelled this worker, whatever the handler made of it.

        Somebody else may have: the handler, at a deadline of its own, or who cancels all tasks, as asyncio.run() does
        at its end. It failed then, and another worker calls it again, for asyncio.run() waits until this one has ended.
        """
        if self._context.closed:
            heed_cancellation(error)  # it lost its patience
        if forget_cancellation():
            self._cancelled[key] = None

    async def _handle(self, key: Key, raw: RawBatch) -> bool:
        """Call the handlers with a batch. False: nothing was handled, and this worker ends."""
        core, streams = self.core, self._context.options.streams
        # A stream that nobody declared has rows of any shape.
        stream = streams[raw.stream] if raw.stream in streams else Stream[Any](raw.stream, resettable=True)
        try:
            rows = stream.decode(raw.payloads)
        except RowError as error:
            if raw.fetched or not core.progress[key].stream.fetchable:
                return await self._failed(key, raw, error, lost=not raw.fetched)
            log.warning("rows that do not decode, fetched again: %s", error)
            core.progress[key].reject(raw)
            return False
        if not await self._context.batches.registered(key, raw):
            return True
        batches, place = self._context.batches, (stream, raw.writer, raw.after, raw.position, raw.tokens)
        self._retrying.begin(key, raw.after)
        reader = self._context.options.reader
        batch = Batch(*place, rows, BatchHandling(raw), core.epoch, reader, batches.save_batch, batches.transaction)
        ended = await self._call_until_handled(key, batch)
        if ended is not None:
            return ended
        self._retrying.over(key)
        self.rows_delivered += len(rows)
        if batch.handling.saved:
            if not core.in_hand(key, raw):  # stopped or reset meanwhile: the core forgot these rows, the table did not
                return await batches.reload(key, batch)
            self._context.saved.at[key] = raw.position
        core.done(*key)
        return True

    async def _call_until_handled(self, key: Key, batch: Batch[Any]) -> bool | None:
        """Call the handlers with a batch until they have handled it. Else what `_handle` returns."""
        core, raw = self.core, batch.handling.raw
        while True:
            # While it was registered, or paused for: stopped, or of a log that is gone.
            if not core.in_hand(key, raw):
                return True
            if self._context.closed or key in self._cancelled:
                core.put_back(*key)
                return False
            self._context.oldest.at.pop(key, None)  # from now on it does not begin later
            try:
                batch.handling = BatchHandling(raw)
                await self._call_handlers(raw.stream, batch)
            except DetachedError:
                if not batch.handling.tried or not await self._context.batches.reload(key, batch):
                    core.put_back(*key)
                return False
            except (Exception, asyncio.CancelledError) as error:
                self._call_failed(key, error)
                ended = await self._handler_failed(key, batch, error)
                if ended is not None:
                    return ended
            else:
                return None

    async def _handler_failed(self, key: Key, batch: Batch[Any], error: BaseException) -> bool | None:
        """What becomes of a batch whose handler raised: None, it is called again, or what `_handle` returns."""
        raw, saved = batch.handling.raw, self._context.saved.at
        self._context.handler_failures += 1
        facts = 2 if raw.tokens and raw.tokens[0] != raw.tokens[-1] else 1
        patient = key[0] not in self._context.unsaved  # rows of these are better skipped, see _failed
        cut_off = key in self._cancelled
        verdict = self._retrying.failed(key, raw.after, error, facts=facts, patient=patient, cancelled=cut_off)
        if (
            isinstance(error, PositionsAheadOfTable)
            # Of this very save. From a write to another stream, or log, it is an error like any other.
            and (batch.handling.tried and (error.stream, error.position) == (key[0], raw.position))
            and (self.core.in_hand(key, raw) and key in saved)
        ):
            self._context.saver.go_back(error, [(*key, saved[key], raw.position)])
            return True
        if batch.handling.tried or isinstance(error, ReaderMoved):
            log.warning("handler of %s failed after it saved: %r", key, error)
            if await self._context.batches.reload(key, batch):
                return True
        if verdict in (Verdict.NARROW, Verdict.POISON):
            return await self._failed(key, raw, error)
        if not cut_off:
            await self._retrying.pause(key)
        return None

    async def _call_handlers(self, stream: str, batch: Batch[Any]) -> None:
        due = list(self._handlers.get(stream, ()))
        while due:
            handler = due.pop(0)
            batch.handling.last = not due
            if handler in self._handlers[stream]:  # a loop may have been left while another handler was at work
                await call(handler, batch)
                forget_cancellation()

    async def _failed(self, key: Key, raw: RawBatch, error: BaseException, *, lost: bool = False) -> bool:
        """The handler kept failing: find the fact that it fails on, then stop, or set that fact aside. ``lost``: its
        rows do not decode, and nothing keeps them."""
        core = self.core
        if not self.core.in_hand(key, raw):  # void: stopped, or of a former life
            return True
        if raw.tokens and raw.tokens[0] != raw.tokens[-1]:
            self._context.bisecting[key] = raw.position
            core.put_back(*key)
            return True
        self.poison_rows += len(raw.tokens)
        if lost or key[0] in self._context.unsaved:  # without these caches are cleared: that is better than to be deaf
            log.error("rows of %s at %d cannot be handled: skipped", key, raw.position, exc_info=error)
            await self._notify(Missed(*key, raw.after, raw.position))
            core.done(*key)
            return True
        failure = HandlerFailed(raw.stream, raw.writer, raw.position, error)
        if self._context.options.on_poison == "dead_letter" and self._context.options.positions_store is not None:
            log.error("%s: kept as a dead letter", failure, exc_info=error)
            await self._keep_dead_letter(key, raw, f"{type(error).__name__}: {error}")
            return True
        log.error("%s: stopped", failure, exc_info=error)
        self._context.stop(key, failure)
        return False

    async def _keep_dead_letter(self, key: Key, raw: RawBatch, error: str) -> None:
        context = self._context
        try:
            await context.reader_store.dead_letter(context.reader, *key, raw.tokens, raw.payloads, error)
        except BusrepError as trouble:
            log.warning("the dead letter could not be kept yet: %s", trouble)
            await self._retrying.sleep(context.settings.retry_max)
            self.core.put_back(*key)
        else:
            self.core.done(*key)
