"""What the statements of busrep's plans do on the simulated tables: text to a Python function, made once a text.

Most are read by sql.py and made of what queries.py knows; a few that use more of SQL are known by their whole text,
with the pieces marked that a rule of protocol.md leans on. A text that neither knows is an error that names it.

A statement that may wait for a lock is a generator: it yields a `Wait` when it has to. As in PostgreSQL under READ
COMMITTED a statement finds its rows in its own snapshot, and checks a row again, in its newest version, after it had to
wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial

import attrs

from busrep.core.snapshots import LOADED
from busrep.stores.postgres.dialect import SERVER
from tests.proof.sim import sql
from tests.proof.sim.queries import (
    Code,
    Function,
    Row,
    Run,
    Scope,
    claims,
    compiled,
    listed,
    matching,
    note_claim,
    reads_tables,
    rows_of,
    scope_of,
    sequence_named,
    visible,
)
from tests.proof.sim.sql import Expression, Unknown
from tests.proof.sim.tables import (
    DEFINITIONS,
    EXCLUSIVE,
    NOTHING,
    REFUSED,
    SHARE,
    Definition,
    Numbers,
    Record,
    SimError,
    SimSerializationFailure,
    Table,
    Values,
    Wait,
)

Waiting = Generator[Wait, None, list[Row]]

# Of an advisory lock: a name's, or that of all names.
KEY = r"'busrep_\w+'::regclass::oid::int, (?:0|pg_catalog\.hashtext\(\?\))"


@attrs.frozen
class Statement:
    """A text that is known. Either ``rows`` answers at once, or ``waits`` may have to wait.

    ``writes``: what it is called in the error that a read-only transaction gives; ``tables``: whether it needs
    busrep's tables.
    """

    rows: Callable[[Run], list[Row]] | None = None
    waits: Callable[[Run], Waiting] | None = None
    writes: str | None = None
    tables: bool = False


def known(text: str) -> Statement:
    """The statement of a text. Raises NotImplementedError for one that the simulation does not know."""
    found = _KNOWN.get(text)
    if found is None:
        found = _KNOWN[text] = _made(text)
    return found


_KNOWN: dict[str, Statement] = {}


def _made(text: str) -> Statement:
    for pattern, make in SPECIAL:
        if special := re.fullmatch(pattern, text):
            return make(special)
    try:
        tree = sql.parse(text.replace(SERVER, "server_identity()"))
        if isinstance(tree, sql.Select):
            return _select(tree)
        if isinstance(tree, sql.Insert):
            return _insert(tree)
        return _update(tree) if isinstance(tree, sql.Update) else _delete(tree)
    except (Unknown, KeyError, ValueError) as error:  # a name that is not known, too
        raise NotImplementedError(
            f"the simulated database does not know this statement ({type(error).__name__}: {error}): add it to "
            f"statements.py: {text}"
        ) from error


def locked(
    run: Run, record: Record, seen: Values, mode: int, condition: Function | None
) -> Generator[Wait, None, Values | None]:
    """Lock a row that the snapshot showed; its newest version, or None if that does not match any more."""
    txn = run.txn
    if not run.state.take(record, txn, mode):
        yield Wait(record, txn, mode)
    newest = record.pending if record.owner is txn else record.values
    if newest is seen:
        return newest
    if txn.whole:
        raise SimSerializationFailure
    if newest is None or not (condition is None or condition(newest, run)):
        return None
    if record.owner is not txn and record.born > run.csn:  # deleted, and another of the same key inserted
        return None
    return newest


# --- SELECT


def _select(tree: sql.Select) -> Statement:
    if tree.lock is not None:
        return _locking(tree)
    rows, sequences = rows_of(tree), _sequences_of(tree)
    if not sequences:
        return Statement(rows=rows, tables=reads_tables(tree))

    def run_select(run: Run) -> Waiting:
        for name in sequences:
            yield from _unlocked(run, sequence_named(run, name))
        return rows(run)

    return Statement(waits=run_select, writes="nextval()", tables=True)


def _sequences_of(tree: sql.Select) -> list[str]:
    """The sequences that it takes IDs from."""
    return [value[2][0][1].strip('"') for value, _ in tree.items if value[:2] == ("call", "nextval")]


def _locking(tree: sql.Select) -> Statement:
    (source,) = tree.sources
    if source.table is None or tree.group or tree.limit:
        raise Unknown("FOR SHARE or FOR UPDATE of more than rows of one table")
    scope = Scope()
    scope.add(source.alias, DEFINITIONS[source.table].columns)
    find = matching(source.table, tree.where, scope)
    condition = None if tree.where is None else compiled(tree.where, scope)
    items = listed([value for value, _ in tree.items], scope)
    mode = SHARE if tree.lock == "SHARE" else EXCLUSIVE
    noting = claims(tree)
    sequences = _sequences_of(tree)

    def run_select(run: Run) -> Waiting:
        answer = []
        for name in sequences:
            yield from _unlocked(run, sequence_named(run, name))
        for record, seen in find(run):
            newest = yield from locked(run, record, seen, mode, condition)
            if newest is not None:
                answer.append(items(newest, run))
        if noting and answer:
            note_claim(run)
        return answer

    return Statement(waits=run_select, writes=f"SELECT FOR {tree.lock}", tables=True)


# --- INSERT, UPDATE, DELETE


def _needs(table: str) -> bool:
    return table != "effects"


def _insert(tree: sql.Insert) -> Statement:
    definition = DEFINITIONS[tree.table]
    rows: Callable[[Run], list[Row]]
    if tree.query is not None:
        rows = rows_of(tree.query)
    else:
        code = Code()
        rows = code.function(f"[{code.listed(tree.values or (), Scope())}]", "run")
    whole = _whole(definition, tree.columns)
    key_of: Callable[[Values], Row] = Code().function(f"({''.join(f'row[{at}], ' for at in definition.key)})", "row")
    excluded = scope_of(tree.table, ("excluded", definition.columns))
    changes = None if tree.update is None else _changes(definition.columns, tree.update, excluded)
    returning = listed([value for value, _ in tree.returning], scope_of(tree.table)) if tree.returning else None
    if tree.conflict is not None and tuple(map(definition.columns.index, tree.conflict)) != definition.key:
        raise Unknown("ON CONFLICT of other columns than the key")
    ignored = tree.conflict is not None and changes is None
    facts = tree.table == "busrep_facts"
    text = definition.columns.index("row") if facts else 0

    def run_insert(run: Run) -> Waiting:
        answer = []
        table, txn = run.state.tables[tree.table], run.txn
        for row in rows(run):
            values = whole(row, run)
            key = key_of(values)
            if facts and REFUSED in values[text]:
                raise SimError("23514", f"new row violates a check constraint: {values[text]}")
            record, there = yield from _place(run, table, key, lock=changes is not None)
            if there is None:
                record.put(txn, values)
                record.fresh = True
                if facts:
                    txn.facts = True
            elif ignored:
                continue
            elif changes is None:
                raise SimError("23505", f"duplicate key {key} violates the unique constraint of {tree.table}")
            else:
                values = changes(there + values, run)
                record.put(txn, values)
            if returning is not None:
                answer.append(returning(values, run))
        return answer

    return Statement(waits=run_insert, writes="INSERT", tables=_needs(tree.table))


def _whole(definition: Definition, given: Sequence[str]) -> Callable[[Row, Run], Values]:
    """The row of a table that is made of an INSERT's values."""
    code = Code()
    texts = ["None"] * len(definition.columns)
    for at, column in enumerate(given):
        texts[definition.columns.index(column)] = f"row[{at}]"
    for at in definition.now:
        texts[at] = "run.txn.started - run.server.behind"
    if definition.serial is not None:

        def numbered(run: Run) -> int:  # as a sequence, in no transaction
            number = run.state.serials[definition.name] = run.state.serials.get(definition.name, 0) + 1
            return number

        texts[definition.serial] = f"{code.name(numbered)}(run)"
    made: Callable[[Row, Run], Values] = code.function(f"({''.join(text + ', ' for text in texts)})")
    return made


