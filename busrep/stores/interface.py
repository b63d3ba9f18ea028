"""What a store is: the values it takes and gives, and the interface that the runtimes consume and the stores implement.

A store has one or several of these roles, each a Protocol below: `FactSource` (what a reader follows), `FactLog` (what
a writer needs), `ReaderPositions` (what a durable reader saves), `StoreAdmin` (``busrep db``), and
`busrep.core.snapshots.SnapshotSource`. An `AsyncStore` has all of them: memory, SQLite and PostgreSQL; one conformance
suite holds them to this file. A process that serves its table over HTTP is a source alone.

IDs and positions are 64-bit integers, positive inside (also for negative streams); times are seconds; payloads are rows
as compact JSON bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import attrs

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.core.snapshots import Agreement, AppliedParts, BootstrapProgress, SnapshotSource
from busrep.row_types import Fields
from busrep.stores.registry import Claim as Claim
from busrep.stores.registry import KnownWriter as KnownWriter
from busrep.stores.registry import Newest as Newest
from busrep.stores.registry import Registered as Registered
from busrep.stores.registry import claims_of as claims_of
from busrep.stores.registry import silence_of as silence_of
from busrep.stores.transaction import Appended as Appended
from busrep.stores.transaction import AsyncTransaction as AsyncTransaction
from busrep.stores.transaction import FactRows as FactRows
from busrep.stores.transaction import Group as Group
from busrep.stores.transaction import SavedAt as SavedAt
from busrep.stores.transaction import Unnumbered as Unnumbered

RoleT = TypeVar("RoleT")


MIXED = "several"
"""The epoch of saved positions that are not all of one log: some process has not noticed a restore yet."""


@attrs.frozen
class ReaderState:
    """Saved positions of a durable reader, {(stream, writer): position}; ``epoch`` is None for an unknown reader, and
    `MIXED` while its positions are of several logs.

    ``streams``: those it has read before, also where no writer had written yet. A writer of such a stream that is not
    among the positions joined since.

    ``bootstraps``: of each stream the `BootstrapProgress.id` of the last one that some process of this name began; what
    was handled before that one began is void. ``loading``: streams of which it is unfinished; their positions are where
    the snapshot ends, of which the target has a part.
    """

    epoch: str | None
    positions: Mapping[tuple[str, str], int]
    streams: frozenset[str] = frozenset()
    bootstraps: Mapping[str, str] = attrs.field(factory=dict)
    loading: frozenset[str] = frozenset()


@attrs.frozen
class DeadLetter:
    """Rows a handler could not handle, kept for a person. ``age``: seconds since then, by the database's clock."""

    reader: str
    stream: str
    writer: str
    tokens: Sequence[int]
    payloads: Sequence[bytes]
    error: str
    age: float


@attrs.frozen
class StoredStream:
    """What the store keeps of a stream.

    ``table``: the application's; None: busrep's own. ``fields``: of its rows; None: not known.
    """

    table: str | None
    fields: Fields | None


class Store(Protocol):
    """What every store has. Any method of any role may raise Unavailable; see errors.py for the rest."""

    async def open(self) -> None:
        """Connect, and check the schema version and the row classes: SchemaError, RowClassMismatch, Unavailable."""

    async def close(self) -> None:
        """Close all connections; waits for commits that are under way. May be called twice."""


class FactSource(Store, Protocol):
    """The read side of a fact log: what a reader needs to follow streams, over SQL or over HTTP.

    A source may also have these attributes. ``foreign_writers``: it serves another system's writers, and has no
    registry of them. ``serves_resettable``: it serves streams that are kept in memory, too. Both are False if
    missing.
    """

    async def epoch(self) -> str:
        """Identity of the fact log: 32 lowercase hex digits."""

    async def sequence(self, stream: str, epoch: str | None = None) -> int | None:
        """The highest ID that the stream's sequence gave: no position above it can be of this log. None when this
        store cannot know: a replica, which may lag, or a log of another epoch than ``epoch``."""

    async def fetch(self, question: FetchUpdates) -> UpdatesPage:
        """One page of catch-up from one snapshot: PositionTooOld."""

    async def known(self, epoch: str | None = None) -> list[KnownWriter]:
        """Every (stream, writer) ever registered, from one snapshot. Unavailable when the log is of another epoch than
        ``epoch``: several servers may answer, and one of them may not have seen a restore yet."""

    async def newest(self, stream: str) -> Newest | None:
        """The highest rows of a stream. None when this store cannot know: a replica, which may lag, or a source of
        pages alone."""


