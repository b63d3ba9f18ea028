"""Plans of a writer's name: winning it, proving it, moving its positions, finishing it when it has fallen silent.

Rule numbers are those of protocol.md, section 9.
"""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import attrs
import orjson

from busrep.core.ids import Start, plan_start
from busrep.errors import ClaimBlocked, ConfigError, Unavailable, WriterFenced
from busrep.stores.backing import Backing
from busrep.stores.declared import init_command
from busrep.stores.dialect import Dialect
from busrep.stores.interface import Claim, KnownWriter, Newest, Registered
from busrep.stores.plans import Control, Locked, NoSuchTable, Plan, Sql, T, in_transaction
from busrep.stores.schema import check_columns, new_epoch, record_fields

log = logging.getLogger("busrep.stores")

# After a failover: more IDs than a lagging replica may have missed. Its sequence is behind by no more than that.
IDS_LEFT_OUT = 100_000
EMPTY = "''"
# Of a name that is nobody's now: the incarnation in its row is the one after that which was fenced. A process may have
# won this very number in commits that a failover has lost, under a clock that is behind (9.23).
LIVE = "coalesce(finished, -1) < 0"
HELD = f"writer = ? AND incarnation = ? AND {LIVE}"
# How many incarnations a restore, and a failover that is noticed, leave out for all names at least, should the server's
# clock have gone back. Claims that were lost are within that, also under a clock that was 2.7 hours ahead.
INCARNATIONS_LEFT_OUT = 10_000_000
# They go on at the server's clock in nanoseconds. Claims behind that go up one by one, and never use up as many as
# pass: so incarnations rise, whichever restores and failovers another one takes back.
PER_SECOND = 1_000_000_000
# Most failovers without a claim in between, of which each left out as many.
FAILOVERS = 100


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
    yield from record_fields(dialect, backings)
    yield from _or_blocked(dialect, "*", _follow_server(dialect, seconds, now))
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


def verify(dialect: Dialect, backings: Iterable[Backing]) -> Plan[None]:
    """ConfigError unless each stream has a sequence without cache and cycle (9.15) and the declared columns."""
    backings = list(backings)
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


def _or_blocked(dialect: Dialect, writer: str, plan: Plan[T]) -> Plan[T]:
    try:
        return (yield from plan)
    except Locked as locked:
        blockers = yield from dialect.blockers(writer)
        raise ClaimBlocked(writer, blockers) from locked


@attrs.frozen
class Home:
    """The row `server` of busrep_meta: which server and timeline the log is on, "" before the first claim.

    After a failover it also holds, until that is done, ``successor``, where the log goes on, and ``up_to``: up to which
    ID each stream's sequence is to be moved there. Nothing takes nextval() back, so whoever tries again must find the
    same IDs, not as many more: the next failover leaves out what this one did and as many again, no more than that.
    """

    server: str
    successor: str = ""
    up_to: dict[str, int] = attrs.field(factory=dict)

    @classmethod
    def read(cls, text: str) -> Home:
        """What the row's value says."""
        return cls(**orjson.loads(text)) if text.startswith("{") else cls(text)

    def written(self) -> str:
        """The row's value."""
        return orjson.dumps(attrs.asdict(self)).decode() if self.successor else self.server

    def moved_to(self, now: str, given: Mapping[str, int]) -> Home:
        """The next state, on the server ``now``; ``given``: the highest ID that each stream's sequence gave."""
        if self.successor == now:
            return self
        left_out = _failovers(self.successor or self.server, now) * IDS_LEFT_OUT
        up_to = {stream: max(highest, self.up_to.get(stream, 0)) + left_out for stream, highest in given.items()}
        return Home(self.server, now, up_to)


def _follow_server(dialect: Dialect, seconds: float, clock: int) -> Plan[None]:
    """Note which server and timeline the log is on (9.23). If they are others than were noted, no ID is given again
    that was announced before, and all names are to be claimed again, above the incarnations that may have been lost.
    ``clock``: in ms.

    In two transactions: which IDs are left out is committed before the first of them is.
    """
    if dialect.server is None:
        return
    here = Sql(f"SELECT value, {dialect.server} FROM busrep_meta WHERE key = 'server'")
    for step in (_choose_ids, partial(_leave_out_ids, clock)):
        found = (yield here)[0]
        if not found or found[0][0] == found[0][1]:
            return
        yield from in_transaction(step(dialect, here, seconds))


def _alone_with_server(dialect: Dialect, here: Sql, seconds: float) -> Plan[tuple[Home, str]]:
    """Begin a transaction: one of these at a time, and no claim meanwhile."""
    answers = yield (
        Control.BEGIN,
        Sql(f"SELECT {dialect.durable}"),
        *dialect.lock_timeout(seconds),
        Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'" + dialect.exclusive),
        here,
    )
    ((noted, now),) = answers[-1]
    return Home.read(noted), now


def _note(home: Home) -> Sql:
    return Sql("UPDATE busrep_meta SET value = ? WHERE key = 'server'", (home.written(),))