def _place(run: Run, table: Table, key: Row, *, lock: bool) -> Generator[Wait, None, tuple[Record, Values | None]]:
    """The record of a key, and the row that stands there; it is locked when there is none, or ``lock``."""
    txn = run.txn
    while True:
        record = table.records.get(key) or table.add(key)
        if record.owner is not None and record.owner is not txn:
            yield Wait(record, txn, NOTHING)  # whether the other's row will be there is not known yet
            continue
        there = record.newest(txn)
        if (there is None or lock) and not run.state.take(record, txn, EXCLUSIVE):
            yield Wait(record, txn, EXCLUSIVE)
            continue
        if there is not None and txn.whole and record.csn > run.csn:
            raise SimSerializationFailure
        return record, there


def _changes(
    columns: tuple[str, ...], changes: list[tuple[str, Expression]], scope: Scope
) -> Callable[[Row, Run], Values]:
    """The new values of a row (of which the first are a table's)."""
    made = dict(changes)
    if any(column not in columns for column in made):
        raise Unknown(f"columns {list(made)}")
    return listed([made.get(column, ("column", None, column)) for column in columns], scope)


def _update(tree: sql.Update) -> Statement:
    if tree.other is not None:
        return _update_joined(tree, tree.other)
    scope = scope_of(tree.table)
    find = matching(tree.table, tree.where, scope)
    condition = None if tree.where is None else compiled(tree.where, scope)
    change = _changes(DEFINITIONS[tree.table].columns, tree.changes, scope)
    returning = listed([value for value, _ in tree.returning], scope) if tree.returning else None

    def run_update(run: Run) -> Waiting:
        answer = []
        for record, seen in find(run):
            newest = yield from locked(run, record, seen, EXCLUSIVE, condition)
            if newest is not None:
                values = change(newest, run)
                record.put(run.txn, values)
                if returning is not None:
                    answer.append(returning(values, run))
        return answer

    return Statement(waits=run_update, writes="UPDATE", tables=_needs(tree.table))