class FactLog(FactSource, Protocol):
    """The write side: what a writer needs, and whoever finishes one that is silent."""

    async def claim(self, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None) -> Claim:
        """Win a writer's name and register it: ClaimBlocked, PositionsAheadOfTable, ConfigError.

        ``again``: only if the name is still of this incarnation of it, or was finished for its silence and nobody has
        claimed it since: else WriterFenced. So a process may win back its own name, and never takes another's. After
        Unavailable it may have been won, and finished since: ask again with the same ``again``. WriterFenced of a
        higher incarnation: it was won under that, and finished before the answer.
        """

    async def reserve(self, stream: str, count: int, held: Claim | None = None) -> list[int]:
        """``count`` new IDs, ascending, committed at once. ``held``: WriterFenced when this claim does not stand."""

    async def append(self, claim: Claim, appended: Appended) -> None:
        """Write facts in a transaction of their own, or of several calls. WriterFenced when the claim does not stand,
        SequenceWentBack for known IDs; after CommitUnknown `outcome` tells, as it does after what is no BusrepError, an
        interrupt's; after any other none is written."""

    def check_append(self) -> None:
        """Raise ConfigError where the calling task has a transaction open that `append` would wait for."""

    def transaction(self, claim: Claim, connection: Any = None) -> AsyncTransaction:
        """A transaction on busrep's connection or the caller's. Call it *before* reserving: ConfigError when the
        caller's connection cannot be used (SQLite: it is in a transaction already, and holds the one write lock)."""

    async def outcome(
        self, claim: Claim, marker: object, facts: Sequence[tuple[str, int]], above: Mapping[str, int] | None = None
    ) -> dict[tuple[str, int], list[bytes]] | None:
        """What an unknown COMMIT left: None while the transaction may still be open, else the payloads the table holds
        by (stream, id), and of the streams ``above`` those of all own facts above that ID. A fact that is missing was
        aborted. Of appended facts it first ends the series that they were sent in, in a transaction (9.26). Raises
        Unavailable, and WriterFenced when the claim does not stand: the table may be another one."""

    async def rolled_back(self, marker: object) -> bool:
        """Whether a transaction that has ended is known to have been rolled back. Raises Unavailable."""

    async def heartbeat(self, claim: Claim, positions: Mapping[str, int], *, registry: bool = True) -> Registered:
        """Store proven own positions, one at least, and a sign of life, only while the claim stands: else WriterFenced.

        A position above the stream's sequence is logged, and the sequence's value stored in its place. Returns the
        sequences and, if that is wanted, the ``registry``, read on the primary while the claim was locked.
        """

    async def check_claim(self, claim: Claim) -> None:
        """Read the claim on the primary: WriterFenced."""

    async def finish(self, writer: str, incarnation: int, *, timeout: float) -> dict[str, int]:
        """Fence a silent writer and store its final position per stream; idempotent. {} when a newer claim lives.
        ClaimBlocked while one of its transactions is open."""


