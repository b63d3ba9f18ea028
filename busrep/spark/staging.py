"""Plans of a sink that many processes write to: rows are staged first, and become facts together, once.

busrep_staged holds rows of tasks, of which some were killed and some ran twice. A task writes under an ``attempt`` of
its own, a random name that it alone has; whoever commits the batch names the attempts that count, and how many rows
they have. So nothing has to be known of the others, and what a dead process left is removed when its query commits
next.

busrep_sinks holds one row a query: the last batch that was made facts. It moves in the transaction that writes them, so
a batch that comes again is known, whatever became of whoever committed it. The last one is enough: the batches of a
checkpoint are numbered without a gap, and one begins only after the one before was entered as done in the checkpoint.
A number below the last one, or a gap, is of another checkpoint, or of a database or a checkpoint that was restored;
so is a number above the first that finds no row at all, and a batch that is done and had another number of rows. They
are refused (`is_done`), for either way rows would be lost or written twice.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Sequence

import attrs

from busrep.errors import ConfigError, SequenceWentBack, StagedRowsGone, WriterFenced
from busrep.spark.staged_rows import insert_staged
from busrep.stores.claims import lock_claim
from busrep.stores.dialect import Backing, Dialect
from busrep.stores.interface import Claim
from busrep.stores.plans import Control, Plan, Sql, in_transaction

# Rows that were staged so long ago, seconds, are of a query that is gone, whichever it was: a week.
ABANDONED = 7 * 86_400.0


@attrs.frozen
class StagedBatch:
    """One batch of a query, staged. ``checkpoint``: what its number is counted in, "" where it is the only one;
    ``run``: of the process that runs the query, another one after each start. ``once``: no batch of this query's name
    ever comes again, once this one is done. ``ordered``: by the rows' keys, across all attempts. ``first``: where the
    query begins, those before it being none of its own."""

    query: str
    number: int
    checkpoint: str
    run: str
    attempts: Sequence[str]
    rows: int
    once: bool = False
    ordered: bool = False
    first: int = 0


@attrs.frozen
class Done:
    """The last batch of a query that became facts: ``rows`` of them, IDs from ``first`` to ``last`` (0: none), under
    this incarnation of the writer's name."""

    query: str
    checkpoint: str
    number: int
    run: str
    stream: str
    writer: str
    incarnation: int
    rows: int
    first: int
    last: int


FIELDS = "query, checkpoint, batch, run, stream, writer, incarnation, rows, first, last"


def is_done(batch: StagedBatch, found: Done | None) -> bool:
    """Whether the batch became facts before. Raises ConfigError where its number means another batch."""
    if found is None:
        if batch.number > batch.first:
            raise ConfigError(
                f"batch {batch.number} of query {batch.query!r}: the batches before {batch.number} are not in this "
                "database. Was it restored, or did the query write elsewhere meanwhile? Write them again from a new "
                f"checkpoint; or, to go on without them, add the option firstBatch={batch.number}"
            )
        return False
    if batch.checkpoint != found.checkpoint:
        raise ConfigError(
            f"query {batch.query!r} has written from checkpoint {found.checkpoint}, and this is {batch.checkpoint}, "
            "whose batches are others of the same numbers. Give it another name (option query), or its own checkpoint"
        )
    if batch.number < found.number:
        raise ConfigError(
            f"batch {batch.number} of query {batch.query!r} comes after batch {found.number}: its checkpoint is an "
            f"older copy. Go on from the newer one; or, to write the rows again, {_renamed(batch.number)}"
        )
    if batch.number > found.number + 1:
        raise ConfigError(
            f"batch {batch.number} of query {batch.query!r} comes after batch {found.number}: those between are not in "
            "this database. Was it restored, or did the query write elsewhere meanwhile? Write them again from a "
            f"checkpoint as old; or, to go on without them, {_renamed(batch.number)}"
        )
    if batch.number == found.number and batch.rows != found.rows:
        raise _other_rows(batch, found)
    return batch.number == found.number


def _renamed(first: int) -> str:
    return f"give the query another name (option query) and the option firstBatch={first}"


def _other_rows(batch: StagedBatch, found: Done) -> ConfigError:
    """What it has beside those that are written would be lost without a word: of an older copy of a checkpoint, or of a
    name that was given to another batch."""
    name = f"batch {batch.number} of query {batch.query!r}" if batch.checkpoint else repr(batch.query)
    told = f"{name} was written with {found.rows} rows, and has {batch.rows} now. "
    if not batch.checkpoint:
        return ConfigError(told + "To write these too, give the batch another name (option batch)")
    return ConfigError(
        f"{told}Is its checkpoint an older copy, or does the query not give the same rows twice? To go on behind what "
        f"was written, {_renamed(batch.number + 1)}; to write the batch again, firstBatch={batch.number}"
    )


