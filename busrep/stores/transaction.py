"""What a transaction of a store promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

FactRows = tuple[int, Sequence[Any], Sequence[bytes]]
"""One fact to insert: its ID, its typed rows, and the same rows as payloads. No rows: nothing is inserted."""


class Group:
    """A transaction in which appended facts are written, as `FactLog.outcome` knows it (9.26).

    ``series``: of the writer's, that it was sent in last. ``under_way``: its answer is being waited for. ``settled``:
    what is not written of it by now never will be.
    """

    def __init__(self) -> None:
        self.series, self.under_way, self.settled = 0, False, False


class Unnumbered:
    """Facts of one row each, of one stream, to which the sequence gives their IDs as they are written.

    ``payloads``: the rows. ``known``: no ID up to here may be given. ``ids``: ascending, once they are written.
    """

    def __init__(self, known: int, payloads: Sequence[bytes]) -> None:
        self.known, self.payloads = known, payloads
        self.ids: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.payloads)


class Appended:
    """Facts that are written in a transaction of their own: {stream: facts}. Their streams are in busrep's table.

    ``unnumbered``: besides them, those that have no IDs yet. ``group``: what they were sent with; None before that.
    """

    def __init__(
        self, facts: Mapping[str, Sequence[FactRows]], unnumbered: Mapping[str, Unnumbered] | None = None
    ) -> None:
        self.facts, self.unnumbered = facts, unnumbered or {}
        self.group: Group | None = None


ENDED_INSIDE = "the transaction was ended inside the block of bus.write(), which ends it itself, after the block"


@attrs.frozen
class SavedAt:
    """The saved position behind which a batch begins, of the log of ``epoch``."""

    reader: str
    stream: str
    writer: str
    position: int
    epoch: str


class AsyncTransaction(Protocol):
    """One database transaction that holds the claim, so that no successor can start before it ends.

    One for the effects of a reader's handler, which works on ``connection``, holds no claim, and is given no facts.
    """

    @property
    def connection(self) -> Any:
        """The driver's connection, once begun; None on the memory store."""

    @property
    def joined(self) -> bool:
        """Whether the caller ends the transaction, which was open on its connection already: `commit` and `rollback`
        leave it alone."""

    @property
    def marker(self) -> object:
        """Identifies the transaction for `FactLog.outcome`, once `begin` returned."""

    @property
    def ended(self) -> bool:
        """Whether code of the application's has ended the transaction; of a connection that is lost it is not known."""

    @property
    def claimed(self) -> bool:
        """Whether it has held the claim, once it has ended."""
        return True

    @property
    def reserves(self) -> bool:
        """Whether `begin` gives the IDs, for the transaction is the caller's. Only its COMMIT makes them its own: on
        SQLite ROLLBACK takes them back, on a server a crash before anything was committed behind it."""

    @property
    def exclusive(self) -> bool:
        """Whether nothing else can be written while it is open: the caller has SQLite's one write lock."""

    def hand_out(self) -> Any:
        """The connection, for code of the application's: it may end the transaction itself, which is looked at then."""

    async def begin(self, ids: Mapping[str, int] = {}) -> Mapping[str, Sequence[int]]:
        """Begin, or join, and lock the claim. ``ids``: how many IDs of which streams, of one that `reserves`; returned
        by stream, ascending. Raises WriterFenced, ConfigError, Unavailable."""

    async def insert(self, stream: str, facts: Sequence[FactRows]) -> None:
        """Write the rows of these facts. They may be sent as late as with the next ``execute`` or ``commit``."""

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Run the caller's own statement, in the driver's placeholder style; the driver's errors of it pass through."""

    async def commit(self) -> None:
        """Commit; nothing when joined, but what was inserted has been sent. Raises CommitUnknown; any other exception
        means that nothing was committed, and rollback() is still due."""

    async def rollback(self) -> bool:
        """Roll back; nothing when joined, or when the transaction has ended. Never raises for a lost connection:
        the server rolls back by itself.

        Returns whether it is known that nothing was committed: code inside the fact's block may have done that."""
