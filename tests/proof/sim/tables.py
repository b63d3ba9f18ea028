"""The simulated database's storage: rows in versions, transactions, and the locks on rows. Nothing here takes time.

A row has the newest committed version, older ones for snapshots, and at most one uncommitted version, whose transaction
holds the row's exclusive lock. Versions carry the number of the commit that made them: a snapshot is such a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from busrep.stores.postgres.dialect import PostgresDialect
from busrep.stores.schema import VERSION, statements

Values = tuple[Any, ...]
Key = tuple[Any, ...]

# What a request for a row's lock wants: only that nobody's uncommitted version stands there, or the lock itself.
NOTHING, SHARE, EXCLUSIVE = 0, 1, 2

# A row of a fact with this in it is refused, as by a constraint.
REFUSED = "this row is refused"

# Versions of a row kept before those that no snapshot can see are thrown away.
VERSIONS = 64


class SimError(Exception):
    """An error as a driver raises it. ``sqlstate``: None when it is about the connection."""

    def __init__(self, sqlstate: str | None, message: str) -> None:
        self.sqlstate = sqlstate
        super().__init__(message)

    @property
    def operational(self) -> bool:
        """Whether it is not the statement's fault, as psycopg's OperationalError has it."""
        return self.sqlstate is None or self.sqlstate[:2] in ("08", "40", "53", "55", "57", "58")


class SimSerializationFailure(SimError):
    """SQLSTATE 40001."""

    def __init__(self) -> None:
        super().__init__("40001", "could not serialize access due to concurrent update")


class SimUnknownMarker(SimError):
    """SQLSTATE 22023."""

    def __init__(self, xid: int) -> None:
        super().__init__("22023", f"transaction ID {xid} is in the future")


class Transaction:
    """One transaction of a session. ``implicit``: of one round trip without BEGIN; ``whole``: one snapshot for all of
    it, REPEATABLE READ."""

    __slots__ = (
        "claims", "created", "facts", "failed", "implicit", "lock_timeout", "locks", "noted", "read_only", "snapshot",
        "started", "state", "synchronous_commit", "whole", "writes", "xid",
    )  # fmt: skip

    def __init__(
        self, state: State, started: float, *, implicit: bool = False, whole: bool = False, read_only: bool = False
    ) -> None:
        self.state, self.started = state, started
        self.implicit, self.whole, self.read_only = implicit, whole, read_only
        self.snapshot: int | None = None
        self.xid: int | None = None
        self.lock_timeout: float | None = None
        self.synchronous_commit: str | None = None  # where it is another than the server's
        self.failed = self.created = False
        self.facts = False  # whether it inserted any
        self.writes: dict[Record, None] = {}
        self.locks: dict[Record, None] = {}
        self.claims: dict[str, int] = {}  # writer -> the incarnation under which its claim was locked
        self.noted: dict[str, str] = {}  # settings of its own, but for `synchronous_commit`


class Record:
    """All versions of the row with one key, and its locks. ``born``: the commit that inserted it last, which after a
    delete is another row to who has seen the one before; ``fresh``: its uncommitted version was inserted."""

    __slots__ = ("born", "csn", "fresh", "key", "lockers", "older", "owner", "pending", "table", "values", "waiting")

    def __init__(self, table: Table, key: Key) -> None:
        self.table, self.key = table, key
        self.born, self.fresh = 0, False
        self.csn, self.values = 0, None  # type: int, Values | None
        self.older: list[tuple[int, Values | None]] | None = None
        self.owner: Transaction | None = None
        self.pending: Values | None = None
        self.lockers: dict[Transaction, int] | None = None
        self.waiting: list[Wait] | None = None

    def at(self, csn: int) -> Values | None:
        """What an earlier snapshot sees."""
        for made, values in reversed(self.older or ()):
            if made <= csn:
                return values
        return None

    def put(self, transaction: Transaction, values: Values | None) -> None:
        """Make, or replace, the uncommitted version; None deletes. The exclusive lock is held."""
        self.owner, self.pending = transaction, values
        transaction.writes[self] = None

    def newest(self, transaction: Transaction) -> Values | None:
        """The version that a lock was just granted on."""
        return self.pending if self.owner is transaction else self.values


@attrs.define(eq=False)
class Wait:
    """A session that waits for a row. ``session`` and ``timers`` are the server's matter."""

    record: Record
    transaction: Transaction
    mode: int
    session: Any = None
    timers: Sequence[Any] = ()

    def gone(self) -> None:
        """Stop waiting."""
        for timer in self.timers:
            timer.cancel()
        if self.record.waiting and self in self.record.waiting:
            self.record.waiting.remove(self)


