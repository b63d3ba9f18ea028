"""Expressions and queries on the simulated tables, as Python functions: text to text, which Python compiles once.

What statements.py makes of whole statements is made of these.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from tests.proof.sim import sql
from tests.proof.sim.sql import Expression, Unknown, aggregated, conjuncts
from tests.proof.sim.tables import (
    DEFINITIONS,
    Numbers,
    Record,
    SimError,
    SimUnknownMarker,
    State,
    Table,
    Transaction,
    Values,
)

Row = tuple[Any, ...]


class Run:
    """One statement being run: what it may look at. ``outer``: the row of the query around it."""

    __slots__ = ("csn", "outer", "params", "server", "session", "state", "txn")

    def __init__(
        self, server: Any, session: Any, state: State, txn: Transaction, csn: int, params: Sequence[Any]
    ) -> None:
        self.server, self.session, self.state = server, session, state
        self.txn, self.csn, self.params = txn, csn, params
        self.outer: Any = None


Function = Callable[[Any, Run], Any]
Rows = Callable[[Run], list[Row]]


@attrs.define
class Scope:
    """The columns that an expression may name. ``grouped``: it is evaluated over a list of rows."""

    columns: dict[tuple[str | None, str], int] = attrs.field(factory=dict)
    width: int = 0
    outer: Scope | None = None
    grouped: bool = False

    def add(self, alias: str, columns: Iterable[str]) -> None:
        """Columns of one more source, to the right of those that are there."""
        for column in columns:
            self.columns[alias, column] = self.width
            self.columns.setdefault((None, column), self.width)
            self.width += 1


def scope_of(table: str, *others: tuple[str, Iterable[str]]) -> Scope:
    """The columns of a table, and of what stands to their right."""
    scope = Scope()
    scope.add(table, DEFINITIONS[table].columns)
    for alias, columns in others:
        scope.add(alias, columns)
    return scope


# --- expressions


class Code:
    """Python's text of expressions, in which ``row`` (of a group: the rows) and ``run`` are what they look at."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = dict(HELPERS)
        self._numbers = itertools.count()

    def name(self, value: Any) -> str:
        """A name for something that has no text."""
        name = self.fresh()
        self.names[name] = value
        return name

    def fresh(self) -> str:
        """A name that is not used yet."""
        return f"x{next(self._numbers)}"

    def function(self, text: str, args: str = "row, run") -> Any:
        """A function that gives what the text says."""
        return eval(f"lambda {args}: {text}", self.names)

    def written(self, expression: Expression, scope: Scope) -> str:
        """The text of an expression. Raises Unknown, KeyError."""
        write: Callable[[Code, Expression, Scope], str] = WRITERS[expression[0]]
        return write(self, expression, scope)

    def listed(self, expressions: Iterable[Expression], scope: Scope) -> str:
        """The text of a tuple of them."""
        return f"({''.join(self.written(one, scope) + ', ' for one in expressions)})"

    def unless_none(self, value: str, then: str, name: str) -> str:
        """``then``, which says ``name`` for the value, unless that is None."""
        return f"(None if ({name} := {value}) is None else {then})"


def compiled(expression: Expression, scope: Scope) -> Function:
    """The expression as a function of a row (or a list of rows, when grouped) and the run."""
    code = Code()
    function: Function = code.function(code.written(expression, scope))
    return function


def listed(expressions: Iterable[Expression], scope: Scope) -> Function:
    """A function that gives the tuple of the expressions."""
    code = Code()
    function: Function = code.function(code.listed(expressions, scope))
    return function


def _constant(_: Code, expression: Expression, __: Scope) -> str:
    return repr(expression[1])


def _param(_: Code, expression: Expression, __: Scope) -> str:
    return f"run.params[{expression[1]}]"


def _column(_: Code, expression: Expression, scope: Scope) -> str:
    name = expression[1:]
    at = scope.columns.get(name)
    if at is not None:
        return f"row[0][{at}]" if scope.grouped else f"row[{at}]"
    if scope.outer is None:
        raise Unknown(f"column {name}")
    return f"run.outer[{scope.outer.columns[name]}]"


def _and(code: Code, expression: Expression, scope: Scope) -> str:
    return f"({' and '.join(code.written(one, scope) for one in conjuncts(expression))})"


def _or(code: Code, expression: Expression, scope: Scope) -> str:
    left, right = (code.written(one, scope) for one in expression[1:])
    return f"({left} or {right})"


SIGNS = {"=": "==", "<>": "!="}


