"""Plans of what a reader's store saves of its bootstraps: which snapshot, and how many of its parts are applied."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import secrets
from collections.abc import Collection

from busrep.core.snapshots import Agreement, AppliedParts, BootstrapProgress
from busrep.errors import ReaderMoved, SnapshotGone
from busrep.stores.dialect import Dialect, begin_durably
from busrep.stores.plans import Control, Plan, SerializationFailed, Sql, in_transaction
from busrep.stores.readers import LOCK_STREAM, floors_of, rows_of

# What ReaderMoved names in the place of a writer.
PARTS = "parts of its snapshot"
BEGUN = "agreed"


def begin(dialect: Dialect, reader: str, agreement: Agreement, syncs: int, reason: str) -> Plan[str]:
    """Nothing is applied yet, and from now on pruning keeps what follows the snapshot.

    Not while rows of the stream are being pruned, by bounds that do not know of this reader: the floors that are read
    here are those that stay, or the prune comes afterwards and sees the reader. Nor while another process of this name
    registers: its row would stand among those of the snapshot.

    Saves take no lock. They are of rows that are deleted here, so one that comes first is undone, and one that waits
    finds its row gone; one that comes later sees that a snapshot is loaded.
    """
    stream, id = agreement.stream, new_id()

    def body() -> Plan[str]:
        # Durable: the target is emptied next.
        yield (*begin_durably(dialect), Sql(LOCK_STREAM + dialect.exclusive, (stream,)))
        here, floors = yield from floors_of([(stream, "")])
        held = (yield Sql("SELECT stream, writer, epoch FROM busrep_readers WHERE reader = ?", (reader,)))[0]
        by_writer = {writer: floor for (_, writer), floor in floors.items()}
        check_begin(agreement, here, by_writer, {row[2] for row in held})
        positions = begun_at(agreement, {row[1] for row in held if row[0] == stream})
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


def new_id() -> str:
    """Tells one bootstrap from any other: 16 lowercase hex digits."""
    return secrets.token_hex(8)


def begun_at(agreement: Agreement, writers: Collection[str]) -> dict[tuple[str, str], int]:
    """What is saved of a reader that had positions of these writers: the end of the snapshot.

    One that is not in it joined later: all its rows are due, also those that were handled, for the target loses them.
    """
    positions = dict.fromkeys(writers, 0) | dict(agreement.positions) | {"": 0}
    return {(agreement.stream, writer): position for writer, position in sorted(positions.items())}


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


def save(dialect: Dialect, reader: str, stream: str, bootstrap_id: str, step: AppliedParts) -> Plan[None]:
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


def listed(dialect: Dialect, reader: str | None = None) -> Plan[list[BootstrapProgress]]:
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
