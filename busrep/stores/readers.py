"""Plans of durable readers: their saved positions, the rows they could not handle, and their bootstraps: which snapshot
a reader loads, and how many of its parts are applied."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from secrets import token_hex

import attrs
import orjson

from busrep.core.snapshots import LOADED, Agreement, AppliedParts, BootstrapProgress
from busrep.errors import PositionsAheadOfTable, ReaderMoved, SnapshotGone, Unavailable
from busrep.stores.dialect import Dialect, begin_durably
from busrep.stores.interface import MIXED, DeadLetter, ReaderState, SavedAt
from busrep.stores.plans import Control, Plan, Row, SerializationFailed, Sql, Step, in_transaction, transaction
from busrep.stores.schema import EPOCH

# Locked by whoever prunes the stream, and by whoever registers to read it.
LOCK_STREAM = "SELECT 1 FROM busrep_streams WHERE stream = ?"
# Streams of which a reader loads a snapshot. Who has locked a stream may rely on it: to begin takes the lock, too.
LOADING = "SELECT stream FROM busrep_bootstraps WHERE reader = ?" + "".join(f" AND state <> '{at}'" for at in LOADED)

Changes = Sequence[tuple[str, str, int, int]]
Positions = dict[tuple[str, str], int]


def rows_of(dialect: Dialect, reader: str, positions: Mapping[tuple[str, str], int], epoch: str) -> list[Sql]:
    """Statements that insert saved positions; those that are there stay as they are."""
    return [
        Sql(
            "INSERT INTO busrep_readers (reader, stream, writer, position, epoch, saved_at) "
            f"VALUES (?, ?, ?, ?, ?, {dialect.now}) ON CONFLICT (reader, stream, writer) DO NOTHING",
            (reader, stream, writer, position, epoch),
        )
        for (stream, writer), position in positions.items()
    ]


def _begin(dialect: Dialect, positions: Mapping[tuple[str, str], int]) -> tuple[Step, ...]:
    """A durable transaction: until its end nothing of these streams is pruned."""
    streams = sorted({stream for stream, _ in positions})  # in the order of 'db restored'
    return (*begin_durably(dialect), *(Sql(LOCK_STREAM + dialect.share, (stream,)) for stream in streams))


def floors_of(keys: Collection[tuple[str, str]]) -> Plan[tuple[str | None, Positions]]:
    """The epoch of the log that is kept here, and the floors in it of all writers of these streams."""
    streams = dict.fromkeys(stream for stream, _ in keys)
    epoch, *found = yield (
        EPOCH,
        *(Sql("SELECT writer, floor FROM busrep_positions WHERE stream = ?", (stream,)) for stream in streams),
    )
    floors = {(stream, writer): floor for stream, rows in zip(streams, found, strict=True) for writer, floor in rows}
    return (epoch[0][0] if epoch else None), floors


def _raised(
    positions: Mapping[tuple[str, str], int], floors: Positions, oldest: Collection[tuple[str, str]]
) -> Positions:
    """The positions, those in ``oldest`` not below the floor."""
    return {key: max(at, floors.get(key, 0)) if key in oldest else at for key, at in positions.items()}


def _without(positions: Mapping[tuple[str, str], int], streams: Collection[str]) -> Positions:
    return {key: at for key, at in positions.items() if key[0] not in streams}


@transaction
def register(
    dialect: Dialect,
    reader: str,
    positions: Mapping[tuple[str, str], int],
    epoch: str,
    *,
    oldest: Collection[tuple[str, str]] = (),
    beside_log: bool = False,
) -> Plan[None]:
    """Insert the rows that saving updates (9.12); existing ones stay.

    Not while rows of the stream are being pruned, by bounds that do not know of this reader: whoever reads the floors
    afterwards sees what became of them. Where a snapshot is being loaded it alone says where this reader is.
    """
    *_, loading = yield (*_begin(dialect, positions), Sql(LOADING, (reader,)))
    here, floors = yield from floors_of(oldest)
    if beside_log and here != epoch:  # late: another process of this name may read the new log already
        raise Unavailable(dialect.store, f"its epoch is {here}, not {epoch}: it was restored")
    raised = _raised(positions, floors if here == epoch else {}, oldest)
    yield (*rows_of(dialect, reader, _without(raised, {row[0] for row in loading}), epoch), Control.COMMIT)


@transaction
def load(_: Dialect, reader: str) -> Plan[ReaderState]:
    """The saved positions, and their epoch; in the same state of the database, the bootstraps they are of."""
    rows, begun = yield (
        Control.SNAPSHOT,
        Sql(
            "SELECT stream, writer, position, epoch FROM busrep_readers WHERE reader = ? ORDER BY stream, writer",
            (reader,),
        ),
        Sql("SELECT stream, id, state FROM busrep_bootstraps WHERE reader = ?", (reader,)),
        Control.COMMIT,
    )
    epochs = {row[3] for row in rows}
    return ReaderState(
        epoch=MIXED if len(epochs) > 1 else next(iter(epochs), None),
        positions={(stream, writer): position for stream, writer, position, _ in rows if writer},
        streams=frozenset(row[0] for row in rows),
        bootstraps={stream: id for stream, id, _ in begun},
        loading=frozenset(stream for stream, _, state in begun if state not in LOADED),
    )


def stands(_: Dialect, at: SavedAt, *begin: Control) -> Plan[Row]:
    """The first statement of a handler's transaction: ReaderMoved unless this position is saved (9.12). Returns that
    there is no marker.

    The save at its end would not show all of it. A failover may have taken back the fact before, with its position, and
    another process under this name may handle that fact again meanwhile: then the position is right again, but what the
    handler saw was without that fact's effects. No lock: a handler that sleeps would keep the other one from saving.
    """
    found = yield (
        *begin,
        Sql(
            "SELECT 1 FROM busrep_readers "
            "WHERE reader = ? AND stream = ? AND writer = ? AND position = ? AND epoch = ?",
            attrs.astuple(at),
        ),
    )
    if not found[0]:
        raise ReaderMoved(at.reader, at.stream, at.writer, at.position)
    return (None,)


def save(
    dialect: Dialect, reader: str, changes: Changes, epoch: str, bootstraps: Mapping[str, str] | None = None
) -> Plan[None]:
    """One statement that moves all of these positions, or none (9.12). It needs no transaction of its own."""
    if not changes:
        return
    known = [None if bootstraps is None else bootstraps.get(stream, "") for stream, *_ in changes]
    moves = [(*one, begun, dialect.sequence_name(one[0])) for one, begun in zip(changes, known, strict=True)]
    # Where the sequences stand that were set and gave no ID since: only their own rows tell, which are read in between.
    given = dict.fromkeys((stream for stream, *_ in changes), 0)
    for _ in range(2):
        moved = [(*move, given[move[0]]) for move in sorted(moves)]  # sorted: two savers must not lock crosswise
        try:
            answers = yield dialect.save(reader, epoch, orjson.dumps(moved).decode(), len(changes))
        except SerializationFailed as failed:  # under REPEATABLE READ: another saver moved one of them
            raise ReaderMoved(reader, *changes[0][:3]) from failed
        hit = {(stream, writer) for stream, writer, *_ in answers[0]}
        missed = [change for change in changes if change[:2] not in hit]
        if not missed:
            return
        highest = {stream: new for stream, _, _, new in sorted(missed, key=lambda change: change[3])}
        yield from _note_given(dialect, highest, epoch, given)
    raise ReaderMoved(reader, *missed[0][:3])


def _note_given(dialect: Dialect, positions: Mapping[str, int], epoch: str, given: dict[str, int]) -> Plan[None]:
    """Take in where the sequences stand, where the log of ``epoch`` is kept here. PositionsAheadOfTable for a position
    above its own; after a failover Unavailable, for until a claim has left out IDs a sequence may be behind."""
    settled = f"CASE WHEN {dialect.same_server} THEN 1 ELSE 0 END"
    here = (yield Sql(f"SELECT value, {settled} FROM busrep_meta WHERE key = 'epoch'"))[0]
    for stream, position in positions.items() if here and here[0][0] == epoch else ():
        for row in (yield dialect.sequence(stream))[0]:
            given[stream] = int(row[0])
            if position > given[stream]:
                if not here[0][1]:
                    raise Unavailable("PostgreSQL", "it has failed over, and no writer has claimed its name since")
                raise PositionsAheadOfTable(stream, position, given[stream])


def note_stopped(_: Dialect, reader: str, stream: str, writer: str, reason: str | None) -> Plan[None]:
    """Why the reader stopped there, for a person."""
    yield Sql(
        "UPDATE busrep_readers SET stopped = ? WHERE reader = ? AND stream = ? AND writer = ?",
        (None if reason is None else reason.replace("\0", "\\0"), reader, stream, writer),
    )


@transaction
def reset(
    dialect: Dialect, reader: str, positions: Mapping[tuple[str, str], int], epoch: str, *, beside_log: bool = False
) -> Plan[None]:
    """Replace saved positions of other epochs. Of this one: another process under this name has begun anew already.

    As in `register`: not while rows are being pruned that the replaced positions had let go. And nothing at all when
    the others are of the log that this very database keeps, or ``beside_log``: then ``epoch`` is one that was.
    """
    yield _begin(dialect, positions)
    here, floors = yield from floors_of(positions)
    held, unfinished = yield (
        Sql("SELECT stream, epoch FROM busrep_readers WHERE reader = ?", (reader,)),
        Sql(LOADING, (reader,)),
    )
    if here != epoch and (beside_log or here in {row[1] for row in held}):
        yield Control.COMMIT
        return
    # The snapshot of an epoch that is gone says nothing any more.
    loading = {row[0] for row in held if row[1] == epoch} & {row[0] for row in unfinished}
    raised = _without(_raised(positions, floors if here == epoch else {}, positions), loading)
    yield (
        Sql("DELETE FROM busrep_readers WHERE reader = ? AND epoch <> ?", (reader, epoch)),
        *rows_of(dialect, reader, raised, epoch),
        Control.COMMIT,
    )


def dead_letter(
    dialect: Dialect,
    reader: str,
    stream: str,
    writer: str,
    tokens: Sequence[int],
    payloads: Sequence[bytes],
    error: str,
) -> Plan[None]:
    """Keep rows that could not be handled. Payloads may be anything, so they are kept as JSON strings."""
    kept = orjson.dumps([payload.decode("utf-8", "backslashreplace") for payload in payloads]).decode()
    yield Sql(
        "INSERT INTO busrep_dead_letters (reader, stream, writer, tokens, payloads, error, dead_at) "
        f"VALUES (?, ?, ?, ?, ?, ?, {dialect.now})",
        (reader, stream, writer, orjson.dumps(list(tokens)).decode(), kept, error.replace("\0", "\\0")),
    )


def dead_letters(dialect: Dialect, limit: int) -> Plan[list[DeadLetter]]:
    """The latest first."""
    answers = yield Sql(
        f"SELECT reader, stream, writer, tokens, payloads, error, {dialect.age('dead_at')} "
        "FROM busrep_dead_letters ORDER BY id DESC LIMIT ?",
        (limit,),
    )
    return [
        DeadLetter(
            name, stream, writer, orjson.loads(ids), [*map(str.encode, orjson.loads(rows))], error, max(0.0, float(age))
        )
        for name, stream, writer, ids, rows, error, age in answers[0]
    ]


# What ReaderMoved names in the place of a writer.
PARTS = "parts of its snapshot"
BEGUN = "agreed"


def begin_bootstrap(dialect: Dialect, reader: str, agreement: Agreement, syncs: int, reason: str) -> Plan[str]:
    """Nothing is applied yet, and from now on pruning keeps what follows the snapshot.

    Not while rows of the stream are being pruned, by bounds that do not know of this reader: the floors that are read
    here are those that stay, or the prune comes afterwards and sees the reader. Nor while another process of this name
    registers: its row would stand among those of the snapshot.

    Saves take no lock. They are of rows that are deleted here, so one that comes first is undone, and one that waits
    finds its row gone; one that comes later sees that a snapshot is loaded.
    """
    stream, id = agreement.stream, token_hex(8)  # tells it from any other

    def body() -> Plan[str]:
        # Durable: the target is emptied next.
        yield (*begin_durably(dialect), Sql(LOCK_STREAM + dialect.exclusive, (stream,)))
        here, floors = yield from floors_of([(stream, "")])
        held = (yield Sql("SELECT stream, writer, epoch FROM busrep_readers WHERE reader = ?", (reader,)))[0]
        by_writer = {writer: floor for (_, writer), floor in floors.items()}
        check_begin(agreement, here, by_writer, {row[2] for row in held})
        # A writer that is not in the snapshot joined later: all its rows are due, also those that were handled, for the
        # target loses them.
        begun = dict.fromkeys([row[1] for row in held if row[0] == stream], 0) | dict(agreement.positions) | {"": 0}
        positions = {(stream, writer): position for writer, position in sorted(begun.items())}
        yield (
            Sql("DELETE FROM busrep_readers WHERE reader = ? AND stream = ?", (reader, stream)),
            *rows_of(dialect, reader, positions, agreement.epoch),
            Sql("DELETE FROM busrep_bootstraps WHERE reader = ? AND stream = ?", (reader, stream)),
            Sql(
                "INSERT INTO busrep_bootstraps (reader, stream, id, agreement, digest, state, parts, rows, bytes, "
                f"parts_total, rows_total, syncs, reason, saved_at) VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?, ?, "
                f"{dialect.now})",
                (
                    reader, stream, id, agreement.to_json().decode(), agreement.digest, BEGUN, len(agreement.parts),
                    agreement.rows, syncs, reason.replace("\0", "\\0"),
                ),
            ),
            Control.COMMIT,
        )  # fmt: skip
        return id

    # A save in a handler's transaction may last: it is waited for before the lock is taken that others wait for.
    yield Sql("SELECT 1 FROM busrep_readers WHERE reader = ? AND stream = ?" + dialect.exclusive, (reader, stream))
    return (yield from in_transaction(body()))


def check_begin(agreement: Agreement, here: str | None, floors: dict[str, int], held: set[str]) -> None:
    """Raise SnapshotGone if what follows the snapshot is not all there, or this reader is in another log by now.

    ``here``, ``floors``: of the log that this store keeps; ``held``: the epochs of the reader's saved positions.
    """
    if here != agreement.epoch:
        if here in held:  # it is of a replica that lags, or of the log before a restore
            raise SnapshotGone(agreement.stream, "its positions are of another log than this reader reads by now")
        return
    for writer, floor in sorted(floors.items()):
        position = agreement.positions.get(writer, 0)
        if floor > position:
            raise SnapshotGone(
                agreement.stream, f"it ends at {position} of writer {writer!r}, and up to {floor} rows are pruned"
            )


def save_bootstrap(dialect: Dialect, reader: str, stream: str, bootstrap_id: str, step: AppliedParts) -> Plan[None]:
    """Move the number of parts applied, or nothing. It needs no transaction of its own.

    Of this very bootstrap: another one of the same snapshot, begun since, had the target emptied, and this part too.
    """
    try:
        answers = yield Sql(
            f"UPDATE busrep_bootstraps SET parts = ?, rows = ?, bytes = ?, state = ?, saved_at = {dialect.now} "
            "WHERE reader = ? AND stream = ? AND id = ? AND parts = ? RETURNING parts",
            (step.applied, step.rows, step.bytes, step.state, reader, stream, bootstrap_id, step.parts),
        )
    except SerializationFailed as failed:  # under REPEATABLE READ: another process moved it
        raise ReaderMoved(reader, stream, PARTS, step.parts) from failed
    if not answers[0]:
        raise ReaderMoved(reader, stream, PARTS, step.parts)
    # A sign of life: a prune's reader_cap must not run out over a snapshot that takes long.
    yield Sql(
        f"UPDATE busrep_readers SET saved_at = {dialect.now} WHERE reader = ? AND stream = ? AND writer = ?",
        (reader, stream, ""),
    )


def bootstraps(dialect: Dialect, reader: str | None = None) -> Plan[list[BootstrapProgress]]:
    """The latest first."""
    of_reader, params = ("", ()) if reader is None else ("WHERE reader = ? ", (reader,))
    answers = yield Sql(
        f"SELECT reader, agreement, state, parts, rows, bytes, syncs, reason, {dialect.age('saved_at')}, id "
        f"FROM busrep_bootstraps {of_reader}ORDER BY saved_at DESC, reader, stream",
        params,
    )
    return [
        BootstrapProgress(
            name, Agreement.from_json(agreement), state, parts, rows, size, syncs, why, max(0.0, float(age)), id
        )
        for name, agreement, state, parts, rows, size, syncs, why, age, id in answers[0]
    ]