def _update_joined(tree: sql.Update, other: sql.Source) -> Statement:
    """UPDATE ... FROM a query of what a parameter holds: that is the same after a wait for a lock."""
    if other.query is None or reads_tables(other.query) or tree.returning:
        raise Unknown("UPDATE FROM a table, or with RETURNING")
    scope = Scope()
    scope.add(tree.alias, DEFINITIONS[tree.table].columns)
    find = matching(tree.table, None, scope)
    others = rows_of(other.query)
    scope.add(other.alias, [name for _, name in other.query.items])
    condition = None if tree.where is None else compiled(tree.where, scope)
    change = _changes(DEFINITIONS[tree.table].columns, tree.changes, scope)

    def run_update(run: Run) -> Waiting:
        rows = others(run)
        for record, seen in find(run):
            for row in rows:
                if condition is not None and not condition(seen + row, run):
                    continue
                joined = None if condition is None else partial(_still, condition, row)
                newest = yield from locked(run, record, seen, EXCLUSIVE, joined)
                if newest is not None:
                    record.put(run.txn, change(newest + row, run))
                break
        return []

    return Statement(waits=run_update, writes="UPDATE", tables=_needs(tree.table))


def _still(condition: Function, row: Row, values: Values, run: Run) -> bool:
    return bool(condition(values + row, run))


def _delete(tree: sql.Delete) -> Statement:
    scope = scope_of(tree.table)
    find = matching(tree.table, tree.where, scope)
    condition = None if tree.where is None else compiled(tree.where, scope)

    def run_delete(run: Run) -> Waiting:
        for record, seen in find(run):
            if (yield from locked(run, record, seen, EXCLUSIVE, condition)) is not None:
                record.put(run.txn, None)
        return []

    return Statement(waits=run_delete, writes="DELETE", tables=_needs(tree.table))


# --- known by their text


