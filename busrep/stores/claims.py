"""Plans of a writer's name: winning it, proving it, moving its positions, finishing it when it has fallen silent.

Rule numbers are those of protocol.md, section 9.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import orjson

from busrep.errors import ClaimBlocked, ConfigError, WriterFenced
from busrep.ids import Start, plan_start
from busrep.storage import Claim, KnownWriter, Newest
from busrep.stores.backing import Backing
from busrep.stores.dialect import Dialect
from busrep.stores.plans import Control, Locked, NoSuchTable, Plan, Sql, T, in_transaction
from busrep.stores.schema import new_epoch

log = logging.getLogger("busrep.stores")


def claim(
    dialect: Dialect, writer: str, backings: Sequence[Backing], seconds: float, now: int, again: int | None = None
) -> Plan[Claim]:
    """Win the name, register it (9.7), commit, and only then read where it starts (9.4).

    The incarnation is ``now``, the clock in ms, or above its predecessor's. So it rises even where a backup, or a table
    made anew, knows nothing of those that were given out; a process from before must not pass for its successor.

    ``again``: the name must be of this incarnation still, or finished and nobody else's since: else WriterFenced. A try
    that failed without an answer may have won it, so the row notes for whom: the same may ask again.
    """
    yield from verify(dialect, backings)
    won = in_transaction(_win(dialect, writer, backings, seconds, now, again))
    incarnation, registered = yield from _or_blocked(dialect, writer, won)
    # In a new snapshot: whatever a predecessor committed is visible now, or was fenced.
    epoch, found = yield from in_transaction(_where(writer, incarnation, dialect, backings))
    starts = {name: _start(writer, name, name in registered, found[name]) for name in found}
    for name, start in starts.items():
        if start.repair_sequence_to is not None:
            _, rows, _, _ = found[name]
            log.warning("stream %r: its sequence is behind its table at %d; repaired", name, rows)
            yield from in_transaction(_repair(dialect, name, start.repair_sequence_to))
    held = Claim(
        writer,
        incarnation,
        epoch,
        {name: start.positions[writer] for name, start in starts.items()},
        {name: start.positions for name, start in starts.items()},
        {name: start.highest for name, start in starts.items()},
    )
    yield from heartbeat(dialect, held, held.starts)  # before the first reservation, so that others see it (G11)
    return held


State = tuple[int, int, int, dict[str, tuple[int, bool]]]
"""Of one stream: highest ID given out, highest row, highest own row, {writer: (position, registered)}."""


def _start(writer: str, stream: str, was_registered: bool, state: State) -> Start:
    """Section 5's rules, which ids.py knows. A name that registers anew has nothing open: it starts at the highest
    ID known, its position of old (which may lie above: a final position) being one of them."""
    given, rows, own, listed = state
    # No writer's name is a space: what stands under it counts in `highest` alone, such as others' rows (9.3).
    positions = {
        " " if who == writer and not was_registered else who: position for who, (position, _) in listed.items()
    }
    return plan_start(
        stream=stream,
        rows={writer: own, " ": rows},
        positions=positions,
        sequence=given,
        writers=[who for who, (_, registered) in listed.items() if registered],
        own=writer,
    )


def verify(dialect: Dialect, backings: Iterable[Backing]) -> Plan[None]:
    """ConfigError unless each stream has a sequence without cache and cycle (9.15) and the declared columns."""
    for backing in backings:
        try:
            found = (yield dialect.sequence(backing.stream))[0]
        except NoSuchTable:
            found = []
        if not found:
            raise ConfigError(f"stream {backing.stream!r} has no sequence yet: run 'busrep db init' with it")
        _, cache, cycles, increment = found[0]
        if (cache, bool(cycles), increment) != (1, False, 1):
            raise ConfigError(
                f"the sequence of stream {backing.stream!r} must have CACHE 1, NO CYCLE, INCREMENT 1; it has "
                f"CACHE {cache}, {'CYCLE' if cycles else 'NO CYCLE'}, INCREMENT {increment}"
            )
        if backing.own:
            columns = [backing.id, backing.writer, *backing.columns, *([backing.index] if backing.index else [])]
            try:
                yield Sql(f"SELECT {', '.join(columns)} FROM {backing.table} LIMIT 0")
            except NoSuchTable as missing:
                raise ConfigError(
                    f"stream {backing.stream!r}: its table {backing.table} with the columns "
                    f"{', '.join(columns)} is needed: {missing.cause}"
                ) from missing


def _or_blocked(dialect: Dialect, writer: str, plan: Plan[T]) -> Plan[T]:
    try:
        return (yield from plan)
    except Locked as locked:
        blockers = yield from dialect.blockers(writer)
        raise ClaimBlocked(writer, blockers) from locked


def _win(
    dialect: Dialect, writer: str, backings: Sequence[Backing], seconds: float, now: int, again: int | None = None
) -> Plan[tuple[int, set[str]]]:
    """The incarnation, and the streams the name was registered for already."""
    begin: tuple[Control | Sql, ...] = (
        Control.BEGIN,
        *dialect.lock_timeout(seconds),
        # Not while 'db restored' is at work, which fences the names that it sees.
        Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'" + dialect.share),
    )
    if again is not None:
        answers = yield (
            *begin,
            # Locked: between this look and the claim nobody else may win the name.
            Sql(
                "SELECT 1 FROM busrep_writers WHERE writer = ? AND "
                f"(incarnation = ? OR (incarnation = ? AND finished = ?) OR finished = ?){dialect.exclusive}",
                (writer, again, again + 1, again, -again),
            ),
        )
        if not answers[-1]:
            raise WriterFenced(writer, again)
        begin = ()
    won_by = None if again is None else -again  # below zero: not finished
    answers = yield (
        *begin,
        # Waits until no transaction of a predecessor holds the row FOR SHARE.
        Sql(
            f"INSERT INTO busrep_writers (writer, incarnation, claimed_at, finished) VALUES (?, ?, {dialect.now}, ?) "
            f"ON CONFLICT (writer) DO UPDATE SET incarnation = {dialect.largest}(busrep_writers.incarnation, ?) + 1, "
            "claimed_at = excluded.claimed_at, finished = excluded.finished RETURNING incarnation",
            (writer, now, won_by, now - 1),
        ),
        Sql("SELECT stream FROM busrep_positions WHERE writer = ? AND registered", (writer,)),
    )
    for backing in backings:
        yield Sql(
            "INSERT INTO busrep_positions (stream, writer, position, floor, registered, seen_at) "
            f"VALUES (?, ?, 0, 0, TRUE, {dialect.now}) ON CONFLICT (stream, writer) DO UPDATE "
            "SET registered = TRUE, finished = NULL, seen_at = excluded.seen_at",
            (backing.stream, writer),
        )
    yield Control.COMMIT
    return int(answers[-2][0][0]), {stream for (stream,) in answers[-1]}


def _where(
    writer: str, incarnation: int, dialect: Dialect, backings: Sequence[Backing]
) -> Plan[tuple[str, dict[str, State]]]:
    """The epoch, and the state of each stream, in one snapshot in which the claim still stands."""
    answers = yield (
        Control.SNAPSHOT,
        Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'"),
        Sql("SELECT 1 FROM busrep_writers WHERE writer = ? AND incarnation = ?", (writer, incarnation)),
    )
    ((epoch,),), held = answers
    if not held:
        raise WriterFenced(writer, incarnation)
    states: dict[str, State] = {}
    for backing in backings:
        where, params = backing.of_writer(writer)
        answers = yield (
            Sql("SELECT writer, position, registered FROM busrep_positions WHERE stream = ?", (backing.stream,)),
            highest_row(backing),
            Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table} WHERE {where}", params),
            # A sequence is in no snapshot: read last, it is never less than what the rows above needed.
            dialect.sequence(backing.stream),
        )
        listed, ((rows,),), ((own,),), sequence = answers
        positions = {who: (position, bool(registered)) for who, position, registered in listed}
        states[backing.stream] = (sequence[0][0] if sequence else 0, rows, own, positions)
    yield Control.COMMIT
    return epoch, states


def highest_row(backing: Backing) -> Sql:
    """The highest token in the stream's table, 0 without rows."""
    if backing.own:
        return Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table}")
    # One look at the index per writer; every writer has a positions row before its first fact (9.7).
    return Sql(
        "SELECT coalesce(max(highest), 0) FROM (SELECT (SELECT max(f.id) FROM busrep_facts f WHERE "
        "f.stream = p.stream AND f.writer = p.writer) AS highest FROM busrep_positions p WHERE p.stream = ?) AS h",
        (backing.stream,),
    )


