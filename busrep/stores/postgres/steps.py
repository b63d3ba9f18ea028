"""How steps of plans go to PostgreSQL, on a connection of psycopg's of either kind (psycopg 3).

Statements go out as the simple protocol's text with the values quoted by the client: BEGIN and the claim's lock are
one round trip, INSERT and COMMIT another; of facts that are appended all of it is one. Measured against the driver's
prepared statements in pipeline mode: 20 % more facts/s, at half the processor time. On connections for questions the
server keeps plans all the same: see prepared.py.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from busrep.core.failures import LIMIT_STATES
from busrep.errors import MissingExtra
from busrep.stores.plans import Answers, Control, Plan, Signal, Sql, Step, T, Unanswered, run_async
from busrep.stores.postgres.dialect import LOCKS, SNAPSHOT
from busrep.stores.postgres.prepared import SHARED_SESSION, Prepared
from busrep.stores.server import by_state, final

try:
    import psycopg
    from psycopg.pq import ExecStatus
    from psycopg.rows import tuple_row
except ImportError as missing:
    raise MissingExtra("postgres", "the PostgreSQL store") from missing

AnyConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]

CONTROLS = {
    Control.BEGIN: "BEGIN ISOLATION LEVEL READ COMMITTED",  # whatever the default is here
    Control.SNAPSHOT: "; ".join(SNAPSHOT),
    Control.COMMIT: "COMMIT",
    Control.ROLLBACK: "ROLLBACK",
}

# Cursors that quote the values themselves, and never prepare.
QUOTING = (psycopg.ClientCursor, psycopg.AsyncClientCursor)

# What psycopg raises: of text that has no UTF-8, Python's own.
DRIVER_ERRORS = (psycopg.Error, UnicodeEncodeError)


def translated(error: Exception, *, closed: bool = False) -> Exception:
    """The signal or error of busrep that this driver error is: StatementRefused when it is the statement's fault.

    ``closed``: whether the connection is closed after it. No fault of a statement closes a connection.
    """
    state = getattr(error, "sqlstate", None)
    lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if state is not None and state.startswith(LIMIT_STATES):  # operational to psycopg, and refused each time
        lost = False
    return by_state(error, state, operational=closed or lost)


def composed(steps: Sequence[Step], prepared: Prepared | None) -> tuple[bytes, list[Any] | None]:
    """All steps as one text, and its parameters."""
    texts: list[str] = []
    params: list[Any] = []
    for step in steps:
        if isinstance(step, Control):
            texts.append(CONTROLS[step])
        else:
            call = prepared.call(step.text) if prepared is not None and step.repeated else None
            texts.append(call or step.text.replace("?", "%s"))
            params += step.params
    return "; ".join(texts).encode(), params or None


async def settled(answer: Any) -> Any:
    """What a cursor's method gives: one of asyncio's has to be waited for."""
    return await answer if inspect.isawaitable(answer) else answer


async def fetched(cursor: Any) -> list[tuple[Any, ...]]:
    """The rows of a cursor of either kind; none of a statement that gives none."""
    result = cursor.pgresult  # `description` would make an object of each column
    gives = result is not None and result.status == ExecStatus.TUPLES_OK
    rows: list[tuple[Any, ...]] = await settled(cursor.fetchall()) if gives else []
    return rows


def _cursor(connection: AnyConnection, steps: Sequence[Step]) -> Any:
    """One statement alone the driver may prepare, where the connection is set up so: it is the caller's, then."""
    on_loop = isinstance(connection, psycopg.AsyncConnection)
    prepares = connection.prepare_threshold is not None and not issubclass(connection.cursor_factory, QUOTING)
    if prepares and len(steps) == 1 and isinstance(steps[0], Sql):
        kind: Any = psycopg.AsyncCursor if on_loop else psycopg.Cursor
    else:
        kind = psycopg.AsyncClientCursor if on_loop else psycopg.ClientCursor
    return kind(connection, row_factory=tuple_row)


async def execute_steps(connection: AnyConnection, steps: tuple[Step, ...]) -> Answers:
    """Run steps in one round trip; on a connection that is not asyncio's without waiting for an event loop. Steps
    that commit, and have the server bound their waits for locks, are not cancelled when they are late."""
    if not steps:
        return []
    cursor = _cursor(connection, steps)
    found = getattr(connection, "prepared", None)
    prepared = found if isinstance(found, Prepared) else None  # the caller's connection may have something of that name
    answers: Answers = []
    if hasattr(connection, "left_alone"):  # one of the store's own
        bounded = any(isinstance(one, Sql) and one.text.startswith(LOCKS) for one in steps)
        connection.left_alone = bounded and Control.COMMIT in steps
    try:
        await settled(cursor.execute(*composed(steps, prepared)))
        for step in steps:
            if isinstance(step, Sql):
                answers.append(await fetched(cursor))
            elif step is Control.COMMIT:
                _committed(cursor.statusmessage)
            elif step is Control.SNAPSHOT:
                cursor.nextset()  # its second statement's
            cursor.nextset()
    except DRIVER_ERRORS as error:
        if prepared is not None and getattr(error, "sqlstate", None) in SHARED_SESSION:
            prepared.give_up()  # the question works without
            raise translated(error, closed=True) from error
        raise translated(error, closed=connection.closed) from error
    return answers


def _committed(status: str | None) -> None:
    """COMMIT of a transaction in which a statement failed rolls back, and reports no error."""
    if status != "COMMIT":
        raise psycopg.errors.InFailedSqlTransaction("a statement of this transaction had failed: rolled back")


async def on_connection(connection: AnyConnection, plan: Plan[T], within: float | None = None) -> T:
    """Run a plan on a connection of either kind; signals that are left become errors. ``within``: seconds for an answer
    to a step, on a connection of asyncio's, or Unavailable; None for no deadline."""

    async def execute(steps: tuple[Step, ...]) -> Answers:
        if not isinstance(connection, psycopg.AsyncConnection):
            return await execute_steps(connection, steps)
        try:
            async with asyncio.timeout(within):
                return await execute_steps(connection, steps)
        except TimeoutError as error:
            raise Unanswered("PostgreSQL", f"no answer within {within:g} s") from error

    try:
        return await run_async(plan, execute)
    except Signal as signal:
        raise final(signal) from signal.cause
