"""Plans of a writer's name: winning it, proving it, moving its positions, finishing it when it has fallen silent.

Rule numbers are those of protocol.md, section 9.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import attrs
import orjson

from busrep.core.starts import Start, plan_start
from busrep.errors import ConfigError, Unavailable, WriterFenced
from busrep.stores.declared import init_command
from busrep.stores.dialect import Backing, Dialect, begin_durably, highest_row, or_blocked
from busrep.stores.fencing import WON, clock, final_position, follow_server
from busrep.stores.interface import Claim, KnownWriter, Newest, Registered
from busrep.stores.plans import Control, NoSuchTable, Plan, Row, Sql, in_transaction, transaction
from busrep.stores.schema import EPOCH, check_columns, record_fields

log = logging.getLogger("busrep.stores")

# Of a name that is nobody's now: the incarnation in its row is the one after that which was fenced. A process may have
# won this very number in commits that a failover has lost, under a clock that is behind.
LIVE = "coalesce(finished, -1) < 0"
# Of a transaction that is no writer's, but for the effects of a handler.
NO_CLAIM = Claim("", 0, "", {}, {}, {})
SEQUENCES = 100  # that one statement looks at
HELD = f"writer = ? AND incarnation = ? AND {LIVE}"


def claim(
    dialect: Dialect, writer: str, streams: Sequence[str], *, timeout: float, again: int | None = None
) -> Plan[Claim]:
    """Win the name, register it (9.7), commit, and only then read where it starts (9.4).

    The incarnation is the clock in ns, or above its predecessor's. So it rises even where a backup, or a table
    made anew, knows nothing of those that were given out; a process from before must not pass for its successor.

    ``again``: the name must be of this incarnation still, or finished and nobody else's since: else WriterFenced. A try
    that failed without an answer may have won it, so the row notes for whom: the same may ask again.
    """
    # In a fixed order, so that two claims never wait for each other.
    backings, now = [dialect.backing(stream) for stream in sorted(set(streams))], clock()
    yield from verify(dialect, backings)
    yield from record_fields(dialect, backings)
    yield from or_blocked(dialect, "*", follow_server(dialect, timeout, now))
    won = in_transaction(_win(dialect, writer, backings, timeout, now, again))
    incarnation, registered = yield from or_blocked(dialect, writer, won)
    # In a new snapshot: whatever a predecessor committed is visible now, or was fenced.
    epoch, found = yield from in_transaction(held_state(writer, incarnation, dialect, backings))
    starts = {name: _start(writer, name, name in registered, found[name]) for name in found}
    for name, start in starts.items():
        if start.repair_sequence_to is not None:
            _, rows, _, _ = found[name]
            log.warning("stream %r: its sequence is behind its table at %d; repaired", name, rows)
            yield from in_transaction(_repair(dialect, name, start.repair_sequence_to))
    own = {name: start.positions[writer] for name, start in starts.items()}
    positions = {name: start.positions for name, start in starts.items()}
    highest = {name: start.highest for name, start in starts.items()}
    held = Claim(writer, incarnation, epoch, own, positions, highest)
    # Before the first reservation, so that others see it (G11).
    registry = yield from heartbeat(dialect, held, held.starts)
    return attrs.evolve(held, claims=registry.claims, sequences=registry.sequences)


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


def verify(dialect: Dialect, backings: Sequence[Backing] | None = None) -> Plan[None]:
    """ConfigError unless each stream has a sequence without cache and cycle (9.15) and the declared columns.

    ``backings``: of the streams; None: all.
    """
    backings = list(dialect.backings.values()) if backings is None else backings
    for backing in backings:
        try:
            found = (yield dialect.sequence(backing.stream))[0]
        except NoSuchTable:
            found = []
        if not found:
            raise no_sequence(dialect, backing.stream, backings)
        _, cache, cycles, increment = found[0]
        if (cache, bool(cycles), increment) != (1, False, 1):
            raise ConfigError(
                f"the sequence of stream {backing.stream!r} must have CACHE 1, NO CYCLE, INCREMENT 1; it has "
                f"CACHE {cache}, {'CYCLE' if cycles else 'NO CYCLE'}, INCREMENT {increment}"
            )
        if backing.own:
            yield from check_columns(dialect, backing)


def no_sequence(dialect: Dialect, stream: str, backings: Iterable[Backing]) -> ConfigError:
    """What is raised for a stream without a sequence; it names the command that makes all of ``backings``."""
    command = init_command(dialect.store, [backing.definition for backing in backings])
    return ConfigError(f"stream {stream!r} has no sequence yet: run '{command}'")


def _win(
    dialect: Dialect, writer: str, backings: Sequence[Backing], seconds: float, now: int, again: int | None = None
) -> Plan[tuple[int, set[str]]]:
    """The incarnation, and the streams the name was registered for already."""
    answers = yield (
        *begin_durably(dialect, wait=seconds),
        # Not while 'db restored' is at work, which fences the names that it sees.
        Sql(EPOCH.text + dialect.share),
        Sql("SELECT value FROM busrep_meta WHERE key = 'incarnations'"),
    )
    # What was left out. No row: the table was made by a version before that.
    above = max([now - 1, *(int(value) for (value,) in answers[-1])])
    if again is not None:
        yield from _check_again(dialect, writer, again)
    won_by = None if again is None else -again  # below zero: not finished
    answers = yield (
        # Both wait until no transaction of a predecessor holds the name.
        *dialect.take_name(writer),
        Sql(
            f"INSERT INTO busrep_writers (writer, incarnation, claimed_at, finished) VALUES (?, ?, {dialect.now}, ?) "
            f"ON CONFLICT (writer) DO UPDATE SET incarnation = {dialect.largest}(busrep_writers.incarnation, ?) + 1, "
            "claimed_at = excluded.claimed_at, finished = excluded.finished RETURNING incarnation",
            (writer, above + 1, won_by, above),
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
    registered = {stream for (stream,) in answers[-1]}
    yield from _give_up(dialect, writer, sorted(registered.difference(backing.stream for backing in backings)))
    yield Control.COMMIT
    return int(answers[-2][0][0]), registered


def _give_up(dialect: Dialect, writer: str, streams: Sequence[str]) -> Plan[None]:
    """Unregister streams that a predecessor wrote and this claim is not for: their last rows would wait for a writer
    that never comes back, and it would hold back their linear position. Behind the lock of its row: it has committed
    all that it will, and if this fails, it has its name still."""
    for stream in streams:
        where = (stream, writer)
        ((position,),) = (yield Sql("SELECT position FROM busrep_positions WHERE stream = ? AND writer = ?", where))[0]
        yield Sql(
            "UPDATE busrep_positions SET position = ?, registered = FALSE WHERE stream = ? AND writer = ?",
            ((yield from final_position(dialect, stream, writer, position)), *where),
        )


def _check_again(dialect: Dialect, writer: str, again: int) -> Plan[None]:
    """Take the name if it may be won back, so that nobody else wins it. Else WriterFenced, at once where that shows."""
    noted = "SELECT incarnation FROM busrep_writers WHERE writer = ? AND finished = ?"
    stands = Sql(
        "SELECT 1 FROM busrep_writers WHERE writer = ? AND "
        f"((incarnation = ? AND {LIVE}) OR (incarnation = ? AND finished = ?) OR finished = ? "
        f"OR (incarnation = finished + 1 AND finished IN ({noted})))",
        (writer, again, again + 1, again, -again, writer + WON, -again),
    )
    answers = yield (*dialect.take_name(writer, stands), stands)
    if not answers[-1]:
        raise WriterFenced(writer, again)


def held_state(
    writer: str, incarnation: int, dialect: Dialect, backings: Sequence[Backing]
) -> Plan[tuple[str, dict[str, State]]]:
    """The epoch, and the state of each stream, in one snapshot in which the claim still stands."""
    answers = yield (Control.SNAPSHOT, EPOCH, Sql(f"SELECT 1 FROM busrep_writers WHERE {HELD}", (writer, incarnation)))
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


def _repair(dialect: Dialect, stream: str, least: int) -> Plan[None]:
    yield begin_durably(dialect)
    yield from dialect.raise_sequence(stream, least)
    yield Control.COMMIT


def lock_claim(dialect: Dialect, held: Claim, ids: Mapping[str, int] = {}, *, row: bool = True) -> Sql:
    """Proof of the claim, first in a write transaction (9.4): no row, and the writer is fenced. Answers the marker,
    the setting that it made, and on a server, of each stream in ``ids``, so many new IDs. ``row``: locks the claim's.

    It makes the transaction durable as well: what it commits is announced. And the server is the one that was
    noted, on the same timeline: else the writer counts as fenced, and claims its name again.
    """
    given = "".join(f", {dialect.new_ids(stream, count)}" for stream, count in ids.items())
    noted, params = ("", ()) if row else dialect.note_name(held)
    return Sql(
        f"SELECT {dialect.marker}, {dialect.durable}{given}{noted} FROM busrep_writers "
        f"WHERE {HELD} AND {dialect.same_server}{dialect.share if row else ''}",
        (*params, held.writer, held.incarnation),
        repeated=row,
    )


def hold(dialect: Dialect, held: Claim, *begin: Control, ids: Mapping[str, int] = {}) -> Plan[Row]:
    """Hold the claim until the transaction's end (9.4). ``begin``: what begins it, in the same round trip; nothing for
    one that is open. Returns the marker, the setting, and the IDs, see `lock_claim`. Raises WriterFenced."""
    shared = dialect.share_name(held, claim_stands(dialect, held))
    answers = yield (*begin, *shared, lock_claim(dialect, held, ids, row=not shared))
    found = answers[-1]
    if found and shared and not answers[0][0][0]:
        found = (yield Sql(*dialect.note_name(held, lock_claim(dialect, held))))[0] and found
    if not found:
        raise WriterFenced(held.writer, held.incarnation)
    return found[0][: 2 + len(ids)]


def claim_stands(dialect: Dialect, claim: Claim) -> Sql:
    """A row while the claim stands, on the server that was noted."""
    text = f"SELECT 1 FROM busrep_writers WHERE {HELD} AND {dialect.same_server}"
    return Sql(text, (claim.writer, claim.incarnation), repeated=True)


def check_claim(dialect: Dialect, claim: Claim) -> Plan[None]:
    """Read the claim (9.2). Unavailable on a server that only follows another: it may not have heard yet of what was
    committed, nor of who has the name."""
    answers = yield Sql(f"SELECT {dialect.replica}"), claim_stands(dialect, claim)
    check_answered(dialect, claim, *answers)


def check_answered(dialect: Dialect, claim: Claim, replica: Sequence[Row], stands: Sequence[Row]) -> None:
    """See `check_claim`, whose statements were answered so."""
    if replica[0][0]:
        raise Unavailable(dialect.name, "it is a replica, which may lag: only the primary can tell")
    if not stands:
        raise WriterFenced(claim.writer, claim.incarnation)


def bounded(positions: Mapping[str, int], sequences: Mapping[str, int]) -> dict[str, int]:
    """The positions, none above its stream's sequence (9.17)."""
    for stream, position in positions.items():
        if position > sequences.get(stream, position):
            log.error(
                "stream %r: position %d is above its sequence at %d, and is not stored: a forged line was believed, or "
                "the database is an older state (then run 'busrep db restored')", stream, position, sequences[stream],
            )  # fmt: skip
    return {stream: min(position, sequences.get(stream, position)) for stream, position in positions.items()}