def _repair(dialect: Dialect, stream: str, least: int) -> Plan[None]:
    yield Control.BEGIN
    yield from dialect.raise_sequence(stream, least)
    yield Control.COMMIT


def lock_claim(dialect: Dialect, held: Claim) -> Sql:
    """The first statement of a write transaction (9.4): no row, and the writer is fenced. Answers the marker."""
    return Sql(
        f"SELECT {dialect.marker} FROM busrep_writers WHERE writer = ? AND incarnation = ?{dialect.share}",
        (held.writer, held.incarnation),
    )


def check_claim(held: Claim) -> Plan[None]:
    """Read the claim (9.2)."""
    answers = yield Sql(
        "SELECT 1 FROM busrep_writers WHERE writer = ? AND incarnation = ?", (held.writer, held.incarnation)
    )
    if not answers[0]:
        raise WriterFenced(held.writer, held.incarnation)


def heartbeat(dialect: Dialect, held: Claim, positions: Mapping[str, int]) -> Plan[dict[str, dict[str, int]]]:
    """Proven positions and a sign of life, while the claim stands; the registry as it is under that lock."""

    def body() -> Plan[dict[str, dict[str, int]]]:
        answers = yield (Control.BEGIN, lock_claim(dialect, held))
        if not answers[0]:
            raise WriterFenced(held.writer, held.incarnation)
        moved = orjson.dumps([[stream, position] for stream, position in positions.items()]).decode()
        answers = yield (
            Sql(
                f"UPDATE busrep_positions SET seen_at = {dialect.now}, position = {dialect.largest}(position, "
                f"coalesce((SELECT v.position FROM {dialect.values(('stream', 'text'), ('position', 'bigint'))} "
                "AS v WHERE v.stream = busrep_positions.stream), 0)) WHERE writer = ? AND registered",
                (moved, held.writer),
            ),
            Sql("SELECT stream, writer, position FROM busrep_positions WHERE registered"),
            Control.COMMIT,
        )
        registry: dict[str, dict[str, int]] = {}
        for stream, writer, position in answers[1]:
            registry.setdefault(stream, {})[writer] = position
        return registry

    return in_transaction(body())


