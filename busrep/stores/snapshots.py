"""Snapshots out of a store's own tables: agreeing on one, and the rows of its parts.

What a snapshot holds depends on its positions alone, so a part may be read in any later state of the database as long
as that state has the rows still, and has them already: `check_part` decides this, in the state that is read.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import attrs

from busrep.core.snapshots import Agreement, PartRange, encode_rows
from busrep.errors import ConfigError, RowError, SnapshotBusy, SnapshotGone, Unavailable
from busrep.stores.dialect import Backing, Dialect, Span, row_columns, union
from busrep.stores.plans import Control, Plan, Row, Sql, T, in_transaction

if TYPE_CHECKING:
    from busrep.stores.planned import PlannedStore

# Of one agreement, which is saved and read as a whole, in the event loop: with so many it is 360 kB of JSON, read in
# some 25 ms; with ten times as many, in 400 ms. Of 20,000 rows each they hold 200 million.
MOST_PARTS = 10_000


# Rows that are turned into text at a time: some 70 kB of usual rows.
PIECE_ROWS = 500


@attrs.frozen
class LogState:
    """What one state of the database tells of a stream. ``replica``: it may lag behind what was proven elsewhere."""

    epoch: str
    replica: bool
    positions: Mapping[str, int]
    floors: Mapping[str, int]


def read_log(dialect: Dialect, stream: str, *before: Control) -> Plan[LogState]:
    """Read it in the transaction that is open, or that ``before`` begins."""
    answers = yield (
        *before,
        Sql(f"SELECT value, {dialect.replica} FROM busrep_meta WHERE key = 'epoch'"),
        Sql("SELECT writer, position, floor FROM busrep_positions WHERE stream = ?", (stream,)),
    )
    ((epoch, replica),), found = answers
    return LogState(
        epoch,
        bool(replica),
        {writer: position for writer, position, _ in found},
        {writer: floor for writer, _, floor in found if floor},
    )


def still(agreement: Agreement, log: LogState) -> bool:
    """Whether a snapshot that was agreed before can still be had, in part at least, in this state of the database.

    Of a floor that passed rows of it `check_part` tells which parts they were in: those may be applied already. One
    above its positions leaves a gap behind it that nothing fills. Raises Unavailable on a replica that lags.
    """
    if agreement.epoch != log.epoch or any(
        floor > agreement.positions.get(writer, 0) for writer, floor in log.floors.items()
    ):
        return False
    return _reached(agreement, log, None)


def check_part(agreement: Agreement, number: int, log: LogState) -> None:
    """Raise unless this state of the database holds all rows of that part: SnapshotGone, Unavailable."""
    if agreement.epoch != log.epoch:
        raise SnapshotGone(agreement.stream, "the database was restored, its log is another one by now")
    part = agreement.parts[number]
    for writer in agreement.positions:
        floor = log.floors.get(writer, 0)
        if floor > max(part.after, agreement.floors.get(writer, 0)):
            raise SnapshotGone(agreement.stream, f"rows of writer {writer!r} up to {floor} are pruned by now")
    if not _reached(agreement, log, part.upto):
        raise SnapshotGone(agreement.stream, "the database is at older positions, as if it was restored")


def _reached(agreement: Agreement, log: LogState, upto: int | None) -> bool:
    """Whether the rows up to the positions agreed (or to ``upto``) are proven in this state, too."""
    for writer, position in agreement.positions.items():
        due = position if upto is None else min(position, upto)
        if log.positions.get(writer, 0) < due:
            if log.replica:
                raise Unavailable("the replica", f"it lags: it has not got to {due} of writer {writer!r} yet")
            return False
    return True


def spans(agreement: Agreement, number: int) -> list[Span]:
    """The rows of a part, by writer; of those that can have any."""
    part = agreement.parts[number]
    found = ((writer, part.after, min(part.upto, at)) for writer, at in sorted(agreement.positions.items()))
    return [span for span in found if span[1] < span[2]]


def bounds_of(backing: Backing, positions: Mapping[str, int], part_rows: int) -> Plan[list[tuple[int, int]]]:
    """(token, rows up to it) of the last fact of each part, ascending. Of `MOST_PARTS` at most: larger ones, then.

    Counted first by runs of so many IDs that a part has a hundred of them where a fact is one row: a table of as many
    facts as it has rows is then counted ten times as fast as by each. Where a run holds too many, fact by fact.
    """
    rows = [(writer, 0, position) for writer, position in sorted(positions.items()) if position > 0]
    width = part_rows // 100
    if not rows:
        return []
    found = (yield _counted(backing, rows, part_rows, max(1, width)))[0]
    if width > 1 and found and found[0][2] > part_rows // 4:
        found = (yield _counted(backing, rows, part_rows, 1))[0]
    return [(upto, total) for upto, total, _ in found]


def _counted(backing: Backing, rows: Sequence[Span], part_rows: int, width: int) -> Sql:
    text, params = union(backing, rows, f"{backing.token} AS token")
    by, of = ("token", ()) if width == 1 else ("token / ?", (width,))
    runs = f"SELECT max(token) AS token, count(*) AS n FROM ({text}) AS r GROUP BY {by}"
    sums = (
        "SELECT token, n, CAST(sum(n) OVER (ORDER BY token) AS bigint) AS s, max(token) OVER () AS last, "
        "max(n) OVER () AS most, "
        f"(CAST(sum(n) OVER () AS bigint) + {MOST_PARTS - 1}) / {MOST_PARTS} AS least FROM ({runs}) AS f"
    )
    sized = f"SELECT token, n, s, last, most, CASE WHEN least > ? THEN least ELSE ? END AS size FROM ({sums}) AS w"
    return Sql(
        f"SELECT token, s, most FROM ({sized}) AS p WHERE s / size > (s - n) / size OR token = last ORDER BY token",
        (part_rows, part_rows, *params, *of),
    )


def agree(dialect: Dialect, backing: Backing, part_rows: int, again: Agreement | None, source: str) -> Plan[Agreement]:
    """In the transaction that is open: the snapshot of before, if it can still be had, or that of this very state; it
    gets an ID of its own."""
    if part_rows < 1:
        raise ConfigError(f"a part of a snapshot has at least one row, not {part_rows}")
    log = yield from read_log(dialect, backing.stream)
    found = again
    if found is None or found.stream != backing.stream or not still(found, log):
        bounds = pairwise([(0, 0), *(yield from bounds_of(backing, log.positions, part_rows))])
        parts = [PartRange(after, upto, total - before) for (after, before), (upto, total) in bounds]
        found = Agreement(backing.stream, log.epoch, log.positions, log.floors, parts)
    return attrs.evolve(found, source=source, id=secrets.token_hex(8))


def in_snapshot(body: Plan[T]) -> Plan[T]:
    """Run it in a reading transaction of its own."""

    def whole() -> Plan[T]:
        yield Control.SNAPSHOT
        found = yield from body
        yield Control.COMMIT
        return found

    return in_transaction(whole())


def checked(dialect: Dialect, backing: Backing, agreement: Agreement, number: int) -> Plan[None]:
    """Begin a reading transaction in which all rows of that part are. Raises SnapshotGone, Unavailable."""
    log = yield from read_log(dialect, backing.stream, Control.SNAPSHOT)
    check_part(agreement, number, log)


def part_of(dialect: Dialect, backing: Backing, asked: Sequence[Span]) -> Sql:
    """(writer, token, column...) of all rows in these spans, at least one, ordered by token and place in the fact.

    Each SELECT is in the order of its index. SQLite merges them, and sorts nothing; PostgreSQL sorts the part.
    """
    columns, names = row_columns(dialect, backing)
    text, params = union(backing, asked, f"{backing.writer} AS writer, {columns}")
    return Sql(f"SELECT writer, token, {names} FROM ({text}) AS p ORDER BY token, place", params)


def text_of(dialect: Dialect, backing: Backing, rows: Sequence[Row]) -> bytes:
    """The lines of rows that `part_of` gave. Raises RowError."""
    payloads = dialect.payloads(backing, [row[1:] for row in rows])
    return lines_of(backing.stream, [row[1] for row in rows], [row[0] for row in rows], payloads)


def lines_of(stream: str, tokens: Sequence[int], writers: Sequence[str], payloads: Sequence[bytes]) -> bytes:
    """The text of rows, one line each: RowError for one that breaks its line, which busrep never wrote."""
    text = encode_rows(tokens, writers, payloads)
    if text.count(b"\n") != len(tokens):
        token, payload = next(found for found in zip(tokens, payloads, strict=True) if b"\n" in found[1])
        raise RowError(stream, "row", f"{token} holds a line break, which no compact JSON does", payload)
    return text


class PlannedSnapshots:
    """Agreements of one store, and the loading of their parts: each in one transaction, a part at once.

    ``where``: the database, for a person; the same for all its stores. So many agreements as the setting `snapshots`
    allows may this process hold of it, whichever of its stores they are of.
    """

    _lock = threading.Lock()
    _taken: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: PlannedStore, where: str) -> None:
        self.store, self.dialect, self.where, self.most = store, store.dialect, where, store.settings.snapshots
        self._held: set[str] = set()

    async def read(self, plan: Plan[T]) -> T:
        """Run a plan that writes nothing."""
        return await self.store.read(plan)

    async def agree(self, backing: Backing, part_rows: int, again: Agreement | None) -> Agreement:
        """See `SnapshotSource`. Raises SnapshotBusy."""
        with self._lock:
            if self._taken[self.where] >= self.most:
                raise SnapshotBusy(self.where, self.most)
            self._taken[self.where] += 1
        try:
            agreement = await self.read(in_snapshot(agree(self.dialect, backing, part_rows, again, self.where)))
        except BaseException:
            self._give_back()
            raise
        self._held.add(agreement.id)
        return agreement

    def _give_back(self) -> None:
        with self._lock:
            self._taken[self.where] -= 1

    async def load(self, backing: Backing, agreement: Agreement, number: int) -> AsyncGenerator[bytes, None]:
        """See `SnapshotSource`."""

        def part() -> Plan[list[Row]]:
            yield from checked(self.dialect, backing, agreement, number)
            asked = spans(agreement, number)
            rows = (yield part_of(self.dialect, backing, asked))[0] if asked else []
            yield Control.COMMIT
            return rows

        rows = await self.read(in_transaction(part()))
        for at in range(0, len(rows), PIECE_ROWS):
            yield text_of(self.dialect, backing, rows[at : at + PIECE_ROWS])

    async def leave(self, agreement: Agreement) -> None:
        """See `SnapshotSource`."""
        if agreement.id in self._held:
            self._held.remove(agreement.id)
            self._give_back()

    async def leave_all(self) -> None:
        """Let go of all, when the store is closed."""
        while self._held:
            self._held.pop()
            self._give_back()