def durably(run: Run) -> str:
    """What `PostgresDialect.durable` answers for a row: what it set, which no reload changes any more."""
    now = run.txn.synchronous_commit or run.server.synchronous_commit
    run.txn.synchronous_commit = "local" if now == "off" else now
    return run.txn.synchronous_commit


def _unlocked(run: Run, sequence: Numbers) -> Generator[Wait, None, None]:
    """Wait while ALTER SEQUENCE holds it."""
    while sequence.lock.lockers and run.txn not in sequence.lock.lockers:
        yield Wait(sequence.lock, run.txn, SHARE)


def _nextval(text: re.Match[str]) -> Statement:
    name, durable = text["name"], text["durable"]

    def run_nextval(run: Run) -> Waiting:
        sequence = sequence_named(run, name)
        if not durable and run.server.synchronous_commit == "off" and run.txn.synchronous_commit is None:
            run.server.violations.append(f"IDs of {name} were given without synchronous_commit")
        yield from _unlocked(run, sequence)
        first = sequence.given + 1
        sequence.given += run.params[0] if run.params else 1
        ids = range(first, sequence.given + 1)  # a failover leaves out 100,000
        if not durable:
            return [(id,) for id in ids]
        setting = durably(run)
        sequence.flushed = sequence.given  # it writes an empty message, and its own COMMIT waits for the disk
        return [(id, setting, False) for id in ids]

    return Statement(waits=run_nextval, writes="nextval()")


def _insert_anew(text: re.Match[str]) -> Statement:
    """Rows to which a sequence gives their IDs."""
    name, tree = text["name"], sql.parse(text.group().replace(SERVER, "server_identity()"))
    assert isinstance(tree, sql.Insert)
    inserting = _insert(tree).waits
    assert inserting is not None

    def run_insert(run: Run) -> Waiting:
        yield from _unlocked(run, sequence_named(run, name))
        return (yield from inserting(run))

    return Statement(waits=run_insert, writes="INSERT", tables=True)


def _hold(text: re.Match[str]) -> Statement:
    """A writer's row, locked, or an error."""
    said, locking, enough = text["said"], _made(text["query"]).waits, (1,) if text["one"] == "= 1" else (0, 1)
    assert locking is not None

    def run_hold(run: Run) -> Waiting:
        found = yield from locking(run)
        if len(found) not in enough:
            raise SimError("22P02", f'invalid input syntax for type integer: "{said} {len(found)}"')
        return [(1, durably(run))]

    return Statement(waits=run_hold, writes="SELECT FOR SHARE", tables=True)


def _insert_held(text: re.Match[str]) -> Statement:
    """Rows that are written where the transaction has noted that it holds the name."""
    inserting, setting = _made(f"{text['insert']} RETURNING 1").waits, text["setting"]
    assert inserting is not None

    def run_insert(run: Run) -> Waiting:
        *run.params, noted = run.params
        if not text["always"] and run.txn.noted.get(setting) != noted:
            return []
        if text["durable"]:
            durably(run)
        return (yield from inserting(run))

    return Statement(waits=run_insert, writes="INSERT", tables=True)


def _share_name(text: re.Match[str]) -> Statement:
    """A name, held with others, unless it is another's, or somebody waits to have it, or all of them, alone."""
    stands = _made(text["stands"]).rows
    assert stands is not None

    def run_share(run: Run) -> list[Row]:
        *run.params, writer = run.params
        if not stands(run) or (run.txn.whole and not text["always"]):
            return [("",)]
        for key in re.findall(KEY, text["tried"]):
            lock = run.state.named(f"advisory {key.replace('?', str(writer))}")
            queued = any(ahead.mode == EXCLUSIVE for ahead in lock.waiting or ())
            if (queued and run.txn not in (lock.lockers or ())) or not run.state.take(lock, run.txn, SHARE):
                return [("",)]
        run.txn.noted[text["setting"]] = noted = f"{run.state.identify(run.txn)}/"
        return [(noted,)]

    return Statement(rows=run_share, writes="pg_current_xact_id()", tables=True)