def known(dialect: Dialect) -> Plan[list[KnownWriter]]:
    """Every (stream, writer)."""
    answers = yield Sql(
        "SELECT p.stream, p.writer, p.position, p.floor, p.registered, coalesce(w.incarnation, 0), "
        f"{dialect.age('p.seen_at')} FROM busrep_positions p LEFT JOIN busrep_writers w ON w.writer = p.writer "
        "ORDER BY p.stream, p.writer"
    )
    return [
        KnownWriter(stream, writer, position, floor, bool(registered), incarnation, max(0.0, float(silent)))
        for stream, writer, position, floor, registered, incarnation, silent in answers[0]
    ]


def newest(dialect: Dialect, backing: Backing) -> Plan[Newest | None]:
    """The highest row ID of every writer of a stream, deleted ones counting; None on a replica."""
    same_stream = "" if backing.own else "stream = p.stream AND "
    answers = yield Sql(  # one statement, one snapshot; without a writer the epoch all the same
        f"SELECT {dialect.replica}, m.value, p.writer, p.floor, (SELECT {backing.top} FROM {backing.table} "
        f"WHERE {same_stream}{backing.writer} = p.writer) FROM busrep_meta m LEFT JOIN busrep_positions p "
        "ON p.stream = ? WHERE m.key = 'epoch'",
        (backing.stream,),
    )
    replica, epoch = answers[0][0][:2]
    rows = {writer: max(floor, highest or 0) for _, _, writer, floor, highest in answers[0] if writer is not None}
    return None if replica else Newest(epoch, rows)


def finish(
    dialect: Dialect, backings: Mapping[str, Backing], writer: str, incarnation: int, seconds: float
) -> Plan[dict[str, int]]:
    """Fence (committed), then in a new snapshot take rows and sequence for the final positions (9.5)."""
    fenced = yield from _or_blocked(dialect, writer, in_transaction(_fence(dialect, writer, incarnation, seconds)))
    if fenced is None:
        return {}
    finals = in_transaction(_finals(dialect, backings, writer, fenced, seconds))
    return (yield from _or_blocked(dialect, writer, finals))


