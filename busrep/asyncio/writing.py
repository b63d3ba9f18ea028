"""The writing half of a bus on an event loop: facts in the caller's transaction, and the writer's beats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from busrep.errors import BusrepError, ConfigError, SequenceWentBack, Unavailable, WriterFenced
from busrep.stores.interface import AsyncTransaction, Claim

from ..runtime.config import WriterConfig
from ..runtime.contents import FactState
from ..runtime.deferred import DeferredTransaction
from ..runtime.fact import SETTLE_FIRST, FactBase, next_look, settle
from ..runtime.open_facts import InDoubt
from ..runtime.session import WriterSession
from ..runtime.tasks import Tasks, wait_until_set, within

log = logging.getLogger("busrep.writer")

RowT = TypeVar("RowT")


class Fact(FactBase[RowT]):
    """One transaction in the making: ``async with bus.write(stream) as fact``.

    ``id`` is the fact's ID in the (first) stream, ``ids`` {stream name: ID}. On leaving the block the rows are
    inserted, the transaction commits, and the fact is published; an exception rolls it back. In a transaction
    that the caller had begun on the connection already, the caller commits, and the fact is published when that
    is seen to have happened (``bus.settle()`` looks at once).
    """

    _writing: Writing
    _ending = False  # a task ends it, or has ended it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beginning = asyncio.Lock()

    @property
    def connection(self) -> Any:
        """The driver's connection that the transaction runs on; None for streams without a table. Raises ConfigError
        before `begin`, or a first `execute`."""
        return None if self._transaction is None else self._transaction.hand_out()

    async def begin(self) -> None:
        """Begin the transaction now, if it has not begun: for ``connection``. Raises WriterFenced, Unavailable (also
        when the writer was finished since the block began), and ConfigError outside the block."""
        await self._begin_late()

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of the caller's in the fact's transaction, in the driver's placeholder style.
        Raises the driver's own errors of it, and ConfigError outside the block."""
        return list(await (await self._begin_late()).execute(sql, params))

    def ended(self) -> None:
        """Say that the caller's transaction, which this fact had joined, has ended: it is looked at, and published,
        in the background. If it goes on in truth, nothing happens."""
        if self._joined is not None:
            self._writing.transaction_ended(self._joined)

    async def __aenter__(self) -> Fact[RowT]:
        self._begin_once()
        await self._live()
        await self._writing.room()
        await self._begin_live()
        self._state = FactState.OPEN
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = FactState.ENDED
        if kind is GeneratorExit and not self._writing.here:
            self._abandon()
            return
        if error is None and isinstance(self._transaction, DeferredTransaction):
            try:  # here: what comes next runs in a task of its own
                self._transaction.check_alone()
            except ConfigError as nested:
                await self._finish(nested)
                raise
        await self._finish(error)

    async def _begin_late(self) -> AsyncTransaction:
        async with self._beginning:  # tasks of the block's may run statements at the same time
            return await super()._begin_late()

    async def _live(self) -> WriterSession:
        self._writing, self._ending = await self._writing.live(), False
        return self._writing

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        # Neither half may be torn by a cancellation: whether COMMIT was sent decides what the fact becomes.
        self._ending = self._writing.here
        await self._writing.finish(work, self._abandon)

    def _guarded(self, _session: WriterSession, step: Callable[[], object]) -> None:
        if self._writing.here:
            step()
        else:
            self._writing.call_soon(step)

    def _abandon(self) -> None:
        """Nobody ends the fact any more, if it has not ended.

        Its task is garbage, collected in whatever thread; so nothing but an append, and what a loop takes from any.
        Or what ends it was cancelled before its first step.
        """
        if self._session is not None and not self._booked:
            self._booked, doubt = True, self._in_doubt()
            self._session.doubts.append(doubt)
            self._writing.call_soon(partial(self._writing.given_up, doubt))

    def __del__(self) -> None:
        # The collector calls this of all that was garbage, though a task ends the fact by now.
        if getattr(self, "_session", None) is not None and not self._ending:
            self._abandon()

    async def _look_at_claim(self, session: WriterSession, error: SequenceWentBack) -> None:
        if session.claim is None or await self._writing.check_claim():
            raise error

    def _fence(self, session: WriterSession, error: WriterFenced) -> None:
        if (error.writer, error.incarnation) == (session.name, session.incarnation):
            session.fence(error)

    def _publish(self) -> None:
        self._writing.wake()

    def _doubted(self, _doubt: InDoubt) -> None:
        self._writing.doubted()