@attrs.frozen
class Definition:
    """A table's columns, as its CREATE TABLE says. ``prefix``: leading columns of the key by which rows are found."""

    name: str
    columns: tuple[str, ...]
    key: tuple[int, ...]
    prefix: int
    now: tuple[int, ...]
    serial: int | None

    @classmethod
    def of(cls, text: str) -> Definition:
        """Read a CREATE TABLE statement."""
        found = re.fullmatch(r"CREATE (?:UNLOGGED )?TABLE (\w+) \((.*?)\)(?: WITH \(.*\))?", text)
        if found is None:
            raise NotImplementedError(f"the simulated database cannot make this table: {text}")
        name, body = found.groups()
        parts = re.findall(r"(?:[^,(]|\([^)]*\))+", body)
        columns: list[str] = []
        key: list[str] = []
        now: list[int] = []
        serial = None
        for part in map(str.strip, parts):
            if part.startswith("PRIMARY KEY"):
                key = [one.strip() for one in part[part.index("(") + 1 : -1].split(",")]
                continue
            if "PRIMARY KEY" in part:
                key = [part.split()[0]]
            if "DEFAULT now()" in part:
                now.append(len(columns))
            if "AS IDENTITY" in part:
                serial = len(columns)
            columns.append(part.split()[0])
        prefix = 2 if len(key) > 3 else 0  # facts, of one (stream, writer)
        return cls(name, tuple(columns), tuple(map(columns.index, key)), prefix, tuple(now), serial)


def _defined(texts: Iterable[str]) -> dict[str, Definition]:
    """The tables that CREATE TABLE statements make, with the columns that ALTER TABLE statements add."""
    made: dict[str, Definition] = {}
    for text in texts:
        added = re.fullmatch(r"ALTER TABLE (\w+) ADD COLUMN (\w+) text", text)
        if re.match("CREATE (?:OR REPLACE FUNCTION|TRIGGER)", text):
            continue
        if added is not None:
            made[added[1]] = attrs.evolve(made[added[1]], columns=(*made[added[1]].columns, added[2]))
        else:
            one = Definition.of(text)
            made[one.name] = one
    return made


# An application's table, for readers that save in their handler's own transaction.
EFFECTS = (
    "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, reader text, epoch text, stream text, "
    "writer text, token bigint, row text)"
)

DEFINITIONS = _defined(
    (EFFECTS, *(sql.text for version in range(VERSION) for sql in statements(PostgresDialect(), version + 1)))
)


class Table:
    """The rows of one table by key, and those of a common prefix of the key together."""

    __slots__ = ("_committed", "buckets", "definition", "records")

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.records: dict[Key, Record] = {}
        self.buckets: dict[Key, dict[Key, Record]] = {}
        self._committed: dict[Key, Values] | None = None  # until the next commit

    def add(self, key: Key) -> Record:
        """A row that has no version yet."""
        record = self.records[key] = Record(self, key)
        if self.definition.prefix:
            self.buckets.setdefault(key[: self.definition.prefix], {})[key] = record
        return record

    def discard(self, record: Record) -> None:
        """Forget a row that never had a committed version."""
        if self.records.get(record.key) is record:
            del self.records[record.key]
            if self.definition.prefix:
                del self.buckets[record.key[: self.definition.prefix]][record.key]

    def committed(self) -> Mapping[Key, Values]:
        """All rows as they are now."""
        found = self._committed
        if found is None:
            found = {key: record.values for key, record in self.records.items() if record.values is not None}
            self._committed = found
        return found

    def changed(self) -> None:
        """A row has a newer version."""
        self._committed = None