def _given(dialect: Dialect, streams: Sequence[str], *, whole: bool) -> Sql:
    """One row: the highest ID that each stream's sequence gave, or NULL. ``whole``: all of a writer's, as each time."""
    each = [dialect.given(stream) for stream in streams]
    params = [param for one in each for param in one.params]
    return Sql(f"SELECT {', '.join(f'({one.text})' for one in each)}", params, repeated=whole)


def _beat(dialect: Dialect, writer: str, positions: Mapping[str, int]) -> Sql:
    """Stores what moved of these, and with the first one a sign of life. Of one alone, as an idle writer's, by its key:
    however many others there are. Not prepared (see `Sql`): a position that no row took would count as stored."""
    if len(positions) == 1:
        ((stream, position),) = positions.items()
        text = f"UPDATE busrep_positions SET seen_at = {dialect.now}, position = {dialect.largest}(position, ?) "
        text += "WHERE stream = ? AND writer = ? AND registered"
        return Sql(text, (position, stream, writer))
    rows = orjson.dumps([[stream, position, int(at == 0)] for at, (stream, position) in enumerate(positions.items())])
    columns = dialect.values(("stream", "text"), ("position", "bigint"), ("sign", "bigint"))
    return Sql(
        f"UPDATE busrep_positions AS p SET seen_at = {dialect.now}, position = {dialect.largest}(p.position, "
        f"v.position) FROM {columns} AS v WHERE p.stream = v.stream AND p.writer = ? AND p.registered "
        "AND (p.position < v.position OR v.sign = 1)",
        (rows.decode(), writer),
    )