def _proven(text: re.Match[str]) -> Statement:
    """The proof of a claim whose name is held: notes that it is."""
    proving = _made(text["before"] + text["after"])

    def run_proof(run: Run) -> Waiting:
        claimed, *run.params = run.params
        if proving.rows is not None:
            found = proving.rows(run)
        else:
            assert proving.waits is not None
            found = yield from proving.waits(run)
        marker = str(run.state.identify(run.txn))
        if not found or run.txn.noted.get(text["setting"]) != f"{marker}/":
            return [(*row, None) for row in found]
        run.txn.noted[text["setting"]] = f"{marker}{claimed}"
        return [(*row, f"{marker}{claimed}") for row in found]

    return Statement(waits=run_proof, writes=proving.writes, tables=True)


def _lock_row(text: re.Match[str]) -> Statement:
    """The claim's row, locked, and noted where that is so."""
    locking = _made(text["lock"]).waits
    assert locking is not None

    def run_lock(run: Run) -> Waiting:
        claimed, *run.params = run.params
        if not (yield from locking(run)):
            return []
        run.txn.noted[text["setting"]] = noted = f"{run.state.identify(run.txn)}{claimed}"
        return [(noted,)]

    return Statement(waits=run_lock, writes="SELECT FOR SHARE", tables=True)


def _still_in(text: re.Match[str]) -> Statement:
    said = text["text"]

    def run_still(run: Run) -> list[Row]:
        now = str(run.state.identify(run.txn))
        if run.params != (now,):
            raise SimError("22P02", f'invalid input syntax for type integer: "{said}{now}"')
        return [(0,)]

    return Statement(rows=run_still)


def _sequence(text: re.Match[str]) -> Statement:
    name = text["name"]

    def run_sequence(run: Run) -> list[Row]:
        found = sequence_named(run, name)
        return [(found.given, found.cache, found.cycle, found.increment)]

    return Statement(rows=run_sequence)


def _create_sequence(text: re.Match[str]) -> Statement:
    name = text["name"]

    def run_create(run: Run) -> list[Row]:
        state = run.state
        if name not in state.sequences:
            state.sequences[name] = Numbers(Record(state.locks, (f"sequence {name}",)))
        return []

    return Statement(rows=run_create, writes="CREATE SEQUENCE")


def _alter_sequence(text: re.Match[str]) -> Statement:
    name = text["name"]

    def run_alter(run: Run) -> Waiting:
        lock = sequence_named(run, name).lock
        if not run.state.take(lock, run.txn, EXCLUSIVE):
            yield Wait(lock, run.txn, EXCLUSIVE)
        return []

    return Statement(waits=run_alter, writes="ALTER SEQUENCE")


def _setval(text: re.Match[str]) -> Statement:
    name = text["name"]

    def run_setval(run: Run) -> list[Row]:
        sequence = sequence_named(run, name)
        value, least = run.params
        if sequence.given >= least:
            return []
        sequence.given = sequence.flushed = value
        return [(value,)]

    return Statement(rows=run_setval, writes="setval()")


# Of those that init() makes, in its order: with it they are there.
LAST_TABLE = next(reversed(DEFINITIONS))


def _create_table(text: re.Match[str]) -> Statement:
    def run_create(run: Run) -> list[Row]:
        if made(run):
            raise SimError("42P07", f'relation "{text["name"]}" already exists')
        if text["name"] == LAST_TABLE:
            run.txn.created = True
        return []

    return Statement(rows=run_create, writes="CREATE TABLE")


def _add_column(_: re.Match[str]) -> Statement:
    """The columns of all versions are there from the start: see `tables.DEFINITIONS`."""
    return Statement(rows=lambda run: [], writes="ALTER TABLE")


def made(run: Run) -> bool:
    """Whether busrep's tables are there."""
    created = run.state.created
    return run.txn.created or (created is not None and created <= run.csn)


def _is_there(_: re.Match[str]) -> Statement:
    return Statement(rows=lambda run: [(1,)] if made(run) else [])