@attrs.define(eq=False)
class Numbers:
    """A sequence: the highest value it gave, and what 9.15 verifies. ``lock``: what ALTER SEQUENCE locks. ``flushed``:
    the value that a crash cannot take back. ``restarted``: as which it stood when somebody last set it by hand."""

    lock: Record
    given: int = 0
    flushed: int = 0
    restarted: int | None = None
    cache: int = 1
    cycle: bool = False
    increment: int = 1

    @property
    def called(self) -> bool:
        """Whether it gave an ID since it was set by hand. It is true of one that gave none at all: 0 is right then."""
        return self.given != self.restarted


@attrs.frozen
class Checkpoint:
    """A whole committed state, to restore."""

    rows: Mapping[str, Mapping[Key, Values]]
    sequences: dict[str, tuple[int, int | None]]
    serials: dict[str, int]
    statuses: dict[int, str]
    next_xid: int
    created: bool


class State:
    """All that a database cluster holds: a restore begins a new one."""

    def __init__(self, since: float = 0.0) -> None:
        self.since = since
        self.csn = 1
        self.tables = {name: Table(definition) for name, definition in DEFINITIONS.items()}
        self.created: int | None = None  # the commit that made busrep's tables
        self.sequences: dict[str, Numbers] = {}
        self.serials: dict[str, int] = {}
        self.next_xid = self.durable_xid = 1_000
        self.statuses: dict[int, str] = {}
        self.locks = Table(Definition("locks", ("key",), (0,), 0, (), None))  # advisory ones, and of sequences
        self.commits: list[tuple[float, int]] = []  # when each commit came, for replicas

    def identify(self, transaction: Transaction) -> int:
        """Its transaction ID, given now if it has none."""
        if transaction.xid is None:
            transaction.xid = self.next_xid
            self.next_xid += 1
            self.statuses[transaction.xid] = "in progress"
        return transaction.xid

    def named(self, name: str) -> Record:
        """A lock that is on no row."""
        key = (name,)
        return self.locks.records.get(key) or self.locks.add(key)

    def take(self, record: Record, transaction: Transaction, mode: int) -> bool:
        """Lock a row if that is possible at once. Share joins share even when someone waits (9.4: facts may nest)."""
        if transaction.xid is None:
            self.identify(transaction)
        if record.lockers is None:
            record.lockers = {transaction: mode}
        elif not free_for(record, transaction, mode):
            return False
        else:
            record.lockers[transaction] = max(mode, record.lockers.get(transaction, 0))
        transaction.locks[record] = None
        return True

    def commit(self, transaction: Transaction, now: float, horizon: Callable[[], int]) -> None:
        """Make the transaction's versions the newest. Its locks stay until `release`."""
        if transaction.xid is not None:
            self.statuses[transaction.xid] = "committed"
            self.durable_xid = max(self.durable_xid, transaction.xid + 1)
        if not transaction.writes and not transaction.created:
            return
        self.csn = csn = self.csn + 1
        for record in transaction.writes:
            if record.csn:
                older = record.older
                if older is None:
                    older = record.older = []
                older.append((record.csn, record.values))
                if len(older) > VERSIONS:
                    forget(older, horizon())
            record.csn, record.values = csn, record.pending
            record.born, record.fresh = csn if record.fresh else record.born, False
            record.table.changed()
            if record.values is None and horizon() == csn:
                record.table.discard(record)  # nobody can see it any more
            record.owner = record.pending = None
        if transaction.created:
            self.created = csn
        self.commits.append((now, csn))

    def abort(self, transaction: Transaction) -> None:
        """Drop the transaction's versions. Its locks stay until `release`."""
        if transaction.xid is not None:
            self.statuses[transaction.xid] = "aborted"
        for record in transaction.writes:
            record.owner = record.pending = None
            record.fresh = False

    def checkpoint(self) -> Checkpoint:
        """All that is committed now."""
        return Checkpoint(
            {name: table.committed() for name, table in self.tables.items()},
            {name: (sequence.given, sequence.restarted) for name, sequence in self.sequences.items()},
            dict(self.serials),
            dict(self.statuses),
            self.next_xid,
            self.created is not None,
        )

    @classmethod
    def restored(cls, checkpoint: Checkpoint, since: float) -> State:
        """A state as it was; whatever was in progress then is aborted."""
        state = cls(since)
        for name, rows in checkpoint.rows.items():
            for key, values in rows.items():
                record = state.tables[name].add(key)
                record.csn, record.values = state.csn, values
            state.tables[name].changed()
        for name, (given, restarted) in checkpoint.sequences.items():
            state.sequences[name] = Numbers(state.named(name), given, given, restarted)
        state.serials = dict(checkpoint.serials)
        state.statuses = {xid: "aborted" if was == "in progress" else was for xid, was in checkpoint.statuses.items()}
        state.next_xid = state.durable_xid = checkpoint.next_xid
        state.created = state.csn if checkpoint.created else None
        return state


