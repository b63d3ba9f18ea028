"""Plans of the facts themselves: writing them, what an unknown COMMIT left, pages of catch-up, retention."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs
import orjson

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.errors import ConfigError, PositionTooOld, SequenceWentBack, StatementRefused, WriterFenced
from busrep.stores.claims import HELD, check_claim, claim_stands, no_sequence
from busrep.stores.dialect import NOT_HELD, Backing, Dialect, begin_durably, row_columns
from busrep.stores.interface import Appended, Claim, FactRows, Unnumbered
from busrep.stores.plans import Control, NoSuchTable, Plan, Sql, in_transaction, transaction
from busrep.stores.readers import LOCK_STREAM

# IDs deleted in one transaction: short enough that a writer on SQLite, which has one write lock, hardly waits.
PRUNE_BATCH = 5_000
# So many rows of what is asked after are read at a time.
OUTCOME_ROWS = 10_000
HIGHEST_ID = 2**63 - 1


def reserve(dialect: Dialect, stream: str, count: int, held: Claim | None = None) -> Plan[list[int]]:
    """Take ``count`` IDs from the stream's sequence, ascending, in a transaction of their own.

    ConfigError when there is no sequence. ``held``: WriterFenced when this claim does not stand.
    """
    backing = dialect.backing(stream)
    stands = () if held is None else (claim_stands(dialect, held),)
    try:
        answer, *claims = yield (dialect.next_ids(stream, count), *stands)
    except NoSuchTable:
        if (yield from dialect.version()) is None:  # nothing of busrep's is there
            raise
        answer, claims = [], []
    if held is not None and claims == [[]]:
        raise WriterFenced(held.writer, held.incarnation)
    if not answer:
        raise no_sequence(dialect, stream, [backing])
    return _every([row[0] for row in answer], count)


def _every(answered: Sequence[int], count: int) -> list[int]:
    """The IDs of which the sequence answered with all, or with the last one alone; ascending."""
    return sorted(answered) if len(answered) == count else list(range(answered[-1] - count + 1, answered[-1] + 1))


def insert(dialect: Dialect, stream: str, writer: str, facts: Iterable[FactRows]) -> Sequence[Sql]:
    """Statements that write these facts' rows: one for all, where the database can."""
    rows = _numbered(facts)
    return dialect.insert(dialect.backing(stream), writer, rows) if rows else ()


def _numbered(facts: Iterable[FactRows]) -> list[tuple[int, int, bytes]]:
    return [(token, at, payload) for token, _, payloads in facts for at, payload in enumerate(payloads)]


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
    above = [
        (given.text, (*given.params, least)) for stream, least in known.items() for given in [dialect.given(stream)]
    ]
    conditions = "".join(f" AND ({text}) >= ?" for text, _ in above)
    held = Sql(
        f"{HELD} AND {dialect.same_server} AND ({at.text}) = ?{conditions}",
        (claim.writer, claim.incarnation, *at.params, series, *itertools.chain(*(params for _, params in above))),
    )
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
    yield from _check_not_behind(dialect, known)
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
    numbering = [made for stream, new in rows.items() if (made := dialect.insert_numbering(stream, writer, new))]
    inserts = [one for stream, given in facts.items() for one in insert(dialect, stream, writer, given)]
    if dialect.server is not None:
        answers = yield (Control.BEGIN, *locks, *numbering, *inserts, Control.COMMIT)
        for given, ids in zip(unnumbered.values(), answers[len(locks) :], strict=False):
            _deal(given, sorted(row[0] for row in ids))
        return
    if not (yield (Control.BEGIN, *locks))[-1]:
        raise StatementRefused(dialect.name, ConfigError(NOT_HELD))
    for stream, given in unnumbered.items():
        found = _every([row[0] for row in (yield dialect.next_ids(stream, len(rows[stream])))[0]], len(rows[stream]))
        _deal(given, found)
        numbered = [(id, 0, row) for id, row in zip(found, rows[stream], strict=True)]
        inserts += dialect.insert(dialect.backing(stream), writer, numbered)
    yield (*inserts, Control.COMMIT)


def _deal(unnumbered: Sequence[Unnumbered], ids: Sequence[int]) -> None:
    """Give each its IDs of those that the sequence gave for all."""
    for one in unnumbered:
        one.ids, ids = ids[: len(one)], ids[len(one) :]


def _check_not_behind(dialect: Dialect, known: Mapping[str, int]) -> Plan[None]:
    """Raise SequenceWentBack when not all of these streams' sequences are where they were known to be."""
    for stream, at_least in known.items():
        if not (sequence := (yield dialect.sequence(stream))[0]):
            raise no_sequence(dialect, stream, [dialect.backing(stream)])
        if (given := sequence[0][0]) < at_least:
            raise SequenceWentBack(stream, given + 1, at_least)


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


