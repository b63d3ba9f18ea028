"""How transactions hold a writer's name on PostgreSQL, and who waits for them."""

# ruff: noqa: S608 - table and column names are ours, values are parameters
from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from busrep.stores.dialect import Dialect
from busrep.stores.interface import Claim
from busrep.stores.plans import Plan, Sql

# Keys of advisory locks: a table, whose OID tells the schemas of a database apart, and a number. Of a name, as the
# trigger of schema.py computes it; of all names, which whoever holds one of them shares; of a name's series. Two names
# of one number wait for each other now and then.
NAME = "'busrep_writers'::regclass::oid::int, pg_catalog.hashtext(?)"
ALL_NAMES = "'busrep_meta'::regclass::oid::int, 0"
SERIES = "'busrep_positions'::regclass::oid::int, pg_catalog.hashtext(?)"
PROOF = "/{0.incarnation}/{0.writer}"  # of a claim that was read after the lock was granted


def _noted(held: Claim) -> str:
    """The setting in which a transaction notes its marker and a slash; once it is proven to hold the name, `PROOF`."""
    return f"busrep.holds_{crc32(held.writer.encode(errors='surrogatepass'))}"


class NameLocks(Dialect):
    """The part of a `Dialect` that locks names."""

    def while_held(self, insert: Sql, held: Claim, marker: object) -> Sql:
        """An insert of `insert` that writes while that transaction holds the name, makes it durable, and answers with
        a row for each. Else it writes nothing, and is no error of the transaction."""
        rows = insert.text.replace("VALUES (?, ?, ?, ?, ?)", "SELECT ?, ?, ?, ?, ?")
        rows += f" WHERE current_setting('{_noted(held)}', true) = ? AND {self.durable} <> '' RETURNING 1"
        return Sql(rows, (*insert.params, f"{marker}{PROOF.format(held)}"))

    def share_name(self, held: Claim, stands: Sql) -> Sequence[Sql]:
        """See `Dialect`. An advisory lock needs no multixact. But with one snapshot for all statements the proof would
        not see what was committed before the lock was granted."""
        tried = "".join(f"WHEN NOT pg_try_advisory_xact_lock_shared({key}) THEN '' " for key in (ALL_NAMES, NAME))
        text = (
            f"SELECT CASE WHEN NOT EXISTS ({stands.text}) THEN '' "
            f"WHEN current_setting('transaction_isolation') <> 'read committed' THEN '' {tried}"
            f"ELSE set_config('{_noted(held)}', {self.marker} || '/', true) END"
        )
        return [Sql(text, (*stands.params, held.writer))]

    def note_name(self, held: Claim, lock: Sql | None = None) -> tuple[str, Sequence[object]]:
        """See `Dialect`. In ``lock`` itself it would be noted before the row is locked, which may be in vain."""
        note = f"set_config('{_noted(held)}', {self.marker} || ?, true)"
        if lock is not None:
            return f"SELECT {note} FROM ({lock.text}) AS c", (PROOF.format(held), *lock.params)
        noted = f"current_setting('{_noted(held)}', true) = {self.marker} || '/'"
        return f", CASE WHEN {noted} THEN {note} END", [PROOF.format(held)]

    def take_name(self, writer: str | None, only_while: Sql | None = None) -> tuple[Sql, ...]:
        """See `Dialect`. The setting tells the trigger of schema.py that this is done."""
        key, params = (ALL_NAMES, ()) if writer is None else (NAME, (writer,))
        where, more = ("", ()) if only_while is None else (f" WHERE EXISTS ({only_while.text})", only_while.params)
        taken = f"SELECT set_config('busrep.takes_name', '1', true), pg_advisory_xact_lock({key}){where}"
        return (Sql(taken, (*params, *more)),)

    def lock_series(self, writer: str, *, exclusive: bool) -> Sequence[Sql]:
        """See `Dialect`. An advisory lock, for whoever waits for it has his turn; a lock of a row is granted to others
        who share it meanwhile."""
        kind = "" if exclusive else "_shared"
        return [Sql(f"SELECT pg_advisory_xact_lock{kind}({SERIES})", (writer,), repeated=not exclusive)]

    def blockers(self, writer: str) -> Plan[list[str]]:
        """See `Dialect`. Row locks stand in the row: its xmax is the locker's transaction ID, or a multixact. Which of
        them it is does not show: it is taken for a multixact where there is one of that number."""
        found = yield Sql(
            "SELECT DISTINCT a.pid, a.application_name, a.state, extract(epoch FROM clock_timestamp() - a.xact_start)"
            "::int, extract(epoch FROM clock_timestamp() - a.state_change)::int FROM pg_locks t "
            "JOIN pg_stat_activity a ON a.pid = t.pid AND a.datname = current_database() "
            "WHERE t.granted AND t.pid <> pg_backend_pid() AND ((t.locktype = 'advisory' AND t.mode = 'ShareLock' "
            "AND t.objsubid = 2 AND CASE WHEN ? = '*' THEN t.classid = 'busrep_meta'::regclass::oid "
            "ELSE t.classid = 'busrep_writers'::regclass::oid AND t.objid = pg_catalog.hashtext(?)::oid END) "
            "OR (t.locktype = 'transactionid' AND t.transactionid IN (SELECT unnest(ARRAY[w.xmax, m.xid]) "
            "FROM busrep_writers w JOIN pg_database d ON d.datname = current_database() "
            "LEFT JOIN LATERAL pg_get_multixact_members(CASE WHEN mxid_age(w.xmax) BETWEEN 1 AND "
            "mxid_age(d.datminmxid) THEN w.xmax END) m ON true WHERE w.writer = ? OR ? = '*')))",
            (writer,) * 4,
        )
        return [
            f"pid {pid} ({name or 'no application_name'}, {state}, transaction open for {age} s, "
            f"last statement {quiet} s ago)"
            for pid, name, state, age, quiet in found[0]
        ]