def done(query: str) -> Plan[Done | None]:
    """The last batch of a query; None without any."""
    return _found((yield _mark(query))[0])


def _mark(query: str, lock: str = "") -> Sql:
    return Sql(f"SELECT {FIELDS} FROM busrep_sinks WHERE query = ?{lock}", (query,))


def _found(rows: Sequence[tuple[object, ...]]) -> Done | None:
    mark = Done(*rows[0]) if rows else None  # type: ignore[arg-type]
    return None if mark is None or mark.number < 0 else mark


def commit(dialect: Dialect, backing: Backing, held: Claim, batch: StagedBatch) -> Plan[Done]:
    """Make facts of a batch's rows, once: all of it in one transaction that holds the claim.

    Raises WriterFenced, ConfigError (see `is_done`), SequenceWentBack, StagedRowsGone.
    """
    return in_transaction(_commit(dialect, backing, held, batch))


def _commit(dialect: Dialect, backing: Backing, held: Claim, batch: StagedBatch) -> Plan[Done]:
    answers = yield (
        Control.BEGIN,
        lock_claim(dialect, held),
        # A row to lock, or two processes could both be the first.
        Sql(
            f"INSERT INTO busrep_sinks ({FIELDS}, once, done_at) "
            f"VALUES (?, '', -1, '', '', '', 0, 0, 0, 0, FALSE, {dialect.now}) ON CONFLICT DO NOTHING",
            (batch.query,),
        ),
        _mark(batch.query, dialect.exclusive),
    )
    if not answers[0]:
        raise WriterFenced(held.writer, held.incarnation)
    found = _found(answers[2])
    if is_done(batch, found):
        assert found is not None  # noqa: S101 (`is_done` says so)
        yield (
            # Who asks has the name now, and goes on under it.
            Sql(
                "UPDATE busrep_sinks SET run = ?, writer = ?, incarnation = ? WHERE query = ?",
                (batch.run, held.writer, held.incarnation, batch.query),
            ),
            _clear(batch),
            Control.COMMIT,
        )
        return found
    return (yield from _insert(dialect, backing, held, batch))


def _insert(dialect: Dialect, backing: Backing, held: Claim, batch: StagedBatch) -> Plan[Done]:
    """Make the facts, note the batch and commit. The claim and the query's mark are locked."""
    count, first, last = yield from insert_staged(
        dialect, backing, held.writer, batch.query, batch.attempts, batch.ordered
    )
    if count != batch.rows:
        raise StagedRowsGone(batch.query, batch.number, count, batch.rows)
    if count and first <= held.highest[backing.stream]:
        raise SequenceWentBack(backing.stream, first, held.highest[backing.stream])
    made = Done(
        batch.query, batch.checkpoint, batch.number, batch.run, backing.stream, held.writer, held.incarnation,
        count, first, last,
    )  # fmt: skip
    values = attrs.astuple(made)
    named = ", ".join(f"{name} = ?" for name in FIELDS.split(", ")[1:])
    yield (
        Sql(
            f"UPDATE busrep_sinks SET {named}, once = ?, done_at = {dialect.now} WHERE query = ?",
            (*values[1:], batch.once, batch.query),
        ),
        _clear(batch),
        Control.COMMIT,
    )
    return made


def _clear(batch: StagedBatch) -> Sql:
    # Not what is staged for a later batch: this process may be one that hangs behind its successor.
    return Sql("DELETE FROM busrep_staged WHERE query = ? AND batch <= ?", (batch.query, batch.number))


def backing_declared(stream: str) -> Plan[bool]:
    """Whether the stream is kept in a table of the application's, by what the tables say."""
    return bool((yield Sql("SELECT 1 FROM busrep_streams WHERE stream = ? AND backing IS NOT NULL", (stream,)))[0])


def clear(query: str, attempts: Sequence[str] | None) -> Plan[None]:
    """Forget what these attempts staged; None: all of the query's."""
    if attempts is None:
        yield Sql("DELETE FROM busrep_staged WHERE query = ?", (query,))
        return
    for attempt in attempts:
        yield Sql("DELETE FROM busrep_staged WHERE query = ? AND attempt = ?", (query, attempt))


def forget(query: str) -> Plan[None]:
    """Forget a query whose name never comes again."""
    yield Sql("DELETE FROM busrep_sinks WHERE query = ? AND once", (query,))


def clean(dialect: Dialect) -> Plan[None]:
    """Remove what queries left that are gone."""
    yield Sql(f"DELETE FROM busrep_staged WHERE staged_at < {dialect.ago}", (ABANDONED,))
    yield Sql(f"DELETE FROM busrep_sinks WHERE once AND done_at < {dialect.ago}", (ABANDONED,))
