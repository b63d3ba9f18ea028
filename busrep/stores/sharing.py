"""What several facts on one event loop share: the question for their IDs, and the transaction of their rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from busrep.errors import CommitUnknown, StatementRefused
from busrep.stores.interface import Appended, Claim, FactRows

# Of the rows of a transaction that several facts share: the others wait while it is written.
GROUP_BYTES = 2**20
ROW_BYTES = 64  # of what goes with a row


class Reservations:
    """Reserves for several facts in one round trip: whoever asks while a question is on its way joins the next.

    An ID is never from a question sent before it was asked for (it must be above all known then).
    """

    def __init__(self, ask: Callable[[str, int], Awaitable[list[int]]]) -> None:
        self.ask = ask
        self._waiting: dict[str, list[tuple[int, asyncio.Future[list[int]]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def reserve(self, stream: str, count: int) -> list[int]:
        """``count`` IDs, ascending."""
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(stream, []).append((count, answer))
        if stream not in self._tasks:
            self._tasks[stream] = asyncio.create_task(self._serve(stream), name=f"busrep reserve {stream}")
        return await answer

    async def _serve(self, stream: str) -> None:
        try:
            while waiting := self._waiting.pop(stream, None):
                waiting = [(count, answer) for count, answer in waiting if not answer.done()]
                total = sum(count for count, _ in waiting)
                try:
                    ids = await self.ask(stream, total) if total else []
                except Exception as error:
                    for _, answer in waiting:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                for count, answer in waiting:
                    mine, ids = ids[:count], ids[count:]
                    if not answer.done():  # cancelled meanwhile: its IDs stay holes
                        answer.set_result(mine)
        finally:
            del self._tasks[stream]


class Appends:
    """Writes the facts of several callers in one transaction: whoever comes while one is on its way joins the next.

    ``write`` writes facts by stream, all or none, and raises as `FactLog.append` does.
    """

    def __init__(self, write: Callable[[Claim, Appended], Awaitable[None]]) -> None:
        self.write = write
        self._waiting: dict[int, deque[tuple[Claim, Appended, asyncio.Future[None]]]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def append(self, claim: Claim, appended: Appended) -> None:
        """See `FactLog.append`. Cancelled, the facts are written all the same: CommitUnknown."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = id(claim)
        self._waiting.setdefault(key, deque()).append((claim, appended, done))
        if key not in self.tasks:
            self.tasks[key] = asyncio.create_task(self._serve(key), name=f"busrep append {claim.writer}")
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError as cancelled:
            done.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise CommitUnknown(appended, cancelled, cancelled=True) from cancelled

    async def _serve(self, key: int) -> None:
        try:
            while waiting := self._waiting[key]:
                group = [waiting.popleft()]
                size = _bytes_of(group[0][1])
                while waiting and (size := size + _bytes_of(waiting[0][1])) <= GROUP_BYTES:
                    group.append(waiting.popleft())
                await self._write(group)
        finally:
            del self.tasks[key], self._waiting[key]

    async def _write(self, group: Sequence[tuple[Claim, Appended, asyncio.Future[None]]]) -> None:
        merged = _merged([appended for _, appended, _ in group])
        try:
            await self.write(group[0][0], merged)
        except CommitUnknown as error:
            for _, appended, done in group:
                appended.series = merged.series
                done.set_exception(CommitUnknown(appended, error.reason))
        except Exception as error:
            if len(group) > 1 and isinstance(error, StatementRefused):  # one of them is at fault
                for one in group:
                    await self._write([one])
                return
            for _, _, done in group:
                done.set_exception(error)
        else:
            for _, _, done in group:
                done.set_result(None)


def _bytes_of(appended: Appended) -> int:
    every = (payloads for facts_ in appended.facts.values() for _, _, payloads in facts_)
    return sum(ROW_BYTES + len(payload) for payloads in every for payload in payloads)


def _merged(group: Sequence[Appended]) -> Appended:
    if len(group) == 1:
        return group[0]
    merged: dict[str, list[FactRows]] = {}
    for one in group:
        for stream, facts_ in one.facts.items():
            merged.setdefault(stream, []).extend(facts_)
    return Appended(merged)