def _op(code: Code, expression: Expression, scope: Scope) -> str:
    sign, (left, right) = SIGNS.get(expression[1], expression[1]), expression[2:]
    one = code.fresh()
    # No plan compares a column with a parameter that is NULL.
    if (left[0] == "column" and right[0] == "param") or (right[0] == "const" and right[1] is not None):
        return code.unless_none(code.written(left, scope), f"{one} {sign} {code.written(right, scope)}", one)
    other = code.fresh()
    compared = code.unless_none(code.written(right, scope), f"{one} {sign} {other}", other)
    return code.unless_none(code.written(left, scope), compared, one)


def _in(code: Code, expression: Expression, scope: Scope) -> str:
    query = code.name(query_of(expression[2], scope))
    return f"(({code.written(expression[1], scope)},) in {query}(row, run))"


def _scalar(code: Code, expression: Expression, scope: Scope) -> str:
    rows = code.fresh()
    return f"({rows}[0][0] if ({rows} := {code.name(query_of(expression[1], scope))}(row, run)) else None)"


def query_of(tree: sql.Select, scope: Scope) -> Function:
    """A query within a query: its rows, seen from a row of the outer one."""
    rows = rows_of(tree, scope)

    def run_query(row: Any, run: Run) -> list[Row]:
        outer, run.outer = run.outer, row
        try:
            return rows(run)
        finally:
            run.outer = outer

    return run_query


CASTS: dict[str, Callable[[Any], Any]] = {
    "bigint": int, "int": int, "float8": float, "text": str, "json": json.loads,
    "bigint[]": lambda values: [int(value) for value in values],
    "int[]": lambda values: [int(value) for value in values],
    "xid8": int,
}  # fmt: skip


def _cast(code: Code, expression: Expression, scope: Scope) -> str:
    if expression[2] == ("call", "pg_current_xact_id", ()):
        return "str(run.state.identify(run.txn))"
    value = code.fresh()
    cast = f"{code.name(CASTS[expression[1]])}({value})"
    return code.unless_none(code.written(expression[2], scope), cast, value)


def _json(code: Code, expression: Expression, scope: Scope) -> str:
    return f"json_text({code.written(expression[1], scope)}[{expression[2]}])"


def _json_text(found: Any) -> str | None:
    if isinstance(found, str) or found is None:
        return found
    return str(found) if type(found) is int else json.dumps(found)


def _case(code: Code, expression: Expression, scope: Scope) -> str:
    branches = [f"{code.written(then, scope)} if {code.written(when, scope)} else " for when, then in expression[1]]
    return f"({''.join(branches)}{code.written(expression[2], scope)})"


def _call(code: Code, expression: Expression, scope: Scope) -> str:
    _, name, args = expression
    if name in sql.AGGREGATES:
        return _aggregate(code, name, args, scope)
    return FUNCTIONS[name].format(*(code.written(arg, scope) for arg in args), args=code.listed(args, scope))


def _aggregate(code: Code, name: str, args: tuple[Expression, ...], scope: Scope) -> str:
    if not scope.grouped:
        raise Unknown(f"{name} here")
    if args == (("star",),):
        return "len(row)"
    value = code.written(args[0], attrs.evolve(scope, grouped=False))
    if name == "count":
        return f"sum([{value} is not None for row in row])"
    found = code.fresh()
    return f"{name}([{found} for row in row if ({found} := {value}) is not None], default=None)"


WRITERS: dict[str, Callable[[Code, Expression, Scope], str]] = {
    "const": _constant, "param": _param, "column": _column, "and": _and, "or": _or, "op": _op, "in": _in,
    "scalar": _scalar, "cast": _cast, "json": _json, "case": _case, "call": _call,
}  # fmt: skip


def _coalesce(values: Row) -> Any:
    return next((value for value in values if value is not None), None)


def _greatest(values: Row) -> Any:
    return max((value for value in values if value is not None), default=None)


def _xact_status(run: Run, xid: int) -> str:
    if xid >= run.state.next_xid:
        raise SimUnknownMarker(xid)
    return run.state.statuses.get(xid, "aborted")


# {0} is the first argument, {args} the tuple of them all.
FUNCTIONS = {
    "coalesce": "coalesce({args})",
    "greatest": "greatest({args})",
    "clock_timestamp": "run.server.wall()",
    "statement_timestamp": "(1.7e9 + run.server.wall())",  # the only one whose own value counts
    "now": "(run.txn.started - run.server.behind)",
    "extract": "{0}",  # epoch FROM a difference: timestamps are seconds here
    "pg_is_in_recovery": "run.server.follows",
    "pg_xact_status": "xact_status(run, {0})",
    "pg_backend_pid": "run.session.pid",
    "string_to_array": "{0}.split({1})",
    "chr": "chr({0})",
    "nullif": "nullif({0}, {1})",
    "server_identity": "run.server.identity",
    "current_setting": "current_setting(run, {0})",
    "set_config": "set_config(run, {0}, {1})",
    "nextval": "nextval(run, {0})",
}


