"""What a store on a database server has in common, whatever driver speaks to it: its transaction, and what errors mean.

PostgresStore and the simulated store fill in the hooks; which statement goes out when, and what a lost answer means,
stands here once.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from busrep import errors
from busrep.errors import BusrepError, CommitUnknown, ConfigError, StatementRefused, Unavailable
from busrep.stores import claims, plans, schema
from busrep.stores.interface import Claim, FactRows, Group
from busrep.stores.planned import PlannedStore, PlannedTransaction
from busrep.stores.plans import Control, Plan, Row, Signal, Step, T, only
from busrep.stores.postgres.dialect import ANOTHER, PostgresDialect
from busrep.stores.transaction import ENDED_INSIDE

# The server ends the session with these: idle_in_transaction_session_timeout, transaction_timeout, shutdowns, crashes,
# a dropped database, idle_session_timeout. Drivers do not count all of them as operational.
SESSION_ENDED = frozenset({"25P03", "25P04", "57P01", "57P02", "57P03", "57P04", "57P05"})


def by_state(error: Exception, state: str | None, *, operational: bool) -> Exception:
    """The signal or error of busrep that this driver error is: StatementRefused when it is the statement's fault.

    ``state``: its SQLSTATE; ``operational``: whether the driver says that it is not the statement's fault, or closed
    the connection after it.
    """
    if state == "55P03":
        return plans.Locked(error)
    if state == "40001":
        return plans.SerializationFailed(error)
    if state in ("42P01", "42703"):
        return plans.NoSuchTable(error)
    if state == "42501":  # missing, or revoked: like a revoked ACL of Redis, it may be granted while we try
        return Unavailable(
            "PostgreSQL", f"{str(error).strip()}; 'Rights in PostgreSQL' in docs/guides/deploy.md lists what is needed"
        )
    # 25006: a write on a replica (after a failover that went elsewhere).
    if operational or state == "25006" or state in SESSION_ENDED:
        return Unavailable("PostgreSQL", error)
    return StatementRefused("PostgreSQL", error)


def final(error: Signal) -> Exception:
    """What a signal that no plan wanted is to the caller."""
    if isinstance(error, plans.NoSuchTable) and "busrep_" in str(error.cause):
        return errors.SchemaError(None, schema.VERSION)
    if isinstance(error, plans.NoSuchTable):
        return StatementRefused("PostgreSQL", error.cause)
    # A lock; or a conflict: with another transaction, or of a question to a replica with what that replays.
    return Unavailable("PostgreSQL", error.cause)


class ServerStore(PlannedStore):
    """An `AsyncStore` on a PostgreSQL server, without its driver.

    A driver says in ``serialization_failure`` and ``unknown_marker`` which of its errors are SQLSTATE 40001 and 22023.
    Its connections have ``closed`` (it has seen that they are gone) and ``autocommit`` (it does not begin by itself).
    """

    dialect: PostgresDialect
    where: str  # for a person: which server
    serialization_failure: type[Exception]
    unknown_marker: type[Exception]
    _background: set[asyncio.Future[Any]]

    @abc.abstractmethod
    async def run_plan(self, connection: Any, plan: Plan[T], within: float | None = None) -> T:
        """Run a plan on a connection; the driver's errors as busrep's. ``within``: seconds for the answer to a step."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Replace the connections that are not in use: the server went away, they are dead as well."""

    def in_background(self, work: asyncio.Future[Any]) -> None:
        """Let it end by itself; close() waits for it, of a real server for ``shutdown_timeout``."""
        self._background.add(work)
        work.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._background.discard(work)
        if not work.cancelled():
            work.exception()  # looked at: what matters of it was reported elsewhere

    async def run_on(self, connection: Any, plan: Plan[T], within: float | None = None) -> T:
        """Run a plan on a connection of the store's; see `run_plan`. Errors name the server."""
        try:
            return await self.run_plan(connection, plan, within)
        except (Unavailable, StatementRefused) as error:
            if connection.closed:
                self.renew()
                raise plans.Unanswered(self.where, error.reason) from error
            raise self.located(error) from error

    def located(self, error: Exception) -> Exception:
        """The error as it is told: which server it is of."""
        if isinstance(error, Unavailable):
            return type(error)(self.where, error.reason)
        return StatementRefused(self.where, error.reason) if isinstance(error, StatementRefused) else error

    @property
    def append_wait(self) -> float | None:
        # So that the server says within fetch_timeout that it waits for a lock: else what was appended is in doubt.
        # There are two, the series' and the claim's; that it waits for both is rare.
        return self.settings.fetch_timeout / 2

    async def write(self, plan: Plan[T], wait: float | None = None) -> T:
        return await self.read(plan, wait or 0.0)

    async def outcome(
        self, claim: Claim, marker: object, facts_: Sequence[tuple[str, int]], above: Mapping[str, int] | None = None
    ) -> dict[tuple[str, int], list[bytes]] | None:
        try:
            return await super().outcome(claim, marker, facts_, above)
        except StatementRefused as refused:
            if isinstance(marker, Group) or not isinstance(refused.reason, self.unknown_marker):
                raise
            # "in the future": the server crashed before it had written that transaction ID. It is gone, and the rows
            # under its IDs, if there are any, are those of whoever was given these again.
            await super().outcome(claim, None, ())
            return {}

    async def rolled_back(self, marker: object) -> bool:
        try:
            return await super().rolled_back(marker)
        except StatementRefused as refused:
            if not isinstance(refused.reason, self.unknown_marker):
                raise
            return True  # see `outcome`