class Writing(WriterSession):
    """A `WriterSession` on an event loop; calls ``wake()`` when there is something to publish.

    ``renew(self)`` gives the one that goes on under a new incarnation, or raises (see `OwnName`); None: none does.
    It is asked at once when this one is fenced. ``on_loss()``: another process has the name.
    """

    def __init__(
        self,
        config: WriterConfig,
        claim: Claim | None,
        incarnation: int,
        *,
        wake: Callable[[], None],
        renew: Callable[[Writing], Awaitable[Writing]] | None = None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, claim, incarnation)
        self._loop = asyncio.get_running_loop()
        self.wake, self._renew, self._on_loss = wake, renew, on_loss
        self.lost = False  # to another process: it is not won back
        self.outdone = 0  # the higher incarnation of a predecessor, without a claim
        self._finishing = Tasks(config.settings)
        self._looking: set[object] = set()  # at these transactions' ends
        self._doubted = asyncio.Event()
        self._drained = asyncio.Event()
        self.publishing = False  # whether Redis takes what is published; then a full queue is worth a wait

    def clock(self) -> float:
        """See `WriterSession`: the event loop's, which is virtual in the simulator."""
        return asyncio.get_running_loop().time()

    @property
    def here(self) -> bool:
        """Whether this is the loop's thread, and no other one, where the garbage collector comes to."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def call_soon(self, step: Callable[[], object]) -> None:
        """Have the loop do that, if it goes on. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(step)

    async def live(self) -> Writing:
        """This one, or the one that goes on in its place after it was finished for silence.

        Raises WriterFenced when another process has the name, ClaimBlocked, Unavailable.
        """
        if self.fenced is None:
            return self
        if self.lost or self._renew is None:
            raise self.fenced.with_traceback(None)  # it is raised again and again, and would hold on to every frame
        return await self._renew(self)

    # -- facts ------------------------------------------------------------------------------------------------

    async def finish(self, work: Coroutine[Any, Any, None], then: Callable[[], object]) -> None:
        """Run the end of a transaction to its end, even when the caller is cancelled; ``then()`` is called behind it.
        Raises what it raises, and RuntimeError on another loop."""
        if not self.here:
            work.close()
            raise RuntimeError(f"writer {self.name!r} is of another event loop")
        task = asyncio.create_task(work)
        self._finishing[task] = None
        task.add_done_callback(self._finishing.pop)
        task.add_done_callback(lambda _: then())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # Its error, if any, would be reported as never retrieved: whoever cancelled asked not to know.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def room(self) -> None:
        """Wait while Redis is slower than the writers; never while it is away, for the table has it all."""
        while self.publishing and self.core.queued_bytes > self._settings.publish_queue_bytes // 2:
            self._drained.clear()
            if not await wait_until_set(self._drained, self._settings.redis_timeout):
                return

    def drained(self) -> None:
        """Frames were published, or cannot be."""
        self._drained.set()

    # -- facts in doubt ---------------------------------------------------------------------------------------

    def doubted(self) -> None:
        """There are facts whose transaction may still be open: the table will tell."""
        self._doubted.set()

    def given_up(self, doubt: InDoubt) -> None:
        """Nobody ends this transaction: roll it back, unless it is the caller's, and have the table asked."""

        async def end() -> None:
            if doubt.transaction is not None:
                await doubt.transaction.rollback()
            doubt.transaction = None
            self.doubted()

        self._finishing.spawn(end, "give-up", again=True)

    def transaction_ended(self, doubt: InDoubt) -> None:
        """The caller says that this transaction has ended: ask now, without making anyone wait."""

        async def look() -> None:
            try:
                await self._settle(*self.ended_with(doubt))
            except WriterFenced as error:
                self.fence(error)
            except Exception as error:  # of whatever kind: `keep_settling` asks again
                log.debug("the outcome of a transaction is not known yet: %s", error)
            finally:
                self._looking.discard(doubt.marker)

        # Else it is the garbage collector, perhaps after the loop. One question for all facts of a transaction.
        if self.here and self.ended_with(doubt) and doubt.marker not in self._looking:
            self._looking.add(doubt.marker)
            self._finishing.spawn(look, "look", again=True)

    async def settle(self) -> None:
        """Ask after every fact in doubt once, now. Raises Unavailable, or what else keeps one from being known."""
        asked: dict[object, list[InDoubt]] = {}  # a question for all that one transaction left
        for doubt in self.doubts:
            asked.setdefault(doubt.marker, []).append(doubt)
        found = await asyncio.gather(*(self._settle(*same) for same in asked.values()), return_exceptions=True)
        troubles = [one for one in found if one is not None]  # the others may have ended all the same
        for trouble in sorted(troubles, key=lambda one: not isinstance(one, WriterFenced)):
            if isinstance(trouble, asyncio.CancelledError):  # of one question: whoever waits for all is not cancelled
                raise Unavailable("the store", trouble)
            raise trouble

    async def _settle(self, *doubts: InDoubt) -> None:
        """Ask what became of one transaction; ``doubts``: what it left, with one marker."""
        if doubts and await settle(self, doubts, lambda step: step()):
            self.wake()

    async def keep_settling(self) -> None:
        """Settle facts in doubt until cancelled."""
        pause = SETTLE_FIRST if self.doubts else None  # a task before this one may have ended with some
        while self.fenced is None:
            if await wait_until_set(self._doubted, pause):
                self._doubted.clear()
                pause = SETTLE_FIRST
                await asyncio.sleep(pause)  # what comes meanwhile is asked after as well
                if self.fenced is not None:
                    break
            before = len(self.doubts)
            try:
                await self.settle()
            except WriterFenced as error:
                self.fence(error)
            except Exception as error:  # of whatever kind: the facts in doubt hold back all later ones
                log.warning("the outcome of %d transactions is not known yet: %s", before, error)
            pause = next_look(pause, before, len(self.doubts))
        self.doubts.clear()  # what they committed is in the table

    # -- the others, and the beat -----------------------------------------------------------------------------

    async def beat(self) -> None:
        """Store the proven positions and, the claim being ours still, follow the others. Raises Unavailable."""
        if not self._durable or self.fenced is not None:
            return
        # Noted before the claim and the registry are read, which the store does under one lock (9.7).
        beat = self.beat_begins()
        try:
            store, claim = self.log
            registry = await store.heartbeat(claim, beat.positions, registry=beat.whole)
        except WriterFenced as error:
            self.fence(error)
            return
        self.beat_stored(beat, registry)

    async def leave(self) -> None:
        """After the last announcement: store the positions, and finish the own name (9.21), which nobody has to find
        silent then. Not while a fact is open or in doubt: what became of it the table tells later. Raises BusrepError.
        """
        await self.beat()
        if self.store is None or self.claim is None or self.fenced is not None or self.unfinished:
            return
        finals = await self.store.finish(self.name, self.incarnation, timeout=self._settings.heartbeat)
        log.info("writer %s left at %s", self.name, dict(finals))

    async def check_claim(self) -> bool:
        """Whether the claim stands, asked on the primary; without a claim nothing tells. Raises Unavailable."""
        if self.store is None or self.claim is None:
            return False
        try:
            await self.store.check_claim(self.claim)
        except WriterFenced as error:
            self.fence(error)
        return self.fenced is None

    def fence(self, error: WriterFenced) -> None:
        """Nothing more is written or published under this incarnation: another process has the name, or a reader has
        finished it for silence. Which of them, the claim tells."""
        if self.fenced is None:
            super().fence(error)
            self._doubted.set()
            self.wake()
            if self._renew is None:
                self.lose(error)
            elif not self.lost:
                self._finishing.spawn(partial(self._try_to_renew, self._renew), "renew")

    async def _try_to_renew(self, renew: Callable[[Writing], Awaitable[Writing]]) -> None:
        try:
            await renew(self)
        except BusrepError as error:  # the next beat, or the next fact, tries again
            log.warning("writer %s is not won back: %s", self.name, error)

    def tear(self) -> None:
        """See `WriterSession`. The name is claimed anew at once."""
        super().tear()
        self.fence(WriterFenced(self.name, self.incarnation))

    def lose(self, error: WriterFenced) -> None:
        """Another process has the name, for good."""
        if not self.lost:
            self.lost = True
            self.fence(error)
            self.fenced = error
            self._on_loss()

    def statistics(self) -> dict[str, Any]:
        """Counters, JSON-able."""
        return {**super().statistics(), "lost": self.lost}

    async def close(self, timeout: float) -> None:
        """Wait for transactions that are being ended."""
        self._finishing.closed = True
        if self._finishing:
            await asyncio.wait(self._finishing, timeout=timeout)
        with contextlib.suppress(BusrepError, TimeoutError):
            await within(timeout, self.settle())
