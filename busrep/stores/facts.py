"""Plans of the facts themselves: writing them, what an unknown COMMIT left, pages of catch-up, retention."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import attrs
import orjson

from busrep.core.catchup import FetchUpdates, UpdatesPage
from busrep.errors import ConfigError, PositionTooOld, WriterFenced
from busrep.stores.claims import check_answered, check_claim, claim_stands, no_sequence
from busrep.stores.dialect import OPEN, ROLLED_BACK, Backing, Dialect, row_columns
from busrep.stores.interface import Claim, FactRows
from busrep.stores.plans import Answers, Control, NoSuchTable, Plan, Sql, in_transaction, transaction
from busrep.stores.readers import LOCK_STREAM

# IDs deleted in one transaction: short enough that a writer on SQLite, which has one write lock, hardly waits.
PRUNE_BATCH = 5_000
# So many rows of what is asked after are read at a time.
OUTCOME_ROWS = 10_000
HIGHEST_ID = 2**63 - 1

Fact = tuple[str, int]  # stream, ID


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
    return every_id([row[0] for row in answer], count)


def every_id(answered: Sequence[int], count: int) -> list[int]:
    """The IDs of which the sequence answered with all, or with the last one alone; ascending."""
    return sorted(answered) if len(answered) == count else list(range(answered[-1] - count + 1, answered[-1] + 1))


def insert(dialect: Dialect, stream: str, writer: str, facts: Iterable[FactRows]) -> Sequence[Sql]:
    """Statements that write these facts' rows: one for all, where the database can."""
    rows = [(token, at, payload) for token, _, payloads in facts for at, payload in enumerate(payloads)]
    return dialect.insert(dialect.backing(stream), writer, rows) if rows else ()


def rows_of(dialect: Dialect, facts: Iterable[Fact], writer: str) -> Plan[dict[Fact, list[bytes]]]:
    """The payloads of these facts; one that has no rows is missing."""
    asked = _by_backing(dialect, facts)
    answers: Answers = []
    for backing, tokens in asked.items():
        answers += yield _rows(dialect, backing, writer, tokens)
    return _found(dialect, asked, answers)


def _by_backing(dialect: Dialect, facts: Iterable[Fact]) -> dict[Backing, list[int]]:
    asked: dict[str, list[int]] = {}
    for stream, token in facts:
        asked.setdefault(stream, []).append(token)
    return {dialect.backing(stream): tokens for stream, tokens in asked.items()}


def _found(dialect: Dialect, asked: Iterable[Backing], answers: Answers) -> dict[Fact, list[bytes]]:
    found: dict[Fact, list[bytes]] = {}
    for backing, rows in zip(asked, answers, strict=True):
        for row, payload in zip(rows, dialect.payloads(backing, rows), strict=True):
            found.setdefault((backing.stream, row[0]), []).append(payload)
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


def rows_above(dialect: Dialect, after: Mapping[str, int], writer: str) -> Plan[dict[Fact, list[bytes]]]:
    """The payloads of a writer's facts above these IDs of the streams."""
    found: dict[Fact, list[bytes]] = {}
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
    dialect: Dialect, held: Claim, facts: Sequence[Fact], above: Mapping[str, int] | None = None
) -> Plan[dict[Fact, list[bytes]]]:
    """What a transaction that has ended left (9.1). The claim is read last: it stands, so the rows are of its log
    still, and of no older state that was restored since, nor of a replica. Raises WriterFenced, Unavailable."""
    found = yield from rows_of(dialect, facts, held.writer)
    found |= yield from rows_above(dialect, above or {}, held.writer)
    yield from check_claim(dialect, held)
    return found


@transaction
def outcomes(
    dialect: Dialect, held: Claim, asked: Sequence[tuple[object, Sequence[Fact]]]
) -> Plan[list[dict[Fact, list[bytes]] | None]]:
    """As `outcome`, of several transactions (marker, facts) on a server, in one round trip: each statement has its own
    snapshot. Raises StatementRefused for all where the server does not know one of the markers."""
    questions = [dialect.outcome(marker) for marker, _ in asked]
    rows = _by_backing(dialect, dict.fromkeys(fact for _, facts in asked for fact in facts))
    answers = yield (
        Control.BEGIN,
        *(question for question in questions if question is not None),
        *(_rows(dialect, backing, held.writer, tokens) for backing, tokens in rows.items()),
        Sql(f"SELECT {dialect.replica}"),
        claim_stands(dialect, held),
        Control.COMMIT,
    )
    told = iter(answers)
    states = ["" if question is None else next(told)[0][0] for question in questions]
    if all(state == OPEN for state in states):
        return [None] * len(asked)
    found = _found(dialect, rows, list(islice(told, len(rows))))
    check_answered(dialect, held, *told)
    # Of one that was rolled back no row is: the sequence may have given its IDs again.
    left = [{} if state == ROLLED_BACK else found for state in states]
    return [
        None if state == OPEN else {fact: rows[fact] for fact in facts if fact in rows}
        for state, rows, (_, facts) in zip(states, left, asked, strict=True)
    ]


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
        return HIGHEST_ID
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