def _current_setting(run: Run, name: str) -> str:
    if name != "synchronous_commit":
        raise NotImplementedError(name)
    return run.txn.synchronous_commit or run.server.synchronous_commit


def _set_config(run: Run, name: str, value: str) -> str:
    _current_setting(run, name)
    run.txn.synchronous_commit = value
    return value


def _nullif(value: Any, other: Any) -> Any:
    return None if value == other else value


def sequence_named(run: Run, name: str) -> Numbers:
    """A sequence. Raises SimError when it does not exist."""
    found: Numbers | None = run.state.sequences.get(name)
    if found is None:
        raise SimError("42P01", f'relation "{name}" does not exist')
    return found


def _nextval(run: Run, name: str) -> int:
    """Of a sequence that nobody has locked."""
    sequence: Numbers = sequence_named(run, name.strip('"'))
    sequence.given += 1
    return sequence.given


HELPERS = {
    "nullif": _nullif,
    "current_setting": _current_setting, "set_config": _set_config, "coalesce": _coalesce, "greatest": _greatest,
    "xact_status": _xact_status, "json_text": _json_text, "nextval": _nextval,
}  # fmt: skip


# --- finding rows


def matching(name: str, where: Expression | None, scope: Scope) -> Callable[[Run], list[tuple[Record, Values]]]:
    """The rows of a table that the run's snapshot shows and the condition holds for, with their records."""
    among, rest = candidates(name, where, scope)
    condition = None if rest is None else compiled(rest, scope)

    def find(run: Run) -> list[tuple[Record, Values]]:
        txn, csn = run.txn, run.csn
        found = []
        for record in among(run.state.tables[name], run):
            if record.owner is txn:
                values = record.pending
            elif record.csn <= csn:
                values = record.values
            else:
                values = record.at(csn)
            if values is not None and (condition is None or condition(values, run)):
                found.append((record, values))
        return found

    return find


def visible(record: Record, run: Run) -> Values | None:
    """The version that the run's snapshot shows."""
    if record.owner is run.txn:
        return record.pending
    return record.values if record.csn <= run.csn else record.at(run.csn)


def candidates(
    name: str, where: Expression | None, scope: Scope
) -> tuple[Callable[[Table, Run], Iterable[Record]], Expression | None]:
    """Where to look, at one key, at those with a common prefix, or everywhere; and the conditions left to check."""
    fixed: dict[int, Expression] = {}
    definition = DEFINITIONS[name]
    rest: Expression | None = None
    for one in conjuncts(where):
        at = scope.columns.get(one[2][1:]) if one[:2] == ("op", "=") and one[2][0] == "column" else None
        if at is not None and at not in fixed and _fixed(one[3], scope):
            fixed[at] = one[3]
            if at in definition.key[: definition.prefix or None]:
                continue
        rest = one if rest is None else ("and", rest, one)
    if all(at in fixed for at in definition.key):
        exact = listed([fixed[at] for at in definition.key], scope)

        def by_key(table: Table, run: Run) -> Iterable[Record]:
            record = table.records.get(exact(None, run))
            return () if record is None else (record,)

        return by_key, rest
    prefix = definition.key[: definition.prefix]
    if prefix and all(at in fixed for at in prefix):
        common = listed([fixed[at] for at in prefix], scope)

        def by_prefix(table: Table, run: Run) -> Iterable[Record]:
            bucket = table.buckets.get(common(None, run))
            return () if bucket is None else bucket.values()

        return by_prefix, rest
    return lambda table, run: table.records.values(), where


def _fixed(expression: Expression, scope: Scope) -> bool:
    if expression[0] == "column":
        return expression[1:] not in scope.columns
    return expression[0] in ("param", "const")


# --- SELECT


def reads_tables(tree: sql.Select) -> bool:
    """Whether it needs tables of busrep's."""
    return any(
        source.table not in (None, "effects") or (source.query is not None and reads_tables(source.query))
        for source in tree.sources
    )


def claims(tree: sql.Select) -> bool:
    """Whether this is how a write transaction proves its claim: it asks for the marker in the writer's row."""
    marker = ("cast", "text", ("call", "pg_current_xact_id", ()))
    return any(value == marker for value, _ in tree.items) and tree.sources[0].table == "busrep_writers"


def note_claim(run: Run) -> None:
    """What the client takes its claim to be, to compare with what it is when the transaction commits."""
    writer, incarnation, *_ = run.params
    run.txn.claims[writer] = incarnation


