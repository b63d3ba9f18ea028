"""A fact's own transaction, which begins as late as it can.

A block that runs no statement of the application's needs none while it is open: its rows are appended when it ends, in
a transaction that many facts share and that takes one round trip. The first statement begins a real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from busrep.errors import BusrepError, CommitUnknown, ConfigError, Unavailable
from busrep.stores.interface import Appended, AsyncTransaction, Claim, FactLog, FactRows, Unnumbered

OVER = "the block of bus.write() ended before a statement of it had begun: wait for all of them inside the block"
NOT_BEGUN = "the fact's transaction has not begun: call 'await fact.begin()' before fact.connection"


class DeferredTransaction(AsyncTransaction):
    """An `AsyncTransaction` on a connection of the store's. ``own``: the streams with a table of the application's,
    whose rows are in no appended transaction. ``unnumbered``: by stream, facts that get their IDs as they are written;
    a transaction that was begun has none."""

    joined = False
    reserves = exclusive = False

    def __init__(self, store: FactLog, claim: Claim, own: Set[str]) -> None:
        self._store, self._claim, self._own = store, claim, own
        self._begun: AsyncTransaction | None = None
        self._over = False  # the block has ended
        # Why it did not begin for a statement, which was not run. Not the exception: its traceback holds the block.
        self._failed: str | None = None
        self._facts: dict[str, list[FactRows]] = {}
        self.unnumbered: dict[str, Unnumbered] = {}
        self._appended: Appended | None = None
        self._written = False

    @property
    def begun(self) -> bool:
        """Whether there is a transaction."""
        return self._begun is not None

    @property
    def claimed(self) -> bool:
        """See `AsyncTransaction`."""
        return self.begun or self._written

    @property
    def connection(self) -> Any:
        """See `AsyncTransaction`; None also before it has begun."""
        return None if self._begun is None else self._begun.connection

    @property
    def marker(self) -> object:
        """Of what was begun; else of what is appended."""
        if self._begun is not None:
            return self._begun.marker
        return None if self._appended is None else self._appended.group

    @property
    def ended(self) -> bool:
        """See `AsyncTransaction`."""
        return self._begun is not None and self._begun.ended

    def hand_out(self) -> Any:
        """See `AsyncTransaction`. Raises ConfigError before it has begun, and Unavailable where it could not begin."""
        self._check_not_failed()
        if self._begun is None:
            raise ConfigError(NOT_BEGUN)
        return self._begun.hand_out()

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:  # noqa: ARG002
        """See `AsyncTransaction`; later. It reserves nothing."""
        return {}

    async def begin_now(self) -> None:
        """Begin, unless it has; one caller at a time. Raises as `AsyncTransaction.begin` does, and ConfigError when the
        block ends meanwhile: a statement of it was not waited for. After an error nothing of the fact is written, also
        where the application goes on: as in a transaction in which a statement has failed."""
        self._check_not_failed()
        if self._begun is None:
            try:
                await self._begin(inside=True)
            except BaseException as error:
                self._failed = repr(error)
                raise

    def _check_not_failed(self) -> None:
        if self._failed is not None:
            reason = f"a statement was not run, for it could not begin: {self._failed}. Write it again"
            raise Unavailable("the transaction of the fact", reason)

    async def _begin(self, *, inside: bool) -> None:
        """``inside``: for a statement of the block's, which may have ended when the transaction has begun."""
        transaction = self._store.transaction(self._claim)
        try:
            await transaction.begin()
            if inside and self._over:
                raise ConfigError(OVER)
            self._begun = transaction
        except BaseException:  # an interrupt may have come behind it
            if self._begun is transaction:
                self._begun = None
            await transaction.rollback()
            raise

    def check_alone(self) -> None:
        """Raise ConfigError where the calling task holds what an append would wait for."""
        if self._begun is None:
            self._store.check_append()

    async def insert(self, stream: str, facts: Sequence[FactRows]) -> None:
        """See `AsyncTransaction`."""
        self._facts.setdefault(stream, []).extend(facts)

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """See `AsyncTransaction`; begins first."""
        await self.begin_now()
        assert self._begun is not None  # noqa: S101
        return await self._begun.execute(sql, params)

    async def commit(self) -> None:
        """See `AsyncTransaction`; what did not begin is appended. Raises WriterFenced as well, and Unavailable where it
        could not begin for a statement of the block's."""
        self._check_not_failed()
        self._over = True
        if self._begun is None and not self._own.isdisjoint(self._facts):
            await self._begin(inside=False)
        if self._begun is not None:
            for stream, facts in self._facts.items():
                await self._begun.insert(stream, facts)
            await self._begun.commit()
        elif self._facts or self.unnumbered:
            self._appended = Appended(self._facts, self.unnumbered)
            try:
                await self._store.append(self._claim, self._appended)
            except BusrepError as error:
                if not isinstance(error, CommitUnknown):
                    self._appended = None
                raise
            self._written = True

    async def rollback(self) -> bool:
        """See `AsyncTransaction`."""
        self._over = True
        if self._begun is not None:
            return await self._begun.rollback()
        return self._appended is None