def _leave_out_incarnations(dialect: Dialect, clock: int) -> Plan[None]:
    """Let every claim from here on be above those that were lost (9.11), also of names that are not known here.

    ``clock``: of this process, in ms.
    """
    asked = f"SELECT coalesce(max(incarnation), 0), {dialect.seconds} FROM busrep_writers"
    highest, seconds = (yield Sql(asked))[0][0]
    above = max(max(clock, int(highest)) + INCARNATIONS_LEFT_OUT, int(seconds * PER_SECOND))
    yield Sql("UPDATE busrep_meta SET value = ? WHERE key = 'incarnations'", (str(above),))


def _choose_ids(dialect: Dialect, here: Sql, seconds: float) -> Plan[None]:
    home, now = yield from _alone_with_server(dialect, here, seconds)
    if not home.server:
        yield _note(Home(now))
    elif now != home.server or home.successor:  # back here before that was done: somebody may have written there
        given: dict[str, int] = {}
        for (stream,) in (yield Sql("SELECT stream FROM busrep_streams ORDER BY stream"))[0]:
            given[stream] = int((yield dialect.sequence(stream))[0][0][0])
        yield _note(home.moved_to(now, given))
    yield Control.COMMIT


def _leave_out_ids(clock: int, dialect: Dialect, here: Sql, seconds: float) -> Plan[None]:
    home, now = yield from _alone_with_server(dialect, here, seconds)
    if home.successor and home.successor == now:
        # Whoever holds IDs of the new timeline already got them below those that readers may have passed.
        yield Sql(
            "UPDATE busrep_writers SET finished = incarnation, incarnation = incarnation + 1 "
            "WHERE coalesce(finished, -1) <> incarnation - 1"
        )
        yield from _leave_out_incarnations(dialect, clock)
        for stream, last in home.up_to.items():
            # nextval(), for which a writer has the right; setval() could undo one of another process.
            while (missing := last - int((yield dialect.sequence(stream))[0][0][0])) > 0:
                yield dialect.next_ids(stream, min(missing, IDS_LEFT_OUT))
        log.error(
            "PostgreSQL's system identifier and timeline were %s and are %s: a failover, or a restore. At least %d IDs "
            "of each stream are left out, so that none is given twice. If the new primary lacks commits of the old "
            "one (facts in tables of the application's are not looked for), run 'busrep db restored'",
            home.server, now, IDS_LEFT_OUT,
        )  # fmt: skip
        yield _note(Home(now))
    yield Control.COMMIT


def _failovers(noted: str, now: str) -> int:
    """How often IDs were left out since that server and timeline were noted, this time included: one that failed over
    itself may have given IDs behind those, and a server that lacks its commits has taken its place."""
    (system, timeline), (same, later) = noted.rsplit("/", 1), now.rsplit("/", 1)
    return max(1, min(int(later, 16) - int(timeline, 16), FAILOVERS)) if system == same else 1