@transaction
def heartbeat(
    dialect: Dialect, claim: Claim, positions: Mapping[str, int], *, registry: bool = True
) -> Plan[Registered]:
    """Proven positions and a sign of life, while the claim stands; the registry, if wanted, as it is under that lock.

    Only the rows of positions that moved are written, and the first one: a writer was last heard of in any of its rows.
    """
    streams = [*positions]
    asked = [_given(dialect, streams[at : at + SEQUENCES], whole=registry) for at in range(0, len(streams), SEQUENCES)]
    answers = yield (Control.BEGIN, lock_claim(dialect, claim), *asked)
    if not answers[0]:
        raise WriterFenced(claim.writer, claim.incarnation)
    given = zip(streams, (value for rows in answers[1:] for value in rows[0]), strict=False)
    sequences = {stream: int(value) for stream, value in given if value is not None}
    stored = bounded(positions, sequences)
    others = Sql(
        "SELECT p.stream, p.writer, p.position, coalesce(w.incarnation, 0) FROM busrep_positions p "
        "LEFT JOIN busrep_writers w ON w.writer = p.writer WHERE p.registered"
    )
    whole = (others, Sql(f"SELECT {dialect.seconds}")) if registry else ()
    answers = yield (_beat(dialect, claim.writer, stored), *whole, Control.COMMIT)
    found = Registered(answers[1] if registry else (), sequences, read=registry)
    if registry and dialect.server is not None:
        found.clock = float(answers[2][0][0])
    return found


