"""`DeferredTransaction` by itself: what begins at the same time as its block ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from busrep.errors import ConfigError, StatementRefused, Unavailable
from busrep.runtime.deferred import DeferredTransaction
from busrep.stores.interface import Claim


class Transaction:
    """One that begins when ``go`` is set. ``done``: what became of it."""

    marker, ended = "marker", False
    fails: Exception | None = None

    def __init__(self) -> None:
        self.go, self.done, self.inserted = asyncio.Event(), "", 0

    async def begin(self) -> None:
        await self.go.wait()
        if self.fails is not None:
            raise self.fails

    async def insert(self, stream: str, facts: Any) -> None:
        self.inserted += len(facts)

    async def execute(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]:
        return []

    async def commit(self) -> None:
        self.done = "committed"

    async def rollback(self) -> bool:
        self.done = "rolled back"
        return True


class Log:
    """A `FactLog` that gives transactions, and keeps them."""

    def __init__(self) -> None:
        self.given: list[Transaction] = []

    def transaction(self, claim: Claim) -> Transaction:
        self.given.append(Transaction())
        return self.given[-1]


@pytest.mark.parametrize("first", ["statement", "block"])
def test_a_statement_that_nobody_waits_for_leaves_the_block_s_own_transaction(first: str) -> None:
    """Rows of an application's own table are inserted in a transaction that begins with the block's end."""

    async def work() -> None:
        log: Any = Log()
        deferred = DeferredTransaction(log, Claim("w1", 1, "", {}, {}, {}), {"orders"})
        await deferred.insert("orders", [(1, [object()], [b"1"])])
        statement = asyncio.ensure_future(deferred.execute("SELECT 1"))
        await asyncio.sleep(0)
        end = asyncio.ensure_future(deferred.commit())
        await asyncio.sleep(0)
        of_statement, of_block = log.given
        for transaction, task in (
            ((of_statement, statement), (of_block, end))
            if first == "statement"
            else ((of_block, end), (of_statement, statement))
        ):
            transaction.go.set()
            with contextlib.suppress(ConfigError):
                await task
        with pytest.raises(ConfigError, match="wait for all of them"):
            await statement
        assert (of_statement.done, of_statement.inserted) == ("rolled back", 0)
        assert (of_block.done, of_block.inserted) == ("committed", 1)
        assert deferred.marker == "marker"

    asyncio.run(work())


@pytest.mark.parametrize("ends", ["refused", "cancelled"])
def test_a_fact_of_which_a_statement_was_not_run_is_not_written(ends: str) -> None:
    """Its application goes on: the rows would tell of what is not in the database."""

    async def work() -> None:
        log: Any = Log()
        deferred = DeferredTransaction(log, Claim("w1", 1, "", {}, {}, {}), {"orders"})
        statement = asyncio.ensure_future(deferred.execute("INSERT"))
        await asyncio.sleep(0)
        if ends == "refused":
            log.given[0].fails = StatementRefused("the database", "too many connections")
            log.given[0].go.set()
        else:
            statement.cancel()
        await asyncio.wait([statement])
        await deferred.insert("orders", [(1, [object()], [b"1"])])
        for again in (deferred.execute("INSERT"), deferred.commit()):
            with pytest.raises(Unavailable, match="a statement was not run.*Write it again"):
                await again
        assert [one.done for one in log.given] == ["rolled back"]
        assert await deferred.rollback()

    asyncio.run(work())


def test_why_it_could_not_begin_does_not_keep_the_block_that_it_failed_in() -> None:
    """A traceback holds its frames, and so the fact: nobody would find out that it was given up."""

    class Block:
        """What the frame of the failed statement has."""

    async def fail(transaction: DeferredTransaction) -> weakref.ref[Block]:
        block = Block()
        with contextlib.suppress(Unavailable):
            await transaction.execute("SELECT 1")
        return weakref.ref(block)

    async def work() -> None:
        log: Any = Log()
        log.transaction = unavailable
        claim: Any = None
        transaction = DeferredTransaction(log, claim, set())
        gc.disable()
        try:
            assert (await fail(transaction))() is None
        finally:
            gc.enable()
        with pytest.raises(Unavailable, match="no connection is left"):
            await transaction.commit()
        with pytest.raises(Unavailable, match="no connection is left"):
            transaction.hand_out()

    asyncio.run(work())


def unavailable(_: Claim) -> Any:
    raise Unavailable("the database", "no connection is left")