def rows_of(
    dialect: Dialect, facts: Sequence[tuple[str, int]], writer: str
) -> Plan[dict[tuple[str, int], list[bytes]]]:
    """The payloads of these facts; one that has no rows is missing."""
    asked: dict[str, list[int]] = {}
    for stream, token in facts:
        asked.setdefault(stream, []).append(token)
    found: dict[tuple[str, int], list[bytes]] = {}
    for stream, tokens in asked.items():
        backing = dialect.backing(stream)
        rows = (yield _rows(dialect, backing, writer, tokens))[0]
        for row, payload in zip(rows, dialect.payloads(backing, rows), strict=True):
            found.setdefault((stream, row[0]), []).append(payload)
    return found


def _rows(dialect: Dialect, backing: Backing, writer: str, tokens: Sequence[int]) -> Sql:
    where, params = backing.of_writer(writer)
    columns, names = row_columns(dialect, backing)
    asked = f"SELECT {'-' if backing.negative else ''}v.id FROM {dialect.values(('id', 'bigint'))} AS v"
    return Sql(
        f"SELECT token, {names} FROM (SELECT {columns} FROM {backing.table} WHERE {where} "
        f"AND {backing.id} IN ({asked})) AS p ORDER BY token, place",
        (*params, orjson.dumps([[token] for token in tokens]).decode()),
    )


def rows_above(dialect: Dialect, after: Mapping[str, int], writer: str) -> Plan[dict[tuple[str, int], list[bytes]]]:
    """The payloads of a writer's facts above these IDs of the streams."""
    found: dict[tuple[str, int], list[bytes]] = {}
    for stream, last in after.items():
        backing, more = dialect.backing(stream), True
        while more:
            rows = (yield dialect.page(backing, writer, last, HIGHEST_ID, OUTCOME_ROWS))[0]
            for row, payload in zip(rows, dialect.payloads(backing, rows), strict=True):
                found.setdefault((stream, row[0]), []).append(payload)
                last = row[0]
            more = len(rows) > OUTCOME_ROWS
    return found


def outcome(
    dialect: Dialect,
    held: Claim,
    marker: object,
    facts: Sequence[tuple[str, int]],
    above: Mapping[str, int] | None = None,
) -> Plan[dict[tuple[str, int], list[bytes]] | None]:
    """None while the transaction may be open. The rows are read by a later statement: its snapshot is taken after
    the transaction was seen to have ended (9.1). The claim is read last: it stands, so the rows are of its log still,
    and of no older state that was restored since, nor of a replica. Raises WriterFenced, Unavailable."""
    question = dialect.outcome(marker)
    if question is not None:
        answers = yield question
        if answers[0][0][0]:
            return None
    found = yield from rows_of(dialect, facts, held.writer)
    found |= yield from rows_above(dialect, above or {}, held.writer)
    yield from check_claim(dialect, held)
    return found


@transaction
def fetch(dialect: Dialect, question: FetchUpdates) -> Plan[UpdatesPage]:
    """One page, all of it from one snapshot: epoch, floor, proof (9.9) and rows up to a fact boundary (9.10)."""
    backing = dialect.backing(question.stream)
    stream, writer, after, upto = question.stream, question.writer, question.after, question.upto
    limit = max(1, question.limit)
    answers = yield (
        Control.SNAPSHOT,
        Sql(
            f"SELECT (SELECT value FROM busrep_meta WHERE key = 'epoch'), {dialect.replica}, "
            "coalesce(max(floor), 0), coalesce(max(position), 0) FROM busrep_positions "
            "WHERE stream = ? AND writer = ?",
            (stream, writer),
        ),
        dialect.sequence(stream),
        dialect.page(backing, writer, after, upto, limit),
        Control.COMMIT,
    )
    ((epoch, replica, floor, position),), sequence, rows = answers
    if after < floor and after < upto:
        raise PositionTooOld(stream, writer, after, floor, epoch)
    # A replica may lack rows below ones it has: there only the positions row, in the same snapshot, proves. The
    # primary has all up to what was announced; nothing above its sequence was, though it may be behind rows.
    given = max(sequence[0][0] if sequence else 0, rows[-1][0] if rows else 0)
    proven = max(after, min(upto, position if replica else given))
    if proven < upto:
        rows = [row for row in rows if row[0] <= proven]
    tokens = [row[0] for row in rows]
    limited = len(tokens) > limit
    if limited:
        whole = tokens.index(tokens[-1])  # where the fact begins that crosses the limit
        if whole > 0:
            del tokens[whole:], rows[whole:]
        proven = tokens[-1]
    payloads = dialect.payloads(backing, rows)
    return UpdatesPage(stream, writer, after, proven, tokens, payloads, limited, epoch)


