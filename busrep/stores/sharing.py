"""What several facts on one event loop share: the question for their IDs, and the transaction of their rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from busrep.errors import BusrepError, CommitUnknown, SequenceWentBack, StatementRefused, Unavailable
from busrep.stores.interface import Appended, Claim, Group

ItemT = TypeVar("ItemT")
Waiting = tuple[ItemT, "asyncio.Future[Any]"]
Facts = Sequence[tuple[str, int]]
Outcome = dict[tuple[str, int], list[bytes]] | None

# Of the rows of a transaction that several facts share: the others wait while it is written.
GROUP_BYTES = 2**20
ROW_BYTES = 64  # of what goes with a row
# Seconds after which an answer may never come, for a link may stand with nobody at its other end; and so many batches
# are waited for at a time.
LATE, MOST_LATE = 1.0, 3
# Transactions, and facts of theirs, that are asked after at a time. All their rows are one answer, of which a fact may
# have a megabyte, and which has to come within fetch_timeout.
OUTCOMES = 100
# What one fact of a group may be refused for, and the others not.
OF_ONE = (StatementRefused, SequenceWentBack)


class Batches(Generic[ItemT]):
    """Serves callers in batches, for each key one batch at a time: whoever comes meanwhile is in the next, which begins
    at once where the answer to the one before is late.

    ``serve`` answers the futures of a batch; those that it leaves, for it was cancelled or interrupted, get
    Unavailable. ``size``: of an item; a batch has more than ``most`` only of one item.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[Waiting[ItemT]]], Awaitable[None]],
        size: Callable[[ItemT], int] = lambda _: 0,
        most: Callable[[], int] = lambda: 0,
    ) -> None:
        self._serve, self._size, self._most = serve, size, most
        self._waiting: dict[Hashable, deque[Waiting[ItemT]]] = {}
        self._tasks: dict[Hashable, set[asyncio.Task[None]]] = {}
        self._late: set[asyncio.Task[None]] = set()  # of these, those that wait for an answer that is late

    async def ask(self, key: Hashable, item: ItemT) -> Any:
        """The answer for an item. Cancelled while it waits for its batch, it is in none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        try:
            self._waiting.setdefault(key, deque()).append((item, answer))
            self._start(key, loop)
            return await answer
        except BaseException:  # of a signal handler's, too: it may be in no batch that is sent later
            answer.cancel()
            raise

    def _start(self, key: Hashable, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that what waits is served, unless as many answers are late as may be waited for."""
        tasks = self._tasks.setdefault(key, set())
        if tasks <= self._late and len(tasks) < MOST_LATE:
            task = loop.create_task(self._run(key, loop), name="busrep batches")
            task.add_done_callback(partial(self._ended, key, loop))
            tasks.add(task)

    def _ended(self, key: Hashable, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        """Here, not in the task: one that is cancelled before it begins runs no line of its own."""
        self._tasks[key].discard(task)
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # the callers have it
        if any(not answer.done() for _, answer in self._waiting.get(key, ())):
            self._start(key, loop)
        elif not self._tasks[key]:
            del self._tasks[key]
            self._waiting.pop(key, None)

    async def _run(self, key: Hashable, loop: asyncio.AbstractEventLoop) -> None:
        task = asyncio.current_task(loop)
        assert task is not None  # noqa: S101
        while self._waiting[key]:
            batch: list[Waiting[ItemT]] = []
            late = loop.call_later(LATE, self._is_late, key, loop, task)
            try:
                self._take(batch, self._waiting[key])
                await self._serve(batch)
            except BaseException as error:
                fail(batch, Unavailable("the store", error))
                raise
            finally:
                late.cancel()
            self._late.discard(task)
            if not self._tasks[key] <= self._late | {task}:
                break  # another one has taken over

    def _is_late(self, key: Hashable, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        self._late.add(task)
        if self._waiting[key]:
            self._start(key, loop)

    def _take(self, batch: list[Waiting[ItemT]], waiting: deque[Waiting[ItemT]]) -> None:
        """Move the next batch from those that wait: first into it, for an interrupt may come between."""
        size, most = 0, self._most()
        while waiting and (not batch or size + self._size(waiting[0][0]) <= most):
            one = waiting[0]
            if not one[1].done():  # else cancelled
                batch.append(one)
                size += self._size(one[0])
            waiting.popleft()


def fail(batch: Sequence[Waiting[Any]], error: BaseException) -> None:
    """Answer those that have no answer."""
    for _, answer in batch:
        if not answer.done():
            answer.set_exception(error)


class Reservations:
    """Reserves for several facts in one round trip.

    An ID is never from a question sent before it was asked for (it must be above all known then).
    """

    def __init__(self, ask: Callable[[str, int, Claim | None], Awaitable[list[int]]]) -> None:
        self.ask = ask
        self._batches = Batches(self._serve)

    async def reserve(self, stream: str, count: int, held: Claim | None) -> list[int]:
        """See `FactLog.reserve`."""
        ids: list[int] = await self._batches.ask((stream, id(held)), (stream, count, held))
        return ids

    async def _serve(self, batch: Sequence[Waiting[tuple[str, int, Claim | None]]]) -> None:
        stream, _, held = batch[0][0]
        try:
            ids = await self.ask(stream, sum(count for (_, count, _), _ in batch), held)
        except Exception as error:
            fail(batch, error)
        else:
            for (_, count, _), answer in batch:
                mine, ids = ids[:count], ids[count:]
                if not answer.done():  # cancelled meanwhile: its IDs stay holes
                    answer.set_result(mine)


class Outcomes:
    """Asks after several transactions in one round trip. ``ask``: of a claim, of (marker, facts) each."""

    def __init__(self, ask: Callable[[Claim, Sequence[tuple[object, Facts]]], Awaitable[Sequence[Outcome]]]) -> None:
        self.ask = ask
        self._batches = Batches(self._serve, lambda item: 1 + len(item[2]), lambda: OUTCOMES)

    async def outcome(self, claim: Claim, marker: object, facts: Facts) -> Outcome:
        """See `FactLog.outcome`."""
        found: Outcome = await self._batches.ask(id(claim), (claim, marker, facts))
        return found

    async def _serve(self, batch: Sequence[Waiting[tuple[Claim, object, Facts]]]) -> None:
        claim = batch[0][0][0]
        try:
            found = await self.ask(claim, [(marker, facts) for (_, marker, facts), _ in batch])
        except StatementRefused as refused:
            if len(batch) == 1:
                fail(batch, refused)
                return
            for one in batch:  # whose transaction it was
                await self._serve([one])
        except Exception as error:
            fail(batch, error)
        else:
            for outcome, (_, answer) in zip(found, batch, strict=True):
                if not answer.done():
                    answer.set_result(outcome)


class Appends:
    """Writes the facts of several callers in one transaction.

    ``write`` writes what was appended, all or none, and raises as `FactLog.append` does.
    """

    def __init__(self, write: Callable[[Claim, Group, Sequence[Appended]], Awaitable[None]]) -> None:
        self.write = write
        self._batches = Batches(self._serve, lambda item: _bytes_of(item[1]), lambda: GROUP_BYTES)

    async def append(self, claim: Claim, appended: Appended) -> None:
        """See `FactLog.append`. Cancelled while its facts are being written: CommitUnknown."""
        try:
            await self._batches.ask(id(claim), (claim, appended))
        except asyncio.CancelledError as cancelled:
            if appended.group is None:
                raise
            raise CommitUnknown(appended.group, cancelled, cancelled=True) from cancelled

    async def _serve(self, batch: Sequence[Waiting[tuple[Claim, Appended]]]) -> None:
        left: list[Sequence[Waiting[tuple[Claim, Appended]]]] = [batch]
        while left:
            # Without those that were given up since: what is said of them is that they were not written.
            if part := [one for one in left.pop() if not one[1].done()]:
                left += await self._send(part)

    async def _send(self, batch: Sequence[Waiting[tuple[Claim, Appended]]]) -> Sequence[Sequence[Waiting[Any]]]:
        """Write a batch and answer it. If it was refused, for one of its facts: its halves, the first one last."""
        claim, group = batch[0][0][0], Group()
        try:
            for (_, appended), _ in batch:
                appended.group = group
            group.under_way = True
            await self.write(claim, group, [appended for (_, appended), _ in batch])
            for _, answer in batch:
                if not answer.done():
                    answer.set_result(None)
        except BusrepError as error:
            if len(batch) > 1 and isinstance(error, OF_ONE):
                group.settled = True  # nothing of it was written
                return batch[len(batch) // 2 :], batch[: len(batch) // 2]
            fail(batch, error)
        except BaseException as error:  # of a signal handler, say: the server did not say it, and may have committed
            fail(batch, CommitUnknown(group, error))
            if not isinstance(error, Exception):
                raise
        finally:
            group.under_way = False
        return ()


def _bytes_of(appended: Appended) -> int:
    every = [payloads for facts_ in appended.facts.values() for _, _, payloads in facts_]
    every += [one.payloads for one in appended.unnumbered.values()]
    return sum(ROW_BYTES + len(payload) for payloads in every for payload in payloads)