def free_for(record: Record, transaction: Transaction, mode: int) -> bool:
    """Whether a lock of this mode disturbs nobody who holds one."""
    if mode == NOTHING:
        return record.owner is None or record.owner is transaction
    for other, held in (record.lockers or {}).items():
        if other is not transaction and (mode == EXCLUSIVE or held == EXCLUSIVE):
            return False
    return True


def forget(older: list[tuple[int, Values | None]], horizon: int) -> None:
    """Throw away versions that no snapshot from ``horizon`` on can see."""
    keep = 0
    for at, (csn, _) in enumerate(older):
        if csn <= horizon:
            keep = at
    del older[:keep]


def granted(state: State, record: Record) -> list[Wait]:
    """Give a row's lock to those who wait for it, in order, as far as it goes; these may go on."""
    found: list[Wait] = []
    for wait in list(record.waiting or ()):
        if wait.mode == NOTHING:
            if not free_for(record, wait.transaction, NOTHING):
                continue
        elif not state.take(record, wait.transaction, wait.mode):
            break
        found.append(wait)
        assert record.waiting is not None
        record.waiting.remove(wait)
    return found


def release(transaction: Transaction) -> list[Wait]:
    """Free the locks of a transaction that has ended; those who waited for them and may go on."""
    found: list[Wait] = []
    for record in transaction.locks:
        lockers = record.lockers
        if lockers is not None:
            lockers.pop(transaction, None)
            if not lockers:
                record.lockers = None
        if record.waiting:
            found += granted(transaction.state, record)
        if not record.csn and record.owner is None and record.lockers is None and not record.waiting:
            record.table.discard(record)
    transaction.locks.clear()
    transaction.writes.clear()
    return found


def blocks(wait: Wait) -> Iterable[Transaction]:
    """Whom it waits for: who holds the lock, and who waits for it longer."""
    record = wait.record
    if wait.mode == NOTHING:
        return [record.owner] if record.owner is not None else []
    found = [
        other
        for other, held in (record.lockers or {}).items()
        if other is not wait.transaction and (wait.mode == EXCLUSIVE or held == EXCLUSIVE)
    ]
    for ahead in record.waiting or ():
        if ahead is wait:
            break
        if ahead.mode == EXCLUSIVE or wait.mode == EXCLUSIVE:
            found.append(ahead.transaction)
    return found