def _none(_: re.Match[str]) -> Statement:
    return Statement(rows=lambda _: [])


def _advisory_lock(text: re.Match[str]) -> Statement:
    """With a condition: it locks where that has a row, and is true or not once and for all."""
    mode, answer = SHARE if text["shared"] else EXCLUSIVE, ("1", "") if text["set"] else ("",)  # "": void
    stands = _made(text["stands"]).rows if text["stands"] else None

    def run_lock(run: Run) -> Waiting:
        key = text["key"]
        if "?" in key:
            writer, *run.params = run.params
            key = key.replace("?", str(writer))
        if stands is not None and not stands(run):
            return []
        lock = run.state.named(f"advisory {key}")
        while True:
            # Unlike a row's, it is not shared with newcomers while somebody waits to have it alone.
            queued = any(EXCLUSIVE in (mode, ahead.mode) for ahead in lock.waiting or ())
            if (run.txn in (lock.lockers or ()) or not queued) and run.state.take(lock, run.txn, mode):
                return [answer]
            yield Wait(lock, run.txn, mode)

    return Statement(waits=run_lock)


def _lock_timeout(text: re.Match[str]) -> Statement:
    milliseconds = int(text["milliseconds"])

    def run_set(run: Run) -> list[Row]:
        run.txn.lock_timeout = milliseconds / 1000 or None
        return []

    return Statement(rows=run_set)


def _repeatable(_: re.Match[str]) -> Statement:
    """A transaction that a caller begins: one snapshot for all of it, writes allowed."""

    def run_begin(run: Run) -> list[Row]:
        run.txn.implicit, run.txn.whole = False, True
        return []

    return Statement(rows=run_begin)


def _blockers(_: re.Match[str]) -> Statement:
    """Who shares the name, and who locks its row."""

    def run_blockers(run: Run) -> list[Row]:
        writer = str(run.params[0])
        key = "'busrep_meta'::regclass::oid::int, 0"
        if writer != "*":
            key = f"'busrep_writers'::regclass::oid::int, pg_catalog.hashtext({writer})"
        found = dict.fromkeys(run.state.named(f"advisory {key}").lockers or ())
        for record in run.state.tables["busrep_writers"].records.values():
            if writer in ("*", record.key[0]):
                found.update(dict.fromkeys(record.lockers or ()))
        return list(dict.fromkeys(run.server.described(locker) for locker in found if locker is not run.txn))

    return Statement(rows=run_blockers, tables=True)


def _save(text: re.Match[str]) -> Statement:
    """Moving a reader's positions, all or none (9.12). What a text leaves out is left out here."""
    checks_position, checks_epoch, locks, counts, asks_bootstraps, bounded, durable = (
        bool(text[name]) for name in ("old", "epoch", "lock", "count", "bootstrap", "bound", "durable")
    )
    names = ("moved", "reader", *(("epoch",) if checks_epoch else ()), "again", *(("count",) if counts else ()))
    columns = DEFINITIONS["busrep_readers"].columns
    position, epoch, saved_at, stopped = (columns.index(name) for name in ("position", "epoch", "saved_at", "stopped"))
    state, begun = (DEFINITIONS["busrep_bootstraps"].columns.index(name) for name in ("state", "id"))

    def run_save(run: Run) -> Waiting:
        given = dict(zip(names, run.params, strict=True))
        table, txn = run.state.tables["busrep_readers"], run.txn
        if not durable and (txn.synchronous_commit or run.server.synchronous_commit) == "off":
            run.server.violations.append("positions were saved without synchronous_commit")
        bootstraps = run.state.tables["busrep_bootstraps"]

        def loading(stream: str, known: str | None) -> bool:
            record = bootstraps.records.get((given["reader"], stream))
            seen = None if record is None else visible(record, run)
            return seen is not None and (seen[state] not in LOADED or known not in (None, seen[begun]))

        def above(name: str, looked: int, new: int) -> bool:
            meta = visible(run.state.tables["busrep_meta"].records["epoch",], run)
            sequence = run.state.sequences.get(name.strip('"'))
            if meta is None or meta[1] != given["epoch"] or sequence is None:
                return False
            return new > (sequence.given if sequence.called else looked)  # as pg_sequence_last_value() tells it

        def where(old: int) -> Function:
            return lambda row, _: (
                not (checks_position and row[position] != old) and not (checks_epoch and row[epoch] != given["epoch"])
            )

        found = []
        for stream, writer, old, new, known, name, looked in json.loads(given["moved"]):
            if (asks_bootstraps and loading(stream, known)) or (bounded and above(name, looked, new)):
                continue
            record, condition = table.records.get((given["reader"], stream, writer)), where(old)
            seen = None if record is None else visible(record, run)
            if record is None or seen is None or not condition(seen, run):
                continue
            if locks and (yield from locked(run, record, seen, EXCLUSIVE, condition)) is None:
                continue
            found.append((record, seen, new))
        if not counts or len(found) == given["count"]:
            for record, seen, new in found:
                newest = (yield from locked(run, record, seen, EXCLUSIVE, None)) if not locks else record.newest(txn)
                if newest is not None:
                    values = list(newest)
                    values[position], values[saved_at], values[stopped] = new, run.server.wall(), None
                    record.put(txn, tuple(values))
        return [(*record.key[1:3], durably(run)) if durable else record.key[1:3] for record, _, _ in found]

    return Statement(waits=run_save, writes="UPDATE", tables=True)