def rows_of(tree: sql.Select, outer: Scope | None = None) -> Rows:
    """A query without locks. ``outer``: the columns of the query around it."""
    scope = Scope(outer=outer)
    source = _sources(tree, scope)
    if tree.group or any(aggregated(value) for value, _ in tree.items):
        return _grouped(tree, scope, source)
    code = Code()
    items = code.listed([value for value, _ in tree.items], scope)
    pick: Callable[[list[Row], Run], list[Row]] = code.function(f"[{items} for row in rows]", "rows, run")
    noting = bool(tree.sources) and claims(tree)
    if not (noting or tree.order or tree.limit or tree.offset):
        return lambda run: pick(source(run), run)
    order = [(compiled(key, scope), falling) for key, falling in tree.order]
    offset, limited = (None if one is None else compiled(one, Scope()) for one in (tree.offset, tree.limit))
    ties = tree.ties

    def run_rows(run: Run) -> list[Row]:
        rows = source(run)
        for key, falling in reversed(order):
            rows.sort(key=lambda row: key(row, run), reverse=falling)
        if offset is not None:
            rows = rows[offset(None, run) :]
        if limited is not None:
            limit = limited(None, run)
            if ties and 0 < limit < len(rows):
                last = [key(rows[limit - 1], run) for key, _ in order]
                while limit < len(rows) and [key(rows[limit], run) for key, _ in order] == last:
                    limit += 1
            rows = rows[:limit]
        if noting and rows:
            note_claim(run)
        return pick(rows, run)

    return run_rows


def _grouped(tree: sql.Select, scope: Scope, source: Rows) -> Rows:
    within = attrs.evolve(scope, grouped=True)
    items = listed([value for value, _ in tree.items], within)
    key = listed(tree.group, scope) if tree.group else None
    having = None if tree.having is None else compiled(tree.having, within)
    if tree.order or tree.limit:
        raise Unknown("ORDER BY or LIMIT of groups")

    def run_groups(run: Run) -> list[Row]:
        rows = source(run)
        groups: dict[Row, list[Row]] = {} if key is not None else {(): rows}
        if key is not None:
            for row in rows:
                groups.setdefault(key(row, run), []).append(row)
        return [items(group, run) for group in groups.values() if having is None or having(group, run)]

    return run_groups


def _sources(tree: sql.Select, scope: Scope) -> Rows:
    """The rows of FROM and WHERE; ``scope`` gets their columns."""
    if not tree.sources:
        return lambda run: [()]
    first = tree.sources[0]
    if len(tree.sources) == 1 and first.table is not None:
        if first.table.startswith("busrep_seq_"):
            return _source(first, scope)
        scope.add(first.alias, DEFINITIONS[first.table].columns)
        find = matching(first.table, tree.where, scope)
        return lambda run: [values for _, values in find(run)]
    joined = _source(first, scope)
    for right in tree.sources[1:]:
        joined = _join(joined, right, scope)
    if tree.where is None:
        return joined
    code = Code()
    condition = code.written(tree.where, scope)
    such: Callable[[list[Row], Run], list[Row]] = code.function(f"[row for row in rows if {condition}]", "rows, run")
    return lambda run: such(joined(run), run)


def _source(source: sql.Source, scope: Scope) -> Rows:
    if source.table is not None and source.table.startswith("busrep_seq_"):
        return _of_sequence(source.table, source.alias, scope)
    if source.table is not None:
        find = matching(source.table, None, Scope())
        scope.add(source.alias, DEFINITIONS[source.table].columns)
        return lambda run: [values for _, values in find(run)]
    if source.query is not None:
        scope.add(source.alias, [name for _, name in source.query.items])
        return rows_of(source.query)
    assert source.call is not None
    name, args = source.call
    values = listed(args, Scope())
    scope.add(source.alias, source.columns or ())
    if name == "json_array_elements":
        return lambda run: [(each,) for each in values(None, run)[0]]
    if name == "unnest":
        return lambda run: list(zip(*values(None, run), strict=True))
    raise Unknown(f"FROM {name}()")


def _of_sequence(name: str, alias: str, scope: Scope) -> Rows:
    scope.add(alias, ("last_value", "is_called"))

    def rows(run: Run) -> list[tuple[int, bool]]:
        sequence = sequence_named(run, name)
        return [(sequence.given + (not sequence.called), sequence.called)]

    return rows


def _join(left: Rows, source: sql.Source, scope: Scope) -> Rows:
    before = scope.width
    right = _source(source, scope)
    nothing = (None,) * (scope.width - before)
    assert source.on is not None
    code = Code()
    on = code.written(source.on, scope)
    paired: Callable[[Row, list[Row], Run], list[Row]] = code.function(
        f"[row for other in others if (row := left + other) and {on}]", "left, others, run"
    )
    outer = source.outer

    def run_join(run: Run) -> list[Row]:
        found: list[Row] = []
        others = right(run)
        for row in left(run):
            found += paired(row, others, run) or ([row + nothing] if outer else [])
        return found

    return run_join