class ServerTransaction(PlannedTransaction):
    """An `AsyncTransaction` on a connection of the store's, or the caller's, without the driver."""

    store: ServerStore

    def __init__(self, store: ServerStore, claim: Claim, connection: Any) -> None:
        super().__init__(store, claim, connection)
        self.joined = self.reserves = connection is not None and not self._idle()
        self._marker: object = None
        self._own = False  # whether it has rows for a table of the application's

    async def insert(self, stream: str, facts_: Sequence[FactRows]) -> None:
        self._own = self._own or self.store.dialect.backing(stream).own
        await super().insert(stream, facts_)

    @abc.abstractmethod
    async def _take(self) -> Any:
        """A connection of the store's. Raises Unavailable."""

    @abc.abstractmethod
    async def _put(self, connection: Any) -> None:
        """Give it back to the store."""

    @abc.abstractmethod
    def _idle(self) -> bool:
        """Whether no transaction is open on the connection."""

    @abc.abstractmethod
    async def _execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The caller's statement, in the driver's own way."""

    async def _run(self, plan: Plan[T], within: float | None = None) -> T:
        if self._callers:
            return await self.store.run_plan(self.connection, plan, within)
        return await self.store.run_on(self.connection, plan, within)

    @property
    def marker(self) -> object:
        """What the server knows the transaction by; None until it has begun."""
        return self._marker

    @property
    def ended(self) -> bool:
        return not self.connection.closed and self._idle()

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:
        if self.connection is None:
            self.connection = await self._take()
        begin = (Control.BEGIN,) if self.connection.autocommit and not self.joined else ()  # else the driver sends it
        try:
            self._marker, *given = await self._lock(*begin, ids=ids)
        except BaseException as error:
            await self.rollback()
            if isinstance(error, Unavailable) and isinstance(error.reason, self.store.serialization_failure):
                # The claim was moved; unless, in the caller's SERIALIZABLE transaction, the failure came from
                # elsewhere: the claim as it is now tells.
                await self.store.check_claim(self.claim)
            raise
        found = zip(ids.items(), given[1:], strict=True)
        return {stream: [one] if count == 1 else one for (stream, count), one in found}

    async def _lock(self, *begin: Control, ids: Mapping[str, int] = {}) -> Row:
        """Hold the claim until the transaction's end. Returns what `hold` does."""
        try:
            return await self._run(self.hold(*begin, ids=ids), self._lock_wait)
        except errors.WriterFenced:
            if self._callers:
                await self.store.check_claim(self.claim)
                raise ConfigError(
                    f"connection= does not see that {self.claim.writer!r} is a writer: it is of another database than "
                    "the bus's store, or its transaction began before the bus was opened"
                ) from None
            raise

    @property
    def _lock_wait(self) -> float:
        """Seconds for a statement that locks the claim: one that holds the lock gives up in time."""
        settings = self.store.settings
        return settings.fetch_timeout + (0.0 if self.claim is claims.NO_CLAIM else settings.claim_timeout)

    async def _flush(self, *last: Control, first: Sequence[Step] = (), within: float | None = None) -> None:
        steps: tuple[Step, ...] = (*first, *self._take_pending(), *last)
        if steps:
            await self._run(only(*steps), within)

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`; with the connection's own kind of cursor."""
        self._handed_out = True
        await self._flush()
        return await self._execute(sql, params)

    async def commit(self) -> None:
        if self.joined:
            await self._leave_to_caller()
            return
        connection = self.connection
        try:
            await self._commit_in_time()
        except CommitUnknown:  # for the transaction had been ended before, or nobody waits for COMMIT any more
            raise
        except self.failures as error:
            # What is not busrep's came from code of the application's that the driver calls: the server did not say it.
            if isinstance(error, BusrepError) and not connection.closed:
                raise  # the server refused, and said so: nothing was committed
            await self.rollback()
            raise CommitUnknown(self.marker, error) from error
        await self._give_back()

    async def _commit_in_time(self) -> None:
        """Commit. CommitUnknown when this is cancelled, or has no answer within ``fetch_timeout``."""
        if not self.store.on_loop:
            await self._commit_checked(self.store.settings.fetch_timeout)
            return
        committing = asyncio.ensure_future(self._commit_checked())
        try:
            async with asyncio.timeout(self.store.settings.fetch_timeout):
                await asyncio.shield(committing)
        except asyncio.CancelledError as cancelled:
            # COMMIT goes on; cancelling it now would leave its outcome just as unknown.
            self.store.in_background(asyncio.ensure_future(self._after(committing)))
            raise CommitUnknown(self.marker, cancelled, cancelled=True) from cancelled
        except TimeoutError as error:
            committing.cancel()  # the link may stand for ever with nobody at its other end: the driver gives it up
            self.store.in_background(asyncio.ensure_future(self._after(committing)))
            silence = TimeoutError(f"no answer within {self.store.settings.fetch_timeout:g} s")
            raise CommitUnknown(self.marker, silence) from error

    async def _commit_checked(self, within: float | None = None) -> None:
        """Insert and commit. CommitUnknown when code inside the block has ended the transaction: the claim is not held
        any more, and rows of a fact that somebody else has stepped over must not be written. Another transaction may
        have begun since: the server looks at that before it inserts."""
        ended = not self.connection.closed and self._idle()  # that it is closed COMMIT will show
        try:
            if not ended:
                # A late COMMIT is not cancelled. So the server has to say, and in time, that it waits for a lock.
                first = [*self.store.dialect.lock_timeout(self.store.settings.fetch_timeout / 2)]
                if self._handed_out and self.marker is not None:
                    first.append(self.store.dialect.still_in(self.marker))
                await self._flush(Control.COMMIT, first=first, within=within)
        except StatementRefused as refused:
            ended = ANOTHER in str(refused)
            if not ended:
                raise
        if ended:
            await self.rollback()
            raise CommitUnknown(self.marker, ConfigError(ENDED_INSIDE))

    async def _leave_to_caller(self) -> None:
        """Insert; the transaction's end is the caller's. In the caller's hands the lock may be gone: with a savepoint
        rolled back, or with the whole transaction. What is inserted without it would be rows of a writer whose IDs
        somebody else may have ended meanwhile. So each INSERT into busrep's table asks whether it is there, and answers
        with what it wrote: where that is nothing, a question tells why, and takes it again. An application's table may
        have triggers and rules, which leave nothing to answer with: it is asked before."""
        pending = self._take_pending()
        held = [] if self._own else [self.store.dialect.while_held(one, self.claim, self.marker) for one in pending]
        for _ in range(2):
            if held:
                written = await self._run(only(*held), self._lock_wait)
                if all(written):
                    return
                if any(written):
                    break
            if (await self._lock())[0] != self.marker:
                raise ConfigError(
                    "the transaction of connection= ended inside the block of bus.write(): end it after the block"
                )
            if not held:
                await self._run(only(*pending))
                return
        raise ConfigError("busrep_facts took no row: it has a trigger, or a rule, that keeps rows out. Remove it")

    async def _after(self, committing: asyncio.Future[None]) -> None:
        await asyncio.wait([committing])
        if committing.cancelled() or committing.exception() is not None:
            await self.rollback()
        else:
            await self._give_back()

    async def rollback(self) -> bool:
        """See `AsyncTransaction`. Where code of the application's had the connection it may have sent COMMIT, and have
        begun another transaction, or closed the connection, as psycopg's `with connection:` does."""
        self._take_pending()
        if self.joined or self.connection is None:
            return True
        closed = self.connection.closed
        known = self.marker is None or not self._handed_out
        try:
            if not closed and not self._idle():
                # Whatever goes wrong, the server rolls back when the connection ends.
                with contextlib.suppress(BusrepError):
                    await self._run(only(Control.ROLLBACK), self.store.settings.fetch_timeout)
        finally:  # a pool throws away one that is in the middle of a statement
            await self._give_back()
        return known

    async def _give_back(self) -> None:
        if not self._callers and self.connection is not None:
            connection, self.connection = self.connection, None
            await self._put(connection)
