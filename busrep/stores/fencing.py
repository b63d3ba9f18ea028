"""Plans that fence writers: a silent one, to take its final position (9.5), or all, of a log that was restored or has
failed over. Then IDs and incarnations that may have been lost are not given again (9.23)."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial

import attrs
import orjson

from busrep.stores.dialect import Dialect, begin_durably, highest_row, or_blocked
from busrep.stores.plans import Control, Plan, Sql, in_transaction
from busrep.stores.readers import LOCK_STREAM
from busrep.stores.schema import EPOCH, new_epoch

log = logging.getLogger("busrep.stores")

# After a failover: more IDs than a lagging replica may have missed. Its sequence is behind by no more than that.
IDS_LEFT_OUT = 100_000
# A restore, and a failover that is noticed, let incarnations go on a day above the server's clock: lost claims are
# below, also of a machine whose clock is ahead by less. Later ones go up one by one, not as fast as nanoseconds pass:
# so they rise, whichever restores and failovers another one takes back. At least so many are left out, should the
# server's clock have gone back.
INCARNATIONS_LEFT_OUT = 10_000_000
PER_SECOND = 1_000_000_000
DAY = 86_400 * PER_SECOND
# Most failovers without a claim in between, of which each left out as many.
FAILOVERS = 100

# Behind a name in busrep_writers: the row notes who had won the name back, which was finished after that. No name of a
# writer, for there is a space in it.
WON = " won"

# How long 'db restored' waits for open write transactions, seconds; a person is watching.
RESTORE_WAIT = 30.0


def clock() -> int:
    """This process's clock, in ns: incarnations go on at it."""
    return time.time_ns()


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