class ReaderPositions(Store, Protocol):
    """Where a durable reader saves what it has handled, and its effects if it likes."""

    async def register_reader(
        self,
        reader: str,
        positions: Mapping[tuple[str, str], int],
        epoch: str,
        *,
        oldest: Collection[tuple[str, str]] = (),
        beside_log: bool = False,
    ) -> None:
        """Insert the rows that saves update, {(stream, writer): position}; leaves existing ones alone. A writer ""
        notes that the stream is read. Of a stream whose bootstrap is unfinished nothing is inserted.

        Of those in ``oldest`` the position is the floor that the caller knew. If this store keeps the log of ``epoch``,
        the floor of this very moment is taken: what was pruned since is nothing that this reader had begun to read.
        ``beside_log``: this store keeps the log, too; Unavailable where it is not the one of ``epoch`` any more."""

    async def load_reader(self, reader: str) -> ReaderState:
        """The saved positions."""

    async def save_reader(
        self,
        reader: str,
        changes: Sequence[tuple[str, str, int, int]],
        epoch: str,
        connection: Any = None,
        *,
        bootstraps: Mapping[str, str] | None = None,
    ) -> None:
        """Move saved positions, (stream, writer, old, new) each, all or none: ReaderMoved, and where this store keeps
        their log, PositionsAheadOfTable for one above its stream's sequence. With the caller's connection in the
        caller's transaction; on ReaderMoved the caller rolls back.

        ReaderMoved also while a bootstrap of one of the streams is unfinished: another process of this name loads a
        snapshot, and what this one handles the target will lose. The same if that bootstrap is over meanwhile:
        ``bootstraps`` are those known when the rows were handled, as `ReaderState` tells them. None: not compared."""

    async def note_stopped(self, reader: str, stream: str, writer: str, reason: str | None) -> None:
        """Store beside a saved position why the reader stopped there; None: it goes on. Nothing without a position. To
        save the position clears it, too."""

    async def reset_reader(
        self, reader: str, positions: Mapping[tuple[str, str], int], epoch: str, *, beside_log: bool = False
    ) -> None:
        """Begin anew in another epoch: positions of other epochs go, these are registered, all of them as ``oldest``.
        Positions that are of this epoch stay: another process under this name has begun in it already. If the log that
        this store keeps is not that of ``epoch``, nothing is done: with ``beside_log``, or if there are positions of
        that log. Nothing is registered of a stream whose unfinished bootstrap is of this epoch."""

    def effects(self, at: SavedAt) -> AsyncTransaction:
        """A transaction, without a claim, for a handler's effects, on a connection of the store's: ConfigError where it
        has none to give. `begin` raises ReaderMoved when another position is saved."""

    async def dead_letter(
        self,
        reader: str,
        stream: str,
        writer: str,
        tokens: Sequence[int],
        payloads: Sequence[bytes],
        error: str,
        connection: Any = None,
    ) -> None:
        """Keep rows that could not be handled."""

    async def dead_letters(self, limit: int) -> list[DeadLetter]:
        """The latest dead letters, newest first."""

    async def begin_bootstrap(self, reader: str, agreement: Agreement, *, syncs: int, reason: str) -> str:
        """Save that this reader loads that snapshot: no part of it is applied yet, state "agreed". What was saved of an
        earlier bootstrap of the stream is replaced. Returns its `BootstrapProgress.id`.

        In the same transaction the reader's saved positions of the stream are replaced by the agreement's (of a writer
        that is not in it: by 0): from now on pruning keeps what follows them. ``syncs``, ``reason``: see
        `BootstrapProgress`. Raises SnapshotGone when this store keeps the agreement's log, and rows above its positions
        have been pruned by now (no page would give them); and when the reader has positions of this store's log
        already, and the agreement is of another.
        """

    async def save_bootstrap(
        self, reader: str, stream: str, bootstrap_id: str, step: AppliedParts, connection: Any = None
    ) -> None:
        """Move what is applied by one step: ReaderMoved unless ``step.parts`` is what is saved, of the bootstrap that
        `begin_bootstrap` gave ``bootstrap_id`` to. One begun anew is another, of the same snapshot too: what was
        applied for the one before, its target has lost. With the caller's connection in the caller's transaction; on
        ReaderMoved the caller rolls back."""

    async def bootstraps(self, reader: str | None = None) -> list[BootstrapProgress]:
        """What is saved of bootstraps, of all readers or of one, the latest first; one a stream. That of one that is
        over stays until the next begins."""


class StoreAdmin(Store, Protocol):
    """What a person or a job does with the tables: ``busrep db``."""

    async def init(self, redefine: Collection[str] = ()) -> None:
        """Create or migrate the tables, and a sequence per stream; idempotent, safe in two processes at once.

        The fields of the row classes are kept. ``redefine``: names of streams whose fields are what is declared now,
        whatever they were. Raises RowClassMismatch, and ConfigError for an application's table without the columns.
        """

    async def verify(self) -> None:
        """Raise ConfigError unless each stream has what a writer needs: its sequence, and the declared columns."""

    async def stored_streams(self) -> dict[str, StoredStream]:
        """What was declared of each stream when it was made, or first written, by name."""

    async def prune(
        self,
        *,
        older_than: float | None = None,
        keep: int | None = None,
        reader_cap: float | None = None,
        stream: str | None = None,
    ) -> dict[tuple[str, str], int]:
        """Delete old rows; returns the floors that moved.

        A row may go when it is older than ``older_than`` seconds, and not among the last ``keep`` rows of its
        (stream, writer), as far as these are given (at least one must be: ConfigError); never above the proven
        position, nor above a registered reader saved within ``reader_cap`` seconds (None: ever). A reader that
        reads the stream but has no position for that writer yet holds all of that writer's rows. Facts go whole.
        An application's own table is pruned only when ``stream`` names it, and by ``keep`` alone.
        """

    async def restored(self) -> str:
        """Declare the database restored: a new epoch (returned), all writers fenced, positions back to the rows."""

    async def status(self) -> dict[str, Any]:
        """What ``busrep db status`` prints, JSON-able."""


class AsyncStore(FactLog, ReaderPositions, StoreAdmin, SnapshotSource, Protocol):
    """A database's store: all roles."""

    async def agree(self, stream: str, *, part_rows: int, again: Agreement | None = None) -> Agreement:
        """See `SnapshotSource`. Of ``again`` the parts that pruning has not reached can still be loaded, even if it
        has reached others: those are told by `load`."""


def provides(store: object, role: type[RoleT]) -> TypeGuard[RoleT]:
    """Tell whether ``store`` has every method of ``role``, one of the Protocols above.

    Not ``isinstance``: since Python 3.12 that does not see what an object passes on with ``__getattr__``.
    """
    methods = {name for one in role.__mro__ if one not in (Protocol, Generic, object) for name in vars(one)}
    return all(hasattr(store, name) for name in methods if not name.startswith("_"))