@transaction
def known(dialect: Dialect, epoch: str | None = None) -> Plan[list[KnownWriter]]:
    """Every (stream, writer). Raises Unavailable for a log of another epoch."""
    ((found,),), writers = yield (
        Control.SNAPSHOT,
        EPOCH,
        Sql(
            "SELECT p.stream, p.writer, p.position, p.floor, p.registered, coalesce(w.incarnation, 0), "
            f"{dialect.age('p.seen_at')} FROM busrep_positions p LEFT JOIN busrep_writers w ON w.writer = p.writer "
            "ORDER BY p.stream, p.writer"
        ),
        Control.COMMIT,
    )
    if epoch not in (None, found):
        raise Unavailable(dialect.store, f"its epoch is {found}, not {epoch}: it was restored, or is another server's")
    return [
        KnownWriter(stream, writer, position, floor, bool(registered), incarnation, float(silent))
        for stream, writer, position, floor, registered, incarnation, silent in writers
    ]


def newest(dialect: Dialect, stream: str) -> Plan[Newest | None]:
    """The highest row ID of every writer of a stream, deleted ones counting; None on a replica."""
    backing = dialect.backing(stream)
    same_stream = "" if backing.own else "stream = p.stream AND "
    answers = yield Sql(  # one statement, one snapshot; without a writer the epoch all the same
        f"SELECT {dialect.replica}, m.value, p.writer, p.floor, (SELECT {backing.top} FROM {backing.table} "
        f"WHERE {same_stream}{backing.writer} = p.writer) FROM busrep_meta m LEFT JOIN busrep_positions p "
        "ON p.stream = ? WHERE m.key = 'epoch'",
        (stream,),
    )
    replica, epoch = answers[0][0][:2]
    rows = {writer: max(floor, highest or 0) for _, _, writer, floor, highest in answers[0] if writer is not None}
    return None if replica else Newest(epoch, rows)


def sequence(dialect: Dialect, stream: str, epoch: str | None = None) -> Plan[int | None]:
    """The highest ID the stream's sequence gave; None on a replica, in another log than ``epoch``, and after a failover
    until a claim has left out IDs: before that it may be behind positions that stand."""
    unsettled = Sql(f"SELECT CASE WHEN {dialect.same_server} THEN {dialect.replica} ELSE TRUE END")
    # The epoch last: where it is the one that is asked for, no restore came between the two.
    answers = yield (unsettled, dialect.sequence(dialect.backing(stream).stream), EPOCH)
    other = epoch not in (None, answers[2][0][0])
    return None if other or answers[0][0][0] or not answers[1] else int(answers[1][0][0])