SPECIAL: Sequence[tuple[str, Callable[[re.Match[str]], Statement]]] = (
    (
        r"""SELECT nextval\('"?(?P<name>\w+)"?'\)(?P<durable>, set_config\(.*, true\), CASE WHEN .* END)?"""
        r"(?: FROM generate_series\(1, \?\))?",
        _nextval,
    ),
    (
        r"INSERT INTO busrep_facts \(stream, writer, id, idx, row\) "
        r"""(?:SELECT |VALUES \()\?, \?, nextval\('"(?P<name>\w+)"'\), 0, .*""",
        _insert_anew,
    ),
    (
        r"(?P<insert>INSERT INTO busrep_facts .*) WHERE (?P<always>coalesce\(true, )?"
        r"current_setting\('(?P<setting>busrep\.holds_\d+)', true\) = \?\)?"
        r"(?P<durable> AND set_config\(.*, true\) <> '')? RETURNING 1",
        _insert_held,
    ),
    (
        r"SELECT CASE WHEN NOT EXISTS \((?P<stands>SELECT 1 FROM busrep_writers WHERE .*)\) THEN '' "
        r"WHEN (?:current_setting\('transaction_isolation'\) <> 'read committed'|(?P<always>false)) THEN '' "
        rf"(?P<tried>(?:WHEN NOT (?:pg_try_advisory_xact_lock_shared\({KEY}\)|true) THEN '' ){{2}})"
        r"ELSE set_config\('(?P<setting>busrep\.holds_\d+)', pg_current_xact_id\(\)::text \|\| '/', true\) END",
        _share_name,
    ),
    (
        r"(?P<before>SELECT .*), CASE WHEN current_setting\('(?P<setting>busrep\.holds_\d+)', true\) = "
        r"pg_current_xact_id\(\)::text \|\| '/' THEN set_config\('busrep\.holds_\d+', pg_current_xact_id\(\)::text "
        r"\|\| \?, true\) END(?P<after> FROM busrep_writers WHERE .*)",
        _proven,
    ),
    (
        r"SELECT set_config\('(?P<setting>busrep\.holds_\d+)', pg_current_xact_id\(\)::text \|\| \?, true\) "
        r"FROM \((?P<lock>SELECT .* FOR SHARE)\) AS c",
        _lock_row,
    ),
    (
        r"SELECT CASE WHEN count\(\*\) (?P<one>= 1|< 2) THEN 1 "
        r"ELSE \('(?P<said>[^']+) ' \|\| count\(\*\)::text\)::int END, set_config\(.*, true\) "
        r"FROM \((?P<query>SELECT pg_current_xact_id\(\)::text FROM busrep_writers .* FOR SHARE)\) AS c",
        _hold,
    ),
    (
        r"SELECT CASE WHEN s\.is_called THEN s\.last_value ELSE s\.last_value - 1 END, p\.seqcache, p\.seqcycle, "
        r"""p\.seqincrement FROM "(?P<name>\w+)" s, pg_sequence p WHERE p\.seqrelid = '"(?P=name)"'::regclass""",
        _sequence,
    ),
    (
        r"SELECT CASE WHEN pg_current_xact_id\(\)::text = \? THEN 0 ELSE "
        r"\('(?P<text>[^']+)' \|\| pg_current_xact_id\(\)::text\)::int END",
        _still_in,
    ),
    (r'CREATE SEQUENCE IF NOT EXISTS "(?P<name>\w+)" CACHE 1 NO CYCLE', _create_sequence),
    (r'ALTER SEQUENCE "(?P<name>\w+)" OWNED BY NONE', _alter_sequence),
    (
        r"""SELECT setval\('"(?P<name>\w+)"', \?\) FROM "(?P=name)" """
        r"WHERE CASE WHEN is_called THEN last_value ELSE last_value - 1 END < \?",
        _setval,
    ),
    (r"CREATE (?:UNLOGGED )?TABLE (?P<name>\w+) .*", _create_table),
    (r"CREATE (?:OR REPLACE FUNCTION|TRIGGER) busrep_take_name.*", _none),  # for processes of older versions
    (r"ALTER TABLE \w+ ADD COLUMN \w+ text", _add_column),
    (r"SELECT 1 FROM pg_class WHERE relname = 'busrep_meta' AND pg_table_is_visible\(oid\)", _is_there),
    (r"SELECT c\.oid::regclass::text FROM pg_class c WHERE .* row_security_active\(c\.oid\) .*", _none),
    (r"SELECT n\.nspname, .* FROM pg_namespace n JOIN pg_class m .*", _none),  # there is one schema
    (
        r"SELECT (?P<set>set_config\('busrep\.takes_name', '1', true\), )?"
        rf"pg_advisory_xact_lock(?P<shared>_shared)?\((?P<key>\d+|{KEY})\)"
        r"(?: WHERE EXISTS \((?P<stands>SELECT .*)\))?",
        _advisory_lock,
    ),
    (r"BEGIN ISOLATION LEVEL REPEATABLE READ", _repeatable),
    (r"SET LOCAL lock_timeout = (?P<milliseconds>\d+)", _lock_timeout),
    (
        r"SELECT DISTINCT a\.pid, a\.application_name, .* FROM pg_locks t .*", _blockers
    ),
    (
        r"WITH v AS \(SELECT \* FROM \(SELECT .* FROM json_array_elements\(\?::json\)\) AS j\), "
        r"hit AS \(SELECT r\.stream, r\.writer, v\.new FROM busrep_readers r JOIN v "
        r"ON r\.stream = v\.stream AND r\.writer = v\.writer(?P<old> AND r\.position = v\.old)? "
        r"WHERE r\.reader = \?(?P<epoch> AND r\.epoch = \?)?"
        r"(?P<bootstrap> AND NOT EXISTS \(SELECT 1 FROM busrep_bootstraps b .*?<> v\.begun\)\))?"
        r"(?P<bound> AND v\.new <= CASE .*? END)? ORDER BY r\.stream, r\.writer"
        r"(?P<lock> FOR UPDATE OF r)?\), moved AS \(UPDATE busrep_readers r SET position = hit\.new, "
        r"saved_at = clock_timestamp\(\), stopped = NULL FROM hit WHERE r\.reader = \? AND r\.stream = hit\.stream "
        r"AND r\.writer = hit\.writer(?P<count> AND \(SELECT count\(\*\) FROM hit\) = \?)? RETURNING r\.stream\) "
        r"SELECT stream, writer(?P<durable>, set_config\(.*, true\))? FROM hit",
        _save,
    ),
)  # fmt: skip