@attrs.frozen
class Kept:
    """What stays when a table is pruned. See `StoreAdmin.prune`."""

    older_than: float | None
    keep: int | None
    reader_cap: float | None


def prune(
    dialect: Dialect,
    *,
    older_than: float | None = None,
    keep: int | None = None,
    reader_cap: float | None = None,
    stream: str | None = None,
) -> Plan[dict[tuple[str, str], int]]:
    """Delete in batches; rows and floor move in one transaction. Returns the floors that moved."""
    if older_than is None and keep is None:
        raise ConfigError("prune needs older_than or keep: without either it would delete everything")
    if stream is None:
        chosen = [backing for backing in dialect.backings.values() if not backing.own]
    else:
        chosen = [dialect.backing(stream)]
        if chosen[0].own and keep is None:
            raise ConfigError(f"stream {stream!r} has its own table, without dates: prune it with keep")
    kept = Kept(older_than, keep, reader_cap)
    moved: dict[tuple[str, str], int] = {}
    for backing in chosen:
        listed = (yield Sql("SELECT writer FROM busrep_positions WHERE stream = ?", (backing.stream,)))[0]
        for (writer,) in listed:
            most = yield from _not_kept(backing, writer, kept.keep)
            while True:
                floor, more = yield from in_transaction(prune_batch(dialect, backing, writer, kept, most))
                if floor is not None:
                    moved[backing.stream, writer] = floor
                if not more:
                    break
    return moved


def _not_kept(backing: Backing, writer: str, keep: int | None) -> Plan[int]:
    """The highest ID that ``keep`` lets go. It only rises, so that it is asked once, before anything is locked."""
    if keep is None or keep <= 0:
        return 2**63 - 1
    where, params = backing.of_writer(writer)
    turned = "" if backing.negative else " DESC"
    last = yield Sql(
        f"SELECT {backing.token} FROM {backing.table} WHERE {where} ORDER BY {backing.id}{turned} LIMIT 1 OFFSET ?",
        (*params, keep - 1),
    )
    # Below the fact that holds the last row to keep: facts go whole. Fewer rows than that: all stay.
    return int(last[0][0][0]) - 1 if last[0] else 0


def prune_batch(
    dialect: Dialect, backing: Backing, writer: str, kept: Kept, most: int
) -> Plan[tuple[int | None, bool]]:
    """(the new floor if rows were deleted, whether more may be). ``most``: the highest ID that may go.

    Its writer waits meanwhile: so no statement looks at more rows than one batch has.
    """
    answers = yield (
        Control.BEGIN,
        Sql(LOCK_STREAM + dialect.exclusive, (backing.stream,)),  # before the readers are looked at
        Sql(
            "SELECT position, floor FROM busrep_positions WHERE stream = ? AND writer = ?" + dialect.exclusive,
            (backing.stream, writer),
        ),
    )
    position, floor = answers[1][0]
    handled = yield from _readers_bound(dialect, backing.stream, writer, position, kept.reader_cap)
    rows, params = backing.rows(writer, floor, min(most, handled))
    ordered = f"ORDER BY {backing.by_token} LIMIT 1 OFFSET {PRUNE_BATCH}"
    step = (yield Sql(f"SELECT {backing.token} {rows} {ordered}", params))[0]
    if step:
        rows, params = backing.rows(writer, floor, step[0][0])
    if kept.older_than is not None and not backing.own:
        aged = (*params, kept.older_than)
        young = (yield Sql(f"SELECT id {rows} AND committed_at > {dialect.ago} ORDER BY id LIMIT 1", aged))[0]
        if young:
            rows, params = backing.rows(writer, floor, young[0][0] - 1)
    top = (yield Sql(f"SELECT {backing.top} {rows}", params))[0][0][0]
    if top is None:
        yield Control.COMMIT
        return None, False
    yield (
        Sql(f"DELETE {rows}", params),
        Sql(
            f"UPDATE busrep_positions SET floor = {dialect.largest}(floor, ?) WHERE stream = ? AND writer = ?",
            (top, backing.stream, writer),
        ),
        Control.COMMIT,
    )
    return max(floor, top), bool(step)


def _readers_bound(dialect: Dialect, stream: str, writer: str, position: int, reader_cap: float | None) -> Plan[int]:
    """The lowest saved position for this (stream, writer) of the readers that read this stream; a reader that has
    none yet will begin at 0."""
    recent, cap = ("", ()) if reader_cap is None else (f" HAVING max(saved_at) > {dialect.ago}", (reader_cap,))
    held = yield Sql(
        "SELECT coalesce(max(CASE WHEN writer = ? THEN position END), 0) FROM busrep_readers "
        f"WHERE stream = ? GROUP BY reader{recent}",
        (writer, stream, *cap),
    )
    return int(min([position, *(row[0] for row in held[0])]))
