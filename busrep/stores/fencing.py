"""Plans that fence writers: a silent one, to take its final position (9.5), or all of them, of a restored log."""

# ruff: noqa: S608 - table and column names are quoted, values are parameters
from __future__ import annotations

from collections.abc import Mapping, Sequence

from busrep.stores.backing import Backing, highest_row
from busrep.stores.claims import or_blocked
from busrep.stores.dialect import Dialect, begin_durably
from busrep.stores.failover import leave_out_incarnations
from busrep.stores.plans import Control, Plan, Sql, in_transaction
from busrep.stores.schema import new_epoch


def finish(
    dialect: Dialect, backings: Mapping[str, Backing], writer: str, incarnation: int, seconds: float
) -> Plan[dict[str, int]]:
    """Fence (committed), then in a new snapshot take rows and sequence for the final positions (9.5)."""
    fenced = yield from or_blocked(dialect, writer, in_transaction(_fence(dialect, writer, incarnation, seconds)))
    if fenced is None:
        return {}
    finals = in_transaction(_finals(dialect, backings, writer, fenced, seconds))
    return (yield from or_blocked(dialect, writer, finals))


def _fence(dialect: Dialect, writer: str, incarnation: int, seconds: float) -> Plan[int | None]:
    """The incarnation that is fenced; the one before, if somebody has fenced that already and got no further: its
    process could not tell that the name is its own if it were fenced twice."""
    answers = yield (
        *begin_durably(dialect, wait=seconds),
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
            finals[stream] = yield from _final_position(dialect, backings.get(stream), stream, writer, position)
            yield Sql(
                "UPDATE busrep_positions SET position = ?, registered = FALSE, finished = ? "
                "WHERE stream = ? AND writer = ?",
                (finals[stream], incarnation, stream, writer),
            )
    yield Control.COMMIT
    return finals


def _final_position(dialect: Dialect, backing: Backing | None, stream: str, writer: str, position: int) -> Plan[int]:
    sequence = (yield dialect.sequence(stream))[0]
    highest = int(sequence[0][0]) if sequence else position  # never above the sequence
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
        epoch, no_server = new_epoch(), "''"
        yield (
            *begin_durably(dialect, wait=seconds),
            # First, as a claim does: then the two never wait for each other.
            Sql("UPDATE busrep_meta SET value = ? WHERE key = 'epoch'", (epoch,)),
            Sql(f"UPDATE busrep_writers SET incarnation = {dialect.largest}(incarnation, ?) + 1", (now,)),
            Sql("UPDATE busrep_writers SET finished = 0"),  # nobody holds a name of the log before, or wins it back
            # From here on the log is this server's own.
            Sql(f"UPDATE busrep_meta SET value = {dialect.server or no_server} WHERE key = 'server'"),
        )
        yield from leave_out_incarnations(dialect, now)
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

    return or_blocked(dialect, "*", in_transaction(body()))