def follow_server(dialect: Dialect, seconds: float, clock: int) -> Plan[None]:
    """Note which server and timeline the log is on (9.23). If they are others than were noted, no ID is given again
    that was announced before, and all names are to be claimed again, above the incarnations that may have been lost.
    ``clock``: in ns.

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
    answers = yield (*begin_durably(dialect, wait=seconds), Sql(EPOCH.text + dialect.exclusive), here)
    ((noted, now),) = answers[-1]
    return Home.read(noted), now


def _note(home: Home) -> Sql:
    return Sql("UPDATE busrep_meta SET value = ? WHERE key = 'server'", (home.written(),))


def leave_out_incarnations(dialect: Dialect, clock: int) -> Plan[int]:
    """Let every claim from here on be above those that were lost (9.11), also of names that are not known here. Returns
    the highest incarnation that was left out. ``clock``: of this process, in ns."""
    asked = f"SELECT coalesce(max(incarnation), 0), {dialect.seconds} FROM busrep_writers"
    highest, seconds = (yield Sql(asked))[0][0]
    # One such event may take another back, and the server's clock may be set back between them. The milliseconds of
    # this clock keep their numbers apart: under one number two processes would have the name.
    tie = clock // 1_000_000 % PER_SECOND
    above = max(max(clock, int(highest)) + INCARNATIONS_LEFT_OUT, int(seconds * PER_SECOND) + DAY) + tie
    yield Sql("UPDATE busrep_meta SET value = ? WHERE key = 'incarnations'", (str(above),))
    return above


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
        yield dialect.take_name(None)  # waits for open facts, of all writers
        # Whoever holds IDs of the new timeline already got them below those that readers may have passed.
        for (writer,) in (yield Sql("SELECT writer FROM busrep_writers ORDER BY writer"))[0]:
            if not writer.endswith(WON):
                yield (
                    _note_winner(writer),
                    Sql(
                        "UPDATE busrep_writers SET finished = incarnation, incarnation = incarnation + 1 "
                        "WHERE writer = ? AND coalesce(finished, -1) <> incarnation - 1",
                        (writer,),
                    ),
                )
        yield from leave_out_incarnations(dialect, clock)
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


def finish(dialect: Dialect, writer: str, incarnation: int, *, timeout: float) -> Plan[dict[str, int]]:
    """Fence (committed), then in a new snapshot take rows and sequence for the final positions (9.5)."""
    fenced = yield from or_blocked(dialect, writer, in_transaction(_fence(dialect, writer, incarnation, timeout)))
    if fenced is None:
        return {}
    finals = in_transaction(_finals(dialect, writer, fenced, timeout))
    return (yield from or_blocked(dialect, writer, finals))


def _note_winner(writer: str) -> Sql:
    """Before a name is fenced: who has won it back, and does not know it yet, can tell that it is its own still."""
    return Sql(
        "INSERT INTO busrep_writers (writer, incarnation, claimed_at, finished) SELECT ?, incarnation, claimed_at, "
        "finished FROM busrep_writers WHERE writer = ? AND finished < 0 "
        "ON CONFLICT (writer) DO UPDATE SET incarnation = excluded.incarnation, finished = excluded.finished",
        (writer + WON, writer),
    )


def _fence(dialect: Dialect, writer: str, incarnation: int, seconds: float) -> Plan[int | None]:
    """The incarnation that is fenced; the one before, if somebody has fenced that already and got no further: its
    process could not tell that the name is its own if it were fenced twice."""
    standing = Sql(  # the facts of a successor are not waited for
        "SELECT 1 FROM busrep_writers WHERE writer = ? "
        "AND (incarnation = ? OR (incarnation = ? AND (finished = ? OR finished = ?)))",
        (writer, incarnation, incarnation + 1, incarnation, incarnation - 1),
    )
    answers = yield (
        *begin_durably(dialect, wait=seconds),
        # First, as a claim does: else this and 'db restored' could each wait for one of the two rows of a name.
        Sql(EPOCH.text + dialect.share),
        *dialect.take_name(writer, standing),
        _note_winner(writer),
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


def _finals(dialect: Dialect, writer: str, incarnation: int, seconds: float) -> Plan[dict[str, int]]:
    answers = yield (
        *begin_durably(dialect, wait=seconds),
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
            finals[stream] = yield from final_position(dialect, stream, writer, position)
            yield Sql(
                "UPDATE busrep_positions SET position = ?, registered = FALSE, finished = ? "
                "WHERE stream = ? AND writer = ?",
                (finals[stream], incarnation, stream, writer),
            )
    yield Control.COMMIT
    return finals


def final_position(dialect: Dialect, stream: str, writer: str, position: int) -> Plan[int]:
    """Where a name's facts end that gets no IDs any more."""
    backing = dialect.backings.get(stream)
    sequence = (yield dialect.sequence(stream))[0]
    highest = int(sequence[0][0]) if sequence else position  # never above the sequence
    if backing is not None:  # a sequence may be behind the table (restored, or rows written past it)
        where, params = backing.of_writer(writer)
        rows = yield Sql(f"SELECT coalesce({backing.top}, 0) FROM {backing.table} WHERE {where}", params)
        highest = max(highest, rows[0][0][0])
    return highest


def restored(dialect: Dialect) -> Plan[str]:
    """A new epoch; all writers fenced; positions back to what the rows hold; sequences not behind them. Incarnations go
    on above the clock, as with a claim."""
    now = clock()

    def body() -> Plan[str]:
        epoch, no_server = new_epoch(), "''"
        yield (
            *begin_durably(dialect, wait=RESTORE_WAIT),
            # First, as a claim does: then the two never wait for each other.
            Sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", (epoch,)),
            # Waits for readers that are registering in the log before: who begins in the new one must see their rows.
            *(Sql(LOCK_STREAM + dialect.exclusive, (stream,)) for stream in sorted(dialect.backings)),
            # From here on the log is this server's own.
            Sql(f"UPDATE busrep_meta SET value = {dialect.server or no_server} WHERE key = 'server'"),
        )
        yield dialect.take_name(None)  # waits for open facts, of all writers
        above = yield from leave_out_incarnations(dialect, now)
        # Nobody holds a name of the log before, or wins it back: a claim that was lost must not have this very number.
        yield Sql("UPDATE busrep_writers SET incarnation = ?, finished = 0", (above + 1,))
        for backing in dialect.backings.values():
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

    return or_blocked(dialect, "*", in_transaction(body()))