def _fence(dialect: Dialect, writer: str, incarnation: int, seconds: float) -> Plan[int | None]:
    """The incarnation that is fenced; the one before, if somebody has fenced that already and got no further: its
    process could not tell that the name is its own if it were fenced twice."""
    answers = yield (
        Control.BEGIN,
        *dialect.lock_timeout(seconds),
        Sql(
            "UPDATE busrep_writers SET incarnation = incarnation + 1, finished = incarnation "
            "WHERE writer = ? AND incarnation = ? AND coalesce(finished, -1) <> ?",
            (writer, incarnation, incarnation - 1),
        ),
        Sql(
            "SELECT finished FROM busrep_writers WHERE writer = ? AND "
            "((incarnation = ? AND finished = ?) OR (incarnation = ? AND finished = ?))",
            (writer, incarnation + 1, incarnation, incarnation, incarnation - 1),
        ),
        Control.COMMIT,
    )
    return int(answers[-1][0][0]) if answers[-1] else None


def _finals(
    dialect: Dialect, backings: Mapping[str, Backing], writer: str, incarnation: int, seconds: float
) -> Plan[dict[str, int]]:
    answers = yield (
        Control.BEGIN,
        *dialect.lock_timeout(seconds),
        # Holds back a new claim of the name: IDs it reserves would lie below the final positions taken here.
        Sql(
            "SELECT 1 FROM busrep_writers WHERE writer = ? AND incarnation = ? AND finished = ?" + dialect.exclusive,
            (writer, incarnation + 1, incarnation),
        ),
        Sql("SELECT stream, position, registered, finished FROM busrep_positions WHERE writer = ?", (writer,)),
    )
    finals: dict[str, int] = {}
    for stream, position, registered, finished in answers[-1] if answers[-2] else ():
        if finished == incarnation:
            finals[stream] = position
        elif registered:
            finals[stream] = yield from _final_position(dialect, backings.get(stream), stream, writer, position)
            yield Sql(
                "UPDATE busrep_positions SET position = ?, registered = FALSE, finished = ? "
                "WHERE stream = ? AND writer = ?",
                (finals[stream], incarnation, stream, writer),
            )
    yield Control.COMMIT
    return finals


def sequence(dialect: Dialect, backing: Backing) -> Plan[int | None]:
    """The highest ID the stream's sequence gave; None on a replica."""
    answers = yield (Sql(f"SELECT {dialect.replica}"), dialect.sequence(backing.stream))
    return None if answers[0][0][0] or not answers[1] else int(answers[1][0][0])


def _final_position(dialect: Dialect, backing: Backing | None, stream: str, writer: str, position: int) -> Plan[int]:
    sequence = (yield dialect.sequence(stream))[0]
    highest = max(position, sequence[0][0] if sequence else 0)
    if backing is not None:  # a sequence may be behind the table (restored, or rows written past it)
        where, params = backing.of_writer(writer)
        rows = yield Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table} WHERE {where}", params)
        highest = max(highest, rows[0][0][0])
    return highest


def restored(dialect: Dialect, backings: Sequence[Backing], seconds: float, now: int) -> Plan[str]:
    """A new epoch; all writers fenced; positions back to what the rows hold; sequences not behind them.

    ``now``: the clock in ms. Incarnations go on above it, as with a claim.
    """

    def body() -> Plan[str]:
        epoch = new_epoch()
        yield (
            Control.BEGIN,
            *dialect.lock_timeout(seconds),
            # First, as a claim does: then the two never wait for each other.
            Sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", (epoch,)),
            Sql(f"UPDATE busrep_writers SET incarnation = {dialect.largest}(incarnation, ?) + 1", (now,)),
            Sql("UPDATE busrep_writers SET finished = NULL"),  # nobody wins back a name of the log before
        )
        for backing in backings:
            listed = (yield Sql("SELECT writer FROM busrep_positions WHERE stream = ?", (backing.stream,)))[0]
            for (writer,) in listed:
                where, params = backing.of_writer(writer)
                yield Sql(
                    f"UPDATE busrep_positions SET position = {dialect.largest}(floor, (SELECT "
                    f"coalesce({backing.top}, 0) FROM {backing.table} WHERE {where})) "
                    "WHERE stream = ? AND writer = ?",
                    (*params, backing.stream, writer),
                )
            rows = (yield highest_row(backing))[0][0][0]
            floors = yield Sql(
                "SELECT coalesce(max(position), 0) FROM busrep_positions WHERE stream = ?", (backing.stream,)
            )
            yield from dialect.raise_sequence(backing.stream, max(rows, floors[0][0][0]))
        yield Control.COMMIT
        return epoch

    return _or_blocked(dialect, "*", in_transaction(body()))