def _win(
    dialect: Dialect, writer: str, backings: Sequence[Backing], seconds: float, now: int, again: int | None = None
) -> Plan[tuple[int, set[str]]]:
    """The incarnation, and the streams the name was registered for already."""
    answers = yield (
        Control.BEGIN,
        Sql(f"SELECT {dialect.durable}"),  # what is won is announced (9.22)
        *dialect.lock_timeout(seconds),
        # Not while 'db restored' is at work, which fences the names that it sees.
        Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'" + dialect.share),
        Sql("SELECT value FROM busrep_meta WHERE key = 'incarnations'"),
    )
    # What was left out. No row: the table was made by a version before that.
    above = max([now - 1, *(int(value) for (value,) in answers[-1])])
    if again is not None:
        answers = yield (
            # Locked: between this look and the claim nobody else may win the name.
            Sql(
                "SELECT 1 FROM busrep_writers WHERE writer = ? AND "
                f"((incarnation = ? AND {LIVE}) OR (incarnation = ? AND finished = ?) OR finished = ?)"
                f"{dialect.exclusive}",
                (writer, again, again + 1, again, -again),
            ),
        )
        if not answers[-1]:
            raise WriterFenced(writer, again)
    won_by = None if again is None else -again  # below zero: not finished
    answers = yield (
        # Waits until no transaction of a predecessor holds the row FOR SHARE.
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
    yield Control.COMMIT
    return int(answers[-2][0][0]), {stream for (stream,) in answers[-1]}


def _where(
    writer: str, incarnation: int, dialect: Dialect, backings: Sequence[Backing]
) -> Plan[tuple[str, dict[str, State]]]:
    """The epoch, and the state of each stream, in one snapshot in which the claim still stands."""
    answers = yield (
        Control.SNAPSHOT,
        Sql("SELECT value FROM busrep_meta WHERE key = 'epoch'"),
        Sql(f"SELECT 1 FROM busrep_writers WHERE {HELD}", (writer, incarnation)),
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
    yield (Control.BEGIN, Sql(f"SELECT {dialect.durable}"))
    yield from dialect.raise_sequence(stream, least)
    yield Control.COMMIT


def lock_claim(dialect: Dialect, held: Claim) -> Sql:
    """The first statement of a write transaction (9.4): no row, and the writer is fenced. Answers the marker.

    It makes the transaction durable as well (9.22): what it commits is announced. And the server is the one that was
    noted, on the same timeline (9.23): else the writer counts as fenced, and claims its name again.
    """
    return Sql(
        f"SELECT {dialect.marker}, {dialect.durable} FROM busrep_writers "
        f"WHERE {HELD} AND {dialect.same_server}{dialect.share}",
        (held.writer, held.incarnation),
    )


def hold(dialect: Dialect, held: Claim, *begin: Control) -> Plan[object]:
    """Lock the claim until the transaction's end (9.4). ``begin``: what begins it, in the same round trip; nothing for
    one that is open. Returns the marker. Raises WriterFenced."""
    answers = yield (*begin, lock_claim(dialect, held))
    if not answers[0]:
        raise WriterFenced(held.writer, held.incarnation)
    return answers[0][0][0]


def check_claim(dialect: Dialect, held: Claim) -> Plan[None]:
    """Read the claim (9.2). Unavailable on a server that only follows another: it may not have heard yet of what was
    committed, nor of who has the name."""
    answers = yield (
        Sql(f"SELECT {dialect.replica}"),
        Sql(
            f"SELECT 1 FROM busrep_writers WHERE {HELD} AND {dialect.same_server}",
            (held.writer, held.incarnation),
        ),
    )
    if answers[0][0][0]:
        raise Unavailable(dialect.name, "it is a replica, which may lag: only the primary can tell")
    if not answers[1]:
        raise WriterFenced(held.writer, held.incarnation)


def bounded(positions: Mapping[str, int], sequences: Mapping[str, int]) -> dict[str, int]:
    """The positions, none above its stream's sequence (9.17)."""
    for stream, position in positions.items():
        if position > sequences.get(stream, position):
            log.error(
                "stream %r: position %d is above its sequence at %d, and is not stored: a forged line was believed, or "
                "the database is an older state (then run 'busrep db restored')", stream, position, sequences[stream],
            )  # fmt: skip
    return {stream: min(position, sequences.get(stream, position)) for stream, position in positions.items()}


def heartbeat(dialect: Dialect, held: Claim, positions: Mapping[str, int]) -> Plan[Registered]:
    """Proven positions and a sign of life, while the claim stands; the registry as it is under that lock."""

    def body() -> Plan[Registered]:
        answers = yield (
            Control.BEGIN, lock_claim(dialect, held), *(dialect.sequence(stream) for stream in positions)
        )  # fmt: skip
        if not answers[0]:
            raise WriterFenced(held.writer, held.incarnation)
        given = zip(positions, answers[1:], strict=False)
        sequences = {stream: int(rows[0][0]) for stream, rows in given if rows}
        stored = bounded(positions, sequences)
        moved = orjson.dumps([[stream, position] for stream, position in stored.items()]).decode()
        answers = yield (
            Sql(
                f"UPDATE busrep_positions SET seen_at = {dialect.now}, position = {dialect.largest}(position, "
                f"coalesce((SELECT v.position FROM {dialect.values(('stream', 'text'), ('position', 'bigint'))} "
                "AS v WHERE v.stream = busrep_positions.stream), 0)) WHERE writer = ? AND registered",
                (moved, held.writer),
            ),
            Sql(
                "SELECT p.stream, p.writer, p.position, coalesce(w.incarnation, 0) FROM busrep_positions p "
                "LEFT JOIN busrep_writers w ON w.writer = p.writer WHERE p.registered"
            ),
            Control.COMMIT,
        )
        return Registered(answers[1], sequences)

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
        Sql(f"SELECT {dialect.durable}"),
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
        Sql(f"SELECT {dialect.durable}"),  # readers deliver on the ground of the final positions
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
    """The highest ID the stream's sequence gave; None on a replica, and after a failover until a claim has left out
    IDs (9.23): before that it may be behind positions that stand."""
    unsettled = Sql(f"SELECT CASE WHEN {dialect.same_server} THEN {dialect.replica} ELSE TRUE END")
    answers = yield (unsettled, dialect.sequence(backing.stream))
    return None if answers[0][0][0] or not answers[1] else int(answers[1][0][0])


def _final_position(dialect: Dialect, backing: Backing | None, stream: str, writer: str, position: int) -> Plan[int]:
    sequence = (yield dialect.sequence(stream))[0]
    highest = int(sequence[0][0]) if sequence else position  # never above the sequence (9.17)
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
            Sql(f"SELECT {dialect.durable}"),
            *dialect.lock_timeout(seconds),
            # First, as a claim does: then the two never wait for each other.
            Sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", (epoch,)),
            Sql(f"UPDATE busrep_writers SET incarnation = {dialect.largest}(incarnation, ?) + 1", (now,)),
            Sql("UPDATE busrep_writers SET finished = 0"),  # nobody holds a name of the log before, or wins it back
            Sql(f"UPDATE busrep_meta SET value = {dialect.server or EMPTY} WHERE key = 'server'"),  # the log is its own
        )
        yield from _leave_out_incarnations(dialect, now)
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
