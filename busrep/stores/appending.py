"""Plans of facts that are appended in a transaction of their own, and get their IDs in it."""

# ruff: noqa: S608 - the pieces of SQL are the dialect's, values are parameters
from __future__ import annotations

from collections.abc import Mapping, Sequence

from busrep.errors import ConfigError, SequenceWentBack, StatementRefused, WriterFenced
from busrep.stores.claims import HELD, claim_stands, no_sequence
from busrep.stores.dialect import NOT_HELD, Dialect, begin_durably
from busrep.stores.facts import every_id, insert
from busrep.stores.interface import Appended, Claim, FactRows, Unnumbered
from busrep.stores.plans import Control, Plan, Sql, transaction


def _series(claim: Claim) -> Sql:
    """The writer's series: 0 before the first answer that was lost. It is in a row of busrep_writers, to which a writer
    has all rights, under a name that no writer has, for there is a space in it."""
    row = f"{claim.writer} series"
    return Sql("SELECT coalesce(max(incarnation), 0) FROM busrep_writers WHERE writer = ?", (row,))


def append(
    dialect: Dialect, claim: Claim, batch: Sequence[Appended], series: int, wait: float | None
) -> Plan[int | None]:
    """Write facts in a transaction of their own that holds the claim, on a server in one round trip. Those that have no
    IDs are given theirs. Returns None; or the series that the writer is at, and none was written: ``series`` is over.
    Raises WriterFenced, SequenceWentBack, and Unavailable after ``wait`` seconds for a lock; then none was, either."""
    facts, unnumbered = _by_stream(batch)
    known = {stream: max(one.known for one in given) for stream, given in unnumbered.items()}
    at = _series(claim)
    condition = f"{HELD} AND {dialect.same_server} AND ({at.text}) = ?"
    params: list[object] = [claim.writer, claim.incarnation, *at.params, series]
    for stream, least in known.items():
        given = dialect.given(stream)
        condition += f" AND ({given.text}) >= ?"
        params += *given.params, least
    held = Sql(condition, tuple(params))
    try:
        yield from _append_held(dialect, claim.writer, held, facts, unnumbered, wait)
    except StatementRefused as refused:
        if NOT_HELD not in str(refused):
            raise
    else:
        return None
    answers = yield claim_stands(dialect, claim), at
    if not answers[0]:
        raise WriterFenced(claim.writer, claim.incarnation)
    for stream, at_least in known.items():
        if not (sequence := (yield dialect.sequence(stream))[0]):
            raise no_sequence(dialect, stream, [dialect.backing(stream)])
        if (given := sequence[0][0]) < at_least:
            raise SequenceWentBack(stream, given + 1, at_least)
    return int(answers[1][0][0])


@transaction
def _append_held(
    dialect: Dialect,
    writer: str,
    held: Sql,
    facts: Mapping[str, Sequence[FactRows]],
    unnumbered: Mapping[str, Sequence[Unnumbered]],
    wait: float | None,
) -> Plan[None]:
    """Write these facts if the claim is ``held``, and the series is. Raises StatementRefused, with NOT_HELD."""
    bound = () if wait is None else dialect.lock_timeout(wait)
    locks = (*bound, *dialect.lock_series(writer, exclusive=False), dialect.hold(held))
    rows = {stream: [row for one in given for row in one.payloads] for stream, given in unnumbered.items()}
    inserts = [one for stream, given in facts.items() for one in insert(dialect, stream, writer, given)]
    if dialect.server is not None:
        numbering = [dialect.insert_numbering(stream, writer, new) for stream, new in rows.items()]
        answers = yield (Control.BEGIN, *locks, *numbering, *inserts, Control.COMMIT)
        for given, ids in zip(unnumbered.values(), answers[len(locks) :], strict=False):
            _deal(given, sorted(row[0] for row in ids))
        return
    if not (yield (Control.BEGIN, *locks))[-1]:
        raise StatementRefused(dialect.name, ConfigError(NOT_HELD))
    for stream, given in unnumbered.items():
        found = every_id([row[0] for row in (yield dialect.next_ids(stream, len(rows[stream])))[0]], len(rows[stream]))
        _deal(given, found)
        numbered = [(id, 0, row) for id, row in zip(found, rows[stream], strict=True)]
        inserts += dialect.insert(dialect.backing(stream), writer, numbered)
    yield (*inserts, Control.COMMIT)


def _deal(unnumbered: Sequence[Unnumbered], ids: Sequence[int]) -> None:
    """Give each its IDs of those that the sequence gave for all."""
    for one in unnumbered:
        one.ids, ids = ids[: len(one)], ids[len(one) :]


def _by_stream(
    batch: Sequence[Appended],
) -> tuple[Mapping[str, Sequence[FactRows]], Mapping[str, Sequence[Unnumbered]]]:
    facts: dict[str, list[FactRows]] = {}
    unnumbered: dict[str, list[Unnumbered]] = {}
    for one in batch:
        for stream, given in one.facts.items():
            facts.setdefault(stream, []).extend(given)
        for stream, new in one.unnumbered.items():
            unnumbered.setdefault(stream, []).append(new)
    return facts, unnumbered


@transaction
def end_series(dialect: Dialect, claim: Claim, series: int, wait: float | None) -> Plan[int]:
    """See to it that nothing is written any more of what was appended in this series and got no answer, though its
    request may be under way still. Returns the series that the writer is at then. Waits for requests that are being
    executed. Raises WriterFenced, and Unavailable after ``wait`` seconds for a lock.

    One round trip: a link that is cut in the midst of it leaves no transaction that holds the lock.
    """
    answers = yield (
        *begin_durably(dialect, wait=wait),
        *dialect.lock_series(claim.writer, exclusive=True),
        Sql(
            f"INSERT INTO busrep_writers (writer, incarnation, claimed_at) SELECT ?, ?, {dialect.now} "
            f"FROM busrep_writers WHERE {HELD} AND {dialect.same_server} ON CONFLICT (writer) DO UPDATE "
            f"SET incarnation = {dialect.largest}(busrep_writers.incarnation, excluded.incarnation) "
            "RETURNING incarnation",
            (*_series(claim).params, series + 1, claim.writer, claim.incarnation),
        ),
        Control.COMMIT,
    )
    if not answers[-1]:
        raise WriterFenced(claim.writer, claim.incarnation)
    return int(answers[-1][0][0])
